"""The proxy of one pool: mitmproxy in a sandbox without a network. Runs in the web environment.

Arguments are a control socket (SOCK_SEQPACKET), the descriptor of the recording's file and settings as JSON. It sends,
one JSON object a message, first `{"port": 0}` with a listening socket of the sandbox's loopback, to which it connects
to reach web servers; then `{"ready": 1}` or `{"error": ""}`; then an `Event` for each request. It receives a machine's
id with a stream socket for each connection of a program in that machine's guest.

When it replays, nothing reads the listening socket, and every request gets its response here.
"""

import asyncio
import json
import os
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from mitmproxy import http
from mitmproxy.options import Options
from mitmproxy.tools.dump import DumpMaster

from envd.base import streams
from envd.base.sandbox import enclosure
from envd.integrations.web.warc import MAX_BODY_BYTES, Damaged, WebRecording, cookies_of, records

#: Free in a network of its own.
_PROXY_PORT, _EXIT_PORT = 8080, 8081
_MEMORY_BYTES = 1 << 30
#: Three for each of at most 64 connections of a guest.
_DESCRIPTORS = 1 << 15
#: Sizes and times of the parts of a page that a browser may have kept, and ranges: the recording has whole responses.
_CONDITIONS = ("if-match", "if-modified-since", "if-none-match", "if-range", "if-unmodified-since", "range")
_PAGE = (
    """<!DOCTYPE html><html><head><title>{title}</title></head><body><h1>{title}</h1><p>{text}</p></body></html>\n"""
)


def main(control_fd: int, recording_fd: int, settings: Mapping[str, Any]) -> NoReturn:
    """Serve until the control socket's other end is closed or this process's parent ends."""
    enclosure.die_with_parent()
    control = socket.socket(fileno=control_fd)
    try:
        enclosure.separate(os.getpid())
        with socket.create_server(("127.0.0.1", _EXIT_PORT)) as listener:
            socket.send_fds(control, [b'{"port": 0}'], [listener.fileno()])
        alive, _held = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(_held)
            limits = enclosure.Limits(time_s=None, memory_bytes=_MEMORY_BYTES, descriptor_count=_DESCRIPTORS)
            enclosure.enclose(
                os.getpid(), visible=settings["visible"], files=settings["files"], limits=limits, alive=alive
            )
            _run(control, recording_fd, settings)
            os._exit(0)
        os.waitpid(child, 0)
    except BaseException as error:
        _send(control, {"error": f"{type(error).__name__}: {error}"[:2000]})
    os._exit(1)


def _run(control: socket.socket, recording_fd: int, settings: Mapping[str, Any]) -> None:
    file = os.fdopen(recording_fd, "rb" if settings["replays"] else "r+b", buffering=0)
    try:
        recording = WebRecording(file) if settings["replays"] or os.fstat(recording_fd).st_size else None
        asyncio.run(_serve(_Exchanges(control, file, recording, settings), settings))
    except Damaged as error:
        _send(control, {"error": str(error)})


async def _serve(exchanges: "_Exchanges", settings: Mapping[str, Any]) -> None:
    options = Options(
        confdir=enclosure.CACHE,
        mode=[f"upstream:http://127.0.0.1:{_EXIT_PORT}"],
        listen_host="127.0.0.1",
        listen_port=_PROXY_PORT,
    )
    master = DumpMaster(options, with_termlog=False, with_dumper=False)
    options.update(
        # Certificates are made for the name that the program asks for, without asking the server.
        connection_strategy="lazy",
        upstream_cert=False,
        rawtcp=False,
        onboarding=False,
        body_size_limit=str(MAX_BODY_BYTES),
        # Any program can read what was recorded for another one.
        anticomp=True,
        ssl_verify_upstream_trusted_ca=f"{enclosure.CACHE}/servers.pem" if settings["verifies"] else None,
    )
    master.addons.add(exchanges)
    await master.run()
    exchanges.close()


def _send(control: socket.socket, message: Mapping[str, object]) -> None:
    data = json.dumps(message).encode()
    with suppress(OSError):
        # A report that was dropped because the daemon is busy would hide a request: guests wait instead.
        while not _sent(control, data):
            writable = select.poll()
            writable.register(control, select.POLLOUT)
            writable.poll()


def _sent(control: socket.socket, data: bytes) -> bool:
    try:
        control.send(data)
    except BlockingIOError:
        return False
    return True


