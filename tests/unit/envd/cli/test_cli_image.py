"""`envd image` against a catalogue in a temporary directory."""

import errno
import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from envd.cli.image import app
from envd.images.catalogue import ImageCatalogue
from tests.support.container_archive import DESKTOP, write_archive


class Images:
    """Runs `envd image` with its own cache."""

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir

    def run(self, *args: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, [*args, "--cache-dir", str(self.cache_dir)])
        assert result.exit_code == status, result.output
        return result.stdout if status == 0 else result.stderr

    def run_json(self, *args: str) -> Any:
        return json.loads(self.run(*args, "--json"))


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(tmp_path / "cache")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    file = tmp_path / "Windows 11.qcow2"
    file.write_bytes(b"QFI\xfb disk")
    return file


def test_an_imported_disk_is_listed_shown_and_removed_and_its_file_is_kept(images: Images, disk: Path) -> None:
    imported = images.run_json("import", str(disk), "--os", "windows", "--firmware", "uefi", "--screen", "1920x1080")
    assert (imported["name"], imported["os"], imported["firmware"]) == ("windows-11", "windows", "uefi")
    assert imported["hardware"] == "pc"
    assert (imported["screen_width_px"], imported["screen_height_px"]) == (1920, 1080)
    assert images.run_json("list") == {"images": [{**imported, "current": True}]}
    assert images.run_json("show", "windows-11") == imported
    assert imported["digest"] in images.run("show", "windows-11")
    assert "windows-11" in images.run("list")
    assert images.run("rm", "windows-11").startswith("removed image windows-11 (")
    assert images.run("rm", "windows-11", status=1).endswith("(available: none); `envd image list` lists all\n")
    assert images.run_json("list") == {"images": []}
    assert disk.exists()


def test_an_archive_of_a_container_image_is_imported(images: Images, tmp_path: Path) -> None:
    file = write_archive(tmp_path / "My desktop.tar", [tuple(DESKTOP.values())])
    imported = images.run_json("import", "--oci", str(file), "--screen", "1024x768", "--provides", "blender")
    assert (imported["name"], imported["firmware"], imported["provides"]) == ("my-desktop", "none", ["blender"])
    assert images.run_json("show", "my-desktop") == imported
    assert "takes --name, --screen and --provides" in images.run("import", "--oci", str(file), "--copy", status=2)
    file.write_bytes(b"something else")
    assert images.run("import", "--oci", str(file), status=1).startswith(f"error: {file}: not an archive")


def test_the_files_of_a_container_image_are_written(images: Images, tmp_path: Path) -> None:
    directory = tmp_path / "context"
    assert CliRunner().invoke(app, ["files", str(directory)]).exit_code == 0
    assert "COPY desktop/ /" in (directory / "Containerfile").read_text()
    desktop = directory / "desktop"
    assert os.access(desktop / "usr/lib/envd/session", os.X_OK)
    assert (desktop / "usr/lib/envd/guestd/__init__.py").exists()
    packages = (desktop / "usr/lib/envd/packages.txt").read_text().split()
    assert {"tigervnc-standalone-server", "qemu-guest-agent", "tint2"} <= set(packages)
    assert not {"systemd-sysv", "xserver-xorg-core"} & set(packages)
    again = CliRunner().invoke(app, ["files", str(directory)])
    assert (again.exit_code, again.stderr) == (2, f"error: {directory}: File exists; choose a new directory\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/cache"),
            "/cache: permission denied; run as the owner, or choose another --cache-dir or --state-dir",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/cache"), "/cache: no such file or directory"),
    ],
)
def test_an_unusable_directory_is_a_one_line_error(
    images: Images, monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    def refuse(_: ImageCatalogue) -> None:
        raise error

    monkeypatch.setattr(ImageCatalogue, "list", refuse)
    assert images.run("list", status=1) == f"error: {message}\n"


def test_the_list_shows_a_missing_disk(images: Images, disk: Path) -> None:
    images.run("import", str(disk))
    assert "missing" not in images.run("list")
    disk.unlink()
    assert " is missing" in " ".join(images.run("list").split())


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_a_listed_name_selects_its_image(
    images: Images, disk: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    old = images.run_json("import", str(disk))["digest"]
    disk.write_bytes(b"QFI\xfb other disk")
    new = images.run_json("import", str(disk))["digest"]
    lines = images.run("list").splitlines()
    names = [line.split()[0] for line in lines if line.startswith("windows-11")]
    assert names == ["windows-11", f"windows-11@{old[:8]}"]
    assert [images.run_json("show", name)["digest"] for name in names] == [new, old]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--screen", "wide"], "--screen wide: not a size; write WIDTHxHEIGHT"),
        (["--format", "vmdk"], "--format vmdk: unknown format; use qcow2 or raw"),
    ],
)
def test_a_wrong_flag_of_an_import_is_refused(images: Images, disk: Path, flags: list[str], problem: str) -> None:
    assert problem in images.run("import", str(disk), *flags, status=2)


def test_a_secret_is_refused_instead_of_its_source(images: Images, disk: Path) -> None:
    message = images.run("import", str(disk), "--credentials", "hunter2", status=1)
    assert "credentials must be env:NAME or file:PATH" in message
    assert "hunter2" not in message


def test_an_unknown_recipe_distribution_or_option_is_refused(images: Images) -> None:
    assert "No such command 'desktob'. Did you mean 'desktop'?" in images.run("build", "desktob", status=2)
    assert "distribution 'arch': unknown" in images.run("build", "desktop", "--distribution", "arch", status=2)
    assert "No such option: --distribution" in images.run("build", "osworld", "--distribution", "ubuntu", status=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_under_sudo_images_are_the_invoking_users(images: Images, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = pwd.struct_passwd(("ada", "x", 1234, 1234, "", "/home/ada", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwnam", {"ada": user}.__getitem__)
    monkeypatch.setenv("SUDO_USER", "ada")
    images.run("import", str(disk))
    assert images.cache_dir.stat().st_uid == 0, "a directory that is named explicitly keeps its owner"
    monkeypatch.setattr("envd.cli.image_output.default_cache_dir", lambda: images.cache_dir)
    images.run("import", str(disk), "--name", "other", "--copy")
    owners = {path.lstat().st_uid for path in (images.cache_dir, *images.cache_dir.rglob("*"))}
    assert owners == {1234}
    assert disk.stat().st_uid == 0


@pytest.mark.parametrize(
    ("options", "status", "problem"),
    [
        (["--packages", "gedit"], 2, "--name: missing"),
        (["--name", "wine"], 2, "the name of a recipe of envd"),
        (["--name", "My Image"], 2, "is not 1 to 63 of"),
        (["--name", "mine", "--packages", "a b"], 1, "not a package name"),
        (["--name", "mine", "--files", "/nonexistent"], 1, "not a directory"),
        (["--name", "mine", "--run", "/nonexistent"], 1, "/nonexistent: cannot be read"),
    ],
)
def test_additions_that_cannot_be_built_are_refused(
    images: Images, options: list[str], status: int, problem: str
) -> None:
    for recipe in ("desktop", "office"):
        assert problem in images.run("build", recipe, *options, status=status)
    assert images.run_json("list") == {"images": []}
