"""Drawn desktops with faults on request: machines that fail, hang, send garbage, or lose their daemon."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
from aiohttp import web
from pydantic import JsonValue

from envd.base.aio import race
from envd.base.config import Config
from envd.base.errors import GuestUnresponsive, HypervisorError, NotForkable
from envd.base.losses import Loss, Silence, loss_by_silence
from envd.drawn import FakeHypervisor, FakeMachine, FakeSnapshot, backend
from envd.drawn.desktop.canvas import Framebuffer, Rect, SharedPicture
from envd.drawn.desktop.desktop import DrawnDesktop
from envd.drawn.machine import check_screen
from envd.drawn.snapshot import FrozenGuest
from envd.drawn.wires.guestd import Guestd
from envd.drawn.wires.rfb import RfbConnection
from envd.guests.guestd import VERSION
from envd.hypervisor.machine import (
    CaptureReport,
    DiskImage,
    Hypervisor,
    Leftover,
    LeftoverKind,
    Machine,
    MachineSpec,
    MachineState,
    Snapshot,
)

#: Answers a command of the guest agent, given its name, its arguments and the timeout in seconds.
Agent = Callable[[str, Mapping[str, JsonValue] | None, float], Awaitable[JsonValue]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Injected faults. By default a machine boots at once and never fails."""

    create_delay_s: float = 0.0
    """Duration of `Hypervisor.create`."""
    create_error: str = ""
    """`Hypervisor.create` raises HypervisorError with this text."""
    boot_delay_s: float = 0.0
    """Time from creation until the desktop is drawn and agent and guestd respond; the screen is black until then."""
    agent_silent: bool = False
    """The guest agent accepts commands and never responds."""
    starved: bool = False
    """The host gives the guest no processor: nothing that `Machine.examine` asks is answered."""
    agent_delay_s: float = 0.0
    """Delay of the guest agent's responses."""
    agent: Agent | None = None
    """Answers the commands of the guest agent in place of the guest; None for the guest's own."""
    guestd_hangs: bool = False
    """guestd accepts connections and never responds."""
    guestd_delay_s: float = 0.0
    """Delay of guestd's responses."""
    guestd_body: Callable[[], AsyncIterator[bytes]] | None = None
    """Body of guestd's answer to every request, in pieces; None for correct answers."""
    display_update: bytes = b""
    """The display's answer to every request for an update; empty for correct answers."""
    die_after_commands: int | None = None
    """The machine is lost at the command that follows this many agent and guestd commands."""
    die_after_inputs: int | None = None
    """The machine is lost at the input event that follows this many key and pointer events."""
    reaction_s: float = 0.0
    """Programs react to each input event after up to this long, in order. A fork has none that are still due."""
    fork_delay_s: float = 0.0
    """Duration of `Hypervisor.fork`."""
    fork_error: str = ""
    """`Hypervisor.fork` raises HypervisorError with this text."""
    capture_delay_s: float = 0.0
    """Duration of `Hypervisor.capture` of the machine, which is paused for that time."""
    capture_error: str = ""
    """`Hypervisor.capture` of the machine raises HypervisorError with this text, after that delay."""
    unforkable: str = ""
    """Name of a device that forks cannot share: `Hypervisor.capture` raises NotForkable with it; empty for none."""
    animation_interval_s: float = 0.0
    """Period at which part of the screen changes, so that it never settles; 0 for no changes."""
    destroy_delay_s: float = 0.0
    """Duration of `destroy`."""


class FaultyDisplay(RfbConnection):
    """One client connection to one screen."""

    _update = b""

    def answer_with(self, update: bytes) -> None:
        """Answer requests with this update from now on; with an empty one, correctly again."""
        if update != self._update:
            self._update = update
            self.changed([self._screen.framebuffer.bounds])

    def _send_pixels(self) -> None:
        if self._update:
            self._send(self._update)
        else:
            super()._send_pixels()


class _Guestd(Guestd):
    async def _serve(self, http_request: web.BaseRequest) -> web.StreamResponse:
        machine = cast("FaultyMachine", self._guest)
        await machine.wait_out(machine.faults.guestd_delay_s, silent=machine.faults.guestd_hangs)
        return await super()._serve(http_request)

    async def _answer(self, http_request: web.BaseRequest, desktop: DrawnDesktop) -> web.StreamResponse:
        body = cast("FaultyMachine", self._guest).faults.guestd_body
        if body is None:
            return await super()._answer(http_request, desktop)
        response = web.StreamResponse(headers={"Server": f"envd-guestd/{VERSION}", "Content-Type": "application/json"})
        with suppress(OSError):  # the reader has closed the connection
            await response.prepare(http_request)
            async for piece in body():
                await response.write(piece)
            await response.write_eof()
        return response


