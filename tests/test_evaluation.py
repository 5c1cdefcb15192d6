"""Evaluation in self-play: scores, the table of snapshots, --evaluate and --against, and what a fault there costs."""

import os
import random
import re
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Train
from test_cross_play import HUNT, Contest, Fighter, Maker, make_table, policy

from utils import cross_play, evaluation
from utils.cross_play import Player
from utils.evaluation import report_table, score_policies, snapshot_table
from utils.run import parse_args, read_file
from utils.snapshot_pool import SnapshotPool
from utils.team_env import TeamStep


class Warrior(Fighter):
    """A fighter of the strength 500."""

    def __init__(self, strength: float = 500.0) -> None:
        super().__init__()
        self.strength.data.fill_(strength)

    def acting_weights(self) -> dict[str, torch.Tensor]:
        """What a snapshot holds."""
        return dict(self.state_dict())


class Arena(Maker):
    """Makes contests that may be rendered."""

    def __call__(self, num_games: int, render: bool = False) -> Contest:
        """A contest of that many games."""
        return super().__call__(num_games)


WARRIORS = {"hunter": Warrior(), "prey": Warrior()}

# --- scores and table, with strengths that are known ---


def test_scores_of_each_behavior_against_each_scripted_player() -> None:
    """Strengths 0 (random), 1000 (strong) and -1000 (weak) against 500."""
    arena = Arena(HUNT)
    scores = score_policies(arena, WARRIORS, 6, 3, deterministic=True)
    assert scores == {
        "eval/hunter_score_vs_random": 1.0,
        "eval/hunter_score_vs_weak": 1.0,
        "eval/prey_score_vs_random": 1.0,
        "eval/prey_score_vs_strong": 0.0,
    }
    assert all(contest.closed for contest in arena.made)
    assert len(arena.record()) == 4 * 6


def test_scores_with_and_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most likely actions take no noise; sampled ones do, and depend on the seed alone."""
    arena = Arena(HUNT)
    warriors = {"hunter": Warrior(0.5), "prey": Warrior(0.5)}  # the noise of a fighter has the standard deviation 10
    first, again, other = (score_policies(arena, warriors, 40, seed, deterministic=False) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert 0.2 < first["eval/prey_score_vs_random"] < 0.8
    monkeypatch.delattr(Fighter, "noise")
    assert score_policies(arena, warriors, 40, 1, deterministic=True)["eval/prey_score_vs_random"] == 1.0


def test_a_game_that_draws_from_global_streams_changes_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go on afterwards as if there had been no evaluation."""

    draws = random.random, np.random.random, lambda: torch.rand(1).item()
    step = Contest.step

    def noisy_step(contest: Contest, actions: list[np.ndarray]) -> TeamStep:
        _ = [draw() for draw in draws]
        return step(contest, actions)

    def seed_all() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    monkeypatch.setattr(Contest, "step", noisy_step)
    seed_all()
    expected = [draw() for draw in draws]
    seed_all()
    score_policies(Arena(HUNT), WARRIORS, 6, 3, deterministic=True)
    assert [draw() for draw in draws] == expected


