"""Saved policies as opponents: frozen pools, mixtures of snapshots, best responses, Nash weights and circles."""

import csv
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import combinations, permutations
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import Train
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from test_checkpoints import assert_same, everything, kill, only_run, run, start, wait_for, words
from test_cross_play import DUEL, HUNT, Maker, fighters, make_table, policy
from test_matches import DOUBLES, TRIO, Layout, lay_table, make_matches
from test_selfplay_runs import MatrixGame
from toy_policies import OBS_DIM, Mirror, make_pool

import ppo_selfplay
import sac_selfplay
from utils import team_env
from utils.cross_play import Player, maximin, play, play_pairs
from utils.elo import game_scores
from utils.evaluation import check_same_game, load_players, load_rivals, read_mixture, train_response
from utils.matches import CURRENT, Matches
from utils.run import parse_args
from utils.team_env import Team, make_team_env

NAN = math.nan
RESPONSE: dict[str, Any] = {  # how a policy learns that has one number to choose
    "norm_obs": False,
    "norm_reward": False,
    "norm_adv": False,
    "anneal_lr": False,
    "num_games": 256,
    "num_steps": 2,
    "num_minibatches": 1,
    "update_epochs": 8,
    "learning_rate": 3e-2,
}


class Reflection(Mirror):
    """Acts by itself too."""

    def act(self, obs: np.ndarray, masks: np.ndarray, noise: torch.Tensor) -> np.ndarray:
        """(n, 1 + obs_dim + 2)"""
        return self.sample(self(torch.as_tensor(obs)), torch.as_tensor(masks), noise).detach().numpy()


# --- Nash weights and circles ---


@pytest.mark.parametrize("stake", [1.0, 2.0, 5.0])
def test_weights_of_rock_paper_scissors(stake: float) -> None:
    """By hand: rock and scissors 1 / (2 + stake), paper stake / (2 + stake); a dominated fourth row gets nothing."""
    payoff = MatrixGame(1, stake).payoff
    scores = 0.5 + np.vstack([payoff, payoff.min(axis=0) - 0.1]) / 12
    expected = np.array([1.0, stake, 1.0, 0.0]) / (2.0 + stake)
    np.testing.assert_allclose(maximin(scores), expected, atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6))
def test_no_player_can_improve(seed: int, n: int, m: int) -> None:
    """Von Neumann: what the rows are sure to score is what the columns can hold them to."""
    scores = np.random.default_rng(seed).random((n, m))
    rows, columns = maximin(scores), maximin(1.0 - scores.T)
    for shares in (rows, columns):
        assert shares.min() >= 0.0
        assert shares.sum() == pytest.approx(1.0)
    assert (rows @ scores).min() == pytest.approx((scores @ columns).max(), abs=1e-7)


def test_weights_of_a_table() -> None:
    """Scripted players have none. In a game of two roles each role's snapshots face the other role's."""
    circle = [[NAN, 0.0, 0.0, 0.0], [1.0, NAN, 0.9, 0.1], [1.0, 0.1, NAN, 0.9], [1.0, 0.9, 0.1, NAN]]
    players = [Player("random", "disc"), policy(1), policy(2), policy(3)]
    np.testing.assert_allclose(make_table(circle, players).nash_weights(), [NAN, 1 / 3, 1 / 3, 1 / 3], atol=1e-9)
    roles = [[NAN, NAN, 1.0, 0.0], [NAN, NAN, 0.25, 0.5], [0.0, 0.75, NAN, NAN], [1.0, 0.5, NAN, NAN]]
    hunters = [policy(1, "hunter"), policy(2, "hunter"), policy(1, "prey"), policy(2, "prey")]
    # rows p, columns q: p + (1 - p) / 4 = (1 - p) / 2 and q = q / 4 + (1 - q) / 2
    np.testing.assert_allclose(make_table(roles, hunters).nash_weights(), [0.2, 0.8, 0.4, 0.6], atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(2, 7))
