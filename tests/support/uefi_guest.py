"""Builds a small Debian guest on the hardware of Windows machines, to test that hardware without Windows.

It boots by UEFI from a disk with an EFI system partition, without a boot loader of its own, and has drivers for all of
`Hardware.WINDOWS`, the guest agent and tpm2-tools. Its first terminal shows typed keys, but no cursor. Built from
Debian packages as root in about 1 min, then cached by the digest of this module.
"""

import fcntl
import os
import shutil
import struct
import subprocess
from hashlib import sha256
from pathlib import Path

from envd.hypervisor.machine import Firmware, GuestOs, Hardware
from envd.images.catalogue import Image, ImageCatalogue, file_sha256

NAME = "uefi-guest"
_PACKAGES = (
    "busybox-static",
    "coreutils",
    "kmod",
    "libtss2-tcti-device0",
    "linux-image-amd64",
    "qemu-guest-agent",
    "systemd-boot-efi",
    "tiny-initramfs",
    "tpm2-tools",
)
_MODULES = (
    "ahci",
    "crc32c_generic",
    "efivarfs",
    "evdev",
    "ext4",
    "hid-generic",
    "isofs",
    "pvpanic-mmio",
    "sd_mod",
    "sr_mod",
    "usbhid",
    "virtio-gpu",
    "virtio-rng",
    "virtio_console",
    "virtio_net",
    "virtio_pci",
    "virtio_scsi",
    "xhci_pci",
)
_CMDLINE = "console=tty0 quiet mitigations=off nowatchdog random.trust_cpu=on vt.global_cursor_default=0"
_INITRAMFS_INIT = """#!/bin/busybox sh
busybox mount -t devtmpfs dev /dev
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox modprobe -a {modules}
until root=$(busybox findfs LABEL=root) && busybox mount -t ext4 -o noatime $root /root; do busybox sleep 0.1; done
for directory in dev proc sys; do busybox mount --move /$directory /root/$directory; done
exec busybox switch_root /root /sbin/init
"""
_INITTAB = """::sysinit:/etc/start
::respawn:/usr/sbin/qemu-ga --method=virtio-serial --path=/dev/agent
tty1::respawn:/bin/cat
"""
_START = """#!/bin/sh
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
mount -t efivarfs efivarfs /sys/firmware/efi/efivars
for port in /sys/class/virtio-ports/*; do ln -s /dev/${port##*/} /dev/agent; done
echo "A guest on the hardware of Windows machines" >/dev/tty1
"""
_MIB = 1 << 20
_SECTOR_BYTES = 512
_ESP_MIB = 40
_ROOT_MIB = 256
#: Where systemd's stub expects the parts of an image (systemd-stub(7)).
_SECTIONS = ((".osrel", "osrel", 0x20000), (".cmdline", "cmdline", 0x30000), (".linux", "linux", 0x2000000),
             (".initrd", "initrd", 0x3000000))  # fmt: skip


def build(cache_dir: Path) -> ImageCatalogue:
    """Return the catalogue that has the guest under `NAME`, built unless it is there.

    Args:
        cache_dir: The user's cache; the guest is in a catalogue of its own below it.
    """
    catalogue = ImageCatalogue(cache_dir / "testing")
    catalogue.root.mkdir(parents=True, exist_ok=True)
    digest = sha256(Path(__file__).read_bytes()).hexdigest()
    with (catalogue.root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if image := catalogue.find(NAME, digest):
            catalogue.make_current(image)
            return catalogue
        with catalogue.staging(NAME) as directory, catalogue.staging(NAME) as scratch:
            _make_disk(scratch, directory / "disk.qcow2")
            image = Image(
                name=NAME,
                digest=digest,
                disk="disk.qcow2",
                disk_sha256=file_sha256(directory / "disk.qcow2"),
                os=GuestOs.LINUX.value,
                hardware=Hardware.WINDOWS.value,
                firmware=Firmware.UEFI.value,
                has_guestd=False,
            )
            catalogue.publish(directory, image)
    return catalogue


def _make_disk(scratch: Path, disk: Path) -> None:
    root = scratch / "root"
    # Only unpacked: nothing of this guest needs the packages' scripts.
    _run("mmdebstrap", "--quiet", "--mode=root", "--format=directory", "--variant=extract",
         f"--include={','.join(_PACKAGES)}", "--dpkgopt=path-exclude=/usr/share/doc/*", "bookworm", root)  # fmt: skip
    kernel = next((root / "boot").glob("vmlinuz-*"))
    busybox = root / "bin/busybox"
    _make_initramfs(root, scratch / "initramfs", busybox, kernel_version=kernel.name.partition("-")[2])
    parts = {"osrel": scratch / "osrel", "cmdline": scratch / "cmdline", "linux": kernel, "initrd": scratch / "initrd"}
    parts["osrel"].write_text('ID=debian\nNAME="UEFI guest"\n')
    parts["cmdline"].write_text(_CMDLINE)
    with parts["initrd"].open("wb") as initrd:
        names = "\n".join(str(path.relative_to(scratch / "initramfs")) for path in (scratch / "initramfs").rglob("*"))
        subprocess.run([busybox, "cpio", "-o", "-H", "newc", "-R", "0:0"], cwd=scratch / "initramfs",
                       input=names.encode(), stdout=initrd, stderr=subprocess.DEVNULL, check=True)  # fmt: skip
    loader = scratch / "loader.efi"
    sections = [
        argument
        for section, part, address in _SECTIONS
        for argument in (f"--add-section={section}={parts[part]}", f"--change-section-vma={section}={address:#x}")
    ]
    _run("objcopy", *sections, root / "usr/lib/systemd/boot/efi/linuxx64.efi.stub", loader)
    esp = scratch / "esp"
    with esp.open("wb") as stream:
        stream.truncate(_ESP_MIB * _MIB)
    _run("mformat", "-i", esp, "-F", "::")
    _run("mmd", "-i", esp, "::/EFI", "::/EFI/BOOT")
    _run("mcopy", "-i", esp, loader, "::/EFI/BOOT/BOOTX64.EFI")
    _finish_root(root, busybox)
    file_system = scratch / "ext4"
    _run("mke2fs", "-q", "-t", "ext4", "-L", "root", "-m", "0", "-E", "lazy_itable_init=0", "-d", root, file_system,
         f"{_ROOT_MIB}M")  # fmt: skip
    raw = scratch / "raw"
    _join_partitions(raw, (0xEF, esp), (0x83, file_system))
    _run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, disk)


