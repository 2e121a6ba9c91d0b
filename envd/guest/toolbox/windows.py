"""Tools in a Windows guest: a script handles bytes there as the user; texts are made here, as `program.py` makes them.

The script is PowerShell's `use-tool`. A guest without PowerShell answers it by name.
"""

import asyncio
import base64
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, JsonValue, TypeAdapter

from cuaenv.actions import MAX_FILE_BYTES
from envd.base import untrusted_json
from envd.base.errors import GuestError
from envd.guest.toolbox import program

#: Lines are counted in so much of a file: base64 twice, it fits into a response of the guest agent.
_MAX_SCAN_BYTES = 4 << 20
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Text = Annotated[str, Field(max_length=1 << 20)]
_Path = Annotated[str, Field(max_length=8192)]
_MAX_ERROR_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Response:
    """What the script prints. `data`, `head` and `tail` are base64: of a file, and of the ends of an output."""

    error: _Text = ""
    path: _Path = ""
    size: _Count = 0
    data: str = ""
    rows: _Text = ""
    count: _Count = 0
    head: _Text = ""
    tail: _Text = ""
    left_out_bytes: _Count = 0
    exit_code: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    timed_out: bool = False


_RESPONSE = TypeAdapter(_Response)

#: How much later than a command's limit the script counts as unresponsive: it ends what hangs.
_GRACE_S = 20.0

Result = dict[str, Any]
#: Runs the script with a request (JSON) within a limit in seconds, and returns what it prints.
RunScript = Callable[[bytes, float], Awaitable[bytes]]


async def perform(run: RunScript, operation: str, timeout_s: float, arguments: dict[str, Any]) -> Result:
    """Perform an operation of `program.py` in a Windows guest; the result is as that program prints it.

    Raises:
        GuestError: The script failed.
        GuestUnresponsive: The guest did not answer.
    """

    if operation not in ("shell", "read", "write", "edit", "list"):
        return {"error": "a Windows guest runs no MCP servers"}

    async def request(op: str, **fields: JsonValue) -> _Response:
        printed = await run(json.dumps({"op": op, **fields}).encode() + b"\n", timeout_s + _GRACE_S)
        await untrusted_json.check_structure(printed)
        response = _RESPONSE.validate_json(printed)
        if response.error:
            raise program.Refused(response.error[:_MAX_ERROR_CHARS])
        return response

    async def read(limit: int) -> tuple[_Response, bytes]:
        file = await request("read", path=path, limit=limit)
        data = await untrusted_json.decode_base64(file.data)
        if len(data) > min(limit, file.size):
            raise ValueError("more data than there is")
        return file, data

    async def write(data: bytes) -> str:
        return (await request("write", path=path, data=base64.b64encode(data).decode())).path

    path = re.sub(r"^~(?:[\\/]+|$)", "", arguments.get("path", ""))
    try:
        match operation:
            case "shell":
                return _output(await request("shell", command=arguments["command"], timeout_s=timeout_s))
            case "list":
                listing = await request("list", path=path)
                return program.listed(listing.rows.splitlines(), listing.count)
            case "read":
                lines = arguments["first_line"], arguments["line_count"]
                file, data = await read(min(program.scan_bytes(*lines), _MAX_SCAN_BYTES))
                whole = len(data) == file.size
                return await asyncio.to_thread(program.shown, file.path, data, file.size, *lines, whole=whole)
            case "edit":
                file, data = await read(MAX_FILE_BYTES + 1)
                data, result = program.edited(file.path, data, arguments["old"], arguments["new"])
                await write(data)
                return result
            case _:
                data = arguments["content"].encode()
                return program.written(await write(data), data)
    except program.Refused as refusal:
        return {"error": str(refusal)}
    except ValueError as error:
        raise GuestError("the desktop's tools sent a malformed response") from error


def _output(response: _Response) -> Result:
    """Return a command's result. Raises: ValueError: the response is not base64."""
    head, tail = (base64.b64decode(part, validate=True) for part in (response.head, response.tail))
    output = program.Cut(head, tail, response.left_out_bytes).text().replace("\r\n", "\n")
    ended = {"timed_out": True} if response.timed_out else {"exit_code": response.exit_code}
    return {"output": output, "left_out_bytes": response.left_out_bytes, **ended}