def test_circles_by_loops(seed: int, n: int) -> None:
    """Over all triples of policies; scripted players do not count, a draw is no win."""
    rng = np.random.default_rng(seed)
    means = np.full((n + 1, n + 1), NAN)
    for i, j in combinations(range(n + 1), 2):
        means[i, j] = rng.choice([0.0, 0.25, 0.5, 0.75, 1.0])
        means[j, i] = 1.0 - means[i, j]
    table = make_table(means.tolist(), [Player("random", "disc"), *(policy(k) for k in range(n))])
    triples = [
        any(means[i, j] > 0.5 and means[j, k] > 0.5 and means[k, i] > 0.5 for i, j, k in permutations(triple))
        for triple in combinations(range(1, n + 1), 3)
    ]
    assert table.circles() == (sum(triples), len(triples))


def test_report_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights are printed and in the CSV file, with six digits; policies that cannot meet make no circles."""
    circle = [[NAN, 0.0, 1.0], [1.0, NAN, 0.0], [0.0, 1.0, NAN]]
    make_table(circle, [policy(1), policy(2), policy(3)]).report(tmp_path)
    printed = capsys.readouterr().out
    assert "\nNash weights: 1 0.33, 2 0.33, 3 0.33\n" in printed
    assert "\n1 of 1 triples of snapshots form a circle: each beats the next one\n" in printed
    with (tmp_path / "cross_play.csv").open(newline="") as file:
        assert [row["nash_weight"] for row in csv.DictReader(file)] == ["0.333333"] * 3
    roles = [[NAN, 0.25, NAN], [0.75, NAN, 0.5], [NAN, 0.5, NAN]]
    make_table(roles, [policy(1, "hunter"), policy(1, "prey"), policy(2, "hunter")]).report(tmp_path)
    assert "circle" not in capsys.readouterr().out


# --- drawing ---


def test_shares_of_a_frozen_pool() -> None:
    """They alone decide, whatever the other rules say."""
    pool = make_pool(window=3, ratio=1.0, marks=3)
    pool.shares = [0.2, 0.5, 0.3]
    draws = Counter(pool.draw().step for _ in range(10_000))
    assert chisquare([draws[i] for i in range(3)], [2000, 5000, 3000]).pvalue > 1e-4


@pytest.mark.parametrize("sampling", ["uniform", "prioritized"])
@pytest.mark.parametrize(("share", "drawn"), [(1.0, 10), (0.5, 5), (0.41, 5), (0.05, 1)])
@pytest.mark.parametrize("window", [10, 20])
def test_newest_share(window: int, share: float, drawn: int, sampling: str) -> None:
    """The newest snapshots alone, all of them, rounded up; of those that there are, though the pool has more room."""
    pool = make_pool(window=window, sampling=sampling, marks=10)
    pool.newest_share = share
    assert {pool.draw().step for _ in range(2000)} == set(range(10 - drawn, 10))


def test_a_mixture_plays_each_game_with_one_member() -> None:
    """Strengths 5 and 1 against 3: it wins a share of the games, and the same games on both sides."""
    make_games = Maker(DUEL)
    mixture = Player("mixture", "disc", None, (policy(5), policy(1)), (0.7, 0.3))
    pairs, players = [(0, 1), (0, 2)], [mixture, policy(3), Player("random", "disc")]
    scores = play_pairs(make_games, fighters(DUEL), players, pairs, 4000, 0, deterministic=True)
    assert set(scores[0]) == {0.0, 1.0}
    assert chisquare(np.bincount(scores[0].astype(int)), [600, 1400]).pvalue > 1e-4
    assert not mixture.is_scripted
    assert Player("random", "disc").is_scripted


def test_the_start_of_a_game_does_not_tell_the_opponent() -> None:
    """A game may draw its starts from `default_rng(seed)`, and policies observe them."""
    starts, matches = np.random.default_rng(7).random(4000), make_matches(DUEL, 4000, marks=2)
    matches.pools["disc"].shares = [0.5, 0.5]
    matches.begin_anew(7)
    steps = [next(s.step for s in seats if s is not None) for seats in matches.opponents]
    assert abs(np.corrcoef(starts, steps)[0, 1]) < 0.1
    mixture = Player("mixture", "disc", None, (policy(5), policy(1)), (0.5, 0.5))
    seats = np.array([[0, 1]] * 4000)
    scores = play(Maker(DUEL)(4000), fighters(DUEL), [mixture, policy(3)], seats, 7, deterministic=True)
    assert abs(np.corrcoef(starts, scores[:, 0])[0, 1]) < 0.1


def test_members_of_a_mixture_are_of_its_role() -> None:
    """A mixture of prey is drawn where prey sits, for each game anew."""
    mixture = Player("mixture", "prey", None, (policy(5, "prey"), policy(1, "prey")), (0.5, 0.5))
    players = [policy(3, "hunter"), mixture]
    scores = play_pairs(Maker(HUNT), fighters(HUNT), players, [(0, 1)], 400, 0, deterministic=True)
    assert 120 < scores.sum() < 280


# --- scripted players and the learner itself among the opponents ---


def mixed_matches(layout: Layout, num_games: int, scripted: float, current: float) -> Matches:
    """With two scripted players for each behaviour."""
    matches = make_matches(layout, num_games)
    players = [(name, behavior) for name in ("idle", "bold") for behavior in matches.pools]
    matches.mix_in(players, scripted, current, 1500.0)
    matches.begin_anew(1)
    return matches


def test_shares_of_opponents() -> None:
    """By the shares; the scripted players are equally likely, as are the snapshots."""
    matches = mixed_matches(DUEL, 8000, 0.3, 0.2)
    opponents = [s for seats in matches.opponents for s in seats if s is not None]
    counts = Counter(s.name for s in opponents)
    assert chisquare([counts[name] for name in ("", "current", "idle", "bold")], [4000, 1600, 1200, 1200]).pvalue > 1e-4
    steps = Counter(s.step for s in opponents if not s.name)
    assert chisquare([steps[step] for step in range(3)]).pvalue > 1e-4


def test_the_current_policy_of_another_role_is_its_newest_snapshot() -> None:
    """It does not learn now, so that is what it is."""
    matches = mixed_matches(HUNT, 20, 0.0, 1.0)
    assert {seats[1] for seats in matches.opponents} == {matches.pools["prey"].latest}


@pytest.mark.parametrize("layout", [DUEL, DOUBLES, HUNT, TRIO])
def test_who_acts_for_whom(layout: Layout) -> None:
    """Each seat is played by its snapshot, by its scripted player, or by the learner's own network."""
    table, obs = lay_table(layout, 60, False, np.random.default_rng(0))
    matches = mixed_matches(layout, 60, 0.4, 0.3)
    marks = {"idle": 50.0, "bold": 60.0, "current": -5.0}  # -5 is that of a new Mirror
    table.scripted_actions = lambda name, t: np.full((60, obs[t].shape[1], 1 + OBS_DIM + 2), marks[name] + t)
    rows = matches.of_learner(obs)
    learner_actions = np.full((len(rows), 1 + OBS_DIM + 2), 77.0, np.float32)
    actions = matches.all_actions(table, {b: Reflection() for b in matches.pools}, obs, learner_actions)
    seen, lots = Counter[str](), list[float]()
    for game, seats in enumerate(matches.opponents):
        for t, opponent in enumerate(seats):
            first = 77.0 if opponent is None else marks[opponent.name] if opponent.name else float(opponent.step)
            is_scripted = opponent is not None and opponent.name in ("idle", "bold")
            assert (actions[t][game, :, 0] == first + is_scripted * t).all()
            if opponent is not None and not is_scripted:
                assert (actions[t][game, :, 1] == game).all()
            lots += actions[t][game, :, -1].tolist() if opponent is CURRENT else []
            seen[opponent.name if opponent is not None else "learner"] += 1
    assert set(seen) - {"current"} == {"learner", "idle", "bold", ""}
    assert ("current" in seen) == (len(set(matches.behaviors)) == 1)
    assert lots == list(range(len(lots)))  # the noise of each row


