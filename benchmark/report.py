"""Tables and curves of finished runs, from their TensorBoard files.

    python -m benchmark.report runs/Hopper-v5__* runs/Walker2d-v5__* --output benchmark/results/mujoco
    python -m benchmark.report runs/* --output benchmark/results/both --normalize-by sac_continuous
    python -m benchmark.report runs/sumo__ppo_sumo__* --output benchmark/results/sumo --cross-play

Prints the report and writes it to OUTPUT.md, the final scores of every run to OUTPUT.csv, the points behind the curves to
OUTPUT_curves.csv, and the curves over environment steps to OUTPUT.png and over training time to OUTPUT_time.png.

The number of a run is the evaluation of its final policy, never the best one. The runs of a task and experiment are a sample:
mean, interquartile mean (IQM) and 95% percentile-bootstrap interval are over runs. Training time leaves out the gap before a
resumed run went on; curves show it as the median time in which the runs got to a step.

With --normalize-by NAME a score on a task is (x - low) / (high - low): 1 is the IQM of NAME's final policies, and 0 the mean of
the first training returns of NAME's runs, which an untrained policy got. Neither end moves when other experiments are added.
Both are taken as known: the intervals hold the noise of the runs, not that of the scale.
"""

import csv
import json
import os
import re
import shlex
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, cycle, product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from matplotlib import color_sequences
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from benchmark import fail
from benchmark.statistics import Statistic, interquartile_mean, interval, mean, probability_of_improvement

PUBLISHED = Path(__file__).parent / "published_returns.csv"
RETURN, TRAINING_RETURN, SPEED = "eval/return_mean", "charts/episodic_return", "charts/SPS"
KEYS = re.compile(rf"{RETURN}|{TRAINING_RETURN}|{SPEED}|eval/.+_score_vs_.+|selfplay/rating_.+")
# arguments in which runs may differ: what is learned depends on none of them but the seed
MAY_DIFFER = {"seed", "eval_freq", "cross_play_games", "cross_play_snapshots", "evaluate", "against", "resume", "cuda"}
MAY_DIFFER |= {"wandb_project_name", "wandb_entity", "capture_video", "save_model", "upload_model", "hf_entity", "track"}
MAY_DIFFER |= {"compile"}


@dataclass
class Args:
    """Tables and curves of finished runs."""

    runs: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="RUNS", help_behavior_hint="")]
    """run folders; those of runs that are not finished are named and left out"""
    output: Path = Path("benchmark/results/report")
    """beginning of the names of all files that are written: OUTPUT.md, OUTPUT.csv, OUTPUT.png ..."""
    normalize_by: str | None = None
    """the experiment (--exp-name of its runs) whose IQM is the normalised score 1, to pool returns over tasks"""
    cross_play: bool = False
    """let the final policies of each self-play experiment play each other: OUTPUT_cross_play_TASK_NAME.csv and .png"""
    cross_play_games: int = 200
    """games of each pair in --cross-play"""


@dataclass(frozen=True)
class Run:
    """A run folder's contents."""

    folder: Path
    env_id: str
    exp_name: str
    seed: int
    total_timesteps: int
    args: dict[str, Any]
    """all arguments, these four among them"""
    starts: list[dict[str, Any]]
    """what a sweep's journal has of its beginning and of each time that it was resumed; nothing if it is not of a sweep"""
    curves: dict[str, np.ndarray]
    """by TensorBoard key: (points, 3), the columns being environment steps, seconds of training and value"""

    @property
    def last_step(self) -> int:
        """Environment steps at the last evaluation; 0 without any."""
        return int(min((curve[-1, 0] for key, curve in self.curves.items() if key.startswith("eval/")), default=0))

    @property
    def command(self) -> str:
        """What it was begun with; empty if unknown."""
        python, script, *flags = self.starts[0]["command"] if self.starts else ("", "")
        return shlex.join([Path(python).name, Path(script).name, *flags]) if python else ""

    def versions(self, key: str) -> str:
        """The scripts that did it: "sha256", or "commit" with a plus if a file was changed since; empty if unknown."""
        texts = [start[key][:7] + "+" * (key == "commit" and start["dirty"]) for start in self.starts if start.get(key)]
        return ", ".join(dict.fromkeys(texts))


