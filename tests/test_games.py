"""The built-in games: physics against closed forms, rules from states set by hand, symmetry, scripted players."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from utils.games import DT, Builds, DiscGame, Pursuit, Sumo
from utils.team_env import TeamEnv, play_games

VARIANTS: dict[str, Callable[[int], DiscGame]] = {
    "sumo": Sumo,
    "sumo-discrete": lambda num_games: Sumo(num_games, "discrete"),
    "sumo-multidiscrete": lambda num_games: Sumo(num_games, "multidiscrete"),
    "builds": Builds,
    "builds-discrete": lambda num_games: Builds(num_games, "discrete"),
    "builds-multidiscrete": lambda num_games: Builds(num_games, "multidiscrete"),
    "pursuit": Pursuit,
}


@pytest.fixture(params=list(VARIANTS.values()), ids=list(VARIANTS))
def make(request: pytest.FixtureRequest) -> Callable[[int], DiscGame]:
    """Makes so many games of each kind in turn."""
    return request.param


def random_actions(env: DiscGame) -> list[np.ndarray]:
    return [env.scripted_actions("random", team) for team in (0, 1)]


def idle(env: DiscGame) -> list[np.ndarray]:
    """No force, as Box actions."""
    return [np.zeros((env.num_games, len(team.agents), 2), dtype=np.float32) for team in env.teams]


def set_state(env: DiscGame, position: list[complex], velocity: list[complex] | None = None, time: int = 0) -> None:
    """Puts the discs of all games there."""
    env.reset(0)
    env.position[:] = np.array(position)[:, None]
    env.velocity[:] = 0 if velocity is None else np.array(velocity)[:, None]
    env.time[:] = time


def win_rate(env: DiscGame, first: str, second: str, seed: int = 0) -> float:
    """The part of games that the first team's player wins against the second team's; a draw counts half."""
    scores = play_games(env, lambda team, _: env.scripted_actions((first, second)[team], team), seed)
    return float((np.sign(scores[:, 0] - scores[:, 1]) + 1).mean() / 2)


# === All games ========================================================================================================


def test_shapes_and_types(make: Callable[[int], DiscGame]) -> None:
    env = make(5)
    team_env: TeamEnv = env  # the type checker's part of this test
    obs = team_env.reset(1)
    step = env.step(random_actions(env))
    for t, team in enumerate(env.teams):
        shape = (5, len(team.agents))
        assert env.alive[t].all()
        assert env.alive[t].shape == shape
        assert env.action_masks[t] is None
        assert env.scripted_actions("random", t).shape == (*shape, team.action_dim)
        for array in (obs[t], step.obs[t], step.final_obs[t]):
            assert array.shape == (*shape, team.obs_dim)
            assert array.dtype == np.float32
        assert step.rewards[t].shape == step.terminations[t].shape == step.truncations[t].shape == shape
        assert (step.rewards[t].dtype, step.terminations[t].dtype) == (np.float32, bool)
    assert step.scores.shape == (5, 2)
    assert step.scores.dtype == np.float64


def test_an_end_and_the_next_start(make: Callable[[int], DiscGame]) -> None:
    """Where a game ends: rewards, terminations, the next game's first observation; elsewhere none of these."""
    env = make(64)
    env.reset(2)
    num_over = 0
    for _ in range(150):
        step = env.step(random_actions(env))
        over = step.over
        num_over += over.sum()
        sign = np.sign(step.scores[:, 0] - step.scores[:, 1])
        assert (sign != 0).sum() <= over.sum()
        np.testing.assert_array_equal(step.scores[~over], 0)
        for t in (0, 1):
            np.testing.assert_array_equal(
                step.rewards[t], np.repeat((sign, -sign)[t][:, None], len(env.teams[t].agents), 1)
            )
            assert (step.terminations[t] == over[:, None]).all()
            assert not step.truncations[t].any()
            np.testing.assert_array_equal(step.obs[t][~over], step.final_obs[t][~over])
            assert (step.obs[t][over, :, -1] == 1).all()  # time left
            assert (step.final_obs[t][:, :, -1] < 1).all()
        np.testing.assert_array_equal(env.time[over], 0)
    assert num_over > 64
    assert len(np.unique(env.position)) == env.position.size  # new starts, and different ones


