"""What a policy can do to its own machine, and what becomes of the episode: each act, on a virtual machine and in a
container.

`make test-full` runs them; with `-s` they print the table. `ENVD_TEST_IMAGE` names another image: `osworld`, whose user
may become root, or `wine`, whose tasks are for Windows and which runs on virtual machines alone.
"""

import base64
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import TypeAdapter

from cuaenv.client import AsyncEnvClient, AsyncEpisode, Done, EnvError, GuestEnded, PressKeys, TypeText, View, Wait
from envd.pool.settings import PoolParameters
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Task
from tests.support.real_desktops import Backend

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="module")]

DISK_MIB = 900
QUOTA_MIB = 400
IMAGE = os.environ.get("ENVD_TEST_IMAGE", "desktop")
IS_WINE = IMAGE == "wine"
OS = "windows" if IS_WINE else "linux"
HOME = "/home/user/.wine/drive_c/users/Public/Documents" if IS_WINE else "/home/user"
#: Images on which an act is played.
LINUX, OSWORLD, WINE = ("desktop", "osworld"), ("osworld",), ("wine",)


def in_home(name: str) -> str:
    """Return the path that a checker has of a file of the agent."""
    return rf"C:\Users\Public\Documents\{name}" if IS_WINE else f"{HOME}/{name}"


READ = ["cmd.exe", "/c", "type", in_home("reply.txt")] if IS_WINE else ["cat", in_home("reply.txt")]
CHECKERS: dict[str, dict[str, Any]] = {
    "file": {"kind": "file_text", "path": in_home("reply.txt"), "equals": "42"},
    "command": {"kind": "command", "argv": READ, "as_root": IS_WINE, "stdout": {"equals": "42"}},
    "window": {"kind": "window", "window": {"title": "^forty-two$"}},
    "clipboard": {"kind": "clipboard", "equals": "42"},
    "screen": {"kind": "on_screen", "named": "^forty-two$"},
    "directory": {"kind": "directory", "path": in_home("many"), "entries": ["forty-two"]},
    "ini": {"kind": "ini_value", "path": in_home("reply.ini"), "section": "a", "key": "b", "equals": "42"},
    "power": {"kind": "powered_off"},
    "image": {
        "kind": "image_like",
        "path": in_home("reply.ppm"),
        "base64": base64.b64encode(b"P6 1 1 255\n...").decode(),
    },
}


@dataclass(frozen=True, kw_only=True)
class Act:
    """One act, and how its episode ends."""

    task: str = "file"
    keys: tuple[tuple[str, ...], ...] = ()
    user: str = ""
    """A command of the agent's user."""
    root: str = ""
    """A command of root, for images whose user may become root."""
    host: Callable[[list[int], Path], None] | None = None
    """What happens to the host, given the processes of the machine and the directory of its files."""
    types: bool = False
    """Whether the agent then types a character that guestd must type."""
    outcome: str = "scored"
    """`scored`, or the reason of the error that voids the episode."""
    causes: frozenset[str] = frozenset({""})
    score: float | None = 0
    images: tuple[str, ...] = (*LINUX, *WINE)
    in_container: frozenset[str] | None = None
    """Causes in a container, where they differ: the session's user cannot end its X server, and a session that its user
    has ended does not start again; nothing in it can end the kernel; and its disk is as large as its quota."""


def send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def fill_host(_pids: list[int], directory: Path) -> None:
    free_bytes = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    subprocess.run(["fallocate", "-l", str(free_bytes - 4096), directory / "filler"], check=True)


def ended(*causes: str) -> frozenset[str]:
    return frozenset(causes)


BY_SESSION = ended("", "SESSION_ENDED", "UNCHECKABLE", "UNRESPONSIVE")

