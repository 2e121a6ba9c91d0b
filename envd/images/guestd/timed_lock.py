"""A lock whose waiters give up with 503."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .messages import HttpError


class TimedLock:
    """A mutex for the resource `name`; a call that waits longer than its timeout raises HttpError 503."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, timeout_s: float = 30.0) -> Iterator[None]:
        if not self._lock.acquire(timeout=timeout_s):
            raise HttpError(503, f"{self._name} has been busy for {timeout_s:g} s; retry later")
        try:
            yield
        finally:
            self._lock.release()
