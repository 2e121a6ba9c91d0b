"""The members of a GRPO group on forks of one state, although the framework starts each member separately.

The first member opens the whole group; the others take a slot in it. Each member closes the episode of its own slot, so
one that ends or is cancelled does not take machines away from the others. The episodes of slots that are not taken in
time are closed, and members that come later open another group.

No locks: code between two awaits is atomic in an event loop, and each loop has its own groups.
"""

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine, Hashable, Sequence
from copy import copy
from typing import Any, Unpack

from cuaenv.client import AsyncEnvClient, AsyncEpisode, Checkpoint, EnvError, GroupTooLarge
from cuaenv.client.view import ResetOptions

logger = logging.getLogger(__name__)

OpenGroup = Callable[[int], Coroutine[Any, Any, Sequence[AsyncEpisode]]]
"""Opens the given number of episodes in one state; if cancelled, it leaves none open."""


class Forks:
    """The groups of one event loop that have free slots."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Group] = {}

    def __repr__(self) -> str:
        return f"<Forks {len(self._open)} with free slots>"

    async def member(self, key: Hashable, *, size: int, open_group: OpenGroup, wait_s: float) -> AsyncEpisode:
        """Take a slot in the group of that key, opening the group if necessary; the caller closes the episode.

        Args:
            open_group: Opens it. If no pool can hold the group, each member opens an episode alone.
            wait_s: How long an open group keeps a slot for a missing member.

        Raises:
            EnvError: The group could not be opened; every waiting member gets the error.
        """
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = _Group(size)
            group.opening = asyncio.create_task(self._opened(key, group, open_group, wait_s), name=f"group:{key}")
            # Retrieved here, so that the loop does not log its error if no member is left.
            group.opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        slot = group.take()
        if group.is_full:
            self._forget(key, group)
        try:
            return (await asyncio.shield(group.opening))[slot]
        except GroupTooLarge as error:
            logger.warning("[envd] %s; each member resets alone, from the same template", error)
        except EnvError as error:
            raise copy(error) from None  # one error for all members would collect their tracebacks
        except asyncio.CancelledError:
            group.leave(slot)
            if group.is_abandoned:
                self._forget(key, group)
                group.opening.cancel()
            raise
        (episode,) = await open_group(1)
        return episode

    async def _opened(
        self, key: Hashable, group: "_Group", open_group: OpenGroup, wait_s: float
    ) -> Sequence[AsyncEpisode]:
        try:
            episodes = await open_group(group.size)
        except BaseException:
            self._forget(key, group)
            raise
        for slot in group.left:
            episodes[slot].begin_close()
        if not group.is_full:
            loop = asyncio.get_running_loop()
            group.waiting = loop.call_later(wait_s, self._release_free, key, group, wait_s)
        return episodes

    def _release_free(self, key: Hashable, group: "_Group", wait_s: float) -> None:
        self._forget(key, group)
        for episode in group.opening.result()[group.taken_count :]:
            logger.warning("[envd] group %s: slot of %s not taken within %.0f s", key, episode, wait_s)
            episode.begin_close()

    def _forget(self, key: Hashable, group: "_Group") -> None:
        if self._open.get(key) is group:
            del self._open[key]
        if group.waiting is not None:
            group.waiting.cancel()


class _Group:
    """Who has come to a group."""

    opening: "asyncio.Task[Sequence[AsyncEpisode]]"
    waiting: asyncio.TimerHandle | None = None
    """Ends the wait for missing members."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken_count = 0
        self.left = set[int]()
        """Slots of the members that were cancelled before the group was open."""

    @property
    def is_full(self) -> bool:
        return self.taken_count == self.size

    @property
    def is_abandoned(self) -> bool:
        """Whether no member awaits the opening any more."""
        return not self.opening.done() and len(self.left) == self.taken_count

    def take(self) -> int:
        self.taken_count += 1
        return self.taken_count - 1

    def leave(self, slot: int) -> None:
        """Give up a slot whose episode its member has not received."""
        if not self.opening.done():
            self.left.add(slot)
        elif not self.opening.cancelled() and self.opening.exception() is None:
            self.opening.result()[slot].begin_close()


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Forks] = weakref.WeakKeyDictionary()


class GroupMember:
    """`trainer.agent.attempts.Environments` of one member of a group: its first episode there, repeated ones alone."""

    def __init__(self, client: AsyncEnvClient, *, group: Hashable, size: int, wait_s: float) -> None:
        """Prepare; opens nothing.

        Args:
            client: Opens the episodes.
            group: Key of the group among those of the running loop that start where this member does.
            size: Members of the group; 1 to open each episode alone.
            wait_s: How long the group keeps a slot for a missing member.
        """
        self._client = client
        self._group = group
        self._size = size
        self._wait_s = wait_s

    async def reset(self, task: str | Checkpoint, **options: Unpack[ResetOptions]) -> AsyncEpisode:
        """Open an episode, as `Forks.member` does the first time. Raises: EnvError."""
        size, self._size = self._size, 1
        if size == 1:
            return await self._client.reset(task, **options)
        # A framework may run several loops, each in its own thread.
        return await _by_loop.setdefault(asyncio.get_running_loop(), Forks()).member(
            (self._group, task),
            size=size,
            open_group=lambda count: self._client.open_group(task, size=count, **options),
            wait_s=self._wait_s,
        )
