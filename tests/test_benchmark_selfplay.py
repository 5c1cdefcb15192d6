"""The tables of self-play runs, from runs of a few steps."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import Train
from torch.utils.tensorboard import SummaryWriter

import ppo_selfplay
from benchmark.runs import read_curves
from benchmark.selfplay import (
    Exploitability,
    Scores,
    Versus,
    first_times,
    print_exploitability,
    print_scores,
    print_versus,
)


def copy_as(run: Path, exp_name: str) -> Path:
    """The same run, of another experiment."""
    copy = shutil.copytree(run, run.with_name(exp_name))
    run_args = json.loads((copy / "args.json").read_text()) | {"exp_name": exp_name}
    (copy / "args.json").write_text(json.dumps(run_args))
    return copy


@pytest.mark.slow
def test_versus_itself_is_a_draw(
    selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likeliest actions, so no noise; paired starts, swapped sides: a policy takes half of the points from itself."""
    run = train_selfplay(selfplay)
    runs = [run, copy_as(run, "copy")]
    name = json.loads((run / "args.json").read_text())["exp_name"]
    with monkeypatch.context() as patch:
        patch.delattr(selfplay.NormalActor, "noise")
        print_versus(Versus(runs=runs, games=6, actions=("likeliest",), csv=run / "versus.csv"))
    pair = sorted([name, "copy"], key=lambda x: str(run if x == name else runs[1]))
    assert capsys.readouterr().out.splitlines()[-1] == f"| likeliest | {pair[0]} | {pair[1]} | 0.50 |"
    (row,) = csv.DictReader((run / "versus.csv").open())
    assert (row["actions"], row["behavior"], row["score"]) == ("likeliest", "sumo", "0.5000")
    print_versus(Versus(runs=runs, games=6))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[-2:]] == ["likeliest", "sampled"]


@pytest.mark.slow
def test_how_badly_runs_are_beaten(train_selfplay: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A best response for each run and policy. What is in the file already, or of another budget, is not mixed in."""
    runs = [train_selfplay(ppo_selfplay, seed=seed, total_timesteps=256) for seed in (1, 2)]
    args = Exploitability(runs, tmp_path / "beaten.csv", steps=128, policies=("last", "uniform"), games=4)
    print_exploitability(args)
    lines = capsys.readouterr().out.splitlines()
    rows = list(csv.DictReader(args.csv.open()))
    assert [(row["run"], row["policy"], row["steps"], row["behavior"]) for row in rows] == [
        (run.name, policy, "128", "sumo") for policy in ("last", "uniform") for run in runs
    ]
    assert len(list(Path("runs").iterdir())) == 6
    for number, policy in enumerate(args.policies):
        scores = [float(row["score"]) for row in rows if row["policy"] == policy]
        assert lines[-1].split(" | ")[2 + number].startswith(f"{sum(scores) / 2:.2f} [")
    content = args.csv.read_text()
    args.csv.write_text(content + content.splitlines()[1].replace(",128,", ",256,") + "\n")
    print_exploitability(args)
    assert capsys.readouterr().out.splitlines()[-1] == lines[-1]
    assert len(list(Path("runs").iterdir())) == 6
    own = replace(args, weights="own", policies=("last",), runs=runs[:1])
    print_exploitability(own)
    assert list(csv.DictReader(args.csv.open()))[-1]["weights"] == "own"
    starts = [json.loads((run / "args.json").read_text())["initialize_from"] for run in Path("runs").iterdir()]
    assert [start for start in starts if start is not None] == [str(runs[0])]
    print_exploitability(own)
    assert len(list(Path("runs").iterdir())) == 7


def test_the_first_time_above_a_threshold(tmp_path: Path) -> None:
    """Not the last one, nor one that equals the threshold; players without a threshold, or never beaten, have none."""
    scores = {"charge": (0.5, 0.7, 0.9, 0.1, 0.95), "centre": (0.1, 0.2, 0.3, 0.4, 0.5), "x": (1.0, 1.0, 1.0, 1.0, 1.0)}
    writer = SummaryWriter(str(tmp_path))
    for name, values in scores.items():
        for i, value in enumerate(values):
            writer.add_scalar(f"eval/sumo_score_vs_{name}", value, 100 * i, walltime=1e9 + 10 * i)
    writer.close()
    curve = read_curves(tmp_path)["eval/sumo_score_vs_charge"]
    assert first_times(tmp_path) == {"eval/sumo_score_vs_charge": (curve[2, 1], 200)}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (None, "RUNS takes runs of two experiments or more, and these are of one"),
        ({}, "RUNS takes run folders of self-play, and {run} is none"),
        ({"env_kwargs": {"actions": "discrete"}}, "RUNS takes runs of one --env-kwargs, and "),
        ({"buffer_size": 5}, "RUNS takes runs of one script, and "),
    ],
)
def test_bad_sets(
    other: dict[str, Any] | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence on standard error, and exit status 2."""
    shared: dict[str, Any] = {"save_steps": 1, "env_id": "sumo", "env_kwargs": {}, "teams": None, "symmetric": None}
    shared |= {"norm_obs": True, "exp_name": "one"}
    runs = [tmp_path / "a", tmp_path / "b"]
    for run in runs:
        run.mkdir()
    (runs[0] / "args.json").write_text(json.dumps(shared))
    for experiment, tabulate in (("one", print_scores), ("two", print_versus)):
        if other is None and tabulate is print_scores:
            continue
        second = shared | other | {"exp_name": experiment} if other else {}
        (runs[1] / "args.json").write_text(json.dumps(second))
        args: Any = (Scores if tabulate is print_scores else Versus)(runs=runs[:1] if other is None else runs)
        with pytest.raises(SystemExit, match="2"):
            tabulate(args)
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message.format(run=runs[1])}")
        assert error.count("\n") == 1


@pytest.mark.slow
def test_scores(selfplay: ModuleType, train_selfplay: Train, tmp_path: Path) -> None:
    """A row a run and scripted player; the untrained score is that of the first snapshot, and so of a run without
    learning.
    """
    rates = ("learning_rate",) if selfplay.__name__ == "ppo_selfplay" else ("policy_lr", "q_lr", "alpha_lr")
    frozen = dict.fromkeys(rates, 0.0) | {"norm_obs": False}
    runs = [train_selfplay(selfplay, seed=1, **frozen), train_selfplay(selfplay, seed=2, **frozen)]
    print_scores(Scores(runs=runs, games=20, csv=tmp_path / "scores.csv"))
    rows = list(csv.DictReader((tmp_path / "scores.csv").open()))
    assert [row["game"] for row in rows] == 2 * [f"sumo vs {name}" for name in ("random", "charge", "centre")]
    assert [row["run"] for row in rows] == 3 * [runs[0].name] + 3 * [runs[1].name]
    assert all(row["score"] == row["untrained"] for row in rows)
    assert {row["commit"] for row in rows} == {""}  # these runs are of no sweep
