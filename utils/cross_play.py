"""Who beats whom: games between given players, the table of all against all, its ratings and its heat map."""

import csv
import io
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from utils.elo import all_reach_all, bootstrap_ratings, game_scores
from utils.errors import write_file
from utils.policy_stack import PolicyStack
from utils.run import name_actions, one_line, warn
from utils.snapshot_pool import Weights, draw_stream
from utils.team_env import TeamEnv, allies_of, legal_actions, play_games
from utils.video import film_strip, write_video

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_GAMES = 512  # games that are stepped together


@dataclass(frozen=True)
class Player:
    """A policy or a scripted player for the teams of one behaviour, a mixture of such players, or a line-up of them."""

    name: str
    """name of the scripted player, or any name for a policy"""
    behavior: str
    """the behaviour whose teams it plays on; of a line-up its behaviours, joined by +"""
    weights: Weights | None = field(default=None, repr=False)
    """state dict of the actor; None: the scripted player of that name, a mixture, or a line-up"""
    members: tuple["Player", ...] = field(default=(), repr=False)
    """of a mixture, which plays each game with the policy of one member"""
    shares: tuple[float, ...] = ()
    """probabilities of the members"""
    lineup: tuple["Player", ...] = field(default=(), repr=False)
    """of a line-up, which plays on teams of several behaviours: a player for each"""

    @property
    def is_scripted(self) -> bool:
        """Whether it has no policy."""
        return self.weights is None and not self.members and all(player.is_scripted for player in self.lineup)

    @property
    def behaviors(self) -> frozenset[str]:
        """The behaviours whose teams it plays on."""
        first = self.members[0] if self.members else self
        return frozenset(player.behavior for player in first.lineup or (first,))


def make_player(name: str, singles: Sequence[Player]) -> Player:
    """A player for the behaviours of `singles`, which play one behaviour each."""
    return singles[0] if len(singles) == 1 else Player(name, "+".join(p.behavior for p in singles), lineup=(*singles,))


def player_behaviors(env: TeamEnv) -> list[tuple[str, ...]]:
    """The groups of behaviours that one player can play: those of a side, or those of all its opponents."""
    groups = [[env.teams[u].behavior for u in own] for own in allies_of(env.teams)]
    rests = [[team.behavior for u, team in enumerate(env.teams) if u not in own] for own in allies_of(env.teams)]
    order = list(dict.fromkeys(team.behavior for team in env.teams))
    return list(dict.fromkeys(tuple(b for b in order if b in group) for group in groups + rests))


def scripted_by_behavior(env: TeamEnv) -> list[tuple[str, str]]:
    """Names of scripted players with the behaviours that they can play, weakest first."""
    roles = zip(env.teams, env.scripted_by_team, strict=True)
    return list(dict.fromkeys((name, team.behavior) for team, names in roles for name in names))


def scripted_players(env: TeamEnv) -> list[Player]:
    """The game's scripted players, weakest first: one for each item of `player_behaviors` that a name can play."""
    known = scripted_by_behavior(env)
    names = dict.fromkeys(name for name, _ in known)
    able = [
        (name, group) for group in player_behaviors(env) for name in names if all((name, b) in known for b in group)
    ]
    return [make_player(name, [Player(name, behavior) for behavior in group]) for name, group in able]


