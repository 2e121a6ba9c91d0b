"""Read files, write files, run commands and connect to ports in an episode's guest, if its pool allows it."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from cuaenv.results import CommandResult
from envd.base.errors import AccessDenied, NotFound, RateLimited
from envd.base.streams import close
from envd.base.telemetry.traces import Stopwatch
from envd.desktop.desktop import Desktop
from envd.episodes.context import EpisodeContext
from envd.episodes.episode import Episode
from envd.episodes.port_connection import PortConnection

#: Connections to ports of one episode's guest. Each takes two file descriptors of this process.
MAX_CONNECTIONS = 32


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
            NotFound: No such file.
            GuestError: It is larger than `max_bytes`, or cannot be read.
        """
        async with self._desktop(episode_id) as desktop:
            data = await desktop.read_file(path, max_bytes=max_bytes)
        if data is None:
            raise NotFound(f"episode {episode_id}: no file {path!r} in its guest")
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
                machine = await held.enter_async_context(context.awake(episode, Stopwatch(context.clock)))
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
            async with context.awake(episode, Stopwatch(context.clock)) as machine:
                yield machine.desktop
        context.journal.save_lease(episode)