def test_seed_determines_everything(make: Callable[[int], DiscGame]) -> None:
    """Two runs are equal, though one asks the scripted players more often; another seed gives another run."""
    runs = []
    for seed, asked in ((3, 1), (3, 2), (4, 1)):
        env, source = make(16), make(16)
        run = [env.reset(seed)]
        source.reset(0)
        for _ in range(120):
            for _ in range(asked):
                random_actions(env)
            run.append(env.step(random_actions(source)).obs)
        runs.append([np.concatenate([obs[t].ravel() for obs in run]) for t in (0, 1)])
    for t in (0, 1):
        np.testing.assert_array_equal(runs[0][t], runs[1][t])
        assert not np.array_equal(runs[0][t], runs[2][t])


def test_later_steps_leave_what_was_returned(make: Callable[[int], DiscGame]) -> None:
    env = make(8)
    first_obs = env.reset(1)
    step = env.step(random_actions(env))
    arrays = [*first_obs, *step.obs, *step.final_obs, step.scores, step.over]
    copies = [array.copy() for array in arrays]
    for _ in range(120):
        env.step(random_actions(env))
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    assert not any(np.shares_memory(a, b) for a, b in zip(step.obs, step.final_obs, strict=True))


@pytest.mark.slow
def test_many_games_are_single_games(make: Callable[[int], DiscGame]) -> None:
    """256 games at once, each against one that is played alone from its state."""
    env = make(256)
    env.reset(6)
    env.restarts = False
    singles = [make(1) for _ in range(256)]
    for i, single in enumerate(singles):
        single.restarts = False
        single.position[:], single.velocity[:] = env.position[:, [i]], env.velocity[:, [i]]
    for _ in range(25):
        actions = random_actions(env)
        many = env.step(actions)
        ones = [single.step([team[[i]] for team in actions]) for i, single in enumerate(singles)]
        np.testing.assert_array_equal(many.over, [one.over[0] for one in ones])
        np.testing.assert_allclose(many.scores, [one.scores[0] for one in ones], rtol=1e-12)
        for t in (0, 1):
            np.testing.assert_allclose(many.obs[t], [one.obs[t][0] for one in ones], rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(many.rewards[t], [one.rewards[t][0] for one in ones])


@pytest.mark.parametrize(
    ("game", "other"), [(Sumo, 1e9 - 0.5j), (Pursuit, 0.4 - 0.5j)]
)  # so far off, Sumo's is ahead for good
def test_motion(game: type[DiscGame], other: complex) -> None:
    """A force from rest: v_n = top (1 - (1 - drag DT)^n), x_n = DT sum v_n, and no force is longer than 1."""
    env = game(4)
    env.reset(0)
    env.restarts = False
    start = np.array([-0.5 - 0.5j, other, 0.4 + 0.4j])[: len(env.drag), None]
    env.position[:], env.velocity[:] = start, 0
    # The forces of the first team in the four games; the last three are of length 1 in the end.
    numbers = np.array([[0.3, -0.4], [0.6, 0.8], [1, 1], [7, 0.5]])
    forces = [0.3 - 0.4j, 0.6 + 0.8j, (1 + 1j) / math.sqrt(2), (1 + 0.5j) / math.sqrt(1.25)]
    actions = idle(env)
    actions[0][:, 0] = numbers
    for n in range(1, 5):
        env.step(actions)
        drag, speeds = float(env.drag[0, 0]), []
        for i in range(1, n + 1):
            speeds.append(env.acceleration / drag * (1 - (1 - drag * DT) ** i))
        np.testing.assert_allclose(env.velocity[0], np.array(forces) * speeds[-1], rtol=1e-6)
        np.testing.assert_allclose(env.position[0] - start[0], np.array(forces) * DT * sum(speeds), rtol=1e-6)
        np.testing.assert_array_equal(env.position[1:], np.repeat(start[1:], 4, axis=1))


def test_render(make: Callable[[int], DiscGame]) -> None:
    """Every disc has its team's colour at its centre, y points up, edges are smooth, the time bar gets shorter."""
    env = make(2)
    set_state(env, [-0.3 + 0.5j, 0.4 - 0.2j, -0.2 - 0.6j][: len(env.drag)])
    image = env.render()
    assert image.shape == (400, 400, 3)
    assert image.dtype == np.uint8

    def colour(point: complex) -> tuple[int, ...]:
        return tuple(image[round(199.5 - 175 * point.imag), round(199.5 + 175 * point.real)])

    colours = [colour(point) for point in env.position[:, 0]]
    team_of = [t for t, team in enumerate(env.teams) for _ in team.agents]
    assert [colours.index(c) for c in colours] == [team_of.index(t) for t in team_of]  # one colour a team
    assert len({*colours, colour(0j), colour(1.1 + 1.1j)}) == 4  # the two teams, the floor and what is outside
    assert (image == colours[0]).all(axis=-1).sum() == pytest.approx(
        team_of.count(0) * math.pi * (env.radius * 175) ** 2, rel=0.15
    )
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 20
    bars = []
    for time in (0, 50, 100):
        env.time[:] = time
        bars.append(int((env.render()[388] < 100).all(axis=-1).sum()))
    assert bars == [350, 175, 0]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: Sumo(1, "continuous"), "actions"),  # type: ignore[arg-type]
        (lambda: Pursuit(1).scripted_actions("flee", 0), "pursuers"),
        (lambda: Pursuit(1).scripted_actions("chase", 1), "evader"),
        (lambda: Sumo(1).scripted_actions("chase", 1), "right"),
    ],
)
def test_bad_names(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()


# === Sumo =============================================================================================================


@pytest.mark.parametrize("actions", ["box", "discrete", "multidiscrete"])
def test_sides_are_one(actions: str) -> None:
    """The game that is turned by 180 degrees, with the players swapped, is the same game to the last bit."""
    env, turned = Sumo(64, actions), Sumo(64, actions)  # type: ignore[arg-type]
    env.reset(1)
    turned.reset(2)
    rng = np.random.default_rng(0)
    env.position += rng.normal(0, 0.1, env.position.shape)  # not symmetric
    env.restarts = turned.restarts = False
    turned.position, turned.velocity = -env.position[::-1], -env.velocity[::-1]
    collisions = 0
    for _ in range(80):
        acts = [env.scripted_actions(name, t) for t, name in enumerate(("random", "charge"))]
        np.testing.assert_array_equal(turned.scripted_actions("charge", 0), acts[1])
        np.testing.assert_array_equal(turned.scripted_actions("centre", 1), env.scripted_actions("centre", 0))
        step, turned_step = env.step(acts), turned.step(acts[::-1])
        collisions += (np.abs(env.position[0] - env.position[1]) < 2 * env.radius + 1e-9).sum()
        for part in ("obs", "rewards"):
            np.testing.assert_array_equal(getattr(turned_step, part)[0], getattr(step, part)[1])
            np.testing.assert_array_equal(getattr(turned_step, part)[1], getattr(step, part)[0])
        np.testing.assert_array_equal(turned_step.scores, step.scores[:, ::-1])
    assert collisions > 100


def test_start_favours_no_side() -> None:
    env = Sumo(1000)
    obs = env.reset(1)
    np.testing.assert_array_equal(obs[0], obs[1])
    position = env.position[0]
    assert np.abs(np.mean(position / np.abs(position))) < 0.1  # every direction
    assert np.abs(position).min() > 2 * env.radius
    assert np.abs(position).max() < 0.75
    assert 0.2 < np.abs(env.velocity).max() < 0.35
    assert win_rate(env, "random", "random") == pytest.approx(0.5, abs=0.05)


def test_observation_of_the_right_player() -> None:
    """Recomputed in plain numbers: what lies ahead, towards the other, and what lies to the left of that."""
    env = Sumo(1)
    set_state(env, [0.3 + 0.1j, -0.2 + 0.4j], [0.5 + 0j, 0.1 - 0.7j], time=50)
    ring = 1 - 0.8 * 0.5
    to_other, own, other = math.hypot(0.5, 0.3), math.hypot(0.2, 0.4), math.hypot(0.3, 0.1)
    axes = np.array([[0.5, -0.3], [0.3, 0.5]]) / to_other
    position, velocity, velocity_to_other = (
        axes @ np.array(vector) for vector in ([-0.2, 0.4], [0.1, -0.7], [0.4, 0.7])
    )
    expected = [*position, *velocity, *velocity_to_other, to_other - 0.3, ring - own, ring - other, ring, 0.5]
    np.testing.assert_allclose(env.observe(slice(None))[1][0, 0], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("actions", ["box", "discrete", "multidiscrete"])
def test_no_direction_is_another(actions: str) -> None:
    """A game that is turned by any angle looks the same to both players, and goes on the same."""
    env, turned = Sumo(64, actions), Sumo(64, actions)  # type: ignore[arg-type]
    env.reset(1)
    turned.reset(2)
    env.position += np.random.default_rng(0).normal(0, 0.1, env.position.shape)
    env.restarts = turned.restarts = False
    turn = np.exp(1j * np.linspace(0, 6, 64))
    turned.position, turned.velocity = turn * env.position, turn * env.velocity
    for _ in range(20):
        acts = [env.scripted_actions(name, t) for t, name in enumerate(("random", "centre"))]
        np.testing.assert_allclose(turned.scripted_actions("centre", 1), acts[1], rtol=1e-5, atol=1e-5)
        step, turned_step = env.step(acts), turned.step(acts)
        np.testing.assert_allclose(turned.position, turn * env.position, rtol=1e-9, atol=1e-12)
        for t in (0, 1):
            np.testing.assert_allclose(turned_step.obs[t], step.obs[t], rtol=1e-5, atol=1e-5)


def test_collisions() -> None:
    """v1' = v1 - ((v1 - v2) . d) d / |d|^2 with d = x1 - x2, and v2' likewise, where discs meet; others keep theirs."""
    env = Sumo(500)
    env.reset(0)
    rng = np.random.default_rng(1)
    x1, v1, v2 = rng.normal(size=(3, 500, 2))
    angle, gap = rng.uniform(0, 2 * np.pi, 500), rng.uniform(0.1, 0.5, 500)
    x2 = x1 + gap[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    env.position = np.stack([x1[:, 0] + 1j * x1[:, 1], x2[:, 0] + 1j * x2[:, 1]])
    env.velocity = np.stack([v1[:, 0] + 1j * v1[:, 1], v2[:, 0] + 1j * v2[:, 1]])
    env.collide()
    meets, hits = gap < 0.3, 0
    for i in range(500):
        d, w1, w2 = x1[i] - x2[i], v1[i], v2[i]
        if meets[i] and (v1[i] - v2[i]) @ d < 0:
            hits += 1
            w1 = v1[i] - ((v1[i] - v2[i]) @ d) / (d @ d) * d
            w2 = v2[i] + ((v1[i] - v2[i]) @ d) / (d @ d) * d
        np.testing.assert_allclose(env.velocity[:, i], [complex(*w1), complex(*w2)], rtol=1e-9, atol=1e-12)
    assert 50 < hits < 450
    momentum, energy = env.velocity.sum(axis=0), (np.abs(env.velocity) ** 2).sum(axis=0)
    np.testing.assert_allclose(momentum.real, (v1 + v2)[:, 0], atol=1e-12)
    np.testing.assert_allclose(energy, (v1**2 + v2**2).sum(axis=1))
    # Overlapping discs touch afterwards, their middle where it was, in line as they were.
    np.testing.assert_allclose(np.abs(env.position[1] - env.position[0]), np.maximum(gap, 0.3))
    np.testing.assert_allclose(env.position.sum(axis=0).real, (x1 + x2)[:, 0], atol=1e-12)
    np.testing.assert_allclose(np.exp(1j * np.angle(env.position[1] - env.position[0])), np.exp(1j * angle))


def test_a_collision_in_play_hands_over_the_momentum() -> None:
    """A run-up against a disc at rest: the runner stops, and the other flies on, but for drag."""
    env = Sumo(1)
    set_state(env, [-0.35 + 0j, 0j], [1 + 0j, 0j])
    env.step(idle(env))
    np.testing.assert_allclose(env.velocity[:, 0], [0, 0.9], atol=1e-12)


@pytest.mark.parametrize(
    ("position", "time", "rewards"),
    [
        ([0.9, 0.5], 0, None),  # both inside
        ([1.1, 0.5], 0, (-1, 1)),
        ([0.5, -1.1j], 0, (1, -1)),
        ([1.1, -1.2], 0, (1, -1)),  # both out in the same step
        ([-1.3j, 1.1j], 0, (-1, 1)),
        ([1.1j, -1.1j], 0, (0, 0)),
        ([0.7, 0.1], 30, None),  # the ring is 0.752
        ([0.8, 0.1], 30, (-1, 1)),
        ([0.19, -0.15], 98, None),  # the last step but one
        ([0.19, -0.15], 99, (-1, 1)),  # the time limit
        ([-0.15j, 0.18j], 99, (1, -1)),
        ([0.16, -0.16], 99, (0, 0)),
    ],
)
def test_who_wins_sumo(position: list[complex], time: int, rewards: tuple[int, int] | None) -> None:
    env = Sumo(2)
    set_state(env, position, time=time)
    step = env.step(idle(env))
    assert step.over.tolist() == [rewards is not None] * 2
    assert (step.rewards[0][0, 0], step.rewards[1][0, 0]) == (rewards or (0, 0))
    if rewards is not None:
        assert np.sign(step.scores[0, 0] - step.scores[0, 1]) == rewards[0]


def test_discrete_actions_are_pushes() -> None:
    """Nine pushes: (i - 1, j - 1) and its length cut to 1, in all three forms, for either side."""
    box, discrete, multidiscrete = Sumo(9), Sumo(9, "discrete"), Sumo(9, "multidiscrete")
    pairs = np.array([(i, j) for i in range(3) for j in range(3)])
    actions = [pairs[:, None], pairs[::-1, None]]
    for env in (box, discrete, multidiscrete):
        env.reset(1)
    box.step([(pair - 1).astype(np.float32) for pair in actions])
    multidiscrete.step(actions)
    discrete.step([3 * pair[..., :1] + pair[..., 1:] for pair in actions])
    for env in (discrete, multidiscrete):
        np.testing.assert_allclose(env.velocity, box.velocity, rtol=1e-12)
    # From rest, all right players push towards (1, 0) as they see it: straight at the other, whichever way that is.
    set_state(discrete, [0.5j, -0.5j])
    discrete.step([np.full((9, 1, 1), 4), np.full((9, 1, 1), 7)])
    np.testing.assert_allclose(
        discrete.velocity, np.array([[0], [1j * DT * Sumo.acceleration]]).repeat(9, axis=1), atol=1e-12
    )


def test_discrete_players_push_where_the_others_do() -> None:
    """Charge pushes straight ahead; centre's nearest of eight directions is less than 22.5 degrees off, or it rests."""
    env, discrete = Sumo(500), Sumo(500, "discrete")
    env.reset(1)
    discrete.reset(1)
    for team in (0, 1):
        assert (env.scripted_actions("charge", team) == [1, 0]).all()
        assert (discrete.scripted_actions("charge", team) == 7).all()
    angles = np.random.default_rng(0).uniform(0, 2 * np.pi, (2, 500))
    for game in (env, discrete):
        game.position = np.array([[0.3], [0.9]]) * np.exp(1j * angles)  # the centre on any side of the first player
    wanted = env.scripted_actions("centre", 0)[:, 0]
    action = discrete.scripted_actions("centre", 0)[:, 0, 0]
    push = (
        np.stack([action // 3 - 1, action % 3 - 1], axis=1) / np.sqrt(np.maximum(1, (action % 2 == 0) + 1.0))[:, None]
    )
    is_strong = np.linalg.norm(wanted, axis=1) > 0.999
    assert (wanted * push).sum(axis=1)[is_strong].min() > math.cos(math.radians(22.6))
    assert len(np.unique(action[is_strong])) == 8
    set_state(discrete, [0.001, 0.5])
    assert (discrete.scripted_actions("centre", 0) == 4).all()


def test_random_players_use_all_actions() -> None:
    box = Sumo(5000)
    box.reset(0)
    actions = box.scripted_actions("random", 0)
    assert actions.mean() == pytest.approx(0, abs=0.03)
    assert actions.std() == pytest.approx(1 / math.sqrt(3), abs=0.02)
    for form, num_actions in (("discrete", 9), ("multidiscrete", 3)):
        env = Sumo(5000, form)  # type: ignore[arg-type]
        env.reset(0)
        counts = np.bincount(env.scripted_actions("random", 1).ravel(), minlength=num_actions)
        np.testing.assert_allclose(counts / counts.sum(), 1 / num_actions, atol=0.03)


@pytest.mark.parametrize(
    ("actions", "better", "worse", "low", "high"),
    [
        ("box", "charge", "random", 0.9, 1),
        ("box", "centre", "random", 0.98, 1),
        ("box", "centre", "charge", 0.9, 1),
        ("discrete", "charge", "random", 0.85, 1),
        ("discrete", "centre", "random", 0.98, 1),
        ("discrete", "centre", "charge", 0.6, 0.85),
        ("multidiscrete", "centre", "charge", 0.6, 0.85),
    ],
)
def test_rungs_of_sumo(actions: str, better: str, worse: str, low: float, high: float) -> None:
    """Each scripted player beats those before it, from either side."""
    env = Sumo(500, actions)  # type: ignore[arg-type]
    assert env.scripted_by_team[0].index(better) > env.scripted_by_team[0].index(worse)
    assert low <= win_rate(env, better, worse) <= high
    assert low <= 1 - win_rate(env, worse, better, seed=1) <= high


# === Builds ===========================================================================================================


def pick(env: Builds, builds: tuple[int, int]) -> None:
    """Both sides pick these builds in all games."""
    angles = [2 * math.pi / 3 * build for build in builds]
    env.step([np.full((env.num_games, 1, 2), (math.cos(a), math.sin(a)), dtype=np.float32) for a in angles])


def test_builds_are_picked_by_the_first_action() -> None:
    """It does not push; both builds are seen from then on, by both sides; later actions pick nothing."""
    directions = np.array([[1, 0], [0.5, 0.8], [0.5, -0.8], [-0.4, 0.9], [-1, 0.1], [-0.4, -0.9]], dtype=np.float32)
    numbers = {"box": directions, "discrete": np.array([[0], [3], [6], [1], [8], [5]])}
    numbers["multidiscrete"] = np.array([[0, 0], [1, 0], [2, 0], [1, 1], [0, 2], [2, 2]])
    expected = {"box": [0, 0, 0, 1, 1, 2], "discrete": [0, 0, 0, 1, 2, 2], "multidiscrete": [0, 0, 0, 1, 2, 2]}
    for actions, rows in numbers.items():
        env, still = Builds(6, actions), Sumo(6)  # type: ignore[arg-type]
        assert not env.reset(1)[0][:, :, :6].any()
        still.reset(1)
        step = env.step([rows[:, None], rows[::-1, None]])
        still.step(idle(still))
        np.testing.assert_array_equal(env.position, still.position)
        builds = np.array(expected[actions])
        for obs, own, other in ((step.obs[0], builds, builds[::-1]), (step.obs[1], builds[::-1], builds)):
            np.testing.assert_array_equal(obs[:, 0, :6], np.concatenate([np.eye(3)[own], np.eye(3)[other]], axis=1))
        env.step([rows[::-1, None], rows[:, None]])
        np.testing.assert_array_equal(env.builds[0], builds)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 2), (2, 0), (1, 0), (2, 2)])
def test_collisions_of_builds(first: int, second: int) -> None:
    """v1' = ((m1 - m2) v1 + 2 m2 v2) / (m1 + m2) for the heavier build's mass `heft`, and 1 for the other."""
    heavier = {(0, 1), (1, 2), (2, 0)}
    masses = [Builds.heft if pair in heavier else 1.0 for pair in ((first, second), (second, first))]
    env = Builds(1)
    env.reset(0)
    pick(env, (first, second))
    set_position, speeds = [-0.1 + 0j, 0.1 + 0j], [0.5, -0.3]
    env.position[:, 0], env.velocity[:, 0] = set_position, speeds
    env.collide()
    total = sum(masses)
    expected = [
        ((masses[0] - masses[1]) * speeds[0] + 2 * masses[1] * speeds[1]) / total,
        ((masses[1] - masses[0]) * speeds[1] + 2 * masses[0] * speeds[0]) / total,
    ]
    np.testing.assert_allclose(env.velocity[:, 0], expected, rtol=1e-12)
    moved = env.position[:, 0].real - np.array(set_position).real
    np.testing.assert_allclose(moved[1] - moved[0], 2 * env.radius - 0.2, rtol=1e-12)  # they touch
    np.testing.assert_allclose(moved @ np.array(masses), 0, atol=1e-12)  # the centre of mass stays


def test_builds_go_in_a_circle() -> None:
    """Between two players of the same skill the build decides; among skills, the better one wins with equal builds."""
    env = Builds(300)
    rates = {}
    for builds in ((0, 1), (1, 2), (2, 0), (1, 0)):

        def play(team: int, _: object, builds: tuple[int, int] = builds) -> np.ndarray:
            actions, angle = env.scripted_actions("centre", team), 2 * math.pi / 3 * builds[team]
            return np.where((env.time == 0)[:, None, None], [math.cos(angle), math.sin(angle)], actions)

        scores = play_games(env, play, 0)
        rates[builds] = float((scores[:, 0] > scores[:, 1]).mean())
    assert min(rates[0, 1], rates[1, 2], rates[2, 0]) > 0.9
    assert rates[1, 0] < 0.1
    assert win_rate(env, "centre", "random") > 0.9


def test_builds_can_be_seen() -> None:
    """A disc shows one dot more than its build's number."""
    env, white = Builds(1), []
    for build in range(3):
        env.reset(0)
        pick(env, (build, 0))
        env.position[:, 0] = [-0.4, 0.4]
        left = env.render()[:, :200]
        white.append(int((left == 255).all(axis=-1).sum()))
    np.testing.assert_allclose(np.array(white) / white[0], [1, 2, 3], rtol=0.15)


# === Pursuit ==========================================================================================================


def test_start_of_pursuit() -> None:
    """Discs are within the walls, anywhere, and no pursuer is near the evader."""
    env = Pursuit(5000)
    env.reset(1)
    assert np.abs(env.position.real).max() <= 0.92
    assert np.abs(env.position.imag).max() <= 0.92
    assert np.abs(env.position[:2] - env.position[2]).min() >= 0.6
    assert (env.velocity == 0).all()
    for disc in env.position:
        quadrants = np.bincount((disc.real > 0) + 2 * (disc.imag > 0))
        np.testing.assert_allclose(quadrants / 5000, 0.25, atol=0.03)


@pytest.mark.parametrize(
    ("position", "time", "pursuers_reward"),
    [
        ([0.5, -0.5, 0.15 + 0j], 0, 0),
        ([0.5, -0.5, 0.33 + 0j], 0, 0),  # 0.17 apart
        ([0.5, -0.5, 0.35 + 0j], 0, 1),  # 0.15 apart
        ([0.5, -0.5, -0.5 - 0.15j], 0, 1),  # by the other pursuer
        ([0.5, 0.5, -0.5 + 0j], 10, 0),  # pursuers may touch
        ([0.5, -0.5, 0.15 + 0j], 98, 0),
        ([0.5, -0.5, 0.15 + 0j], 99, -1),
        ([0.5, -0.5, 0.35 + 0j], 99, 1),  # in the last step
    ],
)
def test_who_wins_pursuit(position: list[complex], time: int, pursuers_reward: int) -> None:
    env = Pursuit(1)
    set_state(env, position, time=time)
    step = env.step(idle(env))
    assert step.over[0] == (pursuers_reward != 0)
    assert step.rewards[0].tolist() == [[pursuers_reward] * 2]
    assert step.rewards[1].tolist() == [[-pursuers_reward]]
    assert np.sign(step.scores[0, 0] - step.scores[0, 1]) == pursuers_reward


def test_walls_and_top_speeds() -> None:
    """Discs never leave the square, slide along its walls, and an evader reaches 1, a pursuer 0.6."""
    env = Pursuit(1)
    set_state(env, [-0.9 - 0.5j, -0.9 + 0.5j, -0.9 + 0j])
    env.restarts = False
    right = [np.full((1, 2, 2), [1.0, 0.0]), np.full((1, 1, 2), [1.0, 0.0])]
    top = np.zeros(3)
    for _ in range(60):
        env.step(right)
        top = np.maximum(top, np.abs(env.velocity[:, 0]))
    assert 0.55 < top[0] <= 0.6
    assert top[1] == top[0]
    assert 0.9 < top[2] <= 1
    np.testing.assert_allclose(env.position[:, 0], [0.92 - 0.5j, 0.92 + 0.5j, 0.92])
    np.testing.assert_array_equal(env.velocity.real, 0)
    for _ in range(60):
        env.step([np.full((1, 2, 2), 0.7), np.full((1, 1, 2), 0.7)])
        assert np.abs(env.position.imag).max() <= 0.92
    np.testing.assert_allclose(env.position[2, 0], 0.92 + 0.92j)
    np.testing.assert_array_equal(env.velocity, 0)


def test_observations_of_pursuit() -> None:
    """Recomputed in plain numbers: own position and velocity, relative ones of the others, the time left."""
    env = Pursuit(1)
    set_state(env, [0.1 + 0.2j, -0.3 + 0.4j, 0.5 - 0.6j], [0.1 + 0j, 0.2j, -0.3 + 0.1j], time=25)
    pursuers, evader = env.observe(slice(None))
    second = [-0.3, 0.4, 0, 0.2, 0.4, -0.2, 0.1, -0.2, 0.8, -1.0, -0.3, -0.1, 0.75]
    np.testing.assert_allclose(pursuers[0, 1], second, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        pursuers[0, 0, 4:], [-0.4, 0.2, -0.1, 0.2, 0.4, -0.8, -0.4, 0.1, 0.75], rtol=1e-6, atol=1e-7
    )
    np.testing.assert_allclose(evader[0, 0, :6], [0.5, -0.6, -0.3, 0.1, -0.4, 0.8], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(evader[0, 0, 6:], [0.4, -0.1, -0.8, 1.0, 0.3, 0.1, 0.75], rtol=1e-6, atol=1e-7)


def test_scripted_players_of_pursuit() -> None:
    """Chase makes for the evader, ahead of one that moves; flee leaves by the side that is free."""
    env = Pursuit(1)
    set_state(env, [-0.5, 0.5j, 0j])
    np.testing.assert_allclose(env.scripted_actions("chase", 0)[0], [[1, 0], [0, -1]], atol=1e-7)
    env.velocity[2] = 0.5j
    assert env.scripted_actions("chase", 0)[0, 0, 1] > 0.2
    flight = env.scripted_actions("flee", 1)[0, 0]
    assert flight[0] > 0
    assert flight[1] < 0


@pytest.mark.parametrize(
    ("pursuers", "evader", "low", "high"),
    [
        ("random", "random", 0.02, 0.25),
        ("chase", "random", 0.98, 1),
        ("random", "flee", 0, 0.02),
        ("chase", "flee", 0.45, 0.75),
    ],
)
def test_rates_of_pursuit(pursuers: str, evader: str, low: float, high: float) -> None:
    """Each role's player does better than random, and the two are about even."""
    assert low <= win_rate(Pursuit(500), pursuers, evader) <= high
