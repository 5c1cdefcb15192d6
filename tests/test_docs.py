"""The pages for readers: every relative link leads to a file, every anchor to a heading, and the README stays short."""

import re
import subprocess
from pathlib import Path

import pytest

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
