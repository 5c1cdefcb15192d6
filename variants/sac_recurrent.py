"""SAC with memory: a recurrent policy and recurrent critics, for partially observed tasks.

Ni et al. 2022, https://arxiv.org/abs/2110.05038; the stored state and the burn-in are of R2D2 (Kapturowski et al. 2019,
https://openreview.net/forum?id=r1lyTjAqYX). How it differs from `sac_continuous.py`:
- An LSTM or GRU takes observation, previous action and previous reward (`Memory`). The actor has one, and both
  critics share one. The heads take its output and the current input (a skip connection).
- The buffer keeps the order of the steps and samples sequences. The memory starts anew where an episode begins inside a
  sequence. `--burn-in` steps at a sequence's start only update the memories.
- The buffer stores the states that the memories had while the policy acted. A sequence begins with these states. With
  `--no-stored-state` it begins with zeros.
- While the policy acts, its memory is carried from step to step (`remember`). It is cleared where an episode begins.
  A checkpoint begins new episodes, so a resumed run equals an uninterrupted one.
- `--observe` hides parts of the observation. Layers have 64 units, and a minibatch is 16 sequences of 64 steps.
- The update is not compiled: the number and the length of its rows depend on the minibatch (`Memory.forward`).

    python variants/sac_recurrent.py --env-id Pendulum-v1 --observe 2 --sequence-length 32 --learning-starts 1000

`docs/variants.md` explains these changes, `docs/sac.md` the rest. Equation numbers are of Haarnoja et al. 2018b.
"""

import copy
import itertools
import json
import math
import random
import sys
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
from utils.run import Run, describe, fail, load_model, parse_args, prepare, vectorize  # noqa: E402

# === Arguments ========================================================================================================


@dataclass
class Args:
    """SAC with memory: trains on any Gymnasium task with continuous actions."""

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
    env_id: str = "HalfCheetah-v5"  # Gymnasium id; module:id imports the module first
    env_kwargs: str = "{}"  # arguments of the task in JSON, such as {"ctrl_cost_weight": 0.2}
    observe: str = ""  # indices of the parts of the observation that the agent sees, such as 0,2; default: all
    num_envs: int = 1  # parallel environments
    vectorization: Literal["sync", "async", "native"] = "sync"  # sync: in turn; async: processes; native: task's own

    # --- algorithm ---
    total_timesteps: int = 1_000_000  # environment steps of the run, over all environments
    buffer_size: int = 1_000_000  # transitions in the replay buffer; the oldest are overwritten
    memory: Literal["lstm", "gru"] = "lstm"  # kind of the memories
    hidden_size: int = 64  # size of the memories' output, and of the hidden layers of actor and critics
    batch_size: int = 16  # sequences in a minibatch
    sequence_length: int = 64  # environment steps of a sequence
    burn_in: int = 0  # first steps of a sequence that only update the memories, and are not learned from
    stored_state: bool = True  # a sequence begins with the memory states stored while acting; otherwise with zeros
    learning_starts: int = 5_000  # environment steps with uniformly random actions before the first update
    updates_per_step: float = 1.0  # updates per environment step: 0.25 is one in four steps, 4 is four in each
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # step size of the target networks towards the critics
    policy_frequency: int = 1  # at every Nth critic update the actor is updated N times
    policy_lr: float = 1e-3  # learning rate of the actor
    q_lr: float = 1e-3  # learning rate of the critics
    alpha_lr: float = 1e-3  # learning rate of the entropy coefficient
    anneal_lr: bool = False  # the learning rates of actor and critics fall linearly to zero over the run
    alpha: float = 1.0  # entropy coefficient: its initial value, or with --no-autotune its fixed value
    autotune: bool = True  # learn the entropy coefficient
    target_entropy_scale: float = 1.0  # the target entropy is minus this times the number of action dimensions
    norm_obs: bool = False  # normalise observations by their running mean and standard deviation, clipped to [-10, 10]
    log_freq: int = 1_000  # environment steps between points of the training curves


LIMITS = {
    "gamma tau": (0, 1),
    "eval_episodes num_envs": (1, 100_000),
    "batch_size": (1, 10_000_000),
    "sequence_length hidden_size": (1, 100_000),
    "burn_in": (0, 100_000),
    "total_timesteps buffer_size policy_frequency log_freq": (1, 1e12),
    "eval_freq checkpoint_freq learning_starts updates_per_step": (0, 1e12),
    "policy_lr q_lr alpha_lr target_entropy_scale": (0, 1e12),
    "alpha": (1e-9, 1e9),
    "seed": (0, 2**31),
}


