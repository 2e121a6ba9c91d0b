"""The patch in deploy/upstream/harbor: its own test, and jobs of Harbor's command line with its environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import harbor
import pytest

from tests.adapters.harbor.test_harbor import CLICK_AGENT, HERE, VERIFIER, reward_of, run_command_line
from tests.support.desktops import DrawnDesktops

# Warnings of the framework are not ours.
pytestmark = pytest.mark.filterwarnings("default")
PATCH = Path(__file__).parents[3] / "deploy" / "upstream" / "harbor" / "envd.patch"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The installed package with the patch."""
    source = Path(harbor.__file__).parent
    shutil.copytree(source, tmp_path / "src" / "harbor", ignore=shutil.ignore_patterns("__pycache__"))
    command = ["git", "apply", "--include=src/*", "--include=tests/*", str(PATCH)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def test_its_own_test_passes(checkout: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-o", "asyncio_mode=auto", "tests/unit/environments/test_envd.py"]
    env = {**os.environ, "PYTHONPATH": "src"}
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(("agent", "reward"), [(CLICK_AGENT, 1.0), ("nop", 0.0)])
def test_a_job_names_it_and_scores_what_is_on_the_desktop(
    checkout: Path, desktops: DrawnDesktops, monkeypatch: pytest.MonkeyPatch, agent: str, reward: float
) -> None:
    monkeypatch.setenv("ENVD_TARGET", desktops.address)
    monkeypatch.setenv("HARBOR_TELEMETRY", "0")
    monkeypatch.setenv("HOME", str(checkout))
    task = checkout / "enable"
    (task / "environment").mkdir(parents=True)
    (task / "task.toml").write_text('schema_version = "1.4"\n[metadata]\ntask_id = "fake/enable"\n', encoding="utf-8")
    (task / "instruction.md").write_text("Enable it.\n", encoding="utf-8")
    # Harbor requires the file, but `TaskVerifier` does not run it.
    (task / "tests").mkdir()
    (task / "tests" / "test.sh").touch()
    options = ("--agent", agent, "--verifier", VERIFIER)
    (result,) = run_command_line(task, *options, environment="envd", path=f"{checkout / 'src'}:{HERE}")
    assert reward_of(result) == reward
