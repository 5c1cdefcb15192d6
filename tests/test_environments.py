"""What is stored is what happened: final observations, terminations, no resets, under every autoreset mode."""

import itertools
import multiprocessing
import signal
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import Train, load_file
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_envs import LENGTH, Counting, Nested, make_vector

import ppo_continuous
import sac_continuous
from utils.errors import TaskError
from utils.run import LeanVectorEnv, TaskEnv, TaskEnvs, catch_signals

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED]


def expected_transitions(num_steps: int) -> list[tuple[float, ...]]:
    """(episode, step, reward, next episode, next step, termination) of a Counting environment, from its description."""
    transitions: list[tuple[float, ...]] = []
    episode = step = 0
    for _ in range(num_steps):
        end = step + 1 == LENGTH
        transitions.append((episode, step, 10 * episode + step + 1, episode, step + 1, float(end and episode % 2 == 0)))
        episode, step = (episode + 1, 0) if end else (episode, step + 1)
    return transitions


def test_tasks_may_write_into_the_array_that_they_returned(script: ModuleType, tmp_path: Path) -> None:
    """The last observation of an episode is not that of the reset: one after another, in processes, copied alone."""
    path = tmp_path / f"{script.__name__}.py"
    path.write_text(Path(script.__file__ or "").read_text())
    found = []
    for module, vectorization in itertools.product((script, load_file(path, "copied_alone")), ("sync", "async")):
        envs = module.make_envs(module.Args(env_id="toy_envs:Reusing-v0", vectorization=vectorization), 3)
        envs.reset(seed=1)
        found.append([np.array(x) for _ in range(20) for x in script.step_envs(envs, np.zeros((3, 1)))])
        envs.close()
    ends = [final_obs[dones] for _, final_obs, _, _, dones in zip(*[iter(found[0])] * 5, strict=True)]
    assert np.concatenate(ends)[:, 1].min() >= 2
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_task_in_its_own_process_draws_by_the_seed(script: ModuleType) -> None:
    """From the streams of NumPy and PyTorch, which a process has of its own: each environment other numbers.

    Those of PyTorch are not the ones that a policy with the same seed draws as its noise.
    """
    found = []
    for _ in range(2):
        envs = script.make_envs(script.Args(env_id="toy_envs:Drawing-v0", vectorization="async"), 2)
        envs.reset(seed=3)
        first, *_ = script.step_envs(envs, np.zeros((2, 1)))
        envs.reset(seed=3)
        again, *_ = script.step_envs(envs, np.zeros((2, 1)))
        envs.close()
        np.testing.assert_array_equal(first, again)
        found.append(first)
    np.testing.assert_array_equal(*found)
    assert (found[0][0] != found[0][1]).all()
    assert (found[0][:, 1] != torch.rand((), generator=torch.Generator().manual_seed(3)).numpy()).all()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_evaluation_starts_no_processes(script: ModuleType, vectorization: Any) -> None:
    """The environments that `--evaluate` reads the spaces from would never be closed."""
    args = script.Args(env_id="toy_envs:Counting-v0", vectorization=vectorization, evaluate=Path())
    assert isinstance(script.make_envs(args, 1).unwrapped, LeanVectorEnv)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (0, np.zeros((2, 1)), r"TypeError: the observations of step must be a NumPy array \(2, 2\) of numbers"),
        (1, 1.0, r"rewards of step must be a NumPy array \(2,\) of numbers, not float"),
        (1, np.zeros((2, 1)), r"rewards of step must be a NumPy array \(2,\) of numbers, not float64 \(2, 1\)"),
        (2, np.ones(2, np.int64), r"terminations of step must be a NumPy array \(2,\) of bools, not int64 \(2,\)"),
        (3, np.zeros(2), "truncations of step must be a NumPy array"),
        (4, {}, "the infos of step must have final_obs, an array of observations"),
        (4, {"final_obs": [[0.0, 1.0]] * 2}, "the infos of step must have final_obs, an array of observations"),
        (4, {"final_obs": np.zeros((2, 3))}, r"must have final_obs, an array of observations \(2,\), at ends"),
    ],
)
def test_what_native_environments_return_is_checked(name: int, value: Any, message: str) -> None:
    """NumPy would repeat a number for all environments, and take whole numbers for indices."""
    envs = TaskEnvs(partial(make_vector, MODES[0], 2), "Counting", copies=True)
    envs.reset(seed=0)
    step = envs.env.step
    broken: Any = envs.env
    broken.step = lambda actions: tuple(value if i == name else x for i, x in enumerate(step(actions)))
    actions = np.zeros((2, 1), dtype=np.float32)
    for _ in range(LENGTH - 1 if name == 4 else 0):
        envs.step(actions)
    with pytest.raises(TaskError, match=message):
        envs.step(actions)


