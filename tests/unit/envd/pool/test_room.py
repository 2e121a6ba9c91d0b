"""The room on a host: its memory, which all machines may grow into, its disk, and the quota of each machine."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from envd.base.checks import Status
from envd.base.config_sources import load
from envd.base.errors import ConfigError, HypervisorError, PoolExhausted, PoolFailing
from envd.pool.pool import Pool
from envd.pool.room import HostClaims, HostRoom, check_memory, growth_of, machines_that_fit, read_available_bytes
from tests.support.clock import begun, run_ready
from tests.support.pool_world import PoolWorld

POOL = {"capacity": 4, "size": 2, "max_idle_s": 1e9, "disk_quota_mib": 100, "expected_memory_mib": 256}

MIB = 1 << 20


class Host:
    """A host whose available memory and free disk space the test sets: 1 GiB and 2 GiB of them stay free."""

    def __init__(self, available_mib: int = 1 << 20) -> None:
        self.available_mib = available_mib
        self.free_mib = 4096
        self.room = HostRoom(
            memory_reserve_bytes=1024 * MIB,
            directory=Path("/state"),
            disk_reserve_bytes=2048 * MIB,
            read_memory=lambda: self.available_mib * MIB,
            read_disk=lambda _: self.free_mib * MIB,
        )


def counts(pool: Pool) -> tuple[int, int, int]:
    s = pool.statistics()
    return s.idle_count, s.leased_count, s.reserved_count


@pytest.fixture
def host() -> Host:
    return Host()


async def test_a_machine_over_its_disk_quota_is_lost_with_the_reason_and_replaced(world: PoolWorld, host: Host) -> None:
    pool = await world.started(room=host.room)
    (leased,) = (await pool.acquire(1, timeout_s=1.0)).machines
    machine = world.hypervisor.machines[leased.machine_id]
    machine.overlay_bytes = 100 * MIB
    await world.clock.advance(2.0)
    assert not machine.lost.is_set()
    machine.overlay_bytes += 1
    await world.clock.advance(2.0)
    await run_ready()
    assert "of disk" in machine.lost_reason
    assert machine.machine_id not in world.hypervisor.machines
    s = pool.statistics()
    assert (s.lost_total, s.idle_count, s.leased_count) == (1, 2, 0)


async def test_no_machine_is_forked_below_the_disk_reserve_and_the_pool_reports_it(
    world: PoolWorld, host: Host
) -> None:
    pool = await world.started(room=host.room)
    host.free_mib = 2047
    await pool.acquire(1, timeout_s=1.0)
    await world.clock.advance(5.0)
    s = pool.statistics()
    assert s.idle_count == 1
    assert s.healthy
    assert "the disk of /state is short: 2047 MiB are free, and 2048 MiB must stay free" in s.problem
    host.free_mib = 2048
    await world.clock.advance(1.0)
    assert pool.statistics().idle_count == 2
    assert pool.statistics().problem == ""


async def test_no_machine_is_leased_while_the_disk_is_full_and_the_pool_reports_it(
    world: PoolWorld, host: Host
) -> None:
    pool = await world.started(room=host.room)
    assert pool.statistics().problem == ""
    host.free_mib = 63
    assert "the disk of /state is short: 63 MiB are free" in pool.statistics().problem
    with pytest.raises(PoolFailing, match="leases no machine: the disk of /state is short: 63 MiB are free"):
        await pool.acquire(1, timeout_s=60.0)
    assert pool.statistics().idle_count == 2
    host.free_mib = 64
    assert len((await pool.acquire(1, timeout_s=1.0)).machines) == 1


async def test_groups_that_wait_are_refused_when_the_disk_is_full(world: PoolWorld, host: Host) -> None:
    pool = await world.started(room=host.room)
    first = await pool.acquire(4, timeout_s=60.0)
    waiting = await begun(pool.acquire(4, timeout_s=60.0))
    host.free_mib = 0
    await pool.release(first.machines[:1])
    with pytest.raises(PoolFailing, match="the disk of /state"):
        await waiting


async def test_an_unreadable_disk_is_reported(world: PoolWorld, tmp_path: Path) -> None:
    pool = world.make(room=HostRoom(directory=tmp_path / "none", disk_reserve_bytes=1))
    assert "the free disk space is not known" in pool.statistics().problem


@pytest.mark.parametrize(
    ("resource", "short", "enough"), [("free_mib", 0, 4096), ("available_mib", 1024, 4096)], ids=["disk", "memory"]
)
async def test_the_template_is_not_booted_without_room_for_it(
    world: PoolWorld, host: Host, resource: str, short: int, enough: int
) -> None:
    setattr(host, resource, short)
    pool = await world.started(room=host.room)
    await world.clock.advance(30.0)
    assert world.hypervisor.made == []
    assert "is short" in pool.statistics().problem
    setattr(host, resource, enough)
    await world.clock.advance(1.0)
    assert counts(pool) == (2, 0, 0)
    assert pool.statistics().problem == ""


def test_free_space_is_read_from_the_disk(tmp_path: Path) -> None:
    assert not HostRoom(directory=tmp_path, disk_reserve_bytes=0).disk_is_short
    assert HostRoom(directory=tmp_path, disk_reserve_bytes=1 << 62).disk_is_short
    with pytest.raises(HypervisorError, match="not known"):
        _ = HostRoom(directory=tmp_path / "none").disk_is_short


# -- memory -----------------------------------------------------------------------------------------------------


async def test_a_pool_whose_host_is_short_gets_no_more_machines_and_reports_it(world: PoolWorld) -> None:
    host = Host(1024 + 2 * 256)
    pool = await world.started(size=4, room=host.room)
    assert counts(pool) == (2, 0, 0)
    s = pool.statistics()
    assert s.healthy
    assert s.boot_failure_total == 0
    assert "the host's memory is short: 1536 MiB are available" in s.problem
    host.available_mib += 2 * 256
    await world.clock.advance(1.0)
    assert counts(pool) == (4, 0, 0)
    assert pool.statistics().problem == ""


async def test_a_timeout_reports_a_memory_shortage(world: PoolWorld) -> None:
    pool = await world.started(size=0, room=Host(1024 + 2 * 256).room)
    await pool.acquire(1, timeout_s=1.0)
    waiter = asyncio.create_task(pool.acquire(2, timeout_s=30.0))
    await world.clock.advance(30.0)
    with pytest.raises(PoolExhausted, match="memory"):
        await waiter


async def test_reservations_hold_memory_like_machines(world: PoolWorld) -> None:
    host = Host(1024 + 3 * 256)
    pool = await world.started(size=0, room=host.room)
    admission = await pool.acquire(0, reserved=2, timeout_s=1.0)
    waiter = asyncio.create_task(pool.acquire(0, reserved=2, timeout_s=60.0))
    await world.clock.advance(5.0)
    assert not waiter.done()
    await pool.release(admission.reservations)
    assert len((await waiter).reservations) == 2


async def test_a_drained_pool_no_longer_waits_for_memory(world: PoolWorld) -> None:
    host = Host(1024 + 256)
    pool = await world.started(size=2, room=host.room)
    assert pool.statistics().problem
    pool.drain()
    await world.clock.advance(60.0)
    assert pool.statistics().problem == ""


async def test_pools_leave_each_other_the_expected_growth_of_their_machines(world: PoolWorld) -> None:
    host = Host(1024 + 3 * 256)
    pools = [await world.started(name, capacity=2, size=2, room=host.room) for name in ("one", "other")]
    assert sum(pool.statistics().idle_count for pool in pools) == 3
    await pools[0].close()
    await world.clock.advance(1.0)
    assert pools[1].statistics().idle_count == 2


@pytest.mark.parametrize(
    ("available_mib", "held_mib", "room"),
    [
        pytest.param(1024, [], 0, id="the reserve is not available"),
        pytest.param(1024 + 255, [], 0, id="a part of a machine is none"),
        pytest.param(1024 + 600, [], 2, id="the rest is divided"),
        pytest.param(1024 + 600, [0], 1, id="a new machine has all its growth before it"),
        pytest.param(1024 + 600, [200], 2, id="what a machine holds it need not be given"),
        pytest.param(1024 + 600, [900], 2, id="one that outgrew what was expected takes nothing from the others"),
        pytest.param(512, [0, 0], 0, id="too little is none, not less"),
    ],
)
def test_expected_growth_counts_as_taken(available_mib: int, held_mib: list[int], room: int) -> None:
    assert room == machines_that_fit(
        growth_bytes=sum(growth_of(256 * MIB, held_bytes=held * MIB) for held in held_mib),
        available_bytes=available_mib * MIB,
        reserve_bytes=1024 * MIB,
        expected_bytes=256 * MIB,
    )


def test_available_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16000000 kB\nMemAvailable:    2048 kB\n", encoding="ascii")
    assert read_available_bytes(meminfo) == 2 * MIB
    assert read_available_bytes() > 0


@pytest.mark.parametrize("text", ["MemTotal: 1 kB\n", "MemAvailable: much\n"])
def test_an_unreadable_meminfo_is_an_error(tmp_path: Path, text: str) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(text, encoding="ascii")
    with pytest.raises(HypervisorError, match="meminfo"):
        read_available_bytes(meminfo)
    with pytest.raises(HypervisorError, match="read"):
        read_available_bytes(tmp_path / "none")


#: A daemon with 10 machines' worth of available memory, which reports the room for machines of 100 MiB and, given a
#: number, has that many of them.
DAEMON = """
import sys
from pathlib import Path
from envd.pool.room import HostClaims, HostRoom
MIB = 1 << 20
count = 0
room = HostRoom(
    memory_reserve_bytes=24 * MIB, claims=HostClaims(Path(sys.argv[1])), read_memory=lambda: 1024 * MIB
)
room.join(lambda: count * 100 * MIB)
while True:
    print(room.count(100 * MIB, most=99), flush=True)
    count = int(sys.stdin.readline())
    room.publish()
    print("published", flush=True)
    sys.stdin.readline()
