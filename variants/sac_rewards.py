"""SAC with intrinsic rewards: several reward streams, each with its own critic head, discount and strength.

The streams are those of ML-Agents. How it differs from `sac_continuous.py`:
- `--streams` names them. `curiosity` (Pathak et al. 2017, https://arxiv.org/abs/1705.05363) and `rnd` (random network
  distillation, Burda et al. 2019, https://arxiv.org/abs/1810.12894) reward what is new. `gail` (Ho and Ermon 2016,
  https://arxiv.org/abs/1606.03476) rewards what looks like the demonstrations. `extrinsic` is the task's own reward.
- The critics have a head for each stream (`TwinQNetwork`), with its own target (`compute_td_target`). The actor
  maximises the sum of the heads. The entropy bonus is in the extrinsic head alone, which is always there.
- A termination ends the extrinsic return. Those of `curiosity` and `rnd` go on in the next episode. In `gail` an
  absorbing state follows, whose reward is learned (Kostrikov et al. 2019, https://arxiv.org/abs/1809.02925).
- Intrinsic rewards are computed anew when sampled, and divided by their running mean (`compute_rewards`).
- Observations are normalised for `curiosity` and `rnd` by statistics of the steps before the first update, and for
  `gail` by those of the demonstrations. The statistics stay fixed, so RND's random target does too.

    python variants/sac_rewards.py --env-id MountainCarContinuous-v0 --streams extrinsic,rnd --learning-starts 1000
    python variants/sac_rewards.py --record-demonstrations runs/FOLDER
    python variants/sac_rewards.py --env-id TASK --streams gail --demonstrations runs/FOLDER/demonstrations.npz

`docs/variants.md` explains these changes, `docs/sac.md` the rest. Equation numbers are of Haarnoja et al. 2018b.
"""

import copy
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from gymnasium.spaces import flatdim
from gymnasium.vector import VectorEnv
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # utils/ is there
from utils.demonstrations import load_demonstrations, record_demonstrations  # noqa: E402
from utils.run import Run, compiled, describe, fail, load_model, parse_args, prepare, vectorize  # noqa: E402
from utils.streams import parse_streams  # noqa: E402

# === Arguments ========================================================================================================


@dataclass
class Args:
    """SAC with intrinsic rewards: trains on any Gymnasium task with continuous actions."""

    # --- experiment ---
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seed of all random numbers
    cuda: bool = True  # use the GPU if there is one
    compile: bool = True  # compile the update: trains faster, but starts later, up to two minutes the first time
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
    record_demonstrations: Path | None = None  # do not train: record demonstrations.npz with the policy of this run

    # --- environment ---
    env_id: str = "HalfCheetah-v5"  # Gymnasium id; module:id imports the module first
    env_kwargs: str = "{}"  # arguments of the task in JSON, such as {"ctrl_cost_weight": 0.2}
    num_envs: int = 1  # parallel environments
    vectorization: Literal["sync", "async", "native"] = "sync"  # sync: in turn; async: processes; native: task's own

    # --- algorithm ---
    total_timesteps: int = 1_000_000  # environment steps of the run, over all environments
    buffer_size: int = 1_000_000  # transitions in the replay buffer; the oldest are overwritten
    batch_size: int = 256  # transitions in a minibatch
    learning_starts: int = 5_000  # environment steps with uniformly random actions before the first update
    updates_per_step: float = 1.0  # updates per environment step: 0.25 is one in four steps, 4 is four in each
    streams: str = "extrinsic,rnd"  # of extrinsic, curiosity, rnd, gail; each takes :STRENGTH or :STRENGTH:GAMMA
    demonstrations: str = ""  # file that gail imitates, written by --record-demonstrations
    gamma: float = 0.99  # discount factor of the streams without a GAMMA of their own
    tau: float = 0.005  # step size of the target networks towards the critics
    policy_frequency: int = 1  # at every Nth critic update the actor is updated N times
    policy_lr: float = 1e-3  # learning rate of the actor
    q_lr: float = 1e-3  # learning rate of the critics and of the streams' networks
    alpha_lr: float = 1e-3  # learning rate of the entropy coefficient
    anneal_lr: bool = False  # the learning rates of actor, critics and streams fall linearly to zero over the run
    alpha: float = 1.0  # entropy coefficient: its initial value, or with --no-autotune its fixed value
    autotune: bool = True  # learn the entropy coefficient
    target_entropy_scale: float = 1.0  # the target entropy is minus this times the number of action dimensions
    norm_obs: bool = False  # normalise observations by their running mean and standard deviation, clipped to [-10, 10]
    log_freq: int = 1_000  # environment steps between points of the training curves


