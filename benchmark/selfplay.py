"""Tables of self-play runs: final scores, experiments in games against each other, and how badly runs can be beaten.

    python -m benchmark.selfplay scores sweeps/ppo_sumo*/runs/* --csv scores.csv
    python -m benchmark.selfplay versus sweeps/ppo_sumo{,_latest}/runs/* --csv versus.csv
    python -m benchmark.selfplay exploitability sweeps/ppo_sumo/runs/* --steps 1000000 --csv exploitability.csv

Runs belong to the experiment of their --exp-name. Each run counts as one observation: intervals are Student's t over
runs, or over the runs of both experiments. Only finished runs count; lines above a table name the others, and tell in
what the runs of an experiment differ.
"""

import csv
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from benchmark import fail
from benchmark.runs import Run, mixture_notes, notes_on, read_all, write_csv
from benchmark.statistics import crossed_interval, student_interval
from utils.cross_play import pairs_with_others, play_pairs
from utils.errors import keep_printing
from utils.evaluation import current_players, evaluate_run, find_difference
from utils.run import load_script

THRESHOLDS = {"random": 0.98, "charge": 0.8, "centre": 0.5}
Actions = Literal["likeliest", "sampled"]
Policy = Literal["last", "uniform", "nash"]


@dataclass
class Scores:
    """Final scores against each scripted player, and when a training evaluation first exceeded the thresholds."""

    runs: tyro.conf.Positional[list[Path]]
    """run folders"""
    games: int = 400
    """games against each scripted player"""
    csv: Path | None = None
    """file for the raw numbers"""


@dataclass
class Versus:
    """Final policies of each two experiments against each other, each run against each."""

    runs: tyro.conf.Positional[list[Path]]
    """run folders"""
    games: int = 200
    """games of each pair of runs"""
    actions: tuple[Actions, ...] = ("likeliest", "sampled")
    """what the policies play: their most likely actions, or actions sampled as in training"""
    csv: Path | None = None
    """file for the raw numbers"""


@dataclass
class Exploitability:
    """Scores of policies that learn to beat saved runs; trains one for each run and policy, in this folder's runs/."""

    runs: tyro.conf.Positional[list[Path]]
    """run folders"""
    csv: Path
    """file for the raw numbers; what is in it already stays, and is not trained again, also with other --games"""
    steps: int = 1_000_000
    """game steps of each training; in an asymmetric game the responses of all roles share them"""
    policies: tuple[Policy, ...] = ("last", "uniform", "nash")
    """what the runs play: their last snapshot, all snapshots equally often, or the Nash mixture of their table"""
    games: int = 1000
    """games in which each of them is scored, actions sampled"""
    weights: Literal["random", "own"] = "random"
    """what their training begins with: random weights, or those of the run that they are to beat"""


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
    """The script that made a run; exits with one sentence if it is none of self-play."""
    read_args(run)
    return load_script("RUNS", run)


def check_one_game(runs: Sequence[Path]) -> None:
    """Exits with one sentence if these runs have no table in common: their games or scripts are not the same."""
    for run in runs:
        name = find_difference(read_args(runs[0]), read_args(run))
        if name is not None:
            fail(f"RUNS takes runs of one --{name.replace('_', '-')}, and {runs[0]} and {run} differ in it")
        if script_of(run) is not script_of(runs[0]):
            fail(f"RUNS takes runs of one script, and {runs[0]} and {run} are of two")


def by_experiment(folders: Sequence[Path]) -> dict[str, list[Run]]:
    """The finished runs of each experiment; prints which runs are left out, and in what the others differ.

    Exits with one sentence if no run is finished.
    """
    runs, notes = read_all(folders)
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.folder):
        if run.state == "finished":
            if any((other.env_id, other.seed) == (run.env_id, run.seed) for other in groups[run.exp_name]):
                fail(f"RUNS takes each seed of an experiment once, and {run.folder} has one that is there already")
            groups[run.exp_name].append(run)
    left_out = [f"{run.folder.name} ({run.state})" for run in runs if run.state != "finished"]
    if left_out:
        notes.append(f"Left out, {len(left_out)} of {len(runs)} runs: {', '.join(left_out)}.")
    if not groups:
        fail(f"RUNS takes finished runs of self-play, and none of these {len(runs)} is finished")
    for group in groups.values():
        notes += notes_on(group)
    for note in notes + mixture_notes([run for group in groups.values() for run in group]):
        print(f"- {note}\n")
    return groups


