"""`envd soak` on drawn desktops, as its users meet it: a short one passes, and Ctrl-C ends one with a report."""

import json
import signal
import subprocess
import sys
from pathlib import Path

ZEROS = ("duplicated_actions", "lost_actions", "fake_zero_rewards", "leftovers", "unexplained_errors")


def start(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "envd", "soak", "--hypervisor", "fake", "--state-dir", str(tmp_path), "--json"]
    return subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_random_episodes_under_faults_leave_nothing_to_explain(tmp_path: Path) -> None:
    process = start(tmp_path, "--minutes", "0.35", "--machines", "6", "--seed", "ci")
    said, complained = process.communicate()
    told = json.loads(said)
    assert [told["problems"], told["unexplained"]] == [{"actions": [], "rewards": [], "leftovers": []}, []]
    assert {name: told[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0), complained[-4000:]
    assert process.returncode == 0
    assert told["passed"] is True
    assert min(told["episodes"], told["steps"], told["counters_read"], told["scores"], told["faults"]["total"]) > 0
    assert told["conditions"]["seed"] == "ci"


def test_an_interrupted_soak_tells_what_was_done(tmp_path: Path) -> None:
    process = start(tmp_path, "--minutes", "60", "--seed", "ci")
    assert process.stderr is not None
    for line in process.stderr:
        # Told every ten seconds: by the second time there was something to tell of.
        if " episodes, " in line and not line.startswith("soak:   0% 0 episodes"):
            break
    process.send_signal(signal.SIGINT)
    said, complained = process.communicate()
    told = json.loads(said)
    assert process.returncode == 0, complained[-4000:]
    assert {name: told[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert told["conditions"]["played_s"] < 3600
