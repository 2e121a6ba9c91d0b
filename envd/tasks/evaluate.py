"""Score a task on the current state of its guest.

Incomplete work of the agent scores below 1, with the reason in the evidence. A checker that cannot inspect the guest
raises, and its episode has no score.
"""

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

from cuaenv.actions import Done, Fail
from envd.base.clock import running_timeout
from envd.base.errors import EvaluatorFailed, GuestError, GuestUnresponsive, SetupFailed, TooLarge
from envd.desktop.desktop import Desktop
from envd.tasks.bridge import TaskBridge
from envd.tasks.checker_union import AllOf, AnyChecker, AnyLeafChecker, AnyOf, Weighted, combine, leaves, parts_of
from envd.tasks.checkers.base import GuestInspector, Judge, judge_directly
from envd.tasks.checkers.programs import PoweredOff
from envd.tasks.model import Task
from envd.tasks.text import CheckOutcome, CheckResult, ScoreResult

logger = logging.getLogger(__name__)

_EVIDENCE_CHARS = 2000


async def evaluate(
    task: Task,
    desktop: Desktop,
    *,
    last_action: Done | Fail | None,
    timeout_s: float,
    bridge: TaskBridge | None = None,
    judge: Judge = judge_directly,
    freezes: bool = True,
) -> ScoreResult:
    """Score a task. Read-only: the guest does not change, unless a `command` checker's own command changes it.

    What needs the running session is checked first. All processes of the agent are stopped while the rest is checked,
    and continue afterwards.

    Args:
        last_action: How the agent ended the episode; None if it did not.
        timeout_s: Limit for all checkers together, in seconds.
        bridge: Runs the evaluators of a foreign suite (OSWorld); None if it is not installed.
        judge: Runs the pure part of each checker on what the guest returned; a daemon passes `JudgeWorkers`.
        freezes: Whether the agent has acted and may still act: only then its processes are stopped.

    Raises:
        EvaluatorFailed: A checker could not inspect the guest, or not in time. The episode has no score.
    """
    if task.checker is None:
        return judge_infeasible(last_action)
    if isinstance(last_action, Fail):
        return _single("feasible", CheckOutcome(0.0, "the agent declared the task infeasible, but it is feasible"))
    inspector = GuestInspector(desktop=desktop, os=task.os, last_action=last_action, bridge=bridge, judge=judge)
    try:
        async with running_timeout(timeout_s):
            return _combined(task.checker, await _check_all(task, task.checker, inspector, freezes=freezes))
    except TimeoutError as error:
        raise EvaluatorFailed(f"task {task.task_id}: evaluation exceeded its limit of {timeout_s:g} s") from error


async def remember_start(task: Task, desktop: Desktop) -> None:
    """Record what checkers compare the end with. Raises: SetupFailed, MachineLost."""
    for check in leaves(task.checker) if task.checker else ():
        try:
            await check.remember_start(desktop)
        except (GuestError, GuestUnresponsive) as error:
            raise SetupFailed(f"task {task.task_id}: {error}") from error


async def require_unsolved(task: Task, desktop: Desktop, *, timeout_s: float, judge: Judge) -> None:
    """Reject a start that is already solved, so that doing nothing would score 1.

    Tasks with a checker that may not run before the start are not checked.

    Raises:
        SetupFailed: The start scores 1.
    """
    if task.checker is None or not all(checker.runs_before_start for checker in leaves(task.checker)):
        return
    try:
        evaluation = await evaluate(task, desktop, last_action=None, timeout_s=timeout_s, judge=judge, freezes=False)
    except EvaluatorFailed as error:
        # The evaluation of the episode reports it if it persists.
        logger.warning("task %s: its start could not be checked: %s", task.task_id, error)
        return
    if evaluation.score >= 1.0:
        found = "; ".join(f"{check.name}: {check.evidence}" for check in evaluation.checks)
        raise SetupFailed(f"task {task.task_id}: already solved after its setup, {found[:500]}; fix setup or checker")


def judge_ended(task: Task, cause: str, reason: str = "") -> ScoreResult:
    """Score a task whose guest ended itself and left no machine: 1 if that was its goal, and 0 otherwise.

    Args:
        cause: How the guest ended, see `envd.base.losses.Loss`.
        reason: What was found, if there is more to say.
    """
    evidence = f"the guest ended itself: {cause}{reason and ': '}{reason}"
    if isinstance(task.checker, PoweredOff):
        return _single(describe(task.checker), CheckOutcome(float(cause == "POWER_OFF"), evidence))
    return _single("guest", CheckOutcome(0.0, evidence))


def judge_infeasible(last_action: Done | Fail | None) -> ScoreResult:
    """Score an infeasible task: 1 for declaring it infeasible, 0 for anything else."""
    if isinstance(last_action, Fail):
        return _single("infeasible", CheckOutcome(1.0, "the agent declared the task infeasible, which is right"))
    ending = "declared the task done" if isinstance(last_action, Done) else "did not end the episode"
    return _single("infeasible", CheckOutcome(0.0, f"the agent {ending}, but the task is infeasible"))


async def _check_all(
    task: Task, checker: AnyChecker, inspector: GuestInspector, *, freezes: bool
) -> dict[int, ScoreResult]:
    """Return the result of each leaf by its `id`: none is skipped, as each yields evidence. Raises: EvaluatorFailed."""
    results: dict[int, ScoreResult] = {}
    rest: list[AnyLeafChecker] = []
    for leaf in leaves(checker):
        if leaf.asks_session(inspector.os):
            results[id(leaf)] = await _check(task, leaf, inspector)
        else:
            rest.append(leaf)
    if rest:
        async with AsyncExitStack() as stack:
            if freezes:
                try:
                    await stack.enter_async_context(inspector.desktop.frozen())
                except (GuestError, GuestUnresponsive) as error:
                    raise EvaluatorFailed(
                        f"task {task.task_id}: the agent's processes could not be stopped: {error}"
                    ) from error
            for leaf in rest:
                results[id(leaf)] = await _check(task, leaf, inspector)
    return results


async def _check(task: Task, leaf: AnyLeafChecker, inspector: GuestInspector) -> ScoreResult:
    name = leaf.name or describe(leaf)
    try:
        return _single(name, await leaf.check(inspector))
    except TooLarge as error:
        return _single(name, CheckOutcome(0.0, str(error)))
    except (GuestError, GuestUnresponsive) as error:
        raise EvaluatorFailed(f"task {task.task_id}: check {name!r} failed: {error}") from error


def _combined(checker: AnyChecker, results: Mapping[int, ScoreResult]) -> ScoreResult:
    """Return the score of a checker from the results of its leaves."""
    if not isinstance(checker, AllOf | AnyOf | Weighted):
        return results[id(checker)]
    parts = [_combined(part, results) for part in parts_of(checker)]
    checks = tuple(check for part in parts for check in part.checks)
    return ScoreResult(score=combine(checker, [part.score for part in parts]), checks=checks)


def describe(checker: AnyLeafChecker) -> str:
    """Return a check's default name: its kind and subject."""
    return f"{checker.kind} {checker.subject}".strip()


def _single(name: str, outcome: CheckOutcome) -> ScoreResult:
    parts = outcome.parts or (CheckResult(name=name, score=outcome.score, evidence=outcome.evidence),)
    checks = (replace(part, evidence=part.evidence[:_EVIDENCE_CHARS]) for part in parts)
    return ScoreResult(score=outcome.score, checks=tuple(checks))
