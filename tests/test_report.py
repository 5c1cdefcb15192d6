"""Statistics of the report against references, and its tables, files and curves on event files that the tests write."""

import csv
import errno
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.stats
from conftest import Train
from matplotlib.container import ErrorbarContainer
from matplotlib.lines import Line2D
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

import ppo_selfplay
from benchmark import random_policy as random_policy_module
from benchmark import runs as runs_module
from benchmark.figures import (
    common_points,
    draw,
    draw_improvement,
    draw_intervals,
    draw_profiles,
    in_reach,
    make_look,
    smoothed,
)
from benchmark.random_policy import random_return
from benchmark.report import PUBLISHED, Args, main
from benchmark.runs import (
    Groups,
    Run,
    describe_number,
    final_scores,
    find_scales,
    group_runs,
    improvement_pairs,
    last_step,
    read_curves,
    read_run,
    state_of,
    write_csv,
)
from benchmark.statistics import (
    Statistic,
    bootstrap_interval,
    collapsed,
    crossed_interval,
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
    student_interval,
    win_interval,
)

mean: Statistic = partial(np.mean, axis=-1)  # type: ignore[assignment]  # NumPy's overloads
# normalised scores, a row a run, a column a task
OURS = np.array([[0.91, 0.35, 1.2], [0.74, 0.62, 0.95], [1.05, 0.1, 1.1], [0.88, 0.44, 0.4], [0.15, 0.51, 1.31]])
THEIRS = np.array(
    [[0.8, 0.3, 1], [0.6, 0.62, 0.7], [0.95, 0.55, 0.9], [0.1, 0.2, 1.15], [0.7, 0.4, 0.85], [0.99, 0.12, 0.3]]
)

Point = tuple[float, int, str, float]  # wall time, step, key, value


def write_events(path: Path, start: float, points: Iterable[Point]) -> None:
    """An event file as SummaryWriter writes it, with wall times of one's own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    events = [Event(wall_time=start, file_version="brain.Event:2")]
    for wall_time, step, key, value in points:
        events.append(
            Event(wall_time=wall_time, step=step, summary=Summary(value=[{"tag": key, "simple_value": value}]))
        )
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())


def write_run(root: Path, env_id: str, exp_name: str, seed: int, evaluations: list[float], **overrides: Any) -> Path:
    """A run of 1,000 steps that evaluates at equal distances, and trains at returns that are 10 lower; a step takes
    0.06 s.
    """
    folder = root / f"{env_id}__{exp_name}__{seed}"
    run_args = {"env_id": env_id, "exp_name": exp_name, "seed": seed, "total_timesteps": 1000, "eval_episodes": 7}
    steps = [1000 * (i + 1) // len(evaluations) for i in range(len(evaluations))]
    points: list[Point] = [(5.0, 1, "charts/episodic_return", 0.0)]
    for step, value in zip(steps, evaluations, strict=True):
        scalars = {"charts/episodic_return": value - 10.0, "eval/return_mean": value}
        points += [(5.0 + 0.06 * step, step, key, x) for key, x in scalars.items()]
    write_events(folder / "events.out.tfevents.1", 5.0, points)
    (folder / "args.json").write_text(json.dumps(run_args | overrides))
    return folder


def read_all(folders: Iterable[Path]) -> list[Run]:
    """All of these runs."""
    return [run for folder in folders if isinstance(run := read_run(folder, read_curves(folder)), Run)]


def grouped(folders: Iterable[Path]) -> Groups:
    """The groups of these runs."""
    return group_runs(read_all(folders))[0]


@pytest.fixture(autouse=True)
def random_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns 0 on every task."""
    monkeypatch.setattr(runs_module, "random_return", lambda env_id, env_kwargs: 0.0)


def markdown_rows(text: str, title: str) -> list[dict[str, str]]:
    """The rows of a section's table."""
    section = text.split(f"## {title}\n\n")[1].split("\n## ")[0]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"
    ]
    return [dict(zip(header, row, strict=True)) for row in rows]


def numbers(cell: str) -> list[float]:
    """What a cell such as `1,234 [1,000, 1,500]` says."""
    return [float(word) for word in re.findall(r"-?[\d.]+", re.sub(r",(?=\d)", "", cell))]


def xy(line: Line2D) -> np.ndarray:
    """The points (n, 2) of a line in a figure."""
    return np.asarray(line.get_xydata())


# === Statistics =======================================================================================================


