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
    samples = {key: interval(float(np.mean(x)), float(np.std(x, ddof=1)), len(x)) for key, x in runs.items()}
    rows = rows_of(ROOT / page, section)
    assert len(rows) == 7
    for task, triples in rows:
        assert triples == {samples[task, name] for name in ("ppo_continuous", "ppo_reference")}, task


def test_returns_of_sac_are_those_of_the_study_and_of_the_published_curves() -> None:
    """The README's, after as many steps as it says, or published ones within 5,000 steps of them."""
    with (ROOT / "benchmark" / "published_curves.csv").open() as file:
        points = [row for row in csv.DictReader(file) if row["algorithm"] == "sac"]
    study, runs = ROOT / "benchmark" / "results" / "sac", []
    for name, column in (("curves.csv", "value"), ("humanoid_cut_off.csv", "return")):
        with (study / name).open() as file:
            own = [row for row in csv.DictReader(file) if row["experiment"] == "sac_continuous"]
        runs.append([(row["task"], int(row["step"]), float(row[column])) for row in own])
    rows_of_steps = dict(re.findall(r"^\| (\w+-v5) \| (\d+,000) \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    rows = rows_of(ROOT / "README.md", "Results: SAC")
    assert len(rows) == 5
    for task, triples in rows:
        steps = int(rows_of_steps[task].replace(",", ""))
        by_file = [[value for *key, value in file_runs if key == [task, steps]] for file_runs in runs]
        (ours,) = [values for values in by_file if len(values) == 3]
        near = [x for x in points if x["env"] == task.split("-")[0] and abs(int(x["env_steps"]) - steps) < 5_000]
        (published,) = [interval(float(x["mean"]), float(x["std"]), int(x["seeds"])) for x in near]
        assert triples == {interval(float(np.mean(ours)), float(np.std(ours, ddof=1)), 3), published}, task
