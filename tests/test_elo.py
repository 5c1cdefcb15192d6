"""Ratings: hand-computed cases, other people's fits, exact distributions, and simulated players of known strength."""

import math
import time
from itertools import combinations, product
from typing import Any

import choix
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import expit
from scipy.stats import binom, binomtest, multinomial

from utils.elo import bootstrap_ratings, elo_change, expected_score, fit_bradley_terry, game_scores, score_interval

ratings_strategy = st.floats(-3000, 3000)
results_strategy = st.integers(2, 6).flatmap(
    lambda n: arrays(np.float64, (n, n), elements=st.integers(0, 1000).map(float))
)


def play(ratings: np.ndarray, num_games: int, draws: float, rng: np.random.Generator) -> np.ndarray:
    """Scores (n, n, num_games) of players with these ratings; `draws` is the share of draws among the other games."""
    scores = np.full((len(ratings), len(ratings), num_games), np.nan)
    for i, j in combinations(range(len(ratings)), 2):
        strong = expit(abs(ratings[i] - ratings[j]) * math.log(10) / 400)
        drawn = 2 * draws * (1 - strong)  # half of them are taken from the wins of either side
        points = rng.choice([1.0, 0.5, 0.0], num_games, p=[strong - drawn / 2, drawn, 1 - strong - drawn / 2])
        scores[i, j] = points if ratings[i] >= ratings[j] else 1 - points
        scores[j, i] = 1 - scores[i, j]
    return scores


# --- online Elo ---


def test_expected_score_by_hand() -> None:
    """400 points are odds of 10 to 1, 800 points of 100 to 1."""
    assert expected_score(1600.0, 1200.0) == pytest.approx(10 / 11)
    assert expected_score(1200.0, 1600.0) == pytest.approx(1 / 11)
    assert expected_score(1300.0, 1300.0) == 0.5
    table = expected_score(np.array([[1200.0], [2000.0]]), np.array([1200.0, 2000.0]))
    np.testing.assert_allclose(table, [[0.5, 1 / 101], [100 / 101, 0.5]])


def test_elo_change_by_hand() -> None:
    """The loser's expectation, times k; a draw moves equals nowhere."""
    assert elo_change(1200.0, 1200.0, 1.0, 32.0) == pytest.approx(16)
    assert elo_change(1600.0, 1200.0, 1.0, 11.0) == pytest.approx(1)
    assert elo_change(1600.0, 1200.0, 0.0, 11.0) == pytest.approx(-10)
    assert elo_change(1600.0, 1200.0, 0.5, 11.0) == pytest.approx(-4.5)
    assert elo_change(1200.0, 1200.0, 0.5, 32.0) == 0


@given(ratings_strategy, ratings_strategy, st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 100), st.floats(-500, 500))
def test_elo_change_properties(rating: float, opponent: float, score: float, k: float, shift: float) -> None:
    """What one side wins the other loses; only the difference of ratings counts; no change exceeds k."""
    change = elo_change(rating, opponent, score, k)
    assert elo_change(opponent, rating, 1 - score, k) == pytest.approx(-change, abs=1e-9)
    assert elo_change(rating + shift, opponent + shift, score, k) == pytest.approx(change, abs=1e-9)
    assert abs(change) <= k
    assert change >= 0 or score < 1
    assert change <= 0 or score > 0


def test_online_elo_comes_near_the_fit() -> None:
    """Players of fixed strength: the online ratings, averaged over the later games, are near the fit of all games."""
    rng = np.random.default_rng(0)
    strengths = np.array([900.0, 1050.0, 1150.0, 1300.0, 1600.0])
    ratings, total, results = np.full(5, 1200.0), np.zeros(5), np.zeros((5, 5))
    for game in range(30_000):
        i, j = rng.choice(5, 2, replace=False)
        score = float(rng.random() < expit((strengths[i] - strengths[j]) * math.log(10) / 400))
        change = elo_change(ratings[i], ratings[j], score, 8.0)
        ratings[i] += change
        ratings[j] -= change
        results[i, j] += score
        results[j, i] += 1 - score
        total += ratings if game >= 10_000 else 0
    fit = fit_bradley_terry(results)
    np.testing.assert_allclose(total / 20_000, fit, atol=20)
    np.testing.assert_allclose(fit, strengths, atol=20)
    assert ratings.mean() == pytest.approx(1200)


