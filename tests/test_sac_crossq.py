"""SAC without target networks: batch renormalisation, the joint pass, the histogram, the update, acting, resuming."""

import copy
import os
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401 (registers its tasks)
from conftest import assert_same_weights, killed_again, load_weights, read_scalars
from gymnasium.vector import AutoresetMode
from test_sac_update import squashed
from torch import Tensor, nn
from toy_envs import make_vector

script: Any = import_module("variants.sac_crossq")
ROOT = Path(__file__).parent.parent
TINY: dict[str, Any] = {"env_id": "Pendulum-v1", "eval_freq": 0, "eval_episodes": 2, "cuda": False, "compile": False}
TINY |= {"total_timesteps": 200, "learning_starts": 80, "batch_size": 16, "buffer_size": 150, "num_envs": 2}
TINY |= {"log_freq": 40, "updates_per_step": 0.25, "checkpoint_freq": 60, "renorm_warmup": 20}
close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-9)


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


def test_learning_rates_fall_to_zero() -> None:
    """Linearly, and by default; that of alpha does not."""
    curves = read_scalars(train(policy_lr=4e-3, q_lr=2e-3, alpha_lr=1e-3))
    stride = TINY["num_envs"]  # a point has the rates of the iteration that led to its step
    for name, lr in (("policy", 4e-3), ("q", 2e-3)):
        steps, rates = zip(*curves[f"charts/{name}_lr"], strict=True)
        assert rates == pytest.approx([lr * (1 - (step - stride) / 200) for step in steps])
    assert all(rate == pytest.approx(1e-3) for _, rate in curves["charts/alpha_lr"])


def make_agent(**flags: Any) -> tuple[Any, Any]:
    """An agent in float64 for observations of two numbers and actions of one, and its arguments."""
    torch.manual_seed(0)
    args = script.Args(**flags)
    return script.Agent(make_vector(AutoresetMode.SAME_STEP, 1), args).double(), args


def make_optimizers(agent: Any) -> Any:
    """The three of a run."""
    return {name: script.Adam(group, 1e-3, 0.5, 0.999, 1e-8) for name, group in agent.groups().items()}


def make_batch(seed: int, n: int = 32) -> tuple[Tensor, ...]:
    """Random transitions in float64; those that follow are elsewhere, so that the halves have other statistics."""
    torch.manual_seed(seed)
    obs, actions, rewards, next_obs = (torch.randn(shape).double() for shape in ((n, 2), (n, 1), n, (n, 2)))
    return obs, actions.tanh(), rewards, 2.0 * next_obs + 1.0, (torch.rand(n) < 0.3).double()


# --- batch renormalisation ---


class Renorm:
    """Algorithm 1 of Ioffe 2017 in NumPy, one feature after the other; `limits` are those of r and d."""

    def __init__(self, size: int) -> None:
        self.mean, self.var, self.count = np.zeros(size), np.ones(size), 0

    def __call__(self, x: np.ndarray, warmup: int) -> np.ndarray:
        y, max_r, max_d = np.empty_like(x), *((3.0, 5.0) if self.count >= warmup else (1.0, 0.0))
        for i in range(x.shape[1]):
            column = x[:, i]
            mu = sum(column) / len(column)
            sigma = (sum((column - mu) ** 2) / len(column) + 1e-3) ** 0.5
            running = (self.var[i] + 1e-3) ** 0.5
            r = min(max(sigma / running, 1.0 / max_r), max_r)
            d = min(max((mu - self.mean[i]) / running, -max_d), max_d)
            y[:, i] = (column - mu) / sigma * r + d
            self.mean[i] += 0.01 * (mu - self.mean[i])
            self.var[i] += 0.01 * (sigma**2 - 1e-3 - self.var[i])
        self.count += 1
        return y


