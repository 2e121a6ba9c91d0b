"""Desktops for tinker-cookbook: groups of environments on forks of one state.

`DesktopGroupBuilder` makes the environments of one group. Each runs the agent loop of `trainer.agent` (prompts,
grammar, history of screenshots, limits), whose model is the rollout's policy: observations are the loop's prompts,
actions are its replies.

The reward of the last step is the task's score. A fault of ours raises `SessionVoid`, so the rollout has no reward:
the rollout strategy retries it or drops the group, and counts it as a `RolloutError`. No machine outlives `cleanup`.
See docs/adapters.md.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import tinker
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, StepResult, StopReason

from trainer.adapters.session import SessionSettings, SessionVoid, session, task_of_row
from trainer.agent.loop import play_episode
from trainer.agent.settings import AgentSettings
from trainer.agent.types import Message, Outcome, Reply, Trajectory

_STOP_REASONS = {"turns": StopReason.MAX_TURNS, "time": StopReason.ROLLOUT_TIMEOUT}


@dataclass(kw_only=True)
class DesktopGroupBuilder(EnvGroupBuilder):  # type: ignore[misc]
    """The environments of one row. Can be pickled until its first use."""

    row: Mapping[str, Any]
    """Has the column `task_id`."""
    group_size: int
    renderer: Renderer
    """Renderer of a vision model, unless `agent.text_only` is set."""
    settings: SessionSettings
    """Hosts and options of episodes; the view and the group's size are set here."""
    agent: AgentSettings = field(default_factory=AgentSettings)
    """Grammar, prompts and limits."""
    _envs: list["DesktopEnv"] = field(default_factory=list, init=False, repr=False)

    async def make_envs(self) -> Sequence["DesktopEnv"]:
        """Return environments that open their desktops at their first observation.

        The first call's environments are forks of one state. Later calls are retries, of which the strategies use one
        environment each: it starts alone, from the same template.
        """
        settings = replace(
            self.settings,
            view=self.agent.view,
            group_size=1 if self._envs else self.group_size,
            # The agent loop has its own time limit.
            idle_timeout=timedelta(seconds=self.agent.timeout_s) + timedelta(hours=1),
        )
        row = {**self.row, "group": uuid.uuid4().hex}
        made = [DesktopEnv(row, self.renderer, settings, self.agent) for _ in range(self.group_size)]
        self._envs += made
        return made

    async def cleanup(self) -> None:
        """Release all machines of the group."""
        await asyncio.gather(*(env.close() for env in self._envs))

    def logging_tags(self) -> list[str]:
        return [task_of_row(self.row).split("/")[0]]


class DesktopEnv(Env):  # type: ignore[misc]
    """One episode."""

    def __init__(
        self, row: Mapping[str, Any], renderer: Renderer, settings: SessionSettings, agent: AgentSettings
    ) -> None:
        self._row = row
        self._renderer = renderer
        self._settings = settings
        self._agent = agent
        self._policy = _Policy()
        self._episode: asyncio.Task[Trajectory] | None = None

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        """Open a desktop, and return the first prompt.

        Raises:
            EnvError: It could not be opened.
        """
        self._episode = asyncio.create_task(self._play(), name=f"tinker:{self._row}")
        prompt = await self._next_prompt(self._episode)
        if prompt is None:
            raise _void(self._episode.result())
        return prompt, self._renderer.get_stop_sequences()

    async def step(self, action: list[int], *, extra: Mapping[str, Any] | None = None) -> StepResult:
        """Perform the actions of a reply, and return the next prompt or the score.

        Raises:
            SessionVoid: The episode was lost to a fault of ours.
            EnvError: The request was refused.
        """
        if self._episode is None or self._episode.done():
            raise RuntimeError(f"task {task_of_row(self._row)}: the episode has ended; make another environment")
        text = self._renderer.tokenizer.decode(action, skip_special_tokens=True)
        finish = "length" if (extra or {}).get("stop_reason") == "length" else "stop"
        self._policy.replies.put_nowait(Reply(text=text, token_ids=tuple(action), finish=finish))  # type: ignore[arg-type]
        prompt = await self._next_prompt(self._episode)
        stop = self._renderer.get_stop_sequences()
        if prompt is not None:
            return StepResult(reward=0.0, episode_done=False, next_observation=prompt, next_stop_condition=stop)
        ended = self._episode.result()
        if ended.evaluation is None:
            raise _void(ended) from ended.error
        completed = ended.outcome is Outcome.TERMINATED
        reason = StopReason.COMPLETED if completed else _STOP_REASONS.get(ended.reason, StopReason.MAX_TOKENS)
        return StepResult(
            reward=self._settings.reward_of(ended.facts(max_turns=self._agent.max_turns, metadata=self._row)).total,
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=stop,
            metrics={f"stop/{reason}": 1.0, "score": ended.evaluation.score, "turns": len(ended.turns)},
        )

    async def close(self) -> None:
        """Release the machine. Idempotent."""
        if self._episode is not None:
            # Once: a second cancellation would interrupt the release.
            if not self._episode.cancelling():
                self._episode.cancel()
            await asyncio.wait({self._episode})

    async def _play(self) -> Trajectory:
        async with session(self._row, settings=self._settings) as one:
            return await play_episode(one.episode, self._policy, settings=self._agent)

    async def _next_prompt(self, episode: "asyncio.Task[Trajectory]") -> tinker.ModelInput | None:
        """Return the next prompt, or None if the episode has ended."""
        asked = asyncio.create_task(self._policy.prompts.get())
        try:
            await asyncio.wait({asked, episode}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                return None
            messages = [_message(each) for each in asked.result()]
            # Tokenising and reading pictures take up to 100 ms.
            return await asyncio.to_thread(self._renderer.build_generation_prompt, messages)
        except asyncio.CancelledError:
            # A rollout that timed out is not continued.
            episode.cancel()
            raise
        finally:
            asked.cancel()


class _Policy:
    """The agent loop's model (`trainer.agent.types.Conversation`): hands prompts out and waits for replies."""

    def __init__(self) -> None:
        self.prompts: asyncio.Queue[list[Message]] = asyncio.Queue()
        self.replies: asyncio.Queue[Reply] = asyncio.Queue()
        self._row: list[Message] = []

    async def begin(self, messages: Sequence[Message]) -> None:
        self._row = list(messages)

    async def append(self, message: Message) -> None:
        self._row.append(message)

    async def generate(self) -> Reply:
        self.prompts.put_nowait(list(self._row))
        reply = await self.replies.get()
        self._row.append(Message("assistant", (reply.text,)))
        return reply


def _void(ended: Trajectory) -> SessionVoid:
    return SessionVoid(f"episode {ended.episode_id} of {ended.task_id}: void: {ended.error or ended.reason}")


def _message(message: Message) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in message.parts
    ]
    plain = len(content) == 1 and content[0]["type"] == "text"
    return {"role": message.role, "content": content[0]["text"] if plain else content}