X = "'^Xorg$|^Xtigervnc$'"
AGENT = "envd-wine-agent" if IS_WINE else "qemu-guest-agent"
CLIPBOARD_OWNER = "printf 42 | xclip -selection clipboard -i; pkill -STOP xclip"
FILL_GUEST = "for size in 4G 1G 256M 64M 16M 4M 1M 64K 4K; do while fallocate -l $size f$RANDOM; do :; done; done"
BIG_TITLE = (
    "import xcffib, xcffib.xproto as x, time; c = xcffib.connect(); s = c.get_setup().roots[0]; w = c.generate_id();"
    " c.core.CreateWindow(s.root_depth, w, s.root, 0, 0, 99, 99, 0, 1, s.root_visual, 0, []);"
    " c.core.ChangeProperty(0, w, x.Atom.WM_NAME, x.Atom.STRING, 8, 70000, b'x' * 70000);"
    " c.core.MapWindow(w); c.flush(); time.sleep(900)"
)
ENDLESS_TREE = (
    "import gi; gi.require_version('Gtk', '3.0'); from gi.repository import Gtk; w = Gtk.Window(title='many');"
    " g = Gtk.FlowBox(); [g.add(Gtk.Label(label=str(i))) for i in range(6000)]; w.add(g); w.show_all(); Gtk.main()"
)
ACTS = {
    # Controls
    "nothing": Act(),
    "the task": Act(user="printf 42 > reply.txt", score=1),
    "the task, by command": Act(task="command", user="printf 42 > reply.txt", score=1),
    # Keys
    "Alt+SysRq+O": Act(keys=(("alt", "printscreen", "o"),)),
    "Alt+SysRq+B": Act(keys=(("alt", "printscreen", "b"),)),
    "Alt+SysRq+C": Act(keys=(("alt", "printscreen", "c"),)),
    "Alt+SysRq+K": Act(keys=(("alt", "printscreen", "k"),)),
    "Ctrl+Alt+F2, Ctrl+Alt+Del": Act(keys=(("ctrl", "alt", "f2"), ("ctrl", "alt", "delete"))),
    "Ctrl+Alt+Backspace": Act(keys=(("ctrl", "alt", "backspace"),)),
    # The session
    "kill guestd, then type": Act(user="pkill -9 -f guestd", types=True, images=LINUX),
    "stop guestd, then type": Act(user="pkill -STOP -f guestd", types=True, images=LINUX),
    "kill guestd, command": Act(task="command", user="pkill -9 -f guestd", images=LINUX),
    "stop guestd, window": Act(task="window", user="pkill -STOP -f guestd", images=LINUX),
    "kill all own processes": Act(user="kill -9 -1", in_container=ended("SESSION_ENDED")),
    "kill all own processes, then type": Act(user="kill -9 -1", types=True, in_container=ended("SESSION_ENDED")),
    "stop all own processes, then type": Act(user="kill -STOP -1", types=True, causes=ended("", "SESSION_ENDED")),
    "kill the window manager": Act(
        task="window",
        user="pkill -9 openbox",
        causes=ended("UNCHECKABLE"),
        in_container=ended("SESSION_ENDED"),
    ),
    "kill the X server": Act(
        task="window", user=f"pkill -9 {X}", causes=ended("UNCHECKABLE", "SESSION_ENDED"), in_container=ended("")
    ),
    "kill the X server, clipboard": Act(
        task="clipboard",
        user=f"pkill -9 {X}",
        causes=ended("UNCHECKABLE", "SESSION_ENDED"),
        images=LINUX,
        in_container=ended(""),
    ),
    "kill the accessibility bus": Act(
        task="screen",
        user="pkill -9 at-spi; pkill -9 dbus-daemon",
        causes=ended("", "UNCHECKABLE", "SESSION_ENDED"),
        images=LINUX,
    ),
    "stop the X server": Act(
        task="window", user=f"pkill -STOP {X}", causes=ended("SESSION_ENDED"), in_container=ended("")
    ),
    "stop the clipboard's owner": Act(
        task="clipboard", user=CLIPBOARD_OWNER, causes=ended("SESSION_ENDED"), images=LINUX
    ),
    "kill the server of Wine, command": Act(task="command", user="pkill -9 wineserver", images=WINE),
    "kill the server of Wine, window": Act(task="window", user="pkill -9 wineserver", images=WINE),
    "stop the server of Wine, window": Act(task="window", user="pkill -STOP wineserver", images=WINE),
    "systemctl poweroff": Act(user="systemctl poweroff"),
    # Resources
    "fork bomb": Act(user="f() { f | f & }; f", causes=ended("", "UNRESPONSIVE", "SESSION_ENDED")),
    "all memory": Act(user="tail /dev/zero", causes=ended("", "UNRESPONSIVE", "SESSION_ENDED")),
    "disk quota": Act(user=f"dd if=/dev/urandom of=big bs=1M count={QUOTA_MIB + 100}; sync", causes=ended("DISK_FULL")),
    "full guest disk": Act(user=FILL_GUEST, in_container=ended("DISK_FULL")),
    # What checkers read
    "link to /proc/kmsg": Act(user="ln -s /proc/kmsg reply.txt"),
    "link to /proc/1/pagemap": Act(user="ln -s /proc/1/pagemap reply.txt"),
    "link to /proc/1/mem": Act(user="ln -s /proc/1/mem reply.txt"),
    "link to /dev/zero": Act(user="ln -s /dev/zero reply.txt"),
    "flickering file": Act(user="while :; do printf 41 > reply.txt; rm reply.txt; done &"),
    "growing file": Act(user="yes > reply.txt & sleep 0.2", causes=ended("", "DISK_FULL")),
    "exchanged file": Act(user="printf 41 > a; while :; do ln -f a reply.txt; ln -sfn / reply.txt; done &", score=0),
    "text that is slow to judge": Act(
        task="ini", user="{ printf b; head -c 35000 /dev/zero | tr '\\0' ' '; echo c; } > reply.ini"
    ),
    "picture that is slow to judge": Act(
        task="image", user="{ echo P6; yes '#' | head -c 16000000; } > reply.ppm"
    ),
    "70,000 files": Act(task="directory", user="mkdir many; cd many; seq 70000 | xargs touch"),
    "window title of 70 KB": Act(task="window", user=f'python3 -c "{BIG_TITLE}" & sleep 3', images=LINUX),
    "endless tree": Act(
        task="screen",
        user=f'python3 -c "{ENDLESS_TREE}" & sleep 20',
        causes=ended("", "UNCHECKABLE", "SESSION_ENDED"),
        images=LINUX,
    ),
    "forged panic, without root": Act(user="echo 'Kernel panic - not syncing: x' > /dev/ttyS0"),
    # Root
    "power off, as the goal": Act(task="power", root="poweroff", causes=ended("POWER_OFF"), score=1),
    "nothing, power off as the goal": Act(task="power"),
    "reboot, power off as the goal": Act(task="power", root="reboot -f", causes=ended("REBOOT")),
    "poweroff": Act(root="poweroff", causes=ended("POWER_OFF")),
    "poweroff -f": Act(root="poweroff -f", causes=ended("POWER_OFF")),
    "halt": Act(root="halt -f", causes=ended("POWER_OFF", "UNRESPONSIVE")),
    "reboot": Act(root="reboot -f", causes=ended("REBOOT")),
    "panic": Act(root="echo c > /proc/sysrq-trigger", causes=ended("PANIC"), in_container=ended("")),
    "forged panic": Act(root="echo 'Kernel panic - not syncing: x' > /dev/ttyS0", causes=ended("", "PANIC")),
    "stop the guest agent": Act(
        root=f"systemctl stop {AGENT} || pkill -STOP -x qemu-ga", causes=ended("UNRESPONSIVE")
    ),
    "mask the guest agent": Act(
        root=f"systemctl mask --now {AGENT} && {{ ! pgrep -x qemu-ga; }} || while :; do pkill -9 -x qemu-ga; done",
        causes=ended("UNRESPONSIVE"),
    ),
    "poweroff by sudo": Act(user="sudo poweroff", causes=ended("POWER_OFF"), images=OSWORLD),
    "stop the guest agent by sudo": Act(
        user=f"sudo systemctl stop {AGENT}", causes=ended("UNRESPONSIVE"), images=OSWORLD
    ),
    # The host
    "SIGKILL of the machine": Act(
        host=lambda pids, _: send(signal.SIGKILL, pids[:1]), outcome="MACHINE_LOST", score=None
    ),
    "SIGSTOP of the machine": Act(
        host=lambda pids, _: send(signal.SIGSTOP, pids), outcome="LOSS_UNDECIDED", score=None
    ),
    "full host disk": Act(
        user="(sleep 3; dd if=/dev/urandom of=big bs=1M count=64; sync) &",
        host=fill_host, outcome="MACHINE_LOST", score=None,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Machines of one backend, and what holds their files and processes on this host."""

    client: AsyncEnvClient
    machines_dir: Path
    """A disk for the machines that an act can fill."""
    processes: Callable[[], list[int]]
    """Return the processes of the only machine, of which the first ends it."""
    is_container: bool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(real_backend: Backend, vm_state_dir: Path) -> AsyncIterator[Served]:
    if IS_WINE and not real_backend.is_qemu:
        pytest.skip("Wine runs on virtual machines alone")
    tasks = TypeAdapter(list[Task]).validate_python(
        [
            {"task_id": f"test/{name}", "instruction": "Write 42.", "level": 1, "checker": checker, "os": OS}
            for name, checker in CHECKERS.items()
            if not (IS_WINE and name == "clipboard")
        ]
    )
    settings = PoolParameters(
        name="desktop", capacity=2, size=0, boot_timeout_s=1200.0, allow_guest_access=True, disk_quota_mib=QUOTA_MIB
    )
    with small_disk(vm_state_dir / ("machines" if real_backend.is_qemu else "containers")) as machines_dir:
        async with (
            real_backend.machines(settings, TaskCatalogue(tasks), state_dir=vm_state_dir, image=IMAGE) as address,
            AsyncEnvClient(address) as client,
        ):
            yield Served(
                client=client,
                machines_dir=machines_dir,
                processes=partial(real_backend.machine_processes, vm_state_dir),
                is_container=not real_backend.is_qemu,
            )


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    directory.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=0755", "tmpfs", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


async def play(episode: AsyncEpisode, act: Act, served: Served) -> tuple[str, str, float | None]:
    """Return outcome, cause and score."""
    long = timedelta(minutes=8)
    try:
        for chord in act.keys:
            await episode.step(PressKeys(list(chord)))
        for command, as_root in ((act.user, False), (act.root, True)):
            if command:
                # Apart from its caller, which it may end.
                script = f"cd {HOME}; ({command}) </dev/null >/dev/null 2>&1"
                script = f"(sleep 1; {script}) </dev/null >/dev/null 2>&1 &" if as_root else script
                # Commands in Wine's guest are root's.
                user = ["/usr/sbin/runuser", "-u", "user", "--"] if IS_WINE and not as_root else []
                argv = [*user, "/bin/bash", "-c", script]
                with suppress(EnvError):
                    await episode.run_command(argv, as_root=as_root or IS_WINE, timeout=timedelta(seconds=90))
        if act.host:
            # A machine that has not run yet is only loaded by its first step.
            await episode.step(Wait(timedelta(seconds=1)), timeout=long)
            act.host(served.processes(), served.machines_dir)
        with suppress(GuestEnded):
            for _ in range(5 if served.is_container else 12):
                if (await episode.step(Wait(timedelta(seconds=1)), timeout=long)).done:
                    break
            else:
                if act.types:
                    await episode.step(TypeText("ü"), timeout=long)
                await episode.step(Done("42"), timeout=long)
        evaluation = await episode.evaluate(timeout=long)
    except EnvError as error:
        return error.reason, "", None
    return "scored", evaluation.guest_end_cause, evaluation.score


@pytest.mark.parametrize("name", [name for name, act in ACTS.items() if IMAGE in act.images])
async def test_an_act_ends_its_episode_as_its_owner_says(served: Served, name: str) -> None:
    act = ACTS[name]
    reset = served.client.reset(f"test/{act.task}", view=View(encoding="none"), timeout=timedelta(minutes=9))
    async with reset as episode:
        pids = served.processes()
        try:
            outcome, cause, score = await play(episode, act, served)
        finally:
            (served.machines_dir / "filler").unlink(missing_ok=True)
            send(signal.SIGCONT, pids)
    print(f"\n| {name} | {outcome} | {cause} | {score} |")
    assert (outcome, score) == (act.outcome, act.score)
    causes = act.in_container if served.is_container and act.in_container is not None else act.causes
    # One program serves the session and the host in Wine's guest, so what has ended may be named differently.
    assert cause in causes or (IS_WINE and {cause} | causes <= BY_SESSION)
