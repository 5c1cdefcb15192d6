"""The table of mutants fits the code: see tests/mutants.py."""

import pytest
from mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{i}" for i in range(1, len(MUTANTS) + 1)])
def test_mutants_fit_the_code(mutant: Mutant) -> None:
    """Each old text occurs exactly once, and each named test is there."""
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
    for test in mutant.tests.split():
        file, _, function = test.partition("::")
        assert f"def {function}" in (ROOT / file).read_text()
