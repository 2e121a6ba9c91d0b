"""Containers for tests: the desktop image of this host, settings, and how to find their processes and leftovers."""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from envd.base.config import Config, HypervisorConfig
from envd.base.errors import ImageError, ImageNotFound
from envd.hypervisor.machine import DiskImage
from envd.hypervisor.oci.control_groups import ControlGroups
from envd.hypervisor.oci.hypervisor import mark_of
from envd.hypervisor.oci.ids import own_ids
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


def first_process(pids: Iterable[int]) -> int:
    """Return the host's number of a container's first process, one of its `pids`."""
    (first,) = [pid for pid in pids if _is_first(pid)]
    return first


def _is_first(pid: int) -> bool:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(line for line in lines if line.startswith("NSpid:")).split()[-1] == "1"
    return False


def machine_processes(state_dir: Path) -> dict[int, str]:
    """Return {process id: machine id} of the processes of a daemon's containers."""
    mark, found = f"/envd-{mark_of(state_dir)}/", {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            groups = (entry / "cgroup").read_text()
            # Of one that has ended and waits for its parent, the kernel adds "(deleted)".
            if (group := groups.partition(mark)[2].split("\n")[0]) and "(deleted)" not in groups:
                found[int(entry.name)] = group.partition("/")[0]
    return {pid: machine_id for pid, machine_id in found.items() if machine_id != "holder"}


def container_pids(state_dir: Path) -> dict[str, int]:
    """Return {machine id: its first process} of a daemon's containers."""
    return {machine_id: pid for pid, machine_id in machine_processes(state_dir).items() if _is_first(pid)}


def container_leftovers(state_dir: Path, machine_id: str = "") -> list[str]:
    """List processes, directories and control groups of a daemon's containers, or of one of them."""
    left = [f"process {pid}" for pid, name in machine_processes(state_dir).items() if machine_id in ("", name)]
    left += [str(path) for path in (state_dir / "containers").glob(f"{machine_id}*")]
    groups = ControlGroups(mark_of(state_dir), ids=own_ids()).machine_ids()
    return left + [f"control groups of {name}" for name in groups if machine_id in ("", name)]
