"""Proximal policy optimisation (PPO) with self-play: any game between teams, symmetric or asymmetric.

The algorithm is that of `ppo_continuous.py` (Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7 and 9;
Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16). Discrete actions have one categorical distribution;
MultiDiscrete actions have several. `diff ppo_continuous.py ppo_selfplay.py` shows what self-play adds.

Self-play follows ML-Agents' ghost trainer: the learner plays snapshots of its past selves. A *behaviour* is one policy
with its own optimisers, pool and rating; the *learner* is the one whose turn it is. `utils/matches.py` chooses who
plays, rates the games and takes the snapshots. `docs/selfplay.md` has the rest.

    python ppo_selfplay.py
    python ppo_selfplay.py --env-id pursuit
    pip install mpe2 && python ppo_selfplay.py --env-id mpe2.simple_push_v3 --num-games 16
    python ppo_selfplay.py --evaluate runs/FOLDER --against charge
    python ppo_selfplay.py --resume runs/FOLDER

Deviations from ML-Agents:
- Each parallel game has its own opponents, drawn when it begins. All snapshots act in one batched pass.
- A result is credited to the snapshot that played; ML-Agents credits the opponent that plays when the result arrives.
- The outcome is read by one rule (`utils/team_env.py`), so games with any rewards can be rated.
- The newest opponent is the newest snapshot, not the learner itself, so games against it are rated.
- Snapshots that the learner does not beat yet are drawn more often (prioritised fictitious self-play, AlphaStar).
- When the turn passes to another behaviour, all games restart and the previous learner leaves a snapshot.
- At a checkpoint games are reset and random streams reseeded, so a resumed run equals an uninterrupted one.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from utils.cross_play import scripted_players
from utils.evaluation import evaluate_run, initialize, load_policies, load_rivals, play_table, score_policies
from utils.matches import behavior_args, check_games, start_matches
from utils.run import Run, compiled, fail, parse_args, prepare
from utils.team_env import Team, TeamEnv, describe_teams, legal_actions, make_games

# === Arguments ========================================================================================================


@dataclass
class Args:
    """PPO with self-play: trains policies for the teams of a game by playing past selves."""

    # --- experiment ---
    exp_name: str = Path(__file__).stem  # name of the experiment, part of the run folder's name
    seed: int = 1  # seed of all random numbers
    cuda: bool = True  # use the GPU if there is one
    compile: bool = True  # compile the update: trains faster, but starts later, up to two minutes the first time
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "self-play"  # W&B project
    wandb_entity: str | None = None  # W&B team or user; default: that of the account
    capture_video: bool = False  # record a game of the final policy against its hardest scripted opponent into videos/
    save_model: bool = True  # write model.pt with all pools into the run folder at the end, or when stopped
    upload_model: bool = False  # upload the model with a model card to the Hugging Face Hub at the end
    hf_entity: str | None = None  # user or organisation on the Hugging Face Hub
    eval_freq: int = 500_000  # game steps between evaluations against the scripted players; 0: only at the end
    eval_games: int = 100  # games against each scripted player in an evaluation; half on either side if symmetric
    cross_play_games: int = 64  # games of each pair in the table of all against all at the end; 0: no table
    cross_play_snapshots: int = 10  # snapshots of each behaviour in that table, from the oldest to the last
    deterministic: bool = True  # evaluate with each policy's most likely actions; --no-deterministic samples
    evaluate: Path | None = None  # do not train: score this run's policy and play its table, or play --against another
    against: str | None = None  # the opponent for --evaluate: another run folder, or the name of a scripted player
    play: bool = False  # with --evaluate: play against the run's policy yourself, at the keyboard
    exploitability: int = 0  # with --evaluate: train best responses for this many game steps, and print their scores
    policy: Literal["last", "uniform", "nash"] = "last"  # what saved runs play: the last snapshot, or a mixture of all
    checkpoint_freq: int = 500_000  # game steps between checkpoints (with resets); 0: only first and last
    resume: Path | None = None  # continue the run of this folder from its last checkpoint, with its arguments

    # --- environment ---
    env_id: str = "sumo"  # sumo, builds, pursuit, a PettingZoo module, or module:Class for a vectorised game
    env_kwargs: str = "{}"  # arguments of the game in JSON, such as {"actions": "discrete"}
    teams: str | None = None  # agents of each team in JSON, such as {"red": ["a_0"], "blue": ["b_0"]}; default: by name
    symmetric: Literal["auto", "yes", "no"] = "auto"  # one policy for all teams; auto: by names, with --teams if alike
    num_games: int = 256  # parallel games

    # --- self-play ---
    save_steps: int = 200_000  # steps of the learner's agents, over all games, between snapshots
    window: int = 50  # largest number of snapshots in the pool; a new one then replaces the oldest
    opponents: list[str] | None = None  # run folders whose frozen policies are the opponents; default: past selves
    initialize_from: str | None = None  # run folder whose weights the training starts with; default: random weights
    play_against_latest_model_ratio: float = 0.5  # probability of the newest snapshot; else one is drawn
    newest_share: float = 1.0  # draw only from this newest share of the pool; 0.5: from its newer half
    scripted_share: float = 0.0  # probability that an opponent is a scripted player of the game
    current_share: float = 0.0  # probability that the opponent is the current learner; asymmetric: the newest snapshot
    opponent_sampling: Literal["uniform", "prioritized"] = "prioritized"  # prioritized: hard opponents more often
    swap_steps: int = 0  # steps of all opponents' agents before a game changes opponents; 0: after each game
    swaps_per_turn: float | None = None  # changes of opponents in a turn; takes the place of --swap-steps
    team_change: int | None = None  # about how many steps the learner's agents take in a turn; default: ten turns each
    learner_side: str | None = None  # team that the learner always plays on; default: teams alternate
    behaviors: str = "{}"  # arguments of single behaviours in JSON, such as {"evader": {"gamma": 0.9}}
    initial_elo: float = 1200.0  # initial rating
    elo_k: float = 16.0  # largest change of a rating in one game

    # --- algorithm ---
    total_timesteps: int = 10_000_000  # game steps of the run, over all games
    learning_rate: float = 1e-3  # Adam's learning rate
    num_steps: int = 64  # steps of a rollout in each game
    anneal_lr: bool = True  # the learning rate falls linearly to zero over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation: 0 is one-step TD, 1 is Monte Carlo
    num_minibatches: int = 8  # minibatches of a rollout
    update_epochs: int = 4  # passes over a rollout
    norm_adv: bool = True  # normalise the advantages of each minibatch to mean 0 and standard deviation 1
    norm_obs: bool = True  # normalise observations by their running mean and standard deviation, clipped to [-10, 10]
    norm_reward: bool = True  # divide rewards by the standard deviation of their discounted sum, and clip to [-10, 10]
    clip_coef: float = 0.2  # clip range of probability ratios around 1 (eq. 7: epsilon), and of values around old ones
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # largest norm of the gradient of actor and critic together
    target_kl: float | None = None  # stop the passes over a rollout after one with a mean KL divergence above this


LIMITS = {
    "gamma gae_lambda": (0, 1),
    "eval_games num_games": (1, 100_000),
    "total_timesteps num_minibatches update_epochs": (1, 1e12),
    "num_steps": (1, 1_000_000),
    "eval_freq checkpoint_freq learning_rate clip_coef ent_coef vf_coef max_grad_norm target_kl": (0, 1e12),
    "seed": (0, 2**31),
    "play_against_latest_model_ratio scripted_share current_share": (0, 1),
    "save_steps team_change": (1, 1e12),
    "swap_steps exploitability": (0, 1e12),
    "cross_play_games": (0, 100_000),
    "window cross_play_snapshots": (1, 10_000),
    "swaps_per_turn": (1e-9, 1e12),
    "elo_k": (0, 1e4),
    "newest_share": (0.001, 1),
    "initial_elo": (-1e6, 1e6),
}
# What --behaviors may change.
PER_BEHAVIOR = "learning_rate anneal_lr gamma gae_lambda update_epochs norm_adv clip_coef "
PER_BEHAVIOR += "ent_coef vf_coef max_grad_norm target_kl team_change"


def check_args(args: Args) -> None:
    """Checks what limits cannot express; exits with one sentence."""
    batch_size = args.num_games * args.num_steps
    if batch_size % args.num_minibatches != 0 or batch_size < 2 * args.num_minibatches:
        rule = f"a divisor of the {batch_size} steps of a rollout that leaves two steps or more to a minibatch"
        fail(f"--num-minibatches takes {rule}, not {args.num_minibatches}")


# === Environments =====================================================================================================


def make_env(args: Args, num_games: int, render: bool = False) -> TeamEnv:
    """`num_games` games stepped together; exits with one sentence if there is no such game or teams cannot play it."""
    setup = args.env_id, args.env_kwargs, args.teams, args.symmetric, args.learner_side
    return make_games(num_games, *setup, render)


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

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.mean = mlp(obs_dim, *HIDDEN_SIZES, action_dim, output_gain=0.01)
        self.log_std = nn.Parameter(torch.zeros(action_dim))

    def forward(self, obs: Tensor) -> Tensor:
        """Observations (..., obs_dim) to mean and log standard deviation (..., 2 * action_dim)."""
        mean = self.mean(obs)
        return torch.cat([mean, self.log_std.expand_as(mean)], dim=-1)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Noise that `sample` takes to draw n actions."""
        return torch.randn((n, self.action_dim), generator=generator).to(next(self.parameters()).device)

    def sample(self, policy: Tensor, masks: Tensor, noise: Tensor | float) -> Tensor:
        """Actions (n, action_dim) from the outputs (n, 2 * action_dim); those of the mean without noise."""
        mean, log_std = policy.chunk(2, dim=-1)
        return mean + log_std.exp() * noise

    def log_prob(self, policy: Tensor, masks: Tensor, actions: Tensor) -> Tensor:
        """Log-density (n,) of actions (n, action_dim)."""
        return normal_log_prob(actions, *policy.chunk(2, dim=-1))

    def entropy(self, policy: Tensor, masks: Tensor) -> Tensor:
        """Entropy (n,) in nats."""
        return (policy.chunk(2, dim=-1)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


class CategoricalActor(nn.Module):
    """Policy for Discrete and MultiDiscrete actions: one independent categorical distribution a branch.

    An illegal action has probability zero and adds nothing to the entropy.
    """

    def __init__(self, obs_dim: int, branches: tuple[int, ...]) -> None:
        super().__init__()
        self.branches = list(branches)
        self.logits = mlp(obs_dim, *HIDDEN_SIZES, sum(self.branches), output_gain=0.01)

    def forward(self, obs: Tensor) -> Tensor:
        """Observations (..., obs_dim) to the logits of all branches (..., sum of branches)."""
        return self.logits(obs)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Gumbel noise that `sample` takes to draw n actions."""
        uniform = torch.rand((n, sum(self.branches)), generator=generator).clamp_min(1e-20)
        return -(-uniform.log()).log().to(next(self.parameters()).device)

    def sample(self, policy: Tensor, masks: Tensor, noise: Tensor | float) -> Tensor:
        """Actions (n, num_branches) from the logits by the Gumbel-max trick; the most likely ones without noise."""
        branches = (policy + noise).masked_fill(~masks, -math.inf).split(self.branches, dim=-1)
        return torch.stack([branch.argmax(-1) for branch in branches], dim=-1)

    def log_probs(self, policy: Tensor, masks: Tensor) -> Tensor:
        """Log-probabilities (n, sum of branches) of all actions, normalised in each branch; illegal: -1e9 or less."""
        branches = policy.masked_fill(~masks, -1e9).split(self.branches, dim=-1)
        return torch.cat([branch.log_softmax(-1) for branch in branches], dim=-1)

    def log_prob(self, policy: Tensor, masks: Tensor, actions: Tensor) -> Tensor:
        """Log-probability (n,) of actions (n, num_branches)."""
        branches = self.log_probs(policy, masks).split(self.branches, dim=-1)
        return torch.cat([x.gather(-1, actions[..., k : k + 1]) for k, x in enumerate(branches)], dim=-1).sum(-1)

    def entropy(self, policy: Tensor, masks: Tensor) -> Tensor:
        """Entropy (n,) in nats, summed over branches."""
        log_probs = self.log_probs(policy, masks)
        return -(log_probs.exp() * log_probs).sum(-1)


class Agent(nn.Module):
    """What model.pt holds of a behaviour: policy, value function and statistics."""

    def __init__(self, team: Team, args: Args) -> None:
        super().__init__()
        obs_dim, action_dim, branches = team.obs_dim, team.action_dim, team.branches
        self.norm_obs, self.norm_reward = args.norm_obs, args.norm_reward
        self.obs_rms = RunningMeanStd((obs_dim,))
        self.return_rms = RunningMeanStd()
        self.actor = CategoricalActor(obs_dim, branches) if branches else NormalActor(obs_dim, action_dim)
        self.critic = mlp(obs_dim, *HIDDEN_SIZES, 1, output_gain=1.0)

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations (..., obs_dim) to what the networks take."""
        return self.obs_rms.normalize(obs) if self.norm_obs else obs

    def scale_reward(self, rewards: Tensor) -> Tensor:
        """Raw rewards to scaled rewards, from which the advantages are computed."""
        return (rewards / self.return_rms.std).clamp(-10.0, 10.0).float() if self.norm_reward else rewards

    def forward(self, obs: Tensor) -> Tensor:
        """Raw observations (n, obs_dim) to the parameters of the policy (n, ...)."""
        return self.actor(self.normalize(obs))

    def acting_weights(self) -> dict[str, Tensor]:
        """The part of the state dict that acting needs. A snapshot is a copy of it."""
        return {name: value for name, value in self.state_dict().items() if name.startswith(("actor.", "obs_rms."))}

    @torch.no_grad()
    def act(self, obs: np.ndarray, masks: np.ndarray, noise: Tensor | float = 0.0) -> np.ndarray:
        """Raw observations (n, obs_dim) to actions (n, action_dim); deterministic without noise."""
        device = self.obs_rms.mean.device
        policy = self(torch.as_tensor(obs, dtype=torch.float32, device=device))
        return self.actor.sample(policy, torch.as_tensor(masks, device=device), noise).cpu().numpy()


# === Rollout and generalised advantage estimation =====================================================================


class Rollout:
    """Arrays (num_steps, rows, ...) of one rollout, with a row for each of the learner's agents in each game."""

    def __init__(self, num_steps: int, num_rows: int, team: Team) -> None:
        shape = (num_steps, num_rows)
        self.obs, self.final_obs = np.zeros((2, *shape, team.obs_dim), dtype=np.float32)
        self.actions = np.zeros((*shape, team.action_dim), dtype=np.int64 if team.branches else np.float32)
        self.masks = np.zeros((*shape, sum(team.branches)), dtype=bool)
        self.rewards, self.discounted_returns = np.zeros((2, *shape), dtype=np.float32)
        self.terminations, self.dones, self.valid = np.zeros((3, *shape), dtype=bool)


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
    mb_obs, mb_masks, mb_actions, mb_old_log_prob, mb_advantages, mb_returns, mb_old_values = minibatch
    if args.norm_adv:
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
    policy = agent.actor(mb_obs)
    log_prob = agent.actor.log_prob(policy, mb_masks, mb_actions)
    entropy = agent.actor.entropy(policy, mb_masks).mean()
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
    return metrics


@torch.no_grad()
def make_batch(agent: Agent, rollout: Rollout, args: Args, device: torch.device) -> Batch:
    """Training data of the update: obs, masks, actions, log-probabilities, advantages, returns, values (n, ...).

    The log-probabilities use the statistics that the policy acted with. Then the statistics are updated with the
    rollout; observations, rewards and values use the new ones. So the first ratios are not exactly 1.
    Rows of agents that had left their game are not in the batch.
    """
    to_device = partial(torch.as_tensor, device=device)
    raw_obs, actions = to_device(rollout.obs), to_device(rollout.actions)
    masks, valid = to_device(rollout.masks), to_device(rollout.valid)
    log_prob = agent.actor.log_prob(agent(raw_obs), masks, actions)
    if valid.any():
        agent.obs_rms.update(raw_obs[valid])
        agent.return_rms.update(to_device(rollout.discounted_returns)[valid])
    obs = agent.normalize(raw_obs)
    values = agent.critic(obs).squeeze(-1).cpu()  # the short loop of `compute_gae` is faster on the CPU
    next_values = agent.critic(agent.normalize(to_device(rollout.final_obs))).squeeze(-1).cpu()
    rewards = agent.scale_reward(to_device(rollout.rewards)).cpu()
    ends = torch.as_tensor(rollout.terminations).float(), torch.as_tensor(rollout.dones).float()
    advantages = compute_gae(rewards, values, next_values, *ends, args.gamma, args.gae_lambda)
    returns = advantages + values
    columns = obs, masks, actions, log_prob, advantages, returns, values  # (num_steps, num_rows, ...)
    return tuple(x.to(device)[valid] for x in columns)


def learn_from(agent: Agent, optimizer: Adam, batch: Batch, args: Args, gradient_fn: GradientFn) -> dict[str, float]:
    """--update-epochs passes over a rollout in shuffled minibatches; returns means over all minibatches."""
    metrics: list[Metrics] = []
    num_minibatches = min(args.num_minibatches, len(batch[0]) // 2)  # fewer where agents have left their games
    if num_minibatches == 0:
        return {}
    for _ in range(args.update_epochs):
        permutation = torch.randperm(len(batch[0]), device=batch[0].device)
        minibatches = zip(*(x[permutation].tensor_split(num_minibatches) for x in batch), strict=True)
        epoch_metrics = [update(agent, optimizer, minibatch, args, gradient_fn) for minibatch in minibatches]
        metrics += epoch_metrics
        approx_kl = torch.stack([m["losses/approx_kl"] for m in epoch_metrics]).mean()
        if args.target_kl is not None and approx_kl > args.target_kl:
            break
    return {name: torch.stack([m[name] for m in metrics]).mean().item() for name in metrics[0]}


# === Evaluation =======================================================================================================


def evaluate(agents: dict[str, Agent], args: Args, video_folder: Path | None = None) -> dict[str, float]:
    """Each behaviour's mean score against every scripted player; uses no random stream of the training."""
    rules = args.eval_games, args.seed + 1_000_000, args.deterministic, video_folder
    return score_policies(partial(make_env, args), agents, *rules)


load_run = partial(load_policies, Args, LIMITS, make_env, Agent)  # (folder, flag) to agents, pools and arguments


# === Main =============================================================================================================


def main(args: Args) -> Path:
    """Trains, or evaluates a trained model with --evaluate; returns the run folder."""
    prepare(args, LIMITS)
    check_args(args)
    check_games(args, make_env)
    torch.set_flush_denormal(True)  # subnormal averages in Adam are slow; --evaluate must round as training does
    if args.evaluate is not None:
        evaluate_run(args, make_env, load_run, main)
        return args.evaluate

    # --- seeds and device ---
    random.seed(args.seed), np.random.seed(args.seed), torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")

    # --- environments, networks, storage ---
    env = make_env(args, args.num_games)
    all_args = behavior_args(args, env.teams, PER_BEHAVIOR, LIMITS)
    stride = args.num_games * args.num_steps  # game steps of an iteration
    total_steps = -(-args.total_timesteps // stride) * stride  # rounded up to whole iterations
    agents = {team.behavior: Agent(team, all_args[team.behavior]).to(device) for team in env.teams}
    initialize(agents, all_args, load_run)
    optimizers = {b: Adam(agents[b].parameters(), own.learning_rate, 0.9, 0.999, 1e-5) for b, own in all_args.items()}

    # --- pools and ratings ---
    matches = start_matches(all_args, env, agents, total_steps, stride, load_rivals(args, load_run, env))
    print(describe_teams(env))

    model = {"agent": agents, "pool": matches.pools}
    rest = {"optimizer": optimizers, "matches": matches}  # of a checkpoint, besides the model
    hint = "--against", scripted_players(env)[-1].name, "--capture-video"  # for the command printed at the end
    with Run(args, env, total_steps, stride, model=model, rest=rest, evaluate_with=hint) as run:
        gradient_fn: GradientFn = compute_update_gradient
        for team in {team.behavior: team for team in env.teams}.values() if args.compile else ():
            zeros, rows = partial(torch.zeros, device=device), stride // args.num_minibatches * len(team.agents)
            b_masks = zeros((rows, sum(team.branches)), dtype=torch.bool)
            b_actions = zeros((rows, team.action_dim), dtype=torch.int64 if team.branches else torch.float32)
            minibatch = zeros((rows, team.obs_dim)), b_masks, b_actions, *(zeros(rows) for _ in range(4))
            # one function for all behaviours: each call adds the shapes of one
            gradient_fn = compiled(gradient_fn, agents[team.behavior], minibatch, all_args[team.behavior])
        # `run.steps()` yields the number of steps taken so far, and a seed where episodes begin anew. Between two
        # iterations it writes the checkpoints, and after the last one model.pt.
        for global_step, seed in run.steps():
            learner, own = matches.learner, all_args[matches.learner]
            agent, optimizer, team = agents[learner], optimizers[learner], env.teams[matches.learner_teams[0]]
            num_rows = args.num_games * len(team.agents)  # one for each of the learner's agents in each game
            if seed is not None:  # at the start, after each checkpoint and each change of turn
                matches.begin_anew(seed)
                obs = env.reset(seed)
                run.check(global_step, observation=obs)
                discounted_return = np.zeros(num_rows)
            if own.anneal_lr:
                optimizer.lr = own.learning_rate * (1.0 - global_step / total_steps)

            rollout = Rollout(args.num_steps, num_rows, team)  # here, because the learners' teams differ
            noise = agent.actor.noise(args.num_steps * num_rows).unflatten(0, (args.num_steps, num_rows))
            for t in range(args.num_steps):
                # act and step
                rollout.obs[t], rollout.valid[t] = matches.of_learner(obs), matches.of_learner(env.alive)
                rollout.masks[t] = matches.of_learner([legal_actions(env, i) for i in range(len(env.teams))])
                rollout.actions[t] = agent.act(rollout.obs[t], rollout.masks[t], noise[t])
                result = env.step(matches.all_actions(env, agents, obs, rollout.actions[t]))
                result, cut = matches.cut_games(result)  # so that the first games after a reset do not run in lockstep
                step = global_step + (t + 1) * args.num_games
                run.check(step, observation=[*result.obs, *result.final_obs], reward=result.rewards)

                # store
                rollout.final_obs[t] = matches.of_learner(result.final_obs)
                rollout.rewards[t] = matches.of_learner(result.rewards)
                rollout.terminations[t] = matches.of_learner(result.terminations)
                rollout.dones[t] = rollout.terminations[t] | matches.of_learner(result.truncations)
                discounted_return = own.gamma * discounted_return + rollout.rewards[t]
                rollout.discounted_returns[t] = discounted_return
                discounted_return[rollout.dones[t] | ~rollout.valid[t]] = 0.0

                # rate, next opponents
                obs = matches.finish_games(env, result, cut)
            global_step += stride  # now the number of steps after this iteration
            matches.learner_steps[learner] += int(rollout.valid.sum())

            # update
            batch = make_batch(agent, rollout, own, device)
            metrics = learn_from(agent, optimizer, batch, own, gradient_fn)

            # snapshot, change of turn
            matches.end_turn(agents, global_step, args.save_steps)
            if matches.learner != learner:
                run.begin_anew()  # the games of the next learner begin with a reset and a seed, as after a checkpoint

            # log and evaluate
            run.check(**metrics)
            if metrics:
                *_, b_returns, b_values = batch
                metrics["losses/explained_variance"] = 1.0 - ((b_returns - b_values).var() / b_returns.var()).item()
            metrics["charts/learning_rate"] = optimizer.lr
            metrics |= matches.metrics() | {"charts/learner": float(list(agents).index(learner))}
            run.log(metrics, global_step)
            if run.due(args.eval_freq) and global_step < total_steps:
                run.log(evaluate(agents, args), global_step)
        run.log(evaluate(agents, args, run.folder if args.capture_video else None), total_steps)
        play_table(args, make_env, agents, matches.pools, run.folder, run)
    return run.folder


if __name__ == "__main__":
    main(parse_args(Args))
