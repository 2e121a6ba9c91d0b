"""Starts and controls the clients of `envd bench scale`, which run in processes of their own."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from statistics import median_high
from typing import Any

from envd.base.errors import EnvdError
from envd.bench.child import Child, run_module
from envd.bench.load_client import LoadPlan, LoadResult

_PROGRAM = "envd.bench.load_client"
_EXIT_TIMEOUT_S = 60


class LoadFailed(EnvdError, reason="LOAD_FAILED"):
    """A process of clients ended early; its error is on standard error."""


class Load:
    """The clients' processes, made by `load_processes`."""

    def __init__(self, processes: "Sequence[_LoadProcess]") -> None:
        self._processes = processes

    async def opened(self) -> int:
        """Wait until the episodes are open, and return their number. Raises: LoadFailed."""
        return sum(await asyncio.gather(*(process.opened() for process in self._processes)))

    async def run(self) -> LoadResult:
        """Run the next phase: steps first, then echoes. Raises: LoadFailed."""
        return merged(await asyncio.gather(*(process.run() for process in self._processes)))


class _LoadProcess:
    """One process of clients."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def opened(self) -> int:
        return int((await self._receive())["opened"])

    async def run(self) -> LoadResult:
        await self.send("go")
        return LoadResult(**await self._receive())

    async def send(self, line: str) -> None:
        self._child.stdin.write(line.encode() + b"\n")
        await self._child.stdin.drain()

    async def end(self) -> None:
        """Let the clients close their episodes, and wait for the process."""
        self._child.stdin.close()
        async with asyncio.timeout(_EXIT_TIMEOUT_S):
            await self._child.process.wait()

    async def _receive(self) -> dict[str, Any]:
        line = await self._child.stdout.readline()
        if not line:
            raise LoadFailed("a process of clients ended; its error is above")
        message: dict[str, Any] = json.loads(line)
        return message


def merged(results: Sequence[LoadResult]) -> LoadResult:
    """Return the result of processes that ran a phase at the same time. Pure."""
    return LoadResult(
        call_count=sum(result.call_count for result in results),
        elapsed_s=max(result.elapsed_s for result in results),
        latencies_ms=[latency_ms for result in results for latency_ms in result.latencies_ms],
        request_bytes=median_high(result.request_bytes for result in results),
        response_bytes=median_high(result.response_bytes for result in results),
        keyframe_count=sum(result.keyframe_count for result in results),
        client_cpu_s=sum(result.client_cpu_s for result in results),
    )


@asynccontextmanager
async def load_processes(plan: LoadPlan, process_count: int) -> AsyncIterator[Load]:
    """Start the plan's clients in this many processes; after the block they close their episodes and end."""
    async with AsyncExitStack() as stack:
        processes = []
        for index in range(process_count):
            process = _LoadProcess(await stack.enter_async_context(run_module(_PROGRAM)))
            client_count = plan.client_count * (index + 1) // process_count - plan.client_count * index // process_count
            await process.send(json.dumps(asdict(replace(plan, client_count=client_count))))
            processes.append(process)
        yield Load(processes)
        await asyncio.gather(*(process.end() for process in processes))
