"""Bad arguments, tasks, files: one sentence that names the flag, exit status 2, no traceback, nothing left behind."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import Train
from gymnasium.vector import AutoresetMode

import utils.run

BOTH = [
    ("--env-id", "NoSuchTask-v1"),
    ("--env-id", "HalfCheetah-v1"),
    ("--env-id", "HalfCheetah-v2"),
    ("--env-id", "no_such_module:Task-v0"),
    ("--env-id", ""),
    ("--env-id", "CartPole-v1"),  # discrete actions
    ("--env-id", "dm_control/cartpole-balance-v0"),  # not installed
    ("--env-id", "toy_envs:Unbounded-v0"),
    ("--env-id", "toy_envs:Huge-v0"),
    ("--env-id", "toy_envs:ValueError-v0"),
    ("--env-id", "toy_envs:FileNotFoundError-v0"),
    ("--env-id", "toy_envs:AttributeError-v0"),
    ("--env-id", "toy_envs:SystemExit-v0"),
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
    ("--std-min", "0"),
    ("--std-min", "11"),
]
SAC = [
    ("--q-lr", "-1"),
    ("--policy-lr", "nan"),
    ("--alpha-lr", "inf"),
    ("--buffer-size", "0"),
    ("--batch-size", "0"),
    ("--learning-starts", "-1"),
    ("--updates-per-step", "-0.5"),
    ("--policy-frequency", "0"),
    ("--tau", "1.5"),
    ("--alpha", "0"),
    ("--target-entropy-scale", "nan"),
    ("--log-freq", "0"),
]
CASES = [("ppo_continuous", *case) for case in BOTH + PPO] + [("sac_continuous", *case) for case in BOTH + SAC]


def run(script: ModuleType, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Runs a command line that must fail, checks how, and returns what it wrote to standard error."""
    with pytest.raises(SystemExit) as exit_info:
        script.main(script.parse_args(script.Args, words))
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


