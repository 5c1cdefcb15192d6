"""SAC on a Ray cluster: each part alone, what is under way at a time, and runs whose processes are killed."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
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

from utils import cluster
from utils.cluster import Shard, Totals
from utils.errors import PartLost, TaskError
from utils.run import Run, fail, seed_streams

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
    server = cluster.ParameterServer()
    assert server.pull(-1) == []
    server.push(4, ["first"])
    assert server.pull(-1) == server.pull(3) == ["first"]
    assert server.pull(4) == server.pull(9) == []
    server.push(8, ["second"])
    assert server.pull(4) == ["second"]


def transitions(first: int, n: int) -> list[np.ndarray]:
    """`n` transitions of one number each, which counts on from `first`."""
    x = np.arange(first, first + n, dtype=np.float32)
    return [x[:, None], x[:, None] + 0.25, x + 0.5, x[:, None] + 1.0, x % 2]


def make_buffer(device: torch.device) -> Any:
    """Room for twelve transitions."""
    return script.ReplayBuffer(12, 1, 1, device)


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
        shard.remove_old()  # as after each checkpoint that is on disk
    assert rows(shard.sample(500)) == set(range(8, 20))
    for state, expected in ((states[3], range(8, 20)), (states[2], range(3, 15))):
        again = Shard(make_buffer, folder, state)
        assert rows(again.sample(500)) == set(expected)
        assert again.buffer.total == state["total"]
    shard.add(*transitions(20, 12))
    for _ in range(3):
        shard.save()
    assert {"10.npz", "15.npz", "20.npz"} <= {path.name for path in folder.iterdir()}  # no checkpoint was written
    for _ in range(2):  # a file stays for the checkpoint before
        shard.remove_old()
    assert [path.name for path in folder.iterdir()] == ["20.npz"]


def make_worker(**overrides: Any) -> tuple[Any, Any, Any]:
    """A rollout worker of Counting-v0, an agent, and a parameter server that has the weights of this agent."""
    args = script.Args(**TINY | overrides)
    torch.manual_seed(5)
    agent = script.Agent(script.make_envs(args, 1), args)
    agent.obs_rms.mean.add_(3.0)
    optimizer = script.Adam(agent.actor.parameters(), 1e-3, 0.9, 0.999, 1e-8)
    weights = {"version": 7, "time": 12.5, "actor": optimizer.vector.numpy()}
    weights["obs_rms"] = {name: x.numpy() for name, x in agent.obs_rms.state_dict().items()}
    server = cluster.ParameterServer()
    server.push(7, [weights])
    return script.RolloutWorker(args, 1), agent, Handle(server)


def store(worker: Any, server: Any, global_step: int) -> tuple[dict[str, Any], Any]:
    """What a rollout returns, and the transitions that it stored."""
    shard = Shard(partial(script.ReplayBuffer, 500, 2, 1), Path("x"), EMPTY)
    rollout = worker.rollout(global_step, server, Handle(shard))
    assert rollout["size"] == shard.buffer.total
    return rollout, [x.numpy() for x in shard.buffer.gather(torch.arange(shard.buffer.total))]


def test_a_rollout_stores_every_step_as_it_was(without_ray: None) -> None:
    """Episodes of five steps, of which even ones terminate, go on from one rollout of six steps to the next."""
    worker, agent, server = make_worker()
    for i, (total, obs_mean) in enumerate(((15.0, 5 / 3), (65.0, 11 / 6), (115.0, 2.0))):
        rollout, (obs, _, rewards, final_obs, terminations) = store(worker, server, 12 * i)
        assert [tuple(episode) for episode in rollout["episodes"]] == [(total, 5.0)] * 2
        assert (rollout["size"], rollout["version"], rollout["time"]) == (12, 7, 12.5)
        steps = np.repeat(np.arange(6 * i, 6 * i + 6), 2)  # both environments, step by step
        np.testing.assert_array_equal(obs, np.stack([steps // 5, steps % 5], axis=1))
        np.testing.assert_array_equal(final_obs, np.stack([steps // 5, steps % 5 + 1], axis=1))
        np.testing.assert_array_equal(rewards, 10 * (steps // 5) + steps % 5 + 1)
        np.testing.assert_array_equal(terminations, (steps % 5 == 4) & (steps // 5 % 2 == 0))
        assert rollout["means"][0][1] == pytest.approx(obs_mean)
        np.testing.assert_allclose(rollout["obs_var"], obs.var(0))
    np.testing.assert_array_equal(worker.agent.act(obs), agent.act(obs))
    torch.testing.assert_close(worker.agent.obs_rms.state_dict(), agent.obs_rms.state_dict())


def test_a_rollout_with_a_bad_number_is_not_stored(without_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner finds it in the means, and ends the run; a checkpoint before that must not hold it."""
    worker, _, server = make_worker()
    step_envs = script.step_envs

    def broken(*args: Any) -> Any:
        obs, final_obs, rewards, *ends = step_envs(*args)
        return obs, final_obs, rewards * np.nan, *ends

    monkeypatch.setattr(script, "step_envs", broken)
    stored: list[Any] = []
    rollout = worker.rollout(0, server, Handle(SimpleNamespace(add=lambda *columns: stored.append(columns))))
    assert np.isnan(rollout["means"][2])
    assert stored == []


