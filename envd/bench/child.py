"""Child processes of benchmarks and soaks, with pipes for input and output."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

#: Longest line that a child may write.
_LINE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Child:
    """A running child process."""

    process: asyncio.subprocess.Process
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader


def run_module(module: str) -> AbstractAsyncContextManager[Child]:
    """Run `python -P -m module`; see `run_program`. It inherits standard error."""
    return run_program(sys.executable, "-P", "-m", module)


@asynccontextmanager
async def run_program(*command: str, **options: Any) -> AsyncIterator[Child]:
    """Run a command; after the block the process is killed unless it has ended."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # Ctrl-C must reach only this process, which then ends the child.
        start_new_session=True,
        limit=_LINE_BYTES,
        **options,
    )
    if process.stdin is None or process.stdout is None:
        raise AssertionError("the process was started with pipes")
    try:
        yield Child(process, process.stdin, process.stdout)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await process.wait()
