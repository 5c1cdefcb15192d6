"""Three games for self-play, each stepped hundreds at once in NumPy: Sumo, Builds (both symmetric) and Pursuit.

Discs move on a plane under forces that the players choose. Positions, velocities and forces are complex numbers x + iy.
A rotation by 180 degrees is then a minus sign, a length is `abs`, and the inner product of a and b is the real part of
a * conj(b). The unit of length is the first ring's radius in Sumo and half the side of the square in Pursuit. The unit
of time is the second.

    env = Sumo(num_games=256)
    obs_left, obs_right = env.reset(seed=1)
    step = env.step([env.scripted_actions("charge", team=0), env.scripted_actions("centre", team=1)])
"""

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from utils.team_env import Team, TeamStep

DT = 0.1  # seconds per step
BRANCHES: dict[str, tuple[int, ...]] = {"box": (), "discrete": (9,), "multidiscrete": (3, 3)}
# Forces of discrete actions: (i, j) of MultiDiscrete pushes towards (i - 1, j - 1); 3 * i + j of Discrete is the same.
PUSHES = np.array([[complex(x, y) / max(abs(complex(x, y)), 1) for y in (-1, 0, 1)] for x in (-1, 0, 1)]).ravel()

IMAGE_SIZE = 400  # pixels
PIXELS_PER_UNIT = 175
_pixel = (np.arange(IMAGE_SIZE) - (IMAGE_SIZE - 1) / 2) / PIXELS_PER_UNIT
PIXELS = _pixel - 1j * _pixel[:, None]  # position of each pixel's centre on the plane; y points up
FLOOR, OUTSIDE, TIME_BAR = (244, 238, 222), (176, 170, 160), (70, 70, 70)
TEAM_COLOURS = ((214, 73, 51), (44, 101, 176))


