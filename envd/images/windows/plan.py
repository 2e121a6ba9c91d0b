"""Decides what a build of Windows will do, checks everything that it needs, and writes the discs that it starts from.

The answer disc is a CD, because a removable disk would be disk 0 until Setup has loaded the driver of the machine's own
disk. It holds the password of the new account, so only its owner can read it, and the build removes it.
"""

import hashlib
import json
import re
import secrets
import shlex
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from io import BytesIO
from pathlib import Path, PurePosixPath
from string import Template
from xml.sax.saxutils import escape

import pycdlib

from envd.base.errors import ImageError
from envd.base.tools import run_tool
from envd.hypervisor.machine import DiskImage, ExtraDrive, Firmware, GuestOs, Hardware
from envd.hypervisor.qemu.host import find_firmware
from envd.images.catalogue import file_sha256
from envd.images.windows.media import (
    LOGON_DRIVERS,
    SETUP_DRIVERS,
    Disc,
    Edition,
    Progress,
    choose_edition,
    editions_of,
    find_guest_files,
    no_prompt_patch,
    open_disc,
)

#: Name of the answer file in the root of a removable medium, where Setup looks for it; and of its template.
ANSWER_FILE = "autounattend.xml"
#: Directory of the answer disc with drivers, which Setup loads by itself.
SETUP_DRIVER_DIRECTORY = "$WinPEDriver$"
#: Directory of the answer disc with our scripts and files.
GUEST_DIRECTORY = "envd"
VOLUME_LABEL = "ENVD"
USER = "user"
_PASSWORD_BYTES = 18
_PROGRAM_SUFFIXES = (".msi", ".exe", ".ps1")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowsOptions:
    """Options of a build. Empty strings mean the default, which a plan has filled in."""

    iso: Path
    virtio_win: Path
    edition: str = ""
    language: str = ""
    """Language tag, such as `en-US`."""
    keyboard: str = ""
    """Language tag or identifier of the input locale, such as `en-US` or `0409:00000409`."""
    time_zone: str = "UTC"
    """Windows' own name, such as `W. Europe Standard Time`."""
    product_key: str = ""
    """`none` for none; in a plan, empty for none."""
    screen_width_px: int = 1280
    screen_height_px: int = 720
    programs: tuple[str, ...] = ()
    disk_gib: int = _MIN_DISK_GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that is installed at the first logon."""

    file: Path
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What a build will do; everything in it was checked."""

    options: WindowsOptions
    """The options, with all defaults filled in."""
    edition: Edition
    patch_offset: int
    patch: bytes
    """Replaces the bytes of the ISO at the offset; see `no_prompt_patch`."""
    drivers: Mapping[str, tuple[str, ...]]
    """Paths in the virtio-win ISO, by driver."""
    agent: str
    """Path in the virtio-win ISO."""
    programs: tuple[Program, ...]

    def digest(self, report: Progress) -> str:
        """Return the sha256 (hex) of everything that determines the image. Reads the ISO files."""
        answers = answer_file(self.options, self.edition, password="")
        parts = {"answers": answers, "disk": str(self.options.disk_gib).encode()}
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
        edition = choose_edition(editions_of(disc), options.edition)
        release = edition.release
        patch_offset, patch = no_prompt_patch(disc)
    with open_disc(options.virtio_win) as disc:
        drivers, agent = find_guest_files(disc, release)
    plan = BuildPlan(
        options=_checked(options, edition),
        edition=edition,
        patch_offset=patch_offset,
        patch=patch,
        drivers=drivers,
        agent=agent,
        programs=tuple(parse_program(program) for program in options.programs),
    )
    _check_space(options, edition, directory)
    _check_host()
    return plan