def check_args(args: Args) -> None:
    """Checks what limits cannot express; exits with one sentence."""
    shortest = args.num_envs * args.sequence_length
    for flag, size in (("--buffer-size", args.buffer_size), ("--learning-starts", args.learning_starts)):
        if size < shortest:
            fail(f"{flag} takes at least --num-envs times --sequence-length, {shortest}, not {size}")
    if args.burn_in >= args.sequence_length:
        fail(f"--burn-in takes less than --sequence-length, {args.sequence_length}, not {args.burn_in}")
    if args.observe and args.vectorization == "native":
        fail("--observe takes --vectorization sync or async: a native vector environment has no wrappers")


# === Environments =====================================================================================================


def observe(env: gym.Env, indices: str) -> gym.Env:
    """Hides all of an observation (obs_dim,) but the parts with these indices, given as text: "0,2"."""
    space, words = env.observation_space, [word.strip() for word in indices.split(",")]
    assert isinstance(space, gym.spaces.Box)
    if not all(word.isdecimal() and int(word) < space.shape[0] for word in words):
        takes = f"--observe takes indices from 0 to {space.shape[0] - 1} with commas between them"
        raise ValueError(f"{takes}, not {indices}")
    shown = [int(word) for word in words]
    shown_space = gym.spaces.Box(space.low[shown], space.high[shown], dtype=space.dtype.type)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[shown], shown_space)


def make_env(args: Args, **render: str) -> gym.Env:
    """One environment with flat observations; `render` are the arguments for videos."""
    env = gym.make(args.env_id, **json.loads(args.env_kwargs) | render)
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return observe(env, args.observe) if args.observe else env


def make_envs(args: Args, num_envs: int, video: Path | None = None) -> VectorEnv:
    """`num_envs` environments stepped together; `video` is where the first episode of the first one is recorded."""
    return vectorize([partial(make_env, args)] * num_envs, args, video)


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


class RunningMeanStd(nn.Module):
    """Running mean and variance of all data seen so far, saved with the model (Chan, Golub and LeVeque 1983)."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.mean, self.var = nn.Buffer(torch.zeros(shape).double()), nn.Buffer(torch.ones(shape).double())
        self.count = nn.Buffer(torch.zeros(()).double())

    def update(self, x: Tensor) -> None:
        """Adds a batch (n, *shape)."""
        x, total = x.double(), self.count + len(x)
        delta = x.mean(0) - self.mean
        squares = self.var * self.count + x.var(0, correction=0) * len(x) + delta**2 * self.count * len(x) / total
        self.mean.add_(delta * len(x) / total)
        self.var.copy_(squares / total)
        self.count.copy_(total)

    @property
    def std(self) -> Tensor:
        """Standard deviation, never zero."""
        return (self.var + 1e-8).sqrt()

    def normalize(self, x: Tensor) -> Tensor:
        """(..., *shape) to mean 0 and standard deviation 1, clipped to [-10, 10]."""
        return ((x - self.mean) / self.std).clamp(-10.0, 10.0).float()


def mlp(*sizes: int) -> nn.Sequential:
    """ReLU network with PyTorch's default initialisation."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


