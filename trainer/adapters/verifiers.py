"""Desktops as a taskset and an environment of verifiers (v1): `vf-eval` and prime-rl play them.

The environment plays the user: it shows the screen, reads the model's reply and acts. It runs the same loop, prompt and
grammars as training with slime (`trainer.agent`), so all screenshots stay in the conversation.

A fault of ours raises `SandboxError`: verifiers records it, and the episode has no reward.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from cuaenv.client import EnvError, shared_client
from trainer.adapters.background import blocking
from trainer.adapters.session import SessionSettings, session
from trainer.agent.loop import AgentEpisode, play_episode
from trainer.agent.ownership import is_fault
from trainer.agent.settings import AgentSettings
from trainer.agent.types import BudgetExhausted, Message, ModelFailed, Reply

__all__ = ["DesktopConfig", "DesktopData", "DesktopEnv", "DesktopEnvConfig", "DesktopTask", "DesktopTaskset"]


class DesktopData(vf.TaskData):
    """One task."""

    task_id: str


class DesktopConfig(vf.TasksetConfig):
    """Which tasks, and where. The token is `ENVD_TOKEN`: configurations are recorded."""

    envd: str = ""
    """`HOST:PORT`; by default the variable `ENVD_TARGET`, or else this host."""
    tasks: list[str] = Field(default_factory=list)
    """Ids of tasks or of variants (`NAME?seed=N`); by default those of `suite`."""
    suite: str = ""
    """All tasks of this suite."""


class DesktopTask(vf.Task[DesktopData]):
    """A task; its daemon scores it."""


class DesktopTaskset(vf.Taskset[DesktopTask, DesktopConfig]):
    """Tasks of a daemon."""

    def load(self) -> Iterator[DesktopTask]:
        """Yield the tasks. Raises: ValueError: No tasks are named; EnvError: the daemon cannot list them."""
        config = self.config
        if not config.tasks and not config.suite:
            raise ValueError("taskset: names no tasks; set tasks or suite")
        ids = config.tasks or blocking(_task_ids(SessionSettings.connect(config.envd), config.suite))
        for task_id in ids:
            yield DesktopTask(DesktopData(id=task_id, name=task_id, prompt=None, task_id=task_id), config.task)


class DesktopEnvConfig(vf.EnvConfig):
    """How episodes are played."""

    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})
    """The model; the harness `null` only talks."""
    agent: dict[str, Any] = Field(default_factory=dict)
    """Settings of `trainer.agent.settings.AgentSettings`: grammar, turns, pictures."""
    pool: str = ""
    """The daemon's pool; by default each task's own."""
    group_size: int = Field(default=1, ge=1)
    """Episodes of one task that start on forks of one state: the number of rollouts of a task."""
    group_wait_s: float = Field(default=60.0, gt=0)
    """How long a group keeps a machine for an episode that was not started."""
    ended_by_guest_score: float = Field(default=-0.1, ge=-1, le=0)
    """Reward if the agent ended its guest without solving the task; set 0 to evaluate."""
    reward: str | dict[str, Any] = "task"
    """A reward by name or as `module:NAME`, see docs/make-it-yours.md."""


class DesktopEnv(vf.Env[DesktopEnvConfig]):
    """One episode: the model acts on a desktop until it says that the task is done, or a budget ends."""

    def __init__(self, config: DesktopEnvConfig) -> None:
        """Check the settings. Raises: InputError: a setting is invalid."""
        super().__init__(config)
        self._agent = AgentSettings.from_mapping(config.agent)
        if self._agent.images_per_row:
            raise ValueError("agent.images_per_row: verifiers keeps the whole conversation; remove it")
        self._settings = SessionSettings.connect(
            self.taskset.config.envd,
            run="verifiers",
            pool=config.pool,
            max_steps=self._agent.max_turns,
            view=self._agent.view,
            reset_timeout=self._agent.reset_timeout,
            group_size=config.group_size,
            group_wait=timedelta(seconds=config.group_wait_s),
            ended_by_guest_score=config.ended_by_guest_score,
            reward=config.reward,
        )

    async def run(self, task: Any, agents: Any) -> None:
        """Play one episode. Raises: SandboxError: it was lost."""
        try:
            # The machine first: without one, the model is not asked.
            async with self._opened(task.data.task_id) as episode, agents.player.interaction(task) as interaction:
                trajectory = await play_episode(episode, _Conversation(interaction), settings=self._agent)
        except EnvError as error:
            if is_fault(error):
                raise vf.SandboxError(f"task {task.data.task_id}: {error}") from error
            raise
        trace = interaction.trace
        if isinstance(trajectory.error, EnvError):
            raise vf.SandboxError(f"task {task.data.task_id}: {trajectory.error}") from trajectory.error
        if trajectory.evaluation is None:
            # A failure of the model is already on the trace.
            if not trace.errors:
                raise RuntimeError(f"task {task.data.task_id}: no score: {trajectory.reason}") from trajectory.error
            return
        facts = trajectory.facts(max_turns=self._agent.max_turns, metadata={})
        trace.record_reward("score", self._settings.reward_of(facts).total)
        trace.record_metric("ended_by_guest", float(bool(trajectory.guest_end_cause)))
        trace.record_metric("turns", float(len(trajectory.turns)))

    @asynccontextmanager
    async def _opened(self, task_id: str) -> AsyncIterator[AgentEpisode]:
        async with session(task_id, settings=self._settings) as one:
            yield one.episode


class _Conversation:
    """A `trainer.agent.types.Conversation` through an interaction."""

    def __init__(self, interaction: Any) -> None:
        self._interaction = interaction
        self._unsent: list[dict[str, Any]] = []

    async def begin(self, messages: Sequence[Message]) -> None:
        self._unsent = [message.to_openai() for message in messages]

    async def append(self, message: Message) -> None:
        self._unsent.append(message.to_openai())

    async def generate(self) -> Reply:
        messages, self._unsent = self._unsent, []
        segment = await self._interaction.turn(messages)
        if not segment.terminated:
            return Reply(text=segment.last_reply)
        trace = self._interaction.trace
        if not trace.errors:
            raise BudgetExhausted(f"verifiers ended the rollout: {trace.stop_condition}", budget="total")
        raise ModelFailed(f"verifiers: the model failed: {trace.stop_condition}")


async def _task_ids(settings: SessionSettings, suite: str) -> list[str]:
    tasks = await shared_client(settings.client).list_tasks(suite=suite)
    return [task.task_id for task in tasks if task.runnable is not False]
