"""A PettingZoo game of two, five steps long, of which one copy does `fault` after 20 steps.

It is copy `victim`, counted from the last `made = 0`.
"""

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Space
from pettingzoo import ParallelEnv

made, victim, fault = 0, -1, ""


class FaultyGame(ParallelEnv):
    """Whoever chooses the larger number wins."""

    metadata = {"render_modes": [], "name": "faulty"}
    possible_agents = ["player_0", "player_1"]

    def __init__(self) -> None:
        global made
        self.index, self.step_count, made = made, 0, made + 1
        self.agents: list[str] = []
        self.rng = np.random.default_rng()

    def observation_space(self, agent: str) -> Space:
        """The same for both."""
        return Box(-np.inf, np.inf, (3,))

    def action_space(self, agent: str) -> Space:
        """The same for both."""
        return Box(-1.0, 1.0, (1,))

    def observe(self) -> dict[str, np.ndarray]:
        """Random numbers."""
        return {agent: self.rng.normal(size=3).astype(np.float32) for agent in self.possible_agents}

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The next game."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        if fault == "reset" and self.index == victim and self.step_count >= 20:
            raise ZeroDivisionError("out of order")
        self.agents = self.possible_agents[:]
        return self.observe(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Breaks down, if it is to."""
        self.step_count += 1
        is_broken = self.index == victim and self.step_count > 20
        if is_broken and fault in ("step", "exit"):
            raise {"step": ZeroDivisionError, "exit": SystemExit}[fault]("out of order")
        obs, lead = self.observe(), float(actions["player_0"][0] - actions["player_1"][0])
        rewards = {"player_0": lead, "player_1": -lead}
        whose, _, what = fault.rpartition(" ")
        for agent in self.possible_agents if is_broken else ():
            if whose == "opponent's" and agent == "player_0":
                continue
            if what == "observation":
                obs[agent] = np.full(3, 1e300 if whose == "huge" else np.inf)
            if what == "reward":
                rewards[agent] = 1e300 if whose == "huge" else np.nan
        ends = dict.fromkeys(self.agents, self.step_count % 5 == 0)
        infos: dict[str, Any] = {agent: {} for agent in self.agents}
        if self.step_count % 5 == 0:
            self.agents = []
        return obs, rewards, ends, dict.fromkeys(ends, False), infos


def parallel_env() -> FaultyGame:
    """One game."""
    return FaultyGame()
