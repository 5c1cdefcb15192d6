"""Matches: who sits where, whose result a game is, and whose actions it receives."""

import gc
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor, nn
from toy_policies import NUM_BITS, OBS_DIM, Mirror, ToyAgent, make_pool

from utils.elo import game_scores
from utils.matches import CURRENT, Matches
from utils.policy_stack import PolicyStack
from utils.snapshot_pool import Snapshot, SnapshotPool
from utils.team_env import Team, TeamStep

Layout = Sequence[tuple[str, str, int]]  # of teams: name, behaviour, number of agents
DUEL: Layout = (("left", "disc", 1), ("right", "disc", 1))
DOUBLES: Layout = (("left", "disc", 2), ("right", "disc", 2))
HUNT: Layout = (("hunters", "hunter", 2), ("prey", "prey", 1))
TRIO: Layout = (("red", "disc", 1), ("green", "disc", 1), ("blue", "disc", 1))
RAID: Layout = (("red", "raider", 2), ("keep", "guard", 3), ("blue", "raider", 2))
LAYOUTS = pytest.mark.parametrize(
    "layout", [DUEL, DOUBLES, HUNT, TRIO, RAID], ids=["duel", "doubles", "hunt", "trio", "raid"]
)


def make_teams(layout: Layout, branches: tuple[int, ...] = (), action_dim: int = 2) -> tuple[Team, ...]:
    """Teams of agents that nobody asks for their names."""
    return tuple(
        Team(name, behavior, tuple(f"{name}_{k}" for k in range(size)), OBS_DIM, action_dim, branches)
        for name, behavior, size in layout
    )


def make_matches(layout: Layout, num_games: int, marks: int = 3, latest_ratio: float = 0.0, **rules: Any) -> Matches:
    """Each behaviour's pool has a stream of its own."""
    behaviors = dict.fromkeys(behavior for _, behavior, _ in layout)
    pools = {b: make_pool(5, latest_ratio, seed=seed, marks=marks) for seed, b in enumerate(behaviors)}
    return Matches(make_teams(layout), num_games, pools, **rules)


def marks_in_play(matches: Matches) -> list[list[float | None]]:
    """Of the opponents in each game, a team; None is the learner."""
    return [[None if s is None else float(s.weights["mark"]) for s in seats] for seats in matches.opponents]


def check_seats(matches: Matches) -> None:
    """Everybody sits on a team of their behaviour, the learner on just one, and the two records agree."""
    for game, seats in enumerate(matches.opponents):
        assert [s is None for s in seats] == [t == matches.learner_team[game] for t in range(len(seats))]
        assert matches.uids[game].tolist() == [-1 if s is None else s.uid for s in seats]
        assert matches.behaviors[matches.learner_team[game]] == matches.learner


# --- who sits where ---


@LAYOUTS
def test_seats_at_the_start(layout: Layout) -> None:
    """The first behaviour learns; its sides are shared out over the games, and all other seats have opponents."""
    matches = make_matches(layout, 6)
    check_seats(matches)
    sides = [t for t, (_, behavior, _) in enumerate(layout) if behavior == layout[0][1]]
    assert matches.learner_team.tolist() == [sides[game % len(sides)] for game in range(6)]
    for seats in matches.opponents:
        for (_, behavior, _), snapshot in zip(layout, seats, strict=True):
            assert snapshot is None or snapshot in matches.pools[behavior].snapshots


@LAYOUTS
def test_the_learner_changes_sides_after_each_game(layout: Layout) -> None:
    """In a game that ends, and in no other; where a role has one team only, it stays."""
    matches = make_matches(layout, 3)
    sides = [t for t, (_, behavior, _) in enumerate(layout) if behavior == layout[0][1]]
    before = matches.learner_team.copy()
    for number in range(1, 6):
        others = [seats[:] for seats in matches.opponents[:1] + matches.opponents[2:]]
        matches.finish(1, game_scores(np.arange(len(layout), dtype=float)))
        check_seats(matches)
        assert matches.learner_team.tolist() == [
            before[0],
            sides[(sides.index(before[1]) + number) % len(sides)],
            before[2],
        ]
        assert matches.opponents[:1] + matches.opponents[2:] == others


@pytest.mark.parametrize(("side", "team"), [("left", 0), ("right", 1)])
@pytest.mark.parametrize("swap_steps", [0, 10**9])
def test_a_fixed_side(side: str, team: int, swap_steps: int) -> None:
    """Is kept; of the other teams of its behaviour the learner plays none."""
    matches = make_matches(DUEL, 4, learner_side=side, swap_steps=swap_steps)
    for game in [0, 1, 2, 3, 3, 0]:
        assert matches.learner_team.tolist() == [team] * 4
        matches.finish(game, game_scores(np.array([1.0, 0.0])))
        check_seats(matches)
    roles = make_matches(HUNT, 2, learner_side="prey")  # of another role: the hunters play where they can
    assert roles.learner_team.tolist() == [0, 0]
    roles.give_turn("prey")
    assert roles.learner_team.tolist() == [1, 1]
    raid = make_matches(RAID, 3, learner_side="blue")
    raid.finish(0, game_scores(np.zeros(3)))
    check_seats(raid)
    assert raid.learner_team.tolist() == [2, 2, 2]


