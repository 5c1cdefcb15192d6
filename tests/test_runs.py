"""The scripts as their users run them: what a run leaves behind, what it prints, and that it can be repeated."""

import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import imageio.v3 as iio
import numpy as np
import pytest
import scipy.stats
import torch
import wandb
from conftest import TINY, Train, assert_same_weights, load_file, load_weights, read_scalars

import ppo_continuous
import sac_continuous
import utils.run
from utils.run import load_model

ROOT = Path(__file__).parent.parent
# OPENBLAS_CORETYPE chooses OpenBLAS's kernels. With other kernels the same run rounds differently.
VARIABLES = {key: value for key, value in os.environ.items() if key == "PATH" or key.startswith("OPENBLAS_")}
VARIABLES |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}


def command(script: ModuleType, path: Path | None = None, **flags: Any) -> list[str]:
    """The command line of a tiny run."""
    flags = {"env_id": "Pendulum-v1", "eval_episodes": 2} | TINY[script.__name__] | flags
    words = [sys.executable, str(path or script.__file__), "--no-cuda", "--no-compile"]
    return words + [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def run_command(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs it to its end."""
    return subprocess.run(words, cwd=folder, env=VARIABLES, capture_output=True, text=True, timeout=120, check=False)


def evaluate(script: ModuleType, folder: Path, *words: str) -> None:
    """The script's --evaluate."""
    script.main(script.parse_args(script.Args, ["--evaluate", str(folder), *words]))


@pytest.mark.slow
def test_copied_alone_into_an_empty_folder(
    script: ModuleType,
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same weights as beside utils/, and the command that it names evaluates them."""
    alone, name = tmp_path / "alone", f"{script.__name__}.py"
    alone.mkdir()
    (alone / name).write_text((ROOT / name).read_text())
    flags: dict[str, Any] = {"checkpoint_freq": 70, "eval_freq": 100}
    result = run_command(command(script, Path(name), **flags), alone)
    assert result.returncode == 0, result.stderr
    expected = f"no utils/run.py in the folder of {name}: the run has no checkpoints and no videos"
    assert result.stdout.splitlines()[0] == expected
    (folder,), other = (alone / "runs").iterdir(), train(script, **flags)
    assert_same_weights(folder, other)
    curves, other_curves = read_scalars(folder), read_scalars(other)
    assert curves.pop("charts/SPS")
    del other_curves["charts/SPS"]
    assert curves == other_curves

    assert {path.name for path in alone.iterdir()} - {"__pycache__"} == {"runs", name}
    assert re.fullmatch(rf"Pendulum-v1__{script.__name__}__1__\d+", folder.name)
    assert {"args.json", "model.pt"} < {path.name for path in folder.iterdir()}
    (evaluation,) = re.findall(rf"^step {curves['eval/return_mean'][-1][0]}: (.*)$", result.stdout, re.MULTILINE)
    assert f"run folder: runs/{folder.name}" in result.stdout
    (next_command,) = re.findall(rf"python ({name} --evaluate \S+)", result.stdout)
    again = run_command([sys.executable, *next_command.split()], alone)
    assert again.stdout.strip() == evaluation, again.stderr
    copy = load_file(alone / name, "copied_alone")
    capsys.readouterr()
    for flag in ("--resume", "--track", "--upload-model", "--capture-video", "--vectorization native"):
        words = [*flag.split(), str(folder)] if flag == "--resume" else flag.split()
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.raises(SystemExit, match="2"):
            copy.main(copy.parse_args(copy.Args))
        assert capsys.readouterr().err == f"error: {flag} needs utils/run.py in the folder of {name}\n"
    bare, strange = tmp_path / "bare", tmp_path / "strange"
    shutil.copytree(folder, bare), shutil.copytree(folder, strange)
    (bare / "args.json").unlink()
    (strange / "args.json").write_text('{"own_flag": 1}')
    for bad, sentence in {
        ("--gamma", "2"): "--gamma takes a number from 0 to 1, not 2.0",
        ("--evaluate", "x"): "--evaluate takes a run folder with args.json and model.pt, and x lacks",
        ("--evaluate", str(bare)): f"--evaluate takes a run folder with args.json and model.pt, and {bare} lacks",
        ("--evaluate", str(strange)): f"--evaluate takes a run of this version of {name}, and {strange} is another's",
        (
            "--env-id",
            "Nope-v1",
        ): "--env-id Nope-v1 with --env-kwargs {} cannot be made: Environment `Nope` doesn't exist",
        (
            "--evaluate",
            str(folder),
            "--env-id",
            "HalfCheetah-v5",
        ): "--env-id cannot change with --evaluate: the run has Pendulum-v1",
        (
            "--evaluate",
            str(folder),
            "--env-kwargs",
            '{"g": 1.0}',
        ): "--env-kwargs cannot change with --evaluate: the run has {}",
        ("--env-kwargs", "{bad"): "--env-id HalfCheetah-v5 with --env-kwargs {bad cannot be made: ",
    }.items():
        monkeypatch.setattr(sys, "argv", [name, *bad])
        with pytest.raises(SystemExit, match="2"):
            copy.main(copy.parse_args(copy.Args))
        error = capsys.readouterr().err
        assert error.startswith(f"error: {sentence}")
        assert error.count("\n") == 1
    monkeypatch.chdir(alone)
    envs = SimpleNamespace(close=lambda: None)
    run = copy.Run(copy.Args(), envs, 1, 1, {})
    assert len(list(run.steps())) == 1
    run.__exit__(KeyError, KeyError("a fault in the final evaluation"), None)
    assert (run.folder / "model.pt").exists()
    assert "next: " in capsys.readouterr().out
    stand_in = copy.Run(copy.Args(), envs, 1, 1, {})
    with pytest.raises(FloatingPointError), stand_in as run:
        run.check(loss=np.nan)
    assert not (run.folder / "model.pt").exists()  # its weights may be broken
    assert "next: " not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="130"), copy.Run(copy.Args(), envs, 1, 1, {}) as run:
        raise KeyboardInterrupt
    assert (run.folder / "model.pt").exists()
    monkeypatch.setattr(copy.time, "time", lambda: 0.0)
    twice = [copy.Run(copy.Args(), None, 1, 1, {}).folder for _ in range(2)]
    assert twice[0] != twice[1]  # two runs that begin in the same second
    spaces = gym.spaces.Box(-np.inf, np.inf, (1,)), gym.spaces.Discrete(2)
    for space in spaces:
        monkeypatch.setattr(
            copy, "SyncVectorEnv", lambda *_, space=space, **__: SimpleNamespace(single_action_space=space)
        )
        with pytest.raises(SystemExit, match="2"):
            copy.vectorize([], copy.Args(), None)
        assert (
            "--env-id takes a task whose actions are a Box of floats with finite bounds, not" in capsys.readouterr().err
        )
    settings = json.loads((folder / "args.json").read_text()) | {
        "track": True,
        "upload_model": True,
        "capture_video": True,
    }
    (folder / "args.json").write_text(json.dumps(settings))
    assert run_command([sys.executable, *next_command.split()], alone).stdout.strip() == evaluation


def test_a_video_that_cannot_be_written_costs_a_warning(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk may be full: the training goes on, and is evaluated."""
    monkeypatch.setattr(utils.run, "write_video", Mock(side_effect=OSError("no space left")))
    folder = train(ppo_continuous, capture_video=True)
    assert read_scalars(folder)["eval/return_mean"]
    assert "no space left" in capsys.readouterr().err


def wait_for_signals(pipe: Any) -> None:
    """What an environment's process does with signals."""
    utils.run.TaskEnv(partial(gym.make, "Pendulum-v1"), 0)
    pipe.send([signal.getsignal(signum) == signal.SIG_IGN for signum in utils.run.STOP_SIGNALS])


@pytest.mark.slow
def test_processes_of_environments_leave_signals_to_the_training() -> None:
    """Also those that are not forked, and so have no handlers of the training."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=wait_for_signals, args=(there,), daemon=True)
    process.start()
    assert here.poll(120)
    assert all(here.recv())
    process.join(60)


def test_printed_commands_can_be_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a path has a space."""
    folder = tmp_path / "my runs" / "Pendulum-v1__x__1__2"
    folder.mkdir(parents=True)
    for name in ("model.pt", "checkpoint.pt"):
        (folder / name).touch()
    run = Mock(script=Path(ppo_continuous.__file__), folder=folder, evaluate_with=("--against", 'a "b'))
    capsys.readouterr()
    utils.run.Run.suggest(run, False)
    commands = [shlex.split(line.removeprefix("next:")) for line in capsys.readouterr().out.splitlines()[1:]]
    assert commands[0] == ["tensorboard", "--logdir", str(folder.parent)]
    assert [command[2:] for command in commands[1:]] == [
        ["--evaluate", str(folder), "--against", 'a "b'],
        ["--resume", str(folder)],
    ]


def test_evaluation_prints_the_trained_number(
    script: ModuleType, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """With normalisation; twice as many episodes are other episodes, and have another result."""
    folder = train(script, norm_obs=True)
    (printed,) = re.findall(r"^evaluation: .*$", capsys.readouterr().out, re.MULTILINE)
    evaluate(script, folder)
    assert capsys.readouterr().out.strip() == printed
    evaluate(script, folder, "--eval-episodes", "4")
    assert capsys.readouterr().out.strip() != printed


def test_evaluation_takes_the_runs_own_arguments(
    script: ModuleType, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line may change what concerns an evaluation, and nothing else."""
    folder = train(script, seed=3, exp_name="mine")
    (printed,) = re.findall(r"^evaluation: .*$", capsys.readouterr().out, re.MULTILINE)
    args = script.parse_args(script.Args, ["--evaluate", str(folder)])
    assert (args.seed, args.eval_episodes, args.env_id) == (3, 2, "Pendulum-v1")
    script.main(args)
    assert capsys.readouterr().out.strip() == printed
    evaluate(script, folder, "--seed", "4")
    assert capsys.readouterr().out.strip() != printed
    for flags in (["--gamma", "0.5"], ["--env-id", "Hopper-v5"], ["--upload-model"]):
        with pytest.raises(SystemExit):
            evaluate(script, folder, *flags)
        assert f"error: {flags[0]} cannot change with --evaluate: " in capsys.readouterr().err


def test_evaluation_uses_the_statistics(script: ModuleType, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """A model with other statistics plays differently; evaluation leaves them as they are."""
    folder = train(script, norm_obs=True)
    model = torch.load(folder / "model.pt", weights_only=True)
    capsys.readouterr()
    evaluate(script, folder)
    printed = capsys.readouterr().out
    count = torch.load(folder / "model.pt", weights_only=True)["agent"]["obs_rms.count"]
    assert count == model["agent"]["obs_rms.count"]
    model["agent"]["obs_rms.mean"] += 1.0
    torch.save(model, folder / "model.pt")
    evaluate(script, folder)
    assert capsys.readouterr().out != printed


@pytest.mark.parametrize(("task", "bound"), [("Pendulum-v1", 2.0), ("Hopper-v5", 1.0)])
def test_evaluation_against_a_plain_loop(script: ModuleType, task: str, bound: float, train: Train) -> None:
    """One environment at a time, stepped by hand; Hopper falls, and Pendulum's episodes have 200 steps."""
    folder = train(script, env_id=task, norm_obs=True)
    args = script.parse_args(script.Args, ["--evaluate", str(folder), "--eval-episodes", "3"])
    agent = script.Agent(script.make_envs(args, 1), args)
    load_model(folder, {"agent": agent})
    metrics = script.evaluate(agent, args, folder, "test")
    returns, lengths = [], []
    for episode in range(3):
        env = script.gym.make(task)
        obs, _ = env.reset(seed=1_000_000 + 3 * args.seed + episode)
        total, length, done = 0.0, 0, False
        while not done:
            act = agent.policy() if script is ppo_continuous else agent.act
            action = np.clip(act(obs[None])[0], -1, 1) * bound
            obs, reward, termination, truncation, _ = env.step(action)
            total, length, done = total + float(reward), length + 1, termination or truncation
        returns.append(total)
        lengths.append(length)
    assert (max(lengths) < 200) == (task == "Hopper-v5")
    assert metrics["eval/return_mean"] == pytest.approx(np.mean(returns), rel=1e-5)
    assert metrics["eval/return_std"] == pytest.approx(np.std(returns), rel=1e-4)
    assert metrics["eval/length_mean"] == pytest.approx(np.mean(lengths))


def test_an_episode_without_an_end(
    script: ModuleType, train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation cuts it."""
    assert script.MAX_EPISODE_STEPS == 10_000
    monkeypatch.setattr(script, "MAX_EPISODE_STEPS", 70)
    train(script, env_id="toy_envs:Forever-v0")
    assert "evaluation: return 70.00 +/- 0.00, length 70.0" in capsys.readouterr().out


@pytest.mark.slow
def test_same_seed_same_weights(script: ModuleType, train: Train) -> None:
    """Bit for bit; another seed gives other weights."""
    one, same, other = train(script), train(script), train(script, seed=2)
    assert_same_weights(one, same)
    weights, other_weights = load_weights(one), load_weights(other)
    name = next(name for name in weights if name.endswith("weight"))
    assert not torch.equal(weights[name], other_weights[name])


@pytest.mark.slow
def test_evaluation_does_not_touch_the_training(script: ModuleType, train: Train) -> None:
    """Off or often, with statistics that would drift if they were not frozen."""
    flags = {"norm_obs": True, "num_envs": 2}
    assert_same_weights(train(script, **flags), train(script, **flags, eval_freq=40, eval_episodes=3))


@pytest.mark.slow
def test_processes_equal_one_after_another(script: ModuleType, train: Train) -> None:
    """`--vectorization async` changes where environments run, and nothing else."""
    assert_same_weights(train(script, num_envs=2), train(script, num_envs=2, vectorization="async"))


@pytest.mark.slow
def test_logged_keys_are_those_of_the_docs(script: ModuleType, train: Train) -> None:
    """Every key is explained there, and every key explained there is logged."""
    label = script.__name__.split("_")[0]
    docs = ROOT / "docs" / f"{label}.md"
    if not docs.exists():
        pytest.skip(f"there is no docs/{label}.md yet")
    total = {"ppo": 1024, "sac": 480}[label]  # Pendulum's episodes are 200 steps long
    logged = set(read_scalars(train(script, total_timesteps=total, eval_freq=120)))
    (table,) = re.findall(r"^\| key \|.*\n((?:\|.*\n)+)", docs.read_text(), re.MULTILINE)
    assert logged == {key for row in table.splitlines() for key in re.findall(r"`(\w+/\w+)`", row.split("|")[1])}


@pytest.mark.parametrize("freqs", [{"eval_freq": 64}, {"eval_freq": 80, "log_freq": 60}], ids=str)
def test_speed_does_not_include_evaluations(
    script: ModuleType, train: Train, monkeypatch: pytest.MonkeyPatch, freqs: dict[str, int]
) -> None:
    """By a clock on which a step takes a second and an evaluation a day."""
    clock, step_envs, evaluate = SimpleNamespace(now=0.0), script.step_envs, script.evaluate

    def slow_step(*args: Any) -> Any:
        clock.now += 1.0
        return step_envs(*args)

    def slow_evaluation(*args: Any) -> Any:
        result = evaluate(*args)
        clock.now += 86_400.0
        return result

    monkeypatch.setattr(utils.run, "time", SimpleNamespace(time=lambda: clock.now))
    monkeypatch.setattr(script, "step_envs", slow_step)
    monkeypatch.setattr(script, "evaluate", slow_evaluation)
    flags = {name: value for name, value in freqs.items() if hasattr(script.Args, name)}
    speeds = read_scalars(train(script, num_envs=2, **flags))["charts/SPS"]
    assert len(speeds) >= 4
    assert {speed for _, speed in speeds} == {2.0}  # two environments


@pytest.mark.slow
def test_points_are_neither_doubled_nor_missing(script: ModuleType, train: Train) -> None:
    """One point a key and step; evaluations on schedule, and one at the end."""
    total = 480 if script is sac_continuous else 448
    scalars = read_scalars(train(script, num_envs=2, eval_freq=80, total_timesteps=total))
    for series in scalars.values():
        steps = [step for step, _ in series]
        assert steps == sorted(set(steps))
        assert all(np.isfinite(value) for _, value in series)
    expected = [80, 160, 240, 320, 400, 480] if script is sac_continuous else [128, 192, 256, 320, 448]
    assert [step for step, _ in scalars["eval/return_mean"]] == expected


def test_total_timesteps_are_rounded_up(script: ModuleType, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """And the run says so."""
    flags = {"total_timesteps": 130, "num_envs": 4}
    folder = train(script, **flags)
    total = {"ppo_continuous": 256, "sac_continuous": 132}[script.__name__]
    assert read_scalars(folder)["eval/return_mean"][-1][0] == total
    assert "--total-timesteps 130 is rounded up" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "InvertedPendulum-v5"])
def test_video(script: ModuleType, train: Train, env_id: str) -> None:
    """Of evaluations during training, at its end, and of a saved model; a decoder reads them."""
    short = {"env_kwargs": '{"max_episode_steps": 40}', "eval_freq": 128, "eval_episodes": 1}
    folder = train(script, env_id=env_id, capture_video=True, **short)
    evaluate(script, folder, "--capture-video")
    videos = {path.name: path for path in (folder / "videos").glob("*.mp4")}
    assert {"step-128-episode-0.mp4", "final-episode-0.mp4", "evaluate-episode-0.mp4"} <= set(videos)
    frames = iio.imread(videos["final-episode-0.mp4"])
    assert len(frames) > 2
    assert frames.std() > 1  # not one colour


@pytest.mark.slow
def test_wandb_offline(script: ModuleType, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real W&B client gets the same points as TensorBoard, and writes only into the run folder."""
    points: dict[tuple[str, int], float] = {}
    log = wandb.Run.log

    def spy(run: wandb.Run, metrics: dict[str, float], step: int) -> None:
        points.update({(name, step): value for name, value in metrics.items()})
        log(run, metrics, step=step)

    monkeypatch.setattr(wandb.Run, "log", spy)
    folder = train(script, track=True, total_timesteps=512, eval_freq=128)
    assert [path.name for path in folder.parent.parent.iterdir()] == ["runs"]
    (record,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 30
    while b"eval/return_mean" not in record.read_bytes():  # W&B's own process may write on after `finish`
        assert time.monotonic() < deadline
        time.sleep(0.1)
    expected = {(name, step): value for name, series in read_scalars(folder).items() for step, value in series}
    assert points.keys() == expected.keys()
    assert all(points[key] == pytest.approx(value, rel=1e-5) for key, value in expected.items())


@pytest.mark.slow
def test_the_end_of_wandbs_process_does_not_end_the_training(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard has all points. W&B is told of the exit status, if it still answers."""
    codes, finish = list[int | None](), wandb.finish

    def spy(exit_code: int | None = None) -> None:
        codes.append(exit_code)
        finish(exit_code)
        raise BrokenPipeError("gone")

    monkeypatch.setattr(wandb, "finish", spy)
    monkeypatch.setattr(wandb.Run, "log", Mock(side_effect=ConnectionResetError("gone")))
    folder = train(ppo_continuous, track=True, total_timesteps=512, eval_freq=128)
    assert [step for step, _ in read_scalars(folder)["eval/return_mean"]] == [128, 256, 384, 512]
    error = capsys.readouterr().err
    assert error.count("warning: W&B has no points from step ") == 1
    assert error.count("warning: W&B has not been told of the run's end: ") == 1
    monkeypatch.setattr(ppo_continuous, "learn_from", Mock(side_effect=FloatingPointError("loss is not finite")))
    with pytest.raises(SystemExit, match="1"):
        train(ppo_continuous, track=True)
    assert codes == [0, 1]


class Process:
    """A script in a process of its own, in a group of its own, with its output."""

    def __init__(self, words: list[str], folder: Path) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            words, cwd=folder, env=VARIABLES, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.output = ""
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        """Collects the output."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, text: str) -> None:
        """Waits until this has been printed."""
        deadline = time.monotonic() + 120
        while text not in self.output:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(self.output)
            time.sleep(0.01)

    def signal(self, signum: int) -> None:
        """To the environments' processes, too, as a terminal does."""
        os.killpg(self.process.pid, signum)

    def end(self) -> int:
        """The exit status."""
        try:
            status = self.process.wait(timeout=60)
        finally:
            if self.process.poll() is None:
                self.signal(signal.SIGKILL)
        self.reader.join()
        assert "Traceback" not in self.output, self.output
        return status


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "status", "pauses"),
    [
        (signal.SIGINT, 130, []),
        (signal.SIGTERM, 143, []),
        (signal.SIGINT, 130, [0.0]),  # at once after the second one
        (signal.SIGINT, 130, [0.05]),
        (signal.SIGINT, 130, [0.15, 0.15]),
    ],
)
def test_stopped_by_signals(script: ModuleType, tmp_path: Path, signum: int, status: int, pauses: list[float]) -> None:
    """With environments in processes: no traceback, and the exit status that shells expect; the first one saves."""
    words = command(script, total_timesteps=10_000_000, num_envs=2, vectorization="async")
    process = Process(words, tmp_path)
    process.wait_for("run folder")
    time.sleep(1.0)
    process.signal(signum)
    for pause in pauses:
        time.sleep(pause)
        if process.process.poll() is None:
            process.signal(signum)
    assert process.end() == status, process.output
    if not pauses:
        assert f"stopped by signal {int(signum)}" in process.output
        (folder,) = (tmp_path / "runs").iterdir()
        assert (folder / "model.pt").exists()
        assert (folder / "checkpoint.pt").exists()


@pytest.mark.slow
def test_interrupted_evaluations(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends an evaluation of a task without an end, final or not; --resume only repeats the final one."""
    process = Process(command(script, env_id="toy_envs:Forever-v0", eval_episodes=100), tmp_path)
    process.wait_for("the final evaluation begins")
    time.sleep(0.5)
    process.signal(signal.SIGINT)
    assert process.end() == 130, process.output
    (folder,) = (tmp_path / "runs").iterdir()
    weights = load_weights(folder)
    assert f"--resume runs/{folder.name}" in process.output
    assert "evaluation: " not in process.output

    process = Process([sys.executable, str(script.__file__), "--evaluate", f"runs/{folder.name}"], tmp_path)
    process.wait_for("an episode begins")
    process.signal(signal.SIGINT)
    assert process.end() == 130, process.output

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "MAX_EPISODE_STEPS", 70)
    script.main(script.parse_args(script.Args, ["--resume", str(folder), "--no-compile"]))
    assert "length 70.0" in capsys.readouterr().out
    assert all(torch.equal(value, weights[name]) for name, value in load_weights(folder).items())


FLAGS: dict[str, list[dict[str, Any]]] = {
    "ppo_continuous": [
        {"exp_name": "mine", "save_model": False},
        {"anneal_lr": False, "norm_adv": True, "norm_obs": False, "norm_reward": False},
        {"gamma": 0.9, "gae_lambda": 0.5, "clip_coef": 0.001, "ent_coef": 0.01, "vf_coef": 1.0, "max_grad_norm": 0.1},
        {"learning_rate": 1e-3, "std_min": 0.4, "target_kl": 0.0},
    ],
    "sac_continuous": [
        {"exp_name": "mine", "save_model": False},
        {"gamma": 0.9, "tau": 0.1, "policy_lr": 1e-4, "q_lr": 1e-4, "alpha_lr": 1e-4, "target_entropy_scale": 0.5},
        {"updates_per_step": 0.25, "policy_frequency": 2, "autotune": False, "alpha": 0.2},
        {"updates_per_step": 2.0, "norm_obs": True, "num_envs": 3, "anneal_lr": True},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flags"), [(name, flags) for name, rows in FLAGS.items() for flags in rows], ids=str)
def test_every_flag_runs_and_changes_something(train: Train, name: str, flags: dict[str, Any]) -> None:
    """Each flag that concerns learning changes the weights."""
    script = sys.modules[name]
    train = partial(train, total_timesteps=256 if name.startswith("ppo") else 130)
    folder = train(script, **flags)
    assert (folder / "model.pt").exists() == flags.get("save_model", True)
    assert folder.name.split("__")[1] == flags.get("exp_name", name)
    default = load_weights(train(script))
    for flag, value in flags.items():
        if flag in ("exp_name", "save_model", "alpha"):
            continue
        weights = load_weights(train(script, **{flag: value}))
        assert weights.keys() != default.keys() or any(
            not torch.equal(weights[key], default[key]) for key in weights
        ), flag


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 3.0])
def test_updates_per_step(train: Train, monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    """Counted: the ratio times the steps after the warm-up, with several environments."""
    counts: list[int] = []
    drawn: set[tuple[float, ...]] = set()
    update = sac_continuous.update

    def spy(*args: Any) -> Any:
        counts.append(args[4])
        drawn.add(tuple(args[2][1].flatten().tolist()))
        return update(*args)

    monkeypatch.setattr(sac_continuous, "update", spy)
    train(sac_continuous, total_timesteps=300, learning_starts=100, num_envs=3, updates_per_step=ratio)
    assert counts == list(range(round(ratio * 200)))
    assert len(drawn) == len(counts)  # each has a minibatch of its own


def test_a_run_without_an_update_is_told(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """All its steps have random actions, and nothing is compiled."""
    train(sac_continuous, total_timesteps=300, learning_starts=300, compile=True)
    message = "warning: --learning-starts 300 leaves the run of 300 steps without an update\n"
    printed = capsys.readouterr()
    assert printed.err == message
    assert "compil" not in printed.out
    train(sac_continuous, total_timesteps=300, learning_starts=299)
    assert capsys.readouterr().err == ""


def test_linear_schedules_end_at_zero(train: Train) -> None:
    """Those of SAC's actor and critics, and PPO's one, read from what was logged."""
    sac = read_scalars(train(sac_continuous, policy_lr=2e-3, anneal_lr=True))
    for name, learning_rate in (("policy", 2e-3), ("q", 1e-3), ("alpha", 1e-3)):
        falls = name != "alpha"
        expected = [learning_rate * (1 - falls * (step - 1) / 240) for step in range(40, 241, 40)]
        assert [value for _, value in sac[f"charts/{name}_lr"]] == pytest.approx(expected, rel=1e-5)
    ppo = read_scalars(train(ppo_continuous))
    rates = [value for _, value in ppo["charts/learning_rate"]]
    assert rates == pytest.approx([3e-4, 2.25e-4, 1.5e-4, 0.75e-4], rel=1e-5)


def test_noise_of_each_environment_and_step(script: ModuleType, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard normal numbers, none of them twice; SAC's follow its random actions, and the evaluation has none."""
    seen: list[np.ndarray] = []

    def spied(act: Any) -> Any:
        def spy(obs: np.ndarray, noise: Any = 0.0) -> np.ndarray:
            seen.append(np.asarray(noise))
            return act(obs, noise)

        return spy

    if script is ppo_continuous:
        policy = script.Agent.policy
        monkeypatch.setattr(script.Agent, "policy", lambda agent: spied(policy(agent)))
    else:
        act = script.Agent.act
        monkeypatch.setattr(script.Agent, "act", lambda agent, *inputs: spied(partial(act, agent))(*inputs))
    own = {"learning_starts": 64, "updates_per_step": 0.0} if script is sac_continuous else {"update_epochs": 1}
    train(script, num_envs=8, total_timesteps=1024, eval_episodes=1, **own)
    steps = 128 if script is ppo_continuous else 120
    noise = np.stack(seen[:steps])
    assert noise.shape == (steps, 8, 1)
    assert len(np.unique(noise)) == noise.size
    assert scipy.stats.kstest(noise.ravel(), "norm").pvalue > 0.001
    assert [x.tolist() for x in seen[steps:]] == 200 * [0.0]


def test_settings_of_the_optimisers(script: ModuleType, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the references: PyTorch's defaults, but for PPO's epsilon; each network has its own learning rate."""
    made: list[tuple[float, ...]] = []

    class Spy(script.Adam):  # type: ignore[name-defined]
        def __init__(self, parameters: Any, *settings: float) -> None:
            made.append(settings)
            super().__init__(parameters, *settings)

    monkeypatch.setattr(script, "Adam", Spy)
    is_ppo = script is ppo_continuous
    rates = {"learning_rate": 4e-3} if is_ppo else {"policy_lr": 4e-3, "q_lr": 2e-3, "alpha_lr": 3e-3}
    train(script, **rates)
    assert made == [(rate, 0.9, 0.999, 1e-5 if is_ppo else 1e-8) for rate in rates.values()]
