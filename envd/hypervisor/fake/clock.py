"""The clock of a fake guest: it stands still with its guest, and keeps its own idea of the date."""

import time


class GuestClock:
    """Time inside one guest. A copy of it goes on from where it was copied."""

    def __init__(self) -> None:
        """Start to run, with the host's date."""
        self.set_to_ns: int | None = None
        """What its date was last set to, in nanoseconds since 1970; None if it never was."""
        self._run_ns = 0
        self._since_ns: int | None = time.monotonic_ns()
        self._date_offset_ns = time.time_ns()

    def stop(self) -> None:
        """Stand still. Harmless if it does."""
        if self._since_ns is not None:
            self._run_ns += time.monotonic_ns() - self._since_ns
            self._since_ns = None

    def go(self) -> None:
        """Run on. Harmless if it runs."""
        if self._since_ns is None:
            self._since_ns = time.monotonic_ns()

    def monotonic_s(self) -> float:
        """How long the guest has run, in seconds."""
        return self._monotonic_ns() / 1e9

    def date_ns(self) -> int:
        """The guest's date, in nanoseconds since 1970."""
        return self._date_offset_ns + self._monotonic_ns()

    def set_date(self, date_ns: int) -> None:
        """Change the date, given in nanoseconds since 1970."""
        self.set_to_ns = date_ns
        self._date_offset_ns = date_ns - self._monotonic_ns()

    def _monotonic_ns(self) -> int:
        return self._run_ns + (0 if self._since_ns is None else time.monotonic_ns() - self._since_ns)
