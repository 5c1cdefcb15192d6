"""The mathematics of the self-play scripts, in float64.

The references are torch.distributions, sums over all joint actions, second implementations with an Adam of their own,
and, for Box actions, the single-agent scripts.
"""

import copy
import itertools
import math
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence

import ppo_selfplay
import sac_continuous
import sac_selfplay
from utils.run import BufferFiles
from utils.team_env import Team

Params = dict[str, Tensor]


def make_team(*branches: int, obs_dim: int = 5) -> Team:
    """One agent; without branches it has two Box actions."""
    return Team("team", "team", ("agent_0",), obs_dim, len(branches) or 2, branches)


def draw_masks(n: int, branches: tuple[int, ...]) -> Tensor:
    """Legal actions (n, sum of branches), at least one of each branch; the first row is forced, the last one free."""
    columns = []
    for size in branches:
        mask = torch.rand(n, size) < 0.6
        mask[torch.arange(n), torch.randint(size, (n,))] = True
        mask[0], mask[-1] = torch.arange(size) == size - 1, True
        columns.append(mask)
    return torch.cat(columns, dim=1)


def draw_legal(masks: Tensor, branches: tuple[int, ...]) -> Tensor:
    """A legal action (n, num_branches) for each row."""
    parts = masks.double().split(list(branches), dim=1)
    return torch.cat([torch.multinomial(part, 1) for part in parts], dim=1)


def legal_policy(logits: Tensor, mask: Tensor, branches: tuple[int, ...]) -> list[tuple[list[int], Categorical]]:
    """Of one row, for each branch: the legal actions, and the distribution over just these as PyTorch has it."""
    policy, start = [], 0
    for size in branches:
        legal = [i for i in range(size) if mask[start + i]]
        policy.append((legal, Categorical(logits=logits[start : start + size][legal])))
        start += size
    return policy


def joint_actions(
    logits: Tensor, mask: Tensor, branches: tuple[int, ...]
) -> list[tuple[tuple[int, ...], Tensor, list[Tensor]]]:
    """Of one row, every legal joint action: its parts, its probability, and the log-probabilities of its parts."""
    policy = legal_policy(logits, mask, branches)
    result = []
    for ranks in itertools.product(*(range(len(legal)) for legal, _ in policy)):
        log_probs = [branch.logits[rank] for rank, (_, branch) in zip(ranks, policy, strict=True)]
        parts = tuple(legal[rank] for rank, (legal, _) in zip(ranks, policy, strict=True))
        result.append((parts, math.prod((log_prob.exp() for log_prob in log_probs), start=torch.ones(())), log_probs))
    return result


class Adam:
    """Kingma and Ba 2015, algorithm 1."""

    def __init__(self, params: Params, learning_rate: float, eps: float = 1e-8) -> None:
        self.params, self.learning_rate, self.eps, self.t = params, learning_rate, eps, 0
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in params.items()}

    def step(self, loss: Tensor, max_norm: float = math.inf) -> None:
        """Along the gradient, shortened to this norm."""
        self.t += 1
        grads = torch.autograd.grad(loss, list(self.params.values()))
        norm = math.sqrt(sum(g.square().sum().item() for g in grads))
        with torch.no_grad():
            for (name, p), grad in zip(self.params.items(), grads, strict=True):
                g, (m, v) = grad * min(1.0, max_norm / (norm + 1e-6)), self.moments[name]
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g**2)
                p -= self.learning_rate * (m / (1 - 0.9**self.t)) / ((v / (1 - 0.999**self.t)).sqrt() + self.eps)


def clone(named: Any) -> Params:
    """Copies of parameters, for a second implementation."""
    return {name: p.detach().clone().requires_grad_() for name, p in named}


# --- policies ---


def test_normal_policy() -> None:
    """PPO's Box policy: log-density, far out in the tails too, entropy, and what noise makes of it."""
    torch.manual_seed(0)
    actor = ppo_selfplay.NormalActor(5, 2).double()
    actor.log_std.data = torch.tensor([-2.0, 0.7]).double()
    obs = 30 * torch.randn(50, 5).double()
    policy, masks = actor(obs), torch.ones(50, 0, dtype=torch.bool)
    reference = Independent(Normal(actor.mean(obs), actor.log_std.exp()), 1)
    actions = actor.mean(obs).detach() + 20 * torch.randn(50, 2).double()
    torch.testing.assert_close(actor.log_prob(policy, masks, actions), reference.log_prob(actions), rtol=1e-12, atol=0)
    torch.testing.assert_close(actor.entropy(policy, masks), reference.entropy(), rtol=1e-12, atol=0)
    assert torch.equal(actor.sample(policy, masks, 0.0), reference.mean)
    draws = actor.sample(actor(obs[:1]).expand(100_000, 4), masks, actor.noise(100_000))
    torch.testing.assert_close(draws.std(0), actor.log_std.exp(), rtol=0.01, atol=0)
    torch.testing.assert_close(draws.mean(0), actor.mean(obs[0]), rtol=0, atol=0.03)


