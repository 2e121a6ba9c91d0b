"""What every placement promises, on real sockets: static lists, and a Ray cluster of which only Ray itself is fake."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from unittest.mock import patch

import pytest

from cuaenv.client import AsyncEnvClient, GroupTooLarge, HostState, PoolExhausted, PoolNotFound, RetryPolicy, View
from cuaenv.client.errors import Unavailable
from cuaenv.client.ray_cluster import HostReport, Reservation
from envd.base import errors
from tests.support.clock import until
from tests.support.stub_episodes import StubHost, stub_hosts

TASK = "desktop/note"
NOTHING = View(encoding="none")
QUICK = RetryPolicy(
    attempt_timeout=timedelta(seconds=60),
    first_pause=timedelta(milliseconds=10),
    max_pause=timedelta(milliseconds=50),
    reconnect_timeout=timedelta(milliseconds=300),
)


class FakeCluster:
    """A `Cluster` in this process: first come, first served, on the node with most free machines."""

    def __init__(self) -> None:
        self.totals: dict[str, dict[str, int]] = {}
        self.reports: dict[str, HostReport] = {}
        self.held: dict[int, tuple[str, str, int]] = {}
        self.waiting_count = 0
        self._ids = iter(range(1_000_000))
        self._changed = asyncio.Event()

    async def capacities(self) -> Mapping[str, Mapping[str, int]]:
        return self.totals

    async def reserve(self, pool: str, count: int, *, node_id: str = "") -> Reservation:
        self.waiting_count += 1
        try:
            while True:
                free = {node: self.free_count(node, pool) for node in self.totals if node_id in {"", node}}
                node = max(free, key=lambda each: free[each])
                if free[node] >= count:
                    handle = next(self._ids)
                    self.held[handle] = (node, pool, count)
                    return Reservation(node, handle)
                changed = self._changed
                await changed.wait()
        finally:
            self.waiting_count -= 1

    def free_count(self, node: str, pool: str) -> int:
        return self.totals[node].get(pool, 0) - sum(n for at, of, n in self.held.values() if (at, of) == (node, pool))

    def free(self, reservation: Reservation) -> None:
        self.held.pop(reservation.handle, None)
        self._changed.set()
        self._changed = asyncio.Event()

    async def report(self, node_id: str) -> HostReport:
        if node_id not in self.reports:
            raise Unavailable(f"node {node_id}: its host actor does not answer")
        return self.reports[node_id]

    async def gather(self, node_id: str, client: str, ttl_s: float) -> bool:
        report = await self.report(node_id)
        if report.gathered_by not in {"", client}:
            return False
        self.reports[node_id] = replace(report, gathered_by=client if ttl_s else "")
        return True

    async def aclose(self) -> None:
        pass

    @property
    def reserved(self) -> dict[str, int]:
        """Reserved machines by node."""
        counts: dict[str, int] = {}
        for node, _, count in self.held.values():
            counts[node] = counts.get(node, 0) + count
        return counts


@dataclass
class World:
    """Hosts, and a client that places episodes on them."""

    hosts: list[StubHost]
    client: AsyncEnvClient
    cluster: FakeCluster | None

    @property
    def reset_counts(self) -> list[int]:
        return [len(host.episodes.resets) for host in self.hosts]

    def is_all_freed(self) -> bool:
        return self.cluster is None or (not self.cluster.held and not self.cluster.waiting_count)


@asynccontextmanager
async def drawn(*capacities: int) -> AsyncIterator[World]:
    async with stub_hosts(*capacities) as hosts:
        targets = [host.address for host in hosts]
        async with AsyncEnvClient(targets, retry=QUICK, rng=random.Random(1)) as client:
            await client.list_pools()
            if len(targets) > 1:  # a single host is not watched
                await until(lambda: all(host.state is HostState.UP for host in client.statistics().hosts))
            yield World(hosts, client, None)


@asynccontextmanager
async def ray(*capacities: int) -> AsyncIterator[World]:
    cluster = FakeCluster()
    async with stub_hosts(*capacities) as hosts:
        for index, host in enumerate(hosts):
            cluster.totals[f"n{index}"] = {"fake": capacities[index]}
            cluster.reports[f"n{index}"] = HostReport(
                node=f"host-{index}", state="up", endpoint=host.address, pools={"fake": "linux"}
            )
        with (
            patch("cuaenv.client.ray_cluster.RayCluster", lambda _target: cluster),
            patch("cuaenv.client.ray_placement.LINGER_S", 0.05),
            patch("cuaenv.client.slots.LINGER_S", 0.05),
        ):
            async with AsyncEnvClient("ray://auto", retry=QUICK, rng=random.Random(1)) as client:
                yield World(hosts, client, cluster)


# What every placement promises


@pytest.mark.parametrize("world_of", [drawn, ray])
class TestEveryPlacement:
    async def test_a_group_is_on_one_host_and_two_hosts_share_the_groups(self, world_of: Callable[..., object]) -> None:
        async with world_of(8, 8) as world:  # type: ignore[attr-defined]
            async with (
                world.client.reset_group(TASK, size=5, view=NOTHING) as first,
                world.client.reset_group(TASK, size=5, view=NOTHING) as second,
            ):
                homes = [{episode.host.target for episode in group} for group in (first, second)]
                assert [len(home) for home in homes] == [1, 1]
                assert homes[0] != homes[1]
            await until(world.is_all_freed)

    async def test_a_group_that_no_host_can_hold_is_refused_at_once(self, world_of: Callable[..., object]) -> None:
        async with world_of(4, 8) as world:  # type: ignore[attr-defined]
            for host in world.hosts:
                host.episodes.failures.append(errors.GroupTooLarge("holds fewer"))
            with pytest.raises(GroupTooLarge):
                async with world.client.reset_group(TASK, size=9, view=NOTHING, timeout=timedelta(hours=1)):
                    pass
            assert world.is_all_freed()

    async def test_a_host_that_refuses_is_passed_over(self, world_of: Callable[..., object]) -> None:
        async with world_of(8, 8) as world:  # type: ignore[attr-defined]
            for refusal in (errors.Draining("stops", retry_after_s=60.0), errors.TaskNotFound("not here")):
                first = world.hosts[0].episodes
                first.failures.append(refusal)
                async with AsyncExitStack() as stack:
                    opened = [
                        await stack.enter_async_context(world.client.reset_group(TASK, size=4, view=NOTHING))
                        for _ in range(2)
                    ]
                    assert sum(map(len, opened)) == 8
                first.failures.clear()
                await until(world.is_all_freed)

    async def test_a_cancelled_opening_holds_nothing(self, world_of: Callable[..., object]) -> None:
        async with world_of(4) as world:  # type: ignore[attr-defined]
            host = world.hosts[0].episodes
            host.reset_gate.clear()
            opening = asyncio.create_task(world.client.reset(TASK, view=NOTHING).__aenter__())
            await until(lambda: "reset" in host.calls)
            opening.cancel()
            await asyncio.wait({opening})
            await until(lambda: "close_opening" in host.calls)
            host.reset_gate.set()
            await until(lambda: host.list_episodes() == [])
            await until(world.is_all_freed)

    async def test_tasks_and_pools_are_listed_of_all_hosts(self, world_of: Callable[..., object]) -> None:
        async with world_of(4, 8) as world:  # type: ignore[attr-defined]
            assert sorted(pool.capacity for pool in await world.client.list_pools()) == [4, 8]
            assert any(task.task_id == TASK for task in await world.client.list_tasks())


# What only a cluster promises


async def test_a_group_waits_in_the_cluster_and_not_at_a_daemon() -> None:
    async with ray(8, 8) as world:
        assert world.cluster is not None
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(world.client.reset_group(TASK, size=6, view=NOTHING))
            waiting = asyncio.create_task(one_group(world, 4))
            await until(lambda: world.cluster is not None and world.cluster.waiting_count == 1)
            assert sum(world.reset_counts) == 2
        await waiting
        assert sum(world.reset_counts) == 3
        await until(world.is_all_freed)


async def one_group(world: World, size: int, *, timeout: timedelta = timedelta(minutes=1)) -> str:
    async with world.client.reset_group(TASK, size=size, view=NOTHING, timeout=timeout) as group:
        return group[0].host.target


async def test_branches_are_reserved_with_their_group_and_held_until_the_last_fork_ends() -> None:
    async with ray(8) as world:
        assert world.cluster is not None
        async with AsyncExitStack() as forks:
            async with world.client.reset(TASK, branches=3, view=NOTHING) as parent:
                assert world.cluster.reserved == {"n0": 4}
                await forks.enter_async_context(world.client.fork(parent, count=2))
            assert world.cluster.reserved == {"n0": 4}
        await until(world.is_all_freed)
        with pytest.raises(GroupTooLarge, match=r"with 6 branches needs 9 envd_fake on one host.* has 8"):
            async with world.client.reset_group(TASK, size=3, branches=6, view=NOTHING):
                pass


async def test_a_host_that_is_not_up_gets_nothing_and_its_reason_is_reported() -> None:
    async with ray(8) as world:
        assert world.cluster is not None
        world.cluster.reports["n0"] = replace(world.cluster.reports["n0"], state="draining")
        with pytest.raises(PoolExhausted, match="host-0 is draining"):
            await one_group(world, 2, timeout=timedelta(seconds=0.3))
        assert world.reset_counts == [0]
        await until(world.is_all_freed)


async def test_a_group_finds_the_other_host_while_the_emptier_one_is_down() -> None:
    async with ray(16, 8) as world:
        assert world.cluster is not None
        down = world.cluster.reports.pop("n0")
        assert await one_group(world, 8) == world.hosts[1].address
        await until(world.is_all_freed)
        world.cluster.reports["n0"] = down
        assert await one_group(world, 8) == world.hosts[0].address
        await until(world.is_all_freed)


async def test_an_unknown_pool_is_refused_at_once_and_the_resources_are_named() -> None:
    async with ray(8) as world:
        with pytest.raises(PoolNotFound, match="resource envd_windows; the cluster has envd_fake"):
            async with world.client.reset(TASK, pool="windows", timeout=timedelta(hours=1)):
                pass


async def test_without_hosts_an_opening_waits_for_the_first_one() -> None:
    async with ray(8) as world:
        assert world.cluster is not None
        totals, world.cluster.totals = world.cluster.totals, {}
        with patch("cuaenv.client.ray_placement._POLL_S", 0.01):
            opening = asyncio.create_task(one_group(world, 2))
            with pytest.raises(PoolExhausted):
                await one_group(world, 2, timeout=timedelta(seconds=0.1))
            world.cluster.totals = totals
            assert await opening == world.hosts[0].address


async def test_a_host_that_dies_frees_its_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuaenv.client.leases._CLOSE_TIMEOUT", timedelta(seconds=1))
    async with ray(8) as world:
        assert world.cluster is not None
        async with world.client.reset_group(TASK, size=4, view=NOTHING):
            assert world.cluster.reserved == {"n0": 4}
            await world.hosts[0].server.stop()
        await until(world.is_all_freed)


async def test_a_later_group_reuses_the_slots_of_closed_episodes_without_a_reservation() -> None:
    async with ray(8) as world:
        assert world.cluster is not None
        async with world.client.reset_group(TASK, size=8, view=NOTHING) as group:
            waiting = asyncio.create_task(one_group(world, 4))
            await until(lambda: world.cluster is not None and world.cluster.waiting_count == 1)
            for episode in group[:4]:
                await episode.close()
            assert await waiting == world.hosts[0].address
            assert world.cluster.reserved == {"n0": 8}
        await until(world.is_all_freed)


async def keep_busy(world: World, client: AsyncEnvClient, counts: list[int]) -> None:
    """Open and close groups of 2, as small runs do."""
    while True:
        async with client.reset_group(TASK, size=2, view=NOTHING):
            counts[0] += 1


async def test_a_large_group_begins_although_small_ones_of_other_clients_take_every_free_slot() -> None:
    async with ray(8) as world, AsyncExitStack() as stack:
        assert world.cluster is not None
        counts = [0]
        others = [
            await stack.enter_async_context(AsyncEnvClient("ray://auto", retry=QUICK, rng=random.Random(seed)))
            for seed in (2, 3)
        ]
        with (
            patch("cuaenv.client.gathering.GATHER_AFTER_S", 0.2),
            patch("cuaenv.client.gathering._PAUSE_S", 0.02),
            patch("cuaenv.client.gathering.GATHER_REST_S", 0.1),
            patch("cuaenv.client.ray_placement._POLL_S", 0.02),
        ):
            busy = [asyncio.create_task(keep_busy(world, client, counts)) for client in others for _ in range(4)]
            await until(lambda: counts[0] >= 16)
            async with world.client.reset_group(TASK, size=8, view=NOTHING) as group:
                assert len(group) == 8
            before = counts[0]
            await until(lambda: counts[0] > before)
            for task in busy:
                task.cancel()
            await asyncio.wait(busy)
        await until(world.is_all_freed)


async def test_a_client_that_stops_waiting_stops_gathering() -> None:
    async with ray(8) as world:
        assert world.cluster is not None
        cluster = world.cluster
        with patch("cuaenv.client.gathering.GATHER_AFTER_S", 0.0):
            async with world.client.reset_group(TASK, size=6, view=NOTHING):
                waiting = asyncio.create_task(one_group(world, 4))
                # Two of its four slots are free.
                await until(lambda: cluster.reserved == {"n0": 8} and bool(cluster.reports["n0"].gathered_by))
                waiting.cancel()
                await asyncio.wait({waiting})
                assert cluster.reports["n0"].gathered_by == ""
                await until(lambda: cluster.reserved == {"n0": 6})
        await until(world.is_all_freed)