@LAYOUTS
def test_opponents_are_kept_until_enough_ghost_steps(layout: Layout) -> None:
    """Also across the change of sides: who sat on the learner's new team takes its old one, and roles keep theirs."""
    matches = make_matches(layout, 2, swap_steps=10)
    for pool in matches.pools.values():
        pool.latest_ratio = 1.0
    for pool in matches.pools.values():
        pool.add({"mark": torch.tensor(99.0)}, 99, 1200.0)  # whoever is drawn from now on
    first = [sorted(seats) for seats in matches.uids.tolist()]
    roles = [t for t, behavior in enumerate(matches.behaviors) if behavior != matches.learner]
    before = matches.uids[:, roles]
    matches.ghost_steps = 9
    for _ in range(5):
        matches.finish(0, game_scores(np.zeros(len(layout))))
        check_seats(matches)
        assert [sorted(seats) for seats in matches.uids.tolist()] == first
        assert (matches.uids[:, roles] == before).all()
    matches.ghost_steps = 10
    matches.finish(0, game_scores(np.zeros(len(layout))))
    check_seats(matches)
    marks = marks_in_play(matches)
    assert {mark for mark in marks[0] if mark is not None} == {99.0}
    assert 99.0 not in marks[1]  # its game goes on
    matches.ghost_steps = 19
    for pool in matches.pools.values():
        pool.add({"mark": torch.tensor(100.0)}, 100, 1200.0)
    matches.finish(0, game_scores(np.zeros(len(layout))))  # nine steps after it drew
    matches.finish(1, game_scores(np.zeros(len(layout))))
    marks = marks_in_play(matches)
    assert {mark for mark in marks[0] if mark is not None} == {99.0}
    assert {mark for mark in marks[1] if mark is not None} == {100.0}


def test_three_opponents_keep_their_places() -> None:
    """By hand: the learner goes round a table of three, and changes places with whom it meets."""
    matches = make_matches(TRIO, 1, swap_steps=10**9)
    a, b = Snapshot({}, 0, 1200.0), Snapshot({}, 0, 1200.0)
    matches.opponents[0], matches.uids[0] = [None, a, b], [-1, a.uid, b.uid]
    for expected in ([a, None, b], [a, b, None], [None, b, a]):
        matches.next_game(0)
        assert matches.opponents[0] == expected
        check_seats(matches)


def test_a_learner_that_changes_seats_with_its_own_side() -> None:
    """Two teams of each side share a behaviour, and opponents are kept: the learner and its team-mate change places."""
    layout = (("a", "red"), ("b", "red"), ("c", "blue"), ("d", "blue"))
    teams = tuple(Team(name, "disc", (name,), OBS_DIM, 2, (), side) for name, side in layout)
    matches = Matches(teams, 1, {"disc": make_pool(5, 0.0, seed=0, marks=3)}, swap_steps=10**9)
    c, d = matches.opponents[0][2:]
    assert matches.opponents[0] == [None, CURRENT, c, d]
    expected = [[CURRENT, None, c, d], [d, c, None, CURRENT], [d, c, CURRENT, None], [None, CURRENT, c, d]]
    for learner_team, seats in zip([1, 2, 3, 0], expected, strict=True):
        matches.next_game(0)
        assert matches.learner_team.tolist() == [learner_team]
        assert matches.opponents[0] == seats
        check_seats(matches)


@pytest.mark.parametrize("swap_steps", [0, 10**9])
def test_new_opponents_in_every_game_or_never(swap_steps: int) -> None:
    """Drawn from the pool as it is then, over and over; and with the same frequencies as the pool draws."""
    matches = make_matches(DUEL, 1, marks=4, swap_steps=swap_steps)
    drawn = []
    for _ in range(2_000):
        matches.finish(0, game_scores(np.zeros(2)))
        drawn += [mark for mark in marks_in_play(matches)[0] if mark is not None]
    counts = np.bincount(np.array(drawn, dtype=int), minlength=4)
    if swap_steps == 0:
        assert chisquare(counts).pvalue > 1e-3
    else:
        assert sorted(counts) == [0, 0, 0, 2_000]


