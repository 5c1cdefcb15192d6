"""A common interface to games between teams: the built-in games, PettingZoo games, and a user's vectorised games.

`make_team_env` makes a game by name. All games have the interface `TeamEnv`: several games are stepped together, the
agents of a team are rows of one array, actions are numbers, which the game clips to [-1, 1], or integers of branches,
and a game that ends restarts in the same step. For PettingZoo see https://pettingzoo.farama.org. Its turn-based games
are played through its own conversion to parallel games.

The outcome rule of PettingZoo games: if agents of all sides got a number `info["outcome"]` during the game, the last
one of each side is its score. Otherwise the side's return is its score. A side's return is the mean over
its agents of the sum of their rewards. The higher score wins; equal scores are a draw. A side is a team, or several
teams that have different policies and win and lose together.
"""

import importlib
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np

from utils.errors import MAX_OBS_DIM, TaskError, describe_error, missing_package, place_of
from utils.run import cannot_be_made, close_quietly, fail, parse_json, warn
from utils.video import MAX_FRAMES

try:
    import gymnasium as gym
    from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space, flatdim, flatten
    from pettingzoo.utils.conversions import parallel_to_aec_wrapper, turn_based_aec_to_parallel
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel_wrapper as TurnBased
    from pettingzoo.utils.env import AECEnv, ParallelEnv
    from pettingzoo.utils.wrappers import BaseWrapper
except ModuleNotFoundError as error:
    raise missing_package("self-play", error) from error

MAX_STEPS = 5_000  # of a game in an evaluation

# === Interface ========================================================================================================


@dataclass(frozen=True)
class Team:
    """Agents that win and lose together, and act by one policy. Teams with the same behaviour share their policy."""

    name: str
    """name of the team"""
    behavior: str
    """name of its policy"""
    agents: tuple[str, ...]
    """names of its agents"""
    obs_dim: int
    """size of the observation of one agent"""
    action_dim: int
    """size of the action of one agent: numbers in [-1, 1] for Box, else one integer per branch"""
    branches: tuple[int, ...]
    """sizes of the discrete branches: () for Box, (9,) for Discrete(9), (3, 3) for MultiDiscrete([3, 3])"""
    side: str = ""
    """teams of one side win and lose together; "": the team is a side by itself"""

    @property
    def starts(self) -> np.ndarray:
        """The first place of each branch in a row of the team's masks."""
        return np.cumsum((0, *self.branches))[:-1]


def sides_of(teams: Sequence[Team]) -> list[str]:
    """The side of each team."""
    return [team.side or team.name for team in teams]


def allies_of(teams: Sequence[Team]) -> list[list[int]]:
    """For each team, the teams of its side, itself among them."""
    sides = sides_of(teams)
    return [[u for u, other in enumerate(sides) if other == side] for side in sides]


def side_means(arrays: Sequence[np.ndarray], allies: list[list[int]]) -> np.ndarray:
    """Means over the agents of each team's side (num_games, num_teams), of an array (num_games, team_size) per team."""
    return np.stack([np.concatenate([arrays[u] for u in own], axis=1).mean(axis=1) for own in allies], axis=1)


class TeamStep(NamedTuple):
    """Result of one step of all games. Lists have one item per team. Later steps do not change the arrays."""

    obs: list[np.ndarray]
    """(num_games, team_size, obs_dim) float32: observations to act on next; where a game ended, of the next game"""
    final_obs: list[np.ndarray]
    """same shape: observations after this step; they differ from obs only where a game ended or an agent left"""
    rewards: list[np.ndarray]
    """(num_games, team_size) float32"""
    terminations: list[np.ndarray]
    """(num_games, team_size) bool: the agent terminated in this step; its game may go on without it"""
    truncations: list[np.ndarray]
    """(num_games, team_size) bool: the agent was truncated in this step"""
    over: np.ndarray
    """(num_games,) bool: the game ended in this step, and the next one has started"""
    scores: np.ndarray
    """(num_games, num_teams) float64: scores of games that are over, else 0. The higher score wins; equal scores are a
    draw. Teams of one side have the same score."""


class TeamEnv(Protocol):
    """`num_games` games between teams, stepped together. A game that ends restarts in the same step.

    `step` ignores the actions of an agent that is not alive, and its observation is zeros. An agent that is alive but
    may not act, because it is another agent's turn, has one legal action: the first of each branch.

    Further attributes are optional. Videos and `--play` use two of them: `render_fps` is the game's own speed in steps
    per second, 10 if it is missing. `restarts` is True; once it is set to False, games that end stay as they are until
    `reset`. For `--play` alone see `utils/play.py`. `restart(games)` starts new games at these indices and returns obs.
    If there is this method, the first games after a reset are cut off at different steps (`utils/matches.py`), and
    `max_steps` is a first guess of a game's length. `final_masks` is like `action_masks`, but of the same game: it has
    the legal actions after the step of agents that left in it or whose game ended, for a bootstrap at a truncation.
    """

    num_games: int
    teams: tuple[Team, ...]
    scripted_by_team: tuple[tuple[str, ...], ...]
    """names of the scripted players of each team, weakest first; "random" is always among them"""
    alive: list[np.ndarray]
    """per team (num_games, team_size) bool: the agents that act in the next step"""
    action_masks: list[np.ndarray | None]
    """per team (num_games, team_size, sum(branches)) bool: legal actions of the next step; None: all are legal"""

    def reset(self, seed: int) -> list[np.ndarray]:
        """Restarts all games and returns obs. The seed and the actions determine all later steps."""

    def step(self, actions: list[np.ndarray]) -> TeamStep:
        """Steps all games with actions (num_games, team_size, action_dim) per team: numbers, to clip, or integers."""

    def scripted_actions(self, name: str, team: int) -> np.ndarray:
        """Actions of that player in all games, as `step` takes them. The call does not change the games."""

    def render(self) -> np.ndarray:
        """A picture of game 0, (height, width, 3) uint8."""

    def close(self) -> None:
        """Frees the resources of the games."""


