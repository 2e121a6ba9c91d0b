"""The seam to a foreign suite whose own code runs on the host, in processes of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from pydantic import JsonValue

from envd.hypervisor.machine import GuestOs
from envd.tasks.text import CheckOutcome

if TYPE_CHECKING:
    # Importing it takes half a second, and task data is also read where no desktop exists.
    from envd.desktop.desktop import Desktop

#: A setup step or an evaluator, in the suite's form.
ForeignObject = Mapping[str, JsonValue]


class TaskBridge(Protocol):
    """Runs a foreign suite's setup and evaluators."""

    async def set_up(
        self, desktop: "Desktop", steps: Sequence[ForeignObject], *, os: GuestOs, on_step: Callable[[str], None]
    ) -> None:
        """Perform setup steps; call `on_step` with the name of each as it starts. Raises: GuestError, MachineLost."""

    async def evaluate(self, desktop: "Desktop", evaluator: ForeignObject, *, os: GuestOs) -> CheckOutcome:
        """Score the guest's current state. Raises: GuestError, MachineLost."""