def play(
    env: TeamEnv,
    agents: Mapping[str, Any],
    players: Sequence[Player],
    seats: np.ndarray,
    seed: int,
    deterministic: bool = False,
    frames: list[np.ndarray] | None = None,
) -> np.ndarray:
    """Plays one game for each row of `seats` and returns the scores; both are (num_games, num_teams).

    `seats` holds indices of `players`. `agents` are the modules, by behaviour, that act with the players' weights (see
    `PolicyStack`). For each game a mixture draws one of its members. Policies sample their actions from a random stream
    of their own, or take the most likely actions if `deterministic`. `frames` receives the pictures of the first game.
    """
    generator, rng = torch.Generator().manual_seed(seed), draw_stream(seed)
    players, seats = list(players), seats.copy()
    for i, player in enumerate(tuple(players)):
        if player.members:
            own, drawn = seats == i, np.zeros((len(seats), 1), dtype=np.int64)
            games = own.any(axis=1)
            drawn[games, 0] = len(players) + rng.choice(len(player.members), games.sum(), p=player.shares)
            seats = np.where(own, drawn, seats)
            players += player.members
    for i, player in enumerate(tuple(players)):
        for single in player.lineup:
            own = [team.behavior == single.behavior for team in env.teams]
            seats = np.where((seats == i) & own, len(players), seats)
            players.append(single)
    policies = {b: [i for i, p in enumerate(players) if p.behavior == b and p.weights is not None] for b in agents}
    stacks = {b: PolicyStack(agents[b], [players[i].weights or {} for i in own]) for b, own in policies.items() if own}

    def act(t: int, obs: np.ndarray) -> np.ndarray:
        team, seated = env.teams[t], seats[:, t]
        actions = np.zeros((*obs.shape[:2], team.action_dim), dtype=np.int64 if team.branches else np.float32)
        for i in np.unique(seated):
            if players[i].weights is None:
                actions[seated == i] = env.scripted_actions(players[i].name, t)[seated == i]
        rows = np.isin(seated, policies.get(team.behavior, []))
        if rows.any():
            policy = np.searchsorted(policies[team.behavior], seated[rows]).repeat(obs.shape[1])
            masks = legal_actions(env, t)[rows].reshape(len(policy), -1)
            noise = 0.0 if deterministic else agents[team.behavior].actor.noise(len(policy), generator)
            chosen = stacks[team.behavior].act(policy, obs[rows].reshape(len(policy), -1), masks, noise)
            actions[rows] = chosen.reshape(-1, *actions.shape[1:])
        return actions

    return play_games(env, act, seed, frames)


def seatings(env: TeamEnv, first: Player, second: Player) -> list[tuple[int, ...]]:
    """The sides, as their teams, that the first player can take while the second takes all others."""
    found = []
    for own in dict.fromkeys(tuple(own) for own in allies_of(env.teams)):
        ours = {env.teams[t].behavior for t in own}
        theirs = {team.behavior for t, team in enumerate(env.teams) if t not in own}
        found += [own] if (ours, theirs) == (first.behaviors, second.behaviors) else []
    return found


def pairs_with_others(env: TeamEnv, players: Sequence[Player], num_own: int) -> list[tuple[int, int]]:
    """Each of the first `num_own` players with each later one, if one can take a side and the other all other sides."""
    pairs = [(i, j) for i in range(num_own) for j in range(num_own, len(players))]
    return [(i, j) for i, j in pairs if seatings(env, players[i], players[j])]


def record_video(
    make_env: Callable[..., TeamEnv],
    agents: Mapping[str, Any],
    first: Player,
    second: Player,
    seed: int,
    deterministic: bool,
    folder: Path,
) -> None:
    """Writes a game of the two players to folder/videos, at the game's own speed, and prints the path.

    Frames of the game side by side are written to folder/strip.png, in place of those of an earlier video. The
    environment is made now: some games cannot be rendered any more after another of their environments was closed.
    """
    from PIL import Image

    env = make_env(1, render=True)
    frames: list[np.ndarray] = []
    side = seatings(env, first, second)[0]
    seats = np.array([[int(t not in side) for t in range(len(env.teams))]])
    play(env, agents, [first, second], seats, seed, deterministic, frames)
    path = folder / "videos" / re.sub(r"[^\w.-]", "-", f"{first.behavior}-vs-{second.name}.mp4")
    no_end = "" if hasattr(env, "restarts") else f" (without its end: {type(env).__name__} has no attribute restarts)"
    try:
        path.parent.mkdir(exist_ok=True)
        write_video(path, frames, getattr(env, "render_fps", 10.0))
        Image.fromarray(film_strip(frames)).save(folder / "strip.png", optimize=True)
        print(f"video: {path}{no_end}\nframes of it: {folder / 'strip.png'}")
    except OSError as error:  # such as a full disk: the scores are worth more than the video
        warn(f"{path} could not be written: {one_line(error)}"[:500])
    env.close()


