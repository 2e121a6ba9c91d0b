"""Why queued groups wait, in the order of their turns."""

from dataclasses import replace

from envd.base.config import RunShare
from envd.pool.admission import AdmissionQueue, WaitingGroup
from envd.pool.fairness import Demand, RunShares
from envd.pool.queue_report import QueuedGroup, queue_report
from envd.pool.status import PoolStatus
from tests.support.stub_episodes import pool_info

POOL = pool_info(4)
SHARES = RunShares(named={"small": RunShare(quota=2)})


async def report(*groups: tuple[str, int], held: dict[str, int], status: PoolStatus) -> tuple[QueuedGroup, ...]:
    queue = AdmissionQueue(limit=9, shares=SHARES, capacity=4)
    for index, (run, count) in enumerate(groups):
        demand = Demand(ready=count, run=run)
        queue.enter(WaitingGroup(demand=demand, owner=f"token-{run}", enter_s=float(index), deadline_s=60.0))
    return queue_report(queue, held=held, shares=SHARES, status=status, now_s=10.0)


async def test_groups_come_in_the_order_of_their_turns_with_their_reasons() -> None:
    status = replace(POOL, leased_count=4, template_digest="t")
    small, big, other = "small", "big", "other"
    found = await report((small, 1), (big, 2), (other, 1), held={small: 2, big: 2}, status=status)
    assert [(one.position, one.run, one.owner) for one in found] == [
        (1, other, "token-other"),
        (2, big, "token-big"),
        (3, small, "token-small"),
    ]
    assert found[0].reason.startswith("next: 4 of 4 machines busy, ")
    assert found[1].reason == "behind 1 group that wants 1 machine"
    assert found[2].reason == "run 'small' holds 2 of its quota of 2"
    assert (found[2].waited_s, found[2].left_s) == (10.0, 50.0)


async def test_the_numbers_of_the_first_group_add_up() -> None:
    status = replace(POOL, capacity=16, leased_count=9, idle_count=1, starting_count=2, template_digest="t")
    (only,) = await report(("a", 8), held={}, status=status)
    assert only.reason == "next: 9 of 16 machines busy, 1 idle, 2 starting, 4 free, 1 more needed"


async def test_a_pool_that_cannot_start_machines_is_the_reason() -> None:
    failing = replace(POOL, healthy=False, problem="libvirtd does not answer")
    (only,) = await report(("a", 1), held={}, status=failing)
    assert only.reason == "libvirtd does not answer"
    (only,) = await report(("a", 1), held={}, status=POOL)
    assert only.reason == "the pool's template is not ready yet"
    short = replace(POOL, template_digest="t", problem="waits for memory")
    (only,) = await report(("a", 1), held={}, status=short)
    assert only.reason.endswith("; waits for memory")
