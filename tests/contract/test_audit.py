"""Leftovers are found, counted once and removed; used things stay."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from envd.base.errors import HypervisorError
from envd.base.store.store import EpisodeRow, MachineRow, upsert
from envd.drawn import fake_image
from envd.episodes.types import ResetCommand
from envd.hypervisor.machine import Leftover, LeftoverKind, MachineSpec
from envd.pool.audit import Audit, Audited, stray_rows
from tests.support.clock import ManualClock
from tests.support.faulty import FakeHost, FaultyHypervisor
from tests.support.server import FakeServer, serve_fake

DOMAIN = Leftover(LeftoverKind.DOMAIN, "old")
GRACE_S = 300.0


class StubSource:
    """A source in which tests plant leftovers."""

    def __init__(self) -> None:
        self.there: list[Leftover] = []
        self.removed: list[Leftover] = []
        self.look_error: Exception | None = None
        self.remove_error: Exception | None = None

    async def leftovers(self) -> list[Leftover]:
        if self.look_error is not None:
            raise self.look_error
        return list(self.there)

    async def remove(self, leftover: Leftover) -> None:
        if self.remove_error is not None:
            raise self.remove_error
        self.there.remove(leftover)
        self.removed.append(leftover)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def source() -> StubSource:
    return StubSource()


@pytest.fixture
def reported() -> list[Leftover]:
    return []


@pytest.fixture
def audit(clock: ManualClock, source: StubSource, reported: list[Leftover]) -> Audit:
    return Audit(sources=[source], interval_s=60.0, grace_s=GRACE_S, clock=clock, on_leftover=reported.append)


async def test_only_a_leftover_seen_at_every_check_is_removed(
    audit: Audit, clock: ManualClock, source: StubSource
) -> None:
    for found in ([DOMAIN], [], [DOMAIN]):
        source.there = found
        await audit.check()
        await clock.advance(GRACE_S / 2)
    await audit.check()
    assert source.removed == []
    await clock.advance(GRACE_S / 2)
    await audit.check()
    assert source.removed == [DOMAIN]


async def test_a_leftover_is_removed_after_the_grace_period_and_counted_once(
    audit: Audit, clock: ManualClock, source: StubSource, reported: list[Leftover]
) -> None:
    source.there = [DOMAIN]
    await audit.check()
    await clock.advance(GRACE_S - 1)
    await audit.check()
    assert (source.removed, reported) == ([], [])
    await clock.advance(1)
    await audit.check()
    assert (source.removed, reported) == ([DOMAIN], [DOMAIN])
    await audit.check()
    assert reported == [DOMAIN]


async def test_a_leftover_that_cannot_be_removed_is_retried_and_counted_once(
    audit: Audit, clock: ManualClock, source: StubSource, reported: list[Leftover], caplog: pytest.LogCaptureFixture
) -> None:
    source.there, source.remove_error = [DOMAIN], HypervisorError("busy")
    await audit.check()
    await clock.advance(GRACE_S)
    await audit.check()
    await audit.check()
    assert reported == [DOMAIN]
    assert "old not removed: busy" in caplog.text
    source.remove_error = None
    await audit.check()
    assert (source.removed, reported) == ([DOMAIN], [DOMAIN])


async def test_a_source_that_fails_does_not_stop_the_others(
    clock: ManualClock, source: StubSource, reported: list[Leftover]
) -> None:
    closed = StubSource()
    closed.look_error = HypervisorError("libvirt is away")
    source.there = [DOMAIN]
    audit = Audit(sources=[closed, source], interval_s=60.0, grace_s=0.0, clock=clock, on_leftover=reported.append)
    await audit.check()
    assert source.removed == [DOMAIN]


# -- on fake machines and a real database -------------------------------------------------------------------------


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FakeServer]:
    async with serve_fake(size=2, database=tmp_path / "envd.db", host=FakeHost()) as server:
        yield server


def audit_of(server: FakeServer, clock: ManualClock, reported: list[Leftover]) -> Audit:
    assert server.store is not None
    rows = stray_rows(server.store, [server.pool], has_episode=server.service.journal.is_tracked)
    sources: list[Audited] = [server.hypervisor, *rows]
    return Audit(sources=sources, interval_s=60.0, grace_s=GRACE_S, clock=clock, on_leftover=reported.append)


async def test_planted_leftovers_are_removed_and_used_things_stay(
    server: FakeServer, clock: ManualClock, reported: list[Leftover]
) -> None:
    assert server.store is not None
    opened = await server.service.reset(ResetCommand(request_id="r", task_id="fake/count-to-five"))
    episode_id = opened.episodes[0].episode_id
    (row,) = await server.store.rows(EpisodeRow)
    stranger = FaultyHypervisor(host=server.hypervisor.host)
    orphan = await stranger.create(MachineSpec(machine_id="orphan", image=fake_image()))
    await stranger.freeze(orphan, notes={})
    template = await stranger.find_template(MachineSpec(machine_id="orphan", image=fake_image()))
    assert template is not None
    orphan = await stranger.fork(template, "orphan")
    capture = await stranger.capture(orphan)
    await server.store.commit(
        upsert(MachineRow(machine_id="ghost", pool="fake", enter_time_s=0.0)),
        upsert(replace(row, episode_id="ep-ghost")),
    )
    audit = audit_of(server, clock, reported)
    await audit.check()
    await clock.advance(GRACE_S)
    before = set(server.hypervisor.machines) - {"orphan"}
    await audit.check()
    assert {(leftover.kind.value, leftover.name) for leftover in reported} == {
        ("domain", "orphan"),
        ("capture", capture.name),
        ("database_row", "machine ghost"),
        ("database_row", "episode ep-ghost"),
    }
    assert orphan.lost.is_set()
    assert before <= set(server.hypervisor.machines)
    assert server.hypervisor.host.captures == {}
    assert [r.episode_id for r in await server.store.rows(EpisodeRow)] == [episode_id]
    assert "ghost" not in {r.machine_id for r in await server.store.rows(MachineRow)}
    await server.service.observe(episode_id, ResetCommand(request_id="", task_id="").observe)


async def test_an_audit_finds_nothing_after_a_clean_restart(
    tmp_path: Path, clock: ManualClock, reported: list[Leftover]
) -> None:
    host, database = FakeHost(), tmp_path / "envd.db"
    async with serve_fake(size=2, database=database, host=host) as server:
        opened = await server.service.reset(ResetCommand(request_id="r", task_id="fake/count-to-five", group_size=2))
        await server.kill()
    async with serve_fake(size=2, database=database, host=host) as server:
        assert server.store is not None
        rows = {row.machine_id for row in await server.store.rows(MachineRow)}
        kept = {server.service._registry.get(info.episode_id).machine.machine_id for info in opened.episodes}
        assert kept <= rows
        audit = audit_of(server, clock, reported)
        await audit.check()
        await clock.advance(GRACE_S)
        await audit.check()
        assert reported == []


async def test_an_audit_finds_nothing_without_leftovers(
    server: FakeServer, clock: ManualClock, reported: list[Leftover]
) -> None:
    opened = await server.service.reset(ResetCommand(request_id="r", task_id="fake/count-to-five", group_size=2))
    await server.service.close(opened.episodes[0].episode_id)
    audit = audit_of(server, clock, reported)
    await audit.check()
    await clock.advance(GRACE_S)
    await audit.check()
    assert reported == []
