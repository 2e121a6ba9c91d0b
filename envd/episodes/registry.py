"""The open episodes, and how they end: closed, expired, or void because their machine failed.

Who caused a failure is found from the evidence of the machine (`find_loss`).
A closed episode leaves the registry at once; then its calls are cancelled and its machine is destroyed.
A FAILED episode loses its machine at once and stays until it is closed or its lease expires, so that calls report why.
"""

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from envd.base.aio import Changes, OwnedTasks, race
from envd.base.clock import Clock, LoopLag, wait_until
from envd.base.errors import (
    DisplayError,
    EnvdError,
    EpisodeEnded,
    EpisodeNotFound,
    EvaluatorFailed,
    GroupTooLarge,
    GuestEnded,
    GuestError,
    GuestUnresponsive,
    HypervisorError,
    HypervisorUnavailable,
    LossUndecided,
    MachineLost,
    TokenQuotaReached,
    unknown_episode,
)
from envd.base.losses import ENDS_MACHINE, Loss, LossOwner
from envd.base.telemetry.metrics import Metrics
from envd.episodes.episode import Episode
from envd.episodes.events import EpisodeEvents
from envd.episodes.journal import Journal
from envd.episodes.progress import EpisodeState
from envd.episodes.types import OpenedGroup
from envd.pool.leased import LeasedMachine
from envd.pool.pool import MachinePool

logger = logging.getLogger(__name__)

#: Shorter delays of the event loop do not extend leases.
_MIN_LAG_S = 0.05
#: Shorter delays are not logged, and extended leases not persisted: a busy host has many.
_MIN_STALL_S = 1.0

#: When a caller at its limit of machines may try again. An estimate: when it closes an episode of its own is unknown.
_RETRY_AFTER_S = 5.0

#: How many closed episodes are remembered, for the error of later calls.
_CLOSED_COUNT = 4096

#: Error text for calls to a closed episode, by the reason for closing it.
_CLOSED_TEXTS = {
    "CLOSED": "closed",
    "LEASE_EXPIRED": "closed because its lease expired",
    "DRAINED": "closed because the daemon is stopping",
}


