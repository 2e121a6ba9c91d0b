"""Run one scenario: submit groups, let hosts fail and drain, and measure."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envd.base.config import RunShare
from tests.simulation.clock import EventQueue
from tests.simulation.host import Group, SimHost
from tests.simulation.placements import Drawn, Ideal, SimPlacement
from tests.simulation.scenario import RunLoad, Scenario

_SAMPLE_S = 5.0
#: After this, the trainer knows that a host has died, and opens the group again.
_DETECT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a scenario measured."""

    scenario: Scenario
    episodes_per_h: float
    utilisation: float
    """Machine time in episodes that ended well or still run, as a share of all machine time."""
    wait_p50_s: Mapping[int, float]
    """Waits by size of the group: from its first request until it has machines."""
    wait_p99_s: Mapping[int, float]
    fragmentation: float
    """Share of the machines that were ready while a group waited that they could hold together."""
    unfairness: float
    """Largest deviation of a run's machine time from its share by weight, as a part of that share."""
    lost_share: float
    """Machine time of episodes lost with their host, as a share of all machine time."""
    waiting_count: int
    """Groups that waited at the end."""
    event_count: int


class Fleet:
    """One scenario on a virtual clock."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._events = EventQueue()
        self._rng = random.Random(scenario.seed)
        # Apart, so that all placements get the same groups at the same times.
        self._arrivals = random.Random(scenario.seed)
        shares = {run.name: RunShare(weight=run.weight) for run in scenario.runs}
        self._placement: SimPlacement | None = None
        self._hosts = [
            SimHost(
                index,
                events=self._events,
                capacity=scenario.machines_per_host,
                shares=shares,
                durations=scenario.durations,
                rng=self._rng,
                admitted=self._admitted,
                changed=self._changed,
            )
            for index in range(scenario.host_count)
        ]
        match scenario.placement:
            case "drawn":
                self._placement = Drawn(self._hosts, events=self._events, rng=self._rng)
            case _:
                self._placement = Ideal(self._hosts, events=self._events, shares=shares)
        self._begin_s = 60.0 * scenario.warmup_minutes
        self._end_s = self._begin_s + 60.0 * scenario.minutes
        self._mean_episode_s = _mean_episode_s(scenario)
        self._open_by_run: defaultdict[str, int] = defaultdict(int)
        self._waiting: dict[Group, None] = {}
        self._waits: defaultdict[int, list[float]] = defaultdict(list)
        self._used_s: defaultdict[str, float] = defaultdict(float)
        self._lost_s = 0.0
        self._episode_count = 0
        self._fragments: list[float] = []

    def run(self) -> Outcome:
        """Simulate, and return what was measured."""
        for run in self._scenario.runs:
            if self._scenario.load is None:
                self._top_up(run)
            else:
                self._arrive(run, is_first=True)
        self._events.after(self._begin_s, self._sample)
        if self._scenario.host_mtbf_h is not None:
            self._schedule_failure()
        if self._scenario.drain_every_s is not None:
            self._events.after(self._scenario.drain_every_s, self._drain, 0)
        self._events.run(self._end_s)
        return self._outcome()

    # Load

    def _top_up(self, run: RunLoad) -> None:
        """At saturation: keep the run's part of the machines, and more, open or waiting."""
        part = run.share / sum(each.share for each in self._scenario.runs)
        wanted = self._scenario.oversubscribed * self._scenario.capacity * part
        # At least one group waits, however large it is compared with the run's part.
        while self._open_by_run[run.name] < wanted + max(run.sizes):
            self._submit(run)

    def _arrive(self, run: RunLoad, *, is_first: bool = False) -> None:
        if not is_first:
            self._submit(run)
        part = run.share / sum(each.share for each in self._scenario.runs)
        mean_size = sum(run.sizes) / len(run.sizes)
        assert self._scenario.load is not None
        rate = part * self._scenario.load * self._scenario.capacity / (mean_size * self._mean_episode_s)
        self._events.after(self._arrivals.expovariate(rate), self._arrive, run)

    def _submit(self, run: RunLoad) -> None:
        size = self._arrivals.choice(run.sizes)
        durations_s = tuple(self._scenario.durations.episode_s(self._arrivals) for _ in range(size))
        group = Group(run.name, size, self._events.now_s, durations_s)
        self._open_by_run[run.name] += size
        self._waiting[group] = None
        assert self._placement is not None
        self._placement.submit(group)

    # What hosts report

    def _changed(self, host: SimHost) -> None:
        if self._placement is not None:
            self._placement.changed(host)

    def _admitted(self, host: SimHost, group: Group) -> None:
        self._waiting.pop(group, None)
        if self._begin_s <= group.enter_s and group.attempt == 0:
            self._waits[group.size].append(self._events.now_s - group.enter_s)
        for duration_s in group.durations_s:
            self._events.after(duration_s, self._member_ended, host, group, duration_s, host.generation)

    def _member_ended(self, host: SimHost, group: Group, duration_s: float, generation: int) -> None:
        if generation != host.generation:
            return
        self._used_s[group.run] += self._in_window(self._events.now_s - duration_s, self._events.now_s)
        self._episode_count += self._events.now_s >= self._begin_s
        self._open_by_run[group.run] -= 1
        group.running_count -= 1
        assert self._placement is not None
        self._placement.member_ended(group, host)
        if not group.running_count:
            host.groups.pop(group, None)
            self._placement.ended(group, host)
            if host.is_draining and not host.groups:
                self._events.after(self._scenario.upgrade_s, self._recover, host, host.generation)
        if self._scenario.load is None:
            self._top_up(next(run for run in self._scenario.runs if run.name == group.run))

    def _in_window(self, start_s: float, end_s: float) -> float:
        return max(0.0, min(end_s, self._end_s) - max(start_s, self._begin_s))

    # Faults

    def _schedule_failure(self) -> None:
        assert self._scenario.host_mtbf_h is not None
        mean_s = 3600.0 * self._scenario.host_mtbf_h / self._scenario.host_count
        self._events.after(self._rng.expovariate(1.0 / mean_s), self._fail)

    def _fail(self) -> None:
        self._schedule_failure()
        host = self._rng.choice(self._hosts)
        if not host.is_up:
            return
        for group in host.fail():
            assert self._placement is not None
            if group.start_s is not None and group.running_count:
                for duration_s in group.durations_s:
                    if group.start_s + duration_s > self._events.now_s:
                        self._lost_s += self._in_window(group.start_s, self._events.now_s)
            if group.host is not None:
                self._placement.ended(group, host)
            # Members that had ended keep their scores; the others are attempted again, as a group.
            left = group.running_count or group.size
            again = Group(group.run, left, group.enter_s, group.durations_s[:left], attempt=group.attempt + 1)
            self._waiting.pop(group, None)
            self._waiting[again] = None
            self._events.after(_DETECT_S, self._placement.submit, again)
        self._events.after(self._scenario.repair_s, self._recover, host, host.generation)

    def _drain(self, index: int) -> None:
        assert self._scenario.drain_every_s is not None
        host = self._hosts[index % len(self._hosts)]
        if host.is_up and not host.is_draining:
            host.drain()
            if not host.groups:
                self._events.after(self._scenario.upgrade_s, self._recover, host, host.generation)
        self._events.after(self._scenario.drain_every_s, self._drain, index + 1)

    def _recover(self, host: SimHost, generation: int) -> None:
        if generation == host.generation:
            host.recover()

    # Measuring

    def _sample(self) -> None:
        idle_count = sum(host.idle_count for host in self._hosts)
        smallest = min((group.size for group in self._waiting), default=None)
        if smallest is not None and smallest <= idle_count:
            self._fragments.append(idle_count / self._scenario.capacity)
        else:
            self._fragments.append(0.0)
        self._events.after(_SAMPLE_S, self._sample)

    def _outcome(self) -> Outcome:
        scenario = self._scenario
        for host in self._hosts:
            for group in host.groups:
                assert group.start_s is not None
                for duration_s in group.durations_s:
                    if group.start_s + duration_s > self._end_s:
                        self._used_s[group.run] += self._in_window(group.start_s, self._end_s)
        for group in self._waiting:
            if self._begin_s <= group.enter_s and group.attempt == 0:
                self._waits[group.size].append(self._end_s - group.enter_s)
        whole_s = scenario.capacity * (self._end_s - self._begin_s)
        used_s = sum(self._used_s.values())
        weights = {run.name: run.weight for run in scenario.runs}
        due = {name: used_s * weight / sum(weights.values()) for name, weight in weights.items()}
        return Outcome(
            scenario=scenario,
            episodes_per_h=self._episode_count / (scenario.minutes / 60.0),
            utilisation=used_s / whole_s,
            wait_p50_s={size: _quantile(waits, 0.5) for size, waits in sorted(self._waits.items())},
            wait_p99_s={size: _quantile(waits, 0.99) for size, waits in sorted(self._waits.items())},
            fragmentation=sum(self._fragments) / max(1, len(self._fragments)),
            unfairness=max(abs(self._used_s[name] - due[name]) / due[name] for name in weights) if used_s else 0.0,
            lost_share=self._lost_s / whole_s,
            waiting_count=len(self._waiting),
            event_count=self._events.event_count,
        )


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario."""
    return Fleet(scenario).run()


def _mean_episode_s(scenario: Scenario) -> float:
    rng = random.Random(scenario.seed)
    return sum(scenario.durations.episode_s(rng) for _ in range(20_000)) / 20_000


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
