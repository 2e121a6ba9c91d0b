"""`DesktopAgentLoop`: desktops for verl, as an agent loop with the prompts, grammars and limits of `trainer.agent`.

The sessions of a prompt start on forks of one state. The tokens to train on are those that the engine sampled, with its
log-probabilities; screenshots and other text of the environment have mask 0.

A void episode raises `SessionVoid`. verl's v1 trainer then leaves the session out of its group and out of the batch. It
is never scored 0. See docs/adapters.md.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from cuaenv.client import Checkpoint, EnvError, shared_client
from trainer.adapters.session import SessionVoid
from trainer.agent.attempts import Environments, play_task
from trainer.agent.groups import GroupMember, Groups
from trainer.agent.ownership import is_fault
from trainer.agent.starts import task_id_of
from trainer.agent.training import TrainingConfig
from trainer.agent.types import ModelFailed, Reply, Trajectory
from trainer.config import InputError
from trainer.tokens.chat import Chat
from trainer.tokens.conversation import TokenConversation
from trainer.tokens.rows import Row

_GROUP_WAIT_S = 60.0


class DesktopAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """One session of a prompt: an episode on a desktop."""

    def __init__(self, *arguments: Any, envd: Mapping[str, Any], **options: Any) -> None:
        """Check the configuration.

        Args:
            envd: See `TrainingConfig`. The row of an episode must not be divided: `agent.images_per_row` is 0.

        Raises:
            InputError: A key is unknown or a value is invalid.
        """
        super().__init__(*arguments, **options)
        plain = OmegaConf.to_container(envd) if OmegaConf.is_config(envd) else envd
        self._config = TrainingConfig.from_mapping(plain)
        if self._config.agent.images_per_row:
            raise InputError(
                f"envd.agent.images_per_row is {self._config.agent.images_per_row}: verl trains one row per session;"
                " set it to 0 and limit agent.max_turns"
            )
        if self.processor is None and not self._config.agent.text_only:
            raise InputError("the model has no processor for images; use a vision model or set envd.agent.text_only")
        self._chat = Chat(self.tokenizer, self.processor, template_options=dict(self.apply_chat_template_kwargs))

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Run the episode of a data set row.

        Raises:
            SessionVoid: The episode was lost; it has no score.
            EnvError: The request was refused, for example because the task is unknown.
            InputError: The row has no task id, or a malformed checkpoint.
        """
        start = self._config.start_of_row(row, row.get("extra_info") or {})
        limits = self.rollout_config
        budget = replace(self._config.agent.token_budget, prompt=limits.prompt_length, response=limits.response_length)
        attempts: list[tuple[TokenConversation, _Engine]] = []

        def new_conversation() -> TokenConversation:
            engine = _Engine(self, self._chat, self._config, sampling_params, row)
            attempts.append((TokenConversation(self._chat, engine, budget=budget), engine))
            return attempts[-1][0]

        group = await _group_of((row.get("uid"), start))
        trajectory = await play_task(
            self._environments(group),
            start,
            new_conversation,
            settings=self._config.agent,
            pool=self._config.pool,
            attempts=self._config.attempts,
        )
        if trajectory.evaluation is None:
            if isinstance(trajectory.error, EnvError) and not is_fault(trajectory.error):
                raise trajectory.error
            cause = trajectory.error or trajectory.reason
            raise SessionVoid(
                f"episode {trajectory.episode_id} of {task_id_of(start)}: void: {cause}"
            ) from trajectory.error
        conversation, engine = attempts[-1]
        return self._output(conversation.rows[-1], engine, trajectory, row)

    def _environments(self, group: "_Arrivals") -> Environments:
        client = shared_client(self._config.client)
        return GroupMember(client, group.groups, group="", size=group.size, wait_s=_GROUP_WAIT_S)

    def _output(self, made: Row, engine: "_Engine", trajectory: Trajectory, data: Mapping[str, Any]) -> AgentLoopOutput:
        facts = trajectory.facts(max_turns=self._config.agent.max_turns, metadata=data)
        timings = trajectory.timings_s
        return AgentLoopOutput(
            prompt_ids=list(made.prompt_ids),
            response_ids=[token for piece in made.pieces for token in piece.train_ids],
            response_mask=[int(piece.sampled) for piece in made.pieces for _ in piece.train_ids],
            response_logprobs=[
                value for piece in made.pieces for value in piece.log_probs or [0.0] * len(piece.train_ids)
            ]
            if engine.with_log_probs
            else None,
            multi_modal_data={"images": list(made.trained_images)} if made.trained_images else {},
            reward_score=self._config.breakdown_of(facts).total,
            num_turns=1 + 2 * len(trajectory.turns),
            metrics=AgentLoopMetrics(
                generate_sequences=timings.get("model", 0.0),
                tool_calls=timings.get("step", 0.0),
                compute_score=timings.get("evaluate", 0.0),
            ),
            extra_fields={
                **engine.extra_fields,
                "turn_scores": [],
                "tool_rewards": [],
                "reward_extra_info": {"task_score": facts.task_score, "truncated": float(facts.truncated)},
            },
        )


