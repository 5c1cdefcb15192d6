"""Turns that fill a run in whole cycles, and first games that are cut at different steps."""

import numpy as np
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
