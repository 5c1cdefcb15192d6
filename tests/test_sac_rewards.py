"""SAC with intrinsic rewards: each stream's loss and reward, the targets of the heads, the scales, demonstrations."""

import copy
import json
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import toy_envs
from conftest import assert_same_weights, killed_again, read_scalars
from gymnasium.envs.classic_control.pendulum import PendulumEnv
from test_sac_update import make_optimizers, squashed
from torch import Tensor, nn

import ppo_continuous
import sac_continuous
from utils.demonstrations import load_demonstrations
from utils.errors import TaskError

script: Any = import_module("variants.sac_rewards")
ROOT = Path(__file__).parent.parent
TINY: dict[str, Any] = {"env_id": "Pendulum-v1", "eval_freq": 0, "eval_episodes": 2, "cuda": False, "compile": False}
TINY |= {"total_timesteps": 240, "learning_starts": 120, "batch_size": 16, "log_freq": 40, "updates_per_step": 0.25}
TINY |= {"buffer_size": 200, "num_envs": 2, "checkpoint_freq": 80, "streams": "extrinsic,curiosity:0.5,rnd:2:0.9"}
TINY_PPO: dict[str, Any] = {"env_id": "Pendulum-v1", "total_timesteps": 128, "num_envs": 1, "num_steps": 64}
TINY_PPO |= {"eval_episodes": 1, "cuda": False, "compile": False, "eval_freq": 0}
ALL = "extrinsic:0.7,curiosity:0.5:0.8,rnd:2:0.9,gail:3:0.95"


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


def make_demonstrations(obs_dim: int = 3, action_dim: int = 1, n: int = 50, path: str = "demonstrations.npz") -> str:
    """A file of random demonstrations, in which some episodes terminate."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"obs": rng.normal(2.0, 3.0, (n, obs_dim)), "rewards": np.zeros(n)}
    arrays |= {"final_obs": rng.normal(2.0, 3.0, (n, obs_dim)), "actions": rng.uniform(-1.0, 1.0, (n, action_dim))}
    np.savez(path, **arrays, terminations=rng.random(n) < 0.2)
    return path


def make_agent(streams: str = ALL, **overrides: Any) -> tuple[Any, Any]:
    """An agent for Counting-v0, with observations of two numbers, statistics that are not trivial, and arguments."""
    args = script.Args(**TINY | {"env_id": "Counting-v0", "streams": streams, "demonstrations": "x.npz"} | overrides)
    torch.manual_seed(0)
    agent = script.Agent(script.make_envs(args, 1), args)
    for stream in agent.streams.values():
        stream.obs_rms.update(torch.randn(100, 2) * torch.tensor([2.0, 0.5]) + 1.0)
    agent.reward_scale.copy_(0.5 + torch.rand(len(agent.streams)) * 3.0)
    return agent, args


def make_batch(n: int = 8) -> tuple[Tensor, ...]:
    """Random transitions and demonstrations; a third of both terminates."""
    batch: tuple[Tensor, ...] = ()
    for _ in range(2):
        over = (torch.arange(n) % 3 == 0).float()
        batch += torch.randn(n, 2), torch.rand(n, 1) * 2 - 1, torch.randn(n), torch.randn(n, 2), over, torch.randn(n, 2)
    return batch


def apply(net: nn.Module, x: list[float] | np.ndarray) -> np.ndarray:
    """A ReLU network in NumPy: (fan_in,) to (fan_out,)."""
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    y = np.asarray(x, dtype=np.float64)
    for i, layer in enumerate(layers):
        y = layer.weight.detach().double().numpy() @ y + layer.bias.detach().double().numpy()
        y = np.maximum(y, 0.0) if i < len(layers) - 1 else y
    return y


def normalized(stream: Any, obs: Tensor) -> np.ndarray:
    """An observation as the stream's networks take it."""
    mean, var = stream.obs_rms.mean.numpy(), stream.obs_rms.var.numpy()
    return np.clip((obs.double().numpy() - mean) / np.sqrt(var + 1e-8), -10.0, 10.0)


# --- the streams ---


def test_curiosity() -> None:
    """Pathak et al. 2017: reward 1/2 |f - phi(s')|^2 (eq. 5, 6); loss 0.2 of it and 0.8 |g - a|^2 (eq. 7)."""
    agent, _ = make_agent()
    stream, batch = agent.streams["curiosity"], make_batch()
    rewards, absorbing, loss = stream(batch)
    losses = []
    for i in range(8):
        phi, next_phi = (apply(stream.encoder, normalized(stream, batch[j][i])) for j in (0, 3))
        action = batch[1][i].numpy()
        error = 0.5 * ((apply(stream.forward_model, np.concatenate([phi, action])) - next_phi) ** 2).sum()
        inverse = ((apply(stream.inverse_model, np.concatenate([phi, next_phi])) - action) ** 2).sum()
        assert rewards[i].item() == pytest.approx(error, rel=1e-4)
        losses.append(0.2 * error + 0.8 * inverse)
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-5)
    assert absorbing.item() == 0.0


