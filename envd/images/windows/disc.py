"""Reads ISO files: the files in them, and the boot image that starts without "Press any key".

Windows' own ISOs have their files in a UDF file system, others in Joliet, Rock Ridge or plain ISO 9660. Names are
compared without regard to case, as Windows does.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pycdlib

from envd.base.errors import ImageError

SECTOR_BYTES = 2048
#: Boot image for UEFI without the prompt "Press any key to boot from CD or DVD", in Windows' ISOs.
NO_PROMPT_IMAGE = "efi/microsoft/boot/efisys_noprompt.bin"
_EL_TORITO_SECTOR = 17
_EFI_PLATFORM = 0xEF


class Disc:
    """An open ISO file."""

    def __init__(self, path: Path, iso: pycdlib.PyCdlib) -> None:
        self.path = path
        self._iso = iso
        if iso.has_udf():
            self._kind = "udf_path"
        elif iso.has_joliet():
            self._kind = "joliet_path"
        else:
            self._kind = "rr_path" if iso.has_rock_ridge() else "iso_path"
        self._paths: dict[str, str] = {}
        self._files: dict[str, list[str]] = {}
        for directory, _, names in iso.walk(**{self._kind: "/"}):
            parent = directory.rstrip("/")
            self._paths[_key(parent)] = parent
            self._files[_key(parent)] = [f"{parent}/{name}" for name in names]
            self._paths.update((_key(path), path) for path in self._files[_key(parent)])

    def find(self, path: str) -> str | None:
        """Return the path as it is written in the ISO; None if there is no such file or directory."""
        return self._paths.get(_key(path))

    def files(self, directory: str) -> list[str]:
        """Return the paths of the files in a directory, without those in its subdirectories."""
        return self._files.get(_key(directory), [])

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        with self._iso.open_file_from_iso(**{self._kind: path}) as stream:
            yield stream

    def sector(self, path: str) -> int:
        return int(self._record(path).inode.extent_location())

    def _record(self, path: str) -> Any:
        return self._iso.get_record(**{self._kind: path})


def _key(path: str) -> str:
    """Return a path as names are compared: without case, slashes at its ends and ISO 9660's version."""
    return path.partition(";")[0].strip("/").casefold()


@contextmanager
def open_disc(path: Path) -> Iterator[Disc]:
    """Yield an open ISO file. Raises: ImageError: it cannot be read, or it is not an ISO file."""
    iso = pycdlib.PyCdlib()
    try:
        iso.open(str(path))
        disc = Disc(path, iso)
    except OSError as error:
        raise ImageError(f"ISO {path}: cannot be read: {error.strerror}; check the path") from error
    # pycdlib raises IndexError, struct.error and others on damaged files.
    except Exception as error:
        raise ImageError(f"ISO {path}: not an ISO file, or damaged ({error}); download it again") from error
    try:
        yield disc
    finally:
        iso.close()


@dataclass(frozen=True, slots=True)
class BootPatch:
    """Bytes of an ISO file to replace, so that its boot catalogue names the boot image without a prompt."""

    offset: int
    data: bytes


def no_prompt_patch(disc: Disc) -> BootPatch:
    """Return the change that makes firmware start an ISO without waiting for a key.

    Raises:
        ImageError: The ISO does not boot with UEFI, or it has no such boot image.
    """
    path = disc.find(NO_PROMPT_IMAGE)
    if path is None:
        raise ImageError(f"ISO {disc.path}: no {NO_PROMPT_IMAGE} in it; use an unmodified ISO from Microsoft")
    with disc.path.open("rb") as stream:
        stream.seek(_EL_TORITO_SECTOR * SECTOR_BYTES)
        record = stream.read(SECTOR_BYTES)
        if record[7:30] == b"EL TORITO SPECIFICATION":
            catalogue = int.from_bytes(record[0x47:0x4B], "little")
            stream.seek(catalogue * SECTOR_BYTES)
            entry = _efi_entry(stream.read(SECTOR_BYTES))
            if entry is not None:
                # The load address is at byte 8 of an entry (El Torito 1.0, figure 5).
                offset = catalogue * SECTOR_BYTES + entry + 8
                return BootPatch(offset, struct.pack("<I", disc.sector(path)))
    raise ImageError(f"ISO {disc.path}: not bootable with UEFI; use an unmodified 64-bit ISO from Microsoft")


def _efi_entry(catalogue: bytes) -> int | None:
    """Return the offset of the first bootable entry for UEFI in a boot catalogue."""
    platform, expected = catalogue[1], 1
    for offset in range(32, len(catalogue), 32):
        entry = catalogue[offset : offset + 32]
        if entry[0] in {0x90, 0x91}:  # Header of a section.
            platform, expected = entry[1], int.from_bytes(entry[2:4], "little")
        elif expected and entry[0] == 0x88:
            if platform == _EFI_PLATFORM:
                return offset
            expected -= 1
        elif not expected:
            return None
    return None