@pytest.mark.parametrize("module", [ppo_selfplay, sac_selfplay], ids=["ppo", "sac"])
@pytest.mark.parametrize("branches", [(6,), (2, 5), (3, 1, 4)], ids=str)
def test_categorical_policy(module: ModuleType, branches: tuple[int, ...]) -> None:
    """Log-probabilities, entropy and their gradients: those of a policy that knows the legal actions only."""
    torch.manual_seed(0)
    actor = module.CategoricalActor(5, branches).double()
    masks = draw_masks(40, branches)
    actions = draw_legal(masks, branches)
    logits = (4 * torch.randn(40, sum(branches)).double()).requires_grad_()
    weights = torch.randn(40, 2).double()

    log_probs = actor.log_probs(logits, masks)
    offsets = torch.tensor([0, *branches[:-1]]).cumsum(0)
    log_prob = log_probs.gather(1, actions + offsets).sum(1)
    entropy = -(log_probs.exp() * log_probs).sum(1)
    if module is ppo_selfplay:
        torch.testing.assert_close(actor.log_prob(logits, masks, actions), log_prob)
        log_prob, entropy = actor.log_prob(logits, masks, actions), actor.entropy(logits, masks)
    (grads,) = torch.autograd.grad((weights[:, 0] * log_prob + weights[:, 1] * entropy).sum(), logits)

    total = torch.zeros(()).double()
    for i in range(40):
        policy = legal_policy(logits[i], masks[i], branches)
        chosen = [torch.tensor(legal.index(int(action))) for (legal, _), action in zip(policy, actions[i], strict=True)]
        row_log_prob: Any = sum(branch.log_prob(rank) for (_, branch), rank in zip(policy, chosen, strict=True))
        row_entropy: Any = sum(branch.entropy() for _, branch in policy)
        assert log_prob[i].item() == pytest.approx(row_log_prob.item(), rel=1e-12, abs=1e-12)
        assert entropy[i].item() == pytest.approx(row_entropy.item(), rel=1e-12, abs=1e-12)
        total = total + weights[i, 0] * row_log_prob + weights[i, 1] * row_entropy
    (expected_grads,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-9, atol=1e-12)
    assert (log_probs.exp()[~masks] == 0.0).all()
    assert (grads[~masks] == 0.0).all()
    assert entropy[0] == 0.0
    assert grads.isfinite().all()


@pytest.mark.parametrize("module", [ppo_selfplay, sac_selfplay], ids=["ppo", "sac"])
def test_categorical_samples(module: ModuleType) -> None:
    """Frequencies of whole actions against products of softmax probabilities; the likeliest one without noise."""
    torch.manual_seed(0)
    branches, n = (4, 3), 200_000
    actor = module.CategoricalActor(5, branches)
    logits = torch.tensor([0.5, 9.0, -1.0, 1.0, 0.2, -0.3, 7.0])  # the likeliest action of each branch is illegal
    mask = torch.tensor([True, False, True, True, True, True, False])
    policy, masks = logits.expand(n, 7), mask.expand(n, 7)
    actions = actor.sample(policy, masks, actor.noise(n, torch.Generator().manual_seed(1)))
    counts = Counter(map(tuple, actions.tolist()))
    expected = {parts: n * float(probability) for parts, probability, _ in joint_actions(logits, mask, branches)}
    assert counts.keys() <= expected.keys()
    assert scipy.stats.chisquare([counts[parts] for parts in expected], list(expected.values())).pvalue > 0.001
    assert actor.sample(policy[:2], masks[:2], 0.0).tolist() == [[3, 0]] * 2
    again = actor.sample(policy, masks, actor.noise(n, torch.Generator().manual_seed(1)))
    assert torch.equal(actions, again)


@pytest.mark.parametrize("module", [ppo_selfplay, sac_selfplay], ids=["ppo", "sac"])
def test_no_noise_draws_an_illegal_action(module: ModuleType) -> None:
    """Neither the largest logit nor the ends of the noise's range."""
    actor = module.CategoricalActor(5, (3,))
    mask = torch.tensor([[False, True, True]])
    noise = actor.noise(1_000_000, torch.Generator().manual_seed(0))
    assert noise.isfinite().all()
    for value in (noise.min(), noise.max(), torch.tensor(100.0)):
        assert actor.sample(torch.tensor([[1e6, -1e6, -1e6]]), mask, value).item() != 0


def test_squashed_policy() -> None:
    """SAC's Box policy: actions are tanh of the mean, or of a draw around it."""
    torch.manual_seed(0)
    actor = sac_selfplay.NormalActor(5, 2).double()
    obs = torch.randn(3, 5).double()
    mean, log_std = actor(obs).chunk(2, dim=-1)
    masks, noise = torch.ones(3, 0, dtype=torch.bool), actor.noise(3).double()
    assert torch.equal(actor.sample(actor(obs), masks, 0.0), mean.tanh())
    torch.testing.assert_close(actor.sample(actor(obs), masks, noise).atanh(), mean + log_std.exp() * noise)
    assert noise.shape == (3, 2)
    assert actor(1e6 * obs).chunk(2, dim=-1)[1].abs().max() <= 20


# --- PPO ---


