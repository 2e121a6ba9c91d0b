"""The Connect protocol, as E2B's SDKs speak it: unary calls and streams with JSON over HTTP.

https://connectrpc.com/docs/protocol: a message of a stream is a byte of flags, four bytes of length, and JSON.
"""

import json
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from cuaenv.client.errors import (
    EnvError,
    EpisodeNotFound,
    GuestEnded,
    LossUndecided,
    MachineLost,
    NotSupported,
    RateLimited,
    SampleVoid,
)
from cuaenv.problems import first_problem
from envd.base import untrusted_json
from envd.integrations.compat.routes import Handler, arguments_model

#: Statuses of the codes.
CODES: Final = {
    "canceled": 499, "unknown": 500, "invalid_argument": 400, "deadline_exceeded": 504, "not_found": 404,
    "already_exists": 409, "permission_denied": 403, "resource_exhausted": 429, "failed_precondition": 400,
    "aborted": 409, "out_of_range": 400, "unimplemented": 501, "internal": 500, "unavailable": 503, "data_loss": 500,
    "unauthenticated": 401,
}  # fmt: skip
MAX_MESSAGE_BYTES: Final = 4 << 20
_UNARY = "application/json"
_STREAM = "application/connect+json"
_END = 2

Fields = dict[str, Any]
M = TypeVar("M", bound="RpcMessage")


class RpcMessage(BaseModel):
    """Base of requests. Fields may be added to the protocol, so unknown ones are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, alias_generator=to_camel, validate_by_name=True)


class RpcError(Exception):
    """A call that failed, with its code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def fields(self) -> Fields:
        return {"code": self.code, "message": str(self)}


def is_gone(error: EnvError) -> bool:
    """Return whether an error means that the sandbox has no machine any more.

    A guest that breaks a call off may run, or have just ended itself, which the daemon decides: its task can be scored.
    """
    return isinstance(error, EpisodeNotFound | GuestEnded | MachineLost | LossUndecided)


def ended(why: str) -> RpcError:
    """Return the error of a call whose sandbox ended; SDKs ask then whether it still runs."""
    return RpcError("unavailable", f"the connection to the sandbox ended before the call completed: {why}")


def rpc_error(error: EnvError) -> RpcError:
    """Return an error of the daemon as one of the protocol."""
    if is_gone(error) or isinstance(error, SampleVoid):
        return ended(str(error))
    if isinstance(error, RateLimited):
        return RpcError("resource_exhausted", str(error))
    if isinstance(error, NotSupported):
        return RpcError("unimplemented", str(error))
    codes = {"INVALID_ARGUMENT": "invalid_argument", "PERMISSION_DENIED": "permission_denied"}
    return RpcError(codes.get(error.code, "failed_precondition"), str(error))


def timeout_s(request: web.Request) -> float:
    """Return the time that the caller gives a call; 0 for no limit. Raises: RpcError."""
    value = request.headers.get("Connect-Timeout-Ms", "0")
    if not value.isascii() or not value.isdecimal() or len(value) > 10:
        raise RpcError("invalid_argument", f"Connect-Timeout-Ms {value[:20]!r} is not a number of at most 10 digits")
    return int(value) / 1000


async def read_message(request: web.Request, kind: type[M]) -> M:
    """Return the request of a unary call or of a server's stream. Raises: RpcError."""
    body = await request.read()
    if request.content_type == _STREAM:
        if len(body) < 5 or body[0] != 0 or len(body) != 5 + struct.unpack(">I", body[1:5])[0]:
            raise RpcError("invalid_argument", "the request is not one uncompressed message")
        body = body[5:]
    elif request.content_type != _UNARY:
        raise unsupported()
    return await parsed(body, kind)


async def parsed(body: bytes, kind: type[M]) -> M:
    """Return a message. Raises: RpcError."""
    try:
        return kind.model_validate(await untrusted_json.parse(body))
    except ValidationError as error:
        raise RpcError("invalid_argument", first_problem(error.errors(), whole="body")) from None
    except ValueError as error:
        raise RpcError("invalid_argument", f"the request is not JSON: {error}") from None


def unary(handler: Handler) -> Handler:
    """Return a service whose request's fields are the handler's keyword-only arguments."""
    kind = arguments_model(handler, RpcMessage) or RpcMessage

    async def serve(request: web.Request, *context: object) -> web.StreamResponse:
        return await handler(request, *context, **vars(await read_message(request, kind)))

    return serve


async def read_stream(request: web.Request, kind: type[M]) -> AsyncIterator[M]:
    """Yield the messages of a client's stream. Raises: RpcError."""
    if request.content_type != _STREAM:
        raise unsupported()
    while head := await request.content.read(1):
        length = struct.unpack(">I", await request.content.readexactly(4))[0]
        if head[0] not in (0, _END) or length > MAX_MESSAGE_BYTES:
            raise RpcError("invalid_argument", f"a message is compressed, or has more than {MAX_MESSAGE_BYTES} bytes")
        body = await request.content.readexactly(length)
        if head[0] == 0:
            yield await parsed(body, kind)


def unsupported() -> web.HTTPException:
    """Return the answer to another encoding, such as binary protobuf."""
    return web.HTTPUnsupportedMediaType(headers={"Accept-Post": f"{_UNARY}, {_STREAM}"})


def unary_response(content: Fields) -> web.Response:
    return web.json_response(content)


def error_response(error: RpcError) -> web.Response:
    return web.json_response(error.fields, status=CODES[error.code])


async def begin_stream(request: web.Request) -> web.StreamResponse:
    """Return a response to which messages are sent."""
    response = web.StreamResponse(headers={"Content-Type": _STREAM})
    await response.prepare(request)
    return response


async def send(response: web.StreamResponse, content: Fields, *, flags: int = 0) -> None:
    body = json.dumps(content).encode()
    await response.write(struct.pack(">BI", flags, len(body)) + body)


def cut_off(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Break the connection of a response that began and cannot be completed, so that no caller takes it for whole."""
    if request.transport is not None:
        request.transport.abort()
    return response


async def end_stream(response: web.StreamResponse, error: RpcError | None = None) -> web.StreamResponse:
    """End a stream, with an error or without. Its caller may have left."""
    with suppress(ConnectionError):
        await send(response, {"error": error.fields} if error else {}, flags=_END)
        await response.write_eof()
    return response
