"""Park idle episodes: store the state of their machines, release the machines, and fork new ones for the next calls.

A parked episode is a checkpoint that only its episode uses, in a store of its own. So what holds for checkpoints and
rollbacks holds here, and the epoch stays the same, because the episode continues where it was.

Always true, whenever the daemon dies: the database names the machine or the stored state, and the one that it names is
complete. A state is deleted only after the database names a machine, and a guest runs only after that.

No deadlock: a call that waits for a machine holds none. It waits for the end of calls, each of which has a limit, and
an episode without a call can be parked. `Fork` is the one call that has a machine and waits for others; its wait has a
deadline.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Final

from envd.base.aio import Changes, OwnedTasks, race, shielded
from envd.base.clock import Clock, wait_until
from envd.base.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointStoreFull,
    CheckpointUnusable,
    EnvdError,
    EpisodeNotFound,
    HypervisorError,
    MachineLost,
    PoolExhausted,
    PoolFailing,
    StoreError,
)
from envd.base.telemetry.metrics import Metrics
from envd.base.telemetry.traces import Stopwatch
from envd.desktop.display_connection import DesktopView
from envd.episodes.checkpoints.manifest import Manifest
from envd.episodes.checkpoints.states import describe_state, read_state, write_state
from envd.episodes.checkpoints.store import CheckpointStore, in_thread
from envd.episodes.checkpoints.views import read_view
from envd.episodes.episode import Episode
from envd.episodes.journal import Journal
from envd.episodes.progress import EpisodeOrigin, EpisodeSpec, EpisodeState, Progress
from envd.episodes.registry import EpisodeRegistry
from envd.pool.leased import FrozenDesktop, LeasedMachine, Reservation, lost_machine, parked_machine
from envd.pool.pool import MachinePool
from envd.pool.queue import GRACE_S, has_caller

logger = logging.getLogger(__name__)

#: Ids of parked states begin with it: the database names one where it otherwise names a machine.
_PREFIX: Final = "parked-"
#: An episode without a call for so long may be parked; at once if a call of another or an impatient group waits.
_MIN_IDLE_S: Final = 1.0
#: How often to look for idle episodes while machines are needed.
_POLL_S: Final = 0.1
#: After such a wait of others, an episode is parked between two calls, and even if its own call comes meanwhile.
_PATIENCE_S: Final = 2.0
#: Longest wait of a call for a machine.
_WAIT_S: Final = 60.0
#: Longest wait of a call for groups that were queued before it: they may wait for much longer.
_MAX_YIELD_S: Final = 10.0
#: States that are written at once. Each holds a copy of its machine's state in memory.
_WRITING_COUNT: Final = 4
#: States of a pool that are loaded at once. Each is held in memory too.
_LOADING_COUNT: Final = 4
#: Pause of a pool after a state could not be stored, such as on a full disk.
_FAILED_S: Final = 10.0
#: Until a machine that could not be copied is tried again.
_REFUSED_S: Final = 60.0
#: A parked state lives as long as its episode.
_TTL = timedelta(days=3650)


@dataclass(eq=False)
class _Line:
    """The calls of one pool that wait for a machine, and the episodes that are being parked for them."""

    pool: MachinePool
    waiting_since_s: list[float] = field(default_factory=list)
    """When each of them came, oldest first."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the first of them; the others wait in order of arrival."""
    parking: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    """Attempts by episode, until the episode is parked or the attempt has ended."""
    changes: Changes = field(default_factory=Changes)
    """Notified when the pool changes, a call waits, or an attempt has ended."""
    loading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LOADING_COUNT))
    """Bounds the states that are loaded at once."""
    paused_until_s: float = 0.0
    """No episode is parked before, because one could not be stored."""

    @property
    def waiting_count(self) -> int:
        return len(self.waiting_since_s)

    def has_waited_since(self, time_s: float) -> bool:
        """Return whether a call, or a group that only lacks machines, waits since before."""
        return any(since_s < time_s for since_s in self.waiting_since_s[:1]) or self.pool.is_queued_before(time_s)


