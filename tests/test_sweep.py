"""Sweeps of a toy script that counts: no run is lost, run twice or fails in silence, whatever breaks or is killed."""

import fcntl
import hashlib
import itertools
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import Train

import utils.run
from benchmark import provenance, sweep

ROOT = Path(__file__).parent.parent
SCRIPT = Path(__file__).parent / "toy_script.py"
Sweep = Callable[..., "Result"]


@dataclass
class Result:
    """What a sweep that has ended leaves to its caller."""

    status: int
    output: str
    error: str


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an empty folder, whose `bin` comes first on the PATH, and of a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    add_command("nvidia-smi", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def words_of(words: Sequence[str]) -> list[str]:
    """Of a sweep in the folder `sweep`, with the toy script, one task and one seed if they do not say otherwise."""
    return ["--script", str(SCRIPT), "--env-ids", "Toy-v0", "--num-seeds", "1", "--folder", "sweep", *words]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Iterator[Sweep]:
    """Runs a sweep to its end, in this process."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def run_to_end(*words: str) -> Result:
        try:
            status = sweep.main(words_of(words))
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        return Result(status, *capfd.readouterr())

    yield run_to_end
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def begin(*words: str, **options: Any) -> subprocess.Popen[str]:
    """Starts a sweep in a process of its own."""
    return subprocess.Popen([sys.executable, "-m", "benchmark.sweep", *words_of(words)], text=True, **options)


def job_of(folder: Path, env_id: str = "Toy-v0") -> sweep.Job:
    """The first run of such a sweep."""
    return sweep.make_jobs(sweep.Args([SCRIPT], [env_id], num_seeds=1, folder=folder), [])[0]


def add_command(name: str, text: str) -> None:
    """Puts a shell script on the user's PATH."""
    Path("bin", name).write_text(f"#!/bin/sh\n{text}\n")
    Path("bin", name).chmod(0o755)


def runs() -> list[str]:
    """Names of run folders without their timestamps."""
    return sorted(path.name.rpartition("__")[0] for path in Path("sweep/runs").glob("*"))


def facts() -> list[dict[str, Any]]:
    """Facts of each finished run."""
    return [json.loads(path.read_text()) for path in Path("sweep/runs").glob("*/facts.json")]


def steps(name: str) -> list[int]:
    """Steps that a job's runs have made, in order."""
    return [int(word) for path in Path("sweep/runs").glob(f"{name}__*/steps") for word in path.read_text().split()]


def records(name: str) -> list[dict[str, Any]]:
    """A job's journal, without what was cut off."""
    lines = [line for path in Path("sweep/jobs").glob(f"{name}.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(condition: Callable[[], object]) -> None:
    """Until it holds; a minute at most."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_run_once(run: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts x tasks x seeds, at most --workers together, with equal shares of cores; again, only new ones."""
    other = shutil.copy(SCRIPT, "other.py")
    words = (
        "--script",
        str(SCRIPT),
        other,
        "--env-ids",
        "Toy-v0",
        "module:Toy-v0",
        "--first-seed",
        "3",
        "--workers",
        "2",
    )
    extra = ("--", "--note", "two words; $HOME -- 'quoted'")
    result = run(*words, *extra)
    assert (result.status, result.error) == (0, "")
    names = sorted(f"{task}__{script}__3" for task in ("Toy-v0", "module-Toy-v0") for script in ("toy_script", "other"))
    assert runs() == names
    all_args = [json.loads(path.read_text()) for path in Path("sweep/runs").glob("*/args.json")]
    assert {args["note"] for args in all_args} == {extra[2]}
    assert sorted(args["env_id"] for args in all_args) == ["Toy-v0", "Toy-v0", "module:Toy-v0", "module:Toy-v0"]
    assert {fact["threads"] for fact in facts()} == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    assert [line.split(":")[0] for line in result.output.splitlines()[1:4]] == ["starting", "starting", "finished"]
    assert max(sum(b["start"] <= a["start"] < b["end"] for b in facts()) for a in facts()) <= 2

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    more = ("--num-seeds", "2", "--first-seed", "3", *extra)
    assert run(*more).status == 0
    assert runs() == sorted([*names, "Toy-v0__toy_script__4"])
    assert sum(fact["threads"] == "7" for fact in facts()) == 1
    assert run(*more).output.endswith(": 2 finished\n2 finished\n")
    assert len(runs()) == 5


def test_manifest(run: Sweep) -> None:
    """An entry for each start, with the commit of the script and whether it was changed since."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=b", "-C", "scripts"]
    script = Path("scripts/a.py")
    script.parent.mkdir()
    shutil.copy(SCRIPT, script)
    for arguments in (["init", "-q"], ["add", "a.py"], ["commit", "-q", "-m", "c"]):
        subprocess.run([*git, *arguments], check=True)
    words = ("--script", str(script), "--exp-name", "toy", "--", "--note", "x")
    run(*words)
    script.write_text(script.read_text() + "# changed\n")
    run(*words)
    Path("scripts/notes.txt").touch()  # no part of the repository
    subprocess.run([*git, "checkout", "-q", "a.py"], check=True)
    run(*words)
    first, second, third = json.loads(Path("sweep/manifest.json").read_text())
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert (first["commit"], first["dirty"], second["commit"], second["dirty"]) == (head, False, head, True)
    assert (third["commit"], third["dirty"]) == (head, False)
    flags = ["--env-id", "Toy-v0", "--exp-name", "toy", "--seed", "1", "--note", "x"]
    assert runs() == ["Toy-v0__toy__1"]
    assert [shlex.split(line) for line in first["runs"]] == [[sys.executable, str(script.resolve()), *flags]]
    assert first["versions"]["pytest"] == pytest.__version__
    assert first["machine"]["cores"] == os.cpu_count()
    assert first["machine"]["processor"]
    assert first["machine"]["memory_gib"] > 0
    Path("scripts/b.py").write_text(script.read_text())  # is not what the commit has
    run("--script", "scripts/b.py", "--exp-name", "other", "--folder", "new")
    (entry,) = json.loads(Path("new/manifest.json").read_text())
    assert (entry["commit"], entry["dirty"]) == (None, None)


def test_sources(tmp_path: Path) -> None:
    """A script's own modules count, also those that modules import, and from a folder below; nothing else does.

    Modules of the same names in the folder above are not the script's.
    """
    project = tmp_path / "project"
    for folder in (tmp_path / "utils", project / "utils", project / "variants"):
        folder.mkdir(parents=True)
    (tmp_path / "utils/pool.py").write_text("")
    texts = {
        "a.py": "import json\nfrom utils.pool import draw\nif True:\n    from utils import run\n",
        "variants/b.py": "import utils.pool as pool, no_such_module\n",
        "utils/pool.py": "from utils.elo import update\n",
        "utils/elo.py": "import numpy\n",
        "utils/run.py": "",
        "utils/unused.py": "",
    }
    for name, text in texts.items():
        (project / name).write_text(text)

    def names(script: str) -> list[str]:
        return [str(path.relative_to(project)) for path in provenance.sources_of(project / script)]

    assert names("a.py") == ["a.py", "utils/elo.py", "utils/pool.py", "utils/run.py"]
    assert names("variants/b.py") == ["variants/b.py", "utils/elo.py", "utils/pool.py"]
    before = provenance.hash_of(project / "a.py")
    (project / "utils/unused.py").write_text("# changed\n")
    assert provenance.hash_of(project / "a.py") == before
    (project / "utils/elo.py").write_text("# changed\n")
    assert provenance.hash_of(project / "a.py") != before
    (project / "own").mkdir()
    (project / "own/__init__.py").write_text("from .env import Env\n")
    (project / "own/env.py").write_text("from . import parts\nfrom ..utils.unused import x\n")
    (project / "own/parts.py").write_text("")
    own = ["own/__init__.py", "own/env.py", "own/parts.py", "utils/unused.py"]
    found = [str(path.relative_to(project)) for path in provenance.sources_of(project / "utils/run.py", "own:Own-v0")]
    assert found[1:] == own
    for name in ("game.py", "games/__init__.py", "games/one.py"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("")
    modules = provenance.sources_of(project / "variants/b.py", "games.one:Toy-v0")[1:3]
    assert modules == [project / "games/__init__.py", project / "games/one.py"]
    assert provenance.sources_of(project / "a.py", "game")[1] == project / "game.py"
    assert provenance.sources_of(project / "a.py", "Toy-v0") == provenance.sources_of(project / "a.py")
    assert provenance.hash_of(project / "a.py", "game:Toy") == provenance.hash_of(project / "a.py")  # an empty file
    (project / "game.py").write_text("# changed\n")
    assert provenance.hash_of(project / "a.py", "game:Toy") != provenance.hash_of(project / "a.py")
    (project / "a.py").write_text("def")
    assert provenance.hash_of(project / "a.py") == hashlib.sha256(b"def").hexdigest()


def test_sources_of_a_game() -> None:
    """All modules of the project that a self-play script has loaded when it has made a game are its sources."""
    code = f"""
import sys
import ppo_selfplay
ppo_selfplay.make_env(ppo_selfplay.Args(env_id="sumo"), 1)
files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
print(*(file for file in files if file.startswith({str(ROOT)!r})), sep="\\n")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {Path(line) for line in result.stdout.splitlines()}
    assert ROOT / "utils/games.py" in loaded
    assert loaded <= set(provenance.sources_of(ROOT / "ppo_selfplay.py", "sumo"))


def test_another_version_of_the_script_is_named(run: Sweep) -> None:
    """Each start's journal has the hash; finished runs are kept, and the reader is told."""
    script = Path(shutil.copy(SCRIPT, "a.py"))
    words = ("--script", str(script), "--exp-name", "toy", "--num-seeds")
    assert "warning" not in run(*words, "2").output + run(*words, "2").output
    first = hashlib.sha256(script.read_bytes()).hexdigest()
    script.write_text(script.read_text() + "# changed\n")
    second = hashlib.sha256(script.read_bytes()).hexdigest()
    names = [f"Toy-v0__toy__{seed}" for seed in (1, 2, 3)]
    warning = "warning: 2 of them are the work of another version of the script: "
    assert f"\n{warning}{names[0]}, {names[1]}\n" in run(*words, "3").output
    assert [{record["sha256"] for record in records(name)} for name in names] == [{first}, {first}, {second}]
    assert [records(names[0])[0][key] for key in ("commit", "dirty")] == [None, None]  # the folder is no repository


def test_success_without_a_run_is_a_failure(run: Sweep) -> None:
    """Such as that of --help."""
    result = run("--", "--help")
    assert result.status == 1
    assert "ended without a run folder runs/Toy-v0__toy_script__1__*" in result.output
    assert run("--", "--help").status == 1
    assert run("--", "--total-timesteps", "1").status == 0  # other flags may follow: nothing was trained


@pytest.mark.slow
def test_what_a_script_says_is_passed_on(run: Sweep) -> None:
    """A warning, once for all runs; and how a run died, whose log is empty."""
    text = "import os, runpy\nprint('warning: too few steps', flush=True)\n"
    Path("toy.py").write_text(f"{text}runpy.run_path({str(SCRIPT)!r})\n")
    result = run("--script", "toy.py", "--num-seeds", "2")
    assert result.output.count("toy__1 says: warning: too few steps\n") == 1
    assert result.output.count("too few steps") == 1
    Path("dies.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    result = run("--script", "dies.py")
    assert "exit status 137 (killed by signal 9); " in result.output
    assert "ends with:\n    nothing: is the disk full?\nto go on with it: cd " in result.output


@pytest.mark.slow
def test_a_failed_run_is_reported_and_tried_again(run: Sweep) -> None:
    """The others go on, the command that is printed fails in the same way, and the next sweep runs this one alone."""
    Path("broken").touch()
    words = ("--num-seeds", "3", "--", "--breaks", str(Path("broken").resolve()))
    result = run(*words)
    assert result.status == 1
    assert [records(f"Toy-v0__toy_script__{seed}")[-1]["exit"] for seed in (1, 2, 3)] == [0, 1, 0]
    assert "failed: Toy-v0__toy_script__2" in result.output.splitlines()[-2]
    assert "    step 1 of 2, 1,000 steps/s, return 0.5\n    ValueError: the task broke\n" in result.output
    (repeat,) = re.findall("to go on with it: (.*)", result.output)
    repeated = subprocess.run(repeat, shell=True, capture_output=True, text=True)
    assert (repeated.returncode, repeated.stderr) == (1, "ValueError: the task broke\n")

    Path("broken").unlink()
    assert run(*words).status == 0
    assert [len(records(f"Toy-v0__toy_script__{seed}")) for seed in (1, 2, 3)] == [2, 4, 2]


def test_a_process_that_cannot_be_started(run: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is a failed run like others: that of the job, and that of the script."""
    result = run("--", "--note", "x" * 200_000)
    assert result.status == 1
    assert "Argument list too long" in result.output
    assert result.output.count("failed: Toy-v0__toy_script__1") == 2

    job = job_of(Path("sweep"))
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert sweep.run_job(job) == 126
    assert records(job.name)[-1]["exit"] == 126
    assert "No such file or directory: '/no/python'" in job.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["sweep", "sweep and jobs", "all"])
def test_killed(killed: str, run: Sweep) -> None:
    """After a SIGKILL of any of the processes the next sweep finishes every run, with none at work twice."""
    words = ("--num-seeds", "2", "--workers", "2", "--", "--total-timesteps", "40")
    with begin(*words, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: len(list(Path("sweep/runs").glob("*/checkpoint.pt"))) == 2)
        jobs = children(process.pid)
        scripts = [pid for job in jobs for pid in children(job)]
        assert (len(jobs), len(scripts)) == (2, 2)
        for pid in [process.pid, *(jobs if killed != "sweep" else []), *(scripts if killed == "all" else [])]:
            os.kill(pid, signal.SIGKILL)
    assert run(*words).status == 0
    assert not Path("sweep/TWICE").exists()
    assert runs() == ["Toy-v0__toy_script__1", "Toy-v0__toy_script__2"]
    for name in runs():
        made = steps(name)
        assert sorted(set(made)) == list(range(1, 41))
        assert len(made) <= (40 if killed != "all" else 42)  # at most two steps since the last checkpoint
        assert len(records(name)) == (2 if killed == "sweep" else 3)


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_stopped(run: Sweep) -> None:
    """Runs write their checkpoints, nothing new is started, and the same command goes on without the loss of a step."""
    words = ("--num-seeds", "2", "--", "--total-timesteps", "60")
    name = "Toy-v0__toy_script__1"
    for signum in (signal.SIGINT, signal.SIGTERM):
        made = len(steps(name))
        with begin(*words, stdout=subprocess.PIPE, start_new_session=True) as process:
            wait_for(lambda: len(steps(name)) > made)  # noqa: B023 - called before the loop goes on
            os.killpg(process.pid, signum)  # as a terminal does
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + signum
        assert output.endswith("1 stopped, 1 waiting\nthe same command goes on from here\n")
        assert records(name)[-1]["exit"] == 143
        assert runs() == [name]
        assert made < len(steps(name)) < 60
    assert run("--num-seeds", "1", *words[2:]).status == 0
    assert steps(name) == list(range(1, 61))
    assert "--resume" in records(name)[-1]["command"]


def test_two_sigterms_at_once_are_one_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm sends one to a sweep and one to its runs. A later one, and every Ctrl-C, counts."""
    signals = sweep.catch_signals()
    for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        os.kill(os.getpid(), signum)
    assert signals == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3.0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals[3:] == [signal.SIGTERM]


def test_a_second_sweep_is_refused_and_a_second_signal_kills(run: Sweep) -> None:
    """A sweep in the same folder at the same time; a run that does not heed the first signal, after which none is
    started.
    """
    words = ("--num-seeds", "3", "--workers", "2", "--", "--stubborn", "1", "--total-timesteps", "500")
    with begin(*words, stdout=subprocess.PIPE) as process:
        wait_for(lambda: steps("Toy-v0__toy_script__1") and steps("Toy-v0__toy_script__2"))
        result = run(*words)
        assert (result.status, result.error[:15]) == (2, "error: --folder")
        assert run("--dry-run", *words).output.startswith("0 running: ")
        process.send_signal(signal.SIGINT)
        wait_for(lambda: len(records("Toy-v0__toy_script__2")) == 2)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.count("starting: "), output.count("stopped: ")) == (130, 2, 2)
    assert [records(f"Toy-v0__toy_script__{seed}")[-1]["exit"] for seed in (1, 2)] == [137, 143]
    with Path("sweep/Toy-v0__toy_script__1.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
@pytest.mark.parametrize("kills_owner", [False, True])
def test_a_run_that_outlives_its_sweep_is_waited_for_and_not_said_to_be_stopped(kills_owner: bool, run: Sweep) -> None:
    """After a SIGKILL of the sweep the next one only waits. Ctrl-C ends it alone."""
    words = ("--", "--total-timesteps", "60")
    name = "Toy-v0__toy_script__1"
    with begin(*words, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: steps(name))
        owners = children(process.pid) if kills_owner else []
        process.kill()
    for pid in owners:
        os.kill(pid, signal.SIGKILL)
    with begin(*words, stdout=subprocess.PIPE) as process:
        wait_for(lambda: children(process.pid))
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"\nnot stopped: {name} is of an earlier sweep; `fuser {job_of(Path('sweep')).journal}` names" in output
    assert output.endswith("\n1 running\nthe same command goes on from here\n")
    assert run(*words).status == 0
    assert steps(name) == list(range(1, 61))


def test_a_refused_checkpoint_is_given_up(run: Sweep) -> None:
    """What the script does not go on from is reported, and the sweep after that begins anew; so it does if a result is
    gone.
    """
    assert run().status == 0
    (folder,) = Path("sweep/runs").glob("*")
    journal = job_of(Path("sweep")).journal
    journal.write_text(journal.read_text()[:-5])
    (folder / "checkpoint.pt").rename(folder / "checkpoint.previous.pt")
    assert sweep.next_command(job_of(Path("sweep")))[2:] == ["--resume", str(folder.relative_to("sweep"))]
    (folder / "checkpoint.pt").write_text("half")
    result = run()
    assert result.status == 1
    assert "error: --resume takes a run folder with a valid checkpoint" in result.output
    assert run().status == 0
    assert runs() == ["Toy-v0__toy_script__1"] * 2
    shutil.rmtree(Path("sweep", records("Toy-v0__toy_script__1")[-1]["run"]))
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (folder / name).unlink()
    assert sweep.next_command(job_of(Path("sweep"))) == job_of(Path("sweep")).command


def test_a_refusal_that_passes_gives_up_nothing(run: Sweep) -> None:
    """Only a checkpoint that cannot be read is left behind; without a network, say, it serves the next time."""
    assert run().status == 0
    job = job_of(Path("sweep"))
    resume = [*sweep.next_command(job), "toy.py", "--resume", records(job.name)[-1]["run"]]
    job.journal.write_text(json.dumps({"command": resume, "exit": 2, "run": ""}) + "\n")
    refusals = {"--track takes a W&B account": "--resume", "--resume takes a run folder with the args.json": "--seed"}
    for refusal, word in refusals.items():
        job.log.write_text(f"$ python toy.py\nerror: {refusal}: more\n")
        assert word in sweep.next_command(job)


def test_names_that_would_share_a_journal_are_refused(run: Sweep) -> None:
    """Another task is not taken for one that has finished. What a loss of power wrote into a journal is left out."""
    assert run("--env-ids", "a:B-v0").status == 0
    result = run("--env-ids", "a/B-v0")
    assert (result.status, result.output) == (2, "")
    assert re.fullmatch("error: --env-ids takes names whose files differ: a/B-v0 .* a:B-v0 of .*\n", result.error)
    with job_of(Path("sweep"), "a:B-v0").journal.open("ab") as file:
        file.write(b"\xff\xfe\n")
    assert run("--env-ids", "a:B-v0").output.endswith("\n1 finished\n")


def test_the_newest_run_counts(tmp_path: Path) -> None:
    """Numbers are compared as numbers, and seed 1 is not seed 11 or another experiment's."""
    for name in ("1__999", "1__1000-10", "1__1000-9", "1__1000", "11__2000", "1__2000__1__3000", "1__x"):
        (tmp_path / f"runs/a-B-v0__toy_script__{name}").mkdir(parents=True)
    found = [run.name.removeprefix("a-B-v0__toy_script__") for run in sweep.find_runs(job_of(tmp_path, "a:B-v0"))]
    assert found == ["1__999", "1__1000", "1__1000-9", "1__1000-10"]


def test_the_scripts_folders_are_found(script: ModuleType, tmp_path: Path) -> None:
    """As they name them."""
    args = sweep.Args([Path(script.__file__ or "")], ["gymnasium:A b/C-v0"], num_seeds=1, folder=tmp_path)
    (job,) = sweep.make_jobs(args, [])
    for count in (1, 2):
        utils.run.make_run_folder(script.Args(env_id=job.env_id, exp_name=job.exp_name, seed=job.seed))
        assert len(sweep.find_runs(job)) == count


def test_a_changed_command_is_refused(run: Sweep) -> None:
    """Other flags or another script under the same name, but not under another name."""
    assert run("--", "--note", "x").status == 0
    other = shutil.copy(SCRIPT, "toy_script.py")
    for words in (("--", "--note", "y"), ("--",), ("--env-ids", "New-v0"), ("--script", other, "--", "--note", "x")):
        result = run(*words)
        assert (result.status, result.output) == (2, "")
        assert re.fullmatch("error: --folder .*--note x.*\n", result.error)
    assert run("--exp-name", "new", "--dry-run", "--", "--note", "y").output.startswith("0 new: ")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--script", ("--script", "none.py")),
        ("--script", ("--script",)),
        ("--env-ids", ("--env-ids",)),
        ("--env-ids", ("--env-ids", "a:B-v0", "a/B-v0")),
        ("--exp-name", ("--script", str(SCRIPT), str(ROOT / "ppo_continuous.py"), "--exp-name", "both")),
        ("--num-seeds", ("--num-seeds", "0")),
        ("--num-seeds", ("--num-seeds", "two")),
        ("--first-seed", ("--first-seed", "-1")),
        ("--workers", ("--workers", "0")),
        ("--workers-per-gpu", ("--workers-per-gpu", "0")),
        ("--workers-per-gpu", ("--workers-per-gpu", "2", "--launcher", "slurm")),
        ("--sbatch-args", ("--sbatch-args=--gpus=1",)),
        ("--prologue", ("--prologue", "module load cuda")),
        ("--seeds", ("--seeds", "1", "1")),
        ("--seeds", ("--seeds", "-1")),
        ("--time-limit", ("--time-limit", "0")),
        ("--launcher", ("--launcher", "cloud")),
        ("--launcher slurm", ("--launcher", "slurm")),
        ("--launcher ray", ("--launcher", "ray")),
        ("--folder", ("--folder", "/proc/none")),
        ("--folder", ("--folder", "bad")),
        ("--folder", ("--folder", "other")),
        ("--folder", ("--folder", "locked")),
        ("--folder", ("--folder", "loop")),
        ("--exp-name", ("--exp-name", 300 * "x")),
        ("--script", ("--script", 300 * "x")),
        ("--job", ("--job", "1")),
        ("--seed", ("--", "--seed", "3")),
        ("--env-id", ("--", "--env_id=A")),
        ("--resume", ("--", "--resume", "runs/a")),
        ("--total-timesteps", ("--", "--total-timesteps", "1e6")),
    ],
)
def test_bad_input(flag: str, words: tuple[str, ...], run: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence that names the flag, and nothing is started."""
    monkeypatch.setattr(sweep, "find_spec", lambda name: None)
    for name, text in (("bad", "[{"), ("other", '{"name": "a web page"}')):
        Path(name).mkdir()
        Path(name, "manifest.json").write_text(text)
    Path("locked/lock").mkdir(parents=True)
    Path("loop").symlink_to("loop")
    result = run(*words)
    assert (result.status, result.output) == (2, "")
    assert flag in result.error
    assert re.fullmatch("error: .*\n", result.error) or result.error.count("sweep --help") == 1  # the latter is tyro's
    assert not list(Path().glob("*/runs"))


def test_gpus_are_shared_out(run: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each to as many runs as asked for at a time, and no more workers than that."""
    add_command("nvidia-smi", "echo 'GPU 0: NVIDIA A (UUID: GPU-aa-1)'; echo 'GPU 1: NVIDIA B (UUID: GPU-bb-2)'")
    words = ("--num-seeds", "4", "--workers", "4", "--workers-per-gpu")
    result = run(*words, "1")
    assert (result.status, result.error[:16]) == (2, "error: --workers")
    assert run(*words, "2").status == 0
    assert sorted(fact["gpu"] for fact in facts()) == ["GPU-aa-1", "GPU-aa-1", "GPU-bb-2", "GPU-bb-2"]
    (entry,) = json.loads(Path("sweep/manifest.json").read_text())
    assert entry["machine"]["gpus"][1] == "GPU 1: NVIDIA B (UUID: GPU-bb-2)"
    assert run("--folder", "none", "--num-seeds", "3", "--workers", "3", "--", "--no-cuda").status == 0  # needs no GPU

    mig = "  MIG 1g.18gb     Device  {}: (UUID: MIG-{})"
    add_command(
        "nvidia-smi", f"echo 'GPU 0: A (UUID: GPU-aa)'; echo '{mig.format(0, 'x')}'; echo '{mig.format(1, 'y')}'"
    )
    assert sweep.find_gpus() == ["MIG-x", "MIG-y"]
    whole = "echo 'GPU 1: NVIDIA B (UUID: GPU-bb)'"
    add_command("nvidia-smi", f"echo 'GPU 0: A (UUID: GPU-aa)'; echo '{mig.format(0, 'x')}'; {whole}")
    assert sweep.find_gpus() == ["MIG-x", "GPU-bb"]  # a whole one beside a slice
    for visible, gpus in (("2, 3", ["2", "3"]), ("", []), ("-1", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert sweep.find_gpus() == gpus


SBATCH = """for i in $(sed -n 's/.*--array=\\([0-9,]*\\).*/\\1/p' $2 | tr , ' '); do
SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=$i bash $2 >> out
done; echo '7;cluster'"""  # runs the tasks before it ends


def test_slurm_cancels_what_would_be_refused(run: Sweep) -> None:
    """The first refusal takes all other runs out of the queue."""
    add_command("sbatch", SBATCH.replace("do\n", "do [ -e cancelled ] && break\n"))
    add_command("scancel", f'echo "$@" >> {Path("cancelled").resolve()}')  # a task is in another folder
    assert run("--num-seeds", "3", "--launcher", "slurm", "--", "--total-timestep", "two").status == 0
    assert Path("cancelled").read_text() == "--state=PENDING 7\n"
    assert [record["exit"] for record in records("*") if "exit" in record] == [2]


def test_a_refused_resume_cancels_nothing(run: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the refusal of one checkpoint; nor does a local sweep in an array job cancel that one."""
    add_command("scancel", "touch cancelled")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    assert run("--job", "0", "--exp-name", "x", "--", "--total-timestep", "two").status == 2
    assert run("--", "--total-timesteps", "2").status == 0
    (checkpoint,) = Path("sweep/runs").glob("*/checkpoint.pt")
    checkpoint.write_text("half")
    assert run("--job", "0", "--launcher", "slurm", "--", "--total-timesteps", "4").status == 2
    assert not Path("cancelled").exists()


def test_a_run_has_the_facts_of_its_node(run: Sweep) -> None:
    """Its machine and versions are not those of the host that submits it, which has no GPU here."""
    add_command("on_node", "echo 'GPU 0: A (UUID: GPU-aa)'")
    Path("node").mkdir()
    Path("bin/on_node").rename("node/nvidia-smi")
    add_command("sbatch", f"PATH=$PWD/node:$PATH\n{SBATCH}")
    words = ("--num-seeds", "2", "--launcher", "slurm")
    assert run(*words).status == 0
    (entry,) = json.loads(Path("sweep/manifest.json").read_text())
    record, *_ = records("Toy-v0__toy_script__1")
    assert (entry["machine"]["gpus"], record["machine"]["gpus"]) == ([], ["GPU 0: A (UUID: GPU-aa)"])
    assert record["versions"]["pytest"] == pytest.__version__
    warning = (
        "warning: the logs of 2 runs, such as Toy-v0__toy_script__1, say: it ran on the CPU, though there is a GPU"
    )
    assert warning in run(*words, "--dry-run").output


@pytest.mark.slow
def test_slurm(run: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array job of what has not finished, with sbatch's stand-in running its tasks; a dry run only prints it."""
    add_command("sbatch", SBATCH)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    Path("broken").touch()
    words = ("--num-seeds", "3", "--launcher", "slurm", "--workers", "8", "--sbatch-args=--gpus=1 --partition=a")
    extra = ("--", "--breaks", str(Path("broken").resolve()), "--note", "two words")
    dry = run(*words, "--dry-run", *extra).output
    assert [line.split(":")[0] for line in dry.splitlines()[:3]] == ["0 new", "1 new", "2 new"]
    assert re.search(r"^#SBATCH .*--array=0,1,2%8$", dry, re.MULTILINE)
    assert re.search(r"^#SBATCH .*--gpus=1 --partition=a$", dry, re.MULTILINE)
    assert not Path("sweep").exists()

    first = run(*words, *extra)
    assert first.status == 0
    assert f"submitted {Path('sweep/job.sh').resolve()} as array job 7: 3 runs" in first.output
    assert [fact["threads"] for fact in facts()] == ["3", "3"]
    states = [line.split(":")[0] for line in run(*words, "--dry-run", *extra).output.splitlines()[:3]]
    assert states == ["0 finished", "1 failed", "2 finished"]

    Path("broken").unlink()
    assert run(*words, *extra).status == 0
    assert [len(records(f"Toy-v0__toy_script__{seed}")) for seed in (1, 2, 3)] == [2, 4, 2]
    assert "nothing to submit" in run(*words, *extra).output
    add_command("sbatch", "exit 1")
    assert run(*words, "--num-seeds", "4", *extra).status == 2


def test_slurm_gets_no_run_twice(run: Sweep) -> None:
    """What waits in its queue is not submitted again; what left the queue without an end is. Arrays have no limit
    unless asked.
    """
    add_command("sbatch", "echo 41")
    add_command("squeue", "echo 41_0; echo 41_1; echo 40_2; echo 43")  # two are of other arrays
    words = ("--launcher", "slurm", "--exp-name", "two words", "--prologue", "module load cuda", "ulimit -c 0")
    assert run(*words, "--num-seeds", "2").status == 0
    script = Path("sweep/job.sh").read_text()
    assert "#SBATCH --job-name=two-words --array=0,1\n" in script
    assert "\nmodule load cuda\nulimit -c 0\ncd " in script
    dry = run(*words, "--num-seeds", "3", "--dry-run").output
    assert [line.split(":")[0] for line in dry.splitlines()[:3]] == ["0 queued", "1 queued", "2 new"]
    assert "nothing to submit" in run(*words, "--num-seeds", "2").output
    add_command("sbatch", "echo 42")
    assert run(*words, "--num-seeds", "3", "--workers", "4").status == 0
    assert "--array=2%4\n" in Path("sweep/job.sh").read_text()
    add_command("squeue", "exit 1")  # Slurm does not answer
    assert run(*words, "--num-seeds", "3").status == 2
    add_command("squeue", "exit 0")  # both arrays have left the queue, and no run was begun
    assert "array job 42: 3 runs" in run(*words, "--num-seeds", "3").output


def test_slurm_requeues_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped goes back into the queue, but not if it was cancelled or failed."""
    add_command("squeue", "cat state")
    add_command("scontrol", 'echo "$@" >> requeued')
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    for state in ("CANCELLED", "RUNNING"):
        Path("state").write_text(f"{state}\n")
        made = len(steps("Toy-v0__toy_script__1"))
        with begin("--job", "0", "--launcher", "slurm", "--", "--total-timesteps", "500") as process:
            wait_for(lambda: len(steps("Toy-v0__toy_script__1")) > made)  # noqa: B023 - called before the loop goes on
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
    assert Path("requeued").read_text() == "requeue 7_0\n"


@pytest.mark.slow
def test_ray(ray_processes: Callable[[], dict[int, str]]) -> None:
    """A cluster of this machine finishes all runs, has them done the next time, and leaves no process behind."""
    words = ("--num-seeds", "2", "--launcher", "ray", "--workers", "2", "--", "--total-timesteps", "6")
    for ending in ("starting: ", ": 2 finished\n2 finished\n"):
        with begin(*words, stdout=subprocess.PIPE) as process:
            output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        assert ending in output
        wait_for(lambda: not ray_processes())
    assert runs() == ["Toy-v0__toy_script__1", "Toy-v0__toy_script__2"]
    assert [steps(name) for name in runs()] == [list(range(1, 7))] * 2
    assert [len(records(name)) for name in runs()] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_ray_that_is_stopped(signum: signal.Signals, ray_processes: Callable[[], dict[int, str]], run: Sweep) -> None:
    """Failures and stops are those of the local launcher, a stopped sweep leaves no process behind, and the next one
    goes on, also after a kill.
    """
    Path("broken").touch()
    words = ["--num-seeds", "2", "--workers", "2", "--", "--breaks", str(Path("broken").resolve())]
    words += ["--total-timesteps", "40"]
    with begin("--launcher", "ray", *words, stdout=subprocess.PIPE) as process:
        wait_for(lambda: steps("Toy-v0__toy_script__1") and len(records("Toy-v0__toy_script__2")) == 2)
        process.send_signal(signum)
        output, _ = process.communicate(timeout=60)
    if signum == signal.SIGTERM:
        assert process.returncode == 143
        assert "    ValueError: the task broke\n" in output
        assert "1 stopped, 1 failed\n" in output
        assert [records(f"Toy-v0__toy_script__{seed}")[-1]["exit"] for seed in (1, 2)] == [143, 1]
        wait_for(lambda: not ray_processes())
    Path("broken").unlink()
    assert run(*words).status == 0
    assert [sorted(set(steps(f"Toy-v0__toy_script__{seed}"))) for seed in (1, 2)] == [list(range(1, 41))] * 2
    assert not Path("sweep/TWICE").exists()


def test_ray_asks_for_a_gpu_only_if_runs_use_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Ray notes what a task needs."""
    needs: list[dict[str, Any]] = []

    def remote(**resources: Any) -> Callable[..., None]:
        needs.append(resources)
        return lambda function: None

    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}]
    ray = SimpleNamespace(init=lambda **_: None, nodes=lambda: nodes, remote=remote)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(sweep, "find_spec", lambda name: name)
    for extra, share in ((["--no-cuda"], 0), ([], 0.5)):
        args = sweep.Args([SCRIPT], ["Toy-v0"], workers=2, workers_per_gpu=2, launcher="ray")
        sweep.connect_ray(sweep.make_jobs(args, extra), args)
        assert (needs[-1]["num_cpus"], needs[-1]["num_gpus"]) == (4, share)


def test_refused_arguments_end_the_sweep_and_can_be_corrected(run: Sweep) -> None:
    """A typo costs one run; the corrected command goes on in the same folder, whichever runs it is for."""
    result = run("--num-seeds", "4", "--", "--note", "x", "--total-timestep", "two")
    assert result.status == 1
    assert result.output.count("starting: ") == 1
    assert "exit status 2: the script refuses these arguments, and no other run is started" in result.output
    assert run("--num-seeds", "2", "--", "--note", "x", "--total-timesteps", "3").status == 0
    assert runs() == ["Toy-v0__toy_script__1", "Toy-v0__toy_script__2"]


@pytest.mark.parametrize(("tasks", "starts"), [(("Refused-v0", "Toy-v0"), 1), (("Toy-v0", "Refused-v0"), 4)])
def test_refused_arguments_after_accepted_ones_end_nothing(tasks: tuple[str, str], starts: int, run: Sweep) -> None:
    """They are those of one task, say: the runs of others go on."""
    result = run("--env-ids", *tasks, "--num-seeds", "2")
    assert (result.status, result.output.count("starting: ")) == (1, starts)
    assert runs() == [f"Toy-v0__toy_script__{seed}" for seed in (1, 2)[: starts // 2]]


def test_the_budget_may_grow(run: Sweep) -> None:
    """Finished runs go on from their checkpoints to the larger one; a smaller one, or another flag, is refused."""
    words = ("--num-seeds", "2", "--")
    assert run("--", "--total-timesteps", "3").status == 0
    assert run(*words, "--total-timesteps=6").status == 0
    assert [steps(f"Toy-v0__toy_script__{seed}") for seed in (1, 2)] == [list(range(1, 7))] * 2
    assert records("Toy-v0__toy_script__1")[-1]["command"][-2:] == ["--total-timesteps", "6"]
    assert run(*words, "--total-timesteps", "6").output.endswith(": 2 finished\n2 finished\n")
    assert run("--", "--total-timesteps", "1_0").status == 0
    assert steps("Toy-v0__toy_script__1") == list(range(1, 11))
    (newest,) = Path("sweep/runs").glob("Toy-v0__toy_script__1__*")
    (newest / "checkpoint.pt").write_text("12")  # as where both 10 and 12 steps are rounded up to 12
    assert run("--", "--total-timesteps", "12").status == 0
    count = len(records("Toy-v0__toy_script__1"))
    assert run("--", "--total-timesteps", "12").status == 0
    assert len(records("Toy-v0__toy_script__1")) == count
    for budget in ("5", "11"):
        error = run(*words, "--total-timesteps", budget).error
        assert re.fullmatch(f"error: --total-timesteps takes at least the 12 that .* have, not {budget}\n", error)
    for extra in (("--total-timesteps", "12", "--note", "x"), ()):
        assert "only --total-timesteps may grow" in run(*words, *extra).error


def test_a_list_of_seeds(run: Sweep) -> None:
    """In the place of a range; each process gets the same list."""
    assert run("--seeds", "7", "3", "--workers", "2").status == 0
    assert runs() == ["Toy-v0__toy_script__3", "Toy-v0__toy_script__7"]


@pytest.mark.slow
def test_a_time_limit_for_each_run(run: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run writes its checkpoint, counts as failed, and goes on the next time; a stubborn one is killed."""
    name = "Toy-v0__toy_script__1"
    result = run("--time-limit", "0.05", "--", "--total-timesteps", "100")
    assert result.status == 1
    assert "stopped after --time-limit 0.05 minutes" in result.output
    assert records(name)[-1]["exit"] == 124
    assert 0 < len(steps(name)) < 100
    assert run("--time-limit", "5", "--", "--total-timesteps", "100").status == 0
    assert steps(name) == list(range(1, 101))
    monkeypatch.setattr(sweep, "STOP_SECONDS", 0.3)
    job = sweep.make_jobs(sweep.Args([SCRIPT], ["Toy-v0"], seeds=(9,), folder=Path("sweep")), ["--stubborn", "9"])[0]
    job = replace(job, extra=(*job.extra, "--total-timesteps", "500"))
    assert sweep.run_job(job, 0.01) == 124


@pytest.mark.slow
def test_a_signal_beside_the_time_limit_is_one_stop(run: Sweep, tmp_path: Path) -> None:
    """The run gets one SIGTERM: a script that saves would be ended by the second one."""
    job = sweep.make_jobs(sweep.Args([SCRIPT], ["Toy-v0"], seeds=(9,), folder=Path("sweep")), [])[0]
    lines = ["import signal, time", "signal.signal(signal.SIGTERM, lambda *_: open('terms', 'a').write('x'))"]
    script = tmp_path / "script.py"
    script.write_text("\n".join([*lines, "end = time.time() + 3", "while time.time() < end: time.sleep(0.1)", ""]))
    for name in ("jobs", "logs"):
        Path("sweep", name).mkdir(parents=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until `run_job` catches it
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    sweep.run_job(replace(job, script=script), time_limit=0.02)
    assert Path("sweep/terms").read_text() == "x"


@pytest.mark.slow
def test_a_reader_of_the_output_that_ends_first(run: Sweep) -> None:
    """As with `| tee` and Ctrl-C: the runs are stopped, and write their checkpoints."""
    name = "Toy-v0__toy_script__1"
    with begin("--", "--total-timesteps", "100", stdout=subprocess.PIPE) as process:
        wait_for(lambda: len(steps(name)) > 0)
        assert process.stdout is not None
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert records(name)[-1]["exit"] == 143


@pytest.mark.slow
def test_a_terminal_that_closes_stops_the_runs(run: Sweep) -> None:
    """SIGHUP is as SIGTERM: no run is left behind, each has its checkpoint, and the same command goes on."""
    terminal, other_end = pty.openpty()
    words = ("--num-seeds", "2", "--workers", "2", "--", "--total-timesteps", "60")
    with begin(*words, stdin=other_end, stdout=other_end, stderr=other_end) as process:
        os.close(other_end)
        wait_for(lambda: steps("Toy-v0__toy_script__1") and steps("Toy-v0__toy_script__2"))
        os.close(terminal)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 128 + signal.SIGHUP
    assert [records(f"Toy-v0__toy_script__{seed}")[-1]["exit"] for seed in (1, 2)] == [143, 143]
    assert run(*words).status == 0
    assert steps("Toy-v0__toy_script__1") == list(range(1, 61))


@pytest.mark.slow
def test_the_device_is_recorded_and_a_missing_gpu_said(run: Sweep) -> None:
    """The device is what the script says; a CPU build of PyTorch on a machine with a GPU is told, once."""
    add_command("nvidia-smi", "echo 'GPU 0: NVIDIA A (UUID: GPU-aa)'")
    result = run("--num-seeds", "2")
    assert result.output.count("warning: it ran on the CPU, though there is a GPU") == 1
    record = records("Toy-v0__toy_script__1")[-1]
    assert (record["device"], record["gpu"]) == ("cpu", "GPU-aa")
    assert record["threads"]
    for extra, device in ((("--device", "cuda"), "cuda"), (("--no-cuda",), "cpu")):
        result = run("--exp-name", device, "--", *extra)
        assert (result.status, "warning" in result.output) == (0, False)
        assert records(f"Toy-v0__{device}__1")[-1]["device"] == device


def test_words_of_the_scripts_are_understood(
    script: ModuleType, train: Train, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a script prints of its progress, its device, its end, and of folders that it does not go on with."""
    clock = itertools.count(1_000.0, 40.0)
    with monkeypatch.context() as patch:
        patch.setattr(utils.run.time, "time", lambda: next(clock))  # a line is due at each point
        folder = train(script)
    printed = capfd.readouterr().out
    job = job_of(Path())
    job.log.parent.mkdir()
    job.log.write_text(f"$ python a.py\nstep 1 of 2, 3 steps/s, \n$ python a.py --resume\n{printed}")
    assert sweep.device_of(job) == "cpu"
    job.log.write_text(job.log.read_text().rpartition("\nstep ")[0])  # the clock made one more line due after the end
    assert list(sweep.read_progress(job)) == ["scores"]
    before_its_end = printed.partition("training is over")[0]
    job.log.write_text(f"$ python a.py\n{before_its_end}")
    progress = sweep.read_progress(job)
    assert progress["step"].endswith("%)")
    assert progress["speed"].endswith("/s")
    assert progress["time"].endswith(" left")
    job.log.write_text(job.log.read_text() + "$ python a.py --resume\n")
    assert sweep.read_progress(job) == {}

    def refusal() -> str:
        with pytest.raises(SystemExit, match="2"):
            script.main(script.parse_args(script.Args, ["--resume", str(folder)]))
        return capfd.readouterr().err

    assert sweep.NOTHING_LEFT in refusal()
    for path in folder.glob("checkpoint*.pt"):
        path.write_bytes(b"half")
    assert sweep.UNREADABLE in refusal()
    (folder / "args.json").write_text("{")
    assert sweep.UNREADABLE in refusal()


def test_progress_without_a_terminal(run: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines at the start, at the end and now and then."""
    monkeypatch.setattr(sweep, "PROGRESS_SECONDS", 0.4)
    lines = run("--", "--total-timesteps", "9").output.splitlines()
    assert lines[1] == "starting: Toy-v0__toy_script__1 (new)"
    assert any(
        re.fullmatch(r"running: .*__1, step \d \(\d+%\), 1,000/s, return [\d.]+, 0:00:00 left", line) for line in lines
    )
    assert lines[-2:] == ["finished: Toy-v0__toy_script__1, evaluation: return 7.25 +/- 0.50", "1 finished"]


def test_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row a run, failures first among those that have ended; at the end the cursor is back."""
    for variable, value in {"COLUMNS": "120", "LINES": "30", "TERM": "xterm"}.items():
        monkeypatch.setenv(variable, value)
    Path("broken").touch()
    extra = ("--", "--total-timesteps", "12", "--breaks", str(Path("broken").resolve()))
    terminal, other_end = pty.openpty()
    with begin("--num-seeds", "2", *extra, stdin=other_end, stdout=other_end, stderr=other_end) as process:
        os.close(other_end)
        output = b""
        with suppress(OSError):  # the end, on Linux
            while chunk := os.read(terminal, 4096):
                output += chunk
    os.close(terminal)
    assert process.returncode == 1
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]|\r", "", output.decode())
    assert re.search(r"^Toy-v0__toy_script__1 running +\d+ \(\d+%\) 1,000 +[\d.]+ +0:00:00 *$", text, re.MULTILINE)
    assert re.search(r"^Toy-v0__toy_script__2 waiting *$", text, re.MULTILINE)
    table = text[text.rindex("run  ") :]
    assert table.index("__2 failed") < table.index("__1 finished")
    assert output.rindex(b"\x1b[?25h") > output.rindex(b"\x1b[?25l")
