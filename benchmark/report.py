"""Tables and figures of runs, from their TensorBoard files, on one page.

    python -m benchmark.report sweeps/ppo_continuous --output benchmark/results/my_study
    python -m benchmark.report sweeps/* --output benchmark/results/both --normalize-by sac_continuous
    python -m benchmark.report benchmark/results/ppo --output benchmark/results/ppo --formats png pdf
    python -m benchmark.report sweeps/sac --output results/sac --published benchmark/published_curves.csv

Prints the report and writes a folder: README.md (the report stands between two marker lines; text outside of them is
kept), scores.csv (a row for each run and score), curves.csv (the points behind the curves) and figures: steps, time
(curves over environment steps and over minutes), intervals, improvement and, with --normalize-by, profiles. A folder
that a report wrote takes the place of its runs.

The score of a run is the evaluation of its final policy, never the best one. A run that crashed or diverged counts as
the worst: as the lowest score of all runs on the task, or that of the random policy if this is lower. Runs that have
not ended are left out; so is a run that crashed outside of a sweep, because nothing recorded its exit status. The table
and the notes say how many of each there are. Intervals of means are Student's t. Those over tasks are stratified
bootstraps. Probabilities of improvement have their own (`benchmark/statistics.py`).

With --normalize-by NAME a return on a task is shown as (x - low) / (high - low): 0 is the return of a random policy,
measured (`benchmark.random_policy`), and 1 the IQM of NAME's final policies. The scale counts as known: intervals do
not contain its noise.
"""

import csv
import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from benchmark import REPOSITORY, fail
from benchmark.figures import draw, draw_improvement, draw_intervals, draw_profiles, make_look, published_error
from benchmark.runs import (
    RETURN,
    Groups,
    Pair,
    Run,
    Scales,
    describe_key,
    describe_number,
    drawn_keys,
    final_scores,
    find_scales,
    group_runs,
    improvement_pairs,
    last_step,
    normalised,
    read_all,
    shared_keys,
    write_csv,
)
from benchmark.statistics import (
    bootstrap_interval,
    collapsed,
    interquartile_mean,
    student_interval,
)
from utils.errors import keep_printing, write_file

PUBLISHED = Path(__file__).parent / "published_returns.csv"
SCORES = ["task", "experiment", "seed", "key", "step", "seconds", "value"]  # then what is known of the run
FACTS = ["budget", "state", "device", "commit", "sources", "command", "folder", "env_kwargs", "threads", "versions"]
ENDINGS = ("png", "pdf", "svg")
FIGURES = ("steps", "time", "intervals", "improvement", "profiles")
BEGIN, END = "<!-- report -->", "<!-- end of report -->"


@dataclass
class Args:
    """Tables and figures of runs, on one page."""

    runs: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="RUNS", help_behavior_hint="")]
    """folders of runs, of sweeps, or that an earlier report wrote"""
    output: Path = Path("benchmark/results/report")
    """folder of the page, the tables and the figures"""
    normalize_by: str | None = None
    """the experiment (--exp-name of its runs) whose IQM is the normalised score 1, to pool returns over tasks"""
    labels: tuple[str, ...] = ()
    """names in figures, each NAME=LABEL, such as ppo_continuous="PPO, defaults"; they also order the legend"""
    formats: tuple[Literal["png", "pdf", "svg"], ...] = ("png",)
    """files of each figure"""
    smooth: int = 1
    """curves are centred moving averages over so many evaluations"""
    published: Path | None = None
    """draws published curves behind the runs', over steps: a CSV of the form of benchmark/published_curves.csv"""
    published_algorithms: tuple[str, ...] = ()
    """algorithms of --published to draw; all if not given"""
    cross_play: bool = False
    """let the final policies of each self-play experiment play each other: cross_play_TASK_NAME.csv and figure"""
    cross_play_games: int = 200
    """games of each pair in --cross-play"""


# === Tables ===========================================================================================================


def describe_interval(x: float, ends: tuple[Any, Any] | None) -> str:
    """A number with its interval, if it has one."""
    return describe_number(x) if ends is None else f"{describe_number(x)} [{', '.join(map(describe_number, ends))}]"


