"""The table of mutants fits the code, and what becomes of a mutant is told apart: see tests/mutants.py."""

import re
from pathlib import Path

import mutants
import pytest
from mutants import MUTANTS, ROOT, Mutant, run_tests


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{i}" for i in range(1, len(MUTANTS) + 1)])
def test_mutants_fit_the_code(mutant: Mutant) -> None:
    """Each old text occurs exactly once, and each named test is there."""
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
    for test in mutant.tests.split():
        file, _, function = test.partition("::")
        assert f"def {function}" in (ROOT / file).read_text()


def test_the_page_has_a_row_for_each_mutant() -> None:
    """Files and errors are those of the table, and the tests that noticed them are still there."""
    rows = re.findall(
        r"^\| (\d+) \| `(.+?)` \| (.+?) \| (?:`(.+?)::(.+?)`)?", (ROOT / "docs/tests.md").read_text(), re.MULTILINE
    )
    assert [row[1:3] for row in rows] == [(mutant.file, mutant.summary) for mutant in MUTANTS]
    for number, *_, file, test in rows:
        assert not file or f"def {test}(" in (ROOT / "tests" / file).read_text(), number


@pytest.mark.parametrize(
    ("text", "outcome", "detail"),
    [
        ("def test_x(): pass", "survived", ""),
        ("def test_x(): assert False", "killed", "test_x.py::test_x"),
        ("import pytest\n\n@pytest.fixture\ndef y(): 1 / 0\n\ndef test_x(y): pass", "killed", "test_x.py::test_x"),
        ("import no_such_module", "not judged", "pytest ended with status 2 test_x.py"),
        ("import time\n\ndef test_x(): time.sleep(300)", "not judged", "no end in 3 seconds"),
    ],
    ids=["passes", "fails", "fixture", "collection", "time"],
)
def test_outcomes(text: str, outcome: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a test that fails kills a mutant."""
    if "sleep" in text:
        monkeypatch.setattr(mutants, "TIMEOUT", 3)
    (tmp_path / "test_x.py").write_text(text)
    assert run_tests(["test_x.py"], tmp_path) == (outcome, detail)