def test_ratings_of_mixed_opponents() -> None:
    """A scripted player is rated like a snapshot, and has no age; a game against oneself is not rated."""
    matches = mixed_matches(DUEL, 2, 0.0, 0.0)
    bold = matches.scripted["disc"].snapshots[1]
    matches.learner_steps["disc"] = 7
    matches.opponents = [[None, CURRENT], [bold, None]]  # the learner begins on either side
    assert matches.opponent_steps()[0] == 7
    assert matches.opponent_steps()[1] > 10**12  # SAC never leaves these transitions out
    before = matches.rating
    matches.finish(0, game_scores(np.array([1.0, 0.0])))
    assert matches.rating == before
    assert "selfplay/win_rate" not in matches.metrics()
    matches.finish(1, game_scores(np.array([1.0, 0.0])))
    assert matches.rating < before
    assert matches.rating + bold.rating == pytest.approx(before + 1500.0)
    metrics = matches.metrics()
    assert metrics["selfplay/win_rate"] == 0.0
    assert metrics["selfplay/opponent_rating_mean"] == 1500.0
    assert "selfplay/opponent_age" not in metrics
    other = mixed_matches(DUEL, 2, 0.0, 0.0)
    other.load_state_dict(matches.state_dict())
    assert [s.rating for s in other.scripted["disc"].snapshots] == [1500.0, bold.rating]
    assert [s.name for s in other.scripted["disc"].snapshots] == ["idle", "bold"]


