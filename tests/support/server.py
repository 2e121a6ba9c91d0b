"""A complete server in this process: fake machines, a pool, episodes and the gRPC API on a free loopback port.

```python
async with serve_fake(size=4) as server:
    async with AsyncEnvClient(server.address) as client: ...
```
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from envd.api.server import ApiServer
from envd.base.clock import Clock, SystemClock
from envd.base.config import LimitsConfig, SecurityConfig, SettlePolicy
from envd.base.store.store import NullStore, SqliteStore
from envd.base.telemetry.metrics import Metrics
from envd.episodes.persistence.recovery import load_persisted
from envd.episodes.service import EpisodeService
from envd.hypervisor import fake
from envd.hypervisor.fake import FakeHost, FakeHypervisor, Faults, fake_image
from envd.pool.memory import HostMemory
from envd.pool.pool import Pool
from envd.pool.register import unregister_all
from envd.pool.settings import PoolSettings
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Task

#: A drawn desktop reacts before its input call returns, so a short quiet time suffices.
QUICK_SETTLE = SettlePolicy(quiet_ms=20, max_ms=2000)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeServer:
    """A running server and its parts."""

    address: str
    """Address for clients."""
    server: ApiServer
    hypervisor: FakeHypervisor
    pool: Pool
    service: EpisodeService
    metrics: Metrics
    tasks: TaskCatalogue
    store: SqliteStore | None

    @property
    def is_killed(self) -> bool:
        """Whether it was killed: responses after that reach no client."""
        return self.store is not None and self.store._closed

    async def kill(self) -> None:
        """Act as if killed by SIGKILL: nothing more is written or done, and the machines stay on their host.

        Clients are disconnected. Leaving `serve_fake` afterwards does not touch the leftovers.
        """
        if self.store is not None:
            self.store._closed = True  # reject everything from here on
            # The thread closes the connection, so the loop must not use it for pending writes any more.
            self.store._give_to_thread(self.store._pending)
            self.store._pending = []
            self.store._jobs.put(None)
        self.hypervisor.die()
        await self.server.stop()


@cache
def load_fake_tasks() -> TaskCatalogue:
    """Return the suite `fake` of the drawn desktop. Read once per test run."""
    return TaskCatalogue.load([Path(fake.__file__).parent / "suite.yaml"], include_builtin=False)


@asynccontextmanager
async def serve_fake(
    *,
    size: int = 2,
    capacity: int | None = None,
    faults: Faults | None = None,
    limits: LimitsConfig | None = None,
    settle: SettlePolicy = QUICK_SETTLE,
    boot_timeout_s: float = 10.0,
    failing_after: int = 10,
    clock: Clock | None = None,
    extra_tasks: Iterable[Task] = (),
    security: SecurityConfig | None = None,
    host: FakeHost | None = None,
    memory: HostMemory | None = None,
    database: Path | None = None,
    listen: str = "127.0.0.1:0",
) -> AsyncIterator[FakeServer]:
    """Serve until the block ends; then no episode, machine or socket is left.

    Args:
        size: Idle machines to keep.
        capacity: Maximum number of machines; by default twice `size`.
        faults: Faults of the machines; change them later through `FakeServer.hypervisor`.
        limits: Bounds on episodes.
        settle: Default settle policy.
        boot_timeout_s: Maximum time until a machine's desktop has settled.
        failing_after: Consecutive start failures after which resets are rejected.
        clock: Clock of the leases; by default the host's.
        extra_tasks: Tasks in addition to the suite `fake`.
        security: Access rules; by default none.
        host: Host with machines of an earlier server, to be adopted or reaped.
        memory: Host memory; by default unlimited.
        database: File of the episode database; None for no database.
        listen: Address to serve on.
    """
    tasks = TaskCatalogue([*load_fake_tasks().list(), *extra_tasks])
    async with AsyncExitStack() as stack:
        store = None if database is None else SqliteStore(database)
        if store is not None:
            stack.push_async_callback(store.aclose)
        hypervisor = FakeHypervisor(faults=faults, host=host)
        stack.push_async_callback(hypervisor.close)
        clock = clock or SystemClock()
        persisted = await load_persisted(store or NullStore(), clock=clock, pools=["fake"], tasks=tasks)
        machines = await hypervisor.adopt(persisted.machine_ids)
        reaped = await hypervisor.reap()
        await unregister_all(store or NullStore(), adopted=machines, reaped=reaped)
        settings = PoolSettings(
            name="fake",
            capacity=capacity or 2 * size,
            size=size,
            max_starting=size,
            boot_timeout_s=boot_timeout_s,
            backoff_min_s=0.05,
            # The backoff starts shorter than by default, but still adds up to about 30 s.
            failing_after=failing_after,
            allow_guest_access=True,
            settle=settle,
        )
        pool = Pool(settings, hypervisor=hypervisor, image=fake_image(), memory=memory, store=store)
        metrics = Metrics()
        service = EpisodeService(
            [pool],
            tasks=tasks,
            limits=limits,
            clock=clock,
            store=store,
        )
        stack.push_async_callback(service.aclose)
        server = ApiServer(service, listen=listen, metrics=metrics, security=security)
        stack.push_async_callback(server.stop)
        await service.restore(persisted, machines)
        await service.start()
        yield FakeServer(
            address=await server.start(),
            server=server,
            store=store,
            hypervisor=hypervisor,
            pool=pool,
            service=service,
            metrics=metrics,
            tasks=tasks,
        )
