"""Parts of a run in processes of their own, on one machine or on a Ray cluster. Nothing here decides what is learned.

A part is an object of a plain class. `start` makes it in a new process, `part.method.remote(...)` calls it and returns
a reference at once, and `get` waits for what the call returned.
"""

import logging
import os
import re
import signal
import socket
import sys
import time
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils.errors import PartLost, TaskError, missing_package
from utils.run import BufferFiles, Run, check_memory, fail, one_line, warn

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as error:
    raise missing_package("variants/sac_ray.py", error) from error

# === Processes ========================================================================================================

PATIENCE = 300.0  # seconds without a result before a warning


class Connection:
    """A Ray cluster that exists, or one of this machine that lives as long as the program."""

    def __init__(self, address: str | None, script: str, num_workers: int, worker_cpus: float) -> None:
        """Joins the cluster at this address, or starts one. Exits with one sentence if that is not possible.

        The parts get the module path of this program, and the classes of the module `script` by value. Warns if there
        are not `worker_cpus` cores for each worker, and exits if no machine has them for one.
        """
        handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGHUP, signal.SIGTERM)}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Ray's processes inherit it: a closed terminal must not end them
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        drawing = ("MUJOCO_GL", "SDL_VIDEODRIVER")  # which `draw_without_a_screen` may have set for the tester's videos
        variables |= {name: os.environ[name] for name in drawing if name in os.environ}
        takes = "--address takes a running Ray cluster of which this machine is a node, such as auto or HOST:6379"
        if (address or "").startswith("ray://"):
            fail(f"{takes}, and {address} is a client of one")
        if address and not answers(address):
            fail(f"{takes}, and nothing answers at {address}")
        options: dict[str, Any] = {} if address else {"include_dashboard": False}
        if not address:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody was asked
        options |= {"runtime_env": {"env_vars": variables}, "log_to_driver": False, "logging_level": logging.ERROR}
        for more in (0,) if address else (2, 1, 0):  # tries: Ray gives up after 30 seconds, and the machine may be busy
            try:
                ray.init(address or "local", **options)
                break
            except Exception as error:  # Ray raises bare ones
                reason = one_line(error)[:200]
                if not more:
                    fail(f"{takes}, and {address} is not one ({reason})" if address else f"Ray cannot start: {reason}")
        for signum, handler in handlers.items():  # Ray has replaced that of SIGTERM
            signal.signal(signum, handler)
        ray.cloudpickle.register_pickle_by_value(sys.modules[script])
        cores = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
        if max(cores) < worker_cpus:
            fail(f"--worker-cpus takes at most {max(cores):g}, the cores of one machine, not {worker_cpus:g}")
        places = sum(int(x / worker_cpus) for x in cores) if worker_cpus else num_workers
        if places < num_workers:
            rest = f"{num_workers - places} of --num-workers wait for a machine"
            warn(f"--worker-cpus {worker_cpus:g} leaves cores for {places} rollout workers, and {rest}")

    def close(self) -> None:
        """Ends all parts."""
        ray.shutdown()


def answers(address: str) -> bool:
    """Whether a program listens at HOST:PORT; True for an address of another form, which Ray looks up itself."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return True
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (OSError, OverflowError):
        return False
    return True


def start(part: type, *arguments: Any, near: bool = False, is_replaced: bool = True, cpus: float = 0.0) -> Any:
    """Starts a part in a process of its own, and returns its handle at once.

    With `near` it is on this machine. Otherwise it is on any: parts are spread evenly. If `is_replaced`, Ray replaces a
    process that has died by a new one with the same arguments, on another machine if its own is gone, and repeats the
    call that it was in. Otherwise its death ends the run. `cpus` cores are reserved for it.
    """
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": cpus, "scheduling_strategy": node if near else "SPREAD"}
    options |= {"max_restarts": -1, "max_task_retries": -1} if is_replaced else {}
    methods = {name: telling(method) for name, method in vars(part).items() if callable(method)}
    return ray.remote(**options)(type(part.__name__, (part,), methods)).remote(*arguments)


def telling(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which raises PartLost where it would end the process by `fail`: Ray would replace it without end."""

    @wraps(method)
    def call(*arguments: Any) -> Any:
        try:
            return method(*arguments)
        except SystemExit as error:
            raise PartLost("; ".join(getattr(error, "__notes__", [repr(error)]))) from None

    return call


