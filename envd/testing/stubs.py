# ruff: noqa: ARG002 -- the signatures are those of the real ones
"""Machines and desktops with nothing behind them, for tests of pools and episodes: instant, countable, breakable.

For a desktop that can be seen and used, take the fake hypervisor; these know only their life.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from envd.errors import HypervisorError, MachineLost
from envd.guest.actions import Action, ActionOutcome
from envd.guest.desktop import CommandResult, Desktop, ReadyReport
from envd.guest.observation import EncodedFrame, Encoding, Observation, ObservationOptions, SettlePolicy, SettleResult
from envd.hypervisor.machine import (
    Accelerator,
    DiskImage,
    JsonValue,
    Machine,
    MachineSpec,
    MachineState,
    MachineUsage,
)

IMAGE = DiskImage(name="desktop", digest="0" * 64, disk=Path("/nowhere/desktop.qcow2"))


class StubMachine:
    """A machine that lives until it is destroyed or told to die."""

    def __init__(self, spec: MachineSpec, hypervisor: "StubHypervisor") -> None:
        """Start running."""
        self.spec = spec
        self.lost = asyncio.Event()
        self.lost_reason = ""
        self.guestd_url = None
        self.destroy_errors: list[Exception] = []
        """Raised by `destroy`, one a call, before it works."""
        self._hypervisor = hypervisor

    @property
    def machine_id(self) -> str:
        """The id of its spec."""
        return self.spec.machine_id

    @property
    def state(self) -> MachineState:
        """Where it is in its life."""
        return MachineState.GONE if self.lost.is_set() else MachineState.RUNNING

    def die(self, reason: str = "QEMU was killed") -> None:
        """Be gone, as if QEMU had exited; `destroy` must still clear up."""
        self.lost_reason = self.lost_reason or reason
        self.lost.set()

    async def open_display(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Refuse: there is none."""
        raise HypervisorError("a stub machine has no display")

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        """Refuse: there is none."""
        raise HypervisorError("a stub machine has no agent")

    async def screendump(self) -> bytes:
        """Refuse: there is none."""
        raise HypervisorError("a stub machine has no screen")

    async def pause(self) -> None:
        """Do nothing."""

    async def resume(self) -> None:
        """Do nothing."""

    async def usage(self) -> MachineUsage:
        """Cost 1 MiB."""
        if self.lost.is_set():
            raise MachineLost(f"machine {self.machine_id} is gone: {self.lost_reason}")
        return MachineUsage(rss_bytes=2 << 20, private_dirty_bytes=1 << 20, overlay_bytes=0)

    async def destroy(self) -> None:
        """Be gone, and leave nothing."""
        await asyncio.sleep(0)
        await self._hypervisor.destroy_gate.wait()
        if self.destroy_errors:
            raise self.destroy_errors.pop(0)
        self.die("destroyed")
        self._hypervisor.machines.pop(self.machine_id, None)


class StubHypervisor:
    """Makes stub machines and knows which are left."""

    accelerator = Accelerator.FAKE
    description = "stub"

    def __init__(self) -> None:
        """Have no machine, and nothing in the way of one."""
        self.machines: dict[str, StubMachine] = {}
        """Every machine that was made and not destroyed, those that died included."""
        self.made: list[StubMachine] = []
        """Every machine that was ever made, oldest first."""
        self.peak_count = 0
        """Most machines that there were at once."""
        self.create_errors: list[Exception] = []
        """Raised by `create`, one a call, before it works."""
        self.create_gate = _open_gate()
        self.ready_gate = _open_gate()
        self.destroy_gate = _open_gate()
        """Cleared, these hold up `create`, `Desktop.wait_ready` and `destroy`."""
        self.create_count = 0
        """Calls of `create`."""

    async def create(self, spec: MachineSpec) -> StubMachine:
        """Make a machine."""
        self.create_count += 1
        await asyncio.sleep(0)
        await self.create_gate.wait()
        if self.create_errors:
            raise self.create_errors.pop(0)
        if spec.machine_id in self.machines:
            raise HypervisorError(f"machine {spec.machine_id} is there already")
        machine = self.machines[spec.machine_id] = StubMachine(spec, self)
        self.made.append(machine)
        self.peak_count = max(self.peak_count, len(self.machines))
        return machine

    async def reap(self) -> list[str]:
        """Find nothing."""
        return []

    async def close(self) -> None:
        """Do nothing."""

    def desktop(self, machine: Machine) -> "StubDesktop":
        """Connect to a machine, as a pool's `make_desktop`."""
        return StubDesktop(machine, self.ready_gate)


