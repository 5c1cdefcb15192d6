"""Runs scripts on tasks with seeds, each run a process of its own, and goes on where it was cut off.

    python -m benchmark.sweep --script ppo_continuous.py --env-ids Hopper-v5 Ant-v5 -- --total-timesteps 200000

What follows `--` goes to the scripts unchanged. All that a sweep makes is in its folder:

    manifest.json   an entry for each start: commands, commit, versions of libraries, machine
    jobs/           a journal for each run: its commands and exit statuses
    logs/           what each run printed
    runs/           the run folders

The same command again skips what has finished, resumes what was cut off or failed, and runs what is missing; with more
tasks or seeds it runs these, too. Nothing depends on the sweep's memory: each run has a process of its own (`--job`)
that writes the run's journal and locks it, and the script inherits the lock. So whatever was killed, a run that lives
is waited for, and is never started twice.

Of a script it asks for --env-id, --exp-name and --seed; that it writes runs/{env_id}__{exp_name}__{seed}__{timestamp},
where --resume FOLDER goes on from checkpoint.pt, or refuses with the words of NOTHING_LEFT or UNREADABLE; that SIGTERM
makes it write a checkpoint and end; and exit statuses: 0 finished, 1 failed, 2 bad arguments.

The sweep's own exit status: 0 all runs finished, 1 a run failed, 2 bad arguments, 130 or 143 stopped by Ctrl-C or
SIGTERM.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import IO, Any, Literal

import tyro
from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from benchmark import fail

REPOSITORY = Path(__file__).resolve().parents[1]
NOTHING_LEFT = "--resume takes a run that has not finished"  # what a script says of a run that has
UNREADABLE = "--resume takes a run folder with"  # of one that it cannot read; other refusals pass, such as W&B's
POLL_SECONDS = 0.1
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
    workers: int = 1
    """runs at the same time; they share out the cores (OMP_NUM_THREADS, unless it is set) and the GPUs"""
    runs_per_gpu: int = 1
    """runs that may share a GPU; the GPUs are those of CUDA_VISIBLE_DEVICES, or all if that is not set"""
    exp_name: str | None = None
    """name of the experiment, a part of each run folder's name; the script's name if not given"""
    folder: Path | None = None
    """the sweep's folder; sweeps/EXP_NAME if not given"""
    dry_run: bool = False
    """start nothing: print the state and the next command of each run and, with --launcher slurm, the array job"""
    launcher: Literal["local", "slurm", "ray"] = "local"
    """on this machine, as an array job of Slurm, or on the Ray cluster of RAY_ADDRESS, or of this machine if that is
    not set; all nodes must see the scripts and the folder
    """
    sbatch_args: str = ""
    """with --launcher slurm: options of sbatch in one string, such as "--partition=gpu --gpus=1 --time=12:00:00" """
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
        return re.sub(r"[^\w.-]", "-", f"{self.env_id}__{self.exp_name}__{self.seed}")

    @property
    def journal(self) -> Path:
        """A line of JSON for each start and end of the run; locked for as long as one of its processes lives."""
        return self.folder / "jobs" / f"{self.name}.jsonl"

    @property
    def log(self) -> Path:
        """What the run printed, with a line `$ command` before each attempt."""
        return self.folder / "logs" / f"{self.name}.log"

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
    """A list to which SIGINT and SIGTERM are appended from now on, instead of ending the process."""
    signals: list[int] = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: signals.append(signum))
    return signals


# === Runs =============================================================================================================


