"""The daemons that `trainer learn` starts, and what a killed run leaves of them."""

import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from trainer.data.oracles import read_oracles
from trainer.learn import LearnError
from trainer.learn.daemons import print_oracles, started_daemons
from trainer.learn.settings import SMOKE

START = """\
import sys, time
from pathlib import Path
from trainer.learn.daemons import started_daemons
from trainer.learn.settings import SMOKE
with started_daemons(Path(sys.argv[1]), SMOKE) as addresses:
    print(*addresses, flush=True)
    time.sleep(300)
"""


def test_a_run_that_was_killed_can_be_started_again_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        addresses = run.stdout.readline().split()
        assert addresses
        run.kill()
    with started_daemons(tmp_path, SMOKE) as again:
        assert len(again) == len(addresses)
        for address in again:
            with grpc.insecure_channel(address) as channel:
                grpc.channel_ready_future(channel).result(timeout=30)


@pytest.mark.parametrize("suite", ["drawn", pytest.param("desktop", marks=pytest.mark.long)])
def test_oracles_are_printed_for_suites_of_drawn_and_of_real_desktops(suite: str, tmp_path: Path) -> None:
    print_oracles(tmp_path / "oracles.jsonl", suite=suite, seeds=range(2))
    tasks = {oracle.task_id for oracle in read_oracles(tmp_path / "oracles.jsonl")}
    assert any(task.endswith("?seed=1") for task in tasks)
    assert {task.partition("/")[0] for task in tasks} == {suite}


def test_a_suite_without_oracles_is_named(tmp_path: Path) -> None:
    with pytest.raises(LearnError, match="drawing: no task of it has an oracle"):
        print_oracles(tmp_path / "oracles.jsonl", suite="drawing", seeds=range(2))
    assert not (tmp_path / "oracles.jsonl").exists()
