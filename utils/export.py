"""Writes the policy of a run as an ONNX file, which needs no PyTorch: `python -m utils.export runs/FOLDER`.

Observation normalisation is inside. Actions are deterministic and in the units of the task. The file is checked against
the script's own policy in ONNX Runtime before it is written. `docs/export.md` describes inputs, outputs and metadata.
"""

import argparse
import importlib
import io
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space
from torch import Tensor, nn

from utils.run import fail, load_model, one_line, read_args, write_file

try:
    import onnx
    import onnxruntime
except ImportError as error:
    fail(f"utils.export needs onnx and onnxruntime: pip install -r requirements-onnx.txt ({one_line(error)})")

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-5  # of half the range of an action; for discrete actions of the log-probability
BATCH_SIZES = (1, 2, 33)  # of the check


@dataclass
class Policy:
    """The policy of one behaviour; a run of a single agent has one with an empty name."""

    behavior: str
    agent: Any
    obs_dim: int
    branches: tuple[int, ...]  # sizes of the discrete branches; () for Box
    space: Box | None  # actions of the task; None: discrete
    act: Callable[[np.ndarray, np.ndarray], np.ndarray]  # observations and masks to the actions that the script takes


class Exported(nn.Module):
    """What is exported: raw observations (n, obs_dim) and, for discrete actions, masks (n, sum of branches) to actions.

    The memory of a recurrent policy would be a further input and output here, and in `example_inputs`.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.agent, self.space = policy.agent, policy.space

    def forward(self, obs: Tensor, masks: Tensor | None = None) -> Tensor:
        """Actions (n, *shape of the task's action), or one integer for each branch (n, num_branches)."""
        if hasattr(self.agent, "sample"):  # self-play
            actions = self.agent.sample(self.agent(obs), masks)
        else:
            actions, _ = self.agent.actor(self.agent.normalize(obs))
            actions = actions if hasattr(self.agent, "policy") else actions.tanh()  # PPO has `policy`, SAC has not
        if self.space is None:
            return actions
        low, high = (torch.as_tensor(bound, dtype=torch.float64) for bound in (self.space.low, self.space.high))
        shares = 0.5 * (actions.double().clamp(-1.0, 1.0).reshape(-1, *low.shape) + 1.0)
        values = torch.minimum(torch.maximum(low * (1.0 - shares) + high * shares, low), high)
        return values if self.space.dtype == np.float64 else values.float()


def load_script(folder: Path) -> ModuleType:
    """The script that made the run; exits with one sentence if args.json names none."""
    takes = "FOLDER takes a run folder whose args.json names a script of this repository"
    try:
        name = json.loads((folder / "args.json").read_text())["script"]
        scripts = {path.name: path for path in (*ROOT.glob("*.py"), *ROOT.glob("variants/*.py"))}
        path = scripts[name].relative_to(ROOT)
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        fail(f"{takes}, and that of {folder} does not ({type(error).__name__}: {one_line(error)})")
    return importlib.import_module(".".join(path.with_suffix("").parts))


def load_single(script: ModuleType, folder: Path) -> tuple[Any, list[Policy]]:
    """The arguments and the policy of a run of a single agent; exits with one sentence as --evaluate does."""
    args = script.Args(**read_args(script.Args, folder, "evaluate", script.LIMITS))
    envs = script.make_envs(args if args.vectorization == "native" else replace(args, vectorization="sync"), 1)
    agent, space = script.Agent(envs, args), envs.single_action_space
    load_model(folder, {"agent": agent})
    envs.close()
    policy = agent.policy() if hasattr(agent, "policy") else agent.act

    def act(obs: np.ndarray, masks: np.ndarray) -> np.ndarray:
        """What `step_envs` hands to the task."""
        taken, no = list[np.ndarray](), np.zeros(len(obs), dtype=bool)
        task: Any = SimpleNamespace(single_action_space=space, action_space=batch_space(space, len(obs)))
        task.step = lambda actions: (taken.append(actions), no, no, no, {})
        script.step_envs(task, policy(obs))
        return taken[0]

    return args, [Policy("", agent, len(agent.obs_rms.mean), (), space, act)]


def load_selfplay(script: ModuleType, folder: Path) -> tuple[Any, list[Policy]]:
    """The arguments and the policies of a self-play run, one a behaviour; exits with one sentence as --evaluate does."""
    from utils.team_env import PettingZooGames, Seat  # needs pettingzoo

    agents, _, args = script.load_run(folder, "evaluate")
    env, policies = script.make_env(args, 1), []
    for behavior, agent in agents.items():
        teams = [t for t, team in enumerate(env.teams) if team.behavior == behavior]
        team = env.teams[teams[0]]
        space, to_task = None, lambda action: action
        if not team.branches:
            space, to_task = Box(-1.0, 1.0, (team.action_dim,)), lambda action: action.clip(-1.0, 1.0)
        if not team.branches and isinstance(env, PettingZooGames):
            spaces = [env.envs[0].action_space(agent) for t in teams for agent in env.teams[t].agents]
            if all(other == spaces[0] for other in spaces):
                space, to_task = spaces[0], Seat(env.envs[0], env.teams, teams[0], 0).write_action

        def act(obs: np.ndarray, masks: np.ndarray, agent: Any = agent, to_task: Any = to_task) -> np.ndarray:
            return np.stack([to_task(action) for action in agent.act(obs, masks)])

        policies.append(Policy(behavior, agent, team.obs_dim, team.branches, space, act))
    env.close()
    return args, policies


def example_inputs(policy: Policy, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random inputs of n rows: observations as the statistics expect them, and masks with a legal action a branch."""
    mean, std = (x.numpy() for x in (policy.agent.obs_rms.mean, policy.agent.obs_rms.std))
    obs = {"obs": (mean + 2.0 * std * rng.standard_normal((n, policy.obs_dim))).astype(np.float32)}
    masks = [rng.random((n, size)) < rng.random((n, 1)) for size in policy.branches]
    for mask in masks:
        mask[np.arange(n), rng.integers(mask.shape[1], size=n)] = True
    return obs | ({"masks": np.concatenate(masks, axis=1)} if masks else {})


@torch.no_grad()
def largest_error(policy: Policy, session: Any, inputs: dict[str, np.ndarray]) -> float:
    """Largest difference between the exported actions and the script's, in the unit of `TOLERANCE`."""
    (found,) = session.run(None, inputs)
    masks = inputs.get("masks", np.ones((len(found), 0), dtype=bool))
    expected = policy.act(inputs["obs"], masks)
    if policy.space is not None:
        low, high = policy.space.low.astype(np.float64), policy.space.high.astype(np.float64)
        unit = np.maximum(0.5 * high - 0.5 * low, 0.03 * np.maximum(abs(low), abs(high)))  # 0.03: float32's rounding
        return float((abs(found - expected.astype(np.float64)) / np.maximum(unit, 1e-300)).max())
    logits, legal = policy.agent(torch.as_tensor(inputs["obs"])), torch.as_tensor(masks)
    log_probs = policy.agent.actor.log_probs(logits, legal)
    offsets = np.cumsum((0, *policy.branches))[:-1]  # equally likely actions may be exchanged
    likely, other = (log_probs.gather(1, torch.as_tensor(actions + offsets)) for actions in (expected, found))
    return float((likely - other).abs().max())


def export(folder: Path) -> list[Path]:
    """Writes model.onnx, or model_BEHAVIOR.onnx for each of several behaviours, into the run folder."""
    script = load_script(folder)
    args, policies = (load_selfplay if hasattr(script, "load_run") else load_single)(script, folder)
    rng, paths = np.random.default_rng(0), []
    for policy in policies:
        inputs, contents = example_inputs(policy, 2, rng), io.BytesIO()
        examples = tuple(torch.as_tensor(x) for x in inputs.values())
        names: dict[str, Any] = {"input_names": list(inputs), "output_names": ["actions"]}
        names["dynamic_axes"] = {name: {0: "batch"} for name in (*inputs, "actions")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the newer exporter may write weights into a second file
            torch.onnx.export(Exported(policy).eval(), examples, contents, dynamo=False, opset_version=17, **names)
        model = onnx.load_model_from_string(contents.getvalue())
        shapes = {name: ["batch", x.shape[1]] for name, x in inputs.items()}
        metadata = {"script": Path(str(script.__file__)).name, "env_id": args.env_id, "env_kwargs": args.env_kwargs}
        metadata |= {"behavior": policy.behavior, "inputs": json.dumps(shapes), "branches": json.dumps(policy.branches)}
        onnx.helper.set_model_props(model, metadata)
        onnx.checker.check_model(model, full_check=True)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        error = max(largest_error(policy, session, example_inputs(policy, n, rng)) for n in BATCH_SIZES)
        if not error <= TOLERANCE:
            raise SystemExit(f"error: the exported actions differ from the script's by {error:.1e}, and nothing is written")
        suffix = "_" + re.sub(r"[^\w.+-]", "-", policy.behavior) if len(policies) > 1 else ""
        paths.append(folder / f"model{suffix}.onnx")
        try:
            write_file(paths[-1], model.SerializeToString())
        except OSError as os_error:
            fail(f"FOLDER takes a run folder that can be written, and {folder} cannot ({one_line(os_error)})")
        print(f"{paths[-1]}: largest difference from the script's actions {error:.1e}")
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m utils.export", description="Writes a run's policy as ONNX.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="run folder, where model.onnx is written")
    export(parser.parse_args().folder)