def make_jobs(args: Args, extra: Sequence[str]) -> list[Job]:
    """All runs, seed by seed, so that a sweep cut short has some of every task. Exits if a flag makes no sense."""
    for name, least in (("num_seeds", 1), ("first_seed", 0), ("workers", 1), ("runs_per_gpu", 1)):
        if getattr(args, name) < least:
            fail(f"--{name.replace('_', '-')} takes an integer from {least}, not {getattr(args, name)}")
    if args.sbatch_args and args.launcher != "slurm":
        fail(f"--sbatch-args takes --launcher slurm, not {args.launcher}")
    if args.runs_per_gpu > 1 and args.launcher == "slurm":
        fail("--runs-per-gpu takes --launcher local or ray: Slurm shares out its GPUs itself, by --sbatch-args")
    for script in args.script:
        if not script.is_file():
            fail(f"--script takes Python files, and {script} is none")
    own_flags = ("--env-id", "--exp-name", "--seed", "--resume")
    for word in extra:
        if word.split("=")[0].replace("_", "-") in own_flags:
            fail(f"what follows -- takes the scripts' flags without {', '.join(own_flags)}, and {word} is one of these")
    scripts = [(script.resolve(), args.exp_name or script.stem) for script in args.script]
    folder = (args.folder or Path("sweeps") / "-".join(name for _, name in scripts)).resolve()
    runs = product(range(args.first_seed, args.first_seed + args.num_seeds), args.env_ids, scripts)
    jobs = [Job(script, env_id, name, seed, tuple(extra), folder) for seed, env_id, (script, name) in runs]
    if not jobs or len({job.name for job in jobs}) < len(jobs):
        fail(
            "--script and --env-ids take one or more each, whose names differ (and --exp-name takes a single --script)"
        )
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
    """The newest whole record of a run's journal: "command", and "exit" and "run" (its folder) if it has ended; or
    nothing.
    """
    for line in reversed(job.journal.read_text().splitlines() if job.journal.exists() else []):
        with suppress(ValueError):
            return json.loads(line)
    return {}


def next_command(job: Job) -> list[str]:
    """The command that finishes a run, empty if it has finished.

    It begins anew if there is no checkpoint, or if the script could not read it the last time.
    """
    last = last_record(job)
    if last.get("exit") == 0 and (job.folder / last["run"]).is_dir():
        return []
    runs = [
        run for run in find_runs(job) if (run / "checkpoint.pt").exists() or (run / "checkpoint.previous.pt").exists()
    ]
    is_refused = last.get("exit") == 2 and "--resume" in last["command"]
    if not runs or (is_refused and any(UNREADABLE in line for line in read_log(job))):
        return job.command
    return [sys.executable, str(job.script), "--resume", str(runs[-1].relative_to(job.folder))]


def find_runs(job: Job) -> list[Path]:
    """The run folders of a job, oldest first; a counter tells apart those of the same second."""
    pattern = re.compile(re.escape(job.name) + r"__(\d+)(?:-(\d+))?")
    matches = [(match, run) for run in (job.folder / "runs").glob("*") if (match := pattern.fullmatch(run.name))]
    return [run for _, _, run in sorted((int(match[1]), int(match[2] or 1), run) for match, run in matches)]


def state_of(job: Job) -> str:
    """new, running, cut off, failed or finished."""
    if not job.journal.exists():
        return "new"
    with job.journal.open("a") as journal:
        if not lock(journal):
            return "running"
    if not next_command(job):
        return "finished"
    return "cut off" if last_record(job).get("exit", 143) in (0, 130, 143) else "failed"