LIMITS = {
    "gamma tau": (0, 1),
    "eval_episodes num_envs": (1, 100_000),
    "batch_size": (1, 10_000_000),
    "total_timesteps buffer_size policy_frequency log_freq": (1, 1e12),
    "eval_freq checkpoint_freq learning_starts updates_per_step": (0, 1e12),
    "policy_lr q_lr alpha_lr target_entropy_scale": (0, 1e12),
    "alpha": (1e-9, 1e9),
    "seed": (0, 2**31),
}


def check_args(args: Args) -> None:
    """Checks what limits cannot express; exits with one sentence."""
    streams = parse_streams(args, INTRINSIC)
    if len(streams) == 1:
        fail("--streams takes at least one stream besides extrinsic: for extrinsic alone use sac_continuous.py")
    if ("gail" in streams) != bool(args.demonstrations):
        fail("--demonstrations takes the file that gail imitates: give it if --streams has gail, and only then")
    if args.learning_starts < args.batch_size:
        fail(f"--learning-starts takes at least --batch-size, {args.batch_size}, not {args.learning_starts}")
    if args.buffer_size < args.num_envs:
        fail(f"--buffer-size takes at least --num-envs, {args.num_envs}, not {args.buffer_size}")


# === Environments =====================================================================================================


def make_env(args: Args, **render: str) -> gym.Env:
    """One environment with flat observations; `render` are the arguments for videos."""
    env = gym.make(args.env_id, **json.loads(args.env_kwargs) | render)
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return env


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


HIDDEN_SIZES = (256, 256)  # units of the hidden layers of actor and critics


def mlp(*sizes: int) -> nn.Sequential:
    """ReLU network with PyTorch's default initialisation."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


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
    """Both critics, each with a head for every stream. Each parameter has one row for each critic."""

    def __init__(self, input_dim: int, output_dim: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise((input_dim, *HIDDEN_SIZES)):
            layers += [TwinLinear(fan_in, fan_out), nn.ReLU()]
        self.net = nn.Sequential(*layers, TwinLinear(fan_out, output_dim))
        assert all(len(x) == 2 for x in self.parameters()), "no row for each critic: see TwinLayerNorm in docs/sac.md"

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Observations (batch_size, obs_dim) and actions (batch_size, action_dim) to (2, batch_size, num_streams)."""
        return self.net(torch.cat([obs, actions], dim=-1).expand(2, -1, -1))


Signal = tuple[Tensor, Tensor, Tensor]  # rewards (batch_size,), reward of a step in the absorbing state, loss


class Curiosity(nn.Module):
    """The reward is the error of a forward model, in features that predict the action (Pathak et al. 2017)."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.obs_rms = RunningMeanStd((obs_dim,))
        self.encoder = mlp(obs_dim, 128, 128, 64)
        self.forward_model, self.inverse_model = mlp(64 + action_dim, 128, 64), mlp(2 * 64, 128, action_dim)

    def forward(self, batch: tuple[Tensor, ...]) -> Signal:
        """The reward is the forward model's error (Pathak et al., eq. 6); the loss is their eq. 7 with beta 0.2."""
        obs, actions, _, final_obs, *_ = batch
        features, next_features = (self.encoder(self.obs_rms.normalize(x)) for x in (obs, final_obs))
        predicted = self.forward_model(torch.cat([features, actions], dim=-1))
        forward_errors = 0.5 * (predicted - next_features).square().sum(-1)
        inferred = self.inverse_model(torch.cat([features, next_features], dim=-1))
        inverse_errors = (inferred - actions).square().sum(-1)
        return forward_errors, obs.new_zeros(()), (0.2 * forward_errors + 0.8 * inverse_errors).mean()


