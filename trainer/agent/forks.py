"""The members of a GRPO group on forks of one state, although the framework starts each member separately.

The first member opens the whole group; the others take a slot in it. A separate task owns the group, so a member that
ends or is cancelled does not take machines away from the others. Slots that are not taken in time are released, and
members that come later open an episode alone.

No locks: code between two awaits is atomic in an event loop, and each loop has its own groups.
"""

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Unpack

from cuaenv.client import AsyncEnvClient, AsyncEpisode, Checkpoint, GroupTooLarge
from cuaenv.client.view import ResetOptions
from trainer.agent.pacing import pacer_of_loop
from trainer.agent.starts import task_id_of

logger = logging.getLogger(__name__)

OpenGroup = Callable[[int], AbstractAsyncContextManager[Sequence[AsyncEpisode]]]
"""Opens the given number of episodes in one state, and closes them on exit."""


class Forks:
    """The groups of one event loop that have free slots."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Group] = {}
        # A loop references its tasks weakly.
        self._owners: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Forks {len(self._open)} with free slots, {len(self._owners)} open>"

    @asynccontextmanager
    async def member(
        self, key: Hashable, *, size: int, open_group: OpenGroup, wait_s: float
    ) -> AsyncIterator[AsyncEpisode]:
        """Take a slot in the group of that key, opening the group if necessary; close the slot's episode on exit.

        Args:
            open_group: Opens it. If no pool can hold the group, each member opens an episode alone.
            wait_s: How long an open group keeps a slot for a missing member.

        Raises:
            EnvError: The group could not be opened; every waiting member gets the error.
        """
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = _Group(size)
            owner = asyncio.create_task(self._own(key, group, open_group, wait_s), name=f"group:{key}")
            self._owners.add(owner)
            owner.add_done_callback(self._owners.discard)
            group.owner = owner
        slot = group.take()
        if group.is_full:
            self._forget(key, group)
        try:
            try:
                episode = (await asyncio.shield(group.opened))[slot]
            except GroupTooLarge as error:
                logger.warning("[envd] %s; each member resets alone, from the same template", error)
                async with open_group(1) as alone:
                    yield alone[0]
                return
            try:
                yield episode
            finally:
                await episode.close()
        finally:
            group.leave()
            if group.is_empty and not group.opened.done():
                # All members left before the group was open; the next member opens another group.
                self._forget(key, group)
                if group.owner is not None:
                    group.owner.cancel()

    async def _own(self, key: Hashable, group: "_Group", open_group: OpenGroup, wait_s: float) -> None:
        try:
            async with open_group(group.size) as episodes:
                group.opened.set_result(episodes)
                await group.wait_full(wait_s)
                self._forget(key, group)
                for episode in group.release_free(episodes):
                    logger.warning("[envd] group %s: slot of %s not taken within %.0f s", key, episode, wait_s)
                    await episode.close()
                await group.wait_empty()
        except Exception as error:
            self._forget(key, group)
            if group.opened.done():
                logger.warning("[envd] group %s: failed to close: %s", key, error)
                return
            group.opened.set_exception(error)
            # Retrieved here, so that the loop does not log it if no member is left.
            group.opened.exception()
        finally:
            group.opened.cancel()

    def _forget(self, key: Hashable, group: "_Group") -> None:
        if self._open.get(key) is group:
            del self._open[key]


class _Group:
    def __init__(self, size: int) -> None:
        self.size = size
        self.owner: asyncio.Task[None] | None = None
        self.opened: asyncio.Future[Sequence[AsyncEpisode]] = asyncio.get_running_loop().create_future()
        self._taken = 0
        self._left = 0
        self._changed = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self._taken == self.size

    @property
    def is_empty(self) -> bool:
        return self._taken == self._left

    def take(self) -> int:
        self._taken += 1
        self._changed.set()
        return self._taken - 1

    def leave(self) -> None:
        self._left += 1
        self._changed.set()

    def release_free(self, episodes: Sequence[AsyncEpisode]) -> Sequence[AsyncEpisode]:
        """Remove the free slots; return their episodes."""
        free, self.size = episodes[self._taken :], self._taken
        return free

    async def wait_full(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: self.is_full)
        except TimeoutError:
            pass

    async def wait_empty(self) -> None:
        await self._until(lambda: self.is_empty)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Forks] = weakref.WeakKeyDictionary()


def group_member(
    client: AsyncEnvClient,
    start: str | Checkpoint,
    *,
    group: Hashable,
    size: int,
    wait_s: float,
    **options: Unpack[ResetOptions],
) -> AbstractAsyncContextManager[AsyncEpisode]:
    """Open an episode of a task or checkpoint in the running loop's group of that key; see `Forks.member`.

    Failing resets pause.
    """
    # A framework may run several loops, each in its own thread.
    return _by_loop.setdefault(asyncio.get_running_loop(), Forks()).member(
        group,
        size=size,
        open_group=lambda count: pacer_of_loop().open(
            task_id_of(start), lambda: client.reset_group(start, size=count, **options)
        ),
        wait_s=wait_s,
    )
