"""Statistics of the report against references, and its tables, files and curves on event files that the tests write."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from conftest import Train
from matplotlib.lines import Line2D
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

import ppo_selfplay
from benchmark.report import Args, Run, common_points, draw, find_scales, group_runs, main, read_curves, read_run
from benchmark.statistics import Statistic, interquartile_mean, interval, mean, probability_of_improvement

# normalised scores, a row a run, a column a task
OURS = np.array([[0.91, 0.35, 1.2], [0.74, 0.62, 0.95], [1.05, 0.1, 1.1], [0.88, 0.44, 0.4], [0.15, 0.51, 1.31]])
THEIRS = np.array(
    [[0.8, 0.3, 1], [0.6, 0.62, 0.7], [0.95, 0.55, 0.9], [0.1, 0.2, 1.15], [0.7, 0.4, 0.85], [0.99, 0.12, 0.3]]
)

Point = tuple[float, int, str, float]  # wall time, step, key, value


def write_events(path: Path, start: float, points: Iterable[Point], purge_step: int | None = None) -> None:
    """An event file as SummaryWriter writes it, with wall times of one's own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    events = [Event(wall_time=start, file_version="brain.Event:2")]
    if purge_step is not None:
        events.append(Event(wall_time=start, step=purge_step, session_log=SessionLog(status=SessionLog.START)))
    for wall_time, step, key, value in points:
        events.append(
            Event(wall_time=wall_time, step=step, summary=Summary(value=[{"tag": key, "simple_value": value}]))
        )
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())


