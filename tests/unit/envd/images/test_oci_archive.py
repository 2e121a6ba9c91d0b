"""Archives of container images: merged as a container would see their layers, or refused by name."""

import errno
import io
import os
import platform
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from envd.base.config import Config
from envd.base.errors import ConfigError, ImageError
from envd.hypervisor.machine import Firmware
from envd.hypervisor.oci.images import obstacle
from envd.hypervisor.qemu.backend import BACKEND as QEMU
from envd.images.catalogue import Image, ImageCatalogue
from envd.images.oci_archive import import_archive
from tests.support.container_archive import (
    COMPRESS,
    DESKTOP,
    ArchiveWriter,
    Entry,
    Layer,
    directory,
    link,
    write_archive,
)


@pytest.fixture(autouse=True)
def _x86_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def catalogue(tmp_path: Path) -> ImageCatalogue:
    return ImageCatalogue(tmp_path / "cache")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "my-desktop.tar"


DESKTOP_LAYER: Layer = tuple(DESKTOP.values())


def merged(catalogue: ImageCatalogue, file: Path, *layers: Layer, **more: Any) -> dict[str, tarfile.TarInfo]:
    """Import layers above those of a desktop; return the files of the result by path."""
    image = import_archive(catalogue, "mine", write_archive(file, [DESKTOP_LAYER, *layers], **more))
    with tarfile.open(catalogue.disk_of(image)) as tar:
        found = {member.name: member for member in tar}
        for member in found.values():
            opened = tar.extractfile(member) if member.isreg() else None
            member.pax_headers = {"content": opened.read().decode() if opened else ""}
        return found


def content(found: dict[str, tarfile.TarInfo], path: str) -> str:
    return found[path].pax_headers["content"]


def refused(catalogue: ImageCatalogue, file: Path) -> str:
    with pytest.raises(ImageError) as caught:
        import_archive(catalogue, "mine", file)
    assert catalogue.list() == ()
    assert [path for path in catalogue.root.rglob("*") if path.is_file()] == []
    message = str(caught.value)
    assert message.startswith(f"{file}: ")
    return message.removeprefix(f"{file}: ")


@pytest.mark.parametrize("compression", COMPRESS)
def test_an_image_is_registered_for_containers_alone(catalogue: ImageCatalogue, file: Path, compression: str) -> None:
    write_archive(file, [DESKTOP_LAYER], compression=compression)
    image = import_archive(catalogue, "mine", file, screen_px=(1024, 768), provides=["blender"])
    assert (image.screen_width_px, image.provides, image.firmware) == (1024, ("blender",), "none")
    assert catalogue.get("mine") == image
    disk = catalogue.disk_image("mine")
    assert (disk.firmware, disk.disk_format, disk.has_guestd) == (Firmware.NONE, "tar", True)
    assert obstacle(disk) == ""
    assert import_archive(catalogue, "mine", file) == image, "the same archive is the same image"


async def test_qemu_refuses_it_by_name(catalogue: ImageCatalogue, file: Path, tmp_path: Path) -> None:
    import_archive(catalogue, "mine", write_archive(file, [DESKTOP_LAYER]))
    with pytest.raises(ConfigError, match=r"image mine: .* no kernel; serve it with --hypervisor oci:"):
        await QEMU.open(Config(state_dir=tmp_path), [catalogue.disk_image("mine")])


