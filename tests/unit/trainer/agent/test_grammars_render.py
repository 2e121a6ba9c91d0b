"""Rendered replies are parsed back to the same actions."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuaenv.client import (
    Action,
    Click,
    Done,
    Drag,
    Fail,
    KeyDown,
    KeyUp,
    MouseDown,
    MouseUp,
    Move,
    PressKeys,
    Scroll,
    TypeText,
    Wait,
)
from trainer.agent.grammars import GRAMMARS, Picture, UnsupportedAction, grammar, split_actions

PICTURE = Picture(1001, 1001, pointer=(100, 200))

_coordinate = st.integers(0, 1000)
_key = st.sampled_from(["ctrl", "shift", "alt", "enter", "f5", "a", "7", "pagedown", "tab", "Return"])
_keys = st.lists(_key, min_size=1, max_size=8).map(tuple)
_modifiers = st.lists(st.sampled_from(["ctrl", "shift", "alt"]), max_size=2, unique=True).map(tuple)
_text = st.text(min_size=1, max_size=40)
_button = st.sampled_from(["left", "middle", "right"])
_point: st.SearchStrategy[dict[str, int]] = st.one_of(
    st.fixed_dictionaries({}), st.fixed_dictionaries({"x": _coordinate, "y": _coordinate})
)
_start: st.SearchStrategy[dict[str, int]] = st.one_of(
    st.fixed_dictionaries({}), st.fixed_dictionaries({"start_x": _coordinate, "start_y": _coordinate})
)
_wheel = st.integers(-100, 100).filter(bool)


def _actions(kind: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Action]:
    return st.builds(lambda at, more: kind(**at, **more), fields.pop("at", st.just({})), st.fixed_dictionaries(fields))


actions: st.SearchStrategy[Action] = st.one_of(
    _actions(Move, x=_coordinate, y=_coordinate),
    _actions(Click, at=_point, button=_button, count=st.integers(1, 4), modifiers=_modifiers),
    _actions(Drag, at=_start, end_x=_coordinate, end_y=_coordinate, button=_button, modifiers=_modifiers),
    _actions(MouseDown, at=_point, button=_button),
    _actions(MouseUp, at=_point, button=_button),
    _actions(Scroll, at=_point, dy=_wheel, modifiers=_modifiers),
    _actions(Scroll, at=_point, dx=_wheel, modifiers=_modifiers),
    _actions(TypeText, text=_text),
    _actions(PressKeys, keys=_keys),
    _actions(KeyDown, key=_key),
    _actions(KeyUp, key=_key),
    _actions(Wait, duration=st.integers(1, 600).map(lambda tenths: timedelta(seconds=tenths / 10))),
    _actions(Done, answer=st.just("") | _text),
    st.just(Fail()),
)


@pytest.mark.parametrize("name", GRAMMARS)
@given(action=actions)
def test_a_rendered_action_is_parsed_back(name: str, action: Action) -> None:
    form = grammar(name)
    try:
        reply = form.render([action])
    except UnsupportedAction:
        return
    parsed = form.parse(reply, PICTURE)
    assert parsed.parsed, parsed.error

    splits = name in ("tags", "code")
    assert list(parsed.actions) in ([action], split_actions(action) if splits else [action])


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3.5-vl", "anthropic", "openai", "code"])
@given(turn=st.lists(actions.filter(lambda action: not isinstance(action, Done | Fail)), min_size=1, max_size=4))
def test_several_rendered_actions_are_parsed_back_in_order(name: str, turn: list[Action]) -> None:
    form = grammar(name)
    try:
        reply = form.render(turn)
    except UnsupportedAction:
        return
    parsed = form.parse(reply, PICTURE)
    parts = [part for action in turn for part in split_actions(action)]
    assert list(parsed.actions) in (turn, parts)


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize(
    "action", [PressKeys(("ctrl", "s")), TypeText("hello there"), Wait(timedelta(seconds=1)), Done(), Fail()]
)
def test_every_grammar_can_express_keyboard_waits_and_ends(name: str, action: Action) -> None:
    assert grammar(name).parse(grammar(name).render([action]), PICTURE).actions == (action,)


@pytest.mark.parametrize("name", [name for name in GRAMMARS if name != "verbs"])
@pytest.mark.parametrize(
    "action", [Click(1, 2), Click(3, 4, "right"), Click(5, 6, count=2), Scroll(dy=3), Drag(end_x=7, end_y=8)]
)
def test_every_grammar_with_a_mouse_can_express_clicks(name: str, action: Action) -> None:
    assert grammar(name).parse(grammar(name).render([action]), PICTURE).actions == (action,)


def test_grammars_of_one_action_per_reply_refuse_two() -> None:
    for name in ("tool-call", "tags", "verbs"):
        with pytest.raises(UnsupportedAction, match="one action"):
            grammar(name).render([TypeText("a"), TypeText("b")])
