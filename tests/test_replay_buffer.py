"""SAC's replay buffer against a plain list."""

import numpy as np
import pytest
import torch

from sac_continuous import ReplayBuffer


@pytest.mark.parametrize("capacity", [10, 12, 97])
def test_contents_across_the_wrap_around(capacity: int) -> None:
    """Batches of changing size, several times round: the buffer holds the list's last `capacity` entries."""
    rng, stored = np.random.default_rng(0), []
    buffer = ReplayBuffer(capacity, 3, 2, torch.device("cpu"))
    for _ in range(60):
        n = int(rng.integers(1, 8))
        batch = [
            rng.normal(size=(n, 3)),
            rng.normal(size=(n, 2)),
            rng.normal(size=n),
            rng.normal(size=(n, 3)),
            rng.random(n) < 0.5,
        ]
        buffer.add(*batch)
        stored += [np.concatenate([np.ravel(x[i]) for x in batch]).astype(np.float32) for i in range(n)]
        kept = stored[-capacity:]
        assert min(buffer.total, capacity) == len(kept)
        rows = buffer.data[: buffer.total].numpy()
        assert sorted(map(tuple, rows.tolist())) == sorted(tuple(row.tolist()) for row in kept)


def test_samples_are_whole_transitions_drawn_uniformly() -> None:
    """Every field of a sample belongs to the same transition, and each stored transition is as likely as the next."""
    buffer = ReplayBuffer(50, 2, 1, torch.device("cpu"))
    ids = np.arange(70.0)
    buffer.add(np.stack([ids, -ids], 1)[:40], ids[:40, None], ids[:40], np.stack([ids, ids], 1)[:40], ids[:40] % 2)
    buffer.add(np.stack([ids, -ids], 1)[40:], ids[40:, None], ids[40:], np.stack([ids, ids], 1)[40:], ids[40:] % 2)
    torch.manual_seed(0)
    obs, actions, rewards, next_obs, terminations = buffer.sample(100_000)
    assert rewards.shape == terminations.shape == (100_000,)
    for field in (obs[:, 0], -obs[:, 1], actions[:, 0], next_obs[:, 0], next_obs[:, 1]):
        assert torch.equal(field, rewards)
    assert torch.equal(terminations, rewards % 2)
    values, counts = rewards.unique(return_counts=True)
    assert values.tolist() == list(range(20, 70))
    assert 0.9 < counts.min() / 2000 < counts.max() / 2000 < 1.1


def test_an_unfilled_buffer_gives_only_what_it_holds() -> None:
    """No row of zeros is ever sampled."""
    buffer = ReplayBuffer(1000, 1, 1, torch.device("cpu"))
    buffer.add(*(np.ones(shape) for shape in ((3, 1), (3, 1), 3, (3, 1), 3)))
    assert all((field == 1.0).all() for field in buffer.sample(500))
