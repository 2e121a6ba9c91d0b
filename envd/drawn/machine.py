"""One fake machine: a drawn desktop behind the same connections as a virtual machine.

During boot its screen is black and its services do not respond. While it is paused, the screen is visible, input is
dropped and the guest does not respond. When it is lost or destroyed, all connections are cut at once. A fork starts
paused, in the state of its snapshot.
"""

import asyncio
import random
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import JsonValue

from envd.base.aio import shielded
from envd.base.clock import running_timeout
from envd.base.errors import GuestUnresponsive, HypervisorError, MachineLost
from envd.base.losses import Loss, LossOwner, Silence, loss_by_silence
from envd.drawn.desktop.canvas import Framebuffer, Rect, SharedPicture
from envd.drawn.desktop.desktop import MIN_HEIGHT_PX, MIN_WIDTH_PX, DrawnDesktop
from envd.drawn.desktop.keyboard import scancode_of
from envd.drawn.guest import DrawnGuest
from envd.drawn.programs import RUNNER_PORT
from envd.drawn.runner import DrawnRunner
from envd.drawn.snapshot import FakeSnapshot
from envd.drawn.wires.guestd import Guestd, Service
from envd.drawn.wires.rfb import RfbConnection
from envd.hypervisor.machine import MachineSpec, MachineState, MachineUsage