def write_run(root: Path, env_id: str, exp_name: str, seed: int, evaluations: list[float], **overrides: Any) -> Path:
    """A run of 1,000 steps that evaluates at equal distances, and trains at returns that are 10 lower; a step takes 0.06 s."""
    folder = root / f"{env_id}__{exp_name}__{seed}"
    run_args = {"env_id": env_id, "exp_name": exp_name, "seed": seed, "total_timesteps": 1000, "eval_episodes": 7}
    steps = [1000 * (i + 1) // len(evaluations) for i in range(len(evaluations))]
    points: list[Point] = [(5.0, 1, "charts/episodic_return", 0.0)]
    for step, value in zip(steps, evaluations, strict=True):
        scalars = {"charts/episodic_return": value - 10.0, "charts/SPS": 50.0 + seed, "eval/return_mean": value}
        points += [(5.0 + 0.06 * step, step, key, x) for key, x in scalars.items()]
    write_events(folder / "events.out.tfevents.1", 5.0, points)
    (folder / "args.json").write_text(json.dumps(run_args | overrides))
    return folder


def read_all(folders: Iterable[Path]) -> list[Run]:
    """All of these runs."""
    return [run for folder in folders if (run := read_run(folder, read_curves(folder)))]


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
def test_interquartile_mean_is_scipys_trimmed_mean(n: int) -> None:
    """A quarter is cut at each end, rounded down, along the last axis."""
    values = np.random.default_rng(n).normal(size=(3, n)) ** 3
    assert interquartile_mean(values) == pytest.approx(scipy.stats.trim_mean(values, 0.25, axis=-1))


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_interval_is_scipys_percentile_bootstrap(statistic: Statistic) -> None:
    """To 3% of its width, which is what two streams of random numbers leave."""
    values = np.random.default_rng(1).gamma(2.0, size=(2, 20))

    def reference(x: np.ndarray, axis: int) -> np.ndarray:
        return scipy.stats.trim_mean(x, 0.25 if statistic is interquartile_mean else 0.0, axis=axis)

    rng = np.random.default_rng(2)
    result = scipy.stats.bootstrap([values], reference, axis=-1, n_resamples=20_000, method="percentile", rng=rng)
    low, high = result.confidence_interval
    assert np.array(interval(statistic, [values])) == pytest.approx(
        np.array([low, high]), abs=0.03 * (high - low).min()
    )


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
def test_interval_is_that_of_all_resamples(statistic: Statistic) -> None:
    """Two tasks with three and four runs have 27 * 256 resamples: the interval is between the percentiles of all of them."""
    strata = [np.array([0.0, 1.0, 5.0]), np.array([10.0, 11.0, 13.0, 20.0])]
    resamples = [list(a) + list(b) for a, b in product(product(strata[0], repeat=3), product(strata[1], repeat=4))]
    cut = 0.25 if statistic is interquartile_mean else 0.0
    exact = np.percentile(scipy.stats.trim_mean(np.array(resamples), cut, axis=1), [2.5, 97.5])
    assert interval(statistic, strata) == pytest.approx(exact, abs=0.08)


def test_statistics_are_those_of_rliable() -> None:
    """rliable 1.2.0 (arch 7.2.0, 50,000 resamples; 10,000 for the probability) on the scores above; it does not install beside
    pandas 3, so its results are kept here."""
    for scores, iqm, iqm_interval, mean_interval in (
        (OURS, 0.72222222, (0.52333333, 0.87222222), (0.564, 0.84266667)),
        (THEIRS, 0.642, (0.474, 0.779), (0.50166667, 0.735)),
    ):
        assert float(interquartile_mean(scores.ravel())) == pytest.approx(iqm)
        assert interval(interquartile_mean, list(scores.T)) == pytest.approx(iqm_interval, abs=0.005)
        assert interval(mean, list(scores.T)) == pytest.approx(mean_interval, abs=0.005)
    assert probability_of_improvement(list(OURS.T), list(THEIRS.T)) == pytest.approx(
        (0.62777778, 0.42777778, 0.82222222), abs=0.006
    )


def test_probability_of_improvement_is_the_mann_whitney_statistic() -> None:
    """U / (n m), averaged over tasks, with ties and unequal numbers of runs; the other way round it is 1 minus that."""
    rng = np.random.default_rng(3)
    ours, theirs = ([rng.integers(0, 6, n).astype(float) for n in sizes] for sizes in ((4, 9, 5), (7, 3, 5)))
    expected = [scipy.stats.mannwhitneyu(x, y).statistic / (len(x) * len(y)) for x, y in zip(ours, theirs, strict=True)]
    probability, low, high = probability_of_improvement(ours, theirs)
    assert probability == pytest.approx(np.mean(expected))
    assert 0.0 < low < probability < high < 1.0
    assert probability_of_improvement(theirs, ours)[0] == pytest.approx(1.0 - probability)


# === Reading ==========================================================================================================


def test_curves_are_those_of_tensorboard(tmp_path: Path) -> None:
    """Of the keys that are shown; seconds count from the opening of the file."""
    writer = SummaryWriter(str(tmp_path))
    for step in range(1, 40):
        for key in ("eval/return_mean", "charts/SPS", "losses/value_loss", "eval/length_mean", "selfplay/rating_red"):
            writer.add_scalar(key, np.sin(step), 10 * step)
    writer.close()
    reference = EventAccumulator(str(tmp_path)).Reload()
    curves = read_curves(tmp_path)
    assert set(curves) == {"eval/return_mean", "charts/SPS", "selfplay/rating_red"}
    for key, curve in curves.items():
        expected = [
            (point.step, point.wall_time - reference.FirstEventTimestamp(), point.value)
            for point in reference.Scalars(key)
        ]
        np.testing.assert_allclose(curve, expected)


@pytest.mark.parametrize("purge_step", [None, 25])
@pytest.mark.parametrize("names", [("1", "2"), ("2", "1")])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_resumed_run_is_one_curve(
    tmp_path: Path, purge_step: int | None, names: tuple[str, str], order: tuple[int, int]
) -> None:
    """What came after the checkpoint counts once, as the last part has it, and neither pauses nor what was lost take time.

    With SummaryWriter's purge_step, the steps from there on are lost; without it, those from the first new point on. Parts are
    told by their clocks, not by the names or ages of files.
    """
    key, other = "eval/return_mean", "charts/SPS"
    first = [(1001.0, 10, key, 1.0), (1002.0, 20, key, 2.0), (1003.0, 30, key, -3.0), (1004.0, 40, other, -4.0)]
    second = [(5002.0, 40 if purge_step else 30, key, 4.0)]
    parts = [(1000.0, first, None), (5000.0, second, purge_step)]
    for i in order:
        write_events(tmp_path / f"events.out.tfevents.{names[i]}", *parts[i])
    write_events(tmp_path / "events.out.tfevents.3", 9000.0, [])
    curves = read_curves(tmp_path)
    assert list(curves) == [key]
    assert curves[key].tolist() == [[10, 1.0, 1.0], [20, 2.0, 2.0], [40 if purge_step else 30, 4.0, 4.0]]


def test_truncated_file_is_read_to_its_last_whole_record(tmp_path: Path) -> None:
    """A killed run leaves half a record, or an empty file."""
    path = tmp_path / "events.out.tfevents.1"
    write_events(path, 0.0, [(1.0, step, "charts/SPS", 2.0) for step in range(5)])
    path.write_bytes(path.read_bytes()[:-7])
    (tmp_path / "events.out.tfevents.2").touch()
    assert read_curves(tmp_path)["charts/SPS"][:, 0].tolist() == [0, 1, 2, 3]


def test_unfinished_runs_are_named_and_left_out(tmp_path: Path) -> None:
    """Finished is a run with an evaluation at its last step or, where rollouts round it up, after it."""
    whole = write_run(tmp_path, "Toy-v1", "ppo", 1, [1.0], total_timesteps=990)
    part = write_run(tmp_path, "Toy-v1", "ppo", 2, [1.0, 2.0], total_timesteps=1001)
    silent = write_run(tmp_path, "Toy-v1", "ppo", 3, [])
    groups, notes = group_runs(read_all((silent, part, whole)))
    assert {key: [run.folder for run in group] for key, group in groups.items()} == {("Toy-v1", "ppo"): [whole]}
    assert notes[0] == f"Left out, not finished: {part.name} (last evaluation at step 1,000 of 1,001)."
    assert notes[1] == f"Left out, not finished: {silent.name} (last evaluation at step 0 of 1,000)."


def test_runs_of_other_arguments_are_named(tmp_path: Path) -> None:
    """What bears on the result is compared, also if one script does not know it, and so are the budgets of a task."""
    shared = {"gamma": 0.9, "track": False, "eval_freq": 5}
    runs = [write_run(tmp_path, "Toy-v1", "ppo", 1, [1.0], **shared, new_flag=1)]
    runs += [write_run(tmp_path, "Toy-v1", "ppo", 2, [1.0], **shared | {"gamma": 0.8, "track": True, "eval_freq": 9})]
    runs += [write_run(tmp_path, "Toy-v1", "sac", 1, [1.0, 2.0], total_timesteps=400)]
    _, notes = group_runs(read_all(runs))
    assert [note for note in notes if "**" in note] == [
        f"**Not of one kind**: --gamma is 0.9 in {runs[0].name}, 0.8 in {runs[1].name}.",
        f"**Not of one kind**: --new-flag is 1 in {runs[0].name}, not a flag in {runs[1].name}.",
    ]
    events = next(runs[2].glob("events*"))
    events.unlink()
    write_events(events, 0.0, [(1.0, 400, "eval/return_mean", 1.0)])
    _, notes = group_runs(read_all(runs))
    assert "**Unequal budgets**: runs on Toy-v1 have from 400 to 1,000 steps." in notes


def write_journal(run: Path, *starts: dict[str, Any]) -> Path:
    """Gives a run the timestamp and the journal of a sweep's run; each start has its end."""
    journal = run.parents[1] / "jobs" / f"{run.name}.jsonl"
    journal.parent.mkdir(exist_ok=True)
    records = [record for start in starts for record in (start, start | {"exit": 0, "run": f"runs/{run.name}__5"})]
    journal.write_text("".join(f"\n{json.dumps(record)}\n" for record in records) + '{"cut off')
    return run.rename(f"{run}__5")


def test_command_and_commit_come_from_the_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run's last beginning and of all that resumed it; runs of different scripts are named, and those of none are not."""
    command = ["/bin/python", "/x/ppo.py", "--seed", "1", "--note", "a b"]
    fresh: dict[str, Any] = {"command": command, "sha256": "11" * 32, "commit": "ab" * 20, "dirty": False}
    changed = fresh | {"sha256": "22" * 32, "commit": "cd" * 20, "dirty": True}
    resumed = changed | {"command": ["/bin/python", "/x/ppo.py", "--resume", "runs/x"]}
    runs = [write_run(tmp_path / "runs", "Toy-v1", "ppo", seed, [1.0]) for seed in range(5)]
    journals = [[changed, fresh], [fresh], [changed], [fresh, resumed]]  # and none for the last run
    runs[:4] = [write_journal(run, *starts) for run, starts in zip(runs, journals, strict=False)]
    main(Args(runs=runs, output=tmp_path / "x"))
    text = capsys.readouterr().out
    notes = re.findall(r"\*\*Not of one kind\*\*: (.*)\.", text)
    assert notes == [
        f"the script is that of abababa in {runs[0].name}, cdcdcdc+ in {runs[2].name}",
        f"{runs[3].name} was resumed by another script: abababa, cdcdcdc+",
        f"the script is that of abababa in {runs[0].name}, abababa, cdcdcdc+ in {runs[3].name}",
    ]
    (row,) = markdown_rows(text, "Commands")
    assert row["command of the first run"] == "`python ppo.py --seed 1 --note 'a b'`"
    assert row["commit"] == "abababa, cdcdcdc+, unknown"
    commits = [row["commit"] for row in csv.DictReader((tmp_path / "x.csv").open())]
    assert commits == ["abababa", "abababa", "cdcdcdc+", "abababa, cdcdcdc+", ""]


def test_a_run_killed_before_it_began_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder is empty; the others' report is made."""
    run, empty = write_run(tmp_path, "Toy-v1", "ppo", 1, [1.0]), tmp_path / "Toy-v1__ppo__2__77"
    empty.mkdir()
    main(Args(runs=[empty, run], output=tmp_path / "x"))
    assert f"- Left out, killed before it began: {empty.name}.\n" in capsys.readouterr().out


def test_a_reader_that_goes_away_costs_no_file(tmp_path: Path) -> None:
    """As `head` does."""
    run = write_run(tmp_path, "Toy-v1", "ppo", 1, [1.0])
    words = [sys.executable, "-m", "benchmark.report", str(run), "--output", str(tmp_path / "x")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[1])
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 0)
    assert (tmp_path / "x_time.png").exists()


