"""E2B's interface on drawn desktops: the control plane, and the services of its sandboxes, over the wire."""

import asyncio
import base64
import hashlib
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

from envd.base.config import CheckpointsConfig
from envd.base.streams import close, copy
from envd.episodes.checkpoints.store import CheckpointStore
from envd.integrations.compat.e2b import control, files
from envd.integrations.compat.e2b.runner import GuestRunner
from envd.integrations.osworld.catalogue import desktop_task
from tests.support.compat import CompatWorld, compat_world, guarded_world
from tests.support.e2b import STREAM, E2bWire, bash, framed, ran

NAMES = ("e2b",)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[CompatWorld]:
    store = CheckpointStore(tmp_path / "checkpoints", settings=CheckpointsConfig(), reserve_bytes=0)
    async with compat_world(capacity=4, names=NAMES, extra_tasks=[desktop_task()], checkpoints=store) as world:
        yield world


@pytest.fixture
def e2b(world: CompatWorld) -> E2bWire:
    return E2bWire.of(world)


async def until_empty(world: CompatWorld) -> None:
    while world.server.service.list_episodes():
        await asyncio.sleep(0.01)


# The control plane


async def test_a_sandbox_is_created_listed_extended_and_killed(world: CompatWorld, e2b: E2bWire) -> None:
    before = datetime.now(UTC)
    status, created = await e2b.call(
        "POST", "/v2/sandboxes", {"templateID": "base", "timeout": 60, "metadata": {"a": "b"}}
    )
    assert status == 201
    (episode,) = world.server.service.list_episodes()
    assert created["clientID"] == episode.episode_id
    path = f"/sandboxes/{created['sandboxID']}"
    status, shown = await e2b.call("GET", path)
    assert (status, shown["state"], shown["metadata"], shown["templateID"]) == (200, "running", {"a": "b"}, "base")
    assert shown["envdAccessToken"] == created["envdAccessToken"]
    assert (shown["cpuCount"], shown["memoryMB"]) == (1, 1024)
    assert before + timedelta(seconds=59) < datetime.fromisoformat(shown["endAt"]) < before + timedelta(seconds=90)
    assert await e2b.call("POST", f"{path}/timeout", {"timeout": 600}) == (204, None)
    shown = (await e2b.call("GET", path))[1]
    assert datetime.fromisoformat(shown["endAt"]) > before + timedelta(seconds=590)
    # A connection extends it only, and a refresh too.
    assert (await e2b.call("POST", f"/v2{path}/connect", {"timeout": 5}))[0] == 200
    assert (await e2b.call("POST", f"{path}/refreshes", {"duration": 5}))[0] == 204
    assert (await e2b.call("GET", path))[1]["endAt"] == shown["endAt"]
    metrics = (await e2b.call("GET", f"{path}/metrics"))[1]
    assert metrics[0]["memTotal"] == 1 << 30
    assert await e2b.call("GET", f"{path}/metrics?start=0&end=1") == (200, [])
    of_all = (await e2b.call("GET", f"/sandboxes/metrics?sandbox_ids={created['sandboxID']},none"))[1]["sandboxes"]
    assert list(of_all) == [created["sandboxID"]]
    assert await e2b.call("DELETE", path) == (204, None)
    assert world.server.service.list_episodes() == []
    for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/connect"), ("POST", "/timeout"), ("POST", "/pause")):
        status, refused = await e2b.call(method, path + end, {} if method == "POST" else None)
        assert (status, refused["code"]) == (404, 404), end


async def test_lists_have_filters_and_pages(e2b: E2bWire) -> None:
    ids = [(await e2b.create(metadata={"n": str(number), "kind": "x y"})).sandbox_id for number in range(3)]

    async def listed(query: str) -> tuple[list[str], str]:
        async with e2b.http.get(f"{e2b.url}/v2/sandboxes?{query}", headers={"X-API-KEY": "any"}) as response:
            return [each["sandboxID"] for each in await response.json()], response.headers.get("X-Next-Token", "")

    assert await listed("") == (ids[::-1], "")
    assert (await listed("order=asc"))[0] == ids
    assert (await listed("metadata=n%3D1%26kind%3Dx%252520y"))[0] == [ids[1]]
    assert (await listed("state=paused"))[0] == []
    assert (await listed("template=other"))[0] == []
    assert (await listed("startedAfter=2100-01-01T00:00:00Z"))[0] == []
    assert (await e2b.call("GET", "/v2/sandboxes?startedAfter=soon"))[0] == 400
    found, token = await listed("limit=2")
    assert found == ids[:0:-1]
    # A page after a sandbox that is gone continues at its place.
    await e2b.call("DELETE", f"/sandboxes/{ids[1]}")
    assert await listed(f"limit=2&nextToken={token}") == ([ids[0]], "")
    assert (await e2b.call("GET", "/v2/sandboxes?limit=0"))[0] == 400


