"""What each measure for speed is worth, and how fast the scripts are beside those of an older commit.

    python -m benchmark.results.speed_changes.measure --output benchmark/results/speed_changes/measures.csv

Each measure is undone alone in a copy of the repository. The copies take turns, each in a process of its own, with the
clocks of `benchmark/speed.py`. An undone measure must change the code: otherwise the program ends with an error.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro

from benchmark import fail
from benchmark.speed import REPOSITORY, Args, median_and_range, pinned, processor_environment

Change = tuple[str, str, str]  # a file, lines of it, and what takes their place
ADAM_OF = """        self.vector, self.lr = flat_vector(parameters), lr
"""
ADAM_STEP = """        self.num_steps.add_(1)
        state: Any = [self.mean], [self.square], [], [self.num_steps]  # []: AMSGrad's maxima, which are not used
        torch._fused_adam_([self.vector], [gradient], *state, lr=self.lr, **self.settings)
"""
PYTORCH_ADAM = """        self.vector, self.lr = flat_vector(parameters), lr
        self.adam = torch.optim.Adam([self.vector], lr, (beta1, beta2), eps)
"""
PYTORCH_STEP = """        self.vector.grad, self.adam.param_groups[0]["lr"] = gradient, self.lr
        self.adam.step()
"""
PARAMETERS_ADAM = """        self.parts = list(parameters)
        self.vector, self.lr = flat_vector(self.parts), lr
        self.sizes = [x.numel() for x in self.parts]
        self.adam = torch.optim.Adam(self.parts, lr, (beta1, beta2), eps)
"""
PARAMETERS_STEP = """        for x, part in zip(self.parts, gradient.split(self.sizes)):
            x.grad = part.view_as(x)
        self.adam.param_groups[0]["lr"] = self.lr
        self.adam.step()
"""
ACT_IN_NUMPY = """obs = obs.astype(np.float32)  # as in the rollout, so that the update sees the same numbers
"""
ACT_IN_PYTORCH = """with torch.no_grad():
                mean, log_std = self.actor(self.normalize(torch.as_tensor(obs, dtype=torch.float32)))
                return (mean + log_std.exp() * noise).numpy()
"""
LAST_LAYER = """        if self.weight.shape[2] == 1:  # as a matrix product it would take three times as long
            return (x * self.weight.mT).sum(-1, keepdim=True) + self.bias
"""
BOTH_CRITICS = """        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise((obs_dim + action_dim, *HIDDEN_SIZES)):
            layers += [TwinLinear(fan_in, fan_out), nn.ReLU()]
        self.net = nn.Sequential(*layers, TwinLinear(fan_out, 1))
        assert all(len(x) == 2 for x in self.parameters()), "each critic needs a row: see TwinLayerNorm in docs/sac.md"
"""
TWO_CRITICS = """        self.nets = nn.ModuleList(mlp(obs_dim + action_dim, *HIDDEN_SIZES, 1) for _ in range(2))
"""
BOTH_VALUES = "return self.net(torch.cat([obs, actions], dim=-1).expand(2, -1, -1)).squeeze(-1)"
TWO_VALUES = "return torch.cat([net(torch.cat([obs, actions], dim=-1)) for net in self.nets], dim=-1).T"
ACTORS_GRADIENT = """    gradient = compute_gradient(actor_loss, agent.groups()["policy"])
"""
ALL_GRADIENTS = """    gradient = compute_gradient(actor_loss, agent.groups()["policy"] + agent.groups()["q"])
    gradient, gradient_of_critics = gradient.tensor_split([sum(x.numel() for x in agent.groups()["policy"])])
    metrics["losses/unused"] = gradient_of_critics.norm()