def shorten(vectors: np.ndarray) -> np.ndarray:
    """Cuts vectors longer than 1 to length 1, so that a force is no stronger along a diagonal."""
    return vectors / np.maximum(np.abs(vectors), 1)


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1 in the same directions. Zero stays zero."""
    return vectors / np.maximum(np.abs(vectors), 1e-9)


def coordinates(vectors: list[np.ndarray]) -> np.ndarray:
    """The x and y of n complex arrays of one shape, side by side: (*shape, 2 * n)."""
    return np.stack(vectors, axis=-1).view(np.float64)


def within(walls: float, points: np.ndarray) -> np.ndarray:
    """Clips both coordinates of points to [-walls, walls]."""
    return np.clip(points.real, -walls, walls) + 1j * np.clip(points.imag, -walls, walls)


class DiscGame:
    """The common part of the games: forces, motion, restarts, scripted players, pictures.

    A disc accelerates by `acceleration * force - drag * velocity`, so its top speed is `acceleration / drag`. Arrays of
    the state have one row per disc, in the order of the teams and their agents, and one column per game.
    """

    teams: tuple[Team, ...]
    scripted_by_team: tuple[tuple[str, ...], ...]  # scripted players of each team, weakest first
    acceleration: ClassVar[float]  # for a force of length 1
    drag: ClassVar[np.ndarray]  # (num_discs, 1), 1/s
    radius: ClassVar[float]  # of a disc
    max_steps: ClassVar[int] = 100
    render_fps: ClassVar[float] = 1 / DT
    # for a person at the keyboard (`utils/play.py`)
    keys: ClassVar[str] = "arrows or WASD: push"
    team_colours = TEAM_COLOURS

    def __init__(self, num_games: int) -> None:
        self.num_games = num_games
        self.position = np.zeros((len(self.drag), num_games), dtype=np.complex128)
        self.velocity = np.zeros_like(self.position)
        self.time = np.zeros(num_games, dtype=np.int64)  # in steps
        self.alive = [np.ones((num_games, len(team.agents)), dtype=bool) for team in self.teams]
        self.action_masks: list[np.ndarray | None] = [None for _ in self.teams]
        self.restarts = True  # whether a game that ends starts again in the same step

    def time_left(self) -> np.ndarray:
        """Remaining share of the time limit in each game, in [0, 1]."""
        return 1 - self.time / self.max_steps

    def start(self, games: np.ndarray) -> None:
        """Starts new games at these indices."""
        raise NotImplementedError

    def judge(self) -> tuple[np.ndarray, np.ndarray]:
        """Resolves contacts. Returns which games are over (num_games,) and the scores of the teams (2, num_games)."""
        raise NotImplementedError

    def observe(self, games: slice | np.ndarray) -> list[np.ndarray]:
        """Observations of these games, per team (games, team_size, obs_dim) float32, in new arrays."""
        raise NotImplementedError

    def ahead(self) -> np.ndarray:
        """The x-axis of each disc's own frame: vectors of length 1, (num_discs, num_games or 1)."""
        return np.ones((len(self.drag), 1))

    def scripted_forces(self, name: str, team: int) -> np.ndarray:
        """Forces of a scripted player other than random, in its discs' own frames: (team_size, num_games)."""
        raise NotImplementedError

    def floor(self) -> np.ndarray:
        """Share of each pixel that the floor of game 0 covers, in [0, 1]: (IMAGE_SIZE, IMAGE_SIZE)."""
        raise NotImplementedError

    def reset(self, seed: int) -> list[np.ndarray]:
        """Restarts all games. The random player has its own generator, so its actions do not affect the starts."""
        self.start_rng, self.player_rng = np.random.default_rng(seed).spawn(2)
        self.start(np.arange(self.num_games))
        return self.observe(slice(None))

    def restart(self, games: np.ndarray) -> list[np.ndarray]:
        """Starts new games at these indices."""
        self.start(games)
        return self.observe(slice(None))

    def step(self, actions: list[np.ndarray]) -> TeamStep:
        """Steps all games."""
        self.velocity += DT * (self.acceleration * self.forces(actions) - self.drag * self.velocity)
        self.position += DT * self.velocity
        self.time += 1
        over, scores = self.judge()
        scores = np.where(over, scores, 0.0)
        final_obs = self.observe(slice(None))
        obs = [team_obs.copy() for team_obs in final_obs]
        ended = np.flatnonzero(over)
        if self.restarts and len(ended):
            self.start(ended)
            for team_obs, first_obs in zip(obs, self.observe(ended), strict=True):
                team_obs[ended] = first_obs
        won = np.sign(scores[0] - scores[1]).astype(np.float32)  # 1, 0 or -1 for the first team
        sizes = [len(team.agents) for team in self.teams]
        rewards = [np.stack([sign * won] * size, axis=1) for sign, size in zip((1, -1), sizes, strict=True)]
        # At the time limit the game is decided, and players observe the time: so it is a termination, not a truncation.
        terminations = [np.stack([over] * size, axis=1) for size in sizes]
        truncations = [np.zeros_like(termination) for termination in terminations]
        return TeamStep(obs, final_obs, rewards, terminations, truncations, over, scores.T)

    def forces(self, actions: list[np.ndarray]) -> np.ndarray:
        """Forces on the plane for all teams' actions: (num_discs, num_games)."""
        numbers = np.concatenate(actions, axis=1)  # (num_games, num_discs, action_dim)
        branches = self.teams[0].branches
        if branches:
            forces = PUSHES[np.ravel_multi_index(tuple(np.moveaxis(numbers, -1, 0)), branches)]
        else:
            numbers = np.clip(numbers.astype(np.float64), -1, 1)
            forces = shorten(numbers[..., 0] + 1j * numbers[..., 1])
        return self.ahead() * forces.T

    def scripted_actions(self, name: str, team: int) -> np.ndarray:
        """Actions of a scripted player in all games. Discrete actions are those nearest to its forces."""
        if name not in self.scripted_by_team[team]:
            raise ValueError(
                f"{self.teams[team].name} are played by {', '.join(self.scripted_by_team[team])}, not by {name!r}"
            )
        shape, branches = (self.num_games, len(self.teams[team].agents)), self.teams[team].branches
        if name == "random":
            if branches:
                return self.player_rng.integers(branches, size=(*shape, len(branches)))
            return self.player_rng.uniform(-1, 1, size=(*shape, 2)).astype(np.float32)
        return self.nearest_actions(self.scripted_forces(name, team), team)

    def nearest_actions(self, forces: np.ndarray, team: int) -> np.ndarray:
        """Actions of a team for forces (team_size, num_games) in its discs' own frames."""
        branches = self.teams[team].branches
        if branches:
            nearest = np.abs(forces.T[..., None] - PUSHES).argmin(axis=-1)
            return np.stack(np.unravel_index(nearest, branches), axis=-1)
        return coordinates([forces.T]).astype(np.float32)

    def keyboard_actions(self, team: int, direction: tuple[int, int], number: int | None) -> np.ndarray:
        """Actions of a team in all games for a person's keys: pushes along the direction (x, y) of the picture."""
        first = sum(len(other.agents) for other in self.teams[:team])
        own_frames = self.ahead()[first : first + len(self.teams[team].agents)]  # (team_size, num_games or 1)
        force = unit(np.array(complex(*direction)))
        return self.nearest_actions(np.tile(force * own_frames.conj(), self.num_games // own_frames.shape[1]), team)

    def render(self) -> np.ndarray:
        """A picture of game 0 (IMAGE_SIZE, IMAGE_SIZE, 3) uint8: one colour per team, and a bar for the time left."""
        image = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), OUTSIDE, dtype=np.float64)
        discs = iter(self.position[:, 0])
        layers = [(self.floor(), FLOOR)]
        for team, colour in zip(self.teams, TEAM_COLOURS, strict=True):
            layers += [(coverage(self.radius - np.abs(PIXELS - next(discs))), colour) for _ in team.agents]
        bar = np.minimum(2 * self.time_left()[0] - 1 - PIXELS.real, 0.02 - np.abs(PIXELS.imag + 1.08))
        layers.append((coverage(np.minimum(bar, PIXELS.real + 1)), TIME_BAR))
        for part, colour in layers:
            image += part[..., None] * (np.array(colour) - image)
        return image.round().astype(np.uint8)

    def close(self) -> None:
        """Does nothing: the game holds no resources."""


