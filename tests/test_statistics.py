"""Running statistics against NumPy over the stored stream, and their way into the saved model."""

from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import Train

import ppo_continuous
import ppo_selfplay
import sac_continuous
import sac_selfplay

SCRIPTS = pytest.mark.parametrize(
    "script", [ppo_continuous, sac_continuous, ppo_selfplay, sac_selfplay], ids=lambda script: script.__name__
)


@SCRIPTS
def test_moments_of_a_stream_in_uneven_batches(script: ModuleType) -> None:
    """Batches of one row too, and a mean far from zero, where naive sums of squares lose their digits."""
    rng = np.random.default_rng(0)
    stream = rng.normal(loc=1e4, scale=[1.0, 0.01, 100.0], size=(1000, 3))
    stats = script.RunningMeanStd((3,))
    for batch in np.split(stream, [1, 2, 5, 100, 101, 640]):
        stats.update(torch.as_tensor(batch))
    np.testing.assert_allclose(stats.mean.numpy(), stream.mean(0), rtol=1e-12)
    np.testing.assert_allclose(stats.var.numpy(), stream.var(0), rtol=1e-6)
    assert stats.count.item() == 1000


@SCRIPTS
def test_normalize_centres_scales_and_clips(script: ModuleType) -> None:
    """Against NumPy; two values are outliers."""
    data = np.random.default_rng(1).normal(3.0, 2.0, size=(500, 2))
    stats = script.RunningMeanStd((2,))
    stats.update(torch.as_tensor(data))
    data[0] = 1e6, -1e6
    expected = np.clip((data - stats.mean.numpy()) / np.sqrt(stats.var.numpy()), -10, 10)
    result = stats.normalize(torch.as_tensor(data, dtype=torch.float32))
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert result[0].tolist() == [10.0, -10.0]


@SCRIPTS
def test_what_never_moves_has_a_standard_deviation(script: ModuleType) -> None:
    """The root of 1e-8, which is added to the variance."""
    stats = script.RunningMeanStd((3,))
    stats.update(torch.zeros(1000, 3))
    np.testing.assert_allclose(stats.normalize(torch.full((3,), 5e-4)).numpy(), 5.0, rtol=1e-6)


class Recorder(gym.Wrapper):
    """Writes down what an environment returns."""

    streams: list[list[Any]] = []

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.stream: list[Any] = []
        self.streams.append(self.stream)

    def reset(self, **kwargs: Any) -> Any:
        """Notes the first observation."""
        obs, info = self.env.reset(**kwargs)
        self.stream.append((obs, None, True))
        return obs, info

    def step(self, action: Any) -> Any:
        """Notes the observation, the reward, and whether the episode goes on."""
        obs, reward, termination, truncation, info = self.env.step(action)
        self.stream.append((obs, reward, False))
        return obs, reward, termination, truncation, info


@pytest.mark.parametrize("num_envs", [1, 3])
def test_saved_statistics_are_those_of_all_that_was_seen(
    script: ModuleType, train: Train, monkeypatch: pytest.MonkeyPatch, num_envs: int
) -> None:
    """Trains, and compares the statistics in model.pt with NumPy's over everything the environments returned."""
    make_env, Recorder.streams = script.make_env, []
    monkeypatch.setattr(script, "make_env", lambda *args: Recorder(make_env(*args)))
    total = {"ppo_continuous": 256 * num_envs, "sac_continuous": 240}[script.__name__]
    folder = train(script, norm_obs=True, num_envs=num_envs, total_timesteps=total, eval_episodes=1)
    streams = Recorder.streams[:num_envs]  # the later ones belong to the evaluation
    acted_on, discounted_returns = [], []
    for stream in streams:
        discounted_return = 0.0
        for (obs, reward, is_first), following in zip(stream, [*stream[1:], None], strict=True):
            if following is not None and not following[2]:  # no action is taken on a final observation
                acted_on.append(obs.astype(np.float32))
            discounted_return = 0.0 if is_first else script.Args.gamma * discounted_return + float(reward)
            if not is_first:
                discounted_returns.append(discounted_return)
    saved = torch.load(Path(folder) / "model.pt", weights_only=True)["agent"]
    assert saved["obs_rms.count"].item() == total == len(acted_on)
    np.testing.assert_allclose(
        saved["obs_rms.mean"].numpy(), np.mean(acted_on, 0, dtype=np.float64), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(saved["obs_rms.var"].numpy(), np.var(acted_on, 0, dtype=np.float64), rtol=1e-5)
    if script.__name__ == "ppo_continuous":
        np.testing.assert_allclose(saved["return_rms.var"].item(), np.var(discounted_returns), rtol=1e-5)
