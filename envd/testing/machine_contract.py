"""What every hypervisor and its machines promise, as tests that a subclass runs on one implementation.

```python
class TestMachineContractOnFake(MachineContract):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def hypervisor(cls) -> AsyncIterator[Hypervisor]: ...

    @classmethod
    def make_spec(cls, machine_id: str) -> MachineSpec: ...
    @classmethod
    async def kill(cls, machine: Machine) -> None: ...
    @classmethod
    def leftovers(cls, hypervisor: Hypervisor, machine_id: str) -> list[str]: ...
```

Most tests share one machine, because a boot can take a minute where nothing accelerates it. The others work on
machines that need not finish their boot, except for the one that compares the files of two.
"""

import asyncio
import base64
import io
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
from PIL import Image

from envd.errors import GuestError, GuestUnresponsive, MachineLost
from envd.guest.rfb import PixelRect, Resize, RfbClient
from envd.hypervisor.machine import Hypervisor, Machine, MachineSpec, MachineState

_PROBE_PATH = "/tmp/envd-contract-probe"  # noqa: S108  (a path in the guest)


@pytest.mark.asyncio(loop_scope="class")
class MachineContract:
    """Tests of one hypervisor. Subclasses say how to make it, its specs, and how to look behind it."""

    boot_timeout_s: ClassVar[float] = 10.0
    """Longest time until a new machine's guest agent answers, and until its screen reacts to input."""
    answer_timeout_s: ClassVar[float] = 5.0
    """Longest time for one answer of a booted guest's agent."""
    prompt_s: ClassVar[float] = 5.0
    """How soon a machine's loss must be known."""
    cancel_after_s: ClassVar[tuple[float, ...]] = (0.0, 0.001, 0.01, 0.1)
    """Moments at which `create` is cancelled."""

    # What a subclass provides

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
        """End the machine from outside, as `kill -9` of its process would."""
        raise NotImplementedError

    @classmethod
    def leftovers(cls, hypervisor: Hypervisor, machine_id: str) -> list[str]:
        """Name what the host still holds of a machine: domain, process, overlay, sockets, directory."""
        raise NotImplementedError

    async def provoke(self, client: RfbClient) -> None:
        """Send input that changes pixels on a booted guest's screen: a key, and a right click on the desktop."""
        width_px, height_px = client.size
        x_px, y_px = width_px * 9 // 10, height_px * 7 // 10
        for buttons in (0, 4, 0):
            client.pointer(x_px, y_px, buttons=buttons)
        for down in (True, False):
            client.key(keysym=ord("a"), scancode=0x1E, down=down)
        await client.drain()

    # Shared machine

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def machine(cls, hypervisor: Hypervisor) -> AsyncIterator[Machine]:
        """A booted machine, shared by tests that leave it running."""
        async with cls.new_machine(hypervisor) as machine:
            await cls.wait_booted(machine)
            yield machine

    @classmethod
    @asynccontextmanager
    async def new_machine(cls, hypervisor: Hypervisor) -> AsyncIterator[Machine]:
        """Make a machine with a new id, and destroy it at the end."""
        machine = await hypervisor.create(cls.make_spec(new_machine_id()))
        try:
            yield machine
        finally:
            await machine.destroy()

    @classmethod
    async def wait_booted(cls, machine: Machine) -> None:
        """Return once the machine answers and shows its desktop. A guest whose agent is early says more here."""
        await cls.wait_agent(machine)

    @classmethod
    async def wait_agent(cls, machine: Machine) -> None:
        """Return once the guest agent has answered; fail after `boot_timeout_s`."""
        async with asyncio.timeout(cls.boot_timeout_s):
            while True:
                try:
                    await machine.agent_command("guest-ping", timeout_s=cls.answer_timeout_s)
                except GuestUnresponsive:
                    continue
                return

    # Tests on the shared machine

    async def test_a_new_machine_runs_and_its_agent_answers(self, machine: Machine) -> None:
        assert machine.state is MachineState.RUNNING
        assert not machine.lost.is_set()
        assert machine.lost_reason == ""
        assert await machine.agent_command("guest-ping", timeout_s=self.answer_timeout_s) == {}

    async def test_the_agent_runs_programs_and_tells_their_output(self, machine: Machine) -> None:
        assert await self.run(machine, "echo", "one two") == b"one two\n"

    async def test_what_the_agent_refuses_is_a_guest_error(self, machine: Machine) -> None:
        with pytest.raises(GuestError):
            await machine.agent_command("guest-no-such-command", timeout_s=self.answer_timeout_s)
        with pytest.raises(GuestError):
            await machine.agent_command(
                "guest-file-open", {"path": "/no/such/file", "mode": "r"}, timeout_s=self.answer_timeout_s
            )

    async def test_guestd_is_on_the_loopback_if_the_image_has_it(self, machine: Machine) -> None:
        url = machine.guestd_url
        assert (url is not None) == machine.spec.image.has_guestd
        assert url is None or url.startswith("http://127.0.0.1:")

    async def test_the_display_shows_the_screen_in_its_true_size(self, machine: Machine) -> None:
        async with self.display(machine) as client:
            pixels = await read_screen(client)
        spec = machine.spec
        assert pixels.shape == (spec.screen_height_px, spec.screen_width_px)

    async def test_a_screendump_is_a_png_of_the_screen(self, machine: Machine) -> None:
        with Image.open(io.BytesIO(await machine.screendump())) as image:
            assert image.format == "PNG"
            assert image.size == (machine.spec.screen_width_px, machine.spec.screen_height_px)

    async def test_input_changes_pixels(self, machine: Machine) -> None:
        async with asyncio.timeout(self.boot_timeout_s), self.display(machine) as client:
            before = await read_screen(client)
            changed = False
            while not changed:
                await self.provoke(client)
                await asyncio.sleep(0.05)
                changed = not np.array_equal(before, await read_screen(client))
        assert changed

    async def test_pause_and_resume_repeat_harmlessly(self, machine: Machine) -> None:
        await machine.pause()
        await machine.pause()
        states = [machine.state]
        await machine.resume()
        await machine.resume()
        assert [*states, machine.state] == [MachineState.PAUSED, MachineState.RUNNING]
        assert await machine.agent_command("guest-ping", timeout_s=self.answer_timeout_s) == {}

    async def test_a_paused_machine_does_not_answer_and_then_does(self, machine: Machine) -> None:
        await machine.pause()
        try:
            with pytest.raises(GuestUnresponsive):
                await machine.agent_command("guest-ping", timeout_s=0.2)
        finally:
            await machine.resume()
        assert await self.run(machine, "echo", "again") == b"again\n"

    async def test_a_machine_costs_memory(self, machine: Machine) -> None:
        usage = await machine.usage()
        assert usage.rss_bytes >= usage.private_dirty_bytes > 0
        assert usage.overlay_bytes > 0

    async def test_reaping_spares_the_machines_of_this_daemon(self, hypervisor: Hypervisor, machine: Machine) -> None:
        assert await hypervisor.reap() == []
        assert await machine.agent_command("guest-ping", timeout_s=self.answer_timeout_s) == {}

    async def test_two_machines_do_not_see_each_others_files(self, hypervisor: Hypervisor, machine: Machine) -> None:
        await self.write_file(machine, _PROBE_PATH, b"first")
        async with self.new_machine(hypervisor) as other:
            await self.wait_agent(other)
            with pytest.raises(GuestError):
                await self.read_file(other, _PROBE_PATH)
            await self.write_file(other, _PROBE_PATH, b"second")
            assert await self.read_file(machine, _PROBE_PATH) == b"first"
            assert await self.read_file(other, _PROBE_PATH) == b"second"

    # Tests on machines of their own, booted or not

    async def test_destroy_leaves_nothing_and_repeats_harmlessly(self, hypervisor: Hypervisor) -> None:
        machine = await hypervisor.create(self.make_spec(new_machine_id()))
        assert self.leftovers(hypervisor, machine.machine_id) != []
        await asyncio.gather(*(machine.destroy() for _ in range(5)))
        await machine.destroy()
        assert self.leftovers(hypervisor, machine.machine_id) == []
        assert machine.state is MachineState.GONE
        assert machine.lost.is_set()
        assert machine.lost_reason

    async def test_everything_asked_of_a_machine_that_is_gone_raises_machine_lost(self, hypervisor: Hypervisor) -> None:
        machine = await hypervisor.create(self.make_spec(new_machine_id()))
        await machine.destroy()
        for ask in (machine.open_display, machine.screendump, machine.pause, machine.resume, machine.usage):
            with pytest.raises(MachineLost):
                await ask()
        with pytest.raises(MachineLost):
            await machine.agent_command("guest-ping", timeout_s=1)

    async def test_a_cancelled_destroy_is_finished_before_the_cancellation_arrives(
        self, hypervisor: Hypervisor
    ) -> None:
        machine = await hypervisor.create(self.make_spec(new_machine_id()))
        destroying = asyncio.create_task(machine.destroy())
        await asyncio.sleep(0)
        destroying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await destroying
        assert self.leftovers(hypervisor, machine.machine_id) == []

    async def test_a_cancelled_create_leaves_nothing(self, hypervisor: Hypervisor) -> None:
        for delay_s in self.cancel_after_s:
            spec = self.make_spec(new_machine_id())
            creating = asyncio.create_task(hypervisor.create(spec))
            await asyncio.sleep(delay_s)
            if creating.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await creating
            else:
                await (await creating).destroy()
            assert self.leftovers(hypervisor, spec.machine_id) == [], f"cancelled after {delay_s} s"

    async def test_a_machine_killed_from_outside_is_lost_with_a_reason(self, hypervisor: Hypervisor) -> None:
        async with self.new_machine(hypervisor) as machine:
            reader, writer = await machine.open_display()
            await self.kill(machine)
            async with asyncio.timeout(self.prompt_s):
                await machine.lost.wait()
                await read_to_end(reader)
            writer.close()
            assert machine.state is MachineState.GONE
            assert machine.lost_reason
        assert self.leftovers(hypervisor, machine.machine_id) == []

    async def test_a_command_under_way_fails_promptly_when_the_machine_is_killed(self, hypervisor: Hypervisor) -> None:
        async with self.new_machine(hypervisor) as machine:
            # Paused, so that no answer can come first, whether it has booted or not.
            await machine.pause()
            asking = asyncio.create_task(machine.agent_command("guest-ping", timeout_s=60))
            await asyncio.sleep(0.05)
            assert not asking.done()
            await self.kill(machine)
            async with asyncio.timeout(self.prompt_s):
                with pytest.raises(MachineLost):
                    await asking

    # Help

    @asynccontextmanager
    async def display(self, machine: Machine) -> AsyncIterator[RfbClient]:
        """Connect to a machine's display."""
        client = await RfbClient.connect(*await machine.open_display())
        try:
            yield client
        finally:
            await client.close()

    async def run(self, machine: Machine, *argv: str) -> bytes:
        """Run a program through the agent; return its output. Fails unless it exits with 0."""
        started = await machine.agent_command(
            "guest-exec",
            {"path": argv[0], "arg": list(argv[1:]), "capture-output": True},
            timeout_s=self.answer_timeout_s,
        )
        assert isinstance(started, dict)
        while True:
            status = await machine.agent_command(
                "guest-exec-status", {"pid": started["pid"]}, timeout_s=self.answer_timeout_s
            )
            assert isinstance(status, dict)
            if status["exited"]:
                assert status["exitcode"] == 0
                return base64.b64decode(str(status.get("out-data", "")))
            await asyncio.sleep(0.01)

    async def write_file(self, machine: Machine, path: str, data: bytes) -> None:
        """Write a guest file through the agent."""
        handle = await machine.agent_command(
            "guest-file-open", {"path": path, "mode": "w"}, timeout_s=self.answer_timeout_s
        )
        await machine.agent_command(
            "guest-file-write",
            {"handle": handle, "buf-b64": base64.b64encode(data).decode()},
            timeout_s=self.answer_timeout_s,
        )
        await machine.agent_command("guest-file-close", {"handle": handle}, timeout_s=self.answer_timeout_s)

    async def read_file(self, machine: Machine, path: str) -> bytes:
        """Read a small guest file through the agent. Raises: GuestError."""
        handle = await machine.agent_command(
            "guest-file-open", {"path": path, "mode": "r"}, timeout_s=self.answer_timeout_s
        )
        read = await machine.agent_command("guest-file-read", {"handle": handle}, timeout_s=self.answer_timeout_s)
        await machine.agent_command("guest-file-close", {"handle": handle}, timeout_s=self.answer_timeout_s)
        assert isinstance(read, dict)
        return base64.b64decode(str(read["buf-b64"]))


def new_machine_id() -> str:
    """Return an id that no other machine has."""
    return f"contract-{uuid.uuid4().hex[:12]}"


async def read_to_end(reader: asyncio.StreamReader) -> None:
    """Read until the other side has closed or reset the stream."""
    try:
        while await reader.read(1 << 16):
            pass
    except ConnectionError:
        pass


async def read_screen(client: RfbClient) -> npt.NDArray[np.uint32]:
    """Ask a display for all of its pixels and return them, (height, width)."""
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
