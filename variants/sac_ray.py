"""SAC on a Ray cluster: environments on many cores or machines, and one learner.

Losses and update are those of `sac_continuous.py`. How it differs: it has five parts, each in its own processes.
`docs/ray.md` explains the parts, `docs/sac.md` the rest. Equation numbers are of Haarnoja et al. 2018b.
- Rollout workers step environments. A worker pulls the newest weights when a rollout begins, and sends its transitions
  in one message when it ends. All workers share one estimate of the observation statistics.
- The replay buffer is in shards. Minibatches are sampled ahead of the learner.
- The parameter server has the newest weights. Their version is the number of updates.
- The learner, this process, takes a rollout, makes the updates that `--updates-per-step` allows for these steps, and
  takes the next. A worker begins a rollout when its last one was taken, so it is at most one rollout ahead.
- The tester evaluates beside the training.
- Runs are not reproducible: which weights a rollout has depends on timing. `--resume` goes on with weights, optimisers,
  statistics, buffer and counters, but not bit for bit. A checkpoint resets no environment.

    python variants/sac_ray.py --env-id HalfCheetah-v5 --num-workers 2
"""

import copy
import itertools
import json
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from utils import cluster  # noqa: E402
from utils.cluster import Connection, Shards, Totals, finished, get, is_restarted, put, start, wait  # noqa: E402
from utils.run import Run, compiled, describe, fail, load_model, parse_args, prepare, vectorize  # noqa: E402

# === Arguments ========================================================================================================


