"""Inputs that further trials found: sizes beyond memory, closed streams, signals at odd times, missing packages."""

import io
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import Train
from gymnasium.spaces import Box
from test_run import Args, checkpoint, empty_folder, make_run, only_run, refusal  # noqa: F401 (a fixture)
from test_run import train as toy_train
from torch import nn

import ppo_continuous
import ppo_selfplay
import sac_continuous
import sac_selfplay
import utils.run
from utils.errors import TaskError, describe_error
from utils.run import (
    Run,
    TaskEnv,
    load_model,
    make_run_folder,
    parse_json,
    prepare,
    start_tracking,
    tell_exception,
    to_bytes,
    write_file,
)
from utils.team_env import read_reward

SIZES = [
    *((script, flag) for script in (ppo_continuous, sac_continuous) for flag in ("num_envs", "eval_episodes")),
    *((script, "num_steps") for script in (ppo_continuous, ppo_selfplay)),
    *((script, "batch_size") for script in (sac_continuous, sac_selfplay)),
    *(
        (script, flag)
        for script in (ppo_selfplay, sac_selfplay)
        for flag in ("num_games", "eval_games", "cross_play_games")
    ),
]


@pytest.mark.parametrize(("script", "name"), SIZES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_sizes_beyond_any_machine(script: ModuleType, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They were MemoryError's traceback, or hours of making environments."""
    flag = f"--{name.replace('_', '-')}"
    args = script.parse_args(script.Args, [flag, "10000000000"])
    assert refusal(capsys, prepare, args, script.LIMITS).startswith(f"{flag} takes a number from ")


@pytest.mark.parametrize(
    ("script", "task", "size"),
    [(sac_continuous, "Pendulum-v1", 80_000_000), (sac_selfplay, "sumo", 20_000_000), (sac_selfplay, "pursuit", 2e7)],
)
def test_a_replay_buffer_beyond_the_memory(
    script: ModuleType,
    task: str,
    size: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A machine of 1 GiB: refused before any of it is used, and before there is a run folder."""
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**18}
    monkeypatch.setattr(utils.run.os, "sysconf", pages.__getitem__)
    words = ["--env-id", task, "--buffer-size", f"{size:.0f}", "--no-compile", "--no-cuda"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sentence = refusal(capsys, lambda: script.main(script.parse_args(script.Args, words)))
    assert re.fullmatch(r"--buffer-size must fit into memory: it needs \d+ GiB, and there are 1 GiB", sentence)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # kibibytes
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("error", [MemoryError("43 TiB"), RuntimeError("can't allocate memory: 8 bytes")])
def test_memory_that_ends(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence; exit status 1 in a run, whose last checkpoint stays, and 2 before it."""

    def act(run: Run, step: int) -> None:
        raise error

    with pytest.raises(SystemExit) as exit_info:
        toy_train(act)
    assert exit_info.value.code == 1
    stderr = capsys.readouterr().err
    assert stderr == f"error: there is not enough memory; lower arguments: {error}\n"
    assert checkpoint()["global_step"] == 0
    with pytest.raises(SystemExit) as exit_info:
        tell_exception(ppo_continuous.Args(), type(error), error, None)
    assert exit_info.value.code == 2
    monkeypatch.setattr(utils.run, "trains", True)
    with pytest.raises(SystemExit) as exit_info:
        tell_exception(ppo_continuous.Args(), type(error), error, None)
    assert exit_info.value.code == 1
    assert "lower --eval-episodes or --num-envs or --num-steps" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"a":' * 5000 + "1" + "}" * 5000, '{"a": ' + "9" * 5000 + "}"], ids=["deep", "long"])
def test_json_beyond_python(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """RecursionError, and a ValueError that is no JSONDecodeError; the sentence stays short."""
    sentence = refusal(capsys, parse_json, "env-kwargs", text)
    assert sentence.startswith("--env-kwargs takes a JSON object")
    assert len(sentence) < 500


def test_saved_arguments_beyond_python(capsys: pytest.CaptureFixture[str]) -> None:
    """The same in a run folder."""
    Path("args.json").write_text("[" * 100_000)
    assert "--resume takes a run folder" in refusal(capsys, utils.run.read_args, Args, Path(), "--resume")


def test_a_name_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    """A file's name has at most 255 bytes."""
    assert "the run folder cannot be made" in refusal(capsys, make_run_folder, Args(exp_name="x" * 300))


def test_a_link_to_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    """`runs` as a dangling link was an endless loop."""
    Path("runs").symlink_to("nowhere")
    signal.alarm(20)  # ends the tests, should it be one again
    assert "the run folder cannot be made" in refusal(capsys, make_run_folder, Args())
    signal.alarm(0)


def test_a_working_folder_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    """Removed by another program."""
    home = Path.cwd()
    Path("gone").mkdir()
    os.chdir("gone")
    (home / "gone").rmdir()
    sentence = refusal(capsys, prepare, Args(), {})
    os.chdir(home)
    assert sentence.startswith("the working folder is gone: ")


def test_output_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`| head -1` was a traceback, and cost the model."""
    reader, writer = os.pipe()
    os.close(reader)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(open(os.dup(writer), "wb"), encoding="ascii"))  # noqa: SIM115
    prepare(Args(), {})
    toy_train(lambda run, step: print("漢字", flush=True))
    assert (only_run() / "model.pt").exists()


def test_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has None for a closed stream."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    prepare(Args(), {})
    toy_train()
    assert (only_run() / "model.pt").exists()


def test_a_terminal_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP is as SIGTERM; under `nohup` it stays ignored."""
    monkeypatch.setattr(utils.run, "stop_signals", [])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    prepare(Args(), {})
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    prepare(Args(), {})
    assert callable(signal.getsignal(signal.SIGHUP))  # else the next line ends the tests
    with pytest.raises(SystemExit) as exit_info:
        toy_train(lambda run, step: os.kill(os.getpid(), signal.SIGHUP) if step == 30 else None)
    signal.signal(signal.SIGHUP, before)
    assert exit_info.value.code == 129
    assert checkpoint()["global_step"] == 40


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step(signum: int, capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to save yet, so it ends the program at once, also while the update is compiled."""
    prepare(Args(), {})
    with pytest.raises(KeyboardInterrupt) as error:
        os.kill(os.getpid(), signum)
    with pytest.raises(SystemExit) as exit_info:
        tell_exception(Args(), KeyboardInterrupt, error.value, None)
    assert exit_info.value.code == 128 + signum
    assert capsys.readouterr().err == f"stopped by signal {signum}\n"
    prepare(Args(), {})
    with pytest.raises(SystemExit) as exit_info, make_run():
        os.kill(os.getpid(), signum)
    assert exit_info.value.code == 128 + signum


def test_a_fault_of_the_task_in_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    """Outside of a run: the traceback of the task's own exception, if it has one, and one sentence."""
    own, exits, map_error = KeyError("x"), SystemExit(3), ValueError("environment map is missing")
    causes = (own, "KeyError: 'x'\n"), (exits, ""), (None, ""), (map_error, f"ValueError: {map_error}\n")
    for cause, traceback in causes:
        middle, error = TaskError("environment 0 in reset: it"), TaskError("environment 0 in reset: it")
        middle.__cause__, error.__cause__ = cause, middle
        with pytest.raises(SystemExit) as exit_info:
            tell_exception(Args(), TaskError, error, None)
        assert exit_info.value.code == 1
        sentence = "error: --env-id Pendulum-v1 failed: environment 0 in reset: it\n"
        assert capsys.readouterr().err == traceback + sentence
    assert describe_error(SystemExit()) == "SystemExit"
    assert describe_error(ValueError("two\nlines")) == "ValueError: two lines"


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_a_fault_in_an_evaluation_repeats_no_iteration(in_evaluation: bool) -> None:
    """What has been learned from and logged is not done again by --resume; what has not is."""

    def act(run: Run, step: int) -> None:
        if step == 30 and not in_evaluation:
            raise TaskError("it")
        run.log({"losses/x": 1.0}, step + 10)
        if step == 30:
            raise TaskError("it")

    with pytest.raises(SystemExit):
        toy_train(act)
    assert checkpoint()["global_step"] == (40 if in_evaluation else 30)


def test_a_fault_in_an_evaluation_of_sac_repeats_no_iteration(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also if neither metrics nor a checkpoint are due in that iteration."""

    def evaluate(*_: Any) -> dict[str, float]:
        raise TaskError("it")

    monkeypatch.setattr(sac_continuous, "evaluate", evaluate)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        train(sac_continuous, eval_freq=110, log_freq=1000, checkpoint_freq=0)
    assert checkpoint()["global_step"] == 110


def test_ctrl_c_that_ends_the_reader_of_the_output_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `2>&1 | tee log`: the run cannot say that it stops, and saves."""
    monkeypatch.setattr(utils.run, "stop_signals", [])
    reader, writer = os.pipe()
    os.close(reader)
    prepare(Args(), {})
    stderr = os.dup(2)
    os.dup2(writer, 2)
    try:
        with pytest.raises(SystemExit) as exit_info:
            toy_train(lambda run, step: os.kill(os.getpid(), signal.SIGINT) if step == 30 else None)
    finally:
        os.dup2(stderr, 2)
    assert exit_info.value.code == 130
    assert checkpoint()["global_step"] == 40


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_trained_model_is_saved(
    signum: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stops the run before the final evaluation."""
    monkeypatch.setattr(utils.run, "stop_signals", [])
    save, sent = Run.save, list[int]()

    def interrupted(run: Run, is_finished: bool) -> bool:
        if not sent:
            sent.append(signum)
            os.kill(os.getpid(), signum)
        return save(run, is_finished)

    monkeypatch.setattr(Run, "save", interrupted)
    prepare(Args(), {})
    with pytest.raises(SystemExit) as exit_info:
        toy_train()
    assert exit_info.value.code == 128 + signum
    assert "training is over" not in capsys.readouterr().out
    assert not checkpoint()["is_finished"]


@pytest.mark.slow
def test_a_refusal_beside_processes_of_environments(script: ModuleType) -> None:
    """One sentence, and nothing from the processes, whose pipes close."""
    words = ["--env-id", "CartPole-v1", "--vectorization", "async", "--num-envs", "2"]
    command = [sys.executable, str(script.__file__), *words]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: --env-id takes a task whose actions are ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "module", "what"),
    [
        ("pettingzoo", "utils.team_env", "self-play"),
        ("gymnasium", "utils.team_env", "training"),
        ("tyro", "utils.run", "training"),
        ("tensorboard", "utils.run", "training"),
        ("rich", "benchmark.sweep", "benchmark.sweep"),
        ("matplotlib", "benchmark.figures", "benchmark.report"),
    ],
)
def test_missing_packages(package: str, module: str, what: str) -> None:
    """Named, with the command that installs it."""
    root = Path(utils.run.__file__).parents[1]
    code = f"import sys; sys.modules[{package!r}] = None; sys.path.insert(0, {str(root)!r}); import {module}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2
    assert run.stderr == f"error: {what} needs the package {package}: pip install {package}\n"


# === Tasks ===


class Odd(gym.Env[np.ndarray, np.ndarray]):
    """Three steps; `kind` says what is odd."""

    action_space = Box(-1.0, 1.0, (1,))
    made = 0

    def __init__(self, kind: str = "", size: int = 2) -> None:  # "shape": observations of another one
        Odd.made += 1
        if kind == "made" and Odd.made > 2:
            raise MemoryError("no more of these")
        self.kind, self.size, self.step_count, self.resets = kind, size, 0, 0
        self.observation_space = Box(-1, 1, (size,), np.int64) if kind == "floats" else Box(-1.0, 1.0, (size,))
        if kind == "no action":
            self.action_space = Box(-1.0, 1.0, (0,))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Zeros."""
        super().reset(seed=seed)
        self.step_count, self.resets = 0, self.resets + 1
        if seed is not None and seed >= 2**32:
            raise ValueError("as NumPy's RandomState and others do")
        infos = {"goals": np.zeros((self.np_random.integers(1, 1000), self.resets))} if self.kind == "infos" else {}
        obs = np.zeros(self.size + (self.kind == "reset shape"), self.observation_space.dtype)
        return obs if self.kind == "no info" else (obs, infos)  # type: ignore[return-value]

    def step(self, action: np.ndarray) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        """A reward in an array."""
        self.step_count += 1
        obs, reward = np.zeros(self.size + (self.kind == "shape"), np.float32), np.ones(1)
        if self.kind == "floats" and self.step_count == 2:
            obs += 0.5
        if self.kind == "huge":
            obs = np.full(2, 1e300)
        return obs, reward if self.kind == "array" else 1.0, self.step_count == 3, False, {}

    def close(self) -> None:
        """Fails."""
        if self.kind == "close":
            raise OSError("stuck")


gym.register("OddInput-v0", entry_point="test_odd_inputs:Odd")


@pytest.mark.parametrize(
    ("kind", "vectorization"), [("array", "sync"), ("close", "sync"), ("infos", "sync"), ("infos", "async")]
)
def test_odd_tasks(
    script: ModuleType, train: Train, kind: str, vectorization: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rewards that are arrays of one number are numbers; a failure in `close` is a warning; infos may have any shape.

    And the seeds of evaluations stay below 2**32 with the largest --seed, too.
    """
    task = {"env_id": "OddInput-v0", "env_kwargs": json.dumps({"kind": kind}), "vectorization": vectorization}
    folder = train(script, **task, num_envs=2, seed=2**31)
    assert (folder / "model.pt").exists()
    assert "return 3.00 +/- 0.00" in capsys.readouterr().out


def test_an_evaluation_whose_environments_cannot_be_made(
    script: ModuleType,
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A fault of the task in the middle of a run: one sentence, status 1, and what has been learned is saved."""
    monkeypatch.setattr(Odd, "made", 0)
    with pytest.raises(SystemExit) as exit_info:
        train(script, env_id="OddInput-v0", env_kwargs='{"kind": "made"}', num_envs=2, eval_freq=64)
    assert exit_info.value.code == 1
    failed = r"failed after step \d+: OddInput-v0 cannot be made: .*no more of these"
    assert re.search(f"error: --env-id OddInput-v0 {failed}", capsys.readouterr().err)
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "model.pt").exists()


def test_a_process_that_dies(
    script: ModuleType, train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The process of an environment that ends without a word is named."""
    monkeypatch.setattr(Odd, "step", lambda self, action: os._exit(3))
    with pytest.raises(SystemExit) as exit_info:
        train(script, env_id="OddInput-v0", num_envs=2, vectorization="async")
    assert exit_info.value.code == 1
    stderr = capfd.readouterr().err
    assert re.search(r"failed after step 0: environment [01]: its process has died$", stderr)
    assert "Traceback" not in stderr


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("shape", r"environment [01] in its step 1: the observation must have the shape \(2,\), not \(3,\)$"),
        ("huge", "observation is not a finite number at step"),
        ("reset shape", r"environment [01] in reset: the observation must have the shape \(2,\), not \(3,\)$"),
        ("floats", r"environment [01] in its step 2: the observation must have integers, as its space has, not array"),
        ("no info", r"environment [01] in reset: the observation must have the shape \(2,\), not \(\)$"),
    ],
)
def test_observations_that_are_not_of_their_space(
    script: ModuleType, kind: str, sentence: str, vectorization: str, train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    """One sentence and nothing else, also where processes of environments end."""
    task = {"env_id": "OddInput-v0", "env_kwargs": json.dumps({"kind": kind}), "vectorization": vectorization}
    with pytest.raises(SystemExit) as exit_info:
        train(script, **task, num_envs=2)
    assert exit_info.value.code == 1
    stderr = capfd.readouterr().err
    assert len(stderr.splitlines()) == 1, stderr
    assert re.search(sentence, stderr)


def test_a_step_of_four_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before Gymnasium: the fourth part, a dict, does not pass for a truncation."""
    monkeypatch.setattr(Odd, "step", lambda self, action: (np.zeros(2, np.float32), 1.0, False, {}))
    env = TaskEnv(Odd, 3)
    env.reset()
    with pytest.raises(TaskError, match=r"environment 3 in its step 1: ValueError: .*expected 5, got 4"):
        env.step(np.zeros(1))


@pytest.mark.parametrize("kwargs", [{"size": 0}, {"size": 1_000_001}, {"kind": "no action"}], ids=str)
def test_sizes_of_spaces(script: ModuleType, kwargs: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Without observations, with millions of them, and without actions."""
    args = script.Args(env_id="OddInput-v0", env_kwargs=json.dumps(kwargs))
    assert refusal(capsys, script.make_envs, args, 1).startswith("--env-id takes a task whose ")


def test_large_observations_are_refused_before_batches_of_them_are_made(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gymnasium takes a minute for those of a large picture. The first environment is enough to see the size."""
    made: list[int] = []
    init = Odd.__init__

    def spy(env: Odd, size: int) -> None:
        made.append(size)
        init(env, size=size)

    monkeypatch.setattr(Odd, "__init__", spy)
    for vectorization in ("sync", "async"):
        made.clear()
        args = script.Args(env_id="OddInput-v0", env_kwargs='{"size": 1000001}', vectorization=vectorization)
        sentence = refusal(capsys, script.make_envs, args, 3)
        takes = "--env-id takes a task whose observations are 1 to 1,000,000 numbers, and those of OddInput-v0 are Box"
        assert sentence.startswith(takes)
        assert made == [1_000_001]


def test_rewards_of_games_in_arrays() -> None:
    """One number in an array is a number; two are none."""
    assert read_reward("a", {"a": np.array([2.5])}) == 2.5
    with pytest.raises(TaskError, match="the reward of a must be a number"):
        read_reward("a", {"a": np.ones(2)})


# === Files and accounts ===


def test_a_model_of_nan(capsys: pytest.CaptureFixture[str]) -> None:
    """Refused; it was a ValueError of the table."""
    model = nn.Linear(2, 1)
    nn.init.constant_(model.bias, math.nan)
    write_file(Path("model.pt"), to_bytes({"agent": model.state_dict()}))
    assert "its weights are not finite numbers" in refusal(capsys, load_model, Path(), {"agent": nn.Linear(2, 1)})


@pytest.mark.parametrize("change", [{"global_step": "x"}, {"events": None}, {"is_finished": "x"}], ids=str)
def test_checkpoints_with_other_facts(change: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Whole files, which hold something else."""
    folder = toy_train()
    state = checkpoint() | change
    for path in folder.glob("checkpoint*.pt"):
        write_file(path, to_bytes(state))
    sentence = refusal(capsys, make_run, Args(resume=folder, total_timesteps=200))
    assert "--resume takes a run folder with a valid checkpoint" in sentence


def test_names_that_wandb_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own sentence, without its traceback."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    args = ppo_continuous.Args(track=True, wandb_project_name="a/b")
    sentence = refusal(capsys, start_tracking, Path.cwd(), args)
    assert sentence.startswith("--track cannot begin the W&B run ")
    assert "Invalid project name" in sentence


def test_a_refused_name_leaves_no_run_folder(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new run has nothing to keep; that of --resume stays as it is."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = ["--env-id", "Pendulum-v1", "--track", "--wandb-project-name", "a/b", "--no-compile", "--no-anneal-lr"]

    def call(*more: str) -> None:
        ppo_continuous.main(ppo_continuous.parse_args(ppo_continuous.Args, [*words, *more]))

    assert refusal(capsys, call).startswith("--track cannot begin the W&B run ")
    assert not Path("runs").exists()
    folder = train(ppo_continuous, total_timesteps=64, anneal_lr=False)
    record = folder / "wandb" / "offline-run-1" / "run.wandb"
    record.parent.mkdir(parents=True)
    record.write_text("of an earlier session")
    files = {path.name for path in folder.iterdir()}
    arguments = (folder / "args.json").read_text()
    refusal(capsys, call, "--resume", str(folder), "--total-timesteps", "128")
    assert {path.name for path in folder.iterdir()} >= files
    assert (folder / "args.json").read_text() == arguments
    assert record.exists()
    refusal(capsys, call)
    assert only_run().samefile(folder)
