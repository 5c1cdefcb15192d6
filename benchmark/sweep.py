"""Runs scripts on tasks with seeds, each run a process of its own, and goes on where it was cut off.

    python -m benchmark.sweep --script ppo_continuous.py --env-ids Hopper-v5 Ant-v5 -- --total-timesteps 200000

What follows `--` goes to the scripts unchanged. All that a sweep makes is in its folder:

    manifest.json   an entry for each start: commands, commit, versions of libraries, machine
    jobs/           a journal for each run: its commands and exit statuses
    logs/           what each run printed
    runs/           the run folders

The same command again skips what has finished, resumes what was cut off or failed, and runs what is missing; with more
tasks or seeds it runs these, too. Nothing depends on the sweep's memory: each run has a process of its own (`--job`)
that writes the run's journal and locks it, and the script inherits the lock. So whichever process was
killed, a run that still lives is waited for and never started twice.

A script must take --env-id, --exp-name and --seed, and write runs/{env_id}__{exp_name}__{seed}__{timestamp}. With
--resume FOLDER it goes on from checkpoint.pt there, or refuses in the words of NOTHING_LEFT or UNREADABLE. On SIGTERM
it writes a checkpoint and ends. Its exit status is 0 (finished), 1 (failed) or 2 (bad arguments).

A script's exit status 2 (bad arguments) ends the sweep, because the other runs would be refused, too: what waits in an
array job of Slurm is cancelled. The corrected command, or one with a larger --total-timesteps, goes on in the same
folder.

The sweep's own exit status: 0 all runs finished, 1 a run failed, 2 bad arguments, 129, 130 or 143 stopped by SIGHUP,
Ctrl-C or SIGTERM.
"""

import fcntl
import json
import logging
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import chain, count, pairwise, product, repeat
from pathlib import Path
from typing import IO, Any, Literal

import tyro

from benchmark import REPOSITORY, fail, split_flags
from benchmark.provenance import (
    commit_of,
    find_gpus,
    hash_of,
    machine,
    output_of,
    read_journal,
    run_folders,
    run_name,
    sources_of,
    usable_cores,
    versions,
)
from utils.errors import keep_printing, missing_package, write_file

try:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Column, Table
except ModuleNotFoundError as error:
    raise missing_package("benchmark.sweep", error) from error

NOTHING_LEFT = "--resume takes a run that has not finished"  # what a script says of a run that has
UNREADABLE = "--resume takes a run folder with"  # of one that it cannot read; other refusals pass, such as W&B's
REFUSED = "exit status 2: the script refuses these arguments"
ON_CPU = "it ran on the CPU, though there is a GPU: is PyTorch a build for the CPU alone?"
ECHO_SECONDS = 2.0  # SIGTERMs this close are one stop (`catch_signals`)
POLL_SECONDS = 0.1
STOP_SECONDS = 300.0  # that a run has for its checkpoint after --time-limit
PROGRESS_SECONDS = 60.0  # between two reports of what is running, where there is no terminal


@dataclass
class Args:
    """Runs scripts on tasks with seeds: --script ppo_continuous.py --env-ids Hopper-v5 Walker2d-v5 -- --total-timesteps
    200000

    What follows -- goes to the scripts unchanged. The same command again goes on from where the last one was cut off.
    """

    script: list[Path]
    """one or more scripts"""
    env_ids: list[str]
    """tasks that each script is run on"""
    num_seeds: int = 5
    """seeds of each script and task"""
    first_seed: int = 1
    """the smallest seed"""
    seeds: tuple[int, ...] = ()
    """a list of seeds, instead of --num-seeds and --first-seed"""
    workers: int | None = None
    """runs at the same time: 1 if not given, and as many as Slurm allows with --launcher slurm; they share the cores
    (OMP_NUM_THREADS, unless it is set) and the GPUs"""
    workers_per_gpu: int = 1
    """runs that may share a GPU; the GPUs are those of CUDA_VISIBLE_DEVICES, or all if that is not set"""
    time_limit: float | None = None
    """minutes that a run may take in a sweep; then it writes a checkpoint and counts as failed"""
    exp_name: str | None = None
    """name of the experiment, a part of each run folder's name; the script's name if not given"""
    folder: Path | None = None
    """the sweep's folder; sweeps/EXP_NAME if not given"""
    dry_run: bool = False
    """start nothing: print the state and the next command of each run and, with --launcher slurm, the array job"""
    launcher: Literal["local", "slurm", "ray"] = "local"
    """local: this machine; slurm: an array job; ray: the Ray cluster of RAY_ADDRESS, or one on this machine if that is
    not set. All nodes must see the scripts and the folder
    """
    prologue: tuple[str, ...] = ()
    """with --launcher slurm: lines of shell before each run, such as "module load cuda" """
    sbatch_args: str = ""
    """with --launcher slurm: options of sbatch, as in --sbatch-args="--partition=gpu --gpus=1 --time=12:00:00" """
    job: int | None = None
    """do only this run, counted from 0 as --dry-run lists them; this is what the launchers start"""


