"""A person at the keyboard against the policies of a saved run, in a window.

The person plays the first agent of a team, and the policies play all others. A game is played at its own speed, or step
by step if its actions are chosen by number keys. How keys become actions (`read_keys`):

- A game with the method `keyboard_actions(team, direction, number)` decides itself. `direction` is that of the arrows,
  (x, y) with -1, 0 or 1 each, and `number` is the last number key since the last picture, or None. The method returns
  the actions of the team in all games. The attribute `keys` may explain the keys, and `team_colours` may have the
  colour of each team. The built-in games have all of this.
- One or two Box actions: arrows or WASD set them to -1, 0 or 1 of their range.
- One Discrete action of ten choices or fewer: number keys; the first choice has the key 1, and the tenth 0.
- Two discrete actions of three choices each: arrows or WASD.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from utils.cross_play import Player
from utils.elo import game_scores
from utils.policy_stack import PolicyStack
from utils.run import fail, flag_of, name_actions
from utils.snapshot_pool import draw_stream
from utils.team_env import Team, TeamEnv, allies_of, legal_actions

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, 1), "down": (0, -1)}
DIRECTIONS |= {wasd: DIRECTIONS[arrow] for wasd, arrow in zip("adws", tuple(DIRECTIONS), strict=True)}
HEIGHT, MIN_WIDTH, LINE = 600, 680, 28  # pixels: of the picture, of the window, of a line of text
WAITING_FPS = 30.0
BACKGROUND, TEXT = (245, 245, 245), (24, 24, 24)


class WindowClosed(Exception):
    """The person has closed the window."""


class Window:
    """Shows pictures with lines of text below them, and knows which keys are down."""

    def __init__(self) -> None:
        """Opens the display; exits with one sentence if there is none."""
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        import pygame

        self.pygame = pygame
        try:
            pygame.display.init()
        except pygame.error as error:
            fail(f"--play needs a display, and there is none ({error})")
        driver = pygame.display.get_driver()
        if driver in ("offscreen", "dummy") and driver != os.environ.get("SDL_VIDEODRIVER"):  # SDL shows nothing then
            pygame.display.quit()
            fail("--play needs a display, and there is none")
        pygame.font.init()
        pygame.key.set_repeat(500, 100)  # milliseconds; for number keys
        self.font, self.clock = pygame.font.Font(None, 24), pygame.time.Clock()
        self.screen: Any = None
        self.held: list[str] = []  # arrows and letters that are down
        self.pressed: list[str] = []  # other keys since the last call of `show`

    def show(self, picture: np.ndarray, lines: Sequence[tuple[str, tuple[int, int, int]]], fps: float) -> None:
        """Shows a picture (height, width, 3) uint8 above coloured lines of text, waits for 1 / fps, and reads the keys.

        Raises WindowClosed if the window is closed, or Esc is pressed.
        """
        width = round(HEIGHT * picture.shape[1] / picture.shape[0])
        if self.screen is None:
            size = max(width, MIN_WIDTH), HEIGHT + len(lines) * LINE
            self.screen = self.pygame.display.set_mode(size)
            self.pygame.display.set_caption("self-play")
        self.screen.fill(BACKGROUND)
        surface = self.pygame.surfarray.make_surface(picture.swapaxes(0, 1))
        surface = self.pygame.transform.smoothscale(surface, (width, HEIGHT))
        self.screen.blit(surface, ((self.screen.get_width() - width) // 2, 0))
        for i, (text, colour) in enumerate(lines):
            self.screen.blit(self.font.render(text, True, colour), (10, HEIGHT + 6 + i * LINE))
        self.pygame.display.flip()
        self.clock.tick(fps)
        self.pressed = []
        for event in self.pygame.event.get():
            if event.type == self.pygame.QUIT:
                raise WindowClosed
            if event.type in (self.pygame.KEYDOWN, self.pygame.KEYUP):
                name = self.pygame.key.name(event.key).strip("[]")  # "[1]" is a key of the number pad
                if name == "escape":
                    raise WindowClosed
                if name in self.held:
                    self.held.remove(name)
                if event.type == self.pygame.KEYDOWN:
                    (self.held if name in DIRECTIONS else self.pressed).append(name)

    def direction(self) -> tuple[int, int]:
        """Where the held keys point, (x, y); of two opposite keys the newer one counts."""
        x = [DIRECTIONS[name][0] for name in self.held if DIRECTIONS[name][0]]
        y = [DIRECTIONS[name][1] for name in self.held if DIRECTIONS[name][1]]
        return (x or [0])[-1], (y or [0])[-1]

    def number(self) -> int | None:
        """The last number key since the last call of `show`; None if there was none."""
        return next((int(name) for name in reversed(self.pressed) if name.isdecimal()), None)

    def close(self) -> None:
        """Closes the window."""
        self.pygame.display.quit()


def explain_keys(env: TeamEnv, team: Team) -> str | None:
    """The keys of one of the team's agents in words; None if there are none for such actions."""
    if hasattr(env, "keyboard_actions"):
        return getattr(env, "keys", "arrows, WASD or number keys")
    if len(team.branches) == 1 and team.branches[0] <= 10:
        return f"number keys 1 to {team.branches[0] % 10}"
    if team.branches == (3, 3) or (not team.branches and team.action_dim <= 2):
        return "arrows or WASD"
    return None


