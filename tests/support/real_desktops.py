"""Real desktops of one backend, for tests that do not depend on which one: containers, and with --long QEMU too.

A test takes a `Backend` from the fixture `real_backend`, which runs it on each backend, or from `qemu`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from cuaenv.client import AsyncEnvClient
from envd.api.server import ApiServer
from envd.base.config import Config, HypervisorConfig
from envd.base.telemetry.metrics import Metrics
from envd.desktop.desktop import Desktop
from envd.episodes.service import EpisodeService
from envd.hypervisor.backends import open_hypervisor
from envd.hypervisor.machine import GuestOs
from envd.hypervisor.qemu.processes import machine_pids
from envd.images.catalogue import ImageCatalogue
from envd.integrations.osworld.catalogue import IMAGE, desktop_task
from envd.pool.pool import MachinePool
from envd.pool.settings import PoolHost, PoolParameters
from envd.tasks.catalogue import TaskCatalogue
from tests.support.containers import container_pids, machine_processes
from tests.support.leftovers import machine_leftovers

QEMU: Final = ""
CONTAINERS: Final = "oci:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """How daemons of a test run machines."""

    uri: str
    cache_dir: Path
    template_dir: Path

    @property
    def is_qemu(self) -> bool:
        return self.uri == QEMU

    @property
    def toml(self) -> str:
        """The table `hypervisor` of a daemon's configuration."""
        return f'\n[hypervisor]\nuri = "{self.uri}"\ntemplate_dir = "{self.template_dir}"\n'

    def machine_pids(self, state_dir: Path) -> dict[str, int]:
        """Return {machine id: the process whose end is the machine's end} of a daemon."""
        return machine_pids(state_dir) if self.is_qemu else container_pids(state_dir)

    def machine_processes(self, state_dir: Path) -> list[int]:
        """Return all processes of a daemon's machines; those whose end is a machine's end come first."""
        first = list(self.machine_pids(state_dir).values())
        return first if self.is_qemu else [*first, *(machine_processes(state_dir).keys() - set(first))]

    def config(self, state_dir: Path) -> Config:
        """Return the settings of a hypervisor in the test's process."""
        hypervisor = HypervisorConfig(uri=self.uri, template_dir=self.template_dir)
        return Config(state_dir=state_dir, cache_dir=self.cache_dir, hypervisor=hypervisor)

    @asynccontextmanager
    async def desktops(self, tasks: TaskCatalogue, *, state_dir: Path) -> AsyncIterator[AsyncEnvClient]:
        """Serve three desktops and yield a client, which has access to the guests; checks that no machine is left."""
        settings = PoolParameters(name="desktop", capacity=3, size=1, allow_guest_access=True)
        async with self.machines(settings, tasks, state_dir=state_dir) as address, AsyncEnvClient(address) as client:
            yield client

    @asynccontextmanager
    async def machines(
        self, settings: PoolParameters, tasks: TaskCatalogue, *, state_dir: Path, image: str = "desktop"
    ) -> AsyncIterator[str]:
        """Serve a pool of real machines and yield the address; checks that no machine is left."""
        disk_image = ImageCatalogue(self.cache_dir).disk_image(image)
        hypervisor = await open_hypervisor(self.config(state_dir), images=[disk_image])
        make_desktop = partial(Desktop, has_powershell=disk_image.os is GuestOs.WINDOWS)
        pool = MachinePool(settings, image=disk_image, host=PoolHost(hypervisor=hypervisor), make_desktop=make_desktop)
        service = EpisodeService([pool], tasks=tasks)
        server = ApiServer(service, listen="127.0.0.1:0", metrics=Metrics())
        await service.start()
        try:
            yield await server.start()
        finally:
            await server.stop()
            await service.aclose()
            await hypervisor.close()
        assert machine_leftovers(state_dir) == []

    @asynccontextmanager
    async def osworld_machines(self, capacity: int, *, state_dir: Path) -> AsyncIterator[str]:
        """Serve machines for OSWorld's own environments and yield the address; checks that no machine is left."""
        settings = PoolParameters(name=IMAGE, capacity=capacity, size=1, allow_guest_access=True, always_running=True)
        tasks = TaskCatalogue((), hidden=[desktop_task()])
        async with self.machines(settings, tasks, state_dir=state_dir, image=IMAGE) as address:
            yield address


_CONTAINERS = pytest.param(CONTAINERS, id="containers", marks=pytest.mark.native)
REAL_BACKENDS: Final = [_CONTAINERS, pytest.param(QEMU, id="qemu", marks=[pytest.mark.vm, pytest.mark.long])]
REAL_BACKENDS_IN_EVERY_RUN: Final = [_CONTAINERS, pytest.param(QEMU, id="qemu", marks=pytest.mark.vm)]
