"""Ratings of players from the games that they played, on the Elo scale: 400 points are odds of 10.

Two kinds. The online kind follows a learner: after each game a rating moves by k times the surprise (Elo 1978, The Rating of
Chessplayers, Past and Present). The offline kind rates players that stay as they are, from all their games at once: the
maximum-likelihood strengths of Bradley and Terry (1952, https://doi.org/10.2307/2334029), with bootstrap intervals. Both have
one model: the points that a player takes from an opponent are in expectation those of `expected_score`. A win is a point, and
a draw half a point to either side.

A game of any number of teams rates as one game between every two of them, won by the one with the higher score
(`game_scores`).
"""

import math
from itertools import combinations
from typing import TypeVar

import numpy as np

Number = TypeVar("Number", float, np.ndarray)

ELO_PER_NAT = 400.0 / math.log(10.0)  # rating points of one unit of log-odds
Z_95 = 1.959963984540054  # the 97.5% quantile of the normal distribution


def expected_score(rating: Number, opponent_rating: Number) -> Number:
    """Expected points of a game, in (0, 1): `1 / (1 + 10^((opponent_rating - rating) / 400))` (Elo 1978). Arrays broadcast."""
    return 1.0 / (1.0 + 10.0 ** ((opponent_rating - rating) / 400.0))


def elo_change(rating: Number, opponent_rating: Number, score: Number, k: float) -> Number:
    """What a game adds to the rating of a player who took `score` points of it (1, 0.5 or 0), and takes from the opponent's.

    `k` is the largest change that a game can make, in rating points.
    """
    return k * (score - expected_score(rating, opponent_rating))


