"""Host faults under real machines: each has a typed error, other machines continue, and nothing is left behind."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cuaenv.client import (
    AsyncEnvClient,
    AsyncEpisode,
    EnvError,
    GuestEnded,
    MachineLost,
    Move,
    NotForkable,
    PoolExhausted,
    SampleVoid,
    TypeText,
    Unavailable,
    View,
    Wait,
)
from envd.hypervisor.qemu.processes import machine_pids
from tests.support.leftovers import daemon_leftovers
from tests.support.libvirtd import Libvirtd
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(900)]

NO_SETUP = "desktop/open-calculator"
LONG_TIMEOUT = timedelta(minutes=10)
NO_PIXELS = View(encoding="none")
CONFIG = """\
[pools.desktop]
image = "desktop"
size = 1
capacity = 4
allow_guest_access = true

[hypervisor]
template_dir = "{template_dir}"
"""
DISK_MIB = 64
PRINT_SESSION = ("sh", "-c", "id -un; echo $DISPLAY $XDG_RUNTIME_DIR $http_proxy")
KILL_GUESTD = ("pkill", "-KILL", "-f", "m guestd --user")


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """Mount a small file system."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=0755", "tmpfs", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


def fill(path: Path) -> None:
    """Use all free space."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert shutil.disk_usage(path.parent).free == 0


async def fails(call: Callable[[], Awaitable[None]], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        await call()


def serve_while(run: Callable[[str], Coroutine[Any, Any, None]], state_dir: Path, config: str) -> None:
    """Run a daemon while `run` uses its address; checks that it ends without error and leaves nothing."""
    with ServedDaemon(state_dir, config) as served:
        asyncio.run(run(served.wait_for(r"listening on (\S+)")))
        assert served.end() == 0
    assert daemon_leftovers(state_dir) == []


def test_a_full_disk_fails_new_machines_and_recovers(short_dir: Path, template_dir: Path) -> None:
    async def run(address: str, filler: Path) -> None:
        async with (
            AsyncEnvClient(address) as client,
            client.reset(NO_SETUP, view=NO_PIXELS, timeout=LONG_TIMEOUT) as episode,
        ):
            await episode.step(Move(200, 200))
            await asyncio.to_thread(fill, filler)

            async def fork() -> None:
                async with client.fork(episode, count=1, timeout=timedelta(seconds=60)):
                    pass

            async def reset_three() -> None:
                async with client.reset_group(NO_SETUP, size=3, view=NO_PIXELS, timeout=timedelta(seconds=10)):
                    pass

            # QEMU itself reports only an I/O error.
            await fails(fork, SampleVoid)
            await fails(reset_three, PoolExhausted)
            (pool,) = await client.list_pools()
            # The text depends on what hits the full disk first: QEMU, libvirt or the copy of an overlay.
            assert "failed to start" in pool.problem
            filler.unlink()
            assert (await episode.step(Move(300, 300))).step_count == 2
            async with client.fork(episode, count=1, timeout=LONG_TIMEOUT) as copies:
                assert (await copies[0].step(Move(100, 100))).step_count == 3
            async with client.reset_group(NO_SETUP, size=3, view=NO_PIXELS, timeout=LONG_TIMEOUT) as group:
                await asyncio.gather(*(member.step(Move(50, 50)) for member in group))

    with small_disk(short_dir / "s") as state_dir:
        # With a reserve, machines would stop to start before the disk is full.
        config = CONFIG.format(template_dir=template_dir) + "\n[limits]\ndisk_reserve_mib = 0\n"
        with ServedDaemon(state_dir, config) as served:
            address = served.wait_for(r"listening on (\S+)")
            served.wait_for(r"pool desktop: (ready)", timeout_s=300)
            asyncio.run(run(address, state_dir / "filler"))
            assert served.end() == 0
        assert daemon_leftovers(state_dir) == []


def test_a_full_disk_is_the_hosts_fault_at_once_and_no_machine_is_leased_on_it(
    short_dir: Path, template_dir: Path
) -> None:
    async def run(address: str, filler: Path) -> None:
        async with AsyncEnvClient(address) as client:
            async with client.reset(NO_SETUP, view=NO_PIXELS, timeout=LONG_TIMEOUT) as episode:
                await episode.step(Move(200, 200))
                await asyncio.to_thread(fill, filler)
                with pytest.raises(MachineLost, match=f"the host's disk of .*{filler.parent}.* is full"):
                    await episode.run_command(["sh", "-c", "dd if=/dev/urandom of=big bs=1M count=50; sync; sleep 600"])
            with pytest.raises(Unavailable, match=f"the disk of {filler.parent} is short"):
                async with client.reset(NO_SETUP, view=NO_PIXELS, timeout=timedelta(seconds=10)):
                    pass
            (pool,) = await client.list_pools()
            assert f"the disk of {filler.parent} is short: 0 MiB are free" in pool.problem
            filler.unlink()
            async with client.reset(NO_SETUP, view=NO_PIXELS, timeout=LONG_TIMEOUT) as episode:
                await episode.step(Move(200, 200))

    with small_disk(short_dir / "s") as state_dir:
        config = CONFIG.format(template_dir=template_dir) + "\n[limits]\ndisk_reserve_mib = 8\n"
        serve_while(lambda address: run(address, state_dir / "filler"), state_dir, config)


def test_a_deleted_template_is_recreated_and_its_machines_continue(short_dir: Path, template_dir: Path) -> None:
    # Copies of its files, with the memory; other tests use the originals.
    copy = short_dir / "t"
    key = max(template_dir.glob("*/snapshot.json"), key=lambda path: path.stat().st_mtime).parent.name
    shutil.copytree(template_dir / key, copy / key)
    manifest = copy / key / "snapshot.json"
    fields = json.loads(manifest.read_text())
    (copy / "memory").mkdir()
    memory = copy / "memory" / f"{key}.ram"
    subprocess.run(["cp", "--sparse=always", fields["memory_path"], memory], check=True)
    manifest.write_text(json.dumps({**fields, "memory_path": str(memory)}))
    for file in ("disk.qcow2", "overlay.qcow2"):
        assert (copy / key / file).exists()

    async def stepped(episode: AsyncEpisode, count: int) -> None:
        assert (await episode.step(Move(100 * count, 200), timeout=LONG_TIMEOUT)).step_count == count

    async def run(address: str) -> None:
        async with (
            AsyncEnvClient(address) as client,
            client.reset(NO_SETUP, view=NO_PIXELS, timeout=LONG_TIMEOUT) as episode,
        ):
            await stepped(episode, 1)
            async with asyncio.timeout(120):
                while (await client.list_pools())[0].idle_count == 0:
                    await asyncio.sleep(0.2)
            shutil.rmtree(copy / key)
            memory.unlink()
            async with asyncio.timeout(60):
                while "removed or replaced" not in (await client.list_pools())[0].problem:
                    await asyncio.sleep(0.2)
            await stepped(episode, 2)
            # The pool boots a new template by itself.
            async with client.reset(NO_SETUP, view=NO_PIXELS, timeout=timedelta(minutes=5)) as new:
                await stepped(new, 1)
                async with client.fork(new, count=1, timeout=LONG_TIMEOUT) as copies:
                    await stepped(copies[0], 2)
            assert (await client.list_pools())[0].problem == ""
            with pytest.raises(NotForkable, match="template"):
                async with client.fork(episode, count=1, timeout=LONG_TIMEOUT):
                    pass
            await stepped(episode, 3)

    serve_while(run, short_dir / "s", CONFIG.format(template_dir=copy))


def test_only_root_can_kill_guestd_which_is_restarted(short_dir: Path, template_dir: Path) -> None:
    async def run(address: str) -> None:
        async with (
            AsyncEnvClient(address) as client,
            client.reset(NO_SETUP, view=NO_PIXELS, timeout=LONG_TIMEOUT) as episode,
        ):
            before = await episode.run_command(PRINT_SESSION)
            refused = await episode.run_command(KILL_GUESTD)
            assert b"not permitted" in refused.stderr, refused
            assert (await episode.run_command(KILL_GUESTD, as_root=True)).exit_code == 0

            # Its port stays open, so calls wait until it is back.
            after = await episode.run_command(PRINT_SESSION)
            assert (after.exit_code, after.stdout) == (0, before.stdout)
            step = await episode.step(Move(300, 300), TypeText("übertragen " * 20), timeout=LONG_TIMEOUT)
            assert step.action_errors == ("", "")

    serve_while(run, short_dir / "s", CONFIG.format(template_dir=template_dir))


def test_a_kernel_panic_ends_only_its_own_episode(short_dir: Path, template_dir: Path) -> None:
    # No heartbeat during the test.
    limits = "\n[limits]\nheartbeat_interval_s = 3600\n"

    async def run(address: str) -> None:
        async with (
            AsyncEnvClient(address) as client,
            client.reset(NO_SETUP, view=NO_PIXELS, timeout=LONG_TIMEOUT) as episode,
            client.reset(NO_SETUP, view=NO_PIXELS, timeout=LONG_TIMEOUT) as other,
        ):
            await episode.step(Move(100, 100))
            # A command that ends its kernel has no response.
            panic = ("sh", "-c", "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger")
            with suppress(EnvError):
                await episode.run_command(panic, as_root=True, timeout=timedelta(seconds=5))

            async def step_until_ended() -> None:
                while True:
                    await episode.step(Wait(timedelta(seconds=2)), timeout=LONG_TIMEOUT)

            # A slow guest may not have run the command yet, and it is paused between steps.
            with pytest.raises(GuestEnded, match="PANIC"):
                await asyncio.wait_for(step_until_ended(), 120)
            with pytest.raises(GuestEnded, match="PANIC"):
                await episode.step(Move(200, 200), timeout=LONG_TIMEOUT)
            assert (await other.step(Move(200, 200), timeout=LONG_TIMEOUT)).step_count == 1
            async with client.reset(NO_SETUP, view=NO_PIXELS, timeout=LONG_TIMEOUT) as new:
                assert (await new.step(Move(200, 200), timeout=LONG_TIMEOUT)).step_count == 1

    serve_while(run, short_dir / "s", CONFIG.format(template_dir=template_dir) + limits)


@pytest.fixture
def libvirtd(short_dir: Path) -> Iterator[Libvirtd]:
    short_dir.chmod(0o755)  # libvirt accesses it as another user.
    libvirtd = Libvirtd(short_dir / "l")
    yield libvirtd
    libvirtd.close()


def test_restarting_libvirtd_ends_no_episode(
    short_dir: Path, template_dir: Path, libvirtd: Libvirtd, daemons: ExitStack
) -> None:
    state_dir = short_dir / "s"
    config = CONFIG.format(template_dir=template_dir) + f'uri = "{libvirtd.uri}"\n'
    served = daemons.enter_context(ServedDaemon(state_dir, config))
    address = served.wait_for(r"listening on (\S+)")

    def machine_of(episode: AsyncEpisode) -> str:
        found = re.search(rf"episode {episode.episode_id}: opened.*, machine (\S+),", served.log_file.read_text())
        assert found is not None
        return found[1]

    async def wait_problem(client: AsyncEnvClient, problem: str) -> None:
        async with asyncio.timeout(60):
            while problem not in (await client.list_pools())[0].problem:
                await asyncio.sleep(0.1)

    async def run() -> None:
        async with (
            AsyncEnvClient(address) as client,
            client.reset(NO_SETUP, view=NO_PIXELS, timeout=LONG_TIMEOUT) as episode,
            client.reset(NO_SETUP, view=NO_PIXELS, timeout=LONG_TIMEOUT) as doomed,
        ):
            for number, count in ((signal.SIGTERM, 1), (signal.SIGKILL, 3)):
                libvirtd.end(number)
                await wait_problem(client, "libvirt at qemu+unix")
                assert (await episode.step(Move(100 * count, 200), timeout=LONG_TIMEOUT)).step_count == count

                async def branch(count: int = count) -> None:
                    async with client.fork(episode, count=1, timeout=LONG_TIMEOUT) as (copy,):
                        assert (await copy.step(Move(50, 50), timeout=LONG_TIMEOUT)).step_count == count + 1

                branching = asyncio.create_task(branch())
                if number is signal.SIGKILL:
                    # No event reports its end.
                    pid = machine_pids(state_dir)[machine_of(doomed)]
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(1)
                libvirtd.start()
                await branching
                assert (await episode.step(Move(100 * count, 300), timeout=LONG_TIMEOUT)).step_count == count + 1
                async with client.reset(NO_SETUP, view=NO_PIXELS, timeout=LONG_TIMEOUT) as new:
                    assert (await new.step(Move(50, 50), timeout=LONG_TIMEOUT)).step_count == 1
                async with asyncio.timeout(60):
                    while (await client.list_pools())[0].problem:
                        await asyncio.sleep(0.1)
            with pytest.raises(MachineLost):
                await doomed.step(Move(100, 100), timeout=LONG_TIMEOUT)

    asyncio.run(run())
    assert served.end() == 0
    assert daemon_leftovers(state_dir) == []
