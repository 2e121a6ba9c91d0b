"""A reader gets each item after it acknowledged the previous one, and never a stale item."""

import asyncio
from collections.abc import AsyncGenerator

from hypothesis import given, settings
from hypothesis import strategies as st

from envd.api.flow_control import AckTracker, paced


class Mailbox:
    """Acknowledgements in transit."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int | None] = asyncio.Queue()

    async def messages(self) -> AsyncGenerator[int, None]:
        while (message := await self.queue.get()) is not None:
            yield message


async def counting(made: list[int]) -> AsyncGenerator[int, None]:
    while True:
        made.append(len(made))
        yield made[-1]


async def rest() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_next_item_is_produced_only_after_the_last_was_acknowledged() -> None:
    mailbox, acks, made = Mailbox(), AckTracker(), list[int]()
    tracking = asyncio.create_task(acks.track(mailbox.messages()))
    items = paced(counting(made), acks)
    assert await anext(items) == (1, 0)
    upcoming = asyncio.ensure_future(anext(items))
    await rest()
    assert made == [0], "no item is produced ahead of the reader"
    mailbox.queue.put_nowait(1)
    assert await upcoming == (2, 1)
    await items.aclose()
    tracking.cancel()


async def test_a_reader_that_ended_its_acknowledgements_gets_every_item() -> None:
    mailbox, acks, made = Mailbox(), AckTracker(), list[int]()
    mailbox.queue.put_nowait(None)
    await acks.track(mailbox.messages())
    items = paced(counting(made), acks)
    assert [await anext(items) for _ in range(3)] == [(1, 0), (2, 1), (3, 2)]
    await items.aclose()


async def test_closing_the_stream_closes_the_source() -> None:
    closed = asyncio.Event()

    async def frames() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            closed.set()

    items = paced(frames(), AckTracker())
    await anext(items)
    await items.aclose()
    assert closed.is_set()


@settings(max_examples=50)
@given(st.lists(st.integers(-3, 12), max_size=30))
def test_acknowledgements_may_arrive_in_any_order(sequences: list[int]) -> None:
    async def play() -> None:
        mailbox, acks, made = Mailbox(), AckTracker(), list[int]()
        tracking = asyncio.create_task(acks.track(mailbox.messages()))
        taken: list[int] = []

        async def take() -> None:
            async for sequence, _ in paced(counting(made), acks):
                taken.append(sequence)
                if sequence > 15:
                    return

        taking = asyncio.create_task(take())
        highest = 0
        for sequence in sequences:
            mailbox.queue.put_nowait(sequence)
            highest = max(highest, sequence)
            await rest()
            await rest()
        await rest()
        assert taken == list(range(1, len(taken) + 1))
        assert len(taken) <= len(made) <= highest + 1, "none is made ahead of the reader, and one is in transit"
        taking.cancel()
        tracking.cancel()
        await asyncio.gather(taking, tracking, return_exceptions=True)

    asyncio.run(play())