@dataclass(frozen=True)
class Job:
    """One run. `folder` is the sweep's folder, an absolute path."""

    script: Path
    env_id: str
    exp_name: str
    seed: int
    extra: tuple[str, ...]
    folder: Path

    @property
    def name(self) -> str:
        """The beginning of the run folder's name, as the scripts write it."""
        return run_name(self.env_id, self.exp_name, self.seed)

    @property
    def journal(self) -> Path:
        """A line of JSON for each start and end of the run; locked for as long as one of its processes lives."""
        return self.folder / "jobs" / f"{self.name}.jsonl"

    @property
    def log(self) -> Path:
        """What the run printed, with a line `$ command` before each attempt."""
        return self.folder / "logs" / f"{self.name}.log"

    @property
    def uses_gpu(self) -> bool:
        """Whether its flags let it use a GPU."""
        return "--no-cuda" not in [word.replace("_", "-") for word in self.extra]

    @property
    def budget(self) -> int | None:
        """--total-timesteps, if it is among the flags; exits with one sentence if it is no integer."""
        words = [part for word in self.extra for part in word.split("=", 1)]
        values = [value for flag, value in pairwise(words) if flag.replace("_", "-") == "--total-timesteps"]
        try:
            return int(values[-1]) if values else None  # as tyro reads it: 1_000_000 is an integer
        except ValueError:
            fail(f"--total-timesteps takes an integer, not {values[-1]}")

    @property
    def command(self) -> list[str]:
        """Does the run from its beginning, in the sweep's folder."""
        flags = ["--env-id", self.env_id, "--exp-name", self.exp_name, "--seed", str(self.seed)]
        return [sys.executable, str(self.script), *flags, *self.extra]


@dataclass
class Process:
    """A run's process, wherever it is. `poll` gives its exit status or None; `stop` stops the run, and kills it if
    repeated.
    """

    poll: Callable[[], int | None]
    stop: Callable[[], object]


Start = Callable[[int, Job], Process]  # takes a worker's number below --workers, and a run


