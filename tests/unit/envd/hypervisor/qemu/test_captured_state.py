"""States of captured machines: their prefix, and the overlays that they replace. Bytes as QEMU 7.2 writes them."""

import json
import struct
from pathlib import Path

import pytest

from envd.base.errors import HypervisorError
from envd.hypervisor.qemu.capture import HEADER_BYTES, state_prefix
from envd.hypervisor.qemu.monitor import overlay_node

CONFIGURATION = (
    b"QEVM\0\0\0\x03\x07\0\0\0\npc-q35-7.2\x05\x1aconfiguration/capabilities\0\0\0\x01\0\0\0\x01\x0fx-ignore-shared"
)
FIRST_SECTION = b"\x01\0\0\0\x02\x03ram"


def state(directory: Path, content: bytes) -> Path:
    path = directory / "devices"
    path.write_bytes(content)
    return path


def test_the_prefix_is_the_header_and_the_configuration_of_the_template(tmp_path: Path) -> None:
    assert state_prefix(state(tmp_path, CONFIGURATION + FIRST_SECTION * 1000), b"") == CONFIGURATION
    assert CONFIGURATION.startswith(b"QEVM\0\0\0\x03")
    assert HEADER_BYTES == 8
    page_size = b"\x05\x1econfiguration/target-page-bits\0\0\0\x01\0\0\0\x0c"
    whole = CONFIGURATION + page_size
    assert state_prefix(state(tmp_path, whole + FIRST_SECTION), b"") == whole


def test_the_firmwares_variables_follow_as_one_section_of_memory(tmp_path: Path) -> None:
    content = b"a" * 4096 + b"b" * 4096
    section = state_prefix(state(tmp_path, CONFIGURATION + FIRST_SECTION), content).removeprefix(CONFIGURATION)
    name = b"\x0dsystem.flash1"
    assert section == b"".join(
        [
            b"\x04\0\0\0\0\x03ram\0\0\0\0\0\0\0\x04",
            struct.pack(">Q", 0x08) + name + b"a" * 4096,
            struct.pack(">Q", 0x1008) + name + b"b" * 4096,
            struct.pack(">Q", 0x10),
            b"\x7e\0\0\0\0",
        ]
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"QEVM\0\0\0\x03\x01\0\0\0\x02\x03ram",
        CONFIGURATION[:20],
        CONFIGURATION + b"\x05\x12configuration/uuid\0\0\0\x01",
    ],
    ids=["empty", "no configuration", "truncated", "unknown part"],
)
def test_another_state_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = state(tmp_path, content)
    with pytest.raises(HypervisorError, match=f"state {path}: not the state of a template"):
        state_prefix(path, b"")


def blockdevs(*nodes: dict[str, object]) -> list[str]:
    return ["qemu", "-m", "1024", *(word for node in nodes for word in ("-blockdev", json.dumps(node)))]


def test_an_overlay_is_found_with_its_options_and_the_template_below_it() -> None:
    own: dict[str, object] = {
        "node-name": "f1",
        "driver": "qcow2",
        "file": "s1",
        "backing": "f2",
        "detect-zeroes": "unmap",
    }
    arguments = blockdevs(
        {"node-name": "s2", "driver": "file", "filename": "/templates/disk.qcow2"},
        {"node-name": "f2", "driver": "qcow2", "file": "s2", "backing": None},
        {"node-name": "s1", "driver": "file", "filename": "/m/disk.qcow2"},
        own,
    )
    assert overlay_node(arguments, Path("/m/disk.qcow2")) == own


@pytest.mark.parametrize("path", ["/m/disk1.qcow2", "/templates/disk.qcow2"])
def test_a_disk_that_qemu_does_not_use_as_an_overlay_is_an_error(path: str) -> None:
    arguments = blockdevs(
        {"node-name": "s2", "driver": "file", "filename": "/templates/disk.qcow2"},
        {"node-name": "f2", "driver": "qcow2", "file": "s2", "backing": None},
    )
    with pytest.raises(HypervisorError, match=f"disk {path}: QEMU was not started with it as an overlay"):
        overlay_node(arguments, Path(path))
