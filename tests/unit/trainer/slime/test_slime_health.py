"""The watch for unreachable daemons."""

import asyncio
import gc
import weakref
from typing import Any, cast

import pytest

from cuaenv.client import AsyncEnvClient, Unauthenticated, Unavailable
from trainer.slime.play.rollout import DaemonWatch


class Client:
    """Answers `list_pools` with an error or no pools."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.called = asyncio.Event()

    async def list_pools(self, **_: Any) -> list[Any]:
        self.called.set()
        if self.error is not None:
            raise self.error
        return []


async def test_unreachable_daemons_are_reported_after_the_timeout() -> None:
    client = Client(Unavailable("connection refused"))
    async with DaemonWatch(0.05).use(cast(AsyncEnvClient, client)) as used:
        async with asyncio.timeout(30):
            while not used.failure:
                await asyncio.sleep(0.01)
    assert "no daemon answered for 0.05 s (envd.daemon_timeout_s): connection refused" in used.failure


async def test_a_watch_does_not_keep_its_client() -> None:
    client, watch = Client(None), DaemonWatch(60.0)
    async with watch.use(cast(AsyncEnvClient, client)):
        await asyncio.sleep(0)
    left = weakref.ref(client)
    del client
    for _ in range(5):
        await asyncio.sleep(0)  # the poller is being cancelled
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("error", [None, Unauthenticated("bad token")])
async def test_a_daemon_that_answers_is_reachable(error: Exception | None) -> None:
    client = Client(error)
    async with DaemonWatch(0.01).use(cast(AsyncEnvClient, client)) as used:
        async with asyncio.timeout(30):
            for _ in range(5):
                client.called.clear()
                await client.called.wait()
        assert used.failure == ""
