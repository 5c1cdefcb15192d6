"""Sides of several teams, each with a policy of its own, and games of three roles."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy_games
import toy_sides
from conftest import TINY, Train, read_scalars
from gymnasium.spaces import Box, Discrete
from test_checkpoints import assert_same, everything, kill, only_run, run, start, wait_for, words
from test_cross_play import ROLES, Contest, Layout, Maker, fighters, policy
from test_matches import check_seats, make_teams
from toy_games import Plan, Spaces
from toy_policies import OBS_DIM, Mirror, make_pool

import ppo_selfplay
import sac_selfplay
from utils import team_env
from utils.cross_play import (
    Player,
    connected,
    cross_play,
    make_player,
    play,
    play_pairs,
    player_behaviors,
    scripted_players,
    seatings,
)
from utils.elo import bootstrap_ratings, game_scores
from utils.evaluation import load_players, load_rivals, read_mixture, snapshot_lineups
from utils.matches import CURRENT, Matches
from utils.team_env import BadGame, PettingZooGames, Team, TeamStep, describe_teams, make_team_env

SOCCER: Layout = (("s0", "striker", 2), ("g0", "goalie", 1), ("s1", "striker", 2), ("g1", "goalie", 1))
SIDES = ["red", "red", "blue", "blue"]
UNEQUAL: Layout = (("s0", "striker", 2), ("g0", "goalie", 1), ("s1", "striker", 2))  # blue has no goalie


def with_sides(teams: tuple[Team, ...]) -> tuple[Team, ...]:
    """The first two are red, and the others blue."""
    return tuple(replace(team, side=side) for team, side in zip(teams, SIDES, strict=False))


def soccer_matches(num_games: int, layout: Layout = SOCCER, **rules: Any) -> Matches:
    """Each pool has three snapshots, and draws from all."""
    pools = {b: make_pool(5, 0.0, seed=seed, marks=3) for seed, b in enumerate(("striker", "goalie"))}
    return Matches(with_sides(make_teams(layout)), num_games, pools, **rules)


class Now(Mirror):
    """A mirror that acts by itself."""

    @torch.no_grad()
    def act(self, obs: np.ndarray, masks: np.ndarray, noise: torch.Tensor) -> np.ndarray:
        """As `PolicyStack` has it."""
        return self.sample(self(torch.as_tensor(obs)), torch.as_tensor(masks), noise).numpy()


def test_opponents_of_sides_are_drawn_from_whole_pools() -> None:
    """The behaviours of a side may have pools of different sizes, and are drawn independently."""
    pools = {"striker": make_pool(marks=5), "goalie": make_pool(marks=2)}
    args: Any = sac_selfplay.Args(opponents=["run"])
    env: Any = SimpleNamespace(teams=with_sides(make_teams(SOCCER)))
    whole: dict[str, list[int]] = {"striker": [0, 1, 2, 3, 4], "goalie": [0, 1]}
    for rule, steps in (("uniform", whole), ("last", {"striker": [4], "goalie": [1]})):
        rivals = load_rivals(replace(args, policy=rule), lambda *_: (None, pools, args), env)
        assert rivals is not None
        assert {name: [x.step for x in pool.snapshots] for name, pool in rivals.items()} == steps
        assert rivals["striker"].shares == pytest.approx([1 / len(steps["striker"])] * len(steps["striker"]))


# --- matches ---


@pytest.mark.parametrize("layout", [SOCCER, UNEQUAL])
@pytest.mark.parametrize("swap_steps", [0, 10**9])
def test_allies_are_current_and_opponents_are_drawn(layout: Layout, swap_steps: int) -> None:
    """Also after many games and in the turn of the other behaviour."""
    matches = soccer_matches(4, layout, swap_steps=swap_steps)
    for behavior in ("striker", "goalie", "striker"):
        matches.give_turn(behavior)
        for number in range(12):
            check_seats(matches)
            for game, seats in enumerate(matches.opponents):
                own = SIDES[matches.learner_team[game]]
                for t, (side, snapshot) in enumerate(zip(SIDES, seats, strict=False)):
                    if t == matches.learner_team[game]:
                        assert snapshot is None
                    elif side == own:
                        assert snapshot is CURRENT
                    else:
                        assert snapshot in matches.pools[layout[t][1]].snapshots
            matches.finish(number % 4, game_scores(np.array([1.0, 1.0, 0.0, 0.0])[: len(layout)]))


def test_opponents_change_sides_together() -> None:
    """Striker and goalie of the other side stay the opponents when the learner takes their side, and so for ever."""
    matches = soccer_matches(1, swap_steps=10**9)
    _, ally, striker, goalie = matches.opponents[0]
    for seats in ([striker, goalie, None, ally], [None, ally, striker, goalie]) * 2:
        matches.finish(0, game_scores(np.zeros(4)))
        assert matches.opponents[0] == seats


def test_the_age_of_opponents_is_not_that_of_allies() -> None:
    """Learners of two behaviours have taken other numbers of steps; the ally, as it is now, is no opponent."""
    teams = with_sides(make_teams((("s", "striker", 1), ("g", "goalie", 1), ("solo", "solo", 3))))
    matches = Matches(teams, 2, {team.behavior: make_pool(marks=1) for team in teams})
    matches.learner_steps = {"striker": 100, "goalie": 50, "solo": 300}
    matches.pools["solo"].latest.step = 250
    assert matches.opponent_steps().tolist() == [250, 250]


def test_a_fixed_side_by_its_name() -> None:
    """The name of the side or that of the team."""
    for side in ("blue", "s1"):
        matches = soccer_matches(3, learner_side=side)
        matches.finish(1, game_scores(np.zeros(4)))
        assert matches.learner_team.tolist() == [2, 2, 2]
        matches.give_turn("goalie")
        assert set(matches.learner_team.tolist()) == ({3} if side == "blue" else {1, 3})


def test_only_opponents_are_rated() -> None:
    """Each of the two plays an Elo game with half the weight; a team-mate's equal score is no draw."""
    matches = soccer_matches(2, elo_k=32.0)
    _, ally, striker, goalie = matches.opponents[0]
    assert striker is not None
    assert goalie is not None
    striker.rating, goalie.rating, matches.rating = 1400.0, 1200.0, 1200.0
    matches.finish(0, game_scores(np.array([1.0, 1.0, 0.0, 0.0])))
    of_striker, of_goalie = 16 * (1 - 0.2402531), 16 * 0.5
    assert (striker.rating, goalie.rating) == pytest.approx((1400 - of_striker, 1200 - of_goalie))
    assert matches.rating == pytest.approx(1200 + of_striker + of_goalie)
    assert ally is CURRENT
    assert (CURRENT.rating, CURRENT.games, len(CURRENT.results)) == (0.0, 0, 0)
    assert matches.metrics()["selfplay/games"] == 2.0


