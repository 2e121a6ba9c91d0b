"""Client processes that are killed or interrupted while their openings wait for machines."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cuaenv import client as wire
from cuaenv.client import AsyncEnvClient
from tests.support.clock import HastyClock, until
from tests.support.server import FakeServer, serve_fake

TASK = "fake/count-to-five"
NOTHING = wire.View(encoding="none")

ASYNC = """\
import asyncio, sys
from datetime import timedelta
from cuaenv.client import AsyncEnvClient

async def hold(block):
    async with block:
        await asyncio.Event().wait()

async def main():
    interval = timedelta(seconds=0.1)
    async with AsyncEnvClient(sys.argv[1], keep_alive_interval=interval) as client:
        async with client.reset("fake/count-to-five", lease_ttl=timedelta(seconds=10)) as episode:
            resets = [hold(client.reset("fake/count-to-five")) for _ in range(3)]
            await asyncio.gather(hold(client.fork(episode, count=1)), *resets)

asyncio.run(main())
"""
SYNC = """\
import sys
from cuaenv.client import EnvClient

with EnvClient(sys.argv[1]) as client, client.reset("fake/count-to-five"), client.reset("fake/count-to-five"):
    pass
"""


@asynccontextmanager
async def client_process(
    server: FakeServer, program: str, *, waiting: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a client until `waiting` of its openings are in the queue."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, server.address, stderr=asyncio.subprocess.PIPE
    )
    try:
        await until(lambda: len(server.pool.queue()) == waiting)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_openings_of_a_killed_client_leave_the_queue_and_the_next_client_gets_a_machine() -> None:
    async with serve_fake(size=1, capacity=1, clock=HastyClock()) as server:
        async with client_process(server, ASYNC, waiting=4) as process:
            process.kill()
            await process.wait()
            await until(lambda: not server.pool.queue())
        async with AsyncEnvClient(server.address) as client, client.reset(TASK, view=NOTHING) as episode:
            assert [info.episode_id for info in server.service.list_episodes()] == [episode.episode_id]


@pytest.mark.parametrize(("program", "waiting"), [(ASYNC, 4), (SYNC, 1)], ids=["async", "sync"])
async def test_an_interrupted_client_ends_its_openings_and_episodes_before_it_exits(program: str, waiting: int) -> None:
    async with serve_fake(size=1, capacity=1) as server, client_process(server, program, waiting=waiting) as process:
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
        assert errors.decode().rstrip().endswith("KeyboardInterrupt")
        assert "leases end" not in errors.decode()
        assert server.pool.queue() == ()
        assert server.service.list_episodes() == []
