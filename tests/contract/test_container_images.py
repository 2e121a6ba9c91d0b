"""The files of images for containers: unpacked in the user ids of their users, and removed when no image needs them."""

import asyncio
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath

import pytest

from envd.base.config import Config, HypervisorConfig
from envd.hypervisor.machine import MachineSpec
from envd.hypervisor.oci.hypervisor import OciHypervisor
from envd.hypervisor.oci.ids import own_ids
from envd.hypervisor.oci.namespace import Namespace
from envd.images.catalogue import Image, ImageCatalogue
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


def settings_of(directory: Path) -> Config:
    return Config(state_dir=directory / "state", cache_dir=directory / "cache", hypervisor=HypervisorConfig(uri="oci:"))


@asynccontextmanager
async def opened(config: Config, name: str) -> AsyncIterator[OciHypervisor]:
    hypervisor = await OciHypervisor.open(config, [ImageCatalogue(config.cache_dir).disk_image(name)])
    try:
        yield hypervisor
    finally:
        await hypervisor.close()


async def unpack(hypervisor: OciHypervisor, config: Config, name: str) -> Path:
    """Return the directory of an image's files on the host."""
    catalogue = ImageCatalogue(config.cache_dir)
    inside = await hypervisor._images.directory(catalogue.disk_image(name))
    return catalogue.root / inside.relative_to(Namespace.inside("images"))


async def add_template(hypervisor: OciHypervisor, config: Config, name: str, *, memory_mib: int = 1024) -> Path:
    """Make a template of 1 MiB; return its directory."""
    image = ImageCatalogue(config.cache_dir).disk_image(name)
    upper = config.state_dir / "containers/m1/upper"
    upper.mkdir(parents=True, exist_ok=True)
    (upper / "file").write_bytes(bytes(1 << 20))
    for path in (upper, upper.parent, upper / "file"):
        os.chown(path, own_ids().root_uid, own_ids().root_gid)
    spec = MachineSpec(machine_id="m1", image=image, memory_mib=memory_mib)
    inside = Namespace.inside("machines") / "m1/upper"
    snapshot = await hypervisor._templates.add(spec, inside, {}, began_s=asyncio.get_running_loop().time())
    return snapshot.directory


async def test_an_archive_is_unpacked_with_its_owners_links_and_modes(directory: Path) -> None:
    layer = (
        Entry(path="opt/tool", content=b"#!", mode=0o4755),
        Entry(path="opt/same", kind=tarfile.LNKTYPE, link="opt/tool"),
        Entry(path="home/user/note", content=b"kept", mode=0o600, uid=1000),
        link("opt/out", "../../../../etc"),
    )
    config = settings_of(directory)
    catalogue = ImageCatalogue(config.cache_dir)
    import_archive(catalogue, "mine", write_archive(directory / "mine.tar", [tuple(DESKTOP.values()), layer]))
    async with opened(config, "mine") as hypervisor:
        root = await unpack(hypervisor, config, "mine")
        assert root == await unpack(hypervisor, config, "mine"), "it is unpacked once"
    ids = own_ids()
    assert (root / "usr/lib/envd/session").stat().st_uid == ids.root_uid
    assert (root / "home/user/note").stat().st_uid == ids.first_uid + 999
    assert (root / "home/user/note").read_bytes() == b"kept"
    assert stat.S_IMODE((root / "opt/tool").stat().st_mode) == 0o4755
    assert (root / "opt/tool").samefile(root / "opt/same")
    assert PurePosixPath(os.readlink(root / "opt/out")) == PurePosixPath("../../../../etc")


def publish_disk_with_sudo(catalogue: ImageCatalogue, root: Path) -> None:
    for name in ("Xtigervnc", "sudo"):
        program = root / "usr/bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!")
        program.chmod(0o4755)
    with catalogue.staging("osworld") as staged:
        (staged / "packages.txt").write_text("sudo 1.9\ntigervnc-standalone-server 1.12\n")
        subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", root, staged / "disk.raw", "8M"], check=True)
        image = Image(name="osworld", digest="0" * 64, disk="disk.raw", disk_sha256="", disk_format="raw")
        catalogue.publish(staged, image)


async def test_sudo_keeps_its_right_on_a_disk_from_a_recipe(directory: Path) -> None:
    config = settings_of(directory)
    publish_disk_with_sudo(ImageCatalogue(config.cache_dir), directory / "root")
    async with opened(config, "osworld") as hypervisor:
        unpacked = await unpack(hypervisor, config, "osworld")
    sudo = (unpacked / "usr/bin/sudo").stat()
    assert (stat.S_IMODE(sudo.st_mode), sudo.st_uid) == (0o4755, own_ids().root_uid)


async def test_what_no_image_in_use_needs_is_removed_at_the_next_start(directory: Path) -> None:
    config = settings_of(directory)
    catalogue = ImageCatalogue(config.cache_dir)
    layers = [tuple(DESKTOP.values()), (Entry(path="opt/version", content=b"1"),)]
    old = import_archive(catalogue, "mine", write_archive(directory / "mine.tar", layers))
    old_name = f"mine@{old.digest[:16]}"
    async with opened(config, old_name) as hypervisor:
        unpacked = await unpack(hypervisor, config, old_name)
        template = await add_template(hypervisor, config, old_name)
        import_archive(catalogue, "mine", write_archive(directory / "mine.tar", [*layers, (Entry(path="opt/new"),)]))
        other = config.model_copy(update={"state_dir": directory / "other"})
        async with opened(other, "mine"):
            assert (unpacked / "opt/version").exists(), "the first daemon uses it"
            assert (template / "template.json").exists()
    async with opened(config, old_name):
        assert (unpacked / "opt/version").exists(), "a configured pool uses it"
        assert (template / "template.json").exists()
    left_over = unpacked.with_name(f".{unpacked.name}")
    left_over.mkdir()
    async with opened(config, "mine"):
        pass
    assert not unpacked.exists()
    assert not left_over.exists()
    assert not template.exists()
    assert catalogue.disk_of(old).exists(), "the image itself stays"
    assert [path.name for path in unpacked.parent.iterdir() if path.is_dir()] == []


async def test_the_least_recently_used_templates_beyond_the_limit_are_removed(directory: Path) -> None:
    config = settings_of(directory)
    import_archive(
        ImageCatalogue(config.cache_dir), "mine", write_archive(directory / "mine.tar", [tuple(DESKTOP.values())])
    )
    async with opened(config, "mine") as hypervisor:
        old, new = [await add_template(hypervisor, config, "mine", memory_mib=mib) for mib in (512, 768)]
    os.utime(old, (1, 1))
    tight = config.hypervisor.model_copy(update={"template_limit_gib": 1.5 / 1024})
    async with opened(config.model_copy(update={"hypervisor": tight}), "mine"):
        pass
    assert (old.exists(), new.exists()) == (False, True)
