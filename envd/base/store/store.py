"""The SQLite database of a daemon. Writes apply in call order and do not block the event loop for long.

A commit takes 0.3 ms and does not wait for the disk. Handing it to a thread and back takes 4 ms in one of ten cases and
20 ms in one of a hundred, if guests keep the host's processors busy. So the event loop writes by itself while that is
fast. After a slow write, a thread writes for a hundred times as long as the slow write took. So even on a bad disk the
event loop spends at most a hundredth of its time waiting for writes.

Invariants:

* The statements of one `commit` or `write_soon` apply together or not at all, after those of every earlier call.
* Calls in one iteration of the event loop, or calls that wait for the thread, are committed at once, so many steps cost
  one commit.
* A commit survives the end of the daemon at once (the kernel has it), but a power cut only after the next checkpoint:
  with `synchronous=NORMAL` in WAL mode, only the first commit after a checkpoint waits for the disk.
* Checkpoints do wait for the disk, up to a second on a busy one, so they have a thread of their own.

Times in its rows are seconds since 1970, on the host's clock: the monotonic one does not survive a restart of the host.
"""

import asyncio
import itertools
import logging
import math
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from envd.base.errors import ConfigError, StoreError
from envd.base.store.upgrades import UPGRADES

#: Version of the schema below. A newer database is refused; an older one is upgraded, see `upgrades`.
SCHEMA_VERSION = 3

SCHEMA = (files("envd.base.store") / "schema.sql").read_text(encoding="ascii")


class Statement(NamedTuple):
    """One change."""

    sql: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """One episode that holds a lease."""

    episode_id: str
    owner: str
    """Name of the token that created it."""
    spec: str
    """Its `EpisodeSpec` as JSON."""
    progress: str
    """Its `Progress` after the last step as JSON."""
    epoch: int
    machine_id: str
    connection: str
    """Connection state of its desktop after the last step, as JSON."""
    lease_ttl_s: float
    expire_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow:
    """One request that changes something, written before it does."""

    kind: str
    """reset, step, evaluate, fork or rollback."""
    scope: str
    """The episode id; empty for a reset."""
    request_id: str
    fingerprint: bytes
    answer: str
    """The response as JSON; empty while the request runs, and after a crash during it."""
    time_s: float
    """Time of the write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """One machine that exists, or may exist; written before the hypervisor is asked for it."""

    machine_id: str
    pool: str
    enter_time_s: float


Row = TypeVar("Row", EpisodeRow, AnswerRow, MachineRow)

TABLES: dict[type[Any], str] = {EpisodeRow: "episodes", AnswerRow: "answers", MachineRow: "machines"}


def is_well_typed(row: EpisodeRow | AnswerRow | MachineRow) -> bool:
    """Return whether every value has its column's type; SQLite stores any value in any column."""
    return all(isinstance(getattr(row, field.name), field.type) for field in fields(row))  # type: ignore[arg-type]


def upsert(row: EpisodeRow | AnswerRow | MachineRow) -> Statement:
    """Insert a row, or replace the row of the same key."""
    kind = type(row)
    return Statement(_PUT[kind], tuple([getattr(row, name) for name in COLUMNS[kind]]))


#: Column names by table, in the order of the row's fields.
COLUMNS: dict[type[Any], tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind)) for kind in (EpisodeRow, AnswerRow, MachineRow)
}
_PUT = {
    kind: f"INSERT OR REPLACE INTO {TABLES[kind]} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"  # noqa: S608
    for kind, names in COLUMNS.items()
}


def renew_lease(episode_id: str, *, lease_ttl_s: float, expire_time_s: float) -> Statement:
    return Statement(
        "UPDATE episodes SET lease_ttl_s = ?, expire_time_s = ? WHERE episode_id = ?",
        (lease_ttl_s, expire_time_s, episode_id),
    )


def delete_episode(episode_id: str) -> tuple[Statement, ...]:
    return (
        Statement("DELETE FROM episodes WHERE episode_id = ?", (episode_id,)),
        Statement("DELETE FROM answers WHERE scope = ?", (episode_id,)),
    )