def describe_iqm(strata: list[np.ndarray], minus: list[np.ndarray] | None = None) -> str:
    """The IQM over all strata, or its difference from that of `minus`, with its interval if all have two runs."""
    values = [float(interquartile_mean(np.concatenate(x))) for x in (strata, minus) if x is not None]
    has_interval = min(map(len, [*strata, *(minus or [])])) > 1
    ends = bootstrap_interval(interquartile_mean, strata, minus=minus) if has_interval else None
    return describe_interval(values[0] - sum(values[1:]), ends)


def describe_seeds(group: list[Run]) -> str:
    """91 to 95, or 1, 2, 7."""
    seeds = sorted({run.seed for run in group})
    is_range = len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1
    return f"{seeds[0]} to {seeds[-1]}" if is_range else ", ".join(map(str, seeds))


def describe_steps(group: list[Run]) -> str:
    """1,000, or 900 to 1,000 if they differ."""
    steps = sorted({last_step([run]) for run in group})
    return " to ".join(f"{x:,}" for x in dict.fromkeys((steps[0], steps[-1])))


def describe_collapses(group: list[Run], key: str) -> str:
    """How many evaluations in the second half of the runs are below 60% of the best return so far, such as 2 of 55."""
    if key != RETURN:
        return ""
    curves = [run.curves[key] for run in group]
    own = [curve[np.isfinite(curve[:, 1])] for curve in curves]  # without what counts as the rest of a run that failed
    ends = [last_step([run]) for run in group]
    late = [collapsed(curve[:, 2])[curve[:, 0] > end / 2] for curve, end in zip(own, ends, strict=True)]
    is_positive = any(curve[:, 2].max(initial=0.0) > 0.0 for curve in own)
    return f"{sum(x.sum() for x in late)} of {sum(map(len, late))}" if is_positive else "-"


def table(*rows: list[str]) -> str:
    """Markdown of a header and rows."""
    header, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([header, "|---" * len(rows[0]) + "|", *body])


def score_table(groups: Groups, unfinished: Groups) -> str:
    """A row for each score of a task and experiment."""
    rows = [["task", "experiment", "score", "seeds", "steps", "mean [95%]", "IQM", "late collapses"]]
    for name, group in groups.items():
        states = Counter(run.state for run in group if run.state != "finished")
        missing = [f"{count} {state}" for state, count in states.items()]
        others = left_out(group, unfinished.get(name, []))
        missing += [f"{len(others)} unfinished, left out"] if others else []
        for key in shared_keys(group, "eval/"):
            scores = final_scores(group, key)
            iqm = describe_number(float(interquartile_mean(scores)))
            counts = [", ".join([str(len(group)), *missing]), describe_steps(group)]
            mean = describe_interval(float(scores.mean()), student_interval(scores) if len(scores) > 1 else None)
            rows.append([*name, describe_key(key), *counts, mean, iqm, describe_collapses(group, key)])
    if not any(row[-1] for row in rows[1:]):
        return table(*[row[:-1] for row in rows])
    note = (
        "Late collapses: evaluations in the second half of a run below 60% of its best one so far, if that is positive."
    )
    return f"{table(*rows)}\n\n{note}"


def pooled_table(groups: Groups, scales: Scales, reference: str) -> str:
    """The experiments' normalised IQM over tasks, their distance from the reference's, and what the scale is."""
    rows = [["experiment", "tasks", "runs", "normalised IQM [95%]", f"minus {reference} [95%]"]]
    all_strata = normalised(groups, scales)
    for exp_name, strata in all_strata.items():
        difference = "" if exp_name == reference else describe_iqm(strata, all_strata[reference])
        rows.append([exp_name, str(len(strata)), str(sum(map(len, strata))), describe_iqm(strata), difference])
    is_even = all(len(set(map(len, strata))) < 2 for strata in all_strata.values())
    weights = "" if is_even else " The number of runs differs between tasks; tasks with more runs count for more."
    ends_text = [
        f"{env_id} from {describe_number(low)} to {describe_number(high)}" for env_id, (low, high) in scales.items()
    ]
    scale = f"The scale is 0 for the random policy and 1 for the IQM of {reference}'s final policies"
    noise = "The interval is a stratified bootstrap. It does not contain the noise of the scale."
    return f"{table(*rows)}\n\n{scale}: {'; '.join(ends_text)}. {noise}{weights}"


