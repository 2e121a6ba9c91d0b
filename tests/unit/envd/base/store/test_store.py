"""The database: commits are durable, ordered and atomic, and foreign files are refused."""

import asyncio
import resource
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from envd.base.errors import ConfigError, StoreError
from envd.base.store.store import (
    SCHEMA,
    SCHEMA_VERSION,
    AnswerRow,
    MachineRow,
    SqliteStore,
    Statement,
    Store,
    delete_episode,
    delete_machine,
    upsert,
)
from tests.support.clock import until

WRONG = Statement("INSERT INTO nowhere VALUES (1)", ())


def machine(machine_id: str, pool: str = "desktop") -> MachineRow:
    return MachineRow(machine_id=machine_id, pool=pool, enter_time_s=1.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "envd.db"


class Clock:
    """A clock that only tests advance."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Value:
    """A value that records which thread writes it, and advances the clock by its write."""

    def __init__(self, clock: Clock, *, takes_s: float = 0.0, hold: threading.Event | None = None) -> None:
        self.clock, self.takes_s, self.hold = clock, takes_s, hold
        self.started = threading.Event()
        self.thread: threading.Thread | None = None

    def __conform__(self, _protocol: object) -> str:
        self.thread = threading.current_thread()
        self.clock.now_s += self.takes_s
        self.started.set()
        if self.hold is not None:
            self.hold.wait(10)
        return "value"

    @property
    def statement(self) -> Statement:
        return Statement("DELETE FROM machines WHERE machine_id = ?", (self,))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(path: Path, clock: Clock) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, monotonic=clock)
    yield store
    await store.aclose()


def seen_from_outside(path: Path) -> list[str]:
    """Return the machines that another process would find now."""
    connection = sqlite3.connect(path)
    try:
        return [machine_id for (machine_id,) in connection.execute("SELECT machine_id FROM machines")]
    finally:
        connection.close()


async def test_committed_rows_are_visible_to_other_processes_and_read_back_unchanged(
    store: SqliteStore, path: Path
) -> None:
    await store.commit(upsert(machine("one")), upsert(machine("two")))
    assert seen_from_outside(path) == ["one", "two"]
    await store.commit(upsert(machine("one", pool="other")), delete_machine("two"))
    assert await store.rows(MachineRow) == [machine("one", pool="other")]
    answer = AnswerRow(
        kind="step", scope="ep-1", request_id="r", fingerprint=b"\x00\xff", answer='{"a": "\\ud800"}', time_s=2.25
    )
    await store.commit(upsert(answer))
    assert await store.rows(AnswerRow) == [answer]


async def test_the_statements_of_one_commit_are_atomic(store: SqliteStore, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StoreError, match="nowhere"):
        await store.commit(upsert(machine("one")), WRONG)
    assert await store.rows(MachineRow) == []
    assert "were not written" in caplog.text
    await store.commit(upsert(machine("two")))
    assert await store.rows(MachineRow) == [machine("two")], "the store works after a failure"


@pytest.mark.parametrize("on_thread", [False, True])
@pytest.mark.parametrize("value", ["\ud800", 1 << 70])
async def test_a_value_that_cannot_be_stored_fails_its_own_commit(
    store: SqliteStore, clock: Clock, path: Path, value: Any, on_thread: bool
) -> None:
    if on_thread:
        await store.commit(Value(clock, takes_s=30).statement)
    before = store.commit(upsert(machine("before")))
    wrong = store.commit(upsert(machine("wrong")), Statement("DELETE FROM machines WHERE machine_id = ?", (value,)))
    after = store.commit(upsert(machine("after")))
    async with asyncio.timeout(30):
        with pytest.raises(StoreError, match="a value cannot be stored"):
            await wrong
        await asyncio.gather(before, after)
        await store.commit(upsert(machine("later")))
    assert seen_from_outside(path) == ["after", "before", "later"]


async def test_a_query_that_fails_hinders_no_later_call(store: SqliteStore, clock: Clock) -> None:
    def fail(_connection: sqlite3.Connection) -> None:
        raise KeyError("x")

    await store.commit(Value(clock, takes_s=30).statement)
    async with asyncio.timeout(30):
        with pytest.raises(StoreError, match="KeyError"):
            await store._submit(query=fail)
        await store.commit(upsert(machine("later")))


async def test_statements_apply_in_call_order(store: SqliteStore) -> None:
    for number in range(200):
        store.write_soon(upsert(machine("one", pool=f"p{number}")))
        if number % 3 == 0:
            store.write_soon(delete_machine("one"))
    assert await store.rows(MachineRow) == [machine("one", pool="p199")]


async def test_after_a_slow_write_the_thread_writes_for_100_times_as_long(store: SqliteStore, clock: Clock) -> None:
    loop_thread = threading.current_thread()

    async def loop_writes(*, takes_s: float = 0.0) -> bool:
        value = Value(clock, takes_s=takes_s)
        await store.commit(value.statement)
        return value.thread is loop_thread

    assert await loop_writes(takes_s=0.015)
    assert await loop_writes(takes_s=0.5)
    assert not await loop_writes(takes_s=30)
    clock.now_s += 19
    assert not await loop_writes()
    clock.now_s += 2
    assert await loop_writes()


async def test_the_thread_does_the_first_writes_after_a_checkpoint(store: SqliteStore, clock: Clock) -> None:
    await store.commit(*(upsert(machine("one")) for _ in range(2000)))
    value = Value(clock)
    await store.commit(value.statement)
    assert value.thread is not threading.current_thread()


async def test_no_write_passes_a_write_of_the_thread(store: SqliteStore, clock: Clock, path: Path) -> None:
    release = threading.Event()
    await store.commit(Value(clock, takes_s=0.1).statement)
    slow = Value(clock, hold=release)
    first = store.commit(upsert(machine("one")), slow.statement)
    await asyncio.to_thread(slow.started.wait, 10)
    clock.now_s += 1000  # the slow period is over
    last = store.commit(delete_machine("one"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not last.done()
    release.set()
    await asyncio.gather(first, last)
    assert seen_from_outside(path) == []


async def test_writes_that_wait_together_are_committed_at_once(store: SqliteStore, clock: Clock, path: Path) -> None:
    release = threading.Event()
    await store.commit(Value(clock, takes_s=1.0).statement)
    slow = Value(clock, hold=release)
    first = store.commit(slow.statement)
    await asyncio.to_thread(slow.started.wait, 10)
    others = [store.commit(upsert(machine(f"m{n}"))) for n in range(50)]
    await asyncio.sleep(0)
    commits: list[str] = []
    store._connection.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    release.set()
    await asyncio.gather(first, *others)
    assert len(commits) == 2, "the slow write, and all that waited for it"
    assert len(seen_from_outside(path)) == 50


async def test_writes_of_one_loop_iteration_are_one_commit(store: SqliteStore, path: Path) -> None:
    commits: list[str] = []
    store._connection.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    store.write_soon(upsert(machine("one")))
    store.write_soon(upsert(machine("two")))
    await store.commit(upsert(machine("three")))
    assert len(commits) == 1
    store.write_soon(delete_machine("two"))
    await until(lambda: seen_from_outside(path) == ["one", "three"])
    assert len(commits) == 2


async def test_closing_commits_pending_writes_and_refuses_new_ones(path: Path) -> None:
    store = SqliteStore(path)
    store.write_soon(upsert(machine("one")))
    await store.aclose()
    await store.aclose()
    store.write_soon(upsert(machine("two")))
    with pytest.raises(StoreError, match="closed"):
        await store.commit(upsert(machine("three")))
    assert seen_from_outside(path) == ["one"]


async def test_a_cancelled_caller_does_not_undo_its_commit(store: SqliteStore) -> None:
    task = store.commit(upsert(machine("one")))
    task.cancel()
    assert await store.rows(MachineRow) == [machine("one")]
    assert task.cancelled()


async def test_other_users_cannot_read_it_and_commits_do_not_wait_for_the_disk(store: SqliteStore, path: Path) -> None:
    await store.commit(upsert(machine("one")))
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (1,)


def large(number: int) -> AnswerRow:
    answer = "x" * 500_000
    return AnswerRow(
        kind="step", scope=f"ep-{number}", request_id="r", fingerprint=b"", answer=answer, time_s=float(number)
    )


@pytest.mark.parametrize(
    "rows",
    [[machine(f"m{number}", pool="p" * 1000) for number in range(500)], [large(number) for number in range(20)]],
    ids=["many", "large"],
)
async def test_the_log_does_not_grow_without_bound(store: SqliteStore, path: Path, rows: list[Any]) -> None:
    log = path.with_name(f"{path.name}-wal")
    before, pause_s = -1, 0.01
    while log.stat().st_size > before:
        # After a full checkpoint the log is overwritten from its beginning; a slow disk takes a while.
        await asyncio.sleep(pause_s)
        before, pause_s = log.stat().st_size, 1.5 * pause_s
        await store.commit(*map(upsert, rows))
    assert len(await store.rows(type(rows[0]))) == len(rows)


async def test_the_database_shrinks_when_its_rows_are_deleted(path: Path, clock: Clock) -> None:
    store = SqliteStore(path, monotonic=clock, max_log_bytes=1_000_000)
    log = path.with_name(f"{path.name}-wal")
    await store.commit(*(upsert(large(number)) for number in range(40)))
    await until(lambda: path.stat().st_size >= 20_000_000)
    await store.commit(*(statement for number in range(40) for statement in delete_episode(f"ep-{number}")))
    async with asyncio.timeout(60):
        while path.stat().st_size > 6_000_000 or log.stat().st_size > 1_000_000:
            store._request_checkpoint()
            await asyncio.sleep(0.01)
    assert await store.rows(AnswerRow) == []
    await store.aclose()


async def test_the_database_of_an_earlier_release_shrinks_too(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(
        f"PRAGMA application_id = {0x656E7664}; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};"
        " PRAGMA journal_mode = WAL;"
    )
    connection.execute("INSERT INTO answers VALUES ('step', 'ep', 'r', x'00', hex(zeroblob(4000000)), 1)")
    connection.execute("INSERT INTO machines VALUES ('m1', 'desktop', 1.5)")
    connection.execute("DELETE FROM answers")
    connection.commit()
    connection.close()
    assert path.stat().st_size > 4_000_000
    store = SqliteStore(path)
    assert [row.machine_id for row in await store.rows(MachineRow)] == ["m1"]
    assert store._connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    await store.aclose()
    assert path.stat().st_size < 1_000_000


async def test_a_database_of_a_newer_envd_is_refused_and_unchanged(path: Path) -> None:
    await SqliteStore(path).aclose()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(
        ConfigError, match=f"newer envd .schema {SCHEMA_VERSION + 1}, this one supports {SCHEMA_VERSION}"
    ):
        SqliteStore(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to be taken for one" * 20])
async def test_a_file_that_is_not_a_database_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"usable.*; move it away to start with an empty database"):
        SqliteStore(path)
    assert path.read_bytes() == content


async def test_a_full_disk_is_an_error_that_asks_for_space(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def full(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        connection.execute("PRAGMA max_page_count = 2")
        return connection

    monkeypatch.setattr(sqlite3, "connect", full)
    with pytest.raises(ConfigError, match="database or disk is full; free space on its disk"):
        SqliteStore(path)


async def test_a_disk_too_full_for_the_index_of_the_log_is_not_taken_for_a_damaged_database(path: Path) -> None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, unlimited[1]))  # the index has 32 KiB at once
    try:
        with pytest.raises(ConfigError, match="disk I/O error; check its disk, which may be full"):
            SqliteStore(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


async def test_another_programs_database_is_refused(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    with pytest.raises(ConfigError, match="another program"):
        SqliteStore(path)


async def test_a_missing_directory_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        SqliteStore(tmp_path / "nowhere" / "envd.db")


async def test_a_store_without_a_file_keeps_nothing() -> None:
    null = Store()
    await null.commit(upsert(machine("one")))
    null.write_soon(upsert(machine("one")))
    assert await null.rows(MachineRow) == []


WRITER = """
import asyncio, sys
from pathlib import Path
from typing import Any
from envd.base.store.store import MachineRow, upsert
from envd.base.store.store import SqliteStore

async def write_endlessly():
    store = SqliteStore(Path(sys.argv[1]))
    for number in range(1_000_000):
        await store.commit(upsert(MachineRow(machine_id=f"m{number}", pool="p", enter_time_s=0.0)))
        print(number, flush=True)

asyncio.run(write_endlessly())
"""


def test_a_killed_process_loses_no_commit(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(200):
            process.stdout.readline()
        process.kill()
        last = max([199, *(int(line) for line in process.stdout if line.endswith("\n"))])
    assert len(seen_from_outside(path)) > last
