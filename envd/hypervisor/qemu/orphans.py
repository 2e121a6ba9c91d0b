"""Collects ended QEMU processes of the embedded driver.

libvirt starts QEMU as a daemon, so process 1 would have to collect it, and libvirt counts a process as running until
then. Process 1 of a container collects late or never: 1.6 s a machine on one host. As a subreaper (prctl(2)) this
process is the parent instead, and collects at once.
"""

import ctypes
import os
import threading
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
#: How long another part of this process may take to collect a child of its own before the next look.
_PAUSE_S = 0.05
#: The next look while there are no children; a machine's start takes longer.
_IDLE_S = 1.0
#: A program that we started leaves orphans that look like our own children; their parent collects those sooner.
_LINGER_S = 60.0


@lru_cache(maxsize=1)
def collect_orphans() -> None:
    """Adopt and collect all orphans from now on, in a thread. Calls after the first change nothing.

    Raises:
        OSError: The kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    threading.Thread(target=_run, name="orphans", daemon=True).start()


def _run() -> None:
    seen: dict[int, float] = {}
    while True:
        try:
            # Returns at once while any child has ended and is not collected.
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            time.sleep(_IDLE_S)
            continue
        ended = _ended_children()
        now_s = time.monotonic()
        seen = {pid: seen.get(pid, now_s) for pid in ended}
        for pid, is_daemon in ended.items():
            if is_daemon or now_s - seen[pid] > _LINGER_S:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        if not all(ended.values()) or not ended:
            time.sleep(_PAUSE_S)


def _ended_children() -> dict[int, bool]:
    """Return {process id: whether it is a daemon} of the children that have ended.

    The leader of a daemon's session is the process in between, which has ended. A child that this process started is
    in our session or leads its own.
    """
    ended = {}
    for listed in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # The thread has ended.
            for pid in map(int, listed.read_text().split()):
                with suppress(OSError):  # It was collected.
                    # The name before the last ")" may contain anything.
                    state, *_, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
                    if state == "Z":
                        ended[pid] = int(session) not in {pid, os.getsid(0)}
    return ended
