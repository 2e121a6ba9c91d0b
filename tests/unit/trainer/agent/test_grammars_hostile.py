"""Every reply is parsed or is the model's mistake: parsing never raises, never evaluates, and is fast."""

import ast
import gc
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuaenv.actions import MAX_ACTION_COUNT
from cuaenv.agent_text.values import ParseError
from cuaenv.client import Click, PressKeys, Scroll, TypeText, Wait
from trainer.agent.grammars import FALLBACKS, GRAMMARS, Parsed, Picture, grammar
from trainer.agent.grammars.grammar import MAX_REPLY_CHARS
from trainer.agent.grammars.pyautogui_calls import parse_calls

PICTURE = Picture(1001, 1001, pointer=(100, 200))

DEEP = 40_000
HOSTILE = [
    "<tool_call>" + '{"a":' * DEEP,
    "<tool_call>" + "[" * DEEP,
    "<tool_call>" * 9_000,
    '<tool_call>{"name": "computer_use", "arguments": {"action": "wait", "time": ' + "9" * 50_000 + "}}",
    "<tool_call><function=computer_use>" + "<parameter=a></parameter>" * 3_000,
    "<tool_call><function=computer_use><parameter=action>" + "</parameter>" * 8_000,
    "<answer>" + "-" * DEEP + "1",
    "<answer>" + "(" * DEEP,
    "<answer>pyautogui" + ".a" * DEEP + "()",
    "<answer>pyautogui.click" + "(1)" * 30_000,
    "<answer>pyautogui.write(" + "'a' " * 20_000 + ")",
    "<answer>pyautogui.click(0x" + "f" * 50_000 + ", 1)",
    "<answer>pyautogui.click(1" + "0" * 10_000 + ", 1)",
    "<answer>pyautogui.press(" + "[" * 90 + "]" * 90 + ")",
    "<answer>pyautogui.write('\0')",
    "```python\n" * 9_000,
    "```\n" + "pyautogui.press('a')\n" * 4_000,
    "```python\nlambda: " * 5_000,
    "<action>" * 12_000,
    "<action>sendkey " + "a-" * 40_000,
    "<think>" * 12_000,
    "</think>" * 12_000,
    "\ud800<action>type \ud800</action>",
    "wait " * 20_000,
    "click " * 15_000 + "[1",
    "type " + "a" * 90_000 + '"',
    "[" + "1" * 90_000,
    "ctrl + " * 14_000,
    "x" * (MAX_REPLY_CHARS + 1),
]


def parsers() -> Iterator[Any]:
    for name in GRAMMARS:
        yield name, ()
        if name not in ("anthropic", "openai", "code", "verbs"):
            yield name, FALLBACKS


def check_invariants(parsed: Parsed) -> None:
    """Check the invariants of `Parsed`."""
    assert bool(parsed.error) != bool(parsed.intents)
    assert parsed.parsed == (not parsed.error and parsed.fallback is None)
    assert len(parsed.intents) <= MAX_ACTION_COUNT
    assert len(parsed.error) < 1000
    parsed.error.encode()
    for action in parsed.actions:
        # Actions that the service would refuse as invalid must not be sent.
        match action:
            case Wait():
                assert timedelta(0) < action.duration <= timedelta(seconds=60)
            case Scroll():
                assert -100 <= action.dx <= 100
                assert -100 <= action.dy <= 100
            case TypeText():
                assert 0 < len(action.text.encode()) <= 65_536
            case PressKeys():
                assert 1 <= len(action.keys) <= 8
                assert all(len(key.encode("utf-8")) >= 1 for key in action.keys)
            case Click():
                assert 1 <= action.count <= 10


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_replies_are_mistakes(text: str) -> None:
    for name, fallbacks in parsers():
        check_invariants(grammar(name, fallbacks=fallbacks).parse(text, PICTURE))


_fragments = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", '{"name": "computer_use", "arguments": {"action": ', '"left_click"', '"wait"'),
        *(
            ', "coordinate": [',
            ', "time": ',
            "1e400",
            "NaN",
            "-1",
            "true",
            "null",
            "]",
            "}}",
            '"',
            "<think>",
            "</think>",
        ),
        *("<function=computer_use>", "<parameter=action>", "</parameter>", "</function>", "\n", " ", "<answer>"),
        *("</answer>", "<action>", "</action>", "<done/>", "pyautogui.click(", "pyautogui.write('", "')", ")", "1, 2"),
        *(
            "```python\n",
            "```\n",
            "```",
            "DONE",
            "WAIT",
            "FAIL",
            "sendkey ",
            "type ",
            "wait ",
            "ctrl-s",
            "__import__('os')",
        ),
        *("click [1, 2]", "scroll down", "press Enter", "ctrl+s", "\ud800", "é漢😀", "\0", "\\", "*[1]", "**{}"),
    ]
)
replies = st.lists(_fragments | st.text(max_size=12), max_size=30).map("".join)


@pytest.mark.parametrize(("name", "fallbacks"), list(parsers()))
@given(text=replies)
@example(text="<answer>pyautogui.click(1, 2, 3, 4, 'left', 5, 6, 7)")
def test_any_reply_is_parsed_or_is_a_mistake(name: str, fallbacks: tuple[str, ...], text: str) -> None:
    check_invariants(grammar(name, fallbacks=fallbacks).parse(text, PICTURE))


@given(
    arguments=st.dictionaries(
        st.sampled_from(["action", "coordinate", "keys", "text", "pixels", "time", "status", "direction", "amount"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
            max_leaves=6,
        )
        | st.sampled_from(["left_click", "key", "type", "scroll", "wait", "terminate", "left_click_drag", "answer"]),
    )
)
def test_any_arguments_of_a_call_are_parsed_or_are_a_mistake(arguments: dict[str, object]) -> None:
    for name in ("qwen3-vl", "tool-call"):
        call = json.dumps({"name": "computer_use", "arguments": arguments})
        check_invariants(grammar(name).parse(f"<tool_call>{call}</tool_call>", PICTURE))


@given(
    call=st.dictionaries(
        st.sampled_from(["type", "name", "input", "action", "actions", "arguments", "content", "output"]),
        st.recursive(
            st.none() | st.integers() | st.sampled_from(["message", "text", "tool_use", "computer", "computer_call"]),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "x"]), inner),
            max_leaves=6,
        ),
    )
)
@example(call={"type": [], "name": "computer", "input": {}})
@example(call={"type": {}, "actions": []})
def test_any_block_of_an_api_is_parsed_or_is_a_mistake(call: dict[str, object]) -> None:
    for name in ("anthropic", "openai"):
        check_invariants(grammar(name).parse(json.dumps(call), PICTURE))


def test_a_garbage_collection_that_parses_does_not_break_parsing_of_a_reply() -> None:
    parsed_count = 0

    def parse_once(phase: str, _info: dict[str, int]) -> None:
        nonlocal parsed_count
        if phase == "start" and parsed_count == 0:
            parsed_count = 1
            ast.parse("f(x)")

    gc.callbacks.append(parse_once)
    try:
        with pytest.raises(ParseError, match="there are 350 calls"):
            parse_calls("pyautogui.press('a')\n" * 350, PICTURE)
    finally:
        gc.callbacks.remove(parse_once)
    assert parsed_count == 1
