"""Setup verbs: what can be done to a guest before an agent gets it. Data; `envd.tasks.setup` performs it.

A verb can be done twice: it leads to the same state, or it is guarded and does nothing the second time.
"""

import base64
import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from envd.tasks.fields import Argv, Base64, Encoding, GuestPath, Model, Timeout, WindowMatch


class SetupBase(Model):
    """What every setup verb has."""

    # A first program start takes up to a minute in an emulated guest on a busy host.
    timeout_s: Timeout = 180.0
    """Seconds after which the verb, and with it the reset, fails."""


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


class Launch(SetupBase):
    """Start a program and wait for its window. Guarded: nothing is started while such a window is open."""

    kind: Literal["launch"]
    argv: Argv
    window: WindowMatch


class Open(SetupBase):
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
    expect_exit_code: int = 0
    unless: tuple[str, ...] = ()
    """A command, run in the same way first: where it exits with 0 the work is done already."""


class WaitWindow(SetupBase):
    """Wait until a window is open."""

    kind: Literal["wait_window"]
    window: WindowMatch


class ActivateWindow(SetupBase):
    """Wait until a window is open, then raise it and give it the keyboard focus."""

    kind: Literal["activate_window"]
    window: WindowMatch


class SetClipboard(SetupBase):
    """Put text on the clipboard."""

    kind: Literal["set_clipboard"]
    text: str


SetupVerb = Annotated[
    WriteFile | MakeDirectory | Remove | Launch | Open | Execute | WaitWindow | ActivateWindow | SetClipboard,
    Field(discriminator="kind"),
]
