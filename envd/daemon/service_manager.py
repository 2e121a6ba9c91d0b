"""Reports the daemon's state to systemd (sd_notify(3)), which restarts a daemon whose event loop hangs.

Without `NOTIFY_SOCKET`, such as in a terminal or a container, nothing is sent.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)


class ServiceManager:
    """The process that supervises this one, if it wants reports."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Read the supervisor's address and watchdog interval."""
        self._address = environ.get("NOTIFY_SOCKET", "")
        is_for_us = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = environ.get("WATCHDOG_USEC", "")
        self._watchdog_s = int(microseconds) / 1e6 if is_for_us and microseconds.isdecimal() else 0.0

    def ready(self) -> None:
        self._send("READY=1")

    def status(self, text: str) -> None:
        self._send(f"STATUS={text}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    @asynccontextmanager
    async def watchdog(self) -> AsyncIterator[None]:
        """Reset the watchdog at half of its interval during the block. A hanging event loop does not reset it."""

        async def reset() -> None:
            while self._watchdog_s:
                self._send("WATCHDOG=1")
                await asyncio.sleep(self._watchdog_s / 2)

        task = asyncio.create_task(reset(), name="watchdog")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _send(self, state: str) -> None:
        if not self._address:
            return
        # A leading @ denotes Linux's abstract namespace.
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as sender:
                sender.sendto(state.encode(), address)
        except OSError as error:
            logger.warning("the service manager at %s was not notified: %s", self._address, error)
