"""Two shards on real machines: one is killed with its machines, and the other's episode continues to its score."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from cuaenv.client import Done, EnvClient, MachineLost, PressKeys, Settle, TypeText, View

from envd.api.relay.merge import shard_of
from envd.daemon.state_lock import holder
from envd.images.catalogue import Image
from tests.support.leftovers import machine_leftovers
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(1500)]

TASK = "desktop/type-greeting"
SAVE = PressKeys(["ctrl", "s"])
SLOW_SETTLE = Settle(quiet=timedelta(seconds=2), max=timedelta(seconds=20))
CONFIG = """\
shards = 2
[pools.desktop]
image = "desktop"
size = 2
capacity = 4

[hypervisor]
template_dir = "{template_dir}"
"""


@pytest.fixture
def short_dir(desktop_image: Image) -> Iterator[Path]:
    assert desktop_image.name == "desktop"
    directory = Path(tempfile.mkdtemp(prefix="envd-s-", dir="/tmp"))
    directory.chmod(0o755)  # QEMU accesses it as another user.
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def daemon(short_dir: Path, template_dir: Path) -> Iterator[ServedDaemon]:
    for index in range(2):
        # Each shard has its own templates; a copy saves the boot.
        if template_dir.exists():
            shutil.copytree(template_dir, short_dir / "t" / f"shard-{index}")
    daemon = ServedDaemon(short_dir / "s", CONFIG.format(template_dir=short_dir / "t"))
    yield daemon
    if daemon.process.poll() is None:
        daemon.end()


def test_a_killed_shard_loses_its_machines_alone_and_serves_again(daemon: ServedDaemon, short_dir: Path) -> None:
    state_dir = short_dir / "s"
    address = daemon.wait_for(r"listening on (\S+)", timeout_s=300)
    with ExitStack() as stack:
        client = stack.enter_context(EnvClient(address))
        episodes = [
            stack.enter_context(
                client.reset(TASK, timeout=timedelta(minutes=15), view=View(encoding="none"), settle=SLOW_SETTLE)
            )
            for _ in range(2)
        ]
        assert {shard_of(episode.episode_id) for episode in episodes} == {0, 1}
        for episode in episodes:
            episode.step(TypeText("Hello, "))
        lost = next(episode for episode in episodes if shard_of(episode.episode_id) == 1)
        kept = next(episode for episode in episodes if shard_of(episode.episode_id) == 0)
        (branch,) = stack.enter_context(client.fork(kept, count=1))
        assert shard_of(branch.episode_id) == 0

        pid = holder(state_dir / "shard-1")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        kept.step(TypeText("world!"), SAVE)
        branch.step(TypeText("desktop!"), SAVE)
        with pytest.raises(MachineLost):
            lost.step(TypeText("world!"), SAVE)
        for episode in (kept, branch):
            episode.step(Done())
        scores = [episode.evaluate().score for episode in (kept, branch)]
        assert sorted(scores) == [0.0, 1.0]
        kept.close()
        branch.close()
        again = stack.enter_context(client.reset(TASK, timeout=timedelta(minutes=15), view=View(encoding="none")))
        again.step(TypeText("x"))
    assert daemon.end() == 0
    for index in range(2):
        assert machine_leftovers(state_dir / f"shard-{index}") == []
