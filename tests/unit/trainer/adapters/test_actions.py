"""Lists of actions as JSON: their errors name the action and its field. `test_actions.py` of cuaenv has the forms."""

from typing import Any

import pytest

from cuaenv.action_codec import BadAction
from cuaenv.client import Done, TypeText
from trainer.adapters.actions import read_actions


def test_several_actions_may_come_as_json_text() -> None:
    assert read_actions('[{"action": "type", "text": "a"}, {"action": "done"}]') == [TypeText("a"), Done()]


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ([], "actions"),
        ("{", "actions"),
        ('{"action": "done"}', "actions"),
        ("5", "actions"),
        ([{"action": "explode"}], "actions.0.action"),
        ([{"action": "done"}, {"action": "click", "x": -1, "y": 1}], "actions.1.click.x"),
    ],
)
def test_other_input_is_refused_with_the_field(data: Any, field: str) -> None:
    with pytest.raises(BadAction) as refused:
        read_actions(data)
    assert refused.value.field == field
