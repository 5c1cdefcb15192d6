"""SAC for continuous control: one file, any Gymnasium task with continuous actions.

Soft actor-critic with twin critics and a learned entropy coefficient (Haarnoja et al. 2018b, https://arxiv.org/abs/1812.05905:
eq. 5 is the critics' objective, eq. 9 the actor's, eq. 18 the entropy coefficient's, Algorithm 1 the order). With
`--value-network` the first release instead (Haarnoja et al. 2018a, https://arxiv.org/abs/1801.01290, eq. 5 to 13 and
Algorithm 1): a state value with a target copy takes the place of the target critics.

    python sac_continuous.py --env-id HalfCheetah-v5
    python sac_continuous.py --evaluate runs/FOLDER --capture-video
    python sac_continuous.py --resume runs/FOLDER

What differs from the reference (CleanRL's `sac_continuous_action.py`), and why:
- No reset is stored as a transition, whatever the autoreset mode; time limits are not stored as terminations, as there.
- The logarithm of the standard deviation is cut off at -20 and 2, as in the paper's own code; the reference squeezes it into
  [-5, 2] by a tanh.
- The twin critics are one module of batched matrix products: half the calls, the same arithmetic.
- The actor's pass that yields its loss also yields the entropy coefficient's; the reference samples the policy again.
- The actor's backward pass computes no gradient for the critics' weights, which it does not need.
- A transition is one row of the replay buffer, so that a minibatch is one gather.
- The update is compiled, and all parameters are views of one vector that the optimiser steps: for small networks PyTorch takes
  longer to say what is to be done than to do it. `--no-compile` computes the same uncompiled.
- The policy acts in [-1, 1] and is rescaled to the bounds of the task, so that the target entropy means the same in every unit.
- Learning rate 1e-3 for all three optimisers, the actor updated with every critic update: what the published evidence favours.
- At a checkpoint all environments are reset and all random streams begin anew, by seeds of that step: a run that was killed and
  resumed equals, bit for bit on the CPU, the one that was not.
"""

import copy
import io
import itertools
import json
import math
import os
import pickle
import platform
import random
import re
import shlex
import shutil
import signal
import sys
import time
import traceback
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from gymnasium.spaces import flatdim
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# === Arguments ========================================================================================================


@dataclass
class Args:
    """SAC for continuous control: trains on any Gymnasium task with continuous actions."""

    # --- experiment ---
    exp_name: str = Path(__file__).stem
    """name of the experiment, a part of the run folder's name"""
    seed: int = 1
    """seed of the networks, the exploration, the minibatches and the environments"""
    torch_deterministic: bool = True
    """use only deterministic cuDNN algorithms"""
    cuda: bool = True
    """use the GPU if there is one"""
    compile: bool = True
    """compile the update: it starts some seconds later, more on the first run of a machine, and each step is faster"""
    track: bool = False
    """log to Weights & Biases too (WANDB_MODE=offline works without an account)"""
    wandb_project_name: str = "continuous-control"
    """W&B project"""
    wandb_entity: str | None = None
    """W&B team or user; the account's default if not given"""
    capture_video: bool = False
    """record the first episode of every evaluation into videos/ of the run folder"""
    save_model: bool = True
    """write model.pt into the run folder at the end"""
    upload_model: bool = False
    """upload the model with a model card to the Hugging Face Hub at the end"""
    hf_entity: str | None = None
    """user or organisation on the Hugging Face Hub that the model is uploaded to"""
    eval_freq: int = 10_000
    """environment steps between two evaluations of the deterministic policy; 0 evaluates only at the end"""
    eval_episodes: int = 10
    """episodes of an evaluation"""
    evaluate: Path | None = None
    """do not train: load the model of this run folder, and print the returns of --eval-episodes episodes"""
    checkpoint_freq: int = 20_000
    """environment steps between two checkpoints, at which all environments are reset; 0 writes only the first and the last"""
    resume: Path | None = None
    """go on with the run of this folder, from its last checkpoint and with its arguments"""

    # --- environment ---
    env_id: str = "HalfCheetah-v5"
    """id of a Gymnasium task whose actions are a Box with finite bounds; module:id imports the module first"""
    num_envs: int = 1
    """environments that are stepped together"""
    vectorization: Literal["sync", "async", "native"] = "sync"
    """how they are stepped: one after another, a process each, or by the task's own vector environment"""

    # --- algorithm ---
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, over all environments"""
    buffer_size: int = 1_000_000
    """transitions that the replay buffer holds; the oldest are overwritten"""
    batch_size: int = 256
    """transitions of a minibatch"""
    learning_starts: int = 5_000
    """environment steps with uniformly random actions before the first update"""
    updates_per_step: float = 1.0
    """updates for each environment step; 0.25 is one in four steps, 4 is four in each"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 0.005
    """share of the networks that moves into their targets at each target update"""
    policy_frequency: int = 1
    """the actor is updated after every N updates of the critics, then N times in a row"""
    target_network_frequency: int = 1
    """the targets are updated every this many updates"""
    policy_lr: float = 1e-3
    """learning rate of the actor"""
    q_lr: float = 1e-3
    """learning rate of the critics (and of the value network)"""
    alpha_lr: float = 1e-3
    """learning rate of the entropy coefficient"""
    policy_lr_schedule: Literal["constant", "linear"] = "constant"
    """learning rate of the actor over the run: constant, or linearly to zero"""
    q_lr_schedule: Literal["constant", "linear"] = "constant"
    """the same for the critics"""
    alpha_lr_schedule: Literal["constant", "linear"] = "constant"
    """the same for the entropy coefficient"""
    alpha: float = 1.0
    """entropy coefficient: its initial value, or its fixed value with --no-autotune"""
    autotune: bool = True
    """learn the entropy coefficient"""
    target_entropy_scale: float = 1.0
    """the policy's entropy is driven to minus this times the number of action dimensions"""
    norm_obs: bool = False
    """normalise observations by their running mean and standard deviation, and clip them to [-10, 10]"""
    value_network: bool = False
    """learn a state value with a target instead of target critics (the first release of SAC)"""
    log_freq: int = 1_000
    """environment steps between two points of the training curves"""


