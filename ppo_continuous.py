"""Proximal policy optimisation (PPO) for continuous control: any Gymnasium task with a Box action space.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347: the clipped objective (eq. 7) and the joint objective (eq. 9),
with generalised advantage estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16). `docs/ppo.md`
walks through this file, explains every logged metric and has the results.

    python ppo_continuous.py --env-id Hopper-v5
    python ppo_continuous.py --evaluate runs/FOLDER --capture-video
    python ppo_continuous.py --resume runs/FOLDER

The defaults differ from the reference, CleanRL's `ppo_continuous_action.py`. These flags restore its settings:

    --num-envs 1 --num-steps 2048 --target-kl None --std-min None --norm-adv --gae-lambda 0.95

- 16 environments for 128 steps, not one for 2,048.
- The standard deviation of the policy begins at 0.4, not 1, and never falls below 0.2.
- The passes over a rollout stop after one whose mean KL divergence exceeds 0.025.
- Advantages are not normalised.
- Lambda is 0.9, not 0.95.
`docs/ppo.md` gives the reason for each change. Further deviations:
- A truncation cuts the advantage trace and bootstraps from the final observation; the reference treats a time limit as
  a termination.
- All environments share one estimate of the observations' mean and variance, and one of the returns' variance. Both
  are updated after a rollout, which is then normalised again. They are saved with the model, and frozen in evaluation.
- The policy acts in [-1, 1], and actions are rescaled to the bounds of the task.
- Speed: the policy acts in NumPy, Adam steps one vector, and the gradient is compiled.
- At a checkpoint environments are reset and random streams reseeded, so a resumed run equals an uninterrupted one.
"""

import itertools
import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from gymnasium.spaces import flatdim
from gymnasium.vector import VectorEnv
from torch import Tensor

HAS_UTILS = (Path(__file__).parent / "utils" / "run.py").exists()
if TYPE_CHECKING or HAS_UTILS:  # otherwise the stand-in at the end of this file is used
    from utils.run import Run, compiled, describe, fail, load_model, parse_args, prepare, vectorize

# === Arguments ========================================================================================================


@dataclass
class Args:
    """PPO for continuous control: trains on any Gymnasium task with continuous actions."""

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
    eval_freq: int = 50_000  # environment steps between evaluations of the deterministic policy; 0: only at the end
    eval_episodes: int = 10  # episodes of an evaluation
    evaluate: Path | None = None  # do not train: evaluate the model of this run folder
    checkpoint_freq: int = 100_000  # steps between checkpoints, which reset the environments; 0: only first and last
    resume: Path | None = None  # continue the run of this folder from its last checkpoint, with its arguments

    # --- environment ---
    env_id: str = "HalfCheetah-v5"  # Gymnasium id; module:id imports the module first
    env_kwargs: str = "{}"  # arguments of the task in JSON, such as {"ctrl_cost_weight": 0.2}
    num_envs: int = 16  # parallel environments
    vectorization: Literal["sync", "async", "native"] = "sync"  # sync: in turn; async: processes; native: task's own

    # --- algorithm ---
    total_timesteps: int = 1_000_000  # environment steps of the run, over all environments
    learning_rate: float = 3e-4  # Adam's learning rate
    num_steps: int = 128  # steps of a rollout in each environment
    anneal_lr: bool = True  # the learning rate falls linearly to zero over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.9  # lambda of generalised advantage estimation: 0 is one-step TD, 1 is Monte Carlo
    num_minibatches: int = 32  # minibatches of a rollout
    update_epochs: int = 10  # passes over a rollout
    norm_adv: bool = False  # normalise the advantages of each minibatch to mean 0 and standard deviation 1
    norm_obs: bool = True  # normalise observations by their running mean and standard deviation, clipped to [-10, 10]
    norm_reward: bool = True  # divide rewards by the standard deviation of their discounted sum, and clip to [-10, 10]
    clip_coef: float = 0.2  # clip range of probability ratios around 1 (eq. 7: epsilon), and of values around old ones
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # largest norm of the gradient of actor and critic together
    target_kl: float | None = 0.025  # stop the passes over a rollout after one with a mean KL divergence above this
    std_min: float | None = 0.2  # minimum of the policy's std, which starts at twice it; None: no minimum, starts at 1


