"""Pools of stub machines on a clock that the test controls, without sockets.

```python
async with PoolWorld() as world:
    pool = await world.started(capacity=3)
```
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from envd.base.telemetry.metrics import Metrics
from envd.pool.pool import MachinePool
from envd.pool.room import HostRoom
from envd.pool.settings import PoolHost, PoolParameters
from envd.pool.template import TemplateCache
from tests.support.clock import ManualClock, run_ready
from tests.support.stubs import IMAGE, StubHypervisor


class RecordingMetrics(Metrics):
    """Metrics that also record admitted and refused groups in lists."""

    def __init__(self) -> None:
        """Start with empty lists."""
        super().__init__()
        self.admitted_runs: list[tuple[str, int, float]] = []
        self.refused_runs: list[tuple[str, str]] = []

    def group_admitted(self, *, pool: str, run: str, machine_count: int, wait_s: float) -> None:
        """Record the group."""
        super().group_admitted(pool=pool, run=run, machine_count=machine_count, wait_s=wait_s)
        self.admitted_runs.append((run, machine_count, wait_s))

    def group_refused(self, *, pool: str, run: str, reason: str) -> None:
        """Record the reason."""
        super().group_refused(pool=pool, run=run, reason=reason)
        self.refused_runs.append((run, reason))


class PoolWorld:
    """Pools that share a hypervisor, templates, metrics and a clock. Leaving it closes them: no machine is left."""

    def __init__(self, defaults: Mapping[str, object] | None = None) -> None:
        """Start without pools.

        Args:
            defaults: Settings of each pool in addition to a capacity of 2.
        """
        self.hypervisor = StubHypervisor()
        self.clock = ManualClock()
        self.metrics = RecordingMetrics()
        self.templates = TemplateCache()
        self._defaults = {"name": "desktop", "capacity": 2, **(defaults or {})}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        assert self.hypervisor.machines == {}, "a closed pool leaves nothing"
        assert all(snapshot.discarded for snapshot in self.hypervisor.snapshots), "closed pools discard their templates"

    def make(self, name: str | None = None, *, room: HostRoom | None = None, **settings: Any) -> MachinePool:
        """Return a new pool with these settings; by default it keeps its whole capacity ready."""
        values: dict[str, Any] = self._defaults | settings | ({} if name is None else {"name": name})
        values = {"size": values["capacity"], "max_starting": values["capacity"]} | values
        pool = MachinePool(
            PoolParameters(**values),
            image=IMAGE,
            host=PoolHost(
                hypervisor=self.hypervisor,
                templates=self.templates,
                room=room or HostRoom(),
                metrics=self.metrics,
                clock=self.clock,
            ),
            make_desktop=self.hypervisor.desktop,
        )
        self._stack.push_async_callback(pool.close)
        return pool

    async def started(self, name: str | None = None, **more: Any) -> MachinePool:
        """Return a new pool that has started its machines."""
        return await start(self.make(name, **more))


async def start(*pools: MachinePool) -> MachinePool:
    """Start pools and wait for their machines; return the last one."""
    for pool in pools:
        await pool.start()
    for _ in range(3):
        await run_ready()
    return pools[-1]
