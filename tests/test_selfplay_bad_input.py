"""Bad arguments, games and files of the self-play scripts: a sentence that names the flag, exit status 2, no traceback.

Then games that go wrong while a run trains, and the warnings about turns and swaps that cannot be.
"""

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import faulty_game
import pytest
import torch
from conftest import Train

import sac_selfplay
from utils import run as run_module
from utils.run import parse_args, read_file

BOTH = [
    "--env-id no_such_game",
    "--env-id no.such.game",
    "--env-id ",
    "--env-id json",  # a module, and no game
    "--env-id mpe2.simple_spread_v3",  # one team
    "--env-id toy_envs",
    "--env-kwargs {",
    "--env-kwargs [1]",
    "--env-kwargs actions=box",
    "--teams red",
    "--teams []",
    "--symmetric maybe",
    "--learner-side middle",
    "--play-against-latest-model-ratio 1.1",
    "--play-against-latest-model-ratio -0.1",
    "--play-against-latest-model-ratio nan",
    "--opponent-sampling best",
    "--window 0",
    "--window 20000",
    "--save-steps 0",
    "--team-change 0",
    "--swap-steps -1",
    "--swaps-per-turn 0",
    "--swaps-per-turn nan",
    "--elo-k -1",
    "--elo-k nan",
    "--initial-elo inf",
    "--num-games 0",
    "--seed -1",
    "--seed one",
    "--total-timesteps 0",
    "--total-timesteps 1e6",
    "--eval-freq -1",
    "--eval-games 0",
    "--cross-play-games -1",
    "--cross-play-snapshots 0",
    "--gamma 1.01",
    "--gamma nan",
    "--no-such-flag 1",
    "--evaluate runs/none",
    "--against random",  # without --evaluate
    "--opponents",
]
PPO = [
    "--learning-rate -1e-3",
    "--learning-rate inf",
    "--num-steps 0",
    "--num-minibatches 0",
    "--num-minibatches 7",  # no divisor
    "--num-minibatches 512",  # a minibatch of one has no standard deviation
    "--update-epochs 0",
    "--gae-lambda 2",
    "--clip-coef -0.2",
    "--max-grad-norm -1",
    "--target-kl nan",
    "--log-std-init 9",
]
SAC = [
    "--q-lr -1",
    "--policy-lr nan",
    "--alpha-lr inf",
    "--buffer-size 4",  # a step of all games does not fit
    "--batch-size 0",
    "--learning-starts -1",
    "--updates-per-step -0.5",
    "--policy-frequency 0",
    "--tau 1.5",
    "--alpha 0",
    "--discrete-target-entropy-scale -1",
    "--target-entropy-scale nan",
    "--replay-opponents none",
    "--log-freq 0",
]
CASES = [(name, case) for name, cases in (("ppo_selfplay", BOTH + PPO), ("sac_selfplay", BOTH + SAC)) for case in cases]
TINY = {"--total-timesteps": "512", "--num-games": "8"}  # so that a value that slips through does not train for long
TINY_PPO = {"--num-steps": "64", "--num-minibatches": "2"}


