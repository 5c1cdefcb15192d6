"""Who plays whom in many parallel games: the learner's team, its opponents, and their ratings.

The vocabulary is that of ML-Agents' ghost trainer (https://unity-technologies.github.io/ml-agents/ML-Agents-Overview/,
"Training in competitive multi-agent environments with self-play"): the learner plays *ghosts*, which are snapshots of
policies. Each parallel game has its own opponents here, which it keeps until it ends, and a result is credited to the
snapshots that played the game, even if they have left the pool since. `docs/selfplay.md` lists what else differs.

Scripted players, and the learner itself as it is now, may be among the opponents (`Matches.mix_in`).
"""

import json
import math
import os
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, TypeVar

import numpy as np

from utils.cross_play import scripted_by_behavior
from utils.elo import elo_change, game_scores
from utils.policy_stack import PolicyStack
from utils.run import Limits, check_limits, check_types, fail, parse_json, warn
from utils.snapshot_pool import Snapshot, SnapshotPool, draw_stream
from utils.team_env import MAX_STEPS, Team, TeamEnv, TeamStep, allies_of, legal_actions, sides_of

ArgsT = TypeVar("ArgsT", bound=Any)
Observations = list[np.ndarray]
CURRENT = Snapshot({}, step=0, rating=0.0, name="current")  # a behaviour as it is now: an ally, or the learner itself


def check_games(args: Any, make_env: Callable[..., TeamEnv]) -> None:
    """Checks the arguments that both self-play scripts have, and that the game can be rendered if videos are asked for.

    Makes the paths in --opponents absolute, because a resumed run may stand in another folder. `make_env` is the
    script's. Exits with one sentence.
    """
    if args.evaluate is None and (flags := [x for x in ("against", "play", "exploitability") if getattr(args, x)]):
        fail(f"--{flags[0]} also needs --evaluate RUN_FOLDER, the run whose policies play")
    if args.opponents is not None and not args.opponents:
        fail("--opponents takes one run folder or more")
    if args.against and args.exploitability:
        fail("--against and --exploitability exclude each other: give one of the two")
    if args.swap_steps and args.swaps_per_turn is not None:
        fail("--swaps-per-turn takes the place of --swap-steps: give one of the two")
    if args.scripted_share + args.current_share > 1.0:
        fail("--scripted-share and --current-share take at most 1 together, and the rest is for the pool")
    if args.opponents is not None:
        args.opponents = [os.path.abspath(folder) for folder in args.opponents]
    if args.evaluate is None and args.capture_video:
        make_env(args, 1, render=True).close()  # fails now, and not at the end of the run


def behavior_args(args: ArgsT, teams: Sequence[Team], names: str, limits: Limits) -> dict[str, ArgsT]:
    """The arguments of each behaviour: those of the run, with the changes of --behaviors.

    `names` are the arguments that may change, separated by spaces. Exits with one sentence for anything else.
    """
    behaviors = dict.fromkeys(team.behavior for team in teams)
    changes = parse_json("behaviors", args.behaviors, '{"evader": {"gamma": 0.9}}')
    if unknown := changes.keys() - behaviors:
        fail(f"--behaviors takes changes for {', '.join(behaviors)}, not for {', '.join(sorted(unknown))}")
    found: dict[str, ArgsT] = {}
    for behavior in behaviors:
        own = changes.get(behavior, {})
        if not isinstance(own, dict) or own.keys() - set(names.split()):
            fail(f"--behaviors takes a JSON object with these names for {behavior}: {names}; not {json.dumps(own)}")
        found[behavior] = replace(args, **own)
        try:
            check_types(found[behavior], own)
            check_limits(found[behavior], limits)
        except ValueError as error:
            fail(f"--behaviors for {behavior}: {error}")
    if len({own.team_change is None for own in found.values()}) > 1:
        fail("--behaviors takes a team_change for all behaviours or for none, unless --team-change is given")
    return found


