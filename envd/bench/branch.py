"""Measures branches of live episodes, and checks that a child continues from its parent and the parent is unchanged."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from cuaenv.client import AsyncEpisode
from envd.bench.branch_parents import STEP_TIMEOUT, TARGET_DIRTY_MIB, BranchParent, frame_id_of
from envd.bench.report import BenchReport, Condition, Figure, exempt_without_guests, figures_of, mib, percentile
from envd.bench.session import BenchSession, Steps

#: The first two machines of a process take longer: libvirt queries QEMU's capabilities.
_WARM_UPS = 2


#: Times of a `Fork` with one child; `other_ms` is the daemon's time outside of `copy_ms` and `start_ms`.
_TIMES = ("branch_ms", "parent_pause_ms", "copy_ms", "start_ms", "other_ms")
#: One branch: these times, and `dirty_mib` if there is a process to measure.
TimedBranch = Mapping[str, float]
#: The target of groups is for this size.
TARGET_GROUP_SIZE = 8


def step_count(repetitions: int) -> int:
    return 3 * repetitions + 2 * _WARM_UPS + 2


async def measure_branch(
    bench: BenchSession, *, light_task_id: str, parent: BranchParent, repetitions: int, steps: Steps
) -> BenchReport:
    """Branch a fresh desktop, into one child and into groups, then a parent that has worked; check it and its child.

    Args:
        bench: Its pool has machines for a parent, a child, and those that are still being destroyed; and for a parent,
            a group as large as its standby set, and the next standby set.
        light_task_id: A task without setup.
    """
    group_size = bench.pool.settings.size
    conditions = bench.conditions(
        repetitions=repetitions, light_task=light_task_id, task=parent.task_id, group_size=group_size
    )
    steps.begin("setting up")
    light: list[TimedBranch] = []
    async with bench.reset(light_task_id) as episode:
        for number in _numbers(repetitions):
            await episode.step(parent.nudge(number), timeout=STEP_TIMEOUT)
            async with _branched(bench, episode) as (_, sample):
                light.append(sample)
            steps.done("branching a desktop")
        group_ms = []
        for number in range(repetitions):
            await episode.step(parent.nudge(number), timeout=STEP_TIMEOUT)
            await bench.refilled(leased_count=1)
            begin_s = time.perf_counter()
            async with bench.client.fork(episode, count=group_size):
                group_ms.append((time.perf_counter() - begin_s) * 1000)
            steps.done("forking groups")
    worked: list[TimedBranch] = []
    async with bench.reset(parent.task_id) as episode:
        await parent.begin(bench, episode)
        steps.done(f"branching {parent.who}")
        for number in _numbers(repetitions):
            await parent.advance(episode, f"{number} ")
            frame_id = await frame_id_of(episode)
            async with _branched(bench, episode) as (child, sample):
                worked.append(sample)
                steps.done(f"branching {parent.who}")
                if number == repetitions - 1:
                    check = await parent.check(episode, child, frame_id=frame_id)
                    steps.done("checked")
    return branch_report(
        conditions, light=light[_WARM_UPS:], worked=worked[_WARM_UPS:], group_ms=group_ms, who=parent.who, check=check
    )


def _numbers(repetitions: int) -> range:
    """Return the numbers of the branches; negative ones are warm-ups."""
    return range(-_WARM_UPS, repetitions)


@asynccontextmanager
async def _branched(bench: BenchSession, parent: AsyncEpisode) -> AsyncIterator[tuple[AsyncEpisode, TimedBranch]]:
    """Fork one child of `parent`, measured, and close it after the block."""
    await bench.refilled(leased_count=1)
    dirty_bytes = bench.written_bytes()
    begin_s = time.perf_counter()
    async with bench.client.fork(parent, count=1) as [child]:
        branch_ms = (time.perf_counter() - begin_s) * 1000
        timings_ms = child.opening_timings_ms
        sample = {
            "branch_ms": branch_ms,
            "parent_pause_ms": timings_ms["pause"],
            "copy_ms": timings_ms["copy"],
            "start_ms": timings_ms["start"],
            "other_ms": timings_ms["total"] - timings_ms["copy"] - timings_ms["start"],
        }
        if dirty_bytes is not None:
            sample["dirty_mib"] = mib(dirty_bytes)
        yield child, sample


def branch_report(
    conditions: dict[str, object],
    *,
    light: Sequence[TimedBranch],
    worked: Sequence[TimedBranch],
    group_ms: Sequence[float],
    who: str,
    check: Condition,
) -> BenchReport:
    figures: list[Figure] = []
    all_samples: dict[str, list[float]] = {}
    for prefix, subject, samples in (("light_", "a fresh desktop", light), ("", who, worked)):
        measured = {name: [sample[name] for sample in samples if name in sample] for name in (*_TIMES, "dirty_mib")}
        exempt = exempt_without_guests(conditions)
        if (dirty := percentile(measured["dirty_mib"], 50)) is not None and dirty > TARGET_DIRTY_MIB:
            exempt = exempt or f"{dirty:.0f} MiB are dirty; the target is for {TARGET_DIRTY_MIB} MiB"
        figures += figures_of("branch", measured, {}, name=f"{prefix}{{}}", meaning=f"{subject}: {{}}", exempt=exempt)
        all_samples |= {f"{prefix}{name}": measured[name] for name in ("branch_ms", "parent_pause_ms", "dirty_mib")}
    exempt = exempt_without_guests(conditions)
    if (size := conditions["group_size"]) != TARGET_GROUP_SIZE:
        exempt = exempt or f"group_size is {size}, not {TARGET_GROUP_SIZE}"
    all_samples["group_first_frames_ms"] = list(group_ms)
    figures += figures_of("branch_groups", all_samples, {}, exempt=exempt)
    return BenchReport(benchmark="branch", conditions=conditions, figures=figures, checks=(check,), samples=all_samples)
