"""Copied qcow2 overlays, verified with qemu-img."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from envd.base.errors import HypervisorError
from envd.hypervisor.qemu.snapshots.files import copy_file, copy_overlay, create_overlay, set_backing_file


def qemu_img(*arguments: str) -> str:
    return subprocess.run(["qemu-img", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", str(path), "64M")
    return path


@pytest.mark.parametrize("name", ["b", "another-base-with-a-name-that-is-a-good-deal-longer.qcow2"])
def test_a_copied_overlay_gets_the_given_backing_file(tmp_path: Path, base: Path, name: str) -> None:
    overlay, seed, other = tmp_path / "overlay.qcow2", tmp_path / "seed.qcow2", tmp_path / name
    create_overlay(seed, base, "qcow2")
    copy_file(base, other)
    copy_overlay(seed, overlay, other)
    info = json.loads(qemu_img("info", "--output=json", str(overlay)))
    assert (info["backing-filename"], info["backing-filename-format"]) == (str(other), "qcow2")
    assert info["virtual-size"] == 64 << 20
    qemu_img("check", "-q", str(overlay))
    assert json.loads(qemu_img("info", "--output=json", str(seed)))["backing-filename"] == str(base)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSPC])
def test_copying_to_another_file_system_keeps_holes_and_a_full_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: int) -> int:
        raise OSError(number, os.strerror(number))

    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.write(bytes(range(256)) * 9000)
        file.seek(64 << 20)
        file.write(b"end")
    monkeypatch.setattr(os, "copy_file_range", fail)
    if number == errno.ENOSPC:
        with pytest.raises(OSError, match="No space left"):
            copy_file(source, target)
        return
    copy_file(source, target)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks * 512 < 8 << 20


def test_a_file_that_is_not_an_overlay_is_unchanged(tmp_path: Path, base: Path) -> None:
    raw = tmp_path / "raw"
    raw.write_bytes(b"not a disk, but long enough for a qcow2 header")
    with pytest.raises(HypervisorError, match="not a qcow2 file"):
        set_backing_file(raw, base)
    before = base.read_bytes()
    with pytest.raises(HypervisorError, match="no space for the name"):
        set_backing_file(base, raw)  # It has no backing file.
    assert base.read_bytes() == before


def test_an_overlay_on_a_missing_file_or_with_too_long_a_path_is_an_error(tmp_path: Path, base: Path) -> None:
    seed = tmp_path / "seed.qcow2"
    create_overlay(seed, base, "qcow2")
    with pytest.raises(HypervisorError, match="no space for the name"):
        set_backing_file(seed, Path("/" + "d" * 1100))
    with pytest.raises(HypervisorError, match=r"gone\.qcow2"):
        create_overlay(tmp_path / "overlay.qcow2", tmp_path / "gone.qcow2", "qcow2")


def test_a_copy_has_the_same_content_and_keeps_the_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        file.truncate(32 << 20)
        for at in (0, 5 << 20, (32 << 20) - 4096):
            os.pwrite(file.fileno(), os.urandom(4096), at)
    copy_file(source, target)
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks * 512 < 1 << 20
    with pytest.raises(FileExistsError):
        copy_file(source, target)


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    secret, link = tmp_path / "secret", tmp_path / "disk.qcow2"
    secret.write_text("root's")
    link.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic link"):
        copy_file(link, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