LIMITS = {
    "gamma gae_lambda": (0, 1),
    "eval_episodes num_envs": (1, 100_000),
    "total_timesteps num_minibatches update_epochs": (1, 1e12),
    "num_steps": (2, 1_000_000),
    "eval_freq checkpoint_freq learning_rate clip_coef ent_coef vf_coef max_grad_norm target_kl": (0, 1e12),
    "std_min": (1e-9, 10),
    "seed": (0, 2**31),
}


def check_args(args: Args) -> None:
    """Checks what limits cannot express; exits with one sentence."""
    batch_size = args.num_envs * args.num_steps
    if batch_size % args.num_minibatches != 0 or batch_size < 2 * args.num_minibatches:
        rule = f"a divisor of the {batch_size} steps of a rollout that leaves two steps or more to a minibatch"
        fail(f"--num-minibatches takes {rule}, not {args.num_minibatches}")


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


HIDDEN_SIZES = (64, 64)  # units of the hidden layers of actor and critic


def mlp(*sizes: int, output_gain: float) -> nn.Sequential:
    """Tanh network with orthogonal weights (Saxe et al. 2014, https://arxiv.org/abs/1312.6120) and zero biases."""
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        layer, is_output = nn.Linear(fan_in, fan_out), i == len(sizes) - 2
        nn.init.orthogonal_(layer.weight, output_gain if is_output else math.sqrt(2))
        nn.init.zeros_(layer.bias)
        layers += [layer] if is_output else [layer, nn.Tanh()]
    return nn.Sequential(*layers)


class NormalActor(nn.Module):
    """Normal policy: its mean depends on the observation, its log standard deviation does not."""

    def __init__(self, obs_dim: int, action_dim: int, std_init: float) -> None:
        super().__init__()
        self.mean = mlp(obs_dim, *HIDDEN_SIZES, action_dim, output_gain=0.01)
        self.log_std = nn.Parameter(torch.full((action_dim,), math.log(std_init)))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Observations (..., obs_dim) to mean (..., action_dim) and log standard deviation (action_dim,)."""
        return self.mean(obs), self.log_std


class Agent(nn.Module):
    """What model.pt holds: policy, value function and statistics."""

    def __init__(self, envs: VectorEnv, args: Args) -> None:
        super().__init__()
        obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
        self.norm_obs, self.norm_reward = args.norm_obs, args.norm_reward
        self.obs_rms = RunningMeanStd((obs_dim,))
        self.return_rms = RunningMeanStd()
        self.actor = NormalActor(obs_dim, action_dim, 1.0 if args.std_min is None else 2.0 * args.std_min)
        self.critic = mlp(obs_dim, *HIDDEN_SIZES, 1, output_gain=1.0)

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations (..., obs_dim) to what the networks take."""
        return self.obs_rms.normalize(obs) if self.norm_obs else obs

    def scale_reward(self, rewards: Tensor) -> Tensor:
        """Raw rewards to scaled rewards, from which the advantages are computed."""
        return (rewards / self.return_rms.std).clamp(-10.0, 10.0).float() if self.norm_reward else rewards

    def policy(self) -> Callable[..., np.ndarray]:
        """The current policy in NumPy, because PyTorch's overhead would dominate for a few rows.

        Returns a function of raw observations (num_envs, obs_dim) and standard normal noise (num_envs, action_dim).
        It gives actions (num_envs, action_dim), not clipped to [-1, 1], and deterministic without noise.
        """
        is_known = all(isinstance(layer, (nn.Linear, nn.Tanh)) for layer in self.actor.mean)
        assert is_known, "policy() can only follow linear layers with tanh: see Layer normalisation in docs/ppo.md"
        tensors = self.obs_rms.mean, self.obs_rms.std, self.actor.log_std.exp(), *self.actor.mean.parameters()
        obs_mean, obs_std, std, *parameters = (x.detach().cpu().numpy() for x in tensors)
        *hidden, (weight, bias) = zip(parameters[::2], parameters[1::2], strict=True)

        def act(obs: np.ndarray, noise: np.ndarray | float = 0.0) -> np.ndarray:
            obs = obs.astype(np.float32)  # as in the rollout, so that the update sees the same numbers
            x = ((obs - obs_mean) / obs_std).clip(-10.0, 10.0).astype(np.float32) if self.norm_obs else obs
            for w, b in hidden:
                x = np.tanh(x @ w.T + b)
            return x @ weight.T + bias + std * noise

        return act


