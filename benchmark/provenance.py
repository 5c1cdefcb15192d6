"""What a number came from: sources and their commit, versions of libraries, and the machine."""

import ast
import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from itertools import accumulate
from pathlib import Path
from typing import Any


def output_of(*command: str) -> str:
    """What a command prints; nothing if there is no such command, or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The whole records of a sweep's journal: "command", and "exit" and "run" (its folder) if it is an end."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with suppress(ValueError):  # a line that a full disk or a loss of power cut off
            records.append(json.loads(line))
    return records


def sources_of(script: Path, env_id: str = "") -> list[Path]:
    """A script and the project's modules that it imports, directly or through others, beside it or one folder above.

    `env_id` may name the module of a task, as `module:id` or `module`. Strings of this form in the code count, too:
    `utils.team_env` imports the built-in games by them.
    """
    roots, found, waiting = (script.parent, script.parent.parent), {script}, [script]
    names = re.findall(r"^(\w+(?:\.\w+)*)(?=:|$)", env_id)
    while waiting:
        path = waiting.pop()
        package = next((path.parent.relative_to(root).parts for root in roots if path.is_relative_to(root)), ())
        with suppress(SyntaxError):  # which the run will report
            names += names_in(ast.parse(path.read_bytes()), package)
        for name in {prefix for whole in names for prefix in accumulate(whole.split("."), "{}.{}".format)}:
            module = module_path(name, roots)
            if module and module not in found:
                found.add(module)
                waiting.append(module)
        names = []
    return [script, *sorted(found - {script})]


def names_in(tree: ast.AST, package: tuple[str, ...] = ()) -> Iterator[str]:
    """Names of what a file of a package imports, among them those of things in modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()  # level: the number of dots
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and (match := re.fullmatch(r"(\w+(?:\.\w+)*):\w+", str(node.value))):
            yield match[1]


def module_path(name: str, roots: Sequence[Path]) -> Path | None:
    """The file of a module in the first folder that has it, as Python finds it; None if there is none."""
    files = [f"{name.replace('.', '/')}{ending}" for ending in ("/__init__.py", ".py")]
    return next((root / file for root in roots for file in files if (root / file).is_file()), None)


def hash_of(script: Path, env_id: str = "") -> str:
    """SHA-256 of a script and of the project's modules that it imports, as they are now."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources_of(script, env_id))).hexdigest()


def run_name(env_id: str, exp_name: str, seed: object) -> str:
    """The beginning of a run folder's name, as the scripts write it."""
    return re.sub(r"[^\w.-]", "-", f"{env_id}__{exp_name}__{seed}")


def run_folders(runs: Path, name: str) -> list[Path]:
    """The folders that one run of a sweep has had, oldest first; a counter tells apart those of the same second."""
    pattern = re.compile(re.escape(name) + r"__(\d+)(?:-(\d+))?")
    matches = [(match, path) for path in runs.glob("*") if (match := pattern.fullmatch(path.name))]
    return [path for _, _, path in sorted((int(match[1]), int(match[2] or 1), path) for match, path in matches)]


def commit_of(sources: Sequence[Path]) -> dict[str, Any]:
    """Commit of the sources' repository, and whether a file of it is changed since.

    Both are None where there is no repository, or where it does not contain one of the sources.
    """
    git = "git", "-C", str(sources[0].parent)
    is_tracked = output_of(*git, "ls-files", "--error-unmatch", *map(str, sources))
    commit = (output_of(*git, "rev-parse", "HEAD") or None) if is_tracked else None
    return {"commit": commit, "dirty": bool(output_of(*git, "status", "--porcelain", "-uno")) if commit else None}


def versions() -> dict[str, str]:
    """Python and all packages that are installed; names have hyphens, as in requirements.txt, and no underscores."""
    named = (package for package in distributions() if package.name)  # what pip leaves of a cut-off install has no name
    packages = sorted((package.name.replace("_", "-"), package.version) for package in named)
    return {"python": platform.python_version(), **dict(packages)}


def machine() -> dict[str, Any]:
    """Host, system, processor, cores, memory and GPUs."""
    try:
        names = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # no Linux
        names = []
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_gib": round(memory, 1),
        "gpus": output_of("nvidia-smi", "-L").splitlines(),
    }


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_gpus() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, or else all GPUs here. A divided one (MIG) counts as its slices."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    gpus: list[list[str]] = []
    for line in output_of("nvidia-smi", "-L").splitlines():
        if match := re.search(r"UUID: (GPU-[^)]+)", line):
            gpus.append([match[1]])
        elif (match := re.search(r"UUID: (MIG-[^)]+)", line)) and gpus:
            gpus[-1].append(match[1])
    return [name for whole, *slices in gpus for name in (slices or [whole])]
