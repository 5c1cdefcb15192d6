"""Evaluation in self-play: against scripted players, against another run, and between a run's own snapshots.

`make_games(num_games)` makes games that are stepped together. Evaluations have their own games and random streams.
"""

import csv
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from utils.cross_play import (
    CrossPlay,
    Player,
    cross_play,
    pairs_with_others,
    play_pairs,
    record_video,
    scripted_players,
)
from utils.elo import score_interval
from utils.play import play_at_keyboard
from utils.run import Run, describe, fail, load_model, name_actions, warn
from utils.snapshot_pool import Snapshot, SnapshotPool
from utils.team_env import Team, TeamEnv

MakeGames = Callable[..., TeamEnv]
AgentT = TypeVar("AgentT")


def score_policies(
    make_games: MakeGames,
    agents: Mapping[str, Any],
    num_games: int,
    seed: int,
    deterministic: bool,
    video_folder: Path | None = None,
    policies: list[Player] | None = None,
) -> dict[str, float]:
    """Each behaviour's mean score against every scripted player, as metrics; a win is 1, a draw 0.5.

    The agents' current policies play, or `policies`, one for each behaviour. If there is a folder for it, one game
    against the scripted player that does best is recorded.
    """
    env = make_games(1, render=video_folder is not None)
    own = [Player("policy", behavior, agent.acting_weights()) for behavior, agent in agents.items()]
    players = (policies or own) + scripted_players(env)
    pairs = pairs_with_others(env, players, len(agents))
    scores = play_pairs(make_games, agents, players, pairs, num_games, seed, deterministic).mean(1)
    names = [f"eval/{players[i].behavior}_score_vs_{players[j].name}" for i, j in pairs]
    for k in range(len(agents)):
        if video_folder is None:
            break
        _, i, j = min((score, *pair) for score, pair in zip(scores, pairs, strict=True) if pair[0] == k)
        record_video(env, agents, players[i], players[j], seed, deterministic, video_folder)
    env.close()
    return dict(zip(names, scores.tolist(), strict=True))


def snapshot_table(
    make_games: MakeGames,
    agents: Mapping[str, Any],
    pools: Mapping[str, SnapshotPool],
    num_snapshots: int,
    num_games: int,
    seed: int,
) -> CrossPlay:
    """The table of scripted players and of `num_snapshots` snapshots of each pool, evenly spaced, against each other.

    The last snapshot is always among them. Actions are sampled, as in training: no snapshot has met a policy of most
    likely actions.
    """
    env = make_games(1)
    players = scripted_players(env)
    env.close()
    for behavior, pool in pools.items():
        count = min(num_snapshots, len(pool.snapshots))
        snapshots = [pool.snapshots[round(i)] for i in np.linspace(len(pool.snapshots) - 1, 0, count)[::-1]]
        players += [Player(f"step {snapshot.step:,}", behavior, snapshot.weights) for snapshot in snapshots]
    return cross_play(make_games, agents, players, num_games, seed)


def report_table(folder: Path, table: CrossPlay, run: Run | None = None) -> None:
    """Prints the table and writes it into the folder, for a run to TensorBoard too. A failure to write is a warning."""
    try:
        table.report(folder)
        if run is not None:
            run.writer.add_figure("selfplay/cross_play", table.heat_map(), run.global_step)
    except (OSError, ImportError) as error:
        warn(f"not all of the table is in {folder}: {error}")


def log_table(run: Run, table: CrossPlay) -> None:
    """Prints the table, and writes it into the run folder and to TensorBoard; a failure to write is a warning."""
    report_table(run.folder, table, run)


def load_policies(
    folder: Path, flag: str, args: Any, make_env: MakeGames, make_agent: Callable[[Team, Any], AgentT]
) -> tuple[dict[str, AgentT], dict[str, SnapshotPool]]:
    """Agents and pools of a saved run with these arguments; exits with one sentence that names the flag.

    `make_env(args, num_games)` makes games, and `make_agent(team, args)` makes the agent of a behaviour.
    """
    env = make_env(args, 1)
    agents = {team.behavior: make_agent(team, args) for team in env.teams}
    env.close()
    rule = args.window, args.play_against_latest_model_ratio, args.opponent_sampling, np.random.default_rng()
    pools = {behavior: SnapshotPool(*rule) for behavior in agents}
    load_model(folder, {"agent": agents, "pool": pools}, flag)
    return agents, pools


