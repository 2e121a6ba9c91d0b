"""The rules of `envd.pool.planner`: one row per rule, and all of them together under random load."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envd.pool.planner import Demand, LifecycleState, Plan, missing_count
from envd.pool.planner import plan as plan_pool

CAPACITY = 4
Machine = tuple[LifecycleState, str, float]
"""State and id of a machine, and for how long it has been idle."""


def plan(
    *machines: Machine,
    waiting: Sequence[int | Demand] = (),
    reserved_count: int = 0,
    idle_target: int = 1,
    host_room: int = CAPACITY,
    max_starting: int = CAPACITY,
    open_room: int | None = None,
) -> Plan:
    return plan_pool(
        idle_of(machines),
        counts=Counter(state for state, *_ in machines),
        reserved_count=reserved_count,
        waiting=[Demand(idle=group) if isinstance(group, int) else group for group in waiting],
        idle_target=idle_target,
        resident=CAPACITY,
        host_room=host_room,
        max_starting=max_starting,
        max_idle_s=60.0,
        open_room=open_room,
    )


def idle_of(machines: Sequence[Machine]) -> dict[str, float]:
    return {machine_id: idle_s for state, machine_id, idle_s in machines if state is LifecycleState.IDLE}


def idle(machine_id: str, idle_s: float = 0.0) -> Machine:
    return (LifecycleState.IDLE, machine_id, idle_s)


def in_state(state: LifecycleState, count: int) -> list[Machine]:
    return [(state, f"{state.value}-{i}", 0.0) for i in range(count)]


STARTING, LEASED, DYING = LifecycleState.STARTING, LifecycleState.LEASED, LifecycleState.DYING
A, B = idle("a"), idle("b")
FOUR = Demand(idle=0, reserved=4)
THREE = Demand(idle=0, reserved=3)
TWO = Demand(idle=0, reserved=2)
ONE_AND_TWO = Demand(idle=1, reserved=2)


@pytest.mark.parametrize(
    ("open_room", "waiting", "admitted"),
    [
        (2, [1, 1], (0, 1)),
        (1, [1, 1], (0,)),
        # Members that begin parked are opened too.
        (2, [Demand(idle=1, parked=1), 1], (0,)),
        (1, [Demand(idle=1, parked=1)], ()),
    ],
)
def test_a_group_is_admitted_only_if_all_its_episodes_may_be_opened(
    open_room: int, waiting: Sequence[int | Demand], admitted: tuple[int, ...]
) -> None:
    assert plan(A, B, waiting=waiting, open_room=open_room).admitted == admitted


def test_the_reservations_of_one_group_are_not_there_for_the_next() -> None:
    assert plan(*in_state(LEASED, 1), waiting=[TWO, TWO], host_room=9).admitted == (0,)


@pytest.mark.parametrize(
    ("queued_count", "free_count", "host_is_short", "missing"),
    [(2, 1, False, 3), (2, 1, True, 6), (-3, 1, False, 1), (2, -2, False, 4)],
)
def test_leased_machines_are_missing_beyond_those_that_come(
    queued_count: int, free_count: int, host_is_short: bool, missing: int
) -> None:
    counts = {LifecycleState.IDLE: 1, LEASED: 4, STARTING: 2, DYING: 1}
    options = {"queued_count": queued_count, "free_count": free_count}
    assert missing_count(counts, wanted_count=6, **options, host_is_short=host_is_short) == missing


@pytest.mark.parametrize(
    ("machines", "options", "start_count"),
    [
        ([], {}, 1),
        # Waiting groups raise the target, but never above capacity.
        ([], {"waiting": [2]}, 3),
        ([], {"waiting": [4, 4]}, CAPACITY),
        # A leased machine is replaced ahead of demand.
        (in_state(LEASED, 2), {"idle_target": 2}, 2),
        # Starting machines are not started twice.
        (in_state(STARTING, 3), {"waiting": [2]}, 0),
        # No more machines start at once than allowed.
        ([], {"waiting": [4], "max_starting": 2}, 2),
        (in_state(STARTING, 1), {"waiting": [4], "max_starting": 2}, 1),
        (in_state(STARTING, 3), {"waiting": [4], "max_starting": 2}, 0),
        ([], {"waiting": [4], "max_starting": 0}, 0),
        # Dying machines still count against capacity.
        (in_state(DYING, CAPACITY), {"waiting": [1]}, 0),
        # A reservation counts like a machine.
        ([], {"reserved_count": 3, "idle_target": 4}, 1),
        ([], {"reserved_count": 4, "idle_target": 4}, 0),
        # Spare machines do not take room that a group waits for.
        (in_state(LEASED, 2), {"waiting": [ONE_AND_TWO], "idle_target": 2}, 1),
        (in_state(LEASED, 2), {"waiting": [THREE], "idle_target": 2}, 0),
        ([], {"waiting": [THREE, TWO], "idle_target": 4}, 0),
        # Machines start in the place of those that are leased, and within capacity.
        ([A, B], {"waiting": [2], "idle_target": 2}, 2),
        (in_state(LEASED, 2), {"waiting": [2], "idle_target": 2}, 2),
        (in_state(LEASED, 4), {"waiting": [2], "idle_target": 2}, 0),
    ],
)
def test_machines_start(machines: list[Machine], options: dict[str, Any], start_count: int) -> None:
    assert plan(*machines, **options).start_count == start_count


@pytest.mark.parametrize(
    ("machines", "options", "machine_ids"),
    [
        # Only idle machines are leased.
        (in_state(STARTING, 3), {"waiting": [1]}, ()),
        (in_state(LEASED, 3), {"waiting": [1]}, ()),
        (in_state(DYING, 3), {"waiting": [1]}, ()),
        # A group is admitted whole or not at all.
        ([A], {"waiting": [2]}, ()),
        ([A, B], {"waiting": [2]}, (("a", "b"),)),
        # A small group does not overtake a large one.
        ([A], {"waiting": [2, 1]}, ()),
        # The freshest machines are leased first.
        ([idle("old", 30.0), idle("new", 1.0)], {"waiting": [1]}, (("new",),)),
        # Reservations are given within capacity.
        ([A], {"waiting": [ONE_AND_TWO]}, (("a",),)),
        ([A, *in_state(LEASED, 2)], {"waiting": [ONE_AND_TWO]}, ()),
        ([], {"waiting": [ONE_AND_TWO]}, ()),
        # A group of reservations alone needs no machine.
        ([], {"waiting": [FOUR]}, ((),)),
        (in_state(LEASED, 1), {"waiting": [FOUR]}, ()),
        # A reservation counts like a machine.
        ([], {"reserved_count": 3, "waiting": [TWO]}, ()),
        # No group passes a head that waits for reservations.
        ([A, *in_state(LEASED, 3)], {"waiting": [TWO, 1]}, ()),
    ],
)
def test_groups_are_admitted(
    machines: list[Machine], options: dict[str, Any], machine_ids: tuple[tuple[str, ...], ...]
) -> None:
    assert plan(*machines, **options).machine_ids == machine_ids


@pytest.mark.parametrize(
    ("machines", "options", "destroyed"),
    [
        # Only old surplus machines are destroyed.
        ([idle("new", 1.0), idle("older", 60.0), idle("oldest", 99.0)], {}, ("older", "oldest")),
        ([idle("spare", 999.0)], {}, ()),
        ([idle("spare", 0.0), idle("young", 59.0)], {}, ()),
        # An old machine is kept for a waiting group.
        ([idle("old", 999.0)], {"waiting": [2], "idle_target": 0}, ()),
        # Idle machines that the head wants are not evicted.
        ([idle("a", 1.0), idle("b", 2.0), *in_state(LEASED, 2)], {"waiting": [ONE_AND_TWO]}, ("b",)),
        # Dying machines make room before idle ones.
        ([A, B, *in_state(DYING, 2)], {"waiting": [TWO]}, ()),
        # Only the head of the queue evicts idle machines.
        ([A, B, *in_state(LEASED, 2)], {"waiting": [3, TWO]}, ()),
    ],
)
def test_idle_machines_are_destroyed(
    machines: list[Machine], options: dict[str, Any], destroyed: tuple[str, ...]
) -> None:
    assert plan(*machines, **options).destroy == destroyed


def test_the_oldest_idle_machines_make_room_for_reservations_of_the_head() -> None:
    machines = [idle("old", 30.0), idle("older", 40.0), idle("new", 1.0), *in_state(LEASED, 1)]
    steps = plan(*machines, waiting=[TWO])
    assert steps.machine_ids == ()
    assert set(steps.destroy) == {"old", "older"}
    assert steps.start_count == 0, "evicted machines are not replaced at once"


# Memory


def test_no_more_machines_start_than_memory_allows() -> None:
    steps = plan(idle_target=3, host_room=1)
    assert (steps.start_count, steps.host_is_short) == (1, True)
    steps = plan(idle_target=3, host_room=3)
    assert (steps.start_count, steps.host_is_short) == (3, False)


def test_memory_bounds_reservations_and_not_idle_machines() -> None:
    evicting = plan(A, B, waiting=[TWO], idle_target=0, host_room=1)
    assert (evicting.machine_ids, len(evicting.destroy), evicting.host_is_short) == ((), 1, True)
    second_waits = plan(waiting=[TWO] * 2, idle_target=0, host_room=3)
    assert (second_waits.machine_ids, second_waits.host_is_short) == (((),), True)
    leasing = plan(A, waiting=[1], idle_target=0, host_room=0)
    assert (leasing.machine_ids, leasing.host_is_short) == ((("a",),), False)


def test_memory_is_short_only_if_more_memory_would_change_the_plan() -> None:
    assert not plan(*in_state(LEASED, 4), waiting=[2], host_room=0).host_is_short
    assert not plan(A, host_room=0).host_is_short
    assert not plan(waiting=[2], host_room=0, max_starting=0).host_is_short
    assert plan(waiting=[2], host_room=0).host_is_short


machines_of_a_pool = st.lists(st.tuples(st.sampled_from(LifecycleState), st.integers(0, 120)), max_size=8)
groups = st.builds(Demand, idle=st.integers(0, 4), reserved=st.integers(0, 4)).filter(lambda group: group.machine_count)


@given(
    states=machines_of_a_pool,
    waiting=st.lists(groups, max_size=8),
    reserved_count=st.integers(0, 4),
    idle_target=st.integers(0, 8),
    host_room=st.integers(0, 9),
    max_starting=st.integers(0, 8),
)
def test_every_plan_keeps_the_rules(
    *,
    states: list[tuple[LifecycleState, int]],
    waiting: list[Demand],
    reserved_count: int,
    idle_target: int,
    host_room: int,
    max_starting: int,
) -> None:
    capacity = 8
    reserved_count = min(reserved_count, capacity - len(states))
    machines = [(state, str(i), float(age)) for i, (state, age) in enumerate(states)]
    counts = Counter(state for state, _ in states)
    steps = plan_pool(
        idle_of(machines),
        counts=counts,
        reserved_count=reserved_count,
        waiting=waiting,
        idle_target=idle_target,
        resident=capacity,
        host_room=host_room,
        max_starting=max_starting,
        max_idle_s=60.0,
    )

    used = [machine_id for group in steps.machine_ids for machine_id in group] + list(steps.destroy)
    assert len(used) == len(set(used)), "no machine appears twice"
    assert idle_of(machines).keys() >= set(used)
    admitted, queue = waiting[: len(steps.machine_ids)], waiting[len(steps.machine_ids) :]
    assert [len(group) for group in steps.machine_ids] == [group.idle for group in admitted], (
        "whole groups, in their order"
    )

    reserved = sum(group.reserved for group in admitted)
    room = capacity - len(machines) - reserved_count - reserved
    free = min(room, host_room - reserved)
    idle_count = counts[LifecycleState.IDLE] - sum(map(len, steps.machine_ids))
    assert not queue or queue[0].idle > idle_count or queue[0].reserved > free, "a group that fits is admitted"

    starting_count = counts[STARTING] + steps.start_count
    assert steps.start_count >= 0
    assert steps.start_count == 0 or starting_count <= max_starting
    assert steps.start_count <= max(0, free), "never over capacity, never over memory"
    wanted = sum(group.idle for group in queue) + idle_target
    spared = sum(group.reserved for group in queue)
    dying_count = counts[DYING] + len(steps.destroy)
    assert (
        idle_count - len(steps.destroy) + starting_count >= wanted
        or steps.start_count == max(0, free)
        or starting_count >= max_starting
        or free - steps.start_count + dying_count <= spared
    ), "work-conserving: a machine starts unless none is wanted or allowed, or groups wait for the room"
    evicted = [i for i in steps.destroy if idle_of(machines)[i] < 60.0]
    assert not evicted or queue[0].reserved > free, "a young machine is destroyed only for a reservation"