def play_pairs(
    make_env: Callable[[int], TeamEnv],
    agents: Mapping[str, Any],
    players: Sequence[Player],
    pairs: Sequence[tuple[int, int]],
    num_games: int,
    seed: int,
    deterministic: bool = False,
) -> np.ndarray:
    """Plays each pair of players. Returns the first player's scores (num_pairs, num_seeds), from 0 to 1.

    A score is the mean over the games of one seed: one game for each side that the first player can take. So neither
    the start nor the side favours a player. A win is 1, a draw 0.5. Each pair plays `num_games`, rounded up to whole
    seeds; fewer if its first player can take fewer sides than others. `make_env(num_games)` makes an environment.
    """
    if not pairs:
        return np.empty((0, num_games))
    env = make_env(1)
    sides = [seatings(env, players[i], players[j]) for i, j in pairs]
    most = max(map(len, sides))
    num_seeds = -(-num_games // most)
    num_teams, total, allies = len(env.teams), len(pairs) * num_seeds, allies_of(env.teams)
    of_allies = np.array([[u in own for u in range(num_teams)] for own in allies])
    env.close()
    env = make_env(min(total, MAX_GAMES))
    scores = np.full((most, total), np.nan)
    for k in range(most):
        # A first player with fewer sides repeats one, which is not counted.
        own = [side[k % len(side)] for side in sides]
        counts = np.array([k < len(side) for side in sides]).repeat(num_seeds)
        rows = [[i if u in side else j for u in range(num_teams)] for (i, j), side in zip(pairs, own, strict=True)]
        seats, first = np.array(rows).repeat(num_seeds, axis=0), np.array([side[0] for side in own]).repeat(num_seeds)
        for start in range(0, total, env.num_games):
            games = np.arange(start, start + env.num_games)
            inside = games < total
            # A game may draw from the global streams. The other side gets the same numbers.
            random.seed(seed + start), np.random.seed(seed + start), torch.default_generator.manual_seed(seed + start)
            results = game_scores(play(env, agents, players, seats[games % total], seed + start, deterministic))
            results[:, of_allies] = np.nan
            means = np.nanmean(results[np.arange(env.num_games), first[games % total]], axis=1)
            scores[k, games[inside]] = np.where(counts[games[inside]], means[inside], np.nan)
    env.close()
    return np.nanmean(scores, axis=0).reshape(len(pairs), num_seeds)


@dataclass
class CrossPlay:
    """The table of all against all, with Bradley-Terry ratings and their 95% confidence intervals."""

    players: list[Player]
    scores: np.ndarray
    """(n, n, num_seeds): scores of row against column; nan where the two cannot meet"""
    ratings: np.ndarray
    low: np.ndarray
    high: np.ndarray
    """each (n,)"""
    deterministic: bool = False
    """whether policies took their most likely actions; else they sampled"""

    @property
    def labels(self) -> list[str]:
        """A unique label for each player."""
        several = len({player.behavior for player in self.players}) > 1
        return [f"{player.behavior} {player.name}" if several else player.name for player in self.players]

    def text(self) -> str:
        """The table as plain text: score of row against column in percent, then the rating and its interval."""
        means, labels = self.scores.mean(axis=2), self.labels
        width = max(map(len, labels))
        columns = [j for j in range(len(labels)) if not np.isnan(means[:, j]).all()]
        lines = [f"{'':{width}}" + "".join(f"{j:5d}" for j in columns) + "   rating [95% interval]"]
        for i, label in enumerate(labels):
            cells = "".join("    ." if np.isnan(means[i, j]) else f"{100 * means[i, j]:5.0f}" for j in columns)
            interval = f"[{self.low[i]:.0f}, {self.high[i]:.0f}]"
            lines.append(f"{label:{width}}{cells}   {self.ratings[i]:6.0f} {interval}  ({i})")
        return "\n".join(lines)

    def progress(self) -> dict[str, tuple[float, float]]:
        """For each behaviour, how its newest policy compares with the older ones: mean score and lowest score.

        If they can meet, these are the newest policy's scores against each older one. Two policies of one role cannot
        meet. Then the score is 1/2 plus half the difference between their mean scores against all others.
        """
        means, result = self.scores.mean(axis=2), {}
        for behavior, own in self.policies().items():
            if len(own) > 1:
                *older, newest = own
                against = means[newest, older]
                if np.isnan(against).any():
                    against = 0.5 + 0.5 * (np.nanmean(means[newest]) - np.nanmean(means[older], axis=1))
                result[behavior] = float(against.mean()), float(against.min())
        return result

    def policies(self) -> dict[str, list[int]]:
        """The players of each behaviour that are policies."""
        behaviors = dict.fromkeys(player.behavior for player in self.players)
        all_players = list(enumerate(self.players))
        return {b: [i for i, p in all_players if p.behavior == b and not p.is_scripted] for b in behaviors}

    def nash_weights(self) -> np.ndarray:
        """Each policy's share (n,) in the maximin mixture: that with the highest worst score against the policies.

        nan for scripted players, and where there are no policies to meet. In a symmetric game the mixture scores 1/2 or
        more against each policy of the table: a Nash equilibrium of the game in which both players pick a policy.
        """
        means, weights = self.scores.mean(axis=2), np.full(len(self.players), np.nan)
        np.fill_diagonal(means, 0.5)
        for own in self.policies().values():
            others = [j for others in self.policies().values() for j in others if not np.isnan(means[own, j]).any()]
            if own and others:
                weights[own] = maximin(means[np.ix_(own, others)])
        return weights

    def circles(self) -> tuple[int, int]:
        """Number of triples of policies that form a circle (each beats the next), and of triples that can meet."""
        own = [i for indices in self.policies().values() for i in indices]
        means = self.scores.mean(axis=2)[np.ix_(own, own)]
        beats, meets = (means > 0.5).astype(int), (~np.isnan(means)).astype(int)
        return int(np.trace(beats @ beats @ beats)) // 3, int(np.trace(meets @ meets @ meets)) // 6

    def report(self, folder: Path) -> None:
        """Prints the table and what follows from it. Writes the table to a folder as CSV and heat map."""
        actions = name_actions(self.deterministic)
        ratings = "ratings are fitted to this table, with mean 1200; the training Elo is another scale"
        cells = "score of row against column in percent; steps are learner steps"
        print(f"cross-play, {actions}: {cells}; {ratings}\n{self.text()}")
        took = np.nan_to_num(self.scores).sum(axis=2) > 0  # row from column
        groups = connected(~np.isnan(self.scores[:, :, 0]))
        if not all(all_reach_all(took[np.ix_(group, group)]) for group in groups):
            reason = "a player or a group of players has won or lost all its games against the others"
            print(f"{reason}: its rating cannot be estimated, and all intervals are too narrow")
        for behavior, (mean, worst) in self.progress().items():
            against = f"{mean:.2f} on average against older ones, {worst:.2f} in the worst case"
            print(f"{behavior}: the last snapshot scores {against} ({actions}; from 0 to 1: a win is 1, a draw 0.5)")
        shares = zip(self.labels, self.nash_weights(), strict=True)
        print("Nash weights: " + ", ".join(f"{label} {share:.2f}" for label, share in shares if share >= 0.005))
        if self.circles()[1]:
            print("{} of {} triples of snapshots form a circle: each beats the next one".format(*self.circles()))
        self.write_csv(folder / "cross_play.csv")
        self.heat_map().savefig(folder / "cross_play.png", dpi=120)

    def write_csv(self, path: Path) -> None:
        """Writes one row per player: rating, interval, Nash weight, and mean score against each other player."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["player", "rating", "low", "high", "nash_weight", *self.labels])
        for i, (label, share) in enumerate(zip(self.labels, self.nash_weights(), strict=True)):
            means = ["" if np.isnan(mean) else f"{mean:.4f}" for mean in self.scores[i].mean(axis=1)]
            numbers = [f"{x[i]:.1f}" for x in (self.ratings, self.low, self.high)]
            writer.writerow([label, *numbers, "" if np.isnan(share) else f"{share:.6f}", *means])
        write_file(path, text.getvalue().encode())

    def heat_map(self) -> "Figure":
        """The table as a figure that grows with the number of players and with the length of their names.

        Its colours run from red over white at a score of 50 percent to blue, which colour-blind readers can tell apart.
        Pairs that did not meet are grey.
        """
        from matplotlib.figure import Figure

        means, n = 100.0 * self.scores.mean(axis=2), len(self.players)
        columns = [shortened(label) for label in self.labels]
        rows = [f"{label}  ({rating:.0f})" for label, rating in zip(columns, self.ratings, strict=True)]
        names = 0.09 * max(map(len, columns))  # inches that the longest one takes
        side = max(0.42 * n, 2.0)
        figure = Figure(figsize=(side + names + 2.4, side + names + 1.4), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(means, cmap="RdBu", vmin=0.0, vmax=100.0)
        axes.set_facecolor("0.85")
        for i, j in np.argwhere(~np.isnan(means)):
            color = text_color(np.array(image.to_rgba(means[i, j])))
            axes.text(j, i, f"{means[i, j]:.0f}", ha="center", va="center", fontsize=9, color=color)
        axes.set_xticks(range(n), columns, rotation=90)
        axes.set_yticks(range(n), rows)
        axes.set_xlabel("column player")
        axes.set_ylabel("row player  (rating)")
        axes.set_title(f"Cross-play, {name_actions(self.deterministic)}")
        bar = figure.colorbar(image, shrink=0.8, ticks=[0, 25, 50, 75, 100])
        bar.set_label("score of the row player against\nthe column player, percent")
        return figure


def maximin(scores: np.ndarray) -> np.ndarray:
    """The probabilities of the rows (n,) whose lowest mean score over the columns of (n, m) is highest.

    A linear program: maximise v such that the mean score against each column is v or more.
    """
    from scipy.optimize import linprog

    n, m = scores.shape
    not_above = np.hstack([-scores.T, np.ones((m, 1))])  # v minus the mean score against each column
    total = np.array([[1.0] * n + [0.0]])
    cost = [0.0] * n + [-1.0]  # minus v, which comes after the shares
    solution = linprog(cost, A_ub=not_above, b_ub=np.zeros(m), A_eq=total, b_eq=[1.0], bounds=(0.0, 1.0)).x
    assert solution is not None, "a game of finitely many policies has a value"
    shares = solution[:n].clip(0.0)
    return shares / shares.sum()


def connected(meets: np.ndarray) -> list[list[int]]:
    """The groups of players that meet directly or through others, from the table (n, n) of who meets whom."""
    from scipy.sparse.csgraph import connected_components

    _, labels = connected_components(meets, directed=False)
    return [np.flatnonzero(labels == label).tolist() for label in dict.fromkeys(labels.tolist())]


def shortened(label: str) -> str:
    """A label of at most 32 characters; the middle of a longer one is left out."""
    return label if len(label) <= 32 else f"{label[:15]}\N{HORIZONTAL ELLIPSIS}{label[-16:]}"


def text_color(background: np.ndarray) -> str:
    """Black or white, whichever has the greater contrast with an RGB colour by the formula of WCAG 2."""
    channels = background[:3]
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ (0.2126, 0.7152, 0.0722))
    return "black" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "white"


def cross_play(
    make_env: Callable[[int], TeamEnv],
    agents: Mapping[str, Any],
    players: Sequence[Player],
    num_games: int,
    seed: int,
    deterministic: bool = False,
) -> CrossPlay:
    """Plays all players against each other that can meet, `num_games` per pair, by the rules of `play_pairs`.

    With more than two sides one player takes one of them and the other all others. If both players can do either, they
    play both, `num_games` each, and the score is the mean.

    Players that do not meet even through others are rated apart, with a mean of 1200 each. This is so in a game of
    three roles, where a player of one role meets players of the two others together. Raises ValueError if no two
    players can meet.
    """
    env = make_env(1)
    pairs, is_duel = [], len({tuple(own) for own in allies_of(env.teams)}) == 2
    for i, j in combinations(range(len(players)), 2):
        if seatings(env, players[i], players[j]):
            pairs.append((i, j))
        if seatings(env, players[j], players[i]) and not (is_duel and (i, j) in pairs):  # in a duel the same games
            pairs.append((j, i))
    if not pairs:
        raise ValueError("cross-play takes players who can meet, one on a side and one on all others, and no two can")
    sides = {(i, j): len(seatings(env, players[i], players[j])) for i, j in pairs}
    games_per_score = max(sides[i, j] + sides.get((j, i), 0) for i, j in pairs)
    env.close()
    results = play_pairs(make_env, agents, players, pairs, num_games, seed, deterministic)
    scores = np.full((len(players), len(players), results.shape[1]), np.nan)
    played = dict(zip(pairs, results, strict=True))
    for i, j in pairs:
        score = (played[i, j] + 1.0 - played[j, i]) / 2 if (j, i) in played else played[i, j]
        scores[i, j], scores[j, i] = score, 1.0 - score
    ratings = np.zeros((3, len(players)))  # and the bounds of their intervals
    for group in connected(~np.isnan(scores[:, :, 0])):
        ratings[:, group] = bootstrap_ratings(scores[np.ix_(group, group)], games_per_score=games_per_score)
    rating, low, high = ratings
    return CrossPlay(list(players), scores, rating, low, high, deterministic)
