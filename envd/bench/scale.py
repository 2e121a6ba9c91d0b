"""Measures how many steps per second one daemon serves to many concurrent clients, compared with bare gRPC."""

import asyncio
import os
import time
from dataclasses import dataclass

from envd.bench.load import load_process
from envd.bench.load_client import MAX_STEPS, EchoServer, LoadPlan, LoadResult
from envd.bench.report import BenchReport, Check, Target, figure, figures_of, p50, p99
from envd.bench.session import BenchSession, Steps, bench_config
from envd.config import Config
from envd.hypervisor.fake.workers.hypervisor import DrawingWorkers

#: A counting button and a check box of the fake desktop: every click changes the screen.
_POINTS = ((819, 100), (822, 167))
_LAG_INTERVAL_S = 0.01
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
        " in another process and do not rebuild frames"
    )
    steps_share: float = figure("steps_per_s / bare_rpc_per_s", Target(">=", 0.5))
    p50_ms: float = figure("of a step, as its client sees it")
    p99_ms: float = figure("the same", Target("<=", 250))
    server_cpu_ms_per_step: float = figure("CPU time of the daemon's process")
    drawing_cpu_ms_per_step: float | None = figure("CPU time of the processes that draw the desktops")
    client_cpu_ms_per_step: float = figure("CPU time of the clients' process")
    loop_lag_ms_p99: float = figure(
        f"how late the daemon's event loop wakes a task that sleeps for {_LAG_INTERVAL_S * 1000:g} ms, during the"
        " steps",
        Target("<=", 20),
    )


def step_count() -> int:
    """Return the number of progress steps of `measure_scale`."""
    return 3


def scale_config(settings: Config, *, machine_count: int) -> Config:
    """Return settings for this number of machines, with long episodes."""
    own = bench_config(settings, standby_count=machine_count, capacity=machine_count)
    # The daemon's process must not draw: its CPU time is measured.
    drawing_processes = settings.hypervisor.drawing_processes or os.cpu_count() or 1
    return own.model_copy(
        update={
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
    echo = EchoServer()
    try:
        plan = LoadPlan(
            address=bench.daemon.address,
            echo_address=await echo.start(),
            task_id=task_id,
            pool=bench.pool.name,
            client_count=machine_count,
            duration_s=duration_s,
            points=_POINTS,
        )
        async with load_process(plan) as load:
            steps.begin("opening episodes")
            opened_count = await load.opened()
            steps.done("stepping")
            lags_ms: list[float] = []
            watching = asyncio.create_task(_watch_lag(lags_ms), name="bench:lag")
            drawing_cpu_s = await workers.cpu_s() if workers else 0.0
            cpu_s = time.process_time()
            stepped = await load.run()
            cpu_s = time.process_time() - cpu_s
            drawing_cpu_s = await workers.cpu_s() - drawing_cpu_s if workers else 0.0
            watching.cancel()
            steps.done("calling an echo")
            bare = await load.run()
            steps.done("closing episodes")
    finally:
        await echo.stop()
    return scale_report(
        bench.conditions(machine_count=machine_count, duration_s=duration_s, task=task_id),
        stepped=stepped,
        bare=bare,
        opened_count=opened_count,
        server_cpu_s=cpu_s,
        drawing_cpu_s=drawing_cpu_s if workers else None,
        lags_ms=lags_ms,
    )


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
