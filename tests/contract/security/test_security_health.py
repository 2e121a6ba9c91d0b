"""Health checks and reflection over real sockets, with and without a token."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from envd.api.server import ApiServer
from envd.base.config import SecurityConfig
from envd.base.telemetry.metrics import Metrics
from tests.support.callers import SHORT_S, TIMEOUT_S, Tokens, bearer, dialled, limited, refused, serving
from tests.support.stub_episodes import StubEpisodes


@asynccontextmanager
async def health_of(security: SecurityConfig) -> AsyncIterator[Any]:
    """Serve episodes without machines; yield a plain stub of their health."""
    async with serving(security) as (_, address), dialled(address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_health_call_without_a_token_is_answered_before_its_body_is_read(method: str, tokens: Tokens) -> None:
    async with serving(tokens.security()) as (_, address), dialled(address) as channel:
        # A call without a body: a server that read the body would hang.
        call: Any = channel.stream_stream(f"/grpc.health.v1.Health/{method}")(timeout=SHORT_S)
        answer = health_pb2.HealthCheckResponse.FromString(await call.read())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_host_without_a_token_has_few_health_watches_and_can_still_check(tokens: Tokens) -> None:
    async with health_of(tokens.security()) as stub:
        watches = [aiter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)) for _ in range(16)]
        for watch in watches:
            assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVING
        with refused("RATE_LIMITED"):
            await anext(aiter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)))
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        request = health_pb2.HealthCheckRequest()
        await anext(aiter(stub.Watch(request, metadata=bearer(tokens.viewer), timeout=TIMEOUT_S)))


def http2_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


async def watch_without_reading(address: str) -> asyncio.StreamWriter:
    """Open a health watch whose peer accepts no data, and return its connection when the server has answered."""
    settings, headers, data = 4, 1, 0
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    window_of_no_bytes = (4).to_bytes(2) + (0).to_bytes(4)
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/grpc.health.v1.Health/Watch",
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    block = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields.items())
    writer.write(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + http2_frame(settings, 0, 0, window_of_no_bytes)
        + http2_frame(headers, 4, 1, block)
        + http2_frame(data, 1, 1, bytes(5))
    )
    while True:
        head = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(head[:3]))
        if head[3] == headers:
            return writer


async def test_a_peer_that_reads_nothing_does_not_hold_up_a_drain(tokens: Tokens) -> None:
    async with StubEpisodes() as episodes:
        server = ApiServer(episodes, listen="127.0.0.1:0", metrics=Metrics(), security=tokens.security())
        address = await server.start()
        stuck = await watch_without_reading(address)
        async with dialled(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = aiter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=SHORT_S))
            assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVING
            async with asyncio.timeout(SHORT_S):
                await server.drain()
            assert (await anext(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        async with asyncio.timeout(SHORT_S):
            await server.stop()
        stuck.transport.abort()


async def test_health_checks_without_a_token_are_limited(tokens: Tokens) -> None:
    async with health_of(limited(tokens, 2)) as stub:
        for _ in range(2):
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        with refused("RATE_LIMITED"):
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)


async def test_a_health_request_with_a_long_name_is_refused() -> None:
    async with health_of(SecurityConfig()) as stub:
        for service, reason in (("x" * 256, "NOT_FOUND"), ("x" * 300, "BAD_FIELD")):
            with refused(reason):
                await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)


async def test_reflection_requires_a_token(tokens: Tokens) -> None:
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    async with serving(tokens.security()) as (_, address), dialled(address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
        metadata = bearer(tokens.viewer)
        answers = stub.ServerReflectionInfo(iter(requests), metadata=metadata, timeout=TIMEOUT_S)
        assert (await anext(aiter(answers))).list_services_response.service
        # It sends nothing: a request that cannot be written any more would hide the refusal (`sent_status`).
        with refused("UNAUTHENTICATED"):
            await stub.ServerReflectionInfo(timeout=TIMEOUT_S).read()


async def test_health_checks_need_no_token(tokens: Tokens) -> None:
    async with health_of(tokens.security()) as stub:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_an_undecodable_health_request_without_a_token_is_not_logged(
    tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with serving(tokens.security()) as (_, address), dialled(address) as channel:
            check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            await check(b"\xff", timeout=TIMEOUT_S)
    assert not [record for record in caplog.records if record.exc_info or "Check" in record.getMessage()]
