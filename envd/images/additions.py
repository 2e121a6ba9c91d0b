"""What a user adds to an image: packages, files and a script. The recipe's digest covers all of it."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from envd.base.errors import ImageError
from envd.images.recipe import USER_SCRIPT, ImageRecipe

#: A package, or a version of it as apt names it: `vim`, `vim=2:9.0.1378-2`.
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(?:=[A-Za-z0-9.+:~-]+)?")
_OURS = "usr/lib/envd/"
_HOME = "home/user/"
_MAX_BYTES = 1 << 30
_MAX_SCRIPT_BYTES = 1 << 20


def with_packages(recipe: ImageRecipe, packages: Sequence[str]) -> ImageRecipe:
    """Return a recipe with more packages of its distribution. Raises: ImageError: A name is not that of a package."""
    for package in packages:
        if not _PACKAGE.fullmatch(package):
            raise ImageError(f"package {package!r}: not a package name; write NAME or NAME=VERSION")
    return replace(recipe, packages=tuple(dict.fromkeys((*recipe.packages, *packages))))


def added_files(directory: Path | None, script: Path | None) -> dict[str, bytes]:
    """Return the files that a user adds, by absolute path without the leading slash; the user's home is `etc/skel`.

    Args:
        directory: A tree of files, laid out as the guest's root: `etc/motd`, `home/user/.config/...`. Its files
            replace others.
        script: A program that runs in the new root as root, after everything is installed.

    Raises:
        ImageError: A file is a link, is not an ordinary one, cannot be read, or replaces a file of envd.
    """
    found: dict[str, bytes] = {}
    try:
        if directory is not None:
            found.update(_tree(directory))
        if script is not None:
            found[USER_SCRIPT] = _script(script)
    except OSError as error:
        raise ImageError(f"{error.filename}: cannot be read: {error.strerror}; check the path") from error
    return found


def _tree(directory: Path) -> Iterator[tuple[str, bytes]]:
    if not directory.is_dir():
        raise ImageError(f"--files {directory}: not a directory; name one that is laid out as the guest's root")
    size_bytes = 0
    for file in sorted(directory.rglob("*")):
        path = file.relative_to(directory).as_posix()
        if file.is_symlink():
            raise ImageError(f"--files {file}: a link, which may lead outside {directory}; copy the file it names")
        if file.is_dir():
            continue
        if not file.is_file():
            raise ImageError(f"--files {file}: not an ordinary file; remove it")
        if path.startswith(_OURS):
            raise ImageError(f"--files {file}: /{_OURS} has envd's own files; choose another directory")
        size_bytes += file.stat().st_size
        if size_bytes > _MAX_BYTES:
            raise ImageError(f"--files {directory}: more than {_MAX_BYTES >> 20} MiB; have --run fetch large files")
        # The home directory is created from its skeleton, and belongs to the user then.
        home = path.startswith(_HOME)
        yield (f"etc/skel/{path.removeprefix(_HOME)}" if home else path), file.read_bytes()


def _script(file: Path) -> bytes:
    data = file.read_bytes()
    if len(data) > _MAX_SCRIPT_BYTES or not data.startswith(b"#!"):
        raise ImageError(f"--run {file}: not a script that begins with #!, such as #!/bin/sh; add that line")
    return data
