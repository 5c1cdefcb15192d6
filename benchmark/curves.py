"""Return curves of some runs, as CSV and as a picture.

python -m benchmark.curves runs/HalfCheetah-v5__* writes benchmark/results/halfcheetah.csv and .png.
"""

import argparse
import csv
import json
from pathlib import Path

import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main() -> None:
    """Reads training and evaluation returns of every run folder on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("benchmark/results/halfcheetah"))
    args = parser.parse_args()
    rows: list[tuple[str, int, str, int, float]] = []
    figure, axes = plt.subplots(figsize=(7, 4))
    for folder in args.folders:
        run = json.loads((folder / "args.json").read_text())
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        curves = {key: events.Scalars(key) for key in ("charts/episodic_return", "eval/return_mean", "eval/return_std")}
        rows += [(run["exp_name"], run["seed"], key, e.step, e.value) for key, points in curves.items() for e in points]
        training, evaluation = curves["charts/episodic_return"], curves["eval/return_mean"]
        (line,) = axes.plot([e.step for e in training], [e.value for e in training], label=run["exp_name"], linewidth=1)
        axes.plot([e.step for e in evaluation], [e.value for e in evaluation], "o", color=line.get_color(), markersize=4)
    axes.set(xscale="log", xlabel="environment steps", ylabel="return")
    axes.set_title("HalfCheetah-v5, one seed (lines: training; dots: evaluation)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(args.output.with_suffix(".png"), dpi=120)
    with args.output.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["exp_name", "seed", "key", "step", "value"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
