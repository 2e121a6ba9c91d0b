"""One episode of each compatibility protocol on a real Debian guest, by a small client that speaks the protocol."""

import base64
import io
import json
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from PIL import Image as Picture

from envd.integrations.compat.server import PROTOCOLS
from tests.support.leftovers import machine_leftovers
from tests.support.real_desktops import Backend
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# `areal-sandbox` and OSWorld's clients expect the guest to run between their calls.
CONFIG = """\
compat = {compat}

[pools.desktop]
image = "desktop"
size = 1
capacity = 1
allow_guest_access = true
always_running = true
{hypervisor}"""
CALCULATOR = {"id": "desktop/open-calculator"}
OPEN_CALCULATOR = "pyautogui.click(156, 780)"
DOCUMENT = "/home/user/Documents/greeting.txt"
TYPE_GREETING = "desktop/type-greeting"


class Client:
    """Requests to one server. Any status other than 200 raises HTTPError."""

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        self._address = address
        self._headers = dict(headers or {})
        # No proxy of the environment: the server is on loopback.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def data(self, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
        """Send a GET, or a POST with a body; return the response's body."""
        headers = self._headers | ({} if body is None else {"Content-Type": kind})
        request = urllib.request.Request(f"{self._address}{path}", data=body, headers=headers)  # noqa: S310 - our own
        with self._opener.open(request) as response:
            content: bytes = response.read()
        return content

    def json(self, path: str, body: object | None = None) -> Any:
        """The same with JSON."""
        return json.loads(self.data(path, None if body is None else json.dumps(body).encode()))


@pytest.fixture(scope="module")
def daemon(module_dir: Path, real_backend: Backend) -> Iterator[ServedDaemon]:
    endpoints = json.dumps([f"{name}=127.0.0.1:0" for name in PROTOCOLS])
    with ServedDaemon(module_dir / "s", CONFIG.format(compat=endpoints, hypervisor=real_backend.toml)) as served:
        served.wait_for(r"(listening on \S+)")
        yield served
        assert served.end() == 0
        assert machine_leftovers(module_dir / "s") == []


def address(daemon: ServedDaemon, protocol: str) -> str:
    return daemon.wait_for(rf"protocol {protocol} on (\S+)")


def size_of(picture: bytes) -> tuple[int, int]:
    with Picture.open(io.BytesIO(picture)) as image:
        image.load()
        return image.size


def test_an_episode_of_slime_osworld(daemon: ServedDaemon) -> None:
    client = Client(address(daemon, "slime-osworld"))
    settings = {"screen_size": [1280, 800], "require_a11y_tree": True, "action_space": "pyautogui"}
    opened = client.json("/reset", {"task_config": CALCULATOR, "env_config": settings})
    assert size_of(base64.b64decode(opened["screenshot_base64"])) == (1280, 800)
    assert "calculator" in opened["instruction"]
    episode = {"episode_id": opened["episode_id"]}
    seen = client.json("/step", {**episode, "action": OPEN_CALCULATOR, "pause": 2})
    assert (seen["step"], seen["done"], seen["reward"]) == (1, False, 0.0)
    # Under emulation a program takes seconds to start.
    while "galculator" not in seen["accessibility_tree"]:
        seen = client.json("/step", {**episode, "action": "WAIT", "pause": 2})
    rendered = client.json("/render", episode)
    assert size_of(base64.b64decode(rendered["screenshot_base64"])) == (1280, 800)
    assert client.json("/step", {**episode, "action": "DONE"})["done"] is True
    assert client.json("/evaluate", episode) == {"reward": 1.0}
    assert client.json("/close", episode)["status"] == "closed"
    assert client.json("/health") == {"status": "ok", "episodes": 0}


def test_an_episode_of_areal_and_another_after_a_reset(daemon: ServedDaemon) -> None:
    client = Client(address(daemon, "areal"))
    settings = {"provider_name": "docker", "screen_size": [1280, 800], "require_a11y_tree": True}
    session = f"/envs/{client.json('/envs', settings)['session_id']}"
    seen = client.json(f"{session}/reset", {"task_config": CALCULATOR})["obs"]
    assert size_of(base64.b64decode(seen["screenshot_b64"])) == (1280, 800)
    assert client.json(f"{session}/step", {"action": "DONE", "pause": 0})["done"] is True
    assert client.json(f"{session}/evaluate", {}) == {"reward": 0.0}
    seen = client.json(f"{session}/reset", {"task_config": CALCULATOR})["obs"]
    assert "galculator" not in seen["accessibility_tree"]
    stepped = client.json(f"{session}/step", {"action": OPEN_CALCULATOR, "pause": 2})
    assert (stepped["reward"], stepped["done"], stepped["info"]) == (0.0, False, {})
    while "galculator" not in client.json(f"{session}/obs")["obs"]["accessibility_tree"]:
        client.json(f"{session}/step", {"action": "WAIT", "pause": 2})
    assert client.json(f"{session}/evaluate", {}) == {"reward": 1.0}
    assert client.json(f"{session}/close", {}) == {"ok": True}
    assert client.json("/health")["active_sessions"] == 0


def test_an_episode_of_areal_sandbox(daemon: ServedDaemon) -> None:
    client = Client(address(daemon, "areal-sandbox"), {"x-paas-session-id": "one"})
    assert client.json("/sandbox/start", {"task_id": TYPE_GREETING})["sessionId"] == "one"
    assert size_of(client.data("/screenshot")) == (1280, 800)
    assert "<desktop-frame" in client.json("/accessibility")["AT"]
    assert client.data("/platform").decode().strip() == "Linux"
    written = client.json("/execute", {"command": f"printf done > {DOCUMENT} && id -un", "shell": True})
    assert (written["status"], written["output"]) == ("success", "user\n")
    # The score is the client's own, from the guest's files.
    form = urlencode({"file_path": DOCUMENT}).encode()
    assert client.data("/file", form, "application/x-www-form-urlencoded") == b"done"
    assert client.json("/run_python", {"code": "print(6 * 7)"})["output"] == "42\n"
    assert client.json("/setup/execute", {"command": ["true"], "shell": False})["status"] == "success"
    assert client.json("/sandbox/stop", {}) == {"status": "stopped"}


def test_an_episode_of_windows_vm(daemon: ServedDaemon) -> None:
    server = address(daemon, "windows-vm")
    opened = Client(server).json("/vm", {"task_id": TYPE_GREETING})
    client = Client(server + opened["path"])
    text = opened["instruction"].rpartition("save the document: ")[2]
    assert client.json("/status")["qemu_running"] is True
    assert client.json("/type", {"text": text, "enter": False}) == {
        "typed": len(text),
        "skipped": [],
        "total": len(text),
    }
    # The editor reads the keys in order, and writes the file when it has read the last one.
    assert client.json("/sendkey", {"key": "ctrl-s"}) == {"result": "", "key": "ctrl-s"}
    while client.json("/guest-file", {"path": DOCUMENT})["content"].strip() != text:
        pass
    picture = client.data("/screenshot")
    assert size_of(picture) == (1280, 800)
    assert client.json("/screenshot/size") == {"size": len(picture)}
    assert client.json("/evaluate", {}) == {"reward": 1.0}
    assert client.json("/shutdown", {}) == {"result": "shutdown sent"}