def fail(message: str) -> NoReturn:
    """Ends the program before it trains: one sentence on standard error, exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_args(args: Args) -> None:
    """Refuses what no run can use, in one sentence that names the flag and what it takes."""
    limits: list[tuple[float, float, str]] = [
        (0, 1, "gamma tau"),
        (1, 1e12, "eval_episodes num_envs total_timesteps batch_size policy_frequency target_network_frequency log_freq"),
        (0, 1e12, "eval_freq checkpoint_freq learning_starts updates_per_step policy_lr q_lr alpha_lr target_entropy_scale"),
        (0, 2**31, "seed"),
        (1e-9, 1e9, "alpha"),
        (args.num_envs, 1e12, "buffer_size"),
    ]
    for low, high, names in limits:
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not low <= value <= high:  # NaN fails this, too
                fail(f"--{name.replace('_', '-')} takes a number from {low:g} to {high:g}, not {value}")
    for flag, package in (("track", "wandb"), ("upload_model", "huggingface_hub"), ("capture_video", "moviepy")):
        if getattr(args, flag) and find_spec(package) is None:
            fail(f"--{flag.replace('_', '-')} needs the package {package}: pip install {package}")
    if args.capture_video and args.vectorization == "native":
        fail("--capture-video takes --vectorization sync or async: a native vector environment cannot be recorded")
    if args.track and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        try:
            is_logged_in = wandb.login(prompt=False)
        except wandb.Error as error:
            fail(f"--track cannot log in to W&B: {' '.join(str(error).split())}")
        if not is_logged_in:
            fail("--track takes a W&B account: log in with `wandb login`, or set WANDB_MODE=offline")
    if args.upload_model:
        from huggingface_hub import get_token
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        if args.hf_entity is None or not args.save_model:
            fail("--upload-model takes --save-model and --hf-entity NAME, a user or organisation on the Hugging Face Hub")
        if get_token() is None:
            fail("--upload-model takes a Hugging Face account: log in with `hf auth login`, or set HF_TOKEN")
        try:
            validate_repo_id(hub_repo_id(args))
        except HFValidationError as error:
            fail(f"--upload-model takes an --hf-entity and --exp-name that the Hub allows: {' '.join(str(error).split())}")


MAY_CHANGE = {  # of a run's own arguments
    "resume": ("total_timesteps", "cuda", "compile", "track", "wandb_project_name", "wandb_entity", "capture_video"),
    "evaluate": ("seed", "eval_episodes", "capture_video"),
}
OFF_IN_EVALUATION = ("track", "capture_video", "upload_model")  # unless the command line says so


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


class TaskError(Exception):
    """The task's own code raised something."""


class NumberedEnv(gym.Wrapper):
    """Says which of several environments it was that raised."""

    def __init__(self, env: gym.Env, index: int) -> None:
        super().__init__(env)
        self.index = index

    def reset(self, **kwargs: Any) -> Any:
        """Begins an episode."""
        try:
            return self.env.reset(**kwargs)
        except Exception as error:
            raise RuntimeError(f"environment {self.index} in reset: {type(error).__name__}: {error}") from error

    def step(self, action: Any) -> Any:
        """Plays a step."""
        try:
            return *self.env.step(action)[:4], {}  # infos, which nothing reads, take time to collect
        except Exception as error:
            raise RuntimeError(f"environment {self.index} in step: {type(error).__name__}: {error}") from error


def make_env(env_id: str, index: int, video_folder: Path | None = None, video_name: str = "") -> gym.Env:
    """The environment with this index, with flat observations; records its first episode if there is a folder for it."""
    env = gym.make(env_id) if video_folder is None else gym.make(env_id, render_mode="rgb_array")
    if video_folder is not None:
        warnings.filterwarnings("ignore", "(?s).*Overwriting existing videos")  # each recording has its own name
        env = gym.wrappers.RecordVideo(env, str(video_folder), lambda episode: episode == 0, name_prefix=video_name)
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return NumberedEnv(env, index)


