"""The scripts as their users run them: what a run leaves behind, what it prints, and that it can be repeated."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
import torch
import wandb
from conftest import TINY, Train, load_weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_continuous
import sac_continuous

ROOT = Path(__file__).parent.parent


def assert_same_weights(one: Path, other: Path) -> None:
    """Bit for bit."""
    weights, other_weights = load_weights(one), load_weights(other)
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every logged series as (step, value)."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def command(script: ModuleType, **flags: Any) -> list[str]:
    """The command line of a tiny run of the script's copy in the working folder."""
    flags = {"env_id": "Pendulum-v1", "eval_episodes": 2} | TINY[script.__name__] | flags
    words = [sys.executable, f"{script.__name__}.py", "--no-cuda"]
    return words + [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_copied_alone_into_an_empty_folder(script: ModuleType, tmp_path: Path) -> None:
    """Trains there, says where the run is and what to type next; the command it names prints the same evaluation."""
    (tmp_path / f"{script.__name__}.py").write_text((ROOT / f"{script.__name__}.py").read_text())
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command(script), cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["runs", f"{script.__name__}.py"])
    assert re.fullmatch(rf"Pendulum-v1__{script.__name__}__1__\d+", folder.name)
    assert {"args.json", "model.pt"} < {path.name for path in folder.iterdir()}
    assert f"run folder: runs/{folder.name}" in run.stdout
    (evaluation,) = re.findall(r"^evaluation: .*$", run.stdout, re.MULTILINE)
    (next_command,) = re.findall(rf"python ({script.__name__}\.py --evaluate \S+)", run.stdout)
    again = subprocess.run(
        [sys.executable, *next_command.split()], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert again.stdout.strip() == evaluation


def test_evaluation_prints_the_trained_number(script: ModuleType, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """With normalisation; twice as many episodes are other episodes, and a different number."""
    folder = train(script, norm_obs=True)
    (printed,) = re.findall(r"^evaluation: .*$", capsys.readouterr().out, re.MULTILINE)
    script.main(script.Args(evaluate=folder, eval_episodes=2))
    assert capsys.readouterr().out.strip() == printed
    script.main(script.Args(evaluate=folder, eval_episodes=4))
    assert capsys.readouterr().out.strip() != printed


def test_evaluation_takes_the_runs_own_arguments(
    script: ModuleType, train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the command line it takes what concerns an evaluation, and refuses the rest."""
    folder = train(script, seed=3, exp_name="mine")
    (printed,) = re.findall(r"^evaluation: .*$", capsys.readouterr().out, re.MULTILINE)
    args = script.parse_args(["--evaluate", str(folder)])
    assert (args.seed, args.eval_episodes, args.env_id) == (3, 2, "Pendulum-v1")
    script.main(args)
    assert capsys.readouterr().out.strip() == printed
    script.main(script.parse_args(["--evaluate", str(folder), "--seed", "4"]))
    assert capsys.readouterr().out.strip() != printed
    for flags in (["--gamma", "0.5"], ["--env-id", "Hopper-v5"], ["--upload-model"]):
        with pytest.raises(SystemExit):
            script.parse_args(["--evaluate", str(folder), *flags])
        assert f"error: {flags[0]} takes the run's own value with --evaluate: it is " in capsys.readouterr().err


def test_evaluation_needs_the_statistics(script: ModuleType, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose statistics are reset plays differently: they are used, and they are frozen."""
    folder = train(script, norm_obs=True)
    model = torch.load(folder / "model.pt", weights_only=True)
    capsys.readouterr()
    script.main(script.Args(evaluate=folder, eval_episodes=2))
    printed = capsys.readouterr().out
    assert torch.load(folder / "model.pt", weights_only=True)["agent"]["obs_rms.count"] == model["agent"]["obs_rms.count"]
    model["agent"]["obs_rms.mean"] += 1.0
    torch.save(model, folder / "model.pt")
    script.main(script.Args(evaluate=folder, eval_episodes=2))
    assert capsys.readouterr().out != printed


def test_evaluation_against_a_plain_loop(script: ModuleType, train: Train) -> None:
    """One environment at a time, stepped by hand."""
    folder = train(script, norm_obs=True)
    agent, args = script.load_model(folder)
    metrics = script.evaluate(agent, args, 3, folder, "test")
    returns = []
    for episode in range(3):
        env = script.gym.make("Pendulum-v1")
        obs, _ = env.reset(seed=1_000_000 + 3 * args.seed + episode)
        total, done = 0.0, False
        while not done:
            act = agent.policy() if script is ppo_continuous else agent.act
            action = np.clip(act(obs[None])[0], -1, 1) * 2.0  # Pendulum's bounds
            obs, reward, termination, truncation, _ = env.step(action)
            total, done = total + float(reward), termination or truncation
        returns.append(total)
    assert metrics["eval/return_mean"] == pytest.approx(np.mean(returns), rel=1e-5)
    assert metrics["eval/return_std"] == pytest.approx(np.std(returns), rel=1e-4)
    assert metrics["eval/length_mean"] == 200


def test_same_seed_same_weights(script: ModuleType, train: Train) -> None:
    """Bit for bit; another seed gives other weights."""
    one, same, other = train(script), train(script), train(script, seed=2)
    assert_same_weights(one, same)
    weights, other_weights = load_weights(one), load_weights(other)
    name = next(name for name in weights if name.endswith("weight"))
    assert not torch.equal(weights[name], other_weights[name])


@pytest.mark.parametrize("name", TINY)
def test_averages_of_a_gradient_that_stays_zero_end_at_zero(name: str, train: Train, train_selfplay: Train) -> None:
    """In a run, that is: elsewhere they get stuck at the least numbers above it, with which a processor takes long."""
    torch.set_flush_denormal(False)
    any_script = import_module(name)
    (train_selfplay if "selfplay" in name else train)(any_script)
    optimizer = any_script.make_optimizer([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    for gradient in [1e-30] + 2000 * [0.0]:
        any_script.gradient_step(optimizer, torch.full((3,), gradient))
    (state,) = optimizer.state.values()
    assert not state["exp_avg"].any()


def test_evaluation_does_not_touch_the_training(script: ModuleType, train: Train) -> None:
    """Off or often, with statistics that would drift if they were not frozen."""
    flags = {"norm_obs": True, "num_envs": 2}
    assert_same_weights(train(script, **flags), train(script, **flags, eval_freq=40, eval_episodes=3))


def test_processes_equal_one_after_another(script: ModuleType, train: Train) -> None:
    """`--vectorization async` changes where environments run, and nothing else."""
    assert_same_weights(train(script, num_envs=2), train(script, num_envs=2, vectorization="async"))


def test_logged_keys_are_those_of_the_readme(script: ModuleType, train: Train) -> None:
    """Every key is explained there, and every key explained there for this script is logged."""
    label = script.__name__.split("_")[0].upper()
    flags = {"value_network": True} if label == "SAC" else {}
    total = {"PPO": 1024, "SAC": 480}[label]  # Pendulum's episodes are 200 steps long
    logged = set(read_scalars(train(script, total_timesteps=total, eval_freq=120, **flags)))
    rows = re.findall(r"^\| `([\w/ ,`]+)` \| (\w+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    explained = {key for keys, scripts in rows if scripts in ("both", label) for key in re.split(r"`, `", keys)}
    assert logged == explained


def test_points_are_neither_doubled_nor_missing(script: ModuleType, train: Train) -> None:
    """One point a key and step; evaluations on schedule, and one at the end."""
    scalars = read_scalars(train(script, num_envs=2, eval_freq=80, total_timesteps=480 if script.__name__[0] == "s" else 448))
    for series in scalars.values():
        steps = [step for step, _ in series]
        assert steps == sorted(set(steps))
        assert all(np.isfinite(value) for _, value in series)
    expected = [80, 160, 240, 320, 400, 480] if script.__name__[0] == "s" else [128, 192, 256, 320, 448]
    assert [step for step, _ in scalars["eval/return_mean"]] == expected


def test_total_timesteps_are_rounded_up_aloud(script: ModuleType, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a step less than was asked for."""
    flags = {"total_timesteps": 130, "num_envs": 4}
    folder = train(script, **flags)
    total = {"ppo_continuous": 256, "sac_continuous": 132}[script.__name__]
    assert read_scalars(folder)["eval/return_mean"][-1][0] == total
    assert "--total-timesteps 130 is rounded up" in capsys.readouterr().out


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "InvertedPendulum-v5"])
def test_video(script: ModuleType, train: Train, env_id: str) -> None:
    """Of evaluations during training, at its end, and of a saved model: files that a decoder reads."""
    folder = train(script, env_id=env_id, capture_video=True, eval_freq=128, eval_episodes=1)
    script.main(script.Args(evaluate=folder, eval_episodes=1, capture_video=True))
    videos = {path.name: path for path in (folder / "videos").glob("*.mp4")}
    assert {"step-128-episode-0.mp4", "final-episode-0.mp4", "evaluate-episode-0.mp4"} <= set(videos)
    frames = iio.imread(videos["final-episode-0.mp4"])
    assert len(frames) > 2
    assert frames.std() > 1  # not one colour


def test_wandb_offline(script: ModuleType, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same points as TensorBoard's go to the real W&B client, which writes them into the run folder and nowhere else."""
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


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_by_a_signal(script: ModuleType, tmp_path: Path, signum: int, status: int) -> None:
    """Ctrl-C and SIGTERM: no traceback, a model that can be evaluated, and the exit status that shells expect."""
    (tmp_path / f"{script.__name__}.py").write_text((ROOT / f"{script.__name__}.py").read_text())
    run = subprocess.Popen(
        command(script, total_timesteps=10_000_000, num_envs=2, vectorization="async"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not list(tmp_path.glob("runs/*/events*")):
        time.sleep(0.1)
        assert run.poll() is None
    time.sleep(1.0)
    os.killpg(run.pid, signum)  # to the environments' processes, too, as a terminal does
    stdout, stderr = run.communicate(timeout=60)
    assert run.returncode == status, stderr
    assert "Traceback" not in stderr
    assert "stopped by signal" in stdout
    (folder,) = (tmp_path / "runs").iterdir()
    script.load_model(folder)


def test_a_second_signal_ends_an_evaluation(script: ModuleType, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: one that waits for an episode without an end, say."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    interrupts = 0

    def evaluate(*_: Any) -> None:
        nonlocal interrupts
        while True:
            interrupts += 1
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(script, "evaluate", evaluate)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(script)
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    assert interrupts == 2


def test_runs_in_the_same_second_and_odd_names(script: ModuleType, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run has a folder of its own, whose name needs no quoting."""
    monkeypatch.setattr(script.time, "time", lambda: 1234567890.5)
    names = [script.make_run_folder(script.Args(env_id="ALE/Pong:x-v5", exp_name="a b")).name for _ in range(3)]
    assert len(set(names)) == 3
    assert all(re.fullmatch(r"[\w.-]+", name) for name in names)


FLAGS: dict[str, list[dict[str, Any]]] = {
    "ppo_continuous": [
        {"exp_name": "mine", "torch_deterministic": False, "save_model": False},
        {"anneal_lr": False, "norm_adv": True, "clip_vloss": True, "norm_obs": False, "norm_reward": False},
        {"gamma": 0.9, "gae_lambda": 0.5, "clip_coef": 0.001, "ent_coef": 0.01, "vf_coef": 1.0, "max_grad_norm": 0.1},
        {"target_kl": 0.0, "learning_rate": 1e-3, "log_std_init": -0.5, "log_std_min": -0.75},
        {"stagger": False, "adam_beta1": 0.9, "adam_beta2": 0.999},
    ],
    "sac_continuous": [
        {"exp_name": "mine", "torch_deterministic": False, "save_model": False},
        {"policy_lr_schedule": "linear", "q_lr_schedule": "linear", "alpha_lr_schedule": "linear"},
        {"gamma": 0.9, "tau": 0.1, "policy_lr": 1e-4, "q_lr": 1e-4, "alpha_lr": 1e-4, "target_entropy_scale": 0.5},
        {"updates_per_step": 0.25, "policy_frequency": 2, "target_network_frequency": 2, "autotune": False, "alpha": 0.2},
        {"updates_per_step": 2.0, "norm_obs": True, "value_network": True, "num_envs": 3},
    ],
}


@pytest.mark.parametrize(("name", "flags"), [(name, flags) for name, rows in FLAGS.items() for flags in rows], ids=str)
def test_every_flag_runs_and_changes_something(train: Train, name: str, flags: dict[str, Any]) -> None:
    """A flag that does nothing is a defect: each that concerns learning alters the weights, alone."""
    script = sys.modules[name]
    folder = train(script, **flags)
    assert (folder / "model.pt").exists() == flags.get("save_model", True)
    assert folder.name.split("__")[1] == flags.get("exp_name", name)
    default = load_weights(train(script))
    for flag, value in flags.items():
        if flag in ("exp_name", "torch_deterministic", "save_model", "alpha"):
            continue
        weights = load_weights(train(script, **{flag: value}))
        assert weights.keys() != default.keys() or any(not torch.equal(weights[key], default[key]) for key in weights), flag


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 3.0])
def test_updates_per_step(train: Train, monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    """Counted: the ratio times the steps after the warm-up, with several environments."""
    counts: list[int] = []
    update = sac_continuous.update

    def spy(*args: Any) -> Any:
        counts.append(args[-1])
        return update(*args)

    monkeypatch.setattr(sac_continuous, "update", spy)
    train(sac_continuous, total_timesteps=300, learning_starts=100, num_envs=3, updates_per_step=ratio)
    assert counts == list(range(round(ratio * 200)))


def test_linear_schedules_end_at_zero(train: Train) -> None:
    """SAC's three learning rates and PPO's one, read from what was logged."""
    schedules = {f"{name}_lr_schedule": "linear" for name in ("policy", "q", "alpha")}
    sac = read_scalars(train(sac_continuous, policy_lr=2e-3, **schedules))
    for name, learning_rate in (("policy", 2e-3), ("q", 1e-3), ("alpha", 1e-3)):
        expected = [learning_rate * (1 - (step - 1) / 240) for step in range(40, 241, 40)]
        assert [value for _, value in sac[f"charts/{name}_lr"]] == pytest.approx(expected, rel=1e-5)
    ppo = read_scalars(train(ppo_continuous))
    assert [value for _, value in ppo["charts/learning_rate"]] == pytest.approx([3e-4, 2.25e-4, 1.5e-4, 0.75e-4], rel=1e-5)
