"""SAC from pictures: a convolutional encoder in front of policy and critics, for any task that renders.

Random shifts: DrQ (Yarats, Kostrikov and Fergus 2021, https://arxiv.org/abs/2004.13649). The policy's loss
gives the encoder no gradient. In DrQ and SAC-AE (Yarats et al. 2021, https://arxiv.org/abs/1910.01741) only the
convolutions get none. The encoders are those of ML-Agents. How it differs from `sac_continuous.py`:
- An observation is the last `--frame-stack` pictures (`Pixels`), which the task renders or has as its observations.
- One encoder turns it into 50 features for the policy and for both critics. It is part of the critics: they train it,
  and it has a target network. The policy's gradient does not reach it.
- The buffer keeps each picture once, as bytes, and puts the stacks together when it samples.
- Each stack of a minibatch is shifted by a few random pixels (`shift`).
- The features of a minibatch are computed once, before the critics' step, for both losses. Nothing is compiled.
- A minibatch has 64 transitions, the buffer 100,000 pictures. Updates begin at step 1,000. There is no `--norm-obs`.

    python variants/sac_pixels.py --env-id Pendulum-v1 --grey --total-timesteps 9000

`docs/variants.md` explains these changes, `docs/sac.md` the rest. Equation numbers are of Haarnoja et al. 2018b.
"""

import copy
import itertools
import json
import math
import random
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium.spaces import flatdim
from gymnasium.vector import VectorEnv
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # utils/ is there
from utils.run import OwnContext, Run, describe, fail, load_model, parse_args, prepare, vectorize  # noqa: E402

# === Arguments ========================================================================================================


@dataclass
class Args:
    """SAC from pictures: for tasks with continuous actions that render, or whose observations are pictures."""

    # --- experiment ---
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seed of all random numbers
    cuda: bool = True  # use the GPU if there is one
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "continuous-control"  # W&B project
    wandb_entity: str | None = None  # W&B team or user; default: that of the account
    capture_video: bool = False  # record the first episode of every evaluation into videos/ of the run folder
    save_model: bool = True  # write model.pt into the run folder at the end, or when the run is stopped
    upload_model: bool = False  # upload the model with a model card to the Hugging Face Hub at the end
    hf_entity: str | None = None  # user or organisation on the Hugging Face Hub
    eval_freq: int = 10_000  # environment steps between evaluations of the deterministic policy; 0: only at the end
    eval_episodes: int = 10  # episodes of an evaluation
    evaluate: Path | None = None  # do not train: evaluate the model of this run folder
    checkpoint_freq: int = 20_000  # steps between checkpoints, which reset the environments; 0: only first and last
    resume: Path | None = None  # continue the run of this folder from its last checkpoint, with its arguments

    # --- environment ---
    env_id: str = "Pendulum-v1"  # Gymnasium id; module:id imports the module first
    env_kwargs: str = "{}"  # arguments of the task in JSON, such as {"ctrl_cost_weight": 0.2}
    num_envs: int = 1  # parallel environments
    vectorization: Literal["sync", "async"] = "sync"  # one after another, or a process each
    frame_size: int = 48  # height and width of a picture after scaling, in pixels
    grey: bool = False  # pictures in grey: a third of the bytes
    frame_stack: int = 3  # pictures in an observation
    action_repeat: int = 1  # steps of the task with the same action; together they are one environment step

    # --- algorithm ---
    total_timesteps: int = 1_000_000  # environment steps of the run, over all environments
    buffer_size: int = 100_000  # pictures in the replay buffer; an episode of n steps has n + 1 pictures
    batch_size: int = 64  # transitions in a minibatch
    encoder: Literal["simple", "nature", "resnet"] = "simple"  # ML-Agents' convolutions, the fastest one first
    max_shift: int = 2  # largest random shift of the pictures in a minibatch, in pixels; 0: none
    learning_starts: int = 1_000  # environment steps with uniformly random actions before the first update
    updates_per_step: float = 1.0  # updates per environment step: 0.25 is one in four steps, 4 is four in each
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # step size of the target networks towards the critics
    policy_frequency: int = 1  # at every Nth critic update the actor is updated N times
    policy_lr: float = 1e-3  # learning rate of the actor
    q_lr: float = 1e-3  # learning rate of the critics and of the encoder
    alpha_lr: float = 1e-3  # learning rate of the entropy coefficient
    anneal_lr: bool = False  # the learning rates of actor, critics and encoder fall linearly to zero over the run
    alpha: float = 1.0  # entropy coefficient: its initial value, or with --no-autotune its fixed value
    autotune: bool = True  # learn the entropy coefficient
    target_entropy_scale: float = 1.0  # the target entropy is minus this times the number of action dimensions
    log_freq: int = 1_000  # environment steps between points of the training curves