def run_job(job: Job) -> int:
    """Starts or resumes a run, unless it has finished, and waits for its end. Returns its exit status, 128 + n for
    signal n.

    Waits first until no other process has the run. The first signal stops the run, the second one kills it.
    """
    signals, handled = catch_signals(), 0
    with job.journal.open("a") as journal, job.log.open("a") as log:
        while not lock(journal):
            if signals:
                return 128 + signals[0]
            time.sleep(POLL_SECONDS)
        if not (command := next_command(job)):
            return 0
        record = {"time": utc_now(), "host": platform.node(), "command": command}
        record |= {"sha256": hash_of(job.script), **commit_of(job.script)}
        print(
            f"\n{json.dumps(record)}", file=journal, flush=True
        )  # on a line of its own, even if a full disk cut off the last
        print(f"$ {shlex.join(command)}", file=log, flush=True)
        null, keep = subprocess.DEVNULL, [journal.fileno()]
        try:
            child = subprocess.Popen(command, cwd=job.folder, stdin=null, stdout=log, stderr=log, pass_fds=keep)
            while child.poll() is None:
                if handled < len(signals):
                    (child.kill if handled else child.terminate)()
                    handled += 1
                time.sleep(POLL_SECONDS)
            status = child.returncode if child.returncode >= 0 else 128 - child.returncode
            if status == 2 and any(NOTHING_LEFT in line for line in read_log(job)):
                status = 0  # it has outlived a process like this one, which could not record its end
        except OSError as error:
            print(f"cannot be started: {error}", file=log)
            status = 126
        run = next((str(run.relative_to(job.folder)) for run in reversed(find_runs(job))), "")
        if status == 0 and not run:
            print(f"ended without a run folder runs/{job.name}__*", file=log)
            status = 1
        print(json.dumps(record | {"time": utc_now(), "exit": status, "run": run}), file=journal)
        return status


# === Versions, machine and manifest ===================================================================================


def output_of(*command: str) -> str:
    """What a command prints; nothing if there is no such command, or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def hash_of(script: Path) -> str:
    """SHA-256 of a script as it is now."""
    return hashlib.sha256(script.read_bytes()).hexdigest()


def commit_of(script: Path) -> dict[str, Any]:
    """Commit of a script's repository, and whether a file of it is changed since; both None where there is no
    repository.
    """
    git = "git", "-C", str(script.parent)
    commit = output_of(*git, "rev-parse", "HEAD") or None
    return {"commit": commit, "dirty": bool(output_of(*git, "status", "--porcelain", "-uno")) if commit else None}


def find_gpus() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, or else all of this machine, or their parts where they are divided
    (MIG).
    """
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    listing = output_of("nvidia-smi", "-L")
    return re.findall(r"UUID: (MIG-[^)]+)", listing) or re.findall(r"UUID: (GPU-[^)]+)", listing)


def read_manifest(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """The entries of earlier starts. Exits if one of them had another script or other flags under the same name."""
    folder = jobs[0].folder
    try:
        entries = json.loads((folder / "manifest.json").read_text())
        earlier = [entry["scripts"] for entry in entries]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError) as error:
        fail(f"--folder takes a sweep's folder or a new one, and the manifest.json of {folder} cannot be read: {error}")
    for before, job in product(earlier, jobs):
        words = [str(job.script), *job.extra]
        if before.get(job.exp_name, words) != words:
            there = shlex.join(before[job.exp_name])
            fail(f"--folder {folder} takes the command that it was begun with, `{there}`, not `{shlex.join(words)}`")
    return entries


def write_manifest(entries: Sequence[dict[str, Any]], jobs: Sequence[Job], argv: Sequence[str]) -> None:
    """Adds an entry for this start."""
    path = jobs[0].folder / "manifest.json"
    entry = {
        "time": utc_now(),
        "command": shlex.join(["python", "-m", "benchmark.sweep", *argv]),
        "scripts": {job.exp_name: [str(job.script), *job.extra] for job in jobs},
        "runs": [shlex.join(job.command) for job in jobs],
        **commit_of(jobs[0].script),
        "python": platform.python_version(),
        "versions": dict(sorted((package.name, package.version) for package in distributions())),
        "machine": {"host": platform.node(), "platform": platform.platform(), "cores": os.cpu_count()},
        "gpus": output_of("nvidia-smi", "-L").splitlines(),
        "environment": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")},
    }
    path.with_suffix(".new").write_text(json.dumps([*entries, entry], indent=2) + "\n")
    os.replace(path.with_suffix(".new"), path)


# === Progress =========================================================================================================