def improvement_table(groups: Groups, pairs: Sequence[Pair]) -> str:
    """For each pair of experiments the probability that a run of the one beats one of the other, in both directions."""
    rows = [["A", "B", "tasks", "P(A beats B) [95%]", "P(B beats A) [95%]"]]
    runs: dict[str, list[Run]] = defaultdict(list)
    for (_, name), group in groups.items():
        runs[name] += group
    budgets = {name: f"{name} ({describe_steps(own)} steps)" for name, own in runs.items()}
    for ours, theirs, num_tasks, chances in pairs:
        rows.append([budgets[ours], budgets[theirs], str(num_tasks), *(describe_interval(*x) for x in chances)])
    return table(*rows) if pairs else ""


def command_table(groups: Groups) -> str:
    """The commands, tasks, seeds, devices and commits of each experiment; empty if no command is known."""
    by_task: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for (env_id, exp_name), group in groups.items():
        for run in group:
            command = run.command.replace(f"--env-id {shlex.quote(run.env_id)}", "--env-id TASK")
            by_task[exp_name, re.sub(r"--seed \S+", "--seed SEED", command), env_id].append(run)
    rows: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for (exp_name, command, _), runs in by_task.items():
        rows[exp_name, command, describe_seeds(runs)] += runs
    body = []
    for (exp_name, command, seeds), runs in rows.items():
        commits = dict.fromkeys(commit for run in runs for commit in (run.commit or "unknown").split(", "))
        devices = dict.fromkeys(run.device or "unknown" for run in runs)
        tasks = dict.fromkeys(run.env_id for run in runs)
        shown = f"`{command}`".replace("|", "\\|") if command else "unknown"
        body.append([exp_name, shown, ", ".join(tasks), seeds, ", ".join(devices), ", ".join(commits)])
    header = ["experiment", "command", "tasks", "seeds", "device", "commit"]
    return table(header, *body) if any(command for _, command, _ in rows) else ""


def origin_notes(groups: Groups, args: Args) -> list[str]:
    """What else a reader needs to repeat the page: threads, versions, labels, and the command of the report."""
    runs = [run for group in groups.values() for run in group]
    threads, versions = ({getattr(run, name) for run in runs} for name in ("threads", "versions"))
    notes = []
    if len(threads) == len(versions) == 1 and all(threads | versions):  # else the notes tell of a mixture
        notes.append(f"Threads of a run (OMP_NUM_THREADS): {min(threads)}. Versions: {min(versions)}.")
    if args.labels:
        notes.append(f"Names in the figures: {'; '.join(label.replace('=', ' is ', 1) for label in args.labels)}.")
    published = args.published and args.published.resolve()
    if published and published.is_relative_to(REPOSITORY):
        published = published.relative_to(REPOSITORY)
    flags = [("normalize-by", args.normalize_by), ("published", published and str(published))]
    words = [word for name, value in flags if value for word in (f"--{name}", value)]
    for name, values in (("labels", args.labels), ("published-algorithms", args.published_algorithms)):
        words += [f"--{name}", *values] if values else []
    words += ["--smooth", str(args.smooth)] if args.smooth > 1 else []
    words += ["--cross-play", "--cross-play-games", str(args.cross_play_games)] if args.cross_play else []
    notes.append(
        f"Intervals of means are Student's t. Made by `python -m benchmark.report {shlex.join(['RUNS', *words])}`."
    )
    return notes


def published_note(groups: Groups, output: Path) -> list[str]:
    """Where published returns of these tasks stand."""
    with PUBLISHED.open() as file:
        published = {row["env"] for row in csv.DictReader(file)}
    tasks = [
        env_id for env_id in dict.fromkeys(env_id for env_id, _ in groups) if env_id.rpartition("-v")[0] in published
    ]
    link = f"[{PUBLISHED.name}]({os.path.relpath(PUBLISHED, output)})"
    return [f"Published returns of {', '.join(tasks)}, with their protocols: {link}."] if tasks else []


