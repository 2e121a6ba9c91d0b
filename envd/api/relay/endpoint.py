# ruff: noqa: N802 -- names are those of the contract
"""Serves clients in each shard: calls for its own episodes directly, all others through the front process.

All shards listen on the same address, and the kernel distributes new connections among them. A client learns from the
metadata of a response that its call was relayed, and may then use another connection for the episode.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final

import grpc
from cuaenv.v1 import env_pb2
from cuaenv.wire import RELAYED_KEY
from google.protobuf.message import Message

from envd.api.relay.link import SERVICE, RelayChannel
from envd.api.relay.merge import shard_of
from envd.api.relay.servicer import BY_EPISODE, Context, parser, relay_metadata, remaining_s
from envd.api.security.access import Caller
from envd.api.servicer import CUAEnvServicer
from envd.base.telemetry.metrics import Metrics

#: Calls that the front process serves: it places groups and merges lists.
_OF_FRONT: Final = ("Reset", "ListPools", "ListEpisodes")

# The type stubs describe the blocking server.
_UNARY: Any = grpc.unary_unary_rpc_method_handler
_TWO_WAY: Any = grpc.stream_stream_rpc_method_handler


class EndpointServicer:
    """Serves the contract in one shard. `env.proto` documents the methods."""

    def __init__(self, own: CUAEnvServicer, front: RelayChannel, *, index: int, metrics: Metrics) -> None:
        """Set up the service.

        Args:
            own: Serves the shard's episodes.
            front: The connection to the front process.
            index: The shard's number.
            metrics: Counts relayed calls.
        """
        self._own = own
        self._front = front
        self._index = index
        self._relayed = metrics.relayed_calls

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the methods. A response is a message, or bytes if the call was relayed."""
        unary: dict[str, Callable[..., Any]] = {name: self._by_episode(name) for name in BY_EPISODE}
        unary |= {name: self._of_front(name) for name in _OF_FRONT}
        unary |= {"KeepAlive": self.KeepAlive, "ListTasks": self._own.ListTasks}
        handlers: dict[str, Any] = {name: _UNARY(method, parser(name), _serialize) for name, method in unary.items()}
        streams: dict[str, Callable[..., Any]] = {"StreamSteps": self.StreamSteps, "StreamFrames": self.StreamFrames}
        handlers |= {name: _TWO_WAY(method, parser(name), _serialize) for name, method in streams.items()}
        handlers["WatchPools"] = grpc.unary_stream_rpc_method_handler(self.WatchPools, parser("WatchPools"), _serialize)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def may_use(self, caller: Caller, episode_id: str) -> bool:
        """Return whether a caller may use an episode; of another shard's episode, its shard decides."""
        return not self._is_own(episode_id) or self._own.may_use(caller, episode_id)

    def end_watches(self) -> None:
        """End the streams that otherwise last until their clients disconnect. The front process ends the relayed."""
        self._own.end_watches()

    async def KeepAlive(self, request: env_pb2.KeepAliveRequest, context: Context) -> Message | bytes:
        """Renew leases."""
        if all(self._is_own(each) for each in request.episode_ids):
            return await self._own.KeepAlive(request, context)
        return await self._relay("KeepAlive", request, context)

    async def WatchPools(
        self, request: env_pb2.WatchPoolsRequest, context: Context
    ) -> AsyncGenerator[Message | bytes, None]:
        """Stream the pools of all shards."""
        metadata, timeout_s = relay_metadata(context), remaining_s(context)
        async for body in self._front.stream("WatchPools", request, metadata=metadata, timeout_s=timeout_s):
            yield body

    async def StreamSteps(
        self, requests: AsyncIterator[env_pb2.StreamStepsRequest], context: Context
    ) -> AsyncGenerator[Message | bytes, None]:
        """Perform steps in order."""
        async with aclosing(
            self._stream("StreamSteps", requests, context, lambda each: each.step.episode_id)
        ) as responses:
            async for response in responses:
                yield response

    async def StreamFrames(
        self, requests: AsyncIterator[env_pb2.StreamFramesRequest], context: Context
    ) -> AsyncGenerator[Message | bytes, None]:
        """Stream an episode's screen."""
        async with aclosing(self._stream("StreamFrames", requests, context, lambda each: each.episode_id)) as responses:
            async for response in responses:
                yield response

    def _is_own(self, episode_id: str) -> bool:
        return shard_of(episode_id) == self._index

    def _by_episode(self, method: str) -> Callable[[Any, Context], Any]:
        own = getattr(self._own, method)

        async def serve(request: Any, context: Context) -> Message | bytes:
            if self._is_own(request.episode_id):
                response: Message = await own(request, context)
                return response
            self._relayed.labels(method=method).inc()
            context.set_trailing_metadata(((RELAYED_KEY, str(shard_of(request.episode_id))),))
            return await self._relay(method, request, context)

        return serve

    def _of_front(self, method: str) -> Callable[[Any, Context], Any]:
        async def serve(request: Any, context: Context) -> bytes:
            return await self._relay(method, request, context)

        return serve

    async def _relay(self, method: str, request: Message, context: Context) -> bytes:
        return await self._front.unary(
            method, request, metadata=relay_metadata(context), timeout_s=remaining_s(context)
        )

    async def _stream(
        self, method: str, requests: AsyncIterator[Any], context: Context, episode_id_of: Callable[[Any], str]
    ) -> AsyncGenerator[Message | bytes, None]:
        """Serve or relay a stream by the episode of its first request."""
        first = await anext(requests, None)

        async def all_requests() -> AsyncIterator[Any]:
            if first is not None:
                yield first
            async for request in requests:
                yield request

        if first is None or self._is_own(episode_id_of(first)):
            own: Any = getattr(self._own, method)
            async with aclosing(own(all_requests(), context)) as responses:
                async for response in responses:
                    yield response
            return
        self._relayed.labels(method=method).inc()
        metadata, timeout_s = relay_metadata(context), remaining_s(context)
        async for body in self._front.two_way(method, all_requests(), metadata=metadata, timeout_s=timeout_s):
            yield body


def _serialize(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()
