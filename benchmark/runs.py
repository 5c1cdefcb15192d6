"""Runs read from their folders, or from the tables of an earlier report, and grouped by task and experiment."""

import csv
import io
import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from benchmark import fail
from benchmark.provenance import read_journal, run_folders, run_name
from benchmark.random_policy import random_return
from benchmark.statistics import interquartile_mean, probability_of_improvement
from utils.errors import write_file

RETURN, TRAINING_RETURN = "eval/return_mean", "charts/episodic_return"
KEYS = re.compile(rf"{RETURN}|{TRAINING_RETURN}|eval/.+_score_vs_.+|selfplay/rating_.+")
# arguments in which runs may differ: what is learned depends on none of them but the seed
MAY_DIFFER = {"seed", "cuda", "compile", "eval_freq", "log_freq", "cross_play_games", "cross_play_snapshots"}
MAY_DIFFER |= {"evaluate", "against", "resume", "capture_video", "save_model", "upload_model", "hf_entity"}
MAY_DIFFER |= {"track", "wandb_project_name", "wandb_entity"}
STOPPED = ", stopped and resumed"  # behind the command of a run


@dataclass(frozen=True)
class Run:
    """What is known of a run."""

    folder: Path
    env_id: str
    exp_name: str
    seed: int
    total_timesteps: int
    state: str
    """finished, diverged (a score is not finite), failed (it crashed, or its time limit passed) or unfinished"""
    curves: dict[str, np.ndarray]
    """by TensorBoard key: (points, 3), the columns being environment steps, seconds of training and value"""
    args: Mapping[str, Any]
    """all arguments, these four among them; empty without a folder"""
    device: str = ""
    commit: str = ""
    sources: str = ""
    """hash of the script and of the project's modules that it imports"""
    command: str = ""
    env_kwargs: str = "{}"
    threads: str = ""
    versions: str = ""
    """of PyTorch and Gymnasium"""


Groups = dict[tuple[str, str], list[Run]]  # the runs of a task and experiment, by seed
Scales = dict[str, tuple[float, float]]  # by task the returns with the normalised scores 0 and 1
# A, B, the number of tasks of both, and how likely a run of A beats one of B, and the reverse, each with its interval
Pair = tuple[str, str, int, list[tuple[float, tuple[float, float] | None]]]


