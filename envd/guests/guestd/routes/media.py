"""Routes of the wallpaper and of screen recording."""

import os
import shutil
import signal
import tempfile
import time
import urllib.parse
from pathlib import Path

from ..guest import Guest
from ..messages import HttpError, Request, Response, expand_path, json_response, text_response
from ..processes import kill_group, launch, run_command


def wallpaper(guest: Guest, _request: Request) -> Response:
    """Return the wallpaper's bytes."""
    path = guest.wallpaper
    if path is None and shutil.which("gsettings"):
        result = run_command(["gsettings", "get", "org.gnome.desktop.background", "picture-uri"], timeout_s=10.0)
        uri = result.stdout.decode().strip().strip("'")
        if result.returncode == 0 and uri.startswith("file://"):
            path = Path(urllib.parse.unquote(uri[7:]))
    if path is None or not path.is_file():
        raise HttpError(404, "Wallpaper file not found")
    return Response(200, path.read_bytes(), "image/png")


def change_wallpaper(guest: Guest, request: Request) -> Response:
    """Set the wallpaper with the desktop's own program; 501 if there is none."""
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
        # Last: it never returns unless it draws the desktop.
        ["pcmanfm", f"--set-wallpaper={path}"],
    )
    failures = []
    for command in setters:
        if shutil.which(command[0]):
            try:
                result = run_command(command, timeout_s=guest.wallpaper_timeout_s)
            except HttpError as error:
                failures.append(f"{command[0]}: {error}")
                continue
            if result.returncode == 0:
                guest.wallpaper = path
                return text_response("Wallpaper changed successfully")
            failures.append(f"{command[0]}: {result.stderr.decode('utf-8', 'replace').strip()}")
    if failures:
        return text_response(f"Failed to change wallpaper. Error: {'; '.join(failures)}", 500)
    return text_response("Failed to change wallpaper. Error: this desktop has no program for it", 501)


def start_recording(guest: Guest, _request: Request) -> Response:
    """Record the screen with ffmpeg; 501 without it."""
    if not shutil.which("ffmpeg"):
        raise HttpError(501, "ffmpeg is not installed in this guest")
    with guest.x11() as x:
        width, height = x.screen_size
    with guest.recording_lock():
        if guest.recording and guest.recording[0].returncode is None:
            raise HttpError(400, "Recording is already in progress.")
        path = Path(tempfile.mkdtemp(prefix="guestd-recording-")) / "recording.mp4"
        command = ["ffmpeg", "-y", "-f", "x11grab", "-draw_mouse", "1", "-video_size", f"{width}x{height}"]
        command += ["-i", os.environ["DISPLAY"], "-r", "30", str(path)]
        guest.recording = (launch(command), path)
    return json_response({"status": "success", "message": "Started recording."})


def end_recording(guest: Guest, _request: Request) -> Response:
    """Stop recording and return the video."""
    with guest.recording_lock():
        if guest.recording is None:
            raise HttpError(400, "No recording in progress to stop.")
        (process, path), guest.recording = guest.recording, None
        # The thread that reaps the process sets the return code.
        process.send_signal(signal.SIGINT)
        deadline_s = time.monotonic() + 15.0
        while process.returncode is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if process.returncode is None:
            kill_group(process)
    try:
        if not path.is_file():
            raise HttpError(500, f"ffmpeg left no recording (exit status {process.returncode})")
        return Response(200, content_type="video/mp4", file=path.open("rb"), file_name=path.name)
    finally:
        # The open file stays readable until it is sent.
        shutil.rmtree(path.parent, ignore_errors=True)
