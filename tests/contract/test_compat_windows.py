"""The protocol of the Windows recipe's RPC server, on drawn desktops over a real socket."""

import io
from collections.abc import AsyncIterator

import pytest
from PIL import Image

from tests.support.compat import CompatWorld, compat_world

NOTE = "/home/user/note.txt"
TASK = {"task_id": "fake/unicode-note"}


@pytest.fixture
async def world() -> AsyncIterator[CompatWorld]:
    async with compat_world() as world:
        yield world


async def opened(world: CompatWorld) -> str:
    return str((await world.ok("windows-vm", "/vm", TASK))["path"])


async def test_a_machine_is_typed_into_photographed_read_scored_and_shut_down(world: CompatWorld) -> None:
    vm = await opened(world)
    assert await world.ok("windows-vm", "/health") == await world.ok("windows-vm", f"{vm}/health") == {"ok": True}
    status = await world.ok("windows-vm", f"{vm}/status")
    assert status == {"qemu_running": True, "qemu_pid": None, "hmp_socket": False}
    typed = await world.ok("windows-vm", f"{vm}/type", {"text": "Grüße, 漢字", "enter": True, "delay": 0.12})
    assert typed == {"typed": 9, "skipped": [], "total": 9}
    await world.ok("windows-vm", f"{vm}/type", {"text": "5 €"})
    assert await world.ok("windows-vm", f"{vm}/sendkey", {"key": "ctrl-s"}) == {"result": "", "key": "ctrl-s"}
    content = await world.ok("windows-vm", f"{vm}/guest-file", {"path": NOTE, "timeout": 10})
    assert content == {"content": "Grüße, 漢字\n5 €", "path": NOTE}
    assert await world.ok("windows-vm", f"{vm}/evaluate", {}) == {"reward": 1.0}
    assert await world.ok("windows-vm", f"{vm}/shutdown", {}) == {"result": "shutdown sent"}
    assert world.server.service.list_episodes() == []


async def test_a_screenshot_is_a_fresh_pixmap_of_the_size_that_is_reported(world: CompatWorld) -> None:
    vm = await opened(world)
    pictures = []
    for _ in range(2):
        async with world.http.get(f"http://{world.addresses['windows-vm']}{vm}/screenshot") as response:
            pictures.append(await response.read())
        assert await world.ok("windows-vm", f"{vm}/keys", {"keys": ["a", "shift-b"], "delay": 0.3}) == {"sent": 2}
    assert pictures[0] != pictures[1]
    with Image.open(io.BytesIO(pictures[0])) as picture:
        assert (picture.format, picture.size) == ("PPM", (1280, 800))
    assert await world.ok("windows-vm", f"{vm}/screenshot/size") == {"size": len(pictures[0])}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/exec", {"command": "id"}, (403, "ACCESS_DENIED")),
        ("/hmp", {"command": "info block"}, (403, "ACCESS_DENIED")),
        ("/reset", {}, (403, "ACCESS_DENIED")),
        ("/sendkey", {"key": ""}, (400, "BAD_FIELD")),
        ("/sendkey", {}, (400, "BAD_FIELD")),
        ("/sendkey", {"key": "info block\nquit"}, (200, "")),
        ("/type", {"text": "\udc80"}, (400, "BAD_FIELD")),
        ("/keys", {"keys": ["a"] * 65}, (400, "BAD_FIELD")),
        ("/guest-file", {"path": "relative.txt"}, (400, "BAD_FIELD")),
        ("/guest-file", {"path": "/home/user/missing"}, (404, "NOT_FOUND")),
    ],
)
async def test_what_is_not_served_is_refused_and_the_episode_continues(
    world: CompatWorld, path: str, body: object, expected: tuple[int, str]
) -> None:
    vm = await opened(world)
    status, content = await world.call("windows-vm", f"{vm}{path}", body)
    assert (status, content.get("reason", "")) == expected
    if status == 200:
        assert content["result"] == "no key is named 'info'"
    assert (await world.ok("windows-vm", f"{vm}/health"))["ok"] is True


async def test_a_key_after_the_end_or_for_an_unknown_machine_is_refused(world: CompatWorld) -> None:
    vm = await opened(world)
    assert await world.ok("windows-vm", f"{vm}/evaluate", {}) == {"reward": 0.0}
    assert await world.refused("windows-vm", f"{vm}/sendkey", {"key": "ret"}) == (409, "EPISODE_ENDED")
    assert await world.refused("windows-vm", "/vm/ep-unknown/sendkey", {"key": "ret"}) == (404, "EPISODE_NOT_FOUND")
    assert await world.refused("windows-vm", "/vm", {"task_id": "fake/unknown"}) == (404, "TASK_NOT_FOUND")
