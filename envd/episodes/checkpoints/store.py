"""Checkpoints on disk, shared by all daemons of a host: one directory each, complete from when it has its final name.

A directory is filled under another name, which is locked for that time, and then renamed. So a kill leaves a complete
checkpoint or an unlocked remainder, which the next sweep removes. A power failure does too: files, description and
directory are flushed to the disk before the directory gets its name, and the name before `complete` returns.

All methods block.
"""

import errno
import fcntl
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Literal

import xxhash
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from envd.base.config import CheckpointsConfig, SettlePolicy
from envd.base.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointStoreFull, StoreError
from envd.tasks.user import Exchange

logger = logging.getLogger(__name__)

_PREFIX: Final = "ckpt-"
#: Names of directories that are being filled or removed.
_PART_PREFIX: Final = "part-"
#: Name of the file with its description.
MANIFEST: Final = "checkpoint.json"
_MAX_ID_CHARS: Final = 64
_CHUNK_BYTES: Final = 1 << 20
_GIB: Final = 1 << 30
_FLUSH_THREADS: Final = 8
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def _in_utc(moment: datetime) -> datetime:
    if not 2000 <= moment.year < 9000:  # beyond, converting it or adding to it may overflow
        raise ValueError(f"{moment.isoformat()} is not a time of this millennium")
    return moment.astimezone(UTC)


# A description may come from another host, and lists of all callers contain it: every value must fit a response.
_Text = Annotated[str, Field(max_length=256)]
_Time = Annotated[AwareDatetime, AfterValidator(_in_utc)]
_Steps = Annotated[int, Field(ge=0, le=100_000)]


class StoredFile(BaseModel):
    """A file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size_bytes: Annotated[int, Field(ge=0, le=1 << 50)]
    digest: _Text
    """xxh3-128 of its content, 32 hex digits."""


class Checkpoint(BaseModel):
    """Description of a checkpoint, stored with it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    checkpoint_id: _Text
    label: _Text
    episode_id: _Text
    parent_checkpoint_id: _Text
    """The previous checkpoint of that episode, or the one that it was opened from; empty if none."""
    task_id: _Text
    task_digest: _Text
    """Digest of the task's definition: of another version, the stored state is not a state."""
    template_digest: _Text
    """Digest of the template whose memory and disk the state builds on."""
    pool: _Text
    run: _Text
    owner: _Text
    step_count: _Steps
    asked: Annotated[tuple[Exchange, ...], Field(max_length=100)] = ()
    """What the agent had asked the task's user."""
    perturbations: Annotated[tuple[_Text, ...], Field(max_length=64)] = ()
    """Kinds of the perturbations of the episode's world."""
    epoch: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    """The episode's, in which the state was."""
    max_steps: _Steps
    frame_id: _Text
    settle: SettlePolicy
    create_time: _Time
    expire_time: _Time
    pinned: bool
    trigger: _Text = ""
    """Value of the `CheckpointTrigger` at which its episode stored it; empty if a request did."""
    fingerprint: _Text
    """Digest of the request that created it; empty if none did."""
    files: Annotated[dict[str, StoredFile], Field(max_length=64)] = {}

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointResult:
    """A new checkpoint, and the milliseconds of each phase."""

    checkpoint: Checkpoint
    timings_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being written."""

    directory: Path
    lock: int
    """Descriptor that shows other daemons that its writer lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """Content of the store."""

    count: int
    size_bytes: int


