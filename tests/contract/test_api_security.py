"""Authentication and authorization over real sockets: TLS, tokens, scopes, owners, limits, and files that change."""

import asyncio
import itertools
import logging
import os
import socket
import ssl
import stat
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from cryptography import x509
from cuaenv import client as trainer
from cuaenv.client import AsyncEnvClient, EnvClient, RetryPolicy, Tls
from cuaenv.v1 import env_pb2, env_pb2_grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from envd.api.security.access import SCOPES, Scope
from envd.api.security.rate import RateLimiter
from envd.api.security.tokens import NewToken, new_token
from envd.api.server import SERVICE_NAME, ApiServer
from envd.base.config import SecurityConfig
from envd.base.errors import ConfigError
from envd.base.telemetry.metrics import Metrics
from envd.cli.certificates import make_development_certs
from envd.cli.certs import write_certs
from tests.support.server import FakeServer, serve_fake
from tests.support.stub_episodes import StubEpisodes, pool_info

if TYPE_CHECKING:
    from cuaenv.v1.env_pb2_grpc import CUAEnvAsyncStub

TIMEOUT_S = 120.0
#: For calls that must not wait for anything.
SHORT_S = 20.0
TASK = "fake/count-to-five"
SERVICE = env_pb2.DESCRIPTOR.services_by_name["CUAEnv"]
METHODS = [method.name for method in SERVICE.methods]
#: Connections are retried only briefly.
HASTY = RetryPolicy(first_pause=timedelta(milliseconds=10), max_pause=timedelta(milliseconds=50))
#: On a slow host the deadline passes before the handshake fails.
NOT_CONNECTED = (trainer.Unavailable, trainer.DeadlineExceeded)
Code = grpc.StatusCode


@pytest.fixture(autouse=True)
def _no_token_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENVD_TOKEN", raising=False)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of an authority, a server and a client."""
    return write_certs(tmp_path_factory.mktemp("certs"), make_development_certs([], now=datetime.now(UTC)))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of an authority that no server or client here trusts."""
    return write_certs(tmp_path_factory.mktemp("foreign"), make_development_certs([], now=datetime.now(UTC)))


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A file of tokens and the tokens themselves."""

    path: Path
    alice: NewToken
    bob: NewToken
    viewer: NewToken
    admin: NewToken

    def write(self, *lines: str) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
        fresh.chmod(0o600)
        fresh.replace(self.path)


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    made = Tokens(
        path=tmp_path / "tokens",
        alice=new_token("alice", "run"),
        bob=new_token("bob", "run"),
        viewer=new_token("viewer", "read"),
        admin=new_token("admin", "admin"),
    )
    made.write(*(token.line for token in (made.alice, made.bob, made.viewer, made.admin)))
    return made


@asynccontextmanager
async def serving(
    security: SecurityConfig, *, listen: str = "127.0.0.1:0", metrics: Metrics | None = None
) -> AsyncIterator[tuple[StubEpisodes, str]]:
    """Serve episodes without machines; yield them and the address."""
    async with StubEpisodes() as episodes:
        server = ApiServer(episodes, listen=listen, metrics=metrics or Metrics(), security=security)
        address = await server.start()
        try:
            yield episodes, address
        finally:
            await server.stop()


def tls_of(certs: dict[str, Path], **limits: Any) -> SecurityConfig:
    return SecurityConfig(tls_cert=certs["server"], tls_key=certs["server_key"], **limits)


@asynccontextmanager
async def connected(address: str, token: str = "", *, ca: Path | None = None) -> AsyncIterator["CUAEnvAsyncStub"]:
    """A plain gRPC stub, as a client other than ours would use."""
    options = (("grpc.enable_http_proxy", 0),)
    if ca:
        channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca.read_bytes()), options=options)
    else:
        channel = grpc.aio.insecure_channel(address, options=options)
    async with channel:
        stub: Any = env_pb2_grpc.CUAEnvStub(channel)
        known: Any = _Authorised(stub, token) if token else stub
        yield known


class _Authorised:
    def __init__(self, stub: Any, token: str) -> None:
        self._stub = stub
        self._metadata = (("authorization", f"Bearer {token}"),)

    def __getattr__(self, method: str) -> Any:
        return lambda *args, **kwargs: getattr(self._stub, method)(*args, metadata=self._metadata, **kwargs)


@dataclass(frozen=True)
class Refusal:
    code: grpc.StatusCode
    reason: str
    text: str
    retry_delay: timedelta | None = None