class StubDesktop(Desktop):
    """A desktop that notes what it is asked to do, and does it when its gates are open."""

    def __init__(self, machine: Machine, ready_gate: asyncio.Event) -> None:
        """Connect."""
        self.machine = machine
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(_open_gate)
        """Cleared, these hold up the method of that name."""
        self.gates["wait_ready"] = ready_gate
        self.errors: dict[str, Exception] = {}
        """Raised by the method of that name."""
        self.action_error = ""
        """What every action's outcome says."""
        self.calls: list[str] = []
        """Methods that were called, in order."""
        self.actions: list[Action] = []
        """Actions that were performed to their end."""
        self.files: dict[str, bytes] = {}
        self.closed = False

    async def _enter(self, method: str) -> None:
        self.calls.append(method)
        await asyncio.sleep(0)
        gate = asyncio.ensure_future(self.gates[method].wait())
        lost = asyncio.ensure_future(self.machine.lost.wait())
        try:
            await asyncio.wait({gate, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gate.cancel()
            lost.cancel()
        if self.machine.lost.is_set():
            raise MachineLost(f"machine {self.machine.machine_id} is gone: {self.machine.lost_reason}")
        if method in self.errors:
            raise self.errors[method]

    async def wait_ready(self, *, timeout_s: float) -> ReadyReport:
        """Be ready when the gate is open."""
        await self._enter("wait_ready")
        return ReadyReport(agent_s=0.0, session_s=0.0, settled_s=0.0)

    @property
    def screen_size(self) -> tuple[int, int]:
        """What the spec says."""
        return self.machine.spec.screen_width_px, self.machine.spec.screen_height_px

    async def act(self, action: Action) -> ActionOutcome:
        """Note the action."""
        await self._enter("act")
        self.actions.append(action)
        return ActionOutcome(error=self.action_error)

    async def settle(self, policy: SettlePolicy) -> SettleResult:
        """Be quiet at once."""
        await self._enter("settle")
        return SettleResult(settled=True, settle_ms=float(policy.quiet_ms), change_count=0)

    async def observe(self, options: ObservationOptions, *, refresh: bool = False) -> Observation:
        """Show a frame without pixels, named after the machine and what was done on it."""
        await self._enter("observe")
        width_px, height_px = self.screen_size
        return Observation(
            frame=EncodedFrame(
                frame_id=f"{self.machine.machine_id}/{len(self.actions)}",
                width_px=width_px,
                height_px=height_px,
                screen_width_px=width_px,
                screen_height_px=height_px,
                capture_time=datetime(2030, 1, 1, tzinfo=UTC),
                encoding=Encoding.NONE,
                data=b"",
            )
        )

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        as_root: bool = False,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Answer with the command line."""
        await self._enter("run")
        return CommandResult(exit_code=0, stdout=" ".join(argv).encode(), stderr=stdin)

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes | None:
        """Return what was written."""
        await self._enter("read_file")
        return self.files.get(path)

    async def write_file(self, path: str, data: bytes) -> None:
        """Keep the bytes."""
        await self._enter("write_file")
        self.files[path] = data

    async def close(self) -> None:
        """Let go."""
        self.closed = True


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate
