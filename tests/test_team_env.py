"""The door to PettingZoo games: who is in which team, what each row of an array is, who wins, and what is refused."""

import importlib
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_games
import vector_game
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Space, Tuple
from pettingzoo.classic.rps import rps
from pettingzoo.utils.conversions import turn_based_aec_to_parallel
from pettingzoo.utils.env_logger import EnvLogger
from toy_games import DUEL, Plan, Spaces

from utils.games import Sumo
from utils.team_env import (
    BUILT_IN,
    PettingZooGames,
    TaskError,
    Team,
    TeamEnv,
    TeamStep,
    describe_teams,
    guard,
    legal_actions,
    make_team_env,
    make_teams,
    name_teams,
    next_legal_actions,
    play_games,
    to_parallel,
)

OBS = Box(-np.inf, np.inf, (4,))
TWO_ON_ONE: Spaces = {agent: (OBS, Discrete(2)) for agent in ("red_0", "red_1", "blue_0")}
TRIO: Spaces = {agent: (OBS, Discrete(3)) for agent in ("red_0", "blue_0", "green_0")}


def make_toy(spaces: Spaces, plan: Plan, num_games: int = 1, **kwargs: Any) -> PettingZooGames:
    """A planned game through the door, before its first reset."""
    env = make_team_env("toy_games", num_games, {"spaces": spaces, "plan": plan, **kwargs})
    assert isinstance(env, PettingZooGames)
    return env


def random_actions(env: TeamEnv) -> list[np.ndarray]:
    """Of all teams."""
    return [env.scripted_actions("random", team) for team in range(len(env.teams))]


def random_play(env: TeamEnv) -> Callable[[int, np.ndarray], np.ndarray]:
    """As `play_games` takes it."""
    return lambda team, obs: env.scripted_actions("random", team)


# --- teams ---


@pytest.mark.parametrize(
    ("agents", "teams"),
    [
        (
            ["adversary_0", "adversary_1", "agent_0"],
            [("adversary", "adversary", [0, 1], ""), ("agent", "agent", [2], "")],
        ),
        (["player_0", "player_1"], [("player_0", "player", [0], ""), ("player_1", "player", [1], "")]),
        (["agent 1", "agent 2"], [("agent 1", "agent", [0], ""), ("agent 2", "agent", [1], "")]),
        (["first_0", "second_0"], [("first", "first", [0], ""), ("second", "second", [1], "")]),
        (["blue1", "red1", "blue2", "red2"], [("blue", "blue", [0, 2], ""), ("red", "red", [1, 3], "")]),
        (["alice", "bob"], [("alice", "alice", [0], ""), ("bob", "bob", [1], "")]),
        (["p_0", "p_1", "p_2"], [("p", "p", [0, 1, 2], "")]),
        ([], []),
        (["0", "1"], [("0", "agent", [0], ""), ("1", "agent", [1], "")]),
        (["B?team=7", "B?team=3"], [("B?team=7", "B", [0], "team=7"), ("B?team=3", "B", [1], "team=3")]),
        (
            ["S?team=1&agent=0", "S?team=0&agent=1", "S?team=1&agent=2", "S?team=0&agent=3"],
            [("S?team=1", "S", [0, 2], "team=1"), ("S?team=0", "S", [1, 3], "team=0")],
        ),
        (
            ["S?team=0?agent_id=4", "G?team=1?agent_id=5"],
            [("S?team=0", "S", [0], "team=0"), ("G?team=1", "G", [1], "team=1")],
        ),
        (["S?team=0_1", "S?team=0_2"], [("S?team=0", "S", [0, 1], "team=0")]),
        (
            ["S?team=0", "G?team=0", "S?team=1", "G?team=1", "S?team=0_2"],
            [("S?team=0", "S", [0, 4], "team=0"), ("G?team=0", "G", [1], "team=0")]
            + [("S?team=1", "S", [2], "team=1"), ("G?team=1", "G", [3], "team=1")],
        ),
    ],
)
def test_names_of_agents_make_teams(agents: list[str], teams: list[tuple[str, str, list[int], str]]) -> None:
    """In the order in which they first appear; agents of one id are of one side."""
    expected = [(name, behavior, [agents[i] for i in members], side) for name, behavior, members, side in teams]
    assert name_teams(agents) == expected


def test_flags_override_names() -> None:
    """--teams groups the agents, with one policy if all are alike; --symmetric has the last word."""

    def behaviors(
        agents: list[str], teams: dict[str, list[str]] | None, symmetric: bool | None
    ) -> list[tuple[str, str]]:
        env = toy_games.parallel_env({agent: (OBS, Discrete(2)) for agent in agents})
        return [(team.name, team.behavior) for team in make_teams("toy", env, teams, symmetric)]

    pair, three, four = ["p_0", "p_1"], ["a_0", "a_1", "b_0"], ["p_0", "p_1", "p_2", "p_3"]
    assert behaviors(pair, None, None) == [("p_0", "p"), ("p_1", "p")]
    assert behaviors(pair, None, False) == [("p_0", "p_0"), ("p_1", "p_1")]
    assert behaviors(["x", "y"], None, None) == [("x", "x"), ("y", "y")]
    assert behaviors(["x", "y"], None, True) == [("x", "shared"), ("y", "shared")]
    assert behaviors(["G?team=1", "S?team=0"], None, None) == [("G?team=1", "G"), ("S?team=0", "S")]
    assert behaviors(["S?team=1", "S?team=0"], None, False) == [("S?team=1", "S?team=1"), ("S?team=0", "S?team=0")]
    assert behaviors(three, {"one": ["b_0"], "two": ["a_1", "a_0"]}, None) == [("one", "one"), ("two", "two")]
    halves = {"odd": ["p_3", "p_1"], "even": ["p_0", "p_2"]}
    assert behaviors(four, halves, None) == [("odd", "shared"), ("even", "shared")]
    assert behaviors(four, halves, False) == [("odd", "odd"), ("even", "even")]
    thirds = {"a": ["p_3"], "b": ["p_1"], "c": ["p_0"]}
    assert behaviors(["p_0", "p_1", "p_3"], thirds, None) == [("a", "shared"), ("b", "shared"), ("c", "shared")]
    assert behaviors(["p_0", "p_1", "p_3"], thirds, False) == [("a", "a"), ("b", "b"), ("c", "c")]
    thirds["c"] = ["p_0", "p_2"]  # one team is unlike the others
    assert behaviors(four, thirds, None) == [("a", "a"), ("b", "b"), ("c", "c")]
    assert behaviors(["x", "y", "z"], None, None) == [("x", "x"), ("y", "y"), ("z", "z")]
    assert behaviors(["x", "y", "z"], None, True) == [("x", "shared"), ("y", "shared"), ("z", "shared")]
    unity = ["S?team=0", "S?team=1", "G?team=2"]
    assert behaviors(unity, None, None) == [("S?team=0", "S"), ("S?team=1", "S"), ("G?team=2", "G")]
    assert behaviors(unity, None, True) == [("S?team=0", "shared"), ("S?team=1", "shared"), ("G?team=2", "shared")]
    env = toy_games.parallel_env({agent: (OBS, Discrete(2)) for agent in four})
    assert make_teams("toy", env, halves, None)[0] == Team("odd", "shared", ("p_3", "p_1"), 4, 1, (2,))


# --- refusals ---

