"""`make soak` on real machines: two minutes of random episodes, killed and stopped QEMUs, and killed clients."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(1500)]

ZEROS = ("duplicated_actions", "lost_actions", "fake_zero_rewards", "leftovers", "unexplained_errors")


def test_two_minutes_on_real_machines_pass(short_dir: Path, template_dir: Path) -> None:
    config = short_dir / "soak.toml"
    config.write_text(f'[hypervisor]\ntemplate_dir = "{template_dir}"\n', encoding="utf-8")
    command = [sys.executable, "-m", "tests.soak", "--config", str(config), "--state-dir", str(short_dir / "s")]
    flags = ["--minutes", "2", "--machines", "3", "--seed", "ci", "--json"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert [report["problems"], report["unexplained"]] == [{"actions": [], "rewards": [], "leftovers": []}, []]
    assert {name: report[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert done.returncode == 0
    assert min(report["episodes"], report["steps"], report["counters_read"], report["faults"]["total"]) > 0
    assert min(report["checkpoints"], report["rollbacks"]) > 0
