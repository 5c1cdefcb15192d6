"""Statistics over seeds and tasks, after Agarwal et al. 2021 ("Deep reinforcement learning at the edge of the statistical
precipice", https://arxiv.org/abs/2108.13264). Resampling starts from a fixed seed: the same numbers give the same intervals.
"""

from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 10_000
Statistic = Callable[[np.ndarray], np.ndarray]  # reduces the last axis


def mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis."""
    return values.mean(-1)


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """IQM over the last axis: the mean without the floor(n / 4) lowest and as many highest of n values (section 4.3)."""
    cut = values.shape[-1] // 4
    return np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut].mean(-1)


def interval(
    statistic: Statistic, strata: Sequence[np.ndarray], resamples: int = RESAMPLES
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the 95% percentile-bootstrap interval of a statistic of all strata together (section 4.1).

    A stratum is a task: its runs (..., n), whose number may differ, are resampled with replacement among themselves. All
    points of the leading axes see the same resamples, and the two ends have these axes.
    """
    rng = np.random.default_rng(0)
    resampled = [values[..., rng.integers(values.shape[-1], size=(resamples, values.shape[-1]))] for values in strata]
    low, high = np.percentile(statistic(np.concatenate(resampled, axis=-1)), [2.5, 97.5], axis=-1)
    return low, high


def probability_of_improvement(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """How likely a run of ours beats one of theirs: P(X > Y) + P(X = Y) / 2, averaged over tasks (section 4.3).

    Takes the scores (n,) and (m,) of both sets of runs for each task. Returns the probability and the ends of its 95%
    percentile-bootstrap interval, for which the runs of each task and set are resampled among themselves.
    """
    rng = np.random.default_rng(0)
    probabilities, resampled = [], []
    for x, y in zip(ours, theirs, strict=True):
        wins = 0.5 + 0.5 * np.sign(x[:, None] - y)  # (n, m)
        shares = [
            rng.multinomial(n, np.full(n, 1 / n), RESAMPLES) / n for n in wins.shape
        ]  # of each run in each resample
        probabilities.append(wins.mean())
        resampled.append((shares[0] @ wins * shares[1]).sum(-1))
    low, high = np.percentile(np.mean(resampled, axis=0), [2.5, 97.5])
    return float(np.mean(probabilities)), float(low), float(high)
