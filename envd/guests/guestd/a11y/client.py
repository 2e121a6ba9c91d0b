"""Starts the helper process, sends queries to it, and replaces it when it hangs or ends."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ..messages import HttpError
from ..processes import TimedLock, kill_group

_PACKAGE = Path(__file__).resolve().parents[1]


class A11yHelper:
    """The helper process. Not thread-safe."""

    MAX_ANSWER_BYTES = 64 << 20

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process unless it is running. Raises: HttpError."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            command = [sys.executable, "-m", f"{_PACKAGE.name}.a11y.helper"]
            path = os.pathsep.join(filter(None, [str(_PACKAGE.parent), os.environ.get("PYTHONPATH")]))
            try:
                # Unbuffered: answers are read from the descriptor, with a deadline.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,
                    user=os.geteuid(),
                    group=os.getegid(),
                    # -m imports from the working directory first, and the user can write to guestd's own.
                    cwd="/",
                    env={**os.environ, "PYTHONPATH": path},
                )
            except OSError as error:
                raise HttpError(500, f"accessibility: the helper cannot be started: {error}") from error
        return self._process

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            kill_group(process)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def query(self, query: Mapping[str, object], *, timeout_s: float) -> bytes:
        """Return the answer. Raises: HttpError: the query failed, or took longer than `timeout_s`."""
        process = self.start()
        deadline_s = time.monotonic() + timeout_s
        try:
            if process.stdin:
                process.stdin.write(json.dumps(query).encode() + b"\n")
            received = self._read(process, deadline_s, until=lambda got: b"\n" in got)
            line, _, data = received.partition(b"\n")
            answer = json.loads(line)
            missing = answer["length"] - len(data)
            data += self._read(process, deadline_s, until=lambda got: len(got) >= missing)
        except (OSError, ValueError, EOFError) as error:
            self.stop()
            raise HttpError(500, f"accessibility: {error or type(error).__name__}") from error
        if not answer["ok"]:
            raise HttpError(500, f"accessibility: {data.decode('utf-8', 'replace')[-500:] or 'the helper died'}")
        return bytes(data)

    def _read(
        self, process: subprocess.Popen[bytes], deadline_s: float, *, until: Callable[[bytearray], bool]
    ) -> bytearray:
        """Read until `until` holds. Raises: TimeoutError, EOFError, ValueError."""
        if process.stdout is None:
            raise EOFError("the helper has no pipe")
        descriptor = process.stdout.fileno()
        received = bytearray()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not until(received):
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                raise TimeoutError("no answer in time")
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise EOFError("the helper ended")
            received += chunk
            if len(received) > self.MAX_ANSWER_BYTES:
                raise ValueError(f"the answer has more than {self.MAX_ANSWER_BYTES} bytes")
        return received


class A11yClient:
    """Queries of the accessibility tree, one at a time."""

    def __init__(self) -> None:
        self._lock = TimedLock("accessibility")
        self._helper = A11yHelper()

    def warm_up(self) -> None:
        """Query a tree once, so that AT-SPI's services and the helper are running. Ignores errors."""
        with suppress(HttpError):
            self.query("tree", {})

    def query(self, what: str, options: Mapping[str, str]) -> bytes:
        """Query the `tree` or the `terminal`. Raises: HttpError.

        Args:
            what: `tree` for XML, `terminal` for JSON.
            options: `max_nodes`, `timeout_s` and `showing` of the request's query string.
        """
        try:
            max_nodes = min(max(int(options.get("max_nodes", "5000")), 1), 100_000)
            timeout_s = min(max(float(options.get("timeout_s", "10")), 0.1), 120.0)
        except ValueError as error:
            raise HttpError(400, f"max_nodes, timeout_s: numbers are required: {error}") from error
        query = {"what": what, "max_nodes": max_nodes, "timeout_s": timeout_s, "showing": options.get("showing") == "1"}
        with self._lock():
            # The helper may exceed its time by one AT-SPI call, and by its start.
            return self._helper.query(query, timeout_s=timeout_s + 15.0)
