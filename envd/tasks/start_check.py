"""Reject a start that is already solved: doing nothing would score 1."""

import logging

from envd.base.errors import EvaluatorFailed, SetupFailed
from envd.guest.desktop import Desktop
from envd.tasks.checkers.answers import AgentAnswer
from envd.tasks.checkers.cua_gym import CuaGymCheck
from envd.tasks.checkers.evaluate import evaluate
from envd.tasks.checkers.osworld import OsworldEvaluator
from envd.tasks.checkers.programs import Command
from envd.tasks.checkers.session import OnScreen
from envd.tasks.checkers.union import leaves
from envd.tasks.judging import Judge
from envd.tasks.model import Task

logger = logging.getLogger(__name__)

#: A command and OSWorld's `postconfig` may change the guest, an accessibility tree takes seconds in an emulated guest,
#: and without an agent no answer exists. A bundle's `gt` must not reach the guest before the agent has ended.
_SKIPPED = (AgentAnswer, Command, CuaGymCheck, OnScreen, OsworldEvaluator)


async def require_unsolved(task: Task, desktop: Desktop, *, timeout_s: float, judge: Judge) -> None:
    """Run a task's checkers after its setup, unless one of them is slow or may change the guest.

    Raises:
        SetupFailed: The start scores 1.
        MachineLost: The machine is gone.
    """
    if task.checker is None or any(isinstance(checker, _SKIPPED) for checker in leaves(task.checker)):
        return
    try:
        evaluation = await evaluate(task, desktop, last_action=None, timeout_s=timeout_s, judge=judge)
    except EvaluatorFailed as error:
        # The evaluation of the episode reports it if it persists.
        logger.warning("task %s: its start could not be checked: %s", task.task_id, error)
        return
    if evaluation.score >= 1.0:
        found = "; ".join(f"{check.name}: {check.evidence}" for check in evaluation.checks)
        raise SetupFailed(f"task {task.task_id}: already solved after its setup, {found[:500]}; fix setup or checker")
