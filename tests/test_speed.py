"""What `benchmark.speed` counts, and that it measures all four scripts as they are."""

import ast
import csv
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch.utils.flop_counter import FlopCounterMode
from toy_envs import make_vector

import ppo_continuous
import sac_continuous
from benchmark import speed
from benchmark.provenance import versions
from benchmark.results.speed_changes import measure, pair
from utils.run import parse_args

ROOT = Path(__file__).parent.parent


def updates_flops(script: ModuleType, args: Any) -> int:
    """What PyTorch counts in the products of one update, on a task with two observations and one action."""
    agent = script.Agent(make_vector(AutoresetMode.SAME_STEP, 1), args)
    with FlopCounterMode(display=False) as counter:
        if script is ppo_continuous:
            n = args.num_envs * args.num_steps // args.num_minibatches
            script.compute_update_gradient(agent, (torch.randn(n, 2), torch.randn(n, 1), *torch.randn(4, n)), args)
        else:
            n = args.batch_size
            batch = (torch.randn(n, 2), torch.randn(n, 1), torch.randn(n), torch.randn(n, 2), torch.zeros(n))
            script.compute_qf_gradient(agent, batch, torch.randn(n, 1), args)
            script.compute_actor_gradient(agent, batch, torch.randn(n, 1), args)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("script", [ppo_continuous, sac_continuous])
