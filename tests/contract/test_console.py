"""The console over HTTP, on drawn desktops: its stream, what it refuses, and that watching changes nothing."""

import asyncio
import base64
import io
import json
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.web
import pytest
from PIL import Image

from cuaenv.actions import Click, Move, TypeText
from cuaenv.client import AsyncEnvClient, RateLimited
from cuaenv.results import UnrecordedRequest
from envd.api.security.tokens import new_token
from envd.base.config_sources import load
from envd.base.errors import ConfigError
from envd.console import pictures, replays, server
from envd.console.pictures import PictureSize
from envd.daemon.composition import Daemon, open_daemon
from envd.desktop.desktop import Desktop
from envd.desktop.display.frames import Frame
from envd.episodes.episode import Episode, Lease
from envd.episodes.events import EpisodeObserver, PerformedStep
from tests.support.daemon import WITH_CONSOLE, ConsoleDaemon, fake_config, write_tokens

Message = tuple[str, dict[str, Any]]


class Console(ConsoleDaemon):
    """A daemon on drawn desktops, and an HTTP client of its console."""

    def __init__(self, daemon: Daemon, session: aiohttp.ClientSession) -> None:
        super().__init__(daemon)
        self.session = session

    async def events(self) -> AsyncGenerator[Message, None]:
        """Yield the messages of a stream."""
        async with self.session.get(f"{self.url}/api/events") as response:
            assert response.status == 200
            while message := await response.content.readuntil(b"\n\n"):
                name, data = message.decode().strip().removeprefix("event: ").split("\ndata: ")
                yield name, json.loads(data)

    async def select(self, view: str, tiles: list[str], full: str = "") -> None:
        """Select pictures."""
        body = {"tiles": tiles, "full": full}
        async with self.session.post(f"{self.url}/api/views/{view}", json=body) as response:
            assert response.status == 204, await response.text()

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Return status and text."""
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()


@asynccontextmanager
async def console(tmp_path: Path, flags: Mapping[str, object] | None = None, token: str = "") -> AsyncIterator[Console]:
    """Serve drawn desktops with a console."""
    desktops = {"pools": {"desktop": {"size": 2, "capacity": 4}}}
    config = fake_config(tmp_path, {**WITH_CONSOLE, **desktops, **(flags or {})})
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with open_daemon(config) as daemon, aiohttp.ClientSession(headers=headers) as session:
        yield Console(daemon, session)


async def until(events: AsyncIterator[Message], name: str, **fields: object) -> dict[str, Any]:
    """Return the next message of this name with these fields."""
    async for found, data in events:
        if found == name and all(data.get(key) == value for key, value in fields.items()):
            return data
    raise AssertionError("the stream ended")


async def test_the_stream_carries_episodes_pools_and_the_selected_pictures(tmp_path: Path) -> None:
    async with console(tmp_path) as served:
        first, second = await served.open(2, run="main")
        async with aclosing(served.events()) as events:
            view = (await until(events, "hello"))["view"]
            state = await until(events, "state")
            assert [facts["id"] for facts in state["episodes"]] == [first, second]
            assert {(facts["run"], facts["task"], facts["state"]) for facts in state["episodes"]} == {
                ("main", "fake/save-note", "active")
            }
            assert [(pool["name"], pool["leased"]) for pool in state["pools"]] == [("desktop", 2)]
            await served.select(view, [first], full=second)
            shown: dict[tuple[str, str], tuple[str | None, tuple[int, int]]] = {}
            while len(shown) < 2:
                picture = await until(events, "picture")
                with Image.open(io.BytesIO(base64.b64decode(picture["jpeg"]))) as image:
                    shown[picture["id"], picture["size"]] = (image.format, image.size)
            assert shown == {(first, "tile"): ("JPEG", (320, 200)), (second, "full"): ("JPEG", (1280, 800))}
            await served.step(first, 0, Click(379, 311), TypeText("<b>hi</b>"))
            # They come in either order, and pictures of the screen before the step may come first.
            action, pointer = "", None
            while not (action and pointer == [379, 311]):
                name, data = await anext(events)
                if name == "picture" and data["id"] == first:
                    pointer = data["pointer"]
                elif name == "state":
                    action = next((facts["action"] for facts in data["episodes"] if facts["step"] == 1), action)
            assert action == "type '<b>hi</b>'"
            await served.daemon.service.close(second)
            await until(events, "state", removed=[second])


async def test_a_moved_pointer_is_sent_without_the_same_pixels_again(tmp_path: Path) -> None:
    async with console(tmp_path) as served:
        (episode_id,) = await served.open()
        await served.step(episode_id, 0, Click(1100, 600))
        async with aclosing(served.events()) as events:
            view = (await until(events, "hello"))["view"]
            await until(events, "state")
            await served.select(view, [episode_id])
            assert "jpeg" in await until(events, "picture", pointer=[1100, 600])
            await served.step(episode_id, 1, Move(1110, 610))
            assert "jpeg" not in await until(events, "picture", pointer=[1110, 610])


async def test_a_pool_says_why_a_group_waits(tmp_path: Path) -> None:
    async with console(tmp_path, {"pools": {"desktop": {"size": 1, "capacity": 1}}}) as served:
        (episode_id,) = await served.open(run="first")
        waiting = asyncio.create_task(served.open(run="second"))
        async with aclosing(served.events()) as events:
            while not (pool := (await until(events, "state"))["pools"]) or not pool[0]["queue"]:
                pass
            (group,) = pool[0]["queue"]
            assert (group["run"], group["machines"]) == ("second", 1)
            assert group["why"].startswith("next: 1 of 1 machines busy")
            assert pool[0]["held_by_run"] == {"first": 1}
            await served.daemon.service.close(episode_id)
        await waiting


async def test_the_stream_says_which_episodes_are_parked(tmp_path: Path) -> None:
    async with console(tmp_path, {"pools": {"desktop": {"size": 0, "capacity": 4, "resident": 1}}}) as served:
        (first,) = await served.open(run="first")
        async with aclosing(served.events()) as events:
            (facts,) = (await until(events, "state"))["episodes"]
            assert facts["parked"] is False
            await served.open(run="second")
            shown: dict[str, bool] = {}
            while shown.get(first) is not True:
                state = await until(events, "state")
                shown |= {facts["id"]: facts["parked"] for facts in state["episodes"]}
            await served.step(first, 0, Click(379, 311))
            while shown.get(first) is not False:
                state = await until(events, "state")
                shown |= {facts["id"]: facts["parked"] for facts in state["episodes"]}


async def test_recordings_are_listed_and_replayed_to_those_who_may_see_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = UnrecordedRequest(kind="websocket", method="GET", url="https://example.org/socket")
    monkeypatch.setattr(Desktop, "take_unrecorded", lambda _: (missing,))
    recordings = tmp_path / "recordings"
    token = new_token("runer", "run")
    file = write_tokens(tmp_path, [token])
    flags = {"recording.directory": str(recordings), "recording.min_free_gib": 0, "security.tokens_file": str(file)}
    async with console(tmp_path, flags, token=token.secret) as served:
        (own,), (other,) = await served.open(owner="runer"), await served.open(owner="else")
        await served.step(own, 0, Click(379, 311))
        shown = json.loads((await served.get(f"/api/episodes/{own}"))[1])["steps"]
        assert shown[0]["unrecorded"] == ["websocket: GET https://example.org/socket"]
        for episode_id in (own, other):
            await served.daemon.service.close(episode_id)
    (recordings / "ep-bad.rec").write_bytes(b"nonsense")
    # The recordings are complete, and the next daemon has them.
    async with console(tmp_path, flags, token=token.secret) as served:
        page = json.loads((await served.get("/api/recordings"))[1])
        assert [(each["id"], each["steps"], each["reason"]) for each in page["recordings"]] == [(own, 1, "CLOSED")]
        assert (page["total"], page["matching"], page["choices"]["run"]) == (1, 1, ["no run"])
        replay = json.loads((await served.get(f"/api/recordings/{own}"))[1])
        assert [step["actions"] for step in replay["steps"]] == [["click 379,311"]]
        assert replay["steps"][0]["unrecorded"] == ["websocket: GET https://example.org/socket"]
        last = len(replay["frames"]) - 1
        assert replay["frames"][last][1] == [379, 311]
        async with served.session.get(f"{served.url}/api/recordings/{own}/frames/{last}") as response:
            with Image.open(io.BytesIO(await response.read())) as image:
                assert (image.format, image.size) == ("JPEG", (1280, 800))
        for path in (
            f"{own}/frames/{last + 1}",
            f"{own}/frames/-1",
            f"{own}/frames/x",
            f"{other}/video",
            other,
            "ep-0",
            "ep-bad",
            "..%2fx",
        ):
            assert (await served.get(f"/api/recordings/{path}"))[0] == 404, path


async def test_without_recordings_the_console_says_how_to_record(tmp_path: Path) -> None:
    async with console(tmp_path) as served:
        for path in ("/api/recordings", "/api/recordings/ep-1", "/api/recordings/ep-1/video"):
            status, text = await served.get(path)
            assert (status, "set recording.directory" in text) == (404, True), path


async def test_recordings_are_sorted_filtered_and_paged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "PAGE_ROWS", 2)
    flags = {"recording.directory": str(tmp_path / "recordings"), "recording.min_free_gib": 0}
    async with console(tmp_path, flags) as served:
        one, three, none = [await served.open(run=run) for run in ("one", "three", "none")]
        for index in range(3):
            await served.step(three[0], index, Move(5, index))
        await served.step(one[0], 0, Move(5, 6))
        for (episode_id,) in (one, three):
            await served.daemon.service.close(episode_id)

        async def listed(query: str) -> tuple[list[str], int, int]:
            status, text = await served.get(f"/api/recordings?{query}")
            assert status == 200, text
            page = json.loads(text)
            return [each["run"] for each in page["recordings"]], page["matching"], page["total"]

        # The end of a recording is written after the response to the call that closes its episode.
        async with asyncio.timeout(60):
            while (await listed("state=no+state"))[1] != 1:
                await asyncio.sleep(0.05)
        assert await listed("sort=steps") == (["one", "three"], 3, 3)
        assert await listed("sort=-steps") == (["three", "one"], 3, 3)
        assert await listed("sort=-steps&offset=2") == (["none"], 3, 3)  # without a value: last in both directions
        assert await listed("sort=steps&offset=2") == (["none"], 3, 3)
        assert await listed("run=three") == (["three"], 1, 3)
        assert await listed("text=SAVE-note&pool=desktop&sort=run") == (["none", "one"], 3, 3)
        assert await listed("state=no+state") == (["none"], 1, 3)
        assert await listed(f"text={none[0]}") == (["none"], 1, 3)
        for wrong in ("sort=owner", "offset=-1", "offset=x"):
            status, text = await served.get(f"/api/recordings?{wrong}")
            assert (status, "sort by one of time, task" in text) == (400, True)


async def test_a_recording_is_downloaded_as_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"recording.directory": str(tmp_path / "recordings"), "recording.min_free_gib": 0}
    async with console(tmp_path, flags) as served:
        (episode_id,) = await served.open()
        await served.step(episode_id, 0, Click(379, 311), TypeText("hello"))
        await served.daemon.service.close(episode_id)
        url = f"{served.url}/api/recordings/{episode_id}/video"
        async with served.session.get(url) as response:
            assert (response.status, response.content_type) == (200, "video/mp4")
            assert (await response.read())[4:8] == b"ftyp"
        started, ended = threading.Event(), threading.Event()

        def slow(*_: Any, progress: Callable[[float], None], **__: Any) -> None:
            started.set()
            while True:
                progress(0.5)
                ended.wait(0.001)

        monkeypatch.setattr(replays, "export_video", slow)
        first = asyncio.create_task(served.session.get(url))
        await asyncio.to_thread(started.wait)
        status, text = await served.get(f"/api/recordings/{episode_id}/video")
        assert (status, "another video is being made" in text) == (503, True)
        # A page that was closed ends it.
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

        def missing(*_: Any, **__: Any) -> None:
            raise ConfigError("install the extra video")

        async with asyncio.timeout(60):
            while status == 503:
                monkeypatch.setattr(replays, "export_video", missing)
                status, text = await served.get(f"/api/recordings/{episode_id}/video")
        assert (status, text) == (501, "install the extra video\n")


async def test_a_branch_has_its_place_in_the_group_and_its_parents_steps(tmp_path: Path) -> None:
    async with console(tmp_path, {"pools": {"desktop": {"size": 2, "capacity": 6}}}) as served:
        first, second = await served.open(2)

        async def facts_of(episode_id: str) -> dict[str, Any]:
            found: dict[str, Any] = json.loads((await served.get(f"/api/episodes/{episode_id}"))[1])
            return found

        await served.step(second, 0, Move(5, 6))
        left, right = await served.fork(second, 1, count=2)
        await served.step(second, 1, Move(9, 9))
        await served.step(left, 1, Click(379, 311))
        (deep,) = await served.fork(left, 2)
        await served.daemon.service.close(second)
        labels = {episode_id: (await facts_of(episode_id))["label"] for episode_id in (first, left, right, deep)}
        assert labels == {first: "1", left: "2.1", right: "2.2", deep: "2.1.1"}
        branch = await facts_of(deep)
        assert (branch["parent"], branch["first"], branch["action"]) == (left, 2, "")
        assert [(step["index"], step["actions"]) for step in branch["steps"]] == [
            (0, ["move 5,6"]),
            (1, ["click 379,311"]),
        ]
        assert [step["index"] for step in (await facts_of(right))["steps"]] == [0]


async def test_statistics_of_runs_outlive_their_episodes(tmp_path: Path) -> None:
    async with console(tmp_path) as served:
        (episode_id,) = await served.open(run="main")
        await served.step(episode_id, 0, Move(5, 6))
        await served.daemon.service.evaluate(episode_id, request_id="e", fingerprint=b"")
        await served.daemon.service.close(episode_id)
        async with aclosing(served.events()) as events:
            state = await until(events, "state")
            assert state["episodes"] == []
            (run,) = state["runs"]
            assert [run[key] for key in ("run", "open", "episodes", "scored", "mean", "void", "steps")] == [
                "main",
                0,
                1,
                1,
                0.0,
                0,
                1,
            ]


async def test_an_episode_has_a_timeline_and_its_instruction(tmp_path: Path) -> None:
    async with console(tmp_path) as served:
        (episode_id,) = await served.open()
        await served.step(episode_id, 0, Move(5, 6), Click(379, 311))
        status, text = await served.get(f"/api/episodes/{episode_id}")
        detail = json.loads(text)
        assert status == 200
        assert detail["instruction"].startswith("Type exactly this line")
        assert [(step["index"], step["actions"]) for step in detail["steps"]] == [(0, ["move 5,6", "click 379,311"])]
        await served.daemon.service.evaluate(episode_id, request_id="e", fingerprint=b"")
        detail = json.loads((await served.get(f"/api/episodes/{episode_id}"))[1])
        assert (detail["score"], detail["state"], len(detail["checks"])) == (0.0, "truncated", 1)


async def test_one_picture_serves_all_viewers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    def counted(frame: Frame, size: PictureSize) -> str:
        encoded.append(frame.frame_id)
        return ""

    monkeypatch.setattr(pictures, "encode", counted)
    async with console(tmp_path) as served:
        (episode_id,) = await served.open()
        async with aclosing(served.events()) as one, aclosing(served.events()) as two:
            for events in (one, two):
                view = (await until(events, "hello"))["view"]
                await until(events, "state")
                await served.select(view, [episode_id])
                await until(events, "picture", id=episode_id)
            assert len(encoded) == 1


async def test_watching_neither_renews_the_lease_nor_wakes_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with console(tmp_path) as served:
        (episode_id,) = await served.open()
        episode = served.daemon.service.find(episode_id)
        assert episode is not None
        assert episode.machine.desktop.is_asleep
        # Not its end: delays of the event loop extend it.
        calls: list[str] = []
        for name in ("renew", "begin_call", "end_call"):
            monkeypatch.setattr(Lease, name, lambda *_args, _name=name, **_kwargs: calls.append(_name))
        async with aclosing(served.events()) as events:
            view = (await until(events, "hello"))["view"]
            await until(events, "state")
            await served.select(view, [episode_id], full=episode_id)
            await until(events, "picture", size="full")
            await served.get(f"/api/episodes/{episode_id}")
        assert episode.machine.desktop.is_asleep
        assert calls == []
        monkeypatch.undo()


async def test_bad_requests_get_a_clear_answer(tmp_path: Path) -> None:
    async with console(tmp_path) as served:
        assert await served.get("/api/episodes/ep-0") == (
            404,
            "episode ep-0: not found; it was closed, or never opened here\n",
        )
        async with aclosing(served.events()) as events:
            view = (await until(events, "hello"))["view"]
            for body in (
                b"",
                b"[]",
                b'{"tiles": [1], "full": ""}',
                b'{"tiles": "x", "full": ""}',
                b"\xff",
                b"[" * 60_000,
            ):
                async with served.session.post(f"{served.url}/api/views/{view}", data=body) as response:
                    assert response.status == 400
                    assert "malformed body; send" in await response.text()
            await served.select(view, ["ep-0"], full="ep-0")
        async with served.session.post(f"{served.url}/api/views/none", json={}) as response:
            assert response.status == 404
        async with served.session.post(f"{served.url}/api/events", data=b"") as response:
            assert response.status == 405


async def test_the_page_takes_nothing_from_other_hosts(tmp_path: Path) -> None:
    async with console(tmp_path) as served:
        for path in ("/", "/console.css", "/console.js"):
            async with served.session.get(served.url + path) as response:
                assert response.status == 200
                assert "default-src 'none'; script-src 'self'" in response.headers["Content-Security-Policy"]
                text = await response.text()
                assert "http:" not in text
                assert "https:" not in text
                assert "innerHTML" not in text
                assert "<script>" not in text


async def test_without_tokens_only_loopback_names_are_answered(tmp_path: Path) -> None:
    async with console(tmp_path) as served:
        for host in ("localhost:1", "127.0.0.1", "[::1]:5"):
            assert (await served.get("/", Host=host))[0] == 200
        status, text = await served.get("/api/events", Host="attacker.example")
        assert status == 421
        assert text.startswith("host 'attacker.example': without tokens only")


async def test_tokens_decide_who_sees_which_episodes(tmp_path: Path) -> None:
    tokens = {scope: new_token(f"{scope}er", scope) for scope in ("read", "run")}
    file = write_tokens(tmp_path, tokens.values())
    async with console(tmp_path, {"security.tokens_file": str(file)}) as served:
        (own,), (other,) = await served.open(owner="runer"), await served.open(owner="else")
        for path in ("/api/events", f"/api/episodes/{own}", "/api/nothing"):
            for wrong in ({}, {"Authorization": "Bearer envd_wrong"}):
                assert (await served.get(path, **wrong))[0] == 401
        assert (await served.get("/"))[0] == 200
        seen, owners = {}, {}
        for scope, token in tokens.items():
            served.session.headers["Authorization"] = f"Bearer {token.secret}"
            async with aclosing(served.events()) as events:
                state = await until(events, "state")
                seen[scope] = {facts["id"] for facts in state["episodes"]}
                owners[scope] = {facts["owner"] for facts in state["runs"]}
        assert seen == {"read": {own, other}, "run": {own}}
        assert owners == {"read": {"runer", "else"}, "run": {"runer"}}
        assert (await served.get(f"/api/episodes/{own}"))[0] == 200
        assert (await served.get(f"/api/episodes/{other}"))[0] == 404


async def test_requests_of_other_origins_pages_are_refused(tmp_path: Path) -> None:
    async with console(tmp_path) as served:
        (episode_id,) = await served.open()
        path = f"/api/episodes/{episode_id}"
        for site in ("cross-site", "same-site"):
            status, text = await served.get(path, **{"Sec-Fetch-Site": site})
            assert (status, text) == (403, f"{path}: requested by a page of another origin; open the console's page\n")
            # A link to the page may be on any page.
            assert (await served.get("/", **{"Sec-Fetch-Site": site}))[0] == 200
        for site in ("same-origin", "none"):
            assert (await served.get(path, **{"Sec-Fetch-Site": site}))[0] == 200
        # Browsers that do not send Sec-Fetch-Site.
        for origin in ("https://elsewhere.example", "null", "http://127.0.0.1:1"):
            assert (await served.get(path, Origin=origin))[0] == 403
        assert (await served.get(path, Origin=served.url.rstrip("/")))[0] == 200


async def test_errors_too_forbid_scripts_and_frames(tmp_path: Path) -> None:
    async with console(tmp_path) as served:
        for path, headers in (("/nothing", {}), ("/api/episodes/x", {}), ("/", {"Host": "attacker.example"})):
            async with served.session.get(served.url + path, headers=headers) as response:
                assert response.status in (404, 421)
                policy = response.headers["Content-Security-Policy"]
                assert "frame-ancestors 'none'" in policy
                assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["Content-Type"].startswith("text/plain")


async def test_one_token_cannot_take_all_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_VIEWERS_OF_CALLER", 1)
    monkeypatch.setattr(server, "MAX_VIEWERS", 2)
    tokens = [new_token(name, "read") for name in ("greedy", "other", "third")]
    file = write_tokens(tmp_path, tokens)
    greedy, other, third = ({"Authorization": f"Bearer {token.secret}"} for token in tokens)
    async with (
        console(tmp_path, {"security.tokens_file": str(file)}) as served,
        served.session.get(f"{served.url}/api/events", headers=greedy) as first,
    ):
        assert first.status == 200
        problem = "token greedy: 1 pages are open, the maximum; close one\n"
        assert await served.get("/api/events", **greedy) == (429, problem)
        async with served.session.get(f"{served.url}/api/events", headers=other) as second:
            assert second.status == 200
            problem = "the console already has 2 open pages, its maximum; close one\n"
            assert await served.get("/api/events", **third) == (503, problem)


async def test_requests_count_toward_the_rate_limit_of_their_token_or_host(tmp_path: Path) -> None:
    token = new_token("alice", "run")
    file = write_tokens(tmp_path, [token])
    flags = {"security.tokens_file": str(file), "security.calls_per_second": 0.001, "security.call_burst": 3}
    alice = {"Authorization": f"Bearer {token.secret}"}
    async with console(tmp_path, flags) as served:
        # Paths without data too: a host without a token has one limit.
        paths = ["/", "/api/recordings", "/api/episodes/x", "/"]
        assert [(await served.get(path))[0] for path in paths] == [200, 401, 401, 429]
        assert [(await served.get("/api/recordings", **alice))[0] for _ in range(3)] == [404, 404, 404]
        status, text = await served.get("/api/recordings", **alice)
        assert status == 429
        assert "token 'alice': too many calls" in text
        # gRPC has the same limit.
        async with AsyncEnvClient(served.daemon.address, token=token.secret) as client:
            with pytest.raises(RateLimited):
                await client.list_pools()


async def test_a_page_that_takes_no_bytes_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stall(*_: object) -> None:
        await asyncio.Event().wait()

    async with console(tmp_path) as served:
        monkeypatch.setattr(server, "_STALL_S", 0.01)
        monkeypatch.setattr(server, "MAX_VIEWERS", 1)
        with monkeypatch.context() as stalled:
            stalled.setattr(aiohttp.web.StreamResponse, "write", stall)
            with pytest.raises(aiohttp.ClientPayloadError):
                async with served.session.get(f"{served.url}/api/events") as response:
                    await response.read()
        monkeypatch.undo()
        # Its place is free again.
        async with aclosing(served.events()) as events:
            await until(events, "hello")


async def test_revoking_a_token_ends_its_console_stream(tmp_path: Path) -> None:
    tokens = [new_token("first", "read"), new_token("second", "read")]
    file = write_tokens(tmp_path, tokens)
    async with console(tmp_path, {"security.tokens_file": str(file)}, token=tokens[0].secret) as served:
        async with aclosing(served.events()) as events:
            await until(events, "state")
            write_tokens(tmp_path, tokens[1:])
            async for _ in events:
                pass  # the machines' start is still reported
        assert (await served.get("/api/events"))[0] == 401


async def test_without_the_setting_no_console_is_served(tmp_path: Path) -> None:
    async with console(tmp_path, {"console_listen": ""}) as served:
        assert served.daemon.console_address == ""
        assert served.daemon.service.events._observers == []


async def test_an_address_that_is_taken_stops_the_start(tmp_path: Path) -> None:
    async with console(tmp_path / "1") as served:
        taken = served.daemon.console_address
        with pytest.raises(ConfigError, match=f"console_listen {taken}: cannot be bound"):
            async with console(tmp_path / "2", {"console_listen": taken}):
                pass


async def test_the_console_is_not_served_to_other_hosts_without_tokens() -> None:
    with pytest.raises(ConfigError, match=r"console_listen '0\.0\.0\.0:8080'"):
        load(flags={"console_listen": "0.0.0.0:8080"})


class _Failing(EpisodeObserver):
    """An observer that fails."""

    def opened(self, episode: Episode) -> None:
        raise RuntimeError("opened")

    def stepped(self, episode: Episode, step: PerformedStep) -> None:
        raise RuntimeError("stepped")

    def rolled_back(self, episode: Episode, *, time: datetime) -> None:
        raise RuntimeError("rolled_back")

    def scored(self, episode: Episode) -> None:
        raise RuntimeError("scored")

    def closed(self, episode: Episode) -> None:
        raise RuntimeError("closed")


async def test_an_observer_that_fails_does_not_affect_an_episode(tmp_path: Path) -> None:
    async with console(tmp_path) as served:
        served.daemon.service.events.add(_Failing())
        (episode_id,) = await served.open()
        await served.step(episode_id, 0, Click(379, 311))
        result = await served.daemon.service.evaluate(episode_id, request_id="e", fingerprint=b"")
        assert result.score == 0.0
        await served.daemon.service.close(episode_id)
        assert served.daemon.service.find(episode_id) is None


def test_no_two_scripts_of_the_page_define_the_same_name() -> None:
    """They share one global scope: the later definition would replace the earlier one."""
    names = [
        name
        for script in (Path(server.__file__).parent / "static").glob("*.js")
        for name in re.findall(r"^(?:async )?function (\w+)|^(?:let|const) (\w+)", script.read_text(), re.MULTILINE)
    ]
    flat = [first or second for first, second in names]
    assert len(flat) > 50
    assert sorted(name for name in set(flat) if flat.count(name) > 1) == []
