"""Checkers of what only the user's session knows: the clipboard."""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from envd.guest.desktop import CommandResult
from envd.hypervisor.machine import GuestOs
from envd.tasks.checkers.base import LeafCheck
from envd.tasks.checkers.scene import LOOK_TIMEOUT_S, Scene
from envd.tasks.text import TextExpectation, Verdict, judge_text


class Clipboard(LeafCheck, TextExpectation):
    """The text on the clipboard."""

    systems: ClassVar[frozenset[GuestOs]] = frozenset({GuestOs.LINUX})

    kind: Literal["clipboard"]

    @model_validator(mode="after")
    def _refuses_nothing(self) -> Self:
        if self.accepts_nothing():
            raise ValueError("an empty clipboard must not be right: an agent that does nothing would score")
        return self

    @property
    def subject(self) -> str:
        """Nothing: there is one clipboard."""
        return ""

    async def look(self, scene: Scene) -> Verdict:
        """See `LeafCheck`."""
        # It belongs to the session, which root has no part in.
        argv = ("xclip", "-selection", "clipboard", "-o")
        return judge_clipboard(await scene.desktop.run(argv, timeout_s=LOOK_TIMEOUT_S), self)


def judge_clipboard(told: CommandResult, checker: Clipboard) -> Verdict:
    """Judge what xclip tells; it fails where nothing that is text was copied."""
    if told.exit_code != 0 or not told.stdout:
        return Verdict(0.0, "no text is on the clipboard")
    return judge_text(told.stdout.decode(errors="replace"), checker)
