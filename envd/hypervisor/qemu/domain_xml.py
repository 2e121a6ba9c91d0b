"""Converts a machine spec to libvirt's domain XML, and reads our mark from such XML. Pure.

Virtual hardware: q35, RNG, serial, the devices of the image's `Hardware`, and a network card in QEMU's user mode. Its
only inbound path is a host loopback port forwarded to guestd; outbound traffic is blocked.

envd starts the TPM of a machine (`tpm.py`), not libvirt: for a TPM of libvirt's, each fork would be a new machine, for
which swtpm_setup makes keys for 2 s.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from uuid import UUID

from lxml import etree

from envd.base.channels import GUESTD_PORT
from envd.hypervisor.machine import Accelerator, Firmware, Hardware, MachineSpec
from envd.hypervisor.qemu.snapshots.files import QemuFiles

QEMU_NS = "http://libvirt.org/schemas/domain/qemu/1.0"
MARK_NS = "urn:envd:machine:1"
_NETDEV = "envdnet"
_TPM = "envdtpm"
#: Our own name of the guest's memory block. libvirt's memory blocks cannot have a chosen file path, and a state loads
#: only into blocks of the same name.
MEMORY = "env.ram"
#: libvirt's name of the display.
VIDEO_ALIAS = "video0"
#: Those without conditions on the host's processor.
_ENLIGHTENMENTS = ("relaxed", "vapic", "vpindex", "runtime", "synic", "stimer", "frequencies", "tlbflush", "ipi")
#: Bus of a machine's disks, and the prefix of their names in libvirt.
_DISK_BUS = {Hardware.VIRTIO: ("virtio", "vd"), Hardware.PC: ("sata", "sd"), Hardware.WINDOWS: ("scsi", "sd")}


def domain_name(owner: str, machine_id: str) -> str:
    """Return the name of a machine's domain; the owner distinguishes two daemons on one host."""
    return f"envd-{owner}-{machine_id}"


def domain_xml(
    spec: MachineSpec,
    *,
    owner: str,
    files: QemuFiles,
    accelerator: Accelerator,
    memory_path: Path,
    generation: UUID,
    template_disks: Sequence[Path] = (),
    firmware: Path | None = None,
    tcg_cache_mib: int = 0,
    security_labels: Mapping[str, str] | None = None,
) -> str:
    """Return the domain's XML.

    Args:
        owner: Id of the state directory that the machine belongs to.
        memory_path: File of its memory. A machine that boots writes to it; a fork's writes stay private to its process.
        generation: Unique per fork: a guest that sees it change reseeds its random number generator.
        template_disks: qcow2 files that a fork's overlays are on; empty for a machine that boots. A fork waits for a
            state to load.
        firmware: Code of this host's OVMF. Required for UEFI images.
        tcg_cache_mib: Limit of the translation cache under TCG; 0 for QEMU's default.
        security_labels: Those for a libvirtd, from `security_labels_of`; none for the embedded driver, which envd
            configures.
    """
    root = etree.Element("domain", {"type": accelerator.value if accelerator is Accelerator.KVM else "qemu"},
                         nsmap={"qemu": QEMU_NS})  # fmt: skip

    _add(root, "name", domain_name(owner, spec.machine_id))
    metadata = _add(root, "metadata")
    etree.SubElement(
        metadata,
        f"{{{MARK_NS}}}machine",
        {"owner": owner, "id": spec.machine_id, "directory": str(files.directory)},
        nsmap={"envd": MARK_NS},
    )
    _add(root, "genid", str(generation))
    _add(root, "memory", str(spec.memory_mib), unit="MiB")
    _add(root, "vcpu", str(spec.vcpu_count))
    _add_boot(root, spec, files, firmware)
    _add_board(root, spec, accelerator, tcg_cache_mib=tcg_cache_mib)
    # A guest that stops or crashes is a lost machine; it must not restart unnoticed.
    _add(root, "on_poweroff", "destroy")
    # A template boots, and its installation may reboot.
    _add(root, "on_reboot", "destroy" if template_disks else "restart")
    _add(root, "on_crash", "destroy")
    _add_devices(root, spec, files, accelerator, template_disks)
    for model, label in (security_labels or {}).items():
        if label:
            # No change of files' owners: many machines share templates and base disks.
            element = _add(root, "seclabel", type="static", model=model, relabel="no")
            _add(element, "label", label)
        else:
            _add(root, "seclabel", type="none", model=model)
    command = _add(root, f"{{{QEMU_NS}}}commandline")
    for argument in _qemu_arguments(spec, files, memory_path, is_fork=bool(template_disks)):
        etree.SubElement(command, f"{{{QEMU_NS}}}arg", {"value": argument})
    # With this capability libvirt queries about 480 processor features one by one, 0.35 s per start; without it, all at
    # once.
    capabilities = _add(root, f"{{{QEMU_NS}}}capabilities")
    etree.SubElement(capabilities, f"{{{QEMU_NS}}}del", {"capability": "cpu-unavailable-features"})
    return etree.tostring(root, encoding="unicode")