"""
LEAN, RUN = "vector_class: Any = gym.vector.AsyncVectorEnv if is_async else LeanVectorEnv", "utils/run.py"
GYMNASIUMS = LEAN.replace("LeanVectorEnv", "gym.vector.SyncVectorEnv")
CPP_WRAPPER = "torch._inductor.config.cpp_wrapper = not torch.cuda.is_available()"
FLUSH = "torch.set_flush_denormal(True)"


def measures_of(script: str) -> dict[str, tuple[Change, ...]]:
    """What is undone, by name."""
    if script.endswith("_selfplay.py"):
        return {}
    measures: dict[str, tuple[Change, ...]] = {
        "PyTorch's Adam on one vector": ((script, ADAM_OF, PYTORCH_ADAM), (script, ADAM_STEP, PYTORCH_STEP)),
        "PyTorch's Adam on each parameter": ((script, ADAM_OF, PARAMETERS_ADAM), (script, ADAM_STEP, PARAMETERS_STEP)),
        "Gymnasium's SyncVectorEnv": ((RUN, LEAN, GYMNASIUMS),),
        "kernels called from Python": ((RUN, CPP_WRAPPER, "torch._inductor.config.cpp_wrapper = False"),),
        "subnormal numbers": ((script, FLUSH, "torch.set_flush_denormal(False)"),),
    }
    if script == "ppo_continuous.py":
        return measures | {"acting in PyTorch": ((script, ACT_IN_NUMPY, ACT_IN_PYTORCH),)}
    return measures | {
        "the critics' last layer as a matrix product": ((script, LAST_LAYER, ""),),
        "two separate critics": ((script, BOTH_CRITICS, TWO_CRITICS), (script, BOTH_VALUES, TWO_VALUES)),
        "gradients of the critics in the actor's step": ((script, ACTORS_GRADIENT, ALL_GRADIENTS),),
    }


STEPS = {"ppo_continuous.py": 32_768, "sac_continuous.py": 2_000, "ppo_selfplay.py": None, "sac_selfplay.py": None}
OLDER = "a88a7dc"  # the scripts before they were rebuilt around `utils/run.py`


@dataclass
class MeasureArgs:
    """What each measure for speed is worth."""

    output: Path  # file for every measurement
    script: tuple[str, ...] = tuple(STEPS)  # scripts to measure
    rounds: int = 5  # how often the copies take turns
    only: tuple[str, ...] = ()  # these rows alone, beside the script itself


def make_copy(folder: Path, changes: tuple[Change, ...], commit: str) -> Path:
    """The repository at this commit with these changes."""
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", commit], check=True)
    for name, old, new in changes:
        text = (folder / name).read_text()
        if text.count(old) != 1:
            fail(f"{name} has {text.count(old)} places, not one, with: {old}")
        (folder / name).write_text(text.replace(old, new))
    return folder


def measure(copy: Path, script: str, what: str) -> dict[str, float]:
    """Seconds of a step and of the start, by the copy's own `benchmark/speed.py`."""
    args = Args(script=[script])  # type: ignore[list-item]
    command = [sys.executable, "-m", "benchmark.speed", "--script", script, "--measure", f"{what}@{time.time()}"]
    command += [] if STEPS[script] is None else ["--steps", str(STEPS[script])]
    environment = processor_environment(args) | {"PYTHONPATH": str(copy)}
    with tempfile.TemporaryDirectory() as folder, pinned(1):
        process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if process.returncode != 0:
        fail(f"{copy}: {process.stderr.strip()}")
    result: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return result


def main(args: MeasureArgs) -> None:
    """Takes turns, prints tables, and writes every measurement."""
    with tempfile.TemporaryDirectory() as folder:
        head = subprocess.check_output(["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"], text=True).strip()
        copies: dict[str, dict[str, tuple[Path, str]]] = {}
        for script in args.script:
            today = make_copy(Path(folder, script), (), head)
            copies[script] = {"none": (today, "script"), "no compilation": (today, "eager")}
            for name, changes in measures_of(script).items():
                copies[script][name] = make_copy(Path(folder, f"{script} {name}"), changes, head), "script"
            copies[script][OLDER] = make_copy(Path(folder, f"{script} {OLDER}"), (), OLDER), "script"
            if args.only:
                copies[script] = {name: x for name, x in copies[script].items() if name in ("none", *args.only)}
        results: dict[str, dict[str, list[dict[str, float]]]] = {script: defaultdict(list) for script in args.script}
        with args.output.open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["commit", "script", "round", "undone", "quantity", "seconds"])
            for i in range(args.rounds):
                for script in args.script:
                    for name, (copy, what) in copies[script].items():
                        result = measure(copy, script, what)
                        results[script][name].append(result)
                        commit = OLDER if name == OLDER else head[:7]
                        table.writerows(
                            [commit, script, i + 1, name, key, f"{value:.6g}"]
                            for key, value in result.items()
                            if key in ("wall", "processor", "first step", "first update")
                        )
                        print(f"round {i + 1}, {script}, {name}: {result}", file=sys.stderr, flush=True)
                        file.flush()
    for script, measured in results.items():
        print(f"\n`{script}`\n\n| undone | steps/s | times as fast with it | first update after |\n|---|---|---|---|")
        for name, rounds in measured.items():
            ratios = [x["wall"] / ours["wall"] for x, ours in zip(rounds, measured["none"], strict=True)]
            speed = f"{median(1 / x['wall'] for x in rounds):,.0f}"
            start = median_and_range([x["first update"] for x in rounds], ".1f")
            print(f"| {name} | {speed} | {median_and_range(ratios, '.2f') if name != 'none' else ''} | {start} s |")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(tyro.cli(MeasureArgs, prog="python -m benchmark.results.speed_changes.measure"))
