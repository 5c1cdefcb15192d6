"""Statistics over seeds and tasks.

Single tasks: Student's t interval of the mean, which holds its 95% with few seeds. Pooled tasks: the stratified
percentile bootstrap of Agarwal et al. 2021 ("Deep reinforcement learning at the edge of the statistical precipice",
https://arxiv.org/abs/2108.13264), which is too narrow with few seeds (`docs/benchmark.md` has its coverage). Resampling
has a fixed seed: the same numbers give the same intervals.

A run without a result (it crashed or diverged) counts as the worst; it is never dropped (`benchmark.runs`). Its score
is NaN where no worst score is known.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import t as student_t
from scipy.stats import trim_mean

RESAMPLES = 10_000
Statistic = Callable[[np.ndarray], np.ndarray]  # reduces the last axis


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """IQM over the last axis: the mean without the floor(n / 4) lowest and highest of n values (section 4.3)."""
    return np.asarray(trim_mean(np.where(np.isnan(values), -np.inf, values), 0.25, axis=-1))


def collapsed(returns: np.ndarray) -> np.ndarray:
    """Which evaluations (..., t) of runs are below 60% of their run's best one so far, if that is positive."""
    best = np.fmax.accumulate(returns, axis=-1)
    return ~(returns >= np.where(best > 0.0, 0.6 * best, -np.inf))  # NaN counts as one


def student_half(std: Any, n: int) -> Any:
    """Half of Student's 95% t interval of the mean of n values, two or more, with this sample standard deviation."""
    return student_t.ppf(0.975, n - 1) * std / np.sqrt(n)


def student_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ends of Student's 95% t interval of the mean over the last axis, which needs two values."""
    half = student_half(values.std(-1, ddof=1), values.shape[-1])
    return values.mean(-1) - half, values.mean(-1) + half


def crossed_interval(scores: np.ndarray) -> tuple[float, float]:
    """Ends of the 95% t interval of the mean of scores (n, m) of n runs against m other runs.

    The variances of the row and column means add up; the degrees of freedom are Welch's.
    """
    parts = [scores.mean(1 - axis).var(ddof=1) / scores.shape[axis] for axis in (0, 1)]
    if sum(parts) == 0.0:
        return float(scores.mean()), float(scores.mean())
    freedom = sum(parts) ** 2 / sum(part**2 / (n - 1) for part, n in zip(parts, scores.shape, strict=True))
    half = float(student_t.ppf(0.975, freedom) * np.sqrt(sum(parts)))
    return float(scores.mean()) - half, float(scores.mean()) + half


def bootstrap_interval(
    statistic: Statistic,
    strata: Sequence[np.ndarray],
    resamples: int = RESAMPLES,
    minus: Sequence[np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the 95% percentile-bootstrap interval of a statistic of all strata together (section 4.1).

    A stratum is a task: its runs (..., n), whose number may differ, are resampled with replacement among themselves.
    All points of the leading axes see the same resamples, and the two ends have these axes. With `minus`, the strata of
    other runs, it is the interval of the difference: the statistic of `strata` less that of `minus`.
    """
    rng = np.random.default_rng(0)

    def resampled(strata: Sequence[np.ndarray]) -> np.ndarray:
        draws = [values[..., rng.integers(values.shape[-1], size=(resamples, values.shape[-1]))] for values in strata]
        return statistic(np.concatenate(draws, axis=-1))

    low, high = np.percentile(resampled(strata) - (resampled(minus) if minus else 0.0), [2.5, 97.5], axis=-1)
    return low, high


def win_interval(probability: float, n: int, m: int) -> tuple[float, float]:
    """Ends of the 95% score interval of P(X > Y) + P(X = Y) / 2 from n and m runs; it has a width at 0 and 1, too.

    All probabilities that the observed one does not reject, by the variance of Hanley and McNeil (1982) with both
    numbers of runs replaced by their mean, as method 5 of Newcombe (2006, https://doi.org/10.1002/sim.2324).
    """
    p = np.linspace(0.0, 1.0, 10_001)
    others = (n + m) / 2 - 1
    variance = p * (1 - p) * (1 + others * (1 - p) / (2 - p) + others * p / (1 + p)) / (n * m)
    accepted = p[np.abs(p - probability) <= 1.96 * np.sqrt(variance) + 1e-9]
    return float(accepted.min()), float(accepted.max())


def probability_of_improvement(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """How likely a run of ours beats one of theirs: P(X > Y) + P(X = Y) / 2, averaged over tasks (section 4.3).

    Takes the scores (n,) and (m,) of both sets of runs for each task. Returns the probability and the ends of its 95%
    interval. One task has the score interval. Several tasks have the wider of two intervals at each end: the percentile
    bootstrap over the runs of each task and set, and the tasks' score intervals combined (Zou and Donner 2008,
    https://doi.org/10.1002/sim.3095). The bootstrap has no width where all runs of one set win.
    """
    rng = np.random.default_rng(0)
    rows, resampled = [], []
    for x, y in zip(ours, theirs, strict=True):
        x, y = (np.where(np.isnan(values), -np.inf, values) for values in (x, y))
        wins = (x[:, None] > y) + 0.5 * (x[:, None] == y)  # (n, m)
        # of each run in each resample
        shares = [rng.multinomial(n, np.full(n, 1 / n), RESAMPLES) / n for n in wins.shape]
        rows.append((float(wins.mean()), *win_interval(float(wins.mean()), *wins.shape)))
        resampled.append((shares[0] @ wins * shares[1]).sum(-1))
    if len(rows) == 1:
        return rows[0]
    means, lows, highs = np.transpose(rows)
    low, high = np.percentile(np.mean(resampled, axis=0), [2.5, 97.5])
    low = min(low, means.mean() - np.linalg.norm(means - lows) / len(rows))
    high = max(high, means.mean() + np.linalg.norm(highs - means) / len(rows))
    return float(means.mean()), float(max(0.0, low)), float(min(1.0, high))


def performance_profile(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Share of the runs (..., n) whose score exceeds each threshold (t,): (..., t) (section 4.2)."""
    return (scores[..., None, :] > thresholds[:, None]).mean(-1)
