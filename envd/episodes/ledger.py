"""Perform each request of an episode, or of a service, once: a retry joins the running call or gets the response.

Running calls are tasks that the ledger owns, so they outlive their callers. Responses are kept for a limited time and
in a limited number. A request whose response was dropped is not repeated by accident: its `step_index` is stale then.
A reset, fork or score ends `GRACE_S` after its last caller if no retry comes: a killed client opens nothing.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Generic, TypeVar

from envd.base.aio import OwnedTasks
from envd.base.clock import Clock
from envd.base.errors import (
    EnvdError,
    EpisodeEnded,
    EpisodeNotFound,
    HumanInControl,
    InvalidRequest,
    PoolExhausted,
    PoolFailing,
    RequestIdReused,
    StaleEpoch,
    StepIndexMismatch,
    StoreError,
)
from envd.episodes.types import OpenedGroup
from envd.pool.queue import GRACE_S, has_caller

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long a recorded response can be replayed.
_KEEP_S = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class RequestKind:
    """A kind of requests, and how a ledger treats them."""

    name: str
    _: KW_ONLY
    keep_count: int = 8
    """Number of responses kept; a further one is dropped with the next request. Each may hold a frame of 300 KiB."""
    without_effect: tuple[type[Exception], ...] = (Exception,)
    """Failures that guarantee that nothing was done. They are not recorded, so a retry runs again."""
    ends_alone: bool = False
    """Whether a call that has no caller ends after a pause, and the episodes that it opened. Others continue alone."""


# A reset, score, fork, checkpoint or rollback that failed opened, stored and changed nothing.
RESET: Final = RequestKind("reset", keep_count=128, ends_alone=True)
SCORE: Final = RequestKind("score", keep_count=128, ends_alone=True)
FORK: Final = RequestKind("fork", ends_alone=True)
CHECKPOINT: Final = RequestKind("checkpoint")
ROLLBACK: Final = RequestKind("rollback")
#: Of a parked episode that got no machine.
_NO_MACHINE: Final = (PoolExhausted, PoolFailing)
STEP: Final = RequestKind(
    "step",
    without_effect=(
        StaleEpoch,
        StepIndexMismatch,
        EpisodeEnded,
        HumanInControl,
        InvalidRequest,
        StoreError,
        *_NO_MACHINE,
    ),
)
EVALUATE: Final = RequestKind("evaluate", without_effect=(StaleEpoch, HumanInControl, StoreError, *_NO_MACHINE))


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identity of a mutating request."""

    kind: RequestKind
    scope: str
    """The episode; empty for a request to the service, whose id begins with `<owner>/`."""
    request_id: str
    fingerprint: bytes

    def __str__(self) -> str:
        return f"{self.kind.name}:{self.scope} {self.shown_id}" if self.scope else f"{self.kind.name} {self.shown_id}"

    @property
    def shown_id(self) -> str:
        """The id as its caller chose it."""
        return self.request_id if self.scope else self.request_id.partition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[T]):
    """The response to a request."""

    value: T
    replayed: bool
    """Whether it was recorded before this call."""
    recovered: bool = False
    """Whether a previous daemon recorded it."""


@dataclass(slots=True, eq=False)
class _LedgerEntry:
    request: RequestKey
    task: asyncio.Future[Any]
    recovered: bool = False
    caller_count: int = 0
    was_read: bool = False
    """Whether a caller got the outcome."""
    grace: asyncio.Task[None] | None = None
    """Ends the call after a pause without callers."""


