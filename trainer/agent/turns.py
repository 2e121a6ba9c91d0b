"""Build turns: first with the reply and its parsed actions, then with their results. Pure.

A `BranchPoint` is the agent's state between two turns, from which episodes in copies of its machine continue.
"""

from dataclasses import dataclass, replace

from cuaenv.client import Action, Origin, State, StepResult
from trainer.agent.coordinates import CoordinateSpace, points_of
from trainer.agent.grammars import Parsed
from trainer.agent.history import History
from trainer.agent.prompts import ModelObservation
from trainer.agent.types import Outcome, Reply, Turn
from trainer.rewards.facts import TurnFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """The agent's complete state after an observation and before the next reply."""

    turns: tuple[Turn, ...]
    """All turns so far."""
    history: History
    """Messages so far; each continuation needs its own copy."""
    observed: ModelObservation
    """The latest observation."""
    space: CoordinateSpace
    """Coordinate space of the next reply."""
    pointer: tuple[int, int] | None
    """Last pointer position, in the model's coordinates."""
    origin: Origin
    """Origin of the episode's first state."""
    spent_s: float
    """Used part of the episode's time limit."""
    is_resumed: bool = False
    """Whether the episode itself continues, so that its turns are its own; else it branched from another one."""

    @property
    def shared_turn_count(self) -> int:
        """Turns that another episode sampled."""
        return 0 if self.is_resumed else len(self.turns)


def new_turn(
    reply: Reply, parsed: Parsed, actions: tuple[Action, ...], *, observed: ModelObservation, row: int
) -> Turn:
    """Return a turn whose actions, in the screen's pixels, are not performed yet; none if they cannot be."""
    points = [next(iter(points_of(action)), None) for action in actions] or [None] * len(parsed.intents)
    facts = TurnFacts(
        text=reply.text,
        parsed=parsed.parsed,
        fallback=parsed.fallback,
        actions=tuple(
            replace(intent.facts, executed=False, point_px=point)
            for intent, point in zip(parsed.intents, points, strict=True)
        ),
        errors=(parsed.error,) if parsed.error else (),
        done=parsed.done,
        failed=parsed.failed,
        tree_before=observed.tree,
        boxes_before=observed.boxes_px,
        terminal_before=observed.terminal,
        token_count=len(reply.token_ids),
    )
    return Turn(reply=reply, actions=actions, facts=facts, row=row, image_id=observed.image_id)


def completed_turn(
    turn: Turn, after: ModelObservation, mistake: str, step: StepResult | None, *, step_s: float
) -> Turn:
    """Return the turn with the result of its actions."""
    facts = replace(turn.facts, tree_after=after.tree, terminal_after=after.terminal)
    if step is None:
        # No step was sent, and machines are paused between steps.
        return replace(turn, facts=replace(facts, errors=(mistake,), changed_fraction=0.0))
    change = step.screen_change
    facts = replace(
        facts,
        # Actions without an entry in `action_errors` were not performed.
        actions=tuple(
            replace(action, executed=index < len(step.action_errors) and not step.action_errors[index])
            for index, action in enumerate(facts.actions)
        ),
        errors=step.errors,
        changed_fraction=None if change is None else change.changed_fraction,
        grey_difference=None if change is None else change.grey_difference,
    )
    return replace(turn, facts=facts, step_s=step_s)


def end_of_episode(step: StepResult) -> tuple[Outcome, str]:
    """Return the outcome and reason of an episode from its last step."""
    reasons = {"AGENT_DONE": "done", "AGENT_FAIL": "fail", "MAX_STEPS": "turns"}
    outcome = Outcome.TERMINATED if step.state is State.TERMINATED else Outcome.TRUNCATED
    return outcome, reasons.get(step.end_reason, step.end_reason.lower())
