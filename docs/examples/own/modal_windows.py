"""The reward recipes v1 to v12 of Modal's Windows example, kept for comparison and not for training.

    reward: {recipe: "modal_windows:Modal", version: v10}

They parse replies in verb tags (`<action>VERB ARGUMENTS</action>`, `<done/>`) only; to them, replies in another grammar
are prose. Source: modal-labs/multinode-training-guide, pull request 80; each function names its commit.
docs/evidence/rewards.md describes the purpose of each version and how it can be gamed.

v12c, which is v12b with Gaussian noise, is not included: a reward that differs for equal episodes is noise.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from trainer.config import STRICT
from trainer.rewards.facts import Breakdown, EpisodeFacts

_VERBS = frozenset({"sendkey", "type", "typeline", "wait"})
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_DONE = re.compile(r"<done\s*/?>")
_ANY_TAG = re.compile(r"<action>\s*\w+.*?</action>", re.DOTALL)
_VERB_TAG = re.compile(r"<action>\s*(?:sendkey|type|typeline|wait)\b.*?</action>", re.DOTALL)
_KEY_WORTH = {"meta_l-r": 1.0, "ret": 0.5, "ctrl-s": 0.8, "tab": 0.3, "ctrl-a": 0.3}
_KNOWN_KEYS = {
    *("ret", "spc", "tab", "esc", "backspace", "delete", "up", "down", "left", "right", "home", "end", "pgup", "pgdn"),
    *("f1", "f2", "f3", "f4", "f5", "f6", "f7", "f8", "f9", "f10", "f11", "f12"),
    *("ctrl-a", "ctrl-c", "ctrl-s", "ctrl-v", "ctrl-x", "ctrl-z"),
    *("meta_l-r", "meta_l-e", "meta_l-d", "alt-f4", "alt-tab"),
}
_RESPONSE_CHARS = 4096

_Parts = dict[str, float]


@dataclass(slots=True)
class _Counts:
    """Counters of the original environment: the last tag of a reply is performed, and "done" overrides the others."""

    valid: int = 0
    malformed: int = 0
    verbs: set[str] = field(default_factory=set)
    done: bool = False
    worth: float = 0.0


def _split(content: str) -> tuple[str, str]:
    verb, arguments = [*content.split(None, 1), "", ""][:2]
    return verb.lower(), arguments.strip()


def _count(texts: Sequence[str]) -> _Counts:
    counts = _Counts()
    for text in texts:
        contents = _ACTION.findall(text)
        if _DONE.search(text):
            counts.done = True
        elif contents:
            verb, arguments = _split(contents[-1])
            arguments = arguments.strip('"').strip("'")
            counts.valid += 1
            counts.verbs.add(verb)
            counts.worth += _worth(verb, arguments)
        elif "<action" in text or "<done" in text:
            counts.malformed += 1
    counts.verbs &= _VERBS
    return counts


def _worth(verb: str, arguments: str) -> float:
    if verb == "sendkey":
        return _KEY_WORTH.get(_key(arguments), 0.1)
    return {"type": 0.5 if arguments else 0.1, "typeline": 0.6 if arguments else 0.1, "wait": 0.2}.get(verb, 0.0)


def _key(arguments: str) -> str:
    return arguments.replace(" ", "-").lower()


def _at_most(cap: float, parts: _Parts) -> _Parts:
    total = sum(parts.values())
    return {**parts, "cap": cap - total} if total > cap else parts


def _v1(task: float, _texts: Sequence[str]) -> _Parts:
    """a78e0ed: the task score."""
    return {"task": task}


def _v2(task: float, texts: Sequence[str]) -> _Parts:
    """6cd7fb7: a small bonus for any action."""
    c = _count(texts)
    if task >= 0.5:
        return {"task": task}
    return _at_most(0.3, {"actions": min(0.1, 0.02 * c.valid), "verb": 0.05 * bool(c.verbs), "done": 0.05 * c.done})


def _v3(task: float, texts: Sequence[str]) -> _Parts:
    """2235d44: a larger bonus."""
    c = _count(texts)
    if task >= 0.5:
        return {"task": task}
    return _at_most(0.4, {"actions": min(0.15, 0.05 * c.valid), "verb": 0.1 * bool(c.verbs), "done": 0.1 * c.done})


def _v4(task: float, texts: Sequence[str]) -> _Parts:
    """0296ec3: also for malformed tags."""
    if task >= 0.5:
        return {"task": task}
    parts = {name: part for name, part in _v3(task, texts).items() if name != "cap"}
    return _at_most(0.4, {**parts, "malformed": min(0.06, 0.03 * _count(texts).malformed)})


def _v5(task: float, texts: Sequence[str]) -> _Parts:
    """2b6c048: all bonuses at least five times as large."""
    c = _count(texts)
    if task >= 0.5:
        return {"task": 5 * task}
    parts = {
        "malformed": min(0.4, 0.2 * c.malformed),
        "actions": min(1.0, 0.3 * c.valid),
        "verb": 0.5 * bool(c.verbs),
        "second_verb": 0.5 * (len(c.verbs) >= 2),
        "done": 0.5 * c.done,
    }
    return _at_most(3.0, parts)


def _v6(task: float, texts: Sequence[str]) -> _Parts:
    """6578f36: a price per kind of action. All later versions use it as the environment's reward."""
    c = _count(texts)
    if task >= 0.5:
        return {"task": 5 * task}
    parts = {
        "malformed": min(0.3, 0.1 * c.malformed),
        "actions": min(0.6, 0.2 * c.valid),
        "worth": min(2.0, c.worth),
        "second_verb": 0.5 * (len(c.verbs) >= 2),
        "done": 0.3 * c.done,
    }
    return _at_most(4.0, parts)


