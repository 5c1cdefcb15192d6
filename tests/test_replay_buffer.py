"""SAC's replay buffer against a plain list."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sac_continuous import ReplayBuffer


@pytest.mark.parametrize("capacity", [10, 12, 97])
def test_contents_across_the_wrap_around(capacity: int) -> None:
    """Batches of changing size, several times round: the buffer holds the list's last `capacity` entries."""
    rng, stored = np.random.default_rng(0), []
    buffer = ReplayBuffer(capacity, 3, 2, torch.device("cpu"), Path())
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
    buffer = ReplayBuffer(50, 2, 1, torch.device("cpu"), Path())
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
    buffer = ReplayBuffer(1000, 1, 1, torch.device("cpu"), Path())
    buffer.add(*(np.ones(shape) for shape in ((3, 1), (3, 1), 3, (3, 1), 3)))
    assert all((field == 1.0).all() for field in buffer.sample(500))


@given(
    capacity=st.integers(4, 20),
    steps=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["", "save", "save and reload"])), max_size=40),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_saving_and_loading(tmp_path: Path, capacity: int, steps: list[tuple[int, str]]) -> None:
    """A buffer read from files at any time holds the last `capacity` transitions, in the rows in which they were."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))

    def make() -> ReplayBuffer:
        return ReplayBuffer(capacity, 1, 1, torch.device("cpu"), folder)

    buffer, count = make(), 0
    for num_new, then in steps:
        if num_new:
            numbers = np.arange(count, count + num_new, dtype=np.float32)
            buffer.add(numbers[:, None], numbers[:, None], numbers, numbers[:, None], numbers)
            count += num_new
        if then:
            state = buffer.state_dict()
            buffer.remove_old_files()
            assert all(stop > count - capacity and stop - start <= capacity for start, stop in state["files"])
        if then == "save and reload":
            buffer = make()
            buffer.load_state_dict(state)
        assert buffer.total == count
        kept = np.arange(max(0, count - capacity), count)
        assert (buffer.data[kept % capacity].numpy() == kept[:, None]).all()
