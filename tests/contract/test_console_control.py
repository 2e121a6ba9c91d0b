"""People in the console: they take control of drawn desktops, act, hand back, and play tasks."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cuaenv.client import AsyncEnvClient, Click, HumanInControl, TypeText
from envd.api.security.tokens import new_token
from envd.base.config import load
from envd.daemon.composition import Daemon, open_daemon
from envd.episodes import controlling
from envd.episodes.recording.library import Library

CLICK = {"action": "click", "x": 379, "y": 311}


class Page:
    """An HTTP client of the console's routes that act."""

    def __init__(self, daemon: Daemon, session: aiohttp.ClientSession, control: str = "page-1") -> None:
        self._session = session
        self._url = f"http://{daemon.console_address}/api/"
        self.control = control

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Return the status, and the answer's JSON or the text of an error."""
        async with self._session.post(self._url + path, json={"control": self.control, **body}) as response:
            return response.status, await (response.json() if response.status == 200 else response.text())

    async def post_text(self, path: str, text: str, content_type: str) -> int:
        headers = {"Content-Type": content_type}
        async with self._session.post(self._url + path, data=text, headers=headers) as response:
            return response.status


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    flags = {
        "listen": "127.0.0.1:0",
        "metrics_listen": "127.0.0.1:0",
        "console_listen": "127.0.0.1:0",
        "state_dir": tmp_path / "state",
        "cache_dir": tmp_path / "cache",
        "hypervisor.uri": "fake",
        "recording.directory": tmp_path / "recordings",
        "pools": {"desktop": {"size": 2, "capacity": 4}},
    }
    async with open_daemon(load(flags=flags)) as daemon:
        yield daemon


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_a_person_acts_while_the_agent_is_refused_and_hands_back(
    daemon: Daemon, session: aiohttp.ClientSession
) -> None:
    page, other = Page(daemon, session), Page(daemon, session, "page-2")
    async with AsyncEnvClient(daemon.address) as client, client.reset("fake/save-note") as episode:
        path = f"episodes/{episode.episode_id}"
        assert (await page.post(f"{path}/actions", actions=[CLICK]))[0] == 409
        assert (await page.post(f"{path}/control"))[0] == 200
        assert (await page.post(f"{path}/control"))[0] == 200  # renewed
        status, text = await other.post(f"{path}/control")
        assert (status, "controls it" in text) == (409, True)
        assert (await other.post(f"{path}/release"))[0] == 200  # without effect
        typed = [{"action": "type", "text": letter} for letter in "Hello, fake desktop!"]
        assert await page.post(f"{path}/actions", actions=[CLICK, *typed]) == (200, {"errors": [""] * 21})
        with pytest.raises(HumanInControl):
            await episode.step(Click(82, 86))
        with pytest.raises(HumanInControl):
            await episode.evaluate()
        waiting = asyncio.create_task(episode.handed_back())
        await page.post(f"{path}/release")
        handover = await waiting
        assert handover.actions == (Click(379, 311), *(TypeText(letter) for letter in "Hello, fake desktop!"))
        assert (await episode.step(Click(82, 86))).step_count == 1
        assert (await episode.evaluate()).score == 1.0
        episode_id = episode.episode_id
    recording = await recorded(daemon, episode_id)
    assert [(step["source"], step["index"], step["performed"]) for step in recording.steps] == [
        ("human", 0, [CLICK, {"action": "type", "text": "Hello, fake desktop!"}]),
        ("agent", 0, [{"action": "click", "x": 82, "y": 86}]),
    ]


async def recorded(daemon: Daemon, episode_id: str) -> Any:
    directory = daemon.config.recording.directory
    assert directory is not None
    while not (recording := Library(directory).read(episode_id)).end:
        await asyncio.sleep(0.02)
    return recording


async def test_the_agent_must_observe_after_a_person_acted(daemon: Daemon, session: aiohttp.ClientSession) -> None:
    page = Page(daemon, session)
    async with AsyncEnvClient(daemon.address) as client, client.reset("fake/save-note") as episode:
        path = f"episodes/{episode.episode_id}"
        await page.post(f"{path}/control")
        await page.post(f"{path}/actions", actions=[CLICK])
        await page.post(f"{path}/release")
        with pytest.raises(HumanInControl, match="has acted since"):
            await episode.step(Click(1, 1))
        await episode.observe()
        assert (await episode.step(Click(1, 1))).step_count == 1


