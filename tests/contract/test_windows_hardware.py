"""The hardware of Windows machines: UEFI, TPM and drives over forks and branches, and the fork contract on it.

The guest is a small Debian, because no Windows can be had. It has an additional disk and a CD-ROM.
"""

import asyncio
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar

import numpy as np
import pytest

from envd.base.errors import MachineLost, NotForkable
from envd.base.losses import LossOwner
from envd.desktop.agent import GuestAgent, renew_identity
from envd.hypervisor.machine import DiskImage, ExtraDrive, LeftoverKind, Machine, MachineSpec, Snapshot
from envd.hypervisor.qemu.driver import LibvirtHypervisor
from envd.hypervisor.qemu.machine import LibvirtMachine
from envd.hypervisor.qemu.processes import owner_of, tpm_processes
from envd.hypervisor.qemu.snapshots.files import QemuFiles
from envd.hypervisor.qemu.tpm import Tpm
from envd.hypervisor.qemu.user import QemuUser
from tests.support import uefi_guest
from tests.support.libvirt_fixtures import LibvirtFixtures
from tests.support.machine_contract.fixtures import new_machine_id
from tests.support.machine_contract.forks import ForkContract

# Its template takes 200 s of emulation to boot. What every machine shares is in test_machine_contract_libvirt.py.
pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(900)]

_TPM = ("env", "TPM2TOOLS_TCTI=device:/dev/tpmrm0")
_KEY, _NV = "0x81000001", "0x1500016"
_VARIABLES = "/sys/firmware/efi/efivars"
_GUID = "6f2d1e5c-0d4b-4b0e-9a57-0e5d5c1d2a03"
_DATA_MIB = 24
#: For this long a branch does not run before its clocks are examined.
_FROZEN_S = 4.0
#: Seals a secret under a new key, which stays loaded.
_SEAL = f"""
cd /dev/shm && tpm2_createprimary -Q -C o -G ecc -c primary
printf sealed | tpm2_create -Q -C primary -i - -u public -r private
tpm2_load -Q -C primary -u public -r private -c secret
tpm2_evictcontrol -Q -C o -c secret {_KEY}
tpm2_nvdefine -Q {_NV} -s 8
"""


class WindowsHardware(LibvirtFixtures):
    """Machines with the hardware, and access to its TPM and its variables."""

    fork_count: ClassVar[int] = 4
    forks_at_once: ClassVar[int] = 2
    drives: ClassVar[Path]
    rtc_lag_s: ClassVar[tuple[float, float]]
    """`read_rtc_lag_s` of the machine that became the template."""

    @classmethod
    def find_image(cls, cache_dir: Path) -> DiskImage:
        cls.drives = Path(mkdtemp(prefix="drives-", dir=cls.state_dir))
        data, cdrom = cls.drives / "data.qcow2", cls.drives / "cdrom.iso"
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", data, f"{_DATA_MIB}M"], check=True)
        cdrom.write_bytes(b"on the CD-ROM".ljust(1 << 16))
        image = uefi_guest.build(cache_dir).disk_image(uefi_guest.NAME)
        return replace(image, drives=(ExtraDrive(path=data), ExtraDrive(path=cdrom, disk_format="raw", is_cdrom=True)))

    @classmethod
    def make_spec(cls, machine_id: str) -> MachineSpec:
        # An unusual size.
        return MachineSpec(
            machine_id=machine_id, image=cls.image, memory_mib=512, screen_width_px=1144, screen_height_px=856
        )

    @classmethod
    async def wait_booted(cls, machine: Machine) -> None:
        await cls.wait_agent(machine)
        self = cls()
        async with asyncio.timeout(cls.boot_timeout_s):
            while True:
                screen = await self.screen(machine)
                if screen.shape == (856, 1144) and len(np.unique(screen)) > 1:
                    break
        await self.run(machine, "sh", "-ec", f"export {_TPM[1]}; {_SEAL}")
        cls.rtc_lag_s = await self.read_rtc_lag_s(machine)

    async def read_rtc_lag_s(self, machine: Machine) -> tuple[float, float]:
        """Return the least and the greatest lag of the real-time clock behind the host's local time.

        It shows whole seconds. Its lag is fixed at boot: QEMU starts it with the host's whole second, and the firmware
        reads it, writes a variable, and sets it to what it had read. Under load that takes more than a second.
        """
        before_s = time.time()
        shown = await self.run(machine, "cat", "/sys/class/rtc/rtc0/since_epoch")
        rtc_s = int(shown) - time.localtime().tm_gmtoff
        return before_s - rtc_s - 1, time.time() - rtc_s

    async def tpm(self, machine: Machine, *argv: str) -> bytes:
        return await self.run(machine, *_TPM, *argv)

    async def write_nv(self, machine: Machine, text: str) -> None:
        """Write 8 characters to the TPM's non-volatile memory."""
        await self.run(machine, "sh", "-ec", f"export {_TPM[1]}; printf {text} | tpm2_nvwrite {_NV} -i -")

    async def read_nv(self, machine: Machine) -> bytes:
        return await self.tpm(machine, "tpm2_nvread", "-s", "8", _NV)

    async def extend(self, machine: Machine) -> bytes:
        """Extend a register of the TPM's volatile state; return its new value."""
        await self.tpm(machine, "tpm2_pcrextend", f"16:sha256={1:064x}")
        return await self.register(machine)

    async def register(self, machine: Machine) -> bytes:
        return await self.run(machine, "cat", "/sys/class/tpm/tpm0/pcr-sha256/16")

    async def write_variable(self, machine: Machine, name: str) -> None:
        """Write a persistent UEFI variable: one write of attributes and value."""
        script = f"printf '\\007\\000\\000\\000%s' value-of-{name} >{_VARIABLES}/{name}-{_GUID}"
        await self.run(machine, "sh", "-ec", script)

    async def variables(self, machine: Machine) -> set[str]:
        listed = (await self.run(machine, "ls", _VARIABLES)).decode().split()
        return {name.removesuffix(f"-{_GUID}") for name in listed if name.endswith(_GUID)}


