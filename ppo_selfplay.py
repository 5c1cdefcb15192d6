"""PPO with self-play: one file, any game between teams, symmetric or asymmetric.

The algorithm is that of `ppo_continuous.py` (Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7 and 9; Schulman et
al. 2016, https://arxiv.org/abs/1506.02438, eq. 16); `diff ppo_continuous.py ppo_selfplay.py` shows what self-play adds. It
follows ML-Agents' ghost trainer: the learner plays past selves, each a snapshot of its policy, and roles learn in turns.

    python ppo_selfplay.py
    python ppo_selfplay.py --env-id pursuit
    python ppo_selfplay.py --env-id mpe2.simple_push_v3 --env-kwargs '{"continuous_actions": true}' --num-games 16
    python ppo_selfplay.py --evaluate runs/FOLDER --against charge
    python ppo_selfplay.py --resume runs/FOLDER

What differs from that reference, and why:
- Each of many parallel games has its own opponents, drawn when it begins and kept until it ends; all act in one batched forward
  pass. The reference has one opponent at a time for all of its environments.
- A result is credited to the snapshot that played. The reference credits the one that plays when the result comes in.
- The outcome is read by one rule (see `utils/team_env.py`), so that games rate whose rewards are not +1 and -1.
- The newest opponent is the newest snapshot, and not the learner itself: so every game is rated.
- Older snapshots that the learner does not beat yet are drawn more often (AlphaStar's prioritised fictitious self-play). The
  reference draws uniformly; in sumo such runs take 0.31 of the points from these, and runs without a pool 0.55.
- When the turn passes to another role all games begin anew, and the role whose turn ended leaves a snapshot of its last self.
- Discrete and MultiDiscrete actions, with masks of legal ones: one categorical distribution a branch, their log-probabilities
  summed. There is no host of one network for all roles: each role has its own policy, optimiser, pool and rating.
- At a checkpoint all games and all random streams begin anew, by seeds of that step: a run that was killed and resumed equals,
  bit for bit on the CPU, the one that was not.
"""

import io
import itertools
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO

import numpy as np
import torch
import torch.nn as nn
import tyro
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from utils.cross_play import CrossPlay, Player, cross_play, pairs_with_others, play_pairs, record_video, scripted_players
from utils.elo import score_interval
from utils.matches import Matches
from utils.snapshot_pool import SnapshotPool
from utils.team_env import TaskError, Team, TeamEnv, legal_actions, make_team_env

# === Arguments ========================================================================================================


