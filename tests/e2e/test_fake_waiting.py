"""Resets that wait for machines, over a real socket: other calls continue, and failures are reported."""

import asyncio
from datetime import timedelta

import pytest

from cuaenv import client as wire
from cuaenv.client import AsyncEnvClient, Click, Done
from tests.support.clock import until
from tests.support.faulty import Faults
from tests.support.server import serve_fake

TASK = "fake/save-note"
NOTHING = wire.View(encoding="none")
ONE_ATTEMPT = wire.RetryPolicy(first_pause=timedelta(days=999))


async def reset_and_close(client: AsyncEnvClient) -> None:
    async with client.reset(TASK, view=NOTHING):
        pass


async def test_hundreds_of_waiting_resets_on_one_connection_delay_nothing_else() -> None:
    async with (
        serve_fake(size=1, capacity=1) as server,
        AsyncEnvClient(server.address, keep_alive_interval=timedelta(milliseconds=20)) as client,
    ):
        async with client.reset(TASK, view=NOTHING) as episode:
            # More than 100 calls, a common HTTP/2 limit of concurrent streams.
            parked = [asyncio.create_task(reset_and_close(client)) for _ in range(200)]
            await until(lambda: sum(server.pool.statistics().waiting_by_run.values()) == len(parked))
            assert (await episode.step(Click(x=10, y=10), view=NOTHING)).step_count == 1
            await episode.observe(view=NOTHING)
            await episode.step(Done(), view=NOTHING)
            assert (await episode.evaluate()).score == 0.0
            assert not any(task.done() for task in parked)
        # Leaving the block closed the episode: the next waiting reset got its machine.
        done, _ = await asyncio.wait(parked, return_when=asyncio.FIRST_COMPLETED)
        assert all(task.exception() is None for task in done)
        for task in parked:
            task.cancel()
        await asyncio.gather(*parked, return_exceptions=True)


async def test_a_failing_pool_is_reported_before_the_deadline_with_the_retry_time() -> None:
    async with (
        serve_fake(size=1, faults=Faults(create_error="no memory left"), failing_after=2) as server,
        AsyncEnvClient(server.address, retry=ONE_ATTEMPT) as client,
    ):
        await until(lambda: server.pool.statistics().problem.startswith("2 failures in a row"))
        # The advised retry does not fit into the deadline, so the client raises the error.
        with pytest.raises(wire.Unavailable, match="no memory left") as caught:
            await asyncio.wait_for(reset_once(client), 60)
        assert caught.value.retry_after is not None
        assert caught.value.retry_after >= timedelta(seconds=1)
        (pool,) = await client.list_pools()
        assert "no memory left" in pool.problem


async def reset_once(client: AsyncEnvClient) -> None:
    async with client.reset(TASK, view=NOTHING, timeout=timedelta(seconds=60)):
        pass
