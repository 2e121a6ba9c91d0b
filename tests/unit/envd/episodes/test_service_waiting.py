"""Only resets and forks wait for machines; other calls do not wait for them. Both count for their run."""

import asyncio

import pytest

from envd.base.config import RunShare
from envd.base.errors import GroupTooLarge, HypervisorError, PoolFailing
from envd.episodes.progress import EpisodeState
from envd.episodes.types import OpenedGroup
from tests.support.clock import begun, run_ready
from tests.support.episode_world import CAPACITY, NO_PIXELS, PLAIN, World, running_world


async def test_step_evaluate_keep_alive_and_close_never_wait_for_resets_and_forks(world: World) -> None:
    first, second, third = [await world.open(run="a", task_id=PLAIN.task_id) for _ in range(CAPACITY)]
    parked: list[asyncio.Task[OpenedGroup] | asyncio.Task[OpenedGroup]] = [
        asyncio.create_task(world.reset(run=f"run-{number % 7}", group_size=number % CAPACITY + 1, timeout_s=600.0))
        for number in range(200)
    ]
    parked.append(asyncio.create_task(world.fork(first, timeout_s=600.0)))
    await run_ready()

    stepping = asyncio.create_task(world.service.step(world.step_command(first, 0, observe=NO_PIXELS)))
    observing = asyncio.create_task(world.service.observe(second, NO_PIXELS))
    scoring = asyncio.create_task(world.service.evaluate(second, request_id="e", fingerprint=b""))
    keeping = await begun(world.service.keep_alive([third], None))
    # No time has passed and no machine became free, so the calls did not wait.
    assert stepping.result().episode.progress.step_count == 1
    assert observing.result().frame.frame_id
    assert scoring.result().score == 1.0
    assert [info.progress.state for info in keeping.result()] == [EpisodeState.ACTIVE]
    assert not any(task.done() for task in parked)
    assert len(world.pool.statistics().waiting_by_run) == 8

    closing = await begun(world.service.close(third))
    assert closing.done()
    assert sum(task.done() for task in parked) == 1, "the machine's capacity went to another call"
    for task in parked:
        task.cancel()
    await asyncio.gather(*parked, return_exceptions=True)


async def test_a_reset_counts_for_its_run_and_a_fork_for_its_parents(world: World) -> None:
    parent = await world.open(run="a", task_id=PLAIN.task_id)
    await world.open(task_id=PLAIN.task_id)
    assert world.pool.statistics().held_by_run == {"a": 1, "": 1}
    await world.fork(parent)
    assert world.pool.statistics().held_by_run == {"a": 2, "": 1}
    await world.service.close(parent)
    await run_ready()
    assert world.pool.statistics().held_by_run == {"a": 1, "": 1}


async def test_a_group_whose_machine_is_lost_starts_over_within_its_quota() -> None:
    async with running_world(shares={"a": RunShare(quota=2)}) as world:
        world.tasks.lose_in_setup = 1
        result = await world.reset(run="a", group_size=2)
        assert len(result.episodes) == world.tasks.setups == 2, "the whole group starts over"
        assert world.pool.statistics().held_by_run == {"a": 2}


async def test_a_fork_counts_its_parents_machine_toward_the_quota() -> None:
    async with running_world(shares={"a": RunShare(quota=2)}) as world:
        parent = await world.open(run="a", task_id=PLAIN.task_id)
        with pytest.raises(GroupTooLarge, match=r"of 2 .* 1"):
            await world.fork(parent, fork_count=2)
        assert world.state(parent) == (EpisodeState.ACTIVE, "")
        assert len((await world.fork(parent)).episodes) == 1
        assert ("fork", "GROUP_TOO_LARGE") in world.metrics.recorded_failures


async def test_resets_on_a_failing_pool_are_refused_and_can_be_retried_with_the_same_id() -> None:
    async with running_world(failing_after=2) as world:
        for _ in range(CAPACITY):
            await world.open(task_id=PLAIN.task_id)
        world.hypervisor.errors["fork"] = [HypervisorError("no space left")] * 2
        command = world.reset_command(task_id=PLAIN.task_id, timeout_s=600.0)
        waiting = await begun(world.service.reset(command))
        await world.service.close(world.service.list_episodes()[0].episode_id)
        await world.clock.advance(1.0)
        with pytest.raises(PoolFailing, match="no space left"):
            await waiting
        with pytest.raises(PoolFailing):
            await world.service.reset(command)
        (info,) = world.service.list_pools()
        assert not info.healthy
        assert "2 failures in a row" in info.problem
        await world.clock.advance(2.0)
        assert len((await world.service.reset(command)).episodes) == 1
        assert world.service.list_pools()[0].healthy
