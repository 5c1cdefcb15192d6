"""What surrounds training in every script: arguments, run folder, curves, checkpoints, faults, model file, uploads.

Nothing in this file decides what is learned. A script hands its parts to `Run` and iterates over `run.steps()`:

    with Run(args, envs, total_steps, stride, model={"agent": agent}, rest={"optimizer": optimizer}) as run:
        for global_step, seed in run.steps():
            ...  # act, step, store, update
            run.log(metrics, global_step + stride)
        run.log(evaluate(...), total_steps)

`Run` writes only into the run folder: args.json, TensorBoard events, checkpoint.* and lock, model.pt, videos/,
and README.md (the model card) and wandb/ if they are asked for.
"""

import atexit
import copy
import importlib
import io
import json
import math
import multiprocessing
import os
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, is_dataclass, replace
from functools import partial, update_wrapper
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn, Protocol, TextIO, TypeVar, get_origin, get_type_hints

from utils.errors import (
    MAX_OBS_DIM,
    PartLost,
    TaskError,
    describe_error,
    keep_printing,
    missing_package,
    place_of,
    write_file,
)
from utils.video import MAX_FRAMES, write_video

try:
    import gymnasium as gym
    import numpy as np
    import torch
    import typeguard
    import tyro
    from torch import Tensor, nn
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise missing_package("training", error) from error

ArgsT = TypeVar("ArgsT")
CHECKPOINT_FORMAT = 5  # increases when older checkpoints can no longer be read
# of a checkpoint, beside its parts
FACTS: dict[str, Any] = {"global_step": int, "total_steps": int, "is_finished": bool}
FACTS |= {"versions": dict[str, str], "events": dict[str, int]}
VERSIONS = {"torch": str(torch.__version__), "gymnasium": gym.__version__, "numpy": np.__version__}
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


class Stopped(Exception):
    """A signal asked the run to stop."""


def one_line(error: object) -> str:
    """The text of an exception in one line."""
    return " ".join(str(error).split())


def warn(message: str) -> None:
    """Prints a warning on standard error."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


# === Arguments ========================================================================================================

MAY_CHANGE = {  # arguments of a saved run that the command line may change
    "resume": ("total_timesteps", "cuda", "compile", "track", "wandb_project_name", "wandb_entity", "capture_video")
    + ("upload_model", "hf_entity", "address", "num_workers", "worker_cpus", "demonstrations"),
    "evaluate": ("seed", "eval_episodes", "capture_video", "eval_games", "cross_play_games", "cross_play_snapshots")
    + ("deterministic", "against", "exploitability", "initialize_from", "policy", "play"),
}
OFF_IN_EVALUATION: dict[str, Any] = {"track": False, "capture_video": False, "upload_model": False}
OFF_IN_EVALUATION |= {"initialize_from": None, "policy": "last"}  # these two are of the training
PACKAGES = {"track": "wandb", "upload_model": "huggingface_hub", "capture_video": "moviepy", "play": "pygame"}
Limits = Mapping[str, tuple[float, float]]


def fail(message: str) -> NoReturn:
    """Ends the program before training: one sentence on standard error, exit status 2."""
    kill_environments()
    print(f"error: {message}", file=sys.stderr)
    end = SystemExit(2)
    vars(end)["__notes__"] = [message]  # `utils/cluster.py` sends it from a worker's process to the main one
    raise end


def flag_of(name: str) -> str:
    """The command-line flag of an argument."""
    return f"--{name.replace('_', '-')}"


def script_of(cls: type) -> Path:
    """The file of the script that defines this class."""
    return Path(str(sys.modules[cls.__module__].__file__))


def parse_args(cls: type[ArgsT], argv: Sequence[str] | None = None) -> ArgsT:
    """Parses the command line into a dataclass; with --resume or --evaluate the run's own arguments are the defaults.

    Exits with one sentence if the run folder is not one of this script, or if an argument may not change.
    """
    args: Any = tyro.cli(cls, args=argv)
    if args.resume is not None and args.evaluate is not None:
        fail("--resume and --evaluate exclude each other: give one of the two")
    flag, folder = ("resume", args.resume) if args.resume is not None else ("evaluate", args.evaluate)
    if folder is None:
        return args
    changes: dict[str, Any] = {flag: folder} | (OFF_IN_EVALUATION if flag == "evaluate" else {})
    changes = {name: value for name, value in changes.items() if hasattr(args, name)}
    run_args = replace(read_args(cls, folder, flag_of(flag)), **changes)
    args = tyro.cli(cls, args=argv, default=run_args)
    for name, value in vars(run_args).items():
        if getattr(args, name) != value and name not in MAY_CHANGE[flag]:
            where = "an evaluation has" if flag == "evaluate" and name in OFF_IN_EVALUATION else "the run has"
            fail(f"{flag_of(name)} cannot change with --{flag}: {where} {value}, and {getattr(args, name)} was given")
    return args


def read_args(cls: type, folder: Path, flag: str, limits: Limits | None = None) -> Any:
    """Reads the arguments in a run folder's args.json, and checks their names and types, and their limits if given.

    Exits with one sentence, which begins with `flag`, if they are missing or wrong.
    Flags that an older version did not have get their defaults, with a warning.
    """
    takes = f"{flag} takes a run folder with the args.json of this script, and {folder}"
    if not folder.is_dir():
        fail(f"{takes} is not a folder")
    try:
        saved = json.loads((folder / "args.json").read_text())
        script, own = saved.pop("script", None), script_of(cls).name
        if script not in (None, own):
            fail(f"{flag} takes a run of {own}, and {folder} is a run of {script}")
        for name, hint in get_type_hints(cls).items():
            if get_origin(hint) is tuple and isinstance(saved.get(name), list):  # JSON has no tuples
                saved[name] = tuple(saved[name])
        if unknown := sorted(saved.keys() - {field.name for field in fields(cls)}):
            fail(f"{takes} is of another version of the script, with {', '.join(map(flag_of, unknown))}")
        args = cls(**saved)
        missing = {name: value for name, value in vars(args).items() if name not in saved}
        check_types(args, vars(args))
        check_limits(args, limits or {})
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        fail(f"{takes} has none ({one_line(error)})")
    if missing:
        values = ", ".join(f"{flag_of(name)} is {value}" for name, value in missing.items())
        warn(f"{folder} is of a version without some flags, which have their defaults: {values}")
    return args


def load_script(flag: str, folder: Path) -> ModuleType:
    """The script that made the run; exits with one sentence, which begins with `flag`, if args.json names none."""
    root = Path(__file__).parents[1]
    try:
        name = json.loads((folder / "args.json").read_text())["script"]
        scripts = {path.name: path for path in (*root.glob("*.py"), *root.glob("variants/*.py"))}
        return importlib.import_module(".".join(scripts[name].relative_to(root).with_suffix("").parts))
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        reason = describe_error(error)
        fail(f"{flag} takes a run folder with an args.json that names its script, and {folder} has none ({reason})")


def check_types(args: Any, saved: Mapping[str, Any]) -> None:
    """Raises ValueError, a sentence that names the argument, if a value that was read from JSON is of another type."""
    for name, hint in get_type_hints(type(args)).items():
        if name in saved:
            try:
                typeguard.check_type(saved[name], hint)
            except typeguard.TypeCheckError as error:
                raise ValueError(f"{name}: {one_line(error)}") from error


def check_limits(args: Any, limits: Limits) -> None:
    """Raises ValueError, a sentence that names the flag, if a number is out of its limits."""
    for names, (low, high) in limits.items():
        for name in names.split():
            value = getattr(args, name)
            if value is not None and not low <= value <= high:  # NaN fails this, too
                raise ValueError(f"{flag_of(name)} takes a number from {low:g} to {high:.10g}, not {value}")


def prepare(args: Any, limits: Limits) -> None:
    """Checks the arguments; exits with one sentence. From here on a signal stops the training at its next step.

    The keys of `limits` are names of arguments, separated by spaces. Checks the packages and accounts that flags need,
    too. Call it before environments are made: their processes then inherit the handlers, and survive a Ctrl-C.
    """
    keep_printing()
    warnings.filterwarnings("ignore", "overflow encountered in cast")  # of an observation, which is checked
    try:
        os.getcwd()
    except OSError as error:
        fail(f"the working folder is gone: {error}")
    if args.evaluate is not None and args.capture_video and not os.access(args.evaluate, os.W_OK):
        fail(f"--capture-video takes a run folder that can be written, and {args.evaluate} cannot")
    try:
        check_limits(args, limits)
    except ValueError as error:
        fail(str(error))
    for flag, package in PACKAGES.items():
        if getattr(args, flag, False) and find_spec(package) is None:
            fail(f"{flag_of(flag)} needs the package {package}: pip install {package}")
    if args.capture_video and getattr(args, "vectorization", "") == "native":
        fail("--capture-video takes --vectorization sync or async: a native vector environment cannot be recorded")
    if args.capture_video or hasattr(args, "frame_size"):  # records videos, or learns from pictures
        draw_without_a_screen()
    if hasattr(args, "vectorization"):
        env_kwargs = parse_json("env-kwargs", args.env_kwargs)
        if args.capture_video:
            check_video(args.env_id, env_kwargs)
    if args.track:
        check_tracking()
    if getattr(args, "upload_model", False):
        check_upload(args)
    global trains
    trains = False
    if args.evaluate is None:
        catch_signals()
    else:
        release_signals()
    sys.excepthook = partial(tell_exception, args)


def parse_json(flag: str, text: str, example: str = '{"name": 1}') -> dict[str, Any]:
    """The JSON object that a flag was given; exits with one sentence if it is not one."""
    try:
        return typeguard.check_type(json.loads(text), dict[str, Any])
    except (ValueError, RecursionError, typeguard.TypeCheckError) as error:
        fail(f"--{flag} takes a JSON object such as {example}, not {text:.200} ({one_line(error)})")


# === Tasks ============================================================================================================


def close_quietly(name: str, close: Callable[[], None]) -> None:
    """Calls `close` of a task or a game. An exception is only a warning, so that results and model are kept."""
    try:
        close()
    except (Exception, SystemExit) as error:  # the task's own code, or a process of it that is gone
        warn(f"{name} cannot be closed: {describe_error(error)}")


class LeanVectorEnv(gym.vector.SyncVectorEnv):
    """`SyncVectorEnv` without infos and extra copies, which make PPO with one environment 15% slower."""

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Steps one environment after another; where an episode ends, the next one begins (AutoresetMode.SAME_STEP)."""
        obs, rewards = np.empty_like(self._observations), np.empty(self.num_envs)
        terminations, truncations = np.empty((2, self.num_envs), dtype=bool)
        infos: dict[str, Any] = {}
        for i, env in enumerate(self.envs):
            obs[i], rewards[i], terminated, truncated, _ = env.step(actions[i])
            terminations[i], truncations[i] = terminated, truncated
            if terminated or truncated:  # before the next one's step, as Gymnasium does it
                infos.setdefault("final_obs", np.empty_like(obs))[i] = obs[i]
                obs[i], _ = env.reset()
        return obs, rewards, terminations, truncations, infos