def run(script: ModuleType, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Runs a command line that must fail, checks how, and returns what it wrote to standard error."""
    capsys.readouterr()
    before = os.listdir()
    with pytest.raises(SystemExit) as exit_info:
        script.main(parse_args(script.Args, words))
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert os.listdir() == before
    if captured.err.startswith(
        "error: "
    ):  # ours; the others are tyro's, which names the flag and the type that it takes
        assert captured.err.count("\n") == 1
        assert captured.out == ""
    return captured.err


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with nothing in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_buffer_smaller_than_a_step(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two pursuers in each of eight games are sixteen transitions."""
    words = ["--env-id", "pursuit", "--num-games", "8", "--buffer-size", "15"]
    assert "--buffer-size takes at least a step of a team in all games, 16" in run(sac_selfplay, capsys, *words)


def test_one_purpose_of_an_evaluation(selfplay: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A best response is trained against the run, and against nobody else."""
    args = selfplay.Args(evaluate=Path("runs/a"), against="charge", exploitability=1000)
    with pytest.raises(SystemExit) as exit_info:
        selfplay.main(args)
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "error: --against and --exploitability exclude each other: give one of the two\n"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), CASES)
def test_bad_flag(name: str, case: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone beside good ones."""
    flag, *value = case.split(" ")
    good = TINY | (TINY_PPO if name == "ppo_selfplay" else {})
    words = [word for other, number in good.items() if other != flag for word in (other, number)]
    assert flag in run(__import__(name), capsys, *words, flag, *value)
    assert os.listdir() == []


GAMES = [
    (
        ["--env-id", "sumo", "--env-kwargs", '{"actions": "hexagonal"}'],
        "actions must be one of box, discrete, multidiscrete",
    ),
    (["--env-id", "sumo", "--env-kwargs", '{"nonsense": 1}'], "nonsense"),
    (["--env-id", "sumo", "--teams", '{"red": ["left_0"], "blue": ["right_0"]}'], "--teams"),
    (["--env-id", "pursuit", "--env-kwargs", '{"actions": "discrete"}'], "actions"),
    (["--env-id", "pursuit", "--symmetric", "yes"], "--symmetric no"),
    (["--env-id", "mpe2.simple_push_v3", "--symmetric", "yes"], "--symmetric no"),
    (["--env-id", "mpe2.simple_push_v3", "--env-kwargs", '{"colour": "red"}'], "colour"),
    (["--env-id", "mpe2.simple_push_v3", "--teams", '{"red": ["agent_0"], "blue": ["agent_1"]}'], "--teams"),
    (["--env-id", "mpe2.simple_push_v3", "--teams", '{"red": ["agent_0", "adversary_0"]}'], "--teams"),
    (["--env-id", "mpe2.simple_push_v3", "--teams", '{"red": ["agent_0", "adversary_0"], "blue": []}'], "--teams"),
    (["--env-id", "mpe2.simple_push_v3", "--teams", '{"red": 1, "blue": 2}'], "--teams"),
    (["--env-id", "mpe2.simple_push_v3", "--teams", '{"red": ["agent_0"], "blue": [1]}'], "--teams"),
    (["--env-id", "mpe2.simple_push_v3", "--learner-side", "left"], "--learner-side takes one of adversary, agent"),
    (["--env-id", "pursuit", "--learner-side", "evader"], "--learner-side takes a team that shares its policy"),
    (["--symmetric", "no", "--learner-side", "left"], "--learner-side takes a team that shares its policy"),
    (["--env-id", "pettingzoo.utils.env:ParallelEnv"], "is a PettingZoo class: give its module alone"),
    (["--env-id", "broken"], "--env-id broken"),
    (["--env-id", "raises"], "ZeroDivisionError"),
    (["--swap-steps", "10", "--swaps-per-turn", "2"], "give one of the two"),
]


@pytest.mark.parametrize(("words", "named"), GAMES, ids=lambda x: " ".join(x[-2:]) if isinstance(x, list) else None)
def test_bad_games_and_combinations(
    selfplay: ModuleType, words: list[str], named: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the game itself, or the teams that were asked for, make impossible."""
    (empty_folder / "broken.py").write_text("def parallel_env(:\n")
    (empty_folder / "raises.py").write_text("def parallel_env(**kwargs):\n    return 1 / 0\n")
    stderr = run(selfplay, capsys, *words)
    assert stderr.startswith("error: --")
    assert named in stderr


def test_the_sentence_says_what_the_flag_takes(
    selfplay: ModuleType, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what it was given."""
    expected = "error: --play-against-latest-model-ratio takes a number from 0 to 1, not 7.0\n"
    assert run(selfplay, capsys, "--play-against-latest-model-ratio", "7") == expected


@pytest.mark.parametrize("package", ["wandb", "moviepy"])
def test_missing_optional_package(
    selfplay: ModuleType,
    package: str,
    empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Named, with the command that installs it."""
    monkeypatch.setattr(run_module, "find_spec", lambda name: None if name == package else object())
    flag = {"wandb": "--track", "moviepy": "--capture-video"}[package]
    assert run(selfplay, capsys, flag) == f"error: {flag} needs the package {package}: pip install {package}\n"


def test_pictures_that_a_game_does_not_make(
    selfplay: ModuleType, train_selfplay: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before the training, and by --evaluate, too."""
    (tmp_path / "blind.py").write_text("import toy_games\ndef parallel_env():\n    return toy_games.parallel_env()\n")
    words = ["--env-id", "blind", "--capture-video", "--no-compile", "--total-timesteps", "128"]
    assert "--env-id blind" in run(selfplay, capsys, *words)
    assert not (tmp_path / "runs").exists()
    folder = train_selfplay(selfplay, env_id="blind", total_timesteps=128)
    assert "--env-id blind" in run(selfplay, capsys, "--evaluate", str(folder), "--capture-video")


# --- saved runs ---


class Bomb:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


MODELS = ["missing", "empty", "truncated", "garbage", "pickle", "torch pickle", "list", "no pool", "snapshots"]


def refuse_folder(
    script: ModuleType, capsys: pytest.CaptureFixture[str], flag: str, folder: Path, good: Path, file: str
) -> None:
    """--evaluate or --against refuses the folder for this file of it."""
    words = ["--evaluate", str(folder if flag == "evaluate" else good)]
    stderr = run(script, capsys, *words, *(["--against", str(folder)] if flag == "against" else []))
    assert re.match(rf"error: --{flag} takes a run folder with (a valid|the) {file} of this script, and", stderr)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("damage", MODELS)
def test_damaged_model(
    selfplay: ModuleType,
    damage: str,
    saved_runs: dict[str, Path],
    empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever is wrong with model.pt, the sentence names the flag that it came by, and no code runs from it."""
    good, folder = saved_runs[selfplay.__name__], empty_folder / "damaged"
    shutil.copytree(good, folder)
    path, whole = folder / "model.pt", (good / "model.pt").read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage in ("empty", "truncated", "garbage"):
        path.write_bytes({"empty": b"", "truncated": whole[: len(whole) // 2], "garbage": b"not a model" * 99}[damage])
    elif damage == "pickle":
        path.write_bytes(pickle.dumps(Bomb()))
    elif damage == "torch pickle":
        torch.save({"args": Bomb()}, path)
    else:
        model: Any = torch.load(path, weights_only=True)
        if damage == "list":
            model = [1, 2, 3]
        elif damage == "no pool":
            del model["sumo_pool"]
        else:
            del model["sumo_pool"][0]["rating"]
        torch.save(model, path)
    for flag in ("evaluate", "against"):
        refuse_folder(selfplay, capsys, flag, folder, good, "model.pt")
    assert os.listdir() == ["damaged"]


ARGUMENTS: dict[str, Any] = {
    "foreign": {"of_another_script": 1},
    "text for a number": {"num_games": "two"},
    "null for a number": {"gamma": None},
    "a list": [1, 2],
    "no JSON": "{",
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", [*ARGUMENTS, "missing", "other shapes", "out of limits"])
def test_damaged_arguments(
    selfplay: ModuleType,
    damage: str,
    saved_runs: dict[str, Path],
    empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same for args.json; networks of another size than the arguments say are a fault of model.pt."""
    good, folder = saved_runs[selfplay.__name__], empty_folder / "damaged"
    shutil.copytree(good, folder)
    path = folder / "args.json"
    args = json.loads(path.read_text())
    if damage == "missing":
        path.unlink()
    elif damage == "no JSON":
        path.write_text(ARGUMENTS[damage])
    else:
        changes = {"other shapes": {"env_kwargs": '{"actions": "discrete"}'}, "out of limits": {"window": 0}}
        change = (ARGUMENTS | changes)[damage]
        path.write_text(json.dumps(args | change if isinstance(change, dict) else change))
    if damage == "other shapes":
        refuse_folder(selfplay, capsys, "evaluate", folder, good, "model.pt")
    elif damage == "out of limits":
        assert "--window takes a number from 1" in run(selfplay, capsys, "--evaluate", str(folder))
        refuse_folder(selfplay, capsys, "against", folder, good, "args.json")
    else:
        for flag in ("evaluate", "against"):
            refuse_folder(selfplay, capsys, flag, folder, good, "args.json")


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A short run of each script."""
    folders = {}
    for name in ("ppo_selfplay", "sac_selfplay"):
        script, folder = __import__(name), tmp_path_factory.mktemp(name)
        words = [word for pair in (TINY | (TINY_PPO if name == "ppo_selfplay" else {})).items() for word in pair]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            flags = "--eval-freq 0 --eval-games 2 --cross-play-games 0 --no-cuda --save-steps 128"
            script.main(parse_args(script.Args, words + flags.split()))
        (folders[name],) = (folder / "runs").iterdir()
    return folders


def test_unknown_opponents(
    selfplay: ModuleType, train_selfplay: Train, saved_runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that no scripted player has, and a run of another game."""
    ours = str(saved_runs[selfplay.__name__])
    stderr = run(selfplay, capsys, "--evaluate", ours, "--against", "godzilla")
    assert stderr == "error: --against takes a run folder or one of random, charge, centre, and godzilla is neither\n"
    other = train_selfplay(selfplay, env_id="pursuit", total_timesteps=128)
    stderr = run(selfplay, capsys, "--evaluate", ours, "--against", str(other))
    other_game = "--env-id is sumo in this run and pursuit in the other"
    assert stderr == f"error: --against takes a run of the same game, and {other_game}\n"
    discrete = train_selfplay(selfplay, env_kwargs='{"actions": "discrete"}', total_timesteps=128)
    assert "--env-kwargs is {} in this run" in run(selfplay, capsys, "--evaluate", ours, "--against", str(discrete))


# --- games that go wrong while a run trains ---

FAULTS = {  # the 21st step of game 3 of 8, or the reset in its 20th
    "step": "--env-id faulty_game failed after step {}: environment 3 in step: ZeroDivisionError: out of order",
    "reset": "--env-id faulty_game failed after step {}: environment 3 in reset: ZeroDivisionError: out of order",
    "observation": "observation is not a finite number at step 168",
    "opponent's observation": "observation is not a finite number at step 168",
    "huge observation": "observation is not a finite number at step 168",
    "reward": "reward is not a finite number at step 168",
    "opponent's reward": "reward is not a finite number at step 168",
    "huge reward": "reward is not a finite number at step 168",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_game_that_goes_wrong(
    selfplay: ModuleType,
    fault: str,
    train_selfplay: Train,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit status 1 and a sentence; a game that raises costs nothing that was learned, and a bad number is not kept."""
    for name, value in {"made": -1, "victim": 3, "fault": fault}.items():  # copy 0 is made to look at the spaces
        monkeypatch.setattr(faulty_game, name, value)
    monkeypatch.setattr(faulty_game, "made", 0)
    with pytest.raises(SystemExit) as exit_info:
        train_selfplay(selfplay, env_id="faulty_game", learner_side="player_0", checkpoint_freq=0)
    assert exit_info.value.code == 1
    stderr, (folder,) = capsys.readouterr().err, Path("runs").iterdir()
    raises = fault in ("step", "reset")
    step = 0 if not raises else 128 if selfplay.__name__ == "ppo_selfplay" else 160 if fault == "step" else 152
    assert stderr.splitlines()[-1] == "error: " + FAULTS[fault].format(step)
    assert ("Traceback" in stderr) == raises
    assert read_file(folder / "checkpoint.pt")["global_step"] == step
    assert (folder / "model.pt").exists() == raises
    if raises:
        monkeypatch.setattr(faulty_game, "fault", "")
        selfplay.main(parse_args(selfplay.Args, ["--resume", str(folder)]))
        assert read_file(folder / "checkpoint.pt")["global_step"] == 512


# --- warnings ---


@pytest.mark.slow
def test_warning_of_swaps_within_a_game(
    selfplay: ModuleType, train_selfplay: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said once, with the numbers: eight opponents that each play a game of some steps."""
    train_selfplay(selfplay, swap_steps=9, total_timesteps=2048)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "warning: --swap-steps 9 is less than the opponents' steps in one game (8 agents of opponents,"
    )
    train_selfplay(selfplay, swap_steps=10_000, total_timesteps=2048)
    train_selfplay(selfplay, total_timesteps=2048)
    assert capsys.readouterr().err == ""
