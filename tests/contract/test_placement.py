"""What a client of several hosts promises, on real sockets: hosts in a list, and in a cluster with a fake `ray`."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Timer
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from cuaenv.client import (
    AsyncEnvClient,
    GroupTooLarge,
    HostState,
    RetryPolicy,
    TypeText,
    Unavailable,
    Unreachable,
    View,
)
from cuaenv.client.ray_cluster import HostReport
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


class FakeRay:
    """The part of the module `ray` that clients use, connected to a cluster in this process."""

    def __init__(self) -> None:
        self.capacities: dict[str, int] = {}
        self.reports: dict[str, HostReport | None] = {}
        """Reports by node id, of nodes with an actor; None if it does not answer."""
        self.problem = ""
        """Why the cluster does not answer."""

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, object]]:
        if self.problem:
            raise ConnectionError(self.problem)
        head = {"NodeID": "head", "NodeName": "head", "Alive": True, "Resources": {"CPU": 8.0}}
        hosts = [
            {"NodeID": node, "NodeName": f"name-{node}", "Alive": True, "Resources": {"envd_fake": float(capacity)}}
            for node, capacity in self.capacities.items()
        ]
        return [head, *hosts, {**head, "NodeID": "lost", "Alive": False, "Resources": {"envd_fake": 8.0}}]

    def get_actor(self, name: str, *, namespace: str) -> SimpleNamespace:
        node = name.removeprefix("envd_host_")
        if namespace != "envd" or node not in self.reports:
            raise ValueError(f"Failed to look up actor with name '{name}'")
        answer: Future[HostReport] = Future()
        if (report := self.reports[node]) is not None:
            Timer(0.02, answer.set_result, [report]).start()  # later, as from another process
        return SimpleNamespace(report=SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: answer)))

    def change(self, node: str, **fields: str) -> None:
        report = self.reports[node]
        assert report is not None
        self.reports[node] = replace(report, **fields)  # type: ignore[arg-type]


@dataclass
class World:
    """Hosts, and a client that places episodes on them."""

    hosts: list[StubHost]
    client: AsyncEnvClient
    ray: FakeRay

    @property
    def reset_counts(self) -> list[int]:
        return [len(host.episodes.resets) for host in self.hosts]

    def listed(self) -> set[str]:
        """Return the hosts that new episodes may be opened on."""
        (pool,) = self.client._host_pools.values()
        return {host.target for host in pool._placement._listed}


async def until_all_have_reported(client: AsyncEnvClient, count: int) -> None:
    def have_reported() -> bool:
        hosts = client.statistics().hosts
        return len(hosts) == count and all(host.state is HostState.UP for host in hosts)

    await until(have_reported)


@asynccontextmanager
async def listed(*capacities: int) -> AsyncIterator[World]:
    async with stub_hosts(*capacities) as hosts:
        targets = [host.address for host in hosts]
        async with AsyncEnvClient(targets, retry=QUICK, rng=random.Random(1)) as client:
            await client.list_pools()
            if len(targets) > 1:  # a single host is not watched
                await until_all_have_reported(client, len(targets))
            yield World(hosts, client, FakeRay())


@asynccontextmanager
async def in_ray(*capacities: int, states: Sequence[str] = (), retry: RetryPolicy = QUICK) -> AsyncIterator[World]:
    """Serve hosts of a Ray cluster; without `states` all are up, and the client knows them."""
    ray = FakeRay()
    async with stub_hosts(*capacities) as hosts:
        for index, (host, state) in enumerate(zip(hosts, states or ["up"] * len(hosts), strict=True)):
            ray.capacities[f"n{index}"] = capacities[index]
            ray.reports[f"n{index}"] = HostReport(node=f"host-{index}", state=state, endpoint=host.address)
        with (
            patch.dict(sys.modules, {"ray": ray}),
            patch("cuaenv.client.drawn_placement._RAY_INTERVAL_S", 0.01),
            patch("cuaenv.client.drawn_placement._UNRESOLVED_INTERVAL_S", 0.01),
            patch("cuaenv.client.ray_cluster._REPORT_TIMEOUT_S", 0.5),
        ):
            async with AsyncEnvClient("ray://auto", retry=retry, rng=random.Random(1)) as client:
                if not states:
                    await client.list_pools()
                    await until_all_have_reported(client, len(hosts))
                yield World(hosts, client, ray)


# What listed hosts and a Ray cluster promise


@pytest.mark.parametrize("world_of", [listed, in_ray])
class TestListedAndResolved:
    async def test_a_group_is_on_one_host_and_two_hosts_share_the_groups(self, world_of: Callable[..., object]) -> None:
        async with (
            world_of(8, 8) as world,  # type: ignore[attr-defined]
            world.client.reset_group(TASK, size=5, view=NOTHING) as first,
            world.client.reset_group(TASK, size=5, view=NOTHING) as second,
        ):
            homes = [{episode.host.target for episode in group} for group in (first, second)]
            assert [len(home) for home in homes] == [1, 1]
            assert homes[0] != homes[1]

    async def test_a_group_that_no_host_can_hold_is_refused_at_once(self, world_of: Callable[..., object]) -> None:
        async with world_of(4, 8) as world:  # type: ignore[attr-defined]
            for host in world.hosts:
                host.episodes.failures.append(errors.GroupTooLarge("holds fewer"))
            with pytest.raises(GroupTooLarge):
                async with world.client.reset_group(TASK, size=9, view=NOTHING, timeout=timedelta(hours=1)):
                    pass

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

    async def test_a_cancelled_opening_holds_nothing(self, world_of: Callable[..., object]) -> None:
        async with world_of(4) as world:  # type: ignore[attr-defined]
            host = world.hosts[0].episodes
            host.reset_gate.clear()
            opening = asyncio.create_task(world.client.reset(TASK, view=NOTHING).__aenter__())
            await until(lambda: "reset" in host.calls)
            opening.cancel()
            await asyncio.wait({opening})
            # Its setup would run until the gate opens.
            await until(lambda: not any(one.leftover_count for one in world.client.statistics().hosts))
            assert host.list_episodes() == []

    async def test_tasks_and_pools_are_listed_of_all_hosts(self, world_of: Callable[..., object]) -> None:
        async with world_of(4, 8) as world:  # type: ignore[attr-defined]
            assert sorted(pool.capacity for pool in await world.client.list_pools()) == [4, 8]
            assert any(task.task_id == TASK for task in await world.client.list_tasks())


# What only a Ray cluster promises


async def one_group(world: World, size: int, *, timeout: timedelta = timedelta(minutes=1)) -> str:
    async with world.client.reset_group(TASK, size=size, view=NOTHING, timeout=timeout) as group:
        return group[0].host.target


async def test_a_host_that_drains_gets_no_new_groups_and_its_episodes_continue() -> None:
    async with in_ray(8, 8) as world:
        async with world.client.reset_group(TASK, size=4, view=NOTHING) as group:
            home = group[0].host.target
            (index,) = [index for index, host in enumerate(world.hosts) if host.address == home]
            other = world.hosts[1 - index].address
            world.ray.change(f"n{index}", state="draining")
            await until(lambda: world.listed() == {other})
            assert {await one_group(world, 2) for _ in range(6)} == {other}
            await group[0].step(TypeText("x"))
        world.ray.change(f"n{index}", state="up")
        await until(lambda: len(world.listed()) == 2)


async def test_when_no_host_is_up_groups_wait_and_the_reason_of_each_is_reported_at_the_deadline() -> None:
    async with in_ray(8, 8) as world:
        world.ray.change("n0", state="draining")
        world.ray.change("n1", state="down", problem="the daemon ended: no image")
        await until(lambda: not world.listed())
        with pytest.raises(
            Unavailable,
            match=r"ray://auto: no host is up: host-0 is draining; host-1 is down: the daemon ended: no image",
        ):
            await one_group(world, 2, timeout=timedelta(seconds=0.3))
        with pytest.raises(Unavailable, match="host-0 is draining"):
            await world.client.list_tasks()
        assert world.reset_counts == [0, 0]
        opening = asyncio.create_task(one_group(world, 2))
        world.ray.change("n1", state="up", problem="")
        assert await opening == world.hosts[1].address


async def test_a_group_waits_for_the_first_host_for_longer_than_for_a_connection() -> None:
    retry = replace(QUICK, connect_timeout=timedelta(milliseconds=100))
    async with in_ray(8, states=["starting"], retry=retry) as world:
        begin_s = asyncio.get_running_loop().time()
        with patch("cuaenv.client.drawn_placement._FIRST_REPORTS_S", 0.05):
            opening = asyncio.create_task(one_group(world, 2))
            await until(lambda: asyncio.get_running_loop().time() > begin_s + 0.3)
        assert not opening.done()
        world.ray.change("n0", state="up")
        assert await opening == world.hosts[0].address


async def test_a_host_whose_actor_is_missing_or_silent_gets_nothing() -> None:
    async with in_ray(8, 8, 8) as world:
        del world.ray.reports["n0"]
        world.ray.reports["n1"] = None
        await until(lambda: world.listed() == {world.hosts[2].address})
        del world.ray.reports["n2"]
        await until(lambda: not world.listed())
        with pytest.raises(Unavailable) as caught:
            await one_group(world, 2, timeout=timedelta(seconds=1))
        for problem in (
            "name-n0 is down: its host actor does not answer: Failed to look up",
            "TimeoutError; run `train",
        ):
            assert problem in str(caught.value)


async def test_hosts_stay_while_the_cluster_does_not_answer() -> None:
    async with in_ray(8) as world:
        world.ray.problem = "the head is lost"
        assert await one_group(world, 2) == world.hosts[0].address
        # Another client knows no host.
        async with AsyncEnvClient("ray://auto", retry=QUICK) as client:
            with pytest.raises(Unreachable, match="ray://auto: the Ray cluster does not answer: the head is lost"):
                await client.list_pools()


async def test_a_host_that_would_get_the_token_in_clear_text_is_refused_with_the_reason() -> None:
    async with in_ray(8) as world:
        world.ray.change("n0", endpoint="192.0.2.7:50051")
        async with AsyncEnvClient("ray://auto", token="secret", retry=QUICK) as client:  # noqa: S106
            with pytest.raises(Unreachable, match=r"192\.0\.2\.7:50051 is on another host and would get the token"):
                await client.list_pools()
