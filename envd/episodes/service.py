"""All operations on episodes, independent of the wire protocol.

Always true, because the event loop is atomic between awaits:

* A leased machine belongs to the reset or fork that leased it, then to one episode until that is closed.
* Calls that change a machine run in a ledger's task, not in the caller's, and one at a time per episode.
* A guest runs only during calls that need it, unless its pool has `always_running`.
* A failure of envd is an error; only the agent's mistakes are part of a result.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence

from envd.base.aio import Changes
from envd.base.clock import Clock, LoopLag, wait_until
from envd.base.config import LimitsConfig
from envd.base.store.store import Store
from envd.base.telemetry.metrics import Metrics
from envd.episodes.automatic import AutomaticCheckpointing
from envd.episodes.checkpointing import Checkpointing
from envd.episodes.checkpoints.parking import Parking
from envd.episodes.checkpoints.store import CheckpointStore
from envd.episodes.context import EpisodeContext, draining_error
from envd.episodes.controlling import Controlling
from envd.episodes.episode import Episode
from envd.episodes.evaluating import Evaluating, RunCheckers
from envd.episodes.guest_access import GuestAccess
from envd.episodes.journal import Journal
from envd.episodes.ledger import Ledger
from envd.episodes.members import TaskStates
from envd.episodes.opening import EpisodeOpening
from envd.episodes.progress import EpisodeStatus
from envd.episodes.recovery import PersistedState, recover
from envd.episodes.registry import EpisodeRegistry
from envd.episodes.resetting import RunSetup
from envd.episodes.stepping import Stepping
from envd.hypervisor.machine import Machine
from envd.pool.pool import MachinePool
from envd.pool.queue import QueueEntry
from envd.pool.status import PoolStatus
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.checkers.base import Judge, judge_directly
from envd.tasks.evaluate import evaluate as run_task_checkers
from envd.tasks.setup import run_setup as run_task_setup
from envd.tasks.user_model import UserModel


class EpisodeService:
    """Opens, steps, scores and closes episodes on machines of its pools; starts and closes the pools.

    Its calls are those of its parts, which document them: `EpisodeOpening.reset`, `fork` and `close_opening`;
    `Checkpointing`, with `rollback`; `Stepping.step`, `observe`, `watch_frames` and `watch_screen`;
    `Evaluating.evaluate` and `score`; `GuestAccess.read_file`, `write_file`, `run_command` and `connect_port`;
    `Controlling.take`, `act` and `release`; `EpisodeRegistry.find`, `owner_of` and `close`.
    """

    def __init__(
        self,
        pools: Iterable[MachinePool],
        *,
        tasks: TaskCatalogue,
        limits: LimitsConfig | None = None,
        metrics: Metrics | None = None,
        run_setup: RunSetup = run_task_setup,
        run_checkers: RunCheckers = run_task_checkers,
        clock: Clock | None = None,
        store: Store | None = None,
        checkpoints: CheckpointStore | None = None,
        parked: CheckpointStore | None = None,
        user_model: UserModel | None = None,
        judge: Judge = judge_directly,
        make_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """Set up a service; nothing runs before `start`.

        Args:
            pools: Pools with different names, not yet started.
            store: Persists episodes and responses, so that they survive the daemon; by default nothing is persisted.
            checkpoints: Where checkpoints are stored; None for nowhere.
            parked: Where the states of parked episodes are stored, by this daemon alone; None to park none.
            user_model: Answers for users of tasks that have a persona; None for none.
            judge: Matches questions of agents with the facts that other users know; a daemon passes `JudgeWorkers`.
            make_id: Makes the unique part of episode and group ids: at most 32 of [a-z0-9].
        """
        self._pools = {pool.name: pool for pool in sorted(pools, key=lambda pool: pool.name)}
        self.tasks = tasks
        """Tasks that `reset` accepts."""
        self.limits = limits or LimitsConfig()
        """Bounds of its episodes."""
        self._metrics = metrics or Metrics()
        self._clock = clock or Clock()
        self.journal = Journal(store or Store(), clock=self._clock)
        """Persists its episodes."""
        self._registry = EpisodeRegistry(clock=self._clock, metrics=self._metrics, journal=self.journal)
        self.events = self._registry.events
        """Reports what happens to its episodes."""
        self._requests = Ledger(
            clock=self._clock,
            abandoned=draining_error,
            on_dropped=self.journal.forget_answer,
            close_group=self._registry.close_group,
        )
        self._parking = Parking(
            self._registry, parked, pools=self._pools, journal=self.journal, clock=self._clock, metrics=self._metrics
        )
        self._context = context = EpisodeContext(
            registry=self._registry,
            parking=self._parking,
            journal=self.journal,
            tasks=tasks,
            states=TaskStates(),
            pools=self._pools,
            limits=self.limits,
            clock=self._clock,
            metrics=self._metrics,
            make_id=make_id,
            requests=self._requests,
            user_model=user_model,
            judge=judge,
        )
        self._controlling = Controlling(context)
        self.checkpoints = Checkpointing(context, checkpoints, self._controlling)
        """Creates, lists and deletes checkpoints."""
        self._automatic = AutomaticCheckpointing(context, self.checkpoints)
        self._opening = EpisodeOpening(
            context, run_setup=run_setup, checkpoints=self.checkpoints, automatic=self._automatic
        )
        stepping, guest_access = Stepping(context, self._automatic), GuestAccess(context)
        self.rollback = self.checkpoints.rollback
        self.reset, self.fork = self._opening.reset, self._opening.fork
        self.close_opening = self._opening.close_opening
        self.step, self.observe = stepping.step, stepping.observe
        self.watch_frames, self.watch_screen = stepping.watch_frames, stepping.watch_screen
        self._evaluating = Evaluating(context, self._opening, self.checkpoints, self._automatic, run_checkers)
        self.evaluate, self.score = self._evaluating.evaluate, self._evaluating.score
        self.read_file, self.write_file = guest_access.read_file, guest_access.write_file
        self.run_command, self.connect_port = guest_access.run_command, guest_access.connect_port
        self.take_control, self.act = self._controlling.take, self._controlling.act
        self.release_control = self._controlling.release
        self.find, self.owner_of, self.close = self._registry.find, self._registry.owner_of, self._registry.close
        self._pool_changes = Changes()
        for pool in self._pools.values():
            pool.changes.listen(self._pool_changes.notify)
        self._closed = False
        self._close_task: asyncio.Task[None] | None = None

    @property
    def episodes(self) -> Iterator[Episode]:
        """Every episode that holds a lease, oldest first, for those that display or record them."""
        return iter(self._registry)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "draining" if self._opening.draining else "open"
        return f"<EpisodeService {state}, {len(self._registry)} episodes, {list(self._pools.values())}>"

    # -- lifecycle ----------------------------------------------------------------------------------------------

    async def recover(self, state: PersistedState, machines: Mapping[str, Machine]) -> None:
        """Recover the episodes of a previous daemon. Call before `start`."""
        await recover(state, machines, context=self._context)

    def extend_leases_by(self, lag: LoopLag) -> None:
        """Extend all leases by the delays that `lag` measures. Call before `start`."""
        self._registry.extend_leases_by(lag)

    async def start(self) -> None:
        """Start the pools and the reaper; returns before any machine is idle. Call once."""
        for pool in self._pools.values():
            await pool.start()
        self._registry.start()
        self._parking.start()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new resets, let running episodes finish for at most `timeout_s`, then close the rest."""
        self._opening.draining = True
        for pool in self._pools.values():
            pool.drain()
        deadline_s = self._clock.monotonic() + timeout_s
        while (self._registry.has_unfailed or self._opening.resetting_count) and self._clock.monotonic() < deadline_s:
            await wait_until(self._clock, deadline_s, or_event=self._registry.changes.next)
        await self._requests.close()
        for pool in self._pools.values():
            pool.drain(is_over=True)
        await self._registry.close_all("DRAINED")

    async def aclose(self) -> None:
        """Close all episodes, pools and tasks. Idempotent; continues if the caller is cancelled."""
        if self._close_task is None:
            self._close_task = asyncio.create_task(self._aclose(), name="episodes:close")
        await asyncio.shield(self._close_task)

    async def _aclose(self) -> None:
        await self.drain(0.0)
        await self._controlling.aclose()
        await self._automatic.aclose()
        await self._context.states.aclose()
        await self._parking.aclose()
        for pool in self._pools.values():
            await pool.close()
        await self._registry.aclose()
        self._closed = True
        self._pool_changes.notify()

    # -- episodes -----------------------------------------------------------------------------------------------

    async def keep_alive(self, episode_ids: Sequence[str], lease_ttl_s: float | None) -> list[EpisodeStatus]:
        """Renew leases, with a new length if one is given; return the episodes that are open, in that order.

        Raises:
            InvalidRequest: `lease_ttl_s` is out of range; no lease was renewed.
        """
        ttl_s = None if lease_ttl_s is None else self.limits.lease_ttl_for(lease_ttl_s)
        episodes = [episode for i in episode_ids if (episode := self._registry.find(i)) is not None]
        for episode in episodes:
            episode.lease.renew(self._clock.monotonic(), ttl_s=ttl_s)
            self.journal.save_lease(episode)
        self._registry.changes.notify()
        return [episode.info(self._clock) for episode in episodes]

    def get_episode(self, episode_id: str) -> EpisodeStatus:
        """Return an episode that holds a lease. Raises: EpisodeNotFound."""
        return self._registry.get(episode_id).info(self._clock)

    def list_episodes(self) -> list[EpisodeStatus]:
        """Return every episode that holds a lease, oldest first."""
        return [episode.info(self._clock) for episode in self._registry]

    def machine_ids(self) -> dict[str, str]:
        """Return the machine of every episode that holds a lease, for operators; a FAILED one's is gone."""
        return {episode.episode_id: episode.machine.machine_id for episode in self._registry}

    # -- pools --------------------------------------------------------------------------------------------------

    def list_pools(self) -> list[PoolStatus]:
        """Return every pool's present state, in name order."""
        return [pool.statistics() for pool in self._pools.values()]

    def list_queues(self) -> dict[str, tuple[QueueEntry, ...]]:
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