# --- runs ---


@pytest.mark.slow
def test_a_run_against_frozen_policies(selfplay: ModuleType, train_selfplay: Train) -> None:
    """All opponents are the last policies of the two runs, half of the games each, and they stay as they are."""
    runs = [train_selfplay(selfplay, seed=seed, total_timesteps=128) for seed in (1, 2)]
    loaded = [selfplay.load_run(run, "--opponents")[1]["sumo"].latest for run in runs]
    flags = {"opponents": [str(run) for run in runs], "policy": "last", "seed": 3}
    rivals = load_rivals(selfplay.Args(**flags), selfplay.load_run, make_team_env("sumo", 1))
    assert rivals is not None
    assert rivals["sumo"].shares == [0.5, 0.5]
    for snapshot, other in zip(rivals["sumo"].snapshots, loaded, strict=True):
        assert all(torch.equal(value, other.weights[name]) for name, value in snapshot.weights.items())
    folder = train_selfplay(selfplay, **flags, total_timesteps=1024, checkpoint_freq=512)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    saved = state["parts"]["matches"]["rivals"]["sumo"]
    assert [snapshot["step"] for snapshot in saved] == [snapshot.step for snapshot in loaded]
    assert all(snapshot["games"] > 0 for snapshot in saved)
    own = selfplay.load_run(folder, "--evaluate")[1]["sumo"].snapshots
    assert len(own) > 3
    assert {snapshot.games for snapshot in own} == {0}  # none of them has played
    for snapshot, other in zip(saved, loaded, strict=True):
        assert all(torch.equal(value, other.weights[name]) for name, value in snapshot["weights"].items())


@pytest.mark.slow
def test_a_resumed_run_against_frozen_policies(selfplay: ModuleType, train_selfplay: Train) -> None:
    """Killed and resumed, it equals one that went on, ratings of the opponents included."""
    victim = train_selfplay(selfplay, total_timesteps=256, norm_obs=True).rename("victim")
    flags = {"opponents": "victim", "policy": "uniform", "checkpoint_freq": 400, "total_timesteps": 1600}
    flags |= {"scripted_share": 0.3, "current_share": 0.2}
    assert run(selfplay, *words(selfplay, env_id="sumo", **flags)) == 0, Path("out.txt").read_text()
    whole = only_run().rename("whole")
    pid = start(selfplay, *words(selfplay, env_id="sumo", **flags))
    wait_for(pid, lambda: list(Path("runs").glob("*/checkpoint.previous.pt")))
    kill(pid)
    assert run(selfplay, "--resume", str(only_run())) == 0, Path("out.txt").read_text()
    assert_same(everything(whole), everything(only_run()))
    for folder, steps in ((victim, "768"), (only_run(), "2000")):  # what it plays stays as it was
        status = run(selfplay, "--resume", str(folder), "--total-timesteps", steps)
        assert status == 0, Path("out.txt").read_text()


