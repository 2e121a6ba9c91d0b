"""Play one sample as an episode with slime's engine, and write its rows into slime's samples.

Whatever happens to machines, daemons or engines, the sample comes back: filled, ABORTED because slime aborted it, or
void. Only cancellation and `Halted` are raised. The event loop is never blocked: images are encoded and tensors built
in threads.

A sample that slime aborts with `--partial-rollout` continues in a later rollout: its metadata keeps a checkpoint of its
desktop, the agent's state and its row. Without the checkpoint, or its host, the sample starts over.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, Unpack, cast

from cuaenv.client import (
    AsyncEnvClient,
    AsyncEpisode,
    Checkpoint,
    CheckpointNotFound,
    CheckpointUnusable,
    DeadlineExceeded,
    EnvError,
    Unavailable,
)
from cuaenv.client.view import ResetOptions
from trainer.agent.attempts import play_task
from trainer.agent.branching import TreeMember
from trainer.agent.groups import GroupMember, Groups
from trainer.agent.loop import AgentEpisode, play_episode
from trainer.agent.ownership import ruling_on
from trainer.agent.prompts import prompt_hash
from trainer.agent.starts import start_name, task_id_of
from trainer.agent.turns import BranchPoint
from trainer.agent.types import Conversation, Outcome, Trajectory
from trainer.replay.pool import ReplayPool
from trainer.slime import slime_compat
from trainer.slime.config import Halted, SlimeConfig
from trainer.slime.play.engine import SlimeEngine
from trainer.slime.play.replay import keep_success
from trainer.slime.play.samples import fill, note, set_status, spread, void_result
from trainer.slime.slime_compat import Sample, span
from trainer.tokens.conversation import Engine, TokenConversation
from trainer.tokens.engine_client import EngineClient
from trainer.tokens.picture_files import PictureFiles
from trainer.tokens.rows import Row

logger = logging.getLogger(__name__)
_ABORT_POLL_S: Final = 0.5
#: For a step that is running when slime aborts, and the checkpoint after it.
_KEEP_S: Final = 60.0
_CHECKPOINT_TIMEOUT: Final = timedelta(seconds=30)
_PARTIAL_KEY: Final = "envd_partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What all samples of a job share in one process and event loop; of `trainer.slime.job.Job.here`."""

    config: SlimeConfig
    client: AsyncEnvClient
    watch: "DaemonWatch"
    groups: Groups
    http: EngineClient
    files: PictureFiles | None
    """Where pictures are written; None to send them in requests."""
    pool: ReplayPool | None
    """Successes to replay; None without replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """An aborted sample between two turns. slime saves it with its data source."""

    checkpoint: Checkpoint
    point: BranchPoint
    row: Row


def partial_of(sample: Sample) -> Partial | None:
    """Return where an aborted sample is to continue; None for its beginning."""
    found: Partial | None = (sample.metadata or {}).get(_PARTIAL_KEY)
    return found


class Rollout:
    """The rollout of one sample, which opens its own episodes: see `trainer.agent.attempts.Environments`."""

    def __init__(
        self,
        args: Any,
        sample: Sample,
        sampling_params: Mapping[str, Any],
        *,
        here: Resources,
        evaluation: bool = False,
    ) -> None:
        """Prepare; `args`, `sample`, `sampling_params` and `evaluation` are those that slime passes to generate."""
        self.sample = sample
        self.config = here.config
        self.args = args
        self.here = here
        self._is_evaluation = evaluation
        self._traced = partial(span, sample)
        self._keeps_partial = not evaluation and getattr(args, "partial_rollout", False)
        """Whether the sample continues in a later rollout if slime aborts it."""
        self.episode: AsyncEpisode | None = None
        """The latest episode."""
        self._sampling_params = dict(sampling_params)  # the samples of an evaluation share one dict
        self._state = slime_compat.generate_state(args)
        self._chat = slime_compat.chat(args)
        self._engines: list[SlimeEngine] = []
        self._conversation: TokenConversation
        """That of the latest attempt."""
        self._start: str | Checkpoint = ""
        self._tree: TreeMember | None = None
        """Its place in a tree; None in a group whose members all start together."""
        self._group: GroupMember | TreeMember
        """Opens the episodes that begin: the first in the group, others alone."""
        self._reset_count = 0
        self._resumed: Partial | None = None
        """Where the sample continues; None if it begins."""
        self._interrupted: Partial | None = None
        """Where a later rollout continues."""

    async def play_attempts(self, start: str | Checkpoint, *, group_size: int) -> Trajectory | None:
        """Play an episode in the sample's group, again if it is lost. Returns None if slime aborted the rollout.

        Raises: Halted: No daemon answers.
        """
        config, client, group_index = self.config, self.here.client, self.sample.group_index
        self._start = start
        self._resumed = partial_of(self.sample) if self._keeps_partial else None
        self._group = GroupMember(
            client, self.here.groups, group=group_index, size=group_size, wait_s=config.group_wait_s
        )
        if config.group == "tree" and group_size > 1:
            self._group = self._tree = TreeMember(
                client,
                self.here.groups.tree((group_index, start), root_count=config.branch_roots),
                config=config,
                size=group_size,
                lease_ttl=config.lease_ttl,
                traced=self._traced,
            )
        playing = play_task(
            self,
            start,
            self.new_conversation,
            settings=config.agent,
            pool=config.pool,
            attempts=config.attempts,
            play=self.play_episode,
        )
        async with self.here.watch.use(client):
            return await self._until_aborted(playing)

    async def reset(self, task: str | Checkpoint, **options: Unpack[ResetOptions]) -> AsyncEpisode:
        """Open the sample's episode: where it continues, in its group the first time, or alone. Raises: EnvError."""
        self._reset_count += 1
        options = {**options, "lease_ttl": self.config.lease_ttl}
        with self._traced("env_reset", {"task": task_id_of(task), "attempt": self._reset_count}):
            self.episode = await self._continued(options) or await self._group.reset(task, **options)
        return self.episode

    async def _continued(self, options: ResetOptions) -> AsyncEpisode | None:
        """Open the episode where the sample continues; None if it has to begin. Raises: EnvError."""
        if self._resumed is None:
            return None
        kept = ResetOptions(view=options["view"], timeout=options["timeout"], lease_ttl=options["lease_ttl"])
        try:
            return await self.here.client.reset(self._resumed.checkpoint, **kept)
        except (CheckpointNotFound, CheckpointUnusable, Unavailable) as error:
            logger.warning("[envd] sample %s: starts over: %s", self.sample.index, error)
            self._resumed = None
            return None

    async def play_episode(self, episode: AgentEpisode, conversation: Conversation) -> Trajectory:
        """Play an open episode from its start, its branch point, or where it was interrupted."""
        tokens, resumed, settings = cast(TokenConversation, conversation), self._resumed, self.config.agent
        if self._tree is not None:
            return await self._tree.play_episode(episode, tokens, settings=settings)

        async def interrupted(point: BranchPoint) -> None:
            if len(point.turns) > (len(resumed.point.turns) if resumed else 0):
                await self._store_partial(point, tokens.rows[-1])

        if resumed is not None:
            is_masked = getattr(self.args, "mask_offpolicy_in_partial_rollout", False)
            await tokens.resume(resumed.row.copy(masked=is_masked))
        return await play_episode(
            episode,
            tokens,
            settings=settings,
            branch_point=replace(resumed.point, history=resumed.point.history.copy()) if resumed else None,
            interrupted=interrupted if self._keeps_partial else None,
            traced=self._traced,
        )

    async def _store_partial(self, point: BranchPoint, row: Row) -> None:
        """Store the episode between two turns, so that a later rollout continues it."""
        if self.episode is None:
            return
        try:
            checkpoint = await self.episode.checkpoint(f"sample {self.sample.index}", timeout=_CHECKPOINT_TIMEOUT)
        except EnvError as error:
            logger.warning("[envd] sample %s: starts over in a later rollout: %s", self.sample.index, error)
        else:
            self._interrupted = Partial(checkpoint=checkpoint, point=replace(point, is_resumed=True), row=row.copy())

    def new_conversation(self) -> TokenConversation:
        """Return a conversation for an attempt, whose rows `rows` returns from now on."""
        params, budget = self._sampling_params, self.config.agent.token_budget
        budget = replace(budget, reply=min(budget.reply, int(params["max_new_tokens"])))
        self._conversation = TokenConversation(
            self._chat, self.new_engine(params), budget=budget, is_aborted=lambda: self._state.aborted
        )
        return self._conversation

    def new_engine(self, params: Mapping[str, Any]) -> Engine:
        """Return an engine with these parameters of SGLang, which `close` closes."""
        engine = SlimeEngine(
            self.args, self.sample, params, config=self.config, client=self.here.http, files=self.here.files
        )
        self._engines.append(engine)
        return engine

    @property
    def rows(self) -> list[Row]:
        """Rows of the last attempt that have a reply."""
        return [row for row in self._conversation.rows if row.reply_count]

    async def close(self) -> None:
        """Remove the files of its pictures."""
        if self.here.files is not None:
            for engine in self._engines:
                await asyncio.to_thread(engine.close)

    async def result_of(self, trajectory: Trajectory | None) -> Any:
        """Return the sample, or its rows, filled with an episode, aborted or void: see `SlimeConfig.multiple`."""
        multiple = self.config.multiple(evaluation=self._is_evaluation)
        void = partial(void_result, self.sample, multiple, self.args)
        is_aborted = trajectory is None or trajectory.outcome is Outcome.ABORTED
        if trajectory is None or is_aborted:
            result = void(status="ABORTED", reason="aborted")
        elif trajectory.outcome is Outcome.FAILED:
            result = void(
                status="FAILED",
                reason=trajectory.reason,
                error=str(trajectory.error or ""),
                owner=ruling_on(trajectory).owner.value,
                # They were taken in the environment, although nothing of them is trained.
                turns=len(trajectory.turns),
                shared_turns=trajectory.shared_turn_count,
            )
        else:
            rows = self.rows[-1:] if self._is_evaluation else self.rows
            samples = spread(self.sample, len(rows), multiple, self.args)
            await self._write(trajectory, rows, samples)
            if not self._is_evaluation and self.here.pool is not None:
                await keep_success(self.here.pool, trajectory, rows, samples)
            result = samples[0] if multiple is None else samples
        if self._keeps_partial:
            await self._note_partial(is_aborted=is_aborted)
        return result

    async def _note_partial(self, *, is_aborted: bool) -> None:
        """Note where an aborted sample continues, and delete the checkpoint that it no longer needs."""
        old = self.sample.metadata.pop(_PARTIAL_KEY, None)
        new = self._interrupted or old if is_aborted else None
        if new is not None:
            self.sample.metadata[_PARTIAL_KEY] = new
            # slime notes in which rollout a sample with a response began.
            self.sample.response = "".join(piece.text for piece in new.row.pieces)
        if old is None or old is new:
            return
        try:
            await self.here.client.delete_checkpoint(old.checkpoint, timeout=_CHECKPOINT_TIMEOUT)
        except EnvError as error:
            logger.info("[envd] checkpoint %s: left to expire: %s", old.checkpoint.checkpoint_id, error)

    async def _write(self, trajectory: Trajectory, rows: Sequence[Row], samples: Sequence[Sample]) -> None:
        """Fill reset samples, one per row; further samples stay unchanged.

        Raises:
            ModelFailed: A row's images do not match its ids.
            ValueError: The episode was not evaluated, or the engine's extra columns do not match the tokens.
        """
        config = self.config
        facts = trajectory.facts(max_turns=config.agent.max_turns, metadata=self.sample.metadata)
        breakdown = config.breakdown_of(facts, evaluation=self._is_evaluation)
        # A strict recipe gives some successes the reward of a failure. Evaluations are neither kept nor counted.
        is_paid = not self._is_evaluation and facts.task_score > 0
        if is_paid:
            is_paid = breakdown.total > config.breakdown_of(replace(facts, task_score=0.0)).total
        digest = prompt_hash(config.agent)
        perturbations = self.episode.perturbations if self.episode else ()
        basis = trajectory.evaluation.basis_digest if trajectory.evaluation else ""
        record = {
            **summary_of(trajectory, facts.task_score),
            "reward_parts": dict(breakdown.parts),
            "is_paid": is_paid,
            "rows": len(rows),
            "attempts": self._reset_count,
            "continued_turns": len(self._resumed.point.turns) if self._resumed else 0,
            "parent_episode_id": trajectory.parent_episode_id,
            "prompt_hash": digest,
            "start": start_name(self._start, basis_digest=basis, prompt_hash=digest, perturbations=perturbations),
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

    async def _until_aborted(self, work: Coroutine[Any, Any, Trajectory]) -> Trajectory | None:
        """Wait for work; on slime's abort, which waits for its samples, cancel it and return None. Raises: Halted.

        If it has a state to keep, it has some time to end by itself first.
        """
        task = asyncio.create_task(work)
        try:
            while not task.done():
                if self._state.aborted:
                    has_state = self._keeps_partial and self.episode is not None
                    if not has_state or not (await asyncio.wait({task}, timeout=_KEEP_S))[0]:
                        return None
                    break
                if self.here.watch.failure:
                    raise Halted(self.here.watch.failure)
                await asyncio.wait({task}, timeout=_ABORT_POLL_S)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


class DaemonWatch:
    """Polls the daemons of an event loop's client while episodes use it.

    No lock: code between two awaits is atomic in an event loop.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._user_count = 0
        self._poller: asyncio.Task[None] | None = None
        self.failure = ""
        """Why the run must end: no daemon answered for `timeout_s`. Empty until then."""

    @asynccontextmanager
    async def use(self, client: AsyncEnvClient) -> AsyncIterator["DaemonWatch"]:
        """Poll within the block."""
        self._user_count += 1
        if self._poller is None:
            self.failure = ""
            self._poller = asyncio.create_task(self._poll(client), name="daemon-watch")
        try:
            yield self
        finally:
            self._user_count -= 1
            if self._user_count == 0:
                self._poller.cancel()
                self._poller = None

    async def _poll(self, client: AsyncEnvClient) -> None:
        loop = asyncio.get_running_loop()
        answered_s = loop.time()
        while True:
            await asyncio.sleep(self._timeout_s / 12)
            try:
                await client.list_pools(timeout=timedelta(seconds=self._timeout_s / 6))
                answered_s = loop.time()
            except (Unavailable, DeadlineExceeded) as error:
                if loop.time() - answered_s >= self._timeout_s:
                    self.failure = f"no daemon answered for {self._timeout_s:g} s (envd.daemon_timeout_s): {error}"
                    return
            except EnvError:
                answered_s = loop.time()


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
