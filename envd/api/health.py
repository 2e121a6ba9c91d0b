# ruff: noqa: ARG002, N802 -- names and arguments are those of the contract
"""The health service: one status for the whole server, without locks, so that no watcher delays another or a drain."""

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from envd.base.aio import Changes
from envd.base.errors import ObjectNotFound, RateLimited

MAX_WATCHER_COUNT: Final = 256
"""Watchers of all peers together."""

_RETRY_AFTER_S = 10.0
_Status = health_pb2.HealthCheckResponse

Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Reports whether the server accepts new episodes."""

    def __init__(self, *services: str, max_watcher_count: int = MAX_WATCHER_COUNT) -> None:
        """Report NOT_SERVING for `services`, and for the server as a whole (an empty name)."""
        self._services = {"", *services}
        self._max_watcher_count = max_watcher_count
        self._is_serving = False
        self._watcher_count = 0
        self._changes = Changes()

    def set_serving(self, is_serving: bool) -> None:
        """Change the status, and report it to all watchers. Does not wait for them."""
        self._is_serving = is_serving
        self._changes.notify()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            raise ObjectNotFound(f"service {request.service!r}: not served here")
        return _Status(status=self._status())

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yield the status, at once and on change; a slow reader skips states."""
        if self._watcher_count >= self._max_watcher_count:
            raise RateLimited(
                f"health: {self._watcher_count} watchers, at most {self._max_watcher_count}; use Check",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._watcher_count += 1
        try:
            last: int | None = None
            while True:
                changed = self._changes.next
                status = self._status() if request.service in self._services else _Status.SERVICE_UNKNOWN
                if status != last:
                    last = status
                    yield _Status(status=status)
                await changed.wait()
        finally:
            self._watcher_count -= 1

    def _status(self) -> int:
        return _Status.SERVING if self._is_serving else _Status.NOT_SERVING