def test_results_of_another_learner_are_forgotten() -> None:
    """Scores of one role's games say nothing to another role; a resume forgets none. Two roles only meet each other."""
    layout: Layout = (("red", "a", 1), ("green", "b", 1), ("blue", "c", 1))
    raid: Layout = (("red", "b", 1), ("keep", "a", 1), ("blue", "b", 1))  # b meets a and itself
    for teams, is_kept in ((layout, False), (raid, False), (layout[:2], True)):
        matches = make_matches(teams, 1)
        matches.give_turn("a")
        matches.pools["b"].latest.record(1.0)
        matches.load_state_dict(matches.state_dict())
        assert list(matches.pools["b"].latest.results) == [1.0]
        matches.give_turn("b")
        again = make_matches(teams, 1)
        again.give_turn("a")
        again.pools["b"].latest.record(0.5)
        again.load_state_dict(matches.state_dict())
        assert again.learner == "b"
        assert list(again.pools["b"].latest.results) == [0.5]
        assert list(matches.pools["b"].latest.results) == ([1.0] if is_kept else [])
        assert matches.pools["b"].latest.mean_score == (0.75 if is_kept else 0.5)


@pytest.mark.parametrize(
    ("layout", "swap_steps"),
    [(DUEL, {"disc": 250}), (HUNT, {"hunter": 125, "prey": 500}), (TRIO, {"disc": 500}), (RAID, {"raider": 625})],
)
def test_swaps_per_turn(layout: Layout, swap_steps: dict[str, int]) -> None:
    """Four swaps in 1000 learner steps, in the turn of every role: 1000 / 4, times the ghosts for each learner.

    And in twice the steps of the last role, if its turns are that long.
    """
    team_change = dict.fromkeys(swap_steps, 1000)
    for factor in (1, 2):
        team_change[list(swap_steps)[-1]] *= factor
        matches = make_matches(layout, 2, swaps_per_turn=4.0, turn_steps=team_change)
        for behavior, steps in [*swap_steps.items()] * 2:
            matches.give_turn(behavior)
            assert matches.swap_steps == steps * team_change[behavior] / 1000


# --- turns of roles ---


def test_the_turn_of_a_role() -> None:
    """The learner gets the rating of its newest snapshot and new opponents; a role at rest keeps its rating."""
    matches = make_matches(HUNT, 5, marks=3, latest_ratio=1.0)
    hunters, prey = matches.pools["hunter"], matches.pools["prey"]
    hunters.latest.rating, prey.latest.rating = 1300.0, 1150.0
    matches.give_turn("hunter")
    assert (matches.learner, matches.rating, matches.learner_teams) == ("hunter", 1300.0, [0])
    matches.finish(2, game_scores(np.array([2.0, 0.0])))
    assert matches.rating > 1300.0
    assert prey.latest.rating + matches.rating == pytest.approx(2450.0)
    assert matches.rating_of("hunter") == matches.rating
    assert matches.rating_of("prey") == prey.latest.rating
    hunters.add({"mark": torch.tensor(8.0)}, 8, matches.rating)
    ratings = matches.rating, prey.latest.rating
    matches.give_turn("prey")
    check_seats(matches)
    assert (matches.rating_of("hunter"), matches.rating) == ratings
    assert matches.learner_team.tolist() == [1] * 5
    assert marks_in_play(matches) == [[8.0, None]] * 5
    matches.finish(0, game_scores(np.array([2.0, 0.0])))
    assert matches.rating < ratings[1]
    assert matches.rating_of("hunter") == hunters.latest.rating > ratings[0]


# --- ratings ---


def test_results_and_ratings_by_hand() -> None:
    """The learner at 1200 beats 1000 (expected 0.7597), draws with 1400 (0.2403), and loses to 1200 (1/2)."""
    matches = make_matches(DUEL, 3, elo_k=32.0)
    a, b, c = matches.pools["disc"].snapshots
    a.rating, b.rating = 1000.0, 1400.0
    matches.rating = 1200.0
    matches.opponents = [[None, a], [b, None], [None, c]]
    matches.finish(0, game_scores(np.array([0.3, -5.0])))
    gain = 32 * (1 - 0.7597469)
    assert (matches.rating, a.rating) == pytest.approx((1200 + gain, 1000 - gain))
    matches.rating = 1200.0
    matches.finish(1, game_scores(np.array([7.0, 7.0])))
    gain = 32 * (0.5 - 0.2402531)
    assert (matches.rating, b.rating) == pytest.approx((1200 + gain, 1400 - gain))
    matches.rating, matches.learner_team[2], matches.opponents[2] = 1200.0, 1, [c, None]
    matches.finish(2, game_scores(np.array([0.1, 0.0])))
    assert (matches.rating, c.rating) == pytest.approx((1184, 1216))
    assert [(s.games, list(s.results)) for s in (a, b, c)] == [(1, [1.0]), (1, [0.5]), (1, [0.0])]
    assert [s.mean_score for s in (a, b, c)] == [0.75, 0.5, 0.25]  # of two games, one of them drawn


