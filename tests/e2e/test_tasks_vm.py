"""The desktop suite on a real guest: its oracles score 1.0 and doing nothing 0.0, all through gRPC.

Under emulation a boot takes a minute, so here, and only here, one machine serves every episode: between two of them its
programs are ended and its home is made anew. `ENVD_TEST_TASKS=all make vm-test` plays the whole suite instead of these.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from cuaenv.v1 import env_pb2

from envd.api.driver import EpisodeDriver
from envd.api.server import ApiServer
from envd.episodes.service import EpisodeService
from envd.guest.actions import Action, Done
from envd.guest.agent import GuestAgent
from envd.hypervisor.images.catalogue import Image, ImageCatalogue
from envd.hypervisor.libvirt import LibvirtHypervisor, LibvirtMachine
from envd.hypervisor.machine import Accelerator, JsonValue, MachineSpec, MachineState, MachineUsage
from envd.pool.pool import Pool
from envd.pool.settings import PoolSettings
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.replay import replay
from envd.telemetry.metrics import Metrics
from envd.testing.leftovers import machine_leftovers

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

CATALOGUE = TaskCatalogue.load()
ALL = [task.task_id for task in CATALOGUE.list()]
#: Each level and each application, mouse and keyboard, feasible and not.
SELECTED = [
    "desktop/type-greeting",
    "desktop/open-calculator",
    "desktop/close-calculator",
    "desktop/terminal-from-desktop-menu",
    "desktop/save-shopping-list",
    "desktop/change-weekday",
    "desktop/type-unicode",
    "desktop/rename-file",
    "desktop/letter-that-is-not-there",
    "desktop/drag-into-folder",
    "desktop/uppercase-by-menu",
    "desktop/copy-serial-number",
    "desktop/calculate-and-note",
    "desktop/sort-invoices",
]
TASK_IDS = ALL if os.environ.get("ENVD_TEST_TASKS") == "all" else SELECTED

NO_PIXELS = env_pb2.ObservationOptions(encoding=env_pb2.ENCODING_NONE)

CLEAN = """
for name in mousepad pcmanfm lxterminal galculator gpicview xterm; do pkill -KILL -x -u user "$name"; done
find /home/user -mindepth 1 -delete
cp -a /etc/skel/. /home/user
chown -R user:user /home/user
"""


class Recycled:
    """A machine whose end only cleans the real one beneath it."""

    def __init__(self, machine: LibvirtMachine, spec: MachineSpec) -> None:
        self._machine = machine
        self.spec = spec
        self.machine_id = spec.machine_id
        self.guestd_url = machine.guestd_url
        self.lost = asyncio.Event()
        self.lost_reason = ""
        self.state = MachineState.RUNNING
        self.open_display = machine.open_display
        self.screendump = machine.screendump
        self.pause = machine.pause
        self.resume = machine.resume

    async def agent_command(
        self, command: str, arguments: Mapping[str, JsonValue] | None = None, *, timeout_s: float
    ) -> JsonValue:
        return await self._machine.agent_command(command, arguments, timeout_s=timeout_s)

    async def usage(self) -> MachineUsage:
        return await self._machine.usage()

    async def destroy(self) -> None:
        if not self.lost.is_set():
            self.lost_reason = "cleaned"
            self.state = MachineState.GONE
            self.lost.set()
            cleaned = await GuestAgent(self._machine).run(["sh", "-c", CLEAN], timeout_s=60)
            assert cleaned.exit_code == 0, cleaned.stderr


class OneMachine:
    """A hypervisor whose machines are one real machine, one after another."""

    def __init__(self, hypervisor: LibvirtHypervisor) -> None:
        self._hypervisor = hypervisor
        self._machine: LibvirtMachine | None = None
        self.accelerator: Accelerator = hypervisor.accelerator
        self.description = hypervisor.description

    async def create(self, spec: MachineSpec) -> Recycled:
        if self._machine is None:
            self._machine = await self._hypervisor.create(spec)
        return Recycled(self._machine, spec)

    async def reap(self) -> list[str]:
        return await self._hypervisor.reap()

    async def close(self) -> None:
        if self._machine is not None:
            await self._machine.destroy()
        await self._hypervisor.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(desktop_image: Image, cache_dir: Path, vm_state_dir: Path) -> AsyncIterator[EpisodeDriver]:
    hypervisor = OneMachine(await LibvirtHypervisor.open(state_dir=vm_state_dir, cache_dir=cache_dir))
    settings = PoolSettings(name="desktop", capacity=1, idle_target=1)
    pool = Pool(settings, hypervisor=hypervisor, image=ImageCatalogue(cache_dir).disk_image(desktop_image.name))
    service = EpisodeService([pool], tasks=CATALOGUE)
    server = ApiServer(service, listen="127.0.0.1:0", metrics=Metrics())
    await service.start()
    try:
        async with EpisodeDriver(await server.start()) as driver:
            yield driver
    finally:
        await server.stop()
        await service.aclose()
        await hypervisor.close()
    assert machine_leftovers(vm_state_dir) == []


async def play(driver: EpisodeDriver, task_id: str, steps: Sequence[tuple[Action, ...]]) -> tuple[float, str]:
    """Play steps in an episode of their own; return its score and the evidence."""
    opened = await driver.reset(task_id, observation=NO_PIXELS, timeout=timedelta(minutes=10))
    (episode,) = opened.episodes
    taken = 0

    async def step(actions: tuple[Action, ...]) -> str:
        nonlocal taken
        answer = await driver.step(episode.episode_id, *actions, step_index=taken, observation=NO_PIXELS)
        assert [result.error for result in answer.action_results if result.error] == []
        taken += 1
        return answer.observation.frame.frame_id

    try:
        await replay(steps, first_frame_id=opened.observations[0].frame.frame_id, step=step)
        verdict = await driver.evaluate(episode.episode_id)
        return verdict.score, "; ".join(check.evidence for check in verdict.checks)
    finally:
        await driver.close(episode.episode_id)


@pytest.mark.parametrize("task_id", TASK_IDS)
async def test_the_oracle_scores_one_and_doing_nothing_scores_zero(driver: EpisodeDriver, task_id: str) -> None:
    score, evidence = await play(driver, task_id, [(Done(),)])
    assert score == 0.0, evidence
    score, evidence = await play(driver, task_id, CATALOGUE.get(task_id).oracle)
    assert score == 1.0, evidence