def game_scores(scores: np.ndarray) -> np.ndarray:
    """The points of row against column, of a game in which the team with the higher score beats the one with the lower.

    Takes scores (..., num_teams), and returns points (..., num_teams, num_teams): 1 for a win, 0.5 for a draw (equal scores),
    0 for a loss, nan on the diagonal. ValueError if a score is nan, as that wins, draws and loses against nothing.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if np.isnan(scores).any():
        raise ValueError("the scores of a game must be numbers, and one of them is nan")
    row, column = scores[..., :, None], scores[..., None, :]
    points = np.where(row == column, 0.5, row > column)  # (..., num_teams, num_teams)
    points[..., np.eye(scores.shape[-1], dtype=bool)] = np.nan
    return points


def all_reach_all(edges: np.ndarray) -> bool:
    """Whether a path leads from every node to every other, in every graph of `edges` (..., n, n) bool, from row to column."""
    num_nodes = edges.shape[-1]
    reach = edges | np.eye(num_nodes, dtype=bool)
    for _ in range(num_nodes.bit_length()):  # each squaring doubles the length of the paths
        reach = reach.astype(np.float32) @ reach.astype(np.float32) > 0
    return bool(reach.all())


def fit_bradley_terry(results: np.ndarray, mean: float = 1200.0, prior_games: float = 1.0) -> np.ndarray:
    """Maximum-likelihood ratings (..., n), in Elo points, of the Bradley-Terry model. Their mean is `mean`.

    `results` (..., n, n) are the points of row against column summed over games, so `results[i, j] + results[j, i]` games were
    played between i and j. The diagonal is not read. Leading dimensions are independent problems. Only pairs that played count,
    so that two roles which never meet their own kind can be rated, too. `prior_games` drawn games are added to every pair that
    played: they keep the rating of a player who won all games finite; 0 is the plain maximum likelihood.

    Newton's method, with the step length `log(1 + d) / d`, where d is the largest change in the log-odds of a pair that played.
    Along the step the third derivative of the loss is at most d times the second, which bounds the loss from above; this length
    minimises the bound, so that the method converges from any start, and in the end quadratically, as the length tends to 1
    (Sun and Tran-Dinh 2019, https://arxiv.org/abs/1703.04599; logistic losses are their case nu = 2).

    ValueError if results have another shape, or are negative or not finite; if some players are not connected by games, which
    leaves their ratings relative to each other open; or if with `prior_games=0` no finite ratings are the most likely
    (Ford 1957, https://doi.org/10.2307/2308513).
    """
    results = np.asarray(results, dtype=np.float64)
    if results.ndim < 2 or results.shape[-1] != results.shape[-2] or results.shape[-1] == 0:
        raise ValueError(f"results must be of shape (..., n, n) for n players, not {results.shape}")
    results = np.where(np.eye(results.shape[-1], dtype=bool), 0.0, results)
    games = results + results.swapaxes(-1, -2)
    if not np.isfinite(games).all() or (results < 0).any():
        raise ValueError("results must be finite numbers of points, 0 or more")
    if not 0.0 <= prior_games < math.inf:
        raise ValueError(f"prior_games must be a finite number, 0 or more, not {prior_games}")
    played = games > 0
    if not all_reach_all(played):
        raise ValueError("results must connect all players by games, directly or through who played whom")
    if prior_games == 0 and not all_reach_all(results > 0):
        raise ValueError(
            "with prior_games=0 every player must have taken points from every other, directly or through others"
        )
    points = results + 0.5 * prior_games * played
    games = points + points.swapaxes(-1, -2)

    strengths = np.zeros(results.shape[:-1])  # (..., n), in nats; the first player's stays 0
    for _ in range(200):
        log_odds = strengths[..., :, None] - strengths[..., None, :]
        win = np.exp(-np.logaddexp(0.0, -log_odds))  # (..., n, n), cannot overflow
        lose = win.swapaxes(-1, -2)
        gradient = (points * lose - points.swapaxes(-1, -2) * win).sum(-1)
        weights = games * win * lose
        hessian = -weights  # of the negative log-likelihood
        np.einsum("...ii->...i", hessian)[...] = weights.sum(-1)
        change = np.zeros_like(strengths)
        change[..., 1:] = np.linalg.solve(hessian[..., 1:, 1:], gradient[..., 1:, None])[..., 0]
        largest = (np.abs(change[..., :, None] - change[..., None, :]) * played).max((-1, -2))[..., None]  # (..., 1)
        strengths += change * np.log1p(largest) / np.maximum(largest, 1e-300)
        if largest.max(initial=0.0) < 1e-8:
            break
    else:
        raise ValueError("results must not differ so widely in size that the most likely ratings cannot be computed")
    return mean + ELO_PER_NAT * (strengths - strengths.mean(-1, keepdims=True))


def bootstrap_ratings(
    scores: np.ndarray,
    num_resamples: int = 1000,
    seed: int = 0,
    games_per_score: int = 1,
    mean: float = 1200.0,
    prior_games: float = 0.1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bradley-Terry ratings and the ends of their 95% percentile-bootstrap intervals, each (n,), in Elo points.

    `scores` (n, n, num_games) are the points of row against column, game by game, with `scores[j, i] = 1 - scores[i, j]`, and
    nan where there was no game: numbers in [0, 1]. A score may be the mean of games that depend on each other, such as two from
    one seed with the sides swapped: `games_per_score` then says how many, and they are resampled together. Every resample
    draws, with replacement, as many scores of each pair of players as it has (Efron and Tibshirani 1993, An Introduction to the
    Bootstrap, chapters 8 and 13), and is fitted anew by `fit_bradley_terry`, which `mean` and `prior_games` go to.

    An interval is that of the rating relative to the mean of all players. All resamples of a pair that one side won throughout
    are alike, so that an interval is too narrow for a player known only by such games. The default `prior_games` is smaller
    than that of `fit_bradley_terry`, as draws between players far apart pull their ratings together: with 8 players that span
    2000 points, and 64 games a pair, the intervals held 95% of the true ratings, and 46% with one drawn game a pair.

    ValueError if scores are of another shape, out of range or at odds with each other, and where `fit_bradley_terry` raises it.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 3 or scores.shape[0] != scores.shape[1]:
        raise ValueError(f"scores must be of shape (n, n, num_games) for n players, not {scores.shape}")
    if ((scores < 0) | (scores > 1)).any() or not np.allclose(scores.swapaxes(0, 1), 1.0 - scores, equal_nan=True):
        raise ValueError(
            "scores must be from 0 to 1 with scores[j, i] = 1 - scores[i, j], or nan where there was no game"
        )
    if num_resamples < 1 or games_per_score < 1:
        raise ValueError(
            f"num_resamples and games_per_score must be 1 or more, not {num_resamples} and {games_per_score}"
        )
    rng = np.random.default_rng(seed)
    results = np.zeros((1 + num_resamples, *scores.shape[:2]))  # the first are those of the games as they were played
    for i, j in combinations(range(len(scores)), 2):
        games = scores[i, j][~np.isnan(scores[i, j])]
        results[0, i, j] = games.sum()
        results[1:, i, j] = rng.choice(games, (num_resamples, games.size)).sum(-1)
        results[:, j, i] = games.size - results[:, i, j]
    ratings = fit_bradley_terry(games_per_score * results, mean, prior_games)  # (1 + num_resamples, n)
    low, high = np.percentile(ratings[1:], [2.5, 97.5], axis=0)
    return ratings[0], low, high


def score_interval(scores: np.ndarray) -> tuple[float, float, float]:
    """Mean of independent scores (num_scores,) in [0, 1], and the ends of its 95% interval.

    The interval of Wilson (1927, https://doi.org/10.2307/2276774), which for wins and losses alone it is, with the effective
    number of scores in place of their number, as surveys do it (Kish 1965, Survey Sampling; Franco et al. 2019,
    https://doi.org/10.1093/jssam/smy019). Scores with draws, or means of two games, vary less than wins and losses of the same
    mean, and each of them is worth more in proportion. That ratio is steadied by z^2 scores at which it is 1, of variance 1/4,
    the weight and the variance with which 1/2 enters Wilson's interval: so there is a width even if all games were drawn.

    ValueError if there are no scores, or they are of another shape or out of range.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 1 or scores.size == 0 or not ((scores >= 0) & (scores <= 1)).all():
        raise ValueError("scores must be a list of one or more numbers from 0 to 1")
    mean, z2 = float(scores.mean()), Z_95**2
    wins_and_losses = mean * (1.0 - mean)  # the variance of wins and losses with this mean, the largest that there is
    ratio = (scores.size * scores.var() + z2 / 4) / (scores.size * wins_and_losses + z2 / 4)
    effective = scores.size / float(ratio)
    centre = (effective * mean + z2 / 2) / (effective + z2)
    half_width = math.sqrt(z2 * (effective * wins_and_losses + z2 / 4)) / (effective + z2)
    return mean, max(centre - half_width, 0.0), min(centre + half_width, 1.0)
