"""Setup verbs: what can be done to a guest before an agent gets it. Data; `envd.tasks.setup` performs it.

A verb can be done twice: it leads to the same state, or it is guarded and does nothing the second time.
"""

import base64
import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from envd.hypervisor.machine import GuestOs
from envd.tasks.fields import Argv, Base64, Encoding, GuestPath, Model, Sha256, Timeout, WindowMatch
from envd.tasks.osworld import asset_urls

Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$", max_length=8192)]


class SetupBase(Model):
    """What every setup verb has."""

    #: What it can be done to. A task for another system is refused before any machine boots.
    systems: ClassVar[frozenset[GuestOs]] = frozenset(GuestOs)

    # A first program start takes up to a minute in an emulated guest on a busy host.
    timeout_s: Timeout = 180.0
    """Seconds after which the verb, and with it the reset, fails."""


class SessionVerb(SetupBase):
    """A verb that needs the windows of a session that a guest service of ours looks after."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.LINUX})


class WriteFile(SetupBase):
    """Write a file as the user, making its parents. Idempotent: an existing file is replaced."""

    kind: Literal["write_file"]
    path: GuestPath
    text: str | None = None
    base64: Base64 | None = None
    encoding: Encoding = "utf-8"
    """For `text`; `utf-8-sig` and `utf-16` write a byte order mark."""
    newline: Literal["lf", "crlf"] = "lf"
    """What a line feed in `text` becomes."""

    @model_validator(mode="after")
    def _one_content_that_encodes(self) -> Self:
        if (self.text is None) == (self.base64 is None):
            raise ValueError("give either text or base64")
        try:
            self.data()
        except (UnicodeEncodeError, LookupError) as error:
            raise ValueError(f"text cannot be written in {self.encoding}: {error}") from error
        return self

    def data(self) -> bytes:
        """The bytes of the file."""
        if self.text is None:
            return base64.b64decode(self.base64 or "")
        text = self.text.replace("\n", "\r\n") if self.newline == "crlf" else self.text
        return text.encode(self.encoding)


class MakeDirectory(SetupBase):
    """Make a directory and its parents as the user. Idempotent: an existing one is kept."""

    kind: Literal["make_directory"]
    path: GuestPath


class Remove(SetupBase):
    """Remove a file, or a directory with all that is in it. Idempotent: what is not there stays away."""

    kind: Literal["remove"]
    path: GuestPath


class Asset(Model):
    """A file that is fetched ahead of time, by `envd tasks fetch`, and put into the guest from the host's cache."""

    url: Url
    path: GuestPath
    sha256: Sha256 | None = None
    """Of its bytes. Where it is not given, the first fetch fixes it for this host."""


class Download(SetupBase):
    """Put fetched files into the guest, as the user. Nothing is downloaded then. Idempotent: they are replaced."""

    kind: Literal["download"]
    files: Annotated[tuple[Asset, ...], Field(min_length=1)]


class HostFile(Model):
    """A file that lies beside the file of tasks."""

    local_path: str
    """Where; in a file of tasks relative to its directory, and below it."""
    path: GuestPath


class UploadFile(SetupBase):
    """Put files that come with the tasks into the guest, as the user. Idempotent: they are replaced."""

    kind: Literal["upload_file"]
    files: Annotated[tuple[HostFile, ...], Field(min_length=1)]


class Launch(SessionVerb):
    """Start a program and wait for its window. Guarded: nothing is started while such a window is open."""

    kind: Literal["launch"]
    argv: Argv
    window: WindowMatch


class Start(SessionVerb):
    """Start a program and go on at once. Guarded: nothing is started while one runs with the same command line."""

    kind: Literal["start"]
    argv: Argv


class Open(SessionVerb):
    """Open a file in a program and wait for its window. Guarded: nothing is started while such a window is open."""

    kind: Literal["open"]
    path: GuestPath
    program: str = "mousepad"
    window: WindowMatch | None = None
    """The window to wait for; by default one whose title holds the file's name."""

    def awaited_window(self) -> WindowMatch:
        """The window that shows the file."""
        name = re.split(r"[\\/]", self.path.rstrip("\\/"))[-1]
        return self.window or WindowMatch(title=re.escape(name))


