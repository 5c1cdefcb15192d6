"""Policies of one architecture that act together, in one batched forward pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.snapshot_pool import Weights


class PolicyStack:
    """Policies of one architecture that act together, in one batched forward pass, whoever of them plays where."""

    def __init__(self, agent: Any, weights: Sequence[Weights], block: int = 16) -> None:
        """Takes a module with the policies' architecture, and what to act with: a state dict a policy.

        The module's `forward` maps observations (n, obs_dim) to the parameters of action distributions (n, ...), and its method
        `sample` these, masks and noise to actions. A block is the number of rows that one copy of a policy's weights acts on.
        """
        self.weights = {name: torch.stack([w[name] for w in weights]) for name in weights[0]}
        self.agent, self.block = agent, block
        self.forward = torch.vmap(lambda weights, obs: torch.func.functional_call(agent, weights, (obs,)))

    @torch.no_grad()
    def act(self, policy: np.ndarray, obs: np.ndarray, masks: np.ndarray, noise: Tensor | float) -> np.ndarray:
        """Actions (n, action_dim) of policies (n,) for observations (n, obs_dim) under masks (n, sum of branches)."""
        num_policies, device = len(next(iter(self.weights.values()))), next(iter(self.weights.values())).device
        counts = np.bincount(policy, minlength=num_policies)
        blocks = -(-counts // self.block)  # of each policy: as many as its rows fill, the last one padded
        starts = self.block * (np.cumsum(blocks) - blocks)
        order = np.argsort(policy, kind="stable")
        rows = np.empty_like(order)
        rows[order] = np.arange(len(order)) + (starts - (np.cumsum(counts) - counts))[policy[order]]

        padded = np.zeros((blocks.sum() * self.block, obs.shape[1]), dtype=np.float32)
        padded[rows] = obs
        of_block = torch.as_tensor(np.repeat(np.arange(num_policies), blocks), device=device)
        weights = {name: value.index_select(0, of_block) for name, value in self.weights.items()}
        inputs = torch.as_tensor(padded, device=device).unflatten(0, (-1, self.block))  # (num_blocks, block, obs_dim)
        outputs = self.forward(weights, inputs).flatten(0, 1)[torch.as_tensor(rows, device=device)]
        return self.agent.sample(outputs, torch.as_tensor(masks, device=device), noise).cpu().numpy()
