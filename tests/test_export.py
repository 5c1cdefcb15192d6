"""The exported policies act like those that the scripts evaluate, and their files stand alone."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import conftest
import gymnasium as gym
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import Train
from gymnasium.spaces import Box
from test_sac_pixels import TINY as TINY_PIXELS
from torch import Tensor, nn

import ppo_selfplay
import sac_continuous
import utils.export
from utils.export import export
from utils.policy_stack import PolicyStack
from utils.run import read_file, to_bytes
from utils.team_env import legal_actions

ROOT = Path(__file__).parent.parent
sac_recurrent: Any = importlib.import_module("variants.sac_recurrent")
sac_pixels: Any = importlib.import_module("variants.sac_pixels")
OF_THEIR_OWN = ("sac_recurrent", "sac_pixels")  # with memory, and of pictures
VARIANTS = sorted(f"variants.{path.stem}" for path in ROOT.glob("variants/*.py") if path.stem not in OF_THEIR_OWN)
CONTINUOUS_PUSH = {"env_id": "mpe2.simple_push_v3", "env_kwargs": '{"continuous_actions": true}'}


def load(path: Path) -> Callable[..., np.ndarray]:
    """The actions of an ONNX file as a function of its inputs."""
    session = onnxruntime.InferenceSession(str(path))
    return lambda **inputs: session.run(None, inputs)[0]


@pytest.fixture(params=["ppo_continuous", "sac_continuous", "ppo_selfplay", "sac_selfplay", *VARIANTS])
def any_script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Every script in turn; a variant trains with the budget of the script that it comes from."""
    script = importlib.import_module(request.param)
    algorithm = "ppo" if hasattr(script.Args, "update_epochs") else "sac"
    task = "selfplay" if hasattr(script, "load_run") else "continuous"
    monkeypatch.setitem(conftest.TINY, script.__name__, conftest.TINY[f"{algorithm}_{task}"])
    return script


