"""Connects to Unix sockets in directories that a guest can write to."""

import asyncio
import errno
import os
import stat
from pathlib import Path

_LIMIT_BYTES = 1 << 16


async def connect(path: Path, *, limit: int = _LIMIT_BYTES) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a socket, and never to another one that a link in its place names: a guest's root may put one there.

    Args:
        path: Of its components, the guest can replace only the last.
        limit: See `asyncio.StreamReader`.

    Raises:
        OSError: It does not exist, is not a socket, or refuses the connection.
    """
    handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(handle).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), str(path))
        # The kernel resolves this to what was opened, whatever the path names by now.
        return await asyncio.open_unix_connection(f"/proc/self/fd/{handle}", limit=limit)
    finally:
        os.close(handle)