BAD_TEAMS: list[tuple[dict[str, list[str]], str]] = [
    ({"a": ["red_0"], "b": ["blue_0", "green_0"]}, "each of its agents once, and no other: red_0, blue_0"),
    ({"a": ["red_0"], "b": []}, "each of its agents once"),
    ({"a": ["red_0", "blue_0"], "b": []}, "each of its agents once"),
    ({"a": ["red_0"], "b": ["red_0", "blue_0"]}, "each of its agents once"),
    ({"a": ["red_0", "blue_0"]}, "two teams"),
]
BAD_SPACES: list[tuple[Spaces, str]] = [
    ({a: (Box(0, 1, (0,)), Discrete(2)) for a in DUEL}, "one number or more, and team red has none"),
    ({a: (OBS, Box(0, 1, (0,))) for a in DUEL}, "one number or more, and team red has none"),
    ({"p_0": (OBS, Discrete(2))}, r"--teams that make two teams or more of its agents, which are 1 now \(p: p_0\)"),
    ({"p_0": DUEL["red_0"], "p_1": DUEL["red_0"], "p_2": DUEL["red_0"]}, "which are 1 now"),
    ({}, "no possible_agents"),
    ({"a": (OBS, MultiBinary(3)), "b": (OBS, Discrete(2))}, "those of a are MultiBinary"),
    ({"a": (OBS, Discrete(2)), "b": (OBS, Box(-np.inf, 1.0, (2,)))}, "finite bounds, and those of b are Box"),
    ({"a": (OBS, Box(0, 5, (2,), np.int64)), "b": (OBS, Discrete(2))}, "Box of real numbers"),
    ({"a": (OBS, Tuple([Discrete(2)])), "b": (OBS, Discrete(2))}, "those of a are Tuple"),
    (
        {"a": (Sequence(OBS), Discrete(2)), "b": (OBS, Discrete(2))},
        "observations that flatten to a vector, and those of a",
    ),
    ({"a_0": (OBS, Discrete(2)), "a_1": (OBS, Box(-1, 1, (2,))), "b": (OBS, Discrete(2))}, "and a is of both"),
    (
        {"p_0": (OBS, Discrete(2)), "p_1": (OBS, Discrete(3))},
        r"--symmetric no: .*p_0 has .*\(2,\).* and p_1 has .*\(3,\)",
    ),
    ({"p_0": (OBS, Discrete(2)), "p_1": (Discrete(9), Discrete(2))}, "--symmetric no"),
    (
        {f"S?team={t}": (OBS, Discrete(2 + t // 2)) for t in range(3)},
        "--symmetric no: .*and S.team=0 has .* and S.team=2 has",
    ),
]


@pytest.mark.parametrize(("teams", "message"), BAD_TEAMS)
def test_bad_teams_are_refused(teams: dict[str, list[str]], message: str) -> None:
    """Unknown agents, forgotten ones, ones that are named twice, and a single team."""
    with pytest.raises(ValueError, match=f"^toy_games takes .*{message}"):
        make_team_env("toy_games", 1, teams=teams)


@pytest.mark.parametrize(("spaces", "message"), BAD_SPACES)
def test_bad_spaces_are_refused(spaces: Spaces, message: str) -> None:
    """What no policy here can play, and what one policy cannot play for several teams."""
    with pytest.raises(ValueError, match=f"^toy_games takes .*{message}"):
        make_toy(spaces, [{}])


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        (
            "no_such_game",
            {},
            "a built-in game \\(sumo, builds, pursuit\\) nor .*ModuleNotFoundError: No module named .no_such_game",
        ),
        ("", {}, "neither a built-in game"),
        ("..up", {}, "neither a built-in game"),
        ("broken_game", {}, "neither a built-in game.*RuntimeError: in two lines"),
        ("empty_game", {}, "parallel_env or env, or is given as module:Class, and that module has neither function"),
        ("lone_game", {}, "names are strings"),
        ("toy_games", {"size": 3}, "cannot be made: TypeError: .*size"),
        ("mpe2.simple_push_v3", {"max_cycle": 3}, "cannot be made: TypeError: .*max_cycle"),
        ("pettingzoo.classic.rps_v2", {"num_actions": 4}, "cannot be made: AssertionError: .*must be an odd number"),
        ("sumo", {"no_such_option": 3}, "cannot be made: .*no_such_option"),
        ("pursuit", {"num_games": 3}, "cannot be made: .*num_games"),
    ],
)
def test_bad_modules_are_refused(
    env_id: str, kwargs: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence that begins with the name, and the path of modules stays as it was."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_game.py").write_text("raise RuntimeError('in two\\nlines')\n")
    (tmp_path / "empty_game.py").write_text("")
    (tmp_path / "lone_game.py").write_text("class Game:\n    possible_agents = [0, 1]\n\n\nparallel_env = Game\n")
    path = sys.path[:]
    with pytest.raises(ValueError, match=f"^{env_id.replace('.', '[.]')} .*{message}") as refusal:
        make_team_env(env_id, 1, kwargs)
    assert "\n" not in str(refusal.value)
    assert sys.path == path


def test_rendering_is_checked_when_a_game_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first copy is made for it; a game that cannot do it is refused before it is played."""
    env = make_team_env("toy_games", 2, render=True)
    assert isinstance(env, PettingZooGames)
    assert [getattr(game, "render_mode", None) for game in env.envs] == ["rgb_array", None]
    env.reset(0)
    assert env.render().shape == (4, 6, 3)
    monkeypatch.chdir(tmp_path)
    lines = "import toy_games\n\n\nclass Dark(toy_games.Planned):\n    def render(self):\n        return None\n\n\n"
    seeded = "    def reset(self, seed, options=None):\n        return super().reset(int(seed), options)\n\n"
    (tmp_path / "dark_game.py").write_text(
        f"{lines}def parallel_env(render_mode=None):\n    return Dark(toy_games.DUEL, toy_games.SHORT)\n"
    )
    (tmp_path / "seeded_game.py").write_text(
        f"import toy_games\n\n\nclass Seeded(toy_games.Planned):\n{seeded}\n"
        "def parallel_env(**kwargs):\n    return Seeded(toy_games.DUEL, toy_games.SHORT, **kwargs)\n"
    )
    make_team_env("seeded_game", 1, render=True)  # training gives the first reset a seed, too
    make_team_env("dark_game", 1)
    with pytest.raises(ValueError, match="^dark_game cannot be made: TypeError: render must give .*, not NoneType"):
        make_team_env("dark_game", 1, render=True)


def test_a_game_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is found there."""
    (tmp_path / "my_own_game.py").write_text("from toy_games import parallel_env\n")
    monkeypatch.chdir(tmp_path)
    assert [team.name for team in make_team_env("my_own_game", 1).teams] == ["red", "blue"]


def test_built_in_games() -> None:
    """Come through the same door, with the same flag for their policies."""
    assert {team.behavior for team in make_team_env("sumo", 2).teams} == {"sumo"}
    assert len({team.behavior for team in make_team_env("sumo", 2, symmetric=False).teams}) == 2
    assert [len(team.agents) for team in make_team_env("pursuit", 2).teams] == [2, 1]
    with pytest.raises(ValueError, match="^pursuit takes --symmetric no"):
        make_team_env("pursuit", 2, symmetric=True)
    with pytest.raises(ValueError, match="^sumo takes no --teams"):
        make_team_env("sumo", 2, teams={"a": ["left_0"], "b": ["right_0"]})


# --- a user's own vectorised game ---


def test_a_vectorised_game_by_its_name() -> None:
    """A class or a function, with its arguments; the built-in games have such names, too."""
    env = make_team_env("vector_game:Auction", 5, {"rounds": 2}, symmetric=False)
    assert isinstance(env, vector_game.Auction)
    assert [(team.name, team.behavior) for team in env.teams] == [("east", "east"), ("west", "west")]
    assert make_team_env("vector_game:make", 2).teams[0].behavior == "bidder"
    scores = play_games(env, lambda team, obs: env.scripted_actions(["high", "random"][team], team), 0)
    assert (scores[:, 0] == 2.0).all()
    assert (scores[:, 1] < 2.0).all()
    for name, path in BUILT_IN.items():  # the built-in games pass the check that they are spared
        assert type(make_team_env(path, 2)) is type(make_team_env(name, 2))


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        ("Auction", "num_games", "num_games is 3, and 2 were asked for"),
        ("Auction", "teams", "teams must be two or more of utils.team_env.Team"),
        ("Auction", "one name", "teams must have different names and be of two sides or more"),
        ("Auction", "one side", "teams must have different names and be of two sides or more"),
        ("Auction", "no agents", "teams must have agents and a tuple of branches"),
        ("Auction", "action_dim", "obs_dim, action_dim and branches must be integers from 1"),
        ("Auction", "obs_dim", "obs_dim, action_dim and branches must be integers from 1"),
        ("Auction", "max_steps", "max_steps must be a number, not '100'"),
        ("Auction", "a string", "scripted_by_team must have a tuple of names for each team, random among them"),
        ("Auction", "nobody", "alive must have an agent in each game after a reset"),
        ("Auction", "no masks", "action_masks must have 2 items, one a team, not None"),
        ("Auction", "nan", "scripted_actions of high must give finite numbers for east"),
        ("Auction", "floats", r"TypeError: render must give an array \(height, width, 3\) of uint8, not .* of float64"),
        ("Auction", "branches", "action_dim must be the number of branches where a team has some"),
        (
            "Auction",
            "players",
            "takes the same scripted players for teams that share a policy, and east has",
        ),
        ("Auction", "scripted", "scripted_by_team must have a tuple of names for each team, random among them"),
        ("Auction", "obs", r"reset must give arrays of .*\(2, 1, 2\).* not .*\(2, 1, 1\)"),
        ("Auction", "alive", "alive must give arrays of"),
        ("Auction", "masks", "action_masks must have 2 items, one a team, not "),
        ("Auction", "step type", "step must return a utils.team_env.TeamStep, not a SimpleNamespace"),
        ("Auction", "mask shape", "action_masks must give arrays of"),
        ("Auction", "final masks", "final_masks must give arrays of"),
        ("Auction", "reset", "KeyError: 'nothing there'"),
        ("Auction", "render", "TypeError: render must give an array .*, not NoneType"),
        ("Auction", "exit", "cannot be made: SystemExit: no display"),
        ("Auction", "step exit", "cannot be made: SystemExit: 0"),
        ("Auction", "scores", r"scores of step must give arrays of .*\(2, 2\).*, not .*\(2,\)"),
        ("Auction", "actions", "scripted_actions of random must give arrays of"),
        ("Auction", "restart", "restart must give arrays of"),
        ("Waiting", None, "action_masks must give each agent of west that is alive a legal action in each branch"),
        ("not_a_game", None, "a TeamEnv must have num_games, teams, .*, and object does not"),
        (
            "nobody",
            None,
            "neither a built-in game \\(sumo, builds, pursuit\\) nor a module that can be imported: AttributeError",
        ),
        ("", None, "neither a built-in game"),
    ],
)
def test_a_vectorised_game_is_checked_when_it_is_made(name: str, fault: str | None, message: str) -> None:
    """One sentence says what is missing."""
    kwargs = {} if fault is None else {"fault": fault}
    with pytest.raises(ValueError, match=f"^vector_game:{name} .*{message}") as refusal:
        make_team_env(f"vector_game:{name}", 2, kwargs, render=True)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("choice", "is_legal"), [(2, True), (-1, True), (0.5, True), (1, False), (1, True)])
