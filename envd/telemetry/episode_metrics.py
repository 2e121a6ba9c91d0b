"""Records what the episode service tells its observer. Runs and episode ids are no labels: they never end."""

# ruff: noqa: ARG002 -- the names are the observer protocol's, needed here or not

from collections.abc import Mapping

from envd.telemetry.metrics import Metrics


class EpisodeMetrics:
    """An `envd.episodes.observer.EpisodeObserver`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def episode_reset(self, *, pool: str, run: str, episode_count: int, timings_ms: Mapping[str, float]) -> None:
        """Record a group that was opened."""
        self._metrics.episodes_started.labels(pool=pool).inc(episode_count)
        self._metrics.observe_phases(self._metrics.reset_duration, pool, timings_ms)

    def step_done(self, *, pool: str, run: str, episode_id: str, timings_ms: Mapping[str, float]) -> None:
        """Record a step that was performed."""
        self._metrics.observe_phases(self._metrics.step_duration, pool, timings_ms)

    def evaluated(self, *, pool: str, run: str, episode_id: str, score: float, timings_ms: Mapping[str, float]) -> None:
        """Record an episode that was scored."""
        self._metrics.scores.labels(pool=pool).observe(score)
        self._metrics.observe_phases(self._metrics.evaluate_duration, pool, timings_ms)

    def ended(self, *, pool: str, run: str, episode_id: str, state: str, reason: str, step_count: int) -> None:
        """Record an episode that is no longer active."""
        self._metrics.episodes_ended.labels(pool=pool, state=state).inc()

    def failure(self, *, pool: str, run: str, operation: str, reason: str) -> None:
        """Record a fault of ours."""
        self._metrics.episode_failures.labels(pool=pool, operation=operation, reason=reason).inc()
