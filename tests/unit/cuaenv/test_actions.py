"""Actions in every notation: protobuf, JSON object, one key, text, and input events."""

import json
import re
from datetime import timedelta
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from cuaenv import client
from cuaenv.action_codec import FORMS, BadAction, from_json, from_one_key, from_proto, to_json, to_one_key, to_proto
from cuaenv.actions import (
    Action,
    AskUser,
    CallTool,
    Click,
    Done,
    Drag,
    EditFile,
    Fail,
    KeyDown,
    KeyUp,
    ListDirectory,
    MouseDown,
    MouseUp,
    Move,
    PressKeys,
    ReadFile,
    RunShell,
    Scroll,
    ToolAction,
    TypeText,
    Wait,
    WriteFile,
    action_text,
)
from cuaenv.v1 import env_pb2
from envd.desktop.input.plan import InputState, plan
from envd.desktop.observation import Point
from envd.tasks.oracle import parse_action, write_action
from trainer.adapters.actions import ActionForm

#: An action, its one-key form and its text. The JSON object follows from the one-key form.
NOTATIONS: list[tuple[Action, dict[str, Any], str]] = [
    (Move(1, 2), {"move": {"x": 1, "y": 2}}, "move 1,2"),
    (Click(), {"click": {}}, "click"),
    (Click(3, 4), {"click": {"x": 3, "y": 4}}, "click 3,4"),
    (Click(3, 4, count=2), {"click": {"x": 3, "y": 4, "count": 2}}, "double click 3,4"),
    (Click(3, 4, count=5), {"click": {"x": 3, "y": 4, "count": 5}}, "5-fold click 3,4"),
    (
        Click(0, 799, button="right", modifiers=("ctrl",)),
        {"click": {"x": 0, "y": 799, "button": "right", "modifiers": ["ctrl"]}},
        "ctrl+right click 0,799",
    ),
    (Drag(end_x=5, end_y=6), {"drag": {"to_x": 5, "to_y": 6}}, "drag to 5,6"),
    (Drag(1, 2, 5, 6), {"drag": {"x": 1, "y": 2, "to_x": 5, "to_y": 6}}, "drag 1,2 to 5,6"),
    (
        Drag(end_x=5, end_y=6, button="middle", modifiers=("alt",)),
        {"drag": {"to_x": 5, "to_y": 6, "button": "middle", "modifiers": ["alt"]}},
        "alt+drag to 5,6",
    ),
    (MouseDown(), {"mouse_down": {}}, "hold left button"),
    (MouseUp(1, 2, "right"), {"mouse_up": {"button": "right", "x": 1, "y": 2}}, "release right button 1,2"),
    (Scroll(dy=-3, x=9, y=8), {"scroll": {"dy": -3, "x": 9, "y": 8}}, "scroll +0,-3 9,8"),
    (Scroll(dx=-100), {"scroll": {"dx": -100}}, "scroll -100,+0"),
    (TypeText("a\nb"), {"type": "a\nb"}, r"type 'a\nb'"),
    (TypeText(""), {"type": ""}, "type ''"),
    (TypeText("x" * 300), {"type": "x" * 300}, f"type {'x' * 200 + '… (300 characters)'!r}"),
    (PressKeys(("ctrl", "s")), {"press": ["ctrl", "s"]}, "press ctrl+s"),
    (PressKeys(("a",), timedelta(seconds=1.5)), {"press": {"keys": ["a"], "hold_s": 1.5}}, "press a for 1.5 s"),
    (KeyDown("shift"), {"key_down": "shift"}, "hold key shift"),
    (KeyUp("shift"), {"key_up": "shift"}, "release key shift"),
    (Wait(timedelta(seconds=2)), {"wait": 2.0}, "wait 2 s"),
    (Done(), {"done": ""}, "done"),
    (Done("42"), {"done": "42"}, "done '42'"),
    (Fail(), {"fail": ""}, "fail"),
    (Fail("no file"), {"fail": "no file"}, "fail 'no file'"),
    (RunShell("ls -l"), {"run_shell": "ls -l"}, "run 'ls -l'"),
    (RunShell("ls", timedelta(seconds=5)), {"run_shell": {"command": "ls", "timeout_s": 5.0}}, "run 'ls'"),
    (ReadFile("a.txt"), {"read_file": "a.txt"}, "read 'a.txt'"),
    (ReadFile("a", 3, 2), {"read_file": {"path": "a", "first_line": 3, "line_count": 2}}, "read 'a'"),
    (WriteFile("a", "x\ny"), {"write_file": {"path": "a", "content": "x\ny"}}, r"write 'a': 'x\ny'"),
    (WriteFile("a", ""), {"write_file": {"path": "a", "content": ""}}, "write 'a': ''"),
    (EditFile("a", "x", ""), {"edit_file": {"path": "a", "old": "x", "new": ""}}, "edit 'a': 'x' to ''"),
    (ListDirectory("~"), {"list_directory": "~"}, "list '~'"),
    (CallTool("s"), {"call_tool": "s"}, "list tools of s"),
    (
        CallTool("s", "t", '{"n": 1}'),
        {"call_tool": {"server": "s", "tool": "t", "arguments": {"n": 1}}},
        'call s t {"n": 1}',
    ),
    (AskUser("Who?"), {"ask_user": "Who?"}, "ask 'Who?'"),
]
SCREEN = InputState(width_px=1280, height_px=800, pointer=Point(0, 0))
forms = TypeAdapter(ActionForm)


