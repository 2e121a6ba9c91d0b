"""Checkpoints on disk, shared by all daemons of a host: one directory each, complete from when it has its final name.

A directory is filled under another name, which is locked for that time, and then renamed. So a kill leaves a complete
checkpoint or an unlocked remainder, which the next sweep removes. A power failure does too: files, description and
directory are flushed to the disk before the directory gets its name, and the name before `complete` returns.

Descriptions are read once: an index in memory has those that the directory contained when it last changed.

All methods block, and may run in several threads at once: `in_thread`.
"""

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final, ParamSpec, TypeVar

import xxhash

from envd.base.aio import shielded
from envd.base.config import CheckpointsConfig
from envd.base.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointStoreFull, CheckpointUnusable, StoreError
from envd.episodes.checkpoints.manifest import Manifest, NewerManifest, StoredFile, parse_manifest

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_PREFIX: Final = "ckpt-"
#: Names of directories that are being filled or removed.
_PART_PREFIX: Final = "part-"
#: Name of the file with its manifest.
MANIFEST: Final = "checkpoint.json"
_MAX_ID_CHARS: Final = 64
_CHUNK_BYTES: Final = 1 << 20
_GIB: Final = 1 << 30
_FLUSH_THREADS: Final = 8
#: Threads of `in_thread`. Those of the event loop are for steps: a disk that hangs must not take them.
_THREADS: Final = ThreadPoolExecutor(8, thread_name_prefix="checkpoints")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Longest wait for another process that holds the lock of the directory. Holding it takes milliseconds.
_LOCK_S: Final = 10.0
_LOCK_POLL_S: Final = 0.02
#: Sweeps at which a checkpoint must have expired before it is removed: the clock may be wrong for some minutes.
EXPIRED_SWEEPS: Final = 5
#: A directory may change again without another time stamp for as long as the resolution of a file system's.
_STAMP_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A checkpoint that is being written."""

    directory: Path
    size_bytes: int
    """Size of its files, if that was known before; else 0."""
    lock: ExitStack
    """Closes the descriptor that shows other daemons that its writer lives."""

    @property
    def unwritten_bytes(self) -> int:
        written_bytes = 0
        with suppress(FileNotFoundError):
            written_bytes = sum(path.stat().st_size for path in self.directory.iterdir())
        return max(0, self.size_bytes - written_bytes)


@dataclass(eq=False)
class CheckpointStore:
    """The checkpoints of a host."""

    directory: Path
    settings: CheckpointsConfig
    reserve_bytes: int
    """Space on its disk that stays free."""
    owners: Callable[[], Collection[str]] = lambda: ()
    """Names of the daemon's tokens. Without any, it serves only checkpoints that have no owner."""
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    survives_power_failure: bool = True
    """Whether files are flushed to the disk before a checkpoint is complete, which takes 30 to 70 ms."""
    _known: dict[str, tuple[int, Manifest | None]] = field(default_factory=dict, init=False)
    """The index: inode and content of each directory; None for a damaged one."""
    _sorted: tuple[Manifest, ...] = field(default=(), init=False)
    """The readable ones of `_known`, oldest first."""
    _seen_ns: int = field(default=-1, init=False)
    """Change time of the directory that `_known` is about; -1 if it has to be read again in any case."""
    _unreadable: list[StoreError] = field(default_factory=list, init=False)
    """Errors of descriptions that may be readable later."""
    _index_lock: Lock = field(default_factory=Lock, init=False)
    _drafts: set[Draft] = field(default_factory=set, init=False)
    """Those that are being written, to count what they will take."""
    _held: list[Manifest] = field(default_factory=list, init=False)
    _expired: Counter[str] = field(default_factory=Counter, init=False)
    """Sweeps in a row at which each had expired."""

    def path(self, checkpoint_id: str) -> Path:
        return self.directory / checkpoint_id

    def find(self, checkpoint_id: str) -> Manifest:
        """Return a checkpoint that has not expired. Raises: CheckpointNotFound, CheckpointCorrupt,
        CheckpointUnusable, StoreError."""
        if is_id(checkpoint_id):
            try:
                found = self._read(checkpoint_id)
            except (CheckpointCorrupt, CheckpointUnusable):
                self._forget(checkpoint_id)
                raise
            if found is not None and found.expire_time > self.now() and (not found.spec.owner or self.owners()):
                return found
        raise not_found(checkpoint_id)

    def list(self) -> tuple[Manifest, ...]:
        """Return all readable checkpoints that have not expired, oldest first. Raises: StoreError."""
        now, has_owners = self.now(), bool(self.owners())
        return tuple(each for each in self._all() if each.expire_time > now and (has_owners or not each.spec.owner))

    def usage(self) -> tuple[int, int]:
        """Return how many checkpoints it has, also expired ones, and their bytes."""
        found = self._all()
        return len(found), sum(each.size_bytes for each in found)

    def verify(self, checkpoint: Manifest) -> None:
        """Check all files, and note the use. Raises: CheckpointCorrupt: names the file; CheckpointNotFound."""
        directory = self.path(checkpoint.checkpoint_id)
        for name, stored in checkpoint.files.items():
            where = f"checkpoint {checkpoint.checkpoint_id}: file {name}"
            try:
                found = _stored(directory / name)
            except OSError as error:
                self.find(checkpoint.checkpoint_id)
                raise CheckpointCorrupt(f"{where} cannot be read ({error.strerror}); delete the checkpoint") from error
            if found != stored:
                raise CheckpointCorrupt(f"{where} is damaged; delete the checkpoint")
        with suppress(OSError):
            os.utime(directory)

    def unshared_bytes(self, checkpoint: Manifest) -> int:
        """Return the size of the files that no other directory has by a hard link. Raises: StoreError."""
        directory = self.path(checkpoint.checkpoint_id)
        with _errors(checkpoint.checkpoint_id, "read"):
            found = [(directory / name).stat() for name in checkpoint.files]
        return sum(status.st_size for status in found if status.st_nlink == 1)

    @contextmanager
    def hold(self, checkpoint: Manifest) -> Iterator[None]:
        """Keep a checkpoint that is read from being removed for others.

        If it is deleted, its files take space until the end of the block, and count as long.
        """
        self._held.append(checkpoint)
        try:
            yield
        finally:
            self._held.remove(checkpoint)

    def begin(self, checkpoint: Manifest) -> Draft:
        """Start to write a checkpoint; complete or abandon it. Makes room for the files that are known.

        Raises:
            CheckpointStoreFull, StoreError: There is none, or the disk cannot be written.
        """
        draft = Draft(self._part(checkpoint.checkpoint_id), checkpoint.size_bytes, ExitStack())
        self._drafts.add(draft)
        try:
            with _errors(checkpoint.checkpoint_id):
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._make_room(checkpoint)
                draft.directory.mkdir(mode=0o700)
                lock = os.open(draft.directory, os.O_RDONLY | os.O_CLOEXEC)
                draft.lock.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX)
        except BaseException:
            self.abandon(draft)
            raise
        return draft

    def complete(self, draft: Draft, checkpoint: Manifest) -> Manifest:
        """Store a written checkpoint, and return it with its files. Removes others if it needs their space.

        Returns the one that is there if it has the same files.

        Raises:
            CheckpointUnusable: Another one has its id; abandon it.
            CheckpointStoreFull, StoreError: It was not stored; abandon it.
        """
        with _errors(checkpoint.checkpoint_id):
            paths = sorted(draft.directory.iterdir())
            complete = checkpoint.model_copy(update={"files": {path.name: _stored(path) for path in paths}})
            manifest = draft.directory / MANIFEST
            manifest.write_text(complete.model_dump_json())
            if self.survives_power_failure:
                # At once, they share the commits of the file system: 30 ms, one after the other 70 ms.
                with ThreadPoolExecutor(_FLUSH_THREADS) as threads:
                    tuple(threads.map(_flush, [*paths, manifest, draft.directory]))
            with self._locked():
                if (same := self.same_as(complete)) is not None:
                    complete = same
                else:
                    self._make_room(complete)
                    draft.directory.rename(self.path(complete.checkpoint_id))
            if self.survives_power_failure:
                _flush(self.directory)
        self.abandon(draft)
        return complete

    def same_as(self, checkpoint: Manifest) -> Manifest | None:
        """Return the checkpoint that was stored with an id and these files; None if there is none with that id.

        Raises:
            CheckpointUnusable: It has other files.
            CheckpointCorrupt, StoreError: It cannot be read.
        """
        found = self._read(checkpoint.checkpoint_id)
        if found is not None and found.expire_time <= self.now():
            self.delete(found.checkpoint_id)
            return None
        if found is not None and found.files != checkpoint.files:
            raise CheckpointUnusable(
                f"checkpoint {found.checkpoint_id}: this host has another one with this id; delete it first"
            )
        return found

    def abandon(self, draft: Draft) -> None:
        """Remove what is left of a draft. Idempotent."""
        self._drafts.discard(draft)
        shutil.rmtree(draft.directory, ignore_errors=True)
        draft.lock.close()

    def delete(self, checkpoint_id: str) -> None:
        """Delete a checkpoint, if it is there. Raises: StoreError."""
        part = self._part(checkpoint_id)
        with _errors(checkpoint_id, "deleted"), suppress(FileNotFoundError):
            # Under its own name it is complete, also while its files are being removed.
            self.path(checkpoint_id).rename(part)
            self._forget(checkpoint_id)
            shutil.rmtree(part, ignore_errors=True)

    def keep_only(self, checkpoint_ids: Collection[str]) -> None:
        """Delete all others, and what killed daemons left, in a store that no other daemon uses.

        Raises: OSError, StoreError.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self.directory.glob(f"{_PREFIX}*"):
            if path.name not in checkpoint_ids:
                self.delete(path.name)
        self.sweep()

    def sweep(self) -> None:
        """Remove what has expired at the last sweeps too, and what killed daemons left. Raises: OSError, StoreError."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        now = self.now()
        expired = [each.checkpoint_id for each in self._all() if each.expire_time <= now]
        for error in tuple(self._unreadable):
            logger.warning("%s", error)
        # Another version of envd may be able to read damaged ones, so they are kept for as long as a checkpoint.
        used_s = now.timestamp() - self.settings.ttl_s
        damaged = [name for name, (_, known) in tuple(self._known.items()) if known is None]
        expired += [name for name in damaged if 0 < self._used_s(self.path(name)) <= used_s]
        self._expired = Counter({name: self._expired[name] + 1 for name in expired})
        for name in (name for name, count in self._expired.items() if count >= EXPIRED_SWEEPS):
            if name in damaged:
                logger.warning("checkpoint %s: %s cannot be read; it is removed now", name, MANIFEST)
            with suppress(StoreError):
                self.delete(name)
        for part in self.directory.glob(f"{_PART_PREFIX}*"):
            with suppress(OSError):
                lock = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(part, ignore_errors=True)
                finally:
                    os.close(lock)

    def _part(self, checkpoint_id: str) -> Path:
        """Return a new name for a directory that is being filled or removed."""
        return self.directory / f"{_PART_PREFIX}{checkpoint_id}-{secrets.token_hex(4)}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other writers, also of other daemons, which would count without this one's checkpoint."""
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            deadline_s = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline_s:
                        raise StoreError(
                            f"checkpoints in {self.directory}: another process has held their lock for {_LOCK_S:g} s;"
                            " find it with `lslocks`"
                        ) from None
                    time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, new: Manifest) -> None:
        """Remove others until one more fits, whose draft exists.

        A run above its limit loses its own. Otherwise the owner that holds most loses one, as long as it holds more
        than an equal share. Pinned checkpoints of an owner never exceed that share, so each owner can always use its.

        Raises:
            CheckpointStoreFull: It cannot fit; nothing was removed.
        """
        settings = self.settings
        kept = {each.checkpoint_id: each for each in self._all() if each.checkpoint_id != new.checkpoint_id}
        held = {each.checkpoint_id: each for each in tuple(self._held)}
        present = [*kept.values(), *(each for name, each in held.items() if name not in kept), new]
        owner_bytes = Counter[str]()
        for each in present:
            owner_bytes[each.spec.owner] += each.size_bytes
        run_bytes = sum(each.size_bytes for each in present if _run(each) == _run(new))
        limit_bytes, total_bytes = settings.limit_gib * _GIB, owner_bytes.total()
        unwritten_bytes = sum(draft.unwritten_bytes for draft in tuple(self._drafts))
        # Negative if others must be removed.
        spare_bytes = shutil.disk_usage(self.directory).free - self.reserve_bytes - unwritten_bytes
        owner_count = len({*owner_bytes, *self.owners()})
        share_bytes = min(limit_bytes, total_bytes + spare_bytes) / owner_count
        pinned_bytes = sum(each.size_bytes for each in present if each.pinned and each.spec.owner == new.spec.owner)
        if new.pinned and pinned_bytes > limit_bytes / owner_count and owner_count > 1:
            raise _full(
                new, f"each of {owner_count} tokens may pin its share of checkpoints.limit_gib = {settings.limit_gib:g}"
            )
        run_limit_bytes = settings.run_limit_gib * _GIB
        if run_bytes <= run_limit_bytes and total_bytes <= limit_bytes and spare_bytes >= 0:
            return
        removable: dict[str, deque[Manifest]] = {owner: deque() for owner in owner_bytes}
        candidates = (each for each in kept.values() if not each.pinned and each.checkpoint_id not in held)
        for each in sorted(candidates, key=self._removal_order):
            removable[each.spec.owner].append(each)
        victims: list[Manifest] = []
        while True:
            if run_bytes > run_limit_bytes:
                limit = f"run {new.spec.run!r} may hold checkpoints.run_limit_gib = {settings.run_limit_gib:g}"
                victim = next((each for each in removable[new.spec.owner] if each.spec.run == new.spec.run), None)
            elif total_bytes > limit_bytes or spare_bytes < 0:
                limit = f"all may hold checkpoints.limit_gib = {settings.limit_gib:g}"
                if total_bytes <= limit_bytes:
                    limit = f"limits.disk_reserve_mib = {self.reserve_bytes >> 20} must stay free"
                above = [
                    owner
                    for owner, own in removable.items()
                    if own and (owner == new.spec.owner or owner_bytes[owner] > share_bytes)
                ]
                victim = removable[max(above, key=owner_bytes.__getitem__)][0] if above else None
            else:
                break
            if victim is None:
                raise _full(new, f"{limit}, and removing others that are not pinned does not suffice")
            removable[victim.spec.owner].remove(victim)
            owner_bytes[victim.spec.owner] -= victim.size_bytes
            run_bytes -= victim.size_bytes if _run(victim) == _run(new) else 0
            total_bytes -= victim.size_bytes
            spare_bytes += victim.size_bytes
            victims.append(victim)
        for victim in victims:
            self.delete(victim.checkpoint_id)

    def _removal_order(self, checkpoint: Manifest) -> tuple[bool, float]:
        """Return a key: those that no client asked for go first, then those that were not used for longest."""
        return not checkpoint.trigger, self._used_s(self.path(checkpoint.checkpoint_id))

    def _used_s(self, directory: Path) -> float:
        """Return when a checkpoint was used last; 0 if it is gone."""
        try:
            return directory.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _all(self) -> tuple[Manifest, ...]:
        """Return all readable checkpoints, oldest first. Raises: StoreError."""
        with self._index_lock:
            try:
                changed_ns = self.directory.stat().st_mtime_ns
                if changed_ns != self._seen_ns:
                    self._read_new()
                    # What changes in the same tick of the clock would be missed.
                    is_past = changed_ns + _STAMP_NS < time.time_ns()
                    self._seen_ns = changed_ns if is_past and not self._unreadable else -1
            except FileNotFoundError:
                self._known, self._sorted = {}, ()
            except OSError as error:
                raise StoreError(f"checkpoints in {self.directory}: not listed: {error}; check the disk") from error
            return self._sorted

    def _forget(self, checkpoint_id: str) -> None:
        """Remove an entry of the index; it is read again, if it is there."""
        with self._index_lock:
            self._known.pop(checkpoint_id, None)
            self._seen_ns = -1

    def _read_new(self) -> None:
        """Update the index. Raises: OSError."""
        with os.scandir(self.directory) as entries:
            inodes = {entry.name: entry.inode() for entry in entries if entry.name.startswith(_PREFIX)}
        known = {name: each for name, each in self._known.items() if inodes.get(name) == each[0]}
        self._unreadable.clear()
        for name in inodes.keys() - known.keys():
            try:
                if (found := self._read(name)) is not None:
                    known[name] = (inodes[name], found)
            except (CheckpointCorrupt, CheckpointUnusable):
                known[name] = (inodes[name], None)
            except StoreError as error:
                self._unreadable.append(error)
        self._known = known
        readable = [checkpoint for _, checkpoint in known.values() if checkpoint is not None]
        self._sorted = tuple(sorted(readable, key=lambda each: (each.create_time, each.checkpoint_id)))

    def _read(self, checkpoint_id: str) -> Manifest | None:
        """Return a checkpoint; None if there is none.

        Raises:
            CheckpointCorrupt: Its manifest is damaged.
            CheckpointUnusable: A newer envd stored it.
            StoreError: It may be readable later.
        """
        path = self.path(checkpoint_id) / MANIFEST
        try:
            found = parse_manifest(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(
                f"checkpoint {checkpoint_id}: {MANIFEST} cannot be read: {error.strerror}; check the disk, then retry"
            ) from error
        except NewerManifest as error:
            raise CheckpointUnusable(
                f"checkpoint {checkpoint_id}: {MANIFEST}: {error}; use that envd, or delete the checkpoint"
            ) from error
        except ValueError as error:
            raise CheckpointCorrupt(
                f"checkpoint {checkpoint_id}: {MANIFEST} cannot be read; delete the checkpoint"
            ) from error
        if found.checkpoint_id != checkpoint_id:
            raise CheckpointCorrupt(f"checkpoint {checkpoint_id}: its files are those of {found.checkpoint_id}")
        return found


@contextmanager
def _errors(checkpoint_id: str, act: str = "stored") -> Iterator[None]:
    """Raise OSError of the block as CheckpointStoreFull or StoreError."""
    try:
        yield
    except OSError as error:
        raise store_error(checkpoint_id, error, act) from error


def _run(checkpoint: Manifest) -> tuple[str, str]:
    """Return the run of a checkpoint; owners have separate runs."""
    return checkpoint.spec.owner, checkpoint.spec.run


def _full(new: Manifest, why: str) -> CheckpointStoreFull:
    mib = new.size_bytes / (1 << 20)
    return CheckpointStoreFull(
        f"no space for a checkpoint of {mib:.1f} MiB: {why}; delete checkpoints, or raise the limit"
    )


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function that works on checkpoints' files in a thread.

    A cancelled caller continues when the function has ended, so that it never cleans up what a thread still uses.
    """
    call = partial(copy_context().run, function, *args, **kwargs)
    return await shielded(asyncio.get_running_loop().run_in_executor(_THREADS, call))


def is_id(text: str) -> bool:
    """Return whether a text may be a checkpoint's id, which is part of a path."""
    return text.startswith(_PREFIX) and text.removeprefix(_PREFIX).isalnum() and len(text) <= _MAX_ID_CHARS


def not_found(checkpoint_id: str) -> CheckpointNotFound:
    """Return the error for a checkpoint that does not exist or is another owner's: the same for both."""
    return CheckpointNotFound(
        f"checkpoint {checkpoint_id}: not found on this host (deleted, expired, or never created); list them with"
        " ListCheckpoints"
    )


def store_error(checkpoint_id: str, error: OSError, act: str = "stored") -> CheckpointStoreFull | StoreError:
    """Return the error for a checkpoint that could not be written."""
    kind = CheckpointStoreFull if error.errno in _FULL else StoreError
    return kind(f"checkpoint {checkpoint_id}: not {act}: {error}")


def _flush(path: Path) -> None:
    """Return when the disk has a file or directory. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stored(path: Path) -> StoredFile:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return StoredFile(size_bytes=size, digest=digest.hexdigest())
