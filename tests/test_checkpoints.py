"""Runs that are killed, stopped or hit by a fault go on bit for bit, or keep their last good checkpoint."""

import errno
import gc
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import faulty_game
import numpy as np
import pytest
import torch
from conftest import TINY, Train, read_scalars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy_envs import FAULTS, Faulty
from wandb.proto import wandb_internal_pb2

import ppo_continuous
import ppo_selfplay
import sac_continuous
import sac_selfplay
import utils.run
from utils.run import lock_folder

SCRIPTS = [ppo_continuous, sac_continuous, ppo_selfplay, sac_selfplay]
# Small enough to be killed often, with everything that has a state: several environments, statistics, a replay buffer
# that overwrites its oldest rows, a pool that drops snapshots, and teams that take turns.
LIVELY: dict[str, dict[str, Any]] = {
    "ppo_continuous": {"env_id": "Pendulum-v1", "num_envs": 3, "num_steps": 64, "num_minibatches": 4}
    | {"update_epochs": 2, "total_timesteps": 12_000, "checkpoint_freq": 700, "eval_freq": 4000, "eval_episodes": 2},
    "sac_continuous": {"env_id": "Pendulum-v1", "num_envs": 3, "learning_starts": 60, "batch_size": 32}
    | {"buffer_size": 300, "total_timesteps": 900, "checkpoint_freq": 60, "eval_freq": 400, "eval_episodes": 2}
    | {"norm_obs": True, "log_freq": 50, "updates_per_step": 0.3},
    "ppo_selfplay": {"env_id": "pursuit", "num_games": 8, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2}
    | {"total_timesteps": 3200, "save_steps": 250, "window": 3, "team_change": 800, "checkpoint_freq": 400}
    | {"eval_freq": 2000, "eval_games": 2, "cross_play_games": 2, "cross_play_snapshots": 2, "swap_steps": 90},
    "sac_selfplay": {"env_id": "pursuit", "num_games": 8, "learning_starts": 80, "batch_size": 32, "buffer_size": 900}
    | {"total_timesteps": 1600, "save_steps": 150, "window": 3, "team_change": 400, "checkpoint_freq": 200}
    | {"norm_obs": True, "eval_freq": 1000, "eval_games": 2, "cross_play_games": 2, "cross_play_snapshots": 2}
    | {"log_freq": 200, "replay_opponents": "window", "updates_per_step": 0.1},
}


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.__name__, scope="module")
def any_script(request: pytest.FixtureRequest) -> ModuleType:
    """Each of the four in turn."""
    return request.param


# For what is in utils/run.py alone: a script without a buffer, and one with a buffer and several networks.
of_shared_code = pytest.mark.parametrize(
    "any_script", [ppo_continuous, sac_selfplay], ids=lambda script: script.__name__, indirect=True, scope="module"
)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder of its own."""
    monkeypatch.chdir(tmp_path)


def words(script: ModuleType, **flags: Any) -> list[str]:
    """The command line of a lively run."""
    line = ["--no-cuda", "--no-compile"]
    for name, value in (LIVELY[script.__name__] | flags).items():
        flag = name.replace("_", "-")
        line += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return line


def start(script: ModuleType, *argv: str) -> int:
    """Runs the script in a child process, with its output in out.txt, and returns the child's id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    gc.freeze()  # garbage of other tests may wait for threads that this process does not have (ONNX Runtime's)
    status = 70
    try:
        out = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        script.main(script.parse_args(script.Args, list(argv)))
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(pid: int) -> int:
    """The exit status of a child, which is killed after four minutes."""
    deadline = time.monotonic() + 240
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(script: ModuleType, *argv: str) -> int:
    """Runs the script in a child process to its end."""
    return wait(start(script, *argv))


