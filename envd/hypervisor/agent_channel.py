"""Client of the QEMU guest agent's line protocol, over the machine's Unix socket.

One command at a time. A new connection, also the one after a timeout, is synchronised with `guest-sync-delimited`
(QEMU's qga/qapi-schema.json): half-sent commands and unread responses of earlier callers are discarded, so a response
is never taken for that of another command.

The guest's root can send anything here. Everything read is bounded, and the event loop does other work in between.
"""

import asyncio
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue
from pydantic_core import from_json

from envd.base import untrusted_json
from envd.base.clock import running_timeout
from envd.base.errors import GuestError, GuestUnresponsive
from envd.hypervisor import guest_socket

#: Most bytes of one response, by command: output of 16 MiB, or 1 MiB of a file, in base64 and its envelope.
_RESPONSE_LIMIT_BYTES = {"guest-exec-status": 24 << 20, "guest-file-read": 2 << 20}
_OTHER_RESPONSE_LIMIT_BYTES = 1 << 20
#: Most bytes skipped while synchronising: an unread response of an earlier caller.
_SKIP_LIMIT_BYTES = 24 << 20
#: Most answers to sync requests of earlier callers: one for each command that failed while the guest booted.
_MAX_OLD_SYNC_ANSWERS = 1024
_SYNC_ANSWER_LIMIT_BYTES = 4096
#: Read, or skipped, between two turns of the event loop.
_CHUNK_BYTES = 64 << 10
_DELIMITER = b"\xff"
#: Most characters of a guest's text quoted in an error.
_MAX_QUOTED_CHARS = 2000


class _AgentConnection:
    """One connection to the socket, read in pieces."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unread = bytearray()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def read_line(self, *, limit_bytes: int) -> bytes:
        """Return the next line. Raises: EOFError; ValueError: it is longer than `limit_bytes`."""
        searched_bytes = 0
        while (end := self._unread.find(b"\n", searched_bytes)) < 0 and len(self._unread) <= limit_bytes:
            searched_bytes = len(self._unread)
            await self._read_more()
        if not 0 <= end <= limit_bytes:
            raise ValueError(f"a response of more than {limit_bytes} bytes")
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line

    async def skip_past(self, delimiter: bytes, *, limit_bytes: int) -> int:
        """Discard everything up to a delimiter; return its size. Raises: EOFError; ValueError: over `limit_bytes`."""
        skipped_bytes = 0
        while (end := self._unread.find(delimiter)) < 0:
            skipped_bytes += len(self._unread)
            self._unread.clear()
            if skipped_bytes > limit_bytes:
                raise ValueError(f"more than {limit_bytes} bytes before the answer to a sync request")
            await self._read_more()
        del self._unread[: end + 1]
        return skipped_bytes + end + 1

    async def _read_more(self) -> None:
        # `read` returns buffered data without an iteration of the event loop.
        await asyncio.sleep(0)
        chunk = await self._reader.read(_CHUNK_BYTES)
        if not chunk:
            raise EOFError("closed")
        self._unread += chunk

    def close(self) -> None:
        self._writer.close()


class AgentChannel:
    """Host end of one guest agent's channel. Reconnects automatically; `close` is final."""

    def __init__(self, socket: Path, *, machine_id: str, skip_limit_bytes: int = _SKIP_LIMIT_BYTES) -> None:
        self._socket = socket
        self._machine_id = machine_id
        self._skip_limit_bytes = skip_limit_bytes
        #: Invariant: only the holder has a command without a response on the wire.
        self._lock = asyncio.Lock()
        self._connection: _AgentConnection | None = None
        self._sync_ids = itertools.count(1)

    async def command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        """Run one command. After a failure the next one starts on a new, synchronised connection."""
        try:
            async with running_timeout(timeout_s), self._lock:
                return await self._exchange(command, arguments)
        except TimeoutError as error:
            raise GuestUnresponsive(
                f"machine {self._machine_id}: the guest agent did not respond to {command} within {timeout_s:g} s"
            ) from error
        except (OSError, EOFError, ValueError) as error:
            raise GuestUnresponsive(
                f"machine {self._machine_id}: the guest agent's channel failed during {command}: {_shortened(error)}"
            ) from error

    async def close(self) -> None:
        self._drop()

    async def _exchange(self, command: str, arguments: Mapping[str, JsonValue] | None) -> JsonValue:
        try:
            connection = self._connection or await self._connect()
            request: dict[str, JsonValue] = {"execute": command}
            if arguments:
                request["arguments"] = dict(arguments)
            await connection.send(json.dumps(request).encode() + b"\n")
            limit_bytes = _RESPONSE_LIMIT_BYTES.get(command, _OTHER_RESPONSE_LIMIT_BYTES)
            response = await untrusted_json.parse(await connection.read_line(limit_bytes=limit_bytes))
        except BaseException:
            # The response may still arrive, so the next command needs a new, synchronised connection.
            self._drop()
            raise
        if not isinstance(response, dict):
            self._drop()
            raise ValueError("the response is not an object")  # noqa: TRY004 - the guest's fault, not a caller's type
        if "error" in response:
            error = response["error"]
            text = error.get("desc") if isinstance(error, dict) else error
            raise GuestError(f"machine {self._machine_id}: the guest agent rejected {command}: {_shortened(text)}")
        return response.get("return")

    async def _connect(self) -> _AgentConnection:
        connection = _AgentConnection(*await guest_socket.connect(self._socket, limit=_CHUNK_BYTES))
        self._connection = connection
        sync_id = next(self._sync_ids)
        # A leading delimiter makes the agent discard a half-sent command.
        request = json.dumps({"execute": "guest-sync-delimited", "arguments": {"id": sync_id}})
        await connection.send(_DELIMITER + request.encode() + b"\n")
        skipped_bytes = 0
        for _ in range(_MAX_OLD_SYNC_ANSWERS):
            skipped_bytes += await connection.skip_past(_DELIMITER, limit_bytes=self._skip_limit_bytes - skipped_bytes)
            line = await connection.read_line(limit_bytes=_SYNC_ANSWER_LIMIT_BYTES)
            if _sync_id(line) == sync_id:
                return connection
            await asyncio.sleep(0)  # further answers may be buffered
        raise ValueError(f"more than {_MAX_OLD_SYNC_ANSWERS} answers to other sync requests")

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _sync_id(line: bytes) -> JsonValue:
    """Return the id in an answer to a sync request; None if it is malformed."""
    try:
        response = from_json(line)
    except ValueError:
        return None
    return response.get("return") if isinstance(response, dict) else None


def _shortened(value: object) -> str:
    return str(value)[:_MAX_QUOTED_CHARS]