def _qemu_arguments(spec: MachineSpec, files: QemuFiles, memory_path: Path, *, is_fork: bool) -> list[str]:
    """Return QEMU's arguments for devices that libvirt's XML cannot describe as we need them."""
    image, size_bytes = spec.image, spec.memory_mib << 20
    arguments = [
        *(
            "-object",
            f"memory-backend-file,id={MEMORY},size={size_bytes},mem-path={_escape(memory_path)},"
            f"share={'off' if is_fork else 'on'}",
        ),
        *("-machine", f"memory-backend={MEMORY}"),
        *("-chardev", f"socket,id=envdagent,path={_escape(files.agent_socket)},server=on,wait=off"),
        # A serial controller of our own: libvirt removes one that none of its channels uses, and libvirt would connect
        # to the agent itself if the channel were libvirt's.
        *("-device", "virtio-serial-pci,id=envdserial,bus=pcie.0,addr=0x1d"),
        *("-device", "virtserialport,bus=envdserial.0,nr=1,chardev=envdagent,name=org.qemu.guest_agent.0"),
        *("-qmp", f"unix:{_escape(files.monitor_socket)},server=on,wait=off"),
    ]
    if image.has_tpm:
        arguments += [
            *("-chardev", f"socket,id={_TPM},path={_escape(files.tpm_socket)}"),
            *("-tpmdev", f"emulator,id={_TPM},chardev={_TPM}"),
            # All of a TIS device is in its device state. A CRB device and the physical presence interface have memory
            # of their own, which a capture would not include.
            *("-device", f"tpm-tis,tpmdev={_TPM},ppi=off"),
        ]
    if image.hardware is Hardware.WINDOWS:
        # Windows's optimiser fails on discards of single sectors, QEMU's default.
        arguments += ["-global", "scsi-hd.discard_granularity=8192"]
    if image.has_guestd:
        # libvirt forwards ports of the user-mode network only with passt. Port 0: the host chooses, so two machines
        # never race for one port.
        forward = f"hostfwd=tcp:127.0.0.1:0-:{GUESTD_PORT}"
        card = "e1000e" if image.hardware is Hardware.PC else "virtio-net-pci"
        arguments += [
            *("-netdev", f"user,id={_NETDEV},restrict=on,ipv6=off,{forward}"),
            *("-device", f"{card},netdev={_NETDEV},bus=pcie.0,addr=0x1e,romfile="),
        ]
    if is_fork:
        arguments += ["-incoming", "defer"]
    return arguments