def test_rnd() -> None:
    """Burda et al. 2019: the reward is the predictor's error at the next observation, the loss its mean."""
    agent, _ = make_agent()
    stream, batch = agent.streams["rnd"], make_batch()
    rewards, absorbing, loss = stream(batch)
    errors = []
    for i in range(8):
        x = normalized(stream, batch[3][i])
        errors.append(((apply(stream.predictor, x) - apply(stream.target, x)) ** 2).mean())
    np.testing.assert_allclose(rewards.detach().numpy(), errors, rtol=1e-4)
    assert loss.item() == pytest.approx(np.mean(errors), rel=1e-5)
    assert absorbing.item() == 0.0
    changed = list(batch)
    for i in (0, 1, 2, 4, 5):
        changed[i] = torch.randn_like(batch[i])
    assert torch.equal(stream(tuple(changed))[0], rewards)  # of nothing but the next observation


def test_gail() -> None:
    """Reward -log(1 - D), cross-entropy with absorbing states, and the penalty from slopes by finite differences."""
    agent, _ = make_agent()
    stream, batch = agent.streams["gail"], make_batch()
    rewards, absorbing, loss = stream(batch)

    def logit(x: np.ndarray) -> float:
        return float(apply(stream.discriminator, x)[0])

    def d(x: np.ndarray) -> float:
        return 1.0 / (1.0 + math.exp(-logit(x)))

    end = np.array([0.0, 0.0, 0.0, 10.0])
    losses = []
    for i in range(8):
        own, shown = (np.array([*normalized(stream, batch[j][i]), batch[j + 1][i].item(), 0.0]) for j in (0, 6))
        assert rewards[i].item() == pytest.approx(-math.log(1.0 - d(own)), rel=1e-4)
        total = -math.log(1.0 - d(own)) - math.log(d(shown))
        total -= math.log(1.0 - d(end)) if i % 3 == 0 else 0.0
        total -= math.log(d(end)) if i % 3 == 0 else 0.0
        mixed = own + i / 7.0 * (shown - own)
        steps = 1e-6 * np.eye(4)
        slopes = [(logit(mixed + step) - logit(mixed - step)) / 2e-6 for step in steps]
        losses.append(total + 10.0 * (np.linalg.norm(slopes) - 1.0) ** 2)
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-4)
    assert absorbing.item() == pytest.approx(-math.log(1.0 - d(end)), rel=1e-4)


def test_the_penalty_reaches_the_discriminator() -> None:
    """A linear discriminator of the last input alone: transitions have a zero there, so D is 1/2 for all of them.

    The loss is 10 (w - 1)^2 and the cross-entropy of the absorbing state, whose logit is 10 w.
    """
    agent, _ = make_agent()
    stream, batch = agent.streams["gail"], make_batch(9)
    stream.discriminator = nn.Linear(4, 1)
    stream.discriminator.weight.data, stream.discriminator.bias.data = (
        torch.tensor([[0.0, 0.0, 0.0, 1.5]]),
        torch.zeros(1),
    )
    (gradient,) = torch.autograd.grad(stream(batch)[2], stream.discriminator.weight)
    d = 1.0 / (1.0 + math.exp(-15.0))
    assert gradient[0, 3].item() == pytest.approx(20.0 * 0.5 + 10.0 * (d - (1.0 - d)) / 3.0, rel=1e-4)


def test_the_absorbing_state_has_no_reward_if_only_own_episodes_end() -> None:
    """Observations are far from those of the demonstrations. After 500 steps a step in the absorbing state, which is as
    near to them as it can be, has a lower reward than the policy's steps.
    """
    agent, _ = make_agent("gail")
    stream = agent.streams["gail"]
    optimizer = torch.optim.Adam(stream.discriminator.parameters(), lr=1e-3)
    for _ in range(500):
        batch = list(make_batch(64))
        batch[0] = batch[0] + 6.0
        batch[4], batch[10] = (torch.arange(64) % 10 == 0).float(), torch.zeros(64)
        optimizer.zero_grad()
        rewards, absorbing, loss = stream(tuple(batch))
        loss.backward()
        optimizer.step()
    assert absorbing < rewards.mean()