def play_games(
    env: TeamEnv,
    act: Callable[[int, np.ndarray], np.ndarray],
    seed: int,
    frames: list[np.ndarray] | None = None,
    max_steps: int = MAX_STEPS,
) -> np.ndarray:
    """Plays each game from its reset to its first end. Returns the scores (num_games, num_teams).

    `act(team, obs)` gives a team's actions; it is called for each team before each step. A game that ends early
    restarts, and its further games are not counted. A game that does not end in `max_steps` steps
    is cut, and its scores are the sides' returns so far. A warning says how many were cut.

    `frames` receives a picture of game 0 before each step of its first game, and one of its end if the games have the
    attribute `restarts`. After `MAX_FRAMES` pictures only that of the end is added.
    """
    optional: Any = env
    shows_end = frames is not None and hasattr(env, "restarts")
    if shows_end:
        optional.restarts = False
    obs = env.reset(seed)
    scores, returns = np.zeros((env.num_games, len(env.teams))), np.zeros((env.num_games, len(env.teams)))
    running, allies = np.ones(env.num_games, dtype=bool), allies_of(env.teams)
    for _ in range(max_steps):
        if frames is not None and running[0] and len(frames) < MAX_FRAMES:
            frames.append(env.render())
        step = env.step([act(team, obs[team]) for team in range(len(env.teams))])
        returns += side_means(step.rewards, allies)
        ended = running & step.over
        if frames is not None and shows_end and ended[0]:
            frames.append(env.render())
        scores[ended] = step.scores[ended]
        running &= ~step.over
        obs = step.obs
        if not running.any():
            break
    else:
        scores[running] = returns[running]
        cut = f"{int(running.sum())} of {env.num_games} games did not end in {max_steps:,} steps"
        warn(f"{cut} and were scored by their returns so far")
    if shows_end:
        optional.restarts = True
    return scores


def legal_actions(env: TeamEnv, t: int) -> np.ndarray:
    """Legal actions of team t in the next step: (num_games, team_size, sum(branches)), with no columns for Box."""
    team, mask = env.teams[t], env.action_masks[t]
    return np.ones((env.num_games, len(team.agents), sum(team.branches)), dtype=bool) if mask is None else mask


def next_legal_actions(env: TeamEnv, t: int, over: np.ndarray) -> np.ndarray:
    """Legal actions of team t after a step, for the value that a learner bootstraps from; shape of `legal_actions`.

    `over` is that of the step. For an agent that is still in its game these are the legal actions. For an agent whose
    game is over, or that has left its game, `env.action_masks` describes the next game or an idle agent. The legal
    actions are then those of `env.final_masks`; all of them, if the game has no such attribute.
    """
    legal, has_left = legal_actions(env, t), (over[:, None] | ~env.alive[t])[:, :, None]
    final_mask: np.ndarray | None = getattr(env, "final_masks", [None] * len(env.teams))[t]
    return legal | has_left if final_mask is None else np.where(has_left, final_mask, legal)


# === Errors ===========================================================================================================


class BadGame(ValueError):
    """A game that cannot be made or played here: a whole sentence."""


@contextmanager
def game_code(place: str) -> Iterator[None]:
    """Turns what the game's code raises into a TaskError that names the place."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and what code in other languages raises
        said = str(error) if isinstance(error, TaskError) else describe_error(error)
        raise TaskError(f"{place}: {said}") from error


# === Teams ============================================================================================================


def branches_of(space: Space) -> tuple[int, ...]:
    """Sizes of the discrete branches of an action space; () for Box."""
    if isinstance(space, Discrete):
        return (int(space.n),)
    return tuple(int(size) for size in space.nvec.ravel()) if isinstance(space, MultiDiscrete) else ()


def without_mask(space: Space) -> Space:
    """The observation space without the action mask that a Dict may contain."""
    if isinstance(space, Dict) and "action_mask" in space.spaces:
        return Dict({key: part for key, part in space.spaces.items() if key != "action_mask"})
    return space


class Group(NamedTuple):
    """Agents that are to be a team; the fields are those of `Team`."""

    name: str
    behavior: str
    agents: list[str]
    side: str = ""


def name_teams(agents: list[str]) -> list[Group]:
    """Groups agents into teams by name, in the order of the first agents.

    `Striker?team=0...` is ML-Agents' form: a behaviour name and a team id. Agents with both in common are one team, and
    `Goalie?team=0` is another team of the same side, with a policy of its own. For other names, the name without its
    final number is team and behaviour. If there are only two agents and they share that name, each is its own team.
    """
    groups: dict[str, Group] = {}
    for agent in agents:
        if match := re.match(r"(.*)\?(team=\d+)", agent):
            group = Group(match[0], match[1], [], match[2])
        else:
            name = re.sub(r"[-_ ]?\d+$", "", agent) or "agent"
            group = Group(name, name, [])
        groups.setdefault(group.name, group).agents.append(agent)
    found = list(groups.values())
    if len(agents) == 2 and len(found) == 1 and not found[0].side:
        return [Group(agent, found[0].behavior, [agent]) for agent in agents]
    return found


def read_teams(env_id: str, named: Mapping[str, Any], agents: list[str]) -> list[Group]:
    """The teams of --teams. A value lists agents. For a side of several teams, it maps behaviours to such lists.

    Behaviours of one name are one policy, and so are all teams without a behaviour. Raises BadGame if an agent is
    missing, is there twice, or is not in the game.
    """
    groups, plain = [], [side for side, members in named.items() if not isinstance(members, Mapping)]
    for side, members in named.items():
        if side in plain:
            groups.append(Group(side, "shared" if len(plain) > 1 else side, members))
        else:
            groups += [Group(f"{side} {behavior}", behavior, own, side) for behavior, own in members.items()]
    if len({group.name for group in groups}) < len(groups):
        raise BadGame(f"{env_id} takes --teams with different names, not {', '.join(group.name for group in groups)}")
    placed = [agent for group in groups for agent in group.agents]
    if sorted(placed) != sorted(agents) or not all(group.agents for group in groups):
        raise BadGame(f"{env_id} takes --teams that name each of its agents once, and no other: {', '.join(agents)}")
    return groups


def make_team(env_id: str, env: ParallelEnv, group: Group) -> Team:
    """Makes a team of these agents. Sizes are those of its largest agent. BadGame if they cannot be one team."""
    name, behavior, agents, side = group
    obs_dims, action_dims, branches = [], [], []
    for agent in agents:
        obs_space, space = without_mask(env.observation_space(agent)), env.action_space(agent)
        if not obs_space.is_np_flattenable:
            raise BadGame(f"{env_id} takes observations that flatten to a vector, and those of {agent} are {obs_space}")
        is_box = isinstance(space, Box) and space.dtype.kind == "f" and space.is_bounded()
        if not is_box and not isinstance(space, (Discrete, MultiDiscrete)):
            takes = "Discrete, MultiDiscrete or a Box of real numbers with finite bounds"
            raise BadGame(f"{env_id} takes actions that are {takes}, and those of {agent} are {space}")
        obs_dims.append(flatdim(obs_space))
        branches.append(branches_of(space))
        action_dims.append(flatdim(space) if is_box else len(branches[-1]))
    if not all(obs_dims) or not all(action_dims):
        raise BadGame(f"{env_id} takes observations and actions of one number or more, and team {name} has none")
    if max(obs_dims) > MAX_OBS_DIM:
        raise BadGame(f"{env_id} takes observations of {MAX_OBS_DIM:,} numbers or fewer, and those of {name} have more")
    if len({sizes == () for sizes in branches}) > 1:
        takes = "teams whose agents are all of Box or all of discrete actions"
        raise BadGame(f"{env_id} takes {takes}, and {name} is of both")
    largest = tuple(max(sizes) for sizes in zip_longest(*branches, fillvalue=0))
    return Team(name, behavior, tuple(agents), max(obs_dims), max(action_dims), largest, side)


def describe_teams(env: TeamEnv) -> str:
    """One line for each team: its agents, behaviour, observations and actions."""
    lines = []
    for team in env.teams:
        agents = f"{len(team.agents)} agent{'s' * (len(team.agents) > 1)} ({', '.join(team.agents)})"
        kind = {0: "Box", 1: "Discrete"}.get(len(team.branches), "MultiDiscrete")
        size = " x ".join(map(str, team.branches or (team.action_dim,)))
        sees = f"behaviour {team.behavior}, {team.obs_dim} observation{'s' * (team.obs_dim > 1)}"
        lines.append(f"team {team.name}: {agents}, {sees}, {kind} actions of {size}")
    for own in allies_of(env.teams):
        line = f"{' and '.join(env.teams[t].name for t in own)} win and lose together"
        lines += [line] if len(own) > 1 and line not in lines else []
    return "\n".join(lines)


def shape_of(team: Team) -> str:
    """A team's size, observations and actions in words. Teams that share a policy must agree in them."""
    return f"{len(team.agents)} x {team.obs_dim} observations and {team.branches or team.action_dim} actions"


