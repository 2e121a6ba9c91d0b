"""One client per process for the same daemons, in any number of event loops.

A trainer's rollouts, evaluation and asynchronous mode run in short-lived loops and threads of their own. They share a
client, and each loop's connections end with the loop.
"""

import asyncio
import threading
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Final

from cuaenv.argument_types import Checked
from cuaenv.client.async_client import AsyncEnvClient
from cuaenv.client.credentials import Tls
from cuaenv.client.episode import close_all
from cuaenv.client.placement import RetryPolicy

_CLOSE_TIMEOUT: Final = timedelta(seconds=20)

_lock = threading.Lock()
_clients: "dict[ClientSettings, AsyncEnvClient]" = {}
_closers: dict[tuple[asyncio.AbstractEventLoop, AsyncEnvClient], asyncio.Task[None]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings(Checked):
    """Arguments of `AsyncEnvClient`; equal settings share a client."""

    targets: tuple[str, ...]
    """Addresses of the daemons."""
    run: str = ""
    """Label of the training run, for fair share and metrics."""
    max_episodes: int | None = None
    """Most episodes that resets may hold at once in one event loop."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    keep_alive_interval: timedelta | None = None
    token: str | None = field(default=None, repr=False)
    """Token of the caller; by default the variable `ENVD_TOKEN`."""
    tls: Tls | None = None
    expects_idle: bool = False
    """Whether steps say that no call follows soon."""


def shared_client(settings: ClientSettings) -> AsyncEnvClient:
    """Return this process's client with these settings, for use in the running loop.

    When the loop ends and cancels its tasks, as `asyncio.run` does, their open episodes are closed within 20 s, and
    then the loop's connections. For other loops, await `close_shared_clients` at the end; without either, leases end
    the episodes.

    Raises:
        ValueError: See `AsyncEnvClient`.
        RuntimeError: No event loop runs here.
    """
    loop = asyncio.get_running_loop()
    with _lock:
        client = _clients.get(settings)
        if client is None:
            client = AsyncEnvClient(**{each.name: getattr(settings, each.name) for each in fields(settings)})
            _clients[settings] = client
        for closed in [key for key in _closers if key[0].is_closed()]:
            del _closers[closed]
        if (loop, client) not in _closers:
            _closers[loop, client] = loop.create_task(_close_with_loop(client), name="close-client-with-loop")
    return client


async def close_shared_clients() -> None:
    """Close the running loop's connections of all shared clients, for a loop that ends without cancelling its tasks.

    Open episodes are first closed by their owners within 20 s. Idempotent; a client used again connects again.
    """
    loop = asyncio.get_running_loop()
    with _lock:
        closers = {key[1]: _closers.pop(key) for key in list(_closers) if key[0] is loop}
    await asyncio.gather(*(client.aclose(wait=_CLOSE_TIMEOUT) for client in closers))
    for closer in closers.values():
        closer.cancel()
    await asyncio.gather(*closers.values(), return_exceptions=True)


async def _close_with_loop(client: AsyncEnvClient) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        # The other cancelled tasks of the loop end their openings now, and no owner needs an open episode.
        await close_all(client.episodes)
        await client.aclose(wait=_CLOSE_TIMEOUT)
