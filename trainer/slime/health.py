"""End a run whose daemons are unreachable: a watch that polls them while episodes use them.

No locks: code between two awaits is atomic in an event loop, and each loop has its own objects.
"""

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from cuaenv.client import AsyncEnvClient, DeadlineExceeded, EnvError, Unavailable


class DaemonWatch:
    """Polls the daemons of a client while episodes use it."""

    def __init__(self, client: AsyncEnvClient, timeout_s: float) -> None:
        # Weak: a watch is the value of a mapping whose weak key the client is.
        self._client = weakref.ref(client)
        self._timeout_s = timeout_s
        self._user_count = 0
        self._poller: asyncio.Task[None] | None = None
        self.failure = ""
        """Why the run must end: no daemon answered for `timeout_s`. Empty until then."""

    @asynccontextmanager
    async def use(self) -> AsyncIterator["DaemonWatch"]:
        """Poll within the block."""
        self._user_count += 1
        if self._poller is None:
            self.failure = ""
            client = self._client()
            assert client is not None  # noqa: S101 -- its user has it
            self._poller = asyncio.create_task(self._poll(client), name="daemon-watch")
        try:
            yield self
        finally:
            self._user_count -= 1
            if self._user_count == 0:
                self._poller.cancel()
                self._poller = None

    async def _poll(self, client: AsyncEnvClient) -> None:
        loop = asyncio.get_running_loop()
        answered_s = loop.time()
        while True:
            await asyncio.sleep(self._timeout_s / 12)
            try:
                await client.list_pools(timeout=timedelta(seconds=self._timeout_s / 6))
                answered_s = loop.time()
            except (Unavailable, DeadlineExceeded) as error:
                if loop.time() - answered_s >= self._timeout_s:
                    self.failure = f"no daemon answered for {self._timeout_s:g} s (envd.daemon_timeout_s): {error}"
                    return
            except EnvError:
                answered_s = loop.time()


_Watches = weakref.WeakKeyDictionary[AsyncEnvClient, DaemonWatch]
_watches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watches] = weakref.WeakKeyDictionary()


def watch_of(client: AsyncEnvClient, timeout_s: float) -> DaemonWatch:
    """Return the running loop's watch of a client."""
    watches = _watches.setdefault(asyncio.get_running_loop(), weakref.WeakKeyDictionary())
    return watches.setdefault(client, DaemonWatch(client, timeout_s))