def vectorize(
    env_fns: Sequence[Callable[..., gym.Env]], args: Any, video: Path | None = None, context: str | None = None
) -> gym.vector.VectorEnv:
    """The environments stepped together as --vectorization says, with AutoresetMode.SAME_STEP.

    With `video`, a path without suffix, the first episode of the first environment is recorded; `env_fns[0]` is called
    with `render_mode`. `context` is how processes begin, for `multiprocessing`. Exits with one sentence if the task
    does not suit these scripts. An exception of a task becomes a TaskError that says which environment raised it.
    """
    if os.getcwd() not in sys.path:  # the script may lie elsewhere: --env-id module:id finds the user's module
        sys.path.append(os.getcwd())
    fns = [partial(TaskEnv, make_env, i, None if i else video) for i, make_env in enumerate(env_fns)]
    is_async = args.vectorization == "async" and args.evaluate is None
    vector_class: Any = gym.vector.AsyncVectorEnv if is_async else LeanVectorEnv
    make = partial(vector_class, fns, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    if is_async:
        gym.logger.min_level = 50  # else every process prints tracebacks of what is told in a sentence
        make = partial(make, context=context)
    is_native = args.vectorization == "native"
    if is_native:
        kwargs = parse_json("env-kwargs", args.env_kwargs)
        make = partial(gym.make_vec, args.env_id, len(fns), "vector_entry_point", **kwargs)
    return TaskEnvs(make, args.env_id, is_native)


class Recording(gym.wrappers.RecordVideo):
    """Records the first episode. A video that cannot be written, as on a full disk, is only a warning."""

    def step(self, action: Any) -> Any:
        """Takes a step. A video ends after `MAX_FRAMES` pictures, which are in memory until then."""
        result = super().step(action)
        if self.recording and len(self.recorded_frames) >= MAX_FRAMES:
            self.stop_recording()
        return result

    def stop_recording(self) -> None:
        """Writes the video."""
        path, frames = Path(self.video_folder) / f"{self._video_name}.mp4", list[Any](self.recorded_frames)
        try:
            write_video(path, frames, self.frames_per_sec)
        except Exception as error:  # moviepy, ffmpeg and the disk each have their own
            warn(f"a video is not in {self.video_folder}: {describe_error(error)[:300]}")
        self.recorded_frames, self.recording = [], False


class OwnContext(gym.Wrapper):
    """Draws a task of MuJoCo in its own OpenGL context.

    Gymnasium draws in the context that is current: the newest one of all environments, or none after one was closed.
    Its `close` also ends GLFW for all environments.
    """

    def render(self) -> Any:
        """The current picture."""
        for viewer in self.viewers().values():
            viewer.make_context_current()
        return self.env.render()

    def close(self) -> None:
        """Makes each viewer's context current and frees it; otherwise MuJoCo would free that of another environment."""
        viewers = self.viewers()
        while viewers:
            _, viewer = viewers.popitem()
            viewer.make_context_current()
            viewer.con.free()
            viewer.free()
        self.env.close()

    def viewers(self) -> dict[str, Any]:
        """The viewer of each render mode; none before the first picture, or if the task is not one of MuJoCo."""
        return getattr(getattr(self.unwrapped, "mujoco_renderer", None), "_viewers", {})


class TaskEnv(gym.Wrapper):
    """Says which of several environments raised an exception, and in which step; drops infos, which cost time."""

    def __init__(self, make_env: Callable[..., gym.Env], index: int, video: Path | None = None) -> None:
        self.is_alone = multiprocessing.parent_process() is not None and os.getpid() != trainer  # in a process
        if self.is_alone:  # Ctrl-C is for the training, which saves; a forked process would have its handlers
            ignore_signals()
        env = make_env() if video is None else make_env(render_mode="rgb_array")
        if video is not None:
            warnings.filterwarnings("ignore", "(?s).*Overwriting existing videos")  # each recording has its own name
            try:
                env = Recording(env, str(video.parent), lambda episode: episode == 0, name_prefix=video.name)
            except OSError as error:
                warn(f"{video} cannot be recorded: {error}")
        space = env.observation_space
        if isinstance(space, gym.spaces.Box) and math.prod(space.shape) > MAX_OBS_DIM:  # batches of it take minutes
            raise TaskError(str(space))
        super().__init__(env)
        self.index, self.num_steps, self.obs_shape = index, 0, space.shape
        self.has_integers = space.dtype is not None and space.dtype.kind in "iu"

    def reset(self, **kwargs: Any) -> Any:
        """Begins an episode."""
        if self.is_alone and (seed := kwargs.get("seed")) is not None:  # the task may draw from its process's streams
            random.seed(seed), np.random.seed(seed)
            torch.default_generator.manual_seed(seed + 2**31)  # the noise of the policy is drawn with `seed`
        try:
            obs, _ = self.env.reset(**kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, and what code in other languages raises
            raise TaskError(f"environment {self.index} in reset: {describe_error(error)}") from error
        self.check_obs(obs, "reset")
        return obs, {}

    def step(self, action: Any) -> Any:
        """Takes a step."""
        self.num_steps += 1
        try:
            obs, reward, terminated, truncated, _ = self.env.step(action)
            if isinstance(reward, np.ndarray):
                reward = reward.item()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            place = f"environment {self.index} in its step {self.num_steps:,}"
            raise TaskError(f"{place}: {describe_error(error)}") from error
        if type(obs) is not np.ndarray or obs.shape != self.obs_shape or self.has_integers:  # a call takes time
            self.check_obs(obs, f"its step {self.num_steps:,}")
        if terminated or truncated:  # the reset, which comes next, may write into the same array
            obs = np.array(obs)
        return obs, reward, terminated, truncated, {}

    def check_obs(self, obs: Any, where: str) -> None:
        """Raises TaskError for another shape, which stacking would repeat, and for fractions that it would cut off."""
        place = f"environment {self.index} in {where}"
        if np.shape(obs) != self.obs_shape:
            raise TaskError(f"{place}: the observation must have the shape {self.obs_shape}, not {np.shape(obs)}")
        if self.has_integers and np.asarray(obs).dtype.kind == "f" and np.any(np.asarray(obs) % 1):
            raise TaskError(f"{place}: the observation must have integers, as its space has, not {obs!r:.80}")


class TaskEnvs(gym.vector.VectorWrapper):
    """Turns exceptions of the environments into TaskError, and AutoresetMode.DISABLED into SAME_STEP."""

    def __init__(self, make: Callable[[], gym.vector.VectorEnv], env_id: str, copies: bool) -> None:
        """Makes the environments; exits with one sentence if that fails, or if their spaces are not Box.

        `copies`: observations are copied, for environments that may write the next ones into the same array.
        """
        takes, obs_size = "--env-id takes a task whose", f"observations are 1 to {MAX_OBS_DIM:,} numbers"
        try:
            super().__init__(make())
        except TaskError as error:
            fail(f"{takes} {obs_size}, and those of {env_id} are {error}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # raised by Gymnasium or by the task's own code
            hint = place_of(error)
            if isinstance(error, (gym.error.NamespaceNotFound, gym.error.NameNotFound)):
                hint = " (module:id imports the module that has the task; games between teams are for *_selfplay.py)"
            cannot_be_made(f"{env_id} cannot be made: {describe_error(error)}{hint}", error)
        envs, self.copies = self.env, copies
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
            fail(f"{takes} observations flatten to a vector, and those of {env_id} are {obs_space}")
        if not 1 <= obs_space.shape[0] <= MAX_OBS_DIM:
            fail(f"{takes} {obs_size}, and those of {env_id} are {obs_space}")
        if not is_continuous(action_space):
            fail(f"{takes} actions are a Box of floats with finite bounds, and those of {env_id} are {action_space}")
        modes, mode = gym.vector.AutoresetMode, envs.metadata.get("autoreset_mode")
        if mode not in (modes.SAME_STEP, modes.DISABLED):
            name = mode.name if isinstance(mode, modes) else f"metadata['autoreset_mode'] = {mode!r}"
            fail(f"--vectorization native takes the autoreset modes SAME_STEP and DISABLED, and {env_id} has {name}")
        self.has_no_autoreset = mode == modes.DISABLED

    def reset(self, **kwargs: Any) -> Any:
        """Begins episodes."""
        try:
            obs, infos = self.env.reset(**kwargs)
            if self.copies and np.shape(obs) != self.observation_space.shape:
                raise TypeError(f"reset must return observations {self.observation_space.shape}, not {np.shape(obs)}")
            return obs.copy() if self.copies else obs, infos
        except BaseException as error:
            self.tell(error)

    def step(self, actions: Any) -> Any:
        """Takes a step in every environment."""
        try:
            obs, rewards, terminations, truncations, infos = self.env.step(actions)
            if self.copies:
                self.check_step(obs, rewards, terminations, truncations, infos)
            if self.has_no_autoreset:
                dones = terminations | truncations
                if dones.any():  # the reset may write into the arrays of the step
                    infos["final_obs"] = obs.copy()
                    rewards, terminations, truncations = rewards.copy(), terminations.copy(), truncations.copy()
                    obs, _ = self.env.reset(options={"reset_mask": dones})
            return obs.copy() if self.copies else obs, rewards, terminations, truncations, infos
        except BaseException as error:
            self.tell(error)

    def check_step(self, obs: Any, rewards: Any, terminations: Any, truncations: Any, infos: Any) -> None:
        """Raises TypeError or ValueError for arrays of wrong shapes or types, and if final_obs is missing."""
        arrays = {"observations": obs, "rewards": rewards, "terminations": terminations, "truncations": truncations}
        for name, array in arrays.items():
            shape = self.observation_space.shape if name == "observations" else (self.num_envs,)
            kinds, what = ("b", "bools") if name.startswith("t") else ("biuf", "numbers")
            if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype.kind not in kinds:
                found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise TypeError(f"the {name} of step must be a NumPy array {shape} of {what}, not {found}")
        is_same_step = self.metadata["autoreset_mode"] == gym.vector.AutoresetMode.SAME_STEP
        if is_same_step and (dones := terminations | truncations).any():
            final_obs, shape = infos.get("final_obs"), self.single_observation_space.shape
            if not isinstance(final_obs, np.ndarray) or not all(np.shape(x) == shape for x in final_obs[dones]):
                raise ValueError(f"the infos of step must have final_obs, an array of observations {shape}, at ends")

    def tell(self, error: BaseException) -> NoReturn:
        """Raises the TaskError for an exception: which environment failed, if that is known, and its type and text."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        processes = self.env.processes if isinstance(self.env, gym.vector.AsyncVectorEnv) else []
        if processes and isinstance(error, (EOFError, OSError)):
            sentinels: list[Any] = [process.sentinel for process in processes]
            if dead := wait(sentinels, timeout=5.0):  # a pipe may close a moment before its process ends
                raise TaskError(f"environment {sentinels.index(dead[0])}: its process has died") from None
        raise TaskError(str(error) if isinstance(error, TaskError) else describe_error(error)) from error

    def close(self, **kwargs: Any) -> None:
        """Frees the resources of the environments."""
        close_quietly("the environments", partial(self.env.close, **kwargs))


def is_continuous(space: gym.Space) -> bool:
    """Whether a space is a Box of one float or more whose bounds, and their differences, are finite."""
    if not isinstance(space, gym.spaces.Box) or space.dtype.kind != "f" or 0 in space.shape:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(space.high - space.low).all())


# === Run ==============================================================================================================

ECHO_SECONDS = 2.0  # SIGTERMs this close are one stop: Slurm sends it to a run, and to the sweep that passes it on

stop_signals = list[int]()
stop_time = -math.inf  # of the first of them
trainer = 0  # the process that trains; those of environments are others
trains = False  # whether the run has begun its first step, so that there is something to save


def cannot_be_made(message: str, error: BaseException) -> NoReturn:
    """Exits with one sentence that names the task. During training it raises TaskError, so that the run is saved."""
    if trains:
        raise TaskError(message) from error
    fail(f"--env-id {message}")


def catch_signals() -> None:
    """Makes SIGINT, SIGTERM and SIGHUP stop the run at its next step; a second one ends the program at once.

    Before the first step, while environments are made or the update is compiled, the first one ends it at once, too.
    """
    global trainer, stop_time
    trainer, stop_time = os.getpid(), -math.inf

    def stop(signum: int, _: object) -> None:
        global stop_time
        if os.getpid() != trainer:  # an environment's process, which the main one ends
            return
        if stop_signals:  # it came while the first one was handled
            return abort(signum, _)
        stop_signals.append(signum)
        stop_time = time.monotonic()
        release_signals()
        if not trains:
            raise KeyboardInterrupt
        if signum == signal.SIGINT:
            with suppress(OSError):  # nobody reads it: Ctrl-C has ended `| tee`, too
                os.write(2, b"\nstopping after this step; Ctrl-C once more stops at once\n")

    stop_signals.clear()
    for signum in STOP_SIGNALS:
        if signum == signal.SIGINT or signal.getsignal(signum) != signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(signum, stop)
    atexit.register(ignore_signals)


def ignore_signals() -> None:
    """While Python itself ends, a further signal must not change the exit status."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def kill_environments() -> None:
    """Ends the processes of --vectorization async. They ignore SIGTERM, and print tracebacks if their pipes close."""
    for process in multiprocessing.active_children():
        process.kill()


def abort(signum: int, _: object) -> None:
    """Ends the program at once, with the environments' processes, and without tracebacks."""
    if signum == signal.SIGTERM and time.monotonic() < stop_time + ECHO_SECONDS:
        return
    kill_environments()
    with suppress(Exception):  # the signal may have interrupted a print
        sys.stdout.flush()
    os._exit(128 + signum)


def release_signals() -> None:
    """From here on a signal ends the program at once."""
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, abort)


def tell_exception(args: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The exception hook: one sentence for a signal, a lack of memory or a fault of the task; else the traceback."""
    kill_environments()
    status = 1
    if isinstance(error, KeyboardInterrupt):
        status = 128 + (stop_signals[0] if stop_signals else signal.SIGINT)
        print(f"stopped by signal {status - 128}", file=sys.stderr)
    elif sentence := explain(args, error):
        status = 2 if lacks_memory(error) and not trains else 1
        print(f"error: {sentence}", file=sys.stderr)
    else:
        traceback.print_exception(kind, error, trace)
    raise SystemExit(status)


def check_memory(buffers: Mapping[str, "Buffer"]) -> None:
    """Exits with one sentence if replay buffers are larger than the machine's memory, which they use as they fill."""
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        columns = [x for buffer in buffers.values() for x in buffer.columns.values() if x.device.type != "cuda"]
        size = sum(x.nbytes for x in columns) / 2**30
        if size > memory:
            fail(f"--buffer-size must fit into memory: it needs {size:,.0f} GiB, and there are {memory:,.0f} GiB")


def lacks_memory(error: BaseException | None) -> bool:
    """Whether an exception is of Python, NumPy or PyTorch and says that there is not enough memory."""
    is_of_torch = isinstance(error, RuntimeError) and re.search("allocate memory|out of memory", str(error))
    return isinstance(error, MemoryError) or bool(is_of_torch)


def explain(args: Any, error: BaseException | None, when: str = "") -> str:
    """The sentence for a fault of the task, whose own traceback it prints, or for a lack of memory; "" for the rest."""
    if isinstance(error, TaskError):
        cause: BaseException | None = error
        while isinstance(cause, TaskError):  # what the project made of it
            cause = cause.__cause__
        if cause is not None and not isinstance(cause, SystemExit):  # None: found by the project, or in a process
            traceback.print_exception(cause)
        return f"--env-id {args.env_id} failed{when}: {error}"
    if not lacks_memory(error):
        return ""
    sizes = {"num_envs", "num_games", "num_steps", "batch_size", "buffer_size", "eval_episodes", "eval_games"}
    sizes |= {"hidden_size", "sequence_length", "frame_size", "frame_stack"}  # of variants
    flags = " or ".join(flag_of(field.name) for field in fields(args) if field.name in sizes)
    return f"there is not enough memory; lower {flags or 'arguments'}: {one_line(error)[:200]}"


def seed_streams(seed: int, global_step: int) -> int:
    """Seeds all random streams from a run's seed and step, so that none has to be saved; returns their new seed."""
    step_seed = int(np.random.SeedSequence((seed, global_step)).generate_state(1)[0]) // 2  # below 2^31
    random.seed(step_seed), np.random.seed(step_seed), torch.manual_seed(step_seed)
    return step_seed


class Run:
    """One training run in one folder. Leaving its `with` block saves, closes, uploads and prints the next commands."""

    def __init__(
        self,
        args: Any,
        envs: Any,
        total_steps: int,
        stride: int,
        *,
        model: Mapping[str, Any],
        rest: Mapping[str, Any],
        buffers: Mapping[str, "Buffer"] | None = None,
        evaluate_with: Sequence[str] = ("--capture-video",),
    ) -> None:
        """Makes or resumes the run folder. Exits with one sentence if that cannot be done.

        An iteration of the loop takes `stride` environment steps, and the run `total_steps`. `model` are the parts of
        model.pt and of the checkpoints. `rest` goes into the checkpoints only. A part is a module, an optimiser, a
        plain dict of counters, or a dict of parts. `buffers` are written to disk in increments. `evaluate_with` are the
        flags of the --evaluate command that is suggested at the end.
        """
        check_memory(buffers or {})
        names = [*flatten(model), *flatten(rest), *(buffers or {})]
        if len(set(names)) < len(names):  # as with behaviours `red` and `red_agent`
            fail(f"--env-id takes a game whose parts in a checkpoint have different names, not {', '.join(names)}")
        self.args, self.envs, self.total_steps, self.stride = args, envs, total_steps, stride
        self.model = flatten(model)
        self.evaluate_with = () if getattr(args, "vectorization", "") == "native" else evaluate_with
        self.script = script_of(type(args))
        self.folder: Path = args.resume or make_run_folder(args)
        self.lock = lock_folder(self.folder)
        replay = self.folder / "checkpoint.replay"
        files = {name: BufferFiles(buffer, replay / name) for name, buffer in (buffers or {}).items()}
        self.parts = self.model | flatten(rest) | files
        self.global_step, self.log_step, self.begins_anew = 0, 0, True
        self.tracker: Any = None  # the W&B run; None: not tracked, or it has failed
        self.results: dict[str, float] = {}  # the newest value of every metric
        self.running: np.ndarray | None = None  # return and length of every running episode
        self.finished: list[np.ndarray] = []  # return and length of the episodes that have ended since the last point
        if args.resume is not None:
            self.load_checkpoint()
        self.announce()
        if args.track:
            try:
                self.tracker = start_tracking(self.folder, args)
            except SystemExit:
                if args.resume is None:  # nothing has been trained
                    self.lock.close()
                    shutil.rmtree(self.folder, ignore_errors=True)
                    with suppress(OSError):
                        self.folder.parent.rmdir()
                raise
        settings = {"script": self.script.name} | asdict(args) | {"resume": None}
        try:
            write_file(self.folder / "args.json", json.dumps(settings, indent=2).encode())
        except OSError as error:
            fail(f"the run folder cannot be written: {error}")
        self.writer = SummaryWriter(str(self.folder))
        if args.resume is None:
            self.save_checkpoint(is_finished=False)
        self.progress = tqdm(disable=True)

    def announce(self) -> None:
        """Prints task, seed, budget, device and folder; warns of rounding and of checkpoints that cut episodes."""
        args, total = self.args, self.total_steps
        device = next(x.device for x in all_tensors(self.model))
        budget = f"{total:,} steps on {device}"
        print(f"{args.exp_name}: {args.env_id}, seed {args.seed}, {budget}, run folder {self.folder}", flush=True)
        if args.resume is not None:
            print(f"resuming from step {self.global_step:,}", flush=True)
        if total != args.total_timesteps:
            rounded = f"rounded up to {total:,}, a multiple of {self.stride:,}"
            print(f"--total-timesteps {args.total_timesteps:,} is {rounded}", flush=True)
        if hasattr(args, "num_envs") and getattr(args, "learning_starts", -1) >= total:
            warn(f"--learning-starts {args.learning_starts:,} leaves the run of {total:,} steps without an update")
        with suppress(gym.error.Error):  # a game, or an id without a version
            own_limit = json.loads(getattr(args, "env_kwargs", "{}")).get("max_episode_steps")
            own_limit = own_limit if isinstance(own_limit, int) else None
            limit = own_limit or gym.spec(args.env_id.rpartition(":")[2]).max_episode_steps or 0
            limit = -(-limit // getattr(args, "action_repeat", 1))  # a step may be several of the task
            longest = limit * getattr(self.envs, "num_envs", 0)  # 0: a checkpoint resets no environment, as in sac_ray
            if 0 < args.checkpoint_freq < longest:
                flag = f"--checkpoint-freq {args.checkpoint_freq:,}"
                warn(f"{flag} cuts episodes off that would take up to {longest:,} steps of all environments")

    def __enter__(self) -> "Run":
        return self

    def due(self, *frequencies: int) -> bool:
        """Whether the current iteration passes a multiple of one of these numbers of steps; 0 is never due."""
        step = self.global_step + self.stride
        return any(frequency > 0 and step % frequency < self.stride for frequency in frequencies)

    def begin_anew(self) -> None:
        """Makes episodes and random streams begin anew at the next iteration."""
        self.begins_anew = True

    def steps(self) -> Iterator[tuple[int, int | None]]:
        """Yields (global_step, seed) once an iteration: the steps taken so far, and a seed where episodes begin anew.

        The seed is given at the start, after each checkpoint and after `begin_anew`, and is None otherwise. Where it is
        given, all random streams have been seeded, and the environments are to be reset with it. So a resumed run
        equals an uninterrupted one. Between two yields the progress bar moves, a checkpoint that is due is written, and
        a signal stops the run. After the last step the model and the checkpoint are on disk.
        """
        total, initial = self.total_steps, self.global_step
        self.progress = tqdm(total=total, initial=initial, unit="step", dynamic_ncols=True, disable=None)
        global trains
        trains = True
        self.log_step = self.line_step = self.global_step
        self.log_time = self.line_time = time.time()  # the time before, of compiling, does not count
        while self.global_step < self.total_steps:
            if stop_signals:
                raise Stopped
            seed = None
            if self.begins_anew:
                seed, self.running, self.finished = seed_streams(self.args.seed, self.global_step), None, []
            self.begins_anew = False
            yield self.global_step, seed
            is_due = self.due(self.args.checkpoint_freq)
            self.global_step += self.stride
            self.progress.update(self.stride)
            if is_due:
                self.save_checkpoint(is_finished=False)
                self.begins_anew = True
        saved = f"saved in {self.folder}" if self.save(is_finished=False) else "saving FAILED: see the warning above"
        release_signals()  # nothing is left to lose
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the end of the `with` block says how to go on
        if stop_signals:  # also one that came while the model was saved
            raise Stopped
        print(f"training is over, and {saved}; the final evaluation begins", flush=True)

    def check(self, step: int | None = None, /, **quantities: Any) -> None:
        """Stops the run if a number of these quantities is not finite, with the step and the quantity's name.

        Without a step, a quantity is a number, or an array whose first axis is time: its rows share the steps of the
        iteration evenly. With a step it may also be a list of arrays.
        """
        for name, values in quantities.items():
            values = np.concatenate(values, axis=None) if isinstance(values, (list, tuple)) else values
            with np.errstate(over="ignore"):
                rows = np.isfinite(np.atleast_1d(values).astype(np.float32, copy=False))  # the networks take float32
            if not rows.all():
                if step is None:
                    row = int(rows.reshape(len(rows), -1).all(axis=1).argmin())
                    step = self.global_step + (row + 1) * self.stride // len(rows)
                raise FloatingPointError(f"{name} is not a finite number at step {step:,}")

    def record(self, rewards: np.ndarray, dones: np.ndarray) -> None:
        """Adds a step of all environments to their episodes' returns and lengths, whose means `log` adds.

        rewards and dones are (num_envs,).
        """
        if self.running is None:
            self.running = np.zeros((2, len(rewards)))
        self.running[0] += rewards
        self.running[1] += 1.0
        if dones.any():
            self.finished += list(self.running[:, dones].T)
            self.running[:, dones] = 0.0

    def log(self, metrics: Mapping[str, float], global_step: int) -> None:
        """Logs one point of every metric; adds the speed and the mean return of the episodes since the last call.

        It adds nothing if all metrics are results of an evaluation. If the disk is full, points are lost, and the run
        goes on.
        """
        metrics = dict(metrics)
        if not all(name.startswith("eval/") for name in metrics):
            metrics["charts/SPS"] = (global_step - self.log_step) / (time.time() - self.log_time)
            if self.finished:
                returns, lengths = np.stack(self.finished, axis=1).mean(axis=1).tolist()
                metrics |= {"charts/episodic_return": returns, "charts/episodic_length": lengths}
                self.finished = []
        self.results |= metrics
        if self.tracker is not None:
            step = max(global_step, self.log_step)  # W&B takes no late point, as of an evaluation beside the training
            try:
                if step >= self.tracker.step:  # else W&B had it before the run was killed and resumed
                    self.tracker.log(metrics, step=step)
            except Exception as error:  # its own process has died, for example
                warn(f"W&B has no points from step {step:,} on; --resume adds them: {describe_error(error)}")
                self.tracker = None
        try:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, global_step)
        except OSError as error:
            warn(f"points of step {global_step:,} are not in TensorBoard: {error}")
        if global_step >= self.log_step:
            self.log_step, self.log_time = global_step, time.time()
        if global_step >= self.total_steps and any(name.startswith("eval/") for name in metrics):
            print(describe(metrics, getattr(self.args, "deterministic", True)), flush=True)
        status = describe_status(self.results, name_actions(getattr(self.args, "deterministic", True)))
        self.progress.set_postfix_str(status, refresh=False)
        if self.progress.disable and self.log_time - self.line_time > 30:
            speed = (global_step - self.line_step) / (self.log_time - self.line_time)
            line = [f"step {global_step:,} of {self.total_steps:,}", f"{speed:,.0f} steps/s", status]
            print(", ".join(filter(None, line)), flush=True)
            self.line_step, self.line_time = global_step, self.log_time

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        """Saves what is sound, closes everything, and ends the program with the exit status that fits."""
        if isinstance(error, KeyboardInterrupt):
            release_signals()
        self.progress.close()
        if isinstance(error, TaskError) and self.log_step > self.global_step:
            self.global_step += self.stride  # in an evaluation: this iteration has been learned from and logged
        failure = explain(self.args, error, f" after step {self.global_step:,}")
        if isinstance(error, (FloatingPointError, PartLost)):
            failure = str(error)  # the last checkpoint is the last good state
        if error is None or isinstance(error, (TaskError, Stopped)):
            try:
                if not self.save(is_finished=error is None):
                    failure = failure or "the model or the checkpoint could not be written"
            except (FloatingPointError, PartLost) as not_sound:
                failure = str(not_sound)
        is_finished = error is None and not failure
        signum = stop_signals[0] if stop_signals else signal.SIGINT
        is_stopped = not failure and isinstance(error, (Stopped, KeyboardInterrupt))
        status = 0 if is_finished else 128 + signum if is_stopped else 1
        self.close(terminate=bool(failure) or isinstance(error, KeyboardInterrupt), status=status)
        if error is not None and not failure and not isinstance(error, (Stopped, KeyboardInterrupt)):
            return False  # an exception of our own code: a traceback, and no checkpoint of its state
        if is_finished and getattr(self.args, "upload_model", False):
            upload_model(self.folder, self.args, self.results)
        self.lock.close()
        global trains
        trains = False
        self.suggest(is_finished)
        if failure:
            print(f"error: {failure}", file=sys.stderr)
            raise SystemExit(1)
        if not is_finished:
            print(f"stopped by signal {int(signum)} after step {self.global_step:,}")
            raise SystemExit(status)
        return True

    def close(self, terminate: bool, status: int) -> None:
        """Closes the environments and the loggers; `status` is the exit status, which W&B shows."""
        is_killed = terminate and isinstance(self.envs, gym.vector.VectorEnv)
        if is_killed:
            kill_environments()
        self.envs.close(**({"terminate": True} if is_killed else {}))
        with suppress(OSError):  # `log` has warned of it
            self.writer.close()
        release_signals()  # nothing is left to lose: a signal ends a transfer that hangs
        if self.args.track:
            import wandb

            try:
                wandb.finish(exit_code=status)
            except Exception as error:  # its own process has died, for example
                warn(f"W&B has not been told of the run's end: {describe_error(error)}")

    def suggest(self, is_finished: bool) -> None:
        """Prints the commands that a user may want next."""
        paths = os.path.relpath(self.script), str(self.folder), str(self.folder.parent)
        script, folder, parent = map(shlex.quote, paths)
        print(f"run folder: {self.folder}\nnext: tensorboard --logdir {parent}")
        if (self.folder / "model.pt").exists():
            print(f"      python {script} --evaluate {folder} {shlex.join(self.evaluate_with)}".rstrip())
        if not is_finished and (self.folder / "checkpoint.pt").exists():
            print(f"      python {script} --resume {folder}")

    # --- model file and checkpoints ---

    def save(self, is_finished: bool) -> bool:
        """Writes model.pt and a checkpoint; warns and returns False if one of them could not be written.

        Raises FloatingPointError if a number in the model is not finite.
        """
        if not all(x.isfinite().all() for x in all_tensors(self.model)):
            raise FloatingPointError(f"weights are not finite numbers at step {self.global_step:,}")
        self.begins_anew, is_written = True, True  # the run can go on from here only by a reset
        if self.args.save_model:
            model = {name: part.state_dict() for name, part in self.model.items()}
            facts = {"args": asdict(self.args) | {"resume": None}, "script": self.script.name, "versions": VERSIONS}
            try:
                write_file(self.folder / "model.pt", to_bytes(model | facts))
            except OSError as error:
                warn(f"model.pt could not be written: {error}")
                is_written = False
        return self.save_checkpoint(is_finished) and is_written

    def save_checkpoint(self, is_finished: bool) -> bool:
        """Writes checkpoint.pt; the one before becomes checkpoint.previous.pt. Warns and returns False if it cannot."""
        is_lost = False
        try:
            self.writer.flush()
        except OSError:  # its thread is gone, and its points are lost: the next ones go to a new file
            self.writer.file_writer = self.writer.all_writers = None
            if is_lost := is_finished:
                warn("the last evaluation is not in TensorBoard's file: --resume repeats it")
        facts = {"script": self.script.name, "format": CHECKPOINT_FORMAT, "versions": VERSIONS}
        facts |= {"global_step": self.global_step, "total_steps": self.total_steps}
        facts["is_finished"] = is_finished and not is_lost
        try:
            state = {n: dict(part) if isinstance(part, dict) else part.state_dict() for n, part in self.parts.items()}
            events = {path.name: path.stat().st_size for path in self.folder.glob("events.*")}
            for name in events:
                with (self.folder / name).open("rb+") as file:
                    os.fsync(file.fileno())
            write_file(self.folder / "checkpoint.next.pt", to_bytes(facts | {"parts": state, "events": events}))
            self.rename_next()
        except OSError as error:
            warn(f"the checkpoint of step {self.global_step:,} was not written, and the last one is kept: {error}")
            return False
        for part in self.parts.values():
            if hasattr(part, "remove_old"):  # a buffer's files
                part.remove_old()
        return not is_lost

    def rename_next(self) -> None:
        """Makes checkpoint.next.pt the newest checkpoint, and the newest one the previous one."""
        path = self.folder / "checkpoint.pt"
        if path.exists():
            os.replace(path, path.with_name("checkpoint.previous.pt"))
        os.replace(path.with_name("checkpoint.next.pt"), path)

    def load_checkpoint(self) -> None:
        """Loads the newest valid checkpoint into the parts, and cuts off what was logged after it.

        Exits with one sentence if there is none, or if nothing is left to do.
        """
        folder, damaged = self.folder, dict[Path, str]()
        names = ["checkpoint.pt", "checkpoint.previous.pt"]
        if (folder / "checkpoint.next.pt").exists():  # whole, but the run was killed before it got its name
            names = ["checkpoint.next.pt", *names]
        for path in map(folder.joinpath, names):
            try:
                state = read_file(path)
                if state["format"] != CHECKPOINT_FORMAT:
                    raise ValueError(f"it has format {state['format']}, and this version reads {CHECKPOINT_FORMAT}")
                for name, kind in FACTS.items():
                    typeguard.check_type(state[name], kind)
                for name, part in self.parts.items():
                    if isinstance(part, dict):
                        part.update(state["parts"][name])
                    else:
                        part.load_state_dict(state["parts"][name])
                break
            except Exception as error:  # each kind of damage has its own
                if lacks_memory(error):
                    raise
                damaged[path] = f"{path.name}: {describe_error(error)}"[:300]
        else:
            takes = "--resume takes a run folder with a valid checkpoint of this script"
            reason = f"{'; '.join(damaged.values())}; is it of another version of the script?"
            fail(f"{takes}, and {folder} has none ({reason})")
        step, flag = state["global_step"], f"--total-timesteps {self.args.total_timesteps:,}"
        if state["is_finished"] and step >= self.total_steps:
            fail(f"--resume takes a run that has not finished, or more --total-timesteps than the {step:,} of {folder}")
        if step > self.total_steps:
            fail(f"{flag} is less than the {step:,} steps that {folder} has already taken")
        if state["total_steps"] != self.total_steps and getattr(self.args, "anneal_lr", False):
            before, now = (f"{1 - step / total:.2%}" for total in (state["total_steps"], self.total_steps))
            warn(f"{flag} changes the annealed learning rate here from {before} to {now} of its initial value")
        if damaged:
            warn(f"resuming from {path.name}, because the newer one is damaged ({'; '.join(damaged.values())})")
        for damaged_path in damaged:
            with suppress(FileNotFoundError):  # else it would become the previous checkpoint
                damaged_path.replace(damaged_path.with_name(f"{damaged_path.name}.damaged"))
        if path.name == "checkpoint.next.pt":
            self.rename_next()
        if state["versions"] != VERSIONS:
            warn(f"the run started with {state['versions']} and resumes with {VERSIONS}")
        for events in folder.glob("events.*"):
            if events.name in state["events"]:
                os.truncate(events, min(state["events"][events.name], events.stat().st_size))
            else:
                events.unlink()
        self.global_step = step


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class CudaGraphs:
    """A function whose kernels are recorded and replayed (a CUDA graph), which saves the processor most launches.

    A call replays the recording that was made with the same shapes of tensors, the same `Args` and the same agent. If
    there is none, it calls the function. Parameters and buffers must change in place.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self.function, self.recordings = function, dict[Any, tuple[Any, ...]]()

    def key_of(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """What two calls must have in common, so that one may replay the recording of the other."""
        return tuple(
            (x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) if is_dataclass(x) else id(x) for x in leaves
        )

    def __call__(self, *args: Any) -> Any:
        """What the function returns, in new tensors."""
        leaves = tree_leaves(args)
        if (key := self.key_of(leaves)) not in self.recordings:
            return self.function(*args)
        graph, inputs, outputs, structure, _ = self.recordings[key]
        torch._foreach_copy_(inputs, [x for x in leaves if isinstance(x, Tensor)])
        graph.replay()
        copies = iter(torch._foreach_add([x for x in outputs if isinstance(x, Tensor)], 0))
        return tree_unflatten([next(copies) if isinstance(x, Tensor) else x for x in outputs], structure)

    def record(self, *args: Any) -> None:
        """Makes a recording; calls the function four times."""
        key = self.key_of(tree_leaves(args))
        args = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, args)
        stream = torch.cuda.Stream()  # PyTorch wants a few calls on another stream before it records
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.function(*args)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self.function(*args)
        inputs = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        # with `args`, so that no other object gets an id of the key
        self.recordings[key] = graph, inputs, *tree_flatten(result), args


@contextmanager
def unchanged(arguments: Sequence[Any]) -> Iterator[None]:
    """Restores the modules among these arguments at its end: they may keep statistics of each call, as batch norm."""
    states = [(x, copy.deepcopy(x.state_dict())) for x in arguments if isinstance(x, torch.nn.Module)]
    try:
        yield
    finally:
        for module, state in states:
            module.load_state_dict(state)


def compiled(function: FunctionT, *example: Any) -> FunctionT:
    """Compiles the function by calling it with example arguments; where that fails, warns and returns it as it is.

    The example changes no module: their parameters and buffers are those before the call.
    """
    began, reason = time.perf_counter(), ""
    duration = "some seconds, or up to two minutes the first time with a task"
    print(f"compiling {function.__name__}: {duration}", flush=True)
    try:
        os.makedirs(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "."), exist_ok=True)  # where PyTorch keeps the result
    except OSError as error:
        warn(f"the update is slow, because it cannot be compiled: {error}")
        return function
    torch._inductor.config.cpp_wrapper = not torch.cuda.is_available()  # calls kernels from C++: less overhead
    torch._dynamo.config.trace_autograd_ops = True  # otherwise torch.autograd.grad is not compiled
    torch._inductor.config.cpp.vec_isa_ok = True  # no test of the processor's vector instructions, which takes time
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in tree_leaves(example))
    for simdlen in (None, 1):  # 1: without them, for a compiler that does not know them
        torch._inductor.config.cpp.simdlen = simdlen
        try:
            result: Any = function if isinstance(function, CudaGraphs) else torch.compile(function)
            if on_gpu and result is not function:
                result = CudaGraphs(result)
            with unchanged(example):
                (result.record if on_gpu else result)(*example)
            print(f"compiled it in {time.perf_counter() - began:.1f} s; PyTorch keeps the result on disk")
            return result
        except RuntimeError as error:  # no C++ compiler, for example
            reason = str(error).splitlines()[0]
            torch._dynamo.reset()
    warn(f"the update is slow, because {function.__name__} cannot be compiled: {reason}")
    return function


def name_actions(deterministic: bool) -> str:
    """How policies act in an evaluation, in words that stand beside their score."""
    return "most likely actions" if deterministic else "sampled actions"


def describe(metrics: Mapping[str, float], deterministic: bool = True) -> str:
    """The results of an evaluation in one line."""
    if "eval/return_mean" in metrics:
        mean, std, length = (metrics[f"eval/{name}"] for name in ("return_mean", "return_std", "length_mean"))
        return f"evaluation: return {mean:.2f} +/- {std:.2f}, length {length:.1f}"
    note = f"{name_actions(deterministic)}; means from 0 to 1: a win is 1, a draw 0.5"
    return f"scores: {describe_status(metrics, note)}"


def describe_status(metrics: Mapping[str, float], note: str) -> str:
    """The newest results in one line, for the progress bar and the log file, with a note on the scores of a game."""
    labels = {"charts/episodic_return": "return", "eval/return_mean": "evaluation"}
    status, scores = [], []
    for name, value in metrics.items():
        if name in labels and not math.isnan(value):
            status.append(f"{labels[name]} {value:.1f}")
        elif name.startswith("selfplay/rating_"):
            status.append(f"training Elo {name.removeprefix('selfplay/rating_')} {value:.0f}")
        elif "_score_vs_" in name:
            scores.append(f"{name.removeprefix('eval/').replace('_score_vs_', ' against ')} {value:.2f}")
    return ", ".join(status + scores) + (f" ({note})" if scores else "")


# === Files ============================================================================================================


def make_run_folder(args: Any) -> Path:
    """Makes a new folder for the run; a counter distinguishes runs that start in the same second."""
    name = re.sub(r"[^\w.-]", "-", f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}")
    folder, counter = Path("runs") / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except OSError as error:
            if not os.path.exists(folder):  # Path.exists raises for a name that is too long
                fail(f"the run folder cannot be made: {error}")
        counter += 1
        folder = folder.with_name(f"{name}-{counter}")


def lock_folder(folder: Path) -> TextIO:
    """Locks the run folder until the returned file is closed or the process ends."""
    try:
        lock = (folder / "lock").open("w")
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"--resume takes a run that no other process is training, and {folder} is locked by one")
    except OSError as error:
        fail(f"the run folder cannot be written: {error}")
    return lock


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """The file that `torch.save` makes of a state."""
    contents = io.BytesIO()
    torch.save(state, contents)
    return contents.getvalue()


def read_file(path: Path) -> dict[str, Any]:
    """Reads a file of `to_bytes`; verifies its checksums and runs no code from it."""
    with zipfile.ZipFile(path) as archive:
        if archive.testzip() is not None:  # PyTorch itself does not look at the checksums
            raise ValueError("wrong checksum")
    return torch.load(path, map_location="cpu", weights_only=True)


def load_model(folder: Path, parts: Mapping[str, Any], flag: str = "--evaluate") -> None:
    """Loads the parts of a run's model.pt; exits with one sentence, which begins with `flag`, if that fails."""
    takes = f"{flag} takes a run folder with a valid model.pt of this script"
    if not (folder / "model.pt").exists() and (folder / "checkpoint.pt").exists():
        fail(f"{takes}, and {folder} has only a checkpoint: --resume it; with --no-save-model it gets no model.pt")
    try:
        state = read_file(folder / "model.pt")
        for name, part in flatten(parts).items():
            part.load_state_dict(state[name])
        if not all(x.isfinite().all() for x in all_tensors(parts)):
            raise ValueError("its weights are not finite numbers")
    except Exception as error:  # each kind of damage has its own
        reason = describe_error(error)[:300]
        has_others = "in loading state_dict" in reason
        what = "the networks of its model differ from those of the file" if has_others else f"{folder} has none"
        fail(f"{takes}, and {what} ({reason})")


def flatten(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Parts in nested dicts as one dict: {"agent": {"sumo": x}} becomes {"sumo_agent": x}."""
    flat: dict[str, Any] = {}
    for name, part in parts.items():
        is_nested = isinstance(part, Mapping) and not all(isinstance(x, (int, float)) for x in part.values())
        flat |= {f"{inner}_{name}": x for inner, x in flatten(part).items()} if is_nested else {name: part}
    return flat


def all_tensors(parts: Mapping[str, Any]) -> Iterator[Tensor]:
    """All tensors in the state of the modules among these parts."""
    for part in flatten(parts).values():
        if isinstance(part, nn.Module):
            yield from part.state_dict().values()


class Buffer(Protocol):
    """What a replay buffer needs for its checkpoints."""

    total: int  # transitions stored so far: transition i is in row i % capacity
    columns: dict[str, Tensor]  # all that is stored: tensors (capacity, ...)


class BufferFiles:
    """A replay buffer on disk: each checkpoint writes the transitions since the one before to a file of their own."""

    def __init__(self, buffer: Buffer, folder: Path) -> None:
        self.buffer, self.folder = buffer, folder
        # (first transition, one past the last) of each file: those of the newest checkpoint, and of the one before.
        self.files, self.previous = list[tuple[int, int]](), list[tuple[int, int]]()

    def rows(self, start: int, stop: int, column: Tensor) -> Tensor:
        """The rows of these transitions."""
        return torch.arange(start, stop, device=column.device) % len(column)

    def state_dict(self) -> dict[str, Any]:
        """Writes the new transitions; returns the number stored so far, and (start, stop) of each file."""
        columns, total = self.buffer.columns, self.buffer.total
        oldest = total - len(next(iter(columns.values())))
        start = max(self.files[-1][1] if self.files else 0, oldest)
        self.folder.mkdir(parents=True, exist_ok=True)
        if start < total:
            arrays = {name: x[self.rows(start, total, x)].cpu().numpy() for name, x in columns.items()}
            contents = io.BytesIO()
            np.savez(contents, allow_pickle=False, **arrays)
            write_file(self.folder / f"{start}.npz", contents.getvalue())
            self.files = [file for file in self.files if file[1] > oldest] + [(start, total)]
        return {"total": total, "files": self.files}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Reads these files."""
        for start, stop in state["files"]:
            with np.load(self.folder / f"{start}.npz") as arrays:
                for name, x in self.buffer.columns.items():
                    x[self.rows(start, stop, x)] = torch.as_tensor(arrays[name], device=x.device)
        self.buffer.total, self.files, self.previous = state["total"], state["files"], state["files"]

    def remove_old(self) -> None:
        """Removes files that neither the newest checkpoint nor the one before needs."""
        needed = {f"{start}.npz" for start, _ in self.files + self.previous}
        for path in self.folder.iterdir():
            if path.name not in needed:
                with suppress(OSError):  # only disk space is lost
                    path.unlink()
        self.previous = self.files


# === Weights & Biases, Hugging Face Hub, videos =======================================================================


def draw_without_a_screen() -> None:
    """Lets MuJoCo and pygame render where Linux has no screen."""
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def check_video(env_id: str, env_kwargs: dict[str, Any]) -> None:
    """Checks that a Gymnasium task can be rendered; exits with one sentence, and without the renderer's warnings."""
    render = env_kwargs | {"render_mode": "rgb_array"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with gym.make(env_id, **render) as env:
                env.reset()
                frame = env.render()
    except Exception as error:  # each task, and each renderer, has its own errors
        fail(f"--capture-video cannot render {env_id}: {describe_error(error)}")
    if not isinstance(frame, np.ndarray):
        fail(f"--capture-video takes a task that renders pictures, and {env_id} renders none")


def check_tracking() -> None:
    """Checks that W&B can be used; exits with one sentence."""
    mode = os.environ.get("WANDB_MODE", "online")
    if mode not in ("online", "offline", "disabled", "shared"):
        fail(f"--track takes WANDB_MODE=online, offline, disabled or shared, and it is {mode}")
    if mode == "online":
        import wandb

        try:
            is_logged_in = wandb.login(prompt=False)
        except wandb.Error as error:
            fail(f"--track cannot log in to W&B: {one_line(error)}")
        if not is_logged_in:
            fail("--track takes a W&B account: log in with `wandb login`, or set WANDB_MODE=offline")


def start_tracking(folder: Path, args: Any) -> Any:
    """Starts or resumes the W&B run with the folder's name; returns it with all points of TensorBoard that it lacked.

    Offline these are all points of a resumed run: a kill may have cut off the old record, and the new one replaces it.
    """
    import wandb
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = folder.resolve()  # `--resume .` has no name
    old_records = list((folder / "wandb").glob("offline-run-*"))
    project, entity, config = args.wandb_project_name, args.wandb_entity, asdict(args)
    try:
        run = wandb.init(project=project, entity=entity, id=folder.name, resume="allow", dir=folder, config=config)
    except Exception as error:  # names, network, files and the server each have their own errors
        fail(f"--track cannot begin the W&B run {folder.name} of {project}: {one_line(error)}"[:500])
    for record in old_records if not run.disabled else ():
        shutil.rmtree(record)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    points: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            points.setdefault(event.step, {})[name] = event.value
    for step in sorted(points):
        if step >= run.step:
            run.log(points[step], step=step)
    return run


def hub_repo_id(args: Any) -> str:
    """Name of the run's repository on the Hugging Face Hub."""
    name = re.sub(r"[^\w.-]", "-", f"{args.env_id}-{args.exp_name}-seed{args.seed}", flags=re.ASCII)
    return f"{args.hf_entity}/{name}"


def check_upload(args: Any) -> None:
    """Checks that the model can be uploaded; exits with one sentence."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if args.hf_entity is None or not args.save_model:
        fail("--upload-model takes --save-model and --hf-entity NAME, a user or organisation on the Hugging Face Hub")
    if get_token() is None:
        fail("--upload-model takes a Hugging Face account: log in with `hf auth login`, or set HF_TOKEN")
    try:
        validate_repo_id(hub_repo_id(args))
    except HFValidationError as error:
        fail(f"--upload-model takes an --hf-entity and --exp-name that the Hub allows: {one_line(error)}")


def script_path(cls: type) -> str:
    """The script from the root of this repository: "variants/NAME.py" for a variant."""
    script = script_of(cls)
    return f"variants/{script.name}" if script.parent == Path(__file__).parents[1] / "variants" else script.name


def command_of(args: Any) -> str:
    """The command that repeats a run: the script and all arguments that differ from their defaults."""
    words = ["python", script_path(type(args))]
    for field in fields(args):
        value, flag = getattr(args, field.name), flag_of(field.name)
        if isinstance(value, bool):
            words += [] if value == field.default else [flag if value else flag.replace("--", "--no-", 1)]
        elif value != field.default and field.name not in ("resume", "evaluate"):
            words += [flag, *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)])]
    return shlex.join(words)


def upload_model(folder: Path, args: Any, metrics: Mapping[str, float]) -> None:
    """Writes a model card into the run folder, and uploads the folder to the Hugging Face Hub; warns if that fails."""
    from huggingface_hub import EvalResult, HfApi, ModelCardData

    scores = {name: f"{value:.2f}" for name, value in metrics.items() if "_score_vs_" in name}
    note = name_actions(getattr(args, "deterministic", True))
    result, of_what = describe_status(metrics, note), "Scores of the final policies"
    if "eval/return_mean" in metrics:
        result = f"{metrics['eval/return_mean']:.2f} +/- {metrics['eval/return_std']:.2f}"
        scores, of_what = {"mean_reward": result}, "Return of the final deterministic policy"
        result += f" over {args.eval_episodes} episodes"
    tags = ["reinforcement-learning", "deep-reinforcement-learning", args.exp_name, args.env_id]
    results = [EvalResult(tags[0], args.env_id, args.env_id, *score) for score in scores.items()]
    card = ModelCardData(library_name="pytorch", tags=tags, model_name=args.exp_name, eval_results=results)
    versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}, Gymnasium {gym.__version__}"
    script = script_path(type(args))
    try:
        (folder / "README.md").write_text(
            f"---\n{card.to_yaml()}\n---\n\n# {args.exp_name} on {args.env_id}\n\n"
            f"{of_what}: {result}.\n\n"
            f"Trained with {versions}:\n\n    {command_of(args)}\n\n"
            f"Play it again, from a download of this repository:\n\n    python {script} --evaluate FOLDER\n"
        )
        api = HfApi()
        repo_id = api.create_repo(hub_repo_id(args), exist_ok=True).repo_id
        url = api.upload_folder(repo_id=repo_id, folder_path=folder, ignore_patterns=["wandb/*", "checkpoint*"])
        print(f"uploaded: {url}")
    except Exception as error:  # network, server and library each have their own errors, and none may cost the run
        warn(f"--upload-model failed, and everything is still in {folder}: {describe_error(error)}")
