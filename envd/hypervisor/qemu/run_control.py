"""Sends commands to a machine's QEMU through a monitor socket of our own.

libvirt needs 3 to 5 ms for each, because it writes its record of the domain to disk twice before it returns, and every
step of an episode resumes and pauses a machine. QEMU alone needs 0.5 ms, and libvirt learns of both from QEMU's events.

The protocol is QMP (QEMU's docs/interop/qmp-spec): one JSON object per line, first a greeting, responses by id, events
at any time. A general QMP client took half of a step's time in the daemon.
"""

import asyncio
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from envd.base.errors import HypervisorError

#: A QEMU that takes longer was itself stopped, or waits for a disk.
_TIMEOUT_S = 60.0
#: The longest line that matters here is the list of a machine's drives, of 10 KiB.
_MAX_LINE_BYTES = 1 << 20


class RunControl:
    """Monitor connection of one machine. Connects on first use."""

    def __init__(self, path: Path, *, machine_id: str, timeout_s: float = _TIMEOUT_S) -> None:
        self._path = path
        self._machine_id = machine_id
        self._timeout_s = timeout_s
        self._monitor: _Monitor | None = None
        #: Invariant: only the holder has a command without a response.
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<RunControl of {self._machine_id}, {'connected' if self._monitor else 'not connected'}>"

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
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close()

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
            command: Name of a QMP command.
            arguments: Its arguments.
            file: Descriptor passed to QEMU with the command.
            done_event: Event that also completes the command, with the result None.

        Raises:
            HypervisorError: QEMU returned an error, or did not respond.
        """
        try:
            async with self._lock, asyncio.timeout(self._timeout_s):
                if self._monitor is None:
                    self._monitor = await self._connect()
                return await self._monitor.execute(command, arguments, file=file, done_event=done_event)
        except _CommandFailed as error:
            raise HypervisorError(f"machine {self._machine_id}: QEMU rejected {command}: {error}") from error
        except (OSError, EOFError, ValueError) as error:
            self.close()
            reason = f"no response for {self._timeout_s:g} s" if isinstance(error, TimeoutError) else error
            raise HypervisorError(f"machine {self._machine_id}: its QEMU monitor failed: {reason}") from error

    async def _connect(self) -> "_Monitor":
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await loop.sock_connect(connection, str(self._path))
            _, monitor = await loop.create_unix_connection(lambda: _Monitor(connection), sock=connection)
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


class _CommandFailed(Exception):
    """QEMU's response to a command is an error."""


class _Monitor(asyncio.Protocol):
    """One connection to a monitor, with at most one command in flight."""

    def __init__(self, connection: socket.socket) -> None:
        self.greeted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        """Done after QEMU's greeting. Events, such as that of a new viewer, may precede it."""
        self._connection = connection
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
            _CommandFailed: The response is an error.
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
        """End the connection."""
        self._fail(EOFError("the connection was closed"))
        self._transport.close()

    def _on_message(self, message: dict[str, Any]) -> None:
        if self._done.done():
            return
        if message.get("id") == self._command_id:
            if error := message.get("error"):
                self._done.set_exception(_CommandFailed(error.get("desc", error)))
            else:
                self._done.set_result(message.get("return"))
        elif message.get("event", "") == self._done_event != "" or (self._done is self.greeted and "QMP" in message):
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._end = self._end or error
        if not self._done.done():
            self._done.set_exception(error)
            self._done.exception()  # Marked as retrieved: asyncio logs errors that nothing awaits.
