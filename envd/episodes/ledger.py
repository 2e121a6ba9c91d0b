"""Perform each request once: a retry joins the running call or gets the recorded response.

Running calls are tasks that the ledger owns, so they outlive their callers. Responses are kept for a limited time and
in a limited number. A request whose response was dropped is not repeated by accident: its `step_index` is stale then.
A call that can be undone ends `GRACE_S` after its last caller if no retry comes: a killed client opens nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from envd.base.aio import OwnedTasks
from envd.base.clock import Clock
from envd.base.errors import EnvdError, EpisodeNotFound, RequestIdReused
from envd.pool.admission import GRACE_S, has_caller

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long a recorded response can be replayed.
_KEEP_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[T]):
    """The response to a request."""

    value: T
    replayed: bool
    """Whether it was recorded before this call."""
    restored: bool = False
    """Whether a previous daemon recorded it."""


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    fingerprint: bytes
    task: asyncio.Future[T]
    restored: bool = False
    caller_count: int = 0
    was_read: bool = False
    """Whether a caller got the outcome."""
    grace: asyncio.Task[None] | None = None
    """Ends the call after a pause without callers."""


class Ledger(Generic[T]):
    """Requests of one kind, by their id."""

    def __init__(
        self,
        name: str,
        *,
        clock: Clock,
        keep_s: float = _KEEP_S,
        keep_count: int,
        without_effect: tuple[type[Exception], ...],
        abandoned: Callable[[], EnvdError],
        on_dropped: Callable[[str], None] = lambda _: None,
        undo: Callable[[T], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Create an empty ledger.

        Args:
            keep_count: Number of responses kept; a further one is dropped with the next request.
            without_effect: Failures that guarantee that nothing was done. They are not recorded, so a retry runs again.
            abandoned: Makes the error for callers whose call `close` cancelled.
            on_dropped: Called with the id of each request whose response is dropped.
            undo: Takes back what a call did, whose response no caller got; a call that still runs is cancelled. None if
                calls cannot be undone: they continue without callers.
        """
        self._name = name
        self._clock = clock
        self._keep_s = keep_s
        self._keep_count = keep_count
        self._without_effect = without_effect
        self._abandoned = abandoned
        self._on_dropped = on_dropped
        self._undo = undo
        self._graces, self._endings = OwnedTasks(), OwnedTasks()
        self._entries: dict[str, _Entry[T]] = {}
        self._done_s: dict[str, float] = {}
        """When each response was recorded, in that order."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    async def answer(
        self, request_id: str, fingerprint: bytes, start: Callable[[], Coroutine[Any, Any, T]]
    ) -> Answer[T]:
        """Return the response to a request; call `start` only if the id is new.

        A cancelled caller leaves the call running; with `undo`, for `GRACE_S` unless a retry joins it.

        Raises:
            RequestIdReused: The id came before with another fingerprint.
            EpisodeNotFound: `end` ended the call.
            Exception: Any exception of the call; `abandoned` if `close` cancelled it.
        """
        self._drop_old()
        entry = self._entries.get(request_id)
        if entry is None:
            if self._closed:
                raise self._abandoned()
            entry = self._entries[request_id] = self._begin(request_id, fingerprint, start)
        elif entry.fingerprint != fingerprint:
            raise RequestIdReused(request_id)
        replayed = entry.task.done()
        entry.caller_count += 1
        if entry.grace is not None:
            entry.grace.cancel()
        try:
            # Not `await task`: that would cancel the call together with the caller, and mistake one's end for the
            # other's.
            await asyncio.wait({entry.task})
            entry.was_read = True
        finally:
            entry.caller_count -= 1
            if self._undo is not None and not (entry.caller_count or entry.was_read):
                entry.grace = self._graces.spawn(
                    self._end_after_grace(request_id, entry), name=f"{self._name}:{request_id}:grace"
                )
        if entry.task.cancelled():
            raise self._abandoned() if self._closed else _ended_error(request_id)
        return Answer(value=entry.task.result(), replayed=replayed, restored=entry.restored)

    async def end(self, request_id: str) -> None:
        """Cancel a running call, or undo what a finished one did; returns when that is done. Idempotent."""
        if (entry := self._entries.get(request_id)) is not None:
            await asyncio.shield(self._spawn_end(request_id, entry))

    def restore(self, request_id: str, fingerprint: bytes, value: T, *, age_s: float) -> None:
        """Add a response that a previous daemon recorded `age_s` ago. Oldest first, before any call of `answer`."""
        answered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        answered.set_result(value)
        self._entries[request_id] = _Entry(fingerprint, answered, restored=True)
        self._done_s[request_id] = self._clock.monotonic() - age_s
        self._drop_old()

    async def close(self) -> None:
        """Cancel running calls, return when they have unwound, and start no more."""
        self._closed = True
        await self._graces.cancel()
        running = {entry.task for entry in self._entries.values() if not entry.task.done()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await self._endings.join()

    def _begin(self, request_id: str, fingerprint: bytes, start: Callable[[], Coroutine[Any, Any, T]]) -> _Entry[T]:
        entry: _Entry[T]
        context = copy_context()
        if self._undo is not None:
            context.run(has_caller.set, lambda: entry.caller_count > 0)
        task = asyncio.create_task(start(), name=f"{self._name}:{request_id}", context=context)
        entry = _Entry(fingerprint, task)
        task.add_done_callback(lambda _: self._on_done(request_id, entry))
        return entry

    async def _end_after_grace(self, request_id: str, entry: _Entry[T]) -> None:
        await self._clock.sleep(GRACE_S)
        logger.warning("%s %s: ended: its caller has been gone for %g s", self._name, _shown(request_id), GRACE_S)
        self._spawn_end(request_id, entry)

    def _spawn_end(self, request_id: str, entry: _Entry[T]) -> asyncio.Task[None]:
        # A retry finds no entry from now on, so it begins a call of its own.
        if self._entries.get(request_id) is entry:
            del self._entries[request_id]
            if self._done_s.pop(request_id, None) is not None:
                self._on_dropped(request_id)
        return self._endings.spawn(self._end(entry), name=f"{self._name}:{request_id}:end")

    async def _end(self, entry: _Entry[T]) -> None:
        entry.task.cancel()
        await asyncio.wait({entry.task})
        if self._undo is not None and not entry.task.cancelled() and entry.task.exception() is None:
            await self._undo(entry.task.result())

    def _on_done(self, request_id: str, entry: _Entry[T]) -> None:
        # Reading the exception also marks it as retrieved: there may be no caller left to receive it.
        has_failed = entry.task.cancelled() or isinstance(entry.task.exception(), self._without_effect)
        if has_failed and entry.grace is not None:
            entry.grace.cancel()
        if self._entries.get(request_id) is not entry:
            return  # it was ended
        if has_failed:
            del self._entries[request_id]
            return
        # The next request drops old responses: their deletion then needs no transaction of its own before this answer.
        self._done_s[request_id] = self._clock.monotonic()

    def _drop_old(self) -> None:
        oldest_s = self._clock.monotonic() - self._keep_s
        while self._done_s:
            request_id, done_s = next(iter(self._done_s.items()))
            if len(self._done_s) <= self._keep_count and done_s > oldest_s:
                return
            del self._done_s[request_id], self._entries[request_id]
            self._on_dropped(request_id)


def _ended_error(request_id: str) -> EpisodeNotFound:
    return EpisodeNotFound(f"opening {_shown(request_id)}: closed by its caller; reset a new one")


def _shown(request_id: str) -> str:
    return request_id.rpartition("/")[2]  # without the owner
