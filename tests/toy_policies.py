"""Policies whose actions tell whose they are, and pools of them."""

import numpy as np
import torch
from torch import Tensor, nn

from utils.snapshot_pool import SnapshotPool

OBS_DIM, NUM_BITS = 4, 7  # numbers in an observation, legal actions


def make_pool(
    window: int = 5, ratio: float = 0.0, sampling: str = "uniform", seed: int = 0, marks: int = 0
) -> SnapshotPool:
    """With snapshots of the marks 0, 1, ..., taken after as many steps."""
    pool = SnapshotPool(window, ratio, sampling, np.random.default_rng(seed))
    for mark in range(marks):
        pool.add({"mark": torch.tensor(float(mark))}, mark, 1200.0)
    return pool


class ToyAgent(nn.Module):
    """An agent that is its own actor."""

    @property
    def actor(self) -> "ToyAgent":
        """What draws the actions."""
        return self


class Mirror(ToyAgent):
    """Acts with its mark, what it observes, and the legal actions, read as a binary number; then comes the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.tensor(-5.0))

    def forward(self, obs: Tensor) -> Tensor:
        """(n, 1 + obs_dim)"""
        return torch.cat([self.mark.expand(len(obs), 1), obs], dim=1)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Tells all rows apart."""
        return torch.arange(n)

    def sample(self, outputs: Tensor, masks: Tensor, noise: Tensor | float) -> Tensor:
        """(n, 1 + obs_dim + 2)"""
        legal = (masks * 2 ** torch.arange(masks.shape[1])).sum(dim=1)
        return torch.cat([outputs, legal[:, None], torch.as_tensor(noise).expand(len(outputs))[:, None]], dim=1)
