"""guestd of a fake guest: the routes of `envd.guests.guestd` that the host uses, over a drawn desktop.

Each machine has a listener on the host's loopback, which is cut with the machine, even during a response. As in the
real guestd, a POST with `X-Request-Id` takes effect once: a repeat joins or replays the first.
"""

import asyncio
import base64
import functools
import shlex
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol
from xml.etree import ElementTree

from aiohttp import web

from envd.base.errors import MachineLost
from envd.base.streams import close, copy
from envd.drawn.desktop.canvas import encode_png
from envd.drawn.desktop.desktop import DrawnDesktop
from envd.drawn.files import DrawnFiles, resolve
from envd.drawn.programs import Programs
from envd.guests.guestd import VERSION
from envd.guests.guestd.messages import (
    MAX_COMMAND_TIMEOUT_S,
    HttpError,
    Request,
    Response,
    json_response,
    read_seconds,
    text_response,
)

_NAMESPACE_URL = "https://accessibility.ubuntu.example.org/ns/"
_NAMESPACES = {"st": "state", "cp": "component"}
_EVERY_STATE = ("enabled", "sensitive", "showing", "visible")

_COMMAND_TIMEOUT_S = 120.0
_MAX_BODY_BYTES = 512 << 20
_MAX_TEXT_LENGTH = 100_000
_MAX_REPLAY_COUNT = 512


