"""Replay scripted steps as a careful person would: wait for the screen to respond before the next input.

A busy emulated guest may need seconds to open a dialog. Meanwhile its screen is quiet, so it counts as settled, and
keys typed then would go to the wrong window. A response may also arrive in parts, and a late part must not be taken for
the response to the next input: a response is complete when two successive frames are equal. A step that ends with
conditions has had its response when they hold.

Decides only when to continue; the caller performs the steps.
"""

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta

from cuaenv.actions import Done, Fail, ToolAction, Wait
from cuaenv.results import CommandResult
from envd.base.errors import GuestError
from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.programs import count_processes
from envd.tasks.oracle import Input, OracleAction, WaitFor, split_step
from envd.tasks.queries import (
    Query,
    describe_windows,
    file_query,
    find_window,
    parse_windows,
    process_query,
    window_query,
)
from envd.tasks.text import quote

#: Extra waits, in seconds, for a response before the next input is sent anyway: a minute in total, because an editor
#: has taken 45 s to open with more busy guests than the host has CPUs.
PATIENCE_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
#: Most frames to compare after a response, and the wait before each.
_MAX_COMPARISONS = 5
_COMPARISON_WAIT = (Wait(timedelta(seconds=0.5)),)


async def replay(
    steps: Sequence[tuple[OracleAction, ...]],
    *,
    first_frame_id: str,
    step: Callable[[tuple[Input, ...]], Awaitable[str]],
    wait_for: Callable[[WaitFor], Awaitable[str]],
    patience_s: Sequence[float] = PATIENCE_S,
    is_idle: Callable[[], bool] = lambda: False,
) -> None:
    """Play steps, each after the screen has responded to the previous one. Raises: whatever `step` raises.

    Args:
        steps: The actions of each step, such as `Task.oracle`.
        step: Performs the actions of one step and returns the id of the resulting frame. Also called with single waits
            while the screen has not responded, or not completely.
        wait_for: Returns the frame id as soon as a condition holds.
        patience_s: Lengths of the waits for a response; empty for desktops that respond immediately and completely.
        is_idle: Returns whether the guest did nothing during the last waits, so that there will be no response.
    """
    frame_id = first_frame_id
    for each in steps:
        actions, conditions = split_step(each)
        before, frame_id = frame_id, await step(actions)
        for condition in conditions:
            frame_id = await wait_for(condition)
        if not patience_s or not _expects_a_response(actions):
            continue
        for wait_s in patience_s if not conditions else ():
            if frame_id != before or is_idle():
                break
            frame_id = await step((Wait(timedelta(seconds=wait_s)),))
        for _ in range(_MAX_COMPARISONS):
            if frame_id == before:
                break
            before, frame_id = frame_id, await step(_COMPARISON_WAIT)


def _expects_a_response(actions: tuple[Input, ...]) -> bool:
    """Whether the agent continues after input that should change the screen. Tools respond without it."""
    is_end = isinstance(actions[-1], Done | Fail)
    return not is_end and any(not isinstance(action, Wait | ToolAction) for action in actions)


def query_of(condition: WaitFor, os: GuestOs) -> Query:
    """Return the command whose result shows whether a condition holds."""
    if condition.window is not None:
        return window_query(os)
    return process_query(os) if condition.file is None else file_query(condition.file, os)


def unmet(condition: WaitFor, result: CommandResult) -> str:
    """Return why a condition does not hold, by the result of its query; empty if it holds."""
    if result.exit_code:
        return f"exit code {result.exit_code}: {quote(result.stderr)}"
    try:
        is_there, found = _look(condition, result.stdout)
    except GuestError as error:
        return str(error)
    return "" if is_there != condition.absent else found


def _look(condition: WaitFor, output: bytes) -> tuple[bool, str]:
    text = output.decode(errors="replace")
    if condition.window is not None:
        windows = parse_windows(text)
        return find_window(windows, condition.window) is not None, f"open: {describe_windows(windows)}"
    if condition.file is not None:
        size = text.strip()
        # A program creates a file before it writes it. A directory has no size.
        return size == "other" or (size.isdecimal() and int(size) > 0), f"{condition.file}: {quote(size)}"
    count = count_processes(output, condition.process or "")
    return count > 0, f"{count} processes named {condition.process} are running"
