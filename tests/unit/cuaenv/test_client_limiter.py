"""The limit of episodes holds and the order of arrival is kept, also if callers are cancelled."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cuaenv.client.limiter import EpisodeLimiter


@asynccontextmanager
async def acquiring(limiter: EpisodeLimiter, count: int) -> AsyncIterator[asyncio.Event]:
    """Acquire in a task of its own; the event is set once it is admitted."""
    admitted, leave = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        await limiter.acquire(count)
        admitted.set()
        await leave.wait()
        limiter.release(count)

    task = asyncio.create_task(hold())
    try:
        yield admitted
    finally:
        leave.set()
        if not admitted.is_set():
            task.cancel()
        await asyncio.wait({task})


async def run_ready_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_episode_over_the_limit_waits_until_another_is_released() -> None:
    limiter = EpisodeLimiter(2)
    async with acquiring(limiter, 1), acquiring(limiter, 1):
        late = asyncio.create_task(limiter.acquire(1))
        await run_ready_tasks()
        assert (limiter.waiting_count, late.done()) == (1, False)
    await asyncio.wait_for(late, 60)
    assert limiter.waiting_count == 0


async def test_small_groups_do_not_overtake_a_large_one() -> None:
    limiter = EpisodeLimiter(3)
    async with acquiring(limiter, 1) as first, acquiring(limiter, 3) as large, acquiring(limiter, 1) as small:
        await first.wait()
        await run_ready_tasks()
        assert (large.is_set(), small.is_set(), limiter.waiting_count) == (False, False, 4)


async def test_a_cancelled_waiter_leaves_the_queue_and_releases_nothing() -> None:
    limiter = EpisodeLimiter(1)
    async with acquiring(limiter, 1):
        cancelled = asyncio.create_task(limiter.acquire(1))
        await run_ready_tasks()
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert limiter.waiting_count == 0
    async with asyncio.timeout(60):
        await limiter.acquire(1)


async def test_without_a_limit_everything_is_admitted() -> None:
    limiter = EpisodeLimiter(None)
    for _ in range(2):
        await asyncio.wait_for(limiter.acquire(1000), 60)


async def test_a_group_over_the_limit_or_a_limit_below_one_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"of 3 .*max_episodes=2"):
        await EpisodeLimiter(2).acquire(3)
    with pytest.raises(ValueError, match="max_episodes 0"):
        EpisodeLimiter(0)


@pytest.mark.parametrize("seed", range(10))
async def test_random_holds_and_cancellations_never_exceed_the_limit_nor_leak(seed: int) -> None:
    rng = random.Random(seed)
    limiter = EpisodeLimiter(5)
    held = 0

    async def hold(count: int, pauses: int) -> None:
        nonlocal held
        await limiter.acquire(count)
        held += count
        assert held <= 5
        try:
            for _ in range(pauses):
                await asyncio.sleep(0)
        finally:
            held -= count
            for _ in range(count):  # as the members of a group, one by one
                limiter.release()

    tasks = [asyncio.create_task(hold(rng.randint(1, 5), rng.randint(0, 6))) for _ in range(60)]
    for task in rng.sample(tasks, 30):
        for _ in range(rng.randint(0, 4)):
            await asyncio.sleep(0)
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
    await asyncio.wait_for(limiter.acquire(5), 60)
    assert limiter.waiting_count == 0
