"""The compiled update computes what the plain one does; without a compiler the plain one is used."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import load_weights

from sac_continuous import Args
from utils.run import CudaGraphs, compiled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parent.parent
START = f"""
import importlib, math, sys
import torch
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
"""
SINGLE = """
from gymnasium.vector import AutoresetMode
from toy_envs import make_vector

torch.manual_seed(0)
args = script.Args(batch_size=64, **flags) if is_sac else script.Args(num_envs=1, num_minibatches=2, **flags)
agent = script.Agent(make_vector(AutoresetMode.SAME_STEP, 1), args)
agent.obs_rms.update(torch.randn(100, 2) * 3 + 5)
obs, actions, rows = torch.randn(2, 64, 2) * 3 + 5, torch.randn(64, 1).tanh(), torch.randn(4, 64)
batch = (obs[0], actions, rows[0], obs[1], (rows[1] > 1).float()) if is_sac else (obs[0], actions, *rows)
if hasattr(agent, "streams"):  # a transition also has next_obs, and as many demonstrations follow
    batch = (*batch, obs[1], obs[1], actions.flip(0), rows[2], obs[0], (rows[3] > 1).float(), obs[0])
"""
SELFPLAY = """
from utils.team_env import make_team_env

torch.manual_seed(0)
env = make_team_env("sumo", num_games=4, **flags)
team = env.teams[0]
args = script.Args(batch_size=64) if is_sac else script.Args(num_games=64, num_steps=1, num_minibatches=1)
agent = script.Agent(team, args)
obs, rows = torch.randn(2, 64, team.obs_dim), torch.randn(4, 64)
masks = torch.rand(2, 64, sum(team.branches)) < 0.7
masks |= torch.ones_like(masks) & (torch.arange(masks.shape[-1]) % 3 == 0)  # a legal action in each branch
actions = torch.zeros(64, team.action_dim) if team.branches else torch.randn(64, team.action_dim).tanh()
if is_sac:
    batch = (obs[0], masks[0], actions, rows[0], obs[1], masks[1], (rows[1] > 1).float())
else:
    batch = (obs[0], masks[0], actions.long() if team.branches else actions, *rows)
"""
COMPARE = """
agent, batch = agent.to(device), tuple(x.to(device) for x in batch)
functions = ["compute_qf_gradient", "compute_actor_gradient"] if is_sac else ["compute_update_gradient"]
for name in functions:
    noise = [torch.randn(64, actions.shape[1], device=device)] if is_sac else []
    plain = getattr(script, name)(agent, batch, *noise, args)
    example = agent, tuple(map(torch.zeros_like, batch)), *map(torch.zeros_like, noise), args
    compiled = script.compiled(getattr(script, name), *example)
    assert compiled is not getattr(script, name)
    torch.testing.assert_close(compiled(agent, batch, *noise, args), plain, rtol=rtol, atol=atol)
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
breaks = torch.__version__ < "2.13" and hasattr(agent, "streams")  # at `requires_grad_` in GAIL
assert graphs == len(functions) or breaks, f"{graphs} graphs were compiled"
"""


def run(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in a process in which compiling is allowed."""
    env = {name: value for name, value in os.environ.items() if name != "TORCH_COMPILE_DISABLE"} | variables
    return subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=280)


CASES: list[tuple[str, dict[str, object]]] = [
    ("ppo_continuous", {"ent_coef": 0.1}),
    ("sac_continuous", {"norm_obs": True, "autotune": False}),
    ("variants.sac_value_network", {"autotune": True}),
    ("variants.sac_rewards", {"streams": "extrinsic,curiosity,rnd,gail"}),
    ("ppo_selfplay", {}),
    ("ppo_selfplay", {"env_kwargs": {"actions": "multidiscrete"}}),
    ("sac_selfplay", {}),
    ("sac_selfplay", {"env_kwargs": {"actions": "multidiscrete"}}),
]


