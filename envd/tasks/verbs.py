"""Setup verbs: what is done to a guest before an agent gets it. Each performs itself, on a `GuestSetup`.

Every verb may be performed twice: it leads to the same state, or a guard skips it the second time.
"""

import asyncio
import base64
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Self, Union

from pydantic import Field, model_validator

from envd.tasks.fields import Argv, AssetRef, Base64, Encoding, GuestPath, Model, Sha256, WindowMatch
from envd.tasks.systems import task_systems
from envd.tasks.verb_base import SessionVerb, SetupBase

if TYPE_CHECKING:
    # Importing it takes half a second, and task data is also read where no desktop exists.
    from envd.tasks.guest_setup import GuestSetup

Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$", max_length=8192)]


class WriteSetupFile(SetupBase):
    """Write a file as the user and create its parents. Idempotent: replaces an existing file."""

    kind: Literal["write_file"]
    path: GuestPath
    text: str | None = None
    base64: Base64 | None = None
    encoding: Encoding = "utf-8"
    """Encoding of `text`; `utf-8-sig` and `utf-16` write a byte order mark."""
    newline: Literal["lf", "crlf"] = "lf"
    """Replacement for each line feed in `text`."""

    @model_validator(mode="after")
    def _one_encodable_content(self) -> Self:
        if (self.text is None) == (self.base64 is None):
            raise ValueError("give either text or base64")
        try:
            self.data()
        except (UnicodeEncodeError, LookupError) as error:
            raise ValueError(f"text cannot be written in {self.encoding}: {error}") from error
        return self

    def data(self) -> bytes:
        if self.text is None:
            return base64.b64decode(self.base64 or "")
        text = self.text.replace("\n", "\r\n") if self.newline == "crlf" else self.text
        return text.encode(self.encoding)

    async def perform(self, guest: "GuestSetup") -> None:
        await guest.write(self.path, self.data())


class MakeDirectory(SetupBase):
    """Create a directory and its parents as the user. Idempotent: keeps an existing one."""

    kind: Literal["make_directory"]
    path: GuestPath

    async def perform(self, guest: "GuestSetup") -> None:
        await guest.make_directory(self.path)


class Remove(SetupBase):
    """Remove a file, or a directory with its content. Idempotent: a missing path is not an error."""

    kind: Literal["remove"]
    path: GuestPath

    async def perform(self, guest: "GuestSetup") -> None:
        await guest.remove(self.path)


class Asset(Model):
    """A file that `envd tasks fetch` downloads ahead of time, copied into the guest from the host's cache."""

    url: Url
    path: GuestPath
    sha256: Sha256 | None = None
    """Digest of its bytes. If not given, the first fetch fixes it for this host."""


class Download(SetupBase):
    """Copy fetched files into the guest, as the user. Downloads nothing itself. Idempotent: replaces the files."""

    kind: Literal["download"]
    files: Annotated[tuple[Asset, ...], Field(min_length=1)]

    def downloads(self) -> Iterator[AssetRef]:
        yield from (AssetRef(file.url, file.sha256 or "") for file in self.files)

    async def perform(self, guest: "GuestSetup") -> None:
        for asset in self.files:
            await guest.write(asset.path, await guest.resources.asset(AssetRef(asset.url, asset.sha256 or "")))


class HostFile(Model):
    """A file that comes with a task file."""

    local_path: str
    """A path relative to the task file's directory, and below it; absolute in a loaded task."""
    path: GuestPath


class UploadFile(SetupBase):
    """Copy files that come with the tasks into the guest, as the user. Idempotent: replaces the files."""

    kind: Literal["upload_file"]
    files: Annotated[tuple[HostFile, ...], Field(min_length=1)]

    async def perform(self, guest: "GuestSetup") -> None:
        for file in self.files:
            await guest.write(file.path, await guest.resources.host_file(file.local_path))


class Launch(SessionVerb):
    """Start a program and wait for its window. Guarded: skipped if such a window is open."""

    kind: Literal["launch"]
    argv: Argv
    window: WindowMatch

    async def perform(self, guest: "GuestSetup") -> None:
        await guest.open_window(self.argv, self.window)


class StartMcpServer(SessionVerb):
    """Start an MCP server (stdio) for the agent's tool `mcp`. Idempotent: one that runs is started again."""

    kind: Literal["start_mcp_server"]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,30}$")]
    argv: Argv

    async def perform(self, guest: "GuestSetup") -> None:
        await guest.desktop.start_mcp_server(self.name, self.argv)


class Open(SessionVerb):
    """Open a file in a program and wait for its window. Guarded: skipped if such a window is open."""

    kind: Literal["open"]
    path: GuestPath
    program: str = "mousepad"
    window: WindowMatch | None = None
    """The window to wait for; by default one with the file's name in its title."""

    def awaited_window(self) -> WindowMatch:
        name = re.split(r"[\\/]", self.path.rstrip("\\/"))[-1]
        return self.window or WindowMatch(title=re.escape(name))

    async def perform(self, guest: "GuestSetup") -> None:
        await guest.open_window((self.program, self.path), self.awaited_window())


