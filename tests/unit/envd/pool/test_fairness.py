"""Turns: the rules of `envd.pool.planner` when several runs wait."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envd.base.config import DEFAULT_RUN, RunShare
from envd.pool.planner import Demand, KeptTurn, LifecycleState, Plan, RunShares, Turns, share_of
from envd.pool.planner import plan as plan_pool

CAPACITY = 8


def shares(others: RunShare | None = None, **named: RunShare) -> RunShares:
    return {**named, DEFAULT_RUN: others or RunShare()}


def wanted(run: str, idle: int = 1, reserved: int = 0) -> Demand:
    return Demand(idle=idle, reserved=reserved, run=run)


def order(
    *waiting: Demand, held: Mapping[str, int] | None = None, of: RunShares | None = None, first: int | None = None
) -> list[int]:
    return Turns(waiting, held=held or {}, shares=of or {}, resident=CAPACITY, first=first).order()


def plan(
    *waiting: Demand,
    idle_count: int,
    held: Mapping[str, int] | None = None,
    of: RunShares | None = None,
    turn: KeptTurn | None = None,
    capacity: int = CAPACITY,
) -> Plan:
    """Plan for a pool whose machines are idle or leased, with an idle target of 0."""
    leased_count = sum((held or {}).values())
    return plan_pool(
        {f"idle-{i}": 0.0 for i in range(idle_count)},
        counts={LifecycleState.IDLE: idle_count, LifecycleState.LEASED: leased_count},
        reserved_count=0,
        waiting=waiting,
        idle_target=0,
        resident=capacity,
        host_room=capacity,
        max_starting=capacity,
        max_idle_s=60.0,
        held=held,
        shares=of,
        turn=turn,
    )


# Turns


A, B = wanted("a"), wanted("b")
QUOTA_OF_3 = shares(a=RunShare(quota=3))


@pytest.mark.parametrize(
    ("waiting", "options", "expected"),
    [
        # A run's groups are admitted in order of arrival.
        ([wanted("a", 3), A, wanted("a", 2)], {}, [0, 1, 2]),
        # The run that holds the fewest machines is next.
        ([A, B], {"held": {"a": 2, "b": 1}}, [1, 0]),
        # Among runs that hold the same, the first to arrive is next.
        ([B, A], {}, [0, 1]),
        ([B, A], {"held": {"a": 2, "b": 2}}, [0, 1]),
        # Machines that a run gets count at once.
        ([A, A, B, B], {}, [0, 2, 1, 3]),
        ([wanted("a", 3), A, B, B, B], {}, [0, 2, 3, 4, 1]),
        # A run of twice the weight gets twice the machines.
        ([A, A, A, A, B, B], {"of": shares(a=RunShare(weight=2.0))}, [0, 4, 1, 2, 5, 3]),
        # Unnamed runs have equal shares, and unlabelled groups are one run.
        ([wanted("x"), A], {"held": {"x": 1, "a": 1}, "of": shares(RunShare(weight=0.5), a=RunShare())}, [1, 0]),
        ([wanted(""), wanted("x"), wanted("")], {"of": shares(RunShare(weight=0.5))}, [0, 1, 2]),
        # No group of a run at its quota has a turn.
        ([wanted("a", 2), A, B], {"held": {"a": 2}, "of": QUOTA_OF_3}, [2]),
        ([A, A, B], {"held": {"a": 2}, "of": QUOTA_OF_3}, [2, 0]),
        # Nor has a group that waits for machines of its own run.
        ([wanted("a", 7), B], {"held": {"a": 2}}, [1]),
        ([wanted("a", 7), B], {"held": {"a": 1}}, [1, 0]),
        # A reserved turn is first in any case.
        ([A, B, wanted("c")], {"held": {"b": 5}, "first": 1}, [1, 0, 2]),
        ([A, B, wanted("c")], {"held": {"a": 1, "b": 5, "c": 2}, "first": 0}, [0, 2, 1]),
    ],
)
def test_turns_are_in_fair_order(waiting: list[Demand], options: dict[str, Any], expected: list[int]) -> None:
    assert order(*waiting, **options) == expected


def test_skipping_a_group_skips_its_run() -> None:
    turns = Turns([wanted("a"), wanted("a"), wanted("b")], held={}, shares={}, resident=8)
    assert (turns.next(), turns.next(), turns.next()) == (0, 2, None)


# Plans


@pytest.mark.parametrize(
    ("waiting", "options", "admitted", "turn"),
    [
        # A turn is reserved while machines are too few.
        ([wanted("a", 4)], {"idle_count": 3, "held": {"b": 4}}, (), KeptTurn(index=0)),
        # None is reserved while all machines are taken.
        ([wanted("a", 4)], {"idle_count": 0, "held": {"b": 8}}, (), None),
        # A turn ends with its group.
        ([wanted("a", 2), B], {"idle_count": 3, "turn": KeptTurn(index=0, passed_count=2)}, (0, 1), None),
        # A group that waits for its quota, or for its own run, does not block others.
        (
            [wanted("a", 2), A, B, B],
            {"idle_count": 2, "held": {"a": 1}, "of": shares(a=RunShare(quota=2))},
            (2, 3),
            None,
        ),
        ([wanted("a", 8), B], {"idle_count": 2, "held": {"a": 1}}, (1,), None),
    ],
)
def test_a_turn_is_reserved_only_for_lack_of_machines(
    waiting: list[Demand], options: dict[str, Any], admitted: tuple[int, ...], turn: KeptTurn | None
) -> None:
    steps = plan(*waiting, **options)
    assert (steps.admitted, steps.turn) == (admitted, turn)


@pytest.mark.parametrize(
    ("waiting", "options", "admitted"),
    [
        # Machines are shared one by one.
        ([A, A, A, A, B, B, B, B], {"idle_count": 4}, (0, 4, 1, 5)),
        # A group too large to pass does not stop a smaller one.
        (
            [wanted("a", 4), wanted("b", 3), wanted("c", 2)],
            {"idle_count": 3, "turn": KeptTurn(index=0, passed_count=2)},
            (2,),
        ),
        # No group passes a group of its own run.
        ([wanted("a", 4), A], {"idle_count": 3, "held": {"b": 5}}, ()),
        # One plan never exceeds a quota.
        ([A] * 6, {"idle_count": 6, "held": {"a": 1}, "of": QUOTA_OF_3}, (0, 1)),
    ],
)
def test_groups_are_admitted_by_turns(
    waiting: list[Demand], options: dict[str, Any], admitted: tuple[int, ...]
) -> None:
    assert plan(*waiting, **options).admitted == admitted


def test_other_runs_pass_a_reserved_turn_for_at_most_as_many_machines_as_it_wants() -> None:
    waiting = [wanted("a", 4), *[wanted("b")] * 8]
    steps = plan(*waiting, idle_count=3, held={"c": 5})
    assert (steps.admitted, steps.turn) == ((1, 2, 3), KeptTurn(index=0, passed_count=3))
    steps = plan(*waiting, idle_count=3, held={"c": 5}, turn=KeptTurn(index=0, passed_count=3))
    assert (steps.admitted, steps.turn) == ((1,), KeptTurn(index=0, passed_count=4))
    steps = plan(*waiting, idle_count=3, held={"c": 5}, turn=KeptTurn(index=0, passed_count=4))
    assert (steps.admitted, steps.turn) == ((), KeptTurn(index=0, passed_count=4)), "three are kept for it"


def test_a_run_that_would_hold_more_for_its_weight_does_not_pass() -> None:
    waiting = [wanted("a", 4), *[wanted("b")] * 8]
    assert plan(*waiting, idle_count=3, held={"b": 2, "c": 3}).admitted == (1, 2)
    assert plan(*waiting, idle_count=3, held={"b": 5}).admitted == ()
    heavy = shares(b=RunShare(weight=2.0))
    assert plan(*waiting, idle_count=3, held={"b": 5}, of=heavy).admitted == (1, 2, 3)


def test_a_turn_stays_reserved_when_other_runs_hold_less() -> None:
    waiting = [wanted("a", 4), wanted("b")]
    held = {"a": 3, "c": 1}
    steps = plan(*waiting, idle_count=4, held=held, turn=KeptTurn(index=0, passed_count=4))
    assert steps.admitted == (0,)
    steps = plan(*waiting, idle_count=3, held=held, turn=KeptTurn(index=0, passed_count=4))
    assert steps.admitted == (), "without the turn, b would be next"
    assert plan(*waiting, idle_count=3, held=held).admitted == (1,)


def test_machines_start_first_for_groups_that_have_a_turn() -> None:
    of = shares(a=RunShare(quota=2))
    steps = plan(wanted("a", 2), wanted("b", 0, reserved=6), idle_count=0, held={"a": 2}, of=of)
    assert (steps.admitted, steps.start_count) == ((1,), 0)
    steps = plan(wanted("a", 2), idle_count=0, held={"a": 2}, of=of)
    assert steps.start_count == 2, "within capacity, machines are ready when those of its run are returned"


def test_idle_machines_make_room_for_the_reservations_of_the_turn() -> None:
    waiting = [wanted("b", 2), wanted("a", 0, reserved=4)]
    steps = plan(*waiting, idle_count=1, held={"b": 4, "c": 3})
    assert (steps.admitted, steps.turn, steps.destroy) == ((), KeptTurn(index=1), ("idle-0",))


# All rules together

runs = st.sampled_from(["", "a", "b", "c"])
groups = st.builds(Demand, idle=st.integers(0, 5), reserved=st.integers(0, 3), run=runs).filter(
    lambda group: 1 <= group.machine_count <= CAPACITY
)
run_shares = st.dictionaries(
    runs, st.builds(RunShare, weight=st.sampled_from([0.5, 1.0, 2.0, 3.0]), quota=st.none() | st.integers(1, CAPACITY))
)


def quota_of(of: RunShares, run: str) -> int:
    quota = share_of(of, run).quota
    return CAPACITY if quota is None else min(quota, CAPACITY)


@given(
    waiting=st.lists(groups, max_size=10),
    of=run_shares,
    idle_count=st.integers(0, CAPACITY),
    leased=st.lists(runs, max_size=CAPACITY),
    host_room=st.integers(0, CAPACITY),
    passed_count=st.none() | st.integers(0, CAPACITY),
)
def test_every_plan_keeps_the_rules_between_runs(
    *,
    waiting: list[Demand],
    of: RunShares,
    idle_count: int,
    leased: list[str],
    host_room: int,
    passed_count: int | None,
) -> None:
    waiting = [group for group in waiting if group.machine_count <= quota_of(of, group.run)]
    idle_count = min(idle_count, CAPACITY - len(leased))
    held = Counter(leased)
    heads = heads_of(waiting, held, of)
    turn = None if passed_count is None or not heads else KeptTurn(index=heads[-1], passed_count=passed_count)
    steps = plan_pool(
        {f"i{i}": 0.0 for i in range(idle_count)},
        counts={LifecycleState.IDLE: idle_count, LifecycleState.LEASED: len(leased)},
        reserved_count=0,
        waiting=waiting,
        idle_target=0,
        resident=CAPACITY,
        host_room=host_room,
        max_starting=CAPACITY,
        max_idle_s=60.0,
        held=held,
        shares=of,
        turn=turn,
    )

    assert len(steps.admitted) == len(set(steps.admitted)) == len(steps.machine_ids)
    assert [len(ids) for ids in steps.machine_ids] == [waiting[index].idle for index in steps.admitted], "whole groups"
    for run in {group.run for group in waiting}:
        mine = [index for index in range(len(waiting)) if waiting[index].run == run]
        admitted = [index for index in steps.admitted if waiting[index].run == run]
        assert admitted == mine[: len(admitted)], "order of arrival within a run"

    after = held + Counter(run_of_each_machine(waiting, steps.admitted))
    assert all(after[run] <= quota_of(of, run) for run in {waiting[index].run for index in steps.admitted})
    assert after.total() <= CAPACITY

    left = [index for index in range(len(waiting)) if index not in steps.admitted]
    idle_left = idle_count - sum(map(len, steps.machine_ids))
    room = CAPACITY - idle_count - len(leased) - sum(waiting[index].reserved for index in steps.admitted)
    free = min(room, host_room - sum(waiting[index].reserved for index in steps.admitted))
    could_go = [
        index
        for index in heads_of(waiting, after, of, among=left)
        if waiting[index].idle <= idle_left and waiting[index].reserved <= free
    ]
    for index in could_go:
        assert steps.turn is not None, "work-conserving: a group that fits is admitted, unless a turn is kept"
        assert index != steps.turn.index
        size = waiting[steps.turn.index].machine_count
        is_enough = steps.turn.passed_count + waiting[index].machine_count > size
        is_above = level(waiting[index], after, of) > level(waiting[steps.turn.index], after, of)
        assert is_enough or is_above, "... which has been passed enough, or by this run would be passed unfairly"

    if turn is not None and turn.index not in steps.admitted:
        assert steps.turn is not None, "a turn stays kept until its group is admitted"
        assert steps.turn.index == turn.index
        passed = sum(waiting[index].machine_count for index in steps.admitted)
        assert steps.turn.passed_count == turn.passed_count + passed
        assert not steps.admitted or steps.turn.passed_count <= waiting[turn.index].machine_count
    if steps.turn is not None:
        assert steps.turn.index in left


def heads_of(
    waiting: Sequence[Demand], held: Mapping[str, int], of: RunShares, among: Sequence[int] | None = None
) -> list[int]:
    """Return the first group of each run that neither quota nor capacity stops, in order of turns."""
    first: dict[str, int] = {}
    for index in range(len(waiting)) if among is None else among:
        first.setdefault(waiting[index].run, index)
    able = [i for run, i in first.items() if held.get(run, 0) + waiting[i].machine_count <= quota_of(of, run)]
    return sorted(able, key=lambda i: (held.get(waiting[i].run, 0) / share_of(of, waiting[i].run).weight, i))


def level(group: Demand, held: Mapping[str, int], of: RunShares) -> float:
    return (held.get(group.run, 0) + group.machine_count) / share_of(of, group.run).weight


def run_of_each_machine(waiting: Sequence[Demand], admitted: Sequence[int]) -> list[str]:
    return [waiting[index].run for index in admitted for _ in range(waiting[index].machine_count)]
