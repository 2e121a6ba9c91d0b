"""Who is told of admissions, for metrics. Plain values only, so that an implementation imports nothing."""

from typing import Protocol


class AdmissionObserver(Protocol):
    """Told of each group once, when its wait is over; must neither wait nor raise."""

    def admitted(self, *, pool: str, run: str, machine_count: int, wait_s: float) -> None:
        """A group got its machines and places."""

    def refused(self, *, pool: str, run: str, reason: str) -> None:
        """A group was sent away; reasons are those of `envd.pool.refusals.RefusalReason`."""


class NoAdmissionObserver:
    """Hears nothing."""

    def admitted(self, *, pool: str, run: str, machine_count: int, wait_s: float) -> None:
        """See `AdmissionObserver`."""

    def refused(self, *, pool: str, run: str, reason: str) -> None:
        """See `AdmissionObserver`."""
