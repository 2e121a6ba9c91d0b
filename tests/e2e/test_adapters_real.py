"""Adapters on a real guest: a task is solved, and a killed machine gives no score, which is never a zero."""

import math
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from tests.support.leftovers import machine_leftovers
from tests.support.mcp_client import client_of
from tests.support.real_desktops import Backend
from tests.support.served import ServedDaemon
from trainer.adapters.session import SessionSettings

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CONFIG = """\
[pools.desktop]
image = "desktop"
size = 1
capacity = 1
{hypervisor}"""
TASK = "desktop/type-greeting"
TYPE = {"action": "type", "text": "Hello, desktop!"}
SAVE = {"action": "press", "keys": ["ctrl", "s"]}
DONE = {"action": "done"}


class _Served(ServedDaemon):
    """A daemon with one machine at a time."""

    def __init__(self, state_dir: Path, backend: Backend) -> None:
        super().__init__(state_dir, CONFIG.format(hypervisor=backend.toml))
        self._backend, self._state_dir = backend, state_dir
        self.address = self.wait_for(r"listening on (\S+)")

    def kill_machine(self) -> None:
        """Kill the only machine."""
        (pid,) = self._backend.machine_pids(self._state_dir).values()
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def served(module_dir: Path, real_backend: Backend) -> Iterator[_Served]:
    with _Served(module_dir / "s", real_backend) as served:
        yield served
        assert served.end() == 0
    assert machine_leftovers(module_dir / "s") == []


def test_gymnasium_truncates_an_episode_whose_machine_was_killed(served: _Served) -> None:
    env: Any = gymnasium.make("trainer.adapters.gymnasium:envd/Desktop-v0", task=TASK, envd=served.address)
    env.reset()
    assert env.step(TYPE)[1:4] == (0.0, False, False)
    served.kill_machine()
    _, reward, terminated, truncated, info = env.step(SAVE)
    assert math.isnan(reward)
    assert (terminated, truncated) == (False, True)
    assert "MACHINE_LOST" in info["void"]
    env.reset()
    env.step(TYPE)
    env.step(SAVE)
    assert env.step(DONE)[1:4] == (1.0, True, False)
    env.close()


async def test_mcp_gives_no_score_for_a_session_whose_machine_was_killed(served: _Served) -> None:
    async with client_of(SessionSettings.connect(served.address), task=TASK) as client:

        async def open_session() -> str:
            result: Any = await client.call_tool("reset", {"task": TASK})
            (session,) = re.findall(r"^session: (\S+)$", result.content[0].text, re.MULTILINE)
            return str(session)

        async def play(session: str, *actions: dict[str, Any]) -> dict[str, Any]:
            await client.call_tool("step", {"session": session, "actions": list(actions)})
            result: Any = await client.call_tool("evaluate", {"session": session})
            await client.call_tool("close", {"session": session})
            return dict(result.structured_content)

        lost = await open_session()
        served.kill_machine()
        evaluation = await play(lost, TYPE, SAVE)
        assert evaluation["score"] is None
        assert "MACHINE_LOST" in evaluation["void"]
        assert (await play(await open_session(), TYPE, SAVE))["score"] == 1.0
