"""A hypervisor of containers for tests: the desktop image of this host, in a state directory of its own."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from envd.base.config import Config, HypervisorConfig
from envd.base.errors import ImageError, ImageNotFound
from envd.hypervisor.machine import DiskImage
from envd.hypervisor.oci.hypervisor import mark_of
from envd.hypervisor.oci.images import obstacle
from envd.images.catalogue import ImageCatalogue


def require_containers() -> None:
    """Skip the test if this host cannot run containers."""
    if os.geteuid() != 0 or shutil.which("runc") is None:
        pytest.skip("containers need root and runc")


def desktop_image() -> DiskImage:
    """Return this host's desktop image; skips the test if containers cannot run it here."""
    require_containers()
    try:
        image = ImageCatalogue(Config().cache_dir).disk_image("desktop")
    except (ImageNotFound, ImageError) as error:
        pytest.skip(str(error))
    if problem := obstacle(image):
        pytest.skip(problem)
    return image


def settings(state_dir: Path) -> Config:
    """Return the settings of a daemon with containers."""
    return Config(state_dir=state_dir, hypervisor=HypervisorConfig(uri="oci:"))


def machine_processes(state_dir: Path) -> list[int]:
    """Return the processes of all containers of a state directory, by the host's ids, first processes first."""
    mark = f"/envd-{mark_of(state_dir)}/"
    found: dict[int, bool] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(mark in line and not line.endswith("/holder") for line in (entry / "cgroup").read_text().split()):
                numbers = (entry / "status").read_text().partition("NSpid:")[2].partition("\n")[0].split()
                found[int(entry.name)] = numbers[-1] == "1"
    return sorted(found, key=lambda pid: (not found[pid], pid))


def container_leftovers(state_dir: Path) -> list[str]:
    """List processes and machine directories of containers of `state_dir`."""
    left = [f"process {pid}" for pid in machine_processes(state_dir)]
    return left + [str(path) for path in (state_dir / "containers").glob("*")]
