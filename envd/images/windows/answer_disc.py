"""Makes the answer disc: a CD with the answer file, drivers, the guest agent, programs and our scripts.

A CD, because a removable disk would be disk 0 until Setup has loaded the driver of the machine's own disk. It holds the
password of the new account, so only its owner can read it, and the build removes it.
"""

import json
import shlex
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path, PurePosixPath

import pycdlib

from envd.base.errors import ImageError
from envd.images.windows.answers import ANSWER_FILE, GUEST_DIRECTORY, SETUP_DRIVER_DIRECTORY
from envd.images.windows.disc import Disc
from envd.images.windows.drivers import LOGON_DRIVERS, SETUP_DRIVERS, GuestFiles

VOLUME_LABEL = "ENVD"
_PROGRAM_SUFFIXES = (".msi", ".exe", ".ps1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that is installed at the first logon."""

    file: Path
    arguments: tuple[str, ...]


def parse_program(text: str) -> Program:
    """Return a program from `FILE [ARGUMENT...]`, quoted as in a shell. Raises: ImageError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ImageError(f"program {text!r}: {error}; close the quotation") from error
    file = Path(words[0]) if words else Path()
    if file.suffix.lower() not in _PROGRAM_SUFFIXES:
        raise ImageError(
            f"program {text!r}: unknown kind of installer; use a file that ends in {', '.join(_PROGRAM_SUFFIXES)}"
        )
    if not file.is_file():
        raise ImageError(f"program {file}: no such file; check the path")
    return Program(file=file, arguments=tuple(words[1:]))


def guest_scripts() -> dict[str, bytes]:
    """Return our files for the guest, encoded as Windows expects them, by name."""
    scripts = {}
    for item in files("envd.images.windows").joinpath("guest").iterdir():
        text = item.read_text(encoding="ascii").replace("\n", "\r\n")
        # `reg import` reads version 5.00 of its format as UTF-16.
        encoding = "utf-16" if item.name.endswith(".reg") else "ascii"
        scripts[item.name] = text.encode(encoding)
    return scripts


def write_answer_disc(
    path: Path,
    *,
    answers: bytes,
    guest_files: GuestFiles,
    drivers: Disc,
    is_server: bool,
    programs: tuple[Program, ...],
) -> None:
    """Write the answer disc."""
    tree: dict[str, bytes | Path] = {ANSWER_FILE: answers}
    manifest = {"drivers": list(LOGON_DRIVERS), "is_server": is_server, "programs": _programs(programs, tree)}
    tree[f"{GUEST_DIRECTORY}/manifest.json"] = json.dumps(manifest, indent=2).encode()
    for name, data in guest_scripts().items():
        tree[f"{GUEST_DIRECTORY}/{name}"] = data
    tree[f"{GUEST_DIRECTORY}/{PurePosixPath(guest_files.agent).name}"] = _read(drivers, guest_files.agent)
    for driver, paths in guest_files.drivers.items():
        parent = SETUP_DRIVER_DIRECTORY if driver in SETUP_DRIVERS else f"{GUEST_DIRECTORY}/drivers"
        for file in paths:
            tree[f"{parent}/{driver}/{PurePosixPath(file).name}"] = _read(drivers, file)
    _write_iso(path, tree)


def _programs(programs: tuple[Program, ...], tree: dict[str, bytes | Path]) -> list[dict[str, object]]:
    """Add the programs to the disc's files; return what the first logon needs to install them."""
    listed: list[dict[str, object]] = []
    for number, program in enumerate(programs, start=1):
        # A directory each: two programs may have the same file name.
        path = f"programs/{number}/{program.file.name}"
        tree[f"{GUEST_DIRECTORY}/{path}"] = program.file
        listed.append(
            {"name": program.file.name, "path": path.replace("/", "\\"), "arguments": list(program.arguments)}
        )
    return listed


def _read(disc: Disc, path: str) -> bytes:
    with disc.open(path) as stream:
        return stream.read()


def _write_iso(path: Path, tree: dict[str, bytes | Path]) -> None:
    iso = pycdlib.PyCdlib()
    iso.new(interchange_level=4, joliet=3, vol_ident=VOLUME_LABEL)
    directories: set[str] = set()
    for name, content in tree.items():
        for parent in reversed(PurePosixPath(name).parents):
            directory = f"/{parent}"
            if directory != "/." and directory not in directories:
                directories.add(directory)
                iso.add_directory(directory, joliet_path=directory)
        if isinstance(content, bytes):
            iso.add_fp(BytesIO(content), len(content), f"/{name}", joliet_path=f"/{name}")
        else:
            iso.add_file(str(content), f"/{name}", joliet_path=f"/{name}")
    path.touch(mode=0o600)
    iso.write(str(path))
    iso.close()
