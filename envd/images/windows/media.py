"""Reads the media of an installation, the editions in Windows' ISO and the drivers in virtio-win's, and downloads both.

Windows' own ISOs have their files in a UDF file system, others in Joliet, Rock Ridge or plain ISO 9660. Names are
compared without regard to case, as Windows does. Evaluations need no product key; their licence terms are Microsoft's.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import aiohttp
import pycdlib
from lxml import etree

from envd.base.errors import ImageError

SECTOR_BYTES = 2048
#: Boot image for UEFI without the prompt "Press any key to boot from CD or DVD", in Windows' ISOs.
NO_PROMPT_IMAGE = "efi/microsoft/boot/efisys_noprompt.bin"
_EL_TORITO_SECTOR = 17
_EFI_PLATFORM = 0xEF

_IMAGE_FILES = ("sources/install.wim", "sources/install.esd", "sources/install.swm")
_WIM_MAGIC = b"MSWIM\0\0\0"
_WIM_HEADER_BYTES = 208
#: Offset of the resource header of the XML metadata (Microsoft's "Windows Imaging File Format"). It is not compressed.
_XML_HEADER_OFFSET = 72
_MAX_XML_BYTES = 16 << 20
#: Processor architectures of a WIM (winnt.h, PROCESSOR_ARCHITECTURE_*).
_ARCHITECTURES = {"0": "x86 (32-bit)", "5": "ARM (32-bit)", "9": "x64", "12": "ARM64"}

#: Drivers that Setup loads: without a disk it cannot install.
SETUP_DRIVERS = ("vioscsi",)
#: Drivers that are installed at the first logon. viogpudo would turn the screen black during Setup.
LOGON_DRIVERS = ("NetKVM", "vioserial", "viorng", "pvpanic", "viogpudo")
AGENT = "guest-agent/qemu-ga-x86_64.msi"

_CHUNK_BYTES = 1 << 20
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 30.0, 60.0

#: Gets the stage of a build, and its finished share in [0, 1].
Progress = Callable[[str, float], None]


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
        record: Any = self._iso.get_record(**{self._kind: path})
        return int(record.inode.extent_location())


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


def no_prompt_patch(disc: Disc) -> tuple[int, bytes]:
    """Return the change that makes firmware start an ISO without waiting for a key: an offset and the bytes for it.

    With them the boot catalogue names the boot image without a prompt.

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
                return offset, struct.pack("<I", disc.sector(path))
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


