# ruff: noqa: N802 -- names are those of the contract
"""Relays each call to the shard that has its episode, and merges the responses of calls about all shards.

A shard's number is part of its episodes' ids. A new group goes to a shard where it need not queue, its forks stay
there. Tokens, rates and scopes were checked before; a shard learns the caller's name and checks the owner of episodes.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC
from typing import Any, Final
from weakref import WeakValueDictionary

import grpc
from cuaenv.v1 import env_pb2
from google.protobuf.message import Message

from envd.api.convert_requests import keep_alive_of, ready_timeout_s
from envd.api.pages import page_of
from envd.api.relay.link import SERVICE, ShardLink, caller_metadata, unavailable
from envd.api.relay.merge import UNKNOWN_POOL, merge_pools, ranked_shards, shard_of
from envd.api.relay.placements import Placements
from envd.api.security.access import NO_QUEUE_HEADER, Caller, current_caller
from envd.base.aio import Changes, race
from envd.episodes.types import listing_key

#: Methods whose request names one episode.
BY_EPISODE: Final = (
    "Step",
    "Observe",
    "Evaluate",
    "Fork",
    "Close",
    "ReadGuestFile",
    "WriteGuestFile",
    "RunGuestCommand",
)
#: A call continues its client's trace in the shard.
_TRACE_KEYS: Final = frozenset({"traceparent", "tracestate"})
_STATUS_DETAILS: Final = "grpc-status-details-bin"
#: Tasks whose pool is known from an earlier reset.
_KNOWN_TASKS: Final = 10_000

# The type stubs describe the blocking server.
_UNARY: Any = grpc.unary_unary_rpc_method_handler
_TWO_WAY: Any = grpc.stream_stream_rpc_method_handler

Context = grpc.aio.ServicerContext[Any, Any]


class RelayServicer:
    """Serves the contract with shards. `env.proto` documents the methods."""

    def __init__(self, links: Sequence[ShardLink], placements: Placements, *, changes: Changes) -> None:
        """Set up the service.

        Args:
            links: The shards, in the order of their numbers.
            placements: The shards of earlier resets.
            changes: Notified when a shard goes up or down, or its pools change.
        """
        self._links = links
        self._placements = placements
        self._changes = changes
        self._stopping = asyncio.Event()
        self._pool_of_task: OrderedDict[str, str] = OrderedDict()
        self._resetting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the methods. Responses of relayed calls are bytes, which no serializer touches."""
        unary: dict[str, Callable[..., Any]] = {name: self._by_episode(name) for name in BY_EPISODE}
        unary |= {"Reset": self.Reset, "ListTasks": self.ListTasks}
        merged: dict[str, Callable[..., Any]] = {
            "ListPools": self.ListPools,
            "ListEpisodes": self.ListEpisodes,
            "KeepAlive": self.KeepAlive,
        }
        streams: dict[str, Callable[..., Any]] = {"StreamSteps": self.StreamSteps, "StreamFrames": self.StreamFrames}
        handlers: dict[str, Any] = {name: _UNARY(method, parser(name)) for name, method in unary.items()}
        handlers |= {name: _UNARY(method, parser(name), _serialize) for name, method in merged.items()}
        handlers |= {name: _TWO_WAY(method, parser(name)) for name, method in streams.items()}
        handlers["WatchPools"] = grpc.unary_stream_rpc_method_handler(self.WatchPools, parser("WatchPools"), _serialize)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def may_use(self, _caller: Caller, _episode_id: str) -> bool:
        """Return True: an episode's shard decides."""
        return True

    def end_watches(self) -> None:
        """End the streams that otherwise last until their clients disconnect; the shards end `StreamFrames`."""
        self._stopping.set()

    # -- calls of one shard -------------------------------------------------------------------------------------

    def _by_episode(self, method: str) -> Callable[[Any, Context], Any]:
        async def relay(request: Any, context: Context) -> bytes:
            return await self._relay(self._link_of(request.episode_id), method, request, context)

        return relay

    async def Reset(self, request: env_pb2.ResetRequest, context: Context) -> bytes:
        """Open a group on one shard; a retry goes to the shard that has the first request."""
        key = f"{current_caller().name}/{request.request_id}"
        # One call of a request at a time: a retry must not join an attempt that its shard is about to refuse.
        lock = self._resetting.setdefault(key, asyncio.Lock())
        async with lock:
            return await self._place(key, request, context)

    async def _place(self, key: str, request: env_pb2.ResetRequest, context: Context) -> bytes:
        """Offer a group to one shard after the other; if it would have to queue in each, it queues in the best one."""
        deadline_s = time.monotonic() + ready_timeout_s(request, time_remaining_s=remaining_s(context))
        known = self._placements.shard_of(key)
        order = self._ranked(request) if known is None else [known, *(i for i in self._ranked(request) if i != known)]
        for index in order:
            try:
                return await self._reset(index, key, request, context, NO_QUEUE_HEADER)
            except grpc.aio.AioRpcError as error:
                if not _had_no_effect(error) or time.monotonic() >= deadline_s:
                    raise
        return await self._reset(self._ranked(request)[0], key, request, context)

    def _ranked(self, request: env_pb2.ResetRequest) -> list[int]:
        candidates = [link.candidate() for link in self._links if link.is_up]
        if not candidates:
            raise unavailable("all shards: are being restarted; retry with the same request_id")
        return ranked_shards(candidates, pool=self._pool_of(request), group_size=max(1, request.group_size))

    async def _reset(
        self, index: int, key: str, request: env_pb2.ResetRequest, context: Context, *headers: tuple[str, str]
    ) -> bytes:
        self._placements.place(key, index)
        link, pool = self._links[index], self._pool_of(request)
        try:
            with link.resetting(pool, max(1, request.group_size)):
                response = await self._relay(link, "Reset", request, context, *headers)
        except grpc.aio.AioRpcError as error:
            if _had_no_effect(error):
                self._placements.forget(key)
            raise
        if pool == UNKNOWN_POOL:
            self._learn_pool(request, response)
        return response

    async def ListTasks(self, request: env_pb2.ListTasksRequest, context: Context) -> bytes:
        """List tasks; they are the same on every shard."""
        return await self._relay(self._any_link(), "ListTasks", request, context)

    async def StreamSteps(
        self, requests: AsyncIterator[env_pb2.StreamStepsRequest], context: Context
    ) -> AsyncIterator[bytes]:
        """Relay a stream to the shard of its first request."""
        async for response in self._relay_stream("StreamSteps", requests, context, lambda each: each.step.episode_id):
            yield response

    async def StreamFrames(
        self, requests: AsyncIterator[env_pb2.StreamFramesRequest], context: Context
    ) -> AsyncIterator[bytes]:
        """Relay a stream to the shard of its first request."""
        async for response in self._relay_stream("StreamFrames", requests, context, lambda each: each.episode_id):
            yield response

    # -- calls of all shards ------------------------------------------------------------------------------------

    async def ListPools(self, request: env_pb2.ListPoolsRequest, context: Context) -> env_pb2.ListPoolsResponse:
        """List pools, each with the sums of all shards that are up."""
        if not request.include_queue:
            return env_pb2.ListPoolsResponse(pools=self._pools())
        links = [link for link in self._links if link.is_up]
        bodies = await self._relay_all(links, "ListPools", [request] * len(links), context)
        pools = {
            link.index: env_pb2.ListPoolsResponse.FromString(body).pools
            for link, body in zip(links, bodies, strict=True)
        }
        return env_pb2.ListPoolsResponse(pools=merge_pools(pools, down=self._down()))

    async def WatchPools(
        self, _: env_pb2.WatchPoolsRequest, _context: Context
    ) -> AsyncIterator[env_pb2.WatchPoolsResponse]:
        """Stream pools until the daemon stops."""
        last: list[env_pb2.Pool] | None = None
        while not self._stopping.is_set():
            changed = self._changes.next
            pools = self._pools()
            if pools != last:
                last = pools
                yield env_pb2.WatchPoolsResponse(pools=pools)
            await race(changed, self._stopping)

    async def ListEpisodes(
        self, request: env_pb2.ListEpisodesRequest, context: Context
    ) -> env_pb2.ListEpisodesResponse:
        """List the episodes of all shards, oldest first. Fails while a shard is down: its episodes are unknown."""
        bodies = await self._relay_all(self._links, "ListEpisodes", [request] * len(self._links), context)
        found = [env_pb2.ListEpisodesResponse.FromString(body) for body in bodies]
        page = page_of(
            (episode for each in found for episode in each.episodes),
            key=lambda each: listing_key(each.create_time.ToDatetime(UTC), each.episode_id),
            page_size=request.page_size,
            page_token=request.page_token,
            has_more=any(each.next_page_token for each in found),
        )
        return env_pb2.ListEpisodesResponse(episodes=page.items, next_page_token=page.next_page_token)

    async def KeepAlive(self, request: env_pb2.KeepAliveRequest, context: Context) -> env_pb2.KeepAliveResponse:
        """Renew the leases of each shard's episodes. Fails afterwards if a shard is down: it may have some of them."""
        episode_ids, _ = keep_alive_of(request)
        ids: dict[int, list[str]] = {}
        for episode_id in episode_ids:
            ids.setdefault(self._link_of(episode_id).index, []).append(episode_id)
        parts = []
        for part_ids in ids.values():
            part = env_pb2.KeepAliveRequest(episode_ids=part_ids)
            if request.HasField("lease_ttl"):
                part.lease_ttl.CopyFrom(request.lease_ttl)
            parts.append(part)
        bodies = await self._relay_all([self._links[index] for index in ids], "KeepAlive", parts, context)
        episodes = [each for body in bodies for each in env_pb2.KeepAliveResponse.FromString(body).episodes]
        order = {episode_id: number for number, episode_id in enumerate(episode_ids)}
        return env_pb2.KeepAliveResponse(episodes=sorted(episodes, key=lambda each: order[each.episode_id]))

    # -- routing ------------------------------------------------------------------------------------------------

    def _link_of(self, episode_id: str) -> ShardLink:
        """Return the shard of an episode; for an id that no shard made, any shard, which refuses it."""
        index = shard_of(episode_id)
        return self._any_link() if index is None or index >= len(self._links) else self._links[index]

    def _any_link(self) -> ShardLink:
        return next((link for link in self._links if link.is_up), self._links[0])

    def _pool_of(self, request: env_pb2.ResetRequest) -> str:
        return request.pool or self._pool_of_task.get(_task_of(request), UNKNOWN_POOL)

    def _learn_pool(self, request: env_pb2.ResetRequest, response: bytes) -> None:
        self._pool_of_task[_task_of(request)] = env_pb2.ResetResponse.FromString(response).episodes[0].pool
        if len(self._pool_of_task) > _KNOWN_TASKS:
            self._pool_of_task.popitem(last=False)

    def _down(self) -> list[int]:
        return [link.index for link in self._links if not link.is_up]

    def _pools(self) -> list[env_pb2.Pool]:
        up = {link.index: link.pools for link in self._links if link.is_up}
        if not up:
            raise unavailable("all shards: are being restarted; retry")
        return merge_pools(up, down=self._down())

    async def _relay(
        self, link: ShardLink, method: str, request: Message, context: Context, *headers: tuple[str, str]
    ) -> bytes:
        metadata = [*relay_metadata(context), *headers]
        return await link.channel.unary(method, request, metadata=metadata, timeout_s=remaining_s(context))

    async def _relay_all(
        self, links: Sequence[ShardLink], method: str, requests: Sequence[Message], context: Context
    ) -> list[bytes]:
        """Return the responses of several shards. Raises: the first error, once all have answered."""
        calls = [self._relay(link, method, each, context) for link, each in zip(links, requests, strict=True)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, bytes)]

    async def _relay_stream(
        self, method: str, requests: AsyncIterator[Any], context: Context, episode_id_of: Callable[[Any], str]
    ) -> AsyncIterator[bytes]:
        first = await anext(requests, None)

        async def all_requests() -> AsyncIterator[Message]:
            if first is not None:
                yield first
            async for request in requests:
                yield request

        link = self._any_link() if first is None else self._link_of(episode_id_of(first))
        async for response in link.channel.two_way(
            method, all_requests(), metadata=relay_metadata(context), timeout_s=remaining_s(context)
        ):
            yield response


def _had_no_effect(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a reset that failed opened nothing and will open nothing, by its status."""
    # Without a reason the connection was lost, or the response too large, and the reset may have had its effect.
    has_reason = any(key == _STATUS_DETAILS for key, _ in error.trailing_metadata() or ())
    return has_reason and error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


def _task_of(request: env_pb2.ResetRequest) -> str:
    """Return the task without its variant: all variants use the same pool."""
    return request.task_id.partition("?")[0]


def parser(method: str) -> Callable[[bytes], Message]:
    """Return the function that parses a method's requests."""
    kind: type[Message] = getattr(env_pb2, f"{method}Request")
    return kind.FromString


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def relay_metadata(context: Context) -> list[tuple[str, str]]:
    """Return the metadata of a relayed call: its caller and its trace, and nothing else that the client sent."""
    trace = [
        (key, value)
        for key, value in context.invocation_metadata() or ()
        if key in _TRACE_KEYS and isinstance(value, str)
    ]
    return caller_metadata(current_caller()) + trace


def remaining_s(context: Context) -> float | None:
    """Return the seconds until the caller's deadline; None without one."""
    # The type stubs declare float, but it is None if the client set no deadline.
    remaining_s: float | None = context.time_remaining()
    return remaining_s
