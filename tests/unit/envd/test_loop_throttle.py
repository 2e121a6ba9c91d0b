"""How many callers `LoopThrottle` admits per iteration of the event loop."""

import asyncio

import pytest

from envd.base.aio import LoopThrottle


class Iterations:
    """Counts iterations of the event loop, and records in which one each task was admitted."""

    def __init__(self, width: int) -> None:
        self.throttle = LoopThrottle(width)
        self.admitted: list[tuple[int, int]] = []
        self._iteration = 0

    async def enter(self, number: int) -> None:
        await self.throttle.wait()
        self.admitted.append((self._iteration, number))

    async def run(self, tasks: list["asyncio.Task[None]"]) -> None:
        while not all(task.done() for task in tasks):
            self._iteration += 1
            await asyncio.sleep(0)

    def per_iteration(self) -> list[list[int]]:
        iterations = sorted({at for at, _ in self.admitted})
        return [[number for at, number in self.admitted if at == iteration] for iteration in iterations]


@pytest.mark.parametrize(
    ("width", "iterations"), [(1, [[0], [1], [2], [3], [4]]), (2, [[0, 1], [2, 3], [4]]), (9, [[0, 1, 2, 3, 4]])]
)
async def test_callers_are_admitted_in_order_at_most_width_per_iteration(
    width: int, iterations: list[list[int]]
) -> None:
    counter = Iterations(width)
    await counter.run([asyncio.create_task(counter.enter(number)) for number in range(5)])
    assert counter.per_iteration() == iterations


async def test_a_single_caller_does_not_wait() -> None:
    throttle = LoopThrottle(1)
    for _ in range(3):
        waiting = throttle.wait()
        with pytest.raises(StopIteration):
            waiting.send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_new_callers_do_not_pass_waiting_ones() -> None:
    counter = Iterations(1)
    early = [asyncio.create_task(counter.enter(number)) for number in range(3)]
    await asyncio.sleep(0)
    late = [asyncio.create_task(counter.enter(number)) for number in range(3, 6)]
    await counter.run([*early, *late])
    assert [number for _, number in counter.admitted] == list(range(6))


async def test_a_cancelled_caller_uses_no_place() -> None:
    counter = Iterations(1)
    tasks = [asyncio.create_task(counter.enter(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await counter.run(tasks)
    assert [number for _, number in counter.admitted] == [0, 3]


async def test_an_idle_throttle_schedules_nothing() -> None:
    loop = asyncio.get_running_loop()
    throttle = LoopThrottle(2)
    await throttle.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not loop._ready  # type: ignore[attr-defined]
