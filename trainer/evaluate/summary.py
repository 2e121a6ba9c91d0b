"""Summary of a run: rates with intervals, for all tasks and by suite, domain and level. Pure.

Errors are counted separately and enter no rate but `success_with_lost`, where they are failures. Infeasible tasks have
their own row, because an agent that always gives up solves all of them and raises the overall rate.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from trainer.agent.ownership import Owner
from trainer.evaluate.results import Attempt, Results
from trainer.evaluate.statistics import Interval, mean_rate, success_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """A group of tasks."""

    group: str
    """"all", "feasible", "infeasible", or such as "level 2" and "suite desktop"."""
    task_count: int
    attempt_count: int
    """Attempts without errors."""
    success: Interval | None
    """Share of attempts with score 1; None if every attempt was an error."""
    score: Interval | None
    """Mean score, partial credit included."""
    error_count: int
    success_with_lost: Interval | None
    """Share of attempts with score 1 if lost attempts count as failures; None without attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary of a run."""

    label: str
    rows: Sequence[SummaryRow]
    """All tasks first."""
    infeasible_share: float
    """Share of infeasible tasks."""
    errors: Mapping[str, int]
    """Number of lost attempts by error."""
    undecided_count: int
    """Lost attempts whose loss the agent may have caused."""
    ended_by_guest_count: int
    """Scored attempts in which the agent ended its guest."""
    repeated_count: int
    """Attempts that were played again because the host lost their machine."""
    endings: Mapping[str, int]
    """Number of attempts by ending: done, fail, or a budget."""
    parsed_share: float | None
    """Share of turns that followed the grammar; None without turns."""
    turn_count_mean: float | None


def summarise(results: Results) -> Summary:
    attempts = results.attempts
    valid = [attempt for attempt in attempts if not attempt.is_error]
    turns = sum(attempt.turn_count for attempt in valid)
    infeasible = {attempt.task_id: attempt.infeasible for attempt in attempts}
    return Summary(
        label=results.run.label,
        rows=[_row(group, members) for group, members in groups(attempts).items()],
        infeasible_share=float(np.mean(list(infeasible.values()))) if infeasible else 0.0,
        errors=dict(Counter(attempt.reason for attempt in attempts if attempt.is_error).most_common()),
        undecided_count=sum(attempt.owner == Owner.UNDECIDED.value for attempt in attempts),
        ended_by_guest_count=sum(bool(attempt.guest_end_cause) for attempt in valid),
        repeated_count=sum(attempt.attempt_count > 1 for attempt in attempts),
        endings=dict(Counter(attempt.reason for attempt in valid).most_common()),
        parsed_share=sum(attempt.parsed_count for attempt in valid) / turns if turns else None,
        turn_count_mean=turns / len(valid) if valid else None,
    )


def groups(attempts: Iterable[Attempt]) -> dict[str, list[Attempt]]:
    """Group attempts; a kind of group with a single member is omitted."""
    found: dict[str, list[Attempt]] = {"all": list(attempts)}
    kinds: Sequence[Callable[[Attempt], str]] = (
        lambda attempt: "infeasible" if attempt.infeasible else "feasible",
        lambda attempt: f"suite {attempt.suite}",
        lambda attempt: f"domain {attempt.domain}",
        lambda attempt: f"level {attempt.level}",
    )
    for kind in kinds:
        members: defaultdict[str, list[Attempt]] = defaultdict(list)
        for attempt in found["all"]:
            members[kind(attempt)].append(attempt)
        if len(members) > 1:
            found.update(sorted(members.items()))
    return found


def by_task(attempts: Iterable[Attempt]) -> dict[str, list[Attempt]]:
    """Group attempts without errors by task."""
    found: defaultdict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if not attempt.is_error:
            found[attempt.task_id].append(attempt)
    return dict(found)


def _row(group: str, attempts: Sequence[Attempt]) -> SummaryRow:
    tasks = by_task(attempts)
    all_attempts = defaultdict(list)
    for attempt in attempts:
        all_attempts[attempt.task_id].append(attempt.succeeded)
    scores = [
        np.mean([attempt.score for attempt in members if attempt.score is not None]) for members in tasks.values()
    ]
    return SummaryRow(
        group=group,
        task_count=len(tasks),
        attempt_count=len(list(chain.from_iterable(tasks.values()))),
        success=success_rate([[one.succeeded for one in members] for members in tasks.values()]) if tasks else None,
        score=mean_rate(np.array(scores)) if tasks else None,
        error_count=sum(attempt.is_error for attempt in attempts),
        success_with_lost=success_rate(list(all_attempts.values())) if all_attempts else None,
    )
