"""Installation media like Windows' own, made with wimlib and xorriso, with a few bytes instead of Windows."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envd.images.windows.media import NO_PROMPT_IMAGE

PROMPT_IMAGE = "efi/microsoft/boot/efisys.bin"
_BIOS_IMAGE = "boot/etfsboot.com"
#: Virtual sectors that El Torito loads, as in Windows' ISOs.
_BIOS_SECTORS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MediumEdition:
    """An edition in a made WIM file."""

    name: str = "Windows 11 Enterprise Evaluation"
    edition_id: str = "EnterpriseEval"
    architecture: str = "9"
    build: int = 26200
    installation_type: str = "Client"
    languages: tuple[str, ...] = ("en-US",)


def make_wim(path: Path, editions: Sequence[MediumEdition]) -> None:
    """Write a WIM file with real metadata for each edition."""
    tree = path.with_suffix(".tree")
    tree.mkdir()
    for number, edition in enumerate(editions):
        # The contents differ, or wimlib would reject the second image as a duplicate.
        (tree / "edition.txt").write_text(edition.name)
        properties = {
            "WINDOWS/ARCH": edition.architecture,
            "WINDOWS/EDITIONID": edition.edition_id,
            "WINDOWS/INSTALLATIONTYPE": edition.installation_type,
            "WINDOWS/LANGUAGES/DEFAULT": edition.languages[0],
            "WINDOWS/VERSION/BUILD": str(edition.build),
            **{f"WINDOWS/LANGUAGES/LANGUAGE[{n}]": tag for n, tag in enumerate(edition.languages, start=1)},
        }
        options = [f"--image-property={key}={value}" for key, value in properties.items()]
        verb = "append" if number else "capture"
        _run("wimlib-imagex", verb, str(tree), str(path), edition.name, *options)


def make_windows_iso(
    path: Path,
    editions: Sequence[MediumEdition] = (MediumEdition(),),
    *,
    boot_images: Mapping[str, bytes] | None = None,
    image_name: str = "install.wim",
) -> Path:
    """Write an ISO with the layout of Windows' own, in ISO 9660 with Joliet.

    Args:
        path: The new file.
        editions: Editions in its WIM file; none for an ISO without one.
        boot_images: Content of its UEFI boot images by path; by default both, empty.
        image_name: Name of the WIM file in `sources`.
    """
    tree = path.with_suffix(".files")
    (tree / "sources").mkdir(parents=True)
    if editions:
        make_wim(tree / "sources" / image_name, editions)
        for file in (tree / "sources").glob("*.tree/*"):
            file.unlink()
            file.parent.rmdir()
    for name, data in ({PROMPT_IMAGE: b"p", NO_PROMPT_IMAGE: b"n"} if boot_images is None else boot_images).items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data.ljust(2048, b"\0"))
    (tree / _BIOS_IMAGE).parent.mkdir(parents=True, exist_ok=True)
    (tree / _BIOS_IMAGE).write_bytes(bytes(512 * _BIOS_SECTORS))
    boot = ["-b", _BIOS_IMAGE, "-no-emul-boot", "-boot-load-size", str(_BIOS_SECTORS)]
    if (tree / PROMPT_IMAGE).exists():
        boot += ["-eltorito-alt-boot", "-e", PROMPT_IMAGE, "-no-emul-boot"]
    _run("xorriso", "-as", "mkisofs", "-quiet", "-J", *boot, "-o", str(path), str(tree))
    return path


def make_virtio_iso(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write an ISO with files by path, in Rock Ridge as the virtio-win ISO."""
    tree = path.with_suffix(".files")
    for name, data in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    _run("xorriso", "-as", "mkisofs", "-quiet", "-R", "-o", str(path), str(tree))
    return path


def virtio_files(*directories: str) -> dict[str, bytes]:
    """Return files like those of the virtio-win ISO, for these directories of each driver (`w11`)."""
    drivers = ("Balloon", "NetKVM", "pvpanic", "viogpudo", "viorng", "vioscsi", "vioserial", "viostor")
    found = {"guest-agent/qemu-ga-x86_64.msi": b"agent", "virtio-win_license.txt": b"license"}
    for driver in drivers:
        for directory in directories:
            for suffix in ("inf", "sys", "cat", "pdb"):
                found[f"{driver}/{directory}/amd64/{driver.lower()}.{suffix}"] = f"{driver} {suffix}".encode()
    return found


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