def test_choices_of_a_scripted_player_are_checked(choice: float, is_legal: bool) -> None:
    """Out of range, half, or masked; the last one is legal."""
    kwargs = {"choice": choice, "is_legal": is_legal}
    if choice == 1 and is_legal:
        assert make_team_env("vector_game:Choosing", 2, kwargs).num_games == 2
        return
    with pytest.raises(ValueError, match="scripted_actions of random must give legal choices for east"):
        make_team_env("vector_game:Choosing", 2, kwargs)


def test_tasks_for_one_agent_are_told() -> None:
    """The sentence names the scripts for them."""
    with pytest.raises(ValueError, match="^Pendulum-v1 is a task for one agent: .* sac_continuous.py or ppo_contin"):
        make_team_env("Pendulum-v1", 2)


def test_a_fault_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and the line of a user's game."""
    (tmp_path / "typo_game.py").write_text("def parallel_env():\n    return actoin\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^typo_game cannot be made: NameError: .* \(typo_game.py, line 2\)$"):
        make_team_env("typo_game", 1)


@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("reset", {"red_0": np.zeros(4)}, "environment 0 in reset: reset must return observations and infos"),
        ("step", None, "environment 0 in step: blue_0 has acted and must have a reward, and there is none"),
    ],
)
def test_what_a_pettingzoo_game_forgets(method: str, result: Any, message: str) -> None:
    """A reward of an agent that has acted, and infos at a reset."""
    game = toy_games.parallel_env(plan=[{}, {}, {}])
    env = PettingZooGames([game], make_teams("toy_games", game, None, None))
    env.reset(0)
    whole = game.step

    def step(actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        observations, _, *rest = whole(actions)
        return observations, {"red_0": 1.0}, *rest

    setattr(game, method, step if method == "step" else lambda **_: result)
    with pytest.raises(TaskError, match=message):
        env.step(random_actions(env)) if method == "step" else env.reset(0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("late exit", "step of Auction: SystemExit: 0"),
        ("late nan", "step of Auction: the scores of games that are over must be numbers, not"),
        ("late restart", "restart of Auction: SystemExit: 1"),
        ("no end", "step of Auction: where a game is over, each agent that was alive must end"),
        ("late silent", "step of Auction: .*elsewhere it must either end or stay alive"),
        ("late stays", "step of Auction: .*elsewhere it must either end or stay alive"),
        ("late obs", "step of Auction: ValueError: final_obs of step must give arrays of"),
        ("late rewards", "step of Auction: ValueError: rewards of step must give arrays of"),
        ("late scores", "step of Auction: ValueError: scores of step must give arrays of"),
        ("late type", "step of Auction: ValueError: terminations of step must give arrays of"),
        ("late alive", "step of Auction: ValueError: alive must give arrays of"),
        ("late nobody", "step of Auction: alive must have an agent in each game that has begun anew"),
    ],
)
def test_a_vectorised_game_that_breaks_down_later(fault: str, message: str) -> None:
    """In its second game."""
    env = make_team_env("vector_game:Auction", 2, {"fault": fault})
    env.reset(0)
    sound = {"late exit": 3, "late nan": 5, "late restart": 5, "late silent": 3, "late stays": 3}.get(fault, 2)
    for _ in range(sound):
        env.step(random_actions(env))
    with pytest.raises(TaskError, match=f"^{message}"):
        env.restart(np.array([1])) if fault == "late restart" else env.step(random_actions(env))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "error", ["SystemExit(0)", "BaseException(0)", "AttributeError('no such thing')", "ValueError('in two\\nlines')"]
)
@pytest.mark.parametrize("place", ["parallel_env", "possible_agents", "observation_space", "module"])
def test_whatever_a_game_raises_while_it_is_made(
    error: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence that begins with its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "raising_game", raising=False)
    lines = "import toy_games\n\nclass Game(toy_games.Planned):\n    def stop(self, *_):\n        raise {0}\n"
    lines += "\ndef parallel_env():\n    return Game(toy_games.DUEL, [{{}}])\n"
    change = {
        "parallel_env": "def parallel_env():\n    raise {0}\n",
        "possible_agents": "Game.possible_agents = property(Game.stop, Game.stop)\n",
        "observation_space": "Game.observation_space = Game.stop\n",
        "module": "raise {0}\n",
    }[place]
    (tmp_path / "raising_game.py").write_text((lines + change).format(error))
    with pytest.raises(ValueError, match=f"^raising_game .*{error.partition('(')[0]}: ") as refusal:
        make_team_env("raising_game", 1)
    assert "\n" not in str(refusal.value)


def test_a_game_that_exits() -> None:
    """Neither `sys.exit` nor another exception that is no Exception ends a run of ours with status 0."""

    class Exits(toy_games.Planned):
        def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
            if self.now == 1:
                sys.exit()
            return super().step(actions)

        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            if self.game == 0:
                raise BaseException("the end")
            return super().reset(seed)

    game = Exits(DUEL, [{}] * 2)
    env = PettingZooGames([game], make_teams("toy", game, None, None))
    env.reset(0)
    env.step(random_actions(env))
    with pytest.raises(TaskError, match="^environment 0 in step: SystemExit"):
        env.step(random_actions(env))
    game.game, game.plan = -1, [{}]
    env.reset(0)
    with pytest.raises(TaskError, match="^environment 0 in reset: BaseException: the end"):
        env.step(random_actions(env))


# --- arrays ---


