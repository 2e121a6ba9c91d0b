"""Read files, write files and run commands in an episode's guest, if its pool allows it."""

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from envd.base.errors import AccessDenied, NotFound
from envd.episodes.context import EpisodeContext, Stopwatch
from envd.guest.agent import CommandResult
from envd.guest.desktop import Desktop

T = TypeVar("T")


class GuestAccess:
    """The guest calls of an episode service."""

    def __init__(self, context: EpisodeContext) -> None:
        self._context = context

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

    async def with_guest_service(self, episode_id: str, work: Callable[[str], Coroutine[Any, Any, T]]) -> T:
        """Run work that calls the guest's HTTP service itself, given its URL on the host's loopback. Renews the lease.

        Raises:
            EpisodeNotFound, MachineLost, AccessDenied: See `read_file`.
            GuestError: The image has no such service.
        """
        async with self._desktop(episode_id) as desktop:
            return await desktop.with_guestd(work)

    @asynccontextmanager
    async def _desktop(self, episode_id: str) -> AsyncIterator[Desktop]:
        context = self._context
        episode = context.registry.get(episode_id)
        if not context.pools[episode.pool].settings.allow_guest_access:
            raise AccessDenied(
                f"pool {episode.pool!r}: clients have no access to its guests; ask the operator to set"
                " allow_guest_access"
            )
        with context.registry.call(episode, renews=True):
            episode.require_machine()
            async with context.awake(episode, Stopwatch(context.clock)):
                yield episode.machine.desktop
        context.journal.save_lease(episode)
