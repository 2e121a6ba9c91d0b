"""Decide whether a group gets a stored success, and which member it replaces.

Only if all members failed by their raw rewards, the checker's scores before any shaping. A group with a success of its
own has a signal.

The success replaces a member and is never added: a group of n stays a group of n, so batches keep their size and other
groups stay unchanged. A void member is replaced first, because it carries no signal. Otherwise the last one is
replaced: members are exchangeable, so a choice by position keeps the mean of the others unbiased, whereas replacing the
worst would raise it.

The success is off-policy. Its rows have the log-probabilities of the policy that sampled it: keep them, and enable
importance sampling (slime: `--use-tis` or `--use-rollout-logprobs`). Demonstrations have none and are not picked.
"""

from collections.abc import Sequence

from trainer.replay.pool import ReplayPool
from trainer.replay.trajectory import StoredTrajectory


def replaced_member(raw_rewards: Sequence[float | None], *, success_at: float) -> int | None:
    """Return the index of the member to replace; None if the group has a success, or only void members.

    Args:
        raw_rewards: The checker's scores, None for void members.
        success_at: Minimum score of a success.
    """
    known = [reward for reward in raw_rewards if reward is not None]
    if not known or any(reward >= success_at for reward in known):
        return None
    return list(raw_rewards).index(None) if None in raw_rewards else len(raw_rewards) - 1


def inject(
    pool: ReplayPool, task_id: str, raw_rewards: Sequence[float | None], *, start: str = ""
) -> tuple[int, StoredTrajectory] | None:
    """Return the index of a member and the success that replaces it, or None; updates the pool's counters.

    Args:
        pool: The successes.
        task_id: Task of the group, which is complete.
        raw_rewards: See `replaced_member`.
        start: Start of the group.
    """
    pool.counters.check_count += 1
    index = replaced_member(raw_rewards, success_at=pool.settings.success_at)
    if index is None:
        return None
    trajectory = pool.pick(task_id, start)
    if trajectory is None:
        pool.counters.missed_count += 1
        return None
    pool.counters.injected_count += 1
    return index, trajectory
