"""Many policies that act in one batched pass act as each does alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toy_policies import NUM_BITS, OBS_DIM, Mirror, ToyAgent

from utils.policy_stack import PolicyStack


class Small(ToyAgent):
    """A little network with statistics and a head that does not act; its actions are bent by masks and noise."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
        self.value = nn.Linear(3, 1)
        self.register_buffer("shift", torch.randn(3))

    def forward(self, obs: Tensor) -> Tensor:
        """(n, 4)"""
        return self.body(obs - self.shift)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, 4)"""
        return torch.randn(n, 4, generator=generator)

    def sample(self, outputs: Tensor, masks: Tensor, noise: Tensor | float) -> Tensor:
        """(n, 4)"""
        return (outputs + noise).masked_fill(~masks, -9.0)


COUNTS = [[1], [40], [5, 0, 17, 1], [0, 0, 3], [4, 8, 12], [0, 31, 33, 0, 32, 2], [1] * 20]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("block", [1, 4, 16, 100])
def test_a_stack_acts_as_its_policies_one_by_one(counts: list[int], block: int) -> None:
    """Uneven numbers of rows in any order, also none; the module's own weights have no effect."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    policies = [Small() for _ in counts]
    weights = [{k: v for k, v in p.state_dict().items() if not k.startswith("value")} for p in policies]
    stack = PolicyStack(Small(), weights, block)
    policy = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    obs = rng.normal(size=(len(policy), 3)).astype(np.float32)
    masks, noise = rng.random((len(policy), 4)) < 0.8, torch.randn(len(policy), 4)
    for bend in (noise, 0.0):
        actions = stack.act(policy, obs, masks, bend)
        assert actions.shape == (len(policy), 4)
        for i, p in enumerate(policy):
            row = policies[p].sample(
                policies[p](torch.as_tensor(obs[i : i + 1])),
                torch.as_tensor(masks[i : i + 1]),
                bend if isinstance(bend, float) else bend[i : i + 1],
            )
            np.testing.assert_allclose(actions[i], row[0].detach().numpy(), rtol=1e-5, atol=1e-6)


def test_weights_from_a_file_act_on_the_device_of_the_agent() -> None:
    """Saved snapshots are on the CPU, and the agent of a resumed run on its GPU; the device meta takes its place."""
    weights = {name: value for name, value in Small().state_dict().items() if not name.startswith("value")}
    stack = PolicyStack(Small().to("meta"), [weights, weights])
    assert {value.device.type for value in stack.weights.values()} == {"meta"}


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    block=st.integers(1, 8),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_a_stack_keeps_rows_in_place(counts: list[int], block: int, seed: int) -> None:
    """Each row comes back where it was, with the mark of its policy."""
    rng = np.random.default_rng(seed)
    policy = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    stack = PolicyStack(Mirror(), [{"mark": torch.tensor(10.0 * i)} for i in range(len(counts))], block)
    obs = rng.integers(1000, size=(len(policy), OBS_DIM)).astype(np.float32)
    masks = rng.random((len(policy), NUM_BITS)) < 0.5
    actions = stack.act(policy, obs, masks, torch.arange(len(policy)))
    legal = (masks * 2 ** np.arange(NUM_BITS)).sum(1)
    np.testing.assert_array_equal(actions, np.column_stack([10 * policy, obs, legal, np.arange(len(policy))]))
