"""PPO for continuous control: one file, any Gymnasium task with continuous actions.

Proximal policy optimisation (Schulman et al. 2017, https://arxiv.org/abs/1707.06347: the clipped objective is eq. 7, the joint
objective eq. 9) with generalised advantage estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16).
The reference is CleanRL's `ppo_continuous_action.py`.

    python ppo_continuous.py --env-id Hopper-v5
    python ppo_continuous.py --evaluate runs/FOLDER --capture-video
    python ppo_continuous.py --resume runs/FOLDER

Its recipe is one line of flags:

    --num-envs 1 --num-steps 2048 --adam-beta1 0.9 --adam-beta2 0.999 --gae-lambda 0.95 --norm-adv --clip-vloss
    --target-kl None --log-std-init 0 --log-std-min -20 --obs-epsilon 1e-8

It has 787 on Ant-v5, 1,771 on HalfCheetah-v5, 2,930 on Hopper-v5, 4,671 on Walker2d-v5 and 7,040 on InvertedDoublePendulum-v5;
the defaults have 3,629, 6,532, 2,951, 3,765 and 9,332 (1,000,000 steps, final deterministic policies, means of five seeds).
What they change in it, and why (what was tried, with all numbers: `benchmark/results/ppo_recipe.md`):
- Less noise at the start, exp(-0.75) of half the action range in the place of 1: with more, HalfCheetah ends in the lower of
  its two optima; with less, Hopper learns late. It never falls below exp(-1.25): a policy that hardly tries anything does not
  learn what happens rarely, such as to get up from InvertedDoublePendulum's steepest starts.
- Observations are divided by the square root of their variance plus 0.01: half of Ant's hardly ever move (contact forces), and
  would be blown up to the size of the others.
- Advantages are not normalised: where all goes well they are small, and noise scaled up would unlearn it
  (InvertedDoublePendulum).
- Lambda 0.9, which learns faster on most tasks, and no clipping of the value loss, which holds the critic back.
- Both of Adam's moments decay by 0.99: with 0.9 and 0.999 the first large gradient after a quiet time, a fall, say, moves all
  parameters many times too far (Dohare et al. 2023, https://openreview.net/forum?id=m9Jfdz4ymO).
- An iteration ends when the divergence of an epoch exceeds 0.03: ten epochs move the policy too far on Ant, and not on Hopper.
- Sixteen environments for 128 steps each, which is as many transitions with a sixteenth of the policy's calls. Their first
  episodes are cut at different steps: else a time limit would end all at once, and most rollouts would lack beginnings
  (Bharthulwar et al. 2025, https://arxiv.org/abs/2511.21011).

Taken back alone (five seeds): HalfCheetah has 1,788 with a noise of 1, 5,492 with first episodes that end together and 6,043 to
6,777 with the others, which are for Ant and InvertedDoublePendulum; Walker2d's 3,742 to 4,525 are within the seeds' noise.

What else differs, and why:
- Termination ends the future, truncation does not: at a time limit the advantage trace is cut, and the value of the state that
  the episode really stopped in is bootstrapped. The reference takes a time limit for the end of the world.
- One estimate of the mean and variance of observations over all environments, one of the variance of returns. Both take in a
  rollout as a whole before it is learned from, are saved with the model, and are frozen in evaluation. The reference has one
  for each environment and throws them away.
- The policy acts in [-1, 1] and is rescaled to the bounds of the task, so that its initial noise means the same in every unit.
- Values and log-probabilities are computed in one batch after a rollout; acting needs the actor alone.
- The policy acts in NumPy, the update is compiled, and all parameters are views of one vector that the optimiser steps: for
  small networks PyTorch takes longer to say what is to be done than to do it. `--no-compile` computes the same uncompiled.
- Logged losses are means over all minibatches of an iteration, not those of the last one.
- The last rollout counts: `total_timesteps` is rounded up to whole rollouts, not down.
- At a checkpoint all environments are reset and all random streams begin anew, by seeds of that step: a run that was killed and
  resumed equals, bit for bit on the CPU, the one that was not.
"""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
import tyro
from gymnasium.spaces import flatdim
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# === Arguments ========================================================================================================


