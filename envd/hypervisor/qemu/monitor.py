"""A machine's QEMU monitor: run control for every step of an episode, and the commands that forking needs.

The socket is our own. libvirt needs 3 to 5 ms for each command, because it writes its record of the domain to disk
twice before it returns, and every step of an episode resumes and pauses a machine. QEMU alone needs 0.5 ms, and libvirt
learns of both from QEMU's events.

The protocol is QMP (QEMU's docs/interop/qmp-spec): one JSON object per line, first a greeting, responses by id, events
at any time. A general QMP client took half of a step's time in the daemon.

Files are passed to QEMU as descriptors: libvirt starts it with a seccomp filter that forbids a migration to `exec:`,
and on some hosts confines it to paths that libvirt knows.
"""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from envd.base.errors import HypervisorError

#: A QEMU that takes longer was itself stopped, or waits for a disk.
_TIMEOUT_S = 60.0
#: The longest line that matters here is the list of a machine's drives, of 10 KiB.
_MAX_LINE_BYTES = 1 << 20
_MIGRATION_TIMEOUT_S = 120.0
_POLL_S = 0.002
#: Any number works: a domain's monitor has no other file sets.
_FILE_SET = 7
#: Guest memory that is a shared file is not part of a saved state.
IGNORE_SHARED_MEMORY: dict[str, JsonValue] = {"capabilities": [{"capability": "x-ignore-shared", "state": True}]}


#: Called with the name and the data of each event of QEMU.
OnEvent = Callable[[str, Mapping[str, Any]], None]


