"""A stand-in for the machine of a previous daemon that is lost."""

import asyncio
from typing import NoReturn

from envd.base.errors import MachineLost
from envd.hypervisor.machine import MachineSpec, MachineState


class LostMachine:
    """Implements `envd.hypervisor.machine.Machine`; every call raises MachineLost."""

    guestd_url = None
    state = MachineState.GONE

    def __init__(self, spec: MachineSpec, *, reason: str) -> None:
        self.spec = spec
        self.lost = asyncio.Event()
        self.lost.set()
        self.lost_reason = reason

    def __repr__(self) -> str:
        return f"<LostMachine {self.machine_id} {self.lost_reason}>"

    @property
    def machine_id(self) -> str:
        """The id of its spec."""
        return self.spec.machine_id

    def processor_s(self) -> float | None:
        """Return None: unknown."""
        return None

    def enforce_disk_quota(self, quota_bytes: int) -> None:
        """Do nothing: it uses no disk."""

    async def _raise(self, *_arguments: object, **_options: object) -> NoReturn:
        """Raises: MachineLost."""
        raise MachineLost(f"machine {self.machine_id} is gone: {self.lost_reason}")

    open_display = agent_command = pause = resume = usage = _raise

    async def destroy(self) -> None:
        """Do nothing: nothing of it is left."""