def test_games_that_end_in_one_step_keep_their_own_results() -> None:
    """The first is won and the third is lost; the second goes on."""
    matches = make_matches(DUEL, 3)
    snapshots = matches.pools["disc"].snapshots
    matches.opponents = [[None, snapshot] for snapshot in snapshots]
    never = [np.zeros((3, 1), dtype=bool)] * 2
    over, scores = np.array([True, False, True]), np.array([[1.0, 0.0], [np.nan, np.nan], [0.0, 1.0]])
    result = TeamStep([], [], [np.zeros((3, 1))] * 2, never, never, over, scores)
    matches.finish_games(SimpleNamespace(), result, np.zeros(3, dtype=bool))
    assert [list(snapshot.results) for snapshot in snapshots] == [[1.0], [], [0.0]]


def test_more_than_two_teams_are_rated_pairwise() -> None:
    """From the learner's rating before the game, each pair with half the weight: a draw with 1400, a win over 1200."""
    matches = make_matches(TRIO, 2, elo_k=32.0)
    a, b, c = matches.pools["disc"].snapshots
    a.rating, b.rating, matches.rating, matches.learner_team[1] = 1400.0, 1200.0, 1200.0, 1
    matches.opponents[1] = [a, None, b]
    matches.finish(1, game_scores(np.array([3.0, 3.0, -1.0])))
    of_a, of_b = 16 * (0.5 - 0.2402531), 16 * 0.5
    assert (a.rating, b.rating, c.rating) == pytest.approx((1400 - of_a, 1200 - of_b, 1200))
    assert matches.rating == pytest.approx(1200 + of_a + of_b)
    assert (list(a.results), list(b.results), a.games, b.games) == ([0.5], [1.0], 1, 1)


@LAYOUTS
def test_games_that_are_not_rated(layout: Layout) -> None:
    """They change no rating, no count and no metric, and the next game begins as after any other."""
    matches, rated = make_matches(layout, 3), make_matches(layout, 3)
    before = {s.uid: vars(s) | {"results": list(s.results)} for p in matches.pools.values() for s in p.snapshots}
    for game in (1, 1, 2):
        matches.finish(game, game_scores(np.arange(len(layout), dtype=float)), rated=False)
        rated.finish(game, game_scores(np.arange(len(layout), dtype=float)))
        check_seats(matches)
    after = {s.uid: vars(s) | {"results": list(s.results)} for p in matches.pools.values() for s in p.snapshots}
    assert after == before
    assert matches.rating == 1200.0
    assert "selfplay/games" not in matches.metrics()
    assert marks_in_play(matches) == marks_in_play(rated)


@given(
    layout=st.sampled_from([DUEL, HUNT, TRIO, RAID]),
    swap_steps=st.sampled_from([0, 3, 10**6]),
    sampling=st.sampled_from(["uniform", "prioritized"]),
    moves=st.lists(
        st.one_of(
            st.tuples(st.integers(0, 3), st.lists(st.integers(-1, 1), min_size=3, max_size=3)),
            st.sampled_from(["snapshot", "turn", "steps"]),
        ),
        max_size=40,
    ),
)
@settings(max_examples=60, deadline=None)
def test_matches_credit_who_played(layout: Layout, swap_steps: int, sampling: str, moves: list[Any]) -> None:
    """The sum of ratings is constant, games are counted where they were played, and seats stay in order."""
    behaviors = list(dict.fromkeys(behavior for _, behavior, _ in layout))
    pools = {b: make_pool(2, 0.2, sampling, marks=2) for b in behaviors}
    matches = Matches(make_teams(layout), 4, pools, swap_steps=swap_steps)
    everyone = [snapshot for pool in pools.values() for snapshot in pool.snapshots]
    played: Counter[int] = Counter()
    forgotten: Counter[int] = Counter()  # of these games
    for move in moves:
        total = matches.rating + sum(s.rating for s in everyone)
        if move == "snapshot":
            pool = pools[matches.learner]
            everyone.append(pool.add({}, pool.latest.step + 1, matches.rating))
            total += matches.rating
        elif move == "turn":
            total -= matches.rating
            matches.give_turn(behaviors[(behaviors.index(matches.learner) + 1) % len(behaviors)])
            if layout == RAID:  # raiders meet guards and raiders
                forgotten |= {s.uid: s.games for pool in pools.values() for s in pool.snapshots}
            total += pools[matches.learner].latest.rating
        elif move == "steps":
            matches.ghost_steps += 2
        else:
            game, scores = move
            played.update(s.uid for s in matches.opponents[game] if s is not None)
            matches.finish(game, game_scores(np.array(scores[: len(layout)], dtype=float)))
        check_seats(matches)
        assert matches.rating + sum(s.rating for s in everyone) == pytest.approx(total)
        assert Counter({s.uid: s.games for s in everyone}) == Counter({s.uid: 0 for s in everyone}) + played
        assert all(len(s.results) == s.games - forgotten[s.uid] for s in everyone)


