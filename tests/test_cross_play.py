"""Cross-play: results that are known, sides and seeds that cancel out, the table and what it prints."""

import csv
import io
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.image import AxesImage
from matplotlib.transforms import BboxBase
from matplotlib.typing import ColorType
from torch import Tensor, nn
from toy_policies import ToyAgent

from utils import cross_play as module
from utils.cross_play import CrossPlay, Player, cross_play, play, play_pairs, scripted_players, seatings
from utils.elo import bootstrap_ratings
from utils.team_env import Team, TeamStep, make_team_env

Layout = Sequence[tuple[str, str, int]]  # of teams: name, behaviour, number of agents
DUEL: Layout = (("left", "disc", 1), ("right", "disc", 1))
HUNT: Layout = (("hunters", "hunter", 2), ("prey", "prey", 1))
TRIO: Layout = (("red", "disc", 1), ("green", "disc", 1), ("blue", "disc", 1))
COURT: Layout = (("king", "king", 1), ("east", "guard", 2), ("west", "guard", 2))
ROLES: Layout = (("a", "a", 1), ("b", "b", 1), ("c", "c", 1))
NAN = math.nan


class Contest:
    """The team whose agents act with the highest strengths in the game's only step wins, but for the luck of the start.

    The seed gives each game a random luck in [1, 2) with a random sign: `luck` times that, times the team's number, is
    added to a team's score. Actions are [strength, game, team, agent, legal actions as a binary number]. The last four
    must be true, except those of scripted players. Each game is recorded: the strengths at its seats, luck and scores.
    """

    def __init__(self, num_games: int, layout: Layout = DUEL, luck: float = 0.0, discrete: bool = False) -> None:
        branches = (2, 3, 2, 2, 2) if discrete else ()
        self.teams = tuple(
            Team(name, behavior, tuple(f"{name}_{k}" for k in range(size)), 3, 5, branches)
            for name, behavior, size in layout
        )
        self.num_games, self.luck = num_games, luck
        self.scripted_by_team: tuple[tuple[str, ...], ...] = (
            ("random", "strong"),
            *[("random", "weak")] * (len(layout) - 1),
        )
        self.alive = [np.ones((num_games, size), dtype=bool) for _, _, size in layout]
        self.action_masks: list[np.ndarray | None] = [None] * len(layout)
        self.seeds: list[int] = []
        self.record: list[tuple[tuple[float, ...], float, tuple[float, ...]]] = []  # strengths, luck, scores
        self.closed = False

    def observe(self) -> list[np.ndarray]:
        """[game, team, agent]"""
        sizes = [len(team.agents) for team in self.teams]
        places = [np.meshgrid(np.arange(self.num_games), t, np.arange(n), indexing="ij") for t, n in enumerate(sizes)]
        return [np.stack(place, axis=-1)[:, 0].astype(np.float32) for place in places]

    def begin(self) -> None:
        """Luck and legal actions of the next games."""
        self.lots = self.rng.uniform(1, 2, self.num_games) * self.rng.choice([-1, 1], self.num_games)
        for t, team in enumerate(self.teams):
            if team.branches and t == 0:  # the other teams may do anything
                self.action_masks[t] = self.rng.random((self.num_games, len(team.agents), sum(team.branches))) < 0.5

    def reset(self, seed: int) -> list[np.ndarray]:
        """The seed determines the luck."""
        self.seeds.append(seed)
        self.rng = np.random.default_rng(seed)
        self.begin()
        return self.observe()

    def step(self, actions: list[np.ndarray]) -> TeamStep:
        """Ends all games."""
        strengths = np.stack([team_actions[..., 0].mean(axis=1) for team_actions in actions], axis=1)
        for t, (team, team_actions) in enumerate(zip(self.teams, actions, strict=True)):
            assert team_actions.shape == (self.num_games, len(team.agents), 5)
            assert team_actions.dtype == (np.int64 if team.branches else np.float32)
            mask = self.action_masks[t]
            for (game, k), place in zip(
                np.ndindex(team_actions.shape[:2]), team_actions[..., 1:].reshape(-1, 4), strict=True
            ):
                bits = np.ones(sum(team.branches)) if mask is None else mask[game, k]
                assert place[0] == -1 or place.tolist() == [game, t, k, bits @ 2 ** np.arange(len(bits))]
        scores = strengths + self.luck * self.lots[:, None] * np.arange(len(self.teams))
        for row, lot, score in zip(strengths.tolist(), self.lots.tolist(), scores.tolist(), strict=True):
            self.record.append((tuple(row), lot, tuple(score)))
        obs, over = self.observe(), np.ones(self.num_games, dtype=bool)
        self.begin()
        zeros = [np.zeros((self.num_games, len(team.agents))) for team in self.teams]
        nobody = [zero > 0 for zero in zeros]
        return TeamStep(obs, obs, zeros, [~x for x in nobody], nobody, over, scores)

    def scripted_actions(self, name: str, team: int) -> np.ndarray:
        """Strengths 1000 (strong), -1000 (weak), or about 0, which tell the game by a fraction."""
        assert name in self.scripted_by_team[team]
        shape = (self.num_games, len(self.teams[team].agents), 5)
        actions = np.full(shape, -1, dtype=np.int64 if self.teams[team].branches else np.float32)
        strength = {"random": 0, "strong": 1000, "weak": -1000}[name]
        actions[..., 0] = strength + (0 if self.teams[team].branches else np.arange(self.num_games)[:, None] / 1024)
        return actions

    def render(self) -> np.ndarray:
        """A picture."""
        return np.zeros((2, 2, 3), np.uint8)

    def close(self) -> None:
        """Once."""
        assert not self.closed
        self.closed = True