def is_restarted() -> bool:
    """Whether the process of this part has replaced one that died."""
    return ray.get_runtime_context().was_current_actor_reconstructed


def put(value: Any) -> Any:
    """A reference to a value, which Ray copies once to each machine that asks for it."""
    return ray.put(value)


def get(reference: Any) -> Any:
    """What a call, or each of a list of calls, has returned.

    Raises the exception that the part raised, and PartLost if its process has died and is not replaced.
    """
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", error)
        if isinstance(cause, ray.exceptions.RayActorError) and cause.actor_init_failed:
            reason = str(cause).strip().splitlines()[-1].removeprefix("utils.errors.PartLost: ")
            raise PartLost(f"a process cannot be started: {reason}") from None
        if isinstance(cause, ray.exceptions.RayActorError):
            name = re.search(r"class_name: (\w+)", str(cause))
            raise PartLost(f"{name[1] if name else 'a part'} has died: {one_line(cause)[-200:]}") from None
        if isinstance(cause, TaskError):  # its own traceback stayed in the other process
            print(getattr(error, "traceback_str", ""), file=sys.stderr, end="")
        raise cause from error


def wait(references: Iterable[Any]) -> Any:
    """Waits until a call has returned or failed; of several that have, it is the first in this order.

    Warns every PATIENCE seconds: a process may hang, die again and again, or wait for a core.
    """
    references = list(references)
    while not (done := ray.wait(references, timeout=PATIENCE)[0]):
        warn(f"none of {len(references)} calls of other processes has returned for {PATIENCE:g} seconds")
    return done[0]


def finished(references: Iterable[Any]) -> list[Any]:
    """Those of the calls that have returned or failed."""
    references = list(references)
    return ray.wait(references, num_returns=len(references), timeout=0)[0] if references else []


# === Replay buffers ===================================================================================================


class Shard:
    """A replay buffer in a process of its own."""

    def __init__(self, make_buffer: Callable[[torch.device], Any], folder: Path, state: dict[str, Any]) -> None:
        torch.seed()
        self.buffer = make_buffer(torch.device("cpu"))
        self.files = BufferFiles(self.buffer, folder)
        self.files.load_state_dict(state)

    def add(self, *columns: np.ndarray) -> int:
        """Stores transitions, and returns how many there are now."""
        self.buffer.add(*columns)
        return min(self.buffer.total, len(self.buffer.data))

    def sample(self, n: int) -> list[np.ndarray]:
        """The columns of `n` transitions."""
        return [x.numpy() for x in self.buffer.sample(n)]

    def save(self) -> dict[str, Any]:
        """Writes what is new into files; returns what a checkpoint holds."""
        return self.files.state_dict()

    def remove_old(self) -> None:
        """Removes files that neither the newest checkpoint nor the one before needs."""
        self.files.remove_old()


