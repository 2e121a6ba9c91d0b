"""Rate limits, with a clock that the test controls."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from envd.api.security.guard import MAX_CALLERS, RateLimiter


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def limiter(clock: Clock, *, calls_per_second: float = 2.0, burst: int = 3) -> RateLimiter:
    return RateLimiter(calls_per_second=calls_per_second, burst=burst, clock_s=clock)


def test_a_refused_call_is_not_counted_and_the_returned_delay_suffices() -> None:
    clock = Clock()
    calls = limiter(clock)
    for _ in range(3):
        calls.take("a")
    for _ in range(100):
        wait_s = calls.take("a")
    assert wait_s == 0.5
    clock.now_s += wait_s
    assert calls.take("a") == 0.0
    assert calls.take("a") == 0.5
    clock.now_s += 0.375
    assert calls.take("a") == 0.125, "complete calls are counted"


def test_a_long_pause_accumulates_at_most_one_burst() -> None:
    clock = Clock()
    calls = limiter(clock)
    calls.take("a")
    clock.now_s += 3600
    assert [calls.take("a") > 0 for _ in range(4)] == [False, False, False, True]


def test_callers_are_counted_separately() -> None:
    calls = limiter(Clock(), burst=1)
    assert calls.take("a") == 0.0
    assert calls.take("b") == 0.0
    assert calls.take("a") > 0


def test_a_rate_of_zero_limits_nothing() -> None:
    calls = limiter(Clock(), calls_per_second=0.0, burst=1)
    assert {calls.take("a") for _ in range(10)} == {0.0}
    assert len(calls) == 0


def test_only_the_most_recent_callers_buckets_are_kept() -> None:
    calls = limiter(Clock(), burst=1)
    for number in range(MAX_CALLERS + 10):
        calls.take(str(number))
    assert len(calls) == MAX_CALLERS
    assert calls.take(str(MAX_CALLERS + 9)) > 0
    assert calls.take("0") == 0.0


@given(
    st.lists(st.floats(min_value=-1.0, max_value=5.0), max_size=60),
    st.floats(min_value=0.1, max_value=1000),
    st.integers(1, 20),
)
def test_at_most_the_burst_and_the_refill_pass(steps_s: list[float], rate: float, burst: int) -> None:
    clock = Clock()
    calls = limiter(clock, calls_per_second=rate, burst=burst)
    times_s = [clock.now_s]
    for step_s in steps_s:
        times_s.append(times_s[-1] + step_s)
    passed = 0
    for clock.now_s in times_s:
        passed += calls.take("a") == 0.0
    # A clock that goes back must not fill the bucket; each advance counts once.
    flowed_s = sum(max(0.0, after - before) for before, after in pairwise(times_s))
    assert passed <= burst + flowed_s * rate + 1e-6
    assert passed >= min(len(times_s), burst)
