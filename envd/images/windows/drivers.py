"""Chooses the drivers and the guest agent in a virtio-win ISO."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from envd.base.errors import ImageError
from envd.images.windows.disc import Disc
from envd.images.windows.editions import Release

#: Drivers that Setup loads: without a disk it cannot install.
SETUP_DRIVERS = ("vioscsi",)
#: Drivers that are installed at the first logon. viogpudo would turn the screen black during Setup.
LOGON_DRIVERS = ("NetKVM", "vioserial", "viorng", "pvpanic", "viogpudo")
AGENT = "guest-agent/qemu-ga-x86_64.msi"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestFiles:
    """Paths in a virtio-win ISO."""

    drivers: Mapping[str, tuple[str, ...]]
    agent: str


def find_guest_files(disc: Disc, release: Release) -> GuestFiles:
    """Return the drivers for a release of Windows, and the guest agent.

    Raises:
        ImageError: One is missing; the message lists all that are.
    """
    drivers = {
        name: tuple(disc.files(f"{name}/{release.driver_directory}/amd64")) for name in (*SETUP_DRIVERS, *LOGON_DRIVERS)
    }
    missing = [
        f"{name}/{release.driver_directory}/amd64"
        for name, files in drivers.items()
        if not any(PurePosixPath(file).suffix.lower() == ".inf" for file in files)
    ]
    agent = disc.find(AGENT)
    if agent is None:
        missing.append(AGENT)
    if agent is None or missing:
        raise ImageError(
            f"virtio-win ISO {disc.path}: no {', '.join(missing)}; download the current virtio-win.iso of the "
            "Fedora project (virtio-win-pkg-scripts)"
        )
    # Symbols are for debuggers only.
    return GuestFiles(
        drivers={
            name: tuple(file for file in files if PurePosixPath(file).suffix.lower() != ".pdb")
            for name, files in drivers.items()
        },
        agent=agent,
    )
