"""One fake hypervisor for the tests of its machines."""

from collections.abc import AsyncIterator

import pytest

from tests.support.faulty import FaultyHypervisor


@pytest.fixture
async def hypervisor() -> AsyncIterator[FaultyHypervisor]:
    """Create a hypervisor; its machines are destroyed at the end."""
    hypervisor = FaultyHypervisor()
    yield hypervisor
    for machine in list(hypervisor.machines.values()):
        await machine.destroy()
    await hypervisor.close()
