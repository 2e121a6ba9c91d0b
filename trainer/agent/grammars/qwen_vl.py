"""The Qwen models' own grammars: calls of `computer_use`, points normalised to 1000.

With tools, each of their actions is a function of its own besides `computer_use`. Qwen3-VL writes JSON between
`<tool_call>` and `</tool_call>`, Qwen3.5-VL writes tags:

```text
<tool_call>
<function=computer_use>
<parameter=action>
left_click
</parameter>
<parameter=coordinate>
[500, 320]
</parameter>
</function>
</tool_call>
```

The tags are those of the model's chat template. Lists and numbers are JSON; strings are unquoted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from cuaenv.actions import ToolAction
from cuaenv.agent_text.values import check_arguments
from cuaenv.client import Action
from trainer.agent.coordinates import Picture, Units
from trainer.agent.grammars.computer_use import TOOL, arguments_of, intent_of, tool_schema
from trainer.agent.grammars.grammar import Grammar, Intent, UnsupportedAction
from trainer.agent.grammars.tool_calls import (
    CLOSE,
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    OPEN,
    PARAMETER,
    function_call,
    function_intent,
    functions_of,
    json_calls,
    json_value,
    schema_of,
    tagged_calls,
)

_JSON = frozenset(
    {"keys", "coordinate", "start_coordinate", "pixels", "time", "timeout_s", "first_line", "line_count", "arguments"}
)
#: Texts whose spaces at the ends count.
_VERBATIM = frozenset({"text", "command", "content", "old", "new", "question"})


class Qwen3Vl(Grammar):
    """`<tool_call>{"name": "computer_use", "arguments": {"action": ...}}</tool_call>`, one or more.

    The prompt has the tool between the tags that the model's chat template uses.
    """

    name = "qwen3-vl"
    coordinates: ClassVar[Units] = "normalised"
    takes_tools = True
    parse_arguments = staticmethod(intent_of)
    form = f':\n{OPEN}\n{{"name": "{TOOL}", "arguments": {{"action": ...}}}}\n{CLOSE}'
    """How to call the tool, for the prompt."""

    def instructions(self, picture: Picture) -> str:
        functions = functions_of(self._tools)
        heading, use = "You have one tool, described by its JSON schema", "it, end your reply with a call of this form"
        if functions:
            heading, use = "You have these tools", f"one, end your reply with a call of this form, here of {TOOL}"
        schemas = "\n".join([tool_schema(picture), *(schema_of(*each) for each in functions.items())])
        return f"# Tools\n\n{heading}:\n<tools>\n{schemas}\n</tools>\n\nTo use {use}{self.form}"

    def read(self, text: str, _picture: Picture) -> Sequence[Intent]:
        return list(self._intents(text))

    def write(self, actions: Sequence[Action]) -> str:
        functions = functions_of(self._tools)
        calls = (
            function_call(action, functions) if isinstance(action, ToolAction) else (TOOL, arguments_of(action))
            for action in actions
        )
        return "\n".join(self._call(*call) for call in calls)

    def _intent(self, name: object, arguments: object) -> Intent:
        """Return the action of a call. Raises: ParseError."""
        if isinstance(arguments, str):
            # As in OpenAI's function calls, which these models also know.
            arguments = json_value(arguments, "arguments")
        if name == TOOL and isinstance(arguments, dict):
            return intent_of(arguments)
        return function_intent(name, arguments, functions_of(self._tools), tool=TOOL)

    def _intents(self, text: str) -> Iterator[Intent]:
        for call in json_calls(text):
            check_arguments(call, ("name", "arguments"), "a call")
            yield self._intent(call.get("name"), call.get("arguments"))

    @staticmethod
    def _call(name: str, arguments: Mapping[str, object]) -> str:
        return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


class Qwen35Vl(Qwen3Vl):
    """The same calls in tags: `<tool_call><function=computer_use><parameter=action>...`, one or more."""

    name = "qwen3.5-vl"
    form = (
        f", with a parameter for each argument:\n{OPEN}\n{FUNCTION}{TOOL}>\n{PARAMETER}action>\n...\n"
        f"{END_PARAMETER}\n{END_FUNCTION}\n{CLOSE}"
    )

    def _intents(self, text: str) -> Iterator[Intent]:
        for name, given in tagged_calls(text):
            yield self._intent(name, {key: _parse_value(key, value_text) for key, value_text in given.items()})

    @staticmethod
    def _call(name: str, arguments: Mapping[str, object]) -> str:
        lines = [OPEN, f"{FUNCTION}{name}>"]
        for key, value in arguments.items():
            value_text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if END_PARAMETER in value_text:
                raise UnsupportedAction(f"a parameter cannot contain {END_PARAMETER}")
            lines += [f"{PARAMETER}{key}>", value_text, END_PARAMETER]
        return "\n".join([*lines, END_FUNCTION, CLOSE])


def _parse_value(name: str, value_text: str) -> object:
    if name in _JSON:
        return json_value(value_text, name)
    return value_text if name in _VERBATIM else value_text.strip()
