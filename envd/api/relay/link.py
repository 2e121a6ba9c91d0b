"""Connections between the supervisor and its shards, and what a shard's pools reported last.

Responses pass as bytes: they are never decoded here, except where several are merged.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import grpc
from cuaenv.v1 import env_pb2
from google.protobuf.message import Message

from envd.api.relay.merge import Candidate
from envd.api.requests import MAX_MESSAGE_BYTES
from envd.api.security.access import TRUSTED, Caller, caller_header

logger = logging.getLogger(__name__)

SERVICE: Final = env_pb2.DESCRIPTOR.services_by_name["CUAEnv"].full_name

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # Each link needs a connection of its own, also after a shard's restart.
    ("grpc.use_local_subchannel_pool", 1),
)

_WATCH_AGAIN_S: Final = 1.0

Metadata = Sequence[tuple[str, str]]


class RelayChannel:
    """A connection to a process of the same daemon."""

    def __init__(self, target: str) -> None:
        """Set up a connection to an address in gRPC syntax; its first call connects."""
        self.channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._methods: dict[str, Any] = {}

    async def aclose(self) -> None:
        """Close the connection; its calls fail. Idempotent."""
        await self.channel.close()

    async def unary(self, method: str, request: Message, *, metadata: Metadata, timeout_s: float | None) -> bytes:
        """Relay a call, and return the response. Raises: grpc.aio.AioRpcError."""
        call = self._method("unary_unary", method)(request.SerializeToString(), metadata=metadata, timeout=timeout_s)
        response: bytes = await call
        return response

    def stream(
        self, method: str, request: Message, *, metadata: Metadata, timeout_s: float | None
    ) -> AsyncIterator[bytes]:
        """Relay a call, and yield its responses. Raises: grpc.aio.AioRpcError."""
        call = self._method("unary_stream", method)(request.SerializeToString(), metadata=metadata, timeout=timeout_s)
        responses: AsyncIterator[bytes] = aiter(call)
        return responses

    def two_way(
        self, method: str, requests: AsyncIterator[Message], *, metadata: Metadata, timeout_s: float | None
    ) -> AsyncIterator[bytes]:
        """Relay a stream, and yield its responses. Raises: grpc.aio.AioRpcError."""

        async def bodies() -> AsyncIterator[bytes]:
            async for request in requests:
                yield request.SerializeToString()

        call = self._method("stream_stream", method)(bodies(), metadata=metadata, timeout=timeout_s)
        responses: AsyncIterator[bytes] = aiter(call)
        return responses

    def _method(self, kind: str, method: str) -> Any:
        if method not in self._methods:
            self._methods[method] = getattr(self.channel, kind)(f"/{SERVICE}/{method}")
        return self._methods[method]


class ShardLink:
    """The connection to one shard; it exists only while the shard serves."""

    def __init__(self, index: int, target: str, *, on_change: Callable[[], None]) -> None:
        """Set up a link that is down. `on_change` is called when it goes up or down, or its pools change."""
        self.index = index
        self.pools: Sequence[env_pb2.Pool] = ()
        """The shard's pools, as it reported them last; empty while it is down."""
        self._opening: Counter[str] = Counter()
        self._target = target
        self._on_change = on_change
        self._channel: RelayChannel | None = None
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<ShardLink {self.index} {'up' if self.is_up else 'down'}>"

    @property
    def is_up(self) -> bool:
        """Whether the shard serves."""
        return bool(self.pools)

    @property
    def channel(self) -> RelayChannel:
        """The connection. Raises: grpc.aio.AioRpcError: the shard is down; as a daemon that is down."""
        if self._channel is None:
            raise unavailable(f"shard {self.index}: is being restarted; retry with the same request_id")
        return self._channel

    async def connect(self) -> None:
        """Connect to a shard that serves, and wait for the state of its pools."""
        self._channel = RelayChannel(self._target)
        first = asyncio.Event()
        self._watching = asyncio.create_task(self._watch(self._channel, first), name=f"shard:{self.index}:pools")
        await first.wait()

    async def disconnect(self) -> None:
        """Close the connection: the shard has ended. Its calls fail with UNAVAILABLE. Idempotent."""
        channel, self._channel, self.pools = self._channel, None, ()
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if channel is not None:
            await channel.aclose()
            self._on_change()

    def candidate(self) -> Candidate:
        """Return the shard's state as far as it is known here: its pools, and the resets that run."""
        return Candidate(index=self.index, pools=self.pools, opening=self._opening)

    @contextmanager
    def resetting(self, pool: str, machine_count: int) -> Iterator[None]:
        """Count machines as requested from the shard during the block."""
        self._opening[pool] += machine_count
        try:
            yield
        finally:
            self._opening[pool] -= machine_count

    async def _watch(self, channel: RelayChannel, first: asyncio.Event) -> None:
        request, metadata = env_pb2.WatchPoolsRequest(), caller_metadata(TRUSTED)
        while True:
            try:
                async for body in channel.stream("WatchPools", request, metadata=metadata, timeout_s=None):
                    self.pools = env_pb2.WatchPoolsResponse.FromString(body).pools
                    first.set()
                    self._on_change()
            except grpc.aio.AioRpcError as error:
                logger.debug("shard %d: its pools are not watched: %s", self.index, error.details())
            # A shard that drains ends its watches but serves its episodes.
            await asyncio.sleep(_WATCH_AGAIN_S)


def caller_metadata(caller: Caller) -> list[tuple[str, str]]:
    """Return the metadata that names a call's caller to a shard."""
    return [caller_header(caller)]


def unavailable(details: str) -> grpc.aio.AioRpcError:
    """Return a status UNAVAILABLE without a reason, as clients receive it if a daemon is down."""
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
