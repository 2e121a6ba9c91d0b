"""Disk of a fake guest: files in memory."""

import hashlib
import posixpath
from collections.abc import Iterator, MutableMapping

HOME = "/home/user"

_URANDOM = "/dev/urandom"
_DEVICES = frozenset({"/dev/null", _URANDOM})


class DrawnFiles(MutableMapping[str, bytes]):
    """Files by absolute path. A directory exists if it was created or if a file has it as an ancestor."""

    def __init__(self) -> None:
        self.entropy = b""
        """State of the guest's random number generator; every write to /dev/urandom changes it."""
        self._files: dict[str, bytes] = {}
        self._directories = {"/", HOME, "/dev", "/dev/shm", "/tmp"}  # noqa: S108  (paths in the guest)
        self._shared: dict[str, bytes] = {}

    def __getitem__(self, path: str) -> bytes:
        path = resolve(path)
        return b"" if path in _DEVICES else self._files[path]

    def __setitem__(self, path: str, data: bytes) -> None:
        path = resolve(path)
        if path == _URANDOM and data:
            self.entropy = hashlib.sha256(self.entropy + data).digest()
        if path not in _DEVICES:
            self._files[path] = data

    def __delitem__(self, path: str) -> None:
        del self._files[resolve(path)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self._files.values()))

    @property
    def own_bytes(self) -> int:
        """Bytes in files written since `share`."""
        return sum(len(data) for path, data in self._files.items() if self._shared.get(path) is not data)

    @property
    def directories(self) -> frozenset[str]:
        """Created directories."""
        return frozenset(self._directories)

    def share(self) -> None:
        """Mark the current files as shared with another guest."""
        self._shared = dict(self._files)

    def is_directory(self, path: str) -> bool:
        path = resolve(path)
        return path in self._directories or any(name.startswith(path.rstrip("/") + "/") for name in self._files)

    def make_directory(self, path: str) -> None:
        path = resolve(path)
        while path not in self._directories:
            self._directories.add(path)
            path = posixpath.dirname(path)

    def list_directory(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        prefix = resolve(path).rstrip("/") + "/"
        below = [name for name in (*self._files, *self._directories) if name.startswith(prefix) and name != prefix]
        return sorted({name[len(prefix) :].partition("/")[0] for name in below})

    def remove_tree(self, path: str) -> None:
        """Remove a file or a directory with its content. Does nothing if it does not exist."""
        path = resolve(path)
        removed = [name for name in self._files if name == path or name.startswith(path + "/")]
        for name in removed:
            del self._files[name]
        self._directories = {name for name in self._directories if name != path and not name.startswith(path + "/")}


def resolve(path: str) -> str:
    """Return the absolute path: `~` is the user's home, and relative paths are relative to it."""
    if path == "~" or path.startswith("~/"):
        path = HOME + path[1:]
    return posixpath.normpath(posixpath.join(HOME, path))
