"""Read files, write files, run commands and connect to ports in an episode's guest, if its pool allows it."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from envd.base.errors import AccessDenied, NotFound, RateLimited
from envd.episodes.context import EpisodeContext, Stopwatch
from envd.episodes.episode import Episode
from envd.episodes.port_connection import PortConnection
from envd.episodes.types import GuestCommandResult, GuestFile
from envd.guest.desktop import Desktop

#: Connections to ports of one episode's guest. Each takes two file descriptors of this process.
MAX_CONNECTIONS = 32

T = TypeVar("T")


class GuestAccess:
    """The guest calls of an episode service."""

    def __init__(self, context: EpisodeContext) -> None:
        self._context = context
        self._connection_counts: Counter[str] = Counter()

    async def read_file(self, episode_id: str, path: str, *, max_bytes: int) -> GuestFile:
        """See `EpisodeService.read_file`."""
        async with self._desktop(episode_id) as desktop:
            data = await desktop.read_file(path, max_bytes=max_bytes)
        if data is None:
            raise NotFound(f"episode {episode_id}: no file {path!r} in its guest")
        return GuestFile(path=path, data=data)

    async def write_file(self, episode_id: str, path: str, data: bytes) -> None:
        """See `EpisodeService.write_file`."""
        async with self._desktop(episode_id) as desktop:
            await desktop.write_file(path, data)

    async def run_command(
        self, episode_id: str, argv: Sequence[str], *, timeout_s: float, as_root: bool, stdin: bytes
    ) -> GuestCommandResult:
        """See `EpisodeService.run_command`."""
        async with self._desktop(episode_id) as desktop:
            result = await desktop.run(argv, timeout_s=timeout_s, as_root=as_root, stdin=stdin)
        return GuestCommandResult(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)

    async def with_service(self, episode_id: str, work: Callable[[str], Coroutine[Any, Any, T]]) -> T:
        """See `EpisodeService.with_guest_service`."""
        async with self._desktop(episode_id) as desktop:
            return await desktop.with_guestd(work)

    @asynccontextmanager
    async def connect(self, episode_id: str, port: int, *, idle_timeout_s: float) -> AsyncIterator[PortConnection]:
        """See `EpisodeService.connect_port`."""
        context = self._context
        episode = self._accessible(episode_id)
        counts = self._connection_counts
        if counts[episode_id] >= MAX_CONNECTIONS:
            raise RateLimited(
                f"episode {episode_id}: has {MAX_CONNECTIONS} connections to its guest's ports, the maximum; close one",
                retry_after_s=1.0,
            )
        counts[episode_id] += 1
        open_count = context.metrics.port_connections.labels(pool=episode.pool)
        open_count.inc()
        try:
            async with AsyncExitStack() as stack:
                # Only opening it is a call: a call keeps its lease for longer than a connection without bytes may.
                with context.registry.call(episode, renews=True):
                    episode.require_machine()
                    await stack.enter_async_context(context.awake(episode, Stopwatch(context.clock)))
                    streams = await episode.machine.desktop.open_port(port)
                context.journal.save_lease(episode)
                connection = PortConnection(context, episode, *streams, port=port, idle_timeout_s=idle_timeout_s)
                yield await stack.enter_async_context(connection)
        finally:
            open_count.dec()
            counts[episode_id] -= 1
            if not counts[episode_id]:
                del counts[episode_id]

    def _accessible(self, episode_id: str) -> Episode:
        """Return an episode whose guest clients may access. Raises: EpisodeNotFound, AccessDenied."""
        episode = self._context.registry.get(episode_id)
        if not self._context.pools[episode.pool].settings.allow_guest_access:
            raise AccessDenied(
                f"pool {episode.pool!r}: clients have no access to its guests; ask the operator to set"
                " allow_guest_access"
            )
        return episode

    @asynccontextmanager
    async def _desktop(self, episode_id: str) -> AsyncIterator[Desktop]:
        context = self._context
        episode = self._accessible(episode_id)
        with context.registry.call(episode, renews=True):
            episode.require_machine()
            async with context.awake(episode, Stopwatch(context.clock)):
                yield episode.machine.desktop
        context.journal.save_lease(episode)
