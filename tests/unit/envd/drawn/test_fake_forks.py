"""Forks of fake machines without sockets: copied and shared state, digests and faults."""

import asyncio
import base64
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envd.base.errors import GuestError, HypervisorError, MachineLost, NotForkable
from envd.desktop.agent import GuestAgent, guest_machine_id, renew_identity
from envd.drawn import FakeSnapshot, fake_image
from envd.hypervisor.machine import MachineSpec, MachineState
from tests.support.fake_agent import ask
from tests.support.faulty import FakeHost, Faults, FaultyHypervisor, FaultyMachine

SPEC = MachineSpec(
    machine_id="base", image=replace(fake_image(), has_guestd=False), screen_width_px=480, screen_height_px=320
)
A, SHIFT, CAPS_LOCK = 30, 42, 58


@pytest.fixture
async def template(hypervisor: FaultyHypervisor) -> FakeSnapshot:
    return await make_template(hypervisor)


@pytest.fixture
async def parent(hypervisor: FaultyHypervisor, template: FakeSnapshot) -> FaultyMachine:
    return await running_fork(hypervisor, template, "parent")


async def make_template(hypervisor: FaultyHypervisor) -> FakeSnapshot:
    return await hypervisor.freeze(await hypervisor.create(SPEC), notes={"by": "a test"})


async def running_fork(hypervisor: FaultyHypervisor, snapshot: FakeSnapshot, machine_id: str) -> FaultyMachine:
    machine = await hypervisor.fork(snapshot, machine_id)
    await machine.resume()
    return machine


async def branch(hypervisor: FaultyHypervisor, parent: FaultyMachine, machine_id: str = "child") -> FaultyMachine:
    """Fork a running machine's current state and resume the fork."""
    snapshot = await hypervisor.capture(parent)
    child = await running_fork(hypervisor, snapshot, machine_id)
    await snapshot.discard()
    return child


def press(machine: FaultyMachine, scancode: int) -> None:
    for down in (True, False):
        machine.key_input(scancode, down=down)


def click(machine: FaultyMachine, name: str, *, window: str) -> None:
    assert machine.desktop is not None
    x, y = machine.desktop.element(name, window=window).rect.center
    for buttons in (0, 1, 0):
        machine.pointer_input(x, y, buttons)


def text_of(machine: FaultyMachine) -> str:
    assert machine.desktop is not None
    return machine.desktop.editor.text_area.text


# Copied state


async def test_windows_and_files_are_copied_then_independent(
    hypervisor: FaultyHypervisor, parent: FaultyMachine
) -> None:
    press(parent, A)
    click(parent, "Count", window="Controls")
    parent.files["/home/user/before"] = b"old"
    child = await branch(hypervisor, parent)
    assert np.array_equal(child.framebuffer.pixels, parent.framebuffer.pixels)
    before = parent.framebuffer.pixels.copy()
    click(child, "Count", window="Controls")
    click(child, "Text", window="Editor")
    press(child, A)
    child.files["/home/user/before"] = b"new"
    assert child.files["/home/user/clicks.txt"] == b"2\n"
    assert (text_of(parent), text_of(child)) == ("a", "aa")
    assert (parent.files["/home/user/before"], parent.files["/home/user/clicks.txt"]) == (b"old", b"1\n")
    assert np.array_equal(before, parent.framebuffer.pixels)
    assert not np.array_equal(before, child.framebuffer.pixels)


async def test_drags_and_held_keys_continue_in_a_fork(hypervisor: FaultyHypervisor, parent: FaultyMachine) -> None:
    desktop = parent.desktop
    assert desktop is not None
    title = desktop.editor.title_bar
    parent.pointer_input(*title.center, 0)
    parent.pointer_input(*title.center, 1)
    parent.key_input(SHIFT, down=True)
    press(parent, CAPS_LOCK)
    child = await branch(hypervisor, parent)
    assert child.desktop is not None
    assert child.desktop.pointer_position == title.center
    assert child.desktop.held_buttons == [1]
    assert child.desktop.held_modifiers == ["shift", "lock"]
    child.pointer_input(title.center[0] + 20, title.center[1] + 10, 1)
    assert child.desktop.editor.rect.x == desktop.editor.rect.x + 20
    press(child, A)
    assert text_of(child) == "a", "shift and caps lock together"


