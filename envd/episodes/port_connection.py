"""One client's TCP connection to a port of an episode's guest: it ends with the episode, and bytes renew the lease."""

import asyncio
from contextlib import AsyncExitStack
from typing import Self

from envd.base.aio import race
from envd.base.errors import GuestError, MachineLost
from envd.base.streams import CHUNK_BYTES
from envd.episodes.context import EpisodeContext
from envd.episodes.episode import Episode
from envd.pool.leased import LeasedMachine

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
