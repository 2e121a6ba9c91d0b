"""A GRPO group as a tree: members branch from each other on forks of machines in mid-episode.

The first member starts alone, or as many as the tree has roots; the others wait. At each branch point of a member, its
machine is forked for some of the waiting members, which continue from there with the history so far as their prompt.
The shared prefix is trained only in the member that sampled it. When no member is left to branch from, a waiting member
starts from the beginning. A member is in the tree until its episode is closed.

No locks: code between two awaits is atomic in an event loop, and each loop has its own trees.
"""

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from cuaenv.client import AsyncEpisode

logger = logging.getLogger(__name__)

Context = TypeVar("Context")
"""The history at a branch point."""
OpenOne = Callable[[], Awaitable[AsyncEpisode]]
"""Opens an episode at the beginning of its task; if cancelled, it leaves none open."""
Fork = Callable[[int], Awaitable[Sequence[AsyncEpisode]]]
"""Forks an episode the given number of times; if cancelled, it leaves no fork open."""


class Tree(Generic[Context]):
    """The members of one group: running ones, and those that wait for a branch point."""

    def __init__(self, *, root_count: int = 1) -> None:
        self.running_count = 0
        self._roots_left = root_count
        self._waiting: deque[asyncio.Future[tuple[AsyncEpisode, Context] | None]] = deque()

    @property
    def waiting_count(self) -> int:
        """Number of waiting members."""
        return len(self._waiting)

    async def member(self, open_one: OpenOne) -> tuple[AsyncEpisode, Context | None]:
        """Start an episode if no member runs or a root is missing, else wait for a branch; the caller closes it.

        Returns:
            The episode and its history so far, None at the beginning of the task.

        Raises:
            EnvError: The episode could not be opened.
        """
        branch = await self._next_branch()
        if branch is not None:
            branch[0].when_closed(self._leave)
            return branch
        try:
            episode = await open_one()
        except BaseException:
            self._leave()
            raise
        episode.when_closed(self._leave)
        return episode, None

    async def branch(self, fork: Fork, *, most: int, context: Context) -> None:
        """Let up to `most` waiting members continue from a member's episode. If the fork fails, they keep waiting.

        Args:
            fork: Forks the member's episode.
            most: Maximum number of forks.
            context: The history so far.
        """
        count = min(most, len(self._waiting))
        if count < 1:
            return
        chosen = [self._waiting.popleft() for _ in range(count)]
        # They count as running from now on, so that no other waiting member starts from the beginning.
        self.running_count += count
        try:
            episodes = await fork(count)
        except BaseException as error:
            self._waiting.extendleft(waiter for waiter in reversed(chosen) if not waiter.done())
            for _ in chosen:
                self._leave()
            if not isinstance(error, Exception):
                raise
            logger.warning("[envd] fork failed; the waiting members wait for the next branch point: %s", error)
            return
        for waiter, episode in zip(chosen, episodes, strict=True):
            if waiter.done():  # the waiting member was cancelled
                episode.when_closed(self._leave)
                episode.begin_close()
            else:
                waiter.set_result((episode, context))

    async def _next_branch(self) -> tuple[AsyncEpisode, Context] | None:
        """Return a fork and its history, or None to start at the beginning of the task."""
        if self.running_count == 0 or self._roots_left > 0:
            self.running_count += 1
            self._roots_left -= 1
            return None
        waiter: asyncio.Future[tuple[AsyncEpisode, Context] | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.cancelled():
                # It was let in at the moment of cancellation.
                branch = waiter.result()
                if branch is None:
                    self._leave()
                else:
                    branch[0].when_closed(self._leave)
                    branch[0].begin_close()
            raise

    def _leave(self) -> None:
        self.running_count -= 1
        if self.running_count == 0:
            # No member is left to branch from.
            while self._waiting:
                waiter = self._waiting.popleft()
                if not waiter.done():
                    self.running_count += 1
                    waiter.set_result(None)


_Trees = weakref.WeakValueDictionary[Hashable, Tree[Any]]
_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Trees] = weakref.WeakKeyDictionary()


def tree_of_loop(key: Hashable, *, root_count: int = 1) -> Tree[Any]:
    """Return the running loop's tree of that key, or a new one if no member holds it."""
    trees = _by_loop.setdefault(asyncio.get_running_loop(), weakref.WeakValueDictionary())
    tree = trees.get(key)
    if tree is None:
        tree = trees[key] = Tree(root_count=root_count)
    return tree