def test_metrics_by_hand() -> None:
    """Opponents as they were before their games; the games since the last call; all ratings in any case."""
    matches = make_matches(HUNT, 2, latest_ratio=1.0, elo_k=100.0)
    old, newer, newest = matches.pools["prey"].snapshots
    old.rating, newer.rating, newest.rating = 1000.0, 1400.0, 1234.0
    old.step, newer.step, newest.step, matches.rating = 100, 400, 500, 1200.0
    matches.opponents = [[None, old], [None, newer]]
    assert matches.opponent_steps().tolist() == [100, 400]
    matches.finish(0, game_scores(np.array([1.0, 0.0])))
    matches.finish(1, game_scores(np.array([1.0, 1.0])))
    metrics = matches.metrics()
    ratings = {"selfplay/rating_hunter": matches.rating, "selfplay/rating_prey": 1234.0}
    assert metrics == pytest.approx(
        ratings
        | {
            "selfplay/win_rate": 0.75,
            "selfplay/opponent_rating_mean": 1200.0,
            "selfplay/opponent_rating_std": 200.0,
            "selfplay/opponent_age": 250.0,
            "selfplay/games": 2.0,
        }
    )
    assert matches.metrics() == ratings
    matches.lengths, matches.returns = [3, 4, 11], [1.0, -1.0, 6.0]
    metrics = matches.metrics()
    assert (metrics["charts/episodic_length"], metrics["charts/episodic_return"]) == (6.0, 2.0)


def test_returns_are_those_of_the_learners_team() -> None:
    """Sums over a game, means over the team's agents; games that were cut or restarted are left out."""
    matches = make_matches(DOUBLES, 2, learner_side="left", game_length=100.0)

    def step(rewards: list[list[float]], over: list[bool], cut: list[bool]) -> None:
        own, never = np.array(rewards), [np.zeros((2, 2), dtype=bool)] * 2
        result = TeamStep([], [], [own, 100.0 + own], never, never, np.array(over), np.zeros((2, 2)))
        matches.cut_games(result)
        matches.finish_games(SimpleNamespace(restart=lambda games: []), result, np.array(cut))

    step([[1.0, 3.0], [5.0, 5.0]], [False, False], [False, True])
    step([[2.0, 2.0], [7.0, 9.0]], [True, False], [False, False])
    step([[50.0, 50.0], [1.0, 1.0]], [False, True], [False, False])
    assert matches.returns == [2.0 + 2.0, 8.0 + 1.0]
    matches.begin_anew(1)
    step([[0.5, 1.5], [4.0, 4.0]], [True, True], [False, False])
    assert matches.returns[2:] == [1.0, 4.0]


def test_restarts_before_any_game_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing would be rated. The warning comes once."""
    matches = make_matches(DOUBLES, 2)
    for _ in range(2):
        matches.begin_anew(1)
        matches.some_ended = True
    assert capsys.readouterr().err == ""
    for _ in range(3):
        matches.begin_anew(1)
    assert capsys.readouterr().err.count("restart the games before one of them ends: raise --checkpoint-freq") == 1


def test_the_age_of_opponents_is_that_of_snapshots() -> None:
    """A scripted player has none."""
    matches = make_matches(HUNT, 2, latest_ratio=1.0)
    matches.finished = [(1.0, 1200.0, 250.0), (0.0, 1200.0, np.nan)]
    assert matches.metrics()["selfplay/opponent_age"] == 250.0


@pytest.mark.parametrize(("swap_steps", "is_told"), [(29, True), (30, False), (0, False)])
def test_swaps_that_are_shorter_than_a_game(swap_steps: int, is_told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The steps of all opponents in games of ten steps count; told once."""
    matches = make_matches(HUNT, 3, swap_steps=swap_steps)
    for _ in range(2):
        matches.lengths, matches.returns = [10], [0.0]
        matches.metrics()
    assert capsys.readouterr().err.count("so opponents change after every game") == is_told


def test_the_oldest_opponent_of_each_game() -> None:
    """Of several it is the one that counts."""
    matches = make_matches(TRIO, 2)
    a, b, c = matches.pools["disc"].snapshots
    matches.opponents = [[None, b, c], [c, None, a]]
    assert matches.opponent_steps().tolist() == [1, 0]
    assert matches.oldest_opponent() == a.step
    matches.pools["disc"].add({"mark": torch.tensor(9.0)}, 9, 1200.0)
    matches.pools["disc"].snapshots.popleft()
    assert matches.oldest_opponent() == b.step
    rivals = {"disc": make_pool(5, 0.0, seed=0, marks=2)}  # of --opponents: they never leave, and have no age
    matches = make_matches(TRIO, 2, rivals=rivals)
    rivals["disc"].snapshots[0].step = 7
    assert matches.oldest_opponent() == 0
    matches.finish(0, game_scores(np.zeros(3)))
    assert "selfplay/opponent_age" not in matches.metrics()


# --- who acts where ---