def test_a_game_that_ends_begins_anew_in_the_same_step() -> None:
    """Observations are [game, step, agent]. A game's last one is in final_obs only; only the first reset is seeded."""
    end = {agent: {"reward": 2.5, "end": "truncation"} for agent in DUEL}
    env = make_toy(DUEL, [{}, {}, end], num_games=2)
    obs = env.reset(5)
    np.testing.assert_array_equal(obs[1][:, 0, :3], [[0, 0, 1]] * 2)
    for now in range(1, 7):
        step = env.step(random_actions(env))
        game, ends = (now - 1) // 3, now % 3 == 0
        np.testing.assert_array_equal(step.final_obs[0][:, 0, :3], [[game, (now - 1) % 3 + 1, 0]] * 2)
        np.testing.assert_array_equal(step.obs[0][:, 0, :3], [[game + ends, now % 3, 0]] * 2)
        assert (step.obs[0] == step.final_obs[0]).all() == (not ends)
        for team in range(2):
            np.testing.assert_array_equal(step.rewards[team], [[2.5 * ends]] * 2)
            assert (step.truncations[team] == ends).all()
            assert not step.terminations[team].any()
            assert env.alive[team].all()
        assert (step.over == ends).all()
    for copy in env.envs:
        assert isinstance(copy, toy_games.Planned)
        assert isinstance(copy.seeds[0], int)
        assert copy.seeds[1:] == [None, None]
    assert step.obs[0].dtype == step.final_obs[0].dtype == step.rewards[0].dtype == np.float32
    assert step.terminations[0].dtype == step.truncations[0].dtype == step.over.dtype == bool


def test_copies_are_at_different_points_of_their_games() -> None:
    """A game's end leaves the other games alone."""
    short = [{}, {agent: {"end": "termination"} for agent in DUEL}]
    teams = make_teams("toy", toy_games.parallel_env(), None, None)
    env = PettingZooGames([toy_games.Planned(DUEL, short), toy_games.Planned(DUEL, [{}, *short])], teams)
    env.reset(0)
    overs, steps = [], []
    for _ in range(6):
        step = env.step(random_actions(env))
        overs.append(step.over.tolist())
        steps.append(step.obs[1][:, 0, :2].tolist())
    assert overs == [[False, False], [True, False], [False, True], [True, False], [False, False], [True, True]]
    assert steps[2] == [[1, 1], [1, 0]]
    assert steps[4] == [[2, 1], [1, 2]]


@pytest.mark.parametrize("lingers", [False, True])
@pytest.mark.parametrize("end", ["termination", "truncation", "vanishing"])
def test_an_agent_that_leaves_early(end: str, lingers: bool) -> None:
    """Is flagged once, in the step in which it leaves; from then on it is not asked, sees zeros and earns nothing."""
    plan: Plan = [{}, {"red_1": {"reward": 3.0, "end": end}}, {"red_0": {"reward": 1.0}, "red_1": {"reward": 9.0}}, {}]
    env = make_toy(TWO_ON_ONE, plan, lingers=lingers)
    obs = env.reset(0)[0]
    assert (obs[0, 1] != 0).any()
    flags, alive, last_seen, rewards = [], [], [], []
    for _ in range(4):
        step = env.step(random_actions(env))
        flags.append([step.terminations[0][0, 1], step.truncations[0][0, 1]])
        alive.append(env.alive[0][0].tolist())
        rewards.append(step.rewards[0][0, 1])
        last_seen.append((step.obs[0][0, 1, :3].tolist(), step.final_obs[0][0, 1, :3].tolist()))
    expected = [end != "truncation", end == "truncation"]
    assert flags == [[False, False], expected, [False, False], [False, False]]
    assert alive == [[True, True], [True, False], [True, False], [True, True]]
    assert last_seen[0] == ([0, 1, 1], [0, 1, 1])
    assert last_seen[1] == ([0, 0, 0], [0, 1, 1] if end == "vanishing" else [0, 2, 1])  # the last that it was told
    assert last_seen[2] == ([0, 0, 0], [0, 0, 0])
    assert last_seen[3] == ([1, 0, 1], [0, 0, 0])
    assert step.over.all()
    assert step.terminations[0].tolist() == [[True, False]]
    last_reward = 0.0 if end == "vanishing" else 3.0
    assert rewards == [0.0, last_reward, 0.0, 0.0]
    assert step.scores.tolist() == [[(last_reward + 1.0) / 2, 0.0]]


class Late(toy_games.Planned):
    """Its agent red_1 joins with the first step."""

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        observations, infos = super().reset(seed)
        self.agents.remove("red_1")
        return {agent: observations[agent] for agent in self.agents}, {}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        results = super().step(actions)
        if self.now == 1:
            self.agents.append("red_1")
            results[0]["red_1"] = self.observe("red_1")
        return results


def test_an_agent_that_joins_later() -> None:
    """Is not asked before, and acts from then on."""
    game = Late(TWO_ON_ONE, [{}, {}])
    env = PettingZooGames([game], make_teams("late", game, None, None))
    obs = env.reset(0)[0]
    assert (env.alive[0].tolist(), obs[0, 1].tolist()) == ([[True, False]], [0.0] * 4)
    step = env.step(random_actions(env))
    assert (env.alive[0].tolist(), step.obs[0][0, 1, :3].tolist()) == ([[True, True]], [0.0, 1.0, 1.0])
    assert not step.terminations[0].any()
    assert env.step(random_actions(env)).over.all()
    assert [sorted(actions) for actions in game.received] == [["blue_0", "red_0"], ["blue_0", "red_0", "red_1"]]


def test_a_game_outlives_one_of_its_teams() -> None:
    """It is over when nobody is left, not when a team is gone."""
    env = make_toy(TWO_ON_ONE, [{"blue_0": {"end": "termination"}}, {}, {"red_1": {"reward": 2.0}}])
    env.reset(0)
    overs = []
    for _ in range(3):
        step = env.step(random_actions(env))
        overs.append(step.over.tolist())
    assert overs == [[False], [False], [True]]
    assert step.scores.tolist() == [[1.0, 0.0]]


def test_what_was_returned_is_not_overwritten() -> None:
    """Neither arrays of a step nor who was alive and what was legal before it."""
    plan: Plan = [{"red_0": {"end": "truncation"}}, {}, {}]
    env = make_toy(TWO_ON_ONE, plan, num_games=2)
    held: list[np.ndarray] = [*env.reset(0)]
    copies = [array.copy() for array in held]
    for _ in range(5):
        new = [*env.alive, *(mask for mask in env.action_masks if mask is not None)]
        for part in env.step(random_actions(env)):
            new += part if isinstance(part, list) else [part]
        held, copies = held + new, copies + [array.copy() for array in new]
        held, copies = held[-60:], copies[-60:]
    assert all((array == copy).all() for array, copy in zip(held, copies, strict=True))


