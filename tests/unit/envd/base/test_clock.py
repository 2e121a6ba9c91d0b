"""Time limits that count only time in which the process runs."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from envd.base import clock
from envd.base.clock import running_timeout

TICK_S = 0.01


@pytest.fixture(autouse=True)
def _fast_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_TICK_S", TICK_S)


def readings(*waited_s: float) -> tuple[list[float], Callable[[], float]]:
    """Return the readings made so far, and a clock that waits so long before each reading, and then a tick."""
    made = [0.0]
    waits: Iterator[float] = iter(waited_s)

    def monotonic() -> float:
        made.append(made[-1] + next(waits, TICK_S))
        return made[-1]

    return made, monotonic


@pytest.mark.parametrize(
    ("waited_s", "tick_count"),
    [
        ((0.0, TICK_S, TICK_S), 4),
        ((0.0, TICK_S, 90.0), 4),  # stopped once: it counts as one tick
        ((0.0, 90.0, 90.0, 90.0, 90.0), 4),  # a host that is always late: the limit ends nevertheless
        ((0.0, 1.5 * TICK_S, 1.5 * TICK_S, TICK_S), 3),
    ],
)
async def test_a_stall_of_the_process_takes_no_more_than_one_tick_from_a_limit(
    waited_s: tuple[float, ...], tick_count: int
) -> None:
    made, monotonic = readings(*waited_s)
    with pytest.raises(TimeoutError):
        async with running_timeout(4 * TICK_S, monotonic=monotonic):
            await asyncio.Event().wait()
    assert len(made) - 2 == tick_count


async def test_a_block_that_ends_in_time_is_not_cancelled_later_and_its_errors_pass() -> None:
    async with running_timeout(1.0):
        pass
    with pytest.raises(ValueError, match="x"):
        async with running_timeout(1.0):
            raise ValueError("x")
    await asyncio.sleep(3 * TICK_S)
