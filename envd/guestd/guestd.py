#!/usr/bin/env python3
"""Serve one guest's desktop to the host over HTTP. One file, standard library only: it is copied into the guest as is.

It speaks the HTTP API of OSWorld's in-guest server, and adds routes of its own under `/envd/`. It runs inside the
user's X session and decides nothing about tasks or episodes: what to do is the host's business.

What always holds:

- Every call ends: child processes have deadlines and die with their process group, waits for a lock are bounded (503).
- Calls into X and AT-SPI are serialised, because parallel ones corrupt screenshots and hang OSWorld's own server.
- A POST that carries `X-Request-Id` has its effect once: a repeat within five minutes joins or replays the first.
- Without an X server commands and files still work; what needs X answers 500 with the reason.

There is no authentication. The guest's network is user-mode, so that only the host's loopback reaches the port, and
requests that a web page makes in the guest's browser are refused by their `Origin` header.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import ctypes
import email.policy
import functools
import hashlib
import json
import logging
import mmap
import os
import platform
import re
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, ClassVar
from xml.etree import ElementTree as ET

VERSION = "1"

MAX_BODY_BYTES = 512 << 20
MAX_IN_MEMORY_BODY_BYTES = 4 << 20
MAX_JSON_BYTES = 32 << 20
MAX_OUTPUT_BYTES = 16 << 20
MAX_DOWNLOAD_BYTES = 4 << 30
MAX_TEXT_LENGTH = 100_000
MAX_DIRECTORY_ENTRIES = 100_000

COMMAND_TIMEOUT_S = 120.0
MAX_COMMAND_TIMEOUT_S = 3600.0
PYTHON_TIMEOUT_S = 30.0
SCRIPT_TIMEOUT_S = 100.0
TYPING_TIMEOUT_S = 300.0
WALLPAPER_TIMEOUT_S = 15.0
# As long as OSWorld's own service waits for an opened file's window: whoever asks knows better when to stop.
OPEN_TIMEOUT_S = 1800.0
LOCK_TIMEOUT_S = 30.0
SOCKET_TIMEOUT_S = 60.0
REPLAY_S = 300.0

PROXY_PORT = 3128
GATEWAY_WAIT_S = 10.0

log = logging.getLogger("guestd")


class Refusal(Exception):
    """A request that cannot be served; answered with `status` and `{status: "error", message, **details}`."""

    def __init__(self, status: int, message: str, **details: object) -> None:
        super().__init__(message)
        self.status = status
        self.details = details


# ---------------------------------------------------------------------------------------------------------------------
# Requests and responses


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a multipart body, as a range of bytes in it."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request with its whole body: `bytes`, or a mapped temporary file where it is large."""

    path: str
    query: Mapping[str, str]
    content_type: str
    body: bytes | mmap.mmap

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object. Raises: Refusal."""
        if len(self.body) > MAX_JSON_BYTES:
            raise Refusal(413, f"{self.path}: a JSON body may hold {MAX_JSON_BYTES} bytes, not {len(self.body)}")
        try:
            value = json.loads(self.body[:] or b"{}")
        except ValueError as error:
            raise Refusal(400, f"{self.path}: the body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise Refusal(400, f"{self.path}: the body is not a JSON object")
        return value

    def parts(self) -> dict[str, Part]:
        """Return the parts of a multipart body by field name. Raises: Refusal."""
        found = re.search(r'boundary="?([^";,]+)', self.content_type)
        if not self.content_type.startswith("multipart/form-data") or not found:
            raise Refusal(400, f"{self.path}: the body is not multipart/form-data with a boundary")
        return parse_multipart(self.body, found[1].encode())

    def form(self) -> dict[str, str]:
        """Return the text fields of a urlencoded or multipart form. Raises: Refusal."""
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
    """Answer with JSON."""
    return Response(status, json.dumps(value).encode() + b"\n")


def text_response(text: str, status: int = 200) -> Response:
    """Answer with plain text, as OSWorld's setup routes do."""
    return Response(status, text.encode("utf-8", "replace"), "text/html; charset=utf-8")


def parse_multipart(body: bytes | mmap.mmap, boundary: bytes) -> dict[str, Part]:
    """Find the parts of a multipart/form-data body without copying them. Raises: Refusal."""
    delimiter = b"--" + boundary
    position = body.find(delimiter)
    if position != 0 and not (position >= 2 and body[position - 2 : position] == b"\r\n"):
        raise Refusal(400, "multipart body: it does not begin with its boundary")
    parts: dict[str, Part] = {}
    while True:
        position += len(delimiter)
        if body[position : position + 2] == b"--":
            return parts
        line_end = body.find(b"\r\n", position)
        header_end = body.find(b"\r\n\r\n", line_end)
        if line_end < 0 or header_end < 0 or header_end - line_end > 16384 or len(parts) >= 100:
            raise Refusal(400, "multipart body: a part's header is malformed")
        header = BytesParser(policy=email.policy.HTTP).parsebytes(body[line_end + 2 : header_end + 4], headersonly=True)
        start = header_end + 4
        position = body.find(b"\r\n" + delimiter, start)
        if position < 0:
            raise Refusal(400, "multipart body: it ends without its closing boundary")
        disposition: Any = header["content-disposition"]
        name = disposition.params.get("name") if disposition is not None else None
        if name is None:
            raise Refusal(400, "multipart body: a part has no name")
        parts[str(name)] = Part(start, position)
        position += 2


@dataclass(slots=True)
class _Recorded:
    """An answer that is there or still to come."""

    digest: bytes
    done: threading.Event = field(default_factory=threading.Event)
    response: Response | None = None
    answered_s: float = 0.0


class Replays:
    """Answers by request id, so that a repeated POST has its effect once.

    Invariant of the lock: an id is in `_answers` from before its effect until `REPLAY_S` after its answer.
    """

    def __init__(self, *, capacity: int = 512, max_bytes: int = 64 << 20) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._answers: OrderedDict[tuple[str, str], _Recorded] = OrderedDict()

    def answer(self, request: Request, request_id: str, produce: Callable[[], Response]) -> Response:
        """Return `produce()`, or the recorded answer of the earlier call with this path and id. Raises: Refusal."""
        key = (request.path, request_id)
        digest = hashlib.sha256(request.body).digest()
        with self._lock:
            recorded = self._answers.get(key)
            if recorded is None:
                mine = self._answers[key] = _Recorded(digest)
                self._evict()
        if recorded is not None:
            if recorded.digest != digest:
                raise Refusal(409, f"X-Request-Id {request_id} was used with another body; make a new id per request")
            if not recorded.done.wait(MAX_COMMAND_TIMEOUT_S):
                raise Refusal(503, f"X-Request-Id {request_id} is still running; ask again later")
            # An answer that was not kept stands for a call without effect, so this one may have it.
            return recorded.response or self.answer(request, request_id, produce)
        try:
            response = produce()
            with self._lock:
                if response.status == 503 or response.file is not None:
                    # It was refused before it did anything, or it only read: asking again is harmless.
                    self._answers.pop(key, None)
                else:
                    mine.response = response
                mine.answered_s = time.monotonic()
            return response
        finally:
            mine.done.set()

    def _evict(self) -> None:
        now_s = time.monotonic()
        kept_bytes = sum(len(a.response.body) for a in self._answers.values() if a.response)
        for key, answer in list(self._answers.items()):
            crowded = len(self._answers) > self._capacity or kept_bytes > self._max_bytes
            if answer.response and (crowded or now_s - answer.answered_s > REPLAY_S):
                del self._answers[key]
                kept_bytes -= len(answer.response.body)


class Turnstile:
    """Lets one call through at a time; the others wait, but not for ever."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        if not self._lock.acquire(timeout=timeout_s):
            raise Refusal(503, f"{self._what} has been busy for {timeout_s:g} s; ask again later")
        try:
            yield
        finally:
            self._lock.release()


# ---------------------------------------------------------------------------------------------------------------------
# Child processes


@dataclass(frozen=True, slots=True)
class Finished:
    """What a child process did."""

    returncode: int
    stdout: bytes
    stderr: bytes
    truncated: bool
    """Output beyond `MAX_OUTPUT_BYTES` was thrown away."""


class _Drain(threading.Thread):
    """Reads a pipe to its end and keeps the first bytes. It outlives the command where a grandchild holds the pipe."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        super().__init__(daemon=True, name="drain")
        self._stream = stream
        self._limit = limit
        self.kept = bytearray()
        self.truncated = False
        self.start()

    def run(self) -> None:
        with self._stream:
            while chunk := os.read(self._stream.fileno(), 65536):
                room = self._limit - len(self.kept)
                self.kept += chunk[:room]
                self.truncated = self.truncated or len(chunk) > room


def _feed(stream: IO[bytes], data: bytes) -> None:
    with suppress(BrokenPipeError), stream:
        stream.write(data)


