"""What an update of `variants/sac_recurrent.py` costs, in turn with another version of the file.

    git show COMMIT:variants/sac_recurrent.py >variants/before.py
    python -m benchmark.recurrent_cost variants.sac_recurrent variants.before --sequence-length 32

Prints the process time of an update in milliseconds, and the ratios to the first version. What follows the modules goes
to both scripts. `EPISODE=20` in the environment makes episodes of 20 steps instead of 200.
"""

import importlib
import os
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmark import fail

WARM_UP, NUM_UPDATES = 40, 160


def fill(script: Any, agent: Any, episode: int) -> Any:
    """A buffer of 3,000 random steps of one environment, whose episodes have this many."""
    obs_dim, memory = len(agent.obs_rms.mean), agent.forget(1)
    buffer = script.ReplayBuffer(3_000, 1, obs_dim, agent.past_dim - 2, memory.shape[1], torch.device("cpu"))
    rng = np.random.default_rng(0)
    obs, state_dim = rng.standard_normal((1, obs_dim)), memory.shape[1] - agent.past_dim
    for step in range(3_000):
        actions, next_obs = rng.uniform(-1.0, 1.0, (1, agent.past_dim - 2)), rng.standard_normal((1, obs_dim))
        rewards, dones = rng.standard_normal(1), np.array([(step + 1) % episode == 0])
        buffer.add(obs, actions, rewards, next_obs, np.zeros(1), memory)
        memory = script.remember(actions, rewards, 0.1 * rng.standard_normal((1, state_dim)), dones)
        obs = rng.standard_normal((1, obs_dim)) if dones[0] else next_obs
    return buffer


def main(names: list[str], words: list[str]) -> None:
    """Updates agents of all versions by turns."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    parts: dict[str, Any] = {}
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        script: Any = importlib.import_module(name)
        args = script.parse_args(script.Args, ["--env-id", "Pendulum-v1", "--observe", "2", *words])
        torch.manual_seed(0)
        agent = script.Agent(script.make_envs(args, 1), args)
        optimizers = {key: script.Adam(group, 1e-3, 0.9, 0.999, 1e-8) for key, group in agent.groups().items()}
        parts[name] = script, args, agent, optimizers, fill(script, agent, int(os.environ.get("EPISODE", "200")))
    for step in range(WARM_UP + NUM_UPDATES):
        for name in names if step % 2 else reversed(names):
            script, args, agent, optimizers, buffer = parts[name]
            torch.manual_seed(step)
            batch = buffer.sample(args.batch_size, args.sequence_length)
            began = time.process_time()
            script.update(agent, optimizers, batch, args, step)
            times[name] += [1000.0 * (time.process_time() - began)]
    medians = {name: float(np.median(column[WARM_UP:])) for name, column in times.items()}
    for name, column in times.items():
        ratio = medians[name] / medians[names[0]]
        print(f"{name}: smallest {min(column[WARM_UP:]):.1f} ms, median {medians[name]:.1f} ms, ratio {ratio:.2f}")


if __name__ == "__main__":
    modules = [word for word in sys.argv[1:] if word.startswith("variants.")]
    if not modules:
        fail("the first words take modules such as variants.sac_recurrent")
    main(modules, sys.argv[1 + len(modules) :])