async def test_a_sandbox_whose_episode_ended_is_not_listed(world: CompatWorld, e2b: E2bWire) -> None:
    await e2b.create()
    (episode,) = world.server.service.list_episodes()
    alive = await e2b.create()
    await world.server.service.close(episode.episode_id)
    status, listed = await e2b.call("GET", "/v2/sandboxes")
    assert (status, [each["sandboxID"] for each in listed]) == (200, [alive.sandbox_id])


async def test_a_template_is_a_task_a_pool_or_a_default_name(world: CompatWorld, e2b: E2bWire) -> None:
    for template in ("fake/count-to-five", "fake", "base", "desktop"):
        await e2b.create(template)
    tasks = [episode.spec.task_id for episode in world.server.service.list_episodes()]
    assert tasks == ["fake/count-to-five", *["osworld/desktop"] * 3]
    for template in ("none", "fake/none"):
        status, refused = await e2b.call("POST", "/sandboxes", {"templateID": template})
        assert (status, refused["code"]) == (404, 404)
        assert "not found" in refused["message"]


async def test_a_task_is_scored(e2b: E2bWire) -> None:
    sandbox = await e2b.create("fake/count-to-five")
    for command in ("xdotool mousemove --sync 819 100", "xdotool click --repeat 3 1", "xdotool click --repeat 2 1"):
        assert (await sandbox.run(command)).end["exitCode"] == 0
    assert await e2b.call("POST", f"/sandboxes/{sandbox.sandbox_id}/evaluate", {}) == (200, {"reward": 1.0})


async def test_its_time_limit_ends_a_sandbox(world: CompatWorld, e2b: E2bWire) -> None:
    sandbox = await e2b.create(timeout=1)
    await until_empty(world)
    assert (await e2b.call("GET", f"/sandboxes/{sandbox.sandbox_id}"))[0] == 404
    status, gone = await sandbox.ask("filesystem.Filesystem/Stat", {"path": "/"})
    assert (status, gone["code"]) == (502, 502)
    assert "was not found" in gone["message"]


