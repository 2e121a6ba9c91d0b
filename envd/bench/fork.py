"""Measures new machines (leased, forked, booted) and the memory of used ones."""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from envd.base.aio import shielded
from envd.bench.report import BenchFailed, BenchReport, Value, exempt_without_guests, figures_of, mib
from envd.bench.session import BenchSession, Steps, new_machine_id
from envd.desktop.desktop import Desktop
from envd.hypervisor.machine import Accelerator, GuestOs
from envd.hypervisor.qemu.processes import memory_of

_WARM_UPS = 2
#: About the time for which a guest runs in a step.
_RUN_S = 0.1
#: Run in each machine before its memory is measured.
_COMMANDS = {GuestOs.LINUX: ("/bin/sh", "-c", "exit 0"), GuestOs.WINDOWS: ("cmd.exe", "/c", "exit 0")}
#: The memory target is for this load.
_TARGET_MACHINES, _TARGET_MEMORY_MIB = 8, 1024
#: The figures of `memory_figures` if machines have no processes.
NO_MEMORY: Mapping[str, Value] = dict.fromkeys(("marginal_pss_mib", "private_dirty_mib", "standby_pss_mib"))


def step_count(repetitions: int) -> int:
    return 4 * repetitions + _WARM_UPS + 2


async def measure_fork(bench: BenchSession, *, task_id: str, repetitions: int, steps: Steps) -> BenchReport:
    """Measure with as many standby machines as the pool's capacity."""
    conditions = bench.conditions(machines=bench.pool.settings.resident, repetitions=repetitions)
    for _ in range(_WARM_UPS):
        await fork_once(bench)
        steps.done("warming up")
    cold_boot_s = await boot_once(bench)
    steps.done("booted")
    acquire_ms = []
    for _ in range(repetitions):
        acquire_ms.append(await acquire_once(bench, task_id))
        steps.done("acquiring")
    await bench.refilled()
    forks = []
    for _ in range(repetitions):
        forks.append(await fork_once(bench))
        steps.done("forking")
    pauses = await pause_often(bench, repetitions=repetitions)
    per_min_1 = await _forks_per_min(bench, repetitions=repetitions, concurrency=1, steps=steps)
    per_min_2 = await _forks_per_min(bench, repetitions=repetitions, concurrency=2, steps=steps)
    memory = await used_memory(bench, task_id)
    steps.done("measured memory")
    return fork_report(
        conditions,
        cold_boot_s=cold_boot_s,
        acquire_ms=acquire_ms,
        fork_ms=[fork_ms for fork_ms, _ in forks],
        destroy_ms=[destroy_ms for _, destroy_ms in forks],
        resume_ms=[resume_ms for resume_ms, _ in pauses],
        pause_ms=[pause_ms for _, pause_ms in pauses],
        forks_per_min=(per_min_1, per_min_2),
        memory=memory,
    )


async def acquire_once(bench: BenchSession, task_id: str) -> float:
    """Return the milliseconds from a `Reset` to its first frame, with all standby machines ready before it."""
    await bench.refilled()
    begin_s = time.perf_counter()
    async with bench.reset(task_id):
        return (time.perf_counter() - begin_s) * 1000


async def boot_once(bench: BenchSession) -> float:
    """Boot a machine as for a template, until it is ready and settled; return the seconds."""
    begin_s = time.perf_counter()
    machine = await bench.daemon.hypervisor.create(replace(bench.template.spec, machine_id=new_machine_id()))
    desktop = Desktop(machine)
    try:
        await desktop.wait_ready(timeout_s=bench.pool.settings.boot_timeout_s)
        return time.perf_counter() - begin_s
    finally:
        await shielded(desktop.close())
        await shielded(machine.destroy())


async def fork_once(bench: BenchSession) -> tuple[float, float]:
    """Fork the template through the hypervisor backend and destroy the fork; return the ms that each took."""
    begin_s = time.perf_counter()
    machine = await bench.daemon.hypervisor.fork(bench.template, new_machine_id())
    forked_s = time.perf_counter()
    await shielded(machine.destroy())
    return (forked_s - begin_s) * 1000, (time.perf_counter() - forked_s) * 1000


async def pause_often(bench: BenchSession, *, repetitions: int) -> list[tuple[float, float]]:
    """Resume and pause one fork repeatedly; return the milliseconds of each."""
    machine = await bench.daemon.hypervisor.fork(bench.template, new_machine_id())
    times = []
    try:
        for _ in range(repetitions):
            begin_s = time.perf_counter()
            await machine.resume()
            resumed_s = time.perf_counter()
            await asyncio.sleep(_RUN_S)
            pausing_s = time.perf_counter()
            await machine.pause()
            times.append(((resumed_s - begin_s) * 1000, (time.perf_counter() - pausing_s) * 1000))
    finally:
        await shielded(machine.destroy())
    return times


