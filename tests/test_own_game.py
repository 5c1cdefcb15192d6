"""docs/own_game.md as it stands, the task of docs/runs.md, and the scripted players of a PettingZoo module."""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
import vector_game
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space
from pettingzoo.classic.tictactoe import tictactoe
from pettingzoo.utils.conversions import turn_based_aec_to_parallel
from test_team_env import make_toy
from toy_games import Spaces

from utils.cross_play import Player, play_pairs, scripted_players
from utils.team_env import PettingZooGames, TaskError, make_team_env, make_teams, read_scripted

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "own_game.md").read_text()
GAMES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^python .*$", PAGE, re.MULTILINE)


def run_commands(folder: Path, commands: list[str]) -> list[str]:
    """What commands of the page print, in a folder that has the script and what it needs."""
    for name in ("ppo_selfplay.py", "utils"):
        (folder / name).symlink_to(ROOT / name)
    words, output = f'python() {{ {sys.executable} "$@"; }}\nset -e\n', []
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", words + command], cwd=folder, capture_output=True, text=True, check=False, env=os.environ
        )
        assert done.returncode == 0, done.stderr
        output.append(done.stdout)
    return output


@pytest.mark.slow
def test_from_nothing_to_a_policy_a_table_and_a_video(tmp_path: Path) -> None:
    """The commands of the page's first section, in a folder that has the scripts and the game."""
    (tmp_path / "tug_of_war.py").write_text(GAMES[0])
    train, video, play = [line for line in COMMANDS if "tug_of_war" in line]
    output = run_commands(tmp_path, [train, video])
    (line,) = re.findall(r"^scores: (.*)$", output[0], re.MULTILINE)
    scores = re.findall(r"puller against (\w+) ([\d.]+)", line)
    assert [name for name, _ in scores] == ["random", "steady"]
    assert all(float(score) > 0.9 for _, score in scores), line
    (folder,) = (tmp_path / "runs").iterdir()
    with (folder / "cross_play.csv").open() as file:
        ratings = {row["player"]: float(row["rating"]) for row in csv.DictReader(file)}
    assert list(ratings)[:3] == ["random", "steady", "step 0"]
    assert ratings["step 0"] < list(ratings.values())[-1] > ratings["random"]
    (path,) = (folder / "videos").iterdir()
    frames = iio.imread(path)
    assert len(frames) <= 61
    marks = [int(np.argmax(frame[30, :, 0].astype(int) - frame[30, :, 2])) for frame in (frames[0], frames[-1])]
    assert marks[0] != marks[1]
    assert marks[1] < 98  # the policy plays on the left, and has pulled the rope to its side
    assert iio.imread(folder / "strip.png").shape == (120, 6 * 200 + 5 * 8, 3)
    assert re.search(r"against the scripted puller player steady: score (1\.000|0\.9\d\d)", output[1])
    assert play.endswith("--play")  # see test_play.py


@pytest.mark.slow
def test_a_task_of_the_user(tmp_path: Path) -> None:
    """The code and the command of *Your own task* in docs/runs.md: the policy learns to reach the centre."""
    section = (ROOT / "docs" / "runs.md").read_text().split("## Your own task")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "reach.py").write_text(code)
    shutil.copy(ROOT / "ppo_continuous.py", tmp_path)  # Python searches modules where a link to a script leads
    (command,) = re.findall(r"^python .*$", section, re.MULTILINE)
    (output,) = run_commands(tmp_path, [f"{command} --no-compile --eval-freq 0"])
    (score,) = re.findall(r"^evaluation: return (\S+) ", output, re.MULTILINE)
    assert float(score) > -5.0, output  # without a push an episode has about -38


