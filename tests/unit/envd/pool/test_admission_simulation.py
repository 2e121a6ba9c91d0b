"""Simulate a pool over thousands of arrivals, with failing machines and ending leases, on `envd.pool.planner` alone.

Time is counted in ticks and randomness comes from a seed, so each run is reproducible. Every tick checks the guarantees
for operators: no run exceeds its share, no group waits without bound, no machine is idle without a reason.
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from envd.base.config import DEFAULT_RUN, RunShare
from envd.pool.planner import Demand, KeptTurn, LifecycleState, PlannedMachine, RunShares, plan, share_of


@dataclass(eq=False, kw_only=True)
class Group:
    """One reset or fork, from its arrival to its end."""

    demand: Demand
    number: int
    arrival: int
    stay: int
    """Ticks for which its machines are leased."""
    served_at: int | None = None
    passed_by_later: int = 0
    """Machines that later groups got while it was the first of its run and its run held none."""
    turns_before: set["Group"] = field(default_factory=set)
    """Groups that had the turn while it waited."""

    @property
    def run(self) -> str:
        return self.demand.run

    @property
    def size(self) -> int:
        return self.demand.machine_count


@dataclass(eq=False, kw_only=True)
class Machine:
    state: LifecycleState
    until: int | None = None
    """When it has started, is returned, or is gone."""
    owner: Group | None = None
    since: int = 0


class Simulation:
    """One pool. `tick` advances time; `arrive` queues a group."""

    def __init__(
        self,
        *,
        seed: int,
        capacity: int,
        shares: RunShares | None = None,
        idle_target: int,
        max_starting: int,
        failure_rate: float = 0.0,
    ) -> None:
        self.dice = random.Random(seed)
        self.capacity = capacity
        self.shares = shares or {}
        self.idle_target = idle_target
        self.max_starting = max_starting
        self.failure_rate = failure_rate
        self.now = 0
        self.machines: dict[str, Machine] = {}
        self.queue: list[Group] = []
        self.served: list[Group] = []
        self.turn: tuple[Group, int] | None = None
        self.made_count = 0
        self.arrived_count = 0
        self.held_ticks: Counter[str] = Counter()
        self.failures = 0

    @property
    def held(self) -> Counter[str]:
        # A leased machine belongs to its group until it dies.
        return Counter([m.owner.run for m in self.machines.values() if m.owner])

    def arrive(self, run: str, *, ready: int = 1, reserved: int = 0, stay: int = 5) -> Group:
        demand = Demand(ready=ready, reserved=reserved, run=run)
        group = Group(demand=demand, number=self.arrived_count, arrival=self.now, stay=stay)
        self.arrived_count += 1
        assert group.size <= self.most(run)
        self.queue.append(group)
        return group

    def most(self, run: str) -> int:
        return share_of(self.shares, run).most(self.capacity)

    def leave(self, group: Group) -> None:
        """Time out a group."""
        self.queue.remove(group)
        if self.turn is not None and self.turn[0] is group:
            self.turn = None

    def tick(self) -> None:
        self.now += 1
        self._let_time_pass()
        self._follow_plan()
        self._check()

    def _let_time_pass(self) -> None:
        for machine_id, machine in list(self.machines.items()):
            fails = self.dice.random() < self.failure_rate and machine.state is not LifecycleState.DYING
            if not fails and (machine.until is None or machine.until > self.now):
                continue
            self.failures += fails
            if machine.state is LifecycleState.DYING:
                del self.machines[machine_id]
            elif machine.state is LifecycleState.STARTING and not fails:
                machine.state, machine.until, machine.since = LifecycleState.IDLE, None, self.now
            else:
                machine.state, machine.until, machine.owner = LifecycleState.DYING, self.now + 1, None

    def _follow_plan(self) -> None:
        turn = None if self.turn is None else KeptTurn(index=self.queue.index(self.turn[0]), passed_count=self.turn[1])
        entitled = self._entitled()
        for group in entitled:
            group.turns_before.update([] if self.turn is None else [self.turn[0]])
        before = list(self.queue)
        steps = plan(
            [
                PlannedMachine(machine_id=machine_id, state=m.state, idle_s=float(self.now - m.since))
                for machine_id, m in self.machines.items()
            ],
            reserved_count=0,
            waiting=[group.demand for group in self.queue],
            idle_target=self.idle_target,
            resident=self.capacity,
            host_room=self.capacity,
            max_starting=self.max_starting,
            max_idle_s=30.0,
            held=self.held,
            shares=self.shares,
            turn=turn,
        )
        for machine_id in steps.destroy:
            self._withdraw(machine_id)
        admitted = [before[index] for index in steps.admitted]
        for group, machine_ids in zip(admitted, steps.granted, strict=True):
            self._admit(group, machine_ids)
        for _ in range(steps.start_count):
            self._make(Machine(state=LifecycleState.STARTING, until=self.now + self.dice.randint(1, 3)))
        self.turn = None if steps.turn is None else (before[steps.turn.index], steps.turn.passed_count)
        self._note_passing(entitled, admitted, before)

    def _entitled(self) -> list[Group]:
        """Return the first group of each run that holds nothing."""
        first: dict[str, Group] = {}
        for group in self.queue:
            first.setdefault(group.run, group)
        holding = {m.owner.run for m in self.machines.values() if m.owner}
        return [group for run, group in first.items() if run not in holding]

    def _note_passing(self, entitled: Iterable[Group], admitted: list[Group], before: list[Group]) -> None:
        for group in entitled:
            if self.turn is not None:
                group.turns_before.add(self.turn[0])
            admitted_first = admitted[: admitted.index(group)] if group in admitted else admitted
            later = [other for other in admitted_first if before.index(other) > before.index(group)]
            group.passed_by_later += sum(other.size for other in later)

    def _admit(self, group: Group, machine_ids: Iterable[str]) -> None:
        assert self.held[group.run] + group.size <= self.most(group.run), "quotas are never exceeded"
        self.queue.remove(group)
        group.served_at = self.now
        self.served.append(group)
        for machine_id in machine_ids:
            machine = self.machines[machine_id]
            assert machine.state is LifecycleState.IDLE
            machine.state, machine.owner, machine.until = LifecycleState.LEASED, group, self.now + group.stay
        for _ in range(group.demand.reserved):  # filled at once
            self._make(Machine(state=LifecycleState.LEASED, owner=group, until=self.now + group.stay))

    def _withdraw(self, machine_id: str) -> None:
        machine = self.machines[machine_id]
        assert machine.state is LifecycleState.IDLE
        machine.state, machine.until = LifecycleState.DYING, self.now + 1

    def _make(self, machine: Machine) -> None:
        self.machines[f"m{self.made_count}"] = machine
        self.made_count += 1

    def _check(self) -> None:
        assert len(self.machines) <= self.capacity, "never over capacity"
        self.held_ticks.update(self.held)

    def drain(self, *, limit: int) -> None:
        """Run until every group is served."""
        for _ in range(limit):
            if not self.queue:
                return
            self.tick()
        pytest.fail(f"{len(self.queue)} groups were not served within {limit} ticks: {self.queue[:3]}")


def check_bounded_waits(simulation: Simulation) -> None:
    """Check the order within each run, and that others pass a run that holds nothing only during a kept turn."""
    assert simulation.queue == []
    by_run: dict[str, list[int]] = {}
    for group in simulation.served:
        by_run.setdefault(group.run, []).append(group.number)
    assert all(numbers == sorted(numbers) for numbers in by_run.values()), "order of arrival within a run"
    for group in simulation.served:
        bound = sum(other.size for other in {group, *group.turns_before})
        # A turn that was reserved before the run held nothing is also served first.
        bound += sum(other.size for other in group.turns_before if other.arrival >= group.arrival)
        assert group.passed_by_later <= bound, f"passed for {group.passed_by_later} machines"


RUNS = {
    "main": RunShare(weight=2.0),
    "sweep": RunShare(weight=0.5, quota=8),
    "tests": RunShare(quota=3),
    DEFAULT_RUN: RunShare(weight=1.0, quota=12),
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("failure_rate", [0.0, 0.01])
def test_thousands_of_mixed_arrivals_are_all_served_within_bounds(seed: int, failure_rate: float) -> None:
    simulation = Simulation(
        seed=seed, capacity=16, shares=RUNS, idle_target=seed, max_starting=seed + 1, failure_rate=failure_rate
    )
    dice = simulation.dice
    for _ in range(500):
        for _ in range(dice.choice([0, 0, 1, 1, 2])):
            run = dice.choice(["main", "sweep", "tests", "", "x", "y"])
            size = min(simulation.most(run), dice.choice([1, 1, 1, 2, 4, 8, 12, 16]))
            ready = dice.randint(0, size)
            simulation.arrive(run, ready=ready, reserved=size - ready, stay=dice.randint(1, 12))
        if simulation.queue and dice.random() < 0.05:
            simulation.leave(dice.choice([simulation.queue[0], dice.choice(simulation.queue)]))
        simulation.tick()
    arrived_count = len(simulation.queue) + len(simulation.served)
    assert arrived_count > 350
    assert bool(simulation.failures) == bool(failure_rate)
    simulation.drain(limit=40 * arrived_count)
    assert len(simulation.served) == arrived_count
    check_bounded_waits(simulation)


def test_groups_of_any_size_and_holding_time_are_shared_by_weight() -> None:
    shares = {"a": RunShare(weight=1.0), "b": RunShare(weight=1.0), "c": RunShare(weight=2.0)}
    simulation = Simulation(seed=2, capacity=96, shares=shares, idle_target=2, max_starting=96)
    dice = simulation.dice
    for _ in range(1000):
        waiting = Counter(run_of_machine for group in simulation.queue for run_of_machine in [group.run] * group.size)
        for run, size, stay in (("a", 1, 80), ("b", 8, 40), ("c", dice.randint(1, 6), 20)):
            while waiting[run] < simulation.capacity / 2:
                waiting[run] += simulation.arrive(run, ready=size, stay=dice.randint(1, stay)).size
        simulation.tick()
    for run, ticks in simulation.held_ticks.items():
        fair = shares[run].weight / 4
        assert ticks / simulation.held_ticks.total() == pytest.approx(fair, rel=0.1), f"run {run!r}"
