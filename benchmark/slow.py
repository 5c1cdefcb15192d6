"""Any Gymnasium task, slowed down: `--env-id benchmark.slow:Slow-v0 --env-kwargs '{"task": "Pendulum-v1"}'`."""

import time
from typing import Any, SupportsFloat

import gymnasium as gym


class Slow(gym.Wrapper):
    """Sleeps in each step: a stand-in for a simulator that takes time and no processor of this machine."""

    def __init__(self, task: str = "Pendulum-v1", seconds: float = 0.01) -> None:
        super().__init__(gym.make(task))
        self.seconds = seconds

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """A step of the task, after a sleep."""
        if self.seconds:
            time.sleep(self.seconds)
        return self.env.step(action)


gym.register("Slow-v0", entry_point="benchmark.slow:Slow")
