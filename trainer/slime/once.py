"""Checks that are made once per process: of engines, daemons and data."""

from collections.abc import Awaitable, Callable, Hashable

_done: set[Hashable] = set()


async def once(key: Hashable, check: Callable[[], Awaitable[bool]]) -> None:
    """Make a check unless one of that key runs or has succeeded. Others do not wait for it.

    Args:
        key: Identifies the check and what it examines.
        check: Returns whether the check could be made. If not, or if it raises, the next call repeats it: an engine or
            a daemon may start later than the first sample.
    """
    if key in _done:
        return
    _done.add(key)
    succeeded = False
    try:
        succeeded = await check()
    finally:
        if not succeeded:
            _done.discard(key)
