"""Images on disk: published atomically, found by name, removed completely."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envd.base.errors import ImageError, ImageNotFound
from envd.guests.guestd import VERSION
from envd.hypervisor.machine import ExtraDrive, Firmware, GuestOs, Hardware
from envd.images.build import build_image
from envd.images.catalogue import Image, ImageCatalogue, ImportedDisk
from envd.images.recipe import desktop_recipe, overlay_files, recipe_digest

DISK = b"QFI\xfb" + bytes(100)


@pytest.fixture
def catalogue(tmp_path: Path) -> ImageCatalogue:
    return ImageCatalogue(tmp_path / "cache")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a disk to import."""
    file = tmp_path / "win.qcow2"
    file.write_bytes(DISK)
    return file


def publish(catalogue: ImageCatalogue, digest: str, *, disk: bytes = DISK) -> Image:
    with catalogue.staging("desktop") as directory:
        (directory / "disk.qcow2").write_bytes(disk)
        image = Image(name="desktop", digest=digest, disk="disk.qcow2", disk_sha256="0" * 64, firmware="bios")
        return catalogue.publish(directory, image)


def import_disk(
    catalogue: ImageCatalogue,
    file: Path,
    *,
    copy: bool = False,
    progress: Callable[[float], None] | None = None,
    **more: Any,
) -> Image:
    given = {"os_family": GuestOs.WINDOWS, "firmware": Firmware.UEFI, "screen_px": (1920, 1080), **more}
    return catalogue.import_file("win11", ImportedDisk(file=file, **given), copy=copy, progress=progress)


@pytest.mark.parametrize(("version", "is_usable"), [(VERSION, True), ("", False), ("1", False)])
def test_an_image_with_the_guestd_of_an_earlier_version_names_the_command_that_builds_it(
    catalogue: ImageCatalogue, version: str, is_usable: bool
) -> None:
    with catalogue.staging("desktop") as directory:
        (directory / "disk.qcow2").write_bytes(DISK)
        built = Image(
            name="desktop", digest="a" * 64, disk="disk.qcow2", disk_sha256="0" * 64, firmware="bios",
            guestd_version=version, source={"distribution": "debian"},
        )  # fmt: skip
        catalogue.publish(directory, built)
    if is_usable:
        assert catalogue.disk_image("desktop").has_guestd
    else:
        with pytest.raises(ImageError, match="run `envd image build desktop`"):
            catalogue.disk_image("desktop")


def test_a_published_image_is_found_by_name_and_by_digest(catalogue: ImageCatalogue) -> None:
    publish(catalogue, "a" * 64)
    assert catalogue.get("desktop").digest == catalogue.get("desktop@aaaa").digest == "a" * 64
    assert catalogue.find("desktop", "a" * 64) is not None
    assert catalogue.find("desktop", "b" * 64) is None
    assert catalogue.disk_image("desktop").disk.read_bytes() == DISK


def test_a_newer_image_becomes_current_and_the_older_one_stays(catalogue: ImageCatalogue) -> None:
    publish(catalogue, "a" * 64)
    publish(catalogue, "b" * 64)
    assert catalogue.get("desktop").digest == "b" * 64
    assert [image.digest[0] for image in catalogue.list()] == ["b", "a"]


def test_a_build_that_finds_its_image_makes_it_current_again(catalogue: ImageCatalogue) -> None:
    recipe = desktop_recipe()
    digest = recipe_digest(recipe, overlay_files(recipe))
    publish(catalogue, digest)
    publish(catalogue, "b" * 64)
    assert build_image(recipe, catalogue).digest == digest == catalogue.get("desktop").digest
    assert catalogue.find("desktop", "b" * 64) is not None


def test_a_failed_build_leaves_nothing(catalogue: ImageCatalogue) -> None:
    def fail() -> None:
        with catalogue.staging("desktop") as directory:
            (directory / "disk.qcow2").write_bytes(DISK)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(catalogue.root.iterdir()) == []
    assert catalogue.list() == ()


def test_the_next_build_removes_a_killed_builds_directory_and_keeps_a_running_ones(catalogue: ImageCatalogue) -> None:
    parent = catalogue.root / "desktop"
    (parent / ".building-999999999-x").mkdir(parents=True)
    (parent / f".building-{os.getpid()}-y").mkdir()
    publish(catalogue, "a" * 64)
    assert not (parent / ".building-999999999-x").exists()
    assert (parent / f".building-{os.getpid()}-y").exists()


