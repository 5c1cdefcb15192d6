"""--play: a person at the keyboard. SDL's dummy driver shows the window; the keys are events that the test posts."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import Train
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from test_selfplay_bad_input import run

import ppo_selfplay
from utils import play
from utils.cross_play import Player
from utils.games import PUSHES, Builds, Pursuit, Sumo
from utils.policy_stack import PolicyStack
from utils.run import parse_args
from utils.team_env import TeamEnv, TeamStep, make_team_env

pygame = pytest.importorskip("pygame")
Keys = Iterator[list[str]]


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Callable[[Keys], list[list[str]]]:
    """A function that takes the keys of each frame in turn: "left" is pressed, "-left" is released, "x" closes.

    It returns the texts of all frames, which fill while the game is played. No frame waits.
    """
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    show = play.Window.show

    def drive(keys: Keys) -> list[list[str]]:
        texts: list[list[str]] = []

        def spy(window: play.Window, picture: np.ndarray, lines: Any, fps: float) -> None:
            texts.append([f"{fps:g}", *(text for text, _ in lines)])
            for key in next(keys):
                if key == "x":
                    pygame.event.post(pygame.event.Event(pygame.QUIT))
                    continue
                kind = pygame.KEYUP if key.startswith("-") else pygame.KEYDOWN
                pygame.event.post(pygame.event.Event(kind, key=pygame.key.key_code(key.removeprefix("-"))))
            show(window, picture, lines, 0.0)
            shown = pygame.surfarray.array3d(window.screen).swapaxes(0, 1)[300, (window.screen.get_width() - 1) // 2]
            assert np.abs(shown.astype(int) - picture[picture.shape[0] // 2, (picture.shape[1] - 1) // 2]).max() <= 8

        monkeypatch.setattr(play.Window, "show", spy)
        return texts

    return drive


@pytest.fixture
def actions(monkeypatch: pytest.MonkeyPatch) -> list[list[np.ndarray]]:
    """The actions of all steps of the games that `make_team_env` makes; empty at first."""
    taken: list[list[np.ndarray]] = []
    make = make_team_env

    def spy_make(*args: Any, **kwargs: Any) -> TeamEnv:
        env = make(*args, **kwargs)
        step = env.step

        def spy(actions: list[np.ndarray]) -> TeamStep:
            taken.append([team_actions[0].copy() for team_actions in actions])
            return step(actions)

        env.step = spy  # type: ignore[method-assign]
        return env

    monkeypatch.setattr("utils.team_env.make_team_env", spy_make)
    return taken


def start(script: ModuleType, folder: Path, *flags: str) -> None:
    """The command as a user types it."""
    script.main(parse_args(script.Args, ["--evaluate", str(folder), "--play", *flags]))


# --- whole games ---


def test_a_game_of_sumo(
    selfplay: ModuleType,
    train_selfplay: Train,
    keyboard: Callable[[Keys], list[list[str]]],
    actions: list[list[np.ndarray]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two games: out to the left as red, after Tab to the right as blue; the policy plays as in an evaluation."""
    folder = train_selfplay(selfplay, total_timesteps=128)
    agents, pools, _ = selfplay.load_run(folder, "--evaluate")
    actions.clear()

    def keys() -> Keys:
        yield from ([], [], ["left"])  # it begins with a key
        while "Space" not in texts[-1][1]:
            yield []
        yield from (["-left"], ["tab"], ["right"], ["space"])  # to the other side, and on to the next game
        while "Space" not in texts[-1][1]:
            yield []
        yield ["escape"]

    texts = keyboard(keys())
    capsys.readouterr()
    start(selfplay, folder)
    assert texts[0] == ["30", "you: left   press a key to begin", "0 games   arrows or WASD: push"]
    assert ["10", "you: left   ", "0 games   arrows or WASD: push"] in texts
    assert texts[-1][1] == "you: right   you have lost   Space: next game   Tab: other team   Esc: end"
    assert texts[-1][2].startswith("2 games, score 0.00   ")
    said = f"you against {folder} (most likely actions): 2 games, score 0.00\n"
    assert capsys.readouterr().out.endswith(said)
    # The same two games by hand: the person pushes along the picture's x, the policy acts alone.
    agent, played = agents["sumo"], list(actions)
    agent.load_state_dict(pools["sumo"].latest.weights, strict=False)
    for seed, (team, x) in enumerate([(0, -1.0), (1, 1.0)], start=1):
        position = Sumo(1)
        position.restarts = False
        obs, over = position.reset(seed), False
        while not over:
            push = x * position.ahead()[team, 0].conj()
            expected = [agent.act(obs[t][:, 0], np.ones((1, 0), bool))[:, None] for t in range(2)]
            expected[team] = np.array([[[push.real, push.imag]]], dtype=np.float32)
            for t in range(2):
                np.testing.assert_allclose(played[0][t], expected[t][0], atol=1e-5)
            played.pop(0)
            result = position.step(expected)
            obs, over = result.obs, bool(result.over[0])
    assert not played


