"""A benchmark's own daemon with one pool, and a client of it; both end on a signal."""

import asyncio
import os
import platform
import re
import secrets
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cuaenv.client import AsyncEnvClient, AsyncEpisode, EnvError, View
from envd.base.config import Config
from envd.base.errors import GuestUnresponsive
from envd.base.version import envd_version
from envd.bench.report import BenchFailed
from envd.daemon.composition import Daemon, open_daemon
from envd.daemon.ephemeral import ephemeral_config
from envd.hypervisor.machine import Snapshot
from envd.hypervisor.qemu.processes import machine_pids, written_guest_bytes
from envd.pool.leased import LeasedMachine
from envd.pool.pool import Pool
from envd.pool.room import host_memory_mib
from envd.tasks.model import Task
from envd.tasks.setup import run_setup

_SETUP_TIMEOUT_S = 300.0
_PNG = b"\x89PNG\r\n\x1a\n"


@contextmanager
def maps_call_errors() -> Iterator[None]:
    """Raise the client's errors as `BenchFailed`, with the status code."""
    try:
        yield
    except EnvError as error:
        raise BenchFailed(f"{error.code}: {error}") from error


class Steps:
    """Reports the progress of a benchmark by the number of finished steps."""

    def __init__(self, report: Callable[[str, float], None], count: int) -> None:
        self._report = report
        self._count = count
        self._done_count = 0

    def begin(self, stage: str) -> None:
        self._report(stage, min(1.0, self._done_count / self._count))

    def done(self, stage: str) -> None:
        self._done_count += 1
        self.begin(stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSession:
    """A daemon with one pool, and a client of it."""

    daemon: Daemon
    client: AsyncEnvClient
    pool: Pool

    @property
    def runs_guests(self) -> bool:
        """Whether guests run, in processes that can be measured."""
        return self.daemon.hypervisor.capabilities.runs_guests

    @property
    def state_dir(self) -> Path:
        return self.daemon.config.state_dir

    @property
    def template(self) -> Snapshot:
        """The snapshot that the pool's machines are forked from. Raises: BenchFailed: there is none yet."""
        if self.pool.template is None:
            raise BenchFailed(f"pool {self.pool.name}: it has no template")
        return self.pool.template.snapshot

    def written_bytes(self) -> int | None:
        """Return the guest memory that the only machine in use has written; None without processes."""
        # The others are standby machines, so it is the one that has written most.
        pids = machine_pids(self.state_dir) if self.runs_guests else {}
        return max(map(written_guest_bytes, pids.values()), default=None)

    async def refilled(self, *, leased_count: int = 0, shortage_patience_s: float = 60.0) -> None:
        """Wait until all standby machines of the pool are ready and it has no others than `leased_count` leased ones.

        Raises:
            GuestUnresponsive: They are not ready in time, or the host stays too short of memory or disk for them.
        """
        loop_time = asyncio.get_running_loop().time
        begin_s = loop_time()
        # Without a stored template, one is booted first.
        end_s = begin_s + 60 + 2 * self.pool.settings.boot_timeout_s
        short_end_s = None
        try:
            async with asyncio.timeout_at(end_s) as limit:
                while True:
                    changed = self.pool.changes.next
                    now = self.pool.statistics()
                    others = now.starting_count + now.dying_count + now.leased_count - leased_count
                    if now.idle_count == self.pool.settings.size and not others:
                        return
                    # A healthy pool with a problem has no room on its host. Machines that others destroy make room.
                    is_short = now.healthy and bool(now.problem)
                    short_end_s = (short_end_s or loop_time() + shortage_patience_s) if is_short else None
                    limit.reschedule(min(end_s, short_end_s or end_s))
                    await changed.wait()
        except TimeoutError as error:
            waited_s = loop_time() - begin_s
            raise GuestUnresponsive(
                f"pool {self.pool.name}: not ready after {waited_s:.0f} s: {self.pool.statistics()}"
            ) from error

    @asynccontextmanager
    async def reset(self, task_id: str, *, max_steps: int = 0) -> AsyncIterator[AsyncEpisode]:
        """Open one episode; see `reset_group`."""
        async with self.reset_group(task_id, size=1, max_steps=max_steps) as [episode]:
            yield episode

    @asynccontextmanager
    async def reset_group(
        self, task_id: str, *, size: int, max_steps: int = 0
    ) -> AsyncIterator[Sequence[AsyncEpisode]]:
        """Open a group of episodes and close them after the block. Their frames are complete PNG images."""
        opening = self.client.reset_group(
            task_id, size=size, pool=self.pool.name, max_steps=max_steps, view=View(encoding="png")
        )
        async with opening as episodes:
            if len(episodes) != size or not all(each.observation.data.startswith(_PNG) for each in episodes):
                raise BenchFailed(f"task {task_id}: Reset did not return {size} first frames as PNG")
            yield episodes

    @asynccontextmanager
    async def set_up_machine(self, task: Task) -> AsyncIterator[LeasedMachine]:
        """Lease a machine directly from the pool, run it throughout the block, and perform a task's setup on it."""
        admission = await self.pool.acquire(timeout_s=_SETUP_TIMEOUT_S)
        [leased] = admission.machines
        try:
            async with leased.running():
                await run_setup(task, leased.desktop, timeout_s=_SETUP_TIMEOUT_S)
                yield leased
        finally:
            await self.pool.release([leased])

    def conditions(self, **more: object) -> dict[str, object]:
        """Return a description of the host, the machines and, with `more`, the run."""
        spec = self.template.spec
        return {
            "host_core_count": os.cpu_count(),
            "usable_core_count": len(os.sched_getaffinity(0)),
            "host_memory_mib": host_memory_mib(),
            "host_load_average": round(os.getloadavg()[0], 2),
            "kernel": platform.release(),
            "envd": envd_version(),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "accelerator": self.daemon.hypervisor.accelerator.value,
            # Without the driver's root directory: it differs between hosts and does not matter.
            "hypervisor": re.sub(r"\?root=[^,\s]+", "", self.daemon.hypervisor.description),
            "image": spec.image.name,
            "guest_memory_mib": spec.memory_mib,
            "guest_vcpu_count": spec.vcpu_count,
            "screen_px": f"{spec.screen_width_px}x{spec.screen_height_px}",
            **more,
        }


def bench_config(settings: Config, *, standby_count: int, capacity: int, image: str = "", **pool: object) -> Config:
    """Return the settings of a benchmark's own daemon: one pool, with settings `pool`, and an own state directory."""
    own = {"size": standby_count, "capacity": capacity, "allow_guest_access": True, "always_running": False, **pool}
    return ephemeral_config(settings, name="bench", pool=own, image=image)


@asynccontextmanager
async def open_bench(config: Config, *, steps: Steps) -> AsyncIterator[BenchSession]:
    """Start a daemon and a client, and wait until all standby machines are ready. After the block nothing is left."""
    steps.begin("starting")
    # The daemon asks for no token; one from the environment belongs to another daemon.
    async with open_daemon(config) as daemon, AsyncEnvClient(daemon.address, token="") as client:
        bench = BenchSession(daemon=daemon, client=client, pool=daemon.pools[0])
        reporting = asyncio.create_task(_report_pool(bench, steps), name="bench:pool")
        try:
            await bench.refilled()
        finally:
            reporting.cancel()
            await asyncio.wait({reporting})
        with maps_call_errors():
            yield bench
        steps.begin("destroying machines")


async def _report_pool(bench: BenchSession, steps: Steps) -> None:
    while True:
        changed = bench.pool.changes.next
        steps.begin(textwrap.shorten(str(bench.pool.statistics()), 200))
        await changed.wait()


def new_machine_id() -> str:
    return f"bench-{secrets.token_hex(4)}"
