"""An agent that ends its own guest gets a score, never a void episode; a host that loses the machine voids it."""

import os
import signal
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio

from cuaenv.client import (
    AsyncEnvClient,
    AsyncEpisode,
    GuestEnded,
    MachineLost,
    PressKeys,
    State,
    StepResult,
    TypeText,
    Wait,
)
from envd.hypervisor.qemu.processes import machine_pids
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Task
from tests.support.real_desktops import Backend

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

#: Commands of root by the cause that they end the guest with. In the background: the machine ends before they do.
ACTS = [
    ("echo o > /proc/sysrq-trigger", "POWER_OFF"),
    ("systemctl poweroff --force --force", "POWER_OFF"),
    ("echo b > /proc/sysrq-trigger", "REBOOT"),
    ("echo c > /proc/sysrq-trigger", "PANIC"),
]
#: Keys that power off, restart or leave a stock Debian.
CHORDS = [["alt", "printscreen", "o"], ["alt", "printscreen", "b"], ["ctrl", "alt", "delete"], ["ctrl", "alt", "f2"]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(qemu: Backend, vm_state_dir: Path) -> AsyncIterator[AsyncEnvClient]:
    task = Task(task_id="test/nothing", instruction="Nothing.", level=1, infeasible=True)
    async with qemu.desktops(TaskCatalogue([task]), state_dir=vm_state_dir) as client:
        yield client


async def stepped_until_ended(episode: AsyncEpisode) -> StepResult:
    # A guest that ends between two steps is an error of the second one.
    step = await episode.step(Wait(timedelta(seconds=30)))
    assert step.done
    return step


async def test_a_guest_that_ends_itself_is_scored_and_a_killed_one_is_void(
    client: AsyncEnvClient, vm_state_dir: Path
) -> None:
    async def act(command: str) -> tuple[str, str, State, float, str]:
        async with client.reset("test/nothing") as episode:
            script = f"(sleep 1; {command}) </dev/null >/dev/null 2>&1 &"
            assert (await episode.run_command(["sh", "-c", script], as_root=True)).exit_code == 0
            step = await stepped_until_ended(episode)
            assert step.observation.image is not None
            with pytest.raises(GuestEnded):
                await episode.observe()
            evaluation = await episode.evaluate()
            return command, step.guest_end_cause, step.state, evaluation.score, evaluation.checks[0].evidence

    assert [await act(command) for command, _ in ACTS] == [
        (command, cause, State.TERMINATED, 0.0, f"the guest ended itself: {cause}") for command, cause in ACTS
    ]
    async with client.reset("test/nothing") as episode:
        pids = machine_pids(vm_state_dir).values()
        await episode.step(Wait(timedelta(seconds=0.1)))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(MachineLost):
            await stepped_until_ended(episode)


async def test_keys_end_no_machine_and_no_session(client: AsyncEnvClient) -> None:
    async with client.reset("test/nothing") as episode:
        boot_id = (await episode.run_command(["cat", "/proc/sys/kernel/random/boot_id"])).stdout
        for chord in CHORDS:
            assert (await episode.step(PressKeys(chord))).errors == ()
        for _ in range(9):
            await episode.step(PressKeys(["ctrl", "alt", "delete"]))
        assert not (await episode.step(Wait(timedelta(seconds=2)))).done
        assert (await episode.run_command(["cat", "/proc/sys/kernel/random/boot_id"])).stdout == boot_id
        assert (await episode.run_command(["cat", "/sys/class/tty/tty0/active"])).stdout == b"tty1\n"


async def test_a_guest_whose_agent_is_killed_by_root_ends_itself(client: AsyncEnvClient) -> None:
    async with client.reset("test/nothing") as episode:
        # The agent's service ends last: the script is one of its processes.
        kill = "systemctl stop envd-guestd.socket envd-guestd.service qemu-guest-agent"
        script = f"(sleep 1; {kill}) </dev/null >/dev/null 2>&1 &"
        assert (await episode.run_command(["sh", "-c", script], as_root=True)).exit_code == 0
        await episode.step(Wait(timedelta(seconds=3)))
        # Text is typed through guestd.
        step = await episode.step(TypeText("übertragen"), timeout=timedelta(minutes=5))
        assert (step.state, step.guest_end_cause) == (State.TERMINATED, "UNRESPONSIVE")
        assert (await episode.evaluate()).score == 0
