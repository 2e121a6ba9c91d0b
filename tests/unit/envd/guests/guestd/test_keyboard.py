"""Typing plans: which keys type a text, and which keycodes are bound for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envd.guests.guestd.keyboard import TypingBatch, consecutive_rows, plan_typing
from envd.guests.guestd.messages import HttpError

SHIFT, A, COMMA, RETURN, SPACE = 50, 38, 59, 36, 65
LAYOUT: dict[int, list[int]] = {
    RETURN: [0xFF0D, 0],
    A: [ord("a"), ord("A")],
    SHIFT: [0xFFE1, 0],
    COMMA: [ord(","), ord("<")],
    SPACE: [ord(" "), 0],
    100: [0, 0],
    101: [0, 0],
}


def typed_by(batches: list[TypingBatch], keyboard: dict[int, list[int]]) -> str:
    """Return the text that a client reads when the strokes are played on a keyboard map."""
    rows = {code: list(row) for code, row in keyboard.items()}
    text = ""
    for batch in batches:
        rows.update({code: list(pair) for code, pair in batch.bindings.items()})
        for stroke in batch.strokes:
            keysym = rows[stroke.keycode][int(stroke.shifted)]
            text += "\n" if keysym == 0xFF0D else chr(keysym & 0xFFFFFF)
    return text


def test_characters_of_the_layout_need_no_bindings() -> None:
    [batch] = plan_typing("aA,<\r\n", LAYOUT)
    strokes = [(stroke.keycode, stroke.shifted) for stroke in batch.strokes]
    assert strokes == [(A, False), (A, True), (COMMA, False), (COMMA, True), (RETURN, False)]
    assert not batch.bindings


def test_missing_characters_are_bound_two_per_keycode_and_rebound_in_batches() -> None:
    [batch] = plan_typing("é€Жé", LAYOUT)
    assert batch.bindings == {101: [0xE9, 0x010020AC], 100: [0x01000416, 0x01000416]}
    assert typed_by([batch], LAYOUT) == "é€Жé"
    batches = plan_typing("αβγδεa", LAYOUT)
    assert [batch.rebinds for batch in batches] == [False, True]
    assert typed_by(batches, LAYOUT) == "αβγδεa"


def test_bindings_of_an_earlier_call_are_reused_or_replaced() -> None:
    keyboard = {**LAYOUT, 101: [0xE9, 0x010020AC]}
    [batch] = plan_typing("€é", keyboard)
    assert not batch.bindings
    assert typed_by([batch], keyboard) == "€é"
    bound = {100: (0x010003B1, 0x010003B2), 101: (0x010003B3, 0x010003B4)}
    keyboard = {**LAYOUT, **{code: list(pair) for code, pair in bound.items()}}
    [batch] = plan_typing("ж", keyboard)
    assert batch.rebinds
    assert typed_by([batch], keyboard) == "ж"


@given(st.text(st.characters(min_codepoint=0xA0, exclude_categories=["Cs"]), max_size=60))
def test_every_plan_types_its_text(text: str) -> None:
    assert typed_by(plan_typing(text, LAYOUT), LAYOUT) == text


@pytest.mark.parametrize("character", ["\x07", "\x7f", "\x85", "\ud800"])
def test_an_error_names_the_character_that_cannot_be_typed(character: str) -> None:
    with pytest.raises(HttpError, match=f"U\\+{ord(character):04X}"):
        plan_typing(f"a{character}", LAYOUT)


def test_only_keycodes_without_a_key_are_bound_and_change() -> None:
    # Of a Japanese layout; Georgian ones have Unicode keysyms on letters.
    keyboard = {
        97: [ord("\\"), ord("_")],
        A: [0x010010D0, 0x010010D0],
        129: [0xFFAE, 0xFFAE],
        123: [0x1008FF13, 0],
        100: [0, 0],
    }
    batches = plan_typing("αβγ", keyboard)
    assert {code for batch in batches for code in batch.bindings} == {100}
    full = {code: row for code, row in LAYOUT.items() if any(row)}
    with pytest.raises(HttpError, match="keycode"):
        plan_typing("é", full)
    rows = list(consecutive_rows({9: (1, 1), 10: (2, 2), 93: (3, 3)}))
    assert rows == [(9, [(1, 1), (2, 2)]), (93, [(3, 3)])]
