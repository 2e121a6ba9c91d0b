"""Questions about labelled screens, each with one right answer."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from envd.drawn.desktop.canvas import Rect
from envd.drawn.words import invented_word

#: Kinds of widgets that are named by the label above them.
LABELLED = ("field", "menu")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
_SIDES = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
#: How often each kind of question is asked, as long as a screen has any of it.
_WEIGHTS = {
    "point": 30, "point_kind": 10, "point_colour": 10, "three_colours": 10, "point_order": 8, "point_next": 10,
    "point_close": 6, "read": 18, "read_order": 6, "read_at": 16, "ticked": 12, "sentence": 50,
}  # fmt: skip
#: Share of screens with one question, which is about a later part of a sentence.
_LATER = 0.15
#: Sentences of each kind about a screen.
_SENTENCES = 8
#: Verbs of the suite's instructions, which no sentence has: a task is never shown.
_TASK_VERBS = ("press", "tick", "write", "set", "drag", "close", "copy")
_VERBS = ("point at", "show", "find", "look at", "go to", "touch", "mark")
_JOINTS = (", then ", ", then ", " and then ", "; ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about a screen. `point`, `point` and `to`, or `reply` is its answer; without any, all is done."""

    kind: str
    text: str
    reply: str = ""
    point: tuple[int, int] | None = None
    box: Rect | None = None
    to: tuple[int, int] | None = None
    to_box: Rect | None = None
    at: tuple[int, int] | None = None
    earlier: tuple[dict[str, object], ...] = ()

    def as_json(self) -> dict[str, object]:
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value is not None and value not in ("", ())}

    @property
    def answer(self) -> dict[str, object]:
        return {name: value for name, value in self.as_json().items() if name in ("reply", "point", "to")}


@dataclass(slots=True)
class SeenWidget:
    """A widget that can be seen."""

    kind: str
    """Such as `button`, `box`, `label`, `field`, `menu`, `title` or `close`."""
    rect: Rect
    name: str = ""
    """Empty if nothing names it."""
    text: str = ""
    """What is written in it."""
    colour: str = ""
    """One of `COLOURS`, for a widget that is known by it."""
    window: str = ""
    cell: tuple[int, int] | None = None
    """Column and row, if widgets lie in a grid."""
    is_ticked: bool | None = None


def questions_about(items: list[SeenWidget], words: Sequence[str], most: int, rng: Random) -> list[Question]:
    """Return questions in random order, each with one right answer."""
    sentences = [*_sentences(items, words, rng)]
    later = [question for question in sentences if question.earlier]
    if most and later and rng.random() < _LATER:
        return later[:1]
    found: dict[str, list[Question]] = {kind: [] for kind in _WEIGHTS}
    for question in [*_by_name(items), *_by_colour(items), *_by_order(items), *_by_side(items), *_by_place(items, rng)]:
        found[question.kind].append(question)
    found["sentence"] = [question for question in sentences if not question.earlier]
    for questions in found.values():
        rng.shuffle(questions)
    asked: list[Question] = []
    while (not most or len(asked) < most) and (kinds := [kind for kind, questions in found.items() if questions]):
        kind = rng.choices(kinds, [_WEIGHTS[kind] for kind in kinds])[0]
        asked.append(found[kind].pop())
    return asked if most else [*asked, *later]


def _point(kind: str, text: str, item: SeenWidget) -> Question:
    return Question(kind=kind, text=text, point=item.rect.center, box=item.rect)


def _texts(items: list[SeenWidget]) -> Counter[str]:
    """Return how often each name or other text is to be seen."""
    return Counter(text for item in items for text in {item.name, item.text})


def _by_name(items: list[SeenWidget]) -> Iterator[Question]:
    names = _texts(items)
    named = Counter((item.kind, item.name) for item in items)
    for item in items:
        if item.kind == "close":
            yield _point("point_close", f"Point at the close button of {item.window}.", item)
        is_label_hidden = item.kind in LABELLED and not named["label", item.name]
        if not item.name or named[item.kind, item.name] > 1 or is_label_hidden:
            continue
        yield _point("point_kind", f"Point at the {item.kind} {item.name}.", item)
        if names[item.name] == 1:
            yield _point("point", f"Point at {item.name}.", item)
        if item.is_ticked is not None:
            yield Question(kind="ticked", text=f"Is {item.name} ticked?", reply="yes" if item.is_ticked else "no")
        if item.kind in LABELLED and item.text:
            yield Question(kind="read", text=f"Read the {item.kind} {item.name}.", reply=item.text)


def _by_colour(items: list[SeenWidget]) -> Iterator[Question]:
    coloured = [item for item in items if item.colour]
    colours = Counter(item.colour for item in coloured)
    are_three = len(coloured) == 3 and all(item.kind == "button" for item in coloured)
    for item in coloured:
        if colours[item.colour] == 1:
            kind = "three_colours" if are_three else "point_colour"
            yield _point(kind, f"Point at the {item.colour} {item.kind}.", item)