class Shards:
    """The shards of a replay buffer; their state is a part of checkpoints."""

    def __init__(self, num_shards: int, make_buffer: Callable[[torch.device], Any], resumed: Path | None) -> None:
        """`make_buffer` makes the buffer of a shard, and `resumed` is the folder of a run that is resumed.

        Exits with one sentence if all buffers together are larger than memory.
        """
        sizes = make_buffer(torch.device("meta"))  # without the memory
        check_memory(dict.fromkeys(map(str, range(num_shards)), sizes))
        self.states: list[dict[str, Any]] = [{"total": 0, "files": []} for _ in range(num_shards)]
        self.parts, self.make_buffer, self.resumed = list[Any](), make_buffer, resumed

    def start(self, folder: Path) -> list[Any]:
        """Starts them on this machine, with what `load_state_dict` was given; returns their handles."""
        shards = [(self.make_buffer, folder / str(i), state) for i, state in enumerate(self.states)]
        self.parts = [start(Shard, *shard, near=True, is_replaced=False) for shard in shards]
        return self.parts

    def state_dict(self) -> dict[str, Any]:
        """Writes what is new into files; returns what a checkpoint holds."""
        if self.parts:
            self.states = get([part.save.remote() for part in self.parts])
        return {"shards": self.states}

    def remove_old(self) -> None:
        """Called when a checkpoint is on disk: removes files that neither it nor the one before needs."""
        get([part.remove_old.remote() for part in self.parts])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what a checkpoint holds, before `start`; raises an exception if a file of it is missing or damaged."""
        assert self.resumed is not None, "a run that is not resumed has no checkpoint"
        for i, shard in enumerate(state["shards"]):
            for first, _ in shard["files"]:
                path = self.resumed / "checkpoint.replay" / str(i) / f"{first}.npz"
                with zipfile.ZipFile(path) as file:
                    if file.testzip() is not None:
                        raise ValueError(f"{path} is damaged")
        self.states = state["shards"]


# === Weights and evaluations ==========================================================================================


class ParameterServer:
    """Has a reference to the newest weights: Ray copies the weights once to each machine whose workers want them."""

    def __init__(self) -> None:
        self.push(-1, [])

    def push(self, version: int, weights: list[Any]) -> None:
        """Takes new weights; their reference is in a list, because Ray would fetch the weights of a bare one."""
        self.version, self.weights = version, weights

    def pull(self, version: int) -> list[Any]:
        """The newest weights, or nothing if those of the caller are as new."""
        return self.weights if self.version > version else []


class Evaluations:
    """Evaluations by a tester, beside the training."""

    def __init__(self, tester: Any, run: Run, totals: "Totals") -> None:
        self.tester, self.run, self.totals = tester, run, totals
        self.under_way = dict[Any, int]()  # calls, with the steps that they are of

    def begin(self, weights: Any, step: int) -> None:
        """Lets the tester evaluate these weights."""
        self.under_way[self.tester.evaluate.remote(weights, self.run.folder.resolve(), f"step-{step}")] = step

    def log(self, may_wait: int) -> None:
        """Logs the tester's results at the steps that they are of; waits until no more than this are missing."""
        for reference in list(self.under_way):
            if len(self.under_way) > may_wait or finished([reference]):
                metrics, seconds = get(wait([reference]))
                self.run.log(metrics, self.under_way.pop(reference))
                self.totals.add(tester=seconds)


# === Measurements =====================================================================================================


def cpu_seconds(parts: Sequence[Any]) -> list[float]:
    """Processor time of the processes of these parts."""
    return get([part.__ray_call__.remote(lambda _: time.process_time()) for part in parts])


class Totals:
    """Growing totals, such as seconds of work, and how fast they grow."""

    def __init__(self) -> None:
        self.totals, self.before, self.time = defaultdict[str, float](float), dict[str, float](), time.perf_counter()

    def add(self, **amounts: float) -> None:
        """Adds to totals."""
        for name, amount in amounts.items():
            self.totals[name] += amount

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Adds the seconds of the `with` block to a total."""
        began = time.perf_counter()
        yield
        self.totals[name] += time.perf_counter() - began

    def rates(self, **others: float) -> Mapping[str, float]:
        """The growth per second since the last call, or 0, of all totals and of others that are counted elsewhere."""
        then, before = self.time, self.before
        self.time, self.before = time.perf_counter(), self.totals | others
        growth = {name: (x - before.get(name, 0.0)) / (self.time - then) for name, x in self.before.items()}
        return defaultdict(float, growth)

    def parts(self, server: Any, shards: Sequence[Any], num_workers: int, num_updates: int) -> dict[str, float]:
        """The busy share of each part, and updates per second, since the last call."""
        server_seconds, *shard_seconds = cpu_seconds([server, *shards])
        rates = self.rates(server=server_seconds, shards=sum(shard_seconds), updates=num_updates)
        sizes = {"workers": num_workers, "shards": len(shards), "server": 1, "tester": 1}
        busy = {f"ray/busy_{part}": rates[part] / size for part, size in sizes.items()}
        return busy | {"ray/busy_learner": 1.0 - rates["waiting"], "ray/updates_per_second": rates["updates"]}
