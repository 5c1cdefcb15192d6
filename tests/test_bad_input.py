"""Bad arguments, tasks and files: one sentence that names the flag, exit status 2, no traceback, nothing left behind."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import tyro
from conftest import Train

BOTH = [
    ("--env-id", "NoSuchTask-v1"),
    ("--env-id", "HalfCheetah-v1"),
    ("--env-id", "HalfCheetah-v2"),
    ("--env-id", "no_such_module:Task-v0"),
    ("--env-id", ""),
    ("--env-id", "CartPole-v1"),  # discrete actions
    ("--env-id", "toy_envs:Unbounded-v0"),
    ("--seed", "-1"),
    ("--seed", "one"),
    ("--seed", "1.5"),
    ("--num-envs", "0"),
    ("--num-envs", "-3"),
    ("--total-timesteps", "0"),
    ("--total-timesteps", "-1"),
    ("--total-timesteps", "1e6"),
    ("--eval-episodes", "0"),
    ("--eval-freq", "-1"),
    ("--gamma", "1.01"),
    ("--gamma", "-0.1"),
    ("--gamma", "nan"),
    ("--vectorization", "threads"),
    ("--vectorization", "native"),  # Pendulum has none
    ("--no-such-flag", "1"),
    ("--upload-model", ""),  # no --hf-entity
    ("--evaluate", "runs/none"),
]  # with --total-timesteps 600, so that a value that slips through does not train for long
PPO = [
    ("--learning-rate", "-1e-3"),
    ("--learning-rate", "nan"),
    ("--learning-rate", "inf"),
    ("--num-steps", "0"),
    ("--num-steps", "1"),
    ("--num-minibatches", "0"),
    ("--num-minibatches", "7"),  # does not divide 2048
    ("--num-minibatches", "2048"),  # one transition has no standard deviation
    ("--update-epochs", "-1"),
    ("--gae-lambda", "2"),
    ("--clip-coef", "-0.2"),
    ("--max-grad-norm", "-1"),
    ("--target-kl", "nan"),
    ("--log-std-init", "9"),
    ("--log-std-init", "-3"),  # below --log-std-min
    ("--log-std-min", "3"),
    ("--obs-epsilon", "0"),
    ("--adam-beta1", "1.5"),
    ("--adam-beta2", "1"),
]
SAC = [
    ("--q-lr", "-1"),
    ("--policy-lr", "nan"),
    ("--alpha-lr", "inf"),
    ("--policy-lr-schedule", "cosine"),
    ("--buffer-size", "0"),
    ("--batch-size", "0"),
    ("--learning-starts", "-1"),
    ("--updates-per-step", "-0.5"),
    ("--policy-frequency", "0"),
    ("--target-network-frequency", "0"),
    ("--tau", "1.5"),
    ("--alpha", "0"),
    ("--target-entropy-scale", "nan"),
    ("--log-freq", "0"),
]
CASES = [(name, *case) for name, cases in (("ppo_continuous", BOTH + PPO), ("sac_continuous", BOTH + SAC)) for case in cases]


def run(script: ModuleType, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Runs a command line that must fail, checks how, and returns what it wrote to standard error."""
    with pytest.raises(SystemExit) as exit_info:
        script.main(tyro.cli(script.Args, args=words))
    assert exit_info.value.code == 2
    stderr = capsys.readouterr().err
    assert "Traceback" not in stderr
    assert os.listdir() == []
    return stderr


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with nothing in it, and no account."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "flag", "value"), CASES)
def test_bad_flag(name: str, flag: str, value: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone beside good defaults."""
    task = ("--total-timesteps", "600", *(() if flag == "--env-id" else ("--env-id", "Pendulum-v1")))
    stderr = run(__import__(name), capsys, *task, *((flag, value) if flag != "--upload-model" else (flag,)))
    named = "--env-id" if value == "native" else flag
    assert named in stderr
    if stderr.startswith("error: "):  # ours; the others are tyro's, which names the flag and the type that it takes
        assert stderr.count("\n") == 1


def test_ours_is_the_message_of_everything_but_types_and_names(
    script: ModuleType, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence says what the flag takes, and what it was given."""
    assert run(script, capsys, "--gamma", "7") == "error: --gamma takes a number from 0 to 1, not 7.0\n"


def test_video_of_a_task_that_draws_nothing(script: ModuleType, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is refused before the training, not after."""
    assert "error: --capture-video" in run(script, capsys, "--env-id", "toy_envs:Counting-v0", "--capture-video")


@pytest.mark.parametrize("package", ["wandb", "huggingface_hub", "moviepy"])
def test_missing_optional_package(
    script: ModuleType, package: str, empty_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named, with the command that installs it."""
    monkeypatch.setattr(script, "find_spec", lambda name: None if name == package else object())
    flag = {"wandb": "--track", "huggingface_hub": "--upload-model", "moviepy": "--capture-video"}[package]
    assert run(script, capsys, flag) == f"error: {flag} needs the package {package}: pip install {package}\n"


def test_tracking_without_an_account(script: ModuleType, empty_folder: Path) -> None:
    """One sentence that names both ways out; in a process of its own, because the client remembers its mode."""
    env = {"PATH": os.environ["PATH"], "HOME": str(empty_folder), "NETRC": str(empty_folder / "netrc")}
    words = [sys.executable, str(script.__file__), "--env-id", "Pendulum-v1", "--track"]
    run = subprocess.run(
        words, cwd=empty_folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert run.returncode == 2
    assert run.stderr == "error: --track takes a W&B account: log in with `wandb login`, or set WANDB_MODE=offline\n"
    assert not (empty_folder / "runs").exists()


class Bomb:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "garbage", "pickle", "list", "foreign", "other shapes"])
def test_damaged_model(
    script: ModuleType,
    damage: str,
    train: Train,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is wrong with the file, --evaluate says so, and runs no code from it."""
    folder = train(script)
    path, whole = folder / "model.pt", (folder / "model.pt").read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage in ("empty", "truncated", "garbage"):
        path.write_bytes({"empty": b"", "truncated": whole[: len(whole) // 2], "garbage": b"not a model" * 99}[damage])
    elif damage == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    else:
        model = torch.load(path, weights_only=True)
        if damage == "list":
            model = [1, 2, 3]
        elif damage == "foreign":
            model["args"]["of_another_script"] = 1
        else:
            model["args"]["env_id"] = "InvertedPendulum-v5"
        torch.save(model, path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    stderr = run(script, capsys, "--evaluate", str(tmp_path / folder))
    assert stderr.startswith("error: --evaluate takes a run folder")
    assert stderr.count("\n") == 1
