"""The recipe of an image, its files, and the digest of both."""

import re
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from envd.base.errors import ImageError
from envd.hypervisor.machine import GuestOs
from envd.images import build
from envd.images.build import KERNEL_CMDLINE, _run, build_image
from envd.images.catalogue import ImageCatalogue
from envd.images.recipe import (
    PYTHON_PACKAGES,
    WINDOWS_PROGRAMS,
    WINDOWS_SOURCES,
    desktop_recipe,
    for_containers,
    osworld_recipe,
    overlay_files,
    recipe_digest,
    wine_recipe,
)


def test_the_overlay_has_the_desktop_and_any_change_of_it_another_digest() -> None:
    overlay = overlay_files(desktop_recipe())
    assert {"usr/lib/envd/guestd/__main__.py", "usr/lib/envd/guestd/routes/files.py"} <= set(overlay)
    assert overlay["usr/lib/envd/session"].startswith(b"#!/bin/sh")
    assert {"etc/xdg/openbox/rc.xml", "etc/xdg/openbox/menu.xml", "etc/xdg/tint2/tint2rc"} <= set(overlay)
    recipe, overlay = desktop_recipe(), overlay_files(desktop_recipe())
    digest = recipe_digest(recipe, overlay)
    assert digest == recipe_digest(desktop_recipe(), overlay_files(desktop_recipe()))
    assert digest != recipe_digest(replace(recipe, suite="trixie"), overlay)
    assert digest != recipe_digest(recipe, {**overlay, "usr/lib/envd/session": b"#!/bin/sh\n"})


def test_ubuntu_has_its_own_kernel_and_another_distribution_is_rejected() -> None:
    recipe = desktop_recipe(distribution="ubuntu", mirror="file:/srv/ubuntu")
    assert (recipe.name, recipe.suite, recipe.kernel_package) == ("desktop-ubuntu", "noble", "linux-image-generic")
    assert "universe" in recipe.components
    with pytest.raises(ValueError, match="debian or ubuntu"):
        desktop_recipe(distribution="arch")


def test_the_osworld_image_extends_the_desktop_image() -> None:
    recipe = osworld_recipe()
    desktop, overlay = overlay_files(desktop_recipe()), overlay_files(recipe)
    assert set(desktop_recipe().packages) < set(recipe.packages)
    assert {path: overlay[path] for path in desktop} == desktop
    assert b"PyAutoGUI==" in overlay[PYTHON_PACKAGES]
    assert overlay["usr/local/bin/google-chrome"].startswith(b"#!/bin/sh")
    assert PYTHON_PACKAGES not in desktop


def test_the_wine_image_has_its_agent_and_nothing_of_the_linux_desktop() -> None:
    recipe = wine_recipe()
    overlay = overlay_files(recipe)
    assert recipe.os is GuestOs.WINDOWS
    assert {"usr/lib/envd/wineagent/__main__.py", "usr/lib/envd/customize"} <= overlay.keys()
    assert not [path for path in overlay if "guestd" in path or path.startswith(("etc/xdg", "etc/skel"))]
    assert b"openbox" in overlay["usr/lib/envd/session"]
    assert recipe_digest(recipe, overlay) != recipe_digest(replace(recipe, os=GuestOs.LINUX), overlay)


def test_every_source_of_a_windows_program_is_compiled() -> None:
    overlay = overlay_files(wine_recipe())
    sources = {path.removeprefix(WINDOWS_SOURCES) for path in overlay if path.startswith(WINDOWS_SOURCES)}
    compiled = {name for names in WINDOWS_PROGRAMS.values() for name in names}
    assert compiled == {name for name in sources if name.endswith(".c")}


def test_every_python_package_of_a_guest_is_pinned_by_hash() -> None:
    lines = overlay_files(osworld_recipe())[PYTHON_PACKAGES].decode().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert packages
    assert [line for line in packages if not re.fullmatch(r"[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line)] == []


def test_the_error_of_a_failed_tool_has_the_end_of_its_output() -> None:
    lines: list[str] = []
    with pytest.raises(ImageError, match=r"status 3:\n(.|\n)*no space left"):
        _run(["sh", "-c", "echo starting; echo no space left; exit 3"], what="the tool", on_line=lines.append)
    assert lines == ["starting\n", "no space left\n"]


def test_the_kernel_starts_without_mitigations_that_slow_an_emulated_guest() -> None:
    assert "mitigations=off" in KERNEL_CMDLINE.split()


def test_the_recipe_for_containers_has_the_same_programs_and_nothing_to_boot_by() -> None:
    desktop, recipe = desktop_recipe(), for_containers(desktop_recipe())
    assert (recipe.name, recipe.kernel_package) == ("desktop", "")
    assert (
        {"tigervnc-standalone-server", "mousepad", "qemu-guest-agent"} <= set(recipe.packages) < set(desktop.packages)
    )
    assert not {"initramfs-tools", "systemd-sysv", "xserver-xorg-core"} & set(recipe.packages)
    files = overlay_files(recipe)
    assert {"usr/lib/envd/session", "usr/lib/envd/guestd/__main__.py", "usr/lib/envd/customize.sh"} <= set(files)
    assert not [path for path in files if path.startswith(("etc/systemd/", "etc/initramfs-tools/", "etc/fstab"))]
    assert recipe_digest(recipe, files) != recipe_digest(desktop, overlay_files(desktop))


@pytest.mark.parametrize(("user_id", "mode"), [(0, "root"), (1000, "unshare")])
def test_the_files_of_containers_are_built_as_an_archive_also_without_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_id: int, mode: str
) -> None:
    commands: list[list[str]] = []

    def bootstrap(command: list[str], **_: object) -> None:
        commands.append(command)
        Path(command[-1]).write_bytes(b"files")
        (hook,) = (each for each in command if "download /var/lib/dpkg/status" in each)
        status = "Package: tint2\nStatus: install ok installed\nVersion: 1\nArchitecture: all\n"
        Path(hook.split()[-1]).write_text(status)
        (copy,) = (each for each in command if each.startswith("--extract-hook=tar-in "))
        with tarfile.open(copy.split()[1]) as tar:
            session = tar.getmember("./usr/lib/envd/session")
            assert (session.uid, session.uname, session.mode & 0o111) == (0, "root", 0o111)

    monkeypatch.setattr("os.geteuid", lambda: user_id)
    monkeypatch.setattr(build, "_require_tools", lambda _: None)
    monkeypatch.setattr(build, "_run", bootstrap)
    catalogue = ImageCatalogue(tmp_path)
    image = build_image(for_containers(desktop_recipe()), catalogue)
    assert f"--mode={mode}" in commands[0]
    assert (image.firmware, image.disk_format, image.kernel) == ("none", "tar", "")
    assert catalogue.packages(image) == frozenset({"tint2"})
    assert catalogue.disk_of(image).read_bytes() == b"files"


def test_without_root_only_containers_are_built_given_uidmap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: None if name == "newuidmap" else f"/usr/bin/{name}")
    with pytest.raises(ImageError, match="needs newuidmap; install the package uidmap"):
        build_image(for_containers(desktop_recipe()), ImageCatalogue(tmp_path))
    with pytest.raises(ImageError, match="needs root"):
        build_image(desktop_recipe(), ImageCatalogue(tmp_path))
