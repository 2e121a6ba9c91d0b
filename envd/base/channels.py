"""The channels into one running guest. The guest layer depends on these members and on no hypervisor."""

import asyncio
from collections.abc import Mapping
from typing import Final, Protocol, runtime_checkable

from pydantic import JsonValue

GUESTD_PORT: Final = 5000
"""Port of the in-guest HTTP service, in the guest."""


@runtime_checkable
class GuestChannels(Protocol):
    """Display, guest agent and guestd of one machine."""

    @property
    def machine_id(self) -> str:
        """The machine's id, for messages and logs."""

    @property
    def guestd_url(self) -> str | None:
        """Base URL of the in-guest HTTP service on the host's loopback, or None if the image has no guestd."""

    @property
    def lost(self) -> asyncio.Event:
        """Set once the machine has ended, for any reason; never cleared."""

    @property
    def lost_reason(self) -> str:
        """Why the machine ended; empty until it has."""

    @property
    def reacts_before_answer(self) -> bool:
        """Whether all input has reached the guest's programs when the display answers a later request, as that of an X
        server does, and `processor_s` counts the least that they then do. QEMU's display only raises interrupts."""

    def processor_s(self) -> float | None:
        """Return the processor seconds that the guest used or, runnable, waited for; None if unknown. Never raises."""

    async def open_display(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the machine's RFB 3.8 server (no authentication).

        Raises:
            MachineLost: The machine has ended.
        """

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        """Run one QEMU guest agent command and return the value of `return` in its response.

        Raises:
            GuestUnresponsive: No response within `timeout_s`.
            GuestError: The agent returned an error.
            MachineLost: The machine has ended.
        """