def delete_answer(*, kind: str, scope: str, request_id: str) -> Statement:
    return Statement("DELETE FROM answers WHERE scope = ? AND kind = ? AND request_id = ?", (scope, kind, request_id))


def delete_machine(machine_id: str) -> Statement:
    return Statement("DELETE FROM machines WHERE machine_id = ?", (machine_id,))


logger = logging.getLogger(__name__)

FILE_NAME = "envd.db"

#: Statements, and bytes of their values, between two checkpoints: several hundred steps, and some megabytes of log.
_CHECKPOINT_EVERY = 2000
_CHECKPOINT_BYTES = 8 << 20
#: A log file above this size is truncated after a checkpoint; below, SQLite overwrites it from its beginning.
_MAX_LOG_FILE_BYTES = 64 << 20
#: Pages of 4 KiB that may be unused; more are returned to the file system, this many in one transaction.
_MAX_FREE_PAGES = 1024

#: A write on the event loop that takes longer is slow; other work on a full host may delay one by half of that.
_SLOW_S = 0.02
_THREAD_SHARE = 100
#: How long the thread writes after a checkpoint was requested: the first write after a checkpoint waits for the disk.
_CHECKPOINT_S = 2.0

#: SQLite's `auto_vacuum` mode in which unused pages are returned on request.
_INCREMENTAL = 2

#: Marks our files among SQLite databases: "envd".
_APPLICATION_ID = 0x656E7664

#: By SQLite's primary result code.
_REMEDIES = {sqlite3.SQLITE_FULL: "free space on its disk", sqlite3.SQLITE_IOERR: "check its disk, which may be full"}


