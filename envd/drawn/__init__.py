"""A backend that runs no guest code: drawn desktops with real input, and real frames."""

from envd.drawn.guest import FakeSnapshot
from envd.drawn.hypervisor import FakeHypervisor, fake_image
from envd.drawn.machine import FakeMachine

__all__ = ["FakeHypervisor", "FakeMachine", "FakeSnapshot", "fake_image"]
