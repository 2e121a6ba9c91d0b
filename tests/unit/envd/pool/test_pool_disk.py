"""A host's disk: the quota of each machine, and the reserve below which no machine is forked."""

from pathlib import Path

import pytest

from envd.base.errors import HypervisorError, PoolFailing
from envd.pool.host_room import HostDisk
from tests.support.clock import begun, run_ready
from tests.support.pool_world import PoolWorld

POOL = {"capacity": 4, "size": 2, "disk_quota_mib": 100}

MIB = 1 << 20


class Host:
    """A host whose free disk space the test sets."""

    free_mib = 4096

    def __init__(self) -> None:
        self.disk = HostDisk(Path("/state"), reserve_bytes=2048 * MIB, read=lambda: self.free_mib * MIB)


@pytest.fixture
def host() -> Host:
    return Host()


async def test_a_machine_over_its_disk_quota_is_lost_with_the_reason_and_replaced(world: PoolWorld, host: Host) -> None:
    pool = await world.started(disk=host.disk)
    (leased,) = (await pool.lease(1, timeout_s=1.0)).machines
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
    pool = await world.started(disk=host.disk)
    host.free_mib = 2047
    await pool.lease(1, timeout_s=1.0)
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
    pool = await world.started(disk=host.disk)
    assert pool.statistics().problem == ""
    host.free_mib = 63
    assert "the disk of /state is short: 63 MiB are free" in pool.statistics().problem
    with pytest.raises(PoolFailing, match="leases no machine: the disk of /state is short: 63 MiB are free"):
        await pool.lease(1, timeout_s=60.0)
    assert pool.statistics().idle_count == 2
    host.free_mib = 64
    assert len((await pool.lease(1, timeout_s=1.0)).machines) == 1


async def test_groups_that_wait_are_refused_when_the_disk_is_full(world: PoolWorld, host: Host) -> None:
    pool = await world.started(disk=host.disk)
    first = await pool.lease(4, timeout_s=60.0)
    waiting = await begun(pool.lease(4, timeout_s=60.0))
    host.free_mib = 0
    await pool.release(first.machines[:1])
    with pytest.raises(PoolFailing, match="the disk of /state"):
        await waiting


async def test_an_unreadable_disk_is_reported(world: PoolWorld, tmp_path: Path) -> None:
    pool = world.make(disk=HostDisk(tmp_path / "none", reserve_bytes=1))
    assert "the free disk space is not known" in pool.statistics().problem


async def test_the_template_is_not_booted_below_the_disk_reserve(world: PoolWorld, host: Host) -> None:
    host.free_mib = 0
    pool = await world.started(disk=host.disk)
    await world.clock.advance(30.0)
    assert world.hypervisor.made == []
    assert "is short" in pool.statistics().problem
    host.free_mib = 4096
    await world.clock.advance(1.0)
    assert pool.statistics().idle_count == 2


def test_free_space_is_read_from_the_disk(tmp_path: Path) -> None:
    assert not HostDisk(tmp_path, reserve_bytes=0).is_short
    assert HostDisk(tmp_path, reserve_bytes=1 << 62).is_short
    with pytest.raises(HypervisorError, match="not known"):
        _ = HostDisk(tmp_path / "none", reserve_bytes=0).is_short
