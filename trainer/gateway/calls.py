"""Find reasoning and calls in a reply's text. Pure. A reply that cannot be parsed is text."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cuaenv.agent_text.values import ParseError
from trainer.agent.grammars.tool_calls import FUNCTION, OPEN, json_calls, json_value, tagged_calls
from trainer.gateway.prompts import Call, Prompt

_END_OF_REASONING = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A reply in its parts."""

    text: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    problem: str = ""
    """Why a reply that begins a call has none; empty otherwise."""


def parse(text: str, prompt: Prompt) -> Parsed:
    """Return the parts of a reply; calls only of the prompt's tools."""
    reasoning, mark, said = text.rpartition(_END_OF_REASONING)
    reasoning = reasoning.strip().removeprefix("<think>").strip() if mark else ""
    said = said.strip() if mark else text
    if not prompt.tools or OPEN not in said:
        return Parsed(text=said, reasoning=reasoning)
    try:
        calls = _calls(said, prompt)
    except ParseError as error:
        return Parsed(text=said, reasoning=reasoning, problem=str(error))
    return Parsed(text=said[: said.index(OPEN)].strip(), reasoning=reasoning, calls=calls)


def _calls(text: str, prompt: Prompt) -> tuple[Call, ...]:
    """Return the calls of a reply. Raises: ParseError."""
    in_tags = text[text.index(OPEN) + len(OPEN) :].lstrip().startswith(FUNCTION)
    found = [_tagged(*call, prompt) for call in tagged_calls(text)] if in_tags else [*map(_json, json_calls(text))]
    for call in found:
        if call.name not in prompt.tool_names:
            raise ParseError(f"{call.name[:60]!r} is none of the tools")
    return tuple(shown for call in found for shown in prompt.shown(call))


def _json(call: Mapping[str, object]) -> Call:
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json_value(arguments, "arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ParseError("a call needs a name and an object of arguments")
    return Call(name, arguments, _new_id())


def _tagged(name: str, given: Mapping[str, str], prompt: Prompt) -> Call:
    """Return a call whose arguments are texts: all but those that the schema has as strings are JSON."""
    schemas: dict[str, Mapping[str, Any]] = {
        tool["function"]["name"]: tool["function"]["parameters"].get("properties") or {} for tool in prompt.tools
    }
    properties = schemas.get(name, {})
    return Call(name, {key: _value(text, properties.get(key)) for key, text in given.items()}, _new_id())


def _value(text: str, schema: Any) -> object:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
