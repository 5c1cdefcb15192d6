"""Evaluation in self-play: against scripted players, against another run, and between a run's own snapshots.

`make_games(num_games)` makes games that are stepped together. Evaluations have their own games and random streams.
"""

import csv
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from utils.cross_play import (
    CrossPlay,
    Player,
    cross_play,
    make_player,
    pairs_with_others,
    play_pairs,
    player_behaviors,
    record_video,
    scripted_players,
)
from utils.elo import score_interval
from utils.play import play_at_keyboard
from utils.run import Limits, Run, describe, fail, flag_of, load_model, name_actions, read_args, warn
from utils.snapshot_pool import Snapshot, SnapshotPool
from utils.team_env import Team, TeamEnv

MakeGames = Callable[..., TeamEnv]
AgentT = TypeVar("AgentT", bound=Any)
ArgsT = TypeVar("ArgsT", bound=Any)


@contextmanager
def streams_kept() -> Iterator[None]:
    """Restores the global random streams afterwards: a game that is played between may draw from them."""
    state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)


@streams_kept()
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

    The agents' current policies play, or `policies`, one for each side. With `video_folder`, one game of each is
    recorded, against the scripted player that does best.
    """
    with closing(make_games(1)) as env:
        own = policies or current_players(env, agents, "policy")
        players = own + scripted_players(env)
        pairs = pairs_with_others(env, players, len(own))
    scores = play_pairs(make_games, agents, players, pairs, num_games, seed, deterministic).mean(1)
    names = [f"eval/{players[i].behavior}_score_vs_{players[j].name}" for i, j in pairs]
    if video_folder is not None:
        for k in dict.fromkeys(i for i, _ in pairs):
            _, i, j = min((score, *pair) for score, pair in zip(scores, pairs, strict=True) if pair[0] == k)
            record_video(make_games, agents, players[i], players[j], seed, deterministic, video_folder)
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

    The last snapshot is always among them. Snapshots of several behaviours play together if they are equally old,
    counted from the last one. Actions are sampled, as in training: no snapshot has met a policy of most
    likely actions.
    """
    with closing(make_games(1)) as env:
        players, groups = scripted_players(env), player_behaviors(env)
    for behaviors in groups:
        lineups = snapshot_lineups(pools, behaviors)
        count = min(num_snapshots, len(lineups))
        shown = [lineups[round(i)] for i in np.linspace(len(lineups) - 1, 0, count)[::-1]]
        players += [lineup_player(table_name(lineup), behaviors, lineup) for lineup in shown]
    return cross_play(make_games, agents, players, num_games, seed)


def snapshot_lineups(pools: Mapping[str, SnapshotPool], behaviors: Sequence[str]) -> list[tuple[Snapshot, ...]]:
    """Line-ups, oldest first: a snapshot of each behaviour, all of them equally many snapshots before the last one."""
    newest_first = [reversed(pools[behavior].snapshots) for behavior in behaviors]
    return list(zip(*newest_first, strict=False))[::-1]


def table_name(lineup: Sequence[Snapshot]) -> str:
    """The name in the table of snapshots that play together."""
    return f"step {lineup[0].step:,}"


def lineup_player(name: str, behaviors: Sequence[str], lineup: Sequence[Snapshot]) -> Player:
    """These snapshots, one of each behaviour, as a player."""
    return make_player(name, [Player(name, b, snapshot.weights) for b, snapshot in zip(behaviors, lineup, strict=True)])


def current_players(env: TeamEnv, agents: Mapping[str, Any], name: str) -> list[Player]:
    """The agents' current policies as players (`player_behaviors`)."""
    own = {behavior: Player(name, behavior, agent.acting_weights()) for behavior, agent in agents.items()}
    return [make_player(name, [own[behavior] for behavior in group]) for group in player_behaviors(env)]


