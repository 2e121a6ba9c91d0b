"""Bounds on what the running calls of one caller hold."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from envd.api.security.guard import MAX_BYTES, MAX_RECEIVING, CallerLoad, RunningCall
from envd.base.errors import InvalidRequest, RateLimited
from tests.support.clock import until


def test_a_caller_has_a_maximum_of_running_calls() -> None:
    calls: dict[str, CallerLoad] = {}
    with (
        RunningCall(calls, "a", max_calls=1),
        RunningCall(calls, "b", max_calls=1),
        pytest.raises(RateLimited, match=r"^a:"),
        RunningCall(calls, "a", max_calls=1),
    ):
        pass
    with RunningCall(calls, "a", max_calls=1):
        assert len(calls) == 1
    assert len(calls) == 0


def test_requests_of_running_calls_have_a_maximum_size_together() -> None:
    calls: dict[str, CallerLoad] = {}
    with RunningCall(calls, "a", max_calls=9) as first, RunningCall(calls, "a", max_calls=9) as second:
        first.hold(MAX_BYTES)
        with pytest.raises(RateLimited):
            second.hold(1)
        # The next request of a stream replaces the previous one.
        first.hold(MAX_BYTES - 1)
        second.hold(1)
        with RunningCall(calls, "b", max_calls=9) as other:
            other.hold(MAX_BYTES)
    with RunningCall(calls, "a", max_calls=9) as third:
        third.hold(MAX_BYTES)


async def test_few_requests_of_a_caller_are_received_at_once_and_the_rest_wait() -> None:
    receiving = 0
    most = 0
    gate = asyncio.Event()

    async def requests() -> AsyncIterator[bytes]:
        nonlocal receiving, most
        receiving += 1
        most = max(most, receiving)
        await gate.wait()
        receiving -= 1
        yield b"x"

    async def receive(calls: dict[str, CallerLoad], name: str) -> bytes | None:
        with RunningCall(calls, name, max_calls=1000) as call:
            return await call.receive(requests())

    calls: dict[str, CallerLoad] = {}
    received = asyncio.gather(*(receive(calls, "a") for _ in range(3 * MAX_RECEIVING)))
    await until(lambda: receiving == MAX_RECEIVING)
    other = asyncio.ensure_future(receive(calls, "b"))
    await until(lambda: receiving == MAX_RECEIVING + 1)
    gate.set()
    assert await received == [b"x"] * (3 * MAX_RECEIVING)
    assert await other == b"x"
    assert most == MAX_RECEIVING + 1


async def test_a_request_that_does_not_arrive_does_not_delay_others_for_long() -> None:
    calls: dict[str, CallerLoad] = {}

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def one() -> AsyncIterator[bytes]:
        yield b"x"

    async def receive(requests: AsyncIterator[bytes]) -> bytes | None:
        with RunningCall(calls, "a", max_calls=1000, receive_timeout_s=0.01) as call:
            return await call.receive(requests)

    hung = [asyncio.ensure_future(receive(nothing())) for _ in range(MAX_RECEIVING)]
    await asyncio.sleep(0)
    assert await receive(one()) == b"x"
    for call in hung[MAX_RECEIVING // 2 :]:
        with pytest.raises(InvalidRequest, match=r"^request:"):
            await call
    for call in hung:
        call.cancel()