def write_csv(path: Path | None, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Rows under a header, if there is a file for them."""
    if path is not None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([header, *rows])
        write_file(path, text.getvalue().encode())


# === Reading ==========================================================================================================


def read_curves(folder: Path) -> dict[str, np.ndarray]:
    """What the event files of a run hold of the keys shown here; see `Run.curves`.

    A resumed run has a file for each part. A later part replaces what earlier ones logged from its first step
    on: those steps were lost and done again. Its clock goes on from the last point that is left. A file may end in half
    a record.
    """
    paths = folder.glob("events.out.tfevents.*")
    parts = [[Event.FromString(record) for record in RawEventFileLoader(str(path)).Load()] for path in paths]
    points: list[tuple[str, int, float, float]] = []
    for events in sorted(filter(None, parts), key=lambda events: events[0].wall_time):
        scalars = [(event, value) for event in events for value in event.summary.value if KEYS.fullmatch(value.tag)]
        first_step = min((event.step for event, _ in scalars), default=float("inf"))
        again = {(value.tag, event.step) for event, value in scalars}  # an evaluation may be all that is done again
        points = [x for x in points if x[1] < first_step or (x[1] == first_step and x[:2] not in again)]
        start = events[0].wall_time - max((seconds for _, _, seconds, _ in points), default=0.0)
        points += [(value.tag, event.step, event.wall_time - start, value.simple_value) for event, value in scalars]
    curves = defaultdict(list)
    for key, *point in points:
        curves[key].append(point)
    return {key: np.array(curve) for key, curve in curves.items()}


def last_attempt(journal: Path) -> list[dict[str, Any]]:
    """The records of a run in its sweep's journal (`benchmark.sweep`), from the last start on that began anew."""
    records: list[dict[str, Any]] = []
    for record in read_journal(journal):
        is_new = "exit" not in record and "--resume" not in record["command"]
        records = [record] if is_new else [*records, record]
    return records


def journal_of(folder: Path) -> Path:
    """Where the journal of a sweep's run is."""
    return folder.resolve().parent.parent / "jobs" / (re.sub(r"__\d+(-\d+)?$", "", folder.resolve().name) + ".jsonl")


def provenance_of(records: list[dict[str, Any]], args: Mapping[str, Any]) -> dict[str, str]:
    """Device, commits, hashes, threads, versions and first command of a run.

    A commit has a plus if a file was changed since. The command tells if the run was stopped by a signal and resumed:
    a stop adds a reset, so its numbers differ from those of an uninterrupted run. A kill adds none.
    """
    starts = [record for record in records if "exit" not in record]
    installed = [start["versions"] for start in starts if "versions" in start]
    versions = [", ".join(f"{x} {own[x]}" for x in ("torch", "gymnasium") if x in own) for own in installed]
    threads = [str(start["threads"]) for start in starts if start.get("threads")]
    commits = [start["commit"][:7] + "+" * bool(start["dirty"]) for start in starts if start.get("commit")]
    devices = [record["device"] for record in records if record.get("device")]
    python, script, *flags = starts[0]["command"] if starts else ("", "")
    budgets = [start["command"][-1] for start in starts[1:] if "--total-timesteps" in start["command"]]  # resumed
    more = STOPPED if any(record.get("exit") in (124, 129, 130, 143) for record in records[:-1]) else ""
    more += f", then --resume RUN --total-timesteps {budgets[-1]}" if budgets else ""
    folder = "variants/" if Path(script).parent.name == "variants" else ""
    return {
        "device": ", ".join(dict.fromkeys(devices)) or ("" if args.get("cuda", True) else "cpu"),
        "commit": ", ".join(dict.fromkeys(commits)),
        "sources": ", ".join(dict.fromkeys(start["sha256"][:7] for start in starts if start.get("sha256"))),
        "command": shlex.join([Path(python).name, folder + Path(script).name, *flags]) + more if python else "",
        "threads": ", ".join(dict.fromkeys(threads)),
        "versions": "; ".join(dict.fromkeys(versions)),
    }


def flags_of(command: Sequence[str]) -> dict[str, str]:
    """The flags of a command with the word after each, which is the value of those that take one."""
    parts = [part for word in command for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return {flag.replace("_", "-"): value for flag, value in pairwise([*parts, ""]) if flag.startswith("--")}


def state_of(curves: Mapping[str, np.ndarray], total_timesteps: int, records: list[dict[str, Any]]) -> str:
    """See `Run.state`."""
    scores = [curve for key, curve in curves.items() if key.startswith("eval/")]
    if any(not np.isfinite(curve[-1, 2]) for curve in scores):
        return "diverged"
    if scores and min(curve[-1, 0] for curve in scores) >= total_timesteps:
        return "finished"
    ends = [record for record in records if record.get("exit", 2) != 2]  # 2: refused before it began
    goes_on = not ends or "exit" not in records[-1] or ends[-1].get("stopped")  # stopped: by the sweep's own signals
    return "unfinished" if goes_on or ends[-1]["exit"] in (0, 129, 130, 143) else "failed"


def read_run(folder: Path, curves: dict[str, np.ndarray]) -> Run | str:
    """A run from its folder and curves, or why it is left out; exits with one sentence if the folder is no run's."""
    records = last_attempt(journal_of(folder))
    folders = run_folders(folder.resolve().parent, journal_of(folder).stem)
    is_replaced = bool(records) and folder.resolve() != folders[-1]
    if folder.is_dir() and not (folder / "args.json").exists() and re.search(r"__\d+(-\d+)?$", folder.name):
        return run_without_folder(folder, records) if records and not is_replaced else "killed before it began"
    try:
        args = json.loads((folder / "args.json").read_text())
        env_id, exp_name, seed, budget = (args[name] for name in ("env_id", "exp_name", "seed", "total_timesteps"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = f"{folder} is none ({type(error).__name__}: {error})"
        fail(f"RUNS takes run folders with the args.json of a run, and {reason}")
    state, provenance = state_of(curves, budget, records), provenance_of(records, args)
    if is_replaced and state != "finished":  # the journal is that of the later folder
        return "begun again in another folder"
    kwargs = args.get("env_kwargs", "{}")
    return Run(folder, env_id, exp_name, seed, budget, state, curves, args, **provenance, env_kwargs=kwargs)


def run_without_folder(folder: Path, records: list[dict[str, Any]]) -> Run:
    """A run of a sweep that ended before its folder was written, from its journal."""
    flags = flags_of(records[0]["command"])
    env_id, exp_name, seed = (flags[flag] for flag in ("--env-id", "--exp-name", "--seed"))
    budget, kwargs = int(flags.get("--total-timesteps", 0)), flags.get("--env-kwargs", "{}")
    provenance = provenance_of(records, {"cuda": "--no-cuda" not in flags})
    state = state_of({}, 1, records)
    return Run(folder, env_id, exp_name, int(seed), budget, state, {}, {}, **provenance, env_kwargs=kwargs)


def read_missing(sweeps: Iterable[Path]) -> list[Run]:
    """The runs of these sweeps that have a journal and no run folder at all."""
    runs = []
    for sweep in sweeps:
        for journal in sorted((sweep / "jobs").glob("*.jsonl")):
            if not run_folders(sweep / "runs", journal.stem) and (records := last_attempt(journal)):
                runs.append(run_without_folder(Path(journal.stem), records))
    return runs


def planned_runs(sweep: Path) -> list[str]:
    """Names of the runs that a sweep was asked for and that have neither a run folder nor a record in a journal."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        entries = json.loads((sweep / "manifest.json").read_text())
        flags = [flags_of(shlex.split(command)) for entry in entries for command in entry["runs"]]
        names = [run_name(own["--env-id"], own["--exp-name"], own["--seed"]) for own in flags]
        journals = {name: read_journal(sweep / "jobs" / f"{name}.jsonl") for name in names}
        return [x for x, records in journals.items() if not records and not run_folders(sweep / "runs", x)]
    return []


def read_study(folder: Path) -> list[Run]:
    """The runs of a folder that a report wrote."""
    points: dict[tuple[str, ...], list[list[float]]] = defaultdict(list)
    rows, curve_points = (
        list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
        for path in (folder / "scores.csv", folder / "curves.csv")
    )
    if not rows or not {"task", "key", "budget", "state", "folder"} <= rows[0].keys():
        fail(f"RUNS takes folders that a report wrote, and the scores.csv of {folder} is of something else")
    for point in curve_points:
        name = point["task"], point["experiment"], point["seed"], point["key"]
        points[name].append([float(point[column]) for column in ("step", "seconds", "value")])
    runs: dict[tuple[str, ...], Run] = {}
    for row in rows:
        run_name = row["task"], row["experiment"], row["seed"]
        facts = {field: row[field] for field in ("state", "device", "commit", "sources", "command")}
        facts |= {field: row.get(field) or "" for field in ("threads", "versions")}  # older tables have none
        facts["env_kwargs"] = row.get("env_kwargs") or "{}"
        own = {key: np.array(curve) for (*run, key), curve in points.items() if tuple(run) == run_name}
        run = Run(
            Path(row["folder"]), *run_name[:2], int(row["seed"]), int(row["budget"]), curves=own, args={}, **facts
        )
        run = runs.setdefault(run_name, run)
        if row["step"]:
            run.curves.setdefault(row["key"], np.array([[float(row[x]) for x in ("step", "seconds", "value")]]))
    return list(runs.values())


def read_all(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """All runs of these folders and of their sweeps, and notes on folders that hold nothing."""
    studies = [folder for folder in folders if (folder / "scores.csv").exists()]
    sweeps = [folder for folder in folders if (folder / "jobs").is_dir()]
    folders = [folder for folder in folders if folder not in studies + sweeps]
    folders += [run for sweep in sweeps for run in sorted((sweep / "runs").glob("*__*")) if run not in folders]
    with ProcessPoolExecutor() as pool:
        read = list(map(read_run, folders, pool.map(read_curves, folders)))
    notes = [f"Left out, {x}: {folder.name}." for folder, x in zip(folders, read, strict=True) if isinstance(x, str)]
    runs = [x for x in read if isinstance(x, Run)] + [run for folder in studies for run in read_study(folder)]
    runs += read_missing(sweeps)
    for sweep in sweeps:
        if planned := planned_runs(sweep):
            notes.append(f"Left out, never begun: {', '.join(planned)} ({len(planned)}).")
    names, others = {(run.env_id, run.exp_name) for run in runs}, Counter[str]()
    given = {sweep.resolve() for sweep in sweeps}
    for run in read_missing(sorted({folder.resolve().parent.parent for folder in folders} - given)):
        if (run.env_id, run.exp_name) in names:
            runs.append(run)
        elif run.state == "failed":
            others[f"{run.exp_name} on {run.env_id}"] += 1
    notes += [f"**Left out**: {name}, whose runs failed before they had a folder ({n})." for name, n in others.items()]
    return runs, notes


# === Groups ===========================================================================================================


def group_runs(runs: list[Run]) -> tuple[Groups, Groups, list[str]]:
    """Runs that have ended by task and experiment, sorted; those that have not; and notes that a reader must know.

    Exits with one sentence if no run is finished, or a seed is there twice: it would count twice.
    """
    groups: Groups = {}
    unfinished: Groups = defaultdict(list)
    notes = []
    for run in sorted(runs, key=lambda run: (run.env_id, run.exp_name, run.seed)):
        if run.state == "unfinished":
            last = max((curve[-1, 0] for key, curve in run.curves.items() if key.startswith("eval/")), default=0)
            reached = f"last evaluation at step {last:,.0f} of {run.total_timesteps:,}"
            notes.append(f"Left out, not finished: {run.folder.name} ({reached}).")
            unfinished[run.env_id, run.exp_name].append(run)
            continue
        group = groups.setdefault((run.env_id, run.exp_name), [])
        if group and group[-1].seed == run.seed:
            folders = f"{group[-1].folder} and {run.folder}"
            fail(f"RUNS takes each seed of a task and experiment once, and {folders} have the same")
        group.append(run)
    if not any(run.state == "finished" for group in groups.values() for run in group):
        fail(f"RUNS takes finished runs, and none of these {len(runs)} has an evaluation at its last step")
    for group in groups.values():
        notes += notes_on(group)
    ended = [run for group in groups.values() for run in group]
    notes += mixture_notes(ended)
    stops = Counter(run.exp_name for run in ended if STOPPED in run.command)
    for name, count in stops.items():
        notes.append(f"**Stopped by a signal and resumed**: {name} ({count}). An uninterrupted run has other numbers.")
    notes += count_as_worst(groups)
    for task in dict.fromkeys(env_id for env_id, _ in groups):
        steps = [last_step([run]) for (env_id, _), group in groups.items() if env_id == task for run in group]
        own = [json.loads(run.env_kwargs) for run in runs if run.env_id == task]
        kwargs = dict.fromkeys(json.dumps(x, sort_keys=True) for x in own)
        if len(kwargs) > 1:
            notes.append(f"**Not one task**: --env-kwargs of the runs on {task} are {' and '.join(kwargs)}.")
        if max(steps) > 1.05 * min(steps):
            notes.append(f"**Unequal budgets**: runs on {task} have from {min(steps):,} to {max(steps):,} steps.")
    return groups, unfinished, notes


def notes_on(group: list[Run]) -> list[str]:
    """Notes on arguments and sources that should not differ between runs of a group, but do."""
    notes = []
    finished = [run for run in group if run.state == "finished"]
    for run in finished[1:]:
        if set(shared_keys(finished[:1], "eval/")) != set(shared_keys([run], "eval/")):
            message = "RUNS takes runs of one kind for a task and experiment"
            fail(f"{message}, and {finished[0].folder} and {run.folder} log other scores")
    known = [run for run in group if run.args]
    for flag in sorted(set().union(*(run.args for run in known)) - MAY_DIFFER - {"total_timesteps"}):
        values = [str(run.args.get(flag, "not a flag")) for run in known]
        notes += difference(f"--{flag.replace('_', '-')} is", known, values)
    notes += difference("--total-timesteps is", group, [f"{run.total_timesteps:,}" for run in group])
    for run in group:
        if "," in run.sources:
            notes.append(f"**Not of one kind**: {run.folder.name} was resumed by another script: {run.commit}.")
    known = [run for run in group if run.sources]
    commits = {run.sources: run.commit for run in reversed(known)}  # scripts with changes can have the same commit
    notes += difference("the script is that of", known, [run.sources for run in known], commits)
    return notes


def difference(
    what: str, runs: Sequence[Run], values: Sequence[str], names: Mapping[str, str] | None = None
) -> list[str]:
    """A note that names the first of `runs` with each value, and how many more have it; none if there is one value."""
    folders: dict[str, list[str]] = defaultdict(list)
    for run, value in zip(runs, values, strict=True):
        folders[value].append(run.folder.name)
    if len(folders) < 2:
        return []
    more = {value: f" and {len(group) - 1} more" if len(group) > 1 else "" for value, group in folders.items()}
    parts = [f"{(names or {}).get(value, value)} in {group[0]}{more[value]}" for value, group in folders.items()]
    return [f"**Not of one kind**: {what} {', '.join(parts)}."]


def mixture_notes(runs: Sequence[Run]) -> list[str]:
    """How many runs of each experiment had which device, threads and versions, if they are not the same for all.

    Runs whose threads or versions are not known do not count there.
    """
    notes = []
    for title, word, values in (
        ("Devices", "on", [(run.device or "unknown").replace(", ", ", then ") for run in runs]),
        ("Threads", "with", [run.threads.replace(", ", ", then ") for run in runs]),
        ("Versions", "with", [run.versions.replace("; ", ", then ") for run in runs]),
    ):
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for run, value in zip(runs, values, strict=True):
            counts[run.exp_name] += Counter([value] if value else [])
        if len(set(filter(None, values))) > 1 or any(", then " in value for value in values):
            each = [f"{name}: {', '.join(f'{n} {word} {x}' for x, n in own.items())}" for name, own in counts.items()]
            notes.append(f"**{title} mixed**: {'; '.join(each)}.")
    return notes


def count_as_worst(groups: Groups) -> list[str]:
    """Gives each run without a result the worst score of its task from where its curve ends, and returns notes."""
    notes = []
    finished: Groups = {name: [run for run in group if run.state == "finished"] for name, group in groups.items()}
    for (env_id, exp_name), group in groups.items():
        peers = [run for (task, _), runs in finished.items() if task == env_id for run in runs]
        ended = finished[env_id, exp_name]
        keys = shared_keys(ended or peers, "eval/") or [RETURN]
        for run, key in product([run for run in group if run.state != "finished"], keys):
            own = run.curves.get(key, np.zeros((0, 3)))
            own = own[np.logical_and.accumulate(np.isfinite(own[:, 2]))]
            theirs = [peer.curves[key] for peer in peers if key in peer.curves]
            scores = [curve[-1, 2] for curve in theirs] + [0.0] * (key != RETURN)
            if key == RETURN:
                with suppress(Exception):  # no such task here, or its own fault, of which the run may have died
                    scores.append(random_return(env_id, run.env_kwargs))
            worst = min(scores, default=float("nan"))
            end = max(run.total_timesteps, last_step(ended) if ended else 0)  # others may have run longer
            end = end or (last_step(peers) if peers else 0)  # a command without --total-timesteps
            steps = {step for curve in theirs for step in curve[:, 0]} | {float(end)}
            rest = [[step, np.nan, worst] for step in sorted(steps) if own[:, 0].max(initial=-1) < step <= end]
            at_end = own[-1, 0] if len(own) else 0
            run.curves[key] = np.concatenate([own, np.reshape(rest, (-1, 3))])
            counted = f"counted as {describe_number(worst)}, the worst of the task"
            notes.append(f"**{run.state.capitalize()}**: {run.folder.name} after step {at_end:,.0f}; {counted}.")
    return notes


def last_step(group: list[Run]) -> int:
    """Environment steps of the group's runs."""
    return int(max(curve[-1, 0] for run in group for key, curve in run.curves.items() if key.startswith("eval/")))


def shared_keys(group: list[Run], *prefixes: str) -> list[str]:
    """The keys with one of the prefixes, in their order, that all runs of a group have."""
    shared = [key for key in group[0].curves if all(key in run.curves for run in group)] if group else []
    return [key for prefix in prefixes for key in shared if key.startswith(prefix)]


def drawn_keys(group: list[Run]) -> list[str]:
    """The keys of a group that are drawn: evaluations and ratings; also training returns if a run has fewer than three
    evaluations.
    """
    keys = shared_keys(group, "eval/", "selfplay/")
    has_few = any(len(run.curves[key]) < 3 for run in group for key in keys if key.startswith("eval/"))
    return keys + (shared_keys(group, TRAINING_RETURN) if has_few else [])


def final_scores(group: list[Run], key: str) -> np.ndarray:
    """Scores (n,) of the runs' final policies."""
    return np.array([run.curves[key][-1, 2] for run in group])


def returns_by_experiment(groups: Groups) -> dict[str, dict[str, np.ndarray]]:
    """Final returns (n,) of each experiment on each of its tasks."""
    returns: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for (env_id, exp_name), group in groups.items():
        if all(RETURN in run.curves for run in group):
            returns[exp_name][env_id] = final_scores(group, RETURN)
    return returns


def find_scales(groups: Groups, reference: str) -> tuple[Scales, list[str]]:
    """The returns with the normalised scores 0 and 1 on each task that can be pooled, and notes on the others."""
    returns, scales, notes = returns_by_experiment(groups), {}, []
    if reference not in returns:
        fail(f"--normalize-by takes one of the experiments with returns ({', '.join(returns)}), not {reference}")
    for env_id in dict.fromkeys(env_id for env_id, _ in groups):
        if not all(env_id in tasks for tasks in returns.values()):
            notes.append(f"Not in the pooled score: {env_id} (not all experiments have it).")
            continue
        try:
            low = random_return(env_id, groups[env_id, reference][0].env_kwargs)
        except Exception as error:  # no such task here, or its own fault
            notes.append(f"Not in the pooled score: {env_id} (the random policy cannot be measured: {error}).")
            continue
        high = float(interquartile_mean(returns[reference][env_id]))
        if low < high:
            scales[env_id] = low, high
        else:
            notes.append(f"Not in the pooled score: {env_id} ({reference} is not better than the random policy).")
    return scales, notes


def normalised(groups: Groups, scales: Scales) -> dict[str, list[np.ndarray]]:
    """Of each experiment the normalised final returns (n,) on each task of the scales."""
    returns = returns_by_experiment(groups) if scales else {}
    ends = scales.items()
    return {
        name: [(tasks[env_id] - low) / (high - low) for env_id, (low, high) in ends] for name, tasks in returns.items()
    }


def improvement_pairs(groups: Groups, reference: str | None) -> list[Pair]:
    """Each two experiments that have tasks in common; only pairs with the reference, if there is one."""
    pairs: list[Pair] = []
    for (ours, our_tasks), (theirs, their_tasks) in combinations(returns_by_experiment(groups).items(), 2):
        tasks = [env_id for env_id in our_tasks if env_id in their_tasks]
        if tasks and reference in (None, ours, theirs):
            x, y = [our_tasks[env_id] for env_id in tasks], [their_tasks[env_id] for env_id in tasks]
            p, low, high = probability_of_improvement(x, y)
            both = (p, (low, high)), (1.0 - p, (1.0 - high, 1.0 - low))
            has_interval = min(map(len, x + y)) > 1
            pairs.append((ours, theirs, len(tasks), [(own, ends if has_interval else None) for own, ends in both]))
    return pairs


def describe_key(key: str) -> str:
    """A TensorBoard key in words."""
    words = key.partition("/")[2].replace("_score_vs_", " vs ").replace("rating_", "rating of ")
    return "return" if key == RETURN else words


def describe_number(x: float) -> str:
    """Four digits, or as many as an integer part has; two below 0.001."""
    if not np.isfinite(x) or 0 < abs(x) < 0.001:
        return f"{x:.2g}"
    digits = len(str(int(abs(float(f"{x:.4g}")))))  # of the integer part, rounded: 999.96 has four
    return f"{x:,.{max(0, 4 - digits)}f}"
