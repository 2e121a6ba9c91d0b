"""Client of the HTTP service inside one guest: ours (`envd.guests.guestd`), or OSWorld's for the routes that both have.

Every call has a deadline, responses are bounded in size, and a call ends with `MachineLost` as soon as the machine is
lost. Callers decide what to do about a failure, and poll `session` for readiness.
"""

import asyncio
import base64
import io
import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self, TypeVar

import aiohttp
from pydantic import AfterValidator, FailFast, Field, JsonValue, TypeAdapter, ValidationError
from yarl import URL

from cuaenv.results import CommandResult
from envd.base import untrusted_json
from envd.base.aio import race
from envd.base.clock import running_timeout
from envd.base.errors import GuestError, GuestServiceEnded, GuestUnresponsive, MachineLost, TooLarge

_CHUNK_BYTES = 1 << 16
#: What a service says of a request that it did not get, but the one before it.
_RESTARTED = "guestd was restarted"
#: Most bytes of a response, by path: two outputs of 16 MiB in base64, a picture, an accessibility tree, a terminal.
_RESPONSE_LIMIT_BYTES = {
    "/execute": 48 << 20,
    "/screenshot": 64 << 20,
    "/accessibility": 16 << 20,
    "/terminal": 4 << 20,
}
_OTHER_RESPONSE_LIMIT_BYTES = 1 << 20
#: Bytes that are read of an error response; the rest is ignored.
_ERROR_RESPONSE_BYTES = 64 << 10
_MAX_MESSAGE_CHARS = 2000
# Longer than the guest's own deadline, so that the guest, which kills the command, reports the timeout.
_GRACE_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """State of the guest's desktop session."""

    ready: bool
    """X answers, a window manager runs, and the windows that guestd is configured to wait for show."""
    display: str | None
    window_manager: str | None
    windows: Annotated[tuple[str, ...], FailFast()]
    """Titles of the managed windows."""
    version: str
    """guestd's version; empty for another service."""
    problem: Annotated[str, AfterValidator(lambda text: text[:_MAX_MESSAGE_CHARS])] = ""
    """Why the session is not ready; empty if it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerState:
    """The pointer's position and the held buttons and modifiers, as the X server reports them."""

    x_px: Annotated[int, Field(validation_alias="x")]
    y_px: Annotated[int, Field(validation_alias="y")]
    buttons: Annotated[frozenset[int], FailFast()]
    modifiers: Annotated[frozenset[str], FailFast()]
    """X's names: shift, lock, control, mod1 to mod5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyboardLayout:
    """What the keys of the guest's keyboard do now."""

    characters: Mapping[str, tuple[int, bool]]
    """Evdev's code of each character's key, and whether with Shift. Fewer than the guest can type by `type_text`."""
    num_lock: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Executed:
    output: str
    error: str
    returncode: int
    encoding: str = ""
    truncated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Body of an error response, from our service or OSWorld's."""

    message: str = ""
    error: str = ""
    timed_out: bool = False


_SESSION = TypeAdapter(SessionInfo)
_POINTER = TypeAdapter(PointerState)
_KEYBOARD = TypeAdapter(KeyboardLayout)
_EXECUTED = TypeAdapter(_Executed)
_OBJECT = TypeAdapter(dict[str, JsonValue])
_FAILURE = TypeAdapter(_Failure)