async def test_a_sandbox_that_is_used_lives_longer_than_an_idle_session(
    world: CompatWorld, e2b: E2bWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await e2b.create()
    monkeypatch.setattr("envd.integrations.compat.callers._EPISODE_IDLE_S", 0.0)
    await world.callers["e2b"].sweep()
    assert (await sandbox.run("echo 1")).stdout == b"1\n"


async def test_its_episodes_lease_is_short_so_that_nothing_outlives_this_server(
    world: CompatWorld, e2b: E2bWire
) -> None:
    await e2b.create(timeout=86_400)
    (episode,) = await (await world.callers["e2b"].identify([])).client.list_episodes()
    assert episode.expire_time - datetime.now(UTC) <= timedelta(minutes=5)
    await world.callers["e2b"].aclose()
    assert world.server.service.list_episodes() == []


async def test_requests_with_one_key_create_one_sandbox(world: CompatWorld, e2b: E2bWire) -> None:
    body = {"templateID": "base", "timeout": 60}
    creations = [e2b.call("POST", "/v2/sandboxes", body, Idempotency_Key="key-1") for _ in range(3)]
    answers = await asyncio.gather(*creations)
    assert len({content["sandboxID"] for _, content in answers}) == 1
    assert len(world.server.service.list_episodes()) == 1
    status, refused = await e2b.call("POST", "/v2/sandboxes", {**body, "timeout": 61}, Idempotency_Key="key-1")
    assert (status, refused["message"].partition(":")[0]) == (400, "Idempotency-Key")
    await e2b.call("DELETE", f"/sandboxes/{answers[0][1]['sandboxID']}")
    await e2b.create()
    status, again = await e2b.call("POST", "/v2/sandboxes", body, Idempotency_Key="key-1")
    assert again["sandboxID"] != answers[0][1]["sandboxID"]


async def test_a_create_that_its_caller_leaves_opens_nothing(world: CompatWorld, e2b: E2bWire) -> None:
    for _ in range(4):
        await e2b.create()
    creating = asyncio.create_task(e2b.create())
    async for pools in world.server.service.watch_pools():
        if pools[0].waiting_count:
            break
    creating.cancel()
    with suppress(asyncio.CancelledError):
        await creating
    async for pools in world.server.service.watch_pools():
        if not pools[0].waiting_count:
            break
    assert len(world.server.service.list_episodes()) == 4


async def test_a_full_pool_is_a_429_with_a_pause(e2b: E2bWire, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(4):
        await e2b.create()
    monkeypatch.setattr(control, "_OPEN_TIMEOUT", timedelta(seconds=1))
    body = {"templateID": "base"}
    async with e2b.http.post(f"{e2b.url}/v2/sandboxes", json=body) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["code"] == 429


async def test_a_paused_sandbox_keeps_its_id_and_its_state(world: CompatWorld, e2b: E2bWire) -> None:
    sandbox = await e2b.create(envVars={"NAME": "kept"})
    path = f"/sandboxes/{sandbox.sandbox_id}"
    assert (await sandbox.file("POST", "note", b"text"))[0] == 200
    assert await e2b.call("POST", f"{path}/pause", {}) == (204, None)
    assert world.server.service.list_episodes() == []
    assert (await e2b.call("GET", path))[1]["state"] == "paused"
    assert (await e2b.call("POST", f"{path}/pause", {}))[0] == 409
    assert (await e2b.call("POST", f"{path}/timeout", {"timeout": 9}))[0] == 404
    assert (await sandbox.ask("process.Process/List", {}))[0] == 502
    assert await e2b.call("GET", f"{path}/metrics") == (200, [])
    resumed = [e2b.call("POST", f"{path}/connect", {"timeout": 60}) for _ in range(2)]
    assert sorted(status for status, _ in await asyncio.gather(*resumed)) == [200, 201]
    assert len(world.server.service.list_episodes()) == 1
    assert (await sandbox.run("cat note; echo $NAME")).stdout == b"textkept\n"
    # What was stored for the pause is gone.
    assert (await (await world.callers["e2b"].identify([])).client.list_checkpoints()) == []
    await e2b.call("POST", f"{path}/pause", {})
    assert (await e2b.call("DELETE", path))[0] == 204
    assert (await (await world.callers["e2b"].identify([])).client.list_checkpoints()) == []


async def test_a_paused_sandbox_outlives_this_server(world: CompatWorld, e2b: E2bWire) -> None:
    sandbox = await e2b.create()
    path = f"/sandboxes/{sandbox.sandbox_id}"
    await sandbox.file("POST", "note", b"kept")
    await e2b.call("POST", f"{path}/pause", {})
    (await world.callers["e2b"].identify([])).sessions.clear()  # as in a new process
    status, created = await e2b.call("POST", f"{path}/connect", {"timeout": 60})
    assert (status, created["sandboxID"]) == (201, sandbox.sandbox_id)
    assert await e2b.sandbox(created).file("GET", "note") == (200, b"kept")


async def test_a_sandbox_can_pause_at_its_end(world: CompatWorld, e2b: E2bWire) -> None:
    sandbox = await e2b.create(timeout=1, autoPause=True)
    await until_empty(world)
    assert (await e2b.call("GET", f"/sandboxes/{sandbox.sandbox_id}"))[1]["state"] == "paused"


async def test_snapshots_are_templates(e2b: E2bWire) -> None:
    sandbox = await e2b.create()
    await sandbox.file("POST", "note", b"first")
    path = f"/sandboxes/{sandbox.sandbox_id}/snapshots"
    status, snapshot = await e2b.call("POST", path, {"name": "mine"})
    assert (status, snapshot["names"]) == (201, ["mine"])
    await sandbox.file("POST", "note", b"second")
    for query in ("", f"?sandboxID={sandbox.sandbox_id}", "?name=mine"):
        assert await e2b.call("GET", f"/snapshots{query}") == (200, [snapshot])
    assert await e2b.call("GET", "/snapshots?name=other") == (200, [])
    for template in (snapshot["snapshotID"], "mine"):
        assert (await (await e2b.create(template)).file("GET", "note")) == (200, b"first")
    assert (await e2b.call("DELETE", f"/templates/{snapshot['snapshotID']}"))[0] == 204
    assert (await e2b.call("DELETE", f"/templates/{snapshot['snapshotID']}"))[0] == 404
    assert (await e2b.call("POST", path, {"memory": False}))[0] == 501


async def test_forks_are_sandboxes_of_their_own(world: CompatWorld, e2b: E2bWire) -> None:
    sandbox = await e2b.create(metadata={"a": "b"})
    await sandbox.file("POST", "note", b"before")
    status, results = await e2b.call("POST", f"/sandboxes/{sandbox.sandbox_id}/fork", {"count": 2, "timeout": 60})
    assert status == 201
    copies = [e2b.sandbox(each["sandbox"]) for each in results]
    assert len({sandbox.sandbox_id, *(each.sandbox_id for each in copies)}) == 3
    for each in copies:
        assert await each.file("GET", "note") == (200, b"before")
        await each.file("POST", "note", b"copy")
    assert await sandbox.file("GET", "note") == (200, b"before")
    await e2b.call("DELETE", f"/sandboxes/{sandbox.sandbox_id}")
    assert len(world.server.service.list_episodes()) == 2
    assert (await e2b.call("POST", f"/sandboxes/{copies[0].sandbox_id}/fork", {"count": 21}))[0] == 400


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/sandboxes/x/logs"), ("PUT", "/sandboxes/x/network"), ("POST", "/v3/templates"), ("GET", "/templates"),
        ("POST", "/volumes"), ("GET", "/secrets"),
    ],
)  # fmt: skip
async def test_what_envd_does_not_have_is_501_with_a_text(e2b: E2bWire, method: str, path: str) -> None:
    status, refused = await e2b.call(method, path, {})
    assert (status, refused["code"]) == (501, 501)
    assert "not served" in refused["message"]


