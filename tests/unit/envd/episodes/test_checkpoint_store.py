"""The store of checkpoints: complete or absent, verified, bounded, and swept."""

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from envd.base.config import CheckpointsConfig
from envd.base.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointStoreFull, CheckpointUnusable, StoreError
from envd.episodes.checkpoints import store as module
from envd.episodes.checkpoints.manifest import Manifest, StoredFile
from envd.episodes.checkpoints.store import EXPIRED_SWEEPS, CheckpointStore, in_thread
from envd.episodes.progress import Progress
from tests.support.episode_values import episode_spec

MIB = 1 << 20
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Home:
    """A store with a clock that tests set."""

    store: CheckpointStore = field(init=False)
    directory: Path
    limits_mib: tuple[float, float] = (100, 100)
    """Limit of all checkpoints, and limit of a run."""
    now: datetime = BEGIN
    owners: tuple[str, ...] = ()
    """Tokens of the daemon."""
    used: int = 0

    def __post_init__(self) -> None:
        limits = [mib / 1024 for mib in self.limits_mib]
        settings = CheckpointsConfig(limit_gib=limits[0], run_limit_gib=limits[1])
        self.store = CheckpointStore(
            self.directory, settings=settings, reserve_bytes=0, owners=lambda: self.owners, now=lambda: self.now
        )

    def add(self, name: str, *, mib: float = 1, **changes: Any) -> Manifest:
        """Store a checkpoint; the next one counts as used later."""
        described = self.described(name, **changes)
        draft = self.store.begin(described)
        (draft.directory / "memory").write_bytes(os.urandom(int(mib * MIB)))
        (draft.directory / "screen").write_bytes(b"screen")
        try:
            stored = self.store.complete(draft, described)
        except BaseException:
            self.store.abandon(draft)
            raise
        self.used += 1
        os.utime(self.store.path(stored.checkpoint_id), (self.used, self.used))
        return stored

    def described(self, name: str, **changes: Any) -> Manifest:
        spec = episode_spec(**{each: changes.pop(each) for each in ("run", "owner") if each in changes})
        fields: dict[str, Any] = {
            "checkpoint_id": f"ckpt-{name}",
            "label": "",
            "spec": spec,
            "progress": Progress(step_count=1),
            "template_digest": "",
            "frame_id": "",
            "create_time": self.now,
            "expire_time": self.now + timedelta(hours=1),
            "pinned": False,
            "fingerprint": "",
        }
        return Manifest.model_validate(fields | changes)

    def sweep_until_sure(self) -> None:
        for _ in range(EXPIRED_SWEEPS):
            self.store.sweep()

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "checkpoints")


def test_a_stored_checkpoint_is_found_until_it_expires_or_is_deleted(home: Home) -> None:
    first = home.add("a")
    home.now += timedelta(minutes=1)
    second = home.add("b")
    assert home.store.list() == (first, second)
    assert home.store.find("ckpt-a") == first
    assert first.size_bytes == MIB + len(b"screen")
    assert home.store.usage() == (2, 2 * first.size_bytes)
    home.now = first.expire_time
    assert home.store.list() == (second,)
    with pytest.raises(CheckpointNotFound, match="ckpt-a: not found on this host"):
        home.store.find("ckpt-a")
    home.store.delete("ckpt-b")
    home.store.delete("ckpt-b")
    home.sweep_until_sure()
    assert home.names == []


def test_files_that_another_directory_has_count_as_not_written(home: Home) -> None:
    stored = home.add("a")
    assert home.store.unshared_bytes(stored) == stored.size_bytes
    os.link(home.store.path("ckpt-a") / "memory", home.directory / "link")
    assert home.store.unshared_bytes(stored) == len(b"screen")
    home.store.delete("ckpt-a")
    with pytest.raises(StoreError, match="ckpt-a: not read"):
        home.store.unshared_bytes(stored)


@pytest.mark.parametrize("checkpoint_id", ["", "ckpt-", "ckpt-../ckpt-a", "../checkpoints/ckpt-a", "/etc", "ckpt-a/."])
def test_an_id_is_never_a_path(home: Home, checkpoint_id: str) -> None:
    home.add("a")
    with pytest.raises(CheckpointNotFound):
        home.store.find(checkpoint_id)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def swap(path: Path) -> None:
    other = path.parent.parent / "ckpt-b" / path.name
    path.write_bytes(other.read_bytes())


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, 10),
    "longer": lengthen,
    "removed": Path.unlink,
    "another checkpoint's": swap,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused_by_name(home: Home, damage: Callable[[Path], None]) -> None:
    stored = home.add("a")
    home.add("b")
    home.store.verify(stored)
    damage(home.store.path("ckpt-a") / "memory")
    with pytest.raises(CheckpointCorrupt, match="checkpoint ckpt-a: file memory"):
        home.store.verify(stored)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 2}', '{"format": "3"}'])