class GuestdClient:
    """Calls one guest's HTTP service. Each call opens its own connection: a kept one goes stale during a pause.

    Methods raise `GuestUnresponsive` if it does not answer in time, `GuestError` if it cannot do what is asked, and
    `MachineLost`.

    Args:
        lost_grace_s: How long a broken connection waits for the news that the machine is lost.
    """

    def __init__(self, base_url: str, *, lost: asyncio.Event, lost_grace_s: float = 0.2) -> None:
        self._base_url = URL(base_url)
        self._lost = lost
        self._lost_grace_s = lost_grace_s
        self._http: aiohttp.ClientSession | None = None
        self._closed = False
        self._server = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Idempotent; later calls raise GuestUnresponsive."""
        self._closed = True
        if self._http is not None:
            await self._http.close()

    # Session and screen

    async def session(self, *, timeout_s: float = 10.0) -> SessionInfo:
        """Return whether the desktop is ready.

        OSWorld's service has no such route: there, a successful screenshot counts as ready.
        """
        status, body = await self._request("GET", "/envd/session", timeout_s=timeout_s)
        if status == 404:
            return await self._osworld_session(timeout_s)
        return await _parse(_SESSION, _checked(status, body, "/envd/session"), "/envd/session")

    async def _osworld_session(self, timeout_s: float) -> SessionInfo:
        path = "/platform"
        status, body = await self._request("GET", path, timeout_s=timeout_s)
        is_ready = status == 200
        if is_ready:
            path = "/screenshot"
            status, body = await self._request("GET", path, timeout_s=timeout_s)
            is_ready = status == 200 and body.startswith(b"\x89PNG")
        problem = "" if is_ready else f"{path} returned {status}: {failure_text(body)}"
        return SessionInfo(ready=is_ready, display=None, window_manager=None, windows=(), version="", problem=problem)

    async def screenshot(self, *, timeout_s: float = 30.0) -> bytes:
        """Return the screen with its pointer, as PNG. Raises: GuestError, GuestUnresponsive, MachineLost."""
        return await self._call("GET", "/screenshot", timeout_s=timeout_s)

    async def accessibility(self, *, showing: bool = False, timeout_s: float = 30.0) -> str:
        """Return the accessibility tree as XML.

        Args:
            showing: Only elements that show, in a fraction of the time. OSWorld's service ignores this.
        """
        query = {"showing": "1"} if showing else None
        body = await self._call("GET", "/accessibility", query=query, timeout_s=timeout_s)
        if (xml := await _text_in(body, "AT", "/accessibility")) is None:
            raise _malformed("/accessibility", "AT: is missing")
        return xml

    async def terminal(self, *, timeout_s: float = 30.0) -> str | None:
        """Return the text of the focused terminal, or None. Raises: GuestError, GuestUnresponsive, MachineLost."""
        body = await self._call("GET", "/terminal", timeout_s=timeout_s)
        return await _text_in(body, "output", "/terminal")

    async def change_wallpaper(self, path: str, *, timeout_s: float = 30.0) -> None:
        """Set the wallpaper to a picture in the guest. Raises: GuestError, GuestUnresponsive, MachineLost."""
        await self._call("POST", "/setup/change_wallpaper", json_body={"path": path}, timeout_s=timeout_s)

    # Input

    async def type_text(self, text: str, *, held: Sequence[int] = (), timeout_s: float = 60.0) -> str:
        """Type any Unicode text into the focused window, through the X server, while keys are held.

        Args:
            held: Keysyms of the keys to hold down.

        Returns why the text, or its end, could not be typed in the session's present state; empty if it is typed.

        Raises:
            GuestError: A character cannot be typed, or the service is not ours. Nothing was typed.
            GuestUnresponsive: Not done within `timeout_s`; part of the text may have been typed.
        """
        content = _json({"text": text, "held": list(held)} if held else {"text": text})
        status, body = await self._request("POST", "/envd/type_text", content=content, timeout_s=timeout_s)
        if status == 409:
            return failure_text(body)
        _checked(status, body, "/envd/type_text")
        return ""

    async def keyboard(self, *, timeout_s: float = 10.0) -> KeyboardLayout | None:
        """Return what the keys do now; None if the service has no such route.

        Raises:
            GuestError: There is no X session, for example.
        """
        status, body = await self._request("GET", "/envd/keyboard", timeout_s=timeout_s)
        if status == 404:
            return None
        return await _parse(_KEYBOARD, _checked(status, body, "/envd/keyboard"), "/envd/keyboard")

    async def pointer(self, *, timeout_s: float = 10.0) -> PointerState:
        """Return the state of the pointer. Raises: GuestError, GuestUnresponsive, MachineLost."""
        return await _parse(_POINTER, await self._call("GET", "/envd/pointer", timeout_s=timeout_s), "/envd/pointer")

    # Commands and files

    async def execute(
        self, command: Sequence[str], *, timeout_s: float, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Run a command in the user's session to its end.

        Raises:
            GuestError: It could not be started, or its output exceeds guestd's limit (16 MiB).
            GuestUnresponsive: It did not end within `timeout_s`, and was killed with its process group.
        """
        request: dict[str, Any] = {"command": list(command), "timeout": timeout_s, "encoding": "base64"}
        if stdin:
            request["stdin_base64"] = base64.b64encode(stdin).decode()
        if env:
            request["env"] = dict(env)
        body = await self._call("POST", "/execute", json_body=request, timeout_s=timeout_s + _GRACE_S)
        executed = await _parse(_EXECUTED, body, "/execute")
        if executed.truncated:
            raise TooLarge(f"/execute {command!r}: its output exceeds guestd's limit; write it to a file")
        is_base64 = executed.encoding == "base64"
        try:
            stdout, stderr = [
                await untrusted_json.decode_base64(text) if is_base64 else text.encode()
                for text in (executed.output, executed.error)
            ]
        except ValueError as error:
            raise _malformed("/execute", str(error)) from error
        returncode = executed.returncode
        return CommandResult(exit_code=128 - returncode if returncode < 0 else returncode, stdout=stdout, stderr=stderr)

    async def launch(self, command: Sequence[str], *, timeout_s: float = 30.0) -> None:
        """Start a program in the user's session and leave it running.

        Raises:
            GuestError: It could not be started.
        """
        await self._call("POST", "/setup/launch", json_body={"command": list(command)}, timeout_s=timeout_s)

    async def write_file(self, path: str, data: bytes, *, timeout_s: float = 60.0) -> None:
        """Write a file as the session's user; creates parent directories; `~` is the user's home.

        Raises:
            GuestError: It cannot be written; an existing file is unchanged.
        """
        status, body = await self._request("POST", "/setup/upload", content=_upload(path, data), timeout_s=timeout_s)
        _checked(status, body, f"/setup/upload {path}")

    # Transport

    async def _call(
        self,
        method: str,
        path: str,
        *,
        json_body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> bytes:
        """Return the body of a successful response. Raises: GuestError, GuestUnresponsive, MachineLost."""
        content = None if json_body is None else _json(json_body)
        status, body = await self._request(method, path, content=content, query=query, timeout_s=timeout_s)
        return _checked(status, body, path)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        content: tuple[str, bytes] | None = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> tuple[int, bytes]:
        """Send a request within `timeout_s`; retry a broken connection if a repeat cannot repeat an effect.

        `content` is the type of the body, and the body. Returns the response's status and body.
        """
        if self._lost.is_set():
            raise self._machine_lost(path)
        headers = {"X-Request-Id": uuid.uuid4().hex} if method == "POST" else {}
        if content:
            headers["Content-Type"] = content[0]
        call = asyncio.create_task(
            self._exchange(method, path, content=content, query=query, headers=headers), name=f"guestd:{path}"
        )
        try:
            with suppress(TimeoutError):
                async with running_timeout(timeout_s):
                    await race(call, self._lost)
            if call.done() and isinstance(call.exception(), GuestUnresponsive):
                # A connection breaks some milliseconds before the hypervisor reports that the machine is lost.
                await race(self._lost, timeout_s=self._lost_grace_s)
            elif call.done():
                return call.result()
            if self._lost.is_set():
                raise self._machine_lost(path)
            if call.done():
                return call.result()
            raise GuestUnresponsive(f"guestd at {self._base_url} did not answer {method} {path} within {timeout_s:g} s")
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _exchange(
        self,
        method: str,
        path: str,
        *,
        content: tuple[str, bytes] | None,
        query: Mapping[str, str] | None,
        headers: Mapping[str, str],
    ) -> tuple[int, bytes]:
        if self._closed:
            raise GuestUnresponsive(f"the connection to guestd at {self._base_url} is closed")
        if self._http is None:
            self._http = self._connect()
        http = self._http

        async def attempt(headers: Mapping[str, str]) -> tuple[int, bytes]:
            async with http.request(
                method,
                self._base_url.with_path(path),
                # A stream, because aiohttp warns about bytes over 1 MiB; a new one per attempt, because it is consumed.
                data=io.BytesIO(content[1]) if content else None,
                params=query,
                headers=headers,
                # No redirects: a guest could point us at other services of this host (SSRF).
                allow_redirects=False,
            ) as response:
                self._server = response.headers.get("Server", "")
                return response.status, await _read(response, path)

        try:
            try:
                return await attempt(headers)
            except aiohttp.ClientError:
                # Our service deduplicates POSTs by X-Request-Id, as long as it runs; OSWorld's does not.
                if method != "GET" and not self._server.startswith("envd-guestd/"):
                    raise
                return await attempt({**headers, "X-Server": self._server})
        except aiohttp.ClientError as error:
            raise GuestUnresponsive(
                f"guestd at {self._base_url} broke the connection during {method} {path}: {error}"
            ) from error

    @staticmethod
    def _connect() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            # A proxy from the environment would intercept calls to the loopback.
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None),
            # A connection kept open over a pause of the machine may be dead without either end noticing.
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            auto_decompress=False,
            # Ignore cookies.
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def _machine_lost(self, path: str) -> MachineLost:
        return MachineLost(f"the machine behind {self._base_url} was lost before it answered {path}")


