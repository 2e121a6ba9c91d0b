"""Make a fork its own machine, before anything else runs in it: clock, machine id, random numbers.

A fork wakes at its template's instant and with its template's secrets. The kernel's random numbers are renewed by
the virtual generation id, which QEMU changes for each fork (drivers/virt/vmgenid.c: the guest is interrupted and
reseeds); what is written here comes on top of it, for kernels without that driver. The host name stays: it is seen
in prompts, and the members of a group must look alike. See docs/fork-correctness.md for every hazard.
"""

import secrets
import time
from uuid import UUID, uuid5

from envd.errors import GuestError
from envd.guest.agent import GuestAgent

#: Under which our machines' ids become the guests' machine ids (machine-id(5)).
_MACHINE_IDS = UUID("6f2d1e5c-0d4b-4b0e-9a57-0e5d5c1d2a02")
_SEED_BYTES = 64
_TIMEOUT_S = 30.0


def guest_machine_id(machine_id: str) -> str:
    """Return the machine id of a machine's guest: 32 hex digits, the same for the same machine."""
    return uuid5(_MACHINE_IDS, machine_id).hex


async def renew_identity(agent: GuestAgent, *, machine_id: str, windows: bool) -> None:
    """Give a fork the host's time, a machine id of its own and fresh entropy.

    Raises:
        GuestUnresponsive: The agent did not answer in time.
        GuestError: A part of it could not be done: the fork must not be used.
    """
    if windows:
        await agent.set_time(time.time_ns())
        return
    # Files are written by the agent itself, and one program is run: each costs a slow guest a tenth of a second.
    await agent.write_file("/dev/urandom", secrets.token_bytes(_SEED_BYTES), timeout_s=_TIMEOUT_S)
    await agent.write_file("/etc/machine-id", f"{guest_machine_id(machine_id)}\n".encode(), timeout_s=_TIMEOUT_S)
    result = await agent.run(["/bin/date", "-u", "-s", f"@{time.time():.6f}"], timeout_s=_TIMEOUT_S)
    if result.exit_code:
        said = result.stderr.decode("utf-8", "replace").strip()
        raise GuestError(f"machine {machine_id} could not be given the time (exit {result.exit_code}): {said}")
