"""The commands `guest-file-*`."""

import base64
import itertools
from typing import BinaryIO

from .drive import Drive
from .errors import AgentError, NotFoundError

_MODES = {"r": "rb", "w": "wb", "a": "ab"}
_DEFAULT_COUNT = 4096


class Files:
    """Open files by handle."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._handles = itertools.count(1000)
        self._open: dict[int, BinaryIO] = {}

    def open(self, path: str, mode: str = "r") -> int:
        """Open a file and return its handle. Raises: AgentError, OSError."""
        file = self._drive.path(path)
        if file.is_dir():
            raise AgentError(f"failed to open file '{path}' (mode: '{mode}'): Access is denied.")
        flags = _MODES.get(mode.rstrip("+"))
        if flags is None:
            raise AgentError(f"invalid file open mode '{mode}'")
        is_new = not file.exists()
        try:
            stream = file.open(flags + mode[1:], buffering=0)
        except FileNotFoundError:
            raise NotFoundError(path, is_directory=not file.parent.is_dir()) from None
        if is_new:
            self._drive.give(file)
        handle = next(self._handles)
        self._open[handle] = stream  # type: ignore[assignment]
        return handle

    def read(self, handle: int, count: int = _DEFAULT_COUNT) -> dict[str, object]:
        """Return the next bytes of a file. Raises: AgentError, OSError."""
        data = self._file(handle).read(count)
        return {"count": len(data), "buf-b64": base64.b64encode(data).decode(), "eof": len(data) < count}

    def write(self, handle: int, buf_b64: str, count: int | None = None) -> dict[str, object]:
        """Write bytes to a file. Raises: AgentError, OSError."""
        return {"count": self._file(handle).write(base64.b64decode(buf_b64)[:count]), "eof": False}

    def flush(self, handle: int) -> dict[str, object]:
        """Do nothing: files have no buffer here. Raises: AgentError."""
        self._file(handle)
        return {}

    def close(self, handle: int) -> dict[str, object]:
        """Close a file. Raises: AgentError."""
        self._file(handle).close()
        del self._open[handle]
        return {}

    def _file(self, handle: int) -> BinaryIO:
        if handle not in self._open:
            raise AgentError(f"handle '{handle}' has not been found")
        return self._open[handle]