@pytest.mark.parametrize("rows", [1, 2])
def test_batch_renormalisation_against_numpy(rows: int) -> None:
    """Ten updates, the last seven renormalise and go over every limit. Each row has its own statistics."""
    torch.manual_seed(0)
    norm, references = script.BatchRenorm((rows, 1, 4), 3).double(), [Renorm(4) for _ in range(rows)]
    norm.weight.data, norm.bias.data = torch.randn(rows, 1, 4).double(), torch.randn(rows, 1, 4).double()
    over = set()
    for step in range(10):
        x = torch.randn(rows, 16, 4).double() * torch.tensor([0.1, 1.0, 2.0, 9.0]) + torch.tensor([0.0, 9.0, -9.0, 1.0])
        expected = torch.as_tensor(np.stack([f(y.numpy(), 3) for f, y in zip(references, x, strict=True)]))
        if step >= 3:
            std = (norm.var + 1e-3).sqrt()
            r, d = (
                ((x.var(1, correction=0, keepdim=True) + 1e-3).sqrt() / std),
                (x.mean(1, keepdim=True) - norm.mean) / std,
            )
            over |= {("r", (r > 3).any().item()), ("1/r", (r < 1 / 3).any().item()), ("d", (d.abs() > 5).any().item())}
        close(norm(x, train=True), expected * norm.weight + norm.bias)
        close(norm.mean, torch.as_tensor(np.stack([f.mean for f in references])[:, None]))
        close(norm.var, torch.as_tensor(np.stack([f.var for f in references])[:, None]))
    assert over >= {("r", True), ("1/r", True), ("d", True)}
    before, x = copy.deepcopy(norm.state_dict()), torch.randn(rows, 1, 4).double()
    close(norm(x, train=False), (x - norm.mean) / (norm.var + 1e-3).sqrt() * norm.weight + norm.bias)
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())


@pytest.mark.parametrize("warmup", [100, 0])
def test_it_is_batch_normalisation_where_r_is_1_and_d_is_0(warmup: int) -> None:
    """Values and gradients of PyTorch's; in the warm-up, and after it where running statistics are the batch's."""
    torch.manual_seed(0)
    norm, reference = script.BatchRenorm((1, 5), warmup).double(), nn.BatchNorm1d(5, eps=1e-3, momentum=0.01).double()
    norm.weight.data = torch.randn(1, 5).double()
    norm.bias.data = torch.randn(1, 5).double()
    reference.weight.data, reference.bias.data = norm.weight.data[0].clone(), norm.bias.data[0].clone()
    for _ in range(3):
        x, weights = (3.0 * torch.randn(64, 5).double() + 2.0).requires_grad_(), torch.randn(64, 5).double()
        if warmup == 0:
            norm.mean.copy_(x.mean(0)), norm.var.copy_(x.var(0, correction=0))
        outputs = norm(x, train=True), reference(x)
        close(*outputs)
        gradients = [
            torch.autograd.grad((y * weights).sum(), [x, net.weight, net.bias])
            for y, net in zip(outputs, (norm, reference), strict=True)
        ]
        close(*([y.flatten() for y in x] for x in gradients))
    if warmup:
        assert reference.running_mean is not None
        close(norm.mean[0], reference.running_mean)
        reference.running_var = norm.var[0].clone()  # PyTorch's is of the unbiased variance
        x = torch.randn(7, 5).double()
        close(norm(x, train=False), reference.eval()(x))


def test_no_gradient_goes_through_r_and_d() -> None:
    """Ioffe 2017, section 3: they are constants in the gradient, so it is that of batch normalisation times r."""
    torch.manual_seed(0)
    norm, x, weights = script.BatchRenorm((1, 3), 0).double(), torch.randn(8, 3).double(), torch.randn(8, 3).double()
    x = (2.0 * x + 1.0).requires_grad_()
    r = (x.var(0, correction=0) + 1e-3).sqrt() / (1.0 + 1e-3) ** 0.5
    (gradient,) = torch.autograd.grad((norm(x, train=True) * weights).sum(), x)
    y = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-3).sqrt()
    (expected,) = torch.autograd.grad((y * weights).sum(), x)
    assert (r > 1.1).any()
    close(gradient, expected * r.detach())


# --- weights, rewards, histogram ---


