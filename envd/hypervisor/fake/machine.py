"""One fake machine: a drawn desktop behind the same connections as a virtual machine.

During boot its screen is black and its services do not respond. While it is paused, the screen is visible, input is
dropped and the guest does not respond. When it is lost or destroyed, all connections are cut at once. A fork starts
paused, in the state of its snapshot.
"""

import asyncio
import itertools
import random
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import JsonValue

from envd.base.aio import race, shielded
from envd.base.errors import GuestUnresponsive, HypervisorError, MachineLost
from envd.base.losses import Loss, Owner, Silence, loss_by_silence
from envd.hypervisor.fake.desktop.canvas import Framebuffer, Picture, Rect
from envd.hypervisor.fake.desktop.desktop import MIN_HEIGHT_PX, MIN_WIDTH_PX, DrawnDesktop
from envd.hypervisor.fake.desktop.keyboard import scancode_of
from envd.hypervisor.fake.faults import Faults
from envd.hypervisor.fake.guest import FakeSnapshot, Guest
from envd.hypervisor.fake.wires.guestd import Guestd, Service
from envd.hypervisor.fake.wires.rfb import RfbConnection
from envd.hypervisor.machine import MachineSpec, MachineState, MachineUsage


class FakeMachine:
    """A machine of `FakeHypervisor`. Tests can kill it and inject faults."""

    def __init__(
        self,
        spec: MachineSpec,
        *,
        snapshot: FakeSnapshot | None = None,
        faults: Faults,
        on_destroyed: Callable[["FakeMachine"], None],
        guest: Guest | None = None,
    ) -> None:
        """Create a machine; call `boot` or `open_wires` next.

        Args:
            snapshot: Snapshot that it is forked from, held until it is destroyed; None if it boots.
            on_destroyed: Called when the machine is destroyed; replaced when another hypervisor adopts it.
            guest: An existing guest, which already holds its snapshot.
        """
        self._orphaned = False
        is_forked = guest is None and snapshot is not None
        if guest is not None:
            pass
        elif snapshot is None:
            guest = Guest(width_px=spec.screen_width_px, height_px=spec.screen_height_px)
        else:
            guest = snapshot.frozen.guest.copy()
            guest.files.share()
            snapshot.acquire()
        self.spec = spec
        self.machine_id = spec.machine_id
        self.snapshot = snapshot
        self._set_guest(guest)
        self._waits_for_state = is_forked
        self.lost = asyncio.Event()
        self.loss: Loss | None = None
        self.on_lost: Callable[[FakeMachine], None] = lambda _: None
        """Called once the machine is lost, before anything raises MachineLost."""
        self.faults = faults
        self.services: Mapping[int, Service] = {}
        """Programs that listen on ports of the guest's loopback."""
        self.input_count = 0
        """Key and pointer events that the guest received, without dropped ones."""
        self.on_destroyed = on_destroyed
        self._guestd = Guestd(self) if spec.image.has_guestd else None
        self._displays: set[RfbConnection] = set()
        self._command_count = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._animation_task: asyncio.Task[None] | None = None
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

    @property
    def guest_machine_id(self) -> str:
        """Machine id inside the guest (machine-id(5)); empty if not set."""
        return self.files.get("/etc/machine-id", b"").decode().strip()

    async def boot(self, start: Picture) -> None:
        """Open guestd's port and boot; `start` is the first picture of the session.

        On failure or cancellation the caller destroys the machine. Raises: HypervisorError.
        """
        if self.faults.create_delay_s:
            await asyncio.sleep(self.faults.create_delay_s)
        if self.faults.create_error:
            raise HypervisorError(f"machine {self.machine_id}: {self.faults.create_error}")
        if self._guestd:
            await self._guestd.start()
        if self.faults.boot_delay_s or self.faults.boot_failure:
            self._spawn(self._boot(start), "boot")
        else:
            self._show_desktop(start)

    async def open_wires(self) -> None:
        """Open guestd's port of a forked or adopted machine.

        On failure or cancellation the caller destroys the machine. Raises: HypervisorError: a fault is injected.
        """
        if self.faults.fork_delay_s:
            await asyncio.sleep(self.faults.fork_delay_s)
        if self.faults.fork_error:
            raise HypervisorError(f"machine {self.machine_id}: {self.faults.fork_error}")
        if self._guestd:
            await self._guestd.start()
        self._update_animation()

    def load(self, snapshot: FakeSnapshot) -> None:
        """Put a machine that waits for a state into that of a snapshot. Raises: HypervisorError: it does not wait."""
        if not self._waits_for_state or self.snapshot is None or self.snapshot.template is not snapshot.template:
            raise HypervisorError(f"machine {self.machine_id}: not waiting for a state of {snapshot!r}")
        former, self.snapshot = self.snapshot, snapshot
        if snapshot is not former:
            snapshot.acquire()
            self.guest.release()
            guest = snapshot.frozen.guest.copy()
            guest.files.share()
            self._set_guest(guest)
            former.release()
        self._waits_for_state = False
        self._update_animation()

    def _set_guest(self, guest: Guest) -> None:
        guest.on_change = self._screen_changed
        guest.on_end = self._guest_ended
        self.guest = guest
        self.files = guest.files
        self.programs = guest.programs

    def _guest_ended(self, cause: str) -> None:
        self.end(Loss(Owner.GUEST, f"its guest {'rebooted' if cause == 'REBOOT' else 'powered off'}", cause))

    # The protocol

    def processor_s(self) -> float | None:
        """Return None: no guest code runs."""
        return None

    async def open_display(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.check_present("open its display")
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        connection = RfbConnection(self, name=f"envd ({self.machine_id})", call_later=loop.call_later)
        self._displays.add(connection)
        connection.answer_with(self.faults.display_update)
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
            async with asyncio.timeout(timeout_s):
                await self.reach_guest(delay_s=self.faults.agent_delay_s, silent=self.faults.agent_silent)
        except TimeoutError:
            raise GuestUnresponsive(
                f"machine {self.machine_id} ({self.state.value}): its guest agent did not answer {command}"
                f" within {timeout_s:g} s"
            ) from None
        if self.faults.agent is None:
            return self.guest.agent.execute(command, arguments)
        asking = asyncio.ensure_future(self.faults.agent(command, arguments, timeout_s))
        try:
            await race(asking, self.lost)
            self.check_present(f"ask its guest agent for {command}")
            return await asking
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

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
            self.end(Loss(Owner.GUEST, reason, "DISK_FULL"))

    async def examine(self) -> Loss:
        """See `Machine`: a starved guest has got no processor, and a stopped QEMU does not answer."""
        await asyncio.sleep(0)
        silence = Silence(
            run_state="running" if self.faults.monitor_answers else "",
            agent_answers=not (self.faults.agent_silent or self.faults.starved),
            waited_s=10.0 if self.faults.starved else 0.0,
        )
        return self.loss or loss_by_silence(silence)

    async def destroy(self) -> None:
        """Destroy the machine and cut all connections. Idempotent; cancellation takes effect after the work is done."""
        if self._destroy_task is None:
            self._destroy_task = asyncio.create_task(self._destroy(), name=f"destroy:{self.machine_id}")
        await shielded(self._destroy_task)

    # Control by tests

    def kill(self, reason: str) -> None:
        """Lose the machine now, as if QEMU was killed. Its disk remains until `destroy`."""
        self.end(Loss(Owner.HOST, reason))

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
        for task in self._tasks:
            task.cancel()
        self.cut_display()
        if self._guestd:
            self._guestd.cut()

    def orphan(self, on_destroyed: "Callable[[FakeMachine], None]") -> "FakeMachine":
        """Act as if the daemon was killed but not QEMU; returns a new, unconnected handle of the machine.

        This handle reports the machine as lost and can no longer destroy it.
        """
        was_running, loss = self.state is MachineState.RUNNING, self.loss
        self.kill("its daemon was killed")
        self._orphaned = True
        left = FakeMachine(
            self.spec, snapshot=self.snapshot, faults=self.faults, on_destroyed=on_destroyed, guest=self.guest
        )
        left._running.clear()
        if loss is not None:
            left.end(loss)
        elif was_running:
            left._running.set()
            left.guest.clock.start()
        return left

    def inject(self, **changes: Any) -> None:
        """Change some of its faults, by field names of `Faults`."""
        self.faults = replace(self.faults, **changes)
        self._update_animation()
        for display in self._displays:
            display.answer_with(self.faults.display_update)

    def cut_display(self) -> None:
        for display in list(self._displays):
            display.close()

    def resize_screen(self, *, width_px: int, height_px: int) -> None:
        """Change the guest's screen size. Raises: HypervisorError, MachineLost."""
        self.check_present("resize its screen")
        check_screen(width_px, height_px)
        self.guest.resize_screen(width_px=width_px, height_px=height_px)
        for display in list(self._displays):
            display.resized()

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

    async def reach_guest(self, *, delay_s: float = 0.0, silent: bool = False) -> DrawnDesktop:
        """Wait until a command reaches the guest and its response is due; return the guest's desktop.

        Raises:
            MachineLost: The machine is gone.
        """
        if silent or delay_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.lost.wait(), None if silent else delay_s)
        await self._booted.wait()
        await self.wait_running()
        limit = self.faults.die_after_commands
        if limit is not None and next(self._command_count) > limit:
            self.kill(f"killed by command {limit + 1}")
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
        if not self.faults.reaction_s:
            react()
            return
        if self.state is not MachineState.RUNNING:
            return
        clock = self.guest.clock
        due_s = clock.monotonic_s() + self._reaction_rng.uniform(0, self.faults.reaction_s)
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
        self.input_count += 1
        limit = self.faults.die_after_inputs
        if limit is not None and self.input_count > limit:
            self.kill(f"killed by input event {limit + 1}")
            return None
        return self.desktop

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=f"{name}:{self.machine_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _boot(self, start: Picture) -> None:
        await asyncio.sleep(self.faults.boot_delay_s)
        await self._running.wait()
        if self.faults.boot_failure:
            self.kill(self.faults.boot_failure)
        else:
            self._show_desktop(start)

    def _show_desktop(self, start: Picture) -> None:
        self.guest.show_desktop(start)
        self._booted.set()
        self._update_animation()

    def _screen_changed(self, rects: list[Rect]) -> None:
        for display in list(self._displays):
            display.changed(rects)

    def _update_animation(self) -> None:
        if (
            self.desktop
            and not self._waits_for_state
            and self.faults.animation_interval_s
            and self._animation_task is None
            and not self.lost.is_set()
        ):
            self._animation_task = self._spawn(self._animate(self.desktop), "animation")

    async def _animate(self, desktop: DrawnDesktop) -> None:
        while self.faults.animation_interval_s:
            await asyncio.sleep(self.faults.animation_interval_s)
            await self._running.wait()
            desktop.animate()
        self._animation_task = None

    async def _destroy(self) -> None:
        self.kill("destroyed")
        if self.faults.destroy_delay_s:
            await asyncio.sleep(self.faults.destroy_delay_s)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._guestd:
            await self._guestd.close()
        if self._orphaned:
            return
        if self.snapshot:
            self.snapshot.release()
        self.guest.release()
        self.on_destroyed(self)


def check_screen(width_px: int, height_px: int) -> None:
    """Check that the desktop fits on the screen. Raises: HypervisorError."""
    if width_px < MIN_WIDTH_PX or height_px < MIN_HEIGHT_PX:
        raise HypervisorError(
            f"the fake desktop needs a screen of at least {MIN_WIDTH_PX}x{MIN_HEIGHT_PX}, not {width_px}x{height_px}"
        )
