"""Routes of the session: readiness, typing, the gateway."""

import os
import platform

from .. import VERSION
from ..fields import read_seconds
from ..guest import Guest
from ..messages import HttpError, Request, Response, json_response, text_response

MAX_TEXT_LENGTH = 100_000
TYPING_TIMEOUT_S = 300.0


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


def type_text(guest: Guest, request: Request) -> Response:
    """Type Unicode text into the focused window."""
    data = request.json()
    text = data.get("text")
    if not isinstance(text, str):
        raise HttpError(400, "text: a string is required")
    if len(text) > MAX_TEXT_LENGTH:
        raise HttpError(413, f"text: {len(text)} characters; at most {MAX_TEXT_LENGTH} per call")
    interval_s = read_seconds(data, "interval_ms", 0.0, maximum_s=10_000.0) / 1000
    if interval_s * len(text) > TYPING_TIMEOUT_S:
        raise HttpError(400, f"interval_ms: this text would take more than {TYPING_TIMEOUT_S:g} s")
    return json_response(guest.keyboard.type(text, interval_s))


def open_gateway(guest: Guest, _request: Request) -> Response:
    """Open the proxy for programs in the guest and drop the connections of an earlier host."""
    return json_response({"port": guest.gateway.reopen()})


def platform_name(_guest: Guest, _request: Request) -> Response:
    """Return "Linux"."""
    return text_response(platform.system())
