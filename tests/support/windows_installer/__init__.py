"""A stand-in for Windows' installation ISO, to run whole image builds without Windows.

The ISO has the layout of Windows' own: boot images for UEFI with and without the prompt for a key, of which only the
second boots, and a real WIM file with the editions' names. It boots the kernel of `uefi_guest`, reads the answer file
as Setup does, partitions the disk, copies a small Debian system with the guest agent, and restarts between the passes.
What it cannot do is run Windows: scripts for it are looked at, not run.
"""

import gzip
import shutil
import struct
import subprocess
from pathlib import Path

from envd.images.windows.media import NO_PROMPT_IMAGE
from tests.support import uefi_guest
from tests.support.windows_media import PROMPT_IMAGE, MediumEdition, make_windows_iso

_INIT = Path(__file__).with_name("init.sh")
_PARTITIONER = "/usr/sbin/sfdisk"
_SECTOR_BYTES, _MIB = 512, 1 << 20
#: El Torito counts sectors of 512 bytes in 16 bits.
_BOOT_IMAGE_MIB = 31
_SYSTEM_MIB = 40


def make_installer(path: Path, *, cache_dir: Path, fault: str = "") -> Path:
    """Write the stand-in's ISO.

    Args:
        path: The new file.
        cache_dir: The user's cache, which has or gets `uefi_guest`.
        fault: What goes wrong: `no-driver`, `wrong-edition`, `no-disk-space`, `hang`, `failed-step`, `no-agent` or
            `restless`.
    """
    scratch = path.with_suffix(".scratch")
    scratch.mkdir()
    guest = uefi_guest.build(cache_dir).disk_image(uefi_guest.NAME)
    raw = scratch / "raw"
    _run("qemu-img", "convert", "-O", "raw", guest.disk, raw)
    loader = scratch / "loader.efi"
    _run("mcopy", "-i", f"{raw}@@1M", "::/EFI/BOOT/BOOTX64.EFI", loader)
    system = gzip.compress(_system(scratch, _partition(raw, 1)), compresslevel=1)
    boot = _boot_image(scratch, loader)
    iso = make_windows_iso(
        path,
        (MediumEdition(),),
        boot_images={
            # Without a loader: firmware goes to the next device, as when no key was pressed.
            PROMPT_IMAGE: bytes(len(boot)),
            NO_PROMPT_IMAGE: boot,
            "sources/system.gz": system,
            **({"sources/fault": fault.encode()} if fault else {}),
        },
    )
    shutil.rmtree(scratch)
    return iso


def _partition(raw: Path, number: int) -> bytes:
    """Return the content of a partition of a disk with an MBR."""
    with raw.open("rb") as stream:
        stream.seek(446 + 16 * number)
        first, count = struct.unpack_from("<II", stream.read(16), 8)
        stream.seek(first * _SECTOR_BYTES)
        return stream.read(count * _SECTOR_BYTES)


def _system(scratch: Path, partition: bytes) -> bytes:
    """Return a file system with the guest agent and a shell of the guest's, and nothing that they do not need."""
    (scratch / "ext4").write_bytes(partition)
    whole, root = scratch / "whole", scratch / "root"
    whole.mkdir()
    _run("debugfs", "-R", f"rdump / {whole}", scratch / "ext4")
    wanted, found = ["qemu-ga", "busybox", "ld-linux-x86-64.so.2"], set()
    files = {path.name: path for path in whole.rglob("*") if path.is_file()}
    while wanted:
        name = wanted.pop()
        if name not in found:
            found.add(name)
            listed = subprocess.run(["objdump", "-p", files[name]], capture_output=True, text=True, check=True).stdout
            wanted += [line.split()[1] for line in listed.splitlines() if line.startswith("  NEEDED")]
    for name in ("dev", "proc", "sys", "sbin", "bin", "lib64", "usr/lib", "usr/sbin", "var/run", "tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    homes = {"qemu-ga": "usr/sbin", "busybox": "bin", "ld-linux-x86-64.so.2": "lib64"}
    for name in found:
        shutil.copy(files[name], root / homes.get(name, "usr/lib") / name)
    (root / "bin/sh").symlink_to("busybox")
    small = scratch / "small"
    _run("mke2fs", "-q", "-t", "ext4", "-m", "0", "-d", root, small, f"{_SYSTEM_MIB}M")
    return small.read_bytes()


def _boot_image(scratch: Path, loader: Path) -> bytes:
    """Return an EFI system partition whose loader runs our first process instead of the guest's."""
    parts = {name: scratch / name for name in ("osrel", "cmdline", "linux", "initrd")}
    for name, part in parts.items():
        _run("objcopy", "-O", "binary", f"--only-section=.{name}", loader, part)
    # The kernel unpacks all archives in turn. Compressed, because firmware reads slowly from CDs.
    guests_own = parts["initrd"].read_bytes()
    parts["initrd"].write_bytes(
        gzip.compress(guests_own) + _archive(scratch / "tree", busybox=scratch / "root/bin/busybox")
    )
    new = scratch / "new.efi"
    stub = scratch / "stub"
    removed = [f"--remove-section=.{name}" for name in parts]
    _run("objcopy", *removed, loader, stub)
    addresses = {"osrel": 0x20000, "cmdline": 0x30000, "linux": 0x2000000, "initrd": 0x3000000}
    added = [
        argument
        for name, part in parts.items()
        for argument in (f"--add-section=.{name}={part}", f"--change-section-vma=.{name}={addresses[name]:#x}")
    ]
    _run("objcopy", *added, stub, new)
    image = scratch / "efi.img"
    with image.open("wb") as stream:
        stream.truncate(_BOOT_IMAGE_MIB * _MIB)
    _run("mformat", "-i", image, "::")
    _run("mmd", "-i", image, "::/EFI", "::/EFI/BOOT")
    _run("mcopy", "-i", image, new, "::/EFI/BOOT/BOOTX64.EFI")
    return image.read_bytes()


def _archive(tree: Path, *, busybox: Path) -> bytes:
    """Return a compressed archive with our first process, and a partitioner with its libraries."""
    libraries = subprocess.run(["ldd", _PARTITIONER], check=True, capture_output=True, text=True).stdout.split()
    for file in (_PARTITIONER, *(word for word in libraries if word.startswith("/"))):
        target = tree / file.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    shutil.copy(_INIT, tree / "init")
    (tree / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    command: list[str | Path] = [busybox, "cpio", "-o", "-H", "newc", "-R", "0:0"]
    packed = subprocess.run(command, cwd=tree, input=names.encode(), capture_output=True, check=True)
    return gzip.compress(packed.stdout)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
