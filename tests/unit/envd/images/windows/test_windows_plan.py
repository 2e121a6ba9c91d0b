"""What is checked before a build of Windows starts anything."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envd.base.errors import ImageError
from envd.images.windows import plan as plan_module
from envd.images.windows.plan import WindowsOptions, plan_build
from tests.support.windows_media import MediumEdition, make_virtio_iso, make_windows_iso, virtio_files

PRO = MediumEdition(name="Windows 11 Pro", edition_id="Professional")
KEY = "AAAAA-BBBBB-CCCCC-DDDDD-EEEEE"


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("media")
    make_windows_iso(directory / "windows.iso", (MediumEdition(languages=("de-DE", "en-US")), PRO))
    make_virtio_iso(directory / "virtio-win.iso", virtio_files("w11"))
    make_windows_iso(directory / "arm.iso", (replace(PRO, architecture="12"),))
    make_windows_iso(directory / "x86.iso", (replace(PRO, architecture="0"),))
    make_windows_iso(directory / "empty.iso", ())
    make_windows_iso(directory / "split.iso", (PRO,), image_name="install.swm")
    make_windows_iso(directory / "esd.iso", (PRO,), image_name="install.esd")
    (directory / "text.iso").write_text("an error page of a download")
    return directory


@pytest.fixture
def options(media: Path) -> WindowsOptions:
    return WindowsOptions(iso=media / "windows.iso", virtio_win=media / "virtio-win.iso", edition="EnterpriseEval")


@pytest.fixture(autouse=True)
def _host_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(plan_module, "find_firmware", object)


def test_a_plan_has_the_defaults_of_its_edition_and_the_key_of_a_licensed_one(
    options: WindowsOptions, tmp_path: Path, media: Path
) -> None:
    plan = plan_build(options, directory=tmp_path / "not there yet")
    assert plan.edition.name == "Windows 11 Enterprise Evaluation"
    assert (plan.options.language, plan.options.keyboard) == ("de-DE", "de-DE")
    assert plan.options.product_key == ""
    with_key = replace(options, edition="Windows 11 Pro", product_key=KEY.lower())
    assert plan_build(with_key, directory=tmp_path).options.product_key == KEY
    assert plan_build(replace(with_key, product_key="none"), directory=tmp_path).options.product_key == ""
    esd = replace(options, iso=media / "esd.iso", edition="", product_key=KEY)
    assert plan_build(esd, directory=tmp_path).edition.edition_id == "Professional"


@pytest.mark.parametrize(
    ("iso", "problem"),
    [
        ("text.iso", r"text.iso: not an ISO file, or damaged"),
        ("absent.iso", r"absent.iso: cannot be read: No such file"),
        ("empty.iso", r"empty.iso: no Windows in it \(no sources/install.wim\)"),
        ("virtio-win.iso", r"virtio-win.iso: no Windows in it"),
        ("split.iso", r"split.iso: its image is split into several files"),
        ("arm.iso", r"arm.iso: made for ARM64; use an ISO for x64"),
        ("x86.iso", r"x86.iso: made for x86 \(32-bit\); use an ISO for x64 \(64-bit\)"),
    ],
)
def test_a_wrong_iso_is_an_error(media: Path, options: WindowsOptions, tmp_path: Path, iso: str, problem: str) -> None:
    with pytest.raises(ImageError, match=problem):
        plan_build(replace(options, iso=media / iso), directory=tmp_path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"edition": ""}, r"2 editions; choose one with --edition \(1: Windows 11 Enterprise"),
        ({"edition": "Home"}, r"edition 'Home': not in this ISO; choose one of: 1: .*; 2: Windows 11 Pro"),
        ({"language": "fr-FR"}, r"language 'fr-FR': not in this ISO, which has de-DE, en-US"),
        ({"time_zone": "Europe/Berlin"}, r"time zone 'Europe/Berlin': not a name that Windows uses"),
        ({"edition": "Professional"}, r"Windows 11 Pro: no product key; pass --key"),
        ({"product_key": "12345"}, r"product key: not five groups of five characters"),
        ({"screen_width_px": 100}, r"screen width 100: out of range"),
        ({"programs": ("notepad++.zip",)}, r"program 'notepad\+\+.zip': unknown kind of installer"),
        ({"disk_gib": 20}, r"disk of 20 GiB: too small; Windows needs at least 64 GiB"),
    ],
)
def test_a_wrong_option_is_an_error_with_its_remedy(
    options: WindowsOptions, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ImageError, match=problem) as raised:
        plan_build(replace(options, **changes), directory=tmp_path)
    assert "12345" not in str(raised.value), "a key is a secret"


def test_a_virtio_iso_without_drivers_for_the_release_is_an_error(options: WindowsOptions, tmp_path: Path) -> None:
    old = make_virtio_iso(tmp_path / "old.iso", virtio_files("w8", "w10"))
    with pytest.raises(ImageError, match=r"old\.iso: .*vioscsi/w11/amd64"):
        plan_build(replace(options, virtio_win=old), directory=tmp_path)


def test_too_little_space_is_an_error(options: WindowsOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = type("Usage", (), {"free": 7 << 30})
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)
    with pytest.raises(ImageError, match=r"7 GiB .* 8 GiB"):
        plan_build(options, directory=tmp_path / "cache")


@pytest.mark.parametrize(
    ("tool", "package"), [("swtpm", "swtpm"), ("qemu-io", "qemu-utils"), ("qemu-system-x86_64", "qemu-system-x86")]
)
def test_a_missing_tool_is_an_error_with_its_package(
    options: WindowsOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, package: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == tool else name)
    with pytest.raises(ImageError, match=rf"needs {tool}; install the package {package}"):
        plan_build(options, directory=tmp_path)


def test_missing_firmware_is_an_error(options: WindowsOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "find_firmware", lambda: None)
    with pytest.raises(ImageError, match="package ovmf"):
        plan_build(options, directory=tmp_path)


def test_the_digest_changes_with_all_that_determines_the_image(
    media: Path, options: WindowsOptions, tmp_path: Path
) -> None:
    program = tmp_path / "setup.exe"
    program.write_bytes(b"1")

    def digest(**changes: Any) -> str:
        stages: list[str] = []
        found = plan_build(replace(options, **changes), directory=tmp_path).digest(
            lambda stage, _: stages.append(stage)
        )
        assert stages == ["reading windows.iso", "reading virtio-win.iso"]
        return found

    assert digest() == digest(), "the password is not part of it"
    digests = [digest(), digest(screen_width_px=1920), digest(language="en-US"), digest(disk_gib=80)]
    digests += [digest(programs=(f"{program} /S",)), digest(programs=(f"{program} /Q",))]
    program.write_bytes(b"2")
    digests.append(digest(programs=(f"{program} /S",)))
    assert len(set(digests)) == len(digests)
