"""Every file in variants/: a sibling of its script, a command that works from any folder, and runs that resume.

The losses of a variant are tested at the end of this file, against its paper.
"""

import copy
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import test_sac_pixels  # noqa: F401 (registers its tasks)
import test_sac_rewards  # noqa: F401 (likewise)
import torch
from conftest import assert_same_weights, load_file, load_weights
from gymnasium.utils.seeding import np_random
from gymnasium.vector import AutoresetMode
from test_checkpoints import LIVELY, assert_same, everything, kill, only_run, run, start, wait_for
from test_sac_update import Reference, make_optimizers, squashed
from test_siblings import ROOT, SCRIPTS, STAND_IN, count_changed_lines, definitions, source, without_stand_in
from torch import Tensor, nn
from toy_envs import make_vector

import sac_continuous

VARIANTS = sorted(path.stem for path in (ROOT / "variants").glob("*.py"))
# Functions and classes of the script's names that differ: what a comparison with the script is to show.
MAY_DIFFER = {
    "sac_value_network": {"Args", "Agent", "compute_td_target", "compute_qf_loss", "compute_actor_loss"}
    | {"compute_alpha_loss", "compute_qf_gradient", "update"},
    "sac_recurrent": {
        "Args",
        "check_args",
        "make_env",
        "NormalActor",
        "TwinQNetwork",
        "Agent",
        "ReplayBuffer",
        "update",
    }
    | {"compute_td_target", "compute_actor_loss", "compute_qf_gradient", "compute_actor_gradient", "evaluate", "main"},
    "sac_rewards": {"Args", "check_args", "TwinQNetwork", "Agent", "compute_td_target", "compute_qf_loss"}
    | {"ReplayBuffer", "compute_actor_loss", "compute_qf_gradient", "update", "main"},
    "sac_ray": {"Args", "check_args", "RunningMeanStd", "main"},
    "sac_crossq": {"Args", "NormalActor", "TwinQNetwork", "Agent", "compute_td_target", "compute_qf_loss", "main"}
    | {"compute_actor_loss", "compute_qf_gradient", "update"},
    "sac_pixels": {
        "Args",
        "check_args",
        "make_env",
        "make_envs",
        "Agent",
        "ReplayBuffer",
        "compute_td_target",
        "update",
    }
    | {"compute_qf_gradient", "compute_actor_gradient", "evaluate", "main"},
}
OWN_SECTIONS = {"sac_ray": {"Rollout worker", "Tester", "Learner"}}  # its parts
OWN_FLAGS: dict[str, dict[str, Any]] = {  # of a short run
    "sac_recurrent": {"sequence_length": 8, "hidden_size": 8, "batch_size": 4},
    "sac_ray": {"num_workers": 1, "rollout_steps": 5, "num_buffer_shards": 2},
    "sac_pixels": {"frame_size": 20, "batch_size": 4, "action_repeat": 20},
}
ACTOR_STEPS = {"sac_crossq": 16}  # of 31 updates with --policy-frequency 2: one in every second; 32: two
# No run of these equals another: the weights that a rollout is made with depend on how fast each process is.
ASYNCHRONOUS = {"sac_ray"}  # tests/test_sac_ray.py kills and resumes it


def load_script(name: str) -> ModuleType:
    """The module of a file in variants/, which is no package."""
    return load_file(ROOT / "variants" / f"{name}.py", name)


def parent_of(name: str) -> str:
    """The script that a variant comes from: the first one that its docstring names."""
    docstring = source(f"variants/{name}").split('"""')[1]
    named = [word for word in re.findall(r"\b(\w+)\.py", docstring) if word in SCRIPTS]
    assert named, f"the docstring of variants/{name}.py must name the script that it comes from"
    return named[0]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Each in turn."""
    return request.param


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder of its own."""
    monkeypatch.chdir(tmp_path)