def coverage(depth: np.ndarray) -> np.ndarray:
    """Share of a pixel that a shape covers whose edge is `depth` from the pixel's centre. It makes edges smooth."""
    return np.clip(depth * PIXELS_PER_UNIT + 0.5, 0, 1)


class Sumo(DiscGame):
    """Two discs in a shrinking ring. The first to leave it loses; at the time limit, the one farther from its centre.

    Each player's observations and forces are in its own frame, in which the other disc is on the x-axis. So a policy
    need not learn each direction of the plane again. The distribution of starts does not change when the plane is
    rotated by 180 degrees and the players are swapped. So the game is the same from both sides.
    """

    scripted_by_team: tuple[tuple[str, ...], ...] = (("random", "charge", "centre"),) * 2
    acceleration = 1.75
    drag = np.ones((2, 1))
    # The second disc starts where the first one would after a rotation by 180 degrees.
    sides = np.array([[1.0], [-1.0]])
    radius = 0.15
    last_ring = 0.2  # radius of the ring at the time limit
    stiffness, damping = 8.0, 4.0  # of the scripted player centre: force at distance 1, force at speed 1

    def __init__(self, num_games: int, actions: Literal["box", "discrete", "multidiscrete"] = "box") -> None:
        if actions not in BRANCHES:
            raise ValueError(f"actions must be one of {', '.join(BRANCHES)}, not {actions!r}")
        branches = BRANCHES[actions]
        self.teams = tuple(
            Team(name, "sumo", (f"{name}_0",), 11, len(branches) or 2, branches) for name in ("left", "right")
        )
        super().__init__(num_games)

    def ring(self) -> np.ndarray:
        """Radius of the ring in each game. It shrinks linearly from 1 to `last_ring`."""
        return self.last_ring + (1 - self.last_ring) * self.time_left()

    def start(self, games: np.ndarray) -> None:
        angle, heading = self.start_rng.uniform(0, 2 * np.pi, (2, len(games)))
        distance, speed = self.start_rng.uniform(0.4, 0.7, len(games)), self.start_rng.uniform(0, 0.3, len(games))
        self.position[:, games] = self.sides * (distance * np.exp(1j * angle))
        self.velocity[:, games] = self.sides * (speed * np.exp(1j * heading))
        self.time[games] = 0

    def judge(self) -> tuple[np.ndarray, np.ndarray]:
        self.collide()
        distance = np.abs(self.position)
        # The score also tells who left the ring: a disc outside is farther from the centre than one inside.
        return (distance.max(axis=0) > self.ring()) | (self.time >= self.max_steps), -distance

    def lightness(self, games: np.ndarray) -> np.ndarray:
        """Twice each disc's share of the recoil in these games, (2, games or 1): 1 for equal masses, 0 if immovable."""
        return np.ones((2, 1))

    def collide(self) -> None:
        """Elastic collisions along the line between the centres: discs of equal masses swap their velocities there."""
        gap = np.abs(self.position[1] - self.position[0])
        games = np.flatnonzero(gap < 2 * self.radius)
        normal = unit(self.position[1, games] - self.position[0, games])
        parting_speed = ((self.velocity[1, games] - self.velocity[0, games]) * normal.conj()).real
        recoil = self.sides * self.lightness(games)
        self.velocity[:, games] += recoil * np.minimum(parting_speed, 0) * normal
        # Overlapping discs are moved apart.
        self.position[:, games] -= recoil * (self.radius - gap[games] / 2) * normal

    def ahead(self) -> np.ndarray:
        return self.sides * unit(self.position[1] - self.position[0])

    def observe(self, games: slice | np.ndarray) -> list[np.ndarray]:
        position, velocity, ahead = (x[:, games] for x in (self.position, self.velocity, self.ahead()))  # (2, games)
        vectors = coordinates([x * ahead.conj() for x in (position, velocity, velocity[::-1] - velocity)])
        distance, ring = np.abs(position), np.broadcast_to(self.ring()[games], position.shape)
        gap = np.broadcast_to(np.abs(position[1] - position[0]) - 2 * self.radius, position.shape)
        time_left = np.broadcast_to(self.time_left()[games], position.shape)
        lengths = [gap, ring - distance, ring - distance[::-1], ring, time_left]
        obs = np.concatenate([vectors, np.stack(lengths, axis=-1)], axis=-1, dtype=np.float32)  # (2, games, 11)
        return [obs[0][:, None], obs[1][:, None]]

    def scripted_forces(self, name: str, team: int) -> np.ndarray:
        """Forces: charge pushes towards the other with full force; centre moves to the ring's centre and stays."""
        if name == "charge":
            return np.ones((1, self.num_games), dtype=np.complex128)
        force = -self.stiffness * self.position[team] - self.damping * self.velocity[team]
        return shorten(force * self.ahead()[team].conj())[None]

    def floor(self) -> np.ndarray:
        return coverage(self.ring()[0] - np.abs(PIXELS))