class Store:
    """A database of episodes, responses and machines. This one keeps nothing, `SqliteStore` keeps them in a file."""

    def commit(self, *statements: Statement) -> "asyncio.Future[None]":  # noqa: ARG002 -- kept by `SqliteStore`
        """Write; the future is done after the commit. Raises: StoreError, here or there: nothing was written."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def write_soon(self, *statements: Statement) -> None:
        """Write without waiting; a failure is logged, and the next audit repairs it."""

    async def rows(self, kind: type[Row]) -> list[Row]:  # noqa: ARG002 -- kept by `SqliteStore`
        """Return a table after all earlier calls have applied. Raises: StoreError."""
        return []


@dataclass(slots=True, eq=False)
class _Job:
    """One call: the statements of a transaction, or a query."""

    done: "asyncio.Future[Any] | None"
    statements: tuple[Statement, ...] = ()
    query: Callable[[sqlite3.Connection], Any] | None = None
    result: Any = None
    error: StoreError | None = None


class SqliteStore(Store):
    """The database of one state directory; see `Store`. Belongs to the event loop that created it."""

    def __init__(
        self, path: Path, *, monotonic: Callable[[], float] = time.monotonic, max_log_bytes: int = _MAX_LOG_FILE_BYTES
    ) -> None:
        """Open the file, created if needed with mode 0600; `monotonic` times the writes.

        Raises:
            ConfigError: It cannot be opened, is not a database of envd, or a newer envd wrote it.
        """
        self.path = path
        self._loop = asyncio.get_running_loop()
        self._monotonic = monotonic
        self._max_log_bytes = max_log_bytes
        self._connection = _open(path)
        """Used by the thread while it has jobs, else by the event loop."""
        self._pending: list[_Job] = []
        """Jobs to run at the end of this iteration of the event loop."""
        self._thread_batch_count = 0
        """Batches that the thread has not completed."""
        self._thread_until_s = -math.inf
        self._jobs: queue.SimpleQueue[list[_Job] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="envd-store", daemon=True)
        self._log_length = 0
        """Statements since the last checkpoint."""
        self._log_bytes = 0
        """Bytes of their values."""
        self._should_checkpoint = threading.Event()
        self._checkpointer = threading.Thread(target=self._checkpoint, name="envd-store-checkpoint", daemon=True)
        self._thread.start()
        self._checkpointer.start()

    def commit(self, *statements: Statement) -> "asyncio.Future[None]":
        return self._submit(statements=statements)

    def write_soon(self, *statements: Statement) -> None:
        if not self._closed:
            self._add(_Job(None, statements=statements))

    async def rows(self, kind: type[Row]) -> list[Row]:
        def read(connection: sqlite3.Connection) -> list[Row]:
            names = COLUMNS[kind]
            found = connection.execute(f"SELECT {', '.join(names)} FROM {TABLES[kind]}")  # noqa: S608 -- our own names
            return [kind(**dict(zip(names, values, strict=True))) for values in found]

        return await self._submit(query=read)  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        """Run the pending jobs and close the file. Idempotent."""
        if not self._closed:
            self._closed = True
            self._give_to_thread(self._pending)
            self._pending = []
            self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _submit(
        self, *, statements: tuple[Statement, ...] = (), query: Callable[[sqlite3.Connection], Any] | None = None
    ) -> "asyncio.Future[Any]":
        if self._closed:
            raise StoreError(f"{self.path} was closed; the daemon is stopping")
        done: asyncio.Future[Any] = self._loop.create_future()
        self._add(_Job(done, statements=statements, query=query))
        return done

    def _add(self, job: _Job) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(job)

    def _flush(self) -> None:
        jobs, self._pending = self._pending, []
        if not jobs:
            return  # the store was closed meanwhile
        begin_s = self._monotonic()
        if self._thread_batch_count or begin_s < self._thread_until_s or any(job.query for job in jobs):
            self._give_to_thread(jobs)
            return
        self._run(jobs)
        _resolve(jobs)
        took_s = self._monotonic() - begin_s
        if took_s > _SLOW_S:
            self._thread_until_s = begin_s + took_s * (1 + _THREAD_SHARE)
        if self._needs_checkpoint:
            self._request_checkpoint()
            self._thread_until_s = max(self._thread_until_s, begin_s + _CHECKPOINT_S)

    def _give_to_thread(self, jobs: list[_Job]) -> None:
        self._thread_batch_count += 1
        self._jobs.put(jobs)

    @property
    def _needs_checkpoint(self) -> bool:
        return self._log_length >= _CHECKPOINT_EVERY or self._log_bytes >= _CHECKPOINT_BYTES

    def _request_checkpoint(self) -> None:
        self._log_length = 0
        self._log_bytes = 0
        self._should_checkpoint.set()

    # -- on the threads ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        ended = False
        while not ended:
            waiting = [self._jobs.get()]
            while not self._jobs.empty():
                waiting.append(self._jobs.get())
            ended = None in waiting
            batches = [jobs for jobs in waiting if jobs is not None]
            jobs = list(itertools.chain.from_iterable(batches))
            self._run(jobs)
            if self._needs_checkpoint or ended:
                self._request_checkpoint()
                # The event loop does not write while the log is truncated.
                self._thread_until_s = max(self._thread_until_s, self._monotonic() + _CHECKPOINT_S)
            self._resolve_on_loop(jobs, len(batches))
        self._checkpointer.join()
        self._connection.close()

    def _resolve_on_loop(self, jobs: list[_Job], batch_count: int) -> None:
        def resolve() -> None:
            self._thread_batch_count -= batch_count
            _resolve(jobs)

        try:
            self._loop.call_soon_threadsafe(resolve)
        except RuntimeError:
            logger.debug("%s: the event loop ended before its jobs", self.path)

    def _checkpoint(self) -> None:
        """Move the log into the database on request; a passive checkpoint does not block writers."""
        log = self.path.with_name(f"{self.path.name}-wal")
        connection = sqlite3.connect(self.path, isolation_level=None)
        while not self._closed:
            self._should_checkpoint.wait()
            self._should_checkpoint.clear()
            try:
                _return_free_pages(connection)
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
                if log.stat().st_size > self._max_log_bytes:
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except (sqlite3.Error, OSError) as error:
                logger.warning("%s: checkpoint failed: %s", self.path, error)
        connection.close()

    # -- on the event loop or the thread -------------------------------------------------------------------------

    def _run(self, jobs: list[_Job]) -> None:
        """Run jobs in order, adjacent writes in one transaction."""
        writes: list[_Job] = []
        for job in jobs:
            if job.query is None:
                writes.append(job)
                continue
            self._write(writes)
            writes = []
            try:
                job.result = job.query(self._connection)
            except Exception as error:
                job.error = self._failure(error)
        self._write(writes)

    def _write(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for job in jobs:
                self._log_length += len(job.statements)
                for statement in job.statements:
                    self._log_bytes += sum(len(v) for v in statement.values if isinstance(v, (str, bytes)))
                    self._connection.execute(statement.sql, statement.values)
            self._connection.execute("COMMIT")
        except Exception as error:
            if self._connection.in_transaction:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
            if len(jobs) > 1 and not isinstance(error, sqlite3.Error):
                # A value that SQLite cannot store, such as an integer of 65 bits, fails its own commit alone.
                for job in jobs:
                    self._write([job])
                return
            logger.error("%s: %d changes were not written: %s", self.path, len(jobs), error)  # noqa: TRY400
            for job in jobs:
                job.error = self._failure(error)

    def _failure(self, error: Exception) -> StoreError:
        if isinstance(error, sqlite3.Error):
            return StoreError(f"{self.path} is not usable: {error}; check whether the disk is full")
        return StoreError(f"{self.path}: a value cannot be stored: {error!r}; report this with the daemon's log")


def _resolve(jobs: Iterable[_Job]) -> None:
    for job in jobs:
        if job.done is None or job.done.done():  # no caller waits, or it was cancelled
            continue
        if job.error is not None:
            job.done.set_exception(job.error)
        else:
            job.done.set_result(job.result)


def _return_free_pages(connection: sqlite3.Connection) -> None:
    """Shrink the database file by the pages that deleted rows left."""
    (count,) = connection.execute("PRAGMA freelist_count").fetchone()
    for _ in range(count // _MAX_FREE_PAGES):
        # Python's `execute` would end this statement after its first page.
        connection.executescript(f"PRAGMA incremental_vacuum({_MAX_FREE_PAGES})")


def _text(value: bytes) -> str | bytes:
    """Return a text; a damaged one as its bytes, which no column of a row has, so that it fails that row alone."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _open(path: Path) -> sqlite3.Connection:
    try:
        # Before SQLite creates it: its log files inherit the mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.text_factory = _text
        try:
            _prepare(path, connection)
        except BaseException:
            connection.close()
            raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror}; choose another --state-dir") from error
    except sqlite3.Error as error:
        # An extended code has the primary one in its lower byte. For the log's index, a full disk is an I/O error.
        primary_code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        remedy = _REMEDIES.get(primary_code, "move it away to start with an empty database")
        raise ConfigError(f"{path} is not usable: {error}; {remedy}") from error
    return connection


def _prepare(path: Path, connection: sqlite3.Connection) -> None:
    """Check that the file is ours, and create or upgrade its schema."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (table_count,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if (table_count or version) and application != _APPLICATION_ID:
        raise ConfigError(f"{path} is a database of another program; move it away, or choose another --state-dir")
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"{path} was written by a newer envd (schema {version}, this one supports {SCHEMA_VERSION}); run that one,"
            " or move the file away to start with an empty database"
        )
    # Before the first table is created; a database of an earlier release is rewritten once.
    connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
    if connection.execute("PRAGMA auto_vacuum").fetchone() != (_INCREMENTAL,):
        try:
            connection.execute("VACUUM")
        except sqlite3.OperationalError as error:
            logger.warning("%s: its unused pages stay allocated: %s", path, error)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    if not version:
        connection.executescript(
            f"BEGIN IMMEDIATE; PRAGMA application_id = {_APPLICATION_ID}; {SCHEMA}"
            f" PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
    elif version < SCHEMA_VERSION:
        connection.execute("BEGIN IMMEDIATE")
        for each in range(version, SCHEMA_VERSION):
            UPGRADES[each](connection)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
