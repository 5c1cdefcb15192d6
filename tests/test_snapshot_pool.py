"""The pool of snapshots: what it keeps, and which of them it draws how often."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, chisquare
from torch import nn
from toy_policies import make_pool

from utils.snapshot_pool import SnapshotPool


def test_the_oldest_snapshot_leaves_a_full_ring() -> None:
    """And the newest one is `latest`."""
    pool = make_pool(window=3)
    for step in range(5):
        added = pool.add({"mark": torch.tensor(float(step))}, 10 * step, 1000.0 + step)
        assert added is pool.latest
    assert [(s.step, s.rating, float(s.weights["mark"])) for s in pool.snapshots] == [
        (20, 1002.0, 2.0),
        (30, 1003.0, 3.0),
        (40, 1004.0, 4.0),
    ]
    assert len({s.uid for s in pool.snapshots}) == 3


def test_weights_are_copies_without_a_gradient() -> None:
    """The learner that learns on does not move its past selves."""
    layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    snapshot = make_pool().add(dict(layer.named_parameters()) | dict(layer.named_buffers()), 0, 1200.0)
    before = {name: value.clone() for name, value in snapshot.weights.items()}
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.add_(1)
    assert before.keys() == layer.state_dict().keys()
    assert all(torch.equal(value, before[name]) and not value.requires_grad for name, value in snapshot.weights.items())


@pytest.mark.parametrize(
    ("window", "latest_ratio", "sampling", "newest_share"),
    [
        (0, 0.5, "uniform", 1.0),
        (-1, 0.5, "uniform", 1.0),
        (1, -0.1, "uniform", 1.0),
        (1, 1.1, "uniform", 1.0),
        (1, np.nan, "uniform", 1.0),
        (1, 0.5, "", 1.0),
        (1, 0.5, "uniform", 0.0),
        (1, 0.5, "uniform", 1.1),
        (1, 0.5, "uniform", np.nan),
    ],
)
def test_bad_rules_are_refused(window: int, latest_ratio: float, sampling: str, newest_share: float) -> None:
    """In one sentence."""
    with pytest.raises(
        ValueError, match="a pool takes a window of 1 or more, a ratio and a share from 0 to 1"
    ) as error:
        SnapshotPool(window, latest_ratio, sampling, np.random.default_rng(), newest_share)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sampling", ["uniform", "prioritized"])
@pytest.mark.parametrize("latest_ratio", [0.0, 1.0])
def test_an_empty_pool_has_no_opponent(sampling: str, latest_ratio: float) -> None:
    """And a pool of one has one."""
    pool = make_pool(3, latest_ratio, sampling)
    with pytest.raises(IndexError):
        _ = pool.latest
    with pytest.raises(IndexError):
        pool.draw()
    only = pool.add({}, 0, 1200.0)
    assert all(pool.draw() is only for _ in range(20))


@pytest.mark.parametrize("latest_ratio", [0.0, 0.5, 1.0])
def test_draws_are_uniform_but_for_the_share_of_the_latest(latest_ratio: float) -> None:
    """Twelve snapshots, of which the ring has dropped two: the newest one is also one of the window."""
    pool = make_pool(10, latest_ratio, marks=12)
    counts = np.bincount([pool.draw().step for _ in range(20_000)], minlength=12)
    expected = np.append(np.full(9, (1 - latest_ratio) / 10), latest_ratio + (1 - latest_ratio) / 10)
    assert counts[:2].tolist() == [0, 0]
    assert (counts[2:][expected == 0] == 0).all()
    if latest_ratio < 1:
        assert chisquare(counts[2:], 20_000 * expected).pvalue > 1e-3


@pytest.mark.parametrize("latest_ratio", [0.0, 0.25])
def test_prioritized_draws_by_hand(latest_ratio: float) -> None:
    """A mean score p starts with one draw: 1/2, 7/8, 1/8 and 2/3 give (1 - p)^2 of 1/4, 1/64, 49/64, 1/9."""
    pool = make_pool(4, latest_ratio, "prioritized", marks=4)
    for snapshot, results in zip(pool.snapshots, [[], [1.0] * 3, [0.0] * 3, [1.0, 0.5]], strict=True):
        snapshot.record(*results)
    weights = np.array([1 / 4, 1 / 64, 49 / 64, 1 / 9])
    expected = (1 - latest_ratio) * (0.9 * weights / weights.sum() + 0.1 / 4) + [0, 0, 0, latest_ratio]
    counts = np.bincount([pool.draw().step for _ in range(20_000)], minlength=4)
    assert chisquare(counts, 20_000 * expected).pvalue > 1e-3


def test_prioritized_draws_forget_old_results() -> None:
    """Only the newest hundred games count, though the first snapshot won a thousand; every chance is above 0."""
    pool = make_pool(2, 0.0, "prioritized", marks=2)
    pool.snapshots[0].record(*[0.0] * 1000, *[1.0] * 100)
    chance = 0.9 * (0.5 / 101) ** 2 / ((0.5 / 101) ** 2 + 0.5**2) + 0.1 / 2
    lost = sum(pool.draw().step == 0 for _ in range(20_000))
    assert binom.ppf(1e-4, 20_000, chance) <= lost <= binom.ppf(1 - 1e-4, 20_000, chance)
    pool.snapshots[1].record(*[1.0] * 100)  # all are beaten: uniform
    lost = sum(pool.draw().step == 0 for _ in range(2_000))
    assert 900 < lost < 1100


@pytest.mark.slow
def test_beaten_snapshots_are_drawn_again() -> None:
    """Forty of them had 0.0006 of the draws together, beside one that is even; they now have nearly a tenth."""
    pool = make_pool(41, 0.0, "prioritized", marks=41)
    for snapshot in list(pool.snapshots)[:40]:
        snapshot.record(*[1.0] * 100)
    drawn = sum(pool.draw().step < 40 for _ in range(20_000))
    assert drawn == pytest.approx(20_000 * (0.1 * 40 / 41 + 0.9 * 0.0039), abs=220)


def test_state_goes_through_a_file() -> None:
    """Plain containers, which load without code; the copy is equal, independent, and draws the same."""
    pool = make_pool(4, 0.3, "prioritized", seed=7, marks=6)
    for i, snapshot in enumerate(pool.snapshots):
        snapshot.rating, snapshot.games = 1100.5 + i, 40 * i
        snapshot.record(*[i / 4] * 40 * i)
    file = io.BytesIO()
    torch.save(pool.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = make_pool(4, 0.3, "prioritized", seed=7, marks=1)
    other.load_state_dict(state)
    other.rng.bit_generator.state = pool.rng.bit_generator.state
    for a, b in zip(pool.snapshots, other.snapshots, strict=True):
        assert (a.step, a.rating, a.games, a.results) == (b.step, b.rating, b.games, b.results)
        assert b.results.maxlen == a.results.maxlen
        assert torch.equal(a.weights["mark"], b.weights["mark"])
        assert a.uid != b.uid
    assert [pool.draw().step for _ in range(100)] == [other.draw().step for _ in range(100)]
    state[0]["weights"]["mark"].fill_(-1)
    state[0]["results"].append(9.0)
    assert float(other.snapshots[0].weights["mark"]) == 2.0
    assert 9.0 not in other.snapshots[0].results
    smaller = make_pool(2)
    smaller.load_state_dict(state)
    assert [s.step for s in smaller.snapshots] == [4, 5]


@given(
    window=st.integers(1, 6),
    latest_ratio=st.sampled_from([0.0, 0.3, 1.0]),
    sampling=st.sampled_from(["uniform", "prioritized"]),
    moves=st.lists(st.sampled_from(["add", "draw", "win", "lose", "reload"]), max_size=40),
)
@settings(max_examples=60, deadline=None)
def test_pool_is_the_end_of_a_list(window: int, latest_ratio: float, sampling: str, moves: list[str]) -> None:
    """It always holds the last `window` snapshots with their records, and draws only these."""
    pool = make_pool(window, latest_ratio, sampling, marks=1)
    model: list[tuple[int, list[float]]] = [(0, [])]  # steps and results of all that there ever were
    for move in moves:
        if move == "add":
            pool.add({"mark": torch.tensor(float(len(model)))}, len(model), 1200.0)
            model.append((len(model), []))
        elif move == "reload":
            pool.load_state_dict(pool.state_dict())
        else:
            drawn = pool.draw()
            assert max(0, len(model) - window) <= drawn.step < len(model)
            assert latest_ratio < 1 or drawn is pool.latest
            if move != "draw":
                drawn.record(float(move == "win"))
                model[drawn.step][1].append(float(move == "win"))
        assert [(s.step, list(s.results)) for s in pool.snapshots] == model[-window:]
        expected = [np.mean([0.5, *results]) for _, results in model[-window:]]
        assert [s.mean_score for s in pool.snapshots] == pytest.approx(expected)
        assert [float(s.weights["mark"]) for s in pool.snapshots] == [step for step, _ in model[-window:]]
        assert pool.latest is pool.snapshots[-1]