async def test_clipboard_open_files_and_programs_are_copied(
    hypervisor: FaultyHypervisor, parent: FaultyMachine
) -> None:
    await ask(parent, "guest-exec", path="xclip", input_data=base64.b64encode(b"clip").decode())
    pid = (await ask(parent, "guest-exec", path="sleep", arg=["600"]))["pid"]
    handle = await ask(parent, "guest-file-open", path="/tmp/open", mode="w")  # noqa: S108
    await ask(parent, "guest-file-write", handle=handle, buf_b64=base64.b64encode(b"half").decode())
    child = await branch(hypervisor, parent)
    assert child.programs.run(["xclip", "-o"]).stdout == b"clip"
    assert await ask(child, "guest-exec-status", pid=pid) == {"exited": False}
    await ask(child, "guest-file-write", handle=handle, buf_b64=base64.b64encode(b" and whole").decode())
    for machine in (parent, child):
        await ask(machine, "guest-file-close", handle=handle)
    assert parent.files["/tmp/open"] == b"half"  # noqa: S108
    assert child.files["/tmp/open"] == b"half and whole"  # noqa: S108
    child.guest.clock._run_ns += 600 * 10**9
    assert await ask(child, "guest-exec-status", pid=pid) == {"exited": True, "exitcode": 0}
    with pytest.raises(GuestError, match="does not exist"):
        await ask(child, "guest-exec-status", pid=pid)
    child.programs.run(["xclip"], stdin=b"other")
    assert parent.programs.run(["xclip", "-o"]).stdout == b"clip"


async def test_a_screen_of_another_size_is_copied(hypervisor: FaultyHypervisor, parent: FaultyMachine) -> None:
    parent.resize_screen(width_px=600, height_px=400)
    child = await branch(hypervisor, parent)
    assert child.framebuffer.pixels.shape == (400, 600, 4)
    press(child, A)
    assert not np.array_equal(child.framebuffer.pixels, parent.framebuffer.pixels)


# Pausing


async def test_time_stops_in_a_paused_machine(
    hypervisor: FaultyHypervisor, template: FakeSnapshot, parent: FaultyMachine
) -> None:
    first = await hypervisor.fork(template, "first")
    await asyncio.sleep(0.02)
    second = await hypervisor.fork(template, "second")
    date_ns = first.guest.clock.date_ns()
    assert second.guest.clock.date_ns() == date_ns
    assert time.time_ns() - date_ns > 10_000_000
    await first.resume()
    await asyncio.sleep(0.005)
    assert second.guest.clock.date_ns() == date_ns < first.guest.clock.date_ns()
    pid = (await ask(parent, "guest-exec", path="sleep", arg=["600"]))["pid"]
    await parent.pause()
    paused_s = parent.guest.clock.monotonic_s()
    await asyncio.sleep(0.05)
    assert parent.guest.clock.monotonic_s() == paused_s
    await parent.resume()
    assert await ask(parent, "guest-exec-status", pid=pid) == {"exited": False}


async def test_a_fork_changes_only_once_it_runs(hypervisor: FaultyHypervisor, template: FakeSnapshot) -> None:
    hypervisor.faults = Faults(animation_interval_s=0.002)
    machine = await hypervisor.fork(template, "moves")
    before = machine.framebuffer.pixels.copy()
    await asyncio.sleep(0.02)
    assert np.array_equal(before, machine.framebuffer.pixels)
    await machine.resume()
    async with asyncio.timeout(60):
        while np.array_equal(before, machine.framebuffer.pixels):
            await asyncio.sleep(0.001)


