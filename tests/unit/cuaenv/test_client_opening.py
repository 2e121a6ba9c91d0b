"""Resets continue under one request id, and are closed if their caller is gone. The daemon is a list of outcomes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from cuaenv.client import ClientClosed, EnvError, EpisodeNotFound, NotFound, PoolExhausted, RetryPolicy, Unavailable
from cuaenv.client import opening as module
from cuaenv.client.connection import DaemonConnection
from cuaenv.client.credentials import Access
from cuaenv.client.opening import Opener, log_waits, wait_reason
from cuaenv.client.targets import Address
from cuaenv.v1 import env_pb2
from tests.support.clock import until

PATIENCE_S = 0.05
QUICK = RetryPolicy(
    attempt_timeout=timedelta(seconds=5),
    first_pause=timedelta(milliseconds=1),
    max_pause=timedelta(milliseconds=2),
    reconnect_timeout=timedelta(seconds=PATIENCE_S),
)
REQUEST = env_pb2.ResetRequest(request_id="r1")
RESPONSE = env_pb2.ResetResponse()
LOST = Unavailable("connection reset")
Outcome = EnvError | env_pb2.ResetResponse | env_pb2.ListPoolsResponse


class Daemon(DaemonConnection):
    """Gives one outcome to each attempt of an opening or a list of pools, and then none; closes openings at once."""

    def __init__(self, *outcomes: Outcome) -> None:
        super().__init__(Address("127.0.0.1:1"), access=Access(token=None, tls=None), retry=QUICK)
        self.outcomes = list(outcomes)
        self.attempts: list[tuple[str, float]] = []
        self.retries: list[int] = []
        self.closed: list[str] = []
        self.on_attempt: Callable[[], None] = lambda: None
        self.silent = asyncio.Event()
        """Set while an attempt waits for an outcome that does not come."""
        self.close: Callable[[], Awaitable[None]] = asyncio.Event().wait  # type: ignore[assignment]

    async def attempt(self, method: str, request: Any, *, timeout_s: float) -> Any:
        if method == "Close":
            self.closed.append(request.opening_id)
            return await self.close()
        self.attempts.append((request.request_id if method == "Reset" else method, timeout_s))
        self.on_attempt()
        assert method != "ListPools" or request.include_queue
        if not self.outcomes:
            self.silent.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.silent.clear()
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, EnvError):
            raise outcome
        return outcome

    def log_retry(self, method: str, error: EnvError, *, attempt: int, left_s: float) -> None:
        assert (method, left_s > 0) == ("Reset", True)
        self.retries.append(attempt)


def opener_of(daemon: Daemon, changed: Callable[[], None] = lambda: None) -> Opener:
    return Opener(daemon, changed=changed)


async def opened(opener: Opener, *, timeout_s: float = 60.0, may_abandon: bool = False) -> Any:
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    return await opener.open(REQUEST, size=2, deadline_s=deadline_s, may_abandon=may_abandon)


def watcher_count() -> int:
    """Return how many tasks log the waits at a host."""
    return sum(task.get_name().startswith("waits:") for task in asyncio.all_tasks())


async def test_an_opening_without_an_outcome_is_continued_under_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon, ends, pauses = Daemon(LOST, LOST, RESPONSE), list[int](), list[float]()
    opener = opener_of(daemon, lambda: ends.append(opener.open_count))

    async def pause(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(opener, "pause", pause)
    counts: list[tuple[int, int]] = []
    began_s = asyncio.get_running_loop().time()
    later_s = began_s + 3600
    daemon.on_attempt = lambda: counts.append((opener.open_count, opener.sent_count_since(later_s)))
    assert await opened(opener) is RESPONSE
    assert ([name for name, _ in daemon.attempts], daemon.retries) == (["r1"] * 3, [0, 1])
    assert all(timeout_s == 5.0 for _, timeout_s in daemon.attempts)
    assert [0 <= pause_s < 0.002 for pause_s in pauses] == [True, True]
    assert (counts, ends) == ([(2, 0)] * 3, [0])
    assert (opener.sent_count_since(began_s - 1), opener.leftover_count, daemon.closed) == (0, 0, [])
    await asyncio.sleep(0)
    assert watcher_count() == 0
    daemon.outcomes = [RESPONSE]
    daemon.on_attempt = lambda: counts.append((opener.sent_count_since(began_s - 1), watcher_count()))
    await opened(opener, timeout_s=3.0)
    assert counts[-1] == (2, 1)
    assert daemon.attempts[-1][1] <= 3.0
    await daemon.aclose()


@pytest.mark.parametrize("error", [NotFound("no such task"), PoolExhausted("no machine", reason="POOL_EXHAUSTED")])
async def test_an_opening_that_opened_nothing_is_not_repeated(error: EnvError) -> None:
    daemon = Daemon(error)
    with pytest.raises(type(error)):
        await opened(opener_of(daemon))
    assert (len(daemon.attempts), daemon.closed) == (1, [])
    await daemon.aclose()


@pytest.mark.parametrize(("may_abandon", "timeout_s"), [(True, 3600.0), (False, 10 * PATIENCE_S)])
async def test_a_lost_host_is_retried_for_its_time_or_until_the_deadline(may_abandon: bool, timeout_s: float) -> None:
    daemon, loop = Daemon(*[LOST] * 10_000), asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(Unavailable):
        await opened(opener_of(daemon), timeout_s=timeout_s, may_abandon=may_abandon)
    assert len(daemon.attempts) > 1
    # The last pause, of 2 ms at most, would end later.
    assert loop.time() - began_s >= min(timeout_s, PATIENCE_S if may_abandon else timeout_s) - 0.002
    await daemon.aclose()


async def test_an_opening_whose_caller_is_gone_is_closed_by_its_id() -> None:
    daemon = Daemon()
    opener = opener_of(daemon)
    caller = asyncio.create_task(opened(opener))
    await daemon.silent.wait()
    may_end = asyncio.Event()
    daemon.close = lambda: _none(may_end)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await asyncio.sleep(0)
    assert not daemon.silent.is_set(), "its attempt is cancelled"
    assert (opener.open_count, opener.leftover_count, daemon.closed) == (0, 1, ["r1"])
    may_end.set()
    await until(lambda: opener.leftover_count == 0)
    await daemon.aclose()


async def test_closing_ends_openings_at_the_service_and_waits_for_it() -> None:
    daemon = Daemon()
    opener, ended = opener_of(daemon), asyncio.Event()

    async def attempt(method: str, request: Any, *, timeout_s: float) -> Any:
        if method == "Close":
            daemon.closed.append(request.opening_id)
            return ended.set()
        daemon.silent.set()
        await ended.wait()
        raise EpisodeNotFound("closed by its caller")

    daemon.attempt = attempt  # type: ignore[method-assign]
    caller = asyncio.create_task(opened(opener))
    await daemon.silent.wait()
    await opener.aclose(60.0)
    with pytest.raises(ClientClosed):
        await caller
    assert (daemon.closed, opener.leftover_count) == (["r1"], 0)
    await opener.pause(3600.0)  # no pause outlives it
    await daemon.aclose()


async def test_openings_that_are_not_closed_in_time_are_left_to_their_leases(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon()
    opener = opener_of(daemon)
    caller = asyncio.create_task(opened(opener))
    await daemon.silent.wait()
    await opener.aclose(0.01)
    assert "1 abandoned openings at 127.0.0.1:1 are left to their leases" in caplog.text
    assert opener.leftover_count == 0
    caller.cancel()
    await asyncio.wait({caller})
    await opener.aclose(0.01)
    await daemon.aclose()


async def test_an_opener_pauses_for_as_long_as_it_should() -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await opener_of(Daemon()).pause(0.02)
    assert loop.time() - began_s >= 0.02


def pool(**fields: Any) -> env_pb2.Pool:
    return env_pb2.Pool(**{"name": "p", "waiting_count": 3, **fields})


QUEUED = [env_pb2.QueuedGroup(reason="7 machines are busy")]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (pool(waiting_count=0, problem="disk full"), ""),
        (pool(problem="disk full"), "preparing the template; disk full"),
        (pool(template_digest="d"), "starting machines"),
        (pool(leased_count=1, queue=QUEUED, problem="slow"), "7 machines are busy; slow"),
        (pool(leased_count=1, capacity_count=8), "3 episodes in the queue, 1 of 8 machines busy"),
        (
            pool(idle_count=1, leased_count=1, capacity_count=8, resident_count=4),
            "3 episodes in the queue, 1 of 4 machines busy",
        ),
    ],
)
def test_the_reason_for_which_episodes_wait(state: env_pb2.Pool, reason: str) -> None:
    assert wait_reason(state) == reason


async def test_waits_are_logged_when_they_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO, "cuaenv")
    empty = env_pb2.ListPoolsResponse(pools=[pool()])
    states = [pool(leased_count=count, idle_count=1, capacity_count=8) for count in (1, 2)]
    busy = [env_pb2.ListPoolsResponse(pools=[state]) for state in states]
    idle = env_pb2.ListPoolsResponse(pools=[pool(waiting_count=0, leased_count=1)])
    daemon = Daemon(LOST, empty, empty, *busy, idle, empty)
    watching = asyncio.create_task(log_waits(daemon))
    await daemon.silent.wait()
    watching.cancel()
    logged = [(record.levelname, record.getMessage().partition(": ")[2]) for record in caplog.records]
    assert logged == [
        ("WARNING", "preparing the template"),
        ("INFO", "3 episodes in the queue, 1 of 8 machines busy"),
        ("INFO", "3 episodes in the queue, 2 of 8 machines busy"),
        ("WARNING", "preparing the template"),
    ]
    assert {record.getMessage().partition(": ")[0] for record in caplog.records} == {
        "waiting for pool p at 127.0.0.1:1"
    }
    await daemon.aclose()


async def _none(may_end: asyncio.Event) -> None:
    await may_end.wait()