def test_box_actions_reach_the_bounds_of_each_agent() -> None:
    """[-1, 1] is mapped linearly and clipped; what a smaller agent has no use for is ignored."""
    wide = Box(np.array([[-3.0, 0.0], [5.0, -1e3]], np.float32), np.array([[1.0, 10.0], [6.0, 1e3]], np.float32))
    narrow = Box(0.0, 0.1, (1,), np.float64)
    env = make_toy({"red_0": (OBS, wide), "red_1": (OBS, narrow), "blue_0": (OBS, narrow)}, [{}])
    assert [(team.action_dim, team.branches) for team in env.teams] == [(4, ()), (1, ())]
    assert env.action_masks == [None, None]
    env.reset(0)
    red = np.array([[[-1.0, 0.2, 7.0, -0.5], [0.3, 9.0, -9.0, 0.0]]], np.float32)
    env.step([red, np.array([[[-2.0]]], np.float32)])
    assert isinstance(env.envs[0], toy_games.Planned)
    (received,) = env.envs[0].received
    np.testing.assert_allclose(received["red_0"], [[-3.0, 6.0], [6.0, -500.0]], rtol=1e-6)
    np.testing.assert_allclose(received["red_1"], [np.interp(0.3, [-1, 1], [0, 0.1])], rtol=1e-6)
    np.testing.assert_array_equal(received["blue_0"], [0.0])
    assert received["red_1"].dtype == np.float64


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_largest_bounds_do_not_overflow(dtype: type) -> None:
    """`high - low` would be inf."""
    largest = np.finfo(dtype).max
    env = make_toy({agent: (OBS, Box(-largest, largest, (5,), dtype)) for agent in DUEL}, [{}])
    env.reset(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.step([np.array([[[-1.0, -0.5, 0.0, 0.5, 2.0]]], np.float32)] * 2)
    assert isinstance(env.envs[0], toy_games.Planned)
    received = env.envs[0].received[0]["red_0"]
    assert received.dtype == dtype
    np.testing.assert_allclose(received, np.array([-1.0, -0.5, 0.0, 0.5, 1.0]) * largest)


def test_discrete_actions_and_observations_of_unequal_agents() -> None:
    """Actions count from each space's start, masks forbid what a smaller agent has not, and observations are flat."""
    nested = Dict({"b": Box(0, 1, (2, 2)), "a": Discrete(3)})
    spaces: dict[str, tuple[Space, Space]] = {
        "red_0": (Discrete(6), MultiDiscrete([2, 4], start=[10, 20])),
        "red_1": (OBS, Discrete(3, start=-1)),
        "blue_0": (nested, Discrete(2)),
    }
    env = make_toy(spaces, [{}] * 300)
    assert [(t.obs_dim, t.action_dim, t.branches) for t in env.teams] == [(6, 2, (3, 4)), (7, 1, (2,))]
    game = env.envs[0]
    assert isinstance(game, toy_games.Planned)
    nested_obs = {"a": 2, "b": np.eye(2)}
    observe = partial(toy_games.Planned.observe, game)
    game.observe = lambda agent: nested_obs if agent == "blue_0" else observe(agent)  # type: ignore[method-assign]
    obs = env.reset(0)
    np.testing.assert_array_equal(obs[0][0, 0], [0, 1, 0, 0, 0, 0])  # Discrete observations are one-hot
    np.testing.assert_array_equal(obs[0][0, 1, [0, 1, 2, 4, 5]], [0, 0, 1, 0, 0])
    np.testing.assert_array_equal(obs[1][0, 0], [0, 0, 1, 1, 0, 0, 1])
    masks = env.action_masks[0]
    assert masks is not None
    assert masks.astype(int).tolist() == [[[1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]]]
    env.step([np.array([[[1, 3], [0, 0]]]), np.array([[[1]]])])
    received = game.received[0]
    assert (received["red_0"].tolist(), received["red_1"], received["blue_0"]) == ([11, 23], -1, 1)
    for _ in range(200):
        env.step(random_actions(env))
    seen = [{tuple(np.ravel(actions[agent])) for actions in game.received[1:]} for agent in spaces]
    assert seen == [{(i, j) for i in (10, 11) for j in (20, 21, 22, 23)}, {(-1,), (0,), (1,)}, {(0,), (1,)}]


def test_masks_from_info() -> None:
    """One array for Discrete, one per branch for MultiDiscrete. Where nothing is legal, the first action is."""
    spaces: Spaces = {"red_0": (OBS, Discrete(3)), "blue_0": (OBS, MultiDiscrete([2, 3]))}
    first = {
        "red_0": {"action_mask": np.array([0, 1, 1], np.int8)},
        "blue_0": {"action_mask": (np.array([0, 1]), [1, 0, 1])},
    }
    later = {
        "red_0": {"info": {"action_mask": np.zeros(3)}},
        "blue_0": {"info": {"action_mask": np.array([0, 0, 0, 0, 1])}},
    }
    env = make_toy(spaces, [later, {}, {}], first_infos=first)

    def masks() -> list[list[int]]:
        return [mask[0, 0].astype(int).tolist() for mask in env.action_masks if mask is not None]

    env.reset(0)
    assert masks() == [[0, 1, 1], [0, 1, 1, 0, 1]]
    env.step(random_actions(env))
    assert masks() == [[1, 0, 0], [1, 0, 0, 0, 1]]
    env.step(random_actions(env))
    assert masks() == [[1, 1, 1], [1, 1, 1, 1, 1]]
    env.step(random_actions(env))
    assert masks() == [[0, 1, 1], [0, 1, 1, 0, 1]]  # of the next game


def test_masks_of_a_restarted_game() -> None:
    """Who waits for their turn in the new game has one legal action, whatever was legal in the old one."""
    env = make_team_env("pettingzoo.classic.tictactoe_v3", 2)
    env.reset(0)
    first = [None if mask is None else mask.copy() for mask in env.action_masks]
    for games in ([1], [0, 1]):
        env.step([env.scripted_actions("random", team) for team in range(2)])
        restart: Any = env.restart  # type: ignore[attr-defined]
        restart(np.array(games))
        for mask, expected in zip(env.action_masks, first, strict=True):
            np.testing.assert_array_equal(mask[games], expected[games])  # type: ignore[index]


# --- who wins ---


@pytest.mark.parametrize(
    ("plan", "scores"),
    [
        ([{"red_0": {"reward": 5.0}, "blue_0": {"reward": 0.1}}, {"red_1": {"reward": -1.0}}], [2.0, 0.1]),
        ([{"red_0": {"reward": 5.0}}, {"red_1": {"info": {"outcome": 1}}}], [2.5, 0.0]),  # of one team only
        (
            [{"blue_0": {"info": {"outcome": 7}}}, {"red_1": {"info": {"outcome": -1}}, "blue_0": {"reward": 1.0}}],
            [-1.0, 7.0],
        ),
        (
            [{"red_0": {"info": {"outcome": 1}}}, {a: {"info": {"outcome": 0}, "reward": 9.0} for a in TWO_ON_ONE}],
            [0.0, 0.0],
        ),
        ([{a: {"reward": 0.1} for a in TWO_ON_ONE}, {}, {a: {"reward": 0.2} for a in TWO_ON_ONE}], [0.3, 0.3]),
        ([{"blue_0": {"reward": 0.1}}] * 9 + [{"red_0": {"reward": 2.0}, "blue_0": {"reward": 0.1}}], [1.0, 1.0]),
    ],
)
def test_the_outcome_rule(plan: Plan, scores: list[float]) -> None:
    """Outcomes that all teams were given in any step, or else mean returns; nothing is left over for the next game."""
    env = make_toy(TWO_ON_ONE, plan)
    env.reset(0)
    for _ in range(2):
        for now in range(len(plan)):
            step = env.step(random_actions(env))
            assert step.over.all() == (now == len(plan) - 1)
            np.testing.assert_allclose(step.scores, [scores if step.over.all() else [0.0, 0.0]], rtol=1e-6)
    assert (step.scores[0, 0] == step.scores[0, 1]) == (scores[0] == scores[1])


@pytest.mark.parametrize(
    ("happens", "message"),
    [
        ({"info": {"outcome": "win"}}, r'info\["outcome"\] of blue_0 must be a finite number, not \'win\''),
        ({"info": {"outcome": [1, 0]}}, r"must be a finite number, not \[1, 0\]"),
        ({"info": {"outcome": np.nan}}, "must be a finite number, not nan"),
        ({"info": {"outcome": np.array(np.inf)}}, r"must be a finite number, not array\(inf\)"),
        ({"info": None}, "AttributeError"),
        ({"info": {"action_mask": [1]}}, "the action mask of blue_0 must have 3 numbers, one for each action, not 1"),
        ({"reward": np.nan, "end": "termination"}, r"the returns of red, blue must be numbers, not \[ ?0. nan\]"),
        ({"reward": "much"}, "the reward of blue_0 must be a number, not 'much'"),
        ({"reward": [0.0, 1.0]}, r"the reward of blue_0 must be a number, not \[0.0, 1.0\]"),
        ({"obs": np.zeros(5)}, r"the observation of blue_0 must be 4 numbers, from its space Box\(.*\), not 5 num"),
        ({"obs": np.zeros(3)}, "must be 4 numbers.*not 3 numbers"),
        ({"obs": {"x": 1}}, r"must be 4 numbers.*not {'x': 1} \(TypeError"),
        ({"obs": "none"}, "blue_0 is in the game and must have an observation, and there is none"),
    ],
)
def test_what_a_game_must_not_give(happens: dict[str, Any], message: str) -> None:
    """One sentence names the environment and the agent; before, some were silent and some a traceback of ours."""

    class Bad(toy_games.Planned):
        def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
            results = super().step(actions)
            if self.now == 2 and "obs" in happens:
                results[0]["blue_0"] = happens["obs"]
                if isinstance(happens["obs"], str):
                    del results[0]["blue_0"]
            return results

    teams = make_teams("toy", toy_games.parallel_env(), None, None)
    ends = {"end": "termination"} if "end" in happens else {}
    plan: Plan = [{}, {"blue_0": happens, "red_0": ends}, {}]
    env = PettingZooGames([toy_games.Planned(DUEL, [{}] * 9), Bad(DUEL, plan)], teams)
    env.reset(0)
    env.step(random_actions(env))
    with pytest.raises(TaskError, match=f"^environment 1 in step: .*{message}") as error:
        env.step(random_actions(env))
    assert "\n" not in str(error.value)


def test_a_dict_observation_of_another_size() -> None:
    """The sentence counts its numbers."""
    space = Dict({"x": OBS})
    game = toy_games.Planned({agent: (space, Discrete(2)) for agent in DUEL}, [{}])
    game.observe = lambda agent: {"x": np.zeros(9)}  # type: ignore[method-assign]
    env = PettingZooGames([game], make_teams("toy", game, None, None))
    with pytest.raises(TaskError, match="not 9 numbers$"):
        env.reset(0)


@pytest.mark.parametrize("obs", [-1, 3, 0.5, None])
def test_a_discrete_observation_outside_of_its_space(obs: Any) -> None:
    """One below the start was the last one without a word."""
    game = toy_games.Planned({agent: (Discrete(3), Discrete(2)) for agent in DUEL}, [{}])
    game.observe = lambda agent: obs  # type: ignore[method-assign]
    env = PettingZooGames([game], make_teams("toy", game, None, None))
    with pytest.raises(TaskError, match=rf"^environment 0 in reset: .* red_0 .* Discrete\(3\), not {obs}"):
        env.reset(0)


def test_an_outcome_of_none_is_no_outcome() -> None:
    """The returns decide."""
    env = make_toy(DUEL, [{"red_0": {"info": {"outcome": None}, "reward": 2.0}, "blue_0": {"info": {"outcome": 3}}}])
    env.reset(0)
    assert env.step(random_actions(env)).scores.tolist() == [[2.0, 0.0]]


def test_a_game_that_begins_without_agents() -> None:
    """It would be over before it began."""
    game = toy_games.Planned(DUEL, [{}])
    env = PettingZooGames([game], make_teams("toy", game, None, None))
    game.possible_agents = []
    with pytest.raises(TaskError, match="^environment 0 in reset: a game must begin with at least one agent"):
        env.reset(0)


def test_an_outcome_does_not_outlive_its_game() -> None:
    """The next game is decided by its own."""
    env = make_toy(DUEL, [{agent: {"info": {"outcome": 3.0}, "end": "termination"} for agent in DUEL}])
    env.reset(0)
    assert env.step(random_actions(env)).scores.tolist() == [[3.0, 3.0]]
    assert isinstance(env.envs[0], toy_games.Planned)
    env.envs[0].plan = [{"red_0": {"reward": 1.0}}]
    assert env.step(random_actions(env)).scores.tolist() == [[1.0, 0.0]]


def test_three_teams() -> None:
    """Each has its scores and arrays of its own; outcomes count if all three were given one."""
    outcomes: Plan = [{agent: {"info": {"outcome": k}} for k, agent in enumerate(TRIO)}]
    plan: Plan = [
        {"blue_0": {"reward": 2.0, "info": {"outcome": 7}}},
        {"green_0": {"reward": -1.0}, "red_0": {"info": {"outcome": 5}}},
    ]
    teams = make_teams("toy", toy_games.parallel_env(TRIO), None, None)
    assert [(team.name, team.agents) for team in teams] == [
        ("red", ("red_0",)),
        ("blue", ("blue_0",)),
        ("green", ("green_0",)),
    ]
    env = PettingZooGames([toy_games.Planned(TRIO, plan), toy_games.Planned(TRIO, plan[:1] + outcomes)], teams)
    assert env.scripted_by_team == (("random",),) * 3
    obs = env.reset(0)
    assert [team_obs[:, 0, 2].tolist() for team_obs in obs] == [[0, 0], [1, 1], [2, 2]]
    assert env.step(random_actions(env)).scores.tolist() == [[0.0] * 3] * 2
    step = env.step([np.full((2, 1, 1), t) for t in range(3)])
    assert step.scores.tolist() == [[0.0, 2.0, -1.0], [0.0, 1.0, 2.0]]
    assert [rewards[:, 0].tolist() for rewards in step.rewards] == [[0, 0], [0, 0], [-1, 0]]
    for game in env.envs:
        assert isinstance(game, toy_games.Planned)
        assert game.received[-1] == {"red_0": 0, "blue_0": 1, "green_0": 2}
    assert play_games(env, random_play(env), 0).tolist() == step.scores.tolist()


def test_legal_actions() -> None:
    """Of a team without masks all, of Box actions none, and otherwise those of the mask."""
    spaces: Spaces = {"red_0": (OBS, Discrete(3)), "blue_0": (OBS, Box(0, 1, (2,)))}
    env = make_toy(spaces, [{}], num_games=2, first_infos={"red_0": {"action_mask": [1, 0, 1]}})
    env.reset(0)
    assert legal_actions(env, 0).tolist() == [[[True, False, True]]] * 2
    assert legal_actions(env, 1).shape == (2, 1, 0)
    unmasked = make_team_env("sumo", 4, {"actions": "multidiscrete"})
    assert unmasked.action_masks == [None, None]
    assert legal_actions(unmasked, 1).tolist() == [[[True] * 6]] * 4


@pytest.mark.parametrize("end", ["termination", "truncation"])
def test_next_legal_actions(end: str) -> None:
    """Those of the mask, also of an agent that has left or whose game is over; without a mask those that it has."""
    mask = {"info": {"action_mask": [1, 0]}}
    plan: Plan = [{"red_0": mask, "red_1": mask | {"end": end}, "blue_0": mask}, {"red_0": mask}]
    env = make_toy(TWO_ON_ONE, plan, num_games=2, first_infos=dict.fromkeys(TWO_ON_ONE, mask["info"]))
    env.reset(0)
    step = env.step(random_actions(env))
    assert next_legal_actions(env, 0, step.over).tolist() == [[[True, False], [True, False]]] * 2
    assert next_legal_actions(env, 1, step.over).tolist() == [[[True, False]]] * 2
    assert next_legal_actions(env, 0, np.array([False, True]))[1].tolist() == [[True, False]] * 2
    step = env.step(random_actions(env))
    assert step.over.all()
    assert next_legal_actions(env, 0, step.over).tolist() == [[[True, False], [True, False]]] * 2  # red_1 had left
    assert next_legal_actions(env, 1, step.over).all()  # no mask came with its last observation
    assert legal_actions(env, 0).tolist() == [[[True, False]] * 2] * 2  # of the next game
    box = make_team_env("sumo", 3)
    assert next_legal_actions(box, 0, np.zeros(3, dtype=bool)).shape == (3, 1, 0)


def test_teams_in_words() -> None:
    """One line a team."""
    assert describe_teams(make_team_env("sumo", 1)) == (
        "team left: 1 agent (left_0), behaviour sumo, 11 observations, Box actions of 2\n"
        "team right: 1 agent (right_0), behaviour sumo, 11 observations, Box actions of 2"
    )
    spaces: Spaces = {"red_0": (OBS, Discrete(3)), "red_1": (OBS, Discrete(2)), "blue_0": (OBS, MultiDiscrete([2, 3]))}
    assert describe_teams(make_toy(spaces, [{}])) == (
        "team red: 2 agents (red_0, red_1), behaviour red, 4 observations, Discrete actions of 3\n"
        "team blue: 1 agent (blue_0), behaviour blue, 4 observations, MultiDiscrete actions of 2 x 3"
    )


def test_play_games_counts_first_games_only() -> None:
    """One copy plays two games while the other plays one; the second game's scores and frames are not taken."""
    teams = make_teams("toy", toy_games.parallel_env(), None, None)

    def game(length: int, reward: float) -> toy_games.Planned:
        return toy_games.Planned(DUEL, [{"red_0": {"reward": reward}}] * length, render_mode="rgb_array")

    short = game(2, 1.0)
    env = PettingZooGames([short, game(5, 0.5)], teams)
    calls: list[int] = []

    def act(team: int, obs: np.ndarray) -> np.ndarray:
        assert obs.shape == (2, 1, 4)
        assert (obs[:, 0, 2] == team).all()
        calls.append(team)
        if len(calls) == 5:
            short.plan = [{"blue_0": {"reward": 7.0}}] * 2  # its second game, which must not count
        assert obs[1, 0, 1] == (len(calls) - 1) // 2  # the step that the longer game is at
        return env.scripted_actions("random", team)

    assert play_games(env, act, 3).tolist() == [[2.0, 0.0], [2.5, 0.0]]
    assert calls == [0, 1] * 5
    short.plan = [{"red_0": {"reward": 1.0}}] * 2
    frames: list[np.ndarray] = []
    assert play_games(env, random_play(env), 3, frames).tolist() == [[2.0, 0.0], [2.5, 0.0]]
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 1, 2]  # its end, too
    assert env.restarts
    env.reset(3)
    for _ in range(2):
        step = env.step(random_actions(env))
    assert step.obs[0][0, 0, :2].tolist() == [1.0, 0.0]  # games restart again