async def test_input_to_a_fork_that_never_ran_is_dropped(hypervisor: FaultyHypervisor, template: FakeSnapshot) -> None:
    machine = await hypervisor.fork(template, "still")
    press(machine, A)
    machine.pointer_input(5, 5, 1)
    await machine.resume()
    assert (machine.input_count, text_of(machine)) == (0, "")


# Waking


async def test_a_fork_gets_its_own_identity(hypervisor: FaultyHypervisor, template: FakeSnapshot) -> None:
    machines = [await running_fork(hypervisor, template, machine_id) for machine_id in ("one", "two")]
    for machine in machines:
        assert (machine.guest_machine_id, machine.guest.clock.set_to_ns, machine.files.entropy) == ("", None, b"")
        before_ns = time.time_ns()
        await renew_identity(GuestAgent(machine), machine_id=machine.machine_id, windows=False)
        assert machine.guest_machine_id == guest_machine_id(machine.machine_id)
        set_to_ns = machine.guest.clock.set_to_ns
        assert set_to_ns is not None
        # The date is set in microseconds.
        assert before_ns - 1000 <= set_to_ns <= time.time_ns() + 1000
        assert "/dev/urandom" not in list(machine.files)
    assert machines[0].files.entropy != machines[1].files.entropy


async def test_the_agent_alone_can_set_the_clock_of_a_fork(
    hypervisor: FaultyHypervisor, template: FakeSnapshot
) -> None:
    machine = await hypervisor.fork(template, "windows")
    machine.guest.clock.set_date(5)
    await machine.resume()
    before_ns = time.time_ns()
    await renew_identity(GuestAgent(machine), machine_id="windows", windows=True)
    assert before_ns <= (machine.guest.clock.set_to_ns or 0) <= time.time_ns()
    machine.guest.clock.set_date(5)
    before_ns = time.time_ns()
    await ask(machine, "guest-set-time")
    assert before_ns <= (machine.guest.clock.set_to_ns or 0) <= time.time_ns()


# Identity of a state


async def test_equal_states_have_equal_digests(hypervisor: FaultyHypervisor, template: FakeSnapshot) -> None:
    other = FaultyHypervisor()
    assert (await make_template(other)).digest == template.digest
    captures = []
    for machine_id in ("one", "two"):
        machine = await running_fork(hypervisor, template, machine_id)
        press(machine, A)
        await asyncio.sleep(0.002)
        captures += [await hypervisor.capture(machine), await hypervisor.capture(machine)]
    assert len({capture.digest for capture in captures}) == 1
    assert captures[0].digest != template.digest
    assert captures[0].disk_digest == template.disk_digest
    assert len({capture.name for capture in captures}) == 4
    machine.files["/home/user/x"] = b"1"
    assert (await hypervisor.capture(machine)).disk_digest != template.disk_digest


@pytest.mark.parametrize(
    "change",
    [
        lambda machine: press(machine, A),
        lambda machine: machine.key_input(SHIFT, down=True),
        lambda machine: machine.pointer_input(7, 7, 0),
        lambda machine: machine.files.update({"/home/user/x": b""}),
        lambda machine: machine.files.make_directory("/home/user/new"),
        lambda machine: machine.programs.run(["xclip"], stdin=b"clip"),
        lambda machine: machine.files.update({"/dev/urandom": b"seed"}),
    ],
    ids=["text", "held key", "pointer", "file", "directory", "clipboard", "entropy"],
)
async def test_any_change_alters_the_digest(hypervisor: FaultyHypervisor, parent: FaultyMachine, change: Any) -> None:
    before = await hypervisor.capture(parent)
    change(parent)
    assert (await hypervisor.capture(parent)).digest != before.digest


# Templates on a host


