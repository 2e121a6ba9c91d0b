"""The API on episodes that tests script, and a drawn machine without a pool."""

from collections.abc import AsyncIterator

import pytest

from envd.api.server import ApiServer
from envd.base.sandbox.cgroup import find_hierarchy
from envd.base.telemetry.metrics import Metrics
from envd.drawn import fake_image
from envd.hypervisor.machine import MachineSpec
from tests.support.faulty import FaultyHypervisor, FaultyMachine
from tests.support.stub_episodes import StubEpisodes


@pytest.fixture
async def episodes() -> AsyncIterator[StubEpisodes]:
    async with StubEpisodes() as episodes:
        yield episodes


@pytest.fixture(scope="session")
def job_groups() -> None:
    """Skip the test where jobs can have no control groups."""
    if find_hierarchy() is None:
        pytest.skip("needs a writable control group for memory")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def server(episodes: StubEpisodes, metrics: Metrics) -> AsyncIterator[ApiServer]:
    server = ApiServer(episodes, listen="127.0.0.1:0", metrics=metrics)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def machine() -> AsyncIterator[FaultyMachine]:
    hypervisor = FaultyHypervisor()
    spec = MachineSpec(machine_id="one", image=fake_image(), screen_width_px=640, screen_height_px=400)
    machine = await hypervisor.create(spec)
    yield machine
    await machine.destroy()
    await hypervisor.close()
