"""How one policy of sumo beats another: how its games end, and where both push.

    python -m benchmark.sumo_habits runs/RESPONSE runs/RUN

Both play their last snapshots and sample their actions. A second of the game has ten steps.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from benchmark import fail
from benchmark.selfplay import check_one_game, script_of
from utils.cross_play import play
from utils.elo import game_scores
from utils.evaluation import load_players
from utils.games import DT, Sumo

SECOND = round(1 / DT)  # steps


class WatchedSumo(Sumo):
    """Sumo that keeps, for each step, what the two discs did in all games."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # (2, num_games): forces in the discs' own frames, the x-axis towards the other
        self.pushes: list[np.ndarray] = []
        self.gaps: list[np.ndarray] = []  # (num_games,): between the two discs
        self.margins: list[np.ndarray] = []  # (2, num_games): from each disc's centre to the ring

    def forces(self, actions: list[np.ndarray]) -> np.ndarray:
        forces = super().forces(actions)
        self.pushes.append(forces * self.ahead().conj())
        return forces

    def judge(self) -> tuple[np.ndarray, np.ndarray]:
        judgement = super().judge()
        self.gaps.append(np.abs(self.position[1] - self.position[0]) - 2 * self.radius)
        self.margins.append(self.ring() - np.abs(self.position))
        return judgement


def main(
    first: Annotated[Path, tyro.conf.Positional], second: Annotated[Path, tyro.conf.Positional], games: int = 1000
) -> None:
    """Plays the games, half of them on either side, and prints a table.

    Args:
        first: a run folder of sumo
        second: the run folder that it plays against
        games: games to play
    """
    if games < 1:
        fail(f"--games takes a number from 1, not {games}")
    players = []
    check_one_game([first, second])
    for folder in (first, second):
        agents, pools, args = script_of(folder).load_run(folder, "RUNS")
        if args.env_id != "sumo" or set(pools) != {"sumo"}:
            fail(f"FIRST and SECOND take runs of sumo in which both sides share a policy, and {folder} is none")
        players += load_players(folder, pools, [("sumo",)], "last", str(folder))
    env = WatchedSumo(games, **json.loads(args.env_kwargs))
    on_left = np.arange(games) % 2 == 0  # where the first run plays
    seats = np.where(on_left[:, None], [0, 1], [1, 0])
    scores = game_scores(play(env, agents, players, seats, seed=1))[:, [0, 1], [1, 0]]  # (games, 2): of each side
    order = np.where(on_left, [[0], [1]], [[1], [0]])  # (2, games): the side of each run

    pushes, gaps, margins = np.array(env.pushes), np.array(env.gaps), np.array(env.margins)
    steps = np.arange(len(gaps))[:, None]
    ends = ((margins.min(axis=1) < 0) | (steps + 1 == env.max_steps)).argmax(axis=0)  # the last step of each game
    by_run = np.take_along_axis(scores, order.T, axis=1).mean(axis=0)
    lengths = f"{(scores[:, 0] == 0.5).mean():.0%} draws; {ends.mean() + 1:.0f} steps"
    print(f"score {by_run[0]:.3f} against {by_run[1]:.3f}; {lengths}")
    is_out = margins[ends, :, np.arange(games)].min(axis=1) < 0
    touched = ((gaps < 0.01) & (steps <= ends) & (steps > ends - SECOND)).any(axis=0)
    for run, folder in enumerate((first, second)):
        won = scores[np.arange(games), order[run]] == 1
        print(f"\n{folder}: wins {won.mean():.0%} of the games")
        for what, how in {
            "the other is out, touched within the last second": is_out & touched,
            "the other is out, not touched": is_out & ~touched,
            "at the time limit, nearer to the centre": ~is_out,
        }.items():
            print(f"  {what}: {(won & how).mean():.0%}")
        own = np.take_along_axis(pushes, order[run][None, None], axis=1)[:, 0]  # (steps, games)
        for when, window in (("first second", steps < SECOND), ("later", steps >= SECOND)):
            chosen = own[window & (steps <= ends)]
            print(f"  push in the {when}: ahead {chosen.real.mean():.2f}, sideways {np.abs(chosen.imag).mean():.2f}")


if __name__ == "__main__":
    tyro.cli(main)
