"""Injects faults: into fake machines through their own fault switches, into real ones through signals to QEMU.

Every fault is in the accounting before it can have an effect, and is ended in every case.
"""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_args

from envd.base.errors import EnvdError
from envd.episodes.service import EpisodeService
from envd.hypervisor.qemu.processes import machine_pids
from tests.soak.accounting import Accounting, InjectedFault
from tests.soak.bombs import file_bombs
from tests.soak.schedule import FAKE_RATES, HOSTILE_GUESTS, REAL_RATES, Fault, PlannedFault, pick_one
from tests.support.faulty import FaultyHypervisor, FaultyMachine
from tests.support.hostile import AgentAttack, DisplayAttack, GuestdAttack, display_update, guestd_body, hostile_agent

_GUEST_COMMAND_TIMEOUT_S = 20.0


class Injector(Protocol):
    """Injects faults."""

    @property
    def rates(self) -> Mapping[Fault, float]:
        """Supported faults, and their rate per minute and machine."""

    async def inject(self, planned: PlannedFault, accounting: Accounting) -> None:
        """Inject a fault, and end it after its duration. Does nothing without a machine to inject it into."""


@asynccontextmanager
async def _recorded(planned: PlannedFault, accounting: Accounting, machine_id: str = "") -> AsyncIterator[None]:
    fault = InjectedFault(kind=planned.kind, machine_id=machine_id, begin_s=time.monotonic())
    accounting.faults.append(fault)
    accounting.note_machine(machine_id)
    try:
        yield
        await asyncio.sleep(planned.length_s)
    finally:
        fault.end_s = time.monotonic()


class FakeInjector:
    """Uses the fault switches of fake machines."""

    rates = FAKE_RATES

    def __init__(self, hypervisor: FaultyHypervisor, service: EpisodeService) -> None:
        self._hypervisor = hypervisor
        self._service = service
        # In turn, so that a short soak has all of them.
        self._bombs = itertools.cycle(file_bombs().values())
        self._agents = itertools.cycle(map(hostile_agent, get_args(AgentAttack)))
        self._guestd_bodies = itertools.cycle(partial(guestd_body, attack) for attack in get_args(GuestdAttack))
        self._display_updates = itertools.cycle(map(display_update, get_args(DisplayAttack)))

    async def inject(self, planned: PlannedFault, accounting: Accounting) -> None:
        """See `Injector.inject`."""
        match planned.kind:
            case Fault.FORK_REFUSED:
                await self._with_new_machines(planned, accounting, fork_error="no memory left (soak)")
            case Fault.FORK_SLOW:
                await self._with_new_machines(planned, accounting, fork_delay_s=1.0)
            case kind:
                machine = self._machine_for(planned.pick, of_episode=kind in HOSTILE_GUESTS)
                if machine is not None:
                    await self._inject_into(machine, kind, planned, accounting)

    def _machine_for(self, pick: float, *, of_episode: bool) -> FaultyMachine | None:
        """Return a machine; with `of_episode`, None if no episode has one: only agents make guests hostile."""
        live = self._hypervisor.live_machine_ids
        leased = [machine_id for machine_id in self._service.machine_ids().values() if machine_id in live]
        machine_id = pick_one(leased if leased or of_episode else list(live), pick)
        return None if machine_id is None else self._hypervisor.machines[machine_id]

    async def _inject_into(
        self, machine: FaultyMachine, kind: Fault, planned: PlannedFault, accounting: Accounting
    ) -> None:
        async with _recorded(planned, accounting, machine.machine_id):
            match kind:
                case Fault.MACHINE_KILLED:
                    machine.kill("killed by the soak")
                case Fault.DISPLAY_CUT:
                    machine.cut_display()
                case Fault.GUESTD_SILENT:
                    machine.inject(guestd_hangs=True)
                case Fault.AGENT_SILENT:
                    machine.inject(agent_silent=True)
                case Fault.FILE_BOMB:
                    path, content = next(self._bombs)
                    machine.files[path] = content
                case Fault.AGENT_ATTACK:
                    machine.inject(agent=next(self._agents))
                case Fault.GUESTD_ATTACK:
                    machine.inject(guestd_body=next(self._guestd_bodies))
                case Fault.DISPLAY_ATTACK:
                    machine.inject(display_update=next(self._display_updates))
                case Fault.CAPTURE_REFUSED:
                    machine.inject(capture_error="no space left on device (soak)")
                case Fault.DESTROY_SLOW:
                    machine.inject(destroy_delay_s=2.0)
        # A slow destroy stays set: the machine is not destroyed yet.
        machine.inject(
            guestd_hangs=False, agent_silent=False, capture_error="", agent=None, guestd_body=None, display_update=b""
        )

    async def _with_new_machines(self, planned: PlannedFault, accounting: Accounting, **faults: Any) -> None:
        before = self._hypervisor.faults
        try:
            async with _recorded(planned, accounting):
                self._hypervisor.faults = replace(before, **faults)
        finally:
            cleared = {name: getattr(type(before)(), name) for name in faults}
            self._hypervisor.faults = replace(self._hypervisor.faults, **cleared)


class HostInjector:
    """Signals the QEMU processes of real machines, and kills guestd inside guests."""

    rates = REAL_RATES

    def __init__(self, state_dir: Path, service: EpisodeService) -> None:
        self._state_dir = state_dir
        self._service = service

    async def inject(self, planned: PlannedFault, accounting: Accounting) -> None:
        """See `Injector.inject`."""
        if planned.kind is Fault.GUESTD_KILLED:
            await self._kill_guestd(planned, accounting)
            return
        pids = await asyncio.to_thread(machine_pids, self._state_dir)
        leased = [machine_id for machine_id in self._service.machine_ids().values() if machine_id in pids]
        machine_id = pick_one(leased or list(pids), planned.pick)
        if machine_id is None:
            return
        with suppress(ProcessLookupError):
            # By pidfd: at the end of the fault the pid may belong to another process.
            handle = os.pidfd_open(pids[machine_id])
            try:
                async with _recorded(planned, accounting, machine_id):
                    signal.pidfd_send_signal(
                        handle, signal.SIGSTOP if planned.kind is Fault.MACHINE_STOPPED else signal.SIGKILL
                    )
            finally:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGCONT)
                os.close(handle)

    async def _kill_guestd(self, planned: PlannedFault, accounting: Accounting) -> None:
        episodes = self._service.machine_ids()
        episode_id = pick_one(list(episodes), planned.pick)
        if episode_id is None:
            return
        argv = ["pkill", "-KILL", "-f", "m guestd --user"]
        with suppress(EnvdError):
            async with _recorded(planned, accounting, episodes[episode_id]):
                await self._service.run_command(episode_id, argv, timeout_s=_GUEST_COMMAND_TIMEOUT_S, as_root=True)


def injector_for(hypervisor: object, *, state_dir: Path, service: EpisodeService) -> Injector:
    """Return the injector for the machines of a hypervisor."""
    if isinstance(hypervisor, FaultyHypervisor):
        return FakeInjector(hypervisor, service)
    return HostInjector(state_dir, service)


def machine_finder(service: EpisodeService) -> Callable[[str], str]:
    """Return a function from an episode id to the id of its machine; empty if it has none now."""
    return lambda episode_id: service.machine_ids().get(episode_id, "")