def test_weights_of_hidden_units_have_the_norm_1() -> None:
    """Scaling them changes nothing behind the normalisation; after an update their norm is 1, and their bias 0."""
    agent, args = make_agent()
    optimizers, x = make_optimizers(agent), torch.randn(2, 64, 3).double()
    for layer in agent.qf.net.norms:
        layer.epsilon = 0.0
    before = agent.qf.net(x, True)
    for i, layer in enumerate(agent.qf.net.linears[:-1]):
        layer.weight.data *= torch.rand(2, 1, 256) + 0.5
        layer.bias.data += i + 1.0
    close(agent.qf.net(x, True), before)
    agent.qf.net.project()
    close(agent.qf.net(x, True), before)
    for step in range(2):
        script.update(agent, optimizers, make_batch(step), args, step)
    for net, units in ((agent.qf.net, 2), (agent.actor.net, 1)):
        for i, layer in enumerate(net.linears):
            weight = layer.weight if units == 2 else layer.weight.T[None]  # (networks, inputs, units)
            norms = torch.stack([sum(w**2 for w in weight[k, :, j]) ** 0.5 for k in range(units) for j in (0, 1)])
            assert torch.allclose(norms, torch.ones_like(norms)) == (i < len(net.linears) - 1)
            assert (layer.bias == 0.0).all() == (i < len(net.linears) - 1)
        assert not torch.equal(layer.weight, torch.zeros_like(layer.weight))


def test_histogram() -> None:
    """The share of a normal distribution in each bin, cut off at the ends; its mean is the value."""
    agent, _ = make_agent()
    values = torch.tensor([-7.0, -5.0, -1.234, 0.0, 0.02, 3.9, 5.0, 80.0]).double()
    found = agent.qf.histogram(values)
    edges = np.linspace(-5.0, 5.0, 102)
    for value, row in zip(values.tolist(), found, strict=True):
        cdf = np.array([NormalDist(min(max(value, -5.0), 5.0), 0.75 * 10.0 / 101).cdf(edge) for edge in edges])
        np.testing.assert_allclose(row, np.diff(cdf) / (cdf[-1] - cdf[0]), atol=1e-6)
    close(found.sum(1), torch.ones(8).double())
    means = agent.qf.values(found.clamp_min(1e-30).log().expand(2, -1, -1))
    assert means.shape == (2, 8)
    np.testing.assert_allclose(means[0], values.clamp(-5.0, 5.0), atol=0.08)
    np.testing.assert_allclose(means[0, 2:6], values[2:6], atol=1e-4)


def test_rewards_are_scaled_by_the_returns() -> None:
    """Their standard deviation, or a fifth of the largest, whichever is larger; 1 before the first."""
    scale = script.RewardScale()
    assert scale.scale.item() == pytest.approx(1.0)
    returns, no_limit = [np.array([1.0, -3.0]), np.array([2.0, 4.0])], torch.zeros(2).double()
    for x in returns:
        scale.update(torch.as_tensor(x), no_limit)
    assert scale.scale.item() == pytest.approx(np.std(np.concatenate(returns)))
    scale.update(torch.tensor([-900.0, 0.0]).double(), no_limit)
    assert scale.scale.item() == pytest.approx(np.std([1, -3, 2, 4, -900, 0]))
    for _ in range(100):
        scale.update(torch.zeros(2).double(), no_limit)
    assert scale.scale.item() == pytest.approx(180.0)
    for _ in range(1000):
        scale.update(torch.zeros(2).double(), torch.ones(2).double())  # gamma 1: the values have no bound
    assert scale.scale.item() == pytest.approx(180.0)


@pytest.mark.parametrize("length", [1, 10, 200])
def test_values_beyond_a_time_limit_fit(length: int) -> None:
    """A reward of 2 in each step has the value 2 / (1 - gamma), however short the episodes are."""
    scale, discount, value = script.RewardScale(), 0.99**length, 2.0 / (1.0 - 0.99)
    returns = torch.tensor([2.0 * (1.0 - discount) / (1.0 - 0.99)]).double()
    for _ in range(1000):
        scale.update(torch.zeros(1).double(), torch.zeros(1).double())
    scale.update(returns, torch.tensor([discount]).double())
    assert value / scale.scale.item() == pytest.approx(script.MAX_VALUE)