# === Rollout and generalised advantage estimation =====================================================================


class Rollout:
    """Arrays (num_steps, num_envs, ...) of one rollout."""

    def __init__(self, num_steps: int, num_envs: int, obs_dim: int, action_dim: int) -> None:
        shape = (num_steps, num_envs)
        self.obs, self.final_obs = np.zeros((2, *shape, obs_dim), dtype=np.float32)
        self.actions = np.zeros((*shape, action_dim), dtype=np.float32)
        self.rewards, self.discounted_returns = np.zeros((2, *shape), dtype=np.float32)
        self.terminations, self.dones = np.zeros((2, *shape), dtype=bool)


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminations: Tensor, dones: Tensor, gamma: float, lam: float
) -> Tensor:
    """Advantages of a rollout; all tensors are (num_steps, n) (Schulman et al. 2016, eq. 16).

    `next_values` are the values of the observations that the steps led to, before any reset. On termination the next
    value is replaced by 0. `dones` (termination or truncation) end the sum over later steps.
    """
    deltas = rewards + gamma * (1.0 - terminations) * next_values - values
    decays = gamma * lam * (1.0 - dones)
    advantages, advantage = [], torch.zeros_like(deltas[0])
    for delta, decay in zip(deltas.flip(0), decays.flip(0), strict=True):  # from the last step to the first
        advantage = torch.addcmul(delta, decay, advantage)  # delta + decay * advantage
        advantages.append(advantage)
    return torch.stack(advantages).flip(0)


# === Losses and update ================================================================================================

Metrics = dict[str, Tensor]
Batch = tuple[Tensor, ...]  # columns in the order of `make_batch`
GradientFn = Callable[..., tuple[Tensor, Metrics]]


def normal_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density (...) of actions (..., action_dim) under a normal distribution with diagonal covariance."""
    z = (actions - mean) / log_std.exp()
    return (-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def compute_policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_coef: float
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate objective, negated (eq. 7); all tensors are (n,)."""
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1.0 - clip_coef, 1.0 + clip_coef)).mean()
    with torch.no_grad():  # two estimators of KL(old, new): http://joschu.net/blog/kl-approx.html
        metrics = {
            "losses/policy_loss": loss,
            "losses/old_approx_kl": -log_ratio.mean(),
            "losses/approx_kl": (ratio - 1.0 - log_ratio).mean(),
            "losses/clipfrac": ((ratio - 1.0).abs() > clip_coef).float().mean(),
        }
    return loss, metrics


def compute_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float) -> tuple[Tensor, Metrics]:
    """Half the mean squared error; all tensors are (n,).

    Of two errors the larger one counts: that of the value, and that of the value clipped around the old one.
    """
    clipped_values = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
    loss = 0.5 * torch.max((values - returns) ** 2, (clipped_values - returns) ** 2).mean()
    return loss, {"losses/value_loss": loss}


def flat_vector(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Makes the parameters views of one new vector, and returns it: an optimiser steps it in one operation."""
    parameters = list(parameters)
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(vector, parameters)
    return vector


class Adam(nn.Module):
    """Adam (Kingma and Ba 2015) on one vector (`flat_vector`); a module, so that its moments are saved.

    Computes what `torch.optim.Adam` does, without its overhead of 0.1 to 0.3 ms. Another optimiser: see `docs/ppo.md`.
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


def compute_update_gradient(agent: Agent, minibatch: Batch, args: Args) -> tuple[Tensor, Metrics]:
    """Gradient of the joint loss (eq. 9) as one vector, its norm clipped."""
    mb_obs, mb_actions, mb_old_log_prob, mb_advantages, mb_returns, mb_old_values = minibatch
    if args.norm_adv:
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
    mean, log_std = agent.actor(mb_obs)
    log_prob = normal_log_prob(mb_actions, mean, log_std)
    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1).mean()
    policy_loss, policy_metrics = compute_policy_loss(log_prob, mb_old_log_prob, mb_advantages, args.clip_coef)
    values = agent.critic(mb_obs).squeeze(-1)
    value_loss, value_metrics = compute_value_loss(values, mb_old_values, mb_returns, args.clip_coef)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss

    gradient = compute_gradient(loss, agent.parameters())
    grad_norm = gradient.norm()
    metrics = policy_metrics | value_metrics | {"losses/entropy": entropy, "losses/grad_norm": grad_norm}
    gradient = gradient * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    return gradient, {name: value.detach() for name, value in metrics.items()}


