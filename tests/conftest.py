"""Fixtures of all tests. One thread: the matrices are small, and results then do not depend on the number of cores."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # except in tests/test_compile.py
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (with Ray's 15 its processes wait for all other tests)
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import pytest  # noqa: E402
import torch  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from tqdm import tqdm  # noqa: E402

import ppo_continuous  # noqa: E402
import ppo_selfplay  # noqa: E402
import sac_continuous  # noqa: E402
import sac_selfplay  # noqa: E402
import utils.run  # noqa: E402

tqdm.set_lock(threading.RLock())  # its own is shared with forked processes: one that is killed could keep it for ever
TINY: dict[str, dict[str, Any]] = {
    "ppo_continuous": {"total_timesteps": 256, "num_steps": 32, "num_minibatches": 4, "update_epochs": 2}
    | {"num_envs": 2},
    "sac_continuous": {"total_timesteps": 240, "learning_starts": 100, "batch_size": 32, "buffer_size": 200}
    | {"log_freq": 40},
    "ppo_selfplay": {"total_timesteps": 512, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1}
    | {"save_steps": 128},
    "sac_selfplay": {"total_timesteps": 512, "learning_starts": 32, "batch_size": 32, "buffer_size": 400}
    | {"log_freq": 64, "updates_per_step": 0.05, "save_steps": 128},
}
Train = Callable[..., Path]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """With `-n auto` one process more than cores: many tests wait for other processes."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """Undoes what `main` of a script changes in the process: signal handlers, subnormal numbers, the path, `trains`."""
    paths = list(sys.path)
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    yield
    sys.path[:] = paths  # `vectorize` adds the working folder
    torch.set_flush_denormal(False)  # Hypothesis refuses to run with it
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    utils.run.stop_signals.clear()
    utils.run.trains = False


@pytest.fixture(params=[ppo_continuous, sac_continuous], ids=["ppo", "sac"])
def script(request: pytest.FixtureRequest) -> ModuleType:
    """Each of the single-agent scripts in turn."""
    return request.param


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Runs a script's `main` in an empty folder with a tiny budget, and returns the run folder."""
    monkeypatch.chdir(tmp_path)

    def run(script: ModuleType, **overrides: Any) -> Path:
        defaults = {"env_id": "Pendulum-v1", "eval_freq": 0, "eval_episodes": 2, "cuda": False, "compile": False}
        before = set((tmp_path / "runs").glob("*"))
        script.main(script.Args(**defaults | TINY[script.__name__] | overrides))
        (folder,) = set((tmp_path / "runs").glob("*")) - before
        return folder

    return run


@pytest.fixture
def ray_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[int, str]]]:
    """Ids and commands of the processes that live of those that the test and Ray start.

    Ray's files are in a folder of their own, whose path is short because Ray's sockets are there.
    """
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        for name, value in {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)

        def commands() -> dict[int, str]:
            found = {}
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # it has ended, or is another user's
                    if f"RAY_TMPDIR={folder}\0".encode() in (process / "environ").read_bytes():
                        found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
            return found

        yield commands
        for pid in commands():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while commands():
            time.sleep(0.05)


@pytest.fixture(params=[ppo_selfplay, sac_selfplay], ids=["ppo", "sac"])
def selfplay(request: pytest.FixtureRequest) -> ModuleType:
    """Each of the self-play scripts in turn."""
    return request.param


@pytest.fixture
def train_selfplay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """The same for a self-play script: eight games, few evaluations, no table."""
    monkeypatch.chdir(tmp_path)

    def run(script: ModuleType, **overrides: Any) -> Path:
        defaults = {"num_games": 8, "eval_freq": 0, "eval_games": 2, "cross_play_games": 0, "cuda": False}
        before = set((tmp_path / "runs").glob("*"))
        script.main(script.Args(**defaults | {"compile": False} | TINY[script.__name__] | overrides))
        (folder,) = set((tmp_path / "runs").glob("*")) - before
        return folder

    return run


def load_file(path: Path, name: str) -> ModuleType:
    """The module of a file that is in no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run's saved agent."""
    return torch.load(folder / "model.pt", weights_only=True)["agent"]


def assert_same_weights(one: Path, other: Path) -> None:
    """Both runs saved the same agent, bit for bit."""
    weights, other_weights = load_weights(one), load_weights(other)
    assert weights.keys() == other_weights.keys()
    assert [name for name in weights if not torch.equal(weights[name], other_weights[name])] == []


KILLED = """
import importlib, os, signal, sys
sys.path.insert(0, sys.argv.pop(1))
script = importlib.import_module(sys.argv.pop(1))

update, count = script.update, 0
def dies(*args):
    global count
    count += 1
    if count == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(*args)
script.update = dies
script.main(script.parse_args(script.Args))
"""


def killed_again(module: str, whole: Path, names: Iterable[str]) -> Path:
    """The folder of another run with these arguments of a finished one; it is killed at its twentieth update."""
    args, words = json.loads((whole / "args.json").read_text()), []
    for name in names:
        flag, value = name.replace("_", "-"), args[name]
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    before = set(Path("runs").glob("*"))
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent.parent), module, *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == -signal.SIGKILL, result.stderr
    (folder,) = set(Path("runs").glob("*")) - before
    return folder


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every logged series as (step, value)."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
