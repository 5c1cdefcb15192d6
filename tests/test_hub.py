"""`--upload-model` against a local stand-in for the Hugging Face Hub: what arrives, and what happens when nothing can.

The stand-in answers what `create_repo` and `upload_folder` send without Xet, whose storage has a protocol of its own.
"""

import base64
import json
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium as gym
import huggingface_hub
import pytest
import torch

import ppo_continuous
import ppo_selfplay
from utils.run import command_of, parse_args, upload_model

# How huggingface_hub calls its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ROUTES = {
    "create": r"POST /api/repos/create",
    "validate": r"POST /api/validate-yaml",
    "preupload": r"POST /api/models/(.+)/preupload/main",
    "batch": r"POST /(.+)\.git/info/lfs/objects/batch",
    "put": r"PUT /storage/(.+)",
    "commit": r"POST /api/models/(.+)/commit/main",
}
TOKEN = "hf_secret"
METRICS = {"eval/return_mean": -150.126, "eval/return_std": 2.5, "eval/length_mean": 200.0}
TINY_FLAGS = {
    "ppo_continuous": "--total-timesteps 64 --num-steps 32 --num-minibatches 4 --update-epochs 1",
    "sac_continuous": "--total-timesteps 40 --learning-starts 20 --batch-size 8 --buffer-size 100",
}
FLAGS = "--env-id Pendulum-v1 --eval-episodes 1 --no-cuda --no-compile --upload-model"


