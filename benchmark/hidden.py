"""Tasks with a hidden part, for scripts without `--observe`: `--env-id benchmark.hidden:PendulumVelocity-v1`."""

from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import PendulumEnv


def show(env: gym.Env, part: slice) -> gym.Env:
    """Shows a part of the observations, which are vectors, and hides the rest."""
    space = env.observation_space
    assert isinstance(space, gym.spaces.Box)
    shown_space = gym.spaces.Box(space.low[part], space.high[part], dtype=space.dtype.type)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[part], shown_space)


def make_pendulum(**kwargs: Any) -> gym.Env:
    """The angular velocity, without the angle: `--env-id Pendulum-v1 --observe 2`."""
    return show(PendulumEnv(**kwargs), slice(2, 3))


def make_double_pendulum(**kwargs: Any) -> gym.Env:
    """The positions, without velocities and forces: `--env-id InvertedDoublePendulum-v5 --observe 0,1,2,3,4`."""
    from gymnasium.envs.mujoco.inverted_double_pendulum_v5 import InvertedDoublePendulumEnv  # needs mujoco

    return show(InvertedDoublePendulumEnv(**kwargs), slice(0, 5))


gym.register("PendulumVelocity-v1", entry_point=make_pendulum, max_episode_steps=200)
gym.register("DoublePendulumPositions-v1", entry_point=make_double_pendulum, max_episode_steps=1000)
