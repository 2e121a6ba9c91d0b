"""Protocols of a hypervisor backend: machines, the snapshots they are forked from, and the hypervisor that makes them.

Implementations: `envd.hypervisor.qemu` (QEMU through libvirt), `envd.hypervisor.oci` (containers) and `envd.drawn`
(drawn desktops, for load and fault tests). All pass the contract suite `tests.support.machine_contract.machine`.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Protocol

from envd.base.channels import GuestChannels
from envd.base.errors import HypervisorError, MachineLost
from envd.base.losses import Loss


class Accelerator(Enum):
    """How guest code runs."""

    #: Hardware virtualisation.
    KVM = "kvm"
    #: QEMU's translator: works on any host, but is slow.
    TCG = "tcg"
    #: The host's kernel runs guest programs, in containers.
    NATIVE = "native"
    #: No guest code runs.
    FAKE = "fake"


class GuestOs(Enum):
    """The operating system that tasks find in a guest: its paths, programs and registry."""

    LINUX = "linux"
    WINDOWS = "windows"


class Hardware(Enum):
    """The virtual devices of a machine."""

    #: virtio disk, display, input and network, for guests with drivers for them. Its machines can be branched.
    VIRTIO = "virtio"
    #: SATA disk, VGA, USB tablet and Intel network: any system has drivers for them. Its machines cannot be branched.
    PC = "pc"
    #: TPM 2.0, virtio-scsi disk, virtio display and network, and USB tablet; boots by UEFI. For Windows with the virtio
    #: drivers. Its machines can be branched.
    WINDOWS = "windows"


class Firmware(Enum):
    """How a guest boots."""

    #: QEMU loads the kernel, initrd and command line directly.
    DIRECT_KERNEL = "kernel"
    #: SeaBIOS and a boot loader.
    BIOS = "bios"
    #: OVMF, with the machine's own copy of its variables.
    UEFI = "uefi"
    #: It does not boot: the image is the files of a container, an archive of tar.
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraDrive:
    """A drive that an image has in addition to its disk. Read-only: machines write to overlays of their own."""

    path: Path
    disk_format: str = "qcow2"
    is_cdrom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskImage:
    """A bootable base disk. Read-only: machines write to overlays of their own."""

    name: str
    digest: str
    """Identifies the content (sha256 hex of the recipe for built images, of the file for imported ones)."""
    disk: Path
    disk_format: str = "qcow2"
    os: GuestOs = GuestOs.LINUX
    hardware: Hardware = Hardware.VIRTIO
    firmware: Firmware = Firmware.DIRECT_KERNEL
    kernel: Path | None = None
    initrd: Path | None = None
    kernel_cmdline: str = ""
    has_guestd: bool = True
    provides: frozenset[str] = frozenset()
    """What tasks may need beyond the operating system, such as `powershell`."""
    packages: str = field(default="", repr=False)
    """Installed packages of an image that envd built, a name and version per line."""
    firmware_vars: Path | None = None
    """UEFI variables that its machines boot with; None for the firmware's defaults."""
    tpm_state: Path | None = None
    """State of the TPM that its machines boot with, in swtpm's format; None for a new TPM."""
    drives: tuple[ExtraDrive, ...] = ()
    expire_time: datetime | None = None
    """End of an evaluation period; None for never."""

    @property
    def has_tpm(self) -> bool:
        return self.hardware is Hardware.WINDOWS

    @property
    def disks(self) -> tuple[ExtraDrive, ...]:
        """The drives that its machines write to: its disk, then the additional ones."""
        own = ExtraDrive(path=self.disk, disk_format=self.disk_format)
        return (own, *(drive for drive in self.drives if not drive.is_cdrom))

    @property
    def cdroms(self) -> tuple[ExtraDrive, ...]:
        return tuple(drive for drive in self.drives if drive.is_cdrom)

    @property
    def runs_linux(self) -> bool:
        """Whether the guest's kernel is Linux, which tasks for Windows also meet under Wine."""
        return self.os is GuestOs.LINUX or self.firmware is Firmware.DIRECT_KERNEL


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """Settings of one machine."""

    machine_id: str
    """Unique on the host; [a-z0-9-], at most 32 characters."""
    image: DiskImage
    memory_mib: int = 1024
    vcpu_count: int = 2
    screen_width_px: int = 1280
    screen_height_px: int = 800
    keyboard_layout: str = ""
    """Layout that the template's guest is given instead of its image's, as XKB names it; empty for none."""
    trusted_authority: str = ""
    """Certificate, PEM, of an authority that the template's guest trusts besides its image's; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUsage:
    """Host memory that a machine, or a process, uses now."""

    pss_bytes: int
    """Proportional share of host memory: a page mapped by n processes counts 1/n."""
    private_dirty_bytes: int
    """Memory that only it has written; a machine's is freed only when the machine is destroyed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend's machines can do and need, so that no caller asks which backend it has."""

    runs_guests: bool
    """Guest code runs: programs take time to react and memory grows. Otherwise envd draws the desktops, and a desktop
    has reacted before its input call returns."""
    not_forkable: str = ""
    """Why no machine can be captured while it runs, and what can; empty if machines can be. Without captures a fork of
    a template is a new session on its files, there are no forks of episodes and no checkpoints, and each member of a
    group runs the task's setup."""
    stand_in_image: DiskImage | None = None
    """Image used by every pool in place of one from the image catalogue; None if the backend boots real images."""
    runs_files: bool = False
    """Machines need only the files of an image, neither a kernel nor a disk."""
    task_suite: str
    """Suite of tasks that its machines can play: they have the programs that its tasks use."""

    @property
    def needs_images(self) -> bool:
        """Whether machines boot from images in the image catalogue."""
        return self.stand_in_image is None


