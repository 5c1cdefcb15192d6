"""How much processor time a step takes in one checkout, divided by that in another: both run at once on one core.

    git clone . older && git -C older checkout a88a7dc
    python -m benchmark.results.speed_changes.pair older . ppo_continuous.py 65536 3 --num-envs 16 --num-steps 128

The arguments are the older checkout, the newer one, the script, the measured steps, the number of pairs, and flags of
`benchmark/speed.py`. On a machine whose speed changes within minutes, such ratios lie 1 to 3% apart.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.speed import Args, pinned, processor_environment


def start(checkout: Path, what: str, script: str, flags: Sequence[str], folder: str) -> subprocess.Popen[str]:
    """Begins a measurement by the checkout's own `benchmark/speed.py`; `what` is one of its `OURS`."""
    command = [sys.executable, "-m", "benchmark.speed", "--script", script, "--measure", f"{what}@{time.time()}"]
    environment = processor_environment(Args(script=[])) | {"PYTHONPATH": str(checkout)}
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *flags], cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def measure_both(
    sides: Sequence[tuple[Path, str]], script: str, flags: Sequence[str], second_first: bool
) -> list[dict[str, float]]:
    """What `benchmark/speed.py` measures of two (checkout, what), which run at once on one core."""
    results: dict[tuple[Path, str], Any] = {}
    with tempfile.TemporaryDirectory() as folder, pinned(1):
        order = sides[::-1] if second_first else sides
        for side, process in [(x, start(*x, script, flags, tempfile.mkdtemp(dir=folder))) for x in order]:
            out, err = process.communicate()
            if process.returncode != 0:
                raise SystemExit(f"error: {side[0]}: {err.strip()}")
            results[side] = json.loads(out.splitlines()[-1])
    return [results[side] for side in sides]


def main(older: str, newer: str, script: str, steps: str, num_pairs: str, *flags: str) -> None:
    """Prints a ratio for each pair. The two take turns in being started first."""
    sides = [(Path(checkout).resolve(), "script") for checkout in (older, newer)]
    for i in range(int(num_pairs)):
        results = measure_both(sides, script, ["--steps", steps, *flags], i % 2 == 1)
        seconds = [result["processor"] for result in results]
        ratio = seconds[1] / seconds[0]
        print(f"{' '.join([script, *flags])}: {ratio:.3f} ({seconds[0]:.3g} and {seconds[1]:.3g} s a step)", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
