"""A task of recall for policies with memory: `--env-id benchmark.recall:Recall-v0`."""

from typing import Any

import gymnasium as gym
import numpy as np

LENGTH, QUESTIONS = 32, (3, 17, 31)  # steps of an episode, and those of which the action counts


class Recall(gym.Env):
    """The first observation shows a cue, 1 or -1. At each question the reward is the action times the cue.

    The observation (2,) is the cue, which is zero after the first step, and a one where a question is. The first
    question comes 3 steps after the cue. Each later one comes 13 steps after the reward of the last answer, which shows
    the cue again. The best return is 3; without memory it is 0.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def observe(self) -> np.ndarray:
        """What the agent sees before its next step."""
        return np.array([self.cue if self.time == 0 else 0.0, self.time in QUESTIONS], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Draws the cue."""
        super().reset(seed=seed)
        self.time, self.cue = 0, float(self.np_random.choice([-1.0, 1.0]))
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Rewards an answer; the episode terminates after its last step."""
        reward = float(action[0]) * self.cue if self.time in QUESTIONS else 0.0
        self.time += 1
        return self.observe(), reward, self.time == LENGTH, False, {}


gym.register("Recall-v0", entry_point="benchmark.recall:Recall")
