"""Who caused a loss, by evidence."""

import pytest

from envd.base.errors import GuestEnded, LossUndecided, MachineLost
from envd.base.losses import Loss, LossOwner, Silence, loss_by_shutdown, loss_by_silence

RUNNING = "running"


@pytest.mark.parametrize(
    ("silence", "owner", "cause"),
    [
        (Silence(run_state=""), LossOwner.UNDECIDED, ""),
        (Silence(run_state="io-error"), LossOwner.HOST, ""),
        (Silence(run_state=RUNNING, free_disk_bytes=0), LossOwner.HOST, ""),
        (Silence(run_state="internal-error"), LossOwner.UNDECIDED, ""),
        (Silence(run_state="guest-panicked"), LossOwner.GUEST, "PANIC"),
        (Silence(run_state=RUNNING, agent_answers=True, free_disk_bytes=1 << 30), LossOwner.GUEST, "SESSION_ENDED"),
        # Idle: it was not kept from answering.
        (Silence(run_state=RUNNING), LossOwner.GUEST, "UNRESPONSIVE"),
        # The same on a busy host: it seldom wanted to run.
        (Silence(run_state=RUNNING, used_s=0.0, waited_s=0.3), LossOwner.GUEST, "UNRESPONSIVE"),
        # A fork bomb on a loaded host: it waits for processors, and gets enough of them.
        (Silence(run_state=RUNNING, used_s=5.0, waited_s=20.0), LossOwner.GUEST, "UNRESPONSIVE"),
        (Silence(run_state=RUNNING, used_s=0.1, waited_s=20.0), LossOwner.UNDECIDED, ""),
    ],
)
def test_a_silent_guest_has_an_owner(silence: Silence, owner: LossOwner, cause: str) -> None:
    loss = loss_by_silence(silence)
    assert (loss.owner, loss.cause) == (owner, cause)


@pytest.mark.parametrize(
    ("reason", "cause"), [("guest-shutdown", "POWER_OFF"), ("guest-reset", "REBOOT"), ("guest-panic", "PANIC")]
)
def test_a_shutdown_by_the_guest_is_the_guests(reason: str, cause: str) -> None:
    loss = loss_by_shutdown(reason)
    assert loss is not None
    assert (loss.owner, loss.cause) == (LossOwner.GUEST, cause)


@pytest.mark.parametrize("reason", ["host-signal", "host-qmp-quit", "host-error", "subsystem-reset", ""])
def test_a_shutdown_by_the_host_says_nothing_about_the_guest(reason: str) -> None:
    assert loss_by_shutdown(reason) is None


@pytest.mark.parametrize(
    ("owner", "error"),
    [(LossOwner.HOST, MachineLost), (LossOwner.GUEST, GuestEnded), (LossOwner.UNDECIDED, LossUndecided)],
)
def test_each_owner_has_its_error(owner: LossOwner, error: type[Exception]) -> None:
    found = Loss(owner, "it stopped", "PANIC" if owner is LossOwner.GUEST else "").error("machine m-1")
    assert type(found) is error
    assert str(found).startswith("machine m-1: ")
