"""The rules of `envd.pool.planner`, one test a rule, and all of them together under random load."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from envd.pool.planner import MachineState, Plan, PlannedMachine
from envd.pool.planner import plan as plan_pool

CAPACITY = 4


def plan(
    *machines: PlannedMachine, waiting: Sequence[int] = (), idle_target: int = 1, max_starting: int = CAPACITY
) -> Plan:
    return plan_pool(
        machines,
        waiting=waiting,
        idle_target=idle_target,
        capacity=CAPACITY,
        max_starting=max_starting,
        max_idle_s=60.0,
    )


def idle(machine_id: str, idle_s: float = 0.0) -> PlannedMachine:
    return PlannedMachine(machine_id=machine_id, state=MachineState.IDLE, idle_s=idle_s)


def in_state(state: MachineState, count: int) -> list[PlannedMachine]:
    return [PlannedMachine(machine_id=f"{state.value}-{i}", state=state) for i in range(count)]


def test_an_empty_pool_starts_up_to_its_idle_target() -> None:
    assert plan() == Plan(lease=(), start_count=1, destroy=())


def test_waiting_groups_raise_the_target_but_never_above_capacity() -> None:
    assert plan(waiting=[2]).start_count == 3
    assert plan(waiting=[4, 4]).start_count == CAPACITY


def test_a_leased_machine_is_replaced_ahead_of_demand() -> None:
    assert plan(*in_state(MachineState.LEASED, 2), idle_target=2).start_count == 2


def test_starting_machines_are_not_started_twice() -> None:
    assert plan(*in_state(MachineState.STARTING, 3), waiting=[2]).start_count == 0


def test_no_more_machines_start_at_once_than_allowed() -> None:
    assert plan(waiting=[4], max_starting=2).start_count == 2
    assert plan(*in_state(MachineState.STARTING, 1), waiting=[4], max_starting=2).start_count == 1
    assert plan(*in_state(MachineState.STARTING, 3), waiting=[4], max_starting=2).start_count == 0
    assert plan(waiting=[4], max_starting=0).start_count == 0


def test_dying_machines_still_hold_their_room() -> None:
    assert plan(*in_state(MachineState.DYING, CAPACITY), waiting=[1]).start_count == 0


def test_only_idle_machines_are_leased() -> None:
    for state in (MachineState.STARTING, MachineState.LEASED, MachineState.DYING):
        assert plan(*in_state(state, 3), waiting=[1]).lease == ()


def test_a_group_is_admitted_whole_or_not_at_all() -> None:
    assert plan(idle("a"), waiting=[2]).lease == ()
    assert plan(idle("a"), idle("b"), waiting=[2]).lease == (("a", "b"),)


def test_a_small_group_does_not_overtake_a_large_one() -> None:
    assert plan(idle("a"), waiting=[2, 1]).lease == ()


def test_the_freshest_machines_are_leased_first() -> None:
    assert plan(idle("old", 30.0), idle("new", 1.0), waiting=[1]).lease == (("new",),)


def test_only_surplus_machines_of_age_are_destroyed() -> None:
    assert plan(idle("new", 1.0), idle("older", 60.0), idle("oldest", 99.0)).destroy == ("older", "oldest")
    assert plan(idle("spare", 999.0)).destroy == ()
    assert plan(idle("spare", 0.0), idle("young", 59.0)).destroy == ()


def test_a_machine_wanted_by_a_waiting_group_is_kept_however_old() -> None:
    assert plan(idle("old", 999.0), waiting=[2], idle_target=0).destroy == ()


machines_of_a_pool = st.lists(st.tuples(st.sampled_from(MachineState), st.integers(0, 120)), max_size=8)


@given(
    states=machines_of_a_pool,
    waiting=st.lists(st.integers(1, 8), max_size=8),
    idle_target=st.integers(0, 8),
    max_starting=st.integers(0, 8),
)
@settings(max_examples=300, deadline=None)
def test_every_plan_keeps_the_rules(
    states: list[tuple[MachineState, int]], waiting: list[int], idle_target: int, max_starting: int
) -> None:
    capacity = 8
    machines = [
        PlannedMachine(machine_id=str(i), state=state, idle_s=float(age)) for i, (state, age) in enumerate(states)
    ]
    steps = plan_pool(
        machines,
        waiting=waiting,
        idle_target=idle_target,
        capacity=capacity,
        max_starting=max_starting,
        max_idle_s=60.0,
    )

    used = [machine_id for group in steps.lease for machine_id in group] + list(steps.destroy)
    assert len(used) == len(set(used)), "no machine appears twice"
    assert all(machines[int(machine_id)].state is MachineState.IDLE for machine_id in used)
    assert [len(group) for group in steps.lease] == waiting[: len(steps.lease)], "whole groups, first come first served"

    idle_count = sum(m.state is MachineState.IDLE for m in machines) - sum(map(len, steps.lease))
    assert not waiting[len(steps.lease) :] or waiting[len(steps.lease)] > idle_count, "whoever fits is served"

    starting_count = sum(m.state is MachineState.STARTING for m in machines) + steps.start_count
    assert steps.start_count >= 0
    assert steps.start_count == 0 or starting_count <= max_starting
    assert len(machines) + steps.start_count <= capacity, "never over capacity"
    wanted = sum(waiting[len(steps.lease) :]) + idle_target
    assert (
        idle_count + starting_count >= wanted
        or len(machines) + steps.start_count == capacity
        or starting_count >= max_starting
    ), "work-conserving: something boots unless nothing is wanted, or nothing may"
    assert not steps.destroy or idle_count - len(steps.destroy) >= wanted, "no machine is destroyed that is wanted"


class SimulatedPool:
    """A pool whose machines take a tick to boot and a tick to go, and whose groups stay for a while."""

    def __init__(self, *, capacity: int, idle_target: int, max_starting: int) -> None:
        self.capacity = capacity
        self.idle_target = idle_target
        self.max_starting = max_starting
        self.states: dict[str, MachineState] = {}
        self.until: dict[str, int] = {}
        self.waiting: list[tuple[int, int, int]] = []
        self.served: list[int] = []
        self.made = 0

    def tick(self, now: int) -> None:
        for machine_id in [i for i, end in self.until.items() if end <= now]:
            state, at = self.states[machine_id], now + 1
            del self.until[machine_id]
            if state is MachineState.DYING:
                del self.states[machine_id]
            elif state is MachineState.STARTING:
                self.states[machine_id] = MachineState.IDLE
            else:
                self.states[machine_id], self.until[machine_id] = MachineState.DYING, at
        steps = plan_pool(
            [PlannedMachine(machine_id=i, state=state) for i, state in self.states.items()],
            waiting=[size for _, size, _ in self.waiting],
            idle_target=self.idle_target,
            capacity=self.capacity,
            max_starting=self.max_starting,
            max_idle_s=60.0,
        )
        for group in steps.lease:
            number, size, stay = self.waiting.pop(0)
            assert len(group) == size
            self.served.append(number)
            for machine_id in group:
                self.states[machine_id], self.until[machine_id] = MachineState.LEASED, now + stay
        for _ in range(steps.start_count):
            machine_id = str(self.made)
            self.made += 1
            self.states[machine_id], self.until[machine_id] = MachineState.STARTING, now + 1


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 5)), max_size=40),
    idle_target=st.integers(0, 6),
    max_starting=st.integers(1, 6),
)
@settings(max_examples=100, deadline=None)
def test_random_arrivals_are_all_served_in_order_and_never_over_capacity(
    arrivals: list[tuple[int, int, int]], idle_target: int, max_starting: int
) -> None:
    pool = SimulatedPool(capacity=6, idle_target=idle_target, max_starting=max_starting)
    now = 0
    for number, (gap, size, stay) in enumerate(arrivals):
        for _ in range(gap):
            pool.tick(now := now + 1)
            assert len(pool.states) <= pool.capacity
        pool.waiting.append((number, size, stay))
    # A group costs at most its turn over the whole pool: boots one at a time, a stay, a death.
    limit = now + (len(arrivals) + 1) * (6 + 5 + 2)
    while pool.waiting and now < limit:
        pool.tick(now := now + 1)
        assert len(pool.states) <= pool.capacity

    assert pool.served == list(range(len(arrivals))), "everyone is served, in the order of arrival"