def test_a_damaged_description_is_refused_and_not_listed(home: Home, text: str) -> None:
    home.add("a")
    kept = home.add("b")
    (home.store.path("ckpt-a") / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointCorrupt, match=r"ckpt-a: checkpoint\.json cannot be read"):
        home.store.find("ckpt-a")
    assert home.store.list() == (kept,)
    home.store.delete("ckpt-a")
    assert home.names == ["ckpt-b"]


def test_a_checkpoint_of_a_newer_envd_is_refused_by_name_and_kept(home: Home) -> None:
    home.add("a")
    kept = home.add("b")
    path = home.store.path("ckpt-a") / "checkpoint.json"
    path.write_text(path.read_text().replace('"format":2', '"format":3'))
    with pytest.raises(CheckpointUnusable, match=r"format 3 is of a newer envd; .* use that envd, or delete"):
        home.store.find("ckpt-a")
    assert home.store.list() == (kept,)
    os.utime(path.parent, (BEGIN.timestamp(), BEGIN.timestamp()))
    home.sweep_until_sure()
    assert home.names == ["ckpt-a", "ckpt-b"]
    home.store.delete("ckpt-a")
    assert home.names == ["ckpt-b"]


def test_a_description_of_another_checkpoint_is_refused(home: Home) -> None:
    home.add("a")
    home.store.path("ckpt-a").rename(home.store.path("ckpt-c"))
    with pytest.raises(CheckpointCorrupt, match="its files are those of ckpt-a"):
        home.store.find("ckpt-c")


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    home = Home(tmp_path, limits_mib=(3.5, 3.5))
    home.add("a", pinned=True)
    home.add("b")
    third = home.add("c")
    os.utime(home.store.path("ckpt-b"), (99, 99))  # used after c
    home.add("d")
    assert home.names == ["ckpt-a", "ckpt-b", "ckpt-d"]
    with pytest.raises(CheckpointNotFound):
        home.store.verify(third)


@pytest.mark.parametrize(("limits_mib", "limit"), [((2.5, 100), "limit_gib"), ((100, 2.5), "run_limit_gib")])
def test_a_store_full_of_pinned_checkpoints_refuses_another(
    tmp_path: Path, limits_mib: tuple[float, float], limit: str
) -> None:
    home = Home(tmp_path, limits_mib=limits_mib)
    for name in "ab":
        home.add(name, pinned=True)
    with pytest.raises(CheckpointStoreFull, match=rf"1\.0 MiB: .*checkpoints\.{limit} = 0\.00244"):
        home.add("c")
    assert home.names == ["ckpt-a", "ckpt-b"]


def test_concurrent_writers_stay_within_the_limit(tmp_path: Path) -> None:
    home = Home(tmp_path, limits_mib=(2.5, 100))

    def add(number: int) -> bool:
        try:
            home.add(f"{number}", pinned=True)
        except CheckpointStoreFull:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(add, range(8))) == 2
    assert len(home.names) == 2


def test_space_stays_free_on_the_disk(tmp_path: Path) -> None:
    home = Home(tmp_path / "checkpoints")
    home.add("a")
    full = CheckpointStore(home.directory, settings=CheckpointsConfig(), reserve_bytes=1 << 60, now=lambda: BEGIN)
    with pytest.raises(CheckpointStoreFull, match="disk_reserve_mib"):
        full.begin(home.described("b"))
    assert home.names == ["ckpt-a"], "removing it would not have helped"


def test_space_stays_free_for_files_that_are_still_to_come(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10 * MIB))
    home.store.reserve_bytes = 4 * MIB
    memory = StoredFile(size_bytes=5 * MIB, digest="")
    first = home.store.begin(home.described("a", files={"memory": memory}))
    with pytest.raises(CheckpointStoreFull, match="disk_reserve_mib = 4 must stay free"):
        home.store.begin(home.described("b", files={"memory": memory}))
    home.store.abandon(first)
    home.store.abandon(home.store.begin(home.described("b", files={"memory": memory})))
    assert home.names == []


ALICE, BOB = {"owner": "alice"}, {"owner": "bob"}


