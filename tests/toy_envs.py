"""Environments whose observations say where they are, so that a test can tell what was stored."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

LENGTH = 5


class Counting(gym.Env):
    """Observes (episode, step), rewards 10 * episode + step; even episodes terminate, odd ones run out."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float64)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self) -> None:
        self.episode, self.step_count = -1, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins the next episode."""
        super().reset(seed=seed)
        self.episode, self.step_count = self.episode + 1, 0
        return np.array([self.episode, 0.0]), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Counts."""
        self.step_count += 1
        ends, terminates = self.step_count == LENGTH, self.episode % 2 == 0
        obs, reward = np.array([self.episode, self.step_count], float), 10.0 * self.episode + self.step_count
        return obs, reward, ends and terminates, ends and not terminates, {}


class TwoActions(Counting):
    """Its actions have two dimensions."""

    action_space = Box(-1.0, 1.0, (2,), np.float32)


class Endless(Counting):
    """Goes on until its time limit."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Counts."""
        self.step_count += 1
        return np.array([self.episode, self.step_count], float), 1.0, False, False, {}


class Nested(gym.Env):
    """Dict observations, and actions of two dimensions whose bounds are not those of the policy."""

    observation_space = Dict({"position": Box(-1.0, 1.0, (2, 2), np.float32), "mode": Discrete(3)})
    action_space = Box(np.array([[-3.0, 0.0]], np.float32), np.array([[1.0, 10.0]], np.float32))
    seen: list[np.ndarray] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """A random observation."""
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Remembers the action."""
        assert self.action_space.contains(action)
        self.seen.append(action)
        return self.observation_space.sample(), 0.0, bool(self.np_random.random() < 0.1), False, {}


class Unbounded(Counting):
    """Its actions have no bounds."""

    action_space = Box(-np.inf, np.inf, (1,), np.float32)


class Huge(Counting):
    """Its action bounds are finite, and their difference is not."""

    action_space = Box(np.float32(-3e38), np.float32(3e38), (1,), np.float32)


class Drawing(Counting):
    """Draws its observations, and when episodes end, from the random streams that all environments share."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Draws."""
        obs = np.array([np.random.random(), torch.rand(()).item()])
        return obs, 1.0, np.random.random() < 0.2, False, {}


class Reusing(Counting):
    """Writes all observations into one array, as some tasks do; episodes have 2 to 5 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.state = np.zeros(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins the next episode."""
        self.state[:], _ = super().reset(seed=seed)
        self.length = self.np_random.integers(2, 6)
        return self.state, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Counts."""
        self.state[1] += 1.0
        return self.state, 1.0, False, bool(self.state[1] == self.length), {}


class Forever(Counting):
    """Has episodes without an end and without a time limit, and says when one begins."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins an episode."""
        print("an episode begins", flush=True)
        return super().reset(seed=seed, options=options)

    step = Endless.step


def refuse(error: type[BaseException]) -> gym.Env:
    """An environment's constructor that raises an exception."""
    raise error("no such file: terrain.xml")


def make_vector(mode: AutoresetMode | None, num_envs: int, task: type[gym.Env] = Counting) -> VectorEnv:
    """A vector environment as a task with its own `vector_entry_point` would bring it; None: of no known mode."""
    envs = SyncVectorEnv([task] * num_envs, autoreset_mode=mode or AutoresetMode.SAME_STEP)
    if mode is None:
        envs.metadata = {}
    return envs


gym.register("Counting-v0", entry_point="toy_envs:Counting")
gym.register("Endless-v0", entry_point="toy_envs:Endless", max_episode_steps=20)
gym.register("Nested-v0", entry_point="toy_envs:Nested", max_episode_steps=20)
gym.register("Unbounded-v0", entry_point="toy_envs:Unbounded")
gym.register("Huge-v0", entry_point="toy_envs:Huge")
gym.register("Drawing-v0", entry_point="toy_envs:Drawing")
gym.register("Reusing-v0", entry_point="toy_envs:Reusing")
gym.register("Forever-v0", entry_point="toy_envs:Forever")
for error in (ValueError, FileNotFoundError, AttributeError, SystemExit, BaseException):
    gym.register(f"{error.__name__}-v0", entry_point=partial(refuse, error))
for autoreset_mode in AutoresetMode:
    creator = partial(make_vector, autoreset_mode)  # takes num_envs, as `gym.make_vec` passes it
    gym.register(f"Counting{autoreset_mode.value}-v0", vector_entry_point=creator)
gym.register("CountingUnknown-v0", vector_entry_point=partial(make_vector, None))


FAULTS = {"step": ZeroDivisionError, "exit": SystemExit, "panic": BaseException}  # raised inside `step`


class Faulty(gym.Env):
    """Random observations; environment number `victim`, counted since `made = 0`, does `fault` after 20 steps."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float32)
    action_space = Box(-1.0, 1.0, (1,), np.float32)
    made, victim, fault = 0, -1, ""

    def __init__(self) -> None:
        self.index, self.step_count = Faulty.made, 0
        Faulty.made += 1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """A random observation; an episode takes ten steps."""
        super().reset(seed=seed)
        if self.fault == "reset" and self.index == self.victim and self.step_count >= 20:
            raise ZeroDivisionError("out of order")
        return self.np_random.normal(size=3).astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Breaks down, if it is to."""
        self.step_count += 1
        is_broken = self.index == self.victim and self.step_count > 20
        if is_broken and self.fault in FAULTS:
            raise FAULTS[self.fault]("out of order")
        obs, reward = self.np_random.normal(size=3).astype(np.float32), float(action[0])
        if is_broken and self.fault == "observation":
            obs[1] = np.nan
        return obs, -np.inf if is_broken and self.fault == "reward" else reward, self.step_count % 10 == 0, False, {}


class Broken(Faulty):
    """Raises in its step 21."""

    victim, fault = 0, "step"


gym.register("Faulty-v0", entry_point="toy_envs:Faulty")
gym.register("Broken-v0", entry_point="toy_envs:Broken")
