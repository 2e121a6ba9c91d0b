"""The route table, and the dispatch of requests."""

import logging
from collections.abc import Callable

from ..guest import Guest
from ..messages import HttpError, Request, Response, json_response
from . import commands, files, media, screen

logger = logging.getLogger("guestd")

Handler = Callable[[Guest, Request], Response]

ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/execute"): commands.execute,
    ("POST", "/setup/execute"): commands.execute,
    ("POST", "/execute_with_verification"): commands.execute_with_verification,
    ("POST", "/setup/execute_with_verification"): commands.execute_with_verification,
    ("POST", "/run_python"): commands.run_python,
    ("POST", "/run_bash_script"): commands.run_bash_script,
    ("POST", "/setup/launch"): commands.launch_program,
    ("GET", "/screenshot"): screen.screenshot,
    ("GET", "/cursor_position"): screen.cursor_position,
    ("GET", "/screen_size"): screen.screen_size,
    ("POST", "/screen_size"): screen.screen_size,
    ("POST", "/window_size"): screen.window_size,
    ("POST", "/setup/activate_window"): screen.activate_window,
    ("POST", "/setup/close_window"): screen.close_window,
    ("GET", "/accessibility"): screen.accessibility,
    ("GET", "/terminal"): screen.terminal,
    ("GET", "/envd/pointer"): screen.pointer,
    ("GET", "/envd/session"): screen.session,
    ("GET", "/envd/keyboard"): screen.keyboard,
    ("POST", "/envd/type_text"): screen.type_text,
    ("POST", "/envd/gateway/open"): screen.open_gateway,
    ("GET", "/platform"): screen.platform_name,
    ("POST", "/desktop_path"): files.desktop_path,
    ("POST", "/list_directory"): files.list_directory,
    ("POST", "/file"): files.read_file,
    ("POST", "/setup/upload"): files.upload,
    ("POST", "/setup/download_file"): files.download_file,
    ("POST", "/setup/open_file"): files.open_file,
    ("POST", "/wallpaper"): media.wallpaper,
    ("POST", "/setup/change_wallpaper"): media.change_wallpaper,
    ("POST", "/start_recording"): media.start_recording,
    ("POST", "/end_recording"): media.end_recording,
}


def respond(guest: Guest, method: str, request: Request) -> Response:
    """Answer one request. Never raises an Exception."""
    handler = ROUTES.get((method, request.path))
    try:
        if handler is None:
            status = 405 if any(path == request.path for _, path in ROUTES) else 404
            raise HttpError(status, f"{method} {request.path}: no such route")  # noqa: TRY301
        return handler(guest, request)
    except HttpError as error:
        return error.response()
    except Exception as error:
        logger.exception("%s %s failed", method, request.path)
        return json_response({"status": "error", "message": f"{type(error).__name__}: {error}"}, 500)
