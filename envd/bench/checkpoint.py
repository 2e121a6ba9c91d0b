"""Measures checkpoints, next to branches of the same episodes, and checks that a copy shows what was stored."""

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from cuaenv.client import AsyncEpisode, Checkpoint
from envd.bench.branch_parents import STEP_TIMEOUT, BranchParent
from envd.bench.report import (
    BenchReport,
    Check,
    Figure,
    Target,
    exempt_without_guests,
    figure,
    figures_of,
    from_samples,
    mib,
)
from envd.bench.session import BenchSession, Steps

#: The first machines of a process take longer: libvirt queries QEMU's capabilities.
_WARM_UPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFigures:
    """Figures of the checkpoints of one episode; the targets are for a fresh desktop."""

    create_ms_p50: float = figure("CreateCheckpoint over gRPC on loopback", Target("<=", 120))
    create_ms_p95: float = figure("The same")
    parent_pause_ms_p50: float = figure("How long the episode was paused for the copy", Target("<=", 25))
    branch_ms_p50: float = figure("Fork of the same episode in the same run, one child, for comparison")
    reset_ms_p50: float = figure(
        "Reset of one episode from the checkpoint, until the client has its first frame as PNG; the files are in the"
        " page cache",
        Target("<=", 150),
    )
    reset_ms_p95: float = figure("The same")
    size_mib_p50: float | None = figure("Size of the checkpoint on disk", Target("<=", 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthFigures:
    """Figures of checkpoints of checkpoints."""

    deep_reset_ms_p50: float = figure(
        "Reset from the last checkpoint of a chain, each made in an episode of the one before"
    )
    deep_to_first_ratio: float = figure("The same, divided by a reset from the chain's first one", Target("<=", 1.3))


def step_count(repetitions: int, depth: int) -> int:
    """Return the number of progress steps of `measure_checkpoints`."""
    return 2 * (repetitions + _WARM_UPS) + depth + 2 * repetitions


async def measure_checkpoints(
    bench: BenchSession, *, light_task_id: str, parent: BranchParent, repetitions: int, depth: int, steps: Steps
) -> BenchReport:
    """Store a fresh desktop and one that has worked, and open episodes in these states.

    Args:
        bench: Its pool has machines for an episode, a copy, and those that are still being destroyed.
        light_task_id: A task without setup.
        parent: The work of the second episode.
        repetitions: Checkpoints of each episode.
        depth: Length of the chain of checkpoints.
        steps: Receives `step_count` steps.

    Raises:
        EnvError: A call failed.
        BenchFailed: A response was wrong.
    """
    conditions = bench.conditions(repetitions=repetitions, light_task=light_task_id, task=parent.task_id, depth=depth)
    exempt = exempt_without_guests(conditions)
    figures: list[Figure] = []
    all_samples: dict[str, list[float]] = {}
    checks: list[Check] = []
    for prefix, who, task_id in (("light_", "a fresh desktop", light_task_id), ("", parent.who, parent.task_id)):
        steps.begin(f"storing {who}")
        samples: dict[str, list[float]] = defaultdict(list)
        async with bench.reset(task_id) as episode:
            if task_id == parent.task_id:
                await parent.begin(bench, episode)
            for number in range(-_WARM_UPS, repetitions):
                if task_id == parent.task_id:
                    await parent.advance(episode, f"{number} ")
                else:
                    await episode.step(parent.nudge(number), timeout=STEP_TIMEOUT)
                check = await _measure(bench, episode, parent, number, samples if number >= 0 else defaultdict(list))
                steps.done(f"storing {who}")
        checks.append(replace(check, name=f"{prefix}{check.name}"))
        figures += figures_of(
            from_samples(CheckpointFigures, samples),
            name=f"{prefix}{{}}",
            meaning=f"{who}: {{}}",
            exempt=exempt,
            has_targets=task_id == light_task_id,
        )
        all_samples |= {f"{prefix}{name}": values for name, values in samples.items()}
    first_ms, deep_ms = await _measure_depth(
        bench, light_task_id, parent=parent, repetitions=repetitions, depth=depth, steps=steps
    )
    deep = from_samples(
        DepthFigures, {"deep_reset_ms": deep_ms}, deep_to_first_ratio=_median(deep_ms) / _median(first_ms)
    )
    figures += figures_of(deep, exempt=exempt)
    all_samples |= {"first_reset_ms": first_ms, "deep_reset_ms": deep_ms}
    return BenchReport(
        benchmark="checkpoint", conditions=conditions, figures=figures, checks=tuple(checks), samples=all_samples
    )


async def _measure(
    bench: BenchSession, episode: AsyncEpisode, parent: BranchParent, number: int, samples: dict[str, list[float]]
) -> Check:
    """Measure one checkpoint and a branch, and check that a copy shows what the episode showed."""
    await bench.refilled(leased_count=1)
    begin_s = time.perf_counter()
    async with bench.client.fork(episode, count=1):
        samples["branch_ms"].append((time.perf_counter() - begin_s) * 1000)
    begin_s = time.perf_counter()
    checkpoint = await episode.checkpoint()
    samples["create_ms"].append((time.perf_counter() - begin_s) * 1000)
    samples["parent_pause_ms"].append(checkpoint.timings_ms["pause"])
    samples["size_mib"].append(mib(checkpoint.size_bytes))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(bench.client.delete_checkpoint, checkpoint)
        copy, reset_ms = await _reset(bench, checkpoint, stack, leased_count=1)
        samples["reset_ms"].append(reset_ms)
        shown = copy.observation.frame_id
        await copy.step(parent.nudge(number), timeout=STEP_TIMEOUT)
    return Check(
        name="copy_shows_the_same",
        passed=shown == checkpoint.frame_id,
        evidence=f"the first frame of a copy is {shown}, stored was {checkpoint.frame_id}; the copy took a step",
    )


async def _reset(
    bench: BenchSession, checkpoint: Checkpoint, stack: AsyncExitStack, *, leased_count: int
) -> tuple[AsyncEpisode, float]:
    await bench.refilled(leased_count=leased_count)
    begin_s = time.perf_counter()
    copy = await stack.enter_async_context(bench.client.reset(checkpoint))
    return copy, (time.perf_counter() - begin_s) * 1000


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


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