def read_keys(env: TeamEnv, t: int, direction: tuple[int, int], number: int | None) -> np.ndarray | None:
    """The action (action_dim,) of the first agent of team t for these keys; None if it needs another number key."""
    team, (x, y) = env.teams[t], direction
    if hasattr(env, "keyboard_actions"):
        return env.keyboard_actions(t, direction, number)[0, 0]
    if not team.branches:
        return np.array([x, y] if team.action_dim == 2 else [x or y], dtype=np.float32)
    if not env.alive[t][0, 0]:  # it has left, and need not have a legal action
        return np.zeros(len(team.branches), dtype=np.int64)
    legal = legal_actions(env, t)[0, 0].nonzero()[0]
    if len(team.branches) == 2:
        own = legal[legal < 3], legal[legal >= 3] - 3  # of each branch
        return np.array([i if i in choices else choices[0] for i, choices in zip((x + 1, y + 1), own, strict=True)])
    if len(legal) == 1:  # it is another agent's turn
        return legal
    choice = None if number is None else (number - 1) % 10
    return None if choice not in legal else np.array([choice])


class Session:
    """Games between a person and policies, one after another."""

    def __init__(self, env: TeamEnv, window: Window, agents: Mapping[str, Any], policies: Sequence[Player]) -> None:
        """`policies` are players (`player_behaviors`), and `agents` the modules that act with the players' weights."""
        self.env, self.window, self.agents, self.policies = env, window, agents, policies
        self.team = 0  # the person's
        self.scores: list[float] = []  # the person's, of finished games
        self.fps = float(getattr(env, "render_fps", 10.0))

    def show(self, message: str, fps: float) -> None:
        """Shows game 0, the person's team, the score and what to do."""
        team, env = self.env.teams[self.team], self.env
        colour = getattr(env, "team_colours", [TEXT] * len(env.teams))[self.team]
        name = f"you: {team.name}" + (f" ({team.agents[0]})" if len(team.agents) > 1 else "")
        lines = [(f"{name}   {message}", colour), (f"{describe_scores(self.scores)}   {explain_keys(env, team)}", TEXT)]
        self.window.show(env.render(), lines, fps)

    def play(self, seed: int, deterministic: bool) -> None:
        """Plays one game, and shows its result until Space is pressed; Tab then changes the person's team.

        Raises WindowClosed if the window is closed.
        """
        env, window = self.env, self.window
        rng, generator = draw_stream(seed), torch.Generator().manual_seed(seed)
        stacks: dict[str, PolicyStack] = {}
        for player in self.policies:
            members = player.members or (player,)
            member = members[rng.choice(len(members), p=player.shares or None)]
            for single in member.lineup or (member,):
                assert single.weights is not None, "the player is a policy"
                stacks.setdefault(single.behavior, PolicyStack(self.agents[single.behavior], [single.weights]))

        def act(t: int, obs: np.ndarray) -> np.ndarray:
            behavior, policy = env.teams[t].behavior, np.zeros(obs.shape[1], dtype=np.int64)
            noise = 0.0 if deterministic else self.agents[behavior].actor.noise(len(policy), generator)
            return stacks[behavior].act(policy, obs[0], legal_actions(env, t)[0], noise)[None]

        obs = env.reset(seed)
        self.show("press a key to begin", WAITING_FPS)
        while not window.held and window.number() is None:
            self.show("press a key to begin", WAITING_FPS)
        over = False
        while not over:
            while (action := read_keys(env, self.team, window.direction(), window.number())) is None:
                self.show("your turn", WAITING_FPS)
            actions = [act(t, obs[t]) for t in range(len(env.teams))]
            actions[self.team][0, 0] = action
            result = env.step(actions)
            obs, over = result.obs, bool(result.over[0])
            if over:
                others = [t for t in range(len(env.teams)) if t not in allies_of(env.teams)[self.team]]
                self.scores.append(float(game_scores(result.scores[0])[self.team, others].mean()))
            self.show("", self.fps)
        said = "you have won" if self.scores[-1] > 0.5 else "a draw" if self.scores[-1] == 0.5 else "you have lost"
        while "space" not in window.pressed:
            self.show(f"{said}   Space: next game   Tab: other team   Esc: end", WAITING_FPS)
            if "tab" in window.pressed:
                self.team = (self.team + 1) % len(env.teams)


def describe_scores(scores: Sequence[float]) -> str:
    """The person's games in words; a win is 1, a draw 0.5."""
    mean = f", score {np.mean(scores):.2f}" if scores else ""
    return f"{len(scores)} game{'s' * (len(scores) != 1)}{mean}"


def play_at_keyboard(
    args: Any, make_games: Callable[..., TeamEnv], agents: Mapping[str, Any], policies: Sequence[Player]
) -> None:
    """--play: a person plays against `policies` (`player_behaviors`) until the window is closed.

    `make_games(num_games, render)` makes games. Exits with one sentence if keys cannot play the game, or if there is no
    display.
    """
    for flag in ("against", "exploitability", "capture_video"):
        if getattr(args, flag):
            fail(f"--play takes no {flag_of(flag)}: a person plays against the policies of --evaluate")
    env: Any = make_games(1, render=True)
    for team in env.teams:
        if explain_keys(env, team) is None:
            actions = f"{team.name} has {team.branches or team.action_dim}"
            takes = "one or two numbers, one branch of up to ten choices, or two branches of three choices"
            fail(f"--play takes a game with keyboard_actions, or with actions of {takes}, and {actions}")
    if hasattr(env, "restarts"):
        env.restarts = False
    window = Window()
    session = Session(env, window, agents, policies)
    try:
        for seed in itertools.count(args.seed):
            session.play(seed, args.deterministic)
    except WindowClosed:
        print(f"you against {args.evaluate} ({name_actions(args.deterministic)}): {describe_scores(session.scores)}")
    finally:
        window.close()
        env.close()