Groups = dict[tuple[str, str], list[Run]]  # the runs of a task and experiment, by seed


# === Reading ==========================================================================================================


def read_curves(folder: Path) -> dict[str, np.ndarray]:
    """What the event files of a run hold of the keys shown here; see `Run.curves`.

    A resumed run has a file for each part. A later part stands for all that earlier ones logged from its first step on, which
    was lost and done again, and its clock goes on from the last point that is left. A file may end in half a record.
    """
    paths = folder.glob("events.out.tfevents.*")
    parts = [[Event.FromString(record) for record in RawEventFileLoader(str(path)).Load()] for path in paths]
    points: list[tuple[str, int, float, float]] = []
    for events in sorted(filter(None, parts), key=lambda events: events[0].wall_time):
        scalars = [(event, value) for event in events for value in event.summary.value if KEYS.fullmatch(value.tag)]
        starts = [event.step for event in events if event.HasField("session_log")]  # SummaryWriter's purge_step
        first_step = min(starts + [event.step for event, _ in scalars], default=float("inf"))
        points = [point for point in points if point[1] < first_step]
        start = events[0].wall_time - max((seconds for _, _, seconds, _ in points), default=0.0)
        points += [(value.tag, event.step, event.wall_time - start, value.simple_value) for event, value in scalars]
    curves = defaultdict(list)
    for key, *point in points:
        curves[key].append(point)
    return {key: np.array(curve) for key, curve in curves.items()}


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run in its sweep's journal (`benchmark.sweep`), from the last one on that began anew."""
    journal = folder.resolve().parents[1] / "jobs" / (re.sub(r"__\d+(-\d+)?$", "", folder.resolve().name) + ".jsonl")
    starts: list[dict[str, Any]] = []
    for line in journal.read_text().splitlines() if journal.exists() else []:
        with suppress(ValueError):  # a line that a full disk cut off
            record = json.loads(line)
            if "exit" not in record:
                starts = [*(starts if "--resume" in record["command"] else []), record]
    return starts


def read_run(folder: Path, curves: dict[str, np.ndarray]) -> Run | None:
    """A run from its folder and curves, None if it was killed before it began; exits with one sentence if it is no run's."""
    if folder.is_dir() and not (folder / "args.json").exists() and re.search(r"__\d+(-\d+)?$", folder.name):
        return None
    try:
        args = json.loads((folder / "args.json").read_text())
        env_id, exp_name, seed, total_timesteps = (args[name] for name in ("env_id", "exp_name", "seed", "total_timesteps"))
        return Run(folder, env_id, exp_name, seed, total_timesteps, args, read_starts(folder), curves)
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"RUNS takes run folders with the args.json of a run, and {folder} is none ({type(error).__name__}: {error})")


