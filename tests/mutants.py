"""Mutation tests: plausible errors, put into a copy of the code one at a time, that the tests ought to notice.

    python tests/mutants.py              # all mutants
    python tests/mutants.py --only 3 17  # some of them

Prints a Markdown table. A mutant is killed if one of its tests fails on it. If its tests take too long, or if pytest
cannot run them, it is not judged. First all these tests must pass on the unchanged code. Tests marked slow are left
out, and so is `tests/test_siblings.py`: it notices any change of code that two scripts share.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300  # seconds for the tests of a mutant
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "runs", "sweeps", "wandb", "__pycache__", ".*_cache")


class Mutant(NamedTuple):
    """One error."""

    file: str
    old: str
    """text that occurs exactly once in the file"""
    new: str
    summary: str
    """the error in a few words"""
    tests: str
    """what ought to notice: test files, or ids of tests where a file takes minutes"""
    equivalent: str = ""
    """why no test can notice it"""


SAC, PPO, SAC_SELFPLAY, PPO_SELFPLAY = "sac_continuous.py", "ppo_continuous.py", "sac_selfplay.py", "ppo_selfplay.py"
ELO, POOL, MATCHES, TEAM_ENV = "utils/elo.py", "utils/snapshot_pool.py", "utils/matches.py", "utils/team_env.py"
GAMES, CROSS_PLAY, EVALUATION = "utils/games.py", "utils/cross_play.py", "utils/evaluation.py"
STACK, RUN = "utils/policy_stack.py", "utils/run.py"
STATISTICS, RUNS = "benchmark/statistics.py", "benchmark/runs.py"
EXPORT, PLAY, DEMONSTRATIONS = "utils/export.py", "utils/play.py", "utils/demonstrations.py"
VIDEO, CLUSTER = "utils/video.py", "utils/cluster.py"
RECURRENT, REWARDS, CROSSQ = "variants/sac_recurrent.py", "variants/sac_rewards.py", "variants/sac_crossq.py"
PIXELS, VALUE_NETWORK, RAY = "variants/sac_pixels.py", "variants/sac_value_network.py", "variants/sac_ray.py"

SAC_TESTS, PPO_TESTS = "tests/test_sac_update.py", "tests/test_ppo_update.py"
SELFPLAY_TESTS, GAE_TESTS, MOMENT_TESTS = (
    "tests/test_selfplay_update.py",
    "tests/test_gae.py",
    "tests/test_statistics.py",
)
ENVIRONMENT_TESTS = "tests/test_environments.py"
ELO_TESTS, POOL_TESTS = "tests/test_elo.py", "tests/test_snapshot_pool.py"
MATCHES_TESTS = "tests/test_matches.py tests/test_turns.py"
REPORT_TESTS = "tests/test_report.py"
EXPORT_TESTS, PLAY_TESTS, VIDEO_TESTS = "tests/test_export.py", "tests/test_play.py", "tests/test_video.py"
RECURRENT_TESTS, REWARDS_TESTS = "tests/test_sac_recurrent.py", "tests/test_sac_rewards.py"
CROSSQ_TESTS, PIXELS_TESTS, RAY_TESTS = "tests/test_sac_crossq.py", "tests/test_sac_pixels.py", "tests/test_sac_ray.py"
VALUE_NETWORK_TESTS = "tests/test_variants.py"

MUTANTS = [
    # --- losses and updates: SAC ---
    Mutant(
        SAC,
        "args.gamma * (1.0 - terminations) * next_values",
        "args.gamma * next_values",
        "target: bootstraps after a termination",
        SAC_TESTS,
    ),
    Mutant(
        SAC,
        "agent.qf_target(next_obs, next_actions).amin(0)",
        "agent.qf_target(next_obs, next_actions).amax(0)",
        "target: maximum of the critics",
        SAC_TESTS,
    ),
    Mutant(
        SAC,
        "(log_normal - log_det).sum(-1)",
        "(log_normal - log_det).mean(-1)",
        "log-probability: mean over action dimensions",
        SAC_TESTS,
    ),
    Mutant(
        SAC,
        "-args.target_entropy_scale * noise.shape[1]",
        "-args.target_entropy_scale * noise.shape[0]",
        "target entropy: from the batch size",
        SAC_TESTS,
    ),
    Mutant(
        SAC,
        "list(source.parameters()), tau)",
        "list(source.parameters()), 1.0 - tau)",
        "target networks: tau and 1 - tau confused",
        SAC_TESTS,
    ),
    Mutant(
        SAC,
        "update_target(agent.qf, agent.qf_target, args.tau)",
        "update_target(agent.qf_target, agent.qf, args.tau)",
        "target networks: the critics move towards them",
        SAC_TESTS,
    ),
    Mutant(
        SAC,
        "agent.log_alpha.exp().detach() * log_prob",
        "agent.log_alpha.exp() * log_prob",
        "actor loss: entropy coefficient not detached",
        SAC_TESTS,
        "(equivalent: the gradient is taken with respect to the actor's parameters only)",
    ),
    Mutant(
        SAC,
        "buffer.add(prev_obs, actions, rewards, final_obs, terminations)",
        "buffer.add(prev_obs, actions, rewards, final_obs, terminations | truncations)",
        "main: a truncation stored as a termination",
        ENVIRONMENT_TESTS,
    ),
    Mutant(
        SAC,
        "int(args.updates_per_step * (global_step - args.learning_starts))",
        "int(args.updates_per_step * global_step)",
        "main: learning_starts not subtracted",
        "tests/test_runs.py::test_updates_per_step",
    ),
    # --- losses and updates: PPO ---
    Mutant(
        PPO,
        "loss = -torch.min(advantages * ratio,",
        "loss = -torch.max(advantages * ratio,",
        "policy loss: maximum",
        PPO_TESTS,
    ),
    Mutant(
        PPO,
        "ratio.clamp(1.0 - clip_coef, 1.0 + clip_coef)",
        "ratio.clamp(max=1.0 + clip_coef)",
        "policy loss: ratio not clipped from below",
        PPO_TESTS,
    ),
    Mutant(
        PPO,
        "torch.max((values - returns) ** 2,",
        "torch.min((values - returns) ** 2,",
        "value loss: the smaller error",
        PPO_TESTS,
    ),
    Mutant(
        PPO,
        "policy_loss - args.ent_coef * entropy",
        "policy_loss + args.ent_coef * entropy",
        "joint loss: sign of the entropy",
        PPO_TESTS,
    ),
    Mutant(
        PPO,
        "(mb_advantages.std() + 1e-8)",
        "(mb_advantages.var() + 1e-8)",
        "advantages divided by the variance",
        PPO_TESTS,
    ),
    Mutant(
        PPO,
        "    log_prob = normal_log_prob(actions, *agent.actor(agent.normalize(raw_obs)))\n"
        "    agent.obs_rms.update(raw_obs.flatten(0, 1))\n",
        "    agent.obs_rms.update(raw_obs.flatten(0, 1))\n"
        "    log_prob = normal_log_prob(actions, *agent.actor(agent.normalize(raw_obs)))\n",
        "old log-probabilities under the new statistics",
        PPO_TESTS,
    ),
    Mutant(
        PPO,
        "discounted_return[rollout.dones[t]] = 0.0",
        "discounted_return[terminations] = 0.0",
        "main: discounted return goes on after a truncation",
        f"{MOMENT_TESTS} {ENVIRONMENT_TESTS}",
    ),
    # --- losses and updates: self-play ---
    Mutant(
        PPO_SELFPLAY,
        "(args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)",
        "(args.max_grad_norm / (grad_norm + 1e-6))",
        "gradient always scaled to max_grad_norm",
        SELFPLAY_TESTS,
    ),
    Mutant(
        PPO_SELFPLAY,
        "(ratio - 1.0 - log_ratio).mean()",
        "(ratio - 1.0 + log_ratio).mean()",
        "KL metric: sign of the log-ratio",
        SELFPLAY_TESTS,
    ),
    Mutant(
        PPO_SELFPLAY,
        "agent.obs_rms.update(raw_obs[valid])",
        "agent.obs_rms.update(raw_obs.flatten(0, 1))",
        "statistics also of agents that have left",
        f"{SELFPLAY_TESTS} tests/test_selfplay_runs.py",
    ),
    Mutant(
        MATCHES,
        "num_steps >= save_steps or (next_learner != self.learner and num_steps > 0)",
        "num_steps >= save_steps",
        "no snapshot at the end of a turn",
        "tests/test_turns.py tests/test_selfplay_runs.py",
    ),
    Mutant(
        SAC_SELFPLAY,
        "agent.per_branch(log_probs.exp() * soft_values).mean(-1)",
        "agent.per_branch(log_probs.exp() * soft_values).sum(-1)",
        "target: sum over branches",
        SELFPLAY_TESTS,
    ),
    Mutant(
        SAC_SELFPLAY,
        "    obs, _, actions, rewards, next_obs, next_masks, terminations = batch",
        "    obs, next_masks, actions, rewards, next_obs, _, terminations = batch",
        "target: masks of the step before",
        SELFPLAY_TESTS,
    ),
    Mutant(
        SAC_SELFPLAY,
        "torch.tensor([0, *agent.branches[:-1]], device=obs.device).cumsum(0)",
        "torch.tensor([0, *agent.branches[:-1]], device=obs.device)",
        "critics' loss: offsets of branches not summed",
        SELFPLAY_TESTS,
    ),
    Mutant(
        SAC_SELFPLAY,
        "(entropies.detach() - targets)",
        "(targets - entropies.detach())",
        "entropy coefficient: sign",
        SELFPLAY_TESTS,
    ),
    Mutant(
        SAC_SELFPLAY,
        "next_values - (alpha * target_entropies(agent, next_masks, args)).mean(-1)",
        "next_values + (alpha * target_entropies(agent, next_masks, args)).mean(-1)",
        "target: sign of the target entropy",
        SELFPLAY_TESTS,
    ),
    Mutant(
        MATCHES,
        "self.learner_steps[behavior], self.rating_of(behavior)",
        "self.learner_steps[behavior], self.rating",
        "final snapshot: rating of the other behaviour",
        "tests/test_turns.py tests/test_selfplay_runs.py",
    ),
    # --- replay buffer ---
    Mutant(
        SAC,
        "torch.randint(min(self.total, len(self.data)), (batch_size,)",
        "torch.randint(min(self.total, len(self.data)) - 1, (batch_size,)",
        "the last row is never drawn",
        "tests/test_replay_buffer.py",
    ),
    Mutant(
        SAC,
        "self.total += len(rows)",
        "self.total += 1",
        "counts batches in place of transitions",
        "tests/test_replay_buffer.py",
    ),
    Mutant(
        SAC_SELFPLAY,
        "kept = stored[self.opponents[stored] >= before]",
        "kept = stored[self.opponents[stored] > before]",
        "leaves out the oldest opponent of the window",
        SELFPLAY_TESTS,
    ),
    Mutant(
        SAC_SELFPLAY,
        'self.window["first"] = self.total\n            self.store',
        'self.window["first"] = self.total + 1\n            self.store',
        "drops one transition too many",
        SELFPLAY_TESTS,
    ),
    # --- generalised advantage estimation ---
    Mutant(
        PPO,
        "deltas = rewards + gamma * (1.0 - terminations) * next_values - values",
        "deltas = rewards + gamma * (1.0 - dones) * next_values - values",
        "GAE: no bootstrap after a truncation",
        GAE_TESTS,
    ),
    Mutant(
        PPO,
        "decays = gamma * lam * (1.0 - dones)",
        "decays = gamma * lam * (1.0 - terminations)",
        "GAE: the trace goes through a truncation",
        GAE_TESTS,
    ),
    Mutant(
        PPO_SELFPLAY,
        "decays = gamma * lam * (1.0 - dones)",
        "decays = lam * (1.0 - dones)",
        "GAE: gamma missing in the trace",
        f"{GAE_TESTS} {SELFPLAY_TESTS}",
    ),
    Mutant(
        PPO_SELFPLAY,
        "return torch.stack(advantages).flip(0)",
        "return torch.stack(advantages)",
        "GAE: advantages in reverse order",
        f"{GAE_TESTS} {SELFPLAY_TESTS}",
    ),
    # --- running statistics ---
    Mutant(SAC, "x.var(0, correction=0) * len(x)", "x.var(0) * len(x)", "sample variance of a batch", MOMENT_TESTS),
    Mutant(
        PPO,
        "delta**2 * self.count * len(x) / total",
        "delta**2 * len(x) / total",
        "merging: old count missing",
        MOMENT_TESTS,
    ),
    Mutant(
        PPO_SELFPLAY,
        "return (self.var + 1e-8).sqrt()",
        "return self.var.sqrt() + 1e-8",
        "epsilon outside of the root",
        f"{MOMENT_TESTS} {SELFPLAY_TESTS}",
    ),
    # --- Adam ---
    Mutant(
        PPO,
        '{"beta1": beta1, "beta2": beta2, "eps": eps}',
        '{"beta1": beta2, "beta2": beta1, "eps": eps}',
        "Adam: betas swapped",
        PPO_TESTS,
    ),
    Mutant(
        SAC_SELFPLAY,
        "    nn.utils.vector_to_parameters(vector, parameters)\n",
        "",
        "Adam: parameters are no views of the vector",
        SELFPLAY_TESTS,
    ),
    # --- ratings and pools ---
    Mutant(
        ELO,
        "10.0 ** ((opponent_rating - rating) / 400.0)",
        "10.0 ** ((rating - opponent_rating) / 400.0)",
        "expected score: sign",
        ELO_TESTS,
    ),
    Mutant(
        ELO,
        "np.percentile(ratings[1:], [2.5, 97.5], axis=0)",
        "np.percentile(ratings[1:], [5.0, 95.0], axis=0)",
        "bootstrap: quantiles of a 90% interval",
        ELO_TESTS,
    ),
    Mutant(
        ELO,
        "fit_bradley_terry(games_per_score * results, mean, prior_games)",
        "fit_bradley_terry(results, mean, prior_games)",
        "bootstrap: games_per_score missing",
        ELO_TESTS,
    ),
    Mutant(
        ELO,
        "(scores.size * scores.var() + z2 / 4)",
        "(scores.size * scores.var(ddof=1) + z2 / 4)",
        "score interval: sample variance",
        ELO_TESTS,
    ),
    Mutant(
        POOL,
        "newest[self.rng.integers(len(newest))]",
        "newest[self.rng.integers(len(newest) - 1)]",
        "uniform draw without the newest",
        POOL_TESTS,
    ),
    Mutant(
        POOL,
        "(1.0 - np.array([snapshot.mean_score for snapshot in newest])) ** 2",
        "np.array([snapshot.mean_score for snapshot in newest]) ** 2",
        "priority of beaten snapshots",
        POOL_TESTS,
    ),
    Mutant(POOL, "value.detach().clone()", "value.detach()", "snapshots share the learner's weights", POOL_TESTS),
    # --- matches ---
    Mutant(
        MATCHES,
        "elo_change(rating, opponent.rating, result, self.elo_k)",
        "elo_change(self.rating, opponent.rating, result, self.elo_k)",
        "second opponent meets a rating already changed",
        MATCHES_TESTS,
    ),
    Mutant(
        MATCHES,
        "/ self.num_opponents[learner_team]",
        "/ len(self.behaviors)",
        "rating change divided by the teams",
        MATCHES_TESTS,
    ),
    Mutant(
        MATCHES,
        "opponent.rating -= change",
        "self.pools[self.behaviors[team]].latest.rating -= change",
        "rating credited to the newest snapshot",
        MATCHES_TESTS,
    ),
    Mutant(
        MATCHES,
        "if self.ghost_steps - self.drawn_at[game] >= self.swap_steps or",
        "if self.ghost_steps - self.drawn_at[game] > self.swap_steps or",
        "opponents swapped one step late",
        MATCHES_TESTS,
    ),
    Mutant(
        MATCHES,
        "cut = (self.ages == self.cut_at) & ~result.over",
        "cut = self.ages == self.cut_at",
        "a game that is over is cut as well",
        MATCHES_TESTS,
    ),
    Mutant(
        MATCHES,
        "round(ghosts / learners * self.turn_steps",
        "round(learners / ghosts * self.turn_steps",
        "swaps per turn: ratio inverted",
        MATCHES_TESTS,
    ),
    Mutant(
        MATCHES,
        "(team_change[behavior] or 1) / size for behavior",
        "(team_change[behavior] or 1) * size for behavior",
        "longer turns for larger teams",
        MATCHES_TESTS,
    ),
    # --- games ---
    Mutant(
        TEAM_ENV,
        "returns += side_means(step.rewards, allies)",
        "returns += side_means(step.rewards, allies) * [len(team.agents) for team in env.teams]",
        "a cut game: sum over the team's agents",
        "tests/test_team_env.py",
    ),
    Mutant(
        TEAM_ENV,
        "ended = running & step.over",
        "ended = step.over",
        "a later game overwrites the score of the first",
        "tests/test_team_env.py",
    ),
    Mutant(
        TEAM_ENV,
        "(over[:, None] | ~env.alive[t])[:, :, None]",
        "np.broadcast_to(over[:, None], env.alive[t].shape)[:, :, None]",
        "next legal actions of an agent that has left",
        "tests/test_team_env.py",
    ),
    Mutant(
        TEAM_ENV,
        "is_terminated or not (is_alive or is_truncated)",
        "is_terminated or not is_alive",
        "PettingZoo: a truncation is a termination as well",
        "tests/test_team_env.py",
    ),
    Mutant(
        TEAM_ENV,
        "space.dtype.type(action[0] + space.start)",
        "space.dtype.type(action[0])",
        "PettingZoo: start of a Discrete space ignored",
        "tests/test_team_env.py",
    ),
    Mutant(
        GAMES,
        "(distance.max(axis=0) > self.ring())",
        "(distance.min(axis=0) > self.ring())",
        "sumo ends when both discs have left",
        "tests/test_games.py",
    ),
    Mutant(
        GAMES,
        "np.minimum(parting_speed, 0)",
        "np.maximum(parting_speed, 0)",
        "sumo: discs that part collide",
        "tests/test_games.py",
    ),
    Mutant(
        GAMES,
        "((0, 1, 2), (1, 0, 2), (2, 0, 1))",
        "((0, 1, 2), (1, 2, 0), (2, 0, 1))",
        "pursuit: a pursuer takes its partner for the evader",
        "tests/test_games.py",
    ),
    Mutant(
        GAMES,
        "safety = np.abs(places - pursuers[:, None]).min(axis=0)",
        "safety = np.abs(places - pursuers[:, None]).max(axis=0)",
        "pursuit: flees from the farther pursuer",
        "tests/test_games.py",
    ),
    # --- cross-play, evaluation, policy stack ---
    Mutant(
        CROSS_PLAY,
        "seats[games % total], seed + start, deterministic)",
        "seats[games % total], seed + start + k, deterministic)",
        "seeds of the two sides not paired",
        "tests/test_cross_play.py",
    ),
    Mutant(
        CROSS_PLAY,
        "against = 0.5 + 0.5 * (",
        "against = 0.5 + (",
        "progress of a role: difference not halved",
        "tests/test_cross_play.py",
    ),
    Mutant(
        EVALUATION,
        "_, i, j = min((score, *pair)",
        "_, i, j = max((score, *pair)",
        "video of the worst scripted player",
        "tests/test_evaluation.py",
    ),
    Mutant(
        EVALUATION,
        "np.linspace(len(lineups) - 1, 0, count)[::-1]",
        "np.linspace(0, len(lineups) - 1, count)",
        "table of one snapshot: the oldest",
        "tests/test_evaluation.py",
    ),
    Mutant(
        STACK,
        "(np.cumsum(counts) - counts))[policy[order]]",
        "(np.cumsum(counts) - counts))[policy]",
        "rows placed by the unsorted policies",
        "tests/test_policy_stack.py",
    ),
    # --- runs ---
    Mutant(
        RUN,
        "step % frequency < self.stride for",
        "step % frequency <= self.stride for",
        "due one iteration too often",
        "tests/test_run.py",
    ),
    Mutant(
        RUN,
        "np.random.SeedSequence((seed, global_step))",
        "np.random.SeedSequence(seed + global_step)",
        "seeds of different runs overlap",
        "tests/test_run.py",
    ),
    Mutant(
        RUN,
        "self.running[:, dones] = 0.0",
        "self.running[1, dones] = 0.0",
        "the return of an episode goes on in the next one",
        f"tests/test_run.py {ENVIRONMENT_TESTS} tests/test_env_kwargs.py",
    ),
    Mutant(
        RUN,
        "for start, _ in self.files + self.previous}",
        "for start, _ in self.files}",
        "buffer files of the previous checkpoint removed",
        "tests/test_run.py",
    ),
    Mutant(
        RUN,
        "self.global_step + (row + 1) * self.stride // len(rows)",
        "self.global_step + row * self.stride // len(rows)",
        "a bad number is reported one step early",
        "tests/test_run.py",
    ),
    # --- benchmark ---
    Mutant(
        STATISTICS,
        "trim_mean(np.where(np.isnan(values), -np.inf, values), 0.25",
        "trim_mean(np.where(np.isnan(values), np.inf, values), 0.25",
        "interquartile mean: NaN counts as the best",
        REPORT_TESTS,
    ),
    Mutant(
        STATISTICS,
        "student_half(values.std(-1, ddof=1), ",
        "student_half(values.std(-1), ",
        "Student's interval: population variance",
        REPORT_TESTS,
    ),
    Mutant(
        STATISTICS,
        "scores.mean(1 - axis).var(ddof=1) / scores.shape[axis]",
        "scores.mean(1 - axis).var(ddof=1) / scores.shape[1 - axis]",
        "crossed interval: wrong axis",
        REPORT_TESTS,
    ),
    Mutant(
        STATISTICS,
        "(scores[..., None, :] > thresholds[:, None])",
        "(scores[..., None, :] >= thresholds[:, None])",
        "performance profile: at least, not more than",
        REPORT_TESTS,
    ),
    Mutant(
        RUNS,
        "np.array([run.curves[key][-1, 2] for run in group])",
        "np.array([run.curves[key][:, 2].max() for run in group])",
        "the maximum over training, not the final policy",
        REPORT_TESTS,
    ),
    Mutant(
        RUNS,
        "and x[:2] not in again)",
        "and x[:2])",
        "a resumed run: one point doubled",
        REPORT_TESTS,
    ),
    Mutant(
        RUNS,
        "if scores and min(curve[-1, 0] for curve in scores)",
        "if scores and max(curve[-1, 0] for curve in scores)",
        "finished when one of several scores is",
        REPORT_TESTS,
    ),
    Mutant(
        RUNS,
        'worst = min(scores, default=float("nan"))',
        'worst = max(scores, default=float("nan"))',
        "a failed run counts as the best",
        REPORT_TESTS,
    ),
    # --- PPO with self-play, second set ---
    Mutant(
        PPO_SELFPLAY,
        "    log_prob = agent.actor.log_prob(agent(raw_obs), masks, actions)\n"
        "    if valid.any():\n"
        "        agent.obs_rms.update(raw_obs[valid])\n"
        "        agent.return_rms.update(to_device(rollout.discounted_returns)[valid])\n",
        "    if valid.any():\n"
        "        agent.obs_rms.update(raw_obs[valid])\n"
        "        agent.return_rms.update(to_device(rollout.discounted_returns)[valid])\n"
        "    log_prob = agent.actor.log_prob(agent(raw_obs), masks, actions)\n",
        "old log-probabilities under the new statistics",
        PPO_TESTS,
    ),
    Mutant(
        PPO_SELFPLAY,
        "(b_returns - b_values).var() / b_returns.var()",
        "(b_returns - b_values).var() / b_values.var()",
        "explained variance: divided by that of the values",
        PPO_TESTS,
    ),
    Mutant(
        PPO_SELFPLAY,
        'torch.stack([m["losses/approx_kl"] for m in epoch_metrics]).mean()',
        'epoch_metrics[-1]["losses/approx_kl"]',
        "target KL: compared with that of the last minibatch",
        PPO_TESTS,
    ),
    # --- export ---
    Mutant(
        EXPORT,
        'if isinstance(result, tuple) and not hasattr(self.agent, "policy"):',
        "if isinstance(result, tuple):",
        "PPO's actions are squashed as SAC's are",
        EXPORT_TESTS,
    ),
    Mutant(
        EXPORT,
        "return self.to_task(actions), torch.cat([actions, state], dim=1)",
        "return self.to_task(actions), torch.cat([self.to_task(actions), state], dim=1)",
        "the memory holds the action in the task's units",
        EXPORT_TESTS,
    ),
    Mutant(
        EXPORT,
        "space = spaces[0] if all(other == spaces[0] for other in spaces) else space",
        "space = Box(-1.0, 1.0, spaces[0].shape) if not branches else space",
        "PettingZoo: actions in [-1, 1], not in its own units",
        EXPORT_TESTS,
    ),
    Mutant(
        EXPORT,
        "if not all(error <= limit for error, limit in errors):",
        "if any(error > limit for error, limit in errors):",
        "a NaN is no difference from the script's actions",
        EXPORT_TESTS,
    ),
    # --- play ---
    Mutant(
        PLAY,
        "return (x or [0])[-1], (y or [0])[-1]",
        "return (x or [0])[0], (y or [0])[0]",
        "of two opposite keys the older one counts",
        PLAY_TESTS,
    ),
    Mutant(
        PLAY,
        "None if number is None else (number - 1) % 10",
        "None if number is None else number - 1",
        "key 0 is not the tenth choice",
        PLAY_TESTS,
    ),
    Mutant(
        PLAY,
        "game_scores(result.scores[0])[self.team, others]",
        "game_scores(result.scores[0])[others, self.team]",
        "the opponents' score counts as the person's",
        PLAY_TESTS,
    ),
    Mutant(
        PLAY,
        "rng.choice(len(members), p=player.shares or None)",
        "rng.choice(len(members))",
        "a mixture of policies is drawn from uniformly",
        PLAY_TESTS,
    ),
    # --- demonstrations ---
    Mutant(
        DEMONSTRATIONS,
        "columns.append([x[running] for x in",
        "columns.append([x for x in",
        "steps after an episode's end are recorded",
        REWARDS_TESTS,
    ),
    Mutant(
        DEMONSTRATIONS,
        "for x in (obs, actions, rewards, final_obs, terminations)])",
        "for x in (obs, actions, rewards, next_obs, terminations)])",
        "the first observation of the next episode is recorded",
        REWARDS_TESTS,
    ),
    Mutant(
        DEMONSTRATIONS,
        "for x in (obs, actions, rewards, final_obs, terminations)])",
        "for x in (obs, actions, rewards, final_obs, terminations | truncations)])",
        "a truncation is recorded as a termination",
        REWARDS_TESTS,
    ),
    Mutant(
        DEMONSTRATIONS,
        "2_000_000 + seed * num_episodes",
        "2_000_000 + seed",
        "episodes of two seeds are the same but for one",
        REWARDS_TESTS,
    ),
    # --- pictures ---
    Mutant(
        VIDEO,
        "np.linspace(0, len(frames) - 1, min(count, len(frames)))",
        "np.linspace(0, len(frames) - 1, min(count, len(frames)), endpoint=False)",
        "strip without the last picture",
        VIDEO_TESTS,
    ),
    Mutant(
        VIDEO,
        "size * side / max(frames[0].shape[:2])",
        "size * side / frames[0].shape[0]",
        "strip: scaled by the height, not by the longer side",
        VIDEO_TESTS,
    ),
    Mutant(
        VIDEO,
        "(0, height % 2), (0, width % 2), (0, 0)",
        "(0, width % 2), (0, height % 2), (0, 0)",
        "video: padding of height and width confused",
        VIDEO_TESTS,
    ),
    # --- cluster ---
    Mutant(
        CLUSTER,
        "return min(self.buffer.total, len(self.buffer.data))",
        "return self.buffer.total",
        "a shard counts transitions that are overwritten",
        RAY_TESTS,
    ),
    Mutant(
        CLUSTER,
        "(x - before.get(name, 0.0)) / (self.time - then)",
        "x / (self.time - then)",
        "rates: the growth since the start, not since the last call",
        RAY_TESTS,
    ),
    Mutant(
        CLUSTER,
        "sum(int(x / worker_cpus) for x in cores)",
        "int(sum(cores) / worker_cpus)",
        "a worker has cores of two machines",
        RAY_TESTS,
    ),
    # --- variants: memory ---
    Mutant(
        RECURRENT,
        "self.advance(inputs[begin:end], state * ~starts[begin, :, None])",
        "self.advance(inputs[begin:end], state)",
        "burn-in: the memory outlives an episode",
        RECURRENT_TESTS,
    ),
    Mutant(
        RECURRENT,
        "states[rows[0]] = state * ~starts[0, :, None]",
        "states[rows[0]] = state",
        "after the burn-in: the memory outlives an episode",
        RECURRENT_TESTS,
    ),
    Mutant(
        RECURRENT,
        "        with torch.no_grad():\n            cuts = ",
        "        with torch.enable_grad():\n            cuts = ",
        "the gradient goes into the burn-in",
        RECURRENT_TESTS,
    ),
    Mutant(
        RECURRENT,
        "agent.inputs(next_obs, actions, rewards)",
        "agent.inputs(next_obs, past[..., 1:-1], past[..., -1])",
        "next observation: action and reward of the step before",
        RECURRENT_TESTS,
    ),
    # --- variants: streams of rewards ---
    Mutant(
        REWARDS,
        "next_values[:, 0] -= agent.log_alpha.exp() * next_log_prob",
        "next_values -= (agent.log_alpha.exp() * next_log_prob)[:, None]",
        "target: every stream has the entropy",
        REWARDS_TESTS,
    ),
    Mutant(
        REWARDS,
        "end_rewards * agent.strengths / (1.0 - agent.gammas).clamp(min=1e-6)",
        "end_rewards * agent.strengths",
        "the absorbing state has the reward of one step",
        REWARDS_TESTS,
    ),
    Mutant(
        REWARDS,
        "agent.qf(obs, actions).amin(0).sum(-1)).mean()",
        "agent.qf(obs, actions).sum(-1).amin(0)).mean()",
        "actor loss: minimum of the sums, not sum of the minima",
        REWARDS_TESTS,
    ),
    Mutant(
        REWARDS,
        "return F.softplus(policy_logits), F.softplus(end_logit).squeeze(0)",
        "return -F.softplus(-policy_logits), -F.softplus(-end_logit).squeeze(0)",
        "GAIL: log D in place of -log(1 - D)",
        REWARDS_TESTS,
    ),
    # --- variants: CrossQ ---
    Mutant(
        CROSSQ,
        "(batch_std / std).clamp(1.0 / self.max_r, self.max_r)",
        "(std / batch_std).clamp(1.0 / self.max_r, self.max_r)",
        "batch renormalisation: r inverted",
        CROSSQ_TESTS,
    ),
    Mutant(
        CROSSQ,
        "            d = torch.where(is_warm, ((batch_mean - mean) / std).clamp(-self.max_d, self.max_d), 0.0)\n"
        "            self.mean.lerp_(batch_mean, 1.0 - self.momentum)\n",
        "            self.mean.lerp_(batch_mean, 1.0 - self.momentum)\n"
        "            d = torch.where(is_warm, ((batch_mean - mean) / std).clamp(-self.max_d, self.max_d), 0.0)\n",
        "batch renormalisation: d from the new running mean",
        CROSSQ_TESTS,
    ),
    Mutant(
        CROSSQ,
        "agent.qf(torch.cat([obs, next_obs]), torch.cat([actions, next_actions]), train=True)",
        "torch.cat([agent.qf(*x, train=True) for x in ((obs, actions), (next_obs, next_actions))], dim=1)",
        "a pass for each half, not a joint one",
        CROSSQ_TESTS,
    ),
    Mutant(
        CROSSQ,
        "agent.qf.values(agent.qf(obs, actions))",
        "agent.qf.values(agent.qf(obs, actions, train=True))",
        "actor loss: the critics normalise by the batch",
        CROSSQ_TESTS,
    ),
    # --- variants: pictures ---
    Mutant(
        PIXELS,
        "shift(next_obs, places[1], args.max_shift)",
        "shift(next_obs, places[0], args.max_shift)",
        "both observations are shifted alike",
        PIXELS_TESTS,
    ),
    Mutant(
        PIXELS,
        "agent.qf_target(agent.encoder_target(next_obs), next_actions)",
        "agent.qf_target(agent.encoder(next_obs), next_actions)",
        "target: features of the trained encoder",
        PIXELS_TESTS,
    ),
    Mutant(
        PIXELS,
        "[*self.qf.parameters(), *self.encoder.parameters()]",
        "[*self.qf.parameters(), *self.encoder.head.parameters()]",
        "convolutions get no gradient",
        PIXELS_TESTS,
    ),
    Mutant(
        PIXELS,
        "self.frame_stack * (2 * len(self.newest) - 1)",
        "self.frame_stack * len(self.newest)",
        "stacks of pictures that may be overwritten",
        PIXELS_TESTS,
    ),
    # --- variants: state value ---
    Mutant(
        VALUE_NETWORK,
        "next_values = agent.vf_target(next_obs).squeeze(-1)",
        "next_values = agent.vf(next_obs).squeeze(-1)",
        "target: the state value itself, not its copy",
        VALUE_NETWORK_TESTS,
    ),
    Mutant(
        VALUE_NETWORK,
        "soft_values = agent.qf(obs, actions).amin(0) - agent.log_alpha.exp() * log_prob",
        "soft_values = agent.qf(obs, actions).amin(0)",
        "state value without the entropy",
        VALUE_NETWORK_TESTS,
    ),
    Mutant(
        VALUE_NETWORK,
        "update_target(agent.vf, agent.vf_target, args.tau)",
        "update_target(agent.vf_target, agent.vf, args.tau)",
        "the state value follows its target",
        VALUE_NETWORK_TESTS,
    ),
    # --- variants: Ray ---
    Mutant(
        RAY,
        "delta**2 * self.count * count / total",
        "delta**2 * count / total",
        "merged statistics: old count missing",
        RAY_TESTS,
    ),
    Mutant(
        CLUSTER,
        "self.weights if self.version > version else []",
        "self.weights if self.version >= version else []",
        "weights that a worker has are sent again",
        RAY_TESTS,
    ),
    Mutant(
        RAY,
        "self.running[:, dones] = 0.0",
        "self.running[:, terminations] = 0.0",
        "a truncated episode's return goes on",
        RAY_TESTS,
    ),
]


def mutate(mutant: Mutant) -> str:
    """The file with the error; exits with one sentence if the place of the error is not found exactly once."""
    text = (ROOT / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        sys.exit(
            f"error: {mutant.file} must have this text once, and has it {text.count(mutant.old)} times: {mutant.old!r}"
        )
    return text.replace(mutant.old, mutant.new)


def run_tests(tests: Sequence[str], root: Path) -> tuple[str, str]:
    """Runs tests in a checkout: "survived" if they pass, or "killed" and the first that failed.

    Or "not judged" and the reason: no end in time, or a checkout whose tests cannot be run.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return "not judged", f"no end in {TIMEOUT} seconds"
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode == 0:
        return "survived", ""
    if done.returncode == 1 and failed and "::" in failed[0]:
        return "killed", failed[0].partition("[")[0].removeprefix("tests/")
    return "not judged", f"pytest ended with status {done.returncode} {' '.join(failed)}".rstrip()


