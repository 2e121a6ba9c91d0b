"""Each request is performed once: joins, replays, and dropped responses."""

import asyncio
import gc
from unittest.mock import AsyncMock

import pytest

from envd.base.errors import EpisodeNotFound, MachineLost, RequestIdReused, StepIndexMismatch
from envd.episodes.ledger import (
    CHECKPOINT,
    EVALUATE,
    FORK,
    RESET,
    ROLLBACK,
    SCORE,
    STEP,
    Ledger,
    RequestKey,
    RequestKind,
)
from tests.support.clock import ManualClock, begun, run_ready

KIND = RequestKind("step", keep_count=3, without_effect=(StepIndexMismatch,))


def request(request_id: str, fingerprint: bytes = b"f", kind: RequestKind = KIND) -> RequestKey:
    return RequestKey(kind, "ep-1", request_id, fingerprint)


class Work:
    """An operation that must not run twice."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> str:
        self.begun += 1
        number = self.begun
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return f"answer {number}"


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def dropped() -> list[RequestKey]:
    """Return the requests whose responses the ledger drops."""
    return []


@pytest.fixture
def ledger(clock: ManualClock, dropped: list[RequestKey]) -> Ledger:
    return Ledger(
        clock=clock,
        keep_s=600.0,
        abandoned=lambda: EpisodeNotFound("episode ep-1 was closed"),
        on_dropped=dropped.append,
        close_group=AsyncMock(),
    )


async def test_a_retry_joins_the_running_call(ledger: Ledger, work: Work) -> None:
    first = asyncio.create_task(ledger.answer(request("r1"), work))
    retry = await begun(ledger.answer(request("r1"), work))
    work.may_end.set()
    assert (await first).value == (await retry).value == "answer 1"
    assert not (await retry).replayed
    assert work.begun == 1


async def test_a_cancelled_caller_leaves_the_call_running(ledger: Ledger, work: Work) -> None:
    caller = await begun(ledger.answer(request("r1"), work))
    caller.cancel()
    await run_ready()
    assert caller.cancelled()
    work.may_end.set()
    assert (await ledger.answer(request("r1"), work)).value == "answer 1"
    assert work.begun == 1


async def test_the_same_id_with_another_body_is_refused_running_or_done(ledger: Ledger, work: Work) -> None:
    first = await begun(ledger.answer(request("r1"), work))
    with pytest.raises(RequestIdReused, match="r1"):
        await ledger.answer(request("r1", b"other"), work)
    work.may_end.set()
    await first
    with pytest.raises(RequestIdReused):
        await ledger.answer(request("r1", b"other"), work)
    assert work.begun == 1


async def test_a_failure_without_effect_is_not_recorded(ledger: Ledger, work: Work, clock: ManualClock) -> None:
    work.may_end.set()
    work.error = StepIndexMismatch("not yet")
    with pytest.raises(StepIndexMismatch):
        await ledger.answer(request("r1"), work)
    work.error = None
    await clock.advance(600.0)
    assert (await ledger.answer(request("r2"), work)).value == "answer 2", "there is nothing old to drop"
    assert (await ledger.answer(request("r1"), work)).value == "answer 3"


async def test_any_other_failure_is_recorded(ledger: Ledger, work: Work) -> None:
    work.may_end.set()
    work.error = MachineLost("QEMU exited")
    for _ in range(2):
        with pytest.raises(MachineLost, match="QEMU exited"):
            await ledger.answer(request("r1"), work)
    assert work.begun == 1


async def test_responses_are_kept_for_a_limited_time(ledger: Ledger, work: Work, clock: ManualClock) -> None:
    work.may_end.set()
    await ledger.answer(request("r1"), work)
    await clock.advance(599.0)
    assert (await ledger.answer(request("r1"), work)).replayed
    await clock.advance(1.0)
    assert not (await ledger.answer(request("r1"), work)).replayed


async def test_only_the_newest_responses_are_kept_and_all_running_calls(ledger: Ledger, work: Work) -> None:
    slow = Work()
    running = await begun(ledger.answer(request("slow"), slow))
    work.may_end.set()
    for number in range(10):
        await ledger.answer(request(f"r{number}"), work)
    await run_ready()
    assert (await ledger.answer(request("r7"), work)).replayed
    assert len(ledger) == 4
    assert not (await ledger.answer(request("r6"), work)).replayed
    slow.may_end.set()
    assert (await running).value == "answer 1"


async def test_a_recovered_response_is_replayed_for_the_rest_of_its_time(
    dropped: list[RequestKey], ledger: Ledger, work: Work, clock: ManualClock
) -> None:
    ledger.recover(request("r1"), "from before", age_s=100.0)
    replay = await ledger.answer(request("r1"), work)
    assert (replay.value, replay.replayed, replay.recovered) == ("from before", True, True)
    await clock.advance(499.0)
    assert (await ledger.answer(request("r1"), work)).recovered
    await clock.advance(1.0)
    work.may_end.set()
    again = await ledger.answer(request("r1"), work)
    assert (again.value, again.replayed, again.recovered) == ("answer 1", False, False)
    assert dropped == [request("r1")]


async def test_an_ended_call_is_forgotten_and_only_its_response_is_dropped(
    dropped: list[RequestKey], ledger: Ledger, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    caller = await begun(ledger.answer(request("r1"), work))
    await ledger.end(KIND, "r1")
    with pytest.raises(EpisodeNotFound, match="closed by its caller"):
        await caller
    assert (len(ledger), dropped, caplog.text) == (0, [], "")
    work.may_end.set()
    assert (await ledger.answer(request("r1"), work)).value == "answer 2"
    await ledger.end(KIND, "r1")
    assert (len(ledger), dropped) == (0, [request("r1")])


def test_only_resets_scores_and_forks_end_with_their_caller() -> None:
    kinds = (RESET, SCORE, FORK, CHECKPOINT, ROLLBACK, STEP, EVALUATE)
    assert {kind.name for kind in kinds if kind.ends_alone} == {"reset", "score", "fork"}


async def test_closing_cancels_calls_and_raises_in_their_callers(ledger: Ledger, work: Work) -> None:
    caller = await begun(ledger.answer(request("r1"), work))
    await ledger.close()
    with pytest.raises(EpisodeNotFound, match="was closed"):
        await caller
    with pytest.raises(EpisodeNotFound, match="was closed"):
        await ledger.answer(request("r2"), work)
    assert work.begun == 1


async def test_a_failure_without_a_waiting_caller_is_not_logged_by_asyncio(
    ledger: Ledger, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    caller = await begun(ledger.answer(request("r1"), work))
    caller.cancel()
    work.error = StepIndexMismatch("not yet")
    work.may_end.set()
    await run_ready()
    assert len(ledger) == 0
    del caller
    gc.collect()  # asyncio complains about unseen exceptions when their tasks are collected
    assert caplog.text == ""


async def test_the_same_id_of_another_kind_is_another_request(ledger: Ledger, work: Work) -> None:
    other, slow = RequestKind("fork", keep_count=1), Work()
    work.may_end.set()
    running = await begun(ledger.answer(request("r1", kind=other), slow))
    for number in range(1, 4):
        assert not (await ledger.answer(request(f"r{number}", b"g"), work)).replayed
    for number in range(2, 5):
        await ledger.answer(request(f"r{number}", kind=other), work)
    assert (await ledger.answer(request("r1", b"g"), work)).replayed, "each kind keeps its own number of responses"
    slow.may_end.set()
    assert (await running).value == "answer 1"


@pytest.mark.parametrize("leaves_first", [True, False])
async def test_an_ended_call_is_not_reported_as_one_without_callers(
    ledger: Ledger, work: Work, clock: ManualClock, caplog: pytest.LogCaptureFixture, leaves_first: bool
) -> None:
    kind = RequestKind("reset", ends_alone=True)
    caller = await begun(ledger.answer(request("r1", kind=kind), work))
    work.may_end.set()
    if leaves_first:
        caller.cancel()
        await run_ready()
        await ledger.end(kind, "r1")
    else:
        ending = asyncio.create_task(ledger.end(kind, "r1"))
        caller.cancel()
        await ending
    await run_ready()
    await clock.advance(60)
    assert caplog.text == ""