def _upload(path: str, data: bytes) -> tuple[str, bytes]:
    boundary = uuid.uuid4().hex
    lines = [
        f"--{boundary}".encode(),
        b'Content-Disposition: form-data; name="file_path"',
        b"",
        path.encode("utf-8", "surrogateescape"),
        f"--{boundary}".encode(),
        b'Content-Disposition: form-data; name="file_data"; filename="data"',
        b"Content-Type: application/octet-stream",
        b"",
        data,
        f"--{boundary}--".encode(),
        b"",
    ]
    return f"multipart/form-data; boundary={boundary}", b"\r\n".join(lines)


async def _read(response: aiohttp.ClientResponse, path: str) -> bytes:
    is_success = 200 <= response.status < 300
    limit_bytes = _RESPONSE_LIMIT_BYTES.get(path, _OTHER_RESPONSE_LIMIT_BYTES) if is_success else _ERROR_RESPONSE_BYTES
    content = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        content += chunk
        if len(content) > limit_bytes:
            if is_success:
                raise GuestError(f"{path}: the response is larger than {limit_bytes} bytes")
            return bytes(content[:limit_bytes])
    return bytes(content)


def _json(body: Mapping[str, Any]) -> tuple[str, bytes]:
    return "application/json", json.dumps(body).encode()