def _wait_for_exit(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait without polling: `Popen.wait(timeout)` sleeps up to 50 ms past the end."""
    descriptor = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a child that leads its own process group, with the group, and reap it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_command(
    command: Sequence[str] | str,
    *,
    timeout_s: float,
    shell: bool = False,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    merge: bool = False,
    limit: int = MAX_OUTPUT_BYTES,
) -> Finished:
    """Run a command to its end; with `merge`, stderr goes where stdout goes.

    A grandchild that stays behind keeps running and does not delay the answer.

    Raises:
        Refusal: It cannot be started, or it was killed with its process group after `timeout_s`.
    """
    if not command:
        raise Refusal(400, "the command is empty")
    try:
        process = subprocess.Popen(
            command,
            shell=shell,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merge else subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **env} if env else None,
            cwd=cwd,
        )
    except (OSError, ValueError) as error:
        raise Refusal(500, f"{command!r} cannot be started: {error}") from error
    drains = [_Drain(stream, limit) for stream in (process.stdout, process.stderr) if stream]
    if process.stdin:
        threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True, name="feed").start()
    try:
        exited = _wait_for_exit(process, timeout_s)
    except BaseException:
        kill_group(process)
        raise
    if not exited:
        kill_group(process)
        told = {"output": "", "error": "TimeoutExpired", "returncode": -1, "return_code": -1}
        raise Refusal(500, f"Command timed out after {timeout_s:g} seconds.", timed_out=True, **told)
    process.wait()
    # At once, unless a grandchild has inherited the pipes.
    deadline_s = time.monotonic() + 0.5
    for drain in drains:
        drain.join(max(0.0, deadline_s - time.monotonic()))
    stdout, stderr = (bytes(drains[0].kept), b"" if merge else bytes(drains[1].kept))
    return Finished(process.returncode, stdout, stderr, any(drain.truncated for drain in drains))


def launch(command: Sequence[str] | str, *, shell: bool = False) -> subprocess.Popen[bytes]:
    """Start a program that outlives the call; it is reaped when it ends. Raises: Refusal."""
    if not command:
        raise Refusal(400, "the command is empty")
    try:
        process = subprocess.Popen(
            command,
            shell=shell,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise Refusal(500, f"{command!r} cannot be started: {error}") from error
    threading.Thread(target=process.wait, daemon=True, name=f"reap:{process.pid}").start()
    return process


def expand_path(path: object) -> Path:
    """Return an absolute path; `~` and `$NAME` are the session user's. Raises: Refusal."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise Refusal(400, f"a path is required, not {path!r}")
    return Path(os.path.abspath(os.path.expandvars(os.path.expanduser(path))))


def command_of(data: Mapping[str, Any]) -> tuple[list[str] | str, bool]:
    """Return `command` and `shell` of a request: a list, or a string that is split unless a shell runs it.

    Raises:
        Refusal: There is no command, or it is neither text nor a list of texts.
    """
    shell = bool(data.get("shell", False))
    command = data.get("command")
    if not command or not (
        isinstance(command, str) or (isinstance(command, list) and all(isinstance(word, str) for word in command))
    ):
        raise Refusal(400, "command: a non-empty string or list of strings is required")
    if isinstance(command, str):
        if shell:
            return command, True
        try:
            command = shlex.split(command)
        except ValueError as error:
            raise Refusal(400, f"command: {error}") from error
    return [os.path.expanduser(word) if word.startswith("~/") else word for word in command], shell


def seconds_of(
    data: Mapping[str, Any], key: str, default_s: float, *, maximum_s: float = MAX_COMMAND_TIMEOUT_S
) -> float:
    """Return a duration of a request. Raises: Refusal."""
    value = data.get(key, default_s)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum_s:
        raise Refusal(400, f"{key}: between 0 and {maximum_s:g} seconds, not {value!r}")
    return float(value)


# ---------------------------------------------------------------------------------------------------------------------
# X11, through ctypes

_XID = ctypes.c_ulong
_PTR = ctypes.c_void_p
_INT = ctypes.c_int
_LONG = ctypes.c_long
_ULONG = ctypes.c_ulong
_OUT_INT = ctypes.POINTER(_INT)
_OUT_XID = ctypes.POINTER(_XID)


class _ErrorEvent(ctypes.Structure):
    _fields_: ClassVar = [
        ("type", _INT),
        ("display", _PTR),
        ("resourceid", _XID),
        ("serial", _ULONG),
        ("error_code", ctypes.c_ubyte),
        ("request_code", ctypes.c_ubyte),
        ("minor_code", ctypes.c_ubyte),
    ]


class _Image(ctypes.Structure):
    _fields_: ClassVar = [
        ("width", _INT),
        ("height", _INT),
        ("xoffset", _INT),
        ("format", _INT),
        ("data", _PTR),
        ("byte_order", _INT),
        ("bitmap_unit", _INT),
        ("bitmap_bit_order", _INT),
        ("bitmap_pad", _INT),
        ("depth", _INT),
        ("bytes_per_line", _INT),
        ("bits_per_pixel", _INT),
        ("red_mask", _ULONG),
        ("green_mask", _ULONG),
        ("blue_mask", _ULONG),
    ]


class _CursorImage(ctypes.Structure):
    _fields_: ClassVar = [
        ("x", ctypes.c_short),
        ("y", ctypes.c_short),
        ("width", ctypes.c_ushort),
        ("height", ctypes.c_ushort),
        ("xhot", ctypes.c_ushort),
        ("yhot", ctypes.c_ushort),
        ("serial", _ULONG),
        ("pixels", ctypes.POINTER(_ULONG)),
    ]


class _Attributes(ctypes.Structure):
    _fields_: ClassVar = [
        ("x", _INT),
        ("y", _INT),
        ("width", _INT),
        ("height", _INT),
        ("border_width", _INT),
        ("depth", _INT),
        ("visual", _PTR),
        ("root", _XID),
        ("window_class", _INT),
        ("bit_gravity", _INT),
        ("win_gravity", _INT),
        ("backing_store", _INT),
        ("backing_planes", _ULONG),
        ("backing_pixel", _ULONG),
        ("save_under", _INT),
        ("colormap", _XID),
        ("map_installed", _INT),
        ("map_state", _INT),
        ("all_event_masks", _LONG),
        ("your_event_mask", _LONG),
        ("do_not_propagate_mask", _LONG),
        ("override_redirect", _INT),
        ("screen", _PTR),
    ]


class _ClientMessage(ctypes.Structure):
    _fields_: ClassVar = [
        ("type", _INT),
        ("serial", _ULONG),
        ("send_event", _INT),
        ("display", _PTR),
        ("window", _XID),
        ("message_type", _XID),
        ("format", _INT),
        ("data", _LONG * 5),
    ]


class _Event(ctypes.Union):
    _fields_: ClassVar = [("type", _INT), ("client", _ClientMessage), ("pad", _LONG * 24)]


class _XkbState(ctypes.Structure):
    _fields_: ClassVar = [
        ("group", ctypes.c_ubyte),
        ("locked_group", ctypes.c_ubyte),
        ("base_group", ctypes.c_ushort),
        ("latched_group", ctypes.c_ushort),
        ("mods", ctypes.c_ubyte),
        ("base_mods", ctypes.c_ubyte),
        ("latched_mods", ctypes.c_ubyte),
        ("locked_mods", ctypes.c_ubyte),
        ("pad", ctypes.c_ubyte * 16),
    ]


class _KeyboardControl(ctypes.Structure):
    _fields_: ClassVar = [
        ("key_click_percent", _INT),
        ("bell_percent", _INT),
        ("bell_pitch", ctypes.c_uint),
        ("bell_duration", ctypes.c_uint),
        ("led_mask", _ULONG),
        ("repeats", _INT),
        ("key_repeats", ctypes.c_char * 32),
    ]


class _RecordRange(ctypes.Structure):
    _fields_: ClassVar = [
        ("before_device_events", ctypes.c_ubyte * 18),
        ("device_events_first", ctypes.c_ubyte),
        ("device_events_last", ctypes.c_ubyte),
        ("errors", ctypes.c_ubyte * 2),
        ("client_started", _INT),
        ("client_died", _INT),
    ]


class _Intercepted(ctypes.Structure):
    _fields_: ClassVar = [
        ("id_base", _XID),
        ("server_time", _ULONG),
        ("client_seq", _ULONG),
        ("category", _INT),
        ("client_swapped", _INT),
        ("data", _PTR),
        ("data_len", _ULONG),
    ]


_ERROR_HANDLER = ctypes.CFUNCTYPE(_INT, _PTR, ctypes.POINTER(_ErrorEvent))
_LOST_HANDLER = ctypes.CFUNCTYPE(_INT, _PTR)
_EXIT_HANDLER = ctypes.CFUNCTYPE(None, _PTR, _PTR)
_RECORD_HANDLER = ctypes.CFUNCTYPE(None, _PTR, ctypes.POINTER(_Intercepted))

_Prototypes = Mapping[str, tuple[Any, tuple[Any, ...]]]

_XLIB: _Prototypes = {
    "XInitThreads": (_INT, ()),
    "XOpenDisplay": (_PTR, (ctypes.c_char_p,)),
    "XCloseDisplay": (_INT, (_PTR,)),
    "XSetErrorHandler": (_PTR, (_ERROR_HANDLER,)),
    "XSetIOErrorHandler": (_PTR, (_LOST_HANDLER,)),
    "XDefaultRootWindow": (_XID, (_PTR,)),
    "XDefaultScreen": (_INT, (_PTR,)),
    "XDisplayWidth": (_INT, (_PTR, _INT)),
    "XDisplayHeight": (_INT, (_PTR, _INT)),
    "XConnectionNumber": (_INT, (_PTR,)),
    "XSync": (_INT, (_PTR, _INT)),
    "XFlush": (_INT, (_PTR,)),
    "XPending": (_INT, (_PTR,)),
    "XNextEvent": (_INT, (_PTR, ctypes.POINTER(_Event))),
    "XSelectInput": (_INT, (_PTR, _XID, _LONG)),
    "XSendEvent": (_INT, (_PTR, _XID, _INT, _LONG, ctypes.POINTER(_Event))),
    "XInternAtom": (_XID, (_PTR, ctypes.c_char_p, _INT)),
    "XFree": (_INT, (_PTR,)),
    "XGetWindowProperty": (
        _INT,
        (_PTR, _XID, _XID, _LONG, _LONG, _INT, _XID, _OUT_XID, _OUT_INT, _OUT_XID, _OUT_XID, ctypes.POINTER(_PTR)),
    ),
    "XGetWindowAttributes": (_INT, (_PTR, _XID, ctypes.POINTER(_Attributes))),
    "XTranslateCoordinates": (_INT, (_PTR, _XID, _XID, _INT, _INT, _OUT_INT, _OUT_INT, _OUT_XID)),
    "XQueryTree": (
        _INT,
        (_PTR, _XID, _OUT_XID, _OUT_XID, ctypes.POINTER(_OUT_XID), ctypes.POINTER(ctypes.c_uint)),
    ),
    "XQueryPointer": (
        _INT,
        (_PTR, _XID, _OUT_XID, _OUT_XID, _OUT_INT, _OUT_INT, _OUT_INT, _OUT_INT, ctypes.POINTER(ctypes.c_uint)),
    ),
    "XGetImage": (ctypes.POINTER(_Image), (_PTR, _XID, _INT, _INT, ctypes.c_uint, ctypes.c_uint, _ULONG, _INT)),
    "XDestroyImage": (_INT, (ctypes.POINTER(_Image),)),
    "XDisplayKeycodes": (_INT, (_PTR, _OUT_INT, _OUT_INT)),
    "XGetKeyboardMapping": (_OUT_XID, (_PTR, ctypes.c_ubyte, _INT, _OUT_INT)),
    "XChangeKeyboardMapping": (_INT, (_PTR, _INT, _INT, _OUT_XID, _INT)),
    "XkbGetState": (_INT, (_PTR, ctypes.c_uint, ctypes.POINTER(_XkbState))),
    "XkbLockModifiers": (_INT, (_PTR, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint)),
    "XkbLockGroup": (_INT, (_PTR, ctypes.c_uint, ctypes.c_uint)),
    "XGetKeyboardControl": (_INT, (_PTR, ctypes.POINTER(_KeyboardControl))),
    "XAutoRepeatOff": (_INT, (_PTR,)),
    "XAutoRepeatOn": (_INT, (_PTR,)),
}
_XFIXES: _Prototypes = {
    "XFixesQueryExtension": (_INT, (_PTR, _OUT_INT, _OUT_INT)),
    "XFixesGetCursorImage": (ctypes.POINTER(_CursorImage), (_PTR,)),
}
_XTST: _Prototypes = {
    "XTestQueryExtension": (_INT, (_PTR, _OUT_INT, _OUT_INT, _OUT_INT, _OUT_INT)),
    "XTestFakeKeyEvent": (_INT, (_PTR, ctypes.c_uint, _INT, _ULONG)),
    "XRecordQueryVersion": (_INT, (_PTR, _OUT_INT, _OUT_INT)),
    "XRecordAllocRange": (ctypes.POINTER(_RecordRange), ()),
    "XRecordCreateContext": (
        _XID,
        (_PTR, _INT, _OUT_XID, _INT, ctypes.POINTER(ctypes.POINTER(_RecordRange)), _INT),
    ),
    "XRecordEnableContext": (_INT, (_PTR, _XID, _RECORD_HANDLER, _PTR)),
    "XRecordDisableContext": (_INT, (_PTR, _XID)),
    "XRecordFreeData": (None, (ctypes.POINTER(_Intercepted),)),
}

_XA_STRING = 31
_XKB_CORE_KEYBOARD = 0x100
_LOCK_MASK = 2
_Z_PIXMAP = 2
_CLIENT_MESSAGE = 33
_SUBSTRUCTURE_NOTIFY_MASK = 1 << 19
_SUBSTRUCTURE_REDIRECT_MASK = 1 << 20
_IS_VIEWABLE = 2
_MODIFIERS = ("shift", "lock", "control", "mod1", "mod2", "mod3", "mod4", "mod5")

_protocol_errors: dict[int, int] = {}
"""The last protocol error of each open display, by its address. Xlib's own handler would end the process."""


def _note_protocol_error(display: int, event: Any) -> int:
    _protocol_errors[display] = event.contents.error_code
    return 0


def _note_lost_connection(display: int) -> int:
    _protocol_errors[display] = -1
    return 0


def _stay(_display: int, _user_data: int) -> None:
    """Keep Xlib from ending the process when an X server goes away; its calls on that display fail from then on."""


# C keeps no reference to a callback: these must live as long as the process.
_on_protocol_error = _ERROR_HANDLER(_note_protocol_error)
_on_lost_connection = _LOST_HANDLER(_note_lost_connection)
_on_exit = _EXIT_HANDLER(_stay)


def _library(name: str, prototypes: _Prototypes) -> Any:
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise Refusal(500, f"{name} is missing in this guest: {error}") from error
    for function, (result, arguments) in prototypes.items():
        getattr(library, function).restype = result
        getattr(library, function).argtypes = arguments
    return library


@functools.cache
def _xlib() -> Any:
    library = _library("libX11.so.6", _XLIB)
    library.XInitThreads()
    library.XSetErrorHandler(_on_protocol_error)
    if hasattr(library, "XSetIOErrorExitHandler"):  # libX11 1.7, of 2020; before it a lost server ends the process
        library.XSetIOErrorHandler(_on_lost_connection)
        library.XSetIOErrorExitHandler.restype = None
        library.XSetIOErrorExitHandler.argtypes = (_PTR, _EXIT_HANDLER, _PTR)
    return library


@functools.cache
def _xfixes() -> Any:
    return _library("libXfixes.so.3", _XFIXES)


@functools.cache
def _xtst() -> Any:
    return _library("libXtst.so.6", _XTST)


@dataclass(frozen=True, slots=True)
class Window:
    """A managed window. `x` and `y` are its client area's corner on the screen; `wm_class` is `instance.Class`."""

    id: int
    title: str
    wm_class: str
    x: int
    y: int
    width: int
    height: int
    active: bool

    def matches(self, name: str, *, strict: bool, by_class: bool) -> bool:
        """Match as wmctrl does: part of the text whatever its case, or with `strict` all of it exactly."""
        text = self.wm_class if by_class else self.title
        return text == name if strict else name.casefold() in text.casefold()


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where the pointer is and what is held down."""

    x: int
    y: int
    buttons: list[int]
    modifiers: list[str]


@dataclass(frozen=True, slots=True)
class Cursor:
    """A pointer's picture: premultiplied ARGB, its corner (not its hot spot) at `x`, `y`."""

    x: int
    y: int
    width: int
    height: int
    argb: Sequence[int]


class X11:
    """One connection to the X server, for one call: nothing outlives a server that is restarted."""

    def __init__(self) -> None:
        name = os.environ.get("DISPLAY", "")
        if not name:
            raise Refusal(500, "DISPLAY is not set: guestd was started outside an X session")
        self._x = _xlib()
        display = self._x.XOpenDisplay(None)
        if not display:
            raise Refusal(500, f"the X server {name} cannot be reached: it is not running, or refuses this user")
        self.display = display
        _protocol_errors.pop(display, None)
        if hasattr(self._x, "XSetIOErrorExitHandler"):
            self._x.XSetIOErrorExitHandler(display, _on_exit, None)
        self.root: int = self._x.XDefaultRootWindow(display)

    def __enter__(self) -> X11:
        return self

    def __exit__(self, *_: object) -> None:
        self._x.XCloseDisplay(self.display)
        _protocol_errors.pop(self.display, None)

    def sync(self, what: str) -> None:
        """Wait until the server has done all of it. Raises: Refusal if any request since the last sync failed."""
        self._x.XSync(self.display, 0)
        code = _protocol_errors.pop(self.display, 0)
        if code:
            raise Refusal(500, f"{what}: " + ("the X server went away" if code < 0 else f"X error {code}"))

    def atom(self, name: str) -> int:
        """Return the number of a name."""
        return int(self._x.XInternAtom(self.display, name.encode(), 0))

    @property
    def screen_size(self) -> tuple[int, int]:
        """Width and height in pixels, as of the connection."""
        screen = self._x.XDefaultScreen(self.display)
        return self._x.XDisplayWidth(self.display, screen), self._x.XDisplayHeight(self.display, screen)

    def _property(self, window: int, name: str) -> tuple[int, int, bytes]:
        """Return (type, format, memory) of a property; (0, 0, b"") where there is none."""
        kind, width, count, after, data = _XID(), _INT(), _XID(), _XID(), _PTR()
        status = self._x.XGetWindowProperty(
            self.display, window, self.atom(name), 0, 1 << 18, 0, 0, kind, width, count, after, data
        )
        if status != 0 or not data.value:
            return 0, 0, b""
        # Xlib stores 32-bit items as longs.
        item_bytes = {8: 1, 16: 2, 32: ctypes.sizeof(_LONG)}.get(width.value, 0)
        try:
            return kind.value, width.value, ctypes.string_at(data.value, count.value * item_bytes)
        finally:
            self._x.XFree(data)

    def numbers(self, window: int, name: str) -> list[int]:
        """Return a property of 32-bit numbers; empty where there is none."""
        _, width, memory = self._property(window, name)
        return [number for (number,) in struct.iter_unpack("L", memory)] if width == 32 else []

    def text(self, window: int, name: str) -> str:
        """Return a property of text; empty where there is none."""
        kind, width, memory = self._property(window, name)
        return memory.decode("latin-1" if kind == _XA_STRING else "utf-8", "replace") if width == 8 else ""

    def window_manager(self) -> str | None:
        """Return the name of the running window manager, or None. A dead one's claim on the root is not believed."""
        for window in self.numbers(self.root, "_NET_SUPPORTING_WM_CHECK")[:1]:
            if self.numbers(window, "_NET_SUPPORTING_WM_CHECK") == [window]:
                return self.text(window, "_NET_WM_NAME") or "unnamed"
        return None

    def window_class(self, window: int) -> str:
        """Return `instance.Class`, or an empty string."""
        return ".".join(self.text(window, "WM_CLASS").rstrip("\0").split("\0"))

    def windows(self) -> list[Window]:
        """Return the managed windows, oldest first. One that goes away meanwhile is left out."""
        active = self.numbers(self.root, "_NET_ACTIVE_WINDOW")[:1]
        found = []
        for window in self.numbers(self.root, "_NET_CLIENT_LIST"):
            attributes, x, y, child = _Attributes(), _INT(), _INT(), _XID()
            if self._x.XGetWindowAttributes(self.display, window, attributes) and self._x.XTranslateCoordinates(
                self.display, window, self.root, 0, 0, x, y, child
            ):
                title = self.text(window, "_NET_WM_NAME") or self.text(window, "WM_NAME")
                found.append(
                    Window(
                        window,
                        title,
                        self.window_class(window),
                        x.value,
                        y.value,
                        attributes.width,
                        attributes.height,
                        [window] == active,
                    )
                )
        return found

    def shows_class(self, name: str) -> bool:
        """Whether a window of this class or instance is on the screen, managed or not (panels may not be)."""
        root, parent, children, count = _XID(), _XID(), _OUT_XID(), ctypes.c_uint()
        unmanaged: list[int] = []
        if self._x.XQueryTree(self.display, self.root, root, parent, children, count) and children:
            unmanaged = children[: count.value]
            self._x.XFree(ctypes.cast(children, _PTR))
        for window in [*self.numbers(self.root, "_NET_CLIENT_LIST"), *unmanaged]:
            attributes = _Attributes()
            if name.casefold() in self.window_class(window).casefold().split(".") and (
                self._x.XGetWindowAttributes(self.display, window, attributes) and attributes.map_state == _IS_VIEWABLE
            ):
                return True
        return False

    def tell_window_manager(self, window: int, message: str, *numbers: int) -> None:
        """Send the window manager a request about a window, as a pager would."""
        event = _Event(client=_ClientMessage(_CLIENT_MESSAGE, 0, 1, self.display, window, self.atom(message), 32))
        event.client.data[: len(numbers)] = numbers
        mask = _SUBSTRUCTURE_NOTIFY_MASK | _SUBSTRUCTURE_REDIRECT_MASK
        self._x.XSendEvent(self.display, self.root, 0, mask, event)
        self.sync(message)

    def ping_focus(self, timeout_s: float) -> bool:
        """Wait until the active window's client has read its events so far; False where it cannot or does not say."""
        ping, protocols = self.atom("_NET_WM_PING"), self.atom("WM_PROTOCOLS")
        for window in self.numbers(self.root, "_NET_ACTIVE_WINDOW")[:1]:
            if not window or ping not in self.numbers(window, "WM_PROTOCOLS"):
                return False
            self._x.XSelectInput(self.display, self.root, _SUBSTRUCTURE_NOTIFY_MASK)
            stamp = time.monotonic_ns() // 1_000_000 & 0x7FFFFFFF
            event = _Event(client=_ClientMessage(_CLIENT_MESSAGE, 0, 1, self.display, window, protocols, 32))
            event.client.data[:3] = (ping, stamp, window)
            self._x.XSendEvent(self.display, window, 0, 0, event)
            self._x.XFlush(self.display)
            poll = select.poll()
            poll.register(self._x.XConnectionNumber(self.display), select.POLLIN)
            deadline_s = time.monotonic() + timeout_s
            while (left_s := deadline_s - time.monotonic()) > 0 and self.display not in _protocol_errors:
                if not self._x.XPending(self.display):
                    poll.poll(left_s * 1000)
                    continue
                self._x.XNextEvent(self.display, event)
                if event.type == _CLIENT_MESSAGE and list(event.client.data[:3]) == [ping, stamp, window]:
                    return True
        return False

    def pointer(self) -> Pointer:
        """Return where the pointer is. Raises: Refusal."""
        root, child, x, y, wx, wy, mask = _XID(), _XID(), _INT(), _INT(), _INT(), _INT(), ctypes.c_uint()
        self._x.XQueryPointer(self.display, self.root, root, child, x, y, wx, wy, mask)
        self.sync("query the pointer")
        held = mask.value
        return Pointer(
            x.value,
            y.value,
            [button for button in range(1, 6) if held & 1 << 7 + button],
            [name for bit, name in enumerate(_MODIFIERS) if held & 1 << bit],
        )

    def image(self) -> tuple[int, int, bytes]:
        """Return (width, height, pixels as rows of B, G, R, x). Raises: Refusal."""
        width, height = self.screen_size
        image = self._x.XGetImage(self.display, self.root, 0, 0, width, height, 0xFFFFFFFF, _Z_PIXMAP)
        if not image:
            # The screen was resized between connecting and reading.
            _protocol_errors.pop(self.display, None)
            raise Refusal(503, "the screen cannot be read just now; ask again")
        try:
            told = image.contents
            if told.bits_per_pixel != 32 or told.byte_order != 0 or told.red_mask != 0xFF0000:
                raise Refusal(500, f"a screen of {told.bits_per_pixel} bits a pixel is not supported; use depth 24")
            return width, height, ctypes.string_at(told.data, told.bytes_per_line * height)
        finally:
            self._x.XDestroyImage(image)

    def cursor(self) -> Cursor | None:
        """Return the pointer's picture, or None where the server has none to give."""
        fixes = _xfixes()
        if not fixes.XFixesQueryExtension(self.display, _INT(), _INT()):
            return None
        image = fixes.XFixesGetCursorImage(self.display)
        if not image:
            return None
        told = image.contents
        try:
            argb = told.pixels[: told.width * told.height]
            return Cursor(told.x - told.xhot, told.y - told.yhot, told.width, told.height, argb)
        finally:
            self._x.XFree(ctypes.cast(image, _PTR))

    # Keyboard

    def keyboard_map(self) -> dict[int, list[int]]:
        """Return the keysyms of each keycode: unshifted, shifted, and so on."""
        low, high, width = _INT(), _INT(), _INT()
        self._x.XDisplayKeycodes(self.display, low, high)
        count = high.value - low.value + 1
        table = self._x.XGetKeyboardMapping(self.display, low.value, count, width)
        if not table:
            raise Refusal(500, "the X server does not tell its keyboard map")
        keysyms = table[: count * width.value]
        self._x.XFree(ctypes.cast(table, _PTR))
        return {low.value + row: keysyms[row * width.value : (row + 1) * width.value] for row in range(count)}

    def bind_keys(self, bindings: Mapping[int, tuple[int, int]]) -> None:
        """Give keycodes new keysyms (unshifted, shifted). Raises: Refusal."""
        for first, row in runs(bindings):
            # Two columns make a two-level key, so that the server adds no capital letters of its own.
            keysyms = (_XID * (2 * len(row)))(*(keysym for pair in row for keysym in pair))
            self._x.XChangeKeyboardMapping(self.display, first, 2, keysyms, len(row))
        self.sync("change the keyboard map")

    @contextmanager
    def plain_keyboard(self) -> Iterator[None]:
        """Hold the first layout, with Caps Lock off and no key repeated, and put back what was set."""
        state, control = _XkbState(), _KeyboardControl()
        self._x.XkbGetState(self.display, _XKB_CORE_KEYBOARD, state)
        self._x.XGetKeyboardControl(self.display, control)
        # The server repeats a key by its own clock: where it stood still for two thirds of a second between a press and
        # its release, on a host with four times as much to do as it can, one `$` of 2,000 characters was typed twice.
        self._x.XAutoRepeatOff(self.display)
        capitals = state.locked_mods & _LOCK_MASK
        self._x.XkbLockModifiers(self.display, _XKB_CORE_KEYBOARD, _LOCK_MASK, 0)
        self._x.XkbLockGroup(self.display, _XKB_CORE_KEYBOARD, 0)
        try:
            yield
        finally:
            self._x.XkbLockModifiers(self.display, _XKB_CORE_KEYBOARD, _LOCK_MASK, capitals)
            self._x.XkbLockGroup(self.display, _XKB_CORE_KEYBOARD, state.locked_group)
            if control.repeats:
                self._x.XAutoRepeatOn(self.display)
            self._x.XSync(self.display, 0)

    def require_xtest(self) -> None:
        """Raises: Refusal if the server takes no synthetic input."""
        if not _xtst().XTestQueryExtension(self.display, _INT(), _INT(), _INT(), _INT()):
            raise Refusal(500, "the X server lacks the XTEST extension")

    def require_record(self) -> None:
        """Raises: Refusal if the server does not report input."""
        if not _xtst().XRecordQueryVersion(self.display, _INT(), _INT()):
            raise Refusal(500, "the X server lacks the RECORD extension")

    def fake_key(self, keycode: int, *, pressed: bool) -> None:
        """Press or release a key."""
        _xtst().XTestFakeKeyEvent(self.display, keycode, int(pressed), 0)


# ---------------------------------------------------------------------------------------------------------------------
# Screenshots


def encode_png(width: int, height: int, bgrx: bytes, cursor: Cursor | None) -> bytes:
    """Encode a screen with its pointer as 8-bit RGB. Level 1: a higher one takes longer than the bytes are worth."""
    rgb = bytearray(width * height * 3)
    for channel in range(3):
        rgb[channel::3] = bgrx[2 - channel :: 4]
    if cursor:
        blend_cursor(rgb, width, height, cursor)
    stride = width * 3
    rows = memoryview(rgb)
    packer = zlib.compressobj(1)
    data = bytearray()
    for start in range(0, stride * height, stride):
        data += packer.compress(b"\0")
        data += packer.compress(rows[start : start + stride])
    data += packer.flush()

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", bytes(data)) + chunk(b"IEND", b"")


def blend_cursor(rgb: bytearray, width: int, height: int, cursor: Cursor) -> None:
    """Draw the pointer's picture over an RGB screen, clipped at its edges."""
    for row in range(max(0, -cursor.y), min(cursor.height, height - cursor.y)):
        for column in range(max(0, -cursor.x), min(cursor.width, width - cursor.x)):
            pixel = cursor.argb[row * cursor.width + column]
            uncovered = 255 - (pixel >> 24 & 255)
            if uncovered == 255:
                continue
            at = ((cursor.y + row) * width + cursor.x + column) * 3
            for channel, shift in enumerate((16, 8, 0)):
                mixed = (pixel >> shift & 255) + rgb[at + channel] * uncovered // 255
                rgb[at + channel] = min(255, mixed)


# ---------------------------------------------------------------------------------------------------------------------
# Typing

_CONTROL_KEYSYMS = {"\n": 0xFF0D, "\r": 0xFF0D, "\t": 0xFF09}
_SHIFT_L = 0xFFE1


@dataclass(frozen=True, slots=True)
class Stroke:
    """One key to press and release."""

    keycode: int
    shifted: bool


@dataclass(slots=True)
class TypingBatch:
    """Strokes that one keyboard map can hold."""

    bindings: dict[int, list[int]] = field(default_factory=dict)
    """Keysyms (unshifted, shifted) for spare keycodes, to be bound before the first stroke."""
    strokes: list[Stroke] = field(default_factory=list)
    rebinds: bool = False
    """Takes keycodes from characters typed before: clients must have read those first."""


def keysym_of(character: str) -> int:
    """Return the keysym that types a character. Raises: Refusal for one that no key can type."""
    code = ord(character)
    if character in _CONTROL_KEYSYMS:
        return _CONTROL_KEYSYMS[character]
    if 0x20 <= code <= 0x7E or 0xA0 <= code <= 0xFF:
        return code
    if code < 0x100 or 0xD800 <= code <= 0xDFFF:
        raise Refusal(400, f"text: U+{code:04X} cannot be typed; send printable characters, newlines and tabs")
    return 0x01000000 | code


def plan_typing(
    text: str, keyboard: Mapping[int, Sequence[int]], ours: Mapping[int, tuple[int, int]]
) -> list[TypingBatch]:
    """Decide which keys type `text`, and which spare keycodes must be bound for characters that the layout lacks.

    Args:
        text: What to type.
        keyboard: The keysyms of each keycode now.
        ours: Keycodes that earlier calls bound, with their two keysyms. They stay bound and may be taken back.

    Raises:
        Refusal: A character cannot be typed, or the keyboard map has no spare keycode.
    """
    still_ours = {code for code, pair in ours.items() if tuple(keyboard.get(code, ())[:2]) == pair}
    pool = sorted((code for code, row in keyboard.items() if code in still_ours or not any(row)), reverse=True)
    layout: dict[int, Stroke] = {}
    for code, row in keyboard.items():
        for level, keysym in enumerate(row[:2]):
            if keysym and code not in still_ours:
                layout.setdefault(keysym, Stroke(code, level == 1))
    bound: dict[int, Stroke] = {}
    for code in sorted(still_ours):
        for level in (1, 0):
            bound[ours[code][level]] = Stroke(code, level == 1)
    free = [Stroke(code, level) for code in pool if code not in still_ours for level in (False, True)]
    batches = [TypingBatch()]
    for character in text.replace("\r\n", "\n"):
        keysym = keysym_of(character)
        stroke = layout.get(keysym) or bound.get(keysym)
        if stroke is None:
            if not free:
                if not pool:
                    raise Refusal(500, f"text: {character!r} is not in the layout and no keycode is spare for it")
                if batches[-1].strokes:
                    batches.append(TypingBatch())
                batches[-1].rebinds = True
                bound.clear()
                free = [Stroke(code, level) for code in pool for level in (False, True)]
            stroke = bound[keysym] = free.pop(0)
            pair = batches[-1].bindings.setdefault(stroke.keycode, [keysym, keysym])
            pair[stroke.shifted] = keysym
        batches[-1].strokes.append(stroke)
    return batches


def runs(bindings: Mapping[int, tuple[int, int]]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield (first keycode, rows) for each run of adjacent keycodes, so that keys between runs are left alone."""
    first = 0
    row: list[tuple[int, int]] = []
    for code in sorted(bindings):
        if row and code != first + len(row):
            yield first, row
            row = []
        if not row:
            first = code
        row.append(bindings[code])
    if row:
        yield first, row


class Typist:
    """Types Unicode text through XTEST.

    Characters that the layout lacks are bound to spare keycodes before the first key is pressed, and stay bound:
    a client looks a key up in the map as it is when the client gets to it, so that a map torn down in between would
    turn the key into nothing or into another character.
    """

    def __init__(self) -> None:
        self._turnstile = Turnstile("the keyboard")
        self._bound: dict[int, tuple[int, int]] = {}

    def type(self, text: str, interval_s: float) -> dict[str, object]:
        """Type `text` into the focus.

        Returns `typed`, the number of characters, and `acknowledged`: the client said that it has read them all.

        Raises:
            Refusal: A character cannot be typed, or X is out of reach. Nothing was typed then.
        """
        with self._turnstile(), X11() as x:
            x.require_xtest()
            keyboard = x.keyboard_map()
            shift = next((code for code, row in keyboard.items() if _SHIFT_L in row[:1]), None)
            if shift is None:
                raise Refusal(500, "the keyboard map has no Shift key")
            batches = plan_typing(text, keyboard, self._bound)
            with x.plain_keyboard():
                for batch in batches:
                    if batch.rebinds and not x.ping_focus(5.0):
                        # The client cannot say when it has read its keys (xterm, for one), so give it time.
                        time.sleep(0.5)
                    bindings = {code: (pair[0], pair[1]) for code, pair in batch.bindings.items()}
                    x.bind_keys(bindings)
                    self._bound.update(bindings)
                    self._press(x, batch.strokes, shift, interval_s)
            return {"typed": len(text), "acknowledged": x.ping_focus(5.0)}

    @staticmethod
    def _press(x: X11, strokes: Sequence[Stroke], shift: int, interval_s: float) -> None:
        shifted = False
        try:
            for number, stroke in enumerate(strokes):
                if stroke.shifted != shifted:
                    shifted = stroke.shifted
                    x.fake_key(shift, pressed=shifted)
                x.fake_key(stroke.keycode, pressed=True)
                x.fake_key(stroke.keycode, pressed=False)
                if interval_s:
                    x.sync("type")
                    time.sleep(interval_s)
                elif number % 64 == 63:
                    x.sync("type")
        finally:
            if shifted:
                x.fake_key(shift, pressed=False)
        x.sync("type")


# ---------------------------------------------------------------------------------------------------------------------
# The input log


class InputLog:
    """Keys, buttons and motions as the X server saw them from its devices, through the RECORD extension.

    Invariant of the condition's lock: `_next` is one more than the newest event's number; a recording thread whose
    generation is not `_generation` adds nothing.
    """

    _KINDS: ClassVar = {
        2: ("key", True),
        3: ("key", False),
        4: ("button", True),
        5: ("button", False),
        6: ("motion", False),
    }

    def __init__(self, *, capacity: int = 50_000) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=capacity)
        self._changed = threading.Condition()
        self._next = 0
        self._generation = 0
        self._stop: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin anew with an empty log. Returns once the server records. Raises: Refusal."""
        self.stop()
        with self._changed:
            self._generation += 1
            generation = self._generation
            self._events.clear()
            self._next = 0
        ready = threading.Event()
        failures: list[Refusal] = []
        threading.Thread(
            target=self._record, args=(generation, ready, failures), daemon=True, name=f"record:{generation}"
        ).start()
        if not ready.wait(10.0):
            raise Refusal(500, "the X server did not begin to record input within 10 s")
        if failures:
            raise failures[0]

    def stop(self) -> None:
        """Record no more; what was recorded can still be read."""
        with self._changed:
            stop, self._stop = self._stop, None
        if stop:
            stop()

    def read(self, since: int, wait_s: float) -> dict[str, object]:
        """Return events from number `since` on, waiting up to `wait_s` for the first of them."""
        with self._changed:
            self._changed.wait_for(lambda: self._next > since, wait_s)
            oldest = self._next - len(self._events)
            return {
                "recording": self._stop is not None,
                "events": [event for event in self._events if event["seq"] >= since],
                "next": self._next,
                "dropped": max(0, oldest - since),
            }

    def _record(self, generation: int, ready: threading.Event, failures: list[Refusal]) -> None:
        try:
            with X11() as control, X11() as data:
                xtst = _xtst()
                control.require_record()
                span = xtst.XRecordAllocRange()
                span.contents.device_events_first, span.contents.device_events_last = 2, 6
                all_clients = _XID(3)
                context = xtst.XRecordCreateContext(control.display, 0, all_clients, 1, ctypes.byref(span), 1)
                _xlib().XFree(ctypes.cast(span, _PTR))
                control.sync("record input")
                closing = threading.Lock()
                open_now = [True]

                def stop() -> None:
                    with closing:
                        if open_now[0]:
                            xtst.XRecordDisableContext(control.display, context)
                            _xlib().XSync(control.display, 0)

                def on_data(_closure: int, pointer: Any) -> None:
                    told = pointer.contents
                    if told.category == 4:  # XRecordStartOfData: from here on nothing is missed
                        with self._changed:
                            self._stop = stop
                        ready.set()
                    elif told.category == 0 and told.data_len >= 8:  # XRecordFromServer
                        self._add(generation, ctypes.string_at(told.data, 32))
                    xtst.XRecordFreeData(pointer)

                # Returns when the context is disabled or the server goes away.
                xtst.XRecordEnableContext(data.display, context, _RECORD_HANDLER(on_data), None)
                with closing:
                    open_now[0] = False
                if not ready.is_set():
                    failures.append(Refusal(500, "the X server refused to record input"))
            with self._changed:
                if self._generation == generation:
                    self._stop = None
        except Refusal as refusal:
            failures.append(refusal)
        finally:
            ready.set()

    def _add(self, generation: int, event: bytes) -> None:
        kind, code, time_ms, x, y = struct.unpack_from("=BBxxI12xhh", event)
        name = self._KINDS.get(kind & 0x7F)
        if name is None:
            return
        with self._changed:
            if generation == self._generation:
                entry = {"seq": self._next, "type": name[0], "code": code, "pressed": name[1]}
                self._events.append({**entry, "x": x, "y": y, "time_ms": time_ms})
                self._next += 1
                self._changed.notify_all()


# ---------------------------------------------------------------------------------------------------------------------
# Accessibility: runs in a helper process, because AT-SPI calls hang with the applications they ask

_NAMESPACES = {
    "st": "state",
    "attr": "attributes",
    "cp": "component",
    "doc": "document",
    "docattr": "document/attributes",
    "txt": "text",
    "val": "value",
    "act": "action",
}
_NAMESPACE_URL = "https://accessibility.ubuntu.example.org/ns/"
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|\ufffc|\ufffd")


def xml_name(text: str) -> str:
    """Return a valid XML name close to `text`."""
    name = re.sub(r"[^\w.-]", "-", text.strip(), flags=re.ASCII)
    return name if re.match(r"[A-Za-z_]", name) else f"_{name}"


def _qualified(prefix: str, name: str) -> str:
    return f"{{{_NAMESPACE_URL}{_NAMESPACES[prefix]}}}{xml_name(name)}"


def _clean(text: str | None) -> str:
    return _NOT_XML.sub("", text or "")


class Tree:
    """Builds OSWorld's XML from AT-SPI accessibles, within bounds of depth, width, count and time.

    Args:
        atspi: The `Atspi` module.
        max_nodes: Nodes in all; the rest is left out and the root says `truncated="true"`.
        deadline_s: On the monotonic clock.
        only: Roles to describe; of the others only the element itself is there. Empty for all.
        showing: Leave out what does not show, with all in it, and what programs say beyond role, name, states, place,
            text and value. Each of those is a question to a program, so this takes a small part of the time.
    """

    MAX_DEPTH = 50
    MAX_WIDTH = 1024
    MAX_TEXT_LENGTH = 100_000
    MAX_SHOWN_TEXT_LENGTH = 1000

    def __init__(
        self,
        atspi: Any,
        *,
        max_nodes: int,
        deadline_s: float,
        only: frozenset[str] = frozenset(),
        showing: bool = False,
    ) -> None:
        self._atspi = atspi
        self._only = only
        self._showing = showing
        self._left = max_nodes
        self._deadline_s = deadline_s
        self._failure_count = 0
        self.truncated = False

    def build(self, desktop: Any) -> ET.Element:
        """Return the tree of all applications."""
        root = ET.Element("desktop-frame")
        applications = list(self._children(desktop))
        if self._showing:
            # Should time run out, then before the windows behind.
            applications.sort(key=lambda application: not self._is_in_use(application))
        for application in applications:
            # An application that hangs costs a time-out for each question: give up on it, not on the others.
            self._failure_count = 0
            self._append(root, application, 1)
        if self.truncated:
            root.set("truncated", "true")
        return root

    def _is_in_use(self, application: Any) -> bool:
        active = self._atspi.StateType.ACTIVE
        try:
            return any(window.get_state_set().contains(active) for window in self._children(application))
        except Exception:
            return False

    def _append(self, parent: ET.Element, node: Any, depth: int) -> None:
        if self._left <= 0 or time.monotonic() > self._deadline_s:
            self.truncated = True
            return
        try:
            # Applications, which stand at the top, show nothing themselves.
            if self._showing and depth > 1 and not node.get_state_set().contains(self._atspi.StateType.SHOWING):
                return
            self._left -= 1
            element = self._element(node)
        except Exception:
            self._failure_count += 1
            self.truncated = True
            return
        parent.append(element)
        if depth >= self.MAX_DEPTH:
            self.truncated = True
            return
        for child in self._children(node):
            if self._failure_count >= 3:
                self.truncated = True
                return
            self._append(element, child, depth + 1)

    def _children(self, node: Any) -> Iterator[Any]:
        try:
            count = node.get_child_count()
            if node.get_role_name() == "table" and not 0 <= count <= self.MAX_WIDTH:
                yield from self._showing_cells(node)
                return
            if count > self.MAX_WIDTH:
                self.truncated = True
            for index in range(min(count, self.MAX_WIDTH)):
                child = node.get_child_at_index(index)
                if child is not None:
                    yield child
        except Exception:
            self._failure_count += 1
            self.truncated = True

    def _showing_cells(self, table: Any) -> Iterator[Any]:
        """Yield what shows of a sheet with millions of cells: the block that begins at the first showing cell."""
        grid = self._atspi.Table
        showing = self._atspi.StateType.SHOWING

        def cell(row: int, column: int) -> Any:
            found = grid.get_accessible_at(table, row, column)
            return found if found is not None and found.get_state_set().contains(showing) else None

        corner = next(
            ((r, c) for r in range(500) for c in range(500) if time.monotonic() < self._deadline_s and cell(r, c)), None
        )
        if corner is None:
            return
        for row in range(corner[0], corner[0] + self.MAX_WIDTH):
            for column in range(corner[1], corner[1] + self.MAX_WIDTH):
                found = cell(row, column)
                if found is None:
                    break
                yield found
            if cell(row + 1, corner[1]) is None:
                return

    def _element(self, node: Any) -> ET.Element:
        atspi = self._atspi
        role = node.get_role_name() or "unknown"
        if self._only and role not in self._only:
            return ET.Element(xml_name(role))
        element = ET.Element(xml_name(role), {"name": _clean(node.get_name())})
        states = {state.value_nick.replace("-", "_") for state in node.get_state_set().get_states()}
        for state in sorted(states):
            element.set(_qualified("st", state), "true")
        attributes = None if self._showing else node.get_attributes()
        for name, value in (attributes or {}).items():
            if name:
                element.set(_qualified("attr", name), _clean(value))
        if {"visible", "showing"} <= states and node.get_component_iface() is not None:
            box = atspi.Component.get_extents(node, atspi.CoordType.SCREEN)
            element.set(_qualified("cp", "screencoord"), str((box.x, box.y)))
            element.set(_qualified("cp", "size"), str((box.width, box.height)))
        if node.get_text_iface() is not None:
            most = self.MAX_SHOWN_TEXT_LENGTH if self._showing else self.MAX_TEXT_LENGTH
            length = min(atspi.Text.get_character_count(node), most)
            element.text = _clean(atspi.Text.get_text(node, 0, length)) or None
        if self._showing:
            if node.get_value_iface() is not None:
                element.set(_qualified("val", "value"), str(atspi.Value.get_current_value(node)))
            return element
        if node.get_image_iface() is not None:
            element.set("image", "true")
        if node.get_selection_iface() is not None:
            element.set("selection", "true")
        if node.get_value_iface() is not None:
            element.set(_qualified("val", "value"), str(atspi.Value.get_current_value(node)))
            element.set(_qualified("val", "min"), str(atspi.Value.get_minimum_value(node)))
            element.set(_qualified("val", "max"), str(atspi.Value.get_maximum_value(node)))
            element.set(_qualified("val", "step"), str(atspi.Value.get_minimum_increment(node)))
        if node.get_action_iface() is not None:
            for index in range(min(atspi.Action.get_n_actions(node), 32)):
                name = atspi.Action.get_action_name(node, index) or ""
                description = atspi.Action.get_action_description(node, index)
                element.set(_qualified("act", f"{name}_desc"), _clean(description))
                element.set(_qualified("act", f"{name}_kb"), _clean(atspi.Action.get_key_binding(node, index)))
        return element


def terminal_text(tree: ET.Element) -> str | None:
    """Return the text of the focused terminal of the active window, else of the first that shows; None without one."""
    active, focused, showing = (_qualified("st", state) for state in ("active", "focused", "showing"))
    shown = [node for node in tree.iter("terminal") if node.get(showing) == "true"]
    front = [node for frame in tree.iter("frame") if frame.get(active) == "true" for node in frame.iter("terminal")]
    for candidates in ([node for node in front if node.get(focused) == "true"], front, shown):
        if candidates:
            return (candidates[0].text or "").rstrip()
    return None


def describe(ask: Mapping[str, Any]) -> bytes:
    """Return the tree as XML, or the terminal's text as JSON. Raises: ImportError, ValueError: there is no AT-SPI."""
    atspi = import_atspi()
    is_terminal = ask["what"] == "terminal"
    tree = Tree(
        atspi,
        max_nodes=ask["max_nodes"],
        deadline_s=time.monotonic() + ask["timeout_s"],
        only=frozenset({"frame", "terminal"}) if is_terminal else frozenset(),
        showing=ask["showing"] and not is_terminal,
    )
    # The registry answers late where it has yet to be started; a program that hangs must not take all the time.
    atspi.set_timeout(8000, 8000)
    desktop = atspi.get_desktop(0)
    desktop.get_child_count()
    atspi.set_timeout(1500, 3000)
    root = tree.build(desktop)
    if is_terminal:
        return json.dumps(terminal_text(root)).encode()
    for prefix, name in _NAMESPACES.items():
        ET.register_namespace(prefix, _NAMESPACE_URL + name)
    return bytes(ET.tostring(root, encoding="utf-8"))


def import_atspi() -> Any:
    """Load AT-SPI's library, which takes seconds in an emulated guest. Raises: ImportError, ValueError."""
    import gi  # noqa: PLC0415 - absent where nobody asks for the tree

    gi.require_version("Atspi", "2.0")
    from gi.repository import Atspi  # noqa: PLC0415

    return Atspi


def serve_a11y(asks: Iterable[bytes], answers: IO[bytes]) -> None:
    """Answer questions, JSON a line, each from a fork of this process, which has AT-SPI loaded and never uses it.

    So that each knows the programs as they are now, and no hanging program holds up the next. An answer is a line of
    JSON, `{ok, length}`, and as many bytes: what was asked for, or why it cannot be had.
    """
    with suppress(ImportError, ValueError):
        import_atspi()
    for line in asks:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            ok, data = True, b""
            try:
                data = describe(json.loads(line))
            except (ImportError, ValueError) as error:
                told = f"AT-SPI is missing in this guest ({error}); install python3-gi and gir1.2-atspi-2.0"
                ok, data = False, told.encode()
            except Exception as error:
                ok, data = False, f"{type(error).__name__}: {error}".encode()
            with open(writing, "wb") as pipe:
                pipe.write(data)
            os._exit(0 if ok else 1)
        os.close(writing)
        with open(reading, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(child, 0)
        answers.write(json.dumps({"ok": status == 0, "length": len(data)}).encode() + b"\n" + data)
        answers.flush()


class A11yHelper:
    """The process that asks programs about themselves: started ahead of time, killed where it hangs, then started anew.

    Not for threads: its user takes turns.
    """

    MAX_ANSWER_BYTES = 64 << 20

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, unless it runs. Raises: Refusal."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            command = [sys.executable, os.path.abspath(__file__), "--a11y-helper"]
            try:
                # Unbuffered: what it says is read from the descriptor, with a deadline.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
                )
            except OSError as error:
                raise Refusal(500, f"accessibility: the helper cannot be started: {error}") from error
        return self._process

    def stop(self) -> None:
        """Kill it with all that it forked, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            kill_group(process)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def ask(self, ask: Mapping[str, object], *, timeout_s: float) -> bytes:
        """Return its answer. Raises: Refusal: it has none, or not within `timeout_s`."""
        process = self.start()
        deadline_s = time.monotonic() + timeout_s
        try:
            self._say(process, ask)
            head = self._read(process, deadline_s, until=lambda got: b"\n" in got)
            line, _, data = head.partition(b"\n")
            told = json.loads(line)
            left = told["length"] - len(data)
            data += self._read(process, deadline_s, until=lambda got: len(got) >= left)
        except (OSError, ValueError, EOFError) as error:
            self.stop()
            raise Refusal(500, f"accessibility: {error or type(error).__name__}") from error
        if not told["ok"]:
            raise Refusal(500, f"accessibility: {data.decode('utf-8', 'replace')[-500:] or 'the helper died'}")
        return bytes(data)

    @staticmethod
    def _say(process: subprocess.Popen[bytes], ask: Mapping[str, object]) -> None:
        """Send a question. Raises: OSError."""
        if process.stdin:
            process.stdin.write(json.dumps(ask).encode() + b"\n")

    def _read(
        self, process: subprocess.Popen[bytes], deadline_s: float, *, until: Callable[[bytearray], bool]
    ) -> bytearray:
        """Read on until there is enough. Raises: TimeoutError, EOFError, ValueError."""
        if process.stdout is None:
            raise EOFError("the helper has no pipe")
        descriptor = process.stdout.fileno()
        got = bytearray()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not until(got):
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                raise TimeoutError("no answer in time")
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise EOFError("the helper ended")
            got += chunk
            if len(got) > self.MAX_ANSWER_BYTES:
                raise ValueError(f"more than {self.MAX_ANSWER_BYTES} bytes")
        return got


# ---------------------------------------------------------------------------------------------------------------------
# The routes

Handler = Callable[["Guest", Request], Response]
ROUTES: dict[tuple[str, str], Handler] = {}


def route(method: str, *paths: str) -> Callable[[Handler], Handler]:
    """Serve `paths` with the decorated method of `Guest`."""

    def register(handler: Handler) -> Handler:
        ROUTES.update({(method, path): handler for path in paths})
        return handler

    return register


_EDITORS = ("mousepad", "gedit", "gnome-text-editor", "featherpad", "l3afpad", "leafpad", "pluma", "kate")


class Guest:
    """What the routes act on: one user's desktop session."""

    def __init__(self, *, wait_windows: Sequence[str] = ()) -> None:
        self._wait_windows = wait_windows
        self._screen = Turnstile("the screen")
        self._accessibility = Turnstile("accessibility")
        self._a11y_helper = A11yHelper()
        self._recording_turnstile = Turnstile("recording")
        self._recording: tuple[subprocess.Popen[bytes], Path] | None = None
        self._typist = Typist()
        self._input_log = InputLog()
        self._wallpaper: Path | None = None
        self.gateway = Gateway()

    @contextmanager
    def _x(self) -> Iterator[X11]:
        with self._screen(), X11() as x:
            yield x

    def handle(self, method: str, request: Request) -> Response:
        """Answer one request. Never raises an Exception."""
        try:
            handler = ROUTES.get((method, request.path))
            return handler(self, request) if handler else no_route(method, request.path)
        except Refusal as refusal:
            return json_response({"status": "error", "message": str(refusal), **refusal.details}, refusal.status)
        except Exception as error:
            log.exception("%s %s failed", method, request.path)
            return json_response({"status": "error", "message": f"{type(error).__name__}: {error}"}, 500)

    # Commands

    def _execute(self, data: Mapping[str, Any]) -> dict[str, object]:
        command, shell = command_of(data)
        env = data.get("env") or {}
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise Refusal(400, "env: an object of strings is required")
        try:
            stdin = base64.b64decode(data.get("stdin_base64") or "", validate=True)
        except (TypeError, binascii.Error) as error:
            raise Refusal(400, f"stdin_base64: {error}") from error
        cwd = data.get("cwd")
        done = run_command(
            command,
            shell=shell,
            timeout_s=seconds_of(data, "timeout", COMMAND_TIMEOUT_S),
            stdin=stdin,
            env=env,
            cwd=str(expand_path(cwd)) if cwd else None,
        )
        answer: dict[str, object] = {
            "status": "success",
            "output": done.stdout.decode("utf-8", "replace"),
            "error": done.stderr.decode("utf-8", "replace"),
            "returncode": done.returncode,
        }
        if done.truncated:
            answer["truncated"] = True
        if data.get("encoding") == "base64":
            output, error_output = (base64.b64encode(stream).decode() for stream in (done.stdout, done.stderr))
            answer |= {"encoding": "base64", "output": output, "error": error_output}
        return answer

    @route("POST", "/execute", "/setup/execute")
    def execute(self, request: Request) -> Response:
        """Run a command; besides OSWorld's fields: timeout, stdin_base64, env, cwd, encoding="base64"."""
        return json_response(self._execute(request.json()))

    @route("POST", "/execute_with_verification", "/setup/execute_with_verification")
    def execute_with_verification(self, request: Request) -> Response:
        """Run a command, then wait until a window is there or another command succeeds."""
        data = request.json()
        wanted = data.get("verification") or {}
        if not isinstance(wanted, dict):
            raise Refusal(400, "verification: an object is required")
        max_wait_s = seconds_of(data, "max_wait_time", 10.0)
        interval_s = max(0.05, seconds_of(data, "check_interval", 1.0))
        answer = self._execute(data)
        started_s = time.monotonic()
        while not self._verified(wanted):
            if time.monotonic() - started_s + interval_s > max_wait_s:
                failed = {**answer, "status": "verification_failed", "verification": "failed", "wait_time": max_wait_s}
                failed["message"] = f"the command ran, but {wanted} did not hold within {max_wait_s:g} s"
                return json_response(failed, 500)
            time.sleep(interval_s)
        return json_response({**answer, "verification": "passed", "wait_time": time.monotonic() - started_s})

    def _verified(self, wanted: Mapping[str, Any]) -> bool:
        title = wanted.get("window_exists")
        if title:
            windows = self._windows_or_none() or []
            if not any(window.matches(str(title), strict=False, by_class=False) for window in windows):
                return False
        command = wanted.get("command_success")
        return not command or run_command(str(command), shell=True, timeout_s=5.0).returncode == 0  # noqa: S604

    @route("POST", "/run_python")
    def run_python(self, request: Request) -> Response:
        """Run Python source in the guest's interpreter."""
        data = request.json()
        code = data.get("code")
        if not isinstance(code, str) or not code:
            raise Refusal(400, "Code not supplied!")
        timeout_s = seconds_of(data, "timeout", PYTHON_TIMEOUT_S)
        python = shutil.which("python3") or sys.executable
        with tempfile.NamedTemporaryFile("w", prefix="guestd-", suffix=".py", encoding="utf-8") as script:
            script.write(code)
            script.flush()
            done = run_command([python, script.name], timeout_s=timeout_s)
        output, error = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
        return json_response(
            {
                "status": "error" if done.returncode else "success",
                "message": "\n".join(text for text in (output, error) if text),
                "need_more": False,
                "output": output,
                "error": error,
                "return_code": done.returncode,
            }
        )

    @route("POST", "/run_bash_script")
    def run_bash_script(self, request: Request) -> Response:
        """Run a bash script; stderr goes where stdout goes."""
        data = request.json()
        script = data.get("script")
        if not isinstance(script, str) or not script:
            raise Refusal(400, "Script not supplied!")
        working_dir = expand_path(data["working_dir"]) if data.get("working_dir") else None
        if working_dir and not working_dir.is_dir():
            raise Refusal(400, f"Working directory does not exist: {working_dir}")
        timeout_s = seconds_of(data, "timeout", SCRIPT_TIMEOUT_S)
        with tempfile.NamedTemporaryFile("w", prefix="guestd-", suffix=".sh", encoding="utf-8") as file:
            file.write(script)
            file.flush()
            cwd = str(working_dir) if working_dir else None
            done = run_command(["/bin/bash", file.name], timeout_s=timeout_s, cwd=cwd, merge=True)
        status = "error" if done.returncode else "success"
        output = done.stdout.decode("utf-8", "replace")
        return json_response({"status": status, "output": output, "error": "", "returncode": done.returncode})

    @route("POST", "/setup/launch")
    def launch(self, request: Request) -> Response:
        """Start a program and leave it running."""
        command, shell = command_of(request.json())
        launch(command, shell=shell)
        return text_response(f"{command if isinstance(command, str) else ' '.join(command)} launched successfully")

    # Screen and windows

    @route("GET", "/screenshot")
    def screenshot(self, _request: Request) -> Response:
        """The screen with its pointer, as PNG."""
        with self._x() as x:
            width, height, pixels = x.image()
            cursor = x.cursor()
        return Response(200, encode_png(width, height, pixels, cursor), "image/png")

    @route("GET", "/cursor_position")
    def cursor_position(self, _request: Request) -> Response:
        """[x, y]."""
        with self._x() as x:
            pointer = x.pointer()
        return json_response([pointer.x, pointer.y])

    @route("GET", "/screen_size")
    @route("POST", "/screen_size")
    def screen_size(self, _request: Request) -> Response:
        """Width and height in pixels."""
        with self._x() as x:
            width, height = x.screen_size
        return json_response({"width": width, "height": height})

    @route("POST", "/window_size")
    def window_size(self, request: Request) -> Response:
        """Size of the first window of a class."""
        name = request.form().get("app_class_name")
        if not name:
            raise Refusal(400, "app_class_name is required")
        with self._x() as x:
            windows = [window for window in x.windows() if window.matches(name, strict=False, by_class=True)]
        if not windows:
            raise Refusal(404, f"no window of class {name}")
        return json_response({"width": windows[0].width, "height": windows[0].height})

    def _find_window(self, x: X11, data: Mapping[str, Any]) -> Window:
        name = data.get("window_name")
        if not isinstance(name, str) or not name:
            raise Refusal(400, "window_name required")
        strict, by_class = bool(data.get("strict")), bool(data.get("by_class"))
        for window in x.windows():
            if window.matches(name, strict=strict, by_class=by_class):
                return window
        titles = [window.wm_class if by_class else window.title for window in x.windows()]
        raise Refusal(404, f"no window matches {name!r}; there are {titles}")

    def _windows_or_none(self) -> list[Window] | None:
        """Return the windows, or None while the screen is busy: a call that has begun to act must not end in 503."""
        try:
            with self._x() as x:
                return x.windows()
        except Refusal as refusal:
            if refusal.status != 503:
                raise
            return None

    def _wait_for_windows(self, condition: Callable[[list[Window]], bool], timeout_s: float) -> bool:
        """Ask X until `condition` holds, with the screen free for others in between."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            windows = self._windows_or_none()
            if windows is not None and condition(windows):
                return True
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)

    @route("POST", "/setup/activate_window")
    def activate_window(self, request: Request) -> Response:
        """Bring a window to the front and give it the focus; 404 if there is none such."""
        with self._x() as x:
            window = self._find_window(x, request.json())
            x.tell_window_manager(window.id, "_NET_ACTIVE_WINDOW", 2, 0, 0)
        if not self._wait_for_windows(lambda now: any(w.id == window.id and w.active for w in now), 5.0):
            raise Refusal(500, f"the window {window.title!r} did not become active within 5 s")
        return text_response("Window activated successfully")

    @route("POST", "/setup/close_window")
    def close_window(self, request: Request) -> Response:
        """Ask a window to close; 404 if there is none such. It may stay to ask about unsaved work."""
        with self._x() as x:
            window = self._find_window(x, request.json())
            x.tell_window_manager(window.id, "_NET_CLOSE_WINDOW", 0, 2)
        if not self._wait_for_windows(lambda now: all(w.id != window.id for w in now), 3.0):
            return text_response("Window was asked to close and is still open.")
        return text_response("Window closed successfully.")

    @route("GET", "/accessibility")
    def accessibility(self, request: Request) -> Response:
        """The accessibility tree as XML; `max_nodes` and `timeout_s` bound it, `showing=1` tells what shows alone."""
        tree = self._ask_a11y_helper("tree", request.query)
        return json_response({"AT": tree.decode("utf-8")})

    @route("GET", "/terminal")
    def terminal(self, request: Request) -> Response:
        """Text of the focused terminal, else of the first; null without one."""
        text = json.loads(self._ask_a11y_helper("terminal", request.query))
        return json_response({"output": text, "status": "success"})

    def prepare(self) -> None:
        """Ask for a tree once, so that AT-SPI's services and our helper run before one is needed. Never fails."""
        with suppress(Refusal):
            self._ask_a11y_helper("tree", {})

    def _ask_a11y_helper(self, what: str, query: Mapping[str, str]) -> bytes:
        try:
            max_nodes = min(max(int(query.get("max_nodes", "5000")), 1), 100_000)
            timeout_s = min(max(float(query.get("timeout_s", "10")), 0.1), 120.0)
        except ValueError as error:
            raise Refusal(400, f"max_nodes, timeout_s: numbers are required: {error}") from error
        ask = {
            "what": what,
            "max_nodes": max_nodes,
            "timeout_s": timeout_s,
            "showing": query.get("showing") == "1",
        }
        with self._accessibility():
            # It keeps to its time but for one last answer; the rest is its start.
            return self._a11y_helper.ask(ask, timeout_s=timeout_s + 15.0)

    # Session

    @route("GET", "/envd/session")
    def session(self, _request: Request) -> Response:
        """Whether the desktop can be used: X answers, a window manager runs, and the configured windows show."""
        told: dict[str, object] = {
            "ready": False,
            "display": os.environ.get("DISPLAY"),
            "window_manager": None,
            "windows": [],
            "version": VERSION,
            "problem": "",
        }
        try:
            with self._x() as x:
                manager = x.window_manager()
                told |= {"window_manager": manager, "windows": [window.title for window in x.windows()]}
                missing = [name for name in self._wait_windows if not x.shows_class(name)]
        except Refusal as refusal:
            return json_response({**told, "problem": str(refusal)})
        if manager is None:
            told["problem"] = "no window manager is running"
        elif missing:
            told["problem"] = f"no window of class {', '.join(missing)} shows yet"
        else:
            told["ready"] = True
        return json_response(told)

    @route("GET", "/envd/windows")
    def windows(self, _request: Request) -> Response:
        """The managed windows."""
        with self._x() as x:
            windows = x.windows()
        renamed = (
            {("class" if key == "wm_class" else key): value for key, value in asdict(w).items()} for w in windows
        )
        return json_response(list(renamed))

    @route("GET", "/envd/pointer")
    def pointer(self, _request: Request) -> Response:
        """Where the pointer is and what is held down."""
        with self._x() as x:
            return json_response(asdict(x.pointer()))

    @route("POST", "/envd/gateway/open")
    def open_gateway(self, _request: Request) -> Response:
        """Be a proxy to the guest's programs, for the host that asks: what another one left is dropped."""
        return json_response({"port": self.gateway.reopen()})

    @route("POST", "/envd/type_text")
    def type_text(self, request: Request) -> Response:
        """Type Unicode text into the focus."""
        data = request.json()
        text = data.get("text")
        if not isinstance(text, str):
            raise Refusal(400, "text: a string is required")
        if len(text) > MAX_TEXT_LENGTH:
            raise Refusal(413, f"text: {len(text)} characters; at most {MAX_TEXT_LENGTH} a call")
        interval_s = seconds_of(data, "interval_ms", 0.0, maximum_s=10_000.0) / 1000
        if interval_s * len(text) > TYPING_TIMEOUT_S:
            raise Refusal(400, f"interval_ms: this text would take more than {TYPING_TIMEOUT_S:g} s")
        return json_response(self._typist.type(text, interval_s))

    @route("POST", "/envd/input_log/start")
    def start_input_log(self, _request: Request) -> Response:
        """Begin an empty log of input."""
        with self._screen():
            self._input_log.start()
        return json_response({"recording": True, "next": 0})

    @route("POST", "/envd/input_log/stop")
    def stop_input_log(self, _request: Request) -> Response:
        """Log no more."""
        with self._screen():
            self._input_log.stop()
        return json_response({"recording": False})

    @route("GET", "/envd/input_log")
    def input_log(self, request: Request) -> Response:
        """Events from number `since` on; `wait_s` (at most 30) waits for the first."""
        try:
            since = max(0, int(request.query.get("since", "0")))
            wait_s = min(max(float(request.query.get("wait_s", "0")), 0.0), 30.0)
        except ValueError as error:
            raise Refusal(400, f"since, wait_s: numbers are required: {error}") from error
        return json_response(self._input_log.read(since, wait_s))

    # Files

    @route("GET", "/platform")
    def platform(self, _request: Request) -> Response:
        """Linux."""
        return text_response(platform.system())

    @route("POST", "/desktop_path")
    def desktop_path(self, _request: Request) -> Response:
        """The user's desktop folder."""
        told = ""
        if shutil.which("xdg-user-dir"):
            told = run_command(["xdg-user-dir", "DESKTOP"], timeout_s=10.0).stdout.decode().strip()
        for path in (Path(told) if told else None, Path.home() / "Desktop"):
            if path and path.is_dir() and path != Path.home():
                return json_response({"desktop_path": str(path)})
        raise Refusal(404, "Desktop path not found")

    @route("POST", "/list_directory")
    def list_directory(self, request: Request) -> Response:
        """A directory's tree. Links to directories are named, not followed."""
        data = request.json()
        if "path" not in data:
            return json_response({"error": "Missing 'path' parameter"}, 400)
        path = expand_path(data["path"])
        if not path.is_dir():
            return json_response({"error": "The provided path is not a directory"}, 400)
        return json_response({"directory_tree": list_tree(path)})

    @route("POST", "/file")
    def file(self, request: Request) -> Response:
        """A file's bytes."""
        name = request.form().get("file_path")
        if not name:
            return json_response({"error": "file_path is required"}, 400)
        path = expand_path(name)
        if path.exists() and not path.is_file():
            return json_response({"error": f"{path} is not a regular file"}, 400)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return json_response({"error": "File not found"}, 404)
        except OSError as error:
            raise Refusal(500, f"{path} cannot be read: {error}") from error
        return Response(200, content_type="application/octet-stream", file=file, file_name=path.name)

    @route("POST", "/setup/upload")
    def upload(self, request: Request) -> Response:
        """Write a file whole, or not at all; parent directories are made."""
        parts = request.parts()
        if "file_path" not in parts or "file_data" not in parts:
            return json_response({"error": "file_path and file_data are required"}, 400)
        name, data = parts["file_path"], parts["file_data"]
        path = expand_path(request.body[name.start : name.end].decode("utf-8", "surrogateescape"))
        with replacing(path) as file:
            for start in range(data.start, data.end, 1 << 20):
                file.write(request.body[start : min(start + (1 << 20), data.end)])
        return text_response("File Uploaded")

    @route("POST", "/setup/download_file")
    def download_file(self, request: Request) -> Response:
        """Fetch a URL into a file, in at most three tries."""
        data = request.json()
        url = data.get("url")
        if not url or not data.get("path"):
            return text_response("Path or URL not supplied!", 400)
        if not str(url).startswith(("http://", "https://")):
            raise Refusal(400, f"url: http or https is required, not {url!r}")
        path = expand_path(data["path"])
        failure: Exception | None = None
        for _ in range(3):
            try:
                download(str(url), path)
            except (OSError, ValueError) as error:
                failure = error
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    break
            else:
                return text_response("File downloaded successfully")
        return text_response(f"Failed to download {url}. No retries left. Error: {failure}", 500)

    @route("POST", "/setup/open_file")
    def open_file(self, request: Request) -> Response:
        """Open a file in its program and wait (`timeout`, half an hour unless told) for a window that names it."""
        data = request.json()
        if not data.get("path"):
            return text_response("Path not supplied!", 400)
        path = expand_path(data["path"])
        timeout_s = seconds_of(data, "timeout", OPEN_TIMEOUT_S)
        if not path.exists():
            return text_response(f"File not found: {path}", 404)
        with self._x() as x:
            before = {(window.id, window.title) for window in x.windows()}
        openers = [name for name in ("xdg-open", *_EDITORS) if shutil.which(name)]
        if not openers:
            return text_response(f"Failed to open {path}. Error: this guest has no xdg-open and no editor", 501)
        deadline_s = time.monotonic() + timeout_s
        for opener in openers:
            process = launch([opener, str(path)])

            def names_it(window: Window) -> bool:
                changed = (window.id, window.title) not in before
                return path.name in window.title or (changed and path.stem in window.title)

            def settled(now: list[Window], process: subprocess.Popen[bytes] = process) -> bool:
                return process.returncode not in {None, 0} or any(map(names_it, now))

            left_s = max(0.0, deadline_s - time.monotonic())
            if not self._wait_for_windows(settled, left_s):
                break
            if process.returncode in {None, 0}:
                return text_response("File opened successfully")
        titles = [window.title for window in self._windows_or_none() or ()]
        why = f"no window names it after {timeout_s:g} s; there are {titles}"
        return text_response(f"Failed to open {path}. Error: {why}", 500)

    # Wallpaper and recording

    @route("POST", "/wallpaper")
    def wallpaper(self, _request: Request) -> Response:
        """The wallpaper's bytes."""
        path = self._wallpaper
        if path is None and shutil.which("gsettings"):
            done = run_command(["gsettings", "get", "org.gnome.desktop.background", "picture-uri"], timeout_s=10.0)
            told = done.stdout.decode().strip().strip("'")
            if done.returncode == 0 and told.startswith("file://"):
                path = Path(urllib.parse.unquote(told[7:]))
        if path is None or not path.is_file():
            raise Refusal(404, "Wallpaper file not found")
        return Response(200, path.read_bytes(), "image/png")

    @route("POST", "/setup/change_wallpaper")
    def change_wallpaper(self, request: Request) -> Response:
        """Set the wallpaper with what the desktop has for it; 501 where it has nothing."""
        data = request.json()
        if not data.get("path"):
            return text_response("Path not supplied!", 400)
        path = expand_path(data["path"])
        if not path.is_file():
            return text_response(f"File not found: {path}", 404)
        setters = (
            ["gsettings", "set", "org.gnome.desktop.background", "picture-uri", path.as_uri()],
            ["feh", "--bg-fill", str(path)],
            ["hsetroot", "-cover", str(path)],
            # Last, because it waits without end where it does not draw the desktop.
            ["pcmanfm", f"--set-wallpaper={path}"],
        )
        tried = []
        for command in setters:
            if shutil.which(command[0]):
                try:
                    done = run_command(command, timeout_s=WALLPAPER_TIMEOUT_S)
                except Refusal as refusal:
                    tried.append(f"{command[0]}: {refusal}")
                    continue
                if done.returncode == 0:
                    self._wallpaper = path
                    return text_response("Wallpaper changed successfully")
                tried.append(f"{command[0]}: {done.stderr.decode('utf-8', 'replace').strip()}")
        if tried:
            return text_response(f"Failed to change wallpaper. Error: {'; '.join(tried)}", 500)
        return text_response("Failed to change wallpaper. Error: this desktop has no program for it", 501)

    @route("POST", "/start_recording")
    def start_recording(self, _request: Request) -> Response:
        """Record the screen with ffmpeg; 501 without it."""
        if not shutil.which("ffmpeg"):
            raise Refusal(501, "ffmpeg is not installed in this guest")
        with self._x() as x:
            width, height = x.screen_size
        with self._recording_turnstile():
            if self._recording and self._recording[0].returncode is None:
                raise Refusal(400, "Recording is already in progress.")
            path = Path(tempfile.mkdtemp(prefix="guestd-recording-")) / "recording.mp4"
            command = ["ffmpeg", "-y", "-f", "x11grab", "-draw_mouse", "1", "-video_size", f"{width}x{height}"]
            command += ["-i", os.environ["DISPLAY"], "-r", "30", str(path)]
            self._recording = (launch(command), path)
        return json_response({"status": "success", "message": "Started recording."})

    @route("POST", "/end_recording")
    def end_recording(self, _request: Request) -> Response:
        """Stop recording and answer with the film."""
        with self._recording_turnstile():
            if self._recording is None:
                raise Refusal(400, "No recording in progress to stop.")
            (process, path), self._recording = self._recording, None
            # The thread that reaps it sets the return code.
            process.send_signal(signal.SIGINT)
            deadline_s = time.monotonic() + 15.0
            while process.returncode is None and time.monotonic() < deadline_s:
                time.sleep(0.05)
            if process.returncode is None:
                kill_group(process)
        try:
            if not path.is_file():
                raise Refusal(500, f"ffmpeg left no recording (exit status {process.returncode})")
            return Response(200, content_type="video/mp4", file=path.open("rb"), file_name=path.name)
        finally:
            # The open file stays readable until it is sent.
            shutil.rmtree(path.parent, ignore_errors=True)


def no_route(method: str, path: str) -> Response:
    """Answer 405 where another method would do, else 404."""
    status = 405 if any(known == path for _, known in ROUTES) else 404
    return json_response({"status": "error", "message": f"{method} {path}: no such route"}, status)


def list_tree(path: Path) -> dict[str, object]:
    """Return OSWorld's tree of a directory, at most `MAX_DIRECTORY_ENTRIES` entries."""
    left = MAX_DIRECTORY_ENTRIES

    def listed(directory: str, name: str, depth: int) -> dict[str, object]:
        nonlocal left
        children: list[dict[str, object]] = []
        tree: dict[str, object] = {"type": "directory", "name": name, "children": children}
        try:
            with os.scandir(directory) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    left -= 1
                    if left < 0 or depth > 100:
                        tree["truncated"] = True
                        break
                    if not entry.is_dir():
                        children.append({"type": "file", "name": entry.name})
                    elif entry.is_symlink():
                        children.append({"type": "directory", "name": entry.name, "children": []})
                    else:
                        children.append(listed(entry.path, entry.name, depth + 1))
        except OSError as error:
            return {"error": str(error)}
        return tree

    return listed(str(path), path.name, 0)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file beside `path` and put it there at the end; on failure `path` is as it was. Raises: Refusal."""
    target = Path(os.path.realpath(path))
    temporary = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".guestd-", dir=target.parent)
        with open(descriptor, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~umask)
        os.replace(temporary, target)
    except OSError as error:
        raise Refusal(500, f"{path} cannot be written: {error}") from error
    finally:
        if temporary:
            with suppress(FileNotFoundError):
                os.unlink(temporary)


def download(url: str, path: Path) -> None:
    """Fetch a URL into a file. Raises: OSError, ValueError, Refusal."""
    with urllib.request.urlopen(url, timeout=60.0) as source, replacing(path) as file:  # noqa: S310 - http(s) only
        size = 0
        while chunk := source.read(1 << 20):
            size += len(chunk)
            if size > MAX_DOWNLOAD_BYTES:
                raise ValueError(f"larger than {MAX_DOWNLOAD_BYTES} bytes")
            file.write(chunk)


# ---------------------------------------------------------------------------------------------------------------------
# The server


class _Lent:
    """A connection that the host left here, for one program."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.program: socket.socket | None = None
        self.taken = threading.Event()
        self.is_told = threading.Event()
        """What the host said is passed on to its end."""
        self.has_asked = threading.Event()
        """What the program said is."""


class Gateway:
    """A proxy for this guest's programs, whose far end is the host: it leaves connections here, each for one program.

    Nothing is decided here. A program gets a connection that waits, and what the two say is passed on as it is.
    """

    def __init__(self, port: int = PROXY_PORT) -> None:
        self._port = port
        self._changed = threading.Condition()
        self._waiting: deque[_Lent] = deque()
        self._lent: set[_Lent] = set()
        self._listener: socket.socket | None = None

    def reopen(self) -> int:
        """Listen, and drop connections of before: a fork has its template's, which lead nowhere. Returns the port."""
        with self._changed:
            for lent in self._lent:
                with suppress(OSError):
                    lent.connection.shutdown(socket.SHUT_RDWR)
                lent.taken.set()
            self._waiting.clear()
            if self._listener is None:
                self._listener = socket.create_server(("127.0.0.1", self._port))
                threading.Thread(target=self._listen, args=(self._listener,), name="gateway", daemon=True).start()
            return int(self._listener.getsockname()[1])

    def lend(self, connection: socket.socket) -> None:
        """Have a program use a connection from the host; returns when both are done with it."""
        connection.settimeout(None)
        lent = _Lent(connection)
        with self._changed:
            self._lent.add(lent)
            self._waiting.append(lent)
            self._changed.notify()
        lent.taken.wait()
        if lent.program is not None:
            pass_on(connection, lent.program)
            lent.is_told.set()
            lent.has_asked.wait()
        with self._changed:
            self._lent.discard(lent)

    def _listen(self, listener: socket.socket) -> None:
        while True:
            program, _address = listener.accept()
            threading.Thread(target=self._serve, args=(program,), name="gateway-program", daemon=True).start()

    def _serve(self, program: socket.socket) -> None:
        with program:
            lent = self._take()
            if lent is None:
                with suppress(OSError):
                    program.sendall(
                        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )
                return
            lent.program = program
            lent.taken.set()
            pass_on(program, lent.connection)
            lent.has_asked.set()
            lent.is_told.wait()

    def _take(self) -> _Lent | None:
        """Return a connection that waits and is good, now its program's, or None."""
        deadline_s = time.monotonic() + GATEWAY_WAIT_S
        with self._changed:
            while True:
                while self._waiting:
                    lent = self._waiting.popleft()
                    # The host speaks second, so what can be read now is the connection's end.
                    if not select.select([lent.connection], [], [], 0)[0]:
                        return lent
                    lent.taken.set()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None


def pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Carry one direction to its end; where it breaks, both directions end."""
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Connection(BaseHTTPRequestHandler):
    """One HTTP connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = f"envd-guestd/{VERSION}"
    sys_version = ""
    timeout = SOCKET_TIMEOUT_S
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_GET(self) -> None:
        """Answer a GET."""
        self._answer("GET")

    def do_POST(self) -> None:
        """Answer a POST."""
        self._answer("POST")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing about each request: the host logs what it asks."""

    def _answer(self, method: str) -> None:
        address = urllib.parse.urlsplit(self.path)
        try:
            body = self._read_body()
        except Refusal as refusal:
            # What is left of the body would be read as the next request.
            self.close_connection = True
            self._send(json_response({"status": "error", "message": str(refusal)}, refusal.status))
            return
        if (method, address.path) == ("POST", "/envd/gateway/wait"):
            self._lend()
            return
        query = dict(urllib.parse.parse_qsl(address.query))
        request = Request(address.path, query, self.headers.get("Content-Type", ""), body)
        request_id = self.headers.get("X-Request-Id")
        guest, replays = self.server.guest, self.server.replays
        try:
            if method == "POST" and request_id:
                response = replays.answer(request, request_id, lambda: guest.handle(method, request))
            else:
                response = guest.handle(method, request)
        except Refusal as refusal:
            response = json_response({"status": "error", "message": str(refusal)}, refusal.status)
        finally:
            if isinstance(body, mmap.mmap):
                body.close()
        self._send(response)

    def _lend(self) -> None:
        self.close_connection = True
        self.connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: tunnel\r\nConnection: Upgrade\r\n\r\n")
        self.server.guest.gateway.lend(self.connection)

    def _read_body(self) -> bytes | mmap.mmap:
        if self.headers.get("Origin") is not None:
            raise Refusal(403, "requests from web pages are refused")
        if self.headers.get("Transfer-Encoding"):
            raise Refusal(411, "Content-Length is required; chunked bodies are not taken")
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError as error:
            raise Refusal(400, "Content-Length is not a number") from error
        if not 0 <= length <= MAX_BODY_BYTES:
            raise Refusal(413, f"the body may hold {MAX_BODY_BYTES} bytes, not {length}")
        if length <= MAX_IN_MEMORY_BODY_BYTES:
            body = self.rfile.read(length)
            if len(body) != length:
                raise Refusal(400, "the body ended early")
            return body
        with tempfile.TemporaryFile() as file:
            left = length
            while left and (chunk := self.rfile.read(min(left, 1 << 20))):
                file.write(chunk)
                left -= len(chunk)
            if left:
                raise Refusal(400, "the body ended early")
            file.flush()
            return mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ)

    def _send(self, response: Response) -> None:
        file = response.file
        with suppress(ConnectionError, TimeoutError):
            length = os.fstat(file.fileno()).st_size if file else len(response.body)
            self.send_response(response.status)
            self.send_header("Content-Type", response.content_type)
            self.send_header("Content-Length", str(length))
            if file:
                name = urllib.parse.quote(response.file_name)
                self.send_header("Content-Disposition", f"attachment; filename*=UTF-8''{name}")
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            if file:
                while length and (chunk := file.read(min(length, 1 << 20))):
                    self.wfile.write(chunk)
                    length -= len(chunk)
                # A file that shrank meanwhile must not look complete.
                self.close_connection = self.close_connection or length > 0
            else:
                self.wfile.write(response.body)
            self.wfile.flush()
        if file:
            file.close()


class Server(ThreadingHTTPServer):
    """Serves a guest, each connection in a thread of its own."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], guest: Guest) -> None:
        super().__init__(address, Connection)
        self.guest = guest
        self.replays = Replays()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Log what went wrong with a connection; one that the client drops is no news."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            log.exception("connection from %s failed", client_address)


def main(arguments: Iterable[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="Serve this desktop session to the host.")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")  # noqa: S104
    parser.add_argument("--port", type=int, default=5000, help="0 for any free one (default: %(default)s)")
    parser.add_argument(
        "--wait-window", action="append", default=[], metavar="CLASS", help="not ready before it shows; repeatable"
    )
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument("--a11y-helper", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.a11y_helper:
        serve_a11y(sys.stdin.buffer, sys.stdout.buffer)
        return 0
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    with Server((options.host, options.port), Guest(wait_windows=options.wait_window)) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown, daemon=True).start())
        log.info("version %s listening on %s:%d", VERSION, options.host, server.server_address[1])
        threading.Thread(target=server.guest.prepare, daemon=True, name="prepare").start()
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
