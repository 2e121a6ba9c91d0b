"""Measures how many steps per second a daemon serves to many concurrent clients, compared with bare gRPC.

The daemon is one process, or a supervisor with shards.
"""

import asyncio
import os
import textwrap
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from cuaenv.client import AsyncEnvClient

from envd.base.config import Config
from envd.bench.load import load_processes
from envd.bench.load_client import MAX_STEPS, EchoServer, LoadPlan, LoadResult
from envd.bench.process_tree import own_and_descendants_cpu_s
from envd.bench.report import BenchReport, Check, Target, figure, figures_of, p50, p99
from envd.bench.session import BenchSession, Steps, bench_config, host_conditions
from envd.daemon.shards.supervisor import open_supervisor
from envd.hypervisor.fake.workers.hypervisor import DrawingWorkers

#: A counting button and a check box of the fake desktop: every click changes the screen.
_POINTS = ((819, 100), (822, 167))
_LAG_INTERVAL_S = 0.01
_POLL_S = 0.1
#: A process of clients makes about 3,000 calls per second, and a shard serves about 350.
_SHARDS_PER_LOAD_PROCESS = 4
#: With 8 shards or fewer, one of them gets none of a process's connections in less than 0.2 % of all runs.
_CHANNELS_PER_SHARD = 8
#: The targets are for this number of machines.
_TARGET_MACHINES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFigures:
    """Figures of many clients."""

    bare_rpc_per_s: float = figure(
        "echoes over the same gRPC stack and processes, with payloads of the steps' median sizes"
    )
    steps_per_s: float = figure(
        "steps of one click each, settled (quiet 0), with exact frames as changes to the frame before; the clients are"
        " in other processes, one for four shards, and do not rebuild frames"
    )
    steps_share: float = figure("steps_per_s / bare_rpc_per_s", Target(">=", 0.5))
    p50_ms: float = figure("of a step, as its client sees it")
    p99_ms: float = figure("the same", Target("<=", 250))
    server_cpu_ms_per_step: float = figure("CPU time of the daemon's process, or of all shards")
    supervisor_cpu_ms_per_step: float | None = figure("CPU time of the supervisor, which relays calls among shards")
    drawing_cpu_ms_per_step: float | None = figure("CPU time of the processes that draw the desktops")
    client_cpu_ms_per_step: float = figure("CPU time of the clients' processes")
    loop_lag_ms_p99: float = figure(
        f"how late the event loop of the daemon, or of the supervisor of shards, wakes a task that sleeps for"
        f" {_LAG_INTERVAL_S * 1000:g} ms, during the steps",
        Target("<=", 20),
    )


def step_count() -> int:
    """Return the number of progress steps of `measure_scale`."""
    return 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """CPU time in seconds that the processes of a daemon have used."""

    server_s: float
    drawing_s: float | None = None
    supervisor_s: float | None = None


def scale_config(settings: Config, *, machine_count: int, shard_count: int = 1) -> Config:
    """Return settings for this number of machines and shards, with long episodes."""
    own = bench_config(settings, standby_count=machine_count, capacity=machine_count)
    # The daemon's process must not draw: its CPU time is measured.
    drawing_processes = settings.hypervisor.drawing_processes or os.cpu_count() or 1
    return own.model_copy(
        update={
            "shards": shard_count,
            # As for the command itself: records would disturb its output and timing.
            "log_level": "warning" if settings.log_level == "info" else settings.log_level,
            "limits": own.limits.model_copy(update={"max_steps": MAX_STEPS}),
            "hypervisor": own.hypervisor.model_copy(update={"drawing_processes": drawing_processes}),
        }
    )


async def measure_scale(
    bench: BenchSession, *, task_id: str, machine_count: int, duration_s: float, steps: Steps
) -> BenchReport:
    """Run one client per machine, each stepping as fast as it gets responses; then let them call an echo.

    Raises:
        LoadFailed: The clients' process failed.
    """
    hypervisor = bench.daemon.hypervisor
    workers = hypervisor if isinstance(hypervisor, DrawingWorkers) else None

    async def read_cpu() -> CpuTimes:
        drawing_s = await workers.cpu_s() if workers else None
        return CpuTimes(server_s=time.process_time(), drawing_s=drawing_s)

    conditions = bench.conditions(machine_count=machine_count, duration_s=duration_s, task=task_id)
    address = bench.daemon.address
    return await _measure(conditions, address, pool=bench.pool.name, task_id=task_id, read_cpu=read_cpu, steps=steps)