class Maker:
    """Makes contests, and keeps them."""

    def __init__(self, layout: Layout = DUEL, luck: float = 0.0, discrete: bool = False) -> None:
        self.layout, self.luck, self.discrete = layout, luck, discrete
        self.made: list[Contest] = []

    def __call__(self, num_games: int) -> Contest:
        """A contest of that many games."""
        self.made.append(Contest(num_games, self.layout, self.luck, self.discrete))
        return self.made[-1]

    def record(self) -> list[tuple[tuple[float, ...], float, tuple[float, ...]]]:
        """Of all games that were played."""
        return [game for contest in self.made for game in contest.record]


class Fighter(ToyAgent):
    """Acts with its strength, what it observes, and the legal actions; noise is added to the strength."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.tensor(-77.0))

    def forward(self, obs: Tensor) -> Tensor:
        """(n, 4)"""
        return torch.cat([self.strength.expand(len(obs), 1), obs], dim=1)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n,)"""
        return 10 * torch.randn(n, generator=generator)

    def sample(self, outputs: Tensor, masks: Tensor, noise: Tensor | float) -> Tensor:
        """(n, 5)"""
        legal = (masks * 2 ** torch.arange(masks.shape[1])).sum(dim=1)
        shift = torch.as_tensor(noise).expand(len(outputs))
        return torch.column_stack([outputs[:, 0] + shift, outputs[:, 1:], legal])


def policy(strength: float, behavior: str = "disc") -> Player:
    """A player who is that strong."""
    return Player(f"{strength:g}", behavior, {"strength": torch.tensor(strength)})


def fighters(layout: Layout) -> dict[str, nn.Module]:
    """One for each behaviour."""
    return {behavior: Fighter() for _, behavior, _ in layout}


# --- who can play whom ---


def test_scripted_players_of_each_behavior() -> None:
    """Each once, even if it can play on several teams; a team may have some of its own."""
    found = [(player.name, player.behavior) for player in scripted_players(Contest(1, HUNT))]
    assert found == [("random", "hunter"), ("strong", "hunter"), ("random", "prey"), ("weak", "prey")]
    assert [player.name for player in scripted_players(Contest(1, DUEL))] == ["random", "strong", "weak"]
    assert all(player.weights is None for player in scripted_players(Contest(1, DUEL)))
    assert [player.name for player in scripted_players(make_team_env("sumo", 1))] == ["random", "charge", "centre"]


