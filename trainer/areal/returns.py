"""What each turn of an episode is worth. Pure."""


def discounted(reward: float, *, turn_count: int, discount: float) -> list[float]:
    """Return each turn's return: the episode's reward at the last turn, discounted backwards.

    The last turn has r; each earlier one `discount` times the next one's, since no turn but the last is rewarded
    itself: r[i] + discount * r[i + 1] with r[i] = 0.
    """
    return [reward * discount ** (turn_count - 1 - turn) for turn in range(turn_count)]