def test_videos_are_of_the_best_scripted_players(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For each behaviour one game, against the player that it scores least against."""
    recorded: list[tuple[str, str]] = []

    def record(env: Any, agents: Any, first: Player, second: Player, *rest: Any) -> None:
        assert rest == (3, True, tmp_path)
        recorded.append((first.behavior, second.name))

    monkeypatch.setattr(evaluation, "record_video", record)
    score_policies(Arena(HUNT), {"hunter": Warrior(-2000.0), "prey": Warrior()}, 6, 3, True, tmp_path)
    assert recorded == [("hunter", "random"), ("prey", "strong")]


def test_nothing_else_is_open_when_a_video_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last environment that closes takes the window system of some games with it."""
    monkeypatch.setattr(cross_play, "write_video", lambda *_: None)
    arena, rendered = Arena(HUNT), []

    def make_games(num_games: int, render: bool = False) -> Any:
        rendered.append(render)
        assert not render or all(contest.closed for contest in arena.made)
        return arena(num_games)

    score_policies(make_games, {"hunter": Warrior(-2000.0), "prey": Warrior()}, 6, 3, True, tmp_path)
    assert rendered[-2:] == [True, True]
    assert all(contest.closed for contest in arena.made)


@pytest.mark.parametrize(
    ("num_snapshots", "steps"), [(1, [90]), (2, [0, 90]), (4, [0, 30, 60, 90]), (10, range(0, 91, 10)), (99, None)]
)
def test_snapshots_in_the_table(num_snapshots: int, steps: Any) -> None:
    """Evenly spaced, oldest first, the last one always; none twice; beside the scripted players."""
    pools = {behavior: SnapshotPool(50, 0.5, "uniform", np.random.default_rng(0)) for behavior in WARRIORS}
    for step in range(0, 91, 10):
        pools["hunter"].add({"strength": torch.tensor(2.0 * step + 1)}, step, 1200.0)
    pools["prey"].add({"strength": torch.tensor(100.0)}, 7, 1200.0)
    table = snapshot_table(Arena(HUNT), WARRIORS, pools, num_snapshots, 200, 0)
    names = ["hunter random", "hunter strong", "prey random", "prey weak"]
    names += [f"hunter step {step}" for step in (range(0, 91, 10) if steps is None else steps)]
    assert table.labels == [*names, "prey step 7"]
    against_prey = dict(zip(table.labels, table.scores[:, -1].mean(axis=1), strict=True))
    assert against_prey["hunter step 90"] == 1.0  # 181 against 100: noise does not change who wins
    assert 0.5 < against_prey.get("hunter step 50", 0.6) < 0.95  # 101 against 100: noise does


def test_a_table_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is printed, a warning says why it is not in the folder, and the run goes on."""
    run: Any = SimpleNamespace(folder=tmp_path / "gone")
    report_table(run.folder, make_table([[np.nan, 0.25], [0.75, np.nan]], [policy(1), policy(2)]), run)
    captured = capsys.readouterr()
    assert "the last snapshot scores 0.75 on average" in captured.out
    assert captured.err.startswith(f"warning: not all of the table is in {run.folder}: [Errno 2]")


# --- the end of a run ---


def saved_facts(folder: Path) -> tuple[int, bool]:
    """Step and whether it is finished, of the checkpoint; the model must be whole."""
    read_file(folder / "model.pt")
    checkpoint = read_file(folder / "checkpoint.pt")
    return checkpoint["global_step"], checkpoint["is_finished"]


@pytest.mark.slow
def test_all_is_saved_before_the_final_evaluation(
    selfplay: ModuleType, train_selfplay: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model and checkpoint are on disk before it and before the table, and the model is that of the end."""
    facts: list[tuple[int, bool]] = []
    evaluate, table = selfplay.evaluate, evaluation.snapshot_table

    def spy_evaluate(agents: Any, *args: Any) -> Any:
        (folder,) = (tmp_path / "runs").iterdir()
        facts.append(saved_facts(folder))
        saved = torch.load(folder / "model.pt", weights_only=True)["sumo_agent"]
        assert all(torch.equal(value, saved[name]) for name, value in agents["sumo"].state_dict().items())
        return evaluate(agents, *args)

    def spy_table(*args: Any) -> Any:
        facts.append(saved_facts(next((tmp_path / "runs").iterdir())))
        return table(*args)

    monkeypatch.setattr(selfplay, "evaluate", spy_evaluate)
    monkeypatch.setattr(evaluation, "snapshot_table", spy_table)
    folder = train_selfplay(selfplay, cross_play_games=2, cross_play_snapshots=2)
    assert facts == [(512, False), (512, False)]
    assert saved_facts(folder) == (512, True)


@pytest.mark.slow
def test_a_missing_matplotlib_costs_a_warning(
    selfplay: ModuleType, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends well, with the table printed and in its CSV file; so does --evaluate."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    folder = train_selfplay(selfplay, cross_play_games=2, cross_play_snapshots=2)
    for _ in range(2):
        captured = capsys.readouterr()
        assert captured.err.startswith(f"warning: not all of the table is in {folder.relative_to(Path.cwd())}: ")
        assert "matplotlib" in captured.err
        assert captured.err.count("\n") == 1
        assert "cross-play, sampled actions: score of row against column" in captured.out
        assert (folder / "cross_play.csv").exists()
        (folder / "cross_play.csv").unlink()
        selfplay.main(parse_args(selfplay.Args, ["--evaluate", str(folder.relative_to(Path.cwd()))]))
    assert not (folder / "cross_play.png").exists()
    assert saved_facts(folder) == (512, True)


@pytest.mark.slow
def test_ctrl_c_in_the_final_evaluation(
    selfplay: ModuleType,
    train_selfplay: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ends at once with the status 130, the model can be played, and --resume makes up for the evaluation."""
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(selfplay, "evaluate", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(SystemExit) as exit_info:
            train_selfplay(selfplay, save_steps=10**6)  # so that only the final snapshot is taken
    assert exit_info.value.code == 130
    captured = capsys.readouterr()
    assert "stopped by signal 2 after step 512" in captured.out
    assert captured.err.startswith("warning: --save-steps 1,000,000 takes no snapshot ")
    assert captured.err.count("\n") == 1
    (folder,) = (tmp_path / "runs").iterdir()
    assert saved_facts(folder) == (512, False)
    agents, pools, _ = selfplay.load_run(folder, "--evaluate")
    for behavior, pool in pools.items():  # the final policy is in the pool, although no evaluation has come to its end
        weights = agents[behavior].acting_weights()
        assert all(x.equal(pool.latest.weights[name]) for name, x in weights.items())
        assert pool.latest.step > 0
    assert run_evaluation(selfplay, capsys, folder).startswith("scores: ")
    selfplay.main(parse_args(selfplay.Args, ["--resume", str(folder)]))
    assert "\nscores: sumo against random" in capsys.readouterr().out
    assert saved_facts(folder) == (512, True)
    signal.signal(signal.SIGINT, before)


# --- --evaluate ---


def test_a_run_that_was_stopped_is_told(
    selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its newest snapshot is older than its last policy. `--initialize-from` takes the last policy."""
    folder = train_selfplay(selfplay)
    capsys.readouterr()
    selfplay.load_run(folder, "--evaluate")
    assert capsys.readouterr().err == ""
    saved = torch.load(folder / "model.pt", weights_only=True)
    del saved["sumo_pool"][1:]
    torch.save(saved, folder / "model.pt")
    selfplay.load_run(folder, "--initialize-from")
    assert capsys.readouterr().err == ""
    selfplay.load_run(folder, "--evaluate")
    assert "sumo plays its snapshot of step 0, which is older than its last policy" in capsys.readouterr().err


def run_evaluation(script: ModuleType, capsys: pytest.CaptureFixture[str], folder: Path, **flags: Any) -> str:
    """What `--evaluate` prints."""
    capsys.readouterr()
    words = ["--evaluate", str(folder)]
    for name, value in ({"eval_games": 4, "cross_play_games": 2} | flags).items():
        flag = name.replace("_", "-")
        words += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    script.main(parse_args(script.Args, words))
    return capsys.readouterr().out


def scores_line(text: str) -> str:
    """The evaluation that was printed."""
    (line,) = re.findall(r"^scores: .*$", text, re.MULTILINE)
    return line


@pytest.mark.slow
def test_each_number_says_what_it_is(
    selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose score, against whom, by which actions, and its range; the training has an Elo, the table has ratings."""
    folder = train_selfplay(selfplay, cross_play_games=2)
    trained = capsys.readouterr().out
    for text in (trained, run_evaluation(selfplay, capsys, folder)):
        number = r"[01]\.\d\d"
        against = ", ".join(f"sumo against {name} {number}" for name in ("random", "charge", "centre"))
        line = scores_line(text).removeprefix("scores: ")
        found = re.match(rf"(?:training Elo sumo \d+, )?{against}(.*)", line)
        assert found, line
        assert found[1] == " (most likely actions; means from 0 to 1: a win is 1, a draw 0.5)"
        table = "cross-play, sampled actions: score of row against column in percent; steps are learner steps; "
        assert f"\n{table}ratings are fitted to this table, with mean 1200; the training Elo is another scale\n" in text
        means = rf"{number} on average against older ones, {number} in the worst case"
        last = rf"^sumo: the last snapshot scores {means} \(sampled actions; from 0 to 1: a win is 1, a draw 0.5\)$"
        assert re.search(last, text, re.MULTILINE)
    for flags, actions in (({}, "most likely"), ({"deterministic": False}, "sampled")):
        text = run_evaluation(selfplay, capsys, folder, **flags)
        assert f"({actions} actions; means from" in scores_line(text)
        assert "\ncross-play, sampled actions: " in text  # as snapshots have met each other
        text = run_evaluation(selfplay, capsys, folder, against="charge", **flags)
        assert text.endswith(f"from 2 seeds, {actions} actions\n")


@pytest.mark.slow
def test_evaluation_prints_what_the_training_printed(
    selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores and table, with normalisation, again and again; other games give other numbers."""
    folder = train_selfplay(selfplay, norm_obs=True, eval_games=4, cross_play_games=2, window=2)
    trained = capsys.readouterr().out
    model, evaluate = (folder / "model.pt").read_bytes(), partial(run_evaluation, selfplay, capsys, folder)
    printed = evaluate()
    assert scores_line(printed) == scores_line(trained)
    assert printed[printed.index("cross-play") :] in trained
    assert evaluate() == printed
    assert "cross-play" not in evaluate(cross_play_games=0)
    changes: list[dict[str, Any]] = [{}, {"seed": 7}, {"deterministic": False}]
    assert len({evaluate(against="random", eval_games=200, **change) for change in changes}) == 3
    assert (folder / "model.pt").read_bytes() == model


def test_statistics_are_part_of_the_model(selfplay: ModuleType, train_selfplay: Train) -> None:
    """A loaded policy normalises by what was saved: against the network alone, fed by hand."""
    folder = train_selfplay(selfplay, norm_obs=True, total_timesteps=128)
    agents, pools, _ = selfplay.load_run(folder, "--evaluate")
    weights = torch.load(folder / "model.pt", weights_only=True)["sumo_agent"]
    obs = np.linspace(-1, 1, 22, dtype=np.float32).reshape(2, 11)
    by_hand = (obs - weights["obs_rms.mean"].numpy()) / np.sqrt(weights["obs_rms.var"].numpy() + 1e-8)
    expected = agents["sumo"].actor(torch.as_tensor(by_hand.clip(-10, 10), dtype=torch.float32))
    torch.testing.assert_close(agents["sumo"](torch.as_tensor(obs)), expected)
    assert not torch.allclose(agents["sumo"].actor(torch.as_tensor(obs)), expected)
    assert torch.equal(pools["sumo"].latest.weights["obs_rms.mean"], weights["obs_rms.mean"])


@pytest.mark.slow
def test_against(selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """A scripted player, another run, and itself: what one run takes from another, the other loses."""
    one, other = train_selfplay(selfplay), train_selfplay(selfplay, seed=2, total_timesteps=128)
    results = {}
    for first, second in ((one, "random"), (one, "charge"), (one, str(other)), (other, str(one)), (one, str(one))):
        line = run_evaluation(selfplay, capsys, first, against=second, eval_games=40)
        number = r"(\d\.\d{3})"
        whom = r"(?:the scripted sumo player (?=random|charge)|sumo of (?=/|runs))(.*)"
        score = rf"score {number}, 95% interval \[{number}, {number}\], from 20 seeds, most likely actions\n"
        found = re.fullmatch(rf"sumo of (.*) against {whom}: {score}", line)
        assert found
        assert found.groups()[:2] == (str(first), second)
        mean, low, high = map(float, found.groups()[2:])
        assert 0 <= low <= mean <= high <= 1
        results[first.name, Path(second).name] = mean
    assert results[one.name, "charge"] < 0.3  # untrained policies wander about
    # Most likely actions and the same seeds on both sides: the games are the same ones.
    assert results[one.name, other.name] + results[other.name, one.name] == pytest.approx(1.0, abs=0.0011)
    assert results[one.name, one.name] == 0.5


@pytest.mark.slow
def test_against_in_an_asymmetric_game(
    selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each role of the one run plays the other role of the other."""
    one, other = (train_selfplay(selfplay, env_id="pursuit", total_timesteps=128, seed=seed) for seed in (1, 2))
    evaluate = partial(run_evaluation, selfplay, capsys, one)
    heads = [re.sub(r" of \S+", "", line.split(":")[0]) for line in evaluate(against=str(other)).splitlines()]
    assert heads == ["pursuers against evader", "evader against pursuers"]
    (line,) = evaluate(against="chase").splitlines()
    assert line.startswith("evader of")
    assert re.match(r"scores: pursuers against random .*, evader against chase", evaluate())


@pytest.mark.parametrize("flag", ["resume", "evaluate", "against"])
def test_another_scripts_run_is_named(
    selfplay: ModuleType, flag: str, train_selfplay: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """PPO cannot go on with SAC's run, and says whose it is."""
    names = ["ppo_selfplay", "sac_selfplay"]
    names.remove(selfplay.__name__)
    foreign = sys.modules[names[0]]
    theirs = train_selfplay(foreign, total_timesteps=128)
    words = [f"--{flag}", str(theirs)]
    if flag == "against":
        words += ["--evaluate", str(train_selfplay(selfplay, total_timesteps=128))]
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        selfplay.main(parse_args(selfplay.Args, words))
    sentence = f"--{flag} takes a run of {selfplay.__name__}.py, and {theirs} is a run of {foreign.__name__}.py"
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_one_flipped_byte(
    selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Wherever in a weight of model.pt it is: --evaluate and --against refuse the file."""
    good = train_selfplay(selfplay, total_timesteps=128)
    bad = tmp_path / "bad"
    shutil.copytree(good, bad)
    whole = (good / "model.pt").read_bytes()
    weights = torch.load(good / "model.pt", weights_only=True)["sumo_agent"]
    name = "actor.mean.4.bias" if selfplay.__name__ == "ppo_selfplay" else "actor.net.4.bias"
    for place in (whole.index(weights[name].numpy().tobytes()), len(whole) // 2):
        (bad / "model.pt").write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        for flag, words in (("evaluate", [str(bad)]), ("against", [str(bad), "--evaluate", str(good)])):
            capsys.readouterr()
            with pytest.raises(SystemExit, match="2"):
                selfplay.main(parse_args(selfplay.Args, [f"--{flag}", *words]))
            sentence = f"--{flag} takes a run folder with a valid model.pt of this script, and {bad} has none"
            assert capsys.readouterr().err == f"error: {sentence} (ValueError: wrong checksum)\n"