def test_curves_meet_between_points(tmp_path: Path) -> None:
    """On the steps that all runs have gone: values are interpolated, and times are medians."""
    for seed, steps in ((1, [10, 30, 40]), (2, [20, 40, 50]), (9, [20, 50])):
        points = [(seed * step, step, "eval/return_mean", 100.0 * seed + step) for step in steps]
        write_events(tmp_path / str(seed) / "events.out.tfevents.1", 0.0, points)
    runs = [Run(tmp_path / seed, "Toy-v1", "ppo", int(seed), 1, {}, [], read_curves(tmp_path / seed)) for seed in "129"]
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
    """The tables against scipy and rliable's numbers, the raw ones beside them, and the same again from the same runs."""
    main(Args(runs=folders, output=tmp_path / "out" / "both", normalize_by="sac"))
    text = capsys.readouterr().out
    assert (tmp_path / "out" / "both.md").read_text() == text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "both.md", "both.csv", "both_curves.csv", "both.png", "both_time.png",
    }  # fmt: skip

    first, *_ = rows = markdown_rows(text, "Final scores")
    assert [(row["task"], row["experiment"], row["seeds"], row["steps"]) for row in rows] == [
        (env_id, name, seeds, "1,000")
        for env_id in ("Hopper-v5", "Toy-v1")
        for name, seeds in (("ppo", "5"), ("sac", "6"))
    ]
    assert (first["score"], first["steps/s"]) == ("return", "52")
    scores = 1000.0 * OURS[:, 0]
    for column, statistic, expected in (
        ("mean", mean, scores.mean()),
        ("IQM", interquartile_mean, scores[[1, 3, 0]].mean()),
    ):
        assert numbers(first[f"{column} [95%]"]) == pytest.approx([expected, *interval(statistic, [scores])], abs=0.5)

    published = markdown_rows(text, "Published returns")
    assert [row["task"] for row in published[:2]] == ["Hopper-v5", "Hopper-v5"]
    assert published[0]["protocol"] == "deterministic return of the final policy, 7 episodes"
    assert {"Hopper-v4", "Hopper-v3"} < {row["task"] for row in published[2:]}
    assert all(row["task"].startswith("Hopper") and row["protocol"] and row["source"] for row in published)
    assert [row["algorithm"] for row in published[2:]] == sorted(row["algorithm"] for row in published[2:])
    cleanrl = next(row for row in published if row["algorithm"] == "ppo" and row["task"] == "Hopper-v4")
    assert (cleanrl["mean [95%] or ± std"], cleanrl["seeds"], cleanrl["steps"]) == (
        "2382.86 ± 271.74",
        "3",
        "1,000,000",
    )

    iqms = scipy.stats.trim_mean(THEIRS[:, :2], 0.25, axis=0)  # the scale's 1; its 0 is the first training return, 0
    pooled = {row["experiment"]: row["normalised IQM [95%]"] for row in markdown_rows(text, "All tasks together")}
    for name, scores in (("ppo", OURS), ("sac", THEIRS)):
        assert float(pooled[name].split()[0]) == pytest.approx(
            scipy.stats.trim_mean(scores[:, :2] / iqms, 0.25, axis=None), abs=6e-4
        )

    uneven = "An experiment has not as many runs on each task"
    assert uneven not in text
    main(Args(runs=folders[1:], output=tmp_path / "uneven", normalize_by="sac"))
    assert uneven in capsys.readouterr().out

    (improvement,) = markdown_rows(text, "Probability of improvement")
    expected = "{:.3f} [{:.3f}, {:.3f}]".format(*probability_of_improvement(list(OURS.T[:2]), list(THEIRS.T[:2])))
    assert list(improvement.values()) == ["ppo (1,000 steps)", "sac (1,000 steps)", "2", expected]

    finals = list(csv.DictReader((tmp_path / "out" / "both.csv").open()))
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
    groups, _ = group_runs(read_all(folders))
    scales = find_scales(groups, "sac")
    hopper, toy, pooled = draw(groups, scales, over_time=False).axes
    final = 1000.0 * OURS[:, 0]
    means = [final.mean() / 2, 9999.0, final.mean()]
    np.testing.assert_allclose(xy(hopper.get_lines()[0]), np.transpose([[333, 666, 1000], means]), rtol=1e-6)
    band = np.asarray(hopper.collections[0].get_paths()[0].vertices)
    assert sorted(set(band[band[:, 0] == 1000, 1])) == pytest.approx(interval(mean, [final]), rel=0.02)
    assert (hopper.get_title(), toy.get_title(), pooled.get_title()) == ("Hopper-v5", "Toy-v1", "2 tasks together")
    iqms = scipy.stats.trim_mean(THEIRS[:, :2], 0.25, axis=0)
    expected = [scipy.stats.trim_mean(scores[:, :2] / iqms, 0.25, axis=None) for scores in (OURS, THEIRS)]
    assert [xy(line)[-1, 1] for line in pooled.get_lines()] == pytest.approx(expected)
    assert [line.get_label() for line in pooled.get_lines()] == ["ppo, 1,000 steps", "sac, 1,000 steps"]

    for group in (groups["Toy-v1", "ppo"], groups["Toy-v1", "sac"]):
        for run in group:
            run.curves["eval/return_mean"][:, 1] *= 2
    hopper, _, pooled = draw(groups, scales, over_time=True).axes
    np.testing.assert_allclose(xy(hopper.get_lines()[0]), np.transpose([[0.333, 0.666, 1.0], means]), rtol=1e-6)
    for line, at_end in zip(pooled.get_lines(), expected, strict=True):  # Hopper stays where it ended after a minute
        np.testing.assert_allclose(xy(line)[[0, -1], 0], [0.666, 2.0], rtol=1e-6)
        assert xy(line)[-1, 1] == pytest.approx(at_end)


