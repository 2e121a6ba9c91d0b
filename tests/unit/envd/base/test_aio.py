"""Races and shields."""

import asyncio

import pytest

from envd.base.aio import race, run_unless, shielded


async def test_a_race_ends_with_its_first_event_or_at_its_limit() -> None:
    event, future = asyncio.Event(), asyncio.get_running_loop().create_future()
    racing = asyncio.create_task(race(event, future))
    await asyncio.sleep(0)
    assert not racing.done()
    event.set()
    await racing
    assert not future.done()
    await race(asyncio.Event(), timeout_s=0.0)


async def test_run_unless_waits_for_cancelled_work_and_raises_its_error() -> None:
    stop, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    running = asyncio.create_task(run_unless(stop, work()))
    await asyncio.sleep(0)
    stop.set()
    await running
    assert ended.is_set()

    async def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await run_unless(asyncio.Event(), fail())


async def test_shielded_work_ends_before_the_cancellation_is_delivered() -> None:
    gate, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await gate.wait()
        done.set()

    caller = asyncio.create_task(shielded(work()))
    await asyncio.sleep(0)
    for _ in range(2):
        caller.cancel()
        await asyncio.sleep(0)
    assert not caller.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done.is_set()


async def test_what_a_cancelled_caller_does_not_get_is_undone() -> None:
    gate = asyncio.Event()
    undone: list[str] = []

    async def work() -> str:
        await gate.wait()
        return "file"

    async def undo(result: str) -> None:
        undone.append(result)

    gate.set()
    assert await shielded(work(), undo=undo) == "file"
    assert undone == []
    gate.clear()
    caller = asyncio.create_task(shielded(work(), undo=undo))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert undone == ["file"]
