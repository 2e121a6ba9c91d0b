"""The checks of `envd doctor` for images, and for what they need of a host."""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from envd.base.checks import Status
from envd.base.config import Config
from envd.base.config_sources import load
from envd.hypervisor.machine import Firmware, GuestOs, Hardware
from envd.hypervisor.oci import images as oci_images
from envd.hypervisor.oci.ids import own_ids
from envd.hypervisor.oci.images import unpacked_directory
from envd.hypervisor.qemu.user import Account, QemuUser
from envd.images import checks
from envd.images.catalogue import Image, ImageCatalogue, ImportedDisk


def config_with(tmp_path: Path, **flags: object) -> Config:
    return load(flags={"state_dir": tmp_path / "state", "cache_dir": tmp_path / "cache", **flags})


@pytest.mark.parametrize(("user_id", "sudo"), [(0, ""), (1000, "sudo ")])
def test_a_build_names_its_program_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_id: int, sudo: str
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user_id)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    build = checks.check_images(config_with(tmp_path), now=datetime.now(UTC)).fix
    assert build == f"`{sudo}{sys.prefix}/bin/envd image build desktop`"


def test_a_pool_without_its_image_fails_unless_the_hypervisor_is_fake(tmp_path: Path) -> None:
    pools = {"pools": {"desktop": {"size": 1}}}
    assert checks.check_images(config_with(tmp_path), now=datetime.now(UTC)).status is Status.WARN
    assert "desktop" in checks.check_images(config_with(tmp_path, **pools), now=datetime.now(UTC)).detail
    assert checks.check_images(config_with(tmp_path, **pools), now=datetime.now(UTC)).status is Status.FAIL
    fake = config_with(tmp_path, **pools, **{"hypervisor.uri": "fake"})
    assert checks.check_images(fake, now=datetime.now(UTC)).status is Status.WARN


@pytest.mark.parametrize(
    ("now", "status", "detail"),
    [
        (datetime(2026, 3, 10, tzinfo=UTC), Status.OK, "win11"),
        (datetime(2026, 3, 20, tzinfo=UTC), Status.WARN, "of Windows in image win11 ends in 12 days (2026-04-01)"),
        (datetime(2026, 4, 2, tzinfo=UTC), Status.WARN, "image win11 has ended (2026-04-01)"),
    ],
)
def test_an_evaluation_is_reported_before_it_ends(tmp_path: Path, now: datetime, status: Status, detail: str) -> None:
    config = config_with(tmp_path)
    catalogue = ImageCatalogue(config.cache_dir)
    for name, expires in (("win11", "2026-04-01T12:00:00+00:00"), ("desktop", "")):
        with catalogue.staging(name) as directory:
            (directory / "disk.qcow2").touch()
            image = Image(name=name, digest="0" * 64, disk="disk.qcow2", disk_sha256="", expires=expires)
            catalogue.publish(directory, image)
    check = checks.check_images(config, now=now)
    assert check.status is status
    assert detail in check.detail
    assert ("--rebuild" in check.fix) is (status is Status.WARN)


def test_missing_firmware_and_swtpm_fail_only_if_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_with(tmp_path)
    assert checks.check_firmware(config).status is checks.check_tpm(config).status is Status.OK
    monkeypatch.setattr(checks, "find_firmware", lambda: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert checks.check_firmware(config).status is checks.check_tpm(config).status is Status.WARN
    disk = tmp_path / "disk.qcow2"
    disk.write_bytes(b"QFI\xfb")
    ImageCatalogue(config.cache_dir).import_file(
        "win11", ImportedDisk(file=disk, os_family=GuestOs.WINDOWS, firmware=Firmware.UEFI, hardware=Hardware.WINDOWS)
    )
    firmware, tpm = checks.check_firmware(config), checks.check_tpm(config)
    assert (firmware.status, firmware.detail) == (Status.FAIL, "no OVMF, but images boot by UEFI: win11")
    assert (tpm.status, tpm.detail) == (Status.FAIL, "not found; the machines of win11 have a TPM")
    assert "apt-get install ovmf" in firmware.fix
    assert "apt-get install swtpm" in tpm.fix
    other = config_with(tmp_path, pools={"desktop": {"size": 1}})
    assert checks.check_tpm(other).status is Status.WARN


def test_the_fix_for_a_closed_kvm_device_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = QemuUser(account=None, why="libvirt-qemu cannot read and write /dev/kvm")
    monkeypatch.setattr(checks, "choose_user_for", lambda wanted, directories, images: chosen)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert checks.check_qemu_user(config_with(tmp_path)).fix == "chgrp kvm /dev/kvm; chmod 660 /dev/kvm"


@pytest.mark.parametrize(
    ("chosen", "status", "detail"),
    [
        (
            QemuUser(account=None, why="qemu cannot get through /root"),
            Status.WARN,
            "root: qemu cannot get through /root",
        ),
        (
            QemuUser(account=Account(name="qemu", user_id=7, group_id=7, group_ids=frozenset()), why="it can"),
            Status.OK,
            "QEMU runs as qemu: it can",
        ),
    ],
)
def test_the_user_of_qemu_is_shown_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: QemuUser, status: Status, detail: str
) -> None:
    monkeypatch.setattr(checks, "choose_user_for", lambda wanted, directories, images: chosen)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    check = checks.check_qemu_user(config_with(tmp_path))
    assert check.status is status
    assert detail in check.detail
    assert bool(check.fix) == (status is Status.WARN)


