"""Requests and readers of their fields, responses, and the error that becomes an HTTP error response."""

import email.policy
import json
import mmap
import os
import re
import shlex
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path
from typing import IO, Any

MAX_JSON_BYTES = 32 << 20
MAX_COMMAND_TIMEOUT_S = 3600.0


class HttpError(Exception):
    """Answered with `status` and the JSON object `{status: "error", message, **details}`."""

    def __init__(self, status: int, message: str, **details: object) -> None:
        super().__init__(message)
        self.status = status
        self.details = details

    def response(self) -> "Response":
        return json_response({"status": "error", "message": str(self), **self.details}, self.status)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a multipart body, as a byte range."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request with its whole body: `bytes`, or a mapped temporary file if it is large."""

    path: str
    query: Mapping[str, str]
    content_type: str
    body: bytes | mmap.mmap

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object. Raises: HttpError."""
        if len(self.body) > MAX_JSON_BYTES:
            raise HttpError(
                413, f"{self.path}: the JSON body has {len(self.body)} bytes; the limit is {MAX_JSON_BYTES}"
            )
        try:
            value = json.loads(self.body[:] or b"{}")
        except ValueError as error:
            raise HttpError(400, f"{self.path}: the body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise HttpError(400, f"{self.path}: the body is not a JSON object")
        return value

    def parts(self) -> dict[str, Part]:
        """Return the parts of a multipart body by field name. Raises: HttpError."""
        boundary = re.search(r'boundary="?([^";,]+)', self.content_type)
        if not self.content_type.startswith("multipart/form-data") or not boundary:
            raise HttpError(400, f"{self.path}: the body is not multipart/form-data with a boundary")
        return parse_multipart(self.body, boundary[1].encode())

    def form(self) -> dict[str, str]:
        """Return the text fields of a urlencoded or multipart form. Raises: HttpError."""
        if self.content_type.startswith("multipart/form-data"):
            return {
                name: self.body[part.start : part.end].decode("utf-8", "replace")
                for name, part in self.parts().items()
                if part.end - part.start <= MAX_JSON_BYTES
            }
        text = self.body[:].decode("utf-8", "replace")
        return dict(urllib.parse.parse_qsl(text, keep_blank_values=True, max_num_fields=100))


@dataclass(frozen=True, slots=True)
class Response:
    """One HTTP response. A `file` is streamed and never kept for replay."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    file: IO[bytes] | None = None
    file_name: str = ""


def json_response(value: object, status: int = 200) -> Response:
    return Response(status, json.dumps(value).encode() + b"\n")


def text_response(text: str, status: int = 200) -> Response:
    """Return a plain text response with the content type of OSWorld's setup routes."""
    return Response(status, text.encode("utf-8", "replace"), "text/html; charset=utf-8")


def parse_multipart(body: bytes | mmap.mmap, boundary: bytes) -> dict[str, Part]:
    """Find the parts of a multipart/form-data body without copying them. Raises: HttpError."""
    delimiter = b"--" + boundary
    position = body.find(delimiter)
    if position != 0 and not (position >= 2 and body[position - 2 : position] == b"\r\n"):
        raise HttpError(400, "multipart body: it does not start with its boundary")
    parts: dict[str, Part] = {}
    while True:
        position += len(delimiter)
        if body[position : position + 2] == b"--":
            return parts
        line_end = body.find(b"\r\n", position)
        header_end = body.find(b"\r\n\r\n", line_end)
        if line_end < 0 or header_end < 0 or header_end - line_end > 16384 or len(parts) >= 100:
            raise HttpError(400, "multipart body: malformed part header")
        header = BytesParser(policy=email.policy.HTTP).parsebytes(body[line_end + 2 : header_end + 4], headersonly=True)
        start = header_end + 4
        position = body.find(b"\r\n" + delimiter, start)
        if position < 0:
            raise HttpError(400, "multipart body: the closing boundary is missing")
        disposition: Any = header["content-disposition"]
        name = disposition.params.get("name") if disposition is not None else None
        if name is None:
            raise HttpError(400, "multipart body: a part has no name")
        parts[str(name)] = Part(start, position)
        position += 2


def expand_path(path: object) -> Path:
    """Return an absolute path; `~` and `$NAME` are expanded for the session's user. Raises: HttpError."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise HttpError(400, f"a path is required, not {path!r}")
    return Path(os.path.abspath(os.path.expandvars(os.path.expanduser(path))))


def read_command(data: Mapping[str, Any]) -> tuple[list[str] | str, bool]:
    """Return the fields `command` and `shell`. A string is split unless a shell runs it.

    Raises:
        HttpError: The command is missing, or neither a string nor a list of strings.
    """
    shell = bool(data.get("shell", False))
    command = data.get("command")
    if not command or not (
        isinstance(command, str) or (isinstance(command, list) and all(isinstance(word, str) for word in command))
    ):
        raise HttpError(400, "command: a non-empty string or list of strings is required")
    if isinstance(command, str):
        if shell:
            return command, True
        try:
            command = shlex.split(command)
        except ValueError as error:
            raise HttpError(400, f"command: {error}") from error
    return [os.path.expanduser(word) if word.startswith("~/") else word for word in command], shell


def read_seconds(
    data: Mapping[str, Any], key: str, default_s: float, *, maximum_s: float = MAX_COMMAND_TIMEOUT_S
) -> float:
    """Return a duration in seconds. Raises: HttpError."""
    value = data.get(key, default_s)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum_s:
        raise HttpError(400, f"{key}: a number between 0 and {maximum_s:g} is required, not {value!r}")
    return float(value)