def test_gail_tells_what_it_has_been_shown() -> None:
    """After 150 steps: demonstrations of positive actions. The reward of a positive one is the larger.

    All episodes shown go on, and all own ones terminate: the absorbing state has nearly no reward. Shown ones that
    terminate, and own ones that go on: its reward is large.
    """
    for shown_end in (0.0, 1.0):
        agent, _ = make_agent("gail:1:0.9")
        stream = agent.streams["gail"]
        optimizer = torch.optim.Adam(stream.discriminator.parameters(), lr=1e-2)
        for _ in range(150):
            batch = list(make_batch(32))
            batch[7], batch[4], batch[10] = (
                batch[7].abs(),
                torch.full((32,), 1.0 - shown_end),
                torch.full((32,), shown_end),
            )
            optimizer.zero_grad()
            stream(tuple(batch))[2].backward()
            optimizer.step()
        batch[0] = batch[0] * 0.0
        batch[1] = torch.linspace(-1.0, 1.0, 32)[:, None]
        rewards, absorbing, _ = stream(tuple(batch))
        assert rewards[-1] > 1.3 * rewards[0]
        assert (absorbing > 0.9) == bool(shown_end)
        assert (absorbing < 0.5) != bool(shown_end)


# --- rewards and targets ---


def test_what_is_new_counts_as_ten_average_rewards_at_most() -> None:
    """By hand: mean rewards are 2 and strengths 0.5, 2 and 3; what looks like a demonstration counts in full."""
    agent, _ = make_agent()
    agent.reward_scale.fill_(2.0)
    intrinsic = torch.tensor([[1.0, 1.0, 1.0], [19.0, 19.0, 19.0], [900.0, 900.0, 900.0]])
    rewards, end_values = script.compute_rewards(agent, torch.zeros(3), intrinsic, torch.tensor([0.0, 0.0, 900.0]))
    expected = [[0.25, 1.0, 1.5], [4.75, 19.0, 28.5], [5.0, 20.0, 1350.0]]
    np.testing.assert_allclose(rewards[:, 1:], expected, rtol=1e-5)
    assert end_values[3].item() == pytest.approx(10.0 * 3.0 / (1.0 - 0.95), rel=1e-4)


def test_rewards_are_divided_by_their_running_mean() -> None:
    """By NumPy: the first minibatch sets the mean, later ones move it by a hundredth; the task's has none."""
    agent, args = make_agent()
    agent.reward_scale.fill_(1.0)
    optimizers, scale = make_optimizers(agent, lr=1e-2), np.ones(3)
    for step in range(4):
        batch = make_batch(16)
        intrinsic = torch.stack([stream(batch)[0] for stream in agent.streams.values()], 1).detach()
        absorbing = torch.rand(3) * torch.tensor([1.0, 1.0, 100.0])  # the last one is above ten average rewards
        rewards, end_values = script.compute_rewards(agent, batch[2], intrinsic, absorbing)
        np.testing.assert_allclose(rewards[:, 0], 0.7 * batch[2], rtol=1e-5)
        np.testing.assert_allclose(rewards[:, 1:], intrinsic.numpy() / scale * [0.5, 2.0, 3.0], rtol=1e-4)
        value = np.minimum(absorbing.numpy() / scale, 10.0) * [0.5, 2.0, 3.0] / (1.0 - np.array([0.8, 0.9, 0.95]))
        np.testing.assert_allclose(end_values, [0.0, *value], rtol=1e-4)
        script.update(agent, optimizers, batch, args, step)
        mean = intrinsic.numpy().mean(0)
        scale = mean if step == 0 else 0.99 * scale + 0.01 * mean


def test_td_target_of_each_stream_by_hand() -> None:
    """Discount, rule at the end and entropy bonus of each head, for each transition on its own.

    Extrinsic: nothing after a termination. Curiosity and RND: as if there were none. GAIL: the absorbing state.
    """
    agent, _ = make_agent(alpha=0.3)
    _, _, _, _, terminations, next_obs = make_batch()[:6]
    with torch.no_grad():
        for x in agent.qf_target.parameters():
            x.add_(0.1 * torch.randn_like(x))
    rewards = torch.randn(8, 4)
    torch.manual_seed(1)
    policy = squashed(*agent.actor(next_obs))
    actions = policy.rsample()
    log_prob = policy.log_prob(actions)
    values = agent.qf_target(next_obs, actions)
    absorbing = 0.4  # reward of a step in the absorbing state
    forever = sum(0.95**t * absorbing for t in range(2000))
    end_values = torch.tensor([0.0, 0.0, 0.0, absorbing / (1.0 - 0.95)])
    torch.manual_seed(1)
    targets = script.compute_td_target(agent, rewards, end_values, next_obs, terminations, torch.randn(8, 1))
    for i in range(8):
        q = [min(values[0, i, k].item(), values[1, i, k].item()) for k in range(4)]
        over = i % 3 == 0
        soft = 0.0 if over else q[0] - 0.3 * log_prob[i].item()
        expected = [0.99 * soft, 0.8 * q[1], 0.9 * q[2], 0.95 * (forever if over else q[3])]
        np.testing.assert_allclose(targets[i], rewards[i].numpy() + expected, rtol=1e-4, atol=1e-5)