@pytest.mark.parametrize(
    ("limits_mib", "added", "kept"),
    [
        pytest.param((4.5, 100), [BOB, *[ALICE] * 4, BOB], "adef", id="the owner that holds most makes room"),
        pytest.param((100, 1.5), [{**ALICE, "run": "x"}, {**BOB, "run": "x"}], "ab", id="runs of two owners are two"),
        pytest.param((100, 2.5), [{"run": "a"}, *[{"run": "b"}] * 3], "acd", id="a run makes room among its own"),
        pytest.param(
            (3.5, 3.5), [{}, {"trigger": "steps"}, {"trigger": "failure"}, {}], "acd", id="what no client asked for"
        ),
    ],
)
def test_those_that_make_room(
    tmp_path: Path, limits_mib: tuple[float, float], added: list[dict[str, Any]], kept: str
) -> None:
    home = Home(tmp_path, limits_mib=limits_mib, owners=("alice", "bob"))
    for name, fields in zip("abcdef", added, strict=False):
        home.add(name, **{"owner": "alice", **fields})
    assert home.names == [f"ckpt-{name}" for name in kept]


def test_an_owner_pins_no_more_than_its_share(tmp_path: Path) -> None:
    home = Home(tmp_path, limits_mib=(4.5, 100), owners=("alice", "bob"))
    for name in "ab":
        home.add(name, owner="alice", pinned=True)
    with pytest.raises(CheckpointStoreFull, match=r"each of 2 tokens may pin its share of checkpoints\.limit_gib"):
        home.add("c", owner="alice", pinned=True)
    home.add("d", owner="alice")
    for name in "ef":
        home.add(name, owner="bob", pinned=True)
    assert home.names == ["ckpt-a", "ckpt-b", "ckpt-e", "ckpt-f"]


def test_a_checkpoint_that_is_read_is_not_removed_and_counts_until_the_end(tmp_path: Path) -> None:
    home = Home(tmp_path, limits_mib=(2.5, 100))
    first = home.add("a")
    with home.store.hold(first):
        home.add("b")
        home.add("c")
        assert home.names == ["ckpt-a", "ckpt-c"]
        home.store.delete("ckpt-a")
        home.add("d")
        assert home.names == ["ckpt-d"]
    home.add("e")
    assert home.names == ["ckpt-d", "ckpt-e"]


def test_without_tokens_there_are_only_checkpoints_without_an_owner(home: Home) -> None:
    home.add("a", owner="alice")
    own = home.add("b")
    assert home.store.list() == (own,)
    with pytest.raises(CheckpointNotFound):
        home.store.find("ckpt-a")
    home.owners = ("alice",)
    assert [each.checkpoint_id for each in home.store.list()] == ["ckpt-a", "ckpt-b"]
    assert home.store.find("ckpt-a").spec.owner == "alice"


def test_a_clock_that_is_ahead_for_some_minutes_removes_nothing(home: Home) -> None:
    kept = home.add("a", pinned=True)
    for _ in range(2):
        home.now += timedelta(days=2)
        for _ in range(3):  # one a minute
            home.store.sweep()
        home.now -= timedelta(days=2)
        home.store.sweep()
    assert home.store.list() == (kept,)


