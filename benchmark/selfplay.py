"""Tables of self-play runs: final scores against scripted players, when they were reached, and games of two sets.

    python -m benchmark.selfplay scores runs/sumo__ppo_sumo__*
    python -m benchmark.selfplay versus --runs runs/sumo__ppo_sumo__* --against runs/sumo__ppo_sumo_latest__*

Each run counts as one observation: means and 95% percentile-bootstrap intervals are over runs, or over the runs of both
sets.
"""

import csv
import itertools
import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_selfplay
import sac_selfplay
from benchmark import fail
from utils.cross_play import Player, pairs_with_others, play_pairs

THRESHOLDS = {"random": 0.98, "charge": 0.8, "centre": 0.5}


@dataclass
class Scores:
    """Final scores against each scripted player, and the seconds and steps after which an evaluation first had them."""

    runs: tyro.conf.Positional[list[Path]]
    """run folders"""
    games: int = 400
    """games against each scripted player"""
    deterministic: bool = True
    """policies take their likeliest actions; --no-deterministic samples them, as training does"""
    csv: Path | None = None
    """file for the raw numbers"""


@dataclass
class Versus:
    """Runs of one set against runs of another, each pair of final policies."""

    runs: list[Path]
    """run folders of the first set"""
    against: list[Path] = field(default_factory=list)
    """run folders of the second set"""
    games: int = 200
    """games of each pair"""
    deterministic: bool = True
    """policies take their likeliest actions; --no-deterministic samples them, as training does"""
    csv: Path | None = None
    """file for the raw numbers"""


def read_args(run: Path) -> dict[str, Any]:
    """The arguments of a self-play run; exits with one sentence if the folder has none."""
    try:
        run_args: dict[str, Any] = json.loads((run / "args.json").read_text())
    except (OSError, ValueError) as error:
        fail(f"RUNS takes run folders of self-play, and {run} is none ({error})")
    if "save_steps" not in run_args:
        fail(f"RUNS takes run folders of self-play, and {run} is none")
    return run_args


def script_of(run: Path) -> ModuleType:
    """The script that made a run, told by its arguments."""
    return sac_selfplay if "buffer_size" in read_args(run) else ppo_selfplay


def check_one_game(runs: list[Path]) -> None:
    """Exits with one sentence if these runs have no table in common, for their games or scripts are not the same."""
    for run, name in itertools.product(runs, ("env_id", "env_kwargs", "teams", "symmetric", "norm_obs")):
        if read_args(run)[name] != read_args(runs[0])[name]:
            fail(f"RUNS takes runs of one --{name.replace('_', '-')}, and {runs[0]} and {run} differ in it")
        if script_of(run) is not script_of(runs[0]):
            fail(f"RUNS takes runs of one script, and {runs[0]} and {run} are of two")


def interval(values: np.ndarray, seed: int = 0) -> str:
    """Mean over runs with its 95% percentile-bootstrap interval; with two axes the runs of both sets are resampled."""
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(2000):
        resampled = values
        for axis, n in enumerate(values.shape):
            resampled = np.take(resampled, rng.integers(n, size=n), axis)
        means.append(resampled.mean())
    low, high = np.percentile(means, [2.5, 97.5])
    return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"


def first_times(run: Path) -> dict[str, tuple[float, int]]:
    """For each scripted player the seconds since the first logged point, and the step, to reach its threshold."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    start = min(events.Scalars(tag)[0].wall_time for tag in events.Tags()["scalars"])
    first = {}
    for tag in events.Tags()["scalars"]:
        name = tag.rpartition("_vs_")[2]
        if tag.startswith("eval/") and name in THRESHOLDS:
            reached = [point for point in events.Scalars(tag) if point.value > THRESHOLDS[name]]
            if reached:
                first[tag] = reached[0].wall_time - start, reached[0].step
    return first


def print_scores(args: Scores) -> None:
    """A row a run, then the means."""
    check_one_game(args.runs)
    rows = []
    for run in sorted(args.runs):
        script = script_of(run)
        agents, pools, run_args = script.load_run(run, "evaluate")
        run_args.eval_games, run_args.seed = args.games, run_args.seed + 5_000_000
        run_args.deterministic = args.deterministic
        metrics, first = script.evaluate(agents, run_args), first_times(run)
        for behavior, agent in agents.items():
            agent.load_state_dict(pools[behavior].snapshots[0].weights, strict=False)
        is_untrained = not any(pool.snapshots[0].step for pool in pools.values())
        untrained = script.evaluate(agents, run_args) if is_untrained else dict.fromkeys(metrics, float("nan"))
        for tag, score in metrics.items():
            seconds, step = first.get(tag, (float("nan"), 0))
            game = tag[5:].replace("_score_vs_", " vs ")
            rows.append([run.name, game, f"{score:.4f}", f"{untrained[tag]:.4f}", f"{seconds:.0f}", step])
    heads = [*(f"run {i + 1}" for i in range(len(args.runs))), "mean [95%]", "untrained", "first, s (steps)"]
    print(f"| game | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 1) + "|")
    for pair in dict.fromkeys(row[1] for row in rows):
        own = [row for row in rows if row[1] == pair]
        scores = np.array([float(row[2]) for row in own])
        times = ", ".join(f"{row[4]} ({row[5]:,})" if row[5] else "-" for row in own)
        before_mean = np.mean([float(row[3]) for row in own])
        cells = " | ".join(f"{score:.2f}" for score in scores)
        print(f"| {pair} | {cells} | {interval(scores)} | {before_mean:.2f} | {times} |")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([["run", "game", "score", "untrained", "first_seconds", "first_step"], *rows])


def print_versus(args: Versus) -> None:
    """Mean score of the first set against the second, for each behaviour of the first."""
    if not (args.runs and args.against):
        fail("--runs and --against take run folders of self-play, one or more each")
    check_one_game(args.runs + args.against)
    script = script_of(args.runs[0])
    ours = [script.load_run(run, "runs") for run in sorted(args.runs)]
    theirs = [script.load_run(run, "against") for run in sorted(args.against)]
    agents, _, run_args = ours[0]
    env = script.make_env(run_args, 1)
    players = [
        Player(str(i), behavior, agent.acting_weights())
        for i, (all_agents, _, _) in enumerate(ours + theirs)
        for behavior, agent in all_agents.items()
    ]
    all_pairs, rows = pairs_with_others(env, players, len(ours) * len(agents)), []
    env.close()
    for behavior in agents:
        pairs = [(i, j) for i, j in all_pairs if players[i].behavior == behavior]
        make_games = partial(script.make_env, run_args)
        results = play_pairs(make_games, agents, players, pairs, args.games, 7_000_000, args.deterministic)
        scores = results.mean(1).reshape(len(ours), len(theirs))
        print(
            f"{behavior}: {interval(scores)} over {len(ours)} x {len(theirs)} pairs of runs, {args.games} games a pair"
        )
        names = [[run.name for run in sorted(runs)] for runs in (args.runs, args.against)]
        table = zip(itertools.product(*names), scores.flat, strict=True)
        rows += [[behavior, *pair, f"{score:.4f}"] for pair, score in table]
    if args.csv:
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([["behavior", "run", "against", "score"], *rows])


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    command = tyro.cli(
        Annotated[Scores, tyro.conf.subcommand("scores")] | Annotated[Versus, tyro.conf.subcommand("versus")]
    )
    print_scores(command) if isinstance(command, Scores) else print_versus(command)
