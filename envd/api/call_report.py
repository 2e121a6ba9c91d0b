"""Measure, log and answer one call: each failure is logged once, with the ids of its request, within limits."""

import asyncio
import logging
import time
from types import TracebackType
from typing import Any, NoReturn, Self

import grpc
from grpc_status import rpc_status

from envd.api.security.guard import CallGuard
from envd.api.status import code_of, is_failure_of_ours, reason_of, status_of
from envd.base.errors import EnvdError, RateLimited
from envd.base.telemetry.logs import bound
from envd.base.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

#: A request may be 64 MiB long; keep ids in logs and responses short.
_MAX_ID_CHARS = 256

Context = Any


class CallReport:
    """Measures and logs one call. An async context manager around it, which answers its failure."""

    def __init__(self, metrics: Metrics, guard: CallGuard, method: str, context: Context, *, caller: str = "") -> None:
        self._metrics = metrics
        self._guard = guard
        self._caller = caller
        self._method = method
        self.ids: dict[str, str] = {}
        """Ids in the request; for a stream, in the newest request that has any."""
        self._context = context
        self.peer: str = context.peer()
        """Address of the caller."""
        self._origin = {"peer": self.peer, **({"caller": caller} if caller else {})}
        self._began_s = time.monotonic()

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
        self._metrics.rpc_duration.labels(method=self._method, code=code.name).observe(duration_s)
        return duration_s

    async def _fail(self, error: Exception) -> NoReturn:
        code = code_of(error) if isinstance(error, EnvdError) else grpc.StatusCode.INTERNAL
        reason = reason_of(error)
        duration_s = self._finish(code)
        self._metrics.failures.labels(reason=reason).inc()
        is_bug = reason == EnvdError.reason
        text = self._guard.log_text(error, self._caller, self.peer)
        if text is not None:
            with bound(**self.ids, **self._origin):
                logger.log(
                    _level_of(error),
                    "%s failed with %s/%s after %.3f s: %s",
                    self._method,
                    code.name,
                    reason,
                    duration_s,
                    text,
                    exc_info=error if is_bug else None,
                )
        status = status_of(error, metadata={"method": self._method, **self.ids})
        await self._context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError("abort_with_status raises")


def _level_of(error: Exception) -> int:
    # Calls above the rate limit are counted but not logged, or their caller could flood the log.
    if isinstance(error, RateLimited):
        return logging.DEBUG
    return logging.ERROR if is_failure_of_ours(error) else logging.INFO


def ids_of(message: object) -> dict[str, str]:
    """Return the ids in a request, cut to a maximum length that is above that of valid ids."""
    ids = {name: getattr(message, name, "")[:_MAX_ID_CHARS] for name in ("episode_id", "request_id", "task_id")}
    return {name: value for name, value in ids.items() if value}