def turn_ends(
    teams: Sequence[Team], team_change: Mapping[str, int | None], total_steps: int, stride: int = 1
) -> list[int]:
    """The game steps at which the turns of a run end, in whole cycles: each behaviour learns once in a cycle.

    A behaviour's turn has `team_change` learner steps, scaled so that the cycles fill the run; None: ten cycles of
    equal turns. A learner step is one agent's, so the turn of a larger team takes fewer game steps. If all teams share
    one behaviour, it is one turn. A turn has `stride` game steps or more, those of an iteration: there are fewer cycles
    if the run is short. Warns if it is too short for one cycle.
    """
    sizes = {team.behavior: len(team.agents) for team in teams}
    if len(sizes) == 1:
        return [total_steps]
    lengths = np.array([(team_change[behavior] or 1) / size for behavior, size in sizes.items()])  # in game steps
    cycles = 10 if None in team_change.values() else max(1, round(total_steps / lengths.sum()))
    most = int(total_steps * lengths.min() / lengths.sum() / stride + 1e-9)
    if most < 1:
        warn(f"--total-timesteps {total_steps:,} is too small for one turn of each behaviour: {', '.join(sizes)}")
    cycles, shares = max(1, min(cycles, most)), np.cumsum(lengths) / lengths.sum()
    ends = [total_steps * (cycle + share) / cycles for cycle in range(cycles) for share in shares]
    return [math.ceil(end - 1e-6) for end in ends]  # rounded up: a turn of `stride` steps then has an iteration