class MachineState(Enum):
    """Lifecycle of a machine."""

    #: Guest code runs.
    RUNNING = "running"
    #: Stopped between two instructions; uses no CPU.
    PAUSED = "paused"
    #: Ended: destroyed by envd, or lost.
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """Cost of freezing a machine's state."""

    memory_bytes: int
    """Guest memory copied: the pages that differ from the state that the machine was forked from."""
    paused_ms: float
    """Time for which the machine was paused."""
    total_ms: float


class LeftoverKind(Enum):
    """Kinds of leftovers on a host. The values label metrics."""

    #: A running libvirt domain that no daemon tracks.
    DOMAIN = "domain"
    #: A QEMU process that libvirt does not know, or a TPM process without a machine.
    PROCESS = "process"
    #: A machine's directory, with its overlay.
    OVERLAY = "overlay"
    #: A machine's socket, in a directory without an overlay.
    SOCKET = "socket"
    #: Memory or state of a machine that belongs to no snapshot.
    MEMORY_FILE = "memory_file"
    #: The captured state of a live machine, used by no snapshot or fork.
    CAPTURE = "capture"
    #: A database row about a machine or episode that does not exist.
    DATABASE_ROW = "database_row"


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something on the host that belongs to no machine, snapshot or episode."""

    kind: LeftoverKind
    name: str
    """A machine's id, a file's name or a row's key."""


class Snapshot(Protocol):
    """Memory, devices and disk of a machine at one instant. Immutable; machines are forked from it.

    Its files exist until it was discarded and every machine forked from it has ended.
    """

    @property
    def digest(self) -> str:
        """Identifies the frozen machine: memory, devices, disk and settings."""

    @property
    def disk_digest(self) -> str:
        """Identifies the disk that is the backing file of its forks' overlays."""

    @property
    def template_digest(self) -> str:
        """Digest of the template that it descends from; its own if it is a template."""

    @property
    def spec(self) -> MachineSpec:
        """Settings of the frozen machine."""

    @property
    def report(self) -> CaptureReport:
        """Cost of freezing it."""

    @property
    def notes(self) -> Mapping[str, str]:
        """Values stored by the caller of `freeze`, such as the id of the frame that its forks show."""

    async def discard(self) -> None:
        """Allow no more forks from it. Idempotent. A stored template stays on disk."""