def set_behaviors(env_id: str, teams: tuple[Team, ...], symmetric: bool | None) -> tuple[Team, ...]:
    """Gives all teams one behaviour (True) or each its own (False); None changes nothing.

    Where a side has several teams, True changes nothing: teams with the same name of their behaviour share it.
    Raises BadGame if teams that share a behaviour differ in size.
    """
    if symmetric is False or (symmetric and len(set(sides_of(teams))) == len(teams)):
        one = teams[0].behavior if len({team.behavior for team in teams}) == 1 else "shared"
        teams = tuple(replace(team, behavior=one if symmetric else team.name) for team in teams)
    for a, b in combinations(teams, 2):
        if a.behavior == b.behavior and shape_of(a) != shape_of(b):
            unlike = f"{a.name} has {shape_of(a)} and {b.name} has {shape_of(b)}"
            raise BadGame(f"{env_id} takes --symmetric no: teams that share a policy are alike, and {unlike}")
    return teams


def make_teams(
    env_id: str, env: ParallelEnv, named: Mapping[str, Any] | None, symmetric: bool | None
) -> tuple[Team, ...]:
    """The teams of a PettingZoo game: the `named` ones (`read_teams`), or those that the agents' names tell.

    Named teams share a behaviour if all of them are alike. `symmetric` overrides the behaviours. Raises BadGame if
    there is only one side.
    """
    agents = list(getattr(env, "possible_agents", []))
    if not all(isinstance(agent, str) for agent in agents):
        raise BadGame(f"{env_id} takes agents whose names are strings, and its are {agents}")
    groups = name_teams(agents) if named is None else read_teams(env_id, named, agents)
    num_sides = len({group.side or group.name for group in groups})
    if num_sides < 2:
        found = "; ".join(f"{group.name}: {', '.join(group.agents)}" for group in groups) or "no possible_agents"
        now = f"which are {num_sides} now ({found})"
        raise BadGame(f"{env_id} takes --teams that make two teams or more of its agents, {now}")
    teams = tuple(make_team(env_id, env, group) for group in groups)
    if named is not None and symmetric is None:  # where teams of one behaviour are unlike, each has a policy of its own
        alike = {b: {shape_of(team) for team in teams if team.behavior == b} for b in {team.behavior for team in teams}}
        teams = tuple(replace(x, behavior=x.name) if len(alike[x.behavior]) > 1 else x for x in teams)
    return set_behaviors(env_id, teams, symmetric)


# === PettingZoo =======================================================================================================


def read_outcome(agent: str, outcome: Any) -> float:
    """The agent's `info["outcome"]` as a number."""
    number = np.asarray(outcome)
    if number.size != 1 or number.dtype.kind not in "biuf" or not np.isfinite(number).all():
        raise TaskError(f'info["outcome"] of {agent} must be a finite number, not {outcome!r:.80}')
    return float(number.item())


def read_reward(agent: str, rewards: Mapping[str, Any]) -> float:
    """The reward of an agent that has acted."""
    if agent not in rewards:
        raise TaskError(f"{agent} has acted and must have a reward, and there is none")
    try:
        reward = rewards[agent]
        return float(reward.item() if isinstance(reward, np.ndarray) else reward)
    except (TypeError, ValueError):
        raise TaskError(f"the reward of {agent} must be a number, not {rewards[agent]!r:.80}") from None


ScriptedPlayer = Callable[[ParallelEnv, str, Any], Any]  # the game, an agent and its observation, to its action


