"""Merge the responses of several shards, and rank the shards for a new group. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cuaenv.v1 import env_pb2

_EPISODE_ID = re.compile(r"ep-s(\d{1,4})x")
_SUMS: Final = (
    "capacity_count",
    "idle_count",
    "leased_count",
    "starting_count",
    "dying_count",
    "waiting_count",
    "memory_bytes",
    "pss_bytes",
)
#: The pool of a reset whose task has not been opened before.
UNKNOWN_POOL: Final = ""

_WORST_FIRST: Final = (env_pb2.Pool.HEALTH_FAILING, env_pb2.Pool.HEALTH_DEGRADED, env_pb2.Pool.HEALTH_HEALTHY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A shard that may open a group."""

    index: int
    pools: Sequence[env_pb2.Pool]
    opening: Mapping[str, int]
    """Machines that running resets request, by pool."""


def id_prefix(shard: int) -> str:
    """Return the beginning of the unique part of the ids that a shard makes."""
    return f"s{shard}x"


def shard_of(episode_id: str) -> int | None:
    """Return the shard that made an episode's id; None if no shard did."""
    match = _EPISODE_ID.match(episode_id)
    return int(match[1]) if match else None


def ranked_shards(candidates: Iterable[Candidate], *, pool: str, group_size: int) -> list[int]:
    """Return the shards for a new group, best first: with room for it, then with most free machines.

    The counts may be out of date, and only the shard itself knows whether the group has to queue. Shards that can never
    hold the group are left out if another can.

    Args:
        candidates: The shards that are up.
        pool: The group's pool; `UNKNOWN_POOL` counts all pools together.
        group_size: Number of machines.
    """

    def pools_of(candidate: Candidate) -> list[env_pb2.Pool]:
        return [each for each in candidate.pools if pool in (UNKNOWN_POOL, each.name)]

    def rank(candidate: Candidate) -> tuple[bool, bool, int]:
        pools = pools_of(candidate)
        free = sum(_free_count(each, candidate) for each in pools) - candidate.opening.get(UNKNOWN_POOL, 0)
        works = all(each.health != env_pb2.Pool.HEALTH_FAILING for each in pools)
        return works, free >= group_size, free

    every = list(candidates)
    fitting = [each for each in every if any(p.capacity_count >= group_size for p in pools_of(each))]
    return [each.index for each in sorted(fitting or every, key=rank, reverse=True)]


def _free_count(pool: env_pb2.Pool, candidate: Candidate) -> int:
    # A running reset may be leased or queued in the shard already. It then counts twice on every shard, and a shard
    # that seems full is still asked.
    return pool.capacity_count - pool.leased_count - max(pool.waiting_count, candidate.opening.get(pool.name, 0))


def merge_pools(by_shard: Mapping[int, Sequence[env_pb2.Pool]], *, down: Sequence[int] = ()) -> list[env_pb2.Pool]:
    """Return one pool per name: sums of the shards' counts, the worst health, all problems.

    Args:
        by_shard: Pools of the shards that are up.
        down: Shards that are not.
    """
    parts: dict[str, list[tuple[int, env_pb2.Pool]]] = {}
    for index, pools in sorted(by_shard.items()):
        for pool in pools:
            parts.setdefault(pool.name, []).append((index, pool))
    return [_merged_pool(same, down) for _, same in sorted(parts.items())]


def _merged_pool(parts: Sequence[tuple[int, env_pb2.Pool]], down: Sequence[int]) -> env_pb2.Pool:
    merged = env_pb2.Pool()
    merged.CopyFrom(parts[0][1])
    for name in _SUMS:
        setattr(merged, name, sum(getattr(part, name) for _, part in parts))
    problems = [f"shard {index}: {part.problem}" for index, part in parts if part.problem]
    problems += [f"shard {index}: is being restarted" for index in down]
    merged.problem = "; ".join(problems)
    healths = {part.health for _, part in parts}
    worst = next(health for health in _WORST_FIRST if health in healths)
    # A shard whose machines start still serves new groups.
    is_partial = down or len(healths) > 1
    merged.health = env_pb2.Pool.HEALTH_DEGRADED if is_partial else worst
    del merged.queue[:]
    merged.queue.extend(sorted((group for _, part in parts for group in part.queue), key=lambda each: each.position))
    return merged
