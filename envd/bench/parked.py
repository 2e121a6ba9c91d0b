"""Measures more open episodes than machines: what a step costs when its episode may have been parked before it.

Clients play twice on one daemon: as many episodes as machines, of which none is parked, then all. With fewer episodes
they think for a shorter time, so that the processors get equally many steps a second.
"""

import asyncio
import os
import random
import shutil
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from cuaenv.actions import Action, PressKeys, TypeText, Wait
from cuaenv.client import AsyncEpisode, Checkpoint, EnvError, View
from envd.base.config import Config
from envd.bench.branch_parents import STEP_TIMEOUT
from envd.bench.episodes import tree_cpu_s
from envd.bench.report import BenchReport, Condition, exempt_without_guests, figures_of, mib, percentile
from envd.bench.session import BenchSession, Steps, bench_config, open_bench
from envd.pool.room import host_memory_mib

#: Most episodes that are opened at once.
_OPENING_COUNT = 4
_OPEN_TIMEOUT = timedelta(minutes=30)
_SAVE = (PressKeys(["ctrl", "s"]), Wait(timedelta(seconds=1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedPlan:
    """The load."""

    task: str
    """Its desktop has `document` open in an editor."""
    document: str
    episode_count: int
    resident_count: int
    """Machines in memory."""
    step_count: int
    """Steps of each episode."""
    think_s: float
    """Mean pause of an episode's client before each step; uniform from two thirds to four thirds of it."""
    price_per_hour: float = 0.0
    """Dollars for the host; 0 if it is not known."""

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
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of the daemon, its machines and the clients."""
    series: dict[str, float] = field(default_factory=dict)
    """The daemon's series of parking."""

    def mean_s(self, to: str) -> float | None:
        """Return the mean time to park (`disk`) or to resume (`machine`) an episode."""
        count = self.series.get(f"envd_parking_seconds_count {to}", 0.0)
        return self.series[f"envd_parking_seconds_sum {to}"] / count if count else None


async def measure_parked(settings: Config, plan: ParkedPlan, *, steps: Steps) -> BenchReport:
    """Let clients type into editors, with pauses, and check each document at the end.

    All episodes begin in one checkpoint of an open editor, and each types a text of its own.
    """
    capacity = max(plan.episode_count, plan.resident_count)
    in_memory, parked = _Played(), _Played()
    think_s = plan.think_s * plan.resident_count / capacity
    in_memory_plan = replace(plan, episode_count=plan.resident_count, think_s=think_s)
    own = bench_config(settings, standby_count=2, capacity=capacity + 2, resident=plan.resident_count + 2)
    async with open_bench(own, steps=steps) as bench:
        conditions = bench.conditions(**{name: value for name, value in asdict(plan).items() if name != "document"})
        steps.begin("opening an editor")
        async with bench.client.reset(plan.task, timeout=_OPEN_TIMEOUT) as editor:
            text = (await editor.read_file(plan.document)).decode()
            # An emulated guest takes seconds to open an editor, and a tenth of that to continue from there.
            opened = await editor.checkpoint()
        try:
            for played, played_plan in ((in_memory, in_memory_plan), (parked, plan)):
                await _play(bench, played_plan, played, opened=opened, text=text, steps=steps)
        finally:
            await bench.client.delete_checkpoint(opened)
    cpu_s_per_step = parked.cpu_s / max(1, len(parked.step_ms))
    host = host_figures(
        plan,
        core_count=len(os.sched_getaffinity(0)),
        memory_mib=host_memory_mib() - settings.limits.memory_reserve_mib,
        machine_mib=bench.pool.settings.expected_memory_mib,
        disk_mib=mib(shutil.disk_usage(bench.state_dir).free) - settings.limits.disk_reserve_mib,
        parked_mib=percentile(parked.disk_mib, 50) or 0.0,
        step_s=(percentile(parked.step_ms, 50) or 0.0) / 1000,
        cpu_s_per_step=cpu_s_per_step,
    )
    values = {
        **host,
        "open_episodes": float(plan.episode_count),
        "episodes_per_machine": plan.episode_count / plan.resident_count,
        "step_ms_p50_over_in_memory": _ratio(parked.step_ms, in_memory.step_ms, 50),
        "step_ms_p95_over_in_memory": _ratio(parked.step_ms, in_memory.step_ms, 95),
        "parked_mib": percentile(parked.disk_mib, 50),
        "park_ms_mean": _in_ms(parked.mean_s("disk")),
        "resume_ms_mean": _in_ms(parked.mean_s("machine")),
        "written_mib_per_step": mib(parked.series.get("envd_parking_bytes_total ", 0.0)) / max(1, len(parked.step_ms)),
        "steps_per_s": len(parked.step_ms) / parked.elapsed_s,
        "cpu_s_per_step": cpu_s_per_step,
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


def host_figures(
    plan: ParkedPlan,
    *,
    core_count: int,
    memory_mib: float,
    machine_mib: float,
    disk_mib: float,
    parked_mib: float,
    step_s: float,
    cpu_s_per_step: float,
) -> dict[str, float | None]:
    """Return how many desktops a host carries, if their clients think as long as the plan's, and their costs.

    Args:
        memory_mib: Memory for machines.
        machine_mib: Memory of each machine.
        disk_mib: Disk space for parked states.
        parked_mib: Disk space of each parked state; 0 if none was seen.
    """
    interval_s = plan.think_s + step_s
    limits = {
        "desktops_by_memory": memory_mib / machine_mib * plan.episode_count / plan.resident_count,
        "desktops_by_processors": core_count / cpu_s_per_step * interval_s if cpu_s_per_step else None,
        "desktops_by_disk": disk_mib / parked_mib if parked_mib else None,
    }
    count = max(1, int(min(limit for limit in limits.values() if limit is not None)))
    price = plan.price_per_hour
    return {
        **limits,
        "desktops_per_host": count,
        "dollars_per_desktop_day": 24 * price / count if price else None,
        "dollars_per_1000_steps": 1000 * price / 3600 * interval_s / count if price else None,
    }


def _in_ms(time_s: float | None) -> float | None:
    return None if time_s is None else time_s * 1000


def _ratio(samples: Sequence[float], base: Sequence[float], percent: int) -> float | None:
    over, under = percentile(samples, percent), percentile(base, percent)
    return over / under if over and under else None


async def _play(
    bench: BenchSession, plan: ParkedPlan, played: _Played, *, opened: Checkpoint, text: str, steps: Steps
) -> None:
    opening = asyncio.Semaphore(_OPENING_COUNT)

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
    series_before = await asyncio.to_thread(_read_series, bench.daemon.metrics_address)
    begin_s, begin_cpu_s = time.monotonic(), tree_cpu_s()
    try:
        async with asyncio.TaskGroup() as playing:
            for number in range(plan.episode_count):
                playing.create_task(play(number))
        played.elapsed_s, played.cpu_s = time.monotonic() - begin_s, tree_cpu_s() - begin_cpu_s
        series = await asyncio.to_thread(_read_series, bench.daemon.metrics_address)
        played.series = {name: value - series_before.get(name, 0.0) for name, value in series.items()}
    finally:
        sampling.cancel()
        await asyncio.wait({sampling})


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
    found = (await episode.read_file(plan.document)).decode()
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


def _read_series(address: str) -> dict[str, float]:
    """Return the values of the series of parking by name and direction."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {
        f"{sample.name} {sample.labels.get('to', '')}": sample.value
        for family in text_string_to_metric_families(text)
        if family.name.startswith("envd_parking")
        for sample in family.samples
    }


def _size_of(directory: Path) -> int:
    """Return the disk space of all files, which may be linked from several directories."""
    sizes_bytes: dict[int, int] = {}
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # deleted meanwhile
            status = path.stat()
            sizes_bytes[status.st_ino] = status.st_blocks * 512
    return sum(sizes_bytes.values())
