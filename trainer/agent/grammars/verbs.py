"""Verb tags for the keyboard: `<action>typeline winver</action>`, the grammar of the Windows seed system.

Its verbs are sendkey, type, typeline and wait; the last action of a reply counts, and `<done/>` anywhere overrides it.
Keys have the names of QEMU's monitor (`ctrl-s`, `ret`, `meta_l-r`). `<fail/>` is an addition: infeasible tasks are
solved by declaring them infeasible.
"""

import math
import re
from collections.abc import Sequence

from cuaenv.agent_text.values import ParseError, monitor_chord, quoted, type_action, wait_action
from cuaenv.client import Action, Done, Fail, PressKeys, TypeText, Wait
from trainer.agent.coordinates import Picture
from trainer.agent.grammars.grammar import Grammar, Intent, UnsupportedAction, intent, only_action

OPEN, CLOSE = "<action>", "</action>"
MAX_WAIT_S = 10.0
_WAIT_S = 2.0
_END = re.compile(r"<(done|fail)\s*/>", re.IGNORECASE)
_VERBS = ("sendkey", "type", "typeline", "wait")
_QEMU_KEYS = {"enter": "ret", "space": "spc", " ": "spc", "-": "minus"}


class Verbs(Grammar):
    """`<action>VERB ARGUMENTS</action>`; without a mouse."""

    name = "verbs"

    def instructions(self, _picture: Picture) -> str:
        return (
            "Act by one tag at the end of your reply; you have a keyboard and no mouse:\n"
            f"- {OPEN}sendkey KEY{CLOSE} presses a key or a chord, such as ret, esc, tab, ctrl-s, alt-f4, meta_l-r\n"
            f"- {OPEN}type TEXT{CLOSE} types a text\n"
            f"- {OPEN}typeline TEXT{CLOSE} types a text and then Enter\n"
            f"- {OPEN}wait SECONDS{CLOSE} waits, at most {MAX_WAIT_S:g}\n"
            "- <done/> says that the task is done\n"
            "- <fail/> says that it cannot be done"
        )

    def read(self, text: str, _picture: Picture) -> Sequence[Intent]:
        end = _END.search(text)
        if end is not None:
            kind = end[1].lower()
            return [intent(Done() if kind == "done" else Fail(), kind, {})]
        start = text.rfind(OPEN)
        if start < 0:
            raise ParseError(f"the reply has no {OPEN}")
        content, _, _ = text[start + len(OPEN) :].partition(CLOSE)
        verb, _, rest = content.strip().partition(" ")
        return [_intent(verb.lower(), _unquote(rest.strip()))]

    def write(self, actions: Sequence[Action]) -> str:
        action = only_action(actions, self.name)
        match action:
            case Done(answer=""):
                return "<done/>"
            case Fail():
                return "<fail/>"
            case PressKeys() if not action.hold:
                command = "sendkey " + "-".join(_QEMU_KEYS.get(key, key) for key in action.keys)
            case TypeText(text=text) if text.endswith("\n"):
                command = f"typeline {_quote(text[:-1])}"
            case TypeText(text=text):
                command = f"type {_quote(text)}"
            case Wait() if action.duration.total_seconds() <= MAX_WAIT_S:
                command = f"wait {action.duration.total_seconds():g}"
            case _:
                raise UnsupportedAction(f"verbs cannot express {action}")
        if OPEN in command or CLOSE in command or _END.search(command):
            raise UnsupportedAction(f"{OPEN} cannot contain tags of this grammar")
        return f"{OPEN}{command}{CLOSE}"


def _quote(text: str) -> str:
    """Quote a text if parsing would strip its ends."""
    edges = text[:1] + text[-1:]
    return f'"{text}"' if text != text.strip() or edges in ('""', "''") or not text else text


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'" else text


def _intent(verb: str, rest: str) -> Intent:
    match verb:
        case "sendkey":
            return intent(monitor_chord(rest), verb, {"key": rest})
        case "type":
            return intent(type_action(rest), verb, {"text": rest})
        case "typeline":
            return intent(type_action(rest + "\n"), verb, {"text": rest})
        case "wait":
            return intent(wait_action(_seconds(rest), "wait", most_s=MAX_WAIT_S), verb, {"seconds": rest})
        case _:
            raise ParseError(f"unknown verb {quoted(verb)}; the verbs are {', '.join(_VERBS)}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return _WAIT_S
    # float() accepts "nan", which is not a valid duration.
    if math.isnan(seconds):
        raise ParseError("wait takes a number of seconds")
    return seconds
