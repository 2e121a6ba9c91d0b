"""Starts and controls the processes of `envd bench scale`: its daemons, and the clients that put load on them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from statistics import median_high
from typing import Any

from envd.base.config import Config
from envd.bench.child import Child, run_module
from envd.bench.load_client import LoadPlan, LoadResult
from envd.bench.report import BenchFailed

_CLIENTS_PROGRAM = "envd.bench.load_client"
_DAEMON_PROGRAM = "envd.bench.scale_daemon"
_EXIT_TIMEOUT_S = 60


async def _send(child: Child, line: str) -> None:
    child.stdin.write(line.encode() + b"\n")
    await child.stdin.drain()


async def _receive(child: Child) -> dict[str, Any]:
    line = await child.stdout.readline()
    if not line:
        raise BenchFailed("a process of the benchmark ended; its error is above")
    message: dict[str, Any] = json.loads(line)
    return message


async def _ask(child: Child) -> dict[str, Any]:
    await _send(child, "go")
    return await _receive(child)


@asynccontextmanager
async def _processes(module: str, inputs: Sequence[str]) -> AsyncIterator[list[Child]]:
    """Start a process of a module for each first line of input. After the block they end by themselves."""
    async with AsyncExitStack() as stack:
        children = []
        for line in inputs:
            children.append(await stack.enter_async_context(run_module(module)))
            await _send(children[-1], line)
        yield children
        for child in children:
            child.stdin.close()
        async with asyncio.timeout(_EXIT_TIMEOUT_S):
            await asyncio.gather(*(child.process.wait() for child in children))


@asynccontextmanager
async def daemon_processes(
    configs: Sequence[Config], *, on_progress: Callable[[str], None]
) -> AsyncIterator[tuple[Sequence[Child], tuple[str, ...], dict[str, object]]]:
    """Start a daemon for each configuration and wait until their machines are ready.

    Yields the processes, their addresses, and a description of the host and of the machines.

    Raises:
        BenchFailed: One ended.
    """

    async def ready(child: Child) -> dict[str, Any]:
        while "stage" in (message := await _receive(child)):
            on_progress(message["stage"])
        return message

    async with _processes(_DAEMON_PROGRAM, [config.model_dump_json() for config in configs]) as children:
        found = await asyncio.gather(*map(ready, children))
        yield children, tuple(each["address"] for each in found), found[0]["conditions"]


async def daemons_load(daemons: Sequence[Child]) -> tuple[float, list[float]]:
    """Return the CPU time in s of all daemons and the delays of their event loops in ms, since the last call."""
    found = await asyncio.gather(*map(_ask, daemons))
    return sum(each["cpu_s"] for each in found), [lag_ms for each in found for lag_ms in each["lags_ms"]]


async def opened_count(clients: Sequence[Child]) -> int:
    """Return how many episodes the processes of `load_processes` have opened, once all are done with that."""
    return sum(each["opened"] for each in await asyncio.gather(*map(_receive, clients)))


async def run_phase(clients: Sequence[Child]) -> LoadResult:
    """Run the next phase of `load_processes`: steps first, then echoes. Raises: BenchFailed."""
    return merged([LoadResult(**each) for each in await asyncio.gather(*map(_ask, clients))])


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
async def load_processes(plan: LoadPlan, process_count: int) -> AsyncIterator[Sequence[Child]]:
    """Start the plan's clients in this many processes; after the block they close their episodes and end."""
    plans = [replace(plan, client_count=part(plan.client_count, i, process_count)) for i in range(process_count)]
    async with _processes(_CLIENTS_PROGRAM, [json.dumps(asdict(each)) for each in plans]) as clients:
        yield clients


def part(total: int, index: int, count: int) -> int:
    """Return the size of one of `count` parts of a total that are as equal as possible."""
    return total * (index + 1) // count - total * index // count