@pytest.mark.parametrize("n", range(1, 14))
def test_interquartile_mean_is_the_mean_of_the_middle(n: int) -> None:
    """Those that are left when a quarter is cut at each end, rounded down, along the last axis."""
    values = np.random.default_rng(n).normal(size=(3, n)) ** 3
    expected = [statistics.mean(sorted(row)[n // 4 : n - n // 4]) for row in values.tolist()]
    assert interquartile_mean(values) == pytest.approx(np.array(expected))


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_interval_is_scipys_percentile_bootstrap(statistic: Statistic) -> None:
    """To 3% of its width, which is what two streams of random numbers leave."""
    values = np.random.default_rng(1).gamma(2.0, size=(2, 20))

    def reference(x: np.ndarray, axis: int) -> np.ndarray:
        return scipy.stats.trim_mean(x, 0.25 if statistic is interquartile_mean else 0.0, axis=axis)

    rng = np.random.default_rng(2)
    result = scipy.stats.bootstrap([values], reference, axis=-1, n_resamples=20_000, method="percentile", rng=rng)
    low, high = result.confidence_interval
    assert np.array(bootstrap_interval(statistic, [values])) == pytest.approx(
        np.array([low, high]), abs=0.03 * (high - low).min()
    )


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_interval_is_that_of_all_resamples(statistic: Statistic) -> None:
    """Two tasks with three and four runs have 27 * 256 resamples: the interval is between the percentiles of all of
    them.
    """
    strata = [np.array([0.0, 1.0, 5.0]), np.array([10.0, 11.0, 13.0, 20.0])]
    resamples = [list(a) + list(b) for a, b in product(product(strata[0], repeat=3), product(strata[1], repeat=4))]
    cut = 0.25 if statistic is interquartile_mean else 0.0
    exact = np.percentile(scipy.stats.trim_mean(np.array(resamples), cut, axis=1), [2.5, 97.5])
    assert bootstrap_interval(statistic, strata) == pytest.approx(exact, abs=0.08)


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_interval_of_a_difference_is_that_of_all_pairs_of_resamples(statistic: Statistic) -> None:
    """Four runs and five of one task have 256 * 3,125 pairs of resamples."""
    ours, theirs = np.array([0.0, 1.0, 5.0, 6.0]), np.array([10.0, 11.0, 13.0, 20.0, 3.0])
    cut = 0.25 if statistic is interquartile_mean else 0.0
    x, y = (
        scipy.stats.trim_mean(np.array(list(product(runs, repeat=len(runs)))), cut, axis=1) for runs in (ours, theirs)
    )
    exact = np.percentile(x[:, None] - y, [2.5, 97.5])
    ends = bootstrap_interval(statistic, [ours], minus=[theirs])
    assert ends == pytest.approx(exact, abs=0.03 * np.ptp(exact))


def test_statistics_are_those_of_rliable() -> None:
    """rliable 1.2.0 (arch 7.2.0, 50,000 resamples; 10,000 for the probability) on the scores above; it does not install
    beside pandas 3, so its results are kept here.
    """
    for scores, iqm, iqm_interval, mean_interval in (
        (OURS, 0.72222222, (0.52333333, 0.87222222), (0.564, 0.84266667)),
        (THEIRS, 0.642, (0.474, 0.779), (0.50166667, 0.735)),
    ):
        assert float(interquartile_mean(scores.ravel())) == pytest.approx(iqm)
        assert bootstrap_interval(interquartile_mean, list(scores.T)) == pytest.approx(iqm_interval, abs=0.005)
        assert bootstrap_interval(mean, list(scores.T)) == pytest.approx(mean_interval, abs=0.005)
    probability, low, high = probability_of_improvement(list(OURS.T), list(THEIRS.T))
    assert probability == pytest.approx(0.62777778)
    assert low <= 0.42777778 + 0.006
    assert high >= 0.82222222 - 0.006


def test_probability_of_improvement_is_the_mann_whitney_statistic() -> None:
    """U / (n m), averaged over tasks, with ties and unequal numbers of runs; the other way round it is 1 minus that."""
    rng = np.random.default_rng(3)
    ours, theirs = ([rng.integers(0, 6, n).astype(float) for n in sizes] for sizes in ((4, 9, 5), (7, 3, 5)))
    expected = [scipy.stats.mannwhitneyu(x, y).statistic / (len(x) * len(y)) for x, y in zip(ours, theirs, strict=True)]
    probability, low, high = probability_of_improvement(ours, theirs)
    assert probability == pytest.approx(np.mean(expected))
    assert 0.0 < low < probability < high < 1.0
    assert probability_of_improvement(theirs, ours)[0] == pytest.approx(1.0 - probability)


def test_an_improvement_in_all_runs_is_not_certain() -> None:
    """Where all runs of two tasks win, the distances of the tasks' ends add up in squares, as for a mean of two."""
    wins, losses = [np.arange(5.0, 10.0), np.arange(5.0, 8.0)], [np.arange(5.0), np.arange(3.0)]
    first, second = (1.0 - win_interval(1.0, n, n)[0] for n in (5, 3))
    expected = (1.0, 1.0 - math.hypot(first, second) / 2, 1.0)
    assert probability_of_improvement(wins, losses) == pytest.approx(expected)
    assert probability_of_improvement(losses, wins) == pytest.approx((0.0, 0.0, 1.0 - expected[1]))


def test_a_nan_is_the_worst_and_not_the_best() -> None:
    """np.sort puts NaN last, where the interquartile mean would cut it off as the best of five."""
    values = np.array([1.0, 5.0, np.nan, 4.0, 6.0])
    assert interquartile_mean(values) == pytest.approx((1 + 4 + 5) / 3)
    assert interquartile_mean(np.array([1.0, np.nan])) == -np.inf
    ours, theirs = [np.array([np.nan, 1.0])], [np.array([0.0, 0.5])]
    assert probability_of_improvement(ours, theirs)[0] == 0.5
    assert probability_of_improvement(theirs, ours)[0] == 0.5


def test_a_collapse_is_a_loss_of_40_percent_of_the_best_so_far() -> None:
    """By hand: a return that falls and recovers, one that falls at the end, negative ones, and one that is NaN."""
    runs = np.array([[100.0, 59.0, 61.0], [10.0, 100.0, 50.0], [-100.0, -200.0, -50.0], [-5.0, 4.0, 2.0]])
    expected = [[False, True, False], [False, False, True], [False, False, False], [False, False, True]]
    assert collapsed(np.array([100.0, np.nan, 10.0])).tolist() == [False, True, True]
    assert collapsed(runs).tolist() == expected


def test_a_profile_counts_the_runs_above_a_threshold() -> None:
    """A run at the threshold is not above it (Agarwal et al. 2021, section 4.2); leading axes are separate."""
    scores, thresholds = np.array([[0.0, 0.5, 0.5, 1.0], [2.0, 2.0, 2.0, 2.0]]), np.array([-1.0, 0.0, 0.5, 1.0])
    assert performance_profile(scores, thresholds).tolist() == [[1.0, 0.75, 0.25, 0.0], [1.0, 1.0, 1.0, 1.0]]


def coverage(low: np.ndarray, high: np.ndarray, truth: float) -> float:
    """Share of the intervals that hold the truth."""
    return float(np.mean((low <= truth) & (truth <= high)))


@pytest.mark.parametrize("n", [3, 5, 10])
def test_students_interval_holds_the_mean(n: int) -> None:
    """In 93 to 97% of 20,000 samples of few runs; the percentile bootstrap does so in 75 to 91%. Scipy has the same
    ends.
    """
    values = np.random.default_rng(n).normal(3.0, 2.0, (20_000, n))
    low, high = student_interval(values)
    assert 0.93 < coverage(low, high, 3.0) < 0.97
    assert coverage(*bootstrap_interval(mean, [values[:2000]], resamples=1000), truth=3.0) < 0.92
    reference = scipy.stats.ttest_1samp(values[0], 0.0).confidence_interval(0.95)
    assert (low[0], high[0]) == pytest.approx((reference.low, reference.high))


@pytest.mark.parametrize("n", [3, 5, 10])
def test_interval_of_two_sets_of_runs_holds_the_mean(n: int) -> None:
    """Each run of both sets has a strength, and each pair some noise."""
    rng = np.random.default_rng(n)
    ours, theirs = rng.normal(size=(2, 2000, n))
    scores = 0.5 + 0.1 * (ours[:, :, None] - theirs[:, None]) + 0.05 * rng.normal(size=(2000, n, n))
    ends = np.array([crossed_interval(x) for x in scores])
    assert 0.93 < coverage(ends[:, 0], ends[:, 1], 0.5) < 0.975
    assert crossed_interval(np.full((n, 2), 0.25)) == (0.25, 0.25)


@pytest.mark.parametrize(("n", "m"), [(3, 12), (12, 3), (5, 5)])
def test_interval_of_two_sets_of_runs_without_noise_is_welchs(n: int, m: int) -> None:
    """Where a score is the difference of two strengths, the interval is that of Welch's t test, as scipy has it."""
    rng = np.random.default_rng(n)
    ours, theirs = rng.normal(1.0, 3.0, n), rng.normal(0.0, 0.5, m)
    welch = scipy.stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    assert crossed_interval(ours[:, None] - theirs) == pytest.approx((welch.low, welch.high))


@pytest.mark.parametrize("n", [5, 10])
@pytest.mark.parametrize("shift", [0.0, 1.0, 2.0])
def test_interval_of_an_improvement_holds_it(n: int, shift: float) -> None:
    """On a single task, where a bootstrap of runs that all win has no width."""
    rng = np.random.default_rng(n)
    ours, theirs = rng.normal(size=(2, 2000, n))
    wins = (ours[:, :, None] + shift > theirs[:, None]).mean((1, 2))
    intervals = {x: win_interval(x, n, n) for x in np.unique(wins)}
    low, high = np.array([intervals[x] for x in wins]).T
    assert 0.93 <= coverage(low, high, float(scipy.stats.norm.cdf(shift / np.sqrt(2)))) < 0.975
    low_at_one, high_at_one = win_interval(1.0, n, n)
    assert low_at_one < 0.9
    assert high_at_one == 1.0


@pytest.mark.parametrize(("p", "n", "m"), [(0.7, 3, 10), (0.5, 10, 3), (0.9, 4, 6)])
def test_interval_of_an_improvement_with_unequal_numbers_of_runs(p: float, n: int, m: int) -> None:
    """The ends are the roots of Newcombe's equation, with the mean of both numbers in the variance."""

    def distance(q: float) -> float:
        size = (n + m) / 2
        variance = q * (1 - q) / (n * m) * (1 + (size - 1) * ((1 - q) / (2 - q) + q / (1 + q)))
        return float(abs(p - q) - 1.959964 * np.sqrt(variance))

    ends = scipy.optimize.brentq(distance, 1e-6, p), scipy.optimize.brentq(distance, p, 1 - 1e-6)
    assert win_interval(p, n, m) == pytest.approx(ends, abs=3e-4)


def test_interval_over_tasks_is_the_wider_of_two() -> None:
    """The stratified bootstrap, resampled here run by run, and the tasks' own intervals combined; not wider."""
    rng = np.random.default_rng(5)
    ours, theirs = rng.normal(0.5, 1.0, (3, 9)), rng.normal(0.0, 1.0, (3, 7))
    resampled = [
        np.mean([(rng.choice(x, 9)[:, None] > rng.choice(y, 7)).mean() for x, y in zip(ours, theirs, strict=True)])
        for _ in range(4000)
    ]
    single = np.array([probability_of_improvement([x], [y]) for x, y in zip(ours, theirs, strict=True)])
    p = single[:, 0].mean()
    low, high = p - np.linalg.norm(single[:, 0] - single[:, 1]) / 3, p + np.linalg.norm(single[:, 2] - single[:, 0]) / 3
    ends = min(low, np.percentile(resampled, 2.5)), max(high, np.percentile(resampled, 97.5))
    assert probability_of_improvement(list(ours), list(theirs)) == pytest.approx((p, *ends), abs=0.012)


# === Reading ==========================================================================================================


def test_curves_are_those_of_tensorboard(tmp_path: Path) -> None:
    """Of the keys that are shown; seconds count from the opening of the file."""
    writer = SummaryWriter(str(tmp_path))
    for step in range(1, 40):
        for key in (
            "eval/return_mean",
            "charts/episodic_return",
            "losses/value_loss",
            "eval/length_mean",
            "selfplay/rating_red",
        ):
            writer.add_scalar(key, np.sin(step), 10 * step)
    writer.close()
    reference = EventAccumulator(str(tmp_path)).Reload()
    curves = read_curves(tmp_path)
    assert set(curves) == {"eval/return_mean", "charts/episodic_return", "selfplay/rating_red"}
    for key, curve in curves.items():
        expected = [
            (point.step, point.wall_time - reference.FirstEventTimestamp(), point.value)
            for point in reference.Scalars(key)
        ]
        np.testing.assert_allclose(curve, expected)


@pytest.mark.parametrize("names", [("1", "2"), ("2", "1")])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_resumed_run_is_one_curve(tmp_path: Path, names: tuple[str, str], order: tuple[int, int]) -> None:
    """What came after the checkpoint counts once, as the last part has it, and neither pauses nor what was lost take
    time.

    Parts are told by their clocks, not by the names or ages of files.
    """
    key, other = "eval/return_mean", "charts/episodic_return"
    first = [(1001.0, 10, key, 1.0), (1002.0, 20, key, 2.0), (1003.0, 30, key, -3.0), (1004.0, 40, other, -4.0)]
    second = [(5002.0, 30, key, 4.0)]
    parts = [(1000.0, first), (5000.0, second)]
    for i in order:
        write_events(tmp_path / f"events.out.tfevents.{names[i]}", *parts[i])
    write_events(tmp_path / "events.out.tfevents.3", 9000.0, [])
    curves = read_curves(tmp_path)
    assert list(curves) == [key]
    assert curves[key].tolist() == [[10, 1.0, 1.0], [20, 2.0, 2.0], [30, 4.0, 4.0]]


def test_truncated_file_is_read_to_its_last_whole_record(tmp_path: Path) -> None:
    """A killed run leaves half a record, or an empty file."""
    path = tmp_path / "events.out.tfevents.1"
    write_events(path, 0.0, [(1.0, step, "charts/episodic_return", 2.0) for step in range(5)])
    path.write_bytes(path.read_bytes()[:-7])
    (tmp_path / "events.out.tfevents.2").touch()
    assert read_curves(tmp_path)["charts/episodic_return"][:, 0].tolist() == [0, 1, 2, 3]


def test_unfinished_runs_are_named_and_left_out(tmp_path: Path) -> None:
    """Finished is a run with an evaluation at its last step or, where rollouts round it up, after it."""
    whole = write_run(tmp_path, "Toy-v1", "ppo", 1, [1.0], total_timesteps=990)
    part = write_run(tmp_path, "Toy-v1", "ppo", 2, [1.0, 2.0], total_timesteps=1001)
    silent = write_run(tmp_path, "Toy-v1", "ppo", 3, [])
    groups, unfinished, notes = group_runs(read_all((silent, part, whole)))
    assert {key: [run.folder for run in group] for key, group in groups.items()} == {("Toy-v1", "ppo"): [whole]}
    assert [run.folder for run in unfinished["Toy-v1", "ppo"]] == [part, silent]
    assert notes[0] == f"Left out, not finished: {part.name} (last evaluation at step 1,000 of 1,001)."
    assert notes[1] == f"Left out, not finished: {silent.name} (last evaluation at step 0 of 1,000)."


def test_a_task_that_no_run_has_finished_stays_in_the_study(tmp_path: Path) -> None:
    """A report that is made of an earlier one still names its runs."""
    folders = [
        write_run(tmp_path / "runs", "Toy-v1", "ppo", 1, [1.0]),
        write_run(tmp_path / "runs", "Other-v1", "ppo", 1, [1.0, 2.0], total_timesteps=9000),
        write_run(tmp_path / "runs", "Other-v1", "ppo", 2, [], total_timesteps=9000),
    ]
    output = tmp_path / "study"
    pages = []
    for runs in (folders, [output]):
        main(Args(runs=runs, output=output))
        pages.append((output / "README.md").read_text())
        assert [pages[-1].count(f"Left out, not finished: {folder.name}") for folder in folders] == [0, 1, 1]
    assert pages[0] == pages[1]


def test_a_run_is_finished_when_all_its_scores_are() -> None:
    """A run that was killed between two evaluations of its last step is not."""
    whole, part = np.array([[100.0, 1.0, 0.5]]), np.array([[50.0, 1.0, 0.5]])
    assert state_of({"eval/red_score_vs_random": whole, "eval/blue_score_vs_random": whole}, 100, []) == "finished"
    assert state_of({"eval/red_score_vs_random": whole, "eval/blue_score_vs_random": part}, 100, []) == "unfinished"


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        ([], "unfinished"),
        ([1], "failed"),
        ([137], "failed"),  # out of memory
        ([None], "unfinished"),  # the sweep was killed
        ([1, None], "unfinished"),  # it is going on
        ([143], "unfinished"),
        ([2], "unfinished"),  # refused: nothing ran
        ([143, 2], "unfinished"),  # a --resume that was refused for the moment
        ([1, 2], "failed"),
        (["stopped"], "unfinished"),  # killed by a second Ctrl-C in the sweep
    ],
)
def test_state_of_a_run_without_result(ends: list[int | str | None], state: str) -> None:
    """Failed is what ended by itself; refusals and stops do not count."""
    records: list[dict[str, Any]] = []
    for end in ends:
        records += [{"command": []}]
        records += [{"exit": 137, "stopped": True} if end == "stopped" else {"exit": end}] * (end is not None)
    assert state_of({}, 100, records) == state


def test_an_evaluation_done_again_costs_no_training_point(tmp_path: Path) -> None:
    """A kill in the final evaluation: the resumed run has nothing to do but this evaluation."""
    key = "charts/episodic_return"
    write_events(tmp_path / "events.out.tfevents.1", 0.0, [(float(step), step, key, 1.0) for step in (10, 20)])
    write_events(tmp_path / "events.out.tfevents.2", 99.0, [(100.0, 20, "eval/return_mean", 2.0)])
    curves = read_curves(tmp_path)
    assert curves[key][:, 0].tolist() == [10, 20]
    assert curves["eval/return_mean"][:, 0].tolist() == [20]


def test_runs_of_other_arguments_are_named(tmp_path: Path) -> None:
    """What bears on the result is compared, also if one script does not know it, and so are the budgets of a task."""
    shared = {"gamma": 0.9, "track": False, "eval_freq": 5}
    runs = [write_run(tmp_path, "Toy-v1", "ppo", 1, [1.0], **shared, new_flag=1)]
    runs += [write_run(tmp_path, "Toy-v1", "ppo", 2, [1.0], **shared | {"gamma": 0.8, "track": True, "eval_freq": 9})]
    runs += [write_run(tmp_path, "Toy-v1", "sac", 1, [1.0, 2.0], total_timesteps=400)]
    *_, notes = group_runs(read_all(runs))
    assert [note for note in notes if "**" in note] == [
        f"**Not of one kind**: --gamma is 0.9 in {runs[0].name}, 0.8 in {runs[1].name}.",
        f"**Not of one kind**: --new-flag is 1 in {runs[0].name}, not a flag in {runs[1].name}.",
    ]
    events = next(runs[2].glob("events*"))
    events.unlink()
    write_events(events, 0.0, [(1.0, 400, "eval/return_mean", 1.0)])
    *_, notes = group_runs(read_all(runs))
    assert "**Unequal budgets**: runs on Toy-v1 have from 400 to 1,000 steps." in notes


def write_journal(run: Path, *starts: dict[str, Any]) -> Path:
    """Gives a run the timestamp and the journal of a sweep's run; each start has its end."""
    journal = run.parents[1] / "jobs" / f"{run.name}.jsonl"
    journal.parent.mkdir(exist_ok=True)
    records = [record for start in starts for record in (start, start | {"exit": 0, "run": f"runs/{run.name}__5"})]
    journal.write_text("".join(f"\n{json.dumps(record)}\n" for record in records) + '{"cut off')
    return run.rename(f"{run}__5")


def test_command_and_commit_come_from_the_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run's last beginning and of all that resumed it; runs of different scripts are named, and those of none are
    not.
    """
    command = ["/bin/python", "/x/variants/ppo.py", "--seed", "1", "--note", "a b"]
    fresh: dict[str, Any] = {"command": command, "sha256": "11" * 32, "commit": "ab" * 20, "dirty": False}
    changed = fresh | {"sha256": "22" * 32, "commit": "cd" * 20, "dirty": True}
    resumed = changed | {"command": ["/bin/python", "/x/variants/ppo.py", "--resume", "runs/x"]}
    runs = [write_run(tmp_path / "runs", "Toy-v1", "ppo", seed, [1.0]) for seed in range(5)]
    journals = [[changed, fresh], [fresh], [changed], [fresh, resumed]]  # and none for the last run
    runs[:4] = [write_journal(run, *starts) for run, starts in zip(runs, journals, strict=False)]
    main(Args(runs=runs, output=tmp_path / "x"))
    text = capsys.readouterr().out
    notes = re.findall(r"\*\*Not of one kind\*\*: (.*)\.", text)
    assert notes == [
        f"{runs[3].name} was resumed by another script: abababa, cdcdcdc+",
        f"the script is that of abababa in {runs[0].name} and 1 more, cdcdcdc+ in {runs[2].name}, "
        f"abababa, cdcdcdc+ in {runs[3].name}",
    ]
    row, _ = markdown_rows(text, "Commands")  # and one for the run without a journal
    assert row["command"] == "`python variants/ppo.py --seed SEED --note 'a b'`"
    assert row["commit"] == "abababa, cdcdcdc+"
    commits = [row["commit"] for row in csv.DictReader((tmp_path / "x" / "scores.csv").open())]
    assert commits == ["abababa", "abababa", "cdcdcdc+", "abababa, cdcdcdc+", ""]


def test_a_budget_that_grew_is_in_the_command(tmp_path: Path) -> None:
    """Beside the first command, which alone would be another experiment: its annealed learning rates differ."""
    start: dict[str, Any] = {"command": ["/bin/python", "/x/ppo.py", "--total-timesteps", "200"]}
    more = [{"command": ["/bin/python", "/x/ppo.py", "--resume", "x", "--total-timesteps", str(n)]} for n in (300, 400)]
    folder = write_journal(write_run(tmp_path / "runs", "Toy-v1", "ppo", 1, [1.0]), start, *more)
    (run,) = read_all([folder])
    assert run.command == "python ppo.py --total-timesteps 200, then --resume RUN --total-timesteps 400"


def test_a_run_killed_before_it_began_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder is empty; the others' report is made."""
    run, empty = write_run(tmp_path, "Toy-v1", "ppo", 1, [1.0]), tmp_path / "Toy-v1__ppo__2__77"
    empty.mkdir()
    main(Args(runs=[empty, run], output=tmp_path / "x"))
    assert f"- Left out, killed before it began: {empty.name}.\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_reader_that_goes_away_costs_no_file(tmp_path: Path) -> None:
    """As `head` does."""
    run = write_run(tmp_path, "Toy-v1", "ppo", 1, [1.0])
    words = [sys.executable, "-m", "benchmark.report", str(run), "--output", str(tmp_path / "x")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[1])
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 0)
    assert (tmp_path / "x" / "time.png").exists()


