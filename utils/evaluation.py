"""Evaluation in self-play: against scripted players, against another run, and between a run's own snapshots.

`make_games(num_games)` makes games that are stepped together. Evaluations have their own games and random streams.
"""

from collections.abc import Callable, Mapping
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
from utils.run import Run, describe, fail, load_model, warn
from utils.snapshot_pool import SnapshotPool
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
) -> dict[str, float]:
    """Each behaviour's mean score against every scripted player, as metrics; a win is 1, a draw 0.5.

    If there is a folder for it, one game against the scripted player that does best is recorded.
    """
    env = make_games(1, render=video_folder is not None)
    players = [Player("policy", behavior, agent.acting_weights()) for behavior, agent in agents.items()]
    players += scripted_players(env)
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


def evaluate_run(args: Any, make_env: MakeGames, load_run: Callable[[Path, str], Any]) -> None:
    """--evaluate: the scores and the table of a run, or with --against the score against another player.

    `make_env(args, num_games, render)` makes games, and `load_run(folder, flag)` gives the agents, pools and arguments
    of a saved run.
    """
    agents, pools, _ = load_run(args.evaluate, "evaluate")
    make_games = partial(make_env, args)
    if args.against is None:
        video_folder = args.evaluate if args.capture_video else None
        seed = args.seed + 1_000_000
        print(describe(score_policies(make_games, agents, args.eval_games, seed, args.deterministic, video_folder)))
        if args.cross_play_games:
            seed, num_snapshots = args.seed + 2_000_000, args.cross_play_snapshots
            table = snapshot_table(make_games, agents, pools, num_snapshots, args.cross_play_games, seed)
            report_table(args.evaluate, table)
        return
    env = make_games(1, render=args.capture_video)
    scripted = scripted_players(env)
    opponents = [player for player in scripted if player.name == args.against]
    if not opponents:
        opponents = load_opponents(args, load_run, list(dict.fromkeys(player.name for player in scripted)))
    players = [Player("policy", behavior, agent.acting_weights()) for behavior, agent in agents.items()] + opponents
    pairs = pairs_with_others(env, players, len(agents))
    if not pairs:
        fail(f"--against takes an opponent that can play the other team, and {args.against} cannot")
    results = play_pairs(make_games, agents, players, pairs, args.eval_games, args.seed, args.deterministic)
    for (i, j), scores in zip(pairs, results, strict=True):
        mean, low, high = score_interval(scores)
        own, other = f"{players[i].behavior} of {args.evaluate}", f"{players[j].behavior} of {args.against}"
        if players[j].weights is None:
            other = f"the scripted {players[j].behavior} player {args.against}"
        print(
            f"{own} against {other}: score {mean:.3f}, 95% interval [{low:.3f}, {high:.3f}], from {len(scores)} seeds"
        )
        if args.capture_video:
            record_video(env, agents, players[i], players[j], args.seed, args.deterministic, args.evaluate)
    env.close()


def load_opponents(args: Any, load_run: Callable[[Path, str], Any], scripted: list[str]) -> list[Player]:
    """The policies of the run folder that --against names; exits with one sentence if it is not of the same game."""
    if not Path(args.against).is_dir():
        fail(f"--against takes a run folder or one of {', '.join(scripted)}, and {args.against} is neither")
    agents, _, own_args = load_run(Path(args.against), "against")
    for name in ("env_id", "env_kwargs", "teams", "symmetric"):
        ours, theirs = getattr(args, name), getattr(own_args, name)
        if ours != theirs:
            flag = f"--{name.replace('_', '-')}"
            fail(f"--against takes a run of the same game, and {flag} was {ours} here and {theirs} there")
    return [Player("against", behavior, agent.acting_weights()) for behavior, agent in agents.items()]
