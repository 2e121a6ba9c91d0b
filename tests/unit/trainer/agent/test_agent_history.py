"""Rows of an episode: append-only, with new rows that drop old screenshots."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.agent.turns import History
from trainer.agent.types import Message


def user(text: str) -> Message:
    return Message("user", (text,))


SYSTEM = Message("system", ("S",))


def rows_of(turn_count: int, *, images_per_row: int, images_kept: int, first: bool = False) -> list[list[str]]:
    """Return the rows of an episode; observation n is `Ln` in full and `bn` in brief, reply n is `rn`."""
    history = History(SYSTEM, images_per_row=images_per_row, images_kept=images_kept, first_image_kept=first)
    rows = [[str(message.parts[0]) for message in history.begin(user("L0"), user("b0"))]]
    for number in range(1, turn_count):
        history.reply(f"r{number}")
        rows[-1].append(f"r{number}")
        row = history.observe(user(f"L{number}"), user(f"b{number}"))
        if row is None:
            rows[-1].append(f"L{number}")
        else:
            rows.append([str(message.parts[0]) for message in row])
        assert history.row == len(rows) - 1
    return rows


@pytest.mark.parametrize(
    ("turn_count", "limits", "rows"),
    [
        (4, {"images_per_row": 0, "images_kept": 1}, ["S L0 r1 L1 r2 L2 r3 L3"]),
        (5, {"images_per_row": 3, "images_kept": 2}, ["S L0 r1 L1 r2 L2 r3", "S b0 r1 b1 r2 L2 r3 L3 r4 L4"]),
        (
            5,
            {"images_per_row": 3, "images_kept": 1, "first": True},
            ["S L0 r1 L1 r2 L2 r3", "S L0 r1 b1 r2 b2 r3 L3 r4 L4"],
        ),
        (3, {"images_per_row": 1, "images_kept": 1}, ["S L0 r1", "S b0 r1 L1 r2", "S b0 r1 b1 r2 L2"]),
    ],
    ids=["no limit", "the latest are kept", "the first is kept", "a row for each turn"],
)
def test_a_new_row_starts_with_the_observations_that_are_kept(
    turn_count: int, limits: dict[str, Any], rows: list[str]
) -> None:
    assert [" ".join(row) for row in rows_of(turn_count, **limits)] == rows


def test_a_message_without_an_observation_never_starts_a_row() -> None:
    history = History(SYSTEM, images_per_row=1)
    history.begin(user("L0"), user("b0"))
    history.reply("r1")
    history.note(user("same"))
    history.reply("r2")
    row = history.observe(user("L2"), user("b2"))
    assert row is not None
    assert [message.parts[0] for message in row] == ["S", "b0", "r1", "same", "r2", "L2"]


@given(st.integers(1, 20), st.integers(0, 5), st.data())
def test_no_row_exceeds_its_observations_and_the_newest_is_always_shown(
    turn_count: int, images_per_row: int, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, images_per_row or 1))
    first = data.draw(st.booleans()) and kept < images_per_row
    rows = rows_of(turn_count, images_per_row=images_per_row, images_kept=kept, first=first)
    for row in rows:
        observations = [text for text in row if text.startswith("L")]
        assert len(observations) <= (images_per_row or turn_count)
        assert row[-1].startswith(("L", "r"))
    assert rows[-1][-1] == f"L{turn_count - 1}"
    shown = [text for row in rows for text in row if text.startswith("L")]
    assert {f"L{number}" for number in range(turn_count)} == set(shown)
