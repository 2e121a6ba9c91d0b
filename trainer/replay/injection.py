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
from dataclasses import dataclass

from trainer.replay.pool import ReplayPool
from trainer.replay.trajectory import StoredTrajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A success and the member that it replaces."""

    index: int
    """Index of the replaced member."""
    trajectory: StoredTrajectory

    @property
    def reward(self) -> float:
        """The stored reward, from the evaluation of that time."""
        return self.trajectory.reward


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


def inject(pool: ReplayPool, task_id: str, raw_rewards: Sequence[float | None], *, start: str = "") -> Injection | None:
    """Return a success for a complete group of that task and start, or None; updates the pool's counters."""
    pool.counters.check_count += 1
    index = replaced_member(raw_rewards, success_at=pool.settings.success_at)
    if index is None:
        return None
    trajectory = pool.pick(task_id, start)
    if trajectory is None:
        pool.counters.missed_count += 1
        return None
    pool.counters.injected_count += 1
    return Injection(index=index, trajectory=trajectory)