def read_log(job: Job) -> list[str]:
    """The last lines that the last attempt printed."""
    if not job.log.exists():
        return []
    with job.log.open("rb") as file:
        file.seek(max(0, job.log.stat().st_size - 10_000))
        text = file.read().decode(errors="replace")
    return re.split(r"^\$ .*\n", text, flags=re.MULTILINE)[-1].splitlines()[-12:]


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
    table = Table(
        "run",
        "state",
        "step",
        "steps/s",
        Column("return", ratio=1),
        "left",
        expand=True,
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.caption = count_states(states)
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
    words += ["--folder", str(job.folder), *(["--exp-name", args.exp_name] if args.exp_name else [])]
    return f"exec {shlex.join(words)} --job {index} -- {shlex.join(job.extra)}"


def connect_local(jobs: Sequence[Job], args: Args) -> Start:
    """Returns what starts a run's process on this machine, beyond the terminal's Ctrl-C, with its share of cores and
    GPUs.
    """
    gpus = [] if "--no-cuda" in jobs[0].extra else find_gpus()
    cores = (
        len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    )  # that this process may use
    if gpus and args.workers > len(gpus) * args.runs_per_gpu:
        fail(f"--workers takes at most the number of GPUs times --runs-per-gpu, {len(gpus) * args.runs_per_gpu}")

    spawn = partial(subprocess.Popen, shell=True, cwd=REPOSITORY, stdin=subprocess.DEVNULL, start_new_session=True)

    def start(worker: int, job: Job) -> Process:
        env = {"OMP_NUM_THREADS": str(max(1, cores // args.workers)), **os.environ}
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
        with job.log.open("a") as log:
            process = spawn(job_command(args, job, str(jobs.index(job))), env=env, stdout=log, stderr=log)
        return Process(process.poll, process.terminate)

    return start


def connect_ray(args: Args) -> Start:
    """Joins a Ray cluster, or starts one of this machine alone, and returns what starts a run's process there."""
    if find_spec("ray") is None:
        fail("--launcher ray needs the package ray: pip install ray")
    import ray

    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        fail(f"--launcher ray takes a RAY_ADDRESS that answers, or none: {str(error).splitlines()[0]}")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and "CPU" in node["Resources"]]
    cores = min(sum(node["CPU"] for node in nodes) // args.workers, *(node["CPU"] for node in nodes))
    gpus = 1 / args.runs_per_gpu if any("GPU" in node for node in nodes) else 0
    task = ray.remote(num_cpus=max(1, int(cores)), num_gpus=gpus, max_retries=0)(run_job)

    def start(worker: int, job: Job) -> Process:
        reference = task.remote(job)

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


def run_all(jobs: Sequence[Job], args: Args, start: Start) -> int:
    """Keeps --workers runs going until all have ended, or a signal stops them. Returns the exit status of the sweep."""
    console = Console(highlight=False, markup=False)
    say, signals, handled = partial(console.print, soft_wrap=True), catch_signals(), 0
    states = {job: "waiting" if next_command(job) else "finished" for job in jobs}
    waiting = [job for job in jobs if states[job] == "waiting"]
    running: dict[int, tuple[Job, Process]] = {}
    report_seconds = 1.0 if sys.stdout.isatty() else PROGRESS_SECONDS
    report_time = time.monotonic() + report_seconds
    say(f"{len(jobs)} runs in {jobs[0].folder}: {count_states(states)}")
    others = [job.name for job in jobs if last_record(job).get("sha256", hash_of(job.script)) != hash_of(job.script)]
    if others:
        say(f"warning: {len(others)} of them are the work of another version of the script: {', '.join(others)}")
    with Live(console=console, auto_refresh=False, transient=not sys.stdout.isatty()) as live:
        while running or (waiting and not signals):
            while waiting and len(running) < args.workers and not signals:
                job, worker = waiting.pop(0), min(set(range(args.workers)) - set(running))
                say(f"starting: {job.name} ({state_of(job)})")
                try:
                    process = start(worker, job)
                except OSError as error:
                    say(f"no process can be started: {error}")
                    process = Process(lambda: 126, lambda: None)
                running[worker], states[job] = (job, process), "running"
            if handled < len(signals):
                say(
                    f"killing {len(running)} runs"
                    if handled
                    else f"stopping {len(running)} runs; Ctrl-C once more kills them"
                )
                for _, process in running.values():
                    process.stop()
                handled += 1
            for worker, (job, process) in list(running.items()):
                if (status := process.poll()) is None:
                    continue
                del running[worker]
                is_stopped = signals and status in (130, 137, 143, -signal.SIGTERM)
                states[job] = "finished" if status == 0 else "stopped" if is_stopped else "failed"
                say(", ".join([f"{states[job]}: {job.name}", *read_progress(job).values()]))
                if states[job] == "failed":
                    command = shlex.join(last_record(job).get("command", job.command))
                    say(f"exit status {status}; {job.log} ends with:")
                    say("\n".join(f"    {line}" for line in read_log(job)))
                    say(f"to repeat it: cd {shlex.quote(str(job.folder))} && {command}")
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
    if is_unfinished := set(states.values()) != {"finished"}:
        say("the same command goes on from here")
    return (128 + signals[0] if signals else 1) if is_unfinished else 0


def submit(jobs: Sequence[Job], args: Args) -> int:
    """Hands Slurm an array job of all runs that neither have finished nor are running, or prints it. Returns the
    status.
    """
    folder, names = jobs[0].folder, dict.fromkeys(job.exp_name for job in jobs)
    indices = [str(i) for i, job in enumerate(jobs) if state_of(job) not in ("finished", "running")]
    if not indices:
        print("nothing to submit: all runs have finished or are running")
        return 0
    script = f"""#!/bin/bash
#SBATCH --job-name={"-".join(names)} --array={",".join(indices)}%{args.workers}
#SBATCH --output={shlex.quote(f"{folder}/logs/slurm-%A_%a.log")} --open-mode=append
#SBATCH --requeue --signal=B:TERM@120 {args.sbatch_args}
cd {shlex.quote(str(REPOSITORY))}
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}
{job_command(args, jobs[0], "$SLURM_ARRAY_TASK_ID")}
"""
    if args.dry_run:
        print(script)
        return 0
    path = folder / "job.sh"
    path.write_text(script)
    try:
        subprocess.run(["sbatch", str(path)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        fail(f"--launcher slurm takes a machine where sbatch accepts {path}: {error}")
    print("--dry-run shows the runs' states; the same command submits again what has not finished")
    return 0


def main(argv: list[str]) -> int:
    """Does what a command line (without the program's name) says, and returns the exit status."""
    split = argv.index("--") if "--" in argv else len(argv)
    args = tyro.cli(Args, prog="python -m benchmark.sweep", args=argv[:split])
    jobs = make_jobs(args, argv[split + 1 :])
    entries, folder = read_manifest(jobs), jobs[0].folder
    if args.dry_run:
        for i, job in enumerate(jobs):
            print(f"{i} {state_of(job)}: {shlex.join(next_command(job)) or job.name}")
        return submit(jobs, args) if args.launcher == "slurm" else 0
    try:
        for path in (jobs[0].journal, jobs[0].log):
            path.parent.mkdir(parents=True, exist_ok=True)
        sweep_lock = (folder / "lock").open("a")
    except OSError as error:
        fail(f"--folder takes a folder that can be written to: {error}")
    if args.job is not None:
        return run_job(jobs[args.job])
    with sweep_lock:
        if not lock(sweep_lock):
            fail(f"--folder takes a folder in which no other sweep is at work, and in {folder} there is one")
        if args.launcher == "slurm":
            launch = partial(submit, jobs, args)
        else:
            launch = partial(
                run_all, jobs, args, connect_ray(args) if args.launcher == "ray" else connect_local(jobs, args)
            )
        write_manifest(entries, jobs, argv)
        return launch()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
