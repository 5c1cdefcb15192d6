"""How much processor time a step takes in one checkout, divided by that in another: both run at once on one core.

    git clone . older && git -C older checkout a88a7dc
    python -m benchmark.results.speed_changes.pair older . ppo_continuous.py 65536 3 --num-envs 16 --num-steps 128

The arguments are the older checkout, the newer one, the script, the measured steps, the number of pairs, and flags of
`benchmark/speed.py`. On a machine whose speed changes within minutes, such a ratio is the same to 1 or 2%.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmark.speed import Args, pinned, processor_environment


def start(checkout: Path, script: str, flags: list[str]) -> subprocess.Popen[str]:
    """Begins a measurement by the checkout's own `benchmark/speed.py`."""
    command = [
        sys.executable,
        "-m",
        "benchmark.speed",
        "--script",
        script,
        "--measure",
        f"script@{time.time()}",
        *flags,
    ]
    environment = processor_environment(Args(script=[])) | {"PYTHONPATH": str(checkout)}
    pipe, folder = subprocess.PIPE, tempfile.mkdtemp()
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def main(older: str, newer: str, script: str, steps: str, num_pairs: str, *flags: str) -> None:
    """Prints a ratio for each pair. The two take turns in being started first."""
    checkouts = [Path(older).resolve(), Path(newer).resolve()]
    for i in range(int(num_pairs)):
        with pinned(1):
            order = checkouts if i % 2 == 0 else checkouts[::-1]
            processes = {checkout: start(checkout, script, ["--steps", steps, *flags]) for checkout in order}
        seconds: list[Any] = []
        for checkout in checkouts:
            out, err = processes[checkout].communicate()
            if processes[checkout].returncode != 0:
                raise SystemExit(f"error: {checkout}: {err.strip()}")
            seconds.append(json.loads(out.splitlines()[-1])["processor"])
        ratio = seconds[1] / seconds[0]
        print(f"{' '.join([script, *flags])}: {ratio:.3f} ({seconds[0]:.3g} and {seconds[1]:.3g} s a step)", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
