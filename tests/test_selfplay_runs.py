"""The self-play scripts as users run them: games of every kind, every flag, files, repeatability, learning.

`test_evaluation.py` has --evaluate, and `test_checkpoints.py` has --resume.
"""

import csv
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
import scipy.stats
import torch
import wandb
from conftest import Train
from pettingzoo.utils.env_logger import EnvLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_selfplay
import sac_selfplay
from utils import team_env
from utils.games import Pursuit, Sumo
from utils.matches import Matches
from utils.run import parse_args, seed_streams
from utils.snapshot_pool import SnapshotPool
from utils.team_env import Team, TeamEnv, TeamStep, legal_actions, make_team_env

ROOT = Path(__file__).parent.parent
Weights = dict[str, torch.Tensor]


def load(folder: Path) -> dict[str, Any]:
    """What model.pt holds: agents and snapshots, by behaviour."""
    model = torch.load(folder / "model.pt", weights_only=True)
    found = {end: [name.removesuffix(end) for name in model if name.endswith(end)] for end in ("_agent", "_pool")}
    assert found["_agent"] == found["_pool"]
    return {
        "agents": {behavior: model[f"{behavior}_agent"] for behavior in found["_agent"]},
        "snapshots": {behavior: model[f"{behavior}_pool"] for behavior in found["_agent"]},
    }


def all_weights(folder: Path) -> Weights:
    """Every tensor of every agent."""
    agents = load(folder)["agents"]
    return {f"{behavior} {name}": value for behavior, agent in agents.items() for name, value in agent.items()}


def are_equal(one: Weights, other: Weights) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def read_events(folder: Path) -> EventAccumulator:
    """All that TensorBoard would show."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()


def series(folder: Path, tag: str) -> list[float]:
    """The values of one logged quantity."""
    return [event.value for event in read_events(folder).Scalars(tag)]


# --- games ---

GAMES: dict[str, dict[str, Any]] = {
    "sumo": {},
    "sumo discrete": {"env_kwargs": '{"actions": "discrete"}'},
    "sumo multidiscrete": {"env_kwargs": '{"actions": "multidiscrete"}'},
    "pursuit": {"team_change": 300},
    "mpe2.simple_push_v3": {"team_change": 150},
    "mpe2.simple_push_v3 continuous": {"team_change": 150, "env_kwargs": '{"continuous_actions": true}'},
    "mpe2.simple_tag_v3": {"team_change": 300},
    "pettingzoo.classic.connect_four_v3": {},
    "pettingzoo.classic.rps_v2": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
def test_games(selfplay: ModuleType, game: str, train_selfplay: Train) -> None:
    """Every role learns, every number stays finite, and each role's turn ends with a snapshot of what it has become."""
    folder = train_selfplay(selfplay, env_id=game.split()[0], save_steps=1000, **GAMES[game])
    model = load(folder)
    for behavior, agent in model["agents"].items():
        assert all(value.isfinite().all() for value in agent.values())
        first, *_, last = model["snapshots"][behavior]
        assert first["step"] == 0
        for name, value in last["weights"].items():
            assert torch.equal(value, agent[name])
        actor = [name for name in first["weights"] if name.startswith("actor.")]
        assert all(not torch.equal(first["weights"][name], last["weights"][name]) for name in actor)
    num_behaviors = len(model["agents"])
    assert num_behaviors == (2 if "team_change" in GAMES[game] else 1)
    assert set(series(folder, "charts/learner")) == set(range(num_behaviors))