def read_scripted(env_id: str, module: Any, teams: tuple[Team, ...]) -> dict[str, dict[str, ScriptedPlayer]]:
    """The scripted players of a PettingZoo module: name -> name of a team -> function; {} if it has none.

    `module.scripted_players` maps a name to a function that plays for all teams, or to a function for each team that
    the player can play for. A function takes the game, the name of an agent and its observation, and returns the
    agent's action. The weakest player comes first. Raises BadGame if there is something else.
    """
    given, names = getattr(module, "scripted_players", {}), [team.name for team in teams]
    found: dict[str, dict[str, ScriptedPlayer]] = {}
    for name, player in given.items() if isinstance(given, Mapping) else [("random", given)]:
        functions: Any = dict.fromkeys(names, player) if callable(player) else player
        is_good = isinstance(name, str) and name != "random" and isinstance(functions, Mapping) and len(functions) > 0
        if not is_good or not functions.keys() <= set(names) or not all(map(callable, functions.values())):
            takes = f"names other than random to functions, or to functions by team ({', '.join(names)})"
            raise BadGame(f"{env_id} takes scripted_players that map {takes}, not {given!r:.200}")
        found[name] = dict(functions)
    return found


class Seat:
    """The place of one agent in its team's arrays, and the conversion between its spaces and these arrays.

    Agents of a team may have smaller spaces than its largest agent. Then their observations are padded with zeros,
    extra numbers of their actions are ignored, and extra discrete actions are illegal.
    """

    def __init__(self, env: ParallelEnv, teams: tuple[Team, ...], t: int, k: int) -> None:
        self.t, self.k, self.agent = t, k, teams[t].agents[k]
        self.obs_space = without_mask(env.observation_space(self.agent))
        self.action_space = env.action_space(self.agent)
        self.obs_dim = flatdim(self.obs_space)
        self.branches = branches_of(self.action_space)
        self.starts = teams[t].starts
        self.slots = [start + i for start, size in zip(self.starts, self.branches, strict=False) for i in range(size)]
        self.num_slots = sum(teams[t].branches)

    def read_obs(self, obs: Any) -> np.ndarray:
        """The observation as a vector, without its action mask."""
        try:
            vector = np.asarray(flatten(self.obs_space, obs), dtype=np.float32)
        except Exception as error:
            raise self._bad_obs(f"{obs!r:.80} ({describe_error(error)})") from None
        if vector.size != self.obs_dim or (isinstance(self.obs_space, Discrete) and not self.obs_space.contains(obs)):
            raise self._bad_obs(f"{vector.size} numbers" if vector.size != self.obs_dim else f"{obs!r:.80}")
        return vector

    def _bad_obs(self, given: str) -> TaskError:
        """The error of an observation that is not in its space."""
        expected = f"{self.obs_dim} numbers, from its space {self.obs_space}"
        return TaskError(f"the observation of {self.agent} must be {expected}, not {given}")

    def read_mask(self, obs: Any, info: dict[str, Any]) -> np.ndarray:
        """The agent's legal actions as a row of its team's mask. A branch without a legal action gets its first."""
        mask = obs.get("action_mask") if isinstance(obs, dict) else None
        mask = info.get("action_mask") if mask is None else mask
        row = np.zeros(self.num_slots, dtype=bool)
        if mask is not None:
            mask = np.hstack(mask) if isinstance(mask, (tuple, list)) else np.asarray(mask).ravel()
            if mask.size != len(self.slots):
                expected = f"{len(self.slots)} numbers, one for each action"
                raise TaskError(f"the action mask of {self.agent} must have {expected}, not {mask.size}")
        row[self.slots] = True if mask is None else mask
        row[self.starts[~np.logical_or.reduceat(row, self.starts)]] = True
        return row

    def write_action(self, action: np.ndarray) -> Any:
        """The agent's action in its own space, from a row of its team's actions."""
        space = self.action_space
        if isinstance(space, Box):
            share = 0.5 * (action[: flatdim(space)].reshape(space.shape).astype(np.float64).clip(-1.0, 1.0) + 1.0)
            value = space.low * (1.0 - share) + space.high * share  # high - low could overflow
            return value.clip(space.low, space.high).astype(space.dtype)
        if isinstance(space, Discrete):
            return space.dtype.type(action[0] + space.start)
        assert isinstance(space, MultiDiscrete)
        return (action[: len(self.branches)].reshape(space.shape) + space.start).astype(space.dtype)

    def read_action(self, action: Any, mask: np.ndarray | None) -> np.ndarray:
        """The reverse of `write_action`: a row of the team's actions, of which `mask` says what is legal."""
        space = self.action_space
        if isinstance(space, Box):
            value = np.asarray(action, dtype=np.float64)
            if value.shape != space.shape or not np.isfinite(value).all():
                raise TaskError(f"the action of {self.agent} must be in {space}, not {action!r:.80}")
            low, high = 0.5 * space.low.astype(np.float64), 0.5 * space.high.astype(np.float64)
            centre, half = high + low, high - low
            return ((value - centre) / np.where(half > 0.0, half, 1.0)).clip(-1.0, 1.0).ravel()
        if not space.contains(action):
            raise TaskError(f"the action of {self.agent} must be in {space}, not {action!r:.80}")
        branches = np.ravel(action - space.start)
        if mask is not None and not mask[self.starts[: len(branches)] + branches].all():
            raise TaskError(f"the action of {self.agent} must be legal, and {action!r:.80} is not")
        return branches


class TurnNotes(BaseWrapper):
    """Notes whose turn comes after each action. After the end of a game `agent_selection` is an agent that leaves."""

    next_agent = ""

    def step(self, action: Any) -> None:
        """Takes an action; None is that of an agent that leaves."""
        super().step(action)
        if action is not None:
            self.next_agent = self.agent_selection


def to_parallel(env: AECEnv) -> ParallelEnv:
    """A turn-based game as a parallel one."""
    return turn_based_aec_to_parallel(env if isinstance(env, parallel_to_aec_wrapper) else TurnNotes(env))


