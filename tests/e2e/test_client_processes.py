"""Rollouts over several daemon processes: one is killed, one is stopped, and many rollouts run at once."""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from cuaenv import client as wire
from cuaenv.client import AsyncEnvClient, Done, EnvError, HostState, RetryPolicy
from tests.support.clock import until
from tests.support.served import ServedDaemon

TASK = "fake/count-to-five"
COUNT = wire.Click(x=819, y=100)
CONFIG = """\
[hypervisor]
uri = "fake"

[pools.desktop]
size = {size}
capacity = {size}

[limits]
drain_timeout_s = 300
"""
QUICK = RetryPolicy(reconnect_timeout=timedelta(seconds=1), patience=timedelta(seconds=10))


class Daemons:
    """Daemon processes by name."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.running: dict[str, ServedDaemon] = {}

    def start(self, *names: str, size: int) -> list[str]:
        """Start or restart daemons; return their addresses once their machines are ready."""
        for name in names:
            # A restarted daemon has the same address, and no other process can have taken it.
            listen = f"unix:{self._root}/{name}.sock"
            self.running[name] = ServedDaemon(self._root / name, CONFIG.format(size=size), listen=listen)
        addresses = [self.running[name].wait_for(r"listening on (\S+)") for name in names]
        for name in names:
            self.running[name].wait_for(r"pool desktop: (ready)")
        return addresses

    def end(self, name: str, number: int = signal.SIGTERM) -> int:
        return self.running.pop(name).end(number)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    daemons = Daemons(tmp_path)
    yield daemons
    for name in list(daemons.running):
        daemons.end(name, signal.SIGKILL)


class Rollouts:
    """Rollouts that pause in the middle of their episodes until `go` is set."""

    def __init__(self, client: AsyncEnvClient) -> None:
        self.client = client
        self.go = asyncio.Event()
        self.paused: Counter[str] = Counter()
        self.lost: list[EnvError] = []
        self.dead_target = ""
        """Host on which steps are retried only for a short time."""

    async def play(self) -> str:
        """Play an episode to its end, on a new machine if one is lost; return its host."""
        while True:
            try:
                async with self.client.reset(TASK) as episode:
                    for step in range(5):
                        is_dead = episode.host.target == self.dead_target
                        await episode.step(COUNT, timeout=timedelta(seconds=2 if is_dead else 120))
                        if step == 2:
                            self.paused[episode.host.target] += 1
                            await self.go.wait()
                    await episode.step(Done())
                    assert (await episode.evaluate()).score == 1.0
                    return episode.host.target
            except EnvError as error:
                self.lost.append(error)


async def test_rollouts_survive_killed_and_stopped_daemons_and_use_them_again_after_a_restart(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuaenv.client.leases._CLOSE_TIMEOUT", timedelta(seconds=1))  # for a host that is gone
    killed, stopping, staying = daemons.start("killed", "stopping", "staying", size=4)
    async with AsyncEnvClient([killed, stopping, staying], retry=QUICK) as client:
        rollouts = Rollouts(client)
        playing = [asyncio.create_task(rollouts.play()) for _ in range(16)]
        await until(lambda: rollouts.paused == dict.fromkeys((killed, stopping, staying), 4))
        daemons.running["stopping"].send(signal.SIGTERM)
        await asyncio.to_thread(daemons.running["stopping"].wait_for, "(draining)")
        daemons.end("killed", signal.SIGKILL)
        rollouts.dead_target = killed
        rollouts.go.set()
        homes = Counter(await asyncio.gather(*playing))
        assert homes.total() == 16
        assert homes[stopping] == 4, "a stopping daemon lets its episodes end and opens no more"
        assert homes[killed] == 0
        assert {error.host for error in rollouts.lost} == {killed}
        assert len(rollouts.lost) == 4
        await until(lambda: client.statistics().hosts[0].state is HostState.DOWN)

        assert daemons.start("killed", size=4) == [killed]
        await until(lambda: client.statistics().hosts[0].state is HostState.UP)
        rollouts.lost.clear()
        rollouts.dead_target = ""
        again = Counter(await asyncio.gather(*(rollouts.play() for _ in range(6))))
        assert set(again) == {killed, staying}
        assert rollouts.lost == []
    assert daemons.end("staying") == 0


@pytest.mark.long
async def test_sixty_four_concurrent_rollouts_fill_two_daemons(
    daemons: Daemons, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Measure and report the lag of the client's event loop; the host decides the values."""
    targets = daemons.start("a", "b", size=32)
    lags_ms: list[float] = []

    async def watch_lag() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + 0.005
            await asyncio.sleep(0.005)
            lags_ms.append((loop.time() - due_s) * 1000)

    all_open = asyncio.Barrier(64)

    async def rollout(client: AsyncEnvClient) -> str:
        async with client.reset(TASK) as episode:
            await all_open.wait()
            for _ in range(5):
                await episode.step(COUNT)
            return episode.host.target

    async with AsyncEnvClient(targets) as client:
        watching = asyncio.create_task(watch_lag())
        homes = Counter(await asyncio.gather(*(rollout(client) for _ in range(64))))
        watching.cancel()
    lags_ms.sort()
    p50_ms, p99_ms = (lags_ms[int(len(lags_ms) * part)] for part in (0.5, 0.99))
    summary = f"p50 {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms, max {lags_ms[-1]:.1f} ms of {len(lags_ms)} turns"
    record_testsuite_property("event_loop_lag", summary)
    print(f"event-loop lag with 64 episodes: {summary}")
    assert homes == dict.fromkeys(targets, 32)
