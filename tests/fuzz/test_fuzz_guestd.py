"""Hostile responses of a guest's HTTP service end in an `EnvdError` or in valid data."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envd.base.errors import EnvdError, GuestError
from envd.desktop import guestd as guestd_module
from envd.desktop.guestd import GuestdClient
from tests.support.fuzz import fuzzed, inputs, json_values, with_corpus

Guestd = GuestdClient
DEEP = b"[" * 50_000 + b"]" * 50_000
MAX_MESSAGE_CHARS = 4000

CALLS: dict[str, Callable[[Guestd], Awaitable[object]]] = {
    "session": lambda guestd: guestd.session(timeout_s=1),
    "screenshot": lambda guestd: guestd.screenshot(timeout_s=1),
    "accessibility": lambda guestd: guestd.accessibility(timeout_s=1),
    "terminal": lambda guestd: guestd.terminal(timeout_s=1),
    "type_text": lambda guestd: guestd.type_text("x", timeout_s=1),
    "pointer": lambda guestd: guestd.pointer(timeout_s=1),
    "execute": lambda guestd: guestd.execute(["id"], timeout_s=1),
    "write_file": lambda guestd: guestd.write_file("/a", b"x", timeout_s=1),
}
#: The fields of every valid response, so that one wrong field is tested among valid ones.
VALID: dict[str, Any] = {
    "ready": True,
    "display": ":0",
    "window_manager": "openbox",
    "windows": ["t"],
    "version": "1",
    "AT": "<tree/>",
    "output": "YQ==",
    "error": "",
    "encoding": "base64",
    "returncode": 0,
    "typed": 1,
    "x": 1,
    "y": 2,
    "buttons": [1],
    "modifiers": ["shift"],
}


def _with_wrong_fields(valid: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted(valid)), json_values, max_size=3).map(
        lambda wrong: {**valid, **wrong}
    )


objects = st.one_of(_with_wrong_fields(VALID), json_values)
bodies = objects.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60)


def texts_in(value: object) -> Iterable[str]:
    """Yield every text in a result."""
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from texts_in(getattr(value, field.name))
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from texts_in(item)
    else:
        assert value is None or isinstance(value, bool | int | bytes), f"{value!r} has an unexpected type"


def check(result: object) -> None:
    for text in texts_in(result):
        text.encode()
    if isinstance(result, guestd_module.SessionInfo):
        assert isinstance(result.display, str | None)
        assert all(isinstance(title, str) for title in result.windows)


def check_message(error: EnvdError) -> None:
    """Error messages quote the guest and are bounded in length."""
    assert len(str(error)) <= MAX_MESSAGE_CHARS


async def call_and_check(call: str, guestd: Guestd) -> None:
    try:
        check(await asyncio.wait_for(CALLS[call](guestd), 60))
    except EnvdError as error:
        check_message(error)


class Scripted(GuestdClient):
    """A client that returns one response to every request, without a socket."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__("http://127.0.0.1:1", lost=asyncio.Event())
        self._response = status, body

    async def _request(self, *_args: Any, **_options: Any) -> tuple[int, bytes]:
        return self._response


@fuzzed(150)
@given(st.sampled_from(sorted(CALLS)), st.sampled_from([200, 200, 200, 200, 204, 302, 404, 500, 503]), bodies)
@example("pointer", 200, b'{"x": 1e999, "y": 1, "buttons": [], "modifiers": []}')
@example("type_text", 200, b'{"typed": Infinity}')
@example("type_text", 200, b'{"typed": 1e999}')
@example("session", 200, json.dumps({**VALID, "windows": [{}] * 10_000}).encode())
@example("session", 200, json.dumps({**VALID, "windows": ["\ud800"]}).encode())
@example("session", 200, json.dumps({**VALID, "windows": "ab"}).encode())
@example("session", 200, json.dumps({**VALID, "display": []}).encode())
@example("accessibility", 200, b'{"AT": "\\udc80"}')
@example("terminal", 200, b'{"output": "\\udc80"}')
@example("execute", 200, json.dumps({**VALID, "output": "x" * 100_000, "returncode": "y" * 100_000}).encode())
def test_any_json_from_the_guest_is_data_or_a_typed_error(call: str, status: int, body: bytes) -> None:
    asyncio.run(call_and_check(call, Scripted(status, body)))


@pytest.mark.parametrize("status", [200, 404, 500])
@pytest.mark.parametrize("call", sorted(CALLS))
def test_deeply_nested_json_is_a_typed_error(call: str, status: int) -> None:
    for body in (DEEP, b'{"message": ' + DEEP + b"}"):
        asyncio.run(call_and_check(call, Scripted(status, body)))


