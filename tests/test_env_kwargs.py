"""The single-agent scripts' `--env-kwargs`, and longer --total-timesteps with --resume: what changes and what stays."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import Train, read_scalars
from gymnasium.spaces import Box

import ppo_continuous
import sac_continuous


class Paying(gym.Env[np.ndarray, np.ndarray]):
    """Pays `wage` in each of the four steps of an episode."""

    observation_space, action_space = Box(-1.0, 1.0, (2,)), Box(-1.0, 1.0, (1,))

    def __init__(self, wage: float = 1.0) -> None:
        self.wage, self.step_count = wage, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Zeros."""
        self.step_count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Pays."""
        self.step_count += 1
        return np.zeros(2, np.float32), self.wage, self.step_count == 4, False, {}


class Vanishing(Paying):
    """Pays 1 in each step but the last, where a subnormal number is zero if these are flushed."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Pays as long as there is something left."""
        obs, _, termination, truncation, info = super().step(action)
        return obs, float(1e-300 * 0.01**self.step_count > 0.0), termination, truncation, info


def many(num_envs: int, max_episode_steps: str) -> gym.vector.VectorEnv[Any, Any, Any]:
    """A vector environment with an argument of its own."""
    return gym.vector.SyncVectorEnv([Paying] * num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


gym.register("Paying-v0", entry_point="test_env_kwargs:Paying")
gym.register("Vanishing-v0", entry_point="test_env_kwargs:Vanishing")
gym.register("Wages-v0", vector_entry_point="test_env_kwargs:many")
FAST: dict[str, dict[str, Any]] = {"ppo_continuous": {}, "sac_continuous": {"updates_per_step": 0.1}}
TASK = {"env_id": "Paying-v0", "env_kwargs": '{"wage": 2.5}', "num_envs": 2}


def returns(folder: Path, tag: str) -> set[float]:
    """The values of one logged series."""
    return {value for _, value in read_scalars(folder)[tag]}


def call(script: ModuleType, *words: str) -> None:
    """The script with this command line."""
    script.main(script.parse_args(script.Args, [*words, "--no-compile", "--no-cuda"]))


def test_a_number_of_steps_that_is_none(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A task may give max_episode_steps another meaning."""
    monkeypatch.chdir(tmp_path)
    task = ["--env-id", "Wages-v0", "--env-kwargs", '{"max_episode_steps": "7"}', "--vectorization", "native"]
    flags = {
        "ppo_continuous": ["--num-steps", "32", "--num-envs", "1", "--num-minibatches", "2"],
        "sac_continuous": [],
    }[script.__name__]
    call(script, *task, *flags, "--total-timesteps", "32", "--eval-episodes", "1")
    assert "evaluation: " in capsys.readouterr().out


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_env_kwargs_reach_the_task(
    script: ModuleType, vectorization: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four steps at 2.5 return 10, as the log says: in training, evaluation, processes, a resumed run, --evaluate."""
    folder = train(script, **TASK, **FAST[script.__name__], vectorization=vectorization, eval_freq=128)
    assert returns(folder, "charts/episodic_return") == returns(folder, "eval/return_mean") == {10.0}
    assert returns(folder, "charts/episodic_length") == returns(folder, "eval/length_mean") == {4.0}
    first_steps = {step for step, _ in read_scalars(folder)["charts/episodic_return"]}
    call(script, "--resume", str(folder), "--total-timesteps", "600")
    assert max(first_steps) < max(step for step, _ in read_scalars(folder)["charts/episodic_return"])
    assert returns(folder, "charts/episodic_return") == returns(folder, "eval/return_mean") == {10.0}
    assert json.loads((folder / "args.json").read_text())["env_kwargs"] == TASK["env_kwargs"]
    capsys.readouterr()
    call(script, "--evaluate", str(folder))
    assert "evaluation: return 10.00 +/- 0.00, length 4.0" in capsys.readouterr().out


def test_evaluate_rounds_as_training_does(script: ModuleType, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Both flush subnormal numbers, also in the code of the task."""
    folder = train(script, **FAST[script.__name__], env_id="Vanishing-v0", num_envs=2)
    assert returns(folder, "charts/episodic_return") == returns(folder, "eval/return_mean") == {3.0}
    torch.set_flush_denormal(False)
    capsys.readouterr()
    call(script, "--evaluate", str(folder))
    assert "evaluation: return 3.00 +/- 0.00" in capsys.readouterr().out


def test_env_kwargs_of_a_run_stay(script: ModuleType, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Another value beside --resume or --evaluate is refused."""
    folder = train(script, **TASK, **FAST[script.__name__])
    for flag in ("--resume", "--evaluate"):
        with pytest.raises(SystemExit) as exit_info:
            call(script, flag, str(folder), "--env-kwargs", '{"wage": 3}')
        assert exit_info.value.code == 2
        sentence = f"error: --env-kwargs cannot change with {flag}: the run has "
        assert capsys.readouterr().err == sentence + '{"wage": 2.5}, and {"wage": 3} was given\n'


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ('{"wage": 2.5', "--env-kwargs takes a JSON object"),
        ("wage=2.5", "--env-kwargs takes a JSON object"),
        ("[2.5]", "--env-kwargs takes a JSON object"),
        ('{"salary": 2.5}', "salary"),
    ],
)
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_bad_env_kwargs(
    script: ModuleType,
    vectorization: str,
    value: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bad JSON, and an argument that the task does not have: one sentence, exit status 2, nothing left behind."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        call(script, "--env-id", "Paying-v0", "--vectorization", vectorization, "--env-kwargs", value)
    assert exit_info.value.code == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: --env-")
    assert stderr.count("\n") == 1
    assert said in stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "flags", "tag"),
    [
        (ppo_continuous, {}, "charts/learning_rate"),
        (ppo_continuous, {"anneal_lr": False}, None),
        (sac_continuous, {"anneal_lr": True}, "charts/policy_lr"),
        (sac_continuous, {}, None),
    ],
    ids=["ppo", "ppo constant", "sac annealed", "sac"],
)
def test_longer_runs_change_an_annealed_learning_rate(
    script: ModuleType, flags: dict[str, Any], tag: str | None, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run made twice as long goes on at half of the initial rate, and says so; a constant one not."""
    task = {"env_id": "Paying-v0", "num_envs": 2, "total_timesteps": 256, "checkpoint_freq": 0}
    folder = train(script, **task | flags | FAST[script.__name__])
    assert "learning rate" not in capsys.readouterr().err
    call(script, "--resume", str(folder), "--total-timesteps", "512")
    warning = "warning: --total-timesteps 512 changes the annealed learning rate here from 0.00% to 50.00% of its"
    assert capsys.readouterr().err.count(warning) == (tag is not None)
    if tag is not None:
        rates = dict(read_scalars(folder)[tag])
        step = min(step for step in rates if step > 256)
        stride = 64 if script is ppo_continuous else 2  # the rate is that of the iteration's first step
        initial = script.Args().learning_rate if script is ppo_continuous else script.Args().policy_lr
        assert rates[step] == pytest.approx(initial * (1 - (step - stride) / 512), rel=1e-5)