@pytest.mark.parametrize("env_id", ["sumo", "pursuit"])
def test_a_run_begins_with_saved_weights(selfplay: ModuleType, env_id: str, train_selfplay: Train) -> None:
    """All of them: without an update they are what is saved again, and what the first snapshot plays."""
    one = train_selfplay(selfplay, env_id=env_id, norm_obs=True)
    idle = {"learning_rate": 0.0} if selfplay is ppo_selfplay else {"learning_starts": 10_000}
    flags: dict[str, Any] = {"env_id": env_id, "norm_obs": True, "seed": 2, "window": 99}
    other = train_selfplay(selfplay, **flags, **idle, initialize_from=str(one))
    agents = [selfplay.load_run(folder, "--evaluate")[0] for folder in (one, other)]
    first = {behavior: pool.snapshots[0] for behavior, pool in selfplay.load_run(other, "--evaluate")[1].items()}
    for behavior, agent in agents[0].items():
        expected, found = agent.state_dict(), agents[1][behavior].state_dict()
        learned = [name for name in expected if "rms" not in name]  # the statistics go on
        assert all(torch.equal(expected[name], found[name]) for name in learned)
        acting = agent.acting_weights()
        assert all(torch.equal(value, first[behavior].weights[name]) for name, value in acting.items())
    assert selfplay.load_run(other, "--evaluate")[2].initialize_from == str(one)
    assert parse_args(selfplay.Args, ["--evaluate", str(other)]).initialize_from is None


def test_a_fixed_alpha_is_that_of_the_flag(train_selfplay: Train) -> None:
    """With --no-autotune nothing else sets it, so it is not taken from the saved run."""
    one = train_selfplay(sac_selfplay)
    other = train_selfplay(sac_selfplay, seed=2, autotune=False, alpha=0.5, initialize_from=str(one))
    (agent,) = sac_selfplay.load_run(other, "--evaluate")[0].values()
    assert agent.log_alpha.exp().item() == pytest.approx(0.5)


def test_a_fixed_alpha_of_one_behavior_is_that_of_its_flag(train_selfplay: Train) -> None:
    """--behaviors may fix the coefficient of one role. The other role takes it from the saved run."""
    one = train_selfplay(sac_selfplay, env_id="pursuit")
    own = json.dumps({"evader": {"autotune": False, "alpha": 0.5}})
    other = train_selfplay(sac_selfplay, env_id="pursuit", seed=2, behaviors=own, initialize_from=str(one))
    agents = sac_selfplay.load_run(other, "--evaluate")[0]
    assert agents["evader"].log_alpha.exp().item() == pytest.approx(0.5)
    assert agents["pursuers"].log_alpha.exp().item() != pytest.approx(0.5, rel=0.1)


def test_the_folders_of_opponents_are_saved_whole(selfplay: ModuleType, train_selfplay: Train) -> None:
    """A resumed run may stand in another folder."""
    victim = train_selfplay(selfplay)
    folder = train_selfplay(selfplay, seed=2, opponents=[os.path.relpath(victim)])
    assert json.loads((folder / "args.json").read_text())["opponents"] == [str(victim.resolve())]


def test_a_saved_run_plays_its_last_snapshot(selfplay: ModuleType, train_selfplay: Train) -> None:
    """Whatever --policy its own opponents had, unless the command line says another."""
    victim = train_selfplay(selfplay)
    folder = train_selfplay(selfplay, seed=2, opponents=[str(victim)], policy="uniform")
    assert parse_args(selfplay.Args, ["--evaluate", str(folder)]).policy == "last"
    assert parse_args(selfplay.Args, ["--evaluate", str(folder), "--policy", "uniform"]).policy == "uniform"


# --- exploitability ---


def test_a_response_plays_the_run_alone(selfplay: ModuleType, tmp_path: Path) -> None:
    """On every team, and against nobody else, whatever opponents the run had."""
    own = {"scripted_share": 0.3, "current_share": 0.2, "learner_side": "red"}
    own |= dict.fromkeys(("capture_video", "track", "upload_model"), True)  # of the run, which the response is not
    train = Mock(return_value=tmp_path)
    assert train_response(selfplay.Args(evaluate=tmp_path, exploitability=640, **own), train) == tmp_path
    (args,) = train.call_args.args
    assert (args.opponents, args.total_timesteps) == ([str(tmp_path)], 640)
    assert (args.scripted_share, args.current_share, args.learner_side) == (0.0, 0.0, None)
    assert not args.capture_video
    assert not args.track
    assert not args.upload_model


