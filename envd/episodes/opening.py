"""Open episodes: by reset, at the start of a task, and by fork, in the present state of another episode."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from envd.base.aio import shielded
from envd.base.config import SettlePolicy
from envd.base.errors import (
    EnvdError,
    EpisodeEnded,
    InvalidRequest,
    MachineLost,
    SetupFailed,
    StaleEpoch,
    StepIndexMismatch,
    StoreError,
)
from envd.base.telemetry import traces
from envd.base.telemetry.traces import Stopwatch
from envd.desktop.observation import Encoding, ObservationOptions
from envd.episodes.automatic import AutomaticCheckpointing
from envd.episodes.checkpointing import Checkpointing
from envd.episodes.context import EpisodeContext, draining_error
from envd.episodes.episode import Episode, Lease
from envd.episodes.ledger import FORK, RESET, Answer, RequestKey
from envd.episodes.members import Group, start_from
from envd.episodes.progress import NO_CHECKPOINTS, CheckpointTrigger, EpisodeSpec, Progress
from envd.episodes.resetting import RunSetup, choose_pool, reset_group
from envd.episodes.types import ForkCommand, OpenedGroup, ResetCommand
from envd.pool.leased import LeasedMachine
from envd.pool.pool import Pool
from envd.tasks.basis import task_digest
from envd.tasks.model import Task
from envd.tasks.perturbations import own_perturb, perturb

logger = logging.getLogger(__name__)

#: How long an evaluation waits for a machine to compare its own with, in seconds. Its setup has its own limit.
_COMPARISON_ADMISSION_S = 120.0


class EpisodeOpening:
    """The `reset` and `fork` calls of an episode service."""

    def __init__(
        self,
        context: EpisodeContext,
        *,
        run_setup: RunSetup,
        checkpoints: Checkpointing,
        automatic: AutomaticCheckpointing,
    ) -> None:
        self._context = context
        self._run_setup = run_setup
        self._checkpoints = checkpoints
        self._automatic = automatic
        self.draining = False
        """Whether new resets and forks are refused."""
        self.resetting_count = 0
        """Resets that are running."""

    async def reset(self, command: ResetCommand) -> OpenedGroup:
        """Open a group of episodes, all or none, all in one state: the start of a task, or a checkpoint's.

        Idempotent on `request_id`.

        On failure no machine is kept. A cancelled caller leaves the reset running for 10 s, for a retry to join; then
        it is cancelled, or its episodes are closed.

        Raises:
            RequestIdReused: The id came before with a different body.
            TaskNotFound, PoolNotFound: No such task or pool.
            InvalidRequest: A field is out of range, or several pools fit.
            GroupTooLarge: The group can never fit the pool, or the run's or token's quota.
            PoolExhausted: No machines became free in time, or the queue is full.
            TokenQuotaReached: The owner would exceed its maximum of machines.
            PoolFailing: The pool's machines do not start.
            Draining: The daemon is stopping.
            SetupFailed: The task's setup failed.
            MachineLost: Machines died in two attempts.
            HypervisorError: The state after setup could not be frozen or forked.
            CheckpointNotFound, CheckpointUnusable, CheckpointCorrupt: See `Checkpointing.find`.
            NotForkable: It asks for automatic checkpoints, and the pool's machines cannot be copied.
        """
        # Owners have separate id spaces, so no caller can guess another's response. Token names contain no slash.
        request = RequestKey(RESET, "", f"{command.owner}/{command.request_id}", command.fingerprint)
        answer = await self._context.requests.answer(request, lambda: self._reset(command, request))
        return await self._with_pixels(answer, command.observe)

    async def _reset(self, command: ResetCommand, request: RequestKey) -> OpenedGroup:
        context = self._context
        if self.draining:
            raise draining_error()
        ttl_s = context.limits.lease_ttl_for(command.lease_ttl_s)
        if command.group_size < 1:
            raise InvalidRequest("group_size", f"{command.group_size} is below 1")
        if command.checkpoint_id:
            return await self._reset_to_checkpoint(command, request, ttl_s=ttl_s)
        task = self._context.tasks.get(command.task_id)
        pool = choose_pool(task, command.pool, context.pools)
        if command.automatic != NO_CHECKPOINTS:
            pool.require_copies()
        max_steps = context.limits.max_steps_for(command.max_steps, task_max_steps=task.max_steps)
        wanted = command.perturb or own_perturb(task, request.request_id)
        start, perturbations = perturb(task, wanted) if wanted else (task, ())
        with self._resetting(command, pool):
            self._require_runnable(task)
            group = await self._start(pool, start, command)
        group = replace(group, progress=Progress(perturbations=perturbations))
        return await self._publish_reset(
            request,
            group,
            command,
            pool=pool,
            task=task,
            run=command.run,
            max_steps=max_steps,
            settle=command.settle or pool.settings.settle,
            lease_ttl_s=ttl_s,
        )

    async def _publish_reset(
        self,
        request: RequestKey,
        group: Group,
        command: ResetCommand,
        *,
        pool: Pool,
        task: Task,
        run: str,
        max_steps: int,
        settle: SettlePolicy,
        lease_ttl_s: float,
    ) -> OpenedGroup:
        context = self._context
        group_id, digest = context.new_group_id(), task_digest(task)
        specs = [
            EpisodeSpec(
                episode_id=context.new_episode_id(),
                group_id=group_id,
                task_id=task.task_id,
                task_digest=digest,
                pool=pool.name,
                run=run,
                owner=command.owner,
                max_steps=max_steps,
                settle=settle,
                automatic=command.automatic,
                origin=member.origin,
                # Of its own: episodes are listed in the order of their times.
                create_time=context.clock.now(),
            )
            for member in group.members
        ]
        return await self._publish(
            request, group, specs, pool=pool, task=task, lease_ttl_s=lease_ttl_s, instruction=task.instruction
        )

    async def _start(self, pool: Pool, task: Task, command: ResetCommand) -> Group:
        return await reset_group(pool, task, command, context=self._context, run_setup=self._run_setup)

    @asynccontextmanager
    async def at_start(self, episode: Episode) -> AsyncIterator[LeasedMachine]:
        """Yield another machine, at the start of an episode's task.

        It counts as a machine of the episode's owner. The owner's limit does not refuse it: an owner at the limit would
        get no score.

        Raises: As `reset`; PoolExhausted if no machine is free within 2 minutes.
        """
        pool, setup_s = self._context.pools[episode.spec.pool], self._context.limits.setup_timeout_s
        command = ResetCommand(
            request_id="",
            task_id=episode.spec.task_id,
            run=episode.spec.run,
            owner=episode.spec.owner,
            observe=ObservationOptions(encoding=Encoding.NONE),
            timeout_s=_COMPARISON_ADMISSION_S + setup_s,
            admission_timeout_s=_COMPARISON_ADMISSION_S,
        )
        with self._context.registry.opening(episode.spec.owner, 1, max_machines=None):
            group = await self._start(pool, episode.task, command)
            try:
                yield group.members[0].machine
            finally:
                await pool.release(member.machine for member in group.members)

    async def _reset_to_checkpoint(self, command: ResetCommand, request: RequestKey, *, ttl_s: float) -> OpenedGroup:
        checkpoint, task, pool = await self._checkpoints.find_for(command)
        max_steps = self._context.limits.max_steps_for(command.max_steps, task_max_steps=checkpoint.spec.max_steps)
        with self._resetting(command, pool):
            group = await self._checkpoints.start_group(checkpoint, pool, command)
        return await self._publish_reset(
            request,
            group,
            command,
            pool=pool,
            task=task,
            run=command.run or checkpoint.spec.run,
            max_steps=max_steps,
            settle=command.settle or checkpoint.spec.settle,
            lease_ttl_s=ttl_s,
        )

    @contextmanager
    def _resetting(self, command: ResetCommand, pool: Pool) -> Iterator[None]:
        """Count a reset while it runs, with its machines, and its failure."""
        context = self._context
        self.resetting_count += 1
        try:
            with context.registry.opening(command.owner, command.group_size, max_machines=command.max_machines):
                yield
        except EnvdError as error:
            context.metrics.episode_failed(pool=pool.name, operation="reset", reason=error.reason)
            raise
        finally:
            self.resetting_count -= 1
            context.registry.changes.notify()

    def _require_runnable(self, task: Task) -> None:
        """Raise SetupFailed if this host cannot run a task: a score would be a fault of the host, not of the agent."""
        obstacles = self._context.tasks.obstacles(task)
        if obstacles:
            raise SetupFailed(
                f"task {task.task_id}: cannot run on this host: {'; '.join(obstacles)}; choose a task that ListTasks"
                " shows as runnable, or set tasks.check_obstacles = false to run it anyway"
            )
        if task.user is not None and task.user.persona and self._context.user_model is None:
            raise SetupFailed(f"task {task.task_id}: a model plays its user, but tasks.user_url is not set")

    async def fork(self, command: ForkCommand) -> OpenedGroup:
        """Fork an active episode: copies start in its present state, all or none, and it continues.

        Idempotent on `request_id`. On failure no machine is kept, and the parent is unchanged unless its machine or
        guest failed. A cancelled caller leaves the fork running for a retry, as with `reset`.

        Raises:
            EpisodeNotFound: No such episode, or it was closed during the call.
            RequestIdReused: The id came before with a different body.
            InvalidRequest: A field is out of range.
            EpisodeEnded: The episode is no longer active.
            StepIndexMismatch: The episode is not at `step_index`.
            NotForkable: Its machine has a device or state that cannot be copied; it continues.
            GroupTooLarge, PoolExhausted, PoolFailing, Draining: The pool has no capacity for the copies.
            TokenQuotaReached: The parent's owner would exceed its maximum of machines.
            SetupFailed, HypervisorError: A copy did not start, or the state could not be copied.
            MachineLost: The parent's machine is gone; the parent is void.
            GuestUnresponsive, GuestError: The parent's guest failed; the parent is void.
        """
        request = RequestKey(FORK, command.episode_id, command.request_id, command.fingerprint)
        answer = await self._context.once(request, lambda episode: self._fork(episode, command, request))
        return await self._with_pixels(answer, command.observe)

    async def _fork(self, episode: Episode, command: ForkCommand, request: RequestKey) -> OpenedGroup:
        context = self._context
        if self.draining:
            raise draining_error()
        if command.fork_count < 1:
            raise InvalidRequest("fork_count", f"{command.fork_count} is below 1")
        ttl_s = context.limits.lease_ttl_for(command.lease_ttl_s)
        pool = context.pools[episode.spec.pool]
        async with context.call(episode):
            try:
                with context.registry.opening(
                    episode.spec.owner, command.fork_count, max_machines=command.max_machines
                ):
                    group = await self._copy(episode, command, pool)
            except EnvdError as error:
                if not isinstance(error, StaleEpoch | StepIndexMismatch | EpisodeEnded | InvalidRequest):
                    context.count_failure(episode, "fork", error)
                raise
            if episode.closed.is_set():
                await pool.release(member.machine for member in group.members)
                raise context.registry.not_found(episode.episode_id)
        context.journal.save_lease(episode)
        clock = context.clock
        specs = [
            replace(
                episode.spec,
                episode_id=context.new_episode_id(),
                parent_episode_id=episode.episode_id,
                origin=member.origin,
                create_time=clock.now(),
            )
            for member in group.members
        ]
        return await self._publish(request, group, specs, pool=pool, task=episode.task, lease_ttl_s=ttl_s)

    async def _copy(self, parent: Episode, command: ForkCommand, pool: Pool) -> Group:
        """Copy an episode's machine, all copies or none. The caller keeps the parent's lease from expiring.

        Reserves capacity for the copies, freezes the parent, then forks the copies from that state: the parent is
        paused only while it is frozen. On failure and on cancellation no machine, reservation or state is kept. The
        parent is unchanged, unless its own machine or guest failed: then it is void. Timings: `acquire`, `pause`,
        `copy`, `start` (of the slowest copy) and `total`.
        """
        pool.require_copies()
        watch = Stopwatch(self._context.clock)

        def check() -> None:
            parent.require_step(command.step_index, epoch=command.epoch)
            command.observe.require_region_on(parent.machine.desktop.screen_size)

        # During a step the parent's next step index is not known yet, so check only after it.
        if not parent.lock.locked():
            check()
        # The parent keeps its machine, so the run cannot free it for the copies.
        admission = await pool.acquire(
            0,
            reserved=command.fork_count,
            run=parent.spec.run,
            owner=parent.spec.owner,
            retained_count=1,
            timeout_s=command.timeout_s,
        )
        watch.lap("acquire")
        async with pool.releasing_on_failure(admission.reservations):
            frozen = await self._context.freeze(parent, command.step_index, check=check)
            progress = parent.progress  # of the frozen state: the parent continues only at the next await
            release = self._automatic.last_use(parent, frozen, CheckpointTrigger.BRANCH_POINT)
            subject, starting = f"fork of episode {command.episode_id}", Stopwatch(self._context.clock)
            try:
                with traces.timed("start"):
                    members = await start_from(
                        pool, frozen, admission.reservations, options=command.observe, subject=subject, watch=starting
                    )
            except MachineLost as error:
                # A copy died, which the caller does not know yet: do not blame the parent.
                raise SetupFailed(f"{subject}: {error}") from error
            finally:
                release()
        report = frozen.snapshot.report
        timings_ms = {
            **watch.timings_ms,
            "pause": report.paused_ms,
            "copy": report.total_ms,
            "start": starting.timings_ms["fork"],
            "total": watch.total_ms,
        }
        return Group(members=members, progress=progress, timings_ms=timings_ms)

    async def _publish(
        self,
        request: RequestKey,
        group: Group,
        specs: Sequence[EpisodeSpec],
        *,
        pool: Pool,
        task: Task,
        lease_ttl_s: float,
        instruction: str = "",
    ) -> OpenedGroup:
        """Turn the machines of a group into episodes, and persist them before the caller learns of them.

        Callers must not await between the end of the group's setup and this call. Raises: StoreError: none is open.
        """
        context = self._context
        episodes = self._create(group, specs, pool=pool, task=task, lease_ttl_s=lease_ttl_s)
        prefix = "fork_" if request.kind is FORK else ""
        context.metrics.episodes_opened(
            pool=pool.name,
            run=specs[0].run,
            count=len(episodes),
            timings_ms={f"{prefix}{phase}": length_ms for phase, length_ms in group.timings_ms.items()},
        )
        result = OpenedGroup(
            episodes=tuple(episode.info(context.clock) for episode in episodes),
            observations=tuple(member.observation for member in group.members),
            timings_ms=group.timings_ms,
            instruction=instruction,
        )
        try:
            await context.journal.opened(request, result, episodes)
        except (StoreError, asyncio.CancelledError):
            context.journal.forget_answer(request)
            await shielded(context.registry.close_group(result))
            raise
        return result

    def _create(
        self, group: Group, specs: Sequence[EpisodeSpec], *, pool: Pool, task: Task, lease_ttl_s: float
    ) -> tuple[Episode, ...]:
        """Create an episode per machine; their leases start now, and the registry releases the machines from now on.

        Never waits: ownership moves in one step.
        """
        context = self._context
        episodes = []
        for member, spec in zip(group.members, specs, strict=True):
            episode = Episode(
                spec=spec,
                progress=group.progress,
                task=task,
                pool_tools=pool.settings.tools,
                machine=member.machine,
                lease=Lease(ttl_s=lease_ttl_s, now_s=context.clock.monotonic()),
                requests=context.new_ledger(spec.episode_id),
            )
            context.registry.add(episode, pool)
            context.parking.keep(episode)
            logger.info(
                "episode %s: opened%s, task %s, machine %s, group %s%s",
                spec.episode_id,
                f" by {spec.owner}" if spec.owner else "",
                spec.task_id,
                member.machine.machine_id,
                spec.group_id,
                f", a fork of {spec.parent_episode_id}" if spec.parent_episode_id else "",
            )
            episodes.append(episode)
        return tuple(episodes)

    async def close_opening(self, request_id: str, *, owner: str) -> None:
        """End the owner's reset or forks with this id, and close the episodes that they opened. Idempotent."""
        context = self._context
        forks = (episode.requests.end(FORK, request_id) for episode in context.registry if episode.spec.owner == owner)
        await asyncio.gather(context.requests.end(RESET, f"{owner}/{request_id}"), *forks)

    async def _with_pixels(self, answer: Answer[OpenedGroup], options: ObservationOptions) -> OpenedGroup:
        """Return the response; re-attach pixels if a previous daemon recorded it."""
        result = answer.value
        if not answer.recovered:
            return result
        pairs = zip(result.episodes, result.observations, strict=True)
        observations = [await self._context.with_pixels(seen, info.episode_id, options) for info, seen in pairs]
        return replace(result, observations=tuple(observations))
