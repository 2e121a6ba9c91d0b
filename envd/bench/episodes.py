"""Measures whole episodes per hour on one host: oracles of tasks, or OSWorld's tasks against OSWorld's own flow.

Of OSWorld, both sides play the same tasks with the same script and think time: open a terminal, type a line that solves
the task, press Enter, finish. Ours opens groups on standby machines and waits until the screen has settled; the peer is
`envd.bench.episodes_peer`.
"""

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from cuaenv.actions import Action, Done, PressKeys, TypeText, Wait
from cuaenv.client import AsyncEpisode, StepResult
from envd.authoring.playing import max_steps_of, play
from envd.base.errors import ConfigError
from envd.bench.episodes_peer import EVALUATE_PAUSE_S, RESET_PAUSE_S, PeerEpisode, PlayedEpisode, play_as_peer
from envd.bench.report import BenchReport, Condition, figures_of, mib
from envd.bench.session import BenchSession, Steps
from envd.hypervisor.qemu.processes import memory_of
from envd.integrations.osworld.environment import Environment
from envd.tasks.model import Task

#: OSWorld's tasks by id, with a line for the guest's terminal that solves each. They need no network.
SCRIPTS = {
    "a4d98375-215b-4a4d-aee9-3d4370fccc41": "gsettings set org.gnome.desktop.screensaver lock-enabled true",
    "bedcedc4-4d72-425e-ad62-21960b11fe0d": "gsettings set org.gnome.settings-daemon.plugins.power idle-dim false",
    "f9be0997-4b7c-45c5-b05c-4612b44a6118": "gsettings set org.gnome.desktop.notifications show-banners false",
    "3ce045a0-877b-42aa-8d2c-b4a863336ab8": "gsettings set org.gnome.desktop.interface text-scaling-factor 1.5",
}
_MEMORY_INTERVAL_S = 5.0
#: Most steps of an oracle, its waits included.
_MAX_ORACLE_STEPS = 500
#: Most steps that wait until the screen has changed.
_MAX_WAITS = 20
_WAIT = timedelta(seconds=1)


