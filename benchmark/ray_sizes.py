"""Bytes of the messages of `variants/sac_ray.py`, and processor time of its parts without Ray.

    python -m benchmark.ray_sizes --env-id HalfCheetah-v5

The parts are made in one process, and their calls are plain calls. So what Ray adds to a call is not counted.
"""

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tyro

from utils.cluster import Shard

script: Any = import_module("variants.sac_ray")  # variants/ is no package


@dataclass
class Args:
    """Bytes of the messages of variants/sac_ray.py, and processor time of its parts without Ray."""

    env_id: str = "HalfCheetah-v5"
    """task"""
    rollouts: int = 50
    """rollouts that are measured"""


def milliseconds(times: int, call: Callable[[], Any]) -> float:
    """Processor time of a call: the mean of so many."""
    began = time.process_time()
    for _ in range(times):
        call()
    return 1000.0 * (time.process_time() - began) / times


def main(args: Args) -> None:
    """Prints the sizes and times."""
    run_args = script.Args(env_id=args.env_id, cuda=False)
    worker = script.RolloutWorker(run_args, 0)
    optimizer = script.Adam(worker.agent.actor.parameters(), 1e-3, 0.9, 0.999, 1e-8)
    obs_rms = {name: x.numpy() for name, x in worker.agent.obs_rms.state_dict().items()}
    weights = {"version": 1, "time": time.time(), "actor": optimizer.vector.numpy(), "obs_rms": obs_rms}
    obs_dim, action_dim = worker.envs.single_observation_space.shape[0], worker.envs.single_action_space.shape[0]
    shard = Shard(partial(script.ReplayBuffer, 100_000, obs_dim, action_dim), Path("none"), {"total": 0, "files": []})
    messages = list[Any]()

    def add(*columns: Any) -> int:
        messages.append(columns)
        return shard.add(*columns)

    script.get, script.is_restarted = lambda x: x, lambda: False
    server = SimpleNamespace(pull=SimpleNamespace(remote=lambda version: [weights] if version < 1 else []))
    rollout = partial(
        worker.rollout, run_args.learning_starts, server, SimpleNamespace(add=SimpleNamespace(remote=add))
    )
    facts, steps = rollout(), run_args.rollout_steps
    print(f"weights: {len(pickle.dumps(weights)):,} bytes")
    print(f"transitions of a rollout of {steps} steps: {len(pickle.dumps(messages[0])):,} bytes")
    print(f"facts of a rollout: {len(pickle.dumps(facts)):,} bytes")
    sample = partial(shard.sample, script.AT_ONCE * run_args.batch_size)
    print(f"message of {script.AT_ONCE} minibatches: {len(pickle.dumps(sample())):,} bytes")
    print(f"a step of a worker: {milliseconds(args.rollouts, rollout) / steps:.3f} ms")
    print(f"storing a step: {milliseconds(1000, partial(shard.add, *messages[0])) / steps:.4f} ms")
    print(f"sampling a minibatch: {milliseconds(200, sample) / script.AT_ONCE:.4f} ms")


if __name__ == "__main__":
    main(tyro.cli(Args))