@pytest.mark.parametrize("branches", [(), (4,), (2, 5)], ids=str)
@pytest.mark.parametrize(
    "flags",
    [
        {"ent_coef": 0.1},
        {"norm_adv": False},
        {"max_grad_norm": 0.01},  # always shortened
        {"max_grad_norm": 1e3},  # never shortened, and never made longer
    ],
    ids=str,
)
def test_ppo_updates_against_a_second_implementation(branches: tuple[int, ...], flags: dict[str, Any]) -> None:
    """Five steps, every weight: networks, masked policy, joint loss sample by sample, gradient clipping and Adam."""
    torch.manual_seed(0)
    args = ppo_selfplay.Args(**{"ent_coef": 0.01} | flags)
    agent = ppo_selfplay.Agent(make_team(*branches), args).double()
    for layer in agent.actor.modules():  # initial policies are nearly uniform, which would hide much
        if isinstance(layer, nn.Linear):
            layer.weight.data *= 2.0
    if isinstance(agent.actor, ppo_selfplay.NormalActor):
        agent.actor.log_std.data -= 0.3
    optimizer = ppo_selfplay.Adam(agent.parameters(), 1e-2, 0.9, 0.999, 1e-5)
    params = clone(agent.named_parameters())
    reference = Adam(params, 1e-2, eps=1e-5)
    actor_net = "actor.logits" if branches else "actor.mean"

    def forward(net: str, x: Tensor) -> Tensor:
        for layer in (0, 2):
            x = torch.tanh(x @ params[f"{net}.{layer}.weight"].T + params[f"{net}.{layer}.bias"])
        return x @ params[f"{net}.4.weight"].T + params[f"{net}.4.bias"]

    for _ in range(5):
        obs, old_log_prob = torch.randn(16, 5).double(), -torch.rand(16).double() - 1
        masks = draw_masks(16, branches) if branches else torch.ones(16, 0, dtype=torch.bool)
        actions = draw_legal(masks, branches) if branches else torch.randn(16, 2).double()
        advantages, returns, old_values = torch.randn(3, 16).double()
        metrics = ppo_selfplay.update(
            agent, optimizer, (obs, masks, actions, old_log_prob, advantages, returns, old_values), args
        )

        outputs, values = forward(actor_net, obs), forward("critic", obs)[:, 0]
        scaled = torch.as_tensor(scipy.stats.zscore(advantages.numpy(), ddof=1)) if args.norm_adv else advantages
        surrogate, entropy, value_error = torch.zeros(3).double()
        for i in range(16):
            if branches:
                policy = legal_policy(outputs[i], masks[i], branches)
                ranks = [torch.tensor(legal.index(int(a))) for (legal, _), a in zip(policy, actions[i], strict=True)]
                log_prob: Any = sum(branch.log_prob(rank) for (_, branch), rank in zip(policy, ranks, strict=True))
                entropy = entropy + sum(branch.entropy() for _, branch in policy) / 16
            else:
                normal = Normal(outputs[i], params["actor.log_std"].exp())
                log_prob, entropy = normal.log_prob(actions[i]).sum(), entropy + normal.entropy().sum() / 16
            ratio = (log_prob - old_log_prob[i]).exp()
            surrogate = surrogate + min(ratio * scaled[i], torch.clip(ratio, 0.8, 1.2) * scaled[i]) / 16
            clipped_error = (old_values[i] + torch.clip(values[i] - old_values[i], -0.2, 0.2) - returns[i]) ** 2
            value_error = value_error + max((values[i] - returns[i]) ** 2, clipped_error) / 16
        reference.step(-surrogate - args.ent_coef * entropy + 0.5 * args.vf_coef * value_error, args.max_grad_norm)
        assert metrics["losses/policy_loss"].item() == pytest.approx(-surrogate.item(), rel=1e-6)
        assert metrics["losses/value_loss"].item() == pytest.approx(0.5 * value_error.item(), rel=1e-6)
        assert metrics["losses/entropy"].item() == pytest.approx(entropy.item(), rel=1e-6)
    for name, p in agent.named_parameters():
        torch.testing.assert_close(p, params[name], rtol=1e-6, atol=1e-9)


def test_kl_metric_of_a_categorical_policy() -> None:
    """The estimate from samples converges to the KL divergence of old and new."""
    torch.manual_seed(0)
    actor = ppo_selfplay.CategoricalActor(5, (4,)).double()
    old, new = torch.randn(2, 1, 4).double()
    masks = torch.tensor([[True, True, False, True]]).expand(200_000, 4)
    actions = actor.sample(old.expand(200_000, 4), masks, actor.noise(200_000))
    log_prob, old_log_prob = (actor.log_prob(logits.expand(200_000, 4), masks, actions) for logits in (new, old))
    _, metrics = ppo_selfplay.compute_policy_loss(log_prob, old_log_prob, torch.zeros(200_000).double(), 0.2)
    (_, old_policy), (_, new_policy) = (legal_policy(x[0], masks[0], (4,))[0] for x in (old, new))
    assert metrics["losses/approx_kl"].item() == pytest.approx(kl_divergence(old_policy, new_policy).item(), rel=0.02)


# --- SAC's losses, discrete ---

BRANCHES = [(4,), (2, 5), (3, 1, 4)]


def make_sac(branches: tuple[int, ...], **flags: Any) -> tuple[sac_selfplay.Agent, sac_selfplay.Args]:
    """An agent in float64 whose targets are not its critics, and whose entropy coefficients differ."""
    args = sac_selfplay.Args(**{"gamma": 0.9} | flags)
    agent = sac_selfplay.Agent(make_team(*branches), args).double()
    for p in agent.actor.parameters():
        p.data *= 3.0
    for p in agent.qf_target.parameters():
        p.data += 0.1 * torch.randn_like(p)
    agent.log_alpha.data = torch.linspace(-1.5, 0.3, len(branches) or 1).double()
    return agent, args


def draw_batch(branches: tuple[int, ...], n: int = 12) -> tuple[Tensor, ...]:
    """As the replay buffer gives it."""
    obs, next_obs = 2 * torch.randn(2, n, 5).double()
    masks, next_masks = draw_masks(n, branches), draw_masks(n, branches)
    terminations = (torch.arange(n) % 3 == 0).double()
    return obs, masks, draw_legal(masks, branches), torch.randn(n).double(), next_obs, next_masks, terminations


def values_of_parts(q: Tensor, parts: tuple[int, ...], branches: tuple[int, ...]) -> list[Tensor]:
    """The values that a row (sum of branches,) has for the parts of a joint action."""
    return [q[sum(branches[:k]) + part] for k, part in enumerate(parts)]


NO_NOISE = torch.zeros(0)  # discrete actions are not drawn, but averaged over