def test_a_dozen_experiments_can_be_told_apart(tmp_path: Path) -> None:
    """Each has a colour of its own, and the legend stands beside the curves."""
    folders = [write_run(tmp_path, "Toy-v1", f"ppo_{i}", 1, [0.0, 1.0, 2.0 + i]) for i in range(12)]
    figure = draw(group_runs(read_all(folders))[0], {}, over_time=False)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert len({line.get_color() for line in axes.get_lines()}) == len(axes.get_lines()) == 12
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_window_extent().x0 > axes.get_window_extent().x1


def test_few_evaluations_are_dots_over_training_returns(tmp_path: Path) -> None:
    """One dot a run and evaluation, and the mean of the training returns as a thin line."""
    folders = [write_run(tmp_path, "Toy-v1", "ppo", seed, [100.0, 200.0 + seed]) for seed in range(3)]
    groups, _ = group_runs(read_all(folders))
    (axes,) = (axes for axes in draw(groups, {}, over_time=False).axes if axes.get_title())
    dots, training = axes.get_lines()
    assert sorted(xy(dots).tolist()) == [[500, 100]] * 3 + [[1000, 200], [1000, 201], [1000, 202]]
    assert (dots.get_linestyle(), training.get_linewidth() < 1) == ("None", True)
    np.testing.assert_allclose(xy(training), [[1, 0], [500, 90], [1000, 191]])


