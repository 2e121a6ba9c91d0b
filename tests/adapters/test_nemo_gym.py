"""The checkpoints of NeMo Gym's rollouts on drawn desktops, with a stub of NeMo RL's controller."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import Click, Done, TypeText, Wait
from envd.base.config import CheckpointsConfig
from envd.episodes.checkpoints.store import CheckpointStore
from tests.support.desktops import DrawnDesktops
from trainer.adapters.nemo_gym import CheckpointParticipant, ProtocolError
from trainer.adapters.session import SessionSettings

TASK = "fake/enable"
BOX = Click(822, 167)


class Controller:
    """What NeMo RL's actor sends to a resources server, and what it requires of the answers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def body(self, checkpoint_id: str, *, deadline_s: float = 30.0, **more: Any) -> dict[str, Any]:
        return {"schema_version": 1, "checkpoint_id": checkpoint_id, "deadline_ts": time.time() + deadline_s, **more}

    async def save(self, server: CheckpointParticipant, checkpoint_id: str) -> dict[str, int]:
        """Return the revision of each execution."""
        capabilities = server.capabilities()
        assert (capabilities["component"], capabilities["checkpoint_mode"]) == ("resources_servers", "export_restore")
        prepared = await server.prepare(self.body(checkpoint_id))
        assert (prepared["state"], prepared["sessions"]) == ("prepared", len(prepared["inventory"]))
        committed = await server.commit(self.body(checkpoint_id, checkpoint_dir=str(self._directory)))
        manifest = self._directory / "resources" / server.capabilities()["name"] / "manifest.json"
        assert hashlib.sha256(manifest.read_bytes()).hexdigest() == committed["manifest_digest"]
        assert await server.resume(self.body(checkpoint_id)) == {"state": "accepting"}
        return {f"{each['rollout_id']}-{each['attempt_index']}": each["revision"] for each in prepared["inventory"]}

    async def restore(self, server: CheckpointParticipant, checkpoint_id: str) -> dict[str, Any]:
        return await server.restore(self.body(checkpoint_id, checkpoint_dir=str(self._directory)))


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[DrawnDesktops, SessionSettings]]:
    store = CheckpointStore(directory / "checkpoints", settings=CheckpointsConfig(), reserve_bytes=0)
    desktops = await asyncio.to_thread(lambda: DrawnDesktops(size=2, capacity=4, checkpoints=store))
    try:
        yield desktops, SessionSettings.connect(desktops.address)
        await asyncio.to_thread(desktops.wait_returned)
    finally:
        await asyncio.to_thread(desktops.close)


async def test_rollouts_continue_in_another_process_as_the_next_attempt(tmp_path: Path) -> None:
    control = Controller(tmp_path)
    async with served(tmp_path) as (_, settings):
        async with CheckpointParticipant("desktop", settings) as first:
            await first.open("one", 0, TASK)
            await first.open("two", 0, TASK)
            async with first.acting("one", 0) as session:
                await session.step(BOX)
            async with first.acting("two", 0) as session:
                await session.step(BOX)
                await session.step(Done())
            assert await control.save(first, "step-7") == {"one-0": 1, "two-0": 1}
            async with first.acting("one", 0) as session:
                expected = (await session.step(TypeText("x"))).observation.frame_id
                # The saved state is not changed by what follows.
                await session.step(BOX)
        async with CheckpointParticipant("desktop", settings) as second:
            restored = await control.restore(second, "restore-1")
            assert restored == {"sessions": 2, "source_checkpoint_id": "step-7"}
            assert second.capabilities()["phase"] == "restored_paused"
            waiting = asyncio.create_task(_step(second, "one", 1, TypeText("x")))
            await asyncio.sleep(0)
            assert not waiting.done()
            await second.resume(control.body("restore-1"))
            assert (await waiting).observation.frame_id == expected
            with pytest.raises(ProtocolError, match="attempt 0 has no session"):
                await _step(second, "one", 0, BOX)
            with pytest.raises(ProtocolError, match="its agent has ended it"):
                await _step(second, "two", 1, BOX)
            assert [(await second.score(rollout, 1)).value for rollout in ("one", "two")] == [1.0, 1.0]
            # An old attempt retires nothing, and a second time does nothing.
            for attempt in (0, 1, 1):
                await second.retire("one", attempt)
            await second.retire("two", 1)


async def _step(server: CheckpointParticipant, rollout: str, attempt: int, action: Any) -> Any:
    async with server.acting(rollout, attempt) as session:
        return await session.step(action)


