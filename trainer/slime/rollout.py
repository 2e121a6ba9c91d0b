"""Run an episode with slime's engine and write its rows into slime's samples."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cuaenv.client import Checkpoint, shared_client
from trainer.agent.attempts import run_task
from trainer.agent.loop import AgentEpisode, run_episode
from trainer.agent.prompts import prompt_hash
from trainer.agent.starts import start_name, start_of
from trainer.agent.tree import tree_of_loop
from trainer.agent.turns import BranchPoint
from trainer.agent.types import BudgetExhausted, ModelFailed, Trajectory, data_uri
from trainer.slime import slime_compat
from trainer.slime.checks import warn_of_capacity
from trainer.slime.config import SlimeConfig
from trainer.slime.environments import SampleEnvironments, TracedMember
from trainer.slime.guard import Halted
from trainer.slime.health import DaemonWatch, watch_of
from trainer.slime.partial import Partial, partial_of, replace_partial, stored
from trainer.slime.pictures import files_of, require_readable
from trainer.slime.probe import warn_of_engine
from trainer.slime.samples import fill, note, set_status
from trainer.slime.slime_compat import GenerateState, Sample
from trainer.tokens.chat import Chat
from trainer.tokens.rows import Row
from trainer.tokens.sglang import SglangConversation, TokenBudget, is_context_full

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)
_ABORT_POLL_S = 0.5
_ENGINE_PAUSE_S = 1.0
#: For a step that is running when slime aborts, and the checkpoint after it.
_KEEP_S = 60.0
_SERVER_ERROR_ATTEMPTS = 3
_TRANSIENT = {408, 409, 425, 429}
_QUOTED_CHARS = 300


class Rollout:
    """The rollout of one sample."""

    def __init__(self, args: Any, sample: Sample, sampling_params: Mapping[str, Any], *, config: SlimeConfig) -> None:
        """Prepare; `args`, `sample` and `sampling_params` are those that slime passes to generate."""
        self.sample = sample
        self.config = config
        self.args = args
        self._sampling_params = dict(sampling_params)  # the samples of an evaluation share one dict
        self._state: GenerateState = slime_compat.generate_state(args)
        options = getattr(args, "apply_chat_template_kwargs", None)
        self._chat = Chat(self._state.tokenizer, self._state.processor, template_options=options)
        self._written: list[bytes] = []
        self._conversation: SglangConversation
        """That of the latest attempt."""
        self._client = shared_client(config.client)
        self.keeps_partial = False
        """Whether the sample continues in a later rollout if slime aborts it."""
        self._partial: Partial | None = None
        self._attempt_count = 0
        self._continued_count = 0
        self._parent_id = ""
        self._perturbations: tuple[str, ...] = ()

    async def run(self, start: str | Checkpoint, *, group_size: int) -> Trajectory | None:
        """Run a task, also from a checkpoint of it. Returns None if slime aborted the rollout.

        Raises: Halted: No daemon answers.
        """
        config = self.config
        client = self._client
        await warn_of_capacity(self.args, config, client)
        await require_readable(self._call_engine, self._engine_url, self._chat, config.picture_dir)
        await warn_of_engine(self._call_engine, self._engine_url, self._chat)
        environments = SampleEnvironments(
            client,
            self.sample,
            group_size=group_size,
            group_wait_s=config.group_wait_s,
            lease_ttl=config.lease_ttl,
            member=self._member(start, group_size) if config.group == "tree" and group_size > 1 else None,
            partial=partial_of(self.sample),
        )
        episode = run_task(
            environments,
            start,
            self.new_conversation,
            settings=config.agent,
            pool=config.pool,
            attempts=config.attempts,
            run=lambda episode, _: self._run_episode(environments, episode),
        )
        async with watch_of(client, config.daemon_timeout_s).use() as watch:
            trajectory = await _until_aborted(
                self._state, watch, episode, has_state=lambda: self.keeps_partial and environments.episode is not None
            )
        self._attempt_count = environments.reset_count
        self._continued_count = len(environments.resumed.point.turns) if environments.resumed else 0
        member = environments.member
        self._parent_id = member.context.episode_id if member and member.context else ""
        self._perturbations = environments.episode.perturbations if environments.episode else ()
        return trajectory

    def _member(self, start: str | Checkpoint, group_size: int) -> TracedMember:
        tree = tree_of_loop((self.sample.group_index, start), root_count=self.config.branch_roots)
        options = {"config": self.config, "size": group_size, "lease_ttl": self.config.lease_ttl}
        return TracedMember(self._client, tree, self.sample, **options)

    async def _run_episode(self, environments: SampleEnvironments, episode: AgentEpisode) -> Trajectory:
        """Run an episode from its start, its branch point, or where it was interrupted."""
        conversation, resumed, settings = self._conversation, environments.resumed, self.config.agent
        wrapped = self.wrap(environments, episode)
        if environments.member is not None:
            return await environments.member.run(wrapped, conversation, settings=settings)

        async def interrupted(point: BranchPoint) -> None:
            if environments.episode is not None and (resumed is None or len(point.turns) > len(resumed.point.turns)):
                self._partial = await stored(self.sample, environments.episode, point, conversation.rows[-1])

        if resumed is not None:
            is_masked = getattr(self.args, "mask_offpolicy_in_partial_rollout", False)
            await conversation.resume(resumed.row.copy(masked=is_masked))
        return await run_episode(
            wrapped,
            conversation,
            settings=settings,
            branch_point=replace(resumed.point, history=resumed.point.history.copy()) if resumed else None,
            interrupted=interrupted if self.keeps_partial else None,
        )

    async def keep(self, *, is_aborted: bool) -> None:
        """Note where an aborted sample continues, or delete what an ended one no longer needs."""
        partial = self._partial or partial_of(self.sample) if is_aborted and self.keeps_partial else None
        await replace_partial(self._client, self.sample, partial)

    def wrap(self, environments: SampleEnvironments, episode: AgentEpisode) -> AgentEpisode:  # noqa: ARG002 -- for subclasses
        """Return the episode to run in place of a new one that `environments` opened; called once per attempt."""
        return episode

    @property
    def rows(self) -> list[Row]:
        """Rows of the last attempt that have a reply."""
        return [row for row in self._conversation.rows if row.reply_count]

    async def write(
        self, trajectory: Trajectory, rows: Sequence[Row], samples: Sequence[Sample], *, evaluation: bool = False
    ) -> None:
        """Fill reset samples, one per row; further samples stay unchanged.

        Raises:
            ModelFailed: A row's images do not match its ids.
            ValueError: The episode was not evaluated, or the engine's extra columns do not match the tokens.
        """
        config = self.config
        facts = trajectory.facts(max_turns=config.agent.max_turns, metadata=self.sample.metadata)
        breakdown = config.breakdown_of(facts, evaluation=evaluation)
        digest = prompt_hash(config.agent)
        start = start_of(self.sample.metadata, trajectory.task_id)
        basis_digest = trajectory.evaluation.basis_digest if trajectory.evaluation else ""
        record = {
            **summary_of(trajectory, facts.task_score),
            "reward_parts": dict(breakdown.parts),
            "rows": len(rows),
            "attempts": self._attempt_count,
            "continued_turns": self._continued_count,
            "parent_episode_id": self._parent_id,
            "prompt_hash": digest,
            "start": start_name(
                start, basis_digest=basis_digest, prompt_hash=digest, perturbations=self._perturbations
            ),
        }
        first_turn = trajectory.shared_turn_count + 1
        for sample, row in zip(samples, rows, strict=False):
            fill(sample, row, self.args)
            # Built last, in a thread: an episode does not carry its tensors.
            sample.multimodal_train_inputs = await asyncio.to_thread(
                self._chat.tensors, row.trained_images, sample.tokens
            )
            sample.reward = breakdown.total
            sample.non_generation_time = sum(
                seconds for phase, seconds in trajectory.timings_s.items() if phase != "model"
            )
            set_status(sample, "TRUNCATED" if facts.truncated else "COMPLETED")
            note(sample, {**record, "first_turn": first_turn}, raw_reward=facts.task_score)
            first_turn += row.reply_count

    @property
    def _engine_url(self) -> str:
        return f"http://{self.args.sglang_router_ip}:{self.args.sglang_router_port}/generate"

    def new_conversation(self) -> SglangConversation:
        """Return a conversation for an attempt, whose rows `rows` returns from now on."""
        agent, sampling_params = self.config.agent, self._sampling_params
        self._conversation = SglangConversation(
            self._chat,
            self._call_engine,
            budget=TokenBudget(
                prompt=agent.prompt_tokens + agent.row_cost.image + agent.row_cost.tree,
                reply=min(agent.reply_tokens, int(sampling_params["max_new_tokens"])),
                total=agent.context_tokens,
                images=agent.row_cost.images,
            ),
            sampling_params=sampling_params,
            is_aborted=lambda: self._state.aborted,
            encode_image=self._encoded,
            extras={"return_routed_experts": True} if getattr(self.args, "use_rollout_routing_replay", False) else {},
        )
        return self._conversation

    def _encoded(self, image: "Image.Image") -> bytes:
        # As bytes, the engine's client sends it as it is.
        if not self.config.picture_dir:
            return data_uri(image).encode("ascii")
        self._written.append(files_of(self.config.picture_dir).add(image))
        return self._written[-1]

    async def close(self) -> None:
        """Remove the files of its pictures."""
        if self._written:
            await asyncio.to_thread(files_of(self.config.picture_dir).remove, self._written)

    async def _call_engine(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call the engine by slime's client. Raises: BudgetExhausted, ModelFailed."""
        args, sample, url = self.args, self.sample, self._engine_url
        headers = None
        if sample.session_id and getattr(args, "router_policy", None) == "consistent_hashing":
            headers = {"X-SMG-Routing-Key": sample.session_id}
        room = payload["sampling_params"]["max_new_tokens"]
        try:
            with slime_compat.span(sample, "sglang_generate", {"max_new_tokens": room}) as traced:
                async with asyncio.timeout(self.config.engine_timeout_s):
                    answer = await self._post(url, payload, headers)
                traced.update(slime_compat.engine_attributes(answer["meta_info"]))
        except (BudgetExhausted, ModelFailed):
            raise
        except Exception as error:
            raise ModelFailed(f"engine {url}: no response: {type(error).__name__}: {error}") from error
        return answer

    async def _post(self, url: str, payload: Mapping[str, Any], headers: Mapping[str, str] | None) -> Mapping[str, Any]:
        """Repeat a request that fails or that the engine aborts, as it does at a weight update.

        Raises:
            BudgetExhausted: The prompt does not fit into the model's context.
            ModelFailed: The engine refuses the request, or `envd.engine_retries` attempts failed.
        """
        name, retries = self.sample.index, self.config.engine_retries
        for attempt in range(1, retries + 1):
            try:
                answer: Mapping[str, Any] = await slime_compat.post(url, payload, max_retries=1, headers=headers)
            except Exception as error:
                _check_worth_retrying(error, attempt)
                if attempt == retries:
                    raise
                logger.info("[envd] sample %s: attempt %d of a reply failed: %s", name, attempt, error)
            else:
                if answer["meta_info"]["finish_reason"]["type"] != "abort" or self._state.aborted:
                    return answer
                logger.info("[envd] sample %s: the engine aborted attempt %d of a reply", name, attempt)
            await asyncio.sleep(_ENGINE_PAUSE_S)
        raise ModelFailed(f"the engine aborted the request {retries} times (envd.engine_retries)")