LIMITS = {
    "gamma tau": (0, 1),
    "eval_episodes num_envs": (1, 100_000),
    "batch_size": (1, 10_000_000),
    "frame_size frame_stack action_repeat": (1, 1000),
    "max_shift": (0, 1000),
    "total_timesteps buffer_size policy_frequency log_freq": (1, 1e12),
    "eval_freq checkpoint_freq learning_starts updates_per_step": (0, 1e12),
    "policy_lr q_lr alpha_lr target_entropy_scale": (0, 1e12),
    "alpha": (1e-9, 1e9),
    "seed": (0, 2**31),
}


def check_args(args: Args) -> None:
    """Checks what limits cannot express; exits with one sentence."""
    smallest = SMALLEST[args.encoder]
    if args.frame_size < smallest:
        fail(f"--frame-size takes at least {smallest} with --encoder {args.encoder}, not {args.frame_size}")
    if args.max_shift >= args.frame_size:
        fail(f"--max-shift takes less than --frame-size, {args.frame_size}, not {args.max_shift}")
    least = 2 * args.num_envs * (args.frame_stack + 1)  # a step of all environments with its stacks
    if args.buffer_size < least:
        fail(f"--buffer-size takes at least 2 x --num-envs x (--frame-stack + 1), {least}, not {args.buffer_size}")


# === Environments =====================================================================================================


class Pixels(gym.Wrapper):
    """Pictures as observations: the last `--frame-stack` of them as bytes, in one vector, the oldest first.

    A picture (channels, frame_size, frame_size) is the task's own observation if that is a picture, and rendered
    otherwise. An episode begins with copies of its first picture. With `--action-repeat` rewards are summed.
    """

    def __init__(self, env: gym.Env, args: Args) -> None:
        super().__init__(env)
        self.args, self.is_rendered = args, not is_picture(env.observation_space)
        obs, _ = env.reset(seed=0)  # for the number of channels; MuJoCo's camera stays where this episode begins
        self.frames = deque([self.see(obs)], args.frame_stack)
        self.observation_space = gym.spaces.Box(0, 255, (args.frame_stack * self.frames[0].size,), np.uint8)

    def see(self, obs: Any) -> np.ndarray:
        """The current picture as bytes (frame_dim,), scaled to a square by averaging boxes of pixels."""
        picture, size = np.asarray(self.env.render() if self.is_rendered else obs), self.args.frame_size
        picture = picture[..., None] if picture.ndim == 2 else picture  # a grey one
        if picture.ndim != 3 or picture.shape[2] > 4 or picture.dtype != np.uint8:
            raise ValueError("it has no pictures (height, width, channels) of bytes")
        for axis, length in enumerate(picture.shape[:2]):
            bounds = np.arange(size) * length // size
            counts = np.diff(bounds, append=length).clip(1)  # where it is enlarged, pixels are repeated
            picture = np.add.reduceat(picture, bounds, axis) / np.expand_dims(counts, (1 - axis, 2))
        if self.args.grey and picture.shape[2] >= 3:
            picture = picture[..., :3] @ np.array([[0.299], [0.587], [0.114]])  # luminance (ITU-R BT.601)
        return picture.transpose(2, 0, 1).round().astype(np.uint8).ravel()

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins an episode."""
        obs, info = self.env.reset(**kwargs)
        self.frames.extend([self.see(obs)] * self.args.frame_stack)
        return np.concatenate(self.frames), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Takes `--action-repeat` steps, or fewer if the episode ends."""
        total = 0.0
        for _ in range(self.args.action_repeat):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        self.frames.append(self.see(obs))
        return np.concatenate(self.frames), total, terminated, truncated, info


def is_picture(space: gym.Space) -> bool:
    """Whether observations are pictures (height, width, up to 4 channels) or grey ones (height, width) of bytes."""
    shape = space.shape if isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 else ()
    return len(shape) == 2 or (len(shape) == 3 and shape[2] <= 4)


