"""What checkpoints cost: runs a script as it is, and adds up the seconds in which it saves them.

    python -m benchmark.checkpoints sac_continuous --env-id HalfCheetah-v5 --updates-per-step 0
    python -m benchmark.checkpoints ppo_continuous --env-id HalfCheetah-v5 --total-timesteps 300000

Without updates SAC makes a million steps in minutes, and saves as many transitions as with them. What follows the name
of the script goes to the script.
"""

import importlib
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmark import fail
from utils.run import Run, parse_args

SCRIPTS = ("ppo_continuous", "sac_continuous", "ppo_selfplay", "sac_selfplay")


def main(name: str, *words: str) -> None:
    """Runs the script and prints its checkpoints' number, seconds and size."""
    script: Any = importlib.import_module(name)
    save_checkpoint = Run.save_checkpoint
    seconds: list[float] = []
    folders: set[Path] = set()

    def timed(run: Run, is_finished: bool) -> bool:
        began = time.perf_counter()
        is_saved = save_checkpoint(run, is_finished)
        seconds.append(time.perf_counter() - began)
        folders.add(run.folder)
        return is_saved

    with patch.object(Run, "save_checkpoint", timed):
        began = time.perf_counter()
        script.main(parse_args(script.Args, words))
        total = time.perf_counter() - began
    if not folders:
        fail("the words after the script's name take what trains, and not --evaluate")
    (folder,) = folders
    size = sum(path.stat().st_size for path in folder.rglob("*") if "checkpoint" in str(path.relative_to(folder)))
    share = f"{sum(seconds):.2f} s in all, {sum(seconds) / total:.2%} of {total:.0f} s"
    print(
        f"{len(seconds)} checkpoints, {share}, the longest {max(seconds):.2f} s; {size / 1e6:.1f} MB on disk at the end"
    )


if __name__ == "__main__":
    if sys.argv[1:2] not in ([name] for name in SCRIPTS):
        fail(f"the first word takes the name of a script, one of {', '.join(SCRIPTS)}")
    main(*sys.argv[1:])