def test_a_role_at_rest_does_not_change(
    selfplay: ModuleType, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its networks nor its statistics, while the other learns."""
    monkeypatch.setattr("utils.matches.turn_ends", lambda *_: [10**9] * 2)
    folder = train_selfplay(selfplay, env_id="pursuit", norm_obs=True)
    model = load(folder)
    (snapshot,) = model["snapshots"]["evader"]
    assert all(torch.equal(value, model["agents"]["evader"][name]) for name, value in snapshot["weights"].items())
    assert model["agents"]["evader"]["obs_rms.count"] == 0
    assert model["agents"]["pursuers"]["obs_rms.count"] == 2 * 512
    assert len(model["snapshots"]["pursuers"]) > 3


@pytest.mark.slow
def test_no_illegal_move_is_ever_made(
    selfplay: ModuleType, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connect four: the game's own referee stays silent in training, evaluation and table, and would have spoken."""
    offences = []
    monkeypatch.setattr(EnvLogger, "warn_on_illegal_move", lambda: offences.append(1))
    train_selfplay(
        selfplay, env_id="pettingzoo.classic.connect_four_v3", total_timesteps=1024, num_games=4, cross_play_games=2
    )
    assert not offences
    env = make_team_env("pettingzoo.classic.connect_four_v3", 1)
    env.reset(0)
    for _ in range(7):  # the seventh piece does not fit into the column
        env.step([np.zeros((1, 1, 1), dtype=np.int64)] * 2)
    assert offences


def test_a_game_in_the_working_folder(selfplay: ModuleType, train_selfplay: Train, tmp_path: Path) -> None:
    """A module that the user has written."""
    (tmp_path / "my_game.py").write_text((ROOT / "tests" / "toy_games.py").read_text())
    folder = train_selfplay(selfplay, env_id="my_game")
    assert load(folder)["agents"].keys() == {"red", "blue"}
    assert series(folder, "eval/red_score_vs_random") == [1.0]  # red wins by the plan
    assert series(folder, "eval/blue_score_vs_random") == [0.0]


QUITTER = """
import toy_games

def parallel_env(**kwargs):
    plan = [{"red_0": {"reward": -1.0, "end": "termination"}}] + [{}] * 30
    return toy_games.parallel_env(plan=plan, **kwargs)
"""


def test_a_learner_that_leaves_its_games_early(
    selfplay: ModuleType, train_selfplay: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts in which it acts seldom or never: it learns from what there is, and nothing becomes nan."""
    monkeypatch.setattr("utils.matches.turn_ends", lambda teams, team_change, total_steps, _: [total_steps] * 2)
    (tmp_path / "quitter.py").write_text(QUITTER)
    for num_games in (1, 3):
        folder = train_selfplay(
            selfplay, env_id="quitter", num_games=num_games, total_timesteps=240 * num_games, norm_obs=True
        )
        assert all(value.isfinite().all() for value in all_weights(folder).values())
        model = load(folder)
        assert model["agents"]["red"]["obs_rms.count"] == model["snapshots"]["red"][-1]["step"] == 8 * num_games


# --- repeatability ---


@pytest.mark.slow
def test_same_seed_same_weights(selfplay: ModuleType, train_selfplay: Train) -> None:
    """Bit for bit, snapshots and ratings too; another seed gives other weights."""
    one, same, other = train_selfplay(selfplay), train_selfplay(selfplay), train_selfplay(selfplay, seed=2)
    assert are_equal(all_weights(one), all_weights(same))
    for snapshot, twin in zip(load(one)["snapshots"]["sumo"], load(same)["snapshots"]["sumo"], strict=True):
        assert are_equal(snapshot["weights"], twin["weights"])
        assert (snapshot["rating"], snapshot["step"], snapshot["results"]) == (
            twin["rating"],
            twin["step"],
            twin["results"],
        )
    assert not are_equal(all_weights(one), all_weights(other))


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["sumo", "mpe2.simple_push_v3"])
def test_evaluation_does_not_touch_the_training(selfplay: ModuleType, env_id: str, train_selfplay: Train) -> None:
    """Off or often, by samples or the most likely actions, with statistics that would drift if they were not frozen."""
    flags = {"env_id": env_id, "norm_obs": True, "team_change": 128}
    plain = all_weights(train_selfplay(selfplay, **flags))
    for changes in (
        {"eval_freq": 64, "eval_games": 4},
        {"eval_freq": 256, "deterministic": True, "cross_play_games": 2},
    ):
        assert are_equal(plain, all_weights(train_selfplay(selfplay, **flags, **changes)))


@pytest.mark.slow
@pytest.mark.parametrize("actions", ["box", "multidiscrete"])
def test_each_snapshot_acts_as_it_did_in_training(
    selfplay: ModuleType, actions: str, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every action of an opponent, against the saved snapshot alone, from the same observation and noise."""
    records: list[tuple[Any, ...]] = []
    original = Matches.all_actions

    def spy(matches: Matches, env: TeamEnv, agents: Any, obs: Any, learner_actions: np.ndarray) -> list[np.ndarray]:
        state, uids = torch.get_rng_state(), matches.uids.copy()
        chosen = original(matches, env, agents, obs, learner_actions)
        assert np.array_equal(matches.of_learner(chosen), learner_actions)
        records.append((state, uids, obs, [legal_actions(env, t) for t in range(2)], chosen))
        return chosen

    monkeypatch.setattr(Matches, "all_actions", spy)
    folder = train_selfplay(
        selfplay,
        env_kwargs=json.dumps({"actions": actions}),
        total_timesteps=2048,
        play_against_latest_model_ratio=0.2,
        norm_obs=True,
    )
    agents, _, args = selfplay.load_run(folder, "--evaluate")
    agent, checked, wrong = agents["sumo"], set(), 0
    snapshots = {snapshot["uid"]: snapshot["weights"] for snapshot in load(folder)["snapshots"]["sumo"]}
    for state, uids, obs, masks, chosen in records[::5]:
        assert ((uids >= 0).sum(axis=1) == 1).all()
        torch.set_rng_state(state)
        noise = agent.actor.noise(args.num_games)
        for row, (game, team) in enumerate(np.argwhere(uids >= 0)):
            if uids[game, team] in snapshots:
                agent.load_state_dict(snapshots[uids[game, team]], strict=False)
                action = agent.act(obs[team][game], masks[team][game], noise[row : row + 1])
                wrong += int(not np.allclose(action, chosen[team][game], rtol=0, atol=1e-4))
                checked.add(int(uids[game, team]))
    assert wrong == 0
    assert len(checked) > 4


# --- what a run leaves behind ---


def documented_keys(script: str) -> set[str]:
    """The keys of a run of sumo in the tables of docs/selfplay.md: those of both scripts, and the script's own."""
    tables = (ROOT / "docs" / "selfplay.md").read_text().split("## Logged metrics")[1].split("\n## ")[0]
    both, own = tables.split("`ppo_selfplay.py` also logs")
    text = both + own.split("`sac_selfplay.py` also logs")[script == "sac_selfplay"]
    keys = {key.replace("BEHAVIOUR", "sumo") for key in re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)}
    return {key.replace("PLAYER", player) for key in keys for player in ("random", "charge", "centre")}


@pytest.mark.slow
def test_folder_and_logs(selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Files, keys, one finite point a key and step, the table as numbers and pictures, and what to type next."""
    folder = train_selfplay(selfplay, total_timesteps=1024, eval_freq=256, cross_play_games=4, cross_play_snapshots=3)
    assert re.fullmatch(rf"sumo__{selfplay.__name__}__1__\d+", folder.name)
    assert [path.name for path in folder.parent.parent.iterdir()] == ["runs"]
    events = read_events(folder)
    assert events.Tags()["images"] == ["selfplay/cross_play"]
    assert {*events.Tags()["scalars"], "selfplay/cross_play"} == documented_keys(selfplay.__name__)
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        assert steps == sorted(set(steps))
        assert all(np.isfinite(event.value) for event in events.Scalars(tag))
    assert [event.step for event in events.Scalars("eval/sumo_score_vs_random")] == [256, 512, 768, 1024]

    printed = capsys.readouterr().out
    players = [
        "random",
        "charge",
        "centre",
        *(f"step {snapshot['step']:,}" for snapshot in load(folder)["snapshots"]["sumo"]),
    ]
    with (folder / "cross_play.csv").open() as file:
        header, *rows = csv.reader(file)
    names = [row[0] for row in rows]
    assert header == ["player", "rating", "low", "high", "nash_weight", *names]
    assert len(names) == 6  # three of all those snapshots
    assert [name for name in players if name in names] == names
    assert {players[3], players[-1]} <= set(names)
    table = np.array([[float(cell or "nan") for cell in row[5:]] for row in rows])
    np.testing.assert_allclose(table + table.T + np.eye(6), np.where(np.eye(6), np.nan, 1.0), atol=1e-3)
    assert all(f"\n{name} " in printed for name in names)
    assert iio.imread(folder / "cross_play.png").std() > 10
    assert f"run folder: runs/{folder.name}" in printed
    assert json.loads((folder / "args.json").read_text())["cross_play_games"] == 4


@pytest.mark.slow
def test_next_command_runs_as_printed(
    selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """The score of the policy against the best scripted player, with an interval, and a video of it."""
    folder = train_selfplay(selfplay)
    (words,) = re.findall(rf"^ *python \S*{selfplay.__name__}\.py (.*)$", capsys.readouterr().out, re.MULTILINE)
    selfplay.main(parse_args(selfplay.Args, words.split()))
    number = r"[01]\.\d{3}"
    line = (
        rf"sumo of {folder.relative_to(folder.parent.parent)} against the scripted sumo player centre: score {number}, "
    )
    assert re.match(
        line + rf"95% interval \[{number}, {number}\], from \d+ seeds, most likely actions\n", capsys.readouterr().out
    )
    (video,) = (folder / "videos").glob("*.mp4")
    assert iio.imread(video).std() > 1


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["sumo", "mpe2.simple_push_v3"])
def test_video(selfplay: ModuleType, env_id: str, train_selfplay: Train) -> None:
    """One for each role, which a decoder reads: a picture a step, and not one colour."""
    folder = train_selfplay(selfplay, env_id=env_id, capture_video=True, total_timesteps=128)
    videos = sorted((folder / "videos").glob("*.mp4"))
    assert [path.name.split("-vs-")[0] for path in videos] == (["sumo"] if env_id == "sumo" else ["adversary", "agent"])
    for path in videos:
        frames = iio.imread(path)
        assert len(frames) > 2
        assert frames.std() > 1
        assert (frames[0] != frames[-1]).any()


@pytest.mark.slow
def test_wandb_offline(selfplay: ModuleType, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B gets the same points as TensorBoard, and its files are in the run folder and nowhere else."""
    points: set[tuple[str, int]] = set()
    log = wandb.Run.log

    def spy(run: wandb.Run, metrics: dict[str, float], step: int) -> None:
        points.update((name, step) for name in metrics)
        log(run, metrics, step=step)

    monkeypatch.setattr(wandb.Run, "log", spy)
    folder = train_selfplay(selfplay, track=True, total_timesteps=128)
    assert [path.name for path in folder.parent.parent.iterdir()] == ["runs"]
    assert list((folder / "wandb").glob("offline-run-*/*.wandb"))
    events = read_events(folder)
    assert points == {(tag, event.step) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}


def test_no_model_and_no_table(selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written that was not asked for, and no command is printed that would not work."""
    folder = train_selfplay(selfplay, save_model=False, exp_name="mine", total_timesteps=128)
    assert folder.name.split("__")[1] == "mine"
    assert not {"model.pt", "cross_play.csv", "cross_play.png", "videos"} & {path.name for path in folder.iterdir()}
    assert "--evaluate" not in capsys.readouterr().out


# --- flags ---

SWITCHES = ("anneal_lr", "norm_adv", "norm_obs", "norm_reward")
BASE: dict[str, dict[str, Any]] = {
    "ppo_selfplay": {
        "total_timesteps": 1024,
        "num_steps": 32,
        "update_epochs": 2,
        "play_against_latest_model_ratio": 0.5,
    }
    | dict.fromkeys(SWITCHES, True),
    "sac_selfplay": {"total_timesteps": 768, "play_against_latest_model_ratio": 0.5, "window": 10}
    | {"norm_obs": False, "autotune": True, "replay_opponents": "all", "anneal_lr": False},
}
SHARED: dict[str, Any] = {
    "seed": 2,
    "env_kwargs": '{"actions": "discrete"}',
    "symmetric": "no",
    "num_games": 4,
    "save_steps": 512,
    "window": 1,
    "newest_share": 0.1,
    "scripted_share": 0.5,
    "current_share": 0.5,
    "play_against_latest_model_ratio": 1.0,
    "opponent_sampling": "uniform",
    "swap_steps": 100_000,
    "swaps_per_turn": 1.0,
    "total_timesteps": 2048,
    "gamma": 0.9,
}
FLAGS: dict[str, dict[str, Any]] = {
    "ppo_selfplay": {
        "learning_rate": 1e-2,
        "num_steps": 16,
        "anneal_lr": False,
        "gae_lambda": 0.5,
        "num_minibatches": 4,
        "update_epochs": 3,
        "norm_adv": False,
        "norm_obs": False,
        "norm_reward": False,
        "clip_coef": 0.01,
        "ent_coef": 0.1,
        "vf_coef": 2.0,
        "max_grad_norm": 0.01,
        "target_kl": 0.0,
    },
    "sac_selfplay": {
        "replay_opponents": "window",
        "buffer_size": 100,
        "batch_size": 16,
        "learning_starts": 128,
        "updates_per_step": 0.1,
        "tau": 0.5,
        "critics": "min",
        "policy_frequency": 2,
        "policy_lr": 1e-2,
        "q_lr": 1e-2,
        "alpha_lr": 1e-1,
        "anneal_lr": True,
        "alpha": 0.5,
        "autotune": False,
        "target_entropy_scale": 5.0,
        "norm_obs": True,
    },
}


@pytest.mark.slow
def test_every_flag_changes_something(
    selfplay: ModuleType, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag that does nothing is a defect: each that concerns learning alters the weights, alone."""
    monkeypatch.setattr(selfplay, "evaluate", lambda *_: {})
    base = BASE[selfplay.__name__]
    default = all_weights(train_selfplay(selfplay, **base))
    for flag, value in (SHARED | FLAGS[selfplay.__name__]).items():
        extra = {"window": 2} if flag == "replay_opponents" else {}
        expected = all_weights(train_selfplay(selfplay, **base | extra)) if extra else default
        assert not are_equal(all_weights(train_selfplay(selfplay, **base | extra | {flag: value})), expected), flag
    ours = {"exp_name", "cuda", "track", "wandb_project_name", "wandb_entity", "capture_video"}
    ours |= {
        "save_model",
        "upload_model",
        "hf_entity",
        "eval_freq",
        "eval_games",
        "cross_play_games",
        "cross_play_snapshots",
        "deterministic",
        "evaluate",
    }
    ours |= {
        "against",
        "env_id",
        "teams",
        "team_change",
        "initial_elo",
        "elo_k",
        "log_freq",
        "discrete_target_entropy_scale",
    }
    ours |= {"opponents", "policy", "exploitability", "initialize_from"}  # see test_opponents.py
    ours |= {"play", "behaviors"}  # see test_play.py and test_turns.py
    ours |= {"checkpoint_freq", "resume", "compile"}  # see test_checkpoints.py and test_compile.py
    ours |= {"learner_side"}  # Sumo is the same from both sides, and so are the weights
    assert {*selfplay.Args.__dataclass_fields__} - ours == {*SHARED, *FLAGS[selfplay.__name__]}, (
        "flags that nothing tests"
    )


def test_discrete_target_entropy_scale(train_selfplay: Train) -> None:
    """The one flag that concerns discrete actions only."""
    flags = {"env_kwargs": '{"actions": "multidiscrete"}'}
    weights = [all_weights(train_selfplay(sac_selfplay, **flags, discrete_target_entropy_scale=x)) for x in (0.1, 0.9)]
    assert not are_equal(*weights)
    assert weights[0]["sumo log_alpha"].shape == (2,)


@pytest.mark.slow
def test_ratings(selfplay: ModuleType, train_selfplay: Train) -> None:
    """They begin where --initial-elo says, and move by no more than --elo-k a game; none moves without it."""
    flags = {"total_timesteps": 1024, "play_against_latest_model_ratio": 1.0, "save_steps": 10**6}
    folder = train_selfplay(selfplay, **flags, initial_elo=500.0, elo_k=8.0)
    ratings, games = series(folder, "selfplay/rating_sumo"), series(folder, "selfplay/games")
    assert 0 < max(abs(rating - 500.0) for rating in ratings) <= 4.0 * sum(games) + 1e-6
    one_opponent = series(folder, "selfplay/opponent_rating_mean")
    assert all(500.0 - 4.0 * sum(games) - 1e-6 <= rating <= 500.0 + 4.0 * sum(games) for rating in one_opponent)
    flat = train_selfplay(selfplay, **flags, initial_elo=500.0, elo_k=0.0)
    assert set(series(flat, "selfplay/rating_sumo")) == {500.0}
    assert are_equal(all_weights(flat), all_weights(folder))  # ratings are read, not learned from


@pytest.mark.slow
def test_snapshots_have_the_rating_of_the_learner(
    selfplay: ModuleType, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the moment at which they are taken, not the initial one, in both roles."""
    made: list[Matches] = []
    taken: list[tuple[float, float]] = []
    init, add = Matches.__init__, SnapshotPool.add

    def spy_init(matches: Matches, *args: Any) -> None:
        made.append(matches)
        init(matches, *args)

    def spy_add(pool: SnapshotPool, weights: Any, step: int, rating: float) -> Any:
        if made:
            behaviors = [behavior for behavior, other in made[0].pools.items() if other is pool]
            taken.extend((rating, made[0].rating_of(behavior)) for behavior in behaviors)  # none: scripted players
        return add(pool, weights, step, rating)

    monkeypatch.setattr(Matches, "__init__", spy_init)
    monkeypatch.setattr(SnapshotPool, "add", spy_add)
    train_selfplay(selfplay, env_id="pursuit", team_change=1024, save_steps=256, total_timesteps=2048)
    assert len(taken) > 8
    assert all(rating == learners for rating, learners in taken)
    assert len({rating for rating, _ in taken} - {1200.0}) > 2


REWARDED = """
import toy_games

def parallel_env(end="termination", **kwargs):
    ends = {"red_0": {"reward": 3.0, "end": end}, "blue_0": {"end": end}}
    plan = [{"red_0": {"reward": 1.0}}, {"red_0": {"reward": 2.0}}, ends]
    return toy_games.parallel_env(plan=plan, **kwargs)
"""


@pytest.mark.parametrize("end", ["termination", "truncation"])
@pytest.mark.parametrize("gammas", [{"gamma": 0.5}, {"gamma": 0.9, "behaviors": '{"red": {"gamma": 0.5}}'}], ids=str)
def test_discounted_returns_begin_anew_with_each_game(
    end: str, gammas: dict[str, Any], train_selfplay: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards 1, 2, 3 and gamma 1/2: PPO scales by the spread of 1, 2.5 and 4.25, wherever a rollout is cut."""
    (tmp_path / "rewarded.py").write_text(REWARDED)
    flags = {"env_id": "rewarded", "num_games": 2, "num_steps": 4, "total_timesteps": 24, "num_minibatches": 2}
    monkeypatch.setattr("utils.matches.turn_ends", lambda *_: [10**9] * 2)
    folder = train_selfplay(ppo_selfplay, **flags, **gammas, env_kwargs=json.dumps({"end": end}))
    agent, returns = load(folder)["agents"]["red"], [1.0, 2.5, 4.25]
    assert agent["return_rms.count"] == 24
    assert agent["return_rms.mean"].item() == pytest.approx(np.mean(returns))
    assert agent["return_rms.var"].item() == pytest.approx(np.var(returns))


@pytest.mark.slow
def test_no_update_without_a_transition_that_may_be_drawn(train_selfplay: Train, tmp_path: Path) -> None:
    """All transitions are of opponents that have left the pool, and the learner has left its game for a while."""
    quitter = QUITTER.replace("toy_games.parallel_env(", "toy_games.parallel_env(NAMES, ").replace("red_0", "player_0")
    names = "NAMES = {f'player_{i}': spaces for i, spaces in enumerate(toy_games.DUEL.values())}"
    (tmp_path / "leaver.py").write_text(quitter.replace("import toy_games", f"import toy_games\n{names}"))
    flags = {"num_games": 1, "total_timesteps": 400, "save_steps": 1, "window": 1, "replay_opponents": "window"}
    flags |= {"learner_side": "player_0", "learning_starts": 4, "updates_per_step": 1.0}
    folder = train_selfplay(sac_selfplay, env_id="leaver", **flags)
    assert all(value.isfinite().all() for value in all_weights(folder).values())


@pytest.mark.slow
def test_learner_side(selfplay: ModuleType, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner takes both sides in turn, or the one that it was given."""
    sides: set[int] = set()
    finish = Matches.finish

    def spy(matches: Matches, game: int, scores: np.ndarray, rated: bool = True) -> None:
        sides.update(matches.learner_team.tolist())
        finish(matches, game, scores, rated)

    monkeypatch.setattr(Matches, "finish", spy)
    for side, expected in ((None, {0, 1}), ("left", {0}), ("right", {1})):
        sides.clear()
        train_selfplay(selfplay, learner_side=side, total_timesteps=1024)
        assert sides == expected


def test_turns(selfplay: ModuleType, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """--team-change counts the learner's own steps: two pursuers make two a game step, the evader one.

    Turns of 512 would be 256 and 512 game steps long; two whole cycles of 1,152 steps have 192 and 384. PPO changes
    after whole rollouts of 128.
    """
    turns: list[tuple[str, int]] = []
    give_turn = Matches.give_turn

    def spy(matches: Matches, behavior: str) -> None:
        turns.append((behavior, matches.ghost_steps))
        give_turn(matches, behavior)

    resets: list[int] = []
    reset = Pursuit.reset

    def spy_reset(env: Pursuit, seed: int) -> list[np.ndarray]:
        resets.extend([seed] if seed else [])  # with 0 every game is tried once, when it is made
        return reset(env, seed)

    monkeypatch.setattr(Matches, "give_turn", spy)
    monkeypatch.setattr(Pursuit, "reset", spy_reset)
    folder = train_selfplay(selfplay, env_id="pursuit", team_change=512, total_timesteps=1152, save_steps=512)
    assert [behavior for behavior, _ in turns] == ["pursuers", "evader", "pursuers", "evader"]
    first, second, third = (256, 640, 768) if selfplay is ppo_selfplay else (192, 576, 768)
    ghosts = np.cumsum([0, first, 2 * (second - first), third - second])  # one evader, two pursuers, one evader
    assert [steps for _, steps in turns] == ghosts.tolist()
    assert resets[:4] == [seed_streams(1, step) for step in (0, first, second, third)]  # all games begin anew
    assert resets[4] == 1_000_001  # an evaluation's
    steps = {behavior: [s["step"] for s in pool] for behavior, pool in load(folder)["snapshots"].items()}
    assert steps == {"pursuers": [0, 2 * first, 768], "evader": [0, 384, 768]}


def test_updates_per_step(train_selfplay: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted for each role: the ratio times its game steps after its warm-up, which is random play."""
    counts: list[int] = []
    drawn: set[tuple[float, ...]] = set()
    update, act = sac_selfplay.update, sac_selfplay.Agent.act
    acted: list[int] = []

    def spy_update(*args: Any) -> Any:
        counts.append(args[4])
        drawn.add(tuple(args[2][2].flatten().tolist()))
        return update(*args)

    def spy_act(agent: Any, obs: np.ndarray, masks: np.ndarray, noise: Any = 0.0) -> np.ndarray:
        acted.append(len(obs))
        return act(agent, obs, masks, noise)

    monkeypatch.setattr(sac_selfplay, "update", spy_update)
    monkeypatch.setattr(sac_selfplay.Agent, "act", spy_act)
    flags = {"learning_starts": 64, "updates_per_step": 0.25, "total_timesteps": 512}
    train_selfplay(sac_selfplay, env_id="pursuit", team_change=256, **flags)
    # One cycle: pursuers for a third of the 512 game steps, up to 176, then the evader.
    assert counts == [*range(28), *range(68)]
    assert acted == [16] * 14 + [8] * 34
    assert len(drawn) == len(counts)  # each has a minibatch of its own


def test_old_opponents_are_left_out_of_the_minibatches(train_selfplay: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """--replay-opponents window: no sample is of an opponent older than the pool's oldest at the last snapshot.

    Each rule is the step of the pool's oldest snapshot and the number of transitions stored so far. Sumo: snapshot k is
    of learner step 128 k, when the buffer has 128 k transitions and the pool of two begins with snapshot k - 1.

    Pursuit: the one cycle gives the pursuers a third of 512 game steps. Their turn ends at 176, the first multiple of 8
    games from 171 on. Two pursuers make two learner steps a game step: snapshots at 128, 256, and 352 at the turn's
    end. Until then the evader's pool has its first policy, of step 0. At the end the rule is for the evader, whose
    buffer is empty, and whose opponents are the pursuers of step 352. Its own 336 steps have snapshots at 128 and 256.
    """
    rules: list[tuple[int, int]] = []
    num_added: Counter[sac_selfplay.ReplayBuffer] = Counter()
    leave_out, add = sac_selfplay.ReplayBuffer.leave_out, sac_selfplay.ReplayBuffer.add

    def spy(buffer: sac_selfplay.ReplayBuffer, before: int) -> None:
        rules.append((before, num_added[buffer]))
        leave_out(buffer, before)
        kept = torch.arange(buffer.window["first"], buffer.total) % len(buffer.data)
        assert (buffer.opponents[kept] >= before).all()

    def count(buffer: sac_selfplay.ReplayBuffer, opponents: np.ndarray, *columns: np.ndarray) -> None:
        num_added[buffer] += len(opponents)
        add(buffer, opponents, *columns)

    monkeypatch.setattr(sac_selfplay.ReplayBuffer, "leave_out", spy)
    monkeypatch.setattr(sac_selfplay.ReplayBuffer, "add", count)
    train_selfplay(sac_selfplay, replay_opponents="window", window=2)
    assert rules == [(0, 128), (128, 256), (256, 384), (384, 512)]
    rules.clear()
    train_selfplay(sac_selfplay, env_id="pursuit", replay_opponents="window", window=1, team_change=256)
    assert rules == [(0, 128), (0, 256), (352, 0), (352, 128), (352, 256)]


def test_settings_of_the_optimisers(
    selfplay: ModuleType, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the single-agent scripts; the rates fall linearly to zero over the run, but for that of alpha."""
    made: list[tuple[float, ...]] = []

    class Spy(selfplay.Adam):  # type: ignore[name-defined]
        def __init__(self, parameters: Any, *settings: float) -> None:
            made.append(settings)
            super().__init__(parameters, *settings)

    monkeypatch.setattr(selfplay, "Adam", Spy)
    is_ppo = selfplay is ppo_selfplay
    rates = {"learning_rate": 4e-3} if is_ppo else {"policy_lr": 4e-3, "q_lr": 2e-3, "alpha_lr": 3e-3}
    folder = train_selfplay(selfplay, **rates)
    assert made == [(rate, 0.9, 0.999, 1e-5 if is_ppo else 1e-8) for rate in rates.values()]
    stride, between = (128, 128) if is_ppo else (8, 64)  # of an iteration, and between two points
    for name, rate in rates.items():
        falls = float(name != "alpha_lr")
        expected = [rate * (1 - falls * (step - stride) / 512) for step in range(between, 513, between)]
        assert series(folder, f"charts/{name}") == pytest.approx(expected, rel=1e-5)


# --- what is learned from ---


def test_rewards_of_agents_that_have_left_do_not_count(train_selfplay: Train) -> None:
    """They are in no transition, and not in the statistics of returns that scale all rewards."""
    weights = []
    for pays_all in (True, False):
        kwargs = json.dumps({"pays_all": pays_all})
        weights.append(all_weights(train_selfplay(ppo_selfplay, env_id="vector_game:Fallen", env_kwargs=kwargs)))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


class Witness:
    """Writes down what happens to each agent of the learner, by its seat, before the seats of the next games."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[list[dict[str, Any]]] = []  # of each step a row for each agent
        self.all_actions, self.cut_games = Matches.all_actions, Matches.cut_games
        monkeypatch.setattr(Matches, "all_actions", lambda *args: self.see_actions(*args))
        monkeypatch.setattr(Matches, "cut_games", lambda *args: self.see_result(*args))

    def see_actions(self, matches: Matches, env: TeamEnv, agents: Any, obs: Any, actions: np.ndarray) -> Any:
        """Before the step."""
        self.env, self.seats = env, list[tuple[int, int, int]]()
        for game, team in enumerate(matches.learner_team.tolist()):
            self.seats += [(team, game, k) for k in range(len(env.teams[team].agents))]
        masks, oldest = [legal_actions(env, t) for t in range(len(env.teams))], matches.opponent_steps()
        self.steps.append([])
        for (team, game, k), action in zip(self.seats, actions, strict=True):
            row = {"obs": obs[team][game, k], "masks": masks[team][game, k], "actions": action}
            row |= {"valid": env.alive[team][game, k], "opponents": oldest[game]}
            self.steps[-1].append({name: np.array(x) for name, x in row.items()})
        return self.all_actions(matches, env, agents, obs, actions)

    def final_masks(self) -> list[np.ndarray | None]:
        """Of the game, if it has them."""
        return getattr(self.env, "final_masks", [None] * len(self.env.teams))

    def see_result(self, matches: Matches, result: TeamStep) -> Any:
        """After the step. Legal actions of an agent that is idle are those of its game's last observation, or all."""
        cut_result, cut = self.cut_games(matches, result)
        masks = [legal_actions(self.env, t) for t in range(len(self.env.teams))]
        final_masks = [masks[t] | True if final is None else final for t, final in enumerate(self.final_masks())]
        for (team, game, k), row in zip(self.seats, self.steps[-1], strict=True):
            is_idle = result.over[game] or not self.env.alive[team][game, k]
            row |= {"rewards": result.rewards[team][game, k], "final_obs": np.array(result.final_obs[team][game, k])}
            row |= {"next_masks": np.array((final_masks if is_idle else masks)[team][game, k])}
            row |= {"terminations": result.terminations[team][game, k]}
            row |= {"dones": row["terminations"] | result.truncations[team][game, k] | cut[game]}
        return cut_result, cut


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("sumo", {"actions": "discrete"}),
        ("pettingzoo.classic.connect_four_v3", {}),
        ("toy_sides", {}),
        ("quitter", {}),
    ],
)
def test_what_is_learned_from_is_what_happened(
    selfplay: ModuleType,
    env_id: str,
    kwargs: dict[str, Any],
    train_selfplay: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the learner's own agents, though it changes sides: ends, cuts, masks, teams of two, agents that leave."""
    (tmp_path / "quitter.py").write_text(QUITTER)
    witness, rollouts, added = Witness(monkeypatch), list[Any](), list[tuple[np.ndarray, ...]]()
    monkeypatch.setattr(Sumo, "max_steps", 24)  # so the first games are cut at the steps 3, 6, ... 21
    if selfplay is ppo_selfplay:
        make_batch = ppo_selfplay.make_batch

        def spy(agent: Any, rollout: Any, *rest: Any) -> Any:
            rollouts.append(rollout)
            return make_batch(agent, rollout, *rest)

        monkeypatch.setattr(ppo_selfplay, "make_batch", spy)
    else:
        add = sac_selfplay.ReplayBuffer.add

        def spy_add(buffer: Any, *columns: np.ndarray) -> None:
            added.append(tuple(np.array(x) for x in columns))
            add(buffer, *columns)

        monkeypatch.setattr(sac_selfplay.ReplayBuffer, "add", spy_add)
    train_selfplay(selfplay, env_id=env_id, env_kwargs=json.dumps(kwargs), save_steps=32, team_change=64)
    assert len(witness.steps) == 64
    names: tuple[str, ...] = ("obs", "masks", "actions", "rewards", "final_obs", "terminations")
    for i, rollout in enumerate(rollouts):
        for t, rows in enumerate(witness.steps[16 * i : 16 * (i + 1)]):
            for name in (*names, "dones", "valid"):
                np.testing.assert_array_equal(getattr(rollout, name)[t], [row[name] for row in rows], err_msg=name)
    names = ("opponents", *names[:5], "next_masks", names[5])
    present = [rows for rows in witness.steps if any(row["valid"] for row in rows)]
    for columns, rows in zip(added, present if added else [], strict=True):
        for name, column in zip(names, columns, strict=True):
            np.testing.assert_array_equal(column, [row[name] for row in rows if row["valid"]], err_msg=name)
    assert len(rollouts) == 4 or len(added) == len(present)
    seen = [row for rows in witness.steps for row in rows]
    assert any(row["dones"] and not row["terminations"] for row in seen) == (env_id == "sumo")
    assert any(row["terminations"] for row in seen)
    assert all(row["valid"] for row in seen) == (env_id != "quitter")
    assert len({int(row["opponents"]) for row in seen}) > 1


def test_a_roles_own_discount(train_selfplay: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gamma and lambda are those of its advantages."""
    calls: list[tuple[Any, list[Any]]] = []
    make_batch, compute_gae = ppo_selfplay.make_batch, ppo_selfplay.compute_gae

    def spy_batch(agent: Any, rollout: Any, *rest: Any) -> Any:
        calls.append((rollout, []))
        return make_batch(agent, rollout, *rest)

    def spy_gae(*args: Any) -> torch.Tensor:
        calls[-1][1].extend(args[-2:])
        return compute_gae(*args)

    monkeypatch.setattr(ppo_selfplay, "make_batch", spy_batch)
    monkeypatch.setattr(ppo_selfplay, "compute_gae", spy_gae)
    behaviors = json.dumps({"evader": {"gamma": 0.5, "gae_lambda": 0.3}})
    flags = {"gamma": 0.9, "gae_lambda": 0.8, "behaviors": behaviors, "team_change": 512}
    train_selfplay(ppo_selfplay, env_id="pursuit", total_timesteps=1024, **flags)
    for rollout, found in calls:
        assert found == ([0.9, 0.8] if rollout.rewards.shape[1] == 16 else [0.5, 0.3])  # the pursuers are two
    assert len({rollout.rewards.shape[1] for rollout, _ in calls}) == 2


def test_minibatches_of_each_role(train_selfplay: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """--behaviors gives one of them smaller minibatches, twice as many a step, and a longer warm-up: of 128, not 64.

    The roles learn in 176 and 336 game steps.
    """
    sizes, update = Counter[int](), sac_selfplay.update

    def spy(agent: Any, optimizers: Any, batch: Any, *rest: Any) -> Any:
        sizes[len(batch[0])] += 1
        return update(agent, optimizers, batch, *rest)

    monkeypatch.setattr(sac_selfplay, "update", spy)
    behaviors = json.dumps({"evader": {"batch_size": 8, "updates_per_step": 0.25, "learning_starts": 128}})
    flags = {"learning_starts": 64, "updates_per_step": 0.125, "behaviors": behaviors, "team_change": 256}
    train_selfplay(sac_selfplay, env_id="pursuit", **flags)
    assert sizes == {32: 14, 8: 52}


def test_a_role_whose_learning_rate_stays(
    selfplay: ModuleType, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--behaviors takes --anneal-lr for each."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    update = selfplay.update

    def spy(agent: Any, optimizer: Any, batch: Any, args: Any, *rest: Any) -> Any:
        rates[args.anneal_lr].append((optimizer["q"] if isinstance(optimizer, dict) else optimizer).lr)
        return update(agent, optimizer, batch, args, *rest)

    monkeypatch.setattr(selfplay, "update", spy)
    behaviors = json.dumps({"evader": {"anneal_lr": False}})
    train_selfplay(selfplay, env_id="pursuit", total_timesteps=1024, anneal_lr=True, behaviors=behaviors)
    assert len(set(rates[False])) == 1
    assert len(set(rates[True])) > 2
    assert max(rates[True]) <= rates[False][0]


def test_noise_of_each_agent_and_step(
    selfplay: ModuleType, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard normal numbers, none of them twice."""
    act, seen = selfplay.Agent.act, list[torch.Tensor]()

    def spy(agent: Any, obs: np.ndarray, masks: np.ndarray, noise: Any = 0.0) -> np.ndarray:
        seen.append(torch.as_tensor(noise))
        return act(agent, obs, masks, noise)

    monkeypatch.setattr(selfplay.Agent, "act", spy)
    train_selfplay(selfplay)
    noise = torch.stack(seen)
    assert noise.shape == (64 if selfplay is ppo_selfplay else 60, 8, 2)
    assert len(noise.unique()) == noise.numel()
    assert scipy.stats.kstest(noise.flatten().numpy(), "norm").pvalue > 0.001


@pytest.mark.parametrize(("learning_starts", "rounds"), [(24, 1), (32, 2)])
def test_games_that_began_at_random_are_not_rated(
    learning_starts: int, rounds: int, train_selfplay: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight games of three steps: the random ones end with the first games, or in the midst of the second ones."""
    (tmp_path / "rewarded.py").write_text(REWARDED)
    monkeypatch.setattr("utils.matches.turn_ends", lambda *_: [10**9] * 2)
    finish, seen = Matches.finish, list[bool]()

    def spy(matches: Matches, game: int, scores: np.ndarray, rated: bool = True) -> None:
        seen.append(rated)
        finish(matches, game, scores, rated)

    monkeypatch.setattr(Matches, "finish", spy)
    train_selfplay(sac_selfplay, env_id="rewarded", learning_starts=learning_starts, total_timesteps=120)
    assert seen == [False] * 8 * rounds + [True] * 8 * (5 - rounds)


# --- learning ---


@pytest.mark.slow
def test_ppo_learns_sumo(train_selfplay: Train) -> None:
    """The defaults, for six hundred thousand steps: it hardly ever loses to the random player or to centre.

    Each of the seeds 1 to 6 scored 1.00 against both.
    """
    defaults = ppo_selfplay.Args()
    names = ("num_games", "num_steps", "num_minibatches", "update_epochs", "save_steps")
    flags = {name: getattr(defaults, name) for name in names}
    folder = train_selfplay(ppo_selfplay, **flags, total_timesteps=600_000, eval_games=100)
    for opponent in ("random", "centre"):
        (score,) = series(folder, f"eval/sumo_score_vs_{opponent}")
        assert score > 0.95


class MatrixGame:
    """Rock, paper, scissors, a step a game; rock breaking scissors counts `stake` times."""

    def __init__(self, num_games: int, stake: float) -> None:
        self.num_games = num_games
        self.payoff = np.array([[0.0, -1.0, stake], [1.0, 0.0, -1.0], [-stake, 1.0, 0.0]])
        self.teams = tuple(Team(name, "player", (name,), 1, 1, (3,)) for name in ("row", "column"))
        self.scripted_by_team = (("random",), ("random",))
        self.alive = [np.ones((num_games, 1), dtype=bool)] * 2
        self.action_masks: list[np.ndarray | None] = [None, None]
        self.obs = [np.ones((num_games, 1, 1), dtype=np.float32)] * 2

    def reset(self, seed: int) -> list[np.ndarray]:
        """The next games."""
        self.rng = np.random.default_rng(seed)
        return self.obs

    def step(self, actions: list[np.ndarray]) -> TeamStep:
        """Plays all games."""
        gain = self.payoff[actions[0][:, 0, 0], actions[1][:, 0, 0]]
        rewards = [(sign * gain)[:, None].astype(np.float32) for sign in (1, -1)]
        scores = np.stack([gain, -gain], axis=1)
        return TeamStep(self.obs, self.obs, rewards, self.alive, [~self.alive[0]] * 2, self.alive[0][:, 0], scores)

    def scripted_actions(self, name: str, team: int) -> np.ndarray:
        """Uniform."""
        return self.rng.integers(3, size=(self.num_games, 1, 1))

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "stake"), [(1, 1.0), (2, 1.0), (1, 2.0), (2, 2.0)])
def test_average_policy_is_the_equilibrium(
    seed: int, stake: float, train_selfplay: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A game that no fixed policy wins: policies chase each other, and their average over the pool comes to rest.

    At one third each, or for a stake of 2 at (1/4, 1/2, 1/4), where no policy starts: either makes all gains zero.
    """
    monkeypatch.setattr(team_env, "make_team_env", lambda env_id, num_games, *_: MatrixGame(num_games, stake))
    pool = {"play_against_latest_model_ratio": 0.5, "save_steps": 256, "window": 200, "total_timesteps": 120 * 256}
    plain = {"norm_obs": False, "norm_reward": False, "norm_adv": False, "anneal_lr": False}
    step = {
        "num_games": 64,
        "num_steps": 4,
        "num_minibatches": 1,
        "update_epochs": 2,
        "learning_rate": 3e-3,
        "ent_coef": 0.2,
    }
    folder = train_selfplay(ppo_selfplay, seed=seed, **pool, **plain, **step)
    agents, pools, _ = ppo_selfplay.load_run(folder, "--evaluate")
    policies = []
    for snapshot in pools["player"].snapshots:
        agents["player"].load_state_dict(dict(snapshot.weights), strict=False)
        policies.append(agents["player"](torch.ones(1, 1)).softmax(-1)[0].tolist())
    assert len(policies) > 100
    equilibrium = np.array([1.0, stake, 1.0]) / (2.0 + stake)
    assert np.abs(equilibrium @ MatrixGame(1, stake).payoff).max() < 1e-9
    assert np.abs(np.mean(policies, axis=0) - equilibrium).max() < 0.1
    assert np.std(policies, axis=0).min() > 0.05
