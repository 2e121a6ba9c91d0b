"""OSWorld's own Chrome setup and evaluator, unmodified, on a real Chromium in a real guest, over its DevTools port."""

import json
import os
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import envd
from envd.integrations.osworld.environment import Environment
from tests.support.program import run_program
from tests.support.real_desktops import Backend

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(1200)]

SITE = "http://127.0.0.1:8765"
PAGES = [f"{SITE}/xkb/", f"{SITE}/locale/"]
#: As OSWorld's tasks, with pages that need no network. The default new tab takes an emulated guest a minute.
TASK = {
    "id": "pages",
    "snapshot": "chrome",
    "instruction": "Open both pages.",
    "config": [
        {
            "type": "launch",
            "parameters": {"command": ["python3", "-m", "http.server", "8765", "--directory", "/usr/share/X11"]},
        },
        {"type": "launch", "parameters": {"command": ["google-chrome", "--remote-debugging-port=1337", "about:blank"]}},
        {"type": "launch", "parameters": {"command": ["socat", "tcp-listen:9222,fork", "tcp:localhost:1337"]}},
        {"type": "chrome_open_tabs", "parameters": {"urls_to_open": PAGES}},
    ],
    "evaluator": {
        "func": "is_expected_tabs",
        "result": {"type": "open_tabs_info"},
        "expected": {"type": "rule", "rules": {"type": "url", "urls": PAGES}},
    },
}
#: Plays the task in OSWorld's environment, which lacks gRPC: ours comes last on the path.
PLAY = """
import json, sys
task, *paths = json.loads(sys.argv[1])
sys.path += paths
import envd.integrations.osworld.provider
from desktop_env.desktop_env import DesktopEnv

env = DesktopEnv(provider_name="docker", action_space="pyautogui", screen_size=(1280, 800), headless=True)
try:
    env.reset(task_config=task)
    scores = [env.evaluate()]
    first_page = task["config"][-1]["parameters"]["urls_to_open"][0]
    env.setup_controller.setup([{"type": "chrome_close_tabs", "parameters": {"urls_to_close": [first_page]}}])
    scores.append(env.evaluate())
finally:
    env.close()
print(json.dumps(scores))
"""


@pytest.fixture
async def address(qemu: Backend, vm_state_dir: Path) -> AsyncIterator[str]:
    async with qemu.osworld_machines(2, state_dir=vm_state_dir) as address:
        yield address


async def test_osworlds_chrome_setup_and_evaluator_use_the_forwarded_devtools(
    address: str, cache_dir: Path, tmp_path: Path
) -> None:
    environment = Environment(cache_dir)
    assert environment.is_installed, "run `envd osworld install`"
    # Its 5 GB with torch serve one task of OSWorld.
    (tmp_path / "easyocr.py").touch()
    root = Path(envd.__file__).parents[1]
    paths = [str(each) for each in (tmp_path, root, root / "proto", sysconfig.get_path("purelib"))]
    done = await run_program(
        environment.python,
        "-c",
        PLAY,
        json.dumps([TASK, *paths]),
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ENVD_ADDRESS": address, "NO_PROXY": "127.0.0.1"},
    )
    assert done.status == 0, done.err[-3000:]
    assert json.loads(done.out.splitlines()[-1]) == [1, 0], done.err[-3000:]
