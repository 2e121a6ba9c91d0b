"""Checks everything that a build of Windows needs, before it starts anything, and decides what it will do."""

import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from envd.base.errors import ImageError
from envd.hypervisor.qemu.host import find_firmware
from envd.images.catalogue import file_sha256
from envd.images.windows.answer_disc import Program, guest_scripts, parse_program
from envd.images.windows.answers import InstallSettings, answer_file
from envd.images.windows.disc import BootPatch, Disc, no_prompt_patch, open_disc
from envd.images.windows.drivers import GuestFiles, find_guest_files
from envd.images.windows.editions import Edition, choose_edition, read_editions

_IMAGE_FILES = ("sources/install.wim", "sources/install.esd", "sources/install.swm")
_TOOLS = (
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-img", "qemu-utils"),
    ("qemu-io", "qemu-utils"),
    ("swtpm", "swtpm"),
)
_KEY = re.compile(r"([A-Z0-9]{5}-){4}[A-Z0-9]{5}")
#: Smallest disk that Windows 11 and Windows Server accept.
_MIN_DISK_GIB = 64
#: While it is sealed, the system exists twice; temporary files of the installation take the rest.
_SPACE_FACTOR, _SPACE_EXTRA_BYTES = 3, 8 << 30

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowsOptions:
    """Options of a build, as given by the user. Empty strings mean the default."""

    iso: Path
    virtio_win: Path
    edition: str = ""
    language: str = ""
    keyboard: str = ""
    time_zone: str = "UTC"
    product_key: str = ""
    screen_width_px: int = 1280
    screen_height_px: int = 720
    programs: tuple[str, ...] = ()
    disk_gib: int = _MIN_DISK_GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What a build will do; everything in it was checked."""

    options: WindowsOptions
    settings: InstallSettings
    patch: BootPatch
    guest_files: GuestFiles
    programs: tuple[Program, ...]

    @property
    def edition(self) -> Edition:
        return self.settings.edition

    def digest(self, report: Progress) -> str:
        """Return the sha256 (hex) of everything that determines the image. Reads the ISO files."""
        parts = {"answers": answer_file(self.settings, password=""), "disk": str(self.options.disk_gib).encode()}
        for number, file in enumerate((self.options.iso, self.options.virtio_win)):
            report(f"reading {file.name}", number / 2)
            parts[f"iso{number}"] = file_sha256(file).encode()
        for number, program in enumerate(self.programs):
            parts[f"program{number}"] = f"{file_sha256(program.file)} {program.arguments}".encode()
        digest = hashlib.sha256()
        for name, data in sorted({**parts, **guest_scripts()}.items()):
            digest.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
        return digest.hexdigest()


def plan_build(options: WindowsOptions, *, directory: Path) -> BuildPlan:
    """Check the media, the options and this host.

    Raises:
        ImageError: Something is missing or wrong; the message has the remedy.
    """
    with open_disc(options.iso) as disc:
        edition = choose_edition(_editions(disc), options.edition)
        release = edition.release
        patch = no_prompt_patch(disc)
    with open_disc(options.virtio_win) as drivers:
        guest_files = find_guest_files(drivers, release)
    plan = BuildPlan(
        options=options,
        settings=_settings(options, edition),
        patch=patch,
        guest_files=guest_files,
        programs=tuple(parse_program(program) for program in options.programs),
    )
    _check_space(options, edition, directory)
    _check_host()
    return plan


def _editions(disc: Disc) -> tuple[Edition, ...]:
    path = next((found for name in _IMAGE_FILES if (found := disc.find(name))), None)
    if path is None:
        raise ImageError(f"ISO {disc.path}: no Windows in it (no {_IMAGE_FILES[0]}); use an installation ISO")
    if path.lower().endswith(".swm"):
        raise ImageError(
            f"ISO {disc.path}: its image is split into several files; use an unmodified ISO from Microsoft"
        )
    with disc.open(path) as stream:
        editions = read_editions(stream)
    other = sorted({edition.architecture for edition in editions} - {"x64"})
    if other or not editions:
        raise ImageError(f"ISO {disc.path}: made for {', '.join(other) or 'nothing'}; use an ISO for x64 (64-bit)")
    return editions


def _settings(options: WindowsOptions, edition: Edition) -> InstallSettings:
    language = options.language or edition.default_language
    if language not in edition.languages:
        raise ImageError(
            f"language {language!r}: not in this ISO, which has {', '.join(edition.languages)}; choose one of these or "
            "use an ISO in that language"
        )
    if "/" in options.time_zone:
        raise ImageError(
            f"time zone {options.time_zone!r}: not a name that Windows uses; write one such as "
            "'W. Europe Standard Time' (`tzutil /l` lists them)"
        )
    key = options.product_key.upper()
    if key not in {"", "NONE"} and not _KEY.fullmatch(key):
        # The key is a secret, so the message does not repeat it.
        raise ImageError("product key: not five groups of five characters; check it")
    if not key and edition.evaluation is None:
        raise ImageError(
            f"edition {edition.name}: no product key; pass --key, or --key none if the ISO installs without one "
            "(volume licences)"
        )
    for name, size_px in (("width", options.screen_width_px), ("height", options.screen_height_px)):
        # The virtio display driver rejects sizes below 640x480.
        if not 480 <= size_px <= 8192:
            raise ImageError(f"screen {name} {size_px}: out of range; use 640x480 to 8192x8192")
    return InstallSettings(
        edition=edition,
        language=language,
        keyboard=options.keyboard or language,
        time_zone=options.time_zone,
        product_key="" if key == "NONE" else key,
        screen_width_px=options.screen_width_px,
        screen_height_px=options.screen_height_px,
    )


def _check_space(options: WindowsOptions, edition: Edition, directory: Path) -> None:
    gib = 1 << 30
    if options.disk_gib < _MIN_DISK_GIB:
        raise ImageError(f"disk of {options.disk_gib} GiB: too small; Windows needs at least {_MIN_DISK_GIB} GiB")
    if options.disk_gib * gib < edition.size_bytes * 2:
        raise ImageError(
            f"disk of {options.disk_gib} GiB: too small for {edition.name}, which has {edition.size_bytes / gib:.0f} "
            f"GiB of files; use --disk-gib {-(-edition.size_bytes * 2 // gib)}"
        )
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    needed = edition.size_bytes * _SPACE_FACTOR + _SPACE_EXTRA_BYTES
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ImageError(
            f"disk space: {free / gib:.0f} GiB free in {existing}, {needed / gib:.0f} GiB needed; free some space or "
            "choose another --cache-dir"
        )


def _check_host() -> None:
    for tool, package in _TOOLS:
        if shutil.which(tool) is None:
            raise ImageError(f"building Windows needs {tool}; install the package {package}")
    if find_firmware() is None:
        raise ImageError("building Windows needs UEFI firmware (OVMF); install the package ovmf")
