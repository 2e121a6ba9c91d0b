"""When a group is shown a success that it did not have itself, and in whose place.

Only if all its members failed by their raw rewards: the checker's scores, before any shaping. A group that has a
success has a signal of its own.

The success takes the place of a member; it is never added. A group of n stays a group of n, so batches keep their size,
other groups stay untouched, and a batch is never one group by mistake. A void member goes first, for it would teach
nothing anyway. Else the last one goes: members are drawn alike, so to go by position keeps the others' mean honest,
while to drop the worst would lift it.

It is declared as what it is. With the log-probabilities of the policy that sampled it (`BEHAVIOUR_LOG_PROBS`), the
trainer can weigh it by how likely it is now: keep them, and turn on importance sampling (slime: `--use-tis` or
`--use-rollout-logprobs`). A demonstration has none (`SFT_LOSS`): it needs a supervised loss, and the pool picks it only
if told that there is one (`PoolSettings.demonstrations`). Log-probabilities are never made up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trainer.replay.pool import ReplayPool
from trainer.replay.trajectory import StoredTrajectory


class OffPolicy(Enum):
    """How an injected sample may be trained."""

    #: By policy gradient, weighed with the log-probabilities in its rows.
    BEHAVIOUR_LOG_PROBS = "behaviour_log_probs"
    #: By a supervised loss only.
    SFT_LOSS = "sft_loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A success and whose place it takes."""

    index: int
    """Of the member that it replaces."""
    trajectory: StoredTrajectory
    off_policy: OffPolicy

    @property
    def reward(self) -> float:
        """The stored one: it was judged when it was done."""
        return self.trajectory.reward


def replaced_member(raw_rewards: Sequence[float | None], *, success_at: float) -> int | None:
    """Return whose place a success would take; None if the group needs none, or nobody knows how it did.

    Args:
        raw_rewards: The checker's scores, None for void members.
        success_at: Least score of a success.
    """
    known = [reward for reward in raw_rewards if reward is not None]
    if not known or any(reward >= success_at for reward in known):
        return None
    return list(raw_rewards).index(None) if None in raw_rewards else len(raw_rewards) - 1


def inject(pool: ReplayPool, task_id: str, raw_rewards: Sequence[float | None]) -> Injection | None:
    """Return what to show a complete group of that task, or None; counted either way."""
    pool.counters.check_count += 1
    index = replaced_member(raw_rewards, success_at=pool.settings.success_at)
    if index is None:
        return None
    trajectory = pool.pick(task_id)
    if trajectory is None:
        pool.counters.missed_count += 1
        return None
    pool.counters.injected_count += 1
    off_policy = OffPolicy.BEHAVIOUR_LOG_PROBS if trajectory.rows else OffPolicy.SFT_LOSS
    return Injection(index=index, trajectory=trajectory, off_policy=off_policy)