async def test_bad_requests_of_the_control_plane_are_refused(world: CompatWorld, e2b: E2bWire) -> None:
    bodies: list[object] = [{}, {"templateID": ""}, {"templateID": "base", "timeout": -1}, []]
    for body in [*bodies, {"templateID": "base", "metadata": 3}]:
        status, refused = await e2b.call("POST", "/v2/sandboxes", body)
        assert (status, refused["code"]) == (400, 400), body
    fields: list[dict[str, object]] = [
        {"volumeMounts": [{"name": "a", "path": "/a"}]}, {"iam": {"x": {}}}, {"network": {"denyOut": ["0.0.0.0/0"]}},
    ]  # fmt: skip
    for field in fields:
        assert (await e2b.call("POST", "/v2/sandboxes", {"templateID": "base", **field}))[0] == 501
    assert (await e2b.call("GET", "/nowhere"))[0] == 404
    assert world.server.service.list_episodes() == []


async def test_a_key_is_a_token_and_reaches_its_own_sandboxes_only(tmp_path: Path) -> None:
    async with guarded_world(tmp_path) as (world, alice, bob):
        ours, theirs = E2bWire.of(world, alice.secret), E2bWire.of(world, bob.secret)
        sandbox = await ours.create("fake/count-to-five")
        assert (await theirs.call("GET", f"/sandboxes/{sandbox.sandbox_id}"))[0] == 404
        assert (await theirs.call("DELETE", f"/sandboxes/{sandbox.sandbox_id}"))[0] == 404
        assert (await theirs.call("GET", "/v2/sandboxes"))[1] == []
        status, refused = await E2bWire.of(world, "wrong").call("GET", "/v2/sandboxes")
        assert (status, refused["code"]) == (401, 401)
        assert (await sandbox.run("echo 1")).stdout == b"1\n"


# Processes


async def test_a_command_has_its_environment_directory_output_and_exit_code(e2b: E2bWire) -> None:
    sandbox = await e2b.create(envVars={"A": "1", "B": "1"})
    done = await sandbox.run("pwd; echo $A$B; cat /none; exit 3", envs={"B": "2"}, cwd="/tmp")  # noqa: S108
    assert (done.stdout, done.stderr) == (b"/tmp\n12\n", b"cat: /none: No such file or directory\n")
    assert done.end == {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}
    assert (await sandbox.run("true")).end == {"exitCode": 0, "exited": True, "status": "exit status 0"}


async def test_a_command_that_exceeds_its_time_is_killed(e2b: E2bWire) -> None:
    sandbox = await e2b.create()
    done = await sandbox.run("sleep 60", timeout_ms=100)
    assert done.error["code"] == "deadline_exceeded"
    assert await sandbox.ask("process.Process/List", {}) == (200, {"processes": []})


async def test_a_process_continues_when_its_caller_leaves_and_can_be_joined(e2b: E2bWire) -> None:
    sandbox = await e2b.create()
    async with sandbox.stream("process.Process/Start", {**bash("sleep 1; echo late"), "tag": "job"}) as (_, events):
        pid = (await anext(events))["event"]["start"]["pid"]
    _, listed = await sandbox.ask("process.Process/List", {})
    (process,) = listed["processes"]
    assert (process["pid"], process["tag"], process["config"]["args"][-1]) == (pid, "job", "sleep 1; echo late")
    for selector in ({"pid": pid}, {"tag": "job"}):
        async with sandbox.stream("process.Process/Connect", {"process": selector}) as (_, events):
            joined = ran([event async for event in events]) if "tag" in selector else None
    assert joined is not None
    assert (joined.pid, joined.stdout, joined.end["exitCode"]) == (pid, b"late\n", 0)


async def test_input_reaches_a_process_until_it_is_closed(e2b: E2bWire) -> None:
    sandbox = await e2b.create()
    async with sandbox.stream("process.Process/Start", {**bash("cat"), "stdin": True}) as (_, events):
        pid = {"pid": (await anext(events))["event"]["start"]["pid"]}
        data = base64.b64encode(b"one ").decode()
        assert await sandbox.ask("process.Process/SendInput", {"process": pid, "input": {"stdin": data}}) == (200, {})
        stream = [{"start": {"process": pid}}, {"keepalive": {}}, {"data": {"input": {"stdin": data}}}]
        body = b"".join(map(framed, stream)) + framed({}, flags=2)
        async with sandbox.stream("process.Process/StreamInput", body) as (_, answers):
            assert [answer async for answer in answers] == [{}, {}]
        assert (await sandbox.ask("process.Process/CloseStdin", {"process": pid}))[0] == 200
        assert ran([event async for event in events]).stdout == b"one one "


async def test_a_process_is_signalled(e2b: E2bWire) -> None:
    sandbox = await e2b.create()
    async with sandbox.stream("process.Process/Start", bash("sleep 60")) as (_, events):
        process = {"pid": (await anext(events))["event"]["start"]["pid"]}
        signal = {"process": process, "signal": "SIGNAL_SIGKILL"}
        assert (await sandbox.ask("process.Process/SendSignal", {**signal, "signal": "SIGNAL_SIGSTOP"}))[0] == 501
        assert (await sandbox.ask("process.Process/SendSignal", signal))[0] == 200
        done = ran([event async for event in events])
    assert done.end == {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}
    status, gone = await sandbox.ask("process.Process/SendSignal", signal)
    assert (status, gone["code"]) == (404, "not_found")
    status, none = await sandbox.ask("process.Process/SendInput", {"process": process, "input": {"stdin": ""}})
    assert (status, none["code"]) == (404, "not_found")