async def _forks_per_min(bench: BenchSession, *, repetitions: int, concurrency: int, steps: Steps) -> float:
    """Return how many machines can be forked and destroyed per minute."""
    left = repetitions

    async def work() -> None:
        nonlocal left
        while left:
            left -= 1
            await fork_once(bench)
            steps.done(f"forking and destroying, {concurrency} at a time")

    begin_s = time.perf_counter()
    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(work())
    return 60 * repetitions / (time.perf_counter() - begin_s)


async def used_memory(bench: BenchSession, task_id: str) -> Mapping[str, Value]:
    """Wake every machine of the pool, run one command in each, and return the figures of their memory."""
    await bench.refilled()
    machine_count = bench.pool.settings.resident
    before = memory_of(os.getpid()) if bench.runs_guests else None
    await bench.pool.measure_memory()
    standby_bytes = bench.pool.statistics().pss_bytes
    image = bench.template.spec.image
    command = _COMMANDS[image.os]
    # All machines at once: then no other machine shares pages with them.
    async with bench.reset_group(task_id, size=machine_count) as episodes:
        for episode in episodes:
            result = await episode.run_command(command, as_root=not image.has_guestd)
            if result.exit_code:
                raise BenchFailed(f"episode {episode.episode_id}: {command} exited with {result.exit_code}")
        if before is None:
            return NO_MEMORY
        await bench.pool.measure_memory()
        status = bench.pool.statistics()
        if status.leased_count != machine_count or status.idle_count or status.starting_count:
            raise BenchFailed(f"{machine_count} machines are to be measured, and there are others: {status}")
        growth_bytes = memory_of(os.getpid()).pss_bytes - before.pss_bytes
    return memory_figures(
        pss_bytes=status.pss_bytes / machine_count,
        private_dirty_bytes=status.memory_bytes / machine_count,
        standby_pss_bytes=standby_bytes / machine_count,
        daemon_growth_bytes=growth_bytes / machine_count,
    )


def memory_figures(
    *, pss_bytes: float, private_dirty_bytes: float, standby_pss_bytes: float, daemon_growth_bytes: float
) -> dict[str, Value]:
    """Return the figures of the memory of forks after each has answered a command. Pure; takes bytes per machine."""
    return {
        "marginal_pss_mib": mib(pss_bytes + daemon_growth_bytes),
        "private_dirty_mib": mib(private_dirty_bytes),
        "standby_pss_mib": mib(standby_pss_bytes),
    }


def fork_report(
    conditions: dict[str, object],
    *,
    cold_boot_s: float,
    acquire_ms: list[float],
    fork_ms: list[float],
    destroy_ms: list[float],
    resume_ms: list[float],
    pause_ms: list[float],
    forks_per_min: tuple[float, float],
    memory: Mapping[str, Value],
) -> BenchReport:
    samples = {
        "acquire_ms": acquire_ms,
        "fork_ms": fork_ms,
        "destroy_ms": destroy_ms,
        "resume_ms": resume_ms,
        "pause_ms": pause_ms,
    }
    values: dict[str, Value] = {
        "cold_boot_s": cold_boot_s,
        "acquire_ms_first": acquire_ms[0],
        "acquire_ms_max": max(acquire_ms),
        "cold_boot_over_acquire": 1000 * cold_boot_s / median(acquire_ms),
        "forks_per_min_1": forks_per_min[0],
        "forks_per_min_2": forks_per_min[1],
        **memory,
    }
    return BenchReport(
        benchmark="fork",
        conditions=conditions,
        figures=[
            replace(each, exempt=each.exempt or _other_load(conditions)) if each.name == "marginal_pss_mib" else each
            for each in figures_of("fork", samples, values, exempt=exempt_without_guests(conditions))
        ],
        samples=samples,
    )


def _other_load(conditions: dict[str, object]) -> str:
    """Return how the conditions differ from those of the memory target; empty if they do not."""
    wanted = {
        "accelerator": Accelerator.TCG.value,
        "machines": _TARGET_MACHINES,
        "guest_memory_mib": _TARGET_MEMORY_MIB,
    }
    return "; ".join(
        f"{name} is {conditions[name]}, not {value}" for name, value in wanted.items() if conditions[name] != value
    )
