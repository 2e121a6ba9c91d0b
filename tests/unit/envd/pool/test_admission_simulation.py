"""Simulate a pool over thousands of arrivals, with failing machines and ending leases, on `envd.pool.planner` alone.

Time is counted in ticks and randomness comes from a seed, so each run is reproducible. Every tick checks the guarantees
for operators: no run exceeds its share, no group waits without bound, no machine is idle without a reason.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        idle_target: int = 2,
        max_starting: int = 4,
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
        self.kept_ticks = 0
        """Idle machines, summed over ticks, that were kept for a group while another one was skipped."""
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
        held = self.held
        self.held_ticks.update(held)
        idle_count = sum(m.state is LifecycleState.IDLE for m in self.machines.values())
        room = self.capacity - len(self.machines)
        able: dict[str, Group] = {}
        blocked: set[str] = set()
        for group in self.queue:
            if group.run not in able and group.run not in blocked:
                if held[group.run] + group.size <= self.most(group.run):
                    able[group.run] = group
                else:
                    blocked.add(group.run)
        fit = [g for g in able.values() if g.demand.ready <= idle_count and g.demand.reserved <= room]
        for group in fit:
            assert self.turn is not None, "work-conserving: a group that fits is served, unless a turn is kept"
            whose, passed_count = self.turn
            levels = [(held[g.run] + g.size) / share_of(self.shares, g.run).weight for g in (group, whose)]
            assert passed_count + group.size > whose.size or levels[0] > levels[1], "... and it may not be passed by it"
        self.kept_ticks += idle_count if fit else 0

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
    simulation = Simulation(seed=seed, capacity=16, shares=RUNS, failure_rate=failure_rate)
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


arrivals = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["main", "sweep", "tests", "x"]),
    st.integers(0, 6),
    st.integers(0, 6),
    st.integers(1, 6),
)


@given(
    coming=st.lists(arrivals, max_size=40),
    idle_target=st.integers(0, 8),
    max_starting=st.integers(1, 8),
    failure_rate=st.sampled_from([0.0, 0.05]),
)
@settings(max_examples=150)
def test_any_arrivals_are_served_within_bounds(
    coming: list[tuple[int, str, int, int, int]], idle_target: int, max_starting: int, failure_rate: float
) -> None:
    simulation = Simulation(
        seed=0, capacity=8, shares=RUNS, idle_target=idle_target, max_starting=max_starting, failure_rate=failure_rate
    )
    for gap, run, ready, reserved, stay in coming:
        for _ in range(gap):
            simulation.tick()
        if 1 <= ready + reserved <= simulation.most(run):
            simulation.arrive(run, ready=ready, reserved=reserved, stay=stay)
    # A group costs at most one turnover of the pool: starts one at a time, some of which fail, stays and deaths.
    simulation.drain(limit=100 * (len(simulation.queue) + 1))
    check_bounded_waits(simulation)


def backlogged(
    simulation: Simulation, sizes: Mapping[str, Callable[[], int]], *, ticks: int, stay: Callable[[str], int]
) -> None:
    """Advance time while each run always waits for half a pool."""
    for _ in range(ticks):
        waiting: Counter[str] = Counter()
        for group in simulation.queue:
            waiting[group.run] += group.size
        for run, size in sizes.items():
            while waiting[run] < simulation.capacity / 2:
                group = simulation.arrive(run, ready=size(), stay=stay(run))
                waiting[run] += group.size
        simulation.tick()


def check_shares(simulation: Simulation, *, tolerance: float) -> None:
    total = simulation.held_ticks.total()
    weights = {run: share_of(simulation.shares, run).weight for run in simulation.held_ticks}
    for run, ticks in simulation.held_ticks.items():
        fair = weights[run] / sum(weights.values())
        assert ticks / total == pytest.approx(fair, rel=tolerance), f"run {run!r}"


def test_single_machines_are_shared_by_weight_for_any_holding_time() -> None:
    shares = {"a": RunShare(weight=1.0), "b": RunShare(weight=2.0), "c": RunShare(weight=5.0)}
    simulation = Simulation(seed=1, capacity=96, shares=shares, max_starting=96)
    stays = {"a": 40, "b": 5, "c": 10}
    sizes = dict.fromkeys(stays, lambda: 1)
    backlogged(simulation, sizes, ticks=1000, stay=lambda run: simulation.dice.randint(1, 2 * stays[run]))
    check_shares(simulation, tolerance=0.1)


def test_groups_of_any_size_are_shared_by_weight() -> None:
    shares = {"a": RunShare(weight=1.0), "b": RunShare(weight=1.0), "c": RunShare(weight=2.0)}
    simulation = Simulation(seed=2, capacity=96, shares=shares, max_starting=96)
    sizes = {"a": lambda: 1, "b": lambda: 8, "c": lambda: simulation.dice.randint(1, 6)}
    backlogged(simulation, sizes, ticks=1000, stay=lambda run: simulation.dice.randint(20, 60))
    check_shares(simulation, tolerance=0.1)


def test_machines_that_a_run_does_not_want_go_to_the_others() -> None:
    simulation = Simulation(seed=3, capacity=16, max_starting=16)
    backlogged(simulation, {"a": lambda: 1}, ticks=500, stay=lambda run: 5)
    assert simulation.held_ticks["a"] / 500 > 0.6 * 16, "alone it has every machine that is not starting or dying"


def test_a_quota_leaves_the_other_machines_to_the_other_runs() -> None:
    shares = {"a": RunShare(weight=100.0, quota=4)}
    simulation = Simulation(seed=4, capacity=16, shares=shares, max_starting=16)
    backlogged(simulation, {"a": lambda: 1, "b": lambda: 1}, ticks=500, stay=lambda run: 5)
    assert simulation.held_ticks["a"] <= 4 * 500
    assert simulation.held_ticks["b"] > simulation.held_ticks["a"]


@pytest.mark.parametrize("weight", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("flooding_runs", [1, 5])
def test_a_group_of_the_whole_pool_is_served_despite_endless_small_ones(weight: float, flooding_runs: int) -> None:
    shares = {"gang": RunShare(weight=weight)}
    simulation = Simulation(seed=5, capacity=12, shares=shares, idle_target=0)
    others = [f"flood-{number}" for number in range(flooding_runs)]

    def flood() -> None:
        lengths = Counter(group.run for group in simulation.queue)
        for run in others:
            for _ in range(4 - lengths[run]):
                simulation.arrive(run, stay=simulation.dice.randint(1, 20))
        simulation.tick()

    for _ in range(200):
        flood()
    for _ in range(20):
        gang = simulation.arrive("gang", ready=3, reserved=9, stay=3)
        served_before = len(simulation.served)
        waiting_before = len(simulation.queue) - 1
        while gang.served_at is None:
            flood()
            passed = sum(group.size for group in simulation.served[served_before:] if group is not gang)
            assert passed <= waiting_before + gang.size, "the groups ahead, and as many machines as it wants itself"
        assert gang.passed_by_later <= gang.size
        for _ in range(60):
            flood()


def test_two_large_groups_never_hold_half_of_their_machines_each() -> None:
    simulation = Simulation(seed=6, capacity=8, idle_target=0)
    for number in range(200):
        simulation.arrive("a", ready=number % 5 + 1, reserved=3, stay=2)
        simulation.arrive("b", ready=number % 7 + 1, reserved=1, stay=3)
    simulation.drain(limit=4000)
    check_bounded_waits(simulation)


def test_a_group_that_waits_for_its_own_run_lets_all_others_pass() -> None:
    shares = {"a": RunShare(quota=2)}
    simulation = Simulation(seed=7, capacity=4, shares=shares, max_starting=4)
    simulation.arrive("a", stay=400)
    for _ in range(5):
        simulation.tick()
    second = simulation.arrive("a", ready=2, stay=1)
    for _ in range(300):
        simulation.arrive("b", stay=1)
        simulation.tick()
    assert second.served_at is None
    assert len(simulation.served) > 200
    simulation.drain(limit=500)
    assert second.served_at is not None
