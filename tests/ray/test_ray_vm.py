"""A host with real machines in a Ray cluster: reset, fork, score, drain."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cuaenv.client import AsyncEnvClient, AsyncEpisode, Done, PressKeys, TypeText, Wait
from envd.images.catalogue import Image

if TYPE_CHECKING:
    from tests.support.ray_hosts import RayHosts

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vm,
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("default"),
]
TASK = "desktop/type-greeting"
CONFIG = """\
listen = "127.0.0.1:0"
metrics_listen = "127.0.0.1:0"

[pools.desktop]
image = "desktop"
size = 1
capacity = {{capacity}}

[hypervisor]
template_dir = "{template_dir}"
"""
PATIENT = timedelta(minutes=5)


@pytest.fixture(scope="module")
def real_host(desktop_image: Image, template_dir: Path) -> "Iterator[RayHosts]":
    """One host with three real machines."""
    from tests.support.ray_hosts import RayHosts
    from trainer.hosts.supervisor import drain

    assert desktop_image.name == "desktop"
    # Below /tmp, not pytest's own deep directory: Unix sockets end at 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="envd-r-", dir="/tmp"))
    served = RayHosts(directory, capacity=3, config=CONFIG.format(template_dir=template_dir))
    try:
        served.add("host-0")
        served.up()
        yield served
    finally:
        drain(served.target, "host-0")
        served.wait(lambda: served.report("host-0").state == "drained")
        left = served.daemon_pids()
        served.close()
        shutil.rmtree(directory)
        assert not left


async def play(episode: AsyncEpisode, *, works: bool) -> float:
    if works:
        await episode.step(TypeText("Hello, desktop!"), PressKeys(["ctrl", "s"]), Wait(timedelta(seconds=5)))
    await episode.step(Done(), timeout=PATIENT)
    return (await episode.evaluate(timeout=PATIENT)).score


async def test_real_machines_are_leased_forked_scored_and_drained(real_host: "RayHosts") -> None:
    async with AsyncEnvClient(real_host.target) as client:
        async with client.reset_group(TASK, size=2, branches=1, timeout=PATIENT) as (first, second):
            async with client.fork(first, count=1, timeout=PATIENT) as (branch,):
                scores = [await play(branch, works=True), await play(second, works=False)]
            scores.append(await play(first, works=True))
        assert scores == [1.0, 0.0, 1.0]
        await asyncio.to_thread(real_host.wait, lambda: not real_host.leased())
