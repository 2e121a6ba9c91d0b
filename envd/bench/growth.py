"""Measures the cost of standby machines: how fast one is leased, and the memory and CPU time that they use."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envd.base.config import Config
from envd.bench.fork import acquire_once
from envd.bench.report import BenchReport, Figure, Value, exempt_without_guests, figures_of, mib
from envd.bench.session import BenchSession, Steps, bench_config, open_bench
from envd.hypervisor.qemu.processes import machine_pids, memory_of, processor_ns
from envd.pool.memory import read_available_bytes

#: The CPU target is for this number of machines.
_TARGET_MACHINES = 16
#: Guests of standby machines do not run, so each stays at about 45 MiB. At the default of 256 MiB, 64 machines start
#: only on a host with 16 GiB free.
_EXPECTED_MEMORY_MIB = 96
IDLE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standby:
    """Measurements with one number of standby machines."""

    machine_count: int
    acquire_ms: Sequence[float]
    figures: Mapping[str, Value]
    """All but that of `acquire_ms`. Memory is None without processes to measure."""


def step_count(sizes: Sequence[int], repetitions: int) -> int:
    return len(sizes) * (repetitions + 2)


async def measure_growth(
    settings: Config, *, task_id: str, sizes: Sequence[int], repetitions: int, steps: Steps, idle_s: float = IDLE_S
) -> BenchReport:
    """Measure a daemon with each number of standby machines, one after the other.

    Args:
        settings: See `bench_config`.
        task_id: A task without setup.
    """
    found = []
    conditions: dict[str, object] = {}
    for size in sizes:
        available_bytes = read_available_bytes()
        config = bench_config(settings, standby_count=size, capacity=size + 1, expected_memory_mib=_EXPECTED_MEMORY_MIB)
        async with open_bench(config, steps=steps) as bench:
            conditions = conditions or bench.conditions(sizes=list(sizes), repetitions=repetitions, idle_s=idle_s)
            steps.done(f"{size} ready")
            found.append(
                await _measure(bench, available_bytes, task_id, repetitions=repetitions, idle_s=idle_s, steps=steps)
            )
    return growth_report(conditions, found)


async def _measure(
    bench: BenchSession, available_before_bytes: int, task_id: str, *, repetitions: int, idle_s: float, steps: Steps
) -> Standby:
    size = bench.pool.settings.size
    acquire_ms = []
    for _ in range(repetitions):
        acquire_ms.append(await acquire_once(bench, task_id))
        steps.done(f"{size} ready, acquiring")
    await bench.refilled()
    pids = list(machine_pids(bench.state_dir).values()) if bench.runs_guests else []
    memories = [memory_of(pid) for pid in pids]
    drop_bytes = available_before_bytes - read_available_bytes()
    await asyncio.sleep(1.0)  # work of the last lease does not count as idle
    machines_percent, daemon_percent = await _idle_cpu(pids, idle_s=idle_s)
    steps.done(f"{size} ready, idle")
    return Standby(
        machine_count=size,
        acquire_ms=acquire_ms,
        figures={
            "pss_mib": mib(sum(memory.pss_bytes for memory in memories)) if pids else None,
            "private_dirty_mib": mib(sum(memory.private_dirty_bytes for memory in memories)) if pids else None,
            "available_drop_mib": mib(drop_bytes) if pids else None,
            "machines_cpu_percent": machines_percent if pids else None,
            "daemon_cpu_percent": daemon_percent,
        },
    )


async def _idle_cpu(pids: Sequence[int], *, idle_s: float) -> tuple[float, float]:
    """Return the CPU time of these processes together, and of our own, in percent of one core."""
    own = os.getpid()
    before_ns = [processor_ns(pid) for pid in (*pids, own)]
    begin_s = time.perf_counter()
    await asyncio.sleep(idle_s)
    used_ns = [processor_ns(pid) - before for pid, before in zip((*pids, own), before_ns, strict=True)]
    ns_per_percent = (time.perf_counter() - begin_s) * 1e7
    return sum(used_ns[:-1]) / ns_per_percent, used_ns[-1] / ns_per_percent


def growth_report(conditions: dict[str, object], found: Sequence[Standby]) -> BenchReport:
    """Return the report; its target is for 16 machines, and not judged for other numbers. Pure."""
    figures: list[Figure] = []
    judged = next((each for each in found if each.machine_count == _TARGET_MACHINES), found[-1])
    for each in found:
        exempt = exempt_without_guests(conditions)
        if each.machine_count != _TARGET_MACHINES:
            exempt = exempt or f"the target is for {_TARGET_MACHINES} machines"
        figures += figures_of(
            "growth",
            {"acquire_ms": each.acquire_ms},
            each.figures,
            name=f"{{}}_{each.machine_count}",
            meaning=f"{each.machine_count} standby: {{}}",
            exempt=exempt,
            has_targets=each is judged,
        )
    return BenchReport(
        benchmark="growth",
        conditions=conditions,
        figures=figures,
        samples={f"acquire_ms_{each.machine_count}": each.acquire_ms for each in found},
    )