class _Exchanges:
    """The addon that records or replays exchanges, and brings the connections of guests to mitmproxy."""

    def __init__(
        self, control: socket.socket, file: Any, recording: WebRecording | None, settings: Mapping[str, Any]
    ) -> None:
        self._control = control
        self._file = file
        self._replayed = recording if settings["replays"] else None
        self._name = settings["name"]
        self._max_bytes = settings["max_bytes"]
        self._is_full = False
        self._machines: dict[int, str] = {}
        """Machine ids by the local port of their connections."""
        self._tasks: set[asyncio.Task[None]] = set()

    def running(self) -> None:
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._accept)
        _send(self._control, {"ready": 1})

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def request(self, flow: http.HTTPFlow) -> None:
        """Answer a request from the recording, or prepare it to be recorded."""
        if self._replayed is not None and flow.request.headers.get("upgrade", "").lower() == "websocket":
            self._report("websocket", flow)
            flow.response = _page(501, "WebSockets are not replayed", f"{flow.request.url} was not opened.")
        elif self._replayed is not None:
            flow.response = self._replay(self._replayed, flow)
        elif self._is_full:
            flow.response = _page(507, f"The web recording {self._name} is full", "The request was not sent.")
        for name in _CONDITIONS:
            flow.request.headers.pop(name, None)

    def response(self, flow: http.HTTPFlow) -> None:
        response = flow.response
        if self._replayed is not None or response is None or response.headers.get("proxy-status", "")[:4] == "envd":
            return
        if response.status_code == 101:
            self._report("websocket", flow)
            return
        content = response.raw_content or b""
        data = records(
            flow.request.method,
            flow.request.url,
            (_texts(flow.request.headers), flow.request.raw_content or b""),
            (response.status_code, response.reason, _texts(response.headers), content),
            is_first=not self._file.seek(0, os.SEEK_END),
        )
        end = self._file.tell()
        try:
            if end + len(data) > self._max_bytes:
                problem = f"it would have more than {self._max_bytes} bytes"
            else:
                problem = "" if self._file.write(data) == len(data) else "no space left"
        except OSError as error:
            problem = str(error)
        if problem:
            os.ftruncate(self._file.fileno(), end)
            self._is_full = True
        self._report("failed" if problem else "recorded", flow, problem)

    def error(self, flow: http.HTTPFlow) -> None:
        self._report("failed", flow, flow.error.msg if flow.error else "")

    def _replay(self, recording: WebRecording, flow: http.HTTPFlow) -> http.Response:
        request = flow.request
        cookies = cookies_of("; ".join(request.headers.get_all("cookie")))
        entry = recording.find(request.method, request.url, request.raw_content or b"", cookies)
        if entry is None:
            self._report("not_recorded", flow)
            text = f"{request.method} {request.url} was not recorded."
            return _page(504, f"Not in the web recording {self._name}", text)
        phrase, headers, body = recording.read(entry)
        response = http.Response.make(entry.status, body, ())
        response.reason = phrase
        response.headers = http.Headers([(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers])
        if body:
            response.headers["content-length"] = str(len(body))
        # Cookies and pages that had not expired then have not expired now.
        response.timestamp_start = entry.time_s
        response.refresh(time.time())
        self._report("replayed", flow)
        return response

    def _report(self, outcome: str, flow: http.HTTPFlow, text: str = "") -> None:
        machine_id = self._machines.get(flow.client_conn.peername[1], "")
        # mitmproxy limits neither methods nor texts, and a message has a limit.
        method, url, text = flow.request.method[:16], flow.request.url[:2000], text[:500]
        _send(self._control, {"outcome": outcome, "machine_id": machine_id, "method": method, "url": url, "text": text})

    def _accept(self) -> None:
        try:
            message, handles, _, _ = socket.recv_fds(self._control, 64, 1)
        except BlockingIOError:
            return
        if not message:
            os._exit(0)
        program = socket.socket(fileno=handles[0])
        task = asyncio.create_task(self._join(program, message.decode()), name="program")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, program: socket.socket, machine_id: str) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=program)
        port = 0
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", _PROXY_PORT)
            port = far_writer.get_extra_info("sockname")[1]
            self._machines[port] = machine_id
            try:
                await asyncio.gather(streams.copy(reader, far_writer), streams.copy(far_reader, writer))
            finally:
                await streams.close(far_writer)
        except OSError:
            pass  # either end broke, and notices it
        finally:
            self._machines.pop(port, None)
            await streams.close(writer)


def _texts(headers: http.Headers) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.fields]


def _page(status: int, title: str, text: str) -> http.Response:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    headers = {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store", "Proxy-Status": "envd"}
    return http.Response.make(status, _PAGE.format(title=title, text=escaped).encode(), headers)
