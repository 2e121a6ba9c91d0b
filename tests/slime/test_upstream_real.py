"""The patch in deploy/upstream/slime applies to slime's checkout, and its tests pass there and fail without it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slime

PATCH = Path(__file__).parents[2] / "deploy" / "upstream" / "slime" / "sft-images.patch"
TESTS = "tests/test_sft_rollout_images.py"


def passed(home: Path) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
    environ = {**os.environ, "PYTHONPATH": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=home, env=environ, capture_output=True, text=True, check=False)
    print(done.stdout[-2000:], done.stderr[-500:])
    return done.returncode == 0


def test_images_reach_supervised_training_with_the_patch_alone(tmp_path: Path) -> None:
    home = tmp_path / "slime"
    shutil.copytree(os.environ["SLIME_HOME"], home, ignore=shutil.ignore_patterns(".git"))
    before = (home / "slime/rollout/sft_rollout.py").read_bytes()
    subprocess.run(["patch", "-p1", "-F0", "-i", str(PATCH)], cwd=home, check=True, capture_output=True)
    assert passed(home)
    (home / "slime/rollout/sft_rollout.py").write_bytes(before)
    assert not passed(home)