async def test_a_checkpoint_waits_for_a_running_step_and_a_missed_deadline_reopens(tmp_path: Path) -> None:
    control = Controller(tmp_path)
    async with served(tmp_path) as (_, settings), CheckpointParticipant("desktop", settings) as server:
        await server.open("one", 0, TASK)
        entered, leave = asyncio.Event(), asyncio.Event()

        async def busy() -> None:
            async with server.acting("one", 0):
                entered.set()
                await leave.wait()

        running = asyncio.create_task(busy())
        await entered.wait()
        with pytest.raises(TimeoutError):
            await server.prepare(control.body("late", deadline_s=0.05))
        assert (server.capabilities()["phase"], server.capabilities()["active_checkpoint_id"]) == ("idle", None)
        preparing = asyncio.create_task(server.prepare(control.body("next")))
        await asyncio.sleep(0)
        with pytest.raises(ProtocolError, match="the server is preparing next"):
            await server.prepare(control.body("other"))
        leave.set()
        assert (await preparing)["inventory"][0]["revision"] == 1
        assert (await server.prepare(control.body("next")))["sessions"] == 1, "repeated"
        for stale in (server.commit, server.resume):
            with pytest.raises(ProtocolError, match="the server is prepared next"):
                await stale(control.body("other", checkpoint_dir=str(tmp_path)))
        await server.resume(control.body("next"))
        await running
        await _step(server, "one", 0, Wait(timedelta(milliseconds=1)))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda manifest: manifest.update(participant="browser"), "is of the server browser"),
        (lambda manifest: manifest["executions"][1].pop("checkpoint"), "cannot be read"),
        (lambda manifest: manifest["executions"][1]["checkpoint"].update(checkpoint_id="ckpt-0"), "ckpt-0"),
        (lambda manifest: manifest.update(schema_version=2), "cannot be read"),
    ],
)
async def test_a_damaged_manifest_opens_nothing_and_can_be_restored_later(
    tmp_path: Path, damage: Any, text: str
) -> None:
    control = Controller(tmp_path)
    file = tmp_path / "resources/desktop/manifest.json"
    async with served(tmp_path) as (desktops, settings):
        async with CheckpointParticipant("desktop", settings) as first:
            for rollout in ("one", "two"):
                await first.open(rollout, 0, TASK)
            await control.save(first, "step-7")
        await asyncio.to_thread(desktops.wait_returned)
        whole = file.read_bytes()
        manifest = json.loads(whole)
        damage(manifest)
        file.write_text(json.dumps(manifest), encoding="utf-8")
        async with CheckpointParticipant("desktop", settings) as second:
            with pytest.raises(Exception, match=text):
                await control.restore(second, "restore-1")
            assert second.capabilities()["phase"] == "restore_failed_paused"
            await asyncio.to_thread(desktops.wait_returned)
            file.write_bytes(whole)
            assert (await control.restore(second, "restore-1"))["sessions"] == 2


async def test_an_attempt_has_one_session_and_unknown_fields_are_refused(tmp_path: Path) -> None:
    control = Controller(tmp_path)
    async with served(tmp_path) as (_, settings), CheckpointParticipant("desktop", settings) as server:
        await server.open("one", 1, TASK)
        for attempt in (0, 1):
            with pytest.raises(ProtocolError, match="attempt 1 has a session"):
                await server.open("one", attempt, TASK)
        await server.open("one", 2, TASK)
        for endless in (float("nan"), float("inf")):
            with pytest.raises(ProtocolError, match="malformed request"):
                await server.prepare(control.body("step-1", deadline_s=endless))
        with pytest.raises(ProtocolError, match="malformed request"):
            await server.prepare(control.body("step-1", force=True))
        with pytest.raises(ProtocolError, match="malformed request"):
            await server.prepare(control.body("../step"))


async def test_a_session_that_opens_during_a_checkpoint_is_not_in_it_and_an_attempt_is_opened_once(
    tmp_path: Path,
) -> None:
    control = Controller(tmp_path)
    async with served(tmp_path) as (desktops, settings), CheckpointParticipant("desktop", settings) as server:
        opening = asyncio.create_task(server.open("late", 0, TASK))
        await asyncio.sleep(0)
        assert await server.prepare(control.body("step-1")) == {"sessions": 0, "state": "prepared", "inventory": []}
        await asyncio.to_thread(desktops.wait_until, lambda: desktops.leased_count == 1)
        committed = await server.commit(control.body("step-1", checkpoint_dir=str(tmp_path)))
        assert (committed["sessions"], opening.done()) == (0, False)
        await server.resume(control.body("step-1"))
        await opening
        both = await asyncio.gather(*(server.open("one", 0, TASK) for _ in range(2)), return_exceptions=True)
        assert [type(each) for each in both].count(ProtocolError) == 1
        await asyncio.to_thread(desktops.wait_until, lambda: desktops.leased_count == 2)