@pytest.mark.parametrize(
    ("layout", "first", "second", "teams"),
    [
        (DUEL, "disc", "disc", [(0,), (1,)]),
        (TRIO, "disc", "disc", [(0,), (1,), (2,)]),
        (HUNT, "hunter", "prey", [(0,)]),
        (HUNT, "prey", "hunter", [(1,)]),
        (HUNT, "prey", "prey", []),
        (COURT, "king", "guard", [(0,)]),
        (COURT, "guard", "king", []),
        (COURT, "guard", "guard", []),
        (ROLES, "a", "b", []),
    ],
)
def test_seatings(layout: Layout, first: str, second: str, teams: list[tuple[int, ...]]) -> None:
    """One team for the first player, all others for the second."""
    assert seatings(Contest(1, layout), policy(0, first), policy(1, second)) == teams


# --- games ---


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("layout", [DUEL, TRIO, HUNT, COURT], ids=["duel", "trio", "hunt", "court"])
def test_players_act_where_they_sit(layout: Layout, discrete: bool) -> None:
    """Any mixture of policies and scripted players in 40 games; `Contest` checks observations and masks."""
    rng = np.random.default_rng(0)
    env = Contest(40, layout, discrete=discrete)
    behaviors = [behavior for _, behavior, _ in layout]
    players = [Player("random", behavior) for behavior in dict.fromkeys(behaviors)]
    players += [policy(10 * i + 7, behavior) for i in range(1, 6) for behavior in dict.fromkeys(behaviors)]
    own = [[i for i, player in enumerate(players) if player.behavior == behavior] for behavior in behaviors]
    seats = np.stack([rng.choice(indices, 40) for indices in own], axis=1)
    frames: list[np.ndarray] = []
    scores = play(env, fighters(layout), players, seats, 5, deterministic=True, frames=frames)
    strengths = [0.0 if player.weights is None else float(player.weights["strength"]) for player in players]
    expected = np.array(strengths)[seats]
    if not discrete:
        expected += np.where(expected == 0, np.arange(40)[:, None] / 1024, 0)
    np.testing.assert_array_equal([record[0] for record in env.record], expected)
    np.testing.assert_array_equal(scores, expected)
    assert env.seeds == [5]
    assert len(frames) == 1


def test_policies_sample_by_the_seed() -> None:
    """With noise of a stream of their own, different in every game; or not at all."""
    players, seats = [policy(100), policy(200)], np.tile([0, 1], (200, 1))

    def strengths(seed: int, deterministic: bool) -> np.ndarray:
        return play(Contest(200), fighters(DUEL), players, seats, seed, deterministic)

    first, again, other = strengths(1, False), strengths(1, False), strengths(2, False)
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()
    np.testing.assert_allclose(first.mean(axis=0), [100, 200], atol=3)
    np.testing.assert_allclose(first.std(axis=0), 10, atol=2)
    assert abs(np.corrcoef(first.T)[0, 1]) < 0.3  # the two sides do not share their noise
    assert (strengths(1, True) == [100, 200]).all()


# --- pairs ---


def test_games_may_draw_from_the_global_streams() -> None:
    """They are seeded, so a score can be repeated; the games on the other side begin with the same numbers."""
    draws = []

    class Drawing(Contest):
        def reset(self, seed: int) -> list[np.ndarray]:
            draws.append((random.random(), np.random.random(), torch.rand(()).item()))
            return super().reset(seed)

    for seed in (4, 4, 5):
        play_pairs(Drawing, fighters(DUEL), [policy(1), policy(5)], [(0, 1)], 8, seed, deterministic=True)
    assert draws[0] == draws[1] == draws[2] == draws[3] != draws[4] == draws[5]


