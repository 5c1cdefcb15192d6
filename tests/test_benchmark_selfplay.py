"""The tables of self-play runs, from runs of a few steps."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import Train
from torch.utils.tensorboard import SummaryWriter

import ppo_selfplay
from benchmark import sumo_habits
from benchmark.runs import Run, read_curves
from benchmark.selfplay import (
    Exploitability,
    Scores,
    Versus,
    by_experiment,
    check_one_game,
    first_times,
    print_exploitability,
    print_scores,
    print_versus,
)


def copy_as(run: Path, name: str, **overrides: Any) -> Path:
    """The same run, with other arguments."""
    copy = shutil.copytree(run, run.with_name(name))
    run_args = json.loads((copy / "args.json").read_text()) | overrides
    (copy / "args.json").write_text(json.dumps(run_args))
    return copy


def write_run(folder: Path, **overrides: Any) -> Path:
    """A run of 100 steps whose last evaluation is at step 100."""
    run_args = {"save_steps": 1, "env_id": "sumo", "env_kwargs": "{}", "teams": None, "symmetric": None, "seed": 1}
    run_args |= {"norm_obs": True, "exp_name": "one", "total_timesteps": 100, "cuda": False}
    run_args["script"] = "ppo_selfplay.py"
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps(run_args | overrides))
    with SummaryWriter(str(folder)) as writer:
        writer.add_scalar("eval/sumo_score_vs_random", 0.5, 100)
    return folder


@pytest.mark.slow
def test_versus_itself_is_a_draw(
    selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likeliest actions, so no noise; paired starts, swapped sides: a policy takes half of the points from itself."""
    run = train_selfplay(selfplay)
    runs = [run, copy_as(run, "copy", exp_name="copy"), copy_as(run, "cut", total_timesteps=9999)]
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
    """A best response for each run and policy. Other runs in the file, or another budget, are not mixed in."""
    runs = [train_selfplay(ppo_selfplay, seed=seed, total_timesteps=256) for seed in (1, 2)]
    cut = copy_as(runs[0], "cut", total_timesteps=9999)
    run_args = json.loads((runs[0] / "args.json").read_text())
    (runs[0] / "args.json").write_text(json.dumps(run_args | {"capture_video": True}))
    args = Exploitability([*runs, cut], tmp_path / "beaten.csv", steps=128, policies=("last", "uniform"), games=4)
    print_exploitability(args)
    assert not (runs[0] / "videos").exists()
    lines = capsys.readouterr().out.splitlines()
    rows = list(csv.DictReader(args.csv.open()))
    assert [(row["run"], row["policy"], row["steps"], row["behavior"]) for row in rows] == [
        (run.name, policy, "128", "sumo") for policy in ("last", "uniform") for run in runs
    ]
    assert len(list(Path("runs").iterdir())) == 7
    for number, policy in enumerate(args.policies):
        scores = [float(row["score"]) for row in rows if row["policy"] == policy]
        assert lines[-1].split(" | ")[2 + number].startswith(f"{sum(scores) / 2:.2f} [")
    content = args.csv.read_text()
    older, longer = (content.splitlines()[1].split(",") for _ in range(2))
    older[1], older[6], longer[3], longer[6] = "older", "9", "256", "9"
    args.csv.write_text(content + "".join(f"{','.join(row)}\n" for row in (older, longer)))
    print_exploitability(args)
    assert capsys.readouterr().out.splitlines()[-1] == lines[-1]
    assert len(list(Path("runs").iterdir())) == 7
    own = replace(args, weights="own", policies=("last",), runs=runs[:1])
    print_exploitability(own)
    assert list(csv.DictReader(args.csv.open()))[-1]["weights"] == "own"
    starts = [json.loads((run / "args.json").read_text())["initialize_from"] for run in Path("runs").iterdir()]
    assert [start for start in starts if start is not None] == [str(runs[0])]
    print_exploitability(own)
    assert len(list(Path("runs").iterdir())) == 8
    table = "experiment,run,game,score,untrained,first_seconds,first_step,commit\n"
    for other in (content.replace(",128,", ","), table):
        args.csv.write_text(other)
        with pytest.raises(SystemExit, match="2"):
            print_exploitability(args)
        assert capsys.readouterr().err.startswith("error: --csv takes a new file, or one with the columns experiment, ")