class PettingZooGames:
    """Copies of a PettingZoo parallel environment as a `TeamEnv`. They are stepped one after another.

    A game is over when no agent is left. An agent leaves by termination or truncation; one that disappears without
    either counts as terminated. Each copy is seeded at its first game only; later games continue its random stream.
    """

    def __init__(
        self,
        envs: list[ParallelEnv],
        teams: tuple[Team, ...],
        scripted: Mapping[str, Mapping[str, ScriptedPlayer]] | None = None,
    ) -> None:
        """`scripted` are the game's own scripted players (`read_scripted`), which come after "random"."""
        self.envs, self.num_games, self.teams, self.scripted = envs, len(envs), teams, scripted or {}
        self._allies = allies_of(teams)
        own = [[name for name, by_team in self.scripted.items() if team.name in by_team] for team in teams]
        self.scripted_by_team: tuple[tuple[str, ...], ...] = tuple(("random", *names) for names in own)
        self.alive = self._zeros(bool)
        self.action_masks, self.final_masks = self._idle_masks(), self._idle_masks()
        self.restarts = True  # whether a game that ends starts again in the same step
        fps = (getattr(envs[0], "metadata", None) or {}).get("render_fps")
        self.render_fps = float(fps) if isinstance(fps, (int, float)) and fps > 0 else 10.0
        self._seats = [Seat(envs[0], teams, t, k) for t, team in enumerate(teams) for k in range(len(team.agents))]
        self._observations: list[dict[str, Any]] = [{} for _ in envs]  # the game's own, of agents that may act

    def _zeros(self, dtype: type) -> list[np.ndarray]:
        """Per team an array (num_games, team_size)."""
        return [np.zeros((self.num_games, len(team.agents)), dtype) for team in self.teams]

    def _idle_masks(self) -> list[np.ndarray | None]:
        """Masks of agents that cannot act: the first action of each branch."""
        masks: list[np.ndarray | None] = []
        for team in self.teams:
            row = np.zeros(sum(team.branches), dtype=bool)
            row[team.starts] = True
            masks.append(np.tile(row, (self.num_games, len(team.agents), 1)) if team.branches else None)
        return masks

    def _read(self, i: int, observations: dict[str, Any], infos: dict[str, Any], acted: list[np.ndarray]) -> None:
        """Writes the observations of the agents of game i, and the legal actions of those that are alive."""
        env = self.envs[i]
        turn = env.aec_env.agent_selection if isinstance(env, TurnBased) else None
        self._observations[i] = {agent: obs for agent, obs in observations.items() if turn in (None, agent)}
        for seat in self._seats:
            is_alive, mask = self.alive[seat.t][i, seat.k], self.action_masks[seat.t]
            if is_alive and seat.agent not in observations:
                raise TaskError(f"{seat.agent} is in the game and must have an observation, and there is none")
            if seat.agent in observations and (is_alive or acted[seat.t][i, seat.k]):
                obs = seat.read_obs(observations[seat.agent])
                self._obs[seat.t][i, seat.k, : obs.size] = obs
            if mask is not None and is_alive and turn in (None, seat.agent):
                mask[i, seat.k] = seat.read_mask(observations.get(seat.agent), infos.get(seat.agent, {}))

    def _begin(self, i: int, seed: int | None = None) -> None:
        """Starts the next game of copy i."""
        self._outcomes[i] = np.nan
        with game_code(f"environment {i} in reset"):
            result: Any = self.envs[i].reset(seed=seed)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TaskError("reset must return observations and infos")
            observations, infos = result
            for seat in self._seats:
                self._returns[seat.t][i, seat.k] = 0.0
                self.alive[seat.t][i, seat.k] = seat.agent in self.envs[i].agents
            if not any(alive[i].any() for alive in self.alive):
                raise TaskError("a game must begin with at least one agent, and there is none")
            self._read(i, observations, infos, self.alive)

    def reset(self, seed: int) -> list[np.ndarray]:
        """Restarts all games. Each copy gets its own seed."""
        self._random = np.random.default_rng([seed, self.num_games])
        self._obs = [np.zeros((self.num_games, len(x.agents), x.obs_dim), np.float32) for x in self.teams]
        self._returns, self._outcomes = self._zeros(np.float64), np.empty((self.num_games, len(self.teams)))
        self.alive, self.action_masks = self._zeros(bool), self._idle_masks()
        for i in range(self.num_games):
            self._begin(i, int(np.random.SeedSequence([seed, i]).generate_state(1)[0] >> 1))  # some games take 31 bits
        return self._obs

    def step(self, actions: list[np.ndarray]) -> TeamStep:
        """Steps every game."""
        acted, self.alive, self.action_masks = self.alive, self._zeros(bool), self._idle_masks()
        self.final_masks = self._idle_masks()  # legal actions after the step, also of those that leave in it
        self._obs = [obs.copy() for obs in self._obs]  # used where a game gives no last observation
        rewards, terminations, truncations = self._zeros(np.float32), self._zeros(bool), self._zeros(bool)
        for i, env in enumerate(self.envs):
            acting = [seat for seat in self._seats if acted[seat.t][i, seat.k]]
            if not acting:  # it has ended and does not restart
                continue
            chosen = {seat.agent: seat.write_action(actions[seat.t][i, seat.k]) for seat in acting}
            with game_code(f"environment {i} in step"):
                observations, rewarded, terminated, truncated, infos = env.step(chosen)
                for seat in self._seats:
                    t, k, agent = seat.t, seat.k, seat.agent
                    is_terminated, is_truncated = bool(terminated.get(agent)), bool(truncated.get(agent))
                    is_alive = agent in env.agents and not is_terminated and not is_truncated
                    self.alive[t][i, k] = is_alive
                    if acted[t][i, k]:
                        if agent in rewarded or is_alive or is_terminated or is_truncated:  # else it has disappeared
                            reward = read_reward(agent, rewarded)
                            rewards[t][i, k] = reward
                            self._returns[t][i, k] += reward
                        terminations[t][i, k] = is_terminated or not (is_alive or is_truncated)
                        truncations[t][i, k] = is_truncated
                    outcome = infos.get(agent, {}).get("outcome")
                    if outcome is not None:
                        self._outcomes[i, self._allies[t]] = read_outcome(agent, outcome)
                self._read(i, observations, infos, acted)
                turn = getattr(env.aec_env, "next_agent", None) if isinstance(env, TurnBased) else None
                for seat in acting:
                    if (mask := self.final_masks[seat.t]) is not None and turn in (None, seat.agent):
                        mask[i, seat.k] = seat.read_mask(observations.get(seat.agent), infos.get(seat.agent, {}))
        final_obs = self._obs
        self._obs = [np.where(alive[..., None], obs, 0.0) for alive, obs in zip(self.alive, final_obs, strict=True)]
        returns = side_means(self._returns, self._allies).round(6)  # ten times 0.1 and 1 are a draw
        scores = np.where(np.isnan(self._outcomes).any(axis=1, keepdims=True), returns, self._outcomes)
        over = ~np.any([alive.any(1) for alive in self.alive], axis=0)
        for i in over.nonzero()[0]:
            if not np.isfinite(scores[i]).all():
                names = ", ".join(team.name for team in self.teams)
                raise TaskError(f"environment {i} in step: the returns of {names} must be numbers, not {scores[i]}")
            if self.restarts:
                self._begin(i)
        scores = np.where(over[:, None], scores, 0.0)
        return TeamStep(self._obs, final_obs, rewards, terminations, truncations, over, scores)

    def restart(self, games: np.ndarray) -> list[np.ndarray]:
        """Starts the next game of these copies; see `TeamEnv`."""
        self._obs = [obs.copy() for obs in self._obs]
        for obs, mask, idle in zip(self._obs, self.action_masks, self._idle_masks(), strict=True):
            obs[games] = 0.0
            if mask is not None and idle is not None:
                mask[games] = idle[games]
        for i in games.tolist():
            self._begin(i)
        return self._obs

    def scripted_actions(self, name: str, team: int) -> np.ndarray:
        """Actions of a scripted player; those of "random" are uniform over the legal actions.

        A player that came with the game is not asked for agents that may not act: they get zeros.
        """
        if name not in self.scripted_by_team[team]:
            known = ", ".join(self.scripted_by_team[team])
            raise ValueError(f"{name} is not a scripted player of this game, which has {known}")
        own, mask = self.teams[team], self.action_masks[team]
        shape = (*self.alive[team].shape, own.action_dim)
        if name == "random" and mask is None:
            return self._random.uniform(-1.0, 1.0, shape).astype(np.float32)
        if name == "random" and mask is not None:
            lots = mask * (1.0 - self._random.random(mask.shape))  # legal: above 0; the highest of a branch wins
            return np.stack([part.argmax(-1) for part in np.split(lots, own.starts[1:], axis=-1)], axis=-1)
        actions, function = np.zeros(shape, np.int64 if own.branches else np.float32), self.scripted[name][own.name]
        for i, env in enumerate(self.envs):
            with game_code(f"scripted player {name} in environment {i}"):
                for seat in self._seats:
                    if seat.t == team and self.alive[team][i, seat.k] and seat.agent in self._observations[i]:
                        action = function(env, seat.agent, self._observations[i][seat.agent])
                        row = seat.read_action(action, None if mask is None else mask[i, seat.k])
                        actions[i, seat.k, : row.size] = row
        return actions

    def render(self) -> np.ndarray:
        """A picture of game 0, (height, width, 3) uint8. The game must have been made with render_mode="rgb_array"."""
        with game_code("environment 0 in render"):
            return check_picture(self.envs[0].render())

    def close(self) -> None:
        """Closes all copies. A copy that cannot be closed costs a warning."""
        for i, env in enumerate(self.envs):
            close_quietly(f"environment {i}", env.close)


