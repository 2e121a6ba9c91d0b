"""A hypervisor of containers for tests: the desktop image of this host, in a state directory of its own."""

import os
import shutil
from pathlib import Path

import pytest

from envd.base.config import Config, HypervisorConfig
from envd.base.errors import ImageError, ImageNotFound
from envd.hypervisor.machine import DiskImage
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