async def measure_shards(
    config: Config, *, task_id: str, machine_count: int, duration_s: float, steps: Steps
) -> BenchReport:
    """Do the same with a daemon of several shards. Raises: LoadFailed, and see `open_supervisor`."""
    steps.begin("starting")
    async with open_supervisor(config, print_line=lambda line: steps.begin(textwrap.shorten(line, 200))) as supervisor:
        pool = next(iter(config.pools))
        async with AsyncEnvClient(supervisor.address, token="") as client:
            while (await client.list_pools())[0].idle_count < machine_count:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)  # the client has no watch of pools

        async def read_cpu() -> CpuTimes:
            pids = [shard.process.pid for shard in supervisor.shards if shard.process and shard.process.pid]
            used = await asyncio.to_thread(lambda: [own_and_descendants_cpu_s(pid) for pid in pids])
            return CpuTimes(
                server_s=sum(own_s for own_s, _ in used),
                drawing_s=sum(others_s for _, others_s in used),
                supervisor_s=time.process_time(),
            )

        conditions = host_conditions(
            hypervisor="fake",
            shard_count=config.shards,
            machine_count=machine_count,
            duration_s=duration_s,
            task=task_id,
        )
        return await _measure(
            conditions, supervisor.address, pool=pool, task_id=task_id, read_cpu=read_cpu, steps=steps
        )


async def _measure(
    conditions: dict[str, Any],
    address: str,
    *,
    pool: str,
    task_id: str,
    read_cpu: Callable[[], Awaitable[CpuTimes]],
    steps: Steps,
) -> BenchReport:
    """Put load on a daemon, and then on an echo."""
    shard_count: int = conditions.get("shard_count", 1)
    process_count = -(-shard_count // _SHARDS_PER_LOAD_PROCESS)
    echo = EchoServer()
    try:
        plan = LoadPlan(
            address=address,
            echo_address=await echo.start(),
            task_id=task_id,
            pool=pool,
            client_count=conditions["machine_count"],
            channel_count=_CHANNELS_PER_SHARD * shard_count,
            duration_s=conditions["duration_s"],
            points=_POINTS,
        )
        async with load_processes(plan, process_count) as load:
            steps.begin("opening episodes")
            opened_count = await load.opened()
            steps.done("stepping")
            lags_ms: list[float] = []
            watching = asyncio.create_task(_watch_lag(lags_ms), name="bench:lag")
            before = await read_cpu()
            stepped = await load.run()
            after = await read_cpu()
            watching.cancel()
            steps.done("calling an echo")
            bare = await load.run()
            steps.done("closing episodes")
    finally:
        await echo.stop()
    return scale_report(
        conditions,
        stepped=stepped,
        bare=bare,
        opened_count=opened_count,
        server_cpu_s=after.server_s - before.server_s,
        drawing_cpu_s=_difference(after.drawing_s, before.drawing_s),
        supervisor_cpu_s=_difference(after.supervisor_s, before.supervisor_s),
        lags_ms=lags_ms,
    )


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


async def _watch_lag(lags_ms: list[float]) -> None:
    while True:
        before_s = time.perf_counter()
        await asyncio.sleep(_LAG_INTERVAL_S)
        lags_ms.append(max(0.0, time.perf_counter() - before_s - _LAG_INTERVAL_S) * 1000)


def scale_report(
    conditions: dict[str, object],
    *,
    stepped: LoadResult,
    bare: LoadResult,
    opened_count: int,
    server_cpu_s: float,
    drawing_cpu_s: float | None,
    lags_ms: list[float],
    supervisor_cpu_s: float | None = None,
) -> BenchReport:
    """Return the report. Pure."""
    steps_per_s = stepped.call_count / stepped.elapsed_s
    bare_per_s = bare.call_count / bare.elapsed_s
    values = ScaleFigures(
        bare_rpc_per_s=bare_per_s,
        steps_per_s=steps_per_s,
        steps_share=steps_per_s / bare_per_s,
        p50_ms=p50(stepped.latencies_ms),
        p99_ms=p99(stepped.latencies_ms),
        server_cpu_ms_per_step=server_cpu_s * 1000 / stepped.call_count,
        supervisor_cpu_ms_per_step=None if supervisor_cpu_s is None else supervisor_cpu_s * 1000 / stepped.call_count,
        drawing_cpu_ms_per_step=None if drawing_cpu_s is None else drawing_cpu_s * 1000 / stepped.call_count,
        client_cpu_ms_per_step=stepped.client_cpu_s * 1000 / stepped.call_count,
        loop_lag_ms_p99=p99(lags_ms),
    )
    is_target_load = conditions["machine_count"] == _TARGET_MACHINES
    return BenchReport(
        benchmark="scale",
        conditions={**conditions, "request_bytes": stepped.request_bytes, "response_bytes": stepped.response_bytes},
        figures=figures_of(values, exempt="" if is_target_load else f"the target is for {_TARGET_MACHINES} machines"),
        checks=(
            Check(
                name="every client opened an episode and every step got a response",
                passed=opened_count == conditions["machine_count"] and stepped.call_count >= opened_count,
                evidence=f"{opened_count} episodes, {stepped.call_count} steps",
            ),
            Check(
                name="frames travelled as changes",
                passed=stepped.keyframe_count == 0,
                evidence=f"{stepped.keyframe_count} of {stepped.call_count} frames were keyframes",
            ),
        ),
        samples={"latencies_ms": stepped.latencies_ms[:1000], "loop_lags_ms": lags_ms[:1000]},
    )
