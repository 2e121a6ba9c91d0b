"""Score episodes: the checkers run once, on the state that the machine is in. A lost machine never yields a score."""

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from cuaenv.actions import Done, Fail
from envd.base.errors import EnvdError, EvaluatorFailed, MachineLost
from envd.base.losses import ENDS_MACHINE, Loss, Owner
from envd.base.telemetry import traces
from envd.desktop.desktop import Desktop
from envd.episodes.checkpoints.automatic import AutomaticCheckpointing
from envd.episodes.context import EpisodeContext, Stopwatch
from envd.episodes.episode import Episode
from envd.episodes.ledger import EVALUATE, Request
from envd.episodes.losing import find_loss
from envd.episodes.types import EpisodeState, EvaluateResult
from envd.pool.leased import LeasedMachine
from envd.tasks import basis
from envd.tasks.evaluate import Evaluation, judge_ended
from envd.tasks.model import Task

logger = logging.getLogger(__name__)


class RunCheckers(Protocol):
    """Scores a task."""

    async def __call__(
        self, task: Task, desktop: Desktop, *, last_action: Done | Fail | None, timeout_s: float
    ) -> Evaluation:
        """Return the score of the guest's state. Raises: EvaluatorFailed, MachineLost."""


@dataclass(eq=False)
class Evaluating:
    """The `evaluate` call of an episode service."""

    _context: EpisodeContext
    _automatic: AutomaticCheckpointing
    _run_checkers: RunCheckers
    _at_start: Callable[[Episode], AbstractAsyncContextManager[LeasedMachine]]

    async def evaluate(self, episode_id: str, *, request_id: str, fingerprint: bytes, epoch: int = 0) -> EvaluateResult:
        """Score an episode in its machine's present state, and end it if active. The checkers run once.

        Raises:
            EpisodeNotFound: No such episode.
            RequestIdReused: The id came before with a different body.
            StaleEpoch: It was rolled back after `epoch`, or while the call waited for its turn.
            EvaluatorFailed: A checker failed; later calls raise it too.
            MachineLost: The machine is gone, and no score was recorded.
        """
        request = Request(EVALUATE, episode_id, request_id, fingerprint)
        answer = await self._context.once(request, lambda episode: self._evaluate(episode, request, epoch))
        return replace(answer.value, cached=True) if answer.replayed else answer.value

    async def _evaluate(self, episode: Episode, request: Request, epoch: int) -> EvaluateResult:
        context, epoch = self._context, epoch or episode.epoch
        watch = Stopwatch(context.clock)
        async with context.registry.call(episode, renews=True), episode.turn:
            watch.lap("queue")
            episode.require_epoch(epoch)
            if isinstance(episode.verdict, EvaluatorFailed):
                raise EvaluatorFailed(str(episode.verdict)) from episode.verdict
            if episode.verdict is not None:
                return replace(episode.verdict, cached=True)
            if not episode.guest_end_cause:
                episode.require_machine()
            episode.human.require_agent(episode.episode_id)
            await context.journal.begin(request)
            if episode.state is EpisodeState.ACTIVE:
                context.registry.end(episode, EpisodeState.TRUNCATED, "EVALUATED")
            end_copy, score = await self._automatic.before_evaluation(episode), None
            try:
                evaluation = await self._score_or_zero(episode, watch)
                score = evaluation.score
                watch.lap("evaluate")
            except EnvdError as error:
                if isinstance(error, EvaluatorFailed):
                    episode.verdict = error
                    context.registry.events.scored(episode)
                    context.journal.save(episode)
                    context.journal.forget_answer(request)
                context.count_failure(episode, "evaluate", error)
                raise
            finally:
                end_copy(score == 0)
            episode.lease.renew(context.clock.monotonic())
            episode.verdict = EvaluateResult(
                episode=episode.info(context.clock),
                score=evaluation.score,
                checks=evaluation.checks,
                timings_ms={**watch.timings_ms, "total": watch.total_ms},
                basis_digest=basis.digest_of(episode.task, episode.machine.machine.spec, episode.settle),
            )
        context.registry.events.scored(episode)
        logger.info("episode %s: scored %g", episode.episode_id, evaluation.score)
        context.metrics.episode_evaluated(
            pool=episode.pool, score=evaluation.score, timings_ms=episode.verdict.timings_ms
        )
        with traces.timed("store"):
            await context.journal.answered(request, episode, episode.verdict)
        return episode.verdict

    async def _score_or_zero(self, episode: Episode, watch: Stopwatch) -> Evaluation:
        """Run the checkers; if they cannot run because the guest ended itself or its session, see `judge_ended`.

        Raises:
            EvaluatorFailed, MachineLost: See `judge`.
        """
        reason, is_compared = "", False
        while episode.guest_end_cause not in ENDS_MACHINE:
            try:
                async with self._context.awake(episode, watch):
                    return await self._judge(episode, episode.machine)
            except EvaluatorFailed as error:
                loss = await find_loss(episode, error)
                # Whatever failed, a judge that a file ended included: what the agent left may be the cause.
                if loss is None and not episode.guest_end_cause and error.__cause__ is not None:
                    if is_compared:
                        reason = f"at the task's start the checkers work, but not here: {error}"
                        loss = Loss(Owner.GUEST, reason, "UNCHECKABLE")
                    elif is_compared := await self._works_at_start(episode):
                        continue
                if loss is not None and loss.owner is not Owner.UNDECIDED:
                    self._context.registry.end_by(episode, error, loss)
                if not episode.guest_end_cause:
                    if loss is not None and loss.owner is Owner.HOST:
                        # What the host broke may work on another machine.
                        raise loss.error(f"episode {episode.episode_id}") from error
                    raise
            except EnvdError as error:
                raised = await self._context.registry.lose(episode, error)
                if not episode.guest_end_cause:
                    raise raised from error
            break
        return judge_ended(episode.task, episode.guest_end_cause, reason)

    async def _works_at_start(self, episode: Episode) -> bool:
        """Return whether the checkers give a score for the task's start, so that a failure is of the agent's making.

        False if no machine is free for it: then the failure is not decided, and there is no score.
        """
        try:
            async with self._at_start(episode) as machine, machine.running():
                await self._judge(episode, machine)
        except Exception as error:
            logger.warning("episode %s: the start of its task was not checked either: %r", episode.episode_id, error)
            return False
        return True

    async def _judge(self, episode: Episode, machine: LeasedMachine) -> Evaluation:
        return await judge(
            episode.task,
            machine,
            run_checkers=self._run_checkers,
            last_action=episode.last_action,
            timeout_s=self._context.limits.evaluate_timeout_s,
            subject=f"episode {episode.episode_id}",
        )


async def judge(
    task: Task,
    machine: LeasedMachine,
    *,
    run_checkers: RunCheckers,
    last_action: Done | Fail | None,
    timeout_s: float,
    subject: str,
) -> Evaluation:
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