def utc_now() -> str:
    """The time, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def catch_signals() -> list[int]:
    """A list to which SIGINT, SIGTERM and SIGHUP are appended from now on, instead of ending the process.

    Under `nohup` SIGHUP stays ignored. A SIGTERM shortly after another signal is ignored: Slurm sends it to a sweep and
    to its runs, and the sweep passes it on to them.
    """
    signals: list[int] = []
    last_time = -math.inf

    def append(signum: int, _: object) -> None:
        nonlocal last_time
        if signum != signal.SIGTERM or time.monotonic() > last_time + ECHO_SECONDS:
            signals.append(signum)
            last_time = time.monotonic()

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, append)
    return signals


# === Runs =============================================================================================================


def make_jobs(args: Args, extra: Sequence[str]) -> list[Job]:
    """All runs, seed by seed, so that a sweep cut short has some of every task. Exits if a flag makes no sense."""
    for name, least in (("num_seeds", 1), ("first_seed", 0), ("workers", 1), ("workers_per_gpu", 1)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            fail(f"--{name.replace('_', '-')} takes an integer from {least}, not {getattr(args, name)}")
    if args.time_limit is not None and not 0 < args.time_limit < float("inf"):
        fail(f"--time-limit takes a number of minutes above 0, not {args.time_limit}")
    if len(set(args.seeds)) < len(args.seeds) or min(args.seeds, default=0) < 0:
        fail(f"--seeds takes different integers from 0, not {' '.join(map(str, args.seeds))}")
    if args.prologue and args.launcher != "slurm":
        fail(f"--prologue takes --launcher slurm, not {args.launcher}")
    if args.sbatch_args and args.launcher != "slurm":
        fail(f"--sbatch-args takes --launcher slurm, not {args.launcher}")
    if args.workers_per_gpu > 1 and args.launcher == "slurm":
        fail("--workers-per-gpu takes --launcher local or ray: Slurm shares out its GPUs itself, by --sbatch-args")
    for script in args.script:
        if not os.path.isfile(script):  # a name may be too long for Path
            fail(f"--script takes Python files, and {script} is none")
    own_flags = ("--env-id", "--exp-name", "--seed", "--resume")
    for word in extra:
        if word.split("=")[0].replace("_", "-") in own_flags:
            fail(f"what follows -- takes the scripts' flags without {', '.join(own_flags)}, and {word} is one of these")
    scripts = [(script.resolve(), args.exp_name or script.stem) for script in args.script]
    folder = Path(os.path.realpath(args.folder or Path("sweeps") / "-".join(name for _, name in scripts)))
    seeds = args.seeds or range(args.first_seed, args.first_seed + args.num_seeds)
    runs = product(seeds, args.env_ids, scripts)
    jobs = [Job(script, env_id, name, seed, tuple(extra), folder) for seed, env_id, (script, name) in runs]
    if not jobs or len({job.name for job in jobs}) < len(jobs):
        fail(
            "--script and --env-ids take one or more each, whose names differ (and --exp-name takes a single --script)"
        )
    if any(len(os.fsencode(job.journal.name)) > 255 for job in jobs):
        fail("--exp-name and --env-ids take names that fit into the name of a file")
    _ = jobs[0].budget
    if args.job is not None and not 0 <= args.job < len(jobs):
        fail(f"--job takes an integer from 0 to {len(jobs) - 1}, not {args.job}")
    return jobs


def lock(file: IO[str]) -> bool:
    """Locks an open file unless another process has. The kernel frees it when no process has the file open any more."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def last_record(job: Job) -> dict[str, Any]:
    """The newest whole record of a run's journal, or nothing."""
    return (read_journal(job.journal) or [{}])[-1]