def test_the_first_time_above_a_threshold(tmp_path: Path) -> None:
    """Not the last one, nor one that equals the threshold; players without a threshold, or never beaten, have none."""
    scores = {"charge": (0.5, 0.7, 0.9, 0.1, 0.95), "centre": (0.1, 0.2, 0.3, 0.4, 0.5), "x": (1.0, 1.0, 1.0, 1.0, 1.0)}
    writer = SummaryWriter(str(tmp_path))
    for name, values in scores.items():
        for i, value in enumerate(values):
            writer.add_scalar(f"eval/sumo_score_vs_{name}", value, 100 * i, walltime=1e9 + 10 * i)
    writer.close()
    curve = read_curves(tmp_path)["eval/sumo_score_vs_charge"]
    run = Run(tmp_path, "sumo", "ppo", 1, 1, "finished", read_curves(tmp_path), {})
    assert first_times(run) == {"eval/sumo_score_vs_charge": (curve[2, 1], 200)}


def test_what_is_not_finished_is_left_out_and_what_differs_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the table; where nothing is finished there is no table."""
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=2, gamma=0.5)]
    runs += [write_run(tmp_path / "c", exp_name="two", cuda=True)]
    cut = [write_run(tmp_path / name, total_timesteps=200) for name in "de"]
    groups = by_experiment([*cut, *runs])
    assert {name: [run.folder for run in group] for name, group in groups.items()} == {"one": runs[:2], "two": runs[2:]}
    assert capsys.readouterr().out.split("\n\n") == [
        "- Left out, 2 of 5 runs: d (unfinished), e (unfinished).",
        "- **Not of one kind**: --gamma is not a flag in a, 0.5 in b.",
        "- **Devices mixed**: one: 2 on cpu; two: 1 on unknown.",
        "",
    ]
    with pytest.raises(SystemExit, match="2"):
        by_experiment(cut)
    error = "error: RUNS takes finished runs of self-play, and none of these 2 is finished\n"
    assert capsys.readouterr().err == error
    with pytest.raises(SystemExit, match="2"):
        by_experiment([runs[0], write_run(tmp_path / "f")])
    assert capsys.readouterr().err.startswith("error: RUNS takes each seed of an experiment once, and ")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (None, "RUNS takes runs of two experiments or more, and these are of one"),
        ({"save_steps": "none"}, "RUNS takes run folders of self-play, and {run} is none"),
        ({"env_kwargs": '{"actions": "discrete"}'}, "RUNS takes runs of one --env-kwargs, and "),
        ({"script": "sac_selfplay.py"}, "RUNS takes runs of one script, and "),
    ],
)
def test_bad_sets(
    other: dict[str, Any] | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence on standard error, and exit status 2."""
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=2, **other or {})]
    for experiment, tabulate in (("one", print_scores), ("two", print_versus)):
        if other is None and tabulate is print_scores:
            continue
        second = json.loads((runs[1] / "args.json").read_text()) | {"exp_name": experiment}
        if other == {"save_steps": "none"}:
            second.pop("save_steps", None)
        (runs[1] / "args.json").write_text(json.dumps(second))
        args: Any = (Scores if tabulate is print_scores else Versus)(runs=runs[:1] if other is None else runs)
        with pytest.raises(SystemExit, match="2"):
            tabulate(args)
        error = capsys.readouterr().err
        assert error.startswith(f"error: {message.format(run=runs[1])}")
        assert error.count("\n") == 1


def test_one_game_in_two_spellings(tmp_path: Path) -> None:
    """--env-kwargs and --teams are JSON: spaces and the order of their keys make no other game."""
    one = write_run(tmp_path / "one", env_kwargs='{"a": 1, "b": 2}', teams='{"red": ["x"]}')
    check_one_game([one, write_run(tmp_path / "two", env_kwargs='{"b":2,"a":1}', teams='{"red":["x"]}')])


