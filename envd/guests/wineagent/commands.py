"""The protocol of QEMU's guest agent: a JSON command a line, a JSON response a line."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from io import RawIOBase
from typing import Any

from .drive import AgentError, Files
from .processes import Processes

logger = logging.getLogger(__name__)

_DELIMITER = b"\xff"
#: A file's chunk of 1 MiB in base64, and its envelope; longer lines are discarded.
MAX_LINE_BYTES = 4 << 20


class Commands:
    """Answers lines of the host."""

    def __init__(self, files: Files, processes: Processes) -> None:
        self.by_name: Mapping[str, Callable[..., object]] = {
            "guest-ping": dict,
            "guest-sync-delimited": _echo,
            "guest-get-time": time.time_ns,
            "guest-set-time": _set_time,
            "guest-exec": processes.start,
            "guest-exec-status": processes.status,
            "guest-file-open": files.open,
            "guest-file-read": files.read,
            "guest-file-write": files.write,
            "guest-file-flush": files.flush,
            "guest-file-close": files.close,
        }

    def answer(self, line: bytes) -> bytes:
        """Return the response to a line; never raises."""
        name = ""
        try:
            command = json.loads(line)
            name = command["execute"]
            if name not in self.by_name:
                raise AgentError(f"The command {name} has not been found")  # noqa: TRY301
            given = command.get("arguments", {})
            arguments = {key.replace("-", "_"): value for key, value in given.items()}
            response: dict[str, Any] = {"return": self.by_name[name](**arguments)}
        except (AgentError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            response = {"error": {"class": "GenericError", "desc": str(error)}}
        prefix = _DELIMITER if name == "guest-sync-delimited" and "return" in response else b""
        return prefix + json.dumps(response).encode() + b"\n"

    def serve(self, read: Callable[[int], bytes], write: Callable[[bytes], object]) -> None:
        """Answer the host until `read` returns nothing: it has disconnected."""
        unread = b""
        while data := read(1 << 16):
            *lines, unread = (unread + data).split(b"\n")
            if len(unread) > MAX_LINE_BYTES:
                unread = b""
            for line in lines:
                # A host that connects again begins with a delimiter, after which its first command follows.
                command = line.rpartition(_DELIMITER)[2]
                if command.strip():
                    write(self.answer(command))


def write_all(port: RawIOBase, data: bytes) -> None:
    """Write to a virtio port, which takes at most 32 KiB at once (Linux, drivers/char/virtio_console.c)."""
    unsent = memoryview(data)
    while unsent:
        unsent = unsent[port.write(unsent) or 0 :]


def _echo(id: int) -> int:
    return id


def _set_time(**given: int) -> dict[str, object]:
    time.clock_settime_ns(time.CLOCK_REALTIME, given.get("time", time.time_ns()))
    return {}