def json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


pixels = st.integers(0, 32767)
buttons = st.sampled_from(("left", "middle", "right"))
names = st.sampled_from(["ctrl", "shift", "a"])
chords = st.lists(names, max_size=2)
texts = st.text(min_size=1, max_size=50)
pauses = st.timedeltas(timedelta(milliseconds=10), timedelta(seconds=60))


def at_the_pointer_or_a_pixel(kind: type[Action], x: str = "x", y: str = "y", **fields: Any) -> Any:
    return st.builds(kind, **fields) | st.builds(kind, **{x: pixels, y: pixels}, **fields)


actions: st.SearchStrategy[Action] = st.one_of(
    st.builds(Move, x=pixels, y=pixels),
    at_the_pointer_or_a_pixel(Click, button=buttons, count=st.integers(1, 10), modifiers=chords),
    at_the_pointer_or_a_pixel(Drag, "start_x", "start_y", end_x=pixels, end_y=pixels, button=buttons, modifiers=chords),
    at_the_pointer_or_a_pixel(Scroll, dy=st.integers(-100, 100), dx=st.integers(-100, 100), modifiers=chords),
    at_the_pointer_or_a_pixel(MouseDown, button=buttons),
    at_the_pointer_or_a_pixel(MouseUp, button=buttons),
    st.builds(TypeText, text=st.text()),
    st.builds(PressKeys, keys=st.lists(names, min_size=1, max_size=3), hold=pauses | st.just(timedelta(0))),
    st.builds(KeyDown, key=names),
    st.builds(KeyUp, key=names),
    st.builds(Wait, pauses),
    st.builds(Done, answer=st.text()),
    st.builds(Fail, explanation=st.text()),
    st.builds(RunShell, texts, st.timedeltas(timedelta(milliseconds=10), timedelta(seconds=120))),
    st.builds(ReadFile, texts, st.integers(1, 9), st.integers(0, 9)),
    st.builds(WriteFile, texts, st.text()),
    st.builds(EditFile, texts, texts, st.text()),
    st.builds(ListDirectory, texts),
    st.builds(CallTool, texts, st.text(max_size=50), st.dictionaries(st.text(), st.integers()).map(json_text)),
    st.builds(AskUser, texts),
)


def test_every_action_of_the_contract_has_all_forms() -> None:
    contract = [field.name for field in env_pb2.Action.DESCRIPTOR.oneofs_by_name["kind"].fields]
    assert [form.wire_name for form in FORMS.values()] == contract
    assert {form.kind for form in FORMS.values()} == set(get_args(client.Action)) == {type(row[0]) for row in NOTATIONS}
    assert {form.kind.__name__ for form in FORMS.values()} <= set(client.__all__)
    schemas = forms.json_schema()["oneOf"]
    assert [schema["properties"]["action"]["const"] for schema in schemas] == list(FORMS)


@pytest.mark.parametrize(("action", "one_key", "text"), NOTATIONS, ids=lambda value: repr(value)[:60])
def test_an_action_has_the_same_meaning_in_every_notation(action: Action, one_key: dict[str, Any], text: str) -> None:
    assert from_proto(env_pb2.Action.FromString(to_proto(action).SerializeToString())) == action
    assert (to_one_key(action), write_action(action)) == (one_key, one_key)
    assert from_one_key(one_key) == parse_action(one_key) == action
    assert forms.validate_json(forms.dump_json(action)) == from_json(to_json(action)) == action
    assert action_text(action) == text
    assert bool(plan(action, SCREEN)) == (action != TypeText("") and not isinstance(action, Done | Fail | ToolAction))


@given(action=actions)
def test_an_action_survives_every_form(action: Action) -> None:
    assert from_proto(to_proto(action)) == action
    assert from_one_key(json.loads(json.dumps(to_one_key(action)))) == action
    assert from_json(json.loads(json.dumps(to_json(action)))) == action


