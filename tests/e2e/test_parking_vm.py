"""Parking of real machines: a later parking writes what has changed, and its states outlive a killed daemon."""

import signal
import socket
import time
import urllib.request
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from cuaenv.client import Click, EnvClient, Episode, MachineLost, Settle, View
from tests.support.leftovers import machine_leftovers
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.vm, pytest.mark.long, pytest.mark.timeout(900)]

TASK = "desktop/open-calculator"
SETTLE = Settle(quiet=timedelta(seconds=1), max=timedelta(seconds=20))
#: In the guest: in its memory, and on its disk.
PATHS = ("/dev/shm/words", "/var/tmp/words")  # noqa: S108
CONFIG = """\
[pools.desktop]
image = "desktop"
size = 0
capacity = 2
resident = 1
allow_guest_access = true

[limits]
lease_ttl_s = 600

[hypervisor]
template_dir = "{template_dir}"
"""


@pytest.fixture
def listen() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def written_bytes(daemon: ServedDaemon) -> float:
    """Return what the daemon has written to park episodes."""
    address = daemon.wait_for(r"metrics on http://(\S+)/metrics")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("envd_parking_bytes_total{"))


def note(episode: Episode, word: str) -> None:
    """Change what the guest has in memory and on its disk, and take a step."""
    for path in PATHS:
        assert episode.run_command(["sh", "-c", f"echo {word} >> {path}; sync"]).exit_code == 0
    episode.step(Click(640, 400))


def wait_until_parked(client: EnvClient, episode: Episode) -> None:
    deadline_s = time.monotonic() + 60
    while not any(info.is_parked for info in client.list_episodes() if info.episode_id == episode.episode_id):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_a_second_parking_writes_only_what_has_changed_and_survives_a_kill(
    short_dir: Path, template_dir: Path, listen: str, daemons: ExitStack
) -> None:
    state_dir = short_dir / "s"
    config = CONFIG.format(template_dir=template_dir)
    first = daemons.enter_context(ServedDaemon(state_dir, config, listen=listen))
    first.wait_for(r"listening on (\S+)", timeout_s=300)
    with ExitStack() as stack:
        client = stack.enter_context(EnvClient(listen))
        view = View(encoding="none")
        one = stack.enter_context(client.reset(TASK, timeout=timedelta(minutes=10), view=view, settle=SETTLE))
        # A guest that has just begun changes most of its pages in each step.
        assert one.run_command(["sh", "-c", "head -c 48M /dev/urandom > /dev/shm/ballast"]).exit_code == 0
        note(one, "one")
        other = stack.enter_context(client.reset(TASK, timeout=timedelta(minutes=10), view=view, settle=SETTLE))
        wait_until_parked(client, one)
        written = [written_bytes(first)]
        for word in ("two", "three"):
            note(one, word)  # which parks the other
            before = written_bytes(first)
            note(other, word)
            wait_until_parked(client, one)
            written.append(written_bytes(first) - before)
        whole, *later = written
        assert whole > 1 << 20
        assert max(later) < whole / 3, written
        (state,) = (state_dir / "parked").iterdir()
        assert {path.name for path in state.glob("changes*")} == {"changes1.zst", "changes2.zst"}
        assert (state / "memory.zst").stat().st_nlink == 1, "its machine is gone"
        first.end(signal.SIGKILL)
        second = daemons.enter_context(ServedDaemon(state_dir, config, listen=listen))
        second.wait_for(r"listening on (\S+)", timeout_s=300)
        with pytest.raises(MachineLost):
            other.step(Click(1, 1))
        other.close()
        note(one, "four")
        assert one.step_count == 4
        assert [one.read_file(path) for path in PATHS] == [b"one\ntwo\nthree\nfour\n"] * 2
    assert list((state_dir / "parked").iterdir()) == []
    assert list((state_dir / "captures").iterdir()) == []
    assert second.end() == 0
    assert machine_leftovers(state_dir) == []
