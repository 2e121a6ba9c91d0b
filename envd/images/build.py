"""Builds a guest image from a recipe with mmdebstrap: a root file system as a qcow2 disk, with its kernel and initrd.

`catalogue.py` stores the images. Blocking; for commands and threads.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path

from envd.base.errors import ImageError
from envd.base.tools import run_tool
from envd.guests.guestd import VERSION as GUESTD_VERSION
from envd.hypervisor.machine import Firmware, GuestOs
from envd.images.catalogue import PACKAGES_FILE, Image, ImageCatalogue, file_sha256
from envd.images.recipe import (
    CUSTOMIZE_FILE,
    CUSTOMIZE_SCRIPT,
    PYTHON_PACKAGES,
    WINDOWS_PROGRAMS,
    WINDOWS_SOURCES,
    ImageRecipe,
    overlay_files,
    recipe_digest,
    write_files,
)

_run = partial(run_tool, error=ImageError, environment={"SOURCE_DATE_EPOCH": "1700000000", "LC_ALL": "C.UTF-8"})

#: Quiet, with fixed interface names, and without mitigations and watchdogs, which are slow in an emulated guest.
KERNEL_CMDLINE = (
    "root=/dev/vda rw quiet loglevel=4 console=tty0 console=ttyS0 net.ifnames=0 mitigations=off nowatchdog "
    "random.trust_cpu=on systemd.show_status=0 vt.global_cursor_default=0"
)

#: Wine returns to user mode by IRET from user mode. QEMU's TCG before version 9.1 reads that stack as the kernel
#: (target/i386/tcg/seg_helper.c), which SMAP forbids: every Windows program would end.
_WINE_CMDLINE = "clearcpuid=smap"

#: Services of a general-purpose system that this desktop does not need.
_MASKED_UNITS = (files("envd.images") / "packages" / "masked-units.txt").read_text().split()

#: Files that guests never read; without them the image is a third smaller.
_EXCLUDED_PATHS = (files("envd.images") / "packages" / "excluded-paths.txt").read_text().split()

#: Prefix of the tools that compile and strip Windows programs.
_MINGW = "x86_64-w64-mingw32-"
_COMPILER_FLAGS = ("-O2", "-s", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-municode", "-mwindows")

Progress = Callable[[str, float], None]
"""Called with the current stage in words, and the fraction of the whole build that is done, in [0, 1]."""


def build_image(
    recipe: ImageRecipe,
    catalogue: ImageCatalogue,
    *,
    added: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
    rebuild: bool = False,
) -> Image:
    """Return the recipe's image, built unless the catalogue has it, and make it current under its name.

    An interrupted or failed build leaves nothing behind.

    Args:
        added: Files of the user, see `added_files`.

    Raises:
        ImageError: A tool is missing or failed; the message has the end of its output. The user's script failed, or a
            package does not exist.
    """
    report = progress or (lambda _stage, _fraction: None)
    overlay = {**overlay_files(recipe), **(added or {})}
    digest = recipe_digest(recipe, overlay)
    if not rebuild and (image := catalogue.find(recipe.name, digest)):
        # Another recipe or version of envd may have built a newer image under this name.
        catalogue.make_current(image)
        report("cached", 1.0)
        return image
    _require_tools(recipe)
    began_s = time.monotonic()
    with catalogue.staging(recipe.name) as directory, catalogue.staging(recipe.name) as scratch:
        disk = directory / ("disk.qcow2" if recipe.kernel_package else "disk.tar")
        if recipe.kernel_package:
            root = scratch / "root"
            _bootstrap(recipe, overlay, root, scratch, report)
            report("copying the kernel", 0.82)
            _copy_kernel(root, directory)
            packages = _installed_packages(root / "var/lib/dpkg")
            report("creating the disk", 0.84)
            _make_disk(recipe, root, disk, scratch)
        else:
            _bootstrap(recipe, overlay, disk, scratch, report)
            packages = _installed_packages(scratch)
            # The root of containers, another user of the host, extracts it.
            disk.chmod(0o644)
        (directory / PACKAGES_FILE).write_text("".join(f"{line}\n" for line in packages))
        report("hashing the disk", 0.97)
        image = catalogue.publish(
            directory,
            Image(
                name=recipe.name,
                digest=digest,
                disk=disk.name,
                disk_sha256=file_sha256(disk),
                disk_format=disk.suffix[1:],
                os=recipe.os.value,
                has_guestd=recipe.os is GuestOs.LINUX,
                guestd_version=GUESTD_VERSION if recipe.os is GuestOs.LINUX else "",
                provides=recipe.provides,
                firmware=(Firmware.DIRECT_KERNEL if recipe.kernel_package else Firmware.NONE).value,
                kernel="vmlinuz" if recipe.kernel_package else "",
                initrd="initrd.img" if recipe.kernel_package else "",
                kernel_cmdline=_kernel_cmdline(recipe),
                source={
                    "distribution": recipe.distribution,
                    "suite": recipe.suite,
                    "mirror": recipe.mirror or "default",
                    "packages": str(len(packages)),
                    "build_s": f"{time.monotonic() - began_s:.0f}",
                },
            ),
        )
    report("done", 1.0)
    return image


def _kernel_cmdline(recipe: ImageRecipe) -> str:
    if not recipe.kernel_package:
        return ""
    return f"{KERNEL_CMDLINE} {_WINE_CMDLINE}" if recipe.os is GuestOs.WINDOWS else KERNEL_CMDLINE


def _require_tools(recipe: ImageRecipe) -> None:
    tools = [("mmdebstrap", "mmdebstrap")]
    if recipe.kernel_package:
        if os.geteuid() != 0:
            raise ImageError(
                "building an image needs root, to install packages into a root file system; run it with sudo"
            )
        tools += [("mke2fs", "e2fsprogs"), ("qemu-img", "qemu-utils")]
    elif os.geteuid() != 0:
        tools += [("newuidmap", "uidmap")]
    if recipe.os is GuestOs.WINDOWS:
        tools += [(f"{_MINGW}gcc", "gcc-mingw-w64-x86-64-win32"), (f"{_MINGW}strip", "binutils-mingw-w64-x86-64")]
    for tool, package in tools:
        if shutil.which(tool) is None:
            raise ImageError(f"building an image needs {tool}; install the package {package}")
    if not Path(recipe.keyring).exists():
        raise ImageError(
            f"building a {recipe.distribution} image needs {recipe.keyring}; install the package "
            f"{recipe.distribution}-archive-keyring (Ubuntu: ubuntu-keyring)"
        )


def _bootstrap(recipe: ImageRecipe, overlay: dict[str, bytes], target: Path, scratch: Path, report: Progress) -> None:
    """Install a recipe into a directory, or without a kernel into an archive, with dpkg's status in `scratch`."""
    extras = scratch / "overlay"
    write_files(overlay, extras)
    if PYTHON_PACKAGES in overlay:
        report("fetching Python packages", 0.005)
        _fetch_python_packages(extras)
    hooks: list[str] = []
    if recipe.os is GuestOs.WINDOWS:
        report("compiling the Windows programs", 0.005)
        _compile_windows_programs(extras)
        # Debian's libraries of Wine have debug symbols, which are two thirds of their 640 MB.
        hooks.append(
            f'--customize-hook={_MINGW}strip --strip-debug "$1"/usr/lib/x86_64-linux-gnu/wine/x86_64-windows/*'
        )
    if recipe.kernel_package:
        customize = scratch / "customize.sh"
        customize.write_text(CUSTOMIZE_SCRIPT.replace("__MASKED__", " ".join(_MASKED_UNITS)))
        copy = f'cp -r {shlex.quote(str(extras))}/. "$1/"'
        how = ["--mode=root", "--format=directory"]
        hooks.append(f'--customize-hook=sh {shlex.quote(str(customize))} "$1"')
    else:
        # Without root, the hooks' user cannot read this user's files. mmdebstrap itself hands these over.
        archive = scratch / "overlay.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(extras, arcname=".", filter=_as_root)
        copy = f"tar-in {shlex.quote(str(archive))} /"
        how = [f"--mode={'root' if os.geteuid() == 0 else 'unshare'}", "--format=tar", "--skip=output/dev"]
        hooks.append(f'--customize-hook=chroot "$1" sh /{CUSTOMIZE_FILE} /')
        hooks.append(f"--customize-hook=download /var/lib/dpkg/status {shlex.quote(str(scratch / 'status'))}")
    # Also copied before the packages are installed: initramfs-tools and useradd read these files.
    command = [
        "mmdebstrap",
        "--verbose",
        *how,
        "--variant=minbase",
        f"--components={','.join(recipe.components)}",
        f"--include={','.join(filter(None, [*recipe.packages, recipe.kernel_package]))}",
        '--aptopt=Apt::Install-Recommends "false"',
        "--dpkgopt=force-confold",
        "--dpkgopt=force-unsafe-io",
        *(f"--dpkgopt=path-exclude={path}" for path in _EXCLUDED_PATHS),
        f"--extract-hook={copy}",
        f"--customize-hook={copy}",
        *hooks,
        f"--keyring={recipe.keyring}",
        recipe.suite,
        str(target),
    ]
    if recipe.mirror:
        command.append(recipe.mirror)
    report("installing packages", 0.01)
    output = _InstallOutput(report)
    try:
        _run(command, on_line=output, what=f"mmdebstrap of {recipe.suite}")
    except ImageError as error:
        raise output.explain(recipe, error) from error


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