def first_times(run: Run) -> dict[str, tuple[float, int]]:
    """For each scripted player the seconds and the step at which an evaluation first exceeded the threshold."""
    first = {}
    for key, curve in run.curves.items():
        threshold = THRESHOLDS.get(key.rpartition("_vs_")[2], np.inf)
        for step, seconds, value in curve:
            if value > threshold:
                first[key] = seconds, int(step)
                break
    return first


def describe(x: float, ends: tuple[Any, Any] | None) -> str:
    """A score of 0 to 1 with its interval."""
    return f"{x:.2f}" if ends is None else f"{x:.2f} [{max(0.0, ends[0]):.2f}, {min(1.0, ends[1]):.2f}]"


def print_scores(args: Scores) -> None:
    """A row for each experiment and game."""
    groups, rows = by_experiment(args.runs), []
    print("| experiment | game | mean [95%], most likely actions | runs | untrained | first, s (steps) |")
    print("|---|---|---|---|---|---|")
    for name, runs in groups.items():
        check_one_game([run.folder for run in runs])
        table: dict[str, list[list[Any]]] = defaultdict(list)
        for run in runs:
            script = script_of(run.folder)
            agents, pools, run_args = script.load_run(run.folder, "RUNS")
            run_args.eval_games, run_args.seed, run_args.deterministic = args.games, run_args.seed + 5_000_000, True
            metrics, first = script.evaluate(agents, run_args), first_times(run)
            for behavior, agent in agents.items():
                agent.load_state_dict(pools[behavior].snapshots[0].weights, strict=False)
            has_first = not any(pool.snapshots[0].step for pool in pools.values())  # else it has left the pool
            is_untrained = has_first and run_args.initialize_from is None  # else the first policy is another run's
            untrained = script.evaluate(agents, run_args) if is_untrained else dict.fromkeys(metrics, float("nan"))
            for key, score in metrics.items():
                seconds, step = first.get(key, (float("nan"), 0))
                row = [f"{score:.4f}", f"{untrained[key]:.4f}", f"{seconds:.0f}", step]
                table[key[5:].replace("_score_vs_", " vs ")].append(row)
                rows.append([name, run.folder.name, key[5:].replace("_score_vs_", " vs "), *row, run.commit])
        for game, own in table.items():
            scores = np.array([float(row[0]) for row in own])
            mean = describe(scores.mean(), student_interval(scores) if len(scores) > 1 else None)
            untrained_mean = np.mean([float(row[1]) for row in own])
            first_score = "-" if np.isnan(untrained_mean) else f"{untrained_mean:.2f}"
            times = ", ".join(f"{row[2]} ({row[3]:,})" if row[3] else "-" for row in own)
            each = ", ".join(f"{score:.2f}" for score in scores)
            print(f"| {name} | {game} | {mean} | {each} | {first_score} | {times} |")
    header = ["experiment", "run", "game", "score", "untrained", "first_seconds", "first_step", "commit"]
    write_csv(args.csv, header, rows)


def print_versus(args: Versus) -> None:
    """A row for each pair of experiments, kind of actions and behaviour of the first one."""
    groups, rows = by_experiment(args.runs), []
    if len(groups) < 2:
        fail(f"RUNS takes runs of two experiments or more, and these are of {', '.join(groups) or 'none'}")
    folders = [run.folder for runs in groups.values() for run in runs]
    check_one_game(folders)
    script = script_of(folders[0])
    loaded = {folder: script.load_run(folder, "RUNS") for folder in folders}
    print("| actions | experiment | against | score [95%] |\n|---|---|---|---|")
    for (ours, theirs), actions in itertools.product(itertools.combinations(groups, 2), args.actions):
        runs = [run.folder for run in groups[ours] + groups[theirs]]
        agents, _, run_args = loaded[runs[0]]
        make_games = partial(script.make_env, run_args)
        env = make_games(1)
        players = [player for run in runs for player in current_players(env, loaded[run][0], str(run))]
        num_own = len(groups[ours]) * len(players) // len(runs)
        pairs = pairs_with_others(env, players, num_own)
        env.close()
        behaviors = dict.fromkeys(players[i].behavior for i, _ in pairs)
        for behavior in behaviors:
            own = [(i, j) for i, j in pairs if players[i].behavior == behavior]
            results = play_pairs(make_games, agents, players, own, args.games, 7_000_000, actions == "likeliest")
            scores = results.mean(1).reshape(len(groups[ours]), len(groups[theirs]))
            ends = crossed_interval(scores) if min(scores.shape) > 1 else None
            name = ours if len(behaviors) == 1 else f"{ours}: {behavior}"
            print(f"| {actions} | {name} | {theirs} | {describe(float(scores.mean()), ends)} |")
            for (one, other), score in zip(itertools.product(groups[ours], groups[theirs]), scores.flat, strict=True):
                row = [actions, behavior, ours, one.folder.name, theirs, other.folder.name, f"{score:.4f}"]
                rows.append([*row, one.commit, other.commit])
    header = "actions behavior experiment run against_experiment against score commit against_commit"
    write_csv(args.csv, header.split(), rows)


