"""A host's disk: the quota of each machine, and the reserve below which no machine is forked."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from envd.base.errors import HypervisorError
from envd.pool.disk import HostDisk
from envd.pool.pool import Pool
from envd.pool.settings import PoolSettings
from tests.support.clock import ManualClock, run_ready
from tests.support.stubs import IMAGE, StubHypervisor

MIB = 1 << 20


class Host:
    """A host whose free disk space the test sets."""

    free_mib = 4096

    def __init__(self) -> None:
        self.disk = HostDisk(Path("/state"), reserve_bytes=2048 * MIB, read=lambda: self.free_mib * MIB)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def hypervisor() -> StubHypervisor:
    return StubHypervisor()


@pytest.fixture
async def pool(hypervisor: StubHypervisor, clock: ManualClock, host: Host) -> AsyncIterator[Pool]:
    settings = PoolSettings(name="desktop", capacity=4, size=2, max_starting=2, disk_quota_mib=100)
    pool = Pool(
        settings,
        hypervisor=hypervisor,
        image=IMAGE,
        disk=host.disk,
        make_desktop=hypervisor.desktop,
        clock=clock,
    )
    yield pool
    await pool.close()
    assert hypervisor.machines == {}


async def start(pool: Pool) -> None:
    await pool.start()
    await run_ready()
    await run_ready()


async def test_a_machine_over_its_disk_quota_is_lost_with_the_reason_and_replaced(
    pool: Pool, hypervisor: StubHypervisor, clock: ManualClock
) -> None:
    await start(pool)
    (leased,) = (await pool.lease(1, timeout_s=1.0)).machines
    machine = hypervisor.machines[leased.machine_id]
    machine.overlay_bytes = 100 * MIB
    await clock.advance(2.0)
    assert not machine.lost.is_set()
    machine.overlay_bytes += 1
    await clock.advance(2.0)
    await run_ready()
    assert "of disk" in machine.lost_reason
    assert machine.machine_id not in hypervisor.machines
    s = pool.statistics()
    assert (s.lost_total, s.idle_count, s.leased_count) == (1, 2, 0)


async def test_no_machine_is_forked_below_the_disk_reserve_and_the_pool_reports_it(
    pool: Pool, hypervisor: StubHypervisor, clock: ManualClock, host: Host
) -> None:
    await start(pool)
    host.free_mib = 2047
    await pool.lease(1, timeout_s=1.0)
    await clock.advance(5.0)
    s = pool.statistics()
    assert s.idle_count == 1
    assert s.healthy
    assert "the disk of /state is short: 2047 MiB are free, and 2048 MiB must stay free" in s.problem
    host.free_mib = 2048
    await clock.advance(1.0)
    assert pool.statistics().idle_count == 2
    assert pool.statistics().problem == ""


async def test_the_template_is_not_booted_below_the_disk_reserve(
    pool: Pool, hypervisor: StubHypervisor, clock: ManualClock, host: Host
) -> None:
    host.free_mib = 0
    await start(pool)
    await clock.advance(30.0)
    assert hypervisor.made == []
    assert "is short" in pool.statistics().problem
    host.free_mib = 4096
    await clock.advance(1.0)
    assert pool.statistics().idle_count == 2


def test_free_space_is_read_from_the_disk(tmp_path: Path) -> None:
    assert not HostDisk(tmp_path, reserve_bytes=0).is_short
    assert HostDisk(tmp_path, reserve_bytes=1 << 62).is_short
    with pytest.raises(HypervisorError, match="not known"):
        _ = HostDisk(tmp_path / "none", reserve_bytes=0).is_short
