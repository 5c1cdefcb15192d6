"""Draws `time.png`: returns over processor time, each update at its median cost in `cost.csv`.

    python benchmark/results/sac_crossq/figure.py

The runs' own clocks do not serve: some runs were paused, and other programs used the machine. SAC's curves are seeds
201 to 203 of the study `sac`, up to 100,000 steps.
"""

import csv
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from benchmark.figures import draw, make_look  # noqa: E402
from benchmark.runs import RETURN, group_runs, read_study  # noqa: E402

FOLDER = Path(__file__).parent
STEPS, LEARNING_STARTS = 100_000, 5_000  # environment steps of a run, and those before the first update

if __name__ == "__main__":
    costs = defaultdict[tuple[str, str], list[float]](list)  # ms of an update, by task and script
    with (FOLDER / "cost.csv").open() as file:
        for row in csv.DictReader(file):
            for script in ("sac_continuous", "sac_crossq"):
                costs[row["task"], script].append(float(row[script]))
    runs = [run for run in read_study(FOLDER) if run.exp_name == "sac_crossq"]
    runs += [run for run in read_study(FOLDER.parent / "sac") if run.exp_name == "sac_continuous"]
    timed = []
    for run in runs:
        if (run.env_id, run.exp_name) in costs:
            curve = run.curves[RETURN][run.curves[RETURN][:, 0] <= STEPS].copy()
            curve[:, 1] = (curve[:, 0] - LEARNING_STARTS) * statistics.median(costs[run.env_id, run.exp_name]) / 1000.0
            timed.append(replace(run, curves={RETURN: curve}))
    groups = group_runs(timed)[0]
    figure = draw(groups, {}, True, make_look(groups, ["sac_crossq=sac_crossq.py", "sac_continuous=sac_continuous.py"]))
    for axes in figure.axes:
        axes.set_xlabel("minutes of processor time in updates")
    figure.savefig(FOLDER / "time.png", dpi=120)
