"""`envd serve` as a process, with real machines."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from cuaenv.client import (
    BadRequest,
    Click,
    Done,
    EnvClient,
    Episode,
    EpisodeEnded,
    MachineLost,
    PressKeys,
    Settle,
    TypeText,
    View,
    Wait,
)
from tests.support.leftovers import machine_leftovers
from tests.support.real_desktops import REAL_BACKENDS_IN_EVERY_RUN, Backend
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.timeout(900)]

TASK = "desktop/type-greeting"
DOCUMENT = "/home/user/Documents/greeting.txt"
LONG_TIMEOUT = timedelta(minutes=10)
NO_PIXELS = View(encoding="none")
CONFIG = """\
[pools.desktop]
image = "desktop"
size = 1
capacity = 2
allow_guest_access = true

[limits]
lease_ttl_s = 30
{hypervisor}"""
#: Prints button, x and y of each button press that the guest's X server receives from its devices.
RECORD_CLICKS = """\
import struct
import xcffib, xcffib.record, xcffib.xproto

connection = xcffib.connect()
record = connection(xcffib.record.key)
context = connection.generate_id()
button_presses = bytes(18) + bytes([4, 4]) + bytes(4)  # an xRecordRange with device events 4 to 4
record.CreateContext(context, 0, 1, 1, [xcffib.record.CS.AllClients], [button_presses], is_checked=True).check()
replies = record.EnableContext(context)
while True:
    reply = replies.reply()
    if reply.category == 4:
        print("ready", flush=True)
    elif reply.category == 0:
        for button, x, y in struct.iter_unpack("=xB18xhh8x", reply.data.buf()):
            print(button, x, y, flush=True)
"""


@pytest.fixture(scope="module")
def state_dir(module_dir: Path) -> Path:
    return module_dir / "s"


@pytest.fixture(scope="module")
def daemon(state_dir: Path, real_backend: Backend) -> Iterator[ServedDaemon]:
    with ServedDaemon(state_dir, CONFIG.format(hypervisor=real_backend.toml)) as served:
        yield served
        if served.process.poll() is None:
            assert served.end() == 0
    assert machine_leftovers(state_dir) == []


@pytest.fixture(scope="module")
def address(daemon: ServedDaemon) -> str:
    return daemon.wait_for(r"listening on (\S+)")


def until(condition: Callable[[], bool], *, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"condition not met after {timeout_s} s"
        time.sleep(0.2)


def file_after_2_s(episode: Episode, path: str) -> bytes:
    """Let the guest run for two seconds, without a step, and return one of its files."""
    episode.observe(settle=Settle(min=timedelta(seconds=2), max=timedelta(seconds=2)))
    return episode.read_file(path)


def test_typing_clicking_and_scoring_on_a_real_desktop(address: str) -> None:
    line = "The quick brown fox\tjumps over 13 lazy dogs: €, é and ~`!@#$%^&*()_+{}|\"<>? \\ [] ';/.,\n"
    text = (line * 8)[:600]
    points = random.Random(7)
    clicks = [(points.randrange(150, 800), points.randrange(200, 500)) for _ in range(20)]
    with EnvClient(address) as client, client.reset(TASK, timeout=LONG_TIMEOUT, view=NO_PIXELS) as episode:
        assert "greeting.txt" in episode.instruction
        step = episode.step(TypeText(text), PressKeys(["ctrl", "s"]), settle=Settle(quiet=timedelta(seconds=1)))
        assert step.action_errors == ("", "")
        # Under emulation the editor may still be drawing the text, and saves when it has read the chord. The guest runs
        # only during calls.
        until(lambda: len(file_after_2_s(episode, DOCUMENT)) >= len(text.encode()), timeout_s=250)
        assert episode.read_file(DOCUMENT) == text.encode()

        recorder = ["sh", "-c", 'python3 -c "$0" > /home/user/clicks 2>&1 &', RECORD_CLICKS]
        assert episode.run_command(recorder).exit_code == 0
        until(lambda: b"ready" in file_after_2_s(episode, "/home/user/clicks"), timeout_s=60)
        assert not any(episode.step(*(Click(x, y) for x, y in clicks)).errors)

        def recorded() -> list[tuple[int, int]]:
            lines = file_after_2_s(episode, "/home/user/clicks").decode().splitlines()[1:]
            return [(int(x), int(y)) for button, x, y in map(str.split, lines) if button == "1"]

        until(lambda: len(recorded()) >= 20, timeout_s=60)
        seen = recorded()
        assert max(abs(a - c) + abs(b - d) for (a, b), (c, d) in zip(clicks, seen, strict=True)) <= 1

        # Solve the task: the document must have one line.
        episode.step(PressKeys(["ctrl", "a"]), TypeText("Hello, desktop!"), PressKeys(["ctrl", "s"]))
        until(lambda: file_after_2_s(episode, DOCUMENT).startswith(b"Hello, desktop!"), timeout_s=400)
        picture = episode.observe(view=View()).image
        assert picture.size == (1280, 800)
        episode.step(Done())
        assert episode.evaluate().score == 1.0
        with pytest.raises(EpisodeEnded, match="AGENT_DONE"):
            episode.step(Wait(timedelta(seconds=1)))
        with pytest.raises(BadRequest, match=r"actions\[0\]"):
            episode.step(Click(5, 5, count=-1))


def test_a_guest_killed_during_a_step_is_machine_lost_and_never_a_reward(
    address: str, real_backend: Backend, state_dir: Path
) -> None:
    with EnvClient(address) as client, client.reset(TASK, timeout=LONG_TIMEOUT, view=NO_PIXELS) as episode:
        pids = real_backend.machine_pids(state_dir).values()
        failure: list[BaseException] = []

        def step() -> None:
            try:
                episode.step(Wait(timedelta(seconds=30)))
            except BaseException as error:
                failure.append(error)

        stepping = threading.Thread(target=step)
        stepping.start()
        time.sleep(1)
        for pid in pids:  # That of the leased machine, and that of a spare.
            os.kill(pid, signal.SIGKILL)
        stepping.join(timeout=120)
        assert [type(error) for error in failure] == [MachineLost]
        with pytest.raises(MachineLost):
            episode.evaluate()


CLIENT = """
import sys
from datetime import timedelta
from cuaenv.client import EnvClient, View, Wait
with EnvClient(sys.argv[1]) as client:
    options = {"timeout": timedelta(minutes=10), "lease_ttl": timedelta(seconds=10), "view": View(encoding="none")}
    with client.reset("desktop/type-greeting", **options) as episode:
        print("stepping", flush=True)
        while True:
            episode.step(Wait(timedelta(seconds=5)))