def test_what_the_sentence_says(script: ModuleType, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the flag takes and what it was given; for a task, the exception of its constructor."""
    assert run(script, capsys, "--gamma", "7") == "error: --gamma takes a number from 0 to 1, not 7.0\n"
    assert run(script, capsys, "--seed", "-3") == "error: --seed takes a number from 0 to 2147483648, not -3\n"
    for name in ("ValueError", "FileNotFoundError", "AttributeError", "SystemExit", "BaseException"):
        env_id = f"toy_envs:{name}-v0"
        expected = f"error: --env-id {env_id} cannot be made: {name}: no such file: terrain.xml\n"
        assert run(script, capsys, "--env-id", env_id) == expected


def test_native_environments_that_reset_in_the_next_step(
    script: ModuleType, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would store resets as transitions."""
    env_id = f"toy_envs:Counting{AutoresetMode.NEXT_STEP.value}-v0"
    stderr = run(script, capsys, "--env-id", env_id, "--vectorization", "native")
    takes = "--vectorization native takes the autoreset modes SAME_STEP and DISABLED"
    assert stderr == f"error: {takes}, and {env_id} has NEXT_STEP\n"
    env_id = "toy_envs:CountingUnknown-v0"
    stderr = run(script, capsys, "--env-id", env_id, "--vectorization", "native")
    assert stderr == f"error: {takes}, and {env_id} has metadata['autoreset_mode'] = None\n"


def test_videos_that_cannot_be_made(script: ModuleType, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A task that draws nothing is refused before the training, not after."""
    assert "error: --capture-video" in run(script, capsys, "--env-id", "toy_envs:Counting-v0", "--capture-video")


@pytest.mark.parametrize("package", ["wandb", "huggingface_hub", "moviepy"])
def test_missing_optional_package(
    script: ModuleType,
    package: str,
    empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Named, with the command that installs it."""
    monkeypatch.setattr(utils.run, "find_spec", lambda name: None if name == package else object())
    flag = {"wandb": "--track", "huggingface_hub": "--upload-model", "moviepy": "--capture-video"}[package]
    assert run(script, capsys, flag) == f"error: {flag} needs the package {package}: pip install {package}\n"


def test_where_else_to_look(script: ModuleType, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that Gymnasium does not know: the sentence tells of modules, and of the scripts for games."""
    sentence = run(script, capsys, "--env-id", "sumo")
    assert sentence.startswith("error: --env-id sumo cannot be made: NameNotFound: ")
    assert sentence.endswith("imports the module that has the task; games between teams are for *_selfplay.py)\n")


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_task_in_the_working_folder(script: ModuleType, train: Train, tmp_path: Path, vectorization: str) -> None:
    """Its module is found there, wherever the script is."""
    task = 'import gymnasium as gym\n\ngym.register("Own-v0", "gymnasium.envs.classic_control:PendulumEnv", 50)\n'
    (tmp_path / f"own_{vectorization}.py").write_text(task)
    folder = train(script, env_id=f"own_{vectorization}:Own-v0", vectorization=vectorization)
    assert (folder / "model.pt").exists()


def run_alone(script: ModuleType, folder: Path, words: str, **variables: str) -> str:
    """The same in a process of its own, because W&B and MuJoCo read their variables once."""
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "NETRC": str(folder / "netrc")} | variables
    command = [sys.executable, str(script.__file__), *words.split()]
    run = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False
    )
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("error: ")
    assert run.stderr.count("\n") == 1
    assert not (folder / "runs").exists()
    return run.stderr


@pytest.mark.slow
def test_tracking(script: ModuleType, empty_folder: Path) -> None:
    """Without an account the sentence names both ways out; a mode that W&B does not have is named."""
    words = "--env-id Pendulum-v1 --track"
    expected = "error: --track takes a W&B account: log in with `wandb login`, or set WANDB_MODE=offline\n"
    assert run_alone(script, empty_folder, words) == expected
    expected = "error: --track takes WANDB_MODE=online, offline, disabled or shared, and it is foo\n"
    assert run_alone(script, empty_folder, words, WANDB_MODE="foo") == expected


@pytest.mark.slow
@pytest.mark.parametrize("renderer", ["foo", "glfw"])  # there is no screen
def test_renderers(script: ModuleType, renderer: str, empty_folder: Path) -> None:
    """Named in the sentence, without MuJoCo's tracebacks and warnings."""
    words = "--env-id InvertedPendulum-v5 --capture-video"
    stderr = run_alone(script, empty_folder, words, MUJOCO_GL=renderer)
    assert stderr.startswith("error: --capture-video cannot render InvertedPendulum-v5: ")


class Bomb:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize(
    "damage",
    ["missing", "empty", "truncated", "flipped", "garbage", "pickle", "dangerous", "list", "foreign", "other shapes"],
)
def test_damaged_model(
    script: ModuleType,
    damage: str,
    train: Train,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is wrong with the file, --evaluate says so, and runs no code from it."""
    folder = train(script, total_timesteps=64, eval_episodes=1)
    path, whole = folder / "model.pt", (folder / "model.pt").read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        weights = torch.load(path, weights_only=True)["agent"][
            "actor.mean.0.weight" if "ppo" in str(folder) else "actor.net.0.weight"
        ]
        position = whole.index(weights[0].numpy().tobytes())
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    elif damage in ("empty", "truncated", "garbage"):
        path.write_bytes({"empty": b"", "truncated": whole[: len(whole) // 2], "garbage": b"not a model" * 99}[damage])
    elif damage == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    elif damage == "other shapes":
        arguments = (folder / "args.json").read_text()
        (folder / "args.json").write_text(arguments.replace("Pendulum-v1", "InvertedPendulum-v5"))
    else:
        torch.save({"dangerous": Bomb(), "list": [1, 2, 3], "foreign": {"policy": {}}}[damage], path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    stderr = run(script, capsys, "--evaluate", str(tmp_path / folder))
    assert stderr.startswith("error: --evaluate takes a run folder with a valid model.pt of this script")
    assert stderr.count("\n") == 1