@dataclass
class Args:
    """SAC on a Ray cluster: trains on any Gymnasium task with continuous actions."""

    # --- experiment ---
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seed of the networks, the environments and the policy's noise, but not of the buffer shards
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
    checkpoint_freq: int = 20_000  # environment steps between checkpoints; 0: only first and last
    resume: Path | None = None  # continue the run of this folder from its last checkpoint, with its arguments

    # --- environment ---
    env_id: str = "HalfCheetah-v5"  # Gymnasium id; module:id imports the module first
    env_kwargs: str = "{}"  # arguments of the task in JSON, such as {"ctrl_cost_weight": 0.2}
    num_envs: int = 1  # parallel environments of each rollout worker
    vectorization: Literal["sync", "async", "native"] = "sync"  # sync: in turn; async: processes; native: task's own

    # --- cluster ---
    address: str | None = None  # address of this machine's Ray cluster, or auto; default: this machine alone
    num_workers: int = 2  # rollout workers, each with --num-envs environments
    rollout_steps: int = 20  # steps of each environment in a rollout: one pull of weights and one message
    worker_cpus: float = 0.0  # cores that Ray reserves for each rollout worker; 0: none
    num_buffer_shards: int = 1  # processes that share the replay buffer

    # --- algorithm ---
    total_timesteps: int = 1_000_000  # environment steps of the run, over all environments
    buffer_size: int = 1_000_000  # transitions in the replay buffer; the oldest are overwritten
    batch_size: int = 256  # transitions in a minibatch
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
    "num_workers rollout_steps num_buffer_shards": (1, 100_000),
    "worker_cpus": (0, 1000),
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
    least = args.num_buffer_shards * args.rollout_steps * args.num_envs  # a rollout in each shard
    if args.buffer_size < least:
        fail(f"--buffer-size takes at least {least}, a rollout for each shard, not {args.buffer_size}")


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
        self.merge(x.double().mean(0), x.double().var(0, correction=0), len(x))

    def merge(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Adds a batch of `count` numbers, of which mean and variance (*shape) are known."""
        delta, total = mean - self.mean, self.count + count
        squares = self.var * self.count + var * count + delta**2 * self.count * count / total
        self.mean.add_(delta * count / total)
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
    """What model.pt holds: policy, critics, target networks, alpha and observation statistics."""

    def __init__(self, envs: VectorEnv, args: Args) -> None:
        super().__init__()
        obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
        self.norm_obs = args.norm_obs
        self.obs_rms = RunningMeanStd((obs_dim,))
        self.actor = NormalActor(obs_dim, action_dim)
        self.qf = TwinQNetwork(obs_dim + action_dim, 1)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha)))
        self.qf_target = copy.deepcopy(self.qf).requires_grad_(False)

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """The parameters that each optimiser steps."""
        return {"policy": [*self.actor.parameters()], "q": [*self.qf.parameters()], "alpha": [self.log_alpha]}

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations (..., obs_dim) to what the networks take."""
        return self.obs_rms.normalize(obs) if self.norm_obs else obs

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
        self.widths = [obs_dim, action_dim, 1, obs_dim, 1]
        self.data = torch.empty((capacity, sum(self.widths)), device=device)
        self.total = 0  # transitions stored so far: transition i is in row i % capacity
        self.columns = {"rows": self.data}  # what checkpoints hold, by name

    def add(self, *columns: np.ndarray) -> None:
        """Stores n transitions: obs, actions, rewards, final_obs and terminations (n, ...)."""
        flat = [column.reshape(len(column), -1) for column in columns]
        rows = torch.as_tensor(np.concatenate(flat, axis=1, dtype=np.float32), device=self.data.device)
        indices = torch.arange(self.total, self.total + len(rows), device=rows.device) % len(self.data)
        self.data[indices] = rows
        self.total += len(rows)

    def sample(self, batch_size: int) -> tuple[Tensor, ...]:
        """Uniformly with replacement: obs, actions, rewards (batch_size,), next_obs, terminations (batch_size,)."""
        return self.gather(torch.randint(min(self.total, len(self.data)), (batch_size,), device=self.data.device))

    def gather(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The transitions in these rows (batch_size,), split as `sample` has them."""
        obs, actions, rewards, next_obs, terminations = self.data.index_select(0, indices).split(self.widths, dim=1)
        return obs, actions, rewards.squeeze(1), next_obs, terminations.squeeze(1)


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
def compute_td_target(
    agent: Agent, rewards: Tensor, next_obs: Tensor, terminations: Tensor, noise: Tensor, args: Args
) -> Tensor:
    """The critics' regression target (batch_size,): reward plus discounted soft value of the next state (eq. 2, 3)."""
    mean, log_std = agent.actor(next_obs)
    next_actions, next_log_prob = sample_actions(mean, log_std, noise)
    next_values = agent.qf_target(next_obs, next_actions).amin(0) - agent.log_alpha.exp() * next_log_prob
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


def compute_qf_gradient(agent: Agent, batch: Batch, noise: Tensor, args: Args) -> tuple[Tensor, Metrics]:
    """The critics' gradient on a batch (`ReplayBuffer.sample`)."""
    obs, actions, rewards, next_obs, terminations = batch
    obs, next_obs = agent.normalize(obs), agent.normalize(next_obs)
    td_target = compute_td_target(agent, rewards, next_obs, terminations, noise, args)
    loss, metrics = compute_qf_loss(agent, obs, actions, td_target)
    gradient = compute_gradient(loss, agent.groups()["q"])
    metrics["losses/qf_grad_norm"] = gradient.norm()
    return gradient, {name: value.detach() for name, value in metrics.items()}


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


GradientFns = tuple[Callable[..., tuple[Tensor, Metrics]], Callable[..., tuple[Tensor, Tensor | None, Metrics]]]
PLAIN: GradientFns = (compute_qf_gradient, compute_actor_gradient)  # `main` compiles them, unless --no-compile


def update(
    agent: Agent, optimizers: dict[str, Adam], batch: Batch, args: Args, num_updates: int, fns: GradientFns = PLAIN
) -> Metrics:
    """One round of Algorithm 1: critics, actor, alpha, targets; `num_updates` is the number of earlier rounds."""
    qf_gradient_fn, actor_gradient_fn = fns
    actions = batch[1]
    gradient, metrics = qf_gradient_fn(agent, batch, torch.randn_like(actions), args)
    optimizers["q"].step(gradient)

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


# === Rollout worker ===================================================================================================


def load_weights(agent: Agent, weights: Mapping[str, Any]) -> None:
    """Gives the agent the learner's policy and observation statistics (`Exchange.publish`)."""
    nn.utils.vector_to_parameters(torch.tensor(weights["actor"]), agent.groups()["policy"])
    agent.obs_rms.load_state_dict({name: torch.tensor(x) for name, x in weights["obs_rms"].items()})


class RolloutWorker:
    """Steps --num-envs environments in a process of its own. Their episodes go on in the next rollout."""

    def __init__(self, args: Args, index: int) -> None:
        self.args, self.index, self.envs = args, index, make_envs(args, args.num_envs)
        self.agent = Agent(self.envs, args)
        self.weights: dict[str, Any] = {"version": -1}
        self.obs: np.ndarray | None = None
        self.running = np.zeros((2, args.num_envs))  # return and length of each environment's episode

    def rollout(self, global_step: int, server: Any, shard: Any) -> dict[str, Any]:
        """Steps with the newest weights and stores the steps; `global_step`: steps of all rollouts begun earlier."""
        args, action_dim = self.args, flatdim(self.envs.single_action_space)
        for reference in get(server.pull.remote(self.weights["version"])):
            self.weights = get(reference)
            load_weights(self.agent, self.weights)
        is_new = self.obs is None
        if self.obs is None:  # a seed for each worker; that of (seed, global_step, 0) is the learner's
            seed = int(np.random.SeedSequence((args.seed, global_step, self.index + 1)).generate_state(1)[0]) // 2
            torch.manual_seed(seed)
            self.obs, _ = self.envs.reset(seed=seed)

        # act and step
        began, steps, episodes = time.perf_counter(), list[list[np.ndarray]](), list[np.ndarray]()
        for _ in range(args.rollout_steps):
            if global_step < args.learning_starts:
                actions = 2.0 * torch.rand((args.num_envs, action_dim)).numpy() - 1.0
            else:
                actions = self.agent.act(self.obs, torch.randn((args.num_envs, action_dim)))
            prev_obs = self.obs
            self.obs, final_obs, rewards, terminations, truncations = step_envs(self.envs, actions)
            step = prev_obs, actions, rewards, final_obs, terminations
            steps.append([np.array(x, dtype=np.float32) for x in step])  # copies: a task may use its arrays again
            self.running += np.stack([rewards, np.ones(args.num_envs)])
            dones = terminations | truncations
            episodes += list(self.running[:, dones].T)
            self.running[:, dones] = 0.0
        seconds = time.perf_counter() - began

        # store
        columns = [np.concatenate(x) for x in zip(*steps, strict=True)]
        means = [x.mean(axis=0, dtype=np.float64) for x in columns]
        is_finite = all(np.isfinite(x).all() for x in means)  # if not, the learner ends the run; its buffer stays sound
        size = get(shard.add.remote(*columns)) if is_finite else 0
        facts = {"version": self.weights["version"], "time": self.weights["time"], "episodes": episodes, "size": size}
        facts |= {"means": means, "obs_var": columns[0].var(axis=0, dtype=np.float64), "seconds": seconds}
        return facts | {"is_restarted": is_new and is_restarted()}


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


# === Tester ===========================================================================================================


class Tester:
    """Evaluates in a process of its own, beside the training."""

    def __init__(self, args: Args) -> None:
        self.args, self.agent = args, Agent(make_envs(args, 1), args)

    def evaluate(self, weights: Mapping[str, Any], folder: Path, name: str) -> tuple[dict[str, float], float]:
        """The results of `evaluate` with these weights, and the seconds that it took."""
        began = time.perf_counter()
        load_weights(self.agent, weights)
        return evaluate(self.agent, self.args, folder, name), time.perf_counter() - began


# === Learner ==========================================================================================================

AT_ONCE, AHEAD = 8, 2  # minibatches in a message of a shard; messages under way while the learner uses another one


class Exchange:
    """What the learner exchanges with the other four parts."""

    def __init__(self, args: Args, run: Run, agent: Agent, actor: Tensor, shards: Shards, counters: dict) -> None:
        """Starts all parts and the first rollouts. `actor` are the policy's parameters, as its optimiser has them."""
        self.args, self.run, self.agent, self.actor, self.counters = args, run, agent, actor, counters
        self.rollouts = dict[Any, tuple[int, int]]()  # calls under way, oldest first, with worker and shard
        self.messages = deque[Any]()  # calls under way
        self.lags, self.totals = list[tuple[float, float]](), Totals()
        self.shards = shards.start(run.folder.resolve() / "checkpoint.replay")
        self.sizes = [min(state["total"], args.buffer_size // len(self.shards)) for state in shards.states]
        self.server, self.version = start(cluster.ParameterServer, near=True, is_replaced=False), -1
        self.publish()
        get(self.server.pull.remote(-1))  # the weights are there before a worker asks for them
        self.workers = [start(RolloutWorker, args, i, cpus=args.worker_cpus) for i in range(args.num_workers)]
        tester = start(Tester, args, near=args.capture_video)  # videos belong into the run folder
        self.evaluations = cluster.Evaluations(tester, run, self.totals)
        self.started = run.global_step  # steps of the rollouts that have been begun
        for index in range(args.num_workers):
            self.begin_rollout(index)
        self.metrics()  # of the time before the first rollout

    def publish(self) -> None:
        """Gives the parameter server what workers and tester take from the agent, if there was an update."""
        if self.counters["num_updates"] > self.version:
            self.version = self.counters["num_updates"]
            obs_rms = {name: x.numpy(force=True) for name, x in self.agent.obs_rms.state_dict().items()}
            weights = {"version": self.version, "time": time.time(), "actor": self.actor.numpy(force=True)}
            self.weights = put(weights | {"obs_rms": obs_rms})
            self.server.push.remote(self.version, [self.weights])

    def begin_rollout(self, index: int) -> None:
        """Lets a worker begin a rollout. The shards take turns."""
        shard = self.started // self.run.stride % len(self.shards)
        reference = self.workers[index].rollout.remote(self.started, self.server, self.shards[shard])
        self.rollouts[reference] = index, shard
        self.started += self.run.stride

    def next_rollout(self) -> dict[str, Any]:
        """Waits for a stored rollout and returns its facts (`RolloutWorker.rollout`). The worker begins the next."""
        with self.totals.timing("waiting"):
            reference = wait(self.rollouts)
        rollout, (index, shard) = get(reference), self.rollouts.pop(reference)
        self.begin_rollout(index)
        if rollout["is_restarted"]:
            print(f"rollout worker {index} has died, and a new process is in its place", flush=True)
        self.totals.add(restarts=rollout["is_restarted"], workers=rollout["seconds"])
        self.sizes[shard] = rollout["size"]
        self.lags.append((self.counters["num_updates"] - rollout["version"], time.time() - rollout["time"]))
        return rollout

    def minibatches(self, device: torch.device) -> Iterator[Batch]:
        """Yields minibatches without end. Each is from one shard, drawn with a probability proportional to its size."""
        while True:
            while len(self.messages) <= AHEAD:
                (shard,) = random.choices(self.shards, self.sizes)
                self.messages.append(shard.sample.remote(AT_ONCE * self.args.batch_size))
            with self.totals.timing("waiting"):
                columns = [torch.tensor(x, device=device) for x in get(self.messages.popleft())]
            yield from zip(*(x.split(self.args.batch_size) for x in columns), strict=True)

    def metrics(self) -> dict[str, float]:
        """Rates, lags, queues and the busy share of each part since the last call."""
        parts = self.totals.parts(self.server, self.shards, self.args.num_workers, self.counters["num_updates"])
        lags, self.lags = np.array(self.lags or [(0.0, 0.0)]), []
        return parts | {
            "ray/policy_lag_updates": lags[:, 0].mean(),
            "ray/policy_lag_updates_max": lags[:, 0].max(),
            "ray/policy_lag_seconds": lags[:, 1].mean(),
            "ray/buffer_fill": sum(self.sizes) / self.args.buffer_size,
            "ray/rollouts_waiting": len(finished(self.rollouts)),
            "ray/messages_waiting": len(finished(self.messages)),
            "ray/restarts": self.totals.totals["restarts"],
        }


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
    envs = make_envs(args, 1)  # only for its spaces
    obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
    stride = args.num_envs * args.rollout_steps
    total_steps = -(-args.total_timesteps // stride) * stride  # rounded up to whole iterations
    agent = Agent(envs, args).to(device)
    envs.close()
    learning_rates = {"policy": args.policy_lr, "q": args.q_lr, "alpha": args.alpha_lr}
    optimizers = {name: Adam(group, learning_rates[name], 0.9, 0.999, 1e-8) for name, group in agent.groups().items()}
    capacity = args.buffer_size // args.num_buffer_shards
    shards = Shards(args.num_buffer_shards, partial(ReplayBuffer, capacity, obs_dim, action_dim), args.resume)
    connection = Connection(args.address, __name__, args.num_workers, args.worker_cpus)
    counters = {"num_updates": 0, "evaluated_at": 0}  # a dict, which checkpoints save and load

    rest = {"optimizer": optimizers, "counters": counters, "replay": shards}  # of a checkpoint, beside the model
    with Run(args, connection, total_steps, stride, model={"agent": agent}, rest=rest) as run:
        exchange = Exchange(args, run, agent, optimizers["policy"].vector, shards, counters)
        gradient_fns = PLAIN
        if args.compile and args.learning_starts < total_steps:
            shapes = (obs_dim,), (action_dim,), (), (obs_dim,), ()
            batch = tuple(torch.zeros((args.batch_size, *shape), device=device) for shape in shapes)
            example = agent, batch, torch.zeros_like(batch[1]), args
            gradient_fns = compiled(compute_qf_gradient, *example), compiled(compute_actor_gradient, *example)
        minibatches, update_metrics = exchange.minibatches(device), Metrics()
        if 0 < run.global_step == counters["evaluated_at"] < total_steps:  # resumed: its result is missing
            exchange.evaluations.begin(exchange.weights, run.global_step)
        # Yields the steps taken so far. It writes the checkpoints between two iterations, and model.pt after the last.
        for global_step, _ in run.steps():
            if args.anneal_lr:
                for name in ("policy", "q"):
                    optimizers[name].lr = learning_rates[name] * (1.0 - global_step / total_steps)

            # take a rollout: a worker has acted, stepped and stored
            rollout = exchange.next_rollout()
            obs_mean, action_mean, reward_mean, final_obs_mean, _ = rollout["means"]
            run.check(observation=np.concatenate([obs_mean, final_obs_mean])[None], reward=reward_mean)
            run.check(action=action_mean[None])
            run.finished += rollout["episodes"]
            if args.norm_obs:
                mean, var = (torch.tensor(x, device=device) for x in (obs_mean, rollout["obs_var"]))
                agent.obs_rms.merge(mean, var, stride)
            global_step += stride  # now the number of steps after this iteration

            # update
            while counters["num_updates"] < int(args.updates_per_step * (global_step - args.learning_starts)):
                batch = next(minibatches)
                update_metrics |= update(agent, optimizers, batch, args, counters["num_updates"], gradient_fns)
                counters["num_updates"] += 1
            exchange.publish()

            # log and evaluate
            if run.due(args.log_freq, args.checkpoint_freq):
                metrics = {name: value.item() for name, value in update_metrics.items()}
                run.check(**metrics)
                metrics |= {f"charts/{name}_lr": optimizer.lr for name, optimizer in optimizers.items()}
                run.log(metrics | exchange.metrics(), global_step)
                exchange.evaluations.log(may_wait=1)
            if run.due(args.eval_freq) and global_step < total_steps:
                exchange.evaluations.begin(exchange.weights, global_step)
                counters["evaluated_at"] = global_step
        exchange.evaluations.log(may_wait=0)
        run.log(evaluate(agent, args, run.folder, "final"), total_steps)
    return run.folder


if __name__ == "__main__":
    main(parse_args(Args))