def test_the_first_steps_are_random_and_no_two_processes_alike(without_ray: None) -> None:
    """Uniform over the bounds while a rollout begins before --learning-starts; afterwards the policy's own actions."""
    workers = [make_worker(learning_starts=1200)[0] for _ in range(3)]
    workers[1].index = 2
    worker, _, server = make_worker(learning_starts=1200, rollout_steps=200)
    firsts = [store(one, server, step)[1][1][0].item() for one, step in zip(workers, (0, 0, 12), strict=True)]
    assert len(set(firsts)) == 3
    first, *_ = make_worker()
    first.index = 0
    store(first, server, 0)
    assert torch.initial_seed() != seed_streams(first.args.seed, 0)  # the learner's
    _, (_, actions, *_) = store(worker, server, 1199)
    assert np.abs(actions).max() > 0.95
    assert abs(actions.mean()) < 0.1
    assert actions.std() == pytest.approx(3**-0.5, abs=0.05)
    worker.agent.act = lambda obs, noise: np.full((2, 1), 0.25 * noise.std(), np.float32)
    _, (_, actions, *_) = store(worker, server, 1200)
    assert len(np.unique(actions)) == 200  # noise of its own in each step


# --- what is under way ---


class Later:
    """A call that has been made, and what it will return."""

    def __init__(self, name: str, result: Any = None) -> None:
        self.name, self.result = name, result


