"""The next daemon adopts a killed daemon's machines on a libvirtd, and their episodes continue."""

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from cuaenv.client import Done, EnvClient, PressKeys, Settle, TypeText, View
from tests.support.leftovers import machine_leftovers
from tests.support.libvirtd import Libvirtd
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(900)]

TASK = "desktop/type-greeting"
SAVE = PressKeys(["ctrl", "s"])
SLOW_SETTLE = Settle(quiet=timedelta(seconds=2), max=timedelta(seconds=20))
CONFIG = """\
[pools.desktop]
image = "desktop"
size = 1
capacity = 4

[limits]
lease_ttl_s = 120

[hypervisor]
uri = "{uri}"
template_dir = "{template_dir}"
"""


@pytest.fixture
def libvirtd(short_dir: Path) -> Iterator[Libvirtd]:
    libvirtd = Libvirtd(short_dir / "l")
    yield libvirtd
    libvirtd.close()


def test_episodes_and_branches_continue_under_the_next_daemon(
    short_dir: Path, template_dir: Path, libvirtd: Libvirtd, daemons: ExitStack
) -> None:
    state_dir = short_dir / "s"
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    config = CONFIG.format(template_dir=template_dir, uri=libvirtd.uri)
    first = daemons.enter_context(ServedDaemon(state_dir, config, listen=listen))
    first.wait_for(r"listening on (\S+)")
    with ExitStack() as stack:
        client = stack.enter_context(EnvClient(listen))
        opening = client.reset(TASK, timeout=timedelta(minutes=10), view=View(encoding="none"), settle=SLOW_SETTLE)
        parent = stack.enter_context(opening)
        parent.step(TypeText("Hello, "))
        (branch,) = stack.enter_context(client.fork(parent, count=1))
        first.end(signal.SIGKILL)

        second = daemons.enter_context(ServedDaemon(state_dir, config, listen=listen))
        second.wait_for(r"listening on (\S+)", timeout_s=300)
        branch.step(TypeText("desktop!"), SAVE)
        (late,) = stack.enter_context(client.fork(branch, count=1))
        parent.step(TypeText("world!"), SAVE)
        late.step(PressKeys(["BackSpace"]), SAVE)
        for episode in (branch, parent, late):
            episode.step(Done())
        assert [episode.evaluate().score for episode in (branch, parent, late)] == [1.0, 0.0, 0.0]
    captures = list((state_dir / "captures").iterdir())
    assert captures == [], "a capture is removed with its last machine"
    assert second.end() == 0
    assert machine_leftovers(state_dir) == []