class Builds(Sumo):
    """Sumo in which each disc first picks one of three builds: each is `heft` times as heavy as the next one.

    Build 0 is heavier than 1, 1 than 2, and 2 than 0, so which build is best depends on the opponent's. Both sides pick
    at once, by the action of the first step, in which they cannot push. From then on both observe both builds.
    A Box action picks by its direction, one third of the circle for each build; the last branch of a discrete action
    picks by its number modulo 3.
    """

    heft = 4.0
    keys = "arrows or WASD: push; 1, 2, 3 before a game: build"

    def __init__(self, num_games: int, actions: Literal["box", "discrete", "multidiscrete"] = "box") -> None:
        super().__init__(num_games, actions)
        self.teams = tuple(replace(team, behavior="builds", obs_dim=team.obs_dim + 6) for team in self.teams)
        self.builds = np.full((2, num_games), -1)  # -1: not picked yet

    def start(self, games: np.ndarray) -> None:
        super().start(games)
        self.builds[:, games] = -1

    def forces(self, actions: list[np.ndarray]) -> np.ndarray:
        picks = self.time == 0
        numbers = np.concatenate(actions, axis=1)[picks]  # (num_picking, 2, action_dim)
        if self.teams[0].branches:
            builds = numbers[..., -1].astype(np.int64) % 3
        else:
            angles = np.arctan2(numbers[..., 1].astype(np.float64), numbers[..., 0])
            builds = np.floor(angles / (2 * np.pi / 3) + 0.5).astype(np.int64) % 3
        self.builds[:, picks] = builds.T
        return np.where(picks, 0, super().forces(actions))

    def lightness(self, games: np.ndarray) -> np.ndarray:
        heavier = (self.builds[1, games] - self.builds[0, games]) % 3 == 1  # the first disc
        lighter = (self.builds[0, games] - self.builds[1, games]) % 3 == 1
        first = np.where(heavier, 2 / (1 + self.heft), np.where(lighter, 2 * self.heft / (1 + self.heft), 1.0))
        return np.stack([first, 2 - first])

    def observe(self, games: slice | np.ndarray) -> list[np.ndarray]:
        shown = (self.builds[:, games, None] == np.arange(3)).astype(np.float32)  # (2, games, 3)
        both = np.concatenate([shown, shown[::-1]], axis=-1)[:, :, None]  # own build, then the other's
        return [np.concatenate(parts, axis=-1) for parts in zip(both, super().observe(games), strict=True)]

    def scripted_actions(self, name: str, team: int) -> np.ndarray:
        """Those of Sumo's players; each picks its build at random."""
        actions = super().scripted_actions(name, team)
        if name == "random":
            return actions
        return self.with_builds(actions, self.player_rng.integers(3, size=(self.num_games, 1)), team)

    def with_builds(self, actions: np.ndarray, builds: np.ndarray, team: int) -> np.ndarray:
        """Actions of a team that pick these builds (num_games, 1) in games that have just begun."""
        picked = np.exp(2j * np.pi / 3 * builds)
        numbers = np.full(actions.shape, builds[..., None]) if self.teams[team].branches else coordinates([picked])
        return np.where((self.time == 0)[:, None, None], numbers, actions).astype(actions.dtype)

    def keyboard_actions(self, team: int, direction: tuple[int, int], number: int | None) -> np.ndarray:
        """Those of Sumo. The keys 1, 2 and 3 pick the build with so many dots; without a key it has one."""
        actions = super().keyboard_actions(team, direction, number)
        return self.with_builds(actions, np.full((self.num_games, 1), ((number or 1) - 1) % 3), team)

    def render(self) -> np.ndarray:
        """The picture of Sumo, with one, two or three dots on a disc for its build."""
        image = super().render().astype(np.float64)
        for position, build in zip(self.position[:, 0], self.builds[:, 0], strict=True):
            for dot in range(build + 1):
                centre = position + 0.55 * self.radius * (0 if build == 0 else np.exp(2j * np.pi * dot / (build + 1)))
                image += coverage(0.2 * self.radius - np.abs(PIXELS - centre))[..., None] * (255 - image)
        return image.round().astype(np.uint8)


