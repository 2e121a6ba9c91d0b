"""The machine contract on fake machines, with and without delays."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest_asyncio

from envd.drawn import fake_image
from envd.hypervisor.machine import Hypervisor, Machine, MachineSpec, Snapshot
from tests.support.faulty import Faults, FaultyHypervisor, FaultyMachine
from tests.support.machine_contract.machine import MachineContract


class TestMachineContractOnFake(MachineContract):
    faults: ClassVar[Faults] = Faults()

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def hypervisor(cls) -> AsyncIterator[Hypervisor]:
        hypervisor = FaultyHypervisor(faults=cls.faults)
        assert await hypervisor.reap() == []
        yield hypervisor
        assert not hypervisor.machines
        assert not hypervisor.host.captures
        await hypervisor.close()
        stray = [task.get_name() for task in asyncio.all_tasks() if "contract-" in task.get_name()]
        assert stray == []

    @classmethod
    def make_spec(cls, machine_id: str) -> MachineSpec:
        return MachineSpec(machine_id=machine_id, image=fake_image(), screen_width_px=640, screen_height_px=480)

    @classmethod
    async def kill(cls, machine: Machine) -> None:
        assert isinstance(machine, FaultyMachine)
        machine.kill("killed by a signal")

    @classmethod
    async def screendump(cls, machine: Machine) -> npt.NDArray[np.uint8]:
        assert isinstance(machine, FaultyMachine)
        return machine.framebuffer.pixels[:, :, 2::-1].copy()

    @classmethod
    @contextmanager
    def removed(cls, hypervisor: Hypervisor, template: Snapshot) -> Iterator[None]:
        assert isinstance(hypervisor, FaultyHypervisor)
        stored = dict(hypervisor.host.templates)
        hypervisor.host.templates.clear()
        yield
        hypervisor.host.templates.update(stored)

    @classmethod
    def leftovers(cls, hypervisor: Hypervisor, machine_id: str) -> list[str]:
        assert isinstance(hypervisor, FaultyHypervisor)
        return [left for left in hypervisor.machines if left == machine_id]

    @classmethod
    async def snapshot_leftovers(cls, hypervisor: Hypervisor) -> list[str]:
        assert isinstance(hypervisor, FaultyHypervisor)
        return sorted(hypervisor.host.captures)


class TestMachineContractOnSlowFake(TestMachineContractOnFake):
    faults: ClassVar[Faults] = Faults(
        create_delay_s=0.02,
        boot_delay_s=0.05,
        agent_delay_s=0.005,
        guestd_delay_s=0.005,
        fork_delay_s=0.02,
        capture_delay_s=0.02,
        destroy_delay_s=0.02,
    )