def update(
    agent: Agent, optimizer: Adam, minibatch: Batch, args: Args, gradient_fn: GradientFn = compute_update_gradient
) -> Metrics:
    """One optimiser step on a minibatch: some rows of the columns that `make_batch` returns."""
    gradient, metrics = gradient_fn(agent, minibatch, args)
    optimizer.step(gradient)
    if args.std_min is not None:
        with torch.no_grad():
            agent.actor.log_std.clamp_(min=math.log(args.std_min))
    return metrics


@torch.no_grad()
def make_batch(agent: Agent, rollout: Rollout, args: Args, device: torch.device) -> Batch:
    """Training data of the update: obs, actions, log-probabilities, advantages, returns and values (batch_size, ...).

    The log-probabilities use the statistics that the policy acted with. Then the statistics are updated with the
    rollout; observations, rewards and values use the new ones. So the first ratios are not exactly 1.
    """
    to_device = partial(torch.as_tensor, device=device)
    raw_obs, actions = to_device(rollout.obs), to_device(rollout.actions)
    log_prob = normal_log_prob(actions, *agent.actor(agent.normalize(raw_obs)))
    agent.obs_rms.update(raw_obs.flatten(0, 1))
    agent.return_rms.update(to_device(rollout.discounted_returns).flatten())
    obs = agent.normalize(raw_obs)
    values = agent.critic(obs).squeeze(-1).cpu()  # the short loop of `compute_gae` is faster on the CPU
    next_values = agent.critic(agent.normalize(to_device(rollout.final_obs))).squeeze(-1).cpu()
    rewards = agent.scale_reward(to_device(rollout.rewards)).cpu()
    ends = torch.as_tensor(rollout.terminations).float(), torch.as_tensor(rollout.dones).float()
    advantages = compute_gae(rewards, values, next_values, *ends, args.gamma, args.gae_lambda)
    returns = advantages + values
    columns = obs, actions, log_prob, advantages, returns, values  # (num_steps, num_envs, ...)
    return tuple(x.to(device).flatten(0, 1) for x in columns)


