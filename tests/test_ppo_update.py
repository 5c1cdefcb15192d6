"""PPO's losses and update in float64 against references: torch.distributions, loops over samples, a second Adam."""

import copy
import math
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import Train, read_scalars
from gymnasium.vector import AutoresetMode
from test_gae import GAMMA, LAMBDA, gae_by_definition
from torch import nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from toy_envs import TwoActions, make_vector

import ppo_continuous
import ppo_selfplay
import sac_continuous
from ppo_continuous import Adam, Agent, Args, compute_policy_loss, compute_value_loss, normal_log_prob, update
from utils.team_env import Team


def test_log_probability() -> None:
    """Against torch.distributions, far out in the tails, too."""
    torch.manual_seed(0)
    mean, log_std = torch.randn(50, 3).double(), torch.tensor([-3.0, 0.0, 1.5]).double()
    actions = mean + 20 * torch.randn(50, 3).double()
    expected = Independent(Normal(mean, log_std.exp()), 1).log_prob(actions)
    torch.testing.assert_close(normal_log_prob(actions, mean, log_std), expected, rtol=1e-12, atol=0)


def test_acting_and_learning_see_the_same_observations() -> None:
    """In float64 with a large offset too: actions without noise are the means that the update computes."""
    agent = Agent(make_vector(AutoresetMode.SAME_STEP, 1), Args(num_envs=1))
    obs = 1e7 + 0.3 * np.random.default_rng(0).standard_normal((500, 2))
    agent.obs_rms.update(torch.as_tensor(obs.astype(np.float32)))
    mean, _ = agent.actor(agent.normalize(torch.as_tensor(obs.astype(np.float32))))
    np.testing.assert_allclose(agent.policy()(obs), mean.detach().numpy(), atol=1e-6)


def test_policy_loss_by_cases() -> None:
    """A gain beyond the clip range has no gradient and a constant objective; a loss is never clipped."""
    for ratio, advantage, objective, flows in [
        (1.1, 2.0, 2.2, True),  # inside
        (1.5, 2.0, 2.4, False),  # pays, too far: the objective stays at 1.2
        (1.5, -2.0, -3.0, True),  # harms: no clipping
        (0.5, 2.0, 1.0, True),  # harms: no clipping
        (0.5, -2.0, -1.6, False),  # pays, too far: the objective stays at 0.8
    ]:
        log_prob = torch.tensor([math.log(ratio) - 0.7], dtype=torch.float64, requires_grad=True)
        old_log_prob = torch.tensor([-0.7], dtype=torch.float64)
        loss, _ = compute_policy_loss(log_prob, old_log_prob, torch.tensor([advantage], dtype=torch.float64), 0.2)
        loss.backward()
        assert loss.item() == pytest.approx(-objective)
        assert log_prob.grad is not None
        assert log_prob.grad.item() == pytest.approx(-advantage * ratio if flows else 0.0)


def test_policy_metrics() -> None:
    """Both estimators converge to the KL divergence of the two normals; the clip fraction is a count."""
    torch.manual_seed(0)
    old, new = Normal(torch.zeros(1).double(), 1.0), Normal(torch.full((1,), 0.3).double(), 1.1)
    actions = old.sample((400_000,)).squeeze(1)
    log_prob, old_log_prob = new.log_prob(actions), old.log_prob(actions)
    _, metrics = compute_policy_loss(log_prob, old_log_prob, torch.zeros_like(actions), 0.2)
    expected = kl_divergence(old, new).item()
    assert metrics["losses/approx_kl"].item() == pytest.approx(expected, rel=0.01)
    assert metrics["losses/old_approx_kl"].item() == pytest.approx(expected, rel=0.03)
    assert metrics["losses/approx_kl"].item() != metrics["losses/old_approx_kl"].item()
    ratios = np.exp((log_prob - old_log_prob).numpy())
    assert metrics["losses/clipfrac"].item() == pytest.approx(np.mean((ratios < 0.8) | (ratios > 1.2)))


