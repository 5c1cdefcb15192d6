"""PettingZoo games of one step: who guesses best. Sides of several behaviours, and games of three roles."""

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from pettingzoo import ParallelEnv

SOCCER = ["Striker?team=0", "Striker?team=0_2", "Goalie?team=0", "Striker?team=1", "Striker?team=1_2", "Goalie?team=1"]


class Guessing(ParallelEnv):
    """Each agent sees its target, a number in [-1, 1], and is to do it: a striker that number, a goalie its sign.

    An agent's reward is 1 minus its error. So the side wins whose agents together are nearest to their targets.
    """

    metadata = {"render_modes": ["rgb_array"], "name": "guessing", "render_fps": 5}

    def __init__(self, agents: list[str], render_mode: str | None = None) -> None:
        self.possible_agents, self.render_mode = list(agents), render_mode
        self.agents: list[str] = []
        self.rng = np.random.default_rng()

    def is_goalie(self, agent: str) -> bool:
        """Goalies have other spaces."""
        return agent.startswith("Goalie")

    def observation_space(self, agent: str) -> Space:
        """A target; goalies see another number besides."""
        return Box(-1.0, 1.0, (2 if self.is_goalie(agent) else 1,))

    def action_space(self, agent: str) -> Space:
        """Strikers take a number, and goalies a choice of two."""
        return Discrete(2) if self.is_goalie(agent) else Box(-1.0, 1.0, (1,))

    def observe(self) -> dict[str, np.ndarray]:
        """The targets."""
        numbers = {agent: np.array([self.targets[agent], 0.5], np.float32) for agent in self.possible_agents}
        return {agent: pair if self.is_goalie(agent) else pair[:1] for agent, pair in numbers.items()}

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begins a game."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents = self.possible_agents[:]
        self.targets = {agent: float(self.rng.uniform(-1.0, 1.0)) for agent in self.agents}
        return self.observe(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Ends the game."""
        done = {a: 2.0 * x - 1.0 if self.is_goalie(a) else float(x[0]) for a, x in actions.items()}
        aims = {a: np.sign(x) if self.is_goalie(a) else x for a, x in self.targets.items()}
        rewards = {a: 1.0 - abs(done[a] - aims[a]) for a in self.agents}
        self.agents = []
        return self.observe(), rewards, dict.fromkeys(done, True), dict.fromkeys(done, False), {a: {} for a in done}

    def render(self) -> np.ndarray:
        """A picture."""
        return np.zeros((16, 16, 3), np.uint8)


def parallel_env(agents: list[str] | None = None, **kwargs: Any) -> ParallelEnv:
    """Two strikers and a goalie on either side, or other agents."""
    return Guessing(SOCCER if agents is None else agents, **kwargs)
