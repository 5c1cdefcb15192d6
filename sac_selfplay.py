"""SAC with self-play: one file, any game between teams, symmetric or asymmetric.

The algorithm is that of `sac_continuous.py` (Haarnoja et al. 2018b, https://arxiv.org/abs/1812.05905, eq. 5, 9 and 18), and for
discrete actions its form with expectations in the place of samples (Christodoulou 2019, https://arxiv.org/abs/1910.07207, eq.
10 to 12); `diff sac_continuous.py sac_selfplay.py` shows what self-play adds. It follows ML-Agents' ghost trainer: the learner
plays past selves, each a snapshot of its policy, and roles learn in turns.

    python sac_selfplay.py
    python sac_selfplay.py --env-id pursuit
    python sac_selfplay.py --env-id sumo --env-kwargs '{"actions": "multidiscrete"}'
    python sac_selfplay.py --evaluate runs/FOLDER --against charge
    python sac_selfplay.py --resume runs/FOLDER

What differs from that reference, and why:
- Each of many parallel games has its own opponents, drawn when it begins and kept until it ends; all act in one batched forward
  pass. The reference has one opponent at a time for all of its environments.
- A result is credited to the snapshot that played. The reference credits the one that plays when the result comes in.
- The outcome is read by one rule (see `utils/team_env.py`), so that games rate whose rewards are not +1 and -1.
- The newest opponent is the newest snapshot, and not the learner itself: so every game is rated.
- Older snapshots that the learner does not beat yet are drawn more often (AlphaStar's prioritised fictitious self-play). The
  reference draws uniformly.
- When the turn passes to another role all games begin anew, and the role whose turn ended leaves a snapshot of its last self.
- Each transition of the replay buffer carries the age of its opponent, so that old ones can be left out of the minibatches.
- Values are the mean of both critics and not the smaller one (`--critics min`): outcomes from -1 to 1 hold back an overestimate
  by themselves, and where one side loses as the other wins the smaller one is a bias against whoever learns.
- Entropy counts in the value by how far it is from its target. As a whole it would cost the Box form alpha times the target at
  each step, and pay the discrete ones: where all that is won or lost is 1, games would be cut short or drawn out for it.
- Discrete and MultiDiscrete actions, with masks of legal ones: a head, an entropy coefficient and a target entropy a branch, as
  in ML-Agents, and averages over branches, so that large ones do not outweigh small ones. The target goes by the number
  of legal actions, so that forced moves ask for no entropy.
- At a checkpoint all games and all random streams begin anew, by seeds of that step: a run that was killed and resumed equals,
  bit for bit on the CPU, the one that was not.
"""

import copy
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
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from utils.cross_play import CrossPlay, Player, cross_play, pairs_with_others, play_pairs, record_video, scripted_players
from utils.elo import score_interval
from utils.matches import Matches
from utils.snapshot_pool import SnapshotPool
from utils.team_env import TaskError, Team, TeamEnv, legal_actions, make_team_env, next_legal_actions

# === Arguments ========================================================================================================