def test_turns_wait_for_a_legal_number(
    train_selfplay: Train,
    keyboard: Callable[[Keys], list[list[str]]],
    actions: list[list[np.ndarray]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tic-tac-toe: the person's move waits for a number key of a free square; the other's turn does not."""
    folder = train_selfplay(ppo_selfplay, env_id="pettingzoo.classic.tictactoe_v3", num_games=2, total_timesteps=32)
    actions.clear()

    def keys() -> Keys:
        yield ["up"]  # begins, and is no move
        yield ["0"]  # there is no tenth square
        yield ["9"]
        yield []  # the person's step has been shown
        yield []  # the policy's, too
        yield ["9"]  # taken
        assert len(actions) == 2
        yield []
        yield ["x"]

    texts = keyboard(keys())
    start(ppo_selfplay, folder)
    assert [text[1].split("   ")[1] for text in texts[1:6]] == ["your turn", "your turn", "", "", "your turn"]
    assert actions[0][0].tolist() == [[8]]
    assert actions[1][0].tolist() == [[0]]  # the policy's turn: the person is idle
    assert len(actions) == 2
    assert capsys.readouterr().out.endswith("(most likely actions): 0 games\n")


def test_a_team_of_two(
    train_selfplay: Train,
    keyboard: Callable[[Keys], list[list[str]]],
    actions: list[list[np.ndarray]],
) -> None:
    """The person is the first pursuer; the policies play the second one and the evader, and sample if asked to."""
    folder = train_selfplay(ppo_selfplay, env_id="pursuit", total_timesteps=128)
    runs = []
    for flags in ((), ("--no-deterministic",)):
        actions.clear()
        keyboard(iter([["w", "d"], *[[]] * 8, ["escape"]]))
        start(ppo_selfplay, folder, *flags)
        runs.append([np.concatenate(step) for step in actions])
    likeliest, sampled = runs
    for step in (*likeliest, *sampled):
        np.testing.assert_allclose(step[0], [0.5**0.5] * 2, atol=1e-6)
    assert len(likeliest) == len(sampled) == 9
    assert np.abs(likeliest[0][1:] - sampled[0][1:]).max() > 0.01


def test_a_mixture_plays_by_its_shares(
    train_selfplay: Train, keyboard: Callable[[Keys], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each game one of its policies is drawn, and never one without a share."""
    agents, pools, args = ppo_selfplay.load_run(train_selfplay(ppo_selfplay, total_timesteps=128), "evaluate")
    env, drawn = ppo_selfplay.make_env(args, 1, render=True), list[Any]()

    def spy(agent: Any, weights: Any) -> PolicyStack:
        drawn.extend(weights)
        return PolicyStack(agent, weights)

    monkeypatch.setattr(play, "PolicyStack", spy)
    members = tuple(Player(name, "sumo", dict(pools["sumo"].latest.weights)) for name in "abc")
    session = play.Session(env, play.Window(), agents, [Player("mixture", "sumo", None, members, (0.5, 0.0, 0.5))])
    for seed in range(20):
        keyboard(iter([["escape"]]))
        with pytest.raises(play.WindowClosed):
            session.play(seed, True)
    session.window.close()
    assert [any(x is member.weights for x in drawn) for member in members] == [True, False, True]


def test_builds_are_picked_by_numbers(train_selfplay: Train, keyboard: Callable[[Keys], list[list[str]]]) -> None:
    """The number key that begins the game is the number of dots."""
    folder = train_selfplay(ppo_selfplay, env_id="builds", total_timesteps=128)
    picked: list[int] = []
    render = Builds.render

    def spy(env: Builds) -> np.ndarray:
        picked.append(int(env.builds[0, 0]))
        return render(env)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Builds, "render", spy)
        for key in "123":
            keyboard(iter([[key], ["2"], [], ["escape"]]))
            start(ppo_selfplay, folder)
    assert [build for build in picked if build >= 0] == [0] * 3 + [1] * 3 + [2] * 3


# --- keys to actions ---


@pytest.mark.parametrize("form", ["box", "discrete", "multidiscrete"])
def test_arrows_push_along_the_picture(form: Any) -> None:
    """Wherever the opponent is; with discrete actions the nearest of nine pushes."""
    env = Sumo(5, form)
    env.reset(3)
    for team in range(2):
        for direction in ((0, 0), (1, 0), (0, -1), (-1, 1)):
            given = env.keyboard_actions(team, direction, None)
            assert given.shape == (5, 1, env.teams[0].action_dim)
            forces = env.forces([given, given])[team]
            length = float(np.hypot(*direction))
            wanted = complex(*direction) / max(length, 1.0)
            limit = 1e-6 if form == "box" else 0.4  # pushes are 45 degrees apart
            assert np.abs(forces - wanted).max() < limit
    assert len(set(PUSHES.round(6))) == 9
    pursuit = Pursuit(4)
    pursuit.reset(1)
    assert pursuit.keyboard_actions(0, (0, 1), None).tolist() == [[[0.0, 1.0]] * 2] * 4


def toy_game(space: Any) -> TeamEnv:
    """A game with this action space."""
    spaces = dict.fromkeys(("red_0", "blue_0"), (Box(-np.inf, np.inf, (4,)), space))
    return make_team_env("toy_games", 1, {"spaces": spaces, "plan": [{}] * 3, "render_mode": "rgb_array"})


@pytest.mark.parametrize(
    ("space", "words", "expected"),
    [
        (Box(0, 1, (2,)), "arrows or WASD", {((-1, 1), None): [-1.0, 1.0], ((0, 0), 5): [0.0, 0.0]}),
        (Box(0, 1, (1,)), "arrows or WASD", {((1, 0), None): [1.0], ((0, -1), None): [-1.0]}),
        (MultiDiscrete([3, 3]), "arrows or WASD", {((-1, 1), None): [0, 2], ((0, 0), None): [1, 1]}),
        (Discrete(4), "number keys 1 to 4", {((0, 0), 1): [0], ((0, 0), 4): [3], ((0, 0), 5): None}),
        (Discrete(10), "number keys 1 to 0", {((0, 0), 0): [9], ((1, 0), None): None}),
        (Discrete(11), None, {}),
        (Box(0, 1, (3,)), None, {}),
        (MultiDiscrete([3, 4]), None, {}),
    ],
)
def test_keys_of_any_game(space: Any, words: str | None, expected: dict[Any, Any]) -> None:
    """What they do, in words and in numbers."""
    env = toy_game(space)
    env.reset(0)
    assert play.explain_keys(env, env.teams[0]) == words
    for (direction, number), action in expected.items():
        found = play.read_keys(env, 0, direction, number)
        assert (None if found is None else found.tolist()) == action


def test_keys_of_two_branches_are_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    """An illegal choice becomes the first legal one of its branch."""
    env = toy_game(MultiDiscrete([3, 3]))
    env.reset(0)
    legal = np.array([[[True, False, False, False, True, True]]])
    monkeypatch.setattr(play, "legal_actions", lambda *_: legal)
    found = [play.read_keys(env, 0, direction, None) for direction in ((0, 0), (1, 1), (-1, -1))]
    assert [x.tolist() for x in found if x is not None] == [[0, 1], [0, 2], [0, 1]]


@pytest.mark.parametrize("branches", [[3], [3, 3]])
def test_an_agent_that_has_left_needs_no_key(branches: list[int]) -> None:
    """Nor a legal action, while its team plays on."""
    env = toy_game(MultiDiscrete(branches))
    env.reset(0)
    env.alive[0][:], env.action_masks[0] = False, np.zeros((1, 1, sum(branches)), dtype=bool)
    action = play.read_keys(env, 0, (0, 0), None)
    assert action is not None
    assert action.tolist() == [0] * len(branches)


def test_opposite_keys_and_the_number_pad(keyboard: Callable[[Keys], list[list[str]]]) -> None:
    """The newer one of two keys counts until it is released; a key that repeats is one key."""
    window = play.Window()
    picture = np.zeros((60, 60, 3), np.uint8)
    pressed = [["left"], ["left"], ["d"], ["-d"], ["-left"], ["up"], ["down"], ["[7]"], ["3", "4"], []]
    keyboard(iter(pressed))
    found = []
    for _ in pressed:
        window.show(picture, [("", (0, 0, 0))], 30.0)
        found.append((window.direction(), window.number()))
    assert [direction for direction, _ in found[:7]] == [(-1, 0), (-1, 0), (1, 0), (-1, 0), (0, 0), (0, 1), (0, -1)]
    assert [number for _, number in found[6:]] == [None, 7, 4, None]
    window.close()


# --- what is refused ---


def test_refusals(
    selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence each: flags that do not go together, actions without keys, no window, no package."""
    folder = train_selfplay(selfplay, total_timesteps=128)
    words = ["--evaluate", str(folder), "--play"]
    assert run(selfplay, capsys, "--play").startswith("error: --play also needs --evaluate RUN_FOLDER")
    assert run(selfplay, capsys, "--exploitability", "9").startswith("error: --exploitability also needs --evaluate")
    for flags in (["--against", "charge"], ["--exploitability", "64"], ["--capture-video"]):
        assert run(selfplay, capsys, *words, *flags).startswith(f"error: --play takes no {flags[0]}: a person plays")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    if sys.platform == "linux":  # SDL then has a driver that shows nothing, or none
        assert run(selfplay, capsys, *words).startswith("error: --play needs a display, and there is none")
    monkeypatch.setenv("SDL_VIDEODRIVER", "none-such")
    assert run(selfplay, capsys, *words).startswith("error: --play needs a display, and there is none (")
    monkeypatch.setattr("utils.run.find_spec", lambda name: None if name == "pygame" else object())
    assert run(selfplay, capsys, *words) == "error: --play needs the package pygame: pip install pygame\n"


def test_actions_without_keys(train_selfplay: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A game with three numbers an action."""
    lines = "import numpy as np, toy_games\nfrom gymnasium.spaces import Box\n\n\ndef parallel_env(**kwargs):\n"
    lines += "    spaces = {agent: (Box(-1, 1, (4,)), Box(-1, 1, (3,))) for agent in ('red_0', 'blue_0')}\n"
    (tmp_path / "wide.py").write_text(lines + "    return toy_games.parallel_env(spaces, **kwargs)\n")
    folder = train_selfplay(ppo_selfplay, env_id="wide", total_timesteps=128)
    sentence = run(ppo_selfplay, capsys, "--evaluate", str(folder), "--play")
    assert sentence.startswith(
        "error: --play takes a game with keyboard_actions, or with actions of one or two numbers, "
    )
    assert sentence.endswith(", and red has 3\n")