@pytest.mark.slow
def test_scores(selfplay: ModuleType, train_selfplay: Train, tmp_path: Path) -> None:
    """A row a run and scripted player; the untrained score is that of the first snapshot, and so of a run without
    learning.
    """
    rates = ("learning_rate",) if selfplay.__name__ == "ppo_selfplay" else ("policy_lr", "q_lr", "alpha_lr")
    frozen = dict.fromkeys(rates, 0.0) | {"norm_obs": False}
    runs = [train_selfplay(selfplay, seed=1, **frozen), train_selfplay(selfplay, seed=2, **frozen)]
    cut = copy_as(runs[0], "cut", total_timesteps=9999)
    later = copy_as(runs[1], "sumo_later", seed=3, exp_name="later", initialize_from=str(runs[0]))
    print_scores(Scores(runs=[*runs, cut, later], games=20, csv=tmp_path / "scores.csv"))
    rows = list(csv.DictReader((tmp_path / "scores.csv").open()))
    assert [row["game"] for row in rows] == 3 * [f"sumo vs {name}" for name in ("random", "charge", "centre")]
    assert [row["run"] for row in rows] == 3 * [runs[0].name] + 3 * [runs[1].name] + 3 * [later.name]
    assert all(row["score"] == row["untrained"] for row in rows[:6])
    assert all(row["untrained"] == "nan" for row in rows[6:])  # its first policy is another run's, and trained
    assert {row["commit"] for row in rows} == {""}  # these runs are of no sweep


def test_the_study_with_box_actions_can_be_made_again(tmp_path: Path) -> None:
    """Its script asks for what its page says: four sweeps of three seeds, and a file in the study's folder."""
    script, study = tmp_path / "benchmark/selfplay_runs.sh", tmp_path / "benchmark/results/selfplay_builds"
    study.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[1] / "benchmark/selfplay_runs.sh", script)
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" >> words\ntouch box.csv\n')
    (tmp_path / "python").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", str(script), "builds_box"], cwd=tmp_path, env=os.environ | {"PATH": path}, check=True)
    *sweeps, last = (tmp_path / "words").read_text().splitlines()
    rules = ["", " --play-against-latest-model-ratio 1", " --opponent-sampling uniform"]
    rules.append(f"{rules[-1]} --newest-share 0.5")
    flags = " --env-ids builds --seeds 1 2 3 --workers 2 -- --eval-freq 250000 --eval-games 200 --no-cuda"
    assert [line.partition(" --env-ids")[2] for line in sweeps] == [
        f"{flags} --total-timesteps 3000000{rule}".partition(" --env-ids")[2] for rule in rules
    ]
    assert last.startswith("-m benchmark.selfplay exploitability sweeps/ppo_box_")
    assert (study / "box.csv").exists()


@pytest.mark.parametrize("flag", ["--games", "--steps"])
def test_numbers_below_one_are_refused(flag: str, tmp_path: Path) -> None:
    """Without games there are no scores; without steps the run's own table would be played again."""
    words = ["-m", "benchmark.selfplay", "exploitability", "run", "--csv", str(tmp_path / "scores.csv"), flag, "0"]
    done = subprocess.run(
        [sys.executable, *words], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, f"error: {flag} takes a number from 1, not 0\n")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a picture."""
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\xff\n")
    with pytest.raises(SystemExit, match="2"):
        print_exploitability(Exploitability([], csv=path))
    assert capsys.readouterr().err.startswith("error: --csv takes a new file, or one with the columns")


@pytest.mark.slow
def test_the_habits_of_two_runs(train_selfplay: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """A table for two runs of sumo; one sentence for a game of two policies."""
    runs = [train_selfplay(ppo_selfplay, env_id="sumo", seed=seed) for seed in (1, 2)]
    capsys.readouterr()
    sumo_habits.main(runs[0], runs[1], games=4)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"score [01]\.\d{3} against [01]\.\d{3}; \d+% draws; \d+ steps", lines[0])
    assert [line.split(":")[0] for line in lines if "wins" in line] == [str(run) for run in runs]
    apart = train_selfplay(ppo_selfplay, env_id="sumo", symmetric="no")
    with pytest.raises(SystemExit, match="2"):
        sumo_habits.main(apart, apart, games=4)
    takes = "FIRST and SECOND take runs of sumo in which both sides share a policy"
    assert capsys.readouterr().err.endswith(f"error: {takes}, and {apart} is none\n")