class Memory(nn.Module):
    """LSTM or GRU over the inputs of an episode. Its features are hidden state and input (a skip connection)."""

    def __init__(self, kind: str, input_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.rnn: nn.LSTM | nn.GRU = (nn.LSTM if kind == "lstm" else nn.GRU)(input_dim, hidden_size)
        self.feature_dim = hidden_size + input_dim
        self.state_dim = 2 * hidden_size if kind == "lstm" else hidden_size  # an LSTM has a cell state, too

    def advance(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (steps, n, input_dim) of one episode each, from states (n, state_dim).

        Returns the features (steps, n, feature_dim) and the states after the last step.
        """
        parts = [x.contiguous() for x in state[None].split(self.rnn.hidden_size, dim=-1)]
        if isinstance(self.rnn, nn.LSTM):
            hidden, (last, cell) = self.rnn(inputs, (parts[0], parts[1]))
            last = torch.cat([last, cell], dim=-1)
        else:
            hidden, last = self.rnn(inputs, parts[0])
        return torch.cat([hidden, inputs], dim=-1), last[0]

    def forward(
        self, inputs: Tensor, next_inputs: Tensor, starts: Tensor, burn_in: int, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sequences of steps to the features of both observations of every step after the burn-in.

        `inputs` (steps, n, input_dim) are of the observations that were acted on, `next_inputs` of those that the steps
        led to. `starts` (steps, n) is true where an episode begins. `state` (n, state_dim) is that before the first
        step, zero by default. Both results are ((steps - burn_in) * n, feature_dim). No gradient goes into the burn-in.
        """
        state = inputs.new_zeros(inputs.shape[1], self.state_dim) if state is None else state
        with torch.no_grad():
            cuts = {0, burn_in, *starts[:burn_in].any(1).nonzero().flatten().tolist()}  # one call for each
            for begin, end in itertools.pairwise(sorted(cuts)):  # no episode begins between the two
                _, state = self.advance(inputs[begin:end], state * ~starts[begin, :, None])
        inputs, next_inputs, starts = inputs[burn_in:], next_inputs[burn_in:], starts[burn_in:]

        # Each stretch of an episode becomes a row of its own, and the observation after its last step follows it. So
        # the memory goes over all stretches in one call. Its outputs at a row's empty end are not used.
        # Begins of 1 0 0 1 0 have the offsets 0 1 2 0 1 and the rows 0 0 0 1 1.
        times = torch.arange(len(starts), device=starts.device)[:, None]
        begins = starts | (times == 0)
        offsets = times - (times * begins).cummax(0).values  # (steps, n): steps since the stretch began
        rows = begins.T.flatten().cumsum(0).unflatten(0, (-1, len(starts))).T - 1  # (steps, n): the stretch's row
        shape = int(offsets.max()) + 2, int(rows[-1, -1]) + 1
        stretches = inputs.new_zeros(*shape, inputs.shape[2])
        stretches[offsets + 1, rows] = next_inputs  # inside an episode the next line writes over it
        stretches[offsets, rows] = inputs
        states = inputs.new_zeros(shape[1], self.state_dim)
        states[rows[0]] = state * ~starts[0, :, None]
        features, _ = self.advance(stretches, states)
        return features[offsets, rows].flatten(0, 1), features[offsets + 1, rows].flatten(0, 1)


class NormalActor(nn.Module):
    """Normal policy, squashed by tanh; its mean and log standard deviation both depend on the memory's features."""

    def __init__(self, feature_dim: int, action_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.net = mlp(feature_dim, hidden_size, hidden_size, 2 * action_dim)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Features (..., feature_dim) to mean and log standard deviation (..., action_dim) before tanh."""
        mean, log_std = self.net(features).chunk(2, dim=-1)
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

    def __init__(self, feature_dim: int, action_dim: int, hidden_size: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise((feature_dim + action_dim, hidden_size, hidden_size)):
            layers += [TwinLinear(fan_in, fan_out), nn.ReLU()]
        self.net = nn.Sequential(*layers, TwinLinear(fan_out, 1))
        assert all(len(x) == 2 for x in self.parameters()), "no row for each critic: see TwinLayerNorm in docs/sac.md"

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        """Features (batch_size, feature_dim) and actions (batch_size, action_dim) to both values (2, batch_size)."""
        return self.net(torch.cat([features, actions], dim=-1).expand(2, -1, -1)).squeeze(-1)


class Agent(nn.Module):
    """What model.pt holds: policy, critics, their memories, target networks, entropy coefficient and statistics."""

    def __init__(self, envs: VectorEnv, args: Args) -> None:
        super().__init__()
        obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
        self.norm_obs = args.norm_obs
        self.obs_rms = RunningMeanStd((obs_dim,))
        self.actor_memory = Memory(args.memory, obs_dim + action_dim + 1, args.hidden_size)
        self.qf_memory = Memory(args.memory, obs_dim + action_dim + 1, args.hidden_size)
        self.actor = NormalActor(self.actor_memory.feature_dim, action_dim, args.hidden_size)
        self.qf = TwinQNetwork(self.qf_memory.feature_dim, action_dim, args.hidden_size)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha)))
        self.qf_target = copy.deepcopy(self.qf).requires_grad_(False)
        self.qf_target_memory = copy.deepcopy(self.qf_memory).requires_grad_(False)
        self.past_dim = 1 + action_dim + 1  # of what is carried beside the states: see `remember`

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """The parameters that each optimiser steps."""
        # The memories first: cuDNN takes an LSTM's weights without a copy if they are at their vector's start.
        policy = [*self.actor_memory.parameters(), *self.actor.parameters()]
        critics = [*self.qf_memory.parameters(), *self.qf.parameters()]
        return {"policy": policy, "q": critics, "alpha": [self.log_alpha]}

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations (..., obs_dim) to what the networks take."""
        return self.obs_rms.normalize(obs) if self.norm_obs else obs

    def inputs(self, obs: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        """What memories take (..., input_dim): raw observations, and the actions and rewards (...) before them."""
        return torch.cat([self.normalize(obs), actions, rewards[..., None]], dim=-1)

    def forget(self, num_envs: int) -> np.ndarray:
        """What the policy remembers where episodes begin (num_envs, memory_dim): see `remember`."""
        return np.zeros((num_envs, self.past_dim + 2 * self.actor_memory.state_dim), dtype=np.float32)

    @torch.no_grad()
    def act(self, obs: np.ndarray, memory: np.ndarray, noise: Tensor | float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Raw observations (n, obs_dim) to actions (n, action_dim); deterministic without noise.

        `memory` (num_envs, memory_dim) is what `remember` returned. Returns the new states of the actor's memory and of
        the critics' (num_envs, 2 * state_dim), too.
        """
        device = self.obs_rms.mean.device
        past, states = torch.as_tensor(memory, device=device).tensor_split([self.past_dim], dim=1)
        state, qf_state = states.chunk(2, dim=1)
        inputs = self.inputs(torch.as_tensor(obs, dtype=torch.float32, device=device), past[:, 1:-1], past[:, -1])
        features, state = self.actor_memory.advance(inputs[None], state)
        _, qf_state = self.qf_memory.advance(inputs[None], qf_state)
        mean, log_std = self.actor(features[0])
        return (mean + log_std.exp() * noise).tanh().cpu().numpy(), torch.cat([state, qf_state], dim=1).cpu().numpy()


def remember(actions: np.ndarray, rewards: np.ndarray, state: np.ndarray, dones: np.ndarray) -> np.ndarray:
    """What is carried into the next step (num_envs, memory_dim): a one, action, reward and the memories' states.

    All are zero where an episode begins.
    """
    columns = (np.ones_like(rewards)[:, None], actions, rewards[:, None], state)
    return np.concatenate(columns, axis=1, dtype=np.float32) * ~dones[:, None]


# === Replay buffer ====================================================================================================


class ReplayBuffer:
    """The last `capacity` transitions in time order: a row holds one step of all environments."""

    def __init__(
        self, capacity: int, num_envs: int, obs_dim: int, action_dim: int, memory_dim: int, device: torch.device
    ) -> None:
        self.widths = [obs_dim, action_dim, 1, obs_dim, 1, memory_dim]
        self.data = torch.empty((capacity // num_envs, num_envs, sum(self.widths)), device=device)
        self.total = 0  # rows stored so far: row i is at i % len(data)
        self.columns = {"rows": self.data}  # what checkpoints hold, by name

    def add(self, *columns: np.ndarray) -> None:
        """Stores a step of all environments: the columns that `sample` returns, but (num_envs, ...)."""
        flat = [column.reshape(len(column), -1) for column in columns]
        row = torch.as_tensor(np.concatenate(flat, axis=1, dtype=np.float32), device=self.data.device)
        self.data[self.total % len(self.data)] = row
        self.total += 1

    def sample(self, batch_size: int, length: int) -> tuple[Tensor, ...]:
        """Sequences of rows that follow each other, uniformly with replacement; each is of one environment.

        Returns obs, actions, rewards (length, batch_size), next_obs, terminations (length, batch_size), memory.
        """
        device, size = self.data.device, min(self.total, len(self.data))
        begins = self.total - size + torch.randint(size - length + 1, (batch_size,), device=device)
        rows = (begins + torch.arange(length, device=device)[:, None]) % len(self.data)  # (length, batch_size)
        sequences = self.data[rows, torch.randint(self.data.shape[1], (batch_size,), device=device)]
        obs, actions, rewards, next_obs, terminations, memory = sequences.split(self.widths, dim=2)
        return obs, actions, rewards.squeeze(2), next_obs, terminations.squeeze(2), memory


# === Losses and update ================================================================================================

Metrics = dict[str, Tensor]
Batch = tuple[Tensor, ...]  # columns in the order of `ReplayBuffer.sample`, (sequence_length, batch_size, ...)
Sequences = tuple[tuple[Any, ...], tuple[Any, ...]]  # the arguments of the actor's memory, and of the critics'


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
    agent: Agent, rewards: Tensor, sequences: Sequences, terminations: Tensor, noise: Tensor, args: Args
) -> Tensor:
    """The critics' regression target (n,): reward plus discounted soft value of the next state (eq. 2, 3)."""
    sequence, qf_sequence = sequences
    _, features = agent.actor_memory(*sequence)
    _, qf_features = agent.qf_target_memory(*qf_sequence)
    mean, log_std = agent.actor(features)
    next_actions, next_log_prob = sample_actions(mean, log_std, noise)
    next_values = agent.qf_target(qf_features, next_actions).amin(0) - agent.log_alpha.exp() * next_log_prob
    return rewards + args.gamma * (1.0 - terminations) * next_values


def compute_qf_loss(agent: Agent, obs: Tensor, actions: Tensor, td_target: Tensor) -> tuple[Tensor, Metrics]:
    """Mean squared Bellman error, summed over the critics (eq. 5, without its factor 1/2)."""
    qf_values = agent.qf(obs, actions)  # (2, batch_size)
    qf_losses = (qf_values - td_target).square().mean(1)
    metrics = {"losses/qf1_loss": qf_losses[0], "losses/qf2_loss": qf_losses[1]}
    metrics |= {"losses/qf1_values": qf_values[0].mean(), "losses/qf2_values": qf_values[1].mean()}
    return qf_losses.sum(), metrics


def compute_actor_loss(
    agent: Agent, features: Tensor, qf_features: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Metrics]:
    """The policy's loss (eq. 9), and the log-probabilities (n,) of the actions that it was computed from."""
    mean, log_std = agent.actor(features)
    actions, log_prob = sample_actions(mean, log_std, noise)
    actor_loss = (agent.log_alpha.exp().detach() * log_prob - agent.qf(qf_features, actions).amin(0)).mean()
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


def make_sequences(agent: Agent, batch: Batch, args: Args) -> Sequences:
    """Arguments of the actor's and of the critics' memory; without --stored-state memories begin with zeros."""
    obs, actions, rewards, next_obs, _, memory = batch
    past = memory[..., : agent.past_dim]
    inputs, next_inputs = agent.inputs(obs, past[..., 1:-1], past[..., -1]), agent.inputs(next_obs, actions, rewards)
    state, qf_state = memory[0, :, agent.past_dim :].chunk(2, dim=1) if args.stored_state else (None, None)
    steps = inputs, next_inputs, past[..., 0] == 0.0, args.burn_in
    return (*steps, state), (*steps, qf_state)


def compute_qf_gradient(agent: Agent, batch: Batch, noise: Tensor, args: Args) -> tuple[Tensor, Metrics]:
    """The gradient of the critics and their memory on a batch (`ReplayBuffer.sample`)."""
    sequences = make_sequences(agent, batch, args)
    _, actions, rewards, _, terminations, _ = (x[args.burn_in :].flatten(0, 1) for x in batch)
    noise = noise[args.burn_in :].flatten(0, 1)  # (n, action_dim), n = (sequence_length - burn_in) * batch_size
    td_target = compute_td_target(agent, rewards, sequences, terminations, noise, args)
    _, qf_sequence = sequences
    qf_features, _ = agent.qf_memory(*qf_sequence)
    loss, metrics = compute_qf_loss(agent, qf_features, actions, td_target)  # features are the critics' observations
    gradient = compute_gradient(loss, agent.groups()["q"])
    metrics["losses/qf_grad_norm"] = gradient.norm()
    return gradient, {name: value.detach() for name, value in metrics.items()}


def compute_actor_gradient(
    agent: Agent, batch: Batch, noise: Tensor, args: Args
) -> tuple[Tensor, Tensor | None, Metrics]:
    """The gradients of the actor with its memory and, with --autotune, of alpha."""
    sequence, qf_sequence = make_sequences(agent, batch, args)
    features, _ = agent.actor_memory(*sequence)
    with torch.no_grad():
        qf_features, _ = agent.qf_memory(*qf_sequence)
    noise = noise[args.burn_in :].flatten(0, 1)
    actor_loss, log_prob, metrics = compute_actor_loss(agent, features, qf_features, noise)
    gradient = compute_gradient(actor_loss, agent.groups()["policy"])
    metrics["losses/actor_grad_norm"] = gradient.norm()
    alpha_gradient = None
    if args.autotune:
        target_entropy = -args.target_entropy_scale * noise.shape[1]  # noise is (n, action_dim)
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
    gradient, metrics = compute_qf_gradient(agent, batch, torch.randn_like(actions), args)
    optimizers["q"].step(gradient)

    if num_updates % args.policy_frequency == 0:
        for _ in range(args.policy_frequency):  # so that the actor takes as many steps as the critics
            noise = torch.randn_like(actions)
            gradient, alpha_gradient, actor_metrics = compute_actor_gradient(agent, batch, noise, args)
            optimizers["policy"].step(gradient)
            if alpha_gradient is not None:
                optimizers["alpha"].step(alpha_gradient)
            metrics |= actor_metrics

    update_target(agent.qf, agent.qf_target, args.tau)
    update_target(agent.qf_memory, agent.qf_target_memory, args.tau)
    metrics["losses/alpha"] = agent.log_alpha.detach().exp()
    return metrics


# === Evaluation =======================================================================================================

MAX_EPISODE_STEPS = 10_000  # steps after which an evaluation cuts an episode off


def evaluate(agent: Agent, args: Args, folder: Path, name: str) -> dict[str, float]:
    """Plays --eval-episodes episodes with the deterministic policy and frozen statistics.

    Each episode has its own environment and seed, and the training's random streams are restored. Returns mean
    and standard deviation of the undiscounted returns, and the mean length in steps. Videos go to folder/videos.
    """
    args = args if args.vectorization == "native" else replace(args, vectorization="sync")
    seed = (1_000_000 + args.seed * args.eval_episodes) % 2**31
    streams = random.getstate(), np.random.get_state(), torch.get_rng_state()  # tasks may draw from them
    random.seed(seed), np.random.seed(seed), torch.default_generator.manual_seed(seed)
    envs = make_envs(args, args.eval_episodes, folder / "videos" / name if args.capture_video else None)
    obs, _ = envs.reset(seed=seed)
    returns, lengths = np.zeros((2, args.eval_episodes))
    running, memory = np.ones(args.eval_episodes, dtype=bool), agent.forget(args.eval_episodes)
    for _ in range(MAX_EPISODE_STEPS):
        actions, state = agent.act(obs, memory)
        obs, _, rewards, terminations, truncations = step_envs(envs, actions)
        memory = remember(actions, rewards, state, terminations | truncations)
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
    memory_dim = agent.forget(1).shape[1] if args.stored_state else agent.past_dim
    buffer = ReplayBuffer(args.buffer_size, args.num_envs, obs_dim, action_dim, memory_dim, device)
    counters = {"num_updates": 0}  # a dict, which checkpoints save and load

    rest = {"optimizer": optimizers, "counters": counters}  # of a checkpoint, besides model and buffer
    with Run(args, envs, total_steps, stride, model={"agent": agent}, rest=rest, buffers={"replay": buffer}) as run:
        # `run.steps()` yields the number of steps taken so far, and a seed where episodes begin anew. Between two
        # iterations it writes the checkpoints, and after the last one model.pt.
        for global_step, seed in run.steps():
            if seed is not None:  # at the start and after each checkpoint
                obs, _ = envs.reset(seed=seed)
                memory = agent.forget(args.num_envs)
                update_metrics: Metrics = {}
            if args.anneal_lr:
                for name in ("policy", "q"):
                    optimizers[name].lr = learning_rates[name] * (1.0 - global_step / total_steps)

            # act and step
            if args.norm_obs:
                agent.obs_rms.update(torch.as_tensor(obs, device=device))
            # before --learning-starts, too: it moves the memories on
            actions, state = agent.act(obs, memory, torch.randn((args.num_envs, action_dim), device=device))
            if global_step < args.learning_starts:
                actions = 2.0 * torch.rand((args.num_envs, action_dim)).numpy() - 1.0
            prev_obs = obs
            obs, final_obs, rewards, terminations, truncations = step_envs(envs, actions)
            run.check(observation=np.concatenate([prev_obs, final_obs], axis=-1)[None], reward=rewards[None])
            global_step += stride  # now the number of steps after this iteration

            # store
            buffer.add(prev_obs, actions, rewards, final_obs, terminations, memory[:, :memory_dim])
            run.record(rewards, terminations | truncations)
            memory = remember(actions, rewards, state, terminations | truncations)

            # update
            while counters["num_updates"] < int(args.updates_per_step * (global_step - args.learning_starts)):
                batch = buffer.sample(args.batch_size, args.sequence_length)
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
