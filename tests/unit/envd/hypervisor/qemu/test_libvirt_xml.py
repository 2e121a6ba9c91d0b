"""The domain XML of a machine, and the mark read back from it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from lxml import etree

from envd.hypervisor.machine import Accelerator, DiskImage, ExtraDrive, Firmware, GuestOs, Hardware, MachineSpec
from envd.hypervisor.qemu.domain_xml import (
    domain_name,
    domain_xml,
    marked_machine,
    parse_forwarded_port,
    security_labels_of,
)
from envd.hypervisor.qemu.snapshots.files import QemuFiles

FILES = QemuFiles(directory=Path("/state/machines/m1"))
LINUX = DiskImage(
    name="desktop",
    digest="d" * 64,
    disk=Path("/images/disk.qcow2"),
    kernel=Path("/images/vmlinuz"),
    initrd=Path("/images/initrd.img"),
    kernel_cmdline="root=/dev/vda quiet",
)
WINDOWS = DiskImage(
    name="win11",
    digest="e" * 64,
    disk=Path("/images/win.qcow2"),
    os=GuestOs.WINDOWS,
    hardware=Hardware.PC,
    firmware=Firmware.UEFI,
    has_guestd=False,
)
OVMF = Path("/fw/CODE.fd")


GENERATION = UUID("00000000-0000-4000-8000-000000000001")
QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"


def xml(
    image: DiskImage = LINUX,
    *,
    machine_id: str = "m1",
    files: QemuFiles = FILES,
    accelerator: Accelerator = Accelerator.TCG,
    memory_path: Path = Path("/templates/m1.ram"),
    template_disks: Sequence[Path] = (),
    firmware: Path | None = OVMF,
    tcg_cache_mib: int = 0,
    security_labels: dict[str, str] | None = None,
) -> etree._Element:
    spec = MachineSpec(machine_id=machine_id, image=image, screen_width_px=1024, screen_height_px=768)
    text = domain_xml(
        spec,
        owner="abcd",
        files=files,
        accelerator=accelerator,
        memory_path=memory_path,
        generation=GENERATION,
        template_disks=template_disks,
        firmware=firmware,
        tcg_cache_mib=tcg_cache_mib,
        security_labels=security_labels,
    )
    return etree.fromstring(text)


def text_of(root: etree._Element, path: str) -> str | None:
    element = root.find(path)
    assert element is not None, path
    return element.text


def attributes(root: etree._Element, path: str) -> dict[str, str]:
    element = root.find(path)
    assert element is not None, path
    return {str(key): str(value) for key, value in element.attrib.items()}


def qemu_arguments(root: etree._Element) -> str:
    return " ".join(str(arg.get("value")) for arg in root.iter(f"{QEMU}arg"))


def test_a_machine_writes_only_to_its_overlay() -> None:
    root = xml()
    assert attributes(root, "devices/disk/source") == {"file": "/state/machines/m1/disk.qcow2"}
    assert "/images/disk.qcow2" not in etree.tostring(root, encoding="unicode")


def test_a_forks_overlays_name_the_templates_disks_because_libvirt_may_not_find_them() -> None:
    image = replace(LINUX, drives=(ExtraDrive(path=Path("/images/data.raw"), disk_format="raw"),))
    root = xml(image, template_disks=(Path("/templates/disk.qcow2"), Path("/templates/disk1.qcow2")))
    backings = [
        (attributes(disk, "backingStore/format"), attributes(disk, "backingStore/source"))
        for disk in root.findall("devices/disk")
    ]
    assert backings == [
        ({"type": "qcow2"}, {"file": "/templates/disk.qcow2"}),
        ({"type": "qcow2"}, {"file": "/templates/disk1.qcow2"}),
    ]
    assert xml(image).find("devices/disk/backingStore") is None


def test_guestd_is_reachable_on_the_loopback_and_outbound_traffic_is_blocked() -> None:
    arguments = qemu_arguments(xml())
    assert "restrict=on" in arguments
    assert "hostfwd=tcp:127.0.0.1:0-:5000" in arguments
    assert "-netdev" not in qemu_arguments(xml(WINDOWS))


def test_the_display_is_a_unix_socket_with_the_specs_size() -> None:
    root = xml()
    assert attributes(root, "devices/graphics/listen") == {"type": "socket", "socket": "/state/machines/m1/vnc.sock"}
    assert attributes(root, "devices/video/model/resolution") == {"x": "1024", "y": "768"}


def test_all_machines_of_an_image_boot_with_the_same_machine_id() -> None:
    command_line = text_of(xml(), "os/cmdline") or ""
    assert re.fullmatch(r"root=/dev/vda quiet systemd\.machine_id=[0-9a-f]{32}", command_line)
    assert text_of(xml(machine_id="m2"), "os/cmdline") == command_line
    assert text_of(xml(replace(LINUX, digest="f" * 64)), "os/cmdline") != command_line


def test_a_booting_machine_writes_to_its_memory_file_and_a_fork_maps_it_privately() -> None:
    booting = qemu_arguments(xml())
    assert f"memory-backend-file,id=env.ram,size={1024 << 20},mem-path=/templates/m1.ram,share=on" in booting
    assert "memory-backend=env.ram" in booting
    assert "-incoming" not in booting
    fork = qemu_arguments(xml(memory_path=Path("/templates/a,b.ram"), template_disks=(Path("/templates/a.qcow2"),)))
    assert "mem-path=/templates/a,,b.ram,share=off" in fork
    assert "-incoming defer" in fork


def test_the_guest_can_read_its_generation_id() -> None:
    assert text_of(xml(), "genid") == str(GENERATION)


def test_libvirt_does_not_query_every_processor_feature_separately() -> None:
    removed = [element.get("capability") for element in xml().iter(f"{QEMU}del")]
    assert removed == ["cpu-unavailable-features"]


def test_a_libvirtd_runs_machines_as_our_user_and_keeps_file_owners() -> None:
    capabilities = """<capabilities><host>
        <secmodel><model>none</model></secmodel><secmodel><model>apparmor</model></secmodel>
        <secmodel><model>dac</model><baselabel type='kvm'>+64055:+64055</baselabel></secmodel>
    </host></capabilities>"""
    root = xml(security_labels=security_labels_of(capabilities, user_id=7, group_id=8))
    assert [dict(label.attrib) for label in root.iter("seclabel")] == [
        {"type": "static", "model": "dac", "relabel": "no"},
        {"type": "none", "model": "apparmor"},
    ]
    assert text_of(root, "seclabel/label") == "+7:+8"
    assert xml().find("seclabel") is None


def test_a_uefi_machine_has_its_own_variables_and_needs_firmware() -> None:
    root = xml(WINDOWS, accelerator=Accelerator.KVM)
    assert text_of(root, "os/loader") == "/fw/CODE.fd"
    assert text_of(root, "os/nvram") == "/state/machines/m1/vars.fd"
    assert root.find("os/kernel") is None
    assert root.find("features/hyperv") is not None
    with pytest.raises(ValueError, match=r"win11: .*firmware"):
        xml(WINDOWS, firmware=None)
    with pytest.raises(ValueError, match=r"UEFI.*bios"):
        xml(replace(WINDOWS_HARDWARE, firmware=Firmware.BIOS))


def test_the_hardware_determines_the_devices_whatever_tasks_find_in_the_guest() -> None:
    for os in GuestOs:
        virtio, pc = (xml(replace(LINUX, os=os, hardware=hardware)) for hardware in (Hardware.VIRTIO, Hardware.PC))
        assert [attributes(root, "devices/disk/target")["bus"] for root in (virtio, pc)] == ["virtio", "sata"]
        assert [attributes(root, "devices/video/model")["type"] for root in (virtio, pc)] == ["virtio", "vga"]
        assert "virtio-net-pci" in qemu_arguments(virtio)
        assert "e1000e" in qemu_arguments(pc)


def test_a_linux_kernel_keeps_universal_time_and_has_no_hyperv_even_if_tasks_find_windows() -> None:
    wine = xml(replace(LINUX, os=GuestOs.WINDOWS), accelerator=Accelerator.KVM)
    assert attributes(wine, "clock")["offset"] == "utc"
    assert wine.find("features/hyperv") is None
    assert attributes(xml(WINDOWS), "clock")["offset"] == "localtime"


@pytest.mark.parametrize(
    ("accelerator", "kind", "cpu"), [("kvm", "kvm", "host-passthrough"), ("tcg", "qemu", "maximum")]
)
def test_the_accelerator_determines_domain_type_and_cpu(accelerator: str, kind: str, cpu: str) -> None:
    root = xml(accelerator=Accelerator(accelerator))
    assert (root.get("type"), attributes(root, "cpu")["mode"]) == (kind, cpu)


def test_the_translation_cache_is_limited_only_under_tcg() -> None:
    assert text_of(xml(tcg_cache_mib=96), "features/tcg/tb-cache") == "96"
    assert xml(accelerator=Accelerator.KVM, tcg_cache_mib=96).find("features/tcg") is None


def test_commas_in_paths_do_not_become_options() -> None:
    root = xml(files=QemuFiles(directory=Path("/state/a,readonly=on/m1")))
    assert "path=/state/a,,readonly=on/m1/agent.sock" in qemu_arguments(root)


def test_our_mark_is_read_back_and_other_domains_have_none() -> None:
    root = xml()
    text = etree.tostring(root, encoding="unicode")
    assert marked_machine(text, owner="abcd") == "m1"
    assert marked_machine(text, owner="other") is None
    assert text_of(root, "name") == domain_name("abcd", "m1") == "envd-abcd-m1"
    assert marked_machine("<domain><name>envd-abcd-m1</name></domain>", owner="abcd") is None


def test_the_forwarded_port_is_parsed_from_the_monitors_output() -> None:
    output = (
        "Hub -1 (envdnet):\n  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\n"
        "  UDP[236 sec]       27       10.0.2.15 40123        10.0.2.3    53     0     0\n"
        "  TCP[HOST_FORWARD]  13       127.0.0.1 34567       10.0.2.15  5000     0     0\n"
    )
    assert parse_forwarded_port(output) == 34567
    assert parse_forwarded_port("Hub -1 (envdnet):\n") is None


WINDOWS_HARDWARE = replace(WINDOWS, hardware=Hardware.WINDOWS)


def test_windows_hardware_has_a_tpm_and_no_hpet_or_sleep_states() -> None:
    root = xml(WINDOWS_HARDWARE)
    assert attributes(root, "devices/disk/target") == {"dev": "sda", "bus": "scsi", "rotation_rate": "1"}
    assert attributes(root, "devices/disk/driver")["discard"] == "unmap"
    assert attributes(root, "devices/video/model")["type"] == "virtio"
    assert attributes(root, "devices/input") == {"type": "tablet", "bus": "usb"}
    assert attributes(root, "cpu/topology")["sockets"] == "1"
    assert attributes(root, "devices/panic") == {"model": "isa"}
    arguments = qemu_arguments(root)
    assert "socket,id=envdtpm,path=/state/machines/m1/tpm.sock" in arguments
    assert "tpm-tis,tpmdev=envdtpm,ppi=off" in arguments
    assert "tpm" not in qemu_arguments(xml(WINDOWS))
    root = xml(WINDOWS_HARDWARE)
    assert {str(timer.get("name")): timer.get("present") for timer in root.iter("timer")} == {"hpet": "no"}
    assert {element.tag: element.get("enabled") for element in root.iterfind("pm/*")} == {
        "suspend-to-mem": "no",
        "suspend-to-disk": "no",
    }


def test_enlightenments_are_for_windows_under_kvm() -> None:
    root = xml(WINDOWS_HARDWARE, accelerator=Accelerator.KVM)
    assert {"relaxed", "vapic", "synic", "stimer", "frequencies"} <= {
        str(element.tag) for element in root.iterfind("features/hyperv/*")
    }
    assert [panic.get("model") for panic in root.iter("panic")] == ["isa", "hyperv"]
    assert xml(WINDOWS_HARDWARE).find("features/hyperv") is None
    assert xml(accelerator=Accelerator.KVM).find("features/hyperv") is None


def test_additional_drives_are_overlays_and_shared_cdroms_that_boot_last() -> None:
    drives = (ExtraDrive(path=Path("/images/data.qcow2")), ExtraDrive(path=Path("/images/tools.iso"), is_cdrom=True))
    for image in (WINDOWS, WINDOWS_HARDWARE, LINUX):
        root = xml(replace(image, drives=drives))
        sources = [attributes(disk, "source")["file"] for disk in root.iter("disk")]
        assert sources == ["/state/machines/m1/disk.qcow2", "/state/machines/m1/disk1.qcow2", "/images/tools.iso"]
        cdrom = root.findall("devices/disk")[-1]
        assert (cdrom.get("device"), cdrom.find("readonly") is not None) == ("cdrom", True)
        names = [disk.get("dev") for disk in root.iter("target")]
        assert len(set(names)) == len(names)
    orders = [disk.get("order") for disk in xml(replace(WINDOWS_HARDWARE, drives=drives[1:])).iter("boot")]
    assert orders == ["1", "2"]
