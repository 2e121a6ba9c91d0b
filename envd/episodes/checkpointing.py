"""Create checkpoints of episodes, bring machines to the state of one, and put episodes back into it.

A checkpoint is a capture, as `Fork` makes it, that is written to disk; an episode opened from it is a fork of the
capture that is read back. So what holds for forks holds here.

A rollback gives the episode another machine. Always true, whenever the daemon dies: the database has the episode with
its old machine, which nothing has touched, or with the new one and the response. So a retry repeats a rollback that was
not done, or gets the recorded response.
"""

import asyncio
import hashlib
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final

from envd.base.clock import Clock
from envd.base.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    CheckpointUnusable,
    EnvdError,
    InvalidRequest,
    MachineLost,
    RequestIdReused,
    SetupFailed,
    StoreError,
    Unimplemented,
)
from envd.base.telemetry.traces import Stopwatch
from envd.desktop.observation import ObservationOptions
from envd.episodes.checkpoints.archive import ArchiveReader, archived
from envd.episodes.checkpoints.manifest import Manifest
from envd.episodes.checkpoints.parking import surplus_of
from envd.episodes.checkpoints.states import describe_state, draft_of, read_state, require_template, write_state
from envd.episodes.checkpoints.store import CheckpointStore, in_thread, not_found
from envd.episodes.checkpoints.views import read_view
from envd.episodes.context import EpisodeContext
from envd.episodes.controlling import Controlling
from envd.episodes.episode import Episode
from envd.episodes.ledger import CHECKPOINT, ROLLBACK, RequestKey
from envd.episodes.members import Group, Member, ParkSurplus, start_from
from envd.episodes.progress import CheckpointTrigger
from envd.episodes.types import CheckpointCommand, ResetCommand, RollbackCommand, RollbackResult
from envd.pool.leased import FrozenDesktop, Reservation
from envd.pool.pool import MachinePool
from envd.tasks.basis import task_digest
from envd.tasks.model import Task

logger = logging.getLogger(__name__)

_SWEEP_S = 60.0
#: The longest that a request may ask for.
_MAX_LIFETIME = timedelta(days=365)
#: Checkpoints that are written at once, and of one owner. Each holds a copy of its machine's state in memory.
_WRITING_COUNT: Final = 4
_OWN_WRITING_COUNT: Final = 2
#: Exports of one caller that run at once; each has the files of a checkpoint open. As many imports of all run at once.
_TRANSFER_COUNT: Final = 4
#: A client that reads nothing of an export for longer is gone.
_UNREAD_S: Final = 60.0