def _or_format(task: float, texts: Sequence[str], format_parts: _Parts) -> _Parts:
    environment = _v6(task, texts)
    reached = sum(environment.values())
    return environment if reached >= 0.5 or reached >= sum(format_parts.values()) else format_parts


def _v7(task: float, texts: Sequence[str]) -> _Parts:
    """b28a67a: format anywhere in the episode."""
    full = "\n".join(texts)
    parts = {
        "tag": 0.5 * bool(_ANY_TAG.search(full)),
        "verb": 0.3 * bool(_VERB_TAG.search(full)),
        "done": 0.2 * bool(_DONE.search(full)),
    }
    return _or_format(task, texts, parts)


def _v8(task: float, texts: Sequence[str]) -> _Parts:
    """31e1c6a: format per turn."""
    tags = [bool(_ANY_TAG.search(text)) for text in texts]
    only_done = [not tag and bool(_DONE.search(text)) for tag, text in zip(tags, texts, strict=True)]
    verbs = [tag and bool(_VERB_TAG.search(text)) for tag, text in zip(tags, texts, strict=True)]
    count = max(1, len(texts))
    parts = {
        "tag": 0.6 * sum(tags) / count,
        "verb": 0.3 * sum(verbs) / count,
        "done": 0.5 * sum(only_done) / count + 0.1 * any(only_done),
    }
    return _or_format(task, texts, _at_most(1.0, parts))


def _v9(task: float, texts: Sequence[str]) -> _Parts:
    """533a7d2: format anywhere in the episode, in steps."""
    full = "\n".join(texts)
    score = 0.8 if _VERB_TAG.search(full) else 0.5 if _ANY_TAG.search(full) else 0.0
    parts = {"format": score}
    if _DONE.search(full):
        parts = _at_most(1.0, {"format": max(score, 0.3), "done": 0.2})
    return _or_format(task, texts, parts)


def _contents(text: str) -> list[tuple[str, str]]:
    return [_split(content) for content in _ACTION.findall(text)]


def _is_known_key(verb: str, arguments: str) -> bool:
    return verb == "sendkey" and bool(arguments) and (_key(arguments) in _KNOWN_KEYS or len(_key(arguments)) == 1)