def make_envs(
    env_id: str, num_envs: int, vectorization: str, video_folder: Path | None = None, video_name: str = ""
) -> VectorEnv:
    """`num_envs` environments that step together; the first one is recorded if there is a folder for it.

    Exits with one sentence if there is no such task, or its spaces are not those that this script is for.
    """
    try:
        if vectorization == "native":
            envs = gym.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point")
        else:
            env_fns = [partial(make_env, env_id, i, video_folder if i == 0 else None, video_name) for i in range(num_envs)]
            vector_class = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}[vectorization]
            envs = vector_class(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)
    except (gym.error.Error, ImportError, NotImplementedError) as error:
        fail(f"--env-id {env_id} cannot be made: {' '.join(str(error).split())}")
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
        fail(f"--env-id takes a task whose observations flatten to a vector, and those of {env_id} are {obs_space}")
    if not isinstance(action_space, gym.spaces.Box) or action_space.dtype.kind != "f" or not action_space.is_bounded():
        fail(f"--env-id takes a task whose actions are a Box with finite bounds, and those of {env_id} are {action_space}")
    return envs


def check_video(env_id: str) -> None:
    """Exits with one sentence if the task cannot be drawn, which is better known now than after the first evaluation."""
    try:
        with gym.make(env_id, render_mode="rgb_array") as env:
            env.reset()
            frame = env.render()
    except Exception as error:  # each task, and each way to draw, has errors of its own
        fail(f"--capture-video cannot draw {env_id}: {type(error).__name__}: {' '.join(str(error).split())}")
    if not isinstance(frame, np.ndarray):
        fail(f"--capture-video takes a task that draws pictures, and {env_id} draws none")


def reset_envs(envs: VectorEnv, **kwargs: Any) -> np.ndarray:
    """Begins episodes, and returns their first observations (num_envs, obs_dim)."""
    try:
        return envs.reset(**kwargs)[0]
    except Exception as error:
        raise TaskError(str(error)) from error


def step_envs(envs: VectorEnv, actions: np.ndarray) -> tuple[np.ndarray, ...]:
    """Steps every environment, and keeps apart the observation to act on next and the one that the step led to.

    Takes actions (num_envs, action_dim): [-1, 1] is mapped linearly onto the bounds of the task, and what is beyond is clipped.
    Returns obs, final_obs (num_envs, obs_dim), rewards, terminations, truncations (num_envs,). The two observations differ
    where an episode ended and the next one has begun in the same step. In the autoreset mode NEXT_STEP they never do: there
    the step after an episode's end is a mere reset, which ignores its action, and the caller must not store it.
    """
    space = envs.single_action_space
    assert isinstance(space, gym.spaces.Box)
    shares = 0.5 * (actions.reshape(envs.action_space.shape) + 1.0)
    env_actions = (space.low + shares * (space.high - space.low)).clip(space.low, space.high)
    try:
        obs, rewards, terminations, truncations, infos = envs.step(env_actions)
    except Exception as error:
        raise TaskError(str(error)) from error
    final_obs, dones = obs, terminations | truncations
    if dones.any() and envs.metadata["autoreset_mode"] != AutoresetMode.NEXT_STEP:
        final_obs = obs.copy()
        if envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP:
            final_obs[dones] = np.stack(infos["final_obs"][dones])
        else:
            obs = reset_envs(envs, options={"reset_mask": dones})
    return obs, final_obs, rewards, terminations, truncations


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


class Actor(nn.Module):
    """Normal policy, squashed by tanh; its mean and log standard deviation both depend on the observation."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.net = mlp(obs_dim, 256, 256, 2 * action_dim)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Observations (..., obs_dim) to the mean and the log standard deviation (..., action_dim) before squashing."""
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        return mean, log_std.clamp(-20.0, 2.0)


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

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        widths = (obs_dim + action_dim, 256), (256, 256), (256, 1)
        self.net = nn.Sequential(TwinLinear(*widths[0]), nn.ReLU(), TwinLinear(*widths[1]), nn.ReLU(), TwinLinear(*widths[2]))

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Observations (batch_size, obs_dim) and actions (batch_size, action_dim) to both values (2, batch_size)."""
        return self.net(torch.cat([obs, actions], dim=-1).expand(2, -1, -1)).squeeze(-1)


class Agent(nn.Module):
    """All that is learned, and so all that is saved: policy, critics, their targets, entropy coefficient and statistics."""

    def __init__(self, envs: VectorEnv, args: Args) -> None:
        super().__init__()
        obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
        self.norm_obs = args.norm_obs
        self.obs_rms = RunningMeanStd((obs_dim,))
        self.actor = Actor(obs_dim, action_dim)
        self.qf = TwinQNetwork(obs_dim, action_dim)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha)))
        if args.value_network:
            self.vf = mlp(obs_dim, 256, 256, 1)
            self.vf_target = copy.deepcopy(self.vf).requires_grad_(False)
        else:
            self.qf_target = copy.deepcopy(self.qf).requires_grad_(False)

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations (..., obs_dim) to what the networks take."""
        return self.obs_rms.normalize(obs) if self.norm_obs else obs

    @torch.no_grad()
    def act(self, obs: np.ndarray, noise: Tensor | float = 0.0) -> np.ndarray:
        """Raw observations (num_envs, obs_dim) to actions (num_envs, action_dim) in [-1, 1]; deterministic without noise."""
        device = self.obs_rms.mean.device
        mean, log_std = self.actor(self.normalize(torch.as_tensor(obs, dtype=torch.float32, device=device)))
        return (mean + log_std.exp() * noise).tanh().cpu().numpy()


