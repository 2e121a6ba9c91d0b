"""Recipes of guest images, and the digest that identifies a recipe. Reads its package data."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from envd.hypervisor.machine import GuestOs

#: Increase it when `build.py` changes an image without a change of the recipe's fields.
BUILDER_VERSION = 1


def _packages(name: str) -> tuple[str, ...]:
    return tuple((files("envd.images") / "packages" / f"{name}.txt").read_text().split())


#: Packages with the same name in Debian and Ubuntu.
DESKTOP_PACKAGES = _packages("desktop")
#: Needed by OSWorld's tasks in addition to the desktop: their applications, if Debian has them, and GNOME's settings
#: schemas without GNOME.
OSWORLD_PACKAGES = _packages("osworld")
#: The applications of Debian that OpenComputer's tasks use, and what its verifiers need of the guest.
OFFICE_PACKAGES = _packages("office")
#: A kernel, an X server and Wine, but no desktop of Linux.
WINE_PACKAGES = _packages("wine")

#: Packages and files by which a machine boots, and its X server. A container has neither a kernel nor devices.
_BOOT_PACKAGES = _packages("boot")
_BOOT_FILES = (
    "etc/X11/", "etc/fstab", "etc/initramfs-tools/", "etc/libinput/", "etc/sysctl.d/", "etc/systemd/", "etc/udev/",
)  # fmt: skip

#: Names of OpenComputer's applications that the office image has.
OFFICE_APPLICATIONS = _packages("office-applications")

#: Sources of the Windows programs of an image, compiled when it is built; each program's files by its name.
WINDOWS_SOURCES = "usr/src/envd/"
WINDOWS_PROGRAMS = {"envdshell.exe": ("queries.c", "requests.c", "shell.c"), "envdlink.exe": ("link.c",)}

#: Program of the user that runs in the new root file system after its packages are installed, and the recipe's own
#: `customize`. It is removed after it has run.
USER_SCRIPT = "usr/lib/envd/user-script"

#: Completes a root file system after its packages are installed; its argument is the root.
CUSTOMIZE_SCRIPT = (files("envd.images") / "customize.sh").read_text()
#: Its place in a root file system for containers.
CUSTOMIZE_FILE = "usr/lib/envd/customize.sh"

#: Python packages to install in addition to Debian's, in pip's format. The file is also part of the guest.
PYTHON_PACKAGES = "usr/lib/envd/python-packages.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRecipe:
    """One guest image to build with mmdebstrap."""

    name: str
    distribution: str
    """`debian` or `ubuntu`. Determines the archive keyring."""
    suite: str
    mirror: str = ""
    """Archive to install from; empty for the host's (Debian) or mmdebstrap's default."""
    components: tuple[str, ...] = ("main",)
    packages: tuple[str, ...] = DESKTOP_PACKAGES
    kernel_package: str = "linux-image-amd64"
    """Empty for the files of containers."""
    disk_mib: int = 8192
    """Size of the guest's disk; the image file is sparse."""
    os: GuestOs = GuestOs.LINUX
    """The system that tasks find in it."""
    layer: str = ""
    """Directory of this package whose files it has in addition to the desktop's; empty for none."""
    provides: tuple[str, ...] = ()
    """What tasks may need of it."""

    @property
    def keyring(self) -> str:
        return f"/usr/share/keyrings/{self.distribution}-archive-keyring.gpg"


def desktop_recipe(*, distribution: str = "debian", suite: str = "", mirror: str = "") -> ImageRecipe:
    """Return the desktop recipe for a distribution.

    Raises:
        ValueError: The distribution is unknown.
    """
    if distribution == "debian":
        return ImageRecipe(name="desktop", distribution="debian", suite=suite or "bookworm", mirror=mirror)
    if distribution == "ubuntu":
        return ImageRecipe(
            name="desktop-ubuntu",
            distribution="ubuntu",
            suite=suite or "noble",
            mirror=mirror,
            components=("main", "universe"),
            kernel_package="linux-image-generic",
        )
    raise ValueError(f"distribution {distribution!r}: unknown; choose debian or ubuntu")


def for_containers(recipe: ImageRecipe) -> ImageRecipe:
    """Return a recipe of Linux without what only virtual machines need; it is built without root."""
    packages = tuple(name for name in recipe.packages if name not in _BOOT_PACKAGES)
    return replace(recipe, packages=packages, kernel_package="", disk_mib=0)