BOMB = b'{"x": 1, "AT": "", "bomb": [' + b"[]," * 500_000 + b"[]]}"


@pytest.mark.parametrize("call", ["accessibility", "execute", "pointer", "session", "terminal"])
def test_a_response_of_millions_of_values_is_rejected_unparsed(call: str) -> None:
    with pytest.raises(GuestError, match="outside of strings"):
        asyncio.run(CALLS[call](Scripted(200, BOMB)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("call", "limit_bytes"), [("pointer", 1 << 20), ("session", 1 << 20), ("terminal", 4 << 20)])
async def test_a_response_is_limited_by_its_route(call: str, limit_bytes: int) -> None:
    body = json.dumps({**VALID, "problem": "x" * limit_bytes}).encode()
    raw = _response(200, [("Content-Length", str(len(body)))], body)
    async with answering(raw) as (url, _), GuestdClient(url, lost=asyncio.Event()) as guestd:
        with pytest.raises(GuestError, match=f"larger than {limit_bytes} bytes"):
            await CALLS[call](guestd)


async def test_only_the_start_of_an_error_response_is_read_and_parsed() -> None:
    body = b'{"message": "' + b"x" * (1 << 20) + b'"}'
    raw = _response(500, [("Content-Length", str(len(body)))], body)
    async with answering(raw) as (url, _), GuestdClient(url, lost=asyncio.Event()) as guestd:
        with pytest.raises(GuestError) as error:
            await guestd.pointer()
    # Truncated JSON is quoted as plain text.
    assert 'returned 500: {"message": "xxx' in str(error.value)
    check_message(error.value)


# -- over a socket ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def answering(raw: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve these bytes to every request, then close the connection. Yields the URL and the received requests."""
    seen: list[bytes] = []
    served: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        seen.append(await reader.read(65_536))
        writer.write(raw)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()
        # The last accepted connection is served a few iterations of the loop later.
        for _ in range(5):
            await asyncio.sleep(0)
        await asyncio.gather(*served)


async def over_a_socket(call: str, raw: bytes) -> int:
    """Make a call to a service that answers with these bytes; return the number of requests."""
    async with answering(raw) as (url, seen), GuestdClient(url, lost=asyncio.Event(), lost_grace_s=0.0) as guestd:
        await call_and_check(call, guestd)
    return len(seen)


def _response(status: int, headers: list[tuple[str, str]], body: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace") + body


headers = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "Content-Length",
                "Transfer-Encoding",
                "Content-Type",
                "Content-Encoding",
                "Set-Cookie",
                "Server",
                "Upgrade",
            ]
        ),
        st.sampled_from(["0", "5", "-1", "99999999999999999999", "chunked", "gzip", "a=b", "envd-guestd/1", ""])
        | st.text(st.characters(codec="latin-1"), max_size=10),
    ),
    max_size=4,
)
raw_answers = st.builds(
    _response, st.sampled_from([100, 101, 200, 204, 301, 307, 404, 500, 999]), headers, bodies
) | inputs("guestd", max_size=80)


@fuzzed(60)
@with_corpus("guestd", "session")
@given(st.sampled_from(sorted(CALLS)), raw_answers)
@example("session", b"")
@example("session", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000)
@example("execute", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx")
def test_any_bytes_from_the_guest_are_data_or_a_typed_error(call: str, raw: bytes) -> None:
    asyncio.run(asyncio.wait_for(over_a_socket(call, raw), 60))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("call", ["screenshot", "write_file", "execute"])
async def test_redirects_are_not_followed(call: str, status: int) -> None:
    secret = _response(200, [("Content-Length", "6")], b"secret")
    async with answering(secret) as (other, visits):
        away = _response(status, [("Location", other), ("Content-Length", "0")], b"")
        async with answering(away) as (url, _), GuestdClient(url, lost=asyncio.Event()) as guestd:
            with pytest.raises(GuestError, match=f"returned {status}"):
                await CALLS[call](guestd)
        assert visits == []


async def test_cookies_are_ignored() -> None:
    cookie = _response(200, [("Set-Cookie", "a=b"), ("Content-Length", "1")], b"x")
    async with (
        answering(cookie) as (url, seen),
        GuestdClient(url.replace("127.0.0.1", "localhost"), lost=asyncio.Event()) as guestd,
    ):
        for _ in range(2):
            await guestd.screenshot()
        assert guestd._http is not None
        assert len(guestd._http.cookie_jar) == 0
    assert len(seen) == 2
    assert b"cookie" not in b"".join(seen).lower()
