"""Generalised advantage estimation against its definition, summed term by term in Python floats."""

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import ppo_continuous
import ppo_selfplay

MODULES = [ppo_continuous, ppo_selfplay]
GAMMA, LAMBDA = 0.97, 0.9


def gae_by_definition(
    rewards: np.ndarray, values: np.ndarray, next_values: np.ndarray, terminations: np.ndarray, dones: np.ndarray
) -> np.ndarray:
    """Schulman et al. 2016, eq. 16: discounted TD residuals, one by one, up to the episode's or the rollout's end."""
    num_steps, num_envs = rewards.shape
    advantages = np.zeros((num_steps, num_envs))
    for env in range(num_envs):
        for start in range(num_steps):
            weight = 1.0
            for t in range(start, num_steps):
                future = 0.0 if terminations[t, env] else next_values[t, env]
                advantages[start, env] += weight * (rewards[t, env] + GAMMA * future - values[t, env])
                weight *= GAMMA * LAMBDA
                if dones[t, env]:
                    break
    return advantages


def random_rollout(num_steps: int, num_envs: int) -> dict[str, np.ndarray]:
    """A rollout in which nothing ends; each next value is the value of the following step."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(num_steps + 1, num_envs))
    rewards = rng.normal(size=(num_steps, num_envs))
    rollout = {"rewards": rewards, "values": values[:-1], "next_values": values[1:].copy()}
    return rollout | {name: np.zeros((num_steps, num_envs), dtype=bool) for name in ("terminations", "dones")}


def compute(rollout: dict[str, np.ndarray], module: ModuleType) -> np.ndarray:
    """The script's advantages."""
    return module.compute_gae(
        **{name: torch.as_tensor(x).double() for name, x in rollout.items()}, gamma=GAMMA, lam=LAMBDA
    ).numpy()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("end", ["termination", "truncation", "both", "neither"])
@pytest.mark.parametrize("t", [0, 3, 7], ids=["first", "middle", "last"])
def test_one_end_in_one_of_three_environments(module: ModuleType, end: str, t: int) -> None:
    """An episode ends in one environment only; final observations have values of their own."""
    rollout = random_rollout(8, 3)
    if end != "neither":
        rollout["dones"][t, 1], rollout["terminations"][t, 1] = True, end in ("termination", "both")
        rollout["next_values"][t, 1] = 5.0  # of the final observation, which is not the next row's
    np.testing.assert_allclose(compute(rollout, module), gae_by_definition(**rollout), rtol=1e-12)


@pytest.mark.parametrize("module", MODULES)
def test_many_ends(module: ModuleType) -> None:
    """Ends of both kinds at random, in a long rollout."""
    rollout, rng = random_rollout(200, 5), np.random.default_rng(1)
    rollout["dones"] = rng.random((200, 5)) < 0.15
    rollout["terminations"] = rollout["dones"] & (rng.random((200, 5)) < 0.5)
    rollout["next_values"][rollout["dones"]] = rng.normal(size=rollout["dones"].sum())
    np.testing.assert_allclose(compute(rollout, module), gae_by_definition(**rollout), rtol=1e-10)


@pytest.mark.parametrize("module", MODULES)
def test_by_hand(module: ModuleType) -> None:
    """Two steps, gamma = lambda = 0.5, worked out on paper."""
    column = lambda *x: torch.tensor(x, dtype=torch.float64)[:, None]  # noqa: E731
    rewards, values, next_values = column(1.0, 2.0), column(0.5, 1.0), column(1.0, 4.0)
    for terminated, done, expected in [
        ((0, 0), (0, 0), (1.0 + 0.25 * 3.0, 3.0)),  # deltas: 1 + 0.5 - 0.5 and 2 + 2 - 1
        ((0, 0), (0, 1), (1.0 + 0.25 * 3.0, 3.0)),  # a truncation at the end still bootstraps
        ((0, 1), (0, 1), (1.0 + 0.25 * 1.0, 1.0)),  # a termination there does not
        ((0, 0), (1, 0), (1.0, 3.0)),  # a truncation first: the trace is cut, the bootstrap stays
        ((1, 0), (1, 0), (0.5, 3.0)),  # a termination first: both go
    ]:
        advantages = module.compute_gae(rewards, values, next_values, column(*terminated), column(*done), 0.5, 0.5)
        assert advantages.flatten().tolist() == pytest.approx(expected)


@given(shape=st.tuples(st.integers(1, 12), st.integers(1, 3)), data=st.data())
@settings(deadline=None)
def test_any_rollout(shape: tuple[int, int], data: st.DataObject) -> None:
    """Ends of any kind anywhere, and numbers of any size."""
    names = "rewards", "values", "next_values"
    rollout = {name: data.draw(arrays(np.float64, shape, elements=st.floats(-1e3, 1e3))) for name in names}
    rollout["dones"] = data.draw(arrays(np.bool_, shape))
    rollout["terminations"] = rollout["dones"] & data.draw(arrays(np.bool_, shape))
    for module in MODULES:
        np.testing.assert_allclose(compute(rollout, module), gae_by_definition(**rollout), atol=1e-8)