class Reference:
    """The update once more: a critic's head as a network, torch.distributions, an optimiser for each network."""

    def __init__(self, agent: Any, args: Any) -> None:
        self.args, self.agent = args, copy.deepcopy(agent)
        self.optimizers = [
            torch.optim.Adam(net.parameters(), lr=args.q_lr)
            for net in (self.agent.qf, self.agent.streams["curiosity"], self.agent.streams["gail"].discriminator)
        ]
        self.optimizers.append(torch.optim.Adam(self.agent.streams["rnd"].predictor.parameters(), lr=args.q_lr))
        self.actor_optimizer = torch.optim.Adam(self.agent.actor.parameters(), lr=args.policy_lr)
        self.alpha_optimizer = torch.optim.Adam([self.agent.log_alpha], lr=args.alpha_lr)
        self.scales = self.agent.reward_scale.clone()

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        distribution = squashed(*self.agent.actor(obs))
        actions = distribution.rsample()
        return actions, distribution.log_prob(actions)

    def update(self, batch: tuple[Tensor, ...]) -> None:
        """Streams and critics, policy, entropy coefficient, targets."""
        agent, (obs, actions, rewards, _, terminations, next_obs) = self.agent, batch[:6]
        strengths, gammas = (0.7, 0.5, 2.0, 3.0), (0.99, 0.8, 0.9, 0.95)
        alpha = agent.log_alpha.exp().item()
        next_actions, next_log_prob = self.policy(next_obs)
        signals = {name: agent.streams[name](batch) for name in ("curiosity", "rnd", "gail")}
        scales = self.scales.clone()
        loss: Any = sum(signal[2] for signal in signals.values())
        for k, name in enumerate(("extrinsic", *signals)):
            raw = rewards if k == 0 else signals[name][0].detach() / scales[k - 1]
            if name in ("curiosity", "rnd"):
                raw = raw.minimum(torch.tensor(10.0))
            value = agent.qf_target(next_obs, next_actions)[:, :, k].min(0).values
            if name == "extrinsic":
                value = (value - alpha * next_log_prob) * (1.0 - terminations)
            if name == "gail":
                end = signals[name][1] / scales[k - 1] * strengths[k] / (1.0 - gammas[k])
                value = value * (1.0 - terminations) + terminations * end
            target = (strengths[k] * raw + gammas[k] * value).detach()
            values = agent.qf(obs, actions)[:, :, k]
            loss = loss + sum(nn.functional.mse_loss(values[j], target) for j in range(2))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.scales = 0.99 * self.scales + 0.01 * torch.stack([x[0].detach().mean() for x in signals.values()])
        fresh, log_prob = self.policy(obs)
        value = sum(agent.qf(obs, fresh)[:, :, k].min(0).values for k in range(4))
        self.actor_optimizer.zero_grad()
        (alpha * log_prob - value).mean().backward()
        self.actor_optimizer.step()
        self.alpha_optimizer.zero_grad()
        (agent.log_alpha.exp() * (1.0 - log_prob.detach())).mean().backward()
        self.alpha_optimizer.step()
        for p, p_target in zip(agent.qf.parameters(), agent.qf_target.parameters(), strict=True):
            p_target.data = (1 - self.args.tau) * p_target.data + self.args.tau * p.data


def test_updates_against_a_second_implementation() -> None:
    """Six updates of all streams from the same random numbers: all weights, and the scales."""
    agent, args = make_agent(tau=0.1, alpha=0.5)
    reference = Reference(agent, args)
    optimizers = make_optimizers(agent, lr=1e-3)
    for step in range(6):
        batch = make_batch(32)
        torch.manual_seed(200 + step)
        script.update(agent, optimizers, batch, args, step + 1)
        torch.manual_seed(200 + step)
        reference.update(batch)
    state, expected = agent.state_dict(), reference.agent.state_dict()
    for name in state:
        if name != "reward_scale":
            torch.testing.assert_close(state[name], expected[name], rtol=1e-3, atol=2e-5, msg=name)
    torch.testing.assert_close(agent.reward_scale, reference.scales, rtol=1e-5, atol=0.0)


def test_streams_do_not_disturb_the_rest() -> None:
    """With a strength of 0 a head learns from zeros, and the networks of other streams learn what they learn alone."""
    alone, args = make_agent("rnd")
    both, other_args = make_agent("rnd,curiosity:0")
    both.streams["rnd"].load_state_dict(alone.streams["rnd"].state_dict())
    one, two = make_optimizers(alone, lr=1e-3), make_optimizers(both, lr=1e-3)
    for step in range(3):
        batch = make_batch(16)
        script.update(alone, one, batch[:6], args, step)
        script.update(both, two, batch[:6], other_args, step)
    torch.testing.assert_close(alone.streams["rnd"].state_dict(), both.streams["rnd"].state_dict())