def test_an_objects_fields_are_those_of_the_one_key_form() -> None:
    assert to_json(Drag(1, 2, 3, 4)) == {"action": "drag", "x": 1, "y": 2, "to_x": 3, "to_y": 4}
    assert to_json(PressKeys(("a",))) == {"action": "press", "keys": ["a"]}
    assert to_json(Wait(timedelta(seconds=1.5))) == {"action": "wait", "seconds": 1.5}
    assert from_proto(env_pb2.Action(click=env_pb2.Click())) == Click()
    with pytest.raises(ValueError, match="give both coordinates"):
        to_proto(Click(x=1))


def test_a_schema_states_types_limits_defaults_and_what_is_required() -> None:
    press, drag = FORMS["press"].schema(), FORMS["drag"].schema()
    assert (press["required"], press["additionalProperties"]) == (["action", "keys"], False)
    assert drag["required"] == ["action", "to_x", "to_y"]
    assert press["properties"] == {
        "action": {"type": "string", "const": "press"},
        "keys": {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": 32},
            "minItems": 1,
            "maxItems": 8,
            "description": 'Keys pressed together, such as ["ctrl", "s"].',
        },
        "hold_s": {
            "type": "number",
            "minimum": 0,
            "maximum": 60.0,
            "description": "How long the keys are held.",
            "default": 0.0,
        },
    }


@pytest.mark.parametrize("keys", ["enter", ["enter"], ("enter",)])
def test_one_name_alone_is_one_key(keys: Any) -> None:
    assert PressKeys(keys) == PressKeys(("enter",)) == from_one_key({"press": keys})
    assert Click(modifiers=keys).modifiers == Scroll(dy=1, modifiers=keys).modifiers == ("enter",)
    assert Drag(end_x=1, end_y=2, modifiers=keys).modifiers == ("enter",)


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ("click", "action"),
        ({"x": 1}, "action"),
        ({"action": "explode"}, "action"),
        ({"action": ["click"]}, "action"),
        ({"action": "click", "x": 1}, "click"),
        ({"action": "click", "x": -1, "y": 1}, "click.x"),
        ({"action": "click", "x": 1.5, "y": 1}, "click.x"),
        ({"action": "click", "x": True, "y": 1}, "click.x"),
        ({"action": "click", "x": float("nan"), "y": 1}, "click.x"),
        ({"action": "click", "count": 11}, "click.count"),
        ({"action": "click", "button": "fourth"}, "click.button"),
        ({"action": "click", "modifiers": ["ctrl", ""]}, "click.modifiers[1]"),
        ({"action": "click", "z": 3}, "click.z"),
        ({"action": "move", "x": 1}, "move.y"),
        ({"action": "drag", "x": 1, "y": 1}, "drag.to_x"),
        ({"action": "scroll", "dy": 101}, "scroll.dy"),
        ({"action": "type", "text": 5}, "type.text"),
        ({"action": "type", "text": "\ud800"}, "type.text"),
        ({"action": "press", "keys": []}, "press.keys"),
        ({"action": "press", "keys": 5}, "press.keys[0]"),
        ({"action": "press", "keys": ["a"] * 9}, "press.keys"),
        ({"action": "press", "keys": ["a"], "hold_s": 61}, "press.hold_s"),
        ({"action": "wait", "seconds": 0}, "wait.seconds"),
        ({"action": "wait", "seconds": float("nan")}, "wait.seconds"),
        ({"action": "wait"}, "wait.seconds"),
        ({"action": "move", "x": 10**400, "y": 1}, "move.x"),
        ({"action": "move", "x": float("inf"), "y": 1}, "move.x"),
        ({"action": "wait", "seconds": 10**400}, "wait.seconds"),
        ({"action": "press", "keys": ["a"], "hold_s": -(10**400)}, "press.hold_s"),
    ],
)
def test_a_bad_field_of_an_object_is_named(form: Any, field: str) -> None:
    with pytest.raises(BadAction) as refused:
        from_json(form)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("undo", "action: 'undo' is not one key"),
        ({}, "is not one key"),
        ({"press": "a", "type": "b"}, "is not one key"),
        ({"tap": {}}, "unknown action 'tap'"),
        ({"click": 5}, "click: give a mapping with x, y, button, count, modifiers"),
        ({"wait": -1}, "wait.seconds: -1 s is outside (0 s, 60 s]"),
    ],
)
def test_a_malformed_one_key_form_is_rejected(form: object, words: str) -> None:
    with pytest.raises(BadAction, match=re.escape(words)):
        from_one_key(form)


def test_a_malformed_form_is_an_error_that_frameworks_can_send_as_json() -> None:
    with pytest.raises(ValidationError) as caught:
        forms.validate_python({"action": "click", "x": "left", "y": 1})
    (error,) = json.loads(caught.value.json())
    assert "click.x" in error["msg"]
    assert json.loads(json.dumps(caught.value.errors()))