def test_a_description_that_cannot_be_read_now_is_kept(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = home.add("a", pinned=True)
    read = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path.name == "checkpoint.json":
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", failing)
        with pytest.raises(StoreError, match="Input/output error; check the disk, then retry"):
            home.store.find("ckpt-a")
        later = Home(home.directory, now=home.now + timedelta(days=2))
        later.sweep_until_sure()
    assert home.store.list() == (kept,)


def test_descriptions_are_read_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    added = [home.add(name) for name in "abc"]
    other = Home(home.directory)
    assert other.store.list() == tuple(added)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read again"))
        assert other.store.list() == tuple(added)
        assert other.store.usage()[0] == 3
    home.store.delete("ckpt-b")
    added[1:2] = [home.add("b", label="again")]
    assert home.store.list() == tuple(added)
    assert len(other.store.list()) == 3


def test_writers_of_the_same_archive_store_it_once(home: Home) -> None:
    drafts = [home.store.begin(home.described("a")) for _ in range(4)]
    for draft in drafts:
        (draft.directory / "memory").write_bytes(b"the same")
    with ThreadPoolExecutor(4) as threads:
        stored = list(threads.map(lambda draft: home.store.complete(draft, home.described("a")), drafts))
    assert stored == [home.store.find("ckpt-a")] * 4
    assert home.names == ["ckpt-a"]
    other = home.store.begin(home.described("a"))
    with pytest.raises(CheckpointUnusable, match="ckpt-a: this host has another one with this id; delete it first"):
        home.store.complete(other, home.described("a"))
    home.store.abandon(other)
    assert home.names == ["ckpt-a"]


def test_a_lock_that_another_process_holds_is_an_error_after_a_while(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOCK_S", 0.0)
    home.add("a")
    lock = os.open(home.directory, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(StoreError, match="another process has held their lock"):
        home.add("b")
    os.close(lock)
    assert home.names == ["ckpt-a"]


def test_a_draft_is_closed_once(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = os.close
    monkeypatch.setattr(os, "close", lambda descriptor: closed.append(descriptor) or close(descriptor))  # type: ignore[func-returns-value]
    draft = home.store.begin(home.described("a"))
    (draft.directory / "memory").write_bytes(b"x")
    home.store.complete(draft, home.described("a"))
    closed.clear()
    home.store.abandon(draft)
    assert closed == []
    assert home.names == ["ckpt-a"]


async def test_a_cancelled_caller_waits_for_its_thread() -> None:
    began, end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        end.wait()
        ended.set()

    task = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(began.wait)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


@pytest.mark.parametrize(("number", "error"), [(28, CheckpointStoreFull), (122, CheckpointStoreFull), (5, StoreError)])
def test_a_failed_write_is_a_typed_error(
    home: Home, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(number, "failed")

    monkeypatch.setattr(module, "_stored", fail)
    with pytest.raises(error, match="ckpt-a: not stored"):
        home.add("a")
    assert home.names == []


def test_everything_is_on_the_disk_before_a_checkpoint_has_its_name(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    flush, rename = os.fsync, Path.rename

    def noted_flush(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        flush(descriptor)

    def noted_rename(path: Path, target: Path) -> Path:
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_flush)
    monkeypatch.setattr(Path, "rename", noted_rename)
    home.add("a")
    at = events.index("rename")
    (part,) = set(events[:at]) - {"memory", "screen", "checkpoint.json"}
    assert part.startswith("part-ckpt-a-")
    assert events[at + 1 :] == [home.directory.name]


def test_a_sweep_removes_an_unreadable_checkpoint_when_it_would_have_expired(home: Home) -> None:
    home.add("a")
    directory = home.store.path("ckpt-a")
    (directory / "checkpoint.json").write_text('{"format": 2}')
    os.utime(directory, (BEGIN.timestamp(), BEGIN.timestamp()))
    home.now += timedelta(seconds=home.store.settings.ttl_s - 1)
    home.sweep_until_sure()
    assert home.names == ["ckpt-a"]
    home.now += timedelta(seconds=1)
    home.sweep_until_sure()
    assert home.names == []


#: Forks a writer for each line of its input, because to import takes 1 s of CPU time. Writers print their process ids.
ENDLESS = """
import os, sys
from contextlib import suppress
from pathlib import Path
from tests.unit.envd.episodes.test_checkpoint_store import Home
home = Home(Path(sys.argv[1]))
for _ in sys.stdin:
    if os.fork() == 0:
        for number in range(10**6):
            home.add(f"{os.getpid()}x{number}", mib=0.3)
            print(os.getpid(), flush=True)
with suppress(ChildProcessError):
    while os.wait():
        pass
"""


def test_a_kill_at_any_moment_leaves_complete_checkpoints_only(home: Home) -> None:
    command = [sys.executable, "-c", ENDLESS, str(home.directory)]
    killed: set[int] = set()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        for count in (1, 2, 3, 2, 1):
            print("begin", file=writers.stdin, flush=True)
            stored_count = 0
            while stored_count < count:
                pid = int(writers.stdout.readline())
                stored_count += pid not in killed
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    home.store.sweep()
    assert not [name for name in home.names if name.startswith("part-")]
    found = home.store.list()
    assert len(found) >= 9
    assert [each.checkpoint_id for each in sorted(found, key=lambda each: each.checkpoint_id)] == home.names
    for each in found:
        home.store.verify(each)


WRITER = """
import sys, time
from pathlib import Path
from tests.unit.envd.episodes.test_checkpoint_store import Home
home = Home(Path(sys.argv[1]))
draft = home.store.begin(home.described("a"))
(draft.directory / "memory").write_bytes(b"half")
print("writing", flush=True)
time.sleep(600)
"""


def test_a_sweep_removes_what_a_killed_writer_left_and_nothing_of_a_live_one(home: Home) -> None:
    home.add("b")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(home.directory)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        (part,) = home.directory.glob("part-ckpt-a-*")
        home.store.sweep()
        assert home.names == ["ckpt-b", part.name]
        assert [each.checkpoint_id for each in home.store.list()] == ["ckpt-b"]
        writer.send_signal(signal.SIGKILL)
    home.store.sweep()
    assert home.names == ["ckpt-b"]


def test_the_directory_is_readable_by_its_owner_alone(home: Home) -> None:
    home.add("a")
    assert home.directory.stat().st_mode & 0o777 == 0o700
