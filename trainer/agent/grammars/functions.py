"""Tools as functions next to a grammar's screen actions: their JSON schemas for the prompt, and their calls. Pure.

Names, arguments and limits are those of the actions in JSON (`cuaenv.action_codec`).
"""

import json
from collections.abc import Mapping, Sequence

from cuaenv.action_codec import FORMS, TOOL_KINDS, ActionForms, BadAction, to_json
from cuaenv.actions import Tool, ToolAction
from cuaenv.agent_text.values import ParseError, quoted
from trainer.agent.grammars.grammar import Intent, UnsupportedAction, intent


def functions_of(tools: Sequence[Tool]) -> Mapping[str, ActionForms]:
    """Return the functions of tools by name."""
    return {name: form for name, form in FORMS.items() if name in TOOL_KINDS and _tool(form) in tools}


def _tool(form: ActionForms) -> Tool | None:
    return form.kind.needs if issubclass(form.kind, ToolAction) else None


def schema_of(name: str, form: ActionForms) -> str:
    """Return a function's JSON schema for the prompt."""
    function = {"name": name, "description": form.schema()["description"], "parameters": parameters_of(form)}
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def parameters_of(form: ActionForms) -> dict[str, object]:
    """Return the JSON schema of a function's arguments."""
    schema = form.schema()
    return {
        "type": "object",
        "properties": {key: value for key, value in _mapping(schema["properties"]).items() if key != "action"},
        "required": [key for key in _list(schema["required"]) if key != "action"],
    }


def function_intent(name: object, arguments: object, functions: Mapping[str, ActionForms], *, tool: str) -> Intent:
    """Return the action of a function's call. Nulls count as absent: strict schemas require all of them.

    Raises:
        ParseError: The function is unknown, or an argument is wrong.
    """
    form = functions.get(name) if isinstance(name, str) else None
    if form is None and name != tool:
        raise ParseError(f"unknown tool {quoted(name)}; call {' or '.join((tool, *functions))}")
    if form is None or not isinstance(arguments, dict):
        raise ParseError(f"the arguments of {name} must be a JSON object, not {quoted(arguments)}")
    try:
        given = {key: value for key, value in arguments.items() if value is not None}
        return intent(form.read(given), form.name, given)
    except BadAction as error:
        raise ParseError(str(error)) from error


def function_call(action: ToolAction, functions: Mapping[str, ActionForms]) -> tuple[str, dict[str, object]]:
    """Return name and arguments of the call of an action. Raises: UnsupportedAction: It is not among the functions."""
    arguments = to_json(action)  # type: ignore[arg-type]
    name = str(arguments.pop("action"))
    if name not in functions:
        raise UnsupportedAction(f"{name} is not enabled; name {action.needs} in the setting tools")
    return name, arguments


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[str]:
    return value if isinstance(value, list) else ()