# === Making a game ====================================================================================================

BUILT_IN = {"sumo": "utils.games:Sumo", "builds": "utils.games:Builds", "pursuit": "utils.games:Pursuit"}


@contextmanager
def refusal(message: str) -> Iterator[None]:
    """Turns exceptions of the game's code into BadGame. Puts the working folder on `sys.path`."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # PettingZoo announces a registry that few games are in
            yield
    except (BadGame, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise BadGame(f"{message}: {describe_error(error)}{place_of(error)}") from error
    finally:
        if folder in sys.path:  # else the module itself has removed it
            sys.path.remove(folder)


def check_team_env(env: TeamEnv, num_games: int) -> None:
    """Raises TypeError or ValueError if a game is not a `TeamEnv` of `num_games` games. Resets and steps it."""
    members = ["num_games", "teams", "scripted_by_team", "alive", "action_masks"]
    members += ["reset", "step", "scripted_actions", "render", "close"]
    if missing := [name for name in members if not hasattr(env, name)]:
        raise TypeError(f"a TeamEnv must have {', '.join(missing)}, and {type(env).__name__} does not")
    if env.num_games != num_games:
        raise ValueError(f"num_games is {env.num_games}, and {num_games} were asked for")
    if len(env.teams) < 2 or not all(isinstance(team, Team) for team in env.teams):
        raise TypeError(f"teams must be two or more of utils.team_env.Team, not {env.teams}")
    if len({team.name for team in env.teams}) < len(env.teams) or len(set(sides_of(env.teams))) < 2:
        raise ValueError(f"teams must have different names and be of two sides or more, not {env.teams}")
    if not all(team.agents and isinstance(team.branches, tuple) for team in env.teams):
        raise ValueError(f"teams must have agents and a tuple of branches, not as in {env.teams}")
    sizes = [x for team in env.teams for x in (team.obs_dim, team.action_dim, *team.branches)]
    if not all(isinstance(x, (int, np.integer)) and x > 0 for x in sizes):
        raise ValueError(f"obs_dim, action_dim and branches must be integers from 1, not as in {env.teams}")
    if not isinstance(getattr(env, "max_steps", 0), (int, float, np.number)):
        raise TypeError(f"max_steps must be a number, not {getattr(env, 'max_steps', 0)!r}")
    if any(team.branches and team.action_dim != len(team.branches) for team in env.teams):
        raise ValueError(f"action_dim must be the number of branches where a team has some, not as in {env.teams}")
    known = env.scripted_by_team
    if len(known) != len(env.teams) or not all("random" in x and not isinstance(x, str) for x in known):
        raise ValueError(f"scripted_by_team must have a tuple of names for each team, random among them, not {known}")
    obs_shapes = [(num_games, len(team.agents), team.obs_dim) for team in env.teams]
    check_arrays("reset", env.reset(0), obs_shapes, "float32")
    check_agents(env, "action_masks")
    if not np.any([alive.any(axis=1) for alive in env.alive], axis=0).all():
        raise ValueError("alive must have an agent in each game after a reset")
    check_masks(env)
    for t, team in enumerate(env.teams):
        for name in known[t]:
            actions = env.scripted_actions(name, t)
            check_arrays(f"scripted_actions of {name}", [actions], [(num_games, len(team.agents), team.action_dim)])
            check_actions(f"scripted_actions of {name}", env, t, np.asarray(actions))
    check_step(env, env.step([env.scripted_actions("random", t) for t in range(len(env.teams))]))
    if hasattr(env, "restart"):
        check_arrays("restart", env.restart(np.zeros(1, dtype=np.int64)), obs_shapes, "float32")


def check_step(env: TeamEnv, step: TeamStep) -> None:
    """Raises TypeError or ValueError if what a step gives, or the agents after it, have wrong shapes or types."""
    if not isinstance(step, TeamStep):
        raise TypeError(f"step must return a utils.team_env.TeamStep, not a {type(step).__name__}")
    shapes = [(env.num_games, len(team.agents)) for team in env.teams]
    obs_shapes = [(*shape, team.obs_dim) for shape, team in zip(shapes, env.teams, strict=True)]
    types = {"obs": "float32", "final_obs": "float32", "rewards": None, "terminations": "bool", "truncations": "bool"}
    for name, dtype in types.items():
        check_arrays(f"{name} of step", getattr(step, name), obs_shapes if "obs" in name else shapes, dtype)
    check_arrays("over of step", [step.over], [(env.num_games,)], "bool")
    check_arrays("scores of step", [step.scores], [(env.num_games, len(env.teams))])
    check_agents(env, "action_masks", *(["final_masks"] if hasattr(env, "final_masks") else []))


def check_agents(env: TeamEnv, *names: str) -> None:
    """Raises ValueError if `alive`, or the masks of these names, have wrong shapes or types."""
    check_arrays("alive", env.alive, [(env.num_games, len(team.agents)) for team in env.teams], "bool")
    for name in names:
        masks = getattr(env, name)
        if not isinstance(masks, (list, tuple)) or len(masks) != len(env.teams):
            raise ValueError(f"{name} must have {len(env.teams)} items, one a team, not {masks}")
        for mask, team in zip(masks, env.teams, strict=True):
            if mask is not None:
                check_arrays(name, [mask], [(env.num_games, len(team.agents), sum(team.branches))], "bool")


def check_arrays(
    name: str, arrays: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]], dtype: str | None = None
) -> None:
    """Raises ValueError if the arrays of a `TeamEnv` do not have these shapes and this type."""
    if not isinstance(arrays, (list, tuple)):
        raise ValueError(f"{name} must give a list of arrays, not {type(arrays).__name__}")
    if [np.shape(x) for x in arrays] != list(shapes) or (dtype and any(np.asarray(x).dtype != dtype for x in arrays)):
        found = [(np.shape(array), dtype and str(np.asarray(array).dtype)) for array in arrays]
        expected = [(shape, dtype) for shape in shapes]
        raise ValueError(f"{name} must give arrays of {expected}, not {found}")


def check_actions(name: str, env: TeamEnv, t: int, actions: np.ndarray) -> None:
    """Raises ValueError if numbers of a player's actions are not finite, or choices of living agents illegal."""
    team, chosen = env.teams[t], actions[env.alive[t]]
    is_good = bool(np.isfinite(chosen).all())
    if team.branches and is_good:
        is_choice = (chosen == chosen.round()) & (chosen >= 0) & (chosen < np.array(team.branches))
        places = team.starts + chosen.astype(int)  # in a row of the masks
        legal = legal_actions(env, t)[env.alive[t]]
        is_good = bool(is_choice.all()) and bool(np.take_along_axis(legal, places, axis=1).all())
    if not is_good:
        raise ValueError(f"{name} must give {'legal choices' if team.branches else 'finite numbers'} for {team.name}")