async def test_a_stored_template_outlives_its_daemon() -> None:
    host = FakeHost()
    first = FaultyHypervisor(host=host)
    template = await make_template(first)
    await template.discard()
    await first.close()
    second = FaultyHypervisor(host=host)
    assert await second.reap() == []
    found = await second.find_template(replace(SPEC, machine_id="another"))
    assert found is not None
    assert (found.digest, found.notes, found.spec.machine_id) == (template.digest, {"by": "a test"}, "another")
    machine = await running_fork(second, found, "fork")
    assert await ask(machine, "guest-ping") == {}
    assert len(np.unique(machine.framebuffer.pixels)) > 1
    await machine.destroy()
    assert await second.find_template(replace(SPEC, memory_mib=SPEC.memory_mib + 1)) is None
    with pytest.raises(HypervisorError, match="discarded"):
        await first.fork(template, "late")
    assert (host.machines, host.captures) == ({}, {})


async def test_a_machine_that_cannot_be_frozen_is_destroyed(
    hypervisor: FaultyHypervisor, template: FakeSnapshot
) -> None:
    fork = await hypervisor.fork(template, "fork")
    hypervisor.host.templates.clear()
    hypervisor.faults = Faults(boot_delay_s=10)
    booting = await hypervisor.create(replace(SPEC, machine_id="booting"))
    for machine, why in ((fork, "was forked"), (booting, "has not booted")):
        with pytest.raises(HypervisorError, match=why):
            await hypervisor.freeze(machine, notes={})
        with pytest.raises(MachineLost):
            await hypervisor.freeze(machine, notes={})
    assert hypervisor.machines == {}
    assert await hypervisor.find_template(SPEC) is None


# Leftovers


async def test_a_capture_exists_until_nothing_needs_it(hypervisor: FaultyHypervisor, parent: FaultyMachine) -> None:
    first = await hypervisor.capture(parent)
    child = await running_fork(hypervisor, first, "child")
    second = await hypervisor.capture(child)
    await first.discard()
    await child.destroy()
    assert set(hypervisor.host.captures) == {first.name, second.name}, "the second depends on the first"
    grandchild = await hypervisor.fork(second, "grandchild")
    await second.discard()
    with pytest.raises(HypervisorError, match="discarded"):
        await hypervisor.fork(second, "late")
    assert repr(second).endswith("of 'child' | 1 holders>")
    grandchild.kill("killed")
    assert set(hypervisor.host.captures) == {first.name, second.name}
    await grandchild.destroy()
    assert hypervisor.host.captures == {}
    assert set(hypervisor.machines) == {"parent"}


async def test_a_second_daemon_removes_the_captures_of_the_first() -> None:
    host = FakeHost()
    first = FaultyHypervisor(host=host)
    machine = await first.fork(await make_template(first), "old")
    await first.capture(machine)
    second = FaultyHypervisor(host=host)
    template = await second.find_template(SPEC)
    assert template is not None
    own = await second.capture(await second.fork(template, "new"))
    assert await second.reap() == ["old"]
    assert await second.reap() == []
    assert second.live_machine_ids == {"new"}
    assert set(second.host.captures) == {own.name}
    await second.machines["new"].destroy()
    assert first.machines == {}


async def test_a_group_costs_its_memory_once(hypervisor: FaultyHypervisor) -> None:
    template = await make_template(hypervisor)
    alone = await running_fork(hypervisor, template, "0")
    usage = await alone.usage()
    assert usage.private_dirty_bytes == 0
    assert usage.pss_bytes > 0
    for number in range(1, 4):
        await hypervisor.fork(template, str(number))
    assert (await alone.usage()).pss_bytes == usage.pss_bytes // 4
    press(alone, A)
    alone.files["/home/user/x"] = bytes(5000)
    usage = await alone.usage()
    assert usage.pss_bytes > usage.private_dirty_bytes > 5000


