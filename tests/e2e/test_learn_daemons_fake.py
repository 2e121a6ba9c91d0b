"""The daemons that `trainer learn` starts, and what a killed run leaves of them."""

import subprocess
import sys
from pathlib import Path

import grpc

from trainer.learn.daemons import started_daemons
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