def evaluate_run(
    args: Any, make_env: MakeGames, load_run: Callable[[Path, str], Any], train: Callable[[Any], Path]
) -> dict[str, np.ndarray]:
    """--evaluate: the scores and the table of a run, with --against its score against another player, with --play a
    person's games against it, or with --exploitability the score of a policy that learns to beat it. Returns what
    `score_pairs` does.

    `make_env(args, num_games, render)` makes games, `load_run(folder, flag)` gives the agents, pools and arguments of a
    saved run, and `train(args)` trains and returns the run folder.
    """
    agents, pools, _ = load_run(args.evaluate, "evaluate")
    make_games, own = partial(make_env, args), load_players(args.evaluate, pools, args.policy, "policy")
    if args.play:
        play_at_keyboard(args, make_games, agents, own)
        return {}
    if args.exploitability:
        response = train_response(args, train)
        players = load_players(response, load_run(response, "evaluate")[1], "last", "response")
        names = str(response), str(args.evaluate)
        return score_pairs(args, make_games, agents, players, own, *names, deterministic=False)
    if args.against is None:
        video_folder = args.evaluate if args.capture_video else None
        rules = args.eval_games, args.seed + 1_000_000, args.deterministic, video_folder
        print(describe(score_policies(make_games, agents, *rules, own), args.deterministic))
        if args.cross_play_games:
            seed, num_snapshots = args.seed + 2_000_000, args.cross_play_snapshots
            table = snapshot_table(make_games, agents, pools, num_snapshots, args.cross_play_games, seed)
            report_table(args.evaluate, table)
        return {}
    env = make_games(1)
    scripted = scripted_players(env)
    env.close()
    opponents = [player for player in scripted if player.name == args.against]
    if not opponents:
        opponents = load_opponent(args, load_run, list(dict.fromkeys(player.name for player in scripted)))
    return score_pairs(args, make_games, agents, own, opponents, str(args.evaluate), args.against, args.deterministic)


def score_pairs(
    args: Any,
    make_games: MakeGames,
    agents: Mapping[str, Any],
    own: list[Player],
    opponents: list[Player],
    name: str,
    other_name: str,
    deterministic: bool,
) -> dict[str, np.ndarray]:
    """Prints the score of each own player against each opponent that it can meet, with its 95% interval.

    Returns the scores (num_seeds,) by own behaviour; of several opponents those of the last one.
    """
    env, players = make_games(1, render=args.capture_video), own + opponents
    pairs = pairs_with_others(env, players, len(own))
    if not pairs:
        fail(f"--against takes an opponent that can play the other team, and {other_name} cannot")
    results = play_pairs(make_games, agents, players, pairs, args.eval_games, args.seed, deterministic)
    for (i, j), scores in zip(pairs, results, strict=True):
        mean, low, high = score_interval(scores)
        other = f"{players[j].behavior} of {other_name}"
        if players[j].is_scripted:
            other = f"the scripted {players[j].behavior} player {other_name}"
        interval = f"95% interval [{low:.3f}, {high:.3f}], from {len(scores)} seeds, {name_actions(deterministic)}"
        print(f"{players[i].behavior} of {name} against {other}: score {mean:.3f}, {interval}")
        if args.capture_video:
            record_video(env, agents, players[i], players[j], args.seed, deterministic, args.evaluate)
    env.close()
    return {players[i].behavior: scores for (i, _), scores in zip(pairs, results, strict=True)}


def train_response(args: Any, train: Callable[[Any], Path]) -> Path:
    """Trains for --exploitability game steps against the frozen policies of the run; returns the new run's folder."""
    own = {"evaluate": None, "opponents": [str(args.evaluate)], "total_timesteps": args.exploitability}
    rest = {"exploitability": 0, "eval_freq": 0, "cross_play_games": 0, "capture_video": False}
    print(f"training against {args.evaluate} for {args.exploitability:,} game steps")
    return train(replace(args, **own, **rest))