def test_what_native_environments_begin_with_is_checked() -> None:
    """As what they return later."""
    envs = TaskEnvs(partial(make_vector, MODES[0], 2), "Counting", copies=True)
    broken: Any = envs.env
    broken.reset = lambda **_: (np.zeros((2, 3)), {})
    with pytest.raises(TaskError, match=r"reset must return observations \(2, 2\), not \(2, 3\)"):
        envs.reset(seed=0)


@pytest.mark.parametrize("mode", MODES)
def test_native_environments_may_reuse_their_arrays(mode: AutoresetMode) -> None:
    """What a step returns is not changed by the next one: else a replay buffer would hold s' in the place of s."""
    envs = TaskEnvs(partial(SyncVectorEnv, [Counting] * 2, copy=False, autoreset_mode=mode), "Counting", copies=True)
    obs, _ = envs.reset(seed=0)
    for step in range(LENGTH + 1):
        before, (next_obs, *_) = obs.copy(), envs.step(np.zeros((2, 1), dtype=np.float32))
        np.testing.assert_array_equal(obs, before, err_msg=f"step {step}")
        obs = next_obs


def test_native_environments_may_clear_their_arrays_in_a_reset() -> None:
    """What a step returns is not changed by the reset of the episodes that it has ended."""
    envs = TaskEnvs(partial(make_vector, MODES[1], 2), "Counting", copies=True)
    envs.reset(seed=0)
    own: Any = envs.env
    step, reset, arrays = own.step, own.reset, list[np.ndarray]()

    def keep(actions: np.ndarray) -> Any:
        arrays[:] = (result := step(actions))[1:4]
        return result

    def clear(**options: Any) -> Any:
        for array in arrays:
            array[:] = 0
        return reset(**options)

    own.step, own.reset = keep, clear
    for i in range(LENGTH):
        _, rewards, terminations, _, _ = envs.step(np.zeros((2, 1), dtype=np.float32))
        assert rewards.tolist() == [i + 1.0] * 2
        assert terminations.tolist() == [i + 1 == LENGTH] * 2


class Panic(BaseException):
    """As code in other languages raises it."""


@pytest.mark.parametrize("fault", [SystemExit(0), Panic("index out of bounds"), ValueError("no")])
def test_faults_of_native_environments_are_told(fault: BaseException) -> None:
    """Also those that would end the program in silence."""
    envs = TaskEnvs(partial(make_vector, MODES[0], 2), "Counting", copies=False)
    envs.reset(seed=0)
    broken: Any = envs.env
    broken.step = broken.reset = Mock(side_effect=fault)
    with pytest.raises(TaskError, match=type(fault).__name__):
        envs.step(np.zeros((2, 1), dtype=np.float32))
    with pytest.raises(TaskError, match=type(fault).__name__):
        envs.reset(seed=0)


def report_signals(queue: Any) -> None:
    """What a training's process does before its first step: it catches signals, and makes environments."""
    catch_signals()
    TaskEnv(Counting, 0)
    queue.put([signal.getsignal(signum) == signal.SIG_IGN for signum in (signal.SIGINT, signal.SIGTERM)])