async def test_256_forks_fit_into_little_memory(hypervisor: FaultyHypervisor) -> None:
    spec = replace(SPEC, screen_width_px=1280, screen_height_px=800)
    template = await hypervisor.freeze(await hypervisor.create(spec), notes={})
    await hypervisor.fork(template, "first")
    before_kib = private_kib()
    for number in range(256):
        await hypervisor.fork(template, f"fork-{number}")
    per_fork_kib = (private_kib() - before_kib) / 256
    # Measured: about 10 KiB; a private picture takes 4000 KiB.
    assert per_fork_kib < 1000, "other threads of this process allocate, too"


async def test_destroyed_machines_leave_no_open_files(hypervisor: FaultyHypervisor, parent: FaultyMachine) -> None:
    before = open_files()
    for number in range(3):
        press(parent, A)
        child = await branch(hypervisor, parent, f"child-{number}")
        press(child, A)
        await child.destroy()
    # Files of earlier tests may still be closed.
    assert len(open_files() - before) <= 1, "only the newest picture of the parent is left"


def private_kib() -> int:
    """Return the private dirty memory of this process in KiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))


def open_files() -> set[tuple[int, int]]:
    """Return the device and inode of each open file of this process."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing
            status = os.fstat(int(descriptor))
            found.add((status.st_dev, status.st_ino))
    return found


# Faults


async def test_a_failed_fork_leaves_nothing(hypervisor: FaultyHypervisor, template: FakeSnapshot) -> None:
    hypervisor.faults = Faults(fork_error="no memory left")
    with pytest.raises(HypervisorError, match="machine one: no memory left"):
        await hypervisor.fork(template, "one")
    hypervisor.faults = Faults(fork_delay_s=10)
    forking = asyncio.create_task(hypervisor.fork(template, "one"))
    await asyncio.sleep(0.005)
    with pytest.raises(HypervisorError, match="exists"):
        await hypervisor.fork(template, "one")
    forking.cancel()
    with suppress(asyncio.CancelledError):
        await forking
    assert hypervisor.machines == {}
    assert template.holder_count == 0


async def until_paused(machine: FaultyMachine) -> None:
    async with asyncio.timeout(60):
        while machine.state is not MachineState.PAUSED:
            await asyncio.sleep(0)


async def test_a_failed_capture_leaves_its_machine_alone(hypervisor: FaultyHypervisor, parent: FaultyMachine) -> None:
    parent.inject(capture_error="disk full", capture_delay_s=1.0)
    capturing = asyncio.create_task(hypervisor.capture(parent))
    await until_paused(parent)
    with pytest.raises(HypervisorError, match="disk full"):
        await capturing
    assert parent.state is MachineState.RUNNING
    assert hypervisor.host.captures == {}


async def test_a_machine_killed_during_its_capture_is_lost(hypervisor: FaultyHypervisor, parent: FaultyMachine) -> None:
    parent.inject(capture_delay_s=1.0)
    capturing = asyncio.create_task(hypervisor.capture(parent))
    await until_paused(parent)
    parent.kill("out of memory")
    with pytest.raises(MachineLost, match="out of memory"):
        await capturing
    assert hypervisor.host.captures == {}


async def test_a_machine_that_is_not_forkable_is_unchanged(hypervisor: FaultyHypervisor, parent: FaultyMachine) -> None:
    parent.inject(unforkable="a USB device of the host", capture_delay_s=10)
    with pytest.raises(NotForkable, match="USB"):
        await hypervisor.capture(parent)
    created = await hypervisor.create(replace(SPEC, machine_id="created"))
    with pytest.raises(NotForkable, match="was booted"):
        await hypervisor.capture(created)
    assert (parent.state, created.state) == (MachineState.RUNNING, MachineState.RUNNING)


async def test_device_files_accept_writes_and_store_nothing(parent: FaultyMachine) -> None:
    for device in ("/dev/null", "/dev/urandom"):
        parent.files[device] = b"seed"
    assert parent.files.entropy
    assert parent.files["/dev/null"] == parent.files["/dev/urandom"] == b""
    assert [path for path in parent.files if path.startswith("/dev")] == []
