"""SAC on a Ray cluster: each part alone, what is under way at a time, and runs whose processes are killed."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401 (registers its tasks)
from conftest import read_scalars

import utils.cluster
from utils.cluster import Shard, Totals
from utils.errors import PartLost, TaskError

script: Any = import_module("variants.sac_ray")
ROOT = Path(__file__).parent.parent
TINY: dict[str, Any] = {"env_id": "Counting-v0", "eval_freq": 0, "eval_episodes": 2, "cuda": False, "compile": False}
EMPTY: dict[str, Any] = {"total": 0, "files": []}
TINY |= {"learning_starts": 0, "num_envs": 2, "rollout_steps": 6}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder of its own."""
    monkeypatch.chdir(tmp_path)


class Handle:
    """A part in this process: `handle.method.remote(...)` calls it at once and returns the result."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.part, name))


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls return at once what `get` would."""
    monkeypatch.setattr(script, "get", lambda x: x)
    monkeypatch.setattr(script, "is_restarted", lambda: False)


# --- the parts ---


def test_merged_moments_are_those_of_all_numbers() -> None:
    """Batches of different sizes, some added whole and some by their moments, against NumPy."""
    rng = np.random.default_rng(0)
    batches = [rng.normal(3.0 * i, 1.0 + i, (n, 4)) for i, n in enumerate((1, 7, 20, 3))]
    rms = script.RunningMeanStd((4,))
    for i, batch in enumerate(batches):
        x = torch.as_tensor(batch)
        if i % 2:
            rms.update(x)
        else:
            rms.merge(torch.as_tensor(batch.mean(0)), torch.as_tensor(batch.var(0)), len(batch))
    everything = np.concatenate(batches)
    np.testing.assert_allclose(rms.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(rms.var, everything.var(0), rtol=1e-12)
    assert rms.count == len(everything)


def test_the_parameter_server_gives_only_what_is_newer() -> None:
    server = script.ParameterServer(4, ["first"])
    assert server.pull(-1) == server.pull(3) == ["first"]
    assert server.pull(4) == server.pull(9) == []
    server.push(8, ["second"])
    assert server.pull(4) == ["second"]


def transitions(first: int, n: int) -> list[np.ndarray]:
    """`n` transitions of one number each, which counts on from `first`."""
    x = np.arange(first, first + n, dtype=np.float32)
    return [x[:, None], x[:, None] + 0.25, x + 0.5, x[:, None] + 1.0, x % 2]


def make_buffer() -> Any:
    """Room for twelve transitions."""
    return script.ReplayBuffer(12, 1, 1, torch.device("cpu"))


def rows(columns: list[np.ndarray]) -> set[float]:
    """Which transitions there are; checks that no columns are mixed up."""
    obs, actions, rewards, next_obs, terminations = columns
    np.testing.assert_array_equal(actions, obs + 0.25)
    np.testing.assert_array_equal(rewards, obs[:, 0] + 0.5)
    np.testing.assert_array_equal(next_obs, obs + 1.0)
    np.testing.assert_array_equal(terminations, obs[:, 0] % 2)
    return set(obs[:, 0].tolist())


def test_a_shard_goes_on_from_either_of_two_checkpoints() -> None:
    """Its files survive the checkpoint after them, and not the one after that; the oldest rows are overwritten."""
    folder = Path("replay/0")
    shard, states = Shard(make_buffer, folder, EMPTY), []
    for i in range(4):
        assert shard.add(*transitions(5 * i, 5)) == min(5 * (i + 1), 12)
        states.append(json.loads(json.dumps(shard.save())))
    assert rows(shard.sample(500)) == set(range(8, 20))
    for state, expected in ((states[3], range(8, 20)), (states[2], range(3, 15))):
        again = Shard(make_buffer, folder, state)
        assert rows(again.sample(500)) == set(expected)
        assert again.buffer.total == state["total"]
    shard.add(*transitions(20, 12))
    for _ in range(3):
        shard.save()
    assert [path.name for path in folder.iterdir()] == ["20.npz"]


def make_worker(**overrides: Any) -> tuple[Any, Any, list[Any]]:
    """A rollout worker of Counting-v0 with a server and two shards in this process, and its agent's weights."""
    args = script.Args(**TINY | overrides)
    torch.manual_seed(5)
    agent = script.Agent(script.make_envs(args, 1), args)
    agent.obs_rms.mean.add_(3.0)
    optimizer = script.Adam(agent.actor.parameters(), 1e-3, 0.9, 0.999, 1e-8)
    weights = {"version": 7, "time": 12.5, "actor": optimizer.vector.numpy()}
    weights["obs_rms"] = {name: x.numpy() for name, x in agent.obs_rms.state_dict().items()}
    shards = [Shard(partial(script.ReplayBuffer, 100, 2, 1, torch.device("cpu")), Path("x"), EMPTY) for _ in range(2)]
    server = script.ParameterServer(7, [weights])
    worker = script.RolloutWorker(args, 1, Handle(server), [Handle(shard) for shard in shards])
    return worker, agent, shards


def test_a_rollout_stores_every_step_as_it_was(without_ray: None) -> None:
    """Episodes of five steps of which even ones terminate go on over rollouts of six; shards take turns."""
    worker, agent, shards = make_worker()
    for i, (at_end, obs_mean) in enumerate((([(15.0, 5.0)] * 2, 5 / 3), ([(65.0, 5.0)] * 2, 11 / 6))):
        rollout = worker.rollout(12 * i)
        assert [tuple(episode) for episode in rollout["episodes"]] == at_end
        assert (rollout["shard"], rollout["size"], rollout["version"], rollout["time"]) == (i, 12, 7, 12.5)
        obs, _, rewards, final_obs, terminations = (x.numpy() for x in shards[i].buffer.gather(torch.arange(12)))
        steps = np.repeat(np.arange(6 * i, 6 * i + 6), 2)  # both environments, step by step
        np.testing.assert_array_equal(obs, np.stack([steps // 5, steps % 5], axis=1))
        np.testing.assert_array_equal(final_obs, np.stack([steps // 5, steps % 5 + 1], axis=1))
        np.testing.assert_array_equal(rewards, 10 * (steps // 5) + steps % 5 + 1)
        np.testing.assert_array_equal(terminations, (steps % 5 == 4) & (steps // 5 % 2 == 0))
        assert rollout["means"][0][1] == pytest.approx(obs_mean)
        np.testing.assert_allclose(rollout["obs_var"], obs.var(0))
    np.testing.assert_array_equal(worker.agent.act(obs), agent.act(obs))
    torch.testing.assert_close(worker.agent.obs_rms.state_dict(), agent.obs_rms.state_dict())


def test_the_first_steps_are_random_and_no_two_processes_alike(without_ray: None) -> None:
    """Uniform over the bounds while a rollout begins before --learning-starts; afterwards the policy's own actions."""
    worker, _, shards = make_worker(learning_starts=1200, rollout_steps=50)
    starts = [make_worker(learning_starts=1200)[0] for _ in range(3)]
    starts[1].index = 2
    first = [start.rollout(step)["means"][1].item() for start, step in zip(starts, (0, 0, 12), strict=True)]
    assert len(set(first)) == 3
    worker.rollout(0)
    actions = shards[0].buffer.gather(torch.arange(100))[1]
    assert actions.abs().max() > 0.9
    assert abs(actions.mean()) < 0.2
    assert actions.std().item() == pytest.approx(3**-0.5, abs=0.1)
    policy = worker.agent.act
    worker.agent.act = lambda obs, noise: np.full((2, 1), 0.25, np.float32)
    worker.rollout(1100)
    assert not (shards[1].buffer.gather(torch.arange(100))[1] == 0.25).any()
    worker.rollout(1200)
    assert (shards[0].buffer.gather(torch.arange(100))[1] == 0.25).all()
    worker.agent.act = policy