def check_picture(picture: Any) -> np.ndarray:
    """Returns what a game's `render` gave. Raises TypeError if it is no picture."""
    if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        is_array = isinstance(picture, np.ndarray)
        found = f"an array {picture.shape} of {picture.dtype}" if is_array else type(picture).__name__
        raise TypeError(f"render must give an array (height, width, 3) of uint8, not {found}")
    return picture


def check_scripted(env_id: str, env: TeamEnv) -> TeamEnv:
    """Returns the game. Raises BadGame if teams that share a behaviour have different scripted players."""
    for (a, own), (b, others) in combinations(zip(env.teams, env.scripted_by_team, strict=True), 2):
        if a.behavior == b.behavior and set(own) != set(others):
            unlike = f"{a.name} has {', '.join(own)} and {b.name} has {', '.join(others)}"
            raise BadGame(f"{env_id} takes the same scripted players for teams that share a policy, and {unlike}")
    return env


def check_masks(env: TeamEnv, has_ended: np.ndarray | None = None) -> None:
    """Raises TaskError if an agent that is alive has no legal action in a branch.

    `has_ended` (num_games,) are games in which nobody acts any more.
    """
    for team, alive, mask in zip(env.teams, env.alive, env.action_masks, strict=True):
        if mask is None or not team.branches:
            continue
        if has_ended is not None:
            alive = alive & ~has_ended[:, None]
        if not np.logical_or.reduceat(mask, team.starts, axis=-1)[alive].all():
            rule = "a legal action in each branch, the first one where it may not act"
            raise TaskError(f"action_masks must give each agent of {team.name} that is alive {rule}")


