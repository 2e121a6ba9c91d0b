"""The session that all adapters share, over gRPC to drawn desktops: scores, faults, groups, and no machine left."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import BadRequest, Click, Done, EpisodeEnded, PressKeys, State, TaskNotFound, TypeText, View, Wait
from envd.base.config import CheckpointsConfig
from envd.episodes.checkpoints.store import CheckpointStore
from tests.support.clock import until
from tests.support.desktops import DrawnDesktops
from tests.support.program import run_program
from trainer.adapters.background import blocking
from trainer.adapters.session import Session, SessionSettings, SessionVoid, open_session, session, task_of_row
from trainer.agent.ownership import is_fault

TASK = "fake/enable"
BOX = Click(822, 167)
MINUTE = timedelta(minutes=1)


def settings_of(desktops: DrawnDesktops, **options: Any) -> SessionSettings:
    return SessionSettings.connect(desktops.address, **options)


async def test_points_and_errors_refer_to_the_scaled_picture(desktops: DrawnDesktops) -> None:
    async with session(TASK, settings=settings_of(desktops, view=View(max_width_px=640))) as one:
        assert one.screenshot.size == (640, 400)
        result = await one.step(Click(411, 84), Click(700, 10), Click(1, -1), PressKeys(("no-such-key",)))
        assert (await one.score()).value == 1.0
    assert result.action_errors[:3] == (
        "",
        "point (700, 10) is outside of the picture, which is 640x400 pixels",
        "point (1, -1) is outside of the picture, which is 640x400 pixels",
    )
    assert "no-such-key" in result.action_errors[3]


async def test_a_solved_task_scores_1_and_its_machine_is_released_at_once(desktops: DrawnDesktops) -> None:
    async with session(TASK, settings=settings_of(desktops)) as one:
        assert "Enabled" in one.instruction
        before = one.screenshot
        result = await one.step(BOX)
        assert (before.size, one.screenshot.size) == ((1280, 800), (1280, 800))
        assert before.tobytes() != one.screenshot.tobytes()
        assert (result.done, one.done) == (False, False)
        assert (await one.step(Done())).done
        assert one.done
        assert not one.truncated
        score = await one.score()
        assert (score.value, score.void) == (1.0, "")
        await until(lambda: desktops.leased_count == 0)
        assert await one.score() is score


async def test_a_task_without_actions_scores_0_in_one_evaluation(desktops: DrawnDesktops) -> None:
    async with session({"task_id": TASK}, settings=settings_of(desktops)) as one:
        first, second = await asyncio.gather(one.score(), one.score())
    assert first.value == 0.0
    assert first is second


async def test_a_lost_machine_gives_no_score(desktops: DrawnDesktops) -> None:
    async with session(TASK, settings=settings_of(desktops)) as one:
        await one.step(BOX)
        desktops.kill_used_machines()
        with pytest.raises(SessionVoid, match="MACHINE_LOST"):
            await one.step(Done())
        score = await one.score()
        assert score.value is None
        assert "MACHINE_LOST" in score.void
        with pytest.raises(SessionVoid, match="MACHINE_LOST"):
            await one.step(Done())


async def test_a_machine_that_is_lost_before_the_evaluation_gives_no_score(desktops: DrawnDesktops) -> None:
    async with session(TASK, settings=settings_of(desktops)) as one:
        await one.step(BOX, Done())
        desktops.kill_used_machines()
        assert (await one.score()).value is None
        assert one.void


async def test_members_of_a_group_start_on_forks_of_one_state(desktops: DrawnDesktops) -> None:
    settings = settings_of(desktops, group_size=3, group_wait=MINUTE)
    row = {"task_id": "fake/append-line", "group": "g1"}
    members = await asyncio.gather(*(open_session(row, settings=settings) for _ in range(3)))
    try:
        assert len({member.episode.group_id for member in members}) == 1
        assert len({member.episode.origin for member in members}) == 1
        other = await open_session(row, settings=settings_of(desktops))
        assert other.episode.group_id != members[0].episode.group_id
        await other.close()
    finally:
        await asyncio.gather(*(member.close() for member in members))


async def test_a_member_that_never_comes_is_closed(desktops: DrawnDesktops) -> None:
    async with session(TASK, settings=settings_of(desktops, group_size=2, group_wait=timedelta(0))) as one:
        await until(lambda: desktops.leased_count == 1)
        assert not one.done
        await one.step(BOX, Done())
        assert (await one.score()).value == 1.0


async def test_a_cancelled_opening_leaves_nothing(desktops: DrawnDesktops) -> None:
    settings = settings_of(desktops)
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(session(TASK, settings=settings))
        opening = asyncio.create_task(open_session(TASK, settings=settings))
        await until(lambda: desktops.waiting_count == 1)
        opening.cancel()
        await asyncio.wait({opening})
        assert opening.cancelled()


async def test_a_cancelled_step_voids_the_session(desktops: DrawnDesktops) -> None:
    async with session(TASK, settings=settings_of(desktops)) as one:
        step = asyncio.create_task(one.step(BOX, Wait(MINUTE)))
        await until(lambda: desktops.used_count > 0)
        step.cancel()
        await asyncio.wait({step})
        assert step.cancelled()
        assert "cancelled" in (await one.score()).void


async def test_an_idle_session_is_void_and_its_machine_is_released(desktops: DrawnDesktops) -> None:
    one = await open_session(TASK, settings=settings_of(desktops, idle_timeout=timedelta(seconds=0.01)))
    await until(lambda: desktops.leased_count == 0)
    score = await one.score()
    assert score.value is None
    assert "without a call" in score.void


async def test_mistakes_of_the_caller_harm_nothing(desktops: DrawnDesktops) -> None:
    async with session(TASK, settings=settings_of(desktops)) as one:
        with pytest.raises(BadRequest, match="incomplete position"):
            await one.step(Click(3))
        with pytest.raises(BadRequest):
            await one.step()
        with pytest.raises(BadRequest, match="malformed action"):
            await one.step("click")  # type: ignore[arg-type]
        assert (await one.step(Click(99_999, 1))).errors[0]
        with pytest.raises(TaskNotFound) as unknown:
            await open_session("fake/none", settings=settings_of(desktops))
        assert not is_fault(unknown.value)
        await one.step(BOX, Done())
        with pytest.raises(EpisodeEnded):
            await one.step(TypeText("late"))
        assert (await one.score()).value == 1.0
        with pytest.raises(EpisodeEnded, match="is closed"):
            await one.step(TypeText("late"))


async def test_a_closed_session_cannot_be_scored(desktops: DrawnDesktops) -> None:
    async with session(TASK, settings=settings_of(desktops)) as one:
        pass
    await one.close()
    with pytest.raises(EpisodeEnded, match="is closed"):
        await one.score()


def test_a_row_needs_a_task() -> None:
    assert task_of_row({"prompt": [], "metadata": {"task_id": TASK}}) == TASK
    with pytest.raises(ValueError, match="row: no column task_id; it has prompt, label"):
        task_of_row({"prompt": "x", "label": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size is 0"),
        ({"view": View(region=(0, 0, 10, 10))}, "view.region"),
        ({"tls_ca": None, "token": "a b"}, "token is malformed"),
    ],
)
async def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await open_session(TASK, settings=SessionSettings.connect("127.0.0.1:1", **options))


async def test_threads_without_an_event_loop_share_a_group(desktops: DrawnDesktops) -> None:
    settings = settings_of(desktops, group_size=2, group_wait=MINUTE)

    def play(solve: bool) -> tuple[Session, float | None]:
        one = blocking(open_session(TASK, settings=settings))
        try:
            blocking(one.step(BOX if solve else Click(5, 5), Done()))
            return one, blocking(one.score()).value
        finally:
            blocking(one.close())

    (first, won), (second, lost) = await asyncio.gather(asyncio.to_thread(play, True), asyncio.to_thread(play, False))
    assert (won, lost) == (1.0, 0.0)
    assert first.episode.group_id == second.episode.group_id


async def test_a_process_that_ends_closes_its_sessions(desktops: DrawnDesktops) -> None:
    script = (
        "from trainer.adapters.background import blocking\n"
        "from trainer.adapters.session import *\n"
        f"one = blocking(open_session('{TASK}', settings=SessionSettings.connect()))\n"
        "print(one.instruction)\n"
    )
    done = await run_program(sys.executable, "-c", script, env={"ENVD_TARGET": desktops.address})
    assert (done.status, "Enabled" in done.out) == (0, True), done.err
    # Not by its lease, which lasts for minutes.
    await until(lambda: desktops.leased_count == 0)


async def test_the_example_on_the_page_runs(run_example: Callable[..., Awaitable[str]]) -> None:
    assert "[1.0, 0.0]" in await run_example("The session")


async def test_a_session_goes_back_and_others_continue_from_its_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, settings=CheckpointsConfig(), reserve_bytes=0)
    desktops = await asyncio.to_thread(lambda: DrawnDesktops(checkpoints=store))
    try:
        settings = settings_of(desktops)
        async with session(TASK, settings=settings) as one:
            await one.step(Wait(timedelta(milliseconds=10)))
            kept = await one.checkpoint("before")
            await one.step(Done())
            assert one.done
            assert (await one.rollback(kept)).frame_id == kept.frame_id
            assert one.episode.state is State.ACTIVE
            await one.step(BOX)
            assert (await one.score()).value == 1.0
        async with session(kept, settings=settings) as other:
            assert (other.observation.frame_id, other.episode.step_count) == (kept.frame_id, 1)
            assert "Enabled" in other.instruction
            assert (await other.score()).value == 0.0
        await until(lambda: desktops.leased_count == 0)
    finally:
        await asyncio.to_thread(desktops.close)