# --- runs ---


def load(folder: Path) -> dict[str, Tensor]:
    """The model of a run."""
    return torch.load(folder / "model.pt", weights_only=True)["agent"]


def test_what_stays_fixed() -> None:
    """RND's target, and the statistics of the first random steps: the same after 30 updates as after one.

    The statistics are of the observations that the random steps began with.
    """
    short, long = train(total_timesteps=124, checkpoint_freq=0), train(total_timesteps=240, checkpoint_freq=0)
    one, other = load(short), load(long)
    for name in one:
        is_fixed = name.startswith(("streams.rnd.target", "streams.rnd.obs_rms", "streams.curiosity.obs_rms"))
        assert torch.equal(one[name], other[name]) == (is_fixed or name.startswith("obs_rms")), name
    assert one["streams.rnd.obs_rms.count"] == 124
    assert not torch.equal(one["streams.rnd.target.0.weight"], one["streams.rnd.predictor.0.weight"])


def test_statistics_of_the_streams() -> None:
    """RND has those of the buffer, GAIL those of the demonstrations."""
    agent, args = make_agent()
    buffers = [script.ReplayBuffer(20, 2, 1, torch.device("cpu")) for _ in range(2)]
    rng = np.random.default_rng(0)
    for shift, buffer in enumerate(buffers):
        obs = rng.normal(5.0 * shift, 1.0 + shift, (10, 2))
        buffer.add(obs, obs[:, :1], obs[:, 0], obs + 100.0, obs[:, 0], obs + 100.0)
    for stream in agent.streams.values():
        stream.obs_rms = script.RunningMeanStd((2,))
    agent.fix_statistics(buffers)
    for name, source in (("curiosity", 0), ("rnd", 0), ("gail", 1)):
        obs = buffers[source].data[:10, :2].numpy()
        np.testing.assert_allclose(agent.streams[name].obs_rms.mean, obs.mean(0), rtol=1e-5)
        np.testing.assert_allclose(agent.streams[name].obs_rms.var, obs.var(0), rtol=1e-5)


def test_runs_and_logs_the_keys_of_the_docs() -> None:
    """All of them, with all streams, and no other."""
    page, own = ((ROOT / "docs" / name).read_text() for name in ("sac.md", "variants.md"))
    own = own.split("### Logged metrics of this variant")[1].split("\n## ")[0]
    tables = page.split("## Logged metrics")[1].split("##")[0] + own
    documented = {line.split("`")[1] for line in tables.splitlines() if line.startswith("| `")}
    names = ("extrinsic", "curiosity", "rnd", "gail")
    keys = {key.replace("NAME", name) for key in documented for name in (names if "NAME" in key else [""])}
    keys -= {"losses/extrinsic_loss", "losses/extrinsic_rewards"}
    flags = {"streams": ALL, "demonstrations": make_demonstrations(), "norm_obs": True, "checkpoint_freq": 0}
    assert set(read_scalars(train(total_timesteps=480, **flags))) == keys


def test_minibatches_have_as_many_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come after as many transitions of the run."""
    path, batches, update = make_demonstrations(), list[Any](), script.update

    def spy(agent: Any, optimizers: Any, batch: tuple[Tensor, ...], *rest: Any) -> Any:
        batches.append(batch)
        return update(agent, optimizers, batch, *rest)

    monkeypatch.setattr(script, "update", spy)
    train(streams="gail", demonstrations=path, total_timesteps=160)
    with np.load(path) as arrays:
        names = ("obs", "actions", "rewards", "final_obs", "terminations", "final_obs")
        rows = np.column_stack([arrays[x] for x in names])
    shown = set(map(tuple, rows.astype(np.float32).tolist()))
    assert len(batches) == 10
    for batch in batches:
        own, others = (torch.cat([x.reshape(16, -1) for x in part], 1).tolist() for part in (batch[:6], batch[6:]))
        assert set(map(tuple, others)) <= shown
        assert not set(map(tuple, own)) & shown


def test_what_is_stored_after_a_termination(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last observation of the episode, and the first one of the next; elsewhere they are the same."""
    rows, add = list[np.ndarray](), script.ReplayBuffer.add

    def spy(buffer: Any, *columns: np.ndarray) -> None:
        rows.extend(np.concatenate([x.reshape(len(x), -1) for x in columns], axis=1))
        add(buffer, *columns)

    monkeypatch.setattr(script.ReplayBuffer, "add", spy)
    train(env_id="Uneven-v0", total_timesteps=130, num_envs=1, checkpoint_freq=0)
    data = np.array(rows)
    final_obs, over, next_obs = data[:, 4:6], data[:, 6] == 1.0, data[:, 7:]
    assert over.sum() > 10
    np.testing.assert_array_equal(next_obs[~over], final_obs[~over])
    np.testing.assert_array_equal(next_obs[:-1], data[1:, :2])
    assert (next_obs[over][:, 1] == 0.0).all()
    assert (final_obs[over][:, 1] > 1.0).all()


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit() -> None:
    """With all streams, between two checkpoints; an evaluation of the run takes no demonstrations."""
    flags = {"streams": ALL, "demonstrations": make_demonstrations(), "num_envs": 3}
    whole = train(**flags)
    folder = killed_again("variants.sac_rewards", whole, [*TINY, "demonstrations"])
    script.main(script.parse_args(script.Args, ["--resume", str(folder)]))
    assert_same_weights(whole, folder)
    Path("demonstrations.npz").unlink()
    script.main(script.parse_args(script.Args, ["--evaluate", str(folder)]))


