"""What tasks of OSWorld's need of the daemon: someone who runs OSWorld's own code against a guest."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from pydantic import JsonValue

from envd.guest.desktop import Desktop
from envd.hypervisor.machine import GuestOs
from envd.tasks.text import Verdict

#: A setup step or an evaluator, in OSWorld's form.
OsworldObject = Mapping[str, JsonValue]

NOT_HERE = "this daemon has no OSWorld; run `envd osworld install` and start it again"


class OsworldBridge(Protocol):
    """Runs OSWorld's setup and evaluators."""

    async def set_up(self, desktop: Desktop, steps: Sequence[OsworldObject], *, os: GuestOs) -> None:
        """Perform setup steps. Raises: GuestError, MachineLost."""

    async def evaluate(self, desktop: Desktop, evaluator: OsworldObject, *, os: GuestOs) -> Verdict:
        """Score the state that the guest is in. Raises: GuestError, MachineLost."""
