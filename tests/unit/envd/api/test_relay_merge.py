"""The order of shards for a group, and pools merged from several shards."""

from typing import Any

import pytest
from cuaenv.v1 import env_pb2

from envd.api.relay.merge import UNKNOWN_POOL, Candidate, id_prefix, merge_pools, ranked_shards, shard_of

HEALTHY, DEGRADED, FAILING = (
    env_pb2.Pool.HEALTH_HEALTHY,
    env_pb2.Pool.HEALTH_DEGRADED,
    env_pb2.Pool.HEALTH_FAILING,
)


def pool(name: str = "desktop", *, capacity: int = 4, health: Any = HEALTHY, **fields: Any) -> env_pb2.Pool:
    return env_pb2.Pool(name=name, capacity_count=capacity, health=health, **fields)


def candidate(index: int, *pools: env_pb2.Pool, **opening: int) -> Candidate:
    return Candidate(index=index, pools=pools, opening=opening)


def ranked(*candidates: Candidate, pool: str = "desktop", group_size: int = 1) -> list[int]:
    return ranked_shards(candidates, pool=pool, group_size=group_size)


def test_an_episode_id_names_its_shard() -> None:
    assert shard_of(f"ep-{id_prefix(12)}0123456789abcdef") == 12
    assert shard_of("ep-0123456789abcdef") is None
    assert shard_of("") is None
    assert shard_of("ep-s99999x1") is None


def test_shards_with_more_free_machines_come_first() -> None:
    assert ranked(candidate(0, pool(leased_count=2)), candidate(1, pool(leased_count=1))) == [1, 0]
    assert ranked(candidate(0, pool(leased_count=1)), candidate(1, pool(leased_count=2))) == [0, 1]
    assert ranked(candidate(0, pool(leased_count=1)), candidate(1, pool(leased_count=1))) == [0, 1]


def test_running_resets_count_before_the_shard_reports_them() -> None:
    assert ranked(candidate(0, pool(), desktop=3), candidate(1, pool(leased_count=2))) == [1, 0]


def test_running_resets_for_unknown_pools_count_for_every_pool() -> None:
    first = candidate(0, pool("a"), pool("b"), **{UNKNOWN_POOL: 3})
    second = candidate(1, pool("a", leased_count=2), pool("b"))
    assert ranked(first, second, pool="a") == [1, 0]
    assert ranked(first, second, pool=UNKNOWN_POOL) == [1, 0]


def test_a_running_reset_that_waits_in_its_shard_counts_once() -> None:
    waiting = candidate(0, pool(leased_count=4, waiting_count=2), desktop=2)
    assert ranked(waiting, candidate(1, pool(leased_count=4, waiting_count=3))) == [0, 1]


def test_only_the_requested_pool_counts() -> None:
    first = candidate(0, pool("a", leased_count=4), pool("b"))
    second = candidate(1, pool("a"), pool("b", leased_count=4))
    assert ranked(first, second, pool="a") == [1, 0]
    assert ranked(first, second, pool="b") == [0, 1]


def test_a_shard_whose_machines_do_not_start_comes_last() -> None:
    failing = candidate(0, pool(health=FAILING))
    assert ranked(failing, candidate(1, pool(leased_count=4))) == [1, 0]
    assert ranked(failing) == [0]
    assert ranked() == []


def test_shards_that_can_never_hold_a_group_are_left_out_unless_none_can() -> None:
    small, large = candidate(0, pool(capacity=2)), candidate(1, pool(capacity=3, leased_count=3))
    assert ranked(small, large, group_size=3) == [1]
    assert ranked(small, large, group_size=4) == [0, 1]
    assert ranked(small, large, group_size=3, pool=UNKNOWN_POOL) == [1]


def test_counts_of_a_pool_are_summed_and_problems_name_their_shard() -> None:
    parts = {
        1: [pool(idle_count=2, leased_count=1, memory_bytes=5, problem="no disk", health=FAILING)],
        0: [pool(idle_count=1, waiting_count=3, pss_bytes=7)],
    }
    (merged,) = merge_pools(parts)
    assert (merged.capacity_count, merged.idle_count, merged.leased_count, merged.waiting_count) == (8, 3, 1, 3)
    assert (merged.memory_bytes, merged.pss_bytes) == (5, 7)
    assert (merged.health, merged.problem) == (DEGRADED, "shard 1: no disk")


@pytest.mark.parametrize("health", [HEALTHY, DEGRADED, FAILING])
def test_a_pool_that_is_the_same_on_all_shards_keeps_its_health(health: Any) -> None:
    (merged,) = merge_pools({0: [pool(health=health)], 1: [pool(health=health)]})
    assert merged.health == health


def test_a_shard_that_is_down_degrades_every_pool() -> None:
    first, second = merge_pools({0: [pool("a"), pool("b")]}, down=[1])
    assert (first.name, second.name) == ("a", "b")
    assert (first.health, first.problem) == (DEGRADED, "shard 1: is being restarted")


def test_queues_are_merged_by_position() -> None:
    first, second = pool(), pool()
    first.queue.add(position=1, machine_count=1)
    first.queue.add(position=2, machine_count=2)
    second.queue.add(position=1, machine_count=3)
    (merged,) = merge_pools({0: [first], 1: [second]})
    assert [group.machine_count for group in merged.queue] == [1, 3, 2]
