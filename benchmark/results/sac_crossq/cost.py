"""Processor time of an update of two scripts, measured in turn: `python cost.py`, with OMP_NUM_THREADS=1.

On a machine that other programs use, too, only the ratio says something.
"""

import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
SCRIPTS, ROUNDS, UPDATES = ("sac_continuous", "variants.sac_crossq"), 10, 60


def make_updates(name: str) -> Callable[[int], float]:
    """A function that makes updates of a script on Hopper-v5, and returns their mean processor time in ms."""
    script: Any = import_module(name)
    args = script.Args(env_id="Hopper-v5")
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
    updates = [make_updates(name) for name in SCRIPTS]
    rounds = [[run(UPDATES) for run in updates] for _ in range(ROUNDS + 1)][1:]
    for name, times in zip(SCRIPTS, zip(*rounds, strict=True), strict=True):
        print(f"{name}: median {statistics.median(times):.1f} ms, {min(times):.1f} to {max(times):.1f} ms")
    ratios = [second / first for first, second in rounds]
    print(f"ratio: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