@dataclass
class Args:
    """SAC with self-play: trains policies for the teams of a game by playing past selves."""

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
    eval_freq: int = 250_000
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
    checkpoint_freq: int = 200_000
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
    num_games: int = 64
    """games that are stepped together"""

    # --- self-play ---
    save_steps: int = 60_000
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
    team_change: int = 200_000
    """learner's steps of a turn, after which the next role learns; for games whose teams have policies of their own"""
    learner_side: str | None = None
    """name of the only team that the learner plays on; all teams that share its policy in turn if not given"""
    replay_opponents: Literal["all", "window"] = "all"
    """transitions that minibatches are drawn from: all, or those against opponents that are no older than the pool"""
    initial_elo: float = 1200.0
    """rating to begin with"""
    elo_k: float = 16.0
    """the largest change of a rating in one game"""

    # --- algorithm ---
    total_timesteps: int = 3_000_000
    """game steps of the whole run, over all games"""
    buffer_size: int = 1_000_000
    """transitions that the replay buffer holds; the oldest are overwritten"""
    batch_size: int = 256
    """transitions of a minibatch"""
    learning_starts: int = 10_000
    """game steps with random actions, in a behaviour's first turn, before its first update"""
    updates_per_step: float = 0.02
    """updates for each game step: 0.02 is one in fifty"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 0.02
    """share of the networks that moves into their targets at each target update"""
    critics: Literal["mean", "min"] = "mean"
    """what counts of both critics' values: their mean, or the smaller one, for rewards that are more than a game's outcome"""
    policy_frequency: int = 1
    """the actor is updated after every N updates of the critics, then N times in a row"""
    target_network_frequency: int = 1
    """the targets are updated every this many updates"""
    policy_lr: float = 1e-3
    """learning rate of the actor"""
    q_lr: float = 1e-3
    """learning rate of the critics"""
    alpha_lr: float = 1e-3
    """learning rate of the entropy coefficient"""
    policy_lr_schedule: Literal["constant", "linear"] = "linear"
    """learning rate of the actor over the run: constant, or linearly to zero"""
    q_lr_schedule: Literal["constant", "linear"] = "linear"
    """the same for the critics"""
    alpha_lr_schedule: Literal["constant", "linear"] = "constant"
    """the same for the entropy coefficient"""
    alpha: float = 0.01
    """entropy coefficient: its initial value, or its fixed value with --no-autotune"""
    autotune: bool = True
    """learn the entropy coefficient"""
    target_entropy_scale: float = 1.0
    """Box actions: the policy's entropy is driven to minus this times the number of action dimensions"""
    discrete_target_entropy_scale: float = 0.2
    """discrete actions: that of each branch is driven to this times log n, for n legal actions"""
    norm_obs: bool = False
    """normalise observations by their running mean and standard deviation, and clip them to [-10, 10]"""
    log_freq: int = 10_000
    """game steps between two points of the training curves"""


def fail(message: str) -> NoReturn:
    """Ends the program before it trains: one sentence on standard error, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_args(args: Args) -> None:
    """Refuses what no run can use, in one sentence that names the flag and what it takes."""
    limits: list[tuple[float, float, str]] = [
        (0, 1, "gamma tau play_against_latest_model_ratio"),
        (1, 1e12, "eval_games num_games total_timesteps batch_size policy_frequency target_network_frequency log_freq"),
        (1, 1e12, "save_steps team_change"),
        (
            0,
            1e12,
            "eval_freq checkpoint_freq cross_play_games swap_steps learning_starts updates_per_step policy_lr q_lr alpha_lr",
        ),
        (0, 1e12, "target_entropy_scale discrete_target_entropy_scale"),
        (1, 10_000, "window cross_play_snapshots"),
        (1e-9, 1e12, "swaps_per_turn"),
        (0, 2**31, "seed"),
        (0, 1e4, "elo_k"),
        (-1e6, 1e6, "initial_elo"),
        (1e-9, 1e9, "alpha"),
        (args.num_games, 1e12, "buffer_size"),
    ]
    for low, high, names in limits:
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not low <= value <= high:  # NaN fails this, too
                fail(f"--{name.replace('_', '-')} takes a number from {low:g} to {high:g}, not {value}")
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


def mlp(*sizes: int) -> nn.Sequential:
    """ReLU network with PyTorch's initial weights."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class NormalActor(nn.Module):
    """Normal policy for Box actions, squashed by tanh; its mean and log standard deviation both depend on the observation."""

    def __init__(self, team: Team) -> None:
        super().__init__()
        self.net, self.action_dim = mlp(team.obs_dim, 128, 128, 2 * team.action_dim), team.action_dim

    def forward(self, obs: Tensor) -> Tensor:
        """Observations (..., obs_dim) to the mean and the log standard deviation (..., 2 * action_dim) before squashing."""
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        return torch.cat([mean, log_std.clamp(-20.0, 2.0)], dim=-1)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """What `sample` takes to draw n actions."""
        return torch.randn((n, self.action_dim), generator=generator).to(next(self.parameters()).device)

    def sample(self, policy: Tensor, masks: Tensor, noise: Tensor | float) -> Tensor:
        """Actions (n, action_dim) in [-1, 1] of the outputs (n, 2 * action_dim); those of the mean without noise."""
        mean, log_std = policy.chunk(2, dim=-1)
        return (mean + log_std.exp() * noise).tanh()


