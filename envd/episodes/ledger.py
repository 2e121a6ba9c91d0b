"""Perform each request once: a retry joins the running call or gets the recorded response.

Running calls are tasks that the ledger owns, so they outlive their callers. Responses are kept for a limited time and
in a limited number. A request whose response was dropped is not repeated by accident: its `step_index` is stale then.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from envd.base.clock import Clock
from envd.base.errors import EnvdError, RequestIdReused

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
    ) -> None:
        """Create an empty ledger.

        Args:
            keep_count: Number of responses kept; a further one is dropped with the next request.
            without_effect: Failures that guarantee that nothing was done. They are not recorded, so a retry runs again.
            abandoned: Makes the error for callers whose call `close` cancelled.
            on_dropped: Called with the id of each request whose response is dropped.
        """
        self._name = name
        self._clock = clock
        self._keep_s = keep_s
        self._keep_count = keep_count
        self._without_effect = without_effect
        self._abandoned = abandoned
        self._on_dropped = on_dropped
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

        A cancelled caller leaves the call running.

        Raises:
            RequestIdReused: The id came before with another fingerprint.
            Exception: Any exception of the call; `abandoned` if it was cancelled.
        """
        self._drop_old()
        entry = self._entries.get(request_id)
        if entry is None:
            if self._closed:
                raise self._abandoned()
            task = asyncio.create_task(start(), name=f"{self._name}:{request_id}")
            entry = self._entries[request_id] = _Entry(fingerprint, task)
            task.add_done_callback(lambda _: self._on_done(request_id, entry))
        elif entry.fingerprint != fingerprint:
            raise RequestIdReused(request_id)
        replayed = entry.task.done()
        # Not `await task`: that would cancel the call together with the caller, and mistake one's end for the other's.
        await asyncio.wait({entry.task})
        if entry.task.cancelled():
            raise self._abandoned()
        return Answer(value=entry.task.result(), replayed=replayed, restored=entry.restored)

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
        running = {entry.task for entry in self._entries.values() if not entry.task.done()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _on_done(self, request_id: str, entry: _Entry[T]) -> None:
        # Reading the exception also marks it as retrieved: there may be no caller left to receive it.
        if entry.task.cancelled() or isinstance(entry.task.exception(), self._without_effect):
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
