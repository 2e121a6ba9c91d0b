"""A member of a group that branches: where its episode starts, and when other members may continue from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import ceil
from typing import Any, Protocol, Unpack

from cuaenv.client import AsyncEnvClient, AsyncEpisode, Checkpoint
from cuaenv.client.view import ResetOptions
from trainer.agent.forks import Tree
from trainer.agent.loop import AgentEpisode, Traced, run_episode, untraced
from trainer.agent.settings import AgentSettings
from trainer.agent.training import GroupConfig
from trainer.agent.turns import BranchPoint
from trainer.agent.types import Conversation, GenerationAborted, Message, ModelFailed, Outcome, Reply, Trajectory


class BranchingConversation(Conversation, Protocol):
    """A conversation from whose rows others continue, such as `trainer.tokens.conversation.TokenConversation`."""

    def prefix(self) -> Any:
        """Return a row of all that the model read and sampled in the current one before its latest reply."""

    async def resume(self, row: Any) -> None:
        """Continue a row."""

    def give(self, text: str) -> Reply:
        """Add a reply that is not sampled and return it."""


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
        replies: Sequence[str] = (),
        lease_ttl: timedelta = timedelta(minutes=5),
        traced: Traced = untraced,
    ) -> None:
        """Prepare; opens nothing.

        Args:
            client: Opens and forks episodes.
            tree: The tree of its group.
            config: When to branch, and into how many.
            size: Members of the group.
            replies: Given replies, with which an episode at the beginning of the task starts. Its shared turns are
                those. Without `group: tree`, the others branch after them, and only there.
            lease_ttl: How long forks outlive this process.
            traced: As `trainer.agent.loop.run_episode` takes; also traces each fork, `env_branch`.
        """
        self._context: BranchContext | None = None
        """The history with which the latest episode started; None at the beginning of its task."""
        self._client = client
        self._tree = tree
        self._config = config
        self._size = size
        self._replies = tuple(replies)
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
        context, policy, branches = self._context, self._config.branch_policy, self._config.group == "tree"
        branched_at = len(context.point.turns) if context else 0

        async def offer_branch(turn_count: int, reply: Reply, branch_point: Callable[[], BranchPoint]) -> None:
            nonlocal branched_at
            if self._episode is None or not branches or not policy(turns_since=turn_count - branched_at, reply=reply):
                return
            branched_at = turn_count
            prefix = conversation.prefix()
            at = BranchContext(episode_id=episode.episode_id, point=branch_point(), prefix=prefix)
            await self._branch(self._episode, at, most=self._config.branch_ways - 1)

        point = None
        if context is not None:
            await conversation.resume(context.prefix.copy())
            point = replace(context.point, history=context.point.history.copy())
        elif self._replies:
            point, failed = await perform(episode, conversation, self._replies, settings=settings, traced=self._traced)
            if point is None:
                return failed
            branched_at = len(point.turns)
            if self._episode is not None and not branches:
                at = BranchContext(
                    episode_id=episode.episode_id,
                    point=replace(point, history=point.history.copy()),
                    prefix=conversation.prefix(),
                )
                await self._branch(self._episode, at, most=self._size - 1)
        trajectory = await run_episode(
            episode, conversation, settings=settings, branch_point=point, offer_branch=offer_branch, traced=self._traced
        )
        return replace(trajectory, parent_episode_id=context.episode_id if context else "")

    async def _branch(self, episode: AsyncEpisode, context: BranchContext, *, most: int) -> None:
        """Let waiting members continue from an episode."""
        wait = timedelta(seconds=self._config.group_wait_s)
        with self._traced("env_branch", {"waiting": self._tree.waiting_count}):
            await self._tree.branch(
                lambda count: self._client.fork(episode, count=count, lease_ttl=self._lease_ttl, timeout=wait),
                most=most,
                context=context,
            )


async def perform(
    episode: AgentEpisode,
    conversation: BranchingConversation,
    replies: Sequence[str],
    *,
    settings: AgentSettings,
    traced: Traced = untraced,
) -> tuple[BranchPoint | None, Trajectory]:
    """Perform given replies in a new episode.

    Returns:
        The state after them; None if they could not be performed, or ended the episode. And the trajectory, which is
        FAILED then: a state that the replies do not lead to is not where the group was to start.
    """
    reached: list[BranchPoint] = []

    async def interrupted(point: BranchPoint) -> None:
        reached.append(point)

    given = _GivenReplies(conversation, replies)
    trajectory = await run_episode(episode, given, settings=settings, interrupted=interrupted, traced=traced)
    mistakes = [error for turn in trajectory.turns for error in turn.facts.errors if error]
    if reached and not mistakes:
        return reached[0], trajectory
    if trajectory.outcome is not Outcome.FAILED:
        reason = "; ".join(mistakes) or f"the episode ended: {trajectory.reason}"
        error = ModelFailed(f"the row's given replies lead to no state to start in: {reason}")
        trajectory = replace(trajectory, outcome=Outcome.FAILED, reason="GivenReplies", error=error)
    return None, trajectory


class _GivenReplies:
    """A conversation with given replies, which is aborted after them."""

    def __init__(self, conversation: BranchingConversation, replies: Sequence[str]) -> None:
        self._conversation = conversation
        self._left = list(replies)

    async def begin(self, messages: Sequence[Message]) -> None:
        await self._conversation.begin(messages)

    async def append(self, *messages: Message) -> None:
        await self._conversation.append(*messages)

    async def generate(self) -> Reply:
        if not self._left:
            raise GenerationAborted("the given replies are performed")
        return self._conversation.give(self._left.pop(0))