def test_curves_meet_between_points(tmp_path: Path) -> None:
    """On the steps that all runs have gone: values are interpolated, and times are medians."""
    for seed, steps in ((1, [10, 30, 40]), (2, [20, 40, 50]), (9, [20, 50])):
        points = [(seed * step, step, "eval/return_mean", 100.0 * seed + step) for step in steps]
        write_events(tmp_path / str(seed) / "events.out.tfevents.1", 0.0, points)
    runs = [Run(tmp_path / s, "Toy-v1", "ppo", int(s), 1, "finished", read_curves(tmp_path / s), {}) for s in "129"]
    common_steps, seconds, values = common_points(runs, "eval/return_mean")
    np.testing.assert_allclose(common_steps, [20, 30, 40])
    np.testing.assert_allclose(seconds, [40, 60, 80])  # the second run's: the third one takes far more
    np.testing.assert_allclose(values, [[120, 220, 920], [130, 230, 930], [140, 240, 940]])
    np.testing.assert_allclose(common_points(runs, "eval/return_mean", size=2)[0], [20, 40])


# === Report ===========================================================================================================


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two experiments on two tasks, five and six seeds; the last evaluation is not the best one."""
    folders = []
    for exp_name, scores in (("ppo", OURS), ("sac", THEIRS)):
        for seed, row in enumerate(scores):
            for env_id, score in zip(("Hopper-v5", "Toy-v1"), 1000.0 * row, strict=False):
                folders.append(write_run(tmp_path / "runs", env_id, exp_name, seed, [score / 2, 9999.0, score]))
    return folders


def test_report(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tables against scipy and rliable's numbers, the raw ones beside them, and the same again."""
    main(Args(runs=folders, output=tmp_path / "both", normalize_by="sac"))
    text = capsys.readouterr().out
    page = (tmp_path / "both" / "README.md").read_text()
    assert page == f"# both\n\n![Curves](steps.png)\n\n<!-- report -->\n\n{text}\n<!-- end of report -->\n"
    figures = {f"{name}.png" for name in ("steps", "time", "intervals", "improvement", "profiles")}
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"README.md", "scores.csv", "curves.csv"} | figures

    first, *_ = rows = markdown_rows(text, "Final scores")
    assert [(row["task"], row["experiment"], row["seeds"], row["steps"]) for row in rows] == [
        (env_id, name, seeds, "1,000")
        for env_id in ("Hopper-v5", "Toy-v1")
        for name, seeds in (("ppo", "5"), ("sac", "6"))
    ]
    assert first["score"] == "return"
    scores = 1000.0 * OURS[:, 0]
    interval = scipy.stats.ttest_1samp(scores, 0.0).confidence_interval(0.95)
    assert numbers(first["mean [95%]"]) == pytest.approx([scores.mean(), interval.low, interval.high], abs=0.5)
    assert numbers(first["IQM"]) == pytest.approx([scores[[1, 3, 0]].mean()], abs=0.05)
    # Evaluations are at 333, 666 and 1,000 steps. The second one, 9,999, is the best, and the last one is lower.
    assert first["late collapses"] == f"{len(OURS)} of {2 * len(OURS)}"
    assert "Published returns of Hopper-v5, with their protocols: [published_returns.csv](" in text

    iqms = scipy.stats.trim_mean(THEIRS[:, :2], 0.25, axis=0)  # the scale's 1; its 0 is the random policy
    pooled = {row["experiment"]: row["normalised IQM [95%]"] for row in markdown_rows(text, "All tasks together")}
    for name, scores in (("ppo", OURS), ("sac", THEIRS)):
        assert float(pooled[name].split()[0]) == pytest.approx(
            scipy.stats.trim_mean(scores[:, :2] / iqms, 0.25, axis=None), abs=6e-4
        )

    differences = {row["experiment"]: row["minus sac [95%]"] for row in markdown_rows(text, "All tasks together")}
    assert differences["sac"] == ""
    distance, low, high = map(float, re.findall(r"-?\d+\.\d+", differences["ppo"]))
    assert distance == pytest.approx(float(pooled["ppo"].split()[0]) - float(pooled["sac"].split()[0]), abs=2e-3)
    assert low < distance < high

    uneven = "The number of runs differs between tasks"
    assert uneven not in text
    main(Args(runs=folders[1:], output=tmp_path / "uneven", normalize_by="sac"))
    assert uneven in capsys.readouterr().out

    (improvement,) = markdown_rows(text, "Probability of improvement")
    p, low, high = probability_of_improvement(list(OURS.T[:2]), list(THEIRS.T[:2]))
    cells = [f"{x:.3f} [{a:.3f}, {b:.3f}]" for x, a, b in ((p, low, high), (1 - p, 1 - high, 1 - low))]
    assert list(improvement.values()) == ["ppo (1,000 steps)", "sac (1,000 steps)", "2", *cells]

    finals = list(csv.DictReader((tmp_path / "both" / "scores.csv").open()))
    assert len(finals) == len(folders) == 22
    assert {row["step"] for row in finals} == {"1000"}
    assert {row["folder"]: float(row["value"]) for row in finals} == pytest.approx(
        {
            f"{env_id}__{name}__{seed}": 1000.0 * score
            for name, scores in (("ppo", OURS), ("sac", THEIRS))
            for seed, row in enumerate(scores)
            for env_id, score in zip(("Hopper-v5", "Toy-v1"), row, strict=False)
        }
    )
    main(Args(runs=folders[::-1], output=tmp_path / "again", normalize_by="sac"))
    assert capsys.readouterr().out == text


