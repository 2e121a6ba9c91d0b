"""Calls are retried until their deadline and not beyond. The test controls the time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from cuaenv.client import DeadlineExceeded, RetryPolicy, Unavailable
from cuaenv.client.connection import DaemonConnection
from cuaenv.client.credentials import Access
from cuaenv.client.opening import Opener
from cuaenv.client.targets import Address
from cuaenv.v1 import env_pb2

TIMEOUT_S = 0.2


class Unreachable(DaemonConnection):
    """A connection to a daemon that cannot be reached; with `answers`, until the third attempt."""

    answers = False

    def __init__(self) -> None:
        super().__init__(Address("127.0.0.1:1"), access=Access(token=None, tls=None), retry=RetryPolicy())
        self.attempts: list[str] = []

    async def attempt(self, method: str, request: Any, *, timeout_s: float) -> Any:
        """Fail as gRPC does: without time left it does not try."""
        self.attempts.append(method)
        if self.answers and len(self.attempts) == 3:
            return env_pb2.ListPoolsResponse()
        if timeout_s <= 0:
            raise DeadlineExceeded("no time")
        raise Unavailable("connection refused")


@pytest.fixture
async def connection() -> Unreachable:
    return Unreachable()


@pytest.fixture
def _oversleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each pause end only after the deadline, as on a suspended host."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def oversleep(pause_s: float) -> None:
        began_s = time.monotonic()
        while time.monotonic() <= began_s + TIMEOUT_S:
            await sleep(TIMEOUT_S / 10)

    monkeypatch.setattr(asyncio, "sleep", oversleep)
    monkeypatch.setattr(Opener, "pause", lambda _, pause_s: oversleep(pause_s))


@pytest.mark.usefixtures("_oversleeping")
async def test_a_call_is_not_retried_after_its_deadline_passed_in_a_pause(connection: Unreachable) -> None:
    with pytest.raises(Unavailable, match="refused"):
        await connection.call("ListPools", env_pb2.ListPoolsRequest(), timedelta(seconds=TIMEOUT_S))
    assert connection.attempts == ["ListPools"]
    await connection.aclose()


@pytest.mark.usefixtures("_oversleeping")
async def test_a_reset_is_not_retried_after_its_deadline_passed_in_a_pause(connection: Unreachable) -> None:
    opener = Opener(connection, changed=lambda: None)
    deadline_s = asyncio.get_running_loop().time() + TIMEOUT_S
    with pytest.raises(Unavailable, match="refused"):
        await opener.open(env_pb2.ResetRequest(), size=1, deadline_s=deadline_s, may_abandon=False)
    assert connection.attempts.count("Reset") == 1
    await connection.aclose()


async def test_a_call_is_retried_before_its_deadline(connection: Unreachable) -> None:
    connection.answers = True
    answer = await connection.call("ListPools", env_pb2.ListPoolsRequest(), timedelta(seconds=60))
    assert answer == env_pb2.ListPoolsResponse()
    await connection.aclose()
