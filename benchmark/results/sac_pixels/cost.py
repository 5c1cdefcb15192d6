"""What SAC from pictures costs: process time of the parts of a step, bytes of a transition, drawing of a picture.

OMP_NUM_THREADS=1 python -m benchmark.results.sac_pixels.cost
"""

import time
from importlib import import_module
from statistics import median
from typing import Any

import numpy as np
import torch

pixels: Any = import_module("variants.sac_pixels")
states: Any = import_module("sac_continuous")
NUM_STEPS, NUM_UPDATES = 200, 40


def measure(name: str, script: Any, **flags: Any) -> None:
    """Prints the least and the median process time in ms of a step, an action and an update, and the bytes stored."""
    args = script.Args(env_id="Pendulum-v1", buffer_size=1000, num_envs=1, **flags)
    script.prepare(args, script.LIMITS)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    envs, device = script.make_envs(args, 1), torch.device("cpu")
    agent = script.Agent(envs, args)
    optimizers = {key: script.Adam(group, 1e-3, 0.9, 0.999, 1e-8) for key, group in agent.groups().items()}
    obs, _ = envs.reset(seed=0)
    sizes = [1000, 1, args.frame_stack, obs.size, 1] if script is pixels else [1000, obs.size, 1]
    buffer = script.ReplayBuffer(*sizes, device)
    begins, times = np.ones(1, dtype=bool), dict[str, list[float]](step=[], act=[], update=[])
    began = time.process_time()

    def lap(part: str) -> None:
        """Adds the time since the last call."""
        nonlocal began
        times[part].append(1e3 * (time.process_time() - began))
        began = time.process_time()

    for step in range(NUM_STEPS):
        actions = agent.act(obs, torch.randn(1, 1))
        lap("act")
        next_obs, final_obs, rewards, terminations, truncations = script.step_envs(envs, actions)
        columns = (obs, actions, rewards, final_obs, terminations)
        buffer.add(*([begins] if script is pixels else []), *columns)
        obs, begins = next_obs, terminations | truncations
        lap("step")
        if step >= NUM_STEPS - NUM_UPDATES:
            script.update(agent, optimizers, buffer.sample(args.batch_size), args, step)
            lap("update")
    envs.close()
    parts = ", ".join(f"{part} {min(x):.1f} / {median(x):.1f}" for part, x in times.items())
    stored = sum(x.nbytes for x in buffer.columns.values()) / 1000 * buffer.total / NUM_STEPS
    print(f"{name}: {parts} ms; {stored:,.0f} bytes a transition", flush=True)


def measure_drawing(**flags: Any) -> None:
    """Prints the least and the median process time in ms that drawing a picture takes, and drawing and scaling it."""
    env = pixels.make_env(pixels.Args(grey=True, **flags))
    env.reset(seed=0)
    for name, function in {"drawn": env.env.render, "drawn and scaled": lambda: env.see(None)}.items():
        times = []
        for _ in range(20):
            began = time.process_time()
            function()
            times.append(1e3 * (time.process_time() - began))
        print(f"{flags}: {name} in {min(times):.1f} / {median(times):.1f} ms", flush=True)
    env.close()


if __name__ == "__main__":
    for _ in range(2):  # the load of a machine changes: what is compared is measured in turn
        measure("states, sac_continuous.py --no-compile", states)
        measure("states, the same with minibatches of 64", states, batch_size=64)
        measure("grey pictures", pixels, grey=True)
        measure("grey pictures, --max-shift 0", pixels, grey=True, max_shift=0)
        measure("colour", pixels)
        measure("grey, --encoder nature", pixels, grey=True, encoder="nature")
        measure("grey, --encoder resnet", pixels, grey=True, encoder="resnet")
        measure("grey, --frame-size 84", pixels, grey=True, frame_size=84)
        measure_drawing(env_id="Pendulum-v1")
        measure_drawing(env_id="HalfCheetah-v5")
        measure_drawing(env_id="HalfCheetah-v5", env_kwargs='{"width": 64, "height": 64}')
