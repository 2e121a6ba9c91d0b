"""Deduplication of requests: a repeated POST with the same `X-Request-Id` replays the first response."""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from .fields import MAX_COMMAND_TIMEOUT_S
from .messages import HttpError, Request, Response

REPLAY_S = 300.0


@dataclass(slots=True)
class _Entry:
    """A recorded or pending response."""

    digest: bytes
    done: threading.Event = field(default_factory=threading.Event)
    response: Response | None = None
    completed_s: float = 0.0


class Replays:
    """Responses by request id.

    Invariant of the lock: an id is in `_entries` from before its effect until `REPLAY_S` after its response.
    """

    def __init__(self, *, capacity: int = 512, max_bytes: int = 64 << 20) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    def respond(self, request: Request, request_id: str, produce: Callable[[], Response]) -> Response:
        """Return `produce()`, or the recorded response of the earlier call with this path and id. Raises: HttpError."""
        key = (request.path, request_id)
        digest = hashlib.sha256(request.body).digest()
        with self._lock:
            earlier = self._entries.get(key)
            if earlier is None:
                entry = self._entries[key] = _Entry(digest)
                self._evict()
        if earlier is not None:
            if earlier.digest != digest:
                raise HttpError(409, f"X-Request-Id {request_id} was used with another body; use a new id per request")
            if not earlier.done.wait(MAX_COMMAND_TIMEOUT_S):
                raise HttpError(503, f"X-Request-Id {request_id} is still running; retry later")
            # A response that was not recorded belongs to a call without effect, so this call may have the effect.
            return earlier.response or self.respond(request, request_id, produce)
        try:
            response = produce()
            with self._lock:
                if response.status == 503 or response.file is not None:
                    # The call was rejected before its effect, or it only read: repeating it is harmless.
                    self._entries.pop(key, None)
                else:
                    entry.response = response
                entry.completed_s = time.monotonic()
            return response
        finally:
            entry.done.set()

    def _evict(self) -> None:
        now_s = time.monotonic()
        kept_bytes = sum(len(entry.response.body) for entry in self._entries.values() if entry.response)
        for key, entry in list(self._entries.items()):
            is_full = len(self._entries) > self._capacity or kept_bytes > self._max_bytes
            if entry.response and (is_full or now_s - entry.completed_s > REPLAY_S):
                del self._entries[key]
                kept_bytes -= len(entry.response.body)
