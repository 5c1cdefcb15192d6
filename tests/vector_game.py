"""A user's own vectorised game: whoever bids more in three rounds wins. `fault` names what is wrong with it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from utils.team_env import Team, TeamStep


class Auction:
    """A `TeamEnv` that takes nothing from the project but `Team` and `TeamStep`. Observation: [round, own total]."""

    render_fps = 4

    def __init__(self, num_games: int, rounds: int = 3, fault: str = "") -> None:
        if fault == "exit":
            raise SystemExit("no display")
        self.num_games, self.rounds, self.fault = num_games + (fault == "num_games"), rounds, fault
        self.teams: Any = tuple(Team(name, "bidder", (f"{name}_0",), 2, 1, ()) for name in ("east", "west"))
        if fault == "teams":
            self.teams = ["east", "west"]
        east, west = self.teams
        if fault == "one name":
            self.teams = east, east
        if fault == "one side":
            self.teams = replace(east, side="both"), replace(west, side="both")
        if fault == "no agents":
            self.teams = east, replace(west, agents=())
        for name, value in {"action_dim": 0, "obs_dim": 2.0}.items():
            if fault == name:
                self.teams = east, replace(west, **{name: value})
        if fault == "max_steps":
            self.max_steps = "100"
        if fault == "branches":
            self.teams = east, replace(west, branches=(3, 3))
        self.scripted_by_team: Any = (("random", "high"),) * 2 if fault != "scripted" else ((), ())
        if fault == "a string":
            self.scripted_by_team = "random", "random"
        if fault == "players":
            self.scripted_by_team = ("random", "high"), ("random",)
        self.alive = [np.ones((num_games, 1), dtype=bool)] * 2
        self.action_masks: list[np.ndarray | None] = [None] * (1 if fault == "masks" else 2)
        if fault == "alive":
            self.alive = self.alive[:1]
        if fault == "nobody":
            self.alive = [np.zeros((num_games, 1), dtype=bool)] * 2
        if fault == "no masks":
            self.action_masks = None  # type: ignore[assignment]
        if "restart" in fault:
            self.restart = self.broken_restart
        if fault == "final masks":
            self.final_masks = [np.ones((num_games, 7), dtype=bool)] * 2
        if fault == "mask shape":
            self.action_masks[1] = np.ones((num_games, 1, 7), dtype=bool)

    def observe(self) -> list[np.ndarray]:
        """(num_games, 1, 2) for each team."""
        obs = np.stack([np.broadcast_to(self.round, self.totals.T.shape), self.totals.T], axis=-1).astype(np.float32)
        return [team_obs[:, None] for team_obs in obs]

    def reset(self, seed: int) -> list[np.ndarray]:
        """Begins all games."""
        if self.fault == "reset":
            raise KeyError("nothing there")
        self.games, self.rng = 0, np.random.default_rng(seed)
        self.round, self.totals = np.zeros(self.num_games), np.zeros((self.num_games, 2))
        obs = self.observe()
        return [obs[0][..., :1], obs[1]] if self.fault == "obs" else obs

    def broken_restart(self, games: np.ndarray) -> list[np.ndarray]:
        """Begins no game."""
        if self.games > 0:
            raise SystemExit(1)
        return self.observe()[: 2 if self.fault == "late restart" else 1]

    def step(self, actions: list[np.ndarray]) -> TeamStep:
        """Takes the bids."""
        if self.fault == "step exit":
            raise SystemExit(0)
        if self.fault == "late exit" and self.games > 0:
            raise SystemExit(0)
        self.round, self.totals = self.round + 1, self.totals + np.concatenate(actions, axis=1)[..., 0]
        final_obs, over = self.observe(), self.round >= self.rounds
        scores = np.where(over[:, None], self.totals, 0.0)
        if self.fault == "late nan" and self.games > 0:
            scores[0] = np.nan
        self.games += int(over[0])
        if self.fault == "scores":
            scores = scores[:, 0]
        lead = np.sign(scores[..., :1] - scores[..., 1:]) if scores.ndim == 2 else np.zeros((self.num_games, 1))
        rewards = [(sign * lead).astype(np.float32) for sign in (1, -1)]
        self.round, self.totals = np.where(over, 0, self.round), np.where(over[:, None], 0.0, self.totals)
        ends, stops = [over[:, None] & (self.fault != "no end")] * 2, [np.zeros((self.num_games, 1), dtype=bool)] * 2
        step = TeamStep(self.observe(), final_obs, rewards, ends, stops, over, scores)
        if self.games > 0:  # NumPy would stretch these arrays, or take the integers for places
            changes: Any = {
                "late obs": {"final_obs": [obs[..., :1] for obs in final_obs]},
                "late rewards": {"rewards": [reward[:1] for reward in rewards]},
                "late scores": {"scores": scores[:, :1]},
                "late type": {"terminations": [end.astype(int) for end in ends]},
            }
            step = step._replace(**changes.get(self.fault, {}))
            if self.fault == "late alive":
                self.alive = [alive.astype(int) for alive in self.alive]
            if self.fault == "late silent" and self.round[0] == 1:
                self.alive = [np.zeros((self.num_games, 1), dtype=bool), np.ones((self.num_games, 1), dtype=bool)]
            if self.fault == "late stays" and self.round[0] == 1:
                step = step._replace(truncations=[np.ones((self.num_games, 1), dtype=bool)] * 2)
            if self.fault == "late nobody":
                self.alive = [np.zeros((self.num_games, 1), dtype=bool)] * 2
        return SimpleNamespace(**step._asdict()) if self.fault == "step type" else step  # type: ignore[return-value]

    def scripted_actions(self, name: str, team: int) -> np.ndarray:
        """Random bids, or the highest."""
        bids = self.rng.uniform(-1, 1, (self.num_games, 1, 1)) if name == "random" else np.ones((self.num_games, 1, 1))
        if name == "high" and self.fault == "nan":
            bids[0] = np.nan
        return bids[0] if self.fault == "actions" else bids.astype(np.float32)

    def render(self) -> Any:
        """One grey that tells the round."""
        dtype = float if self.fault == "floats" else np.uint8
        return None if self.fault == "render" else np.full((4, 6, 3), 10 * self.round[0], dtype)

    def close(self) -> None:
        """Nothing is open."""
        if self.fault == "close":
            raise OSError("stuck")


class Fallen:
    """Two teams of two. The second agents die in step 1. The result of step 5 is paid to the living, or to all."""

    def __init__(self, num_games: int, pays_all: bool = True) -> None:
        self.num_games, self.pays_all, self.action_masks = num_games, pays_all, [None, None]
        self.teams = tuple(Team(name, "x", (f"{name}_0", f"{name}_1"), 1, 1, (2,)) for name in ("red", "blue"))
        self.scripted_by_team = (("random",),) * 2
        self.reset(0)

    def reset(self, seed: int) -> list[np.ndarray]:
        """All live."""
        self.rng, self.round = np.random.default_rng(seed), 0
        self.alive = [np.ones((self.num_games, 2), dtype=bool) for _ in range(2)]
        return [np.zeros((self.num_games, 2, 1), dtype=np.float32) for _ in range(2)]

    def step(self, actions: list[np.ndarray]) -> TeamStep:
        """The result is random."""
        self.round += 1
        is_over, was_alive = self.round == 5, self.alive[0]
        scores = np.outer(self.rng.choice([-1.0, 1.0], self.num_games), [1.0, -1.0]) * is_over
        rewards = [np.repeat(scores[:, [t]], 2, axis=1).astype(np.float32) for t in range(2)]
        rewards = [reward * (was_alive | self.pays_all) for reward in rewards]
        ends = was_alive & np.array([is_over, self.round == 1])
        self.alive = [np.ones_like(was_alive) if is_over else was_alive & ~ends] * 2
        self.round %= 5
        obs = [np.full((self.num_games, 2, 1), self.round, dtype=np.float32)] * 2
        never = np.zeros_like(ends)
        return TeamStep(obs, obs, rewards, [ends] * 2, [never] * 2, np.full(self.num_games, is_over), scores)

    def scripted_actions(self, name: str, team: int) -> np.ndarray:
        """Random choices."""
        return self.rng.integers(2, size=(self.num_games, 2, 1))

    def render(self) -> Any:
        """Black."""
        return np.zeros((4, 4, 3), dtype=np.uint8)

    def close(self) -> None:
        """Nothing is open."""


class Waiting(Auction):
    """The same with two choices, of which west has none in the first round: a mask that the protocol does not allow."""

    def __init__(self, num_games: int) -> None:
        super().__init__(num_games)
        self.teams = tuple(replace(team, branches=(2,)) for team in self.teams)
        self.action_masks = [np.ones((num_games, 1, 2), dtype=bool) for _ in range(2)]

    def observe(self) -> list[np.ndarray]:
        """Changes the masks, too."""
        self.action_masks[1] = np.repeat((self.round > 0)[:, None, None], 2, axis=2)
        return super().observe()

    def scripted_actions(self, name: str, team: int) -> np.ndarray:
        """The second choice."""
        return np.ones((self.num_games, 1, 1), dtype=np.int64)


class Choosing(Waiting):
    """The same with legal masks, and with a player who chooses what `choice` says, or what is illegal."""

    def __init__(self, num_games: int, choice: float = 1, is_legal: bool = True) -> None:
        self.choice = choice
        super().__init__(num_games)
        self.action_masks[0] = np.repeat([[[True, is_legal]]], num_games, axis=0)

    def observe(self) -> list[np.ndarray]:
        """All masks stay."""
        return Auction.observe(self)

    def scripted_actions(self, name: str, team: int) -> np.ndarray:
        """Of both players."""
        return np.full((self.num_games, 1, 1), self.choice)


def make(num_games: int) -> Auction:
    """A function serves as well as a class."""
    return Auction(num_games, rounds=1)


def not_a_game(num_games: int) -> object:
    """Has no member of the protocol."""
    return object()
