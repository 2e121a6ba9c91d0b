"""Paths of Windows as files of Debian, the commands `guest-file-*`, and the errors that the host receives as text."""

import base64
import itertools
import os
import pwd
import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_PROGRAM_DIRECTORIES = (r"C:\windows\system32", r"C:\windows")
_MODES = {"r": "rb", "w": "wb", "a": "ab"}
_DEFAULT_COUNT = 4096


class AgentError(Exception):
    """A command that cannot be performed; the host receives the message."""


class NotFoundError(AgentError):
    """A path that does not exist, in the words of Windows, which the host recognises."""

    def __init__(self, path: str, *, is_directory: bool = False) -> None:
        thing = "path" if is_directory else "file"
        super().__init__(f"failed to open file '{path}': The system cannot find the {thing} specified.")


class Drive:
    """The drive `C:` of a Wine prefix, and the user that owns it."""

    def __init__(self, prefix: Path, user: str) -> None:
        self.prefix = prefix
        self.root = prefix / "drive_c"
        self.user = pwd.getpwnam(user)

    def path(self, path: str) -> Path:
        """Return the file of a Windows path, whatever the letters' case; a path that begins with `/` is Debian's.

        Parts that do not exist are taken as they are.

        Raises:
            NotFoundError: The path is not on drive C:.
        """
        if path.startswith("/"):
            return Path(path)
        match = re.fullmatch(r"(?:\\\\\?\\)?[Cc]:[\\/](.*)", path, re.DOTALL)
        if match is None:
            raise NotFoundError(path, is_directory=True)
        found = self.root
        for part in re.split(r"[\\/]+", match[1]):
            if part == "..":
                found = found if found == self.root else found.parent
            elif part not in ("", "."):
                found = self._child(found, part)
        return found

    def program(self, name: str) -> str | None:
        """Return the Windows path of a program by path or by name, with or without `.exe`; None if there is none."""
        directories = ("",) if re.match(r"[A-Za-z]:[\\/]", name) else tuple(f"{at}\\" for at in _PROGRAM_DIRECTORIES)
        for directory in directories:
            for ending in ("", ".exe"):
                with suppress(NotFoundError):
                    if self.path(f"{directory}{name}{ending}").is_file():
                        return f"{directory}{name}{ending}"
        return None

    def make_directories(self, path: Path) -> None:
        if not path.is_dir():
            self.make_directories(path.parent)
            path.mkdir()
            self.give(path)

    def give(self, path: Path) -> None:
        """Make the user the owner of a file on the drive. Raises: OSError."""
        if os.geteuid() == 0 and path.is_relative_to(self.root):
            os.chown(path, self.user.pw_uid, self.user.pw_gid)

    @staticmethod
    def _child(directory: Path, name: str) -> Path:
        exact = directory / name
        if not os.path.lexists(exact):
            with suppress(OSError):
                return next((entry for entry in directory.iterdir() if entry.name.casefold() == name.casefold()), exact)
        return exact


class Files:
    """Open files by handle."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._handles = itertools.count(1000)
        self._open: dict[int, BinaryIO] = {}

    def open(self, path: str, mode: str = "r") -> int:
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
        data = self._file(handle).read(count)
        return {"count": len(data), "buf-b64": base64.b64encode(data).decode(), "eof": len(data) < count}

    def write(self, handle: int, buf_b64: str, count: int | None = None) -> dict[str, object]:
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