def make_env(args: Args, **render: str) -> gym.Env:
    """One environment with pictures as observations; `render` are the arguments for videos."""
    kwargs = json.loads(args.env_kwargs) | render
    env = gym.make(args.env_id, **kwargs)
    if not is_picture(env.observation_space):
        env.close()
        if "rgb_array" not in env.metadata.get("render_modes", []):
            raise ValueError("its observations are not pictures, and it has no render mode rgb_array")
        env = gym.make(args.env_id, **kwargs | {"render_mode": "rgb_array"})
    return Pixels(OwnContext(env), args)


def make_envs(args: Args, num_envs: int, video: Path | None = None) -> VectorEnv:
    """`num_envs` environments stepped together; `video` is where the first episode of the first one is recorded."""
    # A forked process would hang in EGL, which its parent has drawn with.
    return vectorize([partial(make_env, args)] * num_envs, args, video, context="spawn")


def step_envs(envs: VectorEnv, actions: np.ndarray) -> tuple[np.ndarray, ...]:
    """Steps all environments with actions (num_envs, action_dim); [-1, 1] maps linearly onto the task's bounds.

    Actions outside [-1, 1] are clipped. Returns obs, final_obs (num_envs, obs_dim), rewards, terminations, truncations
    (num_envs,). `final_obs` is the observation after the step. Where it ended an episode, `obs` begins the next one.
    """
    space: Any = envs.single_action_space  # a Box: `vectorize` refuses others
    fractions = 0.5 * (actions.reshape(envs.action_space.shape) + 1.0)  # of the range between the bounds
    env_actions = (space.low + fractions * (space.high - space.low)).clip(space.low, space.high)
    obs, rewards, terminations, truncations, infos = envs.step(env_actions)
    final_obs, dones = obs.copy(), terminations | truncations
    if dones.any():
        final_obs[dones] = np.stack(infos["final_obs"][dones])
    return obs, final_obs, rewards, terminations, truncations


# === Networks =========================================================================================================


HIDDEN_SIZES = (256, 256)  # units of the hidden layers of actor and critics


def mlp(*sizes: int) -> nn.Sequential:
    """ReLU network with PyTorch's default initialisation."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


class ResidualBlock(nn.Module):
    """x + conv(swish(conv(swish(x)))), as in IMPALA (Espeholt et al. 2018, figure 3), which has ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convs = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.net = nn.Sequential(nn.SiLU(), convs[0], nn.SiLU(), convs[1])

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, height, width) to the same shape."""
        return x + self.net(x)


SMALLEST = {"simple": 20, "nature": 36, "resnet": 15}  # pictures that leave a pixel after the convolutions


class Encoder(nn.Module):
    """Convolutions over the pictures of an observation, as channels, with the sizes of ML-Agents.

    "nature" is that of Mnih et al. 2015, and "resnet" that of IMPALA. The output layer is that of SAC-AE: layer
    normalisation and tanh keep the features in [-1, 1].
    """

    def __init__(self, kind: str, channels: int, frame_size: int, feature_dim: int) -> None:
        super().__init__()
        self.shape, layers = (channels, frame_size, frame_size), list[nn.Module]()
        if kind == "resnet":
            for size in (16, 32, 32):
                layers += [nn.Conv2d(channels, size, 3, padding=1), nn.MaxPool2d(3, 2)]
                layers += [ResidualBlock(size), ResidualBlock(size)]
                channels = size
            layers += [nn.SiLU()]
        else:
            sizes = {"simple": [(16, 8, 4), (32, 4, 2)], "nature": [(32, 8, 4), (64, 4, 2), (64, 3, 1)]}
            for size, kernel, stride in sizes[kind]:
                layers += [nn.Conv2d(channels, size, kernel, stride), nn.LeakyReLU()]
                channels = size
        self.convs = nn.Sequential(*layers, nn.Flatten())
        fan_in = self.convs(torch.zeros(1, *self.shape)).shape[1]
        self.head = nn.Sequential(nn.Linear(fan_in, feature_dim), nn.LayerNorm(feature_dim), nn.Tanh())

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures (n, channels, frame_size, frame_size) to features (n, feature_dim)."""
        return self.head(self.convs(pictures.contiguous(memory_format=torch.channels_last)))  # faster on a CPU


