"""One client with several servers of drawn desktops: placement, full and draining hosts, cancellation, event loops."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any

import pytest

import cuaenv.client.leases
import cuaenv.client.opening
from cuaenv import client as wire
from cuaenv.client import (
    AsyncEnvClient,
    AsyncEpisode,
    ClientSettings,
    Done,
    HostState,
    RetryPolicy,
    close_shared_clients,
    shared_client,
)
from cuaenv.client.episode import Opening
from tests.support.clock import until
from tests.support.server import FakeServer, serve_fake

TASK = "fake/count-to-five"
COUNT = wire.Click(x=819, y=100)
NOTHING = wire.View(encoding="none")
IMPATIENT = RetryPolicy(
    first_pause=timedelta(milliseconds=20), max_pause=timedelta(milliseconds=100), patience=timedelta(milliseconds=300)
)


@asynccontextmanager
async def servers(*capacities: int) -> AsyncIterator[list[FakeServer]]:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serve_fake(size=size, capacity=size)) for size in capacities]
        for server, size in zip(served, capacities, strict=True):
            await until(lambda s=server, n=size: s.pool.statistics().idle_count == n)  # type: ignore[misc]
        yield served


@asynccontextmanager
async def connected(served: list[FakeServer], **options: Any) -> AsyncIterator[AsyncEnvClient]:
    """Connect to hosts, and wait until all have reported their pools."""
    async with AsyncEnvClient(targets(served), **options) as client:
        await client.list_pools()
        await until(lambda: all(host.state is HostState.UP for host in client.statistics().hosts))
        yield client


def targets(served: list[FakeServer]) -> tuple[str, ...]:
    return tuple(server.address for server in served)


def open_ids(served: list[FakeServer]) -> set[str]:
    return {info.episode_id for server in served for info in server.service.list_episodes()}


async def test_hosts_are_filled_in_proportion_and_to_the_last_machine() -> None:
    async with servers(6, 3) as served, connected(served) as client, AsyncExitStack() as stack:

        async def opened(count: int) -> list[int]:
            entering = [stack.enter_async_context(client.reset(TASK, view=NOTHING)) for _ in range(count)]
            await asyncio.gather(*entering)
            return [len(server.service.list_episodes()) for server in served]

        assert await opened(6) == [4, 2]
        async with asyncio.timeout(60):
            assert await opened(3) == [6, 3]


async def test_a_reset_waiting_at_a_full_host_gets_a_machine_freed_at_another() -> None:
    async with servers(1, 1) as served, AsyncEnvClient(targets(served), retry=IMPATIENT) as client:
        async with AsyncExitStack() as stack:
            held = [await stack.enter_async_context(client.reset(TASK, view=NOTHING)) for _ in range(2)]
            waiting = asyncio.create_task(one_rollout(client))
            await until(lambda: any(server.pool.statistics().waiting_by_run for server in served))
            (queue,) = [server for server in served if server.pool.statistics().waiting_by_run]
            (elsewhere,) = [episode for episode in held if episode.host.target != queue.address]
            await elsewhere.close()
            assert await asyncio.wait_for(waiting, 60) == elsewhere.host.target
        assert open_ids(served) == set()


async def one_rollout(client: AsyncEnvClient) -> str:
    async with client.reset(TASK, view=NOTHING, timeout=timedelta(seconds=60)) as episode:
        await episode.step(COUNT)
        await episode.step(Done())
        assert (await episode.evaluate()).score == 0.0
        return episode.host.target


async def test_a_draining_host_finishes_its_episodes_and_gets_no_new_ones() -> None:
    async with (
        servers(8, 2) as (draining, other),
        connected([draining, other], retry=IMPATIENT) as client,
        client.reset(TASK, view=NOTHING) as episode,
    ):
        assert episode.host.target == draining.address
        ending = asyncio.create_task(draining.service.drain(120.0))
        await until(lambda: "draining" in repr(draining.service))
        for _ in range(4):
            assert await one_rollout(client) == other.address
        await episode.step(COUNT)
        await episode.step(Done())
        assert (await episode.evaluate()).score == 0.0
        await episode.close()
        await ending


@asynccontextmanager
async def closing(episodes: Awaitable[Sequence[AsyncEpisode]]) -> AsyncIterator[Sequence[AsyncEpisode]]:
    """Open episodes by a call, and close each."""
    opened = await episodes
    try:
        yield opened
    finally:
        await asyncio.gather(*(episode.close() for episode in opened))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("are_blocks", [True, False])
async def test_a_hundred_random_cancellations_leave_only_the_held_leases(
    seed: int, are_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Episodes not closed in time are left to their leases, which are far longer than this test.
    monkeypatch.setattr(cuaenv.client.opening, "_CLOSE_TIMEOUT", timedelta(seconds=60))
    monkeypatch.setattr(cuaenv.client.leases, "_CLOSE_TIMEOUT", timedelta(seconds=60))
    rng = random.Random(seed)
    held: dict[str, AsyncEpisode] = {}
    leave = asyncio.Event()

    def block(opening: Opening[Sequence[AsyncEpisode]]) -> AbstractAsyncContextManager[Sequence[AsyncEpisode]]:
        return opening if are_blocks else closing(opening)

    async def rollout(client: AsyncEnvClient, *, stays: bool) -> None:
        async with block(client.reset_group(TASK, size=rng.choice([1, 1, 2]), view=NOTHING)) as group:
            if stays:
                held.update((episode.episode_id, episode) for episode in group)
                await leave.wait()
                return
            await group[0].step(COUNT)
            with contextlib.suppress(wire.PoolExhausted, wire.DeadlineExceeded):
                async with block(client.fork(group[0], count=1, timeout=timedelta(seconds=1))) as (copy,):
                    await copy.step(COUNT)

    async with servers(6, 4) as served:
        async with AsyncEnvClient(targets(served), retry=IMPATIENT, rng=rng) as client:
            stayers = [asyncio.create_task(rollout(client, stays=True)) for _ in range(3)]
            await until(lambda: len({episode.group_id for episode in held.values()}) == len(stayers))
            doomed = [asyncio.create_task(rollout(client, stays=False)) for _ in range(100)]
            for task in rng.sample(doomed, len(doomed)):
                await asyncio.sleep(rng.uniform(0, 0.03))
                task.cancel()
            results = await asyncio.gather(*doomed, return_exceptions=True)
            assert [result for result in results if not isinstance(result, asyncio.CancelledError | None)] == []
            await until(lambda: sum(host.leftover_count for host in client.statistics().hosts) == 0)
            await until(lambda: open_ids(served) == set(held))
            # A server no longer lists an episode a moment before it releases its machine.
            await until(lambda: sum(server.pool.statistics().leased_count for server in served) == len(held))
            assert sum(host.episode_count for host in client.statistics().hosts) == len(held)
            assert {episode.episode_id for episode in client.episodes} == set(held)
            assert any(isinstance(result, asyncio.CancelledError) for result in results)
            leave.set()
            await asyncio.gather(*stayers)
        assert open_ids(served) == set()


async def test_a_host_name_resolves_to_all_its_addresses() -> None:
    async with servers(2) as (server,):
        port = server.address.rpartition(":")[2]
        async with AsyncEnvClient(f"dns:///localhost:{port}") as client:
            assert await one_rollout(client) == f"127.0.0.1:{port}"
        async with AsyncEnvClient(f"dns:///no-such-host.invalid:{port}") as client:
            with pytest.raises(wire.Unavailable, match=r"no-such-host\.invalid:\d+ cannot be resolved"):
                async with client.reset(TASK, timeout=timedelta(seconds=1)):
                    pass


async def test_each_event_loop_gets_its_own_connections_which_end_with_it() -> None:
    async with servers(4, 4) as served:
        settings = ClientSettings(targets=targets(served), retry=IMPATIENT)
        clients = []

        async def rollouts() -> Counter[str]:
            client = shared_client(settings)
            clients.append(client)
            assert shared_client(settings) is client
            return Counter(await asyncio.gather(*(one_rollout(client) for _ in range(4))))

        # As in a trainer: rollouts, a thread of asynchronous rollouts, and a parallel evaluation.
        here, *there = await asyncio.gather(
            rollouts(), *(asyncio.to_thread(lambda: asyncio.run(rollouts())) for _ in range(2))
        )
        assert sum((here, *there), Counter[str]()).total() == 12
        assert len(set(map(id, clients))) == 1
        assert open_ids(served) == set()
        assert len(clients[0]._host_pools) == 1, "ended loops closed their connections"
        await clients[0].aclose()


async def test_a_loop_that_cancels_no_tasks_can_close_its_connections() -> None:
    async with servers(4) as served:
        settings = ClientSettings(targets=targets(served), retry=IMPATIENT)

        async def rollout() -> AsyncEnvClient:
            client = shared_client(settings)
            await one_rollout(client)
            return client

        def run() -> tuple[AsyncEnvClient, int, int]:
            loop = asyncio.new_event_loop()
            client = loop.run_until_complete(rollout())
            open_count = len(client._host_pools)
            loop.run_until_complete(close_shared_clients())
            loop.run_until_complete(close_shared_clients())
            left = len(asyncio.all_tasks(loop))
            loop.close()
            return client, open_count, left

        client, open_count, left = await asyncio.to_thread(run)
        assert (open_count, len(client._host_pools), left) == (1, 0, 0)


async def test_episodes_left_open_by_an_ended_loop_are_closed() -> None:
    async with servers(4) as served:
        settings = ClientSettings(targets=targets(served), retry=IMPATIENT)

        async def hold() -> None:
            async with shared_client(settings).reset(TASK, view=NOTHING) as episode:
                await episode.step(wire.Wait(timedelta(seconds=60)))

        async def ends_early() -> None:
            rollouts = [asyncio.create_task(hold()) for _ in range(8)]
            await until(lambda: len(open_ids(served)) == 4)
            assert not any(task.done() for task in rollouts)

        await asyncio.to_thread(lambda: asyncio.run(ends_early()))
        await until(lambda: open_ids(served) == set())


async def test_a_close_that_runs_at_the_end_of_its_loop_is_completed() -> None:
    async with servers(4) as served:
        settings = ClientSettings(targets=targets(served), retry=IMPATIENT)
        held: list[AsyncEpisode] = []

        async def hold(end: asyncio.Event) -> None:
            async with shared_client(settings).reset(TASK, view=NOTHING) as episode:
                held.append(episode)
                await end.wait()

        async def ends_at_once() -> None:
            end = asyncio.Event()
            rollouts = [asyncio.create_task(hold(end)) for _ in range(4)]
            # The server has an episode before its client has the response, and only holders begin their close together.
            await until(lambda: len(held) == 4)
            end.set()
            async with asyncio.timeout(60):
                while sum(task.get_name().startswith("close:") for task in asyncio.all_tasks()) < 4:
                    await asyncio.sleep(0)
            assert not any(task.done() for task in rollouts)

        await asyncio.to_thread(lambda: asyncio.run(ends_at_once()))
        await until(lambda: open_ids(served) == set())


async def test_episodes_without_an_owner_are_closed_at_once_with_their_loop() -> None:
    async with servers(2) as served:
        settings = ClientSettings(targets=targets(served), retry=IMPATIENT)

        async def forgets() -> None:
            await shared_client(settings).open_group(TASK, size=2, view=NOTHING)

        async with asyncio.timeout(15):  # less than the 20 s for which owners are waited for
            await asyncio.to_thread(lambda: asyncio.run(forgets()))
        assert open_ids(served) == set()


# Taking over


async def test_an_episode_of_an_earlier_process_is_taken_over() -> None:
    async with servers(2, 2) as served, AsyncEnvClient(targets(served)) as earlier:
        begun = await earlier.open(TASK)
        await begun.step(COUNT)
        async with AsyncEnvClient(targets(served), max_episodes=1) as client:
            async with client.attach(begun.episode_id, view=NOTHING) as episode:
                same = ("host.target", "group_id", "task_id", "pool", "instruction", "step_count", "max_steps", "epoch")
                assert [attrgetter(name)(episode) for name in same] == [attrgetter(name)(begun) for name in same]
                assert (episode.observation.frame_id, episode.observation.tiles) == (begun.observation.frame_id, None)
                assert (await episode.step(COUNT)).step_count == 2
                with pytest.raises(wire.Conflict):
                    await begun.step(COUNT)
                async with client.reset(TASK, view=NOTHING):  # it does not count towards `max_episodes`
                    pass
            assert open_ids(served) == set()
            with pytest.raises(wire.EpisodeNotFound, match=f"episode {begun.episode_id}: not open"):
                await client.attach(begun.episode_id)


async def test_an_episode_that_cannot_be_observed_stays_open() -> None:
    async with servers(1) as served, AsyncEnvClient(targets(served)) as client:
        begun = await client.open(TASK, view=NOTHING)
        taking = asyncio.create_task(attached(client, begun.episode_id))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait({taking})
        assert taking.cancelled()
        with pytest.raises(wire.BadRequest):
            await client.attach(begun.episode_id, view=wire.View(region=(0, 0, 5000, 5000)))
        assert open_ids(served) == {begun.episode_id}
        assert client.episodes == [begun]


async def attached(client: AsyncEnvClient, episode_id: str) -> AsyncEpisode:
    return await client.attach(episode_id)
