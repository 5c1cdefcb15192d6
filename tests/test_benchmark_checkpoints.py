"""The measurement of what checkpoints cost."""

import re
from pathlib import Path

import pytest

from benchmark.checkpoints import main


@pytest.mark.slow
def test_counts_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every checkpoint is counted, the first and the last one, too, and the size is that of the two files that stay."""
    monkeypatch.chdir(tmp_path)
    flags = "--env-id Pendulum-v1 --num-envs 1 --num-steps 32 --num-minibatches 2 --total-timesteps 320"
    flags += " --checkpoint-freq 64 --no-cuda"
    main("ppo_continuous", *flags.split())
    (line,) = re.findall(r"^\d+ checkpoints, .*$", capsys.readouterr().out, re.MULTILINE)
    (folder,) = (tmp_path / "runs").iterdir()
    assert line.startswith("8 checkpoints, ")  # at the start, five on the way, before and after the final evaluation
    size = sum((folder / name).stat().st_size for name in ("checkpoint.pt", "checkpoint.previous.pt"))
    assert line.endswith(f"; {size / 1e6:.1f} MB on disk")
    seconds, share, total = map(float, re.findall(r"([\d.]+) s in all, ([\d.]+)% of ([\d]+) s", line)[0])
    assert 0.0 < share < 100.0
    assert seconds <= total + 1