class NormalActor(nn.Module):
    """Normal policy, squashed by tanh; its mean and log standard deviation both depend on the observation."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.net = mlp(obs_dim, *HIDDEN_SIZES, 2 * action_dim)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Observations (..., obs_dim) to mean and log standard deviation (..., action_dim) before tanh."""
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        return mean, log_std.clamp(-20.0, 2.0)


class TwinLinear(nn.Module):
    """Two linear layers, one for each critic, as one batched product; initialised like `nn.Linear`."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(fan_in)
        self.weight = nn.Parameter(torch.empty(2, fan_in, fan_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(2, 1, fan_out).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """(2, batch_size, fan_in) to (2, batch_size, fan_out)."""
        if self.weight.shape[2] == 1:  # as a matrix product it would take three times as long
            return (x * self.weight.mT).sum(-1, keepdim=True) + self.bias
        return x @ self.weight + self.bias


class TwinQNetwork(nn.Module):
    """Both critics. Row k of each parameter is critic k's, so layers of `torch.nn` do not fit: see `docs/sac.md`."""

    def __init__(self, input_dim: int, output_dim: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise((input_dim, *HIDDEN_SIZES)):
            layers += [TwinLinear(fan_in, fan_out), nn.ReLU()]
        self.net = nn.Sequential(*layers, TwinLinear(fan_out, output_dim))
        assert all(len(x) == 2 for x in self.parameters()), "no row for each critic: see TwinLayerNorm in docs/sac.md"

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Observations (batch_size, obs_dim) and actions (batch_size, action_dim) to both values (2, batch_size)."""
        return self.net(torch.cat([obs, actions], dim=-1).expand(2, -1, -1)).squeeze(-1)


class Agent(nn.Module):
    """What model.pt holds: encoder, policy, critics, target networks and entropy coefficient."""

    def __init__(self, envs: VectorEnv, args: Args) -> None:
        super().__init__()
        obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
        feature_dim = 50
        self.encoder = Encoder(args.encoder, obs_dim // args.frame_size**2, args.frame_size, feature_dim)
        self.actor = NormalActor(feature_dim, action_dim)  # its observations, and those of `qf`, are features
        self.qf = TwinQNetwork(feature_dim + action_dim, 1)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha)))
        self.encoder_target = copy.deepcopy(self.encoder).requires_grad_(False)
        self.qf_target = copy.deepcopy(self.qf).requires_grad_(False)

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """The parameters that each optimiser steps."""
        critics = [*self.qf.parameters(), *self.encoder.parameters()]
        return {"policy": [*self.actor.parameters()], "q": critics, "alpha": [self.log_alpha]}

    def normalize(self, obs: Tensor) -> Tensor:
        """Bytes (n, obs_dim) to what the encoder takes (n, channels, frame_size, frame_size).

        Each observation has mean 0 and standard deviation 1. Otherwise a bright background dominates the convolutions.
        """
        return F.layer_norm(obs.float().view(-1, *self.encoder.shape), self.encoder.shape)

    @torch.no_grad()
    def act(self, obs: np.ndarray, noise: Tensor | float = 0.0) -> np.ndarray:
        """Bytes (num_envs, obs_dim) to actions (num_envs, action_dim); deterministic without noise."""
        mean, log_std = self.actor(self.encoder(self.normalize(torch.as_tensor(obs, device=self.log_alpha.device))))
        return (mean + log_std.exp() * noise).tanh().cpu().numpy()


# === Replay buffer ====================================================================================================


class ReplayBuffer:
    """The last `capacity` pictures as bytes, each with the step that led to it.

    An episode of n steps has n + 1 rows: no step led to its first picture. Stacks are put together when sampled.
    """

    def __init__(
        self, capacity: int, num_envs: int, frame_stack: int, obs_dim: int, action_dim: int, device: torch.device
    ) -> None:
        self.frame_stack, self.widths = frame_stack, [action_dim, 1, 1]
        self.frames = torch.zeros((capacity, obs_dim // frame_stack), dtype=torch.uint8, device=device)
        self.steps = torch.zeros((capacity, sum(self.widths)), device=device)
        # Distance in rows to the episode's previous picture; 0 where there is none, or where nothing is stored.
        self.back = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.total = 0  # rows stored so far: row i is at i % capacity
        self.columns = {"frames": self.frames, "steps": self.steps, "back": self.back}  # what checkpoints hold
        self.newest = np.zeros(num_envs, dtype=np.int64)  # the row of each environment's newest picture

    def add(self, begins: np.ndarray, *step: np.ndarray) -> None:
        """Stores a step of all environments: the columns that `sample` returns, but (num_envs, ...).

        `begins` (num_envs,) is true where obs is the first of an episode: only there its picture is not stored yet.
        """
        obs, actions, rewards, final_obs, terminations = step
        frame_dim, device = self.frames.shape[1], self.back.device
        frames = np.concatenate([obs[begins, -frame_dim:], final_obs[:, -frame_dim:]])
        first_rows, step_rows = np.split(self.total + np.arange(len(frames)), [begins.sum()])
        self.newest[begins] = first_rows
        back = np.concatenate([np.zeros_like(first_rows), step_rows - self.newest])
        rows = torch.as_tensor(np.concatenate([first_rows, step_rows]) % len(self.back), device=device)
        self.frames[rows] = torch.as_tensor(frames, device=device)
        self.back[rows] = torch.as_tensor(back, device=device)
        columns = np.concatenate([actions, rewards[:, None], terminations[:, None]], axis=1, dtype=np.float32)
        self.steps[rows[len(first_rows) :]] = torch.as_tensor(columns, device=device)
        self.newest, self.total = step_rows, self.total + len(frames)

    def sample(self, batch_size: int) -> tuple[Tensor, ...]:
        """Uniformly with replacement: obs, actions, rewards (batch_size,), next_obs, terminations (batch_size,)."""
        device, capacity = self.back.device, len(self.back)
        is_step = self.back > 0
        # The previous picture of an episode is at most 2 x num_envs - 1 rows back.
        oldest = torch.arange(self.frame_stack * (2 * len(self.newest) - 1), device=device)
        is_step[(self.total + oldest) % capacity] = False  # a picture of their stacks may be overwritten
        counts = is_step.cumsum(0)
        numbers = torch.randint(2**62, (batch_size,), device=device) % counts[-1]  # without waiting for the GPU
        return self.gather(torch.searchsorted(counts, numbers, right=True))  # the row with `number` steps before it

    def gather(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The transitions of these rows (batch_size,), as `sample` has them; obs and next_obs are bytes."""
        stack = [rows]
        for _ in range(self.frame_stack):
            stack += [(stack[-1] - self.back[stack[-1]]) % len(self.back)]  # an episode's first picture repeats
        frames = self.frames[torch.stack(stack[::-1], dim=1)]  # (batch_size, frame_stack + 1, frame_dim)
        actions, rewards, terminations = self.steps[rows].split(self.widths, dim=1)
        obs, next_obs = frames[:, :-1].flatten(1), frames[:, 1:].flatten(1)
        return obs, actions, rewards.squeeze(1), next_obs, terminations.squeeze(1)


# === Losses and update ================================================================================================

Metrics = dict[str, Tensor]
Batch = tuple[Tensor, ...]  # columns in the order of `ReplayBuffer.sample`


def shift(pictures: Tensor, places: Tensor, border: int) -> Tensor:
    """Pads pictures (n, channels, size, size) at their borders, and cuts them out again at other places (DrQ).

    The padding repeats the outermost pixels `border` times. `places` (n, 2) are row and column in the padded pictures,
    from 0 to 2 x border. All pictures of an observation have the same place.
    """
    size, n = pictures.shape[-1], torch.arange(len(pictures), device=pictures.device)
    windows = F.pad(pictures, (border,) * 4, mode="replicate").unfold(2, size, 1).unfold(3, size, 1)  # a view
    return windows[n, :, places[:, 0], places[:, 1]]


def sample_actions(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions tanh(u) (..., action_dim) with normal u, and their log-probabilities (...), differentiable (appendix C).

    `noise` (..., action_dim) is standard normal. log(1 - tanh(u)^2) is computed as 2 (log 2 - u - softplus(-2u)), which
    neither overflows nor loses precision where tanh saturates.
    """
    u = mean + log_std.exp() * noise
    log_normal = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    log_det = 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
    return u.tanh(), (log_normal - log_det).sum(-1)


@torch.no_grad()
def compute_td_target(
    agent: Agent, rewards: Tensor, next_obs: Tensor, terminations: Tensor, noise: Tensor, args: Args
) -> Tensor:
    """The critics' regression target (batch_size,): reward plus discounted soft value of the next state (eq. 2, 3)."""
    mean, log_std = agent.actor(agent.encoder(next_obs))
    next_actions, next_log_prob = sample_actions(mean, log_std, noise)
    next_qf = agent.qf_target(agent.encoder_target(next_obs), next_actions)
    next_values = next_qf.amin(0) - agent.log_alpha.exp() * next_log_prob
    return rewards + args.gamma * (1.0 - terminations) * next_values


def compute_qf_loss(agent: Agent, obs: Tensor, actions: Tensor, td_target: Tensor) -> tuple[Tensor, Metrics]:
    """Mean squared Bellman error, summed over the critics (eq. 5, without its factor 1/2)."""
    qf_values = agent.qf(obs, actions)  # (2, batch_size)
    qf_losses = (qf_values - td_target).square().mean(1)
    metrics = {"losses/qf1_loss": qf_losses[0], "losses/qf2_loss": qf_losses[1]}
    metrics |= {"losses/qf1_values": qf_values[0].mean(), "losses/qf2_values": qf_values[1].mean()}
    return qf_losses.sum(), metrics


def compute_actor_loss(agent: Agent, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Metrics]:
    """The policy's loss (eq. 9), and the log-probabilities (batch_size,) of the actions that it was computed from."""
    mean, log_std = agent.actor(obs)  # obs are what the networks take: see `compute_actor_gradient`
    actions, log_prob = sample_actions(mean, log_std, noise)
    actor_loss = (agent.log_alpha.exp().detach() * log_prob - agent.qf(obs, actions).amin(0)).mean()
    metrics = {"losses/actor_loss": actor_loss, "losses/entropy": -log_prob.mean(), "losses/policy_mean": mean.mean()}
    metrics |= {"losses/policy_std": log_std.exp().mean(), "losses/action_magnitude": actions.abs().mean()}
    return actor_loss, log_prob, metrics


def compute_alpha_loss(agent: Agent, log_prob: Tensor, target_entropy: float) -> tuple[Tensor, Metrics]:
    """Loss of the entropy coefficient: its step raises alpha if the entropy is below the target (eq. 18)."""
    alpha_loss = -(agent.log_alpha.exp() * (log_prob.detach() + target_entropy)).mean()
    return alpha_loss, {"losses/alpha_loss": alpha_loss}


def flat_vector(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Makes the parameters views of one new vector, and returns it: an optimiser steps it in one operation."""
    parameters = list(parameters)
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(vector, parameters)
    return vector


class Adam(nn.Module):
    """Adam (Kingma and Ba 2015) on one vector (`flat_vector`); a module, so that its moments are saved.

    Computes what `torch.optim.Adam` does, without its overhead of 0.1 to 0.3 ms. Another optimiser: see `docs/sac.md`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, beta1: float, beta2: float, eps: float) -> None:
        super().__init__()
        self.vector, self.lr = flat_vector(parameters), lr
        self.settings: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "eps": eps}
        self.settings |= {"weight_decay": 0.0, "amsgrad": False, "maximize": False}  # the decay is L2, not AdamW's
        self.mean, self.square = nn.Buffer(torch.zeros_like(self.vector)), nn.Buffer(torch.zeros_like(self.vector))
        self.num_steps = nn.Buffer(torch.zeros((), device=self.vector.device))

    def step(self, gradient: Tensor) -> None:
        """Steps the parameters by their gradient, one vector (`compute_gradient`)."""
        self.num_steps.add_(1)
        state: Any = [self.mean], [self.square], [], [self.num_steps]  # []: AMSGrad's maxima, which are not used
        torch._fused_adam_([self.vector], [gradient], *state, lr=self.lr, **self.settings)


def compute_gradient(loss: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """The gradient with respect to these parameters, and no others, as one vector."""
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(parameters))])


