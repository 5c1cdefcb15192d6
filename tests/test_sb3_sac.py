"""The runner of Stable-Baselines3's SAC, with a library that stands for it: what is trained, evaluated and reported."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import read_scalars
from gymnasium.vector import SyncVectorEnv

from benchmark.runs import read_all

script: Any = import_module("benchmark.sb3_sac")


class Policy(torch.nn.Linear):
    """A module, as the library's policies are."""

    def scale_action(self, actions: np.ndarray) -> np.ndarray:
        """Pendulum's torques, from -2 to 2, to [-1, 1]."""
        return actions / 2.0


class SAC:
    """Notes the steps that it is asked to learn. Its actions are as large as this number of thousands."""

    def __init__(self, policy: str, env: Any, **settings: Any) -> None:
        self.env, self.settings, self.learned = env, {"policy": policy} | settings, list[tuple[int, bool]]()
        self.policy = Policy(1, 1)
        made.append(self)

    def get_env(self) -> SyncVectorEnv:
        """The environment as a vector."""
        return SyncVectorEnv([lambda: self.env])

    def learn(self, total: int, reset_num_timesteps: bool) -> None:
        """Learns nothing."""
        self.learned.append((total, reset_num_timesteps))

    def predict(self, obs: np.ndarray, deterministic: bool) -> tuple[np.ndarray, None]:
        """The same action for all observations."""
        assert deterministic
        return np.full((len(obs), 1), 0.002 * sum(total for total, _ in self.learned), dtype=np.float32), None


made = list[SAC]()
WORDS = "--env-id Pendulum-v1 --seed 3 --total-timesteps 250 --eval-freq 100 --eval-episodes 2 --no-cuda"


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder of its own, and no other models."""
    monkeypatch.chdir(tmp_path)
    module: Any = ModuleType("stable_baselines3")
    module.SAC = SAC
    monkeypatch.setitem(sys.modules, "stable_baselines3", module)
    made.clear()


def test_a_stopped_run_begins_anew() -> None:
    """In another folder, with the arguments of the first one and a new model: a buffer is not saved."""
    first = script.main(script.parse_args(script.Args, WORDS.split()))
    second = script.main(script.parse_args(script.Args, ["--resume", str(first)]))
    assert first != second
    assert [model.settings["learning_starts"] for model in made] == [10_000] * 2
    assert [model.learned for model in made] == [[(100, False)] * 3] * 2
    assert read_scalars(second)["eval/return_mean"] == read_scalars(first)["eval/return_mean"]


def test_a_run_that_the_report_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns between two evaluations and evaluates as `sac_continuous.py` does, in the task's units."""
    actions = list[float]()
    step = script.sac_continuous.step_envs

    def spy(envs: Any, x: np.ndarray) -> Any:
        actions.append(float(x[0, 0]))
        return step(envs, x)

    monkeypatch.setattr(script.sac_continuous, "step_envs", spy)
    folder = script.main(script.parse_args(script.Args, [*WORDS.split(), "--learning-starts", "70"]))
    (model,) = made
    assert model.settings == {"policy": "MlpPolicy", "learning_starts": 70, "seed": 3, "device": "cpu"}
    assert model.learned == [(100, False)] * 3  # 250 is rounded up
    assert sorted(set(np.round(actions, 3))) == [0.1, 0.2, 0.3]
    steps = [step for step, _ in read_scalars(folder)["eval/return_mean"]]
    assert steps == [100, 200, 300]
    (run,), notes = read_all([folder])
    assert (run.exp_name, run.seed, run.state, notes) == ("sb3_sac", 3, "finished", [])
