"""Ratings on the Elo scale: a difference of 400 points means odds of 10 to 1.

There are two kinds of rating:
- Online Elo follows a learner. After each game a rating changes by k times the difference between the score and the
  expected score (Elo 1978, The Rating of Chessplayers, Past and Present).
- The Bradley-Terry fit rates players that do not change, from all their games at once. It is the maximum-likelihood
  estimate of Bradley and Terry (1952, https://doi.org/10.2307/2334029), with bootstrap confidence intervals.

Both use the same model: the expected score of a game is `expected_score`. A win scores 1 and a draw scores 1/2.

A game of more than two teams counts as one game between every two of them; the team with the higher score wins
(`game_scores`). Online, only the learner's pairs are rated.
"""

import math
from itertools import combinations
from typing import TypeVar

import numpy as np

Number = TypeVar("Number", float, np.ndarray)

ELO_PER_NAT = 400.0 / math.log(10.0)  # rating points for one unit of log-odds
Z_95 = 1.959963984540054  # the 97.5% quantile of the normal distribution


def expected_score(rating: Number, opponent_rating: Number) -> Number:
    """Expected score of a game, in (0, 1): `1 / (1 + 10^((opponent_rating - rating) / 400))`. Arrays broadcast."""
    return 1.0 / (1.0 + 10.0 ** ((opponent_rating - rating) / 400.0))


def elo_change(rating: Number, opponent_rating: Number, score: Number, k: float) -> Number:
    """Change of a player's rating after a game with this score (1, 0.5 or 0). The opponent's changes by its negative.

    `k` is the largest change of one game, in rating points.
    """
    return k * (score - expected_score(rating, opponent_rating))


