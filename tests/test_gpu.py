"""On a CUDA device: training with the default flags, the compiled update, resuming, evaluation, several processes.

Without such a device all of these tests are skipped: `pytest -m gpu`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_compile import CASES, check_recordings, compare, run

from sac_continuous import ReplayBuffer

ROOT = Path(__file__).parent.parent
DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SCRIPTS = ["ppo_continuous", "sac_continuous", "ppo_selfplay", "sac_selfplay"]
SINGLE = "--env-id Pendulum-v1 --eval-freq 0 --eval-episodes 1"
SELFPLAY = "--num-games 8 --eval-freq 0 --eval-games 2 --cross-play-games 0 --save-steps 128"
FLAGS = {
    "ppo_continuous": f"{SINGLE} --num-envs 1 --num-steps 128",
    "sac_continuous": f"{SINGLE} --learning-starts 400",
    "ppo_selfplay": f"{SELFPLAY} --num-steps 16",
    "sac_selfplay": f"{SELFPLAY} --learning-starts 64 --updates-per-step 0.1",
}

VARIANTS = sorted(path.stem for path in (ROOT / "variants").glob("*.py") if path.stem != "sac_ray")
VARIANT_FLAGS = {
    "sac_rewards": ["--streams", "extrinsic,curiosity,rnd"],
    "sac_pixels": ["--frame-size", "20", "--grey"],
}


def words_of(name: str) -> list[str]:
    """Of a small run of a script that uses the GPU and compiles, as it does by default; without its length."""
    return [str(ROOT / f"{name}.py"), *FLAGS[name].split(), "--total-timesteps"]


def run_of(folder: Path) -> Path:
    """The only run folder in a folder."""
    (found,) = folder.glob("runs/*")
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_train_and_resume(name: str, tmp_path: Path) -> None:
    """A run trains on the GPU with a compiled update, and goes on there and then on the CPU."""
    first = run([*words_of(name), "1024"], tmp_path)
    assert first.returncode == 0, first.stderr
    assert f"steps on {DEVICE}" in first.stdout
    assert first.stdout.count("compiled it in") == 1 + name.startswith("sac"), first.stderr
    folder = run_of(tmp_path)
    script, resume = words_of(name)[0], ["--resume", str(folder), "--total-timesteps"]
    for total, extra, device in (("2048", [], DEVICE), ("3072", ["--no-cuda", "--no-compile"], "cpu")):
        resumed = run([script, *resume, total, *extra], tmp_path)
        assert resumed.returncode == 0, resumed.stderr
        assert f"steps on {device}" in resumed.stdout
        assert "resuming from step" in resumed.stdout


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_train_and_resume(name: str, tmp_path: Path) -> None:
    """On the GPU, and then on the CPU."""
    words = [*VARIANT_FLAGS.get(name, []), *words_of(f"{name.split('_')[0]}_continuous")[1:]]
    script = str(ROOT / f"variants/{name}.py")
    num_compiled = Path(script).read_text().count(" compiled(compute_")
    first = run([script, *words, "600"], tmp_path)
    assert first.returncode == 0, first.stderr
    assert f"steps on {DEVICE}" in first.stdout
    assert first.stdout.count("compiled it in") == num_compiled, first.stderr
    folder = run_of(tmp_path)
    for total, extra, device in (("800", [], DEVICE), ("1000", ["--no-cuda"], "cpu")):
        resumed = run([script, "--resume", str(folder), "--total-timesteps", total, *extra], tmp_path)
        assert resumed.returncode == 0, resumed.stderr
        assert f"steps on {device}" in resumed.stdout
        assert "resuming from step" in resumed.stdout


@pytest.mark.parametrize("name", ["ppo_selfplay", "sac_selfplay"])
def test_two_behaviors(name: str, tmp_path: Path) -> None:
    """Each has recordings of its own."""
    words = [*words_of(name), "4096", "--env-id", "pursuit", "--team-change", "256"]
    trained = run(words, tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.count("compiled it in") == 2 * (1 + name.startswith("sac")), trained.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_model_of_the_gpu_plays_on_the_cpu(name: str, tmp_path: Path) -> None:
    """Without a device to be seen; a single-agent script's return is that of the GPU but for rounding."""
    trained = run([*words_of(name), "1024"], tmp_path)
    assert trained.returncode == 0, trained.stderr
    words = [words_of(name)[0], "--evaluate", str(run_of(tmp_path))]
    evaluated = run(words, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert evaluated.returncode == 0, evaluated.stderr
    results = [re.findall(r"^(?:evaluation|scores): .*", x.stdout, re.MULTILINE) for x in (trained, evaluated)]
    assert [len(lines) for lines in results] == [1, 1]
    if name.endswith("continuous"):
        on_gpu, on_cpu = (float(re.findall(r"return (\S+)", lines[0])[0]) for lines in results)
        assert on_cpu == pytest.approx(on_gpu, rel=0.05)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_killed_run_goes_on(name: str, tmp_path: Path) -> None:
    """From a checkpoint after its first step, to its end."""
    words = [*words_of(name), "20480", "--checkpoint-freq", "1024", "--no-compile"]
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        while not list(tmp_path.glob("runs/*/checkpoint.previous.pt")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    folder = run_of(tmp_path)
    resumed = run([words[0], "--resume", str(folder)], tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"steps on {DEVICE}" in resumed.stdout
    (step,) = re.findall(r"resuming from step ([\d,]+)", resumed.stdout)
    assert int(step.replace(",", "")) >= 1024
    assert (folder / "model.pt").exists()


@pytest.mark.parametrize(("name", "flags"), CASES)
def test_gradients_are_those_of_the_plain_update(name: str, flags: dict[str, object], tmp_path: Path) -> None:
    """On the GPU."""
    compare(name, flags, DEVICE, tmp_path)


def test_runs_share_a_gpu(tmp_path: Path) -> None:
    """Two runs at a time by `--workers-per-gpu 2`, each a process of its own."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    words = ["-m", "benchmark.sweep", "--script", str(ROOT / "sac_continuous.py"), "--env-ids", "Pendulum-v1"]
    words += ["--num-seeds", "2", "--workers", "2", "--workers-per-gpu", "2", "--folder", "sweep", "--"]
    words += ["--eval-freq", "0", "--eval-episodes", "1", "--learning-starts", "400", "--total-timesteps", "1024"]
    result = run(words, tmp_path, CUDA_VISIBLE_DEVICES=gpu, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stdout + result.stderr
    events = re.findall(r"^(starting|finished): ", result.stdout, re.MULTILINE)
    assert events == ["starting", "starting", "finished", "finished"]
    journals = sorted((tmp_path / "sweep/jobs").glob("*.jsonl"))
    ends = [json.loads(path.read_text().splitlines()[-1]) for path in journals]
    assert [(end["exit"], end["device"], end["gpu"]) for end in ends] == [(0, DEVICE, gpu)] * 2


def test_a_replay_buffer_on_the_gpu() -> None:
    """It holds what one on the CPU holds, also when old transitions were overwritten, and draws on the GPU."""
    rng = np.random.default_rng(0)
    buffers = [ReplayBuffer(10, 3, 2, torch.device(device)) for device in ("cpu", DEVICE)]
    for _ in range(4):
        obs, final_obs = rng.standard_normal((2, 4, 3))
        batch = obs, rng.standard_normal((4, 2)), rng.standard_normal(4), final_obs, rng.random(4) < 0.5
        for buffer in buffers:
            buffer.add(*batch)
    assert [buffer.total for buffer in buffers] == [16, 16]
    assert torch.equal(buffers[0].data, buffers[1].data.cpu())
    drawn = buffers[1].sample(1000)
    assert {column.device.type for column in drawn} == {DEVICE}
    rows = torch.cat([column.reshape(1000, -1) for column in drawn], dim=1).cpu()
    assert torch.equal(rows.unique(dim=0), buffers[0].data.unique(dim=0))


def test_recordings_of_a_function() -> None:
    """Real ones."""
    check_recordings(DEVICE)