class Checkpointing:
    """The calls for checkpoints of an episode service."""

    def __init__(self, context: EpisodeContext, store: CheckpointStore | None, controlling: Controlling) -> None:
        self._context = context
        self._controlling = controlling
        self._own_store = store
        self._writing = asyncio.Semaphore(_WRITING_COUNT)
        self._own_writing = defaultdict[str, asyncio.Semaphore](partial(asyncio.Semaphore, _OWN_WRITING_COUNT))
        self._exporting = defaultdict[str, asyncio.Semaphore](partial(asyncio.Semaphore, _TRANSFER_COUNT))
        self._importing = asyncio.Semaphore(_TRANSFER_COUNT)

    @property
    def _store(self) -> CheckpointStore:
        if self._own_store is None:
            raise Unimplemented("this service has no directory for checkpoints")
        return self._own_store

    async def create(self, command: CheckpointCommand) -> tuple[Manifest, dict[str, float]]:
        """Store the present state of an active episode, which continues. Idempotent on `request_id`.

        Timings: `queue` (while others of its owner are written), `pause` (of the episode), `copy` (of its state),
        `store` (on disk) and `total`.

        Raises:
            EpisodeNotFound, RequestIdReused, EpisodeEnded, StepIndexMismatch, NotForkable, MachineLost,
            GuestUnresponsive, GuestError: As for `EpisodeOpening.fork`.
            CheckpointStoreFull: No space, and nothing that may be removed. The episode continues.
            HypervisorError, StoreError: The state could not be copied or written. The episode continues.
        """
        request = RequestKey(CHECKPOINT, command.episode_id, command.request_id, command.fingerprint)
        answer = await self._context.once(request, lambda episode: self._create(episode, command))
        return answer.value

    async def get(self, checkpoint_id: str, is_visible: Callable[[str], bool]) -> Manifest:
        """Return a checkpoint.

        Raises:
            CheckpointNotFound: It does not exist, or its owner is not visible.
            CheckpointCorrupt, CheckpointUnusable: Its description is damaged, or of a later release.
            StoreError: It cannot be read.
        """
        found = await in_thread(self._store.find, checkpoint_id)
        if not is_visible(found.spec.owner):
            raise not_found(checkpoint_id)
        return found

    async def list(self, is_visible: Callable[[str], bool]) -> tuple[Manifest, ...]:
        """Return the checkpoints of this host whose owners are visible, oldest first."""
        found = await in_thread(self._store.list)
        return tuple(checkpoint for checkpoint in found if is_visible(checkpoint.spec.owner))

    async def delete(self, checkpoint_id: str, is_own: Callable[[str], bool]) -> None:
        """Delete a checkpoint, unless it does not exist or is another owner's.

        The owner of one that cannot be read is unknown: only callers that may use all can delete it.

        Raises:
            StoreError: The disk cannot be read or written now.
        """
        try:
            if not is_own((await in_thread(self._store.find, checkpoint_id)).spec.owner):
                return
        except CheckpointNotFound:
            return
        except (CheckpointCorrupt, CheckpointUnusable) as error:
            if not is_own(""):
                return
            logger.warning("%s; it is deleted", error)
        await in_thread(self._store.delete, checkpoint_id)
        await self._report()

    async def exported(
        self, checkpoint_id: str, is_own: Callable[[str], bool], *, caller: str
    ) -> AsyncGenerator[bytes, None]:
        """Yield the archive of a checkpoint, which was verified before. Waits while its caller has several running.

        Raises:
            CheckpointNotFound: It does not exist, or is another owner's.
            CheckpointCorrupt: A file is missing or damaged.
            StoreError: It cannot be read, or was not read for a minute.
        """
        loop = asyncio.get_running_loop()
        found = await self.get(checkpoint_id, is_own)
        with ExitStack() as stack:
            await self._exporting[caller].acquire()
            stack.callback(self._exporting[caller].release)
            stack.enter_context(self._store.hold(found))
            await in_thread(self._store.verify, found)
            pieces = archived(found, self._store.path(checkpoint_id))
            stack.callback(pieces.close)
            try:
                while piece := await in_thread(next, pieces, b""):
                    # The client's flow control stops this generator here: its files would stay open.
                    unread = loop.call_later(_UNREAD_S, stack.close)
                    try:
                        yield piece
                    finally:
                        unread.cancel()
                    if unread.when() <= loop.time():
                        raise StoreError(
                            f"checkpoint {checkpoint_id}: nothing was read for {_UNREAD_S:g} s; export it again"
                        )
            except OSError as error:
                await in_thread(self._store.find, checkpoint_id)
                raise StoreError(f"checkpoint {checkpoint_id}: cannot be read: {error}") from error

    async def import_archive(self, pieces: AsyncIterator[bytes]) -> Manifest:
        """Store the checkpoint of an archive, with its owner and id; it is kept for as long from now as it was to be.

        Without tokens it has no owner. Returns the one that is there if it was imported before. On failure nothing is
        stored. Waits while several others run.

        Raises:
            InvalidRequest: It is not an archive of this version.
            CheckpointCorrupt: It is damaged; the message names the file.
            CheckpointUnusable: This daemon has not its pool, template or task, or has another one with its id.
            CheckpointStoreFull, StoreError: It could not be stored.
        """
        async with self._importing:
            archive = ArchiveReader(pieces)
            manifest = await archive.manifest()
            self._usable(manifest)
            if not self._store.owners():
                manifest = manifest.model_copy(update={"spec": replace(manifest.spec, owner="")})
            if (same := await in_thread(self._store.same_as, manifest)) is not None:
                return same
            async with draft_of(manifest, self._store) as draft:
                for name, expected in manifest.files.items():
                    await archive.read_file(draft.directory / name, expected)
                await archive.require_end()
                await in_thread(read_view, draft.directory, manifest.checkpoint_id)
                lifetime = min(manifest.expire_time - manifest.create_time, _MAX_LIFETIME)
                expire_time = self._context.clock.now() + lifetime
                imported = manifest.model_copy(update={"expire_time": expire_time})
                stored = await in_thread(self._store.complete, draft, imported)
        await self._report()
        logger.info("checkpoint %s: imported, %.1f MiB", stored.checkpoint_id, stored.size_bytes / (1 << 20))
        return stored

    async def keep_swept(self, clock: Clock) -> None:
        """Remove what has expired or was left by a killed daemon, now and every minute, until cancelled."""
        while True:
            try:
                await in_thread(self._store.sweep)
                await self._report()
            except (OSError, StoreError) as error:
                logger.warning("checkpoints: not swept: %s", error)
            await clock.sleep(_SWEEP_S)

    async def find(self, checkpoint_id: str, is_own: Callable[[str], bool]) -> tuple[Manifest, Task, MachinePool]:
        """Return a checkpoint of a caller, with its task and pool.

        Raises:
            CheckpointNotFound: It does not exist, or is another owner's.
            CheckpointCorrupt: It is damaged.
            CheckpointUnusable: This daemon has not its pool, template or task.
        """
        found = await self.get(checkpoint_id, is_own)
        task, pool = self._usable(found)
        return found, task, pool

    async def find_for(self, command: ResetCommand) -> tuple[Manifest, Task, MachinePool]:
        """Return the checkpoint that a reset names. Raises: as `find`; InvalidRequest: a field contradicts it."""
        found, task, pool = await self.find(
            command.checkpoint_id, lambda owner: command.sees_all_owners or owner == command.owner
        )
        spec = found.spec
        for field, asked, stored in (("task_id", command.task_id, spec.task_id), ("pool", command.pool, spec.pool)):
            if asked not in ("", stored):
                raise InvalidRequest(field, f"{asked} is not that of checkpoint {found.checkpoint_id}: {stored}")
        if command.max_steps is not None and command.max_steps <= found.progress.step_count:
            raise InvalidRequest(
                "max_steps", f"must be above the step count of the checkpoint, {found.progress.step_count}"
            )
        return found, task, pool

    def _usable(self, found: Manifest) -> tuple[Task, MachinePool]:
        """Return the task and pool of a checkpoint. Raises: CheckpointUnusable: not those that it needs."""
        spec = found.spec
        pool, task = self._context.pools.get(spec.pool), self._context.tasks.find(spec.task_id)
        if pool is None:
            raise CheckpointUnusable(f"checkpoint {found.checkpoint_id}: this daemon has no pool {spec.pool!r}")
        if task is None or task_digest(task) != spec.task_digest:
            raise CheckpointUnusable(
                f"checkpoint {found.checkpoint_id}: task {spec.task_id} has changed or is not served; start it over"
            )
        if pool.template is not None:
            require_template(found, pool.template)
        return task, pool

    async def start_group(self, checkpoint: Manifest, pool: MachinePool, command: ResetCommand) -> Group:
        """Lease machines and bring all of them to the state of a checkpoint, all or none.

        On failure and on cancellation no machine, reservation or state is kept. Timings: `acquire`, `restore`, `fork`
        (of the slowest machine), `observe`, `total`.
        """
        watch = Stopwatch(self._context.clock)
        run, parked_count = command.run or checkpoint.spec.run, surplus_of(pool, command.group_size)
        admission = await pool.acquire(
            0,
            reserved=command.group_size - parked_count,
            parked=parked_count,
            run=run,
            owner=command.owner,
            timeout_s=command.timeout_s,
        )
        watch.lap("acquire")
        async with pool.releasing_on_failure(admission.reservations):
            members = await self._start_members(
                checkpoint,
                pool,
                admission.reservations,
                park_surplus=(
                    partial(self._context.parking.park_copies, pool, count=parked_count, run=run, owner=command.owner)
                    if parked_count
                    else None
                ),
                options=command.observe,
                subject=f"checkpoint {checkpoint.checkpoint_id}",
                watch=watch,
            )
        return Group(
            members=tuple(_opened_from(checkpoint, member) for member in members),
            progress=checkpoint.start,
            timings_ms={**watch.timings_ms, "total": watch.total_ms},
        )

    async def _start_members(
        self,
        checkpoint: Manifest,
        pool: MachinePool,
        reservations: Sequence[Reservation],
        *,
        park_surplus: ParkSurplus | None = None,
        options: ObservationOptions,
        subject: str,
        watch: Stopwatch,
    ) -> tuple[Member, ...]:
        """Bring a machine for every reservation to the state of a checkpoint; see `members.start_from`.

        Phases of `watch`: `restore`, `fork`, `observe`.
        """
        frozen = await read_state(checkpoint, pool, self._store, clock=self._context.clock)
        watch.lap("restore")
        try:
            return await start_from(
                pool, frozen, reservations, park_surplus=park_surplus, options=options, subject=subject, watch=watch
            )
        except MachineLost as error:
            # The new machine died: do not blame the episode that is rolled back.
            raise SetupFailed(f"{subject}: {error}") from error
        finally:
            self._context.states.discard(frozen)

    async def rollback(self, command: RollbackCommand) -> RollbackResult:
        """Put an open episode back into the state of a checkpoint. Idempotent on `request_id`, also after a restart.

        While a person controls the episode, only that person may. It waits for a running step. The episode is active
        afterwards, also if it had ended, and calls of its earlier epoch fail. On failure it is unchanged.
        Timings: `queue`, `restore`, `fork`, `observe` and `total`.

        Raises:
            EpisodeNotFound, RequestIdReused, StaleEpoch, HumanInControl, GuestEnded, MachineLost: See `Stepping.step`.
            CheckpointNotFound, CheckpointCorrupt, CheckpointUnusable: See `find`.
            InvalidRequest: It is of another task or pool, or the observation is impossible on this screen.
            SetupFailed: The new machine did not start, or a requested part of the observation is unavailable.
            HypervisorError: The state could not be read or forked.
        """
        request = RequestKey(ROLLBACK, command.episode_id, command.request_id, command.fingerprint)
        answer = await self._context.once(request, lambda episode: self._rollback(episode, command, request))
        result = answer.value
        if not answer.recovered:
            return result
        observation = await self._context.with_pixels(result.observation, command.episode_id, command.observe)
        return replace(result, observation=observation)

    async def _rollback(self, episode: Episode, command: RollbackCommand, request: RequestKey) -> RollbackResult:
        context, watch = self._context, Stopwatch(self._context.clock)
        async with context.call(episode, watch=watch):
            try:
                checkpoint, task, pool = await self.find(
                    command.checkpoint_id, lambda owner: owner == episode.spec.owner
                )
                if (task.task_id, pool.name) != (episode.task.task_id, episode.spec.pool):
                    raise InvalidRequest(
                        "checkpoint_id",
                        f"{checkpoint.checkpoint_id} is of task {task.task_id} in pool {pool.name}, but episode"
                        f" {episode.episode_id} is of task {episode.task.task_id} in pool {episode.spec.pool}",
                    )
                async with episode.lock:
                    watch.lap("queue")
                    episode.require_epoch(command.epoch)
                    episode.require_machine()
                    await self._controlling.before_rollback(episode, command.control_id)
                    member = await self._successor(episode, command, checkpoint, pool, watch)
                    return await self._swap(episode, request, checkpoint, member, watch)
            except EnvdError as error:
                context.count_failure(episode, "rollback", error)
                raise

    async def _successor(
        self, episode: Episode, command: RollbackCommand, checkpoint: Manifest, pool: MachinePool, watch: Stopwatch
    ) -> Member:
        """Return a machine with the checkpoint's state. On failure and on cancellation there is none."""
        subject = f"rollback of episode {episode.episode_id}"
        async with pool.replacing(run=episode.spec.run) as reservation:
            (member,) = await self._start_members(
                checkpoint, pool, [reservation], options=command.observe, subject=subject, watch=watch
            )
            # Without an await from here on, so that a machine is always released by one of the two.
            if episode.closed.is_set() or episode.machine.lost.is_set():
                raise MachineLost(f"{subject}: its machine was lost meanwhile")
            # A person may have taken or lost control meanwhile.
            episode.human.require(episode.episode_id, command.control_id)
            return member

    async def _swap(
        self, episode: Episode, request: RequestKey, checkpoint: Manifest, member: Member, watch: Stopwatch
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

    async def _create(self, episode: Episode, command: CheckpointCommand) -> tuple[Manifest, dict[str, float]]:
        context = self._context
        checkpoint_id = _id_of(episode, command.request_id)
        if (known := await self._known(checkpoint_id, command)) is not None:
            return known, {}
        watch = Stopwatch(context.clock)
        pool = context.pools[episode.spec.pool]
        async with context.call(episode):
            try:
                # Before the copy: callers that wait for the disk hold none.
                async with self._writer(episode.spec.owner):
                    watch.lap("queue")
                    frozen = await context.freeze(episode, command.step_index, epoch=command.epoch)
                    watch.lap("copy")
                    try:
                        described = self._describe(episode, command, frozen, checkpoint_id)
                        stored = await write_state(described, frozen, pool, self._store)
                    finally:
                        self._context.states.discard(frozen)
            except EnvdError as error:
                context.count_failure(episode, "checkpoint", error)
                raise
        watch.lap("store")
        await self._stored(episode, stored)
        timings_ms = {"pause": frozen.snapshot.report.paused_ms, **watch.timings_ms, "total": watch.total_ms}
        return stored, timings_ms

    def describe(self, episode: Episode, frozen: FrozenDesktop, trigger: CheckpointTrigger) -> Manifest:
        """Return the description of an episode's present state, for `store`."""
        name = f"{trigger.value}/{episode.epoch}/{episode.progress.step_count}"
        command = CheckpointCommand(
            request_id=name, episode_id=episode.episode_id, step_index=episode.progress.step_count
        )
        described = self._describe(episode, command, frozen, _id_of(episode, name))
        return described.model_copy(update={"trigger": trigger.value})

    async def store(self, episode: Episode, described: Manifest, frozen: FrozenDesktop) -> None:
        """Store a state of an episode that no request asked for."""
        async with self._writer(episode.spec.owner):
            stored = await write_state(described, frozen, self._context.pools[episode.spec.pool], self._store)
        await self._stored(episode, stored)

    async def _stored(self, episode: Episode, stored: Manifest) -> None:
        """Report a new checkpoint; later ones of the same epoch descend from it."""
        if stored.epoch == episode.epoch:
            episode.progress = replace(episode.progress, last_checkpoint_id=stored.checkpoint_id)
            self._context.journal.save(episode)
        self._context.metrics.checkpoints_created.labels(pool=episode.spec.pool).inc()
        await self._report()
        logger.info(
            "episode %s: checkpoint %s at step %d, %.1f MiB",
            episode.episode_id,
            stored.checkpoint_id,
            stored.progress.step_count,
            stored.size_bytes / (1 << 20),
        )

    async def _known(self, checkpoint_id: str, command: CheckpointCommand) -> Manifest | None:
        """Return what the same request stored under a previous daemon. Raises: RequestIdReused."""
        try:
            known = await in_thread(self._store.find, checkpoint_id)
        except CheckpointNotFound:
            return None
        if known.fingerprint != command.fingerprint.hex():
            raise RequestIdReused(command.request_id)
        return known

    def _describe(
        self, episode: Episode, command: CheckpointCommand, frozen: FrozenDesktop, checkpoint_id: str
    ) -> Manifest:
        ttl_s = self._store.settings.ttl_s if command.ttl_s is None else command.ttl_s
        return describe_state(
            episode.spec,
            episode.progress,
            frozen,
            epoch=episode.epoch,
            checkpoint_id=checkpoint_id,
            create_time=self._context.clock.now(),
            ttl=timedelta(seconds=ttl_s),
            pinned=command.pinned,
            label=command.label,
            fingerprint=command.fingerprint.hex(),
        )

    @asynccontextmanager
    async def _writer(self, owner: str) -> AsyncIterator[None]:
        """Wait until an owner may write a checkpoint, and let others wait until the end of the block."""
        async with self._own_writing[owner], self._writing:
            yield

    async def _report(self) -> None:
        count, size_bytes = await in_thread(self._store.usage)
        self._context.metrics.checkpoints.set(count)
        self._context.metrics.checkpoint_bytes.set(size_bytes)


def _id_of(episode: Episode, name: str) -> str:
    """Return the id of an episode's checkpoint, the same for the same request."""
    return f"ckpt-{hashlib.blake2b(f'{episode.episode_id}/{name}'.encode(), digest_size=8).hexdigest()}"


def _opened_from(checkpoint: Manifest, member: Member) -> Member:
    origin = replace(
        member.origin,
        checkpoint_id=checkpoint.checkpoint_id,
        checkpoint_episode_id=checkpoint.spec.episode_id,
        checkpoint_time=checkpoint.create_time,
    )
    return replace(member, origin=origin)


def tree_of(episode: Episode, found: Sequence[Manifest]) -> list[Manifest]:
    """Return the checkpoints that are connected with an episode's by their parents, in their order."""
    links = [{each.checkpoint_id, each.progress.last_checkpoint_id} - {""} for each in found]
    connected = {episode.spec.origin.checkpoint_id, episode.progress.last_checkpoint_id}
    connected |= {each.checkpoint_id for each in found if each.spec.episode_id == episode.episode_id}
    while more := set().union(*(link for link in links if link & connected)) - connected:
        connected |= more
    return [each for each in found if each.checkpoint_id in connected]