def brute_force_soft_value(logits: Tensor, mask: Tensor, q: Tensor, alpha: Tensor, branches: tuple[int, ...]) -> Tensor:
    """The soft value of one row by joint actions: the mean over branches of value minus alpha times log-probability."""
    total = torch.zeros(()).double()
    for parts, probability, log_probs in joint_actions(logits, mask, branches):
        terms = zip(values_of_parts(q, parts, branches), alpha, log_probs, strict=True)
        total = total + probability * sum(value - a * log_prob for value, a, log_prob in terms) / len(branches)
    return total


@pytest.mark.parametrize("critics", ["mean", "min"])
@pytest.mark.parametrize("branches", BRANCHES, ids=str)
def test_td_target_is_an_expectation_over_joint_actions(branches: tuple[int, ...], critics: str) -> None:
    """It is the sum over all legal joint actions, less what the target entropy pays; at a termination, the reward."""
    torch.manual_seed(0)
    agent, args = make_sac(branches, critics=critics)
    _, _, _, rewards, next_obs, next_masks, terminations = draw_batch(branches)
    targets = sac_selfplay.compute_td_target(agent, rewards, next_obs, next_masks, terminations, NO_NOISE, args)
    first, second = agent.qf_target(next_obs)
    alpha, logits = agent.log_alpha.exp(), agent.actor(next_obs)
    for i in range(12):
        q = (first[i] + second[i]) / 2 if args.critics == "mean" else torch.minimum(first[i], second[i])
        value = brute_force_soft_value(logits[i], next_masks[i], q, alpha, branches).item()
        wanted = [0.2 * math.log(int(part.sum())) for part in next_masks[i].split(branches)]
        value -= sum(a * entropy for a, entropy in zip(alpha.tolist(), wanted, strict=True)) / len(branches)
        expected = rewards[i].item() + (0.0 if terminations[i] else 0.9 * value)
        assert targets[i].item() == pytest.approx(expected, rel=1e-7)  # logs of numbers of actions are float32
    assert not targets.requires_grad


@pytest.mark.parametrize("branches", BRANCHES, ids=str)
def test_qf_loss_by_loops(branches: tuple[int, ...]) -> None:
    """Of a joint action the mean of its parts' values, sample by sample and critic by critic."""
    torch.manual_seed(0)
    agent, _ = make_sac(branches)
    obs, _, actions, targets, *_ = draw_batch(branches)
    loss, metrics = sac_selfplay.compute_qf_loss(agent, obs, actions.float(), targets)  # the buffer stores floats
    losses: list[Any] = []
    means: list[Any] = []
    for values in agent.qf(obs):
        rows = [
            sum(values_of_parts(values[i], tuple(actions[i].tolist()), branches)) / len(branches) for i in range(12)
        ]
        losses.append(sum((row - target) ** 2 for row, target in zip(rows, targets, strict=True)) / 12)
        means.append(sum(rows) / 12)
    assert loss.item() == pytest.approx(sum(x.item() for x in losses), rel=1e-9)
    assert metrics["losses/qf1_loss"].item() == pytest.approx(losses[0].item(), rel=1e-9)
    assert metrics["losses/qf2_values"].item() == pytest.approx(means[1].item(), rel=1e-9)


@pytest.mark.parametrize("branches", BRANCHES, ids=str)
def test_actor_loss_and_its_gradient_over_joint_actions(branches: tuple[int, ...]) -> None:
    """The negated soft value, and entropies of each branch; no gradient reaches critics and coefficients."""
    torch.manual_seed(0)
    agent, _ = make_sac(branches)
    obs, masks, *_ = draw_batch(branches)
    loss, entropies, _ = sac_selfplay.compute_actor_loss(agent, obs, masks, NO_NOISE)
    grads = torch.autograd.grad(loss, list(agent.actor.parameters()), retain_graph=True)
    untouched = [*agent.qf.parameters(), agent.log_alpha]
    assert all(g is None for g in torch.autograd.grad(loss, untouched, allow_unused=True))

    logits, (first, second), alpha = agent.actor(obs), agent.qf(obs).detach(), agent.log_alpha.exp().detach()
    rows = [
        -brute_force_soft_value(logits[i], masks[i], (first[i] + second[i]) / 2, alpha, branches) for i in range(12)
    ]
    expected = torch.stack(rows).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    expected_grads = torch.autograd.grad(expected, list(agent.actor.parameters()))
    torch.testing.assert_close(grads, expected_grads, rtol=1e-8, atol=1e-12)
    for i in range(12):
        expected_entropies = [branch.entropy().item() for _, branch in legal_policy(logits[i], masks[i], branches)]
        assert entropies[i].tolist() == pytest.approx(expected_entropies, rel=1e-9, abs=1e-12)


def test_target_entropy_counts_legal_actions() -> None:
    """0.2 log n in each branch; a forced move asks for none. Box: minus the number of action dimensions."""
    agent, args = make_sac((4, 50), discrete_target_entropy_scale=0.2)
    masks = torch.zeros(3, 54, dtype=torch.bool)
    masks[0, [1, 10]] = True  # forced in both
    masks[1, [0, 2, 3, 4, 5]] = True  # three and two
    masks[2] = True
    targets = sac_selfplay.target_entropies(agent, masks, args)
    expected = [[0.0, 0.0], [math.log(3), math.log(2)], [math.log(4), math.log(50)]]
    np.testing.assert_allclose(targets, 0.2 * np.array(expected), atol=1e-6)
    nothing = torch.zeros(1, 54, dtype=torch.bool)  # an agent that has terminated; its next value counts 0 times
    assert sac_selfplay.target_entropies(agent, nothing, args).tolist() == [[0.0, 0.0]]
    agent, args = make_sac((), target_entropy_scale=0.5)
    box = sac_selfplay.target_entropies(agent, torch.zeros(3, 0, dtype=torch.bool), args)
    assert box.tolist() == [-1.0]