def test_a_game_that_does_not_end_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """Its scores are the returns so far, each the mean over the team's agents; the other game keeps its outcome."""
    endless: Plan = [{"red_0": {"reward": 3.0}, "blue_0": {"reward": 1.0}}] * 1000
    ending: Plan = [{}, {agent: {"info": {"outcome": k}, "reward": 9.0} for k, agent in enumerate(TWO_ON_ONE)}]
    teams = make_teams("toy", toy_games.parallel_env(TWO_ON_ONE), None, None)
    env = PettingZooGames([toy_games.Planned(TWO_ON_ONE, plan) for plan in (ending, endless)], teams)
    assert play_games(env, random_play(env), 0, max_steps=20).tolist() == [[1.0, 2.0], [30.0, 20.0]]
    said = "warning: 1 of 2 games did not end in 20 steps and were scored by their returns so far\n"
    assert capsys.readouterr().err == said


def test_rewards_of_agents_that_have_left_are_ignored() -> None:
    """Those of a user's game. The second agents of both teams die in step 1, and are paid in step 5."""
    env = make_team_env("vector_game:Fallen", 3, {"pays_all": True})
    env.reset(0)
    rewards = [env.step(random_actions(env)).rewards[0] for _ in range(5)]
    assert (rewards[4][:, 0] != 0).all()
    assert (rewards[4][:, 1] == 0).all()


