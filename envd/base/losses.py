"""Whose fault the loss of an episode is: the host's, the guest's, or unknown. Decides from evidence; performs no I/O.

A policy that can lose its machine must not gain by it: if a loss were always void, a failing attempt could be removed
from the statistics by powering the machine off. So a loss counts as the host's only if the host's own evidence says so.
Evidence comes from QEMU and the host's kernel, never from text that the guest wrote.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from envd.base.errors import EnvdError, GuestEnded, LossUndecided, MachineLost

#: A guest that got this much processor time since it was asked, and has not answered, does not answer by its own doing.
_FAIR_SHARE_S = 2.0
#: With less free space, a disk counts as full. QEMU stops a guest whose overlay cannot be written.
FULL_DISK_BYTES = 1 << 20
#: Causes by QEMU's reason (qapi/run-state.json, ShutdownCause).
_CAUSES: Mapping[str, str] = {"guest-shutdown": "POWER_OFF", "guest-reset": "REBOOT", "guest-panic": "PANIC"}

#: Causes that leave no machine, so that no checker can run.
ENDS_MACHINE = frozenset({"POWER_OFF", "REBOOT", "PANIC", "DISK_FULL"})


class LossOwner(Enum):
    """Who caused a loss. The values label metrics."""

    HOST = "host"
    GUEST = "guest"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a machine or its session is lost."""

    owner: LossOwner
    reason: str
    """A sentence for logs and error texts."""
    cause: str = ""
    """If the guest caused it, UPPER_SNAKE: POWER_OFF, REBOOT, PANIC, SESSION_ENDED, DISK_FULL, UNRESPONSIVE or
    UNCHECKABLE: checkers that work at the start of the task fail on what the agent left."""
    explains_display: bool = False
    """Whether a display that fails is part of it: the guest serves its display itself, and not the host."""

    def error(self, where: str) -> EnvdError:
        """Return the error of a call that needs the lost machine."""
        if self.owner is LossOwner.GUEST:
            return GuestEnded(f"{where}: its guest ended ({self.cause}: {self.reason})", cause=self.cause)
        return (MachineLost if self.owner is LossOwner.HOST else LossUndecided)(f"{where}: {self.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """What the host observed while a guest did not answer."""

    run_state: str
    """QEMU's (qapi/run-state.json, RunState), or another backend's word for it; empty if QEMU itself did not answer."""
    agent_answers: bool = False
    """The guest agent, which root runs, answered a ping."""
    used_s: float = 0.0
    """Processor seconds that the guest used during the ping."""
    waited_s: float = 0.0
    """Seconds that its processors were runnable during the ping and got no host processor."""
    free_disk_bytes: int | None = None
    """Free space for its overlay; None if unknown."""


def loss_by_shutdown(reason: str) -> Loss | None:
    """Return the loss that a reason of QEMU's SHUTDOWN event means; None if the guest did not cause it."""
    cause = _CAUSES.get(reason)
    return Loss(LossOwner.GUEST, f"QEMU reports {reason}", cause) if cause else None


def loss_by_silence(silence: Silence) -> Loss:
    """Return why a guest does not answer."""
    if not silence.run_state:
        return Loss(LossOwner.UNDECIDED, "QEMU does not answer")
    free_bytes = FULL_DISK_BYTES if silence.free_disk_bytes is None else silence.free_disk_bytes
    if silence.run_state == "io-error" or free_bytes < FULL_DISK_BYTES:
        return Loss(LossOwner.HOST, "the host's disk is full")
    if silence.run_state == "guest-panicked":
        return Loss(LossOwner.GUEST, "QEMU reports guest-panicked", "PANIC")
    if silence.run_state != "running":
        return Loss(LossOwner.UNDECIDED, f"the machine is {silence.run_state}")
    if silence.agent_answers:
        return Loss(LossOwner.GUEST, "the machine runs, but its session does not answer", "SESSION_ENDED")
    # An idle guest on a busy host waits some tenths of a second, one that is kept from answering for most of the ping.
    if silence.used_s < _FAIR_SHARE_S <= silence.waited_s:
        return Loss(
            LossOwner.UNDECIDED,
            f"the guest does not answer, but got a host processor for only {silence.used_s:.1f} s"
            f" and waited for one for {silence.waited_s:.1f} s",
        )
    return Loss(LossOwner.GUEST, "the guest does not answer although the host lets it run", "UNRESPONSIVE")
