"""Units of `utils/run.py`, without training: a run whose model is one linear layer."""

import gc
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from conftest import read_scalars
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from toy_envs import make_vector

import utils.run
from sac_continuous import ReplayBuffer
from utils.errors import TaskError
from utils.run import (
    BufferFiles,
    Run,
    command_of,
    load_model,
    lock_folder,
    make_run_folder,
    parse_args,
    parse_json,
    prepare,
    read_file,
    seed_streams,
    to_bytes,
    write_file,
)


@dataclass
class Args:
    """The arguments that `Run` reads, and some of every type."""

    exp_name: str = "toy"
    env_id: str = "Pendulum-v1"
    seed: int = 1
    total_timesteps: int = 100
    checkpoint_freq: int = 0
    gamma: float = 0.99
    target_kl: float | None = None
    mode: Literal["one", "two"] = "one"
    sizes: tuple[int, ...] = (8, 8)
    track: bool = False
    capture_video: bool = False
    upload_model: bool = False
    save_model: bool = True
    evaluate: Path | None = None
    resume: Path | None = None


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder of its own."""
    monkeypatch.chdir(tmp_path)


def make_run(args: Args | None = None, stride: int = 10, rest: dict[str, Any] | None = None) -> Run:
    """A run of a linear layer."""
    args = args or Args()
    total_steps = -(-args.total_timesteps // stride) * stride
    envs = make_vector(AutoresetMode.SAME_STEP, 1)
    return Run(args, envs, total_steps, stride, model={"agent": nn.Linear(2, 1)}, rest=rest or {})


def test_parts_that_share_a_name_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint would keep one of the two."""
    with pytest.raises(SystemExit, match="2"):
        make_run(rest={"agent": {"num_updates": 0}})
    assert capsys.readouterr().err.endswith("parts in a checkpoint have different names, not agent, agent\n")
    assert not Path("runs").exists()


def train(act: Callable[[Run, int], Any] = lambda run, step: None, **kwargs: Any) -> Path:
    """A run that does `act` in each iteration; returns its folder."""
    with make_run(**kwargs) as run:
        for step, _ in run.steps():
            act(run, step)
    return run.folder


def only_run() -> Path:
    """The one run folder there is."""
    (folder,) = Path("runs").iterdir()
    return folder


def checkpoint() -> dict[str, Any]:
    """The newest checkpoint of that run."""
    return torch.load(only_run() / "checkpoint.pt", weights_only=True)


def refusal(capsys: pytest.CaptureFixture[str], function: Any, *args: Any, **kwargs: Any) -> str:
    """The one sentence with which a function ends the program."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        function(*args, **kwargs)
    assert exit_info.value.code == 2
    del exit_info
    gc.collect()  # the lock that the frames of the traceback hold
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    return stderr.removeprefix("error: ").rstrip()


# === Arguments ===


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf")])
def test_limits(value: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers outside and NaN are refused; the limits themselves and None are not."""
    limits = {"gamma target_kl": (0.0, 1.0)}
    for good in (0.0, 1.0):
        prepare(Args(gamma=good), limits)
    sentence = refusal(capsys, prepare, Args(target_kl=value), limits)
    assert sentence == f"--target-kl takes a number from 0 to 1, not {value}"


def test_json_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """An object, and nothing else."""
    assert parse_json("teams", '{"a": [1]}', "{}") == {"a": [1]}
    for text in ("", "{", "[1]", "3"):
        assert "--teams takes a JSON object such as {}, not " in refusal(capsys, parse_json, "teams", text, "{}")


def save_args(folder: Path, **changes: Any) -> Path:
    """A run folder with an args.json in which some values are replaced."""
    folder.mkdir(exist_ok=True)
    saved = {"script": "test_run.py"} | asdict(Args(gamma=0.5)) | changes
    (folder / "args.json").write_text(json.dumps(saved))
    return folder


