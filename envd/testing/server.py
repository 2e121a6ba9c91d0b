"""A whole server in this process: fake machines, a pool, episodes and the gRPC API on a free loopback port.

```python
async with serve_fake(size=4) as server:
    async with AsyncEnvClient(server.address) as client: ...
```
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from envd.api.server import ApiServer
from envd.config import SecurityConfig
from envd.episodes.limits import EpisodeLimits
from envd.episodes.service import EpisodeService
from envd.guest.observation import SettlePolicy
from envd.hypervisor.fake import FakeHypervisor, Faults, fake_image
from envd.pool.clock import Clock
from envd.pool.pool import Pool
from envd.pool.settings import PoolSettings
from envd.tasks.catalogue import TaskCatalogue
from envd.tasks.model import Task
from envd.telemetry.metrics import Metrics

#: A drawn desktop has drawn before its input returns, so it is settled as soon as a frame could have been missed.
QUICK_SETTLE = SettlePolicy(quiet_ms=20, max_ms=2000)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeServer:
    """A running server and what it is made of."""

    address: str
    """Where clients dial."""
    hypervisor: FakeHypervisor
    pool: Pool
    service: EpisodeService
    metrics: Metrics
    tasks: TaskCatalogue


def load_fake_tasks() -> TaskCatalogue:
    """Return the tasks of the drawn desktop, suite `fake`."""
    return TaskCatalogue.load([Path(__file__).parent / "suites"], include_builtin=False)


@asynccontextmanager
async def serve_fake(
    *,
    size: int = 2,
    capacity: int | None = None,
    faults: Faults | None = None,
    limits: EpisodeLimits | None = None,
    settle: SettlePolicy = QUICK_SETTLE,
    boot_timeout_s: float = 10.0,
    failing_after: int = 10,
    clock: Clock | None = None,
    extra_tasks: Iterable[Task] = (),
    security: SecurityConfig | None = None,
) -> AsyncIterator[FakeServer]:
    """Serve until the block ends; then every episode, machine and socket is gone.

    Args:
        size: Machines kept ready.
        capacity: Most machines at once; by default `size` in use and `size` ready.
        faults: What goes wrong with the machines; `FakeServer.hypervisor` lets a test change it later.
        limits: Bounds on episodes.
        settle: When a screen counts as settled, unless a request says otherwise.
        boot_timeout_s: Longest time until a machine's desktop has settled.
        failing_after: Failures to start in a row after which resets are refused.
        clock: What leases are timed by; by default the host's.
        extra_tasks: Tasks beside the suite `fake`.
        security: Who may call; by default whoever can.
    """
    tasks = TaskCatalogue([*load_fake_tasks().list(), *extra_tasks])
    async with AsyncExitStack() as stack:
        hypervisor = FakeHypervisor(faults=faults)
        stack.push_async_callback(hypervisor.close)
        settings = PoolSettings(
            name="fake",
            capacity=capacity or 2 * size,
            idle_target=size,
            max_starting=size,
            boot_timeout_s=boot_timeout_s,
            backoff_min_s=0.05,
            # Pauses begin shorter here than elsewhere, and add up to half a minute all the same.
            failing_after=failing_after,
            allow_guest_access=True,
            settle=settle,
        )
        pool = Pool(settings, hypervisor=hypervisor, image=fake_image())
        metrics = Metrics()
        service = EpisodeService([pool], tasks=tasks, limits=limits, clock=clock)
        stack.push_async_callback(service.aclose)
        server = ApiServer(service, listen="127.0.0.1:0", metrics=metrics, security=security)
        stack.push_async_callback(server.stop)
        await service.start()
        yield FakeServer(
            address=await server.start(),
            hypervisor=hypervisor,
            pool=pool,
            service=service,
            metrics=metrics,
            tasks=tasks,
        )