def _fetch_python_packages(extras: Path) -> None:
    """Install the listed pure-Python packages for the guest's system Python."""
    _run(
        [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--no-compile",
         "--target", str(extras / "usr/lib/python3/dist-packages"), "--requirement", str(extras / PYTHON_PACKAGES)],
        what="pip install of the guest's Python packages",
    )  # fmt: skip


def _compile_windows_programs(extras: Path) -> None:
    sources = extras / WINDOWS_SOURCES
    target = extras / "usr/lib/envd/windows"
    target.mkdir(parents=True)
    for program, names in WINDOWS_PROGRAMS.items():
        _run(
            [f"{_MINGW}gcc", *_COMPILER_FLAGS, "-o", str(target / program), *(str(sources / name) for name in names),
             "-lole32", "-luuid"],
            what=f"compiling {program}",
        )  # fmt: skip


#: Lines with `Unpacking` or `Setting up` in the smallest build. Affects only the progress bar.
_FEWEST_LINES = 900

#: How mmdebstrap begins its line about a step, and the step in our words. Its other lines are not shown.
_STEPS = {
    "running apt-get update": "reading the lists of packages",
    "downloading packages": "downloading packages",
    "extracting archives": "extracting packages",
    "installing essential packages": "installing the base system",
    "installing remaining packages": "installing packages",
    "running --extract-hook": "copying our files",
    "running special hook: tar-in": "copying our files",
    "running --customize-hook": "configuring",
    "cleaning": "removing what only the installation needed",
    "creating tarball": "writing the archive",
}


