"""Killing a process: its sockets outlive it until its end has been handled."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from envd.hypervisor.qemu.processes import killed, process_ended, process_exits


@contextmanager
def sleeper(*, inherits: socket.socket) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a process with a socket; yields it and its pidfd."""
    process = subprocess.Popen(["sleep", "600"], pass_fds=[inherits.fileno()])
    handle = os.pidfd_open(process.pid)
    try:
        yield process, handle
    finally:
        process.kill()
        process.wait()
        os.close(handle)


def test_the_sockets_of_a_killed_process_stay_open_during_the_block() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, sleeper(inherits=theirs) as (process, handle):
        theirs.close()
        ours.setblocking(False)
        collecting = threading.Thread(target=process.wait)
        collecting.start()
        with killed(process.pid, handle) as has_ended:
            assert has_ended
            collecting.join()
            with pytest.raises(BlockingIOError):
                ours.recv(1)
        assert ours.recv(1) == b"", "now they are closed"


def test_a_process_that_has_already_ended_raises_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, sleeper(inherits=theirs) as (process, handle):
        process.kill()
        process.wait()
        with killed(process.pid, handle) as has_ended:
            assert has_ended


#: Ends its first thread alone, so that the process stays in the middle of its exit.
_ENDLESS_EXIT = """
import ctypes, threading, time

threading.Thread(target=time.sleep, args=(600,)).start()
print("started", flush=True)
ctypes.CDLL(None).syscall(60, 0)
"""


def test_a_process_that_still_exits_is_recognised() -> None:
    with subprocess.Popen([sys.executable, "-c", _ENDLESS_EXIT], stdout=subprocess.PIPE) as process:
        try:
            assert not process_exits(os.getpid())
            assert process.stdout is not None
            assert process.stdout.readline() == b"started\n"
            while not process_exits(process.pid):
                pass
            handle = os.pidfd_open(process.pid)
            try:
                assert not process_ended(handle, within_s=0)
            finally:
                os.close(handle)
        finally:
            process.kill()
    assert process_exits(process.pid), "a process that is gone"
