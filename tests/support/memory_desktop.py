"""A desktop of files, windows and programs in memory, for tests of setups and checkers.

Use the fake hypervisor for a desktop with a screen and input.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from cuaenv.results import CommandResult
from envd.base.errors import GuestError, GuestUnresponsive
from envd.desktop.desktop import Desktop
from envd.drawn.files import DrawnFiles
from envd.drawn.programs import Programs
from envd.tasks.queries import OpenWindow


class MemoryDesktop(Desktop):
    """Runs the fake guest's programs. Tests set windows and command results."""

    def __init__(self, *, can_freeze: bool = True) -> None:
        """Create a desktop with an empty home directory and no windows, and processes that can be frozen or not."""
        self._can_be_frozen = can_freeze
        self.files = DrawnFiles()
        self.windows: list[OpenWindow] = []
        """Windows that the window manager lists, the active one last."""
        self.opens: dict[tuple[str, ...], OpenWindow] = {}
        """Windows opened by launching a command."""
        self.answers: dict[tuple[str, ...], CommandResult | Exception] = {}
        """Results of commands by their first words, in place of the fake programs."""
        self.launched: list[tuple[str, ...]] = []
        self.ran: list[tuple[str, ...]] = []
        self.rests = 0
        """Number of calls of `rest`."""
        self.wallpaper = ""
        """Path of the wallpaper."""
        self.is_frozen = False
        self.ran_frozen: list[tuple[str, ...]] = []
        """Those of `ran` that ran while the session was frozen."""
        self._programs = Programs(self.files, windows=lambda: self)

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        as_root: bool = False,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """See `Desktop`."""
        if list(argv[3:4]) == ["run-as-user"]:
            argv = argv[4:]
        self.ran.append(tuple(argv))
        if self.is_frozen:
            self.ran_frozen.append(tuple(argv))
        for words, answer in self.answers.items():
            if tuple(argv[: len(words)]) == words:
                if isinstance(answer, Exception):
                    raise answer
                return answer
        try:
            outcome = self._programs.run(argv, stdin=stdin)
        except FileNotFoundError as error:
            raise GuestError(f"{argv[0]}: no such program") from error
        return CommandResult(exit_code=outcome.exit_code, stdout=outcome.stdout, stderr=outcome.stderr)

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """See `Desktop`."""
        if not self._can_be_frozen:
            raise GuestUnresponsive("a process does not stop")
        self.is_frozen = True
        try:
            yield
        finally:
            self.is_frozen = False

    async def launch(self, argv: Sequence[str], *, timeout_s: float = 30.0) -> None:
        """See `Desktop`."""
        self.launched.append(tuple(argv))
        if (window := self.opens.get(tuple(argv))) is not None:
            self.windows.append(window)

    async def wait_idle(self, *, max_wait_s: float) -> None:
        """See `Desktop`."""
        self.rests += 1

    @property
    def screen_size(self) -> tuple[int, int]:
        """See `Desktop`."""
        return (1280, 800)

    async def change_wallpaper(self, path: str, *, timeout_s: float = 30.0) -> None:
        """See `Desktop`."""
        if path not in self.files:
            raise GuestError(f"File not found: {path}")
        self.wallpaper = path

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes | None:
        """See `Desktop`."""
        return self.files.get(path)

    async def write_file(self, path: str, data: bytes) -> None:
        """See `Desktop`."""
        self.files[path] = data

    # The fake programs' window manager

    def list_windows(self) -> list[OpenWindow]:
        """Return open windows, the active one last."""
        return self.windows

    def activate_window(self, title: str) -> bool:
        """Raise a window by id."""
        chosen = [window for window in self.windows if int(window.window_id, 16) == int(title, 16)]
        self.windows = [window for window in self.windows if window not in chosen] + chosen
        return bool(chosen)

    def close_window(self, title: str) -> bool:
        """Close a window by id."""
        chosen = [window for window in self.windows if int(window.window_id, 16) == int(title, 16)]
        self.windows = [window for window in self.windows if window not in chosen]
        return bool(chosen)
