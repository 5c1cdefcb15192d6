"""The pages for readers: every relative link leads to a file, every anchor to a heading, and the README stays short."""

import csv
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmark" / "results").glob("*/README.md")]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """Links to other sites are not followed."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_no_merge_is_left_half_done() -> None:
    """No tracked file has the marks of a conflict."""
    words = ["git", "grep", "-lE", "^(<<<<<<<|>>>>>>>) "]
    assert not subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_readme_is_two_minutes_long() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def interval(mean: float, std: float, n: int) -> tuple[int, ...]:
    """Mean and ends of the 95% Student's t interval, as tables round them."""
    quantile = scipy.stats.t.ppf(0.975, n - 1)
    return tuple(round(mean + sign * quantile * std / n**0.5) for sign in (0, -1, 1))


def interval_of(returns: list[float]) -> tuple[int, ...]:
    return interval(float(np.mean(returns)), float(np.std(returns, ddof=1)), len(returns))


def rows_of(page: Path, section: str) -> list[tuple[str, set[tuple[int, ...]]]]:
    """Of each table row of a section that begins with a task: the task, and what reads `mean [low, high]`."""
    text = re.split(rf"^## {section}$", page.read_text(), flags=re.MULTILINE)[1].split("\n## ")[0].replace(",", "")
    rows = re.findall(r"^\| (\w+-v\d) \|(.*)", text, re.MULTILINE)
    found = [(task, re.findall(r"(-?\d+)[*]* \[(-?\d+) (-?\d+)\]", row)) for task, row in rows]
    return [(task, {tuple(map(int, numbers)) for numbers in triples}) for task, triples in found]


@pytest.mark.parametrize(("page", "section"), [("README.md", "Results: PPO"), ("docs/ppo.md", "Results")])
def test_returns_of_ppo_are_those_of_the_study(page: str, section: str) -> None:
    """Computed from the raw numbers of its runs."""
    runs: dict[tuple[str, str], list[float]] = {}
    with (ROOT / "benchmark" / "results" / "ppo" / "scores.csv").open() as file:
        for row in csv.DictReader(file):
            runs.setdefault((row["task"], row["experiment"]), []).append(float(row["value"]))
    samples = {key: interval_of(returns) for key, returns in runs.items()}
    rows = rows_of(ROOT / page, section)
    assert len(rows) == 7
    for task, triples in rows:
        assert triples == {samples[task, name] for name in ("ppo_continuous", "ppo_reference")}, task


@pytest.fixture(scope="module")
def sac_runs() -> dict[tuple[str, str, int], list[float]]:
    """The raw returns of the study of SAC, by task, experiment and steps, in the order of the seeds."""
    runs: dict[tuple[str, str, int], list[float]] = {}
    with (ROOT / "benchmark" / "results" / "sac" / "curves.csv").open() as file:
        for row in sorted(csv.DictReader(file), key=lambda row: int(row["seed"])):
            runs.setdefault((row["task"], row["experiment"], int(row["step"])), []).append(float(row["value"]))
    return runs


def published_statistics(task: str, steps: int) -> tuple[float, float, int]:
    """Mean, standard deviation and number of seeds of the published SAC on a task, within 5,000 steps of `steps`."""
    with (ROOT / "benchmark" / "published_curves.csv").open() as file:
        points = [row for row in csv.DictReader(file) if (row["algorithm"], row["env"]) == ("sac", task.split("-")[0])]
    (near,) = [row for row in points if abs(int(row["env_steps"]) - steps) < 5_000]
    return float(near["mean"]), float(near["std"]), int(near["seeds"])


def published_sac(task: str, steps: int) -> tuple[int, ...]:
    """Mean of the published SAC and its interval."""
    return interval(*published_statistics(task, steps))


def test_returns_of_sac_in_the_readme(sac_runs: dict[tuple[str, str, int], list[float]]) -> None:
    """The table has three runs of a task; the sentences below it have other runs."""
    text = (ROOT / "README.md").read_text()
    section = text.split("\n## Results: SAC\n")[1].replace(",", "")
    steps_of_rows = [int(steps) for steps in re.findall(r"^\| \w+-v5 \| (\d+000) \|", section, re.M)]
    rows = rows_of(ROOT / "README.md", "Results: SAC")
    assert len(rows) == len(steps_of_rows) == 8
    for (task, triples), steps in zip(rows, steps_of_rows, strict=True):
        ours = sac_runs[task, "sac_million" if steps == 1_000_000 else "sac_continuous", steps]
        assert len(ours) == 3
        assert triples == {interval_of(ours), published_sac(task, steps)}, (task, steps)
    ant = "{:,} [{:,}, {:,}]".format(*interval_of(sac_runs["Ant-v5", "sac_no_contact", 300_000]))
    assert f"27 numbers have a mean of {ant}" in " ".join(text.split())
    humanoid = f"{sac_runs['Humanoid-v5', 'sac_half_million', 500_000][0]:,.0f}"
    assert f"has {humanoid} there (published: {published_sac('Humanoid', 500_000)[0]:,})" in " ".join(text.split())
    hopper = "{:,.0f}, {:,.0f} and {:,.0f}".format(*sac_runs["Hopper-v5", "sac_million", 1_000_000])
    assert f"the three runs of Hopper have {hopper}" in " ".join(text.split())