def _add_boot(root: etree._Element, spec: MachineSpec, files: QemuFiles, firmware: Path | None) -> None:
    image = spec.image
    os_element = _add(root, "os")
    _add(os_element, "type", "hvm", arch="x86_64", machine="q35")
    if image.hardware is Hardware.WINDOWS and image.firmware is not Firmware.UEFI:
        raise ValueError(f"image {image.name}: hardware windows boots by UEFI, not {image.firmware.value}")
    if image.firmware is Firmware.UEFI:
        if firmware is None:
            raise ValueError(f"image {image.name}: no firmware given for UEFI")
        _add(os_element, "loader", str(firmware), readonly="yes", type="pflash")
        _add(os_element, "nvram", str(files.firmware_vars))
    if image.firmware is Firmware.DIRECT_KERNEL:
        _add(os_element, "kernel", str(image.kernel))
        _add(os_element, "initrd", str(image.initrd))
        # The template's machine id. Each fork gets its own when it first runs.
        machine_id = sha256(image.digest.encode()).hexdigest()[:32]
        _add(os_element, "cmdline", f"{image.kernel_cmdline} systemd.machine_id={machine_id}")


def _add_board(root: etree._Element, spec: MachineSpec, accelerator: Accelerator, *, tcg_cache_mib: int) -> None:
    """Add processor, chipset and clocks."""
    is_windows = spec.image.hardware is Hardware.WINDOWS or not spec.image.runs_linux
    features = _add(root, "features")
    _add(features, "acpi")
    _add(features, "apic")
    if accelerator is Accelerator.TCG and tcg_cache_mib:
        _add(_add(features, "tcg"), "tb-cache", str(tcg_cache_mib), unit="MiB")
    if is_windows:
        _add(features, "vmport", state="off")
    if is_windows and accelerator is Accelerator.KVM:
        hyperv = _add(features, "hyperv", mode="custom")
        for name in _ENLIGHTENMENTS:
            _add(hyperv, name, state="on")
        _add(hyperv, "spinlocks", state="on", retries="8191")
    # TCG cannot copy the host's processor model; `maximum` enables every feature that TCG has.
    mode = "host-passthrough" if accelerator is Accelerator.KVM else "maximum"
    cpu = _add(root, "cpu", mode=mode, migratable="on")
    clock = _add(root, "clock", offset="localtime" if is_windows else "utc")
    if is_windows:
        # Windows uses at most two sockets; without a topology each processor is one.
        _add(cpu, "topology", sockets="1", dies="1", cores=str(spec.vcpu_count), threads="1")
        # No `catchup` of the RTC's ticks: a machine that was paused would be given all that it missed.
        _add(clock, "timer", name="hpet", present="no")
        if accelerator is Accelerator.KVM:
            _add(clock, "timer", name="pit", tickpolicy="discard")
            _add(clock, "timer", name="hypervclock", present="yes")
        power = _add(root, "pm")
        _add(power, "suspend-to-mem", enabled="no")
        _add(power, "suspend-to-disk", enabled="no")


