"""The beginning of a captured state, so that a template's state and a capture's load alike.

QEMU saves a template by migration. Its stream begins with a header and the machine's configuration, and includes memory
that is not a shared file, such as the UEFI variables. The state of a captured machine (`xen-save-devices-state`) has
neither. `state_prefix` returns both; the devices follow. Formats: QEMU's docs/devel/migration.rst, migration/savevm.c
and migration/ram.c.
"""

import struct
from pathlib import Path

from envd.base.errors import HypervisorError

#: The stream's magic number and version; both kinds of state begin with them.
HEADER_BYTES = 8
_MAGIC = b"QEVM"
_CONFIGURATION, _SUBSECTION, _SECTION_FULL, _FOOTER = 0x07, 0x05, 0x04, 0x7E
_RAM_VERSION = 4
_RAM_PAGE, _RAM_END = 0x08, 0x10
_PAGE_BYTES = 4096
_FIRMWARE_VARS = b"system.flash1"


def state_prefix(template_state: Path, firmware_vars: bytes) -> bytes:
    """Return what a captured state lacks, header included.

    Args:
        template_state: State of the template, whose machines have the same configuration.
        firmware_vars: UEFI variables at the capture; empty for other firmware.

    Raises:
        HypervisorError: The state of the template is not as this QEMU writes it.
        OSError: It cannot be read.
    """
    with template_state.open("rb") as file:
        head = file.read(_PAGE_BYTES)
    try:
        configuration = head[: _configuration_end(head)]
    except (IndexError, struct.error, ValueError) as error:
        raise HypervisorError(f"state {template_state}: not the state of a template: {error}") from error
    return configuration + (_memory_section(_FIRMWARE_VARS, firmware_vars) if firmware_vars else b"")


def _configuration_end(head: bytes) -> int:
    if head[:4] != _MAGIC or head[HEADER_BYTES] != _CONFIGURATION:
        raise ValueError("it does not begin with a configuration")
    at = HEADER_BYTES + 5 + int.from_bytes(head[HEADER_BYTES + 1 : HEADER_BYTES + 5])
    while head[at] == _SUBSECTION:
        name = head[at + 2 : at + 2 + head[at + 1]]
        at += 2 + len(name) + 4
        match name:
            case b"configuration/capabilities":
                (count,) = struct.unpack_from(">I", head, at)
                at += 4
                for _ in range(count):
                    at += 1 + head[at]
            case b"configuration/target-page-bits":
                at += 4
            case _:
                raise ValueError(f"unknown part {name!r}")
    return at


def _memory_section(block: bytes, content: bytes) -> bytes:
    """Return a section with the whole content of one memory block."""
    parts = [bytes([_SECTION_FULL]), struct.pack(">IB", 0, 3), b"ram", struct.pack(">II", 0, _RAM_VERSION)]
    for offset in range(0, len(content), _PAGE_BYTES):
        parts.append(struct.pack(">QB", offset | _RAM_PAGE, len(block)) + block)
        parts.append(content[offset : offset + _PAGE_BYTES])
    return b"".join([*parts, struct.pack(">Q", _RAM_END), struct.pack(">BI", _FOOTER, 0)])