@dataclass
class Args:
    """PPO with self-play: trains policies for the teams of a game by playing past selves."""

    # --- experiment ---
    exp_name: str = Path(__file__).stem
    """name of the experiment, a part of the run folder's name"""
    seed: int = 1
    """seed of the networks, the exploration, the minibatches, the opponents and the games"""
    torch_deterministic: bool = True
    """use only deterministic cuDNN algorithms"""
    cuda: bool = True
    """use the GPU if there is one"""
    compile: bool = True
    """compile the update: it starts some seconds later, more on the first run of a machine, and each step is faster"""
    track: bool = False
    """log to Weights & Biases too (WANDB_MODE=offline works without an account)"""
    wandb_project_name: str = "self-play"
    """W&B project"""
    wandb_entity: str | None = None
    """W&B team or user; the account's default if not given"""
    capture_video: bool = False
    """record a game of the final policy against its best scripted opponent into videos/ of the run folder"""
    save_model: bool = True
    """write model.pt with the last snapshots into the run folder at the end"""
    eval_freq: int = 500_000
    """game steps between two evaluations against the scripted players; 0 evaluates only at the end"""
    eval_games: int = 100
    """games against each scripted player in an evaluation, half of them on either side"""
    cross_play_games: int = 64
    """games of each pair in the table of all against all at the end; 0 leaves it out"""
    cross_play_snapshots: int = 10
    """snapshots of each behaviour in that table, from the oldest in the pool to the last, evenly spaced"""
    deterministic: bool = True
    """play others by each policy's likeliest actions; where being predictable loses, --no-deterministic samples them"""
    evaluate: Path | None = None
    """do not train: play the snapshots of this run folder against each other, or its last policy --against another"""
    against: str | None = None
    """the opponent for --evaluate: another run folder, or the name of a scripted player"""
    checkpoint_freq: int = 500_000
    """game steps between two checkpoints, at which all games begin anew; 0 writes only the first and the last"""
    resume: Path | None = None
    """go on with the run of this folder, from its last checkpoint and with its arguments"""

    # --- environment ---
    env_id: str = "sumo"
    """sumo, pursuit, or a module with PettingZoo's parallel_env or env, installed or in the working folder"""
    env_kwargs: str = "{}"
    """arguments of the game in JSON, such as {"actions": "discrete"}"""
    teams: str | None = None
    """agents of each team in JSON, such as {"red": ["a_0", "a_1"], "blue": ["b_0"]}; else names of agents tell the teams"""
    symmetric: Literal["auto", "yes", "no"] = "auto"
    """whether all teams share one policy; auto goes by the names of agents, or for given --teams by their spaces"""
    num_games: int = 256
    """games that are stepped together"""

    # --- self-play ---
    save_steps: int = 200_000
    """learner's steps between two snapshots"""
    window: int = 50
    """snapshots that the pool holds; the oldest one leaves it"""
    play_against_latest_model_ratio: float = 0.5
    """probability that an opponent is the newest snapshot; 1 is self-play without a pool"""
    opponent_sampling: Literal["uniform", "prioritized"] = "prioritized"
    """how it is drawn otherwise: more often one that the learner does not beat yet, or uniformly from the pool"""
    swap_steps: int = 0
    """steps of opponents' agents, over all games, that a game keeps its opponents for; 0 draws new ones for each game"""
    swaps_per_turn: float | None = None
    """sets swap_steps so that opponents change this many times in team_change learner's steps"""
    team_change: int = 500_000
    """learner's steps of a turn, after which the next role learns; for games whose teams have policies of their own"""
    learner_side: str | None = None
    """name of the only team that the learner plays on; all teams that share its policy in turn if not given"""
    initial_elo: float = 1200.0
    """rating to begin with"""
    elo_k: float = 16.0
    """the largest change of a rating in one game"""

    # --- algorithm ---
    total_timesteps: int = 10_000_000
    """game steps of the whole run, over all games"""
    learning_rate: float = 1e-3
    """Adam's learning rate"""
    adam_beta1: float = 0.9
    """decay of Adam's mean of gradients"""
    adam_beta2: float = 0.999
    """decay of its mean of squared gradients; if it equals adam_beta1, no step moves a parameter by more than the rate"""
    num_steps: int = 64
    """steps of a rollout in each game"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero over the run"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalised advantage estimation: 0 is one-step TD, 1 is Monte Carlo"""
    num_minibatches: int = 8
    """minibatches that a rollout is split into"""
    update_epochs: int = 4
    """passes over a rollout"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch to mean 0 and standard deviation 1"""
    norm_obs: bool = True
    """normalise observations by their running mean and standard deviation, and clip them to [-10, 10]"""
    norm_reward: bool = True
    """divide rewards by the running standard deviation of the discounted return, and clip them to [-10, 10]"""
    clip_coef: float = 0.2
    """how far the probability ratio may leave 1 before its gradient is cut (epsilon of eq. 7)"""
    clip_vloss: bool = True
    """clip the value loss in the same way"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of the gradient of actor and critic together"""
    target_kl: float | None = None
    """skip an iteration's remaining epochs once an epoch's mean KL divergence exceeds this"""
    log_std_init: float = 0.0
    """initial log standard deviation of the policy for Box actions, in units where the action range is [-1, 1]"""

    @property
    def batch_size(self) -> int:
        """Game steps of a rollout over all games."""
        return self.num_games * self.num_steps

    @property
    def minibatch_size(self) -> int:
        """Game steps of a minibatch."""
        return self.batch_size // self.num_minibatches

    @property
    def num_iterations(self) -> int:
        """Rollouts of the run; the last one may exceed total_timesteps."""
        return -(-self.total_timesteps // self.batch_size)


def fail(message: str) -> NoReturn:
    """Ends the program before it trains: one sentence on standard error, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_args(args: Args) -> None:
    """Refuses what no run can use, in one sentence that names the flag and what it takes."""
    limits: list[tuple[float, float, str]] = [
        (0, 1, "gamma gae_lambda play_against_latest_model_ratio"),
        (0, 0.9999, "adam_beta1 adam_beta2"),
        (1, 1e12, "eval_games num_games total_timesteps num_steps num_minibatches update_epochs save_steps team_change"),
        (0, 1e12, "eval_freq checkpoint_freq cross_play_games swap_steps learning_rate clip_coef ent_coef vf_coef"),
        (0, 1e12, "max_grad_norm target_kl"),
        (1, 10_000, "window cross_play_snapshots"),
        (1e-9, 1e12, "swaps_per_turn"),
        (0, 2**31, "seed"),
        (0, 1e4, "elo_k"),
        (-1e6, 1e6, "initial_elo"),
        (-20, 2, "log_std_init"),
    ]
    for low, high, names in limits:
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not low <= value <= high:  # NaN fails this, too
                fail(f"--{name.replace('_', '-')} takes a number from {low:g} to {high:g}, not {value}")
    if args.batch_size % args.num_minibatches != 0 or args.minibatch_size < 2:
        rule = f"a divisor of num_games * num_steps = {args.batch_size} that leaves two steps or more to a minibatch"
        fail(f"--num-minibatches takes {rule}, not {args.num_minibatches}")
    if args.against is not None and args.evaluate is None:
        fail("--against takes --evaluate RUN_FOLDER besides, the run whose policy it is to play")
    if args.swap_steps and args.swaps_per_turn is not None:
        fail("--swaps-per-turn takes the place of --swap-steps: give one of the two")
    for flag, package in (("track", "wandb"), ("capture_video", "moviepy")):
        if getattr(args, flag) and find_spec(package) is None:
            fail(f"--{flag.replace('_', '-')} needs the package {package}: pip install {package}")
    if args.track and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        try:
            is_logged_in = wandb.login(prompt=False)
        except wandb.Error as error:
            fail(f"--track cannot log in to W&B: {' '.join(str(error).split())}")
        if not is_logged_in:
            fail("--track takes a W&B account: log in with `wandb login`, or set WANDB_MODE=offline")


MAY_CHANGE = {  # of a run's own arguments
    "resume": ("total_timesteps", "cuda", "compile", "track", "wandb_project_name", "wandb_entity", "capture_video"),
    "evaluate": ("seed", "eval_games", "cross_play_games", "cross_play_snapshots", "deterministic", "against", "capture_video"),
}
OFF_IN_EVALUATION = ("track", "capture_video")  # unless the command line says so


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line's arguments; with --resume or --evaluate they are those of the run, and few of them may change."""
    args = tyro.cli(Args, args=argv)
    flag, folder = ("resume", args.resume) if args.resume is not None else ("evaluate", args.evaluate)
    if folder is None:
        return args
    changes: dict[str, Any] = {flag: folder} | dict.fromkeys(OFF_IN_EVALUATION if flag == "evaluate" else (), False)
    try:
        run_args = Args(**json.loads((folder / "args.json").read_text()) | changes)
    except (OSError, ValueError, TypeError) as error:
        fail(f"--{flag} takes a run folder with the args.json of this script, and {folder} has none ({error})")
    args = tyro.cli(Args, args=argv, default=run_args)
    for name, value in vars(run_args).items():
        if getattr(args, name) != value and name not in MAY_CHANGE[flag]:
            own = f"it is {value} there, and {getattr(args, name)} was given"
            fail(f"--{name.replace('_', '-')} takes the run's own value with --{flag}: {own}")
    return args


# === Environments =====================================================================================================


def parse_json(flag: str, text: str, example: str) -> dict[str, Any]:
    """The JSON object that a flag was given."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        fail(f"--{flag} takes a JSON object such as {example}, not {text} ({error})")
    if not isinstance(value, dict):
        fail(f"--{flag} takes a JSON object such as {example}, not {text}")
    return value


def make_env(args: Args, num_games: int, render: bool = False) -> TeamEnv:
    """`num_games` games that step together. Exits with one sentence if there is no such game or teams cannot play it."""
    env_kwargs = parse_json("env-kwargs", args.env_kwargs, '{"actions": "discrete"}')
    example = '{"red": ["a_0"], "blue": ["b_0"]}'
    teams = None if args.teams is None else parse_json("teams", args.teams, example)
    for agents in (teams or {}).values():
        if not isinstance(agents, list) or not all(isinstance(agent, str) for agent in agents):
            fail(f"--teams takes lists of names such as {example}, not {args.teams}")
    symmetric = {"auto": None, "yes": True, "no": False}[args.symmetric]
    try:
        env = make_team_env(args.env_id, num_games, env_kwargs, teams, symmetric, render)
    except ValueError as error:
        fail(f"--env-id {error}")
    roles = list(dict.fromkeys(team.behavior for team in env.teams))
    if len(roles) > 2:
        fail(f"--env-id takes a game of two roles at most, and {args.env_id} has {', '.join(roles)}: see --teams")
    if args.learner_side not in (None, *(team.name for team in env.teams)):
        fail(f"--learner-side takes one of {', '.join(team.name for team in env.teams)}, not {args.learner_side}")
    return env


# === Networks =========================================================================================================


class RunningMeanStd(nn.Module):
    """Mean and variance of all that a stream has brought so far, of any shape; a part of the model, saved with it.

    Merges the moments of two samples as in Chan, Golub and LeVeque 1983 ("Algorithms for computing the sample variance").
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...] = (), epsilon: float = 1e-8) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, x: Tensor) -> None:
        """Takes in a batch (n, *shape)."""
        x = x.double()
        total = self.count + len(x)
        delta = x.mean(0) - self.mean
        squares = self.var * self.count + x.var(0, correction=0) * len(x) + delta**2 * self.count * len(x) / total
        self.mean += delta * len(x) / total
        self.var.copy_(squares / total)
        self.count.copy_(total)

    @property
    def std(self) -> Tensor:
        """Standard deviation, never zero."""
        return (self.var + self.epsilon).sqrt()

    def normalize(self, x: Tensor) -> Tensor:
        """(..., *shape) to mean 0 and standard deviation 1, within [-10, 10]."""
        return ((x - self.mean) / self.std).clamp(-10.0, 10.0).float()


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
    """Normal policy for Box actions: its mean depends on the observation, its log standard deviation does not."""

    def __init__(self, team: Team, log_std_init: float) -> None:
        super().__init__()
        self.mean = mlp(team.obs_dim, 64, 64, team.action_dim, output_gain=0.01)
        self.log_std = nn.Parameter(torch.full((team.action_dim,), log_std_init))

    def forward(self, obs: Tensor) -> Tensor:
        """Observations (..., obs_dim) to the mean and the log standard deviation (..., 2 * action_dim)."""
        mean = self.mean(obs)
        return torch.cat([mean, self.log_std.expand_as(mean)], dim=-1)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """What `sample` takes to draw n actions."""
        return torch.randn((n, len(self.log_std)), generator=generator).to(self.log_std.device)

    def sample(self, policy: Tensor, masks: Tensor, noise: Tensor | float) -> Tensor:
        """Actions (n, action_dim) of the outputs (n, 2 * action_dim); the likeliest ones without noise."""
        mean, log_std = policy.chunk(2, dim=-1)
        return mean + log_std.exp() * noise

    def log_prob(self, policy: Tensor, masks: Tensor, actions: Tensor) -> Tensor:
        """Log-density (n,) of actions (n, action_dim)."""
        mean, log_std = policy.chunk(2, dim=-1)
        z = (actions - mean) / log_std.exp()
        return (-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, policy: Tensor, masks: Tensor) -> Tensor:
        """Entropy (n,) in nats."""
        return (policy.chunk(2, dim=-1)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


class CategoricalActor(nn.Module):
    """Policy for Discrete and MultiDiscrete actions: a categorical distribution for each branch, independent of each other.

    An illegal action has probability zero and adds nothing to the entropy.
    """

    def __init__(self, team: Team) -> None:
        super().__init__()
        self.branches = list(team.branches)
        self.logits = mlp(team.obs_dim, 64, 64, sum(self.branches), output_gain=0.01)

    def forward(self, obs: Tensor) -> Tensor:
        """Observations (..., obs_dim) to the logits of all branches (..., sum of branches)."""
        return self.logits(obs)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """What `sample` takes to draw n actions: Gumbel noise."""
        uniform = torch.rand((n, sum(self.branches)), generator=generator).clamp_min(1e-20)
        return -(-uniform.log()).log().to(next(self.parameters()).device)

    def sample(self, policy: Tensor, masks: Tensor, noise: Tensor | float) -> Tensor:
        """Actions (n, num_branches) of the logits (n, sum of branches) by the Gumbel-max trick; the likeliest without noise."""
        branches = (policy + noise).masked_fill(~masks, -math.inf).split(self.branches, dim=-1)
        return torch.stack([branch.argmax(-1) for branch in branches], dim=-1)

    def log_probs(self, policy: Tensor, masks: Tensor) -> list[Tensor]:
        """Log-probabilities (n, branch) of all actions, a branch an item; those of illegal ones are -1e9 or less."""
        return [branch.log_softmax(-1) for branch in policy.masked_fill(~masks, -1e9).split(self.branches, dim=-1)]

    def log_prob(self, policy: Tensor, masks: Tensor, actions: Tensor) -> Tensor:
        """Log-probability (n,) of actions (n, num_branches)."""
        chosen = zip(self.log_probs(policy, masks), actions.split(1, dim=-1), strict=True)
        return torch.cat([log_probs.gather(-1, action) for log_probs, action in chosen], dim=-1).sum(-1)

    def entropy(self, policy: Tensor, masks: Tensor) -> Tensor:
        """Entropy (n,) in nats, summed over branches."""
        log_probs = torch.cat(self.log_probs(policy, masks), dim=-1)
        return -(log_probs.exp() * log_probs).sum(-1)


class Agent(nn.Module):
    """All that is learned for a behaviour, and so all that is saved: policy, value function and statistics."""

    def __init__(self, team: Team, args: Args) -> None:
        super().__init__()
        self.norm_obs, self.norm_reward = args.norm_obs, args.norm_reward
        self.obs_rms = RunningMeanStd((team.obs_dim,))
        self.return_rms = RunningMeanStd()
        self.actor = CategoricalActor(team) if team.branches else NormalActor(team, args.log_std_init)
        self.critic = mlp(team.obs_dim, 64, 64, 1, output_gain=1.0)

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations (..., obs_dim) to what the networks take."""
        return self.obs_rms.normalize(obs) if self.norm_obs else obs

    def scale_reward(self, rewards: Tensor) -> Tensor:
        """Raw rewards to what the advantages are computed from."""
        return (rewards / self.return_rms.std).clamp(-10.0, 10.0).float() if self.norm_reward else rewards

    def forward(self, obs: Tensor) -> Tensor:
        """Raw observations (n, obs_dim) to the parameters of the policy (n, ...)."""
        return self.actor(self.normalize(obs))

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """What it takes to draw n actions."""
        return self.actor.noise(n, generator)

    def sample(self, policy: Tensor, masks: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """Actions (n, action_dim) of the policy's parameters (n, ...); the likeliest ones without noise."""
        return self.actor.sample(policy, masks, noise)

    def acting_weights(self) -> dict[str, Tensor]:
        """The part of the state dict that acts: all that a snapshot needs."""
        return {name: value for name, value in self.state_dict().items() if name.startswith(("actor.", "obs_rms."))}

    @torch.no_grad()
    def act(self, obs: np.ndarray, masks: np.ndarray, noise: Tensor | float = 0.0) -> np.ndarray:
        """Raw observations (n, obs_dim) to actions (n, action_dim); deterministic without noise."""
        device = self.obs_rms.mean.device
        policy = self(torch.as_tensor(obs, dtype=torch.float32, device=device))
        return self.sample(policy, torch.as_tensor(masks, device=device), noise).cpu().numpy()


# === Generalised advantage estimation =================================================================================


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminations: Tensor, dones: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Advantages (num_steps, num_envs) of a rollout; all tensors have that shape (Schulman et al. 2016, eq. 16).

    next_values are the values of the observations that the steps led to, before any reset. A termination (1.0) takes their
    place by zero; a done, which is a termination or a truncation, only stops the trace from running on into the next episode.
    """
    deltas = rewards + gamma * (1.0 - terminations) * next_values - values
    decays = gamma * gae_lambda * (1.0 - dones)
    advantages, advantage = [], torch.zeros_like(deltas[0])
    for delta, decay in zip(deltas.flip(0), decays.flip(0), strict=True):  # from the last step to the first
        advantage = torch.addcmul(delta, decay, advantage)
        advantages.append(advantage)
    return torch.stack(advantages).flip(0)


# === Losses and update ================================================================================================

Metrics = dict[str, Tensor]


def compute_policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_coef: float) -> tuple[Tensor, Metrics]:
    """Clipped surrogate objective, negated (eq. 7); all tensors (minibatch_size,)."""
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


def compute_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float | None) -> tuple[Tensor, Metrics]:
    """Half the mean squared error, optionally of the worse of new and clipped values; all tensors (minibatch_size,)."""
    errors = (values - returns) ** 2
    if clip_coef is not None:
        clipped_values = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (clipped_values - returns) ** 2)
    loss = 0.5 * errors.mean()
    return loss, {"losses/value_loss": loss}


def make_optimizer(
    parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> torch.optim.Adam:
    """Adam on one vector, of which the parameters become views: a step is one operation, however many layers there are."""
    parameters = list(parameters)
    vector = torch.cat([x.detach().flatten() for x in parameters])
    for parameter, chunk in zip(parameters, vector.split([x.numel() for x in parameters]), strict=True):
        parameter.data = chunk.view_as(parameter)
    optimizer = torch.optim.Adam([vector], lr=lr, betas=betas, eps=eps, fused=True)
    optimizer.state[vector] = {"step": torch.zeros((), device=vector.device)}
    optimizer.state[vector] |= {name: torch.zeros_like(vector) for name in ("exp_avg", "exp_avg_sq")}
    return optimizer


def compute_gradient(loss: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """The gradient of these parameters, and of no others, as one vector."""
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(parameters))])


def gradient_step(optimizer: torch.optim.Optimizer, gradient: Tensor) -> None:
    """Steps the parameters of an optimiser from `make_optimizer` by their gradient (Kingma and Ba 2015, algorithm 1).

    `optimizer.step()` computes the same by the same operation, and takes ten times as long to come to it.
    """
    group = optimizer.param_groups[0]
    (vector,) = group["params"]
    mean, square, step = (optimizer.state[vector][name] for name in ("exp_avg", "exp_avg_sq", "step"))
    step += 1
    settings: dict[str, Any] = {name: group[name] for name in ("lr", "eps", "weight_decay", "amsgrad", "maximize")}
    beta1, beta2 = group["betas"]
    torch._fused_adam_([vector], [gradient], [mean], [square], [], [step], beta1=beta1, beta2=beta2, **settings)


def compute_update_gradient(agent: Agent, minibatch: tuple[Tensor, ...], args: Args) -> tuple[Tensor, Metrics]:
    """Gradient of eq. 9, with the value loss halved and the entropy of the whole policy, as one vector; clipped."""
    mb_obs, mb_masks, mb_actions, mb_log_prob, mb_advantages, mb_returns, mb_values = minibatch
    if args.norm_adv:
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
    policy = agent.actor(mb_obs)
    log_prob = agent.actor.log_prob(policy, mb_masks, mb_actions)
    entropy = agent.actor.entropy(policy, mb_masks).mean()
    policy_loss, policy_metrics = compute_policy_loss(log_prob, mb_log_prob, mb_advantages, args.clip_coef)
    values, value_clip = agent.critic(mb_obs).squeeze(-1), args.clip_coef if args.clip_vloss else None
    value_loss, value_metrics = compute_value_loss(values, mb_values, mb_returns, value_clip)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss

    gradient = compute_gradient(loss, agent.parameters())
    grad_norm = gradient.norm()
    metrics = policy_metrics | value_metrics | {"losses/entropy": entropy, "losses/grad_norm": grad_norm}
    gradient = gradient * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    return gradient, {name: value.detach() for name, value in metrics.items()}


def compile_update(agents: Mapping[str, Agent], teams: Sequence[Team], args: Args) -> None:
    """Puts a compiled form in the place of the gradient's function; where that fails, says so and leaves it."""
    global compute_update_gradient
    began = time.perf_counter()
    torch._dynamo.config.trace_autograd_ops = True  # or torch.autograd.grad would not be compiled
    torch._inductor.config.cpp.vec_isa_ok = True  # or some processes would find out each time what the compiler can do
    torch._inductor.config.cpp_wrapper = not (args.cuda and torch.cuda.is_available())  # calls from C++, not from Python
    compiled = torch.compile(compute_update_gradient)
    try:
        for team in {team.behavior: team for team in teams}.values():
            agent, rows = agents[team.behavior], args.minibatch_size * len(team.agents)
            zeros = partial(torch.zeros, device=agent.obs_rms.mean.device)
            masks = zeros((rows, sum(team.branches)), dtype=torch.bool)
            actions = zeros((rows, team.action_dim), dtype=torch.int64 if team.branches else torch.float32)
            compiled(agent, (zeros((rows, team.obs_dim)), masks, actions, *(zeros(rows) for _ in range(4))), args)
    except RuntimeError as error:  # no C++ compiler, say
        print(f"warning: the update is slow, for it cannot be compiled: {str(error).splitlines()[0]}", file=sys.stderr)
        return
    compute_update_gradient = compiled
    print(f"compiled the update in {time.perf_counter() - began:.1f} s; PyTorch keeps it on disk for the next run")


def update(agent: Agent, optimizer: torch.optim.Optimizer, minibatch: tuple[Tensor, ...], args: Args) -> Metrics:
    """One gradient step on a minibatch: obs, masks, actions, log-probabilities, advantages, returns, values, a row each."""
    gradient, metrics = compute_update_gradient(agent, minibatch, args)
    gradient_step(optimizer, gradient)
    return metrics


# === Evaluation =======================================================================================================


def evaluate(agents: Mapping[str, Agent], args: Args, folder: Path, capture_video: bool = False) -> dict[str, float]:
    """Plays each behaviour's policy against every scripted opponent, in games of their own with seeds of their own.

    Touches no random stream of the training. Returns what is logged: the mean score against each (a win is 1, a draw 0.5). With
    capture_video a game against the best of them goes to folder/videos.
    """
    env = make_env(args, 1, render=capture_video)
    players = [Player("policy", behavior, agent.acting_weights()) for behavior, agent in agents.items()] + scripted_players(env)
    pairs = pairs_with_others(env, players, len(agents))
    make_games, seed = partial(make_env, args), args.seed + 1_000_000
    scores = play_pairs(make_games, agents, players, pairs, args.eval_games, seed, args.deterministic).mean(1)
    names = [f"eval/{players[i].behavior}_score_vs_{players[j].name}" for i, j in pairs]
    metrics = dict(zip(names, scores.tolist(), strict=True))
    for k in range(len(agents)) if capture_video else ():
        _, i, j = min((score, *pair) for score, pair in zip(scores, pairs, strict=True) if pair[0] == k)
        record_video(env, agents, players[i], players[j], seed, args.deterministic, folder)
    env.close()
    return metrics


def describe(metrics: dict[str, float]) -> str:
    """Scores against the scripted players in one line."""
    scores = {name[5:].replace("_score_vs_", " against "): score for name, score in metrics.items() if name.startswith("eval/")}
    return "scores: " + ", ".join(f"{name} {score:.2f}" for name, score in scores.items())


def cross_play_table(agents: Mapping[str, Agent], pools: Mapping[str, SnapshotPool], args: Args) -> CrossPlay:
    """The table of snapshots and scripted players against each other.

    Actions are sampled, as in training: likeliest ones make another player of a policy, whom no snapshot has met.
    """
    env = make_env(args, 1)
    players = scripted_players(env)
    env.close()
    for behavior, pool in pools.items():
        num_snapshots = min(args.cross_play_snapshots, len(pool.snapshots))
        snapshots = [pool.snapshots[round(i)] for i in np.linspace(0, len(pool.snapshots) - 1, num_snapshots)]
        players += [Player(f"step {snapshot.step:,}", behavior, snapshot.weights) for snapshot in snapshots]
    make_games, seed = partial(make_env, args), args.seed + 2_000_000
    return cross_play(make_games, agents, players, args.cross_play_games, seed)


def evaluate_run(args: Args) -> None:
    """--evaluate: the table of a run's snapshots, or with --against the score of its last policy against another player."""
    assert args.evaluate is not None
    agents, pools, run_args = load_model(args.evaluate, "evaluate")
    for name in MAY_CHANGE["evaluate"]:
        setattr(run_args, name, getattr(args, name))
    env = make_env(run_args, 1, render=args.capture_video)
    if args.against is None:
        print(describe(evaluate(agents, run_args, args.evaluate, args.capture_video)))
        if args.cross_play_games:
            cross_play_table(agents, pools, run_args).report(args.evaluate)
        return
    scripted = scripted_players(env)
    opponents = [player for player in scripted if player.name == args.against]
    if not opponents:
        if not Path(args.against).is_dir():
            known = ", ".join(dict.fromkeys(player.name for player in scripted))
            fail(f"--against takes a run folder or one of {known}, and {args.against} is neither")
        against, _, against_args = load_model(Path(args.against), "against")
        for name in ("env_id", "env_kwargs", "teams", "symmetric"):
            ours, theirs = getattr(run_args, name), getattr(against_args, name)
            if ours != theirs:
                flag = f"--{name.replace('_', '-')}"
                fail(f"--against takes a run of the same game, and {flag} was {ours} here and {theirs} there")
        opponents = [Player("against", behavior, agent.acting_weights()) for behavior, agent in against.items()]
    players = [Player("policy", behavior, agent.acting_weights()) for behavior, agent in agents.items()] + opponents
    pairs = pairs_with_others(env, players, len(agents))
    if not pairs:
        fail(f"--against takes an opponent that can play the other team, and {args.against} cannot")
    results = play_pairs(partial(make_env, run_args), agents, players, pairs, args.eval_games, args.seed, args.deterministic)
    for (i, j), scores in zip(pairs, results, strict=True):
        mean, low, high = score_interval(scores)
        who = f"{players[i].behavior} of {args.evaluate} against {players[j].behavior} of {args.against}"
        print(f"{who}: score {mean:.3f}, 95% interval [{low:.3f}, {high:.3f}], from {len(scores)} seeds")
        if args.capture_video:
            record_video(env, agents, players[i], players[j], args.seed, args.deterministic, args.evaluate)


# === Run folder and model file ========================================================================================


VERSIONS = {"torch": str(torch.__version__), "numpy": np.__version__}
# What comes of files that are missing, cut off, foreign or of another network.
UNREADABLE = (OSError, EOFError, RuntimeError, LookupError, TypeError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile)


def make_run_folder(args: Args) -> Path:
    """A new folder for all that the run writes; a counter tells apart runs that start in the same second."""
    name = re.sub(r"[^\w.-]", "-", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
    for counter in itertools.count(1):
        folder = Path("runs") / (name if counter == 1 else f"{name}-{counter}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            fail(f"the run folder cannot be made: {error}")
        return folder
    raise AssertionError("unreachable")


def lock_folder(folder: Path) -> TextIO:
    """Keeps other processes from the same run, until the file that it returns is closed or the process ends."""
    try:
        lock = (folder / "lock").open("w")
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"--resume takes a run that is not running, and {folder} is")
    except OSError as error:
        fail(f"the run folder cannot be written: {error}")
    return lock


def write_file(path: Path, contents: bytes) -> None:
    """Replaces a file as a whole: after a kill or a power cut there is the old one or the new one, and no half of one."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)  # half a file, which fills the disk
        raise


def log_metrics(writer: SummaryWriter, metrics: dict[str, float], global_step: int, args: Args) -> None:
    """One point of every metric, in TensorBoard and, with --track, in W&B. A full disk costs points, and not the run."""
    if args.track:
        import wandb

        assert wandb.run is not None
        if global_step >= wandb.run.step:  # else W&B has had it, before the run was killed and resumed
            wandb.log(metrics, step=global_step)
    try:
        for name, value in metrics.items():
            writer.add_scalar(name, value, global_step)
    except OSError as error:
        print(f"warning: points of step {global_step:,} are not in TensorBoard: {error}", file=sys.stderr)


def start_tracking(folder: Path, args: Args) -> None:
    """Begins or goes on with the W&B run that has the folder's name, and gives it all points of TensorBoard's that it lacks.

    Offline these are all of a resumed run's: a kill may have cut off the old record, and the new one takes its place.
    """
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for record in (folder / "wandb").glob("offline-run-*"):
        shutil.rmtree(record)
    project, entity, config = args.wandb_project_name, args.wandb_entity, asdict(args)
    run = wandb.init(project=project, entity=entity, id=folder.name, resume="allow", dir=folder.resolve(), config=config)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    points: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            points.setdefault(event.step, {})[name] = event.value
    for step in sorted(points):
        if step >= run.step:
            run.log(points[step], step=step)


def save_model(folder: Path, agents: Mapping[str, Agent], pools: Mapping[str, SnapshotPool], args: Args) -> None:
    """Writes model.pt: agents, snapshots, and what is needed to build them again. Warns if it cannot."""
    states = {behavior: agent.state_dict() for behavior, agent in agents.items()}
    snapshots = {behavior: pool.state_dict() for behavior, pool in pools.items()}
    model = {"agents": states, "snapshots": snapshots, "args": asdict(args) | {"resume": None}, "versions": VERSIONS}
    contents = io.BytesIO()
    torch.save(model, contents)
    try:
        write_file(folder / "model.pt", contents.getvalue())
    except OSError as error:
        print(f"warning: no model.pt: {error}", file=sys.stderr)


def load_model(folder: Path, flag: str) -> tuple[dict[str, Agent], dict[str, SnapshotPool], Args]:
    """The agents and snapshots that `save_model` wrote and the arguments of their run; runs no code from the file."""
    try:
        model = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
        args = Args(**model["args"])
        env = make_env(args, 1)
        agents = {team.behavior: Agent(team, args) for team in env.teams}
        env.close()
        pools = {behavior: make_pool(args, np.random.default_rng()) for behavior in agents}
        for behavior, agent in agents.items():
            agent.load_state_dict(model["agents"][behavior])
            pools[behavior].load_state_dict(model["snapshots"][behavior])
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        fail(f"--{flag} takes a run folder with a whole model.pt of this script, and {folder} has none ({reason})")
    return agents, pools, args


def make_pool(args: Args, rng: np.random.Generator) -> SnapshotPool:
    """The pool of one behaviour."""
    return SnapshotPool(args.window, args.play_against_latest_model_ratio, args.opponent_sampling, rng)


# === Checkpoints ======================================================================================================

CHECKPOINT_FORMAT = 3  # of the files; goes up when older ones cannot be read any more


def check_finite(quantities: Mapping[str, Sequence[float] | np.ndarray], global_step: int, stride: int = 1) -> None:
    """Raises FloatingPointError if one of these quantities (n, ...) is not finite; row i is of the step (i + 1) * stride on."""
    for name, values in quantities.items():
        is_finite = np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if not is_finite.all():
            step = global_step + (int(is_finite.argmin()) + 1) * stride
            raise FloatingPointError(f"{name} is not a finite number at step {step:,}")


def seed_streams(seed: int, global_step: int) -> int:
    """Seeds all random streams by the run's seed and the step, so that no state of theirs is to be saved; returns the seed."""
    step_seed = int(np.random.SeedSequence((seed, global_step)).generate_state(1)[0]) // 2  # below 2^31
    random.seed(step_seed)
    np.random.seed(step_seed)
    torch.manual_seed(step_seed)
    return step_seed


def begin_anew(env: TeamEnv, matches: Matches, seed: int, global_step: int) -> list[np.ndarray]:
    """Begins all games with opponents drawn anew, all by a seed of this step; returns each team's first observations."""
    step_seed = seed_streams(seed, global_step)
    matches.begin_anew(step_seed)
    return env.reset(step_seed)


def save_checkpoint(folder: Path, writer: SummaryWriter, parts: Mapping[str, Any], counters: Mapping[str, Any]) -> bool:
    """Writes the state dicts of all parts and the counters to checkpoint.pt; the one before stays as checkpoint.previous.pt.

    A failure to write costs a warning; returns whether it is written.
    """
    try:
        writer.flush()
    except OSError:  # its thread is gone, and the points with it: the next ones go to a new file
        writer.file_writer = writer.all_writers = None
    try:
        state = {name: part.state_dict() for name, part in parts.items()} | dict(counters)
        state["events"] = {path.name: path.stat().st_size for path in folder.glob("events.*")}
        for name in state["events"]:
            with (folder / name).open("rb+") as file:
                os.fsync(file.fileno())
        contents = io.BytesIO()
        torch.save(state | {"format": CHECKPOINT_FORMAT, "versions": VERSIONS}, contents)
        write_file(folder / "checkpoint.next.pt", contents.getvalue())
        if (folder / "checkpoint.pt").exists():
            os.replace(folder / "checkpoint.pt", folder / "checkpoint.previous.pt")
        os.replace(folder / "checkpoint.next.pt", folder / "checkpoint.pt")
        return True
    except OSError as error:
        at_step = f"at step {counters['global_step']:,}"
        print(f"warning: no checkpoint {at_step}, and the one before stays: {error}", file=sys.stderr)
        return False


def load_checkpoint(folder: Path, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Loads the newest whole checkpoint into the parts, and returns its counters; runs no code from the file.

    Cuts off what was logged after it, so that no point is there twice.
    """
    damaged: dict[Path, str] = {}
    names = ["checkpoint.pt", "checkpoint.previous.pt"]
    if (folder / "checkpoint.next.pt").exists():  # whole, but a kill came before it got its name
        names = ["checkpoint.next.pt", *names]
    for path in map(folder.joinpath, names):
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:  # PyTorch itself does not look at the checksums
                    raise ValueError("wrong checksum")
            state = torch.load(path, map_location="cpu", weights_only=True)
            if state["format"] != CHECKPOINT_FORMAT:
                raise ValueError(f"it has format {state['format']}, and this script reads {CHECKPOINT_FORMAT}")
            for name, part in parts.items():
                part.load_state_dict(state[name])
        except UNREADABLE as error:
            damaged[path] = f"{path.name}: {type(error).__name__}: {error}".splitlines()[0]
            continue
        if damaged:
            reason = "; ".join(damaged.values())
            print(f"warning: going on from {path.name}, for the newer one is not whole ({reason})", file=sys.stderr)
        for damaged_path in damaged:
            damaged_path.unlink(missing_ok=True)  # else it would take the place of the one before
        if state["versions"] != VERSIONS:
            print(f"warning: the run was begun with {state['versions']} and goes on with {VERSIONS}", file=sys.stderr)
        for events in folder.glob("events.*"):
            if events.name in state["events"]:
                os.truncate(events, min(state["events"][events.name], events.stat().st_size))
            else:
                events.unlink()
        return state
    reason = "; ".join(damaged.values())
    fail(f"--resume takes a run folder with a whole checkpoint of this script, and {folder} has none ({reason})")


# === Main =============================================================================================================


def main(args: Args) -> None:
    """Trains, or plays a trained model if --evaluate names one."""
    check_args(args)
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pictures of games without a screen
    if args.evaluate is not None:
        evaluate_run(args)
        return

    # --- seeds and device ---
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.set_flush_denormal(True)  # Adam's averages of a gradient that stays 0 end below 1e-38, where processors are slow
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")

    # --- games, run folder and loggers ---
    if args.capture_video:
        make_env(args, 1, render=True).close()  # a game that cannot be drawn is better known now than at the end
    env = make_env(args, args.num_games)
    behaviors = list(dict.fromkeys(team.behavior for team in env.teams))
    stop_signals: list[int] = []

    def stop(signum: int, _: object) -> None:
        """Lets the loop stop at its next step; once more, the signal ends the program at once, in an evaluation, say."""
        stop_signals.append(signum)
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    folder = args.resume or make_run_folder(args)
    lock = lock_folder(folder)
    total_steps = args.num_iterations * args.batch_size
    print(f"{args.exp_name}: {args.env_id}, seed {args.seed}, {total_steps:,} steps on {device}, run folder {folder}")
    if total_steps != args.total_timesteps:
        print(f"--total-timesteps {args.total_timesteps:,} is rounded up to whole rollouts of {args.batch_size:,} steps")

    # --- agents, optimisers, pools and ratings ---
    agents = {team.behavior: Agent(team, args).to(device) for team in env.teams}
    optimizers = {
        behavior: make_optimizer(agent.parameters(), args.learning_rate, (args.adam_beta1, args.adam_beta2), eps=1e-5)
        for behavior, agent in agents.items()
    }
    rng = np.random.default_rng(args.seed)
    pools = {behavior: make_pool(args, rng) for behavior in behaviors}
    for behavior, pool in pools.items():
        pool.add(agents[behavior].acting_weights(), 0, args.initial_elo)
    rules = (args.elo_k, args.swap_steps, args.learner_side, args.swaps_per_turn, args.team_change)
    matches = Matches(env.teams, args.num_games, pools, *rules)
    run_steps = total_steps * len(env.teams[0].agents)
    if len(behaviors) > 1 and args.team_change > run_steps:
        turn, others = f"--team-change {args.team_change:,}", ", ".join(behaviors[1:])
        print(f"warning: {turn} exceeds the run's {run_steps:,} learner's steps, so {others} will not learn", file=sys.stderr)

    # --- resume ---
    parts: dict[str, Any] = {f"{behavior}_agent": agent for behavior, agent in agents.items()}
    parts |= {f"{behavior}_optimizer": optimizer for behavior, optimizer in optimizers.items()}
    parts |= {f"{behavior}_pool": pool for behavior, pool in pools.items()} | {"matches": matches}
    counters: dict[str, Any] = {"global_step": 0, "learner_steps": dict.fromkeys(behaviors, 0), "turn_started": 0}
    counters |= {"cross_play": None, "extra_resets": [], "is_finished": False}
    if args.resume is not None:
        counters = {name: value for name, value in load_checkpoint(folder, parts).items() if name in counters}
        if counters["is_finished"] and counters["global_step"] >= total_steps:
            fail(f"--resume takes a run that has not finished, or more --total-timesteps than the {total_steps:,} of {folder}")
        counters["is_finished"] = False
        print(f"going on from step {counters['global_step']:,}")
    try:
        write_file(folder / "args.json", json.dumps(asdict(args) | {"resume": None}, indent=2).encode())
    except OSError as error:
        fail(f"the run folder cannot be written: {error}")
    if args.track:
        start_tracking(folder, args)
    writer = SummaryWriter(str(folder))
    if args.resume is None:
        save_checkpoint(folder, writer, parts, counters)

    # --- compilation ---
    if args.compile:
        compile_update(agents, env.teams, args)

    # --- loop ---
    global_step, status = counters["global_step"], ""
    learner_steps, turn_started = counters["learner_steps"], counters["turn_started"]
    progress = tqdm(total=total_steps, initial=global_step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty())
    log_step, line_step, log_time, line_time = global_step, global_step, time.time(), time.time()
    learned_step, begins_anew, is_finished, failure, is_sound = global_step, True, False, "", True
    try:
        for iteration in range(global_step // args.batch_size + 1, args.num_iterations + 1):
            learner = matches.learner
            agent, optimizer, team = agents[learner], optimizers[learner], env.teams[matches.sides[0]]
            if begins_anew:  # at the start, after each checkpoint and each change of team
                obs = begin_anew(env, matches, args.seed, global_step)
                games_length = np.zeros(args.num_games)
                discounted_return = np.zeros(args.num_games * len(team.agents))
                begins_anew = False
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - (iteration - 1) / args.num_iterations)

            # storage: a row for each of the learner's agents in each game
            shape = (args.num_steps, args.num_games * len(team.agents))
            observations = np.zeros((*shape, team.obs_dim), dtype=np.float32)
            final_observations, masks = np.zeros_like(observations), np.zeros((*shape, sum(team.branches)), dtype=bool)
            actions = np.zeros((*shape, team.action_dim), dtype=np.int64 if team.branches else np.float32)
            rewards, discounted_returns = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
            terminations, dones, valid = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)

            noise = agent.noise(math.prod(shape)).unflatten(0, shape)
            finished_lengths = []
            for step in range(args.num_steps):
                # act and step
                observations[step], valid[step] = matches.of_learner(obs), matches.of_learner(env.alive)
                masks[step] = matches.of_learner([legal_actions(env, t) for t in range(len(env.teams))])
                actions[step] = agent.act(observations[step], masks[step], noise[step])
                global_step += args.num_games
                result = env.step(matches.all_actions(env, agents, obs, actions[step]))
                final_observations[step] = matches.of_learner(result.final_obs)
                rewards[step] = matches.of_learner(result.rewards)
                terminations[step] = matches.of_learner(result.terminations)
                dones[step] = terminations[step] | matches.of_learner(result.truncations)
                obs = result.obs

                # record, rate, next opponents
                discounted_returns[step] = discounted_return = args.gamma * discounted_return + rewards[step]
                discounted_return[dones[step]] = 0.0
                games_length += 1
                for game in result.over.nonzero()[0]:
                    finished_lengths.append(games_length[game])
                    games_length[game] = 0.0
                    matches.finish(int(game), result.scores[game])
            both = np.concatenate([observations, final_observations], axis=-1)
            check_finite({"observation": both, "reward": rewards}, global_step - args.batch_size, args.num_games)
            learner_steps[learner] += int(valid.sum())

            # store: log-probabilities as the policy acted; statistics that have seen the rollout; values under these
            to_device = partial(torch.as_tensor, device=device)
            with torch.no_grad():
                raw_obs, b_masks, b_actions, mask = map(to_device, (observations, masks, actions, valid))
                log_prob = agent.actor.log_prob(agent(raw_obs), b_masks, b_actions)
                if valid.any():
                    agent.obs_rms.update(raw_obs[mask])
                    agent.return_rms.update(to_device(discounted_returns)[mask])
                b_obs = agent.normalize(raw_obs)
                values = agent.critic(b_obs).squeeze(-1).cpu()
                next_values = agent.critic(agent.normalize(to_device(final_observations))).squeeze(-1).cpu()
                scaled_rewards = agent.scale_reward(to_device(rewards)).cpu()
            terminated, done = torch.as_tensor(terminations).float(), torch.as_tensor(dones).float()
            advantages = compute_gae(scaled_rewards, values, next_values, terminated, done, args.gamma, args.gae_lambda)
            returns = advantages + values
            batch = [x.to(device)[mask] for x in (b_obs, b_masks, b_actions, log_prob, advantages, returns, values)]

            # update
            update_metrics: list[Metrics] = []
            num_minibatches = min(args.num_minibatches, len(batch[0]) // 2)  # where agents have left, there are fewer rows
            for _ in range(args.update_epochs if num_minibatches else 0):
                permutation = torch.randperm(len(batch[0]), device=device)
                minibatches = zip(*(x[permutation].tensor_split(num_minibatches) for x in batch), strict=True)
                epoch_metrics = [update(agent, optimizer, minibatch, args) for minibatch in minibatches]
                update_metrics += epoch_metrics
                approx_kl = torch.stack([m["losses/approx_kl"] for m in epoch_metrics]).mean()
                if args.target_kl is not None and approx_kl > args.target_kl:
                    break
            learned_step = global_step

            # snapshot, change team
            if learner_steps[learner] - pools[learner].latest.step >= args.save_steps:
                pools[learner].add(agent.acting_weights(), learner_steps[learner], matches.rating)
            if len(behaviors) > 1 and learner_steps[learner] - turn_started >= args.team_change:
                if learner_steps[learner] > pools[learner].latest.step:
                    pools[learner].add(agent.acting_weights(), learner_steps[learner], matches.rating)
                matches.give_turn(behaviors[(behaviors.index(learner) + 1) % len(behaviors)])
                turn_started = learner_steps[matches.learner]
                begins_anew = True

            # log
            metrics = matches.metrics()
            if update_metrics:
                metrics |= {name: torch.stack([m[name] for m in update_metrics]).mean().item() for name in update_metrics[0]}
                check_finite({name: [value] for name, value in metrics.items()}, global_step - 1)
                b_returns, b_values = batch[-2:]
                metrics["losses/explained_variance"] = 1.0 - ((b_returns - b_values).var() / b_returns.var()).item()
            metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            metrics["charts/SPS"] = (global_step - log_step) / (time.time() - log_time)
            metrics["charts/learner"] = float(behaviors.index(learner))
            if finished_lengths:
                metrics["charts/episodic_length"] = float(np.mean(finished_lengths))
                matches.warn_of_short_swaps(metrics["charts/episodic_length"])

            # evaluate and report
            if args.eval_freq and global_step % args.eval_freq < args.batch_size and global_step < total_steps:
                metrics |= evaluate(agents, args, folder)
                status = ", " + describe(metrics)
            log_metrics(writer, metrics, global_step, args)
            progress.update(args.batch_size)
            ratings = ", ".join(f"{behavior} {matches.rating_of(behavior):.0f}" for behavior in behaviors)
            progress.set_postfix_str(f"rating {ratings}{status}", refresh=False)
            log_step, log_time = global_step, time.time()
            if progress.disable and log_time - line_time > 30:
                steps_per_second = (global_step - line_step) / (log_time - line_time)
                speed = f"step {global_step:,} of {total_steps:,}, {steps_per_second:,.0f} steps/s"
                print(f"{speed}, rating {ratings}{status}", flush=True)
                line_step, line_time = global_step, log_time

            # checkpoint
            if args.checkpoint_freq and global_step % args.checkpoint_freq < args.batch_size:
                counters |= {"global_step": global_step, "turn_started": turn_started}
                save_checkpoint(folder, writer, parts, counters)
                begins_anew = True
            if stop_signals:
                break
        if not stop_signals:
            for behavior, pool in pools.items():
                # the last snapshot is the final policy, in the place of one that is nearly as new
                if learner_steps[behavior] > pool.latest.step:
                    if pool.latest.step > max(0, learner_steps[behavior] - args.save_steps / 2):
                        pool.snapshots.pop()
                    pool.add(agents[behavior].acting_weights(), learner_steps[behavior], matches.rating_of(behavior))
            metrics = evaluate(agents, args, folder, args.capture_video)
            log_metrics(writer, metrics, global_step, args)
            print(describe(metrics))
            if args.cross_play_games:
                table = cross_play_table(agents, pools, args)
                counters["cross_play"] = {"players": table.labels, "scores": torch.as_tensor(table.scores)}
                try:
                    table.report(folder)
                    writer.add_figure("selfplay/cross_play", table.heat_map(), global_step)
                except OSError as error:
                    print(f"warning: the table is not in {folder}: {error}", file=sys.stderr)
            is_finished = True
    except TaskError as error:
        traceback.print_exception(error)
        failure = f"--env-id {args.env_id} failed at step {global_step:,}: {error}"
        global_step = learned_step  # what there is of a rollout is lost
    except FloatingPointError as error:
        failure, is_sound = str(error), False  # the last checkpoint is the last good state

    # --- end: save, say what to do next ---
    progress.close()
    if is_sound and not all(x.isfinite().all() for agent in agents.values() for x in agent.state_dict().values()):
        failure, is_sound, is_finished = f"weights are not finite numbers at step {global_step:,}", False, False
    if is_sound:
        if args.save_model:
            save_model(folder, agents, pools, args)
        extra_resets = counters["extra_resets"] + ([] if begins_anew else [global_step])
        counters |= {
            "global_step": global_step,
            "turn_started": turn_started,
            "extra_resets": extra_resets,
            "is_finished": is_finished,
        }
        save_checkpoint(folder, writer, parts, counters)
    try:
        env.close()
    except Exception as error:  # the task's own code, or a process of it that is gone
        print(f"warning: {args.env_id} cannot be closed: {type(error).__name__}: {error}", file=sys.stderr)
    with suppress(OSError):  # of which log_metrics has told
        writer.close()
    for signum, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(signum, handler)  # nothing is left to lose: a stop signal ends a transfer that hangs
    if args.track:
        import wandb

        wandb.finish()
    lock.close()
    print(f"run folder: {folder}\nnext: tensorboard --logdir runs")
    if (folder / "model.pt").exists():
        print(
            f"      python {Path(__file__).name} --evaluate {folder} --against {scripted_players(env)[-1].name} --capture-video"
        )
    if not is_finished and is_sound and (folder / "checkpoint.pt").exists():  # else it would end in the same way
        print(f"      python {Path(__file__).name} --resume {folder}")
    if failure:
        print(f"error: {failure}", file=sys.stderr)
        raise SystemExit(1)
    if not is_finished:
        print(f"stopped by signal {stop_signals[0]} at step {global_step:,}")
        raise SystemExit(128 + stop_signals[0])


if __name__ == "__main__":
    main(parse_args())