def wait_for(pid: int, condition: Callable[[], Any]) -> None:
    """Waits until the condition holds; fails if the child ends before, or after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if not condition() and (ended or time.monotonic() > deadline):
            kill(pid)
            pytest.fail(Path("out.txt").read_text())
        time.sleep(0.002)


def kill(pid: int) -> int:
    """Ends a child in a way that no handler sees; returns its exit status."""
    os.kill(pid, signal.SIGKILL)
    return wait(pid)


def only_run() -> Path:
    """The one run folder there is."""
    (folder,) = Path("runs").iterdir()
    return folder


def flatten(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every number, text and tensor of nested containers, with its place."""
    if isinstance(state, (dict, list, tuple)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from flatten(value, f"{name}/{key}")
    else:
        yield name, state.numpy().tobytes() if isinstance(state, torch.Tensor) else state


def everything(folder: Path) -> dict[str, Any]:
    """All that a run leaves behind and that does not depend on time: checkpoint, model, buffer, logged series."""
    content: dict[str, Any] = {}
    for name in ("checkpoint.pt", "model.pt"):
        content |= flatten(torch.load(folder / name, weights_only=True), name)
    for path in sorted((folder / "checkpoint.replay").rglob("*.npz")):
        with np.load(path) as arrays:
            content |= {f"{path.relative_to(folder)}/{key}": arrays[key].tobytes() for key in arrays}
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    content |= {tag: str([(e.step, e.value) for e in events.Scalars(tag)]) for tag in events.Tags()["scalars"]}
    # Equal runs differ in speed, in the sizes of TensorBoard's files, and in the numbers of snapshots in a process.
    differ = re.compile(r"charts/SPS|.*/events/.*|.*/uid")
    return {key: value for key, value in content.items() if not differ.fullmatch(key)}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit for bit; names what differs."""
    assert [key for key in (one.keys() | other.keys()) - {"duration"} if one.get(key) != other.get(key)] == []


@pytest.fixture(scope="module")
def calm(any_script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an uninterrupted lively run leaves behind, and how many seconds it took."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("calm"))
        began = time.monotonic()
        assert run(any_script, *words(any_script)) == 0, Path("out.txt").read_text()
        duration = time.monotonic() - began
        return everything(only_run()) | {"duration": duration}


@pytest.fixture(scope="module")
def killed(any_script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a lively run that was killed after its second checkpoint."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("killed"))
        pid = start(any_script, *words(any_script))
        wait_for(pid, lambda: list(Path("runs").glob("*/checkpoint.previous.pt")))
        kill(pid)
        if (only_run() / "checkpoint.next.pt").exists():  # killed between the two renames
            os.replace(only_run() / "checkpoint.next.pt", only_run() / "checkpoint.pt")
        return only_run().resolve()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_moments(any_script: ModuleType, calm: dict[str, Any]) -> None:
    """Twenty kills, and the run resumed after each equals the uninterrupted one. KILL_SEED repeats the moments."""
    seed = int(os.environ.get("KILL_SEED", random.SystemRandom().randrange(2**32)))
    print(f"kills of {any_script.__name__}: KILL_SEED={seed}")
    rng = random.Random(seed)
    argv, kills, resumed = words(any_script), 0, 0
    command = argv
    while kills < 20:
        pid, dies_at = start(any_script, *command), time.monotonic() + rng.uniform(0, 0.4 * calm["duration"])
        while time.monotonic() < dies_at and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.002)
        status = kill(pid)
        assert status in (0, -signal.SIGKILL), Path("out.txt").read_text()
        kills += status != 0
        last = next(Path("runs").glob("*/checkpoint.pt"), None)
        if last is not None and torch.load(last, weights_only=True)["is_finished"]:  # begin another run
            assert_same(calm, everything(only_run()))
            only_run().rename(f"finished-{time.monotonic_ns()}")
        unnamed = next(Path("runs").glob("*/checkpoint.next.pt"), None)
        if unnamed is not None and torch.load(unnamed, weights_only=True)["is_finished"]:  # nothing is left to resume
            only_run().rename(f"finished-{time.monotonic_ns()}")
        has_checkpoint = any(list(Path("runs").glob(f"*/checkpoint.{name}pt")) for name in ("", "next.", "previous."))
        for folder in list(Path("runs").glob("*")) if not has_checkpoint else ():
            folder.rename(f"too-early-{time.monotonic_ns()}")
        command = ["--resume", str(only_run())] if has_checkpoint else argv
        resumed += has_checkpoint
    assert run(any_script, *command) == 0, Path("out.txt").read_text()
    print(f"{kills} kills, {resumed} times resumed")
    assert resumed > 5
    assert_same(calm, everything(only_run()))


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_by_a_signal(any_script: ModuleType, signum: int, expected: int) -> None:
    """It writes a checkpoint off the schedule, and prints the command to go on."""
    flags = {"total_timesteps": 1_000_000, "checkpoint_freq": 400_000}
    if any_script.__name__.endswith("selfplay"):
        flags["team_change"] = 500_000  # a change of team is a reset, too
    pid = start(any_script, *words(any_script, **flags))
    wait_for(pid, lambda: list(Path("runs").glob("*/checkpoint.pt")))
    time.sleep(0.5)
    os.kill(pid, signum)
    assert wait(pid) == expected, Path("out.txt").read_text()
    folder = only_run()
    assert "Traceback" not in Path("out.txt").read_text()
    assert re.search(rf"python \S*{any_script.__name__}\.py --resume {folder}\n", Path("out.txt").read_text())
    stopped = torch.load(folder / "checkpoint.pt", weights_only=True)
    total = stopped["global_step"] + LIVELY[any_script.__name__]["checkpoint_freq"]
    assert run(any_script, "--resume", str(folder), "--total-timesteps", str(total)) == 0, Path("out.txt").read_text()
    finished = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert finished["global_step"] >= total
    assert json.loads((folder / "args.json").read_text())["total_timesteps"] == total


@pytest.mark.slow
@of_shared_code
def test_no_checkpoints_but_the_last(any_script: ModuleType) -> None:
    """--checkpoint-freq 0 writes the first and the last; a finished run can be made longer, and not repeated."""
    assert run(any_script, *words(any_script, checkpoint_freq=0, total_timesteps=1000)) == 0
    folder = only_run()
    state = torch.load(folder / "checkpoint.previous.pt", weights_only=True)  # before the final evaluation
    assert state["global_step"] >= 1000
    assert run(any_script, "--resume", str(folder)) == 2
    refusal = "error: --resume takes a run that has not finished, or more --total-timesteps than"
    assert refusal in Path("out.txt").read_text()
    assert run(any_script, "--resume", str(folder), "--total-timesteps", "1500") == 0, Path("out.txt").read_text()
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"] >= 1500


@pytest.mark.slow
@of_shared_code
def test_killed_between_two_renames(any_script: ModuleType, calm: dict[str, Any], killed: Path) -> None:
    """The newest checkpoint is whole but has no name yet: it counts, and the one before is not needed."""
    shutil.copytree(killed, Path("runs") / killed.name)
    os.replace(only_run() / "checkpoint.pt", only_run() / "checkpoint.next.pt")
    (only_run() / "checkpoint.previous.pt").write_bytes(b"")
    assert run(any_script, "--resume", str(only_run())) == 0, Path("out.txt").read_text()
    assert "warning: going on" not in Path("out.txt").read_text()
    assert_same(calm, everything(only_run()))


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "other format", "buffer"])
@of_shared_code
def test_a_damaged_checkpoint(any_script: ModuleType, damage: str, calm: dict[str, Any], killed: Path) -> None:
    """The run goes on from the one before, with a warning, and the result is the same."""
    if damage == "buffer" and not any_script.__name__.startswith("sac"):
        pytest.skip("it has none")
    shutil.copytree(killed, Path("runs") / killed.name)
    path = only_run() / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    elif damage == "other format":
        buffer = io.BytesIO()
        torch.save(torch.load(path, weights_only=True) | {"format": 99}, buffer)
        content = bytearray(buffer.getvalue())
    elif damage == "buffer":
        newest = max((only_run() / "checkpoint.replay").rglob("*.npz"), key=lambda path: path.stat().st_mtime_ns)
        newest.write_bytes(newest.read_bytes()[:-30])
    path.write_bytes(content[:-100] if damage == "truncated" else content)
    if damage == "missing":
        path.unlink()
    assert run(any_script, "--resume", str(only_run())) == 0, Path("out.txt").read_text()
    assert "warning: resuming from checkpoint.previous.pt" in Path("out.txt").read_text()
    assert_same(calm, everything(only_run()))


class Bomb:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


def bad_resume(script: ModuleType, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence of a refusal."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        script.main(script.parse_args(script.Args, [*argv, "--no-compile"]))
    assert exit_info.value.code == 2
    output, sentence = capsys.readouterr()
    del exit_info
    gc.collect()  # the locks that the frames of the traceback hold
    assert sentence.startswith("error: ")
    assert sentence.count("\n") == 1
    assert "run folder" not in output  # the announcement of a run that goes on
    return sentence


@pytest.mark.slow
@of_shared_code
def test_refusals(any_script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Folders without a run, arguments that are not the run's, a run that is running, damaged and dangerous files."""
    Path("empty").mkdir()
    for name in ("empty", "none"):
        assert "--resume takes a run folder" in bad_resume(any_script, capsys, "--resume", name)
    argv = words(any_script, total_timesteps=600)
    assert run(any_script, *argv) == 0
    folder = only_run()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    both = bad_resume(any_script, capsys, "--resume", str(folder), "--evaluate", str(folder))
    assert both == "error: --resume and --evaluate exclude each other: give one of the two\n"
    for flag, value in (("--seed", "2"), ("--gamma", "0.5"), ("--exp-name", "other")):
        sentence = bad_resume(any_script, capsys, "--resume", str(folder), flag, value)
        assert sentence.startswith(f"error: {flag} cannot change with --resume: the run has ")
        assert sentence.endswith(f", and {value} was given\n")
    with lock_folder(folder):
        longer = ("--resume", str(folder), "--total-timesteps", "100000")
        assert "--resume takes a run that no other process is training" in bad_resume(any_script, capsys, *longer)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    fewer = "--resume", str(folder), "--total-timesteps", "300"
    assert "--resume takes a run that has not finished, or more" in bad_resume(any_script, capsys, *fewer)
    for damaged in (b"", b"not a checkpoint" * 99, pickle.dumps(Bomb()), pickle.dumps([1, 2, 3])):
        for name in ("checkpoint.pt", "checkpoint.previous.pt"):
            (folder / name).write_bytes(damaged)
        assert "--resume takes a run folder with a valid checkpoint" in bad_resume(any_script, capsys, *longer)
    archive = io.BytesIO()
    torch.save({"format": 1, "global_step": Bomb()}, archive)
    (folder / "checkpoint.pt").write_bytes(archive.getvalue())
    assert "--resume takes a run folder with a valid checkpoint" in bad_resume(any_script, capsys, *longer)
    assert not Path("exploded").exists()
    (folder / "args.json").write_text('{"seed": 1, "of_another_script": 2}')
    assert "--resume takes a run folder with the args.json" in bad_resume(any_script, capsys, "--resume", str(folder))


@pytest.mark.slow
def test_another_scripts_run(capsys: pytest.CaptureFixture[str]) -> None:
    """It is named."""
    assert run(ppo_continuous, *words(ppo_continuous, total_timesteps=600)) == 0
    for script in (sac_continuous, ppo_selfplay, sac_selfplay):
        for flag in ("resume", "evaluate"):
            sentence = bad_resume(script, capsys, f"--{flag}", str(only_run()))
            own = f"--{flag} takes a run of {script.__name__}.py"
            assert sentence == f"error: {own}, and {only_run()} is a run of ppo_continuous.py\n"


def break_down(monkeypatch: pytest.MonkeyPatch, script: ModuleType, fault: str) -> dict[str, Any]:
    """Arranges for environment 1 of 3 to do `fault` after 20 steps, and returns the flags of a run that meets it."""
    if script.__name__.endswith("selfplay"):
        for name, value in {"victim": 1, "fault": fault}.items():
            monkeypatch.setattr(faulty_game, name, value)
        monkeypatch.setattr(faulty_game, "made", 0)
        flags: dict[str, Any] = {"env_id": "faulty_game", "num_games": 3, "cross_play_games": 0, "eval_games": 2}
    else:
        for name, value in {"made": 0, "victim": 1, "fault": fault}.items():
            monkeypatch.setattr(Faulty, name, value)
        flags = {"env_id": "Faulty-v0", "num_envs": 3, "eval_episodes": 2}
    flags |= {"eval_freq": 0, "cuda": False, "compile": False, "checkpoint_freq": 12, "total_timesteps": 240}
    if script.__name__.startswith("ppo"):
        flags |= {"num_steps": 4, "num_minibatches": 2}
    return TINY[script.__name__] | flags


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["reset", "step", "exit"])
def test_an_environment_that_raises(
    any_script: ModuleType, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, where and what it was, and a checkpoint of the beginning of the iteration to go on from."""
    is_selfplay = any_script.__name__.endswith("selfplay")
    flags = break_down(monkeypatch, any_script, fault)
    with pytest.raises(SystemExit) as exit_info:
        any_script.main(any_script.Args(**flags))
    assert exit_info.value.code == 1
    captured = capsys.readouterr()
    # The 21st step is in the iteration that begins at step 60; an episode ends with the 20th.
    iteration = 60 if fault != "reset" else {"ppo": 48, "sac": 57}[any_script.__name__[:3]]
    where = "reset" if fault == "reset" else ("step" if is_selfplay else "its step 21")
    what = "SystemExit: out of order" if fault == "exit" else "ZeroDivisionError: out of order"
    sentence = f"failed after step {iteration}: environment 1 in {where}: {what}"
    assert captured.err.splitlines()[-1] == f"error: --env-id {flags['env_id']} {sentence}"
    traceback = captured.err.rpartition("error: ")[0]  # of the task's own exception, but not of sys.exit
    assert traceback.count("Traceback") == (fault != "exit")
    assert (("faulty_game.py" if is_selfplay else "toy_envs.py") in traceback) == (fault != "exit")
    state = torch.load(only_run() / "checkpoint.pt", weights_only=True)
    assert state["global_step"] == iteration
    break_down(monkeypatch, any_script, "")
    any_script.main(any_script.parse_args(any_script.Args, ["--resume", str(only_run())]))
    assert torch.load(only_run() / "checkpoint.pt", weights_only=True)["global_step"] == 240


@pytest.mark.parametrize("fault", ["step", "exit", "panic"])
def test_an_environment_that_raises_in_a_process(
    script: ModuleType, fault: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same with --vectorization async."""
    flags = break_down(monkeypatch, script, fault) | {"vectorization": "async"}
    with pytest.raises(SystemExit) as exit_info:
        script.main(script.Args(**flags))
    assert exit_info.value.code == 1
    what = FAULTS[fault].__name__
    expected = f"failed after step 60: environment [012] in its step 21: {what}: out of order"  # each process counts
    stderr = capfd.readouterr().err
    assert re.search(expected, stderr.splitlines()[-1])
    assert "Traceback" not in stderr
    assert (only_run() / "checkpoint.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["observation", "reward"])
def test_an_environment_that_gives_no_number(
    any_script: ModuleType, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The quantity and the step, exit status 1, and the last checkpoint is from before."""
    with pytest.raises(SystemExit) as exit_info:
        any_script.main(any_script.Args(**break_down(monkeypatch, any_script, fault)))
    assert exit_info.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {fault} is not a finite number at step 63"
    state = torch.load(only_run() / "checkpoint.pt", weights_only=True)
    assert state["global_step"] == 60
    assert all(np.isfinite(value).all() for _, value in flatten(state) if isinstance(value, (int, float)))
    break_down(monkeypatch, any_script, "")
    any_script.main(any_script.parse_args(any_script.Args, ["--resume", str(only_run())]))


@pytest.mark.parametrize("quantity", ["loss", "grad_norm"])
def test_learning_that_gives_no_number(
    any_script: ModuleType, quantity: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss or a gradient that is not finite: neither a checkpoint nor a model has such weights."""
    flags = break_down(monkeypatch, any_script, "") | {"learning_starts": 30, "updates_per_step": 0.2}
    flags["log_freq"] = 10**6  # SAC's losses are also checked before a checkpoint
    is_ppo = any_script.__name__.startswith("ppo")
    flags = {name: value for name, value in flags.items() if hasattr(any_script.Args, name)}
    names = ("value_loss", "grad_norm") if is_ppo else ("qf1_loss", "qf_grad_norm")
    key = dict(zip(("loss", "grad_norm"), names, strict=True))[quantity]
    update, calls = any_script.update, []

    def spoilt(*args: Any) -> dict[str, torch.Tensor]:
        calls.append(1)
        metrics = update(*args)
        return metrics | ({f"losses/{key}": torch.tensor(float("nan"))} if len(calls) > 10 else {})

    monkeypatch.setattr(any_script, "update", spoilt)
    with pytest.raises(SystemExit) as exit_info:
        any_script.main(any_script.Args(**flags))
    assert exit_info.value.code == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"error: losses/{key} is not a finite number at step ")
    step = int(message.split()[-1].replace(",", ""))
    assert torch.load(only_run() / "checkpoint.pt", weights_only=True)["global_step"] == step - 12
    assert not (only_run() / "model.pt").exists()


@pytest.mark.slow
@of_shared_code
def test_a_full_disk(
    any_script: ModuleType, calm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warning with the reason for each checkpoint that is not written; training goes on, to the same result."""
    flags = LIVELY[any_script.__name__] | {"cuda": False, "compile": False}
    fsync, calls = os.fsync, []

    def full(file: int) -> None:
        calls.append(1)
        if 4 <= len(calls) <= 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    capsys.readouterr()
    any_script.main(any_script.Args(**flags))
    lines = capsys.readouterr().err.splitlines()
    warnings = [line for line in lines if line.startswith("warning: the checkpoint of step ")]
    assert len(warnings) >= 3
    assert all(
        line.endswith(" was not written, and the last one is kept: [Errno 28] No space left on device")
        for line in warnings
    )
    both = []
    for content in (calm, everything(only_run())):  # the buffer's rows are divided among other files
        both.append({key: value for key, value in content.items() if "/files/" not in key and ".npz" not in key})
    assert_same(*both)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@of_shared_code
def test_a_disk_that_stays_full(
    any_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing can be written any more: the run prints its result, has exit status 1, and can be resumed."""
    record = "tensorboard.summary.writer.record_writer.RecordWriter.write"
    fsync, written = os.fsync, []

    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    def nearly_full(file: int) -> None:
        written.append(1)
        if len(written) == 3:
            monkeypatch.setattr(record, full)
            monkeypatch.setattr(os, "fsync", full)
        fsync(file)

    monkeypatch.setattr(os, "fsync", nearly_full)
    with pytest.raises(SystemExit) as exit_info:
        any_script.main(any_script.Args(**LIVELY[any_script.__name__] | {"cuda": False, "compile": False}))
    assert exit_info.value.code == 1
    captured = capsys.readouterr()
    assert captured.err.endswith("\nerror: the model or the checkpoint could not be written\n")
    assert "are not in TensorBoard: [Errno 28] No space left on device" in captured.err
    assert "warning: model.pt could not be written: [Errno 28] No space left on device" in captured.err
    assert not list(only_run().rglob("*.new"))
    assert "evaluation: return" in captured.out or "scores: " in captured.out
    folder = only_run().resolve()
    monkeypatch.undo()
    any_script.main(any_script.parse_args(any_script.Args, ["--resume", str(folder)]))
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["is_finished"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@of_shared_code
def test_a_disk_that_is_full_for_the_last_points(any_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has not finished without its last evaluation, which a resume repeats."""
    save = utils.run.Run.save_checkpoint

    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    def save_checkpoint(run: utils.run.Run, is_finished: bool) -> bool:
        if is_finished:
            with monkeypatch.context() as context:
                context.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", full)
                run.log({"late": 1.0}, run.global_step)
                return save(run, is_finished)
        return save(run, is_finished)

    monkeypatch.setattr(utils.run.Run, "save_checkpoint", save_checkpoint)
    with pytest.raises(SystemExit) as exit_info:
        any_script.main(any_script.Args(**LIVELY[any_script.__name__] | {"cuda": False, "compile": False}))
    assert exit_info.value.code == 1
    folder = only_run().resolve()
    assert not torch.load(folder / "checkpoint.pt", weights_only=True)["is_finished"]
    monkeypatch.undo()
    any_script.main(any_script.parse_args(any_script.Args, ["--resume", str(folder)]))
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["is_finished"]


def test_folders_that_cannot_be_written(any_script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence before training."""
    Path("runs").write_text("a file")
    assert "the run folder cannot be made" in bad_resume(any_script, capsys, *words(any_script))


@pytest.mark.slow
@pytest.mark.parametrize("script", [sac_continuous, sac_selfplay], ids=lambda script: script.__name__)
def test_the_buffer_is_on_disk_once(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is written once, and files that the last two checkpoints do not need are removed."""
    flags: dict[str, Any] = {"buffer_size": 200, "checkpoint_freq": 40, "total_timesteps": 1200, "eval_freq": 0}
    flags |= {"cuda": False, "compile": False}
    if script is sac_selfplay:
        flags |= {"env_id": "sumo", "cross_play_games": 0, "num_games": 4, "replay_opponents": "all"}
    written: list[int] = []
    write_file = utils.run.write_file

    def spy(path: Path, contents: bytes) -> None:
        write_file(path, contents)
        if path.suffix == ".npz":
            rows = [len(np.load(file)["rows"]) for file in path.parent.iterdir()]
            written.append(len(np.load(path)["rows"]))
            assert sum(rows) <= 200 + 4 * 40

    monkeypatch.setattr(utils.run, "write_file", spy)
    script.main(script.Args(**LIVELY[script.__name__] | flags))
    assert sum(written) == 1200


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, which W&B writes after seven bytes of its own."""
    record, position = b"", 7
    while position + 7 <= len(log):
        if position % 32768 > 32768 - 7:  # a block's end, too short for a header
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", log[position : position + 7])
        record, position = record + log[position + 7 : position + 7 + length], position + 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


@pytest.mark.slow
@of_shared_code
def test_wandb_goes_on_in_the_same_run(any_script: ModuleType) -> None:
    """Offline, with the real client: after a kill and a resume its files hold each point of TensorBoard's once."""
    flags = {"track": True, "wandb_project_name": "killed"}
    pid = start(any_script, *words(any_script, **flags))
    wait_for(pid, lambda: list(Path("runs").glob("*/checkpoint.previous.pt")))
    time.sleep(0.3)
    kill(pid)
    assert run(any_script, "--resume", str(only_run())) == 0, Path("out.txt").read_text()
    rows: list[tuple[int, str]] = []
    (record,) = (only_run() / "wandb").glob(f"offline-run-*/run-{only_run().name}.wandb")
    for data in leveldb_records(record.read_bytes()):
        entry = wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]
        if entry.HasField("history"):
            keys = [item.key or "/".join(item.nested_key) for item in entry.history.item]
            rows += [(entry.history.step.num, key) for key in keys if not key.startswith("_")]
    events = EventAccumulator(str(only_run()), size_guidance={"scalars": 0}).Reload()
    points = [(event.step, tag) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    assert len(set(rows)) == len(rows)
    assert sorted(rows) == sorted(points)


def test_checkpoints_that_cut_episodes_off(
    script: ModuleType, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pendulum's episodes are 200 steps long."""
    for checkpoint_freq, is_too_often in ((599, True), (600, False), (0, False)):
        train(script, checkpoint_freq=checkpoint_freq, num_envs=3, total_timesteps=96, eval_episodes=1)
        warning = "warning: --checkpoint-freq 599 cuts episodes off that would take up to 600 steps of all environments"
        assert (warning in capsys.readouterr().err) == is_too_often
    longer = '{"max_episode_steps": 250}'
    train(script, checkpoint_freq=600, env_kwargs=longer, num_envs=3, total_timesteps=96, eval_episodes=1)
    assert "cuts episodes off that would take up to 750 steps" in capsys.readouterr().err


def test_weights_that_are_no_numbers_are_not_saved(
    any_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if no logged number has shown it."""
    flags = break_down(monkeypatch, any_script, "") | {"log_freq": 10**6, "checkpoint_freq": 0, "learning_starts": 30}
    flags = {name: value for name, value in flags.items() if hasattr(any_script.Args, name)}
    update, names = any_script.update, list[str]()

    def spoilt(agent: torch.nn.Module, *args: Any) -> dict[str, torch.Tensor]:
        names.extend(update(agent, *args) if not names else [])
        with torch.no_grad():
            for name, parameter in agent.named_parameters():
                if name.startswith(("critic.", "qf.")):  # acting needs neither
                    parameter.fill_(np.nan)
        return dict.fromkeys(names, torch.zeros(()))

    monkeypatch.setattr(any_script, "update", spoilt)
    with pytest.raises(SystemExit) as exit_info:
        any_script.main(any_script.Args(**flags))
    assert exit_info.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: weights are not finite numbers at step 240"
    assert not (only_run() / "model.pt").exists()
    state = torch.load(only_run() / "checkpoint.pt", weights_only=True)
    assert state["global_step"] == 0


def test_ids_without_a_version_or_with_a_module(script: ModuleType, train: Train) -> None:
    """They can be made, and not be looked up as they are."""
    for env_id in ("Pendulum", "toy_envs:Counting-v0"):
        train(script, env_id=env_id, total_timesteps=96, eval_episodes=1)


@pytest.mark.parametrize("script", [sac_continuous, sac_selfplay], ids=lambda script: script.__name__)
def test_metrics_of_updates_that_are_not_the_last(script: ModuleType) -> None:
    """With --policy-frequency 2 every other update has no actor; the metrics are then those of the update before."""
    flags: dict[str, Any] = {"policy_frequency": 2, "total_timesteps": 400, "eval_freq": 0, "checkpoint_freq": 0}
    flags |= {"learning_starts": 100, "log_freq": 40, "cuda": False, "compile": False}
    if script is sac_selfplay:
        flags |= {"env_id": "sumo", "cross_play_games": 0, "updates_per_step": 0.125}
    else:
        flags |= {"num_envs": 1}
    script.main(script.Args(**LIVELY[script.__name__] | flags))
    scalars = read_scalars(only_run())
    series = {
        name: [step for step, _ in scalars[f"losses/{name}"]] for name in ("qf1_loss", "actor_loss", "alpha_loss")
    }
    assert len(series["qf1_loss"]) > 5
    assert series["actor_loss"] == series["alpha_loss"] == series["qf1_loss"]


def is_replaced(path: Path, content: bytes) -> bool:
    """Whether a file is there with other content. Between two renames it may be gone."""
    with suppress(FileNotFoundError):
        return path.read_bytes() != content
    return False


@pytest.mark.slow
@of_shared_code
def test_made_longer_and_killed_on_the_way(any_script: ModuleType) -> None:
    """A finished run that is made longer is unfinished again, and its checkpoints say so."""
    assert run(any_script, *words(any_script, total_timesteps=600)) == 0
    folder = only_run()
    finished = (folder / "checkpoint.pt").read_bytes()
    pid = start(any_script, "--resume", str(folder), "--total-timesteps", "1000000")
    path = folder / "checkpoint.pt"
    wait_for(pid, lambda: is_replaced(path, finished))
    kill(pid)
    if not path.exists():  # killed between two renames
        path = folder / "checkpoint.next.pt"
    assert torch.load(io.BytesIO(finished), weights_only=True)["is_finished"]
    assert not torch.load(path, weights_only=True)["is_finished"]


@pytest.mark.slow
@of_shared_code
def test_a_damaged_checkpoint_is_not_kept(any_script: ModuleType, killed: Path) -> None:
    """It does not become the previous checkpoint."""
    shutil.copytree(killed, Path("runs") / killed.name)
    path = only_run() / "checkpoint.pt"
    path.write_bytes(b"damaged")
    pid = start(any_script, "--resume", str(only_run()))
    wait_for(pid, lambda: is_replaced(path, b"damaged"))
    kill(pid)
    for path in only_run().glob("checkpoint*.pt"):
        assert torch.load(path, weights_only=True)["format"] == utils.run.CHECKPOINT_FORMAT
    assert (only_run() / "checkpoint.previous.pt").exists()
    assert (only_run() / "checkpoint.pt.damaged").read_bytes() == b"damaged"
