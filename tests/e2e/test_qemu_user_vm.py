"""envd run by root, with QEMU run by libvirt's unprivileged user."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from cuaenv.client import Done, EnvClient, PressKeys, Settle, TypeText, View
from envd.hypervisor.qemu.processes import machine_pids
from envd.hypervisor.qemu.user import Account
from envd.images.catalogue import Image
from tests.support.leftovers import daemon_leftovers
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(900)]

TASK = "desktop/type-greeting"
SAVE = PressKeys(["ctrl", "s"])
SLOW_SETTLE = Settle(quiet=timedelta(seconds=2), max=timedelta(seconds=20))
CONFIG = """\
cache_dir = "{cache_dir}"

[pools.desktop]
image = "desktop"
size = 1
capacity = 3

[hypervisor]
qemu_user = "libvirt-qemu"
"""


@pytest.fixture
def open_dir(cache_dir: Path, desktop_image: Image) -> Iterator[Path]:
    """A directory that every user can enter, with the desktop image."""
    directory = Path(tempfile.mkdtemp(prefix="envd-u-", dir="/tmp"))
    directory.chmod(0o755)
    image = cache_dir / "images" / "desktop" / desktop_image.digest[:16]
    copy = directory / "c" / "images" / "desktop"
    copy.mkdir(parents=True)
    # Not the files that containers unpacked, whose devices and links cannot be copied.
    unpacked = shutil.ignore_patterns("*container-*")
    shutil.copytree(image, copy / image.name, copy_function=_linked, ignore=unpacked)
    (copy / "current").symlink_to(image.name)
    yield directory
    shutil.rmtree(directory)


def with_kvm_for(account: Account, directory: Path) -> list[str]:
    """Return a command prefix that lets the user open /dev/kvm, if it exists."""
    kvm = Path("/dev/kvm")
    if not kvm.exists():
        return []
    own = directory / "kvm"
    os.mknod(own, 0o660 | stat.S_IFCHR, kvm.stat().st_rdev)
    os.chown(own, account.user_id, account.group_id)
    program = 'mount --bind "$0" /dev/kvm && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", program, str(own)]


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def ids_of(pid: int, name: str) -> set[int]:
    """Return the real, effective, saved and file-system ids of a process (proc(5), status)."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return {int(number) for number in line.split()[1:]}


def test_machines_boot_fork_and_branch_without_any_root_privilege(open_dir: Path, daemons: ExitStack) -> None:
    account = Account.of("libvirt-qemu")
    assert account is not None
    state_dir = open_dir / "s"
    within = with_kvm_for(account, open_dir)
    served = daemons.enter_context(ServedDaemon(state_dir, CONFIG.format(cache_dir=open_dir / "c"), within=within))
    address = served.wait_for(r"listening on (\S+)")
    with EnvClient(address) as client:
        opening = client.reset(TASK, timeout=timedelta(minutes=10), view=View(encoding="none"), settle=SLOW_SETTLE)
        with opening as parent:
            parent.step(TypeText("Hello, "))
            with client.fork(parent, count=1) as (branch,):
                qemus = machine_pids(state_dir).values()
                assert len(qemus) >= 2
                for directory in (state_dir, state_dir / "templates"):
                    found = directory.stat()
                    assert (found.st_uid, found.st_gid) == (0, account.own_group_id)
                    assert found.st_mode & 0o777 == 0o710
                for pid in qemus:
                    assert ids_of(pid, "Uid") == {account.user_id}
                    assert ids_of(pid, "Gid") == {account.group_id}
                    assert "\nCapEff:\t0000000000000000\n" in Path(f"/proc/{pid}/status").read_text()
                    assert "\nSeccomp:\t2\n" in Path(f"/proc/{pid}/status").read_text()
                branch.step(TypeText("desktop!"), SAVE)
                parent.step(TypeText("world!"), SAVE)
                for episode in (branch, parent):
                    episode.step(Done())
                assert [episode.evaluate().score for episode in (branch, parent)] == [1.0, 0.0]
    assert served.end() == 0
    assert daemon_leftovers(state_dir) == []
    # Files that back other machines belong to root, except the memory, which QEMU opens for writing.
    (template,) = (state_dir / "templates").glob("*/disk.qcow2")
    assert template.stat().st_uid == 0
