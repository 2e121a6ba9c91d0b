"""The Qwen models' own grammars: calls of `computer_use`, points normalised to 1000.

Qwen3-VL writes JSON between `<tool_call>` and `</tool_call>`, Qwen3.5-VL writes tags:

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
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from cuaenv.agent_text.values import ParseError, check_arguments, quoted
from cuaenv.client import Action
from trainer.agent.coordinates import Picture, Units
from trainer.agent.grammars.computer_use import TOOL, arguments_of, intent_of, tool_schema
from trainer.agent.grammars.grammar import Grammar, Intent, UnsupportedAction
from trainer.agent.grammars.tool_calls import CLOSE, OPEN, json_calls, json_value

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_JSON = frozenset({"keys", "coordinate", "start_coordinate", "pixels", "time"})


class _QwenVl(Grammar):
    """One or more calls; the tool is between the tags that the model's chat template uses."""

    coordinates: ClassVar[Units] = "normalised"
    parse_arguments = staticmethod(intent_of)
    form: ClassVar[str]
    """How to call the tool, for the prompt."""

    def instructions(self, picture: Picture) -> str:
        """Return the tool and how to call it."""
        return (
            "# Tools\n\nYou have one tool, described by its JSON schema:\n"
            f"<tools>\n{tool_schema(picture)}\n</tools>\n\n"
            f"To use it, end your reply with a call of this form{self.form}"
        )

    def read(self, text: str, _picture: Picture) -> Sequence[Intent]:
        """Parse a reply. Raises: ParseError."""
        return list(self._intents(text))

    def write(self, actions: Sequence[Action]) -> str:
        """Return the calls. Raises: UnsupportedAction."""
        return "\n".join(self._call(arguments_of(action)) for action in actions)

    @staticmethod
    @abstractmethod
    def _intents(text: str) -> Iterator[Intent]: ...

    @staticmethod
    @abstractmethod
    def _call(arguments: Mapping[str, object]) -> str: ...


class Qwen3Vl(_QwenVl):
    """`<tool_call>{"name": "computer_use", "arguments": {"action": ...}}</tool_call>`, one or more."""

    name = "qwen3-vl"
    form = f':\n{OPEN}\n{{"name": "{TOOL}", "arguments": {{"action": ...}}}}\n{CLOSE}'

    @staticmethod
    def _intents(text: str) -> Iterator[Intent]:
        for call in json_calls(text):
            check_arguments(call, ("name", "arguments"), "a call")
            if call.get("name") != TOOL:
                raise ParseError(f"unknown tool {quoted(call.get('name'))}; call {TOOL}")
            arguments = call.get("arguments")
            if not isinstance(arguments, dict):
                raise ParseError(f"arguments must be a JSON object, not {quoted(arguments)}")
            yield intent_of(arguments)

    @staticmethod
    def _call(arguments: Mapping[str, object]) -> str:
        return f"{OPEN}\n{json.dumps({'name': TOOL, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


class Qwen35Vl(_QwenVl):
    """`<tool_call><function=computer_use><parameter=action>...`, one or more."""

    name = "qwen3.5-vl"
    form = (
        f", with a parameter for each argument:\n{OPEN}\n{_FUNCTION}{TOOL}>\n{_PARAMETER}action>\n...\n"
        f"{_END_PARAMETER}\n{_END_FUNCTION}\n{CLOSE}"
    )

    @staticmethod
    def _intents(text: str) -> Iterator[Intent]:
        start = text.find(OPEN)
        if start < 0:
            raise ParseError(f"the reply has no {OPEN}")
        rest = text[start:]
        while rest:
            rest = _skip(rest, OPEN, "a call")
            rest = _skip(rest, _FUNCTION, OPEN)
            name, _, rest = rest.partition(">")
            if name.strip() != TOOL:
                raise ParseError(f"unknown tool {quoted(name)}; call {TOOL}")
            arguments: dict[str, object] = {}
            rest = rest.lstrip()
            while rest.startswith(_PARAMETER):
                name, _, rest = rest.removeprefix(_PARAMETER).partition(">")
                if name in arguments:
                    raise ParseError(f"{quoted(name)} is given twice")
                value_text, rest = _value(rest)
                arguments[name] = _parse_value(name, value_text)
            yield intent_of(arguments)
            if (_END_FUNCTION + CLOSE).startswith("".join(rest.split())):
                return
            rest = _skip(_skip(rest, _END_FUNCTION, "the parameters"), CLOSE, _END_FUNCTION).lstrip()

    @staticmethod
    def _call(arguments: Mapping[str, object]) -> str:
        lines = [OPEN, f"{_FUNCTION}{TOOL}>"]
        for name, value in arguments.items():
            value_text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if _END_PARAMETER in value_text:
                raise UnsupportedAction(f"a parameter cannot contain {_END_PARAMETER}")
            lines += [f"{_PARAMETER}{name}>", value_text, _END_PARAMETER]
        return "\n".join([*lines, _END_FUNCTION, CLOSE])


def _skip(text: str, tag: str, what: str) -> str:
    text = text.lstrip()
    if not text.startswith(tag):
        raise ParseError(f"{tag} must follow {what}")
    return text.removeprefix(tag)


def _value(text: str) -> tuple[str, str]:
    """Return a parameter's text and the rest. A closing tag ends it only if another tag follows."""
    end = text.find(_END_PARAMETER)
    while end >= 0:
        rest = text[end + len(_END_PARAMETER) :].lstrip()
        if rest.startswith((_PARAMETER, _END_FUNCTION)) or _END_FUNCTION.startswith(rest):
            return text[:end].removeprefix("\n").removesuffix("\n"), rest
        end = text.find(_END_PARAMETER, end + 1)
    raise ParseError(f"a parameter has no {_END_PARAMETER}")


def _parse_value(name: str, value_text: str) -> object:
    if name in _JSON:
        return json_value(value_text, name)
    return value_text if name == "text" else value_text.strip()
