"""Authorize and decode requests before the servicers, and convert domain errors to statuses after them.

Handlers receive the bytes of requests, and read them: an unauthenticated peer's body is never read, a caller's only
after its call was counted, and a malformed one is an ordinary failure. Each failure is logged once, with the ids of its
request, within limits.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from envd.api.security.access import Caller, rule_of, set_current_caller
from envd.api.security.guard import CallGuard, Metadata, RunningCall
from envd.api.status import code_of, is_failure_of_ours, reason_of, status_of
from envd.base.errors import EnvdError, InvalidRequest, RateLimited
from envd.base.telemetry import traces
from envd.base.telemetry.logs import bound
from envd.base.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

#: A request may be 64 MiB long; keep ids in logs and responses short.
_MAX_ID_CHARS = 256
_SERVICE_PREFIX = "/cuaenv.v1.CUAEnv/"
_HEALTH_PREFIX = "Health/"
#: Two-way streams whose later requests acknowledge responses.
_ACKNOWLEDGED = frozenset({"StreamFrames"})
#: Streams whose later requests carry bytes: too many of them wait instead of failing.
_PACED = frozenset({"ForwardGuestPort", "ImportCheckpoint"})

Response = TypeVar("Response")
#: grpc's type stubs for handlers describe the blocking server.
Handler = Any
Context = Any


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Authorizes and measures calls; answers failures with `google.rpc.Status`."""

    def __init__(self, metrics: Metrics, guard: CallGuard) -> None:
        self._metrics = metrics
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = _method_of(str(handler_call_details.method))
        metadata: Metadata = handler_call_details.invocation_metadata
        call = ServedCall(method, metadata, handler.request_deserializer, metrics=self._metrics, guard=self._guard)
        try:
            call.identify()
        except Exception as error:
            return self._refusal(call, error)
        # Handlers of streams of requests: grpc reads a single request before it calls the handler.
        if handler.unary_unary:
            return grpc.stream_unary_rpc_method_handler(
                self._unary(call, handler.unary_unary), None, handler.response_serializer
            )
        return grpc.stream_stream_rpc_method_handler(self._stream(call, handler), None, handler.response_serializer)

    def _refusal(self, call: "ServedCall", error: Exception) -> Handler:
        """Return a handler that fails at once, for a method of any kind."""

        async def refuse(_requests: AsyncIterator[bytes], context: Context) -> None:
            async with call.begin(context):
                self._guard.count_unauthenticated(call.peer)
                raise error

        # A streaming handler never reads the body, up to 64 MiB, of an unauthorized call.
        return grpc.stream_unary_rpc_method_handler(refuse)

    def _unary(
        self, call: "ServedCall", inner: Callable[[Message, Context], Awaitable[Response]]
    ) -> Callable[[AsyncIterator[bytes], Context], Awaitable[Response]]:
        async def answer(requests: AsyncIterator[bytes], context: Context) -> Response:
            async with call.begin(context):
                with call.running() as running:
                    request = await call.receive(requests, running)
                    call.ids = ids_of(request)
                    with traces.call_span(call.method, call.metadata, call.ids) as trace_ids:
                        call.ids |= trace_ids
                        with bound(**call.ids, **call.log_ids):
                            call.admit(request)
                            return await inner(request, context)

        return answer

    def _stream(
        self, call: "ServedCall", handler: Handler
    ) -> Callable[[AsyncIterator[bytes], Context], AsyncIterator[Response]]:
        """Return the handler of a call with a stream of requests or responses, or both."""

        async def answer(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Response]:
            response_count = 0

            async def admitted(running: RunningCall) -> AsyncIterator[Message]:
                request_count = 0
                async for body in requests:
                    request_count += 1
                    if call.method in _PACED and request_count > 1:
                        await call.pace()
                    # One acknowledgement per response is free: who reads faster must not be cut off earlier.
                    elif call.method not in _ACKNOWLEDGED or not 1 < request_count <= 1 + response_count:
                        call.count()
                    request = call.decode(body, running)
                    call.ids = ids_of(getattr(request, "step", request)) or call.ids
                    call.recheck()
                    call.admit(request)
                    yield request

            # No bound() here: grpc finishes a dropped stream in another context, where the ids cannot be unbound.
            async with call.begin(context):
                with call.running() as running:
                    if handler.stream_stream:
                        responses = handler.stream_stream(admitted(running), context)
                    elif handler.stream_unary:
                        responses = _only(handler.stream_unary(admitted(running), context))
                    else:
                        request = await call.receive(requests, running)
                        call.ids = ids_of(request)
                        call.admit(request)
                        responses = handler.unary_stream(request, context)
                    async with aclosing(responses):
                        async for response in responses:
                            call.recheck()
                            response_count += 1
                            yield response

        return answer


