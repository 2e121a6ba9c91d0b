"""Machines on this host's QEMU through libvirt, with one domain and one directory per machine.

Supports `qemu:///system` (a libvirtd on the host) and `qemu:///embed?root=DIR` (libvirt's QEMU driver inside this
process). Invariant: a machine's directory is created before its domain and removed after it, and both carry our owner's
mark, so everything that a killed daemon leaves can be found and removed, and nothing else is touched.
"""

import asyncio
import logging
import os
import re
from collections.abc import Collection, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4
from weakref import WeakSet

import libvirt

from envd.base.aio import shielded
from envd.base.config import HypervisorConfig
from envd.base.errors import ConfigError, EnvdError, HypervisorError, MachineLost
from envd.hypervisor.machine import Accelerator, DiskImage, Leftover, Machine, MachineSpec, Snapshot, load_or_destroy
from envd.hypervisor.qemu.accelerator import choose_accelerator
from envd.hypervisor.qemu.backend import CAPABILITIES
from envd.hypervisor.qemu.capture import Freezer, capture, load_state
from envd.hypervisor.qemu.connection import LibvirtLink
from envd.hypervisor.qemu.domain_xml import domain_name, domain_xml, security_labels_of
from envd.hypervisor.qemu.host import (
    NAME_FIX,
    check_path_lengths,
    choose_user_for,
    dotted_version,
    embedded_root,
    ensure_owner,
    prepare_embedded,
    prepare_firmware,
    processor_id,
    slow_name,
)
from envd.hypervisor.qemu.machine import DESTROYED, LibvirtMachine, destroy_domain
from envd.hypervisor.qemu.reaper import Reaper, adopt, load_backing
from envd.hypervisor.qemu.saved import restore, save
from envd.hypervisor.qemu.snapshots.files import QemuFiles, copy_overlay, create_overlay
from envd.hypervisor.qemu.snapshots.snapshot import LibvirtSnapshot, SnapshotRef
from envd.hypervisor.qemu.snapshots.templates import QemuTemplateStore
from envd.hypervisor.qemu.tpm import Tpm
from envd.hypervisor.qemu.user import QemuUser

logger = logging.getLogger(__name__)

_DEFAULTS = HypervisorConfig()


