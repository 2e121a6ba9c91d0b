"""An episode service on one pool of stub machines, with setups and checkers controlled by the test. No sockets.

```python
async with running_world() as world:
    episode_id = await world.open(group_size=2)
```
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from cuaenv.actions import Action, Click, Done, Fail
from envd.base.errors import SetupFailed
from envd.base.losses import ENDS_MACHINE
from envd.base.telemetry.metrics import Metrics
from envd.desktop.desktop import Desktop
from envd.desktop.observation import Encoding, ObservationOptions
from envd.episodes.progress import EpisodeState, EpisodeStatus
from envd.episodes.service import EpisodeService
from envd.episodes.types import ForkCommand, OpenedGroup, ResetCommand, StepCommand
from envd.pool.planner import RunShares
from envd.pool.pool import MachinePool
from envd.pool.settings import PoolHost, PoolParameters
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.fields import TaskPerturb
from envd.tasks.model import Task
from envd.tasks.text import CheckResult, ScoreResult
from envd.tasks.verbs import MakeDirectory
from tests.support.clock import ManualClock, run_ready
from tests.support.stubs import IMAGE, StubDesktop, StubHypervisor, StubMachine, StubSnapshot

SETUP = (MakeDirectory(kind="make_directory", path="/home/user/work"),)
#: A task with a setup that is not kept frozen.
TASK = Task(task_id="suite/name", instruction="Do it.", level=1, max_steps=5, infeasible=True, setup=SETUP)
#: A task that starts in the template's state.
PLAIN = Task(task_id="suite/plain", instruction="Do it.", level=1, max_steps=5, infeasible=True)
#: A task that perturbs its own world.
PERTURBED = PLAIN.model_copy(
    update={"task_id": "suite/perturbed", "perturb": TaskPerturb(kinds=("background", "theme", "update"), count=2)}
)
#: Tasks with a setup that is kept frozen.
FROZEN = tuple(
    Task(
        task_id=f"suite/frozen-{number}",
        instruction="Do it.",
        level=1,
        max_steps=5,
        infeasible=True,
        setup=SETUP,
        freeze_setup=True,
    )
    for number in range(3)
)
#: Encoding runs in a thread, which `ManualClock` does not wait for.
NO_PIXELS = ObservationOptions(encoding=Encoding.NONE)
CAPACITY = 3


@dataclass(kw_only=True)
class StubTasks:
    """Setup and checkers controlled by the test."""

    setup_gate: asyncio.Event = field(default_factory=asyncio.Event)
    setup_errors: list[Exception] = field(default_factory=list)
    """Raised by the next setups, one each."""
    lose_in_setup: int = 0
    """Number of next setups that lose their machine."""
    setups: int = 0
    setup_limits_s: list[float] = field(default_factory=list)
    check_gate: asyncio.Event = field(default_factory=asyncio.Event)
    check_error: Exception | None = None
    check_errors: list[Exception | None] = field(default_factory=list)
    """Errors of the next evaluations, one each, before `check_error`."""
    checks: int = 0
    score: float = 1.0
    last_action: Done | Fail | None = None

    async def run_setup(self, task: Task, desktop: Desktop, *, timeout_s: float) -> None:
        """Show the task's start when the gate is open."""
        self.setups += 1
        self.setup_limits_s.append(timeout_s)
        assert isinstance(desktop, StubDesktop)
        await desktop.run(["setup"], timeout_s=timeout_s)
        await self.setup_gate.wait()
        if self.lose_in_setup:
            self.lose_in_setup -= 1
            desktop.machine.lost.set()
            raise SetupFailed("guest stopped responding")
        if self.setup_errors:
            raise self.setup_errors.pop(0)
        desktop.machine.frame_id = f"start of {task.task_id}, setup {self.setups}"

    async def run_checkers(
        self, task: Task, desktop: Desktop, *, last_action: Done | Fail | None, timeout_s: float
    ) -> ScoreResult:
        """Return the score when the gate is open."""
        self.checks += 1
        self.last_action = last_action
        await desktop.run(["check"], timeout_s=timeout_s)
        await self.check_gate.wait()
        error = self.check_errors.pop(0) if self.check_errors else self.check_error
        if error is not None:
            raise error
        return ScoreResult(score=self.score, checks=(CheckResult(name="stub", score=self.score, evidence="seen"),))


class RecordingMetrics(Metrics):
    """Metrics that also record each event in a list."""

    def __init__(self) -> None:
        """Start with empty lists."""
        super().__init__()
        self.ends: list[str] = []
        self.recorded_failures: list[tuple[str, str]] = []
        self.steps: list[Mapping[str, float]] = []
        self.opened: list[Mapping[str, float]] = []

    def episodes_opened(self, *, pool: str, run: str, count: int, timings_ms: Mapping[str, float]) -> None:
        """Record the timings."""
        super().episodes_opened(pool=pool, run=run, count=count, timings_ms=timings_ms)
        self.opened.append(timings_ms)

    def step_done(self, *, pool: str, timings_ms: Mapping[str, float]) -> None:
        """Record the timings."""
        super().step_done(pool=pool, timings_ms=timings_ms)
        self.steps.append(timings_ms)

    def episode_ended(self, *, pool: str, run: str, state: str) -> None:
        """Record the state."""
        super().episode_ended(pool=pool, run=run, state=state)
        self.ends.append(state)

    def episode_failed(self, *, pool: str, operation: str, reason: str) -> None:
        """Record the operation and the reason."""
        super().episode_failed(pool=pool, operation=operation, reason=reason)
        self.recorded_failures.append((operation, reason))


