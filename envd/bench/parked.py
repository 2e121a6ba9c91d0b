"""Measures more open episodes than machines: what a step costs when its episode may have been parked before it.

The same clients play twice on daemons of this process: as many episodes as machines, of which none is parked, then all.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

from cuaenv.actions import Action, PressKeys, TypeText, Wait
from cuaenv.client import AsyncEpisode, EnvError, View
from envd.base.config import Config
from envd.bench.branch_parents import STEP_TIMEOUT
from envd.bench.default_tasks import EditorTask
from envd.bench.report import BenchReport, Condition, exempt_without_guests, figures_of, mib, percentile
from envd.bench.session import BenchSession, Steps, bench_config, open_bench

#: Most episodes that are opened at once.
_OPENING_COUNT = 4
_OPEN_TIMEOUT = timedelta(minutes=30)
_SAVE = (PressKeys(["ctrl", "s"]), Wait(timedelta(seconds=1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedPlan:
    """The load."""

    task: EditorTask
    episode_count: int
    resident_count: int
    """Machines in memory."""
    step_count: int
    """Steps of each episode."""
    think_s: float
    """Mean pause of an episode's client before each step; uniform from two thirds to four thirds of it."""

    @property
    def work_count(self) -> int:
        return (self.episode_count + self.resident_count) * (self.step_count + 1)


@dataclass(eq=False)
class _Played:
    """What the clients of one daemon saw."""

    step_ms: list[float] = field(default_factory=list)
    unpark_ms: list[float] = field(default_factory=list)
    correct_count: int = 0
    problems: list[str] = field(default_factory=list)
    parked_counts: list[int] = field(default_factory=list)
    disk_mib: list[float] = field(default_factory=list)
    """Size of the stored states, when sampled, for each parked episode."""


async def measure_parked(settings: Config, plan: ParkedPlan, *, steps: Steps) -> BenchReport:
    """Let clients type into editors, with pauses, and check each document at the end.

    All episodes begin in one checkpoint of an open editor, and each types a text of its own.
    """
    capacity = max(plan.episode_count, plan.resident_count)
    in_memory, parked = _Played(), _Played()
    for played, episode_count in ((in_memory, plan.resident_count), (parked, plan.episode_count)):
        own = bench_config(settings, standby_count=2, capacity=capacity + 2, resident=plan.resident_count + 2)
        async with open_bench(own, steps=steps) as bench:
            conditions = bench.conditions(**{**asdict(plan), "task": plan.task.task_id})
            await _play(bench, plan, played, episode_count=episode_count, steps=steps)
    values = {
        "open_episodes": float(plan.episode_count),
        "episodes_per_machine": plan.episode_count / plan.resident_count,
        "step_ms_p50_over_in_memory": _ratio(parked.step_ms, in_memory.step_ms, 50),
        "step_ms_p95_over_in_memory": _ratio(parked.step_ms, in_memory.step_ms, 95),
        "parked_mib": percentile(parked.disk_mib, 50),
        "parked_episodes": max(parked.parked_counts, default=0),
        "unparked_steps": len(parked.unpark_ms) / max(1, len(parked.step_ms)),
    }
    samples = {"step_ms": parked.step_ms, "in_memory_step_ms": in_memory.step_ms, "unpark_ms": parked.unpark_ms}
    return BenchReport(
        benchmark="parked",
        conditions=conditions,
        figures=figures_of("parked", samples, values, exempt=exempt_without_guests(conditions)),
        checks=tuple(
            Condition(
                name=f"every document has what was typed, {who}",
                passed=played.correct_count == count and not played.problems,
                evidence=f"{played.correct_count} of {count}; {'; '.join(played.problems[:3]) or 'no problem'}",
            )
            for who, played, count in (
                ("in memory", in_memory, plan.resident_count),
                ("parked", parked, plan.episode_count),
            )
        ),
        samples=samples,
    )


def _ratio(samples: Sequence[float], base: Sequence[float], percent: int) -> float | None:
    over, under = percentile(samples, percent), percentile(base, percent)
    return over / under if over and under else None


async def _play(bench: BenchSession, plan: ParkedPlan, played: _Played, *, episode_count: int, steps: Steps) -> None:
    opening = asyncio.Semaphore(_OPENING_COUNT)
    async with bench.client.reset(plan.task.task_id, timeout=_OPEN_TIMEOUT) as editor:
        text = (await editor.read_file(plan.task.document)).decode()
        # An emulated guest takes seconds to open an editor, and a tenth of that to continue from there.
        opened = await editor.checkpoint()

    async def play(number: int) -> None:
        try:
            async with opening:
                episode = await bench.client.open(opened, view=View(), timeout=_OPEN_TIMEOUT)
                steps.done("opening episodes")
            async with episode:
                await _type(episode, plan, played, number=number, text=text, steps=steps)
        except EnvError as error:
            played.problems.append(f"episode {number}: {error.code}: {error}")

    sampling = asyncio.create_task(_sample(bench, played), name="bench:sample")
    try:
        async with asyncio.TaskGroup() as playing:
            for number in range(episode_count):
                playing.create_task(play(number))
    finally:
        sampling.cancel()
        await asyncio.wait({sampling})
        await bench.client.delete_checkpoint(opened)


async def _type(
    episode: AsyncEpisode, plan: ParkedPlan, played: _Played, *, number: int, text: str, steps: Steps
) -> None:
    rng = random.Random(number)  # noqa: S311 -- pauses, the same in both runs

    async def step(*actions: Action) -> None:
        await asyncio.sleep(plan.think_s * rng.uniform(2 / 3, 4 / 3))
        begin_s = time.perf_counter()
        result = await episode.step(*actions, timeout=STEP_TIMEOUT)
        played.step_ms.append((time.perf_counter() - begin_s) * 1000)
        if (unpark_ms := result.timings_ms.get("unpark")) is not None:
            played.unpark_ms.append(unpark_ms)
        steps.done("stepping")

    await step(PressKeys(["ctrl", "end"]))
    for index in range(plan.step_count - 2):
        word = f"{number}-{index} "
        await step(TypeText(word))
        text += word
    await step(*_SAVE)
    found = (await episode.read_file(plan.task.document)).decode()
    # Editors end the last line.
    if found.rstrip("\n") == text.rstrip("\n"):
        played.correct_count += 1
    else:
        played.problems.append(f"episode {number}: its document has {found[-80:]!r}")


async def _sample(bench: BenchSession, played: _Played) -> None:
    while True:
        await asyncio.sleep(1.0)
        count = bench.pool.statistics().parked_count
        played.parked_counts.append(count)
        if count:
            size_bytes = await asyncio.to_thread(_size_of, bench.state_dir / "parked")
            played.disk_mib.append(mib(size_bytes) / count)


def _size_of(directory: Path) -> int:
    size_bytes = 0
    for path in directory.rglob("*"):
        try:
            size_bytes += path.stat().st_blocks * 512
        except FileNotFoundError:  # deleted meanwhile
            continue
    return size_bytes