def test_scale_takes_tasks_that_were_learned_and_all_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Zero is the reference's first training return, 0; a task on which it did not rise is left out, and named."""
    runs = [write_run(tmp_path, env_id, "ppo", 1, [x]) for env_id, x in (("A-v1", 4.0), ("B-v1", -4.0), ("C-v1", 4.0))]
    runs += [write_run(tmp_path, env_id, "sac", 1, [x]) for env_id, x in (("A-v1", 2.0), ("B-v1", 2.0))]
    assert find_scales(group_runs(read_all(runs))[0], "ppo") == {"A-v1": (0.0, 4.0)}
    main(Args(runs=runs, output=tmp_path / "x", normalize_by="ppo"))
    text = capsys.readouterr().out
    assert [row["normalised IQM [95%]"] for row in markdown_rows(text, "All tasks together")] == ["1.000", "0.500"]
    assert "Not in the pooled score: B-v1, C-v1 (" in text


def test_selfplay(train_selfplay: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row a scripted player, curves of ratings, and the seeds' final policies against each other."""
    runs = [train_selfplay(ppo_selfplay, seed=seed) for seed in (1, 2)]
    capsys.readouterr()
    main(Args(runs=runs, output=tmp_path / "sumo", cross_play=True, cross_play_games=10))
    text = capsys.readouterr().out
    assert [row["score"] for row in markdown_rows(text, "Final scores")] == [
        f"sumo vs {name}" for name in ("random", "charge", "centre")
    ]
    rows = list(csv.DictReader((tmp_path / "sumo_cross_play_sumo_ppo_selfplay.csv").open()))
    assert [row["player"] for row in rows] == ["seed 1", "seed 2"]
    assert float(rows[0]["seed 2"]) + float(rows[1]["seed 1"]) == pytest.approx(1.0)
    assert "10 games a pair" in text
    assert "Published" not in text
    groups, _ = group_runs(read_all(runs))
    other = {"norm_obs": not json.loads((runs[1] / "args.json").read_text())["norm_obs"]}
    (runs[1] / "args.json").write_text(json.dumps(json.loads((runs[1] / "args.json").read_text()) | other))
    with pytest.raises(SystemExit, match="2"):
        main(Args(runs=runs, output=tmp_path / "sumo", cross_play=True))
    assert capsys.readouterr().err.startswith("error: RUNS takes runs of one --norm-obs, and ")
    panels = {axes.get_title(): axes for axes in draw(groups, {}, over_time=False).axes}
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
        ({"runs": ["a"], "cross_play_games": 0}, "--cross-play-games takes a number from 1, not 0"),
        (
            {"runs": ["a"], "output": Path("a/args.json/x")},
            "--output takes the beginning of a path that can be written",
        ),
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
    write_run(tmp_path, "Toy-v1", "ppo", 2, [1.0]).rename("other_scores")
    write_events(Path("other_scores/events.out.tfevents.1"), 0.0, [(1.0, 1000, "eval/red_score_vs_random", 1.0)])
    for name, text in (("no_seed", '{"env_id": "Toy-v1", "exp_name": "ppo"}'), ("half", '{"env_id": "Toy')):
        Path(name).mkdir()
        Path(name, "args.json").write_text(text)
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
