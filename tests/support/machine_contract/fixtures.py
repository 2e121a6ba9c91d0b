"""Fixtures and helpers of the machine contract: one template per class, forks of it, and access to a machine."""

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from envd.base.errors import GuestUnresponsive
from envd.desktop.display.rfb import PixelRect, Resize, RfbClient
from envd.hypervisor.machine import Hypervisor, Machine, MachineSpec, Snapshot

Screen = npt.NDArray[np.uint32]

#: Notes stored with the template.
NOTES = {"made-by": "the machine contract"}


@pytest.mark.asyncio(loop_scope="class")
class MachineFixtures:
    """One hypervisor under test. A subclass makes it and its specs, and examines the host."""

    boot_timeout_s: ClassVar[float] = 60.0
    """Timeout for a new machine's guest agent to respond, and for its screen to react to input."""
    response_timeout_s: ClassVar[float] = 60.0
    """Timeout for one response of a booted guest's agent."""
    prompt_s: ClassVar[float] = 60.0
    """Timeout for detecting a machine's loss."""
    fork_timeout_s: ClassVar[float] = 60.0
    """Timeout for one fork or capture, with others at the same time."""
    cancel_after_s: ClassVar[tuple[float, ...]] = (0.0, 0.001, 0.01, 0.1)
    """Delays after which `create`, `fork` and `capture` are cancelled."""
    fork_count: ClassVar[int] = 20
    """Number of forks of one template."""
    forks_at_once: ClassVar[int] = 4
    """Number of those made and running at the same time."""

    # Provided by a subclass

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def hypervisor(cls) -> AsyncIterator[Hypervisor]:
        """The hypervisor under test, closed afterwards."""
        raise NotImplementedError
        yield  # type: ignore[unreachable]

    @classmethod
    def make_spec(cls, machine_id: str) -> MachineSpec:
        """Return a spec with this id."""
        raise NotImplementedError

    @classmethod
    async def kill(cls, machine: Machine) -> None:
        """End the machine from outside, like `kill -9` of its process."""
        raise NotImplementedError

    @classmethod
    async def screendump(cls, machine: Machine) -> npt.NDArray[np.uint8]:
        """Return the RGB pixels of the machine's display device, by height, width and channel."""
        raise NotImplementedError

    @classmethod
    @contextmanager
    def removed(cls, hypervisor: Hypervisor, template: Snapshot) -> Iterator[None]:
        """Remove a stored template from the host for the duration of the block."""
        raise NotImplementedError
        yield  # type: ignore[unreachable]

    @classmethod
    def leftovers(cls, hypervisor: Hypervisor, machine_id: str) -> list[str]:
        """List what is left of a machine on the host: domain, process, overlay, sockets, directory."""
        raise NotImplementedError

    @classmethod
    async def snapshot_leftovers(cls, hypervisor: Hypervisor) -> list[str]:
        """List the files of captures on the host, without stored templates."""
        raise NotImplementedError

    @classmethod
    async def wait_booted(cls, machine: Machine) -> None:
        """Wait until the machine responds and shows its desktop. Override it if the agent starts before the desktop."""
        await cls.wait_agent(machine)

    @classmethod
    async def wait_freezable(cls, machine: Machine) -> None:
        """Wait until a new machine can be frozen."""
        await cls.wait_booted(machine)

    async def provoke(self, client: RfbClient) -> None:
        """Send input that changes a booted guest's screen: a key press, and a right click on the desktop."""
        width_px, height_px = client.size
        x_px, y_px = width_px * 9 // 10, height_px * 7 // 10
        for buttons in (0, 4, 0):
            client.pointer(x_px, y_px, buttons=buttons)
        for down in (True, False):
            client.key(keysym=ord("a"), scancode=0x1E, down=down)
        await client.drain()

    # Shared by the tests

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def template(cls, hypervisor: Hypervisor) -> Snapshot:
        """The template of the class's machines: one that is stored, or else a machine that is booted and frozen.

        No other machine is waited for until it has booted.
        """
        spec = cls.make_spec(new_machine_id())
        if stored := await hypervisor.find_template(spec):
            return stored
        machine = await hypervisor.create(spec)
        try:
            await cls.wait_booted(machine)
            return await hypervisor.freeze(machine, notes=NOTES)
        except BaseException:
            await machine.destroy()
            raise

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def machine(cls, hypervisor: Hypervisor, template: Snapshot) -> AsyncIterator[Machine]:
        """A running fork, shared by tests that leave it running."""
        async with cls.running_fork(hypervisor, template) as machine:
            yield machine

    @classmethod
    @asynccontextmanager
    async def new_machine(cls, hypervisor: Hypervisor) -> AsyncIterator[Machine]:
        """Start a machine with a new id without waiting for its boot; destroys it at the end."""
        machine = await hypervisor.create(cls.make_spec(new_machine_id()))
        async with _destroyed(machine):
            yield machine

    @classmethod
    @asynccontextmanager
    async def fork(cls, hypervisor: Hypervisor, snapshot: Snapshot) -> AsyncIterator[Machine]:
        """Fork a paused machine with a new id; destroys it at the end."""
        async with asyncio.timeout(cls.fork_timeout_s):
            machine = await hypervisor.fork(snapshot, new_machine_id())
        async with _destroyed(machine):
            yield machine

    @classmethod
    @asynccontextmanager
    async def waiting(cls, hypervisor: Hypervisor, snapshot: Snapshot) -> AsyncIterator[Machine]:
        """Prepare a machine that waits for a state; destroys it at the end."""
        async with asyncio.timeout(cls.fork_timeout_s):
            machine = await hypervisor.prepare(snapshot, new_machine_id())
        async with _destroyed(machine):
            yield machine

    @classmethod
    @asynccontextmanager
    async def running_fork(cls, hypervisor: Hypervisor, snapshot: Snapshot) -> AsyncIterator[Machine]:
        """Fork a machine, resume it and wait for its agent; destroys it at the end."""
        async with cls.fork(hypervisor, snapshot) as machine:
            await machine.resume()
            await cls.wait_agent(machine)
            yield machine

    @classmethod
    @asynccontextmanager
    async def capture(cls, hypervisor: Hypervisor, machine: Machine) -> AsyncIterator[Snapshot]:
        """Capture a machine; discards the capture at the end."""
        async with asyncio.timeout(cls.fork_timeout_s):
            snapshot = await hypervisor.capture(machine)
        try:
            yield snapshot
        finally:
            await snapshot.discard()

    @classmethod
    async def wait_agent(cls, machine: Machine) -> None:
        """Wait until the guest agent responds; fails after `boot_timeout_s`."""
        async with asyncio.timeout(cls.boot_timeout_s):
            while True:
                try:
                    await machine.agent_command("guest-ping", timeout_s=cls.response_timeout_s)
                except GuestUnresponsive:
                    continue
                return

    # Access to a machine

    @asynccontextmanager
    async def display(self, machine: Machine) -> AsyncIterator[RfbClient]:
        """Connect to a machine's display."""
        client = await RfbClient.connect(*await machine.open_display())
        try:
            if client.draws_pointer:
                client.pointer(client.size[0] // 2, client.size[1] // 2, buttons=0)
            yield client
        finally:
            await client.close()

    async def screen(self, machine: Machine) -> Screen:
        """Return the screen of a machine, over a new display connection."""
        async with asyncio.timeout(self.response_timeout_s), self.display(machine) as client:
            return await read_screen(client)

    async def change_screen(self, machine: Machine) -> None:
        """Send input to a running machine until its screen changes; fails after `boot_timeout_s`."""
        async with asyncio.timeout(self.boot_timeout_s), self.display(machine) as client:
            before = await read_screen(client)
            changed = False
            while not changed:
                await self.provoke(client)
                await asyncio.sleep(0.05)
                changed = not np.array_equal(before, await read_screen(client))

    async def start(self, machine: Machine, *argv: str) -> int:
        """Start a program through the agent; return its process id."""
        started = await machine.agent_command(
            "guest-exec",
            {"path": argv[0], "arg": list(argv[1:]), "capture-output": True},
            timeout_s=self.response_timeout_s,
        )
        assert isinstance(started, dict)
        return int(str(started["pid"]))

    async def has_exited(self, machine: Machine, pid: int) -> bool:
        """Return whether a program started by the agent has ended. Raises: GuestError: unknown process."""
        status = await machine.agent_command("guest-exec-status", {"pid": pid}, timeout_s=self.response_timeout_s)
        assert isinstance(status, dict)
        return bool(status["exited"])

    async def run(self, machine: Machine, *argv: str) -> bytes:
        """Run a program through the agent and return its output. Fails unless it exits with 0."""
        pid = await self.start(machine, *argv)
        while True:
            status = await machine.agent_command("guest-exec-status", {"pid": pid}, timeout_s=self.response_timeout_s)
            assert isinstance(status, dict)
            if status["exited"]:
                assert status["exitcode"] == 0
                return base64.b64decode(str(status.get("out-data", "")))
            await asyncio.sleep(0.01)

    async def write_file(self, machine: Machine, path: str, data: bytes) -> None:
        """Write a guest file through the agent."""
        handle = await machine.agent_command(
            "guest-file-open", {"path": path, "mode": "w"}, timeout_s=self.response_timeout_s
        )
        await machine.agent_command(
            "guest-file-write",
            {"handle": handle, "buf-b64": base64.b64encode(data).decode()},
            timeout_s=self.response_timeout_s,
        )
        await machine.agent_command("guest-file-close", {"handle": handle}, timeout_s=self.response_timeout_s)

    async def read_file(self, machine: Machine, path: str) -> bytes:
        """Read a small guest file through the agent. Raises: GuestError."""
        handle = await machine.agent_command(
            "guest-file-open", {"path": path, "mode": "r"}, timeout_s=self.response_timeout_s
        )
        read = await machine.agent_command("guest-file-read", {"handle": handle}, timeout_s=self.response_timeout_s)
        await machine.agent_command("guest-file-close", {"handle": handle}, timeout_s=self.response_timeout_s)
        assert isinstance(read, dict)
        return base64.b64decode(str(read["buf-b64"]))


def new_machine_id() -> str:
    """Return a unique machine id."""
    return f"contract-{uuid.uuid4().hex[:12]}"


async def read_to_end(reader: asyncio.StreamReader) -> None:
    """Read until the peer has closed or reset the stream."""
    try:
        while await reader.read(1 << 16):
            pass
    except ConnectionError:
        pass


async def read_screen(client: RfbClient) -> Screen:
    """Request all pixels of a display and return them, (height, width)."""
    client.wake()
    client.request(incremental=False)
    await client.drain()
    width_px, height_px = client.size
    pixels = np.zeros((height_px, width_px), np.uint32)
    missing = np.ones_like(pixels, bool)
    while missing.any():
        for rect in await client.read_update():
            if isinstance(rect, Resize):
                pixels = np.zeros((rect.height_px, rect.width_px), np.uint32)
                missing = np.ones_like(pixels, bool)
                client.request(incremental=False)
            elif isinstance(rect, PixelRect):
                part = np.s_[rect.y_px : rect.y_px + rect.height_px, rect.x_px : rect.x_px + rect.width_px]
                pixels[part] = rect.bgrx_HW
                missing[part] = False
        client.request(incremental=True)
    return pixels


@asynccontextmanager
async def _destroyed(machine: Machine) -> AsyncIterator[None]:
    """Destroy a machine at the end."""
    try:
        yield
    finally:
        await machine.destroy()