class EpisodeRegistry:
    """The episodes that hold a lease."""

    def __init__(self, *, clock: Clock, metrics: Metrics, journal: Journal) -> None:
        """Create an empty registry; leases expire only after `start`."""
        self._clock = clock
        self._journal = journal
        self._metrics = metrics
        self._episodes: dict[str, Episode] = {}
        self._pools: dict[str, MachinePool] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}
        self._closed: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Why an episode is not open, and its owner."""
        self._opening_counts: Counter[str] = Counter()
        """Machines that are being opened, by owner."""
        self._tasks = OwnedTasks()
        self._next_reap_s = math.inf
        self._measure_lag: Callable[[], None] = lambda: None
        self.events = EpisodeEvents()
        """Reports what happens to the episodes."""
        self.changes = Changes()
        """Notified when an episode is added or removed, or its lease may expire sooner."""

    def __len__(self) -> int:
        return len(self._episodes)

    def __iter__(self) -> Iterator[Episode]:
        return iter(list(self._episodes.values()))

    @property
    def has_unfailed(self) -> bool:
        """Whether an episode is left that its client can still use; a FAILED one only reports why it failed."""
        return any(episode.progress.state is not EpisodeState.FAILED for episode in self._episodes.values())

    def extend_leases_by(self, lag: LoopLag) -> None:
        """Extend all leases by the delays that `lag` measures: `KeepAlive` calls waited too."""
        lag.listen(self._extend_leases)
        self._measure_lag = lag.measure

    def start(self) -> None:
        """Start closing episodes whose lease has expired."""
        self._tasks.spawn(self._reap(), name="episodes:reaper")

    async def aclose(self) -> None:
        """Close all episodes and end every task."""
        await self.close_all("DRAINED")
        await self._tasks.cancel()

    def add(self, episode: Episode, pool: MachinePool) -> None:
        """Add a new episode; from now on the registry releases its machine."""
        self._episodes[episode.episode_id] = episode
        self._pools[episode.episode_id] = pool
        self._tasks.spawn(self._watch(episode), name=f"episode:{episode.episode_id}:watch")
        self.events.opened(episode)
        self.changes.notify()

    def find(self, episode_id: str) -> Episode | None:
        return self._episodes.get(episode_id)

    def get(self, episode_id: str) -> Episode:
        """Return an open episode. Raises: EpisodeNotFound."""
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise self.not_found(episode_id)
        return episode

    def remember_closed(self, episode_id: str, text: str, *, owner: str) -> None:
        """Remember why an episode is not, or no longer, open; the oldest entries are dropped."""
        self._closed[episode_id] = (text, owner)
        while len(self._closed) > _CLOSED_COUNT:
            self._closed.popitem(last=False)

    def not_found(self, episode_id: str) -> EpisodeNotFound:
        """Return the error that says why the episode is not open."""
        closed = self._closed.get(episode_id)
        if closed is None:
            return unknown_episode(episode_id)
        return EpisodeNotFound(f"episode {episode_id}: {closed[0]}; reset a new one")

    def owner_of(self, episode_id: str) -> str | None:
        """Return the owner of an open or closed episode; None if the id is unknown."""
        if (episode := self._episodes.get(episode_id)) is not None:
            return episode.spec.owner
        closed = self._closed.get(episode_id)
        return None if closed is None else closed[1]

    def machine_count(self, owner: str) -> int:
        """Return how many machines an owner's episodes hold: one each, except those that lost theirs."""
        return sum(
            e.spec.owner == owner
            and e.progress.state is not EpisodeState.FAILED
            and e.progress.guest_end_cause not in ENDS_MACHINE
            for e in self._episodes.values()
        )

    @contextmanager
    def opening(self, owner: str, count: int, *, max_machines: int | None) -> Iterator[None]:
        """Count `count` machines as being opened for `owner` during the block.

        Afterwards its episodes hold them, or they are released.

        `max_machines` limits those of its episodes and those being opened for it, over all pools.

        Raises:
            GroupTooLarge: `count` alone exceeds the limit.
            TokenQuotaReached: `count` and the machines held now exceed the limit.
        """
        if max_machines is not None:
            held = self.machine_count(owner) + self._opening_counts[owner]
            if count > max_machines:
                raise GroupTooLarge(
                    f"token {owner!r}: at most {max_machines} machines, and one request needs {count};"
                    " request a smaller group"
                )
            if held + count > max_machines:
                raise TokenQuotaReached(
                    f"token {owner!r}: at most {max_machines} machines, {held} are in use, and {count} more are"
                    " requested; close episodes",
                    retry_after_s=_RETRY_AFTER_S,
                )
        self._opening_counts[owner] += count
        try:
            yield
        finally:
            self._opening_counts[owner] -= count
            if not self._opening_counts[owner]:
                del self._opening_counts[owner]

    @asynccontextmanager
    async def call(self, episode: Episode, *, renews: bool) -> AsyncIterator[None]:
        """Keep the lease from expiring during the block; with `renews`, restart it at the end.

        A `MachineLost` ends the episode. It and `EpisodeEnded` become `EpisodeNotFound` if the episode was closed.
        Every failure becomes `StaleEpoch` if the episode was rolled back during the call.
        """
        episode.lease.begin_call()
        epoch = episode.epoch
        try:
            yield
        except EnvdError as error:
            if episode.closed.is_set() and isinstance(error, MachineLost | EpisodeEnded):
                raise self.not_found(episode.episode_id) from error
            if episode.epoch != epoch:
                raise episode.stale_error() from error
            if isinstance(error, MachineLost):
                raise await self.lose(episode, error) from error
            raise
        finally:
            episode.lease.end_call(self._clock.monotonic(), renews=renews)
            # Most leases end after the reaper's next check; waking it for every call would iterate over all episodes.
            if not episode.lease.in_call and episode.lease.expire_s < self._next_reap_s:
                self.changes.notify()

    def end(self, episode: Episode, state: EpisodeState, reason: str, *, cause: str = "") -> None:
        """Move an episode to a later state; count it if it was active."""
        was_active = episode.progress.state is EpisodeState.ACTIVE
        episode.end(state, reason, cause=cause)
        self._journal.save(episode)
        if was_active:
            self.count_end(episode)

    def count_end(self, episode: Episode) -> None:
        self._metrics.episode_ended(pool=episode.spec.pool, run=episode.spec.run, state=episode.progress.state.value)

    async def lose(self, episode: Episode, error: Exception) -> Exception:
        """End an episode after an error: by its guest if that caused the error, otherwise void.

        Returns the error to raise: `GuestEnded`, `LossUndecided`, or else `error`.
        """
        if not _is_over(episode):
            self.end_by(episode, error, await find_loss(episode, error))
        try:
            episode.require_machine()
        except (GuestEnded, LossUndecided) as found:
            return found
        except MachineLost:
            pass
        return error

    def end_by(self, episode: Episode, error: Exception, loss: Loss | None) -> None:
        """End an episode after an error and the loss that explains it, if any; see `lose`."""
        if _is_over(episode):
            return
        if loss is None:
            self.void(episode, error)
            return
        if loss.owner is not LossOwner.GUEST:
            self._metrics.losses.labels(pool=episode.spec.pool, owner=loss.owner.value).inc()
            self.void(episode, loss.error(f"machine {episode.machine.machine_id}"))
            return
        logger.warning(
            "episode %s: ended by its guest after step %d: %s",
            episode.episode_id,
            episode.progress.step_count,
            loss.reason,
        )
        self._metrics.ended_by_guest.labels(pool=episode.spec.pool, cause=loss.cause).inc()
        if episode.progress.state is EpisodeState.ACTIVE:
            self.end(episode, EpisodeState.TERMINATED, GuestEnded.reason, cause=loss.cause)
        else:
            episode.progress = replace(episode.progress, cause=loss.cause)
            self._journal.save(episode)
        if episode.machine.lost.is_set():
            self._tasks.spawn(self._release(episode), name=f"episode:{episode.episode_id}:release")
        self.changes.notify()

    def void(self, episode: Episode, error: Exception) -> None:
        """Mark an episode as FAILED and destroy its machine, unless it is over."""
        if _is_over(episode):
            return
        reason = error.reason if isinstance(error, EnvdError) else EnvdError.reason
        logger.warning("episode %s: void after step %d: %s", episode.episode_id, episode.progress.step_count, error)
        self.end(episode, EpisodeState.FAILED, reason, cause=str(error) or type(error).__name__)
        self._tasks.spawn(self._release(episode), name=f"episode:{episode.episode_id}:release")
        self.changes.notify()

    async def close(self, episode_id: str, reason: str = "CLOSED") -> None:
        """End an episode; returns when its machine is gone. Idempotent; continues if the caller is cancelled."""
        closing = self._begin_close(episode_id, reason)
        if closing is not None:
            await asyncio.shield(closing)

    async def close_group(self, group: OpenedGroup) -> None:
        """Close the episodes that a reset or fork opened."""
        await asyncio.gather(*(self.close(episode.episode_id) for episode in group.episodes))

    async def close_all(self, reason: str) -> None:
        """End every episode; returns when all their machines are gone."""
        for episode_id in list(self._episodes):
            self._begin_close(episode_id, reason)
        while self._closing:
            await asyncio.wait(set(self._closing.values()))

    def _begin_close(self, episode_id: str, reason: str) -> asyncio.Task[None] | None:
        episode = self._episodes.pop(episode_id, None)
        if episode is None:
            return self._closing.get(episode_id)
        if episode.progress.state is EpisodeState.ACTIVE:
            self.end(episode, EpisodeState.TRUNCATED, reason)
        text = f"{_CLOSED_TEXTS[reason]} at {self._clock.now().isoformat(timespec='seconds')}"
        self.remember_closed(episode_id, text, owner=episode.spec.owner)
        self._journal.forget(episode_id)
        self.events.closed(episode)
        episode.closed.set()
        logger.info(
            "episode %s: %s after step %d, machine %s",
            episode_id,
            reason,
            episode.progress.step_count,
            episode.machine.machine_id,
        )
        closing = self._tasks.spawn(self._finish_close(episode), name=f"episode:{episode_id}:close")
        self._closing[episode_id] = closing
        self.changes.notify()
        return closing

    async def _finish_close(self, episode: Episode) -> None:
        try:
            await episode.requests.close()
        finally:
            try:
                await self._release(episode)
            finally:
                del self._closing[episode.episode_id]
                del self._pools[episode.episode_id]
                self.changes.notify()

    async def _release(self, episode: Episode) -> None:
        await self._pools[episode.episode_id].release([episode.machine])

    def release_soon(self, episode: Episode, machine: LeasedMachine) -> None:
        """Destroy a machine that an open episode no longer has."""
        pool = self._pools[episode.episode_id]
        self._tasks.spawn(pool.release([machine]), name=f"episode:{episode.episode_id}:release")

    async def _watch(self, episode: Episode) -> None:
        """Void an episode whose machine dies between calls."""
        while True:
            leased = episode.machine
            await race(episode.closed, leased.lost)
            if episode.closed.is_set():
                return
            # After a rollback it has another one.
            if leased is episode.machine:
                break
        lost = MachineLost(f"machine {leased.machine_id}: lost: {leased.machine.lost_reason}")
        self.end_by(episode, lost, leased.machine.loss)

    def _extend_leases(self, lag_s: float) -> None:
        if lag_s < _MIN_LAG_S:
            return
        is_stall = lag_s >= _MIN_STALL_S
        if is_stall:
            logger.warning("the event loop did not run for %.2f s; all leases are extended by that", lag_s)
        now_s = self._clock.monotonic()
        for episode in self:
            episode.lease.extend(lag_s, now_s=now_s)
            if is_stall:
                self._journal.save_lease(episode)

    async def _reap(self) -> None:
        """Close every episode whose lease has expired; sleep until the next one can."""
        while True:
            changed = self.changes.next
            now_s = self._clock.monotonic()
            if any(episode.lease.has_expired(now_s) for episode in self):
                self._measure_lag()
            for episode in self:
                if episode.lease.has_expired(now_s):
                    self._begin_close(episode.episode_id, "LEASE_EXPIRED")
            expiry_s = min((episode.lease.reclaim_s for episode in self), default=None)
            self._next_reap_s = math.inf if expiry_s is None else expiry_s
            await wait_until(self._clock, expiry_s, or_event=changed)