def _is_text(verb: str, arguments: str) -> bool:
    return verb == "type" and bool(arguments)


def _v10_quality(texts: Sequence[str]) -> float:
    by_turn = [_contents(text) for text in texts]
    actions = [action for turn in by_turn for action in turn]
    if not actions:
        return 0.0
    score = 0.0
    for verb, arguments in actions:
        if _is_known_key(verb, arguments) or _is_text(verb, arguments):
            score += 0.3
        elif verb in ("typeline", "wait"):
            score += 0.2
        else:
            score += 0.1 if verb == "sendkey" and arguments else 0.05
    quality = min(0.5, score / len(actions))
    quality += 0.15 * any(_is_text(*action) for action in actions)
    quality += 0.15 * any(_is_known_key(*action) for action in actions)
    quality += 0.1 * any(_DONE.search(text) is not None for text in texts)
    quality += 0.1 * all(len(turn) <= 1 for turn in by_turn)
    return min(1.0, quality)


def _v10(task: float, texts: Sequence[str]) -> _Parts:
    """c52172b: environment and quality of actions, times three."""
    return {**_times_three(_v6(task, texts)), "quality": 1.5 * _v10_quality(texts)}


def _v11(task: float, texts: Sequence[str]) -> _Parts:
    """4baadf1: also a bonus for short replies."""
    length = sum(map(len, texts)) if texts else _RESPONSE_CHARS
    return {**_v10(task, texts), "brevity": 0.9 * max(0.0, 1.0 - length / _RESPONSE_CHARS)}


def _times_three(parts: Mapping[str, float]) -> _Parts:
    return {name: 3 * part for name, part in parts.items()}


def _is_great(text: str) -> bool:
    return any(
        _is_known_key(verb, arguments) or _is_text(verb, arguments) or verb in ("typeline", "wait")
        for verb, arguments in _contents(text)
    )


def _v12(task: float, texts: Sequence[str], quality: float) -> _Parts:
    if not texts:
        return {}
    if any(_DONE.search(text) for text in texts):
        quality = min(1.0, quality + 0.2)
    return {**_times_three(_v6(task, texts)), "quality": 3 * quality}


def _v12a(task: float, texts: Sequence[str]) -> _Parts:
    """784f7ba: share of great turns."""
    fraction = sum(map(_is_great, texts)) / max(1, len(texts))
    return _v12(task, texts, fraction if fraction in (0.0, 1.0) else 0.3 + 0.7 * fraction)


def _v12b(task: float, texts: Sequence[str]) -> _Parts:
    """6799189: shares of good and of great turns."""
    good = sum(any(verb in _VERBS for verb, _ in _contents(text)) for text in texts)
    great = sum(map(_is_great, texts))
    return _v12(task, texts, 0.5 * (good + great) / len(texts) if good else 0.0)


VERSIONS: Mapping[str, Callable[[float, Sequence[str]], _Parts]] = {
    version.__name__.removeprefix("_"): version
    for version in (_v1, _v2, _v3, _v4, _v5, _v6, _v7, _v8, _v9, _v10, _v11, _v12a, _v12b)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Modal:
    """One version of that history.

    Raises:
        ValueError: The version is unknown.
    """

    __pydantic_config__: ClassVar = STRICT

    version: str
    """A key of `VERSIONS`."""

    def __post_init__(self) -> None:
        if self.version not in VERSIONS:
            raise ValueError(f"version is {self.version}; choose one of {', '.join(VERSIONS)}")

    def __call__(self, facts: EpisodeFacts) -> Breakdown:
        parts = VERSIONS[self.version](facts.task_score, [turn.text for turn in facts.turns])
        # Rounded, so that different sums of equal rewards do not create a spread within a group.
        total = round(math.fsum(parts.values()), 12)
        return Breakdown(recipe=f"modal_{self.version}", total=total, task_score=facts.task_score, parts=parts)
