"""The wires into one running guest, as the guest layer needs them.

Every hypervisor's machine has these members; `guest` never sees more of a hypervisor than this.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


@runtime_checkable
class Channels(Protocol):
    """Display, guest agent and guestd of one machine."""

    @property
    def machine_id(self) -> str:
        """The machine's id, for messages and logs."""

    @property
    def guestd_url(self) -> str | None:
        """Base URL of the in-guest HTTP service on the host's loopback, or None where the image has none."""

    @property
    def lost(self) -> asyncio.Event:
        """Set, once and for ever, when the machine is gone."""

    @property
    def lost_reason(self) -> str:
        """Why the machine is gone; empty while it is not."""

    def processor_s(self) -> float | None:
        """CPU seconds that the guest's processors have used so far; None where that cannot be told. Never fails."""

    async def open_display(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the machine's RFB 3.8 server (no authentication).

        Raises:
            MachineLost: The machine is gone.
        """

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        """Run one QEMU guest agent command and return what stands under `return`.

        Raises:
            GuestUnresponsive: No answer within `timeout_s`.
            GuestError: The agent refused.
            MachineLost: The machine is gone.
        """