class FakeMachine:
    """A machine of `FakeHypervisor`."""

    display_type: ClassVar[type[RfbConnection]] = RfbConnection
    guestd_type: ClassVar[type[Guestd]] = Guestd
    reacts_before_answer = False

    def __init__(
        self,
        spec: MachineSpec,
        *,
        snapshot: FakeSnapshot | None = None,
        on_destroyed: Callable[["FakeMachine"], None],
        reaction_s: float = 0.0,
    ) -> None:
        """Create a machine; call `boot` or `open_wires` next.

        Args:
            snapshot: Snapshot that it is forked from, held until it is destroyed; None if it boots.
            on_destroyed: Called when the machine is destroyed; replaced when another hypervisor adopts it.
            reaction_s: Its programs react to each input event after up to this long, in order. A fork has none that
                are still due.
        """
        if snapshot is None:
            guest = DrawnGuest(Framebuffer.black(spec.screen_width_px, spec.screen_height_px))
        else:
            guest = snapshot.frozen.state.build()
            snapshot.acquire()
        self.spec = spec
        self.machine_id = spec.machine_id
        self.snapshot = snapshot
        self._set_guest(guest)
        self._waits_for_state = snapshot is not None
        self.lost = asyncio.Event()
        self.loss: Loss | None = None
        self.on_lost: Callable[[FakeMachine], None] = lambda _: None
        """Called once the machine is lost, before anything raises MachineLost."""
        self.reaction_s = reaction_s
        self._runner = DrawnRunner(lambda: self.guest)
        self.services: Mapping[int, Service] = {RUNNER_PORT: self._runner.serve}
        """Programs that listen on ports of the guest's loopback."""
        self.on_destroyed = on_destroyed
        self._guestd = self.guestd_type(self) if spec.image.has_guestd else None
        self._displays: set[RfbConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._due_inputs: deque[tuple[float, Callable[[], None]]] = deque()
        """Input events that programs have not reacted to: times of the guest's clock, in order."""
        self._reaction_rng = random.Random(spec.machine_id)  # noqa: S311 -- not a secret
        self._destroy_task: asyncio.Task[None] | None = None
        # Both are also set once the machine is gone, so that no waiter hangs.
        self._booted = asyncio.Event()
        self._running = asyncio.Event()
        if snapshot is None:
            self._running.set()
        if guest.desktop is not None:
            self._booted.set()

    def __repr__(self) -> str:
        booting = "" if self._booted.is_set() else " booting"
        return f"<FakeMachine {self.machine_id!r} {self.state.value}{booting} {self.lost_reason}".rstrip() + ">"

    @property
    def lost_reason(self) -> str:
        return self.loss.reason if self.loss else ""

    @property
    def state(self) -> MachineState:
        if self.lost.is_set():
            return MachineState.GONE
        return MachineState.RUNNING if self._running.is_set() else MachineState.PAUSED

    @property
    def guestd_url(self) -> str | None:
        """Base URL of its guestd; None if the image has none."""
        return self._guestd.url if self._guestd else None

    @property
    def desktop(self) -> DrawnDesktop | None:
        """Desktop of the guest's session; None during boot."""
        return self.guest.desktop

    @property
    def framebuffer(self) -> Framebuffer:
        return self.guest.framebuffer

    async def boot(self, start: SharedPicture) -> None:
        """Open guestd's port and boot; `start` is the first picture of the session.

        On failure or cancellation the caller destroys the machine.
        """
        if self._guestd:
            await self._guestd.start()
        self._show_desktop(start)

    async def open_wires(self) -> None:
        """Open guestd's port of a forked or adopted machine.

        On failure or cancellation the caller destroys the machine.
        """
        if self._guestd:
            await self._guestd.start()

    def load(self, snapshot: FakeSnapshot) -> None:
        """Put a machine that waits for a state into that of a snapshot. Raises: HypervisorError: it does not wait."""
        if not self._waits_for_state or self.snapshot is None or self.snapshot.template is not snapshot.template:
            raise HypervisorError(f"machine {self.machine_id}: not waiting for a state of {snapshot!r}")
        former, self.snapshot = self.snapshot, snapshot
        if snapshot is not former:
            snapshot.acquire()
            self.guest.release()
            guest = snapshot.frozen.state.build()
            self._set_guest(guest)
            former.release()
        self._waits_for_state = False

    def _set_guest(self, guest: DrawnGuest) -> None:
        guest.on_change = self._screen_changed
        guest.on_end = self._guest_ended
        self.guest = guest
        self.files = guest.files
        self.programs = guest.programs

    def _guest_ended(self, cause: str) -> None:
        self.end(Loss(LossOwner.GUEST, f"its guest {'rebooted' if cause == 'REBOOT' else 'powered off'}", cause))

    # The protocol

    def processor_s(self) -> float | None:
        """Return None: no guest code runs."""
        return None

    async def open_display(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.check_present("open its display")
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        connection = self.display_type(self, name=f"envd ({self.machine_id})", call_later=loop.call_later)
        self._displays.add(connection)
        try:
            await loop.create_unix_connection(lambda: connection, sock=ours)
            return await asyncio.open_unix_connection(sock=theirs)
        except BaseException:
            connection.close()
            ours.close()
            theirs.close()
            raise

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        self.check_present(f"ask its guest agent for {command}")
        try:
            async with running_timeout(timeout_s):
                await self.reach_guest()
        except TimeoutError:
            raise GuestUnresponsive(
                f"machine {self.machine_id} ({self.state.value}): its guest agent did not answer {command}"
                f" within {timeout_s:g} s"
            ) from None
        return self.guest.agent.execute(command, arguments)

    async def pause(self) -> None:
        """Pause the guest. Raises: MachineLost."""
        self.check_present("pause it")
        self._running.clear()
        self.guest.clock.stop()

    async def resume(self) -> None:
        """Resume the guest. Raises: MachineLost."""
        self.check_present("resume it")
        if self._waits_for_state:
            raise HypervisorError(f"machine {self.machine_id}: no state yet; load one first")
        self._running.set()
        self.guest.clock.start()

    async def usage(self) -> MachineUsage:
        self.check_present("measure it")
        all_bytes = self.framebuffer.mapped_bytes + self.files.size_bytes
        own_bytes = self.own_bytes
        sharer_count = self.snapshot.holder_count if self.snapshot else 1
        return MachineUsage(
            pss_bytes=own_bytes + (all_bytes - own_bytes) // sharer_count, private_dirty_bytes=own_bytes
        )

    @property
    def own_bytes(self) -> int:
        """Bytes of pixels and files that it shares with no other machine."""
        return self.framebuffer.private_bytes + self.files.own_bytes

    def console_tail(self) -> str:
        """Return an empty string: it has no console."""
        return ""

    def enforce_disk_quota(self, quota_bytes: int) -> None:
        """Lose the machine if its own files are larger than `quota_bytes`."""
        used_bytes = self.files.own_bytes
        if used_bytes > quota_bytes:
            reason = f"it used {used_bytes >> 20} MiB of disk, over its quota of {quota_bytes >> 20} MiB"
            self.end(Loss(LossOwner.GUEST, reason, "DISK_FULL"))

    async def examine(self) -> Loss:
        await asyncio.sleep(0)
        return self.loss or loss_by_silence(Silence(run_state="running", agent_answers=True, waited_s=0.0))

    async def destroy(self) -> None:
        """Destroy the machine and cut all connections. Idempotent; cancellation takes effect after the work is done."""
        if self._destroy_task is None:
            self._destroy_task = asyncio.create_task(self._destroy(), name=f"destroy:{self.machine_id}")
        await shielded(self._destroy_task)

    def kill(self, reason: str) -> None:
        """Lose the machine now, as if QEMU was killed. Its disk remains until `destroy`."""
        self.end(Loss(LossOwner.HOST, reason))

    def end(self, loss: Loss) -> None:
        """Lose the machine now, by the host or by its guest. Its disk remains until `destroy`."""
        if self.lost.is_set():
            return
        self.loss = loss
        self.lost.set()
        self.on_lost(self)
        self._booted.set()
        self._running.set()
        self.guest.clock.stop()
        self._runner.end()
        for task in self._tasks:
            task.cancel()
        self.cut_display()
        if self._guestd:
            self._guestd.cut()

    def cut_display(self) -> None:
        for display in list(self._displays):
            display.close()

    # Screen of the RFB server

    def key_input(self, scancode: int, *, down: bool) -> None:
        self._deliver(partial(self._key, scancode, down=down))

    def _key(self, scancode: int, *, down: bool) -> None:
        # QEMU drops the release of a key that is not down (ui/kbd-state.c).
        if not down and self.desktop and not self.desktop.holds_key(scancode):
            return
        desktop = self._take_input()
        if desktop:
            desktop.key(scancode, down=down)

    def keysym_input(self, keysym: int, *, down: bool) -> None:
        scancode = scancode_of(keysym)
        if scancode is not None:
            self.key_input(scancode, down=down)

    def pointer_input(self, x: int, y: int, buttons: int) -> None:
        self._deliver(partial(self._point, x, y, buttons))

    def _point(self, x: int, y: int, buttons: int) -> None:
        desktop = self._take_input()
        if desktop:
            desktop.pointer(x, y, buttons)

    def display_closed(self, connection: RfbConnection) -> None:
        self._displays.discard(connection)

    # Guest of guestd

    async def reach_guest(self) -> DrawnDesktop:
        """Wait until a command reaches the guest and its response is due; return the guest's desktop.

        Raises:
            MachineLost: The machine is gone.
        """
        await self._booted.wait()
        await self.wait_running()
        self.check_present("reach its guest")
        assert self.desktop is not None  # noqa: S101  (a booted machine has one)
        return self.desktop

    async def wait_running(self) -> None:
        """Wait while the machine is paused. Returns at once if it is gone."""
        await self._running.wait()

    # Lifecycle

    def check_present(self, purpose: str) -> None:
        """Check that the machine is not gone. Raises: MachineLost."""
        if self.lost.is_set():
            raise MachineLost(f"machine {self.machine_id} is gone ({self.lost_reason}): cannot {purpose}")

    def _deliver(self, react: Callable[[], None]) -> None:
        if not self.reaction_s:
            react()
            return
        if self.state is not MachineState.RUNNING:
            return
        clock = self.guest.clock
        due_s = clock.monotonic_s() + self._reaction_rng.uniform(0, self.reaction_s)
        self._due_inputs.append((max(due_s, self._due_inputs[-1][0]) if self._due_inputs else due_s, react))
        if len(self._due_inputs) == 1:
            self._spawn(self._react_late(), "reactions")

    async def _react_late(self) -> None:
        """React to input events when they are due; the guest's clock stops while it is paused."""
        while self._due_inputs:
            await self.wait_running()
            due_s, react = self._due_inputs[0]
            if (left_s := due_s - self.guest.clock.monotonic_s()) > 0:
                await asyncio.sleep(left_s)
                continue
            react()
            self._due_inputs.popleft()

    def _take_input(self) -> DrawnDesktop | None:
        # QEMU drops input events while the guest is paused (qemu_input_event_send in ui/input.c).
        if self.state is not MachineState.RUNNING or self.desktop is None:
            return None
        return self.desktop

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=f"{name}:{self.machine_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _show_desktop(self, start: SharedPicture) -> None:
        self.guest.show_desktop(start)
        self._booted.set()

    def _screen_changed(self, rects: list[Rect]) -> None:
        for display in list(self._displays):
            display.changed(rects)

    async def copied(self) -> None:
        """Wait until a copy of its state has been made."""
        await asyncio.sleep(0)

    async def _destroy(self) -> None:
        await self._disconnect()
        if self.snapshot:
            self.snapshot.release()
        self.guest.release()
        self.on_destroyed(self)

    async def _disconnect(self) -> None:
        self.kill("destroyed")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._guestd:
            await self._guestd.close()


def check_screen(width_px: int, height_px: int) -> None:
    """Check that the desktop fits on the screen. Raises: HypervisorError."""
    if width_px < MIN_WIDTH_PX or height_px < MIN_HEIGHT_PX:
        raise HypervisorError(
            f"the fake desktop needs a screen of at least {MIN_WIDTH_PX}x{MIN_HEIGHT_PX}, not {width_px}x{height_px}"
        )
