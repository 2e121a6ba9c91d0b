"""Reading ISO files of the kinds that Windows and the virtio drivers come in, and writing the discs of a build."""

import json
import subprocess
from io import BytesIO
from pathlib import Path

import pycdlib
import pytest

from envd.base.errors import ImageError
from envd.images.windows.media import (
    NO_PROMPT_IMAGE,
    SECTOR_BYTES,
    Release,
    find_guest_files,
    no_prompt_patch,
    open_disc,
    read_editions,
)
from envd.images.windows.plan import Program, guest_scripts, parse_program, write_answer_disc, write_boot_disc
from tests.support.windows_media import PROMPT_IMAGE, make_virtio_iso, make_windows_iso, virtio_files


@pytest.fixture
def windows_iso(tmp_path: Path) -> Path:
    return make_windows_iso(tmp_path / "windows.iso")


@pytest.fixture
def virtio_iso(tmp_path: Path) -> Path:
    return make_virtio_iso(tmp_path / "virtio-win.iso", virtio_files("w10", "w11", "2k25"))


def make_udf_iso(path: Path, files: dict[str, bytes]) -> Path:
    """Write an ISO like Windows' own: the files are in UDF only, and ISO 9660 has a note."""
    iso = pycdlib.PyCdlib()
    iso.new(udf="2.60", interchange_level=3)
    iso.add_fp(BytesIO(b"udf"), 3, "/README.TXT;1")
    directories = {str(parent) for name in files for parent in Path(name).parents} - {"."}
    for directory in sorted(directories):
        iso.add_directory(udf_path=f"/{directory}")
    for number, (name, data) in enumerate(files.items()):
        iso.add_fp(BytesIO(data), len(data), f"/F{number}.;1", udf_path=f"/{name}")
    iso.write(str(path))
    iso.close()
    return path


def test_files_are_found_in_any_case(windows_iso: Path) -> None:
    with open_disc(windows_iso) as disc:
        assert disc.find("Sources/INSTALL.wim") == "/sources/install.wim"
        assert disc.find("sources/boot.wim") is None
        assert disc.find("sources/install.wim/x") is None
        with disc.open("/sources/install.wim") as stream:
            assert len(read_editions(stream)) == 1


def test_files_in_udf_are_found(tmp_path: Path) -> None:
    path = make_udf_iso(tmp_path / "udf.iso", {"sources/install.wim": b"a wim", "Efi/Boot/ü.efi": b"x" * 5000})
    with open_disc(path) as disc:
        assert disc.find("SOURCES/install.WIM") == "/sources/install.wim"
        with disc.open("/sources/install.wim") as stream:
            assert stream.read() == b"a wim"
        found = disc.find("efi/boot/ü.EFI")
        assert found is not None
        with path.open("rb") as stream:
            stream.seek(disc.sector(found) * SECTOR_BYTES)
            assert stream.read(5000) == b"x" * 5000


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not an ISO", b"\0" * 70_000])
def test_other_files_are_not_iso_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "windows.zip"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=r"windows\.zip"), open_disc(path):
        pass


def test_a_missing_iso_or_driver_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="No such file"), open_disc(tmp_path / "no.iso"):
        pass
    files = {path: data for path, data in virtio_files("w10").items() if not path.startswith("viogpudo")}
    with open_disc(make_virtio_iso(tmp_path / "virtio-win.iso", files)) as disc:
        with pytest.raises(ImageError, match="viogpudo/w10/amd64"):
            find_guest_files(disc, Release.WINDOWS_10)
        with pytest.raises(ImageError, match="vioscsi/w11/amd64, NetKVM/w11/amd64"):
            find_guest_files(disc, Release.WINDOWS_11)


def test_the_boot_disc_boots_the_image_without_a_prompt_and_leaves_the_iso(tmp_path: Path, windows_iso: Path) -> None:
    before = windows_iso.read_bytes()
    with open_disc(windows_iso) as disc:
        offset, patch = no_prompt_patch(disc)
        prompt, no_prompt = disc.sector(f"/{PROMPT_IMAGE}"), disc.sector(f"/{NO_PROMPT_IMAGE}")
    assert int.from_bytes(before[offset : offset + 4], "little") == prompt
    overlay = tmp_path / "a directory" / "boot.qcow2"
    overlay.parent.mkdir()
    write_boot_disc(overlay, windows_iso, offset=offset, patch=patch)
    assert [file.name for file in overlay.parent.iterdir()] == ["boot.qcow2"]
    raw = tmp_path / "boot.raw"
    subprocess.run(["qemu-img", "convert", "-O", "raw", str(overlay), str(raw)], check=True)
    after = raw.read_bytes()
    assert int.from_bytes(after[offset : offset + 4], "little") == no_prompt
    assert after[:offset] + before[offset : offset + 4] + after[offset + 4 :] == before
    assert windows_iso.read_bytes() == before


