"""Decide who owns the end of an episode, and with it whether the episode is scored, void or repeated. Pure.

An agent can end its own machine. If that were void or repeated, a policy could remove its failures from the statistics,
so an episode is repeated only if the agent cannot have caused its loss. All plug-ins and adapters use this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from cuaenv.client import (
    AccessDenied,
    BadRequest,
    Conflict,
    DeadlineExceeded,
    EnvError,
    EpisodeEnded,
    EpisodeNotFound,
    EvaluatorFailed,
    GroupTooLarge,
    GuestEnded,
    GuestFailed,
    GuestRefused,
    HumanInControl,
    LossUndecided,
    MachineLost,
    NotForkable,
    NotFound,
    NotSupported,
    SampleVoid,
    SetupFailed,
    Unavailable,
)
from trainer.agent.types import BudgetExhausted, GenerationAborted, ModelFailed, Outcome, Trajectory
from trainer.rewards.facts import Breakdown, EpisodeFacts
from trainer.rewards.recipes import Reward

GUEST_ENDED: Final = "GUEST_ENDED"
"""`end_reason` of an episode whose guest ended itself."""


class Owner(Enum):
    """Who caused an episode to end."""

    #: The agent: the episode is scored.
    POLICY = "policy"
    #: The hosts, or a lack of machines: void.
    HOST = "host"
    #: The trainer or its engine: void.
    TRAINER = "trainer"
    #: The sender of an invalid request: void, and the error is reported.
    CALLER = "caller"
    #: Unknown, and the agent may be the cause: void, and counted as `undecided`.
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Ruling:
    """The owner of an error, and what follows."""

    owner: Owner
    repeat: bool = False
    """Whether another attempt on a new machine may be made."""


_POLICY, _HOST, _TRAINER = Ruling(Owner.POLICY), Ruling(Owner.HOST), Ruling(Owner.TRAINER)
_CALLER, _UNDECIDED = Ruling(Owner.CALLER), Ruling(Owner.UNDECIDED)
_REPEATED = Ruling(Owner.HOST, repeat=True)

#: Ruling before the agent acted, and after. The nearest base class of an error counts.
_TABLE: Mapping[type[BaseException], tuple[Ruling, Ruling]] = {
    GuestEnded: (_POLICY, _POLICY),
    # Context, turns, time and replies. Before the first reply the loop raises `NoReply`, a `ModelFailed`.
    BudgetExhausted: (_POLICY, _POLICY),
    # The host's own evidence says that the agent is not the cause.
    MachineLost: (_REPEATED, _REPEATED),
    EpisodeNotFound: (_REPEATED, _REPEATED),
    Conflict: (_REPEATED, _REPEATED),
    Unavailable: (_REPEATED, _REPEATED),
    SetupFailed: (_REPEATED, _REPEATED),
    # An agent can stop its guest from answering, and leave what a checker cannot read.
    GuestFailed: (_REPEATED, _UNDECIDED),
    DeadlineExceeded: (_REPEATED, _UNDECIDED),
    EvaluatorFailed: (_HOST, _UNDECIDED),
    LossUndecided: (_UNDECIDED, _UNDECIDED),
    # What a person did is not the policy's: such an episode is neither trained nor repeated.
    HumanInControl: (_TRAINER, _TRAINER),
    GenerationAborted: (_TRAINER, _TRAINER),
    ModelFailed: (_TRAINER, _TRAINER),
    TimeoutError: (_TRAINER, _TRAINER),
    **dict.fromkeys(
        (AccessDenied, BadRequest, EpisodeEnded, GroupTooLarge, GuestRefused, NotForkable, NotFound, NotSupported),
        (_CALLER, _CALLER),
    ),
    # Faults of the service, and errors newer than this table. Repeating them would fail the same way. One is a user who
    # answers no question: the daemon's own got no answer either; what only the agent's question causes is an answer.
    EnvError: (_HOST, _HOST),
    # A bug of ours, which the text of a reply may have triggered.
    Exception: (_UNDECIDED, _UNDECIDED),
}

#: Typed errors of the end reasons that a service reports for a failed episode.
_FAILURES: Mapping[str, type[SampleVoid]] = {
    "MACHINE_LOST": MachineLost,
    "LOSS_UNDECIDED": LossUndecided,
    "GUEST_UNRESPONSIVE": GuestFailed,
    "GUEST_ERROR": GuestFailed,
}


def ruling_of(error: BaseException, *, acted: bool) -> Ruling:
    """Return who owns an error, and whether the episode may be repeated.

    Args:
        acted: Whether the agent performed or sent any action before.
    """
    for kind in type(error).__mro__:
        if kind in _TABLE:
            return _TABLE[kind][acted]
    return _TRAINER


def ruling_on(trajectory: Trajectory) -> Ruling:
    """Return who owns the end of an episode, and whether it may be repeated."""
    if trajectory.outcome is not Outcome.FAILED or trajectory.error is None:
        return _TRAINER if trajectory.evaluation is None else _POLICY
    if trajectory.guest_end_cause:
        # The agent ended the guest, and then the evaluation failed.
        return _UNDECIDED
    return ruling_of(trajectory.error, acted=any(turn.actions for turn in trajectory.turns))


def is_fault(error: BaseException) -> bool:
    """Whether an error voids its sample: neither an end by the agent nor a mistake of the caller."""
    return ruling_of(error, acted=True).owner not in (Owner.POLICY, Owner.CALLER)


def failure_of(episode_id: str, end_reason: str) -> SampleVoid:
    """Return the typed error of an episode that the service reports as failed."""
    reason = end_reason or "FAILED"
    return _FAILURES.get(reason, SampleVoid)(f"episode {episode_id} failed: {reason}", reason=reason)


def reward_of(facts: EpisodeFacts, recipe: Reward, *, ended_by_guest_score: float) -> Breakdown:
    """Return the reward for training, with `ended_by_guest_score` if the guest ended itself without solving the task.

    A solved task keeps its score, because a task may have the power-off as its goal. The recipe's parts are then those
    of a failure, so that an escape is worth less than a failure in the same steps, whatever the recipe.
    """
    if not facts.guest_end_cause or facts.task_score >= 1:
        return recipe(facts)
    failed = recipe(replace(facts, task_score=0.0))
    return Breakdown(
        recipe=failed.recipe,
        total=failed.total + ended_by_guest_score,
        task_score=facts.task_score,
        parts={**failed.parts, "ended_by_guest": ended_by_guest_score},
    )
