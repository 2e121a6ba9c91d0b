"""Decode the requests of each method, up to the size that the method needs."""

from collections.abc import Callable, Mapping
from typing import Final

from google.protobuf.message import DecodeError, Message

from envd.base.errors import InvalidRequest

#: Maximum size of one message in either direction.
MAX_MESSAGE_BYTES: Final = 64 << 20

#: 64 actions may each type 64 KiB.
_MAX_STEP_BYTES = 8 << 20
#: 1000 ids of 256 characters.
_MAX_ID_LIST_BYTES = 2 << 20
#: The longest service name is 256 bytes.
_MAX_HEALTH_BYTES = 256 + 8
_DEFAULT_MAX_BYTES = 256 << 10

_MAX_BYTES: Final[Mapping[str, int]] = {
    "Step": _MAX_STEP_BYTES,
    "StreamSteps": _MAX_STEP_BYTES,
    "ListTasks": _MAX_ID_LIST_BYTES,
    "KeepAlive": _MAX_ID_LIST_BYTES,
    "WriteGuestFile": MAX_MESSAGE_BYTES,
    "RunGuestCommand": MAX_MESSAGE_BYTES,
    "Health/Check": _MAX_HEALTH_BYTES,
    "Health/Watch": _MAX_HEALTH_BYTES,
    # Its responses repeat the request.
    "ServerReflection/ServerReflectionInfo": 4096,
}


def max_request_bytes(method: str) -> int:
    """Return the maximum size of a method's request."""
    return _MAX_BYTES.get(method, _DEFAULT_MAX_BYTES)


def decode_request(method: str, body: bytes | None, parse: Callable[[bytes], Message]) -> Message:
    """Return the request in a body. Raises: InvalidRequest: it is missing, too large or malformed."""
    if body is None:
        raise InvalidRequest("request", "is missing; send one message")
    if len(body) > max_request_bytes(method):
        raise InvalidRequest("request", f"has {len(body)} bytes; {method} takes at most {max_request_bytes(method)}")
    try:
        return parse(body)
    except DecodeError:
        raise InvalidRequest("request", f"is not a valid message of {method}; use the contract's bindings") from None
