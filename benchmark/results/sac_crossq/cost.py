"""Processor time of an update of two scripts on four tasks, measured in turn; writes `cost.csv` beside this file.

    OMP_NUM_THREADS=1 python benchmark/results/sac_crossq/cost.py

On a machine that other programs use, too, only the ratio says something.
"""

import csv
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
SCRIPTS, ROUNDS, UPDATES = ("sac_continuous", "variants.sac_crossq"), 7, 60
TASKS = "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5"


def make_updates(name: str, task: str) -> Callable[[int], float]:
    """A function that makes updates of a script on a task, and returns their mean processor time in ms."""
    script: Any = import_module(name)
    args = script.Args(env_id=task)
    envs = script.make_envs(args, 1)
    agent = script.Agent(envs, args)
    obs_dim, action_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    optimizers = {key: script.Adam(group, 3e-4, 0.9, 0.999, 1e-8) for key, group in agent.groups().items()}
    buffer = script.ReplayBuffer(5000, obs_dim, action_dim, torch.device("cpu"))
    buffer.data.normal_()
    buffer.data[:, -1] = (buffer.data[:, -1] > 2.0).float()  # terminations
    buffer.total = len(buffer.data)
    example = agent, buffer.sample(args.batch_size), torch.zeros(args.batch_size, action_dim), args
    gradients = (
        script.compiled(script.compute_qf_gradient, *example),
        script.compiled(script.compute_actor_gradient, *example),
    )

    def run(num_updates: int) -> float:
        begin = time.process_time()
        for step in range(num_updates):
            script.update(agent, optimizers, buffer.sample(args.batch_size), args, step, gradients)
        return (time.process_time() - begin) / num_updates * 1000.0

    return run


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    rows = []
    for task in TASKS:
        updates = [make_updates(name, task) for name in SCRIPTS]
        rounds = [[run(UPDATES) for run in updates] for _ in range(ROUNDS + 1)][1:]
        rows += [[task, *(f"{time:.2f}" for time in times)] for times in rounds]
        for name, times in zip(SCRIPTS, zip(*rounds, strict=True), strict=True):
            print(f"{task}, {name}: median {statistics.median(times):.1f} ms, {min(times):.1f} to {max(times):.1f} ms")
        ratios = [second / first for first, second in rounds]
        print(f"{task}, ratio: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    with Path(__file__).with_name("cost.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["task", "sac_continuous", "sac_crossq"], *rows])