async def test_commands_run_as_the_user_or_root_only(e2b: E2bWire) -> None:
    sandbox = await e2b.create()
    for user, status in (("", 200), ("user", 200), ("root", 200), ("daemon", 401)):
        basic = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
        async with sandbox.stream("process.Process/Start", bash("true"), Authorization=basic) as (response, _):
            assert response.status == status


@pytest.mark.parametrize(
    ("method", "body", "code"),
    [
        ("process.Process/Start", {}, "invalid_argument"),
        ("process.Process/Start", bash("true", cwd="/none"), "invalid_argument"),
        ("process.Process/Start", bash("true\0"), "invalid_argument"),
        ("process.Process/Start", {**bash("true"), "pty": {"size": {}}}, "unimplemented"),
        ("process.Process/Connect", {"process": {"pid": 1}}, "not_found"),
        ("process.Process/Connect", {"process": {"tag": "none"}}, "not_found"),
        ("filesystem.Filesystem/WatchDir", {"path": "/none"}, "not_found"),
    ],
)
async def test_a_stream_that_cannot_begin_is_an_error_of_the_call(
    e2b: E2bWire, method: str, body: dict[str, Any], code: str
) -> None:
    sandbox = await e2b.create()
    async with sandbox.stream(method, body) as (response, _):
        assert response.status >= 400
        assert (await response.json())["code"] == code


async def test_bad_messages_are_refused(e2b: E2bWire) -> None:
    sandbox = await e2b.create()
    path = "process.Process/Start"
    for body in (b"", b"\0\0\0\0\5{}", framed(bash("true"), flags=1), framed([]), b"\0\0\0\0\1{"):
        async with sandbox.stream(path, body) as (response, _):
            assert (response.status, (await response.json())["code"]) == (400, "invalid_argument"), body
    async with sandbox.stream(path, bash("true"), Connect_Timeout_Ms="soon") as (response, _):
        assert response.status == 400
    for kind in ("application/proto", "application/connect+proto"):
        url = f"{sandbox.url}/process.Process/List"
        async with sandbox.http.post(url, data=b"", headers={**sandbox.headers, "Content-Type": kind}) as response:
            assert response.status == 415
    assert (await sandbox.ask("process.Process/None", {}))[0] == 404
    for messages in ([{"data": {"input": {"stdin": ""}}}], [{"start": {"process": {"pid": 1}}}], [{"start": 3}]):
        async with sandbox.stream("process.Process/StreamInput", b"".join(map(framed, messages))) as (_, events):
            assert [event async for event in events][-1]["error"]["code"] in ("invalid_argument", "not_found")
    async with sandbox.stream("process.Process/StreamInput", framed({})[:-1]) as (_, events):
        assert "within a message" in [event async for event in events][-1]["error"]["message"]


async def test_a_request_without_the_sandboxs_token_is_refused(e2b: E2bWire) -> None:
    sandbox = await e2b.create()
    status, refused = await sandbox.ask("process.Process/List", {}, X_Access_Token="no")  # noqa: S106
    assert (status, refused["code"]) == (401, 401)
    headers = {"E2b-Sandbox-Id": "i" + "0" * 19, "E2b-Sandbox-Port": "49983"}
    async with sandbox.http.get(f"{sandbox.url}/health", headers=headers) as response:
        assert response.status == 502


async def test_streams_end_when_the_sandbox_does(world: CompatWorld, e2b: E2bWire) -> None:
    """Ended by a kill, by the daemon, and with a machine; also a stream of input that its caller never ends."""
    for end in ("kill", "close", "lose"):
        sandbox = await e2b.create()

        async def endless(pid: int) -> AsyncIterator[bytes]:
            yield framed({"start": {"process": {"pid": pid}}})
            await asyncio.sleep(60)

        async with sandbox.stream("process.Process/Start", {**bash("sleep 60"), "stdin": True}) as (_, events):
            pid = (await anext(events))["event"]["start"]["pid"]
            headers = {**sandbox.headers, "Content-Type": STREAM}
            url = f"{sandbox.url}/process.Process/StreamInput"
            inputs = asyncio.create_task(sandbox.http.post(url, data=endless(pid), headers=headers))
            await asyncio.sleep(0.1)
            (episode,) = world.server.service.list_episodes()
            if end == "kill":
                await e2b.call("DELETE", f"/sandboxes/{sandbox.sandbox_id}")
            elif end == "close":
                await world.server.service.close(episode.episode_id)
            else:
                next(iter(world.server.hypervisor.machines.values())).kill("a fault")
                for machine in world.server.hypervisor.machines.values():
                    machine.kill("a fault")
            done = ran([event async for event in events])
            assert done.error["code"] == "unavailable"
            assert "ended before" in done.error["message"]
        status, gone = await sandbox.ask("process.Process/List", {})
        assert (status, gone["code"]) == (502, 502)
        async with asyncio.timeout(10):
            with suppress(aiohttp.ClientError):
                (await inputs).close()
        async with sandbox.http.get(f"{sandbox.url}/health", headers=sandbox.headers) as response:
            assert response.status == 502
        assert (await e2b.call("GET", f"/sandboxes/{sandbox.sandbox_id}"))[0] == 404