def _checked(options: WindowsOptions, edition: Edition) -> WindowsOptions:
    """Return the options with their defaults filled in."""
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
    return replace(
        options, language=language, keyboard=options.keyboard or language, product_key="" if key == "NONE" else key
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


def answer_file(options: WindowsOptions, edition: Edition, *, password: str) -> bytes:
    """Return the answer file of Windows Setup. Pure."""
    template = re.sub(
        r"\n *<!--.*?-->", "", (files("envd.images.windows") / ANSWER_FILE).read_text("utf-8"), flags=re.S
    )
    if not options.product_key:
        template = _without(template, "ProductKey")
    if not edition.release.is_server:
        template = _without(template, "AdministratorPassword")
    values = {
        "edition": edition.name,
        "language": options.language,
        "keyboard": options.keyboard,
        "time_zone": options.time_zone,
        "product_key": options.product_key,
        "width_px": str(options.screen_width_px),
        "height_px": str(options.screen_height_px),
        "user": USER,
        "password": _obscured(password, "Password"),
        "administrator_password": _obscured(password, "AdministratorPassword"),
    }
    return Template(template).substitute({name: escape(value) for name, value in values.items()}).encode()


def _without(xml: str, element: str) -> str:
    return re.sub(rf"\n *<{element}>.*?</{element}>", "", xml, flags=re.S)


def _obscured(password: str, element: str) -> str:
    """Return a password in the form of Windows System Image Manager: obscured, not encrypted."""
    return b64encode((password + element).encode("utf-16-le")).decode()


def parse_program(text: str) -> Program:
    """Return a program from `FILE [ARGUMENT...]`, quoted as in a shell. Raises: ImageError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ImageError(f"program {text!r}: {error}; close the quotation") from error
    file = Path(words[0]) if words else Path()
    if file.suffix.lower() not in _PROGRAM_SUFFIXES:
        raise ImageError(
            f"program {text!r}: unknown kind of installer; use a file that ends in {', '.join(_PROGRAM_SUFFIXES)}"
        )
    if not file.is_file():
        raise ImageError(f"program {file}: no such file; check the path")
    return Program(file=file, arguments=tuple(words[1:]))


def guest_scripts() -> dict[str, bytes]:
    """Return our files for the guest, encoded as Windows expects them, by name."""
    scripts = {}
    for item in files("envd.images.windows").joinpath("guest").iterdir():
        text = item.read_text(encoding="ascii").replace("\n", "\r\n")
        # `reg import` reads version 5.00 of its format as UTF-16.
        encoding = "utf-16" if item.name.endswith(".reg") else "ascii"
        scripts[item.name] = text.encode(encoding)
    return scripts


def write_answer_disc(
    path: Path,
    *,
    answers: bytes,
    virtio_win: Disc,
    drivers: Mapping[str, tuple[str, ...]],
    agent: str,
    is_server: bool,
    programs: tuple[Program, ...],
) -> None:
    """Write the answer disc; `drivers` and `agent` are paths in `virtio_win`."""
    tree: dict[str, bytes | Path] = {ANSWER_FILE: answers}
    manifest = {"drivers": list(LOGON_DRIVERS), "is_server": is_server, "programs": _programs(programs, tree)}
    tree[f"{GUEST_DIRECTORY}/manifest.json"] = json.dumps(manifest, indent=2).encode()
    for name, data in guest_scripts().items():
        tree[f"{GUEST_DIRECTORY}/{name}"] = data
    tree[f"{GUEST_DIRECTORY}/{PurePosixPath(agent).name}"] = _read(virtio_win, agent)
    for driver, paths in drivers.items():
        parent = SETUP_DRIVER_DIRECTORY if driver in SETUP_DRIVERS else f"{GUEST_DIRECTORY}/drivers"
        for file in paths:
            tree[f"{parent}/{driver}/{PurePosixPath(file).name}"] = _read(virtio_win, file)
    _write_iso(path, tree)


def _programs(programs: tuple[Program, ...], tree: dict[str, bytes | Path]) -> list[dict[str, object]]:
    """Add the programs to the disc's files; return what the first logon needs to install them."""
    listed: list[dict[str, object]] = []
    for number, program in enumerate(programs, start=1):
        # A directory each: two programs may have the same file name.
        path = f"programs/{number}/{program.file.name}"
        tree[f"{GUEST_DIRECTORY}/{path}"] = program.file
        listed.append(
            {"name": program.file.name, "path": path.replace("/", "\\"), "arguments": list(program.arguments)}
        )
    return listed


def _read(disc: Disc, path: str) -> bytes:
    with disc.open(path) as stream:
        return stream.read()


def _write_iso(path: Path, tree: dict[str, bytes | Path]) -> None:
    iso = pycdlib.PyCdlib()
    iso.new(interchange_level=4, joliet=3, vol_ident=VOLUME_LABEL)
    directories: set[str] = set()
    for name, content in tree.items():
        for parent in reversed(PurePosixPath(name).parents):
            directory = f"/{parent}"
            if directory != "/." and directory not in directories:
                directories.add(directory)
                iso.add_directory(directory, joliet_path=directory)
        if isinstance(content, bytes):
            iso.add_fp(BytesIO(content), len(content), f"/{name}", joliet_path=f"/{name}")
        else:
            iso.add_file(str(content), f"/{name}", joliet_path=f"/{name}")
    path.touch(mode=0o600)
    iso.write(str(path))
    iso.close()


def write_media(plan: BuildPlan, directory: Path) -> DiskImage:
    """Write what an installation starts from, and return what its machine boots from.

    These are an empty disk, the disc to boot and the disc with the answers. `ANSWER_FILE` is also beside them.
    """
    boot_disc, answer_disc, disk = (directory / name for name in ("boot.qcow2", "answers.iso", "empty.qcow2"))
    answers = answer_file(plan.options, plan.edition, password=secrets.token_urlsafe(_PASSWORD_BYTES))
    (directory / ANSWER_FILE).touch(mode=0o600)
    (directory / ANSWER_FILE).write_bytes(answers)
    write_boot_disc(boot_disc, plan.options.iso, offset=plan.patch_offset, patch=plan.patch)
    with open_disc(plan.options.virtio_win) as virtio_win:
        write_answer_disc(
            answer_disc,
            answers=answers,
            virtio_win=virtio_win,
            drivers=plan.drivers,
            agent=plan.agent,
            is_server=plan.edition.release.is_server,
            programs=plan.programs,
        )
    qemu_img("create", "-q", "-f", "qcow2", str(disk), f"{plan.options.disk_gib}G")
    return DiskImage(
        name="windows-setup",
        digest=plan.patch.hex(),
        disk=disk,
        os=GuestOs.WINDOWS,
        hardware=Hardware.WINDOWS,
        firmware=Firmware.UEFI,
        has_guestd=False,
        drives=(
            ExtraDrive(path=boot_disc, is_cdrom=True),
            ExtraDrive(path=answer_disc, disk_format="raw", is_cdrom=True),
        ),
    )


def qemu_img(*arguments: str) -> None:
    """Run qemu-img. Raises: ImageError."""
    run_tool(["qemu-img", *arguments], what=f"disk: qemu-img {arguments[0]}", error=ImageError)


def write_boot_disc(path: Path, iso: Path, *, offset: int, patch: bytes) -> None:
    """Write the Windows ISO with another entry in its boot catalogue, as an overlay of a few KiB on top of the ISO.

    Windows' ISOs wait for a key before they boot, and return to the firmware without one. They also have a boot image
    that does not wait. The overlay names that one; the ISO file stays as it is.
    """
    data = path.with_name("patch")
    data.write_bytes(patch)
    _run("qemu-img", "create", "-q", "-f", "qcow2", "-b", str(iso.resolve()), "-F", "raw", path.name, cwd=path.parent)
    # qemu-io splits its commands at spaces, so they must not contain our paths.
    command = f"write -q -s {data.name} {offset} {len(patch)}"
    _run("qemu-io", "-f", "qcow2", "-c", command, path.name, cwd=path.parent)
    data.unlink()


def _run(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    # qemu-io reports a failed command in its output only.
    if done.returncode != 0 or done.stdout.strip():
        message = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise ImageError(f"boot disc: {command[0]} failed: {message}; check the free space and the package qemu-utils")