# === Replay buffer ====================================================================================================


class ReplayBuffer:
    """The last `capacity` transitions, one row each, so that a minibatch is one gather."""

    def __init__(self, capacity: int, obs_dim: int, action_dim: int, device: torch.device, folder: Path) -> None:
        """Takes the number of rows, the widths of observations and actions, and the folder that checkpoints of it go to."""
        self.widths = [obs_dim, action_dim, 1, obs_dim, 1]
        self.data = torch.zeros((capacity, sum(self.widths)), device=device)
        self.total = 0  # transitions stored so far: the one with the number i is in row i % capacity
        self.folder = folder
        self.files: list[tuple[int, int]] = []  # of the newest checkpoint: the first number in each, and the one after its last
        self.files_before: list[tuple[int, int]] = []  # of the one before

    def add(
        self, obs: np.ndarray, actions: np.ndarray, rewards: np.ndarray, final_obs: np.ndarray, terminations: np.ndarray
    ) -> None:
        """Stores a batch: obs, final_obs (n, obs_dim), actions (n, action_dim), rewards, terminations (n,)."""
        columns = (obs, actions, rewards[:, None], final_obs, terminations[:, None])
        rows = torch.as_tensor(np.concatenate(columns, axis=1, dtype=np.float32), device=self.data.device)
        self.data[self.rows(self.total, self.total + len(rows))] = rows
        self.total += len(rows)

    def rows(self, start: int, stop: int) -> Tensor:
        """The rows of the transitions with these numbers."""
        return torch.arange(start, stop, device=self.data.device) % len(self.data)

    def sample(self, batch_size: int) -> tuple[Tensor, ...]:
        """Uniformly with replacement: obs, actions, rewards (batch_size,), next_obs, terminations (batch_size,)."""
        return self.gather(torch.randint(min(self.total, len(self.data)), (batch_size,), device=self.data.device))

    def gather(self, indices: Tensor) -> tuple[Tensor, ...]:
        """The transitions in these rows (batch_size,), split as `sample` has them."""
        obs, actions, rewards, next_obs, terminations = self.data.index_select(0, indices).split(self.widths, dim=1)
        return obs, actions, rewards.squeeze(1), next_obs, terminations.squeeze(1)

    def state_dict(self) -> dict[str, Any]:
        """Writes the transitions since the last call to a file of their own, and tells which files hold the buffer."""
        oldest = self.total - len(self.data)
        start = max(self.files[-1][1] if self.files else 0, oldest)
        self.folder.mkdir(parents=True, exist_ok=True)
        if start < self.total:
            contents = io.BytesIO()
            np.savez(contents, rows=self.data[self.rows(start, self.total)].cpu().numpy())
            write_file(self.folder / f"{start}.npz", contents.getvalue())
            self.files = [file for file in self.files if file[1] > oldest] + [(start, self.total)]
        return {"total": self.total, "files": self.files}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Reads these files."""
        for start, stop in state["files"]:
            with np.load(self.folder / f"{start}.npz") as archive:
                self.data[self.rows(start, stop)] = torch.as_tensor(archive["rows"], device=self.data.device)
        self.total, self.files, self.files_before = state["total"], state["files"], state["files"]

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


@torch.no_grad()
def compute_td_target(
    agent: Agent, rewards: Tensor, next_obs: Tensor, terminations: Tensor, noise: Tensor, args: Args
) -> Tensor:
    """What both critics regress on (batch_size,): reward plus discounted soft value of the next state (2018b, eq. 2 and 3)."""
    if args.value_network:  # 2018a, eq. 8
        next_values = agent.vf_target(next_obs).squeeze(-1)
    else:
        mean, log_std = agent.actor(next_obs)
        next_actions, next_log_prob = sample_actions(mean, log_std, noise)
        next_values = agent.qf_target(next_obs, next_actions).amin(0) - agent.log_alpha.exp() * next_log_prob
    return rewards + args.gamma * (1.0 - terminations) * next_values


def compute_qf_loss(agent: Agent, obs: Tensor, actions: Tensor, td_target: Tensor) -> tuple[Tensor, Metrics]:
    """Mean squared Bellman error, summed over the critics (2018b, eq. 5, without its factor 1/2)."""
    qf_values = agent.qf(obs, actions)  # (2, batch_size)
    qf_losses = (qf_values - td_target).square().mean(1)
    metrics = {"losses/qf1_loss": qf_losses[0], "losses/qf2_loss": qf_losses[1]}
    return qf_losses.sum(), metrics | {"losses/qf1_values": qf_values[0].mean(), "losses/qf2_values": qf_values[1].mean()}


def compute_vf_loss(agent: Agent, obs: Tensor, noise: Tensor) -> tuple[Tensor, Metrics]:
    """Mean squared error of the state value to the soft value of fresh actions (2018a, eq. 5); --value-network only."""
    with torch.no_grad():
        mean, log_std = agent.actor(obs)
        actions, log_prob = sample_actions(mean, log_std, noise)
        soft_values = agent.qf(obs, actions).amin(0) - agent.log_alpha.exp() * log_prob
    vf_values = agent.vf(obs).squeeze(-1)
    vf_loss = (vf_values - soft_values).square().mean()
    return vf_loss, {"losses/vf_loss": vf_loss, "losses/vf_values": vf_values.mean()}


def compute_actor_loss(agent: Agent, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Metrics]:
    """Loss of the policy (2018b, eq. 9), and the log-probabilities (batch_size,) of the actions that it was computed from."""
    mean, log_std = agent.actor(obs)
    actions, log_prob = sample_actions(mean, log_std, noise)
    actor_loss = (agent.log_alpha.exp().detach() * log_prob - agent.qf(obs, actions).amin(0)).mean()
    metrics = {
        "losses/actor_loss": actor_loss,
        "losses/entropy": -log_prob.mean(),
        "losses/action_magnitude": actions.abs().mean(),
    }
    return actor_loss, log_prob, metrics | {"losses/policy_mean": mean.mean(), "losses/policy_std": log_std.exp().mean()}


def compute_alpha_loss(agent: Agent, log_prob: Tensor, target_entropy: float) -> tuple[Tensor, Metrics]:
    """Loss of the entropy coefficient: raises it while the entropy is below its target (2018b, eq. 18)."""
    alpha_loss = -(agent.log_alpha.exp() * (log_prob.detach() + target_entropy)).mean()
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
    """Gradient of the critics (with --value-network of the state value, too) on a batch (`ReplayBuffer.sample`)."""
    obs, actions, rewards, next_obs, terminations = batch
    obs, next_obs = agent.normalize(obs), agent.normalize(next_obs)
    td_target = compute_td_target(agent, rewards, next_obs, terminations, noise, args)
    loss, metrics = compute_qf_loss(agent, obs, actions, td_target)
    parameters = list(agent.qf.parameters())
    if args.value_network:  # shares no parameter with the critics, so one step takes both
        vf_loss, vf_metrics = compute_vf_loss(agent, obs, noise)
        loss, metrics, parameters = loss + vf_loss, metrics | vf_metrics, parameters + list(agent.vf.parameters())
    gradient = compute_gradient(loss, parameters)
    metrics["losses/qf_grad_norm"] = gradient.norm()
    return gradient, {name: value.detach() for name, value in metrics.items()}


def compute_actor_gradient(agent: Agent, obs: Tensor, noise: Tensor, args: Args) -> tuple[Tensor, Tensor | None, Metrics]:
    """Gradients of the actor and, with --autotune, of the entropy coefficient; none of the critics that they go through."""
    actor_loss, log_prob, metrics = compute_actor_loss(agent, agent.normalize(obs), noise)
    gradient, alpha_gradient = compute_gradient(actor_loss, agent.actor.parameters()), None
    metrics["losses/actor_grad_norm"] = gradient.norm()
    if args.autotune:
        alpha_loss, alpha_metrics = compute_alpha_loss(agent, log_prob, -args.target_entropy_scale * noise.shape[1])
        alpha_gradient, metrics = compute_gradient(alpha_loss, [agent.log_alpha]), metrics | alpha_metrics
    return gradient, alpha_gradient, {name: value.detach() for name, value in metrics.items()}


def compile_update(agent: Agent, buffer: ReplayBuffer, args: Args) -> None:
    """Puts compiled forms in the place of the gradients' functions; where that fails, says so and leaves them."""
    global compute_qf_gradient, compute_actor_gradient
    began, batch = time.perf_counter(), buffer.gather(buffer.rows(0, args.batch_size))
    noise = torch.zeros_like(batch[1])
    torch._dynamo.config.trace_autograd_ops = True  # or torch.autograd.grad would not be compiled
    torch._inductor.config.cpp.vec_isa_ok = True  # or some processes would find out each time what the compiler can do
    torch._inductor.config.cpp_wrapper = not (args.cuda and torch.cuda.is_available())  # calls from C++, not from Python
    compiled_qf, compiled_actor = torch.compile(compute_qf_gradient), torch.compile(compute_actor_gradient)
    try:
        compiled_qf(agent, batch, noise, args)
        compiled_actor(agent, batch[0], noise, args)
    except RuntimeError as error:  # no C++ compiler, say
        print(f"warning: the update is slow, for it cannot be compiled: {str(error).splitlines()[0]}", file=sys.stderr)
        return
    compute_qf_gradient, compute_actor_gradient = compiled_qf, compiled_actor
    print(f"compiled the update in {time.perf_counter() - began:.1f} s; PyTorch keeps it on disk for the next run")