class ServedCall:
    """One call: an async context manager, once it has begun, that measures and logs it and answers its failure.

    Each of its requests is admitted separately.
    """

    def __init__(
        self, method: str, metadata: Metadata, parse: Callable[[bytes], Message], *, metrics: Metrics, guard: CallGuard
    ) -> None:
        self._metrics = metrics
        self._guard = guard
        self.metadata = metadata
        self._parse = parse
        self._caller: Caller | None = None
        self._is_health = method.startswith(_HEALTH_PREFIX)
        self.method = method
        self.ids: dict[str, str] = {}
        """Ids in the request; for a stream, in the newest request that has any."""
        self._context: Context = None
        self.peer = ""
        """The caller's address; set when the call begins."""
        self._began_s = 0.0

    def begin(self, context: Context) -> Self:
        """Return the call, to be entered."""
        self._context = context
        self.peer = context.peer()
        self._began_s = time.monotonic()
        return self

    @property
    def caller_name(self) -> str:
        """Name of the caller's token; empty without one."""
        return self._caller.name if self._caller else ""

    @property
    def log_ids(self) -> Mapping[str, str]:
        return {"caller": self.caller_name} if self.caller_name else {}

    def identify(self) -> None:
        """Find the caller, which `Health` does not require. Raises: see `CallGuard.identify`."""
        if self._is_health:
            self._caller = self._guard.find_caller(self.metadata)
        else:
            self._caller = self._guard.identify(self.method, self.metadata)

    def running(self) -> RunningCall:
        """Return the call, to be entered while it runs, which raises RateLimited."""
        if self._caller is None:
            return self._guard.running_health_call(self.method, self.peer)
        return self._guard.running_call(self._caller, self.method, self.peer)

    def count(self) -> None:
        """Count a request toward the rate limit. Raises: RateLimited."""
        if self._is_health:
            self._guard.count_health_call(self.peer)
        else:
            self._guard.count(self._known_caller, self.method, self.peer)

    async def pace(self) -> None:
        """Wait until the caller may send another message of bytes."""
        while wait_s := self._guard.message_wait_s(self._known_caller, self.peer):  # noqa: ASYNC110 -- time passes
            await asyncio.sleep(wait_s)

    async def receive(self, requests: AsyncIterator[bytes], running: RunningCall) -> Message:
        """Count and return the only request of a call. The request of an unknown caller is not read but empty.

        Raises:
            RateLimited: The caller exceeds a limit.
            InvalidRequest: The request cannot be decoded.
        """
        self.count()
        if self._caller is None:
            return self._parse(b"")
        return self.decode(await running.receive(requests), running)

    def decode(self, body: bytes | None, running: RunningCall) -> Message:
        """Return the request in a body, and count its bytes while it is in use. Raises: as `receive`."""
        request = _decoded(self.method, body, self._parse)
        running.hold(len(body or b""))
        return request

    def admit(self, request: Message) -> None:
        """Check that a request may be served, and set its caller for the servicer."""
        if self._caller is None or self._is_health:
            return
        id_count = len(getattr(request, "episode_ids", ()) or getattr(request, "task_ids", ()))
        self._guard.admit(
            self._caller, self.method, episode_id=self.ids.get("episode_id", ""), id_count=id_count, peer=self.peer
        )
        set_current_caller(self._caller)

    def recheck(self) -> None:
        """Check during a stream that the token is still valid and its rights still suffice.

        Raises:
            Unauthenticated, ScopeTooSmall, EpisodeNotFound: They are not.
        """
        if self._is_health:
            return
        caller = self._guard.identify(self.method, self.metadata)
        if caller != self._caller:
            self._guard.check_owner(caller, self.method, self.ids.get("episode_id", ""))
            self._caller = caller

    @property
    def _known_caller(self) -> Caller:
        if self._caller is None:
            raise AssertionError("only health calls have no caller")
        return self._caller

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Measure the call, and answer a failure; in a stream after the responses already sent."""
        if error is None:
            self._finish(grpc.StatusCode.OK)
        elif isinstance(error, asyncio.CancelledError):
            self._finish(grpc.StatusCode.CANCELLED)
        elif isinstance(error, Exception):
            await self._fail(error)

    def _finish(self, code: grpc.StatusCode) -> float:
        duration_s = time.monotonic() - self._began_s
        self._metrics.rpc_duration.labels(method=self.method, code=code.name).observe(duration_s)
        return duration_s

    async def _fail(self, error: Exception) -> NoReturn:
        code = code_of(error) if isinstance(error, EnvdError) else grpc.StatusCode.INTERNAL
        reason = reason_of(error)
        duration_s = self._finish(code)
        self._metrics.failures.labels(reason=reason).inc()
        is_bug = reason == EnvdError.reason
        text = self._guard.log_text(error, self.caller_name, self.peer)
        if text is not None:
            with bound(**self.ids, peer=self.peer, **self.log_ids):
                logger.log(
                    _level_of(error),
                    "%s failed with %s/%s after %.3f s: %s",
                    self.method,
                    code.name,
                    reason,
                    duration_s,
                    text,
                    exc_info=error if is_bug else None,
                )
        status = status_of(error, metadata={"method": self.method, **self.ids})
        await self._context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError("abort_with_status raises")


async def _only(response: Awaitable[Response]) -> AsyncGenerator[Response, None]:
    yield await response


def _method_of(path: str) -> str:
    """Return a method's name in limits, logs and metrics: `Step`, or `Health/Check` in other services."""
    if path.startswith(_SERVICE_PREFIX):
        return path.removeprefix(_SERVICE_PREFIX)
    service, _, name = path.removeprefix("/").rpartition("/")
    return f"{service.rpartition('.')[2]}/{name}"


def _decoded(method: str, body: bytes | None, parse: Callable[[bytes], Message]) -> Message:
    """Return the request in a body. Raises: InvalidRequest: it is missing, too large or malformed."""
    if body is None:
        raise InvalidRequest("request", "is missing; send one message")
    max_bytes = rule_of(method).max_bytes
    if len(body) > max_bytes:
        raise InvalidRequest("request", f"has {len(body)} bytes; {method} takes at most {max_bytes}")
    try:
        return parse(body)
    except DecodeError:
        raise InvalidRequest("request", f"is not a valid message of {method}; use the contract's bindings") from None


def _level_of(error: Exception) -> int:
    # Calls above the rate limit are counted but not logged, or their caller could flood the log.
    if isinstance(error, RateLimited):
        return logging.DEBUG
    return logging.ERROR if is_failure_of_ours(error) else logging.INFO


def ids_of(message: object) -> dict[str, str]:
    """Return the ids in a request, cut to a maximum length that is above that of valid ids."""
    ids = {name: getattr(message, name, "")[:_MAX_ID_CHARS] for name in ("episode_id", "request_id", "task_id")}
    return {name: value for name, value in ids.items() if value}