class Parking:
    """Parks episodes, and brings them back for their calls."""

    def __init__(
        self,
        registry: EpisodeRegistry,
        store: CheckpointStore | None,
        *,
        pools: Mapping[str, MachinePool],
        journal: Journal,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """Set up; nothing is parked before `start`, or without a store."""
        self._registry = registry
        self._store = store
        self._journal = journal
        self._clock = clock
        self._metrics = metrics
        self._lines = {name: _Line(pool) for name, pool in pools.items() if store and pool.settings.parks}
        self._tasks = OwnedTasks()
        self._writing = asyncio.Semaphore(_WRITING_COUNT)
        self._resuming: dict[str, asyncio.Task[EnvdError | None]] = {}
        """Attempts by episode."""
        self._callers: dict[str, list[Callable[[], bool]]] = {}
        """The calls of each attempt: whether their callers still wait."""
        self._kept: dict[str, Manifest] = {}
        """The stored state of each parked episode."""
        self._unowned: dict[str, Manifest] = {}
        """Stored states of episodes that are being opened or recovered, by the id of their stand-in."""
        self._patient = Counter[str]()
        """Calls that wait until their episode is parked, by episode."""
        self._refused_until_s = dict[str, float]()
        """Monotonic times before which episodes are not tried again, because their machines could not be copied."""

    def start(self) -> None:
        """Start to park episodes in pools that park."""
        if self._lines:
            self._tasks.spawn(self._run(), name="parking")

    async def aclose(self) -> None:
        """End all tasks. The stored states of open episodes stay, for the next daemon."""
        await self._tasks.cancel()

    def _is_parked(self, episode: Episode) -> bool:
        return episode.episode_id in self._kept

    # -- back to a machine ------------------------------------------------------------------------------------------

    async def resume(self, episode: Episode) -> None:
        """Return once an episode has its machine, in memory. Call it in `EpisodeRegistry.call`, which keeps it there.

        Raises:
            PoolExhausted: All machines were in calls for a minute. The episode is still parked; retry.
            PoolFailing: No machine could be started. The episode is still parked; retry.
            MachineLost: Its state cannot be read. The episode is void.
        """
        line = self._lines.get(episode.spec.pool)
        if line is None:
            return
        if (parking := line.parking.get(episode.episode_id)) is not None:
            await self._end_parking(line, episode, parking)
        if not self._is_parked(episode):
            return
        resuming = self._resuming.get(episode.episode_id)
        if resuming is None:
            self._callers[episode.episode_id] = []
            resuming = self._tasks.spawn(self._try_to_resume(line, episode), name=f"resume:{episode.episode_id}")
            self._resuming[episode.episode_id] = resuming
        callers, caller = self._callers[episode.episode_id], has_caller.get()
        callers.append(caller)
        try:
            # Of this caller alone: others may wait for the same machine.
            error = await asyncio.shield(resuming)
        finally:
            callers.remove(caller)
        if error is not None:
            raise error

    async def _end_parking(self, line: _Line, episode: Episode, parking: "asyncio.Task[None]") -> None:
        """End an attempt for a call of its episode: at once, or when it is parked if others have waited for long.

        Otherwise an episode that is never idle for as long as parking takes would keep its machine from all others.
        """
        if not line.has_waited_since(self._clock.monotonic() - _PATIENCE_S):
            parking.cancel()
        self._patient[episode.episode_id] += 1
        try:
            await asyncio.wait({parking})
        finally:
            self._patient[episode.episode_id] -= 1
            if not self._patient[episode.episode_id]:
                del self._patient[episode.episode_id]

    def call_ended(self, episode: Episode) -> None:
        """Note that an episode may be idle now."""
        line = self._lines.get(episode.spec.pool)
        if line is not None and self._takes_turns(line):
            line.changes.notify()

    async def _try_to_resume(self, line: _Line, episode: Episode) -> EnvdError | None:
        """Return the error, for each call that waits."""
        try:
            await self._resume(line, episode)
        except EnvdError as error:
            return error
        finally:
            del self._resuming[episode.episode_id], self._callers[episode.episode_id]
        return None

    async def _resume(self, line: _Line, episode: Episode) -> None:
        pool, stored, stand_in = line.pool, self._kept[episode.episode_id], episode.machine
        watch = Stopwatch(self._clock)
        try:
            async with AsyncExitStack() as held:
                with self._waiting(line, episode) as deadline_s:
                    async with line.lock:
                        await held.enter_async_context(line.loading)
                        reservation = await self._reserve(line, episode, deadline_s=deadline_s)
                watch = Stopwatch(self._clock)
                async with pool.releasing_on_failure([reservation]):
                    frozen = await read_state(stored, pool, self._the_store, clock=self._clock, shares_files=True)
                    try:
                        machine = await pool.fork(reservation, frozen)
                    finally:
                        await shielded(frozen.snapshot.discard())
                    await self._move(episode, machine)
        except (CheckpointCorrupt, CheckpointUnusable, CheckpointNotFound) as error:
            lost = MachineLost(f"episode {episode.episode_id}: its parked state cannot be used: {error}")
            self._registry.void(episode, lost)
            # An episode that has a score stays open with it.
            episode.machine = lost_machine(pool.spec_of(stand_in.machine_id), reason=str(error))
            stand_in.machine.lost.set()
            self._forget(episode, stored)
            raise lost from error
        except (MachineLost, HypervisorError) as error:
            raise PoolFailing(
                f"episode {episode.episode_id}: no machine started for it: {error}; it is still parked, retry with the"
                " same request_id",
                retry_after_s=1.0,
            ) from error
        self._forget(episode, stored)
        stand_in.machine.lost.set()  # wakes those that watch it
        self._moved(pool, "machine", watch)

    @contextmanager
    def _waiting(self, line: _Line, episode: Episode) -> Iterator[float]:
        """Count a call that waits for a machine; yields its deadline. Raises: PoolExhausted: too many wait."""
        if line.waiting_count >= line.pool.settings.queue_limit:
            raise self._exhausted(episode, line.pool, f"{line.waiting_count} calls wait already")
        now_s = self._clock.monotonic()
        line.waiting_since_s.append(now_s)
        line.changes.notify()
        try:
            yield now_s + _WAIT_S
        finally:
            line.waiting_since_s.remove(now_s)

    async def _reserve(self, line: _Line, episode: Episode, *, deadline_s: float) -> Reservation:
        """Wait until a machine can be had, and reserve it.

        Raises:
            PoolExhausted: Not until the deadline, or its callers have been gone for 10 s.
            EpisodeNotFound: It was closed. Those behind it in the line come at once.
        """
        pool, callers = line.pool, self._callers[episode.episode_id]
        since_s = seen_s = deadline_s - _WAIT_S
        yield_s = since_s + _MAX_YIELD_S
        while True:
            if episode.closed.is_set():
                raise self._registry.not_found(episode.episode_id)
            now_s = self._clock.monotonic()
            # Groups that were queued before its call are admitted first: else steps that take every machine would keep
            # them waiting without end.
            has_turn = now_s >= yield_s or not pool.is_queued_before(since_s)
            if has_turn and (reservation := pool.reserve_for_parked(run=episode.spec.run)) is not None:
                return reservation
            # The pool changes too when a parked episode is closed.
            changed = pool.changes.next
            if now_s >= deadline_s:
                raise self._exhausted(episode, pool, f"all machines were in calls for {_WAIT_S:g} s")
            if any(is_waiting() for is_waiting in callers):
                seen_s = now_s
            elif now_s >= seen_s + GRACE_S:
                raise self._exhausted(episode, pool, f"its caller has been gone for {GRACE_S:g} s")
            until_s = min(seen_s + GRACE_S, yield_s if now_s < yield_s else deadline_s)
            await wait_until(self._clock, until_s, or_event=changed)

    def _exhausted(self, episode: Episode, pool: MachinePool, why: str) -> PoolExhausted:
        return PoolExhausted(
            f"episode {episode.episode_id}: parked, and pool {pool.name!r} has no machine for it: {why}; retry with the"
            " same request_id, or raise the pool's resident",
            retry_after_s=1.0,
        )

    async def _move(self, episode: Episode, machine: LeasedMachine) -> None:
        """Give an episode another machine, or its stand-in, and persist that. On failure nothing has changed.

        Raises:
            EpisodeNotFound: It was closed meanwhile.
            StoreError: The database could not be written.
        """
        if episode.closed.is_set():
            raise self._registry.not_found(episode.episode_id)
        before, episode.machine = episode.machine, machine
        try:
            await shielded(self._journal.moved(episode))
        except StoreError:
            if episode.machine is machine:
                episode.machine = before
            raise

    # -- away from a machine ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        await self._sweep()
        for line in self._lines.values():
            line.pool.changes.listen(line.changes.notify)
            self._tasks.spawn(self._park_for(line), name=f"pool:{line.pool.name}:parking")

    async def _park_for(self, line: _Line) -> None:
        """Park the episodes of a pool that have been idle for longest, while others need their machines."""
        while True:
            changed = line.changes.next
            await wait_until(self._clock, self._park_idle(line), or_event=changed)

    def _park_idle(self, line: _Line) -> float | None:
        """Start to park as many episodes as needed; return when to look again, None for the next change."""
        now_s = self._clock.monotonic()
        missing = line.pool.missing_for(line.waiting_count) - len(line.parking)
        if missing <= 0:
            return None
        if now_s < line.paused_until_s:
            return line.paused_until_s
        for episode in sorted(self._candidates(line), key=lambda episode: episode.lease.idle_since_s):
            if missing <= 0 or len(line.parking) >= _WRITING_COUNT:
                return None
            task = self._tasks.spawn(self._park(line, episode), name=f"park:{episode.episode_id}")
            line.parking[episode.episode_id] = task
            # A task that is cancelled before it starts, as by a call that comes at once, runs no `finally`.
            task.add_done_callback(partial(_attempt_ended, line, episode.episode_id))
            missing -= 1
        return now_s + _POLL_S

    def _takes_turns(self, line: _Line) -> bool:
        """Return whether an episode may be parked as soon as its call ends.

        Otherwise new episodes would wait for the end of those whose agents make one call after the other.
        """
        return line.waiting_count > 0 or line.has_waited_since(self._clock.monotonic() - _PATIENCE_S)

    def _candidates(self, line: _Line) -> Iterable[Episode]:
        """Yield the episodes of a pool that can be parked now."""
        now_s = self._clock.monotonic()
        min_idle_s = 0.0 if self._takes_turns(line) else _MIN_IDLE_S
        for episode in self._registry:
            if (
                episode.spec.pool == line.pool.name
                and episode.episode_id not in line.parking
                and self._refused_until_s.get(episode.episode_id, 0.0) <= now_s
                and (episode.lease.expects_idle or episode.lease.idle_since_s <= now_s - min_idle_s)
                and not episode.lease.in_call
                and self._can_leave(episode)
            ):
                yield episode

    def _can_leave(self, episode: Episode) -> bool:
        """Return whether nothing uses an episode's machine, and it still has one."""
        return not (
            self._is_parked(episode)
            or episode.lease.call_count > self._patient[episode.episode_id]
            or episode.lock.locked()
            or episode.machine.in_use
            or episode.human.control_id
            or episode.closed.is_set()
            or episode.machine.lost.is_set()
            or episode.progress.guest_end_cause
            or episode.progress.state is EpisodeState.FAILED
        )

    async def _park(self, line: _Line, episode: Episode) -> None:
        """Park an episode; see `_end_parking` for a call that comes first."""
        pool, machine, watch = line.pool, episode.machine, Stopwatch(self._clock)
        checkpoint_id = _new_id()
        try:
            async with self._writing:
                frozen = await pool.freeze(machine)
                try:
                    described = describe_state(
                        episode.spec,
                        episode.progress,
                        frozen,
                        checkpoint_id=checkpoint_id,
                        create_time=self._clock.now(),
                        ttl=_TTL,
                        pinned=True,
                    )
                    stored = await write_state(described, frozen, pool, self._the_store, shares_files=True)
                    # While the machine lives, which has links to the files that it shares.
                    written_bytes = await in_thread(self._the_store.unshared_bytes, stored)
                    self._metrics.parking_bytes.labels(pool=pool.name).inc(written_bytes)
                finally:
                    await shielded(frozen.snapshot.discard())
            # Without an await until the episode has its stand-in, or a call could come between.
            if episode.machine is not machine or not self._can_leave(episode):
                self._delete_soon(checkpoint_id)
                return
            await shielded(self._leave(episode, machine, stored, frozen.view))
            self._moved(pool, "disk", watch)
        except asyncio.CancelledError:
            if not self._is_parked(episode):
                self._delete_soon(checkpoint_id)
            raise
        except (MachineLost, EpisodeNotFound):
            pass  # it ends, or was closed
        except EnvdError as error:
            self._failed(line, episode, error)

    async def _leave(self, episode: Episode, machine: LeasedMachine, stored: Manifest, view: DesktopView) -> None:
        """Give an episode the stand-in for its machine, which is destroyed. Raises: EnvdError: nothing has changed."""
        pool = self._lines[episode.spec.pool].pool
        stand_in = parked_machine(pool.spec_of(_PREFIX + stored.checkpoint_id), view)
        self._kept[episode.episode_id] = stored
        try:
            await self._move(episode, stand_in)
        except EnvdError:
            self._forget(episode, stored)
            raise
        self._keep(episode, stored)
        await pool.release([machine])
        logger.info("episode %s: parked, %.1f MiB", episode.episode_id, stored.size_bytes / (1 << 20))

    def _failed(self, line: _Line, episode: Episode, error: EnvdError) -> None:
        self._metrics.episode_failed(pool=line.pool.name, operation="park", reason=error.reason)
        now_s = self._clock.monotonic()
        if isinstance(error, StoreError | CheckpointStoreFull):
            line.paused_until_s = now_s + _FAILED_S
            what = f"pool {line.pool.name} parks no episode for {_FAILED_S:g} s"
        else:
            # Of this machine: the others are parked meanwhile.
            is_open = {each: until_s for each, until_s in self._refused_until_s.items() if until_s > now_s}
            self._refused_until_s = {**is_open, episode.episode_id: now_s + _REFUSED_S}
            what = f"it stays in memory for {_REFUSED_S:g} s"
        logger.warning("episode %s: not parked: %s; %s", episode.episode_id, error, what)

    # -- across daemons ---------------------------------------------------------------------------------------------

    async def find(self, machine_id: str, pool: MachinePool) -> LeasedMachine | None:
        """Return the stand-in of the state that a previous daemon persisted as an episode's machine, for `keep`.

        None if the id is a machine's. Raises: CheckpointNotFound, CheckpointCorrupt, CheckpointUnusable, StoreError.
        """
        if not is_parked(machine_id) or self._store is None:
            return None
        checkpoint_id = machine_id.removeprefix(_PREFIX)
        stored = await in_thread(self._store.find, checkpoint_id)
        view = await in_thread(read_view, self._store.path(checkpoint_id), checkpoint_id)
        self._unowned[machine_id] = stored
        return parked_machine(pool.spec_of(machine_id), view)

    async def park_copies(
        self, pool: MachinePool, frozen: FrozenDesktop, *, count: int, run: str, owner: str
    ) -> Sequence[LeasedMachine]:
        """Store copies of a state; return the stand-ins of episodes that begin parked, for `keep`.

        On failure and on cancellation nothing is stored. Raises: CheckpointStoreFull, StoreError, HypervisorError.
        """
        now = self._clock.now()
        spec = EpisodeSpec(
            # The states are of no episode yet, and are never listed.
            episode_id="",
            group_id="",
            task_id="",
            task_digest="",
            pool=pool.name,
            run=run,
            owner=owner,
            max_steps=1,
            settle=pool.settings.settle,
            origin=EpisodeOrigin(
                template_digest=frozen.snapshot.digest,
                overlay_parent=frozen.snapshot.disk_digest,
                first_frame_id=frozen.view.frame.frame_id,
            ),
            create_time=now,
        )
        copies: dict[str, Manifest] = {}
        try:
            for _ in range(count):
                described = describe_state(
                    spec, Progress(), frozen, checkpoint_id=_new_id(), create_time=now, ttl=_TTL, pinned=True
                )
                copies[_PREFIX + described.checkpoint_id] = described
                async with self._writing:
                    copies[_PREFIX + described.checkpoint_id] = await write_state(
                        described, frozen, pool, self._the_store
                    )
        except BaseException:
            for described in copies.values():
                self._delete_soon(described.checkpoint_id)
            raise
        self._unowned |= copies
        return [parked_machine(pool.spec_of(machine_id), frozen.view) for machine_id in copies]

    def keep(self, episode: Episode) -> None:
        """Own the stored state of an episode that has a stand-in, and delete it when the episode is closed."""
        stored = self._unowned.pop(episode.machine.machine_id, None)
        if stored is not None:
            self._keep(episode, stored)

    def _keep(self, episode: Episode, stored: Manifest) -> None:
        self._kept[episode.episode_id] = stored
        self._report(episode.spec.pool)
        self._tasks.spawn(self._watch(episode, stored), name=f"parked:{episode.episode_id}:watch")

    async def _watch(self, episode: Episode, stored: Manifest) -> None:
        await race(episode.closed, episode.machine.lost)
        if self._kept.get(episode.episode_id) is stored:
            self._forget(episode, stored)

    async def _sweep(self) -> None:
        """Delete the states of no episode, which killed daemons left."""
        kept = {stored.checkpoint_id for stored in self._kept.values()}
        try:
            await in_thread(self._the_store.keep_only, kept)
        except (OSError, StoreError) as error:
            logger.warning("parked episodes: the states of earlier daemons are not removed: %s", error)

    def _forget(self, episode: Episode, stored: Manifest) -> None:
        if self._kept.pop(episode.episode_id, None) is None:
            return  # closed meanwhile
        self._report(episode.spec.pool)
        self._delete_soon(stored.checkpoint_id)

    def _delete_soon(self, checkpoint_id: str) -> None:
        async def delete() -> None:
            with suppress(StoreError):  # the next start removes it
                await in_thread(self._the_store.delete, checkpoint_id)

        self._tasks.spawn(delete(), name=f"parked:{checkpoint_id}:delete")

    def _report(self, pool: str) -> None:
        sizes_bytes = [
            stored.size_bytes
            for episode_id, stored in self._kept.items()
            if (episode := self._registry.find(episode_id)) is not None and episode.spec.pool == pool
        ]
        self._lines[pool].pool.set_parked(len(sizes_bytes), size_bytes=sum(sizes_bytes))

    def _moved(self, pool: MachinePool, to: str, watch: Stopwatch) -> None:
        self._metrics.parking.labels(pool=pool.name, to=to).observe(watch.total_ms / 1000)

    @property
    def _the_store(self) -> CheckpointStore:
        if self._store is None:
            raise RuntimeError("nothing is parked without a store")
        return self._store


def _attempt_ended(line: _Line, episode_id: str, _: "asyncio.Task[None]") -> None:
    del line.parking[episode_id]
    line.changes.notify()


def is_parked(machine_id: str) -> bool:
    """Return whether the id of an episode's machine is that of a stand-in."""
    return machine_id.startswith(_PREFIX)


def surplus_of(pool: MachinePool, group_size: int) -> int:
    """Return how many members of a group have to begin parked, because the pool never has so many machines."""
    return max(0, group_size - pool.settings.resident) if pool.settings.parks else 0


def _new_id() -> str:
    return f"ckpt-{secrets.token_hex(8)}"
