"""Three hosts in a real Ray cluster on this machine: raylets, actors and daemons are processes of their own."""

import asyncio
import signal
import statistics
import time
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from cuaenv.client import (
    AsyncEnvClient,
    Click,
    Done,
    EnvClient,
    EnvError,
    GroupTooLarge,
    PoolExhausted,
    PoolNotFound,
    RetryPolicy,
    View,
)

if TYPE_CHECKING:
    from tests.support.ray_hosts import RayHosts

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.filterwarnings("default")]
TASK = "fake/count-to-five"
COUNT = Click(x=819, y=100)
NOTHING = View(encoding="none")
PATIENT = timedelta(minutes=3)


async def rollout(client: AsyncEnvClient, *, size: int) -> tuple[set[str], list[float]]:
    """Return the hosts and the scores of a group that counts to five."""
    async with client.reset_group(TASK, size=size, view=NOTHING, timeout=PATIENT) as group:
        for _ in range(5):
            await asyncio.gather(*(episode.step(COUNT) for episode in group))
        await asyncio.gather(*(episode.step(Done()) for episode in group))
        scores = await asyncio.gather(*(episode.evaluate() for episode in group))
        return {episode.host.target for episode in group}, [score.score for score in scores]


def wait_until_free(hosts: "RayHosts") -> None:
    hosts.wait(lambda: not hosts.reserved() and not hosts.leased() and not hosts.status().waiting)


async def test_groups_of_8_contend_for_three_hosts_and_each_is_on_one(hosts: "RayHosts") -> None:
    async with AsyncEnvClient(hosts.target) as client:
        groups = await asyncio.gather(*(rollout(client, size=8) for _ in range(9)))
    assert {len(targets) for targets, _ in groups} == {1}
    assert {score for _, scores in groups for score in scores} == {1.0}
    assert len({target for targets, _ in groups for target in targets}) == 3
    wait_until_free(hosts)


def test_a_synchronous_client_opens_and_branches(hosts: "RayHosts") -> None:
    with EnvClient(hosts.target) as client:
        with client.reset(TASK, branches=2, view=NOTHING) as parent:
            assert sum(hosts.reserved().values()) == 3
            parent.step(COUNT)
            with client.fork(parent, count=2) as copies:
                assert {copy.step(COUNT).state for copy in copies}
        wait_until_free(hosts)


async def test_demand_that_no_host_can_meet_is_refused_at_once_with_the_reason(hosts: "RayHosts") -> None:
    async with AsyncEnvClient(hosts.target) as client:
        with pytest.raises(GroupTooLarge, match=r"needs 9 envd_desktop on one host, and the largest host .* has 8"):
            async with client.reset_group(TASK, size=9, timeout=timedelta(hours=1)):
                pass
        with pytest.raises(PoolNotFound, match="no node of the Ray cluster has the resource envd_windows"):
            async with client.reset(TASK, pool="windows", timeout=timedelta(hours=1)):
                pass


async def test_waiting_groups_are_demand_that_an_autoscaler_sees(hosts: "RayHosts") -> None:
    from ray._private.state import state as ray_state

    async with AsyncEnvClient(hosts.target) as client, AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(client.reset_group(TASK, size=8, view=NOTHING))
        waiting = asyncio.create_task(rollout(client, size=5))
        await asyncio.to_thread(hosts.wait, lambda: [dict(one) for one in hosts.status().waiting] == [{"desktop": 5}])
        pending = [group for group in ray_state.placement_group_table().values() if group["state"] == "PENDING"]
        assert [group["bundles"] for group in pending] == [{0: {"envd_desktop": 5.0}}]
        await stack.aclose()
        assert (await waiting)[1] == [1.0] * 5
    await asyncio.to_thread(wait_until_free, hosts)


async def test_a_host_killed_in_mid_episode_voids_its_group_which_succeeds_elsewhere(hosts: "RayHosts") -> None:
    retry = RetryPolicy(reconnect_timeout=timedelta(seconds=2))
    async with AsyncEnvClient(hosts.target, retry=retry) as client:
        async with client.reset_group(TASK, size=8, view=NOTHING) as group:
            await group[0].step(COUNT)
            home = group[0].host.target
            (name,) = [n.report.node for n in hosts.status().nodes if n.report.endpoint == home]
            killed = hosts.kill_daemon(name)
            # The daemon that the actor starts finds nothing of its drawn desktops, which were in its memory.
            steps = [episode.step(COUNT, timeout=timedelta(seconds=20)) for episode in group]
            results = await asyncio.gather(*steps, return_exceptions=True)
            assert all(isinstance(result, EnvError) for result in results)
        _, scores = await rollout(client, size=8)
        assert scores == [1.0] * 8
    await asyncio.to_thread(hosts.wait, lambda: len(hosts.up_names()) == 3)
    assert hosts.report(name).pid not in {0, killed}
    await asyncio.to_thread(wait_until_free, hosts)


async def test_a_lost_raylet_gets_no_groups_and_its_daemon_is_adopted_when_it_joins_again(hosts: "RayHosts") -> None:
    pid = hosts.report("host-2").pid
    async with AsyncEnvClient(hosts.target) as client, AsyncExitStack() as stack:
        groups = [await stack.enter_async_context(client.reset_group(TASK, size=8, view=NOTHING)) for _ in range(3)]
        await asyncio.to_thread(hosts.kill_raylet, "host-2")
        # Steps do not pass through Ray.
        for group in groups:
            await asyncio.gather(*(episode.step(COUNT) for episode in group))
        await stack.aclose()
        await asyncio.to_thread(hosts.wait, lambda: len(hosts.status().nodes) == 2)
        again = await asyncio.gather(*(rollout(client, size=8) for _ in range(3)))
        assert {score for _, scores in again for score in scores} == {1.0}
    hosts.add("host-2")
    await asyncio.to_thread(hosts.wait, lambda: len(hosts.up_names()) == 3)
    assert hosts.report("host-2").pid == pid
    await asyncio.to_thread(wait_until_free, hosts)


