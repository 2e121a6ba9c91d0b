"""Open one sample's episodes: the first in its group, repeated attempts alone. Calls are traced for slime."""

import logging
from datetime import timedelta
from typing import Any, Unpack

from cuaenv.client import (
    Action,
    AsyncEnvClient,
    AsyncEpisode,
    Checkpoint,
    CheckpointNotFound,
    CheckpointUnusable,
    Evaluation,
    StepResult,
    Unavailable,
    View,
)
from cuaenv.client.view import ResetOptions
from trainer.agent.branching import TreeMember
from trainer.agent.forks import GroupMember
from trainer.agent.loop import AgentEpisode
from trainer.agent.starts import task_id_of
from trainer.slime.play.partial import Partial
from trainer.slime.slime_compat import Sample, span

logger = logging.getLogger(__name__)


class SampleEnvironments:
    """`trainer.agent.attempts.Environments` for one sample."""

    def __init__(
        self,
        client: AsyncEnvClient,
        sample: Sample,
        *,
        group_size: int,
        group_wait_s: float,
        lease_ttl: timedelta = timedelta(minutes=5),
        member: TreeMember | None = None,
        partial: Partial | None = None,
    ) -> None:
        """Prepare; opens nothing.

        Args:
            client: Opens the episodes.
            sample: The sample.
            group_size: Members of its group; 1 to open each episode alone.
            group_wait_s: How long a group keeps a slot for a missing member.
            lease_ttl: How long machines outlive this process.
            member: Opens the episodes in a tree; None for members that all start together.
            partial: Where the sample continues; None for its start.
        """
        self.reset_count = 0
        """Number of resets."""
        self.member = member
        self.resumed: Partial | None = None
        """Where the latest episode continues; None if it began."""
        self._partial = partial
        self.episode: AsyncEpisode | None = None
        """The latest episode."""
        self._client = client
        self._sample = sample
        self._in_group = GroupMember(client, group=sample.group_index, size=group_size, wait_s=group_wait_s)
        self._lease_ttl = lease_ttl

    def facts(self) -> dict[str, object]:
        """Return how the latest episode was opened, for the sample's facts."""
        branched = self.member.context if self.member else None
        return {
            "attempts": self.reset_count,
            "continued_turns": len(self.resumed.point.turns) if self.resumed else 0,
            "parent_episode_id": branched.episode_id if branched else "",
        }

    async def reset(self, task: str | Checkpoint, **options: Unpack[ResetOptions]) -> AgentEpisode:
        """Open the sample's episode: where it continues, in its group the first time, or alone. Raises: EnvError."""
        self.reset_count += 1
        options = {**options, "lease_ttl": self._lease_ttl}
        with span(self._sample, "env_reset", {"task": task_id_of(task), "attempt": self.reset_count}):
            episode = await self._continued(options) or await self._begun(task, options)
        self.resumed, self.episode = self._partial, episode
        return _Traced(episode, self._sample)

    async def _continued(self, options: ResetOptions) -> AsyncEpisode | None:
        """Open the episode where the sample continues; None if it has to begin. Raises: EnvError."""
        if self._partial is None:
            return None
        kept: ResetOptions = {"view": options["view"], "timeout": options["timeout"], "lease_ttl": self._lease_ttl}
        try:
            return await self._client.reset(self._partial.checkpoint, **kept)
        except (CheckpointNotFound, CheckpointUnusable, Unavailable) as error:
            logger.warning("[envd] sample %s: starts over: %s", self._sample.index, error)
            self._partial = None
            return None

    async def _begun(self, start: str | Checkpoint, options: ResetOptions) -> AsyncEpisode:
        """Open the episode at the sample's start. Raises: EnvError."""
        if self.member is not None:
            return await self.member.reset(start, **options)
        if self.reset_count == 1:
            return await self._in_group.reset(start, **options)
        return await self._client.reset(start, **options)


class WrappedEpisode:
    """An `AgentEpisode` that passes its calls on, for subclasses that change some."""

    def __init__(self, episode: AgentEpisode) -> None:
        self._episode = episode
        self.episode_id = episode.episode_id
        self.task_id = episode.task_id
        self.instruction = episode.instruction
        self.observation = episode.observation
        self.origin = episode.origin
        self.tools = episode.tools

    async def step(
        self, *actions: Action, view: View | None = None, timeout: timedelta = timedelta(minutes=3)
    ) -> StepResult:
        """See `AgentEpisode`."""
        result = await self._episode.step(*actions, view=view, timeout=timeout)
        self.observation = result.observation
        return result

    async def evaluate(self, *, timeout: timedelta = timedelta(minutes=5)) -> Evaluation:
        """See `AgentEpisode`."""
        return await self._episode.evaluate(timeout=timeout)

    async def close(self) -> None:
        """See `AgentEpisode`."""
        await self._episode.close()


class _Traced(WrappedEpisode):
    """An episode whose calls appear in slime's traces."""

    def __init__(self, episode: AsyncEpisode, sample: Sample) -> None:
        super().__init__(episode)
        self._sample = sample

    async def step(self, *actions: Action, **options: Any) -> StepResult:
        with span(self._sample, "env_step", {"actions": len(actions)}) as traced:
            result = await super().step(*actions, **options)
            traced.update({f"{name}_ms": value for name, value in result.timings_ms.items()})
        return result

    async def evaluate(self, **options: Any) -> Evaluation:
        with span(self._sample, "env_evaluate") as traced:
            evaluation = await super().evaluate(**options)
            traced.update({"score": evaluation.score})
        return evaluation