def _add_devices(
    root: etree._Element, spec: MachineSpec, files: QemuFiles, accelerator: Accelerator, template_disks: Sequence[Path]
) -> None:
    image = spec.image
    devices = _add(root, "devices")
    hardware = image.hardware
    disk_bus, prefix = _DISK_BUS[hardware]
    boots_from_disk = image.firmware is not Firmware.DIRECT_KERNEL
    if hardware is Hardware.WINDOWS:
        _add(devices, "controller", type="scsi", model="virtio-scsi")
    for index, overlay in enumerate(files.disks(len(image.disks))):
        disk = _add(devices, "disk", type="file", device="disk")
        # A host crash ends the episode and its overlay anyway, so writes need not be flushed to disk.
        driver = _add(disk, "driver", name="qemu", type="qcow2", cache="unsafe", discard="unmap")
        _add(disk, "source", file=str(overlay))
        if template_disks:
            # Loading another state replaces this block device, so it needs a name. libvirt only finds backing files by
            # itself where its storage driver is installed, and leaves the others to QEMU, which gives them no name.
            backing = _add(disk, "backingStore", type="file")
            _add(backing, "format", type="qcow2")
            _add(backing, "source", file=str(template_disks[index]))
        target = _add(disk, "target", dev=f"{prefix}{_letter(index)}", bus=disk_bus)
        if hardware is Hardware.WINDOWS:
            driver.set("detect_zeroes", "unmap")
            target.set("rotation_rate", "1")
        if boots_from_disk and index == 0:
            _add(disk, "boot", order="1")
    for index, drive in enumerate(image.cdroms):
        disk = _add(devices, "disk", type="file", device="cdrom")
        _add(disk, "driver", name="qemu", type=drive.disk_format)
        _add(disk, "source", file=str(drive.path))
        _add(disk, "target", dev=f"sd{_letter(len(image.disks) + index)}", bus="sata")
        _add(disk, "readonly")
        if boots_from_disk:
            _add(disk, "boot", order=str(index + 2))
    model = "vga" if hardware is Hardware.PC else "virtio"
    video = _add(_add(devices, "video"), "model", type=model, heads="1")
    # A virtio display announces exactly this size in its EDID.
    _add(video, "resolution", x=str(spec.screen_width_px), y=str(spec.screen_height_px))
    graphics = _add(devices, "graphics", type="vnc", sharePolicy="ignore")
    _add(graphics, "listen", type="socket", socket=str(files.display_socket))
    if hardware is Hardware.VIRTIO:
        _add(devices, "input", type="keyboard", bus="virtio")
        _add(devices, "input", type="tablet", bus="virtio")
    else:
        _add(devices, "controller", type="usb", model="qemu-xhci")
        _add(devices, "input", type="tablet", bus="usb")
    serial = _add(devices, "serial", type="file")
    # With append, QEMU continues at the end of the file after envd has truncated it.
    _add(serial, "source", path=str(files.console_log), append="on")
    rng = _add(devices, "rng", model="virtio")
    _add(rng, "backend", "/dev/urandom", model="random")
    # A balloon would let the host reclaim pages that forks share, and slows down Windows guests.
    _add(devices, "memballoon", model="none")
    # Reports the guest's crash, which then ends the machine.
    _add(devices, "panic", model="isa")
    if hardware is Hardware.WINDOWS and accelerator is Accelerator.KVM:
        _add(devices, "panic", model="hyperv")


def _letter(index: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[index]


def _add(parent: etree._Element, tag: str, text: str | None = None, **attributes: str) -> etree._Element:
    element = etree.SubElement(parent, tag, attributes)
    element.text = text
    return element


def security_labels_of(capabilities: str, *, user_id: int, group_id: int) -> dict[str, str]:
    """Return a machine's label for each security model, from the XML of a libvirtd's capabilities.

    QEMU runs as the given user. Models that would deny it files that are named on its command line are switched off:
    their label is empty.
    """
    models = etree.fromstring(capabilities.encode()).findall("host/secmodel/model")
    names = {str(model.text) for model in models}
    return {"dac": f"+{user_id}:+{group_id}", **dict.fromkeys(sorted(names & {"apparmor", "selinux"}), "")}


def marked_machine(xml: str, *, owner: str) -> str | None:
    """Return the id of the machine that a domain is, by its owner's mark; None if it has none."""
    parser = etree.XMLParser(resolve_entities=False, no_network=True)
    mark = etree.fromstring(xml.encode(), parser).find(f"metadata/{{{MARK_NS}}}machine")
    return mark.get("id") if mark is not None and mark.get("owner") == owner else None


def parse_forwarded_port(usernet: str) -> int | None:
    """Return the host port that forwards to guestd, from the output of the monitor's `info usernet`.

    A line reads `TCP[HOST_FORWARD]  12  127.0.0.1 40123  10.0.2.15  5000  0  0`.
    """
    for line in usernet.splitlines():
        words = line.split()
        if len(words) >= 6 and words[0] == "TCP[HOST_FORWARD]" and words[5] == str(GUESTD_PORT):
            return int(words[3])
    return None


def _escape(path: Path) -> str:
    """Escape a path for QEMU's option syntax, which doubles commas."""
    return str(path).replace(",", ",,")