class Execute(SetupBase):
    """Run a command to its end. Guard it by `unless` if running it twice differs from once."""

    kind: Literal["execute"]
    argv: Argv
    as_root: bool = False
    expect_exit_code: int | None = 0
    """None accepts any exit code."""
    unless: tuple[str, ...] = ()
    """A command that is run first, in the same way: exit code 0 means that the work is already done."""

    async def perform(self, guest: "GuestSetup") -> None:
        if self.unless:
            unless = guest.filled_in(self.unless)
            guard = await guest.desktop.run(unless, timeout_s=guest.limit_s, as_root=self.as_root)
            if guard.exit_code == 0:
                return
        await guest.run(
            guest.filled_in(self.argv),
            as_root=self.as_root,
            expect_exit_code=self.expect_exit_code,
            shown=" ".join(self.argv),
        )


class WaitCommand(SetupBase):
    """Run a command repeatedly until one of the given conditions holds."""

    kind: Literal["wait_command"]
    argv: Argv
    as_root: bool = False
    exit_code: int | None = None
    stdout: str = ""
    """Expected somewhere in its output."""
    stderr: str = ""

    @model_validator(mode="after")
    def _has_a_condition(self) -> Self:
        if self.exit_code is None and not self.stdout and not self.stderr:
            raise ValueError("give exit_code, stdout or stderr")
        return self

    async def perform(self, guest: "GuestSetup") -> None:
        argv = guest.filled_in(self.argv)
        while True:
            result = await guest.desktop.run(argv, timeout_s=guest.limit_s, as_root=self.as_root)
            stdout, stderr = (stream.decode(errors="replace") for stream in (result.stdout, result.stderr))
            if (
                result.exit_code == self.exit_code
                or (self.stdout and self.stdout in stdout)
                or (self.stderr and self.stderr in stderr)
            ):
                return
            output = (stderr or stdout).strip()[-200:] or "no output"
            guest.activity = f"running {' '.join(self.argv)}; last exit code {result.exit_code}: {output}"
            await asyncio.sleep(guest.poll_s)


class Sleep(SetupBase):
    """Let the guest run for a while. Prefer to wait for a window or a command if one shows the progress."""

    kind: Literal["sleep"]
    duration_s: Annotated[float, Field(ge=0, le=120, allow_inf_nan=False)]

    async def perform(self, guest: "GuestSetup") -> None:  # noqa: ARG002 -- acts on no guest
        await asyncio.sleep(self.duration_s)


class WaitWindow(SetupBase):
    """Wait until a window is open."""

    kind: Literal["wait_window"]
    window: WindowMatch

    async def perform(self, guest: "GuestSetup") -> None:
        await guest.wait_window(self.window)


class ActivateWindow(SessionVerb):
    """Wait until a window is open, then raise it and give it the keyboard focus."""

    kind: Literal["activate_window"]
    window: WindowMatch

    async def perform(self, guest: "GuestSetup") -> None:
        window = await guest.wait_window(self.window)
        await guest.run(("wmctrl", "-i", "-a", window.window_id))


class CloseWindow(SessionVerb):
    """Ask a window to close and wait until it has closed. Guarded: skipped if no such window is open."""

    kind: Literal["close_window"]
    window: WindowMatch

    async def perform(self, guest: "GuestSetup") -> None:
        await guest.close_window(self.window)


class ChangeWallpaper(SessionVerb):
    """Show a picture of the guest behind the windows. Idempotent."""

    kind: Literal["change_wallpaper"]
    path: GuestPath

    async def perform(self, guest: "GuestSetup") -> None:
        await guest.desktop.change_wallpaper(self.path, timeout_s=guest.limit_s)


class SetClipboard(SessionVerb):
    """Put text on the clipboard."""

    kind: Literal["set_clipboard"]
    text: str

    async def perform(self, guest: "GuestSetup") -> None:
        # xclip keeps running to serve the text; with our pipes open, the command would seem never to end.
        script = "exec xclip -selection clipboard >/dev/null 2>&1"
        await guest.run(("sh", "-c", script), stdin=self.text.encode())


_OwnVerb = (
    WriteSetupFile
    | MakeDirectory
    | Remove
    | Download
    | UploadFile
    | Launch
    | Open
    | StartMcpServer
    | Execute
    | WaitCommand
    | Sleep
    | WaitWindow
    | ActivateWindow
    | CloseWindow
    | ChangeWallpaper
    | SetClipboard
)
if TYPE_CHECKING:
    SetupVerb = SetupBase
else:
    _verbs = Union[_OwnVerb, *(system.verb for system in task_systems())]
    SetupVerb = Annotated[_verbs, Field(discriminator="kind")]
