"""Run a group of episodes on forks of one state with AReaL's engine."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from cuaenv.client import Checkpoint
from trainer.adapters.areal.conversation import ArealConversation, Engine
from trainer.adapters.areal.rows import Rewarded, discounted
from trainer.agent.attempts import GroupEnvironments, run_group
from trainer.agent.loop import AgentEpisode
from trainer.agent.ownership import Owner, ruling_on
from trainer.agent.pacing import pacer_of_loop
from trainer.agent.starts import start_of, task_id_of
from trainer.agent.training import TrainingConfig
from trainer.config import ConfigError
from trainer.tokens.chat import Chat

logger = logging.getLogger(__name__)
_METRICS = ("reward", "task_score", "turns", "truncated", "ended_by_guest", "void", "undecided")


class ArealConfig(TrainingConfig):
    """How AReaL's rollout uses our desktops."""

    group_size: int = Field(default=2, ge=1)
    """Episodes per task, on forks of one state. AReaL's own `n_samples` stays 1."""
    turn_discount: float = Field(default=0.9, ge=0, le=1)
    """A turn's return as a share of the next turn's: 1 gives each turn the full reward, 0 only the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """The rows and metrics of a group."""

    rows: Sequence[Rewarded]
    """One per turn; empty if all episodes are void."""
    metrics: Mapping[str, Sequence[float]]
    """Metrics by name, one value per episode that has it."""


class _Paced:
    """Environments whose resets are spaced while they fail: AReaL replaces each rejected group at once, without end."""

    def __init__(self, environments: GroupEnvironments) -> None:
        self._environments = environments

    def reset(self, task: str | Checkpoint, **options: Any) -> AbstractAsyncContextManager[AgentEpisode]:
        return pacer_of_loop().open(task_id_of(task), lambda: self._environments.reset(task, **options))

    def reset_group(
        self, task: str | Checkpoint, **options: Any
    ) -> AbstractAsyncContextManager[Sequence[AgentEpisode]]:
        return pacer_of_loop().open(task_id_of(task), lambda: self._environments.reset_group(task, **options))


async def run_task_group(
    environments: GroupEnvironments, data: Mapping[str, Any], engine: Engine, *, chat: Chat, config: ArealConfig
) -> GroupResult:
    """Run the task of a data set row as a group.

    Void episodes are omitted, never scored 0.

    Raises:
        ConfigError: The row has no task id, or a malformed checkpoint.
    """
    task = data.get(config.task_key)
    if not isinstance(task, str) or not task:
        raise ConfigError(f"data set row: no {config.task_key} (envd.task_key); it has {', '.join(data)}")
    conversations: list[ArealConversation] = []

    def new_conversation() -> ArealConversation:
        made = ArealConversation(chat, engine, settings=config.agent, engine_timeout_s=config.engine_timeout_s)
        conversations.append(made)
        return made

    trajectories = await run_group(
        _Paced(environments),
        start_of({**(data.get("metadata") or {}), **data}, task),
        new_conversation,
        size=config.group_size,
        settings=config.agent,
        pool=config.pool,
        attempts=config.attempts,
    )
    # A reply stays one object from its sampling to its turn, so its identity maps turns to rows, also after retries.
    rows_by_reply = {id(reply): row for one in conversations for reply, row in one.turns}
    rewarded: list[Rewarded] = []
    metrics: dict[str, list[float]] = {name: [] for name in _METRICS}
    for trajectory in trajectories:
        is_void = trajectory.evaluation is None
        metrics["void"].append(float(is_void))
        metrics["undecided"].append(float(ruling_on(trajectory).owner is Owner.UNDECIDED))
        if is_void or not trajectory.turns:
            continue
        facts = trajectory.facts(max_turns=config.agent.max_turns, metadata=data)
        reward = config.breakdown_of(facts).total
        rows = [rows_by_reply[id(turn.reply)] for turn in trajectory.turns]
        returns = discounted(reward, turn_count=len(rows), discount=config.turn_discount)
        rewarded += map(Rewarded, rows, returns)
        metrics["reward"].append(reward)
        metrics["task_score"].append(facts.task_score)
        metrics["turns"].append(float(len(rows)))
        metrics["truncated"].append(float(facts.truncated))
        metrics["ended_by_guest"].append(float(bool(facts.guest_end_cause)))
    if not rewarded:
        logger.warning("task %s: all %d episodes of its group are void", task, config.group_size)
    return GroupResult(rows=rewarded, metrics=metrics)
