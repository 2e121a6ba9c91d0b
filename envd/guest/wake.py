"""Give a fork its own identity before anything else runs in it: clock, machine id, random numbers.

A fork wakes with its template's time and secrets. The kernel's random numbers are renewed by the virtual generation id,
which QEMU changes for each fork (drivers/virt/vmgenid.c: the guest is interrupted and reseeds); entropy is written here
too, for kernels without that driver. The host name stays: it appears in prompts, and the members of a group must look
alike. docs/fork-correctness.md lists every hazard.
"""

import secrets
import time
from uuid import UUID, uuid5

from envd.base.errors import GuestError
from envd.guest.agent import GuestAgent

#: Namespace of the guests' machine ids (machine-id(5)).
_MACHINE_IDS = UUID("6f2d1e5c-0d4b-4b0e-9a57-0e5d5c1d2a02")
_SEED_BYTES = 64
_TIMEOUT_S = 30.0


def guest_machine_id(machine_id: str) -> str:
    """Return the machine id of a guest: 32 hex digits, a function of our machine id."""
    return uuid5(_MACHINE_IDS, machine_id).hex


async def renew_identity(agent: GuestAgent, *, machine_id: str, windows: bool) -> None:
    """Give a fork the host's time, its own machine id and fresh entropy.

    Raises:
        GuestUnresponsive: The agent did not respond in time.
        GuestError: A step failed; the fork must not be used.
    """
    if windows:
        await agent.set_time(time.time_ns())
        return
    # The agent writes files by itself; only `date` is a program. Each program costs a slow guest 0.1 s.
    await agent.write_file("/dev/urandom", secrets.token_bytes(_SEED_BYTES), timeout_s=_TIMEOUT_S)
    await agent.write_file("/etc/machine-id", f"{guest_machine_id(machine_id)}\n".encode(), timeout_s=_TIMEOUT_S)
    result = await agent.run(["/bin/date", "-u", "-s", f"@{time.time():.6f}"], timeout_s=_TIMEOUT_S)
    if result.exit_code:
        message = result.stderr.decode("utf-8", "replace").strip()
        raise GuestError(f"machine {machine_id}: its clock could not be set (exit {result.exit_code}): {message}")
