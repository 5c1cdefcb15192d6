"""A PettingZoo game that runs by a plan, so that a test can tell what was made of each step of it."""

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from pettingzoo import ParallelEnv

Spaces = dict[str, tuple[Space, Space]]
Plan = list[dict[str, dict[str, Any]]]

DUEL: Spaces = {agent: (Box(-np.inf, np.inf, (4,)), Discrete(3)) for agent in ("red_0", "blue_0")}
SHORT: Plan = [{}, {"red_0": {"reward": 1.0, "end": "termination"}, "blue_0": {"reward": -1.0, "end": "termination"}}]


class Planned(ParallelEnv):
    """Agents of any spaces; `plan` says for each step what befalls which agents, and its last step ends the game for the rest.

    An agent's share of a step may have a `reward`, an `end` ("termination", "truncation", or "vanishing" without a word) and an
    `info`. Box observations are [game, step, number of the agent, a random number], as far as the space goes; others are 1.
    If it `lingers`, who has left is reported on until the game's end, as sloppy games do.
    """

    metadata = {"render_modes": ["rgb_array"], "name": "planned"}

    def __init__(
        self,
        spaces: Spaces,
        plan: Plan,
        first_infos: dict[str, Any] | None = None,
        lingers: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.spaces, self.plan, self.first_infos, self.lingers = spaces, plan, first_infos or {}, lingers
        self.render_mode = render_mode
        self.possible_agents = list(spaces)
        self.agents: list[str] = []
        self.ends: dict[str, str] = {}
        self.game, self.now = -1, 0
        self.seeds: list[int | None] = []
        self.received: list[dict[str, Any]] = []
        self.rng = np.random.default_rng()

    def observation_space(self, agent: str) -> Space:
        """Of the agent."""
        return self.spaces[agent][0]

    def action_space(self, agent: str) -> Space:
        """Of the agent."""
        return self.spaces[agent][1]

    def observe(self, agent: str) -> Any:
        """Where the game is."""
        space = self.spaces[agent][0]
        content = [self.game, self.now, self.possible_agents.index(agent), self.rng.random()]
        return np.resize(content, space.shape).astype(space.dtype) if isinstance(space, Box) else 1

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begins the next game; a seed begins the first one."""
        if seed is not None:
            self.rng, self.game = np.random.default_rng(seed), -1
        self.seeds.append(seed)
        self.agents, self.ends, self.now, self.game = self.possible_agents[:], {}, 0, self.game + 1
        return {agent: self.observe(agent) for agent in self.agents}, {
            a: self.first_infos.get(a, {}) for a in self.agents
        }

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Takes the actions of just those that are still there."""
        assert actions.keys() == set(self.agents) - self.ends.keys(), (actions, self.agents)
        assert all(self.action_space(agent).contains(action) for agent, action in actions.items()), actions
        self.received.append(actions)
        happens = self.plan[self.now]
        self.now += 1
        last = "termination" if self.now == len(self.plan) else ""
        ends = {agent: happens.get(agent, {}).get("end", last) for agent in actions}
        self.ends |= {agent: end for agent, end in ends.items() if end}
        told = [agent for agent in self.agents if self.ends.get(agent) != "vanishing"]
        results = (
            {agent: self.observe(agent) for agent in told},
            {agent: happens.get(agent, {}).get("reward", 0.0) for agent in told},
            {agent: self.ends.get(agent) == "termination" for agent in told},
            {agent: self.ends.get(agent) == "truncation" for agent in told},
            {agent: happens.get(agent, {}).get("info", {}) for agent in told},
        )
        self.agents = told if self.lingers else [agent for agent in told if agent not in self.ends]
        return results

    def render(self) -> np.ndarray:
        """A picture that tells the game and the step."""
        assert self.render_mode == "rgb_array"
        assert self.game >= 0
        return np.full((4, 6, 3), 10 * self.game + self.now, np.uint8)


def parallel_env(spaces: Spaces = DUEL, plan: Plan = SHORT, **kwargs: Any) -> ParallelEnv:
    """The game; without arguments a short duel that red wins."""
    return Planned(spaces, plan, **kwargs)
