"""Between gRPC and the servicer: domain errors become statuses here, and nowhere else.

Each call is measured and each failure is logged once, with the ids of what it is about.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_status import rpc_status

from envd.api.status import code_of, reason_of, status_of
from envd.errors import EnvdError
from envd.telemetry.logs import bound
from envd.telemetry.metrics import Metrics

_logger = logging.getLogger(__name__)

_SERVICE_PREFIX = "/cuaenv.v1.CUAEnv/"
#: Codes that blame envd or its host, so that its operator must look.
_OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}

Request = TypeVar("Request")
Response = TypeVar("Response")
#: grpc's own types for handlers describe the blocking server.
Handler = Any
Context = Any


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Answers failures with `google.rpc.Status`, and measures every call of our service."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the handlers of our service; health and reflection answer for themselves."""
        handler = await continuation(handler_call_details)
        path = str(handler_call_details.method)
        if handler is None or not path.startswith(_SERVICE_PREFIX):
            return handler
        method = path.removeprefix(_SERVICE_PREFIX)
        # Each kind of handler needs its own wrapper and its own constructor.
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(method, handler.unary_unary), handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                self._server_stream(method, handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(
                self._two_way_stream(method, handler.stream_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        raise NotImplementedError(f"{path} streams requests only; give that kind a wrapper here")

    def _unary(
        self, method: str, inner: Callable[[Message, Context], Awaitable[Response]]
    ) -> Callable[[Message, Context], Awaitable[Response]]:
        async def answer(request: Message, context: Context) -> Response:
            ids = _ids_of(request)
            call = _Call(self._metrics, method, ids)
            with bound(**ids):
                try:
                    response = await inner(request, context)
                except asyncio.CancelledError:
                    call.finish(grpc.StatusCode.CANCELLED)
                    raise
                except Exception as error:
                    await call.fail(error, context)
                call.finish(grpc.StatusCode.OK)
                return response

        return answer

    def _server_stream(
        self, method: str, inner: Callable[[Message, Context], AsyncIterator[Response]]
    ) -> Callable[[Message, Context], AsyncIterator[Response]]:
        async def answer(request: Message, context: Context) -> AsyncIterator[Response]:
            call = _Call(self._metrics, method, _ids_of(request))
            async with aclosing(call.relay(lambda: inner(request, context), context)) as responses:
                async for response in responses:
                    yield response

        return answer

    def _two_way_stream(
        self, method: str, inner: Callable[[AsyncIterator[Request], Context], AsyncIterator[Response]]
    ) -> Callable[[AsyncIterator[Request], Context], AsyncIterator[Response]]:
        async def answer(requests: AsyncIterator[Request], context: Context) -> AsyncIterator[Response]:
            call = _Call(self._metrics, method, {})
            async with aclosing(call.relay(lambda: inner(call.noting_ids(requests), context), context)) as responses:
                async for response in responses:
                    yield response

        return answer


class _Call:
    """One call: when it began, what it is about, how it ended."""

    def __init__(self, metrics: Metrics, method: str, ids: Mapping[str, str]) -> None:
        self._metrics = metrics
        self._method = method
        self._ids = dict(ids)
        self._began_s = time.monotonic()

    async def noting_ids(self, requests: AsyncIterator[Request]) -> AsyncIterator[Request]:
        """Pass requests on, and remember the newest one's ids."""
        async for request in requests:
            self._ids = _ids_of(getattr(request, "step", request))
            yield request

    async def relay(
        self, start: Callable[[], AsyncIterator[Response]], context: Context
    ) -> AsyncGenerator[Response, None]:
        """Pass responses on; a failure becomes the stream's status, after the responses already sent."""
        # No bound() here: a stream that grpc drops is finished in another context, where ids cannot be unbound.
        try:
            async for response in start():
                yield response
        except asyncio.CancelledError:
            self.finish(grpc.StatusCode.CANCELLED)
            raise
        except Exception as error:
            await self.fail(error, context)
        self.finish(grpc.StatusCode.OK)

    def finish(self, code: grpc.StatusCode) -> float:
        """Measure the call; return its length in seconds."""
        duration_s = time.monotonic() - self._began_s
        self._metrics.rpc_duration.labels(method=self._method, code=code.name).observe(duration_s)
        return duration_s

    async def fail(self, error: Exception, context: Context) -> NoReturn:
        """Measure, log and answer a failure."""
        code = code_of(error) if isinstance(error, EnvdError) else grpc.StatusCode.INTERNAL
        reason = reason_of(error)
        duration_s = self.finish(code)
        self._metrics.failures.labels(reason=reason).inc()
        is_bug = reason == EnvdError.reason
        with bound(**self._ids):
            _logger.log(
                logging.ERROR if code in _OURS else logging.INFO,
                "%s answered %s/%s after %.3f s: %s",
                self._method,
                code.name,
                reason,
                duration_s,
                error,
                exc_info=error if is_bug else None,
            )
        status = status_of(error, metadata={"method": self._method, **self._ids})
        await context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError("abort_with_status raises")


def _ids_of(message: object) -> dict[str, str]:
    """Return the ids that a request carries."""
    ids = {name: getattr(message, name, "") for name in ("episode_id", "request_id", "task_id")}
    return {name: value for name, value in ids.items() if value}