class TestForkContractOnWindowsHardware(WindowsHardware, ForkContract):
    """The whole contract: most of it is the same code on each hardware."""


class TestWindowsHardware(WindowsHardware):
    # The contract's tests of what a TPM process, variables and drives can break.
    test_freezing_leaves_only_the_template = ForkContract.test_freezing_ends_the_machine_and_leaves_only_the_template
    test_a_cancelled_fork_leaves_nothing = ForkContract.test_a_cancelled_fork_leaves_nothing
    test_a_cancelled_capture_leaves_nothing = (
        ForkContract.test_a_cancelled_capture_leaves_nothing_and_the_machine_continues
    )
    test_a_captures_files_exist_until_its_last_fork_is_destroyed = (
        ForkContract.test_a_captures_files_exist_until_it_is_discarded_and_its_last_fork_destroyed
    )
    test_a_stored_state_does_not_need_its_captures = (
        ForkContract.test_a_stored_state_does_not_need_the_captures_that_it_was_stored_from
    )

    # TPM

    async def test_a_sealed_secret_survives_forks_and_branches(
        self, hypervisor: LibvirtHypervisor, machine: Machine
    ) -> None:
        async with self.capture(hypervisor, machine) as snapshot, self.running_fork(hypervisor, snapshot) as branch:
            for each in (machine, branch):
                # By its handle, and by the context saved by the session of before the fork.
                assert await self.tpm(each, "tpm2_unseal", "-c", _KEY) == b"sealed"
                assert await self.tpm(each, "tpm2_unseal", "-c", "/dev/shm/secret") == b"sealed"  # noqa: S108

    async def test_the_tpms_of_forks_develop_separately(
        self, hypervisor: LibvirtHypervisor, template: Snapshot
    ) -> None:
        async with (
            self.running_fork(hypervisor, template) as parent,
            self.running_fork(hypervisor, template) as sibling,
        ):
            first = await self.extend(parent)
            await self.write_nv(parent, "parent-1")
            async with self.capture(hypervisor, parent) as snapshot:
                second = await self.extend(parent)
                await self.write_nv(parent, "parent-2")
                async with self.running_fork(hypervisor, snapshot) as branch:
                    assert await self.register(branch) == first != second
                    assert await self.read_nv(branch) == b"parent-1"
                    assert await self.extend(branch) == second
                    await self.write_nv(branch, "branch-1")
                    assert await self.read_nv(parent) == b"parent-2"
            assert await self.register(sibling) != first
            assert await self.extend(sibling) == first
            processes = list(tpm_processes(owner_of(self.state_dir)).values())
            assert len(processes) == len(set(processes))
            assert {parent.machine_id, sibling.machine_id} <= set(processes)

    async def test_a_machine_whose_tpm_process_ended_is_not_forkable_and_continues(
        self, hypervisor: LibvirtHypervisor, template: Snapshot
    ) -> None:
        async with self.running_fork(hypervisor, template) as machine:
            assert isinstance(machine, LibvirtMachine)
            assert machine.tpm is not None
            machine.tpm.end()
            with pytest.raises(NotForkable, match="TPM"):
                await hypervisor.capture(machine)
            assert await self.run(machine, "echo", "alive") == b"alive\n"

    async def test_tpm_processes_without_a_machine_are_found_and_removed(
        self, hypervisor: LibvirtHypervisor, template: Snapshot
    ) -> None:
        owner = owner_of(self.state_dir)
        lost = await hypervisor.fork(template, new_machine_id())
        directory = self.state_dir / "machines" / "stray"
        directory.mkdir()
        stray = Tpm.start(
            QemuFiles(directory=directory), owner=owner, machine_id="stray", state=None,
            user=QemuUser(account=None, why="test"),
        )  # fmt: skip
        # As after kill -9 of the daemon: neither is known to this one.
        hypervisor._forget(lost)
        async with asyncio.timeout(self.prompt_s):
            # A process has no command line until the kernel has loaded its program.
            while "stray" not in tpm_processes(owner).values():
                await asyncio.sleep(0.01)
        found = await hypervisor.leftovers()
        assert (LeftoverKind.PROCESS, "stray") in {(leftover.kind, leftover.name) for leftover in found}
        for leftover in found:
            await hypervisor.remove(leftover)
        assert lost.tpm is not None
        async with asyncio.timeout(self.prompt_s):
            while not (stray.has_ended and lost.tpm.has_ended):
                await asyncio.sleep(0.05)
        assert {lost.machine_id, "stray"}.isdisjoint(tpm_processes(owner).values())
        assert await hypervisor.leftovers() == []
        stray.end()
        await lost.destroy()

    # UEFI variables

    async def test_uefi_variables_are_each_forks_own_and_are_copied_to_its_branches(
        self, hypervisor: LibvirtHypervisor, template: Snapshot
    ) -> None:
        async with (
            self.running_fork(hypervisor, template) as parent,
            self.running_fork(hypervisor, template) as sibling,
        ):
            await self.write_variable(parent, "Parent")
            await self.write_variable(sibling, "Sibling")
            async with self.capture(hypervisor, parent) as snapshot:
                await self.write_variable(parent, "Later")
                async with self.running_fork(hypervisor, snapshot) as branch:
                    await self.write_variable(branch, "Branch")
                    assert await self.variables(branch) == {"Parent", "Branch"}
                    assert b"value-of-Parent" in await self.run(branch, "cat", f"{_VARIABLES}/Parent-{_GUID}")
                    # The firmware keeps a copy of the variables in memory, so its file is examined too.
                    assert isinstance(branch, LibvirtMachine)
                    stored = branch.files.firmware_vars.read_bytes()
                    assert b"value-of-Parent" in stored
                    assert b"value-of-Branch" in stored
                    assert b"value-of-Later" not in stored
            assert await self.variables(parent) == {"Parent", "Later"}
            assert await self.variables(sibling) == {"Sibling"}

    # Clock

    async def test_both_clocks_of_a_fork_and_of_a_branch_are_right(
        self, hypervisor: LibvirtHypervisor, machine: Machine
    ) -> None:
        async with self.capture(hypervisor, machine) as snapshot, self.running_fork(hypervisor, snapshot) as branch:
            # The branch's system clock is behind by this time, until it wakes.
            await asyncio.sleep(_FROZEN_S)
            # At the start the real-time clock shows the host's local time, as Windows expects. If the firmware sets the
            # clock, its first second ends after half a second (data sheet of the MC146818).
            lags_s = [self.rtc_lag_s, (-0.5, self.boot_timeout_s)]
            for each in (machine, branch):
                before_s = time.time()
                await renew_identity(GuestAgent(each), machine_id=each.machine_id, windows=False)
                system_s = int(await self.run(each, "date", "+%s"))
                assert int(before_s) <= system_s <= time.time()
                lags_s.append(await self.read_rtc_lag_s(each))
        # All are readings of one lag.
        assert max(least_s for least_s, _ in lags_s) < min(greatest_s for _, greatest_s in lags_s), lags_s

    # Display and drives

    async def test_the_display_announces_exactly_the_specs_size(self, machine: Machine) -> None:
        modes = (await self.run(machine, "sh", "-c", "cat /sys/class/drm/card*-Virtual-1/modes")).decode().split()
        assert modes[0] == "1144x856"

    async def test_a_machine_without_a_display_driver_is_not_forkable(self, hypervisor: LibvirtHypervisor) -> None:
        # Frozen in its firmware, which draws to VGA memory. Other memory than the contract's template has another key.
        booting = await hypervisor.create(replace(self.make_spec(new_machine_id()), memory_mib=256))
        early = await hypervisor.freeze(booting, notes={})
        async with self.fork(hypervisor, early) as machine:
            with pytest.raises(NotForkable, match="display"):
                await hypervisor.capture(machine)
        assert await self.snapshot_leftovers(hypervisor) == []

    async def test_additional_disks_are_each_forks_own_and_are_copied_to_its_branches(
        self, hypervisor: LibvirtHypervisor, template: Snapshot
    ) -> None:
        find = f"cd /sys/block; for disk in sd*; do [ $(cat $disk/size) = {_DATA_MIB << 11} ] && echo /dev/$disk; done"

        async def write(machine: Machine, text: str) -> None:
            await self.run(machine, "sh", "-ec", f"printf {text} | dd of=$({find}) bs=512 conv=sync,fsync")

        async def read(machine: Machine) -> bytes:
            return (await self.run(machine, "sh", "-ec", f"dd if=$({find}) bs=512 count=1 iflag=direct"))[:6]

        async with (
            self.running_fork(hypervisor, template) as parent,
            self.running_fork(hypervisor, template) as sibling,
        ):
            await write(parent, "parent")
            async with self.capture(hypervisor, parent) as snapshot:
                await write(parent, "later_")
                async with self.running_fork(hypervisor, snapshot) as branch:
                    assert await read(branch) == b"parent"
                    await write(branch, "branch")
                    assert [await read(each) for each in (parent, branch)] == [b"later_", b"branch"]
                    assert await self.run(branch, "head", "-c", "13", "/dev/sr0") == b"on the CD-ROM"
            assert await read(sibling) == bytes(6)

    async def test_a_machine_with_other_drives_than_its_image_is_not_forkable(
        self, hypervisor: LibvirtHypervisor, template: Snapshot
    ) -> None:
        async with self.running_fork(hypervisor, template) as machine:
            assert isinstance(machine, LibvirtMachine)
            stray = self.drives / "stray.raw"
            stray.write_bytes(bytes(1 << 20))
            machine.domain.attachDevice(
                f"<disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{stray}'/>"
                "<target dev='sdd' bus='scsi'/></disk>"
            )
            with pytest.raises(NotForkable, match=r"has \S+stray\.raw in addition to its image's drives"):
                await hypervisor.capture(machine)
            assert await self.run(machine, "echo", "alive") == b"alive\n"

    async def test_a_guest_that_crashes_ends_its_machine(
        self, hypervisor: LibvirtHypervisor, template: Snapshot
    ) -> None:
        async with self.running_fork(hypervisor, template) as machine:
            assert isinstance(machine, LibvirtMachine)
            with suppress(MachineLost):  # the guest may crash before its agent responds
                await self.start(machine, "sh", "-c", "echo c >/proc/sysrq-trigger")
            async with asyncio.timeout(self.prompt_s):
                await machine.lost.wait()
            assert machine.loss is not None
            assert (machine.loss.owner, machine.loss.cause) == (LossOwner.GUEST, "PANIC")
        assert self.leftovers(hypervisor, machine.machine_id) == []
