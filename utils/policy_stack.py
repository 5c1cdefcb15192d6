"""Many policies of one architecture that act together, in one batched forward pass."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.snapshot_pool import Weights


class PolicyStack:
    """Stacked weights of several policies. Each row of a batch is acted on by the policy that it names."""

    def __init__(self, agent: Any, weights: Sequence[Weights], block: int = 16) -> None:
        """Stacks the weights: one state dict a policy.

        `agent` is a module with the policies' architecture. Its `forward` maps observations (n, obs_dim) to parameters
        of action distributions (n, ...). The method `sample` of its `actor` maps these, masks and noise to actions.
        Policies have different numbers of rows, and one batched product needs equal ones: rows are padded to blocks of
        `block` rows, and each block has its own copy of the weights.
        """
        self.agent, self.block = agent, block
        self.device = next((x.device for x in agent.parameters()), torch.device("cpu"))  # saved weights are on the CPU
        self.weights = {name: torch.stack([w[name].to(self.device) for w in weights]) for name in weights[0]}
        self.forward = torch.vmap(lambda weights, obs: torch.func.functional_call(agent, weights, (obs,)))

    @torch.no_grad()
    def act(self, policy: np.ndarray, obs: np.ndarray, masks: np.ndarray, noise: Tensor | float) -> np.ndarray:
        """Actions (n, action_dim) of policies (n,) for observations (n, obs_dim) and masks (n, sum(branches))."""
        num_policies, device = len(next(iter(self.weights.values()))), self.device
        counts = np.bincount(policy, minlength=num_policies)
        blocks = -(-counts // self.block)  # blocks of each policy; the last one is padded
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
        return self.agent.actor.sample(outputs, torch.as_tensor(masks, device=device), noise).cpu().numpy()