def _check_worth_retrying(error: Exception, attempt: int) -> None:
    """Raise if repeating a request cannot help. Raises: BudgetExhausted, ModelFailed."""
    response = getattr(error, "response", None)
    status, text = getattr(response, "status_code", 0), str(getattr(response, "text", ""))
    if is_context_full(status, text):
        raise BudgetExhausted(f"the engine's context is full: {text[:_QUOTED_CHARS]}", budget="total") from error
    is_refused = 400 <= status < 500 and status not in _TRANSIENT
    # SGLang answers so to a request that it cannot process, such as a broken image. Its router answers 500 with another
    # text while an engine restarts.
    is_failing = status == 500 and text.strip() == "Internal Server Error"
    if is_refused or (is_failing and attempt >= _SERVER_ERROR_ATTEMPTS):
        raise ModelFailed(f"the engine refused the request, status {status}: {text[:_QUOTED_CHARS]}") from error


def summary_of(trajectory: Trajectory, task_score: float) -> dict[str, Any]:
    """Return the facts of a valid episode, as JSON values."""
    # Shared turns are counted in the episode that sampled them.
    facts = [turn.facts for turn in trajectory.turns[trajectory.shared_turn_count :]]
    return {
        "task_id": trajectory.task_id,
        "episode_id": trajectory.episode_id,
        "origin": trajectory.origin.template_digest if trajectory.origin else "",
        "outcome": trajectory.outcome.value,
        "reason": trajectory.reason,
        "task_score": task_score,
        "guest_end_cause": trajectory.guest_end_cause,
        "turns": len(trajectory.turns),
        "shared_turns": trajectory.shared_turn_count,
        "reply_tokens": sum(turn.token_count for turn in facts),
        "parsed": sum(turn.parsed for turn in facts),
        "fallbacks": sum(turn.fallback is not None for turn in facts),
        "timings_s": dict(trajectory.timings_s),
    }


async def _until_aborted(
    state: GenerateState, watch: DaemonWatch, work: Coroutine[Any, Any, Trajectory], *, has_state: Callable[[], bool]
) -> Trajectory | None:
    """Wait for work; on slime's abort, which waits for its samples, cancel it and return None. Raises: Halted.

    If it has a state to keep, it has some time to end by itself first.
    """
    task = asyncio.create_task(work)
    try:
        while not task.done():
            if state.aborted:
                if not has_state() or not (await asyncio.wait({task}, timeout=_KEEP_S))[0]:
                    return None
                break
            if watch.failure:
                raise Halted(watch.failure)
            await asyncio.wait({task}, timeout=_ABORT_POLL_S)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
