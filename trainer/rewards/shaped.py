"""Our own recipe: the task score, and for what failed a bounded hint of how far it came.

Two rules make it safe. A success is worth its task score and nothing else, so there is nothing to collect on the way.
A failure closes at most half of what parts it from success:

    total = task                                   task >= success_at
    total = task + share * (success_at - task) * s     otherwise, with s = 0.7 progress + 0.3 grounding, 0 <= s < 1

So every success beats every failure, whatever the facts, and nothing is ever clamped: between two failures of one
task score, more honest work is always worth more. Of its kinds of work:

    progress  = turns that worked / (turns + 2)
    grounding = those of them that pointed into the box of an element / (turns + 2)

A turn worked if it followed the grammar strictly, the guest took it without a complaint, it did something new (see
`signals.fresh`) and something changed. Turns that only say "done" or "fail" are not counted. The 2 in the divisor makes
one lucky click worth less than a way of ten, without a bonus for short or for long replies: no length is looked at.

What it cannot know is whether a change is of use. Wandering about the desktop with new clicks earns a part of the
share; that is why the share is small and success out of its reach.
"""

from dataclasses import dataclass

from trainer.rewards.breakdown import Breakdown
from trainer.rewards.facts import EpisodeFacts, TurnFacts
from trainer.rewards.options import check_number
from trainer.rewards.signals import fresh, had_effect, hits_a_box, works

_PROGRESS_WEIGHT = 0.7
_GROUNDING_WEIGHT = 0.3
_PATIENCE_TURNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaped:
    """The task score with bounded shaping of failures.

    Raises:
        RecipeError: An option is out of its range.
    """

    share: float = 0.4
    """How much of the distance to success a failure can close. At most half, so that rounding never closes it."""
    success_at: float = 0.5
    """Task score from which an episode counts as a success; success beats failure for every bar at or above it."""
    min_change: float = 0.0005
    """Share of the screen's pixels that counts as a change: six letters of 8x12 pixels on 1024x768."""

    def __post_init__(self) -> None:
        check_number("share", self.share, low=0.0, high=0.5)
        check_number("success_at", self.success_at, low=0.01, high=1.0)
        check_number("min_change", self.min_change, low=0.0, high=1.0)

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
    """All that the turn pointed at were elements, and it did point."""
    pointing = [action for action in turn.actions if works(action) and action.point_px is not None]
    return bool(pointing) and all(hits_a_box(action, turn.boxes_before) for action in pointing)
