"""Score episodes and checkpoints. A lost machine never yields a score.

The checkers of an episode run once, on the state that its machine is in. A checkpoint is scored on a machine of its
own, so that no episode has to end for its score.
"""

import logging
from dataclasses import dataclass, replace
from typing import Protocol

from cuaenv.actions import Done, Fail
from envd.base.errors import EnvdError, EvaluatorFailed, MachineLost
from envd.base.losses import ENDS_MACHINE, Loss, LossOwner
from envd.base.telemetry import traces
from envd.base.telemetry.traces import Stopwatch
from envd.desktop.desktop import Desktop
from envd.episodes.automatic import AutomaticCheckpointing
from envd.episodes.checkpointing import Checkpointing
from envd.episodes.context import EpisodeContext
from envd.episodes.episode import Episode
from envd.episodes.ledger import EVALUATE, SCORE, RequestKey
from envd.episodes.opening import EpisodeOpening
from envd.episodes.progress import EpisodeState
from envd.episodes.registry import find_loss
from envd.episodes.types import EvaluateResult, ResetCommand
from envd.pool.leased import LeasedMachine
from envd.tasks import basis
from envd.tasks.evaluate import judge_ended
from envd.tasks.model import Task
from envd.tasks.text import ScoreResult

logger = logging.getLogger(__name__)


class RunCheckers(Protocol):
    """Scores a task."""

    async def __call__(
        self, task: Task, desktop: Desktop, *, last_action: Done | Fail | None, timeout_s: float
    ) -> ScoreResult:
        """Return the score of the guest's state. Raises: EvaluatorFailed, MachineLost."""


