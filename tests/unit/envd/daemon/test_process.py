"""The event loop's descriptors lie above those that libvirt's children use; a process that cannot end is ended."""

import queue
import subprocess
import sys
import threading
from itertools import count
from types import SimpleNamespace

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


def test_a_process_ends_by_force_only_when_no_machine_has_ended_for_the_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = ["m-1", "m-2", "m-3"]
    now_s = 0.0
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def machine_ids() -> tuple[str, ...]:
        """Advance the clock by a check, a quarter of the limit; the first two machines end shortly before a limit."""
        nonlocal now_s
        now_s += 0.125
        if now_s in (0.75, 1.125):
            left.pop()
        return tuple(left)

    monkeypatch.setattr("envd.daemon.process.time", SimpleNamespace(monotonic=lambda: now_s))
    with ended_by_force(machine_ids, drain_s=0.25, limit_s=0.5, end=ended.put):
        assert ended.get(timeout=60) == 1
    assert now_s == 1.125 + 0.5
    assert "did not stop within 0.5 s: machines m-1 are not destroyed" in caplog.text


def test_a_process_whose_daemon_has_stopped_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if its deadline has passed before the watch looks again, as on a host without free CPU time."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    has_stopped = threading.Event()

    def machine_ids() -> tuple[str, ...]:
        has_stopped.wait(60)
        return ()

    monkeypatch.setattr("envd.daemon.process.time", SimpleNamespace(monotonic=count(step=1000).__next__))
    others = set(threading.enumerate())
    with ended_by_force(machine_ids, drain_s=0.0, limit_s=0.2, end=ended.put):
        [watch] = set(threading.enumerate()) - others
    has_stopped.set()
    watch.join(60)
    assert not watch.is_alive()
    assert ended.empty()
