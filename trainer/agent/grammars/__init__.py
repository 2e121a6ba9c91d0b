"""Grammars: parse a model's replies to typed actions, and render actions as replies. Users' own are checked once."""

import functools
import inspect
from collections.abc import Sequence

from cuaenv.actions import Tool
from cuaenv.agent_text.values import ParseError
from cuaenv.client import Click, Done
from trainer.agent.coordinates import Picture
from trainer.agent.grammars.anthropic import Anthropic
from trainer.agent.grammars.code import Code
from trainer.agent.grammars.fallbacks import FALLBACKS, fallbacks_of
from trainer.agent.grammars.grammar import Grammar, Intent, Parsed, UnsupportedAction, intent, split_actions
from trainer.agent.grammars.openai import OpenAI
from trainer.agent.grammars.qwen_vl import Qwen3Vl, Qwen35Vl
from trainer.agent.grammars.tags import Tags
from trainer.agent.grammars.tool_call import ToolCall
from trainer.agent.grammars.verbs import Verbs
from trainer.config import InputError, called, is_own, named

_KINDS: Sequence[type[Grammar]] = (Qwen3Vl, Qwen35Vl, Anthropic, OpenAI, ToolCall, Tags, Code, Verbs)
_GRAMMARS = {kind.name: kind for kind in _KINDS}

#: By name, the default first.
GRAMMARS = tuple(_GRAMMARS)
_PICTURE = Picture(1001, 1001)
#: Replies that a model may write.
_TRIALS = ("", "I click the button.", "<action></action>", "{", "click(,)", "[1, 2", "\x00")


def grammar(name: str, *, fallbacks: Sequence[str] = (), tools: Sequence[Tool] = ()) -> Grammar:
    """Return a grammar by its name.

    Args:
        name: One of `GRAMMARS`, or `module:CLASS` of an own subclass of `Grammar`.
        fallbacks: Enabled lenient rules, from `FALLBACKS`.
        tools: Tools that it offers.

    Raises:
        InputError: The grammar or a rule is unknown, or the grammar cannot express tools. Or it is an own class that
            is not a grammar, or cannot read its own replies; see `checked_grammar`.
    """
    kind = checked_grammar(name) if is_own(name) else named("grammar", name, _GRAMMARS)
    if tools and not kind.takes_tools:
        able = ", ".join(each.name for each in _GRAMMARS.values() if each.takes_tools)
        raise InputError(f"grammar {name} cannot express tools; choose one of {able}, or leave tools empty")
    return kind(fallbacks_of(kind, fallbacks), tools)


@functools.cache
def checked_grammar(name: str) -> type[Grammar]:
    """Return an own grammar's class.

    Raises:
        InputError: It cannot be imported, is not a subclass of `Grammar`, lacks a method, or raises another error than
            ParseError for a reply; or its instructions are not text, or it does not read a click as it writes it.
    """
    kind = named("grammar", name, {})
    if not (inspect.isclass(kind) and issubclass(kind, Grammar)):
        raise InputError(f"grammar {name}: it is not a subclass of trainer.agent.grammars.Grammar")
    if missing := sorted(kind.__abstractmethods__):
        raise InputError(f"grammar {name}: it lacks {', '.join(missing)}; see trainer.agent.grammars.Grammar")
    if not isinstance(getattr(kind, "name", None), str):
        raise InputError(f"grammar {name}: it has no name; set the class attribute `name`")
    made = called("grammar", name, kind, {}, ())
    instructions = called("grammar", name, made.instructions, _PICTURE)
    if not isinstance(instructions, str):
        raise InputError(f"grammar {name}: instructions returned a {type(instructions).__name__}; return a text")
    for text in _TRIALS:
        parsed = called("grammar", name, made.parse, text, _PICTURE)
        if not isinstance(parsed, Parsed):
            raise InputError(f"grammar {name}: parse returned a {type(parsed).__name__}; override `read` instead")
    for action in (Click(10, 20), Done()):
        reply = called("grammar", name, made.render, [action])
        parsed = called("grammar", name, made.parse, reply, _PICTURE)
        if parsed.actions != (action,):
            found = parsed.error or parsed.actions
            raise InputError(f"grammar {name}: it writes {action} as {reply!r}, which it reads as {found}")
    return kind


__all__ = [
    "FALLBACKS",
    "GRAMMARS",
    "Grammar",
    "Intent",
    "ParseError",
    "Parsed",
    "Picture",
    "UnsupportedAction",
    "grammar",
    "intent",
    "split_actions",
]
