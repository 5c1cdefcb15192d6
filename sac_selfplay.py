"""Soft actor-critic (SAC) with self-play: any game between teams, symmetric or asymmetric.

The algorithm is that of `sac_continuous.py` (Haarnoja et al. 2018b, https://arxiv.org/abs/1812.05905, eq. 5, 9 and 18).
Discrete actions use expectations instead of samples (Christodoulou 2019, https://arxiv.org/abs/1910.07207, eq. 10 to
12). `diff sac_continuous.py sac_selfplay.py` shows what self-play adds.

Self-play follows ML-Agents' ghost trainer: the learner plays snapshots of its past selves. A *behaviour* is one policy
with its own optimisers, pool and rating; the *learner* is the one whose turn it is. `utils/matches.py` chooses who
plays, rates the games and takes the snapshots. `docs/selfplay.md` has the rest.

    python sac_selfplay.py
    python sac_selfplay.py --env-id pursuit
    python sac_selfplay.py --env-id sumo --env-kwargs '{"actions": "multidiscrete"}'
    python sac_selfplay.py --evaluate runs/FOLDER --against charge
    python sac_selfplay.py --resume runs/FOLDER

Deviations from ML-Agents:
- Each parallel game has its own opponents, drawn when it begins. All snapshots act in one batched pass.
- A result is credited to the snapshot that played; ML-Agents credits the opponent that plays when the result arrives.
- The outcome is read by one rule (`utils/team_env.py`), so games with any rewards can be rated.
- The newest opponent is the newest snapshot, not the learner itself, so games against it are rated.
- Snapshots that the learner does not beat yet are drawn more often (prioritised fictitious self-play, AlphaStar).
- When the turn passes to another behaviour, all games restart and the previous learner leaves a snapshot.
- Each transition in the replay buffer carries the step at which its oldest opponent was saved. Transitions against
  opponents that have left the pool can be left out (`--replay-opponents window`).
- The value is the mean of both critics, not their minimum (`--critics min`): in a zero-sum game the minimum
  underestimates the learner's value.
- The target entropy is subtracted from the entropy (SACZero). Otherwise the bonus would reward or punish each step.
- With discrete actions values are means over branches, and a target entropy depends on the number of legal actions. As
  in ML-Agents each branch has its own head, entropy coefficient and target entropy.
- At a checkpoint games are reset and random streams reseeded, so a resumed run equals an uninterrupted one.
"""

import copy
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
import torch.nn.functional as F
from torch import Tensor

from utils.cross_play import scripted_players
from utils.evaluation import evaluate_run, initialize, load_policies, load_rivals, play_table, score_policies
from utils.matches import behavior_args, check_games, start_matches
from utils.run import Run, compiled, parse_args, prepare
from utils.team_env import Team, TeamEnv, describe_teams, legal_actions, make_games, next_legal_actions

# === Arguments ========================================================================================================