async def test_a_page_that_is_gone_loses_control(
    daemon: Daemon, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controlling, "CONTROL_TTL_S", 0.2)
    monkeypatch.setattr(controlling, "_PAUSE_S", 0.05)
    page, other = Page(daemon, session), Page(daemon, session, "page-2")
    async with AsyncEnvClient(daemon.address) as client, client.reset("fake/save-note") as episode:
        path = f"episodes/{episode.episode_id}"
        await page.post(f"{path}/control")
        while (await other.post(f"{path}/control"))[0] == 409:
            await asyncio.sleep(0.02)
        assert (await page.post(f"{path}/actions", actions=[CLICK]))[0] == 409


async def test_a_person_plays_a_task_to_its_score(daemon: Daemon, session: aiohttp.ClientSession) -> None:
    page = Page(daemon, session)
    status, opened = await page.post("episodes", task="fake/save-note")
    assert status == 200
    path = f"episodes/{opened['id']}"
    await page.post(f"{path}/control")
    text = {"action": "type", "text": "Hello, fake desktop!"}
    await page.post(f"{path}/actions", actions=[CLICK, text, {"action": "click", "x": 82, "y": 86}])
    status, result = await page.post(f"{path}/evaluate")
    assert (status, result["score"]) == (200, 1.0)
    assert (await page.post(f"{path}/close"))[0] == 200
    assert daemon.service.find(opened["id"]) is None


async def test_only_episodes_of_the_console_are_scored_and_closed_there(
    daemon: Daemon, session: aiohttp.ClientSession
) -> None:
    page = Page(daemon, session)
    async with AsyncEnvClient(daemon.address) as client, client.reset("fake/save-note") as episode:
        for act in ("evaluate", "close"):
            assert (await page.post(f"episodes/{episode.episode_id}/{act}"))[0] == 422
        assert not (await episode.step(Click(1, 1))).done


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "actions"),
        ({"actions": []}, "actions"),
        ({"actions": [CLICK] * 101}, "actions"),
        ({"actions": [{"action": "done"}]}, "actions"),
        ({"actions": [{"action": "run_shell", "command": "id"}]}, "actions"),
        ({"actions": [{"action": "read_file", "path": "/etc/passwd"}]}, "actions"),
        ({"actions": [{"action": "clck"}]}, "unknown action"),
        ({"actions": [CLICK], "control": 7}, "control"),
        ({"actions": [CLICK], "control": "x" * 201}, "control"),
    ],
)
async def test_malformed_acts_are_refused_by_field(
    daemon: Daemon, session: aiohttp.ClientSession, body: dict[str, Any], field: str
) -> None:
    page = Page(daemon, session)
    async with AsyncEnvClient(daemon.address) as client, client.reset("fake/save-note") as episode:
        path = f"episodes/{episode.episode_id}"
        await page.post(f"{path}/control")
        status, text = await page.post(f"{path}/actions", **body)
        assert (status, field in text) == (422, True)


async def test_pages_of_other_origins_and_unknown_episodes_are_refused(
    daemon: Daemon, session: aiohttp.ClientSession
) -> None:
    page = Page(daemon, session)
    assert (await page.post("episodes/ep-0/control"))[0] == 404
    assert (await page.post("episodes", task="fake/none"))[0] == 422
    async with AsyncEnvClient(daemon.address) as client, client.reset("fake/save-note") as episode:
        path = f"episodes/{episode.episode_id}/control"
        # What a form of another page can send without asking first.
        assert await page.post_text(path, '{"control": "x"}', "text/plain") == 415
        assert await page.post_text(path, "[" * 60_000, "application/json") == 400


async def test_a_token_controls_its_own_episodes_only(tmp_path: Path) -> None:
    made = {name: new_token(name, scope) for name, scope in (("alice", "run"), ("bob", "run"), ("eve", "read"))}
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text("".join(f"{each.line}\n" for each in made.values()))
    flags = {
        "listen": "127.0.0.1:0",
        "metrics_listen": "127.0.0.1:0",
        "console_listen": "127.0.0.1:0",
        "state_dir": tmp_path / "state",
        "hypervisor.uri": "fake",
        "security.tokens_file": tokens,
        "pools": {"desktop": {"size": 1}},
    }
    statuses = {}
    async with (
        open_daemon(load(flags=flags)) as daemon,
        AsyncEnvClient(daemon.address, token=made["alice"].secret) as client,
        client.reset("fake/save-note") as episode,
    ):
        for name in ("bob", "eve", "alice"):
            headers = {"Authorization": f"Bearer {made[name].secret}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                statuses[name], _ = await Page(daemon, session).post(f"episodes/{episode.episode_id}/control")
    assert statuses == {"bob": 404, "eve": 404, "alice": 200}