def update(
    agent: Agent, optimizers: Mapping[str, torch.optim.Optimizer], batch: tuple[Tensor, ...], args: Args, num_updates: int
) -> Metrics:
    """One round of Algorithm 1: critics, actor, entropy coefficient, targets; num_updates counts the earlier ones."""
    obs, actions = batch[:2]
    gradient, metrics = compute_qf_gradient(agent, batch, torch.randn_like(actions), args)
    gradient_step(optimizers["q"], gradient)

    if num_updates % args.policy_frequency == 0:
        for _ in range(args.policy_frequency):
            gradient, alpha_gradient, actor_metrics = compute_actor_gradient(agent, obs, torch.randn_like(actions), args)
            gradient_step(optimizers["policy"], gradient)
            if alpha_gradient is not None:
                gradient_step(optimizers["alpha"], alpha_gradient)
            metrics |= actor_metrics

    if num_updates % args.target_network_frequency == 0:
        source, target = (agent.vf, agent.vf_target) if args.value_network else (agent.qf, agent.qf_target)
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(source.parameters()), args.tau)
    metrics["losses/alpha"] = agent.log_alpha.detach().exp()
    return metrics


# === Evaluation =======================================================================================================


def evaluate(agent: Agent, args: Args, episodes: int, folder: Path, name: str) -> dict[str, float]:
    """Plays each episode in an environment of its own, with a seed of its own, the deterministic policy and frozen statistics.

    Touches no random stream of the training. With --capture-video the first episode goes to folder/videos/name-episode-0.mp4.
    Returns what is logged: mean and standard deviation of the undiscounted returns, mean length in steps.
    """
    vectorization = "native" if args.vectorization == "native" else "sync"
    envs = make_envs(args.env_id, episodes, vectorization, folder / "videos" if args.capture_video else None, name)
    obs = reset_envs(envs, seed=1_000_000 + args.seed * episodes)
    returns, lengths, running = np.zeros(episodes), np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        obs, _, rewards, terminations, truncations = step_envs(envs, agent.act(obs))
        returns += rewards * running
        lengths += running
        running &= ~(terminations | truncations)
    envs.close()
    return {"eval/return_mean": returns.mean(), "eval/return_std": returns.std(), "eval/length_mean": lengths.mean()}