@dataclass(eq=False, slots=True)
class _Arrivals:
    """The sessions of one prompt."""

    size: int = 0
    groups: Groups = field(default_factory=Groups)


_arriving: dict[Any, _Arrivals] = {}


async def _group_of(key: tuple[Any, str | Checkpoint]) -> _Arrivals:
    """Return the group of the sessions that arrive in the same iteration of the event loop.

    verl creates the tasks of a prompt's sessions at once, and awaits nothing before `run`. Their number differs between
    training, validation and prompts with a number of their own, and is not an argument of `run`.
    """
    here = (asyncio.get_running_loop(), *key)
    group = _arriving.setdefault(here, _Arrivals())
    group.size += 1
    await asyncio.sleep(0)
    _arriving.pop(here, None)
    return group


class _Engine:
    """verl's engine in one session. See `trainer.tokens.conversation.Engine`."""

    def __init__(
        self,
        loop: DesktopAgentLoop,
        chat: Chat,
        config: TrainingConfig,
        sampling_params: Mapping[str, Any],
        row: Mapping[str, Any],
    ) -> None:
        self.extra_fields: dict[str, Any] = {}
        """Fields of the engine's latest response, with the earliest version of the weights."""
        self.with_log_probs = bool(sampling_params.get("logprobs"))
        self._chat = chat
        self._server = loop.server_manager
        self._sampling_params = dict(sampling_params)
        self._timeout_s = config.engine_timeout_s
        self._priority = int(row.get("priority", 0))
        # verl sends the requests of one id to one server, which has their prefix cached.
        self._request_id = uuid.uuid4().hex

    def encode(self, images: Sequence[Any]) -> None:
        """verl encodes pictures itself."""

    async def sample(self, row: Row, *, limit: int) -> Reply:
        """See `trainer.tokens.conversation.Engine`. Raises: ModelFailed."""
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._server.generate(
                    request_id=self._request_id,
                    # With one placeholder per image token, as verl's own loops; its servers adapt it to their engine.
                    prompt_ids=list(row.as_prompt().train_ids),
                    sampling_params={**self._sampling_params, "max_tokens": limit},
                    image_data=list(row.images) or None,
                    priority=self._priority,
                )
        except Exception as error:
            waited_s = time.monotonic() - started_s
            raise ModelFailed(
                f"verl's engine: no response after {waited_s:.0f} s: {type(error).__name__}: {error}"
            ) from error
        first = self.extra_fields.get("min_global_steps")
        self.extra_fields = dict(response.extra_fields)
        if first is not None:
            self.extra_fields["min_global_steps"] = first
        ids = tuple(response.token_ids)
        aborted = response.stop_reason in ("abort", "aborted")
        truncated = response.stop_reason == "length" or len(ids) >= limit
        if self.with_log_probs and not aborted and len(response.log_probs or ()) != len(ids):
            raise ModelFailed(
                f"verl's engine returned {len(ids)} ids with {len(response.log_probs or ())} log-probabilities"
            )
        return Reply(
            token_ids=ids,
            log_probs=tuple(response.log_probs or ()) if self.with_log_probs else (0.0,) * len(ids),
            text=self._chat.decode(ids),
            finish="abort" if aborted else "length" if truncated else "stop",
        )