def test_ghosts_are_opponents_alone() -> None:
    """Three of the six agents; their steps are counted, and swaps_per_turn is by their number."""
    matches = soccer_matches(5, swaps_per_turn=4.0, turn_steps={"striker": 1000, "goalie": 1000})
    assert matches.num_ghosts == 15
    assert matches.swap_steps == round(3 / 2 * 1000 / 4)
    matches.give_turn("goalie")
    assert matches.swap_steps == 3 * 1000 / 4
    unequal = soccer_matches(5, UNEQUAL, swaps_per_turn=4.0, turn_steps={"striker": 1000, "goalie": 1000})
    assert unequal.swap_steps == round((2 + 3) / 2 / 2 * 1000 / 4)  # two opponents or three, by the learner's side


@pytest.mark.parametrize("learner", ["striker", "goalie"])
def test_allies_act_as_they_are_now(learner: str) -> None:
    """With the weights of the behaviour's module, -5; opponents with those of their snapshots, 0 to 2."""
    teams = with_sides(make_teams(SOCCER, action_dim=OBS_DIM + 3))
    matches = soccer_matches(6)
    matches.give_turn(learner)
    env: Any = type("Env", (), {})()
    env.teams, env.num_games, env.action_masks = teams, 6, [None] * 4
    env.alive = [np.ones((6, len(team.agents)), dtype=bool) for team in teams]
    obs = [np.zeros((6, len(team.agents), OBS_DIM), np.float32) for team in teams]
    size = 2 if learner == "striker" else 1
    own = np.full((6 * size, OBS_DIM + 3), -9.0, np.float32)
    actions = matches.all_actions(env, {"striker": Now(), "goalie": Now()}, obs, own)
    for game, seats in enumerate(matches.opponents):
        for t, snapshot in enumerate(seats):
            mark = -9.0 if snapshot is None else -5.0 if snapshot is CURRENT else float(snapshot.weights["mark"])
            assert (actions[t][game, :, 0] == mark).all()
    assert matches.ghost_steps == 18