# --- games of any number of teams ---


def test_game_scores_by_hand() -> None:
    """Three teams, two of them level; a batch of games of two teams."""
    nan = math.nan
    np.testing.assert_array_equal(game_scores(np.array([3.0, -1.0, 3.0])), [[nan, 1, 0.5], [0, nan, 0], [0.5, 1, nan]])
    batch = np.array([[[1, 0]], [[0, math.inf]], [[7, 7]]])
    expected = [[[[nan, 1], [0, nan]]], [[[nan, 0], [1, nan]]], [[[nan, 0.5], [0.5, nan]]]]
    np.testing.assert_array_equal(game_scores(batch), expected)
    with pytest.raises(ValueError, match="nan"):
        game_scores(np.array([1.0, nan]))


@given(arrays(np.float64, st.tuples(st.integers(0, 3), st.integers(1, 4)), elements=st.integers(-2, 2).map(float)))
def test_game_scores_properties(scores: np.ndarray) -> None:
    """Every game between two teams hands out one point, and its results add up to what a fit takes."""
    points = game_scores(scores)
    assert points.shape == (*scores.shape, scores.shape[-1])
    off_diagonal = ~np.eye(scores.shape[-1], dtype=bool)
    np.testing.assert_array_equal((points + points.swapaxes(-1, -2))[..., off_diagonal], 1)
    assert np.isnan(points[..., ~off_diagonal]).all()
    if len(scores) > 0:
        ratings = fit_bradley_terry(points.sum(0))
        assert ratings[np.nansum(points, (0, 2)).argmax()] == pytest.approx(ratings.max())


# --- Bradley-Terry ---


def test_fit_by_hand() -> None:
    """Two players, and trees of them, whose ratings differ by 400 log10 of the odds that each pair had."""
    apart = fit_bradley_terry(np.array([[0.0, 30.0], [10.0, 0.0]]), mean=1000.0, prior_games=0.0)
    np.testing.assert_allclose(apart, [1000 + 200 * math.log10(3), 1000 - 200 * math.log10(3)])
    won_all = fit_bradley_terry(np.array([[0.0, 10.0], [0.0, 0.0]]))  # and one draw: 10.5 to 0.5
    np.testing.assert_allclose(won_all, [1200 + 200 * math.log10(21), 1200 - 200 * math.log10(21)])
    drawn = fit_bradley_terry(np.full((4, 4), 3.5))
    np.testing.assert_allclose(drawn, 1200)
    chain = fit_bradley_terry(np.array([[math.nan, 3, 0], [1, math.nan, 9], [0, 1, math.nan]]), prior_games=0)
    np.testing.assert_allclose(-np.diff(chain), [400 * math.log10(3), 400 * math.log10(9)])
    chain = fit_bradley_terry(np.array([[math.nan, 3, 0], [1, math.nan, 9], [0, 1, math.nan]]), prior_games=2)
    np.testing.assert_allclose(-np.diff(chain), [400 * math.log10(2), 400 * math.log10(5)])
    np.testing.assert_array_equal(fit_bradley_terry(np.zeros((1, 1)), mean=7.0), [7.0])