def test_the_products_are_those_of_an_update(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit's products have the floating point operations that PyTorch counts while the script computes its
    gradients.
    """

    def by_backward(loss: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        loss.backward(inputs=list(parameters))  # PyTorch's counter does not take torch.autograd.grad
        return torch.zeros(1)

    monkeypatch.setattr(script, "compute_gradient", by_backward)
    args = script.Args()
    products = speed.update_products(f"{script.__name__}.py", args, obs_dim=2, action_dim=1)
    assert sum(2 * k * m * n * p for k, m, n, p in products) == updates_flops(script, args)


def test_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up and what comes after the second reading do not count, nor do parts outside of the two readings."""
    now = [100.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(speed.time, "process_time", lambda: now[0] / 2)
    clocks = speed.Clocks(warmup=4, steps=6)

    def work(seconds: float) -> None:
        now[0] += seconds

    update = clocks.timed("update", work)

    def run() -> None:
        while True:
            clocks.tick(2)
            update(1.0)
            work(0.5)

    with pytest.raises(speed.Measured):
        run()
    assert clocks.step == 10
    assert clocks.result() == pytest.approx({"wall": 0.75, "processor": 0.375, "update": 0.5})


def test_measures_for_speed_can_be_undone() -> None:
    """The lines that `speed_changes/measure.py` replaces stand in the code, once each, and what comes out is Python."""
    for script in measure.STEPS:
        for changes in measure.measures_of(script).values():
            texts = {name: (ROOT / name).read_text() for name, _, _ in changes}
            for name, old, new in changes:
                assert texts[name].count(old) == 1, (name, old)
                texts[name] = texts[name].replace(old, new)
            assert all(ast.parse(text) for text in texts.values())


@pytest.mark.parametrize("second_first", [False, True])
def test_pairs_run_at_once_and_keep_their_order(second_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side waits for a file of the other one. A side that fails ends the program."""
    sides = [(Path("older"), "script"), (Path("newer"), "eager")]

    def start(checkout: Path, what: str, script: str, flags: list[str], folder: str) -> subprocess.Popen[str]:
        code = "import json, pathlib, sys, time\nhere, name = pathlib.Path('..'), sys.argv[1]\n(here / name).touch()\n"
        code += "for _ in range(3000):\n    if all((here / x).exists() for x in ('older', 'newer')): break\n"
        code += "    time.sleep(0.01)\nelse:\n    sys.exit('alone')\n"
        code += "sys.exit('broken') if sys.argv[2:] else print(json.dumps({'processor': name}))"
        command = [sys.executable, "-c", code, str(checkout), *flags]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True)

    monkeypatch.setattr(pair, "start", start)
    results: Any = pair.measure_both(sides, "ppo_continuous.py", [], second_first)
    assert [result["processor"] for result in results] == ["older", "newer"]
    with pytest.raises(SystemExit, match="error: (older|newer): broken"):
        pair.measure_both(sides, "ppo_continuous.py", ["--broken"], second_first)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scripts_are_measured(tmp_path: Path) -> None:
    """A round of short measurements: every row is there, parts do not exceed the whole, starts come in order."""
    names = ["ppo_continuous.py", "sac_selfplay.py"]
    words = ["--script", *names, "--env-id", "Pendulum-v1", "--rounds", "1", "--steps", "600"]
    words += ["--output", str(tmp_path / "x.csv")]
    result = subprocess.run([sys.executable, "-m", "benchmark.speed", *words], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(result.stdout.count(f"| `{name}` |") == 3 for name in names)
    assert all(result.stdout.count(f"| `{name}` --no-compile |") == 1 for name in names)
    assert result.stdout.count("| `ppo_continuous.py`, its own defaults |") == 1
    last = result.stdout.splitlines()[-1]
    assert re.fullmatch(r"Machine: .+, \d+ cores, \d+ GiB\. Versions: python [\d.]+, torch .*\. Commit: \w+\+?\.", last)
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    for name in names:
        seconds = {
            row["quantity"]: float(row["seconds"])
            for row in rows
            if (row["script"], row["measured"]) == (name, "script")
        }
        parts = [seconds[part] for part in ("environment", "acting", "update")] + [seconds.get("replay", 0.0)]
        assert 0 < sum(parts) <= seconds["wall"]
        assert ("replay" in seconds) == name.startswith("sac")
        assert 0 < seconds["first step"] < seconds["first update"]
    limits = [row for row in rows if row["measured"] == "limit"]
    assert {row["script"] for row in limits} == {names[0]}
    assert all(np.isfinite(float(row["seconds"])) and float(row["seconds"]) > 0 for row in limits)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("sac_continuous.py", "100"), ("ppo_continuous.py", "256")])
def test_libraries_are_measured_beside(name: str, steps: str, tmp_path: Path) -> None:
    """Stable-Baselines3, and SBX where it is installed: in the same rounds, with ratios that follow from the times."""
    libraries = ["sb3", *(["sbx"] if find_spec("sbx") else [])]
    words = ["--script", name, "--env-id", "Pendulum-v1", "--rounds", "1", "--num-steps", "128", "--steps", steps]
    words += ["--against", *libraries, "--output", str(tmp_path / "x.csv")]
    result = subprocess.run([sys.executable, "-m", "benchmark.speed", *words], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    seconds = {row["measured"]: float(row["seconds"]) for row in rows if row["quantity"] == "wall"}
    assert {"script", *libraries} <= seconds.keys()
    assert min(seconds.values()) > 0
    shown = re.findall(r"^\| (\w+)[\w-]*, .*? \| ([\d,]+) \(.*? \| ([\d.]+) \(", result.stdout, re.MULTILINE)
    assert [row[0] for row in shown] == [re.split("[,-]", speed.KINDS[library])[0] for library in libraries]
    for library, (_, steps, ratio) in zip(libraries, shown, strict=True):
        assert float(steps.replace(",", "")) == pytest.approx(1 / seconds[library], abs=0.51)
        assert float(ratio) == pytest.approx(seconds[library] / seconds["script"], abs=0.0051)


def test_libraries_get_the_hyper_parameters_of_the_script() -> None:
    """By hand, in Stable-Baselines3's names: what would make one of the two compute less is not left to its default."""
    flags = "--gamma 0.9 --num-envs 2 --num-steps 64 --num-minibatches 4 --update-epochs 3"
    ppo = speed.library_settings("sb3", "ppo_continuous.py", parse_args(ppo_continuous.Args, flags.split()))
    expected = {
        "gamma": 0.9,
        "n_steps": 64,
        "batch_size": 32,
        "n_epochs": 3,
        "normalize_advantage": False,
        "clip_range_vf": 0.2,
    }
    assert expected.items() <= ppo.items()
    normalized = speed.library_settings("sb3", "ppo_continuous.py", parse_args(ppo_continuous.Args, ["--norm-adv"]))
    assert normalized["normalize_advantage"]
    flags = "--batch-size 32 --policy-lr 0.01 --tau 0.2 --learning-starts 70"
    sac = speed.library_settings("sbx", "sac_continuous.py", parse_args(sac_continuous.Args, flags.split()))
    expected = {"batch_size": 32, "learning_rate": 0.01, "tau": 0.2, "learning_starts": 70, "train_freq": 1}
    expected["gradient_steps"] = -1  # an update for each step of each environment
    assert expected.items() <= sac.items()


class FakeLibrary:
    """Stands for Stable-Baselines3: notes what an algorithm is given, and calls the callback as its loop does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: dict[str, Any] = {}
        self.envs: list[tuple[str, dict[str, Any]]] = []
        library = self

        class Envs:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                library.envs.append((type(self).__name__, kwargs))

        class VecNormalize(Envs):
            pass

        class Algorithm:
            def __init__(self, env: Any, **settings: Any) -> None:
                library.made = {"env": type(env).__name__} | settings
                shape = (settings.get("buffer_size", 1), 1, 3)
                names = ("observations", "next_observations", "actions", "rewards")
                self.replay_buffer = SimpleNamespace(
                    full=False, **{name: np.zeros(shape, np.float32) for name in names}
                )
                library.buffer = self.replay_buffer

            def learn(self, total: int, callback: Any) -> None:
                for _ in range(total):
                    callback._on_step()

        modules: dict[str, dict[str, Any]] = {
            "stable_baselines3": {"PPO": Algorithm, "SAC": Algorithm},
            "stable_baselines3.common": {},
            "stable_baselines3.common.callbacks": {"BaseCallback": object},
            "stable_baselines3.common.vec_env": {"DummyVecEnv": Envs, "VecEnv": Envs, "VecNormalize": VecNormalize},
        }
        for name, contents in modules.items():
            module = ModuleType(name)
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, name, module)
        self.buffer: Any = None


def test_libraries_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """PPO normalises as the script does, SAC does not; both do the script's updates; buffers can be full."""
    library = FakeLibrary(monkeypatch)
    args = speed.Args(["ppo_continuous.py"], env_id="Pendulum-v1", steps=100)
    case = speed.make_case("ppo_continuous.py", args)
    case = replace(case, flags=(*case.flags, "--gamma", "0.5"))
    assert speed.measure_library("sb3", "ppo_continuous.py", case, args)["wall"] > 0
    assert library.envs == [("Envs", {}), ("VecNormalize", {"gamma": 0.5})]  # which scales the returns by it
    made = library.made
    assert (made["env"], made["n_steps"], made["n_epochs"], made["batch_size"]) == ("VecNormalize", 2048, 10, 64)
    for full_buffer in (False, True):
        args = speed.Args(["sac_continuous.py"], env_id="Pendulum-v1", steps=100, full_buffer=full_buffer)
        speed.measure_library("sb3", "sac_continuous.py", speed.make_case("sac_continuous.py", args), args)
        assert (library.made["env"], library.made["train_freq"], library.made["gradient_steps"]) == ("Envs", 1, -1)
        assert (library.buffer.full, bool(library.buffer.observations[-1].any())) == (full_buffer, full_buffer)


def test_a_full_buffer() -> None:
    """The script's buffer has as many transitions as rows, different ones, of which none ends an episode."""
    make = speed.filled(sac_continuous.ReplayBuffer.__init__)
    buffer = sac_continuous.ReplayBuffer.__new__(sac_continuous.ReplayBuffer)
    make(buffer, 50, 3, 1, torch.device("cpu"))
    assert buffer.total == 50
    obs, _, _, _, terminations = buffer.gather(torch.arange(50))
    assert len(obs.unique(dim=0)) == 50
    assert not terminations.any()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rounds": 0}, "--rounds takes an integer from 1, not 0"),
        ({"steps": -1}, "--steps takes an integer from 1, not -1"),
        ({"threads": 999}, "--threads takes at most the "),
        ({"script": []}, "--script takes names, each of them once, not none"),
        ({"against": ("sb3", "sb3")}, "--against takes names, each of them once, not sb3 sb3"),
        ({"output": Path("/dev/null/x")}, "--output takes a file that can be written"),
    ],
)
def test_bad_input(overrides: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence on standard error that names the flag, and exit status 2, before anything is measured."""
    with pytest.raises(SystemExit, match="2"):
        speed.main(speed.Args(**{"script": ["ppo_continuous.py"]} | overrides))
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_a_library_that_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence that says what to install."""
    monkeypatch.setattr(speed, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        speed.main(speed.Args(script=["ppo_continuous.py"], against=("sb3",)))
    assert "--against sb3 needs the package stable-baselines3: pip install stable-baselines3" in capsys.readouterr().err


def test_packages_have_the_names_of_the_requirements() -> None:
    """Whatever their own files call them."""
    assert {"stable-baselines3", "scipy-stubs", "torch"} <= versions().keys()
