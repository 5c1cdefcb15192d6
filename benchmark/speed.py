"""How fast the scripts are: beside other libraries, beside the machine's own limit, and where their time goes.

    pip install stable-baselines3 sbx-rl
    python -m benchmark.speed --script sac_continuous.py ppo_continuous.py --against sb3 sbx
    python -m benchmark.speed --script sac_continuous.py --full-buffer --against sb3 sbx
    python -m benchmark.speed --script ppo_selfplay.py sac_selfplay.py

Every number comes from a process of its own that trains as its user would start it, on the same cores. The libraries
have the script's hyper-parameters, except that their learning rates are constant and that SBX's PPO does not clip
values; neither takes time. PPO's rollouts and epochs are the reference's; one row shows it at its own defaults.
Stable-Baselines3 is eager PyTorch and SBX compiled JAX. Our scripts compile their update; one row shows each of them
with --no-compile. SAC's buffer is almost empty unless --full-buffer is given, for the libraries, too.

Clocks are read after a warm-up and again after a fixed number of steps, at the same place of the loop, so that start-up
and compilation are left out. Scripts and libraries take turns, because the speed of a shared machine changes within
minutes and only ratios of neighbours are meaningful. Tables show medians over the rounds, least and greatest.

The limit is the machine's time for the work that no other code could leave out. This is the environment's steps and the
matrix products of the networks' forward and backward passes, one after another on arrays that exist already.
On a GPU, which works asynchronously, the time of a part is what the processor spends in it.
"""

import csv
import importlib
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Literal

import tyro

from benchmark import REPOSITORY, fail
from benchmark.provenance import commit_of, machine, sources_of, usable_cores, versions

OURS = {"script": "", "eager": " --no-compile", "defaults": ", its own defaults"}  # what of a script is measured
KINDS = {"sb3": "Stable-Baselines3, eager PyTorch", "sbx": "SBX, compiled JAX"}
LIBRARIES = {"sb3": ("stable_baselines3", "stable-baselines3"), "sbx": ("sbx", "sbx-rl")}  # module and package
ScriptName = Literal["ppo_continuous.py", "sac_continuous.py", "ppo_selfplay.py", "sac_selfplay.py"]
Product = tuple[int, int, int, int]  # k products at once of (m, n) by (n, p)


@dataclass
class Args:
    """How fast the scripts are: beside other libraries, beside the machine's own limit, and where their time goes."""

    script: list[ScriptName]
    """scripts to measure"""
    against: tuple[Literal["sb3", "sbx"], ...] = ()
    """libraries to measure beside the single-agent scripts: Stable-Baselines3, SBX (its form in JAX)"""
    env_id: str = "HalfCheetah-v5"
    """task of the single-agent scripts and of the libraries"""
    num_envs: int = 1
    """environments that are stepped together there"""
    num_steps: int = 2048
    """steps of PPO's rollouts in each of them"""
    rounds: int = 5
    """how often the scripts and the libraries take turns"""
    threads: int = 1
    """cores that a process may use, and its threads"""
    steps: int | None = None
    """steps over all environments between the two readings of the clocks, PPO's rounded up to whole rollouts; if not
    given, what takes some ten seconds
    """
    full_buffer: bool = False
    """SAC's replay buffers, of the libraries, too, are filled with noise before the run begins"""
    cuda: bool = False
    """let scripts and libraries use the GPU if there is one"""
    output: Path | None = None
    """file for every measurement, in CSV"""
    measure: str | None = None
    """one measurement in this process, which prints it in JSON; this is what the rounds are made of"""


@dataclass(frozen=True)
class Case:
    """What is measured: a script's flags, and its steps before the clocks are read and between the readings."""

    flags: tuple[str, ...]
    warmup: int
    steps: int


