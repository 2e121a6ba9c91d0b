"""Resets and forks whose caller is gone: they hold no place in the queue and no machine for longer than 10 s."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from envd.base.errors import EpisodeNotFound
from envd.pool.queue import GRACE_S
from tests.support.clock import begun, run_ready
from tests.support.episode_world import CAPACITY, World


async def gone(caller: "asyncio.Task[Any]") -> None:
    """Cancel a caller, as its lost connection does."""
    caller.cancel()
    await run_ready()


def queued(world: World) -> tuple[str, ...]:
    (queue,) = world.service.list_queues().values()
    return tuple(group.reason for group in queue)


@pytest.fixture
async def full_world(world: World) -> World:
    """A world whose machines are all leased."""
    await world.open(group_size=CAPACITY, lease_ttl_s=3600.0)
    return world


async def fork_of_first(world: World) -> Any:
    return await world.fork(world.service.list_episodes()[0].episode_id, timeout_s=3600.0)


OPENINGS: list[Callable[[World], Any]] = [lambda world: world.reset(timeout_s=3600.0), fork_of_first]


@pytest.mark.parametrize("opening", OPENINGS, ids=["reset", "fork"])
async def test_a_waiting_opening_leaves_the_queue_soon_after_its_caller(
    full_world: World, opening: Callable[[World], Any], caplog: pytest.LogCaptureFixture
) -> None:
    await gone(await begun(opening(full_world)))
    (reason,) = queued(full_world)
    assert reason == "its caller is gone; a reset or fork leaves the queue after 10 s unless a retry comes"
    await full_world.clock.advance(GRACE_S - 0.1)
    assert len(queued(full_world)) == 1
    await full_world.clock.advance(0.1)
    assert queued(full_world) == ()
    assert "ended: its caller has been gone for 10 s" in caplog.text


async def test_a_retry_within_the_grace_keeps_the_place_in_the_queue(full_world: World) -> None:
    command = full_world.reset_command(timeout_s=3600.0)
    await gone(await begun(full_world.service.reset(command)))
    await full_world.clock.advance(GRACE_S - 0.1)
    retry = await begun(full_world.service.reset(command))
    other = await begun(full_world.reset(timeout_s=3600.0))
    await full_world.clock.advance(GRACE_S * 3)
    assert len(queued(full_world)) == 2
    assert "caller is gone" not in "".join(queued(full_world))
    await full_world.service.close(full_world.service.list_episodes()[0].episode_id)
    await run_ready()
    assert retry.done()
    assert not other.done()
    await gone(other)


async def test_a_retry_after_the_grace_opens_episodes_of_its_own(full_world: World) -> None:
    command = full_world.reset_command(timeout_s=3600.0)
    await gone(await begun(full_world.service.reset(command)))
    await full_world.clock.advance(GRACE_S)
    retry = await begun(full_world.service.reset(command))
    await full_world.service.close(full_world.service.list_episodes()[0].episode_id)
    assert len((await retry).episodes) == 1


async def test_a_setup_without_a_caller_is_stopped_and_its_machines_are_released(world: World) -> None:
    world.tasks.setup_gate.clear()
    await gone(await begun(world.reset(group_size=2)))
    await world.clock.advance(GRACE_S)
    assert world.service.list_episodes() == []
    world.check_no_leaks()


async def test_episodes_that_no_caller_knows_are_closed_and_a_retry_opens_others(world: World) -> None:
    world.tasks.setup_gate.clear()
    command = world.reset_command(group_size=2, lease_ttl_s=3600.0)
    await gone(await begun(world.service.reset(command)))
    world.tasks.setup_gate.set()
    await run_ready()
    unknown = [episode.episode_id for episode in world.service.list_episodes()]
    assert len(unknown) == 2
    await world.clock.advance(GRACE_S)
    assert world.service.list_episodes() == []
    world.check_no_leaks()
    retried = await world.service.reset(command)
    assert {episode.episode_id for episode in retried.episodes}.isdisjoint(unknown)


async def test_episodes_that_a_retry_got_within_the_grace_stay(world: World) -> None:
    world.tasks.setup_gate.clear()
    command = world.reset_command(lease_ttl_s=3600.0)
    await gone(await begun(world.service.reset(command)))
    world.tasks.setup_gate.set()
    await world.clock.advance(GRACE_S - 0.1)
    result = await world.service.reset(command)
    await world.clock.advance(GRACE_S * 3)
    assert [e.episode_id for e in world.service.list_episodes()] == [e.episode_id for e in result.episodes]


async def test_copies_that_no_caller_knows_are_closed_and_the_parent_continues(world: World) -> None:
    parent_id = await world.open(lease_ttl_s=3600.0)
    world.hypervisor.gates["capture"].clear()
    await gone(await begun(world.fork(parent_id)))
    world.hypervisor.gates["capture"].set()
    await run_ready()
    assert len(world.service.list_episodes()) == 2
    await world.clock.advance(GRACE_S)
    assert [episode.episode_id for episode in world.service.list_episodes()] == [parent_id]
    world.check_no_leaks()
    await world.service.step(world.step_command(parent_id, 0))


@pytest.mark.parametrize("opening", ["reset", "fork"])
async def test_a_waiting_opening_is_ended_by_its_id_at_once(full_world: World, opening: str) -> None:
    command: Any
    if opening == "reset":
        command = full_world.reset_command(timeout_s=3600.0)
        caller = await begun(full_world.service.reset(command))
    else:
        parent_id = full_world.service.list_episodes()[0].episode_id
        command = full_world.fork_command(parent_id, timeout_s=3600.0)
        caller = await begun(full_world.service.fork(command))
    await full_world.service.close_opening(command.request_id, owner="another")
    assert len(queued(full_world)) == 1
    await full_world.service.close_opening(command.request_id, owner="")
    assert queued(full_world) == ()
    with pytest.raises(EpisodeNotFound, match=f"opening {command.request_id}: closed by its caller; reset a new one"):
        await caller
    await full_world.service.close_opening(command.request_id, owner="")


async def test_an_open_group_is_closed_by_the_id_of_its_reset(world: World) -> None:
    command = world.reset_command(group_size=2)
    await world.service.reset(command)
    await world.service.close_opening(command.request_id, owner="")
    assert world.service.list_episodes() == []
    await run_ready()
    world.check_no_leaks()


async def test_an_opening_that_is_ended_while_it_is_persisted_leaves_no_episode(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()

    async def opened(*_: object) -> None:
        await never.wait()

    monkeypatch.setattr(world.service.journal, "opened", opened)
    command = world.reset_command()
    caller = await begun(world.service.reset(command))
    assert len(world.service.list_episodes()) == 1
    await gone(caller)
    await world.service.close_opening(command.request_id, owner="")
    assert world.service.list_episodes() == []
    world.check_no_leaks()


async def test_a_drain_ends_openings_in_their_grace(full_world: World) -> None:
    await gone(await begun(full_world.reset(timeout_s=3600.0)))
    await full_world.service.aclose()
    assert full_world.hypervisor.machines == {}
