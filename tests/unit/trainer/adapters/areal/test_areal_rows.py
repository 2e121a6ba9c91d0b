"""Returns and columns of turns, and AReaL's configuration."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from trainer.adapters.areal.engine import TurnRow
from trainer.adapters.areal.rows import columns, discounted

PAD = 9


def turn(asked: list[int], said: list[int], *, image_count: int = 0) -> TurnRow:
    return TurnRow(
        input_ids=tuple(asked),
        output_ids=tuple(said),
        log_probs=tuple(-0.1 * token for token in said),
        versions=(4,) * len(said),
        images=(Image.new("RGB", (32, 32)),) * image_count,
        value=1.0,
    )


def test_rewards_are_discounted_backwards_from_the_last_turn() -> None:
    assert discounted(2.0, turn_count=3, discount=0.5) == [0.5, 1.0, 2.0]
    assert discounted(1.0, turn_count=2, discount=0.0) == [0.0, 1.0]
    assert discounted(0.0, turn_count=0, discount=0.9) == []


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 30))
def test_each_return_is_the_discount_times_the_next_one(reward: float, discount: float, turn_count: int) -> None:
    returns = discounted(reward, turn_count=turn_count, discount=discount)
    assert returns[-1] == reward
    for earlier, later in pairwise(returns):
        assert earlier == pytest.approx(discount * later)


def test_a_row_is_prompt_then_reply_then_padding() -> None:
    made = columns(
        [turn([1, PAD, PAD], [5], image_count=1), turn([1, PAD, PAD, 5, 2], [6, 7], image_count=1)], image_id=PAD
    )
    assert made == {
        "input_ids": [[1, PAD, PAD, 5, 0, 0, 0], [1, PAD, PAD, 5, 2, 6, 7]],
        "loss_mask": [[0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1]],
        "logprobs": [[0, 0, 0, -0.5, 0, 0, 0], [0, 0, 0, 0, 0, -0.6000000000000001, -0.7000000000000001]],
        "versions": [[-1, -1, -1, 4, 0, 0, 0], [-1, -1, -1, -1, -1, 4, 4]],
        "attention_mask": [[1, 1, 1, 1, 0, 0, 0], [1] * 7],
        "mm_token_type_ids": [[0, 1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0]],
    }


def test_rows_without_images_have_no_column_for_them() -> None:
    assert "mm_token_type_ids" not in columns([turn([1], [5])], image_id=None)