def left_out(group: list[Run], unfinished: list[Run]) -> list[Run]:
    """The unfinished runs without those of a seed that was begun again and has ended."""
    seeds = {run.seed for run in group}
    return [run for run in unfinished if run.seed not in seeds]


def write_rows(groups: Groups, unfinished: Groups, output: Path) -> None:
    """scores.csv and curves.csv, from which `read_study` makes the same report."""
    scores: list[list[Any]] = []
    points: list[list[Any]] = []
    for env_id, exp_name in dict.fromkeys([*groups, *unfinished]):
        group = groups.get((env_id, exp_name), [])
        others = left_out(group, unfinished.get((env_id, exp_name), []))
        for run, key in product([*group, *others], drawn_keys(group or others) or [RETURN]):
            name, curve = [env_id, exp_name, run.seed, key], run.curves.get(key, np.zeros((0, 3)))
            own = curve[np.isfinite(curve[:, 1])]  # without what counts as the rest of a run that failed
            rows = [[*name, int(step), f"{seconds:.1f}", f"{value:.9g}"] for step, seconds, value in own]
            points += rows
            if key.startswith("eval/"):
                last = rows[-1] if run.state == "finished" else [*name, "", "", "nan"]
                facts = [run.total_timesteps, run.state, run.device, run.commit, run.sources, run.command]
                scores.append([*last, *facts, run.folder.name, run.env_kwargs, run.threads, run.versions])
    write_csv(output / "scores.csv", SCORES + FACTS, scores)
    write_csv(output / "curves.csv", SCORES, points)


def write_page(path: Path, text: str, figure: str) -> None:
    """Puts the report between the marker lines of the page, or at its end; keeps what stands outside of them."""
    page = path.read_text() if path.exists() else f"# {path.parent.name}\n\n![Curves]({figure})\n"
    before, begin, rest = page.partition(BEGIN)
    if begin and END not in rest:
        fail(f"--output takes a page with the line {END} below {BEGIN}, and {path} has none")
    after = rest.partition(END)[2]
    write_file(path, f"{before.rstrip()}\n\n{BEGIN}\n\n{text}\n\n{END}{after.rstrip()}\n".encode())


# === Self-play ========================================================================================================


def cross_play_tables(groups: Groups, num_games: int, output: Path, formats: Sequence[str]) -> list[str]:
    """Lets the final policies of each self-play experiment play each other, by most likely actions; Markdown tables.

    Exits with one sentence if no self-play experiment has two runs.
    """
    # These load PyTorch and the scripts, which nothing else here needs.
    from benchmark.selfplay import check_one_game, script_of
    from utils.cross_play import cross_play
    from utils.evaluation import current_players

    texts = []
    for (env_id, exp_name), group in groups.items():
        group = [run for run in group if run.state == "finished"]
        if len(group) < 2 or RETURN in group[0].curves or not group[0].args:
            continue
        check_one_game([run.folder for run in group])
        script = script_of(group[0].folder)
        players = []
        for run in group:
            agents, _, args = script.load_run(run.folder, "RUNS")
            env = script.make_env(args, 1)
            players += current_players(env, agents, f"seed {run.seed}")
            env.close()
        order = list(dict.fromkeys(player.behavior for player in players))
        players.sort(key=lambda player: order.index(player.behavior))
        result = cross_play(
            partial(script.make_env, args), agents, players, num_games, seed=7_000_000, deterministic=True
        )
        name = "cross_play_" + re.sub(r"[^\w.-]", "-", f"{env_id}_{exp_name}")
        result.write_csv(output / f"{name}.csv")
        for ending in formats:
            result.heat_map().savefig(output / f"{name}.{ending}", dpi=120)
        rules = f"points of row against column in percent, most likely actions, {num_games} games a pair"
        title = f"{env_id}, {exp_name}: {rules}"
        texts.append(f"{title}\n\n```\n{result.text()}\n```")
    if not texts:
        fail("--cross-play takes self-play runs, two seeds or more of an experiment, and there are none")
    return texts