def words(name: str, **flags: Any) -> list[str]:
    """The command line of a short run, with everything that has a state."""
    known = {field.name for field in fields(load_script(name).Args)}
    line = ["--no-cuda"] + ["--no-compile"] * ("compile" in known)
    for flag, value in (LIVELY[parent_of(name)] | OWN_FLAGS.get(name, {}) | flags).items():
        if flag not in known:  # a flag of the script that the variant has not
            continue
        flag = flag.replace("_", "-")
        line += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return line


def test_sections(variant: str) -> None:
    """The banners of the script, without the stand-in, and those that are listed."""
    one, other = (re.findall(r"^# === (.*?) =+$", source(x), re.M) for x in (f"variants/{variant}", parent_of(variant)))
    own = OWN_SECTIONS.get(variant, set())
    assert [section for section in one if section not in own] == [section for section in other if section != STAND_IN]
    assert own <= set(one)


def test_shared_code_is_the_same_to_the_letter(variant: str) -> None:
    """Functions and classes of one name are equal, and those that differ are listed."""
    own, other = definitions(f"variants/{variant}"), definitions(parent_of(variant))
    found = {name for name in own.keys() & other.keys() if own[name] != other[name]}
    assert found == MAY_DIFFER.get(variant, set()), f"MAY_DIFFER of {variant} would be {sorted(found)}"


def test_a_variant_is_explained(variant: str) -> None:
    """It has a row in README's table, which links to the page that explains it."""
    page = re.search(rf"^\| \[`variants/{variant}\.py`\].*\]\((docs/\w+\.md)", (ROOT / "README.md").read_text(), re.M)
    assert page, f"README.md has no row for variants/{variant}.py"
    assert f"variants/{variant}.py" in (ROOT / page[1]).read_text()


# The aim is 100 lines more than the script without its stand-in. What these have more is listed in CONTRIBUTING.md.
MAX_MORE_LINES = {"sac_pixels": 136, "sac_recurrent": 140, "sac_rewards": 155, "sac_ray": 180}


def test_sizes(variant: str, tmp_path: Path) -> None:
    """A variant is its script and one idea."""
    own, other = (len(without_stand_in(name).splitlines()) for name in (f"variants/{variant}", parent_of(variant)))
    more = own - other
    assert more <= MAX_MORE_LINES.get(variant, 100), f"{variant} has {more} lines more than its script"
    assert count_changed_lines((parent_of(variant), f"variants/{variant}"), tmp_path) <= 400


