"""Makes the boot disc: the Windows ISO with another entry in its boot catalogue, as an overlay of a few KiB.

Windows' ISOs wait for a key before they boot, and return to the firmware without one. They also have a boot image that
does not wait. The overlay names that one; the ISO file stays as it is.
"""

import subprocess
from pathlib import Path

from envd.base.errors import ImageError
from envd.images.windows.disc import BootPatch


def write_boot_disc(path: Path, iso: Path, patch: BootPatch) -> None:
    """Write the overlay, a qcow2 file on top of the ISO. Raises: ImageError: a tool failed."""
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