def copy_to(folder: Path) -> Path:
    """A copy of the checkout in this folder."""
    return Path(shutil.copytree(ROOT, folder / "copy", ignore=NOT_COPIED))


def judge(mutant: Mutant) -> tuple[str, str]:
    """What the mutant's tests make of it: see `run_tests`."""
    with tempfile.TemporaryDirectory() as folder:
        root = copy_to(Path(folder))
        (root / mutant.file).write_text(mutate(mutant))
        return run_tests(mutant.tests.split(), root)


def main() -> None:
    """Runs the mutants and prints their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = range(1, len(MUTANTS) + 1)
    parser.add_argument("--only", nargs="+", type=int, choices=numbers, default=numbers, metavar="N", help="only these")
    chosen = {number: MUTANTS[number - 1] for number in parser.parse_args().only}
    for mutant in chosen.values():
        mutate(mutant)
    with tempfile.TemporaryDirectory() as folder:
        root = copy_to(Path(folder))
        for tests in dict.fromkeys(test for mutant in chosen.values() for test in mutant.tests.split()):
            outcome, detail = run_tests([tests], root)
            if outcome != "survived":
                sys.exit(f"error: {tests} must pass on the unchanged code ({detail})")
    print("| | file | error | noticed by |\n|---|---|---|---|", flush=True)
    counts = Counter[str]()
    for number, mutant in chosen.items():
        outcome, detail = judge(mutant)
        counts[outcome] += 1
        result = f"`{detail}`" if outcome == "killed" else f"**{outcome}** {detail or mutant.equivalent}".rstrip()
        print(f"| {number} | `{mutant.file}` | {mutant.summary} | {result} |", flush=True)
    judged = counts["killed"] + counts["survived"]
    print(f"\n{counts['killed']} of {judged} mutants killed, {counts['not judged']} not judged.")


if __name__ == "__main__":
    main()
