"""Tools in a Windows guest: a script handles bytes there as the user; texts are made here, as `program.py` makes them.

The script is PowerShell's `use-tool`. A guest without PowerShell answers it by name.
"""

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from cuaenv.actions import MAX_FILE_BYTES
from envd.base import untrusted_json
from envd.desktop.toolbox.results import OperationResult, parsed
from envd.guests import toolbox as program

#: Lines are counted in so much of a file: base64 twice, it fits into a response of the guest agent.
_MAX_SCAN_BYTES = 4 << 20


#: Has the script perform an operation, with arguments by name. May raise what `perform` does.
Request = Callable[..., Awaitable[OperationResult]]


async def perform(request: Request, operation: str, arguments: dict[str, Any]) -> OperationResult:
    """Perform an operation of `program.py` in a Windows guest.

    Raises:
        Refused: It cannot be performed.
        GuestError: The script failed.
        GuestUnresponsive: The guest did not answer.
        ValueError: The script sent a malformed response.
    """
    if operation == "shell":
        return _with_output(await request(operation, **arguments))
    if operation not in ("read", "write", "edit", "list"):
        raise program.Refused("a Windows guest runs no MCP servers")
    path = re.sub(r"^~(?:[\\/]+|$)", "", arguments["path"])

    async def read(limit: int) -> tuple[str, bytes, int]:
        file = await request("read", path=path, limit=limit)
        return file.path, await untrusted_json.decode_base64(file.data), file.size

    async def write(data: bytes) -> str:
        return (await request("write", path=path, data=base64.b64encode(data).decode())).path

    if operation == "list":
        listing = await request(operation, path=path)
        return parsed(program.listed(listing.rows.splitlines(), listing.count))
    if operation == "read":
        lines = arguments["first_line"], arguments["line_count"]
        full_path, data, size = await read(min(program.scan_bytes(*lines), _MAX_SCAN_BYTES))
        whole = len(data) == size
        return parsed(await asyncio.to_thread(program.shown, full_path, data, size, *lines, whole=whole))
    if operation == "edit":
        full_path, data, _ = await read(MAX_FILE_BYTES + 1)
        data, result = program.edited(full_path, data, arguments["old"], arguments["new"])
        await write(data)
        return parsed(result)
    data = arguments["content"].encode()
    return parsed(program.written(await write(data), data))


def _with_output(result: OperationResult) -> OperationResult:
    head, tail = (base64.b64decode(part, validate=True) for part in (result.head, result.tail))
    output = program.Cut(head, tail, result.left_out_bytes).text().replace("\r\n", "\n")
    return replace(result, output=output, exit_code=None if result.timed_out else result.exit_code)