def test_a_video_of_a_game_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is limited; the end is shown in any case."""
    monkeypatch.setattr("utils.team_env.MAX_FRAMES", 3)
    env = make_toy(DUEL, [{}] * 8, render_mode="rgb_array")
    frames: list[np.ndarray] = []
    play_games(env, random_play(env), 0, frames)
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 1, 2, 8]
    frames = []
    play_games(env, random_play(env), 0, frames, max_steps=5)
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 1, 2]


def test_a_game_that_cannot_be_closed(capsys: pytest.CaptureFixture[str]) -> None:
    """The others are closed; a warning tells of it."""

    class Stuck(toy_games.Planned):
        closed = 0

        def close(self) -> None:
            Stuck.closed += 1
            if Stuck.closed == 1:
                sys.exit("no display")

    games = [Stuck(DUEL, [{}]) for _ in range(2)]
    PettingZooGames(games, make_teams("toy", games[0], None, None)).close()
    assert Stuck.closed == 2
    assert capsys.readouterr().err == "warning: environment 0 cannot be closed: SystemExit: no display\n"
    make_team_env("vector_game:Auction", 1, {"fault": "close"}).close()
    assert capsys.readouterr().err == "warning: Auction cannot be closed: OSError: stuck\n"


@pytest.mark.parametrize(("metadata", "fps"), [({"render_fps": 30}, 30.0), ({}, 10.0), ({"render_fps": "fast"}, 10.0)])
def test_the_speed_of_pictures(metadata: dict[str, Any], fps: float) -> None:
    """The game's own, else 10 a second."""
    game = toy_games.Planned(DUEL, [{}])
    game.metadata = metadata
    assert PettingZooGames([game], make_teams("toy", game, None, None)).render_fps == fps


class Hands(vector_game.Auction):
    """Bids are cards, and at its end the hands are empty."""

    restarts = True

    def __init__(self) -> None:
        super().__init__(1)
        self.teams = tuple(replace(team, branches=(3,)) for team in self.teams)
        self.action_masks = [np.ones((1, 1, 3), dtype=bool)] * 2

    def step(self, actions: list[np.ndarray]) -> TeamStep:
        """Takes the bids."""
        result = super().step(actions)
        self.action_masks = [np.full((1, 1, 3), not result.over[0])] * 2
        return result


@pytest.mark.parametrize("restarts", [True, False])
def test_nobody_needs_a_legal_action_after_the_end(restarts: bool) -> None:
    """In a picture of the end; but in the first step of the next game."""
    game = Hands()
    guard(game)
    game.reset(0)
    game.restarts = restarts
    bids = [np.zeros((1, 1, 1), dtype=np.int64)] * 2
    assert not any(game.step(bids).over[0] for _ in range(2))
    with nullcontext() if not restarts else pytest.raises(TaskError, match="must give each agent of east that is"):
        assert game.step(bids).over[0]


def test_the_last_picture_shows_the_end() -> None:
    """Of Sumo: a disc is outside. Of connect four: the last stone lies there."""
    sumo = Sumo(1)
    frames: list[np.ndarray] = []
    play_games(sumo, lambda team, obs: sumo.scripted_actions(["charge", "random"][team], team), 1, frames)
    assert (sumo.time[0], sumo.restarts) == (len(frames) - 1, True)
    assert np.abs(sumo.position[:, 0]).max() > sumo.ring()[0]
    assert (frames[-1] == sumo.render()).all()
    assert (frames[-1] != frames[-2]).any()
    env = make_team_env("pettingzoo.classic.connect_four_v3", 1, render=True)
    stones: list[int] = []

    def act(team: int, obs: np.ndarray) -> np.ndarray:
        stones.append(int(obs.sum()))
        return env.scripted_actions("random", team)

    play_games(env, act, 1, frames := [])
    assert len(frames) == max(stones) + 2
    assert all((one != other).any() for one, other in zip(frames, frames[1:], strict=False))
    env.close()


def test_a_picture_that_fails_later() -> None:
    """Is the game's fault."""
    game = toy_games.Planned(DUEL, [{}] * 3, render_mode="rgb_array")
    env = PettingZooGames([game], make_teams("toy", game, None, None))
    env.reset(0)
    game.render = lambda: None  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(TaskError, match="^environment 0 in render: TypeError: render must give an array"):
        env.render()


def test_the_seed_determines_the_games() -> None:
    """The same seed gives the same games and random players; another seed, and another copy, give others."""

    def play(env: PettingZooGames, seed: int, extra: bool) -> list[np.ndarray]:
        trace = [*env.reset(seed)]
        for _ in range(5):
            if extra:
                env.scripted_actions("random", 0)
            step = env.step([np.zeros((3, 1, 1), int)] * 2)
            trace += [*step.obs, *step.final_obs]
        return [*trace, env.scripted_actions("random", 1)]

    env = make_toy(DUEL, toy_games.SHORT, num_games=3)
    one = play(env, 4, False)
    again, other, asked = play(env, 4, False), play(env, 5, False), play(env, 4, True)
    assert all((a == b).all() for a, b in zip(one, again, strict=True))
    assert all((a == b).all() for a, b in zip(one[:-1], asked[:-1], strict=True))
    assert (one[0] != other[0]).any()
    assert len(np.unique(one[0][:, 0, 3])) == 3


def test_random_players_are_uniform() -> None:
    """Over what is legal, or over [-1, 1]."""
    mask = {"action_mask": np.array([1, 0, 1, 1])}
    env = make_toy(
        {"red_0": (OBS, Discrete(4)), "blue_0": (OBS, Box(3.0, 4.0, (2,)))},
        [{}],
        num_games=2000,
        first_infos={"red_0": mask},
    )
    env.reset(0)
    counts = np.bincount(env.scripted_actions("random", 0).ravel(), minlength=4)
    np.testing.assert_allclose(counts, [667, 0, 667, 667], atol=90)  # four standard deviations are 84
    actions = env.scripted_actions("random", 1)
    assert actions.shape == (2000, 1, 2)
    np.testing.assert_allclose(np.quantile(actions, [0, 0.25, 0.5, 0.75, 1]), [-1, -0.5, 0, 0.5, 1], atol=0.07)
    with pytest.raises(ValueError, match="chase is not a scripted player"):
        env.scripted_actions("chase", 0)