class Coins(MatrixGame):
    """Two roles: each shows one of three coins, and the first player wins if they are the same."""

    def __init__(self, num_games: int) -> None:
        super().__init__(num_games, 1.0)
        self.payoff = 2.0 * np.eye(3) - 1.0
        self.teams = tuple(Team(name, name, (name,), 1, 1, (3,)) for name in ("same", "other"))


def set_policy(folder: Path, behavior: str, probabilities: Sequence[float]) -> None:
    """Makes the last snapshot of a saved run play with these probabilities, whatever it sees."""
    state = torch.load(folder / "model.pt", weights_only=True)
    weights = state[f"{behavior}_pool"][-1]["weights"]
    *_, last_weight, last_bias = (name for name in weights if name.startswith("actor."))
    weights[last_weight].zero_()
    weights[last_bias].copy_(torch.tensor(probabilities).log())
    torch.save(state, folder / "model.pt")


def printed_scores(output: str) -> dict[str, tuple[float, float, float]]:
    """Score and its interval, of each behaviour."""
    line = r"^(\w+) of .*: score ([\d.]+), 95% interval \[([\d.]+), ([\d.]+)\], from \d+ seeds, sampled actions$"
    return {name: (float(x), float(y), float(z)) for name, x, y, z in re.findall(line, output, re.MULTILINE)}


