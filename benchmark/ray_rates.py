"""Environment and update rates of `variants/sac_ray.py`, for several numbers of rollout workers.

    python -m benchmark.ray_rates --num-workers 1 2 4 8 16 --env-seconds 0.01 -- --updates-per-step 0

What follows `--` goes to the script. Prints a CSV row for each run: medians over the points that it logged after all
rollout workers had begun. Ray gives its processes a niceness of 15, unless RAY_worker_niceness says otherwise.
"""

import csv
import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmark import REPOSITORY, split_flags

COLUMNS = {  # of the table, and the logged key
    "steps_per_second": "charts/SPS",
    "updates_per_second": "ray/updates_per_second",
    "lag_updates": "ray/policy_lag_updates",
    "lag_seconds": "ray/policy_lag_seconds",
    "busy_learner": "ray/busy_learner",
    "busy_workers": "ray/busy_workers",
    "busy_shards": "ray/busy_shards",
    "busy_server": "ray/busy_server",
}


@dataclass
class Args:
    """Environment and update rates of variants/sac_ray.py; what follows -- goes to the script."""

    num_workers: tuple[int, ...] = (1, 2, 4, 8, 16)
    """rollout workers of each run"""
    task: str = "Pendulum-v1"
    """task that is slowed down"""
    env_seconds: tuple[float, ...] = (0.01,)
    """how long a step sleeps"""
    seconds: float = 30
    """how long is measured, after all rollout workers have begun"""
    steps: int = 200
    """environment steps between two points, for each worker"""


def busy_workers() -> set[str]:
    """The processes of rollout workers on this machine that are in a rollout now."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if path.read_bytes().startswith(b"ray::RolloutWorker.rollout"):
                found.add(path.parent.name)
    return found


def has_point(folder: Path) -> bool:
    """Whether the run in this folder has logged a point, which comes after its compilation."""
    return any("charts/SPS" in EventAccumulator(str(run)).Reload().Tags()["scalars"] for run in folder.glob("runs/*"))


def measure(args: Args, num_workers: int, env_seconds: float, extra: list[str]) -> dict[str, float]:
    """One run in a folder of its own, which is stopped after the measurement."""
    flags: dict[str, Any] = {"num-workers": num_workers, "log-freq": args.steps * num_workers}
    flags |= {"eval-freq": 0, "eval-episodes": 1, "checkpoint-freq": 0, "env-id": "benchmark.slow:Slow-v0"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    words += ["--env-kwargs", json.dumps({"task": args.task, "seconds": env_seconds}), *extra]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(REPOSITORY / "variants" / "sac_ray.py"), *words]
        program, begun = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL), set[str]()
        while program.poll() is None and (len(begun) < num_workers or not has_point(Path(folder))):
            time.sleep(0.2)
            begun |= busy_workers()
        began = time.time()
        time.sleep(args.seconds)
        program.send_signal(signal.SIGINT)
        if program.wait() != 128 + signal.SIGINT:
            raise SystemExit(f"the run ended too early, with status {program.returncode}")
        (run,) = (Path(folder) / "runs").iterdir()
        events, values = EventAccumulator(str(run)).Reload(), dict[str, list[float]]()
        for name, key in COLUMNS.items():
            later = [event.value for event in events.Scalars(key) if event.wall_time > began]
            values[name] = later[1:]  # the first point began before
        if len(later) < 2:
            raise SystemExit(f"--seconds {args.seconds:g} takes more seconds, or --steps fewer: two points are needed")
    row = {"num_workers": num_workers, "env_seconds": env_seconds, "points": len(later) - 1}
    return row | {name: float(np.median(x)) for name, x in values.items()}


def main(args: Args, extra: list[str]) -> None:
    """Prints the table, row by row."""
    writer = csv.writer(sys.stdout)
    writer.writerow(["num_workers", "env_seconds", "points", *COLUMNS])
    for env_seconds in args.env_seconds:
        for num_workers in args.num_workers:
            row = measure(args, num_workers, env_seconds, extra)
            writer.writerow(f"{value:.4g}" for value in row.values())
            sys.stdout.flush()


if __name__ == "__main__":
    own, extra = split_flags(sys.argv[1:])
    main(tyro.cli(Args, args=own), extra)