def group_runs(runs: list[Run]) -> tuple[Groups, list[str]]:
    """Finished runs by task and experiment, sorted, and notes on what a reader of their table must know.

    Exits with one sentence if no run is finished, or a seed is there twice: it would count twice.
    """
    groups: Groups = {}
    notes = []
    for run in sorted(runs, key=lambda run: (run.env_id, run.exp_name, run.seed)):
        if run.last_step < run.total_timesteps:
            reached = f"last evaluation at step {run.last_step:,} of {run.total_timesteps:,}"
            notes.append(f"Left out, not finished: {run.folder.name} ({reached}).")
            continue
        group = groups.setdefault((run.env_id, run.exp_name), [])
        if group and group[-1].seed == run.seed:
            fail(f"RUNS takes each seed of a task and experiment once, and {group[-1].folder} and {run.folder} have the same")
        group.append(run)
        first = group[0]
        if set(shared_keys([first], "eval/")) != set(shared_keys([run], "eval/")):
            fail(f"RUNS takes runs of one kind for a task and experiment, and {first.folder} and {run.folder} log other scores")
        for flag in sorted((first.args.keys() | run.args.keys()) - MAY_DIFFER):
            ours, theirs = (x.args.get(flag, "not a flag") for x in (first, run))
            if ours != theirs:
                values = f"{ours} in {first.folder.name}, {theirs} in {run.folder.name}"
                notes.append(f"**Not of one kind**: --{flag.replace('_', '-')} is {values}.")
        ours, theirs = first.versions("sha256"), run.versions("sha256")
        if "," in theirs:
            notes.append(f"**Not of one kind**: {run.folder.name} was resumed by another script: {run.versions('commit')}.")
        if ours and theirs and ours != theirs:
            scripts = f"{first.versions('commit')} in {first.folder.name}, {run.versions('commit')} in {run.folder.name}"
            notes.append(f"**Not of one kind**: the script is that of {scripts}.")
    if not groups:
        fail(f"RUNS takes finished runs, and none of these {len(runs)} has an evaluation at its last step")
    if any(len(group) < 5 for group in groups.values()):
        notes.append("The interval of fewer than five runs is too narrow, and one run has none.")
    for task in dict.fromkeys(env_id for env_id, _ in groups):
        steps = [group[0].last_step for (env_id, _), group in groups.items() if env_id == task]
        if max(steps) > 1.05 * min(steps):
            notes.append(f"**Unequal budgets**: runs on {task} have from {min(steps):,} to {max(steps):,} steps.")
    return groups, notes


def shared_keys(group: list[Run], *prefixes: str) -> list[str]:
    """The keys with one of the prefixes, in their order, that all runs of a group have."""
    shared = [key for key in group[0].curves if all(key in run.curves for run in group)]
    return [key for prefix in prefixes for key in shared if key.startswith(prefix)]


def drawn_keys(group: list[Run]) -> list[str]:
    """What of a group is drawn: evaluations, ratings, and if a run has fewer than three evaluations the training returns."""
    keys = shared_keys(group, "eval/", "selfplay/")
    has_few = any(len(run.curves[key]) < 3 for run in group for key in keys if key.startswith("eval/"))
    return keys + (shared_keys(group, TRAINING_RETURN) if has_few else [])


def final_scores(group: list[Run], key: str) -> np.ndarray:
    """Of the runs' final policies (n,)."""
    return np.array([run.curves[key][-1, 2] for run in group])


# === Tables ===========================================================================================================


def describe_key(key: str) -> str:
    """A TensorBoard key in words."""
    return "return" if key == RETURN else key.partition("/")[2].replace("_score_vs_", " vs ").replace("rating_", "rating of ")


def describe_number(x: float) -> str:
    """Four digits, or as many as an integer part has."""
    return f"{x:,.{max(0, 4 - len(str(int(abs(x)))))}f}" if np.isfinite(x) else str(x)


def describe_interval(x: float, low: float, high: float) -> str:
    """A number with its interval."""
    return f"{describe_number(x)} [{describe_number(low)}, {describe_number(high)}]"


def describe_statistic(statistic: Statistic, strata: list[np.ndarray]) -> str:
    """A statistic of all strata with its bootstrap interval, if they have the two runs that one takes."""
    x = float(statistic(np.concatenate(strata)))
    several = min(map(len, strata)) > 1
    return describe_interval(x, *map(float, interval(statistic, strata))) if several else describe_number(x)


def table(*rows: list[str]) -> str:
    """Markdown of a header and rows."""
    header, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([header, "|---" * len(rows[0]) + "|", *body])


def score_table(groups: Groups) -> str:
    """A row for each score of a task and experiment."""
    rows = [["task", "experiment", "score", "seeds", "steps", "mean [95%]", "IQM [95%]", "steps/s"]]
    for (env_id, exp_name), group in groups.items():
        speeds = [np.median(run.curves[SPEED][:, 2]) for run in group if SPEED in run.curves]
        speed = f"{np.median(speeds):,.0f}" if speeds else ""
        for key in shared_keys(group, "eval/"):
            scores = [final_scores(group, key)]
            estimates = [describe_statistic(statistic, scores) for statistic in (mean, interquartile_mean)]
            counts = [str(len(group)), f"{group[0].last_step:,}"]
            rows.append([env_id, exp_name, describe_key(key), *counts, *estimates, speed])
    return table(*rows)


