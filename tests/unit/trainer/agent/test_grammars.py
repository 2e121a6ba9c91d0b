"""A corpus of replies for each grammar, with their expected actions or errors."""

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from cuaenv import client
from cuaenv.actions import MAX_ACTION_COUNT
from cuaenv.client import Action
from trainer.agent.grammars import GRAMMARS, Picture, grammar

PICTURE = Picture(1001, 1001, pointer=(100, 200))
CORPORA = Path(__file__).parent / "corpora"


def cases() -> Iterator[Any]:
    for name in GRAMMARS:
        for case in yaml.safe_load((CORPORA / f"{name}.yaml").read_text(encoding="utf-8")):
            yield pytest.param(name, case, id=f"{name} {case['it']}")


def expected_action(name: str, fields: Mapping[str, Any]) -> Action:
    values = {
        key.removesuffix("_s"): timedelta(seconds=value)
        if key.endswith("_s")
        else (tuple(value) if isinstance(value, list) else value)
        for key, value in fields.items()
    }
    action: Action = getattr(client, name)(**values)
    return action


@pytest.mark.parametrize(("name", "case"), list(cases()))
def test_a_reply_of_the_corpus_is_parsed(name: str, case: Mapping[str, Any]) -> None:
    parsed = grammar(name, fallbacks=case.get("fallbacks", ())).parse(case["reply"], PICTURE)
    assert list(parsed.actions) == [expected_action(*action) for action in case.get("actions", ())], parsed.error
    assert parsed.fallback == case.get("fallback")
    assert parsed.parsed == ("error" not in case and "fallback" not in case)
    assert case.get("error", "") in parsed.error
    assert bool(parsed.error) == ("error" in case)
    if "kind" in case:
        assert parsed.intents[0].facts.kind == case["kind"]


def test_each_grammar_has_a_corpus_with_a_trimmed_end_and_a_mistake() -> None:
    for name in GRAMMARS:
        corpus = yaml.safe_load((CORPORA / f"{name}.yaml").read_text(encoding="utf-8"))
        assert any("trimmed" in case["it"] for case in corpus)
        assert sum("error" in case for case in corpus) >= 2


def test_the_facts_record_how_the_model_wrote_an_action() -> None:
    reply = '<tool_call>{"name": "computer_use", "arguments": {"action": "key", "keys": ["ctrl", "s"]}}</tool_call>'
    (intent,) = grammar("qwen3-vl").parse(reply, PICTURE).intents
    assert (intent.facts.kind, intent.facts.keys, intent.facts.text) == ("key", ("ctrl", "s"), None)
    assert intent.facts.arguments == {"keys": ["ctrl", "s"]}
    (intent,) = grammar("verbs").parse("<action>typeline dir</action>", PICTURE).intents
    assert (intent.facts.kind, intent.facts.text) == ("typeline", "dir\n")


def test_an_unknown_grammar_is_refused_with_the_list() -> None:
    names = ", ".join(GRAMMARS)
    with pytest.raises(ValueError, match=f"unknown grammar 'xml'; choose one of {re.escape(names)}"):
        grammar("xml")


def test_an_unknown_fallback_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="unknown fallback guess; choose from bare_json"):
        grammar("tags", fallbacks=["wait_word", "guess"])
    with pytest.raises(ValueError, match="code has no fallbacks; got wait_word"):
        grammar("code", fallbacks=["wait_word"])


def test_a_relative_move_needs_a_pointer() -> None:
    parsed = grammar("tags").parse("<answer>pyautogui.move(1, 1)</answer>", Picture(1001, 1001))
    assert "use moveTo" in parsed.error


def test_too_many_actions_are_a_mistake() -> None:
    call = '<tool_call>{"name": "computer_use", "arguments": {"action": "wait", "time": 1}}</tool_call>'
    assert len(grammar("qwen3-vl").parse(call * MAX_ACTION_COUNT, PICTURE).actions) == MAX_ACTION_COUNT
    assert "at most 64" in grammar("qwen3-vl").parse(call * (MAX_ACTION_COUNT + 1), PICTURE).error


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_instructions_show_the_form_of_a_reply(name: str) -> None:
    instructions = grammar(name).instructions(Picture(1312, 736))
    for stop in grammar(name).stop:
        assert stop in instructions or name == "tags"
    if name != "verbs":
        assert "1311" in instructions or "1312" in instructions


def test_every_grammar_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "agent.md").read_text(encoding="utf-8")
    assert [name for name in GRAMMARS if f"`{name}`" not in page] == []