def test_curves(folders: list[Path]) -> None:
    """The mean over runs, its band around it, against steps and minutes; all tasks together end at the pooled IQM."""
    groups = grouped(folders)
    scales, _ = find_scales(groups, "sac")
    hopper, toy, pooled = draw(groups, scales, over_time=False).axes
    final = 1000.0 * OURS[:, 0]
    means = [final.mean() / 2, 9999.0, final.mean()]
    np.testing.assert_allclose(xy(hopper.get_lines()[0]), np.transpose([[333, 666, 1000], means]), rtol=1e-6)
    band = np.asarray(hopper.collections[0].get_paths()[0].vertices)
    assert sorted(set(band[band[:, 0] == 1000, 1])) == pytest.approx(student_interval(final))
    assert (hopper.get_title(), toy.get_title(), pooled.get_title()) == ("Hopper-v5", "Toy-v1", "2 tasks together")
    iqms = scipy.stats.trim_mean(THEIRS[:, :2], 0.25, axis=0)
    expected = [scipy.stats.trim_mean(scores[:, :2] / iqms, 0.25, axis=None) for scores in (OURS, THEIRS)]
    assert [xy(line)[-1, 1] for line in pooled.get_lines()] == pytest.approx(expected)
    assert [line.get_label() for line in pooled.get_lines()] == ["ppo", "sac"]

    for group in (groups["Toy-v1", "ppo"], groups["Toy-v1", "sac"]):
        for run in group:
            run.curves["eval/return_mean"][:, 1] *= 2
    hopper, _, pooled = draw(groups, scales, over_time=True).axes
    np.testing.assert_allclose(xy(hopper.get_lines()[0]), np.transpose([[0.333, 0.666, 1.0], means]), rtol=1e-6)
    for line, at_end in zip(pooled.get_lines(), expected, strict=True):  # Hopper stays where it ended after a minute
        np.testing.assert_allclose(xy(line)[[0, -1], 0], [0.666, 2.0], rtol=1e-6)
        assert xy(line)[-1, 1] == pytest.approx(at_end)


