"""The tables of self-play runs, from runs of a few steps."""

import csv
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import Train

from benchmark.selfplay import Scores, Versus, interval, print_scores, print_versus


def test_interval() -> None:
    """Equal runs leave no doubt; for many normal runs it is the mean and 1.96 standard errors on either side."""
    assert interval(np.full((3, 2), 0.25)) == "0.250 [0.250, 0.250]"
    values = np.random.default_rng(1).normal(0.5, 0.1, 400)
    mean, low, high = (float(word.strip("[],")) for word in interval(values).split())
    error = 1.96 * values.std() / 20
    assert [mean, low, high] == pytest.approx([values.mean(), values.mean() - error, values.mean() + error], abs=0.002)


def test_versus_itself_is_a_draw(
    selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likeliest actions, so no noise; paired starts, swapped sides: a policy takes exactly half of the points from itself."""
    run = train_selfplay(selfplay)
    monkeypatch.delattr(selfplay.Agent, "noise")
    print_versus(Versus(runs=[run], against=[run], games=6, csv=run / "versus.csv"))
    assert capsys.readouterr().out.splitlines()[-1].startswith("sumo: 0.500 [0.500, 0.500] over 1 x 1 pairs of runs")
    assert list(csv.reader((run / "versus.csv").open()))[1:] == [["sumo", run.name, run.name, "0.5000"]]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (None, "--runs and --against take run folders of self-play, one or more each"),
        ({}, "RUNS takes run folders of self-play, and {run} is none"),
        ({"env_kwargs": {"actions": "discrete"}}, "RUNS takes runs of one --env-kwargs, and "),
        ({"buffer_size": 5}, "RUNS takes runs of one script, and "),
    ],
)
def test_bad_sets(
    other: dict[str, Any] | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence on standard error, and exit status 2."""
    shared = {"save_steps": 1, "env_id": "sumo", "env_kwargs": {}, "teams": None, "symmetric": None, "norm_obs": True}
    runs = [tmp_path / "a", tmp_path / "b"]
    for run, run_args in zip(runs, (shared, shared | other if other else {}), strict=True):
        run.mkdir()
        (run / "args.json").write_text(json.dumps(run_args))
    with pytest.raises(SystemExit, match="2"):
        print_versus(Versus(runs=runs[:1], against=[] if other is None else runs[1:]))
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message.format(run=runs[1])}")
    assert error.count("\n") == 1
    if other is not None:
        with pytest.raises(SystemExit, match="2"):
            print_scores(Scores(runs=runs))
        assert capsys.readouterr().err == error


def test_scores(selfplay: ModuleType, train_selfplay: Train, tmp_path: Path) -> None:
    """A row a run and scripted player; the untrained score is that of the first snapshot, and so of a run without learning."""
    rates = ("learning_rate",) if selfplay.__name__ == "ppo_selfplay" else ("policy_lr", "q_lr", "alpha_lr")
    frozen = dict.fromkeys(rates, 0.0) | {"norm_obs": False}
    runs = [train_selfplay(selfplay, seed=1, **frozen), train_selfplay(selfplay, seed=2, **frozen)]
    print_scores(Scores(runs=runs, games=20, csv=tmp_path / "scores.csv"))
    rows = list(csv.DictReader((tmp_path / "scores.csv").open()))
    assert [row["game"] for row in rows] == 2 * [f"sumo vs {name}" for name in ("random", "charge", "centre")]
    assert [row["run"] for row in rows] == 3 * [runs[0].name] + 3 * [runs[1].name]
    assert all(row["score"] == row["untrained"] for row in rows)
