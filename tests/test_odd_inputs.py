"""Inputs that further trials found: sizes beyond memory, closed streams, signals at odd times, missing packages."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_run import Args, checkpoint, empty_folder, make_run, only_run, refusal, train  # noqa: F401 (a fixture)

import ppo_continuous
import ppo_selfplay
import sac_continuous
import sac_selfplay
import utils.run
from utils.errors import TaskError
from utils.run import Run, make_run_folder, parse_json, prepare, tell_exception

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


@pytest.mark.parametrize("error", [MemoryError("43 TiB"), RuntimeError("can't allocate memory: 8 bytes")])
def test_memory_that_ends(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """In a run, and before it: one sentence, exit status 1; the last checkpoint stays."""

    def act(run: Run, step: int) -> None:
        raise error

    with pytest.raises(SystemExit) as exit_info:
        train(act)
    assert exit_info.value.code == 1
    stderr = capsys.readouterr().err
    assert stderr == f"error: there is not enough memory, and smaller arguments need less: {error}\n"
    assert checkpoint()["global_step"] == 0
    with pytest.raises(SystemExit) as exit_info:
        tell_exception(ppo_continuous.Args(), type(error), error, None)
    assert exit_info.value.code == 1
    assert "smaller --eval-episodes or --num-envs or --num-steps need less" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"a":' * 5000 + "1" + "}" * 5000, '{"a": ' + "9" * 5000 + "}"], ids=["deep", "long"])
def test_json_beyond_python(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """RecursionError, and a ValueError that is no JSONDecodeError; the sentence stays short."""
    sentence = refusal(capsys, parse_json, "env-kwargs", text)
    assert sentence.startswith("--env-kwargs takes a JSON object")
    assert len(sentence) < 500


def test_saved_arguments_beyond_python(capsys: pytest.CaptureFixture[str]) -> None:
    """The same in a run folder."""
    Path("args.json").write_text("[" * 100_000)
    assert "--resume takes a run folder" in refusal(capsys, utils.run.read_args, Args, Path(), "resume")


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
    train(lambda run, step: print("漢字", flush=True))
    assert (only_run() / "model.pt").exists()


def test_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has None for a closed stream."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    prepare(Args(), {})
    train()
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
        train(lambda run, step: os.kill(os.getpid(), signal.SIGHUP) if step == 30 else None)
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
    """Outside of a run: the traceback of the task, and one sentence."""
    error = TaskError("environment 0 in reset: KeyError: 'x'")
    with pytest.raises(SystemExit) as exit_info:
        tell_exception(Args(), TaskError, error, None)
    assert exit_info.value.code == 1
    assert capsys.readouterr().err.endswith(
        "\nerror: --env-id Pendulum-v1 failed: environment 0 in reset: KeyError: 'x'\n"
    )


@pytest.mark.parametrize(
    ("package", "module", "what"),
    [
        ("pettingzoo", "utils.team_env", "self-play"),
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
