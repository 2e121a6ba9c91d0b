"""The daemon's side of the workers: the hypervisor, its machines and its snapshots."""

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from pydantic import JsonValue

from envd.base.aio import shielded
from envd.base.errors import EnvdError, HypervisorError, MachineLost, NotForkable, TemplateCorrupt
from envd.hypervisor.fake.backend import CAPABILITIES
from envd.hypervisor.fake.faults import Faults
from envd.hypervisor.fake.snapshot import template_key
from envd.hypervisor.fake.workers.process import WorkerProcess
from envd.hypervisor.fake.workers.worker import WORKER, SnapshotInfo
from envd.hypervisor.machine import (
    Accelerator,
    Leftover,
    Machine,
    MachineSpec,
    MachineState,
    MachineUsage,
    Snapshot,
)

#: Returns the pickled state of a snapshot.
Content = Callable[[], Awaitable[bytes]]

_numbers = itertools.count(1)


class WorkerSnapshot:
    """Implements `envd.hypervisor.machine.Snapshot`. It is installed in a worker when a machine there needs it."""

    def __init__(
        self,
        name: str,
        info: SnapshotInfo,
        *,
        spec: MachineSpec,
        content: Content,
        notes: Mapping[str, str],
        template: "WorkerSnapshot | None" = None,
        home: WorkerProcess | None = None,
    ) -> None:
        """Describe a capture, which is in `home` and depends on `template`; without them, a template."""
        self.name = name
        self.digest = info.digest
        self.disk_digest = info.disk_digest
        self.report = info.report
        self.spec = spec
        self.notes = notes
        self.template = template or self
        self.home = home
        """Worker that captured it; None for a template."""
        self.is_discarded = False
        self._content = content
        self._installed: dict[WorkerProcess, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        kind = "template" if self.home is None else "capture"
        return f"<WorkerSnapshot {kind} {self.digest[:12]} of {self.spec.machine_id!r}>"

    async def install(self, worker: WorkerProcess) -> None:
        """Make it available in a worker.

        Raises:
            TemplateCorrupt: The worker that captured it ended.
            HypervisorError: This worker ended.
        """
        if self.home is not None and self.home.is_ended:
            raise TemplateCorrupt(f"capture {self.name}: the worker process that held it ended; make it again")
        if worker is self.home:
            return
        if worker not in self._installed:
            self._installed = {each: task for each, task in self._installed.items() if not each.is_ended}
            self._installed[worker] = asyncio.create_task(self._install(worker), name=f"install:{self.name}")
        await asyncio.shield(self._installed[worker])

    async def _install(self, worker: WorkerProcess) -> None:
        template = ""
        if self.template is not self:
            await self.template.install(worker)
            template = self.template.name
        await worker.call(WORKER, "install", self.name, await self._content(), template)

    async def discard(self) -> None:
        """Allow no more forks of it. Idempotent. A stored template stays."""
        self.is_discarded = True
        if self.home is not None:
            for worker in (self.home, *self._installed):
                worker.post(WORKER, "discard", self.name)


class WorkerMachine:
    """Implements `envd.hypervisor.machine.Machine`: a desktop in a worker."""

    def __init__(self, spec: MachineSpec, worker: WorkerProcess, *, snapshot: WorkerSnapshot | None) -> None:
        self.spec = spec
        self.machine_id = spec.machine_id
        self.snapshot = snapshot
        self.worker = worker
        self.guestd_url: str | None = None
        self.lost = asyncio.Event()
        self.lost_reason = ""
        self._is_running = snapshot is None
        self._destroy_task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return (
            f"<WorkerMachine {self.machine_id!r} {self.state.value} in {self.worker!r} {self.lost_reason}".rstrip()
            + ">"
        )

    @property
    def state(self) -> MachineState:
        """Lifecycle state."""
        if self.lost.is_set():
            return MachineState.GONE
        return MachineState.RUNNING if self._is_running else MachineState.PAUSED

    def lose(self, reason: str) -> None:
        """Declare it lost."""
        if not self.lost.is_set():
            self.lost_reason = reason
            self.lost.set()

    def check_present(self, purpose: str) -> None:
        """Check that it is not gone. Raises: MachineLost."""
        if self.lost.is_set():
            raise MachineLost(f"machine {self.machine_id} is gone ({self.lost_reason}): cannot {purpose}")

    def processor_s(self) -> float | None:
        """Return None: no guest code runs."""
        return None

    async def open_display(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to its RFB server. Raises: MachineLost."""
        self.check_present("open its display")
        # uvloop connects to no socket in the abstract namespace by path.
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.connect(self.worker.display_path)
            reader, writer = await asyncio.open_unix_connection(sock=connection)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError):
                message = f"machine {self.machine_id} is gone: its display cannot be reached: {error}"
                raise MachineLost(message) from error
            raise
        writer.write(f"{self.machine_id}\n".encode())
        return reader, writer

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        """Run one guest agent command. Raises: GuestUnresponsive, GuestError, MachineLost."""
        self.check_present(f"ask its guest agent for {command}")
        result: JsonValue = await self.worker.call(
            self.machine_id, "agent_command", command, arguments, timeout_s=timeout_s
        )
        return result

    async def pause(self) -> None:
        """Pause the guest. Raises: MachineLost."""
        self.check_present("pause it")
        await self.worker.call(self.machine_id, "pause")
        self._is_running = False

    async def resume(self) -> None:
        """Resume the guest. Raises: MachineLost."""
        self.check_present("resume it")
        await self.worker.call(self.machine_id, "resume")
        self._is_running = True

    async def usage(self) -> MachineUsage:
        """Return the bytes of its pixels and files. Raises: MachineLost."""
        self.check_present("measure it")
        usage: MachineUsage = await self.worker.call(self.machine_id, "usage")
        return usage

    def enforce_disk_quota(self, quota_bytes: int) -> None:
        """Lose the machine if its own files are larger than `quota_bytes`."""
        self.worker.post(self.machine_id, "enforce_disk_quota", quota_bytes)

    async def destroy(self) -> None:
        """Destroy the machine and cut all connections. Idempotent; cancellation takes effect after the work is done."""
        if self._destroy_task is None:
            self._destroy_task = asyncio.create_task(self._destroy(), name=f"destroy:{self.machine_id}")
        await shielded(self._destroy_task)

    async def _destroy(self) -> None:
        self.lose("destroyed")
        try:
            await self.worker.call(WORKER, "destroy", self.machine_id)
        except HypervisorError:
            if not self.worker.is_ended:
                raise
        self.worker.machines.pop(self.machine_id, None)


class DrawingWorkers:
    """Implements `envd.hypervisor.machine.Hypervisor` with drawn desktops in worker processes.

    If a worker ends, its machines are lost, and another one is started in its place for later machines.
    """

    capabilities = CAPABILITIES
    accelerator = Accelerator.FAKE
    problem = ""

    def __init__(self, count: int, *, faults: Faults | None = None) -> None:
        """Use `count` workers, whose machines have these faults. Call `start` next."""
        self._count = count
        self._faults = faults or Faults()
        self.workers: list[WorkerProcess] = []
        """Live workers, and ended ones with machines that are not destroyed."""
        self.templates: dict[MachineSpec, WorkerSnapshot] = {}
        """Stored templates by `template_key`."""

    def __repr__(self) -> str:
        return f"<DrawingWorkers {self.workers}>"

    @property
    def description(self) -> str:
        """One line for operators: how many processes draw."""
        return f"fake: drawn desktops in {self._count} worker processes, no guest code runs"

    @property
    def machines(self) -> dict[str, WorkerMachine]:
        """Machines that are not destroyed, by id."""
        return {id: machine for worker in self.workers for id, machine in worker.machines.items()}

    async def start(self) -> None:
        """Start all workers, without waiting until they are ready. Raises: HypervisorError."""
        while len(self.workers) < self._count:
            self.workers.append(await WorkerProcess.start(self._faults))

    async def cpu_s(self) -> float:
        """Return the CPU time of the live workers in seconds. Raises: HypervisorError: one ended."""
        used_s: list[float] = [await worker.call(WORKER, "cpu_s") for worker in self.workers if not worker.is_ended]
        return sum(used_s)

    async def create(self, spec: MachineSpec) -> WorkerMachine:
        """Create and start a machine. On failure or cancellation nothing is left. Raises: HypervisorError."""
        self._require_new(spec.machine_id)
        machine = self._enter(WorkerMachine(spec, await self._least_loaded(), snapshot=None))
        return await self._made(machine, "create", spec)

    async def freeze(self, machine: Machine, *, notes: Mapping[str, str]) -> WorkerSnapshot:
        """Store a booted machine as a template and destroy it. Raises: MachineLost, HypervisorError."""
        own = _own_machine(machine)
        try:
            own.check_present("freeze it")
            frozen: tuple[SnapshotInfo, bytes] = await own.worker.call(WORKER, "freeze", own.machine_id, dict(notes))
        finally:
            await own.destroy()
        info, content = frozen

        async def stored() -> bytes:
            return content

        name = f"template-{next(_numbers)}"
        template = WorkerSnapshot(name, info, spec=own.spec, content=stored, notes=dict(notes))
        self.templates[template_key(own.spec)] = template
        return template

    async def find_template(self, spec: MachineSpec) -> WorkerSnapshot | None:
        """Return the stored template for such machines, or None."""
        template = self.templates.get(template_key(spec))
        if template is not None:
            template.is_discarded = False
        return template

    async def fork(self, snapshot: Snapshot, machine_id: str) -> WorkerMachine:
        """Create a paused machine in a snapshot's state. On failure or cancellation nothing is left.

        Raises:
            TemplateCorrupt: See `check_intact`, or the worker with the captured state ended.
            HypervisorError: The snapshot is discarded, or the id is in use.
        """
        return await self._forked("fork", snapshot, machine_id)

    async def prepare(self, snapshot: Snapshot, machine_id: str) -> WorkerMachine:
        """Create a paused machine that waits for a state. Raises: TemplateCorrupt, HypervisorError."""
        return await self._forked("prepare", snapshot, machine_id)

    async def load(self, machine: Machine, snapshot: Snapshot) -> None:
        """Put a machine into a snapshot's state. Raises: TemplateCorrupt, MachineLost, HypervisorError."""
        await shielded(self._load(_own_machine(machine), snapshot))

    async def _load(self, machine: WorkerMachine, snapshot: Snapshot) -> None:
        try:
            own = await self._forkable(snapshot, machine.machine_id)
            machine.check_present("load a state")
            await own.install(machine.worker)
            await machine.worker.call(WORKER, "load", machine.machine_id, own.name)
        except EnvdError as error:
            reason = f"its state could not be loaded: {error}"
            machine.lose(reason)
            machine.worker.post(machine.machine_id, "kill", reason)
            raise
        machine.snapshot = own

    async def check_intact(self, snapshot: Snapshot) -> None:
        """Check that the template under a snapshot is still the stored one. Raises: TemplateCorrupt."""
        template = _own_snapshot(snapshot).template
        if self.templates.get(template_key(template.spec)) is not template:
            raise TemplateCorrupt(f"template {template.digest:.12} was removed or replaced while it was in use")

    async def capture(self, machine: Machine) -> WorkerSnapshot:
        """Freeze the state of a fork, which is paused for that time.

        On failure or cancellation nothing is left, and the machine continues.

        Raises:
            NotForkable: It was booted, or its template is gone. It is unchanged.
            MachineLost: It is gone.
            HypervisorError: The worker failed.
        """
        own = _own_machine(machine)
        own.check_present("capture it")
        if own.snapshot is None:
            raise NotForkable(f"machine {own.machine_id} was booted, not forked from a template")
        try:
            await self.check_intact(own.snapshot)
        except TemplateCorrupt as error:
            raise NotForkable(f"machine {own.machine_id} cannot be forked: {error}") from error
        name, worker = f"{own.machine_id}-{next(_numbers)}", own.worker
        try:
            info: SnapshotInfo = await shielded(worker.call(WORKER, "capture", own.machine_id, name))
        except BaseException:
            worker.post(WORKER, "discard", name)
            raise
        return WorkerSnapshot(
            name,
            info,
            spec=own.spec,
            content=partial(worker.call, WORKER, "export", name),
            notes={},
            template=own.snapshot.template,
            home=worker,
        )

    async def adopt(self, machine_ids: Collection[str]) -> dict[str, Machine]:  # noqa: ARG002
        """Return nothing: drawn desktops end with their daemon."""
        return {}

    async def reap(self) -> list[str]:
        """Return nothing: drawn desktops end with their daemon."""
        return []

    async def leftovers(self) -> list[Leftover]:
        """Return nothing: a worker has only machines of its daemon."""
        return []

    async def remove(self, leftover: Leftover) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """End the workers."""
        await shielded(asyncio.gather(*(worker.close() for worker in self.workers)))

    def _require_new(self, machine_id: str) -> None:
        if machine_id in self.machines:
            raise HypervisorError(f"machine {machine_id} exists already; destroy it first")

    async def _least_loaded(self) -> WorkerProcess:
        self.workers = [worker for worker in self.workers if not worker.is_ended or worker.machines]
        live = [worker for worker in self.workers if not worker.is_ended]
        if len(live) < self._count:
            live.append(await WorkerProcess.start(self._faults))
            self.workers.append(live[-1])
        return min(live, key=lambda worker: len(worker.machines))

    def _enter(self, machine: WorkerMachine) -> WorkerMachine:
        machine.worker.machines[machine.machine_id] = machine
        return machine

    async def _forkable(self, snapshot: Snapshot, machine_id: str) -> WorkerSnapshot:
        own = _own_snapshot(snapshot)
        if own.is_discarded:
            raise HypervisorError(f"machine {machine_id}: {own!r} was discarded; it cannot be forked any more")
        await self.check_intact(own)
        return own

    async def _forked(self, method: str, snapshot: Snapshot, machine_id: str) -> WorkerMachine:
        self._require_new(machine_id)
        own = await self._forkable(snapshot, machine_id)
        worker = own.home or await self._least_loaded()
        machine = self._enter(WorkerMachine(replace(own.spec, machine_id=machine_id), worker, snapshot=own))
        return await self._made(machine, method, machine_id, own.name)

    async def _made(self, machine: WorkerMachine, method: str, *arguments: object) -> WorkerMachine:
        try:
            if machine.snapshot is not None:
                await machine.snapshot.install(machine.worker)
            machine.guestd_url = await machine.worker.call(WORKER, method, *arguments)
        except BaseException:
            await machine.destroy()
            raise
        return machine


def _own_snapshot(snapshot: Snapshot) -> WorkerSnapshot:
    if not isinstance(snapshot, WorkerSnapshot):
        raise TypeError(f"{snapshot!r} is not a snapshot of this hypervisor")
    return snapshot


def _own_machine(machine: Machine) -> WorkerMachine:
    if not isinstance(machine, WorkerMachine):
        raise TypeError(f"{machine!r} is not a machine of this hypervisor")
    return machine
