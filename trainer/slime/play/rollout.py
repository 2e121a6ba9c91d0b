"""Play one sample as an episode with slime's engine, and write its rows into slime's samples.

Whatever happens to machines, daemons or engines, the sample comes back: filled, ABORTED because slime aborted it, or
void. Only cancellation and `Halted` are raised. The event loop is never blocked: images are encoded and tensors built
in threads.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

from cuaenv.client import AsyncEnvClient, Checkpoint, DeadlineExceeded, EnvError, Unavailable
from trainer.agent.attempts import run_task
from trainer.agent.branching import TreeMember
from trainer.agent.loop import AgentEpisode, run_episode
from trainer.agent.ownership import ruling_of, ruling_on
from trainer.agent.prompts import prompt_hash
from trainer.agent.starts import start_name
from trainer.agent.tree import tree_of_loop
from trainer.agent.turns import BranchPoint
from trainer.agent.types import Conversation, Outcome, Trajectory
from trainer.extensions import ExtensionError
from trainer.replay.pool import ReplayPool
from trainer.slime import slime_compat
from trainer.slime.config import Halted, SlimeConfig
from trainer.slime.play.engine import EngineClient, SlimeEngine
from trainer.slime.play.environments import SampleEnvironments
from trainer.slime.play.partial import Partial, partial_of, replace_partial, stored
from trainer.slime.play.pictures import PictureFiles
from trainer.slime.play.replay import keep_success
from trainer.slime.play.samples import fill, note, reset_sample, set_status, spread, void_result
from trainer.slime.slime_compat import GenerateState, Sample
from trainer.tokens.conversation import TokenConversation
from trainer.tokens.rows import Row

logger = logging.getLogger(__name__)
_ABORT_POLL_S = 0.5
#: For a step that is running when slime aborts, and the checkpoint after it.
_KEEP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What all samples of a job share in one process and event loop; of `trainer.slime.job.Job.here`."""

    config: SlimeConfig
    client: AsyncEnvClient
    watch: "DaemonWatch"
    http: EngineClient
    files: PictureFiles | None
    """Where pictures are written; None to send them in requests."""
    pool: ReplayPool | None
    """Successes to replay; None without replay."""