class Machine(GuestChannels, Protocol):
    """One virtual machine, from `Hypervisor.create` or `fork` until it is destroyed or lost."""

    @property
    def spec(self) -> MachineSpec:
        """Settings that it was made with."""

    @property
    def state(self) -> MachineState:
        """Where it is in its lifecycle."""

    @property
    def loss(self) -> Loss | None:
        """Who caused its end; None until it has ended."""

    async def examine(self) -> Loss:
        """Find out why its guest does not answer. Takes up to half a minute; never raises."""

    async def pause(self) -> None:
        """Stop the guest between two instructions; no effect on a paused machine. Raises: MachineLost."""

    async def resume(self) -> None:
        """Let the guest run; no effect on a running machine. Raises: MachineLost."""

    async def usage(self) -> MachineUsage:
        """Measure its memory. Raises: MachineLost, HypervisorError."""

    def enforce_disk_quota(self, quota_bytes: int) -> None:
        """Declare it lost if its own files use more of the host's disk than `quota_bytes`; the owner destroys it.

        Also keeps the log of its serial console small. Does not wait, also not for `lost` to be set; never raises.
        """

    def console_tail(self) -> str:
        """Return the last lines on its serial console, in printable characters; empty if unknown. Never raises."""

    async def destroy(self) -> None:
        """End it and remove its overlay, sockets and directory. Idempotent; safe on a lost machine.

        Cancellation does not interrupt it; a cancelled caller gets its CancelledError after the work is done.
        """


