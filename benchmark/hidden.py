"""Tasks with a hidden part, for scripts without `--observe`: `--env-id benchmark.hidden:PendulumVelocity-v1`."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import PendulumEnv


class Part(gym.ObservationWrapper):
    """Shows a part of the observations, which are vectors, and hides the rest."""

    def __init__(self, env: gym.Env, part: slice) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, gym.spaces.Box)
        self.part = part
        self.observation_space = gym.spaces.Box(space.low[part], space.high[part], dtype=space.dtype.type)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """What is left of it."""
        return observation[self.part]


def make_pendulum(**kwargs: Any) -> gym.Env:
    """The angular velocity, without the angle: `--env-id Pendulum-v1 --observe 2`."""
    return Part(PendulumEnv(**kwargs), slice(2, 3))


def make_hopper(**kwargs: Any) -> gym.Env:
    """The positions, without the velocities: `--env-id Hopper-v5 --observe 0,1,2,3,4`."""
    from gymnasium.envs.mujoco.hopper_v5 import HopperEnv  # needs mujoco

    return Part(HopperEnv(**kwargs), slice(0, 5))


gym.register("PendulumVelocity-v1", entry_point=make_pendulum, max_episode_steps=200)
gym.register("HopperPositions-v1", entry_point=make_hopper, max_episode_steps=1000)
