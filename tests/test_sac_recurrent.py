"""SAC with memory: the unroll, the burn-in, the stored state, the sequences of the buffer, resuming."""

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401 (registers its tasks)
from conftest import assert_same_weights, killed_again, read_scalars
from torch import Tensor

script: Any = import_module("variants.sac_recurrent")
ROOT = Path(__file__).parent.parent
TINY: dict[str, Any] = {"env_id": "Pendulum-v1", "eval_freq": 0, "eval_episodes": 2, "cuda": False, "hidden_size": 8}
TINY |= {"total_timesteps": 240, "learning_starts": 120, "batch_size": 4, "sequence_length": 8, "burn_in": 2}
TINY |= {"buffer_size": 200, "log_freq": 40, "updates_per_step": 0.25, "num_envs": 2, "checkpoint_freq": 80}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder of its own."""
    monkeypatch.chdir(tmp_path)


def train(**overrides: Any) -> Path:
    """Runs `main` with a tiny budget, and returns the run folder."""
    before = set(Path("runs").glob("*"))
    script.main(script.Args(**TINY | overrides))
    (folder,) = set(Path("runs").glob("*")) - before
    return folder


def make_agent(**overrides: Any) -> tuple[Any, Any]:
    """An agent for Counting-v0, with observations of two numbers, and its arguments."""
    args = script.Args(**TINY | {"env_id": "Counting-v0"} | overrides)
    torch.manual_seed(0)
    return script.Agent(script.make_envs(args, 1), args), args


def make_batch(agent: Any, steps: int, n: int, starts: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Random sequences of Counting-v0's shapes, in which episodes begin at these (step, sequence)."""
    obs, next_obs = torch.randn(steps, n, 2), torch.randn(steps, n, 2)
    actions, rewards, terminations = torch.rand(steps, n, 1) * 2 - 1, torch.randn(steps, n), torch.zeros(steps, n)
    memory = torch.randn(steps, n, agent.forget(1).shape[1])
    memory[..., 0] = 1.0
    memory[1:, :, 1:2], memory[1:, :, 2] = actions[:-1], rewards[:-1]
    for t in range(1, steps):
        for i in range(n):
            if (t, i) in starts:
                memory[t, i] = 0.0
                terminations[t - 1, i] = float(i % 2)
            else:
                next_obs[t - 1, i] = obs[t, i]
    return obs, actions, rewards, next_obs, terminations, memory


def make_cell(memory: Any) -> Any:
    """The cell in PyTorch's own class that makes one step, with the weights of a memory."""
    kind = torch.nn.LSTMCell if isinstance(memory.rnn, torch.nn.LSTM) else torch.nn.GRUCell
    cell = kind(memory.rnn.input_size, memory.rnn.hidden_size).double()
    cell.load_state_dict({name.removesuffix("_l0"): x.double() for name, x in memory.rnn.state_dict().items()})
    return cell