def test_returns_of_a_run() -> None:
    """Discounted within an episode; they begin anew where one ends, however it ends, and after a checkpoint."""
    weights = load_weights(train(env_id="Counting-v0", total_timesteps=28, checkpoint_freq=24, updates_per_step=0.0))
    expected: list[float] = []
    state, episode = 0.0, -1
    for step in range(14):
        if step in (0, 5, 10, 12):  # the start, a termination, a time limit, the checkpoint
            state, episode, count = 0.0, episode + 1, 0
        count += 1
        state = 10.0 * episode + count + 0.99 * state
        expected += [state, state]
    at_limit = expected[2 * 9] / (1.0 - 0.99**5)  # rewards go on beyond it
    assert weights["reward_scale.largest"].item() == pytest.approx(at_limit)
    assert weights["reward_scale.rms.count"].item() == 28
    assert weights["reward_scale.rms.mean"].item() == pytest.approx(np.mean(expected))
    assert weights["reward_scale.rms.var"].item() == pytest.approx(np.var(expected))


# --- the update ---


class Reference:
    """CrossQ once more: separate critics of PyTorch's own layers, torch.distributions, plain Adam, loops over bins."""

    def __init__(self, agent: Any, args: Any) -> None:
        self.args, agent = args, copy.deepcopy(agent)
        self.log_alpha, self.scale = agent.log_alpha, agent.reward_scale.scale.item()
        self.actor = self.single(agent.actor.net, 0)
        self.q = [self.single(agent.qf.net, i) for i in range(2)]
        adam = partial(torch.optim.Adam, lr=1e-3, betas=(0.5, 0.999))
        self.q_optimizers = [adam(net.parameters()) for net in self.q]
        self.actor_optimizer, self.alpha_optimizer = adam(self.actor.parameters()), adam([self.log_alpha])

    @staticmethod
    def single(net: Any, i: int) -> nn.Sequential:
        """A network of ordinary layers; the momentum of PyTorch's running statistics is 1 minus ours."""
        layers: list[nn.Module] = []
        for own, norm in zip(net.linears, net.norms, strict=True):
            weight, bias = (own.weight.T, own.bias) if own.weight.dim() == 2 else (own.weight[i], own.bias[i, 0])
            linear, batch_norm = nn.Linear(*weight.shape).double(), nn.BatchNorm1d(len(weight), 1e-3, 0.01).double()
            linear.weight.data, linear.bias.data = weight.data.T.clone(), bias.data.clone()
            own_state = [
                x.data.reshape(-1, len(weight))[i].clone() for x in (norm.weight, norm.bias, norm.mean, norm.var)
            ]
            batch_norm.weight.data, batch_norm.bias.data, batch_norm.running_mean, batch_norm.running_var = own_state
            layers += [batch_norm, nn.ReLU(), linear]  # a normalisation stands before its activation
        del layers[1]  # there is none before the first layer
        return nn.Sequential(*layers)

    @staticmethod
    def call(net: nn.Sequential, x: Tensor, train: bool) -> Tensor:
        """In training the running variance is the biased one, as in the paper's code."""
        norms = [layer for layer in net if isinstance(layer, nn.BatchNorm1d)]
        for norm in norms:
            norm.train(train)
            norm.momentum = 0.01
        olds = [None if norm.running_var is None else norm.running_var.clone() for norm in norms]
        y = net(x)
        if train:
            n = len(x)
            for norm, old in zip(norms, olds, strict=True):
                assert old is not None
                assert norm.running_var is not None
                norm.running_var = 0.99 * old + (norm.running_var - 0.99 * old) * (n - 1) / n
        return y

    def policy(self, obs: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        """Fresh actions and their log-probabilities."""
        mean, log_std = self.call(self.actor, obs, train).chunk(2, dim=1)
        distribution = squashed(mean, log_std.clamp(-20, 2))
        actions = distribution.rsample()
        return actions, distribution.log_prob(actions)

    def value(self, logits: Tensor) -> Tensor:
        """The mean of the histograms (n,)."""
        edges = torch.linspace(-5, 5, 102)
        return sum(p * (edges[i] + edges[i + 1]) / 2 for i, p in enumerate(torch.softmax(logits, 1).T))

    def labels(self, targets: Tensor) -> Tensor:
        """(n, 101) from Python's own normal distribution."""
        edges = torch.linspace(-5, 5, 102).tolist()
        rows = []
        for y in targets.clamp(-5, 5).tolist():
            cdf = [NormalDist(y, 0.75 * 10 / 101).cdf(edge) for edge in edges]
            rows.append([(b - a) / (cdf[-1] - cdf[0]) for a, b in zip(cdf[:-1], cdf[1:], strict=True)])
        return torch.tensor(rows).double()

    def update(self, batch: tuple[Tensor, ...], num_updates: int) -> None:
        """Critics from one pass over both halves; every third time the actor, from critics with running statistics."""
        obs, actions, rewards, next_obs, terminations = batch
        alpha, n = self.log_alpha.exp().item(), len(obs)
        next_actions, next_log_prob = self.policy(next_obs, train=False)
        both = torch.cat([torch.cat([obs, actions], 1), torch.cat([next_obs, next_actions.detach()], 1)])
        logits = [self.call(net, both, train=True) for net in self.q]
        next_value = torch.min(*(self.value(x[n:].detach()) for x in logits)) - alpha * next_log_prob.detach()
        target = rewards / self.scale + self.args.gamma * (1 - terminations) * next_value
        labels = self.labels(target)
        for x, optimizer, net in zip(logits, self.q_optimizers, self.q, strict=True):
            self.step(optimizer, nn.functional.cross_entropy(x[:n], labels), net)
        if num_updates % self.args.policy_frequency == 0:
            fresh, log_prob = self.policy(obs, train=True)
            values = [self.value(self.call(net, torch.cat([obs, fresh], 1), train=False)) for net in self.q]
            self.step(self.actor_optimizer, (alpha * log_prob - torch.min(*values)).mean(), self.actor)
            if self.args.autotune:
                surplus = -log_prob.detach() + self.args.target_entropy_scale  # of entropy, in one dimension
                self.step(self.alpha_optimizer, (self.log_alpha.exp() * surplus).mean())

    @staticmethod
    def step(optimizer: torch.optim.Optimizer, loss: Any, *nets: nn.Sequential) -> None:
        """A plain gradient step; gradients that strayed into other parameters are dropped by their next zero_grad.

        Then the weights of each hidden unit get the norm 1, and its bias 0.
        """
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for net in nets:
            for linear in [layer for layer in net if isinstance(layer, nn.Linear)][:-1]:
                linear.weight.data = nn.functional.normalize(linear.weight.data)
                linear.bias.data *= 0.0


@pytest.mark.parametrize("flags", [{}, {"autotune": False, "policy_frequency": 2, "alpha": 0.5}], ids=str)
def test_updates_against_a_second_implementation(flags: dict[str, Any]) -> None:
    """Seven updates in float64 from the same random numbers: all weights and all running statistics are compared."""
    agent, args = make_agent(target_entropy_scale=0.5, **flags)
    agent.reward_scale.update(2.5 * torch.randn(50).double(), torch.zeros(50).double())
    reference, optimizers = Reference(agent, args), make_optimizers(agent)
    for num_updates in range(7):
        batch = make_batch(100 + num_updates)
        torch.manual_seed(200 + num_updates)
        script.update(agent, optimizers, batch, args, num_updates)
        torch.manual_seed(200 + num_updates)
        reference.update(batch, num_updates)
    loose = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)  # Adam enlarges rounding where gradients are tiny
    loose(agent.log_alpha, reference.log_alpha)
    assert agent.actor.net.norms[0].num_updates == -(-7 // args.policy_frequency)
    assert agent.qf.net.norms[0].num_updates == 7
    for own, other in ((agent.actor.net, [reference.actor]), (agent.qf.net, reference.q)):
        for i, net in enumerate(other):
            found = {name: x for name, x in Reference.single(own, i).state_dict().items() if "num_batches" not in name}
            expected = {name: x for name, x in net.state_dict().items() if "num_batches" not in name}
            loose(found, expected)


def test_one_pass_over_both_halves() -> None:
    """The statistics of the critics' inputs are of (s, a) and (s', a') together, and move once; the actor's stay."""
    agent, args = make_agent()
    batch, before = make_batch(0), copy.deepcopy(agent.actor.state_dict())
    noise = torch.randn(32, 1).double()
    script.compute_qf_gradient(agent, batch, noise, args)
    mean, log_std = agent.actor(batch[3])
    inputs = torch.cat([torch.cat(batch[:2], 1), torch.cat([batch[3], (mean + log_std.exp() * noise).tanh()], 1)])
    norm = agent.qf.net.norms[0]
    for i in range(2):
        close(norm.mean[i, 0], 0.01 * inputs.mean(0))
        close(norm.var[i, 0], 0.99 + 0.01 * inputs.var(0, correction=0))
    assert norm.num_updates == 1
    assert all(torch.equal(value, before[name]) for name, value in agent.actor.state_dict().items())


def test_the_actors_step_leaves_the_critics_statistics() -> None:
    """It moves its own; the critics it asks use their running statistics."""
    agent, args = make_agent()
    before, obs = copy.deepcopy(agent.qf.state_dict()), torch.randn(32, 2).double() + 3.0
    script.compute_actor_gradient(agent, (obs,), torch.randn(32, 1).double(), args)
    assert all(torch.equal(value, before[name]) for name, value in agent.qf.state_dict().items())
    close(agent.actor.net.norms[0].mean[0], 0.01 * obs.mean(0))
    assert agent.actor.net.norms[0].num_updates == 1


def test_no_gradient_through_the_target() -> None:
    """The critics' gradient is that of a loss with the target as a constant, which the joint pass does not change."""
    agent, args = make_agent(alpha=0.5)
    batch, noise = make_batch(0), torch.randn(32, 1).double()
    obs, actions, rewards, next_obs, terminations = batch
    copied = copy.deepcopy(agent)
    gradient, _ = script.compute_qf_gradient(agent, batch, noise, args)
    mean, log_std = copied.actor(next_obs)
    next_actions, next_log_prob = (x.detach() for x in script.sample_actions(mean, log_std, noise))
    both = torch.cat([obs, next_obs]), torch.cat([actions, next_actions])
    logits = copied.qf(*both, train=True)
    next_values = copied.qf.values(logits[:, 32:]).min(0).values - 0.5 * next_log_prob
    constant = torch.as_tensor((rewards + 0.99 * (1 - terminations) * next_values).detach().numpy())
    loss = -(copied.qf.histogram(constant) * logits[:, :32].log_softmax(-1)).sum(-1).mean(1).sum()
    expected = torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(copied.qf.parameters()))])
    close(gradient, expected)


