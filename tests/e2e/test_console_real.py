"""A person takes control of a real desktop in the console, and both parts of the episode are recorded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cuaenv.client import AsyncEnvClient, Done, HumanInControl, PressKeys
from envd.episodes.recording.library import Library
from tests.support.real_desktops import Backend
from tests.support.served import ServedDaemon

pytestmark = pytest.mark.timeout(600)

CONFIG = """\
console_listen = "127.0.0.1:0"
[recording]
directory = "{recordings}"
[pools.desktop]
size = 1
capacity = 2
{hypervisor}"""


@pytest.fixture
def daemon(short_dir: Path, real_backend: Backend) -> Iterator[ServedDaemon]:
    text = CONFIG.format(recordings=short_dir / "r", hypervisor=real_backend.toml)
    with ServedDaemon(short_dir / "s", text) as served:
        yield served


async def test_a_person_types_and_the_agent_saves(daemon: ServedDaemon, short_dir: Path) -> None:
    console = daemon.wait_for(r"console on http://(\S+)/")
    typed = [{"action": "type", "text": "Hello, desktop!"}]

    async def post(path: str, **body: Any) -> Any:
        async with aiohttp.ClientSession() as http:
            url = f"http://{console}/api/episodes/{path}"
            async with http.post(url, json={"control": "page-1", **body}) as response:
                assert response.status == 200, await response.text()
                return await response.json(content_type=None)

    async with (
        AsyncEnvClient(daemon.wait_for(r"listening on (\S+)")) as client,
        client.reset("desktop/type-greeting") as episode,
    ):
        await post(f"{episode.episode_id}/control")
        assert await post(f"{episode.episode_id}/actions", actions=typed) == {"errors": [""]}
        with pytest.raises(HumanInControl):
            await episode.step(PressKeys(("ctrl", "s")))
        await post(f"{episode.episode_id}/release")
        assert [action.text for action in (await episode.handed_back()).actions] == ["Hello, desktop!"]  # type: ignore[union-attr]
        await episode.step(PressKeys(("ctrl", "s")))
        assert (await episode.step(Done())).done
        assert (await episode.evaluate()).score == 1.0
        episode_id = episode.episode_id
    assert daemon.end() == 0
    recording = Library(short_dir / "r").read(episode_id)
    assert [(step["source"], step["performed"]) for step in recording.steps[:2]] == [
        ("human", typed),
        ("agent", [{"action": "press", "keys": ["ctrl", "s"]}]),
    ]