def compute_qf_gradient(
    agent: Agent, batch: Batch, places: Tensor, noise: Tensor, args: Args
) -> tuple[Tensor, Tensor, Metrics]:
    """The gradient of critics and encoder on a batch (`ReplayBuffer.sample`), and the features, without gradient.

    `places` (2, batch_size, 2) are those of both observations (`shift`).
    """
    obs, actions, rewards, next_obs, terminations = batch
    obs, next_obs = agent.normalize(obs), agent.normalize(next_obs)
    if args.max_shift:
        obs, next_obs = shift(obs, places[0], args.max_shift), shift(next_obs, places[1], args.max_shift)
    td_target = compute_td_target(agent, rewards, next_obs, terminations, noise, args)
    features = agent.encoder(obs)
    loss, metrics = compute_qf_loss(agent, features, actions, td_target)
    gradient = compute_gradient(loss, agent.groups()["q"])
    metrics["losses/qf_grad_norm"] = gradient.norm()
    return gradient, features.detach(), {name: value.detach() for name, value in metrics.items()}


def compute_actor_gradient(
    agent: Agent, features: Tensor, noise: Tensor, args: Args
) -> tuple[Tensor, Tensor | None, Metrics]:
    """The gradients of the actor and, with --autotune, of alpha; critics and encoder get none."""
    actor_loss, log_prob, metrics = compute_actor_loss(agent, features, noise)
    gradient = compute_gradient(actor_loss, agent.groups()["policy"])
    metrics["losses/actor_grad_norm"] = gradient.norm()
    alpha_gradient = None
    if args.autotune:
        target_entropy = -args.target_entropy_scale * noise.shape[1]  # noise is (batch_size, action_dim)
        alpha_loss, alpha_metrics = compute_alpha_loss(agent, log_prob, target_entropy)
        alpha_gradient = compute_gradient(alpha_loss, agent.groups()["alpha"])
        metrics |= alpha_metrics
    return gradient, alpha_gradient, {name: value.detach() for name, value in metrics.items()}


