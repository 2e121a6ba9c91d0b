"""What a turn tells about honest work: did it point at something, did it change something, was it new. Pure."""

from collections.abc import Iterable, Sequence

from trainer.rewards.facts import ActionFacts, TurnFacts

#: Names of actions, in whatever grammar, that do nothing to the guest.
IDLE_KINDS = frozenset({"wait", "sleep", "screenshot", "terminate", "done", "fail", "answer"})

#: Nearer than this is the same place: a hand that trembles does nothing new.
SAME_PLACE_PX = 16


def works(action: ActionFacts) -> bool:
    """The guest took the action, and it was more than waiting or ending."""
    return action.executed and action.kind.lower() not in IDLE_KINDS


def hits_a_box(action: ActionFacts, boxes: Iterable[tuple[int, int, int, int]]) -> bool:
    """The action went to a place inside one of the boxes (left, top, width, height; pixels).

    Only a place can hit: whatever is typed or pressed hits nothing, though the screen may be full of its letters.
    """
    if action.point_px is None:
        return False
    x, y = action.point_px
    return any(left <= x < left + width and top <= y < top + height for left, top, width, height in boxes)


def same_action(one: ActionFacts, other: ActionFacts) -> bool:
    """The two do the same thing at the same place.

    What neither of them has (a place, a text, a key) makes no two actions the same: then all that was written decides.
    """
    if (one.kind, one.text, one.keys) != (other.kind, other.text, other.keys):
        return False
    if one.point_px is None or other.point_px is None:
        return one.point_px is other.point_px and dict(one.arguments) == dict(other.arguments)
    return all(abs(a - b) <= SAME_PLACE_PX for a, b in zip(one.point_px, other.point_px, strict=True))


def had_effect(turn: TurnFacts, *, min_change: float) -> bool:
    """Something could be seen to change: `min_change` of the screen's pixels, its tree, or its terminal.

    What was not observed is no evidence. The tree and the terminal count beside the pixels, for a few letters of text
    are few pixels.
    """
    if turn.changed_fraction is not None and turn.changed_fraction >= min_change:
        return True
    pairs = ((turn.tree_before, turn.tree_after), (turn.terminal_before, turn.terminal_after))
    return any(before is not None and after is not None and before != after for before, after in pairs)


def fresh(turns: Sequence[TurnFacts]) -> list[bool]:
    """For each turn: some action of it was new, or may be done again since something new was done in between.

    So Enter counts after each new text, and to open and close one menu for ever counts twice.
    """
    verdicts: list[bool] = []
    is_first: list[bool] = []
    for index, turn in enumerate(turns):
        actions = [action for action in turn.actions if works(action)]
        last_uses = [_last_use(action, turns[:index]) for action in actions]
        is_first.append(any(use is None for use in last_uses))
        verdicts.append(any(use is None or any(is_first[use + 1 : index]) for use in last_uses))
    return verdicts


def _last_use(action: ActionFacts, turns: Sequence[TurnFacts]) -> int | None:
    for index in reversed(range(len(turns))):
        if any(same_action(action, other) for other in turns[index].actions):
            return index
    return None
