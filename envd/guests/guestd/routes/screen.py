"""Routes of the session: readiness, screen, pointer, windows, typing, the accessibility tree and the gateway."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .. import VERSION
from ..guest import Guest
from ..messages import HttpError, Request, Response, json_response, read_seconds, text_response
from ..x11 import X11, Window, encode_png

MAX_TEXT_LENGTH = 100_000
TYPING_TIMEOUT_S = 300.0


def screenshot(guest: Guest, _request: Request) -> Response:
    """Return the screen with its pointer, as PNG."""
    with guest.x11() as x:
        width, height, pixels = x.image()
        cursor = x.cursor()
    return Response(200, encode_png(width, height, pixels, cursor), "image/png")


def cursor_position(guest: Guest, _request: Request) -> Response:
    """Return the pointer's position as [x, y]."""
    with guest.x11() as x:
        pointer = x.pointer()
    return json_response([pointer.x, pointer.y])


def pointer(guest: Guest, _request: Request) -> Response:
    """Return the pointer's position and the held buttons and modifiers."""
    with guest.x11() as x:
        return json_response(asdict(x.pointer()))


def screen_size(guest: Guest, _request: Request) -> Response:
    """Return width and height in pixels."""
    with guest.x11() as x:
        width, height = x.screen_size
    return json_response({"width": width, "height": height})


def window_size(guest: Guest, request: Request) -> Response:
    """Return the size of the first window of a class."""
    name = request.form().get("app_class_name")
    if not name:
        raise HttpError(400, "app_class_name is required")
    with guest.x11() as x:
        windows = [window for window in x.windows() if window.matches(name, strict=False, by_class=True)]
    if not windows:
        raise HttpError(404, f"no window of class {name}")
    return json_response({"width": windows[0].width, "height": windows[0].height})


def activate_window(guest: Guest, request: Request) -> Response:
    """Raise and focus a window; 404 if no window matches."""
    with guest.x11() as x:
        window = _find_window(x, request.json())
        x.send_to_window_manager(window.id, "_NET_ACTIVE_WINDOW", 2, 0, 0)
    if not guest.wait_for_windows(lambda now: any(w.id == window.id and w.active for w in now), 5.0):
        raise HttpError(500, f"the window {window.title!r} did not become active within 5 s")
    return text_response("Window activated successfully")


def close_window(guest: Guest, request: Request) -> Response:
    """Ask a window to close; 404 if no window matches. It may stay open to ask about unsaved work."""
    with guest.x11() as x:
        window = _find_window(x, request.json())
        x.send_to_window_manager(window.id, "_NET_CLOSE_WINDOW", 0, 2)
    if not guest.wait_for_windows(lambda now: all(w.id != window.id for w in now), 3.0):
        return text_response("Window was asked to close and is still open.")
    return text_response("Window closed successfully.")


def accessibility(guest: Guest, request: Request) -> Response:
    """Return the accessibility tree as XML; `max_nodes` and `timeout_s` bound it, `showing=1` omits hidden elements."""
    return json_response({"AT": guest.a11y.query("tree", request.query).decode("utf-8")})


def terminal(guest: Guest, request: Request) -> Response:
    """Return the text of the focused terminal, else of the first one; null without a terminal."""
    return json_response({"output": json.loads(guest.a11y.query("terminal", request.query)), "status": "success"})


def _find_window(x: X11, data: Mapping[str, Any]) -> Window:
    name = data.get("window_name")
    if not isinstance(name, str) or not name:
        raise HttpError(400, "window_name required")
    strict, by_class = bool(data.get("strict")), bool(data.get("by_class"))
    windows = x.windows()
    for window in windows:
        if window.matches(name, strict=strict, by_class=by_class):
            return window
    titles = [window.wm_class if by_class else window.title for window in windows]
    raise HttpError(404, f"no window matches {name!r}; open windows: {titles}")


def session(guest: Guest, _request: Request) -> Response:
    """Return whether the desktop is ready: X answers, a window manager runs, and the configured windows show."""
    state: dict[str, object] = {
        "ready": False,
        "display": os.environ.get("DISPLAY"),
        "window_manager": None,
        "windows": [],
        "version": VERSION,
        "problem": "",
    }
    try:
        with guest.x11() as x:
            manager = x.window_manager()
            state |= {"window_manager": manager, "windows": [window.title for window in x.windows()]}
            missing = [name for name in guest.wait_windows if not x.shows_class(name)]
    except HttpError as error:
        return json_response({**state, "problem": str(error)})
    if manager is None:
        state["problem"] = "no window manager is running"
    elif missing:
        state["problem"] = f"no window of class {', '.join(missing)} shows yet"
    else:
        state["ready"] = True
    return json_response(state)


def keyboard(guest: Guest, _request: Request) -> Response:
    """Return what the keys of the keyboard type now."""
    return json_response(guest.keyboard.state())


def type_text(guest: Guest, request: Request) -> Response:
    """Type Unicode text into the focused window, while keys with the keysyms `held` are down."""
    data = request.json()
    text = data.get("text")
    if not isinstance(text, str):
        raise HttpError(400, "text: a string is required")
    if len(text) > MAX_TEXT_LENGTH:
        raise HttpError(413, f"text: {len(text)} characters; at most {MAX_TEXT_LENGTH} per call")
    interval_s = read_seconds(data, "interval_ms", 0.0, maximum_s=10_000.0) / 1000
    if interval_s * len(text) > TYPING_TIMEOUT_S:
        raise HttpError(400, f"interval_ms: this text would take more than {TYPING_TIMEOUT_S:g} s")
    held = data.get("held", [])
    if not isinstance(held, list) or not all(isinstance(keysym, int) for keysym in held):
        raise HttpError(400, "held: a list of keysyms is required")
    guest.keyboard.type(text, interval_s, held)
    return json_response({"typed": len(text)})


def open_gateway(guest: Guest, _request: Request) -> Response:
    """Open the proxy for programs in the guest and drop the connections of an earlier host."""
    return json_response({"port": guest.gateway.reopen()})


def platform_name(_guest: Guest, _request: Request) -> Response:
    """Return "Linux"."""
    return text_response(platform.system())