def test_an_unknown_image_is_an_error_that_lists_the_known_ones_and_the_remedy(catalogue: ImageCatalogue) -> None:
    publish(catalogue, "a" * 64)
    with pytest.raises(ImageNotFound, match=r"'win11': .*available: desktop"):
        catalogue.get("win11")


def test_a_digest_is_removed_by_its_prefix_and_all_by_their_name(catalogue: ImageCatalogue) -> None:
    for digest in ("ab", "ac"):
        publish(catalogue, digest + "0" * 62)
    with pytest.raises(ImageNotFound, match="2 digests begin so"):
        catalogue.remove("desktop@a")
    assert len(catalogue.list()) == 2
    catalogue.remove("desktop@ac")
    assert [image.digest[:2] for image in catalogue.list()] == ["ab"]
    with pytest.raises(ImageNotFound):
        catalogue.get("desktop")
    publish(catalogue, "b" * 64)
    catalogue.remove("desktop")
    assert catalogue.list() == ()


def test_an_imported_disk_is_registered_in_place(catalogue: ImageCatalogue, file: Path) -> None:
    fractions: list[float] = []
    image = import_disk(catalogue, file, credentials="env:WIN_PASSWORD", progress=fractions.append)
    assert image.digest == hashlib.sha256(DISK).hexdigest()
    assert (image.os, image.firmware, image.screen_width_px) == ("windows", "uefi", 1920)
    assert catalogue.disk_image("win11").disk == file
    assert fractions[-1] == 1.0
    catalogue.remove("win11")
    assert file.exists()


def test_an_imported_disk_has_the_hardware_and_features_of_its_system(catalogue: ImageCatalogue, file: Path) -> None:
    import_disk(catalogue, file)
    assert catalogue.disk_image("win11").hardware is Hardware.PC
    import_disk(catalogue, file, os_family=GuestOs.LINUX)
    assert catalogue.disk_image("win11").hardware is Hardware.VIRTIO
    import_disk(catalogue, file, hardware=Hardware.VIRTIO)
    image = catalogue.disk_image("win11")
    assert (image.os, image.hardware, image.runs_linux) == (GuestOs.WINDOWS, Hardware.VIRTIO, False)
    assert import_disk(catalogue, file).provides == ("powershell",)
    assert import_disk(catalogue, file, provides=()).provides == ()
    assert import_disk(catalogue, file, os_family=GuestOs.LINUX, provides=["office"]).provides == ("office",)
    assert catalogue.get("win11").provides == ("office",)
    assert catalogue.disk_image("win11").provides == {"office"}


@pytest.mark.parametrize(
    ("system", "firmware", "provides", "hardware"),
    [
        ("linux", "bios", set(), Hardware.VIRTIO),
        ("windows", "bios", {"powershell"}, Hardware.PC),
        ("windows", "kernel", set(), Hardware.PC),
    ],
)
def test_a_manifest_without_features_or_hardware_has_those_of_its_system(
    catalogue: ImageCatalogue, system: str, firmware: str, provides: set[str], hardware: Hardware
) -> None:
    publish(catalogue, "a" * 64)
    manifest = catalogue.root / "desktop" / ("a" * 16) / "image.json"
    fields = json.loads(manifest.read_text())
    del fields["provides"], fields["hardware"]
    manifest.write_text(json.dumps(fields | {"os": system, "firmware": firmware}))
    image = catalogue.disk_image("desktop")
    assert set(image.provides) == provides
    assert image.hardware is hardware


def test_a_copied_import_survives_its_source(catalogue: ImageCatalogue, file: Path) -> None:
    import_disk(catalogue, file, copy=True)
    file.unlink()
    assert catalogue.disk_image("win11").disk.read_bytes() == DISK


def test_a_missing_disk_is_an_error_at_import_and_later(catalogue: ImageCatalogue, file: Path, tmp_path: Path) -> None:
    import_disk(catalogue, file)
    file.unlink()
    with pytest.raises(ImageError, match=rf"{file} does not exist"):
        catalogue.disk_image("win11")
    with pytest.raises(ImageError, match="No such file"):
        import_disk(catalogue, tmp_path / "none.qcow2")


