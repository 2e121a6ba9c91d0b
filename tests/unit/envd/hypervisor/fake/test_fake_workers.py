"""Drawn desktops in worker processes: what the contract of machines does not cover."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from envd.base.config import load
from envd.base.errors import HypervisorError, MachineLost, TemplateCorrupt
from envd.hypervisor.backends import open_hypervisor
from envd.hypervisor.fake import FakeHypervisor, fake_image
from envd.hypervisor.fake.workers.hypervisor import DrawingWorkers, WorkerMachine
from envd.hypervisor.machine import MachineSpec, MachineState


@pytest_asyncio.fixture
async def workers() -> AsyncIterator[DrawingWorkers]:
    workers = DrawingWorkers(2)
    await workers.start()
    yield workers
    await workers.close()


async def kill_worker(machine: WorkerMachine) -> None:
    [pid] = [int(word) for word in repr(machine.worker).split() if word.isdigit()][:1]
    os.kill(pid, signal.SIGKILL)
    await machine.lost.wait()


async def test_a_worker_that_ends_loses_its_machines_and_no_others(
    workers: DrawingWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    booted = await workers.create(MachineSpec(machine_id="boot", image=fake_image()))
    template = await workers.freeze(booted, notes={"made-by": "a test"})
    first, second = await workers.fork(template, "first"), await workers.fork(template, "second")
    assert first.worker is not second.worker
    await first.resume()
    await second.resume()
    capture = await workers.capture(first)
    command = asyncio.create_task(first.agent_command("guest-exec", {"path": "sleep", "arg": ["60"]}, timeout_s=5))
    await command
    paused = await workers.fork(capture, "child")
    assert paused.worker is first.worker

    await kill_worker(first)

    assert first.state is paused.state is MachineState.GONE
    assert "worker process" in caplog.text
    with pytest.raises(MachineLost, match="first is gone"):
        await first.agent_command("guest-ping", timeout_s=5)
    with pytest.raises(MachineLost, match="first is gone"):
        await first.open_display()
    with pytest.raises(TemplateCorrupt, match="the worker process that held it ended"):
        await workers.fork(capture, "late")
    assert await second.agent_command("guest-ping", timeout_s=30) == {}
    # A new worker takes its place, with the same template.
    third = await workers.fork(template, "third")
    assert third.worker is not second.worker
    await third.resume()
    assert await third.agent_command("guest-ping", timeout_s=30) == {}
    await asyncio.gather(*(machine.destroy() for machine in (first, second, third, paused)))
    assert workers.machines == {}


async def test_a_call_in_flight_fails_when_its_worker_ends(workers: DrawingWorkers) -> None:
    machine = await workers.create(MachineSpec(machine_id="one", image=fake_image()))
    await machine.pause()
    asking = asyncio.create_task(machine.agent_command("guest-ping", timeout_s=300))
    await asyncio.sleep(0)
    await kill_worker(machine)
    with pytest.raises(MachineLost, match="one is gone"):
        await asking
    await machine.destroy()


async def test_errors_of_a_worker_reach_the_caller(workers: DrawingWorkers) -> None:
    with pytest.raises(HypervisorError, match="at least"):
        await workers.create(MachineSpec(machine_id="small", image=fake_image(), screen_width_px=8, screen_height_px=8))
    assert workers.machines == {}


@pytest.mark.parametrize(("machines", "flag", "expected"), [(8, None, 0), (16, None, 1), (200, 3, 3), (200, 0, 0)])
async def test_desktops_are_drawn_in_workers_if_there_are_many(
    machines: int, flag: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(self: DrawingWorkers) -> None:
        pass

    monkeypatch.setattr(DrawingWorkers, "start", start)
    config = load(
        flags={"hypervisor.uri": "fake", "pools.desktop.size": machines, "hypervisor.drawing_processes": flag}
    )
    hypervisor = await open_hypervisor(config)
    if expected:
        assert isinstance(hypervisor, DrawingWorkers)
        assert f"in {expected} worker processes" in hypervisor.description
    else:
        assert isinstance(hypervisor, FakeHypervisor)
    await hypervisor.close()