class LibvirtHypervisor:
    """Implements `envd.hypervisor.machine.Hypervisor`."""

    capabilities = CAPABILITIES

    def __init__(
        self,
        link: LibvirtLink,
        *,
        uri: str,
        state_dir: Path,
        owner: str,
        accelerator: Accelerator,
        why: str,
        store: QemuTemplateStore,
        tcg_cache_mib: int,
        qemu_user: QemuUser,
    ) -> None:
        self._link = link
        self._owner = owner
        self.accelerator = accelerator
        self._tcg_cache_mib = tcg_cache_mib
        self._qemu_user = qemu_user
        self._security_labels: dict[str, str] = {}
        if not link.is_embedded:
            capabilities = link.connection.getCapabilities()
            self._security_labels = security_labels_of(capabilities, user_id=os.geteuid(), group_id=os.getegid())
        self._machines_dir = state_dir / "machines"
        self._machines: dict[str, LibvirtMachine] = {}
        """Machines by domain name."""
        self._store = store
        self._captures_dir = state_dir / "captures"
        self._captures: WeakSet[LibvirtSnapshot] = WeakSet()
        self._reaper = Reaper(
            link=link,
            owner=owner,
            machines=self._machines,
            machines_dir=self._machines_dir,
            captures=self._captures,
            captures_dir=self._captures_dir,
            store=store,
        )
        root = embedded_root(uri)
        self._logs = root and root / "log" / "qemu"
        """Directory with a file for each start of a QEMU; only of an embedded driver."""
        libvirt_version = dotted_version(libvirt.getVersion())
        qemu_version = dotted_version(link.connection.getVersion())
        self._freezer = Freezer(
            store,
            accelerator=accelerator,
            versions=f"libvirt {libvirt_version}, QEMU {qemu_version}",
            cpu=processor_id() if accelerator is Accelerator.KVM else "",
        )
        self.description = (
            f"libvirt {libvirt_version} at {uri}, QEMU {qemu_version}, accelerator {accelerator.value} ({why})"
        )
        if qemu_user.account is not None:
            self.description += f", QEMU run by {qemu_user.account.name}"
        link.subscribe(on_domain_ended=self.on_domain_ended, on_reconnected=self.on_reconnected)

    @classmethod
    async def open(
        cls,
        settings: HypervisorConfig = _DEFAULTS,
        *,
        state_dir: Path,
        cache_dir: Path | None = None,
        images: Iterable[DiskImage],
    ) -> "LibvirtHypervisor":
        """Connect to libvirt.

        Args:
            state_dir: Directory of machines' files. Its path must be short, because Unix sockets are below it.
            cache_dir: Keeps libvirt's QEMU capabilities, about 8 s to probe, for all state directories.
            images: Images that machines will boot from, which the user that runs QEMU must be able to read.

        Raises:
            ConfigError: The accelerator does not work on this host, a path is too long, or the user cannot run QEMU.
            HypervisorError: libvirt failed.
        """
        state_dir = state_dir.resolve()
        uri = settings.uri or f"qemu:///embed?root={state_dir}/libvirt"
        check_path_lengths(uri, state_dir)
        (state_dir / "machines").mkdir(parents=True, exist_ok=True)
        owner = ensure_owner(state_dir)
        template_dir = settings.template_dir or state_dir / "templates"
        store = QemuTemplateStore(
            template_dir,
            # Other daemons that share the directories must not remove the memory of a machine that is being frozen.
            memory_dir=(settings.template_memory_dir or template_dir / "memory") / owner,
            limit_bytes=settings.template_limit_bytes,
        )
        accelerator, why = await choose_accelerator(settings.accelerator)
        user = QemuUser(account=None, why="set in each domain's XML")
        if urlsplit(uri).path == "/embed":
            user = choose_user_for(settings.qemu_user, (state_dir, store.directory, store.memory_dir), images)
        elif settings.qemu_user:
            raise ConfigError(
                f"hypervisor.qemu_user: only for the embedded driver, but {uri} runs QEMU as envd's user; remove it"
            )
        for directory in (state_dir, store.directory, store.memory_dir):
            user.restrict(directory)
        if problem := await asyncio.to_thread(slow_name):
            logger.warning("%s; %s", problem, NAME_FIX)
        link = await LibvirtLink.open(uri, prepare=partial(prepare_embedded, uri, cache_dir, user))
        return cls(
            link,
            uri=uri,
            state_dir=state_dir,
            owner=owner,
            accelerator=accelerator,
            why=why,
            store=store,
            tcg_cache_mib=settings.tcg_cache_mib,
            qemu_user=user,
        )

    @property
    def problem(self) -> str:
        """Why libvirt cannot be reached now; empty while it can."""
        return self._link.problem

    async def create(self, spec: MachineSpec) -> LibvirtMachine:
        """See `Hypervisor.create`. Raises: HypervisorUnavailable: libvirt cannot be reached; HypervisorError."""
        await self._link.available()
        return await self._destroy_if_cancelled(self._start(spec, None))

    async def fork(self, snapshot: Snapshot, machine_id: str) -> LibvirtMachine:
        """See `Hypervisor.fork`. Raises: TemplateCorrupt, HypervisorUnavailable, HypervisorError."""
        machine = await self.prepare(snapshot, machine_id)
        await load_or_destroy(self, machine, snapshot)
        return machine

    async def prepare(self, snapshot: Snapshot, machine_id: str) -> LibvirtMachine:
        """See `Hypervisor.prepare`. Raises: TemplateCorrupt, HypervisorUnavailable, HypervisorError."""
        own = await self._forkable(snapshot, machine_id)
        await self._link.available()
        return await self._destroy_if_cancelled(self._start(replace(own.spec, machine_id=machine_id), own.template))

    async def load(self, machine: Machine, snapshot: Snapshot) -> None:
        """See `Hypervisor.load`. Raises: TemplateCorrupt, MachineLost, HypervisorError."""
        waiting = _own_machine(machine)
        try:
            own = await self._forkable(snapshot, waiting.machine_id)
            await shielded(load_state(waiting, own, link=self._link))
        except (EnvdError, OSError) as error:
            waiting.mark_lost(f"its state could not be loaded: {error}")
            if isinstance(error, OSError):
                raise HypervisorError(
                    f"machine {waiting.machine_id}: its state could not be loaded: {error}"
                ) from error
            raise
        logger.info("machine %s: forked from %r", waiting.machine_id, own)

    async def _forkable(self, snapshot: Snapshot, machine_id: str) -> LibvirtSnapshot:
        own = _own_snapshot(snapshot)
        if own.is_discarded:
            raise HypervisorError(f"machine {machine_id}: {own!r} was discarded; no more forks are allowed")
        await self.check_intact(own)
        return own

    async def check_intact(self, snapshot: Snapshot) -> None:
        """See `Hypervisor.check_intact`. Raises: TemplateCorrupt."""
        await self._link.call(_own_snapshot(snapshot).check_intact)

    async def freeze(self, machine: Machine, *, notes: Mapping[str, str]) -> LibvirtSnapshot:
        """See `Hypervisor.freeze`. Raises: MachineLost, HypervisorError."""
        return await shielded(self._freeze(_own_machine(machine), notes))

    async def _freeze(self, machine: LibvirtMachine, notes: Mapping[str, str]) -> LibvirtSnapshot:
        if machine.snapshot is not None:
            raise HypervisorError(f"machine {machine.machine_id}: a fork cannot become a template; freeze a booted one")
        try:
            await machine.pause()
            return await self._freezer.freeze(machine, dict(notes), link=self._link)
        except OSError as error:
            raise HypervisorError(f"machine {machine.machine_id}: could not be frozen: {error}") from error
        finally:
            await machine.destroy()

    def making_template(self, spec: MachineSpec) -> AbstractAsyncContextManager[None]:
        return self._store.booting(self._freezer.key(spec))

    async def find_template(self, spec: MachineSpec) -> LibvirtSnapshot | None:
        """See `Hypervisor.find_template`. Raises: TemplateCorrupt."""
        return await self._link.call(self._freezer.find, spec)

    async def capture(self, machine: Machine) -> LibvirtSnapshot:
        """See `Hypervisor.capture`. Raises: NotForkable, MachineLost, HypervisorUnavailable, HypervisorError."""
        await self._link.available()
        capturing = capture(_own_machine(machine), self._captures_dir, link=self._link)
        captured = await shielded(capturing, undo=LibvirtSnapshot.discard)
        self._captures.add(captured)
        return captured

    async def save(self, snapshot: Snapshot, directory: Path, *, shares_files: bool = False) -> None:
        """See `Hypervisor.save`. Raises: OSError, HypervisorError."""
        saving = partial(save, _own_snapshot(snapshot), directory, shares_files=shares_files)
        await shielded(self._link.call(saving))

    async def restore(self, template: Snapshot, directory: Path, *, shares_files: bool = False) -> LibvirtSnapshot:
        """See `Hypervisor.restore`. Raises: CheckpointCorrupt, HypervisorError."""
        own = _own_snapshot(template).template
        restoring = self._link.call(partial(restore, own, directory, self._captures_dir, shares_files=shares_files))
        restored = await shielded(restoring, undo=LibvirtSnapshot.discard)
        self._captures.add(restored)
        return restored

    async def adopt(self, machine_ids: Collection[str]) -> dict[str, Machine]:
        """Adopt machines of a libvirtd; those of an embedded driver end with their daemon."""
        adopted: dict[str, Machine] = {}
        if self._link.is_embedded:
            return adopted
        loaded: dict[SnapshotRef, LibvirtSnapshot] = {}
        load = partial(
            load_backing, loaded=loaded, freezer=self._freezer, captures_dir=self._captures_dir, link=self._link
        )
        for machine_id in sorted(machine_ids):
            name = domain_name(self._owner, machine_id)
            try:
                machine = await adopt(
                    await self._link.call(self._link.connection.lookupByName, name),
                    self._machines_dir / machine_id,
                    load=load,
                    link=self._link,
                    on_destroyed=self._forget,
                )
                if machine.spec.image.has_tpm:
                    machine.tpm = await self._link.call(partial(Tpm.find, owner=self._owner, machine_id=machine_id))
            except EnvdError as error:
                logger.warning("machine %s: not adopted: %s", machine_id, error)
                continue
            self._machines[name] = adopted[machine_id] = machine
            logger.info("machine %s: adopted", machine_id)
        self._captures.update(snapshot for ref, snapshot in loaded.items() if ref.kind == "capture")
        for snapshot in loaded.values():
            # No more forks of it: it is removed with its last machine.
            await snapshot.discard()
        return adopted

    async def reap(self) -> list[str]:
        """See `Hypervisor.reap`. Raises: HypervisorError."""
        return await self._reaper.reap()

    async def leftovers(self) -> list[Leftover]:
        """See `Hypervisor.leftovers`. Raises: HypervisorError."""
        return await self._reaper.leftovers()

    async def remove(self, leftover: Leftover) -> None:
        """See `Hypervisor.remove`. Raises: HypervisorError."""
        await self._reaper.remove(leftover)

    async def close(self) -> None:
        """Disconnect from libvirt. Machines must have been destroyed before."""
        await self._link.aclose()
        self._store.close()

    def on_domain_ended(self, name: str, reason: str) -> None:
        """Mark the domain's machine as lost."""
        if machine := self._machines.get(name):
            log = None if self._logs is None else self._logs / f"{name}.log"
            machine.report_end(reason, failed_assertion=failed_assertion(log))

    async def on_reconnected(self) -> None:
        """Look up our domains on a new connection. Raises: HypervisorError."""
        had_domain = {name for name, machine in self._machines.items() if machine.domain is not None}
        domains = {domain.name(): domain for domain in await self._link.call(self._link.connection.listAllDomains, 0)}
        for name, machine in list(self._machines.items()):
            if name in domains:
                machine.attach(domains.pop(name))
            elif name in had_domain:
                machine.mark_lost("its QEMU ended while libvirt could not be reached")
        # Domains whose creation libvirt completed after the connection had broken.
        for name, domain in domains.items():
            if name.startswith(domain_name(self._owner, "")):
                logger.warning("domain %s: destroying it: not tracked", name)
                await self._link.call(destroy_domain, domain)

    async def _destroy_if_cancelled(self, starting: Coroutine[Any, Any, LibvirtMachine]) -> LibvirtMachine:
        task = asyncio.ensure_future(starting)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # A thread inside libvirt cannot be stopped, so the machine is first started and then destroyed.
            await shielded(_destroy_started(task))
            raise

    async def _start(self, spec: MachineSpec, snapshot: LibvirtSnapshot | None) -> LibvirtMachine:
        files = QemuFiles(directory=self._machines_dir / spec.machine_id)
        try:
            files.directory.mkdir()
            self._qemu_user.chown(files.directory)
        except FileExistsError as error:
            raise HypervisorError(f"machine {spec.machine_id}: {files.directory} exists; choose another id") from error
        except OSError as error:  # A full disk, for example.
            raise HypervisorError(f"machine {spec.machine_id}: could not be started: {error}") from error
        machine = LibvirtMachine(
            spec,
            files,
            memory_path=snapshot.memory_path if snapshot else self._store.memory_file(spec.machine_id),
            snapshot=snapshot,
            link=self._link,
            on_destroyed=self._forget,
        )
        self._machines[domain_name(self._owner, spec.machine_id)] = machine
        try:
            firmware = prepare_firmware(spec, files, snapshot)
            self._qemu_user.chown_memory(machine.memory_path)
            overlays = files.disks(len(spec.image.disks))
            template_disks = () if snapshot is None else snapshot.files.disks(len(overlays))
            if snapshot is None:
                for overlay, disk in zip(overlays, spec.image.disks, strict=True):
                    await self._link.call(create_overlay, overlay, disk.path, disk.disk_format)
            else:
                seeds = snapshot.files.seeds(len(overlays))
                for seed, overlay, backing in zip(seeds, overlays, template_disks, strict=True):
                    await self._link.call(copy_overlay, seed, overlay, backing)
            for path in (*overlays, files.firmware_vars) if firmware else overlays:
                self._qemu_user.chown(path)
            if spec.image.has_tpm:
                machine.tpm = await self._link.call(self._start_tpm, machine)
            xml = domain_xml(
                spec,
                owner=self._owner,
                files=files,
                accelerator=self.accelerator,
                memory_path=machine.memory_path,
                generation=uuid4(),
                template_disks=template_disks,
                firmware=firmware,
                tcg_cache_mib=self._tcg_cache_mib,
                security_labels=self._security_labels,
            )
            flags = 0 if snapshot is None else libvirt.VIR_DOMAIN_START_PAUSED
            machine.attach(await self._link.call(self._link.connection.createXML, xml, flags))
            await machine.find_guestd_port()
            if snapshot is not None:
                await machine.monitor.expect_state()
        except BaseException as error:
            await machine.destroy()
            if isinstance(error, libvirt.libvirtError | OSError):
                raise HypervisorError(f"machine {spec.machine_id}: could not be started: {error}") from error
            if isinstance(error, MachineLost):
                raise HypervisorError(f"machine {spec.machine_id}: ended while it was starting: {error}") from error
            raise
        state = "booting" if snapshot is None else "waiting for a state"
        logger.info("machine %s: %s, image %s", spec.machine_id, state, spec.image.name)
        return machine

    def _start_tpm(self, machine: LibvirtMachine) -> Tpm:
        return Tpm.start(
            machine.files,
            owner=self._owner,
            machine_id=machine.machine_id,
            state=machine.spec.image.tpm_state if machine.snapshot is None else None,
            user=self._qemu_user,
        )

    def _forget(self, machine: LibvirtMachine) -> None:
        name = domain_name(self._owner, machine.machine_id)
        self._machines.pop(name, None)
        # That of a machine that was lost may tell why.
        if self._logs is not None and machine.lost_reason == DESTROYED:
            (self._logs / f"{name}.log").unlink(missing_ok=True)


def failed_assertion(log: Path | None) -> str:
    """Return the line in which QEMU reports that an assertion failed or a device is broken; empty if none does."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-20:] if log else []
    except OSError:
        return ""
    return next((line[:200] for line in lines if re.search(r"Assertion .* failed|hw error|internal error", line)), "")


async def _destroy_started(starting: "asyncio.Future[LibvirtMachine]") -> None:
    await asyncio.wait({starting})
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().destroy()


def _own_snapshot(snapshot: Snapshot) -> LibvirtSnapshot:
    if not isinstance(snapshot, LibvirtSnapshot):
        raise TypeError(f"{snapshot!r} is not a snapshot of this driver")
    return snapshot


def _own_machine(machine: Machine) -> LibvirtMachine:
    if not isinstance(machine, LibvirtMachine):
        raise TypeError(f"{machine!r} is not a machine of this driver")
    return machine
