"""A backend that runs no guest code: drawn desktops with real input, and real frames."""

from envd.drawn.hypervisor import FakeHypervisor, fake_image
from envd.drawn.machine import FakeMachine
from envd.drawn.snapshot import FakeSnapshot

__all__ = ["FakeHypervisor", "FakeMachine", "FakeSnapshot", "fake_image"]
