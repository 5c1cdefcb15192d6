"""Past selves as opponents: a ring of snapshots of one policy, and how one of them is drawn."""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

Weights = Mapping[str, Tensor]
_uids = itertools.count()


@dataclass(eq=False)
class Snapshot:
    """A frozen policy: all that it needs to act, normalisation statistics included, and how it has fared."""

    weights: Weights
    """state dict of what acts"""
    step: int
    """the learner's steps when it was taken"""
    rating: float
    """Elo rating; begins as the learner's"""
    games: int = 0
    """rated games"""
    results: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    """the learner's newest scores against it: 1 a win of the learner, 0.5 a draw, 0 a loss"""
    uid: int = field(default_factory=_uids.__next__)
    """tells it from every other snapshot of the process"""


class SnapshotPool:
    """The `window` last snapshots of one behaviour, and the rule by which an opponent is drawn from them."""

    def __init__(self, window: int, latest_ratio: float, sampling: str, rng: np.random.Generator) -> None:
        """Takes the ring's size, the share of draws that is the newest snapshot, and the rule of the others.

        "uniform" draws over the whole window, as ML-Agents does. "prioritized" draws in proportion to (1 - p)^2, where p is the
        learner's mean score in the newest games against a snapshot: AlphaStar's prioritised fictitious self-play (Vinyals et
        al. 2019, https://doi.org/10.1038/s41586-019-1724-z, Methods). Raises ValueError for what is none of these.
        """
        if window < 1 or not 0.0 <= latest_ratio <= 1.0 or sampling not in ("uniform", "prioritized"):
            rule = "a window of 1 or more, a ratio from 0 to 1, and uniform or prioritized sampling"
            raise ValueError(f"a pool takes {rule}, not {window}, {latest_ratio}, {sampling}")
        self.snapshots: deque[Snapshot] = deque(maxlen=window)
        self.latest_ratio, self.sampling, self.rng = latest_ratio, sampling, rng

    def add(self, weights: Weights, step: int, rating: float) -> Snapshot:
        """Copies the weights into a new snapshot; the oldest one leaves a full ring."""
        self.snapshots.append(Snapshot({name: value.detach().clone() for name, value in weights.items()}, step, rating))
        return self.latest

    @property
    def latest(self) -> Snapshot:
        """The newest snapshot; IndexError if there is none yet."""
        return self.snapshots[-1]

    def draw(self) -> Snapshot:
        """An opponent for one game; IndexError if there is none yet."""
        if self.rng.random() < self.latest_ratio or len(self.snapshots) < 2:
            return self.latest
        if self.sampling == "uniform":
            return self.snapshots[self.rng.integers(len(self.snapshots))]
        scores = np.array(
            [(sum(s.results) + 0.5) / (len(s.results) + 1.0) for s in self.snapshots]
        )  # a draw to begin with
        priorities = (1.0 - scores) ** 2
        return self.snapshots[self.rng.choice(len(priorities), p=priorities / priorities.sum())]

    def state_dict(self) -> list[dict[str, Any]]:
        """All snapshots in plain containers, for a file."""
        return [
            vars(snapshot) | {"weights": dict(snapshot.weights), "results": list(snapshot.results)}
            for snapshot in self.snapshots
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Replaces all snapshots with those of `state`, each with a uid of this process."""
        self.snapshots.clear()
        for saved in state:
            snapshot = self.add(saved["weights"], saved["step"], saved["rating"])
            snapshot.games = saved["games"]
            snapshot.results.extend(saved["results"])