def test_value_loss_by_cases() -> None:
    """The worse of the two errors, halved."""
    for value, old_value, target, error in [
        (1.1, 1.0, 3.0, 1.9**2),  # moved by less than 0.2
        (2.0, 1.0, 3.0, 1.8**2),  # moved far towards the target: counts as 1.2
        (0.0, 1.0, 3.0, 9.0),  # moved far from the target: its own error is worse than that of 0.8
    ]:
        new, old, returns = torch.tensor([[value], [old_value], [target]], dtype=torch.float64)
        assert compute_value_loss(new, old, returns, 0.2)[0].item() == pytest.approx(0.5 * error)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_adv": True, "ent_coef": 0.1, "vf_coef": 0.8, "clip_coef": 0.3},
        {"max_grad_norm": 0.01},  # always shortened
        {"max_grad_norm": 1e3},  # never shortened, and never made longer
        {"std_min": None},
    ],
)
def test_updates_against_a_second_implementation(flags: dict[str, float | None]) -> None:
    """Five steps in float64, every weight compared: networks, joint loss, gradient clipping and Adam, written again."""
    torch.manual_seed(0)
    args = Args(**{"std_min": 0.51} | flags)  # type: ignore[arg-type]
    agent = Agent(make_vector(AutoresetMode.SAME_STEP, 1, TwoActions), args).double()
    agent.actor.log_std.data = torch.tensor([-0.7, 0.1]).double()  # the first just below log(0.51) = -0.673
    optimizer = Adam(agent.parameters(), 1e-2, 0.9, 0.999, 1e-5)

    params = {name: p.detach().clone().requires_grad_() for name, p in agent.named_parameters()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in params.items()}

    def forward(net: str, x: torch.Tensor) -> torch.Tensor:
        for layer in (0, 2):
            x = torch.tanh(x @ params[f"{net}.{layer}.weight"].T + params[f"{net}.{layer}.bias"])
        return x @ params[f"{net}.4.weight"].T + params[f"{net}.4.bias"]

    for t in range(1, 6):
        obs, actions, log_prob = torch.randn(16, 2).double(), torch.randn(16, 2).double(), -torch.rand(16).double() - 2
        advantages, returns, values = torch.randn(16).double(), torch.randn(16).double(), torch.randn(16).double()
        metrics = update(agent, optimizer, (obs, actions, log_prob, advantages, returns, values), args)

        policy = Normal(forward("actor.mean", obs), params["actor.log_std"].exp())
        scaled = torch.as_tensor(scipy.stats.zscore(advantages.numpy(), ddof=1)) if args.norm_adv else advantages
        (surrogate, value_error), clip = torch.zeros(2).double(), args.clip_coef
        ratios, new_values = (policy.log_prob(actions).sum(1) - log_prob).exp(), forward("critic", obs)[:, 0]
        for i in range(16):
            low, high = ratios[i] * scaled[i], torch.clip(ratios[i], 1 - clip, 1 + clip) * scaled[i]
            surrogate = surrogate + (low if low < high else high) / 16
            clipped_error = (values[i] + torch.clip(new_values[i] - values[i], -clip, clip) - returns[i]) ** 2
            value_error = value_error + max((new_values[i] - returns[i]) ** 2, clipped_error) / 16
        entropy = policy.entropy().sum(1).mean()
        loss = -surrogate - args.ent_coef * entropy + args.vf_coef * 0.5 * value_error

        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        norm = math.sqrt(sum(g.square().sum().item() for g in grads.values()))
        assert metrics["losses/entropy"].item() == pytest.approx(entropy.item())
        assert metrics["losses/grad_norm"].item() == pytest.approx(norm)  # before it is shortened
        for name, p in params.items():
            g = grads[name] * min(1.0, args.max_grad_norm / (norm + 1e-6))
            m, v = moments[name]
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g**2)
            with torch.no_grad():
                p -= 1e-2 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-5)
                if name == "actor.log_std" and args.std_min is not None:
                    p[p < math.log(0.51)] = math.log(0.51)
    for name, p in agent.named_parameters():
        torch.testing.assert_close(p, params[name], rtol=1e-6, atol=1e-9)


