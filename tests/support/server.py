"""A complete server in this process: fake machines, a pool, episodes and the gRPC API on a free loopback port.

```python
async with serve_fake(size=4) as server:
    async with AsyncEnvClient(server.address) as client: ...
```
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from cuaenv.client import AsyncEnvClient
from envd import drawn
from envd.api.server import ApiServer, read_token_table
from envd.base.clock import Clock
from envd.base.config import LimitsConfig, SecurityConfig, SettlePolicy
from envd.base.store.store import SqliteStore, Store
from envd.base.telemetry.metrics import Metrics
from envd.desktop.desktop import Desktop
from envd.desktop.session import GuestPauses
from envd.drawn import fake_image
from envd.episodes.checkpoints.store import CheckpointStore
from envd.episodes.recovery import load_persisted
from envd.episodes.service import EpisodeService
from envd.pool.machines import unregister_all
from envd.pool.pool import MachinePool
from envd.pool.room import HostRoom
from envd.pool.settings import PoolHost, PoolParameters
from envd.tasks.bridge import TaskBridge
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.evaluate import evaluate
from envd.tasks.model import Task
from envd.tasks.user_model import UserModel
from tests.support.faulty import FakeHost, Faults, FaultyHypervisor

#: A drawn desktop reacts before its input call returns, so a short quiet time suffices.
QUICK_SETTLE = SettlePolicy(quiet_ms=20, max_ms=2000)
#: For the same reason, shorter waits at the boot of a pool (0.1 instead of 0.7 s) and between a click and typing.
QUICK_PAUSES = GuestPauses(first_poll_s=0.01, boot_quiet_ms=20, input_settle=QUICK_SETTLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeServer:
    """A running server and its parts."""

    address: str
    """Address for clients."""
    server: ApiServer
    hypervisor: FaultyHypervisor
    pool: MachinePool
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
    return TaskCatalogue.load([Path(drawn.__file__).parent / "suite.yaml"], include_builtin=False)


def with_user() -> Task:
    """Return the task `fake/with-user`: its user knows the room and the date, and answers two questions."""
    blank = load_fake_tasks().get("fake/save-note").model_dump(exclude_unset=True, exclude={"oracle"})
    user = {"facts": [{"about": word, "answer": f"The {word}."} for word in ("room", "date")], "max_questions": 2}
    return Task.model_validate({**blank, "task_id": "fake/with-user", "tools": ("ask_user",), "user": user})


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """How a `FakeServer` differs from the usual one."""

    size: int = 2
    """Idle machines to keep."""
    capacity: int | None = None
    """Maximum number of machines; by default twice `size`."""
    resident: int | None = None
    """Maximum number of machines in memory; by default the capacity."""
    parked: CheckpointStore | None = None
    """Where the states of parked episodes are stored; None to park none."""
    faults: Faults | None = None
    """Faults of the machines; change them later through `FakeServer.hypervisor`."""
    limits: LimitsConfig | None = None
    settle: SettlePolicy = QUICK_SETTLE
    boot_timeout_s: float = 10.0
    failing_after: int = 10
    """Consecutive start failures after which resets are rejected. The backoff adds up to about 30 s by default."""
    clock: Clock | None = None
    """Clock of the leases; by default the host's."""
    extra_tasks: Iterable[Task] = ()
    """Tasks in addition to the suite `fake`."""
    security: SecurityConfig | None = None
    """Access rules; by default none."""
    host: FakeHost | None = None
    """Host with machines of an earlier server, to be adopted or reaped."""
    room: HostRoom = field(default_factory=HostRoom)
    """Memory and disk of the host; by default unbounded."""
    database: Path | None = None
    """File of the episode database; None for no database."""
    checkpoints: CheckpointStore | None = None
    """Where checkpoints are stored; None for nowhere."""
    user_model: UserModel | None = None
    """Plays the users of tasks with a persona."""
    bridge: TaskBridge | None = None
    """Runs the evaluators of a foreign suite."""
    listen: str = "127.0.0.1:0"
    local_socket: Path | None = None
    """See `ApiServer`."""

    def pool_settings(self) -> PoolParameters:
        """Return the settings of the only pool."""
        return PoolParameters(
            name="fake",
            capacity=self.capacity or 2 * self.size,
            resident=self.resident or self.capacity or 2 * self.size,
            size=self.size,
            max_starting=max(1, self.size),
            boot_timeout_s=self.boot_timeout_s,
            backoff_min_s=0.05,
            failing_after=self.failing_after,
            allow_guest_access=True,
            settle=self.settle,
        )


@asynccontextmanager
async def serve_fake(**options: Any) -> AsyncIterator[FakeServer]:
    """Serve until the block ends, with `FakeOptions`; then no episode, machine or socket is left."""
    chosen = FakeOptions(**options)
    tasks = TaskCatalogue([*load_fake_tasks().list(), *chosen.extra_tasks])
    async with AsyncExitStack() as stack:
        store = None if chosen.database is None else SqliteStore(chosen.database)
        if store is not None:
            stack.push_async_callback(store.aclose)
        hypervisor = FaultyHypervisor(faults=chosen.faults, host=chosen.host)
        stack.push_async_callback(hypervisor.close)
        clock = chosen.clock or Clock()
        persisted = await load_persisted(store or Store(), clock=clock, pools=["fake"], tasks=tasks)
        machines = await hypervisor.adopt(persisted.machine_ids)
        reaped = await hypervisor.reap()
        await unregister_all(store or Store(), adopted=machines, reaped=reaped)
        settings = chosen.pool_settings()
        pool_host = PoolHost(hypervisor=hypervisor, room=chosen.room, store=store or Store())
        pool = MachinePool(
            settings, image=fake_image(), host=pool_host, make_desktop=partial(Desktop, pauses=QUICK_PAUSES)
        )
        metrics = Metrics()
        security = chosen.security or SecurityConfig()
        if chosen.checkpoints is not None and (tokens := read_token_table(security, metrics)) is not None:
            chosen.checkpoints.owners = lambda: tokens.get().owners
        service = EpisodeService(
            [pool],
            tasks=tasks,
            limits=chosen.limits,
            metrics=metrics,
            clock=clock,
            store=store,
            checkpoints=chosen.checkpoints,
            parked=chosen.parked,
            user_model=chosen.user_model,
            run_checkers=partial(evaluate, bridge=chosen.bridge),
        )
        stack.push_async_callback(service.aclose)
        server = ApiServer(
            service, listen=chosen.listen, metrics=metrics, security=chosen.security, local_socket=chosen.local_socket
        )
        stack.push_async_callback(server.stop)
        await service.recover(persisted, machines)
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


@asynccontextmanager
async def served_client(**options: Any) -> AsyncIterator[tuple[FakeServer, AsyncEnvClient]]:
    """Serve with `FakeOptions`; yield the server and a client of it."""
    async with serve_fake(**options) as server, AsyncEnvClient(server.address) as client:
        yield server, client