async def test_a_guest_that_breaks_a_call_off_keeps_its_sandbox_and_its_score(
    e2b: E2bWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a policy that ends its runner, or its guest before the first event, removes its own failure."""
    sandbox = await e2b.create()

    async def closed(*_: object) -> None:
        raise asyncio.IncompleteReadError(b"", None)

    with monkeypatch.context() as guest:
        guest.setattr(GuestRunner, "_line", closed)
        async with sandbox.stream("process.Process/Start", bash("true")) as (response, _):
            assert (response.status, (await response.json())["code"]) == (503, "unavailable")
    assert (await sandbox.ask("process.Process/List", {}))[0] == 200
    path = f"/sandboxes/{sandbox.sandbox_id}"
    assert (await e2b.call("GET", path))[0] == 200
    assert await e2b.call("POST", f"{path}/evaluate", {}) == (200, {"reward": 0.0})


# Files


async def test_files_are_written_read_listed_moved_and_removed(e2b: E2bWire) -> None:
    sandbox = await e2b.create()
    status, written = await sandbox.file("POST", "a/b.txt", b"text")
    assert (status, json.loads(written)) == (200, [{"name": "b.txt", "type": "file", "path": "/home/user/a/b.txt"}])
    assert await sandbox.file("GET", "/home/user/a/b.txt") == (200, b"text")
    form = aiohttp.FormData(quote_fields=False)
    for name in ("m1", "m2"):
        form.add_field("file", io.BytesIO(name.encode()), filename=f"/d/{name}")
    async with sandbox.http.post(f"{sandbox.url}/files", data=form, headers=sandbox.headers) as response:
        assert [each["path"] for each in await response.json()] == ["/d/m1", "/d/m2"]

    async def ask(name: str, **body: object) -> tuple[int, Any]:
        return await sandbox.ask(f"filesystem.Filesystem/{name}", body)

    status, stat = await ask("Stat", path="a/b.txt")
    assert (stat["entry"]["type"], stat["entry"]["size"], stat["entry"]["permissions"]) == (
        "FILE_TYPE_FILE",
        4,
        "-rw-r--r--",
    )
    assert (await ask("MakeDir", path="a/c/d"))[0] == 200
    status, exists = await ask("MakeDir", path="a/c/d")
    assert (status, exists["code"]) == (409, "already_exists")
    assert (await ask("MakeDir", path="a/b.txt"))[1]["code"] == "invalid_argument"
    listed = (await ask("ListDir", path="a"))[1]["entries"]
    assert [each["name"] for each in listed] == ["b.txt", "c"]
    assert len((await ask("ListDir", path="a", depth=2))[1]["entries"]) == 3
    assert (await ask("ListDir", path="a/b.txt"))[1]["code"] == "invalid_argument"
    assert (await ask("Move", source="a", destination="e/f"))[1]["entry"]["path"] == "/home/user/e/f"
    assert await sandbox.file("GET", "e/f/b.txt") == (200, b"text")
    assert (await ask("Remove", path="e"))[0] == (await ask("Remove", path="e"))[0] == 200
    for name, body in (
        ("Stat", {"path": "e"}),
        ("ListDir", {"path": "e"}),
        ("Move", {"source": "e", "destination": "g"}),
    ):
        status, absent = await ask(name, **body)
        assert (status, absent["code"]) == (404, "not_found")
    for path in ("", "x%00y"):
        assert (await sandbox.file("POST", path, b""))[0] == 400
    assert (await ask("Stat", path="x\0y"))[0] == 400
    assert (await sandbox.file("GET", "none"))[0] == 404
    assert (await sandbox.file("GET", "/home/user"))[0] == 400
    assert (await sandbox.file("POST", "x", b"x", kind="text/plain"))[0] == 400


async def test_a_signature_admits_one_file_for_a_time(e2b: E2bWire) -> None:
    sandbox = await e2b.create()
    await sandbox.file("POST", "a", b"text")

    def signed(operation: str, path: str = "a", expires: str = "") -> str:
        raw = f"{path}:{operation}::{sandbox.token}" + (f":{expires}" if expires else "")
        digest = base64.b64encode(hashlib.sha256(raw.encode()).digest()).rstrip(b"=").decode()
        text = digest.replace("+", "%2B").replace("/", "%2F")
        return f"&signature=v1_{text}" + (f"&signature_expiration={expires}" if expires else "")

    soon, past = str(int(time.time()) + 60), str(int(time.time()) - 60)
    assert await sandbox.file("GET", "a", signed=signed("read")) == (200, b"text")
    assert await sandbox.file("GET", "a", signed=signed("read", expires=soon)) == (200, b"text")
    assert (await sandbox.file("POST", "a", b"2", signed=signed("write")))[0] == 200
    for path, signature in (
        ("a", signed("read", expires=past)), ("a", signed("write")), ("b", signed("read")), ("a", "&signature=v1_"),
        ("a", signed("read", expires="soon")), ("a", signed("read").replace(sandbox.token, "")[:-3]),
    ):  # fmt: skip
        assert (await sandbox.file("GET", path, signed=signature))[0] == 401


async def test_a_large_file_passes_and_a_larger_one_is_refused(e2b: E2bWire, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await e2b.create()
    data = bytes(100 << 20)
    assert (await sandbox.file("POST", "large", io.BytesIO(data)))[0] == 200
    status, back = await sandbox.file("GET", "large")
    assert (status, len(back)) == (200, len(data))
    monkeypatch.setattr(files, "_MAX_FILE_BYTES", 1 << 20)
    status, refused = await sandbox.file("POST", "larger", io.BytesIO(data))
    assert (status, json.loads(refused)["code"]) == (413, 413)
    assert (await sandbox.file("GET", "larger"))[0] == 404


async def test_an_upload_that_does_not_arrive_whole_changes_nothing(
    e2b: E2bWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await e2b.create()
    await sandbox.file("POST", "a", b"before")

    async def stalled() -> AsyncIterator[bytes]:
        yield b"half"
        await asyncio.sleep(60)

    uploading = asyncio.create_task(sandbox.file("POST", "a", stalled()))
    await asyncio.sleep(0.2)
    uploading.cancel()
    with suppress(asyncio.CancelledError):
        await uploading
    monkeypatch.setattr(files, "_IDLE_S", 0.1)
    status, refused = await sandbox.file("POST", "a", stalled())
    assert (status, json.loads(refused)["code"]) == (504, "deadline_exceeded")
    assert await sandbox.file("GET", "a") == (200, b"before")


async def test_transfers_end_when_the_sandbox_does(world: CompatWorld, e2b: E2bWire) -> None:
    """The file has no byte of another response, and the end does not wait for the caller's next byte."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        await reader.read()

    async def endless() -> AsyncIterator[bytes]:
        yield b"half"
        await asyncio.sleep(60)

    world.server.hypervisor.services[8080] = serve
    sandbox = await e2b.create()
    await sandbox.file("POST", "large", io.BytesIO(bytes(32 << 20)))
    host = {"Host": f"8080-{sandbox.sandbox_id}.localhost"}
    url = f"{sandbox.url}/files?path=large"
    async with (
        asyncio.timeout(30),
        e2b.http.get(url, headers=sandbox.headers) as download,
        e2b.http.get(e2b.url, headers=host) as page,
    ):
        assert (download.content_length, await download.content.readexactly(4)) == (32 << 20, bytes(4))
        assert await page.content.readexactly(4) == b"half"
        uploading = asyncio.create_task(sandbox.file("POST", "new", endless()))
        await asyncio.sleep(0.2)
        await e2b.call("DELETE", f"/sandboxes/{sandbox.sandbox_id}")
        status, refused = await uploading
        assert (status, "was not found" in json.loads(refused)["message"]) == (502, True)
        for response in (download, page):
            with pytest.raises(aiohttp.ClientError):
                await response.read()


async def test_changes_of_a_directory_are_reported(e2b: E2bWire) -> None:
    sandbox = await e2b.create()
    _, watcher = await sandbox.ask("filesystem.Filesystem/CreateWatcher", {"path": "/home/user", "recursive": True})
    async with sandbox.stream("filesystem.Filesystem/WatchDir", {"path": "/home/user"}) as (_, events):
        assert "start" in await anext(events)
        await sandbox.file("POST", "new", b"x")
        found = [(await anext(events))["filesystem"] for _ in range(2)]
    wanted = [{"name": "new", "type": "EVENT_TYPE_CREATE"}, {"name": "new", "type": "EVENT_TYPE_WRITE"}]
    assert found == wanted
    collected: list[Any] = []
    while len(collected) < 2:
        collected += (await sandbox.ask("filesystem.Filesystem/GetWatcherEvents", watcher))[1]["events"]
    assert collected == wanted
    assert (await sandbox.ask("filesystem.Filesystem/RemoveWatcher", watcher))[0] == 200
    for method in ("GetWatcherEvents", "RemoveWatcher"):
        assert (await sandbox.ask(f"filesystem.Filesystem/{method}", watcher))[0] == 404


# The desktop, and ports


async def test_the_desktop_sdks_commands_are_actions_of_the_episode(world: CompatWorld, e2b: E2bWire) -> None:
    sandbox = await e2b.create()
    for start in (
        "Xvfb :0 -ac -screen 0 1024x768x24 -retro -dpi 96 -nolisten tcp -nolisten unix",
        "xdpyinfo -display :0",
        "startxfce4",
        "pgrep -x xfce4-session >/dev/null && pgrep -x xfwm4 >/dev/null && pgrep -x xfdesktop >/dev/null",
    ):  # fmt: skip
        assert (await sandbox.run(start)).end["exitCode"] == 0
    assert b"1280x800" in (await sandbox.run("xrandr")).stdout
    await sandbox.run("xdotool mousemove --sync 379 311")
    assert (await sandbox.run("xdotool getmouselocation")).stdout.startswith(b"x:379 y:311 ")
    for command in ("xdotool click 1", "xdotool type --delay 75 -- 'It'\"'\"'s \"it\" $HOME'", "xdotool key ctrl+s"):
        assert (await sandbox.run(command)).end["exitCode"] == 0
    assert (await sandbox.file("GET", "note.txt"))[1] == b'It\'s "it" $HOME'
    inputs = ("mousedown 1", "mousemove --sync 300 300", "mouseup 1", "click 3", "click --repeat 4 5")
    for command in (f"xdotool {each}" for each in inputs):
        assert (await sandbox.run(command)).end["exitCode"] == 0
    assert world.server.service.list_episodes()[0].progress.step_count == 9
    assert (await sandbox.run("scrot --pointer /tmp/screenshot.png")).end["exitCode"] == 0
    picture = Image.open(io.BytesIO((await sandbox.file("GET", "/tmp/screenshot.png"))[1]))  # noqa: S108
    assert picture.size == (1280, 800)
    failed = await sandbox.run("xdotool key no_such_key")
    assert (failed.end["exitCode"], b"no_such_key" in failed.stderr) == (1, True)
    streaming = await sandbox.run("x11vnc -bg -display :0 -forever -wait 50 -shared -rfbport 5900 -nopw")
    assert (streaming.end["exitCode"], b"console" in streaming.stderr) == (1, True)
    window = (await sandbox.run("xdotool getwindowfocus")).stdout.strip().decode()
    assert (await sandbox.run(f"xdotool getwindowname {window}")).stdout == b"note.txt - Editor\n"
    # Anything else is a command of the guest, such as one with an expansion.
    assert (await sandbox.run('xdotool type --delay 75 -- "$HOME"')).end["exitCode"] != 0
    assert world.server.service.list_episodes()[0].progress.step_count == 10


async def test_a_port_of_the_guest_is_reached_by_its_host_name(world: CompatWorld, e2b: E2bWire) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        body = head.split(b" ")[1] + b" " + await reader.readexactly(length)
        writer.write(b"HTTP/1.1 201 Made\r\nX-Of: guest\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()

    world.server.hypervisor.services[8080] = serve
    sandbox = await e2b.create()
    port = e2b.url.rpartition(":")[2]
    created = (await e2b.call("GET", f"/sandboxes/{sandbox.sandbox_id}"))[1]
    assert created["domain"] == f"localhost:{port}"
    host = {"Host": f"8080-{sandbox.sandbox_id}.localhost:{port}"}
    async with e2b.http.post(f"{e2b.url}/a/b?c=d", data=b"body", headers=host) as response:
        assert (response.status, response.headers["X-Of"]) == (201, "guest")
        assert await response.read() == b"/a/b?c=d body"
    host = {"Host": f"81-{sandbox.sandbox_id}.localhost:{port}"}
    async with e2b.http.get(e2b.url, headers=host) as response:
        assert response.status == 502
        assert "port is not open" in (await response.json())["message"]
    # The services have a host name, too.
    host = {"Host": f"49983-{sandbox.sandbox_id}.localhost:{port}", "X-Access-Token": sandbox.token}
    async with e2b.http.post(f"{e2b.url}/process.Process/List", json={}, headers=host) as response:
        assert await response.json() == {"processes": []}
    for name in ("attacker.example", f"8080-{sandbox.sandbox_id}.attacker.example"):
        async with e2b.http.get(e2b.url, headers={"Host": name}) as response:
            assert response.status == 421


async def test_web_sockets_reach_a_port_of_the_guest(world: CompatWorld, e2b: E2bWire) -> None:
    async def repeat(request: aiohttp.web.Request) -> aiohttp.web.WebSocketResponse:
        socket = aiohttp.web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(f"{request.path} {message.data}")
        return socket

    app = aiohttp.web.Application()
    app.router.add_get("/ws", repeat)
    runner = aiohttp.web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    own_port = runner.addresses[0][1]

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", own_port)

        back = asyncio.ensure_future(copy(theirs, writer))
        await copy(reader, ours)
        await close(ours)
        await back

    world.server.hypervisor.services[8081] = relay
    sandbox = await e2b.create()
    host = {"Host": f"8081-{sandbox.sandbox_id}.localhost"}
    async with e2b.http.ws_connect(f"{e2b.url}/ws", headers=host) as socket:
        await socket.send_str("hello")
        assert await socket.receive_str() == "/ws hello"
    await runner.cleanup()


async def test_a_pool_without_guest_access_is_refused_and_nothing_stays_open(
    world: CompatWorld, e2b: E2bWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = world.server.pool.settings
    monkeypatch.setattr(world.server.pool, "settings", settings.model_copy(update={"allow_guest_access": False}))
    status, refused = await e2b.call("POST", "/v2/sandboxes", {"templateID": "base"})
    assert (status, refused["code"]) == (403, 403)
    assert "allow_guest_access" in refused["message"]
    assert world.server.service.list_episodes() == []
