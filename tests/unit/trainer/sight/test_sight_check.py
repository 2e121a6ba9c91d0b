"""Comparisons of the check on written replies; `tests/slime/test_sight_real.py` has them on a model."""

from collections.abc import Sequence

import pytest

from trainer.sight.check import MOST_TURNS, Episode, Patches, Report, SampledReply, SightPlan, compare, turns_of_row

PROMPT, REPLY = [1, 2, 3], [7, 8]
PLAN = SightPlan.draw(turns=2, size_px=(64, 32))


def turn(
    log_probs: Sequence[float], *, reply: Sequence[int] = REPLY, prompt: Sequence[int] = PROMPT, text: str = ""
) -> SampledReply:
    return SampledReply(tokens=[*prompt, *reply], start=len(prompt), log_probs=log_probs, inputs={}, image=0, text=text)


def report_of(*, base: Episode, again: Episode | None = None, first: SampledReply, second: SampledReply) -> Report:
    """Compare episodes whose first and second turn change with another picture."""
    episodes = [base, again or base, [first, base[1]], [base[0], second]]
    return compare(PLAN, episodes, None, Patches())


def engine_turns(report: Report) -> list[int]:
    return [each.turn for each in report.findings if each.side == "engine"]


BASE = [turn([-1.0, -1.0]), turn([-2.0, -2.0])]


def test_a_change_above_the_tolerance_is_sight() -> None:
    report = report_of(base=BASE, first=turn([-1.0, -1.2]), second=turn([-2.0, -2.01]))
    assert report.engine_change == pytest.approx([0.2, 0.01])
    assert engine_turns(report) == [2]


def test_the_noise_of_a_repeated_episode_raises_the_limit() -> None:
    again = [turn([-1.0, -1.1]), BASE[1]]
    report = report_of(base=BASE, again=again, first=turn([-1.0, -1.2]), second=turn([-2.0, -3.0]))
    assert report.noise == pytest.approx(0.1)
    assert engine_turns(report) == [1]


def test_replies_are_compared_up_to_their_first_different_token() -> None:
    first, second = turn([-1.0, -9.0], reply=[9, 8]), turn([-2.5, -2.0], reply=[9, 8])
    report = report_of(base=BASE, first=first, second=second)
    assert report.engine_change == pytest.approx([0.0, 0.5])
    assert engine_turns(report) == [1]


def test_replies_after_different_earlier_ones_are_not_compared() -> None:
    report = report_of(base=BASE, first=turn([-5.0, -1.0]), second=turn([-5.0, -2.0], prompt=[1, 2, 4]))
    assert report.engine_change == [4.0, None]
    assert "earlier replies differ" in str(report)


def test_an_answer_with_the_word_of_an_earlier_turn_is_found() -> None:
    old, new = PLAN.words[0]
    base = [turn([-1.0, -1.0], text=f"type {old.lower()}"), turn([-2.0, -2.0], text=old)]
    report = report_of(base=base, first=turn([-5.0, -1.0]), second=turn([-5.0, -2.0]))
    assert report.read_count == 1
    assert engine_turns(report) == [2]
    assert "it answers with the word of turn 1" in str(report)
    right = [base[0], turn([-2.0, -2.0], text=f"{old}, then {new}")]
    assert not engine_turns(report_of(base=right, first=turn([-5.0, -1.0]), second=turn([-5.0, -2.0])))


@pytest.mark.parametrize("limit", [3, 6])
def test_an_engine_that_reads_only_the_first_pictures_of_a_request_is_found(limit: int) -> None:
    plan = SightPlan.draw(turns=7, size_px=(64, 32))
    base = [turn([-1.0, -1.0])] * 7
    exchanged = [
        [turn([-5.0, -1.0]) if place == number and place < limit else base[0] for place in range(7)]
        for number in plan.exchanged
    ]
    report = compare(plan, [base, base, *exchanged], None, Patches())
    assert plan.exchanged == [0, 1, 2, 6]
    assert report.engine_change == [4.0, 4.0, 4.0, None, None, None, 0.0]
    assert engine_turns(report) == [7]


def test_the_longest_plan_has_a_word_for_each_turn() -> None:
    plan = SightPlan.draw(turns=MOST_TURNS, size_px=(64, 32))
    assert len({word for words in plan.words for word in words}) == MOST_TURNS + 4


def test_a_row_without_pictures_is_found() -> None:
    report = report_of(base=BASE, first=turn([-5.0, -1.0]), second=turn([-5.0, -2.0]))
    assert [each.turn for each in report.findings if each.side == "learner"] == [1, 2]


def test_an_episode_without_a_reply_is_refused() -> None:
    with pytest.raises(ValueError, match="episode 1: it has 1 replies with tokens instead of 2; raise its budgets"):
        compare(PLAN, [BASE, BASE[:1], BASE, BASE], None, Patches())


def test_words_and_pictures_differ_in_one_turn() -> None:
    first, again, *others = PLAN.words
    assert first == again
    for number, words in enumerate(others):
        assert [mine != its for mine, its in zip(first, words, strict=True)] == [n == number for n in range(2)]
        changed = [a.tobytes() != b.tobytes() for a, b in zip(PLAN.episodes[0], PLAN.episodes[2 + number], strict=True)]
        assert changed == [n == number for n in range(2)]
    letters = list(zip(first[0], first[1], strict=True))
    assert all(one != other for one, other in letters), "no word shares a letter with another in the same place"


def test_a_row_is_divided_into_its_turns() -> None:
    image, text = 0, "abcdefghij"
    tokens = [1, image, image, 2, 3, 4, 1, image, image, 5, 6]
    mask, log_probs = [1, 1, 1, 0, 0, 0, 1, 1], [-0.1, -0.2, None, 0.0, 0.0, 0.0, -0.3, -0.4]
    first, second = turns_of_row(
        tokens, mask, log_probs, None, image_id=image, decode=lambda ids: "".join(text[token] for token in ids)
    )
    assert (first.start, first.log_probs, first.image, first.text) == (3, [-0.1, -0.2], 0, "cd")
    assert (second.start, second.log_probs, second.image, second.text) == (9, [-0.3, -0.4], 1, "fg")