# --- arguments ---


@pytest.mark.parametrize(
    ("streams", "expected"),
    [
        ("rnd", {"extrinsic": (0.0, 0.97), "rnd": (1.0, 0.97)}),
        ("rnd:0.5,extrinsic", {"extrinsic": (1.0, 0.97), "rnd": (0.5, 0.97)}),
        ("extrinsic:2:0.9,curiosity:1e-2:0.8", {"extrinsic": (2.0, 0.9), "curiosity": (0.01, 0.8)}),
        ("gail:3:0.999999", {"extrinsic": (0.0, 0.97), "gail": (3.0, 0.999999)}),
    ],
)
def test_streams(streams: str, expected: dict[str, tuple[float, float]]) -> None:
    """Names, strengths and discounts; the extrinsic head is the first one."""
    parsed = script.parse_streams(script.Args(streams=streams, gamma=0.97), script.INTRINSIC)
    assert parsed == expected
    assert next(iter(parsed)) == "extrinsic"
    agent, _ = make_agent(streams, gamma=0.97)
    assert agent.strengths.tolist() == pytest.approx([strength for strength, _ in parsed.values()])
    assert agent.gammas.tolist() == pytest.approx([gamma for _, gamma in parsed.values()])
    assert list(agent.streams) == [name for name in parsed if name != "extrinsic"]


