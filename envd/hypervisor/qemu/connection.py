"""A connection to libvirt that reconnects after its libvirtd has ended.

QEMU processes outlive their libvirtd, but the connection does not: all its domain objects become invalid, and events in
between are lost. The owner of the domains therefore handles a new connection before anyone else can use it.
The embedded driver is part of this process, so its connection never breaks.
"""

import asyncio
import ctypes
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import libvirt

from envd.base.errors import HypervisorError, HypervisorUnavailable
from envd.hypervisor.qemu.processes import collect_orphans

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Delays between attempts to reconnect. A restarted libvirtd responds after 1 to 2 s.
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 5.0
#: How long `available` waits: longer than a restart takes.
_AVAILABLE_TIMEOUT_S = 15.0


class LibvirtLink:
    """Connection to one libvirt for the lifetime of the daemon."""

    def __init__(
        self,
        connection: Any,
        *,
        uri: str,
        dial: Callable[[], Any],
        executor: ThreadPoolExecutor,
        first_backoff_s: float = _FIRST_BACKOFF_S,
        available_timeout_s: float = _AVAILABLE_TIMEOUT_S,
    ) -> None:
        """Manage an open connection.

        Args:
            first_backoff_s: Delay before the first attempt to reconnect; doubles after each.
        """
        self.connection = connection
        self._uri = uri
        self._dial = dial
        self._executor = executor
        self._first_backoff_s = first_backoff_s
        self._available_timeout_s = available_timeout_s
        self._loop = asyncio.get_running_loop()
        self._on_domain_ended: Callable[[str, str], None] | None = None
        self._on_reconnected: Callable[[], Awaitable[None]] | None = None
        self._event_id: int | None = None
        self._is_up = asyncio.Event()
        self._is_up.set()
        self.problem = ""
        """Why it is not connected; empty while it is."""
        self._reconnecting: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, uri: str, *, prepare: Callable[[], None]) -> "LibvirtLink":
        """Connect. `prepare` is called first, on a thread where it may block. Raises: HypervisorError."""
        executor = ThreadPoolExecutor(max_workers=8, thread_name_prefix="libvirt")

        def connect() -> Any:
            _start_event_loop()
            prepare()
            if _is_embedded(uri):
                collect_orphans()
                return _open_embedded(uri)
            return libvirt.open(uri)

        try:
            connection = await asyncio.get_running_loop().run_in_executor(executor, connect)
        except BaseException as error:
            executor.shutdown(wait=False)
            if isinstance(error, libvirt.libvirtError):
                raise HypervisorError(f"libvirt {uri}: cannot be opened: {error}; see `envd doctor`") from error
            raise
        return cls(connection, uri=uri, dial=lambda: libvirt.open(uri), executor=executor)

    @property
    def is_embedded(self) -> bool:
        """Whether libvirt's driver runs in this process."""
        return _is_embedded(self._uri)

    def subscribe(
        self, *, on_domain_ended: Callable[[str, str], None], on_reconnected: Callable[[], Awaitable[None]]
    ) -> None:
        """Report domains that end, by name and reason, and new connections.

        Call once; makes short blocking libvirt calls. If `on_reconnected` raises HypervisorError, the link connects
        once more.
        """
        self._on_domain_ended, self._on_reconnected = on_domain_ended, on_reconnected
        self._register_callbacks()

    async def available(self) -> None:
        """Wait until it is connected, with a timeout. Raises: HypervisorUnavailable."""
        if self._is_up.is_set():
            return
        # Not `wait_for`, which can swallow the caller's cancellation.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._available_timeout_s):
                await self._is_up.wait()
        if not self._is_up.is_set():
            raise self._unavailable()

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking function on the executor.

        Raises:
            HypervisorUnavailable: The connection broke during the call; its effect is unknown.
            HypervisorError: libvirt returned an error.
        """
        used = self.connection
        try:
            return await self._loop.run_in_executor(self._executor, function, *arguments)
        except libvirt.libvirtError as error:
            if is_alive(used):
                raise HypervisorError(str(error)) from error
            self._on_broken(used, str(error))
            raise self._unavailable() from error

    async def aclose(self) -> None:
        """Disconnect. No calls may follow."""
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.wait({self._reconnecting})
        await self._loop.run_in_executor(self._executor, self._disconnect, self.connection)
        self._executor.shutdown(wait=False)

    # Reconnecting

    def _register_callbacks(self) -> None:
        self._event_id = self.connection.domainEventRegisterAny(
            None, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._on_lifecycle, None
        )
        if not self.is_embedded:
            self.connection.registerCloseCallback(self._on_close, None)

    def _disconnect(self, connection: Any) -> None:
        # On a broken connection libvirt removes the callbacks and raises because it cannot inform the server.
        with suppress(libvirt.libvirtError):
            if self._event_id is not None:
                event_id, self._event_id = self._event_id, None
                connection.domainEventDeregisterAny(event_id)
        if not self.is_embedded:
            with suppress(libvirt.libvirtError):
                connection.unregisterCloseCallback()
            with suppress(libvirt.libvirtError):
                connection.close()

    def _on_lifecycle(self, _connection: Any, domain: Any, event: int, detail: int, _opaque: Any) -> None:
        """Report a domain's end to the event loop. Called on libvirt's thread."""
        if event in {libvirt.VIR_DOMAIN_EVENT_STOPPED, libvirt.VIR_DOMAIN_EVENT_CRASHED} and self._on_domain_ended:
            # The details of the two events are numbered independently. libvirt calls only a guest's panic a crash.
            is_panic = event == libvirt.VIR_DOMAIN_EVENT_CRASHED
            reason = "guest-panic" if is_panic else _STOP_REASONS.get(detail, f"detail {detail}")
            self._call_on_loop(self._on_domain_ended, domain.name(), reason)

    def _on_close(self, connection: Any, reason: int, _opaque: Any) -> None:
        """Report the connection's end to the event loop. Called on libvirt's thread."""
        self._call_on_loop(self._on_broken, connection, _CLOSE_REASONS.get(reason, f"reason {reason}"))

    def _call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            logger.debug("libvirt event after the end of the event loop")

    def _on_broken(self, connection: Any, why: str) -> None:
        """Start to reconnect, unless that is in progress."""
        if connection is not self.connection or not self._is_up.is_set():
            return
        self._is_up.clear()
        self.problem = f"the connection to libvirt at {self._uri} broke: {why}"
        logger.error("%s; reconnecting", self.problem)
        self._reconnecting = asyncio.create_task(self._reconnect(), name="libvirt:reconnect")

    async def _reconnect(self) -> None:
        begin_s = time.monotonic()
        backoff_s = self._first_backoff_s
        while True:
            await asyncio.sleep(backoff_s)
            try:
                await self._replace()
            except (HypervisorError, libvirt.libvirtError) as error:
                self.problem = f"libvirt at {self._uri} cannot be reached: {error}"
                logger.debug("%s", self.problem)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            else:
                break
        self.problem = ""
        self._is_up.set()
        logger.info("reconnected to libvirt at %s after %.1f s", self._uri, time.monotonic() - begin_s)
        if not is_alive(self.connection):
            # It broke while `_on_broken` ignored its callback.
            self._on_broken(self.connection, "it ended immediately after reconnecting")

    async def _replace(self) -> None:
        broken = self.connection
        self.connection = await self._loop.run_in_executor(self._executor, self._dial)
        await self._loop.run_in_executor(self._executor, self._disconnect, broken)
        # Events first, so that no domain's end is missed during the lookup.
        await self._loop.run_in_executor(self._executor, self._register_callbacks)
        if self._on_reconnected is not None:
            await self._on_reconnected()

    def _unavailable(self) -> HypervisorUnavailable:
        problem = self.problem or f"libvirt at {self._uri} was reconnected during the call"
        return HypervisorUnavailable(
            f"{problem}; existing machines keep running, and new ones can be made after it has reconnected",
            retry_after_s=_MAX_BACKOFF_S,
        )


@lru_cache
def _open_embedded(uri: str) -> Any:
    """Open the embedded driver once: each further opening registers it again, and libvirt refuses the 17th.

    So it reads its configuration once in a process.
    """
    return libvirt.open(uri)


def _is_embedded(uri: str) -> bool:
    return urlsplit(uri).path == "/embed"


def is_alive(connection: Any) -> bool:
    try:
        return bool(connection.isAlive())
    except libvirt.libvirtError:
        return False


@lru_cache(maxsize=1)
def _start_event_loop() -> None:
    """Run libvirt's event loop in a thread, once per process; the embedded driver and all events need it.

    libvirt's loop is GLib's default context (util/vireventglib.c). `virEventRunDefaultImpl` runs one iteration, and the
    thread needs the interpreter's lock before the next one: about 30 times per start of a machine, each time behind
    whatever Python code runs. GLib's own loop takes the lock for callbacks only.
    """
    libvirt.virEventRegisterDefaultImpl()
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    glib = ctypes.CDLL("libglib-2.0.so.0")  # libvirt has loaded it
    glib.g_main_loop_new.restype = ctypes.c_void_p
    glib.g_main_loop_run.argtypes = [ctypes.c_void_p]
    loop = glib.g_main_loop_new(None, 0)
    threading.Thread(target=glib.g_main_loop_run, args=(loop,), name="libvirt-events", daemon=True).start()


_STOP_REASONS = {
    libvirt.VIR_DOMAIN_EVENT_STOPPED_SHUTDOWN: "the guest shut down",
    libvirt.VIR_DOMAIN_EVENT_STOPPED_DESTROYED: "destroyed",
    libvirt.VIR_DOMAIN_EVENT_STOPPED_CRASHED: "crashed",
    libvirt.VIR_DOMAIN_EVENT_STOPPED_FAILED: "failed",
}
_CLOSE_REASONS = {
    libvirt.VIR_CONNECT_CLOSE_REASON_ERROR: "an error of the connection",
    libvirt.VIR_CONNECT_CLOSE_REASON_EOF: "libvirtd ended",
    libvirt.VIR_CONNECT_CLOSE_REASON_KEEPALIVE: "libvirtd did not respond",
    libvirt.VIR_CONNECT_CLOSE_REASON_CLIENT: "envd closed it",
}
