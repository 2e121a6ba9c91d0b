"""Report what happens to episodes to those that display or record them. An observer never affects an episode."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from cuaenv.actions import Action, action_text
from envd.episodes.episode import Episode
from envd.episodes.types import StepCommand, StepResult
from envd.guest.desktop import ScreenView

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerformedStep:
    """One step as people read it."""

    index: int
    time: datetime
    """End of the step, in UTC."""
    actions: tuple[str, ...]
    """Each performed action, and why the guest refused it if it did."""
    is_settled: bool
    """Whether the screen was quiet at the end."""
    total_ms: float
    view: ScreenView | None
    """The screen after the step; None while its display is being connected again."""
    performed: tuple[Action, ...] = ()
    """The actions that were performed."""
    source: str = "agent"
    """`human` if a person acted in the page."""


class EpisodeObserver(Protocol):
    """Sees what happens to episodes. Its methods run on the event loop and must not wait."""

    def opened(self, episode: Episode) -> None:
        """An episode was opened, or restored after a restart."""

    def stepped(self, episode: Episode, step: PerformedStep) -> None:
        """A step was performed; `episode` has its state after it."""

    def scored(self, episode: Episode) -> None:
        """The checkers ran; `episode.verdict` is the result."""

    def closed(self, episode: Episode) -> None:
        """An episode was closed, for whatever reason."""


class EpisodeEvents:
    """Passes events to observers. Without observers it does nothing."""

    def __init__(self) -> None:
        self._observers: list[EpisodeObserver] = []

    def add(self, observer: EpisodeObserver) -> None:
        """Pass all events from now on to `observer`."""
        self._observers.append(observer)

    def opened(self, episode: Episode) -> None:
        """Report a new episode."""
        self._each(lambda observer: observer.opened(episode))

    def stepped(self, episode: Episode, command: StepCommand, result: StepResult, *, time: datetime) -> None:
        """Report a performed step."""
        if not self._observers:
            return
        settle = result.observation.settle
        actions = [(action, outcome.error) for action, outcome in zip(command.actions, result.outcomes, strict=False)]
        self._report(
            episode,
            actions,
            index=command.step_index,
            is_settled=settle is None or settle.settled,
            total_ms=result.timings_ms["total"],
            time=time,
            source="agent",
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
        index = episode.step_count
        self._report(episode, actions, index=index, is_settled=is_settled, total_ms=total_ms, time=time, source="human")

    def _report(
        self,
        episode: Episode,
        actions: Sequence[tuple[Action, str]],
        *,
        index: int,
        is_settled: bool,
        total_ms: float,
        time: datetime,
        source: str,
    ) -> None:
        step = PerformedStep(
            index=index,
            time=time,
            actions=tuple(action_text(action) + (f": {error}" if error else "") for action, error in actions),
            is_settled=is_settled,
            total_ms=total_ms,
            view=episode.machine.desktop.view_nowait(),
            performed=tuple(action for action, error in actions if not error),
            source=source,
        )
        self._each(lambda observer: observer.stepped(episode, step))

    def scored(self, episode: Episode) -> None:
        """Report the checkers' result."""
        self._each(lambda observer: observer.scored(episode))

    def closed(self, episode: Episode) -> None:
        """Report a closed episode."""
        self._each(lambda observer: observer.closed(episode))

    def _each(self, report: Callable[[EpisodeObserver], None]) -> None:
        for observer in self._observers:
            try:
                report(observer)
            except Exception:
                logger.exception("observer %r failed; the episode is not affected", observer)
