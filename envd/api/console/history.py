"""The latest steps of every open episode, for the console's timeline. In memory: a restart of the daemon empties it."""

from collections import deque

from envd.episodes.episode import Episode
from envd.episodes.events import PerformedStep

#: Steps kept of each episode, without pixels; about 300 bytes each.
_MAX_STEPS = 500


class EpisodeHistory:
    """Remembers steps while their episode is open. An `EpisodeObserver`."""

    def __init__(self) -> None:
        self._steps: dict[str, deque[PerformedStep]] = {}

    def __repr__(self) -> str:
        return f"<EpisodeHistory of {len(self._steps)} episodes>"

    def steps_of(self, episode_id: str) -> tuple[PerformedStep, ...]:
        """Return an episode's latest steps, oldest first."""
        return tuple(self._steps.get(episode_id, ()))

    def last_action_of(self, episode_id: str) -> str:
        """Return the last action as text; empty before the first."""
        steps = self._steps.get(episode_id)
        return steps[-1].actions[-1] if steps and steps[-1].actions else ""

    def opened(self, episode: Episode) -> None:
        """Start a timeline; that of a fork has only its own steps."""
        self._steps[episode.episode_id] = deque(maxlen=_MAX_STEPS)

    def stepped(self, episode: Episode, step: PerformedStep) -> None:
        """Add a step, without its pixels."""
        if (steps := self._steps.get(episode.episode_id)) is not None:
            steps.append(step.without_view())

    def scored(self, episode: Episode) -> None:
        """Do nothing: the episode has its score."""

    def closed(self, episode: Episode) -> None:
        """Forget the steps."""
        self._steps.pop(episode.episode_id, None)
