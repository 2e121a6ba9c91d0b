"""Measures checkpoints, next to branches of the same episodes, and checks that copies show what was stored."""

import os
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median_high

from cuaenv.client import AsyncEpisode, Checkpoint
from envd.bench.branch_parents import STEP_TIMEOUT, BranchParent
from envd.bench.report import BenchReport, Condition, exempt_without_guests, figures_of, mib
from envd.bench.session import BenchSession, Steps

#: The first machines of a process take longer: libvirt queries QEMU's capabilities.
_WARM_UPS = 2


def step_count(repetitions: int, depth: int) -> int:
    return 2 * (repetitions + _WARM_UPS) + depth + 2 * repetitions


async def measure_checkpoints(
    bench: BenchSession, *, light_task_id: str, parent: BranchParent, repetitions: int, depth: int, steps: Steps
) -> BenchReport:
    """Store a fresh desktop and one that has worked, and open episodes in these states.

    Args:
        bench: Its pool has machines for an episode, a copy, and those that are still being destroyed.
        light_task_id: A task without setup.
    """
    conditions = bench.conditions(repetitions=repetitions, light_task=light_task_id, task=parent.task_id, depth=depth)
    samples: dict[str, list[float]] = defaultdict(list)
    checks: list[Condition] = []
    for kind, who, task_id in (("light", "a fresh desktop", light_task_id), ("editor", parent.who, parent.task_id)):
        steps.begin(f"storing {who}")
        async with bench.reset(task_id) as episode:
            if task_id == parent.task_id:
                await parent.begin(bench, episode)
            for number in range(-_WARM_UPS, repetitions):
                if task_id == parent.task_id:
                    await parent.advance(episode, f"{number} ")
                else:
                    await episode.step(parent.nudge(number), timeout=STEP_TIMEOUT)
                kept = samples if number >= 0 else defaultdict(list)
                check = await _measure(bench, episode, parent, number, kept, kind=kind)
                steps.done(f"storing {who}")
        checks.append(replace(check, name=f"{kind}_{check.name}"))
    samples["first_reset_ms"], samples["deep_reset_ms"] = await _measure_depth(
        bench, light_task_id, parent=parent, repetitions=repetitions, depth=depth, steps=steps
    )
    values = {
        "light_mib": median_high(samples["light_mib"]),
        "editor_mib": median_high(samples["editor_mib"]),
        "depth_32_over_1": median_high(samples["deep_reset_ms"]) / median_high(samples["first_reset_ms"]),
    }
    return BenchReport(
        benchmark="checkpoint",
        conditions=conditions,
        figures=figures_of("checkpoint", samples, values, exempt=exempt_without_guests(conditions)),
        checks=tuple(checks),
        samples=samples,
    )


async def _measure(
    bench: BenchSession,
    episode: AsyncEpisode,
    parent: BranchParent,
    number: int,
    samples: dict[str, list[float]],
    *,
    kind: str,
) -> Condition:
    """Measure one checkpoint and a branch, and check that a copy and a rollback show what the episode showed."""
    infix = "" if kind == "light" else f"{kind}_"
    await bench.refilled(leased_count=1)
    begin_s = time.perf_counter()
    async with bench.client.fork(episode, count=1):
        samples[f"branch_{kind}_ms"].append(_since_ms(begin_s))
    begin_s = time.perf_counter()
    checkpoint = await episode.checkpoint()
    samples[f"create_{kind}_ms"].append(_since_ms(begin_s))
    samples[f"parent_pause_{kind}_ms"].append(checkpoint.timings_ms["pause"])
    samples[f"{kind}_mib"].append(mib(checkpoint.size_bytes))
    shown: list[str] = []
    async with AsyncExitStack() as kept:
        kept.push_async_callback(bench.client.delete_checkpoint, checkpoint)
        for name in ("cached", "cold"):
            if name == "cold":
                _drop_cache(bench.daemon.config.checkpoint_dir / checkpoint.checkpoint_id)
            async with AsyncExitStack() as stack:
                copy, reset_ms = await _reset(bench, checkpoint, stack, leased_count=1)
                samples[f"reset_{infix}{name}_ms"].append(reset_ms)
                shown.append(copy.observation.frame_id)
                await copy.step(parent.nudge(number), timeout=STEP_TIMEOUT)
        await bench.refilled(leased_count=1)
        begin_s = time.perf_counter()
        shown.append((await episode.rollback(checkpoint)).frame_id)
        samples[f"rollback_{infix}ms"].append(_since_ms(begin_s))
    return Condition(
        name="copies_show_the_same",
        passed=set(shown) == {checkpoint.frame_id},
        evidence=f"two copies, which took a step, and a rollback showed {', '.join(sorted(set(shown)))}; stored was"
        f" {checkpoint.frame_id}",
    )


def _drop_cache(directory: Path) -> None:
    """Remove the files of a directory, which are on the disk, from the page cache."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _since_ms(begin_s: float) -> float:
    return (time.perf_counter() - begin_s) * 1000


async def _reset(
    bench: BenchSession, checkpoint: Checkpoint, stack: AsyncExitStack, *, leased_count: int
) -> tuple[AsyncEpisode, float]:
    await bench.refilled(leased_count=leased_count)
    begin_s = time.perf_counter()
    copy = await stack.enter_async_context(bench.client.reset(checkpoint))
    return copy, _since_ms(begin_s)


async def _measure_depth(
    bench: BenchSession, task_id: str, *, parent: BranchParent, repetitions: int, depth: int, steps: Steps
) -> tuple[list[float], list[float]]:
    """Return the milliseconds of resets from the first and from the last checkpoint of a chain."""
    async with AsyncExitStack() as kept:
        async with bench.reset(task_id, max_steps=depth + 1) as episode:
            first = last = await episode.checkpoint()
        kept.push_async_callback(bench.client.delete_checkpoint, first)
        for number in range(depth):
            async with bench.client.reset(last) as copy:
                await copy.step(parent.nudge(number), timeout=STEP_TIMEOUT)
                last = await copy.checkpoint()
            kept.push_async_callback(bench.client.delete_checkpoint, last)
            steps.done("storing a chain")
        times: dict[str, list[float]] = {first.checkpoint_id: [], last.checkpoint_id: []}
        for _ in range(repetitions):
            for checkpoint in (first, last):
                async with AsyncExitStack() as stack:
                    _, reset_ms = await _reset(bench, checkpoint, stack, leased_count=0)
                    times[checkpoint.checkpoint_id].append(reset_ms)
                steps.done("opening both ends")
    return times[first.checkpoint_id], times[last.checkpoint_id]