class Recorder:
    """A part that only notes its calls."""

    def __init__(self, name: str, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        self.name, self.calls = name, calls

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Later:
            self.calls.append((f"{self.name}.{method}", arguments))
            return Later(self.name)

        return SimpleNamespace(remote=remote)


class Fakes(SimpleNamespace):
    """An exchange whose parts only note their calls, and which of the rollouts under way ends next."""

    exchange: Any
    calls: list[tuple[str, tuple[Any, ...]]]
    counters: dict[str, int]
    ends: list[int]
    places: dict[str, dict[str, Any]]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Three workers with rollouts of 2 x 6 steps, two shards, 120 steps in all."""
    flags = {"num_workers": 3, "num_buffer_shards": 2, "batch_size": 4, "buffer_size": 100, "capture_video": True}
    args = script.Args(**TINY | flags)
    calls: list[tuple[str, tuple[Any, ...]]] = []
    counters, ends, places = {"num_updates": 0}, list[int](), dict[str, Any]()

    def start(part: type, *arguments: Any, **options: Any) -> Recorder:
        places[part.__name__] = options
        return Recorder(f"{part.__name__}{arguments[1] if len(arguments) > 1 else ''}", calls)

    def get(call: Any) -> Any:
        version = max((x[0] for name, x in calls if name == "ParameterServer.push"), default=0)
        rollout = {"version": version, "time": time.time(), "size": 12, "seconds": 0.0, "is_restarted": False}
        if isinstance(call, Later) and call.name.startswith("Shard"):
            n = next(x[0] for name, x in calls if name.startswith("Shard"))
            return [np.full((n, *shape), float(call.name[-1])) for shape in ((2,), (1,), (), (2,), ())]
        return rollout

    def wait(rollouts: Any) -> Any:
        return list(rollouts)[ends.pop(0)]

    def finished(rollouts: Any) -> list[Any]:
        return []

    shards = SimpleNamespace(states=[EMPTY, EMPTY], start=lambda _: [Recorder(f"Shard{i}", calls) for i in range(2)])
    for function in (start, get, wait, finished):
        monkeypatch.setattr(script, function.__name__, function)
    monkeypatch.setattr(script, "put", lambda x: x)
    monkeypatch.setattr(cluster, "cpu_seconds", lambda parts: [0.0] * len(parts))
    agent = script.Agent(script.make_envs(args, 1), args)
    run = SimpleNamespace(folder=Path("run"), global_step=0, total_steps=120, stride=12)
    exchange = script.Exchange(args, run, agent, torch.zeros(3), shards, counters)
    return Fakes(exchange=exchange, calls=calls, counters=counters, ends=ends, places=places)


def test_a_worker_waits_until_its_rollout_is_taken(fakes: Fakes) -> None:
    """One rollout of each worker is under way, and the fast one gets more; a worker that hangs holds up nobody.

    Worker 0 hangs after its first rollout. The run of ten rollouts ends, and all workers have one under way.
    """
    fakes.ends += [0, 1, 1, 1, 0, 1, 1, 1, 1, 1]
    workers = []
    for _ in range(10):
        under_way = [worker for worker, _ in fakes.exchange.rollouts.values()]
        assert sorted(under_way) == list(range(3))
        workers.append(under_way[fakes.ends[0]])
        fakes.exchange.next_rollout()
    begun = [(name, x[0], x[2].name) for name, x in fakes.calls if name.endswith(".rollout")]
    assert [step for _, step, _ in begun] == list(range(0, 156, 12))
    assert [shard for *_, shard in begun] == (["Shard0", "Shard1"] * 7)[:13]
    assert [name for name, *_ in begun] == [f"RolloutWorker{i}.rollout" for i in [0, 1, 2, *workers]]


def test_where_parts_are(fakes: Fakes) -> None:
    """Only the parameter server cannot be replaced; the tester is where its videos belong."""
    assert fakes.places["ParameterServer"] == {"near": True, "is_replaced": False}
    assert fakes.places["RolloutWorker"] == {"cpus": 0.0}
    assert fakes.places["Tester"] == {"near": True}


def test_weights_are_published_once_for_each_version(fakes: Fakes) -> None:
    """Not again where there was no update."""
    fakes.exchange.publish()
    fakes.counters["num_updates"] = 7
    for _ in range(2):
        fakes.exchange.publish()
    versions = [x[0] for name, x in fakes.calls if name == "ParameterServer.push"]
    assert versions == [0, 7]


def test_lags_are_counted_in_updates(fakes: Fakes) -> None:
    """Updates since the version that a rollout was made with."""
    fakes.ends += [0, 0, 0]
    for updates in (0, 5, 9):
        fakes.counters["num_updates"] = updates
        fakes.exchange.next_rollout()
    assert [lag for lag, _ in fakes.exchange.lags] == [0, 5, 9]


def test_minibatches_come_from_shards_as_often_as_these_have_transitions(fakes: Fakes) -> None:
    """Whole minibatches of one shard; while they are used, messages with the next ones are under way."""
    fakes.exchange.sizes = [10, 30]
    minibatches, seen = fakes.exchange.minibatches(torch.device("cpu")), []
    for _ in range(400 * script.AT_ONCE):
        batch = next(minibatches)
        assert [tuple(x.shape) for x in batch] == [(4, 2), (4, 1), (4,), (4, 2), (4,)]
        seen.append(batch[0].unique().item())
        assert len(fakes.exchange.messages) == script.AHEAD
    assert np.mean(seen) == pytest.approx(0.75, abs=0.08)
    fakes.exchange.sizes = [0, 30]
    later = [next(minibatches)[2][0].item() for _ in range(100)]
    assert set(later[script.AT_ONCE * (script.AHEAD + 1) :]) == {1.0}


def test_totals_and_their_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth per second since the last call, of what is added and of what is counted elsewhere."""
    clock = iter([100.0, 101.0, 103.0, 110.0, 112.0])
    monkeypatch.setattr("utils.cluster.time.perf_counter", lambda: next(clock))
    totals = Totals()
    with totals.timing("waiting"):
        pass
    totals.add(work=4.0)
    rates = totals.rates(updates=30.0)
    assert (rates["waiting"], rates["work"], rates["updates"], rates["nothing"]) == (0.2, 0.4, 3.0, 0.0)
    totals.add(work=1.0)
    rates = totals.rates(updates=50.0)
    assert (rates["waiting"], rates["work"], rates["updates"]) == (0.0, 0.5, 10.0)


def test_what_a_part_refuses_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends by `fail` would be replaced without end; so its sentence is raised, in the program too."""

    class Part:
        """Refuses what is not positive."""

        def __init__(self, number: int) -> None:
            self.number = self.halve(number)

        def halve(self, number: int) -> int:
            if number < 1:
                fail(f"--number takes a number from 1, not {number}")
            return number // 2

    parts: list[Any] = []

    def remote(part: Any) -> SimpleNamespace:
        parts.append(part)
        return SimpleNamespace(remote=part)

    monkeypatch.setattr(cluster.ray, "remote", lambda **_: remote)
    context = SimpleNamespace(get_node_id=lambda: "0" * 56)
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: context)
    assert cluster.start(Part, 8).halve(6) == 3
    for call in (partial(cluster.start, Part, 0), partial(cluster.start(Part, 8).halve, 0)):
        with pytest.raises(PartLost, match=r"^--number takes a number from 1, not 0$"):
            call()
    assert {part.__name__ for part in parts} == {"Part"}

    def get(_: Any) -> None:
        text = "The actor died in its creation task, ray::Part.__init__()\nutils.errors.PartLost: --number takes 1"
        raise cluster.ray.exceptions.RayActorError(error_msg=text, actor_init_failed=True)

    monkeypatch.setattr(cluster.ray, "get", get)
    with pytest.raises(PartLost, match=r"^a process cannot be started: --number takes 1$"):
        cluster.get("x")


def test_a_call_that_does_not_return(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One warning for each time that nothing has returned."""
    answers = [[], [], ["b"]]
    monkeypatch.setattr(cluster.ray, "wait", lambda calls, timeout: (answers.pop(0), calls))
    assert cluster.wait({"a": 1, "b": 2}) == "b"
    assert (
        capsys.readouterr().err.splitlines()
        == ["warning: none of 2 calls of other processes has returned for 300 seconds"] * 2
    )


@pytest.mark.parametrize(
    ("num_workers", "worker_cpus", "says"),
    [
        (7, 0.0, ""),
        (5, 2.0, ""),
        (
            7,
            2.0,
            "warning: --worker-cpus 2 leaves cores for 5 rollout workers, and 2 of --num-workers wait for a machine\n",
        ),
        (1, 9.0, "error: --worker-cpus takes at most 8, the cores of one machine, not 9\n"),
    ],
)
def test_cores(
    num_workers: int,
    worker_cpus: float,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Machines with 8, 3 and 1 cores, one without any, and one that is gone."""
    nodes: list[dict[str, Any]] = [{"Alive": True, "Resources": {"CPU": cores}} for cores in (8.0, 3.0, 1.0)]
    nodes += [{"Alive": True, "Resources": {}}, {"Alive": False, "Resources": {"CPU": 64.0}}]
    monkeypatch.setattr(cluster.ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
    with pytest.raises(SystemExit) if says.startswith("error") else nullcontext():
        cluster.Connection("auto", script.__name__, num_workers, worker_cpus)
    assert capsys.readouterr().err == says


def test_ray_that_does_not_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Tried three times, since a machine may be busy; then one sentence for the bare exception that Ray raises."""
    tries = []

    def init(*words: Any, **_: Any) -> None:
        tries.append(words)
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(cluster.ray, "init", init)
    with pytest.raises(SystemExit):
        cluster.Connection(None, script.__name__, 1, 0.0)
    assert tries == [("local",)] * 3
    assert capsys.readouterr().err == "error: Ray cannot start: The current node timed out during startup.\n"


def test_a_late_evaluation_is_in_both_records() -> None:
    """TensorBoard has it at its own step. W&B takes no earlier step than its newest, and has it there."""
    record: list[tuple[int, str]] = []
    points: list[tuple[int, str]] = []
    run = SimpleNamespace(log_step=200, log_time=7.0, line_time=1e12, results={}, finished=[], total_steps=1000)
    run.args, run.progress = SimpleNamespace(), SimpleNamespace(set_postfix_str=lambda *_, **__: None)
    run.tracker = SimpleNamespace(step=200, log=lambda x, step: record.append((step, *x)))
    run.progress.disable, run.writer = True, SimpleNamespace(add_scalar=lambda x, _, step: points.append((step, x)))
    Run.log(run, {"eval/return_mean": 1.0}, 100)  # type: ignore[arg-type]
    assert points == [(100, "eval/return_mean")]
    assert record == [(200, "eval/return_mean")]
    assert (run.log_step, run.log_time) == (200, 7.0)


def test_a_hanging_evaluation_is_waited_for_with_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `wait`, which warns, and not by `get` alone."""
    waited, logged, seconds = list[Any](), list[Any](), list[float]()
    monkeypatch.setattr(cluster, "finished", lambda _: [])

    def wait(references: list[Any]) -> Any:
        waited.extend(references)
        return references[0]

    monkeypatch.setattr(cluster, "wait", wait)
    monkeypatch.setattr(cluster, "get", lambda reference: ({"eval/return_mean": 1.0}, 2.0) if waited else None)
    run: Any = SimpleNamespace(log=lambda *x: logged.append(x))
    totals: Any = SimpleNamespace(add=lambda tester: seconds.append(tester))
    evaluations = cluster.Evaluations(None, run, totals)
    evaluations.under_way["call"] = 100
    evaluations.log(may_wait=0)
    assert (waited, logged, seconds) == (["call"], [({"eval/return_mean": 1.0}, 100)], [2.0])


def test_parts_on_a_cluster_render_as_the_program_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables of MuJoCo and pygame reach them; others do not."""
    options: dict[str, Any] = {}

    def refuse(address: str, **own: Any) -> None:
        options.update(own)
        raise ConnectionError("none")

    monkeypatch.setattr(cluster.ray, "init", refuse)
    monkeypatch.setattr(cluster, "answers", lambda address: True)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    with pytest.raises(SystemExit, match="2"):
        script.Connection("1.2.3.4:1", script.__name__, 1, 0.0)
    assert options["runtime_env"]["env_vars"].keys() == {"PYTHONPATH", "OMP_NUM_THREADS", "MUJOCO_GL"}


def test_an_address_where_nothing_answers() -> None:
    """Ray would try for minutes; it looks up names such as auto itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert cluster.answers(address)
    assert not cluster.answers(address)
    assert not cluster.answers("127.0.0.1:99999")
    assert cluster.answers("auto")


def test_the_traceback_of_a_task_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the process in which it was raised."""

    def get(_: Any) -> None:
        raise cluster.ray.exceptions.RayTaskError("rollout", "File bad.py, line 7\n", TaskError("the simulator broke"))

    monkeypatch.setattr(cluster.ray, "get", get)
    with pytest.raises(TaskError, match="the simulator broke"):
        cluster.get("x")
    assert capsys.readouterr().err == "File bad.py, line 7\n"


def test_a_checkpoint_with_a_damaged_shard_is_not_taken() -> None:
    """Before the shards are started: `Run` then takes the checkpoint before."""
    shard = Shard(make_buffer, Path("checkpoint.replay/0"), EMPTY)
    shard.add(*transitions(0, 5))
    first = shard.save()
    shard.add(*transitions(5, 5))
    second = shard.save()
    path = Path("checkpoint.replay/0/5.npz")
    contents = path.read_bytes()
    shards = cluster.Shards(1, make_buffer, Path())
    shards.load_state_dict({"shards": [second]})
    middle = len(contents) // 2
    for damaged in (contents[:middle], contents[:middle] + b"\xff" * 8 + contents[middle + 8 :]):
        path.write_bytes(damaged)
        with pytest.raises((ValueError, zipfile.BadZipFile)):
            shards.load_state_dict({"shards": [second]})
        shards.load_state_dict({"shards": [first]})
    assert shards.states == [first]


@pytest.mark.parametrize(
    ("flags", "takes"),
    [
        ({"num_workers": 0}, "--num-workers takes a number from 1"),
        ({"buffer_size": 10**12}, "--buffer-size must fit into memory"),
        ({"buffer_size": 79, "num_buffer_shards": 4, "rollout_steps": 10}, "--buffer-size takes at least 80"),
        ({"address": "ray://1.2.3.4:10001"}, "--address takes a running Ray cluster of which this machine is a node"),
    ],
)
def test_bad_arguments(flags: dict[str, Any], takes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence that names the flag, exit status 2, no run folder."""
    with pytest.raises(SystemExit) as error:
        script.main(script.Args(**TINY | flags))
    stderr = capsys.readouterr().err
    assert error.value.code == 2
    assert stderr.startswith(f"error: {takes}")
    assert stderr.count("\n") == 1
    assert not Path("runs").exists()


# --- whole runs ---

COMMAND = [sys.executable, str(ROOT / "variants" / "sac_ray.py"), "--no-cuda"]
FLAGS = ["--env-id", "Pendulum-v1", "--no-compile", "--learning-starts", "100", "--batch-size", "32"]
FLAGS += ["--log-freq", "100", "--checkpoint-freq", "200", "--eval-freq", "300", "--eval-episodes", "2"]
FLAGS += ["--total-timesteps", "100000", "--updates-per-step", "0.5"]
PATIENCE = 300.0  # seconds; on a busy machine Ray's processes take minutes to start


def wait_for(condition: Callable[[], Any], goes_on: Callable[[], bool] = lambda: True) -> None:
    """Waits until the condition holds; fails if the program does not go on, or after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert goes_on() or condition(), Path("out.txt").read_text()
        assert time.monotonic() < deadline, Path("out.txt").read_text()
        time.sleep(0.05)


class Program:
    """The script in a process group of its own, which prints into out.txt."""

    def __init__(self, *flags: str) -> None:
        hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under `nohup` the tests ignore it, and so would this
        with open("out.txt", "w") as out:
            self.process = subprocess.Popen([*COMMAND, *flags], stdout=out, stderr=out, start_new_session=True)
        signal.signal(signal.SIGHUP, hangup)

    def wait_for(self, condition: Callable[[], Any]) -> None:
        """Waits until the condition holds; fails if the program ends before."""
        wait_for(condition, lambda: self.process.poll() is None)

    def end(self) -> tuple[int, str]:
        """Its exit status and what it printed."""
        return self.process.wait(PATIENCE), Path("out.txt").read_text()


def checkpoint() -> dict[str, Any]:
    """The newest checkpoint of the one run; for a moment, while a new one gets its name, it is the one before."""
    (folder,) = Path("runs").iterdir()
    try:
        return torch.load(folder / "checkpoint.pt", weights_only=True)
    except FileNotFoundError:
        return torch.load(folder / "checkpoint.previous.pt", weights_only=True)


def has_previous() -> bool:
    """Whether a checkpoint was written after the first one."""
    return any(Path("runs").glob("*/checkpoint.previous.pt"))


def kill(commands: dict[int, str], name: str) -> None:
    """Kills one process of this part."""
    pid = next(pid for pid, command in commands.items() if command.startswith(f"ray::{name}"))
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_parts_are_replaced_or_end_the_run_which_resumes(ray_processes: Callable[[], dict[int, str]]) -> None:
    """A worker and the tester are replaced. A shard ends the run with a sentence, and --resume goes on.

    The ratio of updates to steps is exact at the end, and the metrics are all of those of both pages, and no other.
    """
    program = Program(*FLAGS)
    program.wait_for(has_previous)
    for name, sign in (("RolloutWorker", "rollout worker"), ("Tester", "")):
        kill(ray_processes(), name)
        enough = checkpoint()["global_step"] + 600
        program.wait_for(lambda: sign in Path("out.txt").read_text() and checkpoint()["global_step"] >= enough)  # noqa: B023
    kill(ray_processes(), "Shard")
    status, printed = program.end()
    assert status == 1
    assert re.search(r"^error: Shard has died: ", printed, re.M)
    assert "Traceback" not in printed
    wait_for(lambda: not ray_processes())
    before, (folder,) = checkpoint(), Path("runs").iterdir()
    assert f"--resume {folder}" in printed
    total = before["global_step"] + 400
    status, printed = Program("--resume", str(folder), "--total-timesteps", str(total), "--num-workers", "1").end()
    assert status == 0, printed
    assert f"resuming from step {before['global_step']:,}" in printed
    after = checkpoint()
    assert after["global_step"] == total
    assert after["parts"]["counters"]["num_updates"] == int(0.5 * (total - 100))
    assert after["parts"]["replay"]["shards"][0]["total"] >= total - 2 * 20
    curves = read_scalars(folder)
    assert max(value for _, value in curves["ray/restarts"]) == 1
    documented = set()
    for page in ("sac.md", "ray.md"):
        table = (ROOT / "docs" / page).read_text().split("## Logged metrics")[1].split("##")[0]
        documented |= {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert set(curves) == documented


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_stopped_or_killed_learner_leaves_no_process(ray_processes: Callable[[], dict[int, str]]) -> None:
    """Ctrl-C goes to all processes of a terminal; the run writes its checkpoint, and --resume goes on from there."""
    program = Program(*FLAGS, "--norm-obs", "--num-buffer-shards", "2", "--num-workers", "1", "--eval-freq", "200")
    program.wait_for(has_previous)
    os.killpg(program.process.pid, signal.SIGINT)
    status, printed = program.end()
    assert status == 130, printed
    assert "Traceback" not in printed
    wait_for(lambda: not ray_processes())
    (step,) = re.findall(r"stopped by signal 2 after step ([\d,]+)", printed)
    before, (folder,) = checkpoint(), Path("runs").iterdir()
    assert f"{before['global_step']:,}" == step
    program = Program("--resume", str(folder))
    program.wait_for(lambda: checkpoint()["global_step"] > before["global_step"])
    program.process.kill()
    program.end()
    agents = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # Ray's own, which notice it a minute later
    wait_for(lambda: all(command.startswith(agents) for command in ray_processes().values()))
    after = checkpoint()
    done = after["global_step"] - before["global_step"]
    assert after["parts"]["counters"]["num_updates"] - before["parts"]["counters"]["num_updates"] == done // 2
    statistics = after["parts"]["agent"]["obs_rms.count"] - before["parts"]["agent"]["obs_rms.count"]
    assert statistics == done
    assert after["parts"]["policy_optimizer"]["num_steps"] == after["parts"]["counters"]["num_updates"]
    step = after["global_step"]  # an evaluation was due there, too: the killed learner may not have had its result
    assert step % 200 == 0
    status, printed = Program("--resume", str(folder), "--total-timesteps", str(step + 100)).end()
    assert status == 0, printed
    assert [x for x, _ in read_scalars(folder)["eval/return_mean"]][-2:] == [step, step + 100]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_terminal_that_is_closed(ray_processes: Callable[[], dict[int, str]]) -> None:
    """SIGHUP reaches all processes of it; Ray's go on until the run has written its checkpoint."""
    program = Program(*FLAGS, "--num-workers", "1", "--eval-freq", "0")
    program.wait_for(has_previous)
    os.killpg(program.process.pid, signal.SIGHUP)
    status, printed = program.end()
    assert status == 129, printed
    (step,) = re.findall(r"stopped by signal 1 after step ([\d,]+)", printed)
    assert f"{checkpoint()['global_step']:,}" == step
    wait_for(lambda: not ray_processes())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_machine_is_removed_in_the_middle(ray_processes: Callable[[], dict[int, str]]) -> None:
    """Two Ray nodes with rollout workers on both; those of the one that is gone begin again on the other."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    node = cluster.add_node(num_cpus=2)
    raylet = node.all_processes["raylet"][0].process.pid

    def workers_there() -> int:
        """Rollout workers on the second node: children of its raylet."""
        found = 0
        for pid, command in ray_processes().items():
            with suppress(FileNotFoundError):
                is_child = f"PPid:\t{raylet}\n" in Path(f"/proc/{pid}/status").read_text()
                found += is_child and command.startswith("ray::RolloutWorker")
        return found

    cluster.wait_for_nodes()
    for _ in range(4):  # Ray may place all workers on the first node
        program = Program(*FLAGS, "--address", cluster.address, "--num-workers", "4", "--checkpoint-freq", "400")
        program.wait_for(has_previous)
        if workers_there():
            break
        program.process.send_signal(signal.SIGTERM)
        program.end()
        shutil.rmtree("runs")
    cluster.remove_node(node, allow_graceful=False)
    program.wait_for(lambda: "has died, and a new process is in its place" in Path("out.txt").read_text())
    enough = checkpoint()["global_step"] + 800
    program.wait_for(lambda: checkpoint()["global_step"] >= enough)
    program.wait_for(lambda: sum(x.startswith("ray::RolloutWorker") for x in ray_processes().values()) == 4)
    program.process.send_signal(signal.SIGTERM)
    status, printed = program.end()
    assert status == 143, printed
    assert "Traceback" not in printed
    parts = ("ray::RolloutWorker", "ray::Tester", "ray::Shard", "ray::ParameterServer")
    wait_for(lambda: not any(x.startswith(parts) for x in ray_processes().values()))
    cluster.shutdown()