def describe(metrics: dict[str, float], episodes: int) -> str:
    """An evaluation in one line."""
    mean, std, length = (metrics[f"eval/{name}"] for name in ("return_mean", "return_std", "length_mean"))
    return f"evaluation: return {mean:.2f} +/- {std:.2f}, length {length:.1f}, over {episodes} episodes"


# === Run folder and model file ========================================================================================


VERSIONS = {"torch": str(torch.__version__), "gymnasium": gym.__version__, "numpy": np.__version__}
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


def save_model(folder: Path, agent: Agent, args: Args) -> None:
    """Writes model.pt: the agent with its statistics, and what is needed to build it again. Warns if it cannot."""
    contents = io.BytesIO()
    torch.save({"agent": agent.state_dict(), "args": asdict(args) | {"resume": None}, "versions": VERSIONS}, contents)
    try:
        write_file(folder / "model.pt", contents.getvalue())
    except OSError as error:
        print(f"warning: no model.pt: {error}", file=sys.stderr)


def load_model(folder: Path) -> tuple[Agent, Args]:
    """The agent that `save_model` wrote and the arguments of its run; runs no code from the file."""
    try:
        model = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
        args = Args(**model["args"])
        envs = make_envs(args.env_id, 1, "native" if args.vectorization == "native" else "sync")
        agent = Agent(envs, args)
        envs.close()
        agent.load_state_dict(model["agent"])
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        fail(f"--evaluate takes a run folder with a whole model.pt of this script, and {folder} has none ({reason})")
    return agent, args


def hub_repo_id(args: Args) -> str:
    """Name of the run's repository on the Hugging Face Hub."""
    return f"{args.hf_entity}/" + re.sub(r"[^\w.-]", "-", f"{args.env_id}-{args.exp_name}-seed{args.seed}", flags=re.ASCII)