@pytest.mark.parametrize(
    ("flags", "takes"),
    [
        ({"streams": ""}, "--streams takes NAME"),
        ({"streams": "novelty"}, "--streams takes NAME"),
        ({"streams": "rnd,rnd"}, "--streams takes NAME"),
        ({"streams": "rnd:x"}, "--streams takes NAME"),
        ({"streams": "rnd:-1"}, "--streams takes NAME"),
        ({"streams": "rnd:inf"}, "--streams takes NAME"),
        ({"streams": "rnd:nan"}, "--streams takes NAME"),
        ({"streams": "rnd:1:1.1"}, "--streams takes NAME"),
        ({"streams": "rnd:1:0.9:2"}, "--streams takes NAME"),
        ({"streams": "gail:1:1", "demonstrations": "x.npz"}, "--streams takes NAME"),
        ({"streams": "extrinsic:1:1,rnd:1:1"}, "--streams takes NAME"),
        ({"streams": "curiosity", "gamma": 1.0}, "--streams takes NAME"),
        ({"streams": "rnd:1:0.99999999"}, "--streams takes NAME"),  # 1 in the precision of the networks
        ({"streams": "extrinsic"}, "--streams takes at least one stream besides extrinsic"),
        ({"streams": "gail"}, "--demonstrations takes"),
        ({"demonstrations": "x.npz"}, "--demonstrations takes"),
        ({"streams": "gail", "demonstrations": "missing.npz"}, "--demonstrations takes a file"),
        ({"learning_starts": 15}, "--learning-starts takes at least --batch-size, 16, not 15"),
        ({"record_demonstrations": Path("nothing")}, "--record-demonstrations takes a run folder"),
    ],
    ids=str,
)
def test_bad_arguments(flags: dict[str, Any], takes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence that names the flag, exit status 2, no run folder."""
    with pytest.raises(SystemExit) as error:
        train(**flags)
    stderr = capsys.readouterr().err
    assert error.value.code == 2
    assert stderr.startswith("error: ")
    assert takes in stderr
    assert stderr.count("\n") == 1
    assert not Path("runs").exists()


# --- demonstrations ---


def test_demonstrations_are_what_the_policy_did(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run of `sac_continuous.py` with normalised observations: its actions, the task's answers, the returns."""
    flags = {name: x for name, x in TINY.items() if name != "streams"} | {"norm_obs": True, "num_envs": 1}
    sac_continuous.main(sac_continuous.Args(**flags))
    (folder,) = Path("runs").iterdir()
    words = ["--record-demonstrations", str(folder), "--eval-episodes", "3", "--seed", "7"]
    script.main(script.parse_args(script.Args, words))
    assert "600 transitions of 3 episodes" in capsys.readouterr().out
    args = sac_continuous.Args(**flags)
    envs = sac_continuous.make_envs(args, 3)
    agent = sac_continuous.Agent(envs, args)
    sac_continuous.load_model(folder, {"agent": agent})
    with np.load(folder / "demonstrations.npz") as arrays:
        columns = {
            name: arrays[name].reshape(200, 3, *arrays[name].shape[1:])
            for name in arrays
            if name not in ("env_id", "returns")
        }
        returns = arrays["returns"]
    obs, _ = envs.reset(seed=2_000_021)
    for t in range(200):
        np.testing.assert_array_equal(columns["obs"][t], obs)
        np.testing.assert_array_equal(columns["actions"][t], agent.act(obs))
        obs, final_obs, rewards, terminations, _ = sac_continuous.step_envs(envs, columns["actions"][t])
        np.testing.assert_array_equal(columns["final_obs"][t], final_obs)
        np.testing.assert_array_equal(columns["rewards"][t], rewards)
        np.testing.assert_array_equal(columns["terminations"][t], terminations)
    np.testing.assert_allclose(columns["rewards"].sum(0), returns)
    train(streams="gail", demonstrations=str(folder / "demonstrations.npz"))


class Uneven(toy_envs.Counting):
    """Its episodes terminate after 2 to 8 steps."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Counts; the length is drawn in the first step."""
        if self.step_count == 0:
            self.length = self.np_random.integers(2, 9)
        obs, reward, _, _, info = super().step(action)
        return obs, reward, bool(self.step_count == self.length), False, info


gym.register("Uneven-v0", entry_point="test_sac_rewards:Uneven")


def test_demonstrations_end_with_their_episodes() -> None:
    """The first episode of each environment, and nothing of its second one."""
    folder = train(env_id="Uneven-v0", total_timesteps=130)
    script.main(script.parse_args(script.Args, ["--record-demonstrations", str(folder), "--eval-episodes", "4"]))
    lengths = [gym.utils.seeding.np_random(2_000_004 + i)[0].integers(2, 9) for i in range(4)]
    assert len(set(lengths)) > 1
    with np.load(folder / "demonstrations.npz") as arrays:
        assert (arrays["obs"][:, 0] == 0).all()
        assert sorted(arrays["obs"][:, 1]) == sorted(t for length in lengths for t in range(length))
        assert sorted(arrays["final_obs"][arrays["terminations"], 1]) == sorted(lengths)
        assert arrays["returns"].tolist() == [sum(range(1, length + 1)) for length in lengths]


@pytest.mark.parametrize("fault", ["shape", "not finite", "empty", "bounds", "terminations", "column", "text"])
def test_bad_demonstrations(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence that names the flag."""
    file = make_demonstrations(obs_dim=2 if fault == "shape" else 3, n=0 if fault == "empty" else 50)
    arrays = dict(np.load(file))
    if fault == "not finite":
        arrays["actions"][3] = np.nan
    if fault == "bounds":
        arrays["actions"][3] = 2.0
    if fault == "terminations":
        arrays["terminations"] = arrays["terminations"] - 5.0
    if fault == "column":
        del arrays["terminations"]
    np.savez(file, **arrays)
    if fault == "text":
        Path(file).write_text("no demonstrations")
    with pytest.raises(SystemExit) as error:
        train(streams="gail", demonstrations=file)
    stderr = capsys.readouterr().err
    assert error.value.code == 2
    assert stderr.startswith("error: --demonstrations takes a file of --record-demonstrations of the same task")
    assert stderr.count("\n") == 1


def test_a_damaged_byte_of_the_demonstrations(capsys: pytest.CaptureFixture[str]) -> None:
    """Each one is refused, or is not of the numbers; the reader of a NumPy file raises a dozen kinds of exceptions."""
    sound = dict(np.load(make_demonstrations(n=4)))
    np.savez_compressed("damaged.npz", **sound)
    contents, refused = Path("damaged.npz").read_bytes(), 0
    for i in range(0, len(contents), 3):
        Path("damaged.npz").write_bytes(contents[:i] + bytes([contents[i] ^ 0xFF]) + contents[i + 1 :])
        try:
            columns = load_demonstrations("damaged.npz", "Pendulum-v1", 3, 1)
        except SystemExit:
            refused += 1
        else:
            for name, column in zip(("obs", "actions", "rewards", "final_obs", "terminations"), columns, strict=True):
                np.testing.assert_array_equal(column, sound[name].astype(np.float32))
    assert refused > len(contents) / 6
    assert capsys.readouterr().err.count("error: --demonstrations takes a file") == refused


def test_demonstrations_of_another_task(capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes may agree by chance, so the file names its task; one without a name is taken as it is."""
    file = make_demonstrations()
    load_demonstrations(file, "Pendulum-v1", 3, 1)
    assert capsys.readouterr().err == ""
    np.savez("named.npz", env_id="Other-v0", **np.load(file))
    load_demonstrations("named.npz", "Other-v0", 3, 1)
    assert capsys.readouterr().err == ""
    load_demonstrations("named.npz", "Pendulum-v1", 3, 1)
    assert (
        capsys.readouterr().err == "warning: --demonstrations named.npz is of Other-v0, and the task is Pendulum-v1\n"
    )


def test_demonstrations_of_ppo(capsys: pytest.CaptureFixture[str]) -> None:
    """Its deterministic actions, clipped to [-1, 1] as the task gets them."""
    folder = ppo_continuous.main(ppo_continuous.Args(**TINY_PPO))
    args = ppo_continuous.Args(**TINY_PPO)
    agent = ppo_continuous.Agent(ppo_continuous.make_envs(args, 1), args)
    ppo_continuous.load_model(folder, {"agent": agent})
    bias: Any = agent.actor.mean[-1].bias
    bias.data.fill_(0.97)
    model = torch.load(folder / "model.pt", weights_only=True)
    torch.save(model | {"agent": agent.state_dict()}, folder / "model.pt")
    script.main(script.parse_args(script.Args, ["--record-demonstrations", str(folder), "--eval-episodes", "2"]))
    with np.load(folder / "demonstrations.npz") as arrays:
        np.testing.assert_allclose(arrays["actions"], agent.policy()(arrays["obs"]).clip(-1.0, 1.0), rtol=1e-5)
        assert 0 < (arrays["actions"] == 1.0).sum() < arrays["actions"].size
    train(streams="gail", demonstrations=str(folder / "demonstrations.npz"))
    assert "is of" not in capsys.readouterr().err


def test_the_seed_determines_demonstrations() -> None:
    """Also of a task that draws from NumPy's random stream, which all environments share."""
    folder = ppo_continuous.main(ppo_continuous.Args(**TINY_PPO | {"env_id": "toy_envs:Drawing-v0"}))
    recorded = []
    for seed in ("3", "3", "4"):
        words = ["--record-demonstrations", str(folder), "--eval-episodes", "3", "--seed", seed]
        script.main(script.parse_args(script.Args, words))
        with np.load(folder / "demonstrations.npz") as arrays:
            recorded.append(arrays["final_obs"])
    np.testing.assert_array_equal(recorded[0], recorded[1])
    assert not np.array_equal(recorded[0], recorded[2])


def test_a_fault_of_the_recorded_task_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The task of the run, and not the default one of the command."""
    folder = ppo_continuous.main(ppo_continuous.Args(**TINY_PPO))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which the command replaces
    monkeypatch.setattr(PendulumEnv, "step", lambda *_: 1 / 0)
    with pytest.raises(TaskError) as error:
        script.main(script.parse_args(script.Args, ["--record-demonstrations", str(folder)]))
    with pytest.raises(SystemExit):
        sys.excepthook(error.type, error.value, None)
    assert "error: --env-id Pendulum-v1 failed: " in capsys.readouterr().err


def test_a_run_goes_on_from_moved_demonstrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """From another working folder, and with the file elsewhere."""
    folder = train(streams="gail", demonstrations=make_demonstrations(), total_timesteps=160).resolve()
    Path("other").mkdir()
    monkeypatch.chdir("other")
    script.main(script.parse_args(script.Args, ["--resume", str(folder), "--total-timesteps", "200"]))
    Path("../demonstrations.npz").rename("moved.npz")
    words = ["--resume", str(folder), "--total-timesteps", "240"]
    with pytest.raises(SystemExit):
        script.main(script.parse_args(script.Args, words))
    script.main(script.parse_args(script.Args, [*words, "--demonstrations", "moved.npz"]))
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"] == 240


def test_no_demonstrations_of_other_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """A policy with memory, or with pictures."""
    for name in ("sac_pixels.py", "sac_recurrent.py", "toy.py"):
        Path(name).mkdir()
        (Path(name) / "args.json").write_text(json.dumps({"script": name}))
        with pytest.raises(SystemExit) as error:
            train(record_demonstrations=Path(name))
        assert error.value.code == 2
        agents = name in ("sac_pixels.py", "sac_recurrent.py")
        takes = "a run of one agent without memory and pictures" if agents else "a run"
        assert capsys.readouterr().err.startswith(f"error: --record-demonstrations takes {takes}")
