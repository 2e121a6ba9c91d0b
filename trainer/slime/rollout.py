"""Run an episode with slime's engine and write its rows into slime's samples."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cuaenv.client import Checkpoint, shared_client
from trainer.agent.attempts import run_task
from trainer.agent.branching import TreeMember
from trainer.agent.loop import AgentEpisode, run_episode
from trainer.agent.prompts import prompt_hash
from trainer.agent.starts import start_name, start_of
from trainer.agent.tree import tree_of_loop
from trainer.agent.turns import BranchPoint
from trainer.agent.types import Trajectory
from trainer.slime import slime_compat
from trainer.slime.checks import warn_of_capacity
from trainer.slime.config import SlimeConfig
from trainer.slime.engine import SlimeEngine
from trainer.slime.environments import SampleEnvironments
from trainer.slime.guard import Halted
from trainer.slime.health import DaemonWatch, watch_of
from trainer.slime.partial import Partial, partial_of, replace_partial, stored
from trainer.slime.pictures import files_of
from trainer.slime.probe import require_readable, warn_of_engine
from trainer.slime.samples import fill, note, set_status
from trainer.slime.slime_compat import GenerateState, Sample
from trainer.tokens.chat import Chat
from trainer.tokens.conversation import TokenConversation
from trainer.tokens.rows import Row

logger = logging.getLogger(__name__)
_ABORT_POLL_S = 0.5
#: For a step that is running when slime aborts, and the checkpoint after it.
_KEEP_S = 60.0


class Rollout:
    """The rollout of one sample."""

    engine_type = SlimeEngine

    def __init__(self, args: Any, sample: Sample, sampling_params: Mapping[str, Any], *, config: SlimeConfig) -> None:
        """Prepare; `args`, `sample` and `sampling_params` are those that slime passes to generate."""
        self.sample = sample
        self.config = config
        self.args = args
        self._sampling_params = dict(sampling_params)  # the samples of an evaluation share one dict
        self._state: GenerateState = slime_compat.generate_state(args)
        options = getattr(args, "apply_chat_template_kwargs", None)
        self._chat = Chat(self._state.tokenizer, self._state.processor, template_options=options)
        self._engines: list[SlimeEngine] = []
        self._conversation: TokenConversation
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
        if config.picture_dir:
            await require_readable(self.engine(), self.engine(in_files=False), self._chat, config.picture_dir)
        await warn_of_engine(self.engine(in_files=False), self._chat)
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

    def _member(self, start: str | Checkpoint, group_size: int) -> TreeMember:
        return TreeMember(
            self._client,
            tree_of_loop((self.sample.group_index, start), root_count=self.config.branch_roots),
            config=self.config,
            size=group_size,
            lease_ttl=self.config.lease_ttl,
            traced=lambda waiting: slime_compat.span(self.sample, "env_branch", {"waiting": waiting}),
        )

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

    def engine(self, *, in_files: bool = True) -> SlimeEngine:
        """Return the engine of an attempt, closed with the rollout.

        Args:
            in_files: Write pictures to files if `envd.picture_dir` says so.
        """
        directory = self.config.picture_dir
        made = self.engine_type(
            self.args,
            self.sample,
            self._sampling_params,
            config=self.config,
            is_aborted=lambda: self._state.aborted,
            files=files_of(directory) if directory and in_files else None,
        )
        self._engines.append(made)
        return made

    def new_conversation(self) -> TokenConversation:
        """Return a conversation for an attempt, whose rows `rows` returns from now on."""
        budget = self.config.agent.token_budget
        self._conversation = TokenConversation(
            self._chat,
            self.engine(),
            budget=replace(budget, reply=min(budget.reply, int(self._sampling_params["max_new_tokens"]))),
            is_aborted=lambda: self._state.aborted,
        )
        return self._conversation

    async def close(self) -> None:
        """Remove the files of its pictures."""
        if self.config.picture_dir:
            for engine in self._engines:
                await asyncio.to_thread(engine.close)


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
