"""The evaluator of an OSWorld task, as data: it is scored by OSWorld's own code, which envd runs beside itself."""

from typing import Literal

from pydantic import JsonValue

from envd.errors import GuestError
from envd.tasks.checkers.base import LeafCheck
from envd.tasks.checkers.scene import Scene
from envd.tasks.text import Verdict

Parameters = dict[str, JsonValue]


class OsworldEvaluator(LeafCheck):
    """Which metrics of OSWorld's compare what with what."""

    kind: Literal["osworld"]
    func: str | tuple[str, ...]
    """Names of metrics."""
    conj: Literal["and", "or"] = "and"
    result: Parameters | tuple[Parameters, ...] | None = None
    """What to get from the guest; where there are several metrics, one for each."""
    expected: Parameters | tuple[Parameters | None, ...] | None = None
    options: Parameters | tuple[Parameters | None, ...] | None = None
    postconfig: tuple[Parameters, ...] = ()
    """Setup verbs in OSWorld's form, performed before it looks."""

    @property
    def subject(self) -> str:
        """The metrics."""
        return self.func if isinstance(self.func, str) else f" {self.conj} ".join(self.func)

    async def look(self, scene: Scene) -> Verdict:  # noqa: ARG002
        """Raise GuestError: what scores this is OSWorld's own code, which is not here."""
        raise GuestError("OSWorld's evaluators are not set up in this daemon")
