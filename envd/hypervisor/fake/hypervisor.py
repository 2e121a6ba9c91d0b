"""Makes fake machines, and keeps the books that tests look into."""

from pathlib import Path

import numpy as np

from envd.errors import HypervisorError
from envd.hypervisor.fake.canvas import Framebuffer, Picture
from envd.hypervisor.fake.desktop import DrawnDesktop
from envd.hypervisor.fake.faults import Faults
from envd.hypervisor.fake.files import GuestFiles
from envd.hypervisor.fake.machine import FakeMachine, require_screen
from envd.hypervisor.machine import Accelerator, DiskImage, MachineSpec, MachineState


def fake_image(name: str = "fake") -> DiskImage:
    """Return an image that fake machines accept; its disk is never opened."""
    return DiskImage(name=name, digest="fake", disk=Path("/dev/null"), disk_format="raw")


class FakeHost:
    """What outlives a daemon: machines that exist, whoever made them, and the start pictures that they share."""

    def __init__(self) -> None:
        self.machines: dict[str, FakeMachine] = {}
        """Every machine that was created and not yet destroyed, by id; lost ones too."""
        self._pictures: dict[tuple[int, int], Picture] = {}

    def picture(self, width_px: int, height_px: int) -> Picture:
        """Return the start picture of a screen size, drawn once."""
        size = (width_px, height_px)
        if size not in self._pictures:
            framebuffer = Framebuffer(np.zeros((height_px, width_px, 4), np.uint8), shared=False)
            DrawnDesktop(framebuffer, files=GuestFiles())
            self._pictures[size] = Picture(framebuffer.pixels)
        return self._pictures[size]

    def drop_pictures(self) -> None:
        """Give back the start pictures' memory; machines keep theirs."""
        while self._pictures:
            self._pictures.popitem()[1].close()


class FakeHypervisor:
    """A hypervisor of drawn desktops.

    A second one on the same `host` stands for a daemon that was started again: what the first one left is reaped.
    """

    def __init__(self, *, faults: Faults | None = None, host: FakeHost | None = None) -> None:
        self.faults = faults or Faults()
        """Faults of machines created from now on."""
        self.host = host or FakeHost()
        self._own_ids: set[str] = set()

    def __repr__(self) -> str:
        return f"<FakeHypervisor {len(self.live_machine_ids)} live | {len(self.leftover_ids)} on the host>"

    @property
    def accelerator(self) -> Accelerator:
        """Always FAKE."""
        return Accelerator.FAKE

    @property
    def description(self) -> str:
        """One line for operators."""
        return "fake: drawn desktops in this process, no guest code runs"

    @property
    def machines(self) -> dict[str, FakeMachine]:
        """Machines on the host by id, for tests that reach into one."""
        return self.host.machines

    @property
    def live_machine_ids(self) -> frozenset[str]:
        """Machines that are running or paused."""
        return frozenset(id for id, machine in self.machines.items() if machine.state is not MachineState.GONE)

    @property
    def leftover_ids(self) -> frozenset[str]:
        """Machines that were not destroyed, lost ones too."""
        return frozenset(self.machines)

    async def create(self, spec: MachineSpec) -> FakeMachine:
        """Make and start a machine. On failure or cancellation nothing is left. Raises: HypervisorError."""
        if spec.machine_id in self.machines:
            raise HypervisorError(f"machine {spec.machine_id} exists already; destroy it first")
        require_screen(spec.screen_width_px, spec.screen_height_px)
        machine = FakeMachine(
            spec,
            picture=self.host.picture(spec.screen_width_px, spec.screen_height_px),
            faults=self.faults,
            on_destroyed=self._forget,
        )
        self.machines[spec.machine_id] = machine
        self._own_ids.add(spec.machine_id)
        try:
            await machine.start()
        except BaseException:
            await machine.destroy()
            raise
        return machine

    async def reap(self) -> list[str]:
        """Destroy what earlier hypervisors on this host left; returns their ids."""
        orphans = [machine for id, machine in self.machines.items() if id not in self._own_ids]
        for machine in orphans:
            await machine.destroy()
        return [machine.machine_id for machine in orphans]

    async def close(self) -> None:
        """Let go of the start pictures."""
        self.host.drop_pictures()

    def _forget(self, machine: FakeMachine) -> None:
        self.machines.pop(machine.machine_id, None)
        self._own_ids.discard(machine.machine_id)
