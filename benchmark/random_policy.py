"""Measures the return of a random policy, which is the zero of normalised scores.

    python -m benchmark.random_policy HalfCheetah-v5 Hopper-v5

Actions are uniform in the action space. Adds the tasks to `random_returns.csv`, or replaces their rows.
"""

import csv
import json
from functools import cache
from pathlib import Path
from typing import Annotated

import gymnasium as gym
import numpy as np
import tyro

from benchmark import fail

RETURNS = Path(__file__).parent / "random_returns.csv"
EPISODES, LONGEST = 100, 10_000  # an episode without an end is cut at LONGEST steps


@cache
def measure(env_id: str, episodes: int = EPISODES, env_kwargs: str = "{}") -> np.ndarray:
    """Returns (episodes,) of uniformly random actions, from fixed seeds."""
    env = gym.make(env_id, **json.loads(env_kwargs))
    env.action_space.seed(0)
    returns = np.zeros(episodes)
    for episode in range(episodes):
        env.reset(seed=episode)
        for _ in range(LONGEST):
            _, reward, termination, truncation, _ = env.step(env.action_space.sample())
            returns[episode] += float(reward)
            if termination or truncation:
                break
    env.close()
    return returns


def random_return(env_id: str, env_kwargs: str = "{}") -> float:
    """Mean return of the random policy, measured now if it is not in the file, which is of tasks without arguments."""
    with RETURNS.open() as file:
        known = {row["task"]: float(row["mean"]) for row in csv.DictReader(file)}
    is_known = env_id in known and not json.loads(env_kwargs)
    return known[env_id] if is_known else float(measure(env_id, 20, env_kwargs).mean())


def main(env_ids: Annotated[list[str], tyro.conf.Positional]) -> None:
    """Measures the tasks and writes the file."""
    with RETURNS.open() if RETURNS.exists() else open("/dev/null") as file:
        rows = {row["task"]: row for row in csv.DictReader(file)}
    for env_id in env_ids:
        try:
            returns = measure(env_id)
        except (gym.error.Error, ImportError) as error:
            fail(f"the words take tasks of Gymnasium, and {env_id} is none: {error}")
        values = f"{returns.mean():.5g}", f"{returns.std(ddof=1):.5g}", str(len(returns)), gym.__version__
        rows[env_id] = {"task": env_id} | dict(zip(("mean", "std", "episodes", "gymnasium"), values, strict=True))
        print(rows[env_id])
    with RETURNS.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["task", "mean", "std", "episodes", "gymnasium"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[env_id] for env_id in sorted(rows))


if __name__ == "__main__":
    tyro.cli(main)