def published_table(groups: Groups) -> str:
    """Returns beside published ones of the task in whichever version; empty if there are none."""
    with PUBLISHED.open() as file:
        published = list(csv.DictReader(file))
    rows = [["task", "algorithm", "steps", "mean [95%] or ± std", "seeds", "protocol", "source"]]
    for task in dict.fromkeys(env_id.rpartition("-v")[0] for env_id, _ in groups):
        theirs = [row for row in published if row["env"] == task]
        for (env_id, exp_name), group in groups.items():
            if theirs and env_id.rpartition("-v")[0] == task:
                estimate = describe_statistic(mean, [final_scores(group, RETURN)])
                protocol = f"deterministic return of the final policy, {group[0].args.get('eval_episodes', '?')} episodes"
                steps, seeds = f"{group[0].last_step:,}", str(len(group))
                rows.append([env_id, f"**{exp_name}**", steps, f"**{estimate}**", seeds, protocol, "these runs"])
        for row in sorted(theirs, key=lambda row: (row["algorithm"], int(row["env_steps"]))):
            name = f"{task}-{row['env_version']}" if row["env_version"][0] == "v" else f"{task}, version {row['env_version']}"
            estimate = f"{row['mean']} ± {row['std']}" if row["std"] else row["mean"]
            steps = f"{int(row['env_steps']):,}"
            rows.append([name, row["algorithm"], steps, estimate, row["seeds"], row["protocol"], row["source"]])
    return table(*rows) if len(rows) > 1 else ""


def returns_by_experiment(groups: Groups) -> dict[str, dict[str, np.ndarray]]:
    """Final returns (n,) of each experiment on each of its tasks."""
    returns: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for (env_id, exp_name), group in groups.items():
        if RETURN in group[0].curves:
            returns[exp_name][env_id] = final_scores(group, RETURN)
    return returns


def find_scales(groups: Groups, reference: str) -> dict[str, tuple[float, float]]:
    """The returns with the normalised scores 0 and 1 on each task that every experiment has and the reference got better at."""
    returns, scales = returns_by_experiment(groups), {}
    if reference not in returns:
        fail(f"--normalize-by takes one of the experiments with returns ({', '.join(returns)}), not {reference}")
    for env_id in returns[reference]:
        group = groups[env_id, reference]
        first = [run.curves[TRAINING_RETURN][0, 2] for run in group if TRAINING_RETURN in run.curves]
        low, high = float(np.mean(first or np.nan)), float(interquartile_mean(final_scores(group, RETURN)))
        if low < high and all(env_id in tasks for tasks in returns.values()):
            scales[env_id] = low, high
    return scales


def pooled_table(groups: Groups, scales: dict[str, tuple[float, float]], reference: str) -> str:
    """The experiments' normalised IQM over tasks, and what the scale is."""
    ends = [f"{env_id} from {describe_number(low)} to {describe_number(high)}" for env_id, (low, high) in scales.items()]
    rows = [["experiment", "tasks", "runs", "normalised IQM [95%]"]]
    for exp_name, tasks in returns_by_experiment(groups).items():
        strata = [(tasks[env_id] - low) / (high - low) for env_id, (low, high) in scales.items()]
        rows.append([exp_name, str(len(strata)), str(sum(map(len, strata))), describe_statistic(interquartile_mean, strata)])
    counts = [{len(tasks[env_id]) for env_id in scales} for tasks in returns_by_experiment(groups).values()]
    is_even = all(len(numbers) < 2 for numbers in counts)
    weights = "" if is_even else " An experiment has not as many runs on each task; those with more count for more."
    scale = f"The scale is 0 for the first training returns of {reference}, and 1 for the IQM of its final policies"
    return f"{table(*rows)}\n\n{scale}: {'; '.join(ends)}.{weights}"