class Release(StrEnum):
    """Releases of Windows that can be built. The value is the default name of the image."""

    WINDOWS_10 = "win10"
    WINDOWS_11 = "win11"
    SERVER_2022 = "server2022"
    SERVER_2025 = "server2025"

    @property
    def is_server(self) -> bool:
        return self in {Release.SERVER_2022, Release.SERVER_2025}

    @property
    def driver_directory(self) -> str:
        """Name of its directory of each driver in a virtio-win ISO."""
        return {
            Release.WINDOWS_10: "w10",
            Release.WINDOWS_11: "w11",
            Release.SERVER_2022: "2k22",
            Release.SERVER_2025: "2k25",
        }[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edition:
    """One edition in an installation medium."""

    index: int
    name: str
    """Name that an answer file selects it by, such as `Windows 11 Enterprise Evaluation`."""
    edition_id: str
    """Identifier such as `EnterpriseEval`."""
    architecture: str
    build: int
    installation_type: str
    """`Client`, `Server` or `Server Core`."""
    languages: tuple[str, ...]
    default_language: str
    size_bytes: int
    """Size of its files when installed."""

    @property
    def release(self) -> Release:
        """The release that it belongs to. Raises: ImageError: it is not supported."""
        if self.installation_type.startswith("Server"):
            # Builds of Windows Server 2022 and 2025.
            releases = {20348: Release.SERVER_2022, 26100: Release.SERVER_2025}
            if release := releases.get(self.build):
                return release
        elif self.build >= 22000:
            return Release.WINDOWS_11
        elif self.build >= 19041:
            return Release.WINDOWS_10
        raise ImageError(
            f"edition {self.name}: build {self.build} is not supported; use an ISO of Windows 10 (2004 or newer), "
            "Windows 11, Windows Server 2022 or 2025"
        )

    @property
    def evaluation(self) -> timedelta | None:
        """The time after installation at which an evaluation expires; None for other editions."""
        if not self.edition_id.endswith("Eval"):
            return None
        return timedelta(days=180 if self.installation_type.startswith("Server") else 90)


def read_editions(stream: BinaryIO) -> tuple[Edition, ...]:
    """Return the editions in a WIM or ESD file. Raises: ImageError: it is malformed."""
    header = stream.read(_WIM_HEADER_BYTES)
    if len(header) < _WIM_HEADER_BYTES or header[:8] != _WIM_MAGIC:
        raise ImageError("installation image: not a WIM file; download the ISO again")
    packed_size, offset, size = struct.unpack_from("<QQQ", header, _XML_HEADER_OFFSET)
    # The highest byte holds flags.
    packed_size &= (1 << 56) - 1
    if not 0 < packed_size <= _MAX_XML_BYTES or packed_size != size:
        raise ImageError("installation image: its metadata is damaged; download the ISO again")
    stream.seek(offset)
    data = stream.read(packed_size)
    parser = etree.XMLParser(resolve_entities=False, no_network=True)
    try:
        root = etree.fromstring(data.decode("utf-16").encode(), parser)
        return tuple(_edition(image) for image in root.findall("IMAGE"))
    except (UnicodeDecodeError, etree.XMLSyntaxError, ValueError) as error:
        raise ImageError(f"installation image: its metadata is damaged: {error}; download the ISO again") from error


def editions_of(disc: Disc) -> tuple[Edition, ...]:
    """Return the editions in an installation ISO. Raises: ImageError: it has none, or none for x64."""
    path = next((found for name in _IMAGE_FILES if (found := disc.find(name))), None)
    if path is None:
        raise ImageError(f"ISO {disc.path}: no Windows in it (no {_IMAGE_FILES[0]}); use an installation ISO")
    if path.lower().endswith(".swm"):
        raise ImageError(
            f"ISO {disc.path}: its image is split into several files; use an unmodified ISO from Microsoft"
        )
    with disc.open(path) as stream:
        editions = read_editions(stream)
    other = sorted({edition.architecture for edition in editions} - {"x64"})
    if other or not editions:
        raise ImageError(f"ISO {disc.path}: made for {', '.join(other) or 'nothing'}; use an ISO for x64 (64-bit)")
    return editions


def choose_edition(editions: Sequence[Edition], wanted: str) -> Edition:
    """Return the edition with a name, identifier or index; without `wanted`, the only one.

    Raises:
        ImageError: None or several match; the message lists all editions.
    """
    listed = "; ".join(f"{edition.index}: {edition.name} ({edition.edition_id})" for edition in editions)
    if not wanted:
        if len(editions) == 1:
            return editions[0]
        raise ImageError(f"ISO: {len(editions)} editions; choose one with --edition ({listed})")
    matches = [edition for edition in editions if wanted == str(edition.index)] or [
        edition for edition in editions if wanted.casefold() in {edition.name.casefold(), edition.edition_id.casefold()}
    ]
    if len(matches) != 1:
        problem = "several editions match" if matches else "not in this ISO"
        raise ImageError(f"edition {wanted!r}: {problem}; choose one of: {listed}")
    return matches[0]


def _edition(image: etree._Element) -> Edition:
    def text(path: str) -> str:
        return (image.findtext(path) or "").strip()

    return Edition(
        index=int(str(image.get("INDEX"))),
        name=text("NAME"),
        edition_id=text("WINDOWS/EDITIONID"),
        architecture=_ARCHITECTURES.get(text("WINDOWS/ARCH"), f"architecture {text('WINDOWS/ARCH') or 'unknown'}"),
        build=int(text("WINDOWS/VERSION/BUILD") or 0),
        installation_type=text("WINDOWS/INSTALLATIONTYPE"),
        languages=tuple(str(element.text).strip() for element in image.findall("WINDOWS/LANGUAGES/LANGUAGE")),
        default_language=text("WINDOWS/LANGUAGES/DEFAULT"),
        size_bytes=int(text("TOTALBYTES") or 0),
    )


def find_guest_files(disc: Disc, release: Release) -> tuple[Mapping[str, tuple[str, ...]], str]:
    """Return the files of each driver for a release of Windows, and the guest agent: paths in a virtio-win ISO.

    Raises:
        ImageError: One is missing; the message lists all that are.
    """
    drivers = {
        name: tuple(disc.files(f"{name}/{release.driver_directory}/amd64")) for name in (*SETUP_DRIVERS, *LOGON_DRIVERS)
    }
    missing = [
        f"{name}/{release.driver_directory}/amd64"
        for name, files in drivers.items()
        if not any(PurePosixPath(file).suffix.lower() == ".inf" for file in files)
    ]
    agent = disc.find(AGENT)
    if agent is None:
        missing.append(AGENT)
    if agent is None or missing:
        raise ImageError(
            f"virtio-win ISO {disc.path}: no {', '.join(missing)}; download the current virtio-win.iso of the "
            "Fedora project (virtio-win-pkg-scripts)"
        )
    # Symbols are for debuggers only.
    without_symbols = {
        name: tuple(file for file in files if PurePosixPath(file).suffix.lower() != ".pdb")
        for name, files in drivers.items()
    }
    return without_symbols, agent


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaDownload:
    """A file to download."""

    url: str
    sha256: str
    size_bytes: int

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


#: Evaluation media in English.
EVALUATIONS: Mapping[Release, MediaDownload] = {
    Release(name): MediaDownload(**each)
    for name, each in json.loads((files("envd.images.windows") / "evaluations.json").read_text()).items()
}
VIRTIO_WIN = MediaDownload(
    url="https://fedorapeople.org/groups/virt/virtio-win/direct-downloads/archive-virtio/virtio-win-0.1.285-1/"
    "virtio-win-0.1.285.iso",
    sha256="e14cf2b94492c3e925f0070ba7fdfedeb2048c91eea9c5a5afb30232a3976331",
    size_bytes=789_645_312,
)


async def download(wanted: MediaDownload, directory: Path, *, progress: Progress) -> Path:
    """Return the file in `directory`, downloaded unless it is there.

    An interrupted download keeps what it has, in a file whose name ends in `.part`.

    Raises:
        ImageError: The server cannot be reached or refuses, or the file is not the expected one.
    """
    file = directory / wanted.name
    # It was checked before it got this name.
    if file.exists():
        return file
    part = file.with_name(file.name + ".part")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        await _fetch(wanted, part, progress)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ImageError(
            f"download {wanted.url}: {error or 'no response'}; run the command again to continue, or download the file "
            "with a browser and pass --iso or --virtio-win"
        ) from error
    except OSError as error:
        raise ImageError(
            f"download {wanted.url}: {part} cannot be written: {error.strerror}; free some space"
        ) from error
    progress(f"checking {wanted.name}", 1.0)
    with part.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != wanted.sha256:
        part.unlink()
        raise ImageError(
            f"download {wanted.url}: sha256 is {digest}, not {wanted.sha256}; the publisher replaced the file, or the "
            "download was damaged: try again, or pass --iso or --virtio-win"
        )
    part.rename(file)
    return file


async def _fetch(wanted: MediaDownload, part: Path, progress: Progress) -> None:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_READ_TIMEOUT_S)
    done = part.stat().st_size if part.exists() else 0
    if done >= wanted.size_bytes:
        return
    async with (
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True, trust_env=True) as session,
        session.get(wanted.url, headers={"Range": f"bytes={done}-"} if done else {}) as response,
    ):
        # A server that ignores the range sends the file from its beginning.
        resumes = response.status == 206
        done = done if resumes else 0
        with part.open("ab" if resumes else "wb") as stream:
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                stream.write(chunk)
                done += len(chunk)
                progress(f"downloading {wanted.name}", min(1.0, done / wanted.size_bytes))