class CategoricalActor(nn.Module):
    """Policy for Discrete and MultiDiscrete actions: a categorical distribution for each branch, independent of each other.

    An illegal action has probability zero and adds nothing to the entropy.
    """

    def __init__(self, team: Team) -> None:
        super().__init__()
        self.branches = list(team.branches)
        self.logits = mlp(team.obs_dim, 128, 128, sum(self.branches))

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

    def log_probs(self, policy: Tensor, masks: Tensor) -> Tensor:
        """Log-probabilities (n, sum of branches) of all actions, each branch normalised; -1e9 or less for illegal ones."""
        branches = policy.masked_fill(~masks, -1e9).split(self.branches, dim=-1)
        return torch.cat([branch.log_softmax(-1) for branch in branches], dim=-1)


class TwinLinear(nn.Module):
    """Two linear layers side by side, as one batched product; initial weights as in `nn.Linear`."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(fan_in)
        self.weight = nn.Parameter(torch.empty(2, fan_in, fan_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(2, 1, fan_out).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """(2, batch_size, fan_in) to (2, batch_size, fan_out)."""
        if self.weight.shape[2] == 1:  # as a product it would take three times as long
            return (x * self.weight.mT).sum(-1, keepdim=True) + self.bias
        return x @ self.weight + self.bias


class TwinQNetwork(nn.Module):
    """Both critics."""

    def __init__(self, input_dim: int, output_dim: int) -> None:
        super().__init__()
        widths = (input_dim, 128), (128, 128), (128, output_dim)
        self.net = nn.Sequential(TwinLinear(*widths[0]), nn.ReLU(), TwinLinear(*widths[1]), nn.ReLU(), TwinLinear(*widths[2]))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Box: observations and actions (batch_size, ...) to both values (2, batch_size, 1).

        Discrete: observations to both values of each action of each branch (2, batch_size, sum of branches).
        """
        return self.net(torch.cat(inputs, dim=-1).expand(2, -1, -1))


class Agent(nn.Module):
    """All that is learned for a behaviour: policy, critics, their targets, entropy coefficients and statistics."""

    def __init__(self, team: Team, args: Args) -> None:
        super().__init__()
        self.norm_obs, self.critics = args.norm_obs, args.critics
        self.branches = list(team.branches)
        self.obs_rms = RunningMeanStd((team.obs_dim,))
        self.actor = CategoricalActor(team) if team.branches else NormalActor(team)
        self.qf = (
            TwinQNetwork(team.obs_dim, sum(team.branches)) if team.branches else TwinQNetwork(team.obs_dim + team.action_dim, 1)
        )
        self.log_alpha = nn.Parameter(torch.full((len(team.branches) or 1,), math.log(args.alpha)))
        self.qf_target = copy.deepcopy(self.qf).requires_grad_(False)

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations (..., obs_dim) to what the networks take."""
        return self.obs_rms.normalize(obs) if self.norm_obs else obs

    def value(self, qf_values: Tensor) -> Tensor:
        """Both critics' values (2, ...) to the one that counts (...)."""
        return qf_values.mean(0) if self.critics == "mean" else qf_values.amin(0)

    def per_action(self, x: Tensor) -> Tensor:
        """A number a branch (num_branches,) to one an action (sum of branches,), the same for all actions of a branch."""
        return torch.cat([x[k].expand(size) for k, size in enumerate(self.branches)])

    def per_branch(self, x: Tensor) -> Tensor:
        """Sums over the actions of each branch: (..., sum of branches) to (..., num_branches)."""
        return torch.stack([branch.sum(-1) for branch in x.split(self.branches, dim=-1)], dim=-1)

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


# === Replay buffer ====================================================================================================


