"""People in the console: they take control of drawn desktops, act, hand back, and play tasks."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from cuaenv.actions import Action, MouseDown
from cuaenv.client import AsyncEnvClient, AsyncEpisode, Click, Done, HumanInControl, TypeText
from envd.api.security.tokens import new_token
from envd.daemon.composition import Daemon, open_daemon
from envd.episodes import controlling
from envd.episodes.controlling import Controlling
from envd.episodes.recording.library import Library
from envd.episodes.recording.steps import write_steps
from tests.support.daemon import WITH_CONSOLE, fake_config, write_tokens
from trainer.agent.settings import AgentSettings
from trainer.cli.app import app
from trainer.data.corrections import Corrections, read_episode

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
    flags = {"recording.directory": tmp_path / "recordings", "pools": {"desktop": {"size": 2, "capacity": 4}}}
    async with open_daemon(fake_config(tmp_path, {**WITH_CONSOLE, **flags})) as daemon:
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
        assert handover.actions == (Click(379, 311), TypeText("Hello, fake desktop!"))
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
    async with asyncio.timeout(60):
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
        async with asyncio.timeout(60):
            while (await other.post(f"{path}/control"))[0] == 409:
                await asyncio.sleep(0.02)
        assert (await page.post(f"{path}/actions", actions=[CLICK]))[0] == 409


async def test_a_pause_while_a_button_is_held_is_part_of_the_drag(
    daemon: Daemon, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page(daemon, session)
    recording, pressing, paused = asyncio.Event(), asyncio.Event(), asyncio.Event()
    is_dragging: Any = vars(controlling._Session)["is_dragging"]
    record = Controlling._record_locked

    def noted(self: controlling._Session) -> bool:
        paused.set()
        return bool(is_dragging.fget(self))

    async def record_after_the_press_began(*arguments: Any, **more: Any) -> None:
        recording.set()
        await pressing.wait()
        await record(*arguments, **more)

    async def press_slowly(action: Action) -> None:
        if isinstance(action, MouseDown):
            pressing.set()
            await recording.wait()

    monkeypatch.setattr(controlling, "_PAUSE_S", 0.05)
    monkeypatch.setattr(controlling._Session, "is_dragging", property(noted))
    monkeypatch.setattr(Controlling, "_record_locked", record_after_the_press_began)
    async with AsyncEnvClient(daemon.address) as client, client.reset("fake/save-note") as episode:
        path, episode_id = f"episodes/{episode.episode_id}", episode.episode_id
        found = daemon.service.find(episode_id)
        assert found is not None
        found.machine.desktop.before_act = press_slowly
        await page.post(f"{path}/control")
        await page.post(f"{path}/actions", actions=[{"action": "move", "x": 100, "y": 55}])
        await page.post(f"{path}/actions", actions=[{"action": "mouse_down", "x": 100, "y": 55}])
        await paused.wait()
        up = [{"action": "move", "x": 150, "y": 90}, {"action": "mouse_up", "x": 160, "y": 100}]
        await page.post(f"{path}/actions", actions=up)
        await page.post(f"{path}/release")
    (step,) = (await recorded(daemon, episode_id)).steps
    assert step["performed"] == [{"action": "drag", "x": 100, "y": 55, "to_x": 160, "to_y": 100}]


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
        ({"actions": [{"action": "move", "x": 10**400, "y": 1}]}, "move.x"),
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
    tokens = write_tokens(tmp_path, made.values())
    flags = {**WITH_CONSOLE, "security.tokens_file": tokens, "pools": {"desktop": {"size": 1}}}
    statuses = {}
    async with (
        open_daemon(fake_config(tmp_path, flags)) as daemon,
        AsyncEnvClient(daemon.address, token=made["alice"].secret) as client,
        client.reset("fake/save-note") as episode,
    ):
        checkpoint = await episode.checkpoint()
        for name in ("bob", "eve", "alice"):
            headers = {"Authorization": f"Bearer {made[name].secret}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                statuses[name], _ = await Page(daemon, session).post(f"episodes/{episode.episode_id}/control")
        for name, code in (("bob", 422), ("eve", 403)):
            headers = {"Authorization": f"Bearer {made[name].secret}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                answer = await Page(daemon, session).post("episodes", checkpoint=checkpoint.checkpoint_id)
            assert answer[0] == code, answer
    assert statuses == {"bob": 404, "eve": 404, "alice": 200}


NOTE, SAVE = {"action": "type", "text": "Hello, fake desktop!"}, {"action": "click", "x": 82, "y": 86}


async def test_a_person_drives_from_a_checkpoint_and_both_halves_are_training_data(
    daemon: Daemon, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    page = Page(daemon, session)
    async with AsyncEnvClient(daemon.address) as client, client.reset("fake/save-note") as episode:
        await episode.step(Click(379, 311))
        first = await episode.checkpoint("before typing")
        await episode.step(TypeText("a mistake"))
        second = await episode.checkpoint()
        async with client.reset("fake/save-note") as other:
            await other.checkpoint("of another tree")
        async with session.get(f"http://{daemon.console_address}/api/episodes/{episode.episode_id}") as response:
            shown = (await response.json())["checkpoints"]
        assert [(each["id"], each["parent"], each["step"], each["label"]) for each in shown] == [
            (first.checkpoint_id, "", 1, "before typing"),
            (second.checkpoint_id, first.checkpoint_id, 2, ""),
        ]
        status, opened = await page.post("episodes", checkpoint=first.checkpoint_id)
        assert status == 200
        path = f"episodes/{opened['id']}"
        await page.post(f"{path}/control")
        await page.post(f"{path}/actions", actions=[NOTE, SAVE])
        assert (await page.post(f"{path}/evaluate"))[1]["score"] == 1.0
        async with session.get(f"http://{daemon.console_address}/api/{path}") as response:
            assert [each["id"] for each in (await response.json())["checkpoints"]] == [each["id"] for each in shown]
        await page.post(f"{path}/close")
        # The agent's half continues, untouched.
        assert (await episode.step(Done())).step_count == 3
        assert (await episode.evaluate()).score == 0.0
        agents_id = episode.episode_id
    files = []
    for episode_id in (agents_id, opened["id"]):
        recording = await recorded(daemon, episode_id)
        files.append(tmp_path / f"{episode_id}.jsonl")
        write_steps(recording, files[-1], progress=lambda _: None)
    demonstrations, preferences = tmp_path / "demonstrations.jsonl", tmp_path / "preferences.jsonl"
    words = ["data", "corrections", *map(str, files), "--out", str(demonstrations), "--preferences", str(preferences)]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    (row,) = map(json.loads, demonstrations.read_text().splitlines())
    turns = [message for message in row["messages"] if message["role"] == "assistant"]
    assert [(turn["source"], turn.get("step_loss_mask", 1)) for turn in turns] == [
        ("agent", 0),
        ("human", 1),
        ("human", 1),
    ]
    assert (row["reward"], len(row["images"])) == (1.0, 3)
    assert "Hello, fake desktop!" in turns[1]["content"]
    assert '"terminate"' in turns[2]["content"]
    (pair,) = map(json.loads, preferences.read_text().splitlines())
    chosen, rejected = pair["chosen"]["messages"], pair["rejected"]["messages"]
    shared = pair["shared_messages"]
    assert (chosen[:shared], shared) == (rejected[:shared], 4)
    assert chosen[shared - 1]["role"] == "user"
    assert [(turn["source"], turn.get("step_loss_mask", 1)) for turn in rejected if turn["role"] == "assistant"] == [
        ("agent", 0),
        ("agent", 1),
        ("agent", 1),
    ]
    assert (pair["chosen"]["reward"], pair["rejected"]["reward"]) == (1.0, 0.0)


async def test_an_episode_that_a_person_controls_is_not_rolled_back(
    daemon: Daemon, session: aiohttp.ClientSession
) -> None:
    page = Page(daemon, session)
    async with AsyncEnvClient(daemon.address) as client, client.reset("fake/save-note") as episode:
        path = f"episodes/{episode.episode_id}"
        checkpoint = await episode.checkpoint()
        await episode.step(Click(379, 311))
        # Control that is taken while a rollback copies the machine is kept.
        running = asyncio.create_task(episode.rollback(checkpoint))
        inner = daemon.service.find(episode.episode_id)
        assert inner is not None
        async with asyncio.timeout(60):
            while not inner.lock.locked():
                await asyncio.sleep(0)
        daemon.service.take_control(episode.episode_id, control_id=page.control, holder="")
        with pytest.raises(HumanInControl):
            await running
        with pytest.raises(HumanInControl, match="controls it"):
            await episode.rollback(checkpoint)
        assert (await page.post(f"{path}/actions", actions=[NOTE, SAVE]))[0] == 200
        await page.post(f"{path}/release")
        with pytest.raises(HumanInControl, match="has acted since"):
            await episode.rollback(checkpoint)
        await episode.observe()
        assert (episode.epoch, episode.step_count) == (1, 1)
        assert (await episode.rollback(checkpoint)).frame_id == checkpoint.frame_id
        assert (episode.epoch, episode.step_count) == (2, 0)


async def test_what_a_person_did_before_a_checkpoint_is_not_taken_back(
    daemon: Daemon, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    page = Page(daemon, session)

    async def drive(episode: AsyncEpisode, text: str) -> None:
        path = f"episodes/{episode.episode_id}"
        await page.post(f"{path}/control")
        await page.post(f"{path}/actions", actions=[{"action": "type", "text": text}])
        await page.post(f"{path}/release")
        await episode.observe()

    async def shown(episode_id: str) -> list[tuple[int, str, bool]]:
        async with session.get(f"http://{daemon.console_address}/api/episodes/{episode_id}") as response:
            steps = (await response.json())["steps"]
        return [(step["index"], step["source"], step["rolled_back"]) for step in steps]

    async with AsyncEnvClient(daemon.address) as client, client.reset("fake/save-note") as episode:
        await episode.step(Click(379, 311))
        await drive(episode, "kept")
        checkpoint = await episode.checkpoint()
        await drive(episode, "taken back")
        kept = [(0, "agent", False), (1, "human", False)]
        async with client.reset(checkpoint) as early:
            assert await shown(early.episode_id) == kept
        await episode.step(TypeText("taken back too"))
        await episode.rollback(checkpoint)
        expected = [*kept, (1, "human", True), (1, "agent", True)]
        assert await shown(episode.episode_id) == expected
        async with client.reset(checkpoint) as later, client.fork(episode, count=1) as (fork,):
            assert await shown(later.episode_id) == kept
            assert await shown(fork.episode_id) == kept
            await drive(later, "my half")
            await later.evaluate()
        parent_id = episode.episode_id
    recordings = [await recorded(daemon, episode_id) for episode_id in (parent_id, later.episode_id)]
    steps = [(step["index"], step["source"], step["rolled_back"]) for step in recordings[0].steps]
    assert steps == expected
    files = []
    for recording in recordings:
        files.append(tmp_path / f"{recording.name}.jsonl")
        write_steps(recording, files[-1], progress=lambda _: None)
    found = [read_episode(file) for file in files]
    row = Corrections(found, AgentSettings()).demonstration(found[1])
    said = [str(each["content"]) for each in row.messages if each["role"] == "assistant"]
    assert ["kept" in said[1], "my half" in said[2], len(said)] == [True, True, 4]
