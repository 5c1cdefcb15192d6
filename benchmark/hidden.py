"""Tasks with a hidden part, for scripts without `--observe`: `--env-id benchmark.hidden:PendulumVelocity-v1`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import PendulumEnv
from gymnasium.envs.mujoco.inverted_double_pendulum_v5 import InvertedDoublePendulumEnv


def show(part: slice, make_env: Callable[..., gym.Env], **kwargs: Any) -> gym.Env:
    """A task that shows a part of its observations, which are vectors, and hides the rest."""
    env = make_env(**kwargs)
    space = env.observation_space
    assert isinstance(space, gym.spaces.Box)
    shown_space = gym.spaces.Box(space.low[part], space.high[part], dtype=space.dtype.type)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[part], shown_space)


# without the angle: `--env-id Pendulum-v1 --observe 2`
velocity = partial(show, slice(2, 3), PendulumEnv)
# without velocities and forces: `--env-id InvertedDoublePendulum-v5 --observe 0,1,2,3,4`
positions = partial(show, slice(0, 5), InvertedDoublePendulumEnv)
gym.register("PendulumVelocity-v1", entry_point=velocity, max_episode_steps=200)
gym.register("DoublePendulumPositions-v1", entry_point=positions, max_episode_steps=1000)
