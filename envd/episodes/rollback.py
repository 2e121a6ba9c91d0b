"""Put an episode back into the state of a checkpoint, on another machine.

Always true, whenever the daemon dies: the database has the episode with its old machine, which nothing has touched, or
with the new one and the response. So a retry repeats a rollback that was not done, or gets the recorded response.
"""

import logging
from dataclasses import replace

from envd.base.errors import EnvdError, InvalidRequest, MachineLost
from envd.base.telemetry.traces import Stopwatch
from envd.episodes.checkpointing import Checkpointing
from envd.episodes.checkpoints.manifest import Checkpoint
from envd.episodes.context import EpisodeContext
from envd.episodes.controlling import Controlling
from envd.episodes.episode import Episode
from envd.episodes.ledger import ROLLBACK, RequestKey
from envd.episodes.members import Member
from envd.episodes.perform import with_pixels
from envd.episodes.types import RollbackCommand, RollbackResult
from envd.pool.pool import Pool

logger = logging.getLogger(__name__)


class RollingBack:
    """The `rollback` call of an episode service."""

    def __init__(self, context: EpisodeContext, checkpoints: Checkpointing, controlling: Controlling) -> None:
        self._context = context
        self._checkpoints = checkpoints
        self._controlling = controlling

    async def rollback(self, command: RollbackCommand) -> RollbackResult:
        """Put an open episode back into the state of a checkpoint. Idempotent on `request_id`, also after a restart.

        While a person controls the episode, only that person may. It waits for a running step. The episode is active
        afterwards, also if it had ended, and calls of its earlier epoch fail. On failure it is unchanged.
        Timings: `queue`, `restore`, `fork`, `observe` and `total`.

        Raises:
            EpisodeNotFound, RequestIdReused, StaleEpoch, HumanInControl, GuestEnded, MachineLost: See `Stepping.step`.
            CheckpointNotFound, CheckpointCorrupt, CheckpointUnusable: See `Checkpointing.find`.
            InvalidRequest: It is of another task or pool, or the observation is impossible on this screen.
            SetupFailed: The new machine did not start, or a requested part of the observation is unavailable.
            HypervisorError: The state could not be read or forked.
        """
        request = RequestKey(ROLLBACK, command.episode_id, command.request_id, command.fingerprint)
        answer = await self._context.once(request, lambda episode: self._rollback(episode, command, request))
        result = answer.value
        if not answer.restored:
            return result
        episode = self._context.registry.find(command.episode_id)
        return replace(result, observation=await with_pixels(result.observation, episode, command.observe))

    async def _rollback(self, episode: Episode, command: RollbackCommand, request: RequestKey) -> RollbackResult:
        context, watch = self._context, Stopwatch(self._context.clock)
        async with context.call(episode, watch=watch):
            try:
                checkpoint, task, pool = await self._checkpoints.find(
                    command.checkpoint_id, lambda owner: owner == episode.spec.owner
                )
                if (task.task_id, pool.name) != (episode.task.task_id, episode.spec.pool):
                    raise InvalidRequest(
                        "checkpoint_id",
                        f"{checkpoint.checkpoint_id} is of task {task.task_id} in pool {pool.name}, but episode"
                        f" {episode.episode_id} is of task {episode.task.task_id} in pool {episode.spec.pool}",
                    )
                async with episode.turn:
                    watch.lap("queue")
                    episode.require_epoch(command.epoch)
                    episode.require_machine()
                    await self._controlling.before_rollback(episode, command.control_id)
                    member = await self._copy(episode, command, checkpoint, pool, watch)
                    return await self._swap(episode, request, checkpoint, member, watch)
            except EnvdError as error:
                context.count_failure(episode, "rollback", error)
                raise

    async def _copy(
        self, episode: Episode, command: RollbackCommand, checkpoint: Checkpoint, pool: Pool, watch: Stopwatch
    ) -> Member:
        """Return a machine with the checkpoint's state. On failure and on cancellation there is none."""
        subject = f"rollback of episode {episode.episode_id}"
        async with pool.replacing(run=episode.spec.run) as reservation:
            (member,) = await self._checkpoints.start_from(
                checkpoint, pool, [reservation], options=command.observe, subject=subject, watch=watch
            )
            # Without an await from here on, so that a machine is always released by one of the two.
            if episode.closed.is_set() or episode.machine.lost.is_set():
                raise MachineLost(f"{subject}: its machine was lost meanwhile")
            # A person may have taken or lost control meanwhile.
            episode.human.require(episode.episode_id, command.control_id)
            return member

    async def _swap(
        self, episode: Episode, request: RequestKey, checkpoint: Checkpoint, member: Member, watch: Stopwatch
    ) -> RollbackResult:
        context, old = self._context, episode.machine
        episode.go_back(member.machine, checkpoint.start)
        context.registry.events.rolled_back(episode, time=checkpoint.create_time)
        result = RollbackResult(
            episode=episode.info(context.clock),
            observation=member.observation,
            timings_ms={**watch.timings_ms, "total": watch.total_ms},
        )
        try:
            await context.journal.answered(request, episode, result)
        finally:
            # Not before: a daemon that was killed by now would continue with it.
            context.registry.release_soon(episode, old)
        context.metrics.rollbacks.labels(pool=episode.spec.pool).inc()
        logger.info(
            "episode %s: rolled back to checkpoint %s at step %d, epoch %d, machine %s",
            episode.episode_id,
            checkpoint.checkpoint_id,
            episode.progress.step_count,
            episode.epoch,
            episode.machine.machine_id,
        )
        return result
