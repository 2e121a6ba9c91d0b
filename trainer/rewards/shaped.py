"""The project's own recipe: the task score, plus a bounded bonus for failures.

Two rules make it safe. A success is worth its task score only, without a bonus on the way. A failure
closes at most half of its distance from success:

    total = task                                   task >= success_at
    total = task + share * (success_at - task) * s     otherwise, with s = 0.7 progress + 0.3 grounding, 0 <= s < 1

So every success is worth more than every failure, for all facts. The sum is not clamped: of two failures with one task
score, more honest work is always worth more. The two kinds of work:

    progress  = effective turns / (turns + 2)
    grounding = effective turns that pointed into the box of an element / (turns + 2)

A turn is effective if it followed the grammar strictly, the guest performed it without an error, it did something new
(see `signals.fresh`) and something changed. Turns that only end the episode are not counted. The 2 in the divisor makes
one lucky click worth less than ten effective turns. The length of replies has no effect.

The recipe cannot know whether a change is useful. Random new clicks earn a part of the share, which is why the share is
small and cannot reach success.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from trainer.config import STRICT
from trainer.rewards.facts import ActionFacts, Breakdown, EpisodeFacts, TurnFacts

_PROGRESS_WEIGHT = 0.7
_GROUNDING_WEIGHT = 0.3
_PATIENCE_TURNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaped:
    """The task score with bounded shaping of failures."""

    __pydantic_config__: ClassVar = STRICT

    share: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.4
    """Share of the distance to success that a failure can close. At most half, so that rounding never closes it."""
    success_at: Annotated[float, Field(ge=0.01, le=1, allow_inf_nan=False)] = 0.5
    """Minimum task score of a success; success is worth more than failure for every threshold from here up."""
    min_change: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0005
    """Share of the screen's pixels that counts as a change: six letters of 8x12 pixels on 1024x768."""

    def __call__(self, facts: EpisodeFacts) -> Breakdown:
        parts = {"task": facts.task_score, "progress": 0.0, "grounding": 0.0}
        if facts.task_score < self.success_at:
            within_reach = self.share * (self.success_at - facts.task_score)
            worked = [turn for turn, new in zip(facts.turns, fresh(facts.turns), strict=True) if new and self._ok(turn)]
            turn_count = sum(1 for turn in facts.turns if not _only_ends(turn)) + _PATIENCE_TURNS
            parts["progress"] = within_reach * _PROGRESS_WEIGHT * (len(worked) / turn_count)
            parts["grounding"] = within_reach * _GROUNDING_WEIGHT * (sum(map(_is_grounded, worked)) / turn_count)
        total = parts["task"] + (parts["progress"] + parts["grounding"])
        return Breakdown(recipe="shaped", total=total, task_score=facts.task_score, parts=parts)

    def _ok(self, turn: TurnFacts) -> bool:
        return turn.parsed and not turn.errors and had_effect(turn, min_change=self.min_change)


def _only_ends(turn: TurnFacts) -> bool:
    return (turn.done or turn.failed) and not any(works(action) for action in turn.actions)


def _is_grounded(turn: TurnFacts) -> bool:
    """Whether the turn has points and all of them are in boxes of elements."""
    pointing = [action for action in turn.actions if works(action) and action.point_px is not None]
    return bool(pointing) and all(hits_a_box(action, turn.boxes_before) for action in pointing)


#: Names of actions, in any grammar, that do not act on the guest.
IDLE_KINDS = frozenset({"wait", "sleep", "screenshot", "terminate", "done", "fail", "answer"})

#: Points nearer than this are the same, so that small variations of a click are not new.
SAME_PLACE_PX = 16


def works(action: ActionFacts) -> bool:
    """Whether the guest performed the action, and it was not a wait or an end of the episode."""
    return action.executed and action.kind.lower() not in IDLE_KINDS


def hits_a_box(action: ActionFacts, boxes: Iterable[tuple[int, int, int, int]]) -> bool:
    """Whether the action's point is inside one of the boxes (left, top, width, height; pixels).

    Actions without a point, such as typing, never hit a box, even if the screen shows their text.
    """
    if action.point_px is None:
        return False
    x, y = action.point_px
    return any(left <= x < left + width and top <= y < top + height for left, top, width, height in boxes)


def same_action(one: ActionFacts, other: ActionFacts) -> bool:
    """Whether two actions do the same at the same point. Without points, all arguments must be equal."""
    if (one.kind, one.text, one.keys) != (other.kind, other.text, other.keys):
        return False
    if one.point_px is None or other.point_px is None:
        return one.point_px is other.point_px and dict(one.arguments) == dict(other.arguments)
    return all(abs(a - b) <= SAME_PLACE_PX for a, b in zip(one.point_px, other.point_px, strict=True))


def had_effect(turn: TurnFacts, *, min_change: float) -> bool:
    """Whether `min_change` of the screen's pixels, its tree, or its terminal changed.

    Unobserved values do not count. Tree and terminal are considered because a few letters are few pixels.
    """
    if turn.changed_fraction is not None and turn.changed_fraction >= min_change:
        return True
    pairs = ((turn.tree_before, turn.tree_after), (turn.terminal_before, turn.terminal_after))
    return any(before is not None and after is not None and before != after for before, after in pairs)


def fresh(turns: Sequence[TurnFacts]) -> list[bool]:
    """Return for each turn whether it has a new action, or one repeated after something new was done.

    So Enter counts after each new text, and opening and closing one menu repeatedly counts twice.
    """
    is_fresh: list[bool] = []
    is_first: list[bool] = []
    for index, turn in enumerate(turns):
        actions = [action for action in turn.actions if works(action)]
        last_uses = [_last_use(action, turns[:index]) for action in actions]
        is_first.append(any(use is None for use in last_uses))
        is_fresh.append(any(use is None or any(is_first[use + 1 : index]) for use in last_uses))
    return is_fresh


def _last_use(action: ActionFacts, turns: Sequence[TurnFacts]) -> int | None:
    for index in reversed(range(len(turns))):
        if any(same_action(action, other) for other in turns[index].actions):
            return index
    return None