def _by_order(items: list[SeenWidget]) -> Iterator[Question]:
    """Yield questions by the order of reading: rows from the top, each from the left."""
    groups: dict[tuple[str, str], list[SeenWidget]] = {}
    for item in items:
        if item.cell is not None and item.kind not in ("label", "power"):
            groups.setdefault((item.kind, item.window), []).append(item)
    windows = {item.window for item in items if item.cell is not None}
    for (kind, window), group in groups.items():
        of = f" of {window}" if len(windows) > 1 else ""
        group.sort(key=lambda item: (item.cell or (0, 0))[::-1])
        for ordinal, item in zip(_ORDINALS, group, strict=False):
            yield _point("point_order", f"Point at the {ordinal} {kind}{of}.", item)
            if item.text and item.kind not in LABELLED:
                yield Question(kind="read_order", text=f"Read the {ordinal} {kind}{of}.", reply=item.text)


def _by_side(items: list[SeenWidget]) -> Iterator[Question]:
    """Yield questions about neighbours in the grid."""
    at = {(item.window, item.cell): item for item in items if item.cell is not None}
    names = Counter(item.name for item in items)
    for item in at.values():
        if not item.name or names[item.name] > 1 or item.cell is None:
            continue
        for side, (right, down) in _SIDES.items():
            other = at.get((item.window, (item.cell[0] + right, item.cell[1] + down)))
            if other is None:
                continue
            yield _point("point_next", f"Point at what is {side} {item.name}.", other)
            if other.text and other.kind not in LABELLED:
                yield Question(kind="read", text=f"Read what is {side} {item.name}.", reply=other.text)


def _by_place(items: list[SeenWidget], rng: Random) -> Iterator[Question]:
    """Yield questions about the text at a point, which is anywhere in a widget."""
    for item in items:
        if item.text:
            x, y, w, h = item.rect
            at = (x + rng.randint(w // 4, 3 * w // 4), y + rng.randint(h // 4, 3 * h // 4))
            yield Question(kind="read_at", text="Read the text at {at}.", reply=item.text, at=at)
            if item.is_ticked is not None:
                yield Question(
                    kind="ticked", text="Is the box at {at} ticked?", reply="yes" if item.is_ticked else "no", at=at
                )


def _sentences(items: list[SeenWidget], words: Sequence[str], rng: Random) -> Iterator[Question]:
    """Yield questions about the first part of a sentence, and about later ones."""
    names, colours = _texts(items), Counter(item.colour for item in items)
    # A label has the name of what it labels, which is meant.
    targets = [(item.name, item) for item in items if item.name and names[item.name] == 1 + (item.kind in LABELLED)]
    targets += [(f"the {item.colour} {item.kind}", item) for item in items if item.colour and colours[item.colour] == 1]
    targets += [(f"the close button of {item.window}", item) for item in items if item.kind == "close"]
    for _ in range(_SENTENCES):
        chosen, spelt = rng.sample(targets, min(len(targets), 6)), rng.sample(words, 3)
        parts: list[Question] = []
        for _ in range(rng.choices((1, 2, 3), (3, 4, 2))[0]):
            draw = rng.random()
            if draw < 0.1:
                word = spelt.pop()
                parts.append(Question(kind="", text=f"spell {word}", reply=word))
            elif draw < 0.3 and chosen:
                # A part of two replies: else all sentences of one part would end with the first reply.
                word, (name, item) = spelt.pop(), chosen.pop()
                parts.append(_point("", f"spell {word} at {name}", item))
                parts.append(Question(kind="", text="", reply=word))
            elif draw < 0.45 and len(chosen) > 1:
                (start, item), (end, other) = chosen.pop(), chosen.pop()
                text = f"trace {start} to {end}"
                box, to_box = item.rect, other.rect
                parts.append(Question(kind="", text=text, point=box.center, box=box, to=to_box.center, to_box=to_box))
            elif chosen:
                name, item = chosen.pop()
                # Any verb: what is done to a widget does not matter to where it is.
                verb = rng.choice(_VERBS) if rng.random() < 0.5 else _invented_verb(rng)
                parts.append(_point("", f"{verb} {name}", item))
        if not parts:
            continue
        text = rng.choice(_JOINTS).join(part.text for part in parts if part.text)
        asked = rng.randrange(len(parts) + 1) if rng.random() < 0.7 else 0
        yield replace(
            parts[asked] if asked < len(parts) else Question(kind="", text=""),
            kind="ended" if asked == len(parts) else "later" if asked else "sentence",
            text=f"{text[0].upper()}{text[1:]}.",
            earlier=tuple(part.answer for part in parts[:asked]),
        )


def _invented_verb(rng: Random) -> str:
    while (verb := invented_word(rng).lower()) in _TASK_VERBS:
        pass
    return verb