def test_a_user_that_cannot_run_qemu_fails_with_its_name(tmp_path: Path) -> None:
    check = checks.check_qemu_user(config_with(tmp_path, **{"hypervisor.qemu_user": "no-such-user"}))
    assert check.status is Status.FAIL
    assert "no-such-user" in check.detail
    assert checks.check_qemu_user(config_with(tmp_path, **{"hypervisor.uri": "fake"})).status is Status.OK


class TestUnpacking:
    """The check of what containers need."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> Config:
        return config_with(tmp_path, **{"hypervisor.uri": "oci:"})

    @staticmethod
    def publish(config: Config, packages: str = "tigervnc-standalone-server 1.12\n", **more: object) -> Path:
        """Publish a desktop; return its directory."""
        catalogue = ImageCatalogue(config.cache_dir)
        with catalogue.staging("desktop") as directory:
            (directory / "disk.qcow2").write_bytes(b"disk")
            (directory / "packages.txt").write_text(packages)
            image = Image(name="desktop", digest="0" * 64, disk="disk.qcow2", disk_sha256="", **more)  # type: ignore[arg-type]
            catalogue.publish(directory, image)
        return config.cache_dir / "images/desktop" / ("0" * 16)

    def test_a_host_without_containers_needs_nothing(self, tmp_path: Path) -> None:
        check = checks.check_unpacking(config_with(tmp_path))
        assert (check.status, check.detail) == (Status.OK, "only containers need it")

    def test_a_missing_image_is_the_finding_of_another_check(self, config: Config) -> None:
        assert checks.check_unpacking(config).status is Status.OK

    def test_an_image_is_unpacked_or_can_be(self, config: Config) -> None:
        directory = self.publish(config)
        assert checks.check_unpacking(config).detail == "desktop: can be unpacked"
        unpacked_directory(ImageCatalogue(config.cache_dir).disk_image("desktop"), own_ids()).mkdir()
        assert checks.check_unpacking(config).detail == "desktop: unpacked"
        assert directory.is_dir()

    def test_an_image_without_its_x_server_fails_with_the_remedy(self, config: Config) -> None:
        self.publish(config, packages="xterm 1\n")
        check = checks.check_unpacking(config)
        assert check.status is Status.FAIL
        assert "has no tigervnc-standalone-server" in check.detail
        assert "run `envd image build desktop`" in check.detail

    def test_a_missing_debugfs_fails_with_its_package(self, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
        self.publish(config)
        monkeypatch.setattr("shutil.which", lambda *_, **__: None)
        check = checks.check_unpacking(config)
        assert check.status is Status.FAIL
        assert check.detail.endswith("unpacking an image needs debugfs; install the package e2fsprogs")

    def test_an_image_of_root_in_a_users_cache_has_a_remedy(
        self, config: Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = self.publish(config)
        monkeypatch.setattr(os, "access", lambda *_: False)
        monkeypatch.setattr(oci_images, "name_of", lambda uid: "root" if uid == os.getuid() else str(uid))
        check = checks.check_unpacking(config)
        assert check.status is Status.FAIL
        assert f"{directory} belongs to root" in check.detail
        assert f"run `sudo chown root {directory}`, or build or import it with a --cache-dir" in check.detail