def game_scores(scores: np.ndarray) -> np.ndarray:
    """Turns the scores of the teams into pairwise results: the team with the higher score beats the other.

    Takes scores (..., num_teams) and returns results (..., num_teams, num_teams) of row against column: 1 for a win,
    0.5 for a draw (equal scores), 0 for a loss, nan on the diagonal. Raises ValueError if a score is nan.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if np.isnan(scores).any():
        raise ValueError("the scores of a game must be numbers, and one of them is nan")
    row, column = scores[..., :, None], scores[..., None, :]
    points = np.where(row == column, 0.5, row > column)  # (..., num_teams, num_teams)
    points[..., np.eye(scores.shape[-1], dtype=bool)] = np.nan
    return points


def all_reach_all(edges: np.ndarray) -> bool:
    """Whether each graph of `edges` (..., n, n), from row to column, has a path from every node to every other."""
    num_nodes = edges.shape[-1]
    reach = edges | np.eye(num_nodes, dtype=bool)
    for _ in range(num_nodes.bit_length()):  # each squaring doubles the length of the paths
        reach = reach.astype(np.float32) @ reach.astype(np.float32) > 0
    return bool(reach.all())


def fit_bradley_terry(results: np.ndarray, mean: float = 1200.0, prior_games: float = 1.0) -> np.ndarray:
    """Maximum-likelihood ratings (..., n) of the Bradley-Terry model, in Elo points. Their mean is `mean`.

    `results` (..., n, n) holds the total score of row against column, so `results[i, j] + results[j, i]` is the number
    of games between i and j. The diagonal is ignored. Leading dimensions are independent problems. Pairs that never
    met do not enter, so two roles that never play their own kind can be rated as well. `prior_games` drawn games are
    added to every pair that met. With them the rating of a player who won every game is finite; 0 gives the plain
    maximum likelihood.

    The optimiser is Newton's method with step length `log(1 + d) / d`, where d is the largest change of the log-odds
    of a pair that met. Along the step, the third derivative of the loss is at most d times the second. This gives an
    upper bound on the loss, and the step length minimises that bound. So the method converges from any start, and
    quadratically near the optimum, where the step length tends to 1 (Sun and Tran-Dinh 2019,
    https://arxiv.org/abs/1703.04599; logistic losses are their case nu = 2).

    Raises ValueError if `results` has a wrong shape, is negative or is not finite; if games do not connect all players,
    because their relative ratings are then undefined; or if `prior_games` is 0 and the maximum-likelihood ratings are
    infinite (Ford 1957, https://doi.org/10.2307/2308513).
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
        raise ValueError("with prior_games=0 each player must have taken points from each other, or through others")
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
    """Bradley-Terry ratings and the bounds of their 95% percentile-bootstrap intervals, each (n,), in Elo points.

    `scores` (n, n, num_games) holds the score of row against column in each game, in [0, 1], with
    `scores[j, i] = 1 - scores[i, j]`, and nan where no game was played. A score may be the mean of several dependent
    games, such as two games from one seed with the sides swapped. `games_per_score` is their number, and they are
    resampled together. Each resample draws, with replacement, as many scores for each pair as the pair has (Efron and
    Tibshirani 1993, An Introduction to the Bootstrap, chapters 8 and 13). `fit_bradley_terry` then fits it; `mean` and
    `prior_games` are passed on.

    An interval is for the rating relative to the mean of all players. If one side won every game of a pair, all
    resamples of that pair are equal. If a group of players won all its games against the others, the intervals of all
    players are too narrow, since ratings are relative to the mean. The default
    `prior_games` is smaller than in `fit_bradley_terry`, because added draws between distant players pull their
    ratings together: for 8 players that span 2000 points, with 64 games a pair, the intervals covered 95% of the true
    ratings, but 46% with one added draw a pair.

    Raises ValueError if `scores` has a wrong shape, is out of range or is inconsistent, and where `fit_bradley_terry`
    raises it.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 3 or scores.shape[0] != scores.shape[1]:
        raise ValueError(f"scores must be of shape (n, n, num_games) for n players, not {scores.shape}")
    if ((scores < 0) | (scores > 1)).any() or not np.allclose(scores.swapaxes(0, 1), 1.0 - scores, equal_nan=True):
        raise ValueError("scores must be from 0 to 1 with scores[j, i] = 1 - scores[i, j], or nan without a game")
    if num_resamples < 1 or games_per_score < 1:
        raise ValueError(f"num_resamples and games_per_score must be 1 or more, not {num_resamples}, {games_per_score}")
    rng = np.random.default_rng(seed)
    results = np.zeros((1 + num_resamples, *scores.shape[:2]))  # row 0: the games as played
    for i, j in combinations(range(len(scores)), 2):
        games = scores[i, j][~np.isnan(scores[i, j])]
        results[0, i, j] = games.sum()
        results[1:, i, j] = rng.choice(games, (num_resamples, games.size)).sum(-1)
        results[:, j, i] = games.size - results[:, i, j]
    ratings = fit_bradley_terry(games_per_score * results, mean, prior_games)  # (1 + num_resamples, n)
    low, high = np.percentile(ratings[1:], [2.5, 97.5], axis=0)
    return ratings[0], low, high


def score_interval(scores: np.ndarray) -> tuple[float, float, float]:
    """Mean of independent scores (num_scores,) in [0, 1], and the bounds of its 95% confidence interval.

    For wins and losses it is the interval of Wilson (1927, https://doi.org/10.2307/2276774). For other scores it uses
    the effective number of scores, as surveys do (Kish 1965, Survey Sampling; Franco et al. 2019,
    https://doi.org/10.1093/jssam/smy019). Draws, and means of two games, have a smaller variance than wins and losses
    with the same mean. The effective number is larger by the ratio of these two variances. To make the ratio stable,
    z^2 scores with variance 1/4 are added to both; Wilson's interval adds 1/2 with the same weight and variance. So
    the interval has a width even if all games were drawn.

    Raises ValueError if there are no scores, or if they have a wrong shape or are out of range.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 1 or scores.size == 0 or not ((scores >= 0) & (scores <= 1)).all():
        raise ValueError("scores must be a list of one or more numbers from 0 to 1")
    mean, z2 = float(scores.mean()), Z_95**2
    wins_and_losses = mean * (1.0 - mean)  # variance of wins and losses with this mean
    ratio = (scores.size * scores.var() + z2 / 4) / (scores.size * wins_and_losses + z2 / 4)
    effective = scores.size / float(ratio)
    centre = (effective * mean + z2 / 2) / (effective + z2)
    half_width = math.sqrt(z2 * (effective * wins_and_losses + z2 / 4)) / (effective + z2)
    return mean, max(centre - half_width, 0.0), min(centre + half_width, 1.0)