@pytest.mark.parametrize(
    ("boot_images", "problem"),
    [
        ({PROMPT_IMAGE: b""}, f"no {NO_PROMPT_IMAGE} in it; use an unmodified ISO"),
        ({NO_PROMPT_IMAGE: b""}, "not bootable with UEFI; use an unmodified 64-bit ISO"),
    ],
)
def test_an_iso_without_a_boot_image_is_an_error(tmp_path: Path, boot_images: dict[str, bytes], problem: str) -> None:
    iso = make_windows_iso(tmp_path / "windows.iso", boot_images=boot_images)
    with open_disc(iso) as disc, pytest.raises(ImageError, match=problem):
        no_prompt_patch(disc)


def test_drivers_are_those_of_the_release_without_symbols(virtio_iso: Path) -> None:
    with open_disc(virtio_iso) as disc:
        drivers, agent = find_guest_files(disc, Release.SERVER_2025)
    assert agent == "/guest-agent/qemu-ga-x86_64.msi"
    assert set(drivers) == {"vioscsi", "NetKVM", "vioserial", "viorng", "pvpanic", "viogpudo"}
    assert sorted(drivers["vioscsi"]) == [f"/vioscsi/2k25/amd64/vioscsi.{end}" for end in ("cat", "inf", "sys")]


def test_the_answer_disc_has_what_setup_looks_for(tmp_path: Path, virtio_iso: Path) -> None:
    program = tmp_path / "Editor Setup.exe"
    program.write_bytes(b"MZ")
    path = tmp_path / "answers.iso"
    with open_disc(virtio_iso) as disc:
        drivers, agent = find_guest_files(disc, Release.WINDOWS_11)
        write_answer_disc(
            path,
            answers=b"<unattend/>",
            virtio_win=disc,
            drivers=drivers,
            agent=agent,
            is_server=False,
            programs=(Program(file=program, arguments=("/S",)),),
        )
    assert path.stat().st_mode & 0o777 == 0o600, "it holds a password"
    with open_disc(path) as disc:

        def content(name: str) -> bytes:
            with disc.open(name) as stream:
                return stream.read()

        assert content("/autounattend.xml") == b"<unattend/>"
        assert content("/$WinPEDriver$/vioscsi/vioscsi.inf") == b"vioscsi inf"
        assert disc.find("$WinPEDriver$/viogpudo") is None, "it would turn the screen black during Setup"
        assert content("/envd/drivers/viogpudo/viogpudo.sys") == b"viogpudo sys"
        assert content("/envd/qemu-ga-x86_64.msi") == b"agent"
        manifest = json.loads(content("/envd/manifest.json"))
        assert manifest["programs"] == [
            {"name": "Editor Setup.exe", "path": "programs\\1\\Editor Setup.exe", "arguments": ["/S"]}
        ]
        assert not manifest["is_server"]
        assert content("/envd/programs/1/Editor Setup.exe") == b"MZ"
        for name, data in guest_scripts().items():
            assert content(f"/envd/{name}") == data


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "unknown kind of installer; use a file that ends in .msi, .exe, .ps1"),
        ("setup.zip", "unknown kind of installer"),
        ("'setup.exe", "No closing quotation"),
        ("absent.msi", "program absent.msi: no such file"),
    ],
)
def test_a_program_that_cannot_be_installed_is_an_error(text: str, problem: str) -> None:
    with pytest.raises(ImageError, match=problem):
        parse_program(text)


def test_a_program_has_arguments_as_in_a_shell(tmp_path: Path) -> None:
    (tmp_path / "a b.exe").touch()
    program = parse_program(f"'{tmp_path}/a b.exe' /S '/D=C:\\Program Files'")
    assert program == Program(file=tmp_path / "a b.exe", arguments=("/S", "/D=C:\\Program Files"))
