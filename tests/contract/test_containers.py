"""Containers against hosts that lack something, guests that use up what they have, and daemons that are killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from envd.base.errors import ConfigError, GuestUnresponsive, HypervisorError, MachineLost
from envd.base.losses import LossOwner
from envd.cli.image import app
from envd.desktop.agent import GuestAgent
from envd.desktop.desktop import Desktop
from envd.desktop.display.rfb import RfbClient
from envd.hypervisor.machine import DiskImage, MachineSpec
from envd.hypervisor.oci import control_groups
from envd.hypervisor.oci.control_groups import ControlGroups, own_groups
from envd.hypervisor.oci.hypervisor import OciHypervisor
from envd.hypervisor.oci.machine import OciMachine
from envd.hypervisor.oci.stopping import ProcessTree
from tests.support.containers import desktop_image, first_process, settings
from tests.support.machine_contract.fixtures import read_screen
from tests.support.program import Program

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]

#: Of this process: the containers of daemons on one host are numbered alike, and distinguished by their names.
_MACHINE_ID = f"machine-{os.getpid()}"


@pytest.fixture(scope="module")
def image() -> DiskImage:
    return desktop_image()


@pytest.fixture
def state_dir() -> Iterator[Path]:
    # Below a directory that everybody may enter, and with a short path for sockets.
    with tempfile.TemporaryDirectory(prefix="envd-oci-", dir="/var/tmp") as directory:
        yield Path(directory)


@asynccontextmanager
async def started(
    state_dir: Path, image: DiskImage, *, machine_id: str = _MACHINE_ID, memory_mib: int = 1024
) -> AsyncIterator[tuple[OciHypervisor, OciMachine]]:
    """Start one machine, which is destroyed at the end."""
    hypervisor = await OciHypervisor.open(settings(state_dir), [image])
    try:
        spec = MachineSpec(machine_id=machine_id, image=image, memory_mib=memory_mib)
        machine = await hypervisor.create(spec)
        try:
            await machine.wait_started()
            yield hypervisor, machine
        finally:
            await machine.destroy()
        assert await hypervisor.leftovers() == []
    finally:
        await hypervisor.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(image: DiskImage) -> AsyncIterator[tuple[OciHypervisor, OciMachine]]:
    """Start one machine for the tests whose attempts leave it as it was."""
    with tempfile.TemporaryDirectory(prefix="envd-oci-", dir="/var/tmp") as directory:
        async with started(Path(directory), image, machine_id=f"shared-{os.getpid()}") as running:
            yield running


@contextmanager
def mounted(kind: str, options: str, target: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", kind, "-o", options, kind, str(target)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


async def test_a_missing_runtime_is_reported_by_name(state_dir: Path) -> None:
    with pytest.raises(ConfigError, match="the runtime no-such-runtime is missing"):
        await OciHypervisor.open(settings(state_dir), [], runtime="no-such-runtime")


async def test_a_state_directory_that_is_itself_an_overlay_is_refused(state_dir: Path, image: DiskImage) -> None:
    for name in ("lower", "upper", "work", "root"):
        (state_dir / name).mkdir()
    options = f"lowerdir={state_dir}/lower,upperdir={state_dir}/upper,workdir={state_dir}/work"
    with (
        mounted("overlay", options, state_dir / "root"),
        pytest.raises(ConfigError, match="overlayfs cannot be used there in a user namespace"),
    ):
        await OciHypervisor.open(settings(state_dir / "root"), [image])


async def test_a_full_disk_fails_the_start_and_leaves_nothing(state_dir: Path, image: DiskImage) -> None:
    with mounted("tmpfs", "size=128k,mode=0711", state_dir):
        hypervisor = await OciHypervisor.open(settings(state_dir), [image])
        try:
            with (state_dir / "filler").open("wb", buffering=0) as filler, suppress(OSError):
                while filler.write(b"x" * 4096):
                    pass
            with pytest.raises(HypervisorError, match="No space left on device"):
                await hypervisor.create(MachineSpec(machine_id=_MACHINE_ID, image=image))
            assert await hypervisor.leftovers() == []
        finally:
            await hypervisor.close()


async def test_images_that_containers_cannot_run_are_refused_by_name(state_dir: Path, image: DiskImage) -> None:
    with pytest.raises(ConfigError, match="image old: it has no tigervnc-standalone-server"):
        await OciHypervisor.open(settings(state_dir), [replace(image, name="old", packages="")])


async def test_a_guest_that_fills_its_memory_loses_the_program_that_did(state_dir: Path, image: DiskImage) -> None:
    async with started(state_dir, image, memory_mib=512) as (_, machine):
        desktop = Desktop(machine)
        try:
            program = "blocks = []\nwhile True: blocks.append(bytearray(b'x') * (16 << 20))"
            result = await desktop.run(["python3", "-c", program], timeout_s=120)
            assert result.exit_code in {-9, 128 + 9, 1}, "the kernel ended it, or it got no memory"
            assert machine.loss is None
            assert (await desktop.run(["echo", "alive"], timeout_s=30)).stdout == b"alive\n"
        finally:
            await desktop.close()


async def test_files_at_any_depth_count_and_are_removed(state_dir: Path, image: DiskImage) -> None:
    async with started(state_dir, image) as (hypervisor, machine):
        desktop = Desktop(machine)
        try:
            before_bytes = await hypervisor._disk_usage(machine.machine_id)
            # Deeper than Python recurses, and with a path longer than the kernel takes at once.
            program = (
                "import os\nfor _ in range(1500): os.mkdir('deep'); os.chdir('deep')\n"
                "open('file', 'wb').write(bytes(64 << 20))"
            )
            assert (await desktop.run(["python3", "-c", program], timeout_s=60)).exit_code == 0
            assert await hypervisor._disk_usage(machine.machine_id) >= before_bytes + (64 << 20)
        finally:
            await desktop.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_guests_root_cannot_nest_control_groups_without_a_limit(
    shared: tuple[OciHypervisor, OciMachine],
) -> None:
    _, machine = shared
    if machine.groups is None or not machine.groups.is_unified:
        pytest.skip("version 1 of control groups has no such limit")
    nest = "cd /sys/fs/cgroup && mkdir -p $(yes d | head -1200 | tr '\\n' /)"
    assert (await GuestAgent(machine).run(["/bin/sh", "-c", nest], timeout_s=60)).exit_code
    assert not (machine.groups.guest / "/".join(["d"] * 40)).exists()


async def test_a_fork_bomb_stays_in_its_machine(state_dir: Path, image: DiskImage) -> None:
    async with started(state_dir, image) as (_, machine):
        assert machine.groups is not None
        desktop = Desktop(machine)
        try:
            await desktop.launch(["sh", "-c", "b() { b | b & }; b"])
            before = len(machine.groups.process_ids())
            async with asyncio.timeout(60):
                while len(machine.groups.process_ids()) < before + 200:
                    await asyncio.sleep(0.05)
            await machine.pause()
            assert len(machine.groups.process_ids()) <= 4096
        finally:
            await desktop.close()


@pytest.mark.parametrize(
    ("command", "cause"),
    [("poweroff", "POWER_OFF"), ("halt -f", "POWER_OFF"), ("reboot", "REBOOT"), ("reboot -f", "REBOOT")],
)
async def test_the_guests_root_shuts_its_machine_down_as_that_of_a_virtual_machine(
    state_dir: Path, image: DiskImage, command: str, cause: str
) -> None:
    async with started(state_dir, image) as (_, machine):
        with suppress(MachineLost):
            await GuestAgent(machine).run(["/bin/sh", "-c", command], timeout_s=30)
        async with asyncio.timeout(30):
            await machine.lost.wait()
        assert machine.loss is not None
        assert (machine.loss.owner, machine.loss.cause) == (LossOwner.GUEST, cause)


async def test_a_session_that_fails_each_time_ends_its_machine(state_dir: Path, image: DiskImage) -> None:
    async with started(state_dir, image) as (_, machine):
        agent = GuestAgent(machine)
        async with asyncio.timeout(90):
            while not machine.lost.is_set():
                with suppress(MachineLost):
                    await agent.run(["pkill", "-9", "-x", "openbox"], timeout_s=30)
                await asyncio.sleep(0.2)
        assert machine.loss is not None
        assert machine.loss.cause == "POWER_OFF"
        assert "the session failed 5 times, at last with status 137" in machine.console_tail()


async def test_a_session_that_ends_after_its_machine_was_used_does_not_start_again(
    state_dir: Path, image: DiskImage
) -> None:
    async with started(state_dir, image) as (_, machine):
        machine.mark_used()
        agent = GuestAgent(machine)
        await agent.run(["pkill", "-9", "-u", "user"], timeout_s=30)
        has_ended = "for i in $(seq 100); do pgrep -x Xtigervnc || exit 0; sleep 0.1; done; exit 1"
        assert (await agent.run(["/bin/sh", "-c", has_ended], timeout_s=60)).exit_code == 0
        loss = await machine.examine()
        assert (loss.owner, loss.cause) == (LossOwner.GUEST, "SESSION_ENDED")


async def test_a_machine_that_the_host_stops_is_not_lost_by_its_guest(state_dir: Path, image: DiskImage) -> None:
    async with started(state_dir, image) as (_, machine):
        assert machine.groups is not None
        pids = machine.groups.process_ids()
        # Its own root cannot stop the first process.
        await GuestAgent(machine).run(["/bin/sh", "-c", "kill -STOP 1; sleep 0.2"], timeout_s=30)
        assert (await machine.examine()).cause == "SESSION_ENDED", "it answers"
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert (await machine.examine()).owner is LossOwner.UNDECIDED
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_guests_root_can_neither_kill_the_machine_nor_thaw_it_nor_reach_the_host(
    shared: tuple[OciHypervisor, OciMachine],
) -> None:
    _, machine = shared
    agent = GuestAgent(machine)
    refused = (
        "kill -KILL 1; kill -TERM 1; sleep 0.2; kill -0 1 && exit 1",
        "mount -t tmpfs none /mnt",
        "mount -t proc none /mnt",
        "unshare --user true",
        "unshare --mount true",
        "mknod /tmp/sda b 8 0",
        "echo 1 > /proc/sys/kernel/sysrq",
        "echo c > /proc/sysrq-trigger",
        "echo 0 > /sys/fs/cgroup/cgroup.freeze",
        "cat /proc/kcore | head -c 1 | grep -q .",
        "ls /sys/devices",
        "chroot /proc/1/root/../../.. test -e /work",
        "date -s 2001-01-01",
        "sysctl -w kernel.panic=1",
        "ip link add type dummy",
    )
    for act in refused:
        result = await agent.run(["/bin/sh", "-c", act], timeout_s=30)
        assert result.exit_code, f"{act} succeeded: {result.stdout!r}"
    assert machine.loss is None
    listed = await agent.run(["/bin/sh", "-c", "ls -A /dev; ls /envd; cat /proc/net/dev | wc -l"], timeout_s=30)
    names = listed.stdout.decode().split()
    assert not [name for name in names if name.startswith(("sd", "vd", "loop", "kvm", "mem", "nvme"))]
    assert names[-1] == "3", "no network but the loopback: two lines of heading, and one"


#: System calls by number on x86-64. Without a filter and fewer capabilities some succeed, and others fail otherwise.
_CALLS = """
import ctypes, errno, socket
libc = ctypes.CDLL(None, use_errno=True)
calls = {
    "add_key": (248, b"user", b"x", b"y", 1, -2), "keyctl": (250, 0, -3), "request_key": (249, b"user", b"x", 0, 0),
    "bpf": (321, 0, 0, 0), "userfaultfd": (323, 0), "io_uring_setup": (425, 1, 0), "perf_event_open": (298, 0, 0, -1),
    "mount": (165, b"none", b"/tmp", b"tmpfs", 0, 0), "umount2": (166, b"/proc", 2), "unshare": (272, 0x10000000),
    "setns": (308, 0, 0), "clone": (56, 0x10000011, 0, 0, 0, 0), "open_by_handle_at": (304, -100, 0, 0),
    "fsopen": (430, b"tmpfs", 0), "open_tree": (428, -100, b"/", 1), "mount_setattr": (442, -100, b"/", 0, 0, 0),
    "pivot_root": (155, b"/", b"/tmp"), "kexec_load": (246, 0, 0, 0, 0), "finit_module": (313, 0, b"", 0),
    "swapon": (167, b"/x", 0), "iopl": (172, 3), "syslog": (103, 3, 0, 0), "mount of x32": (0x400000A5, 0, 0, 0, 0, 0),
    "mknod": (133, b"/tmp/block", 0o60644, 0x800), "chroot": (161, b"/tmp"), "fanotify_init": (300, 0, 0),
}
for name, (number, *arguments) in calls.items():
    ctypes.set_errno(0)
    done = libc.syscall(ctypes.c_long(number), *arguments)
    assert done == -1 and ctypes.get_errno() == errno.EPERM, (name, done, ctypes.get_errno())
