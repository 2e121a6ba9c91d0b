"""Forks a template with QEMU alone and times it: a lower bound for every driver of QEMU.

QEMU gets the command line that libvirt gave it for an existing fork, with its own files and monitor, and loads the same
state. Start and end are those of `LibvirtHypervisor.fork`: from nothing to a paused machine whose state is loaded and
whose forwarded port is known. What libvirt would do in addition is left out.
"""

import asyncio
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qemu.qmp import QMPClient, QMPError

from envd.base.errors import HypervisorError
from envd.hypervisor.machine import Firmware, Machine
from envd.hypervisor.qemu.domain_xml import MachineFiles, parse_forwarded_port
from envd.hypervisor.qemu.machine import LibvirtMachine
from envd.hypervisor.qemu.monitor import IGNORE_SHARED_MEMORY
from envd.hypervisor.qemu.processes import owner_of
from envd.hypervisor.qemu.snapshots.files import SnapshotFiles, copy_file
from envd.hypervisor.qemu.tpm import Tpm
from envd.hypervisor.qemu.user import QemuUser

_TIMEOUT_S = 60.0
#: As often as the libvirt driver polls.
_POLL_S = 0.002


def time_raw_fork(model: Machine, machine_id: str) -> float:
    """Fork the template of `model` with QEMU alone, and end the fork; return the milliseconds of the fork.

    Blocks; nothing is left afterwards.
    """
    if not isinstance(model, LibvirtMachine) or model.snapshot is None or model.snapshot.patch is not None:
        raise HypervisorError(f"machine {model.machine_id}: not a fork of a template of the libvirt driver")
    directory = model.files.directory.parent / machine_id
    tpm: Tpm | None = None
    try:
        begin_s = time.monotonic()
        directory.mkdir()
        files = MachineFiles(directory=directory)
        tpm = _copy_files(model, model.snapshot.files, files)
        with model.snapshot.files.devices.open("rb") as devices:
            process = _spawn(model, directory, devices_fd=devices.fileno())
            try:
                usernet = asyncio.run(_load(directory, devices_fd=devices.fileno()))
                if parse_forwarded_port(usernet) is None and model.spec.image.has_guestd:
                    raise HypervisorError(f"machine {machine_id}: QEMU does not forward a port to guestd")
                end_s = time.monotonic()
            finally:
                process.kill()
                process.wait()
    except (OSError, QMPError) as error:
        log = _tail(directory / "qemu.log")
        raise HypervisorError(f"machine {machine_id}: QEMU alone could not fork it: {error!r}; {log}") from error
    finally:
        if tpm is not None:
            tpm.end()
        shutil.rmtree(directory, ignore_errors=True)
    return (end_s - begin_s) * 1000


def raw_arguments(arguments: Sequence[str], *, model: Path, own: Path, monitor_fd: int, console_fd: int) -> list[str]:
    """Return the QEMU command line for a separate machine, derived from that of one started by libvirt.

    Args:
        model: Directory of libvirt's machine, named by its id.
        own: Directory of the new machine.
        monitor_fd: A listening socket that QEMU inherits.
        console_fd: The file for the guest's serial console, also inherited.
    """
    words = iter(arguments)
    kept = []
    for word in words:
        # A key for libvirt's own use, in a file that libvirt may remove.
        if word == "-object" and '"masterKey0"' in (value := next(words)):
            continue
        if word == "-object":
            kept += [word, value]
        elif word.startswith("socket,id=charmonitor,"):
            kept.append(f"socket,id=charmonitor,fd={monitor_fd},server=on,wait=off")
        elif word == "-add-fd":
            kept += [word, re.sub(r"(?<=,fd=)\d+", str(console_fd), next(words))]
        elif word.startswith("guest=envd-"):
            kept.append(word.replace(f"-{model.name},", f"-{own.name},"))
        else:
            kept.append(word.replace(f"{model}/", f"{own}/"))
    return kept


def _copy_files(model: LibvirtMachine, template: SnapshotFiles, files: MachineFiles) -> Tpm | None:
    """Create the files of a new machine; return its TPM, if the model has one."""
    image = model.spec.image
    overlays = files.overlays(image)
    for seed, overlay in zip(template.seeds(len(overlays)), overlays, strict=True):
        copy_file(seed, overlay)
    if image.firmware is Firmware.UEFI:
        copy_file(template.firmware_vars, files.firmware_vars)
    if not image.has_tpm:
        return None
    state_dir = files.directory.parent.parent
    user = QemuUser(account=None, why="QEMU alone runs as this process's user")
    return Tpm.start(files, owner=owner_of(state_dir), machine_id=files.directory.name, state=None, user=user)


def _spawn(model: LibvirtMachine, directory: Path, *, devices_fd: int) -> subprocess.Popen[bytes]:
    """Start QEMU on a monitor socket that already listens."""
    command = Path(f"/proc/{model.pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    with (
        socket.socket(socket.AF_UNIX) as listener,
        (directory / "qemu.log").open("wb") as log,
        (directory / model.files.console_log.name).open("ab") as console,
    ):
        listener.bind(str(directory / "monitor.sock"))
        listener.listen(1)
        monitor_fd, console_fd = listener.fileno(), console.fileno()
        return subprocess.Popen(
            raw_arguments(
                command, model=model.files.directory, own=directory, monitor_fd=monitor_fd, console_fd=console_fd
            ),
            pass_fds=[monitor_fd, console_fd, devices_fd],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


async def _load(directory: Path, *, devices_fd: int) -> str:
    """Load a template's state, as the libvirt driver does; return QEMU's `info usernet`."""
    client = QMPClient(directory.name)
    async with asyncio.timeout(_TIMEOUT_S):
        await client.connect(str(directory / "monitor.sock"))
        try:
            await client.execute("migrate-set-capabilities", IGNORE_SHARED_MEMORY)
            await client.execute("migrate-incoming", {"uri": f"fd:{devices_fd}"})
            while (migration := await _query(client, "query-migrate")).get("status") != "completed":
                if migration.get("status") in {"failed", "cancelled"}:
                    reason = migration.get("error-desc", migration["status"])
                    raise HypervisorError(f"machine {directory.name}: the state could not be loaded: {reason}")
                await asyncio.sleep(_POLL_S)
            return str(await client.execute("human-monitor-command", {"command-line": "info usernet"}))
        finally:
            await client.disconnect()


async def _query(client: QMPClient, command: str) -> dict[str, Any]:
    response: Any = await client.execute(command)
    return dict(response)


def _tail(log: Path) -> str:
    try:
        return log.read_text(errors="replace").strip()[-500:]
    except OSError:
        return ""