# === Main =============================================================================================================


def read_published(args: Args) -> list[dict[str, str]]:
    """The rows of --published, of the algorithms that are wanted; exits with one sentence if there are none."""
    if args.published is None:
        if args.published_algorithms:
            fail("--published-algorithms takes --published FILE, too")
        return []
    try:
        rows = list(csv.DictReader(args.published.open()))
        if not rows or not {"algorithm", "env", "env_version", "std", "seeds", "source"} <= rows[0].keys():
            raise LookupError("columns are missing")
        for row in rows:
            float(row["mean"]), int(row["env_steps"]), published_error(row)
    except (OSError, ValueError, LookupError, TypeError) as error:
        message = "--published takes a CSV of the form of benchmark/published_curves.csv"
        fail(f"{message}, and {args.published} is none ({type(error).__name__}: {error})")
    algorithms = dict.fromkeys(row["algorithm"] for row in rows)
    if unknown := [name for name in args.published_algorithms if name not in algorithms]:
        names = ", ".join(algorithms)
        fail(f"--published-algorithms takes names of {args.published} ({names}), not {', '.join(unknown)}")
    return [row for row in rows if row["algorithm"] in (args.published_algorithms or algorithms)]


def main(args: Args) -> None:
    """Reads the runs, prints the report, and writes its files."""
    keep_printing()
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output takes a folder that can be written to: {error}")
    if not os.access(args.output, os.W_OK):
        fail(f"--output takes a folder that can be written to, and {args.output} cannot")
    for name in ("cross_play_games", "smooth"):
        if getattr(args, name) < 1:
            fail(f"--{name.replace('_', '-')} takes an integer from 1, not {getattr(args, name)}")
    scores = args.output / "scores.csv"
    if scores.exists() and not scores.read_text(errors="replace").startswith(",".join(SCORES)):
        fail(f"--output takes a folder of its own, and {scores} is of something else")
    if not args.formats:
        fail("--formats takes one or more of png, pdf and svg")
    published = read_published(args)
    runs, empty = read_all(args.runs)
    groups, unfinished, notes = group_runs(runs)
    look = make_look(groups, args.labels, args.smooth)
    notes += empty
    scales, not_pooled = ({}, []) if args.normalize_by is None else find_scales(groups, args.normalize_by)
    notes += not_pooled + published_note(groups, args.output) + origin_notes(groups, args)
    if any(len(group) < 2 for group in groups.values()):
        notes.append("One run has no interval.")

    sections = {"Final scores": score_table(groups, unfinished)}
    if scales:
        sections["All tasks together"] = pooled_table(groups, scales, str(args.normalize_by))
    pairs = improvement_pairs(groups, args.normalize_by)
    sections["Probability of improvement"] = improvement_table(groups, pairs)
    if args.cross_play:
        tables = cross_play_tables(groups, args.cross_play_games, args.output, args.formats)
        sections["Cross-play of the final policies"] = "\n\n".join(tables)
    sections["Commands"] = command_table(groups)
    sections["Notes"] = "\n".join(f"- {note}" for note in notes)
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.items() if body)

    figures = {"steps": draw(groups, scales, False, look, published), "time": draw(groups, scales, True, look)}
    figures["intervals"] = draw_intervals(groups, scales, look)
    if pairs:
        figures["improvement"] = draw_improvement(pairs, look)
    if scales:
        figures["profiles"] = draw_profiles(groups, scales, look)
    try:
        write_rows(groups, unfinished, args.output)
        for name, ending in product(FIGURES, ENDINGS):
            path = args.output / f"{name}.{ending}"
            if name in figures and ending in args.formats:
                figures[name].savefig(path, dpi=120)
            else:
                path.unlink(missing_ok=True)  # of an earlier report with other flags
        write_page(args.output / "README.md", text, f"steps.{args.formats[0]}")
    except OSError as error:
        fail(f"--output takes a folder that can be written to: {error}")
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m benchmark.report"))
