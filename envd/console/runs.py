"""Statistics of runs for the console. They outlive the episodes, in memory: a restart of the daemon empties them."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from envd.base.clock import Clock
from envd.episodes.episode import Episode
from envd.episodes.events import EpisodeObserver, PerformedStep
from envd.episodes.progress import EpisodeState

Facts = dict[str, Any]

#: Clients choose the names of runs: of more, those that were active longest ago are forgotten.
MAX_RUNS = 200
#: Steps per second are those of this period.
_RATE_S = 60
#: Least score of an episode that counts as a success.
_SUCCESS = 0.999


@dataclass(eq=False, slots=True, kw_only=True)
class _Run:
    since_s: float
    active: float = 0.0
    """Unix time."""
    open_count: int = 0
    episode_count: int = 0
    scored_count: int = 0
    success_count: int = 0
    score_sum: float = 0.0
    void_count: int = 0
    step_count: int = 0
    steps_by_second: deque[list[int]] = field(default_factory=lambda: deque(maxlen=_RATE_S))


class Runs(EpisodeObserver):
    """Counts of each run of each owner, since the daemon started."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._runs: dict[tuple[str, str], _Run] = {}

    def opened(self, episode: Episode) -> None:
        run = self._active(episode)
        run.episode_count += 1
        run.open_count += 1

    def stepped(self, episode: Episode, _step: PerformedStep) -> None:
        run, second = self._active(episode), int(self._clock.monotonic())
        run.step_count += 1
        if not run.steps_by_second or run.steps_by_second[-1][0] != second:
            run.steps_by_second.append([second, 0])
        run.steps_by_second[-1][1] += 1

    def scored(self, episode: Episode) -> None:
        if episode.progress.score is not None:
            run, score = self._active(episode), episode.progress.score.score
            run.scored_count += 1
            run.score_sum += score
            run.success_count += score >= _SUCCESS

    def closed(self, episode: Episode) -> None:
        """Count a void episode: one that failed, or whose evaluation did, without a score."""
        run = self._active(episode)
        run.open_count = max(0, run.open_count - 1)
        if not episode.progress.has_score:
            run.void_count += episode.progress.state is EpisodeState.FAILED or bool(episode.progress.evaluator_error)

    def facts(self) -> list[Facts]:
        """Return what the page shows of runs, the newest first."""
        now_s = self._clock.monotonic()
        return [
            {
                "run": name,
                "owner": owner,
                "open": run.open_count,
                "episodes": run.episode_count,
                "scored": run.scored_count,
                "successes": run.success_count,
                "mean": run.score_sum / run.scored_count if run.scored_count else None,
                "void": run.void_count,
                "steps": run.step_count,
                "rate": round(_steps_since(run, now_s - _RATE_S) / min(_RATE_S, max(1.0, now_s - run.since_s)), 1),
                "active": round(run.active),
            }
            for (owner, name), run in reversed(self._runs.items())
        ]

    def _active(self, episode: Episode) -> _Run:
        key = (episode.spec.owner, episode.spec.run)
        run = self._runs.setdefault(key, _Run(since_s=self._clock.monotonic()))
        run.active = self._clock.now().timestamp()
        if len(self._runs) > MAX_RUNS:
            del self._runs[min(self._runs, key=lambda each: self._runs[each].active)]
        return run


def _steps_since(run: _Run, start_s: float) -> int:
    return sum(count for second, count in run.steps_by_second if second >= start_s)
