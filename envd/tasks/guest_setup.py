"""A guest that is being set up, as setup verbs act on it."""

import asyncio
from dataclasses import dataclass, field

from envd.base.errors import GuestError
from envd.desktop.desktop import Desktop
from envd.guests.powershell import Script, powershell
from envd.hypervisor.machine import GuestOs
from envd.tasks.fields import WindowMatch
from envd.tasks.queries import OpenWindow, describe_windows, find_window, list_windows
from envd.tasks.setup_resources import SetupResources


@dataclass(slots=True, kw_only=True)
class GuestSetup:
    """The guest of one verb. Every method may raise GuestError, GuestUnresponsive and MachineLost."""

    desktop: Desktop
    os: GuestOs
    resources: SetupResources
    limit_s: float
    """Limit of each command, in seconds."""
    poll_s: float
    """Between two queries while a verb waits for its effect, in seconds."""
    activity: str = field(default="", init=False)
    """What it is doing, for the message when its time runs out."""

    # Files

    async def write(self, path: str, data: bytes) -> None:
        """Write a file as the user, and create its parents."""
        if self.os is GuestOs.WINDOWS:
            await self.run(powershell(Script.MAKE_PARENT, path=path), as_root=True)
        await self.desktop.write_file(path, data)

    async def make_directory(self, path: str) -> None:
        """Create a directory and its parents as the user; keep an existing one."""
        if self.os is GuestOs.WINDOWS:
            await self.run(powershell(Script.MAKE_DIRECTORY, path=path), as_root=True)
        else:
            await self.run(("mkdir", "-p", "--", path))

    async def remove(self, path: str) -> None:
        """Remove a file, or a directory with its content; a missing path is not an error."""
        if self.os is GuestOs.WINDOWS:
            await self.run(powershell(Script.REMOVE, path=path), as_root=True)
        else:
            await self.run(("rm", "-rf", "--", path))

    # Programs

    async def run(
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

    def filled_in(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return a command with its placeholders replaced; see `SetupResources.fill_in`."""
        return self.resources.fill_in(argv, screen_px=self.desktop.screen_size)

    # Windows

    async def open_window(self, argv: tuple[str, ...], match: WindowMatch) -> None:
        """Start a program and wait for its window, unless such a window is open."""
        if find_window(await self._list_windows(), match) is None:
            await self.desktop.launch(argv, timeout_s=self.limit_s)
        await self.wait_window(match)

    async def close_window(self, match: WindowMatch) -> None:
        """Ask all such windows to close, and wait until they have."""
        asked: set[str] = set()
        while (window := find_window(await self._list_windows(), match)) is not None:
            if window.window_id not in asked:
                asked.add(window.window_id)
                # wmctrl fails if the window has just closed; the next query shows whether it has.
                await self.run(("wmctrl", "-i", "-c", window.window_id), expect_exit_code=None)
            self.activity = f"waiting for the window {window.title!r} to close; it may ask about unsaved work"
            await asyncio.sleep(self.poll_s)

    async def wait_window(self, match: WindowMatch) -> OpenWindow:
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
