"""Turns that fill a run in whole cycles, their snapshots, and first games that are cut at different steps."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Train
from toy_policies import make_pool

import ppo_selfplay
import sac_selfplay
from utils.games import Pursuit, Sumo
from utils.matches import Matches, behavior_args, start_matches, turn_ends
from utils.snapshot_pool import SnapshotPool
from utils.team_env import Team

Capture = pytest.CaptureFixture[str]


def test_turns_end_in_whole_cycles() -> None:
    """Two pursuers make two learner steps a game step: their turns are half as long as the evader's."""
    teams = Pursuit(1).teams

    def ends(pursuers: int | None, evader: int | None, total_steps: int) -> list[int]:
        return turn_ends(teams, {"pursuers": pursuers, "evader": evader}, total_steps)

    assert ends(512, 512, 1536) == [256, 768, 1024, 1536]
    assert ends(1024, 256, 1536) == [512, 768, 1280, 1536]  # two thirds of each cycle are the pursuers'
    assert ends(10**6, 10**6, 900) == [300, 900]  # at least one cycle, however long the turn
    assert len(ends(None, None, 3000)) == 20
    assert turn_ends(Sumo(1).teams, {"sumo": 512}, 1536) == [1536]  # one policy: one turn


@pytest.mark.parametrize("stride", [1, 64])
def test_ends_of_turns_in_fractions(stride: int) -> None:
    """Rounding makes no turn a step longer, and no cycle is missing. A third of each cycle is the pursuers'."""
    for total in range(27 * stride, 60 * stride, stride):
        cycles = min(10, total // (3 * stride))
        exact = [Fraction(total * (3 * cycle + third), 3 * cycles) for cycle in range(cycles) for third in (1, 3)]
        found = turn_ends(Pursuit(1).teams, {"pursuers": None, "evader": None}, total, stride)
        assert found == [math.ceil(x) for x in exact], total
    three, one = (Team(name, name, tuple(map(str, range(n))), 1, 1, ()) for name, n in (("three", 3), ("one", 1)))
    ends = turn_ends([three, one], {"three": None, "one": None}, 28 * stride, stride)
    assert ends == [4 * stride * cycle + part * stride for cycle in range(7) for part in (1, 4)]


@pytest.mark.parametrize(("pursuers", "evader"), [(None, None), (100, 100), (900, 100)])
def test_every_behaviour_learns_in_short_runs(pursuers: int | None, evader: int | None, capsys: Capture) -> None:
    """A turn has an iteration or more, so each begins one; where there are too few iterations, a warning says so."""
    pools = {"pursuers": make_pool(marks=1), "evader": make_pool(marks=1)}
    for iterations, stride in product(range(6, 60), (1, 64)):
        teams = Pursuit(1).teams
        ends = turn_ends(teams, {"pursuers": pursuers, "evader": evader}, iterations * stride, stride)
        matches = Matches(teams, 1, pools, ends)
        learners = [matches.learner_at(i * stride) for i in range(iterations)]
        assert len([1 for i, name in enumerate(learners) if learners[i - 1 : i] != [name]]) == len(ends)
        assert ends[-1] == iterations * stride
    assert capsys.readouterr().err == ""
    assert turn_ends(Pursuit(1).teams, {"pursuers": None, "evader": None}, 64, 64) == [22, 64]
    sentence = "--total-timesteps 64 is too small for one turn of each behaviour: pursuers, evader"
    assert capsys.readouterr().err == f"warning: {sentence}\n"


OWN: dict[str, dict[str, Any]] = {  # what a role needs to learn nothing
    "ppo_selfplay": {"learning_rate": 0, "team_change": 256},
    "sac_selfplay": {"policy_lr": 0, "q_lr": 0.0, "alpha_lr": 0.0, "tau": 0.0, "team_change": 256},
}


def test_arguments_of_single_behaviours(
    selfplay: ModuleType, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One role has a learning rate of zero and does not change; the other has none of that, and learns.

    Each update is given the arguments of the role that learns.
    """
    own = OWN[selfplay.__name__]
    changes = json.dumps({"evader": own})
    flags: dict[str, Any] = {"env_id": "pursuit", "total_timesteps": 1024, "save_steps": 10**6, "team_change": 512}
    update, given = selfplay.update, []

    def spy(agent: Any, optimizer: Any, batch: Any, args: Any, *more: Any) -> Any:
        given.append({name: getattr(args, name) for name in own})
        return update(agent, optimizer, batch, args, *more)

    monkeypatch.setattr(selfplay, "update", spy)
    folder = train_selfplay(selfplay, behaviors=changes, **flags)
    assert own in given
    assert any(x["team_change"] == 512 for x in given)
    model = torch.load(folder / "model.pt", weights_only=True)
    for behavior, is_equal in (("evader", True), ("pursuers", False)):
        first, *_ = model[f"{behavior}_pool"]
        weights = {name: x for name, x in first["weights"].items() if "rms" not in name}
        found = all(torch.equal(x, model[f"{behavior}_agent"][name]) for name, x in weights.items())
        assert found == is_equal, behavior
    args = selfplay.Args(behaviors=changes, team_change=512)
    both = behavior_args(args, Pursuit(1).teams, selfplay.PER_BEHAVIOR, selfplay.LIMITS)
    assert both == {"pursuers": args, "evader": replace(args, **own)}


@pytest.mark.parametrize(
    ("behaviors", "says"),
    [
        ("[]", "--behaviors takes a JSON object such as"),
        ('{"prey": {}}', "--behaviors takes changes for pursuers, evader, not for prey"),
        ('{"evader": 3}', "--behaviors takes a JSON object with these names for evader: "),
        ('{"evader": {"norm_obs": true}}', "--behaviors takes a JSON object with these names for evader: "),
        ('{"evader": {"gamma": "high"}}', "--behaviors for evader: gamma: str is neither"),
        ('{"evader": {"gamma": 1.5}}', "--behaviors for evader: --gamma takes a number from 0 to 1, not 1.5"),
        ('{"evader": {"team_change": 5}}', "--behaviors takes a team_change for all behaviours or for none, unless"),
    ],
)
def test_bad_arguments_of_single_behaviours(
    selfplay: ModuleType, behaviors: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """One sentence, and no run folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        selfplay.main(selfplay.Args(env_id="pursuit", behaviors=behaviors, cuda=False, compile=False))
    error = capsys.readouterr().err
    assert error.startswith(f"error: {says}")
    assert error.count("\n") == 1
    assert not Path("runs").exists()


def make_roles(change_at: list[int]) -> tuple[Any, Matches]:
    """Agents whose weights are 1 and 2, and matches in which the pursuers learn first; the ratings are 900 and 1000."""
    agents: dict[str, Any] = {}
    pools = {}
    for i, behavior in enumerate(("pursuers", "evader")):
        weights = {"x": torch.full((1,), i + 1.0)}
        agents[behavior] = SimpleNamespace(acting_weights=lambda weights=weights: weights)
        pools[behavior] = SnapshotPool(5, 1.0, "uniform", np.random.default_rng(0))
        pools[behavior].add({"x": torch.zeros(1)}, 0, 900.0 + 100 * i)
    return agents, Matches(Pursuit(1).teams, 2, pools, change_at)


@pytest.mark.parametrize(
    ("game_step", "learner_steps", "is_taken", "next_learner"),
    [
        (50, 99, False, "pursuers"),
        (50, 100, True, "pursuers"),  # --save-steps
        (60, 1, True, "evader"),  # the policy at the end of a turn is the one that the other role meets
        (60, 0, False, "evader"),  # nothing was learned
    ],
)
def test_snapshots_of_a_turn(game_step: int, learner_steps: int, is_taken: bool, next_learner: str) -> None:
    """Every --save-steps and at the end of a turn, with the rating that the learner has then."""
    agents, matches = make_roles([60, 100])
    matches.learner_steps["pursuers"], matches.rating = learner_steps, 950.0
    assert matches.end_turn(agents, game_step, save_steps=100) == is_taken
    assert matches.learner == next_learner
    assert matches.rating == (950.0 if next_learner == "pursuers" else 1000.0)
    taken = [(s.step, s.rating, s.weights["x"].item()) for s in matches.pools["pursuers"].snapshots]
    assert taken == [(0, 900.0, 0.0)] + [(learner_steps, 950.0, 1.0)] * is_taken
    assert len(matches.pools["evader"].snapshots) == 1


def test_final_snapshots() -> None:
    """Each role's final policy with its own rating, in place of a snapshot that is newer than half of --save-steps."""
    agents, matches = make_roles([60, 100])
    matches.rating = 950.0
    for behavior, before, last in (("pursuers", 940, 1000), ("evader", 800, 900)):
        matches.pools[behavior].add({"x": torch.zeros(1)}, before, 1100.0)
        matches.learner_steps[behavior] = last
    matches.add_final_snapshots(agents, 150)
    found = {b: [(s.step, s.rating, s.weights["x"].item()) for s in p.snapshots] for b, p in matches.pools.items()}
    assert found == {
        "pursuers": [(0, 900.0, 0.0), (1000, 950.0, 1.0)],
        "evader": [(0, 1000.0, 0.0), (800, 1100.0, 0.0), (900, 1100.0, 2.0)],
    }


def test_the_run_ends_with_the_final_policies() -> None:
    """The last turn ends with the run, before --save-steps of it are over."""
    agents, matches = make_roles([60, 100])
    for game_step, expected in ((60, [0]), (99, [0]), (100, [0, 40])):
        matches.learner_steps["evader"] = game_step - 60
        matches.end_turn(agents, game_step, save_steps=150)
        assert [snapshot.step for snapshot in matches.pools["evader"].snapshots] == expected


def test_first_games_are_cut_at_different_steps() -> None:
    """Cut games are truncated, not rated and not counted; without an expected length nothing is cut."""
    for length, expected in ((8.0, [0, 1, 2, 3, 4, 5, 6, 7]), (None, [0] * 8)):
        env = Sumo(8)
        pool = SnapshotPool(1, 1.0, "uniform", np.random.default_rng(0))
        pool.add({"x": torch.zeros(1)}, 0, 1200.0)
        matches = Matches(env.teams, 8, {"sumo": pool}, game_length=length)
        env.reset(1)
        ends = [0] * 8
        for step in range(1, 8):
            result = env.step([np.zeros((8, 1, 2), dtype=np.float32)] * 2)
            assert not result.over.any()
            result, cut = matches.cut_games(result)
            assert all((truncations[:, 0] == cut).all() for truncations in result.truncations)
            matches.finish_games(env, result, cut)
            assert (env.time[cut] == 0).all()
            for game in cut.nonzero()[0]:
                ends[game] = step
        assert ends == expected
        assert matches.rating == 1200.0
        assert "selfplay/games" not in matches.metrics()


def test_a_game_that_ends_when_its_cut_is_due_is_not_cut() -> None:
    """It has ended and restarted by itself: no truncation, one rated game, no second restart."""
    env = Sumo(8)
    pool = SnapshotPool(1, 1.0, "uniform", np.random.default_rng(0))
    pool.add({"x": torch.zeros(1)}, 0, 1200.0)
    matches = Matches(env.teams, 8, {"sumo": pool}, game_length=8.0)  # game 3 is due at step 3
    env.reset(1)
    for step in range(1, 4):
        result = env.step([np.zeros((8, 1, 2), dtype=np.float32)] * 2)
        result.over[3] = step == 3
        result, cut = matches.cut_games(result)
        assert cut.nonzero()[0].tolist() == ([] if step == 3 else [step])
        matches.finish_games(env, result, cut)
    assert not any(truncations[3].any() for truncations in result.truncations)
    assert matches.learner_team[3] == 0  # it began on team 1, and has changed sides once
    assert matches.metrics()["selfplay/games"] == 1.0


def test_swaps_per_turn_are_those_of_the_turns_that_there_are(selfplay: ModuleType) -> None:
    """Whatever --team-change asks for: the turns are scaled, and swap_steps with them (pursuit: two against one)."""
    for team_change in (2_000, 5_000_000, None):
        args = selfplay.Args(env_id="pursuit", num_games=8, swaps_per_turn=4.0, team_change=team_change)
        env = selfplay.make_env(args, args.num_games)
        agents = {team.behavior: selfplay.Agent(team, args) for team in env.teams}
        matches = start_matches(dict.fromkeys(agents, args), env, agents, total_steps=1_000_000, stride=8)
        first, second = np.diff([0, *matches.change_at[:2]])  # game steps; each of the two pursuers takes one in each
        assert matches.swap_steps == pytest.approx(first / 4, abs=1)  # the evader is the one ghost
        matches.give_turn("evader")
        assert matches.swap_steps == pytest.approx(2 * second / 4, abs=1)


def test_swaps_per_turn_of_a_symmetric_game(selfplay: ModuleType) -> None:
    """A turn is what --team-change says, or the whole run."""
    for team_change, turn in ((4_000, 4_000), (None, 100_000)):
        args = selfplay.Args(num_games=8, swaps_per_turn=4.0, team_change=team_change)
        env = selfplay.make_env(args, args.num_games)
        agents = {"sumo": selfplay.Agent(env.teams[0], args)}
        matches = start_matches({"sumo": args}, env, agents, total_steps=100_000, stride=8)
        assert matches.swap_steps == turn / 4


def test_a_behaviour_that_cannot_learn_is_told(capsys: Capture) -> None:
    """The evader has two thirds of the game steps, and its first ones are random."""
    args = sac_selfplay.Args(env_id="pursuit", num_games=8, learning_starts=400)
    env = sac_selfplay.make_env(args, args.num_games)
    agents = {team.behavior: sac_selfplay.Agent(team, args) for team in env.teams}
    start_matches(dict.fromkeys(agents, args), env, agents, total_steps=1200, stride=8)
    update = "--learning-starts 400 leaves pursuers without an update: it learns in 400 game steps of the run"
    assert capsys.readouterr().err == f"warning: {update}\n"
    start_matches(dict.fromkeys(agents, args), env, agents, total_steps=1260, stride=8)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("save_steps", [4000, 3993, 3992])
@pytest.mark.parametrize("env_id", ["sumo", "pursuit"])
def test_a_learner_without_past_selves_is_told(env_id: str, save_steps: int, capsys: Capture) -> None:
    """With iterations of 8 steps one after 3,993 is due with the last; in pursuit each turn ends with a snapshot."""
    args = ppo_selfplay.Args(env_id=env_id, num_games=8, save_steps=save_steps)
    env = ppo_selfplay.make_env(args, args.num_games)
    agents = {team.behavior: ppo_selfplay.Agent(team, args) for team in env.teams}
    pools = start_matches(dict.fromkeys(agents, args), env, agents, total_steps=4000, stride=8).pools
    none = f"warning: --save-steps {save_steps:,} takes no snapshot before the last of 4,000 game steps"
    warns = env_id == "sumo" and save_steps > 3992
    assert capsys.readouterr().err == f"{none}: the learner plays no past self but its initial policy\n" * warns
    start_matches(dict.fromkeys(agents, args), env, agents, total_steps=4000, stride=8, rivals=pools)
    assert capsys.readouterr().err == ""


def test_games_that_never_end_are_told(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Once after that many steps; an end begins the count anew."""
    monkeypatch.setattr("utils.matches.MAX_STEPS", 5)
    env = Sumo(8)
    matches = Matches(env.teams, 8, {"sumo": make_pool(marks=1)})
    env.reset(1)
    for step in range(1, 13):
        result = env.step([np.zeros((8, 1, 2), dtype=np.float32)] * 2)
        result.over[:] = step == 4
        matches.finish_games(env, result, np.zeros(8, dtype=bool))
        assert ("no game has ended in 5 steps" in capsys.readouterr().err) == (step == 9)


def test_only_first_games_are_cut() -> None:
    """One that ends early is not cut, and neither is the next one; after a cut the learner changes sides, too.

    The length that is expected moves by a hundredth towards that of each game that ends; a reset begins all anew.
    """
    env, pool = Sumo(8), make_pool(marks=1)
    matches = Matches(env.teams, 8, {"sumo": pool}, game_length=80.0)  # game k is due at step 10 k
    env.reset(1)
    for step in range(1, 100):
        result = env.step([np.zeros((8, 1, 2), dtype=np.float32)] * 2)
        result.over[:] = False
        result.over[6] = step == 2
        result, cut = matches.cut_games(result)
        assert cut.nonzero()[0].tolist() == ([step // 10] if step in (10, 20, 30, 40, 50, 70) else [])
        matches.finish_games(env, result, cut)
    assert matches.learner_team.tolist() == [0, 0, 1, 0, 1, 0, 1, 0]  # all but game 0 have changed sides once
    assert matches.game_length == pytest.approx(80.0 + 0.01 * (2 - 80.0))
    assert matches.ages[0] == 99
    matches.begin_anew(1)
    assert matches.ages.tolist() == [0] * 8
    assert matches.cut_at.tolist() == [int(79.22 * k / 8) for k in range(8)]


def test_the_first_game_gives_the_length_where_it_is_unknown() -> None:
    """A game of PettingZoo has no max_steps."""
    env = Sumo(8)
    matches = Matches(env.teams, 8, {"sumo": make_pool(marks=1)}, game_length=0.0)
    env.reset(1)
    for step in range(1, 31):
        result = env.step([np.zeros((8, 1, 2), dtype=np.float32)] * 2)
        result.over[:] = False
        result.over[6] = step in (20, 30)
        matches.finish_games(env, *matches.cut_games(result))
    assert matches.game_length == pytest.approx(20.0 + 0.01 * (10 - 20.0))


def test_arguments_reach_pools_and_matches(selfplay: ModuleType) -> None:
    """Each has a value of its own; the first games are cut by the game's own length."""
    own: dict[str, Any] = {
        "scripted_share": 0.3,
        "current_share": 0.2,
        "elo_k": 8.0,
        "swap_steps": 77,
        "initial_elo": 900.0,
    }
    own |= {"play_against_latest_model_ratio": 0.7, "newest_share": 0.4}
    own |= {"window": 3, "opponent_sampling": "uniform"}
    args = selfplay.Args(env_id="sumo", num_games=8, **own)
    env = selfplay.make_env(args, args.num_games)
    agents = {"sumo": selfplay.Agent(env.teams[0], args)}
    rivals = {"sumo": make_pool(marks=2)}
    matches = start_matches({"sumo": args}, env, agents, 1000, 8, rivals)
    assert (matches.scripted_share, matches.current_share, matches.elo_k, matches.swap_steps) == (0.3, 0.2, 8.0, 77)
    assert (matches.game_length, matches.rating, matches.rivals) == (100, 900.0, rivals)
    pool, scripted = matches.pools["sumo"], matches.scripted["sumo"]
    rules = pool.latest_ratio, pool.newest_share, pool.snapshots.maxlen, pool.sampling
    assert rules == (0.7, 0.4, 3, "uniform")
    assert [(s.step, s.rating) for s in pool.snapshots] == [(0, 900.0)]
    assert [(s.name, s.rating) for s in scripted.snapshots] == [(x, 900.0) for x in ("random", "charge", "centre")]
