"""What this host provides for OSWorld's tasks, and the obstacles of each registered task."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from envd.base.config import Config
from envd.hypervisor.machine import GuestOs
from envd.images.catalogue import ImageCatalogue
from envd.integrations.osworld.catalogue import IMAGE
from envd.integrations.osworld.files import OsworldFile
from envd.integrations.osworld.lint import HostSupplies, findings, missing_files
from envd.integrations.osworld.workers import KnownNames
from envd.tasks.assets import AssetCache
from envd.tasks.fields import AssetRef


def host_of(config: Config, *, known: KnownNames | None) -> HostSupplies:
    """Describe this host for `envd.integrations.osworld.lint`; `known` are the names in the installed package."""
    assets = AssetCache(config.asset_dir)
    return HostSupplies(
        known=known,
        has_asset=lambda url: assets.has(AssetRef(url)),
        packages=_packages(ImageCatalogue(config.cache_dir)),
        has_web=any(pool.web != "closed" for pool in config.pools.values() if pool.image == IMAGE),
    )


class TaskObstacles:
    """The obstacles of OSWorld's tasks. All but missing files are found once: files may be fetched while envd runs."""

    def __init__(self, files: Sequence[OsworldFile], host: HostSupplies) -> None:
        self._has_asset = host.has_asset
        self._files = {file.task_id: file for file in files}
        without_files = replace(host, has_asset=lambda _: True)
        self._fixed: Mapping[str, tuple[str, ...]] = {
            file.task_id: tuple(map(str, findings(file, without_files))) for file in files
        }

    def __call__(self, task_id: str) -> tuple[str, ...] | None:
        """Return why a task cannot run, each reason `kind: detail`; None for tasks that are not OSWorld's."""
        file = self._files.get(task_id)
        if file is None:
            return None
        return (*self._fixed[task_id], *map(str, missing_files(file, self._has_asset)))


def _packages(catalogue: ImageCatalogue) -> dict[GuestOs, frozenset[str] | None]:
    """Return the packages of the images for OSWorld tasks, by system; None for imported images."""
    systems: dict[GuestOs, frozenset[str] | None] = {}
    for image in catalogue.list():
        if image.name == IMAGE and image.os == GuestOs.LINUX.value:
            # The current version comes first, and is the one that runs.
            systems.setdefault(GuestOs.LINUX, catalogue.packages(image))
        elif image.os == GuestOs.WINDOWS.value and catalogue.packages(image) is None:
            # An image with a list of packages is Linux with Wine, which has none of the applications.
            systems[GuestOs.WINDOWS] = None
    return systems