def test_scores_in_the_other_game_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower of two numbers wins: a quarter beats three of four random ones."""
    (tmp_path / "guessing.py").write_text(GAMES[1])
    monkeypatch.chdir(tmp_path)
    env = make_team_env("guessing", 3)
    assert env.scripted_by_team == (("random", "quarter"),) * 2
    assert [player.name for player in scripted_players(env)] == ["random", "quarter"]
    env.reset(0)
    np.testing.assert_allclose(env.scripted_actions("quarter", 1), np.full((3, 1, 1), -0.5))
    players = [Player("quarter", "guesser"), Player("random", "guesser")]
    scores = play_pairs(lambda n: make_team_env("guessing", n), {"guesser": None}, players, [(0, 1)], 400, 0)
    assert scores.mean() == pytest.approx(0.75, abs=0.07)


def test_the_changed_game_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sumo but for its rewards."""
    (tmp_path / "hurried.py").write_text(GAMES[2])
    monkeypatch.chdir(tmp_path)
    games = [make_team_env(name, 3) for name in ("sumo", "hurried:Hurried")]
    for game in games:
        game.reset(0)
    for _ in range(200):
        actions = [games[0].scripted_actions("random", team) for team in (0, 1)]
        plain, changed = (game.step(actions) for game in games)
        for ours, theirs in zip(plain.rewards, changed.rewards, strict=True):
            np.testing.assert_allclose(theirs, ours - 0.001, rtol=0, atol=1e-7)
        np.testing.assert_array_equal(plain.scores, changed.scores)
        assert all(np.array_equal(*obs) for obs in zip(plain.obs, changed.obs, strict=True))


@pytest.mark.slow
def test_the_other_game_of_the_page_is_learned(tmp_path: Path) -> None:
    """By the page's command, in a folder that has the scripts and the game."""
    (tmp_path / "guessing.py").write_text(GAMES[1])
    output = run_commands(tmp_path, [line for line in COMMANDS if "guessing" in line])
    (line,) = re.findall(r"^scores: (.*)$", output[0], re.MULTILINE)
    scores = re.findall(r"against (\w+) ([\d.]+)", line)
    assert [name for name, _ in scores] == ["random", "quarter"]
    assert all(float(score) > 0.9 for _, score in scores), line
    (folder,) = (tmp_path / "runs").iterdir()
    (path,) = (folder / "videos").iterdir()
    bars = (iio.imread(path)[-1][[17, 42]].mean(axis=-1) < 150).sum(axis=-1)  # the last picture; rows of both bars
    assert sorted(bars) == pytest.approx([2, 52], abs=4)  # the policy names 0


# --- scripted players of PettingZoo modules ---


