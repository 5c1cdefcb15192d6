"""What an environment step with its update costs: processor time of each part of `variants/sac_ray.py`.

    python -m benchmark.ray_cost --rounds 3

Runs `sac_continuous.py` and `variants/sac_ray.py` in turn and prints a CSV row for each run: steps a second, and
milliseconds of processor time a step for the program itself and for each kind of process that it started. Processor
time hardly depends on what else the machine does; steps a second do. The first points are left out: processes start.
"""

import csv
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmark import REPOSITORY, fail, split_flags

SCRIPTS = {"sac_continuous.py": [], "variants/sac_ray.py": ["--num-workers", "1"]}
PARTS = ("program", "RolloutWorker", "Shard", "ParameterServer", "Tester", "other")
TICKS = os.sysconf("SC_CLK_TCK")  # units of processor time in /proc, per second


@dataclass
class Args:
    """Processor time of each part of variants/sac_ray.py, beside sac_continuous.py; what follows -- goes to both."""

    rounds: int = 3
    """runs of each script, in turn"""
    env_id: str = "HalfCheetah-v5"
    """task"""
    steps: int = 3000
    """environment steps that are measured"""
    warmup: int = 1000
    """environment steps before the measured ones; updates begin after half of these"""


def processor_time(program: int) -> dict[str, float]:
    """Seconds of processor time so far of this process and of all that come from it, by part."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # it has ended
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text()
            processes[int(folder.name)] = int(stat[1]), (int(stat[11]) + int(stat[12])) / TICKS, command
    seconds = defaultdict[str, float](float)
    for pid, (_, amount, command) in processes.items():
        ancestor = pid
        while ancestor != program and ancestor in processes:
            ancestor = processes[ancestor][0]
        if ancestor == program:
            name = command.removeprefix("ray::").partition(".")[0].partition("\0")[0].strip()
            seconds["program" if pid == program else name if name in PARTS else "other"] += amount
    return seconds


def measure(args: Args, script: str, extra: list[str]) -> list[float]:
    """One run in a folder of its own: steps a second, and milliseconds of processor time a step of each part."""
    words = ["--env-id", args.env_id, "--learning-starts", str(args.warmup // 2), "--log-freq", str(args.warmup)]
    words += ["--total-timesteps", str(args.warmup + args.steps), "--eval-freq", "0", "--eval-episodes", "1"]
    words += ["--checkpoint-freq", "0", *SCRIPTS[script], *extra]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(REPOSITORY / script), *words]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        times, samples = list[float](), list[dict[str, float]]()
        while process.poll() is None:
            samples.append(processor_time(process.pid))
            times.append(time.time())
            time.sleep(0.3)
        if process.returncode:
            raise SystemExit(f"{script} ended with status {process.returncode}")
        (run,) = (Path(folder) / "runs").iterdir()
        points = EventAccumulator(str(run)).Reload().Scalars("losses/alpha")
    begin, end = points[0], points[-1]
    steps = end.step - begin.step
    spent = [np.interp([begin.wall_time, end.wall_time], times, [x[part] for x in samples]) for part in PARTS]
    return [steps / (end.wall_time - begin.wall_time), *(1000.0 * (x[1] - x[0]) / steps for x in spent)]


def main(args: Args, extra: list[str]) -> None:
    """Prints the table, row by row."""
    if args.steps < args.warmup:
        fail(f"--steps takes a number from --warmup ({args.warmup}), not {args.steps}")
    writer = csv.writer(sys.stdout)
    writer.writerow(["script", "round", "steps_per_second", *(f"{part}_ms" for part in PARTS)])
    for i in range(args.rounds):
        for script in SCRIPTS:
            writer.writerow([script, i, *(f"{x:.4g}" for x in measure(args, script, extra))])
            sys.stdout.flush()


if __name__ == "__main__":
    own, extra = split_flags(sys.argv[1:])
    main(tyro.cli(Args, args=own), extra)
