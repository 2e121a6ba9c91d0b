"""Editions of Windows in an installation medium, read from the metadata of its WIM or ESD file.

Layout of a WIM header: Microsoft's "Windows Imaging File Format (WIM)" white paper. Its XML metadata is not compressed.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import BinaryIO

from lxml import etree

from envd.base.errors import ImageError

_MAGIC = b"MSWIM\0\0\0"
_HEADER_BYTES = 208
#: Offset of the resource header of the XML metadata.
_XML_HEADER_OFFSET = 72
_MAX_XML_BYTES = 16 << 20
#: Processor architectures of a WIM (winnt.h, PROCESSOR_ARCHITECTURE_*).
_ARCHITECTURES = {"0": "x86 (32-bit)", "5": "ARM (32-bit)", "9": "x64", "12": "ARM64"}


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
    header = stream.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES or header[:8] != _MAGIC:
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