@dataclass
class Args:
    """SAC with self-play: trains policies for the teams of a game by playing past selves."""

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
    eval_freq: int = 250_000  # game steps between evaluations against the scripted players; 0: only at the end
    eval_games: int = 100  # games against each scripted player in an evaluation; half on either side if symmetric
    cross_play_games: int = 64  # games of each pair in the table of all against all at the end; 0: no table
    cross_play_snapshots: int = 10  # snapshots of each behaviour in that table, from the oldest to the last
    deterministic: bool = True  # evaluate with each policy's most likely actions; --no-deterministic samples
    evaluate: Path | None = None  # do not train: score this run's policy and play its table, or play --against another
    against: str | None = None  # the opponent for --evaluate: another run folder, or the name of a scripted player
    play: bool = False  # with --evaluate: play against the run's policy yourself, at the keyboard
    exploitability: int = 0  # with --evaluate: train best responses for this many game steps, and print their scores
    policy: Literal["last", "uniform", "nash"] = "last"  # what saved runs play: the last snapshot, or a mixture of all
    checkpoint_freq: int = 200_000  # game steps between checkpoints (with resets); 0: only first and last
    resume: Path | None = None  # continue the run of this folder from its last checkpoint, with its arguments

    # --- environment ---
    env_id: str = "sumo"  # sumo, builds, pursuit, a PettingZoo module, or module:Class for a vectorised game
    env_kwargs: str = "{}"  # arguments of the game in JSON, such as {"actions": "discrete"}
    teams: str | None = None  # agents of each team in JSON, such as {"red": ["a_0"], "blue": ["b_0"]}; default: by name
    symmetric: Literal["auto", "yes", "no"] = "auto"  # one policy for all teams; auto: by names, with --teams if alike
    num_games: int = 64  # parallel games

    # --- self-play ---
    save_steps: int = 60_000  # steps of the learner's agents, over all games, between snapshots
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
    replay_opponents: Literal["all", "window"] = "all"  # window: no transitions of opponents that left the pool
    initial_elo: float = 1200.0  # initial rating
    elo_k: float = 16.0  # largest change of a rating in one game

    # --- algorithm ---
    total_timesteps: int = 3_000_000  # game steps of the run, over all games
    buffer_size: int = 1_000_000  # transitions in a behaviour's replay buffer; the oldest are overwritten
    batch_size: int = 256  # transitions in a minibatch
    learning_starts: int = 10_000  # game steps with random actions before a behaviour's first update
    updates_per_step: float = 0.02  # updates per game step: 0.02 is one in fifty steps
    gamma: float = 0.99  # discount factor
    tau: float = 0.02  # step size of the target networks towards the critics
    critics: Literal["mean", "min"] = "mean"  # value of the two critics: their mean or their minimum
    policy_frequency: int = 1  # at every Nth critic update the actor is updated N times
    policy_lr: float = 1e-3  # learning rate of the actor
    q_lr: float = 1e-3  # learning rate of the critics
    alpha_lr: float = 1e-3  # learning rate of the entropy coefficient
    anneal_lr: bool = True  # the learning rates of actor and critics fall linearly to zero over the run
    alpha: float = 0.01  # entropy coefficient: its initial value, or with --no-autotune its fixed value
    autotune: bool = True  # learn the entropy coefficient
    target_entropy_scale: float = 1.0  # Box: the target entropy is minus this times the number of action dimensions
    discrete_target_entropy_scale: float = 0.2  # discrete: target entropy / log(number of legal actions)
    norm_obs: bool = False  # normalise observations by their running mean and standard deviation, clipped to [-10, 10]
    log_freq: int = 10_000  # game steps between points of the training curves


