"""Protect daemons from endless failures: pauses between resets that fail.

Trainers replace a void group with another at once. If every reset fails, that would be hundreds of resets a second.
No locks: code between two awaits is atomic in an event loop, and each loop has its own pacer.
"""

import asyncio
from typing import Final

from cuaenv.client.errors import EnvError, GroupTooLarge, PoolExhausted

_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 0.25


class ResetPacer:
    """Spaces resets while they fail: exponentially, for all tasks together and for each task.

    A success ends the pauses of its task and of all tasks together.
    """

    def __init__(self) -> None:
        self._failure_counts: dict[str | None, int] = {}
        self._next_start_s: dict[str | None, float] = {}

    async def wait(self, task: str) -> None:
        """Wait for the pauses that earlier failures require before a reset of a task."""
        for key in (None, task):
            if self._failure_counts.get(key):
                now_s = asyncio.get_running_loop().time()
                start_s = max(now_s, self._next_start_s[key])
                self._delay(key, start_s)
                await asyncio.sleep(start_s - now_s)

    def note_failure(self, task: str, error: EnvError) -> None:
        """Let later resets wait, unless neither the task nor a daemon is at fault."""
        if isinstance(error, GroupTooLarge | PoolExhausted):
            return
        for key in (None, task):
            self._failure_counts[key] = self._failure_counts.get(key, 0) + 1
            self._delay(key, asyncio.get_running_loop().time())

    def note_success(self, task: str) -> None:
        """End the pauses of a task, and those of all tasks together."""
        for key in (None, task):
            self._failure_counts.pop(key, None)

    def _delay(self, key: str | None, since_s: float) -> None:
        """Let no reset start earlier than the current pause after a time."""
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(self._failure_counts[key] - 1, 10), _MAX_PAUSE_S)
        self._next_start_s[key] = max(self._next_start_s.get(key, 0.0), since_s + pause_s)
