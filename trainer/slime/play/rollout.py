"""Play one sample as an episode with slime's engine, and write its rows into slime's samples.

Whatever happens to machines, daemons or engines, the sample comes back: filled, ABORTED because slime aborted it, or
void. Only cancellation and `Halted` are raised. The event loop is never blocked: images are encoded and tensors built
in threads.

A sample that slime aborts with `--partial-rollout` continues in a later rollout: its metadata keeps a checkpoint of its
desktop, the agent's state and its row. Without the checkpoint, or its host, the sample starts over.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, Unpack, cast

from cuaenv.client import (
    Action,
    AsyncEnvClient,
    AsyncEpisode,
    Checkpoint,
    CheckpointNotFound,
    CheckpointUnusable,
    DeadlineExceeded,
    EnvError,
    Evaluation,
    StepResult,
    Unavailable,
    View,
)
from cuaenv.client.view import ResetOptions
from trainer.agent.attempts import run_task
from trainer.agent.branching import TreeMember
from trainer.agent.forks import Forks, GroupMember
from trainer.agent.loop import AgentEpisode, run_episode
from trainer.agent.ownership import ruling_of, ruling_on
from trainer.agent.prompts import prompt_hash
from trainer.agent.starts import start_name, task_id_of
from trainer.agent.turns import BranchPoint
from trainer.agent.types import Conversation, Outcome, Trajectory
from trainer.config import ExtensionError
from trainer.replay.pool import ReplayPool
from trainer.slime import slime_compat
from trainer.slime.config import Halted, SlimeConfig
from trainer.slime.play.engine import PictureFiles, SlimeEngine
from trainer.slime.play.replay import keep_success
from trainer.slime.play.samples import fill, note, reset_sample, set_status, spread, void_result
from trainer.slime.slime_compat import Sample, span
from trainer.tokens.conversation import TokenConversation
from trainer.tokens.engine_client import EngineClient
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
    forks: Forks
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

    engine_type = SlimeEngine

    def __init__(self, args: Any, sample: Sample, sampling_params: Mapping[str, Any], *, here: Resources) -> None:
        """Prepare; `args`, `sample` and `sampling_params` are those that slime passes to generate."""
        self.sample = sample
        self.config = here.config
        self.args = args
        self.here = here
        self.keeps_partial = False
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

    async def run(self, start: str | Checkpoint, *, group_size: int) -> Trajectory | None:
        """Run a task, also from a checkpoint of it. Returns None if slime aborted the rollout.

        Raises: Halted: No daemon answers.
        """
        config, client, group_index = self.config, self.here.client, self.sample.group_index
        self._start = start
        self._resumed = partial_of(self.sample) if self.keeps_partial else None
        self._group = GroupMember(
            client, self.here.forks, group=group_index, size=group_size, wait_s=config.group_wait_s
        )
        if config.group == "tree" and group_size > 1:
            self._group = self._tree = TreeMember(
                client,
                self.here.forks.tree((group_index, start), root_count=config.branch_roots),
                config=config,
                size=group_size,
                lease_ttl=config.lease_ttl,
                traced=lambda waiting: span(self.sample, "env_branch", {"waiting": waiting}),
            )
        episode = run_task(
            self,
            start,
            self.new_conversation,
            settings=config.agent,
            pool=config.pool,
            attempts=config.attempts,
            run=self._run_episode,
        )
        async with self.here.watch.use(client):
            return await self._until_aborted(episode)

    async def reset(self, task: str | Checkpoint, **options: Unpack[ResetOptions]) -> AgentEpisode:
        """Open the sample's episode: where it continues, in its group the first time, or alone. Raises: EnvError."""
        self._reset_count += 1
        options = {**options, "lease_ttl": self.config.lease_ttl}
        with span(self.sample, "env_reset", {"task": task_id_of(task), "attempt": self._reset_count}):
            self.episode = await self._continued(options) or await self._group.reset(task, **options)
        return _Traced(self.episode, self.sample)

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

    async def _run_episode(self, episode: AgentEpisode, made: Conversation) -> Trajectory:
        """Run an episode from its start, its branch point, or where it was interrupted."""
        conversation, resumed, settings = cast(TokenConversation, made), self._resumed, self.config.agent
        wrapped = self.wrap(episode)
        if self._tree is not None:
            return await self._tree.run(wrapped, conversation, settings=settings)

        async def interrupted(point: BranchPoint) -> None:
            if len(point.turns) > (len(resumed.point.turns) if resumed else 0):
                await self._keep_state(point, conversation.rows[-1])

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

    async def _keep_state(self, point: BranchPoint, row: Row) -> None:
        """Store the episode between two turns, so that a later rollout continues it."""
        if self.episode is None:
            return
        try:
            checkpoint = await self.episode.checkpoint(f"sample {self.sample.index}", timeout=_CHECKPOINT_TIMEOUT)
        except EnvError as error:
            logger.warning("[envd] sample %s: starts over in a later rollout: %s", self.sample.index, error)
        else:
            self._interrupted = Partial(checkpoint=checkpoint, point=replace(point, is_resumed=True), row=row.copy())

    def wrap(self, episode: AgentEpisode) -> AgentEpisode:
        """Return what runs in place of `episode`, for subclasses; called once per attempt."""
        return episode

    def new_conversation(self) -> TokenConversation:
        """Return a conversation for an attempt, whose rows `rows` returns from now on."""
        params, budget = self._sampling_params, self.config.agent.token_budget
        budget = replace(budget, reply=min(budget.reply, int(params["max_new_tokens"])))
        self._conversation = TokenConversation(
            self._chat, self.new_engine(params), budget=budget, is_aborted=lambda: self._state.aborted
        )
        return self._conversation

    def new_engine(self, params: Mapping[str, Any]) -> SlimeEngine:
        """Return an engine with these parameters of SGLang, which `close` closes."""
        engine = self.engine_type(
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

    async def keep(self, *, is_aborted: bool) -> None:
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
        perturbations = self.episode.perturbations if self.episode else ()
        context = self._tree.context if self._tree else None
        basis = trajectory.evaluation.basis_digest if trajectory.evaluation else ""
        record = {
            **summary_of(trajectory, facts.task_score),
            "reward_parts": dict(breakdown.parts),
            "rows": len(rows),
            "attempts": self._reset_count,
            "continued_turns": len(self._resumed.point.turns) if self._resumed else 0,
            "parent_episode_id": context.episode_id if context else "",
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
                    has_state = self.keeps_partial and self.episode is not None
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


async def play(
    args: Any,
    sample: Sample,
    sampling_params: Mapping[str, Any],
    *,
    config: SlimeConfig,
    here: Callable[[], Resources],
    start: str | Checkpoint,
    evaluation: bool,
    rollout_type: type[Rollout] = Rollout,
    is_alone: bool = False,
) -> Any:
    """Play a sample in this process; return it, or its rows: filled, aborted or void.

    Args:
        args: slime's, as `sample` and `sampling_params`.
        config: The job's configuration.
        here: Returns what its samples share in the running event loop.
        start: Where the sample starts.
        evaluation: Whether it only evaluates.
        rollout_type: Type of its rollout.
        is_alone: Whether it has machines of its own, not in its group.

    Raises:
        Halted: No daemon answers, or own code that the configuration names failed.
    """
    # A repeated sample was aborted or failed; its group's machines no longer exist.
    is_alone |= evaluation or sample.status.name != "PENDING" or config.group == "off" or sample.group_index is None
    group_size = 1 if is_alone else int(args.n_samples_per_prompt)
    reset_sample(sample)
    try:
        async with asyncio.timeout(config.limit_s):
            rollout = rollout_type(args, sample, sampling_params, here=here())
            rollout.keeps_partial = not evaluation and getattr(args, "partial_rollout", False)
            result = await written(rollout, rollout.run(start, group_size=group_size), evaluation=evaluation)
            if rollout.keeps_partial:
                await rollout.keep(is_aborted=sample.status.name == "ABORTED")
            return result
    except Halted:
        raise
    except ExtensionError as error:
        raise Halted(str(error)) from error
    except Exception as error:
        logger.exception("[envd] sample %s is void", sample.index)
        multiple = config.multiple(evaluation=evaluation)
        owner = ruling_of(error, acted=True).owner.value
        reason, text = type(error).__name__, str(error)
        return void_result(sample, multiple, args, status="FAILED", reason=reason, error=text, owner=owner)


async def written(rollout: Rollout, playing: Awaitable[Trajectory | None], *, evaluation: bool) -> Any:
    """Write the rows of a rollout into its sample, or into a list of samples: see `SlimeConfig.multiple`."""
    args, sample, multiple = rollout.args, rollout.sample, rollout.config.multiple(evaluation=evaluation)
    try:
        trajectory = await playing
    finally:
        await rollout.close()
    if trajectory is None or trajectory.outcome is Outcome.ABORTED:
        return void_result(sample, multiple, args, status="ABORTED", reason="aborted")
    if trajectory.outcome is Outcome.FAILED:
        return void_result(
            sample,
            multiple,
            args,
            status="FAILED",
            reason=trajectory.reason,
            error=str(trajectory.error or ""),
            owner=ruling_on(trajectory).owner.value,
            # They were taken in the environment, although nothing of them is trained.
            turns=len(trajectory.turns),
            shared_turns=trajectory.shared_turn_count,
        )
    rows = rollout.rows[-1:] if evaluation else rollout.rows
    samples = spread(sample, len(rows), multiple, args)
    await rollout.write(trajectory, rows, samples, evaluation=evaluation)
    if not evaluation and rollout.here.pool is not None:
        await keep_success(rollout.here.pool, trajectory, rows, samples)
    return samples[0] if multiple is None else samples


class _Traced:
    """An `AgentEpisode` whose calls appear in slime's traces."""

    def __init__(self, episode: AsyncEpisode, sample: Sample) -> None:
        self._episode = episode
        self._sample = sample
        self.episode_id = episode.episode_id
        self.task_id = episode.task_id
        self.instruction = episode.instruction
        self.observation = episode.observation
        self.origin = episode.origin
        self.tools = episode.tools

    async def step(
        self, *actions: Action, view: View | None = None, timeout: timedelta = timedelta(minutes=3)
    ) -> StepResult:
        with span(self._sample, "env_step", {"actions": len(actions)}) as add:
            result = await self._episode.step(*actions, view=view, timeout=timeout)
            self.observation = result.observation
            add({f"{name}_ms": value for name, value in result.timings_ms.items()})
        return result

    async def evaluate(self, *, timeout: timedelta = timedelta(minutes=15)) -> Evaluation:
        with span(self._sample, "env_evaluate") as add:
            evaluation = await self._episode.evaluate(timeout=timeout)
            add({"score": evaluation.score})
        return evaluation

    async def close(self) -> None:
        await self._episode.close()


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