#: A program that listens on a port of a guest's loopback, called for each connection.
Service = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send everything back (RFC 862)."""
    await copy(reader, writer)


class ServedGuest(Protocol):
    """A guest to serve."""

    files: DrawnFiles
    programs: Programs
    services: Mapping[int, Service]

    async def reach_guest(self) -> DrawnDesktop:
        """Wait until a request reaches the guest. Raises: MachineLost."""

    async def wait_running(self) -> None:
        """Wait while the machine is paused."""


Handler = Callable[[DrawnDesktop, Request], Awaitable[Response]]


class Guestd:
    """HTTP listener of one guest."""

    def __init__(self, guest: ServedGuest) -> None:
        self.url = ""
        self._guest = guest
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._replays: dict[tuple[str, str], asyncio.Task[Response]] = {}
        self._forwards: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/accessibility"): self._accessibility,
            ("GET", "/cursor_position"): self._cursor_position,
            ("GET", "/envd/pointer"): self._pointer,
            ("GET", "/envd/session"): self._session,
            ("GET", "/platform"): self._platform,
            ("GET", "/screen_size"): self._screen_size,
            ("GET", "/screenshot"): self._screenshot,
            ("GET", "/terminal"): self._terminal,
            ("POST", "/envd/type_text"): self._type_text,
            ("POST", "/execute"): self._execute,
            ("POST", "/file"): self._file,
            ("POST", "/run_bash_script"): self._run_script,
            ("POST", "/screen_size"): self._screen_size,
            ("POST", "/setup/execute"): self._execute,
            ("POST", "/setup/launch"): self._launch,
            ("POST", "/setup/upload"): self._upload,
        }

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        request = functools.partial(web.BaseRequest, loop=loop, client_max_size=_MAX_BODY_BYTES)
        self._server = web.Server(self._serve, request_factory=request, handler_cancellation=True, access_log=None)
        # In two steps: a caller cancelled inside create_server(start_serving=True) could not close the server.
        self._listener = await loop.create_server(self._server, "127.0.0.1", 0, start_serving=False)
        await self._listener.start_serving()
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Close the port and every connection now, as when QEMU exits."""
        if self._listener:
            self._listener.close()
        if self._server:
            for connection in self._server.connections:
                connection.force_close()
        for writer in self._forwards.values():
            writer.transport.abort()

    async def close(self) -> None:
        """Close the port and wait for running requests to end. Idempotent."""
        self.cut()
        ending = [*self._replays.values(), *self._forwards]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if self._server:
            await self._server.shutdown(0)
        if self._listener:
            await self._listener.wait_closed()

    async def _serve(self, http_request: web.BaseRequest) -> web.StreamResponse:
        try:
            desktop = await self._guest.reach_guest()
        except MachineLost:
            if http_request.transport:
                http_request.transport.abort()
            raise web.HTTPServiceUnavailable from None
        return await self._answer(http_request, desktop)

    async def _answer(self, http_request: web.BaseRequest, desktop: DrawnDesktop) -> web.StreamResponse:
        method, content_type = http_request.method, http_request.headers.get("Content-Type", "")
        # Read the body before the effect: a client that disconnects during it has none.
        request = Request(http_request.path, http_request.query, content_type, await http_request.read())
        if (method, request.path) == ("POST", "/envd/forward"):
            return await self._forward(http_request, int(request.query["port"]))
        request_id = http_request.headers.get("X-Request-Id")
        if method != "POST" or request_id is None:
            return await self._send(self._respond(desktop, method, request))
        key = (request.path, request_id)
        task = self._replays.get(key)
        if task is None:
            respond = self._respond(desktop, method, request)
            task = self._replays[key] = asyncio.create_task(respond, name=f"guestd:{request.path}")
            if len(self._replays) > _MAX_REPLAY_COUNT:
                oldest = next(iter(self._replays))
                if self._replays[oldest].done():
                    del self._replays[oldest]
        return await self._send(asyncio.shield(task))

    async def _send(self, responding: Awaitable[Response]) -> web.Response:
        response = await responding
        # A request sent before a pause is answered after it.
        await self._guest.wait_running()
        # The host expects a server of this name to deduplicate POSTs.
        headers = {"Server": f"envd-guestd/{VERSION}", "Content-Type": response.content_type}
        return web.Response(status=response.status, body=response.body, headers=headers)

    async def _forward(self, http_request: web.BaseRequest, port: int) -> web.StreamResponse:
        """Hand the connection over to the program that listens on a port."""
        service = self._guest.services.get(port)
        transport = http_request.transport
        if service is None or transport is None:
            return await self._send(_refused(port))
        loop, former = asyncio.get_running_loop(), http_request.protocol
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: tunnel\r\nConnection: Upgrade\r\n\r\n")

        async def serve() -> None:
            with suppress(OSError):
                await service(reader, writer)
            await close(writer)

        task = asyncio.create_task(serve(), name=f"port {port}")
        self._forwards[task] = writer
        task.add_done_callback(self._forwards.pop)
        # The connection is no longer HTTP: this ends the handler, and would close the transport if it still had it.
        former.transport = None
        former.connection_lost(None)
        return web.Response()

    async def _respond(self, desktop: DrawnDesktop, method: str, request: Request) -> Response:
        try:
            handler = self._routes.get((method, request.path))
            if handler is None:
                raise HttpError(404, f"{method} {request.path}: drawn desktops have no such route")  # noqa: TRY301
            return await handler(desktop, request)
        except HttpError as error:
            return error.response()

    # Commands and files

    async def _execute(self, _desktop: DrawnDesktop, request: Request) -> Response:
        data = request.json()
        argv = _argv(data)
        timeout_s = read_seconds(data, "timeout", _COMMAND_TIMEOUT_S, maximum_s=MAX_COMMAND_TIMEOUT_S)
        try:
            outcome = self._guest.programs.run(argv, stdin=base64.b64decode(data.get("stdin_base64") or ""))
        except FileNotFoundError:
            raise _not_found(argv) from None
        await asyncio.sleep(min(outcome.duration_s, timeout_s))
        if outcome.duration_s > timeout_s:
            raise HttpError(500, f"Command timed out after {timeout_s:g} seconds.", timed_out=True)
        result: dict[str, object] = {"status": "success", "returncode": outcome.exit_code}
        is_binary = data.get("encoding") == "base64"
        for name, stream in (("output", outcome.stdout), ("error", outcome.stderr)):
            result[name] = base64.b64encode(stream).decode() if is_binary else stream.decode("utf-8", "replace")
        if is_binary:
            result["encoding"] = "base64"
        return json_response(result)

    async def _run_script(self, _desktop: DrawnDesktop, request: Request) -> Response:
        """Run a script of one command, as `sh -c` does here."""
        script = request.json().get("script")
        if not isinstance(script, str) or not script:
            raise HttpError(400, "Script not supplied!")
        lines = [line for line in script.splitlines() if line and not line.startswith("#")]
        outcome = self._guest.programs.run(["sh", "-c", "\n".join(lines)])
        await asyncio.sleep(outcome.duration_s)
        output = (outcome.stdout + outcome.stderr).decode("utf-8", "replace")
        status = "error" if outcome.exit_code else "success"
        return json_response({"status": status, "output": output, "error": "", "returncode": outcome.exit_code})

    async def _launch(self, desktop: DrawnDesktop, request: Request) -> Response:
        argv = _argv(request.json())
        try:
            was_found = desktop.launch(argv[0], *argv[1:2])
        except ValueError as error:
            raise HttpError(500, f"{argv!r} cannot be started: {error}") from error
        if not was_found:
            raise HttpError(500, f"{_not_found(argv)}; drawn desktops have editor, controls and form")
        return text_response(f"{' '.join(argv)} launched successfully")

    async def _upload(self, _desktop: DrawnDesktop, request: Request) -> Response:
        parts = request.parts()
        if not {"file_path", "file_data"} <= set(parts):
            raise HttpError(400, "file_path and file_data are required")
        path, data = (bytes(request.body[part.start : part.end]) for part in (parts["file_path"], parts["file_data"]))
        self._guest.files[path.decode()] = data
        return text_response("File Uploaded")

    async def _file(self, _desktop: DrawnDesktop, request: Request) -> Response:
        path = request.form().get("file_path")
        if not path:
            raise HttpError(400, "file_path is required")
        if path not in self._guest.files:
            raise HttpError(404, "File not found")
        return Response(200, self._guest.files[path], "application/octet-stream")

    # Screen and session

    async def _session(self, desktop: DrawnDesktop, _request: Request) -> Response:
        titles = [window.title for window in desktop.windows]
        session = {"ready": True, "display": ":0", "window_manager": "envd fake desktop", "windows": titles}
        return json_response({**session, "version": VERSION, "problem": ""})

    async def _pointer(self, desktop: DrawnDesktop, _request: Request) -> Response:
        x, y = desktop.pointer_position
        buttons, modifiers = desktop.held_buttons, desktop.held_modifiers
        return json_response({"x": x, "y": y, "buttons": buttons, "modifiers": modifiers})

    async def _cursor_position(self, desktop: DrawnDesktop, _request: Request) -> Response:
        return json_response([*desktop.pointer_position])

    async def _platform(self, _desktop: DrawnDesktop, _request: Request) -> Response:
        return text_response("Linux")

    async def _screen_size(self, desktop: DrawnDesktop, _request: Request) -> Response:
        height, width = desktop.framebuffer.pixels.shape[:2]
        return json_response({"width": width, "height": height})

    async def _type_text(self, desktop: DrawnDesktop, request: Request) -> Response:
        text = request.json().get("text")
        if not isinstance(text, str):
            raise HttpError(400, "text: a string is required")
        if len(text) > _MAX_TEXT_LENGTH:
            raise HttpError(413, f"text: {len(text)} characters; at most {_MAX_TEXT_LENGTH} a call")
        desktop.type_text(text)
        return json_response({"typed": len(text)})

    async def _screenshot(self, desktop: DrawnDesktop, _request: Request) -> Response:
        png = await asyncio.to_thread(encode_png, desktop.framebuffer.pixels.copy())
        return Response(200, png, "image/png")

    async def _accessibility(self, desktop: DrawnDesktop, _request: Request) -> Response:
        return json_response({"AT": accessibility_tree(desktop)})

    async def _terminal(self, _desktop: DrawnDesktop, _request: Request) -> Response:
        return json_response({"output": None, "status": "success"})


