"""An episode of a rollout with some calls replaced, for `Rollout.play_episode`."""

from datetime import timedelta

from cuaenv.client import Action, Evaluation, StepResult, View
from trainer.agent.loop import AgentEpisode


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