def test_entropy_where_the_standard_deviation_depends_on_the_observation() -> None:
    """The mean over the minibatch, as a changed actor may have it; a sum would grow with the minibatch."""
    agent = Agent(make_vector(AutoresetMode.SAME_STEP, 1), Args(num_envs=1))
    log_std = torch.linspace(-1, 1, 8)[:, None]
    forward = lambda obs: (agent.actor.mean(obs), agent.actor.log_std + log_std)  # noqa: E731
    agent.actor.forward = forward  # type: ignore[method-assign]
    minibatch = (torch.randn(8, 2), torch.randn(8, 1), *torch.randn(4, 8))
    _, metrics = ppo_continuous.compute_update_gradient(agent, minibatch, Args())
    stds = (agent.actor.log_std + log_std).exp()
    assert metrics["losses/entropy"].item() == pytest.approx(Normal(0.0, stds).entropy().mean().item())


def test_adam_is_pytorchs() -> None:
    """Twenty steps equal those of `torch.optim.Adam` to the last digit, while the learning rate falls."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))]
    theirs = nn.Parameter(torch.cat([x.detach().flatten() for x in ours]))
    hyperparameters = 0.1, 0.9, 0.999, 1e-5
    optimizer, reference = Adam(ours, *hyperparameters), torch.optim.Adam([theirs], lr=0.1, eps=1e-5, fused=True)
    for step in range(20):
        gradient = torch.randn(17)
        if step == 10:  # as a resumed run does
            saved, optimizer = optimizer.state_dict(), Adam(ours, *hyperparameters)
            optimizer.load_state_dict(saved)
        optimizer.lr = reference.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step(gradient)
        theirs.grad = gradient
        reference.step()
        torch.testing.assert_close(torch.cat([x.detach().flatten() for x in ours]), theirs.detach(), rtol=0, atol=0)
    assert all(parameter.data_ptr() >= optimizer.vector.data_ptr() for parameter in ours)  # still views of the vector


@pytest.mark.parametrize("module", [ppo_continuous, sac_continuous], ids=["ppo", "sac"])
def test_moments_of_a_zero_gradient_end_at_zero(module: ModuleType, train: Train) -> None:
    """A run flushes subnormal numbers to zero, because a processor computes slowly with them."""
    train(module)
    optimizer = module.Adam([nn.Parameter(torch.ones(3))], 0.1, 0.9, 0.999, 1e-8)
    for gradient in [1e-30] + 2000 * [0.0]:
        optimizer.step(torch.full((3,), gradient))
    assert not optimizer.mean.any()


@pytest.mark.parametrize(("std_min", "std"), [(0.3, 0.6), (None, 1.0)])
def test_initial_weights(std_min: float | None, std: float) -> None:
    """Orthogonal with gain sqrt(2) inside, 0.01 for the mean and 1 for the value; zero biases; the noise."""
    agent = Agent(make_vector(AutoresetMode.SAME_STEP, 1), Args(std_min=std_min))
    for net, output_gain in ((agent.actor.mean, 0.01), (agent.critic, 1.0)):
        linears = [layer for layer in net if isinstance(layer, nn.Linear)]
        assert [layer.out_features for layer in linears[:2]] == [64, 64]
        for layer, gain in zip(linears, (math.sqrt(2), math.sqrt(2), output_gain), strict=True):
            singular_values = torch.linalg.svdvals(layer.weight)
            torch.testing.assert_close(singular_values, torch.full_like(singular_values, gain))
            assert not layer.bias.any()
    torch.testing.assert_close(agent.actor.log_std.exp(), torch.full((1,), std))


@pytest.mark.parametrize("norm_obs", [True, False])
def test_the_policy_in_numpy_is_the_networks(norm_obs: bool) -> None:
    """Actions have the distribution whose log-probabilities the update computes, before and after a step."""
    torch.manual_seed(0)
    agent = Agent(make_vector(AutoresetMode.SAME_STEP, 1), Args(norm_obs=norm_obs, std_min=0.25))
    optimizer = Adam(agent.parameters(), 0.1, 0.9, 0.999, 1e-8)
    agent.obs_rms.update(torch.randn(100, 2) * 3 + 5)
    obs, noise = torch.randn(20, 2) * 3 + 5, torch.randn(20, 1)
    obs[0], obs[1] = 1e6, -1e6  # clipped if normalised
    for _ in range(2):
        mean, log_std = agent.actor(agent.normalize(obs))
        act = agent.policy()
        torch.testing.assert_close(torch.as_tensor(act(obs.double().numpy())), mean.detach(), rtol=1e-4, atol=1e-5)
        z = (torch.as_tensor(act(obs.double().numpy(), noise.numpy())) - mean) / log_std.exp()
        torch.testing.assert_close(z, noise, rtol=1e-3, atol=1e-3)
        optimizer.step(torch.randn_like(optimizer.vector))


class Spies:
    """Runs one of the scripts, and keeps what `main` hands to the policy and to `update`, by iteration."""

    def __init__(self, module: Any, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module, self.run = module, train
        self.taken: dict[float, float] = {}  # log-probabilities when the actions were taken, by their first dimension
        self.log_probs: list[dict[float, float]] = []  # of earlier iterations
        self.minibatches: list[list[tuple[torch.Tensor, ...]]] = []
        self.approx_kl: list[float] = []  # replaces the true ones, if there are any
        self.make_batch, self.update = module.make_batch, module.update
        if module is ppo_continuous:
            policy = module.Agent.policy
            monkeypatch.setattr(module.Agent, "policy", lambda agent: partial(self.spy_act, agent, policy(agent)))
        else:
            act = module.Agent.act
            monkeypatch.setattr(module.Agent, "act", lambda agent, *x: self.spy_act(agent, partial(act, agent), *x))
        monkeypatch.setattr(module, "make_batch", self.spy_make_batch)
        monkeypatch.setattr(module, "update", self.spy_update)

    def train(self, **flags: Any) -> dict[str, list[tuple[int, float]]]:
        """All that the run has logged."""
        return read_scalars(self.run(self.module, **flags))

    def spy_act(self, agent: Any, act: Any, *inputs: Any) -> np.ndarray:
        """The last input is the noise, except in the final evaluation: what is taken then is not read."""
        actions, log_std = act(*inputs), agent.actor.log_std.detach().sum().item()
        log_prob = scipy.stats.norm.logpdf(inputs[-1]).sum(1) - log_std
        self.taken |= dict(zip(actions[:, 0].tolist(), log_prob.tolist(), strict=True))
        return actions

    def spy_make_batch(self, *inputs: Any) -> Any:
        """An iteration's rollout is complete."""
        self.log_probs.append(self.taken)
        self.minibatches.append([])
        self.taken = {}
        return self.make_batch(*inputs)

    def spy_update(self, agent: Any, optimizer: Any, minibatch: Any, *rest: Any) -> dict[str, torch.Tensor]:
        """Keeps the minibatch."""
        metrics = self.update(agent, optimizer, minibatch, *rest)
        self.minibatches[-1].append(tuple(x.clone() for x in minibatch))
        if self.approx_kl:
            metrics["losses/approx_kl"] = torch.tensor(self.approx_kl[len(self.minibatches[-1]) - 1])
        return metrics


