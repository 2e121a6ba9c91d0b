"""Three hosts in a real Ray cluster on this machine: raylets, actors and daemons are processes of their own."""

import asyncio
import signal
import statistics
import time
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from cuaenv.client import (
    AsyncEnvClient,
    Click,
    Done,
    EnvClient,
    EnvError,
    GroupTooLarge,
    NotFound,
    RetryPolicy,
    Unavailable,
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


def listed(client: AsyncEnvClient) -> set[str]:
    """Return the hosts that a client may open new episodes on."""
    (pool,) = client._host_pools.values()
    return {host.target for host in pool._placement._listed}


def wait_until_free(hosts: "RayHosts") -> None:
    hosts.wait(lambda: not hosts.leased())


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
            parent.step(COUNT)
            with client.fork(parent, count=2) as copies:
                assert {copy.step(COUNT).state for copy in copies}
        wait_until_free(hosts)


async def test_demand_that_no_host_can_meet_is_refused_at_once_with_the_reason(hosts: "RayHosts") -> None:
    async with AsyncEnvClient(hosts.target) as client:
        with pytest.raises(GroupTooLarge):
            async with client.reset_group(TASK, size=9, timeout=timedelta(hours=1)):
                pass
        with pytest.raises(NotFound, match="windows"):
            async with client.reset(TASK, pool="windows", timeout=timedelta(hours=1)):
                pass


async def test_a_host_killed_in_mid_episode_voids_its_group_which_succeeds_elsewhere(hosts: "RayHosts") -> None:
    retry = RetryPolicy(reconnect_timeout=timedelta(seconds=2))
    async with AsyncEnvClient(hosts.target, retry=retry) as client:
        async with client.reset_group(TASK, size=8, view=NOTHING) as group:
            await group[0].step(COUNT)
            home = group[0].host.target
            (name,) = [n.report.node for n in hosts.status() if n.report.endpoint == home]
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
        await asyncio.to_thread(hosts.wait, lambda: len(hosts.status()) == 2 and len(listed(client)) == 2)
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
            (old,) = [node.report for node in hosts.status() if node.report.endpoint == home]
            drain(hosts.target, old.node)
            await asyncio.to_thread(hosts.wait, lambda: home not in listed(client))
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


async def test_when_all_hosts_drain_each_is_named_at_the_deadline(hosts: "RayHosts") -> None:
    from trainer.hosts.supervisor import drain, resume

    for index in range(3):
        drain(hosts.target, f"host-{index}")
    async with AsyncEnvClient(hosts.target) as client:
        with pytest.raises(Unavailable, match=r"host-0 is drain.*host-1 is drain.*host-2 is drain"):
            async with client.reset(TASK, timeout=timedelta(seconds=8)):
                pass
    for index in range(3):
        resume(hosts.target, f"host-{index}")
    await asyncio.to_thread(hosts.wait, lambda: len(hosts.up_names()) == 3)
    await asyncio.to_thread(wait_until_free, hosts)


async def test_the_actors_that_are_killed_start_again_and_keep_their_daemons(hosts: "RayHosts") -> None:
    before = {node.report.node: node.report.pid for node in hosts.status()}
    killed = hosts.kill_actors()
    assert len(killed) == 4
    await asyncio.to_thread(hosts.wait, lambda: len(hosts.up_names()) == 3 and not killed & hosts.actor_pids())
    assert {node.report.node: node.report.pid for node in hosts.status()} == before


def test_the_time_to_ask_all_hosts_is_measured(hosts: "RayHosts") -> None:
    """Print the figures; docs/evidence/scale.md quotes them."""
    asking_ms, reset_ms = [], []
    hosts.status()
    for _ in range(100):
        begin_s = time.perf_counter()
        nodes = hosts.status()
        asking_ms.append(1000 * (time.perf_counter() - begin_s))
    with EnvClient(nodes[0].report.endpoint) as client:
        for _ in range(100):
            begin_s = time.perf_counter()
            with client.reset(TASK, view=NOTHING):
                reset_ms.append(1000 * (time.perf_counter() - begin_s))
    for name, times_ms in (("state of three hosts", asking_ms), ("reset of a drawn desktop", reset_ms)):
        cuts = statistics.quantiles(times_ms, n=100)
        print(f"{name}: p50 {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms")
    assert len(asking_ms) == len(reset_ms) == 100
    wait_until_free(hosts)


async def test_a_killed_trainer_leaves_no_machine(hosts: "RayHosts") -> None:
    trainer = await hosts.start_trainer(size=8)
    await asyncio.to_thread(hosts.wait, lambda: hosts.leased() == 8)
    trainer.send_signal(signal.SIGKILL)
    await trainer.wait()
    await asyncio.to_thread(wait_until_free, hosts)