class Recorder(gym.vector.VectorWrapper):
    """Keeps observations and the actions that followed."""

    def __init__(self, envs: gym.vector.VectorEnv, pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
        super().__init__(envs)
        self.pairs = pairs

    def reset(self, **kwargs: Any) -> Any:
        """Keeps the first observations."""
        self.obs, infos = self.env.reset(**kwargs)
        return self.obs, infos

    def step(self, actions: Any) -> Any:
        """Keeps observations and actions."""
        self.pairs.append((self.obs.astype(np.float32), actions.copy()))
        result = self.env.step(actions)
        self.obs = result[0]
        return result


@pytest.mark.slow
def test_actions_are_those_of_the_evaluation(
    any_script: ModuleType, train: Train, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single agents: Dict observations, actions of two dimensions with bounds of their own. Self-play: sumo."""
    if hasattr(any_script, "load_run"):
        folder = train_selfplay(any_script, norm_obs=True)
        export(folder)
        compare_games(any_script, folder, {"sumo": load(folder / "model.onnx")})
        return
    folder = train(any_script, env_id="toy_envs:Nested-v0", norm_obs=True)
    export(folder)
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    make_envs = any_script.make_envs
    monkeypatch.setattr(any_script, "make_envs", lambda *args: Recorder(make_envs(*args), pairs))
    any_script.main(any_script.parse_args(any_script.Args, ["--evaluate", str(folder), "--eval-episodes", "20"]))
    obs, actions = (np.concatenate(column) for column in zip(*pairs, strict=True))
    assert len(obs) > 100
    exported = load(folder / "model.onnx")(obs=obs)
    assert exported.dtype == np.float32
    assert exported.shape == (len(obs), 1, 2)
    np.testing.assert_allclose(exported, actions, rtol=0, atol=5e-5)
    assert np.ptp(exported, axis=0).min() > 1e-3  # it is no constant


def compare_games(
    script: ModuleType, folder: Path, exported: dict[str, Callable[..., np.ndarray]], masks: bool = False
) -> None:
    """Plays games with the policies as the evaluation has them, and compares the exported actions.

    With `masks`, further actions are illegal at random.
    """
    agents, pools, args = script.load_run(folder, "--evaluate")
    env, rng = script.make_env(args, 4), np.random.default_rng(3)
    stacks = {behavior: PolicyStack(agent, [pools[behavior].latest.weights]) for behavior, agent in agents.items()}
    obs = env.reset(5)
    for _ in range(30):
        actions = []
        for t, team in enumerate(env.teams):
            rows = obs[t].reshape(-1, team.obs_dim)
            legal = legal_actions(env, t).reshape(len(rows), sum(team.branches))
            inputs = {"obs": rows}
            if team.branches:
                starts = np.cumsum((0, *team.branches))
                keeps = rng.random(legal.shape) < (0.4 if masks else 1.0)
                keeps[:, starts[:-1]] |= ~np.logical_or.reduceat(keeps & legal, starts[:-1], axis=1)
                legal = keeps & legal if masks else legal
                inputs["masks"] = legal
            expected = stacks[team.behavior].act(np.zeros(len(rows), dtype=int), rows, legal, 0.0)
            found = exported[team.behavior](**inputs)
            if team.branches:
                assert found.tolist() == expected.tolist()
                assert np.take_along_axis(legal, found + starts[:-1], axis=1).all()
            else:
                np.testing.assert_allclose(found, expected.clip(-1.0, 1.0), rtol=0, atol=1e-5)
            actions.append(expected.reshape(*env.alive[t].shape, -1))
        obs = env.step(actions).obs
    env.close()


def test_a_stopped_run_is_exported_as_it_is_evaluated(train_selfplay: Train) -> None:
    """With its newest snapshot, which is older than its last policy."""
    folder = train_selfplay(ppo_selfplay)
    model = torch.load(folder / "model.pt", weights_only=True)
    for name, x in model["sumo_agent"].items():
        x += 0.1 * name.startswith("actor")
    torch.save(model, folder / "model.pt")
    export(folder)
    compare_games(ppo_selfplay, folder, {"sumo": load(folder / "model.onnx")})


def test_one_file_for_each_of_two_behaviours(selfplay: ModuleType, train_selfplay: Train) -> None:
    folder = train_selfplay(selfplay, env_id="pursuit")
    export(folder)
    names = {behavior: f"model_{behavior}.onnx" for behavior in ("pursuers", "evader")}
    assert {path.name for path in folder.glob("*.onnx")} == set(names.values())
    compare_games(selfplay, folder, {behavior: load(folder / name) for behavior, name in names.items()})
    metadata = {prop.key: prop.value for prop in onnx.load(folder / "model_evader.onnx").metadata_props}
    assert metadata["behavior"] == "evader"


@pytest.mark.parametrize(
    ("env_id", "env_kwargs", "has_masks"),
    [
        ("sumo", '{"actions": "discrete"}', False),
        ("sumo", '{"actions": "multidiscrete"}', False),
        ("pettingzoo.classic.connect_four_v3", "{}", True),
    ],
)
def test_illegal_actions_are_never_chosen(
    selfplay: ModuleType, train_selfplay: Train, env_id: str, env_kwargs: str, has_masks: bool
) -> None:
    """Connect four has masks; in sumo actions are made illegal at random."""
    folder = train_selfplay(selfplay, env_id=env_id, env_kwargs=env_kwargs, num_games=4, total_timesteps=64)
    export(folder)
    agents, *_ = selfplay.load_run(folder, "--evaluate")
    exported = load(folder / "model.onnx")
    compare_games(selfplay, folder, dict.fromkeys(agents, exported), masks=not has_masks)


def test_pettingzoo_actions_are_in_its_own_units(train_selfplay: Train) -> None:
    """Agents of `simple_push` take numbers in [0, 1]."""
    script = importlib.import_module("ppo_selfplay")
    folder = train_selfplay(script, **CONTINUOUS_PUSH, num_games=4, total_timesteps=64)
    export(folder)
    agents, _, args = script.load_run(folder, "--evaluate")
    env, taken = script.make_env(args, 1), dict[str, np.ndarray]()
    obs, step = env.reset(1), env.envs[0].step
    env.envs[0].step = lambda actions: (taken.update(actions), step(actions))[1]
    for _ in range(10):
        exported = {
            team.agents[0]: load(folder / f"model_{team.behavior}.onnx")(obs=obs[t][0])
            for t, team in enumerate(env.teams)
        }
        masks = np.ones((1, 0), dtype=bool)
        obs = env.step([agents[team.behavior].act(obs[t][0], masks)[None] for t, team in enumerate(env.teams)]).obs
        for agent, actions in exported.items():
            assert env.envs[0].action_space(agent).contains(actions[0])
            np.testing.assert_allclose(actions[0], taken[agent], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_file_stands_alone(train: Train) -> None:
    """One file with all weights, any size of the batch, and metadata."""
    folder = train(importlib.import_module("sac_continuous"))
    before = set(folder.iterdir())
    words = [sys.executable, "-m", "utils.export", str(folder)]
    output = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    start = re.escape(f"{folder / 'model.onnx'}: the largest difference from the actions of sac_continuous.py is ")
    assert re.fullmatch(rf"{start}\d\.\de-\d+, limit \d\.\de-\d+\n", output)
    path = folder / "model.onnx"
    assert set(folder.iterdir()) - before == {path}
    model = onnx.load(path, load_external_data=False)
    assert not any(weights.external_data for weights in model.graph.initializer)
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    metadata = {prop.key: prop.value for prop in model.metadata_props}
    assert metadata == {"script": "sac_continuous.py", "env_id": "Pendulum-v1", "env_kwargs": "{}"} | {
        "behavior": "",
        "observe": "",
        "pictures": "",
        "inputs": '{"obs": ["batch", 3]}',
        "branches": "[]",
    }
    obs, exported = np.random.default_rng(0).standard_normal((1000, 3)).astype(np.float32), load(path)
    rows = np.concatenate([exported(obs=row[None]) for row in obs])
    np.testing.assert_allclose(exported(obs=obs), rows, rtol=0, atol=1e-5)


def play_as_the_page_does(folder: Path, tmp_path: Path, place: int) -> float:
    """The return of the page's program number `place`. A module `torch` beside it ends the program."""
    program = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL)[place]
    assert len(program.splitlines()) <= 15 + 3 * place  # a memory takes three lines
    (tmp_path / "play.py").write_text(program)
    (tmp_path / "torch.py").write_text("raise SystemExit('PyTorch was imported')")
    words = [sys.executable, str(tmp_path / "play.py")]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    return float(result.stdout.removeprefix("return "))


@pytest.mark.slow
def test_the_program_of_the_page_plays_without_pytorch(script: ModuleType, train: Train, tmp_path: Path) -> None:
    """Its return is that of the script's own policy with the same seed."""
    folder = train(script, norm_obs=True)
    export(folder)
    returned = play_as_the_page_does(folder, tmp_path, 0)
    args = script.Args(**{k: v for k, v in json.loads((folder / "args.json").read_text()).items() if k != "script"})
    envs = script.make_envs(args, 1)
    agent = script.Agent(envs, args)
    agent.load_state_dict(read_file(folder / "model.pt")["agent"])
    act = agent.policy() if hasattr(agent, "policy") else agent.act
    obs, total, over = envs.reset(seed=1)[0], 0.0, False
    while not over:
        obs, _, rewards, terminations, truncations = script.step_envs(envs, act(obs))
        total, over = total + rewards[0], terminations[0] or truncations[0]
    assert returned == pytest.approx(total, abs=0.01)


RunWithMemory = Callable[..., tuple[Path, Any, Any]]


@pytest.fixture
def run_with_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunWithMemory:
    """Trains variants/sac_recurrent.py shortly in an empty folder; returns run folder, agent and arguments."""
    monkeypatch.chdir(tmp_path)

    def run(**flags: Any) -> tuple[Path, Any, Any]:
        tiny = {"env_id": "Pendulum-v1", "eval_freq": 0, "eval_episodes": 1, "cuda": False, "total_timesteps": 60}
        tiny |= {"learning_starts": 40, "sequence_length": 8, "hidden_size": 8, "batch_size": 4}
        args = sac_recurrent.Args(**tiny | flags)
        sac_recurrent.main(args)
        (folder,) = Path("runs").iterdir()
        agent = sac_recurrent.Agent(sac_recurrent.make_envs(args, 1), args)
        agent.load_state_dict(read_file(folder / "model.pt")["agent"])
        return folder, agent, args

    return run


@pytest.mark.parametrize("flags", [{"memory": "lstm", "observe": "2"}, {"memory": "gru", "norm_obs": True}], ids=str)
def test_the_program_with_memory_plays_without_pytorch(
    run_with_memory: RunWithMemory, tmp_path: Path, flags: dict[str, Any]
) -> None:
    """Its return is that of the script's own policy, and not that of the same policy without memory."""
    folder, agent, args = run_with_memory(**flags)
    export(folder)
    returned, totals = play_as_the_page_does(folder, tmp_path, 1), []
    for forgets in (False, True):
        envs = sac_recurrent.make_envs(args, 1)
        obs, memory, total, over = envs.reset(seed=1)[0], agent.forget(1), 0.0, False
        while not over:
            actions, states = agent.act(obs, memory)
            obs, _, rewards, terminations, truncations = sac_recurrent.step_envs(envs, actions)
            memory = sac_recurrent.remember(actions, rewards, states, np.array([forgets]))
            total, over = total + rewards[0], terminations[0] or truncations[0]
        totals.append(total)
    assert returned == pytest.approx(totals[0], abs=0.01)
    assert abs(totals[1] - totals[0]) > 0.1


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_memories_are_those_of_the_script(run_with_memory: RunWithMemory, kind: str) -> None:
    """Seven episodes of a task whose actions have two dimensions and bounds of their own; one file, any batch."""
    folder, agent, args = run_with_memory(env_id="toy_envs:Nested-v0", memory=kind, norm_obs=True)
    export(folder)
    assert [path.name for path in folder.glob("*.onnx*")] == ["model.onnx"]
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    assert not any(weights.external_data for weights in model.graph.initializer)
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch", value.name
    session, rng, n = onnxruntime.InferenceSession(str(folder / "model.onnx")), np.random.default_rng(0), 7
    envs, low, high = sac_recurrent.make_envs(args, n), np.array([-3.0, 0.0]), np.array([1.0, 10.0])
    obs, own, rewards = envs.reset(seed=1)[0], agent.forget(n), np.zeros(n, np.float32)
    memory = np.zeros((n, 2 + agent.actor_memory.state_dim), np.float32)
    for _ in range(40):
        inputs = {"obs": obs.astype(np.float32), "rewards": rewards, "memory": memory}
        actions, memory = session.run(["actions", "next_memory"], inputs)
        expected, states = agent.act(obs, own)
        assert actions.shape == (n, 1, 2)
        np.testing.assert_allclose(actions[:, 0], low + (high - low) * (expected + 1) / 2, rtol=0, atol=5e-5)
        np.testing.assert_allclose(memory[:, :2], expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(memory[:, 2:], np.split(states, 2, axis=1)[0], rtol=0, atol=1e-5)
        obs, _, _, terminations, truncations = sac_recurrent.step_envs(envs, expected)
        rewards, dones = rng.standard_normal(n).astype(np.float32), terminations | truncations
        own = sac_recurrent.remember(expected, rewards, states, dones)
        rewards, memory = rewards * ~dones, memory * ~dones[:, None]


def refusal(capsys: pytest.CaptureFixture[str], folder: Path, status: int = 2) -> str:
    """The one sentence with which the export ends; nothing is written."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        export(folder)
    stderr = capsys.readouterr().err
    if status == 2:
        assert exit_info.value.code == 2
        assert stderr.startswith("error: ")
        assert stderr.count("\n") == 1
    assert not any(path.is_file() for path in folder.glob("*.onnx*"))
    return stderr or str(exit_info.value)


def test_bad_folders_are_refused(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence and exit status 2."""
    folder = train(importlib.import_module("ppo_continuous"))
    args, model = (folder / "args.json").read_text(), (folder / "model.pt").read_bytes()
    assert "names its script, and runs/none has none (FileNotFoundError" in refusal(capsys, Path("runs/none"))
    scripts = ["", "[]", "{}", '{"script": 3}', '{"script": "../sac.py"}', args.replace("ppo_continuous.py", "no.py")]
    for text in scripts:
        (folder / "args.json").write_text(text)
        assert "FOLDER takes a run folder with an args.json that names its script" in refusal(capsys, folder)
    for text in (args.replace('"gamma"', '"gama"'), args.replace('"num_envs": 2', '"num_envs": 0')):
        (folder / "args.json").write_text(text)
        assert "FOLDER takes a run folder with the args.json of this script" in refusal(capsys, folder)
    (folder / "args.json").write_text(args)
    state = read_file(folder / "model.pt")
    state["agent"]["actor.log_std"] += np.nan
    for contents in (b"", model[:1000], model.replace(b"actor", b"acter"), to_bytes({"agent": {}}), to_bytes(state)):
        (folder / "model.pt").write_bytes(contents)
        assert "FOLDER takes a run folder with a valid model.pt of this script" in refusal(capsys, folder)
    (folder / "model.pt").unlink()
    assert "has only a checkpoint: --resume it" in refusal(capsys, folder)
    (folder / "model.pt").write_bytes(model)
    (folder / "model.onnx").mkdir()
    assert "FOLDER takes a run folder that can be written" in refusal(capsys, folder)


@pytest.mark.parametrize("factor", [0.99, float("nan")])
def test_a_memory_that_is_wrong_is_not_written(
    run_with_memory: RunWithMemory, factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first actions of an episode would be right."""
    folder, *_ = run_with_memory()
    forward = utils.export.PolicyWithMemory.forward

    def change(policy: Any, obs: Any, rewards: Any, memory: Any) -> Any:
        actions, next_memory = forward(policy, obs, rewards, memory)
        return actions, next_memory * factor

    monkeypatch.setattr(utils.export.PolicyWithMemory, "forward", change)
    assert "the exported actions differ from those of sac_recurrent.py by" in refusal(capsys, folder, status=1)


@pytest.mark.parametrize("encoder", ["simple", "nature", "resnet"])
def test_policies_of_pictures(encoder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The actions of an evaluation's stacks of bytes, and what a program needs to make them."""
    monkeypatch.chdir(tmp_path)
    flags = TINY_PIXELS | {"env_id": "Pendulum-v1", "encoder": encoder, "frame_size": 36, "grey": True}
    args = sac_pixels.Args(**flags | {"total_timesteps": 8, "learning_starts": 8, "checkpoint_freq": 0, "num_envs": 1})
    folder = sac_pixels.main(args)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    export(folder)
    saved = torch.load(folder / "model.pt", weights_only=True)
    steep = {name: 20.0 * x if name.startswith("actor.") else x for name, x in saved["agent"].items()}
    torch.save(saved | {"agent": steep}, folder / "model.pt")
    export(folder)  # rounding changes its actions by more than 1e-5
    torch.save(saved, folder / "model.pt")
    export(folder)
    assert sys.platform != "linux" or os.environ["MUJOCO_GL"] == "egl"  # renders without a screen
    envs = sac_pixels.make_envs(args, 2)
    agent = sac_pixels.Agent(envs, args)
    agent.load_state_dict(torch.load(folder / "model.pt", weights_only=True)["agent"])
    exported, (obs, _) = load(folder / "model.onnx"), envs.reset(seed=1)
    for _ in range(5):
        actions = agent.act(obs)
        np.testing.assert_allclose(exported(obs=obs), 2.0 * actions, rtol=0, atol=2e-5)  # torques from -2 to 2
        obs = sac_pixels.step_envs(envs, actions)[0]
    metadata = onnxruntime.InferenceSession(str(folder / "model.onnx")).get_modelmeta().custom_metadata_map
    expected = {"frame_size": 36, "frame_stack": args.frame_stack, "grey": True, "action_repeat": 1}
    assert json.loads(metadata["pictures"]) == expected
    assert json.loads(metadata["inputs"]) == {"obs": ["batch", args.frame_stack * 36**2]}


@pytest.mark.parametrize(
    ("env_kwargs", "factor"), [("{}", 0.99), ("{}", float("nan")), ('{"actions": "discrete"}', 0.99)]
)
def test_a_wrong_export_is_not_written(
    train_selfplay: Train,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    env_kwargs: str,
    factor: float,
) -> None:
    """It is compared with the script's own policy."""
    folder = train_selfplay(importlib.import_module("sac_selfplay"), env_kwargs=env_kwargs)
    forward = utils.export.Policy.forward
    change: Callable[..., Any] = lambda policy, *inputs: (forward(policy, *inputs) * factor).to(  # noqa: E731
        torch.float32 if policy.space else torch.int64
    )
    monkeypatch.setattr(utils.export.Policy, "forward", change)
    assert "the exported actions differ from those of sac_selfplay.py by" in refusal(capsys, folder, status=1)
    assert not list(folder.glob("*.onnx"))


@pytest.mark.parametrize("name", ["ppo_continuous", "sac_continuous"])
def test_what_step_envs_does_to_actions_is_seen(
    name: str, train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As tanh in the place of clipping: the check compares what the task gets."""
    script = importlib.import_module(name)
    folder, step_envs = train(script, env_id="Pendulum-v1"), script.step_envs
    monkeypatch.setattr(script, "step_envs", lambda envs, actions: step_envs(envs, np.tanh(actions)))
    monkeypatch.setattr(utils.export, "load_script", lambda *_: script)
    assert f"the exported actions differ from those of {name}.py by" in refusal(capsys, folder, status=1)
    monkeypatch.setattr(script, "step_envs", step_envs)
    export(folder)


def test_no_behavior_is_written_if_another_is_wrong(train_selfplay: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy of the pursuers, which comes first, is right; that of the evader differs."""
    folder = train_selfplay(importlib.import_module("sac_selfplay"), env_id="pursuit")
    to_onnx = utils.export.to_onnx

    def change(policy: Any, metadata: dict[str, str]) -> Any:
        if metadata["behavior"] == "evader":
            raise SystemExit("error: the exported actions differ")
        return to_onnx(policy, metadata)

    monkeypatch.setattr(utils.export, "to_onnx", change)
    with pytest.raises(SystemExit):
        utils.export.export(folder)
    assert not list(folder.glob("*.onnx"))


def test_behaviors_with_one_name_as_files_are_refused(
    train_selfplay: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of one would replace that of the other."""
    folder = train_selfplay(importlib.import_module("sac_selfplay"), env_id="pursuit")
    load_selfplay = utils.export.load_selfplay

    def rename(*args: Any) -> Any:
        run_args, policies = load_selfplay(*args)
        return run_args, dict(zip(("a b", "a-b"), policies.values(), strict=True))

    monkeypatch.setattr(utils.export, "load_selfplay", rename)
    assert "behaviours have different names as files, and a b, a-b have not" in refusal(capsys, folder)
    assert not list(folder.glob("*.onnx"))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without ONNX Runtime there is one sentence with the command that installs it."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    spec = spec_from_file_location("export_without_packages", ROOT / "utils" / "export.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(SystemExit) as exit_info:
        spec.loader.exec_module(module_from_spec(spec))
    assert exit_info.value.code == 2
    assert re.fullmatch(r"error: .*pip install -r requirements-onnx.txt.*\n", capsys.readouterr().err)


def test_a_deterministic_policy() -> None:
    """An actor that returns actions alone, as that of TD3 would."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.obs_rms, self.actor = sac_continuous.RunningMeanStd((4,)), nn.Sequential(nn.Linear(4, 2), nn.Tanh())

        def normalize(self, obs: Tensor) -> Tensor:
            return self.obs_rms.normalize(obs)

        @torch.no_grad()
        def act(self, obs: np.ndarray) -> np.ndarray:
            return self.actor(self.normalize(torch.as_tensor(obs))).numpy()

    agent = Agent()
    policy = utils.export.Policy(agent, Box(-2.0, 2.0, (2,)))
    _, error, limit = utils.export.to_onnx(policy.eval(), {"script": "td3.py"})
    assert error < limit
    agent.obs_rms.mean[0], agent.obs_rms.var[0] = 1000.0, 0.0  # constant: the last bit of 1000 becomes 0.6
    _, error, limit = utils.export.to_onnx(policy.eval(), {"script": "td3.py"})
    assert error < limit == utils.export.MAX_TOLERANCE


def test_the_limit_follows_the_last_bits() -> None:
    """Also where a policy takes differences of numbers, which do not change if all of their last bits go up."""
    obs, rng = np.full((3, 40), 1.5, dtype=np.float32), np.random.default_rng(0)
    bit = float(np.spacing(np.float32(1.5)))
    for factor, low, high in ((1.0, 1e-5, 1e-5), (100.0, 10 * 100 * bit, 10 * 200 * bit), (1e5, 1e-3, 1e-3)):
        limit = utils.export.error_limit(lambda x: factor * np.diff(x.astype(np.float64)), obs, rng)  # noqa: B023
        assert low <= limit <= high
