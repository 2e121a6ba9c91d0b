"""Bring a guest to a task's initial state: perform its setup verbs in order, each within its own time limit.

A verb waits for the effect of what it started (a window in the window manager's list, an exit code), never for a fixed
time. The first verb that fails ends the setup. Afterwards the guest must become idle: on a slow guest a window is
listed long before its content is drawn.
"""

import asyncio

from envd.base.errors import GuestError, GuestUnresponsive, SetupFailed
from envd.desktop.desktop import Desktop
from envd.tasks.evaluate import remember_start, require_unsolved
from envd.tasks.guest_setup import GuestSetup
from envd.tasks.model import Task
from envd.tasks.setup_resources import SetupResources

#: Between two queries of the window list; a query takes tens of milliseconds of the guest under TCG.
POLL_S = 0.25
#: How long to wait for an idle guest after its setup. One that plays a film never becomes idle.
_REST_PATIENCE_S = 20.0

_NO_RESOURCES = SetupResources()


async def run_setup(
    task: Task, desktop: Desktop, *, timeout_s: float, resources: SetupResources = _NO_RESOURCES, poll_s: float = POLL_S
) -> None:
    """Perform all setup verbs of a task. On failure the guest's state is undefined: destroy it.

    Args:
        timeout_s: Limit for the whole setup, in seconds; each verb also has its own.

    Raises:
        SetupFailed: A verb failed or ran out of time, and the message names its index, kind and cause; or the task is
            already solved.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    for index, verb in enumerate(task.setup):
        left_s = deadline_s - asyncio.get_running_loop().time()
        limit_s = min(verb.timeout_s, left_s)
        where = f"task {task.task_id}: setup[{index}] {verb.kind}"
        guest = GuestSetup(desktop=desktop, os=task.os, resources=resources, limit_s=max(limit_s, 0.001), poll_s=poll_s)
        try:
            async with asyncio.timeout(limit_s):
                await verb.perform(guest)
        except TimeoutError as error:
            limit = (
                f"its limit of {verb.timeout_s:g} s"
                if verb.timeout_s <= left_s
                else f"the setup limit of {timeout_s:g} s"
            )
            activity = f" {guest.activity}" if guest.activity else ""
            raise SetupFailed(f"{where} exceeded {limit}{activity}") from error
        except (GuestError, GuestUnresponsive) as error:
            raise SetupFailed(f"{where} failed: {error}") from error
    await remember_start(task, desktop)
    if task.setup:
        left_s = deadline_s - asyncio.get_running_loop().time()
        await require_unsolved(task, desktop, timeout_s=max(left_s, 0.001), judge=resources.judge)
    left_s = deadline_s - asyncio.get_running_loop().time()
    await desktop.wait_idle(max_wait_s=min(_REST_PATIENCE_S, left_s))
