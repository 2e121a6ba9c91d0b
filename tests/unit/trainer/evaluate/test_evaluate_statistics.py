"""Rates and their intervals, against published values and by their properties."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.evaluate.statistics import (
    bootstrap_mean,
    mcnemar,
    mean_rate,
    paired_difference,
    pooled_gain,
    pooled_rate,
    success_rate,
    wilson,
)

Rates = npt.NDArray[np.float64]
ATTEMPTS = st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=12)


def test_wilsons_interval_is_the_published_one() -> None:
    # Newcombe (1998), Statistics in Medicine 17, 857-872: method 3.
    for successes, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        interval = wilson(successes, count)
        assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)
    assert round(wilson(1, 29).low, 4) == 0.0061
    assert round(wilson(1, 29).high, 4) == 0.1718


def test_an_interval_of_all_successes_has_width() -> None:
    assert wilson(10, 10).high == 1.0
    assert 0.7 < wilson(10, 10).low < 0.75


@pytest.mark.parametrize(("successes", "count"), [(1, 0), (3, 2), (-1, 2)])
def test_an_invalid_proportion_is_refused(successes: int, count: int) -> None:
    with pytest.raises(ValueError, match="is not a proportion"):
        wilson(successes, count)


def test_one_attempt_per_task_gives_wilsons_interval() -> None:
    assert success_rate([[True], [False], [True]]) == wilson(2, 3)


def test_repeated_attempts_at_a_task_do_not_narrow_the_interval() -> None:
    once = success_rate([[True], [False], [True], [False]])
    repeated = success_rate([[True] * 8, [False] * 8, [True] * 8, [False] * 8])
    assert repeated.mean == once.mean
    # 32 independent attempts would have had an interval of a third of a unit.
    assert repeated.high - repeated.low > 0.7


def test_tasks_with_equal_rates_keep_an_interval_for_the_number_of_tasks() -> None:
    assert success_rate([[True, True]] * 5) == wilson(5, 5)


@pytest.mark.parametrize("score", [0.0, 0.5, 1.0])
def test_equal_scores_of_several_tasks_prove_no_mean(score: float) -> None:
    interval = mean_rate(np.full(8, score))
    assert interval == wilson(8 * score, 8)
    assert interval.high - interval.low > 0.3


def test_tasks_have_equal_weight_however_often_they_were_attempted() -> None:
    assert success_rate([[True], [False] * 9]).mean == 0.5


def test_no_tasks_and_a_task_without_attempts_are_refused() -> None:
    for nothing in ([], [[True], []]):
        with pytest.raises(ValueError, match="at least one task"):
            success_rate(nothing)
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_mean(np.array([]))


@given(ATTEMPTS)
@settings(max_examples=25)
def test_an_interval_contains_its_rate_and_stays_within_bounds(attempts: list[list[bool]]) -> None:
    interval = success_rate(attempts)
    assert 0.0 <= interval.low <= interval.mean <= interval.high <= 1.0
    assert success_rate(attempts) == interval


def test_mcnemars_test_is_the_exact_binomial_one() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == 1.0
    assert mcnemar(0, 6) == pytest.approx(2 / 64)
    assert mcnemar(1, 8) == pytest.approx(2 * (1 + 9) / 512)
    assert mcnemar(8, 1) == mcnemar(1, 8)


def pairs(both: int, gained: int, lost: int, neither: int) -> tuple[Rates, Rates]:
    before = [1.0] * both + [0.0] * gained + [1.0] * lost + [0.0] * neither
    after = [1.0] * both + [1.0] * gained + [0.0] * lost + [0.0] * neither
    return np.array(before), np.array(after)


@pytest.mark.parametrize(
    ("counts", "low", "high"), [((36, 12, 2, 0), 0.0569, 0.3404), ((36, 14, 0, 0), 0.1528, 0.4167)]
)
def test_the_interval_of_a_paired_difference_is_newcombes(
    counts: tuple[int, int, int, int], low: float, high: float
) -> None:
    # Newcombe (1998), Statistics in Medicine 17, 2635-2650.
    interval = paired_difference(*pairs(*counts))
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


@pytest.mark.parametrize("counts", [(5, 0, 0, 0), (3, 0, 0, 3)])
def test_an_interval_without_changed_tasks_has_width(counts: tuple[int, int, int, int]) -> None:
    interval = paired_difference(*pairs(*counts))
    assert interval.mean == 0.0
    assert interval.low < -0.2
    assert interval.high > 0.2


@given(st.tuples(*[st.integers(0, 6)] * 4).filter(any))
@settings(max_examples=50)
def test_swapping_before_and_after_turns_a_difference_around(counts: tuple[int, int, int, int]) -> None:
    before, after = pairs(*counts)
    there, back = paired_difference(before, after), paired_difference(after, before)
    assert there.mean == pytest.approx(-back.mean)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
    assert there.low <= there.mean <= there.high


def test_rates_of_several_seeds_are_resampled_by_task() -> None:
    before = np.array([0.0, 0.5, 0.25, 0.5] * 4)
    interval = paired_difference(before, before + np.array([0.5, 0.25, 0.0, 0.25] * 4))
    assert interval.mean == 0.25
    assert 0.1 < interval.low < 0.25 < interval.high < 0.4


def test_an_interval_is_wide_where_templates_differ() -> None:
    alike = pooled_rate({str(index): [1, 0] for index in range(20)})
    different = pooled_rate({str(index): [index < 10] * 2 for index in range(20)})
    assert (alike.mean, alike.interval, alike.count) == (0.5, (0.5, 0.5), 40)
    assert different.interval is not None
    assert different.interval[0] < 0.4
    assert different.interval[1] > 0.6


def test_a_gain_is_compared_template_by_template() -> None:
    """Every template gains a half, so that the gain is certain although the rates differ."""
    before = {str(index): [index < 10, 0] for index in range(20)}
    after = {str(index): [index < 10, 1] for index in range(20)}
    found = pooled_gain(before, {**after, "new": [1]})
    assert (found.mean, found.count) == (0.5, 40)
    assert found.interval == pytest.approx((0.5, 0.5))
    assert pooled_gain(before, {}).mean is None
