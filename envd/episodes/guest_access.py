"""Read files, write files, run commands and connect to ports in an episode's guest, if its pool allows it.

A connection ends with the episode, and its bytes renew the lease.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Self

from cuaenv.results import CommandResult
from envd.base.aio import race
from envd.base.errors import AccessDenied, GuestError, MachineLost, ObjectNotFound, RateLimited
from envd.base.streams import CHUNK_BYTES, close
from envd.base.telemetry.traces import Stopwatch
from envd.desktop.desktop import Desktop
from envd.episodes.context import EpisodeContext
from envd.episodes.episode import Episode
from envd.pool.leased import LeasedMachine

#: Connections to ports of one episode's guest. Each takes two file descriptors of this process.
MAX_CONNECTIONS = 32
#: Shortest interval between renewals of the lease by bytes.
_RENEWAL_INTERVAL_S = 1.0


class PortConnection:
    """An open connection; one caller reads while another writes. Every error but that of `abort` is final.

    Reading and writing raise:

    * EpisodeNotFound: The episode was closed.
    * MachineLost: The machine is gone.
    * GuestError: The connection broke, or carried no bytes for the idle timeout.
    """

    def __init__(
        self,
        context: EpisodeContext,
        episode: Episode,
        machine: LeasedMachine,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        *,
        held: AsyncExitStack,
        port: int,
        idle_timeout_s: float,
    ) -> None:
        """Take over an open connection; enter it to watch the episode.

        Args:
            machine: The guest's, which the episode may have no longer after a rollback.
            held: Its streams and the running guest; closed as soon as the connection has ended.
            idle_timeout_s: Longest time without bytes.
        """
        self._context = context
        self._episode = episode
        self._machine = machine
        self._reader, self._writer = streams
        self._held = held
        self._name = f"episode {episode.episode_id}: port {port} of its guest"
        self._idle_timeout_s = idle_timeout_s
        self._used_s = self._renewed_s = context.clock.monotonic()
        self._error: Exception | None = None
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch(), name=f"port:{self._episode.episode_id}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def read(self) -> bytes:
        """Return the next bytes from the guest; empty once it sends no more."""
        try:
            data = await self._reader.read(CHUNK_BYTES)
        except OSError as error:
            raise self._broken(error) from error
        self.check()
        self._count(len(data), "from_guest")
        return data

    async def write(self, data: bytes) -> None:
        """Send bytes to the guest; waits while it does not read."""
        self.check()
        self._count(len(data), "to_guest")
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise self._broken(error) from error

    def write_eof(self) -> None:
        """End the client's direction."""
        self.check()
        try:
            self._writer.write_eof()
        except OSError as error:
            raise self._broken(error) from error

    def abort(self, error: Exception) -> None:
        """End the connection at once; reading and writing raise the first such error."""
        if self._error is None:
            self._error = error
            self._writer.transport.abort()

    def check(self) -> None:
        """Raise the error that ended the connection, if one did."""
        if self._error is not None:
            raise self._error

    def _broken(self, error: OSError) -> Exception:
        return self._error or GuestError(f"{self._name}: the connection broke: {error}")

    def _count(self, byte_count: int, direction: str) -> None:
        context, episode = self._context, self._episode
        if not byte_count:
            return
        context.metrics.port_bytes.labels(pool=episode.spec.pool, direction=direction).inc(byte_count)
        self._used_s = now_s = context.clock.monotonic()
        if now_s >= self._renewed_s + _RENEWAL_INTERVAL_S:
            self._renewed_s = now_s
            episode.lease.renew(now_s)
            context.journal.save_lease(episode)

    async def _watch(self) -> None:
        """End the connection with its episode, its machine, or without bytes for long."""
        self.abort(await self._end())
        # Here, not where it is read: a client that stops reading holds that up.
        await self._held.aclose()

    async def _end(self) -> Exception:
        episode, clock = self._episode, self._context.clock
        while not episode.closed.is_set() and not self._machine.lost.is_set():
            left_s = self._used_s + self._idle_timeout_s - clock.monotonic()
            if left_s <= 0:
                return GuestError(f"{self._name}: closed after {self._idle_timeout_s:g} s without bytes; connect again")
            await race(episode.closed, self._machine.lost, timeout_s=left_s)
        if episode.closed.is_set():
            return self._context.registry.not_found(episode.episode_id)
        return MachineLost(f"{self._name}: its machine is gone: {self._machine.machine.lost_reason}")


