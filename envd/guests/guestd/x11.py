"""A connection to the X server, through xcffib (Debian: python3-xcffib), and the PNG encoding of its screen."""

import os
import select
import socket
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import xcffib
import xcffib.res
import xcffib.xfixes
import xcffib.xproto as xp
import xcffib.xtest

from .messages import HttpError

# Module level: recent versions of xcffib free the name with the key.
_KEY = xcffib.ExtensionKey("XKEYBOARD")
_USE_EXTENSION, _GET_STATE, _LATCH_LOCK_STATE = 0, 4, 5
_READ_POLL_S = 0.01
_CORE_KEYBOARD = 0x100
_CAPS_LOCK, _NUM_LOCK = 2, 16
_MAX_PROPERTY_WORDS = 1 << 18
_MODIFIERS = ("shift", "lock", "control", "mod1", "mod2", "mod3", "mod4", "mod5")
_KEY_PRESS = 2
_KEY_RELEASE = 3
_CLIENT_MESSAGE = 33
_GET_IMAGE = 73


class _RawReply(xcffib.Reply):  # type: ignore[misc]
    """A reply as bytes."""

    def __init__(self, unpacker: Any) -> None:
        super().__init__(unpacker)
        self.data = bytes(unpacker.buf)


class _RawCookie(xcffib.Cookie):  # type: ignore[misc]
    reply_type = _RawReply


def raw_reply(extension: Any, opcode: int, request: bytes) -> bytes:
    """Send a request (with an empty header of 4 bytes) and return its reply."""
    cookie = extension.send_request(opcode, BytesIO(request), _RawCookie, is_checked=True)
    return bytes(cookie.reply().data)


class KeyboardState(NamedTuple):
    """The state of the keyboard."""

    caps_lock: bool
    group: int
    """Number of the layout that is locked."""
    active_group: int
    """Number of the active layout."""
    num_lock: bool


class Xkb:
    """The keyboard's locked modifiers and layout.

    Implements three requests of the XKB extension, which Debian 12's xcffib (0.11.1) lacks.
    """

    def __init__(self, connection: Any) -> None:
        self._extension = xcffib.Extension(connection, _KEY)
        raw_reply(self._extension, _USE_EXTENSION, struct.pack("=4xHH", 1, 0))

    def state(self) -> KeyboardState:
        reply = raw_reply(self._extension, _GET_STATE, struct.pack("=4xH2x", _CORE_KEYBOARD))
        locked_modifiers, locked_group = reply[11], reply[13]
        return KeyboardState(
            bool(locked_modifiers & _CAPS_LOCK), locked_group, reply[12], bool(locked_modifiers & _NUM_LOCK)
        )

    def lock(self, *, caps_lock: bool, group: int) -> None:
        """Set Caps Lock and the layout."""
        modifiers = _CAPS_LOCK if caps_lock else 0
        request = struct.pack("=4xHBBBBBBxBH", _CORE_KEYBOARD, _CAPS_LOCK, modifiers, True, group, 0, 0, False, 0)
        self._extension.send_request(_LATCH_LOCK_STATE, BytesIO(request))


@dataclass(frozen=True, slots=True)
class Cursor:
    """A pointer image: premultiplied ARGB; `x`, `y` are its top left corner (not its hot spot)."""

    x: int
    y: int
    width: int
    height: int
    argb: Sequence[int]


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
        """Match as wmctrl does: a part of the text, ignoring case, or with `strict` the whole text exactly."""
        text = self.wm_class if by_class else self.title
        return text == name if strict else name.casefold() in text.casefold()


@dataclass(frozen=True, slots=True)
class Pointer:
    """The pointer's position and the held buttons and modifiers."""

    x: int
    y: int
    buttons: list[int]
    modifiers: list[str]