# --- games of others ---


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("name", ["simple_tag_v3", "simple_push_v3"])
def test_mpe_games_are_those_that_pettingzoo_plays(name: str, continuous: bool) -> None:
    """Three games of two copies, beside the same ones stepped by hand: equal observations, rewards and scores."""
    module = importlib.import_module(f"mpe2.{name}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = make_team_env(f"mpe2.{name}", 2, {"max_cycles": 4, "continuous_actions": continuous})
    by_hand = [module.parallel_env(max_cycles=4, continuous_actions=continuous) for _ in range(2)]
    rng = np.random.default_rng(0)
    assert isinstance(env, PettingZooGames)
    seeds: list[int | None] = []

    def record(reset: Callable[..., Any], seed: int | None = None) -> Any:
        seeds.append(seed)
        return reset(seed=seed)

    for game in env.envs:
        game.reset = partial(record, game.reset)
    obs = env.reset(9)
    pairs = [(t, k, agent) for t, team in enumerate(env.teams) for k, agent in enumerate(team.agents)]
    expected = [game.reset(seed=seed)[0] for game, seed in zip(by_hand, seeds, strict=True)]
    returns = np.zeros((2, 2))
    for now in range(12):
        for i, (t, k, agent) in ((i, pair) for i in range(2) for pair in pairs):
            np.testing.assert_allclose(obs[t][i, k, : expected[i][agent].size], expected[i][agent], rtol=1e-6)
        actions: list[np.ndarray] = [rng.integers(5, size=(2, len(team.agents), 1)) for team in env.teams]
        if continuous:
            actions = [rng.uniform(-1, 1, (2, len(team.agents), 5)).astype(np.float32) for team in env.teams]
        step = env.step(actions)
        for i, game in enumerate(by_hand):
            chosen = {
                agent: actions[t][i, k] / 2 + np.float32(0.5) if continuous else actions[t][i, k, 0]
                for t, k, agent in pairs
            }
            expected[i], rewards, _, truncations, _ = game.step(chosen)
            for t, k, agent in pairs:
                np.testing.assert_allclose(step.rewards[t][i, k], rewards[agent], rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(
                    step.final_obs[t][i, k, : expected[i][agent].size], expected[i][agent], rtol=1e-5
                )
                assert step.truncations[t][i, k] == truncations[agent] == (now % 4 == 3)
                returns[i, t] += rewards[agent] / len(env.teams[t].agents)
            if now % 4 == 3:
                np.testing.assert_allclose(step.scores[i], returns[i], rtol=1e-5, atol=1e-5)
                returns[i] = 0
                expected[i] = game.reset()[0]
        obs = step.obs


def test_connect_four_is_played_by_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty games of masked random players: never an illegal move, and always just one who has a choice."""

    def fail() -> None:
        raise AssertionError("illegal move")

    monkeypatch.setattr(EnvLogger, "warn_on_illegal_move", fail)
    env = make_team_env("pettingzoo.classic.connect_four_v3", 10, render=True)
    assert [(team.name, team.behavior, team.branches) for team in env.teams] == [
        ("player_0", "player", (7,)),
        ("player_1", "player", (7,)),
    ]
    obs = env.reset(1)
    scores: list[list[float]] = []
    while len(scores) < 50:
        masks = np.stack([mask[:, 0] for mask in env.action_masks if mask is not None], axis=1)  # (10, 2, 7)
        board = obs[0].reshape(10, 6, 7, 2)
        turns = board.sum(axis=(1, 2, 3)).astype(int) % 2
        for i, turn in enumerate(turns):
            np.testing.assert_array_equal(masks[i, turn], board[i, 0].sum(-1) == 0)  # the top row is free
            np.testing.assert_array_equal(masks[i, 1 - turn], [1, 0, 0, 0, 0, 0, 0])
        np.testing.assert_array_equal(obs[1].reshape(10, 6, 7, 2), board[..., ::-1])
        step = env.step(random_actions(env))
        for i in step.over.nonzero()[0].tolist():
            scores.append(step.scores[i].tolist())
            full = step.final_obs[0][i].sum() == 42
            assert scores[-1] == [[1.0, -1.0], [-1.0, 1.0]][turns[i]] or (full and scores[-1] == [0.0, 0.0])
            assert step.terminations[0][i].all()
            assert step.obs[0][i].sum() == 0
        obs = step.obs
    assert {tuple(score) for score in scores} >= {(1.0, -1.0), (-1.0, 1.0)}
    frame = env.render()
    assert frame.ndim == 3
    assert (frame.shape[2], frame.dtype) == (3, np.uint8)
    assert frame.std() > 0
    env.close()


def test_unequal_agents_of_a_team() -> None:
    """Three kinds of agents are three teams, or two by --teams. A leader has 20 actions, its team-mates have 5."""
    teams = {
        "hunters": ["leadadversary_0", "adversary_0", "adversary_1", "adversary_2"],
        "prey": ["agent_0", "agent_1"],
    }
    env = make_team_env("mpe2.simple_world_comm_v3", 2, {"max_cycles": 6})
    kinds = [(team.behavior, len(team.agents), team.branches) for team in env.teams]
    assert kinds == [("leadadversary", 1, (20,)), ("adversary", 3, (5,)), ("agent", 2, (5,))]
    assert np.isfinite(play_games(env, random_play(env), 0)).all()
    env = make_team_env("mpe2.simple_world_comm_v3", 2, {"max_cycles": 6}, teams)
    assert [(team.behavior, team.branches) for team in env.teams] == [("hunters", (20,)), ("prey", (5,))]
    env.reset(0)
    assert env.action_masks[0] is not None
    assert env.action_masks[0].sum(-1).tolist() == [[20, 5, 5, 5]] * 2
    assert np.isfinite(play_games(env, random_play(env), 0)).all()


def test_rock_paper_scissors() -> None:
    """Paper beats rock in all fifteen rounds, and the same hand is a draw."""
    env = make_team_env("pettingzoo.classic.rps_v2", 2)

    def act(team: int, obs: np.ndarray) -> np.ndarray:
        return np.array([[[1]], [[1 - team]]])  # paper against paper, paper against rock

    assert play_games(env, act, 0).tolist() == [[0.0, 0.0], [15.0, -15.0]]


def test_a_turn_based_game_without_masks() -> None:
    """Whose turn it is comes from the game itself: rock, paper, scissors one after the other."""
    game = turn_based_aec_to_parallel(rps.env(max_cycles=3))
    env = PettingZooGames([game], make_teams("rps", game, None, None))
    env.reset(0)
    for turn in [0, 1] * 6:
        masks = [mask[0, 0].tolist() for mask in env.action_masks if mask is not None]
        assert masks[turn] == [True] * 3
        assert masks[1 - turn] == [True, False, False]
        env.step(random_actions(env))


def test_final_masks_of_a_turn_based_game() -> None:
    """At a truncation only the agent whose turn would be next has more than the first action."""
    game = to_parallel(rps.env(max_cycles=2))
    env = PettingZooGames([game], make_teams("rps", game, None, None))
    env.reset(0)
    for _ in range(4):
        step = env.step(random_actions(env))
    assert step.over.all()
    assert all(truncated.all() for truncated in step.truncations)
    legal = [next_legal_actions(env, t, step.over)[0, 0].tolist() for t in range(2)]
    assert legal == [[True] * 3, [True, False, False]]


def test_no_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at importing and making nor in the loop."""
    monkeypatch.delitem(sys.modules, "pettingzoo.classic.tictactoe_v3", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for env_id, kwargs in (
            ("mpe2.simple_tag_v3", {"continuous_actions": True}),
            ("pettingzoo.classic.tictactoe_v3", {}),
            ("pettingzoo.classic.rps_v2", {}),
        ):
            env = make_team_env(env_id, 2, kwargs)
            assert play_games(env, random_play(env), 0).shape == (2, 2)
            env.close()
