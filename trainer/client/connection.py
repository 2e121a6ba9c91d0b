"""One daemon as somebody to call: a channel for each event loop, deadlines, and lost calls made again."""

import asyncio
import logging
import random
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import grpc
from cuaenv.v1 import env_pb2_grpc

from trainer.client.errors import DeadlineExceeded, error_of
from trainer.client.retry import RetryPolicy, retry_pause_s
from trainer.security import Access

if TYPE_CHECKING:
    from cuaenv.v1.env_pb2_grpc import CUAEnvAsyncStub

_logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES: Final = 64 << 20
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A proxy that is set for other traffic must not see ours: environments are near, and streams outlive its patience.
    ("grpc.enable_http_proxy", 0),
    # A connection that died without a word is found within 30 s, and then the call is made again.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # grpc's own pause grows to two minutes, long after a daemon is back.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


class Connection:
    """Reaches one daemon, from any event loop; each loop gets a channel of its own."""

    def __init__(self, target: str, *, access: Access, retry: RetryPolicy) -> None:
        """Remember where the daemon is; the first call connects.

        Args:
            target: `HOST:PORT` or `unix:PATH`.
            access: Token and TLS.
            retry: How lost calls are made again.

        Raises:
            ValueError: The token would travel to another host in clear text.
        """
        access.check(target)
        self.target = target
        self._access = access
        self._retry = retry
        # Each loop touches only its own entry, so threads need no lock; a loop that is gone takes its channel with it.
        self._channels: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, grpc.aio.Channel] = (
            weakref.WeakKeyDictionary()
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.target}>"

    async def aclose(self) -> None:
        """Close the running loop's channel. Idempotent; another call connects again."""
        channel = self._channels.pop(asyncio.get_running_loop(), None)
        if channel is not None:
            await channel.close()

    @property
    def stub(self) -> "CUAEnvAsyncStub":
        """The service as seen from the running loop."""
        loop = asyncio.get_running_loop()
        channel = self._channels.get(loop)
        if channel is None:
            channel = self._channels[loop] = self._access.open_channel(self.target, _CHANNEL_OPTIONS)
        stub: Any = self._access.authorised(env_pb2_grpc.CUAEnvStub(channel))
        return stub  # type: ignore[no-any-return]

    async def call(self, method: str, request: Any, timeout: timedelta, *, retry: bool = True) -> Any:
        """Call until there is an answer, an error that another try cannot mend, or no time left. Raises: EnvError."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout.total_seconds()
        attempt_s = self._retry.attempt_timeout.total_seconds() if retry else timeout.total_seconds()
        attempt = 0
        while True:
            try:
                call = getattr(self.stub, method)(request, timeout=min(attempt_s, deadline_s - loop.time()))
                return await call
            except grpc.aio.AioRpcError as failure:
                error = error_of(failure)
                pause_s = retry_pause_s(error, attempt=attempt, policy=self._retry, jitter=random.random())  # noqa: S311
                left_s = deadline_s - loop.time()
                if not retry or pause_s is None or pause_s >= left_s:
                    raise error from failure
            # A slow answer is joined, which is no news; a daemon that cannot be reached is.
            is_news = attempt == 0 and not isinstance(error, DeadlineExceeded)
            level = logging.WARNING if is_news else logging.DEBUG
            _logger.log(
                level, "%s at %s: %s: %s; trying for %.0f s more", method, self.target, error.code, error, left_s
            )
            await asyncio.sleep(pause_s)
            attempt += 1
