"""Every setup verb and checker on a real guest."""

import base64
import functools
import http.server
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image as Picture

from tests.support.real_desktops import Backend

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

HOME = "/home/user"


def picture() -> str:
    file = io.BytesIO()
    Picture.new("RGB", (64, 48), (20, 120, 60)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def write(name: str, text: str) -> dict[str, object]:
    return {"kind": "write_file", "path": f"{HOME}/{name}", "text": text}


def check(kind: str, file: str = "", **fields: object) -> dict[str, object]:
    return {"kind": kind, **({"path": f"{HOME}/{file}"} if file else {}), **fields}


CALCULATOR = {"class": "galculator"}
SETUP: list[dict[str, object]] = [
    {"kind": "make_directory", "path": f"{HOME}/d/e"},
    {"kind": "remove", "path": f"{HOME}/d/e"},
    write("a.json", '{"zoom": [1, 1.5]}'),
    write("a.csv", "item,price\ntea,3.5\n"),
    write("a.ini", "[View]\nZoom=2\n"),
    write("a.xml", '<s><item value="7"/></s>'),
    {"kind": "write_file", "path": f"{HOME}/a.png", "base64": picture()},
    {"kind": "upload_file", "files": [{"local_path": "come-along.txt", "path": f"{HOME}/come-along.txt"}]},
    {"kind": "change_wallpaper", "path": f"{HOME}/a.png"},
    {"kind": "execute", "argv": ["sh", "-c", f"echo {{SCREEN_WIDTH}}x{{SCREEN_HEIGHT}} >> {HOME}/size.txt"]},
    {"kind": "execute", "argv": ["false"], "expect_exit_code": None},
    {"kind": "execute", "argv": ["false"], "unless": ["test", "-f", f"{HOME}/size.txt"]},
    {"kind": "execute", "argv": ["sh", "-c", f"(sleep 1; touch {HOME}/later.txt) >/dev/null 2>&1 &"]},
    {"kind": "wait_command", "argv": ["test", "-f", f"{HOME}/later.txt"], "exit_code": 0},
    {"kind": "sleep", "duration_s": 0.1},
    {"kind": "launch", "argv": ["galculator"], "window": CALCULATOR},
    {"kind": "close_window", "window": CALCULATOR},
    {"kind": "close_window", "window": CALCULATOR},
    {"kind": "set_clipboard", "text": "copied: 漢字"},
    write("note.txt", ""),
    {"kind": "open", "path": f"{HOME}/note.txt"},
    {"kind": "wait_window", "window": {"title": r"note\.txt"}},
    {"kind": "activate_window", "window": {"title": r"note\.txt"}},
]
CHECKS = [
    check("file_text", "note.txt", equals="done"),
    check("answer", equals="written"),
    check("file_bytes", "note.txt", base64=base64.b64encode(b"done").decode()),
    {"kind": "any", "checks": [check("file_absent", "note.txt"), check("process", program="mousepad")]},
    {
        "kind": "weighted",
        "checks": [
            {"weight": 2, "check": check("file_text", "fetched.txt", equals="fetched")},
            {"weight": 1, "check": check("process", program="galculator", running=False)},
        ],
    },
    check("directory", "d", entries=[], mode="exactly"),
    check("json_value", "a.json", at=["zoom", 1], equals=1.5),
    check("csv_value", "a.csv", where={"item": "tea"}, column="price", at_least=3),
    check("ini_value", "a.ini", section="View", key="Zoom", equals=2),
    check("xml_value", "a.xml", at="/s/item/@value", equals=7),
    check("image_like", "a.png", base64=picture()),
    check("file_text", "come-along.txt", equals="came along"),
    check("file_text", "size.txt", equals="1280x800"),
    check("file_absent", "never.txt"),
    {
        "kind": "unchanged",
        "paths": [HOME],
        "except": [f"{HOME}/note.txt", f"{HOME}/.*"],
        "outputs": [["cat", f"{HOME}/size.txt"]],
    },
    check("window", window=CALCULATOR, present=False),
    check("window", window={"title": r"note\.txt"}),
    check("on_screen", role="frame", named=r"note\.txt"),
    check("on_screen", named="galculator", present=False),
    check("clipboard", equals="copied: 漢字"),
    check("command", argv=["cat", f"{HOME}/size.txt"], stdout={"equals": "1280x800"}),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves a directory and logs nothing."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A web server for the host's downloads."""
    directory = tmp_path / "site"
    directory.mkdir()
    (directory / "fetched.txt").write_text("fetched\n")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=directory)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def envd(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "envd", *args], capture_output=True, text=True, check=False)


def test_every_verb_and_checker_of_a_linux_desktop_works_on_a_real_one(
    real_backend: Backend, vm_state_dir: Path, tmp_path: Path, site: str
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "images").symlink_to(real_backend.cache_dir / "images")
    (tmp_path / "come-along.txt").write_text("came along\n")
    download = {"kind": "download", "files": [{"url": f"{site}/fetched.txt", "path": f"{HOME}/fetched.txt"}]}
    task = {
        "name": "everything",
        "level": 3,
        "instruction": "Write the word done into the note, save it, and say written.",
        "setup": [download, *SETUP],
        "checker": {"kind": "all", "checks": CHECKS},
        "oracle": [[{"type": "done"}], [{"press": ["ctrl", "s"]}, {"wait": 1}], [{"done": "written"}]],
    }
    file = tmp_path / "verbs.json"
    file.write_text(json.dumps({"suite": "verbs", "tasks": [task]}), encoding="utf-8")
    places = ["--tasks", str(file), "--cache-dir", str(cache)]
    fetched = envd("tasks", "fetch", *places)
    assert fetched.returncode == 0, fetched.stderr
    state = str(vm_state_dir / "verbs")
    places += ["--state-dir", state, "--hypervisor", real_backend.uri]
    done = envd("tasks", "verify", "verbs/", *places, "--parallel", "1", "--json")
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert [each["detail"] for each in report["failures"]] == []
    assert (report["tasks"], report["oracle_ok"], report["null_ok"]) == (1, 1, 1)
    assert done.returncode == 0