def _is_over(episode: Episode) -> bool:
    """Return whether a failure changes nothing about an episode."""
    return episode.progress.state is EpisodeState.FAILED or episode.closed.is_set() or episode.progress.has_score


async def find_loss(episode: Episode, error: BaseException) -> Loss | None:
    """Return who caused an error of an episode's machine or guest; None if the error says nothing about either.

    A desktop that is still asleep has run nothing of the agent since it was forked, so its failure is ours.
    """
    machine = episode.machine.machine
    symptom = _symptom(error)
    if symptom is None or isinstance(symptom, HypervisorUnavailable):
        return machine.loss
    if episode.machine.desktop.is_asleep and not machine.lost.is_set():
        return machine.loss
    try:
        # A paused guest answers nothing.
        async with episode.machine.running():
            loss = await machine.examine()
    except EnvdError:
        loss = await machine.examine()
    is_of_qemu = isinstance(symptom, MachineLost | DisplayError | HypervisorError)
    if loss.explains_display and not isinstance(symptom, HypervisorError):
        return loss
    if machine.loss is None and loss.owner is LossOwner.GUEST and is_of_qemu:
        # QEMU serves the display and the monitor: one that fails while QEMU runs does not show that the guest failed.
        return Loss(LossOwner.UNDECIDED, str(error))
    return loss


def _symptom(error: BaseException) -> BaseException | None:
    """Return the error of the machine or guest behind an error.

    That a checker could not do something in the guest may be the checker's mistake; that the guest did not answer is
    not.
    """
    kinds: tuple[type[BaseException], ...] = (MachineLost, GuestUnresponsive, HypervisorError)
    if not isinstance(error, EvaluatorFailed):
        kinds = (*kinds, GuestError)
    return _find(error, kinds)


def _find(error: BaseException | None, kinds: tuple[type[BaseException], ...]) -> BaseException | None:
    while error is not None and not isinstance(error, kinds):
        error = error.__cause__
    return error