def make_case(script: str, args: Args, what: str = "script") -> Case:
    """The settings of what is measured.

    They are the defaults, except: PPO's rollouts are long and it does all epochs, SAC learns early, a pool has eight.
    """
    flags = ["--no-track", "--eval-freq", "0", "--checkpoint-freq", "0", "--cuda" if args.cuda else "--no-cuda"]
    flags += ["--no-compile"] if what == "eager" else []
    if script.endswith("_continuous.py"):
        flags += ["--env-id", args.env_id] + (["--num-envs", str(args.num_envs)] if what != "defaults" else [])
    unit = 1  # PPO is measured over whole rollouts
    if what == "defaults":
        defaults = importlib.import_module("ppo_continuous").Args()
        unit = defaults.num_envs * defaults.num_steps
        warmup, steps = 2 * unit, 8 * unit
    elif script == "ppo_continuous.py":
        unit = args.num_steps * args.num_envs
        warmup, steps = unit, 8 * unit
        flags += ["--num-steps", str(args.num_steps), "--target-kl", "None"]
    elif script == "sac_continuous.py":
        warmup, steps = 200 if args.steps else 1_000, 1_500
        flags += ["--learning-starts", str(warmup // 2)]
    elif script == "ppo_selfplay.py":
        unit = 16_384
        warmup, steps = unit if args.steps else 16 * unit, 32 * unit
        flags += ["--window", "8", "--save-steps", "16384", "--play-against-latest-model-ratio", "0"]
    else:
        warmup, steps = 1_000 if args.steps else 20_000, 40_000
        flags += ["--learning-starts", "500"]
        flags += ["--window", "8", "--save-steps", "2000", "--play-against-latest-model-ratio", "0"]
    steps = -(-(args.steps or steps) // unit) * unit
    flags += ["--total-timesteps", str(10 * (warmup + steps))]  # more than are measured
    return Case(tuple(flags), warmup, steps)


# === One measurement ==================================================================================================


class Measured(Exception):
    """The second reading is done: the rest of the run is not needed."""


def synchronize() -> None:
    """Waits until the GPU has done what it was given, if this process uses one."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class Clocks:
    """Reads wall and processor time when a run has made its first step, its warm-up and its measured steps."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup, self.last, self.step = warmup, warmup + steps, 0
        self.readings: list[tuple[int, float, float]] = []  # steps, wall and processor time
        self.seconds: dict[str, float] = defaultdict(float)  # of the parts, between the readings
        self.first_step = self.first_update = 0.0  # time of the day

    def tick(self, num_envs: int) -> None:
        """Called before each step of all environments."""
        self.first_step = self.first_step or time.time()
        if self.step >= (self.last if self.readings else self.warmup):
            synchronize()
            self.readings.append((self.step, time.perf_counter(), time.process_time()))
            if len(self.readings) == 2:
                raise Measured
        self.step += num_envs

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time is added up as that of this part."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            if self.readings:
                self.seconds[part] += time.perf_counter() - began
            if part == "update":
                self.first_update = self.first_update or time.time()
            return result

        return wrapped

    def result(self) -> dict[str, float]:
        """Seconds a step: in all, of the processor, and of each part."""
        steps, wall, processor = (after - before for before, after in zip(*self.readings, strict=True))
        return {name: x / steps for name, x in {"wall": wall, "processor": processor, **self.seconds}.items()}


def filled(make: Callable[..., None]) -> Callable[..., None]:
    """The constructor of a replay buffer that is full of noise, in which no episode ends."""

    def wrapped(buffer: Any, *args: Any, **kwargs: Any) -> None:
        make(buffer, *args, **kwargs)
        buffer.data.normal_()
        buffer.data[:, -1] = 0.0
        buffer.total = len(buffer.data)

    return wrapped


def fill_library(buffer: Any) -> None:
    """The same for the buffer of Stable-Baselines3 and SBX."""
    import numpy as np

    rng = np.random.default_rng(0)
    for name in ("observations", "next_observations", "actions", "rewards"):
        array = getattr(buffer, name)
        array[:] = rng.standard_normal(array.shape, dtype=np.float32)
    buffer.full = True


def measure_script(name: str, case: Case, began: float, full_buffer: bool = False) -> dict[str, float]:
    """Seconds a step of a script as it is, in all and by parts, and from the process's start to its first step and
    update.
    """
    script: Any = importlib.import_module(Path(name).stem)
    clocks = Clocks(case.warmup, case.steps)
    script.update = clocks.timed("update", script.update)
    if hasattr(script, "ReplayBuffer"):
        script.ReplayBuffer.add = clocks.timed("replay", script.ReplayBuffer.add)
        script.ReplayBuffer.sample = clocks.timed("replay", script.ReplayBuffer.sample)
        if full_buffer:
            script.ReplayBuffer.__init__ = filled(script.ReplayBuffer.__init__)
    if name.endswith("_continuous.py"):
        if hasattr(script.Agent, "act"):
            script.Agent.act = clocks.timed("acting", script.Agent.act)
        else:  # PPO makes a function of each new policy
            policy = clocks.timed("acting", script.Agent.policy)
            script.Agent.policy = lambda agent: clocks.timed("acting", policy(agent))
        step_envs = clocks.timed("environment", script.step_envs)

        def step(envs: Any, actions: Any) -> Any:
            clocks.tick(len(actions))
            return step_envs(envs, actions)

        script.step_envs = step
    else:  # the learner acts by Agent.act, and its opponents by Matches.all_actions, which calls no other agent's act
        script.Agent.act = clocks.timed("acting", script.Agent.act)
        matches = importlib.import_module("utils.matches").Matches  # as the script has imported it
        matches.all_actions = clocks.timed("acting", matches.all_actions)
        make_env = script.make_env

        def make_timed_env(*args: Any, **kwargs: Any) -> Any:
            env = make_env(*args, **kwargs)
            env_step = clocks.timed("environment", env.step)

            def step(actions: Any) -> Any:
                clocks.tick(env.num_games)
                return env_step(actions)

            env.step = step
            return env

        script.make_env = make_timed_env
    try:
        script.main(script.parse_args(script.Args, list(case.flags)))
    except Measured:
        pass
    else:
        raise RuntimeError(f"{name} ended before it was measured: {clocks.step} of {clocks.last} steps")
    starts = {"first step": clocks.first_step - began, "first update": clocks.first_update - began}
    return clocks.result() | starts


def library_settings(library: str, name: str, ours: Any) -> dict[str, Any]:
    """What a library's algorithm takes, in its own names, to have the hyper-parameters that the script has."""
    settings = {"policy": "MlpPolicy", "gamma": ours.gamma, "seed": ours.seed}
    if name == "ppo_continuous.py":
        minibatch_size = ours.num_envs * ours.num_steps // ours.num_minibatches
        settings |= {"batch_size": minibatch_size, "n_steps": ours.num_steps, "n_epochs": ours.update_epochs}
        settings |= {"learning_rate": ours.learning_rate, "gae_lambda": ours.gae_lambda, "clip_range": ours.clip_coef}
        settings |= {"ent_coef": ours.ent_coef, "vf_coef": ours.vf_coef, "max_grad_norm": ours.max_grad_norm}
        settings["normalize_advantage"] = ours.norm_adv
        if library == "sb3":
            settings["clip_range_vf"] = ours.clip_coef
    else:
        settings |= {"batch_size": ours.batch_size, "learning_rate": ours.policy_lr, "buffer_size": ours.buffer_size}
        settings |= {"tau": ours.tau, "learning_starts": ours.learning_starts, "train_freq": 1, "gradient_steps": -1}
    return settings


def measure_library(library: str, name: str, case: Case, args: Args) -> dict[str, float]:
    """Seconds a step of a library's algorithm, at the hyper-parameters that the script has with these flags."""
    import gymnasium as gym
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

    script: Any = importlib.import_module(Path(name).stem)
    ours = script.parse_args(script.Args, list(case.flags))
    module: Any = importlib.import_module(LIBRARIES[library][0])
    clocks = Clocks(case.warmup, case.steps)

    class Tick(BaseCallback):
        def _on_step(self) -> bool:
            clocks.tick(args.num_envs)
            return True

    envs: VecEnv = DummyVecEnv([partial(gym.make, args.env_id) for _ in range(args.num_envs)])
    if name == "ppo_continuous.py":
        envs = VecNormalize(envs, gamma=ours.gamma)
    settings = library_settings(library, name, ours)
    if library == "sb3":
        settings["device"] = "auto" if args.cuda else "cpu"
    model = getattr(module, name[:3].upper())(env=envs, **settings)
    if args.full_buffer and name == "sac_continuous.py":
        fill_library(model.replay_buffer)
    with suppress(Measured):
        model.learn(case.warmup + 2 * case.steps, callback=Tick())
    return clocks.result()


# === The machine's limit ==============================================================================================


def mlp_products(rows: int, widths: tuple[int, ...], copies: int, weights: bool, inputs: bool) -> list[Product]:
    """The matrix products of a pass of `rows` through `copies` networks at once, and of its gradients.

    The forward pass takes one product per layer. Gradients of the weights take another one per layer. Gradients of the
    layers' inputs take one more: for all layers with `inputs`, and for all but the first if only `weights` are wanted.
    """
    products: list[Product] = []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        products.append((copies, rows, fan_in, fan_out))
        if weights:
            products.append((copies, fan_in, rows, fan_out))
        if inputs or (weights and i > 0):
            products.append((copies, rows, fan_out, fan_in))
    return products


def update_products(name: str, ours: Any, obs_dim: int, action_dim: int) -> list[Product]:
    """The matrix products of one update of a single-agent script with these arguments."""
    hidden = importlib.import_module(Path(name).stem).HIDDEN_SIZES
    if name == "ppo_continuous.py":
        both = [(obs_dim, *hidden, action_dim), (obs_dim, *hidden, 1)]
        n = ours.num_envs * ours.num_steps // ours.num_minibatches
        return [p for widths in both for p in mlp_products(n, widths, 1, weights=True, inputs=False)]
    products = partial(mlp_products, ours.batch_size)
    actor, critic = (obs_dim, *hidden, 2 * action_dim), (obs_dim + action_dim, *hidden)  # without the last: a sum
    target = products(actor, 1, weights=False, inputs=False) + products(critic, 2, weights=False, inputs=False)
    critics_step = products(critic, 2, weights=True, inputs=False)
    actor_step = products(actor, 1, weights=True, inputs=False) + products(critic, 2, weights=False, inputs=True)
    return target + critics_step + actor_step


def measure_limit(name: str, case: Case, args: Args) -> dict[str, float]:
    """Seconds a step of the products of its updates, and of one environment, with nothing around them."""
    import gymnasium as gym
    import numpy as np
    import torch
    from gymnasium.spaces import flatdim

    script: Any = importlib.import_module(Path(name).stem)
    ours = script.parse_args(script.Args, list(case.flags))
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    env = gym.make(args.env_id)
    products = update_products(name, ours, flatdim(env.observation_space), flatdim(env.action_space))
    arrays = [(torch.randn(k, m, n, device=device), torch.randn(k, n, p, device=device)) for k, m, n, p in products]
    outputs = [torch.bmm(a, b) for a, b in arrays]

    def multiply() -> None:
        for (a, b), out in zip(arrays, outputs, strict=True):
            torch.bmm(a, b, out=out)
        synchronize()

    env.reset(seed=ours.seed)
    env.action_space.seed(ours.seed)
    actions = [env.action_space.sample() for _ in range(64)]
    moves = itertools.cycle(actions)

    def step() -> None:
        _, _, termination, truncation, _ = env.step(next(moves))
        if termination or truncation:
            env.reset()

    seconds = {}
    for part, function in (("products", multiply), ("environment", step)):
        times = []
        for _ in range(20):
            began, calls = time.perf_counter(), 0
            while time.perf_counter() - began < 0.05:
                function()
                calls += 1
            times.append((time.perf_counter() - began) / calls)
        seconds[part] = float(np.median(times))
    is_ppo = name == "ppo_continuous.py"
    rollouts = ours.num_envs * ours.num_steps if is_ppo else 1
    updates = ours.update_epochs * ours.num_minibatches / rollouts if is_ppo else ours.updates_per_step
    return seconds | {"products": updates * seconds["products"]}


# === Rounds ===========================================================================================================


def processor_environment(args: Args) -> dict[str, str]:
    """Variables that keep PyTorch, NumPy and JAX to these threads, and JAX to the CPU unless --cuda is given."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC")
    platforms = {} if args.cuda else {"JAX_PLATFORMS": "cpu"}
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.getcwd(), os.environ.get("PYTHONPATH"))))  # a user's task
    return dict(os.environ) | dict.fromkeys(names, str(args.threads)) | platforms | {"PYTHONPATH": path}


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Restricts this process and its children to so many cores. JAX uses all cores that it sees."""
    if sys.platform != "linux":
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[-threads:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def run_measurement(what: str, script: str, args: Args) -> dict[str, float]:
    """One measurement in a process and a folder of its own. `what` is the script, a library, or the limit."""
    shared = ["--env-id", args.env_id, "--threads", str(args.threads)]
    shared += ["--num-envs", str(args.num_envs), "--num-steps", str(args.num_steps)]
    shared += ["--cuda"] if args.cuda else []
    shared += ["--full-buffer"] if args.full_buffer else []
    shared += ["--steps", str(args.steps)] if args.steps is not None else []
    words = ["--script", script, "--measure", f"{what}@{time.time()}", *shared]
    with tempfile.TemporaryDirectory() as folder, pinned(args.threads):
        command = [sys.executable, "-m", "benchmark.speed", *words]
        process = subprocess.run(command, cwd=folder, env=processor_environment(args), capture_output=True, text=True)
    if process.returncode != 0:
        fail(f"--script {script}: measuring {what} failed\n{process.stderr.strip()}")
    result: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return result


def measure(args: Args) -> None:
    """What a round's process does."""
    what, _, began = str(args.measure).partition("@")
    (script,) = args.script
    case = make_case(script, args, what)
    with redirect_stdout(io.StringIO()):
        if what in OURS:
            result = measure_script(script, case, float(began), args.full_buffer and script == "sac_continuous.py")
        elif what == "limit":
            result = measure_limit(script, case, args)
        else:
            result = measure_library(what, script, case, args)
    print(json.dumps(result))


def median_and_range(values: list[float], digits: str) -> str:
    """Median, least and greatest."""
    ordered = sorted(values)
    return f"{median(ordered):{digits}} ({ordered[0]:{digits}} to {ordered[-1]:{digits}})"


def measured_of(script: str, args: Args) -> list[str]:
    """What a round measures of a script and beside it."""
    if not script.endswith("_continuous.py"):
        return ["script", "eager"]
    return ["script", "eager", *(["defaults"] if script == "ppo_continuous.py" else []), *args.against, "limit"]


def describe(script: str, results: dict[str, list[dict[str, float]]], args: Args) -> tuple[list[str], str, str]:
    """The rows of a script in the table of ratios, and its rows in those of its parts and its start."""
    ours, rows = results["script"], []
    for what in measured_of(script, args):
        if what == "limit":
            continue
        theirs, name = results[what], KINDS.get(what, f"`{script}`{OURS.get(what, '')}")
        speed = median_and_range([1 / x["wall"] for x in theirs], ",.0f")
        pairs = list(zip(ours, theirs, strict=True))
        ratios = [median_and_range([y[key] / x[key] for x, y in pairs], ".2f") for key in ("wall", "processor")]
        rows.append(f"| {name} | {speed} | {' | '.join(ratios if what != 'script' else ['', ''])} |")
    parts = [[x.get(part, 0.0) / x["wall"] for x in ours] for part in ("environment", "acting", "replay", "update")]
    shares = [f"{median(part):.0%}" for part in parts]
    limits = ["", ""]
    if "limit" in results:
        pairs = list(zip(ours, results["limit"], strict=True))
        limits = [
            median_and_range([y[part] / x["wall"] for x, y in pairs], ".0%") for part in ("products", "environment")
        ]
    starts = [median_and_range([x[key] for x in ours], ".1f") for key in ("first step", "first update")]
    return rows, f"| `{script}` | {' | '.join(shares + limits)} |", f"| `{script}` | {' | '.join(starts)} |"


def provenance(args: Args) -> str:
    """Processor, versions and commit in a sentence each."""
    here, installed = machine(), versions()
    packages = ["python", "torch", "numpy", "gymnasium", "mujoco", *(LIBRARIES[library][1] for library in args.against)]
    packages += ["jax"] if "sbx" in args.against else []
    named = ", ".join(f"{name} {installed.get(name, '?')}" for name in packages)
    gpus = f"; {', '.join(here['gpus'])}" if args.cuda else ""
    facts = [commit_of(sources_of(REPOSITORY / script)) for script in args.script]
    commits = dict.fromkeys(f"{x['commit'][:7]}{'+' * x['dirty']}" if x["commit"] else "unknown" for x in facts)
    where = f"{here['processor']}, {here['usable_cores']} cores, {here['memory_gib']:.0f} GiB{gpus}"
    return f"Machine: {where}. Versions: {named}. Commit: {', '.join(commits)}."


def main(args: Args) -> None:
    """Takes turns, prints the tables, and writes the measurements."""
    for name in ("num_envs", "num_steps", "rounds", "threads", "steps"):
        if (value := getattr(args, name)) is not None and value < 1:
            fail(f"--{name.replace('_', '-')} takes an integer from 1, not {value}")
    cores = usable_cores()
    if args.threads > cores:
        fail(f"--threads takes at most the {cores} cores that there are, not {args.threads}")
    for flag, names in (("script", args.script), ("against", args.against)):
        if len(set(names)) < len(names) or (flag == "script" and not names):
            fail(f"--{flag} takes names, each of them once, not {' '.join(names) or 'none'}")
    for library in args.against:
        module, package = LIBRARIES[library]
        if find_spec(module) is None:
            fail(f"--against {library} needs the package {package}: pip install {package}")
    if args.measure is not None:
        measure(args)
        return
    if args.output is not None:
        try:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.touch()
        except OSError as error:
            fail(f"--output takes a file that can be written: {error}")
    results: dict[str, dict[str, list[dict[str, float]]]] = {script: defaultdict(list) for script in args.script}
    for number, script in itertools.product(range(args.rounds), args.script):
        for what in measured_of(script, args):
            results[script][what].append(run_measurement(what, script, args))
            print(f"round {number + 1}, {script}, {what}: {results[script][what][-1]}", file=sys.stderr, flush=True)
    described = [describe(script, results[script], args) for script in args.script]
    where = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((args.num_envs, "environment"), (args.threads, "thread"))]
    where = [args.env_id, *where] if any(name.endswith("_continuous.py") for name in args.script) else where[1:]
    where += [f"rollouts of {args.num_steps:,} steps"] if "ppo_continuous.py" in args.script else []
    where += ["on the GPU if there is one"] if args.cuda else []
    where += ["full replay buffers"] if args.full_buffer else []
    lines = [f"{', '.join(where)}, {args.rounds} rounds: median (least to greatest)", ""]
    lines += ["| | steps/s | wall time, times ours | processor time, times ours |", "|---|---|---|---|"]
    lines += [row for rows, _, _ in described for row in rows]
    lines += [
        "",
        "| share of wall time | environment | acting | replay | update | products alone | environment alone |",
    ]
    lines += ["|---|---|---|---|---|---|---|", *(parts for _, parts, _ in described)]
    lines += ["", "| seconds from the process's start to | first step | first update |", "|---|---|---|"]
    lines += [starts for _, _, starts in described]
    lines += ["", "Our scripts compile their update, except in the rows that say otherwise.", "", provenance(args)]
    print("\n".join(lines))
    if args.output is not None:
        with args.output.open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["script", "round", "measured", "quantity", "seconds"])
            for name, measured in results.items():
                for what, i in itertools.product(measured, range(args.rounds)):
                    rows = ([name, i + 1, what, key, f"{value:.6g}"] for key, value in measured[what][i].items())
                    table.writerows(rows)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, prog="python -m benchmark.speed"))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