@dataclass(eq=False)
class Evaluating:
    """The `evaluate` and `score` calls of an episode service."""

    _context: EpisodeContext
    _opening: EpisodeOpening
    _checkpoints: Checkpointing
    _automatic: AutomaticCheckpointing
    _run_checkers: RunCheckers

    async def evaluate(self, episode_id: str, *, request_id: str, fingerprint: bytes, epoch: int = 0) -> EvaluateResult:
        """Score an episode in its machine's present state, and end it if active. The checkers run once.

        Raises:
            EpisodeNotFound: No such episode.
            RequestIdReused: The id came before with a different body.
            StaleEpoch: It was rolled back after `epoch`, or while the call waited for the episode's lock.
            EvaluatorFailed: A checker failed; later calls raise it too.
            MachineLost: The machine is gone, and no score was recorded.
        """
        request = RequestKey(EVALUATE, episode_id, request_id, fingerprint)
        answer = await self._context.once(request, lambda episode: self._evaluate(episode, request, epoch))
        return replace(answer.value, cached=True) if answer.replayed else answer.value

    async def _evaluate(self, episode: Episode, request: RequestKey, epoch: int) -> EvaluateResult:
        context, epoch = self._context, epoch or episode.epoch
        watch = Stopwatch(context.clock)
        is_unknown = episode.progress.score is None and not episode.progress.evaluator_error
        async with context.call(episode, needs_machine=is_unknown, watch=watch), episode.lock:
            watch.lap("queue")
            episode.require_epoch(epoch)
            if episode.progress.evaluator_error:
                raise EvaluatorFailed(episode.progress.evaluator_error)
            if episode.progress.score is not None:
                return self._result(episode, replace(episode.progress.score, cached=True))
            if not episode.progress.guest_end_cause:
                episode.require_machine()
            episode.human.require_agent(episode.episode_id)
            await context.journal.begin(request)
            if episode.progress.state is EpisodeState.ACTIVE:
                context.registry.end(episode, EpisodeState.TRUNCATED, "EVALUATED")
            end_copy, score = await self._automatic.before_evaluation(episode), None
            try:
                evaluation = await self._score_or_zero(episode, watch)
                score = evaluation.score
                watch.lap("evaluate")
            except EnvdError as error:
                if isinstance(error, EvaluatorFailed):
                    episode.progress = replace(episode.progress, evaluator_error=str(error) or type(error).__name__)
                    context.registry.events.scored(episode)
                    context.journal.save(episode)
                    context.journal.forget_answer(request)
                context.count_failure(episode, "evaluate", error)
                raise
            finally:
                end_copy(score == 0)
            episode.lease.renew(context.clock.monotonic())
            scored = replace(
                evaluation,
                timings_ms={**watch.timings_ms, "total": watch.total_ms},
                basis_digest=basis.digest_of(episode.task, episode.machine.machine.spec, episode.spec.settle),
            )
            episode.progress = replace(episode.progress, score=scored)
            result = self._result(episode, scored)
        context.registry.events.scored(episode)
        logger.info("episode %s: scored %g", episode.episode_id, evaluation.score)
        context.metrics.episode_evaluated(pool=episode.spec.pool, score=evaluation.score, timings_ms=scored.timings_ms)
        with traces.timed("store"):
            await context.journal.answered(request, episode, result)
        return result

    def _result(self, episode: Episode, scored: ScoreResult) -> EvaluateResult:
        return EvaluateResult(
            episode=episode.info(self._context.clock),
            score=scored.score,
            checks=scored.checks,
            timings_ms=scored.timings_ms,
            basis_digest=scored.basis_digest,
            cached=scored.cached,
        )

    async def _score_or_zero(self, episode: Episode, watch: Stopwatch) -> ScoreResult:
        """Run the checkers; if they cannot run because the guest ended itself or its session, see `judge_ended`.

        Raises:
            EvaluatorFailed, MachineLost: See `judge`.
        """
        reason, is_compared = "", False
        while episode.progress.guest_end_cause not in ENDS_MACHINE:
            try:
                async with self._context.running(episode, watch):
                    return await self._judge(episode, episode.machine)
            except EvaluatorFailed as error:
                loss = await find_loss(episode, error)
                # Whatever failed, a judge that a file ended included: what the agent left may be the cause.
                if loss is None and not episode.progress.guest_end_cause and error.__cause__ is not None:
                    if is_compared:
                        reason = f"at the task's start the checkers work, but not here: {error}"
                        loss = Loss(LossOwner.GUEST, reason, "UNCHECKABLE")
                    elif is_compared := await self._works_at_start(episode):
                        continue
                if loss is not None and loss.owner is not LossOwner.UNDECIDED:
                    self._context.registry.end_by(episode, error, loss)
                if not episode.progress.guest_end_cause:
                    if loss is not None and loss.owner is LossOwner.HOST:
                        # What the host broke may work on another machine.
                        raise loss.error(f"episode {episode.episode_id}") from error
                    raise
            except EnvdError as error:
                raised = await self._context.registry.lose(episode, error)
                if not episode.progress.guest_end_cause:
                    raise raised from error
            break
        return judge_ended(episode.task, episode.progress.guest_end_cause, reason)

    async def _works_at_start(self, episode: Episode) -> bool:
        """Return whether the checkers give a score for the task's start, so that a failure is of the agent's making.

        False if no machine is free for it: then the failure is not decided, and there is no score.
        """
        try:
            async with self._opening.at_start(episode) as machine, machine.running():
                await self._judge(episode, machine)
        except Exception as error:
            logger.warning("episode %s: the start of its task was not checked either: %r", episode.episode_id, error)
            return False
        return True

    async def _judge(self, episode: Episode, machine: LeasedMachine) -> ScoreResult:
        return await judge(
            episode.task,
            machine,
            run_checkers=self._run_checkers,
            last_action=episode.progress.last_action,
            timeout_s=self._context.limits.evaluate_timeout_s,
            subject=f"episode {episode.episode_id}",
        )

    async def score(self, command: ResetCommand) -> ScoreResult:
        """Score the state of the checkpoint that a reset names; no episode opens. Idempotent on `request_id`.

        Timings: those of `Checkpointing.start_group`, then `resume`, `evaluate` and `total`.

        Raises:
            EvaluatorFailed: A checker failed, or the machine was lost; there is no score.
            RequestIdReused: The id came before with a different body.
            CheckpointNotFound, CheckpointCorrupt, CheckpointUnusable: See `Checkpointing.find`.
            GroupTooLarge, PoolExhausted, TokenQuotaReached, PoolFailing, Draining: No machine for it.
            SetupFailed, HypervisorError: It did not start.
        """
        request = RequestKey(SCORE, "", f"{command.owner}/{command.request_id}", command.fingerprint)
        answer = await self._context.requests.answer(request, lambda: self._score(command))
        return replace(answer.value, cached=True) if answer.replayed else answer.value

    async def _score(self, command: ResetCommand) -> ScoreResult:
        found, task, pool = await self._checkpoints.find(
            command.checkpoint_id, lambda owner: command.sees_all_owners or owner == command.owner
        )
        clock = self._context.clock
        with self._context.registry.opening(command.owner, 1, max_machines=command.max_machines):
            group = await self._checkpoints.start_group(found, pool, command)
            (member,) = group.members
            began_s = clock.monotonic()
            try:
                evaluation, resume_ms = await self._judge_resumed(
                    f"checkpoint {found.checkpoint_id}", task, member.machine
                )
            finally:
                await pool.release([member.machine])
        evaluate_ms = (clock.monotonic() - began_s) * 1000 - resume_ms
        return replace(
            evaluation,
            timings_ms={
                **group.timings_ms,
                "resume": resume_ms,
                "evaluate": evaluate_ms,
                "total": group.timings_ms["total"] + resume_ms + evaluate_ms,
            },
            basis_digest=basis.digest_of(task, member.machine.machine.spec, found.spec.settle),
        )

    async def _judge_resumed(self, subject: str, task: Task, machine: LeasedMachine) -> tuple[ScoreResult, float]:
        """Run the checkers; returns their result and the milliseconds of resuming. Raises: EvaluatorFailed."""
        try:
            async with machine.running() as resume_ms:
                evaluation = await judge(
                    task,
                    machine,
                    run_checkers=self._run_checkers,
                    last_action=None,
                    timeout_s=self._context.limits.evaluate_timeout_s,
                    subject=subject,
                )
        except EvaluatorFailed:
            raise
        except EnvdError as error:
            problem = f"machine lost: {machine.machine.lost_reason}" if machine.lost.is_set() else error
            raise EvaluatorFailed(f"{subject}: not scored: {problem}") from error
        return evaluation, resume_ms


async def judge(
    task: Task,
    machine: LeasedMachine,
    *,
    run_checkers: RunCheckers,
    last_action: Done | Fail | None,
    timeout_s: float,
    subject: str,
) -> ScoreResult:
    """Run a task's checkers on a running machine.

    Args:
        subject: What is scored, as `<thing> <id>`, for messages.

    Raises:
        EvaluatorFailed: A checker failed, or its score is out of range.
        MachineLost: The machine is gone.
    """
    failure: Exception | None = None
    try:
        evaluation = await run_checkers(task, machine.desktop, last_action=last_action, timeout_s=timeout_s)
    except (EvaluatorFailed, MachineLost) as error:
        failure = error
    except Exception as error:
        failure = EvaluatorFailed(f"{subject}: a checker failed: {error!r}")
        failure.__cause__ = error
    # Checked first: a score on a lost machine, above all 0, says nothing about the agent.
    if machine.lost.is_set():
        raise MachineLost(f"{subject}: machine lost during Evaluate: {machine.machine.lost_reason}") from failure
    if failure is not None:
        raise failure
    if not 0 <= evaluation.score <= 1:
        raise EvaluatorFailed(f"{subject}: score {evaluation.score} is outside [0, 1]")
    return evaluation