async def test_a_daemon_is_upgraded_by_a_drain_while_its_episode_ends_and_others_open_elsewhere(
    hosts: "RayHosts",
) -> None:
    from trainer.hosts.supervisor import drain, resume

    async with AsyncEnvClient(hosts.target) as client:
        async with client.reset_group(TASK, size=4, view=NOTHING) as group:
            home = group[0].host.target
            (old,) = [node.report for node in hosts.status().nodes if node.report.endpoint == home]
            drain(hosts.target, old.node)
            for _ in range(4):
                targets, scores = await rollout(client, size=4)
                assert (home in targets, scores) == (False, [1.0] * 4)
            assert hosts.report(old.node).state == "draining"
            await asyncio.gather(*(episode.step(COUNT) for episode in group))
        await asyncio.to_thread(hosts.wait, lambda: hosts.report(old.node).state == "drained")
        assert not hosts.is_running(old.pid)
        resume(hosts.target, old.node)
        await asyncio.to_thread(hosts.wait, lambda: len(hosts.up_names()) == 3)
        assert hosts.report(old.node).pid not in {0, old.pid}
    await asyncio.to_thread(wait_until_free, hosts)


async def test_a_host_without_machines_for_long_is_named_at_the_deadline(hosts: "RayHosts") -> None:
    from trainer.hosts.supervisor import drain, resume

    for index in range(3):
        drain(hosts.target, f"host-{index}")
    async with AsyncEnvClient(hosts.target) as client:
        with pytest.raises(PoolExhausted, match=r"host-. is drain"):
            async with client.reset(TASK, timeout=timedelta(seconds=8)):
                pass
    for index in range(3):
        resume(hosts.target, f"host-{index}")
    await asyncio.to_thread(hosts.wait, lambda: len(hosts.up_names()) == 3)
    await asyncio.to_thread(wait_until_free, hosts)


async def test_the_actors_that_are_killed_start_again_and_keep_their_daemons(hosts: "RayHosts") -> None:
    before = {node.report.node: node.report.pid for node in hosts.status().nodes}
    killed = hosts.kill_actors()
    assert len(killed) == 4
    await asyncio.to_thread(hosts.wait, lambda: len(hosts.up_names()) == 3 and not killed & hosts.actor_pids())
    assert {node.report.node: node.report.pid for node in hosts.status().nodes} == before


async def test_a_large_group_begins_while_small_ones_of_another_client_take_every_free_slot(hosts: "RayHosts") -> None:
    async def keep_busy(client: AsyncEnvClient) -> None:
        while True:
            await rollout(client, size=2)

    with patch("cuaenv.client.gathering.GATHER_AFTER_S", 2.0):
        async with AsyncEnvClient(hosts.target) as small, AsyncEnvClient(hosts.target) as large:
            busy = [asyncio.create_task(keep_busy(small)) for _ in range(18)]
            await asyncio.to_thread(hosts.wait, lambda: sum(hosts.reserved().values()) >= 18)
            _, scores = await rollout(large, size=8)
            assert scores == [1.0] * 8
            assert not any(task.done() for task in busy)
            for task in busy:
                task.cancel()
            await asyncio.wait(busy)
    await asyncio.to_thread(wait_until_free, hosts)


async def test_a_reservation_is_cheap_next_to_a_reset(hosts: "RayHosts") -> None:
    """Print the figures; docs/hosts.md quotes them."""
    from cuaenv.client.ray_cluster import RayCluster

    cluster, reserving_ms, reset_ms = RayCluster(hosts.target), [], []
    await cluster.capacities()
    for _ in range(100):
        begin_s = time.perf_counter()
        reservation = await cluster.reserve("desktop", 8)
        await cluster.report(reservation.node_id)
        reserving_ms.append(1000 * (time.perf_counter() - begin_s))
        cluster.free(reservation)
    (endpoint, *_) = [node.report.endpoint for node in hosts.status().nodes]
    async with AsyncEnvClient(endpoint) as client:
        for _ in range(100):
            begin_s = time.perf_counter()
            async with client.reset(TASK, view=NOTHING):
                reset_ms.append(1000 * (time.perf_counter() - begin_s))
    for name, times_ms in (("reservation", reserving_ms), ("reset of a drawn desktop", reset_ms)):
        cuts = statistics.quantiles(times_ms, n=100)
        print(f"{name}: p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms")
    await cluster.aclose()
    assert len(reserving_ms) == len(reset_ms) == 100
    await asyncio.to_thread(wait_until_free, hosts)


async def test_a_killed_trainer_leaves_no_reservation_and_no_machine(hosts: "RayHosts") -> None:
    trainer = await hosts.start_trainer(size=8)
    await asyncio.to_thread(hosts.wait, lambda: sum(hosts.reserved().values()) == 8 and hosts.leased() == 8)
    trainer.send_signal(signal.SIGKILL)
    await trainer.wait()
    await asyncio.to_thread(wait_until_free, hosts)
