"""What is stored is what happened: final observations, terminations, no resets, under every autoreset mode."""

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Train
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy_envs import LENGTH, Nested, make_vector

import ppo_continuous
import sac_continuous

MODES = list(AutoresetMode)


def expected_transitions(num_steps: int, resets_cost_a_step: bool) -> list[tuple[float, ...]]:
    """(episode, step, reward, next episode, next step, termination) of one Counting environment, from its description."""
    transitions: list[tuple[float, ...]] = []
    episode = step = used = 0
    while used < num_steps:
        end = step + 1 == LENGTH
        transitions.append((episode, step, 10 * episode + step + 1, episode, step + 1, float(end and episode % 2 == 0)))
        episode, step, used = (episode + 1, 0, used + 1 + resets_cost_a_step) if end else (episode, step + 1, used + 1)
    return transitions


def returns_of(folder: Path) -> list[float]:
    """The episodes' returns that a run logged."""
    return [event.value for event in EventAccumulator(str(folder)).Reload().Scalars("charts/episodic_return")]


@pytest.mark.parametrize("mode", MODES)
def test_step_envs(script: ModuleType, mode: AutoresetMode) -> None:
    """The observation to act on, and the one that the step led to, over an episode's end."""
    envs = make_vector(mode, 2)
    obs, _ = envs.reset(seed=0)
    for step in range(1, LENGTH + 1):
        obs, final_obs, _, terminations, truncations = script.step_envs(envs, np.zeros((2, 1), dtype=np.float32))
        np.testing.assert_array_equal(final_obs, [[0, step]] * 2)
    assert terminations.all()
    assert not truncations.any()
    np.testing.assert_array_equal(obs, [[0, LENGTH]] * 2 if mode == AutoresetMode.NEXT_STEP else [[1, 0]] * 2)
    obs, *_ = script.step_envs(envs, np.zeros((2, 1), dtype=np.float32))
    np.testing.assert_array_equal(obs, [[1, 0]] * 2 if mode == AutoresetMode.NEXT_STEP else [[1, 1]] * 2)