def upload_model(folder: Path, args: Args, metrics: dict[str, float]) -> None:
    """Writes a model card into the run folder, and uploads the folder to the Hugging Face Hub."""
    from huggingface_hub import EvalResult, HfApi, ModelCardData

    result = f"{metrics['eval/return_mean']:.2f} +/- {metrics['eval/return_std']:.2f}"
    card = ModelCardData(
        library_name="pytorch",
        tags=["reinforcement-learning", "deep-reinforcement-learning", args.exp_name, args.env_id],
        model_name=args.exp_name,
        eval_results=[EvalResult("reinforcement-learning", args.env_id, args.env_id, "mean_reward", result)],
    )
    flags = []
    for name, value in asdict(args).items():
        if value != getattr(Args, name) and name != "resume":
            flag = name.replace("_", "-")
            flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    command = shlex.join(["python", Path(__file__).name, *flags])
    versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}, Gymnasium {gym.__version__}"
    try:
        (folder / "README.md").write_text(
            f"---\n{card.to_yaml()}\n---\n\n# {args.exp_name} on {args.env_id}\n\n"
            f"Return of the final deterministic policy: {result} over {args.eval_episodes} episodes.\n\n"
            f"Trained with {versions}:\n\n    {command}\n\n"
            f"Play it again, from a download of this repository:\n\n    python {Path(__file__).name} --evaluate FOLDER\n"
        )
        api = HfApi()
        repo_id = api.create_repo(hub_repo_id(args), exist_ok=True).repo_id
        url = api.upload_folder(repo_id=repo_id, folder_path=folder, ignore_patterns=["wandb/*", "checkpoint*"])
        print(f"uploaded: {url}")
    except Exception as error:  # network, server and library each have errors of their own, and none may cost the run
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(f"warning: --upload-model failed, and all is still in {folder}: {reason}", file=sys.stderr)


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
        os.environ.setdefault("MUJOCO_GL", "egl")  # videos without a screen: MuJoCo, then pygame
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    if args.capture_video:
        check_video(args.env_id)
    if args.evaluate is not None:
        agent, run_args = load_model(args.evaluate)
        run_args.seed, run_args.capture_video = args.seed, args.capture_video
        print(describe(evaluate(agent, run_args, args.eval_episodes, args.evaluate, "evaluate"), args.eval_episodes))
        return

    # --- seeds and device ---
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.set_flush_denormal(True)  # Adam's averages of a gradient that stays 0 end below 1e-38, where processors are slow
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")

    # --- environments, run folder and loggers ---
    stop_signals: list[int] = []

    def stop(signum: int, _: object) -> None:
        """Lets the loop stop at its next step; once more, the signal ends the program at once, in an evaluation, say."""
        stop_signals.append(signum)
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)

    for signum in (signal.SIGINT, signal.SIGTERM):  # environment processes inherit the handlers, and so outlive a Ctrl-C, too
        signal.signal(signum, stop)
    envs = make_envs(args.env_id, args.num_envs, args.vectorization)
    next_step_reset = envs.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    folder = args.resume or make_run_folder(args)
    lock = lock_folder(folder)
    total_steps = -(-args.total_timesteps // args.num_envs) * args.num_envs
    print(f"{args.exp_name}: {args.env_id}, seed {args.seed}, {total_steps:,} steps on {device}, run folder {folder}")
    if total_steps != args.total_timesteps:
        print(f"--total-timesteps {args.total_timesteps:,} is rounded up to a multiple of --num-envs {args.num_envs}")
    longest = 0
    with suppress(gym.error.Error):  # an id without a version, say, which can be made but not looked up
        longest = args.num_envs * (gym.spec(args.env_id.rpartition(":")[2]).max_episode_steps or 0)
    if 0 < args.checkpoint_freq < longest:
        flag = f"--checkpoint-freq {args.checkpoint_freq:,}"
        print(f"warning: {flag} cuts episodes off that would take up to {longest:,} steps of all environments", file=sys.stderr)

    # --- agent and optimisers ---
    agent = Agent(envs, args).to(device)
    critics = [*agent.qf.parameters(), *(agent.vf.parameters() if args.value_network else [])]
    parameters = {"policy": list(agent.actor.parameters()), "q": critics, "alpha": [agent.log_alpha]}
    learning_rates = {"policy": args.policy_lr, "q": args.q_lr, "alpha": args.alpha_lr}
    optimizers = {name: make_optimizer(parameters[name], lr=learning_rates[name]) for name in parameters}
    annealed = [name for name in optimizers if getattr(args, f"{name}_lr_schedule") == "linear"]

    # --- storage ---
    obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
    buffer = ReplayBuffer(args.buffer_size, obs_dim, action_dim, device, folder / "checkpoint.replay")

    # --- resume ---
    parts = {"agent": agent, "buffer": buffer} | {f"{name}_optimizer": optimizer for name, optimizer in optimizers.items()}
    counters: dict[str, Any] = {"global_step": 0, "num_updates": 0, "extra_resets": [], "is_finished": False}
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
        compile_update(agent, buffer, args)

    # --- loop ---
    global_step, num_updates = counters["global_step"], counters["num_updates"]
    last_return, last_eval = math.nan, math.nan
    progress = tqdm(total=total_steps, initial=global_step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty())
    log_step, line_step, log_time, line_time = global_step, global_step, time.time(), time.time()
    begins_anew, is_finished, failure, is_sound = True, False, "", True
    try:
        while global_step < total_steps and not stop_signals:
            if begins_anew:  # at the start and after each checkpoint
                obs = reset_envs(envs, seed=seed_streams(args.seed, global_step))
                resetting = np.zeros(args.num_envs, dtype=bool)
                episode_return, episode_length = np.zeros((2, args.num_envs))
                finished_returns, finished_lengths = [], []
                update_metrics: Metrics = {}
                begins_anew = False
            for name in annealed:
                optimizers[name].param_groups[0]["lr"] = learning_rates[name] * (1.0 - global_step / total_steps)

            # act and step
            valid = ~resetting
            if args.norm_obs and valid.any():
                agent.obs_rms.update(torch.as_tensor(obs[valid], device=device))
            if global_step < args.learning_starts:
                actions = 2.0 * torch.rand((args.num_envs, action_dim)).numpy() - 1.0
            else:
                actions = agent.act(obs, torch.randn((args.num_envs, action_dim), device=device))
            global_step += args.num_envs
            next_obs, final_obs, rewards, terminations, truncations = step_envs(envs, actions)
            both = np.concatenate([obs, final_obs], axis=-1)
            check_finite({"observation": both[None], "reward": rewards[None]}, global_step - args.num_envs, args.num_envs)
            dones = terminations | truncations
            resetting = dones & next_step_reset

            # record
            episode_return += rewards * valid
            episode_length += valid
            if dones.any():
                finished_returns.extend(episode_return[dones])
                finished_lengths.extend(episode_length[dones])
                episode_return[dones] = episode_length[dones] = 0.0

            # store
            buffer.add(obs[valid], actions[valid], rewards[valid], final_obs[valid], terminations[valid])
            obs = next_obs

            # update
            while num_updates < int(args.updates_per_step * (global_step - args.learning_starts)):
                update_metrics |= update(agent, optimizers, buffer.sample(args.batch_size), args, num_updates)
                num_updates += 1

            # log
            metrics: dict[str, float] = {}
            is_checkpoint = args.checkpoint_freq > 0 and global_step % args.checkpoint_freq < args.num_envs
            if global_step % args.log_freq < args.num_envs or is_checkpoint:
                metrics = {name: value.item() for name, value in update_metrics.items()}
                check_finite({name: [value] for name, value in metrics.items()}, global_step - 1)
                metrics |= {f"charts/{name}_lr": optimizer.param_groups[0]["lr"] for name, optimizer in optimizers.items()}
                metrics["charts/SPS"] = (global_step - log_step) / (time.time() - log_time)
                if finished_returns:
                    last_return = metrics["charts/episodic_return"] = float(np.mean(finished_returns))
                    metrics["charts/episodic_length"] = float(np.mean(finished_lengths))
                    finished_returns, finished_lengths = [], []

            # evaluate and report
            if args.eval_freq and global_step % args.eval_freq < args.num_envs and global_step < total_steps:
                metrics |= evaluate(agent, args, args.eval_episodes, folder, f"step-{global_step}")
                last_eval = metrics["eval/return_mean"]
            progress.update(args.num_envs)
            if metrics:
                log_metrics(writer, metrics, global_step, args)
                scores = {"return": last_return, "evaluation": last_eval}
                status = ", ".join(f"{name} {score:.1f}" for name, score in scores.items() if not math.isnan(score))
                progress.set_postfix_str(status, refresh=False)
                log_step, log_time = global_step, time.time()
                if progress.disable and log_time - line_time > 30:
                    steps_per_second = (global_step - line_step) / (log_time - line_time)
                    print(f"step {global_step:,} of {total_steps:,}, {steps_per_second:,.0f} steps/s, {status}", flush=True)
                    line_step, line_time = global_step, log_time

            # checkpoint
            if is_checkpoint:
                counters |= {"global_step": global_step, "num_updates": num_updates}
                if save_checkpoint(folder, writer, parts, counters):
                    buffer.remove_old_files()
                begins_anew = True
        if not stop_signals:
            metrics = evaluate(agent, args, args.eval_episodes, folder, "final")
            log_metrics(writer, metrics, global_step, args)
            print(describe(metrics, args.eval_episodes))
            is_finished = True
    except TaskError as error:
        traceback.print_exception(error)
        failure = f"--env-id {args.env_id} failed at step {global_step:,}: {error}"
    except FloatingPointError as error:
        failure, is_sound = str(error), False  # the last checkpoint is the last good state

    # --- end: save, say what to do next ---
    progress.close()
    if is_sound and not all(x.isfinite().all() for x in agent.state_dict().values()):
        failure, is_sound, is_finished = f"weights are not finite numbers at step {global_step:,}", False, False
    if is_sound:
        if args.save_model:
            save_model(folder, agent, args)
        extra_resets = counters["extra_resets"] + ([] if begins_anew else [global_step])
        counters |= {
            "global_step": global_step,
            "num_updates": num_updates,
            "extra_resets": extra_resets,
            "is_finished": is_finished,
        }
        if save_checkpoint(folder, writer, parts, counters):
            buffer.remove_old_files()
    try:
        envs.close(**({"terminate": True} if failure else {}))
    except Exception as error:  # the task's own code, or a process of it that is gone
        print(f"warning: {args.env_id} cannot be closed: {type(error).__name__}: {error}", file=sys.stderr)
    with suppress(OSError):  # of which log_metrics has told
        writer.close()
    for signum, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(signum, handler)  # nothing is left to lose: a stop signal ends a transfer that hangs
    if args.track:
        import wandb

        wandb.finish()
    if args.upload_model and is_finished:
        upload_model(folder, args, metrics)
    lock.close()
    print(f"run folder: {folder}\nnext: tensorboard --logdir runs")
    if (folder / "model.pt").exists():
        video = "" if args.vectorization == "native" else " --capture-video"
        print(f"      python {Path(__file__).name} --evaluate {folder}{video}")
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
