"""`envd soak` on drawn desktops, as its users meet it: two minutes of it pass, and Ctrl-C ends one with a report."""

import time
from pathlib import Path

import pytest

from envd.testing.soak import SoakProcess, SoakRun

pytestmark = pytest.mark.timeout(360)

ZEROS = ("duplicated_actions", "lost_actions", "fake_zero_rewards", "leftovers", "unexplained_errors")


def test_an_interrupted_soak_tells_what_was_done(tmp_path: Path) -> None:
    interrupted = SoakProcess(tmp_path, "--minutes", "60", "--seed", "ci")
    # Told every ten seconds: by the second time there was something to tell of.
    while not any(" episodes, " in line and " 0 episodes" not in line for line in interrupted.log.splitlines()):
        assert interrupted.status is None
        time.sleep(0.2)
    interrupted.interrupt()
    told = interrupted.report()
    assert interrupted.status == 0, interrupted.log[-4000:]
    assert {name: told[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert told["conditions"]["played_s"] < 3600


def test_two_minutes_of_random_episodes_under_faults_leave_nothing_to_explain(soak: SoakRun) -> None:
    told = soak.report()
    assert [told["problems"], told["unexplained"]] == [{"actions": [], "rewards": [], "leftovers": []}, []]
    assert {name: told[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0), soak.log[-4000:]
    assert soak.status == 0
    assert told["passed"] is True
    assert min(told["episodes"], told["steps"], told["counters_read"], told["scores"], told["faults"]["total"]) > 0
    assert told["conditions"]["seed"] == "ci"
    assert told["conditions"]["played_s"] >= 120