class Hypervisor(Protocol):
    """Makes machines, and removes those left by a previous daemon."""

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the backend."""

    @property
    def accelerator(self) -> Accelerator:
        """How guest code runs."""

    @property
    def description(self) -> str:
        """One line for operators: driver, URI, QEMU version, accelerator and why it was chosen."""

    @property
    def problem(self) -> str:
        """Why it cannot make machines now. Temporary: it recovers without help. Empty while it can."""

    async def create(self, spec: MachineSpec) -> Machine:
        """Make a machine and boot it, without waiting for the guest to be ready.

        On failure or cancellation nothing is left behind.

        Raises:
            HypervisorError: libvirt, QEMU or qemu-img failed; the message has the reason.
        """

    async def freeze(self, machine: Machine, *, notes: Mapping[str, str]) -> Snapshot:
        """Turn a booted machine into a template, stored under its spec and returned by `find_template`.

        The machine is gone afterwards, also on failure; on failure nothing is stored.

        Raises:
            MachineLost: The machine has ended.
            HypervisorError: It could not be frozen, for example because the disk is full.
        """

    def making_template(self, spec: MachineSpec) -> AbstractAsyncContextManager[None]:
        """Exclude other daemons of this host from finding or making the template for a spec, for as long as it is held.

        So one of them boots it, and the others find it.
        """

    async def find_template(self, spec: MachineSpec) -> Snapshot | None:
        """Return the stored template for a spec on this host, or None. The spec's machine id is ignored.

        Raises:
            TemplateCorrupt: The stored template is damaged. It has been removed: the next call returns None.
        """

    async def fork(self, snapshot: Snapshot, machine_id: str) -> Machine:
        """Make a machine at a snapshot's state: PAUSED, at the instruction where the snapshot was taken.

        It shares memory and disk with the snapshot copy-on-write. Nothing in it has run since, so its clock,
        its random numbers and its machine id are the snapshot's: see `docs/evidence/fork-correctness.md`.
        On failure or cancellation nothing is left behind. The same as `prepare` and then `load`.

        Raises:
            TemplateCorrupt: See `check_intact`.
            HypervisorError: libvirt or QEMU failed; the message has the reason.
        """

    async def prepare(self, snapshot: Snapshot, machine_id: str) -> Machine:
        """Make a machine that waits for a state: PAUSED, with all devices, on the memory and disk of a template.

        It can `load` the snapshot, or any other snapshot of the same template, and cannot run before.
        On failure or cancellation nothing is left behind.

        Raises:
            TemplateCorrupt: See `check_intact`.
            HypervisorError: libvirt or QEMU failed; the message has the reason.
        """

    async def load(self, machine: Machine, snapshot: Snapshot) -> None:
        """Load a snapshot into a machine that waits for a state; the machine is then a fork of it.

        On failure the machine is lost. Cancellation does not interrupt it; a cancelled caller gets its CancelledError
        after the work is done.

        Raises:
            TemplateCorrupt: See `check_intact`.
            MachineLost: The machine has ended.
            HypervisorError: It does not wait for a state of this template, or QEMU failed.
        """

    async def check_intact(self, snapshot: Snapshot) -> None:
        """Check that the template behind a snapshot still has its files, unreplaced. Fast: reads no content.

        Raises:
            TemplateCorrupt: A file was removed or replaced, so nothing can be forked from the snapshot.
        """

    async def capture(self, machine: Machine) -> Snapshot:
        """Freeze the state of a forked machine, which is paused meanwhile and then continues in its earlier state.

        Checks that the machine can be captured before it changes anything. On failure the machine is unchanged.

        Raises:
            NotForkable: The machine has something that cannot be copied to a fork; the message names it.
            MachineLost: The machine has ended.
            HypervisorError: libvirt or QEMU failed, for example because the disk is full.
        """

    async def save(self, snapshot: Snapshot, directory: Path, *, shares_files: bool = False) -> None:
        """Write into an existing, empty directory what a captured machine's template does not have, for `restore`.

        Args:
            shares_files: Whether files may be hard links to those of the state that the machine was restored from, so
                that only what has changed since is written. The files suffice for `restore` either way.

        Raises:
            OSError: The disk is full, for example.
            HypervisorError: It is not a captured machine, or QEMU's tools failed.
        """

    async def restore(self, template: Snapshot, directory: Path, *, shares_files: bool = False) -> Snapshot:
        """Return a captured state from the intact files that `save` wrote; they may be removed afterwards.

        Args:
            template: A snapshot of the template that the state descends from (`template_digest`).
            shares_files: Whether its forks may be saved with links to these files, which then take their space until
                the forks are gone.

        Raises:
            CheckpointCorrupt: The files are not as `save` writes them.
            HypervisorError: They cannot be read, or the disk is full.
        """

    async def adopt(self, machine_ids: Collection[str]) -> dict[str, Machine]:
        """Adopt machines that outlived a previous daemon; returns them by id, paused.

        This daemon then owns them and their snapshots, and `reap` leaves them. Machines that end with their daemon, or
        cannot be adopted, are not returned, and `reap` removes what is left of them.
        """

    async def reap(self) -> list[str]:
        """Destroy what previous daemons with this state directory left, found by its mark; returns the machines' ids.

        Stored templates and adopted machines stay.
        """

    async def leftovers(self) -> list[Leftover]:
        """Return everything on the host with this daemon's mark that belongs to none of its machines or snapshots.

        May include things that are being made or removed at this moment: act only on what is found repeatedly.

        Raises:
            HypervisorError: The host cannot be examined.
        """

    async def remove(self, leftover: Leftover) -> None:
        """Remove a leftover; no effect if it has disappeared or is in use by now. Raises: HypervisorError."""

    async def close(self) -> None:
        """Disconnect from the hypervisor. Machines must have been destroyed before."""


async def load_or_destroy(hypervisor: Hypervisor, machine: Machine, snapshot: Snapshot) -> None:
    """Load a snapshot into a machine from `prepare`, which is destroyed on failure or cancellation.

    Raises: What `Hypervisor.load` raises, but HypervisorError for a machine that has ended: it never was a fork.
    """
    try:
        await hypervisor.load(machine, snapshot)
    except BaseException as error:
        await machine.destroy()
        if isinstance(error, MachineLost):
            raise HypervisorError(f"machine {machine.machine_id}: ended while it was starting: {error}") from error
        raise