def budget_of(run: Path) -> int | None:
    """--total-timesteps of a run folder, if it can be read."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return int(json.loads((run / "args.json").read_text())["total_timesteps"])
    return None


def next_command(job: Job) -> list[str]:
    """The command that finishes a run, empty if it has finished.

    It begins anew if there is no checkpoint, or if the script could not read it the last time. A run with a smaller
    --total-timesteps than the sweep's goes on to this one.
    """
    last = last_record(job)
    runs = [run for run in find_runs(job) if any((run / f"checkpoint{x}.pt").exists() for x in ("", ".previous"))]
    more = []
    if runs and job.budget is not None and (budget_of(runs[-1]) or job.budget) < job.budget:
        more = ["--total-timesteps", str(job.budget)]
    is_reached = not more or last.get("budget") == job.budget  # both numbers of steps may be rounded up to the same one
    if last.get("exit") == 0 and (job.folder / last["run"]).is_dir() and is_reached:
        return []
    is_refused = last.get("exit") == 2 and "--resume" in last["command"]
    if not runs or (is_refused and any(UNREADABLE in line for line in read_log(job))):
        return job.command
    return [sys.executable, str(job.script), "--resume", str(runs[-1].relative_to(job.folder)), *more]


def find_runs(job: Job) -> list[Path]:
    """The run folders of a job, oldest first."""
    return run_folders(job.folder / "runs", job.name)


def state_of(job: Job) -> str:
    """new, running, cut off, failed or finished."""
    if not job.journal.exists():
        return "new"
    with job.journal.open("a" if os.access(job.journal, os.W_OK) else "r") as journal:
        if not lock(journal):
            return "running"
    if not next_command(job):
        return "finished"
    return "cut off" if last_record(job).get("exit", 143) in (0, 129, 130, 143) else "failed"


def refuses_all(jobs: Sequence[Job], job: Job) -> bool:
    """Whether exit status 2 of a run means that the script will refuse the others, too: it has accepted none so far."""
    return "--resume" not in last_record(job).get("command", ()) and not any(map(find_runs, jobs))


def run_job(job: Job, time_limit: float | None = None) -> int:
    """Starts or resumes a run, unless it has finished, and waits for its end. Returns its exit status, 128 + n for
    signal n.

    Waits first until no other process has the run. The first signal stops the run, the second one kills it.
    After `time_limit` minutes the run is stopped, too, and killed STOP_SECONDS later; the status is then 124.
    """
    signals, num_stops, seconds_late = catch_signals(), 0, 0.0
    with job.journal.open("a") as journal, job.log.open("a") as log:
        while not lock(journal):
            if signals:
                return 128 + signals[0]
            time.sleep(POLL_SECONDS)
        if not (command := next_command(job)):
            return 0
        record: dict[str, Any] = {"time": utc_now(), "host": platform.node(), "command": command}
        record |= {"sha256": hash_of(job.script, job.env_id), **commit_of(sources_of(job.script, job.env_id))}
        record["threads"], record["gpu"] = os.environ.get("OMP_NUM_THREADS"), os.environ.get("CUDA_VISIBLE_DEVICES")
        deadline = time.monotonic() + 60 * (time_limit or float("inf"))
        # on a line of its own, even if a full disk cut off the last one
        start = record | {"machine": machine(), "versions": versions()}
        print(f"\n{json.dumps(start)}", file=journal, flush=True)
        print(f"$ {shlex.join(command)}", file=log, flush=True)
        null, keep = subprocess.DEVNULL, [journal.fileno()]
        try:
            child = subprocess.Popen(command, cwd=job.folder, stdin=null, stdout=log, stderr=log, pass_fds=keep)
            while child.poll() is None:
                seconds_late = time.monotonic() - deadline
                # A signal and the time limit together are one stop: a script aborts at the second SIGTERM.
                if num_stops < max(len(signals), (seconds_late > 0) + (seconds_late > STOP_SECONDS)):
                    (child.kill if num_stops else child.terminate)()
                    num_stops += 1
                time.sleep(POLL_SECONDS)
            status = child.returncode if child.returncode >= 0 else 128 - child.returncode
            if seconds_late > 0 and status != 0:
                print(f"stopped after --time-limit {time_limit:g} minutes", file=log, flush=True)
                status = 124
            if status == 2 and any(NOTHING_LEFT in line for line in read_log(job)):
                status = 0  # it has outlived a process like this one, which could not record its end
        except OSError as error:
            print(f"cannot be started: {error}", file=log)
            status = 126
        run = next((str(run.relative_to(job.folder)) for run in reversed(find_runs(job))), "")
        if status == 0 and not run:
            print(f"ended without a run folder runs/{job.name}__*", file=log)
            status = 1
        end = {"time": utc_now(), "exit": status, "run": run, "device": device_of(job), "stopped": bool(signals)}
        end["budget"] = job.budget
        if end["device"] == "cpu" and job.uses_gpu and find_gpus():
            print(f"warning: {ON_CPU}", file=log)
        print(json.dumps(record | end), file=journal)
        return status


def requeue() -> None:
    """Requeues this task of a Slurm array if Slurm's time limit stopped it, but not if it was cancelled."""
    task = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if output_of("squeue", "--noheader", "--format=%T", f"--jobs={task}") == "RUNNING":
        subprocess.run(["scontrol", "requeue", task], check=False)


# === Manifest =========================================================================================================


def read_manifest(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """The entries of earlier starts; exits with one sentence if they cannot be read."""
    path = jobs[0].folder / "manifest.json"
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        _ = [entry["scripts"] for entry in entries]
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"--folder takes a sweep's folder or a new one, and {path} cannot be read: {error}")
    return entries


def check_flags(jobs: Sequence[Job], may_shrink: bool = False) -> None:
    """Exits if a run of the folder under the same name had another script or other flags, or a larger
    --total-timesteps. With `may_shrink` it may have more steps: an array task that waited while others got them.

    Runs that ended without a run folder do not count, such as those whose arguments the script refused: a corrected
    command takes their place.
    """
    by_name, by_journal = {job.exp_name: job for job in jobs}, {job.journal: job for job in jobs}
    for journal in sorted((jobs[0].folder / "jobs").glob("*.jsonl")):
        journaled = read_journal(journal)
        records = [record for record in journaled if "--resume" not in record["command"]]
        for start, end in pairwise([*records, {}]):
            flags = start["command"][2:]  # as in Job.command: --env-id X --exp-name X --seed X, then what followed --
            if "exit" in start or end.get("exit") == 2 or not end.get("run", "a run"):
                continue
            if (job := by_journal.get(journal)) and (job.env_id, job.exp_name) != (flags[1], flags[3]):
                there, here = f"{flags[1]} of {flags[3]}", f"{job.env_id} of {job.exp_name}"
                fail(f"--env-ids takes names whose files differ: {here} would have the same as {there} in {job.folder}")
            if (job := by_name.get(flags[3])) is None:
                continue
            before = Job(Path(start["command"][1]), flags[1], flags[3], int(flags[5]), tuple(flags[6:]), job.folder)
            old, new = before.budget, job.budget  # None: the script's default, which its run has noted
            if new is not None:
                reached = [record.get("budget") for record in journaled] + [budget_of(run) for run in find_runs(before)]
                old = max([budget for budget in [old, *reached] if budget is not None], default=None)
            has_shrunk = not may_shrink and (old != new if old is None or new is None else new < old)
            if has_shrunk and old is not None and new is not None:
                fail(f"--total-timesteps takes at least the {old:,} that runs in {job.folder} have, not {new:,}")
            if before.script != job.script or other_flags(before) != other_flags(job) or has_shrunk:
                there, here = (shlex.join([str(x.script), *x.extra]) for x in (before, job))
                message = f"--folder {job.folder} takes the command that it was begun with, `{there}`, not `{here}`"
                fail(f"{message}; only --total-timesteps may grow, and other flags take another --exp-name")


