"""`benchmark/sweep_runs.sh`, with stand-ins that only note their commands: each study can run to its end."""

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmark" / "sweep_runs.sh"
STUDIES = re.findall(r"^    (\w+)\)", SCRIPT.read_text(), flags=re.MULTILINE)
PYTHON = """#!/bin/bash
printf '%s\\n' "$*" >> "$NOTES"
if [[ "$*" == *"--seed 901"* ]]; then  # an expert, whose run is looked for
    folder=runs/$(sed 's/.*--env-id \\([^ ]*\\).*/\\1/' <<< "$*")__ppo_continuous__901__1
    mkdir -p "$folder" && touch "$folder/model.pt"
fi
"""


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_runs_to_its_end(study: str, tmp_path: Path) -> None:
    """No folder is for two experiments, which `benchmark.sweep` would refuse, and the reports have all folders."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "ten_changes").mkdir()
    for name, text in (("python", PYTHON), ("git", "#!/bin/sh\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NOTES": str(tmp_path / "notes")}
    for _ in range(2):  # the same command again goes on
        subprocess.run(["bash", str(SCRIPT), study], cwd=tmp_path, env=env, check=True)
    lines = (tmp_path / "notes").read_text().splitlines()
    experiments: dict[str, set[tuple[str, ...]]] = {}
    for line in lines:
        if line.startswith("-m benchmark.sweep"):
            flags, _, extra = line.partition(" -- ")
            names: list[str] = re.findall(r"--(?:script|exp-name) (\S+)", flags)
            experiments.setdefault(re.findall(r"--folder (\S+)", flags)[0], set()).add((*names, extra))
    assert {len(commands) for commands in experiments.values()} == {1}
    reports = " ".join(line for line in lines if line.startswith("-m benchmark.report"))
    shown = [pattern.replace("*", ".*") for pattern in re.findall(r"sweeps/\S+", reports)]
    assert all(any(re.fullmatch(pattern, folder) for pattern in shown) for folder in experiments)
