"""SAC's log-probability, losses and update in float64, against torch.distributions and a second implementation."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution
from toy_envs import make_vector

import sac_continuous
import sac_selfplay
from sac_continuous import Adam, Agent, Args, TwinLinear, sample_actions, update


def make_optimizers(agent: Agent, lr: float) -> dict[str, Adam]:
    """The three of a run."""
    return {name: Adam(group, lr, 0.9, 0.999, 1e-8) for name, group in agent.groups().items()}


def squashed(mean: Tensor, log_std: Tensor) -> TransformedDistribution:
    """The policy as torch.distributions builds it; the cache keeps the value before tanh, so nothing is inverted."""
    return TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(cache_size=1)])


@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_squashed_log_probability_and_its_gradient(scale: float) -> None:
    """Same noise in, same actions, log-probabilities and gradients out; scale 8 saturates tanh in most samples."""
    torch.manual_seed(0)
    mean = (scale * torch.randn(200, 3).double()).requires_grad_()
    log_std = torch.randn(200, 3).double().requires_grad_()
    weights = torch.randn(200).double()
    torch.manual_seed(1)
    actions, log_prob = sample_actions(mean, log_std, torch.randn_like(mean))
    grads = torch.autograd.grad((weights * log_prob).sum() + actions.sum(), [mean, log_std])
    torch.manual_seed(1)
    policy = squashed(mean, log_std)
    expected_actions = policy.rsample()
    expected_log_prob = policy.log_prob(expected_actions)
    expected_grads = torch.autograd.grad((weights * expected_log_prob).sum() + expected_actions.sum(), [mean, log_std])
    torch.testing.assert_close(actions, expected_actions, rtol=1e-12, atol=0)
    torch.testing.assert_close(log_prob, expected_log_prob, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-7, atol=1e-9)


def test_squashed_log_probability_is_a_density() -> None:
    """Importance sampling in float32: the mean of 1 / density over the actions in an interval is its length."""
    torch.manual_seed(0)
    mean, log_std = torch.full((400_000, 1), 0.2), torch.full((400_000, 1), -0.1)
    actions, log_prob = sample_actions(mean, log_std, torch.randn(400_000, 1))
    inside = actions[:, 0].abs() < 0.9  # the weights have no finite variance at the ends
    assert (inside / log_prob.exp()).mean().item() == pytest.approx(1.8, rel=0.01)


def test_squashed_log_probability_stays_finite_in_float32() -> None:
    """Where tanh is 1 in float32, log(1 - tanh^2) is minus infinity; the stable form is not."""
    _, log_prob = sample_actions(torch.tensor([[50.0], [-50.0]]), torch.tensor([[-20.0], [-20.0]]), torch.randn(2, 1))
    noise_part = 20 - 0.5 * math.log(2 * math.pi)
    for value in log_prob.tolist():  # log(1 - tanh(50)^2) = 2 log 2 - 100, and the noise term is at most a few
        assert value == pytest.approx(noise_part - 2 * math.log(2) + 100, abs=8.0)


def test_twin_linear_is_two_linear_layers() -> None:
    """Values, and the range of the initial weights."""
    torch.manual_seed(0)
    twin, x = TwinLinear(64, 7), torch.randn(2, 5, 64)
    for i in range(2):
        layer = nn.Linear(64, 7)
        layer.weight.data, layer.bias.data = twin.weight[i].T, twin.bias[i, 0]
        torch.testing.assert_close(twin(x)[i], layer(x[i]))
    layers = TwinLinear(64, 300), sac_selfplay.TwinLinear(64, 300), nn.Linear(64, 300)
    for x in (x for layer in layers for x in (layer.weight, layer.bias)):
        torch.testing.assert_close([x.min().item(), x.max().item()], [-1 / 8, 1 / 8], rtol=0.05, atol=0)
    assert not torch.equal(twin.weight[0], twin.weight[1])


class Reference:
    """SAC once more, from the papers: separate critics, torch.distributions, no fused optimiser, no shared passes."""

    def __init__(self, agent: Agent, args: Any) -> None:
        self.args, agent = args, copy.deepcopy(agent)
        self.actor, self.log_alpha = agent.actor, agent.log_alpha
        self.q = [self.single_critic(agent.qf, i) for i in range(2)]
        self.q_target = copy.deepcopy(self.q)
        q_params = [p for net in self.q for p in net.parameters()]
        self.q_optimizer = torch.optim.Adam(q_params, lr=args.q_lr)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=args.policy_lr)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=args.alpha_lr)

    @staticmethod
    def single_critic(twin: Any, i: int) -> nn.Sequential:
        """One of the batched critics as an ordinary network."""
        linears = [nn.Linear(3, 256).double(), nn.Linear(256, 256).double(), nn.Linear(256, 1).double()]
        twins = [layer for layer in twin.net if not isinstance(layer, nn.ReLU)]
        for layer, twin_layer in zip(linears, twins, strict=True):
            layer.weight.data, layer.bias.data = twin_layer.weight.data[i].T.clone(), twin_layer.bias.data[i, 0].clone()
        return nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2])

    def min_q(self, nets: list[nn.Sequential], obs: Tensor, actions: Tensor) -> Tensor:
        """The smallest of the values."""
        return torch.stack([net(torch.cat([obs, actions], 1))[:, 0] for net in nets]).amin(0)

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Fresh actions and their log-probabilities."""
        distribution = squashed(*self.actor(obs))
        actions = distribution.rsample()
        return actions, distribution.log_prob(actions)

    def update(self, batch: tuple[Tensor, ...], num_updates: int) -> None:
        """Algorithm 1."""
        obs, actions, rewards, next_obs, terminations = batch
        alpha = self.log_alpha.exp().item()
        next_actions, next_log_prob = self.policy(next_obs)
        next_value = self.min_q(self.q_target, next_obs, next_actions) - alpha * next_log_prob
        target = torch.where(terminations.bool(), rewards, rewards + self.args.gamma * next_value).detach()
        loss = sum(nn.functional.mse_loss(net(torch.cat([obs, actions], 1))[:, 0], target) for net in self.q)
        self.step(self.q_optimizer, loss)
        if num_updates % self.args.policy_frequency == 0:
            for _ in range(self.args.policy_frequency):
                fresh, log_prob = self.policy(obs)
                alpha = self.log_alpha.exp().item()
                self.step(self.actor_optimizer, (alpha * log_prob - self.min_q(self.q, obs, fresh)).mean())
                if self.args.autotune:
                    surplus = -log_prob.detach() + self.args.target_entropy_scale  # of entropy, in one dimension
                    self.step(self.alpha_optimizer, (self.log_alpha.exp() * surplus).mean())
        for net, target_net in zip(self.q, self.q_target, strict=True):
            for p, p_target in zip(net.parameters(), target_net.parameters(), strict=True):
                p_target.data = (1 - self.args.tau) * p_target.data + self.args.tau * p.data

    @staticmethod
    def step(optimizer: torch.optim.Optimizer, loss: Any) -> None:
        """A plain gradient step; gradients that strayed into other parameters are dropped by their next zero_grad."""
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"autotune": False, "alpha": 0.2},
        {"policy_frequency": 2, "target_entropy_scale": 0.5},
    ],
    ids=str,
)
def test_updates_against_a_second_implementation(flags: dict[str, Any]) -> None:
    """Six updates in float64 from the same random numbers: all weights, targets and coefficients are compared."""
    torch.manual_seed(0)
    args = Args(tau=0.1, alpha=flags.pop("alpha", 0.7), **flags)
    agent = Agent(make_vector(AutoresetMode.SAME_STEP, 1), args).double()
    reference = Reference(agent, args)
    optimizers = make_optimizers(agent, lr=1e-3)
    for num_updates in range(6):
        torch.manual_seed(100 + num_updates)
        obs, actions, rewards, next_obs = (torch.randn(shape).double() for shape in ((32, 2), (32, 1), 32, (32, 2)))
        batch = (obs, actions.tanh(), rewards, next_obs, (torch.rand(32) < 0.3).double())
        torch.manual_seed(200 + num_updates)
        update(agent, optimizers, batch, args, num_updates)
        torch.manual_seed(200 + num_updates)
        reference.update(batch, num_updates)

    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-9)
    close(agent.log_alpha, reference.log_alpha)
    close(agent.actor.state_dict(), reference.actor.state_dict())
    for twins, critics in ((agent.qf, reference.q), (agent.qf_target, reference.q_target)):
        for i in range(2):
            close(Reference.single_critic(twins, i).state_dict(), critics[i].state_dict())


