"""What the programs of an agent's tools print: untrusted JSON."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, JsonValue, TypeAdapter

from cuaenv.actions import MAX_FILE_BYTES
from envd.base import untrusted_json

_MAX_NOTE_CHARS = 200
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Text = Annotated[str, Field(max_length=MAX_FILE_BYTES + _MAX_NOTE_CHARS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """The result of an operation; `error` says why it failed."""

    error: Annotated[str, Field(max_length=100_000)] = ""
    output: _Text = ""
    exit_code: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    timed_out: bool = False
    left_out_bytes: _Count = 0
    message: dict[str, JsonValue] | None = None
    """Response of an MCP server."""

    # Of Windows' script alone. `data`, `head` and `tail` are base64: of a file, and of the ends of an output.
    path: Annotated[str, Field(max_length=8192)] = ""
    size: _Count = 0
    data: str = ""
    rows: _Text = ""
    count: _Count = 0
    head: _Text = ""
    tail: _Text = ""


_RESULT = TypeAdapter(OperationResult)
parsed = _RESULT.validate_python


async def parse(printed: bytes) -> OperationResult:
    """Return the result that a program printed. Raises: ValueError: it is malformed."""
    await untrusted_json.check_structure(printed)
    return _RESULT.validate_json(printed)
