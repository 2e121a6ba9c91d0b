"""The gateway protocol of AReaL's OSWorld example on drawn desktops, with the SDK that its client imports."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from envd.integrations.compat import areal_sandbox
from tests.support.compat import CompatWorld, compat_world
from trainer.adapters.areal.pssdk import BaseSandboxClusterTool, SandboxError, with_retry

TASK = {"task_id": "fake/save-note"}
NAME = "areal-sandbox"


@pytest.fixture
async def world() -> AsyncIterator[CompatWorld]:
    async with compat_world(capacity=2) as world:
        yield world


def tool(world: CompatWorld, session_id: str | None = None) -> BaseSandboxClusterTool:
    return BaseSandboxClusterTool(f"http://{world.addresses[NAME]}", "", session_id)


async def call(world: CompatWorld, session_id: str, path: str, body: object | None = None) -> tuple[int, Any]:
    return await world.call(NAME, path, body, headers={"x-paas-session-id": session_id})


async def test_a_session_runs_commands_in_its_guest_and_sees_its_screen_and_tree(world: CompatWorld) -> None:
    sandbox = tool(world)
    started = await asyncio.to_thread(sandbox.sandbox_start, TASK)
    assert started["sandboxId"] == world.server.service.list_episodes()[0].episode_id
    command = {"command": ["echo", "hello"], "shell": False}
    status, content = await call(world, sandbox.session_id, "/execute", command)
    assert (status, content["status"], content["output"]) == (200, "success", "hello\n")
    url, headers = f"http://{world.addresses[NAME]}", {"x-paas-session-id": sandbox.session_id}
    async with world.http.get(f"{url}/screenshot", headers=headers) as response:
        assert (await response.read()).startswith(b"\x89PNG")
    status, content = await call(world, sandbox.session_id, "/accessibility")
    assert "<desktop-frame" in content["AT"]
    await asyncio.to_thread(sandbox.sandbox_stop)
    await asyncio.to_thread(sandbox.sandbox_stop)
    assert world.server.service.list_episodes() == []
    assert (await call(world, sandbox.session_id, "/execute", command))[0] == 404


async def test_starts_of_a_session_are_one_episode_until_it_is_stopped(world: CompatWorld) -> None:
    sandbox = tool(world, "session-1")
    starts = [asyncio.to_thread(sandbox.sandbox_start, TASK) for _ in range(3)]
    assert len({each["sandboxId"] for each in await asyncio.gather(*starts)}) == 1
    assert len(world.server.service.list_episodes()) == 1
    first = world.server.service.list_episodes()[0]
    await asyncio.to_thread(sandbox.sandbox_stop)
    again = await asyncio.to_thread(sandbox.sandbox_start)
    assert again["sandboxId"] != first.episode_id
    restarted = world.server.service.list_episodes()[0]
    assert restarted.spec.task_id == first.spec.task_id, "a start after a revert names no task"


async def test_a_start_after_the_episode_was_lost_opens_another(world: CompatWorld) -> None:
    sandbox = tool(world, "session-1")
    first = await asyncio.to_thread(sandbox.sandbox_start, TASK)
    await world.server.service.close(first["sandboxId"])
    status, content = await call(world, sandbox.session_id, "/execute", {"command": ["true"]})
    assert (status, content["reason"]) == (404, "EPISODE_NOT_FOUND")
    starts = [asyncio.to_thread(sandbox.sandbox_start) for _ in range(3)]
    (second,) = {each["sandboxId"] for each in await asyncio.gather(*starts)}
    assert second != first["sandboxId"]
    assert [each.episode_id for each in world.server.service.list_episodes()] == [second]
    status, _ = await call(world, sandbox.session_id, "/execute", {"command": ["true"]})
    assert status == 200


async def test_a_stop_during_a_start_leaves_no_episode() -> None:
    async with compat_world(capacity=1) as world:
        first = (await call(world, "first", "/sandbox/start", TASK))[1]["sandboxId"]
        starting = asyncio.create_task(call(world, "second", "/sandbox/start", TASK))
        async for pools in world.server.service.watch_pools():
            if pools[0].waiting_count:
                break
        assert (await call(world, "second", "/sandbox/stop", {}))[0] == 200
        await world.server.service.close(first)
        status, content = await starting
        assert (status, content["reason"]) == (404, "EPISODE_NOT_FOUND")
        assert world.server.service.list_episodes() == []


async def test_a_guest_whose_service_does_not_answer_is_an_error(
    world: CompatWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = tool(world)
    await asyncio.to_thread(sandbox.sandbox_start, TASK)
    monkeypatch.setattr(areal_sandbox, "_GUEST_PORT", 81)
    status, content = await call(world, sandbox.session_id, "/execute", {"command": ["true"]})
    assert (status, content["reason"]) == (409, "GUEST_REFUSED")
    assert "port 81 of the guest: Connection refused" in content["error"]


async def test_a_drawn_desktop_answers_what_controllers_ask_first_and_gives_files_back(world: CompatWorld) -> None:
    sandbox = tool(world)
    await asyncio.to_thread(sandbox.sandbox_start, TASK)
    url, headers = f"http://{world.addresses[NAME]}", {"x-paas-session-id": sandbox.session_id}
    async with world.http.get(f"{url}/platform", headers=headers) as response:
        assert await response.text() == "Linux"
    assert (await call(world, sandbox.session_id, "/screen_size", {}))[1] == {"width": 1280, "height": 800}
    status, position = await call(world, sandbox.session_id, "/cursor_position")
    assert (status, len(position)) == (200, 2)
    script = {"script": "#!/bin/bash\necho typed >> ~/note.txt"}
    status, ran = await call(world, sandbox.session_id, "/run_bash_script", script)
    assert (status, ran["status"], ran["returncode"]) == (200, "success", 0)
    async with world.http.post(f"{url}/file", headers=headers, data={"file_path": "~/note.txt"}) as response:
        assert await response.read() == b"typed\n"
    async with world.http.post(f"{url}/file", headers=headers, data={"file_path": "/none"}) as response:
        assert response.status == 404
    status, ran = await call(world, sandbox.session_id, "/run_bash_script", {"script": "for i in 1; do echo $i; done"})
    assert (ran["status"], ran["returncode"]) == ("error", 2)
    assert "supports only" in ran["output"]
    status, refused = await call(world, sandbox.session_id, "/wallpaper", {})
    assert status == 404
    assert "drawn desktops have no such route" in str(refused)


@pytest.mark.parametrize("path", ["/envd/session", "/envd/type_text", "/../envd/session", "/exec"])
async def test_routes_that_serve_the_daemon_are_not_reachable(world: CompatWorld, path: str) -> None:
    sandbox = tool(world)
    await asyncio.to_thread(sandbox.sandbox_start, TASK)
    assert (await call(world, sandbox.session_id, path, {}))[0] == 404


async def test_a_bad_session_or_task_is_refused(world: CompatWorld) -> None:
    assert (await call(world, "", "/sandbox/start", TASK))[0] == 400
    assert (await call(world, "a b", "/sandbox/start", TASK))[0] == 400
    assert (await call(world, "never-started", "/execute", {"command": ["id"]}))[0] == 404
    with pytest.raises(SandboxError, match="TASK_NOT_FOUND") as caught:
        await asyncio.to_thread(tool(world).sandbox_start, {"task_id": "fake/unknown"})
    assert caught.value.status == 404
    assert world.server.service.list_episodes() == []


def test_the_tool_waits_for_machines_and_retries_server_errors_but_no_others() -> None:
    statuses = [429, 429, 500, 200]

    @with_retry(max_attempts=2, retry_interval=0.0)
    class Tool(BaseSandboxClusterTool):
        def sandbox_start(
            self, body: dict[str, Any] | None = None, call_timeout: float | None = None
        ) -> dict[str, Any]:
            status = statuses.pop(0)
            if status != 200:
                raise SandboxError("failed", status=status)
            return {"sandboxId": "one"}

    assert Tool("http://127.0.0.1:1", "").sandbox_start() == {"sandboxId": "one"}
    for rest in ([404, 200], [500, 503, 200], [0, 0, 200]):
        statuses[:] = rest
        with pytest.raises(SandboxError):
            Tool("http://127.0.0.1:1", "").sandbox_start()
        assert statuses == [200]
