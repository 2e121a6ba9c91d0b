"""The protocols of Slime-OSWorld's and AReaL's environment servers, on drawn desktops over real sockets."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from envd.api.security.tokens import NewToken
from envd.tasks.model import Task
from tests.support.compat import CompatWorld, compat_world, guarded_world, picture_of

TASK = {"id": "fake/count-to-five", "evaluator": {"func": "ignored"}}
SCREEN = [1280, 800]
COUNT = "pyautogui.click(819, 100, clicks=3); pyautogui.doubleClick()"
BROKEN = Task.model_validate(
    {
        "task_id": "broken/unreadable",
        "instruction": "Nothing can score this.",
        "level": 1,
        "checker": {"kind": "osworld", "func": "exact_match", "result": {"type": "vm_command_line", "command": "id"}},
    }
)


@pytest.fixture
async def world() -> AsyncIterator[CompatWorld]:
    async with compat_world(size=2) as world:
        yield world


async def slime_reset(world: CompatWorld, **env_config: object) -> dict[str, Any]:
    content: dict[str, Any] = await world.ok(
        "slime-osworld", "/reset", {"task_config": TASK, "env_config": {"screen_size": SCREEN, **env_config}}
    )
    return content


async def slime_step(world: CompatWorld, episode_id: str, action: str) -> dict[str, Any]:
    body = {"episode_id": episode_id, "action": action, "pause": 0}
    content: dict[str, Any] = await world.ok("slime-osworld", "/step", body)
    return content


async def until_one_waits(world: CompatWorld) -> None:
    async for pools in world.server.service.watch_pools():
        if pools[0].waiting_count:
            return


async def test_an_episode_of_slime_osworld_is_stepped_scored_and_closed(world: CompatWorld) -> None:
    opened = await slime_reset(world, provider_name="docker", headless=True, os_type="Ubuntu")
    episode_id = opened["episode_id"]
    assert picture_of(opened["screenshot_base64"]).size == (1280, 800)
    assert "<desktop-frame" in opened["accessibility_tree"]
    assert opened["instruction"] == "Click the button Count exactly five times."
    assert opened["terminal"] is None
    stepped = await slime_step(world, episode_id, COUNT)
    assert (stepped["step"], stepped["done"], stepped["reward"], stepped["info"]) == (1, False, 0.0, {})
    assert stepped["screenshot_base64"] != opened["screenshot_base64"]
    rendered = await world.ok("slime-osworld", "/render", {"episode_id": episode_id})
    assert rendered["screenshot_base64"] == stepped["screenshot_base64"]
    assert (await slime_step(world, episode_id, "done"))["done"] is True
    for _ in range(2):
        assert await world.ok("slime-osworld", "/evaluate", {"episode_id": episode_id}) == {"reward": 1.0}
    assert (await world.ok("slime-osworld", "/health"))["episodes"] == 1
    for _ in range(2):
        closed = await world.ok("slime-osworld", "/close", {"episode_id": episode_id})
        assert closed == {"status": "closed", "episode_id": episode_id}
    assert await world.ok("slime-osworld", "/health") == {"status": "ok", "episodes": 0}


async def test_an_episode_of_areal_is_stepped_scored_and_closed(world: CompatWorld) -> None:
    settings = {"screen_size": SCREEN, "provider_name": "docker", "cache_dir": "cache", "require_a11y_tree": False}
    session = f"/envs/{(await world.ok('areal', '/envs', settings))['session_id']}"
    assert await world.ok("areal", "/health") == {"status": "ok", "active_sessions": 1, "max_envs": 4}
    first = (await world.ok("areal", f"{session}/reset", {"task_config": TASK}))["obs"]
    assert picture_of(first["screenshot_b64"]).size == (1280, 800)
    assert first["accessibility_tree"] is None
    second = (await world.ok("areal", f"{session}/reset", {"task_config": TASK}))["obs"]
    assert second == first
    assert world.server.service.list_episodes() != []
    assert len(world.server.service.list_episodes()) == 1, "a second reset replaces the episode"
    stepped = await world.ok("areal", f"{session}/step", {"action": COUNT, "pause": 0.0})
    assert (stepped["reward"], stepped["done"], stepped["info"]) == (0.0, False, {})
    seen = (await world.ok("areal", f"{session}/obs"))["obs"]
    assert seen == stepped["obs"]
    assert await world.ok("areal", f"{session}/evaluate", {}) == {"reward": 1.0}
    for _ in range(2):
        assert await world.ok("areal", f"{session}/close", {}) == {"ok": True}
    assert world.server.service.list_episodes() == []
    assert await world.refused("areal", f"{session}/step", {"action": "WAIT"}) == (404, "EPISODE_NOT_FOUND")


@pytest.mark.parametrize(
    "action", ["import os; os.system('id')", "pyautogui.click(__import__('os'))", "click it", "", "(" * 40_000]
)
async def test_text_that_is_not_an_action_is_the_agents_mistake_and_is_not_executed(
    world: CompatWorld, action: str
) -> None:
    episode_id = (await slime_reset(world))["episode_id"]
    stepped = await slime_step(world, episode_id, action)
    assert stepped["info"]["error"].startswith("invalid action: ")
    assert (stepped["step"], stepped["done"]) == (0, False)
    assert (await slime_step(world, episode_id, COUNT))["step"] == 1, "the episode continues"
    assert await world.ok("slime-osworld", "/evaluate", {"episode_id": episode_id}) == {"reward": 1.0}


async def test_a_guest_that_refuses_an_action_reports_the_agents_mistake(world: CompatWorld) -> None:
    episode_id = (await slime_reset(world))["episode_id"]
    stepped = await slime_step(world, episode_id, "pyautogui.press('no-such-key')")
    assert "no-such-key" in stepped["info"]["error"]
    assert stepped["done"] is False


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/reset", {"task_config": {"id": "unknown"}}, (404, "TASK_NOT_FOUND")),
        ("/reset", {"task_config": {}}, (400, "BAD_FIELD")),
        ("/reset", {"task_config": {**TASK, "instruction": "Do something else."}}, (400, "BAD_FIELD")),
        ("/reset", {"task_config": TASK, "env_config": {"action_space": "computer_13"}}, (400, "BAD_FIELD")),
        ("/reset", {"task_config": TASK, "env_config": {"os_type": "Windows"}}, (400, "BAD_FIELD")),
        ("/reset", {"task_config": TASK, "env_config": {"headles": True}}, (400, "BAD_FIELD")),
        ("/reset", {"task_config": TASK, "env_config": {"screen_size": [1920, 1080]}}, (400, "BAD_FIELD")),
        ("/reset", ["no object"], (400, "BAD_FIELD")),
        ("/step", {"episode_id": "ep-unknown", "action": "WAIT"}, (404, "EPISODE_NOT_FOUND")),
        ("/step", {"episode_id": "ep-unknown"}, (400, "BAD_FIELD")),
        ("/render", {"episode_id": "ep-unknown"}, (404, "EPISODE_NOT_FOUND")),
        ("/evaluate", {"episode_id": "ep-unknown"}, (404, "EPISODE_NOT_FOUND")),
        ("/exec", {"command": "id"}, (404, "NOT_FOUND")),
    ],
)
async def test_a_bad_request_is_refused_and_opens_nothing(
    world: CompatWorld, path: str, body: object, expected: tuple[int, str]
) -> None:
    assert await world.refused("slime-osworld", path, body) == expected
    assert world.server.service.list_episodes() == []


@pytest.mark.parametrize("pause", [-1, 61, float("nan"), float("inf")])
async def test_a_senseless_pause_is_refused_and_the_episode_continues(world: CompatWorld, pause: float) -> None:
    episode_id = (await slime_reset(world))["episode_id"]
    body = {"episode_id": episode_id, "action": "WAIT", "pause": pause}
    assert await world.refused("slime-osworld", "/step", body) == (400, "BAD_FIELD")
    assert (await slime_step(world, episode_id, "WAIT"))["step"] == 1


@pytest.mark.parametrize("action", ["WAIT", COUNT, "nonsense"])
async def test_an_action_after_the_end_is_refused_and_the_score_remains(world: CompatWorld, action: str) -> None:
    episode_id = (await slime_reset(world))["episode_id"]
    await slime_step(world, episode_id, COUNT)
    await slime_step(world, episode_id, "DONE")
    body = {"episode_id": episode_id, "action": action}
    assert await world.refused("slime-osworld", "/step", body) == (409, "EPISODE_ENDED")
    assert await world.ok("slime-osworld", "/evaluate", {"episode_id": episode_id}) == {"reward": 1.0}


async def test_a_failed_evaluation_is_an_error_without_a_score() -> None:
    async with compat_world(extra_tasks=[BROKEN]) as world:
        opened = await world.ok("slime-osworld", "/reset", {"task_config": {"id": "unreadable"}})
        body = {"episode_id": opened["episode_id"]}
        for _ in range(2):
            assert await world.refused("slime-osworld", "/evaluate", body) == (500, "EVALUATOR_FAILED")


async def test_a_task_is_found_by_its_name_in_any_suite_unless_several_have_it() -> None:
    other = BROKEN.model_copy(update={"task_id": "other/unreadable"})
    async with compat_world(extra_tasks=[BROKEN, other]) as world:
        body = {"task_config": {"id": "unreadable"}}
        assert await world.refused("slime-osworld", "/reset", body) == (400, "BAD_FIELD")
        assert (await world.ok("slime-osworld", "/reset", {"task_config": {"id": "count-to-five"}}))["episode_id"]


async def test_a_reset_waits_for_a_machine_and_no_live_episode_is_closed_for_it() -> None:
    async with compat_world(capacity=1) as world:
        first = (await slime_reset(world))["episode_id"]
        waiting = asyncio.create_task(slime_reset(world))
        await until_one_waits(world)
        assert (await slime_step(world, first, COUNT))["step"] == 1
        await world.ok("slime-osworld", "/close", {"episode_id": first})
        assert (await waiting)["episode_id"] != first


async def test_a_client_that_leaves_during_its_reset_leaves_no_episode() -> None:
    async with compat_world(capacity=1) as world:
        first = (await slime_reset(world))["episode_id"]
        waiting = asyncio.create_task(slime_reset(world))
        await until_one_waits(world)
        waiting.cancel()
        await asyncio.wait({waiting})
        await world.ok("slime-osworld", "/close", {"episode_id": first})
        # The cancelled one gets the machine, for 10 s at most.
        assert (await slime_reset(world))["episode_id"] != first


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[CompatWorld, NewToken, NewToken]]:
    async with guarded_world(tmp_path) as world:
        yield world


async def test_only_a_valid_token_in_any_of_its_four_places_is_admitted(
    guarded: tuple[CompatWorld, NewToken, NewToken],
) -> None:
    world, alice, _ = guarded
    token, unknown = alice.secret, alice.secret[:-1] + ("a" if alice.secret[-1] != "a" else "b")
    for wrong in ({}, {"Authorization": f"Bearer {unknown}"}, {"x-paas-secret-token": unknown}):
        status, content = await world.call("slime-osworld", "/close", {"episode_id": "ep-1"}, headers=wrong)
        assert (status, content["reason"]) == (401, "UNAUTHENTICATED")
        assert unknown not in content["error"]
    assert await world.refused("areal", f"/token/{unknown}/envs", {}) == (401, "UNAUTHENTICATED")
    basic = base64.b64encode(f"envd:{token}".encode()).decode()
    for right in (
        {"Authorization": f"Bearer {token}"},
        {"Authorization": f"Basic {basic}"},
        {"x-paas-secret-token": token},
    ):
        status, _ = await world.call("slime-osworld", "/close", {"episode_id": "ep-1"}, headers=right)
        assert status == 200
    assert "session_id" in await world.ok("areal", f"/token/{token}/envs", {})
    assert await world.ok("areal", f"/token/{unknown}/health"), "health needs no token"


async def test_an_episode_and_a_session_are_their_owners_alone(guarded: tuple[CompatWorld, NewToken, NewToken]) -> None:
    world, alice, bob = guarded
    opened = await world.ok("slime-osworld", f"/token/{alice.secret}/reset", {"task_config": TASK})
    body = {"episode_id": opened["episode_id"]}
    for path in ("/step", "/render", "/evaluate"):
        stolen = body | ({"action": "WAIT"} if path == "/step" else {})
        refusal = await world.refused("slime-osworld", f"/token/{bob.secret}{path}", stolen)
        assert refusal == (404, "EPISODE_NOT_FOUND")
    await world.ok("slime-osworld", f"/token/{bob.secret}/close", body)
    assert await world.ok("slime-osworld", f"/token/{alice.secret}/evaluate", body) == {"reward": 0.0}
    session = (await world.ok("areal", f"/token/{alice.secret}/envs", {}))["session_id"]
    refusal = await world.refused("areal", f"/token/{bob.secret}/envs/{session}/reset", {"task_config": TASK})
    assert refusal == (404, "EPISODE_NOT_FOUND")


async def test_a_request_that_a_foreign_page_could_send_is_refused(world: CompatWorld) -> None:
    url = f"http://{world.addresses['slime-osworld']}/reset"
    async with world.http.post(url, data='{"task_config": {"id": "fake/count-to-five"}}') as response:
        assert response.status == 400
    rebound = {"Host": "attacker.example"}
    async with world.http.post(url, json={"task_config": TASK}, headers=rebound) as response:
        assert response.status == 421
    assert world.server.service.list_episodes() == []
