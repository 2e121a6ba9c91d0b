"""Setup verbs: what is done to a guest before an agent gets it. Data only; `envd.tasks.setup` performs it.

Every verb may be performed twice: it leads to the same state, or a guard skips it the second time.
"""

import base64
import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from envd.hypervisor.machine import GuestOs
from envd.tasks.fields import Argv, AssetRef, Base64, Encoding, GuestPath, Model, Sha256, Timeout, WindowMatch
from envd.tasks.osworld import asset_urls

Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$", max_length=8192)]


class SetupBase(Model):
    """Common fields of all setup verbs."""

    #: Guests that support the verb. A task for another system is rejected before any machine boots.
    systems: ClassVar[frozenset[GuestOs]] = frozenset(GuestOs)

    # The first start of a program takes up to a minute in an emulated guest on a busy host.
    timeout_s: Timeout = 180.0
    """Seconds after which the verb, and with it the reset, fails."""

    def downloads(self) -> Iterator[AssetRef]:
        """Yield the files that it needs from the host's cache."""
        yield from ()


class SessionVerb(SetupBase):
    """A verb that needs the windows of a user session, and so a guest with guestd."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.LINUX})


class WriteFile(SetupBase):
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


class MakeDirectory(SetupBase):
    """Create a directory and its parents as the user. Idempotent: keeps an existing one."""

    kind: Literal["make_directory"]
    path: GuestPath


class Remove(SetupBase):
    """Remove a file, or a directory with its content. Idempotent: a missing path is not an error."""

    kind: Literal["remove"]
    path: GuestPath


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


class HostFile(Model):
    """A file that comes with a task file."""

    local_path: str
    """A path relative to the task file's directory, and below it; absolute in a loaded task."""
    path: GuestPath


class UploadFile(SetupBase):
    """Copy files that come with the tasks into the guest, as the user. Idempotent: replaces the files."""

    kind: Literal["upload_file"]
    files: Annotated[tuple[HostFile, ...], Field(min_length=1)]


class Launch(SessionVerb):
    """Start a program and wait for its window. Guarded: skipped if such a window is open."""

    kind: Literal["launch"]
    argv: Argv
    window: WindowMatch


class StartMcpServer(SessionVerb):
    """Start an MCP server (stdio) for the agent's tool `mcp`. Idempotent: one that runs is started again."""

    kind: Literal["start_mcp_server"]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,30}$")]
    argv: Argv


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


class Execute(SetupBase):
    """Run a command to its end. Guard it by `unless` if running it twice differs from once."""

    kind: Literal["execute"]
    argv: Argv
    as_root: bool = False
    expect_exit_code: int | None = 0
    """None accepts any exit code."""
    unless: tuple[str, ...] = ()
    """A command that is run first, in the same way: exit code 0 means that the work is already done."""


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


class Sleep(SetupBase):
    """Let the guest run for a while. Prefer to wait for a window or a command if one shows the progress."""

    kind: Literal["sleep"]
    duration_s: Annotated[float, Field(ge=0, le=120, allow_inf_nan=False)]


class WaitWindow(SetupBase):
    """Wait until a window is open."""

    kind: Literal["wait_window"]
    window: WindowMatch


class ActivateWindow(SessionVerb):
    """Wait until a window is open, then raise it and give it the keyboard focus."""

    kind: Literal["activate_window"]
    window: WindowMatch


class CloseWindow(SessionVerb):
    """Ask a window to close and wait until it has closed. Guarded: skipped if no such window is open."""

    kind: Literal["close_window"]
    window: WindowMatch


class ChangeWallpaper(SessionVerb):
    """Show a picture of the guest behind the windows. Idempotent."""

    kind: Literal["change_wallpaper"]
    path: GuestPath


class SetClipboard(SessionVerb):
    """Put text on the clipboard."""

    kind: Literal["set_clipboard"]
    text: str


class OsworldSetup(SetupBase):
    """Perform setup steps in OSWorld's form with OSWorld's own code, which decides what a second run does."""

    kind: Literal["osworld"]
    steps: Annotated[tuple[dict[str, JsonValue], ...], Field(min_length=1)]
    timeout_s: Timeout = 600.0

    @model_validator(mode="after")
    def _names_its_downloads(self) -> Self:
        try:
            asset_urls(self.steps, {})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"steps: a step has a type and parameters, a download has files: {error!r}") from error
        return self

    def downloads(self) -> Iterator[AssetRef]:
        yield from map(AssetRef, asset_urls(self.steps, {}).values())


class CuaGymSetup(SetupBase):
    """Stage a CUA-Gym bundle and run its `setup.sh` as root; nothing hidden stays. Made by the loader of bundles."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.LINUX})

    kind: Literal["cua_gym"]
    bundle: str
    """Its directory on the host."""
    timeout_s: Timeout = 300.0


class OpenComputerSetup(SetupBase):
    """Set up a task of OpenComputer by its own code, and wait for its application. Made by the loader of its tasks."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.LINUX})

    kind: Literal["opencomputer"]
    root: str
    """The repository on the host."""
    task: str


SetupVerb = Annotated[
    WriteFile
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
    | OsworldSetup
    | CuaGymSetup
    | OpenComputerSetup,
    Field(discriminator="kind"),
]
