"""The members of a GRPO group on forks, although the framework starts each member separately.

On forks of one state: the first member opens the whole group; the others take a slot in it. Each member closes the
episode of its own slot, so one that ends or is cancelled does not take machines away from the others. The episodes of
slots that are not taken in time are closed, and members that come later open another group.

As a tree, on forks of machines in mid-episode: the first member starts alone, or as many as the tree has roots; the
others wait. At each branch point of a member, its machine is forked for some of the waiting members, which continue
from there with the history so far as their prompt. The shared prefix is trained only in the member that sampled it.
When no member is left to branch from, a waiting member starts from the beginning. A member is in the tree until its
episode is closed.

No locks: code between two awaits is atomic in an event loop, and each loop has its own `Groups`.
"""

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from copy import copy
from typing import Any, Generic, TypeVar, Unpack

from cuaenv.client import AsyncEnvClient, AsyncEpisode, Checkpoint, EnvError, GroupTooLarge
from cuaenv.client.view import ResetOptions

logger = logging.getLogger(__name__)

OpenGroup = Callable[[int], Coroutine[Any, Any, Sequence[AsyncEpisode]]]
"""Opens the given number of episodes in one state; if cancelled, it leaves none open."""
Context = TypeVar("Context")
"""The history at a branch point."""
OpenOne = Callable[[], Awaitable[AsyncEpisode]]
"""Opens an episode at the beginning of its task; if cancelled, it leaves none open."""
Fork = Callable[[int], Awaitable[Sequence[AsyncEpisode]]]
"""Forks an episode the given number of times; if cancelled, it leaves no fork open."""


class Groups:
    """The groups of one event loop: those that have free slots, and the trees that have members."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Group] = {}
        self._trees: weakref.WeakValueDictionary[Hashable, Tree[Any]] = weakref.WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<Groups {len(self._open)} with free slots>"

    def tree(self, key: Hashable, *, root_count: int = 1) -> "Tree[Any]":
        """Return the tree of that key, or a new one if no member holds it."""
        tree = self._trees.get(key)
        if tree is None:
            tree = self._trees[key] = Tree(root_count=root_count)
        return tree

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


class GroupMember:
    """`trainer.agent.attempts.Environments` of one member of a group: its first episode there, repeated ones alone."""

    def __init__(self, client: AsyncEnvClient, groups: Groups, *, group: Hashable, size: int, wait_s: float) -> None:
        """Prepare; opens nothing.

        Args:
            client: Opens the episodes.
            groups: The groups of the running loop.
            group: Key of the group among those that start where this member does.
            size: Members of the group; 1 to open each episode alone.
            wait_s: How long the group keeps a slot for a missing member.
        """
        self._client = client
        self._groups = groups
        self._group = group
        self._size = size
        self._wait_s = wait_s

    async def reset(self, task: str | Checkpoint, **options: Unpack[ResetOptions]) -> AsyncEpisode:
        """Open an episode, as `Groups.member` does the first time. Raises: EnvError."""
        size, self._size = self._size, 1
        if size == 1:
            return await self._client.reset(task, **options)
        return await self._groups.member(
            (self._group, task),
            size=size,
            open_group=lambda count: self._client.open_group(task, size=count, **options),
            wait_s=self._wait_s,
        )


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