class Pursuit(DiscGame):
    """Two pursuers and a faster evader in a walled square. The pursuers win by touch, the evader at the time limit.

    At a wall, a disc loses the velocity towards the wall and slides along it. The pursuers do not collide.
    """

    teams = (
        Team("pursuers", "pursuers", ("pursuer_0", "pursuer_1"), 13, 2, ()),
        Team("evader", "evader", ("evader_0",), 13, 2, ()),
    )
    scripted_by_team: tuple[tuple[str, ...], ...] = (("random", "chase"), ("random", "flee"))
    acceleration = 1.5
    drag = np.array([[2.5], [2.5], [1.5]])  # top speeds 0.6 and 1
    radius = 0.08
    walls = 1 - radius  # largest coordinate of a disc's centre
    head_start = 0.6  # smallest distance between a pursuer and the evader at the start

    def start(self, games: np.ndarray) -> None:
        x, y = self.start_rng.uniform(-self.walls, self.walls, (2, 3, len(games)))
        near = np.hypot(x[:2] - x[2], y[:2] - y[2]) < self.head_start
        # A pursuer that is too near is moved by half a side in x and in y; positions wrap around at the walls.
        x[:2] -= np.where(near, np.copysign(self.walls, x[:2]), 0)
        y[:2] -= np.where(near, np.copysign(self.walls, y[:2]), 0)
        self.position[:, games] = x + 1j * y
        self.velocity[:, games] = 0
        self.time[games] = 0

    def judge(self) -> tuple[np.ndarray, np.ndarray]:
        self.velocity.real[np.abs(self.position.real) > self.walls] = 0
        self.velocity.imag[np.abs(self.position.imag) > self.walls] = 0
        self.position = within(self.walls, self.position)
        touch = np.abs(self.position[:2] - self.position[2]).min(axis=0) < 2 * self.radius
        score = np.where(touch, 1.0, -1.0)
        return touch | (self.time >= self.max_steps), np.stack([score, -score])

    def observe(self, games: slice | np.ndarray) -> list[np.ndarray]:
        position, velocity = self.position[:, games], self.velocity[:, games]
        views = []
        for own, *others in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):  # a pursuer sees its partner, then the evader
            relative = [state[other] - state[own] for other in others for state in (position, velocity)]
            views.append(coordinates([position[own], velocity[own], *relative]))
        time_left = np.broadcast_to(self.time_left()[games], position.shape)
        obs = np.concatenate([np.stack(views), time_left[..., None]], axis=-1, dtype=np.float32)  # (3, games, 13)
        return [np.stack([obs[0], obs[1]], axis=1), obs[2][:, None]]

    def scripted_forces(self, name: str, team: int) -> np.ndarray:
        """Forces: chase heads for the evader's future position, flee for the reachable place farthest from pursuers."""
        pursuers, evader = self.position[:2], self.position[2]
        if name == "chase":
            # The pursuer is taken to approach at speed 1, so it needs about `distance` seconds to reach the evader.
            return unit(evader + np.abs(evader - pursuers) * self.velocity[2] - pursuers)
        places = within(self.walls, evader + PUSHES[:, None])  # places within a second of the evader, (9, num_games)
        safety = np.abs(places - pursuers[:, None]).min(axis=0)
        return PUSHES[safety.argmax(axis=0)][None]

    def floor(self) -> np.ndarray:
        return coverage(1 - np.maximum(np.abs(PIXELS.real), np.abs(PIXELS.imag)))