class FaultyMachine(FakeMachine):
    """A machine of `FaultyHypervisor`."""

    display_type = FaultyDisplay
    guestd_type = _Guestd

    def __init__(self, spec: MachineSpec, *, faults: Faults, **options: Any) -> None:
        self.faults = faults
        self.input_count = 0
        """Key and pointer events that the guest received, without dropped ones."""
        self._command_count = itertools.count(1)
        self._animation_task: asyncio.Task[None] | None = None
        self._orphaned = False
        super().__init__(spec, reaction_s=faults.reaction_s, **options)

    @property
    def guest_machine_id(self) -> str:
        """Machine id inside the guest (machine-id(5)); empty if not set."""
        return self.files.get("/etc/machine-id", b"").decode().strip()

    def inject(self, **changes: Any) -> None:
        """Change some of its faults, by field names of `Faults`."""
        self.faults = replace(self.faults, **changes)
        self._update_animation()
        self._spoil_displays()

    def _spoil_displays(self) -> None:
        for display in self._displays:
            cast(FaultyDisplay, display).answer_with(self.faults.display_update)

    def orphan(self, on_destroyed: Callable[[FakeMachine], None]) -> "FaultyMachine":
        """Act as if the daemon was killed but not QEMU; returns a new, unconnected handle of the machine.

        This handle reports the machine as lost and can no longer destroy it.
        """
        was_running, loss = self.state is MachineState.RUNNING, self.loss
        self.kill("its daemon was killed")
        self._orphaned = True
        left = FaultyMachine(self.spec, snapshot=self.snapshot, faults=self.faults, on_destroyed=on_destroyed)
        # The guest, and its hold on the snapshot, pass on.
        if left.snapshot:
            left.snapshot.release()
        left.guest.release()
        left._set_guest(self.guest)
        left._waits_for_state = False
        if left.desktop is not None:
            left._booted.set()
        left._running.clear()
        if loss is not None:
            left.end(loss)
        elif was_running:
            left._running.set()
            left.guest.clock.start()
        return left

    def resize_screen(self, *, width_px: int, height_px: int) -> None:
        """Change the guest's screen size. Raises: HypervisorError, MachineLost."""
        self.check_present("resize its screen")
        check_screen(width_px, height_px)
        self.guest.framebuffer = framebuffer = Framebuffer(np.zeros((height_px, width_px, 4), np.uint8), shared=False)
        if self.desktop is not None:
            self.desktop.resize(framebuffer)
        for display in list(self._displays):
            display.resized()

    async def wait_out(self, delay_s: float, *, silent: bool) -> None:
        """Wait as long as a command takes to reach the guest: until the machine is lost if it is silent."""
        if silent or delay_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.lost.wait(), None if silent else delay_s)

    # What `FakeMachine` does without faults

    async def boot(self, start: SharedPicture) -> None:
        await asyncio.sleep(self.faults.create_delay_s)
        if self.faults.create_error:
            raise HypervisorError(f"machine {self.machine_id}: {self.faults.create_error}")
        await super().boot(start)

    def _show_desktop(self, start: SharedPicture) -> None:
        if self.faults.boot_delay_s:
            self._spawn(self._boot(start), "boot")
        else:
            super()._show_desktop(start)
            self._update_animation()

    async def _boot(self, start: SharedPicture) -> None:
        await asyncio.sleep(self.faults.boot_delay_s)
        await self._running.wait()
        super()._show_desktop(start)
        self._update_animation()

    async def open_wires(self) -> None:
        await asyncio.sleep(self.faults.fork_delay_s)
        if self.faults.fork_error:
            raise HypervisorError(f"machine {self.machine_id}: {self.faults.fork_error}")
        await super().open_wires()
        self._update_animation()

    def load(self, snapshot: FakeSnapshot) -> None:
        super().load(snapshot)
        self._update_animation()

    async def open_display(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        opened = await super().open_display()
        self._spoil_displays()
        return opened

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_out(self.faults.agent_delay_s, silent=self.faults.agent_silent)
        except TimeoutError:
            raise GuestUnresponsive(
                f"machine {self.machine_id} ({self.state.value}): its guest agent did not answer {command}"
                f" within {timeout_s:g} s"
            ) from None
        if self.faults.agent is None:
            return await super().agent_command(command, arguments, timeout_s=timeout_s)
        self.check_present(f"ask its guest agent for {command}")
        async with asyncio.timeout(timeout_s):
            await self.reach_guest()
        asking = asyncio.ensure_future(self.faults.agent(command, arguments, timeout_s))
        try:
            await race(asking, self.lost)
            self.check_present(f"ask its guest agent for {command}")
            return await asking
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def examine(self) -> Loss:
        """A starved guest has got no processor."""
        await asyncio.sleep(0)
        silence = Silence(
            run_state="running",
            agent_answers=not (self.faults.agent_silent or self.faults.starved),
            waited_s=10.0 if self.faults.starved else 0.0,
        )
        return self.loss or loss_by_silence(silence)

    async def reach_guest(self) -> DrawnDesktop:
        desktop = await super().reach_guest()
        limit = self.faults.die_after_commands
        if limit is not None and next(self._command_count) > limit:
            self.kill(f"killed by command {limit + 1}")
            self.check_present("reach its guest")
        return desktop

    def _take_input(self) -> DrawnDesktop | None:
        desktop = super()._take_input()
        self.input_count += desktop is not None
        limit = self.faults.die_after_inputs
        if desktop is not None and limit is not None and self.input_count > limit:
            self.kill(f"killed by input event {limit + 1}")
            return None
        return desktop

    async def copied(self) -> None:
        await asyncio.sleep(self.faults.capture_delay_s)
        self.check_present("capture it")
        if self.faults.capture_error:
            raise HypervisorError(f"machine {self.machine_id}: {self.faults.capture_error}")

    async def _disconnect(self) -> None:
        self.kill("destroyed")
        await asyncio.sleep(self.faults.destroy_delay_s)
        await super()._disconnect()

    async def _destroy(self) -> None:
        if self._orphaned:
            await self._disconnect()
        else:
            await super()._destroy()

    def _update_animation(self) -> None:
        if (
            self.desktop
            and not self._waits_for_state
            and self.faults.animation_interval_s
            and self._animation_task is None
            and not self.lost.is_set()
        ):
            self._animation_task = self._spawn(self._animate(), "animation")

    async def _animate(self) -> None:
        """Draw pictures on the panel; consecutive ones differ."""
        for count in itertools.count(1):
            if not self.faults.animation_interval_s:
                break
            await asyncio.sleep(self.faults.animation_interval_s)
            await self._running.wait()
            bounds, shade = self.framebuffer.bounds, count * 37 % 256
            picture = Rect(bounds.right - 24, bounds.bottom - 24, 16, 16)
            self.framebuffer.canvas(picture).fill(picture, (shade, 255 - shade, shade // 2))
            self.guest.on_change([picture])
        self._animation_task = None


class FakeHost:
    """State that outlives a daemon: machines, captures and stored templates."""

    def __init__(self) -> None:
        self.machines: dict[str, FaultyMachine] = {}
        self.captures: dict[str, FakeSnapshot] = {}
        """Captures by name, until they are discarded and nothing depends on them."""
        self.templates: dict[MachineSpec, FrozenGuest] = {}


@cache
def _start_picture(width_px: int, height_px: int) -> SharedPicture:
    """Draw it once for all hypervisors of this process, of which each would take 10 ms of CPU time."""
    return FakeHypervisor()._picture(width_px, height_px)


class FaultyHypervisor(FakeHypervisor):
    """Makes machines with faults.

    A second one on the same `host` models a restarted daemon: it adopts or reaps what the first one left, and keeps
    its stored templates. Call `die` on the first to model the death of its daemon.
    """

    machines: dict[str, FaultyMachine]  # type: ignore[assignment] # all are its own

    def __init__(self, *, faults: Faults | None = None, host: FakeHost | None = None) -> None:
        super().__init__()
        self.faults = faults or Faults()
        """Faults of machines created or forked from now on."""
        self.host = host or FakeHost()
        self.machines, self.templates = self.host.machines, self.host.templates
        self._own_ids: set[str] = set()
        self._own_captures: set[str] = set()
        self._is_dead = False

    def die(self) -> None:
        """Act as if the daemon was killed: its machines stay on the host, unattended.

        Its handles report their machines as lost, and later calls have no effect.
        """
        self._is_dead = True
        for machine_id in self._own_ids & set(self.machines):
            self.machines[machine_id] = self.machines[machine_id].orphan(self._forget)
        self._own_ids.clear()

    def _picture(self, width_px: int, height_px: int) -> SharedPicture:
        return _start_picture(width_px, height_px)

    async def create(self, spec: MachineSpec) -> FaultyMachine:
        return cast(FaultyMachine, await super().create(spec))

    async def fork(self, snapshot: Snapshot, machine_id: str) -> FaultyMachine:
        return cast(FaultyMachine, await super().fork(snapshot, machine_id))

    async def prepare(self, snapshot: Snapshot, machine_id: str) -> FaultyMachine:
        return cast(FaultyMachine, await super().prepare(snapshot, machine_id))

    async def capture(self, machine: Machine) -> FakeSnapshot:
        fork = cast(FaultyMachine, machine)
        if fork.faults.unforkable:
            fork.check_present("capture it")
            raise NotForkable(f"machine {fork.machine_id} cannot be forked: {fork.faults.unforkable}")
        return await super().capture(machine)

    async def adopt(self, machine_ids: Collection[str]) -> dict[str, Machine]:
        """Take over, paused, those of an earlier hypervisor's machines that are present and booted."""
        adopted: dict[str, Machine] = {}
        for machine_id in set(machine_ids) & set(self.machines) - self._own_ids:
            machine = self.machines[machine_id]
            if machine.state is MachineState.GONE or machine.desktop is None:
                continue
            machine.on_destroyed = self._forget
            self._own_ids.add(machine_id)
            await machine.open_wires()
            await machine.pause()
            # Its daemon can no longer discard these snapshots, so they are removed with the machine.
            snapshot = machine.snapshot
            while snapshot is not None:
                self._own_captures.add(snapshot.name)
                await snapshot.discard()
                snapshot = snapshot.parent
            adopted[machine_id] = machine
        return adopted

    async def reap(self) -> list[str]:
        """Destroy what earlier hypervisors left on this host, except templates. Returns the ids of the machines."""
        orphans = [machine for id, machine in self.machines.items() if id not in self._own_ids]
        for machine in orphans:
            await machine.destroy()
        for name in set(self.host.captures) - self._own_captures:
            del self.host.captures[name]
        return [machine.machine_id for machine in orphans]

    async def leftovers(self) -> list[Leftover]:
        """Return machines and captures on the host that belong to no live hypervisor."""
        machines = set(self.machines) - self._own_ids
        captures = set(self.host.captures) - self._own_captures
        return [
            *(Leftover(LeftoverKind.DOMAIN, machine_id) for machine_id in sorted(machines)),
            *(Leftover(LeftoverKind.CAPTURE, name) for name in sorted(captures)),
        ]

    async def remove(self, leftover: Leftover) -> None:
        if leftover not in await self.leftovers():
            return
        if leftover.kind is LeftoverKind.DOMAIN:
            await self.machines[leftover.name].destroy()
        else:
            del self.host.captures[leftover.name]

    def _enter(self, machine: FakeMachine) -> FakeMachine:
        self._own_ids.add(machine.machine_id)
        return super()._enter(machine)

    def _forget(self, machine: FakeMachine) -> None:
        super()._forget(machine)
        self._own_ids.discard(machine.machine_id)

    def _captured(self, frozen: FrozenGuest, report: CaptureReport, parent: FakeSnapshot) -> FakeSnapshot:
        capture = super()._captured(frozen, report, parent)
        capture.on_gone = self._forget_capture
        self.host.captures[capture.name] = capture
        self._own_captures.add(capture.name)
        return capture

    def _forget_capture(self, capture: FakeSnapshot) -> None:
        self.host.captures.pop(capture.name, None)
        self._own_captures.discard(capture.name)

    def _require_new(self, machine_id: str) -> None:
        if self._is_dead:
            raise HypervisorError(f"machine {machine_id} cannot be created: the daemon was killed")
        super()._require_new(machine_id)

    def _new_machine(self, spec: MachineSpec, snapshot: FakeSnapshot | None = None) -> FaultyMachine:
        return FaultyMachine(spec, snapshot=snapshot, faults=self.faults, on_destroyed=self._forget)


@asynccontextmanager
async def faulty_desktops() -> AsyncIterator[None]:
    """Open a `FaultyHypervisor` for `hypervisor.uri = "fake"` during the block."""

    async def open_faulty(_config: Config, _images: Iterable[DiskImage]) -> Hypervisor:
        return FaultyHypervisor()

    former = backend.BACKEND
    backend.BACKEND = replace(former, open=open_faulty)
    try:
        yield
    finally:
        backend.BACKEND = former
