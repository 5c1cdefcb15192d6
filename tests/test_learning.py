"""Both algorithms solve Pendulum-v1 from the README's commands: a mean return above -200 (a random policy has about -1,200)."""

import re
from pathlib import Path

import pytest
import tyro
from conftest import Train

import ppo_continuous
import sac_continuous

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.parametrize("script", [sac_continuous, ppo_continuous], ids=["sac", "ppo"])
def test_pendulum(script, train: Train, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    """The command is read from the README, so that the two cannot part."""
    (words,) = re.findall(rf"python {script.__name__}\.py (--env-id Pendulum-v1 .*)$", README, re.MULTILINE)
    script.main(tyro.cli(script.Args, args=[*words.split(), "--no-cuda"]))
    (mean,) = re.findall(r"^evaluation: return (\S+)", capsys.readouterr().out, re.MULTILINE)
    assert float(mean) > -200
