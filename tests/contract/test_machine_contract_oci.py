"""The machine contract on containers: runc and the Debian desktop."""

import asyncio
import os
import signal
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from envd.base.errors import HypervisorError, NotForkable
from envd.desktop.desktop import Desktop
from envd.hypervisor.machine import DiskImage, Hypervisor, Machine, MachineSpec, Snapshot
from envd.hypervisor.oci.hypervisor import OciHypervisor
from envd.hypervisor.oci.machine import OciMachine
from envd.hypervisor.oci.templates import OciSnapshot
from tests.support.containers import desktop_image, first_process, settings
from tests.support.machine_contract.machine import ContainerContract

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]


def process_of(machine: Machine) -> int:
    """Return the host's number of a container's first process."""
    assert isinstance(machine, OciMachine)
    assert machine.groups is not None
    return first_process(machine.groups.process_ids())


def read_framebuffer(root: Path) -> npt.NDArray[np.uint8]:
    """Read the screen of display :0 from its X server: X11's connection setup, then GetImage of the root window."""
    with socket.socket(socket.AF_UNIX) as x:
        x.connect(str(root / "tmp/.X11-unix/X0"))
        stream = x.makefile("rb")
        x.sendall(struct.pack("<BxHHHHxx", ord("l"), 11, 0, 0, 0))
        status, length = struct.unpack("<BxxxxxH", stream.read(8))
        assert status == 1, "the X server refused the connection"
        setup = stream.read(length * 4)
        vendor_bytes, format_count = struct.unpack_from("<H", setup, 16)[0], setup[21]
        screen = setup[32 + (vendor_bytes + 3) // 4 * 4 + 8 * format_count :]
        window, width_px, height_px = struct.unpack_from("<I", screen)[0], *struct.unpack_from("<HH", screen, 20)
        x.sendall(struct.pack("<BBHIhhHHI", 73, 2, 5, window, 0, 0, width_px, height_px, 0xFFFFFFFF))
        kind, words = struct.unpack("<BxxxI24x", stream.read(32))
        assert kind == 1, "the X server sent no image"
        pixels_HWC = np.frombuffer(stream.read(words * 4), np.uint8).reshape(height_px, width_px, 4)
        return pixels_HWC[..., 2::-1]


class TestMachineContractOnContainers(ContainerContract):
    fork_count: ClassVar[int] = 4
    image: ClassVar[DiskImage]
    state_dir: ClassVar[Path]

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def hypervisor(cls) -> AsyncIterator[Hypervisor]:
        cls.image = desktop_image()
        with tempfile.TemporaryDirectory(prefix="envd-oci-", dir="/var/tmp") as directory:
            cls.state_dir = Path(directory)
            hypervisor = await OciHypervisor.open(settings(cls.state_dir), [cls.image])
            try:
                yield hypervisor
            finally:
                await hypervisor.close()

    @classmethod
    def make_spec(cls, machine_id: str) -> MachineSpec:
        return MachineSpec(machine_id=machine_id, image=cls.image)

    @classmethod
    async def wait_booted(cls, machine: Machine) -> None:
        desktop = Desktop(machine)
        await desktop.wait_ready(timeout_s=cls.boot_timeout_s)
        await desktop.close()

    @classmethod
    async def kill(cls, machine: Machine) -> None:
        os.kill(process_of(machine), signal.SIGKILL)

    @classmethod
    async def screendump(cls, machine: Machine) -> npt.NDArray[np.uint8]:
        return await asyncio.to_thread(read_framebuffer, Path(f"/proc/{process_of(machine)}/root"))

    @classmethod
    @contextmanager
    def removed(cls, hypervisor: Hypervisor, template: Snapshot) -> Iterator[None]:
        assert isinstance(template, OciSnapshot)
        away = template.directory.with_name("away")
        template.directory.rename(away)
        try:
            yield
        finally:
            away.rename(template.directory)

    @classmethod
    def leftovers(cls, hypervisor: Hypervisor, machine_id: str) -> list[str]:
        assert isinstance(hypervisor, OciHypervisor)
        found = [str(path) for path in (cls.state_dir / "containers").glob(machine_id)]
        found += [f"group {name}" for name in hypervisor._groups.machine_ids() if name == machine_id]
        mounts = Path(f"/proc/{hypervisor._namespace._process.pid}/mounts")
        return found + [line for line in mounts.read_text().splitlines() if machine_id in line]

    @classmethod
    async def snapshot_leftovers(cls, hypervisor: Hypervisor) -> list[str]:
        return []

    async def test_a_running_machine_cannot_be_copied_and_says_what_can(
        self, hypervisor: Hypervisor, machine: Machine, template: Snapshot, tmp_path: Path
    ) -> None:
        assert hypervisor.capabilities.not_forkable
        with pytest.raises(NotForkable, match="containers cannot be copied while they run; use QEMU, the default"):
            await hypervisor.capture(machine)
        for refused in (hypervisor.save(template, tmp_path), hypervisor.restore(template, tmp_path)):
            with pytest.raises(HypervisorError, match="containers cannot be copied"):
                await refused
        assert await self.run(machine, "echo", "alive") == b"alive\n"
