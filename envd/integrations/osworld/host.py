"""What this host provides for OSWorld's tasks, and the obstacles of each registered task."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from envd.base.config import Config
from envd.hypervisor.machine import GuestOs
from envd.images.catalogue import ImageCatalogue
from envd.integrations.osworld.catalogue import IMAGE
from envd.integrations.osworld.files import OsworldFile
from envd.integrations.osworld.lint import HostSupplies, findings, missing_files, texts_of
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


def obstacles_of(files: Sequence[OsworldFile], host: HostSupplies) -> Callable[[str], tuple[str, ...] | None]:
    """Return a function that returns why a task cannot run, each reason `kind: detail`; None if it is not OSWorld's.

    All obstacles but missing files are found once: files may be fetched while envd runs.
    """
    by_id = {file.task_id: file for file in files}
    without_files = replace(host, has_asset=lambda _: True)
    fixed = {file.task_id: texts_of(findings(file, without_files)) for file in files}

    def find(task_id: str) -> tuple[str, ...] | None:
        file = by_id.get(task_id)
        return None if file is None else fixed[task_id] + texts_of(missing_files(file, host.has_asset))

    return find


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
