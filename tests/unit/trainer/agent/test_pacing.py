"""Pauses between failing resets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cuaenv.client import PoolExhausted, TaskNotFound
from trainer.agent.pacing import ResetPacer

_sleep = asyncio.sleep


class Pauses:
    """Records sleeps instead of waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken_s: list[float] = []
        monkeypatch.setattr(asyncio, "sleep", self._record)

    async def _record(self, duration_s: float) -> None:
        self.taken_s.append(duration_s)
        await _sleep(0)


@asynccontextmanager
async def opening(error: Exception | None = None) -> AsyncIterator[None]:
    if error is not None:
        raise error
    yield


async def reset(pacer: ResetPacer, task: str, error: Exception | None = None) -> None:
    try:
        async with pacer.open(task, lambda: opening(error)):
            pass
    except (TaskNotFound, PoolExhausted):
        pass


async def test_failing_resets_are_spaced_up_to_four_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, pacer = Pauses(monkeypatch), ResetPacer()
    for number in range(20):
        await reset(pacer, f"task-{number}", TaskNotFound("unknown"))
    # The recorded sleeps do not advance the clock, so each start is later than the one before by the pause.
    steps = [later - earlier for earlier, later in zip(pauses.taken_s[:-1], pauses.taken_s[1:], strict=True)]
    assert pauses.taken_s[0] == pytest.approx(0.05, abs=0.02)
    assert steps[-5:] == pytest.approx([0.25] * 5, abs=0.02)


async def test_a_success_ends_the_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, pacer = Pauses(monkeypatch), ResetPacer()
    await reset(pacer, "broken", TaskNotFound("unknown"))
    await reset(pacer, "good")
    pauses.taken_s.clear()
    await reset(pacer, "good")
    assert pauses.taken_s == []
    await reset(pacer, "broken", TaskNotFound("unknown"))
    assert len(pauses.taken_s) == 1, "its own pause remains"


async def test_a_full_pool_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, pacer = Pauses(monkeypatch), ResetPacer()
    await reset(pacer, "task", PoolExhausted("no machine"))
    await reset(pacer, "task")
    assert pauses.taken_s == []
