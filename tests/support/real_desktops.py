"""A server with a pool of real desktops, in the test's process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from cuaenv.client import AsyncEnvClient
from envd.api.server import ApiServer
from envd.base.config import Config, HypervisorConfig
from envd.base.telemetry.metrics import Metrics
from envd.desktop.desktop import Desktop
from envd.episodes.service import EpisodeService
from envd.hypervisor.backends import open_hypervisor
from envd.hypervisor.machine import GuestOs
from envd.images.catalogue import Image, ImageCatalogue
from envd.integrations.osworld.catalogue import IMAGE, desktop_task
from envd.pool.pool import Pool, PoolHost, PoolParameters
from envd.tasks.catalogue import TaskCatalogue
from tests.support.containers import container_leftovers
from tests.support.leftovers import machine_leftovers


@asynccontextmanager
async def real_desktops(
    image: Image, tasks: TaskCatalogue, *, cache_dir: Path, template_dir: Path, state_dir: Path
) -> AsyncIterator[AsyncEnvClient]:
    """Serve three desktops and yield a client, which has access to the guests; checks that no machine is left."""
    settings = PoolParameters(name="desktop", capacity=3, size=1, allow_guest_access=True)
    async with (
        served_machines(
            settings, image, tasks, cache_dir=cache_dir, template_dir=template_dir, state_dir=state_dir
        ) as address,
        AsyncEnvClient(address) as client,
    ):
        yield client


@asynccontextmanager
async def osworld_machines(
    capacity: int, *, cache_dir: Path, template_dir: Path, state_dir: Path
) -> AsyncIterator[str]:
    """Serve machines for OSWorld's own environments and yield the address; checks that no machine is left."""
    settings = PoolParameters(name=IMAGE, capacity=capacity, size=1, allow_guest_access=True, always_running=True)
    image = ImageCatalogue(cache_dir).get(IMAGE)
    tasks = TaskCatalogue((), hidden=[desktop_task()])
    async with served_machines(
        settings, image, tasks, cache_dir=cache_dir, template_dir=template_dir, state_dir=state_dir
    ) as address:
        yield address


@asynccontextmanager
async def served_machines(
    settings: PoolParameters,
    image: Image,
    tasks: TaskCatalogue,
    *,
    cache_dir: Path,
    template_dir: Path,
    state_dir: Path,
    uri: str = "",
) -> AsyncIterator[str]:
    """Serve a pool of real machines, of QEMU by default, and yield the address; checks that no machine is left."""
    disk_image = ImageCatalogue(cache_dir).disk_image(image.name)
    config = Config(
        cache_dir=cache_dir, state_dir=state_dir, hypervisor=HypervisorConfig(uri=uri, template_dir=template_dir)
    )
    hypervisor = await open_hypervisor(config, images=[disk_image])
    make_desktop = partial(Desktop, has_powershell=disk_image.os is GuestOs.WINDOWS)
    pool = Pool(settings, image=disk_image, host=PoolHost(hypervisor=hypervisor), make_desktop=make_desktop)
    service = EpisodeService([pool], tasks=tasks)
    server = ApiServer(service, listen="127.0.0.1:0", metrics=Metrics())
    await service.start()
    try:
        yield await server.start()
    finally:
        await server.stop()
        await service.aclose()
        await hypervisor.close()
    assert (container_leftovers if uri else machine_leftovers)(state_dir) == []