class X11:
    """One connection to the X server, for one call, so that no state outlives a server that is restarted.

    A context manager. X errors and a lost connection leave the `with` block as HttpError.
    """

    def __init__(self) -> None:
        name = os.environ.get("DISPLAY", "")
        if not name:
            raise HttpError(500, "DISPLAY is not set: guestd was started outside an X session")
        try:
            self._x = xcffib.connect()
        except xcffib.ConnectionException as error:
            message = f"the X server {name} cannot be reached: it is not running, or rejects this user"
            raise HttpError(500, message) from error
        self._core = self._x.core
        self._screen = self._x.setup.roots[self._x.pref_screen]
        self.root: int = self._screen.root

    def __enter__(self) -> "X11":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._x.disconnect()
        if isinstance(error, xcffib.ConnectionException):
            raise HttpError(500, "the X server went away") from error
        if isinstance(error, xcffib.XcffibException):
            raise HttpError(500, f"X error: {type(error).__name__}") from error

    def sync(self) -> None:
        """Wait until the server has processed all requests. Raises the X error of an earlier request, if any."""
        self._core.GetInputFocus().reply()
        while self._x.poll_for_event() is not None:
            pass

    def _has_extension(self, name: str) -> bool:
        return bool(self._core.QueryExtension(len(name), name).reply().present)

    def _atom(self, name: str) -> int:
        return int(self._core.InternAtom(False, len(name), name).reply().atom)

    # Windows

    @property
    def screen_size(self) -> tuple[int, int]:
        return self._screen.width_in_pixels, self._screen.height_in_pixels

    def _property(self, window: int, name: str) -> Any:
        """Return the reply of GetProperty, or None if the window does not exist."""
        with suppress(xcffib.Error):
            return self._core.GetProperty(False, window, self._atom(name), 0, 0, _MAX_PROPERTY_WORDS).reply()
        return None

    def _numbers(self, window: int, name: str) -> list[int]:
        """Return a property of 32-bit numbers; empty if it is missing."""
        reply = self._property(window, name)
        return [number for (number,) in struct.iter_unpack("=I", reply.value.buf())] if _has_format(reply, 32) else []

    def _text(self, window: int, name: str) -> str:
        """Return a text property; empty if it is missing."""
        reply = self._property(window, name)
        encoding = "latin-1" if reply and reply.type == xp.Atom.STRING else "utf-8"
        return str(reply.value.buf().decode(encoding, "replace")) if _has_format(reply, 8) else ""

    def _window_class(self, window: int) -> str:
        """Return `instance.Class`, or an empty string."""
        return ".".join(self._text(window, "WM_CLASS").rstrip("\0").split("\0"))

    def window_manager(self) -> str | None:
        """Return the name of the running window manager, or None. A stale property of a dead one is ignored."""
        for window in self._numbers(self.root, "_NET_SUPPORTING_WM_CHECK")[:1]:
            if self._numbers(window, "_NET_SUPPORTING_WM_CHECK") == [window]:
                return self._text(window, "_NET_WM_NAME") or "unnamed"
        return None

    def windows(self) -> list[Window]:
        """Return the managed windows, oldest first, without those that close during the call."""
        active = self._numbers(self.root, "_NET_ACTIVE_WINDOW")[:1]
        found = []
        for window in self._numbers(self.root, "_NET_CLIENT_LIST"):
            with suppress(xcffib.Error):
                size = self._core.GetGeometry(window).reply()
                corner = self._core.TranslateCoordinates(window, self.root, 0, 0).reply()
                title = self._text(window, "_NET_WM_NAME") or self._text(window, "WM_NAME")
                wm_class, is_active = self._window_class(window), [window] == active
                found.append(
                    Window(window, title, wm_class, corner.dst_x, corner.dst_y, size.width, size.height, is_active)
                )
        return found

    def shows_class(self, name: str) -> bool:
        """Return whether a window of this class or instance is visible, managed or not (panels may be unmanaged)."""
        unmanaged = self._core.QueryTree(self.root).reply().children
        for window in [*self._numbers(self.root, "_NET_CLIENT_LIST"), *unmanaged]:
            if name.casefold() in self._window_class(window).casefold().split("."):
                with suppress(xcffib.Error):
                    if self._core.GetWindowAttributes(window).reply().map_state == xp.MapState.Viewable:
                        return True
        return False

    def _send_message(self, destination: int, mask: int, window: int, kind: int, *numbers: int) -> None:
        data = [*numbers, 0, 0, 0, 0, 0][:5]
        event = struct.pack("=BBHII5I", _CLIENT_MESSAGE, 32, 0, window, kind, *data)
        self._core.SendEvent(False, destination, mask, event)

    def send_to_window_manager(self, window: int, message: str, *numbers: int) -> None:
        """Send the window manager a request about a window, as a pager does."""
        mask = xp.EventMask.SubstructureNotify | xp.EventMask.SubstructureRedirect
        self._send_message(self.root, mask, window, self._atom(message), *numbers)
        self.sync()

    def _answers_pings(self) -> bool:
        """Return whether the active window's client supports `ping_focus`."""
        ping = self._atom("_NET_WM_PING")
        return any(
            ping in self._numbers(window, "WM_PROTOCOLS")
            for window in self._numbers(self.root, "_NET_ACTIVE_WINDOW")[:1]
        )

    def ping_focus(self, timeout_s: float) -> bool:
        """Wait until the active window's client has read its events so far; False if it does not confirm that."""
        ping, protocols = self._atom("_NET_WM_PING"), self._atom("WM_PROTOCOLS")
        for window in self._numbers(self.root, "_NET_ACTIVE_WINDOW")[:1]:
            if not window or ping not in self._numbers(window, "WM_PROTOCOLS"):
                return False
            self._core.ChangeWindowAttributes(self.root, xp.CW.EventMask, [xp.EventMask.SubstructureNotify])
            message = [ping, time.monotonic_ns() // 1_000_000 & 0x7FFFFFFF, window]
            self._send_message(window, 0, window, protocols, *message)
            self._x.flush()
            poll = select.poll()
            poll.register(self._x.get_file_descriptor(), select.POLLIN)
            deadline_s = time.monotonic() + timeout_s
            while (left_s := deadline_s - time.monotonic()) > 0:
                event = self._x.poll_for_event()
                if event is None:
                    poll.poll(left_s * 1000)
                elif isinstance(event, xp.ClientMessageEvent) and list(event.data.data32)[:3] == message:
                    return True
        return False

    def wait_until_read(self, timeout_s: float) -> bool:
        """Wait until the focused client has handled its events so far; False if that is not confirmed.

        A client that does not answer pings (xterm, for one) has handled them when all its threads and the server's
        sleep at the same time: what one of them has to read would wake it. The server counts too, because it may leave
        a busy client waiting for a reply while it answers others (dix/dispatch.c, `SmartScheduleClient`).
        """
        focus = self._core.GetInputFocus().reply().focus
        if focus == xp.InputFocus.PointerRoot:
            focus = self._core.QueryPointer(self.root).reply().child
        if focus in (xp.Window._None, self.root):
            return True  # there is no client that reads keys
        if self._answers_pings():
            return self.ping_focus(timeout_s)
        spec = xcffib.res.ClientIdSpec.synthetic(focus, xcffib.res.ClientIdMask.LocalClientPID)
        clients = [found.value[0] for found in self._x(xcffib.res.key).QueryClientIds(1, [spec]).reply().ids]
        if not clients:
            return False  # it is on another machine
        with socket.socket(fileno=os.dup(self._x.get_file_descriptor())) as connection:
            server, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self.sync()
            before = _sleeping_threads(*clients, server)
            if before and before == _sleeping_threads(*clients, server):
                return True
            time.sleep(_READ_POLL_S)
        return False

    # Screen

    def pointer(self) -> Pointer:
        reply = self._core.QueryPointer(self.root).reply()
        return Pointer(
            reply.root_x,
            reply.root_y,
            [button for button in range(1, 6) if reply.mask & 1 << 7 + button],
            [name for bit, name in enumerate(_MODIFIERS) if reply.mask & 1 << bit],
        )

    def image(self) -> tuple[int, int, bytes]:
        """Return (width, height, pixels as rows of B, G, R, x). Raises: HttpError."""
        width, height = self.screen_size
        depth, setup = self._screen.root_depth, self._x.setup
        bits = next(format.bits_per_pixel for format in setup.pixmap_formats if format.depth == depth)
        visuals = [visual for allowed in self._screen.allowed_depths for visual in allowed.visuals]
        [red] = [visual.red_mask for visual in visuals if visual.visual_id == self._screen.root_visual]
        if (bits, setup.image_byte_order, red) != (32, xp.ImageOrder.LSBFirst, 0xFF0000):
            raise HttpError(500, f"a screen of {bits} bits per pixel is not supported; use depth 24")
        # Unlike xcffib's own reply, this one does not convert 4 million pixel bytes to a list of numbers.
        request = struct.pack("=xB2xIhhHHI", xp.ImageFormat.ZPixmap, self.root, 0, 0, width, height, 0xFFFFFFFF)
        try:
            pixels = raw_reply(self._core, _GET_IMAGE, request)[32:]
        except xcffib.Error as error:
            # The screen was resized after the connection was made.
            raise HttpError(503, "the screen cannot be read; retry") from error
        return width, height, pixels

    def cursor(self) -> Cursor | None:
        """Return the pointer's image, or None if the server does not support that."""
        if not self._has_extension("XFIXES"):
            return None
        fixes = self._x(xcffib.xfixes.key)
        fixes.QueryVersion(4, 0).reply()
        image = fixes.GetCursorImage().reply()
        corner = image.x - image.xhot, image.y - image.yhot
        return Cursor(*corner, image.width, image.height, list(image.cursor_image))

    # Keyboard

    def keyboard_map(self) -> dict[int, list[int]]:
        """Return the keysyms of each keycode: unshifted, shifted, and so on."""
        low, high = self._x.setup.min_keycode, self._x.setup.max_keycode
        reply = self._core.GetKeyboardMapping(low, high - low + 1).reply()
        width, keysyms = reply.keysyms_per_keycode, list(reply.keysyms)
        return {code: keysyms[(code - low) * width : (code - low + 1) * width] for code in range(low, high + 1)}

    def keyboard_state(self) -> KeyboardState:
        return Xkb(self._x).state()

    def bind_keys(self, first: int, rows: Sequence[tuple[int, int]]) -> None:
        """Set the keysyms (unshifted, shifted) of the keycodes from `first` on."""
        # Two columns make a two-level key, so that the server adds no capital letters of its own.
        keysyms = [keysym for pair in rows for keysym in pair]
        self._core.ChangeKeyboardMapping(len(rows), first, 2, keysyms)
        self.sync()

    @contextmanager
    def plain_keyboard(self) -> Iterator[None]:
        """Use the first layout, with Caps Lock and key repeat off, and restore the settings afterwards."""
        xkb = Xkb(self._x)
        before = xkb.state()
        repeats = self._core.GetKeyboardControl().reply().global_auto_repeat
        # The server repeats a key by its own clock. On a host with four times more load than CPUs, it stopped for two
        # thirds of a second between a press and its release, and one `$` of 2,000 characters was typed twice.
        self._set_repeat(xp.AutoRepeatMode.Off)
        xkb.lock(caps_lock=False, group=0)
        try:
            yield
        finally:
            xkb.lock(caps_lock=before.caps_lock, group=before.group)
            self._set_repeat(repeats)
            self.sync()

    def _set_repeat(self, mode: int) -> None:
        self._core.ChangeKeyboardControl(xp.KB.AutoRepeatMode, [mode])

    def require_xtest(self) -> None:
        """Raises: HttpError: the server does not accept synthetic input."""
        if not self._has_extension("XTEST"):
            raise HttpError(500, "the X server lacks the XTEST extension")

    def fake_key(self, keycode: int, *, pressed: bool) -> None:
        kind = _KEY_PRESS if pressed else _KEY_RELEASE
        self._x(xcffib.xtest.key).FakeInput(kind, keycode, 0, 0, 0, 0, 0)


def _sleeping_threads(*processes: int) -> dict[str, str]:
    """Return how often each thread of some processes has slept; empty if one is awake."""
    switches: dict[str, str] = {}
    try:
        for process in processes:
            for status in Path("/proc", str(process), "task").glob("*/status"):
                _, _, text = status.read_text(errors="replace").partition("State:\t")
                if not text.startswith("S"):
                    return {}
                switches[str(status)] = text[text.index("voluntary_ctxt_switches") :]
    except OSError:  # it has ended
        return {}
    return switches


def _has_format(reply: Any, bits: int) -> bool:
    return reply is not None and reply.format == bits


def encode_png(width: int, height: int, bgrx: bytes, cursor: Cursor | None) -> bytes:
    """Encode a screen and its pointer as 8-bit RGB, at compression level 1: higher levels cost more time than bytes."""
    rgb = bytearray(width * height * 3)
    for channel in range(3):
        rgb[channel::3] = bgrx[2 - channel :: 4]
    if cursor:
        blend_cursor(rgb, width, height, cursor)
    stride = width * 3
    rows = memoryview(rgb)
    compressor = zlib.compressobj(1)
    data = bytearray()
    for start in range(0, stride * height, stride):
        data += compressor.compress(b"\0")
        data += compressor.compress(rows[start : start + stride])
    data += compressor.flush()

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", bytes(data)) + chunk(b"IEND", b"")


def blend_cursor(rgb: bytearray, width: int, height: int, cursor: Cursor) -> None:
    """Draw the pointer over an RGB screen, clipped at the edges."""
    for row in range(max(0, -cursor.y), min(cursor.height, height - cursor.y)):
        for column in range(max(0, -cursor.x), min(cursor.width, width - cursor.x)):
            pixel = cursor.argb[row * cursor.width + column]
            uncovered = 255 - (pixel >> 24 & 255)
            if uncovered == 255:
                continue
            offset = ((cursor.y + row) * width + cursor.x + column) * 3
            for channel, shift in enumerate((16, 8, 0)):
                mixed = (pixel >> shift & 255) + rgb[offset + channel] * uncovered // 255
                rgb[offset + channel] = min(255, mixed)
