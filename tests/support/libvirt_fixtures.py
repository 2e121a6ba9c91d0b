"""Fixtures of the machine contract on real machines: libvirt's embedded driver and QEMU."""

import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from envd.base.config import HypervisorConfig
from envd.hypervisor.machine import DiskImage, Hypervisor, Machine, MachineSpec, Snapshot
from envd.hypervisor.qemu.driver import LibvirtHypervisor
from envd.hypervisor.qemu.machine import LibvirtMachine
from envd.hypervisor.qemu.processes import machine_pids
from envd.hypervisor.qemu.snapshots.snapshot import LibvirtSnapshot
from tests.support.leftovers import machine_leftovers
from tests.support.machine_contract.fixtures import MachineFixtures


class LibvirtFixtures(MachineFixtures):
    """Real machines of one image, which a subclass provides."""

    # Under emulation on a busy host.
    boot_timeout_s: ClassVar[float] = 300.0
    cancel_after_s: ClassVar[tuple[float, ...]] = (0.0, 0.05, 0.5)
    state_dir: ClassVar[Path]
    template_dir: ClassVar[Path]
    image: ClassVar[DiskImage]

    @classmethod
    def find_image(cls, cache_dir: Path) -> DiskImage:
        """Return the image under test; called once."""
        raise NotImplementedError

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def hypervisor(  # type: ignore[override]  # fixtures depend on other fixtures
        cls, vm_state_dir: Path, cache_dir: Path, request: pytest.FixtureRequest
    ) -> AsyncIterator[LibvirtHypervisor]:
        """Yield a hypervisor without machines, and check that its machines left nothing and changed no image."""
        cls.state_dir = vm_state_dir
        cls.image = cls.find_image(cache_dir)
        bases = {drive.path: drive.path.stat() for drive in (*cls.image.disks, *cls.image.cdroms)}
        own_dir = vm_state_dir / "templates"
        kept_dir = own_dir if request.config.getoption("--long") else cache_dir / "contract-templates"
        with _unused(kept_dir, own_dir) as cls.template_dir:
            settings = HypervisorConfig(template_dir=cls.template_dir)
            hypervisor = await LibvirtHypervisor.open(
                settings, state_dir=vm_state_dir, cache_dir=cache_dir, images=[cls.image]
            )
            assert await hypervisor.reap() == []
            yield hypervisor
            assert machine_leftovers(vm_state_dir) == []
            await hypervisor.close()
        for path, before in bases.items():
            after = path.stat()
            assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino), (
                f"a machine wrote to {path}"
            )

    @classmethod
    def make_spec(cls, machine_id: str) -> MachineSpec:
        """Return a spec of the image under test."""
        return MachineSpec(machine_id=machine_id, image=cls.image)

    @classmethod
    async def kill(cls, machine: Machine) -> None:
        """Kill the machine's QEMU."""
        os.kill(machine_pids(cls.state_dir)[machine.machine_id], 9)

    @classmethod
    async def screendump(cls, machine: Machine) -> npt.NDArray[np.uint8]:
        """Return the screen as read from the display device."""
        assert isinstance(machine, LibvirtMachine)
        return await machine.screendump()

    @classmethod
    @contextmanager
    def removed(cls, hypervisor: Hypervisor, template: Snapshot) -> Iterator[None]:
        """Move the template's directory away."""
        assert isinstance(template, LibvirtSnapshot)
        hidden = cls.state_dir / "hidden"
        template.files.directory.rename(hidden)
        yield
        hidden.rename(template.files.directory)

    @classmethod
    def leftovers(cls, hypervisor: Hypervisor, machine_id: str) -> list[str]:
        """See `machine_leftovers`."""
        return machine_leftovers(cls.state_dir, machine_id)

    @classmethod
    async def snapshot_leftovers(cls, hypervisor: Hypervisor) -> list[str]:
        """List the directories of captures."""
        return [str(path) for path in (cls.state_dir / "captures").glob("*")]


@contextmanager
def _unused(kept_dir: Path, own_dir: Path) -> Iterator[Path]:
    """Yield the directory of a template that is kept between runs, or `own_dir` if another run uses that now.

    A kept template saves a boot. Two runs cannot share it: one of the tests moves it away for a moment.
    """
    kept_dir.mkdir(parents=True, exist_ok=True)
    lock = os.open(kept_dir, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield own_dir
    else:
        yield kept_dir
    finally:
        os.close(lock)