def test_alpha_loss_by_branch() -> None:
    """Loss and gradient by loops; each coefficient rises where its own branch has less entropy than it should."""
    torch.manual_seed(0)
    agent, args = make_sac((2, 5))
    entropies, targets = torch.rand(2, 12, 2).double()
    loss, _ = sac_selfplay.compute_alpha_loss(agent, entropies.requires_grad_(), targets)
    (grad,) = torch.autograd.grad(loss, agent.log_alpha)
    gaps = (entropies - targets).tolist()
    alpha = [math.exp(x) for x in agent.log_alpha.tolist()]
    assert loss.item() == pytest.approx(sum(alpha[k] * gap[k] for gap in gaps for k in range(2)) / 24)
    assert grad.tolist() == pytest.approx([alpha[k] * sum(gap[k] for gap in gaps) / 24 for k in range(2)])
    loss, _ = sac_selfplay.compute_alpha_loss(
        agent, torch.tensor([[0.0, 1.0]]).double(), torch.tensor([[0.5, 0.5]]).double()
    )
    low, high = torch.autograd.grad(loss, agent.log_alpha)[0]
    assert low < 0 < high


def test_a_branch_of_50_does_not_outweigh_one_of_2() -> None:
    """Value, critic and policy are averages over branches, whatever their sizes."""
    torch.manual_seed(0)
    agent, args = make_sac((2, 50), gamma=1.0)
    agent.log_alpha.data.fill_(-50.0)
    for critic in (agent.qf, agent.qf_target):  # values of 3 throughout the first branch and of 7 throughout the second
        last: Any = critic.net[-1]
        last.weight.data.zero_()
        last.bias.data = torch.cat([torch.full((2,), 3.0), torch.full((50,), 7.0)]).expand(2, 1, 52).double().clone()
    obs, masks = torch.randn(4, 5).double(), torch.ones(4, 52, dtype=torch.bool)
    zeros = torch.zeros(4).double()
    assert sac_selfplay.compute_td_target(agent, zeros, obs, masks, zeros, NO_NOISE, args).tolist() == pytest.approx(
        [5.0] * 4
    )
    loss, metrics = sac_selfplay.compute_qf_loss(agent, obs, torch.tensor([[1, 49]] * 4), zeros)
    assert metrics["losses/qf1_values"].item() == pytest.approx(5.0)
    assert loss.item() == pytest.approx(50.0)
    assert sac_selfplay.compute_actor_loss(agent, obs, masks, NO_NOISE)[0].item() == pytest.approx(-5.0)
    entropies = torch.tensor([[0.1, 0.3]] * 4).double()
    agent.log_alpha.data.zero_()
    assert sac_selfplay.compute_alpha_loss(agent, entropies, torch.zeros(2).double())[0].item() == pytest.approx(0.2)


def test_a_forced_move_teaches_the_policy_nothing() -> None:
    """One legal action: no gradient, no entropy, and the target is that action's value."""
    torch.manual_seed(0)
    agent, args = make_sac((4,), gamma=1.0)
    obs, masks, zeros = (
        torch.randn(3, 5).double(),
        torch.tensor([[False, False, True, False]] * 3),
        torch.zeros(3).double(),
    )
    loss, entropies, _ = sac_selfplay.compute_actor_loss(agent, obs, masks, NO_NOISE)
    assert all((g == 0).all() for g in torch.autograd.grad(loss, list(agent.actor.parameters())))
    assert (entropies == 0).all()
    targets = sac_selfplay.compute_td_target(agent, zeros, obs, masks, zeros, NO_NOISE, args)
    torch.testing.assert_close(targets, agent.qf_target(obs).mean(0)[:, 2].detach())


# --- SAC's updates ---


