"""Writes the media of an installation: answer file, answer disc, boot disc and an empty disk."""

import secrets
import subprocess
from dataclasses import dataclass
from pathlib import Path

from envd.base.errors import ImageError
from envd.base.tools import run_tool
from envd.hypervisor.machine import DiskImage, Drive, Firmware, GuestOs, Hardware
from envd.images.windows.answer_disc import write_answer_disc
from envd.images.windows.answers import ANSWER_FILE, answer_file
from envd.images.windows.disc import BootPatch, open_disc
from envd.images.windows.plan import BuildPlan

_PASSWORD_BYTES = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """Files that an installation starts from."""

    answers: Path
    """The answer file, which is also on the answer disc."""
    boot_disc: Path
    answer_disc: Path
    disk: Path
    """An empty disk."""

    def image(self, plan: BuildPlan) -> DiskImage:
        """Return what the machine boots from: the empty disk, then the discs."""
        return DiskImage(
            name="windows-setup",
            digest=plan.patch.data.hex(),
            disk=self.disk,
            os=GuestOs.WINDOWS,
            hardware=Hardware.WINDOWS,
            firmware=Firmware.UEFI,
            has_guestd=False,
            drives=(
                Drive(path=self.boot_disc, is_cdrom=True),
                Drive(path=self.answer_disc, disk_format="raw", is_cdrom=True),
            ),
        )


def write_media(plan: BuildPlan, directory: Path) -> Media:
    media = Media(
        answers=directory / ANSWER_FILE,
        boot_disc=directory / "boot.qcow2",
        answer_disc=directory / "answers.iso",
        disk=directory / "empty.qcow2",
    )
    answers = answer_file(plan.settings, password=secrets.token_urlsafe(_PASSWORD_BYTES))
    media.answers.touch(mode=0o600)
    media.answers.write_bytes(answers)
    write_boot_disc(media.boot_disc, plan.options.iso, plan.patch)
    with open_disc(plan.options.virtio_win) as drivers:
        write_answer_disc(
            media.answer_disc,
            answers=answers,
            guest_files=plan.guest_files,
            drivers=drivers,
            is_server=plan.edition.release.is_server,
            programs=plan.programs,
        )
    qemu_img("create", "-q", "-f", "qcow2", str(media.disk), f"{plan.options.disk_gib}G")
    return media


def qemu_img(*arguments: str) -> None:
    """Run qemu-img. Raises: ImageError."""
    run_tool(["qemu-img", *arguments], what=f"disk: qemu-img {arguments[0]}", error=ImageError)


def write_boot_disc(path: Path, iso: Path, patch: BootPatch) -> None:
    """Write the Windows ISO with another entry in its boot catalogue, as an overlay of a few KiB on top of the ISO.

    Windows' ISOs wait for a key before they boot, and return to the firmware without one. They also have a boot image
    that does not wait. The overlay names that one; the ISO file stays as it is.
    """
    data = path.with_name("patch")
    data.write_bytes(patch.data)
    _run("qemu-img", "create", "-q", "-f", "qcow2", "-b", str(iso.resolve()), "-F", "raw", path.name, cwd=path.parent)
    # qemu-io splits its commands at spaces, so they must not contain our paths.
    command = f"write -q -s {data.name} {patch.offset} {len(patch.data)}"
    _run("qemu-io", "-f", "qcow2", "-c", command, path.name, cwd=path.parent)
    data.unlink()


def _run(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    # qemu-io reports a failed command in its output only.
    if done.returncode != 0 or done.stdout.strip():
        message = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise ImageError(f"boot disc: {command[0]} failed: {message}; check the free space and the package qemu-utils")
