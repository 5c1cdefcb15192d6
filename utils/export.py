"""Writes the policy of a run as an ONNX file, which needs no PyTorch: `python -m utils.export runs/FOLDER`.

Observation normalisation is inside. Actions are deterministic and in the units of the task. The file is checked against
the script's own policy in ONNX Runtime before it is written. A policy with memory takes its memory as an input and
returns it as an output. `docs/export.md` describes inputs, outputs and metadata.
"""

import argparse
import json
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space
from torch import Tensor, nn

from utils.run import draw_without_a_screen, fail, load_model, load_script, one_line, read_args, write_file

try:
    import onnx
    import onnxruntime
except ImportError as error:
    fail(f"utils.export needs onnx and onnxruntime: pip install -r requirements-onnx.txt ({one_line(error)})")

TOLERANCE = 1e-5  # of half the range of an action; for discrete actions of the log-probability
MAX_TOLERANCE = 1e-3  # where an action depends much on rounding
NUM_STEPS = 20  # a policy with memory is compared over so many
Play = Callable[[dict[str, np.ndarray]], list[np.ndarray]]  # what ONNX Runtime makes of inputs


def error_limit(act: Callable[[np.ndarray], np.ndarray], obs: np.ndarray, rng: np.random.Generator) -> float:
    """TOLERANCE, or ten times what the last bits of the observations change, but at most MAX_TOLERANCE.

    `act` gives the script's actions. The last bits go up or down by chance, ten times: if all went up, layers that
    take differences would hide most of the change.
    """
    expected = act(obs)
    nudged = (np.nextafter(obs, rng.choice(np.array([-np.inf, np.inf], np.float32), obs.shape)) for _ in range(10))
    rounding = max(float(abs(act(x) - expected).max()) for x in nudged)
    return min(MAX_TOLERANCE, max(TOLERANCE, 10.0 * rounding))


class Recorded(Exception):
    """Ends `step_envs` where it would step environments."""


class Recorder:
    """Takes the place of environments, and keeps the actions that `step_envs` of a script gives them."""

    def __init__(self, space: Box, num_envs: int) -> None:
        self.single_action_space, self.action_space = space, batch_space(space, num_envs)

    def step(self, actions: np.ndarray) -> NoReturn:
        """Keeps the actions, in the task's units."""
        self.actions = actions
        raise Recorded


