"""What one caller of the compatibility protocols can hold or delay: bodies, sessions, and the parsing of actions."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cuaenv.actions import Action
from cuaenv.client import StepResult
from envd.api.security.tokens import NewToken
from envd.integrations.compat import callers
from envd.integrations.compat.routes import MAX_BODY_BYTES
from tests.support.clock import until
from tests.support.compat import CompatWorld, compat_world, guarded_world

SLIME, AREAL, SANDBOX = "slime-osworld", "areal", "areal-sandbox"
TASK = {"id": "fake/count-to-five"}
JSON = {"Content-Type": "application/json"}


Guarded = tuple[CompatWorld, NewToken, NewToken]


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded_world(tmp_path) as world:
        yield world


async def post(world: CompatWorld, protocol: str, path: str, body: object) -> tuple[int, str]:
    async with world.http.post(f"http://{world.addresses[protocol]}{path}", data=body, headers=JSON) as response:
        return response.status, (await response.json()).get("reason", "")


@pytest.mark.parametrize("action", ["pyautogui.click(1,1)\n" * 9000, "1;" * 9000, "'" * 200_000])
async def test_an_action_that_is_slow_to_parse_is_the_agents_mistake_and_is_not_parsed(
    action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with compat_world() as world:
        episode_id = (await world.ok(SLIME, "/reset", {"task_config": TASK}))["episode_id"]
        monkeypatch.setattr("cuaenv.agent_text.pyautogui_calls._parse", pytest.fail)
        body = {"episode_id": episode_id, "action": action, "pause": 0}
        content = await world.ok(SLIME, "/step", body)
        assert "characters" in content["info"]["error"]
        assert content["done"] is False


async def test_a_body_above_its_routes_limit_is_refused(guarded: Guarded) -> None:
    world, alice, _ = guarded
    large = io.BytesIO(json.dumps({"action": "x" * MAX_BODY_BYTES}).encode())
    assert await post(world, SLIME, f"/token/{alice.secret}/step", large) == (413, "BAD_FIELD")


async def test_json_of_deep_or_many_values_is_refused(guarded: Guarded) -> None:
    world, alice, _ = guarded
    for document in ("[" * 200_000, '{"action": [' + "[]," * 200_000 + "0]}"):
        assert await post(world, SLIME, f"/token/{alice.secret}/step", document) == (400, "BAD_FIELD")


async def test_the_bytes_that_a_callers_bodies_hold_are_bounded(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, alice, bob = guarded
    monkeypatch.setattr(callers, "_MAX_HELD_BYTES", 100)
    arrived = asyncio.Event()

    async def slow(byte_count: int) -> AsyncIterator[bytes]:
        yield b"{"
        await arrived.wait()
        yield b" " * (byte_count - 2) + b"}"

    url = f"http://{world.addresses[AREAL]}/token/{alice.secret}/envs"
    held = asyncio.create_task(world.http.post(url, data=slow(90), headers=JSON | {"Content-Length": "90"}))
    async with asyncio.timeout(60):
        while not await _is_refused(world, alice, b"{}" + b" " * 20):
            await asyncio.sleep(0)
    assert await post(world, AREAL, f"/token/{bob.secret}/envs", b"{}" + b" " * 20) == (200, "")
    arrived.set()
    async with await held as response:
        assert response.status == 200
    assert not await _is_refused(world, alice, b"{}" + b" " * 20)


async def _is_refused(world: CompatWorld, token: NewToken, body: bytes) -> bool:
    status, reason = await post(world, AREAL, f"/token/{token.secret}/envs", body)
    assert (status, reason) in {(200, ""), (429, "RATE_LIMITED")}
    return status == 429


async def test_a_body_of_unknown_size_counts_as_the_largest(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    world, alice, _ = guarded
    monkeypatch.setattr(callers, "_MAX_HELD_BYTES", MAX_BODY_BYTES - 1)

    async def chunked() -> AsyncIterator[bytes]:
        yield b"{}"

    assert await post(world, AREAL, f"/token/{alice.secret}/envs", chunked()) == (429, "RATE_LIMITED")
    assert await post(world, AREAL, f"/token/{alice.secret}/envs", b"{}") == (200, "")


async def test_one_token_cannot_take_the_sessions_of_another(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    world, alice, bob = guarded
    monkeypatch.setattr(callers, "_MAX_SESSIONS", 2)
    ids = [(await world.ok(AREAL, f"/token/{alice.secret}/envs", {}))["session_id"] for _ in range(2)]
    assert await world.refused(AREAL, f"/token/{alice.secret}/envs", {}) == (429, "POOL_EXHAUSTED")
    assert "session_id" in await world.ok(AREAL, f"/token/{bob.secret}/envs", {})
    await world.ok(AREAL, f"/token/{alice.secret}/envs/{ids[0]}/close", {})
    assert "session_id" in await world.ok(AREAL, f"/token/{alice.secret}/envs", {})


async def test_an_idle_session_loses_its_episode_and_then_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async with compat_world() as world:
        session_id = (await world.ok(AREAL, "/envs", {}))["session_id"]
        await world.ok(AREAL, f"/envs/{session_id}/reset", {"task_config": TASK})
        await world.callers[AREAL].sweep()
        assert len(world.server.service.list_episodes()) == 1
        monkeypatch.setattr(callers, "_EPISODE_IDLE_S", 0.0)
        await world.callers[AREAL].sweep()
        assert world.server.service.list_episodes() == []
        assert await world.refused(AREAL, f"/envs/{session_id}/evaluate", {}) == (400, "BAD_FIELD")
        await world.ok(AREAL, f"/envs/{session_id}/reset", {"task_config": TASK})
        monkeypatch.setattr(callers, "_SESSION_IDLE_S", 0.0)
        await world.callers[AREAL].sweep()
        assert world.server.service.list_episodes() == []
        refusal = await world.refused(AREAL, f"/envs/{session_id}/reset", {"task_config": TASK})
        assert refusal == (404, "EPISODE_NOT_FOUND")


async def test_a_session_whose_call_runs_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "_EPISODE_IDLE_S", 0.0)
    async with compat_world() as world:
        episode_id = (await world.ok(SLIME, "/reset", {"task_config": TASK}))["episode_id"]
        body = {"episode_id": episode_id, "action": "WAIT", "pause": 0.5}
        stepping = asyncio.create_task(world.ok(SLIME, "/step", body))
        caller = await world.callers[SLIME].identify([])
        await until(lambda: caller.sessions[episode_id].call_count == 1)
        await world.callers[SLIME].sweep()
        assert (await stepping)["step"] == 1
        await world.callers[SLIME].sweep()
        assert world.server.service.list_episodes() == []


async def test_a_step_whose_client_left_is_counted_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with compat_world() as world:
        episode_id = (await world.ok(SLIME, "/reset", {"task_config": TASK}))["episode_id"]
        caller = await world.callers[SLIME].identify([])
        session = caller.sessions[episode_id]
        body = {"episode_id": episode_id, "action": "WAIT", "pause": 0.5}
        leaving = asyncio.create_task(world.call(SLIME, "/step", body))
        episode = session.episode
        assert episode is not None
        step, begun = episode.step, asyncio.Event()

        async def begin(*actions: Action, **options: Any) -> StepResult:
            begun.set()
            result: StepResult = await step(*actions, **options)
            return result

        monkeypatch.setattr(episode, "step", begin)
        await begun.wait()
        leaving.cancel()
        await asyncio.wait({leaving})
        await until(lambda: session.call_count == 0)
        assert (await world.ok(SLIME, "/step", body | {"pause": 0}))["step"] == 2


async def test_a_revoked_token_loses_its_sessions(tmp_path: Path) -> None:
    async with guarded_world(tmp_path) as (world, alice, bob):
        session_id = (await world.ok(AREAL, f"/token/{alice.secret}/envs", {}))["session_id"]
        path = tmp_path / "tokens"
        path.write_text(f"{bob.line}\n", encoding="utf-8")
        reset = f"/token/{alice.secret}/envs/{session_id}/reset"
        async with asyncio.timeout(60):
            while (refusal := await world.call(AREAL, reset, {"task_config": TASK}))[0] == 200:
                await asyncio.sleep(0.1)  # the file is looked at once a second
        assert (refusal[0], refusal[1]["reason"]) == (401, "UNAUTHENTICATED")
        assert await world.refused(AREAL, f"/token/{alice.secret}/envs", {}) == (401, "UNAUTHENTICATED")
        assert (await world.ok(AREAL, "/health"))["active_sessions"] == 0


async def test_sessions_with_long_ids_of_equal_ends_are_different_episodes() -> None:
    async with compat_world(size=2) as world:
        sandboxes = set()
        for first in "AB":
            headers = {"x-paas-session-id": first + "x" * 80}
            status, content = await world.call(SANDBOX, "/sandbox/start", {"task_id": TASK["id"]}, headers=headers)
            assert status == 200, content
            sandboxes.add(content["sandboxId"])
        assert len(sandboxes) == 2