def write_game(scripted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy game with these lines beside it, as the module `ladder` in the working folder."""
    lines = ["import numpy as np", "from toy_games import *", *scripted.splitlines()]
    (tmp_path / "ladder.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "ladder", raising=False)


def test_roles_have_their_own_players(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A player of all teams, and one of one team; the function sees the game, the agent and its observation."""
    scripted = """
def follow(game, agent, observation):
    assert game.possible_agents[int(observation[2])] == agent
    return int(observation[1]) % 3
scripted_players = {"follow": follow, "two": {"blue": lambda game, agent, observation: 2}}"""
    write_game(scripted, tmp_path, monkeypatch)
    env = make_team_env("ladder", 2, {"plan": [{}] * 3})
    assert env.scripted_by_team == (("random", "follow"), ("random", "follow", "two"))
    env.reset(0)
    for step in range(3):
        actions = [env.scripted_actions("follow", 0), env.scripted_actions("two", 1)]
        assert [x.tolist() for x in actions] == [[[[step]]] * 2, [[[2]]] * 2]
        env.step(actions)
    with pytest.raises(ValueError, match="two is not a scripted player of this game, which has random, follow"):
        env.scripted_actions("two", 0)


@pytest.mark.parametrize(
    ("space", "action", "row"),
    [
        (Box(-2, 6, (2,)), np.array([2.0, 6.0]), [0.0, 1.0]),
        (Box(-2, 6, (2,)), [-9, 4], [-1.0, 0.5]),  # clipped, as those of a policy
        (Box(-3e38, 3e38, (1,)), [3e38], [1.0]),
        (Discrete(4, start=-1), np.int64(2), [3]),
        (MultiDiscrete(np.array([[2, 3]]), start=np.array([[0, 5]])), np.array([[1, 7]]), [1, 2]),
    ],
)
def test_actions_are_read_as_they_are_written(space: Space, action: Any, row: list[float]) -> None:
    """From the agent's own space to the team's row, and back."""
    spaces: Spaces = {agent: (Box(-1, 1, (2,)), space) for agent in ("red_0", "blue_0")}
    (seat, _) = make_toy(spaces, [{}])._seats
    found = seat.read_action(action, None)
    assert found.tolist() == pytest.approx(row)
    expected = np.clip(action, space.low, space.high) if isinstance(space, Box) else action
    np.testing.assert_allclose(seat.write_action(found), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("scripted", "sentence"),
    [
        ("[1]", r"scripted_players that map names .* to functions by team \(red, blue\), not \[1\]"),
        ('{"random": print}', "scripted_players that map names other than random to functions"),
        ("{7: print}", "scripted_players that map names"),
        ('{"x": 3}', "scripted_players that map names"),
        ('{"x": {}}', "scripted_players that map names"),
        ('{"x": {"green": print}}', "scripted_players that map names"),
        ('{"x": {"red": 3}}', "scripted_players that map names"),
        ('{"x": lambda game, agent, obs: 3}', r"the action of red_0 must be in Discrete\(3\), not 3"),
        ('{"x": lambda game, agent, obs: None}', r"the action of red_0 must be in Discrete\(3\), not None"),
        ('{"x": lambda game, agent: 1}', "scripted player x in environment 0: TypeError"),
    ],
)
def test_players_are_tried_when_the_game_is_made(
    scripted: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence says what is wrong."""
    write_game(f"scripted_players = {scripted}", tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=f"^ladder .*{sentence}") as refusal:
        make_team_env("ladder", 2)
    assert "\n" not in str(refusal.value)


def test_numbers_of_a_wrong_shape() -> None:
    """A Box action must have the shape of its space, and be finite."""
    spaces: Spaces = {agent: (Box(-1, 1, (2,)), Box(-1, 1, (2,))) for agent in ("red_0", "blue_0")}
    (seat, _) = make_toy(spaces, [{}])._seats
    for action in ([0.5], 0.5, [np.nan, 0.0], [[0.0, 0.0]]):
        with pytest.raises(TaskError, match="the action of red_0 must be in Box"):
            seat.read_action(action, None)


def test_turns_and_illegal_actions() -> None:
    """A player is asked only on its turn, and may not take a square that is taken."""

    class Module:
        asked: list[str] = []
        scripted_players: dict[str, Any] = {}

    def first(game: Any, agent: str, observation: Any) -> int:
        Module.asked.append(agent)
        return int(np.argmax(observation["action_mask"]))

    Module.scripted_players = {"first": first, "corner": lambda game, agent, observation: 0}
    game = turn_based_aec_to_parallel(tictactoe.env())
    teams = make_teams("tictactoe", game, None, None)
    env = PettingZooGames([game], teams, read_scripted("tictactoe", Module, teams))
    env.reset(0)
    for turn in range(4):
        actions = [env.scripted_actions("first", team) for team in range(2)]
        assert [x.tolist() for x in actions] == [[[[turn if turn % 2 == team else 0]]] for team in range(2)]
        env.step(actions)
    assert Module.asked == ["player_1", "player_2"] * 2
    with pytest.raises(TaskError, match="player corner in environment 0: the action of player_1 must be legal"):
        env.scripted_actions("corner", 0)


def test_all_players_of_a_vectorised_game_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not random alone."""

    class Short(vector_game.Auction):
        def scripted_actions(self, name: str, team: int) -> np.ndarray:
            return super().scripted_actions(name, team)[: None if name == "random" else 1]

    monkeypatch.setattr(vector_game, "Short", Short, raising=False)
    with pytest.raises(ValueError, match="scripted_actions of high must give arrays of"):
        make_team_env("vector_game:Short", 2)
