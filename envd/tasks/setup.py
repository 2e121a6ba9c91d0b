"""Bring a guest to a task's starting state: perform its setup verbs, in order, each within its own limit.

What a verb started is waited for by its sign (a window in the window manager's list, an exit code), never by a
fixed time. The first verb that fails ends the setup.
"""

import asyncio

from envd.errors import GuestError, GuestUnresponsive, SetupFailed
from envd.guest.desktop import Desktop
from envd.tasks.fields import WindowMatch
from envd.tasks.model import Task
from envd.tasks.verbs import (
    ActivateWindow,
    Execute,
    Launch,
    MakeDirectory,
    Open,
    Remove,
    SetClipboard,
    SetupVerb,
    WaitWindow,
    WriteFile,
)
from envd.tasks.windows import OpenWindow, describe_windows, find_window, list_windows

#: Between two looks at the window list; one look costs the guest tens of milliseconds under TCG.
_POLL_S = 0.25


async def run_setup(task: Task, desktop: Desktop, *, timeout_s: float) -> None:
    """Perform all setup verbs of a task. On failure the guest is in no known state: destroy it.

    Args:
        task: What to prepare.
        desktop: Where.
        timeout_s: Limit for the whole setup, in seconds; each verb has its own besides.

    Raises:
        SetupFailed: A verb failed or ran out of time; the message names its index, kind and cause.
        MachineLost: The machine is gone.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    for index, verb in enumerate(task.setup):
        left_s = deadline_s - asyncio.get_running_loop().time()
        limit_s = min(verb.timeout_s, left_s)
        where = f"task {task.task_id}: setup[{index}] {verb.kind}"
        progress = _Progress()
        try:
            async with asyncio.timeout(limit_s):
                await _perform(verb, desktop, limit_s=max(limit_s, 0.001), progress=progress)
        except TimeoutError as error:
            limit = f"its limit of {verb.timeout_s:g} s" if verb.timeout_s <= left_s else f"setup's {timeout_s:g} s"
            raise SetupFailed(f"{where} exceeded {limit}{progress.suffix()}") from error
        except (GuestError, GuestUnresponsive) as error:
            raise SetupFailed(f"{where} failed: {error}") from error


class _Progress:
    """What a verb was waiting for, for the message when its time runs out."""

    def __init__(self) -> None:
        self.state = ""

    def suffix(self) -> str:
        return f" {self.state}" if self.state else ""


async def _perform(verb: SetupVerb, desktop: Desktop, *, limit_s: float, progress: _Progress) -> None:
    """Perform one verb. Raises: GuestError, GuestUnresponsive, MachineLost."""
    match verb:
        case WriteFile():
            await desktop.write_file(verb.path, verb.data())
        case MakeDirectory():
            await _run(desktop, ("mkdir", "-p", "--", verb.path), timeout_s=limit_s)
        case Remove():
            await _run(desktop, ("rm", "-rf", "--", verb.path), timeout_s=limit_s)
        case Launch():
            await _open(desktop, verb.argv, verb.window, timeout_s=limit_s, progress=progress)
        case Open():
            argv = (verb.program, verb.path)
            await _open(desktop, argv, verb.awaited_window(), timeout_s=limit_s, progress=progress)
        case Execute():
            if verb.unless:
                done = await desktop.run(verb.unless, timeout_s=limit_s, as_root=verb.as_root)
                if done.exit_code == 0:
                    return
            await _run(
                desktop, verb.argv, timeout_s=limit_s, as_root=verb.as_root, expect_exit_code=verb.expect_exit_code
            )
        case WaitWindow():
            await _wait_window(desktop, verb.window, timeout_s=limit_s, progress=progress)
        case ActivateWindow():
            window = await _wait_window(desktop, verb.window, timeout_s=limit_s, progress=progress)
            await _run(desktop, ("wmctrl", "-i", "-a", window.window_id), timeout_s=limit_s)
        case SetClipboard():
            # xclip stays behind to serve the text; with our pipes open it would look like a command that never ends.
            script = "exec xclip -selection clipboard >/dev/null 2>&1"
            await _run(desktop, ("sh", "-c", script), timeout_s=limit_s, stdin=verb.text.encode())


async def _open(
    desktop: Desktop, argv: tuple[str, ...], match: WindowMatch, *, timeout_s: float, progress: _Progress
) -> None:
    if find_window(await _ask_windows(desktop, timeout_s=timeout_s, progress=progress), match) is None:
        await desktop.launch(argv, timeout_s=timeout_s)
    await _wait_window(desktop, match, timeout_s=timeout_s, progress=progress)


async def _wait_window(desktop: Desktop, match: WindowMatch, *, timeout_s: float, progress: _Progress) -> OpenWindow:
    """Return the window as soon as it is open; the caller's limit ends the wait."""
    while True:
        windows = await _ask_windows(desktop, timeout_s=timeout_s, progress=progress)
        found = find_window(windows, match)
        if found is not None:
            return found
        progress.state = f"waiting for a window with {match}; open now: {describe_windows(windows)}"
        await asyncio.sleep(_POLL_S)


async def _ask_windows(desktop: Desktop, *, timeout_s: float, progress: _Progress) -> tuple[OpenWindow, ...]:
    """Return the open windows as soon as the window manager tells; it may have started only just now."""
    while True:
        try:
            return await list_windows(desktop, timeout_s=timeout_s)
        except GuestError as error:
            progress.state = f"waiting for the window manager: {error}"
        await asyncio.sleep(_POLL_S)


async def _run(
    desktop: Desktop,
    argv: tuple[str, ...],
    *,
    timeout_s: float,
    as_root: bool = False,
    stdin: bytes = b"",
    expect_exit_code: int | None = 0,
) -> None:
    result = await desktop.run(argv, timeout_s=timeout_s, as_root=as_root, stdin=stdin)
    if expect_exit_code is not None and result.exit_code != expect_exit_code:
        said = (result.stderr or result.stdout).decode(errors="replace").strip()[-500:]
        raise GuestError(
            f"{' '.join(argv)} ended with {result.exit_code} instead of {expect_exit_code}: {said or 'no output'}"
        )
