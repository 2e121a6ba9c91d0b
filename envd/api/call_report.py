"""Measure, log and answer one call: each failure is logged once, with the ids of its request."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from grpc_status import rpc_status

from envd.api.status import code_of, reason_of, status_of
from envd.base.errors import EnvdError, RateLimited
from envd.base.telemetry.logs import bound
from envd.base.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

#: A request may be 64 MiB long; keep ids in logs and responses short.
_MAX_ID_CHARS = 256
#: Codes for failures of envd or its host, which its operator must investigate.
_OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}

Response = TypeVar("Response")
Context = Any


class CallReport:
    """Measures and logs one call."""

    def __init__(self, metrics: Metrics, method: str, *, peer: str, caller: str = "") -> None:
        """Start measuring.

        Args:
            metrics: Gets the duration and the failure.
            method: The method.
            peer: Address of the caller.
            caller: Name of its token.
        """
        self._metrics = metrics
        self._method = method
        self.ids: dict[str, str] = {}
        """Ids in the request; for a stream, in the newest request that has any."""
        self._origin = {"peer": peer, **({"caller": caller} if caller else {})}
        self._began_s = time.monotonic()

    async def forward(
        self, start: Callable[[], AsyncIterator[Response]], context: Context
    ) -> AsyncGenerator[Response, None]:
        """Forward responses; a failure becomes the stream's status, after the responses already sent."""
        # No bound() here: grpc finishes a dropped stream in another context, where the ids cannot be unbound.
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
        """Measure the call; return its duration in seconds."""
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
        with bound(**self.ids, **self._origin):
            logger.log(
                _level_of(error, code),
                "%s failed with %s/%s after %.3f s: %s",
                self._method,
                code.name,
                reason,
                duration_s,
                error,
                exc_info=error if is_bug else None,
            )
        status = status_of(error, metadata={"method": self._method, **self.ids})
        await context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError("abort_with_status raises")


def _level_of(error: Exception, code: grpc.StatusCode) -> int:
    # Calls above the rate limit are counted but not logged, or their caller could flood the log.
    if isinstance(error, RateLimited):
        return logging.DEBUG
    return logging.ERROR if code in _OURS else logging.INFO


def ids_of(message: object) -> dict[str, str]:
    """Return the ids in a request, cut to a maximum length that is above that of valid ids."""
    ids = {name: getattr(message, name, "")[:_MAX_ID_CHARS] for name in ("episode_id", "request_id", "task_id")}
    return {name: value for name, value in ids.items() if value}
