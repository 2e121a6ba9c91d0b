"""Estimates of `retry_after_s` from the rate of returned machines."""

from envd.pool.admission import Turnover


def retry_after_s(turnover: Turnover, now_s: float, *, machine_count: int = 1) -> float:
    return turnover.retry_after_s(now_s, machine_count=machine_count, start_s=2.0, capacity=4)


def returned(*times_s: float) -> Turnover:
    turnover = Turnover()
    for at_s in times_s:
        turnover.returned(at_s)
    return turnover


def test_before_the_first_returns_a_turnover_is_assumed_to_cost_one_start() -> None:
    assert retry_after_s(returned(), 0.0, machine_count=4) == 4.0
    assert retry_after_s(returned(5.0), 5.0, machine_count=8) == 6.0


def test_the_estimate_extrapolates_the_rate_of_returns() -> None:
    turnover = returned(0.0, 10.0, 20.0, 30.0)
    assert turnover.interval_s(30.0) == 10.0
    assert retry_after_s(turnover, 30.0, machine_count=3) == 32.0


def test_the_time_since_the_newest_return_counts() -> None:
    assert returned(0.0, 10.0, 20.0).interval_s(60.0) == 30.0


def test_the_estimate_is_bounded() -> None:
    assert retry_after_s(returned(0.0, 100.0), 100.0, machine_count=50) == 120.0
    turnover = returned(*[5.0] * 9)
    assert turnover.retry_after_s(5.0, machine_count=1, start_s=0.0, capacity=4) == 1.0


def test_old_returns_do_not_count() -> None:
    assert returned(0.0, 10.0).interval_s(611.0) is None


def test_only_the_newest_returns_count() -> None:
    turnover = returned(*range(100), *[100.0 + 5.0 * i for i in range(32)])
    assert turnover.interval_s(255.0) == 5.0