class ReplayBuffer:
    """The last `capacity` transitions, one row each, so that a minibatch is one gather; each knows its opponent's age."""

    def __init__(self, capacity: int, team: Team, device: torch.device, folder: Path) -> None:
        """Takes the number of rows, the team whose transitions they are, and the folder that checkpoints of it go to."""
        num_masks = sum(team.branches)
        self.widths = [team.obs_dim, num_masks, team.action_dim, 1, team.obs_dim, num_masks, 1]
        self.data = torch.zeros((capacity, sum(self.widths)), device=device)
        self.opponents = np.zeros(capacity, dtype=np.int64)  # step of the oldest opponent
        self.total = 0  # transitions stored so far: the one with the number i is in row i % capacity
        self.eligible, self.refreshed_at = torch.zeros(0, dtype=torch.int64, device=device), 0
        self.left_out = 0  # opponents from before this step
        self.folder = folder
        self.files: list[tuple[int, int]] = []  # of the newest checkpoint: the first number in each, and the one after its last
        self.files_before: list[tuple[int, int]] = []  # of the one before

    def add(self, opponents: np.ndarray, *columns: np.ndarray) -> None:
        """Stores a batch: the step of the oldest opponent (n,), then obs, masks, actions, rewards, next_obs, next_masks and
        terminations (n, ...)."""
        rows = np.concatenate(
            [column.reshape(len(opponents), -1) for column in columns if column.size], axis=1, dtype=np.float32
        )
        indices = self.rows(self.total, self.total + len(rows))
        self.data[indices] = torch.as_tensor(rows, device=self.data.device)
        self.opponents[indices.cpu().numpy()] = opponents
        self.total += len(rows)

    def rows(self, start: int, stop: int) -> Tensor:
        """The rows of the transitions with these numbers."""
        return torch.arange(start, stop, device=self.data.device) % len(self.data)

    def leave_out(self, before: int) -> None:
        """Draws no more of the transitions stored so far that have an opponent from before this step."""
        numbers = np.arange(max(0, self.total - len(self.data)), self.total)
        fresh = numbers[self.opponents[numbers % len(self.data)] >= before]
        self.eligible = torch.as_tensor(fresh, device=self.data.device)
        self.left_out, self.refreshed_at = before, self.total

    def sample(self, batch_size: int) -> tuple[Tensor, ...]:
        """Uniformly with replacement: obs, masks, actions, rewards, next_obs, next_masks, terminations (batch_size, ...)."""
        capacity, device = len(self.data), self.data.device
        num_new = min(self.total - self.refreshed_at, capacity)  # all of these are eligible
        gone = int(torch.searchsorted(self.eligible, self.total - capacity))
        num_old = len(self.eligible) - gone
        draws = torch.randint(num_old + num_new, (batch_size,), device=device)
        numbers = self.total - num_new + draws - num_old
        if num_old:
            numbers = torch.where(draws < num_old, self.eligible[(gone + draws).clamp_max(len(self.eligible) - 1)], numbers)
        return self.gather(numbers % capacity)

    def gather(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The transitions in these rows (batch_size,), split as `sample` has them."""
        columns = self.data.index_select(0, indices).split(self.widths, dim=1)
        obs, masks, actions, rewards, next_obs, next_masks, terminations = columns
        return obs, masks.bool(), actions, rewards.squeeze(1), next_obs, next_masks.bool(), terminations.squeeze(1)

    def state_dict(self) -> dict[str, Any]:
        """Writes the transitions since the last call to a file of their own, and tells which files hold the buffer."""
        oldest = self.total - len(self.data)
        start = max(self.files[-1][1] if self.files else 0, oldest)
        self.folder.mkdir(parents=True, exist_ok=True)
        if start < self.total:
            contents = io.BytesIO()
            rows = self.rows(start, self.total)
            np.savez(contents, rows=self.data[rows].cpu().numpy(), opponents=self.opponents[rows.cpu().numpy()])
            write_file(self.folder / f"{start}.npz", contents.getvalue())
            self.files = [file for file in self.files if file[1] > oldest] + [(start, self.total)]
        return {"total": self.total, "files": self.files, "refreshed_at": self.refreshed_at, "left_out": self.left_out}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Reads these files."""
        for start, stop in state["files"]:
            with np.load(self.folder / f"{start}.npz") as archive:
                rows = self.rows(start, stop)
                self.data[rows] = torch.as_tensor(archive["rows"], device=self.data.device)
                self.opponents[rows.cpu().numpy()] = archive["opponents"]
        self.total, self.files, self.files_before = state["refreshed_at"], state["files"], state["files"]
        self.leave_out(state["left_out"])
        self.total = state["total"]

    def remove_old_files(self) -> None:
        """Removes what neither the newest checkpoint, which is now whole, needs nor the one before it."""
        needed = {f"{start}.npz" for start, _ in self.files + self.files_before}
        for path in self.folder.iterdir():
            if path.name not in needed:
                with suppress(OSError):  # no more than room on the disk is lost
                    path.unlink()
        self.files_before = self.files


# === Losses and update ================================================================================================

Metrics = dict[str, Tensor]


def sample_actions(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions tanh(u) (..., action_dim) with u normal, and their log-probability (...), differentiable (2018b, appendix C).

    Takes the standard normal noise (..., action_dim) that u is made of.
    log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which neither overflows nor loses digits where tanh saturates.
    """
    u = mean + log_std.exp() * noise
    log_normal = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    log_det = 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
    return u.tanh(), (log_normal - log_det).sum(-1)


def target_entropies(agent: Agent, masks: Tensor, args: Args) -> Tensor:
    """What the entropies are driven to: (batch_size, num_branches) by the number of legal actions, or for Box (1,)."""
    if isinstance(agent.actor, CategoricalActor):
        return args.discrete_target_entropy_scale * agent.per_branch(masks.float()).log()
    return torch.full((1,), -args.target_entropy_scale * agent.actor.action_dim, device=masks.device)


@torch.no_grad()
def compute_td_target(
    agent: Agent, rewards: Tensor, next_obs: Tensor, next_masks: Tensor, terminations: Tensor, noise: Tensor, args: Args
) -> Tensor:
    """What both critics regress on (batch_size,): reward plus discounted soft value of the next state (2018b, eq. 2 and 3).

    Discrete: the expectation over actions, exactly, averaged over branches (2019, eq. 10). Entropy counts by how far it is from
    its target, so that its mean is near zero, as in Yu, Zhang and Xu 2022 (https://arxiv.org/abs/2201.12434, SACZero).
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
    """Mean squared Bellman error, summed over the critics (2018b, eq. 5, without its factor 1/2).

    Discrete: the value of an action is the mean over branches of the values of its parts.
    """
    if agent.branches:
        offsets = torch.tensor([0, *agent.branches[:-1]], device=obs.device).cumsum(0)
        chosen = (actions.long() + offsets).expand(2, -1, -1)
        qf_values = agent.qf(obs).gather(-1, chosen).mean(-1)  # (2, batch_size)
    else:
        qf_values = agent.qf(obs, actions).squeeze(-1)  # (2, batch_size)
    qf_losses = (qf_values - td_target).square().mean(1)
    metrics = {"losses/qf1_loss": qf_losses[0], "losses/qf2_loss": qf_losses[1]}
    return qf_losses.sum(), metrics | {"losses/qf1_values": qf_values[0].mean(), "losses/qf2_values": qf_values[1].mean()}


def compute_actor_loss(agent: Agent, obs: Tensor, masks: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Metrics]:
    """Loss of the policy (2018b, eq. 9; 2019, eq. 12), and its entropies (batch_size, 1 or num_branches)."""
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
        metrics = {"losses/action_magnitude": actions.abs().mean(), "losses/policy_mean": mean.mean()}
        metrics["losses/policy_std"] = log_std.exp().mean()
    return actor_loss, entropies, metrics | {"losses/actor_loss": actor_loss, "losses/entropy": entropies.sum(-1).mean()}


def compute_alpha_loss(agent: Agent, entropies: Tensor, targets: Tensor) -> tuple[Tensor, Metrics]:
    """Loss of the entropy coefficients: raises one while its entropy is below its target (2018b, eq. 18; 2019, eq. 11)."""
    alpha_loss = (agent.log_alpha.exp() * (entropies.detach() - targets)).mean()
    return alpha_loss, {"losses/alpha_loss": alpha_loss}


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


def compute_qf_gradient(agent: Agent, batch: tuple[Tensor, ...], noise: Tensor, args: Args) -> tuple[Tensor, Metrics]:
    """Gradient of the critics on a batch (`ReplayBuffer.sample`)."""
    obs, _, actions, rewards, next_obs, next_masks, terminations = batch
    obs, next_obs = agent.normalize(obs), agent.normalize(next_obs)
    td_target = compute_td_target(agent, rewards, next_obs, next_masks, terminations, noise, args)
    loss, metrics = compute_qf_loss(agent, obs, actions, td_target)
    gradient = compute_gradient(loss, agent.qf.parameters())
    metrics["losses/qf_grad_norm"] = gradient.norm()
    return gradient, {name: value.detach() for name, value in metrics.items()}


def compute_actor_gradient(
    agent: Agent, batch: tuple[Tensor, ...], noise: Tensor, args: Args
) -> tuple[Tensor, Tensor | None, Metrics]:
    """Gradients of the actor and, with --autotune, of the entropy coefficients; none of the critics that they go through."""
    obs, masks, actions = batch[:3]
    actor_loss, entropies, metrics = compute_actor_loss(agent, agent.normalize(obs), masks, noise)
    gradient, alpha_gradient = compute_gradient(actor_loss, agent.actor.parameters()), None
    metrics["losses/actor_grad_norm"] = gradient.norm()
    if args.autotune:
        alpha_loss, alpha_metrics = compute_alpha_loss(agent, entropies, target_entropies(agent, masks, args))
        alpha_gradient, metrics = compute_gradient(alpha_loss, [agent.log_alpha]), metrics | alpha_metrics
    return gradient, alpha_gradient, {name: value.detach() for name, value in metrics.items()}


def compile_update(agents: Mapping[str, Agent], buffers: Mapping[str, ReplayBuffer], args: Args) -> None:
    """Puts compiled forms in the place of the gradients' functions; where that fails, says so and leaves them."""
    global compute_qf_gradient, compute_actor_gradient
    began = time.perf_counter()
    torch._dynamo.config.trace_autograd_ops = True  # or torch.autograd.grad would not be compiled
    torch._inductor.config.cpp.vec_isa_ok = True  # or some processes would find out each time what the compiler can do
    torch._inductor.config.cpp_wrapper = not (args.cuda and torch.cuda.is_available())  # calls from C++, not from Python
    compiled_qf, compiled_actor = torch.compile(compute_qf_gradient), torch.compile(compute_actor_gradient)
    try:
        for behavior, buffer in buffers.items():
            batch = buffer.gather(buffer.rows(0, args.batch_size))
            compiled_qf(agents[behavior], batch, torch.zeros_like(batch[2]), args)
            compiled_actor(agents[behavior], batch, torch.zeros_like(batch[2]), args)
    except RuntimeError as error:  # no C++ compiler, say
        print(f"warning: the update is slow, for it cannot be compiled: {str(error).splitlines()[0]}", file=sys.stderr)
        return
    compute_qf_gradient, compute_actor_gradient = compiled_qf, compiled_actor
    print(f"compiled the update in {time.perf_counter() - began:.1f} s; PyTorch keeps it on disk for the next run")


def update(
    agent: Agent, optimizers: Mapping[str, torch.optim.Optimizer], batch: tuple[Tensor, ...], args: Args, num_updates: int
) -> Metrics:
    """One round of Algorithm 1: critics, actor, entropy coefficients, targets; num_updates counts the earlier ones."""
    actions = batch[2]
    gradient, metrics = compute_qf_gradient(agent, batch, torch.randn_like(actions), args)
    gradient_step(optimizers["q"], gradient)

    if num_updates % args.policy_frequency == 0:
        for _ in range(args.policy_frequency):
            gradient, alpha_gradient, actor_metrics = compute_actor_gradient(agent, batch, torch.randn_like(actions), args)
            gradient_step(optimizers["policy"], gradient)
            if alpha_gradient is not None:
                gradient_step(optimizers["alpha"], alpha_gradient)
            metrics |= actor_metrics

    if num_updates % args.target_network_frequency == 0:
        with torch.no_grad():
            torch._foreach_lerp_(list(agent.qf_target.parameters()), list(agent.qf.parameters()), args.tau)
    metrics["losses/alpha"] = agent.log_alpha.detach().exp().mean()
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
    total_steps = -(-args.total_timesteps // args.num_games) * args.num_games
    print(f"{args.exp_name}: {args.env_id}, seed {args.seed}, {total_steps:,} steps on {device}, run folder {folder}")
    if total_steps != args.total_timesteps:
        print(f"--total-timesteps {args.total_timesteps:,} is rounded up to a multiple of --num-games {args.num_games}")

    # --- agents, optimisers, pools and ratings ---
    agents = {team.behavior: Agent(team, args).to(device) for team in env.teams}
    learning_rates = {"policy": args.policy_lr, "q": args.q_lr, "alpha": args.alpha_lr}
    all_optimizers = {}
    for behavior, agent in agents.items():
        parameters = {"policy": list(agent.actor.parameters()), "q": list(agent.qf.parameters()), "alpha": [agent.log_alpha]}
        all_optimizers[behavior] = {name: make_optimizer(parameters[name], lr=learning_rates[name]) for name in parameters}
    annealed = [name for name in learning_rates if getattr(args, f"{name}_lr_schedule") == "linear"]
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

    # --- storage ---
    buffers = {
        team.behavior: ReplayBuffer(args.buffer_size, team, device, folder / "checkpoint.replay" / str(t))
        for t, team in enumerate(env.teams)
    }

    # --- resume ---
    parts: dict[str, Any] = {f"{behavior}_agent": agent for behavior, agent in agents.items()}
    for behavior, optimizers in all_optimizers.items():
        parts |= {f"{behavior}_{name}_optimizer": optimizer for name, optimizer in optimizers.items()}
    parts |= {f"{behavior}_buffer": buffer for behavior, buffer in buffers.items()}
    parts |= {f"{behavior}_pool": pool for behavior, pool in pools.items()} | {"matches": matches}
    counters: dict[str, Any] = {"global_step": 0, "learner_steps": dict.fromkeys(behaviors, 0), "turn_started": 0}
    counters |= {"game_steps": dict.fromkeys(behaviors, 0), "num_updates": dict.fromkeys(behaviors, 0)}
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
        compile_update(agents, buffers, args)

    # --- loop ---
    global_step, status, finished_lengths = counters["global_step"], "", []
    learner_steps, turn_started = counters["learner_steps"], counters["turn_started"]
    game_steps, num_updates = counters["game_steps"], counters["num_updates"]
    progress = tqdm(total=total_steps, initial=global_step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty())
    log_step, line_step, log_time, line_time = global_step, global_step, time.time(), time.time()
    begins_anew, is_finished, failure, is_sound = True, False, "", True
    try:
        while global_step < total_steps and not stop_signals:
            learner = matches.learner
            agent, optimizers, buffer = agents[learner], all_optimizers[learner], buffers[learner]
            if begins_anew:  # at the start, after each checkpoint and each change of team
                obs = begin_anew(env, matches, args.seed, global_step)
                games_length = np.zeros(args.num_games)
                update_metrics: Metrics = {}
                begins_anew = False
            for name in annealed:
                optimizers[name].param_groups[0]["lr"] = learning_rates[name] * (1.0 - global_step / total_steps)

            # act and step
            learner_obs, valid = matches.of_learner(obs), matches.of_learner(env.alive)
            masks = matches.of_learner([legal_actions(env, t) for t in range(len(env.teams))])
            if args.norm_obs and valid.any():
                agent.obs_rms.update(torch.as_tensor(learner_obs[valid], device=device))
            if game_steps[learner] < args.learning_starts:
                actions = matches.of_learner([env.scripted_actions("random", t) for t in range(len(env.teams))])
            else:
                actions = agent.act(learner_obs, masks, agent.noise(len(learner_obs)))
            global_step += args.num_games
            result = env.step(matches.all_actions(env, agents, obs, actions))
            game_steps[learner] += args.num_games
            learner_steps[learner] += int(valid.sum())

            # store
            next_masks = matches.of_learner([next_legal_actions(env, t, result.over) for t in range(len(env.teams))])
            columns = [matches.of_learner(x) for x in (result.rewards, result.final_obs, result.terminations)]
            rewards, final_obs, terminations = columns
            both = np.concatenate([learner_obs, final_obs], axis=-1)
            check_finite({"observation": both[None], "reward": rewards[None]}, global_step - args.num_games, args.num_games)
            stored = (learner_obs, masks, actions, rewards, final_obs, next_masks, terminations)
            opponents = matches.opponent_steps().repeat(len(valid) // args.num_games)
            if valid.any():
                buffer.add(opponents[valid], *(column[valid] for column in stored))
            obs = result.obs

            # record, rate, next opponents
            games_length += 1
            for game in result.over.nonzero()[0]:
                finished_lengths.append(games_length[game])
                games_length[game] = 0.0
                matches.finish(int(game), result.scores[game])

            # update
            while buffer.total and num_updates[learner] < int(
                args.updates_per_step * (game_steps[learner] - args.learning_starts)
            ):
                update_metrics |= update(agent, optimizers, buffer.sample(args.batch_size), args, num_updates[learner])
                num_updates[learner] += 1

            # snapshot, change team
            newest = pools[learner].latest
            if learner_steps[learner] - pools[learner].latest.step >= args.save_steps:
                pools[learner].add(agent.acting_weights(), learner_steps[learner], matches.rating)
            if len(behaviors) > 1 and learner_steps[learner] - turn_started >= args.team_change:
                if learner_steps[learner] > pools[learner].latest.step:
                    pools[learner].add(agent.acting_weights(), learner_steps[learner], matches.rating)
                matches.give_turn(behaviors[(behaviors.index(learner) + 1) % len(behaviors)])
                turn_started = learner_steps[matches.learner]
                begins_anew = True
            if args.replay_opponents == "window" and pools[learner].latest is not newest:
                opposing = [team.behavior for t, team in enumerate(env.teams) if t != matches.sides[0]]
                buffers[matches.learner].leave_out(min(pools[behavior].snapshots[0].step for behavior in opposing))

            # log
            metrics: dict[str, float] = {}
            is_checkpoint = args.checkpoint_freq > 0 and global_step % args.checkpoint_freq < args.num_games
            if global_step % args.log_freq < args.num_games or is_checkpoint:
                metrics = matches.metrics()
                metrics |= {name: value.item() for name, value in update_metrics.items()}
                check_finite({name: [value] for name, value in metrics.items()}, global_step - 1)
                metrics |= {f"charts/{name}_lr": optimizer.param_groups[0]["lr"] for name, optimizer in optimizers.items()}
                metrics["charts/SPS"] = (global_step - log_step) / (time.time() - log_time)
                metrics["charts/learner"] = float(behaviors.index(learner))
                if finished_lengths:
                    metrics["charts/episodic_length"] = float(np.mean(finished_lengths))
                    matches.warn_of_short_swaps(metrics["charts/episodic_length"])
                    finished_lengths = []

            # evaluate and report
            if args.eval_freq and global_step % args.eval_freq < args.num_games and global_step < total_steps:
                metrics |= evaluate(agents, args, folder)
                status = ", " + describe(metrics)
            progress.update(args.num_games)
            if metrics:
                log_metrics(writer, metrics, global_step, args)
                ratings = ", ".join(f"{behavior} {matches.rating_of(behavior):.0f}" for behavior in behaviors)
                progress.set_postfix_str(f"rating {ratings}{status}", refresh=False)
                log_step, log_time = global_step, time.time()
                if progress.disable and log_time - line_time > 30:
                    steps_per_second = (global_step - line_step) / (log_time - line_time)
                    speed = f"step {global_step:,} of {total_steps:,}, {steps_per_second:,.0f} steps/s"
                    print(f"{speed}, rating {ratings}{status}", flush=True)
                    line_step, line_time = global_step, log_time

            # checkpoint
            if is_checkpoint:
                counters |= {"global_step": global_step, "turn_started": turn_started}
                if save_checkpoint(folder, writer, parts, counters):
                    for buffer in buffers.values():
                        buffer.remove_old_files()
                begins_anew = True
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
        if save_checkpoint(folder, writer, parts, counters):
            for buffer in buffers.values():
                buffer.remove_old_files()
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
