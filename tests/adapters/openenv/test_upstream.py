"""The patch in deploy/upstream/openenv: its own test, with the installed release of OpenEnv."""

import os
import subprocess
import sys
from pathlib import Path

PATCH = Path(__file__).parents[3] / "deploy" / "upstream" / "openenv" / "drawn-desktop.patch"


def test_its_own_test_passes(tmp_path: Path) -> None:
    apply = ["git", "apply", "--include=envs/*", "--include=tests/*", str(PATCH)]
    subprocess.run(apply, cwd=tmp_path, check=True, capture_output=True)
    command = [sys.executable, "-m", "pytest", "-q", "tests/envs/test_drawn_desktop_environment.py"]
    env = {**os.environ, "PYTHONPATH": "envs"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
