"""A daemon killed on a libvirtd's machines: the next one takes them over, and their episodes go on."""

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from envd.hypervisor.images.catalogue import Image
from envd.hypervisor.leftovers import machine_leftovers
from envd.testing.served import ServedDaemon
from trainer.client import Done, EnvClient, PressKeys, Settle, TypeText, View

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(900)]

TASK = "desktop/type-greeting"
SAVE = PressKeys(["ctrl", "s"])
SLOWLY = Settle(quiet=timedelta(seconds=2), max=timedelta(seconds=20))
LIBVIRTD_SOCKET = Path("/run/libvirt/libvirt-sock")
CONFIG = """\
[pools.desktop]
image = "desktop"
size = 1
capacity = 4

[limits]
lease_ttl_s = 120

[hypervisor]
uri = "qemu:///system"
template_dir = "{template_dir}"
"""


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@pytest.fixture
def libvirtd() -> Iterator[None]:
    """The host's libvirtd, or one of our own while the test lasts."""
    if answers(LIBVIRTD_SOCKET):
        yield
        return
    with ExitStack() as stack:
        for program in ("virtlogd", "libvirtd"):
            process = stack.enter_context(
                subprocess.Popen([f"/usr/sbin/{program}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            stack.callback(process.terminate)
        deadline_s = time.monotonic() + 60
        while not answers(LIBVIRTD_SOCKET):
            assert time.monotonic() < deadline_s, "libvirtd does not come up"
            time.sleep(0.2)
        yield


@pytest.fixture
def state_dir(desktop_image: Image) -> Iterator[Path]:
    assert desktop_image.name == "desktop"
    parent = Path(tempfile.mkdtemp(prefix="envd-r-", dir="/tmp"))
    parent.chmod(0o755)  # QEMU runs as a user of its own there
    yield parent / "s"
    shutil.rmtree(parent)


@pytest.mark.usefixtures("libvirtd")
def test_episodes_and_branches_go_on_under_the_next_daemon(state_dir: Path, template_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    config = CONFIG.format(template_dir=template_dir)
    first = ServedDaemon(state_dir, config, listen=listen)
    first.wait_for(r"listening on (\S+)")
    with ExitStack() as stack:
        client = stack.enter_context(EnvClient(listen))
        opening = client.reset(TASK, timeout=timedelta(minutes=10), view=View(encoding="none"), settle=SLOWLY)
        parent = stack.enter_context(opening)
        parent.step(TypeText("Hello, "))
        (branch,) = stack.enter_context(client.fork(parent, count=1))
        first.end(signal.SIGKILL)

        second = ServedDaemon(state_dir, config, listen=listen)
        second.wait_for(r"listening on (\S+)", timeout_s=300)
        branch.step(TypeText("desktop!"), SAVE)
        (late,) = stack.enter_context(client.fork(branch, count=1))
        parent.step(TypeText("world!"), SAVE)
        late.step(PressKeys(["BackSpace"]), SAVE)
        for episode in (branch, parent, late):
            episode.step(Done())
        assert [episode.evaluate().score for episode in (branch, parent, late)] == [1.0, 0.0, 0.0]
    captures = list((state_dir / "captures").iterdir())
    assert captures == [], "what nobody stands on any more goes with the last machine on it"
    assert second.end() == 0
    assert machine_leftovers(state_dir) == []