sockets = [(family, socket.SOCK_DGRAM, 0) for family in (3, 4, 5, 9, 15, 17, 21, 30, 31, 38, 40)]
sockets += [(socket.AF_NETLINK, socket.SOCK_RAW, protocol) for protocol in (4, 6, 9, 12, 16, 21)]
for arguments in sockets:
    try:
        socket.socket(*arguments)
    except OSError as error:
        assert error.errno in {errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT}, (arguments, error)
    else:
        raise AssertionError(arguments)
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
"""


@pytest.mark.asyncio(loop_scope="module")
async def test_calls_that_reach_the_kernel_are_refused_to_the_user_and_to_root(
    shared: tuple[OciHypervisor, OciMachine],
) -> None:
    _, machine = shared
    desktop = Desktop(machine)
    try:
        for as_root in (False, True):
            result = await desktop.run(["python3", "-c", _CALLS], as_root=as_root, timeout_s=60)
            assert result.exit_code == 0, result.stderr
    finally:
        await desktop.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_session_gains_no_rights_by_programs_of_root(shared: tuple[OciHypervisor, OciMachine]) -> None:
    _, machine = shared
    prepare = "cp /usr/bin/id /home/user/id; chmod 4755 /home/user/id; cp /usr/bin/cat /usr/local/bin/rootcat;"
    prepare += " setcap cap_dac_override+ep /usr/local/bin/rootcat 2>/dev/null; chmod 4755 /usr/local/bin/rootcat"
    assert (await GuestAgent(machine).run(["/bin/sh", "-c", prepare], timeout_s=30)).exit_code == 0
    desktop = Desktop(machine)
    try:
        assert (await desktop.run(["/home/user/id", "-u"], timeout_s=30)).stdout == b"1000\n"
        assert (await desktop.run(["/usr/local/bin/rootcat", "/etc/shadow"], timeout_s=30)).exit_code
        trace = "import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"
        assert (await desktop.run(["python3", "-c", trace], timeout_s=30)).stdout == b"-1\n"
    finally:
        await desktop.close()


async def test_what_the_guests_root_puts_in_place_of_its_sockets_leads_nowhere(
    state_dir: Path, image: DiskImage
) -> None:
    bait = state_dir / "bait.sock"
    reached = asyncio.Event()
    server = await asyncio.start_unix_server(lambda *_: reached.set(), bait)
    try:
        async with started(state_dir, image) as (_, machine):
            secret = state_dir / "secret"
            secret.write_text("of the host")
            plant = f"cd /envd; rm -f *.sock; for n in vnc agent guestd; do ln -s {bait} $n.sock; done"
            plant += f"; rm console.log; ln -s {secret} console.log; ln -s {secret} used"
            with suppress(GuestUnresponsive, HypervisorError, MachineLost):
                await GuestAgent(machine).run(["/bin/sh", "-c", plant], timeout_s=30)
            with pytest.raises((MachineLost, OSError)):
                await machine.open_display()
            with pytest.raises(HypervisorError):
                machine.mark_used()
            assert machine.console_tail() == ""
            machine.enforce_disk_quota(1 << 40)
            assert not reached.is_set()
            assert secret.read_text() == "of the host"
    finally:
        server.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_sessions_user_cannot_reach_the_hosts_sockets(shared: tuple[OciHypervisor, OciMachine]) -> None:
    _, machine = shared
    desktop = Desktop(machine)
    try:
        for act in ("ls /envd", "test -r /envd/vnc.sock", "rm -f /envd/agent.sock", "kill -0 1", "pkill -x Xtigervnc"):
            assert (await desktop.run(["sh", "-c", act], timeout_s=30)).exit_code, act
        show = "grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status"
        ids = (await desktop.run(["sh", "-c", show], timeout_s=30)).stdout
        assert b"CapEff:\t0000000000000000" in ids
        assert b"NoNewPrivs:\t1" in ids
        assert b"Seccomp:\t2" in ids
    finally:
        await desktop.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_screen_is_as_many_millimetres_wide_as_that_of_a_virtual_machine(
    shared: tuple[OciHypervisor, OciMachine],
) -> None:
    """Xorg's numbers, on which the width of titles depends; TigerVNC rounds to 339x212."""
    command = ["sh", "-c", "DISPLAY=:0 xdpyinfo | grep dimensions"]
    shown = await GuestAgent(shared[1]).run(command, timeout_s=30)
    assert shown.stdout.split() == [b"dimensions:", b"1280x800", b"pixels", b"(338x211", b"millimeters)"]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_first_process_has_no_file_of_the_host(shared: tuple[OciHypervisor, OciMachine]) -> None:
    _, machine = shared
    result = await GuestAgent(machine).run(["/bin/sh", "-c", "readlink /proc/1/fd/*"], timeout_s=30)
    assert set(result.stdout.decode().split()) <= {"/dev/null", "/envd/console.log"}


