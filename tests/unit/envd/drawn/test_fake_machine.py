"""Fake machines without sockets: lifecycle, faults, guest agent and resource usage."""

import asyncio
import base64
from dataclasses import replace

import pytest

from envd.base.errors import GuestError, GuestUnresponsive, HypervisorError
from envd.base.losses import LossOwner
from envd.drawn import fake_image
from envd.hypervisor.machine import Accelerator, MachineSpec, MachineState
from tests.support.clock import until
from tests.support.fake_agent import ask
from tests.support.faulty import Faults, FaultyHypervisor, FaultyMachine
from tests.support.hostile import AgentAttack, hostile_agent

SPEC = MachineSpec(
    machine_id="one", image=replace(fake_image(), has_guestd=False), screen_width_px=480, screen_height_px=320
)


@pytest.fixture
async def machine(hypervisor: FaultyHypervisor) -> FaultyMachine:
    return await hypervisor.create(SPEC)


async def test_an_id_is_used_once_and_a_small_screen_is_rejected(hypervisor: FaultyHypervisor) -> None:
    with pytest.raises(HypervisorError, match="at least 480x320"):
        await hypervisor.create(replace(SPEC, screen_width_px=100))
    assert hypervisor.machines == {}
    await hypervisor.create(SPEC)
    with pytest.raises(HypervisorError, match=r"^machine one"):
        await hypervisor.create(SPEC)
    assert hypervisor.live_machine_ids == {"one"}
    assert hypervisor.accelerator is Accelerator.FAKE


async def test_the_guest_does_not_respond_before_the_boot_ends(hypervisor: FaultyHypervisor) -> None:
    hypervisor.faults = Faults(boot_delay_s=2.0)
    machine = await hypervisor.create(SPEC)
    assert not machine.framebuffer.pixels.any()
    with pytest.raises(GuestUnresponsive):
        await machine.agent_command("guest-ping", timeout_s=0.005)
    assert await ask(machine, "guest-ping") == {}
    assert machine.framebuffer.pixels.any()


@pytest.mark.parametrize(
    ("attack", "command", "problem"),
    [
        ("endless", "guest-ping", "answers to other sync requests|before the answer"),
        ("large", "guest-exec-status", "JSON outside of strings"),
        ("half", "guest-exec", "closed"),
    ],
)
async def test_a_hostile_agent_fails_its_command(
    attack: AgentAttack, command: str, problem: str, machine: FaultyMachine
) -> None:
    machine.inject(agent=hostile_agent(attack))
    with pytest.raises(GuestUnresponsive, match=problem):
        await machine.agent_command(command, timeout_s=60)
    machine.inject(agent=None)
    assert await ask(machine, "guest-ping") == {}


async def test_programs_can_react_late_but_not_while_the_machine_is_paused(hypervisor: FaultyHypervisor) -> None:
    hypervisor.faults = Faults(reaction_s=0.02)
    machine = await hypervisor.create(SPEC)
    assert machine.desktop is not None
    for scancode in (30, 48, 46):
        machine.key_input(scancode, down=True)
        machine.key_input(scancode, down=False)
    assert machine.desktop.editor.text_area.text == ""
    await machine.pause()
    await asyncio.sleep(0.05)
    assert machine.desktop.editor.text_area.text == ""
    machine.key_input(30, down=True)
    await machine.resume()
    await until(lambda: machine.input_count == 6)
    assert machine.desktop.editor.text_area.text == "abc"


async def test_a_guest_that_powers_off_is_lost_and_its_forks_are_not(hypervisor: FaultyHypervisor) -> None:
    snapshot = await hypervisor.freeze(await hypervisor.create(SPEC), notes={})
    machine, other = [await hypervisor.fork(snapshot, name) for name in ("two", "three")]
    machine.programs.run(["poweroff"])
    assert (machine.state, machine.lost_reason) == (MachineState.GONE, "its guest powered off")
    assert other.state is MachineState.PAUSED


async def test_a_guest_that_reboots_is_lost_by_its_own_doing(machine: FaultyMachine) -> None:
    machine.key_input(0xE6, down=False)
    assert machine.input_count == 0
    for scancode in (29, 56, 0xD3):
        machine.key_input(scancode, down=True)
    assert machine.loss is not None
    assert (machine.loss.owner, machine.loss.cause) == (LossOwner.GUEST, "REBOOT")
    assert machine.lost_reason == "its guest rebooted"


async def test_files_pass_through_the_agent_unchanged(machine: FaultyMachine) -> None:
    data = bytes(range(256)) * 50
    handle = await ask(machine, "guest-file-open", path="/home/user/data", mode="w")
    for at in range(0, len(data), 5000):
        chunk = base64.b64encode(data[at : at + 5000]).decode()
        written = await ask(machine, "guest-file-write", handle=handle, buf_b64=chunk)
        assert written["count"] == len(data[at : at + 5000])
    await ask(machine, "guest-file-close", handle=handle)
    assert machine.files["/home/user/data"] == data
    handle = await ask(machine, "guest-file-open", path="/home/user/data")
    read = b""
    while True:
        part = await ask(machine, "guest-file-read", handle=handle, count=4096)
        read += base64.b64decode(part["buf-b64"])
        if part["eof"]:
            break
    assert read == data
    await ask(machine, "guest-file-close", handle=handle)
    with pytest.raises(GuestError, match="not been found"):
        await ask(machine, "guest-file-read", handle=handle)


async def test_the_agent_returns_output_and_rejects_unknown_programs(machine: FaultyMachine) -> None:
    text = base64.b64encode(b"hello").decode()
    pid = (await ask(machine, "guest-exec", path="cat", input_data=text, capture_output=True))["pid"]
    assert (await ask(machine, "guest-exec-status", pid=pid))["out-data"] == text
    with pytest.raises(GuestError, match="execute"):
        await ask(machine, "guest-exec", path="firefox")
    with pytest.raises(GuestError, match="does not take"):
        await ask(machine, "guest-ping", nonsense=1)


async def test_the_repr_of_a_killed_machine_contains_the_reason(hypervisor: FaultyHypervisor) -> None:
    machine = await hypervisor.create(SPEC)
    assert repr(machine) == "<FakeMachine 'one' running>"
    machine.kill("out of memory")
    machine.kill("again")
    assert repr(machine) == "<FakeMachine 'one' gone out of memory>"
    assert repr(hypervisor) == "<FakeHypervisor 0 live | 1 on the host>"