def print_exploitability(args: Exploitability) -> None:
    """A row for each experiment and behaviour that learns to beat it."""
    header = ["experiment", "run", "policy", "steps", "weights", "behavior", "score", "commit"]
    rows: list[list[Any]] = []
    if args.csv.exists():
        old_header: list[str] = []
        with suppress(ValueError, csv.Error), args.csv.open(newline="") as file:  # it may be no table
            old_header, *rows = [*csv.reader(file)] or [header]
        if old_header != header or any(len(row) != len(header) for row in rows):
            fail(f"--csv takes a new file, or one with the columns {', '.join(header)}, and {args.csv} has others")
    done = {tuple(row[1:5]) for row in rows}
    groups = by_experiment(args.runs)
    for (name, runs), policy in itertools.product(groups.items(), args.policies):
        for run in runs:
            if (run.folder.name, policy, str(args.steps), args.weights) not in done:
                script = script_of(run.folder)
                own = {"evaluate": run.folder, "exploitability": args.steps, "policy": policy, "eval_games": args.games}
                own["initialize_from"] = str(run.folder) if args.weights == "own" else None
                run_args = replace(script.load_run(run.folder, "RUNS")[2], **own, capture_video=False)
                scores = evaluate_run(run_args, script.make_env, script.load_run, script.main)
                for behavior, score in scores.items():
                    mean = f"{score.mean():.4f}"
                    rule = policy, str(args.steps), args.weights
                    rows.append([name, run.folder.name, *rule, behavior, mean, run.commit])
                write_csv(args.csv, header, rows)
    table: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    given = {run.folder.name for runs in groups.values() for run in runs}
    for name, run_name, policy, steps, weights, behavior, score, _ in rows:
        if run_name in given and (steps, weights) == (str(args.steps), args.weights):
            table[name, behavior][policy].append(float(score))
    print(f"| experiment | best response, sampled actions | {' | '.join(args.policies)} |")
    print(f"|---|---|{'---|' * len(args.policies)}")
    for (name, behavior), columns in table.items():
        scores_of = [np.array(columns[policy]) for policy in args.policies]
        cells = [describe(x.mean(), student_interval(x) if len(x) > 1 else None) if len(x) else "" for x in scores_of]
        print(f"| {name} | {behavior} | {' | '.join(cells)} |")


if __name__ == "__main__":
    keep_printing()
    command = tyro.cli(
        Annotated[Scores, tyro.conf.subcommand("scores")]
        | Annotated[Versus, tyro.conf.subcommand("versus")]
        | Annotated[Exploitability, tyro.conf.subcommand("exploitability")],
        prog="python -m benchmark.selfplay",
    )
    for name in ("games", "steps"):
        if getattr(command, name, 1) < 1:
            fail(f"--{name} takes a number from 1, not {getattr(command, name)}")
    if command.csv is not None:
        try:  # before the games, which may take hours
            command.csv.parent.mkdir(parents=True, exist_ok=True)
            command.csv.open("a").close()
        except OSError as error:
            fail(f"--csv takes a file that can be written: {error}")
    if isinstance(command, Exploitability):
        print_exploitability(command)
    else:
        print_scores(command) if isinstance(command, Scores) else print_versus(command)