class _InstallOutput:
    """Converts mmdebstrap's output to progress, and finds the cause of a failure in it."""

    _SCRIPT = "envd: script: "
    _TAIL_LINES = 25

    def __init__(self, report: Progress) -> None:
        self._report = report
        self._count = 0
        #: Lines with `Unpacking` or `Setting up` to expect. The system itself comes first and is small; then apt says
        #: how many packages it installs.
        self._expected = _FEWEST_LINES
        self._missing: list[str] = []
        self._script_lines: list[str] | None = None

    def __call__(self, line: str) -> None:
        if self._script_lines is not None:
            self._script_lines.append(line.rstrip())
        if match := re.search(r"(\d+) newly installed", line):
            self._expected = max(self._expected, self._count + 2 * int(match[1]))
        elif match := re.search(r"E: Unable to locate package (\S+)|E: (?:Package|Version) '(\S+?)'", line):
            self._missing.append(match[1] or match[2])
        elif match := re.match(r"(?:Unpacking|Setting up) (\S+)", line):
            self._count += 1
            self._report(f"installing {match[1].partition(':')[0]}", self._fraction)
        elif line.startswith(f"{self._SCRIPT}started"):
            self._script_lines = []
            self._report("running the script", self._fraction)
        elif step := next((step for begin, step in _STEPS.items() if line.startswith(f"I: {begin}")), None):
            self._report(step, self._fraction)

    @property
    def _fraction(self) -> float:
        return 0.1 + 0.7 * min(1.0, self._count / self._expected)

    def explain(self, recipe: ImageRecipe, error: ImageError) -> ImageError:
        """Return the error of a failed installation that names its cause, if the output has it."""
        if self._missing:
            named = ", ".join(dict.fromkeys(self._missing))
            archive = recipe.mirror or f"the archive of {recipe.distribution} {recipe.suite}"
            components = ", ".join(recipe.components)
            return ImageError(
                f"package {named}: not in {archive} ({components}); check the name with `apt-cache policy`"
            )
        lines = self._script_lines or []
        for index, line in enumerate(lines):
            if line.startswith(self._SCRIPT):
                tail = "\n".join(lines[max(0, index - self._TAIL_LINES) : index])
                return ImageError(f"--run: the script {line.removeprefix(self._SCRIPT)}:\n{tail or 'no output'}")
        return error


def _copy_kernel(root: Path, directory: Path) -> None:
    """Copy the kernel and its initrd from the root: QEMU starts them directly, without a boot loader."""
    for pattern, name in (("vmlinuz-*", "vmlinuz"), ("initrd.img-*", "initrd.img")):
        found = sorted((root / "boot").glob(pattern))
        if len(found) != 1:
            raise ImageError(f"new root file system: {len(found)} files boot/{pattern}, expected 1")
        shutil.copyfile(found[0], directory / name)


def _installed_packages(directory: Path) -> list[str]:
    """Return the packages of dpkg's status file in a directory."""
    query = ["dpkg-query", f"--admindir={directory}", "-W", "-f", "${Package} ${Version}\n"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()


def _make_disk(recipe: ImageRecipe, root: Path, disk: Path, scratch: Path) -> None:
    raw = scratch / "disk.raw"
    with raw.open("wb") as stream:
        stream.truncate(recipe.disk_mib << 20)
    # A fixed UUID and hash seed, so that equal roots give equal disks.
    uuid = "6f2d1e5c-0d4b-4b0e-9a57-0e5d5c1d2a01"
    _run(
        ["mke2fs", "-q", "-t", "ext4", "-L", "envd", "-U", uuid, "-E", f"hash_seed={uuid},lazy_itable_init=0",
         "-m", "0", "-d", str(root), str(raw)],
        what="mke2fs",
    )  # fmt: skip
    _run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), str(disk)], what="qemu-img convert")