class RND(nn.Module):
    """The reward is the error of a network that learns the outputs of a fixed random one (Burda et al. 2019)."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.obs_rms = RunningMeanStd((obs_dim,))
        self.target = mlp(obs_dim, 128, 128, 64).requires_grad_(False)
        self.predictor = mlp(obs_dim, 128, 128, 64)

    def forward(self, batch: tuple[Tensor, ...]) -> Signal:
        """The reward is the squared error at the observation after the step; the loss is its mean."""
        final_obs = self.obs_rms.normalize(batch[3])
        errors = (self.predictor(final_obs) - self.target(final_obs)).square().mean(-1)
        return errors, final_obs.new_zeros(()), errors.mean()


class GAIL(nn.Module):
    """Rewards what a discriminator D takes for a demonstration (Ho and Ermon 2016)."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.obs_rms = RunningMeanStd((obs_dim,))
        self.discriminator = mlp(obs_dim + action_dim + 1, 128, 128, 1)  # the last input: 10 in the absorbing state

    def forward(self, batch: tuple[Tensor, ...]) -> Signal:
        """The reward is -log(1 - D); the loss is the cross-entropy and a gradient penalty (Gulrajani et al. 2017).

        Each termination, also in demonstrations, adds a step in the absorbing state (Kostrikov et al. 2019).
        """
        obs, actions, _, _, terminations, _ = batch[:6]
        expert_obs, expert_actions, _, _, expert_terminations, _ = batch[6:]
        policy = F.pad(torch.cat([self.obs_rms.normalize(obs), actions], dim=1), (0, 1))
        expert = F.pad(torch.cat([self.obs_rms.normalize(expert_obs), expert_actions], dim=1), (0, 1))
        # 10, not 1: the penalty keeps slopes near 1, so with 1 its logit would be close to the demonstrations'.
        absorbing, n = F.pad(torch.zeros_like(policy[:1, 1:]), (0, 1), value=10.0), len(policy)
        mix = torch.linspace(0.0, 1.0, n, device=policy.device)[:, None]  # in order: the pairs are random already
        mixed = torch.lerp(policy, expert, mix).requires_grad_()
        logits = self.discriminator(torch.cat([policy, expert, absorbing, mixed])).squeeze(1)
        policy_logits, expert_logits, end_logit, mixed_logits = logits.split([n, n, 1, n])
        policy_losses = F.softplus(policy_logits) + terminations * F.softplus(end_logit)  # -log(1 - D)
        expert_losses = F.softplus(-expert_logits) + expert_terminations * F.softplus(-end_logit)  # -log D
        (slopes,) = torch.autograd.grad(mixed_logits.sum(), mixed, create_graph=True)
        penalties = 10.0 * (slopes.norm(dim=1) - 1.0).square()
        loss = (policy_losses + expert_losses + penalties).mean()
        return F.softplus(policy_logits), F.softplus(end_logit).squeeze(0), loss


INTRINSIC: dict[str, type[nn.Module]] = {"curiosity": Curiosity, "rnd": RND, "gail": GAIL}


class Agent(nn.Module):
    """What model.pt holds: policy, critics, target networks, entropy coefficient, streams and statistics."""

    def __init__(self, envs: VectorEnv, args: Args) -> None:
        super().__init__()
        obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
        self.norm_obs = args.norm_obs
        self.obs_rms = RunningMeanStd((obs_dim,))
        self.actor = NormalActor(obs_dim, action_dim)
        settings = parse_streams(args, INTRINSIC)
        self.qf = TwinQNetwork(obs_dim + action_dim, len(settings))
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha)))
        self.qf_target = copy.deepcopy(self.qf).requires_grad_(False)
        self.streams = nn.ModuleDict({x: INTRINSIC[x](obs_dim, action_dim) for x in settings if x != "extrinsic"})
        self.reward_scale = nn.Buffer(torch.ones(len(self.streams)))
        strengths, gammas = zip(*settings.values(), strict=True)
        self.strengths = nn.Buffer(torch.tensor(strengths), persistent=False)  # these three: (num_streams,)
        self.gammas = nn.Buffer(torch.tensor(gammas), persistent=False)
        self.ends = nn.Buffer(torch.tensor([x in ("extrinsic", "gail") for x in settings]), persistent=False)

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """The parameters that each optimiser steps."""
        critics = [*self.qf.parameters(), *(x for x in self.streams.parameters() if x.requires_grad)]
        return {"policy": [*self.actor.parameters()], "q": critics, "alpha": [self.log_alpha]}

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations (..., obs_dim) to what the networks take."""
        return self.obs_rms.normalize(obs) if self.norm_obs else obs

    def fix_statistics(self, sources: "list[ReplayBuffer]") -> None:
        """Sets the statistics of the streams' observations: those of `gail` from the last source."""
        for name, stream in self.streams.items():
            source, obs_rms = sources[-1 if name == "gail" else 0], cast(RunningMeanStd, stream.obs_rms)
            obs_rms.update(source.data[: source.total, : source.widths[0]])

    @torch.no_grad()
    def act(self, obs: np.ndarray, noise: Tensor | float = 0.0) -> np.ndarray:
        """Raw observations (n, obs_dim) to actions (n, action_dim); deterministic without noise."""
        device = self.obs_rms.mean.device
        mean, log_std = self.actor(self.normalize(torch.as_tensor(obs, dtype=torch.float32, device=device)))
        return (mean + log_std.exp() * noise).tanh().cpu().numpy()