def test_a_dozen_experiments_can_be_told_apart(tmp_path: Path) -> None:
    """Each has a colour and line of its own, and the one legend stands below the panels and names the band."""
    folders = [
        write_run(tmp_path, task, f"ppo_{i:02}", 1, [0.0, 1.0, 2.0 + i]) for i in range(12) for task in ("A-v1", "B-v1")
    ]
    figure = draw(grouped(folders), {}, over_time=False)
    figure.draw_without_rendering()
    for axes in figure.axes[:2]:
        looks = {(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}
        assert len(looks) == len(axes.get_lines()) == 12
        assert axes.get_legend() is None
        assert axes.get_xlim()[0] == 0.0
        assert axes.get_ylim()[0] <= 0.0
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [f"ppo_{i:02}" for i in range(12)]
    assert legend.get_title().get_text() == "mean over seeds; band: 95% Student's t interval"
    assert legend.get_window_extent().y1 < min(axes.get_window_extent().y0 for axes in figure.axes)


def test_returns_are_shown_with_their_origin(tmp_path: Path) -> None:
    """Zero is in the panel of a task and in that of all tasks, also where all returns are far above or below it."""
    for sign in (1, -1):
        values = [1000.0 * sign, 1100.0 * sign, 1200.0 * sign]
        folders = [write_run(tmp_path / str(sign), f"{task}-v1", "ppo", 1, values) for task in "AB"]
        for axes in draw(grouped(folders), {"A-v1": (0.0, 10.0), "B-v1": (0.0, 10.0)}, over_time=False).axes:
            low, high = axes.get_ylim()
            assert low < 0 < high
            assert axes.get_xlim()[0] == 0


def test_an_infinite_return_costs_no_figure(tmp_path: Path) -> None:
    """The panel is as high as the finite ones."""
    run = write_run(tmp_path, "A-v1", "ppo", 1, [1.0, float("inf"), 3.0])
    low, high = draw(grouped([run]), {}, over_time=False).axes[0].get_ylim()
    assert -1 < low < 0 < 3 < high < 4


def test_a_band_that_is_cut_is_named(tmp_path: Path) -> None:
    """The panel is as high as the curves of the runs; a title says where the band of two of them goes beyond it."""
    returns = {
        ("A-v1", 1): [1.0, 2.0, 3.0],
        ("A-v1", 2): [1.0, 2.0, 4.0],
        ("module:B-v1", 1): [5.0] * 3,
        ("module:B-v1", 2): [5.0] * 3,
    }
    groups = grouped(write_run(tmp_path, task, "ppo", seed, own) for (task, seed), own in returns.items())
    panels = [axes for axes in draw(groups, {}, over_time=False).axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["A-v1\n(band cut at the edge)", "B-v1"]


def test_a_dozen_experiments_with_few_evaluations_can_be_told_apart(tmp_path: Path) -> None:
    """Their dots have a colour and a marker of their own."""
    groups = grouped(write_run(tmp_path, "Toy-v1", f"ppo_{i:02}", 1, [float(i)]) for i in range(12))
    lines = draw(groups, {}, over_time=False).axes[0].get_lines()
    dots = [line for line in lines if line.get_linestyle() == "None"]
    assert len({(line.get_color(), line.get_marker()) for line in dots}) == len(dots) == 12


def test_few_evaluations_are_dots_over_training_returns(tmp_path: Path) -> None:
    """One dot a run and evaluation, and the mean of the training returns as a thin line."""
    folders = [write_run(tmp_path, "Toy-v1", "ppo", seed, [100.0, 200.0 + seed]) for seed in range(3)]
    groups = grouped(folders)
    (axes,) = (axes for axes in draw(groups, {}, over_time=False).axes if axes.get_title())
    dots, training = axes.get_lines()
    assert sorted(xy(dots).tolist()) == [[500, 100]] * 3 + [[1000, 200], [1000, 201], [1000, 202]]
    assert dots.get_label() == "ppo, single runs"
    assert (dots.get_linestyle(), training.get_linewidth() < 1) == ("None", True)
    np.testing.assert_allclose(xy(training), [[1, 0], [500, 90], [1000, 191]])


@pytest.mark.slow
def test_scale_takes_tasks_that_were_learned_and_all_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero is the random policy, and not the first training return; a task that is left out is named."""
    returns = {"A-v1": 2.0, "B-v1": -3.0, "D-v1": -9.0}
    monkeypatch.setattr(runs_module, "random_return", lambda env_id, env_kwargs: returns[env_id])
    runs = [
        write_run(tmp_path, f"{x}-v1", "ppo", 1, [y]) for x, y in (("A", 4.0), ("B", -4.0), ("C", 4.0), ("D", -8.0))
    ]
    runs += [write_run(tmp_path, env_id, "sac", 1, [3.0]) for env_id in ("A-v1", "B-v1", "D-v1")]
    assert find_scales(grouped(runs), "ppo")[0] == {"A-v1": (2.0, 4.0), "D-v1": (-9.0, -8.0)}
    main(Args(runs=runs, output=tmp_path / "x", normalize_by="ppo"))
    text = capsys.readouterr().out
    pooled = [row["normalised IQM [95%]"] for row in markdown_rows(text, "All tasks together")]
    assert pooled == ["1.000", "6.250"]  # a half and twelve
    assert "Not in the pooled score: B-v1 (ppo is not better than the random policy)." in text
    assert "Not in the pooled score: C-v1 (not all experiments have it)." in text


@pytest.mark.slow
def test_random_policy_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file has what is measured again here; a task that is not in it is measured when it is needed."""
    assert random_policy_module.measure("Pendulum-v1").mean() == pytest.approx(random_return("Pendulum-v1"), rel=1e-3)
    few = random_policy_module.measure("Pendulum-v1", 20).mean()
    monkeypatch.setattr(random_policy_module, "RETURNS", tmp_path / "returns.csv")
    (tmp_path / "returns.csv").write_text("task,mean\n")
    assert random_return("Pendulum-v1") == few
    random_policy_module.main(["Pendulum-v1"])
    assert random_return("Pendulum-v1") == pytest.approx(-1207.6)
    assert random_return("Pendulum-v1", '{"max_episode_steps": 1}') > -17.0  # the lowest reward of a step is -16.3


# === Runs without a result ============================================================================================


def end_with(run: Path, status: int, *extra: str) -> Path:
    """Gives a run of a sweep the journal of one that ended with this status."""
    name = run.name.split("__")
    flags = ["--env-id", name[0], "--exp-name", name[1], "--seed", name[2], *extra]
    journal = run.parents[1] / "jobs" / f"{run.name}.jsonl"
    journal.parent.mkdir(exist_ok=True)
    start = {"command": ["/bin/python", "/x/ppo.py", *flags], "sha256": "11" * 32, "commit": None, "dirty": None}
    end = start | {"exit": status, "run": f"runs/{run.name}__5", "device": "cpu"}
    journal.write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n")
    return run.rename(f"{run}__5")


def test_failed_runs_are_shown_and_count_as_the_worst(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that ended in NaN, one that crashed halfway, one that crashed before it had a folder; one is still to go
    on.
    """
    root = tmp_path / "runs"
    runs = [write_run(root, "Toy-v1", "ppo", seed, [1.0, 2.0, 100.0 + seed]) for seed in range(5)]
    runs += [write_run(root, "Toy-v1", "ppo", 5, [1.0, 500.0, float("nan")])]
    crashed = write_run(root, "Toy-v1", "ppo", 6, [])
    write_events(crashed / "events.out.tfevents.1", 5.0, [(6.0, 333 * i, "eval/return_mean", 900.0) for i in (1, 2)])
    runs += [end_with(crashed, 1)]
    runs += [end_with(write_run(root, "Toy-v1", "ppo", 8, [1.0], total_timesteps=2000), 143)]
    shutil.rmtree(end_with(write_run(root, "Toy-v1", "ppo", 7, []), 1))
    runs += [write_run(root, "Toy-v1", "sac", seed, [9.0, -20.0 - seed]) for seed in range(2)]
    main(Args(runs=runs, output=tmp_path / "x"))
    text = capsys.readouterr().out
    ours, theirs = markdown_rows(text, "Final scores")
    assert ours["seeds"] == "8, 1 diverged, 2 failed, 1 unfinished, left out"
    assert ours["late collapses"] == "0 of 12"  # two of each finished run, one of each that was cut off before its end
    counted = np.array([100.0, 101.0, 102.0, 103.0, 104.0, -21.0, -21.0, -21.0])  # the worst of both experiments
    assert numbers(ours["mean [95%]"])[0] == pytest.approx(counted.mean(), abs=0.01)
    assert numbers(ours["IQM"])[0] == pytest.approx((100 + 101 + 102 - 21) / 4, abs=0.01)
    for note in (
        "**Diverged**: Toy-v1__ppo__5 after step 666; counted as -21.00, the worst of the task.",
        "**Failed**: Toy-v1__ppo__6__5 after step 666; counted as -21.00, the worst of the task.",
        "**Failed**: Toy-v1__ppo__7 after step 0; counted as -21.00, the worst of the task.",
        "Left out, not finished: Toy-v1__ppo__8__5 (last evaluation at step 1,000 of 2,000).",
    ):
        assert note in text
    rows = list(csv.DictReader((tmp_path / "x" / "scores.csv").open()))
    states = {int(row["seed"]): (row["value"], row["state"]) for row in rows if row["experiment"] == "ppo"}
    assert states[0] == ("100", "finished")
    assert [states[seed] for seed in (5, 6, 7, 8)] == [
        ("nan", "diverged"), ("nan", "failed"), ("nan", "failed"), ("nan", "unfinished"),
    ]  # fmt: skip
    (improvement,) = markdown_rows(text, "Probability of improvement")
    assert numbers(improvement["P(A beats B) [95%]"])[0] == pytest.approx((5 * 2 + 3 * 0.5) / 16, abs=1e-3)  # a tie

    groups, *_ = group_runs(read_all(runs))
    steps, _, values = common_points(groups["Toy-v1", "ppo"], "eval/return_mean")
    assert values[-1].tolist() == pytest.approx([100, 101, 102, 103, 104, -21, -21])


def test_a_run_that_failed_without_a_folder_is_of_the_task_of_its_command(tmp_path: Path) -> None:
    """With its --env-kwargs, in whatever spelling, its budget and its device."""
    flags: dict[str, Any] = {"env_kwargs": '{"a": 1, "b": 2}', "cuda": False}
    runs = [write_run(tmp_path / "runs", "Toy-v1", "ppo", seed, [1.0], **flags) for seed in (2, 3)]
    lost = write_run(tmp_path / "runs", "Toy-v1", "ppo", 1, [])
    shutil.rmtree(end_with(lost, 1, '--env-kwargs={"b":2,"a":1}', "--no-cuda", "--total-timesteps", "1000"))
    groups, _, notes = group_runs(runs_module.read_all(runs)[0])
    failed, *_ = groups["Toy-v1", "ppo"]
    assert (failed.env_kwargs, failed.total_timesteps, failed.device) == ('{"b":2,"a":1}', 1000, "cpu")
    assert [note.partition(":")[0] for note in notes] == ["**Failed**"]


def test_an_experiment_without_any_folder_is_named(tmp_path: Path) -> None:
    """All its runs on a task failed before they had one."""
    runs = [write_run(tmp_path / "runs", "Toy-v1", name, 1, [1.0]) for name in ("ppo", "sac")]
    for seed in (1, 2):
        shutil.rmtree(end_with(write_run(tmp_path / "runs", "Toy-v2", "sac", seed, []), 1))
    shutil.rmtree(end_with(write_run(tmp_path / "runs", "Toy-v3", "sac", 1, []), 143))
    _, notes = runs_module.read_all(runs)
    assert notes == ["**Left out**: sac on Toy-v2, whose runs failed before they had a folder (2)."]


def test_a_folder_that_a_later_one_replaces_is_not_judged_by_its_journal(tmp_path: Path) -> None:
    """The later one crashed: it counts, and the older one is left out by name."""
    runs = [write_run(tmp_path / "runs", "Toy-v1", "ppo", seed, [1.0]) for seed in (1, 2)]
    older = write_run(tmp_path / "runs", "Toy-v1", "ppo", 3, [1.0], total_timesteps=2000)
    older = older.rename(f"{older}__4")
    runs += [older, end_with(write_run(tmp_path / "runs", "Toy-v1", "ppo", 3, [0.5], total_timesteps=2000), 1)]
    read, notes = runs_module.read_all(runs)
    assert notes == ["Left out, begun again in another folder: Toy-v1__ppo__3__4."]
    assert [run.state for run in read] == ["finished", "finished", "failed"]


def test_a_failed_run_keeps_the_budget_of_its_experiment(tmp_path: Path) -> None:
    """Others on the task may have run longer; unequal budgets are told, also within an experiment and of a study."""
    short = [write_run(tmp_path / "runs", "Toy-v1", "short", 1, [3.0], total_timesteps=300)]
    write_events(short[0] / "events.out.tfevents.1", 5.0, [(6.0, 300, "eval/return_mean", 3.0)])
    short.append(end_with(write_run(tmp_path / "runs", "Toy-v1", "short", 2, [], total_timesteps=300), 1))
    long = [write_run(tmp_path / "runs", "Toy-v1", "long", 1, [1.0, 2.0])]
    note = "**Unequal budgets**: runs on Toy-v1 have from 300 to 1,000 steps."
    groups, _, notes = group_runs(read_all(short + long))
    assert last_step(groups["Toy-v1", "short"]) == 300
    assert note in notes
    (long[0] / "args.json").write_text(
        (long[0] / "args.json").read_text().replace('"long", "seed": 1', '"short", "seed": 3')
    )
    main(Args(runs=[*short[:1], *long], output=tmp_path / "study"))
    assert note in (tmp_path / "study" / "README.md").read_text()
    assert note in group_runs(runs_module.read_study(tmp_path / "study"))[2]


def test_a_seed_that_was_begun_again_counts_once(tmp_path: Path) -> None:
    """A study has the same score as the runs that it was made of, one of which was stopped and begun again."""
    runs = [write_run(tmp_path, "Toy-v1", "ppo", 1, [5.0, 7.0])]
    runs.append(write_run(tmp_path / "stopped", "Toy-v1", "ppo", 1, [1.0], total_timesteps=2000))
    main(Args(runs=runs, output=tmp_path / "study"))
    (run,) = runs_module.read_study(tmp_path / "study")
    assert run.curves["eval/return_mean"][:, 2].tolist() == [5.0, 7.0]


def test_other_tasks_and_other_tables_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs with other --env-kwargs are of another task; a scores.csv that no report wrote is refused."""
    easy = write_run(tmp_path, "Toy-v1", "ppo", 1, [1.0], env_kwargs='{"easy": true}')
    notes = group_runs(read_all([easy, write_run(tmp_path, "Toy-v1", "sac", 1, [1.0], env_kwargs="{}")]))[2]
    assert '**Not one task**: --env-kwargs of the runs on Toy-v1 are {"easy": true} and {}.' in notes
    (tmp_path / "scores.csv").write_text("experiment,score\na,1\n")
    with pytest.raises(SystemExit, match="2"):
        runs_module.read_study(tmp_path)
    assert capsys.readouterr().err.startswith("error: RUNS takes folders that a report wrote, and the scores.csv of")


def test_a_study_knows_the_arguments_of_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random policy that a scale begins with, and a failed run is counted as, plays the task of the runs."""
    asked = list[str]()

    def measure(env_id: str, env_kwargs: str) -> float:
        asked.append(env_kwargs)
        return -9.0

    monkeypatch.setattr("benchmark.runs.random_return", measure)
    flags = {"env_kwargs": '{"length": 5}'}
    runs = [write_run(tmp_path / "runs", "Toy-v1", "ppo", seed, [1.0, 2.0 + seed], **flags) for seed in range(2)]
    main(Args(runs=runs, output=tmp_path / "x", normalize_by="ppo"))
    main(Args(runs=[tmp_path / "x"], output=tmp_path / "y", normalize_by="ppo"))
    assert set(asked) == {flags["env_kwargs"]}
    assert (tmp_path / "x" / "scores.csv").read_text() == (tmp_path / "y" / "scores.csv").read_text()


def test_a_task_that_raises_costs_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of it may have failed for this reason."""
    monkeypatch.setattr("benchmark.runs.random_return", Mock(side_effect=FileNotFoundError("model.xml")))
    root = tmp_path / "runs"
    runs = [write_run(root, "Toy-v1", "ppo", 1, [1.0, 2.0]), end_with(write_run(root, "Toy-v1", "ppo", 2, [1.0]), 1)]
    main(Args(runs=runs, output=tmp_path / "x", normalize_by="ppo"))
    note = "Not in the pooled score: Toy-v1 (the random policy cannot be measured: model.xml)."
    assert note in (tmp_path / "x" / "README.md").read_text()


def test_a_random_policy_may_be_the_worst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all runs that finished are better; scores in games, of 0 to 1, have 0 as their worst."""
    monkeypatch.setattr(runs_module, "random_return", lambda env_id, env_kwargs: -7.0)
    runs = [
        write_run(tmp_path, "Toy-v1", "ppo", 1, [3.0, 4.0]),
        write_run(tmp_path, "Toy-v1", "ppo", 2, [float("nan")]),
    ]
    (group,) = grouped(runs).values()
    assert [run.curves["eval/return_mean"][-1, 2] for run in group] == [4.0, -7.0]


def test_a_failed_run_of_self_play_counts_as_zero(tmp_path: Path) -> None:
    """Which is to lose all games, and less than what the worst of the others scored."""
    runs = [write_run(tmp_path / "runs", "sumo", "ppo", seed, []) for seed in (1, 2)]
    for run, step in zip(runs, (1000, 500), strict=True):
        write_events(run / "events.out.tfevents.1", 5.0, [(6.0, step, "eval/sumo_score_vs_random", 0.75)])
    runs = [end_with(run, status) for run, status in zip(runs, (0, 1), strict=True)]
    groups, _, notes = group_runs(read_all(runs))
    ends = [run.curves["eval/sumo_score_vs_random"][-1, 2] for run in groups["sumo", "ppo"]]
    assert ends == [0.75, 0.0]
    assert f"**Failed**: {runs[1].name} after step 500; counted as 0.000, the worst of the task." in notes


def test_evaluations_that_do_not_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report is made: these runs are drawn one by one."""
    for seed, step in ((1, 400), (2, 900)):
        folder = write_run(tmp_path, "Toy-v1", "ppo", seed, [], total_timesteps=step)
        points = [(1.0, step - 2 * i, "eval/return_mean", float(i)) for i in (2, 1, 0)]
        write_events(folder / "events.out.tfevents.1", 0.0, points)
    runs = [tmp_path / f"Toy-v1__ppo__{seed}" for seed in (1, 2)]
    runs += [write_run(tmp_path, "Toy-v1", "sac", seed, [1.0, 2.0, 3.0]) for seed in (1, 2)]
    main(Args(runs=runs, output=tmp_path / "x", normalize_by="sac"))
    assert "Traceback" not in capsys.readouterr().err
    lines = draw(grouped(runs), {}, over_time=False).axes[0].get_lines()
    assert [xy(line)[-1, 0] for line in lines] == [400, 900, 1000]


def test_devices_are_not_mixed_in_silence(tmp_path: Path) -> None:
    """The journal has the devices that a run had; without one, --no-cuda tells. Runs count of all tasks and experiments
    that the report compares, and so do runs that were resumed on another device.
    """

    def notes(*runs: Path) -> list[str]:
        return [note for note in group_runs(read_all(runs))[2] if "Devices" in note]

    def on(device: str, task: str, exp_name: str, seed: int) -> Path:
        starts = [{"command": ["p", "a", "--resume"][: 2 + i], "device": x} for i, x in enumerate(device.split())]
        return write_journal(write_run(tmp_path / "runs", task, exp_name, seed, [1.0]), *starts)

    cpu = [write_run(tmp_path / "runs", "Toy-v1", "ppo", seed, [1.0], cuda=False) for seed in (2, 3)]
    assert notes(*cpu) == []
    cuda = on("cuda", "Toy-v1", "ppo", 1)
    assert notes(cuda, *cpu) == ["**Devices mixed**: ppo: 1 on cuda, 2 on cpu."]
    assert notes(on("cuda", "Other-v1", "ppo", 1), *cpu) == ["**Devices mixed**: ppo: 1 on cuda, 2 on cpu."]
    assert notes(on("cuda", "Toy-v1", "sac", 1), *cpu) == ["**Devices mixed**: ppo: 2 on cpu; sac: 1 on cuda."]
    resumed = on("cpu cuda", "Toy-v1", "ppo", 4)
    assert notes(resumed) == ["**Devices mixed**: ppo: 1 on cpu, then cuda."]


def test_threads_and_versions_are_not_mixed_in_silence(tmp_path: Path) -> None:
    """Where they are known; a study keeps them."""

    def run(seed: int, threads: str, torch: str) -> Path:
        start = {"command": ["p", "a"], "threads": threads, "versions": {"torch": torch, "gymnasium": "1"}}
        return write_journal(write_run(tmp_path / "runs", "Toy-v1", "ppo", seed, [1.0]), start)

    runs = [run(1, "1", "2.12"), run(2, "1", "2.13"), run(3, "16", "2.13")]
    runs.append(write_run(tmp_path / "runs", "Toy-v1", "ppo", 4, [1.0]))
    threads = "**Threads mixed**: ppo: 2 with 1, 1 with 16."
    versions = "**Versions mixed**: ppo: 1 with torch 2.12, gymnasium 1, 2 with torch 2.13, gymnasium 1."
    main(Args(runs=runs, output=tmp_path / "study"))
    for read in (read_all(runs), runs_module.read_study(tmp_path / "study")):
        assert group_runs(read)[2] == [threads, versions]
    assert group_runs(read_all(runs[1:2] + runs[3:]))[2] == []
    main(Args(runs=runs[1:2], output=tmp_path / "one"))
    note = "- Threads of a run (OMP_NUM_THREADS): 1. Versions: torch 2.13, gymnasium 1.\n"
    assert note in (tmp_path / "one" / "README.md").read_text()


def test_a_run_that_was_stopped_is_told(tmp_path: Path) -> None:
    """A stop adds a reset, which a kill does not. The command tells it, also in a study."""
    start, end = {"command": ["/bin/python", "/x/ppo.py"]}, {"command": ["p"], "device": "cpu"}
    resumed = {"command": ["/bin/python", "/x/ppo.py", "--resume", "x"]}
    runs = []
    for seed, status in enumerate((130, 137)):
        folder = write_run(tmp_path / "runs", "Toy-v1", "ppo", seed, [1.0])
        runs.append(write_journal(folder, start, end | {"exit": status}, resumed))
    assert [run.command for run in read_all(runs)] == ["python ppo.py, stopped and resumed", "python ppo.py"]
    main(Args(runs=runs, output=tmp_path / "study"))
    note = "**Stopped by a signal and resumed**: ppo (1). An uninterrupted run has other numbers."
    assert group_runs(runs_module.read_study(tmp_path / "study"))[2] == [note]


def test_a_sweep_is_all_its_runs(tmp_path: Path) -> None:
    """Also of an experiment whose runs all failed before they had a folder: they count as the worst."""
    for seed in (1, 2):
        end_with(write_run(tmp_path / "good" / "runs", "Toy-v1", "sac", seed, [1.0 + seed]), 0)
        shutil.rmtree(end_with(write_run(tmp_path / "bad" / "runs", "Toy-v1", "ppo", seed, []), 1))
    read, notes = runs_module.read_all([tmp_path / "good", tmp_path / "bad"])
    groups, _, more = group_runs(read)
    assert {name: final_scores(group, "eval/return_mean").tolist() for name, group in groups.items()} == {
        ("Toy-v1", "ppo"): [0.0, 0.0],  # the random policy's
        ("Toy-v1", "sac"): [2.0, 3.0],
    }
    assert notes == []
    assert [note.partition(":")[0] for note in more] == ["**Failed**"] * 2


def test_planned_runs_that_never_began_are_named(tmp_path: Path) -> None:
    """Those of a sweep that was cut short, and one whose journal is empty, because the disk was full."""
    end_with(write_run(tmp_path / "runs", "Toy-v1", "sac", 1, [1.0]), 0)
    commands = [f"python sac.py --env-id Toy-v1 --exp-name sac --seed {seed} --env-kwargs '{{}}'" for seed in (1, 2, 3)]
    (tmp_path / "manifest.json").write_text(json.dumps([{"runs": commands[:2]}, {"runs": commands}]))
    (tmp_path / "jobs" / "Toy-v1__sac__3.jsonl").touch()
    read, notes = runs_module.read_all([tmp_path])
    assert [run.seed for run in read] == [1]
    assert notes == ["Left out, never begun: Toy-v1__sac__2, Toy-v1__sac__3 (2)."]


def test_each_run_has_its_own_second_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of 1,000 steps with one late evaluation of two, and one of 300 with two of three."""
    runs = [
        write_run(tmp_path, "Toy-v1", "ppo", 1, [9.0, 1.0]),
        write_run(tmp_path, "Toy-v1", "ppo", 2, [9.0], total_timesteps=300),
        write_run(tmp_path, "Toy-v1", "sac", 1, [9.0, 9.0]),
    ]
    points = [(float(step), step, "eval/return_mean", x) for step, x in ((100, 9.0), (200, 1.0), (300, 2.0))]
    write_events(runs[1] / "events.out.tfevents.1", 0.0, points)
    main(Args(runs=runs, output=tmp_path / "x"))
    text = capsys.readouterr().out
    assert markdown_rows(text, "Final scores")[0]["late collapses"] == "3 of 3"
    (row,) = markdown_rows(text, "Probability of improvement")
    assert (row["A"], row["B"]) == ("ppo (300 to 1,000 steps)", "sac (1,000 steps)")
    assert row["P(A beats B) [95%]"] == "0.000"  # no interval with a single run of B


def test_commands_have_their_tasks_and_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tasks with the same seeds share a row."""
    runs = []
    for task, seed in (("A-v1", 1), ("A-v1", 2), ("A-v1", 3), ("B-v1", 1), ("B-v1", 2), ("B-v1", 3), ("C-v1", 2)):
        command = ["/bin/python", "/x/ppo.py", "--env-id", task, "--seed", str(seed)]
        runs.append(write_journal(write_run(tmp_path / "runs", task, "ppo", seed, [1.0]), {"command": command}))
    main(Args(runs=runs, output=tmp_path / "x"))
    first, second = markdown_rows(capsys.readouterr().out, "Commands")
    assert (first["tasks"], first["seeds"]) == ("A-v1, B-v1", "1 to 3")
    assert (second["tasks"], second["seeds"]) == ("C-v1", "2")
    assert first["command"] == second["command"] == "`python ppo.py --env-id TASK --seed SEED`"


# === Page and figures =================================================================================================


@pytest.mark.parametrize(
    ("x", "text"),
    [(0.0, "0.000"), (-0.00061, "-0.00061"), (0.5, "0.500"), (999.96, "1,000"), (99.996, "100.0")]
    + [
        (1234.5, "1,234"),
        (12.3456, "12.35"),
        (float("nan"), "nan"),
        (-0.0004, "-0.0004"),
        (0.0081, "0.008"),
        (123456.0, "123,456"),
    ],
)
def test_numbers_have_four_digits(x: float, text: str) -> None:
    assert describe_number(x) == text


def test_a_disk_that_is_full_costs_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence; what stood on the page is still there. Figures of an earlier report with other flags go."""
    runs = [write_run(tmp_path / "runs", "Toy-v1", name, 1, [2.0]) for name in ("ppo", "sac")]
    study = tmp_path / "study"
    main(Args(runs=runs, output=study, normalize_by="sac", formats=("png", "pdf")))
    assert {"profiles.png", "steps.pdf"} < {path.name for path in study.iterdir()}
    main(Args(runs=runs[:1], output=study))
    assert {path.name for path in study.glob("*.p*")} == {"steps.png", "time.png", "intervals.png"}
    page = (study / "README.md").read_text()
    (study / "steps.png").unlink()
    (study / "steps.png").mkdir()
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main(Args(runs=runs, output=study))
    assert capsys.readouterr().err.startswith("error: --output takes a folder that can be written to: ")
    assert (study / "README.md").read_text() == page


def test_a_disk_that_is_full_costs_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study's scores.csv may be the only copy. Nothing else is left behind."""
    path = tmp_path / "scores.csv"
    write_csv(path, ["task"], [["Toy-v1"]])

    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_csv(path, ["task"], [["Other-v1"]])
    assert path.read_text() == "task\nToy-v1\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_without_its_last_marker_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody knows where the report ends and the user's text begins."""
    run, page = write_run(tmp_path / "runs", "Toy-v1", "ppo", 1, [2.0]), tmp_path / "study" / "README.md"
    page.parent.mkdir()
    page.write_text("<!-- report -->\nold\n\nMy text.\n")
    with pytest.raises(SystemExit, match="2"):
        main(Args(runs=[run], output=page.parent))
    assert capsys.readouterr().err.startswith("error: --output takes a page with the line <!-- end of report -->")
    assert page.read_text().endswith("My text.\n")


def test_published_curves_end_where_ours_do() -> None:
    """With the first published point behind the last of ours."""
    rows = [{"algorithm": "a", "env_steps": str(step)} for step in (300, 20, 100, 1000)]
    rows += [{"algorithm": "b", "env_steps": str(step)} for step in (50, 500)]
    found = [[len(curve) for curve in in_reach(rows, last)] for last in (6, 20, 21, 300, 999, 2000)]
    assert found == [[1, 1], [1, 1], [2, 1], [3, 2], [4, 2], [4, 2]]
    assert [row["env_steps"] for row in in_reach(rows, 2000)[0]] == ["20", "100", "300", "1000"]


@pytest.mark.slow
def test_a_page_keeps_its_text_and_a_study_makes_its_report_again(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what stands between the marker lines is replaced; the CSV files are the runs."""
    study, page = tmp_path / "study", tmp_path / "study" / "README.md"
    study.mkdir()
    page.write_text("# A title\n\nBefore.\n\n<!-- report -->\nold\n<!-- end of report -->\n\nAfter.\n")
    folders.append(write_run(tmp_path / "runs", "Toy-v1", "ppo", 77, [1.0, 5.0, float("nan")]))
    folders.append(write_run(tmp_path / "runs", "Toy-v1", "ppo", 78, [1.0], total_timesteps=2000))
    main(Args(runs=folders, output=study))
    text = capsys.readouterr().out
    expected = f"# A title\n\nBefore.\n\n<!-- report -->\n\n{text}\n<!-- end of report -->\n\nAfter.\n"
    assert page.read_text() == expected
    files = {name: (study / name).read_text() for name in ("scores.csv", "curves.csv")}
    main(Args(runs=[study], output=study))
    again = capsys.readouterr().out
    assert markdown_rows(again, "Final scores") == markdown_rows(text, "Final scores")
    assert {name: (study / name).read_text() for name in files} == files
    assert page.read_text().count("<!-- report -->") == 1


@pytest.mark.slow
def test_labels_formats_and_smoothing(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Labels stand in figures, in their order; each figure has all formats; a curve is its moving average."""
    labels = ("sac=Soft actor-critic", "ppo=PPO, defaults")
    args = Args(
        runs=folders, output=tmp_path / "x", labels=labels, formats=("pdf", "svg"), smooth=3, normalize_by="sac"
    )
    main(args)
    names = {path.name for path in (tmp_path / "x").glob("*.*") if path.suffix in (".pdf", ".svg", ".png")}
    page = (tmp_path / "x" / "README.md").read_text()
    assert "- Names in the figures: sac is Soft actor-critic; ppo is PPO, defaults.\n" in page
    flags = "--normalize-by sac --labels 'sac=Soft actor-critic' 'ppo=PPO, defaults' --smooth 3"
    assert f"Made by `python -m benchmark.report RUNS {flags}`." in page
    figures = ("steps", "time", "intervals", "improvement", "profiles")
    assert names == {f"{name}.{ending}" for name in figures for ending in ("pdf", "svg")}
    assert page.splitlines()[2] == "![Curves](steps.pdf)"
    look = make_look(grouped(folders), labels, smooth=3)
    figure = draw(grouped(folders), {}, False, look)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["Soft actor-critic", "PPO, defaults"]
    assert legend.get_title().get_text().endswith("; moving average over 3 evaluations")
    values = np.array([[1.0, 2.0, 6.0, 3.0]]).T
    np.testing.assert_allclose(smoothed(values, 3)[:, 0], [1.5, 3.0, 11 / 3, 4.5])
    np.testing.assert_allclose(smoothed(values, 1), values)
    np.testing.assert_allclose(smoothed(values, 9)[:, 0], [3.0] * 4)
    many = [float(i % 7) for i in range(1000)]
    (group,) = grouped([write_run(tmp_path / "many", "Toy-v1", "ppo", 1, many)]).values()
    steps, _, averages = common_points(group, "eval/return_mean", width=10)
    expected = [np.mean(many[max(0, int(step) - 1 - 5) : int(step) - 1 + 5]) for step in steps]
    np.testing.assert_allclose(averages[:, 0], expected)  # of all evaluations, and not of those that are drawn


def test_intervals_profiles_and_improvements_are_drawn(folders: list[Path]) -> None:
    """Each experiment's estimate and ends; shares of runs above thresholds; both directions of a pair."""
    groups = grouped(folders)
    scales, _ = find_scales(groups, "sac")
    look = make_look(groups)
    hopper, _, pooled, *_ = draw_intervals(groups, scales, look).axes
    bar, dot, *_ = hopper.get_lines()
    final = 1000.0 * OURS[:, 0]
    assert xy(dot)[0] == pytest.approx([final.mean(), 0])
    assert xy(bar)[:, 0] == pytest.approx(student_interval(final))
    assert [label.get_text() for label in pooled.get_yticklabels()] == ["ppo", "sac"]

    profile, *_ = draw_profiles(groups, scales, look).axes[0].get_lines()
    iqms = scipy.stats.trim_mean(THEIRS[:, :2], 0.25, axis=0)
    best, threshold = (OURS[:, :2] / iqms).max(), xy(profile)[-1, 0]
    assert best == pytest.approx(threshold)  # the best run is at the last threshold, and so not above it
    for threshold, share in xy(profile)[:-1:20]:
        assert share == pytest.approx((OURS[:, :2] / iqms > threshold).mean())
    assert xy(profile)[-1, 1] == 0.0
    lines = draw_improvement(improvement_pairs(groups, None), look).axes[0].get_lines()
    probability, low, high = probability_of_improvement(list(OURS.T[:2]), list(THEIRS.T[:2]))
    np.testing.assert_allclose([xy(line)[:, 0].mean() for line in lines[1:4:2]], [probability, 1 - probability])
    np.testing.assert_allclose(xy(lines[0])[:, 0], [low, high])


def test_published_curves_are_drawn_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the panel of their task in whichever version, those that are wanted, with the interval of their seeds."""
    path = tmp_path / "curves.csv"
    header = "algorithm,env,env_version,env_steps,mean,std,seeds,protocol,source\n"
    rows = [
        "sac,Hopper,v4,500,20,3,9,p,Paper",
        "sac,Hopper,v4,250,10,3,9,p,Paper",
        "crossq,Hopper,v4,250,99,,9,p,Paper",
    ]
    path.write_text(header + "\n".join([*rows, "sac,Ant,v4,250,10,3,9,p,Paper"]) + "\n")
    folders = [write_run(tmp_path / "runs", task, "ppo", 1, [1.0, 2.0, 3.0]) for task in ("Hopper-v5", "Toy-v1")]
    published = [row for row in csv.DictReader(path.open()) if row["algorithm"] == "sac"]
    hopper, toy, *_ = draw(grouped(folders), {}, False, published=published).axes
    (container,) = (x for x in hopper.containers if isinstance(x, ErrorbarContainer))
    data, _, (bars,) = container.lines
    assert xy(data).tolist() == [[250, 10], [500, 20]]
    half = scipy.stats.t.ppf(0.975, 8) * 3 / 3  # of nine seeds
    assert bars.get_segments()[0][:, 1] == pytest.approx([10 - half, 10 + half])
    assert container.get_label() == "published: sac (Paper, v4, 9 seeds)"
    assert data.get_zorder() < min(line.get_zorder() for line in hopper.get_lines() if line.get_label() == "ppo")
    assert not toy.containers
    main(Args(runs=folders, output=tmp_path / "x", published=path, published_algorithms=("sac",)))
    no_number = tmp_path / "no_number.csv"
    no_number.write_text(path.read_text().replace(",3,9,", ",n/a,9,"))
    bad: list[tuple[dict[str, Any], str]] = [
        ({"published": tmp_path / "none.csv"}, "--published takes a CSV of the form"),
        ({"published": folders[0] / "args.json"}, "--published takes a CSV of the form"),
        ({"published": path, "published_algorithms": ("td3",)}, "--published-algorithms takes names of"),
        ({"published": no_number}, "--published takes a CSV of the form"),
        ({"runs": [Path("/nonexistent")]}, "RUNS takes run folders with the args.json of a run"),
        ({"labels": ("ppo",)}, "--labels takes NAME=LABEL, not ppo"),
        ({"labels": ("sac=SAC",)}, "--labels takes experiments of these runs (ppo), not sac"),
        ({"smooth": 0}, "--smooth takes an integer from 1, not 0"),
        ({"formats": ()}, "--formats takes one or more"),
    ]
    defaults: dict[str, Any] = {"runs": folders, "output": tmp_path / "x"}
    for overrides, message in bad:
        capsys.readouterr()
        with pytest.raises(SystemExit, match="2"):
            main(Args(**defaults | overrides))
        assert capsys.readouterr().err.startswith(f"error: {message}")


def test_two_papers_are_two_published_curves(tmp_path: Path) -> None:
    """Also where they have the same algorithm: points of two protocols are never joined."""
    row = {"algorithm": "ppo", "env": "Hopper", "env_version": "v4", "std": "", "seeds": "3", "protocol": "p"}
    points = (("A", "100", "1"), ("B", "100", "2"), ("A", "200", "3"))
    published = [row | {"source": source, "env_steps": x, "mean": y} for source, x, y in points]
    folder = write_run(tmp_path, "Hopper-v5", "ppo", 1, [1.0, 2.0, 3.0])
    hopper, *_ = draw(grouped([folder]), {}, False, published=published).axes
    curves = [xy(x.lines[0]).tolist() for x in hopper.containers if isinstance(x, ErrorbarContainer)]
    assert curves == [[[100, 1], [200, 3]], [[100, 2]]]


def test_the_published_files_are_whole() -> None:
    """Each row has its protocol and source; the report reads the curves."""
    for path in (PUBLISHED, PUBLISHED.with_name("published_curves.csv")):
        rows = list(csv.DictReader(path.open()))
        assert len(rows) > 50
        assert all(row["protocol"] and row["source"] and float(row["mean"]) and int(row["seeds"]) for row in rows)
        names = [(row["algorithm"], row["env"], row["env_version"], row["env_steps"], row["source"]) for row in rows]
        assert len(set(names)) == len(names)


@pytest.mark.slow
def test_selfplay(train_selfplay: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row a scripted player, curves of ratings, and the seeds' final policies against each other."""
    runs = [train_selfplay(ppo_selfplay, seed=seed) for seed in (1, 2)]
    capsys.readouterr()
    main(Args(runs=runs, output=tmp_path / "sumo", cross_play=True, cross_play_games=10))
    text = capsys.readouterr().out
    assert [row["score"] for row in markdown_rows(text, "Final scores")] == [
        f"sumo vs {name}" for name in ("random", "charge", "centre")
    ]
    rows = list(csv.DictReader((tmp_path / "sumo" / "cross_play_sumo_ppo_selfplay.csv").open()))
    assert [row["player"] for row in rows] == ["seed 1", "seed 2"]
    assert float(rows[0]["seed 2"]) + float(rows[1]["seed 1"]) == pytest.approx(1.0)
    assert "10 games a pair" in text
    assert "Published" not in text
    groups = grouped(runs)
    other = {"norm_obs": not json.loads((runs[1] / "args.json").read_text())["norm_obs"]}
    (runs[1] / "args.json").write_text(json.dumps(json.loads((runs[1] / "args.json").read_text()) | other))
    with pytest.raises(SystemExit, match="2"):
        main(Args(runs=runs, output=tmp_path / "sumo", cross_play=True))
    assert capsys.readouterr().err.startswith("error: RUNS takes runs of one --norm-obs, and ")
    panels = {axes.get_title().partition("\n(band")[0]: axes for axes in draw(groups, {}, over_time=False).axes}
    ratings = [run.curves["selfplay/rating_sumo"] for run in read_all(runs)]
    np.testing.assert_allclose(xy(panels["sumo: rating of sumo"].get_lines()[0])[:, 1], np.mean(ratings, axis=0)[:, 2])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"runs": []}, "RUNS takes finished runs"),
        ({"runs": ["nowhere"]}, "RUNS takes run folders with the args.json of a run, and nowhere is none"),
        ({"runs": ["no_seed"]}, "KeyError: 'seed'"),
        ({"runs": ["half"]}, "JSONDecodeError"),
        ({"runs": ["a", "a"]}, "RUNS takes each seed of a task and experiment once, and a and a have the same"),
        ({"runs": ["a", "other_scores"]}, "RUNS takes runs of one kind for a task and experiment"),
        (
            {"runs": ["a"], "normalize_by": "sac"},
            "--normalize-by takes one of the experiments with returns (ppo), not sac",
        ),
        ({"runs": ["a"], "cross_play": True}, "--cross-play takes self-play runs"),
        ({"runs": ["a"], "published_algorithms": ("sac",)}, "--published-algorithms takes --published FILE, too"),
        ({"runs": ["a", "sac"], "labels": ("ppo=x", "sac=x")}, "--labels takes a label of its own for each experiment"),
        ({"runs": ["a", "sac"], "labels": ("ppo=sac",)}, "--labels takes a label of its own for each experiment"),
        ({"runs": ["a"], "labels": ("ppo=",)}, "--labels takes labels that Matplotlib can draw and that do not begin"),
        ({"runs": ["a"], "labels": ("ppo=_x",)}, "--labels takes labels that Matplotlib can draw and that do not"),
        ({"runs": ["a"], "labels": (r"ppo=$\bad{$",)}, r"do not begin with _, not '$\\bad{$'"),
        ({"runs": ["a"], "output": Path("mine")}, "--output takes a folder of its own, and mine/scores.csv is of"),
        ({"runs": ["a"], "cross_play_games": 0}, "--cross-play-games takes an integer from 1, not 0"),
        ({"runs": ["a"], "output": Path("a/args.json/x")}, "--output takes a folder that can be written to"),
    ],
)
def test_bad_input(
    overrides: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sentence on standard error that names the flag, and exit status 2."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, "Toy-v1", "ppo", 1, [1.0]).rename("a")
    write_run(tmp_path, "Toy-v1", "sac", 1, [1.0]).rename("sac")
    write_run(tmp_path, "Toy-v1", "ppo", 2, [1.0]).rename("other_scores")
    write_events(Path("other_scores/events.out.tfevents.1"), 0.0, [(1.0, 1000, "eval/red_score_vs_random", 1.0)])
    for name, text in (("no_seed", '{"env_id": "Toy-v1", "exp_name": "ppo"}'), ("half", '{"env_id": "Toy')):
        Path(name).mkdir()
        Path(name, "args.json").write_text(text)
    Path("mine").mkdir()
    Path("mine", "scores.csv").write_text("pair,score\n")
    runs = [Path(name) for name in overrides["runs"]]
    with pytest.raises(SystemExit) as stop:
        main(Args(**{"output": Path("out")} | overrides | {"runs": runs}))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_output_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is refused before the work is done."""
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(SystemExit, match="2"):
        main(Args(runs=[tmp_path / "nowhere"], output=tmp_path / "x"))
    assert capsys.readouterr().err.startswith("error: --output takes")
