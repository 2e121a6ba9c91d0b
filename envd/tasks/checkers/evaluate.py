"""Score a task on the current state of its guest.

Incomplete work of the agent scores below 1, with the reason in the evidence. A checker that cannot inspect the guest
raises, and its episode has no score.
"""

import asyncio

from cuaenv.actions import Done, Fail

from envd.base.errors import EvaluatorFailed, GuestError, GuestUnresponsive
from envd.guest.desktop import Desktop
from envd.tasks.checkers.inspector import GuestInspector
from envd.tasks.checkers.union import AllOf, AnyChecker, AnyLeafChecker, AnyOf, Weighted, combine, parts_of
from envd.tasks.evaluation import CheckResult, Evaluation
from envd.tasks.judging import Judge, judge_directly
from envd.tasks.model import Task
from envd.tasks.osworld import OsworldBridge
from envd.tasks.text import CheckOutcome

_EVIDENCE_CHARS = 2000


class _InspectionError(Exception):
    """A checker could not inspect the guest."""


async def evaluate(
    task: Task,
    desktop: Desktop,
    *,
    last_action: Done | Fail | None,
    timeout_s: float,
    osworld: OsworldBridge | None = None,
    judge: Judge = judge_directly,
) -> Evaluation:
    """Score a task. Read-only: the guest does not change, unless a `command` checker's own command changes it.

    Args:
        task: The task.
        desktop: The guest.
        last_action: How the agent ended the episode; None if it did not.
        timeout_s: Limit for all checkers together, in seconds.
        osworld: Runs OSWorld's evaluators; None if OSWorld is not installed.
        judge: Runs the pure part of each checker on what the guest returned; a daemon passes `JudgeWorkers`.

    Raises:
        EvaluatorFailed: A checker could not inspect the guest, or not in time. The episode has no score.
        MachineLost: The machine is gone. The episode has no score.
    """
    if task.checker is None:
        return judge_infeasible(last_action)
    if isinstance(last_action, Fail):
        return _single("feasible", CheckOutcome(0.0, "the agent declared the task infeasible, but it is feasible"))
    inspector = GuestInspector(desktop=desktop, os=task.os, last_action=last_action, osworld=osworld, judge=judge)
    try:
        async with asyncio.timeout(timeout_s):
            return await _evaluate(task.checker, inspector)
    except TimeoutError as error:
        raise EvaluatorFailed(f"task {task.task_id}: evaluation exceeded its limit of {timeout_s:g} s") from error
    except _InspectionError as error:
        raise EvaluatorFailed(f"task {task.task_id}: {error}") from error


def judge_infeasible(last_action: Done | Fail | None) -> Evaluation:
    """Score an infeasible task: 1 for declaring it infeasible, 0 for anything else."""
    if isinstance(last_action, Fail):
        return _single("infeasible", CheckOutcome(1.0, "the agent declared the task infeasible, which is right"))
    ending = "declared the task done" if isinstance(last_action, Done) else "did not end the episode"
    return _single("infeasible", CheckOutcome(0.0, f"the agent {ending}, but the task is infeasible"))


async def _evaluate(checker: AnyChecker, inspector: GuestInspector) -> Evaluation:
    """Score a checker and all its parts: none is skipped, because each yields evidence."""
    if isinstance(checker, AllOf | AnyOf | Weighted):
        parts = [await _evaluate(part, inspector) for part in parts_of(checker)]
        checks = tuple(check for part in parts for check in part.checks)
        return Evaluation(score=combine(checker, [part.score for part in parts]), checks=checks)
    name = checker.name or describe(checker)
    try:
        return _single(name, await checker.check(inspector))
    except (GuestError, GuestUnresponsive) as error:
        raise _InspectionError(f"check {name!r} failed: {error}") from error


def describe(checker: AnyLeafChecker) -> str:
    """Return a check's default name: its kind and subject."""
    return f"{checker.kind} {checker.subject}".strip()


def _single(name: str, outcome: CheckOutcome) -> Evaluation:
    check = CheckResult(name=name, score=outcome.score, evidence=outcome.evidence[:_EVIDENCE_CHARS])
    return Evaluation(score=outcome.score, checks=(check,))