def test_saved_arguments_are_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What may change with --resume or --evaluate may, and all else is refused with both values."""
    folder = save_args(tmp_path / "run", track=True)
    assert parse_args(Args, ["--resume", str(folder), "--total-timesteps", "7"]) == Args(
        gamma=0.5, track=True, total_timesteps=7, resume=folder
    )
    assert parse_args(Args, ["--resume", str(folder), "--upload-model"]).upload_model
    assert parse_args(Args, ["--evaluate", str(folder), "--seed", "7"]) == Args(gamma=0.5, seed=7, evaluate=folder)
    sentence = refusal(capsys, parse_args, Args, ["--resume", str(folder), "--gamma", "0.9"])
    assert sentence == "--gamma cannot change with --resume: the run has 0.5, and 0.9 was given"


@pytest.mark.parametrize("flag", ["resume", "evaluate"])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": "two"}, "seed"),
        ({"gamma": None}, "gamma"),
        ({"mode": "three"}, "mode"),
        ({"track": 1}, "track"),
        ({"target_kl": [0.1]}, "target_kl"),
        ({"unknown": 1}, "is of another version of the script, with --unknown"),
    ],
)
def test_saved_arguments_of_wrong_types(
    flag: str, changes: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence names the argument."""
    sentence = refusal(capsys, parse_args, Args, [f"--{flag}", str(save_args(tmp_path / "run", **changes))])
    assert sentence.startswith(f"--{flag} takes a run folder with the args.json of this script, and ")
    assert named in sentence


def test_a_folder_of_a_version_with_fewer_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They have their defaults, and the user is told."""
    folder = save_args(tmp_path / "run")
    saved = json.loads((folder / "args.json").read_text())
    del saved["mode"], saved["target_kl"]
    (folder / "args.json").write_text(json.dumps(saved))
    assert parse_args(Args, ["--evaluate", str(folder)]) == Args(gamma=0.5, evaluate=folder)
    values = "--target-kl is None, --mode is one"
    sentence = f"{folder} is of a version without some flags, which have their defaults: {values}"
    assert capsys.readouterr().err == f"warning: {sentence}\n"


@pytest.mark.slow
def test_folders_of_other_scripts_and_of_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other script is named; an args.json may be missing, or anything else."""
    folder = save_args(tmp_path / "run", script="other.py", of_other=1)
    sentence = refusal(capsys, parse_args, Args, ["--resume", str(folder)])
    assert sentence == f"--resume takes a run of test_run.py, and {folder} is a run of other.py"
    for text in ("", "[1, 2]", "3", "null", '"text"', "{}x", "\x00"):
        (folder / "args.json").write_text(text)
        assert "has none (" in refusal(capsys, parse_args, Args, ["--resume", str(folder)])
    for path in (tmp_path / "nothing", folder / "args.json"):
        assert refusal(capsys, parse_args, Args, ["--evaluate", str(path)]).endswith(f"and {path} is not a folder")
    sentence = refusal(capsys, parse_args, Args, ["--evaluate", str(folder), "--resume", str(folder)])
    assert sentence == "--resume and --evaluate exclude each other: give one of the two"


def test_a_killed_run_has_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoint can be resumed."""
    assert "valid model.pt" in refusal(capsys, load_model, tmp_path, {})
    (tmp_path / "checkpoint.pt").touch()
    sentence = refusal(capsys, load_model, tmp_path, {})
    assert sentence.endswith(
        f"and {tmp_path} has only a checkpoint: --resume it; with --no-save-model it gets no model.pt"
    )


def test_a_model_of_other_networks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As after a change of the script."""
    torch.save({"agent": torch.nn.Linear(2, 3).state_dict()}, tmp_path / "model.pt")
    for changed in (torch.nn.Linear(2, 4), torch.nn.Sequential(torch.nn.Linear(2, 3))):
        sentence = refusal(capsys, load_model, tmp_path, {"agent": changed})
        assert "the networks of its model differ from those of the file (RuntimeError: Error(s) in" in sentence


# === The loop ===