# --- games ---


def test_scores_are_of_sides() -> None:
    """Returns are means over all agents of a side; an outcome of one agent is that of its side."""
    spaces: Spaces = {agent: (Box(-1.0, 1.0, (1,)), Discrete(2)) for agent in ("S?team=0", "S?team=0_2", "G?team=0")}
    spaces |= {agent: (Box(-1.0, 1.0, (1,)), Discrete(2)) for agent in ("S?team=1", "G?team=1")}
    rewards = dict(zip(spaces, [3.0, 0.0, 6.0, 1.0, 4.0], strict=True))
    plan: Plan = [{agent: {"reward": reward} for agent, reward in rewards.items()}]
    outcome = [{"G?team=0": {"info": {"outcome": -1.0}}, "S?team=1": {"info": {"outcome": 1.0}}}]
    for steps, expected in ((plan, [3.0, 3.0, 2.5, 2.5]), (outcome, [-1.0, -1.0, 1.0, 1.0])):
        game = toy_games.parallel_env(spaces, steps)
        env = PettingZooGames([game], team_env.make_teams("toy", game, None, False))
        assert [team.name for team in env.teams] == ["S?team=0", "G?team=0", "S?team=1", "G?team=1"]
        env.reset(0)
        result = env.step([env.scripted_actions("random", t) for t in range(4)])
        np.testing.assert_allclose(result.scores, [expected])


def test_sides_of_the_flag() -> None:
    """--teams gives a side several teams by their behaviours, which are shared if they are alike."""
    env = toy_sides.parallel_env([f"p_{i}" for i in range(6)])
    named = {"red": {"front": ["p_0", "p_1"], "back": ["p_2"]}, "blue": {"back": ["p_3"], "front": ["p_4", "p_5"]}}
    teams = team_env.make_teams("toy", env, named, None)
    assert [(team.name, team.behavior, team.side) for team in teams] == [
        ("red front", "front", "red"),
        ("red back", "back", "red"),
        ("blue back", "back", "blue"),
        ("blue front", "front", "blue"),
    ]
    assert team_env.make_teams("toy", env, named, True) == teams
    apart = [team.behavior for team in team_env.make_teams("toy", env, named, False)]
    assert apart == ["red front", "red back", "blue back", "blue front"]
    alone = [team.behavior for team in team_env.make_teams("toy", env, named | {"blue": ["p_3", "p_4", "p_5"]}, None)]
    assert alone == ["front", "back", "blue"]
    unlike = {"red": {"front": ["p_0"], "back": ["p_1"]}, "blue": {"front": ["p_2"], "back": ["p_3", "p_4", "p_5"]}}
    some = [team.behavior for team in team_env.make_teams("toy", env, unlike, None)]
    assert some == ["front", "red back", "front", "blue back"]
    named["blue"] = {"back": ["p_3", "p_4"], "front": ["p_5"]}
    assert [team.behavior for team in team_env.make_teams("toy", env, named, None)][0] == "red front"
    with pytest.raises(BadGame, match="takes --symmetric no"):
        team_env.make_teams("toy", env, named, True)


def test_teams_that_win_together_are_printed() -> None:
    """A line for each side of several teams, after those of the teams."""
    lines = describe_teams(make_team_env("toy_sides", 1)).splitlines()
    assert lines[4:] == [
        "Striker?team=0 and Goalie?team=0 win and lose together",
        "Striker?team=1 and Goalie?team=1 win and lose together",
    ]


