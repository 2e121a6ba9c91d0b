"""Watchers of the health service."""

import asyncio
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from envd.api.health import HealthServicer
from envd.base.errors import RateLimited

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
CONTEXT: Any = None


def watch(servicer: HealthServicer, service: str = "") -> Any:
    return servicer.Watch(health_pb2.HealthCheckRequest(service=service), CONTEXT)


async def test_a_watcher_that_does_not_read_delays_neither_others_nor_a_change() -> None:
    servicer = HealthServicer("a.B")
    servicer.set_serving(True)
    stuck, reading = watch(servicer), watch(servicer, "a.B")
    # grpc asks for the next status only when the peer has read the last one.
    assert (await anext(stuck)).status == SERVING
    assert (await anext(reading)).status == SERVING
    servicer.set_serving(False)
    assert (await asyncio.wait_for(anext(reading), 20)).status == NOT_SERVING


async def test_a_watcher_of_an_unknown_service_waits_without_a_status() -> None:
    servicer = HealthServicer("a.B")
    watcher = watch(servicer, "c.D")
    assert (await anext(watcher)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    upcoming = asyncio.ensure_future(anext(watcher))
    servicer.set_serving(True)
    await asyncio.sleep(0)
    assert not upcoming.done()
    upcoming.cancel()


async def test_the_number_of_watchers_is_limited() -> None:
    servicer = HealthServicer(max_watcher_count=1)
    first = watch(servicer)
    await anext(first)
    with pytest.raises(RateLimited):
        await anext(watch(servicer))
    await first.aclose()
    await anext(watch(servicer))