def test_true_results_of_pairs() -> None:
    """The first one's points, whichever side it is on; equal ones draw."""
    make_env, players = Maker(), [policy(1), policy(5), policy(5), Player("random", "disc")]
    pairs = [(0, 1), (1, 0), (1, 2), (3, 1), (0, 3)]
    scores = play_pairs(make_env, fighters(DUEL), players, pairs, 8, 0, deterministic=True)
    np.testing.assert_array_equal(scores, np.repeat([[0.0], [1.0], [0.5], [0.0], [1.0]], 4, axis=1))
    assert all(contest.closed for contest in make_env.made)
    assert len(make_env.record()) == 5 * 8


@pytest.mark.parametrize(("layout", "sides"), [(DUEL, 2), (TRIO, 3), (HUNT, 1), (COURT, 1)])
@pytest.mark.parametrize("num_games", [1, 2, 5, 6])
def test_games_of_a_pair_are_rounded_up_to_whole_seeds(layout: Layout, sides: int, num_games: int) -> None:
    """One score a seed, from a game on each side."""
    make_env, first, second = Maker(layout), policy(3, layout[0][1]), policy(9, layout[1][1])
    scores = play_pairs(make_env, fighters(layout), [first, second], [(0, 1)] * 2, num_games, 0, deterministic=True)
    assert scores.shape == (2, math.ceil(num_games / sides))
    assert (scores == 0).all()
    assert len(make_env.record()) == 2 * math.ceil(num_games / sides) * sides


