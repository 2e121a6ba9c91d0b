"""Score the state of a checkpoint on a machine of its own, so that no episode has to end for its score."""

from dataclasses import replace

from envd.base.errors import EnvdError, EvaluatorFailed
from envd.desktop.observation import Encoding, ObservationOptions
from envd.episodes.checkpoints.calls import Checkpointing
from envd.episodes.context import EpisodeContext
from envd.episodes.evaluating import RunCheckers, judge
from envd.episodes.ledger import SCORE, Request
from envd.episodes.quotas import MachineQuotas
from envd.episodes.types import ResetCommand, ScoreCommand, ScoreResult
from envd.pool.leased import LeasedMachine
from envd.tasks import basis
from envd.tasks.evaluate import Evaluation
from envd.tasks.model import Task


class Scoring:
    """The `score` call of an episode service."""

    def __init__(
        self, context: EpisodeContext, checkpoints: Checkpointing, quotas: MachineQuotas, *, run_checkers: RunCheckers
    ) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._quotas = quotas
        self._run_checkers = run_checkers

    async def score(self, command: ScoreCommand) -> ScoreResult:
        """Score the state of a checkpoint; nothing else changes. Idempotent on `request_id`.

        Timings: those of `Checkpointing.restore`, then `resume`, `evaluate` and `total`.

        Raises:
            EvaluatorFailed: A checker failed, or the machine was lost; there is no score.
            RequestIdReused: The id came before with a different body.
            CheckpointNotFound, CheckpointCorrupt, CheckpointUnusable: See `Checkpointing.find`.
            GroupTooLarge, PoolExhausted, TokenQuotaReached, PoolFailing, Draining: No machine for it.
            SetupFailed, HypervisorError: It did not start.
        """
        request = Request(SCORE, "", f"{command.owner}/{command.request_id}", command.fingerprint)
        answer = await self._context.requests.answer(request, lambda: self._score(command))
        return replace(answer.value, cached=True) if answer.replayed else answer.value

    async def _score(self, command: ScoreCommand) -> ScoreResult:
        found, task, pool = await self._checkpoints.find(
            command.checkpoint_id, lambda owner: command.sees_all_owners or owner == command.owner
        )
        reset = ResetCommand(
            request_id=command.request_id,
            task_id=found.task_id,
            checkpoint_id=found.checkpoint_id,
            owner=command.owner,
            observe=ObservationOptions(encoding=Encoding.NONE),
            timeout_s=command.timeout_s,
        )
        clock = self._context.clock
        with self._quotas.reserve(command.owner, 1, max_machines=command.max_machines):
            group = await self._checkpoints.restore(found, pool, reset)
            (member,) = group.members
            began_s = clock.monotonic()
            try:
                evaluation, resume_ms = await self._judge(f"checkpoint {found.checkpoint_id}", task, member.machine)
            finally:
                await pool.release([member.machine])
        evaluate_ms = (clock.monotonic() - began_s) * 1000 - resume_ms
        return ScoreResult(
            score=evaluation.score,
            checks=evaluation.checks,
            timings_ms={
                **group.timings_ms,
                "resume": resume_ms,
                "evaluate": evaluate_ms,
                "total": group.timings_ms["total"] + resume_ms + evaluate_ms,
            },
            basis_digest=basis.digest_of(task, member.machine.machine.spec, found.settle),
        )

    async def _judge(self, subject: str, task: Task, machine: LeasedMachine) -> tuple[Evaluation, float]:
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
