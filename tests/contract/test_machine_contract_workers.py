"""The machine contract on drawn desktops in worker processes."""

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest_asyncio

from envd.hypervisor.contract.machine import MachineContract
from envd.hypervisor.fake import fake_image
from envd.hypervisor.fake.workers.hypervisor import DrawingWorkers, WorkerMachine
from envd.hypervisor.fake.workers.worker import WORKER
from envd.hypervisor.machine import Hypervisor, Machine, MachineSpec, Snapshot


class TestMachineContractOnWorkers(MachineContract):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def hypervisor(cls) -> AsyncIterator[Hypervisor]:
        workers = DrawingWorkers(2)
        await workers.start()
        yield workers
        assert workers.machines == {}
        await workers.close()
        stray = [task.get_name() for task in asyncio.all_tasks() if "contract-" in task.get_name()]
        assert stray == []

    @classmethod
    def make_spec(cls, machine_id: str) -> MachineSpec:
        return MachineSpec(machine_id=machine_id, image=fake_image(), screen_width_px=640, screen_height_px=480)

    @classmethod
    async def kill(cls, machine: Machine) -> None:
        assert isinstance(machine, WorkerMachine)
        await machine.worker.call(machine.machine_id, "kill", "killed by a signal")

    @classmethod
    async def screendump(cls, machine: Machine) -> npt.NDArray[np.uint8]:
        reader, writer = await machine.open_display()
        writer.write(b"RFB 003.008\n\x01\x01")
        # The version, the security type and its result; then width, height, pixel format and name.
        await reader.readexactly(12 + 2 + 4)
        width_px, height_px, name_length = struct.unpack(">HH16xI", await reader.readexactly(24))
        await reader.readexactly(name_length)
        writer.write(struct.pack(">BBHHHH", 3, 0, 0, 0, width_px, height_px))
        await reader.readexactly(4 + 12)
        pixels = np.frombuffer(await reader.readexactly(width_px * height_px * 4), np.uint8)
        writer.close()
        await writer.wait_closed()
        return pixels.reshape(height_px, width_px, 4)[:, :, 2::-1]

    @classmethod
    @contextmanager
    def removed(cls, hypervisor: Hypervisor, template: Snapshot) -> Iterator[None]:
        assert isinstance(hypervisor, DrawingWorkers)
        stored = dict(hypervisor.templates)
        hypervisor.templates.clear()
        yield
        hypervisor.templates.update(stored)

    @classmethod
    def leftovers(cls, hypervisor: Hypervisor, machine_id: str) -> list[str]:
        assert isinstance(hypervisor, DrawingWorkers)
        return [left for left in hypervisor.machines if left == machine_id]

    @classmethod
    async def snapshot_leftovers(cls, hypervisor: Hypervisor) -> list[str]:
        assert isinstance(hypervisor, DrawingWorkers)
        return [name for worker in hypervisor.workers for name in await worker.call(WORKER, "captures")]