def test_another_guestd_is_refused_later_too(
    catalogue: ImageCatalogue, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_archive(catalogue, "mine", write_archive(file, [DESKTOP_LAYER]))
    monkeypatch.setattr("envd.images.catalogue.GUESTD_VERSION", "3")
    with pytest.raises(ImageError, match="make it with `envd image files`, and import it"):
        catalogue.disk_image("mine")


def test_a_layer_replaces_and_hides_what_is_below_it(catalogue: ImageCatalogue, file: Path) -> None:
    lower = (
        Entry(path="opt/kept", content=b"old"),
        Entry(path="opt/gone", content=b"x"),
        directory("opt/tree"),
        Entry(path="opt/tree/below", content=b"x"),
        Entry(path="opt/list/a", content=b"x"),
        Entry(path="opt/was-a-directory/file", content=b"x"),
    )
    upper = (
        Entry(path="opt/list/b", content=b"new"),
        Entry(path="opt/list/.wh..wh..opq"),
        Entry(path="opt/.wh.gone"),
        Entry(path="opt/.wh.tree"),
        Entry(path="opt/tree/above", content=b"new"),
        Entry(path="opt/kept", content=b"new", mode=0o600, uid=1000),
        Entry(path="opt/was-a-directory", content=b"file"),
        directory("opt/", mode=0o700),
    )
    found = merged(catalogue, file, lower, upper)
    assert sorted(path for path in found if path.startswith("opt/")) == [
        "opt/kept", "opt/list", "opt/list/b", "opt/tree", "opt/tree/above", "opt/was-a-directory",
    ]  # fmt: skip
    assert content(found, "opt/kept") == "new"
    assert (found["opt/kept"].mode, found["opt/kept"].uid) == (0o600, 1000)
    assert found["opt"].mode == 0o700
    assert content(found, "opt/was-a-directory") == "file"


def test_a_hard_link_keeps_its_file_when_a_layer_hides_the_first_name(catalogue: ImageCatalogue, file: Path) -> None:
    lower = (Entry(path="a", content=b"same"), Entry(path="b", kind=tarfile.LNKTYPE, link="a"))
    upper = (Entry(path=".wh.a"), Entry(path="c", kind=tarfile.LNKTYPE, link="b"))
    found = merged(catalogue, file, lower, upper)
    assert "a" not in found
    assert (content(found, "b"), found["c"].type, found["c"].linkname) == ("same", tarfile.LNKTYPE, "b")


def test_files_below_a_link_are_where_the_link_leads(catalogue: ImageCatalogue, file: Path) -> None:
    lower = (link("etc/alias", "/opt"), link("up", "../../../etc"), directory("opt"))
    upper = (
        Entry(path="etc/alias/a", content=b"1"),
        Entry(path="up/b", content=b"2"),
        Entry(path="bin/c", content=b"3"),
    )
    found = merged(catalogue, file, lower, upper)
    assert [content(found, path) for path in ("opt/a", "etc/b", "usr/bin/c")] == ["1", "2", "3"]
    links = {path for path, member in found.items() if member.issym()}
    assert not [path for path in found if any(path.startswith(f"{each}/") for each in links)]


def test_every_directory_precedes_its_files_and_devices_are_left_out(catalogue: ImageCatalogue, file: Path) -> None:
    found = merged(catalogue, file, (Entry(path="z/y/x/file"),), (directory("z/y", mode=0o711),))
    seen: set[str] = {""}
    for path in found:
        assert path.rpartition("/")[0] in seen
        seen.add(path)
    assert found["z/y"].mode == 0o711
    found = merged(catalogue, file, (directory("dev"), Entry(path="dev/null", kind=tarfile.CHRTYPE)))
    assert "dev" in found
    assert "dev/null" not in found


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([Entry(path="../etc/shadow")], "../etc/shadow: leaves the root of the image"),
        ([Entry(path="/etc/shadow")], "/etc/shadow: leaves the root of the image"),
        ([Entry(path="opt/sda", kind=tarfile.BLKTYPE)], "opt/sda: a device node, which containers cannot have"),
        ([Entry(path="a", kind=tarfile.LNKTYPE, link="../../etc/shadow")], "../../etc/shadow: leaves the root"),
        ([Entry(path="a", kind=tarfile.LNKTYPE, link="nowhere")], "a: a link to nowhere, which is not a file"),
        ([Entry(path="a", kind=tarfile.LNKTYPE, link="usr/bin")], "a: a link to usr/bin, which is not a file"),
        ([link("a", "/nowhere"), Entry(path="a/file")], "a: a link that leads nowhere, but files"),
        ([link("a", "b"), link("b", "a"), Entry(path="a/file")], "a: a link that leads nowhere, but files"),
        ([Entry(path="etc/passwd/file")], "etc/passwd: not a directory, but files of a layer are below it"),
        ([Entry(path="file", uid=70000)], "file: belongs to 70000:0, but containers have ids below 65536"),
        ([Entry(path="x" * 300)], "longer than a path can be"),
        ([Entry(path="file", kind=b"Z")], "file: an entry of the unknown type b'Z'"),
    ],
)
def test_files_unfit_for_containers_are_refused(
    catalogue: ImageCatalogue, file: Path, entries: Sequence[Entry], problem: str
) -> None:
    write_archive(file, [DESKTOP_LAYER, entries])
    assert problem in refused(catalogue, file)


