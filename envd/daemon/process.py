"""The process of a daemon: its garbage collector, its descriptors, and its end if something does not let it end."""

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

logger = logging.getLogger(__name__)

#: libvirt's children use only a few, and the lowest.
LOWEST: Final = 32


#: How many collections of young objects precede one of all objects; Python's default is 10.
_YOUNG_COLLECTIONS_PER_FULL_ONE = 50


def prepare_process() -> None:
    """Prepare this process for a daemon. Call once all modules are imported, before the first event loop starts."""
    _freeze_gc()
    reserve_low_descriptors()


def _freeze_gc() -> None:
    """Shorten pauses of the garbage collector: exempt all present objects from further collections.

    Imported modules are more than half of all objects, even with 128 fake desktops. Rarer collections of new objects
    would not help: one after ten times as many took 40 ms instead of 1 or 2, because it scans the coroutines of all
    calls. Only collections of all objects are made rarer: with 256 clients one takes 60 to 110 ms, and the pixels
    of closed desktops do not wait for it.
    """
    gc.collect()
    gc.freeze()
    new, young, _ = gc.get_threshold()
    gc.set_threshold(new, young, _YOUNG_COLLECTIONS_PER_FULL_ONE)


def reserve_low_descriptors() -> None:
    """Fill all descriptors below `LOWEST` for the life of the process. Call before the first event loop starts.

    libuv closes its signal pipe by number in every forked child and opens another (`uv__signal_global_reinit`). To
    start QEMU, libvirt's child closes all descriptors, opens a pipe, which gets the lowest numbers, and forks once
    more. If these are the numbers of libuv's pipe, QEMU does not start: "Unable to notify child process: Bad file
    descriptor". Seen with libvirt 9.0 and uvloop 0.23 where io_uring is refused, as container runtimes do: libuv's pipe
    then has lower numbers.
    """
    while (number := os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)) < LOWEST:
        pass
    os.close(number)


@contextmanager
def ended_by_force(
    machine_ids: Callable[[], Sequence[str]], *, drain_s: float, limit_s: float, end: Callable[[int], object] = os._exit
) -> Iterator[None]:
    """End this process with status 1 if, after `drain_s`, no machine ends for `limit_s` and neither does the block.

    A kernel or a libvirtd that does not answer can keep a machine, a task or a thread from ending. What is
    left carries the daemon's mark, and the next start removes it.
    """
    has_ended = threading.Event()

    def watch() -> None:
        left, deadline_s = machine_ids(), time.monotonic() + drain_s + limit_s
        while True:
            if has_ended.wait(min(0.5, limit_s / 4)):
                return
            if (now_left := machine_ids()) != left:
                left, deadline_s = now_left, max(deadline_s, time.monotonic() + limit_s)
            # After the wait: without free CPU time, this thread may sleep past the deadline, while the block ends.
            if time.monotonic() >= deadline_s:
                break
        logger.critical(
            "the daemon did not stop within %g s: %s; it ends now, and the next start with its state directory removes"
            " what is left",
            limit_s,
            f"machines {', '.join(left)} are not destroyed"
            if left
            else "its machines are gone, but not all of its parts",
        )
        end(1)

    threading.Thread(target=watch, name="end", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()
