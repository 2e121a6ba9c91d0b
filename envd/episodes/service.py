"""All operations on episodes, independent of the wire protocol.

Always true, because the event loop is atomic between awaits:

* A machine belongs to its pool until its reset or fork is complete, then to one episode until that is closed.
* Calls that change a machine run in a ledger's task, not in the caller's, and one at a time per episode.
* A guest runs only during calls that need it, unless its pool has `always_running`.
* A failure of envd is an error; only the agent's mistakes are part of a result.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from envd.base.aio import Changes
from envd.base.clock import Clock, LoopLag, SystemClock, wait_until
from envd.base.config import LimitsConfig, SettlePolicy
from envd.base.store.store import NullStore, Store
from envd.base.telemetry.metrics import Metrics
from envd.episodes.context import EpisodeContext
from envd.episodes.episode import Episode
from envd.episodes.evaluating import Evaluating
from envd.episodes.events import EpisodeEvents
from envd.episodes.factory import EpisodeFactory
from envd.episodes.guest_access import GuestAccess
from envd.episodes.opening import Opening
from envd.episodes.persistence.journal import Journal
from envd.episodes.persistence.recovery import PersistedState, Recovery
from envd.episodes.registry import EpisodeRegistry
from envd.episodes.resetting import RunCheckers, RunSetup
from envd.episodes.stepping import Stepping
from envd.episodes.types import (
    EpisodeInfo,
    EvaluateResult,
    ForkCommand,
    GroupResult,
    GuestCommandResult,
    GuestFile,
    ResetCommand,
    StepCommand,
    StepResult,
)
from envd.guest.desktop import ScreenView
from envd.guest.observation import EncodedFrame, Observation, ObservationOptions
from envd.hypervisor.machine import Machine
from envd.pool.pool import Pool
from envd.pool.queue_report import QueuedGroup
from envd.pool.status import PoolStatus
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.checkers.evaluate import evaluate as run_task_checkers
from envd.tasks.setup import run_setup as run_task_setup

T = TypeVar("T")


class EpisodeService:
    """Opens, steps, scores and closes episodes on machines of its pools; starts and closes the pools."""

    def __init__(
        self,
        pools: Iterable[Pool],
        *,
        tasks: TaskCatalogue,
        limits: LimitsConfig | None = None,
        metrics: Metrics | None = None,
        run_setup: RunSetup = run_task_setup,
        run_checkers: RunCheckers = run_task_checkers,
        clock: Clock | None = None,
        store: Store | None = None,
        make_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """Set up a service; nothing runs before `start`.

        Args:
            pools: Pools with different names, not yet started.
            tasks: Tasks that `reset` accepts.
            limits: Bounds on episodes.
            metrics: Counts events; by default not exported.
            run_setup: Brings a desktop to a task's start.
            run_checkers: Scores a task.
            clock: Source of time; by default the host's.
            store: Persists episodes and responses, so that they survive the daemon; by default nothing is persisted.
            make_id: Makes the unique part of episode and group ids: at most 32 of [a-z0-9].
        """
        self._pools = {pool.name: pool for pool in sorted(pools, key=lambda pool: pool.name)}
        self._tasks = tasks
        self._limits = limits or LimitsConfig()
        self._metrics = metrics or Metrics()
        self._clock = clock or SystemClock()
        self._journal = Journal(store or NullStore(), clock=self._clock)
        self._registry = EpisodeRegistry(clock=self._clock, metrics=self._metrics, journal=self._journal)
        self._context = EpisodeContext(
            registry=self._registry,
            journal=self._journal,
            pools=self._pools,
            limits=self._limits,
            clock=self._clock,
            metrics=self._metrics,
        )
        self._stepping = Stepping(self._context)
        self._evaluating = Evaluating(self._context, run_checkers=run_checkers)
        self._guest_access = GuestAccess(self._context)
        self._factory = EpisodeFactory(self._registry, journal=self._journal, clock=self._clock, make_id=make_id)
        self._opening = Opening(self._context, self._factory, tasks=tasks, run_setup=run_setup)
        self._pool_changes = Changes()
        for pool in self._pools.values():
            pool.changes.listen(self._pool_changes.notify)
        self._closed = False
        self._close_task: asyncio.Task[None] | None = None

    @property
    def tasks(self) -> TaskCatalogue:
        """Tasks that `reset` accepts."""
        return self._tasks

    @property
    def events(self) -> EpisodeEvents:
        """Reports what happens to its episodes."""
        return self._registry.events

    @property
    def episodes(self) -> Iterator[Episode]:
        """Every episode that holds a lease, oldest first, for those that display or record them."""
        return iter(self._registry)

    def find(self, episode_id: str) -> Episode | None:
        """Return an open episode, or None."""
        return self._registry.find(episode_id)

    @property
    def journal(self) -> Journal:
        """Persists its episodes."""
        return self._journal

    def __repr__(self) -> str:
        state = "closed" if self._closed else "draining" if self._opening.draining else "open"
        return f"<EpisodeService {state}, {len(self._registry)} episodes, {list(self._pools.values())}>"

    # -- lifecycle ----------------------------------------------------------------------------------------------

    async def restore(self, state: PersistedState, machines: Mapping[str, Machine]) -> None:
        """Restore the episodes of a previous daemon. Call before `start`.

        Args:
            state: As returned by `envd.episodes.persistence.recovery.load_persisted`.
            machines: Those of its machines that the hypervisor adopted.
        """
        recovery = Recovery(
            registry=self._registry,
            factory=self._factory,
            journal=self._journal,
            pools=self._pools,
            tasks=self._tasks,
            resets=self._opening.resets,
            clock=self._clock,
        )
        await recovery.restore(state, machines)

    def extend_leases_by(self, lag: LoopLag) -> None:
        """Extend all leases by the delays that `lag` measures. Call before `start`."""
        self._registry.extend_leases_by(lag)

    async def start(self) -> None:
        """Start the pools and the reaper; returns before any machine is ready. Call once."""
        for pool in self._pools.values():
            await pool.start()
        self._registry.start()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new resets, let running episodes finish for at most `timeout_s`, then close the rest."""
        self._opening.draining = True
        for pool in self._pools.values():
            pool.drain()
        deadline_s = self._clock.monotonic() + timeout_s
        while (self._registry.has_unfailed or self._opening.resetting_count) and self._clock.monotonic() < deadline_s:
            await wait_until(self._clock, deadline_s, or_event=self._registry.changes.next)
        await self._opening.resets.close()
        await self._registry.close_all("DRAINED")

    async def aclose(self) -> None:
        """Close all episodes, pools and tasks. Idempotent; continues if the caller is cancelled."""
        if self._close_task is None:
            self._close_task = asyncio.create_task(self._aclose(), name="episodes:close")
        await asyncio.shield(self._close_task)

    async def _aclose(self) -> None:
        await self.drain(0.0)
        await self._opening.aclose()
        for pool in self._pools.values():
            await pool.close()
        await self._registry.aclose()
        self._closed = True
        self._pool_changes.notify()

    # -- reset and fork -----------------------------------------------------------------------------------------

    async def reset(self, command: ResetCommand) -> GroupResult:
        """Open a group of episodes at the start of a task, all or none, all in one state. Idempotent on `request_id`.

        On failure no machine is kept. A cancelled caller leaves the reset running, for a retry to join; its
        episodes then live until their leases expire.

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
        """
        return await self._opening.reset(command)

    async def fork(self, command: ForkCommand) -> GroupResult:
        """Fork an active episode: copies start in its present state, all or none, and it continues.

        Idempotent on `request_id`. On failure no machine is kept, and the parent is unchanged unless its machine or
        guest failed. A cancelled caller leaves the fork running, for a retry to join.

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
        return await self._opening.fork(command)

    # -- step, observe, evaluate --------------------------------------------------------------------------------

    async def step(self, command: StepCommand) -> StepResult:
        """Perform actions in an episode, then observe. Idempotent on `request_id`; one step at a time per episode.

        A cancelled caller leaves the step running, for a retry to join. A failure after the first action started
        voids the episode.

        Raises:
            EpisodeNotFound: No such episode.
            RequestIdReused: The id came before with a different body.
            EpisodeEnded: The episode accepts no more steps.
            StepIndexMismatch: `step_index` is not the next one.
            InvalidRequest: The requested observation is impossible on this screen.
            MachineLost: The machine is gone; the episode is void.
            GuestUnresponsive, GuestError: The guest failed; the episode is void.
        """
        return await self._stepping.step(command)

    async def observe(
        self,
        episode_id: str,
        options: ObservationOptions,
        *,
        refresh: bool = False,
        settle: SettlePolicy | None = None,
    ) -> Observation:
        """Return the agent's present observation. Changes nothing, not even the lease.

        Raises:
            EpisodeNotFound: No such episode.
            InvalidRequest: The requested observation is impossible on this screen.
            MachineLost: The machine is gone; the episode is void.
            GuestUnresponsive, GuestError: A requested part is unavailable; the episode continues.
        """
        return await self._stepping.observe(episode_id, options, refresh=refresh, settle=settle)

    def watch_frames(
        self, episode_id: str, options: ObservationOptions, *, max_rate_hz: float
    ) -> AsyncGenerator[EncodedFrame, None]:
        """Yield an episode's screen at once and on change, until it is closed; a slow reader skips frames.

        Does not renew the lease or resume the guest.

        Raises:
            EpisodeNotFound, InvalidRequest, MachineLost: See `observe`.
        """
        return self._stepping.watch_frames(episode_id, options, max_rate_hz=max_rate_hz)

    def watch_screen(self, episode_id: str, *, max_rate_hz: float) -> AsyncGenerator[ScreenView, None]:
        """Yield an episode's screen and pointer as `watch_frames` does, not encoded.

        Raises:
            EpisodeNotFound, MachineLost: See `observe`.
        """
        return self._stepping.watch_screen(episode_id, max_rate_hz=max_rate_hz)

    async def evaluate(self, episode_id: str, *, request_id: str, fingerprint: bytes) -> EvaluateResult:
        """Score an episode in its machine's present state, and end it if active. The checkers run once.

        Raises:
            EpisodeNotFound: No such episode.
            RequestIdReused: The id came before with a different body.
            EvaluatorFailed: A checker failed; later calls raise it too.
            MachineLost: The machine is gone, and no score was recorded.
        """
        return await self._evaluating.evaluate(episode_id, request_id=request_id, fingerprint=fingerprint)

    # -- leases -------------------------------------------------------------------------------------------------

    async def close(self, episode_id: str) -> None:
        """End an episode and destroy its machine; succeeds if it is closed or unknown.

        Idempotent. Returns when the machine is gone; continues if the caller is cancelled.
        """
        await self._registry.close(episode_id)

    async def keep_alive(self, episode_ids: Sequence[str], lease_ttl_s: float | None) -> list[EpisodeInfo]:
        """Renew leases, with a new length if one is given; return the episodes that are open, in that order.

        Raises:
            InvalidRequest: `lease_ttl_s` is out of range; no lease was renewed.
        """
        ttl_s = None if lease_ttl_s is None else self._limits.lease_ttl_for(lease_ttl_s)
        episodes = [episode for i in episode_ids if (episode := self._registry.find(i)) is not None]
        for episode in episodes:
            episode.lease.renew(self._clock.monotonic(), ttl_s=ttl_s)
            self._journal.save_lease(episode)
        self._registry.changes.notify()
        return [episode.info(self._clock) for episode in episodes]

    def owner_of(self, episode_id: str) -> str | None:
        """Return the owner of an open or closed episode; None if the id is unknown."""
        return self._registry.owner_of(episode_id)

    def list_episodes(self) -> list[EpisodeInfo]:
        """Return every episode that holds a lease, oldest first."""
        return [episode.info(self._clock) for episode in self._registry]

    def machine_ids(self) -> dict[str, str]:
        """Return the machine of every episode that holds a lease, for operators; a FAILED one's is gone."""
        return {episode.episode_id: episode.machine.machine_id for episode in self._registry}

    # -- pools --------------------------------------------------------------------------------------------------

    def list_pools(self) -> list[PoolStatus]:
        """Return every pool's present state, in name order."""
        return [pool.statistics() for pool in self._pools.values()]

    def list_queues(self) -> dict[str, tuple[QueuedGroup, ...]]:
        """Return the queued groups of every pool, in the order of their turns."""
        return {name: pool.queue() for name, pool in self._pools.items()}

    async def watch_pools(self) -> AsyncGenerator[list[PoolStatus], None]:
        """Yield every pool, at once and on change, until the service is closed; a slow reader skips states."""
        last: list[PoolStatus] | None = None
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
            NotFound: No such file.
            GuestError: It is larger than `max_bytes`, or cannot be read.
        """
        return await self._guest_access.read_file(episode_id, path, max_bytes=max_bytes)

    async def write_file(self, episode_id: str, path: str, data: bytes) -> None:
        """Write a guest file as the session's user. Renews the lease. Raises: as `read_file`."""
        await self._guest_access.write_file(episode_id, path, data)

    async def with_guest_service(self, episode_id: str, work: Callable[[str], Coroutine[Any, Any, T]]) -> T:
        """Run work that calls the guest's HTTP service itself, given its URL on the host's loopback. Renews the lease.

        Raises:
            EpisodeNotFound, MachineLost, AccessDenied: See `read_file`.
            GuestError: The image has no such service.
        """
        return await self._guest_access.with_service(episode_id, work)

    async def run_command(
        self, episode_id: str, argv: Sequence[str], *, timeout_s: float, as_root: bool = False, stdin: bytes = b""
    ) -> GuestCommandResult:
        """Run a command in the guest to its end. Renews the lease.

        Raises:
            EpisodeNotFound, MachineLost, AccessDenied: See `read_file`.
            GuestUnresponsive: It did not end within `timeout_s`.
            GuestError: It could not be started.
        """
        return await self._guest_access.run_command(episode_id, argv, timeout_s=timeout_s, as_root=as_root, stdin=stdin)
