"""A member of a group that branches: where its episode starts, and when other members may continue from it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from math import ceil
from typing import Any, Protocol, Unpack

from cuaenv.client import AsyncEnvClient, AsyncEpisode, Checkpoint
from cuaenv.client.view import ResetOptions
from trainer.agent.groups import Tree
from trainer.agent.loop import AgentEpisode, Traced, play_episode, untraced
from trainer.agent.settings import AgentSettings
from trainer.agent.training import GroupConfig
from trainer.agent.turns import BranchPoint
from trainer.agent.types import Conversation, Reply, Trajectory


class BranchingConversation(Conversation, Protocol):
    """A conversation from whose rows others continue, such as `trainer.tokens.conversation.TokenConversation`."""

    def prefix(self) -> Any:
        """Return a row of all that the model read and sampled in the current one before its latest reply."""

    async def resume(self, row: Any) -> None:
        """Continue a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchContext:
    """The history of an episode at a branch point."""

    episode_id: str
    """The episode."""
    point: BranchPoint
    prefix: Any
    """The prefix of its conversation; each continuation needs its own copy."""


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
        traced: Traced = untraced,
    ) -> None:
        """Prepare; opens nothing.

        Args:
            client: Opens and forks episodes.
            tree: The tree of its group.
            config: When to branch, and into how many.
            size: Members of the group.
            lease_ttl: How long forks outlive this process.
            traced: As `trainer.agent.loop.play_episode` takes; also traces each fork, `env_branch`.
        """
        self._context: BranchContext | None = None
        """The history with which the latest episode started; None at the beginning of its task."""
        self._client = client
        self._tree = tree
        self._config = config
        self._lease_ttl = lease_ttl
        self._traced = traced
        self._is_new = True
        self._episode: AsyncEpisode | None = None
        # The others continue on forks, on the host of their root.
        self._forks_per_root = max(0, ceil((size - config.branch_roots) / config.branch_roots))

    async def reset(self, task: str | Checkpoint, **options: Unpack[ResetOptions]) -> AsyncEpisode:
        """Open its episode in the tree the first time, later alone at the beginning of the task. Raises: EnvError."""
        is_new, self._is_new = self._is_new, False
        self._context = self._episode = None
        if not is_new:
            return await self._client.reset(task, **options)
        options["branches"] = self._forks_per_root
        self._episode, self._context = await self._tree.member(lambda: self._client.reset(task, **options))
        return self._episode

    async def play_episode(
        self, episode: AgentEpisode, conversation: BranchingConversation, *, settings: AgentSettings
    ) -> Trajectory:
        """Play the open episode, and let others branch from it, as `GroupConfig.branch_policy` says."""
        context, policy = self._context, self._config.branch_policy
        branched_at = len(context.point.turns) if context else 0

        async def offer_branch(turn_count: int, reply: Reply, branch_point: Callable[[], BranchPoint]) -> None:
            nonlocal branched_at
            if self._episode is None or not policy(turns_since=turn_count - branched_at, reply=reply):
                return
            branched_at = turn_count
            prefix = conversation.prefix()
            at = BranchContext(episode_id=episode.episode_id, point=branch_point(), prefix=prefix)
            await self._branch(self._episode, at)

        point = None
        if context is not None:
            await conversation.resume(context.prefix.copy())
            point = replace(context.point, history=context.point.history.copy())
        trajectory = await play_episode(
            episode, conversation, settings=settings, branch_point=point, offer_branch=offer_branch, traced=self._traced
        )
        return replace(trajectory, parent_episode_id=context.episode_id if context else "")

    async def _branch(self, episode: AsyncEpisode, context: BranchContext) -> None:
        """Let waiting members continue from an episode."""
        wait = timedelta(seconds=self._config.group_wait_s)
        with self._traced("env_branch", {"waiting": self._tree.waiting_count}):
            await self._tree.branch(
                lambda count: self._client.fork(episode, count=count, lease_ttl=self._lease_ttl, timeout=wait),
                most=self._config.branch_ways - 1,
                context=context,
            )
