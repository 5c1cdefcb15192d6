"""Tasks with a hidden part, for scripts without `--observe`: `--env-id benchmark.hidden:PendulumVelocity-v1`."""

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import PendulumEnv


class Velocity(gym.ObservationWrapper):
    """Shows the angular velocity of the pendulum, and hides its angle: `--env-id Pendulum-v1 --observe 2`."""

    def __init__(self, **kwargs: str) -> None:
        super().__init__(PendulumEnv(**kwargs))
        self.observation_space = gym.spaces.Box(-8.0, 8.0, (1,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """(cosine, sine, velocity) to (velocity,)."""
        return observation[2:]


gym.register("PendulumVelocity-v1", entry_point=Velocity, max_episode_steps=200)
