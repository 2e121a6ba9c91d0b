"""Sibling credit against a direct reading of its definition, its bias, and incomplete trees."""

import random
import statistics
from collections.abc import Callable, Iterator
from itertools import product

import pytest

from tests.support.credit import by_definition, member, random_tree
from trainer.rewards.credit import CreditedMember, sibling_credit


def raw(members: list[CreditedMember]) -> dict[str, tuple[float, ...]]:
    found = sibling_credit(members, by_deviation=False)
    return {one.name: credit.advantages for one, credit in zip(members, found, strict=True)}


@pytest.mark.parametrize("seed", range(200))
def test_credit_is_that_of_the_definition(seed: int) -> None:
    roots, members = random_tree(random.Random(seed), limit=16)
    random.Random(seed).shuffle(members)
    found, expected = raw(members), by_definition(roots)
    assert found.keys() == expected.keys()
    for name, advantages in found.items():
        assert advantages == pytest.approx(expected[name])


def outcomes(p: float) -> Iterator[tuple[tuple[int, ...], float]]:
    """Two members with two turns of binary actions: the first turn is shared, then each acts alone."""
    for actions in product((0, 1), repeat=3):
        yield actions, pow(p, sum(actions)) * pow(1 - p, len(actions) - sum(actions))


def expected_advantage(
    p: float, reward: Callable[[int, int], float], *, first: int, action: int
) -> tuple[float, float]:
    """Return the mean advantage of an action after `first`, and the policy's advantage of it, Q - V."""
    total = weight = 0.0
    for (shared, own, other), probability in outcomes(p):
        if (shared, own) != (first, action):
            continue
        members = [
            member("a", reward(shared, own), turns=2),
            member("b", reward(shared, other), turns=2, parent="a", shared=1),
        ]
        total += probability * raw(members)["a"][1]
        weight += probability
    value = p * reward(first, 1) + (1 - p) * reward(first, 0)
    return total / weight, reward(first, action) - value


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("action", [0, 1])
def test_its_mean_is_the_advantage_of_the_action_in_its_state(p: float, first: int, action: int) -> None:
    # The first action decides what the second one is worth, so a baseline of the whole group would be biased by it.
    found, expected = expected_advantage(
        p, lambda one, two: 3.0 * one + two - 2.5 * one * two, first=first, action=action
    )
    assert found == pytest.approx(expected)


def test_a_fatal_choice_is_charged_to_the_turn_that_made_it() -> None:
    group = [
        member("a", 1.0, turns=6),
        member("b", 0.0, turns=6, parent="a", shared=2),
        member("c", 1.0, turns=6, parent="a", shared=4),
        member("d", 0.0, turns=6, parent="b", shared=4),
    ]
    assert raw(group) == {"a": (0, 0, 1, 1, 0, 0), "b": (-1, -1, 0, 0), "c": (0, 0), "d": (0, 0)}


def test_returns_are_divided_by_their_deviation() -> None:
    group = [member("a", 1.0, turns=1), member("b", 0.0, turns=1)]
    (a, b) = sibling_credit(group)
    assert a.advantages == pytest.approx((1.0 / (statistics.stdev([1.0, 0.0]) + 1e-6),))
    assert b.advantages == pytest.approx((-a.advantages[0],))


def test_a_void_member_counts_in_no_mean() -> None:
    found = raw([member("a", 1.0, turns=2), member("b", None, turns=2), member("c", 0.0, turns=2)])
    assert found == {"a": (1.0, 1.0), "b": (0.0, 0.0), "c": (-1.0, -1.0)}


def test_members_whose_parent_is_missing_are_compared_with_each_other() -> None:
    found = raw([
        member("b", 1.0, parent="lost", shared=2),
        member("c", 0.0, parent="lost", shared=2),
        member("root", 0.0),
    ])  # fmt: skip
    assert found == {"b": (1.0, 1.0), "c": (-1.0, -1.0), "root": (-0.5,) * 4}


def test_turns_with_siblings_are_counted() -> None:
    credits_ = sibling_credit([member("a", 1.0), member("b", 1.0, parent="a", shared=2)])
    assert [each.sibling_count for each in credits_] == [2, 2]
    assert [each.first_turn for each in credits_] == [1, 3]


def test_a_shared_turn_has_no_credit_in_the_member_that_did_not_take_it() -> None:
    (_, b) = sibling_credit([member("a", 1.0), member("b", 0.0, parent="a", shared=2)])
    assert b.of_turn(3) < 0
    with pytest.raises(IndexError, match="turn 2 is shared"):
        b.of_turn(2)
    with pytest.raises(IndexError):
        b.of_turn(5)


def test_invalid_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="one name"):
        sibling_credit([member("a", 1.0), member("a", 0.0)])
    with pytest.raises(ValueError, match="not finite"):
        sibling_credit([member("a", float("nan")), member("b", 0.0)])