@dataclass
class Table:
    """The face of a game that `Matches` reads."""

    teams: tuple[Team, ...]
    num_games: int
    alive: list[np.ndarray] = field(default_factory=list)
    action_masks: list[np.ndarray | None] = field(default_factory=list)


def lay_table(layout: Layout, num_games: int, discrete: bool, rng: np.random.Generator) -> tuple[Any, list[np.ndarray]]:
    """Observations are [game, team, agent, step]; some agents have left; all actions but the last are legal."""
    table = Table(make_teams(layout, (3, NUM_BITS - 3) if discrete else (), 1 + OBS_DIM + 2), num_games)
    obs = []
    for t, team in enumerate(table.teams):
        size = len(team.agents)
        places = np.stack(np.meshgrid(np.arange(num_games), t, np.arange(size), 17, indexing="ij"), axis=-1)
        obs.append(places.reshape(num_games, size, OBS_DIM).astype(np.float32))
        table.alive.append(rng.random((num_games, size)) < 0.7)
        is_last = discrete and t == len(layout) - 1
        table.action_masks.append(rng.random((num_games, size, NUM_BITS)) < 0.5 if discrete and not is_last else None)
    return table, obs


@LAYOUTS
@pytest.mark.parametrize("discrete", [False, True])
def test_actions_reach_their_agents(layout: Layout, discrete: bool) -> None:
    """The learner's rows are those of its agents; each ghost acts by its own policy, place and mask."""
    rng = np.random.default_rng(0)
    table, obs = lay_table(layout, 7, discrete, rng)
    matches = make_matches(layout, 7, marks=5)
    agents = {behavior: Mirror() for behavior in matches.pools}
    for turn in (*matches.pools, next(iter(matches.pools))):
        matches.give_turn(turn)
        for game in rng.integers(7, size=5):
            matches.finish(int(game), game_scores(np.zeros(len(layout))))
        team_size = len(obs[matches.learner_teams[0]][0])
        rows = matches.of_learner(obs)
        places = [[game, team, k, 17] for game, team in enumerate(matches.learner_team) for k in range(team_size)]
        assert rows.tolist() == places
        assert matches.of_learner(table.alive).tolist() == [table.alive[team][game, k] for game, team, k, _ in places]
        learner_actions = np.hstack([np.full((len(rows), 1), 77), rows, np.zeros((len(rows), 2))])
        learner_actions = learner_actions.astype(np.int64 if discrete else np.float32)
        steps, ghosts_alive = matches.ghost_steps, 0
        actions = matches.all_actions(table, agents, obs, learner_actions)
        noise: dict[str, list[int]] = {behavior: [] for behavior in agents}
        marks = marks_in_play(matches)
        for t, (_, behavior, size) in enumerate(layout):
            assert actions[t].shape == (7, size, 1 + OBS_DIM + 2)
            assert actions[t].dtype == (np.int64 if discrete else np.float32)
            for game in range(7):
                for k in range(size):
                    mark, *place, legal, lot = actions[t][game, k].tolist()
                    assert place == [game, t, k, 17]
                    if t == matches.learner_team[game]:
                        assert mark == 77
                        continue
                    assert mark == marks[game][t]
                    mask = table.action_masks[t]
                    bits = np.ones(NUM_BITS, dtype=bool) if mask is None else mask[game, k]
                    assert legal == (sum(2**i for i in np.flatnonzero(bits)) if discrete else 0)
                    noise[behavior].append(lot)
                    ghosts_alive += int(table.alive[t][game, k])
        assert all(sorted(lots) == list(range(len(lots))) for lots in noise.values())
        assert matches.ghost_steps == steps + ghosts_alive


@pytest.mark.parametrize(
    ("layout", "turns"),
    [(DUEL, {"disc": 1}), (DOUBLES, {"disc": 2}), (TRIO, {"disc": 2}), (HUNT, {"hunter": 1, "prey": 2})],
)
def test_ghost_steps_are_counted_per_agent(layout: Layout, turns: dict[str, int]) -> None:
    """A step of all games, everyone alive: as many as there are agents that do not learn."""
    table, obs = lay_table(layout, 3, False, np.random.default_rng(0))
    table.alive = [np.ones_like(alive) for alive in table.alive]
    matches = make_matches(layout, 3)
    agents = {behavior: Mirror() for behavior in matches.pools}
    for behavior, ghosts in turns.items():
        matches.give_turn(behavior)
        before = matches.ghost_steps
        actions = np.zeros((len(matches.of_learner(obs)), 1 + OBS_DIM + 2), np.float32)
        for _ in range(4):
            matches.all_actions(table, agents, obs, actions)
        assert matches.ghost_steps - before == 4 * 3 * ghosts