async def test_a_machine_whose_first_process_the_host_kills_is_lost_by_the_host(
    state_dir: Path, image: DiskImage
) -> None:
    async with started(state_dir, image) as (_, machine):
        assert machine.groups is not None
        os.kill(first_process(machine.groups.process_ids()), signal.SIGKILL)
        async with asyncio.timeout(30):
            await machine.lost.wait()
        assert machine.loss is not None
        assert (machine.loss.owner, machine.loss.reason) == (LossOwner.HOST, "its first process was killed by the host")
        with pytest.raises(MachineLost, match="killed by the host"):
            await machine.pause()


@pytest.mark.parametrize("version", [1, 2])
async def test_control_groups_of_each_version_limit_freeze_and_measure(
    state_dir: Path, image: DiskImage, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    only = {name: group for name, group in own_groups().items() if bool(name) == (version == 1)}
    if not {1: {"freezer", "cpuacct"}, 2: {""}}[version] <= only.keys():
        pytest.skip(f"version {version} of control groups is not mounted")
    monkeypatch.setattr(control_groups, "own_groups", lambda: only)
    async with started(state_dir, image, memory_mib=768) as (hypervisor, machine):
        groups = machine.groups
        assert groups is not None
        assert hypervisor._groups.problem == ""
        assert groups.is_unified is (version == 2)
        if version == 1:
            limit = only["memory"] / hypervisor._groups._mark / machine.machine_id / "memory.limit_in_bytes"
            assert int(limit.read_text()) == 768 << 20
        x_server = [pid for pid in groups.process_ids() if "Xtigervnc" in Path(f"/proc/{pid}/comm").read_text()]
        assert len(x_server) == 1
        spin = "i=0; while :; do i=$((i+1)); done"
        await GuestAgent(machine).run(["sh", "-c", f"({spin}) >/dev/null 2>&1 & sleep 0.3"], timeout_s=60)
        await machine.pause()
        assert groups.is_frozen()
        before_s = machine.processor_s()
        assert before_s is not None
        assert before_s > 0.1
        client = await RfbClient.connect(*await machine.open_display())
        assert (await read_screen(client)).shape == (800, 1280), "the X server is not frozen"
        await client.close()
        await asyncio.sleep(0.3)
        assert (machine.processor_s() or 0) - before_s < 0.2, "nothing runs but the X server"
        waited_s = groups.run_delay_s()
        await machine.resume()
        async with asyncio.timeout(60):
            while (machine.processor_s() or 0) - before_s < 0.1:
                await asyncio.sleep(0.05)
        assert groups.run_delay_s() > waited_s
        assert (await machine.usage()).pss_bytes > 0


@pytest.mark.parametrize("answer", [None, b'{"event": "ex\n'], ids=["ended", "unreadable"])
async def test_machines_are_lost_by_the_host_when_their_namespaces_end(
    state_dir: Path, image: DiskImage, answer: bytes | None
) -> None:
    async with started(state_dir, image) as (hypervisor, machine):
        process = hypervisor._namespace._process
        if answer is None:
            process.kill()
        else:
            assert process.stdout is not None
            process.stdout.feed_data(answer)
        async with asyncio.timeout(30):
            await machine.lost.wait()
        assert machine.loss is not None
        assert (machine.loss.owner, hypervisor.problem) == (LossOwner.HOST, machine.loss.reason)
        assert "restart envd" in machine.loss.reason
        with pytest.raises(HypervisorError, match="restart envd"):
            await hypervisor.create(MachineSpec(machine_id="another", image=image))


@pytest.mark.asyncio(loop_scope="module")
async def test_an_error_of_any_characters_is_reported_whole(shared: tuple[OciHypervisor, OciMachine]) -> None:
    hypervisor, _ = shared
    for text in ("\x01" * 5000, "\U0001f600" * 5000):
        with pytest.raises(HypervisorError, match=text[:9]):
            await hypervisor._namespace.call("run", argv=["sh", "-c", f"printf %s '{text}'; exit 1"], timeout_s=20)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_whose_process_is_killed_fails(shared: tuple[OciHypervisor, OciMachine]) -> None:
    hypervisor, _ = shared
    with pytest.raises(HypervisorError, match="ended with -9"):
        async with asyncio.timeout(30):
            await hypervisor._namespace.call("run", argv=["sh", "-c", "kill -KILL $PPID"], timeout_s=20)


async def test_without_control_groups_signals_stop_all_but_the_x_server(
    state_dir: Path, image: DiskImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ControlGroups, "open", lambda self, _: setattr(self, "problem", "control groups cannot be used")
    )
    async with started(state_dir, image) as (hypervisor, machine):
        assert "control groups cannot be used" in hypervisor.description
        assert machine.groups is None
        await machine.pause()
        with pytest.raises(GuestUnresponsive):
            await machine.agent_command("guest-ping", timeout_s=0.3)
        client = await RfbClient.connect(*await machine.open_display())
        assert (await read_screen(client)).shape == (800, 1280), "the screen of a stopped machine can be read"
        await client.close()
        await machine.resume()
        assert await machine.agent_command("guest-ping", timeout_s=30) == {}
        assert (await machine.usage()).pss_bytes > 0
        before_s = machine.processor_s()
        assert before_s is not None
        await GuestAgent(machine).run(["sh", "-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"], timeout_s=60)
        assert (machine.processor_s() or 0) > before_s


@pytest.mark.asyncio(loop_scope="module")
async def test_signals_find_the_processes_of_their_machine_among_those_of_other_daemons(
    shared: tuple[OciHypervisor, OciMachine],
) -> None:
    _, machine = shared
    assert machine.pid is not None
    assert machine.groups is not None
    tree = ProcessTree.of(machine.pid, machine_id=machine.machine_id, root_uid=0)
    assert tree.first_pid == first_process(machine.groups.process_ids())
    # Daemons number their containers alike.
    with pytest.raises(ProcessLookupError):
        ProcessTree.of(machine.pid, machine_id="another-daemons", root_uid=0)


async def test_templates_are_listed_and_pruned_unless_a_daemon_uses_them(state_dir: Path, image: DiskImage) -> None:
    def templates(*args: str) -> Any:
        result = CliRunner().invoke(app, ["templates", *args, "--json", "--state-dir", str(state_dir)])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    async with started(state_dir, image) as (hypervisor, machine):
        template = await hypervisor.freeze(machine, notes={})
        (listed,) = templates("list")["templates"]
        assert (listed["key"], listed["image"], listed["accelerator"]) == (template.key, image.name, "native")
        assert (await asyncio.to_thread(templates, "prune", "--all"))["removed"] == [], "it is in use"
    (removed,) = (await asyncio.to_thread(templates, "prune", "--all"))["removed"]
    assert removed["key"] == template.key
    assert not template.directory.exists()
    assert templates("list")["templates"] == []


_STUCK_DAEMON = """
import runpy
import sys
import envd.cli.serve
envd.cli.serve._END_LIMIT_S = 2.0
sys.argv = ["envd", "serve", *sys.argv[1:]]
runpy.run_module("envd", run_name="__main__")
"""


def test_a_daemon_whose_machines_cannot_be_destroyed_ends_by_force(tmp_path: Path, state_dir: Path) -> None:
    desktop_image()
    config = tmp_path / "envd.toml"
    config.write_text("[pools.desktop]\nsize = 1\ncapacity = 1\n[limits]\ndrain_timeout_s = 1\n")
    options = ("--config", config, "--state-dir", state_dir, "--hypervisor", "oci:")
    addresses = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    with Program(sys.executable, "-c", _STUCK_DAEMON, *options, *addresses) as daemon:
        daemon.wait_for("pool desktop: (ready, 1 machines)")
        children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
        (holder,) = [pid for pid in children if "holder.py" in Path(f"/proc/{pid}/cmdline").read_text()]
        (inner,) = Path(f"/proc/{holder}/task/{holder}/children").read_text().split()
        os.kill(int(inner), signal.SIGSTOP)
        daemon.send(signal.SIGTERM)
        assert daemon.wait() == 1
        assert "the daemon did not stop within 2 s: machines desktop-" in daemon.output
        while _is_alive(int(inner)):
            time.sleep(0.05)


_KILLED_DAEMON = """
import asyncio, sys, time
from pathlib import Path
from envd.hypervisor.machine import MachineSpec
from envd.hypervisor.oci.hypervisor import OciHypervisor
from tests.support.containers import desktop_image, settings

async def main():
    image = desktop_image()
    hypervisor = await OciHypervisor.open(settings(Path(sys.argv[1])), [image])
    machine = await hypervisor.create(MachineSpec(machine_id=sys.argv[2], image=image))
    await machine.wait_started()
    print(*machine.groups.process_ids(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_killed_daemons_containers_end_with_it_and_the_next_removes_the_rest(
    state_dir: Path, image: DiskImage
) -> None:
    command = [sys.executable, "-c", _KILLED_DAEMON, str(state_dir), _MACHINE_ID]
    root = Path(__file__).parents[2]
    daemon = await asyncio.create_subprocess_exec(*command, cwd=root, stdout=asyncio.subprocess.PIPE)
    assert daemon.stdout is not None
    pids = [int(pid) for pid in (await daemon.stdout.readline()).split()]
    assert len(pids) > 5
    daemon.kill()
    await daemon.wait()
    async with asyncio.timeout(30):
        while any(_is_alive(pid) for pid in pids):
            await asyncio.sleep(0.05)
    assert (state_dir / "containers" / _MACHINE_ID).is_dir()
    hypervisor = await OciHypervisor.open(settings(state_dir), [image])
    try:
        assert await hypervisor.reap() == [_MACHINE_ID]
        assert await hypervisor.leftovers() == []
        assert list((state_dir / "containers").iterdir()) == []
    finally:
        await hypervisor.close()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_a_machine_takes_no_key_of_the_kernel(state_dir: Path, image: DiskImage) -> None:
    """The kernel allows a user 200 keys (kernel.keys.maxkeys), so each key bounds the machines of a host."""

    def counted() -> dict[str, int]:
        lines = (line.split() for line in Path("/proc/key-users").read_text().splitlines())
        return {user: int(keys.split("/")[0]) for user, _, keys, *_ in lines}

    before = counted()
    async with started(state_dir, image):
        # Users of the guest are those of the subordinate range; others may come and go.
        taken = {
            user: keys - before.get(user, 0) for user, keys in counted().items() if int(user.rstrip(":")) > 100_000
        }
    assert {user: keys for user, keys in taken.items() if keys > 0} == {}