def learn_from(agent: Agent, optimizer: Adam, batch: Batch, args: Args, gradient_fn: GradientFn) -> dict[str, float]:
    """--update-epochs passes over a rollout in shuffled minibatches; returns means over all minibatches."""
    metrics: list[Metrics] = []
    for _ in range(args.update_epochs):
        permutation = torch.randperm(len(batch[0]), device=batch[0].device)
        minibatches = zip(*(x[permutation].tensor_split(args.num_minibatches) for x in batch), strict=True)
        epoch_metrics = [update(agent, optimizer, minibatch, args, gradient_fn) for minibatch in minibatches]
        metrics += epoch_metrics
        approx_kl = torch.stack([m["losses/approx_kl"] for m in epoch_metrics]).mean()
        if args.target_kl is not None and approx_kl > args.target_kl:
            break
    return {name: torch.stack([m[name] for m in metrics]).mean().item() for name in metrics[0]}


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
    act = agent.policy()
    returns, lengths = np.zeros((2, args.eval_episodes))
    running = np.ones(args.eval_episodes, dtype=bool)
    for _ in range(MAX_EPISODE_STEPS):
        obs, _, rewards, terminations, truncations = step_envs(envs, act(obs))
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
    stride = args.num_envs * args.num_steps  # environment steps of an iteration
    total_steps = -(-args.total_timesteps // stride) * stride  # rounded up to whole iterations
    agent = Agent(envs, args).to(device)
    optimizer = Adam(agent.parameters(), args.learning_rate, 0.9, 0.999, 1e-5)
    rollout = Rollout(args.num_steps, args.num_envs, obs_dim, action_dim)

    rest = {"optimizer": optimizer}  # of a checkpoint, besides the model
    with Run(args, envs, total_steps, stride, model={"agent": agent}, rest=rest) as run:
        gradient_fn: GradientFn = compute_update_gradient
        if args.compile:
            shapes = [(obs_dim,), (action_dim,), (), (), (), ()]  # of an example: the columns of `make_batch`
            minibatch = tuple(torch.zeros((stride // args.num_minibatches, *shape), device=device) for shape in shapes)
            gradient_fn = compiled(compute_update_gradient, agent, minibatch, args)
        # `run.steps()` yields the number of steps taken so far, and a seed where episodes begin anew. Between two
        # iterations it writes the checkpoints, and after the last one model.pt.
        for global_step, seed in run.steps():
            if seed is not None:  # at the start and after each checkpoint
                obs, _ = envs.reset(seed=seed)
                discounted_return = np.zeros(args.num_envs)
            if args.anneal_lr:
                optimizer.lr = args.learning_rate * (1.0 - global_step / total_steps)

            act, noise = agent.policy(), torch.randn(rollout.actions.shape, device=device).cpu().numpy()
            for t in range(args.num_steps):
                # act and step
                rollout.obs[t], rollout.actions[t] = obs, act(obs, noise[t])
                obs, final_obs, rewards, terminations, truncations = step_envs(envs, rollout.actions[t])

                # store
                rollout.final_obs[t], rollout.rewards[t] = final_obs, rewards
                rollout.terminations[t], rollout.dones[t] = terminations, terminations | truncations
                discounted_return = args.gamma * discounted_return + rollout.rewards[t]
                rollout.discounted_returns[t] = discounted_return
                discounted_return[rollout.dones[t]] = 0.0
                run.record(rollout.rewards[t], rollout.dones[t])
            run.check(observation=np.concatenate([rollout.obs, rollout.final_obs], axis=-1), reward=rollout.rewards)
            global_step += stride  # now the number of steps after this iteration

            # update
            batch = make_batch(agent, rollout, args, device)
            metrics = learn_from(agent, optimizer, batch, args, gradient_fn)

            # log and evaluate
            run.check(**metrics)
            *_, b_returns, b_values = batch
            metrics["losses/explained_variance"] = 1.0 - ((b_returns - b_values).var() / b_returns.var()).item()
            metrics["charts/learning_rate"] = optimizer.lr
            run.log(metrics, global_step)
            if run.due(args.eval_freq) and global_step < total_steps:
                run.log(evaluate(agent, args, run.folder, f"step-{global_step}"), global_step)
        run.log(evaluate(agent, args, run.folder, "final"), total_steps)
    return run.folder


# === Stand-in for utils/run.py, where this file was copied alone ======================================================

if not TYPE_CHECKING and not HAS_UTILS:
    import sys
    import time

    import tyro
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
    from torch.utils.tensorboard import SummaryWriter

    def fail(message):
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2)

    def parse_args(cls):
        args, off = tyro.cli(cls), ("track", "capture_video", "upload_model")
        if (folder := args.evaluate) is None:
            return args
        if not all((folder / name).exists() for name in ("args.json", "model.pt")):
            fail(f"--evaluate takes a run folder with args.json and model.pt, and {folder} lacks one of them")
        saved = json.loads((folder / "args.json").read_text()) | dict.fromkeys(off, False) | {"evaluate": folder}
        saved.pop("script", None)  # which a run with utils/run.py has
        if saved.keys() != vars(args).keys():
            fail(f"--evaluate takes a run of this version of {Path(__file__).name}, and {folder} is another's")
        args = tyro.cli(cls, default=cls(**saved))
        for name, value in saved.items():
            if getattr(args, name) != value and name not in (*off, "seed", "eval_episodes"):
                fail(f"--{name.replace('_', '-')} cannot change with --evaluate: the run has {value}")
        return args

    def prepare(args, limits):
        wanted = [name for name in ("resume", "track", "upload_model", "capture_video") if getattr(args, name)]
        for flag in wanted + ["vectorization native"] * (args.vectorization == "native"):
            fail(f"--{flag.replace('_', '-')} needs utils/run.py in the folder of {Path(__file__).name}")
        for name, (low, high) in ((name, limit) for names, limit in limits.items() for name in names.split()):
            if (value := getattr(args, name)) is not None and not low <= value <= high:
                fail(f"--{name.replace('_', '-')} takes a number from {low:g} to {high:.10g}, not {value}")

    def vectorize(env_fns, args, video):
        is_async = args.vectorization == "async" and args.evaluate is None
        copying = gym.wrappers.TransformObservation  # a task may write the next observation into the same array
        env_fns = [lambda make_env=make_env: copying(make_env(), np.array, None) for make_env in env_fns]
        try:
            envs = (AsyncVectorEnv if is_async else SyncVectorEnv)(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)
        except Exception as error:  # raised by Gymnasium or by the task's own code
            fail(f"--env-id {args.env_id} with --env-kwargs {args.env_kwargs} cannot be made: {error}")
        space, finite = envs.single_action_space, lambda box: np.isfinite(box.high - box.low).all()
        if not isinstance(space, gym.spaces.Box) or space.dtype.kind != "f" or not finite(space):
            fail(f"--env-id takes a task whose actions are a Box of floats with finite bounds, not {space}")
        return envs

    def compiled(function, *example):
        torch._dynamo.config.trace_autograd_ops = True
        torch._inductor.config.cpp_wrapper = not torch.cuda.is_available()
        result = torch.compile(function)
        try:
            result(*example)
        except RuntimeError as error:  # no C++ compiler, for example
            print(f"warning: the update is slow, because it cannot be compiled: {str(error).splitlines()[0]}")
            return function
        return result

    def load_model(folder, parts):
        parts["agent"].load_state_dict(torch.load(folder / "model.pt", map_location="cpu")["agent"])

    def describe(metrics):
        return "evaluation: " + ", ".join(f"{name.removeprefix('eval/')} {x:.2f}" for name, x in metrics.items())

    class Run:
        def __init__(self, args, envs, total_steps, stride, model, **_):
            print(f"no utils/run.py in the folder of {Path(__file__).name}: the run has no checkpoints and no videos")
            self.args, self.envs, self.total_steps, self.stride, self.model = args, envs, total_steps, stride, model
            name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "-")
            self.folder, self.global_step, self.began = Path("runs") / name, 0, time.time()
            while self.folder.exists():  # of a run that began in the same second
                self.folder = self.folder.with_name(self.folder.name + "-2")
            self.writer = SummaryWriter(str(self.folder))
            (self.folder / "args.json").write_text(json.dumps(vars(args)))

        def __enter__(self):
            return self

        def due(self, *frequencies):
            return any(f > 0 and (self.global_step + self.stride) % f < self.stride for f in frequencies)

        def steps(self):
            begins_anew = True
            while self.global_step < self.total_steps:
                if begins_anew:
                    seed = int(np.random.SeedSequence((self.args.seed, self.global_step)).generate_state(1)[0]) // 2
                    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
                    self.running, self.finished = np.zeros((2, self.args.num_envs)), []
                yield self.global_step, seed if begins_anew else None
                begins_anew = self.due(self.args.checkpoint_freq)
                self.global_step += self.stride
            self.save()

        def check(self, **quantities):
            for name, values in quantities.items():
                if not np.isfinite(values).all():
                    raise FloatingPointError(f"{name} is not a finite number after step {self.global_step:,}")

        def record(self, rewards, dones):
            self.running += rewards, np.ones(len(rewards))
            self.finished += list(self.running[:, dones].T)
            self.running[:, dones] = 0.0

        def log(self, metrics, global_step):
            if self.finished and "eval/return_mean" not in metrics:
                returns, lengths = np.stack(self.finished, axis=1).mean(axis=1)
                metrics |= {"charts/episodic_return": returns, "charts/episodic_length": lengths}
                self.finished = []
            for name, value in {"charts/SPS": global_step / (time.time() - self.began), **metrics}.items():
                self.writer.add_scalar(name, value, global_step)
            if "eval/return_mean" in metrics:
                print(f"step {global_step:,}: {describe(metrics)}", flush=True)

        def save(self):
            if self.args.save_model:
                torch.save({name: part.state_dict() for name, part in self.model.items()}, self.folder / "model.pt")

        def __exit__(self, kind, *_):
            print(f"run folder: {self.folder}")
            if kind is KeyboardInterrupt:  # not after a fault: the weights may be broken
                self.save()
            if (self.folder / "model.pt").exists():
                print(f"next: python {sys.argv[0]} --evaluate {self.folder}")
            self.envs.close(), self.writer.close()
            if kind is KeyboardInterrupt:
                raise SystemExit(130)


if __name__ == "__main__":
    main(parse_args(Args))