def test_a_dropped_snapshot_plays_its_game_to_the_end() -> None:
    """And the result is its own; the next game is against who has taken its place."""
    table, obs = lay_table(DUEL, 1, False, np.random.default_rng(0))
    pool = make_pool(1, marks=1)
    matches = Matches(table.teams, 1, {"disc": pool})
    dropped = pool.latest
    newest = pool.add({"mark": torch.tensor(50.0)}, 50, 1300.0)

    def mark_in_action() -> float:
        actions = matches.all_actions(table, {"disc": Mirror()}, obs, np.full((1, 1 + OBS_DIM + 2), 77.0, np.float32))
        return float(actions[1 - matches.learner_team[0]][0, 0, 0])

    assert mark_in_action() == 0.0
    matches.finish(0, game_scores(np.array([0.0, 1.0])))
    assert (dropped.games, dropped.rating, list(dropped.results)) == (1, 1208.0, [0.0])
    assert (newest.games, newest.rating, list(newest.results)) == (0, 1300.0, [])
    assert mark_in_action() == 50.0


# --- the whole of it ---


class Fighter(ToyAgent):
    """Acts with its strength, in Elo points, and 0."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.tensor(1200.0))

    def forward(self, obs: Tensor) -> Tensor:
        """(n, 2)"""
        return torch.stack([self.strength.expand(len(obs)), torch.zeros(len(obs))], dim=1)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """None."""
        return torch.zeros(n, 2)

    def sample(self, outputs: Tensor, masks: Tensor, noise: Tensor | float) -> Tensor:
        """(n, 2)"""
        return outputs + noise


class Arena:
    """Games of different lengths between teams whose actions are their strengths, which alone decide who wins.

    It knows who plays from the actions alone: all strengths are different, and the learner adds 1 to its own.
    Each opponent plays its own game against the learner, whose end the scores tell. All games are recorded.
    """

    def __init__(self, layout: Layout, num_games: int, seed: int) -> None:
        self.teams, self.num_games = make_teams(layout), num_games
        self.alive = [np.ones((num_games, size), dtype=bool) for _, _, size in layout]
        self.action_masks: list[np.ndarray | None] = [None] * len(layout)
        self.obs = [np.zeros((num_games, size, OBS_DIM), np.float32) for _, _, size in layout]
        self.rng = np.random.default_rng(seed)
        self.left = self.rng.integers(1, 12, num_games)  # steps until each game ends
        self.players: list[list[float | None]] = [
            [] for _ in range(num_games)
        ]  # seen at its first step; None is the learner
        self.record: list[tuple[list[float | None], np.ndarray]] = []

    def step(self, actions: list[np.ndarray]) -> list[tuple[int, np.ndarray]]:
        """The games that are over, with their scores."""
        over = []
        self.left -= 1
        for game in range(self.num_games):
            for team_actions in actions:
                assert (team_actions[game] == team_actions[game][0]).all()  # all agents of a team are of one policy
            rows = [team_actions[game, 0].tolist() for team_actions in actions]
            players = [None if is_learner else strength for strength, is_learner in rows]
            self.players[game] = self.players[game] or players
            assert players == self.players[game]  # nobody is replaced in a running game
            if self.left[game] == 0:
                (own,) = (strength for strength, is_learner in rows if is_learner)
                chances = [0.5 if s is None else 1 / (1 + 10 ** ((own - s) / 400)) for s in players]
                points = np.where(self.rng.random(len(rows)) < chances, 1.0, -1.0)  # of an opponent
                points[[s is None for s in players]] = 0.0
                over.append((game, points))
                self.record.append((players, points))
                self.players[game], self.left[game] = [], self.rng.integers(1, 12)
        return over


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "swap_steps", "num_steps"),
    [(DUEL, 0, 2_000), (DUEL, 700, 500), (TRIO, 0, 400), (TRIO, 700, 400), (HUNT, 0, 500), (RAID, 300, 400)],
    ids=["duel", "duel-swaps", "trio", "trio-swaps", "hunt", "raid-swaps"],
)
def test_every_result_goes_to_the_snapshot_that_played(layout: Layout, swap_steps: int, num_steps: int) -> None:
    """64 games in flight while snapshots come and go: counts, scores and ratings are those of the games' own record.

    In the end the learner does not change any more, and ratings come near the true strengths.
    """
    arena: Any = Arena(layout, 64, seed=1)
    behaviors = list(dict.fromkeys(behavior for _, behavior, _ in layout))
    agents = {behavior: Fighter() for behavior in behaviors}
    pools = {b: make_pool(5, 0.3, seed=i) for i, b in enumerate(behaviors)}
    everyone: dict[float, Snapshot] = {}  # by strength
    ratings: dict[float, float] = {}  # the test's own

    def take_snapshot(behavior: str, rating: float) -> None:
        """Of the agent, which then changes: all strengths are different, and exact in float32."""
        strength = agents[behavior].strength
        everyone[strength.item()] = pools[behavior].add(agents[behavior].state_dict(), len(everyone), rating)
        ratings[strength.item()] = rating
        strength.data.fill_(1000.0 + 37 * len(everyone) % 400)

    for i, behavior in enumerate(behaviors):
        agents[behavior].strength.data.fill_(1200.5 + i)
        take_snapshot(behavior, 1200.0)
    matches = Matches(arena.teams, 64, pools, elo_k=8.0, swap_steps=swap_steps)
    rating, done = 1200.0, 0
    begins: Counter[float] = Counter()  # by strength the first game whose result has not been forgotten
    averages: dict[float, list[float]] = {}
    for step in range(num_steps):
        learner_actions = np.ones((len(matches.of_learner(arena.obs)), 2), np.float32)
        learner_actions[:, 0] = agents[matches.learner].strength.item()
        for game, scores in arena.step(matches.all_actions(arena, agents, arena.obs, learner_actions)):
            matches.finish(game, game_scores(scores))
        for players, points in arena.record[done:]:
            before = rating
            for strength, point in zip(players, points, strict=True):
                if strength is not None:  # Elo's formula, from the record alone
                    expected = 1 / (1 + 10 ** ((ratings[strength] - before) / 400))
                    change = 8.0 * ((point < 0) - expected) / (len(layout) - 1)
                    rating, ratings[strength] = rating + change, ratings[strength] - change
        done = len(arena.record)
        if step % 40 == 39 and step < 500:
            take_snapshot(matches.learner, matches.rating)
            if len(behaviors) > 1:
                if layout == RAID and behaviors[step // 40 % len(behaviors)] != matches.learner:
                    in_pools = [snapshot for pool in pools.values() for snapshot in pool.snapshots]
                    begins |= {float(snapshot.weights["strength"]): len(arena.record) for snapshot in in_pools}
                matches.give_turn(behaviors[step // 40 % len(behaviors)])
                rating = ratings[float(pools[matches.learner].latest.weights["strength"])]
                arena.players = [[]] * 64  # all games begin anew
        if step >= 1_000:
            for snapshot in pools["disc"].snapshots:
                averages.setdefault(float(snapshot.weights["strength"]), []).append(snapshot.rating - matches.rating)
    games = Counter(s for players, _ in arena.record for s in players if s is not None)
    assert {strength: snapshot.games for strength, snapshot in everyone.items()} == {s: games[s] for s in everyone}
    for strength, snapshot in everyone.items():
        games_of = (zip(players, points, strict=True) for players, points in arena.record[begins[strength] :])
        wins = [float(point < 0) for game in games_of for player, point in game if player == strength]
        assert list(snapshot.results) == wins[-100:]
    assert {strength: snapshot.rating for strength, snapshot in everyone.items()} == pytest.approx(ratings)
    assert matches.rating == pytest.approx(rating)
    assert len(everyone) > 10
    assert min(games.values()) > 0
    if averages:
        learner_strength = agents["disc"].strength.item()
        assert len(averages) == 5
        for strength, differences in averages.items():
            assert np.mean(differences) == pytest.approx(strength - learner_strength, abs=40)


@pytest.mark.slow
def test_a_long_run_keeps_nothing_but_the_pool_and_who_plays() -> None:
    """20,000 games and 500 snapshots: those that are gone are freed, and no container grows after the first quarter."""
    table, obs = lay_table(DUEL, 16, False, np.random.default_rng(0))
    pool = make_pool(10, 0.5, "prioritized", marks=10)
    matches = Matches(table.teams, 16, {"disc": pool}, swap_steps=50)
    agents, actions = {"disc": Mirror()}, np.zeros((16, 1 + OBS_DIM + 2), np.float32)
    born: list[weakref.ref[Snapshot]] = []
    tensors: list[weakref.ref[Tensor]] = []

    def entries(thing: Any) -> int:
        """All that its containers hold."""
        if isinstance(thing, (Matches, SnapshotPool, PolicyStack)):
            return entries(vars(thing))
        if isinstance(thing, dict):
            return sum(1 + entries(value) for value in thing.values())
        return sum(1 + entries(value) for value in thing) if isinstance(thing, (list, tuple, deque)) else 1

    sizes, alive = [], []
    for number in range(20_000):
        matches.finish(number * 7 % 16, game_scores(np.array([number % 3, 1.0])))
        if number % 40 == 0:
            pool.add({"mark": torch.tensor(float(number))}, number, matches.rating)
            born.append(weakref.ref(pool.latest))
            tensors.append(weakref.ref(pool.latest.weights["mark"]))
            matches.all_actions(table, agents, obs, actions)
        if number % 5_000 == 4_999:
            matches.metrics()
            gc.collect()
            sizes.append(entries(matches))
            alive.append(sum(ref() is not None for ref in born))
    assert len(born) == 500
    assert max(alive) <= 10 + 16
    assert sum(ref() is not None for ref in tensors) == alive[-1]
    assert max(sizes[1:]) <= sizes[0] + 16  # policies in the stack: as many as are in play
    assert all(len(s.results) <= 100 for s in pool.snapshots)