def play_table(
    args: Any,
    make_env: MakeGames,
    agents: Mapping[str, Any],
    pools: Mapping[str, SnapshotPool],
    folder: Path,
    run: Run | None = None,
) -> None:
    """Plays and reports the table of a run's snapshots (`snapshot_table`); nothing with --cross-play-games 0."""
    if args.cross_play_games:
        limits, seed = (args.cross_play_snapshots, args.cross_play_games), args.seed + 2_000_000
        report_table(folder, snapshot_table(partial(make_env, args), agents, pools, *limits, seed), run)


def report_table(folder: Path, table: CrossPlay, run: Run | None = None) -> None:
    """Prints the table and writes it into the folder, for a run to TensorBoard too. A failure to write is a warning."""
    try:
        table.report(folder)
        if run is not None:
            run.writer.add_figure("selfplay/cross_play", table.heat_map(), run.global_step)
    except (OSError, ImportError) as error:
        warn(f"not all of the table is in {folder}: {error}")


def load_policies(
    args_class: type[ArgsT],
    limits: Limits,
    make_env: MakeGames,
    make_agent: Callable[[Team, ArgsT], AgentT],
    folder: Path,
    flag: str,
) -> tuple[dict[str, AgentT], dict[str, SnapshotPool], ArgsT]:
    """Agents, pools and arguments of a saved run; exits with one sentence that begins with `flag`.

    `make_env(args, num_games)` makes games, and `make_agent(team, args)` makes the agent of a behaviour.
    """
    args = read_args(args_class, folder, flag, limits)
    with closing(make_env(args, 1)) as env:
        agents = {team.behavior: make_agent(team, args) for team in env.teams}
    pools = {behavior: SnapshotPool(args.window, 0.0, "uniform", np.random.default_rng()) for behavior in agents}
    load_model(folder, {"agent": agents, "pool": pools}, flag)
    for behavior, pool in pools.items() if flag != "--initialize-from" else ():  # which takes the agents' weights
        weights: dict[str, Tensor] = agents[behavior].acting_weights()
        if not all(x.equal(pool.latest.weights[name]) for name, x in weights.items()):
            plays = f"{behavior} plays its snapshot of step {pool.latest.step:,}, which is older than its last policy"
            warn(f"{folder} was stopped before its end: {plays}")
    return agents, pools, args


def evaluate_run(
    args: Any, make_env: MakeGames, load_run: Callable[[Path, str], Any], train: Callable[[Any], Path]
) -> dict[str, np.ndarray]:
    """--evaluate: prints the scores and the table of a run. With --against: its score against another player. With
    --play: a person plays against it. With --exploitability: trains a policy to beat it, and scores that policy.
    Returns the result of `score_pairs`, or {} where that is not called.

    `make_env(args, num_games, render)` makes games, `load_run(folder, flag)` gives the agents, pools and arguments of a
    saved run, and `train(args)` trains and returns the run folder.
    """
    agents, pools, _ = load_run(args.evaluate, "--evaluate")
    make_games = partial(make_env, args)
    with closing(make_games(1)) as env:
        groups, scripted = player_behaviors(env), scripted_players(env)
    own = load_players(args.evaluate, pools, groups, args.policy, "policy")
    if args.initialize_from is not None and not args.exploitability:
        fail("--initialize-from is for training: with --evaluate it also needs --exploitability")
    if args.play:
        play_at_keyboard(args, make_games, agents, own)
        return {}
    if args.exploitability:
        response = train_response(args, train)
        players = load_players(response, load_run(response, "--evaluate")[1], groups, "last", "response")
        sampled = replace(args, deterministic=False)
        return score_pairs(sampled, make_games, agents, players, own, str(response), str(args.evaluate))
    if args.against is None:
        video_folder = args.evaluate if args.capture_video else None
        rules = args.eval_games, args.seed + 1_000_000, args.deterministic, video_folder
        print(describe(score_policies(make_games, agents, *rules, own), args.deterministic))
        play_table(args, make_env, agents, pools, args.evaluate)
        return {}
    opponents = [player for player in scripted if player.name == args.against]
    if not opponents:
        if not os.path.isdir(args.against):  # a name may be too long for Path
            known = ", ".join(dict.fromkeys(player.name for player in scripted))
            fail(f"--against takes a run folder or one of {known}, and {args.against} is neither")
        _, pools, other = load_run(Path(args.against), "--against")
        check_same_game(args, other, "--against")
        opponents = load_players(Path(args.against), pools, groups, "last", "against")
    return score_pairs(args, make_games, agents, own, opponents, str(args.evaluate), args.against)