def check_same_game(args: Any, other: Any, flag: str) -> None:
    """Exits with one sentence if another run has another game, or other inputs of its policies."""
    for name in ("env_id", "env_kwargs", "teams", "symmetric", "norm_obs"):
        ours, theirs = getattr(args, name), getattr(other, name)
        if ours != theirs:
            own = f"--{name.replace('_', '-')} was {ours} here and {theirs} there"
            fail(f"--{flag} takes a run of the same game, and {own}")


def load_opponent(args: Any, load_run: Callable[[Path, str], Any], scripted: list[str]) -> list[Player]:
    """The policies of the run folder that --against names; exits with one sentence if it is not of the same game."""
    if not Path(args.against).is_dir():
        fail(f"--against takes a run folder or one of {', '.join(scripted)}, and {args.against} is neither")
    _, pools, other = load_run(Path(args.against), "against")
    check_same_game(args, other, "against")
    return load_players(Path(args.against), pools, "last", "against")


def load_rivals(args: Any, load_run: Callable[[Path, str], Any]) -> dict[str, SnapshotPool] | None:
    """The policies of the runs of --opponents, as pools that are never added to; None without that flag.

    All runs are drawn equally often, and the snapshots of a run by --policy.
    """
    if args.opponents is None:
        return None
    shares: dict[str, list[tuple[Snapshot, float]]] = {}
    for folder in args.opponents:
        _, pools, other = load_run(Path(folder), "opponents")
        check_same_game(args, other, "opponents")
        for behavior in pools:
            shares.setdefault(behavior, []).extend(read_mixture(Path(folder), pools, behavior, args.policy))
    rivals = {}
    for behavior, members in shares.items():
        probabilities = [share / len(args.opponents) for _, share in members]
        pool = SnapshotPool(len(members), 0.0, "uniform", np.random.default_rng(args.seed), shares=probabilities)
        for snapshot, _ in members:
            pool.add(snapshot.weights, snapshot.step, args.initial_elo)
        rivals[behavior] = pool
    return rivals


def load_players(folder: Path, pools: Mapping[str, SnapshotPool], policy: str, name: str) -> list[Player]:
    """What a saved run plays as, one player for each behaviour: its last snapshot or a mixture (`read_mixture`)."""
    players = []
    for behavior in pools:
        members = read_mixture(folder, pools, behavior, policy)
        singles = tuple(Player(name, behavior, snapshot.weights) for snapshot, _ in members)
        mixture = Player(name, behavior, None, singles, tuple(share for _, share in members))
        players.append(singles[0] if len(singles) == 1 else mixture)
    return players


def read_mixture(
    folder: Path, pools: Mapping[str, SnapshotPool], behavior: str, policy: str
) -> list[tuple[Snapshot, float]]:
    """The snapshots that a saved run plays with, and how often each; exits with one sentence if it has no table.

    "last": the last one. "uniform": all in its pool, equally often. "nash": by the weights in its cross_play.csv.
    """
    snapshots = list(pools[behavior].snapshots)
    if policy == "last":
        return [(snapshots[-1], 1.0)]
    if policy == "uniform":
        return [(snapshot, 1.0 / len(snapshots)) for snapshot in snapshots]
    prefix = f"{behavior} " if len(pools) > 1 else ""
    try:
        with (folder / "cross_play.csv").open(newline="") as file:
            weights = {row["player"]: float(row["nash_weight"] or 0) for row in csv.DictReader(file)}
    except (OSError, LookupError, ValueError) as error:
        fail(f"--policy nash takes a run folder with the cross_play.csv of a table, and {folder} has none ({error})")
    shares = [(snapshot, weights.get(f"{prefix}step {snapshot.step:,}", 0.0)) for snapshot in snapshots]
    total = sum(share for _, share in shares)
    if not total > 0.5:
        fail(f"--policy nash takes a table of the run's own snapshots, and that of {folder} is of others")
    return [(snapshot, share / total) for snapshot, share in shares if share > 0.0]
