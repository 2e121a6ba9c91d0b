"""Client processes that are killed or interrupted while their openings wait for machines."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from cuaenv import client as wire
from cuaenv.client import AsyncEnvClient, ClientClosed, EnvClient, RetryPolicy
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
        ttl = timedelta(seconds=10)
        async with (
            client.reset("fake/count-to-five", lease_ttl=ttl) as episode,
            client.reset("fake/count-to-five", lease_ttl=ttl),
        ):
            resets = [hold(client.reset("fake/count-to-five")) for _ in range(3)]
            await asyncio.gather(hold(client.fork(episode, count=1)), *resets)

asyncio.run(main())
"""
SYNC = """\
import sys
from cuaenv.client import EnvClient

task = "fake/count-to-five"
with EnvClient(sys.argv[1]) as client, client.reset(task), client.reset(task), client.reset(task):
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
    async with serve_fake(size=2, capacity=2, clock=HastyClock()) as server:
        async with client_process(server, ASYNC, waiting=4) as process:
            process.kill()
            await process.wait()
            await until(lambda: not server.pool.queue())
        async with AsyncEnvClient(server.address) as client, client.reset(TASK, view=NOTHING) as episode:
            # The killed client's leases end.
            await until(lambda: [info.episode_id for info in server.service.list_episodes()] == [episode.episode_id])


@pytest.mark.parametrize(("program", "waiting"), [(ASYNC, 4), (SYNC, 1)], ids=["async", "sync"])
async def test_an_interrupted_client_ends_its_openings_and_episodes_before_it_exits(program: str, waiting: int) -> None:
    async with serve_fake(size=2, capacity=2) as server, client_process(server, program, waiting=waiting) as process:
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
        assert errors.decode().rstrip().endswith("KeyboardInterrupt")
        assert "leases end" not in errors.decode()
        assert server.pool.queue() == ()
        assert server.service.list_episodes() == []


async def test_closing_a_client_ends_an_opening_that_waits() -> None:
    async with serve_fake(size=1, capacity=1) as server:
        async with AsyncEnvClient(server.address) as client:
            await client.open(TASK)
            waiting = asyncio.ensure_future(client.open(TASK))
            await until(lambda: len(server.pool.queue()) == 1)
        with pytest.raises(ClientClosed):
            await waiting
        assert (server.pool.queue(), server.service.list_episodes()) == ((), [])


async def test_an_opening_interrupted_before_its_caller_knows_of_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve_fake(size=1, capacity=1) as server:

        def interrupted() -> None:
            with EnvClient(server.address) as client, client.open(TASK):
                start = client._start

                def start_and_interrupt(work: Any) -> Any:
                    start(work)
                    asyncio.run_coroutine_threadsafe(until(lambda: len(server.pool.queue()) == 1), loop).result()
                    monkeypatch.setattr(client, "_start", start)
                    raise KeyboardInterrupt

                monkeypatch.setattr(client, "_start", start_and_interrupt)
                client.open(TASK)

        loop = asyncio.get_running_loop()
        with contextlib.suppress(KeyboardInterrupt):
            await asyncio.to_thread(interrupted)
        assert (server.pool.queue(), server.service.list_episodes()) == ((), [])


async def test_closing_a_client_ends_waits_for_a_host_and_pauses_between_attempts() -> None:
    minute = timedelta(minutes=1)
    retry = RetryPolicy(first_pause=minute, max_pause=minute, connect_timeout=2 * minute)
    opening = []
    for targets in ("127.0.0.1:1,127.0.0.1:2", "127.0.0.1:1"):
        async with AsyncEnvClient(targets, retry=retry) as client:
            opening.append(asyncio.ensure_future(client.open(TASK)))
            await asyncio.sleep(0.3)
    found = await asyncio.wait_for(asyncio.gather(*opening, return_exceptions=True), 10)
    assert [type(each) for each in found] == [ClientClosed] * 2


async def test_threads_that_open_while_their_client_is_closed_leave_no_episode() -> None:
    async with serve_fake(size=2, capacity=2) as server:
        client, began = EnvClient(server.address), asyncio.Event()
        loop = asyncio.get_running_loop()

        def open_always() -> None:
            loop.call_soon_threadsafe(began.set)
            errors = 0
            while errors < 100:
                try:
                    client.open(TASK)
                except ClientClosed:
                    errors += 1

        working = asyncio.gather(*(asyncio.to_thread(open_always) for _ in range(3)))
        await began.wait()
        await until(lambda: bool(server.pool.queue()))
        closes = asyncio.gather(*(asyncio.to_thread(client.close) for _ in range(2)))
        await asyncio.wait_for(asyncio.gather(closes, working), 10)
        assert (server.pool.queue(), server.service.list_episodes()) == ((), [])


CLOSING = """\
import asyncio, os, signal, sys
from cuaenv.client import EnvClient

client = EnvClient(sys.argv[1])
client.reset("fake/count-to-five")
client.reset("fake/count-to-five")
aclose = client._inner.aclose
async def slow():
    await asyncio.sleep(0.2)  # By now the main thread waits in `close`.
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0.5)
    await aclose()
client._inner.aclose = slow
client.close()
"""


async def test_an_interrupt_while_a_client_is_closed_waits_for_its_end() -> None:
    async with serve_fake(size=2, capacity=2) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLOSING, server.address, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await process.communicate()
        assert process.returncode == -signal.SIGINT, errors.decode()
        assert server.service.list_episodes() == []