@pytest.mark.parametrize("bipartite", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_fit_against_choix(bipartite: bool, seed: int) -> None:
    """A second implementation that knows only won games: a win counts as two, a draw as one for each side."""
    rng = np.random.default_rng(seed)
    num_players = 7
    strengths = rng.normal(0, 250, num_players)
    results, wins = np.zeros((num_players, num_players)), []
    for i, j in combinations(range(num_players), 2):
        if bipartite and (i < 3) == (j < 3):
            continue
        for _ in range(rng.integers(10, 40)):
            score = (
                rng.choice([0, 0.5, 1])
                if rng.random() < 0.4
                else rng.random() < expit((strengths[i] - strengths[j]) / 174)
            )
            results[i, j] += score
            results[j, i] += 1 - score
            wins += [(i, j)] * int(2 * score) + [(j, i)] * int(2 - 2 * score)
    ratings = fit_bradley_terry(results, mean=0.0, prior_games=0.0)
    for reference in (
        choix.opt_pairwise(num_players, wins, tol=1e-12),
        choix.ilsr_pairwise(num_players, wins, tol=1e-12),
    ):
        np.testing.assert_allclose(ratings, 400 / math.log(10) * (reference - reference.mean()), atol=1e-3)


@given(results_strategy, st.sampled_from([0.01, 1.0, 10.0]))
@settings(max_examples=200, deadline=None)
def test_fit_solves_the_likelihood_equations(results: np.ndarray, prior_games: float) -> None:
    """The likelihood is concave: its only maximum is where every player's expected points are those that it has."""
    results[0, 1:] += 1  # connects all
    ratings = fit_bradley_terry(results, 1500.0, prior_games)
    np.fill_diagonal(results, 0)
    games = results + results.T
    drawn = prior_games * (games > 0)
    expected = (games + drawn) * expit((ratings[:, None] - ratings) * math.log(10) / 400)
    np.testing.assert_allclose(expected.sum(1), (results + drawn / 2).sum(1), rtol=1e-6, atol=1e-6)
    assert ratings.mean() == pytest.approx(1500)


@given(results_strategy, st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_fit_symmetries(results: np.ndarray, random: Any) -> None:
    """Reversed results mirror the ratings, renamed players keep theirs, and a batch is its members."""
    results[0, 1:] += 1
    ratings = fit_bradley_terry(results)
    order = random.sample(range(len(results)), len(results))
    batch = np.stack([[results, results.T], [results[np.ix_(order, order)], 3 * results]])
    expected = [[ratings, 2400 - ratings], [ratings[order], fit_bradley_terry(3 * results)]]
    np.testing.assert_allclose(fit_bradley_terry(batch), expected, atol=1e-4)
    assert fit_bradley_terry(batch[:0]).shape == (0, 2, len(results))


@pytest.mark.parametrize("points", [1e2, 1e6, 1e12])
def test_fit_is_found_from_far_away(points: float) -> None:
    """A chain of thirty players, each of whom won every game against the next."""
    ratings = fit_bradley_terry(np.diag(np.full(29, points), k=1))
    np.testing.assert_allclose(-np.diff(ratings), 400 * math.log10(2 * points + 1), rtol=1e-9)


def test_fit_converges_where_full_newton_steps_diverge() -> None:
    """Few and one-sided games between some pairs, many between others; the equations are those of the test above."""
    results = np.zeros((5, 5))
    for i, j, won in ((0, 2, 139), (0, 3, 33), (1, 4, 2), (2, 1, 142), (3, 0, 4747), (3, 1, 1), (3, 4, 36)):
        results[i, j] = won
    points = results + 0.5 * (results + results.T > 0)
    ratings = fit_bradley_terry(results)
    expected = (points + points.T) * expit((ratings[:, None] - ratings) * math.log(10) / 400)
    np.testing.assert_allclose(expected.sum(1), points.sum(1), rtol=1e-9)


@pytest.mark.parametrize(
    ("results", "prior_games", "message"),
    [
        (np.ones(3), 1.0, "shape"),
        (np.ones((2, 3)), 1.0, "shape"),
        (np.ones((0, 0)), 1.0, "shape"),
        (np.array([[0, -1], [2, 0]]), 1.0, "0 or more"),
        (np.array([[0, math.nan], [2, 0]]), 1.0, "finite"),
        (np.array([[0, math.inf], [2, 0]]), 1.0, "finite"),
        (np.ones((2, 2)), -1.0, "prior_games"),
        (np.ones((2, 2)), math.nan, "prior_games"),
        (np.zeros((2, 2)), 1.0, "connect"),
        (np.kron(np.eye(2), np.ones((2, 2))), 1.0, "connect"),  # two couples
        (np.stack([np.ones((4, 4)), np.kron(np.eye(2), np.ones((2, 2)))]), 1.0, "connect"),
        (np.array([[0, 3], [0, 0]]), 0.0, "prior_games=0"),
        (np.triu(np.ones((3, 3))), 0.0, "prior_games=0"),
        (
            np.array([[0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 1], [0, 0, 1, 0]]),
            0.0,
            "prior_games=0",
        ),  # no one is unbeaten
    ],
)
def test_fit_refuses(results: np.ndarray, prior_games: float, message: str) -> None:
    """One sentence for what cannot be rated."""
    with pytest.raises(ValueError, match=message) as error:
        fit_bradley_terry(results, prior_games=prior_games)
    assert "\n" not in str(error.value)


# --- bootstrap ---


@pytest.mark.parametrize("games_per_score", [1, 2])
def test_bootstrap_of_two_players_is_binomial(games_per_score: int) -> None:
    """The points of a resample of 48 wins in 64 scores are binomial, and the ratings a function of them."""
    scores = np.full((2, 2, 80), math.nan)  # sixteen games were not played
    scores[0, 1, :48], scores[0, 1, 48:64] = 1, 0
    scores[1, 0] = 1 - scores[0, 1]
    ratings, low, high = bootstrap_ratings(scores, 4000, 3, games_per_score, mean=1000.0, prior_games=1.0)

    def rating(wins: float) -> float:
        points = games_per_score * np.array([wins, 64 - wins]) + 0.5
        return 1000 + 200 * math.log10(points[0] / points[1])

    assert ratings[0] == pytest.approx(rating(48))
    for end, quantile in ((low[0], 0.025), (high[0], 0.975)):
        wins = binom.ppf(quantile, 64, 0.75)
        assert rating(wins - 1.01) < end < rating(wins + 1.01)
    np.testing.assert_allclose(low + high[::-1], 2000)


def test_bootstrap_keeps_pairs_of_games_together() -> None:
    """If the two sides of a seed always split the points, there is no variance; single games have much."""
    together = np.full((2, 2, 32), 0.5)
    apart = np.stack([np.stack([together[0, 0].repeat(2), np.tile([0.0, 1.0], 32)]), np.tile([1.0, 0.0], (2, 32))])
    apart[1, 1] = 0.5
    _, low, high = bootstrap_ratings(together, 100, games_per_score=2)
    np.testing.assert_allclose([low, high], 1200)
    _, low, high = bootstrap_ratings(apart, 100)
    assert (high - low > 40).all()


def test_bootstrap_is_determined_by_its_seed_and_rates_the_games_themselves() -> None:
    """The ratings are those of the fit, whatever the resamples; a role that never meets its own kind is rated, too."""
    scores = play(np.array([1000.0, 1200.0, 1150.0, 1450.0]), 20, 0.3, np.random.default_rng(0))
    scores[:2, :2] = scores[2:, 2:] = math.nan
    first, again, other = (bootstrap_ratings(scores, 50, seed, prior_games=1.0) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first[1] != other[1]).all()
    results = np.nan_to_num(scores).sum(-1)
    np.testing.assert_allclose([first[0], other[0]], [fit_bradley_terry(results)] * 2)
    assert ((first[1] < first[0]) & (first[0] < first[2])).all()


@pytest.mark.parametrize(("span", "num_games", "draws"), [(400, 24, 0.0), (400, 24, 0.6), (2000, 64, 0.0)])
def test_bootstrap_intervals_hold_the_truth(span: float, num_games: int, draws: float) -> None:
    """95% intervals hold the known ratings of simulated players about that often, also with one-sided pairs."""
    rng = np.random.default_rng(0)
    truth = 1200 + np.linspace(-span / 2, span / 2, 8)
    held = []
    for seed in range(60):
        _, low, high = bootstrap_ratings(play(truth, num_games, draws, rng), 200, seed)
        held.append((low <= truth) & (truth <= high))
    assert 0.9 < np.mean(held) < 0.98


def test_bootstrap_is_quick() -> None:
    """A thousand resamples of sixteen players with 64 games a pair: less than a second on one core."""
    scores = play(np.linspace(800, 1600, 16), 64, 0.2, np.random.default_rng(0))
    start = time.process_time()
    bootstrap_ratings(scores, 1000)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        (np.full((2, 2), 0.5), {}, "shape"),
        (np.full((2, 3, 4), 0.5), {}, "shape"),
        (np.full((2, 2, 4), 0.6), {}, "1 - scores"),
        (np.array([[[0.5], [2.0]], [[-1.0], [0.5]]]), {}, "0 to 1"),
        (np.array([[[0.5], [1.0]], [[math.nan], [0.5]]]), {}, "1 - scores"),
        (np.full((2, 2, 4), math.nan), {}, "connect"),
        (np.full((2, 2, 4), 0.5), {"num_resamples": 0}, "num_resamples"),
        (np.full((2, 2, 4), 0.5), {"games_per_score": 0}, "games_per_score"),
    ],
)
def test_bootstrap_refuses(scores: np.ndarray, options: dict[str, int], message: str) -> None:
    """One sentence for scores that are none."""
    with pytest.raises(ValueError, match=message) as error:
        bootstrap_ratings(scores, **options)
    assert "\n" not in str(error.value)


