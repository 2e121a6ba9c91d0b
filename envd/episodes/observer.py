"""Who is told what happens to episodes, for metrics. Plain values only, so that an implementation imports nothing."""

from collections.abc import Mapping
from typing import Protocol


class EpisodeObserver(Protocol):
    """Told of events once each, as they happen; must neither wait nor raise. Times in milliseconds by phase."""

    def episode_reset(self, *, pool: str, run: str, episode_count: int, timings_ms: Mapping[str, float]) -> None:
        """A group was opened by a reset, or by a fork, whose phases all begin with `fork_`."""

    def step_done(self, *, pool: str, run: str, episode_id: str, timings_ms: Mapping[str, float]) -> None:
        """A step was performed; replays and joins are not told."""

    def evaluated(self, *, pool: str, run: str, episode_id: str, score: float, timings_ms: Mapping[str, float]) -> None:
        """An episode was scored."""

    def ended(self, *, pool: str, run: str, episode_id: str, state: str, reason: str, step_count: int) -> None:
        """An episode is no longer active: `state` is terminated, truncated or failed, `reason` UPPER_SNAKE."""

    def failure(self, *, pool: str, run: str, operation: str, reason: str) -> None:
        """A reset, fork, step or evaluate failed through a fault of ours, or a machine died between calls ("watch")."""


class NoObserver:
    """Hears nothing."""

    def episode_reset(self, *, pool: str, run: str, episode_count: int, timings_ms: Mapping[str, float]) -> None:
        """See `EpisodeObserver`."""

    def step_done(self, *, pool: str, run: str, episode_id: str, timings_ms: Mapping[str, float]) -> None:
        """See `EpisodeObserver`."""

    def evaluated(self, *, pool: str, run: str, episode_id: str, score: float, timings_ms: Mapping[str, float]) -> None:
        """See `EpisodeObserver`."""

    def ended(self, *, pool: str, run: str, episode_id: str, state: str, reason: str, step_count: int) -> None:
        """See `EpisodeObserver`."""

    def failure(self, *, pool: str, run: str, operation: str, reason: str) -> None:
        """See `EpisodeObserver`."""
