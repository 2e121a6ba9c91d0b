"""QEMU monitor commands for what forking needs.

Files are passed to QEMU as descriptors: libvirt starts it with a seccomp filter that forbids a migration to `exec:`,
and on some hosts confines it to paths that libvirt knows.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue

from envd.base.errors import HypervisorError
from envd.hypervisor.qemu.run_control import RunControl

_TIMEOUT_S = 120.0
_POLL_S = 0.002
#: Any number works: a domain's monitor has no other file sets.
_FILE_SET = 7
#: Guest memory that is a shared file is not part of a saved state.
IGNORE_SHARED_MEMORY: dict[str, JsonValue] = {"capabilities": [{"capability": "x-ignore-shared", "state": True}]}


class Drives(NamedTuple):
    """Files of a machine's drives."""

    written: frozenset[str]
    removable: frozenset[str]
    """Media in removable drives."""


class Monitor:
    """The monitor of one machine. Every method raises `HypervisorError` if QEMU fails or returns an error."""

    def __init__(self, run_control: RunControl) -> None:
        self._execute = run_control.execute

    async def human(self, command: str) -> str:
        """Run a command of the human monitor and return its output."""
        return str(await self._execute("human-monitor-command", {"command-line": command}))

    async def save_state(self, path: Path) -> None:
        """Write the state of a stopped machine, except its memory, which is a shared file.

        The machine cannot run afterwards: QEMU has closed its disk.
        """
        await self._execute("migrate-set-capabilities", IGNORE_SHARED_MEMORY)
        with path.open("xb") as file:
            await self._execute("getfd", {"fdname": "state"}, file=file.fileno())
            await self._execute("migrate", {"uri": "fd:state"})
            await self._migrated("the state could not be saved")

    @asynccontextmanager
    async def device_file(self, path: Path, *, offset: int) -> AsyncIterator[None]:
        """Open the file of `save_devices`; the machine may run.

        Args:
            path: A new file.
            offset: Where in the file the state begins.
        """
        with path.open("xb") as file:
            file.seek(offset)  # QEMU writes at the descriptor's position.
            await self._execute("add-fd", {"fdset-id": _FILE_SET}, file=file.fileno())
        try:
            yield
        finally:
            await self._execute("remove-fd", {"fdset-id": _FILE_SET})

    async def save_devices(self) -> None:
        """Write the device state of a stopped machine, which can run afterwards. Omits a VGA card's video memory."""
        # `live`, the default, releases the disk to another QEMU until the machine runs again. Saving twice before that
        # fails an assertion (bdrv_inactivate_recurse).
        await self._execute("xen-save-devices-state", {"filename": f"/dev/fdset/{_FILE_SET}", "live": False})

    async def expect_state(self) -> None:
        """Prepare a machine that was started with `-incoming defer` for `load`."""
        await self._execute("migrate-set-capabilities", IGNORE_SHARED_MEMORY)

    async def set_backing(self, overlay: "OverlayNode", disks: Sequence[Path]) -> None:
        """Put an overlay that is not in use yet on other disks.

        Args:
            overlay: The overlay; it is on the template's disk.
            disks: qcow2 files; the first is an overlay on the template's disk, each other one on its predecessor.
        """
        backing = overlay.template_node
        for index, disk in enumerate(disks):
            node = f"{overlay.node}-{index}"
            file: dict[str, JsonValue] = {"driver": "file", "filename": str(disk)}
            options: dict[str, JsonValue] = {"driver": "qcow2", "node-name": node, "read-only": True, "file": file}
            await self._execute("blockdev-add", {**options, "backing": backing})
            backing = node
        await self._execute("blockdev-reopen", {"options": [{**overlay.options, "backing": backing}]})

    async def load(self, path: Path) -> None:
        """Load a state, once, after `expect_state`; the machine is then paused."""
        with path.open("rb") as file:
            await self._execute("getfd", {"fdname": "state"}, file=file.fileno())
            await self._execute("migrate-incoming", {"uri": "fd:state"})
            await self._migrated("the state could not be loaded")

    async def memory_blocks(self) -> dict[str, int]:
        """Return the machine's memory blocks: used bytes by name. Blocks without a name are not part of its state."""
        return parse_memory_blocks(await self.human("info ramblock"))

    async def drives(self) -> "Drives":
        """Return the files of the machine's drives."""
        drives = [drive for drive in await self._execute("query-block") if drive.get("inserted")]
        return Drives(
            written=frozenset(_file(drive) for drive in drives if not drive["inserted"].get("ro")),
            removable=frozenset(_file(drive) for drive in drives if drive.get("removable")),
        )

    async def has_driver(self, alias: str) -> bool:
        """Return whether the guest's driver of a virtio device runs.

        Args:
            alias: libvirt's name of the device.
        """
        path = f"/machine/peripheral/{alias}/virtio-backend"
        status = await self._execute("x-query-virtio-status", {"path": path})
        return any(text.startswith("VIRTIO_CONFIG_S_DRIVER_OK") for text in status["status"]["statuses"])

    async def _migrated(self, failure: str) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            migration = await self._execute("query-migrate")
            status = migration.get("status", "none")
            if status == "completed":
                return
            if status in {"failed", "cancelled"}:
                raise HypervisorError(f"{failure}: {migration.get('error-desc', status)}")
            if time.monotonic() > deadline_s:
                raise HypervisorError(f"{failure}: still {status} after {_TIMEOUT_S:g} s")
            await asyncio.sleep(_POLL_S)


class OverlayNode(NamedTuple):
    """A machine's overlay among QEMU's block devices."""

    node: str
    template_node: str
    """The disk of its template."""
    options: dict[str, JsonValue]
    """All of its options; QEMU resets those that are missing when it opens a block device again."""


def overlay_node(arguments: Sequence[str], overlay: Path) -> OverlayNode:
    """Find an overlay on the command line of its QEMU. Raises: HypervisorError: not there, or not on another disk."""
    nodes = [json.loads(value) for name, value in pairwise(arguments) if name == "-blockdev"]
    files = {node["node-name"] for node in nodes if node.get("filename") == str(overlay)}
    for node in nodes:
        if node.get("file") in files and node.get("backing"):
            return OverlayNode(node=node["node-name"], template_node=node["backing"], options=node)
    raise HypervisorError(f"disk {overlay}: QEMU was not started with it as an overlay")


def _file(drive: dict[str, Any]) -> str:
    return str(drive["inserted"]["image"]["filename"])


def parse_memory_blocks(text: str) -> dict[str, int]:
    """Parse the output of the monitor's `info ramblock`.

    A line reads `env.ram    4 KiB  0x0000000040000000 0x0000000040000000 0x0000000040000000`: name, page size,
    offset, used, total.
    """
    pattern = re.compile(
        r" *(?P<name>\S+) +\d+ [KMG]iB +0x[0-9a-f]+ +(?P<used>0x[0-9a-f]+) +0x[0-9a-f]+ *\r?", re.ASCII
    )
    found = (pattern.fullmatch(line) for line in text.splitlines())
    return {match["name"]: int(match["used"], 16) for match in found if match}