def improvement_table(groups: Groups) -> str:
    """For each two experiments the probability that a run of the one beats one of the other, over the tasks that both have."""
    rows = [["a run of", "beats one of", "tasks", "probability [95%]"]]
    steps = {name: {group[0].last_step for (_, exp_name), group in groups.items() if exp_name == name} for _, name in groups}
    budgets = {name: f"{name} ({' to '.join(f'{x:,}' for x in sorted({min(s), max(s)}))} steps)" for name, s in steps.items()}
    for (ours, our_tasks), (theirs, their_tasks) in combinations(returns_by_experiment(groups).items(), 2):
        tasks = [env_id for env_id in our_tasks if env_id in their_tasks]
        if tasks:
            x, y = [our_tasks[env_id] for env_id in tasks], [their_tasks[env_id] for env_id in tasks]
            probability, low, high = probability_of_improvement(x, y)
            several = min(map(len, x + y)) > 1
            cell = describe_interval(probability, low, high) if several else describe_number(probability)
            rows.append([budgets[ours], budgets[theirs], str(len(tasks)), cell])
    return table(*rows) if len(rows) > 1 else ""


def command_table(groups: Groups) -> str:
    """What the first run of each task and experiment was begun with, and the commits of all its runs; if known of one."""
    rows = [["task", "experiment", "command of the first run", "commit"]]
    for (env_id, exp_name), group in groups.items():
        commits = [commit for run in group for commit in (run.versions("commit") or "unknown").split(", ")]
        rows.append([env_id, exp_name, f"`{group[0].command}`", ", ".join(dict.fromkeys(commits))])
    return table(*rows) if any(run.command for group in groups.values() for run in group) else ""


def write_csv(path: Path, header: str, rows: list[list[Any]]) -> None:
    """Rows under the words of a header."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header.split(), *rows])


# === Curves ===========================================================================================================


def common_points(group: list[Run], key: str, size: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps (t,) that lie within all runs' curves, at most `size`; median seconds (t,) and values (t, n) of the runs there."""
    curves = [run.curves[key] for run in group]
    steps = np.unique(np.concatenate([curve[:, 0] for curve in curves]))
    steps = steps[(steps >= max(curve[0, 0] for curve in curves)) & (steps <= min(curve[-1, 0] for curve in curves))]
    if len(steps) > size:
        steps = steps[np.linspace(0, len(steps) - 1, size).round().astype(int)]
    seconds, values = (np.stack([np.interp(steps, c[:, 0], c[:, i]) for c in curves], axis=-1) for i in (1, 2))
    return steps, np.median(seconds, axis=-1), values


def draw_curve(axes: Axes, group: list[Run], key: str, color: str, label: str, over_time: bool, linewidth: float = 1.5) -> None:
    """The mean over runs, and its interval as a band if there are two or more."""
    steps, seconds, values = common_points(group, key)
    x = seconds / 60 if over_time else steps
    axes.plot(x, values.mean(-1), color=color, linewidth=linewidth, label=label)
    if len(group) > 1 and len(x):
        axes.fill_between(x, *interval(mean, [values], resamples=1000), color=color, alpha=0.2, linewidth=0)


def draw_pooled(
    axes: Axes, groups: Groups, scales: dict[str, tuple[float, float]], colors: dict[str, str], over_time: bool
) -> None:
    """Normalised IQM over tasks, from where all have been evaluated: at each share of a run's steps, or over minutes.

    Over minutes a task whose runs have ended stays at what they ended with, until the longest one has ended.
    """
    for exp_name in returns_by_experiment(groups):
        curves = [common_points(groups[env_id, exp_name], RETURN) for env_id in scales]
        places = [seconds / 60 if over_time else steps / steps[-1] for steps, seconds, _ in curves]
        x = np.linspace(max(place[0] for place in places), max(place[-1] for place in places), 50)
        strata = []
        for place, (_, _, values), (low, high) in zip(places, curves, scales.values(), strict=True):
            at_x = np.stack([np.interp(x, place, run_values) for run_values in values.T], axis=-1)
            strata.append((at_x - low) / (high - low))
        label = exp_name if over_time else f"{exp_name}, {max(steps[-1] for steps, _, _ in curves):,.0f} steps"
        axes.plot(x, interquartile_mean(np.concatenate(strata, axis=-1)), color=colors[exp_name], label=label)
        if min(values.shape[-1] for values in strata) > 1:
            band = interval(interquartile_mean, strata, resamples=1000)
            axes.fill_between(x, *band, color=colors[exp_name], alpha=0.2, linewidth=0)
    axes.set(title=f"{len(scales)} tasks together", ylabel="normalised IQM")
    axes.set_xlabel("minutes of training" if over_time else "share of the steps")