class GuestAccess:
    """The guest calls of an episode service."""

    def __init__(self, context: EpisodeContext) -> None:
        self._context = context
        self._connection_counts: Counter[str] = Counter()

    async def read_file(self, episode_id: str, path: str, *, max_bytes: int) -> bytes:
        """Read a guest file. Renews the lease.

        Raises:
            EpisodeNotFound, MachineLost: See `Stepping.observe`.
            AccessDenied: The pool does not allow it.
            ObjectNotFound: No such file.
            GuestError: It is larger than `max_bytes`, or cannot be read.
        """
        async with self._desktop(episode_id) as desktop:
            data = await desktop.read_file(path, max_bytes=max_bytes)
        if data is None:
            raise ObjectNotFound(f"episode {episode_id}: no file {path!r} in its guest")
        return data

    async def write_file(self, episode_id: str, path: str, data: bytes) -> None:
        """Write a guest file as the session's user. Renews the lease. Raises: as `read_file`."""
        async with self._desktop(episode_id) as desktop:
            await desktop.write_file(path, data)

    async def run_command(
        self, episode_id: str, argv: Sequence[str], *, timeout_s: float, as_root: bool = False, stdin: bytes = b""
    ) -> CommandResult:
        """Run a command in the guest to its end. Renews the lease.

        Raises:
            EpisodeNotFound, MachineLost, AccessDenied: See `read_file`.
            GuestUnresponsive: It did not end within `timeout_s`.
            GuestError: It could not be started.
        """
        async with self._desktop(episode_id) as desktop:
            return await desktop.run(argv, timeout_s=timeout_s, as_root=as_root, stdin=stdin)

    @asynccontextmanager
    async def connect_port(self, episode_id: str, port: int, *, idle_timeout_s: float) -> AsyncIterator[PortConnection]:
        """Connect to a TCP port of the guest's loopback during the block, in which the guest runs.

        Opening the connection and its bytes renew the lease. It ends with the episode, and without bytes for
        `idle_timeout_s`.

        Raises:
            EpisodeNotFound, MachineLost, AccessDenied: See `read_file`.
            RateLimited: The episode has as many connections as it may.
            GuestError: Nothing listens on the port, or the image cannot forward ports.
            GuestUnresponsive: The guest did not answer.
        """
        context = self._context
        episode = self._accessible(episode_id)
        if self._connection_counts[episode_id] >= MAX_CONNECTIONS:
            raise RateLimited(
                f"episode {episode_id}: {MAX_CONNECTIONS} connections to its guest are open, the maximum; close one",
                retry_after_s=1.0,
            )
        async with AsyncExitStack() as held:
            held.enter_context(self._counted(episode))
            # Only opening it is a call: a call keeps its lease for longer than a connection without bytes may.
            async with context.call(episode):
                episode.require_machine()
                machine = await held.enter_async_context(context.running(episode, Stopwatch(context.clock)))
                streams = await machine.desktop.open_port(port)
                held.push_async_callback(close, streams[1])
            context.journal.save_lease(episode)
            async with PortConnection(
                context, episode, machine, streams, held=held, port=port, idle_timeout_s=idle_timeout_s
            ) as connection:
                yield connection

    @contextmanager
    def _counted(self, episode: Episode) -> Iterator[None]:
        counts, gauge = self._connection_counts, self._context.metrics.port_connections.labels(pool=episode.spec.pool)
        counts[episode.episode_id] += 1
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()
            counts[episode.episode_id] -= 1
            if not counts[episode.episode_id]:
                del counts[episode.episode_id]

    def _accessible(self, episode_id: str) -> Episode:
        """Return an episode whose guest clients may access. Raises: EpisodeNotFound, AccessDenied."""
        episode = self._context.registry.get(episode_id)
        if not self._context.pools[episode.spec.pool].settings.allow_guest_access:
            raise AccessDenied(
                f"pool {episode.spec.pool!r}: clients have no access to its guests; ask the operator to set"
                " allow_guest_access"
            )
        return episode

    @asynccontextmanager
    async def _desktop(self, episode_id: str) -> AsyncIterator[Desktop]:
        context = self._context
        episode = self._accessible(episode_id)
        async with context.call(episode):
            episode.require_machine()
            async with context.running(episode, Stopwatch(context.clock)) as machine:
                yield machine.desktop
        context.journal.save_lease(episode)
