"""Lenient rules for replies that follow no strict grammar. Disabled unless named in the settings; each use is recorded.

Replies that they parse are never counted as "parsed", so they earn no reward for form. Pure; each rule raises
`ParseError` if it does not apply.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta

from cuaenv.agent_text.values import ParseError, type_action, wheel_clicks
from cuaenv.client import Click, PressKeys, Scroll, Wait
from trainer.agent.coordinates import Picture
from trainer.agent.grammars.grammar import Grammar, Intent, Reader, intent
from trainer.agent.grammars.tool_calls import object_at

#: The seed system's scroll distance in pyautogui's units; limited to the maximum of the wheel.
_SCROLL_AMOUNT = 300
_WAIT_S = 2.0

_PAIR = re.compile(r"[\[(]\s*(\d{1,5})\s*,\s*(\d{1,5})\s*[\])]")
_CLICK = re.compile(r"\b(?:(double|right|left|triple|middle)[ _-]?)?click", re.IGNORECASE)
_TYPED = re.compile(r"\b(?:type|write|enter)\b[^\"'\n]{0,40}(?:\"([^\"\n]+)\"|'([^'\n]+)')", re.IGNORECASE)
_SCROLLED = re.compile(r"\bscroll(?:ing)?\s+(up|down)\b", re.IGNORECASE)
_WAITED = re.compile(r"\bwait(?:ing)?\b", re.IGNORECASE)
_KEY = r"(?:enter|return|escape|esc|tab|space|backspace|delete|home|end|pageup|pagedown|up|down|left|right|f\d{1,2})"
_MODIFIER = r"(?:ctrl|control|alt|shift|super|win|cmd)"
_KEYS = re.compile(
    rf"\b((?:{_MODIFIER}\s{{0,2}}\+\s{{0,2}}){{1,7}}(?:{_KEY}|[a-z0-9])|(?<=press )(?:the )?{_KEY})\b", re.IGNORECASE
)


def fallbacks_of(grammar: type[Grammar], names: Sequence[str]) -> dict[str, Reader]:
    """Return a grammar's lenient rules of these names. Raises: ValueError: One is unknown, or it has none."""
    unknown = [name for name in names if name not in FALLBACKS]
    if unknown:
        raise ValueError(f"unknown fallback {', '.join(unknown)}; choose from {', '.join(FALLBACKS)}")
    parse_arguments = grammar.parse_arguments
    if parse_arguments is None:
        if names:
            raise ValueError(f"grammar {grammar.name} has no fallbacks; got {', '.join(names)}")
        return {}

    def bare_json(text: str, _picture: Picture) -> Sequence[Intent]:
        start = text.find("{")
        if start < 0:
            raise ParseError("no JSON")
        value, _ = object_at(text, start)
        arguments = value.get("arguments", value)
        if not isinstance(arguments, dict):
            raise ParseError("no arguments")
        return [parse_arguments(arguments)]

    return {name: _PROSE.get(name, bare_json) for name in FALLBACKS if name in names}


def _wait_word(text: str, _picture: Picture) -> Sequence[Intent]:
    if not _WAITED.search(text):
        raise ParseError("no wait")
    return [intent(Wait(timedelta(seconds=_WAIT_S)), "wait", {})]


def _click_words(text: str, _picture: Picture) -> Sequence[Intent]:
    pair, click = _PAIR.search(text), _CLICK.search(text)
    if pair is None or click is None:
        raise ParseError("no click at a point")
    return [_click(click[1], (int(pair[1]), int(pair[2])))]


def _click(word: str | None, at: tuple[int, int]) -> Intent:
    match (word or "left").lower():
        case "double":
            return intent(Click(*at, count=2), "double_click", {"coordinate": list(at)})
        case "triple":
            return intent(Click(*at, count=3), "triple_click", {"coordinate": list(at)})
        case "right":
            return intent(Click(*at, button="right"), "right_click", {"coordinate": list(at)})
        case "middle":
            return intent(Click(*at, button="middle"), "middle_click", {"coordinate": list(at)})
        case _:
            return intent(Click(*at), "left_click", {"coordinate": list(at)})


def _quoted_type(text: str, _picture: Picture) -> Sequence[Intent]:
    match = _TYPED.search(text)
    if match is None:
        raise ParseError("no quoted text to type")
    words = match[1] or match[2]
    return [intent(type_action(words), "type", {"text": words})]


def _key_names(text: str, _picture: Picture) -> Sequence[Intent]:
    match = _KEYS.search(text)
    if match is None:
        raise ParseError("no key")
    keys = [key.strip().lower() for key in match[1].removeprefix("the ").split("+")]
    return [intent(PressKeys(tuple(keys)), "key", {"keys": keys})]


def _scroll_words(text: str, _picture: Picture) -> Sequence[Intent]:
    match = _SCROLLED.search(text)
    if match is None:
        raise ParseError("no scroll")
    amount = wheel_clicks(_SCROLL_AMOUNT if match[1].lower() == "down" else -_SCROLL_AMOUNT, "scroll")
    return [intent(Scroll(dy=amount), "scroll", {"direction": match[1].lower()})]


_PROSE: Mapping[str, Reader] = {
    "wait_word": _wait_word,
    "click_words": _click_words,
    "quoted_type": _quoted_type,
    "key_names": _key_names,
    "scroll_words": _scroll_words,
}

#: In order of use: the most specific rule first.
FALLBACKS = ("bare_json", "click_words", "quoted_type", "key_names", "scroll_words", "wait_word")