@pytest.mark.slow
@pytest.mark.parametrize("actions", [(0.6, 0.3, 0.1), (0.1, 0.2, 0.7)])
def test_best_response_in_rock_paper_scissors(
    actions: tuple[float, float, float],
    train_selfplay: Train,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Always the same answer: paper scores 0.6 + 0.3 / 2 against the first, rock 0.7 + 0.1 / 2 against the second."""
    monkeypatch.setattr(team_env, "make_team_env", lambda env_id, num_games, *_: MatrixGame(num_games, 1.0))
    victim = train_selfplay(ppo_selfplay, total_timesteps=64, **RESPONSE)
    set_policy(victim, "player", actions)
    known = 0.5 + 0.5 * (MatrixGame(1, 1.0).payoff @ actions).max()
    capsys.readouterr()
    args = {"evaluate": victim, "exploitability": 12_000, "eval_games": 4000, "cuda": False, "compile": False}
    ppo_selfplay.main(ppo_selfplay.Args(**RESPONSE | args))
    scores = printed_scores(capsys.readouterr().out)
    assert list(scores) == ["player"]
    score, low, high = scores["player"]
    assert low <= known <= high + 0.01
    assert score == pytest.approx(known, abs=0.03)


@pytest.mark.slow
def test_best_response_of_two_roles(
    train_selfplay: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first player shows the coin that is shown most often, the second one the coin that is shown least often."""
    monkeypatch.setattr(team_env, "make_team_env", lambda env_id, num_games, *_: Coins(num_games))
    victim = train_selfplay(ppo_selfplay, total_timesteps=64, **RESPONSE)
    set_policy(victim, "same", (0.6, 0.3, 0.1))
    set_policy(victim, "other", (0.2, 0.5, 0.3))
    capsys.readouterr()
    args = {"evaluate": victim, "exploitability": 24_000, "eval_games": 4000, "cuda": False, "compile": False}
    ppo_selfplay.main(ppo_selfplay.Args(**RESPONSE | args))
    scores = {name: score for name, (score, _, _) in printed_scores(capsys.readouterr().out).items()}
    assert scores == pytest.approx({"same": 0.5, "other": 0.9}, abs=0.03)


@pytest.mark.slow
def test_an_untrained_policy_is_beaten(train_selfplay: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Nearly always, after a short training against it."""
    victim = train_selfplay(ppo_selfplay, num_games=64, num_steps=64, num_minibatches=8, total_timesteps=64)
    capsys.readouterr()
    flags = ["--evaluate", str(victim), "--exploitability", "120000", "--no-cuda", "--no-compile"]
    ppo_selfplay.main(parse_args(ppo_selfplay.Args, flags))
    assert printed_scores(capsys.readouterr().out)["sumo"][0] > 0.95


# --- bad input ---


def test_what_saved_runs_play(tmp_path: Path) -> None:
    """The last snapshot, all of them, or those of the table with their weights, which are normalised."""
    pools = {"disc": make_pool(window=5, marks=3)}
    mixture = partial(read_mixture, tmp_path, pools, ("disc",))
    assert [(s.step, share) for (s,), share in mixture("last")] == [(2, 1.0)]
    assert [(s.step, share) for (s,), share in mixture("uniform")] == [(k, 1 / 3) for k in range(3)]
    rows = [["player", "nash_weight"], ["random", ""], ["step 0", "0.2"], ["step 1", "0"], ["step 2", "0.6"]]
    with (tmp_path / "cross_play.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    assert [(s.step, share) for (s,), share in mixture("nash")] == [(0, pytest.approx(0.25)), (2, pytest.approx(0.75))]
    text = (tmp_path / "cross_play.csv").read_text()  # of a table in which another line-up has further behaviours
    (tmp_path / "cross_play.csv").write_text(text.replace("step", "disc step"))
    assert [share for _, share in mixture("nash")] == pytest.approx([0.25, 0.75])
    (player,) = load_players(tmp_path, pools, [("disc",)], "nash", "policy")
    assert [member.behavior for member in player.members] == ["disc"] * 2
    assert player.shares == pytest.approx((0.25, 0.75))
    (single,) = load_players(tmp_path, pools, [("disc",)], "last", "policy")
    assert single.weights is not None


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "--policy nash takes a run folder with the cross_play.csv of a table, and "),
        ("player,rating\nstep 1,3\n", "--policy nash takes a run folder with the cross_play.csv of a table, and "),
        ("player,nash_weight\nstep 7,1.0\n", "--policy nash takes a table of the run's own snapshots, and that of "),
    ],
)
def test_tables_without_weights(
    content: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No table, one of an earlier version, and one of another run."""
    if content is not None:
        (tmp_path / "cross_play.csv").write_text(content)
    with pytest.raises(SystemExit, match="2"):
        read_mixture(tmp_path, {"disc": make_pool(window=5, marks=3)}, ("disc",), "nash")
    assert capsys.readouterr().err.startswith(f"error: {sentence}")


@pytest.mark.parametrize("flag", ["opponents", "against", "initialize-from"])
def test_runs_of_another_kind(
    selfplay: ModuleType, flag: str, train_selfplay: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """A policy without normalisation would get inputs that it has never seen; a folder without a run is no opponent."""
    one, other = (train_selfplay(selfplay, total_timesteps=128, norm_obs=norm_obs) for norm_obs in (True, False))
    check_same_game(
        selfplay.Args(env_kwargs='{"actions":"box"}'), selfplay.Args(env_kwargs='{ "actions": "box" }'), flag
    )
    words = ["--evaluate", str(one), "--against", str(other)]
    if flag != "against":
        words = ["--norm-obs", f"--{flag}", str(other), "--no-compile", "--no-cuda"]
    folders = set(Path("runs").iterdir())
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        selfplay.main(parse_args(selfplay.Args, words))
    sentence = f"--{flag} takes a run of the same game, and --norm-obs is True in this run and False in the other"
    assert capsys.readouterr().err == f"error: {sentence}\n"
    if flag != "against":
        with pytest.raises(SystemExit, match="2"):
            selfplay.main(parse_args(selfplay.Args, [f"--{flag}", "nowhere", "--no-compile"]))
        assert capsys.readouterr().err.startswith(f"error: --{flag} takes a run folder with the args.json")
    if flag == "initialize-from":
        with pytest.raises(SystemExit, match="2"):
            selfplay.main(parse_args(selfplay.Args, ["--evaluate", str(one), "--initialize-from", str(one), "--play"]))
        assert capsys.readouterr().err.startswith("error: --initialize-from is for training")
    assert set(Path("runs").iterdir()) == folders