class Rollout:
    """The rollout of one sample."""

    engine_type = SlimeEngine

    def __init__(self, args: Any, sample: Sample, sampling_params: Mapping[str, Any], *, here: Resources) -> None:
        """Prepare; `args`, `sample` and `sampling_params` are those that slime passes to generate."""
        self.sample = sample
        self.config = here.config
        self.args = args
        self.keeps_partial = False
        """Whether the sample continues in a later rollout if slime aborts it."""
        self.here = here
        self._sampling_params = dict(sampling_params)  # the samples of an evaluation share one dict
        self._state: GenerateState = slime_compat.generate_state(args)
        self._chat = slime_compat.chat(args)
        self._engines: list[SlimeEngine] = []
        self._conversation: TokenConversation
        """That of the latest attempt."""
        self._start: str | Checkpoint = ""
        self._environments: SampleEnvironments | None = None
        self._partial: Partial | None = None

    async def run(self, start: str | Checkpoint, *, group_size: int) -> Trajectory | None:
        """Run a task, also from a checkpoint of it. Returns None if slime aborted the rollout.

        Raises: Halted: No daemon answers.
        """
        config, client, self._start = self.config, self.here.client, start
        environments = self._environments = SampleEnvironments(
            client,
            self.sample,
            group_size=group_size,
            group_wait_s=config.group_wait_s,
            lease_ttl=config.lease_ttl,
            member=self._member(start, group_size) if config.group == "tree" and group_size > 1 else None,
            partial=partial_of(self.sample) if self.keeps_partial else None,
        )
        episode = run_task(
            environments,
            start,
            self.new_conversation,
            settings=config.agent,
            pool=config.pool,
            attempts=config.attempts,
            run=lambda episode, conversation: self._run_episode(environments, episode, conversation),
        )
        async with self.here.watch.use(client) as watch:
            return await _until_aborted(
                self._state, watch, episode, has_state=lambda: self.keeps_partial and environments.episode is not None
            )

    def _member(self, start: str | Checkpoint, group_size: int) -> TreeMember:
        return TreeMember(
            self.here.client,
            tree_of_loop((self.sample.group_index, start), root_count=self.config.branch_roots),
            config=self.config,
            size=group_size,
            lease_ttl=self.config.lease_ttl,
            traced=lambda waiting: slime_compat.span(self.sample, "env_branch", {"waiting": waiting}),
        )

    async def _run_episode(
        self, environments: SampleEnvironments, episode: AgentEpisode, made: Conversation
    ) -> Trajectory:
        """Run an episode from its start, its branch point, or where it was interrupted."""
        conversation, resumed, settings = cast(TokenConversation, made), environments.resumed, self.config.agent
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

    def wrap(self, environments: SampleEnvironments, episode: AgentEpisode) -> AgentEpisode:  # noqa: ARG002 -- for subclasses
        """Return the episode to run in place of a new one that `environments` opened; called once per attempt."""
        return episode

    def new_conversation(self) -> TokenConversation:
        """Return a conversation for an attempt, whose rows `rows` returns from now on."""
        params, here, budget = self._sampling_params, self.here, self.config.agent.token_budget
        budget = replace(budget, reply=min(budget.reply, int(params["max_new_tokens"])))
        engine = self.engine_type(
            self.args, self.sample, params, config=self.config, client=here.http, files=here.files
        )
        self._engines.append(engine)
        self._conversation = TokenConversation(
            self._chat, engine, budget=budget, is_aborted=lambda: self._state.aborted
        )
        return self._conversation

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
        """Note where an aborted sample continues, or delete what an ended one no longer needs."""
        partial = self._partial or partial_of(self.sample) if is_aborted else None
        await replace_partial(self.here.client, self.sample, partial)

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
        environments = self._environments
        perturbations = environments.episode.perturbations if environments and environments.episode else ()
        basis = trajectory.evaluation.basis_digest if trajectory.evaluation else ""
        record = {
            **summary_of(trajectory, facts.task_score),
            "reward_parts": dict(breakdown.parts),
            "rows": len(rows),
            **(environments.facts() if environments else {}),
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
            result = await run_rollout(rollout, start, group_size=group_size, evaluation=evaluation)
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
        result = void_result(sample, multiple, args, status="FAILED", reason=type(error).__name__, error=str(error))
        note(sample, {"owner": ruling_of(error, acted=True).owner.value})
        return result


async def run_rollout(rollout: Rollout, start: str | Checkpoint, *, group_size: int, evaluation: bool) -> Any:
    """Run a rollout and write its rows into its sample, or into a list of samples: see `SlimeConfig.multiple`."""
    args, sample, multiple = rollout.args, rollout.sample, rollout.config.multiple(evaluation=evaluation)
    try:
        trajectory = await rollout.run(start, group_size=group_size)
    finally:
        await rollout.close()
    if trajectory is None or trajectory.outcome is Outcome.ABORTED:
        return void_result(sample, multiple, args, status="ABORTED", reason="aborted")
    if trajectory.outcome is Outcome.FAILED:
        error = str(trajectory.error or "")
        result = void_result(sample, multiple, args, status="FAILED", reason=trajectory.reason, error=error)
        # They were taken in the environment, although nothing of them is trained.
        turns = {"turns": len(trajectory.turns), "shared_turns": trajectory.shared_turn_count}
        note(sample, {**turns, "owner": ruling_on(trajectory).owner.value})
        return result
    rows = rollout.rows[-1:] if evaluation else rollout.rows
    samples = spread(sample, len(rows), multiple, args)
    await rollout.write(trajectory, rows, samples, evaluation=evaluation)
    if not evaluation and rollout.here.pool is not None:
        await keep_success(rollout.here.pool, trajectory, rows, samples)
    return samples[0] if multiple is None else samples


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