class Hub(ThreadingHTTPServer):
    """Remembers the repositories and their files; answers a route with an error if `errors` has a status for it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict[str, bytes]] = {}
        self.storage: dict[str, bytes] = {}
        self.authorizations: dict[str, str | None] = {}
        self.errors: dict[str, int] = {}

    def answer(self, route: str, repo: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and JSON of the response."""
        if route == "put":
            self.storage[repo] = body
            return 200, {}
        lines = [json.loads(line) for line in body.splitlines()]
        if route == "create":
            repo = f"{lines[0]['organization']}/{lines[0]['name']}"
            status = 409 if repo in self.repos else 200
            self.repos.setdefault(repo, {})
            return status, {"url": f"{self.url}/{repo}"}
        if route == "preupload":  # binaries go to the storage, as on the Hub
            modes = {file["path"]: "lfs" if file["path"].endswith(".pt") else "regular" for file in lines[0]["files"]}
            return 200, {"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]}
        if route == "batch":
            objects: list[dict[str, Any]] = lines[0]["objects"]
            for item in objects:
                item["actions"] = {"upload": {"href": f"{self.url}/storage/{item['oid']}"}}
            return 200, {"transfer": "basic", "objects": objects}
        if route == "commit":
            for line in lines:
                if line["key"] == "file":
                    self.repos[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    self.repos[repo][line["value"]["path"]] = self.storage[line["value"]["oid"]]
            return 200, {"commitUrl": f"{self.url}/{repo}/commit/abc", "commitOid": "abc"}
        return 200, {}


class Handler(BaseHTTPRequestHandler):
    """Finds the route of a request, and passes on what the stand-in answers."""

    server: Hub

    def handle_request(self) -> None:
        """Any method; what has no route is not found."""
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        status, response = 404, dict[str, Any]()
        for route, pattern in ROUTES.items():
            if match := re.fullmatch(pattern, f"{self.command} {self.path}"):
                self.server.authorizations[route] = self.headers["Authorization"]
                if route in self.server.errors:
                    status = self.server.errors[route]
                else:
                    status, response = self.server.answer(route, match[1] if match.groups() else "", body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(response).encode() if status < 500 else b"<html>Internal error</html>")

    do_GET = do_POST = do_PUT = handle_request

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    """An empty stand-in on a free port."""
    with Hub() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def run(script: ModuleType, flags: str, folder: Path, hub: Hub, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script as a user does, with nobody logged in; huggingface_hub reads its variables when it is imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "NO_PROXY": "127.0.0.1"}
    env |= {f"HF_HUB_DISABLE_{name}": "1" for name in ("XET", "TELEMETRY", "PROGRESS_BARS")} | variables
    command = [sys.executable, str(script.__file__), *flags.split()]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def run_folder(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder for `upload_model` to be called with in this process, where huggingface_hub knows the stand-in."""
    constants = {"ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_TELEMETRY": True}
    constants["HF_HUB_OFFLINE"] = False
    for name, value in constants.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(huggingface_hub.constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents.json"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model.pt").write_bytes(bytes(range(256)) * 100)
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    """All files of a folder by their names in it."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_card(text: str) -> tuple[huggingface_hub.ModelCardData, huggingface_hub.EvalResult]:
    """The front matter of a model card, and the one result in it."""
    data = huggingface_hub.ModelCard(text).data
    assert isinstance(data, huggingface_hub.ModelCardData)
    assert data.eval_results is not None
    (evaluation,) = data.eval_results
    return data, evaluation


@pytest.mark.slow
def test_upload_after_training(script: ModuleType, hub: Hub, tmp_path: Path) -> None:
    """All that the run wrote arrives as it is on disk, and the card has the task, the result and the command."""
    flags = f"{FLAGS} --hf-entity someone {TINY_FLAGS[script.__name__]}"
    result = run(script, flags, tmp_path, hub, HF_TOKEN=TOKEN)
    assert result.returncode == 0, result.stderr
    name = script.__name__
    (repo,) = hub.repos
    assert repo == f"someone/Pendulum-v1-{name}-seed1"
    assert f"uploaded: {hub.url}/{repo}" in result.stdout
    assert hub.authorizations.pop("put") is None  # the storage has signed addresses, and is not told the token
    assert hub.authorizations == {route: f"Bearer {TOKEN}" for route in ROUTES if route != "put"}

    (folder,) = (tmp_path / "runs").iterdir()
    assert hub.repos[repo] == {n: content for n, content in read_files(folder).items() if "checkpoint" not in n}
    assert {"model.pt", "args.json", "README.md"} < hub.repos[repo].keys()
    (events,) = (content for path, content in hub.repos[repo].items() if "tfevents" in path)
    assert b"eval/return_mean" in events
    assert torch.load(folder / "model.pt", weights_only=True)["args"]["env_id"] == "Pendulum-v1"

    printed = re.search(r"evaluation: return (\S+ \+/- \S+),", result.stdout)
    assert printed is not None
    text = hub.repos[repo]["README.md"].decode()
    data, evaluation = read_card(text)
    assert (evaluation.dataset_name, evaluation.task_type) == ("Pendulum-v1", "reinforcement-learning")
    assert (evaluation.metric_type, evaluation.metric_value) == ("mean_reward", printed[1])
    assert {"reinforcement-learning", "Pendulum-v1"} < set(data.tags or [])
    (command,) = re.findall(rf"\n    python {name}\.py (.*)\n\nPlay", text)
    assert parse_args(script.Args, command.split()) == parse_args(script.Args, flags.split())
    assert f"Python {platform.python_version()}, PyTorch {torch.__version__}, Gymnasium {gym.__version__}" in text
    assert f"{printed[1]} over 1 episodes" in text


@pytest.mark.slow
def test_upload_refused_after_training(script: ModuleType, hub: Hub, tmp_path: Path) -> None:
    """The run ends as it would without an upload, but for one line."""
    hub.errors["commit"] = 403  # statuses from 500 on are retried for half a minute
    result = run(script, f"{FLAGS} --hf-entity someone {TINY_FLAGS[script.__name__]}", tmp_path, hub, HF_TOKEN=TOKEN)
    (folder,) = (tmp_path / "runs").iterdir()
    assert {"model.pt", "args.json", "README.md"} < read_files(folder).keys()
    assert "Traceback" not in result.stderr
    assert re.fullmatch(r"warning: --upload-model failed.*\b403\b.*\n", result.stderr)
    assert result.returncode == 0
    assert "uploaded" not in result.stdout
    assert "run folder: " in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "flags", "hint"),
    [({}, "--hf-entity someone", "HF_TOKEN"), ({"HF_TOKEN": TOKEN}, "", "--hf-entity")],
    ids=["account", "entity"],
)
def test_what_is_missing_is_said_before_training(
    script: ModuleType, hub: Hub, tmp_path: Path, variables: dict[str, str], flags: str, hint: str
) -> None:
    """One line, exit status 2, and nothing written or sent."""
    result = run(script, f"{FLAGS} {flags} {TINY_FLAGS[script.__name__]}", tmp_path, hub, **variables)
    assert result.returncode == 2
    assert re.fullmatch(rf"error: --upload-model .*{hint}.*\n", result.stderr)
    assert not (tmp_path / "runs").exists()
    assert not hub.authorizations


@pytest.mark.parametrize(
    ("entity", "errors"),
    [
        ("someone", {"create": 401}),
        ("someone", {"create": 500}),
        ("someone", {"validate": 500}),
        ("someone", {"preupload": 404}),
        ("someone", {"put": 403}),
        ("not/valid", {}),
        ("someone", None),
    ],
    ids=["token", "server", "no-json", "no-repo", "storage", "entity", "connection"],
)
def test_upload_failures(
    script: ModuleType,
    hub: Hub,
    run_folder: Path,
    entity: str,
    errors: dict[str, int] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At each stage; huggingface_hub raises an error of another kind for almost each of them."""
    hub.errors = errors or {}
    if errors is None:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    upload_model(run_folder, script.Args(env_id="Pendulum-v1", hf_entity=entity), METRICS)
    out, err = capsys.readouterr()
    assert re.search(r"warning: --upload-model failed.*\n\Z", err)  # a progress bar may come before
    assert out == ""
    assert not any(hub.repos.values())


def test_second_upload_and_what_stays_here(script: ModuleType, hub: Hub, run_folder: Path) -> None:
    """An id that no repository can have; a repository that exists; W&B's files are left out."""
    for name in ("videos/final-episode-0.mp4", "wandb/run-1/files/config.yaml"):
        (run_folder / name).parent.mkdir(parents=True)
        (run_folder / name).write_text("first")
    args = script.Args(env_id="toy_envs:My/Task-v1", exp_name="trial", seed=7, hf_entity="someone")
    for text in ("first", "second"):
        (run_folder / "args.json").write_text(text)
        upload_model(run_folder, args, METRICS)
    ((repo, files),) = hub.repos.items()
    assert repo == "someone/toy_envs-My-Task-v1-trial-seed7"
    assert files == {name: content for name, content in read_files(run_folder).items() if not name.startswith("wandb")}
    assert files["args.json"] == b"second"
    _, evaluation = read_card(files["README.md"].decode())
    assert (evaluation.dataset_name, evaluation.metric_value) == ("toy_envs:My/Task-v1", "-150.13 +/- 2.50")


def test_a_model_card_names_the_script_from_the_root() -> None:
    """The command of a variant has its folder."""
    variant: Any = import_module("variants.sac_crossq")
    assert command_of(variant.Args(seed=2)) == "python variants/sac_crossq.py --seed 2"
    assert command_of(ppo_continuous.Args()) == "python ppo_continuous.py"
    opponents = ["runs/a", "runs/b c"]
    words = command_of(ppo_selfplay.Args(opponents=opponents, symmetric="no"))
    assert words == "python ppo_selfplay.py --symmetric no --opponents runs/a 'runs/b c'"
