"""Imported archives as the file systems of containers, unpacked in the user ids of their users."""

import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from envd.base.config import Config, HypervisorConfig
from envd.hypervisor.oci.hypervisor import OciHypervisor
from envd.hypervisor.oci.ids import own_ids
from envd.hypervisor.oci.namespace import Namespace
from envd.images.catalogue import ImageCatalogue
from envd.images.oci_archive import import_archive
from tests.support.container_archive import DESKTOP, Entry, link, write_archive
from tests.support.containers import require_containers

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]


@pytest.fixture
def directory() -> Iterator[Path]:
    require_containers()
    with tempfile.TemporaryDirectory(prefix="envd-oci-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o711)
        yield Path(directory)


async def test_an_archive_is_unpacked_with_its_owners_links_and_modes(directory: Path) -> None:
    layer = (
        Entry(path="opt/tool", content=b"#!", mode=0o4755),
        Entry(path="opt/same", kind=tarfile.LNKTYPE, link="opt/tool"),
        Entry(path="home/user/note", content=b"kept", mode=0o600, uid=1000),
        link("opt/out", "../../../../etc"),
    )
    config = Config(
        state_dir=directory / "state", cache_dir=directory / "cache", hypervisor=HypervisorConfig(uri="oci:")
    )
    catalogue = ImageCatalogue(config.cache_dir)
    import_archive(catalogue, "mine", write_archive(directory / "mine.tar", [tuple(DESKTOP.values()), layer]))
    image = catalogue.disk_image("mine")
    hypervisor = await OciHypervisor.open(config, [image])
    try:
        inside = await hypervisor._images.directory(image)
        assert inside == await hypervisor._images.directory(image), "it is unpacked once"
    finally:
        await hypervisor.close()
    root = catalogue.root / inside.relative_to(Namespace.inside("images"))
    ids = own_ids()
    assert (root / "usr/lib/envd/session").stat().st_uid == ids.root_uid
    assert (root / "home/user/note").stat().st_uid == ids.first_uid + 999
    assert (root / "home/user/note").read_bytes() == b"kept"
    assert stat.S_IMODE((root / "opt/tool").stat().st_mode) == 0o4755
    assert (root / "opt/tool").samefile(root / "opt/same")
    assert PurePosixPath(os.readlink(root / "opt/out")) == PurePosixPath("../../../../etc")
    assert {path.name for path in root.parent.iterdir() if path.name.startswith("container-")} == {root.name}