def osworld_recipe(*, mirror: str = "") -> ImageRecipe:
    """Return the recipe of the desktop with all that OSWorld's tasks expect of a guest."""
    packages = tuple(sorted({*DESKTOP_PACKAGES, *OSWORLD_PACKAGES}))
    return ImageRecipe(
        name="osworld", distribution="debian", suite="bookworm", mirror=mirror, packages=packages, layer="osworld"
    )


def office_recipe(*, mirror: str = "") -> ImageRecipe:
    """Return the recipe of the desktop with Debian's large applications, for OpenComputer's tasks."""
    return ImageRecipe(
        name="office",
        distribution="debian",
        suite="bookworm",
        mirror=mirror,
        packages=tuple(sorted({*DESKTOP_PACKAGES, *OFFICE_PACKAGES})),
        disk_mib=16384,
        layer="office",
        provides=OFFICE_APPLICATIONS,
    )


def wine_recipe(*, mirror: str = "") -> ImageRecipe:
    """Return the recipe of a desktop that tasks take for Windows: Debian's Wine."""
    return ImageRecipe(
        name="wine", distribution="debian", suite="bookworm", mirror=mirror, packages=WINE_PACKAGES, os=GuestOs.WINDOWS
    )


def overlay_files(recipe: ImageRecipe) -> dict[str, bytes]:
    """Return envd's files in the guest, by absolute path without the leading slash."""
    images = files("envd.images")
    tree = dict(_walk(images / "rootfs", ""))
    if recipe.os is GuestOs.WINDOWS:
        return (
            tree
            | dict(_walk(images / "wine", ""))
            | dict(_walk(files("envd.guests") / "wineagent", "usr/lib/envd/wineagent/"))
        )
    tree.update(_walk(files("envd.guests") / "guestd", "usr/lib/envd/guestd/"))
    for path, data in _walk(images / "desktop", ""):
        tree[_desktop_destination(path)] = data
    if not recipe.kernel_package:
        tree = {path: data for path, data in tree.items() if not path.startswith(_BOOT_FILES)}
        tree[CUSTOMIZE_FILE] = CUSTOMIZE_SCRIPT.encode()
    if recipe.layer:
        # OSWorld's includes an Xauthority with an entry for no display: without any entry pyautogui prints a warning,
        # which OSWorld's getters take for part of the output.
        tree.update(_walk(images / recipe.layer, ""))
    return tree


def write_files(overlay: Mapping[str, bytes], directory: Path) -> None:
    """Write files of `overlay_files` below a directory, programs as executable."""
    for path, data in overlay.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        # Package data has no file modes, so programs are recognised by how they begin.
        target.chmod(0o755 if data.startswith((b"#!", b"\x7fELF")) else 0o644)


def _desktop_destination(path: str) -> str:
    """Return the guest path of a file of `desktop/`."""
    system = {
        "rc.xml": "etc/xdg/openbox/",
        "menu.xml": "etc/xdg/openbox/",
        "tint2rc": "etc/xdg/tint2/",
        "envd-guestd.service": "etc/systemd/system/",
        "envd-guestd.socket": "etc/systemd/system/",
    }
    return f"{system[path]}{path}" if path in system else f"etc/skel/{path}"


def _walk(directory: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in sorted(directory.iterdir(), key=lambda item: item.name):
        if entry.name == "__pycache__":
            continue
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _walk(entry, f"{path}/")
        else:
            found.append((path, entry.read_bytes()))
    return found


def recipe_digest(recipe: ImageRecipe, overlay: dict[str, bytes]) -> str:
    """Return the sha256 (hex) of everything that determines the image's content, except package versions.

    Versions follow the archive, for security fixes. `packages.txt` in the image's directory lists the installed ones; a
    mirror with dated snapshots pins them.
    """
    digest = hashlib.sha256()
    settings = asdict(recipe) | {"os": recipe.os.value}
    # The overlay has the files of a layer, and what an image provides does not change it.
    del settings["layer"], settings["provides"]
    if recipe.os is GuestOs.LINUX:
        # The digest of earlier recipes, which had no such field, stays.
        del settings["os"]
    digest.update(json.dumps([BUILDER_VERSION, settings], sort_keys=True).encode())
    for path in sorted(overlay):
        digest.update(path.encode() + b"\0" + hashlib.sha256(overlay[path]).digest())
    return digest.hexdigest()