"""


def test_the_machine_of_a_client_killed_during_a_step_is_reclaimed(address: str) -> None:
    with subprocess.Popen([sys.executable, "-c", CLIENT, address], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stepping\n"
        process.kill()
    with EnvClient(address) as client:
        # Time for the running step, the lease that it renewed, and the destruction.
        until(lambda: [pool.leased_count for pool in client.list_pools()] == [0], timeout_s=60)


# What is left of a killed daemon depends on the backend.
@pytest.mark.parametrize("real_backend", REAL_BACKENDS_IN_EVERY_RUN, indirect=True, scope="module")
def test_the_next_daemon_removes_a_killed_daemons_leftovers_and_forks_the_same_template(
    daemon: ServedDaemon, state_dir: Path, real_backend: Backend
) -> None:
    until(lambda: bool(real_backend.machine_pids(state_dir)), timeout_s=60)
    left = set(real_backend.machine_pids(state_dir).values())
    daemon.end(signal.SIGKILL)
    with ServedDaemon(state_dir, CONFIG.format(hypervisor=real_backend.toml)) as successor:
        successor.wait_for(r"removed (\d+) machines? of an earlier daemon")
        assert not left & set(real_backend.machine_pids(state_dir).values())
        with EnvClient(successor.wait_for(r"listening on (\S+)")) as client:
            until(lambda: [pool.idle_count for pool in client.list_pools()] == [1], timeout_s=60)
        with urllib.request.urlopen(successor.wait_for(r"metrics on (\S+)")) as response:  # noqa: S310 - our own
            text = response.read().decode()
        assert 'envd_template_boots_total{pool="desktop"} 0.0' in text, "it must fork the stored template"
        assert successor.end() == 0
    assert machine_leftovers(state_dir) == []