# === Replay buffer ====================================================================================================


class ReplayBuffer:
    """The last `capacity` transitions. Each is one row of `data`, so a minibatch is a single `index_select`."""

    def __init__(self, capacity: int, obs_dim: int, action_dim: int, device: torch.device) -> None:
        self.widths = [obs_dim, action_dim, 1, obs_dim, 1, obs_dim]
        self.data = torch.empty((capacity, sum(self.widths)), device=device)
        self.total = 0  # transitions stored so far: transition i is in row i % capacity
        self.columns = {"rows": self.data}  # what checkpoints hold, by name

    def add(self, *columns: np.ndarray) -> None:
        """Stores n transitions: obs, actions, rewards, final_obs, terminations and next_obs (n, ...)."""
        flat = [column.reshape(len(column), -1) for column in columns]
        rows = torch.as_tensor(np.concatenate(flat, axis=1, dtype=np.float32), device=self.data.device)
        indices = torch.arange(self.total, self.total + len(rows), device=rows.device) % len(self.data)
        self.data[indices] = rows
        self.total += len(rows)

    def sample(self, batch_size: int) -> tuple[Tensor, ...]:
        """Uniformly with replacement: what `add` stored, with rewards and terminations (batch_size,)."""
        return self.gather(torch.randint(min(self.total, len(self.data)), (batch_size,), device=self.data.device))

    def gather(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The transitions in these rows (batch_size,), split as `sample` has them."""
        columns = self.data.index_select(0, indices).split(self.widths, dim=1)
        obs, actions, rewards, final_obs, terminations, next_obs = columns
        return obs, actions, rewards.squeeze(1), final_obs, terminations.squeeze(1), next_obs


# === Losses and update ================================================================================================

Metrics = dict[str, Tensor]
Batch = tuple[Tensor, ...]  # columns in the order of `ReplayBuffer.sample`


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
def compute_rewards(agent: Agent, rewards: Tensor, intrinsic: Tensor, end_rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards (batch_size, num_streams) and values of the absorbing states (num_streams,) that the critics learn.

    `intrinsic` (batch_size, num_streams - 1) are raw rewards. `end_rewards` (num_streams - 1,) are rewards of a step
    in the absorbing state. Both are divided by the running mean of the stream's rewards, and count as at most
    ten average ones (in gail only `end_rewards`): a rare reward can be hundreds of times the mean.
    """
    scale = agent.reward_scale + 1e-8
    limits = torch.where(agent.ends[1:], torch.inf, 10.0)  # none for gail: early on, few steps match demonstrations
    rewards = torch.cat([rewards[:, None], (intrinsic / scale).minimum(limits)], dim=1) * agent.strengths
    # Gamma may be 1 in the extrinsic stream, whose absorbing state has the value 0.
    end_rewards = F.pad((end_rewards / scale).clamp(max=10.0), (1, 0))
    end_values = end_rewards * agent.strengths / (1.0 - agent.gammas).clamp(min=1e-6)
    return rewards, end_values


@torch.no_grad()
def compute_td_target(
    agent: Agent, rewards: Tensor, end_values: Tensor, next_obs: Tensor, terminations: Tensor, noise: Tensor
) -> Tensor:
    """The critics' regression target (batch_size, num_streams): reward plus discounted value of the next state.

    The extrinsic head has the soft value (eq. 2, 3). After a termination the next value of extrinsic and gail is
    `end_values` (num_streams,). For the others it is that of `next_obs`, the first observation of the next episode.
    """
    mean, log_std = agent.actor(next_obs)
    next_actions, next_log_prob = sample_actions(mean, log_std, noise)
    next_values = agent.qf_target(next_obs, next_actions).amin(0)
    next_values[:, 0] -= agent.log_alpha.exp() * next_log_prob
    is_over = agent.ends & (terminations[:, None] > 0.0)
    return rewards + agent.gammas * torch.where(is_over, end_values, next_values)


def compute_qf_loss(agent: Agent, obs: Tensor, actions: Tensor, td_target: Tensor) -> tuple[Tensor, Metrics]:
    """Mean squared Bellman error, summed over the critics and streams (eq. 5, without its factor 1/2)."""
    qf_values = agent.qf(obs, actions)  # (2, batch_size, num_streams)
    qf_losses = (qf_values - td_target).square().mean(1).sum(-1)
    metrics = {"losses/qf1_loss": qf_losses[0], "losses/qf2_loss": qf_losses[1]}
    means = qf_values.mean(1)
    metrics |= {"losses/qf1_values": means[0].sum(), "losses/qf2_values": means[1].sum()}
    names = ("extrinsic", *agent.streams.keys())  # .keys(): PyTorch 2.11 cannot compile it without
    metrics |= {f"losses/{name}_values": x for name, x in zip(names, means.mean(0), strict=True)}
    return qf_losses.sum(), metrics


def compute_actor_loss(agent: Agent, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Metrics]:
    """The policy's loss (eq. 9), and the log-probabilities (batch_size,) of the actions that it was computed from."""
    mean, log_std = agent.actor(obs)  # obs are what the networks take: see `compute_actor_gradient`
    actions, log_prob = sample_actions(mean, log_std, noise)
    actor_loss = (agent.log_alpha.exp().detach() * log_prob - agent.qf(obs, actions).amin(0).sum(-1)).mean()
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


def compute_qf_gradient(agent: Agent, batch: Batch, noise: Tensor, args: Args) -> tuple[Tensor, Tensor, Metrics]:
    """The gradient of critics and streams on a batch (`ReplayBuffer.sample`), and the raw intrinsic rewards.

    For `gail` as many demonstrations follow in the batch, with the same columns.
    """
    obs, actions, rewards, _, terminations, next_obs = batch[:6]
    signals = [stream(batch) for stream in agent.streams.values()]
    intrinsic, end_rewards, losses = (torch.stack(x, dim=-1) for x in zip(*signals, strict=True))
    rewards, end_values = compute_rewards(agent, rewards, intrinsic, end_rewards)
    obs, next_obs = agent.normalize(obs), agent.normalize(next_obs)
    td_target = compute_td_target(agent, rewards, end_values, next_obs, terminations, noise)
    loss, metrics = compute_qf_loss(agent, obs, actions, td_target)
    gradient = compute_gradient(loss + losses.sum(), agent.groups()["q"])
    metrics["losses/qf_grad_norm"] = gradient.norm()
    for k, name in enumerate(agent.streams.keys()):
        metrics |= {f"losses/{name}_loss": losses[k], f"losses/{name}_rewards": rewards[:, k + 1].mean()}
    return gradient, intrinsic.detach(), {name: value.detach() for name, value in metrics.items()}


def compute_actor_gradient(
    agent: Agent, batch: Batch, noise: Tensor, args: Args
) -> tuple[Tensor, Tensor | None, Metrics]:
    """The gradients of the actor and, with --autotune, of alpha. The critics' parameters get no gradient here."""
    obs = batch[0]
    actor_loss, log_prob, metrics = compute_actor_loss(agent, agent.normalize(obs), noise)
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


GradientFns = tuple[Callable[..., tuple[Tensor, Tensor, Metrics]], Callable[..., tuple[Tensor, Tensor | None, Metrics]]]
PLAIN: GradientFns = (compute_qf_gradient, compute_actor_gradient)  # `main` compiles them, unless --no-compile


def update(
    agent: Agent, optimizers: dict[str, Adam], batch: Batch, args: Args, num_updates: int, fns: GradientFns = PLAIN
) -> Metrics:
    """One round: critics and streams, actor, entropy coefficient, targets; `num_updates` counts the earlier ones."""
    qf_gradient_fn, actor_gradient_fn = fns
    actions = batch[1]
    gradient, intrinsic, metrics = qf_gradient_fn(agent, batch, torch.randn_like(actions), args)
    optimizers["q"].step(gradient)
    agent.reward_scale.lerp_(intrinsic.mean(0), 1.0 if num_updates == 0 else 0.01)

    if num_updates % args.policy_frequency == 0:
        for _ in range(args.policy_frequency):  # so that the actor takes as many steps as the critics
            gradient, alpha_gradient, actor_metrics = actor_gradient_fn(agent, batch, torch.randn_like(actions), args)
            optimizers["policy"].step(gradient)
            if alpha_gradient is not None:
                optimizers["alpha"].step(alpha_gradient)
            metrics |= actor_metrics

    update_target(agent.qf, agent.qf_target, args.tau)
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
    if args.record_demonstrations is not None:
        record_demonstrations(args.record_demonstrations, args.eval_episodes, args.seed)
        return args.record_demonstrations
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
    buffer = ReplayBuffer(args.buffer_size, obs_dim, action_dim, device)
    sources = [buffer]  # of a minibatch
    if args.demonstrations:
        args.demonstrations = str(Path(args.demonstrations).resolve())  # a resumed run may stand in another folder
        demonstrations = load_demonstrations(args.demonstrations, args.env_id, obs_dim, action_dim)
        sources.append(ReplayBuffer(len(demonstrations[0]), obs_dim, action_dim, device))
        sources[1].add(*demonstrations, demonstrations[3])
    counters = {"num_updates": 0}  # a dict, which checkpoints save and load

    rest = {"optimizer": optimizers, "counters": counters}  # of a checkpoint, besides model and buffer
    with Run(args, envs, total_steps, stride, model={"agent": agent}, rest=rest, buffers={"replay": buffer}) as run:
        gradient_fns = PLAIN
        if args.compile and args.learning_starts < total_steps:
            indices = torch.zeros(args.batch_size, dtype=torch.int64, device=device)
            batch = sum((source.gather(indices) for source in sources), ())
            example = agent, batch, torch.zeros_like(batch[1]), args
            gradient_fns = compiled(compute_qf_gradient, *example), compiled(compute_actor_gradient, *example)
        # `run.steps()` yields the number of steps taken so far, and a seed where episodes begin anew. Between two
        # iterations it writes the checkpoints, and after the last one model.pt.
        for global_step, seed in run.steps():
            if seed is not None:  # at the start and after each checkpoint
                obs, _ = envs.reset(seed=seed)
                update_metrics: Metrics = {}
            if args.anneal_lr:
                for name in ("policy", "q"):
                    optimizers[name].lr = learning_rates[name] * (1.0 - global_step / total_steps)

            # act and step
            if args.norm_obs:
                agent.obs_rms.update(torch.as_tensor(obs, device=device))
            if global_step < args.learning_starts:
                actions = 2.0 * torch.rand((args.num_envs, action_dim)).numpy() - 1.0
            else:
                actions = agent.act(obs, torch.randn((args.num_envs, action_dim), device=device))
            prev_obs = obs
            obs, final_obs, rewards, terminations, truncations = step_envs(envs, actions)
            run.check(observation=np.concatenate([prev_obs, final_obs], axis=-1)[None], reward=rewards[None])
            global_step += stride  # now the number of steps after this iteration

            # store
            next_obs = np.where(terminations[:, None], obs, final_obs)  # the observation that targets bootstrap from
            buffer.add(prev_obs, actions, rewards, final_obs, terminations, next_obs)
            run.record(rewards, terminations | truncations)

            # update
            while counters["num_updates"] < int(args.updates_per_step * (global_step - args.learning_starts)):
                if counters["num_updates"] == 0:
                    agent.fix_statistics(sources)
                batch = sum((source.sample(args.batch_size) for source in sources), ())
                update_metrics |= update(agent, optimizers, batch, args, counters["num_updates"], gradient_fns)
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