class Reference:
    """Discrete SAC once more: separate critics as plain products, branches and samples in loops, Adam by hand."""

    def __init__(self, agent: sac_selfplay.Agent, args: sac_selfplay.Args, branches: tuple[int, ...]) -> None:
        self.args, self.branches = args, branches
        self.actor = clone(agent.actor.named_parameters())
        self.qf = clone(agent.qf.named_parameters())
        self.qf_target = {name: p.detach() for name, p in clone(agent.qf_target.named_parameters()).items()}
        self.log_alpha = agent.log_alpha.detach().clone().requires_grad_()
        self.actor_adam = Adam(self.actor, args.policy_lr)
        self.qf_adam = Adam(self.qf, args.q_lr)
        self.alpha_adam = Adam({"log_alpha": self.log_alpha}, args.alpha_lr)

    def policy(self, obs: Tensor) -> Tensor:
        """Logits of one observation."""
        for layer in (0, 2):
            obs = torch.relu(self.actor[f"logits.{layer}.weight"] @ obs + self.actor[f"logits.{layer}.bias"])
        return self.actor["logits.4.weight"] @ obs + self.actor["logits.4.bias"]

    def values(self, params: Params, i: int, obs: Tensor) -> Tensor:
        """All action values of one observation, by critic i."""
        for layer in (0, 2):
            obs = torch.relu(obs @ params[f"net.{layer}.weight"][i] + params[f"net.{layer}.bias"][i, 0])
        return obs @ params["net.4.weight"][i] + params["net.4.bias"][i, 0]

    def wanted(self, mask: Tensor) -> list[float]:
        """The entropies that the branches should have."""
        return [
            self.args.discrete_target_entropy_scale * math.log(int(part.sum()))
            for part in mask.split(list(self.branches))
        ]

    def soft_value(self, params: Params, obs: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Mean over branches of the expected value plus alpha times the entropy, and the entropies."""
        first, second = self.values(params, 0, obs).detach(), self.values(params, 1, obs).detach()
        q = (first + second) / 2 if self.args.critics == "mean" else torch.minimum(first, second)
        alpha = self.log_alpha.detach().exp()
        policy = legal_policy(self.policy(obs), mask, self.branches)
        entropies = [branch.entropy() for _, branch in policy]
        total, start = torch.zeros(()).double(), 0
        for k, (legal, branch) in enumerate(policy):
            total = total + (branch.probs * q[start : start + self.branches[k]][legal]).sum() + alpha[k] * entropies[k]
            start += self.branches[k]
        return total / len(self.branches), entropies

    def update(self, batch: tuple[Tensor, ...], num_updates: int) -> None:
        """One round: critics, actor and coefficients, targets."""
        n, args = len(batch[0]), self.args
        loss = torch.zeros(()).double()
        for obs, _, action, reward, next_obs, next_mask, termination in zip(*batch, strict=True):
            value = self.soft_value(self.qf_target, next_obs, next_mask)[0]
            value = value - (self.log_alpha.exp() * torch.tensor(self.wanted(next_mask)).double()).mean()
            target = reward + (args.gamma * value if not termination else 0.0)
            for i in range(2):
                parts = values_of_parts(self.values(self.qf, i, obs), tuple(action.int().tolist()), self.branches)
                loss = loss + (sum(parts) / len(parts) - target.detach()) ** 2 / n
        self.qf_adam.step(loss)
        rounds = args.policy_frequency if num_updates % args.policy_frequency == 0 else 0
        for _ in range(rounds):
            results = [self.soft_value(self.qf, obs, mask) for obs, mask in zip(batch[0], batch[1], strict=True)]
            self.actor_adam.step(-sum((value for value, _ in results), start=torch.zeros(()).double()) / n)
            if args.autotune:
                alpha_loss = torch.zeros(()).double()
                for (_, entropies), mask in zip(results, batch[1], strict=True):
                    for k, wanted in enumerate(self.wanted(mask)):
                        gap = entropies[k].item() - wanted
                        alpha_loss = alpha_loss + self.log_alpha[k].exp() * gap / (n * len(self.branches))
                self.alpha_adam.step(alpha_loss)
        for name, p in self.qf.items():
            self.qf_target[name] = (1 - args.tau) * self.qf_target[name] + args.tau * p.detach()


def sac_optimizers(agent: Any, args: Any, module: Any = sac_selfplay) -> dict[str, Any]:
    """The optimisers of an agent, as `main` makes them."""
    rates = {"policy": args.policy_lr, "q": args.q_lr, "alpha": args.alpha_lr}
    return {name: module.Adam(params, rates[name], 0.9, 0.999, 1e-8) for name, params in agent.groups().items()}


@pytest.mark.parametrize("branches", [(4,), (2, 5)], ids=str)
@pytest.mark.parametrize(
    "flags",
    [{}, {"autotune": False, "critics": "min"}, {"policy_frequency": 2, "tau": 0.3}],
    ids=str,
)
def test_sac_updates_against_a_second_implementation(branches: tuple[int, ...], flags: dict[str, Any]) -> None:
    """Five discrete updates: every weight, every target, every entropy coefficient."""
    torch.manual_seed(0)
    agent, args = make_sac(branches, **{"policy_lr": 3e-3, "q_lr": 2e-3, "alpha_lr": 5e-3, "tau": 0.1} | flags)
    reference, optimizers = Reference(agent, args, branches), sac_optimizers(agent, args)
    for num_updates in range(5):
        batch = draw_batch(branches)
        stored = *batch[:2], batch[2].double(), *batch[3:]  # the buffer stores floats
        metrics = sac_selfplay.update(agent, optimizers, stored, args, num_updates)
        reference.update(batch, num_updates)
    pairs = [(agent.actor, reference.actor), (agent.qf, reference.qf), (agent.qf_target, reference.qf_target)]
    for module, params in pairs:
        for name, p in module.named_parameters():
            torch.testing.assert_close(p.detach(), params[name].detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(agent.log_alpha, reference.log_alpha, rtol=1e-9, atol=1e-12)
    assert metrics["losses/alpha"].item() == pytest.approx(reference.log_alpha.exp().mean().item())


class Half(nn.Module):
    """A self-play network with the face of the single-agent script's."""

    def __init__(self, net: nn.Module, is_actor: bool) -> None:
        super().__init__()
        self.net, self.is_actor = net, is_actor

    def forward(self, *inputs: Tensor) -> Any:
        """Mean and log standard deviation as two, or values without their last axis."""
        return self.net(*inputs).chunk(2, dim=-1) if self.is_actor else self.net(*inputs).squeeze(-1)


class SingleAgent(nn.Module):
    """A copy of a self-play agent for Box actions that `sac_continuous` can update."""

    def __init__(self, agent: sac_selfplay.Agent) -> None:
        super().__init__()
        agent = copy.deepcopy(agent)
        self.actor, self.qf, self.qf_target = (
            Half(agent.actor, True),
            Half(agent.qf, False),
            Half(agent.qf_target, False),
        )
        self.log_alpha = nn.Parameter(agent.log_alpha.detach()[0].clone())
        self.normalize = agent.normalize

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """What each of the optimisers steps."""
        return {"policy": [*self.actor.parameters()], "q": [*self.qf.parameters()], "alpha": [self.log_alpha]}


@pytest.mark.parametrize("critics", ["mean", "min"])
@pytest.mark.parametrize("flags", [{}, {"autotune": False, "norm_obs": True, "target_entropy_scale": 0.5}], ids=str)
def test_sac_for_box_actions_is_the_single_agent_scripts(
    flags: dict[str, Any], critics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same weights, batches and random numbers: every metric, and every weight after five updates.

    There the entropy counts as a whole: what its target takes from the value here comes in by the rewards. And the
    smaller value counts there: for the mean, that script is made to take it, too.
    """
    torch.manual_seed(0)
    agent, args = make_sac((), critics=critics, **flags)
    agent.obs_rms.update(3 * torch.randn(50, 5) + 1)
    agent.obs_rms.normalize = lambda x: (x - agent.obs_rms.mean) / agent.obs_rms.std  # type: ignore[method-assign] # float64
    single, single_args = SingleAgent(agent), sac_continuous.Args()
    for name in vars(args).keys() & vars(single_args).keys():
        setattr(single_args, name, getattr(args, name))
    ours, theirs = sac_optimizers(agent, args), sac_optimizers(single, args, sac_continuous)
    no_masks = torch.zeros(20, 0, dtype=torch.bool)
    for num_updates in range(5):
        obs, next_obs = torch.randn(2, 20, 5).double()
        actions, rewards = torch.rand(20, 2).double() * 2 - 1, torch.randn(20).double()
        ends = (torch.rand(20) < 0.3).double()
        torch.manual_seed(num_updates)
        batch = obs, no_masks, actions, rewards, next_obs, no_masks, ends
        metrics = sac_selfplay.update(agent, ours, batch, args, num_updates)
        torch.manual_seed(num_updates)
        wanted = -2 * args.target_entropy_scale
        rewards = rewards - 0.9 * (1.0 - ends) * single.log_alpha.detach().exp() * wanted
        with monkeypatch.context() as patch:
            if critics == "mean":
                patch.setattr(torch.Tensor, "amin", torch.Tensor.mean)
            single_batch = obs, actions, rewards, next_obs, ends
            expected = sac_continuous.update(single, theirs, single_batch, single_args, num_updates)  # type: ignore[arg-type]
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name].item() == pytest.approx(value.item(), rel=1e-9), name
    for net in ("actor", "qf", "qf_target"):
        single_weights = getattr(single, net).net.state_dict()
        torch.testing.assert_close(getattr(agent, net).state_dict(), single_weights, rtol=1e-9, atol=1e-12)
    assert agent.log_alpha.item() == pytest.approx(single.log_alpha.item(), rel=1e-9)


# --- SAC's replay buffer ---


def make_rows(ids: np.ndarray, branches: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Transitions of which every number tells which one it is."""
    team, slots = make_team(*branches, obs_dim=3), sum(branches)
    obs = np.repeat(ids[:, None], 3, axis=1).astype(np.float32)
    masks = (ids[:, None] >> np.arange(slots)) % 2 == 1
    actions = np.repeat(ids[:, None], team.action_dim, axis=1) % 7
    return obs, masks, actions, ids.astype(np.float32), -obs, ~masks, ids % 2 == 1


def assert_whole(sample: tuple[Tensor, ...], branches: tuple[int, ...]) -> np.ndarray:
    """Every row is one transition with the types that the update takes; returns which ones."""
    ids = sample[3].numpy().astype(np.int64)
    assert sample[1].dtype == sample[5].dtype == torch.bool
    for column, expected in zip(sample, make_rows(ids, branches), strict=True):
        np.testing.assert_array_equal(column.numpy().astype(np.float64), np.asarray(expected, dtype=np.float64))
    return ids


@pytest.mark.parametrize(("capacity", "seed"), [(7, 0), (20, 1), (64, 2), (100, 3), (1000, 4)], ids=str)
def test_replay_buffer_against_a_list(capacity: int, seed: int) -> None:
    """Random additions, several times round, and steps before which opponents are dropped: it samples what is left."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    branches: tuple[int, ...] = [(3,), (), (2, 4)][seed % 3]
    buffer = sac_selfplay.ReplayBuffer(capacity, make_team(*branches, obs_dim=3), torch.device("cpu"))
    stored: list[tuple[int, int]] = []  # transition and step of the oldest opponent, oldest first
    total = 0
    for _ in range(60):
        ids = np.arange(total, total + rng.integers(1, min(capacity, 30) + 1))
        total += len(ids)
        steps = rng.integers(0, 100, len(ids))
        buffer.add(steps, *make_rows(ids, branches))
        stored = [*stored, *zip(ids.tolist(), steps.tolist(), strict=True)][-capacity:]
        if rng.random() < 0.3:
            before = int(rng.integers(0, 90))
            buffer.leave_out(before)
            stored = [(i, step) for i, step in stored if step >= before]
        if stored:
            drawn = assert_whole(buffer.sample(60 * len(stored)), branches)
            assert set(drawn.tolist()) == {i for i, _ in stored}  # one that is missed has a probability of exp(-60)


def test_replay_samples_are_uniform() -> None:
    """Over what is left of the old and all of the new, by a chi-square test, before and after the wrap-around."""
    torch.manual_seed(0)
    buffer = sac_selfplay.ReplayBuffer(50, make_team(3, obs_dim=3), torch.device("cpu"))
    buffer.add(np.arange(40) % 4, *make_rows(np.arange(40), (3,)))
    buffer.leave_out(2)
    expected = [i for i in range(40) if i % 4 >= 2]
    for new in (np.arange(40, 45), np.arange(45, 75), np.arange(75, 120)):
        buffer.add(np.zeros(len(new), dtype=np.int64), *make_rows(new, (3,)))
        expected = [*expected, *new.tolist()][-50:]
        counts = Counter(buffer.sample(100_000)[3].int().tolist())
        assert counts.keys() == set(expected)
        assert scipy.stats.chisquare(list(counts.values())).pvalue > 0.001


def test_an_old_opponent_that_still_plays_is_stored() -> None:
    """Until the next time that some are dropped. Dropping all leaves nothing to sample."""
    buffer = sac_selfplay.ReplayBuffer(10, make_team(3, obs_dim=3), torch.device("cpu"))
    buffer.add(np.array([1, 5]), *make_rows(np.arange(2), (3,)))
    buffer.leave_out(3)
    buffer.add(np.array([0]), *make_rows(np.array([2]), (3,)))
    assert set(buffer.sample(200)[3].int().tolist()) == {1, 2}
    buffer.leave_out(3)
    assert set(buffer.sample(200)[3].int().tolist()) == {1}
    buffer.leave_out(6)
    assert buffer.total == buffer.window["first"]


@pytest.mark.parametrize("seed", range(4))
def test_a_replay_buffer_read_from_disk_samples_the_same(seed: int, tmp_path: Path) -> None:
    """Ages and the rule that leaves opponents out too, from the files of several checkpoints, wherever they fell."""
    rng = np.random.default_rng(seed)
    make = partial(sac_selfplay.ReplayBuffer, 40, make_team(3, obs_dim=3), torch.device("cpu"))
    buffer, total = make(), 0
    files = BufferFiles(buffer, tmp_path)
    for i in range(8):
        for _ in range(rng.integers(1, 4)):
            ids = np.arange(total, total + rng.integers(1, 20))
            buffer.add(rng.integers(0, 100, len(ids)), *make_rows(ids, (3,)))
            total += len(ids)
            if rng.random() < 0.3:
                buffer.leave_out(int(rng.integers(0, 60)))
        state, window = files.state_dict(), dict(buffer.window)
        files.remove_old()
        twin = make()
        BufferFiles(twin, tmp_path).load_state_dict(state)
        twin.window.update(window)
        for new in (np.arange(total, total + 1), np.arange(total, total + 15)):
            other, here = copy.deepcopy(buffer), copy.deepcopy(twin)
            for each in (other, here):
                each.add(np.full(len(new), 99), *make_rows(new, (3,)))
            torch.manual_seed(i)
            expected = other.sample(500)
            torch.manual_seed(i)
            torch.testing.assert_close(here.sample(500), expected, rtol=0, atol=0)


# --- how agents begin, and what acts ---


@pytest.mark.parametrize("branches", [(), (2, 5)], ids=str)
@pytest.mark.parametrize("module", [ppo_selfplay, sac_selfplay], ids=["ppo", "sac"])
def test_what_acts_is_normalised(module: ModuleType, branches: tuple[int, ...]) -> None:
    """With --norm-obs, by the statistics; without, not. A snapshot has both, and nothing that does not act."""
    torch.manual_seed(0)
    team, masks = make_team(*branches), np.ones((20, sum(branches)), dtype=bool)
    obs = 3 * torch.randn(20, 5) + 5
    for norm_obs in (True, False):
        agent = module.Agent(team, module.Args(norm_obs=norm_obs))
        for x in agent.actor.parameters():
            x.data *= 10.0
        agent.obs_rms.update(3 * torch.randn(100, 5) + 5)
        mean, std = agent.obs_rms.mean, (agent.obs_rms.var + 1e-8).sqrt()
        policy = agent.actor(((obs - mean) / std).float() if norm_obs else obs)
        torch.testing.assert_close(agent(obs), policy, rtol=1e-4, atol=1e-4)
        expected = agent.actor.sample(policy, torch.as_tensor(masks), 0.0).detach().numpy()
        np.testing.assert_allclose(agent.act(obs.double().numpy(), masks), expected, rtol=1e-4, atol=1e-4)
        assert {name.split(".")[0] for name in agent.acting_weights()} == {"actor", "obs_rms"}


@pytest.mark.parametrize("branches", [(), (2, 5)], ids=str)
def test_how_ppo_begins(branches: tuple[int, ...]) -> None:
    """Orthogonal weights of gain sqrt(2) inside, 0.01 for the policy and 1 for the value; no biases; deviation 1."""
    agent: Any = ppo_selfplay.Agent(make_team(*branches), ppo_selfplay.Args())
    for net, output_gain in ((agent.actor, 0.01), (agent.critic, 1.0)):
        linears = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
        for layer, gain in zip(linears, (math.sqrt(2), math.sqrt(2), output_gain), strict=True):
            singular_values = torch.linalg.svdvals(layer.weight)
            torch.testing.assert_close(singular_values, torch.full_like(singular_values, gain))
            assert not layer.bias.any()
    if not branches:
        assert agent.actor.log_std.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("branches", [(), (2, 5)], ids=str)
def test_how_sac_begins(branches: tuple[int, ...]) -> None:
    """Targets are copies, each entropy coefficient is --alpha, and the log standard deviation is in [-20, 2]."""
    agent: Any = sac_selfplay.Agent(make_team(*branches), sac_selfplay.Args(alpha=0.3))
    assert agent.log_alpha.exp().tolist() == pytest.approx([0.3] * (len(branches) or 1))
    for x, x_target in zip(agent.qf.parameters(), agent.qf_target.parameters(), strict=True):
        assert torch.equal(x, x_target)
    if not branches:
        last: Any = agent.actor.net[-1]
        for bias, expected in ((100.0, 2.0), (1.5, 1.5), (-19.0, -19.0), (-100.0, -20.0)):
            last.weight.data.zero_()
            last.bias.data.fill_(bias)
            assert agent.actor(torch.zeros(5)).tolist() == [bias, bias, expected, expected]


@pytest.mark.parametrize("branches", [(), (2, 5)], ids=str)
@pytest.mark.parametrize("module", [ppo_selfplay, sac_selfplay], ids=["ppo", "sac"])
def test_noise_of_a_generator(module: ModuleType, branches: tuple[int, ...]) -> None:
    """It repeats, and leaves the random stream of the training alone."""
    actor, state = module.Agent(make_team(*branches), module.Args()).actor, torch.get_rng_state()
    one, same, other = (actor.noise(5, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)
