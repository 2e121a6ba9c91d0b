"""Remembers which shard got a `Reset`, so that its retries reach the same shard, also after a crash.

One line per placement is appended to a file before the request is sent. The file is written again, with the newest
placements only, at the start and when it has grown.
"""

import os
import re
from collections import OrderedDict
from pathlib import Path

from envd.base.errors import StoreError

#: Retries of older requests are not expected: a daemon forgets their responses too.
KEPT_COUNT = 10_000
_MAX_LINES = 10 * KEPT_COUNT
_REQUEST = re.compile(r"[a-z0-9._-]*/[A-Za-z0-9_-]{1,64}")
_NONE = "-"


class Placements:
    """The shards of recent resets, by `CALLER/REQUEST_ID`: each caller has ids of its own."""

    def __init__(self, path: Path) -> None:
        """Load the placements of an earlier daemon. Raises: StoreError."""
        self._path = path
        self._shards: OrderedDict[str, int] = OrderedDict()
        self._line_count = 0
        try:
            lines = path.read_text(encoding="ascii", errors="replace").splitlines() if path.exists() else []
        except OSError as error:
            raise self._error(error) from error
        for line in lines:
            # The last line may be incomplete after a crash.
            request, _, shard = line.partition(" ")
            if shard.isdecimal():
                self._remember(request, int(shard))
            elif shard == _NONE:
                self._shards.pop(request, None)
        self._file = self._rewritten()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def shard_of(self, request: str) -> int | None:
        """Return the shard that has the request; None for a new request."""
        return self._shards.get(request)

    def place(self, request: str, shard: int) -> None:
        """Record that the shard gets the request. Raises: StoreError: nothing may be sent."""
        if _REQUEST.fullmatch(request):
            self._append(f"{request} {shard}\n")
            self._remember(request, shard)

    def forget(self, request: str) -> None:
        """Record that the request had no effect, so that a retry may go to another shard. Raises: StoreError."""
        if self._shards.pop(request, None) is not None:
            self._append(f"{request} {_NONE}\n")

    def _remember(self, request: str, shard: int) -> None:
        self._shards[request] = shard
        self._shards.move_to_end(request)
        if len(self._shards) > KEPT_COUNT:
            self._shards.popitem(last=False)

    def _append(self, line: str) -> None:
        try:
            if self._line_count >= _MAX_LINES:
                os.close(self._file)
                self._file = self._rewritten()
            os.write(self._file, line.encode("ascii"))
        except OSError as error:
            raise self._error(error) from error
        self._line_count += 1

    def _rewritten(self) -> int:
        text = "".join(f"{request} {shard}\n" for request, shard in self._shards.items())
        fresh = self._path.with_name(f"{self._path.name}.new")
        try:
            fresh.write_text(text, encoding="ascii")
            fresh.replace(self._path)
            self._line_count = len(self._shards)
            return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> StoreError:
        return StoreError(f"{self._path}: {error.strerror}; free its disk or fix its permissions")
