"""A backend that runs no guest code: drawn desktops with real input, real frames and injected faults."""

from envd.hypervisor.fake.faults import Faults
from envd.hypervisor.fake.guest import FakeSnapshot
from envd.hypervisor.fake.hypervisor import FakeHost, FakeHypervisor, fake_image
from envd.hypervisor.fake.machine import FakeMachine

__all__ = ["FakeHost", "FakeHypervisor", "FakeMachine", "FakeSnapshot", "Faults", "fake_image"]
