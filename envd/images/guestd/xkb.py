"""Three requests of the XKB extension, which Debian 12's xcffib (0.11.1) lacks."""

import struct
from io import BytesIO
from typing import Any, NamedTuple

import xcffib

# Module level: recent versions of xcffib free the name with the key.
_KEY = xcffib.ExtensionKey("XKEYBOARD")
_USE_EXTENSION, _GET_STATE, _LATCH_LOCK_STATE = 0, 4, 5
_CORE_KEYBOARD = 0x100
_CAPS_LOCK = 2


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
    """The locked state of the keyboard."""

    caps_lock: bool
    group: int
    """Number of the active layout."""


class Xkb:
    """The keyboard's locked modifiers and layout."""

    def __init__(self, connection: Any) -> None:
        self._extension = xcffib.Extension(connection, _KEY)
        raw_reply(self._extension, _USE_EXTENSION, struct.pack("=4xHH", 1, 0))

    def state(self) -> KeyboardState:
        """Return the current state."""
        reply = raw_reply(self._extension, _GET_STATE, struct.pack("=4xH2x", _CORE_KEYBOARD))
        locked_modifiers, locked_group = reply[11], reply[13]
        return KeyboardState(bool(locked_modifiers & _CAPS_LOCK), locked_group)

    def lock(self, *, caps_lock: bool, group: int) -> None:
        """Set Caps Lock and the layout."""
        modifiers = _CAPS_LOCK if caps_lock else 0
        request = struct.pack("=4xHBBBBBBxBH", _CORE_KEYBOARD, _CAPS_LOCK, modifiers, True, group, 0, 0, False, 0)
        self._extension.send_request(_LATCH_LOCK_STATE, BytesIO(request))