class Matches:
    """The players of each of many parallel games: the learner on one team, a snapshot on each opposing team.

    One behaviour learns at a time. If several teams share it (a symmetric game), the learner changes sides after each
    game. For other teams of the learner's side their behaviours act as they are now, and do not learn.
    """

    def __init__(
        self,
        teams: Sequence[Team],
        num_games: int,
        pools: Mapping[str, SnapshotPool],
        change_at: Sequence[int] = (0,),
        elo_k: float = 16.0,
        swap_steps: int = 0,
        learner_side: str | None = None,
        swaps_per_turn: float | None = None,
        turn_steps: Mapping[str, int] | None = None,
        game_length: float | None = None,
        rivals: Mapping[str, SnapshotPool] | None = None,
    ) -> None:
        """Starts with the first team's behaviour as the learner.

        `pools` has a pool for each behaviour, with at least one snapshot. Opponents are drawn from them, or from
        `rivals`, which are pools that nothing is added to. `change_at` are the game steps at which turns end
        (`turn_ends`). `elo_k` is the largest change of a rating in one game. A game keeps its opponents until ghost
        agents, over all games, have taken `swap_steps` steps; 0 draws new ones for each game. `learner_side` is the
        team that the learner always plays on; None: it changes sides.

        With `swaps_per_turn`, each turn of a behaviour's `turn_steps` learner steps has that many swaps. By ML-Agents'
        rule swap_steps = ghosts / learners * turn_steps / swaps_per_turn, for the sizes of the teams in that turn.

        `game_length` is a first guess of the steps of a game; later it is their running mean. With it, the first games
        after a reset are cut at different steps: otherwise all games would run in lockstep, and the first results would
        be those of short games. None: no game is cut; 0: none before a game has ended.
        """
        self.behaviors = [team.behavior for team in teams]
        self.team_names, self.side_names = [team.name for team in teams], sides_of(teams)
        self.pools, self.rivals = pools, pools if rivals is None else rivals
        self.elo_k, self.swap_steps, self.learner_side = elo_k, swap_steps, learner_side
        self.swaps_per_turn, self.turn_steps, self.change_at = swaps_per_turn, turn_steps or {}, list(change_at)
        self.learner_steps = dict.fromkeys(pools, 0)
        self.game_length = game_length  # running mean of the finished games: each new one counts 1%
        self.ages, self.cut_at = np.zeros((2, num_games), dtype=np.int64)  # steps of the running games; 0: not cut
        self.lengths: list[int] = []  # of the games since the last call of `metrics`
        self.returns: list[float] = []  # of the learner in these games
        self.running_returns = np.zeros(num_games)  # of the learner's team, the mean over its agents
        self.sizes, self.allies = np.array([len(team.agents) for team in teams]), allies_of(teams)
        self.opposes = np.array([[u not in own for u in range(len(teams))] for own in self.allies])
        self.num_opponents = self.opposes.sum(axis=1).tolist()  # of each team
        # Of each game, a player for each team: None is the learner, CURRENT a behaviour as it is now.
        self.opponents: list[list[Snapshot | None]] = [[None] * len(teams) for _ in range(num_games)]
        self.uids = np.zeros((num_games, len(teams)), dtype=np.int64)  # of these players; -1: the learner
        self.learner_team = np.zeros(num_games, dtype=np.int64)
        self.ghost_steps, self.drawn_at = 0, np.zeros(num_games, dtype=np.int64)
        self.finished: list[tuple[float, float, float]] = []  # score, opponent's rating, age (nan: it has none)
        self.stacks: dict[str, tuple[np.ndarray, PolicyStack]] = {}
        self.has_warned, self.steps_without_end = False, 0
        self.some_ended, self.has_warned_of_restarts = True, False  # some_ended: a game, since the last reset
        self.scripted: dict[str, SnapshotPool] = {}
        self.scripted_share = self.current_share = 0.0
        self.learner = self.behaviors[0]
        self.give_turn(self.learner)

    def mix_in(
        self, scripted: Iterable[tuple[str, str]], scripted_share: float, current_share: float, rating: float
    ) -> None:
        """Makes a share of the opponents scripted players, and a share the learner as it is now.

        `scripted` are names and behaviours of scripted players. Those of a behaviour are equally likely, and begin with
        this rating. Games of the learner against itself are not rated. (The latest opponent of ML-Agents is a copy of
        the learner, made at a swap and kept until the next one.)
        """
        self.scripted_share, self.current_share = scripted_share, current_share
        for name, behavior in scripted:
            pool = self.scripted.setdefault(behavior, SnapshotPool(1_000, 0.0, "uniform", self.pools[behavior].rng))
            pool.add({}, sys.maxsize, rating).name = name

    def give_turn(self, behavior: str) -> None:
        """Makes this behaviour the learner, rated as its newest snapshot, and draws new opponents for all games.

        If a behaviour may meet several others, snapshots lose their results: those are against the previous learner.
        """
        if behavior != self.learner and any(len(self.opposing_behaviors(name)) > 1 for name in self.pools):
            for snapshot in (snapshot for pool in self.rivals.values() for snapshot in pool.snapshots):
                snapshot.results.clear()
                snapshot.record()
        self.learner = behavior
        self.rating = self.pools[behavior].latest.rating
        teams = [t for t, b in enumerate(self.behaviors) if b == behavior]
        chosen = [t for t in teams if self.learner_side in (self.team_names[t], self.side_names[t])]
        self.learner_teams = chosen or teams
        if self.swaps_per_turn is not None:
            learners = self.sizes[self.learner_teams[0]]
            ghosts = np.mean([self.sizes[self.opposes[t]].sum() for t in self.learner_teams])
            self.swap_steps = max(1, round(ghosts / learners * self.turn_steps[behavior] / self.swaps_per_turn))
        self.begin_anew()

    def learner_at(self, global_step: int) -> str:
        """The behaviour whose turn it is after this many game steps; the last turn lasts to the end of the run."""
        turn = min(bisect_right(self.change_at, global_step), len(self.change_at) - 1)
        return list(self.pools)[turn % len(self.pools)]

    def begin_anew(self, seed: int | None = None) -> None:
        """Draws new opponents for all games, which `env.reset` restarts. A seed also reseeds the pools."""
        if seed is not None:
            if not self.some_ended and not self.has_warned_of_restarts:
                self.has_warned_of_restarts = True
                restarts = "checkpoints or changes of turn restart the games before one of them ends"
                warn(f"{restarts}: raise --checkpoint-freq, --team-change or --total-timesteps")
            self.some_ended = False
            rng = draw_stream(seed)
            for pool in (*self.pools.values(), *self.rivals.values(), *self.scripted.values()):
                pool.rng = rng
        self.ages[:] = self.cut_at[:] = 0
        self.running_returns[:] = 0.0
        if self.game_length is not None:
            self.cut_at = (self.game_length * np.arange(len(self.ages)) / len(self.ages)).astype(np.int64)
        for game in range(len(self.opponents)):
            self.learner_team[game] = self.learner_teams[game % len(self.learner_teams)]
            self._draw(game)

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps. Running games are not part of it."""
        rivals = {} if self.rivals is self.pools else self.rivals  # the pools are saved by themselves
        return {
            "learner": self.learner,
            "rating": self.rating,
            "learner_steps": dict(self.learner_steps),
            "ghost_steps": self.ghost_steps,
            "game_length": self.game_length,
            "has_warned": self.has_warned,
            "rivals": {behavior: pool.state_dict() for behavior, pool in rivals.items()},
            "shares": {behavior: pool.shares for behavior, pool in rivals.items()},
            "scripted": {behavior: pool.state_dict() for behavior, pool in self.scripted.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads that state and restarts all games. The pools must have been loaded before."""
        self.ghost_steps, self.has_warned = state["ghost_steps"], state["has_warned"]
        self.game_length, self.learner_steps = state["game_length"], dict(state["learner_steps"])
        for behavior, shares in state.get("shares", {}).items():  # their runs may have been trained on since
            pool = self.rivals[behavior]
            pool.shares, pool.snapshots = shares, deque(maxlen=len(shares))
        for name, pools in ("rivals", self.rivals), ("scripted", self.scripted):
            for behavior, snapshots in state[name].items():
                pools[behavior].load_state_dict(snapshots)
        self.learner = state["learner"]
        self.give_turn(self.learner)
        self.rating = state["rating"]

    def _draw_opponent(self, behavior: str) -> Snapshot:
        """An opponent by the shares of `mix_in`, otherwise by the rule of the pool."""
        pool = self.rivals[behavior]
        if self.scripted_share + self.current_share > 0.0:
            lot = pool.rng.random()
            if lot < self.current_share:  # a behaviour that does not learn now is its newest snapshot
                return CURRENT if behavior == self.learner else self.pools[behavior].latest
            if lot < self.current_share + self.scripted_share:
                return self.scripted[behavior].draw()
        return pool.draw()

    def _draw(self, game: int) -> None:
        """Draws new opponents for one game."""
        learner_team = self.learner_team[game]
        for team, behavior in enumerate(self.behaviors):
            opponent = self._draw_opponent(behavior) if self.opposes[learner_team, team] else CURRENT
            self.opponents[game][team] = None if team == learner_team else opponent
            self.uids[game, team] = -1 if team == learner_team else opponent.uid
        self.drawn_at[game] = self.ghost_steps

    def _seats(self, team: int) -> list[int]:
        """The teams of this team's side, sorted by behaviour. Among those of its own behaviour this team is first."""
        return sorted(self.allies[team], key=lambda t: (self.behaviors[t], t != team))

    def next_game(self, game: int) -> None:
        """Prepares a game's next start: the learner changes sides, and opponents are replaced if they are due."""
        team = self.learner_team[game]
        next_team = self.learner_teams[(self.learner_teams.index(team) + 1) % len(self.learner_teams)]
        self.learner_team[game] = next_team
        own, new = self._seats(team), self._seats(next_team)
        can_swap = [self.behaviors[t] for t in own] == [self.behaviors[t] for t in new]
        if self.ghost_steps - self.drawn_at[game] >= self.swap_steps or not can_swap:
            self._draw(game)
        elif next_team != team:  # the opponents on the learner's new side move to its old one
            swaps = [(team, next_team)] if next_team in own else list(zip(own, new, strict=True))
            for seats in (self.opponents[game], self.uids[game]):
                for a, b in swaps:
                    seats[a], seats[b] = seats[b], seats[a]

    def finish(self, game: int, results: np.ndarray, rated: bool = True) -> None:
        """Rates a finished game by its results (num_teams, num_teams) of `game_scores`, and prepares its next start.

        Each opponent plays an Elo game of its own against the learner's rating before the game. The changes are divided
        by the number of opposing teams. What the learner gains, its opponents lose.

        `rated` is False for games in which the learner acts at random: then only the next start is prepared.
        """
        learner_team, rating = self.learner_team[game], self.rating
        for team, opponent in enumerate(self.opponents[game]):
            if rated and opponent is not None and opponent is not CURRENT:
                result, age = float(results[learner_team, team]), math.nan
                if self.rivals is self.pools and not opponent.name:
                    age = float(self.pools[self.behaviors[team]].latest.step - opponent.step)
                change = elo_change(rating, opponent.rating, result, self.elo_k) / self.num_opponents[learner_team]
                self.finished.append((result, opponent.rating, age))
                self.rating += change
                opponent.rating -= change
                opponent.games += 1
                opponent.record(result)
        self.next_game(game)

    def cut_games(self, result: TeamStep) -> tuple[TeamStep, np.ndarray]:
        """Counts a step of all games, and truncates the first games that are due; also returns which: (num_games,)."""
        self.ages += 1
        self.running_returns += self.of_learner(result.rewards).reshape(len(self.ages), -1).mean(axis=1)
        cut = (self.ages == self.cut_at) & ~result.over
        if not cut.any():
            return result, cut
        return result._replace(truncations=[x | cut[:, None] for x in result.truncations]), cut

    def finish_games(self, env: TeamEnv, result: TeamStep, cut: np.ndarray, max_age: float = math.inf) -> Observations:
        """Rates the games that are over, prepares their next starts, and restarts those that were cut.

        A game of more than `max_age` steps is not rated: it began while the learner acted at random. Returns the
        observations to act on next, one array a team.
        """
        self.some_ended |= bool(result.over.any())
        self.steps_without_end = 0 if result.over.any() else self.steps_without_end + 1
        if self.steps_without_end == MAX_STEPS:
            rule = "a game ends when all its agents have terminated or are truncated"
            warn(f"no game has ended in {MAX_STEPS:,} steps; {rule}")
        results = game_scores(result.scores[result.over])  # of all these games at once, which is faster
        for game, game_results in zip(result.over.nonzero()[0].tolist(), results, strict=True):
            age = int(self.ages[game])
            self.lengths.append(age)
            self.returns.append(float(self.running_returns[game]))
            if self.game_length is not None:
                self.game_length += (0.01 if self.game_length else 1.0) * (age - self.game_length)
            self.finish(game, game_results, age <= max_age)
        for game in cut.nonzero()[0].tolist():
            self.next_game(game)
        ended = result.over | cut
        self.ages[ended] = self.cut_at[ended] = 0
        self.running_returns[ended] = 0.0
        restart: Any = getattr(env, "restart", None)  # no game is cut without this method
        return restart(cut.nonzero()[0]) if cut.any() else result.obs

    def of_learner(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The learner's rows (num_games * team_size, ...) of one array (num_games, team_size, ...) per team."""
        own = arrays[self.learner_teams[0]].copy()  # (num_games, team_size, ...)
        for team in self.learner_teams[1:]:
            is_there = (self.learner_team == team).reshape(-1, *[1] * (own.ndim - 1))
            own = np.where(is_there, arrays[team], own)
        return own.reshape(own.shape[0] * own.shape[1], *own.shape[2:])

    @property
    def num_ghosts(self) -> int:
        """Number of opponents' agents over all games."""
        return int((self.opposes[self.learner_team] * self.sizes).sum())

    def opponent_steps(self) -> np.ndarray:
        """The learner steps at which the oldest opponent of each game was taken: (num_games,).

        A scripted player never gets old.
        """
        now, opposes = self.learner_steps[self.learner], self.opposes.tolist()
        games = [compress(seats, opposes[t]) for t, seats in zip(self.learner_team, self.opponents, strict=True)]
        return np.array([min(now if s is CURRENT else s.step for s in seats if s is not None) for seats in games])

    def oldest_opponent(self) -> int:
        """The step of the oldest snapshot that the learner's opponents can be; they must have one behaviour.

        0 if they are those of --opponents, which never leave.
        """
        (behavior,) = self.opposing_behaviors(self.learner)
        return self.pools[behavior].snapshots[0].step if self.rivals is self.pools else 0

    def opposing_behaviors(self, behavior: str) -> set[str]:
        """The behaviours of all teams that oppose a team of this behaviour."""
        own = [t for t, b in enumerate(self.behaviors) if b == behavior]
        return {b for t in own for b, is_rival in zip(self.behaviors, self.opposes[t], strict=True) if is_rival}

    def all_actions(
        self, env: TeamEnv, agents: Mapping[str, Any], obs: Sequence[np.ndarray], learner_actions: np.ndarray
    ) -> list[np.ndarray]:
        """Actions of all teams, as `TeamEnv.step` takes them. Counts the steps of the ghost agents.

        `learner_actions` are (num_games * team_size, action_dim). All snapshots of a behaviour act in one batched
        forward pass.
        """
        actions: list[np.ndarray] = [np.empty(0)] * len(env.teams)
        for behavior, agent in agents.items():
            teams = [t for t, b in enumerate(self.behaviors) if b == behavior]
            by_team = np.stack([obs[t] for t in teams], axis=1)  # (num_games, num_teams, team_size, obs_dim)
            team, uids = env.teams[teams[0]], self.uids[:, teams]
            chosen = np.zeros((*by_team.shape[:3], team.action_dim), dtype=np.int64 if team.branches else np.float32)
            ghosts = self.opposes[self.learner_team][:, teams]
            self.ghost_steps += int(np.stack([env.alive[t] for t in teams], axis=1)[ghosts].sum())
            others = [CURRENT, *self.scripted[behavior].snapshots] if behavior in self.scripted else [CURRENT]
            is_snapshot = uids >= 0
            for player in others:  # `np.isin` would take 2% of the script's time
                is_snapshot &= uids != player.uid
            for seated, has_snapshots in ((is_snapshot, True), (uids == CURRENT.uid, False)):
                if seated.any():
                    masks = np.stack([legal_actions(env, t) for t in teams], axis=1)[seated]
                    rows = by_team[seated].reshape(-1, team.obs_dim)
                    masks, noise = masks.reshape(len(rows), -1), agent.actor.noise(len(rows))
                    if has_snapshots:
                        stack, which = self._stack(behavior, agent, uids[seated])
                        own_actions = stack.act(which.repeat(by_team.shape[2]), rows, masks, noise)
                    else:
                        own_actions = agent.act(rows, masks, noise)
                    chosen[seated] = own_actions.reshape(-1, *chosen.shape[2:])
            for player in others[1:]:
                for k, t in enumerate(teams):
                    seated = uids[:, k] == player.uid
                    if seated.any():
                        chosen[seated, k] = env.scripted_actions(player.name, t)[seated]
            if behavior == self.learner:
                chosen[uids < 0] = learner_actions.reshape(-1, *chosen.shape[2:])
            for k, t in enumerate(teams):
                actions[t] = chosen[:, k]
        return actions

    def _stack(self, behavior: str, agent: Any, uids: np.ndarray) -> tuple[PolicyStack, np.ndarray]:
        """The stack of the snapshots in play, and the index in it of each uid (n,). It is kept until another plays."""
        if behavior in self.stacks:
            known, stack = self.stacks[behavior]  # sorted, so that a search finds the index: faster than `np.unique`
            which = np.searchsorted(known[:-1], uids)
            if (known[which] == uids).all():
                return stack, which
        known, which = np.unique(uids, return_inverse=True)
        by_uid = {s.uid: s.weights for seats in self.opponents for s in seats if s is not None}
        stack = PolicyStack(agent, [by_uid[uid] for uid in known.tolist()])
        self.stacks[behavior] = known, stack
        return stack, which

    def rating_of(self, behavior: str) -> float:
        """The learner's rating; for another behaviour, the rating of its newest snapshot."""
        return self.rating if behavior == self.learner else self.pools[behavior].latest.rating

    def end_turn(self, agents: Mapping[str, Any], global_step: int, save_steps: int) -> bool:
        """Takes a snapshot of the learner if one is due, and ends its turn if that is due. Returns whether it took one.

        A snapshot is due `save_steps` of the learner's own steps after the last one, and at the end of its turn. At the
        end of the run the last snapshot of each behaviour becomes its final policy.
        """
        pool, next_learner = self.pools[self.learner], self.learner_at(global_step)
        step = self.learner_steps[self.learner]
        num_steps = step - pool.latest.step  # since the last snapshot
        takes_snapshot = num_steps >= save_steps or (next_learner != self.learner and num_steps > 0)
        if takes_snapshot:
            pool.add(agents[self.learner].acting_weights(), step, self.rating)
        if next_learner != self.learner:
            self.give_turn(next_learner)
        if global_step >= self.change_at[-1]:
            self.add_final_snapshots(agents, save_steps)
        return takes_snapshot

    def add_final_snapshots(self, agents: Mapping[str, Any], save_steps: int) -> None:
        """Makes the last snapshot of each behaviour its final policy, in place of one that is nearly as new."""
        for behavior, pool in self.pools.items():
            step, rating = self.learner_steps[behavior], self.rating_of(behavior)
            if step > pool.latest.step:
                if pool.latest.step > max(0, step - save_steps / 2):
                    pool.snapshots.pop()
                pool.add(agents[behavior].acting_weights(), step, rating)

    def metrics(self) -> dict[str, float]:
        """Metrics to log: current ratings, and opponents and results of the games since the last call."""
        metrics = {f"selfplay/rating_{behavior}": self.rating_of(behavior) for behavior in self.pools}
        if self.finished:
            results, ratings, ages = np.array(self.finished).T
            metrics["selfplay/win_rate"] = float(results.mean())
            metrics["selfplay/opponent_rating_mean"] = float(ratings.mean())
            metrics["selfplay/opponent_rating_std"] = float(ratings.std())
            if not np.isnan(ages).all():
                metrics["selfplay/opponent_age"] = float(np.nanmean(ages))
            metrics["selfplay/games"] = float(len(results))
        if self.lengths:
            metrics["charts/episodic_return"] = float(np.mean(self.returns))
            metrics["charts/episodic_length"] = length = float(np.mean(self.lengths))
            if not self.has_warned and 0 < self.swap_steps < self.num_ghosts * length:  # swaps then have no effect
                self.has_warned = True
                steps = f"--swap-steps {self.swap_steps:,} is less than the opponents' steps in one game"
                game = f"{self.num_ghosts:,} agents of opponents, games of {length:.0f} steps"
                warn(f"{steps} ({game}), so opponents change after every game")
        self.finished, self.lengths, self.returns = [], [], []
        return metrics


def start_matches(
    all_args: Mapping[str, Any],
    env: TeamEnv,
    agents: Mapping[str, Any],
    total_steps: int,
    stride: int,
    rivals: Mapping[str, SnapshotPool] | None = None,
) -> Matches:
    """The games of a run of `total_steps` game steps, against the first snapshot of each behaviour, its initial policy.

    `all_args` are the arguments of each behaviour (`behavior_args`), `stride` the game steps of an iteration, and
    `rivals` the policies of --opponents. Exits with one sentence if a replay buffer does not suit the game.
    """
    args = next(iter(all_args.values()))
    draws = args.window, args.play_against_latest_model_ratio, args.opponent_sampling, np.random.default_rng(args.seed)
    rows = args.num_games * max(len(team.agents) for team in env.teams)
    if getattr(args, "buffer_size", rows) < rows:
        fail(f"--buffer-size takes at least a step of a team in all games, {rows} transitions, not {args.buffer_size}")
    pools = {behavior: SnapshotPool(*draws, args.newest_share) for behavior in agents}
    for behavior, pool in pools.items():
        pool.add(agents[behavior].acting_weights(), 0, args.initial_elo)
    team_change = {behavior: own.team_change for behavior, own in all_args.items()}
    change_at = turn_ends(env.teams, team_change, total_steps, stride)
    sizes = {team.behavior: len(team.agents) for team in env.teams}
    lengths = np.diff([0, *change_at[: len(sizes)]]).tolist()  # of a turn of each behaviour, in game steps
    turn_steps = {behavior: sizes[behavior] * n for behavior, n in zip(all_args, lengths, strict=True)}
    for i, (behavior, own) in enumerate(all_args.items()):
        learned = int(np.diff([0, *change_at])[i :: len(sizes)].sum())  # game steps in its turns
        if getattr(own, "learning_starts", -1) >= learned:
            starts = f"--learning-starts {own.learning_starts:,}"
            warn(f"{starts} leaves {behavior} without an update: it learns in {learned:,} game steps of the run")
        last = sizes[behavior] * (learned - stride)  # learner steps before the last iteration
        if rivals is None and len(sizes) == 1 and own.save_steps > last:  # with more, the end of a turn takes one
            none = f"--save-steps {own.save_steps:,} takes no snapshot before the last of {learned:,} game steps"
            warn(f"{none}: the learner plays no past self but its initial policy")
    if len(sizes) == 1:
        turn_steps = {behavior: n or turn_steps[behavior] for behavior, n in team_change.items()}
    game_length = getattr(env, "max_steps", 0) if hasattr(env, "restart") else None
    rules = args.elo_k, args.swap_steps, args.learner_side, args.swaps_per_turn, turn_steps, game_length
    matches = Matches(env.teams, args.num_games, pools, change_at, *rules, rivals)
    is_mixed = any(len(matches.opposing_behaviors(behavior)) > 1 for behavior in agents)
    if is_mixed and getattr(args, "replay_opponents", "all") == "window":
        fail("--replay-opponents window takes a game in which the opponents of each team share a behaviour")
    matches.mix_in(scripted_by_behavior(env), args.scripted_share, args.current_share, args.initial_elo)
    return matches
