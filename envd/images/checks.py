"""The checks of `envd doctor` for images, and for what the images in use need of this host."""

import os
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from cuaenv.cli.terminal import program
from envd.base.checks import HostCheck, as_root, check_tool, fail, install_fix, ok, warn
from envd.base.config import DEFAULT_IMAGE, Config
from envd.base.errors import ConfigError, EnvdError, ImageNotFound
from envd.hypervisor.backends import backend_of
from envd.hypervisor.machine import DiskImage, Firmware, Hardware
from envd.hypervisor.oci.backend import is_oci
from envd.hypervisor.oci.ids import IdMap, own_ids
from envd.hypervisor.oci.images import obstacle, unpacked_directory, unpacking_obstacle
from envd.hypervisor.qemu.backend import is_embedded
from envd.hypervisor.qemu.host import choose_user_for, find_firmware
from envd.hypervisor.qemu.tpm import PROGRAM as SWTPM
from envd.images.catalogue import Image, ImageCatalogue

#: An evaluation of a client lasts 90 days.
_EVALUATION_WARN_DAYS = 15


def check_images(config: Config, *, now: datetime) -> HostCheck:
    """Check that the catalogue is readable and has the pools' images, and that no evaluation ends soon."""
    catalogue = ImageCatalogue(config.cache_dir)
    try:
        names = sorted({image.name for image in catalogue.list()})
    except EnvdError as error:
        return fail("images", str(error), fix="remove the unreadable image")
    missing = sorted({pool.image for pool in config.pools.values()} - set(names))
    if missing and backend_of(config.hypervisor.uri).capabilities.needs_images:
        return fail(
            "images",
            f"images of pools are missing: {', '.join(missing)}",
            fix=f"{_build('desktop')} or `envd image import FILE`",
        )
    if not names:
        return warn("images", "no images", fix=_build("desktop"))
    used = {pool.image for pool in config.pools.values()} or set(names)
    if expiring := _expiring([catalogue.get(name) for name in names if name in used], now=now):
        return warn("images", "; ".join(expiring), fix=f"build it again with {_build('windows --rebuild')}")
    return ok("images", ", ".join(names))


def check_unpacking(config: Config) -> HostCheck:
    """Check that containers can run the pools' images, whose files are unpacked for them."""
    name = "unpacking"
    if not is_oci(config.hypervisor.uri):
        return ok(name, "only containers need it")
    catalogue = ImageCatalogue(config.cache_dir)
    try:
        used = {pool.image for pool in config.pools.values()} or {DEFAULT_IMAGE}
        images = [catalogue.disk_image(image) for image in sorted(used)]
        ids = own_ids()
    except ImageNotFound:
        return ok(name, "no image yet")  # `check_images` reports it
    except EnvdError as error:
        return fail(name, str(error), fix="see the message")
    problems = [problem for image in images if (problem := obstacle(image) or unpacking_obstacle(image, ids))]
    if problems:
        return fail(name, "; ".join(problems), fix="see the message")
    return ok(name, ", ".join(f"{image.name}: {_unpacked(image, ids)}" for image in images))


def _unpacked(image: DiskImage, ids: IdMap) -> str:
    return "unpacked" if unpacked_directory(image, ids).is_dir() else "can be unpacked"


def check_firmware(config: Config) -> HostCheck:
    """Check that images that boot by UEFI have a firmware."""
    firmware = find_firmware()
    if firmware is not None:
        return ok("firmware", str(firmware))
    if users := _images_with(config, lambda image: image.firmware == Firmware.UEFI.value):
        return fail("firmware", f"no OVMF, but images boot by UEFI: {users}", fix=install_fix("ovmf"))
    return warn("firmware", "no OVMF; images that boot by UEFI need it", fix=install_fix("ovmf"))


def check_tpm(config: Config) -> HostCheck:
    """Check that machines with a TPM have its emulator."""
    users = _images_with(config, lambda image: image.hardware == Hardware.WINDOWS.value)
    purpose = f"the machines of {users} have a TPM" if users else "machines with `--hardware windows` need it"
    return check_tool(SWTPM, package="swtpm", purpose=purpose, needed=bool(users))


def check_qemu_user(config: Config) -> HostCheck:
    """Check the user that QEMU runs as: a guest that takes over a QEMU of root controls the host."""
    if not is_embedded(config.hypervisor.uri):
        return ok("qemu_user", "QEMU is not run by envd's embedded driver")
    memory_dir = config.hypervisor.template_memory_dir
    directories = [config.state_dir, config.template_dir, *([memory_dir] if memory_dir else [])]
    catalogue = ImageCatalogue(config.cache_dir)
    try:
        names = {pool.image for pool in config.pools.values()} or {image.name for image in catalogue.list()}
        images = [catalogue.disk_image(name) for name in sorted(names)]
    except EnvdError as error:
        return warn("qemu_user", f"unknown: {error}", fix="see the check of images")
    try:
        chosen = choose_user_for(config.hypervisor.qemu_user, directories, images)
    except ConfigError as error:
        return fail("qemu_user", str(error), fix="see the message and docs/deploy.md")
    if chosen.account is not None:
        return ok("qemu_user", f"QEMU runs as {chosen.account.name}: {chosen.why}")
    if os.geteuid() != 0:
        return ok("qemu_user", f"QEMU runs as {chosen.why}")
    return warn(
        "qemu_user",
        f"QEMU runs as root: {chosen.why}",
        fix="chgrp kvm /dev/kvm; chmod 660 /dev/kvm"
        if chosen.why.endswith("/dev/kvm")
        else "fix the reason above; state_dir and cache_dir can be /var/lib/envd and /var/cache/envd",
    )


def check_mmdebstrap() -> HostCheck:
    """Check the program that `envd image build` makes Debian systems with."""
    purpose = "`envd image build` needs it"
    return check_tool("mmdebstrap", package="mmdebstrap", purpose=purpose, needed=False)


def _images_with(config: Config, wanted: Callable[[Image], bool]) -> str:
    """Return the names of the images that need something, of the pools or else of the catalogue."""
    try:
        images = [image for image in ImageCatalogue(config.cache_dir).list() if wanted(image)]
    except EnvdError:
        return ""  # `check_images` reports it.
    used = {pool.image.partition("@")[0] for pool in config.pools.values()}
    return ", ".join(sorted({image.name for image in images if not used or image.name in used}))


def _expiring(images: Iterable[Image], *, now: datetime) -> list[str]:
    """Name the images whose evaluation has ended or ends soon."""
    found = []
    for image in images:
        if image.expire_time is not None and (left_days := (image.expire_time - now).days) < _EVALUATION_WARN_DAYS:
            when = f"ends in {left_days} days" if left_days >= 0 else "has ended"
            found.append(f"the evaluation of Windows in image {image.name} {when} ({image.expire_time:%Y-%m-%d})")
    return found


def _build(image: str) -> str:
    # sudo does not look for programs in a virtual environment.
    envd = program("envd") if os.geteuid() == 0 else Path(sys.executable).with_name("envd")
    return f"`{as_root(f'{envd} image build {image}')}`"