async def outcome(stub: Any, method: str, request: Any) -> Any:
    """Return the first response to a request, or the refusal."""
    try:
        if SERVICE.methods_by_name[method].client_streaming:
            return [answer async for answer in getattr(stub, method)(iter([request]), timeout=TIMEOUT_S)]
        if SERVICE.methods_by_name[method].server_streaming:
            return await anext(aiter(getattr(stub, method)(request, timeout=TIMEOUT_S)))
        return await getattr(stub, method)(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as failure:
        return refusal_of(failure)


def refusal_of(failure: grpc.aio.AioRpcError) -> Refusal:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    status = rpc_status.from_call(failure)  # type: ignore[arg-type]
    reason, delay = "", None
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(retry):
            delay = retry.retry_delay.ToTimedelta()
    return Refusal(failure.code(), reason, failure.details() or "", delay)


def request_for(method: str, episode_id: str) -> Any:
    """Return a complete request of any method, for `episode_id` if the method takes one."""
    kind = SERVICE.methods_by_name[method].input_type
    known: dict[str, Any] = {
        "request_id": str(uuid.uuid4()),
        "episode_id": episode_id,
        "episode_ids": [episode_id],
        "task_id": TASK,
        "fork_count": 1,
        "path": "/home/user/x",
        "argv": ["id"],
        "actions": [env_pb2.Action(type_text=env_pb2.TypeText(text="x"))],
    }
    if method == "StreamSteps":
        return env_pb2.StreamStepsRequest(step=request_for("Step", episode_id))
    return getattr(env_pb2, kind.name)(**{key: value for key, value in known.items() if key in kind.fields_by_name})


# -- TLS --------------------------------------------------------------------------------------------------------


async def test_a_client_that_trusts_the_ca_is_served_over_tls(certs: dict[str, Path]) -> None:
    async with (
        serving(tls_of(certs)) as (episodes, address),
        AsyncEnvClient(address, tls=Tls(ca=certs["ca"])) as client,
        client.reset("desktop/note"),
    ):
        assert [info.owner for info in episodes.list_episodes()] == [""]


async def test_the_synchronous_client_supports_tls_with_a_token(certs: dict[str, Path], tokens: Tokens) -> None:
    def work(address: str) -> str:
        with (
            EnvClient(address, tls=Tls(ca=certs["ca"]), token=tokens.alice.secret) as client,
            client.reset("desktop/note") as episode,
        ):
            return episode.episode_id

    async with serving(tls_of(certs, tokens_file=tokens.path)) as (episodes, address):
        assert [await asyncio.to_thread(work, address)] == episodes.closed
        assert [command.owner for command in episodes.resets] == ["alice"]


async def test_a_client_does_not_connect_to_a_server_of_an_untrusted_authority(
    certs: dict[str, Path], foreign: dict[str, Path], tokens: Tokens
) -> None:
    async with serving(tls_of(certs, tokens_file=tokens.path)) as (episodes, address):
        client = AsyncEnvClient(address, tls=Tls(ca=foreign["ca"]), token=tokens.alice.secret, retry=HASTY)
        async with client:
            with pytest.raises(NOT_CONNECTED):
                await client.list_pools(timeout=timedelta(seconds=0.5))
        assert episodes.calls == []


async def test_clear_text_is_not_served_when_tls_is_on(certs: dict[str, Path]) -> None:
    async with serving(tls_of(certs)) as (_, address), AsyncEnvClient(address, retry=HASTY) as client:
        with pytest.raises(NOT_CONNECTED):
            await client.list_pools(timeout=timedelta(seconds=0.5))


@pytest.mark.parametrize("shown", ["none", "foreign", "servers"])
async def test_a_client_without_a_certificate_of_the_authority_cannot_connect(
    certs: dict[str, Path], foreign: dict[str, Path], shown: str
) -> None:
    ours = {
        "none": Tls(ca=certs["ca"]),
        "foreign": Tls(ca=certs["ca"], cert=foreign["client"], key=foreign["client_key"]),
        # Right authority, wrong purpose: a server's certificate does not authenticate a client.
        "servers": Tls(ca=certs["ca"], cert=certs["server"], key=certs["server_key"]),
    }
    async with serving(tls_of(certs, client_ca=certs["ca"])) as (_, address):
        good = Tls(ca=certs["ca"], cert=certs["client"], key=certs["client_key"])
        async with AsyncEnvClient(address, tls=good) as client:
            assert await client.list_pools() == []
        async with AsyncEnvClient(address, tls=ours[shown], retry=HASTY) as client:
            with pytest.raises(NOT_CONNECTED):
                await client.list_pools(timeout=timedelta(seconds=0.5))


async def test_a_client_certificate_does_not_replace_a_token(certs: dict[str, Path], tokens: Tokens) -> None:
    security = tls_of(certs, client_ca=certs["ca"], tokens_file=tokens.path)
    tls = Tls(ca=certs["ca"], cert=certs["client"], key=certs["client_key"])
    async with serving(security) as (_, address):
        async with AsyncEnvClient(address, tls=tls) as client:
            with pytest.raises(trainer.Unauthenticated):
                await client.list_pools()
        async with AsyncEnvClient(address, tls=tls, token=tokens.viewer.secret) as client:
            assert await client.list_pools() == []


async def certificate_at(address: str) -> x509.Certificate:
    """Return the certificate that the server presents to a new connection."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return x509.load_der_x509_certificate(shown)


async def test_a_new_certificate_is_used_without_a_restart_and_an_invalid_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    stale = {"setting": "tls_cert"}
    files = write_certs(tmp_path, make_development_certs([], now=datetime.now(UTC)))
    async with serving(tls_of(files), metrics=metrics) as (_, address):
        before = await certificate_at(address)
        renewed = make_development_certs([], now=datetime.now(UTC)).server
        files["server"].write_bytes(renewed.cert_pem)
        # Only half of the pair is new: the old pair stays in use, and an error is logged.
        with caplog.at_level(logging.ERROR):
            assert await certificate_at(address) == before
        assert "are not a PEM certificate and its key" in caplog.text
        assert metrics.registry.get_sample_value("envd_security_files_stale", stale) == 1
        files["server_key"].write_bytes(renewed.key_pem)
        assert await certificate_at(address) == x509.load_pem_x509_certificate(renewed.cert_pem)
        assert metrics.registry.get_sample_value("envd_security_files_stale", stale) == 0


@pytest.mark.parametrize("wrong", ["pair", "key", "readable key", "ca", "empty ca", "missing"])
def test_invalid_certificates_fail_the_start(
    tmp_path: Path, certs: dict[str, Path], foreign: dict[str, Path], wrong: str
) -> None:
    key, ca = tmp_path / "key", tmp_path / "ca"
    key.touch(mode=0o600)
    key.write_bytes(certs["server_key"].read_bytes())
    ca.write_bytes(certs["ca"].read_bytes())
    match wrong:
        case "pair":
            key.write_bytes(foreign["server_key"].read_bytes())
        case "key":
            key.write_text("no key")
        case "readable key":
            key.chmod(0o644)
        case "ca":
            ca.write_text("no certificate")
        case "empty ca":
            ca.write_text("")
        case "missing":
            ca.unlink()
    security = SecurityConfig(tls_cert=certs["server"], tls_key=key, client_ca=ca)
    with pytest.raises(ConfigError, match=r"^security\.(tls_cert|tls_key|client_ca)[:,] ") as caught:
        ApiServer(StubEpisodes(), listen="127.0.0.1:0", metrics=Metrics(), security=security)
    assert "PRIVATE KEY" not in str(caught.value)


async def test_an_address_reachable_from_other_hosts_is_served_over_tls_with_tokens(
    certs: dict[str, Path], tokens: Tokens
) -> None:
    security = tls_of(certs, tokens_file=tokens.path)
    async with serving(security, listen="0.0.0.0:0") as (_, address):
        port = address.rpartition(":")[2]
        async with AsyncEnvClient(f"127.0.0.1:{port}", tls=Tls(ca=certs["ca"]), token=tokens.viewer.secret) as client:
            assert await client.list_pools() == []


@pytest.mark.parametrize("missing", ["everything", "callers", "tls"])
def test_an_address_that_other_hosts_can_reach_requires_tls_and_authentication(
    certs: dict[str, Path], tokens: Tokens, missing: str
) -> None:
    security = {
        "everything": SecurityConfig(),
        "callers": tls_of(certs),
        "tls": SecurityConfig(tokens_file=tokens.path),
    }[missing]
    with pytest.raises(ConfigError, match=r"needs TLS and tokens or client certificates; set security\.tls_cert"):
        ApiServer(StubEpisodes(), listen="0.0.0.0:0", metrics=Metrics(), security=security)


# -- tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_without_a_token_is_refused_before_its_body_is_read(method: str, tokens: Tokens) -> None:
    async with serving(SecurityConfig(tokens_file=tokens.path)) as (episodes, address):
        async with grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
            # A call without a body: a server that read the body before the token would hang.
            call: Any = channel.stream_stream(f"/{SERVICE_NAME}/{method}")(timeout=TIMEOUT_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert (refusal_of(caught.value).code, refusal_of(caught.value).reason) == (
            Code.UNAUTHENTICATED,
            "UNAUTHENTICATED",
        )
        assert episodes.calls == []


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_health_call_without_a_token_is_answered_before_its_body_is_read(method: str, tokens: Tokens) -> None:
    async with (
        serving(SecurityConfig(tokens_file=tokens.path)) as (_, address),
        grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel,
    ):
        # A call without a body: a server that read the body would hang.
        call: Any = channel.stream_stream(f"/grpc.health.v1.Health/{method}")(timeout=SHORT_S)
        answer = health_pb2.HealthCheckResponse.FromString(await call.read())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_host_without_a_token_has_few_health_watches_and_can_still_check(tokens: Tokens) -> None:
    async with (
        serving(SecurityConfig(tokens_file=tokens.path)) as (_, address),
        grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watches = [aiter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)) for _ in range(16)]
        for watch in watches:
            assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)))
        assert refusal_of(caught.value).reason == "RATE_LIMITED"
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        metadata = (("authorization", f"Bearer {tokens.viewer.secret}"),)
        await anext(aiter(stub.Watch(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=TIMEOUT_S)))


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
        server = ApiServer(
            episodes,
            listen="127.0.0.1:0",
            metrics=Metrics(),
            security=SecurityConfig(tokens_file=tokens.path),
        )
        address = await server.start()
        stuck = await watch_without_reading(address)
        async with grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
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
    async with (
        serving(limited(tokens, 2)) as (_, address),
        grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for _ in range(2):
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert refusal_of(caught.value).reason == "RATE_LIMITED"


async def test_a_health_request_with_a_long_name_is_refused() -> None:
    async with (
        serving(SecurityConfig()) as (_, address),
        grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service, reason in (("x" * 256, "NOT_FOUND"), ("x" * 300, "BAD_FIELD")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
            assert refusal_of(caught.value).reason == reason


async def test_reflection_requires_a_token(tokens: Tokens) -> None:
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    async with (
        serving(SecurityConfig(tokens_file=tokens.path)) as (_, address),
        grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel,
    ):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
        metadata = (("authorization", f"Bearer {tokens.viewer.secret}"),)
        answers = stub.ServerReflectionInfo(iter(requests), metadata=metadata, timeout=TIMEOUT_S)
        assert (await anext(aiter(answers))).list_services_response.service
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.ServerReflectionInfo(iter(requests), timeout=TIMEOUT_S)))
        assert refusal_of(caught.value).reason == "UNAUTHENTICATED"


async def test_a_wrong_token_is_refused_and_never_logged_or_returned(
    tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    wrong = new_token("alice", "run").secret
    async with serving(SecurityConfig(tokens_file=tokens.path), metrics=metrics) as (_, address):
        with caplog.at_level(logging.DEBUG):
            async with AsyncEnvClient(address, token=wrong) as client:
                with pytest.raises(trainer.Unauthenticated, match="the token is unknown here") as caught:
                    await client.list_pools()
    assert metrics.registry.get_sample_value("envd_failures_total", {"reason": "UNAUTHENTICATED"}) == 1
    assert caught.value.retry_after is None
    assert wrong not in caplog.text + repr(caught.value) + str(caught.value.metadata)
    assert tokens.alice.secret not in caplog.text


async def test_health_checks_need_no_token(tokens: Tokens) -> None:
    async with (
        serving(SecurityConfig(tokens_file=tokens.path)) as (_, address),
        grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("method", METHODS)
async def test_a_token_with_too_small_a_scope_is_refused_by_name(method: str, tokens: Tokens) -> None:
    by_scope = {Scope.READ: tokens.viewer, Scope.RUN: tokens.alice, Scope.ADMIN: tokens.admin}
    async with serving(SecurityConfig(tokens_file=tokens.path)) as (_, address):
        for scope, token in by_scope.items():
            async with connected(address, token.secret) as stub:
                answer = await outcome(stub, method, request_for(method, "ep-1"))
            refused = isinstance(answer, Refusal) and answer.reason == "SCOPE_TOO_SMALL"
            assert refused is (scope < SCOPES[method]), answer
            if refused:
                assert answer.code is Code.PERMISSION_DENIED
                assert f"{method} needs {SCOPES[method].word}" in answer.text


async def test_our_client_raises_scope_too_small(tokens: Tokens) -> None:
    async with (
        serving(SecurityConfig(tokens_file=tokens.path)) as (_, address),
        AsyncEnvClient(address, token=tokens.viewer.secret) as client,
    ):
        with pytest.raises(trainer.ScopeTooSmall, match="token 'viewer': scope read is too small"):
            async with client.reset("desktop/note"):
                pass


@pytest.mark.parametrize("problem", ["readable", "garbage", "missing"])
def test_an_invalid_token_file_fails_the_start(tokens: Tokens, problem: str) -> None:
    match problem:
        case "readable":
            tokens.path.chmod(0o644)
        case "garbage":
            tokens.write("alice run")
        case "missing":
            tokens.path.unlink()
    security = SecurityConfig(tokens_file=tokens.path)
    with pytest.raises(ConfigError, match=r"^security\.tokens_file: "):
        ApiServer(StubEpisodes(), listen="127.0.0.1:0", metrics=Metrics(), security=security)


async def test_a_replacement_token_is_valid_at_once_and_the_old_one_is_not(tokens: Tokens) -> None:
    renewed = new_token("alice", "run")
    async with (
        serving(SecurityConfig(tokens_file=tokens.path)) as (_, address),
        connected(address, tokens.alice.secret) as old,
        connected(address, renewed.secret) as new,
    ):
        episode_id = await opened_on_stub(old)
        tokens.write(renewed.line)
        assert (await outcome(old, "ListPools", env_pb2.ListPoolsRequest())).reason == "UNAUTHENTICATED"
        # The owner is the token's name, so episodes outlive the token that opened them.
        step = await new.Step(request_for("Step", episode_id), timeout=TIMEOUT_S)
        assert step.episode.step_count == 1


async def test_an_invalid_token_file_keeps_the_old_tokens_and_sets_a_metric(tokens: Tokens) -> None:
    metrics = Metrics()
    stale = {"setting": "tokens_file"}
    async with (
        serving(SecurityConfig(tokens_file=tokens.path), metrics=metrics) as (_, address),
        connected(address, tokens.viewer.secret) as stub,
    ):
        assert metrics.registry.get_sample_value("envd_security_files_stale", stale) == 0
        tokens.write("not a line")
        await stub.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        assert metrics.registry.get_sample_value("envd_security_files_stale", stale) == 1


async def test_revoking_a_token_ends_its_watches(tokens: Tokens) -> None:
    async with (
        serving(SecurityConfig(tokens_file=tokens.path)) as (episodes, address),
        connected(address, tokens.viewer.secret) as stub,
    ):
        watch = aiter(stub.WatchPools(env_pb2.WatchPoolsRequest(), timeout=TIMEOUT_S))
        await anext(watch)
        tokens.write(tokens.admin.line)
        episodes.report_pools(pool_info(4))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(watch)
    assert refusal_of(caught.value).reason == "UNAUTHENTICATED"


async def test_revoking_a_token_stops_steps_on_an_open_stream(tokens: Tokens) -> None:
    async with serving(SecurityConfig(tokens_file=tokens.path)) as (episodes, address):
        async with connected(address, tokens.alice.secret) as stub:
            episode_id = await opened_on_stub(stub)
            call = stub.StreamSteps(timeout=TIMEOUT_S)
            await call.write(request_for("StreamSteps", episode_id))
            answers = aiter(call)
            await anext(answers)
            tokens.write(tokens.admin.line)
            await call.write(request_for("StreamSteps", episode_id))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(answers)
        assert refusal_of(caught.value).reason == "UNAUTHENTICATED"
        assert len(episodes.actions) == 1


async def test_revoking_a_token_ends_frames_that_are_only_received(parties: "Parties", tokens: Tokens) -> None:
    episode_id = await opened(parties.alice)
    # No acknowledgement follows, so only responses can end the stream.
    request = env_pb2.StreamFramesRequest(episode_id=episode_id)
    frames = aiter(parties.alice.StreamFrames(iter([request]), timeout=TIMEOUT_S))
    await anext(frames)
    tokens.write(tokens.admin.line)
    await parties.admin.Step(request_for("Step", episode_id), timeout=TIMEOUT_S)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(frames)
    assert refusal_of(caught.value).reason == "UNAUTHENTICATED"


async def test_a_token_of_a_smaller_scope_loses_other_owners_frames(parties: "Parties", tokens: Tokens) -> None:
    episode_id = await opened(parties.alice)
    frames = aiter(
        parties.admin.StreamFrames(iter([env_pb2.StreamFramesRequest(episode_id=episode_id)]), timeout=TIMEOUT_S)
    )
    await anext(frames)
    tokens.write(tokens.alice.line, tokens.admin.line.replace(" admin ", " run "))
    await parties.alice.Step(request_for("Step", episode_id), timeout=TIMEOUT_S)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(frames)
    assert refusal_of(caught.value).reason == "EPISODE_NOT_FOUND"


async def test_a_refused_acknowledgement_ends_its_stream_with_the_cause(parties: "Parties", tokens: Tokens) -> None:
    episode_id = await opened(parties.alice)
    call = parties.alice.StreamFrames(timeout=SHORT_S)
    await call.write(env_pb2.StreamFramesRequest(episode_id=episode_id))
    frames = aiter(call)
    await anext(frames)
    tokens.write(tokens.admin.line)
    # No frame follows: the screen does not change.
    await call.write(env_pb2.StreamFramesRequest(acknowledged_sequence=1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(frames)
    assert refusal_of(caught.value).reason == "UNAUTHENTICATED"


async def test_a_socket_with_tokens_is_still_accessible_only_to_its_owner(tmp_path: Path, tokens: Tokens) -> None:
    path = tmp_path / "envd.sock"
    async with serving(SecurityConfig(tokens_file=tokens.path), listen=f"unix:{path}") as (_, address):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with AsyncEnvClient(address) as client:
            with pytest.raises(trainer.Unauthenticated):
                await client.list_pools()
        async with AsyncEnvClient(address, token=tokens.viewer.secret) as client:
            assert await client.list_pools() == []


async def test_a_socket_is_created_with_mode_0600(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "envd.sock"
    modes: list[int] = []
    original = Path.chmod

    def chmod(self: Path, mode: int) -> None:
        modes.append(stat.S_IMODE(self.stat().st_mode))
        original(self, mode)

    monkeypatch.setattr(Path, "chmod", chmod)
    before = os.umask(0)
    try:
        async with serving(SecurityConfig(), listen=f"unix:{path}"):
            assert modes == [0o600], "the socket had its mode before chmod"
        assert os.umask(0) == 0
    finally:
        os.umask(before)


# -- owners -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parties:
    server: FakeServer
    alice: "CUAEnvAsyncStub"
    bob: "CUAEnvAsyncStub"
    viewer: "CUAEnvAsyncStub"
    admin: "CUAEnvAsyncStub"


@pytest.fixture
async def parties(tokens: Tokens) -> AsyncIterator[Parties]:
    """Four callers of one complete server with machines."""
    async with (
        serve_fake(size=2, capacity=6, security=SecurityConfig(tokens_file=tokens.path)) as server,
        connected(server.address, tokens.alice.secret) as alice,
        connected(server.address, tokens.bob.secret) as bob,
        connected(server.address, tokens.viewer.secret) as viewer,
        connected(server.address, tokens.admin.secret) as admin,
    ):
        yield Parties(server, alice, bob, viewer, admin)


async def opened(stub: "CUAEnvAsyncStub", request_id: str = "") -> str:
    request = env_pb2.ResetRequest(request_id=request_id or str(uuid.uuid4()), task_id=TASK)
    return (await stub.Reset(request, timeout=TIMEOUT_S)).episodes[0].episode_id


async def listed(stub: "CUAEnvAsyncStub") -> set[str]:
    answer = await stub.ListEpisodes(env_pb2.ListEpisodesRequest(), timeout=TIMEOUT_S)
    return {episode.episode_id for episode in answer.episodes}


def names_an_episode(method: str) -> bool:
    kind = SERVICE.methods_by_name[method].input_type
    return bool({"episode_id", "episode_ids", "step"} & set(kind.fields_by_name))


@pytest.mark.parametrize("state", ["open", "closed"])
async def test_another_owners_episode_responds_like_an_unknown_one(parties: Parties, state: str) -> None:
    theirs, never = await opened(parties.alice), "ep-0123456789abcdef"
    if state == "closed":
        await parties.alice.Close(env_pb2.CloseRequest(episode_id=theirs), timeout=TIMEOUT_S)
    methods = [method for method in METHODS if names_an_episode(method)]
    assert len(methods) >= 11
    for method in methods:
        response = await outcome(parties.bob, method, request_for(method, theirs))
        if isinstance(response, Refusal):
            assert theirs in response.text
            response = replace(response, text=response.text.replace(theirs, never))
        assert response == await outcome(parties.bob, method, request_for(method, never)), method
    # An invalid request gets the same error for both, too.
    for wrong in (env_pb2.StepRequest(episode_id=theirs), env_pb2.ForkRequest(episode_id=theirs, fork_count=-1)):
        method = type(wrong).__name__.removesuffix("Request")
        response = await outcome(parties.bob, method, wrong)
        wrong.episode_id = never
        unknown = await outcome(parties.bob, method, wrong)
        assert (
            (response.code, response.reason) == (unknown.code, unknown.reason) == (Code.NOT_FOUND, "EPISODE_NOT_FOUND")
        )
    if state == "open":
        step = await parties.alice.Step(request_for("Step", theirs), timeout=TIMEOUT_S)
        assert step.episode.step_count == 1, "none of bob's calls had an effect"


@pytest.mark.parametrize(
    "method",
    [method for method in METHODS if "episode_id" in SERVICE.methods_by_name[method].input_type.fields_by_name],
)
async def test_another_owners_episode_is_not_found(parties: Parties, method: str) -> None:
    theirs = await opened(parties.alice)
    response = await outcome(parties.bob, method, request_for(method, theirs))
    if method == "Close":
        assert response == env_pb2.CloseResponse()
        assert await listed(parties.alice) == {theirs}
    else:
        assert (response.code, response.reason) == (Code.NOT_FOUND, "EPISODE_NOT_FOUND")


async def test_why_an_episode_closed_is_reported_only_to_its_owner(parties: Parties) -> None:
    theirs = await opened(parties.alice)
    await parties.alice.Close(env_pb2.CloseRequest(episode_id=theirs), timeout=TIMEOUT_S)
    responses = [
        await outcome(stub, "Observe", request_for("Observe", theirs)) for stub in (parties.alice, parties.bob)
    ]
    assert [refusal.reason for refusal in responses] == ["EPISODE_NOT_FOUND", "EPISODE_NOT_FOUND"]
    assert "closed at" in responses[0].text
    assert "not found (never opened on this daemon" in responses[1].text


async def test_only_the_owner_renews_a_lease(parties: Parties) -> None:
    theirs, mine = await opened(parties.alice), await opened(parties.bob)
    request = env_pb2.KeepAliveRequest(episode_ids=[theirs, mine])
    kept = await parties.bob.KeepAlive(request, timeout=TIMEOUT_S)
    assert [episode.episode_id for episode in kept.episodes] == [mine]


async def test_listings_show_own_episodes_unless_the_scope_covers_all(parties: Parties) -> None:
    alices, bobs = await opened(parties.alice), await opened(parties.bob)
    assert await listed(parties.alice) == {alices}
    assert await listed(parties.bob) == {bobs}
    assert await listed(parties.viewer) == await listed(parties.admin) == {alices, bobs}


async def test_a_fork_belongs_to_its_parents_owner_even_if_another_caller_requested_it(parties: Parties) -> None:
    parent = await opened(parties.alice)
    own = await parties.alice.Fork(request_for("Fork", parent), timeout=TIMEOUT_S)
    admins = await parties.admin.Fork(request_for("Fork", parent), timeout=TIMEOUT_S)
    copies = {answer.episodes[0].episode_id for answer in (own, admins)}
    assert await listed(parties.alice) == {parent, *copies}
    assert await listed(parties.bob) == set()
    for copy in copies:
        assert (await outcome(parties.bob, "Step", request_for("Step", copy))).reason == "EPISODE_NOT_FOUND"
        await parties.alice.Step(request_for("Step", copy), timeout=TIMEOUT_S)


async def test_an_administrator_can_use_every_owners_episodes(parties: Parties) -> None:
    theirs = await opened(parties.alice)
    await parties.admin.Step(request_for("Step", theirs), timeout=TIMEOUT_S)
    await parties.admin.Close(env_pb2.CloseRequest(episode_id=theirs), timeout=TIMEOUT_S)
    assert await listed(parties.alice) == set()


async def test_a_guessed_request_id_does_not_return_another_owners_response(parties: Parties) -> None:
    theirs = await opened(parties.alice, "the-same-id")
    mine = await opened(parties.bob, "the-same-id")
    assert mine != theirs
    # An owner's own retry still returns its recorded response, and another body is refused under the id as sent.
    assert await opened(parties.alice, "the-same-id") == theirs
    other = env_pb2.ResetRequest(request_id="the-same-id", task_id=TASK, max_steps=3)
    response = await outcome(parties.bob, "Reset", other)
    assert response.reason == "REQUEST_ID_REUSED"
    assert "the-same-id was already used" in response.text
    assert "bob" not in response.text


async def test_a_guessed_request_id_does_not_return_another_owners_fork(parties: Parties) -> None:
    parent = await opened(parties.alice)
    request = request_for("Fork", parent)
    await parties.alice.Fork(request, timeout=TIMEOUT_S)
    assert (await outcome(parties.bob, "Fork", request)).reason == "EPISODE_NOT_FOUND"


async def test_without_tokens_all_callers_share_all_episodes() -> None:
    async with (
        serve_fake(size=1) as server,
        connected(server.address) as one,
        connected(server.address, "any token") as other,
    ):
        episode_id = await opened(one)
        await other.Step(request_for("Step", episode_id), timeout=TIMEOUT_S)
        assert await listed(other) == {episode_id}


# -- limits -----------------------------------------------------------------------------------------------------


def limited(tokens: Tokens | None, burst: int) -> SecurityConfig:
    # So slow that the bucket does not refill during a test.
    return SecurityConfig(tokens_file=tokens.path if tokens else None, calls_per_second=0.001, call_burst=burst)


async def test_a_call_above_the_rate_limit_does_nothing_and_returns_a_retry_delay(tokens: Tokens) -> None:
    async with (
        serving(limited(tokens, 1)) as (episodes, address),
        connected(address, tokens.alice.secret) as alice,
        connected(address, tokens.bob.secret) as bob,
    ):
        await alice.ListTasks(env_pb2.ListTasksRequest(), timeout=TIMEOUT_S)
        response = await outcome(alice, "Reset", env_pb2.ResetRequest(request_id="r", task_id="desktop/note"))
        assert (response.code, response.reason) == (Code.RESOURCE_EXHAUSTED, "RATE_LIMITED")
        assert response.retry_delay is not None
        assert timedelta(seconds=900) < response.retry_delay <= timedelta(seconds=1000)
        assert episodes.resets == []
        assert await opened_on_stub(bob), "other callers have their own limit"


async def opened_on_stub(stub: "CUAEnvAsyncStub") -> str:
    request = env_pb2.ResetRequest(request_id=str(uuid.uuid4()), task_id="desktop/note")
    return (await stub.Reset(request, timeout=TIMEOUT_S)).episodes[0].episode_id


async def test_keep_alive_and_close_are_exempt_from_the_rate_limit(tokens: Tokens) -> None:
    async with serving(limited(tokens, 1)) as (episodes, address), connected(address, tokens.alice.secret) as stub:
        episode_id = await opened_on_stub(stub)
        assert (await outcome(stub, "ListPools", env_pb2.ListPoolsRequest())).reason == "RATE_LIMITED"
        for _ in range(5):
            kept = await stub.KeepAlive(env_pb2.KeepAliveRequest(episode_ids=[episode_id]), timeout=TIMEOUT_S)
            assert len(kept.episodes) == 1
        await stub.Close(env_pb2.CloseRequest(episode_id=episode_id), timeout=TIMEOUT_S)
        assert episodes.closed == [episode_id]


async def test_listing_unknown_tasks_compares_no_ids(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difflib.get_close_matches", None)
    async with (
        serving(SecurityConfig(tokens_file=tokens.path)) as (_, address),
        connected(address, tokens.viewer.secret) as viewer,
    ):
        ids = [f"desktop/note-{number}" for number in range(999)]
        listed = await viewer.ListTasks(env_pb2.ListTasksRequest(task_ids=[*ids, "desktop/note"]), timeout=TIMEOUT_S)
    assert [task.task_id for task in listed.tasks] == ["desktop/note"]


async def test_every_step_of_a_stream_counts_toward_the_rate_limit(tokens: Tokens) -> None:
    async with serving(limited(tokens, 3)) as (episodes, address), connected(address, tokens.alice.secret) as stub:
        episode_id = await opened_on_stub(stub)
        steps = [
            env_pb2.StreamStepsRequest(
                step=env_pb2.StepRequest(
                    request_id=str(uuid.uuid4()),
                    episode_id=episode_id,
                    step_index=index,
                    actions=[env_pb2.Action(type_text=env_pb2.TypeText(text="x"))],
                )
            )
            for index in range(3)
        ]
        call = stub.StreamSteps(timeout=TIMEOUT_S)
        # Nothing is sent after the refused step: grpc loses the cause if a message meets the end of its stream.
        for step in steps:
            await call.write(step)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert refusal_of(caught.value).reason == "RATE_LIMITED"
        assert len(episodes.actions) == 2


async def test_one_acknowledgement_per_frame_is_exempt_from_the_rate_limit(tokens: Tokens) -> None:
    async with (
        serve_fake(size=2, security=limited(tokens, 6)) as server,
        connected(server.address, tokens.alice.secret) as alice,
        connected(server.address, tokens.admin.secret) as admin,
    ):
        episode_id = await opened(alice)
        call = alice.StreamFrames(timeout=TIMEOUT_S)
        await call.write(env_pb2.StreamFramesRequest(episode_id=episode_id))
        frames = aiter(call)
        for sequence in range(1, 7):
            assert (await anext(frames)).sequence == sequence
            await call.write(env_pb2.StreamFramesRequest(acknowledged_sequence=sequence))
            if sequence < 6:
                step = request_for("Step", episode_id)
                step.step_index = sequence - 1
                await admin.Step(step, timeout=TIMEOUT_S)
        # Of alice's six calls two are used; acknowledgements of nothing use up the others.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for _ in range(5):
                await call.write(env_pb2.StreamFramesRequest(acknowledged_sequence=6))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(frames)
        assert refusal_of(caught.value).reason == "RATE_LIMITED"


async def test_a_call_above_the_rate_limit_is_refused_before_its_body_is_read(tokens: Tokens) -> None:
    async with (
        serving(limited(tokens, 1)) as (_, address),
        connected(address, tokens.viewer.secret) as stub,
        grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel,
    ):
        await stub.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        metadata = (("authorization", f"Bearer {tokens.viewer.secret}"),)
        call: Any = channel.stream_stream(f"/{SERVICE_NAME}/ListTasks")(metadata=metadata, timeout=SHORT_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert refusal_of(caught.value).reason == "RATE_LIMITED"


@pytest.mark.parametrize("method", METHODS)
async def test_an_undecodable_request_is_an_invalid_and_counted_one(
    method: str, tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = (("authorization", f"Bearer {tokens.admin.secret}"),)
    with caplog.at_level(logging.INFO):
        async with (
            serving(limited(tokens, 1)) as (_, address),
            grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel,
        ):
            refusals: list[Refusal] = []
            for _ in range(2):
                # One request in one batch: a message sent to an already refused call fails in grpc, without the cause.
                stream: Any = channel.unary_stream(f"/{SERVICE_NAME}/{method}")
                call = stream(b"\xff", metadata=metadata, timeout=TIMEOUT_S)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                refusals.append(refusal_of(caught.value))
    assert (refusals[0].code, refusals[0].reason) == (Code.INVALID_ARGUMENT, "BAD_FIELD")
    assert refusals[1].reason == ("BAD_FIELD" if method in {"KeepAlive", "Close"} else "RATE_LIMITED")
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING]


async def test_an_undecodable_health_request_without_a_token_is_not_logged(
    tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with (
            serving(SecurityConfig(tokens_file=tokens.path)) as (_, address),
            grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel,
        ):
            check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            await check(b"\xff", timeout=TIMEOUT_S)
    assert not [record for record in caplog.records if record.exc_info or "Check" in record.getMessage()]


async def test_a_request_larger_than_its_method_needs_is_refused(tokens: Tokens) -> None:
    async with (
        serving(SecurityConfig(tokens_file=tokens.path)) as (_, address),
        connected(address, tokens.admin.secret) as stub,
    ):
        large = "x" * (9 << 20)
        step = env_pb2.StepRequest(episode_id=large)
        for method, request in (
            ("Observe", env_pb2.ObserveRequest(episode_id="x" * (1 << 20))),
            ("ListTasks", env_pb2.ListTasksRequest(page_token=large)),
            ("Step", step),
            ("StreamSteps", env_pb2.StreamStepsRequest(step=step)),
        ):
            refusal = await outcome(stub, method, request)
            assert (refusal.code, refusal.reason) == (Code.INVALID_ARGUMENT, "BAD_FIELD")
            assert f"{method} takes at most" in refusal.text


async def test_a_token_has_a_maximum_of_running_calls_and_can_still_renew_and_close(tokens: Tokens) -> None:
    security = SecurityConfig(tokens_file=tokens.path, max_calls_in_flight=2)
    async with (
        serving(security) as (episodes, address),
        connected(address, tokens.alice.secret) as alice,
        connected(address, tokens.bob.secret) as bob,
    ):
        ids = [await opened_on_stub(alice) for _ in range(3)]
        episodes.gate.clear()
        steps = [asyncio.ensure_future(outcome(alice, "Step", request_for("Step", i))) for i in ids]
        done, running = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
        assert [(await step).reason for step in done] == ["RATE_LIMITED"]
        assert (await outcome(alice, "ListPools", env_pb2.ListPoolsRequest())).retry_delay == timedelta(seconds=1)
        await alice.KeepAlive(env_pb2.KeepAliveRequest(episode_ids=ids), timeout=TIMEOUT_S)
        await bob.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        episodes.gate.set()
        await asyncio.wait(running)
        await alice.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        await alice.Close(env_pb2.CloseRequest(episode_id=ids[0]), timeout=TIMEOUT_S)


async def test_each_id_in_keep_alive_counts_toward_a_limit_of_its_own(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envd.api.server.RENEWALS_PER_S", 0.001)
    monkeypatch.setattr("envd.api.server.RENEWAL_BURST", 10)
    async with (
        serving(SecurityConfig(tokens_file=tokens.path)) as (_, address),
        connected(address, tokens.alice.secret) as alice,
        connected(address, tokens.bob.secret) as bob,
    ):
        request = env_pb2.KeepAliveRequest(episode_ids=["ep-1"] * 8)
        await alice.KeepAlive(request, timeout=TIMEOUT_S)
        assert (await outcome(alice, "KeepAlive", request)).reason == "RATE_LIMITED"
        await alice.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        await bob.KeepAlive(request, timeout=TIMEOUT_S)


async def test_without_tokens_all_connections_of_a_host_share_one_rate_limit() -> None:
    async with serving(limited(None, 1)) as (_, address):
        async with connected(address) as stub:
            await stub.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        # gRPC shares connections between channels with equal options; another option forces a new connection.
        options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            response = await outcome(env_pb2_grpc.CUAEnvStub(channel), "ListPools", env_pb2.ListPoolsRequest())
        assert response.reason == "RATE_LIMITED"


async def test_calls_above_the_rate_limit_do_not_fill_the_log(tokens: Tokens, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    with caplog.at_level(logging.INFO, "envd.api.call_report"):
        async with (
            serving(limited(tokens, 2), metrics=metrics) as (_, address),
            connected(address, "envd_wrong") as stub,
        ):
            for _ in range(10):
                await outcome(stub, "ListPools", env_pb2.ListPoolsRequest())
    assert [record.getMessage().split()[3] for record in caplog.records if "failed with" in record.getMessage()] == [
        "UNAUTHENTICATED/UNAUTHENTICATED"
    ] * 2
    assert metrics.registry.get_sample_value("envd_failures_total", {"reason": "RATE_LIMITED"}) == 8


async def test_calls_with_wrong_tokens_have_their_own_rate_limit(tokens: Tokens) -> None:
    async with (
        serving(limited(tokens, 2)) as (_, address),
        connected(address, "envd_wrong") as stub,
        connected(address, tokens.alice.secret) as alice,
    ):
        reasons = [(await outcome(stub, "ListPools", env_pb2.ListPoolsRequest())).reason for _ in range(3)]
        await alice.ListPools(env_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
    assert reasons == ["UNAUTHENTICATED", "UNAUTHENTICATED", "RATE_LIMITED"]


async def test_our_client_waits_for_the_retry_delay_and_retries(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = SecurityConfig(tokens_file=tokens.path, calls_per_second=20, call_burst=1)
    # The clock advances by two thirds of a call per counted call, so that every second call exceeds the limit.
    times_s = itertools.count(100.0, 2 / 3 / 20)
    with monkeypatch.context() as patch:
        patch.setattr(RateLimiter.__init__, "__kwdefaults__", {"clock_s": lambda: next(times_s)})
        metrics = Metrics()
        async with serving(security, metrics=metrics) as (episodes, address):
            async with (
                AsyncEnvClient(address, token=tokens.alice.secret) as client,
                client.reset("desktop/note") as episode,
            ):
                for _ in range(3):
                    await episode.step(trainer.TypeText("x"))
            assert len(episodes.actions) == 3
        refused = metrics.registry.get_sample_value("envd_failures_total", {"reason": "RATE_LIMITED"})
        assert refused is not None
        assert refused >= 3
    async with (
        serving(limited(tokens, 1)) as (_, address),
        AsyncEnvClient(address, token=tokens.alice.secret) as client,
    ):
        await client.list_pools()
        with pytest.raises(trainer.RateLimited, match="token 'alice': too many calls"):
            await client.list_pools(timeout=timedelta(seconds=TIMEOUT_S))


async def test_a_token_holds_at_most_its_maximum_of_machines_and_gets_more_after_closing_some(tokens: Tokens) -> None:
    metrics_of_quota = {"reason": "TOKEN_QUOTA"}
    bounded = new_token("bounded", "run", max_machines=2)
    tokens.write(bounded.line, tokens.bob.line)
    async with serve_fake(size=2, capacity=4, security=SecurityConfig(tokens_file=tokens.path)) as server:
        async with (
            AsyncEnvClient(server.address, token=bounded.secret, retry=HASTY) as client,
            AsyncEnvClient(server.address, token=tokens.bob.secret) as bob,
        ):
            with pytest.raises(trainer.GroupTooLarge, match="'bounded': at most 2 machines, and one request needs 3"):
                async with client.reset_group(TASK, size=3):
                    pass
            async with client.reset(TASK) as first, client.fork(first, count=1) as copies:
                hasty = timedelta(seconds=4)
                for group in (client.reset(TASK, timeout=hasty), client.fork(first, count=1, timeout=hasty)):
                    with pytest.raises(
                        trainer.PoolExhausted, match="'bounded': at most 2 machines, 2 are in use"
                    ) as refused:
                        async with group:
                            pass
                    assert refused.value.reason == "TOKEN_QUOTA"
                    assert refused.value.retry_after is not None
                async with bob.reset_group(TASK, size=2):
                    pass
                await copies[0].close()
                async with client.reset(TASK):
                    pass
        refusals = server.metrics.registry.get_sample_value("envd_failures_total", metrics_of_quota)
    assert refusals is not None
    assert refusals >= 2


async def test_two_servers_cannot_share_a_port_over_tls(certs: dict[str, Path]) -> None:
    async with serving(tls_of(certs)) as (_, address):
        second = ApiServer(StubEpisodes(), listen=address, metrics=Metrics(), security=tls_of(certs))
        with pytest.raises(ConfigError, match="cannot be bound"):
            await second.start()


async def test_a_resolved_address_must_present_a_certificate_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    files = write_certs(tmp_path / "named", make_development_certs(["pool.example.org"], now=datetime.now(UTC)))
    async with serving(tls_of(files)) as (_, address):
        port = address.rpartition(":")[2]
        tls = Tls(ca=files["ca"])
        async with AsyncEnvClient(f"dns:///pool.example.org:{port}", tls=tls, retry=HASTY) as client:
            assert len(await client.list_tasks()) == 3
        # Its certificate is valid for 127.0.0.1, but not for this name.
        async with AsyncEnvClient(f"dns:///other.example.org:{port}", tls=tls, retry=HASTY) as client:
            with pytest.raises(NOT_CONNECTED):
                await client.list_tasks(timeout=timedelta(seconds=1))


async def test_a_reset_fails_at_once_if_no_host_accepts_the_token(tokens: Tokens) -> None:
    security = SecurityConfig(tokens_file=tokens.path)
    async with (
        serving(security) as (_, first),
        serving(security) as (_, second),
        AsyncEnvClient([first, second], token="envd_unknown", retry=HASTY) as client,  # noqa: S106
        asyncio.timeout(60),
    ):
        with pytest.raises(trainer.Unauthenticated):
            async with client.reset(TASK):
                pass