def other_flags(job: Job) -> list[str]:
    """What followed -- without --total-timesteps and its value."""
    words = [part for word in job.extra for part in word.split("=", 1)]
    places = [i for i, word in enumerate(words) if word.replace("_", "-") == "--total-timesteps"]
    return [word for i, word in enumerate(words) if i not in places and i - 1 not in places]


def write_manifest(jobs: Sequence[Job], argv: Sequence[str]) -> None:
    """Adds an entry for this start. The sweep's lock must be held: another sweep may have added one."""
    path, sources = jobs[0].folder / "manifest.json", defaultdict[str, set[Path]](set)
    for exp_name, script, env_id in {(job.exp_name, job.script, job.env_id) for job in jobs}:
        sources[exp_name] |= set(sources_of(script, env_id))
    entry = {
        "time": utc_now(),
        "command": shlex.join(["python", "-m", "benchmark.sweep", *argv]),
        "scripts": {job.exp_name: [str(job.script), *job.extra] for job in jobs},
        "sources": {name: sorted(map(str, paths)) for name, paths in sources.items()},
        "runs": [shlex.join(job.command) for job in jobs],
        **commit_of(sorted(set().union(*sources.values()))),
        "versions": versions(),
        "machine": machine(),
        "environment": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")},
    }
    write_file(path, (json.dumps([*read_manifest(jobs), entry], indent=2) + "\n").encode())


# === Progress =========================================================================================================


def device_of(job: Job) -> str:
    """The device that the last attempt said it runs on; empty if it said none."""
    match = re.search(r" steps on (\w+)", read_attempt(job))
    return match[1] if match else ""


def read_attempt(job: Job, size: int = sys.maxsize) -> str:
    """What the last attempt printed, as far as it is in the last `size` bytes of the log."""
    if not job.log.exists():
        return ""
    with job.log.open("rb") as file:
        file.seek(max(0, job.log.stat().st_size - size))
        text = file.read().decode(errors="replace")
    return re.split(r"^\$ .*\n", text, flags=re.MULTILINE)[-1]


def read_log(job: Job) -> list[str]:
    """The last lines that the last attempt printed."""
    return read_attempt(job, 10_000).splitlines()[-12:]


def read_progress(job: Job) -> dict[str, str]:
    """What the newest line of the form `step 1 of 3, 2 steps/s, scores` says, or the scores of the evaluation at the
    end.
    """
    for line in reversed(read_log(job)):
        if line.startswith(("evaluation: ", "scores: ")):
            return {"scores": line.partition(", length")[0]}
        if match := re.match(r"step ([\d,]+) of ([\d,]+), ([\d,]+) steps/s(?:, (.*))?", line):
            step, total, speed = (int(number.replace(",", "")) for number in match.groups()[:3])
            left = f"{timedelta(seconds=(total - step) // max(speed, 1))} left"
            texts = f"step {match[1]} ({step / total:.0%})", f"{match[3]}/s", match[4] or "", left
            return dict(zip(("step", "speed", "scores", "time"), texts, strict=True))
    return {}


def make_table(states: Mapping[Job, str], height: int) -> Table:
    """As many runs as fit into a terminal of this height, those first that run or failed; below them a count of all."""
    order = ("running", "failed", "stopped", "waiting", "finished")
    names = "run", "state", "step", "steps/s", Column("return", ratio=1), "left"
    table = Table(*names, expand=True, box=None, padding=(0, 1, 0, 0), caption=count_states(states))
    for column in table.columns:
        column.no_wrap = True
    for job in sorted(states, key=lambda job: order.index(states[job]))[: max(1, height - 3)]:
        progress = {} if states[job] == "waiting" else read_progress(job)
        texts = [progress.get(name, "") for name in ("step", "speed", "scores", "time")]
        table.add_row(job.name, states[job], *(re.sub("^step |/s$|^return | left$", "", text) for text in texts))
    return table