LIMITS = {
    "gamma tau": (0, 1),
    "eval_games num_games": (1, 100_000),
    "batch_size": (1, 10_000_000),
    "total_timesteps buffer_size policy_frequency log_freq": (1, 1e12),
    "eval_freq checkpoint_freq learning_starts updates_per_step": (0, 1e12),
    "policy_lr q_lr alpha_lr target_entropy_scale discrete_target_entropy_scale": (0, 1e12),
    "alpha": (1e-9, 1e9),
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
PER_BEHAVIOR = "batch_size learning_starts updates_per_step gamma tau policy_frequency policy_lr q_lr alpha_lr "
PER_BEHAVIOR += "anneal_lr alpha autotune target_entropy_scale discrete_target_entropy_scale team_change"


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


HIDDEN_SIZES = (128, 128)  # units of the hidden layers of actor and critics


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
        self.action_dim = action_dim
        self.net = mlp(obs_dim, *HIDDEN_SIZES, 2 * action_dim)

    def forward(self, obs: Tensor) -> Tensor:
        """Observations (..., obs_dim) to mean and log standard deviation (..., 2 * action_dim)."""
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        return torch.cat([mean, log_std.clamp(-20.0, 2.0)], dim=-1)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Noise that `sample` takes to draw n actions."""
        return torch.randn((n, self.action_dim), generator=generator).to(next(self.parameters()).device)

    def sample(self, policy: Tensor, masks: Tensor, noise: Tensor | float) -> Tensor:
        """Actions (n, action_dim) from the outputs (n, 2 * action_dim); those of the mean without noise."""
        mean, log_std = policy.chunk(2, dim=-1)
        return (mean + log_std.exp() * noise).tanh()


class CategoricalActor(nn.Module):
    """Policy for Discrete and MultiDiscrete actions: one independent categorical distribution a branch.

    An illegal action has probability zero and adds nothing to the entropy.
    """

    def __init__(self, obs_dim: int, branches: tuple[int, ...]) -> None:
        super().__init__()
        self.branches = list(branches)
        self.logits = mlp(obs_dim, *HIDDEN_SIZES, sum(self.branches))

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

    def forward(self, *inputs: Tensor) -> Tensor:
        """Box: observations and actions (batch_size, ...) to both values (2, batch_size, 1).

        Discrete: observations to both values of each action of each branch (2, batch_size, sum of branches).
        """
        return self.net(torch.cat(inputs, dim=-1).expand(2, -1, -1))


class Agent(nn.Module):
    """What model.pt holds of a behaviour: policy, critics, target networks, alpha and observation statistics."""

    def __init__(self, team: Team, args: Args) -> None:
        super().__init__()
        obs_dim, action_dim, branches = team.obs_dim, team.action_dim, team.branches
        self.norm_obs, self.critics, self.branches = args.norm_obs, args.critics, list(branches)
        self.obs_rms = RunningMeanStd((obs_dim,))
        self.actor = CategoricalActor(obs_dim, branches) if branches else NormalActor(obs_dim, action_dim)
        self.qf = TwinQNetwork(obs_dim, sum(branches)) if branches else TwinQNetwork(obs_dim + action_dim, 1)
        self.log_alpha = nn.Parameter(torch.full((len(branches) or 1,), math.log(args.alpha)))
        self.qf_target = copy.deepcopy(self.qf).requires_grad_(False)

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """The parameters that each optimiser steps."""
        return {"policy": [*self.actor.parameters()], "q": [*self.qf.parameters()], "alpha": [self.log_alpha]}

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations (..., obs_dim) to what the networks take."""
        return self.obs_rms.normalize(obs) if self.norm_obs else obs

    def value(self, qf_values: Tensor) -> Tensor:
        """Both critics' values (2, ...) to their mean or their minimum (...)."""
        return qf_values.mean(0) if self.critics == "mean" else qf_values.amin(0)

    def per_action(self, x: Tensor) -> Tensor:
        """Repeats one number per branch (num_branches,) for each action of the branch: (sum of branches,)."""
        return torch.cat([x[k].expand(size) for k, size in enumerate(self.branches)])

    def per_branch(self, x: Tensor) -> Tensor:
        """Sums over the actions of each branch: (..., sum of branches) to (..., num_branches)."""
        return torch.stack([branch.sum(-1) for branch in x.split(self.branches, dim=-1)], dim=-1)

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


# === Replay buffer ====================================================================================================


class ReplayBuffer:
    """The last `capacity` transitions. Each is one row of `data`, so a minibatch is a single `index_select`.

    `opponents` has the learner step, of its own behaviour, at which the oldest opponent of each transition was saved.
    """

    def __init__(self, capacity: int, team: Team, device: torch.device) -> None:
        num_masks = sum(team.branches)
        self.widths = [team.obs_dim, num_masks, team.action_dim, 1, team.obs_dim, num_masks, 1]
        self.data = torch.empty((capacity, sum(self.widths)), device=device)
        self.opponents = torch.empty(capacity, dtype=torch.int64, device=device)
        self.total = 0  # transitions stored so far: transition i is in row i % capacity
        self.columns = {"rows": self.data, "opponents": self.opponents}  # what checkpoints hold
        self.window = {"first": 0}  # the oldest transition that `leave_out` has left; saved in checkpoints

    @property
    def oldest(self) -> int:
        """The oldest transition that is still there."""
        return max(self.window["first"], self.total - len(self.data))

    def add(self, opponents: np.ndarray, *columns: np.ndarray) -> None:
        """Stores a batch: the step of the oldest opponent (n,), then the columns that `sample` returns (n, ...)."""
        flat = [column.reshape(len(opponents), -1) for column in columns if column.size]
        rows = torch.as_tensor(np.concatenate(flat, axis=1, dtype=np.float32), device=self.data.device)
        self.store(rows, torch.as_tensor(opponents, device=rows.device))

    def store(self, rows: Tensor, opponents: Tensor) -> None:
        """Stores transitions (n, ...) in place of the oldest ones."""
        indices = torch.arange(self.total, self.total + len(rows), device=rows.device) % len(self.data)
        self.data[indices], self.opponents[indices] = rows, opponents
        self.total += len(rows)

    def leave_out(self, before: int) -> None:
        """Drops all transitions whose oldest opponent was saved before this step: the others are stored again."""
        stored = torch.arange(self.oldest, self.total, device=self.data.device) % len(self.data)
        kept = stored[self.opponents[stored] >= before]
        if len(kept) < len(stored):
            self.window["first"] = self.total
            self.store(self.data[kept], self.opponents[kept])

    def sample(self, batch_size: int) -> tuple[Tensor, ...]:
        """Uniformly with replacement: obs, masks, actions, rewards, next_obs, next_masks, terminations."""
        stored = self.oldest + torch.randint(self.total - self.oldest, (batch_size,), device=self.data.device)
        return self.gather(stored % len(self.data))

    def gather(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The transitions in these rows (batch_size,), split as `sample` has them."""
        columns = self.data.index_select(0, indices).split(self.widths, dim=1)
        obs, masks, actions, rewards, next_obs, next_masks, terminations = columns
        return obs, masks.bool(), actions, rewards.squeeze(1), next_obs, next_masks.bool(), terminations.squeeze(1)


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


def target_entropies(agent: Agent, masks: Tensor, args: Args) -> Tensor:
    """Discrete: (batch_size, num_branches) from the number of legal actions; Box: (1,)."""
    if isinstance(agent.actor, CategoricalActor):
        return args.discrete_target_entropy_scale * agent.per_branch(masks.float()).clamp_min(1.0).log()
    return torch.full((1,), -args.target_entropy_scale * agent.actor.action_dim, device=masks.device)


@torch.no_grad()
def compute_td_target(
    agent: Agent, rewards: Tensor, next_obs: Tensor, next_masks: Tensor, terminations: Tensor, noise: Tensor, args: Args
) -> Tensor:
    """The critics' regression target (batch_size,): reward plus discounted soft value of the next state (eq. 2, 3).

    Discrete: the exact expectation over actions, averaged over branches (2019, eq. 10). Entropy counts relative to its
    target, so that its mean is near zero (Yu, Zhang and Xu 2022, https://arxiv.org/abs/2201.12434, SACZero).
    """
    policy, alpha = agent.actor(next_obs), agent.log_alpha.exp()
    if isinstance(agent.actor, CategoricalActor):
        log_probs = agent.actor.log_probs(policy, next_masks)
        soft_values = agent.value(agent.qf_target(next_obs)) - agent.per_action(alpha) * log_probs
        next_values = agent.per_branch(log_probs.exp() * soft_values).mean(-1)
    else:
        mean, log_std = policy.chunk(2, dim=-1)
        next_actions, next_log_prob = sample_actions(mean, log_std, noise)
        next_values = agent.value(agent.qf_target(next_obs, next_actions)).squeeze(-1) - alpha * next_log_prob
    next_values = next_values - (alpha * target_entropies(agent, next_masks, args)).mean(-1)
    return rewards + args.gamma * (1.0 - terminations) * next_values


def compute_qf_loss(agent: Agent, obs: Tensor, actions: Tensor, td_target: Tensor) -> tuple[Tensor, Metrics]:
    """Mean squared Bellman error, summed over the critics (eq. 5, without its factor 1/2).

    Discrete: the value of an action is the mean over branches of the values of its parts.
    """
    if agent.branches:
        offsets = torch.tensor([0, *agent.branches[:-1]], device=obs.device).cumsum(0)
        all_values, chosen = agent.qf(obs), (actions.long() + offsets)[None]
        qf_values = all_values.gather(-1, chosen.expand(len(all_values), -1, -1)).mean(-1)  # (2, batch_size)
    else:
        qf_values = agent.qf(obs, actions).squeeze(-1)  # (2, batch_size)
    qf_losses = (qf_values - td_target).square().mean(1)
    metrics = {"losses/qf1_loss": qf_losses[0], "losses/qf2_loss": qf_losses[1]}
    metrics |= {"losses/qf1_values": qf_values[0].mean(), "losses/qf2_values": qf_values[1].mean()}
    return qf_losses.sum(), metrics


def compute_actor_loss(agent: Agent, obs: Tensor, masks: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Metrics]:
    """The policy's loss (eq. 9; 2019, eq. 12), and its entropies (batch_size, 1 or num_branches)."""
    policy, alpha = agent.actor(obs), agent.log_alpha.exp().detach()
    if isinstance(agent.actor, CategoricalActor):
        log_probs = agent.actor.log_probs(policy, masks)
        soft_costs = agent.per_action(alpha) * log_probs - agent.value(agent.qf(obs)).detach()
        actor_loss = agent.per_branch(log_probs.exp() * soft_costs).mean()
        entropies = -agent.per_branch(log_probs.exp() * log_probs)
        metrics = {}
    else:
        mean, log_std = policy.chunk(2, dim=-1)
        actions, log_prob = sample_actions(mean, log_std, noise)
        actor_loss = (alpha * log_prob - agent.value(agent.qf(obs, actions)).squeeze(-1)).mean()
        entropies = -log_prob[:, None]  # an estimate from one action
        metrics = {"losses/policy_std": log_std.exp().mean(), "losses/action_magnitude": actions.abs().mean()}
        metrics["losses/policy_mean"] = mean.mean()
    metrics |= {"losses/actor_loss": actor_loss, "losses/entropy": entropies.sum(-1).mean()}
    return actor_loss, entropies, metrics


def compute_alpha_loss(agent: Agent, entropies: Tensor, targets: Tensor) -> tuple[Tensor, Metrics]:
    """The entropy coefficients' loss: raises one while its entropy is below its target (eq. 18; 2019, eq. 11)."""
    alpha_loss = (agent.log_alpha.exp() * (entropies.detach() - targets)).mean()
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
    obs, _, actions, rewards, next_obs, next_masks, terminations = batch
    obs, next_obs = agent.normalize(obs), agent.normalize(next_obs)
    td_target = compute_td_target(agent, rewards, next_obs, next_masks, terminations, noise, args)
    loss, metrics = compute_qf_loss(agent, obs, actions, td_target)
    gradient = compute_gradient(loss, agent.groups()["q"])
    metrics["losses/qf_grad_norm"] = gradient.norm()
    return gradient, {name: value.detach() for name, value in metrics.items()}


def compute_actor_gradient(
    agent: Agent, batch: Batch, noise: Tensor, args: Args
) -> tuple[Tensor, Tensor | None, Metrics]:
    """The gradients of the actor and, with --autotune, of alpha. The critics' parameters get no gradient here."""
    obs, masks = batch[:2]
    actor_loss, entropies, metrics = compute_actor_loss(agent, agent.normalize(obs), masks, noise)
    gradient = compute_gradient(actor_loss, agent.groups()["policy"])
    metrics["losses/actor_grad_norm"] = gradient.norm()
    alpha_gradient = None
    if args.autotune:
        alpha_loss, alpha_metrics = compute_alpha_loss(agent, entropies, target_entropies(agent, masks, args))
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
    actions = batch[2]
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
    metrics["losses/alpha"] = agent.log_alpha.detach().exp().mean()
    return metrics


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
    stride = args.num_games  # game steps of an iteration
    total_steps = -(-args.total_timesteps // stride) * stride  # rounded up to whole iterations
    agents = {team.behavior: Agent(team, all_args[team.behavior]).to(device) for team in env.teams}
    initialize(agents, all_args, load_run)
    learning_rates = {b: {"policy": own.policy_lr, "q": own.q_lr, "alpha": own.alpha_lr} for b, own in all_args.items()}
    all_optimizers = {
        b: {name: Adam(group, learning_rates[b][name], 0.9, 0.999, 1e-8) for name, group in agent.groups().items()}
        for b, agent in agents.items()
    }
    buffers = {b: ReplayBuffer(args.buffer_size, t, device) for b, t in {t.behavior: t for t in env.teams}.items()}

    # --- pools and ratings ---
    matches = start_matches(all_args, env, agents, total_steps, stride, load_rivals(args, load_run, env))
    print(describe_teams(env))
    game_steps, num_updates = dict.fromkeys(agents, 0), dict.fromkeys(agents, 0)

    model = {"agent": agents, "pool": matches.pools}
    rest = {"optimizer": all_optimizers, "matches": matches, "game_steps": game_steps, "num_updates": num_updates}
    rest["window"] = {behavior: buffer.window for behavior, buffer in buffers.items()}
    hint = "--against", scripted_players(env)[-1].name, "--capture-video"  # for the command printed at the end
    with Run(args, env, total_steps, stride, model=model, rest=rest, buffers=buffers, evaluate_with=hint) as run:
        gradient_fns = PLAIN
        for behavior, buffer in buffers.items() if args.compile else ():
            batch = buffer.gather(torch.zeros(all_args[behavior].batch_size, dtype=torch.int64, device=device))
            example = agents[behavior], batch, torch.zeros_like(batch[2]), all_args[behavior]
            # one pair of functions for all behaviours: each call adds the shapes of one
            gradient_fns = compiled(gradient_fns[0], *example), compiled(gradient_fns[1], *example)
        # `run.steps()` yields the number of steps taken so far, and a seed where episodes begin anew. Between two
        # iterations it writes the checkpoints, and after the last one model.pt.
        for global_step, seed in run.steps():
            learner, own = matches.learner, all_args[matches.learner]
            agent, optimizers, buffer = agents[learner], all_optimizers[learner], buffers[learner]
            if seed is not None:  # at the start, after each checkpoint and each change of turn
                matches.begin_anew(seed)
                obs = env.reset(seed)
                run.check(global_step, observation=obs)
                update_metrics: Metrics = {}
            if own.anneal_lr:
                for name in ("policy", "q"):
                    optimizers[name].lr = learning_rates[learner][name] * (1.0 - global_step / total_steps)

            # act and step
            learner_obs, valid = matches.of_learner(obs), matches.of_learner(env.alive)
            masks = matches.of_learner([legal_actions(env, i) for i in range(len(env.teams))])
            if args.norm_obs and valid.any():
                agent.obs_rms.update(torch.as_tensor(learner_obs[valid], device=device))
            if game_steps[learner] < own.learning_starts:
                actions = matches.of_learner([env.scripted_actions("random", i) for i in range(len(env.teams))])
            else:
                actions = agent.act(learner_obs, masks, agent.actor.noise(len(learner_obs)))
            result = env.step(matches.all_actions(env, agents, obs, actions))
            result, cut = matches.cut_games(result)  # so that the first games after a reset do not run in lockstep
            global_step += stride  # now the number of steps after this iteration
            run.check(global_step, observation=[*result.obs, *result.final_obs], reward=result.rewards)
            game_steps[learner] += args.num_games
            matches.learner_steps[learner] += int(valid.sum())

            # store
            next_masks = [next_legal_actions(env, i, result.over) for i in range(len(env.teams))]
            led_to = map(matches.of_learner, (result.rewards, result.final_obs, next_masks, result.terminations))
            opponents = matches.opponent_steps().repeat(len(valid) // args.num_games)
            if valid.any():
                buffer.add(opponents[valid], *(column[valid] for column in (learner_obs, masks, actions, *led_to)))

            # rate, next opponents
            max_age = (game_steps[learner] - own.learning_starts) / args.num_games  # older games had random actions
            obs = matches.finish_games(env, result, cut, max_age)

            # update
            num_due = int(own.updates_per_step * (game_steps[learner] - own.learning_starts))
            while buffer.total > buffer.oldest and num_updates[learner] < num_due:  # `leave_out` may leave nothing
                batch = buffer.sample(own.batch_size)
                update_metrics |= update(agent, optimizers, batch, own, num_updates[learner], gradient_fns)
                num_updates[learner] += 1

            # snapshot (`end_turn` tells if it took one), change of turn; old opponents leave the next learner's buffer
            if matches.end_turn(agents, global_step, args.save_steps) and args.replay_opponents == "window":
                buffers[matches.learner].leave_out(matches.oldest_opponent())
            if matches.learner != learner:
                run.begin_anew()  # the games of the next learner begin with a reset and a seed, as after a checkpoint

            # log and evaluate
            if run.due(args.log_freq, args.checkpoint_freq, args.eval_freq):  # before a checkpoint or an evaluation
                metrics = {name: value.item() for name, value in update_metrics.items()}
                run.check(**metrics)
                metrics |= {f"charts/{name}_lr": optimizer.lr for name, optimizer in optimizers.items()}
                metrics |= matches.metrics() | {"charts/learner": float(list(agents).index(learner))}
                run.log(metrics, global_step)
            if run.due(args.eval_freq) and global_step < total_steps:
                run.log(evaluate(agents, args), global_step)
        run.log(evaluate(agents, args, run.folder if args.capture_video else None), total_steps)
        play_table(args, make_env, agents, matches.pools, run.folder, run)
    return run.folder


if __name__ == "__main__":
    main(parse_args(Args))