@dataclass
class Args:
    """PPO for continuous control: trains on any Gymnasium task with continuous actions."""

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
    eval_freq: int = 50_000
    """environment steps between two evaluations of the deterministic policy; 0 evaluates only at the end"""
    eval_episodes: int = 10
    """episodes of an evaluation"""
    evaluate: Path | None = None
    """do not train: load the model of this run folder, and print the returns of --eval-episodes episodes"""
    checkpoint_freq: int = 100_000
    """environment steps between two checkpoints, at which all environments are reset; 0 writes only the first and the last"""
    resume: Path | None = None
    """go on with the run of this folder, from its last checkpoint and with its arguments"""

    # --- environment ---
    env_id: str = "HalfCheetah-v5"
    """id of a Gymnasium task whose actions are a Box with finite bounds; module:id imports the module first"""
    num_envs: int = 16
    """environments that are stepped together"""
    vectorization: Literal["sync", "async", "native"] = "sync"
    """how they are stepped: one after another, a process each, or by the task's own vector environment"""
    stagger: bool = True
    """cut the first episode of each environment at another step, so that time limits do not end all episodes together"""

    # --- algorithm ---
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, over all environments"""
    learning_rate: float = 3e-4
    """Adam's learning rate"""
    adam_beta1: float = 0.99
    """decay of Adam's mean of gradients"""
    adam_beta2: float = 0.99
    """decay of its mean of squared gradients; if it equals adam_beta1, no step moves a parameter by more than the rate"""
    num_steps: int = 128
    """steps of a rollout in each environment"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero over the run"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.9
    """lambda of generalised advantage estimation: 0 is one-step TD, 1 is Monte Carlo"""
    num_minibatches: int = 32
    """minibatches that a rollout is split into"""
    update_epochs: int = 10
    """passes over a rollout"""
    norm_adv: bool = False
    """normalise the advantages of each minibatch to mean 0 and standard deviation 1"""
    norm_obs: bool = True
    """normalise observations by their running mean and standard deviation, and clip them to [-10, 10]"""
    obs_epsilon: float = 0.01
    """added to their variances, so that what hardly ever moves is not blown up to the size of the rest when it does"""
    norm_reward: bool = True
    """divide rewards by the running standard deviation of the discounted return, and clip them to [-10, 10]"""
    clip_coef: float = 0.2
    """how far the probability ratio may leave 1 before its gradient is cut (epsilon of eq. 7)"""
    clip_vloss: bool = False
    """clip the value loss in the same way"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of the gradient of actor and critic together"""
    target_kl: float | None = 0.03
    """skip an iteration's remaining epochs once an epoch's mean KL divergence exceeds this; None never does"""
    log_std_init: float = -0.75
    """initial log standard deviation of the policy, in units where the action range is [-1, 1]"""
    log_std_min: float = -1.25
    """the least that it may fall to"""

    @property
    def batch_size(self) -> int:
        """Transitions of a rollout over all environments."""
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        """Transitions of a minibatch."""
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
        (0, 1, "gamma gae_lambda"),
        (0, 0.9999, "adam_beta1 adam_beta2"),
        (1, 1e12, "eval_episodes num_envs total_timesteps num_minibatches update_epochs"),
        (2, 1e12, "num_steps"),
        (1e-12, 1e12, "obs_epsilon"),
        (0, 1e12, "eval_freq checkpoint_freq learning_rate clip_coef ent_coef vf_coef max_grad_norm target_kl"),
        (0, 2**31, "seed"),
        (-20, 2, "log_std_init log_std_min"),
    ]
    for low, high, names in limits:
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not low <= value <= high:  # NaN fails this, too
                fail(f"--{name.replace('_', '-')} takes a number from {low:g} to {high:g}, not {value}")
    if args.log_std_init < args.log_std_min:
        fail(f"--log-std-init takes a number from --log-std-min, {args.log_std_min:g}, to 2, not {args.log_std_init:g}")
    if args.batch_size % args.num_minibatches != 0 or args.minibatch_size < 2:
        rule = f"a divisor of num_envs * num_steps = {args.batch_size} that leaves two transitions or more to a minibatch"
        fail(f"--num-minibatches takes {rule}, not {args.num_minibatches}")
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
    """Says which of several environments it was that raised; `steps_to_cut` steps after that was set, truncates the episode."""

    def __init__(self, env: gym.Env, index: int) -> None:
        super().__init__(env)
        self.index, self.steps_to_cut = index, 0

    def reset(self, **kwargs: Any) -> Any:
        """Begins an episode, which is not cut."""
        self.steps_to_cut = 0
        try:
            return self.env.reset(**kwargs)
        except Exception as error:
            raise RuntimeError(f"environment {self.index} in reset: {type(error).__name__}: {error}") from error

    def step(self, action: Any) -> Any:
        """Plays a step."""
        try:
            obs, reward, terminated, truncated, _ = self.env.step(action)
        except Exception as error:
            raise RuntimeError(f"environment {self.index} in step: {type(error).__name__}: {error}") from error
        self.steps_to_cut -= 1
        return obs, reward, terminated, truncated or self.steps_to_cut == 0, {}  # infos, which nothing reads, take time


