"""OSWorld's own runners and its `PromptAgent`, unmodified, on a real guest; a script plays the model.

A runner is a process in an environment of its own, and reaches the model at an address as that of OpenAI.
"""

import http.server
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.program import run_program
from tests.support.real_desktops import Backend

pytestmark = [pytest.mark.osworld_agents, pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(1200)]

CHECKOUT = Path(os.environ.get("OSWORLD", ""))
#: Renames a directory, which the task's setup makes. Needs nothing that the image lacks.
TASK_ID = "e0df059f-28a6-4169-924f-b9623e7184cc"
RENAME = "mv ~/Desktop/todo_list_Jan_1 ~/Desktop/todo_list_Jan_2"
MAX_STEPS = 60


class Model:
    """A model of OpenAI's chat protocol that opens a terminal, waits until it is shown, and types a line."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self._rest = [f"pyautogui.typewrite('{RENAME}', interval=0.02)", "pyautogui.press('enter')", "WAIT", "DONE"]
        self._empty = ""

    def reply(self, request: dict[str, Any]) -> str:
        """Return the text of the next response."""
        self.requests.append(request)
        picture = request["messages"][-1]["content"][-1]["image_url"]["url"]
        if not self._empty:
            self._empty = picture
            return "I open a terminal.\n```python\npyautogui.hotkey('win', 't')\n```"
        if picture == self._empty:
            return "```\nWAIT\n```"
        return f"```python\n{self._rest.pop(0)}\n```"


@pytest.fixture
def model() -> Iterator[tuple[Model, str]]:
    model = Model()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps({"choices": [{"message": {"content": model.reply(request)}}]}).encode()
            self.send_response(200 if self.path == "/v1/chat/completions" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield model, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
async def address(qemu: Backend, vm_state_dir: Path) -> AsyncIterator[str]:
    async with qemu.osworld_machines(1, state_dir=vm_state_dir) as address:
        yield address


@pytest.mark.parametrize("runner", ["run.py", "scripts/python/run_multienv.py"])
async def test_the_unmodified_runner_and_agent_solve_a_task(
    address: str, model: tuple[Model, str], tmp_path: Path, runner: str
) -> None:
    played, url = model
    selection = tmp_path / "selection.json"
    selection.write_text(json.dumps({"os": [TASK_ID]}))
    (tmp_path / "logs").mkdir()  # the runner expects it
    # Its 5 GB with torch serve one task of OSWorld.
    (tmp_path / "easyocr.py").touch()
    options = {
        "provider_name": "docker",
        "observation_type": "screenshot",
        "screen_width": 1280,
        "screen_height": 800,
        "max_steps": MAX_STEPS,
        "model": "gpt-4o",
        "test_config_base_dir": CHECKOUT / "evaluation_examples",
        "test_all_meta_path": selection,
        "result_dir": tmp_path / "results",
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = await run_program(
        os.environ["OSWORLD_AGENTS_PYTHON"],
        "-m",
        "envd.integrations.osworld.run",
        CHECKOUT / runner,
        "--headless",
        *arguments,
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "ENVD_ADDRESS": address,
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": "unused",
            "NO_PROXY": "127.0.0.1",
        },
    )
    output = (done.out + done.err)[-3000:]
    assert done.status == 0, output
    results = tmp_path / "results" / "pyautogui" / "screenshot" / "gpt-4o" / "os" / TASK_ID
    assert (results / "result.txt").is_file(), output
    assert float((results / "result.txt").read_text()) == 1.0
    steps = [json.loads(line) for line in (results / "traj.jsonl").read_text().splitlines()]
    assert [step["action"] for step in steps if step["action"] != "WAIT"] == [
        "pyautogui.hotkey('win', 't')",
        f"pyautogui.typewrite('{RENAME}', interval=0.02)",
        "pyautogui.press('enter')",
        "DONE",
    ]
    assert all((results / step["screenshot_file"]).read_bytes().startswith(b"\x89PNG") for step in steps)
    assert len(played.requests) == len(steps)
