"""Demonstrations for imitation learning: transitions of a saved policy in a file `demonstrations.npz`."""

import io
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils.run import fail, load_model, load_script, one_line, read_args, tell_exception, warn, write_file

MAX_EPISODE_STEPS = 10_000  # an episode is cut off there


def record_demonstrations(folder: Path, num_episodes: int, seed: int) -> None:
    """Plays the deterministic policy of a run of a single-agent script or variant, and writes its transitions.

    `folder`/demonstrations.npz then holds obs, final_obs (n, obs_dim), actions (n, action_dim) in [-1, 1], rewards and
    terminations (n,), the undiscounted returns (num_episodes,), and env_id.
    """
    script: Any = load_script("--record-demonstrations", folder)
    if not hasattr(script, "step_envs") or hasattr(script, "Memory") or hasattr(script, "Pixels"):
        takes = "--record-demonstrations takes a run of one agent without memory and pictures"
        fail(f"{takes}, and {folder} is one of {Path(script.__file__).name}")
    args = read_args(script.Args, folder, "--record-demonstrations", script.LIMITS)
    sys.excepthook = partial(tell_exception, args)  # names the task of the run, not that of the command
    args = args if args.vectorization == "native" else replace(args, vectorization="sync")
    seed = (2_000_000 + seed * num_episodes) % 2**31
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)  # tasks may draw from them
    envs = script.make_envs(args, num_episodes)
    agent = script.Agent(envs, args)
    load_model(folder, {"agent": agent}, "--record-demonstrations")
    act = agent.policy() if hasattr(agent, "policy") else agent.act  # PPO has `policy`, SAC has not
    obs, _ = envs.reset(seed=seed)
    running, columns = np.ones(num_episodes, dtype=bool), list[list[np.ndarray]]()
    returns = np.zeros(num_episodes)
    for _ in range(MAX_EPISODE_STEPS):
        actions = act(obs).clip(-1.0, 1.0)
        next_obs, final_obs, rewards, terminations, truncations = script.step_envs(envs, actions)
        columns.append([x[running] for x in (obs, actions, rewards, final_obs, terminations)])
        returns += np.where(running, rewards, 0.0)
        running &= ~(terminations | truncations)
        obs = next_obs
        if not running.any():
            break
    envs.close()
    names = ("obs", "actions", "rewards", "final_obs", "terminations")
    arrays = {name: np.concatenate(x) for name, x in zip(names, zip(*columns, strict=True), strict=True)}
    contents = io.BytesIO()
    np.savez_compressed(contents, allow_pickle=False, env_id=args.env_id, returns=returns, **arrays)
    path = folder / "demonstrations.npz"
    try:
        write_file(path, contents.getvalue())
    except OSError as error:
        fail(f"--record-demonstrations takes a run folder that can be written, and {folder} cannot ({one_line(error)})")
    size = f"{len(arrays['obs']):,} transitions of {num_episodes} episodes"
    print(f"{path}: {size}, return {returns.mean():.2f} +/- {returns.std():.2f}")


def load_demonstrations(file: str, env_id: str, obs_dim: int, action_dim: int) -> tuple[np.ndarray, ...]:
    """Reads such a file: obs, actions, rewards, final_obs, terminations; exits with one sentence if it does not fit.

    Warns if it is of another task with the same sizes.
    """
    widths = {"obs": (obs_dim,), "actions": (action_dim,), "rewards": (), "final_obs": (obs_dim,), "terminations": ()}
    try:
        with np.load(file) as arrays:
            columns = {name: np.asarray(arrays[name], dtype=np.float32) for name in widths}
            recorded = str(arrays["env_id"]) if "env_id" in arrays else env_id  # a file of the user's may have none
        shapes = {name: x.shape for name, x in columns.items()}
        if shapes != {name: (len(columns["obs"]), *width) for name, width in widths.items()}:
            raise ValueError(f"its shapes are {shapes}, and the task has {widths}")
        if not len(columns["obs"]) or not all(np.isfinite(x).all() for x in columns.values()):
            raise ValueError("it has no transitions, or numbers that are not finite")
        if np.abs(columns["actions"]).max() > 1.0 + 1e-6:
            raise ValueError("its actions are not in [-1, 1]: scale them from the task's bounds")
        if not np.isin(columns["terminations"], (0.0, 1.0)).all():
            raise ValueError("its terminations are not 0 or 1")
    except Exception as error:  # each kind of damage has its own
        fail(
            f"--demonstrations takes a file of --record-demonstrations of the same task, not {file} ({one_line(error)})"
        )
    if recorded != env_id:
        warn(f"--demonstrations {file} is of {recorded}, and the task is {env_id}")
    return tuple(columns.values())