@pytest.mark.parametrize(
    ("left_out", "problem"),
    [
        ("usr/lib/envd/session", "no session (/usr/lib/envd/session: copy the files of `envd image files`)"),
        ("usr/lib/envd/guestd/__init__.py", "no guestd (/usr/lib/envd/guestd/__init__.py: copy the files"),
        ("usr/bin/Xtigervnc", "no X server (/usr/bin/Xtigervnc: install tigervnc-standalone-server)"),
        ("usr/sbin/qemu-ga", "no guest agent (/usr/sbin/qemu-ga: install qemu-guest-agent)"),
        ("usr/bin/tint2", "no window manager or panel (/usr/bin/tint2: install"),
        ("usr/bin/dbus-daemon", "no message bus"),
        ("usr/bin/python3", "no Python"),
        ("usr/bin/setpriv", "no setpriv or shell"),
        ("home/user", "no home directory of the user"),
        ("etc/passwd", "no user `user` with id 1000"),
    ],
)
def test_a_missing_part_is_named(catalogue: ImageCatalogue, file: Path, left_out: str, problem: str) -> None:
    write_archive(file, [[entry for path, entry in DESKTOP.items() if path != left_out]])
    message = refused(catalogue, file)
    assert message.startswith("not a desktop: ")
    assert problem in message
    assert message.count(": ") < 5, "nothing else is missing"


def test_all_missing_parts_are_named_at_once(catalogue: ImageCatalogue, file: Path) -> None:
    write_archive(file, [[Entry(path="etc/hostname")]])
    message = refused(catalogue, file)
    assert all(part in message for part in ("no session", "no X server", "no guestd", "docs/images.md"))


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("usr/lib/envd/guestd/__init__.py", b'VERSION = "1"', "guestd of another version of envd (1, not "),
        ("usr/lib/envd/guestd/__init__.py", b"", "guestd of another version of envd (unknown, not "),
        ("etc/passwd", b"user:x:1001:1001::/home/user:/bin/sh\n", "no user `user` with id 1000"),
    ],
)
def test_a_wrong_guestd_or_user_is_refused(
    catalogue: ImageCatalogue, file: Path, path: str, text: bytes, problem: str
) -> None:
    write_archive(file, [DESKTOP_LAYER, [Entry(path=path, content=text)]])
    assert problem in refused(catalogue, file)


def test_another_processor_is_refused(catalogue: ImageCatalogue, file: Path) -> None:
    write_archive(file, [DESKTOP_LAYER], architecture="arm64")
    assert refused(catalogue, file) == "for linux/arm64, but this host is linux/amd64; build it for that"