def count_states(states: Mapping[Job, str]) -> str:
    """How many runs are in which state."""
    return ", ".join(f"{count} {state}" for state, count in Counter(states.values()).items())


# === Launchers ========================================================================================================


def job_command(args: Args, job: Job, index: str) -> str:
    """The shell command of a run's process, in the repository."""
    words = [sys.executable, "-m", "benchmark.sweep", "--script", *(str(script.resolve()) for script in args.script)]
    words += ["--env-ids", *args.env_ids, "--num-seeds", str(args.num_seeds), "--first-seed", str(args.first_seed)]
    words += ["--seeds", *map(str, args.seeds)] if args.seeds else []
    words += ["--time-limit", str(args.time_limit)] if args.time_limit is not None else []
    words += ["--launcher", args.launcher] if args.launcher == "slurm" else []
    words += ["--folder", str(job.folder), *(["--exp-name", args.exp_name] if args.exp_name else [])]
    return f"exec {shlex.join(words)} --job {index} -- {shlex.join(job.extra)}"


def connect_local(jobs: Sequence[Job], args: Args) -> Start:
    """Returns what starts a run's process on this machine, with its cores and GPU. Ctrl-C does not end it."""
    gpus = find_gpus() if jobs[0].uses_gpu else []
    cores, workers = usable_cores(), args.workers or 1
    if gpus and workers > len(gpus) * args.workers_per_gpu:
        fail(f"--workers takes at most the GPUs times --workers-per-gpu, {len(gpus) * args.workers_per_gpu}")

    spawn = partial(subprocess.Popen, shell=True, cwd=REPOSITORY, stdin=subprocess.DEVNULL, start_new_session=True)

    def start(worker: int, job: Job) -> Process:
        env = {"OMP_NUM_THREADS": str(max(1, cores // workers)), **os.environ}
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
        with job.log.open("a") as log:
            process = spawn(job_command(args, job, str(jobs.index(job))), env=env, stdout=log, stderr=log)
        kinds = chain([signal.SIGTERM], repeat(signal.SIGINT))  # a second SIGTERM might be taken for the first one
        return Process(process.poll, lambda: process.send_signal(next(kinds)))

    return start


def connect_ray(jobs: Sequence[Job], args: Args) -> Start:
    """Joins a Ray cluster, or starts one of this machine alone, and returns what starts a run's process there."""
    if find_spec("ray") is None:
        fail("--launcher ray needs the package ray: pip install ray")
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody was asked
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Ray's processes inherit it: the runs stop with a checkpoint
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises bare ones
        fail(f"--launcher ray takes a RAY_ADDRESS that answers, or none: {str(error).splitlines()[0]}")
    signal.signal(signal.SIGHUP, hangup)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and "CPU" in node["Resources"]]
    if not nodes:
        fail("--launcher ray takes a cluster with a node that has CPUs")
    cores = min(sum(node["CPU"] for node in nodes) // (args.workers or 1), *(node["CPU"] for node in nodes))
    has_gpus = jobs[0].uses_gpu and any("GPU" in node for node in nodes)
    gpus = 1 / args.workers_per_gpu if has_gpus else 0
    task: Any = ray.remote(num_cpus=max(1, int(cores)), num_gpus=gpus, max_retries=0)(run_job)

    def start(worker: int, job: Job) -> Process:
        reference = task.remote(job, args.time_limit)

        def poll() -> int | None:
            try:
                return ray.get(reference) if ray.wait([reference], timeout=0)[0] else None
            except ray.exceptions.TaskCancelledError:  # before it began: later, it is a SIGINT to run_job
                return 128 + signal.SIGINT
            except ray.exceptions.RayError as error:
                with job.log.open("a") as log:
                    print(f"lost by Ray: {error}", file=log)
                return 1

        return Process(poll, partial(ray.cancel, reference))

    return start


def run_all(jobs: Sequence[Job], args: Args, start: Start, signals: list[int]) -> int:
    """Keeps --workers runs going until all have ended, or a signal stops them (`catch_signals`).

    Returns the exit status of the sweep.
    """
    console = Console(highlight=False, markup=False)
    say, handled = partial(console.print, soft_wrap=True), 0
    states = {job: "waiting" if next_command(job) else "finished" for job in jobs}
    waiting = [job for job in jobs if states[job] == "waiting"]
    running: dict[int, tuple[Job, Process]] = {}
    num_workers, is_refused, told = args.workers or 1, False, set[str]()
    report_seconds = 1.0 if sys.stdout.isatty() else PROGRESS_SECONDS
    report_time = time.monotonic() + report_seconds
    say(f"{len(jobs)} runs in {jobs[0].folder}: {count_states(states)}")
    hashes = {key: hash_of(*key) for key in {(job.script, job.env_id) for job in jobs}}
    others = [job.name for job in jobs if last_record(job).get("sha256") not in (None, hashes[job.script, job.env_id])]
    if others:
        say(f"warning: {len(others)} of them are the work of another version of the script: {', '.join(others)}")
    with Live(console=console, auto_refresh=False, transient=not sys.stdout.isatty()) as live:
        while running or (waiting and not signals and not is_refused):
            while waiting and len(running) < num_workers and not signals and not is_refused:
                job, worker = waiting.pop(0), next(i for i in count() if i not in running)
                say(f"starting: {job.name} ({state_of(job)})")
                try:
                    process = start(worker, job)
                except OSError as error:
                    say(f"no process can be started: {error}")
                    process = Process(lambda: 126, lambda: None)
                running[worker], states[job] = (job, process), "running"
            if handled < len(signals):
                message = "killing {} runs" if handled else "stopping {} runs; Ctrl-C once more kills them"
                say(message.format(len(running)))
                for _, process in running.values():
                    process.stop()
                handled += 1
            for worker, (job, process) in list(running.items()):
                if (status := process.poll()) is None:
                    continue
                del running[worker]
                is_stopped = signals and status in (130, 137, 143, -signal.SIGTERM)
                states[job] = "finished" if status == 0 else "stopped" if is_stopped else "failed"
                if is_stopped and "exit" not in last_record(job) and state_of(job) == "running":
                    states[job] = "running"  # since before this sweep, which only waited for its end
                    say(f"not stopped: {job.name} is of an earlier sweep; `fuser {job.journal}` names its processes")
                say(", ".join([f"{states[job]}: {job.name}", *read_progress(job).values()]))
                for line in read_attempt(job).splitlines():
                    if line.startswith("warning: ") and line not in told:
                        told.add(line)
                        say(f"{job.name} says: {line}")
                if status == 2 and refuses_all(jobs, job) and not is_refused:
                    is_refused = True
                    say(f"{REFUSED}, and no other run is started")
                if states[job] == "failed":
                    signum = -status if status < 0 else status - 128
                    cause = f" (killed by signal {signum})" if signum > 0 else ""
                    lines = [f"    {line}" for line in read_log(job)] or ["    nothing: is the disk full?"]
                    say("\n".join([f"exit status {status}{cause}; {job.log} ends with:", *lines]))
                    command = shlex.join(next_command(job) or job.command)
                    say(f"to go on with it: cd {shlex.quote(str(job.folder))} && {command}")
            if time.monotonic() > report_time:
                report_time = time.monotonic() + report_seconds
                if sys.stdout.isatty():
                    live.update(make_table(states, console.height), refresh=True)
                else:
                    for job, _ in running.values():
                        say(", ".join([f"running: {job.name}", *read_progress(job).values()]))
            time.sleep(POLL_SECONDS)
        if sys.stdout.isatty():
            live.update(make_table(states, console.height), refresh=True)
    say("\n".join([count_states(states), *(f"failed: {job.name}" for job in jobs if states[job] == "failed")]))
    if (is_unfinished := set(states.values()) != {"finished"}) and not is_refused:
        say("the same command goes on from here")
    return (128 + signals[0] if signals else 1) if is_unfinished else 0


def queued_jobs(folder: Path) -> set[str]:
    """Names of the runs in array jobs of this folder that Slurm has not ended yet, waiting or running."""
    records = read_journal(folder / "slurm.jsonl")
    names = {f"{record['array']}_{index}": name for record in records for index, name in record["tasks"].items()}
    if not names:
        return set()
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    try:
        tasks = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    except FileNotFoundError:  # Slurm is not on this machine
        return set()
    except (OSError, subprocess.CalledProcessError) as error:  # else what waits would be submitted again
        fail(f"--folder takes a sweep whose array jobs {shlex.join(command)} can list: {error}")
    return {names[task] for task in tasks if task in names}


def submit(jobs: Sequence[Job], args: Args) -> int:
    """Hands Slurm an array job of all runs that have not finished and that it does not have, or prints it."""
    folder, queued = jobs[0].folder, queued_jobs(jobs[0].folder)
    missing = [job for job in jobs if job.name not in queued and state_of(job) not in ("finished", "running")]
    tasks = {str(jobs.index(job)): job.name for job in missing}
    if cpu_jobs := [job.name for job in jobs if any(ON_CPU in line for line in read_log(job))]:  # of `run_job`
        print(f"warning: the logs of {len(cpu_jobs)} runs, such as {cpu_jobs[0]}, say: {ON_CPU}")
    if not tasks:
        print("nothing to submit: all runs have finished, are running or are in Slurm's queue")
        return 0
    name = re.sub(r"[^\w.-]", "-", "-".join(dict.fromkeys(job.exp_name for job in jobs)))
    at_once = "" if args.workers is None else f"%{args.workers}"
    prologue = "".join(line + "\n" for line in args.prologue)
    script = f"""#!/bin/bash
#SBATCH --job-name={name} --array={",".join(tasks)}{at_once}
#SBATCH --output={shlex.quote(f"{folder}/logs/slurm-%A_%a.log")} --open-mode=append
#SBATCH --requeue --signal=B:TERM@120 {args.sbatch_args}
{prologue}cd {shlex.quote(str(REPOSITORY))}
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}
{job_command(args, jobs[0], "$SLURM_ARRAY_TASK_ID")}
"""
    if args.dry_run:
        print(script)
        return 0
    path = folder / "job.sh"
    path.write_text(script)
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip()
        fail(f"--launcher slurm takes a machine where sbatch accepts {path}: {reason}")
    array = done.stdout.strip().partition(";")[0]
    with (folder / "slurm.jsonl").open("a") as file:
        print(json.dumps({"time": utc_now(), "array": array, "tasks": tasks}), file=file)
    print(f"submitted {path} as array job {array}: {len(tasks)} runs")
    print("--dry-run shows the runs' states; the same command submits what has not finished and is not in the queue")
    return 0


def main(argv: list[str]) -> int:
    """Does what a command line (without the program's name) says, and returns the exit status."""
    keep_printing()
    own, extra = split_flags(argv)
    args = tyro.cli(Args, prog="python -m benchmark.sweep", args=own)
    jobs = make_jobs(args, extra)
    folder = jobs[0].folder
    read_manifest(jobs)  # exits if --folder is something else
    check_flags(jobs, may_shrink=args.job is not None)
    if args.dry_run:
        queued = queued_jobs(folder)
        for i, job in enumerate(jobs):
            state = "queued" if job.name in queued and state_of(job) != "running" else state_of(job)
            print(f"{i} {state}: {shlex.join(next_command(job)) or job.name}")
        return submit(jobs, args) if args.launcher == "slurm" else 0
    try:
        for path in (jobs[0].journal, jobs[0].log):
            path.parent.mkdir(parents=True, exist_ok=True)
        sweep_lock = (folder / "lock").open("a")
    except OSError as error:
        fail(f"--folder takes a folder that can be written to: {error}")
    if args.job is not None:
        status = run_job(jobs[args.job], args.time_limit)
        array, is_slurm = os.environ.get("SLURM_ARRAY_JOB_ID"), args.launcher == "slurm"
        if array and is_slurm and status == 143:
            requeue()
        if array and is_slurm and status == 2 and refuses_all(jobs, jobs[args.job]):
            print(f"{REFUSED}: what waits in this array is cancelled")
            subprocess.run(["scancel", "--state=PENDING", array], check=False)
        return status
    with sweep_lock:
        if not lock(sweep_lock):
            fail(f"--folder takes a folder in which no other sweep is at work, and in {folder} there is one")
        start = None  # Slurm starts its tasks itself
        if args.launcher != "slurm":
            start = (connect_ray if args.launcher == "ray" else connect_local)(jobs, args)
        signals = catch_signals() if start else []  # now, because the manifest takes a second
        try:
            write_manifest(jobs, argv)
        except OSError as error:
            fail(f"--folder takes a folder that can be written to: {error}")
        return run_all(jobs, args, start, signals) if start else submit(jobs, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
