"""A group's rewards against each other, as GRPO wants them. Pure.

None stands for a sample that failed on our side: it enters no mean, no deviation and no count, and its advantage is 0.
"""

import math
import statistics
from collections.abc import Sequence


def has_signal(rewards: Sequence[float | None]) -> bool:
    """The group teaches something: two of its rewards differ.

    Told from the rewards themselves: the mean of the advantages is 0 up to rounding in every group, and tells nothing.
    """
    return len({reward for reward in rewards if reward is not None}) > 1


def advantages(rewards: Sequence[float | None], *, by_deviation: bool = True) -> list[float]:
    """Return each reward less the group's mean, over the sample deviation + 1e-6 unless told otherwise.

    Zeros where the group has no signal: rounding errors of equal rewards, divided by a deviation of nothing, would look
    like one. The order of the rewards is kept. The formula: slime's `--grpo-std-normalization`.

    Raises:
        ValueError: A reward is not finite.
    """
    valid = [reward for reward in rewards if reward is not None]
    if not all(map(math.isfinite, valid)):
        raise ValueError(f"the group has a reward that is no number: {list(rewards)}")
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(valid)
    scale = statistics.stdev(valid) + 1e-6 if by_deviation else 1.0
    return [0.0 if reward is None else (reward - mean) / scale for reward in rewards]