def test_several_platforms_are_refused_and_attestations_do_not_count(catalogue: ImageCatalogue, file: Path) -> None:
    writer = ArchiveWriter()
    writer.add_image([DESKTOP_LAYER])
    writer.manifests.append({**writer.manifests[0], "platform": {"os": "unknown", "architecture": "unknown"}})
    assert import_archive(catalogue, "attested", writer.write(file)).name == "attested"
    catalogue.remove("attested")
    writer.add_image([DESKTOP_LAYER], architecture="arm64")
    writer.write(file)
    assert refused(catalogue, file) == (
        "2 images (linux/amd64, linux/arm64); write an archive with the one for linux/amd64"
    )


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_damaged_layer_is_refused(catalogue: ImageCatalogue, file: Path, compression: str) -> None:
    writer = ArchiveWriter()
    writer.add_image([DESKTOP_LAYER, [Entry(path="opt/data", content=os.urandom(1 << 16))]], compression=compression)
    digest = max(writer.blobs, key=lambda each: len(writer.blobs[each]))
    damaged = bytearray(writer.blobs[digest])
    damaged[len(damaged) // 2] ^= 1
    writer.blobs[digest] = bytes(damaged)
    writer.write(file)
    assert refused(catalogue, file).startswith("layer 2 is damaged: ")


def test_a_layer_that_is_cut_off_is_refused(catalogue: ImageCatalogue, file: Path) -> None:
    writer = ArchiveWriter()
    writer.add_image([DESKTOP_LAYER])
    digest = max(writer.blobs, key=lambda each: len(writer.blobs[each]))
    writer.blobs[digest] = writer.blobs[digest][:-100]
    writer.write(file)
    assert refused(catalogue, file).startswith("layer 1 is damaged: ")


def test_a_missing_or_changed_document_is_refused(catalogue: ImageCatalogue, file: Path) -> None:
    writer = ArchiveWriter()
    writer.add_image([DESKTOP_LAYER])
    manifest = writer.manifests[0]["digest"].removeprefix("sha256:")
    whole = writer.blobs[manifest]
    writer.blobs[manifest] = whole + b" "
    writer.write(file)
    assert refused(catalogue, file).startswith(f"damaged: blob {manifest[:12]} does not have its digest")
    del writer.blobs[manifest]
    writer.write(file)
    assert refused(catalogue, file).startswith(f"incomplete: blobs/sha256/{manifest} is missing")


@pytest.mark.parametrize("data", [b"", b"not an archive", b"[]" * 1000])
def test_another_file_is_refused(catalogue: ImageCatalogue, file: Path, data: bytes) -> None:
    file.write_bytes(data)
    assert "oci-archive" in refused(catalogue, file)


def test_a_file_that_is_not_such_an_archive_is_refused_with_the_remedy(catalogue: ImageCatalogue, file: Path) -> None:
    assert refused(catalogue, file).startswith("not a file; name the archive")
    with tarfile.open(file, "w") as tar:
        info = tarfile.TarInfo("manifest.json")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"[]"))
    message = refused(catalogue, file)
    assert message.startswith("in the format of docker save; write it by `podman save --format oci-archive`")


@pytest.mark.parametrize(
    ("sizes_kib", "problem"), [([1024], "the disk is full; free some space"), ([400, 400], "its files have 0 MiB, but")]
)
def test_files_that_do_not_fit_are_refused_before_they_are_written(
    catalogue: ImageCatalogue, file: Path, monkeypatch: pytest.MonkeyPatch, sizes_kib: list[int], problem: str
) -> None:
    layers = [[Entry(path=f"zeros{index}", content=bytes(kib << 10))] for index, kib in enumerate(sizes_kib)]
    write_archive(file, [DESKTOP_LAYER, *layers])
    free = type("Usage", (), {"free": 512 << 10})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert refused(catalogue, file).startswith(problem)


def test_a_full_disk_leaves_nothing(catalogue: ImageCatalogue, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_archive(file, [DESKTOP_LAYER])
    monkeypatch.setattr("envd.images.layers.FileTree.write", fill)
    assert refused(catalogue, file).startswith("the disk is full; free some space")


def test_an_unusable_name_is_refused(catalogue: ImageCatalogue, file: Path) -> None:
    with pytest.raises(ImageError, match="image name"):
        import_archive(catalogue, "Not A Name", write_archive(file, [DESKTOP_LAYER]))


def test_installed_packages_are_listed(catalogue: ImageCatalogue, file: Path) -> None:
    status = (
        b"Package: a\nStatus: install ok installed\nVersion: 1-2\n\nPackage: b\nStatus: deinstall ok config-files\n"
    )
    image: Image = import_archive(
        catalogue, "mine", write_archive(file, [DESKTOP_LAYER, [Entry(path="var/lib/dpkg/status", content=status)]])
    )
    assert catalogue.packages(image) == frozenset({"a"})