@dataclass(eq=False)
class CheckpointStore:
    """The checkpoints of a host."""

    directory: Path
    settings: CheckpointsConfig
    reserve_bytes: int
    """Space on its disk that stays free."""
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def path(self, checkpoint_id: str) -> Path:
        return self.directory / checkpoint_id

    def find(self, checkpoint_id: str) -> Checkpoint:
        """Return a checkpoint that has not expired. Raises: CheckpointNotFound, CheckpointCorrupt."""
        if is_id(checkpoint_id):
            found = self._read(checkpoint_id)
            if found is not None and found.expire_time > self.now():
                return found
        raise not_found(checkpoint_id)

    def list(self) -> tuple[Checkpoint, ...]:
        """Return all readable checkpoints that have not expired, oldest first."""
        now = self.now()
        found = (checkpoint for checkpoint in self._all() if checkpoint.expire_time > now)
        return tuple(sorted(found, key=lambda each: (each.create_time, each.checkpoint_id)))

    def usage(self) -> StoreUsage:
        found = tuple(self._all())
        return StoreUsage(count=len(found), size_bytes=sum(each.size_bytes for each in found))

    def verify(self, checkpoint: Checkpoint) -> None:
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

    def begin(self, checkpoint_id: str, size_bytes: int = 0, run: str = "") -> Draft:
        """Start to write a checkpoint; complete or abandon it. Makes room for a size that is known.

        Raises:
            CheckpointStoreFull, StoreError: There is none, or the disk cannot be written.
        """
        with _errors(checkpoint_id):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(size_bytes, run=run)
            directory = self.directory / f"{_PART_PREFIX}{checkpoint_id}-{os.getpid()}"
            directory.mkdir(mode=0o700)
            lock = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            return Draft(directory, lock)

    def complete(self, draft: Draft, checkpoint: Checkpoint) -> Checkpoint:
        """Store a written checkpoint, and return it with its files. Removes others if it needs their space.

        Raises:
            CheckpointStoreFull, StoreError: It was not stored; abandon it.
        """
        with _errors(checkpoint.checkpoint_id):
            paths = sorted(draft.directory.iterdir())
            complete = checkpoint.model_copy(update={"files": {path.name: _stored(path) for path in paths}})
            manifest = draft.directory / MANIFEST
            manifest.write_text(complete.model_dump_json())
            # At once, they share the commits of the file system: 30 ms, one after the other 70 ms.
            with ThreadPoolExecutor(_FLUSH_THREADS) as threads:
                tuple(threads.map(_flush, [*paths, manifest, draft.directory]))
            with self._locked():
                self._make_room(complete.size_bytes, run=complete.run)
                draft.directory.rename(self.path(complete.checkpoint_id))
            _flush(self.directory)
        os.close(draft.lock)
        return complete

    def abandon(self, draft: Draft) -> None:
        shutil.rmtree(draft.directory, ignore_errors=True)
        os.close(draft.lock)

    def delete(self, checkpoint_id: str) -> None:
        part = self.directory / f"{_PART_PREFIX}{checkpoint_id}-removed-{os.getpid()}"
        with suppress(FileNotFoundError):
            # Under its own name it is complete, also while its files are being removed.
            self.path(checkpoint_id).rename(part)
            shutil.rmtree(part, ignore_errors=True)

    def sweep(self) -> None:
        """Remove expired checkpoints, and what killed daemons left. Raises: OSError."""
        now = self.now()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in self.directory.glob(f"{_PREFIX}*"):
            try:
                found = self._read(directory.name)
            except CheckpointCorrupt as error:
                # Another version of envd may be able to read it, so it is kept for as long as a checkpoint.
                is_over = self._used_s(directory) + self.settings.ttl_s <= now.timestamp()
                if is_over:
                    logger.warning("%s; it is removed now", error)
            else:
                is_over = found is not None and found.expire_time <= now
            if is_over:
                self.delete(directory.name)
        for part in self.directory.glob(f"{_PART_PREFIX}*"):
            with suppress(OSError):
                lock = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(part, ignore_errors=True)
                finally:
                    os.close(lock)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other writers, also of other daemons, which would count without this one's checkpoint."""
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, size_bytes: int, *, run: str) -> None:
        """Remove the least recently used checkpoints until one more fits.

        Raises:
            CheckpointStoreFull: It cannot fit; nothing was removed.
        """
        settings = self.settings
        kept = {each.checkpoint_id: each for each in self._all()}
        removable = sorted((each for each in kept.values() if not each.pinned), key=self._removal_order)
        free_bytes = shutil.disk_usage(self.directory).free
        victims: deque[Checkpoint] = deque()
        while True:
            candidates = removable
            own_bytes = sum(each.size_bytes for each in kept.values() if each.run == run) + size_bytes
            all_bytes = sum(each.size_bytes for each in kept.values()) + size_bytes
            if own_bytes > settings.run_limit_gib * _GIB:
                limit = f"run {run!r} may hold checkpoints.run_limit_gib = {settings.run_limit_gib:g}"
                candidates = [each for each in removable if each.run == run]
            elif all_bytes > settings.limit_gib * _GIB:
                limit = f"all may hold checkpoints.limit_gib = {settings.limit_gib:g}"
            elif free_bytes < self.reserve_bytes:
                limit = f"limits.disk_reserve_mib = {self.reserve_bytes >> 20} must stay free"
            else:
                break
            if not candidates:
                raise CheckpointStoreFull(
                    f"no space for a checkpoint of {size_bytes / (1 << 20):.1f} MiB: {limit}, and removing others that"
                    " are not pinned does not suffice; delete checkpoints, or raise the limit"
                )
            victim = candidates[0]
            removable.remove(victim)
            del kept[victim.checkpoint_id]
            free_bytes += victim.size_bytes
            victims.append(victim)
        for victim in victims:
            self.delete(victim.checkpoint_id)

    def _removal_order(self, checkpoint: Checkpoint) -> tuple[bool, float]:
        """Return a key: those that no client asked for go first, then those that were not used for longest."""
        return not checkpoint.trigger, self._used_s(self.path(checkpoint.checkpoint_id))

    def _used_s(self, directory: Path) -> float:
        try:
            return directory.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _all(self) -> Iterator[Checkpoint]:
        for directory in self.directory.glob(f"{_PREFIX}*"):
            with suppress(CheckpointCorrupt):
                found = self._read(directory.name)
                if found is not None:
                    yield found

    def _read(self, checkpoint_id: str) -> Checkpoint | None:
        path = self.path(checkpoint_id) / MANIFEST
        try:
            found = Checkpoint.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise CheckpointCorrupt(
                f"checkpoint {checkpoint_id}: {MANIFEST} cannot be read; delete the checkpoint"
            ) from error
        if found.checkpoint_id != checkpoint_id:
            raise CheckpointCorrupt(f"checkpoint {checkpoint_id}: its files are those of {found.checkpoint_id}")
        return found


@contextmanager
def _errors(checkpoint_id: str) -> Iterator[None]:
    """Raise OSError of the block as CheckpointStoreFull or StoreError."""
    try:
        yield
    except OSError as error:
        raise store_error(checkpoint_id, error) from error


def is_id(text: str) -> bool:
    """Return whether a text may be a checkpoint's id, which is part of a path."""
    return text.startswith(_PREFIX) and text.removeprefix(_PREFIX).isalnum() and len(text) <= _MAX_ID_CHARS


def not_found(checkpoint_id: str) -> CheckpointNotFound:
    """Return the error for a checkpoint that does not exist or is another owner's: the same for both."""
    return CheckpointNotFound(
        f"checkpoint {checkpoint_id}: not found on this host (deleted, expired, or never created); list them with"
        " ListCheckpoints"
    )


def store_error(checkpoint_id: str, error: OSError) -> CheckpointStoreFull | StoreError:
    """Return the error for a checkpoint that could not be written."""
    kind = CheckpointStoreFull if error.errno in _FULL else StoreError
    return kind(f"checkpoint {checkpoint_id}: not stored: {error}")


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
