"""A worker process: a `FakeHypervisor` that executes the daemon's calls, and a socket for its desktops' displays.

It ends with the link to the daemon, and thus with the daemon.
"""

import asyncio
import os
import pickle
import socket
import struct
import time
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple, cast

from envd.base.errors import HypervisorError, MachineLost
from envd.hypervisor.fake.faults import Faults
from envd.hypervisor.fake.hypervisor import FakeHypervisor, StoredTemplate
from envd.hypervisor.fake.machine import FakeMachine
from envd.hypervisor.fake.snapshot import FakeSnapshot, FrozenGuest, template_key
from envd.hypervisor.fake.workers.link import Link
from envd.hypervisor.machine import CaptureReport, MachineSpec

#: Number of a message that reports a lost machine; calls are numbered from 1.
LOST = 0
#: Target of calls to the worker itself; all others are for machines.
WORKER = ""
#: Method of a message that cancels the call with its number.
CANCEL = "cancel"
#: Displays may be opened all at once, and a connection beyond the backlog fails.
_BACKLOG = 4096
_CREDENTIALS = struct.Struct("iII")


class SnapshotInfo(NamedTuple):
    """Description of a snapshot."""

    digest: str
    disk_digest: str
    report: CaptureReport


class Worker:
    """Executes calls: (number, target, method, arguments, keywords) -> (number, result, error)."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        """Set when the daemon has closed the link."""
        self.link = Link(on_message=self._receive, on_closed=self.ended.set)
        self._hypervisor = FakeHypervisor()
        self._snapshots: dict[str, FakeSnapshot] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}

    def machine(self, machine_id: str) -> FakeMachine:
        """Return a machine. Raises: MachineLost: it is destroyed."""
        machine = self._hypervisor.machines.get(machine_id)
        if machine is None:
            raise MachineLost(f"machine {machine_id} is gone")
        return machine

    # Calls of the daemon

    def use_faults(self, faults: Faults) -> None:
        """Use these faults for machines that are created or forked from now on."""
        self._hypervisor.faults = faults

    async def create(self, spec: MachineSpec) -> str | None:
        """Create a machine and return the URL of its guestd."""
        return self._entered(await self._hypervisor.create(spec))

    async def fork(self, machine_id: str, name: str) -> str | None:
        """Fork a machine and return the URL of its guestd."""
        return self._entered(await self._hypervisor.fork(self._snapshot(name), machine_id))

    async def prepare(self, machine_id: str, name: str) -> str | None:
        """Create a machine that waits for a state and return the URL of its guestd."""
        return self._entered(await self._hypervisor.prepare(self._snapshot(name), machine_id))

    async def load(self, machine_id: str, name: str) -> None:
        """Put a machine that waits into the state of a snapshot."""
        await self._hypervisor.load(self.machine(machine_id), self._snapshot(name))

    async def freeze(self, machine_id: str, notes: Mapping[str, str]) -> tuple[SnapshotInfo, bytes]:
        """Make a template of a machine, which is gone afterwards; return it with its content for `install`."""
        snapshot = await self._hypervisor.freeze(self.machine(machine_id), notes=notes)
        return _info(snapshot), _content(snapshot)

    async def capture(self, machine_id: str, name: str) -> SnapshotInfo:
        """Capture the state of a machine under a name."""
        snapshot = await self._hypervisor.capture(self.machine(machine_id))
        self._snapshots[name] = snapshot
        return _info(snapshot)

    async def export(self, name: str) -> bytes:
        """Return the content of a capture, for `install` in another worker."""
        return _content(self._snapshot(name))

    async def install(self, name: str, content: bytes, template: str) -> None:
        """Store a snapshot under a name: a template, or a capture that depends on the one named `template`."""
        frozen: FrozenGuest = pickle.loads(content)  # noqa: S301  (of our own process)
        if template:
            parent = self._snapshot(template)
            self._snapshots[name] = self._hypervisor.add_capture(frozen, parent=parent, report=parent.report)
            return
        self._hypervisor.host.templates[template_key(frozen.spec)] = StoredTemplate(frozen=frozen)
        snapshot = await self._hypervisor.find_template(frozen.spec)
        assert snapshot is not None  # noqa: S101  (stored above)
        self._snapshots[name] = snapshot

    async def discard(self, name: str) -> None:
        """Discard a capture."""
        snapshot = self._snapshots.pop(name, None)
        if snapshot is not None:
            await snapshot.discard()

    async def destroy(self, machine_id: str) -> None:
        """Destroy a machine; no effect if it does not exist."""
        machine = self._hypervisor.machines.get(machine_id)
        if machine is not None:
            await machine.destroy()

    async def captures(self) -> list[str]:
        """Return the names of captures that are not discarded, or that something depends on."""
        return sorted(self._hypervisor.leftover_captures)

    async def cpu_s(self) -> float:
        """Return the CPU time of this process in seconds."""
        return time.process_time()

    def _snapshot(self, name: str) -> FakeSnapshot:
        snapshot = self._snapshots.get(name)
        if snapshot is None:
            raise HypervisorError(f"snapshot {name}: was discarded; it cannot be forked any more")
        return snapshot

    def _entered(self, machine: FakeMachine) -> str | None:
        machine.on_lost = self._report_loss
        return machine.guestd_url

    def _report_loss(self, machine: FakeMachine) -> None:
        self.link.send((LOST, machine.machine_id, machine.lost_reason))

    # Messages

    def _receive(self, message: tuple[int, str, str, tuple[Any, ...], dict[str, Any]]) -> None:
        number, target, method, arguments, keywords = message
        if method == CANCEL:
            if number in self._calls:
                self._calls[number].cancel()
            return
        work = self._call(number, target, method, arguments, keywords)
        self._calls[number] = asyncio.create_task(work, name=f"{method}:{target}")

    async def _call(
        self, number: int, target: str, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        try:
            bound = getattr(self if target == WORKER else self.machine(target), method)
            result: object = bound(*arguments, **keywords)
            if asyncio.iscoroutine(result):
                result = await cast(Coroutine[Any, Any, object], result)
            self.link.send((number, result, None))
        except Exception as error:
            self.link.send((number, None, _portable(error)))
        finally:
            self._calls.pop(number, None)


def _info(snapshot: FakeSnapshot) -> SnapshotInfo:
    return SnapshotInfo(snapshot.digest, snapshot.disk_digest, snapshot.report)


def _content(snapshot: FakeSnapshot) -> bytes:
    return pickle.dumps(snapshot.frozen, pickle.HIGHEST_PROTOCOL)


def _portable(error: Exception) -> Exception:
    """Return an error that the daemon can unpickle."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  (made here)
    except Exception:  # any error of any class
        return RuntimeError(repr(error))
    return error


class _Display(asyncio.Protocol):
    """A display connection until its first line, which names the machine; then the machine's RFB server has it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._line = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Reject other users."""
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(peer)[1] != os.getuid():
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Hand the connection over."""
        assert self._transport is not None  # noqa: S101  (it has received data)
        self._line += data
        line, newline, rest = self._line.partition(b"\n")
        if not newline:
            return
        try:
            connection = self._worker.machine(line.decode()).connect_display()
        except MachineLost:
            self._transport.abort()
            return
        self._transport.set_protocol(connection)
        connection.connection_made(self._transport)
        if rest:
            connection.data_received(rest)


async def serve(descriptor: int, name: str) -> None:
    """Serve until the link at `descriptor` closes, with displays at the abstract socket `name`."""
    loop = asyncio.get_running_loop()
    worker = Worker()
    server = await loop.create_unix_server(lambda: _Display(worker), "\0" + name, backlog=_BACKLOG)
    await loop.create_unix_connection(lambda: worker.link, sock=socket.socket(fileno=descriptor))
    await worker.ended.wait()
    server.close()