"""


class Daemon:
    """A process with its own claims on the memory."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DAEMON, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def room(self) -> int:
        """Return the room that the daemon has found."""
        return int(self.read())

    def read(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def write(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def has(self, count: int) -> None:
        """Have this many machines, published."""
        self.write(str(count))
        assert self.read() == "published\n"

    def end(self) -> None:
        """Kill the daemon."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def test_the_daemons_of_a_host_together_never_exceed_its_memory(tmp_path: Path) -> None:
    first, second = Daemon(tmp_path), Daemon(tmp_path)
    try:
        # In either order: the second finds nothing until the first has reported how much it takes.
        assert sorted([first.room(), second.room()]) == [0, 10]
        first.has(6)
        second.has(0)
        second.write("look")
        assert second.room() == 4
        second.has(4)
        first.write("look")
        # Its own 6 and the other's 4 are all that fit.
        assert first.room() == 0
        first.end()
        second.write("look")
        assert second.room() == 6, "the claims of a killed daemon remain"
        assert len(list(tmp_path.iterdir())) == 2, "the killed daemon's file remains"
    finally:
        first.end()
        second.end()


def test_claims_of_another_host_that_mounts_the_directory_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "another-boot.x").write_text("1000000000000", encoding="ascii")
    claims = HostClaims(tmp_path)
    room = HostRoom(memory_reserve_bytes=0, claims=claims, read_memory=lambda: 1024 * MIB)
    assert room.count(256 * MIB, most=9) == 4
    claims.close()
    assert sorted(os.listdir(tmp_path)) == ["another-boot.x", "lock"]


def test_a_claim_is_not_withdrawn_while_another_daemon_reads_it(tmp_path: Path) -> None:
    reader, ending = HostClaims(tmp_path), HostClaims(tmp_path)
    thread = threading.Thread(target=ending.close)
    with reader.exclusive():
        thread.start()
        thread.join(0.2)
        assert len(os.listdir(tmp_path)) == 3
    thread.join()
    assert len(os.listdir(tmp_path)) == 2
    reader.close()


def test_claims_in_an_unusable_directory_are_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another --cache-dir"):
        HostClaims(tmp_path / "file")


def test_an_unbounded_host_has_room_for_the_whole_pool() -> None:
    room = HostRoom()
    assert room.count(256 * MIB, most=9) == 9
    assert not room.disk_is_short
    assert not room.disk_is_full
    assert room.disk_shortage == room.shortage(256 * MIB) == ""


# -- the check of `envd doctor` ----------------------------------------------------------------------------------


def status_of_memory(tmp_path: Path, available_bytes: int, *, daemon_pid: int | None = None, **flags: Any) -> Status:
    pools = {"desktop": {"size": 16, "memory_mib": 4096, "expected_memory_mib": 700}}
    config = load(flags={"state_dir": tmp_path, "pools": pools, **flags})
    return check_memory(config, available_bytes=available_bytes, daemon_pid=daemon_pid).status


def test_memory_is_enough_if_the_pools_would_start_all_machines(tmp_path: Path) -> None:
    # 4 GiB of a template, 16 forks of 700 MiB, and 1 GiB that stays free.
    enough_bytes = (4096 + 128 + 16 * 700 + 1024) << 20
    assert status_of_memory(tmp_path, enough_bytes) is Status.OK
    assert status_of_memory(tmp_path, enough_bytes - 1) is Status.WARN


def test_the_memory_of_a_running_daemon_is_not_counted_twice(tmp_path: Path) -> None:
    assert status_of_memory(tmp_path, 1 << 30, daemon_pid=42) is Status.OK


def test_drawn_desktops_need_no_memory_of_guests(tmp_path: Path) -> None:
    fake: dict[str, Any] = {"hypervisor.uri": "fake"}
    assert status_of_memory(tmp_path, 1 << 30, **fake) is Status.OK