def accessibility_tree(desktop: DrawnDesktop) -> str:
    """Return the screen's elements as XML, in the format of OSWorld's Linux accessibility trees."""
    for prefix, name in _NAMESPACES.items():
        ElementTree.register_namespace(prefix, _NAMESPACE_URL + name)
    root = ElementTree.Element("desktop-frame")
    parent = root
    for element in desktop.elements():
        if element.role == "frame":
            parent = root
        node = ElementTree.SubElement(
            parent,
            element.role,
            {
                "name": element.name,
                **{f"{{{_NAMESPACE_URL}state}}{state}": "true" for state in (*element.states, *_EVERY_STATE)},
                f"{{{_NAMESPACE_URL}component}}screencoord": f"({element.rect.x}, {element.rect.y})",
                f"{{{_NAMESPACE_URL}component}}size": f"({element.rect.w}, {element.rect.h})",
            },
        )
        node.text = element.text or None
        if element.role == "frame":
            parent = node
    return ElementTree.tostring(root, encoding="unicode")


async def _refused(port: int) -> Response:
    return HttpError(502, f"port {port} of the guest: Connection refused").response()


def _not_found(argv: list[str]) -> HttpError:
    return HttpError(500, f"{argv!r} cannot be started: [Errno 2] No such file or directory: {argv[0]!r}")


def _argv(data: dict[str, Any]) -> list[str]:
    # Not `envd.guests.guestd.messages.read_command`, which expands `~` to the home directory of its own host.
    command = data.get("command")
    if not command or not isinstance(command, str | list):
        raise HttpError(400, "command: a non-empty string or list of strings is required")
    if isinstance(command, str):
        return ["sh", "-c", command] if data.get("shell") else _argv({"command": shlex.split(command)})
    return [resolve(word) if word.startswith("~/") else str(word) for word in command]