class Policy(nn.Module):
    """The exported part of a behaviour: maps raw observations (and masks of discrete actions) to the task's actions.

    `space` are the task's actions; None if they are discrete, with these branches.
    """

    outputs: tuple[str, ...] = ("actions",)

    def __init__(self, agent: Any, space: Box | None, branches: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.agent, self.space, self.branches = agent, space, branches
        self.step_envs: Callable[..., Any] | None = None  # the script's, if it has one

    def forward(self, obs: Tensor, masks: Tensor | None = None) -> Tensor:
        """(n, obs_dim), (n, sum of branches) to (n, *shape of an action), or one integer a branch (n, num_branches)."""
        if hasattr(self.agent.actor, "sample"):  # self-play
            actions = self.agent.actor.sample(self.agent(obs), masks, 0.0)
        else:
            result = self.agent.actor(self.agent.normalize(obs))
            actions = result[0] if isinstance(result, tuple) else result  # mean and log standard deviation, or actions
            if isinstance(result, tuple) and not hasattr(self.agent, "policy"):  # SAC; an agent of PPO has `policy`
                actions = actions.tanh()
        return actions if self.space is None else self.to_task(actions)

    def to_task(self, actions: Tensor) -> Tensor:
        """Box actions (n, action_dim) in [-1, 1] to the task's units (n, *shape of an action)."""
        assert self.space is not None
        low, high = (torch.as_tensor(bound, dtype=torch.float64) for bound in (self.space.low, self.space.high))
        shares = 0.5 * (actions.double().clamp(-1.0, 1.0).reshape(-1, *low.shape) + 1.0)
        values = torch.minimum(torch.maximum(low * (1.0 - shares) + high * shares, low), high)
        return values if self.space.dtype == np.float64 else values.float()

    def act(self, obs: np.ndarray, masks: np.ndarray) -> np.ndarray:
        """The same by the script's own code for evaluation, but with Box actions as `step_envs` takes them."""
        if self.space is None:
            return self.agent.act(obs, masks)
        inputs = (obs, masks) if hasattr(self.agent.actor, "sample") else (obs,)
        actions = (self.agent.policy() if hasattr(self.agent, "policy") else self.agent.act)(*inputs)
        return actions.reshape(-1, *self.space.shape)

    def examples(self, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Random inputs of n rows: observations as the statistics expect them, a legal action or more in a branch."""
        mean, std = self.agent.obs_rms.mean.numpy(), self.agent.obs_rms.std.numpy()
        inputs = {"obs": (mean + 2.0 * std * rng.standard_normal((n, len(mean)))).astype(np.float32)}
        masks = [rng.random((n, size)) < rng.random((n, 1)) for size in self.branches]
        for mask in masks:
            mask[np.arange(n), rng.integers(mask.shape[1], size=n)] = True
        return inputs | ({"masks": np.concatenate(masks, axis=1)} if masks else {})

    @torch.no_grad()
    def error(self, play: Play, n: int, rng: np.random.Generator) -> tuple[float, float]:
        """The largest difference of exported actions for n random inputs from the script's, and its limit.

        Its unit is that of TOLERANCE. For Box actions the limit depends on rounding: see `error_limit`.
        """
        inputs = self.examples(n, rng)
        found, obs, legal = play(inputs)[0], inputs["obs"], inputs.get("masks", np.ones((n, 0), dtype=bool))
        expected = self.act(obs, legal)
        if self.space is None:
            log_probs = self.agent.actor.log_probs(self.agent(torch.as_tensor(obs)), torch.as_tensor(legal))
            offsets = np.cumsum((0, *self.branches))[:-1]  # equally likely actions may be exchanged
            likely, other = (log_probs.gather(1, torch.as_tensor(x + offsets)) for x in (expected, found))
            return float((likely - other).abs().max()), TOLERANCE
        return self.difference(found, expected), error_limit(lambda x: self.act(x, legal).clip(-1.0, 1.0), obs, rng)

    def difference(self, found: np.ndarray, expected: np.ndarray) -> float:
        """The largest difference of actions in the task's units from those of `act`, in half their range."""
        assert self.space is not None
        center, half = (0.5 * self.space.high.astype(float) + sign * 0.5 * self.space.low for sign in (1, -1))
        unit = np.maximum(half, 0.03 * abs(center)) + (half == 0.0)  # 0.03: float32 rounds an action far from 0
        own = center + half * expected.clip(-1.0, 1.0)
        if self.step_envs is not None:
            envs = Recorder(self.space, len(expected))
            with suppress(Recorded):
                self.step_envs(envs, expected)
            own = envs.actions
        return float((abs(found - own) / unit).max())


class PolicyWithMemory(Policy):
    """The same of a policy with memory, which also takes the last reward and what it remembers.

    That is its last action in [-1, 1] and the state of its LSTM or GRU, side by side (n, memory_dim). At an episode's
    beginning both are zero. `remember` is the script's.
    """

    outputs = ("actions", "next_memory")

    def __init__(self, agent: Any, space: Box, remember: Callable[..., np.ndarray]) -> None:
        super().__init__(agent, space)
        self.remember, self.action_dim = remember, int(np.prod(space.shape))

    def forward(self, obs: Tensor, rewards: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(n, obs_dim), (n,), (n, memory_dim) to (n, *shape of an action), (n, memory_dim)."""
        past, state = memory.tensor_split([self.action_dim], dim=1)
        features, state = self.agent.actor_memory.advance(self.agent.inputs(obs, past, rewards)[None], state)
        actions = self.agent.actor(features[0])[0].tanh()
        return self.to_task(actions), torch.cat([actions, state], dim=1)

    def examples(self, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Random observations and rewards of n rows, and the memory of episodes that begin."""
        memory = np.zeros((n, self.action_dim + self.agent.actor_memory.state_dim), dtype=np.float32)
        rewards = rng.standard_normal(n).astype(np.float32)
        return super().examples(n, rng) | {"rewards": rewards, "memory": memory}

    def error(self, play: Play, n: int, rng: np.random.Generator) -> tuple[float, float]:
        """The same over NUM_STEPS steps of n episodes, of which the first one ends halfway. Compares memories, too."""
        steps = [self.examples(n, rng) for _ in range(NUM_STEPS)]
        obs, rewards = (np.stack([step[name] for step in steps]) for name in ("obs", "rewards"))
        dones = (np.arange(NUM_STEPS)[:, None] == NUM_STEPS // 2) & (np.arange(n) == 0)
        expected = self.remembered(obs, rewards, dones)
        error, last_rewards, memory = 0.0, np.zeros_like(rewards[0]), steps[0]["memory"]
        for t in range(NUM_STEPS):
            actions, memory = play({"obs": obs[t], "rewards": last_rewards, "memory": memory})
            own = expected[t, :, : self.action_dim].reshape(actions.shape)
            error = float(np.max([error, self.difference(actions, own), abs(memory - expected[t]).max()]))
            last_rewards, memory = rewards[t] * ~dones[t], memory * ~dones[t, :, None]
        return error, error_limit(lambda x: self.remembered(x, rewards, dones), obs, rng)

    def remembered(self, obs: np.ndarray, rewards: np.ndarray, dones: np.ndarray) -> np.ndarray:
        """Memories (steps, n, memory_dim) after these steps by the script's own code for evaluation."""
        memories, memory = [], self.agent.forget(obs.shape[1])
        for t in range(len(obs)):
            actions, states = self.agent.act(obs[t], memory)  # the critics' states stand behind the actor's
            memory = self.remember(actions, rewards[t], states, dones[t])
            memories.append(np.concatenate([actions, states[:, : self.agent.actor_memory.state_dim]], axis=1))
        return np.stack(memories)


class PolicyOfPictures(Policy):
    """The same of a policy that sees pictures: stacks of bytes, scaled as `Pixels` of the script does it."""

    def forward(self, obs: Tensor, masks: Tensor | None = None) -> Tensor:
        """Bytes (n, obs_dim) to (n, *shape of an action)."""
        return self.to_task(self.act_on(self.agent.normalize(obs)))

    def act_on(self, pictures: Tensor) -> Tensor:
        """Pictures as the encoder takes them to actions (n, action_dim) in [-1, 1]."""
        return self.agent.actor(self.agent.encoder(pictures))[0].tanh()

    def examples(self, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Random bytes of n rows."""
        obs_dim = int(np.prod(self.agent.encoder.shape))
        return {"obs": rng.integers(256, size=(n, obs_dim), dtype=np.uint8)}

    @torch.no_grad()
    def error(self, play: Play, n: int, rng: np.random.Generator) -> tuple[float, float]:
        """The same. Bytes have no last bit, so the limit is of the last bits of normalised pictures."""
        inputs = self.examples(n, rng)
        expected = self.act(inputs["obs"], np.ones((n, 0), dtype=bool))
        pictures = self.agent.normalize(torch.as_tensor(inputs["obs"])).numpy()
        limit = error_limit(lambda x: self.act_on(torch.as_tensor(x)).numpy(), pictures, rng)
        return self.difference(play(inputs)[0], expected), limit


def load_single(script: ModuleType, folder: Path) -> tuple[Any, dict[str, Policy]]:
    """The arguments and the policy of a run of a single agent; exits with one sentence if there is none."""
    args = read_args(script.Args, folder, "FOLDER", script.LIMITS)
    if hasattr(script, "Pixels"):
        draw_without_a_screen()
    envs = script.make_envs(args if args.vectorization == "native" else replace(args, vectorization="sync"), 1)
    agent = script.Agent(envs, args)
    load_model(folder, {"agent": agent}, "FOLDER")
    envs.close()
    space = envs.single_action_space
    policy = Policy(agent, space)
    if hasattr(script, "Pixels"):
        policy = PolicyOfPictures(agent, space)
    if hasattr(script, "remember"):
        policy = PolicyWithMemory(agent, space, script.remember)
    policy.step_envs = script.step_envs
    return args, {"": policy}


def load_selfplay(script: ModuleType, folder: Path) -> tuple[Any, dict[str, Policy]]:
    """The arguments and the policies of a self-play run, by behaviour; exits with one sentence if there is none."""
    from utils.team_env import PettingZooGames  # needs pettingzoo

    agents, pools, args = script.load_run(folder, "FOLDER")
    env, policies = script.make_env(args, 1), {}
    for behavior, agent in agents.items():
        agent.load_state_dict(pools[behavior].latest.weights, strict=False)  # older, if the run was stopped
        teams = [team for team in env.teams if team.behavior == behavior]
        space, branches = Box(-1.0, 1.0, (teams[0].action_dim,)), teams[0].branches
        if isinstance(env, PettingZooGames):
            spaces = [env.envs[0].action_space(name) for team in teams for name in team.agents]
            space = spaces[0] if all(other == spaces[0] for other in spaces) else space
        policies[behavior] = Policy(agent, None if branches else space, branches)
    env.close()
    return args, policies


def to_onnx(policy: Policy, metadata: dict[str, str]) -> tuple[bytes, float, float]:
    """The ONNX file of a policy, its largest error and the limit of that; ends the program if an error is over it."""
    rng, outputs = np.random.default_rng(0), list(policy.outputs)
    inputs = policy.examples(3, rng)
    names: dict[str, Any] = {"input_names": list(inputs), "output_names": outputs}
    names["dynamic_axes"] = {name: {0: "batch"} for name in (*inputs, *outputs)}
    tensors = tuple(torch.as_tensor(x) for x in inputs.values())
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # that this exporter is old: the new one writes a second file for the weights
        torch.onnx.export(policy, tensors, f"{folder}/model.onnx", dynamo=False, opset_version=17, **names)
        model = onnx.load(f"{folder}/model.onnx")
    shapes = {name: ["batch", *x.shape[1:]] for name, x in inputs.items()}
    metadata |= {"inputs": json.dumps(shapes), "branches": json.dumps(policy.branches)}
    onnx.helper.set_model_props(model, metadata)
    onnx.checker.check_model(model, full_check=True)
    file = model.SerializeToString()
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    errors = [policy.error(lambda inputs: session.run(outputs, inputs), n, rng) for n in (1, 2, 33)]
    error, limit = map(max, zip(*errors, strict=True))
    if not all(error <= limit for error, limit in errors):
        differ = f"the exported actions differ from those of {metadata['script']} by {error:.1e}"
        raise SystemExit(f"error: {differ}; if it acts in a way of its own, see Change it in docs/export.md")
    return file, error, limit


def export(folder: Path) -> None:
    """Writes model.onnx into the run folder, or model_BEHAVIOR.onnx for each of several behaviours."""
    script = load_script("FOLDER", folder)
    args, policies = (load_selfplay if hasattr(script, "load_run") else load_single)(script, folder)
    task = {"script": Path(str(script.__file__)).name, "env_id": args.env_id, "env_kwargs": args.env_kwargs}
    task["observe"] = ",".join(str(int(x)) for x in getattr(args, "observe", "").split(",") if x)  # JSON has no 02
    pictures = {name: getattr(args, name, None) for name in ("frame_size", "frame_stack", "grey", "action_repeat")}
    task["pictures"] = json.dumps(pictures) if pictures["frame_size"] else ""
    # All files are checked before one is written.
    files = {behavior: to_onnx(policy.eval(), task | {"behavior": behavior}) for behavior, policy in policies.items()}
    names = {behavior: "_" + re.sub(r"[^\w.+-]", "-", behavior) if len(files) > 1 else "" for behavior in files}
    if len(set(names.values())) < len(files):
        fail(f"FOLDER takes a run whose behaviours have different names as files, and {', '.join(files)} have not")
    for behavior, (file, error, limit) in files.items():
        path = folder / f"model{names[behavior]}.onnx"
        try:
            write_file(path, file)
        except OSError as os_error:
            fail(f"FOLDER takes a run folder that can be written, and {folder} cannot ({one_line(os_error)})")
        print(f"{path}: the largest difference from the actions of {task['script']} is {error:.1e}, limit {limit:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m utils.export", description="Writes a run's policy as ONNX.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="run folder; model.onnx is written there")
    export(parser.parse_args().folder)
