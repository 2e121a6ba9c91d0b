"""The real episode service on stub machines, for API and client tests: records calls and injects failures.

```python
async with StubEpisodes() as episodes:
    server = ApiServer(episodes, listen="127.0.0.1:0", metrics=Metrics())
```
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from cuaenv.actions import Action
from envd.api.server import ApiServer
from envd.base.aio import Changes
from envd.base.telemetry.metrics import Metrics
from envd.desktop.display.encoder import FrameEncoder
from envd.desktop.display.frames import Frame, Mark
from envd.desktop.display_connection import DesktopView
from envd.desktop.observation import A11yFormat, EncodedFrame, Observation, ObservationOptions
from envd.episodes.service import EpisodeService
from envd.episodes.types import ForkCommand, ResetCommand, StepCommand
from envd.hypervisor.machine import Machine
from envd.pool.pool import MachinePool
from envd.pool.queue import QueueEntry
from envd.pool.settings import PoolHost, PoolParameters
from envd.pool.status import PoolStatus
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Task
from tests.support.episode_world import SETUP, StubTasks
from tests.support.stubs import IMAGE, StubDesktop, StubHypervisor

_CAPACITY = 64
#: Calls that a stub records.
_RECORDED = (
    "reset",
    "fork",
    "step",
    "observe",
    "evaluate",
    "close",
    "close_opening",
    "keep_alive",
    "read_file",
    "write_file",
    "run_command",
)


TASKS = TaskCatalogue(
    Task(task_id=task_id, instruction=f"Do {task_id}.", level=1, max_steps=15, infeasible=True, setup=SETUP)
    for task_id in ("desktop/note", "desktop/menu", "other/note")
)


def pool_info(capacity: int, *, name: str = "fake", idle: int = 0, leased: int = 0, **more: Any) -> PoolStatus:
    """Return the status of a pool, for `StubEpisodes.report_pools`; by default a healthy one."""
    usual: dict[str, Any] = {
        "image": "desktop",
        "os": "linux",
        "accelerator": "fake",
        "resident": capacity,
        "starting_count": 0,
        "dying_count": 0,
        "waiting_count": 0,
        "memory_bytes": 0,
        "healthy": True,
        "problem": "",
    }
    return PoolStatus(name=name, capacity=capacity, idle_count=idle, leased_count=leased, **(usual | more))


class _BlackDesktop(StubDesktop):
    """A stub desktop with pixels, an accessibility tree and terminal text."""

    async def frame(self, *, refresh: bool = False) -> Frame:
        """Return a black frame."""
        return (await self.view()).frame

    @property
    def changed(self) -> asyncio.Event:
        """Never set: the screen stays black."""
        return asyncio.Event()

    async def encode(self, frame: Frame, options: ObservationOptions, *, marks: tuple[Mark, ...] = ()) -> EncodedFrame:
        """Encode a frame."""
        return await FrameEncoder().encode(frame, options, marks=marks)

    async def observe(
        self, options: ObservationOptions, *, refresh: bool = False, since: Frame | None = None
    ) -> Observation:
        """Return the black frame, with a tree and terminal text if requested."""
        await self._enter("observe")
        return Observation(
            frame=await self.encode(await self.frame(), options),
            a11y_tree="<tree/>" if options.a11y_format is not A11yFormat.NONE else None,
            terminal="$ " if options.include_terminal else None,
        )


class StubEpisodes(EpisodeService):
    """An `EpisodeService` that records its calls and can be controlled through its attributes."""

    def __init__(self, *, tasks: TaskCatalogue = TASKS) -> None:
        self.failures: list[Exception] = []
        """Raised by the next calls, one each, before any effect."""
        self.calls: list[str] = []
        """Names of the calls, in order, retries and failures included."""
        self.resets: list[ResetCommand] = []
        self.forks: list[ForkCommand] = []
        self.steps: list[StepCommand] = []
        """Every command received, retries included."""
        self.actions: list[Action] = []
        """Actions performed on any desktop, in order."""
        self.renewals: list[Sequence[str]] = []
        """Episode ids of each `keep_alive`."""
        self.closed: list[str] = []
        """Ids of closed episodes, in order."""
        self.pools: list[PoolStatus] = []
        """Reported in place of the real pool; see `report_pools`."""
        self.gate = asyncio.Event()
        """Cleared, it blocks steps and forks after they started."""
        self.called = Changes()
        """Notified after each call."""
        self.gate.set()
        self._hypervisor, stub_tasks = StubHypervisor(), StubTasks()
        self.reset_gate = stub_tasks.setup_gate
        """Cleared, it blocks resets after they started."""
        self.reset_gate.set()
        stub_tasks.check_gate.set()
        self._hypervisor.gates["capture"] = self.gate
        settings = PoolParameters(name="fake", capacity=_CAPACITY, size=0, max_starting=8, allow_guest_access=True)
        pool = MachinePool(
            settings, image=IMAGE, host=PoolHost(hypervisor=self._hypervisor), make_desktop=self._connect
        )
        super().__init__(
            [pool],
            tasks=tasks,
            run_setup=stub_tasks.run_setup,
            run_checkers=stub_tasks.run_checkers,
            make_id=map(str, itertools.count(1)).__next__,
        )
        for name in _RECORDED:
            setattr(self, name, self._recorded(name, getattr(self, name)))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reset_gate.set()
        self.gate.set()
        await self.aclose()

    def _connect(self, machine: Machine, /, *, view: DesktopView | None = None) -> StubDesktop:
        desktop = _BlackDesktop(self._hypervisor.own(machine), self._hypervisor.ready_gate, view=view)
        desktop.gates["act"] = self.gate
        desktop.actions = self.actions
        return desktop

    async def wait_for_call(self, name: str, *, count: int = 1) -> None:
        """Return once `name` has been called `count` times."""
        while self.calls.count(name) < count:
            await self.called.next.wait()

    def report_pools(self, *pools: PoolStatus) -> None:
        """Change the reported pools and notify watchers."""
        self.pools = list(pools)
        self._pool_changes.notify()

    def _enter(self, name: str) -> None:
        self.calls.append(name)
        self.called.notify()
        if self.failures:
            raise self.failures.pop(0)

    def _recorded(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return a call that is recorded, with its first argument, and may fail before any effect."""
        logs: dict[str, list[Any]] = {
            "reset": self.resets,
            "fork": self.forks,
            "step": self.steps,
            "keep_alive": self.renewals,
        }
        log = logs.get(name, [])

        async def recorded(*args: Any, **kwargs: Any) -> Any:
            log.append(args[0])
            self._enter(name)
            result = await call(*args, **kwargs)
            if name == "close":
                self.closed.append(args[0])
            return result

        return recorded

    def list_queues(self) -> dict[str, tuple[QueueEntry, ...]]:
        """Return an empty queue for each of `pools`."""
        return {pool.name: () for pool in self.pools}

    def list_pools(self) -> list[PoolStatus]:
        """Return `pools`."""
        return list(self.pools)


@dataclass(frozen=True, slots=True)
class StubHost:
    """A served `StubEpisodes`."""

    episodes: StubEpisodes
    server: ApiServer
    address: str


@asynccontextmanager
async def stub_hosts(*capacities: int) -> AsyncIterator[list[StubHost]]:
    """Serve hosts with one pool each, of these capacities."""
    async with AsyncExitStack() as stack:
        hosts = []
        for capacity in capacities:
            episodes = await stack.enter_async_context(StubEpisodes())
            episodes.report_pools(pool_info(capacity))
            server = ApiServer(episodes, listen="127.0.0.1:0", metrics=Metrics())
            stack.push_async_callback(server.stop)
            hosts.append(StubHost(episodes, server, await server.start()))
        yield hosts
