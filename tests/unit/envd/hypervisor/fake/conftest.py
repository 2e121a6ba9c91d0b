"""One fake hypervisor for the tests of its machines."""

from collections.abc import AsyncIterator

import pytest

from envd.hypervisor.fake import FakeHypervisor


@pytest.fixture
async def hypervisor() -> AsyncIterator[FakeHypervisor]:
    """Create a hypervisor; its machines are destroyed at the end."""
    hypervisor = FakeHypervisor()
    yield hypervisor
    for machine in list(hypervisor.machines.values()):
        await machine.destroy()
    await hypervisor.close()