@pytest.mark.parametrize("copy", [False, True])
def test_a_disk_of_another_size_than_published_is_damaged(catalogue: ImageCatalogue, file: Path, *, copy: bool) -> None:
    disk = catalogue.disk_of(import_disk(catalogue, file, copy=copy))
    assert catalogue.disk_image("win11").disk == disk
    disk.write_bytes(DISK[:-1])
    with pytest.raises(ImageError, match=f"{disk} is damaged: it has {len(DISK) - 1} bytes instead of {len(DISK)}; "):
        catalogue.disk_image("win11")


@pytest.mark.parametrize(
    ("name", "content", "named", "words"),
    [
        ("../esc", DISK, "qcow2", "is not 1 to 63 of a-z"),
        ("a=b c", DISK, "qcow2", "is not 1 to 63 of a-z"),
        ("ok", b"kind: file_text\n", "qcow2", "not a qcow2 disk; convert"),
        ("ok", bytes(510) + b"\x55\xaa", "qcow2", "choose the format raw"),
        ("ok", DISK, "raw", "choose the format qcow2"),
    ],
)
def test_a_wrong_name_or_format_is_refused_at_import(
    catalogue: ImageCatalogue, file: Path, *, name: str, content: bytes, named: str, words: str
) -> None:
    file.write_bytes(content)
    given = ImportedDisk(file=file, disk_format=named, os_family=GuestOs.LINUX, firmware=Firmware.BIOS)
    with pytest.raises(ImageError, match=words):
        catalogue.import_file(name, given)
    assert not list(catalogue.root.parent.glob("esc"))
    assert not catalogue.list()


def test_a_broken_manifest_is_an_image_error(catalogue: ImageCatalogue) -> None:
    publish(catalogue, "a" * 64)
    manifest = catalogue.root / "desktop" / ("a" * 16) / "image.json"
    manifest.write_text("{")
    with pytest.raises(ImageError, match="read"):
        catalogue.get("desktop")


def test_an_imported_image_keeps_its_variables_tpm_and_drives(catalogue: ImageCatalogue, tmp_path: Path) -> None:
    names = ("disk", "data", "iso", "vars", "tpm")
    disk, data, iso, variables, tpm = (tmp_path / name for name in names)
    for path in (disk, data, iso, variables, tpm):
        path.write_text(path.name)
    disk.write_bytes(DISK)
    drives = (ExtraDrive(path=data), ExtraDrive(path=iso, disk_format="raw", is_cdrom=True))
    plain = import_disk(catalogue, disk, hardware=Hardware.WINDOWS)
    image = import_disk(
        catalogue, disk, hardware=Hardware.WINDOWS, firmware_vars=variables, tpm_state=tpm, drives=drives
    )
    assert image.digest != plain.digest
    assert image.disk_sha256 == plain.disk_sha256
    assert catalogue.get("win11") == image
    found = catalogue.disk_image("win11")
    assert (found.disks, found.cdroms) == ((ExtraDrive(path=disk), drives[0]), drives[1:])
    # Small, and not the user's to keep: copied.
    variables.unlink()
    tpm.unlink()
    assert found.firmware_vars is not None
    assert found.tpm_state is not None
    assert (found.firmware_vars.read_text(), found.tpm_state.read_text()) == ("vars", "tpm")
    import_disk(catalogue, disk, drives=drives, copy=True)
    assert [drive.path.read_bytes() for drive in catalogue.disk_image("win11").disks] == [DISK, b"data"]
    data.write_text("changed")
    changed = import_disk(catalogue, disk, hardware=Hardware.WINDOWS, drives=drives)
    assert changed.digest not in {image.digest, plain.digest}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"firmware": Firmware.BIOS, "hardware": Hardware.WINDOWS}, "hardware windows boots by UEFI, not bios; choose"),
        ({"firmware": Firmware.BIOS, "firmware_vars": Path("v")}, "UEFI variables are for images that boot by UEFI"),
        ({"credentials": "hunter2"}, ".*secret"),
        ({"tpm_state": Path("t")}, "hardware pc has no TPM; choose hardware windows"),
        ({"drives": (ExtraDrive(path=Path("gone.iso")),)}, "gone.iso cannot be read"),
    ],
)
def test_contradictory_settings_literal_passwords_and_missing_drives_are_rejected(
    catalogue: ImageCatalogue, file: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ImageError, match=f"image win11: {problem}"):
        import_disk(catalogue, file, **options)
    assert catalogue.list() == ()
