"""Fixtures of all tests. One thread: the tests' matrices are small, and results then do not depend on the machine's cores."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import pytest  # noqa: E402
import torch  # noqa: E402

import ppo_continuous  # noqa: E402
import sac_continuous  # noqa: E402

TINY = {
    "ppo_continuous": {"total_timesteps": 256, "num_steps": 32, "num_minibatches": 4, "update_epochs": 2, "num_envs": 2},
    "sac_continuous": {"total_timesteps": 240, "learning_starts": 100, "batch_size": 32, "buffer_size": 200, "log_freq": 40},
}
Train = Callable[..., Path]


@pytest.fixture(params=[ppo_continuous, sac_continuous], ids=["ppo", "sac"])
def script(request: pytest.FixtureRequest) -> ModuleType:
    """Each of the single-agent scripts in turn."""
    return request.param


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Runs a script's `main` in an empty folder with a tiny budget, and returns the run folder."""
    monkeypatch.chdir(tmp_path)

    def run(script: ModuleType, **overrides: Any) -> Path:
        defaults = {"env_id": "Pendulum-v1", "eval_freq": 0, "eval_episodes": 2, "cuda": False}
        before = set((tmp_path / "runs").glob("*"))
        script.main(script.Args(**defaults | TINY[script.__name__] | overrides))
        (folder,) = set((tmp_path / "runs").glob("*")) - before
        return folder

    return run


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run's saved agent."""
    return torch.load(folder / "model.pt", weights_only=True)["agent"]