@torch.no_grad()
def update_target(source: nn.Module, target: nn.Module, tau: float) -> None:
    """Moves the target's parameters by `tau` towards the source's, and copies buffers."""
    torch._foreach_lerp_(list(target.parameters()), list(source.parameters()), tau)
    for target_buffer, buffer in zip(target.buffers(), source.buffers(), strict=True):  # such as batch norm's
        target_buffer.copy_(buffer)


def update(agent: Agent, optimizers: dict[str, Adam], batch: Batch, args: Args, num_updates: int) -> Metrics:
    """One round of Algorithm 1: critics, actor, alpha, targets; `num_updates` is the number of earlier rounds."""
    actions = batch[1]
    places = torch.randint(2 * args.max_shift + 1, (2, len(actions), 2), device=actions.device)
    gradient, features, metrics = compute_qf_gradient(agent, batch, places, torch.randn_like(actions), args)
    optimizers["q"].step(gradient)

    if num_updates % args.policy_frequency == 0:
        for _ in range(args.policy_frequency):  # so that the actor takes as many steps as the critics
            noise = torch.randn_like(actions)
            gradient, alpha_gradient, actor_metrics = compute_actor_gradient(agent, features, noise, args)
            optimizers["policy"].step(gradient)
            if alpha_gradient is not None:
                optimizers["alpha"].step(alpha_gradient)
            metrics |= actor_metrics

    update_target(agent.qf, agent.qf_target, args.tau)
    update_target(agent.encoder, agent.encoder_target, args.tau)
    metrics["losses/alpha"] = agent.log_alpha.detach().exp()
    return metrics


