"""Tools of an agent on the Debian desktop: shell, files and an MCP server, over forks and a killed daemon."""

import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from cuaenv.client import (
    CallTool,
    EditFile,
    EnvClient,
    Episode,
    ListDirectory,
    MachineLost,
    ReadFile,
    RunShell,
    StepResult,
    View,
    WriteFile,
)
from tests.support.leftovers import machine_leftovers
from tests.support.real_desktops import Backend
from tests.support.served import ServedDaemon

pytestmark = [pytest.mark.timeout(900)]

CONFIG = """\
[pools.desktop]
image = "desktop"
size = 1
capacity = 2
allow_guest_access = true
tools = ["shell", "files", "mcp"]
{hypervisor}"""
TASK = "desktop/open-calculator"  # has no setup
NO_PIXELS = View(encoding="none")
PLANES = "".join(chr(plane * 0x10000 + 0x1F3) for plane in range(17) if plane not in (15, 16)) + "\U000f01f3\U001001f3"


@pytest.fixture(scope="module")
def daemon(module_dir: Path, real_backend: Backend) -> Iterator[ServedDaemon]:
    state_dir = module_dir / "s"
    with ServedDaemon(state_dir, CONFIG.format(hypervisor=real_backend.toml)) as served:
        yield served
    assert machine_leftovers(state_dir) == []


@pytest.fixture(scope="module")
def client(daemon: ServedDaemon) -> Iterator[EnvClient]:
    with EnvClient(daemon.wait_for(r"listening on (\S+)")) as client:
        yield client


@pytest.fixture(scope="module")
def episode(client: EnvClient) -> Iterator[Episode]:
    with client.reset(TASK, view=NO_PIXELS, max_steps=100, timeout=timedelta(minutes=8)) as opened:
        yield opened


def shell(episode: Episode, command: str, timeout_s: float = 30.0) -> str:
    step = episode.step(RunShell(command, timedelta(seconds=timeout_s)))
    assert step.errors == ()
    (result,) = step.tool_results
    assert result is not None
    return result.output


def test_a_shell_of_the_desktops_user_lives_in_the_guest(episode: Episode) -> None:
    assert shell(episode, "mkdir -p ~/Documents; cd ~/Documents; id -un; X=5; echo $DISPLAY") == "user\n:0\n"
    assert shell(episode, "echo $X; pwd") == "5\n/home/user/Documents\n"


def test_files_and_every_plane_of_unicode_are_kept(episode: Episode) -> None:
    step = episode.step(
        WriteFile("~/notes/a.txt", f"{PLANES}\ntwo\n"),
        EditFile("~/notes/a.txt", "two", "2"),
        ReadFile("notes/a.txt"),
        RunShell("cat ~/notes/a.txt; stat -c %U ~/notes/a.txt"),
        ListDirectory("~/notes"),
        ReadFile("/bin/ls"),
        ReadFile("/etc/shadow"),
    )
    outputs = [result.output if result else None for result in step.tool_results]
    assert outputs[2] == f"{PLANES}\n2\n"
    assert outputs[3] == f"{PLANES}\n2\nuser\n"
    assert outputs[4] == f"a.txt ({len(PLANES.encode()) + 3} bytes)"
    assert (outputs[5] or "").endswith(" bytes, application/x-elf]")
    assert step.errors == ("/etc/shadow: Permission denied",)


def test_a_command_that_hangs_floods_or_kills_is_a_bounded_result(episode: Episode) -> None:
    def results(step: StepResult) -> tuple[int | None, bool, int]:
        (result,) = step.tool_results
        assert result is not None
        return result.exit_code, result.timed_out, result.left_out_bytes

    assert results(episode.step(RunShell("sleep 1000", timedelta(seconds=1)))) == (None, True, 0)
    flood = episode.step(RunShell("head -c 20000000 /dev/zero", timedelta(seconds=120)))
    assert results(flood) == (0, False, 20_000_000 - 32_768)
    assert results(episode.step(RunShell("kill -9 $$")))[0] == 137
    assert results(episode.step(RunShell("setsid sleep 600 & disown; echo on")))[:2] == (0, False)
    killed = episode.step(RunShell("pkill -9 -u user python3"))
    assert len(killed.errors) == 1
    assert shell(episode, "echo again") == "again\n"


def test_an_mcp_server_that_is_not_running_is_named(episode: Episode) -> None:
    assert episode.step(CallTool("notes", "add")).errors == ("no MCP server 'notes' is running; running: none",)


def test_a_command_during_which_the_daemon_is_killed_is_never_run_again(
    module_dir: Path, real_backend: Backend
) -> None:
    state_dir = module_dir / "k"
    config = CONFIG.format(hypervisor=real_backend.toml)
    with ServedDaemon(state_dir, config) as served:
        address = served.wait_for(r"listening on (\S+)")
        client = EnvClient(address)
        episode = client.open(TASK, view=NO_PIXELS, timeout=timedelta(minutes=8))
        failures: list[Exception] = []

        def step() -> None:
            try:
                episode.step(RunShell("echo x >> /home/user/count.txt; sleep 60"), timeout=timedelta(minutes=5))
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=step)
        thread.start()
        until_written(episode)
        served.end(signal.SIGKILL)
        with ServedDaemon(state_dir, config, listen=address) as again:
            again.wait_for(r"listening on (\S+)")
            thread.join()
            client.close()
        assert [type(error) for error in failures] == [MachineLost]
    assert machine_leftovers(state_dir) == []


def until_written(episode: Episode) -> None:
    """Return when the command has begun."""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        try:
            if episode.read_file("/home/user/count.txt") == b"x\n":
                return
        except Exception:  # the file does not exist yet
            time.sleep(0.2)
    raise AssertionError("the command did not begin")