@pytest.mark.parametrize(
    "teams",
    [
        {"red": {"front": ["p_0"], "back": ["p_1"]}},  # one side
        {"red": {"front": ["p_0"]}, "blue": {}},
        {"red": {"front": ["p_0"]}, "blue": {"front": "p_1"}},
        {"red": {"front": ["p_0"]}, "blue": {"front": {"back": ["p_1"]}}},
        {"red": {"front": ["p_0"], "back": ["p_0"]}, "blue": ["p_1"]},
        {"red": {"x y": ["p_0"]}, "red x": {"y": ["p_1"]}},
    ],
)
def test_bad_teams(teams: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """A sentence that names the flag."""
    kwargs = json.dumps({"agents": ["p_0", "p_1"]})
    with pytest.raises(SystemExit, match="2"):
        team_env.make_games(1, "toy_sides", kwargs, json.dumps(teams), "auto", None)
    assert "--teams" in capsys.readouterr().err


# --- players ---


class SideContest(Contest):
    """A contest whose first two teams are red, and the others blue; a side's score is the mean of its teams'."""

    def __init__(self, num_games: int, layout: Layout = SOCCER) -> None:
        super().__init__(num_games, layout)
        self.teams = with_sides(self.teams)

    def step(self, actions: list[np.ndarray]) -> TeamStep:
        """Ends all games."""
        step = super().step(actions)
        red, blue = step.scores[:, :2].mean(axis=1), step.scores[:, 2:].mean(axis=1)
        return step._replace(scores=np.stack([red, red, *[blue] * (len(self.teams) - 2)], axis=1))


def lineup(striker: float, goalie: float) -> Player:
    """A side of these strengths."""
    return make_player(f"{striker:g}+{goalie:g}", [policy(striker, "striker"), policy(goalie, "goalie")])


def test_who_plays_whom() -> None:
    """The behaviours of each side, and those of the rest if they are others."""
    assert player_behaviors(SideContest(1)) == [("striker", "goalie")]
    assert player_behaviors(SideContest(1, UNEQUAL)) == [("striker", "goalie"), ("striker",)]
    assert player_behaviors(Contest(1, ROLES)) == [("a",), ("b",), ("c",), ("b", "c"), ("a", "c"), ("a", "b")]
    assert seatings(SideContest(1), lineup(1, 2), lineup(3, 4)) == [(0, 1), (2, 3)]
    assert seatings(SideContest(1), policy(1, "striker"), lineup(3, 4)) == []
    assert seatings(SideContest(1, UNEQUAL), policy(1, "striker"), lineup(3, 4)) == [(2,)]
    names = [(player.name, player.behavior) for player in scripted_players(SideContest(1))]
    assert names == [("random", "striker+goalie"), ("weak", "striker+goalie")]
    assert all(player.is_scripted for player in scripted_players(SideContest(1)))
    roles = [(player.name, player.behavior) for player in scripted_players(Contest(1, ROLES))]
    assert [behavior for name, behavior in roles if name == "random"] == ["a", "b", "c", "b+c", "a+c", "a+b"]
    assert [behavior for name, behavior in roles if name == "strong"] == ["a"]


def test_the_table_of_line_ups() -> None:
    """The side with the higher sum wins, whichever side it plays on."""
    players = [lineup(1, 1), lineup(5, -2), lineup(-4, 7), lineup(0, 2)]
    table = cross_play(SideContest, fighters(SOCCER), players, 6, 0, deterministic=True)
    sums = np.array([2.0, 3.0, 3.0, 2.0])
    expected = np.where(sums[:, None] == sums, 0.5, sums[:, None] > sums)
    np.fill_diagonal(expected, np.nan)
    np.testing.assert_array_equal(table.scores.mean(axis=2), expected)
    assert table.labels == ["1+1", "5+-2", "-4+7", "0+2"]
    assert table.policies() == {"striker+goalie": [0, 1, 2, 3]}
    assert np.nansum(table.nash_weights()) == pytest.approx(1.0)


def test_a_player_with_a_seat_on_two_sides_or_one() -> None:
    """Three sides of two behaviours: x meets the pair of x and y from two sides, and y two of x from one."""
    layout: Layout = (("r", "x", 1), ("g", "x", 1), ("b", "y", 1))
    pair = make_player("pair", [policy(5, "x"), policy(3, "y")])
    players = [policy(4, "x"), policy(4, "y"), pair, policy(5, "x"), policy(2, "x")]
    pairs = [(0, 2), (1, 3), (1, 4)]
    for order in (pairs, pairs[::-1]):
        scores = play_pairs(Maker(layout), fighters(layout), players, order, 6, 0, deterministic=True)
        found = dict(zip(order, scores.mean(axis=1).tolist(), strict=True))
        assert found == {(0, 2): 0.5, (1, 3): 0.0, (1, 4): 1.0}
    table = cross_play(Maker(layout), fighters(layout), players, 6, 0, deterministic=True)
    assert not np.isnan(table.scores[0, 2]).any()


def test_a_mixture_of_line_ups_is_drawn_as_a_whole() -> None:
    """Never the striker of one member beside the goalie of the other."""
    env, members = SideContest(200), (lineup(1, 10), lineup(2, 20))
    mixture = Player("mixture", members[0].behavior, None, members, (0.3, 0.7))
    assert mixture.behaviors == {"striker", "goalie"}
    assert not mixture.is_scripted
    play(env, fighters(SOCCER), [mixture, lineup(3, 30)], np.tile([0, 0, 1, 1], (200, 1)), 0, deterministic=True)
    seen = [strengths for strengths, _, _ in env.record]
    assert set(seen) == {(1.0, 10.0, 3.0, 30.0), (2.0, 20.0, 3.0, 30.0)}
    assert 30 < seen.count((1.0, 10.0, 3.0, 30.0)) < 90


def test_the_table_of_three_roles() -> None:
    """A role meets the two others together; who meets nobody of a group is rated apart from it."""
    others = [make_player("bc", [policy(x, "b"), policy(y, "c")]) for x, y in ((1, 4), (6, 9))]
    players = [
        policy(3, "a"),
        policy(7, "a"),
        *others,
        policy(2, "b"),
        make_player("ac", [policy(1, "a"), policy(8, "c")]),
    ]
    table = cross_play(Maker(ROLES), fighters(ROLES), players, 5, 0, deterministic=True)
    means = table.scores.mean(axis=2)
    assert means[0, 2:4].tolist() == [0.5, 0.0]  # 3 beats 1 and loses to 4
    assert means[1, 2:4].tolist() == [1.0, 0.5]
    assert means[4, 5] == 0.5
    assert np.isnan(means[0, [1, 4, 5]]).all()
    assert connected(~np.isnan(means)) == [[0, 1, 2, 3], [4, 5]]
    assert table.ratings[:4].mean() == pytest.approx(1200.0)
    assert table.ratings[4:].mean() == pytest.approx(1200.0)
    alone = bootstrap_ratings(table.scores[:4, :4], games_per_score=1)
    np.testing.assert_allclose([table.ratings[:4], table.low[:4], table.high[:4]], alone)
    assert table.progress()["a"] == (0.5 + 0.5 * 0.5, 0.5 + 0.5 * 0.5)


def test_scripted_line_ups_play() -> None:
    """A name plays all teams of the side."""
    random = scripted_players(SideContest(1))[0]
    players = [random, lineup(0.9, 0.9), lineup(-0.9, 0.7)]
    scores = play_pairs(SideContest, fighters(SOCCER), players, [(0, 1), (0, 2)], 8, 0, deterministic=True)
    assert scores.mean(axis=1).tolist() == [0.0, 1.0]


def test_snapshots_play_together(tmp_path: Path) -> None:
    """Those that are equally many snapshots before the last one; Nash weights are those of the table's rows."""
    pools = {"striker": make_pool(marks=4), "goalie": make_pool(marks=2)}
    both = ("striker", "goalie")
    assert [[s.step for s in snapshots] for snapshots in snapshot_lineups(pools, both)] == [[2, 0], [3, 1]]
    (player,) = load_players(tmp_path, pools, [both], "uniform", "policy")
    assert [[float((single.weights or {})["mark"]) for single in m.lineup] for m in player.members] == [[2, 0], [3, 1]]
    (tmp_path / "cross_play.csv").write_text("player,nash_weight\nrandom,\nstep 2,0.25\nstep 3,0.75\n")
    assert [share for _, share in read_mixture(tmp_path, pools, both, "nash")] == [0.25, 0.75]
    (tmp_path / "cross_play.csv").write_text("player,nash_weight\ngoalie step 0,0.5\ngoalie step 1,0.5\n")
    assert [s.step for (s,), _ in read_mixture(tmp_path, pools, ("goalie",), "nash")] == [0, 1]


# --- scripts ---


@pytest.mark.parametrize("agents", [None, ["a", "b", "c"]], ids=["sides", "roles"])
def test_a_run_of_several_behaviors(
    selfplay: ModuleType, agents: list[str] | None, train_selfplay: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trains each in turn; evaluations, the table, mixtures and exploitability are of sides."""
    kwargs = json.dumps({} if agents is None else {"agents": agents})
    behaviors = ["Striker", "Goalie"] if agents is None else agents
    sides = ["Striker+Goalie"] if agents is None else agents
    flags: dict[str, Any] = {"env_id": "toy_sides", "env_kwargs": kwargs, "team_change": 64, "eval_freq": 256}
    flags |= {"cross_play_games": 4, "current_share": 0.2, "scripted_share": 0.2, "capture_video": agents is None}
    folder = train_selfplay(selfplay, **flags)
    curves = read_scalars(folder)
    for behavior in behaviors:
        assert f"selfplay/rating_{behavior}" in curves
    assert {tag for tag in curves if tag.startswith("eval/")} == {f"eval/{side}_score_vs_random" for side in sides}
    assert {value for _, value in curves["charts/learner"]} == set(map(float, range(len(behaviors))))
    assert list(selfplay.load_run(folder, "--evaluate")[0]) == behaviors
    rows = (folder / "cross_play.csv").read_text()
    assert "step " in rows
    assert len(list((folder / "videos").glob("*.mp4"))) == (1 if agents is None else 0)
    capsys.readouterr()

    rules = {"cuda": False, "compile": False, "eval_games": 4, "env_id": "toy_sides", "env_kwargs": kwargs}
    rules |= TINY[selfplay.__name__] | {"num_games": 8, "evaluate": folder}
    for policy_rule in ("last", "uniform", "nash"):
        selfplay.main(selfplay.Args(**rules, against=str(folder), policy=policy_rule))
    selfplay.main(selfplay.Args(**rules, exploitability=128, policy="nash"))
    output = capsys.readouterr().out
    for side in sides:
        assert len(re.findall(f"^{re.escape(side)} of .*: score ", output, re.MULTILINE)) == 4


def test_the_window_of_one_behaviour_alone(train_selfplay: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """The steps of two behaviours do not compare, so the age of the oldest opponent would mean nothing."""
    with pytest.raises(SystemExit, match="2"):
        train_selfplay(sac_selfplay, env_id="toy_sides", replay_opponents="window")
    assert "error: --replay-opponents window takes a game in which the opp" in capsys.readouterr().err
    matches = soccer_matches(2)
    assert matches.opposing_behaviors("striker") == {"striker", "goalie"}


@pytest.mark.slow
def test_a_resumed_run_with_allies(selfplay: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed and resumed, it equals one that went on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy_sides.py").write_text(Path(toy_sides.__file__).read_text())
    flags = words(selfplay, env_id="toy_sides", team_change=100, checkpoint_freq=400, total_timesteps=1200)
    flags += ["--replay-opponents", "all"] if selfplay is sac_selfplay else []
    assert run(selfplay, *flags) == 0, Path("out.txt").read_text()
    whole = only_run().rename("whole")
    pid = start(selfplay, *flags)
    wait_for(pid, lambda: list(Path("runs").glob("*/checkpoint.previous.pt")))
    kill(pid)
    assert run(selfplay, "--resume", str(only_run())) == 0, Path("out.txt").read_text()
    assert_same(everything(whole), everything(only_run()))


@pytest.mark.slow
def test_team_mates_learn_together(train_selfplay: Train) -> None:
    """A side whose strikers alone have learned scores 0.79 against random play, and 0.74 with its goalie alone."""
    flags: dict[str, Any] = {"num_games": 64, "num_steps": 8, "num_minibatches": 4, "update_epochs": 4}
    flags |= {
        "total_timesteps": 24_000,
        "env_id": "toy_sides",
        "save_steps": 2_000,
        "eval_games": 200,
        "learning_rate": 3e-3,
    }
    curves = read_scalars(train_selfplay(ppo_selfplay, **flags))
    assert curves["eval/Striker+Goalie_score_vs_random"][-1][1] > 0.87
