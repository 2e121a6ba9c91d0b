"""The event loop's descriptors lie above those that libvirt's children use."""

import subprocess
import sys

import pytest

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
