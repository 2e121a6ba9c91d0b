"""A backend that runs no guest code: drawn desktops with real input, and real frames."""

from envd.hypervisor.fake.guest import FakeSnapshot
from envd.hypervisor.fake.hypervisor import FakeHypervisor, fake_image
from envd.hypervisor.fake.machine import FakeMachine

__all__ = ["FakeHypervisor", "FakeMachine", "FakeSnapshot", "fake_image"]
