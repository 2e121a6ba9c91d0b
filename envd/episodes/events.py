"""Report what happens to episodes to those that display or record them. An observer never affects an episode."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from cuaenv.actions import Action, action_text, shortened
from envd.desktop.display.frames import Frame
from envd.desktop.observation import ActionOutcome
from envd.episodes.episode import Episode
from envd.episodes.types import StepCommand, StepOutcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerformedStep:
    """One step as people read it."""

    index: int
    time: datetime
    """End of the step, in UTC."""
    actions: tuple[str, ...]
    """Each performed action, and why the guest refused it or how a tool's result begins."""
    is_settled: bool
    """Whether the screen was quiet at the end."""
    total_ms: float
    outputs: tuple[str | None, ...]
    """Result of each performed action that used a tool."""
    frame: Frame | None
    """The screen after the step; None while its display is being connected again."""
    is_rolled_back: bool = False
    """Whether a later rollback took it back."""
    performed: tuple[Action, ...] = ()
    source: str = "agent"
    """`human` if a person acted in the page."""
    unrecorded: tuple[str, ...] = ()
    """Requests that the web recording does not have."""

    def is_before(self, *, step_count: int, time: datetime) -> bool:
        """Whether the state of its episode at this number of steps and time includes the step.

        A person's step has the index of the agent's next one.
        """
        is_persons = self.source == "human" and self.index == step_count and self.time <= time
        return self.index < step_count or is_persons


class EpisodeObserver:
    """Sees what happens to episodes; the default is to do nothing. Methods run on the event loop and must not wait."""

    def opened(self, episode: Episode) -> None:
        """An episode was opened, or recovered after a restart."""

    def stepped(self, episode: Episode, step: PerformedStep) -> None:
        """A step was performed; `episode` has its state after it."""

    def rolled_back(self, episode: Episode, *, time: datetime) -> None:
        """An episode was put back to the state at its present step and a time; steps from there on do not count."""

    def scored(self, episode: Episode) -> None:
        """The checkers ran; its progress has the score, or why there is none."""

    def closed(self, episode: Episode) -> None:
        """An episode was closed, for whatever reason."""


class EpisodeEvents:
    """Passes events to observers. Without observers it does nothing."""

    def __init__(self) -> None:
        self._observers: list[EpisodeObserver] = []

    def add(self, observer: EpisodeObserver) -> None:
        self._observers.append(observer)

    def opened(self, episode: Episode) -> None:
        self._each(lambda observer: observer.opened(episode))

    def stepped(self, episode: Episode, command: StepCommand, result: StepOutcome, *, time: datetime) -> None:
        if not self._observers:
            return
        settle = result.observation.settle
        actions = tuple(zip(command.actions, result.outcomes, strict=False))
        self._report(
            episode,
            actions,
            index=command.step_index,
            is_settled=settle is None or settle.settled,
            total_ms=result.timings_ms["total"],
            time=time,
            source="agent",
            unrecorded=tuple(map(str, result.unrecorded)),
        )

    def driven(
        self,
        episode: Episode,
        actions: Sequence[tuple[Action, str]],
        *,
        is_settled: bool,
        total_ms: float,
        time: datetime,
    ) -> None:
        """Report what a person did: actions, each with the reason why the guest refused it, empty if it did not."""
        index = episode.progress.step_count
        outcomes = [(action, ActionOutcome(error=error)) for action, error in actions]
        self._report(
            episode, outcomes, index=index, is_settled=is_settled, total_ms=total_ms, time=time, source="human"
        )

    def _report(
        self,
        episode: Episode,
        actions: Sequence[tuple[Action, ActionOutcome]],
        *,
        index: int,
        is_settled: bool,
        total_ms: float,
        time: datetime,
        source: str,
        unrecorded: tuple[str, ...] = (),
    ) -> None:
        step = PerformedStep(
            index=index,
            time=time,
            actions=tuple(action_text(action) + _result_text(outcome) for action, outcome in actions),
            is_settled=is_settled,
            total_ms=total_ms,
            outputs=tuple(outcome.output for _, outcome in actions),
            frame=episode.machine.desktop.frame_nowait(),
            performed=tuple(action for action, outcome in actions if not outcome.error),
            source=source,
            unrecorded=unrecorded,
        )
        self._each(lambda observer: observer.stepped(episode, step))

    def rolled_back(self, episode: Episode, *, time: datetime) -> None:
        self._each(lambda observer: observer.rolled_back(episode, time=time))

    def scored(self, episode: Episode) -> None:
        self._each(lambda observer: observer.scored(episode))

    def closed(self, episode: Episode) -> None:
        self._each(lambda observer: observer.closed(episode))

    def _each(self, report: Callable[[EpisodeObserver], None]) -> None:
        for observer in self._observers:
            try:
                report(observer)
            except Exception:
                logger.exception("observer %r failed; the episode is not affected", observer)


def _result_text(outcome: ActionOutcome) -> str:
    if outcome.error:
        return f": {outcome.error}"
    exit_code = (
        f" (exit code {outcome.exit_code})" if outcome.exit_code else " (timed out)" if outcome.timed_out else ""
    )
    return exit_code if outcome.output is None else f": {shortened(outcome.output)!r}{exit_code}"
