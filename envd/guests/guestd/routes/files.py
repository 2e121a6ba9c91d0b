"""Routes that read, write, list, download and open files."""

import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ..guest import Guest
from ..messages import HttpError, Request, Response, expand_path, json_response, read_seconds, text_response
from ..processes import launch, run_command
from ..x11 import Window

MAX_DOWNLOAD_BYTES = 4 << 30
MAX_DIRECTORY_ENTRIES = 100_000
# OSWorld's own service waits as long for the window of an opened file; the caller has the real deadline.
OPEN_TIMEOUT_S = 1800.0

_KERNEL = ("/proc/", "/sys/", "/dev/")
_EDITORS = ("mousepad", "gedit", "gnome-text-editor", "featherpad", "l3afpad", "leafpad", "pluma", "kate")


def desktop_path(_guest: Guest, _request: Request) -> Response:
    """Return the user's desktop folder."""
    configured = ""
    if shutil.which("xdg-user-dir"):
        configured = run_command(["xdg-user-dir", "DESKTOP"], timeout_s=10.0).stdout.decode().strip()
    for path in (Path(configured) if configured else None, Path.home() / "Desktop"):
        if path and path.is_dir() and path != Path.home():
            return json_response({"desktop_path": str(path)})
    raise HttpError(404, "Desktop path not found")


def list_directory(_guest: Guest, request: Request) -> Response:
    """Return a directory's tree. Links to directories are listed, not followed."""
    data = request.json()
    if "path" not in data:
        return json_response({"error": "Missing 'path' parameter"}, 400)
    path = expand_path(data["path"])
    if not path.is_dir():
        return json_response({"error": "The provided path is not a directory"}, 400)
    return json_response({"directory_tree": list_tree(path)})


def read_file(_guest: Guest, request: Request) -> Response:
    """Return a file's bytes."""
    name = request.form().get("file_path")
    if not name:
        return json_response({"error": "file_path is required"}, 400)
    path = expand_path(name)
    # A link into the kernel's file systems is not a file of the user's: some have no end.
    leads_out = os.path.realpath(path).startswith(_KERNEL) and not str(path).startswith(_KERNEL)
    if path.exists() and (leads_out or not path.is_file()):
        return json_response({"error": f"{path} is not a regular file"}, 400)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return json_response({"error": "File not found"}, 404)
    except OSError as error:
        raise HttpError(500, f"{path} cannot be read: {error}") from error
    return Response(200, content_type="application/octet-stream", file=file, file_name=path.name)


def upload(_guest: Guest, request: Request) -> Response:
    """Write a file atomically; creates parent directories."""
    parts = request.parts()
    if "file_path" not in parts or "file_data" not in parts:
        return json_response({"error": "file_path and file_data are required"}, 400)
    name, data = parts["file_path"], parts["file_data"]
    path = expand_path(request.body[name.start : name.end].decode("utf-8", "surrogateescape"))
    with replacing(path) as file:
        for start in range(data.start, data.end, 1 << 20):
            file.write(request.body[start : min(start + (1 << 20), data.end)])
    return text_response("File Uploaded")


def download_file(_guest: Guest, request: Request) -> Response:
    """Fetch a URL into a file, in at most three attempts."""
    data = request.json()
    url = data.get("url")
    if not url or not data.get("path"):
        return text_response("Path or URL not supplied!", 400)
    if not str(url).startswith(("http://", "https://")):
        raise HttpError(400, f"url: http or https is required, not {url!r}")
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


def open_file(guest: Guest, request: Request) -> Response:
    """Open a file in its program and wait up to `timeout` seconds (default 1,800) for a window that names it."""
    data = request.json()
    if not data.get("path"):
        return text_response("Path not supplied!", 400)
    path = expand_path(data["path"])
    timeout_s = read_seconds(data, "timeout", OPEN_TIMEOUT_S)
    if not path.exists():
        return text_response(f"File not found: {path}", 404)
    with guest.x11() as x:
        before = {(window.id, window.title) for window in x.windows()}
    openers = [name for name in ("xdg-open", *_EDITORS) if shutil.which(name)]
    if not openers:
        return text_response(f"Failed to open {path}. Error: this guest has no xdg-open and no editor", 501)

    def names_file(window: Window) -> bool:
        is_new = (window.id, window.title) not in before
        return path.name in window.title or (is_new and path.stem in window.title)

    deadline_s = time.monotonic() + timeout_s
    for opener in openers:
        process = launch([opener, str(path)])

        def opened_or_failed(now: list[Window], process: subprocess.Popen[bytes] = process) -> bool:
            return process.returncode not in {None, 0} or any(map(names_file, now))

        left_s = max(0.0, deadline_s - time.monotonic())
        if not guest.wait_for_windows(opened_or_failed, left_s):
            break
        if process.returncode in {None, 0}:
            return text_response("File opened successfully")
    titles = [window.title for window in guest.windows_or_none() or ()]
    problem = f"no window names it after {timeout_s:g} s; open windows: {titles}"
    return text_response(f"Failed to open {path}. Error: {problem}", 500)


def list_tree(path: Path) -> dict[str, object]:
    """Return OSWorld's tree of a directory, with at most `MAX_DIRECTORY_ENTRIES` entries."""
    left = MAX_DIRECTORY_ENTRIES

    def subtree(directory: str, name: str, depth: int) -> dict[str, object]:
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
                        children.append(subtree(entry.path, entry.name, depth + 1))
        except OSError as error:
            return {"error": str(error)}
        return tree

    return subtree(str(path), path.name, 0)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a temporary file and rename it to `path`; on failure `path` is unchanged. Raises: HttpError."""
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
        raise HttpError(500, f"{path} cannot be written: {error}") from error
    finally:
        if temporary:
            with suppress(FileNotFoundError):
                os.unlink(temporary)


def download(url: str, path: Path) -> None:
    """Fetch a URL into a file. Raises: OSError, ValueError, HttpError."""
    with urllib.request.urlopen(url, timeout=60.0) as source, replacing(path) as file:  # noqa: S310 - http(s) only
        size = 0
        while chunk := source.read(1 << 20):
            size += len(chunk)
            if size > MAX_DOWNLOAD_BYTES:
                raise ValueError(f"larger than {MAX_DOWNLOAD_BYTES} bytes")
            file.write(chunk)