def compare(name: str, flags: dict[str, object], device: str, folder: Path) -> None:
    """Demands the same gradients and metrics on this device; one graph each, compiled with an example of zeros."""
    words = f"script, flags, is_sac = importlib.import_module({name!r}), {flags!r}, {'sac' in name}\n"
    tolerances = (1e-4, 1e-5) if device == "cpu" else (1e-3, 1e-4)  # a GPU adds in another order
    words += f"device, rtol, atol = {device!r}, *{tolerances}\n"
    code = START + words + (SELFPLAY if name.endswith("selfplay") else SINGLE) + COMPARE
    result = run(["-c", code], folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("compiled it in") == 1 + ("sac" in name), result.stdout + result.stderr


@pytest.mark.parametrize(("name", "flags"), CASES)
def test_gradients_are_those_of_the_plain_update(name: str, flags: dict[str, object], tmp_path: Path) -> None:
    """On the CPU."""
    compare(name, flags, "cpu", tmp_path)


def test_a_compiler_older_than_its_processor(tmp_path: Path) -> None:
    """It refuses the processor's vector instructions, which are trusted at first; then it compiles without them."""
    compiler = tmp_path / "old"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-mavx*|*-mamx*) exit 1;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    code = START + "from utils.run import compiled\n"
    code += "def double(x): return torch.autograd.grad((x.sin() * x).sum(), x)[0]\n"
    code += "x = torch.ones(64, requires_grad=True)\nnew = compiled(double, x)\n"
    code += "assert new is not double\nassert torch.allclose(new(x), double(x))\n"
    variables = {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCH_COMPILE_DISABLE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cannot be compiled" not in done.stderr


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    """A warning, and the plain function."""
    code = START + "from utils.run import compiled\ndef double(x): return 2 * x\n"
    code += "assert compiled(double, torch.ones(2)) is double\n"
    variables = {"TORCHINDUCTOR_CACHE_DIR": "/proc/none", "TORCH_COMPILE_DISABLE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning: the update is slow, because it cannot be compiled: " in done.stderr


def test_a_run_without_a_compiler_says_so(tmp_path: Path) -> None:
    """It warns in a line that names the compiler, once for each function, and equals the run with --no-compile."""
    flags = "--no-cuda --eval-freq 0 --total-timesteps 512"
    flags += " --env-id Pendulum-v1 --eval-episodes 1 --learning-starts 400 --batch-size 64"
    words = [str(ROOT / "sac_continuous.py"), *flags.split()]
    plain = run([*words, "--no-compile"], tmp_path)
    without = run(words, tmp_path, CXX="/nonexistent/c++", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert [plain.returncode, without.returncode] == [0, 0], plain.stderr + without.stderr
    assert "compil" not in plain.stdout + plain.stderr
    warnings = [line for line in without.stderr.splitlines() if line.startswith("warning")]
    assert len(warnings) == 2  # the gradients of the critics and of the actor
    assert all("cannot be compiled" in line and "/nonexistent/c++" in line for line in warnings)
    results = [re.findall(r"^(?:evaluation|scores): .*", x.stdout, re.MULTILINE) for x in (plain, without)]
    assert results[0] == results[1]
    assert len(results[0]) == 1


@pytest.mark.parametrize("name", ["ppo_continuous", "sac_continuous"])
def test_a_resumed_compiled_run_equals_one_that_went_on(name: str, tmp_path: Path) -> None:
    """Bit for bit, though the two parts are compiled by two processes."""
    flags = "--no-cuda --env-id Pendulum-v1 --eval-freq 0 --eval-episodes 1 --checkpoint-freq 512 --total-timesteps"
    own = "--num-envs 1 --num-steps 128 --no-anneal-lr"
    if name.startswith("sac"):
        own = "--learning-starts 400 --batch-size 64"
    words = [*own.split(), *flags.split()]
    train = f"for steps in 1024, 512:\n script.main(script.parse_args(script.Args, {words} + [str(steps)]))"
    first = run(["-c", f"{START}script = importlib.import_module({name!r})\n{train}"], tmp_path)
    assert first.returncode == 0, first.stderr
    whole, parts = sorted(tmp_path.glob("runs/*"), key=lambda folder: folder.stat().st_ctime)
    resumed = run([str(ROOT / f"{name}.py"), *words, "1024", "--resume", str(parts)], tmp_path)
    assert "resuming from step 512" in resumed.stdout, resumed.stdout + resumed.stderr
    assert "compiled it in" in resumed.stdout
    torch.testing.assert_close(load_weights(parts), load_weights(whole), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["ppo_continuous", "sac_continuous"])
def test_a_script_copied_alone_is_compiled(name: str, tmp_path: Path) -> None:
    """Its stand-in compiles the update, and the weights are those of --no-compile up to rounding."""
    (tmp_path / f"{name}.py").write_text((ROOT / f"{name}.py").read_text())
    own = "--learning-starts 400 --batch-size 64" if name.startswith("sac") else "--num-envs 1 --num-steps 224"
    flags = f"--no-cuda --env-id Pendulum-v1 --eval-freq 0 --eval-episodes 1 --total-timesteps 448 {own}".split()
    cache = tmp_path / "cache"
    weights = []
    for flag in ("--no-compile", "--compile"):
        result = run([f"{name}.py", *flags, flag], tmp_path, TORCHINDUCTOR_CACHE_DIR=str(cache))
        assert result.returncode == 0, result.stderr
        assert any(cache.rglob("*.cpp")) == (flag == "--compile")
        (folder,) = (tmp_path / "runs").iterdir()
        weights.append(load_weights(folder))
        (tmp_path / "runs").rename(tmp_path / flag)
    plain, compiled = weights
    torch.testing.assert_close(compiled, plain, rtol=1e-2, atol=2e-3)
    without = run([f"{name}.py", *flags], tmp_path, CXX="/nonexistent/c++", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "x"))
    assert without.returncode == 0, without.stderr
    assert "warning: the update is slow, because it cannot be compiled: " in without.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    torch.testing.assert_close(load_weights(folder), plain, rtol=0, atol=0)


GRAPHS: list[SimpleNamespace] = []  # what stands for CUDA graphs on the CPU


def scaled(module: torch.nn.Linear, batch: tuple[torch.Tensor, ...], args: Args) -> tuple[Any, ...]:
    """What is recorded: of the shape of a gradient function. On the CPU, a replay calls it again."""
    results = module(batch[0]) * args.gamma, None, {"sum": batch[0].sum() + batch[1]}
    if GRAPHS and GRAPHS[-1].is_open:
        constants, graph = copy.copy(args), GRAPHS[-1]

        def replay() -> None:
            graph.replays += 1
            new = scaled(module, batch, constants)
            results[0].copy_(new[0]), results[2]["sum"].copy_(new[2]["sum"])

        graph.replay = replay
    return results


def check_recordings(device: str) -> None:
    """What a replay returns stays, and follows the parameters; other shapes, modules and arguments are not replayed."""
    args, recorded = Args(), CudaGraphs(scaled)
    modules = [torch.nn.Linear(3, 2, device=device).requires_grad_(False) for _ in range(3)]

    def batch_of(rows: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(3, rows, device=device).T, torch.randn(1, device=device)

    recorded.record(modules[0], batch_of(4), args)
    assert compiled(cast(Any, recorded), modules[1], batch_of(4), args) is recorded  # another behaviour's
    if device == "cpu":  # where `compiled` does not record
        recorded.record(modules[1], batch_of(4), args)
    calls = []
    for module, rows, gamma in ((0, 4, 0.99), (0, 4, 0.99), (1, 4, 0.99), (2, 4, 0.99), (0, 5, 0.99), (0, 4, 0.5)):
        args.gamma = gamma
        for x in modules:
            x.weight.mul_(1.1)  # in place, as an optimiser steps it
        batch = batch_of(rows)
        calls.append((recorded(modules[module], batch, args), scaled(modules[module], batch, args)))
    for result, expected in calls:
        torch.testing.assert_close(result, expected)
    assert len(recorded.recordings) == 2


def test_recordings_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for CUDA."""

    @contextmanager
    def graph(opened: SimpleNamespace) -> Iterator[None]:
        opened.is_open = True
        yield
        opened.is_open = False

    def cuda_graph() -> SimpleNamespace:
        GRAPHS.append(SimpleNamespace(is_open=False, replays=0))
        return GRAPHS[-1]

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"Stream": lambda: stream, "current_stream": lambda: stream, "stream": nullcontext}
    for name, fake in {**fakes, "CUDAGraph": cuda_graph, "graph": graph}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    check_recordings("cpu")
    assert [graph.replays for graph in GRAPHS] == [2, 1]