@pytest.mark.parametrize("layout", [DUEL, TRIO], ids=["duel", "trio"])
@pytest.mark.parametrize("max_games", [512, 8, 1])
def test_luck_cancels_out(layout: Layout, max_games: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the start alone decides who wins, every single score is a half, as the same start is played on each side.

    No start is used twice, in however many batches, and each player of a pair has had each of its starts on each team.
    """
    monkeypatch.setattr(module, "MAX_GAMES", max_games)
    make_env = Maker(layout, luck=1e6)
    players, pairs = [policy(float(strength)) for strength in (1, 2, 3)], [(0, 1), (2, 0), (1, 2)]
    sides = len(layout)
    scores = play_pairs(make_env, fighters(layout), players, pairs, 7 * sides, 3, deterministic=True)
    assert scores.shape == (3, 7)
    assert (scores == 0.5).all()
    probe, contest = make_env.made
    assert (probe.num_games, probe.record, contest.num_games) == (1, [], min(21, max_games))
    num_batches = math.ceil(21 / contest.num_games)
    assert contest.seeds == contest.seeds[:num_batches] * sides
    games = [
        contest.record[k * num_batches * contest.num_games :][:21] for k in range(sides)
    ]  # without the filled-up ones
    lots = [[lot for _, lot, _ in on_side] for on_side in games]
    assert all(same == lots[0] for same in lots)
    assert len(set(lots[0])) == 21
    for n in range(21):
        first, second = (float(players[i].name) for i in pairs[n // 7])
        seated = [on_side[n][0] for on_side in games]
        assert Counter(seated) == Counter(
            tuple(first if u == t else second for u in range(sides)) for t in range(sides)
        )


@pytest.mark.parametrize("layout", [DUEL, TRIO, HUNT], ids=["duel", "trio", "hunt"])
def test_scores_are_those_of_the_games_of_their_seed(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strength and luck both count, and the expected scores come from the record of the games, in batches of 8."""
    monkeypatch.setattr(module, "MAX_GAMES", 8)
    make_env = Maker(layout, luck=1.0)
    roles = [layout[0][1], layout[1][1]]
    players = [policy(strength, roles[i % 2]) for i, strength in enumerate([0.0, 1.5, 1.25, 0.5])]
    pairs, sides = [(0, 1), (2, 3), (0, 3)], 1 if layout == HUNT else len(layout)
    scores = play_pairs(make_env, fighters(layout), players, pairs, 6 * sides, 11, deterministic=True)
    expected: list[list[list[float]]] = [[[] for _ in range(6)] for _ in pairs]
    record = make_env.record()
    assert len(record) == 24 * sides
    for n in [start + i for start in range(0, 24 * sides, 24) for i in range(18)]:
        p, seed = divmod(n % 24, 6)
        own = float(players[pairs[p][0]].name)
        strengths, _, points = record[n]
        mine = points[strengths.index(own)]
        others = [point for strength, point in zip(strengths, points, strict=True) if strength != own]
        expected[p][seed].append(float(np.mean([np.sign(mine - other) / 2 + 0.5 for other in others])))
    np.testing.assert_allclose(scores, np.mean(expected, axis=2))
    assert len(np.unique(scores)) > 1


def test_games_of_different_seeds() -> None:
    """The seed is that of the games, and the scores are determined by it."""
    play_with = partial(play_pairs, agents=fighters(DUEL), players=[policy(5), policy(8)], pairs=[(0, 1)], num_games=60)
    first, again, other = (play_with(Maker(luck=3.0), seed=seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


# --- the table ---


def test_the_table_of_a_symmetric_game() -> None:
    """All against all, by strength; a player has no score against itself; ratings are those of a fit to all games."""
    players = [Player("random", "disc"), policy(7), policy(-3), policy(20)]
    table = cross_play(Maker(), fighters(DUEL), players, 10, 0, deterministic=True)
    expected = np.array([[NAN, 0, 1, 0], [1, NAN, 1, 0], [0, 0, NAN, 0], [1, 1, 1, NAN]])
    np.testing.assert_array_equal(table.scores, np.repeat(expected[..., None], 5, axis=2))
    assert table.players == players
    assert np.argsort(table.ratings).tolist() == [2, 0, 1, 3]
    reference = bootstrap_ratings(table.scores, games_per_score=2)
    np.testing.assert_array_equal([table.ratings, table.low, table.high], reference)
    assert table.progress() == {"disc": (1.0, 1.0)}


def test_a_table_that_no_rating_fits_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ratings exist if no group has won, or lost, all its games against the rest (Ford 1957)."""
    players = [policy(i) for i in range(3)]
    table = cross_play(Maker(), fighters(DUEL), players, 4, 0, deterministic=True)
    sentence = "has won or lost all its games against the others"
    for wins, is_told in (([1, 0, 1], False), ([1, 1, 0.5], True), ([0.5, 1, 1], True), ([0.5, 0.5, 0.5], False)):
        scores = np.full((3, 3, 2), NAN)
        for (i, j), win in zip([(0, 1), (0, 2), (1, 2)], wins, strict=True):
            scores[i, j], scores[j, i] = win, 1 - win
        capsys.readouterr()
        replace(table, scores=scores).report(tmp_path)
        assert (sentence in capsys.readouterr().out) == is_told


def test_the_table_of_two_roles() -> None:
    """Roles meet only each other, whatever their order; each game is a score of its own."""
    players = [policy(5, "prey"), policy(3, "hunter"), Player("weak", "prey"), policy(9, "hunter"), policy(4, "prey")]
    table = cross_play(Maker(HUNT), fighters(HUNT), players, 3, 0, deterministic=True)
    expected = np.full((5, 5), NAN)
    for prey, against in ((0, (1, 0)), (2, (0, 0)), (4, (1, 0))):
        for hunter, score in zip((1, 3), against, strict=True):
            expected[prey, hunter], expected[hunter, prey] = score, 1 - score
    np.testing.assert_array_equal(table.scores, np.repeat(expected[..., None], 3, axis=2))
    assert table.labels == ["prey 5", "hunter 3", "prey weak", "hunter 9", "prey 4"]


def test_the_table_of_one_against_two_teams() -> None:
    """The guards sit on both teams of theirs; listed first they are still the second player of the pair."""
    players = [policy(5, "guard"), policy(3, "king"), policy(6, "king")]
    table = cross_play(Maker(COURT), fighters(COURT), players, 4, 0, deterministic=True)
    expected = [[NAN, 1, 0], [0, NAN, NAN], [1, NAN, NAN]]
    np.testing.assert_array_equal(table.scores, np.repeat(np.array(expected)[..., None], 4, axis=2))


def test_the_table_of_three_teams() -> None:
    """A score is from three games, each of them against two copies of the other player."""
    make_env = Maker(TRIO)
    table = cross_play(make_env, fighters(TRIO), [policy(1), policy(2), policy(3)], 7, 0, deterministic=True)
    expected = np.array([[NAN, 0, 0], [1, NAN, 0], [1, 1, NAN]])
    np.testing.assert_array_equal(table.scores, np.repeat(expected[..., None], 3, axis=2))
    assert all(contest.closed for contest in make_env.made)


class OddOneOut(Contest):
    """The team that acts unlike the others loses."""

    def step(self, actions: list[np.ndarray]) -> TeamStep:
        """Counts for each team the others that act alike."""
        strengths = np.stack([team_actions[:, 0, 0] for team_actions in actions], axis=1)
        alike = (strengths[:, :, None] == strengths[:, None]).sum(axis=2) - 1.0
        return super().step(actions)._replace(scores=alike)


def test_nobody_gains_by_the_number_of_seats_in_the_table_of_three_teams() -> None:
    """Each player has one seat of three in half of the games, and two in the others."""

    def make_env(num_games: int) -> OddOneOut:
        return OddOneOut(num_games, TRIO)

    table = cross_play(make_env, fighters(TRIO), [policy(1), policy(2), policy(3)], 6, 0, deterministic=True)
    np.testing.assert_array_equal(table.scores, np.where(np.eye(3)[..., None], NAN, np.full((3, 3, 2), 0.5)))
    np.testing.assert_allclose(table.ratings, 1200.0)


def test_scripted_players_alone_need_no_modules() -> None:
    """Two that act alike draw."""
    table = cross_play(Maker(), {}, [Player("random", "disc")] * 2, 4, 0)
    np.testing.assert_array_equal(table.scores[1, 0], 0.5)


def test_players_who_cannot_meet_are_refused() -> None:
    """In one sentence: of three roles no two fill all seats, nor do two players of one role; and pairs may be none."""
    for layout, players in (
        (ROLES, [policy(i, name) for i, name in enumerate("abc")]),
        (HUNT, [policy(1, "prey")] * 2),
    ):
        with pytest.raises(ValueError, match="no two can$") as error:
            cross_play(Maker(layout), fighters(layout), players, 4, 0)
        assert "\n" not in str(error.value)
        assert len(play_pairs(Maker(layout), fighters(layout), players, [], 4, 0)) == 0


def test_random_streams_of_others_are_left_alone() -> None:
    """Those of torch, numpy and Python, in games with sampling policies and with random players."""

    def states() -> tuple[bytes, tuple[object, ...], str]:
        return torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state())

    before = states()
    players = [Player("random", "disc"), policy(7), policy(5)]
    table = cross_play(Maker(luck=1.0), fighters(DUEL), players, 6, 0)
    cross_play(
        partial(make_team_env, "sumo"), {"sumo": nn.Identity()}, scripted_players(make_team_env("sumo", 1)), 2, 0
    )
    _ = table.text(), table.heat_map(), table.progress()
    assert states() == before


# --- what the table says ---


def make_table(means: list[list[float]], players: list[Player]) -> CrossPlay:
    """With two scores a pair, of these means, and ratings 1000, 1100, ..."""
    scores = np.stack([np.array(means) - 0.125, np.array(means) + 0.125], axis=2)
    ratings = 1000.0 + 100 * np.arange(len(players))
    return CrossPlay(players, scores, ratings, ratings - 12.4, ratings + 50.6)


SYMMETRIC = make_table(
    [[NAN, 0.25, 0.5, 0.0], [0.75, NAN, 0.125, 0.25], [0.5, 0.875, NAN, 0.75], [1.0, 0.75, 0.25, NAN]],
    [Player("random", "disc"), policy(1), policy(2), policy(3)],
)
ROLE_MEANS = [  # hunters: random, h1, h2, h3; prey: p1, p2
    [NAN, NAN, NAN, NAN, 0.125, 0.25],
    [NAN, NAN, NAN, NAN, 0.5, 0.25],
    [NAN, NAN, NAN, NAN, 0.75, 0.75],
    [NAN, NAN, NAN, NAN, 0.875, 0.375],
    [0.875, 0.5, 0.25, 0.125, NAN, NAN],
    [0.75, 0.75, 0.25, 0.625, NAN, NAN],
]
ROLE_PLAYERS = [
    Player("random", "hunter"),
    *(policy(i, "hunter") for i in (1, 2, 3)),
    policy(1, "prey"),
    policy(2, "prey"),
]
ASYMMETRIC = make_table(ROLE_MEANS, ROLE_PLAYERS)


def test_progress_by_hand() -> None:
    """By older selves 0.75 and 0.25; in roles half of 1 + 0.625 - 0.375, 1 + 0.625 - 0.75, 1 + 0.59375 - 0.4375."""
    assert SYMMETRIC.progress() == {"disc": (0.5, 0.25)}
    progress = ASYMMETRIC.progress()
    assert progress.keys() == {"hunter", "prey"}
    assert progress["hunter"] == pytest.approx(((0.625 + 0.4375) / 2, 0.4375))
    assert progress["prey"] == pytest.approx((0.578125, 0.578125))


def test_no_progress_without_two_policies() -> None:
    """A scripted player is no older self."""
    players = [Player("random", "disc"), Player("charge", "disc"), policy(3)]
    assert make_table([[NAN, 0.5, 0.5], [0.5, NAN, 0.5], [0.5, 0.5, NAN]], players).progress() == {}


def test_text_by_hand() -> None:
    """A row a player with its number, a column a number; where two cannot meet there is a point."""
    assert SYMMETRIC.text().splitlines() == [
        "          0    1    2    3   rating [95% interval]",
        "random    .   25   50    0     1000 [988, 1051]  (0)",
        "1        75    .   12   25     1100 [1088, 1151]  (1)",
        "2        50   88    .   75     1200 [1188, 1251]  (2)",
        "3       100   75   25    .     1300 [1288, 1351]  (3)",
    ]
    lines = ASYMMETRIC.text().splitlines()
    assert lines[1] == "hunter random    .    .    .    .   12   25     1000 [988, 1051]  (0)"
    assert lines[6] == "prey 2          75   75   25   62    .    .     1500 [1488, 1551]  (5)"
    one_sided = make_table([[NAN, NAN], [NAN, NAN]], [policy(1), policy(2)])
    assert one_sided.text().splitlines()[1] == "1     1000 [988, 1051]  (0)"  # a column that nobody met is left out


def test_a_table_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--policy nash reads it."""
    path = tmp_path / "cross_play.csv"
    SYMMETRIC.write_csv(path)
    old = path.read_text()
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        ASYMMETRIC.write_csv(path)
    assert path.read_text() == old


@pytest.mark.parametrize("table", [SYMMETRIC, ASYMMETRIC], ids=["symmetric", "asymmetric"])
def test_csv_reads_back(table: CrossPlay, tmp_path: Path) -> None:
    """The same means, ratings and names."""
    table.write_csv(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["player", "rating", "low", "high", "nash_weight", *table.labels]
    assert [row[0] for row in rows] == table.labels
    numbers = np.array([[float(cell) if cell else NAN for cell in row[1:]] for row in rows])
    np.testing.assert_allclose(numbers[:, :3].T, [table.ratings, table.low, table.high], atol=0.05)
    np.testing.assert_allclose(numbers[:, 3], table.nash_weights(), atol=5e-5)
    np.testing.assert_allclose(numbers[:, 4:], table.scores.mean(axis=2), atol=5e-5)


@pytest.mark.parametrize("table", [SYMMETRIC, ASYMMETRIC], ids=["symmetric", "asymmetric"])
def test_heat_map(table: CrossPlay) -> None:
    """A number for each pair that met, in its place; names on both axes; and it can be drawn, small as it is."""
    figure = table.heat_map()
    axes, means = figure.axes[0], table.scores.mean(axis=2)
    shown = axes.images[0].get_array()
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    assert cells == {(j, i): f"{100 * means[i, j]:.0f}" for i, j in np.argwhere(~np.isnan(means)).tolist()}
    assert isinstance(shown, np.ma.MaskedArray)
    np.testing.assert_array_equal(shown.filled(NAN), 100 * means)
    assert [label.get_text() for label in axes.get_xticklabels()] == table.labels
    assert axes.get_yticklabels()[0].get_text() == f"{table.labels[0]}  (1000)"
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=40)
    assert file.getvalue().startswith(b"\x89PNG")


def luminance(color: ColorType) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]


def cell_color(image: AxesImage, percent: float) -> tuple[float, float, float]:
    """Red, green and blue of a score."""
    red, green, blue, _ = np.array(image.to_rgba(np.array(percent))).tolist()
    return red, green, blue


def test_numbers_of_the_heat_map_can_be_read() -> None:
    """Each number has a contrast of 4.5 to 1 with its cell, which WCAG 2 demands, at every score."""
    means = np.full((11, 11), NAN)
    means[0, 1:], means[1, 2:] = np.linspace(0, 1, 10), np.linspace(0.03, 0.97, 9)
    axes = make_table(means.tolist(), [policy(i) for i in range(11)]).heat_map().axes[0]
    assert len(axes.texts) == 19
    for text in axes.texts:
        column, row = text.get_position()
        cell = cell_color(axes.images[0], 100 * means[round(row), round(column)])
        low, high = sorted((luminance(text.get_color()), luminance(cell)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, text.get_text()


def test_colours_of_the_heat_map_are_balanced() -> None:
    """An even score is almost white, and equal distances from it are about equally dark, in the two colours."""
    image = SYMMETRIC.heat_map().axes[0].images[0]
    shades = [luminance(cell_color(image, score)) for score in (50, 0, 100, 25, 75)]
    assert shades[0] > 0.9
    assert shades[1] == pytest.approx(shades[2], abs=0.05)
    assert shades[3] == pytest.approx(shades[4], abs=0.15)
    red, blue = cell_color(image, 10), cell_color(image, 90)
    assert red[0] > red[2]  # blue and red differ for colour-blind readers, too; green and red do not
    assert blue[2] > blue[0]


def test_axes_of_the_heat_map_are_named() -> None:
    """Who is row, who is column, and what the colours mean."""
    axes, bar = SYMMETRIC.heat_map().axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("column player", "row player  (rating)")
    assert "row player against" in bar.get_ylabel()
    assert "percent" in bar.get_ylabel()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_players", "name"),
    [(2, "{}"), (13, "step {},000,000"), (3, "{} is the name of a player that goes on and on and on"), (26, "step {}")],
)
def test_nothing_overlaps_on_the_heat_map(num_players: int, name: str) -> None:
    """Neither names of neighbours nor numbers, and all of it is inside of the picture."""
    players = [Player(name.format(i + 1), "disc") for i in range(num_players)]
    figure = make_table(np.full((num_players, num_players), 0.995).tolist(), players).heat_map()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes, bar = figure.axes
    boxes = {
        "rows": [label.get_window_extent() for label in axes.get_yticklabels()],
        "columns": [label.get_window_extent() for label in axes.get_xticklabels()],
        "numbers": [text.get_window_extent() for text in axes.texts],
    }
    for kind, extents in boxes.items():
        assert sum(one.overlaps(other) for one, other in pairwise(extents)) == 0, kind
    everything: list[BboxBase | None] = [*boxes["rows"], *boxes["columns"], axes.xaxis.label.get_window_extent()]
    everything += [axes.yaxis.label.get_window_extent(), axes.title.get_window_extent(), bar.get_tightbbox()]
    for box in everything:
        assert box is not None
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    assert max(len(label.get_text()) for label in axes.get_xticklabels()) <= 32
    assert len({label.get_text() for label in axes.get_xticklabels()}) == num_players