def make_env(env_id: str, index: int, video_folder: Path | None = None, video_name: str = "") -> gym.Env:
    """The environment with this index, with flat observations; records its first episode if there is a folder for it."""
    env = gym.make(env_id) if video_folder is None else gym.make(env_id, render_mode="rgb_array")
    if video_folder is not None:
        warnings.filterwarnings("ignore", "(?s).*Overwriting existing videos")  # each recording has its own name
        env = gym.wrappers.RecordVideo(env, str(video_folder), lambda episode: episode == 0, name_prefix=video_name)
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return NumberedEnv(env, index)


class LeanVectorEnv(SyncVectorEnv):
    """Gymnasium's own without infos and second copies, which take ten microseconds a step; one of HalfCheetah takes 38."""

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Steps one environment after another; where an episode ends, the next one begins (AutoresetMode.SAME_STEP)."""
        obs, rewards, infos = np.empty_like(self._observations), np.empty(self.num_envs), {}
        terminations, truncations = np.empty((2, self.num_envs), dtype=bool)
        for i, env in enumerate(self.envs):
            obs[i], rewards[i], terminations[i], truncations[i], _ = env.step(actions[i])
        dones = terminations | truncations
        if dones.any():
            infos["final_obs"] = obs.copy()
            for i in np.flatnonzero(dones).tolist():
                obs[i], _ = self.envs[i].reset()
        return obs, rewards, terminations, truncations, infos


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
            vector_class = {"sync": LeanVectorEnv, "async": AsyncVectorEnv}[vectorization]
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


def mlp(*sizes: int, output_gain: float) -> nn.Sequential:
    """Tanh network with orthogonal weights (Saxe et al. 2014, https://arxiv.org/abs/1312.6120) and zero biases."""
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        layer, is_output = nn.Linear(fan_in, fan_out), i == len(sizes) - 2
        nn.init.orthogonal_(layer.weight, output_gain if is_output else math.sqrt(2))
        nn.init.zeros_(layer.bias)
        layers += [layer] if is_output else [layer, nn.Tanh()]
    return nn.Sequential(*layers)


class Actor(nn.Module):
    """Normal policy: its mean depends on the observation, its log standard deviation does not."""

    def __init__(self, obs_dim: int, action_dim: int, log_std_init: float) -> None:
        super().__init__()
        self.mean = mlp(obs_dim, 64, 64, action_dim, output_gain=0.01)
        self.log_std = nn.Parameter(torch.full((action_dim,), log_std_init))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Observations (..., obs_dim) to the mean (..., action_dim) and the log standard deviation (action_dim,)."""
        return self.mean(obs), self.log_std


class Agent(nn.Module):
    """All that is learned, and so all that is saved: policy, value function and statistics."""

    def __init__(self, envs: VectorEnv, args: Args) -> None:
        super().__init__()
        obs_dim, action_dim = flatdim(envs.single_observation_space), flatdim(envs.single_action_space)
        self.norm_obs, self.norm_reward = args.norm_obs, args.norm_reward
        self.obs_rms = RunningMeanStd((obs_dim,), args.obs_epsilon)
        self.return_rms = RunningMeanStd()
        self.actor = Actor(obs_dim, action_dim, args.log_std_init)
        self.critic = mlp(obs_dim, 64, 64, 1, output_gain=1.0)

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations (..., obs_dim) to what the networks take."""
        return self.obs_rms.normalize(obs) if self.norm_obs else obs

    def scale_reward(self, rewards: Tensor) -> Tensor:
        """Raw rewards to what the advantages are computed from."""
        return (rewards / self.return_rms.std).clamp(-10.0, 10.0).float() if self.norm_reward else rewards

    def policy(self) -> Callable[..., np.ndarray]:
        """The policy as it is now, in NumPy: of a few rows, PyTorch's overhead would be most of the time.

        A function of raw observations (num_envs, obs_dim) and standard normal noise (num_envs, action_dim), or 0 for the
        likeliest actions, to actions (num_envs, action_dim).
        """
        tensors = self.obs_rms.mean, self.obs_rms.std, self.actor.log_std.exp(), *self.actor.mean.parameters()
        obs_mean, obs_std, std, *parameters = (x.detach().cpu().numpy() for x in tensors)

        def act(obs: np.ndarray, noise: np.ndarray | float = 0.0) -> np.ndarray:
            x = ((obs - obs_mean) / obs_std).clip(-10.0, 10.0) if self.norm_obs else obs
            x = x.astype(np.float32)
            for i in range(0, len(parameters), 2):
                x = (np.tanh(x) if i > 0 else x) @ parameters[i].T + parameters[i + 1]
            return x + std * noise

        return act


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


def normal_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density (...) of actions (..., action_dim) under a normal distribution with a diagonal covariance."""
    z = (actions - mean) / log_std.exp()
    return (-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


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
    mb_obs, mb_actions, mb_log_prob, mb_advantages, mb_returns, mb_values = minibatch
    if args.norm_adv:
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
    mean, log_std = agent.actor(mb_obs)
    log_prob = normal_log_prob(mb_actions, mean, log_std)
    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum()
    policy_loss, policy_metrics = compute_policy_loss(log_prob, mb_log_prob, mb_advantages, args.clip_coef)
    values, value_clip = agent.critic(mb_obs).squeeze(-1), args.clip_coef if args.clip_vloss else None
    value_loss, value_metrics = compute_value_loss(values, mb_values, mb_returns, value_clip)
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss

    gradient = compute_gradient(loss, agent.parameters())
    grad_norm = gradient.norm()
    metrics = policy_metrics | value_metrics | {"losses/entropy": entropy, "losses/grad_norm": grad_norm}
    gradient = gradient * (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
    return gradient, {name: value.detach() for name, value in metrics.items()}


def compile_update(agent: Agent, args: Args) -> None:
    """Puts a compiled form in the place of the gradient's function; where that fails, says so and leaves it."""
    global compute_update_gradient
    began, rows, device = time.perf_counter(), args.minibatch_size, agent.actor.log_std.device
    widths = [(len(agent.obs_rms.mean),), (len(agent.actor.log_std),), (), (), (), ()]
    minibatch = tuple(torch.zeros((rows, *width), device=device) for width in widths)
    torch._dynamo.config.trace_autograd_ops = True  # or torch.autograd.grad would not be compiled
    torch._inductor.config.cpp.vec_isa_ok = True  # or some processes would find out each time what the compiler can do
    torch._inductor.config.cpp_wrapper = not (args.cuda and torch.cuda.is_available())  # calls from C++, not from Python
    compiled = torch.compile(compute_update_gradient)
    try:
        compiled(agent, minibatch, args)
    except RuntimeError as error:  # no C++ compiler, say
        print(f"warning: the update is slow, for it cannot be compiled: {str(error).splitlines()[0]}", file=sys.stderr)
        return
    compute_update_gradient = compiled
    print(f"compiled the update in {time.perf_counter() - began:.1f} s; PyTorch keeps it on disk for the next run")


def update(agent: Agent, optimizer: torch.optim.Optimizer, minibatch: tuple[Tensor, ...], args: Args) -> Metrics:
    """One gradient step on a minibatch: obs, actions, log-probabilities, advantages, returns, values, a row each."""
    gradient, metrics = compute_update_gradient(agent, minibatch, args)
    gradient_step(optimizer, gradient)
    with torch.no_grad():
        agent.actor.log_std.clamp_(min=args.log_std_min)
    return metrics


# === Evaluation =======================================================================================================


def evaluate(agent: Agent, args: Args, episodes: int, folder: Path, name: str) -> dict[str, float]:
    """Plays each episode in an environment of its own, with a seed of its own, the deterministic policy and frozen statistics.

    Touches no random stream of the training. With --capture-video the first episode goes to folder/videos/name-episode-0.mp4.
    Returns what is logged: mean and standard deviation of the undiscounted returns, mean length in steps.
    """
    vectorization = "native" if args.vectorization == "native" else "sync"
    envs = make_envs(args.env_id, episodes, vectorization, folder / "videos" if args.capture_video else None, name)
    obs, act = reset_envs(envs, seed=1_000_000 + args.seed * episodes), agent.policy()
    returns, lengths, running = np.zeros(episodes), np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        obs, _, rewards, terminations, truncations = step_envs(envs, act(obs))
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
    total_steps = args.num_iterations * args.batch_size
    print(f"{args.exp_name}: {args.env_id}, seed {args.seed}, {total_steps:,} steps on {device}, run folder {folder}")
    if total_steps != args.total_timesteps:
        print(f"--total-timesteps {args.total_timesteps:,} is rounded up to whole rollouts of {args.batch_size:,} steps")
    longest = 0
    with suppress(gym.error.Error):  # an id without a version, say, which can be made but not looked up
        longest = args.num_envs * (gym.spec(args.env_id.rpartition(":")[2]).max_episode_steps or 0)
    if 0 < args.checkpoint_freq < longest:
        flag = f"--checkpoint-freq {args.checkpoint_freq:,}"
        print(f"warning: {flag} cuts episodes off that would take up to {longest:,} steps of all environments", file=sys.stderr)
    staggers = args.stagger and args.num_envs > 1 and longest > 0 and args.vectorization != "native"

    # --- agent and optimiser ---
    agent = Agent(envs, args).to(device)
    optimizer = make_optimizer(agent.parameters(), args.learning_rate, (args.adam_beta1, args.adam_beta2), eps=1e-5)

    # --- resume ---
    parts = {"agent": agent, "optimizer": optimizer}
    counters: dict[str, Any] = {"global_step": 0, "extra_resets": [], "is_finished": False}
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

    # --- storage ---
    shape = (args.num_steps, args.num_envs)
    observations = np.zeros((*shape, flatdim(envs.single_observation_space)), dtype=np.float32)
    final_observations = np.zeros_like(observations)
    actions = np.zeros((*shape, flatdim(envs.single_action_space)), dtype=np.float32)
    rewards, discounted_returns = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    terminations, dones, valid = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)

    # --- compilation ---
    if args.compile:
        compile_update(agent, args)

    # --- loop ---
    global_step, last_return, last_eval = counters["global_step"], math.nan, math.nan
    progress = tqdm(total=total_steps, initial=global_step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty())
    log_step, line_step, log_time, line_time = global_step, global_step, time.time(), time.time()
    learned_step, begins_anew, is_finished, failure, is_sound = global_step, True, False, "", True
    try:
        for iteration in range(global_step // args.batch_size + 1, args.num_iterations + 1):
            if begins_anew:  # at the start and after each checkpoint
                obs = reset_envs(envs, seed=seed_streams(args.seed, global_step))
                if staggers:
                    assert isinstance(envs, SyncVectorEnv | AsyncVectorEnv)
                    envs.set_attr("steps_to_cut", [longest * i // args.num_envs**2 for i in range(args.num_envs)])
                is_whole = np.full(args.num_envs, not staggers)
                resetting = np.zeros(args.num_envs, dtype=bool)
                discounted_return, episode_return, episode_length = np.zeros((3, args.num_envs))
                begins_anew = False
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - (iteration - 1) / args.num_iterations)

            act, noise = agent.policy(), torch.randn(actions.shape, device=device).cpu().numpy()
            finished_returns, finished_lengths = [], []
            for step in range(args.num_steps):
                # act and step
                observations[step], valid[step] = obs, ~resetting
                actions[step] = act(obs, noise[step])
                global_step += args.num_envs
                obs, final_observations[step], rewards[step], terminations[step], truncations = step_envs(envs, actions[step])
                dones[step] = ended = terminations[step] | truncations
                resetting = ended & next_step_reset

                # record
                reward = rewards[step] * valid[step]
                discounted_returns[step] = discounted_return = args.gamma * discounted_return + reward
                episode_return += reward
                episode_length += valid[step]
                if ended.any():
                    finished_returns.extend(episode_return[ended & is_whole])
                    finished_lengths.extend(episode_length[ended & is_whole])
                    is_whole |= ended
                    discounted_return[ended] = episode_return[ended] = episode_length[ended] = 0.0
            both = np.concatenate([observations, final_observations], axis=-1)
            check_finite({"observation": both, "reward": rewards}, global_step - args.batch_size, args.num_envs)

            # store: log-probabilities as the policy acted; statistics that have seen the rollout; values under these
            to_device = partial(torch.as_tensor, device=device)
            with torch.no_grad():
                raw_obs, b_actions, mask = to_device(observations), to_device(actions), to_device(valid)
                log_prob = normal_log_prob(b_actions, *agent.actor(agent.normalize(raw_obs)))
                agent.obs_rms.update(raw_obs[mask])
                agent.return_rms.update(to_device(discounted_returns)[mask])
                b_obs = agent.normalize(raw_obs)
                values = agent.critic(b_obs).squeeze(-1).cpu()
                next_values = agent.critic(agent.normalize(to_device(final_observations))).squeeze(-1).cpu()
                scaled_rewards = agent.scale_reward(to_device(rewards)).cpu()
            terminated, done = torch.as_tensor(terminations).float(), torch.as_tensor(dones).float()
            advantages = compute_gae(scaled_rewards, values, next_values, terminated, done, args.gamma, args.gae_lambda)
            returns = advantages + values
            batch = [x.to(device)[mask] for x in (b_obs, b_actions, log_prob, advantages, returns, values)]  # (batch_size, ...)

            # update
            update_metrics: list[Metrics] = []
            num_minibatches = min(args.num_minibatches, len(batch[0]) // 2)  # where resets take steps, there are fewer rows
            for _ in range(args.update_epochs):
                permutation = torch.randperm(len(batch[0]), device=device)
                minibatches = zip(*(x[permutation].tensor_split(num_minibatches) for x in batch), strict=True)
                epoch_metrics = [update(agent, optimizer, minibatch, args) for minibatch in minibatches]
                update_metrics += epoch_metrics
                approx_kl = torch.stack([m["losses/approx_kl"] for m in epoch_metrics]).mean()
                if args.target_kl is not None and approx_kl > args.target_kl:
                    break
            learned_step = global_step

            # log
            metrics = {name: torch.stack([m[name] for m in update_metrics]).mean().item() for name in update_metrics[0]}
            check_finite({name: [value] for name, value in metrics.items()}, global_step - 1)
            b_returns, b_values = batch[-2:]
            metrics["losses/explained_variance"] = 1.0 - ((b_returns - b_values).var() / b_returns.var()).item()
            metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            metrics["charts/SPS"] = (global_step - log_step) / (time.time() - log_time)
            if finished_returns:
                last_return = metrics["charts/episodic_return"] = float(np.mean(finished_returns))
                metrics["charts/episodic_length"] = float(np.mean(finished_lengths))

            # evaluate and report
            if args.eval_freq and global_step % args.eval_freq < args.batch_size and global_step < total_steps:
                metrics |= evaluate(agent, args, args.eval_episodes, folder, f"step-{global_step}")
                last_eval = metrics["eval/return_mean"]
            log_metrics(writer, metrics, global_step, args)
            progress.update(args.batch_size)
            scores = {"return": last_return, "evaluation": last_eval}
            status = ", ".join(f"{name} {score:.1f}" for name, score in scores.items() if not math.isnan(score))
            progress.set_postfix_str(status, refresh=False)
            log_step, log_time = global_step, time.time()
            if progress.disable and log_time - line_time > 30:
                steps_per_second = (global_step - line_step) / (log_time - line_time)
                print(f"step {global_step:,} of {total_steps:,}, {steps_per_second:,.0f} steps/s, {status}", flush=True)
                line_step, line_time = global_step, log_time

            # checkpoint
            if args.checkpoint_freq and global_step % args.checkpoint_freq < args.batch_size:
                save_checkpoint(folder, writer, parts, counters | {"global_step": global_step})
                begins_anew = True
            if stop_signals:
                break
        if not stop_signals:
            metrics = evaluate(agent, args, args.eval_episodes, folder, "final")
            log_metrics(writer, metrics, global_step, args)
            print(describe(metrics, args.eval_episodes))
            is_finished = True
    except TaskError as error:
        traceback.print_exception(error)
        failure = f"--env-id {args.env_id} failed at step {global_step:,}: {error}"
        global_step = learned_step  # what there is of a rollout is lost
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
        counters |= {"global_step": global_step, "extra_resets": extra_resets, "is_finished": is_finished}
        save_checkpoint(folder, writer, parts, counters)
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