def score_pairs(
    args: Any,
    make_games: MakeGames,
    agents: Mapping[str, Any],
    own: list[Player],
    opponents: list[Player],
    name: str,
    other_name: str,
) -> dict[str, np.ndarray]:
    """Prints the score of each own player against each opponent that it can meet, with its 95% interval.

    Returns the scores (num_seeds,) of each own behaviour; if it meets several opponents, those against the last one.
    """
    players = own + opponents
    with closing(make_games(1)) as env:
        pairs = pairs_with_others(env, players, len(own))
    if not pairs:
        fail(f"--against takes an opponent that can play the other team, and {other_name} cannot")
    results = play_pairs(make_games, agents, players, pairs, args.eval_games, args.seed, args.deterministic)
    for (i, j), scores in zip(pairs, results, strict=True):
        mean, low, high = score_interval(scores)
        other = f"{players[j].behavior} of {other_name}"
        if players[j].is_scripted:
            other = f"the scripted {players[j].behavior} player {other_name}"
        interval = f"95% interval [{low:.3f}, {high:.3f}], from {len(scores)} seeds, {name_actions(args.deterministic)}"
        print(f"{players[i].behavior} of {name} against {other}: score {mean:.3f}, {interval}")
        if args.capture_video:
            record_video(make_games, agents, players[i], players[j], args.seed, args.deterministic, args.evaluate)
    return {players[i].behavior: scores for (i, _), scores in zip(pairs, results, strict=True)}


def train_response(args: Any, train: Callable[[Any], Path]) -> Path:
    """Trains for --exploitability game steps against the frozen policies of the run, and against nobody else; returns
    the new run's folder."""
    own = {"evaluate": None, "opponents": [str(args.evaluate)], "total_timesteps": args.exploitability}
    own |= {"scripted_share": 0.0, "current_share": 0.0, "learner_side": None}
    rest = {"exploitability": 0, "eval_freq": 0, "cross_play_games": 0}
    rest |= dict.fromkeys(("capture_video", "track", "upload_model"), False)
    print(f"training against {args.evaluate} for {args.exploitability:,} game steps")
    return train(replace(args, **own, **rest))


