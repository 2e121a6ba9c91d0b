"""Merge the responses of several shards, and choose the shard of a new group. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

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
    held: Mapping[str, int]
    """Machines that episodes have, by pool; others that are leased belong to running resets and forks."""
    opening: Mapping[str, int]
    """Machines that running resets request, by pool."""


def id_prefix(shard: int) -> str:
    """Return the beginning of the unique part of the ids that a shard makes."""
    return f"s{shard}x"


def shard_of(episode_id: str) -> int | None:
    """Return the shard that made an episode's id; None if no shard did."""
    match = _EPISODE_ID.match(episode_id)
    return int(match[1]) if match else None


class Choice(NamedTuple):
    """The shard for a new group."""

    shard: int
    has_room: bool
    """Whether the group need not wait there."""


def choose_shard(candidates: Iterable[Candidate], *, pool: str, group_size: int) -> Choice | None:
    """Return the shard for a new group: one with room for it if there is any, else the least loaded one.

    Args:
        candidates: The shards that are up.
        pool: The group's pool; `UNKNOWN_POOL` counts all pools together.
        group_size: Number of machines.
    """

    def rank(candidate: Candidate) -> tuple[bool, bool, bool, int]:
        pools = [each for each in candidate.pools if pool in (UNKNOWN_POOL, each.name)]
        free = sum(_free_count(each, candidate) for each in pools) - candidate.opening.get(UNKNOWN_POOL, 0)
        works = all(each.health != env_pb2.Pool.HEALTH_FAILING for each in pools)
        # A group that is larger than a shard's capacity waits in none.
        can_fit = sum(each.capacity_count for each in pools) >= group_size
        return works, can_fit, free >= group_size, free

    best = max(candidates, key=rank, default=None)
    return None if best is None else Choice(best.index, rank(best)[2])


def _free_count(pool: env_pb2.Pool, candidate: Candidate) -> int:
    held_count = candidate.held.get(pool.name, 0)
    # A reset that runs has its machines, waits in the shard's queue, or did not arrive there yet.
    arrived_count = pool.leased_count - held_count + pool.waiting_count
    return pool.capacity_count - held_count - max(arrived_count, candidate.opening.get(pool.name, 0))


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