@pytest.mark.parametrize("page", ["README.md", "benchmark/results/sac/README.md"])
def test_returns_of_stable_baselines3(page: str, sac_runs: dict[tuple[str, str, int], list[float]]) -> None:
    (sentence,) = re.findall(
        r"Stable-Baselines3's SAC, with .*? after 300,000 steps", " ".join((ROOT / page).read_text().split())
    )
    runs = [(task, values) for (task, name, steps), values in sac_runs.items() if (name, steps) == ("sb3_sac", 300_000)]
    expected = {(f"{value:,.0f}", task.split("-")[0]) for task, values in runs for value in values}
    assert set(re.findall(r"([\d,]+) on (\w+)", sentence)) == expected
    assert len(expected) == 5


def test_returns_of_sac_with_lower_learning_rates(sac_runs: dict[tuple[str, str, int], list[float]]) -> None:
    study, page, readme = (
        " ".join((ROOT / name).read_text().split())
        for name in ("benchmark/results/sac/README.md", "docs/sac.md", "README.md")
    )

    def runs(task: str, *names: str) -> list[float]:
        return [value for name in names for value in sac_runs[task, name, 300_000]]

    def mean(returns: list[float]) -> str:
        return "{:,} [{:,}, {:,}]".format(*interval_of(returns))

    def difference(high: list[float], low: list[float]) -> str:
        ends = scipy.stats.ttest_ind(high, low, equal_var=False).confidence_interval()
        return f"{np.mean(high) - np.mean(low):,.0f} [{ends.low:,.0f}, {ends.high:,.0f}]"

    def welch(high: list[float], low: list[float]) -> str:
        return f"(Welch's t test, p = {scipy.stats.ttest_ind(high, low, equal_var=False).pvalue:.2f})"

    low, default = runs("Humanoid-v5", "sac_low_lr"), runs("Humanoid-v5", "sac_continuous", "sac_default_lr")
    assert f"mean {mean(low)}; with the default" in study
    assert f"mean {mean(default)}. The difference is {difference(low, default)} {welch(low, default)}" in study
    assert f"{np.mean(default):,.0f} (five seeds), instead of {np.mean(low):,.0f} (four seeds)" in page
    assert f"four other seeds of Humanoid have {mean(low)} with" in readme
    others = "{:,.0f} and {:,.0f}".format(*runs("Humanoid-v5", "sac_default_lr"))
    assert f"two of them have {others} with the default" in readme

    low, default = runs("HalfCheetah-v5", "sac_low_lr"), runs("HalfCheetah-v5", "sac_default_lr")
    returns = ["{:,.0f}, {:,.0f} and {:,.0f}".format(*values) for values in (default, low)]
    assert f"has {returns[0]}, mean {mean(default)}; 3e-4 has {returns[1]}, mean {mean(low)}." in study
    assert f"The loss is {difference(default, low)} {welch(default, low)}" in study
    nine = runs("HalfCheetah-v5", "sac_continuous", "sac_million", "sac_default_lr")
    assert f"nine runs, mean {np.mean(nine):,.0f}; against these the loss is {difference(nine, low)}." in study
    assert f"3e-4 is worse ({np.mean(low):,.0f} instead of {np.mean(default):,.0f})" in study
    assert f"{np.mean(default):,.0f}, instead of {np.mean(low):,.0f} (three seeds each)" in page
    assert f"Three other seeds of HalfCheetah have {mean(low)} with 3e-4 and {mean(default)} with" in readme


# three runs of 300,000 steps, then three and two of a million
WALKER2D = ["sac_continuous", "sac_million", "sac_more_seeds"]


