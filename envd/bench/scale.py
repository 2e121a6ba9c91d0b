"""Measures how many steps per second one daemon or several serve to many concurrent clients, compared with bare gRPC.

The daemons and the clients run in processes of their own. Each daemon draws its desktops itself.
"""

import textwrap
from typing import Any

from envd.base.config import Config
from envd.bench.load import daemon_processes, daemons_load, load_processes, opened_count, part, run_phase
from envd.bench.load_client import MAX_STEPS, LoadPlan, LoadResult, echo_server
from envd.bench.report import BenchReport, Condition, figures_of, percentile
from envd.bench.session import Steps, bench_config

#: A task of drawn desktops with a counting button and a check box, at these points: every click changes the screen.
_TASK = "fake/count-to-five"
_POINTS = ((819, 100), (822, 167))
#: A process of clients makes about 3,000 calls per second, and a daemon serves about 350.
_DAEMONS_PER_LOAD_PROCESS = 4
#: The targets are for this number of machines.
_TARGET_MACHINES = 256


def step_count() -> int:
    return 3


def scale_configs(settings: Config, *, machine_count: int, daemon_count: int = 1) -> list[Config]:
    """Return the settings of each daemon: its part of the machines, a state directory of its own, long episodes."""
    configs = []
    for index in range(daemon_count):
        # Clients that choose at the same time may choose the same daemon, so each may have more than its part.
        own = bench_config(settings, standby_count=part(machine_count, index, daemon_count), capacity=machine_count)
        update = {
            "state_dir": own.state_dir / str(index),
            # As for the command itself: records would disturb its output and timing.
            "log_level": "warning" if settings.log_level == "info" else settings.log_level,
            "limits": own.limits.model_copy(update={"max_steps": MAX_STEPS}),
        }
        configs.append(own.model_copy(update=update))
    return configs


async def measure_scale(
    settings: Config, *, machine_count: int, daemon_count: int, duration_s: float, steps: Steps
) -> BenchReport:
    """Run one client per machine, each stepping as fast as it gets responses; then let them call an echo."""
    configs = scale_configs(settings, machine_count=machine_count, daemon_count=daemon_count)
    process_count = -(-daemon_count // _DAEMONS_PER_LOAD_PROCESS)
    steps.begin("starting")
    starting = daemon_processes(configs, on_progress=lambda stage: steps.begin(textwrap.shorten(stage, 200)))
    async with echo_server() as echo_address, starting as (daemons, addresses, described):
        plan = LoadPlan(
            addresses=addresses,
            echo_address=echo_address,
            task_id=_TASK,
            pool=next(iter(configs[0].pools)),
            client_count=machine_count,
            duration_s=duration_s,
            points=_POINTS,
        )
        async with load_processes(plan, process_count) as clients:
            steps.begin("opening episodes")
            episode_count = await opened_count(clients)
            steps.done("stepping")
            await daemons_load(daemons)
            stepped = await run_phase(clients)
            server_cpu_s, lags_ms = await daemons_load(daemons)
            steps.done("calling an echo")
            bare = await run_phase(clients)
            steps.done("closing episodes")
    conditions: dict[str, Any] = {
        **described,
        "daemon_count": daemon_count,
        "machine_count": machine_count,
        "duration_s": duration_s,
        "task": _TASK,
    }
    return scale_report(
        conditions, stepped=stepped, bare=bare, opened_count=episode_count, server_cpu_s=server_cpu_s, lags_ms=lags_ms
    )


def scale_report(
    conditions: dict[str, object],
    *,
    stepped: LoadResult,
    bare: LoadResult,
    opened_count: int,
    server_cpu_s: float,
    lags_ms: list[float],
) -> BenchReport:
    steps_per_s = stepped.call_count / stepped.elapsed_s
    bare_per_s = bare.call_count / bare.elapsed_s
    values = {
        "bare_rpc_per_s": bare_per_s,
        "steps_per_s": steps_per_s,
        "steps_share": steps_per_s / bare_per_s,
        "p50_ms": percentile(stepped.latencies_ms, 50),
        "p99_ms": percentile(stepped.latencies_ms, 99),
        "server_cpu_ms_per_step": server_cpu_s * 1000 / stepped.call_count,
        "client_cpu_ms_per_step": stepped.client_cpu_s * 1000 / stepped.call_count,
    }
    is_target_load = conditions["machine_count"] == _TARGET_MACHINES
    return BenchReport(
        benchmark="scale",
        conditions={**conditions, "request_bytes": stepped.request_bytes, "response_bytes": stepped.response_bytes},
        figures=figures_of(
            "scale",
            {"loop_lag_ms": lags_ms},
            values,
            exempt="" if is_target_load else f"the target is for {_TARGET_MACHINES} machines",
        ),
        checks=(
            Condition(
                name="every client opened an episode and every step got a response",
                passed=opened_count == conditions["machine_count"] and stepped.call_count >= opened_count,
                evidence=f"{opened_count} episodes, {stepped.call_count} steps",
            ),
            Condition(
                name="frames travelled as changes",
                passed=stepped.keyframe_count == 0,
                evidence=f"{stepped.keyframe_count} of {stepped.call_count} frames were keyframes",
            ),
        ),
        samples={"latencies_ms": stepped.latencies_ms[:1000], "loop_lags_ms": lags_ms[:1000]},
    )