def test_the_actors_loss_leaves_no_gradient_in_the_critics() -> None:
    """It returns the gradients of the actor and of the entropy coefficient, in the order of their parameters."""
    torch.manual_seed(0)
    agent = Agent(make_vector(AutoresetMode.SAME_STEP, 1), Args())
    obs, noise = torch.randn(8, 2), torch.randn(8, 1)
    gradient, alpha_gradient, _ = sac_continuous.compute_actor_gradient(agent, (obs,), noise, Args())
    assert all(p.grad is None for p in agent.parameters())
    sac_continuous.compute_actor_loss(agent, obs, noise)[0].backward()
    torch.testing.assert_close(
        gradient, torch.cat([p.grad.flatten() for p in agent.actor.parameters() if p.grad is not None])
    )
    assert alpha_gradient is not None
    assert len(alpha_gradient) == 1
    assert sac_continuous.compute_actor_gradient(agent, (obs,), noise, Args(autotune=False))[1] is None


def test_the_normalisation_is_shared() -> None:
    """With --norm-obs, an update on raw observations equals one without it on observations normalised by hand."""
    torch.manual_seed(0)
    envs = make_vector(AutoresetMode.SAME_STEP, 1)
    agent, plain = Agent(envs, Args(norm_obs=True)), Agent(envs, Args())
    agent.obs_rms.update(torch.randn(100, 2) * 3 + 5)
    plain.load_state_dict(agent.state_dict())
    obs, next_obs = torch.randn(16, 2) * 3 + 5, torch.randn(16, 2) * 3 + 5
    other = torch.rand(16, 1), torch.randn(16)
    for a, o, n in ((agent, obs, next_obs), (plain, agent.obs_rms.normalize(obs), agent.obs_rms.normalize(next_obs))):
        torch.manual_seed(1)
        update(a, make_optimizers(a, lr=1e-3), (o, other[0], other[1], n, torch.zeros(16)), Args(), 0)
    torch.testing.assert_close(agent.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("norm_obs", [True, False])
def test_what_acts_is_what_the_losses_draw_from(norm_obs: bool) -> None:
    """Actions have the distribution that the losses draw from, also at both ends of the log standard deviation."""
    torch.manual_seed(0)
    agent = Agent(make_vector(AutoresetMode.SAME_STEP, 1), Args(norm_obs=norm_obs))
    optimizer = make_optimizers(agent, lr=0.01)["policy"]
    agent.obs_rms.update(torch.randn(100, 2) * 3 + 5)
    obs, noise = torch.randn(20, 2) * 3 + 5, 0.1 * torch.randn(20, 1)
    obs[0] = 1e6  # clipped if normalised
    last: Any = agent.actor.net[-1]
    for bias in (0.0, 30.0, -60.0):
        last.bias.data[1] += bias
        mean, log_std = agent.actor(agent.normalize(obs))
        expected = (mean + log_std.exp() * noise).tanh()
        deterministic = torch.as_tensor(agent.act(obs.double().numpy()))
        torch.testing.assert_close(deterministic, mean.tanh().detach(), rtol=1e-4, atol=1e-5)
        actions = torch.as_tensor(agent.act(obs.double().numpy(), noise))
        torch.testing.assert_close(actions, expected.detach(), rtol=1e-3, atol=1e-4)
        optimizer.step(torch.randn_like(optimizer.vector))


def test_targets_take_over_the_statistics_of_layers() -> None:
    """Parameters move by tau towards the source's; running statistics, which no gradient moves, are copied."""
    torch.manual_seed(0)
    source, target = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2))
    source(torch.randn(8, 2))
    before = copy.deepcopy(target)
    sac_continuous.update_target(source, target, 0.1)
    for x, old, new in zip(source.parameters(), before.parameters(), target.parameters(), strict=True):
        torch.testing.assert_close(new, 0.9 * old + 0.1 * x)
    for buffer, target_buffer in zip(source.buffers(), target.buffers(), strict=True):
        assert torch.equal(buffer, target_buffer)