def test_the_functions_that_main_compiles_take_its_example(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls the plain functions with the example that `main` gives `compiled`: most tests have `--no-compile`."""
    script = load_script(variant)
    if variant in ASYNCHRONOUS or not hasattr(script, "compiled"):
        pytest.skip("compiles nothing in this process")
    called: list[str] = []

    def call(function: Callable[..., Any], *example: Any) -> Callable[..., Any]:
        function(*example)
        called.append(function.__name__)
        return function

    monkeypatch.setattr(script, "compiled", call)
    line = [word for word in words(variant, total_timesteps=66, eval_freq=0) if word != "--no-compile"]
    script.main(script.parse_args(script.Args, line))
    assert called


def test_help(variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It lists every argument with its explanation."""
    script = load_script(variant)
    with pytest.raises(SystemExit) as exit_info:
        script.parse_args(script.Args, ["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"--{name.replace('_', '-')}\b", text) for name in vars(script.Args()))


def command(folder: str, script: str, *flags: str) -> str:
    """What `python script flags` prints in this folder."""
    line = [sys.executable, script, *flags]
    result = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout


@pytest.mark.slow
def test_commands(variant: str, tmp_path: Path) -> None:
    """Training from the repository's folder, and the evaluation that it suggests, from another folder."""
    for name in ("utils", "variants"):  # a copy of the repository, so that the run folder is not in the real one
        shutil.copytree(ROOT / name, f"repository/{name}")
    os.mkdir("elsewhere")
    script, tiny = f"variants/{variant}.py", words(variant, total_timesteps=300, checkpoint_freq=0)
    printed = command("repository", script, *tiny)
    (folder,) = Path("repository/runs").iterdir()
    assert (folder / "model.pt").exists()
    (result,) = re.findall(r"^evaluation: .*$|^scores: .*$", printed, re.MULTILINE)
    (suggested,) = re.findall(rf"python {script} --evaluate (\S+)", printed)
    assert Path("repository", suggested) == folder
    far = str(tmp_path / "repository" / script)
    assert result in command("elsewhere", far, "--evaluate", str(tmp_path / folder)).splitlines()


@pytest.mark.slow
def test_a_killed_run_goes_on(variant: str) -> None:
    """Bit for bit: checkpoint, model, buffer and curves of the resumed run equal those of the uninterrupted one."""
    if variant in ASYNCHRONOUS:
        pytest.skip("it goes on, but not bit for bit")
    script, argv = load_script(variant), words(variant, total_timesteps=450)
    assert run(script, *argv) == 0, Path("out.txt").read_text()
    calm = everything(only_run())
    only_run().rename("calm")
    pid = start(script, *argv)
    wait_for(pid, lambda: list(Path("runs").glob("*/checkpoint.previous.pt")))
    kill(pid)
    assert not torch.load(next(only_run().glob("checkpoint.p*")), weights_only=True)["is_finished"]
    assert run(script, "--resume", str(only_run())) == 0, Path("out.txt").read_text()
    assert "resuming from step" in Path("out.txt").read_text()
    assert_same(calm, everything(only_run()))


# --- what a run does, and how it begins ---

IN_ONE_PROCESS = [name for name in VARIANTS if name not in ASYNCHRONOUS]
OF_SAC = [name for name in IN_ONE_PROCESS if parent_of(name) == "sac_continuous"]


@pytest.mark.parametrize("name", OF_SAC)
def test_a_run_of_a_variant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores what happened; acts with noise; draws a minibatch for each update; counts actor steps and statistics."""
    script = load_script(name)
    stored: list[tuple[np.ndarray, ...]] = []
    happened: list[tuple[np.ndarray, ...]] = []
    noise: list[Tensor] = []
    drawn: set[tuple[float, ...]] = set()
    made: list[tuple[float, ...]] = []
    steps: dict[str, int] = {}
    rates: dict[str, float] = {}
    add, act, step_envs, update = script.ReplayBuffer.add, script.Agent.act, script.step_envs, script.update

    def spy_add(buffer: Any, *columns: np.ndarray) -> None:
        first = name == "sac_pixels"  # the first column is other there
        stored.append(tuple(np.array(x) for x in columns[first + 1 : first + 5]))
        add(buffer, *columns)

    def spy_step(envs: Any, actions: np.ndarray) -> Any:
        result = step_envs(envs, actions)
        happened.append((actions.copy(), result[2].copy(), result[1].copy(), result[3].copy()))
        return result

    def spy_act(agent: Any, *inputs: Any) -> Any:
        noise.extend(x for x in inputs if isinstance(x, Tensor))
        return act(agent, *inputs)

    def spy_update(agent: Any, optimizers: Any, batch: tuple[Tensor, ...], *rest: Any) -> Any:
        drawn.add(tuple(batch[1].flatten().tolist()))
        metrics = update(agent, optimizers, batch, *rest)
        steps.update({group: int(optimizer.num_steps) for group, optimizer in optimizers.items()})
        rates.update({group: optimizer.lr for group, optimizer in optimizers.items()})
        return metrics

    class Spy(script.Adam):  # type: ignore[name-defined]
        def __init__(self, parameters: Any, *settings: float) -> None:
            made.append(settings)
            super().__init__(parameters, *settings)

    for place, attribute, spy in (
        (script.ReplayBuffer, "add", spy_add),
        (script.Agent, "act", spy_act),
        (script, "step_envs", spy_step),
        (script, "update", spy_update),
        (script, "Adam", Spy),
    ):
        monkeypatch.setattr(place, attribute, spy)
    flags: dict[str, Any] = {"env_id": "toy_envs:Counting-v0", "total_timesteps": 120, "checkpoint_freq": 0}
    flags |= {"updates_per_step": 0.52, "policy_frequency": 2, "policy_lr": 1e-4, "q_lr": 2e-4, "alpha_lr": 3e-4}
    flags |= {"autotune": True, "anneal_lr": True}
    flags |= {"env_id": "test_sac_pixels:Slides-v0", "action_repeat": 1} if name == "sac_pixels" else {}
    script.main(script.parse_args(script.Args, words(name, **flags, eval_freq=0)))
    assert len(stored) == 40  # three environments
    for columns, expected in zip(stored, happened, strict=False):
        for column, x in zip(columns, expected, strict=True):
            np.testing.assert_array_equal(column, x)
    assert any(columns[3].any() for columns in stored)
    acted = torch.stack(noise)
    assert acted.shape == (40 if name == "sac_recurrent" else 20, 3, 1)  # memories move on from the first step
    assert len(acted.unique()) == acted.numel()
    assert len(drawn) == 31
    optimized = [group for group in ("policy", "q", "alpha") if hasattr(script.Args, f"{group}_lr")]
    assert steps == dict.fromkeys(optimized, ACTOR_STEPS.get(name, 32)) | {"q": 31}
    beta1 = 0.5 if name == "sac_crossq" else 0.9
    assert made == [(flags[f"{group}_lr"], beta1, 0.999, 1e-8) for group in optimized]
    last = 1.0 - 117 / 120  # of the last three steps
    ends = {"policy": 1e-4 * last, "q": 2e-4 * last, "alpha": 3e-4}
    assert rates == pytest.approx({group: ends[group] for group in optimized})
    if name != "sac_pixels":
        assert load_weights(only_run())["obs_rms.count"] == 120


@pytest.mark.parametrize("name", OF_SAC)
def test_the_target_entropy_counts_action_dimensions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minus the scale times two, in a task with two of them."""
    script, seen = load_script(name), set[float]()
    compute_alpha_loss = script.compute_alpha_loss

    def spy(agent: Any, log_prob: Tensor, target_entropy: float) -> Any:
        seen.add(target_entropy)
        return compute_alpha_loss(agent, log_prob, target_entropy)

    monkeypatch.setattr(script, "compute_alpha_loss", spy)
    task = "test_sac_pixels:WideSlides-v0" if name == "sac_pixels" else "toy_envs:Nested-v0"
    flags = {"env_id": task, "autotune": True, "target_entropy_scale": 0.75, "total_timesteps": 120, "eval_freq": 0}
    script.main(script.parse_args(script.Args, words(name, **flags)))
    assert seen == {-1.5}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_the_discount_reaches_the_losses(name: str) -> None:
    """Another value gives other weights."""
    script, weights = load_script(name), []
    for value in (0.5, 0.9):
        assert run(script, *words(name, total_timesteps=200, gamma=value)) == 0, Path("out.txt").read_text()
        weights.append(load_weights(only_run()))
        only_run().rename(str(value))
    critics = [key for key in weights[0] if key.startswith(("qf.", "critic."))]
    assert not all(weights[0][key].equal(weights[1][key]) for key in critics)


@pytest.mark.parametrize("name", ["sac_continuous", *OF_SAC])
def test_how_an_agent_begins(name: str) -> None:
    """Targets are copies, the entropy coefficient is --alpha, and the log standard deviation is in [-20, 2]."""
    script: Any = sac_continuous if name == "sac_continuous" else load_script(name)
    task = "test_sac_pixels:Slides-v0" if name == "sac_pixels" else "toy_envs:Counting-v0"
    args = script.Args(env_id=task, **({"alpha": 0.3} if hasattr(script.Args, "alpha") else {}))
    agent = script.Agent(script.make_envs(args, 1), args)
    assert not hasattr(agent, "log_alpha") or agent.log_alpha.exp().item() == pytest.approx(0.3)
    state = agent.state_dict()
    targets = [key for key in state if "_target" in key.split(".")[0]]
    assert len(targets) > 0 or name == "sac_crossq"
    assert all(torch.equal(state[key], state[key.replace("_target", "", 1)]) for key in targets)
    layers = [layer for layer in agent.actor.modules() if isinstance(layer, nn.Linear)]
    inputs = torch.zeros(1, layers[0].in_features)
    for bias, expected in ((100.0, 2.0), (1.5, 1.5), (-19.0, -19.0), (-100.0, -20.0)):
        layers[-1].weight.data.zero_()
        layers[-1].bias.data.fill_(bias)
        if isinstance(result := agent.actor(inputs), tuple):  # else the policy is deterministic
            assert tuple(x.item() for x in result) == (bias, expected)


def draw() -> tuple[float, float, float]:
    """One number of each of the random streams that all code of a process shares."""
    return random.random(), np.random.random(), torch.rand(()).item()


@pytest.mark.parametrize("name", ["sac_continuous", *IN_ONE_PROCESS])
def test_a_task_that_draws_shared_random_numbers_in_an_evaluation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training draws the same numbers afterwards, and another evaluation draws those of this one."""
    script: Any = sac_continuous if name == "sac_continuous" else load_script(name)
    task = "test_sac_pixels:UnevenSlides-v0" if name == "sac_pixels" else "test_sac_rewards:Uneven-v0"
    args = script.Args(env_id=task, eval_episodes=4)
    agent = script.Agent(script.make_envs(args, 1), args)
    step_envs = script.step_envs
    returns: list[Any] = []

    def luck(*x: Any) -> tuple[np.ndarray, ...]:
        obs, final_obs, rewards, *ends = step_envs(*x)
        return obs, final_obs, rewards + sum(draw()), *ends

    def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr(script, "step_envs", luck)
    after = []
    for seed, evaluate in ((1, script.evaluate), (1, nothing), (2, script.evaluate)):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        returns.append(evaluate(agent, args, Path(), "test"))
        after.append(draw())
    assert after[0] == after[1] != after[2]
    assert returns[0] == returns[2]


@pytest.mark.parametrize("name", ["sac_continuous", *IN_ONE_PROCESS])
def test_an_evaluation_counts_each_episode_to_its_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes of 2 to 8 steps, whatever the policy does: the first one of each environment, and nothing after it."""
    script: Any = sac_continuous if name == "sac_continuous" else load_script(name)
    is_pixels = name == "sac_pixels"
    task = "test_sac_pixels:UnevenSlides-v0" if is_pixels else "test_sac_rewards:Uneven-v0"
    args = script.Args(env_id=task, eval_episodes=4, seed=3)
    agent = script.Agent(script.make_envs(args, 1), args)
    lengths = [np_random(1_000_012 + i)[0].integers(2, 9) for i in range(4)]
    returns = [n * (n + 1) / 2 for n in lengths]  # rewards 1, 2, 3, ...
    assert len(set(lengths)) > 1
    step_envs, over = script.step_envs, np.zeros(4, dtype=bool)

    def step(*x: Any) -> tuple[np.ndarray, ...]:
        """What comes after the first episode is not a number."""
        obs, final_obs, rewards, terminations, truncations = step_envs(*x)
        rewards[over] = np.nan
        over[terminations | truncations] = True
        return obs, final_obs, rewards, terminations, truncations

    monkeypatch.setattr(script, "step_envs", step)
    metrics = script.evaluate(agent, args, Path(), "test")
    expected = {"eval/return_mean": np.mean(returns), "eval/return_std": np.std(returns)}
    assert metrics == pytest.approx(expected | {"eval/length_mean": np.mean(lengths)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sac_value_network", "sac_rewards"])
def test_evaluations_leave_the_training_alone(name: str) -> None:
    """A run with many evaluations saves the agent of a run without; the other variants have tests of their own."""
    for eval_freq in (30, 0):
        assert run(load_script(name), *words(name, total_timesteps=300, eval_freq=eval_freq)) == 0
        only_run().rename(f"every {eval_freq}")
    assert_same_weights(Path("every 30"), Path("every 0"))


@pytest.mark.parametrize("name", ["sac_value_network", "sac_rewards", "sac_crossq", "sac_recurrent"])
def test_the_normalisation_is_shared(name: str) -> None:
    """With --norm-obs, gradients on raw observations are those without it on observations normalised by hand.

    The streams of rewards have statistics of their own, and take raw observations.
    """
    script = load_script(name)
    flags = {"streams": "extrinsic,rnd:0"} if name == "sac_rewards" else {}
    args = [script.Args(env_id="toy_envs:Counting-v0", norm_obs=norm_obs, **flags) for norm_obs in (True, False)]
    torch.manual_seed(0)
    agent, plain = (script.Agent(script.make_envs(x, 1), x) for x in args)
    agent.obs_rms.update(torch.randn(100, 2) * 3 + 5)
    plain.load_state_dict(agent.state_dict())
    shape = (6, 5) if name == "sac_recurrent" else (16,)
    obs, next_obs = torch.randn(2, *shape, 2) * 3 + 5
    other = torch.rand(*shape, 1), torch.randn(shape)
    ends: tuple[Tensor, ...] = (torch.zeros(shape),)
    ends += (torch.ones(*shape, agent.forget(1).shape[1]),) if name == "sac_recurrent" else ()  # what is remembered
    mean, std = agent.obs_rms.mean, (agent.obs_rms.var + 1e-8).sqrt()
    by_hand = ((x - mean) / std for x in (obs, next_obs))
    pairs, twice = ((obs, next_obs), tuple(x.float() for x in by_hand)), name == "sac_rewards"  # final_obs and next_obs
    raw, normalized = ((o, *other, n, *ends, *([n] * twice)) for o, n in pairs)
    noise, size = torch.randn(*shape, 1), sum(x.numel() for x in agent.qf.parameters())
    size = size if name == "sac_rewards" else None  # the streams' networks come after the critics
    for function in (script.compute_qf_gradient, script.compute_actor_gradient):
        found, expected = (
            function(copy.deepcopy(a), b, noise, args[0])[0] for a, b in ((agent, raw), (plain, normalized))
        )
        torch.testing.assert_close(found[:size], expected[:size], rtol=1e-4, atol=1e-6)
        assert not torch.equal(found[:size], function(copy.deepcopy(plain), raw, noise, args[0])[0][:size])
    if name == "sac_rewards":
        found, expected = (script.compute_qf_gradient(a, raw, noise, args[0])[0][size:] for a in (agent, plain))
        torch.testing.assert_close(found, expected)


# --- sac_value_network ---


class ValueReference(Reference):
    """Algorithm 1 of Haarnoja et al. 2018a, from the paper: separate networks, torch.distributions, plain Adam."""

    def __init__(self, agent: Any, args: Any) -> None:
        self.args, agent = args, copy.deepcopy(agent)
        self.actor, self.log_alpha, self.vf, self.vf_target = agent.actor, agent.log_alpha, agent.vf, agent.vf_target
        self.q = [self.single_critic(agent.qf, i) for i in range(2)]
        self.vf_optimizer = torch.optim.Adam(self.vf.parameters(), lr=args.q_lr)
        self.q_optimizers = [torch.optim.Adam(net.parameters(), lr=args.q_lr) for net in self.q]
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=args.policy_lr)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=args.alpha_lr)

    def update(self, batch: tuple[Tensor, ...], num_updates: int) -> None:
        """The state value, the critics, the policy, and the target of the state value."""
        obs, actions, rewards, next_obs, terminations = batch
        alpha = self.log_alpha.exp().item()
        fresh, log_prob = self.policy(obs)
        value = (self.min_q(self.q, obs, fresh) - alpha * log_prob).detach()
        self.step(self.vf_optimizer, (self.vf(obs)[:, 0] - value).pow(2).mean())  # eq. 5
        not_over = 1.0 - terminations
        target = (rewards + self.args.gamma * not_over * self.vf_target(next_obs)[:, 0]).detach()  # eq. 8
        for net, optimizer in zip(self.q, self.q_optimizers, strict=True):
            self.step(optimizer, (net(torch.cat([obs, actions], 1))[:, 0] - target).pow(2).mean())  # eq. 7
        fresh, log_prob = self.policy(obs)
        self.step(self.actor_optimizer, (alpha * log_prob - self.min_q(self.q, obs, fresh)).mean())  # eq. 12
        if self.args.autotune:
            surplus = -log_prob.detach() + self.args.target_entropy_scale  # of entropy, in one dimension
            self.step(self.alpha_optimizer, (self.log_alpha.exp() * surplus).mean())
        for p, p_target in zip(self.vf.parameters(), self.vf_target.parameters(), strict=True):
            p_target.data = (1 - self.args.tau) * p_target.data + self.args.tau * p.data


@pytest.mark.parametrize("flags", [{}, {"autotune": True}], ids=str)
def test_value_network_against_a_second_implementation(flags: dict[str, Any]) -> None:
    """Six updates in float64 from the same random numbers: all weights, the one target, and the coefficient.

    The paper takes the value's step before the critics'. Both use the networks of before the update there and here,
    since the value regresses on the critics, and the critics on the value's target.
    """
    script = load_script("sac_value_network")
    torch.manual_seed(0)
    args = script.Args(tau=0.1, **flags)
    agent = script.Agent(make_vector(AutoresetMode.SAME_STEP, 1), args).double()
    reference = ValueReference(agent, args)
    optimizers: Any = make_optimizers(agent, lr=1e-3)
    for num_updates in range(6):
        torch.manual_seed(100 + num_updates)
        obs, actions, rewards, next_obs = (torch.randn(shape).double() for shape in ((32, 2), (32, 1), 32, (32, 2)))
        batch = (obs, actions.tanh(), rewards, next_obs, (torch.rand(32) < 0.3).double())
        torch.manual_seed(200 + num_updates)
        script.update(agent, optimizers, batch, args, num_updates)
        torch.manual_seed(200 + num_updates)
        reference.update(batch, num_updates)

    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-9)
    close(agent.actor.state_dict(), reference.actor.state_dict())
    close(agent.vf.state_dict(), reference.vf.state_dict())
    close(agent.vf_target.state_dict(), reference.vf_target.state_dict())
    close(agent.log_alpha, reference.log_alpha)
    assert (agent.log_alpha.exp().item() == pytest.approx(0.2, rel=1e-6)) != bool(flags)
    for i in range(2):
        close(Reference.single_critic(agent.qf, i).state_dict(), reference.q[i].state_dict())


def test_value_network_has_one_target() -> None:
    """That of the state value; the critics have none."""
    script = load_script("sac_value_network")
    agent = script.Agent(make_vector(AutoresetMode.SAME_STEP, 1), script.Args())
    frozen = {name.split(".")[0] for name, parameter in agent.named_parameters() if not parameter.requires_grad}
    assert frozen == {"vf_target"}
    names = {name.split(".")[0] for name in agent.state_dict()}
    assert names == {"actor", "qf", "vf", "vf_target", "log_alpha", "obs_rms"}


def test_value_loss() -> None:
    """By hand: the mean square of V(s) - (min Q(s, a) - alpha log pi(a|s)), whose gradient reaches V alone."""
    script = load_script("sac_value_network")
    torch.manual_seed(0)
    args = script.Args()
    agent = script.Agent(make_vector(AutoresetMode.SAME_STEP, 1), args).double()
    obs = torch.randn(16, 2).double()
    torch.manual_seed(1)
    policy = squashed(*agent.actor(obs))
    actions = policy.rsample()
    soft_value = agent.qf(obs, actions).min(0).values - 0.2 * policy.log_prob(actions)
    torch.manual_seed(1)
    loss, metrics = script.compute_vf_loss(agent, obs, torch.randn(16, 1, dtype=torch.double))
    expected = ((agent.vf(obs)[:, 0] - soft_value) ** 2).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert metrics["losses/vf_loss"] == loss
    loss.backward()
    assert {name.split(".")[0] for name, x in agent.named_parameters() if x.grad is not None} == {"vf"}
