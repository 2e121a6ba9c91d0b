"""Finds and removes what previous daemons with this state directory left on the host.

Only things with this owner's mark are touched: domains and processes carry it, files are in the state directory.
"""

import logging
import os
import shutil
import signal
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import libvirt

from envd.base.errors import HypervisorError
from envd.hypervisor.machine import Leftover, LeftoverKind
from envd.hypervisor.qemu.connection import LibvirtLink
from envd.hypervisor.qemu.domain_xml import MachineFiles, Mark, read_mark
from envd.hypervisor.qemu.machine import LibvirtMachine, destroy_domain
from envd.hypervisor.qemu.processes import marked_processes, tpm_processes
from envd.hypervisor.qemu.snapshots.snapshot import LibvirtSnapshot
from envd.hypervisor.qemu.snapshots.templates import TemplateStore

logger = logging.getLogger(__name__)


class Reaper:
    """Leftovers of one state directory: everything that is not in `machines`, `captures` or the template store."""

    def __init__(
        self,
        link: LibvirtLink,
        *,
        owner: str,
        machines: Mapping[str, LibvirtMachine],
        machines_dir: Path,
        captures: Collection[LibvirtSnapshot],
        captures_dir: Path,
        store: TemplateStore,
    ) -> None:
        self._link = link
        self._owner = owner
        self._machines = machines
        self._machines_dir = machines_dir
        self._captures = captures
        self._captures_dir = captures_dir
        self._store = store

    async def leftovers(self) -> list[Leftover]:
        """Return everything with our mark that belongs to no machine or capture of this daemon.

        Raises:
            HypervisorError: libvirt or the state directory cannot be read.
        """
        try:
            return await self._link.call(self._find)
        except OSError as error:
            raise HypervisorError(f"state directory {self._machines_dir.parent}: cannot be read: {error}") from error

    async def remove(self, leftover: Leftover) -> None:
        """Remove a leftover, if it still is one. Raises: HypervisorError."""
        if leftover in await self.leftovers():
            await self._link.call(self._remove, leftover)

    async def reap(self) -> list[str]:
        """Remove all leftovers; returns the ids of the machines among them. Raises: HypervisorError."""
        found = await self.leftovers()
        for leftover in found:
            await self._link.call(self._remove, leftover)
        if not self._machines:
            # No machine is in use or being frozen, so incomplete templates are leftovers too.
            await self._link.call(self._store.sweep)
        not_machines = {LeftoverKind.CAPTURE, LeftoverKind.MEMORY_FILE}
        return sorted({leftover.name for leftover in found if leftover.kind not in not_machines})

    def _find(self) -> list[Leftover]:
        # First everything on the host, then what is in use, so that a machine made meanwhile is not a leftover.
        domains = {mark.machine_id for _, mark in self._domains()}
        processes = {*marked_processes(self._owner).values(), *tpm_processes(self._owner).values()} - domains
        directories = sorted(self._machines_dir.iterdir())
        captures = {path.name for path in self._captures_dir.glob("*")}
        used = {machine.machine_id for machine in list(self._machines.values())}
        memories = self._store.stray_memories(used)
        captures -= {capture.files.directory.name for capture in list(self._captures)}
        return [
            *(Leftover(LeftoverKind.DOMAIN, machine_id) for machine_id in sorted(domains - used)),
            *(Leftover(LeftoverKind.PROCESS, machine_id) for machine_id in sorted(processes - used)),
            *(Leftover(_directory_kind(path), path.name) for path in directories if path.name not in used),
            *(Leftover(LeftoverKind.CAPTURE, name) for name in sorted(captures)),
            *(Leftover(LeftoverKind.MEMORY_FILE, path.name) for path in sorted(memories)),
        ]

    def _remove(self, leftover: Leftover) -> None:
        name = leftover.name
        match leftover.kind:
            case LeftoverKind.DOMAIN:
                for domain, mark in self._domains():
                    if mark.machine_id == name:
                        destroy_domain(domain)
            case LeftoverKind.PROCESS:
                for pid, machine_id in {**marked_processes(self._owner), **tpm_processes(self._owner)}.items():
                    if machine_id == name:
                        logger.warning("machine %s: killing process %d, unknown to libvirt", name, pid)
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            case LeftoverKind.OVERLAY | LeftoverKind.SOCKET:
                shutil.rmtree(self._machines_dir / name, ignore_errors=True)
            case LeftoverKind.CAPTURE:
                shutil.rmtree(self._captures_dir / name, ignore_errors=True)
            case LeftoverKind.MEMORY_FILE:
                (self._store.memory_dir / name).unlink(missing_ok=True)
            case LeftoverKind.DATABASE_ROW:
                raise ValueError(f"{leftover}: not a leftover of a hypervisor")

    def _domains(self) -> list[tuple[Any, Mark]]:
        """Return the domains with our mark."""
        found = []
        for domain in self._link.connection.listAllDomains(0):
            mark = _mark_of(domain)
            if mark is not None and mark.owner == self._owner:
                found.append((domain, mark))
        return found


def _mark_of(domain: Any) -> Mark | None:
    """Return a domain's mark; None if it has none or has ended."""
    try:
        return read_mark(domain.XMLDesc(0))
    except libvirt.libvirtError:
        return None


def _directory_kind(machine_directory: Path) -> LeftoverKind:
    has_overlay = MachineFiles(directory=machine_directory).overlay.exists()
    has_socket = any(machine_directory.glob("*.sock"))
    return LeftoverKind.SOCKET if has_socket and not has_overlay else LeftoverKind.OVERLAY