def _make_initramfs(root: Path, initramfs: Path, busybox: Path, *, kernel_version: str) -> None:
    modules = Path("lib/modules") / kernel_version
    _run(busybox, "depmod", "-b", root, kernel_version)
    dependencies = {}
    for line in (root / modules / "modules.dep").read_text().splitlines():
        path, _, needed = line.partition(":")
        dependencies[Path(path).stem.replace("-", "_")] = (path, needed.split())
    for name in ("bin", "dev", "proc", "sys", "root", modules):
        (initramfs / name).mkdir(parents=True)
    copied = {file for name in _MODULES for file in _closure(name.replace("-", "_"), dependencies)}
    for file in copied:
        target = initramfs / modules / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / modules / file, target)
    _run(busybox, "depmod", "-b", initramfs, kernel_version)
    shutil.copy(busybox, initramfs / "bin/busybox")
    init = initramfs / "init"
    init.write_text(_INITRAMFS_INIT.format(modules=" ".join(_MODULES)))
    init.chmod(0o755)


def _closure(name: str, dependencies: dict[str, tuple[str, list[str]]]) -> set[str]:
    path, needed = dependencies[name]
    return {path, *needed}


def _finish_root(root: Path, busybox: Path) -> None:
    for name in ("boot", "lib/modules", "usr/lib/systemd/boot", "usr/share", "var/cache", "var/lib/apt"):
        shutil.rmtree(root / name, ignore_errors=True)
    for name in ("dev", "proc", "sys", "tmp", "run", "root", "var/tmp", "var/run", "var/log"):
        (root / name).mkdir(parents=True, exist_ok=True)
    applets = subprocess.run([busybox, "--list-full"], check=True, capture_output=True, text=True).stdout.split()
    for applet in applets:
        link = root / applet
        if not any(os.path.lexists(root / folder / link.name) for folder in ("bin", "sbin", "usr/bin", "usr/sbin")):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to("/bin/busybox")
    files = {"etc/inittab": _INITTAB, "etc/start": _START, "etc/machine-id": f"{0:032x}\n",
             "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n", "etc/group": "root:x:0:\n"}  # fmt: skip
    for name, text in files.items():
        (root / name).write_text(text)
    (root / "etc/start").chmod(0o755)


def _join_partitions(disk: Path, *partitions: tuple[int, Path]) -> None:
    """Write a disk with an MBR and one partition per (type, content)."""
    entries = b""
    with disk.open("wb") as stream:
        at = _MIB
        for kind, content in partitions:
            size = content.stat().st_size
            entries += struct.pack("<B3sB3sII", 0, b"\0" * 3, kind, b"\0" * 3, at // _SECTOR_BYTES,
                                   size // _SECTOR_BYTES)  # fmt: skip
            stream.seek(at)
            with content.open("rb") as source:
                shutil.copyfileobj(source, stream, _MIB)
            at += size
        stream.seek(446)
        stream.write(entries.ljust(64, b"\0") + b"\x55\xaa")


def _run(*command: str | os.PathLike[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{NAME}: {command[0]} failed with status {done.returncode}: {done.stderr[-2000:]}")
