"""Killed processes in a Ray cluster of hosts: nothing is left over, and no score is false."""

import asyncio
import random
from typing import TYPE_CHECKING, Self

import pytest

if TYPE_CHECKING:
    from tests.support.ray_hosts import RayHosts

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.filterwarnings("default"), pytest.mark.timeout(2400)]
KILL_COUNT = 25
KINDS = ["daemon", "daemon's helper", "actor", "raylet", "trainer"]


class Trainer:
    """A trainer's process, which is replaced when it ends: Ray ends the drivers of a raylet that it has lost."""

    def __init__(self, hosts: "RayHosts") -> None:
        self._hosts = hosts
        self.scores: list[str] = []
        self.start_count = 0
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        self.kill()
        await self._running

    async def _run(self) -> None:
        while not self._stopping.is_set():
            self._process = await self._hosts.start_trainer(size=4)
            self.start_count += 1
            if self._stopping.is_set():
                self.kill()
            assert self._process.stdout is not None
            async for line in self._process.stdout:
                if line.startswith(b"score "):  # Ray prints, too
                    self.scores.append(line.decode().split()[1])
            await self._process.wait()

    def kill(self) -> None:
        """Kill the present process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def reach(self, count: int) -> None:
        """Wait until there are so many scores."""
        async with asyncio.timeout(600):
            while len(self.scores) < count:
                await asyncio.sleep(0.1)


async def test_25_kills_at_random_moments_leave_nothing_over_and_no_false_score(hosts: "RayHosts") -> None:
    rng = random.Random(1)
    killed = []
    async with Trainer(hosts) as trainer:
        for _ in range(KILL_COUNT):
            await trainer.reach(len(trainer.scores) + 1)
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            kind = rng.choice(KINDS)
            if kind == "trainer":
                trainer.kill()
            elif kind == "raylet":
                name = rng.choice(["host-0", "host-1", "host-2"])
                hosts.kill_raylet(name)
                hosts.add(name)
            else:
                await asyncio.to_thread(hosts.kill_one, kind, rng)
            killed.append(kind)
        await trainer.reach(len(trainer.scores) + 8)
    print(f"killed: { {kind: killed.count(kind) for kind in KINDS} }; {len(trainer.scores)} scores")
    assert set(killed) == set(KINDS)
    assert set(trainer.scores) == {"1.0"}
    await asyncio.to_thread(hosts.wait, lambda: len(hosts.up_names()) == 3)
    # Leases of 10 s, and the pause until the next report.
    await asyncio.to_thread(hosts.wait, lambda: not hosts.leased())
    assert len(hosts.actor_pids()) == 4
    await asyncio.to_thread(hosts.wait, lambda: len(hosts.daemon_pids()) == 3)
