"""What each measure for speed is worth, and how fast the scripts are beside those of an older commit.

    python -m benchmark.results.speed_changes.measure --output in_pairs.csv

Each measure is undone alone in a copy of the repository. A copy and the repository itself run at once on one core
(`pair.py`), and the ratio of their processor times is the worth of the measure. An undone measure must change the code:
otherwise the program ends with an error.
"""

import csv
import itertools
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmark import fail
from benchmark.results.speed_changes.pair import measure_both
from benchmark.speed import REPOSITORY, median_and_range

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
        for fan_in, fan_out in itertools.pairwise((input_dim, *HIDDEN_SIZES)):
            layers += [TwinLinear(fan_in, fan_out), nn.ReLU()]
        self.net = nn.Sequential(*layers, TwinLinear(fan_out, output_dim))
        assert all(len(x) == 2 for x in self.parameters()), "no row for each critic: see TwinLayerNorm in docs/sac.md"
"""
TWO_CRITICS = """        self.nets = nn.ModuleList(mlp(input_dim, *HIDDEN_SIZES, output_dim) for _ in range(2))
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


STEPS = {
    "ppo_continuous.py": 32_768,
    "sac_continuous.py": 2_000,
    "ppo_selfplay.py": 500_000,
    "sac_selfplay.py": 100_000,
}
OLDER = "a88a7dc"  # the scripts before they were rebuilt around `utils/run.py`


@dataclass
class MeasureArgs:
    """What each measure for speed is worth."""

    output: Path  # file to which every measurement is added
    script: tuple[str, ...] = tuple(STEPS)  # scripts to measure
    rounds: int = 3  # pairs of each copy
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


def main(args: MeasureArgs) -> None:
    """Measures all pairs, prints a table, and writes every measurement."""
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
        factors: dict[tuple[str, str], list[float]] = defaultdict(list)
        is_new = not args.output.exists()
        with args.output.open("a", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            if is_new:
                columns = ["seconds_without", "seconds_with", "first_update_without", "first_update_with"]
                table.writerow(["commit", "script", "round", "undone", *columns])
            rows = [(script, name) for script in args.script for name in copies[script] if name != "none"]
            for i, (script, name) in itertools.product(range(args.rounds), rows):
                sides = [copies[script][name], copies[script]["none"]]
                flags = ["--steps", str(STEPS[script])]  # some 15 s, and twice that while both run
                both = measure_both(sides, script, flags, i % 2 == 1)
                without, with_it = (result["processor"] for result in both)
                starts = [f"{result['first update']:.4g}" for result in both]
                factors[script, name].append(without / with_it)
                table.writerow([head[:7], script, i + 1, name, f"{without:.6g}", f"{with_it:.6g}", *starts])
                print(f"round {i + 1}, {script}, {name}: {without / with_it:.3f}", file=sys.stderr, flush=True)
                file.flush()
    print("| script | undone | processor time of a step without it / with it |\n|---|---|---|")
    for (script, name), values in factors.items():
        print(f"| {script} | {name} | {median_and_range(values, '.2f')} |")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(tyro.cli(MeasureArgs, prog="python -m benchmark.results.speed_changes.measure"))
