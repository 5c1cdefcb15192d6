"""Both algorithms solve Pendulum-v1: the README's commands reach a return near -150; a random policy has -1,200."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from conftest import Train

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pendulum(script: ModuleType, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """The command is read from the README, so that both stay the same."""
    words, *_ = re.findall(
        rf"python {script.__name__}\.py (--env-id Pendulum-v1 .*--total-timesteps.*)$", README, re.MULTILINE
    )
    script.main(script.parse_args(script.Args, [*words.split(), "--no-cuda", "--no-compile"]))
    (mean,) = re.findall(r"^evaluation: return (\S+)", capsys.readouterr().out, re.MULTILINE)
    assert float(mean) > -200