def draw(groups: Groups, scales: dict[str, tuple[float, float]], over_time: bool) -> Figure:
    """A panel for each return, score and rating of each task; and one for all tasks together, if there are scales for it.

    Curves of fewer than three points are dots, one for each run; training returns are thin lines.
    """
    names = sorted({exp_name for _, exp_name in groups})
    palette = color_sequences["tab10" if len(names) <= 10 else "tab20"]
    colors = {exp_name: to_hex(color) for exp_name, color in zip(names, cycle(palette), strict=False)}
    panels: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for (env_id, exp_name), group in groups.items():
        for key in drawn_keys(group):
            panels[env_id, RETURN if key == TRAINING_RETURN else key].append((exp_name, key))
    pooled = [group for (env_id, _), group in groups.items() if env_id in scales]
    has_pooled = bool(pooled) and min(len(run.curves[RETURN]) for group in pooled for run in group) >= 3
    num_panels = len(panels) + has_pooled
    num_rows, num_columns = -(-num_panels // 3), min(3, num_panels)
    is_crowded = len(names) > 6  # legends would hide the curves, and bands each other
    figure = Figure(figsize=((7.0 if is_crowded else 5.0) * num_columns, 3.6 * num_rows), layout="constrained")
    grid = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for axes, ((env_id, panel_key), curves) in zip(grid, panels.items(), strict=False):
        for exp_name, key in curves:
            group, color = groups[env_id, exp_name], colors[exp_name]
            if key == TRAINING_RETURN:
                draw_curve(axes, group, key, color, f"{exp_name}, training", over_time, linewidth=0.6)
            elif min(len(run.curves[key]) for run in group) >= 3:
                draw_curve(axes, group, key, color, f"{exp_name} ({len(group)})", over_time)
            else:
                points = np.concatenate([run.curves[key] for run in group])
                x = points[:, 1] / 60 if over_time else points[:, 0]
                axes.plot(x, points[:, 2], "o", color=color, markersize=4, label=f"{exp_name} ({len(group)})")
        axes.set_title(env_id if panel_key == RETURN else f"{env_id}: {describe_key(panel_key)}")
        axes.set_xlabel("minutes of training" if over_time else "environment steps")
        if not over_time:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k
        if panel_key == RETURN:
            axes.set_ylabel("return")
        elif panel_key.startswith("selfplay/"):
            axes.set_ylabel("rating among own snapshots")
        else:
            axes.set(ylabel="score", ylim=(-0.03, 1.03))
    if has_pooled:
        draw_pooled(grid[len(panels)], groups, scales, colors, over_time)
    for axes in grid[:num_panels]:
        axes.grid(alpha=0.3)
        if is_crowded:
            axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
            for band in axes.collections:
                band.set_alpha(1.0 / len(names))
        else:
            axes.legend(fontsize="small")
    for axes in grid[num_panels:]:
        axes.set_axis_off()
    return figure


# === Self-play ========================================================================================================


def cross_play_tables(groups: Groups, num_games: int, output: Path) -> list[str]:
    """Lets the final policies of each self-play experiment play each other, likeliest actions; Markdown of the tables.

    Exits with one sentence if no self-play experiment has two runs, or their policies cannot meet.
    """
    from functools import partial

    from benchmark.selfplay import check_one_game, script_of  # loads PyTorch and the scripts, which nothing else here needs
    from utils.cross_play import Player, cross_play

    texts = []
    for (env_id, exp_name), group in groups.items():
        if RETURN in group[0].curves or len(group) < 2:
            continue
        check_one_game([run.folder for run in group])
        script = script_of(group[0].folder)
        players = []
        for run in group:
            agents, _, args = script.load_run(run.folder, "cross-play")
            players += [Player(f"seed {run.seed}", behavior, agent.acting_weights()) for behavior, agent in agents.items()]
        players.sort(key=lambda player: list(agents).index(player.behavior))
        result = cross_play(partial(script.make_env, args), agents, players, num_games, seed=7_000_000, deterministic=True)
        path = f"{output}_cross_play_" + re.sub(r"[^\w.-]", "-", f"{env_id}_{exp_name}")
        result.write_csv(Path(f"{path}.csv"))
        result.heat_map().savefig(f"{path}.png", dpi=120)
        title = f"{env_id}, {exp_name}: points of row against column in percent, {num_games} games a pair"
        texts.append(f"{title}\n\n```\n{result.text()}\n```")
    if not texts:
        fail("--cross-play takes self-play runs, two seeds or more of an experiment, and there are none")
    return texts


# === Main =============================================================================================================


def main(args: Args) -> None:
    """Reads the runs, prints the report, and writes its files."""
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output takes the beginning of a path that can be written: {error}")
    if not os.access(args.output.parent, os.W_OK):
        fail(f"--output takes the beginning of a path that can be written, and {args.output.parent} cannot")
    if args.cross_play_games < 1:
        fail(f"--cross-play-games takes a number from 1, not {args.cross_play_games}")
    with ProcessPoolExecutor() as pool:
        runs = list(map(read_run, args.runs, pool.map(read_curves, args.runs)))
    groups, notes = group_runs([run for run in runs if run is not None])
    left_out = [folder.name for folder, run in zip(args.runs, runs, strict=True) if run is None]
    notes += [f"Left out, killed before it began: {name}." for name in left_out]

    scales = {} if args.normalize_by is None else find_scales(groups, args.normalize_by)
    sections = {"Final scores": score_table(groups), "Published returns": published_table(groups)}
    if scales:
        sections["All tasks together"] = pooled_table(groups, scales, str(args.normalize_by))
    left_out = [env_id for env_id in dict.fromkeys(env_id for env_id, _ in groups) if env_id not in scales]
    if args.normalize_by is not None and left_out:
        reason = f"not all experiments have it, or {args.normalize_by} did not get better on it"
        notes.append(f"Not in the pooled score: {', '.join(left_out)} ({reason}).")
    sections["Probability of improvement"] = improvement_table(groups)
    if args.cross_play:
        tables = cross_play_tables(groups, args.cross_play_games, args.output)
        sections["Cross-play of the final policies"] = "\n\n".join(tables)
    sections["Commands"] = command_table(groups)
    sections["Notes"] = "\n".join(f"- {note}" for note in notes)
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.items() if body)
    Path(f"{args.output}.md").write_text(text + "\n")

    finals, points = [], []
    for (env_id, exp_name), group in groups.items():
        for run, key in product(group, drawn_keys(group)):
            name, curve = [env_id, exp_name, run.seed, key], run.curves[key]
            rows = [[*name, int(step), f"{seconds:.1f}", f"{value:.7g}"] for step, seconds, value in curve]
            points += rows
            finals += [[*rows[-1], run.folder.name, run.versions("commit")]] if key.startswith("eval/") else []
    write_csv(Path(f"{args.output}.csv"), "task experiment seed key step seconds value folder commit", finals)
    write_csv(Path(f"{args.output}_curves.csv"), "task experiment seed key step seconds value", points)
    draw(groups, scales, over_time=False).savefig(f"{args.output}.png", dpi=120)
    draw(groups, scales, over_time=True).savefig(f"{args.output}_time.png", dpi=120)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m benchmark.report"))
