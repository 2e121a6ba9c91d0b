"""Callers of a served API as any gRPC client would make them: tokens, plain stubs, refusals and complete requests."""

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from cuaenv.client import RetryPolicy
from cuaenv.v1 import env_pb2, env_pb2_grpc
from envd.api.security.guard import RateLimiter
from envd.api.security.tokens import NewToken, new_token
from envd.api.server import ApiServer
from envd.base.config import SecurityConfig
from envd.base.telemetry.metrics import Metrics
from tests.support.server import FakeServer
from tests.support.stub_episodes import StubEpisodes

if TYPE_CHECKING:
    from cuaenv.v1.env_pb2_grpc import CUAEnvAsyncStub

#: Files of certificates and keys by name.
Certs = dict[str, Path]

TIMEOUT_S = 120.0
#: For calls that must not wait for anything.
SHORT_S = 20.0
TASK = "fake/count-to-five"
#: Connections are retried only briefly.
HASTY = RetryPolicy(first_pause=timedelta(milliseconds=10), max_pause=timedelta(milliseconds=50))
SERVICE = env_pb2.DESCRIPTOR.services_by_name["CUAEnv"]
METHODS = [method.name for method in SERVICE.methods]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A file of tokens and the tokens themselves."""

    path: Path
    alice: NewToken
    bob: NewToken
    viewer: NewToken
    admin: NewToken

    @classmethod
    def create(cls, path: Path) -> "Tokens":
        """Write a file with one token for each caller."""
        made = cls(
            path=path,
            alice=new_token("alice", "run"),
            bob=new_token("bob", "run"),
            viewer=new_token("viewer", "read"),
            admin=new_token("admin", "admin"),
        )
        made.write(*(token.line for token in (made.alice, made.bob, made.viewer, made.admin)))
        return made

    def write(self, *lines: str) -> None:
        """Replace the file's lines."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
        fresh.chmod(0o600)
        fresh.replace(self.path)

    def security(self, **limits: Any) -> SecurityConfig:
        """Return the settings of a server that knows these tokens."""
        return SecurityConfig(tokens_file=self.path, **limits)


def bearer(token: NewToken) -> tuple[tuple[str, str]]:
    """Return a call's metadata with a token."""
    return (("authorization", f"Bearer {token.secret}"),)


@asynccontextmanager
async def serving(
    security: SecurityConfig,
    *,
    listen: str = "127.0.0.1:0",
    metrics: Metrics | None = None,
    renewals: RateLimiter | None = None,
) -> AsyncIterator[tuple[StubEpisodes, str]]:
    """Serve episodes without machines; yield them and the address."""
    async with StubEpisodes() as episodes:
        server = ApiServer(episodes, listen=listen, metrics=metrics or Metrics(), security=security, renewals=renewals)
        address = await server.start()
        try:
            yield episodes, address
        finally:
            await server.stop()


@asynccontextmanager
async def dialled(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel that uses no proxy."""
    async with grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        yield channel


@asynccontextmanager
async def connected(address: str, token: str = "") -> AsyncIterator["CUAEnvAsyncStub"]:
    """Open a plain gRPC stub, as a client other than ours would use."""
    async with dialled(address) as channel:
        stub: Any = env_pb2_grpc.CUAEnvStub(channel)
        known: Any = _Authorised(stub, token) if token else stub
        yield known


class _Authorised:
    """A stub whose calls carry a token."""

    def __init__(self, stub: Any, token: str) -> None:
        self._stub = stub
        self._metadata = (("authorization", f"Bearer {token}"),)

    def __getattr__(self, method: str) -> Any:
        return lambda *args, **kwargs: getattr(self._stub, method)(*args, metadata=self._metadata, **kwargs)


@dataclass(frozen=True)
class Refusal:
    """What a refused call returned."""

    code: grpc.StatusCode
    reason: str
    text: str
    retry_delay: timedelta | None = None


async def outcome(stub: Any, method: str, request: Any) -> Any:
    """Return the first response to a request, or the refusal."""
    try:
        kind = SERVICE.methods_by_name[method]
        if kind.client_streaming and not kind.server_streaming:
            return await getattr(stub, method)(iter([request]), timeout=TIMEOUT_S)
        if kind.client_streaming:
            return [answer async for answer in getattr(stub, method)(iter([request]), timeout=TIMEOUT_S)]
        if SERVICE.methods_by_name[method].server_streaming:
            return await anext(aiter(getattr(stub, method)(request, timeout=TIMEOUT_S)))
        return await getattr(stub, method)(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as failure:
        return refusal_of(failure)


def refusal_of(failure: grpc.aio.AioRpcError) -> Refusal:
    """Return the error of a failed call."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    status = rpc_status.from_call(failure)  # type: ignore[arg-type]
    reason, delay = "", None
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(retry):
            delay = retry.retry_delay.ToTimedelta()
    return Refusal(failure.code(), reason, failure.details() or "", delay)


@contextmanager
def refused(reason: str) -> Iterator[None]:
    """Expect a call to be refused for this reason."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert refusal_of(caught.value).reason == reason


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


@dataclass(frozen=True)
class Parties:
    """Callers of one complete server with machines."""

    server: FakeServer
    alice: "CUAEnvAsyncStub"
    bob: "CUAEnvAsyncStub"
    viewer: "CUAEnvAsyncStub"
    admin: "CUAEnvAsyncStub"


async def opened(stub: "CUAEnvAsyncStub", request_id: str = "") -> str:
    """Open an episode; return its id."""
    request = env_pb2.ResetRequest(request_id=request_id or str(uuid.uuid4()), task_id=TASK)
    return (await stub.Reset(request, timeout=TIMEOUT_S)).episodes[0].episode_id


async def opened_on_stub(stub: "CUAEnvAsyncStub") -> str:
    """Open an episode on `StubEpisodes`; return its id."""
    request = env_pb2.ResetRequest(request_id=str(uuid.uuid4()), task_id="desktop/note")
    return (await stub.Reset(request, timeout=TIMEOUT_S)).episodes[0].episode_id


async def listed(stub: "CUAEnvAsyncStub") -> set[str]:
    """Return the ids of the episodes that a caller sees."""
    answer = await stub.ListEpisodes(env_pb2.ListEpisodesRequest(), timeout=TIMEOUT_S)
    return {episode.episode_id for episode in answer.episodes}


def limited(tokens: Tokens | None, burst: int) -> SecurityConfig:
    """Return settings with a limit of `burst` calls."""
    # So slow that the bucket does not refill during a test.
    return SecurityConfig(tokens_file=tokens.path if tokens else None, calls_per_second=0.001, call_burst=burst)