class Ledger:
    """Requests of one episode, or those to a service, by their kind and id."""

    def __init__(
        self,
        *,
        clock: Clock,
        keep_s: float = _KEEP_S,
        abandoned: Callable[[], EnvdError],
        on_dropped: Callable[[RequestKey], None] = lambda _: None,
        close_group: Callable[[OpenedGroup], Coroutine[Any, Any, None]],
    ) -> None:
        """Create an empty ledger.

        Args:
            abandoned: Makes the error for callers whose call `close` cancelled.
            on_dropped: Called with each request whose response is dropped.
            close_group: Closes the episodes that a call opened, if no caller got its response.
        """
        self._clock = clock
        self._keep_s = keep_s
        self._abandoned = abandoned
        self._on_dropped = on_dropped
        self._close_group = close_group
        self._graces, self._endings = OwnedTasks(), OwnedTasks()
        self._entries: dict[tuple[RequestKind, str], _LedgerEntry] = {}
        self._done_s = defaultdict[RequestKind, dict[str, float]](dict)
        """When each response was recorded, in that order."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    async def answer(self, request: RequestKey, start: Callable[[], Coroutine[Any, Any, T]]) -> Answer[T]:
        """Return the response to a request; call `start` only if the id is new among those of its kind.

        A cancelled caller leaves the call running; if its kind `ends_alone`, for `GRACE_S` unless a retry joins it.

        Raises:
            RequestIdReused: The id came before with another fingerprint.
            EpisodeNotFound: `end` ended the call.
            Exception: Any exception of the call; `abandoned` if `close` cancelled it.
        """
        self._drop_old(request.kind)
        entry = self._entries.get((request.kind, request.request_id))
        if entry is None:
            if self._closed:
                raise self._abandoned()
            entry = self._begin(request, start)
        elif entry.request.fingerprint != request.fingerprint:
            raise RequestIdReused(request.shown_id)
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
            if request.kind.ends_alone and self._is_kept(entry) and not (entry.caller_count or entry.was_read):
                entry.grace = self._graces.spawn(self._end_after_grace(entry), name=f"{request}:grace")
        if entry.task.cancelled():
            raise self._abandoned() if self._closed else _ended_error(request)
        return Answer(value=entry.task.result(), replayed=replayed, recovered=entry.recovered)

    async def end(self, kind: RequestKind, request_id: str) -> None:
        """Cancel a running call, or close the episodes that it opened; returns when that is done. Idempotent."""
        if (entry := self._entries.get((kind, request_id))) is not None:
            if entry.grace is not None:
                entry.grace.cancel()
            await asyncio.shield(self._spawn_end(entry))

    def recover(self, request: RequestKey, value: object, *, age_s: float) -> None:
        """Add a response that a previous daemon recorded `age_s` ago. Oldest first, before any call of `answer`."""
        answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        answered.set_result(value)
        self._entries[request.kind, request.request_id] = _LedgerEntry(request, answered, recovered=True)
        self._done_s[request.kind][request.request_id] = self._clock.monotonic() - age_s
        self._drop_old(request.kind)

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

    def _begin(self, request: RequestKey, start: Callable[[], Coroutine[Any, Any, Any]]) -> _LedgerEntry:
        entry: _LedgerEntry
        context = copy_context()
        context.run(has_caller.set, lambda: entry.caller_count > 0)
        task = asyncio.create_task(start(), name=str(request), context=context)
        entry = self._entries[request.kind, request.request_id] = _LedgerEntry(request, task)
        task.add_done_callback(lambda _: self._on_done(entry))
        return entry

    async def _end_after_grace(self, entry: _LedgerEntry) -> None:
        await self._clock.sleep(GRACE_S)
        logger.warning("%s: ended: its caller has been gone for %g s", entry.request, GRACE_S)
        self._spawn_end(entry)

    def _spawn_end(self, entry: _LedgerEntry) -> asyncio.Task[None]:
        # A retry finds no entry from now on, so it begins a call of its own.
        request = entry.request
        if self._is_kept(entry):
            del self._entries[request.kind, request.request_id]
            if self._done_s[request.kind].pop(request.request_id, None) is not None:
                self._on_dropped(request)
        return self._endings.spawn(self._end(entry), name=f"{request}:end")

    async def _end(self, entry: _LedgerEntry) -> None:
        entry.task.cancel()
        await asyncio.wait({entry.task})
        if entry.task.cancelled() or entry.task.exception() is not None:
            return
        result = entry.task.result()
        if isinstance(result, OpenedGroup):
            await self._close_group(result)

    def _on_done(self, entry: _LedgerEntry) -> None:
        # Reading the exception also marks it as retrieved: there may be no caller left to receive it.
        request = entry.request
        has_failed = entry.task.cancelled() or isinstance(entry.task.exception(), request.kind.without_effect)
        if has_failed and entry.grace is not None:
            entry.grace.cancel()
        if not self._is_kept(entry):
            return  # it was ended
        if has_failed:
            del self._entries[request.kind, request.request_id]
            return
        # The next request drops old responses: their deletion then needs no transaction of its own before this answer.
        self._done_s[request.kind][request.request_id] = self._clock.monotonic()

    def _is_kept(self, entry: _LedgerEntry) -> bool:
        return self._entries.get((entry.request.kind, entry.request.request_id)) is entry

    def _drop_old(self, kind: RequestKind) -> None:
        oldest_s, responses = self._clock.monotonic() - self._keep_s, self._done_s[kind]
        while responses:
            request_id, done_s = next(iter(responses.items()))
            if len(responses) <= kind.keep_count and done_s > oldest_s:
                return
            del responses[request_id]
            self._on_dropped(self._entries.pop((kind, request_id)).request)


def _ended_error(request: RequestKey) -> EpisodeNotFound:
    return EpisodeNotFound(f"opening {request.shown_id}: closed by its caller; reset a new one")
