"""The event loop's descriptors lie above those that libvirt's children use; a process that cannot end is ended."""

import queue
import subprocess
import sys
import time

import pytest

from envd.daemon.process import ended_by_force

PROGRAM = """
import os, sys
from envd.daemon.process import reserve_low_descriptors
import uvloop
if sys.argv[1] == "reserved":
    reserve_low_descriptors()
loop = uvloop.new_event_loop()
targets = {}
for number in range(3, 256):
    try:
        targets[number] = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        pass
print(min(number for number, target in targets.items() if target.startswith("pipe:")))
loop.close()
"""


@pytest.mark.parametrize(("mode", "is_low"), [("reserved", False), ("free", True)])
def test_the_signal_pipe_of_the_event_loop_has_a_high_number_only_if_low_ones_are_reserved(
    mode: str, is_low: bool
) -> None:
    command = [sys.executable, "-c", PROGRAM, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert (int(done.stdout) < 32) is is_low


def test_a_process_ends_by_force_only_when_no_machine_has_ended_for_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    left = ["m-1", "m-2", "m-3"]
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    with ended_by_force(lambda: tuple(left), drain_s=0.2, limit_s=0.6, end=ended.put):
        for _ in range(2):
            time.sleep(0.5)
            assert ended.empty()
            left.pop()
        assert ended.get(timeout=30) == 1
    assert "did not stop within 0.6 s: machines m-1 are not destroyed" in caplog.text


def test_a_process_whose_daemon_has_stopped_continues() -> None:
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    with ended_by_force(lambda: (), drain_s=0.0, limit_s=0.2, end=ended.put):
        pass
    time.sleep(0.6)
    assert ended.empty()
