"""Turns that fill a run in whole cycles, their snapshots, and first games that are cut at different steps."""

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from utils.games import Pursuit, Sumo
from utils.matches import Matches, turn_ends
from utils.snapshot_pool import SnapshotPool


def test_turns_end_in_whole_cycles() -> None:
    """Two pursuers make two learner steps a game step: their turns are half as long as the evader's."""
    teams = Pursuit(1).teams
    assert turn_ends(teams, 512, 1536) == [256, 768, 1024, 1536]
    assert turn_ends(teams, 10**6, 900) == [300, 900]  # at least one cycle, however long the turn
    assert len(turn_ends(teams, None, 3000)) == 20
    assert turn_ends(Sumo(1).teams, 512, 1536) == [1536]  # one policy: one turn


def make_roles(change_at: list[int]) -> tuple[Any, Matches]:
    """Agents whose weights are 1 and 2, and matches in which the pursuers learn first; the ratings are 900 and 1000."""
    agents: dict[str, Any] = {}
    pools = {}
    for i, behavior in enumerate(("pursuers", "evader")):
        weights = {"x": torch.full((1,), i + 1.0)}
        agents[behavior] = SimpleNamespace(acting_weights=lambda weights=weights: weights)
        pools[behavior] = SnapshotPool(5, 1.0, "uniform", np.random.default_rng(0))
        pools[behavior].add({"x": torch.zeros(1)}, 0, 900.0 + 100 * i)
    return agents, Matches(Pursuit(1).teams, 2, pools, change_at)


@pytest.mark.parametrize(
    ("game_step", "learner_steps", "is_taken", "next_learner"),
    [
        (50, 99, False, "pursuers"),
        (50, 100, True, "pursuers"),  # --save-steps
        (60, 1, True, "evader"),  # the policy at the end of a turn is the one that the other role meets
        (60, 0, False, "evader"),  # nothing was learned
    ],
)
def test_snapshots_of_a_turn(
    selfplay: ModuleType, game_step: int, learner_steps: int, is_taken: bool, next_learner: str
) -> None:
    """Every --save-steps and at the end of a turn, with the rating that the learner has then."""
    agents, matches = make_roles([60, 100])
    matches.learner_steps["pursuers"], matches.rating = learner_steps, 950.0
    args: Any = SimpleNamespace(save_steps=100)
    assert selfplay.end_turn(agents["pursuers"], matches, game_step, args) == is_taken
    assert matches.learner == next_learner
    assert matches.rating == (950.0 if next_learner == "pursuers" else 1000.0)
    taken = [(s.step, s.rating, s.weights["x"].item()) for s in matches.pools["pursuers"].snapshots]
    assert taken == [(0, 900.0, 0.0)] + [(learner_steps, 950.0, 1.0)] * is_taken
    assert len(matches.pools["evader"].snapshots) == 1


def test_final_snapshots() -> None:
    """Each role's final policy with its own rating, in place of a snapshot that is newer than half of --save-steps."""
    agents, matches = make_roles([60, 100])
    matches.rating = 950.0
    for behavior, before, last in (("pursuers", 940, 1000), ("evader", 800, 900)):
        matches.pools[behavior].add({"x": torch.zeros(1)}, before, 1100.0)
        matches.learner_steps[behavior] = last
    matches.add_final_snapshots(agents, 150)
    found = {b: [(s.step, s.rating, s.weights["x"].item()) for s in p.snapshots] for b, p in matches.pools.items()}
    assert found == {
        "pursuers": [(0, 900.0, 0.0), (1000, 950.0, 1.0)],
        "evader": [(0, 1000.0, 0.0), (800, 1100.0, 0.0), (900, 1100.0, 2.0)],
    }


def test_first_games_are_cut_at_different_steps() -> None:
    """Cut games are truncated, not rated and not counted; without an expected length nothing is cut."""
    for length, expected in ((8.0, [0, 1, 2, 3, 4, 5, 6, 7]), (None, [0] * 8)):
        env = Sumo(8)
        pool = SnapshotPool(1, 1.0, "uniform", np.random.default_rng(0))
        pool.add({"x": torch.zeros(1)}, 0, 1200.0)
        matches = Matches(env.teams, 8, {"sumo": pool}, game_length=length)
        env.reset(1)
        ends = [0] * 8
        for step in range(1, 8):
            result = env.step([np.zeros((8, 1, 2), dtype=np.float32)] * 2)
            assert not result.over.any()
            cut = matches.cut_games(result)
            assert all((truncations[:, 0] == cut).all() for truncations in result.truncations)
            matches.finish_games(env, result, cut)
            assert (env.time[cut] == 0).all()
            for game in cut.nonzero()[0]:
                ends[game] = step
        assert ends == expected
        assert matches.rating == 1200.0
        assert "selfplay/games" not in matches.metrics()


def test_a_game_that_ends_when_its_cut_is_due_is_not_cut() -> None:
    """It has ended and restarted by itself: no truncation, one rated game, no second restart."""
    env = Sumo(8)
    pool = SnapshotPool(1, 1.0, "uniform", np.random.default_rng(0))
    pool.add({"x": torch.zeros(1)}, 0, 1200.0)
    matches = Matches(env.teams, 8, {"sumo": pool}, game_length=8.0)  # game 3 is due at step 3
    env.reset(1)
    for step in range(1, 4):
        result = env.step([np.zeros((8, 1, 2), dtype=np.float32)] * 2)
        result.over[3] = step == 3
        cut = matches.cut_games(result)
        assert cut.nonzero()[0].tolist() == ([] if step == 3 else [step])
        matches.finish_games(env, result, cut)
    assert not any(truncations[3].any() for truncations in result.truncations)
    assert matches.learner_team[3] == 0  # it began on team 1, and has changed sides once
    assert matches.metrics()["selfplay/games"] == 1.0