class Execute(SetupBase):
    """Run a command to its end. Guarded by `unless` where running it twice would differ from once."""

    kind: Literal["execute"]
    argv: Argv
    as_root: bool = False
    expect_exit_code: int | None = 0
    """What it must end with; None for whatever."""
    unless: tuple[str, ...] = ()
    """A command, run in the same way first: where it exits with 0 the work is done already."""


class WaitCommand(SetupBase):
    """Run a command again and again until it ends as awaited: any one of what is given will do."""

    kind: Literal["wait_command"]
    argv: Argv
    as_root: bool = False
    exit_code: int | None = None
    stdout: str = ""
    """Awaited somewhere in its output."""
    stderr: str = ""

    @model_validator(mode="after")
    def _awaits_something(self) -> Self:
        if self.exit_code is None and not self.stdout and not self.stderr:
            raise ValueError("give exit_code, stdout or stderr")
        return self


class Sleep(SetupBase):
    """Let the guest run for a while. For what shows no sign; where there is one, wait for that."""

    kind: Literal["sleep"]
    duration_s: Annotated[float, Field(ge=0, le=120, allow_inf_nan=False)]


class WaitWindow(SessionVerb):
    """Wait until a window is open."""

    kind: Literal["wait_window"]
    window: WindowMatch


class ActivateWindow(SessionVerb):
    """Wait until a window is open, then raise it and give it the keyboard focus."""

    kind: Literal["activate_window"]
    window: WindowMatch


class CloseWindow(SessionVerb):
    """Ask a window to close and wait until it has. Guarded: where there is none such it is closed already."""

    kind: Literal["close_window"]
    window: WindowMatch


class ChangeWallpaper(SessionVerb):
    """Show a picture of the guest's behind the windows. Idempotent."""

    kind: Literal["change_wallpaper"]
    path: GuestPath


class SetClipboard(SessionVerb):
    """Put text on the clipboard."""

    kind: Literal["set_clipboard"]
    text: str


class ChromeOpenTabs(SessionVerb):
    """Have a Chrome that was started with remote debugging show pages. Guarded: what it shows is not opened again."""

    kind: Literal["chrome_open_tabs"]
    urls: Annotated[tuple[str, ...], Field(min_length=1)]


class ChromeCloseTabs(SessionVerb):
    """Have a Chrome that was started with remote debugging close pages. Guarded: those that it does not show are."""

    kind: Literal["chrome_close_tabs"]
    urls: Annotated[tuple[str, ...], Field(min_length=1)]


class Visit(Model):
    """A page in the history of a browser."""

    url: str
    title: str = ""
    age_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """How long before the setup it was visited."""


class UpdateBrowseHistory(SessionVerb):
    """Put visits into Chrome's history while it does not run. Idempotent: earlier visits of these pages are dropped."""

    kind: Literal["update_browse_history"]
    history: Annotated[tuple[Visit, ...], Field(min_length=1)]


class OsworldSetup(SetupBase):
    """Perform setup steps in OSWorld's form, by OSWorld's own code; done twice, they are as they are there."""

    kind: Literal["osworld"]
    steps: Annotated[tuple[dict[str, JsonValue], ...], Field(min_length=1)]
    timeout_s: Timeout = 600.0

    def urls(self) -> Iterator[str]:
        """Yield where the files are that OSWorld would download."""
        yield from asset_urls(self.steps, {}).values()


SetupVerb = Annotated[
    WriteFile
    | MakeDirectory
    | Remove
    | Download
    | UploadFile
    | Launch
    | Start
    | Open
    | Execute
    | WaitCommand
    | Sleep
    | WaitWindow
    | ActivateWindow
    | CloseWindow
    | ChangeWallpaper
    | SetClipboard
    | ChromeOpenTabs
    | ChromeCloseTabs
    | UpdateBrowseHistory
    | OsworldSetup,
    Field(discriminator="kind"),
]
