"""What libvirt is told of a machine, and what is read back."""

from pathlib import Path

import pytest
from lxml import etree

from envd.hypervisor.libvirt_xml import (
    FirmwareFiles,
    MachineFiles,
    domain_name,
    domain_xml,
    parse_forwarded_port,
    read_mark,
)
from envd.hypervisor.machine import Accelerator, DiskImage, Firmware, GuestOs, MachineSpec

FILES = MachineFiles(directory=Path("/state/machines/m1"))
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
    firmware=Firmware.UEFI,
    has_guestd=False,
)
OVMF = FirmwareFiles(code=Path("/fw/CODE.fd"), vars_template=Path("/fw/VARS.fd"))


def xml(image: DiskImage = LINUX, *, accelerator: Accelerator = Accelerator.TCG, **more: int) -> etree._Element:
    spec = MachineSpec(machine_id="m1", image=image, screen_width_px=1024, screen_height_px=768)
    firmware = OVMF if image.firmware is Firmware.UEFI else None
    text = domain_xml(spec, owner="abcd", files=FILES, accelerator=accelerator, firmware=firmware, **more)
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
    return " ".join(str(arg.get("value")) for arg in root.iter("{http://libvirt.org/schemas/domain/qemu/1.0}arg"))


def test_the_machine_writes_to_its_overlay_alone() -> None:
    root = xml()
    assert attributes(root, "devices/disk/source") == {"file": "/state/machines/m1/disk.qcow2"}
    assert "/images/disk.qcow2" not in etree.tostring(root, encoding="unicode")


def test_guestd_is_reached_through_the_loopback_and_nothing_gets_out() -> None:
    arguments = qemu_arguments(xml())
    assert "restrict=on" in arguments
    assert "hostfwd=tcp:127.0.0.1:0-:5000" in arguments
    assert "-netdev" not in qemu_arguments(xml(WINDOWS))


def test_the_display_is_a_unix_socket_of_the_wanted_size() -> None:
    root = xml()
    assert attributes(root, "devices/graphics/listen") == {"type": "socket", "socket": "/state/machines/m1/vnc.sock"}
    assert attributes(root, "devices/video/model/resolution") == {"x": "1024", "y": "768"}


def test_every_machine_has_a_machine_id_of_its_own() -> None:
    command_line = text_of(xml(), "os/cmdline") or ""
    assert command_line.startswith("root=/dev/vda quiet systemd.machine_id=")
    other = MachineFiles(directory=Path("/state/machines/m2"))
    spec = MachineSpec(machine_id="m2", image=LINUX)
    second = etree.fromstring(domain_xml(spec, owner="abcd", files=other, accelerator=Accelerator.TCG))
    assert text_of(second, "os/cmdline") != command_line


def test_a_uefi_machine_has_variables_of_its_own() -> None:
    root = xml(WINDOWS, accelerator=Accelerator.KVM)
    assert text_of(root, "os/loader") == "/fw/CODE.fd"
    assert text_of(root, "os/nvram") == "/state/machines/m1/vars.fd"
    assert root.find("os/kernel") is None
    assert root.find("features/hyperv") is not None


def test_a_uefi_machine_without_firmware_is_refused() -> None:
    spec = MachineSpec(machine_id="m1", image=WINDOWS)
    with pytest.raises(ValueError, match="win11 boots by UEFI"):
        domain_xml(spec, owner="abcd", files=FILES, accelerator=Accelerator.TCG)


@pytest.mark.parametrize(
    ("accelerator", "kind", "cpu"), [("kvm", "kvm", "host-passthrough"), ("tcg", "qemu", "maximum")]
)
def test_the_accelerator_decides_domain_type_and_cpu(accelerator: str, kind: str, cpu: str) -> None:
    root = xml(accelerator=Accelerator(accelerator))
    assert (root.get("type"), attributes(root, "cpu")["mode"]) == (kind, cpu)


def test_the_translation_cache_is_bounded_under_tcg_only() -> None:
    assert text_of(xml(tcg_cache_mib=96), "features/tcg/tb-cache") == "96"
    assert xml(accelerator=Accelerator.KVM, tcg_cache_mib=96).find("features/tcg") is None


def test_commas_in_paths_do_not_become_options() -> None:
    files = MachineFiles(directory=Path("/state/a,readonly=on/m1"))
    spec = MachineSpec(machine_id="m1", image=LINUX)
    root = etree.fromstring(domain_xml(spec, owner="abcd", files=files, accelerator=Accelerator.TCG))
    assert "path=/state/a,,readonly=on/m1/agent.sock" in qemu_arguments(root)


def test_our_mark_is_read_back_and_foreign_domains_have_none() -> None:
    root = xml()
    mark = read_mark(etree.tostring(root, encoding="unicode"))
    assert mark is not None
    assert (mark.owner, mark.machine_id, mark.directory) == ("abcd", "m1", FILES.directory)
    assert text_of(root, "name") == domain_name("abcd", "m1") == "envd-abcd-m1"
    assert read_mark("<domain><name>envd-abcd-m1</name></domain>") is None


def test_the_forwarded_port_is_found_in_what_the_monitor_prints() -> None:
    told = (
        "Hub -1 (envdnet):\n  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\n"
        "  UDP[236 sec]       27       10.0.2.15 40123        10.0.2.3    53     0     0\n"
        "  TCP[HOST_FORWARD]  13       127.0.0.1 34567       10.0.2.15  5000     0     0\n"
    )
    assert parse_forwarded_port(told) == 34567
    assert parse_forwarded_port("Hub -1 (envdnet):\n") is None