@pytest.mark.parametrize("env_id", ["toy_envs:Counting-v0", "Hopper-v5"])
def test_ppos_lean_vector_environment_is_gymnasiums(env_id: str) -> None:
    """All that it returns over several episodes, which end together or apart, by termination or truncation."""
    lean = ppo_continuous.make_envs(env_id, 4, "sync")
    assert isinstance(lean, ppo_continuous.LeanVectorEnv)
    env_fns = [partial(ppo_continuous.make_env, env_id, i) for i in range(4)]
    plain = SyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)
    arrays: list[list[np.ndarray]] = []
    for envs in (lean, plain):
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

    class Spy(sac_continuous.ReplayBuffer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            buffers.append(self)

    monkeypatch.setattr(sac_continuous, "ReplayBuffer", Spy)
    env_id = f"toy_envs:Counting{mode.value}-v0"
    folder = train(sac_continuous, env_id=env_id, vectorization="native", num_envs=2, buffer_size=1000, norm_obs=True)
    rows = buffers[0].data[: buffers[0].total].numpy()
    stored = sorted(map(tuple, rows[:, [0, 1, 3, 4, 5, 6]].tolist()))  # all but the action
    assert stored == sorted(2 * expected_transitions(120, mode == AutoresetMode.NEXT_STEP))
    assert max(returns_of(folder)) < 1e6  # the reward of a reset


@pytest.mark.parametrize("mode", MODES)
def test_ppo_learns_from_every_transition_and_nothing_else(
    train: Train, monkeypatch: pytest.MonkeyPatch, mode: AutoresetMode
) -> None:
    """Trains with a critic that spells out the observation, and reads what reaches GAE and update."""
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

    def spy_update(agent: Any, optimizer: Any, minibatch: Any, args: Any) -> Any:
        minibatch_obs.append(minibatch[0].clone())
        return update(agent, optimizer, minibatch, args)

    monkeypatch.setattr(
        ppo_continuous, "mlp", lambda *s, output_gain: make_mlp(*s, output_gain=0.01) if output_gain < 1 else SpellOut()
    )
    monkeypatch.setattr(ppo_continuous, "compute_gae", spy_gae)
    monkeypatch.setattr(ppo_continuous, "update", spy_update)
    env_id = f"toy_envs:Counting{mode.value}-v0"
    flags = {
        "norm_obs": False,
        "norm_reward": False,
        "num_envs": 2,
        "num_steps": 64,
        "total_timesteps": 256,
        "update_epochs": 1,
    }
    folder = train(ppo_continuous, env_id=env_id, vectorization="native", **flags)

    rollout = {name: torch.cat([r[name] for r in rollouts]) for name in rollouts[0]}  # (num_steps, num_envs)
    expected = expected_transitions(128, mode == AutoresetMode.NEXT_STEP)
    for env in range(2):
        values = rollout["values"][:, env]
        valid = values % 100 != LENGTH  # the other rows begin at a final observation: they are the resets
        assert (valid.sum() < len(values)) == (mode == AutoresetMode.NEXT_STEP)
        columns: list[tuple[str, list[float]]] = [
            ("values", [100 * t[0] + t[1] for t in expected]),
            ("rewards", [t[2] for t in expected]),
            ("next_values", [100 * t[3] + t[4] for t in expected]),
            ("terminations", [t[5] for t in expected]),
            ("dones", [float(t[4] == LENGTH) for t in expected]),
        ]
        for name, column in columns:
            assert rollout[name][:, env][valid].tolist() == column, name
    learned = sorted(code(torch.cat(minibatch_obs)).flatten().tolist())
    assert learned == sorted(2 * [100 * t[0] + t[1] for t in expected])
    assert max(returns_of(folder)) < 1e6  # the reward of a reset
    assert ppo_continuous.load_model(folder)[0].return_rms.var < 1e6


@pytest.mark.parametrize(
    ("flags", "first_ends"),
    [({}, [20, 5, 10, 15]), ({"vectorization": "async"}, [20, 5, 10, 15]), ({"stagger": False}, [20] * 4)],
)
def test_ppo_staggers_first_episodes(
    train: Train, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], first_ends: list[int]
) -> None:
    """Of four environments that a time limit of 20 would end together; a cut is a truncation, and no episode's return."""
    compute_gae = ppo_continuous.compute_gae
    rollouts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def spy_gae(*args: Any) -> torch.Tensor:
        rollouts.append(args[3:5])  # terminations, dones
        return compute_gae(*args)

    monkeypatch.setattr(ppo_continuous, "compute_gae", spy_gae)
    counts = {"num_envs": 4, "num_steps": 32, "total_timesteps": 512, "checkpoint_freq": 256}
    folder = train(ppo_continuous, env_id="toy_envs:Endless-v0", **counts, **flags)
    terminations, dones = (torch.cat(parts) for parts in zip(*rollouts, strict=True))
    assert not terminations.any()
    for start in (0, 64):  # the checkpoint resets all environments together, and staggers them anew
        for env, first in enumerate(first_ends):
            ends = (torch.nonzero(dones[start : start + 64, env]).flatten() + 1).tolist()
            assert ends == list(range(first, 65, 20))
    events = EventAccumulator(str(folder)).Reload()
    for name in ("charts/episodic_return", "charts/episodic_length"):
        assert {point.value for point in events.Scalars(name)} == {20.0}


def test_dict_observations_and_other_bounds(script: ModuleType, train: Train) -> None:
    """Observations are flattened; actions get the task's shape and stay within its bounds, and use all of them."""
    Nested.seen.clear()
    flags = {"total_timesteps": 1024, "num_steps": 128} if script is ppo_continuous else {}
    train(script, env_id="toy_envs:Nested-v0", **flags)
    actions = np.stack(Nested.seen)
    assert actions.shape[1:] == (1, 2)
    np.testing.assert_allclose(actions.min(0), [[-3.0, 0.0]], atol=0.2)
    np.testing.assert_allclose(actions.max(0), [[1.0, 10.0]], atol=0.2)


def test_actions_are_mapped_linearly(script: ModuleType) -> None:
    """The ends and the middle of [-1, 1], and what lies beyond."""
    envs = script.make_envs("toy_envs:Nested-v0", 5, "sync")
    envs.reset(seed=0)
    Nested.seen.clear()
    script.step_envs(envs, np.array([[-1, -1], [0, 0], [1, 1], [-7, 7], [0.5, -0.5]], dtype=np.float32))
    expected = np.array([[-3, 0], [-1, 5], [1, 10], [-3, 10], [0, 2.5]])
    np.testing.assert_allclose(np.stack(Nested.seen)[:, 0], expected, rtol=1e-6)
