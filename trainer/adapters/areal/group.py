"""Play a group of episodes on forks of one state with AReaL's engine."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, cast

from pydantic import Field, model_validator

from cuaenv.client import AsyncEnvClient, Checkpoint
from trainer.adapters.areal.engine import ArealEngine, Ask, TurnRow
from trainer.adapters.areal.rows import discounted
from trainer.agent.attempts import Environments, play_task
from trainer.agent.branching import BranchContext, TreeMember
from trainer.agent.groups import GroupMember, Groups, Tree
from trainer.agent.loop import AgentEpisode
from trainer.agent.ownership import Owner, ruling_on
from trainer.agent.starts import task_id_of
from trainer.agent.training import GroupConfig
from trainer.agent.types import Conversation, Outcome, Trajectory
from trainer.rewards.credit import CreditedMember, sibling_credit
from trainer.tokens.chat import Chat
from trainer.tokens.conversation import TokenConversation

logger = logging.getLogger(__name__)


class ArealConfig(GroupConfig):
    """How AReaL's rollout uses our desktops."""

    group: Literal["fork", "tree"] = "fork"
    """See `GroupConfig`."""
    group_size: int = Field(default=2, ge=1)
    """Episodes per task, on forks of one state. AReaL's own `n_samples` stays 1."""
    turn_discount: float = Field(default=0.9, ge=0, le=1)
    """A turn's return as a share of the next turn's: 1 gives each turn the full reward, 0 only the last one. Not for
    `credit: siblings`."""

    @model_validator(mode="after")
    def _check_siblings(self) -> Self:
        if self.credit == "siblings" and "turn_discount" in self.model_fields_set:
            raise ValueError("credit: siblings compares undiscounted returns; remove turn_discount")
        if self.group == "tree" and self.group_size <= self.branch_roots:
            raise ValueError(
                f"group_size is {self.group_size} and branch_roots {self.branch_roots}: no member is left to branch;"
                " raise group_size"
            )
        return self


NewConversation = Callable[[], TokenConversation]


async def play_group(
    environments: Environments,
    data: Mapping[str, Any],
    ask: Ask,
    *,
    chat: Chat,
    config: ArealConfig,
    measured: Callable[[str, float], None] = lambda _name, _value: None,
) -> Sequence[TurnRow]:
    """Play the task of a data set row as a group; return a row per turn.

    Void episodes are omitted, never scored 0.

    Args:
        measured: Receives the metrics of each episode, by name.

    Raises:
        InputError: The row has no task id, or a malformed checkpoint.
    """
    start = config.start_of_row(data, data.get("metadata") or {})
    conversations: list[tuple[TokenConversation, ArealEngine]] = []

    def new_conversation() -> TokenConversation:
        engine = ArealEngine(ask, chat, timeout_s=config.engine_timeout_s)
        conversations.append((TokenConversation(chat, engine, budget=config.agent.token_budget), engine))
        return conversations[-1][0]

    played = await _play_members(environments, start, new_conversation, config)
    # A reply stays one object from its sampling to its turn, so its identity maps turns to rows, also after retries.
    # The engine has one more row if the conversation refused the last reply.
    rows_by_reply = {
        id(reply): row
        for conversation, engine in conversations
        for reply, row in zip(conversation.replies, engine.turns, strict=False)
    }
    rewards = [_reward_of(trajectory, data, config) for trajectory in played]
    values = values_of(played, rewards, config)
    rewarded: list[TurnRow] = []
    for trajectory, reward, of_turns in zip(played, rewards, values, strict=True):
        measured("void", float(reward is None))
        measured("undecided", float(ruling_on(trajectory).owner is Owner.UNDECIDED))
        if reward is None or trajectory.evaluation is None:
            continue
        # Shared turns are trained in the episode that sampled them.
        own = trajectory.turns[trajectory.shared_turn_count :]
        rewarded += (
            replace(rows_by_reply[id(turn.reply)], value=value) for turn, value in zip(own, of_turns, strict=True)
        )
        measured("reward", reward)
        measured("task_score", trajectory.evaluation.score)
        measured("turns", float(len(trajectory.turns)))
        measured("branched", float(trajectory.shared_turn_count > 0))
        measured("truncated", float(trajectory.outcome is Outcome.TRUNCATED))
        measured("ended_by_guest", float(bool(trajectory.guest_end_cause)))
    if not rewarded:
        logger.warning("task %s: all %d episodes of its group are void", task_id_of(start), config.group_size)
    return rewarded


async def _play_members(
    environments: Environments, start: str | Checkpoint, new_conversation: NewConversation, config: ArealConfig
) -> list[Trajectory]:
    """Play the members of a group together; each repeats its own losses, alone."""
    groups, size = Groups(), config.group_size
    tree = Tree[BranchContext](root_count=config.branch_roots)
    options: dict[str, Any] = {"settings": config.agent, "pool": config.pool, "attempts": config.attempts}

    async def play_member() -> Trajectory:
        if not isinstance(environments, AsyncEnvClient):
            return await play_task(environments, start, new_conversation, **options)
        if config.group == "fork":
            in_group = GroupMember(environments, groups, group=start, size=size, wait_s=config.group_wait_s)
            return await play_task(in_group, start, new_conversation, **options)
        member = TreeMember(environments, tree, config=config, size=size)

        async def play(episode: AgentEpisode, conversation: Conversation) -> Trajectory:
            return await member.play_episode(episode, cast(TokenConversation, conversation), settings=config.agent)

        return await play_task(member, start, new_conversation, play=play, **options)

    async with asyncio.TaskGroup() as tasks:
        playing = [tasks.create_task(play_member()) for _ in range(size)]
    return [each.result() for each in playing]


def _reward_of(trajectory: Trajectory, data: Mapping[str, Any], config: ArealConfig) -> float | None:
    """Return an episode's reward; None if it is void or has no turns."""
    if trajectory.evaluation is None or not trajectory.turns:
        return None
    return config.breakdown_of(trajectory.facts(max_turns=config.agent.max_turns, metadata=data)).total


def values_of(
    played: Sequence[Trajectory], rewards: Sequence[float | None], config: ArealConfig
) -> list[Sequence[float]]:
    """Return what AReaL gets as the reward of each turn that an episode took itself; without a reward, none. Pure.

    AReaL's advantages are these values, see `trainer.adapters.areal.checks`: discounted rewards, or with
    `credit: siblings` the advantages themselves, in units of the reward.
    """
    if config.credit == "siblings":
        members = [
            CreditedMember(
                name=trajectory.episode_id or f"void {number}",
                parent=trajectory.parent_episode_id,
                shared_count=trajectory.shared_turn_count,
                turn_count=len(trajectory.turns),
                reward=reward,
            )
            for number, (trajectory, reward) in enumerate(zip(played, rewards, strict=True))
        ]
        return [credit.advantages for credit in sibling_credit(members, by_deviation=False)]
    return [
        discounted(reward, turn_count=len(trajectory.turns), discount=config.turn_discount)[
            trajectory.shared_turn_count :
        ]
        if reward is not None
        else ()
        for trajectory, reward in zip(played, rewards, strict=True)
    ]
