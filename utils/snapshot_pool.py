"""Past selves as opponents: a ring of snapshots of one policy, and the rule that draws an opponent from it.

The vocabulary is that of ML-Agents (https://unity-technologies.github.io/ml-agents/ML-Agents-Overview/, "Training in
competitive multi-agent environments with self-play").
"""

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

UNIFORM_SHARE = 0.1  # of prioritised draws
Weights = Mapping[str, Tensor]
_uids = itertools.count()


@dataclass(eq=False)
class Snapshot:
    """A frozen policy with its record against the learner."""

    weights: Weights
    """state dict of the actor, with its normalisation statistics"""
    step: int
    """learner steps at which it was taken"""
    rating: float
    """Elo rating; starts at the learner's"""
    games: int = 0
    """number of rated games"""
    results: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    """the last scores against it of the behaviour that learns: 1 for a win of the learner, 0.5 a draw, 0 a loss"""
    name: str = ""
    """of a scripted player, which has no weights"""
    uid: int = field(default_factory=_uids.__next__)
    """unique number in this process"""
    mean_score: float = 0.5
    """mean of the results, with a drawn game added"""

    def record(self, *results: float) -> None:
        """Adds results of games."""
        self.results.extend(results)
        self.mean_score = (sum(self.results) + 0.5) / (len(self.results) + 1.0)


def draw_stream(seed: int) -> np.random.Generator:
    """The random stream that draws opponents.

    It is not `default_rng(seed)` or one of its first children: a game that is reset with this seed may use those. Its
    first observation could then reveal the opponent to a policy.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(99,)))


class SnapshotPool:
    """The last `window` snapshots of one behaviour."""

    def __init__(
        self,
        window: int,
        latest_ratio: float,
        sampling: str,
        rng: np.random.Generator,
        newest_share: float = 1.0,
        shares: Sequence[float] | None = None,
    ) -> None:
        """Sets the rules of `draw`.

        With probability `latest_ratio` an opponent is the newest snapshot. Otherwise it comes from the pool's newest
        snapshots, a share `newest_share` of all (Bansal et al. 2018, https://arxiv.org/abs/1710.03748, section 4.2):
        - "uniform": all of these are equally likely, as in ML-Agents.
        - "prioritized": the probability is (1 - u) * priority + u / (number of snapshots) with u = `UNIFORM_SHARE`. The
          priority is proportional to (1 - p)^2, where p is the learner's mean score in its last games against the
          snapshot, with a drawn game added. This is prioritised fictitious self-play of AlphaStar (Vinyals et al. 2019,
          https://doi.org/10.1038/s41586-019-1724-z, Methods). The uniform share is our addition. Without it, a beaten
          snapshot is almost never drawn again, so its score stays high even if the learner forgets how to beat it.

        `shares` are probabilities for a pool to which nothing is added: they take the place of the other rules.
        Raises ValueError if a rule is out of range.
        """
        is_share = 0.0 <= latest_ratio <= 1.0 and 0.0 < newest_share <= 1.0
        if window < 1 or not is_share or sampling not in ("uniform", "prioritized"):
            rule = "a window of 1 or more, a ratio and a share from 0 to 1, and uniform or prioritized sampling"
            raise ValueError(f"a pool takes {rule}, not {window}, {latest_ratio}, {newest_share}, {sampling}")
        self.snapshots: deque[Snapshot] = deque(maxlen=window)
        self.latest_ratio, self.sampling, self.rng = latest_ratio, sampling, rng
        self.newest_share, self.shares = newest_share, shares

    def add(self, weights: Weights, step: int, rating: float) -> Snapshot:
        """Copies the weights into a new snapshot. If the ring is full, the oldest snapshot leaves it."""
        self.snapshots.append(Snapshot({name: value.detach().clone() for name, value in weights.items()}, step, rating))
        return self.latest

    @property
    def latest(self) -> Snapshot:
        """The newest snapshot. Raises IndexError if there is none."""
        return self.snapshots[-1]

    def draw(self) -> Snapshot:
        """Draws the opponent of one game. Raises IndexError if there is no snapshot."""
        if self.shares is not None:
            return self.snapshots[self.rng.choice(len(self.snapshots), p=self.shares)]
        if self.rng.random() < self.latest_ratio or len(self.snapshots) < 2:
            return self.latest
        newest = list(self.snapshots)[-math.ceil(self.newest_share * len(self.snapshots)) :]
        if self.sampling == "uniform":
            return newest[self.rng.integers(len(newest))]
        priorities = (1.0 - np.array([snapshot.mean_score for snapshot in newest])) ** 2
        probabilities = (1.0 - UNIFORM_SHARE) * priorities / priorities.sum() + UNIFORM_SHARE / len(newest)
        cdf = probabilities.cumsum()
        return newest[cdf.searchsorted(self.rng.random() * cdf[-1], side="right")]  # faster than `rng.choice`

    def state_dict(self) -> list[dict[str, Any]]:
        """All snapshots in plain containers, for a file."""
        return [vars(x) | {"weights": dict(x.weights), "results": list(x.results)} for x in self.snapshots]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Replaces all snapshots by those of `state`. Each gets a new uid."""
        self.snapshots.clear()
        for saved in state:
            snapshot = self.add(saved["weights"], saved["step"], saved["rating"])
            snapshot.games, snapshot.name = saved["games"], saved.get("name", "")
            snapshot.record(*saved["results"])
