"""slime's own contract tests, on our hooks; and our doubles of its types against the real ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slime, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def run_contract(name: str, *flags: str) -> str:
    """Run one of slime's contract files from its root, our package beside it."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto"), os.environ["SLIME_HOME"]]),
    }
    done = subprocess.run(
        [
            sys.executable,
            f"tests/plugin_contracts/test_plugin_{name}_contracts.py",
            *flags,
            "-q",
            "-p",
            "no:cacheprovider",
        ],
        cwd=os.environ["SLIME_HOME"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_generate_keeps_slimes_contract() -> None:
    said = run_contract("generate", "--custom-generate-function-path", "trainer.testing.slime_contract.generate")
    assert "4 passed" in said


def test_the_runtime_hooks_keep_slimes_contract() -> None:
    said = run_contract(
        "runtime_hook",
        "--custom-rm-path",
        "trainer.slime.rewards.reward_func",
    )
    print(said)
    assert "failed" not in said