# === Evaluation =======================================================================================================

MAX_EPISODE_STEPS = 10_000  # steps after which an evaluation cuts an episode off


def evaluate(agent: Agent, args: Args, folder: Path, name: str) -> dict[str, float]:
    """Plays --eval-episodes episodes with the deterministic policy.

    Each episode has its own environment and seed, and the training's random streams are restored. Returns mean
    and standard deviation of the undiscounted returns, and the mean length in steps. Videos go to folder/videos.
    """
    args = replace(args, vectorization="sync")
    seed = (1_000_000 + args.seed * args.eval_episodes) % 2**31
    streams = random.getstate(), np.random.get_state(), torch.get_rng_state()  # tasks may draw from them
    random.seed(seed), np.random.seed(seed), torch.default_generator.manual_seed(seed)
    envs = make_envs(args, args.eval_episodes, folder / "videos" / name if args.capture_video else None)
    obs, _ = envs.reset(seed=seed)
    returns, lengths = np.zeros((2, args.eval_episodes))
    running = np.ones(args.eval_episodes, dtype=bool)
    for _ in range(MAX_EPISODE_STEPS):
        obs, _, rewards, terminations, truncations = step_envs(envs, agent.act(obs))
        returns += np.where(running, rewards, 0.0)
        lengths += running
        running &= ~(terminations | truncations)
        if not running.any():
            break
    envs.close()
    random.setstate(streams[0]), np.random.set_state(streams[1]), torch.default_generator.set_state(streams[2])
    return {"eval/return_mean": returns.mean(), "eval/return_std": returns.std(), "eval/length_mean": lengths.mean()}