@pytest.fixture(params=[ppo_continuous, ppo_selfplay], ids=["single", "selfplay"])
def spies(
    request: pytest.FixtureRequest, train: Train, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch
) -> Spies:
    """Each of the PPO scripts in turn."""
    return Spies(request.param, train if request.param is ppo_continuous else train_selfplay, monkeypatch)


def test_old_log_probabilities_are_those_of_the_policy_that_acted(spies: Spies) -> None:
    """They are computed before the rollout changes the statistics that normalise observations."""
    spies.train(norm_obs=True)
    assert len(spies.minibatches) == 4
    for taken, minibatches in zip(spies.log_probs, spies.minibatches, strict=True):
        *_, actions, log_prob, _, _, _ = map(torch.cat, zip(*minibatches, strict=True))
        expected = [taken[action] for action in actions[:, 0].tolist()]
        assert len(expected) == 128  # every transition in each epoch
        np.testing.assert_allclose(log_prob.numpy(), expected, rtol=1e-3, atol=1e-3)


def test_discounted_returns(spies: Spies, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reward's scale is made of: by --gamma, in each environment, from an episode's beginning on."""
    rollouts: list[Any] = []

    def spy(agent: Any, rollout: Any, *rest: Any) -> Any:
        rollouts.append(copy.deepcopy(rollout))
        return spies.spy_make_batch(agent, rollout, *rest)

    monkeypatch.setattr(spies.module, "make_batch", spy)
    task = {"env_id": "toy_envs:Counting-v0"} if spies.module is ppo_continuous else {}
    spies.run(spies.module, gamma=0.6, checkpoint_freq=0, **task)
    rewards, dones, found = (
        np.concatenate([getattr(x, name) for x in rollouts]) for name in ("rewards", "dones", "discounted_returns")
    )
    expected = np.zeros(rewards.shape[1])
    for t in range(len(rewards)):
        expected = 0.6 * expected + rewards[t]
        np.testing.assert_allclose(found[t], expected, rtol=1e-5, atol=1e-5)
        expected[dones[t]] = 0.0
    assert dones.any()


def test_explained_variance(spies: Spies) -> None:
    """1 - Var(returns - values) / Var(returns), over the rollout; returns are advantages plus values."""
    logged = [value for _, value in spies.train(target_kl=None)["losses/explained_variance"]]
    assert len(logged) == 4
    for value, minibatches in zip(logged, spies.minibatches, strict=True):
        *_, advantages, returns, values = (torch.cat(column).numpy() for column in zip(*minibatches, strict=True))
        np.testing.assert_allclose(returns, advantages + values, atol=1e-5)
        assert value == pytest.approx(1 - np.var(returns - values) / np.var(returns), rel=1e-3)


@pytest.mark.parametrize(
    ("approx_kl", "epochs"),
    [
        ([0.2, 0.0, 0.0, 0.0], 1),  # the mean is above the target, and the last minibatch is below it
        ([0.0, 0.0, 0.0, 0.1], 3),  # the other way round
        (4 * [0.035], 1),  # by a little
        (4 * [0.0] + [0.2, 0.0, 0.0, 0.0], 2),  # the mean of an epoch counts, not that of all epochs so far
    ],
)
def test_target_kl_is_compared_with_the_mean_of_an_epoch(spies: Spies, approx_kl: list[float], epochs: int) -> None:
    """An iteration ends after the first epoch above the target."""
    spies.approx_kl = approx_kl + 12 * [0.0]
    spies.train(target_kl=0.03, update_epochs=3, num_minibatches=4)
    assert [len(minibatches) for minibatches in spies.minibatches] == 4 * [4 * epochs]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("module", [ppo_continuous, ppo_selfplay], ids=["single", "selfplay"])
def test_what_is_learned_from_a_rollout(module: ModuleType, norm: bool) -> None:
    """Each column by NumPy: log-probabilities by the old statistics, all others by those that know the rollout."""
    torch.manual_seed(0)
    rng, shape = np.random.default_rng(0), (6, 5)
    args = module.Args(norm_obs=norm, norm_reward=norm, gamma=GAMMA, gae_lambda=LAMBDA)
    if module is ppo_continuous:
        agent, rollout = module.Agent(make_vector(AutoresetMode.SAME_STEP, 1), args), module.Rollout(*shape, 2, 1)
        rollout.actions[:], valid = rng.normal(size=(*shape, 1)), np.ones(shape, dtype=bool)
    else:
        team = Team("disc", "disc", ("disc_0",), 2, 1, (3,))
        agent, rollout = module.Agent(team, args), module.Rollout(*shape, team)
        rollout.actions[:], rollout.masks[..., :2] = rng.integers(2, size=(*shape, 1)), True
        rollout.masks[:3, :, 2] = True  # in the other steps the last action is illegal
        rollout.valid[:] = valid = rng.random(shape) < 0.7
    rollout.obs[:], rollout.final_obs[:] = rng.normal(3.0, 2.0, (2, *shape, 2))
    rollout.rewards[:], rollout.discounted_returns[:] = rng.normal(size=shape), rng.normal(1.0, 3.0, shape)
    rollout.rewards[0, :2] = 1e3, -1e3  # more than ten standard deviations
    rollout.dones[:] = rng.random(shape) < 0.3
    rollout.terminations[:] = rollout.dones & (rng.random(shape) < 0.5)
    old_obs, old_returns = rng.normal(size=(20, 2)), rng.normal(size=20)
    agent.obs_rms.update(torch.as_tensor(old_obs))
    agent.return_rms.update(torch.as_tensor(old_returns))

    def normalized(obs: np.ndarray, seen: np.ndarray) -> torch.Tensor:
        z = ((obs - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8)).clip(-10, 10)
        return torch.as_tensor(z if norm else obs, dtype=torch.float32)

    seen, returns = (
        np.concatenate([old, new[valid]])
        for old, new in ((old_obs, rollout.obs), (old_returns, rollout.discounted_returns))
    )
    policy = agent.actor(normalized(rollout.obs, old_obs))
    actions = torch.as_tensor(rollout.actions)
    if module is ppo_continuous:
        log_prob = Normal(policy[0], policy[1].exp()).log_prob(actions).sum(-1)
    else:
        legal = policy.masked_fill(~torch.as_tensor(rollout.masks), -math.inf)
        log_prob = Categorical(logits=legal).log_prob(actions[..., 0])
    obs = normalized(rollout.obs, seen)
    values, next_values = (
        agent.critic(x).squeeze(-1).detach().numpy() for x in (obs, normalized(rollout.final_obs, seen))
    )
    rewards = (rollout.rewards / np.sqrt(returns.var() + 1e-8)).clip(-10, 10) if norm else rollout.rewards
    advantages = gae_by_definition(rewards, values, next_values, rollout.terminations, rollout.dones)
    expected = [obs, actions, log_prob.detach(), advantages, advantages + values, values]
    expected[1:1] = [rollout.masks] if module is ppo_selfplay else []
    batch = module.make_batch(agent, rollout, args, torch.device("cpu"))
    for found, column in zip(batch, expected, strict=True):
        np.testing.assert_allclose(found.numpy() * 1.0, np.asarray(column)[valid] * 1.0, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("module", [ppo_continuous, ppo_selfplay], ids=["single", "selfplay"])
def test_each_epoch_has_an_order_of_its_own(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows once in each of three epochs, and whole ones."""
    seen: list[torch.Tensor] = []

    def spy(agent: Any, optimizer: Any, minibatch: tuple[torch.Tensor, ...], *_: Any) -> dict[str, torch.Tensor]:
        assert torch.equal(minibatch[0], -minibatch[1])
        seen.append(minibatch[0])
        return {"losses/approx_kl": torch.zeros(()), "losses/count": torch.tensor(float(len(seen)))}

    monkeypatch.setattr(module, "update", spy)
    rows = torch.arange(64)
    metrics = module.learn_from(None, None, (rows, -rows), module.Args(update_epochs=3, num_minibatches=4), None)
    assert metrics["losses/count"] == 6.5  # the mean over all minibatches
    assert [len(x) for x in seen] == 12 * [16]
    orders = torch.cat(seen).reshape(3, 64).tolist()
    assert all(sorted(order) == rows.tolist() for order in orders)
    assert len(set(map(tuple, [*orders, rows.tolist()]))) == 4