def _checked(status: int, body: bytes, request: str) -> bytes:
    """Return the body of a successful response.

    Raises:
        GuestUnresponsive: The guest is too busy, or a command did not end in time.
        GuestError: The call failed otherwise.
    """
    if 200 <= status < 300:
        return body
    failure = _failure(body)
    message = f"{request}: guestd returned {status}: {failure.message}"
    if status == 503 and _RESTARTED in failure.message:
        raise GuestServiceEnded(message)
    raise GuestUnresponsive(message) if status == 503 or failure.timed_out else GuestError(message)


def _failure(body: bytes) -> _Failure:
    """Return the content of an error response, with the message from JSON or plain text."""
    body = body[:_ERROR_RESPONSE_BYTES]
    try:
        failure = _FAILURE.validate_json(body)
    except ValidationError:
        failure = _Failure()
    text = failure.message or failure.error or body.decode("utf-8", "replace").strip()
    return replace(failure, message=text[:_MAX_MESSAGE_CHARS] or "no reason given")


def failure_text(body: bytes) -> str:
    """Return the message in the body of an error response, bounded."""
    return _failure(body).message


async def _text_in(body: bytes, field: str, path: str) -> str | None:
    """Return the text of a field of a response; None if it is missing or null. Raises: GuestError: it is not a text."""
    text = (await _parse(_OBJECT, body, path)).get(field)
    if text is not None and not isinstance(text, str):
        raise _malformed(path, f"{field}: Input should be a valid string")
    return text


async def _parse(adapter: TypeAdapter[T], body: bytes, path: str) -> T:
    try:
        await untrusted_json.check_structure(body)
        return adapter.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise _malformed(path, f"{where}: {first['msg']}" if where else first["msg"]) from error
    except ValueError as error:
        raise _malformed(path, str(error)) from error


def _malformed(path: str, problem: str) -> GuestError:
    return GuestError(f"{path}: malformed response from guestd: {problem[:_MAX_MESSAGE_CHARS]}")
