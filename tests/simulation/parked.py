"""`python -m tests.simulation.parked`: how many hosts open episodes need if idle ones are parked, on a virtual clock.

A host has machines and cores. A step takes a core while it lasts, and so do parking an episode and resuming one. As in
`envd.episodes.checkpoints.parking`, calls of parked episodes wait in order of arrival, and the episode that has been
idle for longest is parked for them. Where an episode runs changes nothing for others, so one host is simulated, with
its part of the episodes.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

import typer
from rich.table import Table

from cuaenv.cli.terminal import Json, emit_json, out
from envd.base.errors import ConfigError
from envd.bench.report import percentile
from envd.cli.command import command
from tests.simulation.clock import EventQueue
from tests.simulation.scenario import Durations

#: A step of an episode that may have been parked may take so many times as long as one in memory.
P50_LIMIT, P95_LIMIT = 2.0, 4.0
_WARM_UP_INTERVALS, _MEASURED_INTERVALS = 3, 12

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkingHost:
    """A host and its load."""

    episode_count: int
    machine_count: int = 48
    ready_count: int = 4
    """How many of these are kept ready while episodes can be parked for it."""
    core_count: int = 16
    think_s: float = 30.0
    """Mean pause before a step, uniform from two thirds to four thirds of it."""
    durations: Durations = field(default_factory=Durations)
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """How long the clients' steps took."""

    p50_s: float
    p95_s: float
    parked_share: float
    """Steps whose episode was parked, as a share."""


@dataclass(slots=True, eq=False)
class _Episode:
    in_memory: bool = False
    was_parked: bool = False
    """Whether it was when it asked for its step."""
    asked_s: float = 0.0


class _Simulation:
    def __init__(self, host: ParkingHost) -> None:
        self._host = host
        self._rng = random.Random(host.seed)
        self._events = EventQueue()
        self._free_cores, self._work = host.core_count, deque[tuple[float, Callable[[], None]]]()
        self._free_machines = host.machine_count
        self._waiting = deque[_Episode]()
        self._parking_count = 0
        self._idle: dict[_Episode, None] = {}
        """Episodes with a machine and without a call, longest first."""
        self._measure_from_s = math.inf
        self._times_s: list[float] = []
        self._parked_count = 0

    def run(self) -> StepTimes:
        host = self._host
        interval_s = host.think_s + host.durations.step.median_s
        self._measure_from_s = _WARM_UP_INTERVALS * interval_s
        for _ in range(host.episode_count):
            self._events.after(self._rng.uniform(0, interval_s), self._ask, _Episode())
        self._events.run((_WARM_UP_INTERVALS + _MEASURED_INTERVALS) * interval_s)
        # A host that falls behind has finished few of its steps, and the others count with the time that they wait.
        late_s = [self._events.now_s - episode.asked_s for episode in self._waiting]
        times_s = self._times_s + late_s
        return StepTimes(
            p50_s=percentile(times_s, 50) or 0.0,
            p95_s=percentile(times_s, 95) or 0.0,
            parked_share=self._parked_count / max(1, len(self._times_s)),
        )

    def _ask(self, episode: _Episode) -> None:
        episode.asked_s, episode.was_parked = self._events.now_s, not episode.in_memory
        if episode.in_memory:
            del self._idle[episode]
            self._step(episode)
            return
        self._waiting.append(episode)
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._free_machines:
            self._free_machines -= 1
            episode = self._waiting.popleft()
            episode.in_memory = True
            self._on_core(self._host.durations.resume.draw(self._rng), partial(self._step, episode))
        wanted_count = len(self._waiting) + self._host.ready_count
        while wanted_count > self._free_machines + self._parking_count and self._idle:
            self._parking_count += 1
            victim = next(iter(self._idle))
            del self._idle[victim]
            victim.in_memory = False
            self._on_core(self._host.durations.park.draw(self._rng), self._parked)

    def _parked(self) -> None:
        self._parking_count -= 1
        self._free_machines += 1
        self._serve()

    def _step(self, episode: _Episode) -> None:
        self._on_core(self._host.durations.step.draw(self._rng), partial(self._stepped, episode))

    def _stepped(self, episode: _Episode) -> None:
        if episode.asked_s >= self._measure_from_s:
            self._times_s.append(self._events.now_s - episode.asked_s)
            self._parked_count += episode.was_parked
        self._idle[episode] = None
        think_s = self._host.think_s * self._rng.uniform(2 / 3, 4 / 3)
        self._events.after(think_s, self._ask, episode)
        self._serve()

    def _on_core(self, duration_s: float, then: Callable[[], None]) -> None:
        """Call a function when a core has worked for a time."""
        if not self._free_cores:
            self._work.append((duration_s, then))
            return
        self._free_cores -= 1
        self._events.after(duration_s, self._worked, then)

    def _worked(self, then: Callable[[], None]) -> None:
        self._free_cores += 1
        if self._work:
            self._on_core(*self._work.popleft())
        then()


def simulate_parking(host: ParkingHost) -> StepTimes:
    """Return how long the steps of a host's episodes take."""
    return _Simulation(host).run()


def most_episodes(host: ParkingHost, *, at_most: int) -> int:
    """Return how many open episodes keep the limits, of at most so many; 0 if one does not."""
    step = host.durations.step
    least, most = 0, at_most
    while least < most:
        count = (least + most + 1) // 2
        found = simulate_parking(replace(host, episode_count=count))
        if found.p50_s <= P50_LIMIT * step.median_s and found.p95_s <= P95_LIMIT * step.p95_s:
            least = count
        else:
            most = count - 1
    return least


@app.command()
@command()
def simulate_parking_command(
    *,
    episodes: Annotated[int, typer.Option(min=1, max=100_000, help="Open episodes of a job.")] = 1024,
    machines: Annotated[int, typer.Option(min=1, max=4096, help="Machines in a host's memory.")] = 48,
    cores: Annotated[int, typer.Option(min=1, max=1024, help="Cores of each host.")] = 16,
    think: Annotated[str, typer.Option(metavar="S,...", help="Mean pauses before a step.")] = "4,15,30,60,120,300",
    as_json: Json = False,
) -> None:
    """Simulate how many hosts a job needs, with and without parked episodes."""
    try:
        pauses_s = [float(text) for text in think.split(",")]
    except ValueError:
        raise ConfigError(f"--think {think}: not numbers of seconds; separate several by commas") from None
    rows = []
    for think_s in pauses_s:
        host = ParkingHost(episode_count=1, machine_count=machines, core_count=cores, think_s=think_s)
        in_memory = most_episodes(replace(host, ready_count=0), at_most=machines)
        parked = most_episodes(host, at_most=episodes)
        if not parked or not in_memory:
            raise ConfigError(f"--cores {cores}: too few for one episode")
        rows.append(
            {
                "think_s": think_s,
                "hosts_without_parking": math.ceil(episodes / in_memory),
                "hosts": math.ceil(episodes / parked),
                "episodes_per_host": parked,
            }
        )
    if as_json:
        emit_json({"rows": rows})
        return
    table = Table(*rows[0], box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(f"{value:g}" for value in row.values()))
    out.print(table)


if __name__ == "__main__":
    app()
