"""Paths of Windows as files of Debian."""

import os
import pwd
import re
from contextlib import suppress
from pathlib import Path

from .errors import NotFoundError

_PROGRAM_DIRECTORIES = (r"C:\windows\system32", r"C:\windows")


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
        """Create a directory and its parents, owned by the user. Raises: OSError."""
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