class Monitor:
    """The monitor of one machine; connects on first use.

    Every method raises `HypervisorError` if QEMU fails or returns an error.
    """

    def __init__(
        self,
        path: Path,
        *,
        machine_id: str,
        timeout_s: float = _TIMEOUT_S,
        on_event: OnEvent = lambda _name, _data: None,
    ) -> None:
        self._path = path
        self._on_event = on_event
        self._machine_id = machine_id
        self._timeout_s = timeout_s
        self._connection: _Connection | None = None
        #: Invariant: only the holder has a command without a response.
        self._lock = asyncio.Lock()

    async def stop(self) -> None:
        """Stop the processors between two instructions. Raises: HypervisorError."""
        await self.execute("stop")

    async def cont(self) -> None:
        """Let the processors run. Raises: HypervisorError.

        Returns on QEMU's RESUME event, 1 to 2 ms before its response. QEMU emits the event during the command, from
        the thread that reads all of the guest's input (softmmu/cpus.c, `vm_prepare_start`), so input sent from now on
        is read when the command has completed.
        """
        await self.execute("cont", done_event="RESUME")

    def close(self) -> None:
        """Disconnect; a command without a response fails. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, JsonValue] | None = None,
        *,
        file: int | None = None,
        done_event: str = "",
    ) -> Any:
        """Run a command and return its result.

        Args:
            file: Descriptor passed to QEMU with the command.
            done_event: Event that also completes the command, with the result None.
        """
        try:
            async with self._lock, asyncio.timeout(self._timeout_s):
                if self._connection is None:
                    self._connection = await self._connect()
                return await self._connection.execute(command, arguments, file=file, done_event=done_event)
        except HypervisorError as error:
            raise HypervisorError(f"machine {self._machine_id}: QEMU rejected {command}: {error}") from error
        except (OSError, EOFError, ValueError) as error:
            self.close()
            reason = f"no response for {self._timeout_s:g} s" if isinstance(error, TimeoutError) else error
            raise HypervisorError(f"machine {self._machine_id}: its QEMU monitor failed: {reason}") from error

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await loop.sock_connect(connection, str(self._path))
            _, monitor = await loop.create_unix_connection(
                lambda: _Connection(connection, self._on_event), sock=connection
            )
        except BaseException:
            connection.close()
            raise
        try:
            await monitor.greeted
            await monitor.execute("qmp_capabilities")
        except BaseException:
            monitor.close()
            raise
        return monitor

    # Commands for forking

    async def human(self, command: str) -> str:
        return str(await self.execute("human-monitor-command", {"command-line": command}))

    async def save_state(self, path: Path) -> None:
        """Write the state of a stopped machine, except its memory, which is a shared file.

        The machine cannot run afterwards: QEMU has closed its disk.
        """
        await self.execute("migrate-set-capabilities", IGNORE_SHARED_MEMORY)
        with path.open("xb") as file:
            await self.execute("getfd", {"fdname": "state"}, file=file.fileno())
            await self.execute("migrate", {"uri": "fd:state"})
            await self._migrated("the state could not be saved")

    @asynccontextmanager
    async def device_file(self, path: Path, *, offset: int) -> AsyncIterator[None]:
        """Open the file of `save_devices`; the machine may run."""
        with path.open("xb") as file:
            file.seek(offset)  # QEMU writes at the descriptor's position.
            await self.execute("add-fd", {"fdset-id": _FILE_SET}, file=file.fileno())
        try:
            yield
        finally:
            await self.execute("remove-fd", {"fdset-id": _FILE_SET})

    async def save_devices(self) -> None:
        """Write the device state of a stopped machine, which can run afterwards. Omits a VGA card's video memory."""
        # `live`, the default, releases the disk to another QEMU until the machine runs again. Saving twice before that
        # fails an assertion (bdrv_inactivate_recurse).
        await self.execute("xen-save-devices-state", {"filename": f"/dev/fdset/{_FILE_SET}", "live": False})

    async def expect_state(self) -> None:
        """Prepare a machine that was started with `-incoming defer` for `load`."""
        await self.execute("migrate-set-capabilities", IGNORE_SHARED_MEMORY)

    async def set_backing(self, overlay: Mapping[str, JsonValue], disks: Sequence[Path]) -> None:
        """Put an overlay that is not in use yet on other disks.

        Args:
            overlay: Its options, from `overlay_node`; it is on the template's disk.
            disks: qcow2 files; the first is an overlay on the template's disk, each other one on its predecessor.
        """
        backing = overlay["backing"]
        for index, disk in enumerate(disks):
            node = f"{overlay['node-name']}-{index}"
            file: dict[str, JsonValue] = {"driver": "file", "filename": str(disk)}
            options: dict[str, JsonValue] = {"driver": "qcow2", "node-name": node, "read-only": True, "file": file}
            await self.execute("blockdev-add", {**options, "backing": backing})
            backing = node
        await self.execute("blockdev-reopen", {"options": [{**overlay, "backing": backing}]})

    async def load(self, path: Path) -> None:
        """Load a state, once, after `expect_state`; the machine is then paused."""
        with path.open("rb") as file:
            await self.execute("getfd", {"fdname": "state"}, file=file.fileno())
            await self.execute("migrate-incoming", {"uri": "fd:state"})
            await self._migrated("the state could not be loaded")

    async def memory_blocks(self) -> dict[str, int]:
        """Return the machine's memory blocks: used bytes by name. Blocks without a name are not part of its state."""
        return parse_memory_blocks(await self.human("info ramblock"))

    async def drives(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the files of the drives that can be written, and the media in removable drives."""
        drives = [drive for drive in await self.execute("query-block") if drive.get("inserted")]
        written = frozenset(_file(drive) for drive in drives if not drive["inserted"].get("ro"))
        return written, frozenset(_file(drive) for drive in drives if drive.get("removable"))

    async def has_driver(self, alias: str) -> bool:
        """Return whether the guest's driver of a virtio device runs."""
        path = f"/machine/peripheral/{alias}/virtio-backend"
        status = await self.execute("x-query-virtio-status", {"path": path})
        return any(text.startswith("VIRTIO_CONFIG_S_DRIVER_OK") for text in status["status"]["statuses"])

    async def _migrated(self, failure: str) -> None:
        deadline_s = time.monotonic() + _MIGRATION_TIMEOUT_S
        while True:
            migration = await self.execute("query-migrate")
            status = migration.get("status", "none")
            if status == "completed":
                return
            if status in {"failed", "cancelled"}:
                raise HypervisorError(f"{failure}: {migration.get('error-desc', status)}")
            if time.monotonic() > deadline_s:
                raise HypervisorError(f"{failure}: still {status} after {_MIGRATION_TIMEOUT_S:g} s")
            await asyncio.sleep(_POLL_S)


class _Connection(asyncio.Protocol):
    """One connection to a monitor, with at most one command in flight."""

    def __init__(self, connection: socket.socket, on_event: OnEvent) -> None:
        self.greeted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """Done after QEMU's greeting. Events, such as that of a new viewer, may precede it."""
        self._connection = connection
        self._on_event = on_event
        self._transport: Any = None
        self._rest = b""
        self._command_id = 0
        self._done_event = ""
        self._done: asyncio.Future[Any] = self.greeted
        self._end: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            if len(self._rest) > _MAX_LINE_BYTES:
                raise ValueError(f"a line of more than {_MAX_LINE_BYTES} bytes")  # noqa: TRY301 -- handled below
            for line in lines:
                self._on_message(json.loads(line))
        except (ValueError, TypeError, AttributeError) as error:
            self._fail(ValueError(f"received data is not QMP: {error}"))
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or EOFError("QEMU closed the connection"))

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, JsonValue] | None = None,
        *,
        file: int | None = None,
        done_event: str = "",
    ) -> Any:
        """Send a command and wait for its result, or for the event that reports its completion. One at a time.

        A response that arrives after the event, or after the caller was cancelled, is ignored.

        Raises:
            HypervisorError: The response is an error.
            OSError, EOFError, ValueError: The connection has ended.
        """
        if self._end is not None:
            raise self._end
        self._command_id += 1
        self._done_event = done_event
        self._done = asyncio.get_running_loop().create_future()
        request: dict[str, JsonValue] = {"execute": command, "id": self._command_id}
        if arguments:
            request["arguments"] = dict(arguments)
        data = json.dumps(request).encode() + b"\n"
        if file is None:
            self._transport.write(data)
        elif (sent := socket.send_fds(self._connection, [data], [file])) != len(data):
            # Nothing else is being sent, so the socket's buffer is empty.
            raise OSError(f"only {sent} of {len(data)} bytes were sent")
        return await self._done

    def close(self) -> None:
        self._fail(EOFError("the connection was closed"))
        self._transport.close()

    def _on_message(self, message: dict[str, Any]) -> None:
        if event := message.get("event"):
            self._on_event(event, message.get("data") or {})
        if self._done.done():
            return
        if message.get("id") == self._command_id:
            if error := message.get("error"):
                self._done.set_exception(HypervisorError(error.get("desc", error)))
            else:
                self._done.set_result(message.get("return"))
        elif message.get("event", "") == self._done_event != "" or (self._done is self.greeted and "QMP" in message):
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._end = self._end or error
        if not self._done.done():
            self._done.set_exception(error)
            self._done.exception()  # Marked as retrieved: asyncio logs errors that nothing awaits.


def overlay_node(arguments: Sequence[str], overlay: Path) -> dict[str, JsonValue]:
    """Return all options of an overlay's block device: QEMU resets those that are missing when it is opened again.

    Raises: HypervisorError: it is not on the command line of its QEMU, or not on another disk.
    """
    nodes: list[dict[str, JsonValue]] = [
        json.loads(value) for name, value in pairwise(arguments) if name == "-blockdev"
    ]
    files = {node["node-name"] for node in nodes if node.get("filename") == str(overlay)}
    for node in nodes:
        if node.get("file") in files and node.get("backing"):
            return node
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