@dataclass(slots=True, kw_only=True)
class Side:
    """What one side played and used."""

    episodes: list[PlayedEpisode] = field(default_factory=list)
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    """Peak, beyond that at the beginning."""

    @property
    def per_hour(self) -> float:
        return len(self.episodes) / self.elapsed_s * 3600

    @property
    def steps_s(self) -> list[float]:
        return [step_s for episode in self.episodes for step_s in episode.steps_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesPlan:
    """What both sides play."""

    concurrency: int
    episode_count: int
    """Number of our episodes; rounded up to whole groups."""
    peer_episode_count: int
    """Number of the peer's episodes; rounded up to the same number for each of its environments."""
    think_s: float
    peer_step_pause_s: float
    """Pause of the peer after each action."""

    @property
    def group_count(self) -> int:
        return -(-self.episode_count // self.concurrency)

    @property
    def peer_turn_count(self) -> int:
        """Episodes of each of the peer's environments."""
        return -(-self.peer_episode_count // self.concurrency)

    @property
    def step_count(self) -> int:
        return (self.group_count + self.peer_turn_count) * self.concurrency


def require_osworld(cache_dir: Path) -> tuple[Path, Path]:
    """Return OSWorld's Python and its directory of tasks. Raises: ConfigError: one is not installed."""
    environment = Environment(cache_dir)
    if not environment.is_installed or environment.tasks is None:
        raise ConfigError("OSWorld is not installed; run envd osworld install --tasks DIR")
    return environment.python, environment.tasks


async def measure_oracles(
    bench: BenchSession, plan: EpisodesPlan, *, tasks: Sequence[Task], steps: Steps
) -> BenchReport:
    """Play the oracles of tasks in turn, in groups, without think time and without a peer."""
    conditions = bench.conditions(concurrency=plan.concurrency, think_s=0.0, tasks=[task.task_id for task in tasks])
    ours = Side()
    steps.begin("playing oracles")
    async with _measured(ours):
        for index in range(plan.group_count):
            task = tasks[index % len(tasks)]
            begin_s = time.monotonic()
            max_steps = max_steps_of(task, limit=_MAX_ORACLE_STEPS)
            async with bench.reset_group(task.task_id, size=plan.concurrency, max_steps=max_steps) as episodes:
                reset_s = time.monotonic() - begin_s

                async def play_one(episode: AsyncEpisode, task: Task = task, reset_s: float = reset_s) -> None:
                    ours.episodes.append(await _play_oracle(episode, task, reset_s=reset_s))
                    steps.done("playing oracles")

                async with asyncio.TaskGroup() as playing:
                    for episode in episodes:
                        playing.create_task(play_one(episode))
    return episodes_report(conditions, ours, None, concurrency=plan.concurrency)


async def _play_oracle(episode: AsyncEpisode, task: Task, *, reset_s: float) -> PlayedEpisode:
    steps_s: list[float] = []

    def on_step(_actions: tuple[Action, ...], result: StepResult) -> None:
        steps_s.append(result.timings_ms["total"] / 1000)

    await play(episode, task.oracle, os=task.os, runs_guests=True, on_step=on_step)
    begin_s = time.monotonic()
    score = (await episode.evaluate()).score
    return PlayedEpisode(score=score, reset_s=reset_s, steps_s=steps_s, evaluate_s=time.monotonic() - begin_s)


async def measure_episodes(
    bench: BenchSession, plan: EpisodesPlan, *, python: Path, tasks: Path, steps: Steps
) -> BenchReport:
    conditions = bench.conditions(
        concurrency=plan.concurrency,
        think_s=plan.think_s,
        peer_pauses_s=[RESET_PAUSE_S, plan.peer_step_pause_s, EVALUATE_PAUSE_S],
        tasks=list(SCRIPTS),
    )
    ours, peer = Side(), Side()
    steps.begin("playing ours")
    async with _measured(ours):
        await _play_ours(bench, plan, ours, steps)
    await bench.refilled()
    steps.begin("playing the peer's")
    async with _measured(peer):
        await _play_peer(bench, plan, peer, python=python, tasks=tasks, steps=steps)
    return episodes_report(conditions, ours, peer, concurrency=plan.concurrency)


async def _play_ours(bench: BenchSession, plan: EpisodesPlan, side: Side, steps: Steps) -> None:
    names = list(SCRIPTS)
    for index in range(plan.group_count):
        name = names[index % len(names)]
        begin_s = time.monotonic()
        async with bench.reset_group(f"osworld/{name}", size=plan.concurrency) as episodes:
            reset_s = time.monotonic() - begin_s

            async def play(episode: AsyncEpisode, line: str = SCRIPTS[name], reset_s: float = reset_s) -> None:
                side.episodes.append(await _play(episode, line, think_s=plan.think_s, reset_s=reset_s))
                steps.done("playing ours")

            async with asyncio.TaskGroup() as playing:
                for episode in episodes:
                    playing.create_task(play(episode))


async def _play(episode: AsyncEpisode, line: str, *, think_s: float, reset_s: float) -> PlayedEpisode:
    steps_s: list[float] = []

    async def step(action: Action) -> str:
        await asyncio.sleep(think_s)
        begin_s = time.monotonic()
        result = await episode.step(action)
        steps_s.append(time.monotonic() - begin_s)
        return result.observation.frame_id

    before = episode.observation.frame_id
    shown = await step(PressKeys(keys=("super", "t")))
    for _ in range(_MAX_WAITS):
        if shown != before:
            break
        shown = await step(Wait(_WAIT))
    for action in (TypeText(text=line), PressKeys(keys=("enter",)), Done()):
        await step(action)
    begin_s = time.monotonic()
    score = (await episode.evaluate()).score
    return PlayedEpisode(score=score, reset_s=reset_s, steps_s=steps_s, evaluate_s=time.monotonic() - begin_s)


async def _play_peer(
    bench: BenchSession, plan: EpisodesPlan, side: Side, *, python: Path, tasks: Path, steps: Steps
) -> None:
    names = list(SCRIPTS)

    async def play(number: int) -> None:
        turns = [names[(number + turn) % len(names)] for turn in range(plan.peer_turn_count)]
        episodes = [PeerEpisode(task=task_file(tasks, name), actions=pyautogui_calls(SCRIPTS[name])) for name in turns]
        side.episodes += await play_as_peer(
            bench,
            python,
            episodes,
            think_s=plan.think_s,
            step_pause_s=plan.peer_step_pause_s,
            on_episode=lambda: steps.done("playing the peer's"),
        )

    async with asyncio.TaskGroup() as playing:
        for number in range(plan.concurrency):
            playing.create_task(play(number))


def task_file(tasks: Path, name: str) -> dict[str, object]:
    """Return a task of OSWorld as its file has it."""
    [path] = tasks.glob(f"examples/*/{name}.json")
    task: dict[str, object] = json.loads(path.read_text())
    return task


def pyautogui_calls(line: str) -> list[str]:
    """Return the peer's form of our script. Pure."""
    return [
        "pyautogui.hotkey('win', 't')",
        f"pyautogui.typewrite({line!r}, interval=0.02)",
        "pyautogui.press('enter')",
        "DONE",
    ]


@asynccontextmanager
async def _measured(side: Side) -> AsyncIterator[None]:
    """Measure time, CPU time and memory of the block."""
    at_begin_bytes = await asyncio.to_thread(tree_pss_bytes)

    async def watch() -> None:
        while True:
            used_bytes = await asyncio.to_thread(tree_pss_bytes) - at_begin_bytes
            side.memory_bytes = max(side.memory_bytes, used_bytes)
            await asyncio.sleep(_MEMORY_INTERVAL_S)

    cpu_s, begin_s = tree_cpu_s(), time.monotonic()
    watching = asyncio.create_task(watch(), name="bench:memory")
    try:
        yield
    finally:
        side.elapsed_s = time.monotonic() - begin_s
        side.cpu_s = tree_cpu_s() - cpu_s
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


def episodes_report(conditions: dict[str, object], ours: Side, peer: Side | None, *, concurrency: int) -> BenchReport:
    """Return the report; without a peer its figures have no value."""
    per_hour, peer_per_hour = ours.per_hour, peer.per_hour if peer else None
    samples = {
        f"{name}{phase}_s": values
        for name, side in (("", ours), ("peer_", peer or Side()))
        for phase, values in (
            ("reset", [episode.reset_s for episode in side.episodes]),
            ("step", side.steps_s),
            ("evaluate", [episode.evaluate_s for episode in side.episodes]),
        )
    }
    values = {
        "episodes_per_hour": per_hour,
        "peer_episodes_per_hour": peer_per_hour,
        "ratio": per_hour / peer_per_hour if peer_per_hour else None,
        "memory_mib_per_episode": mib(ours.memory_bytes) / concurrency,
        "peer_memory_mib_per_episode": mib(peer.memory_bytes) / concurrency if peer else None,
        "cpu_s_per_episode": ours.cpu_s / len(ours.episodes),
        "peer_cpu_s_per_episode": peer.cpu_s / len(peer.episodes) if peer else None,
    }
    checks = []
    for who, side in (("our", ours), *((("the peer's", peer),) if peer else ())):
        solved, count = sum(episode.score == 1.0 for episode in side.episodes), len(side.episodes)
        checks.append(
            Condition(name=f"{who} episodes scored 1.0", passed=solved == count, evidence=f"{solved} of {count}")
        )
    return BenchReport(
        benchmark="episodes",
        conditions=conditions,
        figures=figures_of("episodes", samples, values),
        checks=checks,
        samples=samples,
    )


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree_cpu_s() -> float:
    """Return the CPU time in seconds of this process, its live descendants, and all descendants that have ended."""
    return sum(ticks for _, ticks in process_tree()) / _TICKS_PER_S


def tree_pss_bytes() -> int:
    """Return the proportional share of memory of this process and its live descendants."""
    total_bytes = 0
    for pid, _ in process_tree():
        try:
            total_bytes += memory_of(pid).pss_bytes
        except (OSError, KeyError):  # it has ended
            continue
    return total_bytes


def process_tree() -> list[tuple[int, int]]:
    """Return (process id, CPU ticks with those of ended children) of this process, the first, and its descendants."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(entry.name)
        children[int(fields[1])].append(pid)
        # utime, stime, cutime and cstime of proc(5).
        ticks[pid] = sum(map(int, fields[11:15]))
    found, waiting = [], [os.getpid()]
    while waiting:
        pid = waiting.pop()
        found.append((pid, ticks.get(pid, 0)))
        waiting += children[pid]
    return found