def test_a_training_in_a_process_of_multiprocessing_heeds_signals() -> None:
    """Only processes of environments ignore them."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=report_signals, args=(queue,), daemon=True)
    process.start()
    assert queue.get(timeout=60) == [False, False]
    process.join(60)


@pytest.mark.parametrize("mode", MODES)
def test_step_envs(script: ModuleType, mode: AutoresetMode) -> None:
    """The observation to act on and the final observation, over an episode's end."""
    envs = TaskEnvs(partial(make_vector, mode, 2), "Counting", copies=False)
    obs, _ = envs.reset(seed=0)
    for step in range(1, LENGTH + 1):
        obs, final_obs, _, terminations, truncations = script.step_envs(envs, np.zeros((2, 1), dtype=np.float32))
        np.testing.assert_array_equal(final_obs, [[0, step]] * 2)
    assert terminations.all()
    assert not truncations.any()
    np.testing.assert_array_equal(obs, [[1, 0]] * 2)
    obs, *_ = script.step_envs(envs, np.zeros((2, 1), dtype=np.float32))
    np.testing.assert_array_equal(obs, [[1, 1]] * 2)


@pytest.mark.parametrize("env_id", ["toy_envs:Counting-v0", "toy_envs:Drawing-v0", "Hopper-v5"])
def test_lean_vector_environment_is_gymnasiums(env_id: str) -> None:
    """Everything that it returns over several episodes, which end together or apart, and in either way."""
    args = ppo_continuous.Args(env_id=env_id)
    lean = ppo_continuous.make_envs(args, 4)
    assert isinstance(lean.unwrapped, LeanVectorEnv)
    env_fns = [partial(ppo_continuous.make_env, args)] * 4
    plain = SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)
    arrays: list[list[np.ndarray]] = []
    for envs in (lean, plain):
        np.random.seed(1), torch.manual_seed(1)
        rng, returned = np.random.default_rng(1), [envs.reset(seed=1)[0]]
        for _ in range(100):
            *values, infos = envs.step(rng.uniform(-1, 1, envs.action_space.shape).astype(np.float32))
            dones = values[2] | values[3]
            returned += [*values, *([np.stack(infos["final_obs"][dones])] if dones.any() else [])]
        arrays.append(returned)
    assert len(arrays[0]) >= 1 + 4 * 100 + 10
    for ours, theirs in zip(*arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("mode", MODES)
def test_sac_stores_every_transition_and_nothing_else(
    train: Train, monkeypatch: pytest.MonkeyPatch, mode: AutoresetMode
) -> None:
    """Trains on two Counting environments, and reads the replay buffer."""
    buffers: list[sac_continuous.ReplayBuffer] = []
    taken: list[np.ndarray] = []
    step_envs = sac_continuous.step_envs

    def spy(envs: Any, actions: np.ndarray) -> Any:
        taken.append(actions.copy())
        return step_envs(envs, actions)

    monkeypatch.setattr(sac_continuous, "step_envs", spy)

    class Spy(sac_continuous.ReplayBuffer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            buffers.append(self)

    monkeypatch.setattr(sac_continuous, "ReplayBuffer", Spy)
    env_id = f"toy_envs:Counting{mode.value}-v0"
    train(sac_continuous, env_id=env_id, vectorization="native", num_envs=2, buffer_size=1000, norm_obs=True)
    rows = buffers[0].data[: buffers[0].total].numpy()
    stored = sorted(map(tuple, rows[:, [0, 1, 3, 4, 5, 6]].tolist()))  # all but the action
    assert stored == sorted(2 * expected_transitions(120))
    np.testing.assert_array_equal(rows[:, 2:3], np.concatenate(taken[:120]))


@pytest.mark.parametrize("mode", MODES)
def test_ppo_learns_from_every_transition_and_nothing_else(
    train: Train, monkeypatch: pytest.MonkeyPatch, mode: AutoresetMode
) -> None:
    """Trains with a critic whose value encodes the observation, and reads what reaches GAE and the update."""
    code = lambda obs: obs[..., :1] * 100 + obs[..., 1:]  # noqa: E731
    make_mlp, compute_gae, update = ppo_continuous.mlp, ppo_continuous.compute_gae, ppo_continuous.update
    rollouts: list[dict[str, torch.Tensor]] = []
    minibatch_obs: list[torch.Tensor] = []

    class SpellOut(torch.nn.Module):
        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return code(obs)

    def spy_gae(*args: Any) -> torch.Tensor:
        names = ("rewards", "values", "next_values", "terminations", "dones")
        rollouts.append({name: x.clone() for name, x in zip(names, args, strict=False)})
        return compute_gae(*args)

    def spy_update(agent: Any, optimizer: Any, minibatch: Any, *rest: Any) -> Any:
        minibatch_obs.append(minibatch[0].clone())
        return update(agent, optimizer, minibatch, *rest)

    def spy_mlp(*sizes: int, output_gain: float) -> torch.nn.Module:
        return make_mlp(*sizes, output_gain=output_gain) if output_gain < 1 else SpellOut()  # actor, critic

    monkeypatch.setattr(ppo_continuous, "mlp", spy_mlp)
    monkeypatch.setattr(ppo_continuous, "compute_gae", spy_gae)
    monkeypatch.setattr(ppo_continuous, "update", spy_update)
    env_id = f"toy_envs:Counting{mode.value}-v0"
    flags = {"norm_obs": False, "norm_reward": False, "num_steps": 64, "update_epochs": 1, "vf_coef": 0.0}
    train(ppo_continuous, env_id=env_id, vectorization="native", **flags)

    rollout = {name: torch.cat([r[name] for r in rollouts]) for name in rollouts[0]}  # (num_steps, num_envs)
    expected = expected_transitions(128)
    columns: dict[str, list[float]] = {
        "values": [100 * t[0] + t[1] for t in expected],
        "rewards": [t[2] for t in expected],
        "next_values": [100 * t[3] + t[4] for t in expected],
        "terminations": [t[5] for t in expected],
        "dones": [float(t[4] == LENGTH) for t in expected],
    }
    for name, column in columns.items():
        assert rollout[name].T.tolist() == [column, column], name
    learned = sorted(code(torch.cat(minibatch_obs)).flatten().tolist())
    assert learned == sorted(2 * [100 * t[0] + t[1] for t in expected])


def test_dict_observations_and_other_bounds(script: ModuleType, train: Train) -> None:
    """Observations are flattened; actions get the task's shape, stay within its bounds and reach them."""
    Nested.seen.clear()
    flags = {"total_timesteps": 1024, "num_steps": 128} if script is ppo_continuous else {"learning_starts": 200}
    train(script, env_id="toy_envs:Nested-v0", **flags)
    actions = np.stack(Nested.seen)
    assert actions.shape[1:] == (1, 2)
    np.testing.assert_allclose(actions.min(0), [[-3.0, 0.0]], atol=0.2)
    np.testing.assert_allclose(actions.max(0), [[1.0, 10.0]], atol=0.2)


def test_actions_are_mapped_linearly(script: ModuleType) -> None:
    """The ends and the middle of [-1, 1], and what lies beyond."""
    envs = script.make_envs(script.Args(env_id="toy_envs:Nested-v0"), 5)
    envs.reset(seed=0)
    Nested.seen.clear()
    script.step_envs(envs, np.array([[-1, -1], [0, 0], [1, 1], [-7, 7], [0.5, -0.5]], dtype=np.float32))
    expected = np.array([[-3, 0], [-1, 5], [1, 10], [-3, 10], [0, 2.5]])
    np.testing.assert_allclose(np.stack(Nested.seen)[:, 0], expected, rtol=1e-6)


def test_sacs_first_actions_are_uniform(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all of [-1, 1], as long as --learning-starts says."""
    step_envs, seen = sac_continuous.step_envs, list[np.ndarray]()

    def spy(envs: Any, actions: np.ndarray) -> Any:
        seen.append(actions)
        return step_envs(envs, actions)

    monkeypatch.setattr(sac_continuous, "step_envs", spy)
    train(sac_continuous, num_envs=2, learning_starts=2000, total_timesteps=2000, eval_episodes=1)
    actions = np.concatenate(seen[:1000]).flatten()
    deciles, _ = np.histogram(actions, bins=10, range=(-1, 1))
    assert deciles.sum() == 2000
    assert 140 < deciles.min() <= deciles.max() < 260  # 200 expected, with a standard deviation of 13
    assert len(np.unique(actions)) > 1990  # each environment has its own
