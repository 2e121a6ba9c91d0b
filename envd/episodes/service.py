"""Everything that callers can do with episodes, whatever wire they come over.

Always true, because one event loop is atomic between awaits:

* A machine belongs to its pool until its reset is complete, then to one episode until that is closed.
* What changes a machine runs in a task of a ledger, not of the caller, one at a time for each episode.
* A failure of ours is an error; only what the agent did is in a result.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from envd.episodes.episode import Episode
from envd.episodes.lease import Lease
from envd.episodes.ledger import Ledger
from envd.episodes.limits import EpisodeLimits
from envd.episodes.observer import EpisodeObserver, NoObserver
from envd.episodes.opening import OpenedGroup, RunCheckers, RunSetup, choose_pool, open_group
from envd.episodes.registry import EpisodeRegistry
from envd.episodes.step import Stopwatch, check_region, look, perform
from envd.episodes.types import (
    EpisodeInfo,
    EpisodeState,
    EvaluateResult,
    GuestCommandResult,
    GuestFile,
    PoolInfo,
    ResetCommand,
    ResetResult,
    StepCommand,
    StepResult,
)
from envd.errors import (
    AccessDenied,
    Draining,
    EnvdError,
    EpisodeEnded,
    EvaluatorFailed,
    InvalidRequest,
    MachineLost,
    NotFound,
    StepIndexMismatch,
)
from envd.guest.desktop import Desktop
from envd.guest.observation import Observation, ObservationOptions, SettlePolicy
from envd.pool.clock import Clock, SystemClock, wait_until
from envd.pool.pool import Pool
from envd.pool.tasks import Changes
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.checkers import evaluate as run_task_checkers
from envd.tasks.evaluation import Evaluation
from envd.tasks.model import Task
from envd.tasks.setup import run_setup as run_task_setup

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EpisodeService:
    """Opens, steps, scores and closes episodes on the machines of its pools, which it starts and closes."""

    def __init__(
        self,
        pools: Iterable[Pool],
        *,
        tasks: TaskCatalogue,
        limits: EpisodeLimits | None = None,
        observer: EpisodeObserver | None = None,
        run_setup: RunSetup = run_task_setup,
        run_checkers: RunCheckers = run_task_checkers,
        clock: Clock | None = None,
        make_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """Set up a service; nothing runs before `start`.

        Args:
            pools: Pools with different names, not yet started.
            tasks: What can be reset to.
            limits: Bounds on episodes.
            observer: Told what happens, for metrics.
            run_setup: Brings a desktop to a task's start.
            run_checkers: Scores a task.
            clock: Where time comes from; by default the host's.
            make_id: Makes the unique part of episode and group ids: at most 32 of [a-z0-9].
        """
        self._pools = {pool.name: pool for pool in sorted(pools, key=lambda pool: pool.name)}
        self._tasks = tasks
        self._limits = limits or EpisodeLimits()
        self._observer: EpisodeObserver = observer or NoObserver()
        self._run_setup = run_setup
        self._run_checkers = run_checkers
        self._clock = clock or SystemClock()
        self._make_id = make_id
        self._registry = EpisodeRegistry(clock=self._clock, observer=self._observer)
        self._resets: Ledger[ResetResult] = Ledger(
            "reset",
            clock=self._clock,
            keep_s=self._limits.ledger_keep_s,
            keep_count=self._limits.ledger_reset_count,
            # A reset that failed handed out nothing, whatever went wrong.
            without_effect=(Exception,),
            abandoned=self._draining_error,
        )
        self._resetting_count = 0
        self._pool_changes = Changes()
        for pool in self._pools.values():
            pool.changes.listen(self._pool_changes.notify)
        self._draining = False
        self._closed = False
        self._close_task: asyncio.Task[None] | None = None

    @property
    def tasks(self) -> TaskCatalogue:
        """What can be reset to."""
        return self._tasks

    @property
    def is_draining(self) -> bool:
        """Whether new resets are refused."""
        return self._draining

    def __repr__(self) -> str:
        state = "closed" if self._closed else "draining" if self._draining else "open"
        return f"<EpisodeService {state}, {len(self._registry)} episodes, {list(self._pools.values())}>"

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the pools and the reaper; returns before any machine is ready. Once."""
        for pool in self._pools.values():
            await pool.start()
        self._registry.start()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new resets, let what runs finish for at most `timeout_s`, then close the episodes that are left."""
        self._draining = True
        for pool in self._pools.values():
            pool.drain()
        deadline_s = self._clock.monotonic() + timeout_s
        while (len(self._registry) or self._resetting_count) and self._clock.monotonic() < deadline_s:
            await wait_until(self._clock, deadline_s, or_event=self._registry.changes.next)
        await self._resets.close()
        await self._registry.close_all("DRAINED")

    async def aclose(self) -> None:
        """Close all episodes, pools and tasks. Idempotent; once begun it goes on, whoever is cancelled."""
        if self._close_task is None:
            self._close_task = asyncio.create_task(self._aclose(), name="episodes:close")
        await asyncio.shield(self._close_task)

    async def _aclose(self) -> None:
        await self.drain(0.0)
        for pool in self._pools.values():
            await pool.close()
        await self._registry.aclose()
        self._closed = True
        self._pool_changes.notify()

    # -- reset --------------------------------------------------------------------------------------------------

    async def reset(self, command: ResetCommand) -> ResetResult:
        """Open a group of episodes at the start of a task, all or none. Idempotent on `request_id`.

        On failure no machine is kept. A cancelled caller leaves the reset running, for a retry to join; its
        episodes then live as long as their leases.

        Raises:
            RequestIdReused: The id came before with another body.
            TaskNotFound, PoolNotFound: No such task or pool.
            InvalidRequest: A field is out of range, or several pools fit.
            GroupTooLarge: The pool can never hold the group.
            PoolExhausted: No machines came free in time.
            Draining: The daemon is stopping.
            SetupFailed: The task could not be set up.
            MachineLost: Machines died under two attempts.
        """
        answer = await self._resets.answer(command.request_id, command.fingerprint, lambda: self._reset(command))
        return answer.value

    async def _reset(self, command: ResetCommand) -> ResetResult:
        if self._draining:
            raise self._draining_error()
        task = self._tasks.get(command.task_id)
        pool = choose_pool(task, command.pool, self._pools)
        ttl_s = self._lease_ttl_s(command.lease_ttl_s)
        max_steps = self._max_steps(command.max_steps, task)
        if command.group_size < 1:
            raise InvalidRequest("group_size", f"{command.group_size} is below 1")
        self._resetting_count += 1
        try:
            group = await open_group(
                pool,
                task,
                command,
                run_setup=self._run_setup,
                setup_timeout_s=self._limits.setup_timeout_s,
                clock=self._clock,
            )
        except EnvdError as error:
            logger.warning("reset %s: task %s: %s: %s", command.request_id, task.task_id, error.reason, error)
            self._observer.failure(pool=pool.name, run=command.run, operation="reset", reason=error.reason)
            raise
        finally:
            self._resetting_count -= 1
            self._registry.changes.notify()
        # No await from there to here: machines that are ready become episodes, all at once.
        return self._adopt(group, command, task, pool, ttl_s=ttl_s, max_steps=max_steps)

    def _adopt(
        self, group: OpenedGroup, command: ResetCommand, task: Task, pool: Pool, *, ttl_s: float, max_steps: int
    ) -> ResetResult:
        """Make opened machines episodes; their leases start now."""
        group_id = f"group-{self._make_id()}"
        infos: list[EpisodeInfo] = []
        for member in group.members:
            episode_id = f"ep-{self._make_id()}"
            episode = Episode(
                episode_id=episode_id,
                group_id=group_id,
                task=task,
                pool=pool.name,
                run=command.run,
                max_steps=max_steps,
                settle=command.settle or pool.settings.settle,
                machine=member.machine,
                lease=Lease(ttl_s=ttl_s, now_s=self._clock.monotonic()),
                create_time=self._clock.now(),
                steps=self._new_ledger(episode_id, "step", (StepIndexMismatch, EpisodeEnded, InvalidRequest)),
                evaluations=self._new_ledger(episode_id, "evaluate", ()),
            )
            self._registry.add(episode, pool)
            infos.append(episode.info(self._clock))
            logger.info(
                "episode %s: opened, task %s, machine %s, group %s",
                episode_id,
                task.task_id,
                member.machine.machine_id,
                group_id,
            )
        self._observer.episode_reset(
            pool=pool.name, run=command.run, episode_count=len(infos), timings_ms=group.timings_ms
        )
        return ResetResult(
            episodes=tuple(infos),
            observations=tuple(member.observation for member in group.members),
            instruction=task.instruction,
            timings_ms=group.timings_ms,
        )

    def _new_ledger(self, episode_id: str, name: str, without_effect: tuple[type[Exception], ...]) -> Ledger[T]:
        return Ledger(
            f"{name}:{episode_id}",
            clock=self._clock,
            keep_s=self._limits.ledger_keep_s,
            keep_count=self._limits.ledger_step_count,
            without_effect=without_effect,
            abandoned=lambda: self._registry.not_found(episode_id),
        )

    # -- step, observe, evaluate ---------------------------------------------------------------------------------

    async def step(self, command: StepCommand) -> StepResult:
        """Perform actions in an episode, then look. Idempotent on `request_id`; steps of an episode run one at a time.

        A cancelled caller leaves the step running, for a retry to join. A failure after the first action began
        voids the episode.

        Raises:
            EpisodeNotFound: No such episode.
            RequestIdReused: The id came before with another body.
            EpisodeEnded: The episode takes no more steps.
            StepIndexMismatch: `step_index` is not the next one.
            InvalidRequest: The observation asked for is not possible on this screen.
            MachineLost: The machine is gone, now or before; the episode is void.
            GuestUnresponsive, GuestError: The guest failed us; the episode is void.
        """
        episode = self._registry.get(command.episode_id)
        episode.lease.renew(self._clock.monotonic())
        answer = await episode.steps.answer(
            command.request_id, command.fingerprint, lambda: self._step(episode, command)
        )
        return replace(answer.value, replayed=True) if answer.replayed else answer.value

    async def _step(self, episode: Episode, command: StepCommand) -> StepResult:
        watch = Stopwatch(self._clock)
        with self._registry.call(episode, renews=True):
            async with episode.turn:
                watch.lap("queue")
                episode.require_step(command.step_index)
                check_region(command.observe, episode.machine.desktop)
                try:
                    performed = await perform(
                        episode.machine.desktop,
                        command.actions,
                        settle=command.settle or episode.settle,
                        options=command.observe,
                        clock=self._clock,
                    )
                    # A machine can die in the last instant of a step that looked well.
                    episode.require_machine()
                except Exception as error:
                    self._registry.void(episode, error)
                    self._tell_failure(episode, "step", error)
                    raise
                if episode.count_step(performed.last_action):
                    self._registry.tell_end(episode)
        timings_ms = {**watch.timings_ms, **performed.timings_ms, "total": watch.total_ms}
        self._observer.step_done(
            pool=episode.pool, run=episode.run, episode_id=episode.episode_id, timings_ms=timings_ms
        )
        return StepResult(
            episode=episode.info(self._clock),
            observation=performed.observation,
            outcomes=performed.outcomes,
            timings_ms=timings_ms,
        )

    async def observe(
        self,
        episode_id: str,
        options: ObservationOptions,
        *,
        refresh: bool = False,
        settle: SettlePolicy | None = None,
    ) -> Observation:
        """Return what the agent would see now. Changes nothing, not even the lease.

        Raises:
            EpisodeNotFound: No such episode.
            InvalidRequest: The observation asked for is not possible on this screen.
            MachineLost: The machine is gone; the episode is void.
            GuestUnresponsive, GuestError: What was asked for cannot be had; the episode goes on.
        """
        episode = self._registry.get(episode_id)
        with self._registry.call(episode, renews=False):
            episode.require_machine()
            check_region(options, episode.machine.desktop)
            watch = Stopwatch(self._clock)
            return await look(episode.machine.desktop, settle=settle, options=options, refresh=refresh, watch=watch)

    async def evaluate(self, episode_id: str, *, request_id: str, fingerprint: bytes) -> EvaluateResult:
        """Score an episode on the state that its machine is in, and end it if active. The checkers run once.

        Raises:
            EpisodeNotFound: No such episode.
            RequestIdReused: The id came before with another body.
            EvaluatorFailed: A checker broke; so it stays.
            MachineLost: The machine is gone, and no score was reached before.
        """
        episode = self._registry.get(episode_id)
        episode.lease.renew(self._clock.monotonic())
        answer = await episode.evaluations.answer(request_id, fingerprint, lambda: self._evaluate(episode))
        return replace(answer.value, cached=True) if answer.replayed else answer.value

    async def _evaluate(self, episode: Episode) -> EvaluateResult:
        watch = Stopwatch(self._clock)
        with self._registry.call(episode, renews=True):
            async with episode.turn:
                watch.lap("queue")
                if isinstance(episode.verdict, EvaluatorFailed):
                    raise EvaluatorFailed(str(episode.verdict)) from episode.verdict
                if episode.verdict is not None:
                    return replace(episode.verdict, cached=True)
                episode.require_machine()
                if episode.state is EpisodeState.ACTIVE:
                    self._registry.end(episode, EpisodeState.TRUNCATED, "EVALUATED")
                try:
                    evaluation = await self._check(episode)
                except EnvdError as error:
                    if isinstance(error, EvaluatorFailed):
                        episode.verdict = error
                    self._tell_failure(episode, "evaluate", error)
                    raise
                watch.lap("evaluate")
                episode.lease.renew(self._clock.monotonic())
                episode.verdict = EvaluateResult(
                    episode=episode.info(self._clock),
                    score=evaluation.score,
                    checks=evaluation.checks,
                    timings_ms={**watch.timings_ms, "total": watch.total_ms},
                )
        logger.info("episode %s: scored %g", episode.episode_id, evaluation.score)
        self._observer.evaluated(
            pool=episode.pool,
            run=episode.run,
            episode_id=episode.episode_id,
            score=evaluation.score,
            timings_ms=episode.verdict.timings_ms,
        )
        return episode.verdict

    async def _check(self, episode: Episode) -> Evaluation:
        """Run the checkers. Raises: EvaluatorFailed, MachineLost."""
        machine = episode.machine
        failure: Exception | None = None
        try:
            evaluation = await self._run_checkers(
                episode.task,
                machine.desktop,
                last_action=episode.last_action,
                timeout_s=self._limits.evaluate_timeout_s,
            )
        except (EvaluatorFailed, MachineLost) as error:
            failure = error
        except Exception as error:
            failure = EvaluatorFailed(f"episode {episode.episode_id}: a checker broke: {error!r}")
            failure.__cause__ = error
        # Whatever a checker made of a dying machine, a score of 0 above all, is about the machine, not the agent.
        if machine.lost.is_set():
            reason = machine.machine.lost_reason
            raise MachineLost(f"episode {episode.episode_id}: machine lost while scored: {reason}") from failure
        if failure is not None:
            raise failure
        if not 0 <= evaluation.score <= 1:
            raise EvaluatorFailed(f"episode {episode.episode_id}: score {evaluation.score} is not in [0, 1]")
        return evaluation

    # -- leases -------------------------------------------------------------------------------------------------

    async def close(self, episode_id: str) -> None:
        """End an episode and destroy its machine; one that is gone or never was is a success.

        Idempotent. Returns when the machine is gone; once begun it goes on, whoever is cancelled.
        """
        await self._registry.close(episode_id)

    async def keep_alive(self, episode_ids: Sequence[str], lease_ttl_s: float | None) -> list[EpisodeInfo]:
        """Start leases over, with another length if one is given; return those that there are, in that order.

        Raises:
            InvalidRequest: `lease_ttl_s` is out of range; no lease was touched.
        """
        ttl_s = None if lease_ttl_s is None else self._lease_ttl_s(lease_ttl_s)
        episodes = [episode for i in episode_ids if (episode := self._registry.find(i)) is not None]
        for episode in episodes:
            episode.lease.renew(self._clock.monotonic(), ttl_s=ttl_s)
        self._registry.changes.notify()
        return [episode.info(self._clock) for episode in episodes]

    def list_episodes(self) -> list[EpisodeInfo]:
        """Return every episode that holds a lease, oldest first."""
        return [episode.info(self._clock) for episode in self._registry]

    # -- pools --------------------------------------------------------------------------------------------------

    def list_pools(self) -> list[PoolInfo]:
        """Return every pool as it is now, in name order."""
        return [_pool_info(pool) for pool in self._pools.values()]

    async def watch_pools(self) -> AsyncIterator[list[PoolInfo]]:
        """Yield every pool, at once and again on change, until the service is closed; a slow reader skips states."""
        last: list[PoolInfo] | None = None
        while not self._closed:
            changed = self._pool_changes.next
            pools = self.list_pools()
            if pools != last:
                last = pools
                yield pools
            await changed.wait()

    # -- guest access -------------------------------------------------------------------------------------------

    async def read_file(self, episode_id: str, path: str, *, max_bytes: int) -> GuestFile:
        """Read a guest file. Renews the lease.

        Raises:
            EpisodeNotFound, MachineLost: See `observe`.
            AccessDenied: The pool does not allow it.
            NotFound: There is no such file.
            GuestError: It is larger than `max_bytes`, or cannot be read.
        """
        with self._guest_access(episode_id) as desktop:
            data = await desktop.read_file(path, max_bytes=max_bytes)
        if data is None:
            raise NotFound(f"no file {path!r} in the guest of episode {episode_id}")
        return GuestFile(path=path, data=data)

    async def write_file(self, episode_id: str, path: str, data: bytes) -> None:
        """Write a guest file as the session's user. Renews the lease. Raises: as `read_file`."""
        with self._guest_access(episode_id) as desktop:
            await desktop.write_file(path, data)

    async def run_command(
        self, episode_id: str, argv: Sequence[str], *, timeout_s: float, as_root: bool = False, stdin: bytes = b""
    ) -> GuestCommandResult:
        """Run a command in the guest to its end. Renews the lease.

        Raises:
            EpisodeNotFound, MachineLost, AccessDenied: See `read_file`.
            GuestUnresponsive: It did not end within `timeout_s`.
            GuestError: It could not be started.
        """
        with self._guest_access(episode_id) as desktop:
            result = await desktop.run(argv, timeout_s=timeout_s, as_root=as_root, stdin=stdin)
        return GuestCommandResult(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)

    @contextmanager
    def _guest_access(self, episode_id: str) -> Iterator[Desktop]:
        episode = self._registry.get(episode_id)
        if not self._pools[episode.pool].settings.allow_guest_access:
            raise AccessDenied(
                f"pool {episode.pool!r} does not give clients access to its guests; allow_guest_access is off"
            )
        with self._registry.call(episode, renews=True):
            episode.require_machine()
            yield episode.machine.desktop

    # -- details ------------------------------------------------------------------------------------------------

    def _lease_ttl_s(self, requested_s: float | None) -> float:
        limits = self._limits
        if requested_s is None:
            return limits.lease_ttl_s
        if not limits.lease_ttl_min_s <= requested_s <= limits.lease_ttl_max_s:
            raise InvalidRequest(
                "lease_ttl",
                f"{requested_s:g} s is not within [{limits.lease_ttl_min_s:g} s, {limits.lease_ttl_max_s:g} s]",
            )
        return requested_s

    def _max_steps(self, requested: int | None, task: Task) -> int:
        if requested is None:
            return min(task.max_steps, self._limits.max_steps)
        if not 1 <= requested <= self._limits.max_steps:
            raise InvalidRequest("max_steps", f"{requested} is not within [1, {self._limits.max_steps}]")
        return requested

    def _draining_error(self) -> Draining:
        return Draining("the daemon is draining and opens no more episodes; try another host", retry_after_s=1.0)

    def _tell_failure(self, episode: Episode, operation: str, error: Exception) -> None:
        reason = error.reason if isinstance(error, EnvdError) else EnvdError.reason
        self._observer.failure(pool=episode.pool, run=episode.run, operation=operation, reason=reason)


def _pool_info(pool: Pool) -> PoolInfo:
    s = pool.statistics()
    return PoolInfo(
        name=pool.name,
        image=pool.image.name,
        os=pool.image.os.value,
        accelerator=pool.accelerator,
        capacity=pool.capacity,
        idle_count=s.idle_count,
        leased_count=s.leased_count,
        starting_count=s.starting_count,
        dying_count=s.dying_count,
        waiting_count=s.waiting_count,
        memory_bytes=s.memory_bytes,
        healthy=s.healthy,
        problem=s.problem,
    )