def test_returns_of_the_five_long_runs_of_walker2d(sac_runs: dict[tuple[str, str, int], list[float]]) -> None:
    """The two more runs are not in the tables, but the mean of all five is said in both pages."""
    study, readme = (
        " ".join((ROOT / name).read_text().split()) for name in ("benchmark/results/sac/README.md", "README.md")
    )

    def five(steps: int) -> list[float]:
        return [value for name in WALKER2D[1:] for value in sac_runs["Walker2d-v5", name, steps]]

    assert len(five(1_000_000)) == 5
    mean = "{:,} [{:,}, {:,}]".format(*interval_of(five(1_000_000)))
    early = f"{np.mean(five(300_000)):,.0f}"
    fourth, fifth = (f"{value:,.0f}" for value in sac_runs["Walker2d-v5", "sac_more_seeds", 1_000_000])
    assert f"and Walker2d of {mean}, both inside" in study
    assert f"the five longer runs below have {early} there" in study
    eight = [*sac_runs["Walker2d-v5", "sac_continuous", 300_000], *five(300_000)]
    assert f"All eight together have {np.mean(eight):,.0f}, inside the interval" in study
    assert f"{fourth} after a million, but" in study
    assert f"{fifth} after a million, but" in study
    assert f"added: {fourth} and {fifth}. All five have a mean of {mean}, and {early} after 300,000 steps" in readme
    last_ten = np.mean([five(steps) for steps in range(820_000, 1_000_001, 20_000)], 0)
    assert "means of {:,.0f}, {:,.0f}, {:,.0f}, {:,.0f} and {:,.0f}".format(*last_ten) in study
    assert f"Their mean is {np.mean(last_ten):,.0f}, inside the published interval" in study
    assert published_sac("Walker2d-v5", 1_000_000)[1] < np.mean(last_ten) < published_sac("Walker2d-v5", 1_000_000)[2]

    assert "On Walker2d it is above the interval after 100,000 steps, and inside at the other four." in study
    assert np.mean(five(100_000)) > published_sac("Walker2d-v5", 100_000)[2]
    for steps in (200_000, 300_000, 500_000, 1_000_000):
        _, low, high = published_sac("Walker2d-v5", steps)
        assert low < np.mean(five(steps)) < high, steps


@pytest.mark.parametrize(
    ("task", "steps", "names", "sentence"),
    [
        ("Humanoid-v5", 300_000, ["sac_continuous"], r"too much to tell \(Welch's t test, p = ([\d.]+)\)"),
        ("Humanoid-v5", 300_000, ["sac_continuous", "sac_default_lr"], r"below the published one \(p = ([\d.]+)\)"),
        ("Walker2d-v5", 300_000, ["sac_continuous"], r"On Walker2d our mean is higher \(p = ([\d.]+)\)"),
        ("Walker2d-v5", 300_000, WALKER2D, r"All eight together have [\d,]+, inside the interval \(p = ([\d.]+)\)"),
        ("Ant-v5", 300_000, ["sac_continuous"], r"On Ant-v5 it is lower \(p = ([\d.]+)\)"),
        ("Ant-v5", 300_000, ["sac_no_contact"], r"inside the published interval \(p = ([\d.]+)\)"),
        ("HalfCheetah-v5", 1_000_000, ["sac_million"], r"\(Welch's t test: p = ([\d.]+) and "),
        ("Walker2d-v5", 1_000_000, WALKER2D[1:], r"\(Welch's t test: p = [\d.]+ and ([\d.]+)\)"),
        ("Hopper-v5", 1_000_000, ["sac_million"], r"Hopper has [\d,]+, above it \(p = ([\d.]+)\)"),
        ("HalfCheetah-v5", 300_000, ["sac_default_lr"], r"three new ones above it \(p = ([\d.]+)\)"),
        ("HalfCheetah-v5", 300_000, ["sac_low_lr"], r"that of 3e-4 below it \(p = ([\d.]+)\)"),
    ],
)
def test_p_values_to_the_published_means(
    task: str, steps: int, names: list[str], sentence: str, sac_runs: dict[tuple[str, str, int], list[float]]
) -> None:
    text = " ".join((ROOT / "benchmark" / "results" / "sac" / "README.md").read_text().split())
    (printed,) = re.findall(sentence, text)
    ours = [value for name in names for value in sac_runs[task, name, steps]]
    statistics = float(np.mean(ours)), float(np.std(ours, ddof=1)), len(ours)
    p = scipy.stats.ttest_ind_from_stats(*statistics, *published_statistics(task, steps), equal_var=False).pvalue
    assert float(printed) == round(float(p), len(printed.split(".")[1]))


def test_returns_of_sac_in_the_table_of_its_study(sac_runs: dict[tuple[str, str, int], list[float]]) -> None:
    """The table above the report, which is written by hand. Fewer than three runs have no interval."""
    text = (ROOT / "benchmark" / "results" / "sac" / "README.md").read_text().split("<!-- report -->")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.*$", text, re.M)][2:]
    assert len(rows) >= 15
    task = ""
    for name, when, returns, mean, published, other in rows:
        task = name or task
        steps = int(when.replace(",", ""))
        longer = {500_000: "sac_half_million", 1_000_000: "sac_million"}
        ours = sac_runs[task, longer.get(steps, "sac_continuous"), steps]
        assert returns.split(" (")[0] == "; ".join(f"{value:,.0f}" for value in ours), (task, when)
        assert mean == ("{:,} [{:,}, {:,}]".format(*interval_of(ours)) if len(ours) > 2 else ""), (task, when)
        assert published == "{:,} [{:,}, {:,}]".format(*published_sac(task, steps)), (task, when)
        assert other == "".join(f"{value:,.0f}" for value in sac_runs.get((task, "sb3_sac", steps), [])), (task, when)
