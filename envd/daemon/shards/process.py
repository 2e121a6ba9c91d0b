"""One shard's process: its start, its reports, its end. `envd.cli.serve_shard` is the program.

The program reads its settings as the first line of standard input, then commands. It writes JSON objects, one per line:
`{"ready": true}`, `{"alive": true}`, `{"line": TEXT}`. A program that stays silent for `SILENCE_S` hangs and is killed.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

logger = logging.getLogger(__name__)

PROGRAM: Final = "envd.cli.serve_shard"
#: Command that drains the shard; a second one ends all of its episodes.
STOP: Final = "stop"
#: Seconds between two reports that the event loop runs.
REPORT_INTERVAL_S: Final = 5.0
SILENCE_S: Final = 60.0


class ShardProcess:
    """One run of a shard's program."""

    def __init__(self, index: int, settings: Mapping[str, Any], *, print_line: Callable[[str], None]) -> None:
        """Set up a process that is not started.

        Args:
            index: The shard's number.
            settings: The first line of its input.
            print_line: Gets its lines for people.
        """
        self._index = index
        self._settings = settings
        self._print = print_line
        self._process: asyncio.subprocess.Process | None = None
        self._stop_count = 0
        self.ready = asyncio.Event()
        """Set once it serves."""

    @property
    def pid(self) -> int | None:
        """Its process id; None before it is started."""
        return self._process.pid if self._process else None

    async def run(self) -> int:
        """Start the program, wait until it ends, and return its exit status. If cancelled, end it."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", PROGRAM),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C must reach only the supervisor, which then stops its shards.
            start_new_session=True,
        )
        self._process = process
        try:
            self._send(json.dumps(self._settings))
            for _ in range(self._stop_count):
                self._send(STOP)
            try:
                await self._read(process)
            except TimeoutError:
                logger.warning(
                    "shard %d: process %d did not report for %g s; killed", self._index, process.pid, SILENCE_S
                )
                process.kill()
            return await process.wait()
        finally:
            if process.stdin is not None:
                # The program ends its episodes when its input ends.
                process.stdin.close()
            if process.returncode is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), SILENCE_S)
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    def stop(self) -> None:
        """Let the shard drain; when called again, let it end all episodes. A process that has ended is ignored."""
        self._stop_count += 1
        self._send(STOP)

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None and self._process.returncode is None:
            self._process.stdin.write(line.encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Handle reports until the program closes its output. Raises: TimeoutError: it hangs."""
        if process.stdout is None:
            raise AssertionError("the process was started with pipes")
        while True:
            async with asyncio.timeout(SILENCE_S):
                line = await process.stdout.readline()
            if not line:
                return
            report = json.loads(line)
            if "ready" in report:
                self.ready.set()
            elif "line" in report:
                self._print(f"shard {self._index}: {report['line']}")