# === Main =============================================================================================================


def main(args: Args) -> Path:
    """Trains, or evaluates a trained model with --evaluate; returns the run folder."""
    prepare(args, LIMITS)
    check_args(args)
    torch.set_flush_denormal(True)  # subnormal averages in Adam are slow; --evaluate must round as training does
    if args.evaluate is not None:
        agent = Agent(make_envs(args, 1), args)
        load_model(args.evaluate, {"agent": agent})
        print(describe(evaluate(agent, args, args.evaluate, "evaluate")))
        return args.evaluate

    # --- seeds and device ---
    random.seed(args.seed), np.random.seed(args.seed), torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")

    # --- environments, networks, storage ---
    envs = make_envs(args, args.num_envs)
    obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
    stride = args.num_envs  # environment steps of an iteration
    total_steps = -(-args.total_timesteps // stride) * stride  # rounded up to whole iterations
    agent = Agent(envs, args).to(device)
    learning_rates = {"policy": args.policy_lr, "q": args.q_lr, "alpha": args.alpha_lr}
    optimizers = {name: Adam(group, learning_rates[name], 0.9, 0.999, 1e-8) for name, group in agent.groups().items()}
    buffer = ReplayBuffer(args.buffer_size, args.num_envs, args.frame_stack, obs_dim, action_dim, device)
    counters = {"num_updates": 0}  # a dict, which checkpoints save and load

    rest = {"optimizer": optimizers, "counters": counters}  # of a checkpoint, besides model and buffer
    with Run(args, envs, total_steps, stride, model={"agent": agent}, rest=rest, buffers={"replay": buffer}) as run:
        # `run.steps()` yields the number of steps taken so far, and a seed where episodes begin anew. Between two
        # iterations it writes the checkpoints, and after the last one model.pt.
        for global_step, seed in run.steps():
            if seed is not None:  # at the start and after each checkpoint
                obs, _ = envs.reset(seed=seed)
                begins = np.ones(args.num_envs, dtype=bool)  # whether an episode begins with this observation
                update_metrics: Metrics = {}
            if args.anneal_lr:
                for name in ("policy", "q"):
                    optimizers[name].lr = learning_rates[name] * (1.0 - global_step / total_steps)

            # act and step
            if global_step < args.learning_starts:
                actions = 2.0 * torch.rand((args.num_envs, action_dim)).numpy() - 1.0
            else:
                actions = agent.act(obs, torch.randn((args.num_envs, action_dim), device=device))
            prev_obs = obs
            obs, final_obs, rewards, terminations, truncations = step_envs(envs, actions)
            run.check(reward=rewards[None])  # observations are bytes
            global_step += stride  # now the number of steps after this iteration

            # store
            buffer.add(begins, prev_obs, actions, rewards, final_obs, terminations)
            run.record(rewards, terminations | truncations)
            begins = terminations | truncations

            # update
            while counters["num_updates"] < int(args.updates_per_step * (global_step - args.learning_starts)):
                batch = buffer.sample(args.batch_size)
                update_metrics |= update(agent, optimizers, batch, args, counters["num_updates"])
                counters["num_updates"] += 1

            # log and evaluate
            if run.due(args.log_freq, args.checkpoint_freq, args.eval_freq):  # before a checkpoint or an evaluation
                metrics = {name: value.item() for name, value in update_metrics.items()}
                run.check(**metrics)
                metrics |= {f"charts/{name}_lr": optimizer.lr for name, optimizer in optimizers.items()}
                run.log(metrics, global_step)
            if run.due(args.eval_freq) and global_step < total_steps:
                run.log(evaluate(agent, args, run.folder, f"step-{global_step}"), global_step)
        run.log(evaluate(agent, args, run.folder, "final"), total_steps)
    return run.folder


if __name__ == "__main__":
    main(parse_args(Args))
