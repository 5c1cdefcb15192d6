"""Evaluation curves of some runs, as CSV and as a picture.

python -m benchmark.curves runs/HalfCheetah-v5__* writes benchmark/results/halfcheetah.csv and .png.
"""

import argparse
import csv
import json
from pathlib import Path

import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main() -> None:
    """Reads eval/return_mean and eval/return_std of every run folder on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("benchmark/results/halfcheetah"))
    args = parser.parse_args()
    rows: list[tuple[str, int, int, float, float]] = []
    figure, axes = plt.subplots(figsize=(7, 4))
    for folder in args.folders:
        run = json.loads((folder / "args.json").read_text())
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        points = zip(events.Scalars("eval/return_mean"), events.Scalars("eval/return_std"), strict=True)
        curve = [(run["exp_name"], run["seed"], mean.step, mean.value, std.value) for mean, std in points]
        rows += curve
        axes.plot([row[2] for row in curve], [row[3] for row in curve], label=run["exp_name"])
    axes.set(xscale="log", xlabel="environment steps", ylabel="return of the deterministic policy")
    axes.set_title("HalfCheetah-v5, one seed")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(args.output.with_suffix(".png"), dpi=120)
    with args.output.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["exp_name", "seed", "step", "return_mean", "return_std"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
