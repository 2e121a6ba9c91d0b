"""The benchmark of rollouts on slime's real rollout code, small."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slime, pytest.mark.timeout(600)]


def test_a_small_benchmark_reports_all_figures() -> None:
    command = [sys.executable, "-m", "tests.tools.learning", "rollout-bench"]
    command += ["--episodes", "2", "--turns", "6", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)["results"]
    for kind in ("", "_busy"):
        assert 0 < results[f"loop_ms_per_turn{kind}"] < results[f"cpu_ms_per_turn{kind}"]
        assert results[f"cpu_turn_6_over_2{kind}"] > 0
        # Requests with 1 to 6 pictures each.
        assert 3.4 < results[f"bytes_per_turn_over_picture{kind}"] < 8
    assert results["picture_bytes_busy"] > 5 * results["picture_bytes"]
