"""A member of a group that branches: where its episode starts, and when other members may continue from it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from math import ceil
from statistics import fmean
from typing import Unpack

from cuaenv.client import AsyncEnvClient, AsyncEpisode, Checkpoint
from cuaenv.client.view import ResetOptions
from trainer.agent.loop import AgentEpisode, run_episode
from trainer.agent.settings import AgentSettings
from trainer.agent.training import GroupConfig
from trainer.agent.tree import Tree
from trainer.agent.turns import BranchPoint
from trainer.agent.types import Trajectory
from trainer.tokens.rows import Row, Segment
from trainer.tokens.sglang import SglangConversation


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchContext:
    """The history of an episode at a branch point."""

    episode_id: str
    """The episode."""
    point: BranchPoint
    prefix: Segment
    """The current row: all that the model read and sampled in it."""


class TreeMember:
    """A member of a tree. See `trainer.agent.attempts.Environments`."""

    def __init__(
        self,
        client: AsyncEnvClient,
        tree: Tree[BranchContext],
        *,
        config: GroupConfig,
        size: int,
        lease_ttl: timedelta = timedelta(minutes=5),
    ) -> None:
        """Prepare; opens nothing.

        Args:
            client: Opens and forks episodes.
            tree: The tree of its group.
            config: When to branch, and into how many.
            size: Members of the group.
            lease_ttl: How long forks outlive this process.
        """
        self.context: BranchContext | None = None
        """The history with which the latest episode started; None at the beginning of its task."""
        self._client = client
        self.tree = tree
        self._config = config
        self._lease_ttl = lease_ttl
        self._is_new = True
        self._episode: AsyncEpisode | None = None
        # The others continue on forks, on the host of their root.
        self._forks_per_root = max(0, ceil((size - config.branch_roots) / config.branch_roots))

    async def reset(self, task: str | Checkpoint, **options: Unpack[ResetOptions]) -> AsyncEpisode:
        """Open its episode in the tree the first time, later alone at the beginning of the task. Raises: EnvError."""
        is_new, self._is_new = self._is_new, False
        self.context = self._episode = None
        if not is_new:
            return await self._client.reset(task, **options)
        options["branches"] = self._forks_per_root
        self._episode, self.context = await self.tree.member(lambda: self._client.reset(task, **options))
        return self._episode

    async def run(
        self, episode: AgentEpisode, conversation: SglangConversation, *, settings: AgentSettings
    ) -> Trajectory:
        """Run the open episode, and let others branch from it.

        They do before a reply of which the policy was unsure, and `branch_every` turns after the last branch point.
        """
        context, config = self.context, self._config
        branched_at = len(context.point.turns) if context else 0

        async def offer_branch(turn_count: int, branch_point: Callable[[], BranchPoint]) -> None:
            nonlocal branched_at
            row = conversation.rows[-1]
            if self._episode is None or (turn_count - branched_at < config.branch_every and not self._is_unsure(row)):
                return
            branched_at = turn_count
            prefix = row.as_prompt(without_last_reply=True)
            at = BranchContext(episode_id=episode.episode_id, point=branch_point(), prefix=prefix)
            await self.branch(self._episode, at)

        point = None
        if context is not None:
            await conversation.continue_from(context.prefix)
            point = replace(context.point, history=context.point.history.copy())
        return await run_episode(
            episode, conversation, settings=settings, branch_point=point, offer_branch=offer_branch
        )

    async def branch(self, episode: AsyncEpisode, context: BranchContext) -> None:
        """Let waiting members continue from an episode."""
        wait = timedelta(seconds=self._config.group_wait_s)
        await self.tree.branch(
            lambda count: self._client.fork(episode, count=count, lease_ttl=self._lease_ttl, timeout=wait),
            most=self._config.branch_ways - 1,
            context=context,
        )

    def _is_unsure(self, row: Row) -> bool:
        """Whether the reply with which a row ends surprised the policy that sampled it."""
        log_probs, limit = row.pieces[-1].log_probs, self._config.branch_above
        return limit is not None and -fmean(log_probs or (0.0,)) > limit
