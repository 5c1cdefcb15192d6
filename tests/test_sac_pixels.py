"""SAC from pictures: what is seen, stacks in the buffer, shifts, encoders, gradients, runs."""

import copy
import gc
import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same_weights, load_weights, read_scalars
from gymnasium.spaces import Box
from test_sac_update import make_optimizers, squashed
from torch import Tensor, nn

script: Any = import_module("variants.sac_pixels")
ROOT = Path(__file__).parent.parent
LENGTH = 5  # steps of an episode


class Slides(gym.Env):
    """Shows pictures (height, width, channels) of one value: 10 * episode + step. Every second episode terminates."""

    action_space = Box(-1.0, 1.0, (1,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    size = (20, 30, 3)

    def __init__(self, sees: bool = True, render_mode: str | None = None) -> None:
        space = Box(0, 255, self.size, np.uint8)
        self.observation_space = space if sees else Box(-1.0, 1.0, (2,), np.float32)
        self.sees, self.render_mode, self.episode, self.step_count = sees, render_mode, -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode."""
        super().reset(seed=seed)
        self.episode, self.step_count = (self.episode + 1) % 25, 0
        return self.picture() if self.sees else np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Shows the next picture; the reward is the number of the step."""
        self.step_count += 1
        ends, terminates = self.step_count == LENGTH, self.episode % 2 == 0
        obs = self.picture() if self.sees else np.zeros(2, np.float32)
        return obs, float(self.step_count), ends and terminates, ends and not terminates, {}

    def picture(self) -> np.ndarray:
        """The picture of now."""
        return np.full(self.size, 10 * self.episode + self.step_count, np.uint8)

    def render(self) -> np.ndarray:
        """The same."""
        return self.picture()


class Planes(Slides):
    """Its pictures have the channels first."""

    size = (12, 20, 20)


class RenderedPlanes(Slides):
    """Its observations have the channels first, and its renderings have them last."""

    size = (4, 20, 20)

    def render(self) -> np.ndarray:
        """The first three channels."""
        return self.picture()[:3].transpose(1, 2, 0)


class GreySlides(Slides):
    """Its pictures have no axis of channels, and it cannot be rendered."""

    metadata = {"render_modes": []}
    size = (20, 30)  # type: ignore[assignment]


class WideSlides(Slides):
    """Its actions have two dimensions."""

    action_space = Box(-1.0, 1.0, (2,), np.float32)


class UnevenSlides(Slides):
    """Its episodes terminate after 2 to 8 steps; the length is drawn in the first one."""

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Shows the next picture."""
        if self.step_count == 0:
            self.length = self.np_random.integers(2, 9)
        obs, reward, _, _, info = super().step(action)
        return obs, reward, bool(self.step_count == self.length), False, info


class Blind(gym.Env):
    """Cannot be rendered."""

    observation_space, action_space = Box(-1.0, 1.0, (2,), np.float32), Box(-1.0, 1.0, (1,), np.float32)


gym.register("Slides-v0", entry_point="test_sac_pixels:Slides")
gym.register("LimitedSlides-v0", entry_point="test_sac_pixels:Slides", max_episode_steps=9)
gym.register("UnevenSlides-v0", entry_point="test_sac_pixels:UnevenSlides")
gym.register("WideSlides-v0", entry_point="test_sac_pixels:WideSlides")
gym.register("GreySlides-v0", entry_point="test_sac_pixels:GreySlides")
gym.register("Planes-v0", entry_point="test_sac_pixels:Planes")
gym.register("RenderedPlanes-v0", entry_point="test_sac_pixels:RenderedPlanes")
gym.register("Blind-v0", entry_point="test_sac_pixels:Blind")
TINY: dict[str, Any] = {"env_id": "Slides-v0", "eval_freq": 0, "eval_episodes": 2, "cuda": False}
TINY |= {"total_timesteps": 80, "learning_starts": 40, "batch_size": 8, "buffer_size": 64, "num_envs": 2}
TINY |= {"log_freq": 20, "updates_per_step": 0.5, "checkpoint_freq": 30, "frame_size": 20, "max_shift": 1}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder of its own."""
    monkeypatch.chdir(tmp_path)


def make_args(**overrides: Any) -> Any:
    """Arguments of a tiny run."""
    return script.Args(**TINY | overrides)


def train(**overrides: Any) -> Path:
    """Runs `main` with a tiny budget, and returns the run folder."""
    before = set(Path("runs").glob("*"))
    script.main(make_args(**overrides))
    (folder,) = set(Path("runs").glob("*")) - before
    return folder


def make_agent(**overrides: Any) -> tuple[Any, Any]:
    """An agent for Slides-v0, and its arguments."""
    args = make_args(**overrides)
    torch.manual_seed(0)
    return script.Agent(script.make_envs(args, 1), args), args


def make_batch(agent: Any, n: int, seed: int = 0) -> tuple[Tensor, ...]:
    """A batch of random pictures."""
    generator = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randint(256, (2, n, math.prod(agent.encoder.shape)), generator=generator, dtype=torch.uint8)
    actions, rewards = 2.0 * torch.rand(n, 1, generator=generator) - 1.0, torch.randn(n, generator=generator)
    return obs, actions, rewards, next_obs, (torch.rand(n, generator=generator) < 0.3).float()


# --- what is seen ---


def shrink_slowly(picture: np.ndarray, size: int) -> np.ndarray:
    """The mean of each box of pixels, one at a time; boxes begin at the rounded-down multiples."""
    height, width, channels = picture.shape
    result = np.zeros((channels, size, size), np.uint8)
    for channel, row, column in np.ndindex(channels, size, size):
        top, left = row * height // size, column * width // size
        bottom, right = max(top + 1, (row + 1) * height // size), max(left + 1, (column + 1) * width // size)
        result[channel, row, column] = round(float(picture[top:bottom, left:right, channel].mean()))
    return result


@pytest.mark.parametrize(("height", "width"), [(20, 20), (40, 60), (33, 47), (7, 25)])
def test_pictures_are_scaled_by_means_of_boxes(height: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And enlarged by repeating pixels."""
    picture = np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)
    monkeypatch.setattr(Slides, "size", picture.shape)
    monkeypatch.setattr(Slides, "picture", lambda self: picture)
    env = script.make_env(make_args(frame_stack=1))
    obs, _ = env.reset()
    np.testing.assert_allclose(obs.reshape(3, 20, 20), shrink_slowly(picture, 20), atol=1)  # a half is rounded
    assert (obs.reshape(3, 20, 20) == shrink_slowly(picture, 20)).mean() > 0.95
    env = script.make_env(make_args(frame_stack=1, grey=True))
    red, green, blue = np.moveaxis(picture.astype(float), 2, 0)
    grey = shrink_slowly((0.299 * red + 0.587 * green + 0.114 * blue)[..., None], 20)
    np.testing.assert_allclose(env.reset()[0].reshape(1, 20, 20), grey, atol=1)
    monkeypatch.setattr(Slides, "size", (height, width, 4))
    monkeypatch.setattr(Slides, "picture", lambda self: np.concatenate([picture, picture[..., :1]], axis=2))
    env = script.make_env(make_args(frame_stack=1, grey=True))  # the fourth channel, of transparency, does not count
    np.testing.assert_allclose(env.reset()[0].reshape(1, 20, 20), grey, atol=1)


@pytest.mark.parametrize("kwargs", ['{"sees": true}', '{"sees": false}'])
def test_own_pictures_and_rendered_ones(kwargs: str) -> None:
    """Both give the same observations: bytes, the oldest picture first, an episode's first picture repeated."""
    args = make_args(env_kwargs=kwargs, frame_stack=3)
    envs = script.make_envs(args, 2)
    space = envs.single_observation_space
    assert (space.shape, space.dtype) == ((3 * 3 * 20 * 20,), np.uint8)

    def ids(obs: np.ndarray) -> list[list[int]]:
        """The values of the pictures, each of which has one value."""
        pictures = obs.reshape(2, 3, -1)
        assert (pictures == pictures[..., :1]).all()
        return pictures[..., 0].tolist()

    obs, _ = envs.reset(seed=1)
    first = ids(obs)[0][0]  # episodes before were to see what a picture looks like
    assert ids(obs) == [[first] * 3] * 2
    for step in range(1, 2 * LENGTH + 1):
        obs, final_obs, _, terminations, truncations = script.step_envs(envs, np.zeros((2, 1), np.float32))
        episode, t = divmod(step - 1, LENGTH)
        begin = first + 10 * episode
        assert ids(final_obs)[0] == [begin + max(0, t + 1 - i) for i in (2, 1, 0)]
        is_last = t + 1 == LENGTH
        assert ids(obs)[0] == ([begin + 10] * 3 if is_last else ids(final_obs)[0])
        assert bool(terminations[0]) == (is_last and begin // 10 % 2 == 0)
        assert bool(truncations[0]) == (is_last and begin // 10 % 2 == 1)


def test_grey_pictures_without_channels() -> None:
    """They are the observation, as those with an axis of one channel are."""
    obs, _ = script.make_env(make_args(env_id="GreySlides-v0", frame_stack=2)).reset()
    assert obs.shape == (2 * 1 * 20 * 20,)
    assert (obs == obs[0]).all()


def test_a_task_with_the_channels_first_is_rendered() -> None:
    """Bytes with more than four channels at the end are no pictures."""
    env = script.make_env(make_args(env_id="RenderedPlanes-v0", frame_stack=1))
    assert env.reset()[0].shape == (3 * 20 * 20,)


def test_action_repeat() -> None:
    """Rewards are summed, and the episode ends within the repetition."""
    env = script.make_env(make_args(action_repeat=3))
    first, _ = env.reset()
    obs, reward, terminated, truncated, _ = env.step(np.zeros(1, np.float32))
    assert (obs[-1] - first[-1], reward, terminated or truncated) == (3, 1.0 + 2.0 + 3.0, False)
    obs, reward, terminated, truncated, _ = env.step(np.zeros(1, np.float32))
    assert (obs[-1] - first[-1], reward, terminated or truncated) == (5, 4.0 + 5.0, True)


def test_checkpoints_that_cut_repeated_steps_off(capsys: pytest.CaptureFixture[str]) -> None:
    """Nine steps of the task are five with two repetitions, so ten of two environments."""
    flags: dict[str, Any] = {"env_id": "LimitedSlides-v0", "action_repeat": 2, "total_timesteps": 20}
    for freq, is_too_often in ((8, True), (10, False)):
        train(checkpoint_freq=freq, **flags)
        warning = f"--checkpoint-freq {freq} cuts episodes off that would take up to 10 steps"
        assert (warning in capsys.readouterr().err) == is_too_often


# --- buffer ---


class Log:
    """The same transitions in Python lists: every environment's episodes, picture by picture."""

    def __init__(self, num_envs: int, frame_stack: int) -> None:
        self.episodes: list[list[int]] = [[] for _ in range(num_envs)]
        self.frame_stack, self.num_pictures = frame_stack, 0
        self.transitions: dict[float, tuple[Any, ...]] = {}  # by reward, which is unique

    def stack(self, episode: list[int]) -> list[int]:
        """The newest pictures; the first one is repeated."""
        return [episode[max(0, len(episode) - 1 - i)] for i in reversed(range(self.frame_stack))]


def fill(buffer: Any, log: Log, num_steps: int, rng: np.random.Generator) -> Iterator[None]:
    """Adds steps of episodes of random lengths, some of which end and some of which are cut by a reset of all."""
    n = len(log.episodes)
    begins, picture = np.ones(n, bool), 0
    for step in range(num_steps):
        if rng.random() < 0.05:
            begins[:] = True
        obs, final_obs, ends = [], [], rng.random(n) < 0.2
        terminations = ends & (rng.random(n) < 0.5)
        actions, rewards = rng.random((n, 1)), step * n + np.arange(n, dtype=float)
        for i in range(n):
            if begins[i]:
                log.episodes[i] = [picture := picture + 1]
            obs += [log.stack(log.episodes[i])]
            log.episodes[i].append(picture := picture + 1)
            final_obs += [log.stack(log.episodes[i])]
            transition = (obs[-1], np.float32(actions[i, 0]), final_obs[-1], float(terminations[i]))
            log.transitions[rewards[i]] = transition
        log.num_pictures += n + int(begins.sum())
        wide = [np.array(x, dtype="<u4").view(np.uint8).reshape(n, -1) for x in (obs, final_obs)]  # four bytes each
        buffer.add(begins, wide[0], actions, rewards, wide[1], terminations)
        begins = ends
        yield


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("frame_stack", [1, 3, 4])
@pytest.mark.parametrize("capacity", [40, 97])
def test_stacks_are_those_of_a_loop_over_steps(num_envs: int, frame_stack: int, capacity: int) -> None:
    """Across episodes' ends, resets of all environments, and several times round the ring."""
    rng, log = np.random.default_rng(0), Log(num_envs, frame_stack)
    buffer = script.ReplayBuffer(capacity, num_envs, frame_stack, 4 * frame_stack, 1, torch.device("cpu"))
    torch.manual_seed(0)
    for step, _ in enumerate(fill(buffer, log, 150, rng)):
        obs, actions, rewards, next_obs, terminations = buffer.sample(2000 if step % 10 == 9 else 20)
        assert (obs.dtype, obs.shape[1], buffer.total) == (torch.uint8, 4 * frame_stack, log.num_pictures)
        stacks, next_stacks = (x.numpy().view("<u4").tolist() for x in (obs, next_obs))
        columns = (stacks, actions[:, 0].numpy(), next_stacks, terminations.tolist())
        for reward, *transition in zip(rewards.tolist(), *columns, strict=True):
            assert tuple(transition) == log.transitions[reward], reward
        if step % 10 == 9:  # all are drawn but those of the oldest rows, some of whose pictures may be overwritten
            margin = frame_stack * (2 * num_envs - 1) + 2 * num_envs * (num_envs > 1)  # numbered in another order
            oldest = log.num_pictures - capacity + margin
            assert set(rewards.tolist()) >= {reward for reward, x in log.transitions.items() if x[2][-1] > oldest}


def test_steps_are_drawn_uniformly() -> None:
    """An episode's first picture is never drawn as a step, and does not make its neighbour more likely."""
    buffer, log = script.ReplayBuffer(50, 1, 2, 8, 1, torch.device("cpu")), Log(1, 2)
    for _ in fill(buffer, log, 200, np.random.default_rng(0)):
        pass
    torch.manual_seed(0)
    values, counts = buffer.sample(100_000)[2].unique(return_counts=True)
    assert len(values) > 30
    expected = 100_000 / len(values)
    assert 0.9 * expected < counts.min() <= counts.max() < 1.1 * expected


def test_pictures_are_bytes_and_stored_once() -> None:
    """A row is a picture, the action, reward, termination, and the distance to the picture before."""
    args = make_args(frame_size=48, frame_stack=3)
    buffer = script.ReplayBuffer(1000, 1, 3, 3 * 3 * 48 * 48, 6, torch.device("cpu"))
    assert args.frame_stack == buffer.frame_stack
    assert sum(x.nbytes for x in buffer.columns.values()) == 1000 * (3 * 48 * 48 + 4 * (6 + 2) + 8)


# --- shifts ---


def test_shifts_are_pads_and_crops() -> None:
    """By hand, picture by picture; at its middle place nothing changes."""
    rng = np.random.default_rng(0)
    pictures = rng.normal(size=(50, 6, 20, 20)).astype(np.float32)
    obs, places = torch.as_tensor(pictures), torch.as_tensor(rng.integers(7, size=(50, 2)))
    places[:4] = torch.tensor([[0, 0], [6, 6], [0, 6], [3, 3]])
    shifted = script.shift(obs, places, 3)
    for i, (row, column) in enumerate(places.tolist()):
        for j in range(6):
            padded = np.pad(pictures[i, j], 3, mode="edge")
            np.testing.assert_array_equal(shifted[i, j], padded[row : row + 20, column : column + 20])
    assert torch.equal(shifted[3], obs[3])


def test_an_update_shifts_both_observations_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each observation at places of its own, all of them used; without shifts the encoder sees it as it is."""
    agent, args = make_agent(max_shift=2)
    calls: list[tuple[Tensor, Tensor]] = []
    shift = script.shift

    def spy(pictures: Tensor, places: Tensor, border: int) -> Tensor:
        calls.append((pictures, places))
        return shift(pictures, places, border)

    monkeypatch.setattr(script, "shift", spy)
    seen: list[Tensor] = []  # by the encoder: the next observations, then the observations
    agent.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    batch = make_batch(agent, 400)
    script.update(agent, make_optimizers(agent, 1e-3), batch, args, 0)
    assert (len(calls), len(seen)) == (2, 2)
    for (pictures, places), original, used in zip(calls, (batch[0], batch[3]), reversed(seen), strict=True):
        assert torch.equal(pictures, agent.normalize(original))
        assert set(map(tuple, places.tolist())) == set(itertools.product(range(5), repeat=2))
        assert torch.equal(used, shift(pictures, places, 2))
    assert not torch.equal(calls[0][1], calls[1][1])
    script.update(agent, make_optimizers(agent, 1e-3), batch, make_args(max_shift=0), 0)
    assert len(calls) == 2
    assert torch.equal(seen[2], agent.normalize(batch[3]))
    assert torch.equal(seen[3], agent.normalize(batch[0]))


# --- encoders and gradients ---


def conv(fan_in: int, fan_out: int, kernel: int) -> int:
    """Parameters of a convolution."""
    return fan_in * fan_out * kernel**2 + fan_out


@pytest.mark.parametrize(("kind", "smallest"), [("simple", 20), ("nature", 36), ("resnet", 15)])
def test_encoders(kind: str, smallest: int) -> None:
    """The number of their parameters, the range of the features, and the smallest pictures that they take."""
    residual = conv(9, 16, 3) + 4 * conv(16, 16, 3) + conv(16, 32, 3) + 9 * conv(32, 32, 3)
    sizes = {  # parameters of the convolutions, and numbers that they make of pictures of 48 x 48
        "simple": (conv(9, 16, 8) + conv(16, 32, 4), 32 * 4 * 4),
        "nature": (conv(9, 32, 8) + conv(32, 64, 4) + conv(64, 64, 3), 64 * 2 * 2),
        "resnet": (residual, 32 * 5 * 5),
    }
    torch.manual_seed(0)
    encoder = script.Encoder(kind, 9, 48, 50)
    convs, fan_in = sizes[kind]
    assert sum(x.numel() for x in encoder.parameters()) == convs + fan_in * 50 + 50 + 2 * 50
    features = encoder(torch.randn(4, 9, 48, 48))
    assert features.shape == (4, 50)
    assert features.abs().max() < 1.0
    assert features.std(0).min() > 0.0
    assert script.SMALLEST[kind] == smallest
    script.Encoder(kind, 3, smallest, 50)
    with pytest.raises(RuntimeError):
        script.Encoder(kind, 3, smallest - 1, 50)


@pytest.mark.parametrize("kind", ["simple", "nature", "resnet"])
def test_encoders_by_hand(kind: str) -> None:
    """Layer by layer, with the strides and activations of the papers (ML-Agents: leaky ReLU, and swish)."""
    torch.manual_seed(0)
    encoder, x = script.Encoder(kind, 3, 40, 50), torch.randn(4, 3, 40, 40)
    features = encoder(x)
    convs = iter([layer for layer in encoder.convs.modules() if isinstance(layer, nn.Conv2d)])

    def convolve(x: Tensor, **rules: int) -> Tensor:
        layer = next(convs)
        return F.conv2d(x, layer.weight, layer.bias, **rules)

    for stride in {"simple": (4, 2), "nature": (4, 2, 1), "resnet": ()}[kind]:
        x = F.leaky_relu(convolve(x, stride=stride))
    for _ in range(3 if kind == "resnet" else 0):
        x = F.max_pool2d(convolve(x, padding=1), 3, stride=2)
        for _ in range(2):
            hidden = convolve(x * torch.sigmoid(x), padding=1)
            x = x + convolve(hidden * torch.sigmoid(hidden), padding=1)
    x = x * torch.sigmoid(x) if kind == "resnet" else x
    linear, norm, _ = encoder.head
    expected = F.layer_norm(linear(x.flatten(1)), (50,), norm.weight, norm.bias).tanh()
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    assert next(convs, None) is None


def test_residual_block() -> None:
    """By its equation."""
    torch.manual_seed(0)
    block, x = script.ResidualBlock(4), torch.randn(2, 4, 5, 5)
    one, two = (layer for layer in block.net if isinstance(layer, nn.Conv2d))
    hidden = one(x * torch.sigmoid(x))
    torch.testing.assert_close(block(x), x + two(hidden * torch.sigmoid(hidden)))
    assert not torch.equal(one.weight, two.weight)


def test_pictures_in_the_encoder_are_standardised_channels() -> None:
    """The first convolution takes each observation with its own mean 0 and standard deviation 1."""
    agent, _ = make_agent(frame_stack=2)
    seen: list[Tensor] = []
    agent.encoder.convs[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    pictures = np.random.default_rng(0).integers(256, size=(5, 2, 3, 20, 20), dtype=np.uint8)
    pictures[0] = 7  # all pixels are the same
    pictures[1] //= 50
    agent.act(pictures.reshape(5, -1))
    for i, picture in enumerate(pictures):
        expected = (picture.reshape(6, 20, 20) - picture.mean()) / max(picture.std(), 1e-3)
        np.testing.assert_allclose(seen[0][i], expected, atol=1e-4)


class Reference:
    """The same from the papers: own optimisers, torch.distributions, one loss after the other."""

    def __init__(self, agent: Any, args: Any) -> None:
        self.args, self.agent = args, copy.deepcopy(agent)
        critics = [*self.agent.encoder.parameters(), *self.agent.qf.parameters()]
        self.q_optimizer = torch.optim.Adam(critics, lr=args.q_lr)
        self.actor_optimizer = torch.optim.Adam(self.agent.actor.parameters(), lr=args.policy_lr)
        self.alpha_optimizer = torch.optim.Adam([self.agent.log_alpha], lr=args.alpha_lr)

    def update(self, batch: tuple[Tensor, ...]) -> None:
        """Critics and encoder; then the policy from the features that the critics' loss had; then the coefficient."""
        agent, (obs, actions, rewards, next_obs, terminations) = self.agent, batch
        obs, next_obs = (
            ((x - x.mean(1, keepdim=True)) / x.std(1, correction=0, keepdim=True)) for x in (obs, next_obs)
        )
        obs, next_obs = (x.reshape(-1, *agent.encoder.shape) for x in (obs, next_obs))
        alpha = agent.log_alpha.exp().item()
        policy = squashed(*agent.actor(agent.encoder(next_obs)))
        next_actions = policy.rsample()
        values = agent.qf_target(agent.encoder_target(next_obs), next_actions)
        soft_value = torch.minimum(values[0], values[1]) - alpha * policy.log_prob(next_actions)
        target = torch.where(terminations.bool(), rewards, rewards + self.args.gamma * soft_value).detach()
        features = agent.encoder(obs)
        values = agent.qf(features, actions)
        self.step(self.q_optimizer, sum(nn.functional.mse_loss(values[i], target) for i in range(2)))
        features = features.detach()
        policy = squashed(*agent.actor(features))
        fresh = policy.rsample()
        log_prob, values = policy.log_prob(fresh), agent.qf(features, fresh)
        self.step(self.actor_optimizer, (alpha * log_prob - torch.minimum(values[0], values[1])).mean())
        self.step(self.alpha_optimizer, (agent.log_alpha.exp() * (1.0 - log_prob.detach())).mean())
        for online, target_net in ((agent.encoder, agent.encoder_target), (agent.qf, agent.qf_target)):
            for p, p_target in zip(online.parameters(), target_net.parameters(), strict=True):
                p_target.data = (1 - self.args.tau) * p_target.data + self.args.tau * p.data

    @staticmethod
    def step(optimizer: torch.optim.Optimizer, loss: Any) -> None:
        """A plain gradient step."""
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_update_against_a_second_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four updates in float64 from the same random numbers: all weights, of both encoders too."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # which the encoder calls on bytes
    agent, args = make_agent(tau=0.1, max_shift=0)
    agent = agent.double()
    reference, optimizers = Reference(agent, args), make_optimizers(agent, 1e-3)
    for num_updates in range(4):
        batch = tuple(x.double() if x.is_floating_point() else x for x in make_batch(agent, 16, num_updates))
        torch.manual_seed(100 + num_updates)
        script.update(agent, optimizers, batch, args, num_updates)
        torch.manual_seed(100 + num_updates)
        torch.randint(1, (2, 16, 2))  # the places of shifts, which are all zero
        reference.update(tuple(x.double() for x in batch))
    torch.testing.assert_close(agent.state_dict(), reference.agent.state_dict(), rtol=1e-4, atol=1e-7)  # of the epsilon


def test_the_encoder_gets_no_gradient_from_the_actor() -> None:
    """With critics that do not learn the encoder stays as it is, and the actor does not; nor is there a path to it."""
    agent, args = make_agent()
    optimizers = make_optimizers(agent, 1e-3)
    optimizers["q"].lr = 0.0
    before = copy.deepcopy(agent.state_dict())
    batch = make_batch(agent, 8)
    script.update(agent, optimizers, batch, args, 0)
    changed = {name.split(".")[0] for name, x in agent.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {"actor", "log_alpha"}
    places = torch.ones((2, 8, 2), dtype=torch.int64)
    gradient, features, _ = script.compute_qf_gradient(agent, batch, places, torch.randn(8, 1), args)
    assert not features.requires_grad
    assert len(gradient) == sum(x.numel() for name in ("encoder", "qf") for x in getattr(agent, name).parameters())
    in_encoder = set(map(id, agent.encoder.parameters()))
    assert not in_encoder & set(map(id, agent.groups()["policy"]))
    assert in_encoder <= set(map(id, agent.groups()["q"]))


# --- runs ---


class Spy(script.ReplayBuffer):
    """Keeps the newest buffer."""

    newest_buffer: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Spy.newest_buffer = self


def test_stored_transitions_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both environments' terminations, time limits, and a reset inside of episodes; what a picture shows tells all."""
    monkeypatch.setattr(script, "ReplayBuffer", Spy)
    train(total_timesteps=48, checkpoint_freq=28, buffer_size=100, frame_stack=3)
    batch = Spy.newest_buffer.sample(3000)
    obs, next_obs = (x.view(3000, 3, -1)[:, :, 0].tolist() for x in (batch[0], batch[3]))
    steps = set()
    for stack, next_stack, reward, termination in zip(obs, next_obs, batch[2].tolist(), batch[4].tolist(), strict=True):
        episode, step = divmod(stack[-1], 10)
        assert stack == [10 * episode + max(0, step - i) for i in (2, 1, 0)]
        assert next_stack == [*stack[1:], stack[-1] + 1]
        assert reward == step + 1
        assert termination == (step + 1 == LENGTH and episode % 2 == 0)
        steps.add((episode, step))
    rewards = Spy.newest_buffer.steps[: Spy.newest_buffer.total, 1]
    assert (rewards > 0).sum() == 48  # the other rows are of first pictures
    assert len(steps) == 24  # both environments show the same


@pytest.mark.parametrize(
    ("flags", "takes"),
    [
        ({"frame_size": 19}, "--frame-size takes at least 20 with --encoder simple, not 19"),
        ({"frame_size": 35, "encoder": "nature"}, "--frame-size takes at least 36 with --encoder nature, not 35"),
        ({"frame_size": 14, "encoder": "resnet"}, "--frame-size takes at least 15 with --encoder resnet, not 14"),
        ({"max_shift": 20}, "--max-shift takes less than --frame-size, 20, not 20"),
        ({"max_shift": -1}, "--max-shift takes a number from 0"),
        ({"frame_stack": 0}, "--frame-stack takes a number from 1"),
        ({"action_repeat": 0}, "--action-repeat takes a number from 1"),
        ({"buffer_size": 15}, "--buffer-size takes at least 2 x --num-envs x (--frame-stack + 1), 16, not 15"),
        ({"env_id": "Blind-v0"}, "its observations are not pictures, and it has no render mode rgb_array"),
        ({"env_id": "Planes-v0"}, "it has no pictures (height, width, channels) of bytes"),
    ],
    ids=str,
)
def test_bad_arguments(flags: dict[str, Any], takes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence that names the flag, exit status 2, no run folder."""
    with pytest.raises(SystemExit) as error:
        train(**flags)
    stderr = capsys.readouterr().err
    assert error.value.code == 2
    assert takes in stderr
    assert stderr.splitlines()[-1].startswith("error: ")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"grey": True, "frame_stack": 1, "max_shift": 0, "action_repeat": 2, "autotune": False},
        {"encoder": "resnet", "frame_size": 15, "buffer_size": 16, "learning_starts": 0, "total_timesteps": 40},
        {"encoder": "nature", "frame_size": 36, "num_envs": 1},
    ],
    ids=str,
)
def test_runs_and_logs_the_keys_of_the_docs(flags: dict[str, Any]) -> None:
    """All of them, and no other."""
    page = (ROOT / "docs" / "sac.md").read_text()
    table = page.split("## Logged metrics")[1].split("##")[0]
    documented = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    if not flags.get("autotune", True):
        documented.remove("losses/alpha_loss")
    folder = train(**flags)
    assert set(read_scalars(folder)) == documented
    script.main(script.parse_args(script.Args, ["--evaluate", str(folder)]))
    assert all(x.isfinite().all() for x in load_weights(folder).values())


@pytest.mark.slow
def test_rendered_in_processes_of_their_own() -> None:
    """The same run."""
    flags = {"env_id": "Pendulum-v1", "env_kwargs": "{}", "total_timesteps": 30}
    assert_same_weights(train(vectorization="async", **flags), train(**flags))


def test_evaluation_leaves_the_training_alone() -> None:
    """Evaluations have environments of their own."""
    assert_same_weights(train(eval_freq=20), train())


REACHER: dict[str, Any] = {"env_id": "Reacher-v5", "env_kwargs": '{"width": 32, "height": 32, "max_episode_steps": 10}'}
REACHER |= {"total_timesteps": 40, "learning_starts": 10, "checkpoint_freq": 20}


@pytest.mark.slow
def test_pictures_of_mujoco_come_from_the_seed_whatever_else_is_drawn() -> None:
    """An evaluation, which closes its own pictures, changes none of the training; nor does a resume."""
    expected = train(**REACHER)
    assert_same_weights(train(**REACHER, eval_freq=15), expected)
    half = train(**REACHER | {"total_timesteps": 20})
    script.main(script.parse_args(script.Args, ["--resume", str(half), "--total-timesteps", "40"]))
    assert_same_weights(half, expected)


@pytest.mark.slow
def test_pictures_of_mujoco_from_processes_of_their_own() -> None:
    """Are the same, and not black, also after other environments were closed and freed."""
    pictures = []
    for vectorization in ("sync", "async"):
        args = make_args(**REACHER, vectorization=vectorization)
        script.make_envs(replace(args, vectorization="sync"), 1).close()
        envs = script.make_envs(args, 2)
        script.make_envs(replace(args, vectorization="sync"), 1).close()
        gc.collect()
        first, _ = envs.reset(seed=1)
        pictures.append((first.copy(), envs.step(np.zeros((2, 2), np.float32))[0].copy()))
        envs.close()
    np.testing.assert_array_equal(pictures[0], pictures[1])
    assert np.reshape(pictures[0], (4, -1)).max(1).min() > 100


@pytest.mark.slow
def test_a_video_of_a_task_that_is_rendered_anyway() -> None:
    """The recording and the observations are drawn by one environment."""
    folder = train(env_id="Pendulum-v1", capture_video=True, total_timesteps=42, eval_episodes=1)
    assert list((folder / "videos").glob("*.mp4"))


def test_mujoco_renders_without_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The renderer is chosen where there is no display, and only if none was chosen."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "SDL_VIDEODRIVER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    script.prepare(make_args(), script.LIMITS)
    assert os.environ["MUJOCO_GL"] == "egl"
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    script.prepare(make_args(), script.LIMITS)
    assert os.environ["MUJOCO_GL"] == "osmesa"
