"""A score is what the agent left behind: while files and commands are checked, nothing of the agent runs."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import TypeAdapter

from cuaenv.client import AsyncEnvClient, AsyncEpisode, View
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Task
from tests.support.real_desktops import Backend

pytestmark = [pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

REPLY = "/home/user/reply.txt"
RIGHT = {"equals": "42"}
#: Whether the file stays the same for a second.
STABLE = f'a=$(cat {REPLY}); sleep 1; [ -n "$a" ] && [ "$a" = "$(cat {REPLY})" ]'
CHECKERS: dict[str, dict[str, Any]] = {
    "file": {"kind": "file_text", "path": REPLY, **RIGHT},
    "command": {"kind": "command", "argv": ["cat", REPLY], "stdout": RIGHT},
    "stable": {"kind": "command", "argv": ["sh", "-c", STABLE]},
    "user": {
        "kind": "command",
        "argv": ["sh", "-c", "id -un; pwd; env | sort"],
        "stdout": {"matches": r"user\n/home/user\n.*"},
    },
}

#: Ends guestd if it can, and takes its place: everything that it is asked has the answer 42.
FORGED_GUESTD = """
import base64, http.server, json, os, signal, sys
def attempt(act):
    try:
        act()
    except OSError as error:
        print(type(error).__name__, error.errno)
for process in filter(str.isdigit, os.listdir("/proc")):
    with open(f"/proc/{process}/cmdline", "rb") as file:
        if b"guestd\\0--user" in file.read():
            attempt(lambda: os.kill(int(process), signal.SIGKILL))
            attempt(lambda: os.kill(int(process), signal.SIGSTOP))
class Forged(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.dumps({"output": "42", "error": "", "returncode": 0}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
for address in ("0.0.0.0", "10.0.2.15", "127.0.0.1"):
    attempt(lambda: http.server.HTTPServer((address, 5000), Forged))
"""

#: Rewrites the file without end. A timer sends it SIGCONT, which would wake it from SIGSTOP.
WRITER = f"""
import ctypes, itertools, os, struct
libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
event = struct.pack("=Qii48x", 0, 18, 0)
assert libc.timer_create(1, event, ctypes.byref(timer)) == 0
assert libc.timer_settime(timer, 0, struct.pack("=4q", 0, 10_000_000, 0, 10_000_000), None) == 0
for count in itertools.count():
    with open("{REPLY}." + str(os.getpid()), "w") as file:
        file.write(str(count))
    os.replace(file.name, "{REPLY}")
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(real_backend: Backend, vm_state_dir: Path) -> AsyncIterator[AsyncEnvClient]:
    tasks = TypeAdapter(list[Task]).validate_python(
        [
            {"task_id": f"test/{name}", "instruction": "Write 42.", "level": 1, "checker": checker}
            for name, checker in CHECKERS.items()
        ]
    )
    async with real_backend.desktops(TaskCatalogue(tasks), state_dir=vm_state_dir) as client:
        yield client


async def run(episode: AsyncEpisode, *argv: str) -> str:
    result = await episode.run_command(argv)
    assert result.exit_code == 0, result
    return result.stdout.decode()


async def test_a_forged_guestd_takes_no_place_and_no_score(client: AsyncEnvClient, real_backend: Backend) -> None:
    async with client.reset("test/command", view=View(encoding="none")) as episode:
        refused = await run(episode, "python3", "-c", FORGED_GUESTD)
        signals, ports = refused.splitlines()[:2], refused.splitlines()[2:]
        assert signals == ["PermissionError 1"] * 2
        # In a container it listens on no port, which the host would not use either.
        assert ports == ["OSError 98"] * 3 or not real_backend.is_qemu
        assert (await episode.evaluate()).score == 0


async def test_nothing_of_the_agent_runs_while_it_is_scored(client: AsyncEnvClient) -> None:
    async with client.reset("test/stable", view=View(encoding="none")) as episode:
        # One among the programs that the host has started, one among those of the session.
        for start in ("exec", "systemd-run --user --quiet"):
            await run(episode, "sh", "-c", f"{start} python3 -c '{WRITER}' </dev/null >/dev/null 2>&1 &")
        await run(episode, "sh", "-c", f"until [ -s {REPLY} ]; do sleep 0.1; done")
        assert (await episode.run_command(["sh", "-c", STABLE])).exit_code == 1
        evaluation = await episode.evaluate()
        assert evaluation.score == 1, evaluation
        # Afterwards the guest continues.
        assert (await episode.run_command(["sh", "-c", STABLE])).exit_code == 1


async def test_a_command_runs_as_the_user_with_an_environment_of_its_own(client: AsyncEnvClient) -> None:
    async with client.reset("test/user", view=View(encoding="none")) as episode:
        evaluation = await episode.evaluate()
        assert evaluation.score == 1, evaluation
        assert "DISPLAY" not in evaluation.checks[0].evidence


@pytest.mark.parametrize("target", ["/proc/kmsg", "/proc/1/pagemap", "/dev/zero"])
async def test_a_link_to_the_kernels_files_is_not_a_file(client: AsyncEnvClient, target: str) -> None:
    async with client.reset("test/file", view=View(encoding="none")) as episode:
        await run(episode, "ln", "-s", target, REPLY)
        evaluation = await episode.evaluate()
        assert (evaluation.score, evaluation.checks[0].evidence) == (0, f"{REPLY}: not a file")
