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
from envd.hypervisor.oci.hypervisor import _mark
from envd.hypervisor.oci.ids import own_ids
from envd.hypervisor.oci.images import obstacle
from envd.images.catalogue import ImageCatalogue


def desktop_image() -> DiskImage:
    """Return this host's desktop image; skips the test if containers cannot run it here."""
    if os.geteuid() != 0 or shutil.which("runc") is None:
        pytest.skip("containers need root and runc")
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


def container_pids(state_dir: Path) -> dict[str, int]:
    """Return {machine id: its first process} of a daemon's containers."""
    mark, found = f"/envd-{_mark(state_dir)}/", {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            groups = (entry / "cgroup").read_text() if entry.name.isdigit() else ""
            name = groups.partition(mark)[2].splitlines()[:1]
            if name and name != ["holder"] and _is_first(int(entry.name)):
                found[name[0].partition("/")[0]] = int(entry.name)
    return found


def container_leftovers(state_dir: Path, machine_id: str = "") -> list[str]:
    """List directories and control groups of a daemon's containers, or of one of them."""
    left = [str(path) for path in (state_dir / "containers").glob(f"{machine_id}*")]
    groups = ControlGroups(_mark(state_dir), ids=own_ids()).machine_ids()
    return left + [f"control groups of {name}" for name in groups if machine_id in ("", name)]
