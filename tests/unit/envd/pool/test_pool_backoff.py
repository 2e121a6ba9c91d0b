"""Pauses between starts after failures."""

from envd.pool.backoff import Backoff


def test_starts_are_unlimited_before_a_failure() -> None:
    assert Backoff(min_s=1.0, max_s=8.0, failing_after=6).starting_limit(0.0, limit=4) == 4


def test_after_a_failure_one_machine_tries_after_the_pause() -> None:
    backoff = Backoff(min_s=1.0, max_s=8.0, failing_after=6)
    backoff.failed(10.0, "no space")
    assert backoff.starting_limit(10.9, limit=4) == 0
    assert backoff.retry_at_s(10.9) == 11.0
    assert backoff.starting_limit(11.0, limit=4) == 1
    assert backoff.retry_at_s(11.0) is None
    assert backoff.problem == "no space"


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(min_s=1.0, max_s=5.0, failing_after=6)
    now_s, pauses = 0.0, []
    for _ in range(5):
        backoff.failed(now_s, "no space")
        retry_at_s = backoff.retry_at_s(now_s)
        assert retry_at_s is not None
        pauses.append(retry_at_s - now_s)
        now_s = retry_at_s
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_simultaneous_failures_count_once() -> None:
    backoff = Backoff(min_s=1.0, max_s=60.0, failing_after=6)
    for _ in range(8):
        backoff.failed(0.0, "no space")
    assert backoff.retry_at_s(0.0) == 1.0


def test_a_machine_that_starts_clears_the_failures() -> None:
    backoff = Backoff(min_s=1.0, max_s=60.0, failing_after=6)
    backoff.failed(0.0, "no space")
    backoff.succeeded()
    assert backoff.starting_limit(0.0, limit=4) == 4
    assert backoff.problem == ""


def test_a_week_of_failures_does_not_overflow() -> None:
    backoff = Backoff(min_s=1.0, max_s=60.0, failing_after=6)
    for attempt in range(5000):
        backoff.failed(attempt * 100.0, "no space")
    assert backoff.retry_at_s(499_900.0) == 499_960.0