def unroll_slowly(
    memory: Any, batch: tuple[Tensor, ...], stored: bool, place: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Both features (steps, n, feature_dim) in float64, one sequence and one step after the other.

    With `stored` the first state is that of the actor's memory in the batch, or at `place` 1 that of the critics'.
    """
    cell, hidden_size = make_cell(memory), memory.rnn.hidden_size
    obs, actions, rewards, next_obs, _, past = (x.double() for x in batch)
    features, next_features = np.zeros((2, *rewards.shape, memory.feature_dim))
    for i in range(rewards.shape[1]):
        state = past[0, i, 3:].chunk(2)[place] if stored else torch.zeros(memory.state_dim).double()
        for t in range(len(rewards)):
            x = torch.cat([obs[t, i], past[t, i, 1:3]])
            y = torch.cat([next_obs[t, i], actions[t, i], rewards[t, i : i + 1]])
            if past[t, i, 0] == 0.0:
                state = torch.zeros_like(state)
            outputs = []
            for value in (x, y):
                if isinstance(memory.rnn, torch.nn.LSTM):
                    parts = cell(value, (state[:hidden_size], state[hidden_size:]))
                    outputs.append(torch.cat(parts).detach())
                else:
                    outputs.append(cell(value, state).detach())
                state = outputs[0]
            features[t, i] = torch.cat([outputs[0][:hidden_size], x])
            next_features[t, i] = torch.cat([outputs[1][:hidden_size], y])
    return features, next_features


# (step, sequence): inside the burn-in, alone, two in a row, at the end, at the first step after the burn-in.
STARTS = [(1, 0), (5, 1), (6, 1), (6, 2), (9, 3), (3, 3)]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("burn_in", [0, 3])
@pytest.mark.parametrize("stored", [True, False])
def test_unroll_equals_a_loop_over_steps(kind: str, burn_in: int, stored: bool) -> None:
    """With episodes that begin inside of sequences; after an episode's last step the next state is its own."""
    agent, args = make_agent(memory=kind, burn_in=burn_in, stored_state=stored)
    batch = make_batch(agent, 10, 4, STARTS)
    sequences = script.make_sequences(agent, batch, args)
    for place, (memory, sequence) in enumerate(zip((agent.actor_memory, agent.qf_memory), sequences, strict=True)):
        results = memory(*sequence)
        for result, expected in zip(results, unroll_slowly(memory, batch, stored, place), strict=True):
            found = result.detach().numpy().reshape(10 - burn_in, 4, -1)
            np.testing.assert_allclose(found, expected[burn_in:], atol=2e-6)


def q_values(agent: Any, qf: Any, features: np.ndarray, actions: Tensor) -> np.ndarray:
    """Both critics' values (2, steps, n)."""
    steps, n = features.shape[:2]
    flat = torch.as_tensor(features.reshape(steps * n, -1), dtype=torch.float32), actions.reshape(steps * n, -1)
    return qf(*flat).detach().numpy().reshape(2, steps, n)


def test_losses_are_means_over_the_steps_after_the_burn_in() -> None:
    """Losses from slowly unrolled memories; each memory has the state that it is to begin with."""
    agent, args = make_agent(burn_in=3, alpha=0.5)
    with torch.no_grad():
        for x in [*agent.qf_target.parameters(), *agent.qf_target_memory.parameters()]:
            x.add_(0.1 * torch.randn_like(x))
    batch = make_batch(agent, 10, 4, STARTS)
    _, actions, rewards, _, terminations, _ = batch
    noise = torch.randn_like(actions)
    features, next_features = unroll_slowly(agent.actor_memory, batch, True)
    qf_features, _ = unroll_slowly(agent.qf_memory, batch, True, 1)
    _, next_qf_features = unroll_slowly(agent.qf_target_memory, batch, True, 1)

    def sample(x: np.ndarray) -> tuple[Tensor, np.ndarray]:
        mean, log_std = agent.actor(torch.as_tensor(x, dtype=torch.float32))
        fresh, log_prob = script.sample_actions(mean, log_std, noise)
        return fresh.detach(), log_prob.detach().numpy()

    fresh, log_prob = sample(next_features)
    values = q_values(agent, agent.qf_target, next_qf_features, fresh).min(0) - 0.5 * log_prob
    target = rewards.numpy() + args.gamma * (1 - terminations.numpy()) * values
    errors = (q_values(agent, agent.qf, qf_features, actions) - target)[:, 3:]
    _, metrics = script.compute_qf_gradient(agent, batch, noise, args)
    assert metrics["losses/qf1_loss"].item() == pytest.approx((errors[0] ** 2).mean(), rel=1e-4)
    assert metrics["losses/qf2_loss"].item() == pytest.approx((errors[1] ** 2).mean(), rel=1e-4)

    fresh, log_prob = sample(features)
    losses = 0.5 * log_prob - q_values(agent, agent.qf, qf_features, fresh).min(0)
    _, _, metrics = script.compute_actor_gradient(agent, batch, noise, args)
    assert metrics["losses/actor_loss"].item() == pytest.approx(losses[3:].mean(), rel=1e-4, abs=1e-5)
    assert metrics["losses/entropy"].item() == pytest.approx(-log_prob[3:].mean(), rel=1e-4, abs=1e-5)
    alpha_loss = -0.5 * (log_prob[3:] - 1.0).mean()  # the target entropy is -1, for one dimension
    assert metrics["losses/alpha_loss"].item() == pytest.approx(alpha_loss, rel=1e-4, abs=1e-5)


def test_no_gradient_goes_into_the_burn_in() -> None:
    """Nor over the beginning of an episode; the steps after both have one."""
    agent, args = make_agent(burn_in=3)
    batch = make_batch(agent, 8, 2, [(6, 1)])
    (inputs, next_inputs, starts, burn_in, state), _ = script.make_sequences(agent, batch, args)
    inputs.requires_grad_()
    features, _ = agent.actor_memory(inputs, next_inputs, starts, burn_in, state)
    (gradient,) = torch.autograd.grad(features[:, : args.hidden_size].sum(), inputs)
    assert (gradient[:3] == 0.0).all()
    assert (gradient[3:] != 0.0).any(-1).all()
    features, _ = agent.actor_memory(inputs, next_inputs, starts, burn_in, state)
    last = features.unflatten(0, (5, 2))[-1, :, : args.hidden_size].sum()
    (gradient,) = torch.autograd.grad(last, inputs)
    assert (gradient[3:, 0] != 0.0).any(-1).all()
    assert (gradient[:6, 1] == 0.0).all()


def test_update_steps_both_memories_and_moves_the_target() -> None:
    """The target memory moves by `tau` towards the critics' memory; every memory has a gradient."""
    agent, args = make_agent()
    optimizers = {name: script.Adam(group, 1e-2, 0.9, 0.999, 1e-8) for name, group in agent.groups().items()}
    before = {name: x.clone() for name, x in agent.state_dict().items()}
    script.update(agent, optimizers, make_batch(agent, 8, 4, []), args, 0)
    after = agent.state_dict()
    for name in before:
        if "memory.rnn" in name:
            assert not torch.equal(before[name], after[name]), name
        if name.startswith("qf_target"):
            source = after[name.replace("qf_target", "qf", 1)]
            torch.testing.assert_close(after[name], before[name].lerp(source, args.tau))


def test_an_update_takes_its_steps_in_the_order_of_the_paper() -> None:
    """Critics; the policy against these, with noise of its own; alpha; targets. All by PyTorch's Adam."""
    agent, args = make_agent(tau=0.1)
    twin, batch = copy.deepcopy(agent), make_batch(agent, 8, 4, [(3, 1)])
    torch.manual_seed(1)
    script.update(agent, {k: script.Adam(x, 1e-2, 0.9, 0.999, 1e-8) for k, x in agent.groups().items()}, batch, args, 0)
    torch.manual_seed(1)
    groups = {name: (torch.optim.Adam(group, lr=1e-2), group) for name, group in twin.groups().items()}

    def step(name: str, gradient: Tensor) -> None:
        optimizer, group = groups[name]
        for x, part in zip(group, gradient.split([x.numel() for x in group]), strict=True):
            x.grad = part.view_as(x)
        optimizer.step()

    step("q", script.compute_qf_gradient(twin, batch, torch.randn_like(batch[1]), args)[0])
    gradient, alpha_gradient, _ = script.compute_actor_gradient(twin, batch, torch.randn_like(batch[1]), args)
    step("policy", gradient)
    step("alpha", alpha_gradient)
    for net, target in ((twin.qf, twin.qf_target), (twin.qf_memory, twin.qf_target_memory)):
        for x, x_target in zip(net.parameters(), target.parameters(), strict=True):
            x_target.data = 0.9 * x_target.data + 0.1 * x.data
    torch.testing.assert_close(agent.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)


def test_critics_by_hand() -> None:
    """Two hidden layers with ReLU, of each critic's own weights."""
    agent, _ = make_agent()
    features, actions = torch.randn(6, agent.qf_memory.feature_dim), torch.randn(6, 1)
    values, layers = agent.qf(features, actions), [layer for layer in agent.qf.net if hasattr(layer, "weight")]
    for i in range(2):
        x = torch.cat([features, actions], dim=1)
        for layer in layers[:-1]:
            x = (x @ layer.weight[i] + layer.bias[i]).clamp(min=0.0)
        torch.testing.assert_close(values[i], (x @ layers[-1].weight[i] + layers[-1].bias[i])[:, 0])
    assert len(layers) == 3


class Spy(script.ReplayBuffer):
    """Keeps the newest buffer."""

    newest: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Spy.newest = self


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_stored_states_are_those_that_acting_had(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes of five steps, and a reset after 24 steps of both environments; half of the actions are the policy's."""
    monkeypatch.setattr(script, "ReplayBuffer", Spy)
    flags = {"total_timesteps": 48, "learning_starts": 24, "updates_per_step": 0.0, "checkpoint_freq": 24}
    folder = train(env_id="Counting-v0", memory=kind, burn_in=0, **flags)
    args = script.Args(**TINY | {"env_id": "Counting-v0", "memory": kind, "burn_in": 0})
    agent = script.Agent(script.make_envs(args, 1), args)
    script.load_model(folder, {"agent": agent})
    data = Spy.newest.data[:24]
    batch = tuple(data.split(Spy.newest.widths, dim=2))
    batch = (*batch[:2], batch[2][..., 0], batch[3], batch[4][..., 0], batch[5])
    obs, actions, rewards, next_obs, _, memory = batch
    begins = torch.tensor([t in (0, 5, 10, 12, 17, 22) for t in range(24)])
    assert torch.equal(memory[..., 0] == 0.0, begins[:, None].expand(24, 2))
    assert (memory[begins] == 0.0).all()
    goes_on = ~begins[1:]
    assert torch.equal(memory[1:][goes_on][..., 1:2], actions[:-1][goes_on])
    assert torch.equal(memory[1:][goes_on][..., 2], rewards[:-1][goes_on])
    assert torch.equal(obs[1:][goes_on], next_obs[:-1][goes_on])
    for place, network in enumerate((agent.actor_memory, agent.qf_memory)):
        features, _ = unroll_slowly(network, batch, False)
        hidden = memory[..., 3:].chunk(2, dim=-1)[place][..., : args.hidden_size].numpy()
        np.testing.assert_allclose(hidden[1:][goes_on], features[:-1][goes_on][..., : args.hidden_size], atol=1e-6)
        late = tuple(x[3:] for x in batch)  # from the middle of an episode
        results, _ = unroll_slowly(network, late, True, place)
        np.testing.assert_allclose(results, features[3:], atol=1e-6)


def test_acting_depends_on_the_episode_so_far_and_not_on_the_one_before() -> None:
    """The same observation after different pasts; after `dones` there is no past."""
    agent, _ = make_agent()
    obs, actions, rewards = np.ones((2, 2)), np.full((2, 1), 0.5, np.float32), np.ones(2)
    first, state = agent.act(obs, agent.forget(2))
    memory = script.remember(actions, rewards, state, np.array([False, True]))
    second, _ = agent.act(obs, memory)
    assert second[0] != first[0]
    assert second[1] == first[1]
    own = 3 + agent.actor_memory.state_dim  # the critics' state follows
    for column in range(1, own):  # previous action, previous reward and every part of the actor's state matter
        changed = memory.copy()
        changed[0, column] += 1.0
        assert agent.act(obs, changed)[0][0] != second[0], column


@pytest.mark.parametrize(("num_steps", "length"), [(7, 7), (12, 5), (30, 5), (30, 20), (41, 1)])
def test_sequences_are_of_one_environment_and_one_stretch_of_time(num_steps: int, length: int) -> None:
    """In a buffer of 20 steps, which wraps around; every place is drawn, and each as often as the next."""
    buffer = script.ReplayBuffer(62, 3, 1, 1, 2, torch.device("cpu"))  # 20 steps of 3 environments
    assert len(buffer.data) == 20
    for t in range(num_steps):
        ids = 3.0 * t + np.arange(3)
        rows = ids[:, None]
        buffer.add(rows, rows, ids, rows, ids, np.repeat(rows, 2, axis=1))
    torch.manual_seed(0)
    batch = buffer.sample(20_000, length)
    ids = batch[2]
    assert ids.shape == (length, 20_000)
    assert (ids[1:] - ids[:-1] == 3.0).all()
    oldest, places = max(0, num_steps - 20), min(num_steps, 20) - length + 1
    values, counts = ids[0].unique(return_counts=True)
    assert values.tolist() == list(range(3 * oldest, 3 * (oldest + places)))
    assert counts.min() > 0.7 * 20_000 / (3 * places)
    for field in batch:
        assert torch.equal(field.reshape(length, 20_000, -1)[..., 0], ids)


def test_observe() -> None:
    """The parts are those named, in this order, and the spaces and the networks have their size."""
    args = script.Args(env_id="Pendulum-v1", observe="2,0")
    envs, whole = script.make_envs(args, 2), gym.make("Pendulum-v1")
    assert envs.single_observation_space.high.tolist() == [8.0, 1.0]
    obs, _ = envs.reset(seed=3)
    expected, _ = whole.reset(seed=3)
    np.testing.assert_array_equal(obs[0], expected[[2, 0]])
    _, final_obs, *_ = script.step_envs(envs, np.zeros((2, 1), np.float32))
    np.testing.assert_array_equal(final_obs[0], whole.step(np.zeros(1, np.float32))[0][[2, 0]])
    folder = train(observe="2")
    script.main(script.parse_args(script.Args, ["--evaluate", str(folder)]))


@pytest.mark.parametrize(
    ("task", "observe", "same"),
    [
        ("Pendulum-v1", "2", "PendulumVelocity-v1"),
        ("InvertedDoublePendulum-v5", "0,1,2,3,4", "DoublePendulumPositions-v1"),
    ],
)
def test_tasks_with_a_hidden_part_are_those_of_observe(task: str, observe: str, same: str) -> None:
    """The same spaces, observations, rewards and time limit, for scripts without `--observe`."""
    import_module("benchmark.hidden")
    assert gym.spec(same).max_episode_steps == gym.spec(task).max_episode_steps
    one, other = script.make_env(script.Args(env_id=task, observe=observe)), gym.make(same)
    assert one.observation_space == other.observation_space
    np.testing.assert_array_equal(one.reset(seed=3)[0], other.reset(seed=3)[0])
    for _ in range(20):
        action = one.action_space.sample()
        (obs, *rest), (other_obs, *other_rest) = one.step(action), other.step(action)
        np.testing.assert_array_equal(obs, other_obs)
        assert rest[:3] == other_rest[:3]


def test_recall() -> None:
    """The cue is seen once; an answer that equals it at every question has the return 3, others count nothing."""
    recall = import_module("benchmark.recall")
    env, cues = gym.make("Recall-v0"), set()
    for seed in range(10):
        obs, _ = env.reset(seed=seed)
        cue, total, over, time = obs[0], 0.0, False, 0
        cues.add(float(cue))
        while not over:
            answer = cue if obs[1] == 1.0 else -cue
            obs, reward, terminated, truncated, _ = env.step(np.array([answer], np.float32))
            assert float(reward) == (time in recall.QUESTIONS)
            total, over, time = total + float(reward), terminated or truncated, time + 1
            assert obs[0] == 0.0
        assert (total, time, terminated) == (3.0, recall.LENGTH, True)
    assert cues == {-1.0, 1.0}


@pytest.mark.parametrize(
    ("flag", "value", "takes"),
    [
        ("observe", "3", "--observe takes indices from 0 to 2 with commas between them, not 3"),
        ("observe", "0,-1", "--observe takes indices from 0 to 2 with commas between them, not 0,-1"),
        ("observe", "speed", "--observe takes indices from 0 to 2 with commas between them, not speed"),
        ("sequence_length", 0, "--sequence-length takes a number from 1"),
        ("burn_in", 8, "--burn-in takes less than --sequence-length, 8, not 8"),
        ("buffer_size", 15, "--buffer-size takes at least --num-envs times --sequence-length, 16, not 15"),
        ("learning_starts", 15, "--learning-starts takes at least --num-envs times --sequence-length, 16, not 15"),
    ],
)
def test_bad_arguments(flag: str, value: Any, takes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence that names the flag, exit status 2, no run folder."""
    with pytest.raises(SystemExit) as error:
        train(**{flag: value})
    stderr = capsys.readouterr().err
    assert error.value.code == 2
    assert stderr.startswith("error: ")
    assert takes in stderr
    assert stderr.count("\n") == 1
    assert not Path("runs").exists()


def test_native_environments_cannot_hide_anything(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train(observe="0", vectorization="native")
    assert "error: --observe takes --vectorization sync or async" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"memory": "gru", "stored_state": False, "norm_obs": True, "autotune": False}])
def test_runs_and_logs_the_keys_of_the_docs(flags: dict[str, Any]) -> None:
    """All of them, and no other."""
    page = (ROOT / "docs" / "sac.md").read_text()
    table = page.split("## Logged metrics")[1].split("##")[0]
    documented = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    if not flags.get("autotune", True):
        documented.remove("losses/alpha_loss")
    assert set(read_scalars(train(total_timesteps=480, checkpoint_freq=0, **flags))) == documented


@pytest.mark.slow
def test_evaluation_repeats_itself_and_leaves_the_training_alone() -> None:
    """An evaluation carries its own memory."""
    assert_same_weights(train(eval_freq=60), train())


def test_evaluation_carries_what_the_policy_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing at first, then the action, the reward and the state of the step before."""
    agent, args = make_agent()
    seen: list[tuple[np.ndarray, ...]] = []
    act = agent.act

    def spy(obs: np.ndarray, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        actions, state = act(obs, memory)
        seen.append((memory, actions, state))
        return actions, state

    monkeypatch.setattr(agent, "act", spy)
    script.evaluate(agent, args, Path(), "test")
    assert len(seen) == 5
    assert (seen[0][0] == 0.0).all()
    for t in range(1, 5):
        memory, (_, actions, state) = seen[t][0], seen[t - 1]
        expected = np.concatenate([np.ones((2, 1)), actions, np.full((2, 1), float(t)), state], axis=1)
        np.testing.assert_array_equal(memory, expected.astype(np.float32))


@pytest.mark.parametrize("stored", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_bit_for_bit(stored: bool) -> None:
    """Between two checkpoints, inside of episodes, with a buffer that overwrites its oldest rows."""
    whole = train(stored_state=stored, num_envs=3)
    folder = killed_again("variants.sac_recurrent", whole, [*TINY, "stored_state"])
    script.main(script.parse_args(script.Args, ["--resume", str(folder)]))
    assert_same_weights(whole, folder)