def guard(env: TeamEnv) -> None:
    """Turns what a user's vectorised game raises into TaskError, and checks its steps, masks and ends of games."""

    def guarded(name: str, method: Callable[..., Any], *args: Any) -> Any:
        with game_code(f"{name} of {type(env).__name__}"):
            alive = [x.copy() for x in env.alive] if name == "step" else []
            result = method(*args)
            if name == "step":
                check_step(env, result)
                rewards = [np.where(own, paid, 0.0) for own, paid in zip(alive, result.rewards, strict=True)]
                result = result._replace(rewards=rewards)  # those of agents that have left count for nothing
                begun = result.over & getattr(env, "restarts", True)
                if begun.any() and not np.any([own.any(axis=1) for own in env.alive], axis=0)[begun].all():
                    raise TaskError("alive must have an agent in each game that has begun anew")
                if not np.isfinite(scores := result.scores[result.over]).all():
                    raise TaskError(f"the scores of games that are over must be numbers, not {scores}")
                for own, now, *ends in zip(alive, env.alive, result.terminations, result.truncations, strict=True):
                    ended, rule = ends[0] | ends[1], "where a game is over, each agent that was alive must end"
                    if (own & np.where(result.over[:, None], ~ended, ended == now)).any():
                        raise TaskError(f"{rule}; elsewhere it must either end or stay alive: see TeamStep")
            if name in ("reset", "step", "restart"):
                stays = name == "step" and not getattr(env, "restarts", True)  # a game that ends, as it is
                check_masks(env, result.over if stays else None)
            return result

    env.close = partial(close_quietly, type(env).__name__, env.close)  # type: ignore[method-assign]
    for name in ("reset", "step", "scripted_actions", "render", "restart"):
        if hasattr(env, name):
            setattr(env, name, partial(guarded, name, getattr(env, name)))


def make_team_env(
    env_id: str,
    num_games: int,
    env_kwargs: dict[str, Any] | None = None,
    teams: Mapping[str, Any] | None = None,
    symmetric: bool | None = None,
    render: bool = False,
) -> TeamEnv:
    """Makes `num_games` games by name. The module may lie in the working folder.

    - `sumo`, `builds`, `pursuit`: the built-in games, which are short names of `utils.games:Sumo` and so on.
    - `module:Class`: any vectorised game. `Class(num_games, **env_kwargs)` must return a `TeamEnv`, which is checked.
    - `module`: a PettingZoo module with `parallel_env(**env_kwargs)` or `env(**env_kwargs)`; one copy for each game.
      It may have scripted players beside the game (`read_scripted`).

    `teams` (`read_teams`) overrides the teams that the agents' names tell; PettingZoo only. `symmetric` overrides
    the behaviours: one policy for all teams, or one each. `render` asks for pictures of game 0.
    Raises ValueError, one sentence that begins with `env_id`, if there is no such game or no policy here can play it.
    """
    kwargs = env_kwargs or {}
    if env_id in gym.registry:
        raise BadGame(f"{env_id} is a task for one agent: train on it with sac_continuous.py or ppo_continuous.py")
    module, colon, name = BUILT_IN.get(env_id, env_id).partition(":")
    with refusal(f"{env_id} is neither a built-in game ({', '.join(BUILT_IN)}) nor a module that can be imported"):
        found: Any = importlib.import_module(module)
        found = getattr(found, name) if colon else found
    if colon:
        if any(base.__module__.startswith("pettingzoo.") for base in getattr(found, "__mro__", ())):
            raise BadGame(f"{env_id} is a PettingZoo class: give its module alone, with a function parallel_env or env")
        if teams is not None:
            raise BadGame(f"{env_id} takes no --teams: they are for PettingZoo games")
        with refusal(f"{env_id} cannot be made"):
            game = found(num_games, **kwargs)
            if env_id not in BUILT_IN:
                check_team_env(game, num_games)
                guard(game)
            if render:
                check_picture(game.render())
            game.teams = set_behaviors(env_id, tuple(game.teams), symmetric)
        return check_scripted(env_id, game)
    make = getattr(found, "parallel_env", None) or getattr(found, "env", None)
    if make is None:
        takes = "PettingZoo's function parallel_env or env, or is given as module:Class"
        raise BadGame(f"{env_id} takes {takes}, and that module has neither function")
    with refusal(f"{env_id} cannot be made"):
        rendered = {"render_mode": "rgb_array"} if render else {}
        envs = [make(**kwargs | rendered), *(make(**kwargs) for _ in range(num_games - 1))]
        envs = envs if hasattr(found, "parallel_env") else [to_parallel(env) for env in envs]
        if render:
            envs[0].reset(seed=0)
            check_picture(envs[0].render())
        made = make_teams(env_id, envs[0], teams, symmetric)
        if scripted := read_scripted(env_id, found, made):
            trial = PettingZooGames(envs[:1], made, scripted)
            trial.reset(0)
            for t, names in enumerate(trial.scripted_by_team):
                for name in names:
                    trial.scripted_actions(name, t)
        return check_scripted(env_id, PettingZooGames(envs, made, scripted))


def make_games(
    num_games: int,
    env_id: str,
    env_kwargs: str,
    teams: str | None,
    symmetric: str,
    learner_side: str | None,
    render: bool = False,
) -> TeamEnv:
    """`make_team_env` for the flags of a script; exits with one sentence if they are of no use.

    `env_kwargs` and `teams` are JSON, `symmetric` is "auto", "yes" or "no". `learner_side` must be a side or a team.
    """
    kwargs = parse_json("env-kwargs", env_kwargs, '{"actions": "discrete"}')
    example = '{"red": ["a_0"], "blue": ["b_0"]}'
    lists = None if teams is None else parse_json("teams", teams, example)
    for members in (lists or {}).values():
        for agents in members.values() if isinstance(members, dict) and members else [members]:
            if not isinstance(agents, list) or not all(isinstance(agent, str) for agent in agents):
                fail(f"--teams takes lists of names such as {example}, not {teams}")
    try:
        env = make_team_env(env_id, num_games, kwargs, lists, {"yes": True, "no": False}.get(symmetric), render)
    except ValueError as error:
        cannot_be_made(str(error), error.__cause__ or error)
    names = dict.fromkeys([*sides_of(env.teams), *(team.name for team in env.teams)])
    if learner_side not in (None, *names):
        fail(f"--learner-side takes one of {', '.join(names)}, not {learner_side}")
    num_teams = Counter(team.behavior for team in env.teams)
    own = [num_teams[team.behavior] for team in env.teams if learner_side in (team.name, team.side)]
    if own and max(own) == 1:
        fail(f"--learner-side takes a team that shares its policy with another one, and {learner_side} does not")
    return env
