"""The head of a Ray cluster of hosts is lost: the daemons and their episodes are not.

A file of its own: a process is connected to one cluster at a time.
"""

import asyncio
from typing import TYPE_CHECKING

import pytest

from cuaenv.client import AsyncEnvClient, Click, Done, View

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1200)]
TASK = "fake/count-to-five"
NOTHING = View(encoding="none")
COUNT = Click(x=819, y=100)


async def test_an_episode_survives_the_loss_of_the_head_and_the_next_cluster_adopts_its_daemon(
    tmp_path: "Path",
) -> None:
    from tests.support.ray_hosts import RayHosts

    first = RayHosts(tmp_path, capacity=4)
    second = None
    try:
        first.add("host-0")
        await asyncio.to_thread(first.up)
        report = first.report("host-0")
        trainer = await first.start_trainer(size=2)
        assert trainer.stdout is not None
        assert await trainer.stdout.readline() == b"score 1.0\n"
        # This client does not use Ray.
        async with AsyncEnvClient(report.endpoint) as client, client.reset(TASK, view=NOTHING) as episode:
            await episode.step(COUNT)
            await asyncio.to_thread(first.kill_head)
            await trainer.stdout.read()
            assert await trainer.wait() != 0
            await episode.step(COUNT, COUNT, COUNT)
            async with asyncio.timeout(300):  # until the trainer's leases have expired
                while (await client.list_pools())[0].leased_count > 1:
                    await asyncio.sleep(0.1)
            second = RayHosts(tmp_path, capacity=4)
            second.add("host-0")
            await asyncio.to_thread(second.up)
            assert second.report("host-0").pid == report.pid
            await episode.step(COUNT)
            await episode.step(Done())
            assert (await episode.evaluate()).score == 1.0
        async with AsyncEnvClient(second.target) as client, client.reset(TASK) as episode:
            assert episode.host.target == report.endpoint
    finally:
        if second is None:
            first.close()
        else:
            first.cluster.shutdown()
            second.close()
