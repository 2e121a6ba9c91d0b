"""The files from which users build a container image of the desktop with podman, buildah or docker."""

from importlib.resources import files
from pathlib import Path
from typing import Final

from envd.images.recipe import CUSTOMIZE_SCRIPT, DESKTOP_PACKAGES, desktop_recipe, overlay_files, write_files

_CONTAINERFILE = (files("envd.images") / "Containerfile").read_text(encoding="ascii")
#: What a machine boots by, and its X server. A container has neither kernel nor devices.
_BOOT_PACKAGES: Final = frozenset({
    "e2fsprogs", "initramfs-tools", "kmod", "libpam-systemd", "systemd-sysv", "udev", "xinit", "xserver-xorg-core",
    "xserver-xorg-input-libinput",
})  # fmt: skip
_BOOT_FILES: Final = (
    "etc/X11/", "etc/fstab", "etc/initramfs-tools/", "etc/libinput/", "etc/sysctl.d/", "etc/systemd/", "etc/udev/",
)  # fmt: skip


def write_container_files(directory: Path) -> None:
    """Write a Containerfile and the desktop's files into a new directory. Raises: OSError."""
    directory.mkdir(parents=True)
    packages = "".join(f"{name}\n" for name in DESKTOP_PACKAGES if name not in _BOOT_PACKAGES)
    own = {"usr/lib/envd/packages.txt": packages.encode(), "usr/lib/envd/customize.sh": CUSTOMIZE_SCRIPT.encode()}
    overlay = {path: data for path, data in overlay_files(desktop_recipe()).items() if not path.startswith(_BOOT_FILES)}
    write_files(overlay | own, directory / "desktop")
    (directory / "Containerfile").write_text(_CONTAINERFILE, encoding="ascii")