@pytest.mark.parametrize("frequency", [1, 3, 4])
def test_policy_delay(frequency: int) -> None:
    """In ten updates the actor and the entropy coefficient take a step in every `frequency`th, and one only."""
    agent, args = make_agent(policy_frequency=frequency)
    optimizers = make_optimizers(agent)
    for step in range(10):
        script.update(agent, optimizers, make_batch(step), args, step)
    counts = {name: int(optimizer.num_steps) for name, optimizer in optimizers.items()}
    assert counts == {"q": 10, "policy": -(-10 // frequency), "alpha": -(-10 // frequency)}


def test_critics_and_actor_have_no_targets() -> None:
    agent, _ = make_agent()
    assert {name.split(".")[0] for name in agent.state_dict()} == {
        "actor",
        "qf",
        "log_alpha",
        "obs_rms",
        "reward_scale",
    }
    assert all(parameter.requires_grad for parameter in agent.parameters())


# --- acting, evaluation, runs ---


def test_acting_uses_running_statistics() -> None:
    """An action depends on its own observation alone, and acting changes no statistics."""
    agent, args = make_agent()
    optimizers = make_optimizers(agent)
    for step in range(3):
        script.update(agent, optimizers, make_batch(step), args, step)
    agent.float()
    before, obs = copy.deepcopy(agent.state_dict()), np.random.default_rng(0).normal(size=(5, 2))
    together = agent.act(obs, 0.1)
    alone = np.concatenate([agent.act(row[None], 0.1) for row in obs])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    assert np.ptp(together) > 1e-3
    assert all(torch.equal(value, before[name]) for name, value in agent.state_dict().items())
    layers = Reference.single(agent.double().actor.net, 0).eval()
    mean, log_std = layers(torch.as_tensor(obs)).chunk(2, dim=1)
    np.testing.assert_allclose(together, (mean + 0.1 * log_std.exp()).tanh().detach(), atol=1e-5)


def test_evaluation_leaves_the_training_alone() -> None:
    """Also the running statistics."""
    assert_same_weights(train(eval_freq=60), train())


def test_compiling_leaves_the_statistics_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs an example of zeros, which must not count."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert_same_weights(train(compile=True), train())


@pytest.mark.parametrize(
    ("flag", "value", "takes"),
    [
        ("renorm_warmup", -1, "--renorm-warmup takes a number from 0"),
        ("policy_frequency", 0, "--policy-frequency takes a number from 1"),
        ("batch_size", 1, "--batch-size takes a number from 2"),  # a batch of one is normalised to zeros
        ("gamma", 1.5, "--gamma takes a number from 0 to 1, not 1.5"),
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


def test_runs_and_logs_the_keys_of_the_docs() -> None:
    """All of them, and no other."""
    page = (ROOT / "docs" / "sac.md").read_text()
    table = page.split("## Logged metrics")[1].split("##")[0]
    documented = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert set(read_scalars(train(total_timesteps=480, checkpoint_freq=0))) == documented


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit() -> None:
    """With running statistics of layers and returns, across the end of the warm-up, between two checkpoints."""
    whole = train(num_envs=3)
    folder = killed_again("variants.sac_crossq", whole, TINY)
    script.main(script.parse_args(script.Args, ["--resume", str(folder)]))
    assert_same_weights(whole, folder)
    counts = [value.item() for name, value in load_weights(whole).items() if name.endswith("num_updates")]
    assert max(counts) > 20 > min(counts) > 0  # the critics' warm-up is over, the actor's is not


COMPARED = """
import copy, sys
import torch
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from gymnasium.vector import AutoresetMode
from toy_envs import make_vector
from variants import sac_crossq as script

torch.manual_seed(0)
args = script.Args(renorm_warmup=0)
agent = script.Agent(make_vector(AutoresetMode.SAME_STEP, 1), args)
obs, next_obs = torch.randn(2, 64, 2) * 3 + 5
batch, noise = (obs, torch.randn(64, 1).tanh(), torch.randn(64), next_obs, torch.ones(64)), torch.randn(64, 1)
for function in (script.compute_qf_gradient, script.compute_actor_gradient):
    example = copy.deepcopy(agent), tuple(map(torch.zeros_like, batch)), torch.zeros_like(noise), args
    compiled, other = script.compiled(function, *example), copy.deepcopy(agent)
    results = compiled(agent, batch, noise, args), function(other, batch, noise, args)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(agent.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_gradients_are_those_of_the_plain_update() -> None:
    """Also what they do to the running statistics, while they renormalise."""
    env = {name: value for name, value in os.environ.items() if name != "TORCH_COMPILE_DISABLE"}
    command = [sys.executable, "-c", COMPARED, str(ROOT)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("compiled it in") == 2, result.stdout + result.stderr