# --- the interval of a mean score ---


@pytest.mark.parametrize(("wins", "num_games"), [(0, 1), (1, 1), (0, 10), (3, 10), (64, 64), (400, 1000)])
def test_score_interval_of_wins_and_losses_is_wilsons(wins: int, num_games: int) -> None:
    """SciPy's interval, also where all games were won or lost."""
    mean, low, high = score_interval(np.repeat([1.0, 0.0], [wins, num_games - wins]))
    reference = binomtest(wins, num_games).proportion_ci(method="wilson")
    assert (mean, low, high) == pytest.approx((wins / num_games, reference.low, reference.high))
    assert low < high


def test_score_interval_of_draws() -> None:
    """Draws narrow the interval, in many games to that of the central limit theorem, but never to nothing."""
    _, low, high = score_interval(np.full(32, 0.5))
    wilson = binomtest(16, 32).proportion_ci(method="wilson")
    assert wilson.low < low < 0.49
    assert low + high == pytest.approx(1)
    mean, low, high = score_interval(np.repeat([1.0, 0.5, 0.0], [4_000, 5_000, 1_000]))
    assert mean == pytest.approx(0.65)
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt((0.4 + 0.5 / 4 - 0.65**2) / 10_000), rel=1e-3)


@pytest.mark.parametrize(
    ("values", "chances"),
    [
        ((0, 0.5, 1), (0.25, 0.5, 0.25)),
        ((0, 0.5, 1), (0.02, 0.9, 0.08)),
        ((0, 0.5, 1), (0.0, 0.05, 0.95)),
        ((0, 0.5, 1), (0.005, 0.095, 0.9)),
        ((0, 0.75, 1), (0.0, 0.1, 0.9)),
        ((0, 0.5, 1), (0.1, 0.0, 0.9)),
    ],
)
@pytest.mark.parametrize("num_scores", [10, 32])
def test_score_interval_holds_the_truth(values: tuple[float, ...], chances: tuple[float, ...], num_scores: int) -> None:
    """The exact chance that the interval holds the expected score, summed over all counts of losses, draws and wins."""
    coverage, truth = 0.0, float(np.dot(values, chances))
    for losses, draws in product(range(num_scores + 1), repeat=2):
        counts = [losses, draws, num_scores - losses - draws]
        chance = multinomial.pmf(counts, num_scores, chances) if counts[2] >= 0 else 0.0
        if chance > 0:
            _, low, high = score_interval(np.repeat(values, counts))
            coverage += chance * (low <= truth <= high)
    assert coverage > 0.92


@given(arrays(np.float64, st.integers(1, 50), elements=st.sampled_from([0, 0.25, 0.5, 0.75, 1])))
def test_score_interval_properties(scores: np.ndarray) -> None:
    """An interval in [0, 1] about the mean, mirrored if the sides are."""
    mean, low, high = score_interval(scores)
    assert 0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1
    assert score_interval(1 - scores) == pytest.approx((1 - mean, 1 - high, 1 - low))


@pytest.mark.parametrize("scores", [np.array([]), np.ones((2, 2)), np.array([0.5, math.nan]), np.array([1.5])])
def test_score_interval_refuses(scores: np.ndarray) -> None:
    """One sentence for what is no list of scores."""
    with pytest.raises(ValueError, match="from 0 to 1"):
        score_interval(scores)
