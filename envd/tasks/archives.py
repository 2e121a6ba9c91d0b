"""Archives of a suite's files for a guest: ordinary files alone, owned by root, and limited in number and size."""

import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

#: Largest archive of one directory: it is the standard input of one command in the guest.
MAX_ARCHIVE_BYTES: Final = 16 << 20
MAX_FILE_COUNT: Final = 2000

_NOTHING: Mapping[str, bytes] = {}


def archive(root: Path, parts: Sequence[tuple[str, str]], *, extra: Mapping[str, bytes] = _NOTHING) -> bytes:
    """Return a tar archive of a directory's parts, and of `extra` files. Raises: see `entries`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, name in entries(root, parts):
            tar.add(path, arcname=name, recursive=False, filter=_owned_by_root)
        for name, data in extra.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def entries(root: Path, parts: Sequence[tuple[str, str]]) -> Iterator[tuple[Path, str]]:
    """Yield the paths of a directory's parts and their names in an archive.

    Args:
        parts: Files and directories, each with its name in the archive; one that does not exist is left out.

    Raises:
        ValueError: A link or special file is among them, or they are too many or too large.
    """
    size_bytes = count = 0
    for part, name in parts:
        for path in _files(root / part):
            size_bytes, count = size_bytes + path.stat().st_size, count + 1
            if size_bytes > MAX_ARCHIVE_BYTES or count > MAX_FILE_COUNT:
                raise ValueError(f"{part} has more than {MAX_ARCHIVE_BYTES >> 20} MiB or {MAX_FILE_COUNT} files")
            yield path, str(Path(name) / path.relative_to(root / part))


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


def _files(path: Path) -> Iterator[Path]:
    """Yield a file itself, or everything below a directory. Raises: ValueError: A link or special file is among it."""
    if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
        raise ValueError(f"{path.name} is a link or no ordinary file")
    if path.is_file():
        yield path
    elif path.is_dir():
        for each in sorted(path.rglob("*")):
            if each.is_symlink() or not (each.is_file() or each.is_dir()):
                raise ValueError(f"{each.relative_to(path.parent)} is a link or no ordinary file")
            yield each