@dataclass(kw_only=True)
class World:
    """A service on one pool, with all stubs behind it."""

    service: EpisodeService
    pool: MachinePool
    hypervisor: StubHypervisor
    clock: ManualClock
    tasks: StubTasks
    metrics: RecordingMetrics
    ids: "itertools.count[int]" = field(default_factory=itertools.count)

    def request_id(self) -> str:
        """Return a new request id."""
        return f"r{next(self.ids)}"

    async def reset(self, **fields: object) -> OpenedGroup:
        """Open episodes, by default of `TASK`."""
        return await self.service.reset(self.reset_command(**fields))

    def reset_command(self, **fields: object) -> ResetCommand:
        """Return a reset command, by default for `TASK`."""
        command = ResetCommand(request_id=self.request_id(), task_id=TASK.task_id, observe=NO_PIXELS)
        return replace(command, **fields)  # type: ignore[arg-type]

    async def open(self, **fields: object) -> str:
        """Open an episode; return its id."""
        return (await self.reset(**fields)).episodes[0].episode_id

    def fork_command(self, episode_id: str, index: int = 0, **fields: object) -> ForkCommand:
        """Return a command to branch an episode."""
        command = ForkCommand(
            request_id=self.request_id(), episode_id=episode_id, step_index=index, observe=NO_PIXELS, timeout_s=60.0
        )
        return replace(command, **fields)  # type: ignore[arg-type]

    async def fork(self, episode_id: str, index: int = 0, **fields: object) -> OpenedGroup:
        """Branch an episode."""
        return await self.service.fork(self.fork_command(episode_id, index, **fields))

    def step_command(self, episode_id: str, index: int, *actions: Action, **fields: object) -> StepCommand:
        """Return a command to perform actions, by default a click."""
        command = StepCommand(
            request_id=self.request_id(), episode_id=episode_id, step_index=index, actions=actions or (Click(),)
        )
        return replace(command, **fields)  # type: ignore[arg-type]

    def desktop(self, episode_id: str) -> StubDesktop:
        """Return an episode's desktop."""
        episode = self.service._registry.get(episode_id)
        assert isinstance(episode.machine.desktop, StubDesktop)
        return episode.machine.desktop

    def machine(self, episode_id: str) -> StubMachine:
        """Return an episode's machine."""
        return self.desktop(episode_id).machine

    def captured(self) -> list[StubSnapshot]:
        """Return all captured states, without the template, oldest first."""
        return self.hypervisor.snapshots[1:]

    def kill(self, episode_id: str) -> None:
        """Lose an episode's machine."""
        self.machine(episode_id).die("QEMU was killed by signal 9")

    def info(self, episode_id: str) -> EpisodeStatus:
        """Return an episode's info."""
        (info,) = (info for info in self.service.list_episodes() if info.episode_id == episode_id)
        return info

    def state(self, episode_id: str) -> tuple[EpisodeState, str]:
        """Return an episode's state and end reason."""
        info = self.info(episode_id)
        return info.progress.state, info.progress.end_reason

    def check_no_leaks(self) -> None:
        """Assert that each machine is idle or leased to an episode, and that no reservation or unused state is left."""
        s = self.pool.statistics()
        live = [
            e
            for e in self.service.list_episodes()
            if e.progress.state is not EpisodeState.FAILED and e.progress.guest_end_cause not in ENDS_MACHINE
        ]
        assert (s.leased_count, s.reserved_count) == (len(live), 0)
        assert len(self.hypervisor.machines) == s.idle_count + s.leased_count
        assert len([state for state in self.captured() if not state.discarded]) == len(self.service._context.states)


@asynccontextmanager
async def running_world(
    *,
    capacity: int = CAPACITY,
    always_running: bool = False,
    task_templates: int = 8,
    shares: RunShares | None = None,
    failing_after: int = 6,
) -> AsyncIterator[World]:
    """Run a service on a pool with `capacity` ready machines; at the end, assert that nothing leaked."""
    clock, hypervisor, tasks, metrics = ManualClock(), StubHypervisor(), StubTasks(), RecordingMetrics()
    tasks.setup_gate.set()
    tasks.check_gate.set()
    settings = PoolParameters(
        name="desktop",
        capacity=capacity,
        size=capacity,
        max_starting=capacity,
        allow_guest_access=True,
        always_running=always_running,
        task_templates=task_templates,
        shares=shares or {},
        failing_after=failing_after,
    )
    pool = MachinePool(
        settings, image=IMAGE, host=PoolHost(hypervisor=hypervisor, clock=clock), make_desktop=hypervisor.desktop
    )
    service = EpisodeService(
        [pool],
        tasks=TaskCatalogue([TASK, PLAIN, PERTURBED, *FROZEN]),
        metrics=metrics,
        run_setup=tasks.run_setup,
        run_checkers=tasks.run_checkers,
        clock=clock,
    )
    await service.start()
    await run_ready()
    await run_ready()
    world = World(service=service, pool=pool, hypervisor=hypervisor, clock=clock, tasks=tasks, metrics=metrics)
    yield world
    await run_ready()
    world.check_no_leaks()
    await service.aclose()
    assert hypervisor.machines == {}, "a closed service leaves no machine"
    assert all(state.discarded for state in hypervisor.snapshots), "a closed service leaves no state"
