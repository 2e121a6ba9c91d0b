"""Pictures of requests in files, for engines that share a directory with this process."""

import atexit
import fcntl
import itertools
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image


def _lock(directory: Path, *, wait: bool = True) -> int:
    """Lock a directory against other processes; return the descriptor that holds the lock until it is closed.

    Raises:
        OSError: It is locked, and `wait` is false.
    """
    held = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(held)
        raise
    return held


@contextmanager
def _locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a directory within the block. Raises: OSError: See `_lock`."""
    held = _lock(directory, wait=wait)
    try:
        yield
    finally:
        os.close(held)


class PictureFiles:
    """Pictures in files that the engines read too: a request then names the pictures of its row.

    SGLang's `/generate` takes `file://` addresses. Each picture is written once; a request with its pictures repeats
    all of them at each turn. A process has a directory of its own below the given one, which it removes when it ends.
    That of a killed process is removed by the next one on the host.
    """

    def __init__(self, directory: str) -> None:
        """Remove what killed processes of this host left, and make a directory. Raises: OSError."""
        root, host = Path(directory).expanduser().resolve(), socket.gethostname()
        root.mkdir(parents=True, exist_ok=True)
        self._directory = root / f"{host}-{uuid.uuid4().hex}"
        # A lock, not a process id, shows that a directory is in use: containers share hosts' names and have own ids.
        with _locked(root):
            for left in root.iterdir():
                # Host rollout-0 must not touch rollout-0-worker-77, which is another host's.
                if re.fullmatch(rf"{re.escape(host)}-[0-9a-f]{{32}}", left.name):
                    with suppress(OSError), _locked(left, wait=False):
                        shutil.rmtree(left, ignore_errors=True)
            self._directory.mkdir()
            # Until the process ends, which closes it.
            _lock(self._directory)
        self._numbers = itertools.count()
        atexit.register(shutil.rmtree, self._directory, ignore_errors=True)

    def add(self, image: "Image.Image") -> bytes:
        """Write an image as PNG; return its address. Raises: OSError."""
        from cuaenv.frames.pillow import png_of  # noqa: PLC0415 -- numpy

        path = self._directory / f"{next(self._numbers)}.png"
        path.write_bytes(png_of(image))
        return path.as_uri().encode("ascii")

    def remove(self, addresses: Iterable[bytes]) -> None:
        """Remove files that no request names any more."""
        for address in addresses:
            with suppress(OSError):
                (self._directory / address.decode("ascii").rpartition("/")[2]).unlink()
