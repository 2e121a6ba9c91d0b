"""Bring a guest to a task's initial state: perform its setup verbs in order, each within its own time limit.

A verb waits for the effect of what it started (a window in the window manager's list, an exit code), never for a fixed
time. The first verb that fails ends the setup. Afterwards the guest must become idle: on a slow guest a window is
listed long before its content is drawn.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from envd.base.errors import GuestError, GuestUnresponsive, SetupFailed
from envd.desktop.desktop import Desktop
from envd.guests.powershell import Script, powershell
from envd.hypervisor.machine import GuestOs
from envd.tasks import open_computer
from envd.tasks.checkers.evaluate import remember_start, require_unsolved
from envd.tasks.cua_gym import ENVIRONMENT, RUN_SETUP, SETUP_COMMANDS, archive
from envd.tasks.fields import AssetRef, WindowMatch
from envd.tasks.model import Task
from envd.tasks.osworld import NOT_INSTALLED
from envd.tasks.queries import OpenWindow, describe_windows, find_window, list_windows
from envd.tasks.setup_resources import SetupResources
from envd.tasks.text import quote
from envd.tasks.verbs import (
    ActivateWindow,
    ChangeWallpaper,
    CloseWindow,
    CuaGymSetup,
    Download,
    Execute,
    Launch,
    MakeDirectory,
    Open,
    OpenComputerSetup,
    OsworldSetup,
    Remove,
    SetClipboard,
    SetupVerb,
    Sleep,
    StartMcpServer,
    UploadFile,
    WaitCommand,
    WaitWindow,
    WriteFile,
)

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
        runner = _VerbRunner(
            desktop=desktop, os=task.os, resources=resources, limit_s=max(limit_s, 0.001), poll_s=poll_s
        )
        try:
            async with asyncio.timeout(limit_s):
                await runner.perform(verb)
        except TimeoutError as error:
            limit = (
                f"its limit of {verb.timeout_s:g} s"
                if verb.timeout_s <= left_s
                else f"the setup limit of {timeout_s:g} s"
            )
            activity = f" {runner.activity}" if runner.activity else ""
            raise SetupFailed(f"{where} exceeded {limit}{activity}") from error
        except (GuestError, GuestUnresponsive) as error:
            raise SetupFailed(f"{where} failed: {error}") from error
    await remember_start(task, desktop)
    if task.setup:
        left_s = deadline_s - asyncio.get_running_loop().time()
        await require_unsolved(task, desktop, timeout_s=max(left_s, 0.001), judge=resources.judge)
    left_s = deadline_s - asyncio.get_running_loop().time()
    await desktop.wait_idle(max_wait_s=min(_REST_PATIENCE_S, left_s))


@dataclass(slots=True, kw_only=True)
class _VerbRunner:
    """Performs one verb. Every method may raise GuestError, GuestUnresponsive and MachineLost."""

    desktop: Desktop
    os: GuestOs
    resources: SetupResources
    limit_s: float
    poll_s: float
    activity: str = field(default="", init=False)
    """What it is doing, for the message when its time runs out."""

    async def perform(self, verb: SetupVerb) -> None:
        match verb:
            case WriteFile():
                await self._write(verb.path, verb.data())
            case Download():
                for asset in verb.files:
                    ref = AssetRef(asset.url, asset.sha256 or "")
                    await self._write(asset.path, await self.resources.asset(ref))
            case UploadFile():
                for file in verb.files:
                    await self._write(file.path, await self.resources.host_file(file.local_path))
            case MakeDirectory():
                await self._make_directory(verb.path)
            case Remove():
                await self._remove(verb.path)
            case Launch():
                await self._open(verb.argv, verb.window)
            case Open():
                await self._open((verb.program, verb.path), verb.awaited_window())
            case Execute():
                await self._execute(verb)
            case StartMcpServer(name=name, argv=argv):
                await self.desktop.start_mcp_server(name, argv)
            case WaitCommand():
                await self._wait_command(verb)
            case Sleep():
                await asyncio.sleep(verb.duration_s)
            case WaitWindow():
                await self._wait_window(verb.window)
            case ActivateWindow():
                window = await self._wait_window(verb.window)
                await self._run(("wmctrl", "-i", "-a", window.window_id))
            case CloseWindow():
                await self._close_window(verb.window)
            case ChangeWallpaper():
                await self.desktop.change_wallpaper(verb.path, timeout_s=self.limit_s)
            case SetClipboard():
                # xclip keeps running to serve the text; with our pipes open, the command would seem never to end.
                script = "exec xclip -selection clipboard >/dev/null 2>&1"
                await self._run(("sh", "-c", script), stdin=verb.text.encode())
            case OsworldSetup():
                if self.resources.osworld is None:
                    raise GuestError(NOT_INSTALLED)
                await self.resources.osworld.set_up(self.desktop, verb.steps, os=self.os, on_step=self._note_step)

            case CuaGymSetup():
                await self._set_up_bundle(verb)
            case OpenComputerSetup():
                await open_computer.set_up(self.desktop, verb.task, root=Path(verb.root), timeout_s=self.limit_s)

    async def _set_up_bundle(self, verb: CuaGymSetup) -> None:
        bundle = Path(verb.bundle)
        for argv, parts in SETUP_COMMANDS:
            try:
                content = await asyncio.to_thread(archive, bundle, parts)
            except (ValueError, OSError) as error:
                raise GuestError(f"bundle {bundle.name}: {error}") from error
            await self._run(argv, as_root=True, stdin=content)
        self.activity = "in setup.sh"
        env = {**ENVIRONMENT, "TASK_ID": bundle.name}
        result = await self.desktop.run(RUN_SETUP, timeout_s=self.limit_s, as_root=True, env=env)
        if result.exit_code:
            output = quote(result.stderr or result.stdout)
            raise GuestError(f"bundle {bundle.name}: setup.sh failed with exit code {result.exit_code}: {output}")

    def _note_step(self, step: str) -> None:
        self.activity = f"in {step}"

    # Files

    async def _write(self, path: str, data: bytes) -> None:
        if self.os is GuestOs.WINDOWS:
            await self._run(powershell(Script.MAKE_PARENT, path=path), as_root=True)
        await self.desktop.write_file(path, data)

    async def _make_directory(self, path: str) -> None:
        if self.os is GuestOs.WINDOWS:
            await self._run(powershell(Script.MAKE_DIRECTORY, path=path), as_root=True)
        else:
            await self._run(("mkdir", "-p", "--", path))

    async def _remove(self, path: str) -> None:
        if self.os is GuestOs.WINDOWS:
            await self._run(powershell(Script.REMOVE, path=path), as_root=True)
        else:
            await self._run(("rm", "-rf", "--", path))

    # Programs

    async def _execute(self, verb: Execute) -> None:
        if verb.unless:
            guard = await self.desktop.run(self._filled_in(verb.unless), timeout_s=self.limit_s, as_root=verb.as_root)
            if guard.exit_code == 0:
                return
        await self._run(
            self._filled_in(verb.argv),
            as_root=verb.as_root,
            expect_exit_code=verb.expect_exit_code,
            shown=" ".join(verb.argv),
        )

    async def _wait_command(self, verb: WaitCommand) -> None:
        argv = self._filled_in(verb.argv)
        while True:
            result = await self.desktop.run(argv, timeout_s=self.limit_s, as_root=verb.as_root)
            stdout, stderr = (stream.decode(errors="replace") for stream in (result.stdout, result.stderr))
            if (
                result.exit_code == verb.exit_code
                or (verb.stdout and verb.stdout in stdout)
                or (verb.stderr and verb.stderr in stderr)
            ):
                return
            output = (stderr or stdout).strip()[-200:] or "no output"
            self.activity = f"running {' '.join(verb.argv)}; last exit code {result.exit_code}: {output}"
            await asyncio.sleep(self.poll_s)

    async def _run(
        self,
        argv: tuple[str, ...],
        *,
        as_root: bool = False,
        stdin: bytes = b"",
        expect_exit_code: int | None = 0,
        shown: str = "",
    ) -> None:
        """Run a command; messages show `shown` instead of it, as it may contain a secret."""
        result = await self.desktop.run(argv, timeout_s=self.limit_s, as_root=as_root, stdin=stdin)
        if expect_exit_code is not None and result.exit_code != expect_exit_code:
            output = (result.stderr or result.stdout).decode(errors="replace").strip()[-500:]
            raise GuestError(
                f"{shown or ' '.join(argv)}: exit code {result.exit_code} instead of {expect_exit_code}:"
                f" {output or 'no output'}"
            )

    def _filled_in(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        return self.resources.fill_in(argv, screen_px=self.desktop.screen_size)

    # Windows

    async def _open(self, argv: tuple[str, ...], match: WindowMatch) -> None:
        if find_window(await self._list_windows(), match) is None:
            await self.desktop.launch(argv, timeout_s=self.limit_s)
        await self._wait_window(match)

    async def _close_window(self, match: WindowMatch) -> None:
        asked: set[str] = set()
        while (window := find_window(await self._list_windows(), match)) is not None:
            if window.window_id not in asked:
                asked.add(window.window_id)
                # wmctrl fails if the window has just closed; the next query shows whether it has.
                await self._run(("wmctrl", "-i", "-c", window.window_id), expect_exit_code=None)
            self.activity = f"waiting for the window {window.title!r} to close; it may ask about unsaved work"
            await asyncio.sleep(self.poll_s)

    async def _wait_window(self, match: WindowMatch) -> OpenWindow:
        """Return the window as soon as it is open; the caller's limit ends the wait."""
        while True:
            windows = await self._list_windows()
            found = find_window(windows, match)
            if found is not None:
                return found
            self.activity = f"waiting for a window with {match}; open now: {describe_windows(windows)}"
            await asyncio.sleep(self.poll_s)

    async def _list_windows(self) -> tuple[OpenWindow, ...]:
        """Return the open windows as soon as the window manager answers; it may have started only just now."""
        while True:
            try:
                return await list_windows(self.desktop, os=self.os, timeout_s=self.limit_s)
            except GuestError as error:
                self.activity = f"waiting for the window manager: {error}"
            await asyncio.sleep(self.poll_s)