def find_difference(args: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first argument in which the games of two runs differ, or the inputs of their policies, or None."""
    for name in ("env_id", "env_kwargs", "teams", "symmetric", "norm_obs"):
        ours, theirs = args[name], other[name]
        is_json = name in ("env_kwargs", "teams") and None not in (ours, theirs)
        if json.loads(ours) != json.loads(theirs) if is_json else ours != theirs:
            return name
    return None


def check_same_game(args: Any, other: Any, flag: str) -> None:
    """Exits with one sentence if another run has another game, or other inputs of its policies."""
    if name := find_difference(vars(args), vars(other)):
        own = f"{flag_of(name)} is {getattr(args, name)} in this run and {getattr(other, name)} in the other"
        fail(f"{flag} takes a run of the same game, and {own}")


def initialize(agents: Mapping[str, Any], all_args: Mapping[str, Any], load_run: Callable[[Path, str], Any]) -> None:
    """--initialize-from: gives the agents the weights of a saved run of the same game, its critics and statistics too.

    `all_args` are the arguments of each behaviour. Optimisers begin anew. A run that is resumed has its own weights.
    """
    args = next(iter(all_args.values()))  # the flags of the run are those of every behaviour
    if args.initialize_from is not None and args.resume is None:
        others, _, other_args = load_run(Path(args.initialize_from), "--initialize-from")
        check_same_game(args, other_args, "--initialize-from")
        for behavior, agent in agents.items():
            state = others[behavior].state_dict()
            if not getattr(all_args[behavior], "autotune", True):
                state["log_alpha"] = agent.state_dict()["log_alpha"]  # --alpha
            agent.load_state_dict(state)


def load_rivals(args: Any, load_run: Callable[[Path, str], Any], env: TeamEnv) -> dict[str, SnapshotPool] | None:
    """The policies of the runs of --opponents, as pools that are never added to; None without that flag.

    All runs are drawn equally often. --policy decides which snapshots of a run are drawn, and how often. The behaviours
    of a side are drawn independently.
    """
    if args.opponents is None:
        return None
    groups = [*reversed(player_behaviors(env))]
    if args.policy != "nash":  # only its shares are of a side's whole line-ups
        groups = [(team.behavior,) for team in env.teams]
    sides = {behavior: group for group in groups for behavior in group}
    shares: dict[str, list[tuple[Snapshot, float]]] = {}
    for folder in args.opponents:
        _, pools, other = load_run(Path(folder), "--opponents")
        check_same_game(args, other, "--opponents")
        for behavior in pools:
            mixture = read_mixture(Path(folder), pools, sides[behavior], args.policy)
            own = [(lineup[sides[behavior].index(behavior)], share) for lineup, share in mixture]
            shares.setdefault(behavior, []).extend(own)
    rivals = {}
    for behavior, members in shares.items():
        probabilities = [share / len(args.opponents) for _, share in members]
        rng = np.random.default_rng(args.seed)
        rivals[behavior] = SnapshotPool(len(members), 0.0, "uniform", rng, shares=probabilities)
        for snapshot, _ in members:
            rivals[behavior].add(snapshot.weights, snapshot.step, args.initial_elo)
    return rivals


def load_players(
    folder: Path, pools: Mapping[str, SnapshotPool], groups: Sequence[tuple[str, ...]], policy: str, name: str
) -> list[Player]:
    """What a saved run plays as, a player for each group of behaviours (`player_behaviors`): its last snapshots or a
    mixture (`read_mixture`)."""
    players = []
    for behaviors in groups:
        mixture = read_mixture(folder, pools, behaviors, policy)
        members = tuple(lineup_player(name, behaviors, lineup) for lineup, _ in mixture)
        mixed = Player(name, members[0].behavior, None, members, tuple(share for _, share in mixture))
        players.append(members[0] if len(members) == 1 else mixed)
    return players


def read_mixture(
    folder: Path, pools: Mapping[str, SnapshotPool], behaviors: tuple[str, ...], policy: str
) -> list[tuple[tuple[Snapshot, ...], float]]:
    """The snapshots that a saved run plays with on teams of these behaviours, and how often.

    "last": the last one of each. "uniform": all in the pools (`snapshot_lineups`), equally often. "nash": by the
    weights in the run's cross_play.csv; exits with one sentence if there is none.
    """
    lineups = snapshot_lineups(pools, behaviors)
    if policy == "last":
        return [(lineups[-1], 1.0)]
    if policy == "uniform":
        return [(lineup, 1.0 / len(lineups)) for lineup in lineups]
    try:
        with (folder / "cross_play.csv").open(newline="") as file:
            weights = {row["player"]: float(row["nash_weight"] or 0) for row in csv.DictReader(file)}
    except (OSError, LookupError, ValueError) as error:
        fail(f"--policy nash takes a run folder with the cross_play.csv of a table, and {folder} has none ({error})")
    labels = [table_name(lineup) for lineup in lineups]  # with the behaviours before it, if the table has others, too
    found = [weights.get(f"{'+'.join(behaviors)} {label}", weights.get(label, 0.0)) for label in labels]
    total = sum(found)
    if not total > 0.5:
        fail(f"--policy nash takes a table of the run's own snapshots, and that of {folder} is of others")
    return [(lineup, share / total) for lineup, share in zip(lineups, found, strict=True) if share > 0.0]