def test_steps_seeds_and_checkpoints() -> None:
    """Episodes begin anew at the start, after a checkpoint that is due, and after `begin_anew`."""
    yielded = []
    with make_run(Args(checkpoint_freq=40)) as run:
        for step, seed in run.steps():
            yielded.append((step, seed is not None))
            if step == 60:
                run.begin_anew()
            state = torch.load(run.folder / "checkpoint.pt", weights_only=True)
            assert (state["global_step"], state["is_finished"]) == (step // 40 * 40, False)
        state = torch.load(run.folder / "checkpoint.pt", weights_only=True)
        assert (state["global_step"], state["is_finished"]) == (100, False)  # on disk before the final evaluation
        assert (run.folder / "model.pt").exists()
    assert yielded == [(step, step in (0, 40, 70, 80)) for step in range(0, 100, 10)]
    assert torch.load(run.folder / "checkpoint.pt", weights_only=True)["is_finished"]


def test_seeds_depend_on_seed_and_step_only() -> None:
    """All streams begin anew, whatever was drawn before."""
    draws = []
    for seed, step in ((1, 0), (1, 0), (1, 10), (2, 0)):
        seeds = seed_streams(seed, step)
        draws.append((seeds, random.random(), np.random.rand(), torch.rand(1).item()))
        assert 0 <= seeds < 2**31
    assert draws[0] == draws[1]
    assert all(len({draw[i] for draw in draws}) == 3 for i in range(4))


def test_no_two_runs_meet_the_same_seed() -> None:
    """Neither at one step nor at different ones: with seed + step, seed 1 at step 10 would be seed 2 at step 9."""
    seeds = [seed_streams(seed, step) for seed in range(20) for step in range(20)]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(("stride", "due"), [(10, [20, 40, 60, 80, 100]), (16, [32, 48, 64, 80, 112]), (50, [50, 100])])
def test_due(stride: int, due: list[int]) -> None:
    """An iteration that passes a multiple of 20; 0 is never due."""
    with make_run(stride=stride) as run:
        assert [step + stride for step, _ in run.steps() if run.due(20, 0)] == due


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_check_tells_the_step(bad: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are steps in time: the second of five rows in an iteration of ten steps ends four steps on."""
    rewards = np.zeros((5, 3))

    def act(run: Run, step: int) -> None:
        run.check(reward=rewards, loss=1.0)
        if step == 10:
            rewards[1:, 2] = bad

    with pytest.raises(SystemExit) as exit_info:
        train(act)
    assert exit_info.value.code == 1
    assert capsys.readouterr().err == "error: reward is not a finite number at step 24\n"
    assert checkpoint()["global_step"] == 0


def test_speed_is_that_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps a second, whatever time evaluations take, on and off the schedule of the curves."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(utils.run, "time", SimpleNamespace(time=lambda: clock.now))
    with make_run() as run:
        for step, _ in run.steps():
            clock.now += 1.0
            if (step + 10) % 20 == 0:
                run.log({"losses/loss": 0.0}, step + 10)
            if step + 10 in (40, 50):
                clock.now += 1e4
                run.log({"eval/return_mean": 0.0, "eval/return_std": 0.0, "eval/length_mean": 1.0}, step + 10)
    assert read_scalars(run.folder)["charts/SPS"] == [(step, 10.0) for step in (20, 40, 60, 80, 100)]


# === How runs end ===


def test_own_exceptions_are_not_saved() -> None:
    """An exception of the script leaves the last checkpoint and a traceback."""
    with pytest.raises(ZeroDivisionError):
        train(lambda run, step: 1 // (step - 50))
    assert checkpoint()["global_step"] == 0
    assert not (only_run() / "model.pt").exists()


def break_down(run: Run, step: int) -> None:
    """A fault of the task at step 50."""
    if step == 50:
        raise TaskError("environment 0 in reset: ValueError: no")


def test_faults_of_the_task_are_saved(capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint is of the beginning of the iteration, and counts as an additional reset."""
    with pytest.raises(SystemExit) as exit_info:
        train(break_down)
    assert exit_info.value.code == 1
    captured = capsys.readouterr()
    expected = "error: --env-id Pendulum-v1 failed after step 50: environment 0 in reset: ValueError: no"
    assert captured.err.splitlines()[-1] == expected
    assert f"--resume {only_run()}\n" in captured.out
    state = checkpoint()
    assert (state["global_step"], state["is_finished"]) == (50, False)
    assert (only_run() / "model.pt").exists()


def test_resuming(capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer steps than the run has had are refused, and so are as many if it has finished; dicts come back."""
    counters = {"count": 0}

    def count(run: Run, step: int) -> None:
        counters["count"] += 1
        break_down(run, step)

    with pytest.raises(SystemExit):
        train(count, rest={"counters": counters})
    folder = only_run()
    before = (folder / "args.json").read_bytes()
    sentence = refusal(capsys, train, args=Args(resume=folder, total_timesteps=40), rest={"counters": {"count": 0}})
    assert sentence == f"--total-timesteps 40 is less than the 50 steps that {folder} has already taken"
    assert (folder / "args.json").read_bytes() == before
    counters["count"] = 0
    steps: list[int] = []
    train(lambda run, step: steps.append(step), args=Args(resume=folder), rest={"counters": counters})
    assert counters["count"] == 6  # the sixth iteration is the one that failed
    assert steps == [50, 60, 70, 80, 90]
    sentence = refusal(capsys, train, args=Args(resume=folder), rest={"counters": counters})
    assert sentence.startswith("--resume takes a run that has not finished, or more --total-timesteps than the 100 of ")
    train(args=Args(resume=folder, total_timesteps=130), rest={"counters": counters})
    assert (checkpoint()["global_step"], checkpoint()["is_finished"]) == (130, True)


def test_an_unfinished_evaluation_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in the final evaluation: exit status 130, no traceback, the model stays; --resume trains no further."""

    def evaluate(run: Run) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    def train_and_evaluate() -> None:
        with make_run() as run:
            for _ in run.steps():
                pass
            model.append((run.folder / "model.pt").read_bytes())
            evaluate(run)

    model: list[bytes] = []
    prepare(Args(), {})  # installs the signal handlers
    with pytest.raises(SystemExit) as exit_info:
        train_and_evaluate()
    assert exit_info.value.code == 130
    captured = capsys.readouterr()
    assert captured.err == ""
    assert f"--resume {only_run()}\n" in captured.out
    assert (only_run() / "model.pt").read_bytes() == model[0]
    with make_run(Args(resume=only_run())) as run:
        assert list(run.steps()) == []
        run.log({"eval/return_mean": 1.5, "eval/return_std": 0.0, "eval/length_mean": 1.0}, 100)
    assert "evaluation: return 1.50" in capsys.readouterr().out
    assert read_scalars(only_run())["eval/return_mean"] == [(100, 1.5)]
    assert checkpoint()["is_finished"]


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_after_the_iteration(signum: int, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """And saves; a second one would end the program at once."""
    prepare(Args(), {})

    def act(run: Run, step: int) -> None:
        if step == 30:
            os.kill(os.getpid(), signum)
            assert signal.getsignal(signum) == utils.run.abort

    with pytest.raises(SystemExit) as exit_info:
        train(act)
    assert exit_info.value.code == status
    assert f"stopped by signal {signum} after step 40" in capsys.readouterr().out
    assert checkpoint()["global_step"] == 40


def test_two_sigterms_at_once_are_one_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm sends one to the run and one to its sweep, which passes it on. A later one ends the program at once."""
    prepare(Args(), {})

    def act(run: Run, step: int) -> None:
        if step == 30:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as exit_info:
        train(act)
    assert exit_info.value.code == 143
    assert checkpoint()["global_step"] == 40
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(utils.run, "stop_time", time.monotonic() - 3.0)
    with pytest.raises(SystemExit, match="143"):
        utils.run.abort(signal.SIGTERM, None)


def test_a_disk_that_is_full_at_the_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status says that there is no model."""

    def act(run: Run, step: int) -> None:
        if step == 90:
            monkeypatch.setattr(os, "fsync", lambda _: os.open("/dev/null/nothing", 0))

    with pytest.raises(SystemExit) as exit_info:
        train(act)
    assert exit_info.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: the model or the checkpoint could not be written"
    assert not list(only_run().glob("*.new"))


# === Files ===


def test_run_folders(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that start in the same second have folders of their own; names need no quoting; one process has the lock."""
    monkeypatch.setattr(utils.run, "time", SimpleNamespace(time=lambda: 1234567890.5))
    folders = [make_run_folder(Args(env_id="ALE/Pong:x-v5", exp_name="a b")) for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(re.fullmatch(r"[\w.-]+", folder.name) for folder in folders)
    with lock_folder(folders[0]):
        sentence = refusal(capsys, lock_folder, folders[0])
        assert sentence == f"--resume takes a run that no other process is training, and {folders[0]} is locked by one"
    lock_folder(folders[0]).close()
    Path("empty").mkdir()
    os.chdir("empty")
    Path("runs").write_text("a file")
    assert refusal(capsys, make_run_folder, Args()).startswith("the run folder cannot be made: ")


def test_files_are_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure there is the old file, and nothing of the new one."""
    path = tmp_path / "file"
    write_file(path, b"old")

    def full(_: int) -> None:
        raise OSError("full")

    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="full"):
            write_file(path, b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_every_flipped_byte_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the weights of model.pt, and wherever it matters elsewhere: the file is refused, or its contents are whole."""
    torch.manual_seed(0)
    saved, loaded = nn.Linear(3, 2), nn.Linear(3, 2)
    whole = to_bytes({"agent": saved.state_dict(), "args": {"seed": 1}})
    refused = 0
    for position in range(0, len(whole), 7):
        (tmp_path / "model.pt").write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        try:
            load_model(tmp_path, {"agent": loaded})
            assert torch.equal(loaded.weight, saved.weight)
        except SystemExit:
            refused += 1
    assert refused > 10
    assert "--evaluate takes a run folder with a valid model.pt of this script" in capsys.readouterr().err
    weights = saved.weight.detach().numpy().tobytes()
    position = whole.index(weights)
    (tmp_path / "model.pt").write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    with pytest.raises(ValueError, match="checksum"):
        read_file(tmp_path / "model.pt")


@given(
    capacity=st.integers(4, 20),
    steps=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["", "save", "save and reload"])), max_size=40),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_buffers_saved_and_loaded_in_any_order(tmp_path: Path, capacity: int, steps: list[tuple[int, str]]) -> None:
    """A buffer read from files holds the last `capacity` transitions in their rows; each is on disk once."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))

    def make() -> tuple[ReplayBuffer, BufferFiles]:
        buffer = ReplayBuffer(capacity, 1, 1, torch.device("cpu"))
        return buffer, BufferFiles(buffer, folder)

    (buffer, files), count = make(), 0
    for num_new, then in steps:
        if num_new:
            numbers = np.arange(count, count + num_new, dtype=np.float32)
            buffer.add(numbers[:, None], numbers[:, None], numbers, numbers[:, None], numbers)
            count += num_new
        if then:
            state = files.state_dict()
            files.remove_old()
            assert all(stop > count - capacity and stop - start <= capacity for start, stop in state["files"])
        if then == "save and reload":
            buffer, files = make()
            files.load_state_dict(state)
        assert buffer.total == count
        kept = np.arange(max(0, count - capacity), count)
        assert (buffer.data[kept % capacity].numpy() == kept[:, None]).all()


def test_the_buffer_of_the_checkpoint_before_can_still_be_read(tmp_path: Path) -> None:
    """Its files stay until the next checkpoint, also those whose transitions the newest one no longer has."""
    buffer = ReplayBuffer(10, 1, 1, torch.device("cpu"))
    files, contents = BufferFiles(buffer, tmp_path), np.zeros(0)
    before: dict[str, Any] = {}
    for start in range(0, 60, 4):
        numbers = np.arange(start, start + 4, dtype=np.float32)
        buffer.add(numbers[:, None], numbers[:, None], numbers, numbers[:, None], numbers)
        newest = files.state_dict()
        files.remove_old()
        if before:
            other = ReplayBuffer(10, 1, 1, torch.device("cpu"))
            BufferFiles(other, tmp_path).load_state_dict(before)
            assert np.array_equal(other.data[: before["total"], 0].numpy(), contents[: before["total"]])
        before, contents = newest, buffer.data[:, 0].numpy().copy()


def test_a_checkpoint_that_was_not_renamed() -> None:
    """A kill between two renames: the new checkpoint gets its name before it could be taken for an older one."""
    train(args=Args(checkpoint_freq=20))
    folder, seen = only_run(), list[list[str]]()
    (folder / "checkpoint.pt").rename(folder / "checkpoint.next.pt")

    def act(run: Run, step: int) -> None:
        seen.append(sorted(path.name for path in folder.glob("checkpoint*.pt")))

    train(act, args=Args(resume=folder, total_timesteps=120))
    assert seen[0] == ["checkpoint.previous.pt", "checkpoint.pt"]


def test_the_command_of_a_flag_with_several_values() -> None:
    """As the command line takes them."""
    command = command_of(Args(sizes=(4, 2), seed=3))
    assert command.endswith(" --seed 3 --sizes 4 2")
    assert parse_args(Args, command.split()[2:]) == Args(sizes=(4, 2), seed=3)
