"""Who plays whom in many parallel games: the learner's team, the snapshots on the other teams, and their ratings."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from utils.elo import elo_change, game_scores
from utils.policy_stack import PolicyStack
from utils.snapshot_pool import Snapshot, SnapshotPool
from utils.team_env import Team, TeamEnv, legal_actions


def swap_steps_of(teams: Sequence[Team], team_change: int, swaps_per_turn: float) -> int:
    """Steps of the ghosts between two swaps that make `swaps_per_turn` of them in a turn of `team_change` learner's steps.

    ML-Agents' rule: (ghosts / learners) * team_change / swaps, with the first team learning.
    """
    learners = len(teams[0].agents)
    ghosts = sum(len(team.agents) for team in teams) - learners
    return max(1, round(ghosts / learners * team_change / swaps_per_turn))


class Matches:
    """Who plays whom in each of many parallel games: the learner's team, and the snapshots on the other teams.

    One behaviour learns at a time. Where several teams share it (a symmetric game) the learner changes sides after each game.
    """

    def __init__(
        self,
        teams: Sequence[Team],
        num_games: int,
        pools: Mapping[str, SnapshotPool],
        elo_k: float = 16.0,
        swap_steps: int = 0,
        side: str | None = None,
    ) -> None:
        """Takes the game's teams, a pool that is not empty for each behaviour, and the rules of ratings and swaps.

        swap_steps are the steps of ghost agents, over all games, after which a game draws new opponents when it begins anew.
        side is the name of the only team that the learner plays on; None is all teams in turn.
        """
        self.behaviors = [team.behavior for team in teams]
        self.team_names = [team.name for team in teams]
        self.pools, self.elo_k, self.swap_steps, self.side = pools, elo_k, swap_steps, side
        self.sizes = np.array([len(team.agents) for team in teams])
        self.opponents: list[list[Snapshot | None]] = [[None] * len(teams) for _ in range(num_games)]
        self.uids = np.zeros((num_games, len(teams)), dtype=np.int64)  # of the opponents; -1 on the learner's team
        self.learner_team = np.zeros(num_games, dtype=np.int64)
        self.ghost_steps, self.drawn_at = 0, np.zeros(num_games, dtype=np.int64)
        self.finished: list[tuple[float, float, int]] = []
        self.stacks: dict[str, tuple[list[int], PolicyStack]] = {}
        self.has_warned = False
        self.give_turn(self.behaviors[0])

    def give_turn(self, behavior: str) -> None:
        """Makes this behaviour the learner, with the rating of its newest snapshot, and draws opponents for all games anew."""
        self.learner = behavior
        self.rating = self.pools[behavior].latest.rating
        names = zip(self.behaviors, self.team_names, strict=True)
        sides = [t for t, (b, name) in enumerate(names) if b == behavior and self.side in (None, name)]
        self.sides = sides or [t for t, b in enumerate(self.behaviors) if b == behavior]  # a role without that side
        self.begin_anew()

    def begin_anew(self, seed: int | None = None) -> None:
        """Begins all games with new opponents, and with a seed the random stream of all pools that they are drawn by."""
        if seed is not None:
            rng = np.random.default_rng(seed)
            for pool in self.pools.values():
                pool.rng = rng
        for game in range(len(self.opponents)):
            self.learner_team[game] = self.sides[game % len(self.sides)]
            self._draw(game)

    def state_dict(self) -> dict[str, Any]:
        """What outlasts the games: whose turn it is, the learner's rating, the ghosts' steps."""
        return {
            "learner": self.learner,
            "rating": self.rating,
            "ghost_steps": self.ghost_steps,
            "has_warned": self.has_warned,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up this state, with the pools as they are now and all games begun anew."""
        self.give_turn(state["learner"])
        self.rating, self.ghost_steps, self.has_warned = state["rating"], state["ghost_steps"], state["has_warned"]
        self.begin_anew()

    def _draw(self, game: int) -> None:
        for team, behavior in enumerate(self.behaviors):
            opponent = None if team == self.learner_team[game] else self.pools[behavior].draw()
            self.opponents[game][team] = opponent
            self.uids[game, team] = -1 if opponent is None else opponent.uid
        self.drawn_at[game] = self.ghost_steps

    def next_game(self, game: int) -> None:
        """The game begins anew: the learner changes sides, and new opponents come if the old ones have played long enough."""
        team = self.learner_team[game]
        next_team = self.sides[(self.sides.index(team) + 1) % len(self.sides)]
        self.learner_team[game] = next_team
        if self.ghost_steps - self.drawn_at[game] >= self.swap_steps:
            self._draw(game)
        else:  # the teams share a behaviour, so whoever sat on the learner's new team takes its old one
            for seats in (self.opponents[game], self.uids[game]):
                seats[team], seats[next_team] = seats[next_team], seats[team]

    def finish(self, game: int, scores: np.ndarray) -> None:
        """Rates a game that is over by the teams' scores (num_teams,), then begins it anew.

        Each opponent's result is an Elo game of its own against the learner's rating before the game; with more than two
        teams the changes are divided by the number of opponents. What one gains the other loses.
        """
        results = game_scores(scores)[self.learner_team[game]]
        rating = self.rating
        for team, opponent in enumerate(self.opponents[game]):
            if opponent is not None:
                result, age = float(results[team]), self.pools[self.behaviors[team]].latest.step - opponent.step
                change = elo_change(rating, opponent.rating, result, self.elo_k) / (len(self.behaviors) - 1)
                self.finished.append((result, opponent.rating, age))
                self.rating += change
                opponent.rating -= change
                opponent.games += 1
                opponent.results.append(result)
        self.next_game(game)

    def of_learner(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The learner's rows (num_games * team_size, ...) of arrays (num_games, team_size, ...), one a team."""
        sides = np.stack([arrays[t] for t in self.sides], axis=1)  # (num_games, num_sides, team_size, ...)
        own = sides[np.arange(len(sides)), np.searchsorted(self.sides, self.learner_team)]
        return own.reshape(own.shape[0] * own.shape[1], *own.shape[2:])

    @property
    def num_ghosts(self) -> int:
        """Agents of opponents in all games together."""
        return int(((self.uids >= 0) * self.sizes).sum())

    def opponent_steps(self) -> np.ndarray:
        """When the oldest opponent of each game was taken, in steps of its learner: (num_games,)."""
        return np.array([min(s.step for s in seats if s is not None) for seats in self.opponents])

    def all_actions(
        self, env: TeamEnv, agents: Mapping[str, Any], obs: Sequence[np.ndarray], learner_actions: np.ndarray
    ) -> list[np.ndarray]:
        """Actions of all teams, as the games take them: the learner's (num_games * team_size, action_dim), and the ghosts'.

        All snapshots of a behaviour act in one batched forward pass. Counts the steps of the ghost agents.
        """
        actions: list[np.ndarray] = [np.empty(0)] * len(env.teams)
        for behavior, agent in agents.items():
            teams = [t for t, b in enumerate(self.behaviors) if b == behavior]
            sides = np.stack([obs[t] for t in teams], axis=1)  # (num_games, num_sides, team_size, obs_dim)
            team, uids = env.teams[teams[0]], self.uids[:, teams]
            chosen = np.zeros((*sides.shape[:3], team.action_dim), dtype=np.int64 if team.branches else np.float32)
            ghosts = uids >= 0
            if ghosts.any():
                in_play, policy = np.unique(uids[ghosts], return_inverse=True)
                masks = np.stack([legal_actions(env, t) for t in teams], axis=1)[ghosts]
                policy, rows = policy.repeat(sides.shape[2]), sides[ghosts].reshape(-1, team.obs_dim)
                masks, noise = masks.reshape(len(rows), -1), agent.noise(len(rows))
                ghost_actions = self._stack(behavior, agent, in_play.tolist()).act(policy, rows, masks, noise)
                chosen[ghosts] = ghost_actions.reshape(-1, *chosen.shape[2:])
                self.ghost_steps += int(np.stack([env.alive[t] for t in teams], axis=1)[ghosts].sum())
            if behavior == self.learner:
                chosen[~ghosts] = learner_actions.reshape(-1, *chosen.shape[2:])
            for k, t in enumerate(teams):
                actions[t] = chosen[:, k]
        return actions

    def _stack(self, behavior: str, agent: Any, uids: list[int]) -> PolicyStack:
        """The snapshots of these uids as a stack, kept until others play."""
        if behavior not in self.stacks or self.stacks[behavior][0] != uids:
            by_uid = {s.uid: s.weights for seats in self.opponents for s in seats if s is not None}
            self.stacks[behavior] = uids, PolicyStack(agent, [by_uid[uid] for uid in uids])
        return self.stacks[behavior][1]

    def warn_of_short_swaps(self, game_length: float) -> None:
        """Says once that opponents cannot change as often as swap_steps asks for, if games of this many steps are longer."""
        if not self.has_warned and 0 < self.swap_steps < self.num_ghosts * game_length:
            self.has_warned = True
            steps = f"--swap-steps of {self.swap_steps:,} steps of opponents' agents"
            game = f"{self.num_ghosts:,} such agents in games of {game_length:.0f} steps"
            print(
                f"warning: {steps} are shorter than one game ({game}): opponents change with every game",
                file=sys.stderr,
            )

    def rating_of(self, behavior: str) -> float:
        """The learner's rating, or that of the newest snapshot of a behaviour at rest."""
        return self.rating if behavior == self.learner else self.pools[behavior].latest.rating

    def metrics(self) -> dict[str, float]:
        """What is logged: ratings now, and the opponents and results of the games since the last call."""
        metrics = {f"selfplay/rating_{behavior}": self.rating_of(behavior) for behavior in self.pools}
        if self.finished:
            results, ratings, ages = np.array(self.finished).T
            metrics["selfplay/win_rate"] = float(results.mean())
            metrics["selfplay/opponent_rating_mean"] = float(ratings.mean())
            metrics["selfplay/opponent_rating_std"] = float(ratings.std())
            metrics["selfplay/opponent_age"] = float(ages.mean())
            metrics["selfplay/games"] = float(len(results))
        self.finished = []
        return metrics
