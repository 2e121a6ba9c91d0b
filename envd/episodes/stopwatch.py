"""Measure the phases of a call."""

from envd.base.clock import Clock
from envd.base.telemetry import traces


class Stopwatch:
    """Milliseconds by phase."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin_s = self._lap_s = clock.monotonic()
        self.timings_ms: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """End the phase that began at the previous lap."""
        now_s = self._clock.monotonic()
        self.timings_ms[phase] = (now_s - self._lap_s) * 1000
        traces.phase(phase, now_s - self._lap_s)
        self._lap_s = now_s

    def lap_if(self, phase: str, took_place: bool) -> None:
        """End a phase if it took place; otherwise its time counts toward the next phase."""
        if took_place:
            self.lap(phase)

    @property
    def total_ms(self) -> float:
        """Milliseconds since the start."""
        return (self._clock.monotonic() - self._begin_s) * 1000
