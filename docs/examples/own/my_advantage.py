"""--custom-reward-post-process-path my_advantage.leave_one_out."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from trainer.slime.hooks import by_rollout, is_void


def leave_one_out(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return raw rewards, and each one's distance from the mean of the other valid members of its group."""
    groups = defaultdict(list)
    for rows in by_rollout(samples):  # the rows of an episode
        groups[rows[0].group_index].append(rows)
    advantage = dict.fromkeys(map(id, samples), 0.0)  # that of void samples
    for members in groups.values():
        valid = [rows for rows in members if not is_void(rows[0])]
        total = sum(rows[0].reward for rows in valid)
        for rows in valid if len(valid) > 1 else ():
            others = (total - rows[0].reward) / (len(valid) - 1)
            advantage.update({id(row): rows[0].reward - others for row in rows})
    return [0.0 if is_void(one) else one.reward for one in samples], [advantage[id(one)] for one in samples]
