"""Labelled screens without a daemon: `python -m envd.drawn.screens` samples desktops with forms and asks about them.

The screens have the windows and widgets of the suites' tasks, in random places, states, colours, words and fonts. Each
is written to standard output as one line of JSON, and its pixels: (height, width, 3) uint8 in the order red, green,
blue. The line is an object:

```text
questions: [{kind, text, reply} | {kind, text, point, box} | {kind, text, point, box, to, to_box}, ...]
```

`reply` is the answer to type. `point` is the middle of the widget to point at, and `box` its place [x, y, w, h]; with
`to` and `to_box`, one drags from the first to the second. A text may contain `{at}`, for which the reader of the line
writes `at` in its own units. All are pixels of the screen. A text of several parts, one after the other, is a question
about the first answer, unless the question has `earlier`: the answers before, each `{reply}`, `{point}` or
`{point, to}`. Such a question is about a screen that is seen after these answers, and comes alone; without an answer of
its own, nothing is left to do.

Recorded screens of real programs can be shown in addition: `--recorded` names a directory with a file `screens.jsonl`,
each line an object `{picture, widgets}`: a file in the directory, and the `SeenWidget`s in it.
"""

import argparse
import functools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from PIL.ImageFile import ImageFile

from envd.drawn.desktop.canvas import (
    CELL_HEIGHT_PX,
    CELL_WIDTH_PX,
    Canvas,
    Colour,
    Framebuffer,
    Rect,
    Words,
    picture_of,
)
from envd.drawn.desktop.desktop import DrawnDesktop
from envd.drawn.files import DrawnFiles
from envd.drawn.questions import LABELLED, Question, SeenWidget, questions_about
from envd.drawn.suite.desk import COLOURS, WORDS, Desk, FormOnDesk, cell_of, option_middle
from envd.drawn.words import digest, vocabulary

#: One of so many fonts is one that only unseen screens have.
_UNSEEN_FONTS = 4
#: Longest texts that a widget of one cell shows whole: twice as large as in other windows.
_SHOWN = {"box": 5}
_SHOWN_ELSEWHERE = 6
#: Arrangements tried for a screen: each third has more widgets than cells, or than words.
_TRIES = 100
_WHITE, _BLACK = (255, 255, 255), (0, 0, 0)
#: Share of screens that are recorded ones, if there are any.
_RECORDED = 0.3
#: Heights of texts in other fonts than the desktop's own, as shares of their line's. Real programs leave room.
_SIZES = (0.6, 0.65, 0.7, 0.75, 0.8, 0.9, 1.0)
#: Fonts that show no letters, or letters that are hard to read for people.
_NO_FONTS = re.compile(r"D050000L|Z003|Symbol|Emoji|Dingbats|STIXSiz|cmsy|cmex|cmmi", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenOptions:
    """What screens show."""

    width_px: int
    height_px: int
    fonts: tuple[Path, ...] = ()
    """Files of fonts besides the desktop's own."""
    is_unseen: bool = False
    """Whether they have the words and fonts that other screens never have, and no others."""
    is_plain: bool = False
    """Whether they look as those of the suite's tasks: its words, colours and font."""
    recorded: tuple[Path, ...] = ()
    """Directories of recorded screens, of which a share of the screens are."""
    questions: int = 24
    """Most questions about a screen; 0 for all."""

    @property
    def chosen_fonts(self) -> tuple[Path, ...]:
        """The fonts of the screens, by their names, so that hosts with more fonts agree on the others."""
        return tuple(path for path in self.fonts if (digest(path.stem) % _UNSEEN_FONTS == 0) == self.is_unseen)


class _Blind(Framebuffer):
    """Draws nothing, while the desktop is arranged."""

    def canvas(self, clip: Rect) -> Canvas:  # noqa: ARG002
        return Canvas(self._words, Rect(0, 0, 0, 0))


def screens(options: ScreenOptions, seed: int) -> Iterator[tuple[list[Question], bytes]]:
    """Yield questions and pixels of screens, without end; equal seeds give equal screens.

    Raises:
        ValueError: A recorded screen cannot be read, or has another size.
    """
    sample = (lambda _: WORDS) if options.is_plain else vocabulary(options.is_unseen, seed)
    blind = _Blind(np.empty((options.height_px, options.width_px, 4), np.uint8), shared=False)
    fonts = () if options.is_plain else options.chosen_fonts
    recorded = [screen for folder in options.recorded for screen in _recorded(folder, options)]
    for index in count():
        rng = Random(f"{seed} {index} {options.is_unseen} {options.is_plain}")  # noqa: S311 - not a secret
        if recorded and rng.random() < _RECORDED:
            path, items = rng.choice(recorded)
            yield questions_about(items, sample(rng), options.questions, rng), _pixels(path)
            continue
        for tries_left in reversed(range(_TRIES)):
            try:
                files_of_guest = DrawnFiles()
                desktop = DrawnDesktop(blind, files=files_of_guest, is_drawn=True)
                words = sample(rng)
                items = _arranged(desktop, files_of_guest, options, words, rng)
                break
            except (ValueError, IndexError):
                # More widgets than cells, or than words.
                if not tries_left:
                    raise
        shown = Framebuffer(np.empty((options.height_px, options.width_px, 4), np.uint8), shared=False)
        is_own = not fonts or (not options.is_unseen and rng.random() < 0.3)
        font = None if is_own else (rng.choice(fonts), rng.choice(_SIZES))
        shown.letters = functools.partial(lettered, font)
        desktop.resize(shown)
        picture = Image.frombuffer("RGB", (options.width_px, options.height_px), shown.pixels, "raw", "BGRX", 0, 1)
        yield questions_about(items, words, options.questions, rng), picture.tobytes()


def _recorded(folder: Path, options: ScreenOptions) -> Iterator[tuple[Path, list[SeenWidget]]]:
    wanted = options.width_px, options.height_px
    try:
        lines = (folder / "screens.jsonl").read_text(encoding="utf-8").splitlines()
        for line in map(json.loads, lines):
            with Image.open(folder / line["picture"]) as file:
                _require_size(file, wanted)
            yield folder / line["picture"], [_widget_of(widget) for widget in line["widgets"]]
    except (OSError, KeyError, TypeError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"recorded screens {folder}: cannot be shown: {error}") from error
    if not lines:
        raise ValueError(f"recorded screens {folder}: cannot be shown: screens.jsonl has no line")


def _widget_of(line: dict[str, Any]) -> SeenWidget:
    cell = line.get("cell")
    return SeenWidget(**{**line, "rect": Rect(*line["rect"]), "cell": tuple(cell) if cell else None})


def _pixels(path: Path) -> bytes:
    try:
        with Image.open(path) as file:
            return file.convert("RGB").tobytes()
    except OSError as error:
        raise ValueError(f"recorded screen {path}: cannot be shown: {error}") from error


def _require_size(picture: ImageFile, wanted: tuple[int, int]) -> None:
    if picture.size != wanted:
        found, wanted_text = ("{}x{}".format(*size) for size in (picture.size, wanted))
        raise ValueError(f"{picture.filename!r} has {found} pixels; record screens of {wanted_text}")


# The desktop


def _arranged(
    desktop: DrawnDesktop, files_of_guest: DrawnFiles, options: ScreenOptions, words: Sequence[str], rng: Random
) -> list[SeenWidget]:
    """Open windows on a desktop; return the widgets that can be seen."""
    desk = arrangement(options, words, rng)
    items: list[SeenWidget] = []
    for form in desk.opened:
        files_of_guest[form.path] = form.as_json().encode()
        desktop.launch("form", form.path)
    for form in desk.forms:
        ticked = [each for each in form.widgets if each["kind"] == "box" and rng.random() < 0.5]
        for each in ticked:
            _click(desktop, *_middle(form, each))
        items += _items_of(form, [str(each["name"]) for each in ticked])
    items = _with_open_menu(items, desktop, desk, rng)
    if not options.is_unseen:
        # Their names are the same on all screens.
        items += _plain_items(desktop)
    return _uncovered(items, desktop, desk)


def arrangement(options: ScreenOptions, words: Sequence[str], rng: Random) -> Desk:
    """Return windows full of widgets. Raises: ValueError, IndexError: There is no room for them, or no word."""
    desk = Desk(rng, window_count=rng.choice((1, 1, 2)), words=words)
    for form in desk.forms:
        if not options.is_plain:
            form.theme = _theme(rng)
            form.is_alone = form.is_alone and rng.random() < 0.85
        _fill(desk, form, rng, options)
    return desk


def _fill(desk: Desk, form: FormOnDesk, rng: Random, options: ScreenOptions) -> None:
    """Add widgets of all kinds."""
    half = len(form.free) // 10
    kinds = rng.choices(("button", "box", "chip", "bin", "label"), (8, 6, 1, 1, 1), k=rng.randint(half, 5 * half))
    for _ in range(rng.choice((0, 0, 1, 2)) if half > 1 else rng.choice((0, 1))):
        kinds.append(rng.choice(LABELLED))
    if desk.colours and rng.random() < 0.45:
        for name in [desk.colours.pop(0) for _ in range(min(3, len(desk.colours)))]:
            red, green, blue = COLOURS[name]
            if not options.is_plain:
                red, green, blue = (min(255, max(0, value + rng.randint(-14, 14))) for value in (red, green, blue))
            kind = "button" if rng.random() < 0.8 else "item"
            form.add(kind, name, desk.place(form), fill=(red, green, blue))
    if rng.random() < 0.08:
        form.add("power", "power", desk.place(form))
    # Those that need two cells one above the other first.
    for kind in sorted(kinds, key=lambda kind: kind not in LABELLED):
        if kind in LABELLED:
            _add_labelled(desk, form, kind, rng)
        else:
            longest = _SHOWN.get(kind, _SHOWN_ELSEWHERE)
            form.add(kind, _short(desk, longest), desk.place(form))


def _add_labelled(desk: Desk, form: FormOnDesk, kind: str, rng: Random) -> None:
    name, texts = _short(desk, _SHOWN_ELSEWHERE), [_short(desk, _SHOWN_ELSEWHERE) for _ in range(3)]
    label = desk.place(form, rows=2, below=3 if kind == "menu" and rng.random() < 0.7 else 0)
    form.add("label", name, label)
    entry = Rect(label.x, label.y + label.h + 4, label.w, 40)
    text = rng.choice((texts[0], texts[0], ""))
    if kind == "field":
        form.add(kind, name, entry, text=text, locked=rng.random() < 0.5)
    else:
        form.add(kind, name, entry, options=texts, text=text)


def _short(desk: Desk, longest: int) -> str:
    while len(word := desk.word()) > longest:
        pass
    return word


def _with_open_menu(items: list[SeenWidget], desktop: DrawnDesktop, desk: Desk, rng: Random) -> list[SeenWidget]:
    """Open a menu in some screens; return the widgets with its options, without those that they cover."""
    form = desk.opened[-1]
    menus = [each for each in form.widgets if each["kind"] == "menu"]
    if not menus or rng.random() < 0.6:
        return items
    menu = rng.choice(menus)
    place = _place(menu)
    names = [str(name) for name in menu["options"]]  # type: ignore[attr-defined]
    middles = [option_middle(form, place, index) for index in range(len(names))]
    if place.bottom + 36 * len(names) > form.h:
        return items
    _click(desktop, *_middle(form, menu))
    boxes = [Rect(each["x"] - place.w // 2, each["y"] - 18, place.w, 36) for each in middles]
    return [
        *(item for item in items if not any(item.rect.intersect(box).area for box in boxes)),
        *(
            SeenWidget("option", box, name=name, text=name, window=form.title)
            for name, box in zip(names, boxes, strict=True)
        ),
    ]


def _click(desktop: DrawnDesktop, x: int, y: int) -> None:
    desktop.pointer(x, y, 1)
    desktop.pointer(x, y, 0)


def _middle(form: FormOnDesk, widget: dict[str, object]) -> tuple[int, int]:
    place = form.middle(_place(widget))
    return place["x"], place["y"]


def _place(widget: dict[str, object]) -> Rect:
    """Return where a widget is in its form."""
    return Rect(*(int(str(widget[side])) for side in "xywh"))


def _items_of(form: FormOnDesk, ticked: Sequence[str]) -> list[SeenWidget]:
    items = [
        SeenWidget("title", Rect(form.x, form.y, form.w - 28, 28), name=form.title, text=form.title, window=form.title),
        SeenWidget("close", Rect(form.x + form.w - 24, form.y + 4, 20, 20), window=form.title),
    ]
    for each in form.widgets:
        kind, name = str(each["kind"]), str(each["name"])
        rect = _place(each)
        is_filled = "fill" in each
        # Nothing is written on those.
        written = "" if is_filled or kind == "power" else name
        items.append(
            SeenWidget(
                kind,
                Rect(form.x + rect.x, form.y + rect.y, rect.w, rect.h),
                name=written,
                text=str(each.get("text", "")) if kind in LABELLED else written,
                colour=name if is_filled else "",
                window=form.title,
                cell=cell_of(rect),
                is_ticked=name in ticked if kind == "box" else None,
            )
        )
    return items


def _plain_items(desktop: DrawnDesktop) -> list[SeenWidget]:
    """Return the buttons of the panel, and of the windows that are not forms."""
    items: list[SeenWidget] = []
    window = ""
    for element in desktop.elements():
        window = element.name if element.role == "frame" else window
        if element.role == "push-button" and element.name in ("Editor", "Controls", "Count", "Save"):
            items.append(SeenWidget("button", element.rect, name=element.name, text=element.name, window=window))
    return items


def _uncovered(items: Sequence[SeenWidget], desktop: DrawnDesktop, desk: Desk) -> list[SeenWidget]:
    """Leave out what another window covers, even partly. Forms lie above other windows, the later ones on top."""
    titles = [form.title for form in desk.opened]
    rects = {form.title: Rect(form.x, form.y, form.w, form.h) for form in desk.opened}

    def is_seen(item: SeenWidget) -> bool:
        level = titles.index(item.window) if item.window in titles else -1
        return not any(item.rect.intersect(rects[title]).area for title in titles[level + 1 :])

    panel = desktop.framebuffer.bounds.h - 32
    return [item for item in items if (item.rect.bottom <= panel or not item.window) and is_seen(item)]


# Colours, words and letters


#: Ranges of the channels of a button's colour. A light one must not be taken for the white button.
_LIGHT, _DARK = (175, 208), (20, 165)


def _theme(rng: Random) -> dict[str, object]:
    """Return colours with enough contrast to be read."""

    def colour(low: int, high: int) -> Colour:
        return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)

    is_dark = rng.random() < 0.4
    face, ink = (colour(20, 80), colour(200, 255)) if is_dark else (colour(190, 255), colour(0, 80))
    return {"face": face, "ink": ink, "accent": colour(*(_LIGHT if rng.random() < 0.35 else _DARK))}


def font_files(folders: Sequence[Path]) -> tuple[Path, ...]:
    """Return the fonts in some directories that have letters, by name."""
    found = (path for folder in folders for suffix in ("ttf", "otf") for path in folder.rglob(f"*.{suffix}"))
    by_name = {path.stem: path for path in found if not _NO_FONTS.search(path.stem)}
    return tuple(by_name[name] for name in sorted(by_name) if _has_letters(by_name[name]))


def _has_letters(path: Path) -> bool:
    try:
        font = ImageFont.truetype(str(path), 18)
    except OSError:
        return False
    return len({font.getmask(char).getbbox() for char in "aWi"}) == 3


@functools.lru_cache(maxsize=512)
def _sized(path: Path, height_px: int) -> tuple[ImageFont.FreeTypeFont, int]:
    """Return a font for lines of this height, and the row at which its letters begin."""
    size = height_px
    while size > 6:
        font = ImageFont.truetype(str(path), size)
        ascent, descent = font.getmetrics()
        if ascent + descent <= height_px + 2:
            break
        size -= 1
    return font, (height_px - ascent - descent) // 2


_Mask = npt.NDArray[np.uint8]
_Font = tuple[Path, float]
"""A font's file, and the height of its texts as a share of their line's."""


@functools.lru_cache(maxsize=4096)
def _mask(font: _Font | None, text: str, scale: int) -> _Mask:
    """Return how much of each pixel is ink, of 255."""
    if font is None:
        line = np.concatenate([_glyph(char) for char in text], axis=1)
        return line if scale == 1 else line.repeat(scale, axis=0).repeat(scale, axis=1)
    width, height = len(text) * CELL_WIDTH_PX * scale, CELL_HEIGHT_PX * scale
    path, size = font
    letters, top = _sized(path, round(height * size))
    top += (height - round(height * size)) // 2
    length = int(letters.getlength(text)) + 1
    picture = Image.new("L", (max(width, length), height))
    ImageDraw.Draw(picture).text(((picture.width - length) // 2, top), text, fill=255, font=letters)
    if picture.width > width:
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(picture)


@functools.cache
def _glyph(char: str) -> _Mask:
    """Return the mask of a character in the desktop's own font."""
    canvas_px = picture_of(
        CELL_WIDTH_PX, CELL_HEIGHT_PX, lambda canvas: canvas.text(0, 0, char, ink=_WHITE, paper=_BLACK)
    )
    return (canvas_px & 255).astype(np.uint8)


def lettered(font: _Font | None, text: str, ink: Colour, paper: Colour, scale: int) -> Words:
    """Return the picture of a text in a font; None for the desktop's own."""
    return _inks(ink, paper)[_mask(font, text, scale)]


@functools.lru_cache(maxsize=64)
def _inks(ink: Colour, paper: Colour) -> npt.NDArray[np.uint32]:
    """Return the colour of a pixel by its share of ink, as Pillow mixes them."""
    share = np.arange(256, dtype=np.uint32)[:, None]
    mixed: npt.NDArray[np.uint32] = np.array(paper, np.uint32) * (255 - share) + np.array(ink, np.uint32) * share + 128
    channels = ((mixed >> 8) + mixed) >> 8
    colours: npt.NDArray[np.uint32] = (channels @ np.array((1 << 16, 1 << 8, 1))).astype(np.uint32)
    return colours


def main() -> None:
    """Write screens until the reader is gone."""
    parser = argparse.ArgumentParser(prog="python -m envd.drawn.screens")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--height", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--fonts", type=Path, action="append", default=[], help="Directory of fonts; repeat it.")
    parser.add_argument("--recorded", type=Path, action="append", default=[], help="Directory of screens; repeat it.")
    parser.add_argument("--unseen", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--questions", type=int, default=24, help="Most of a screen; 0 for all.")
    given = parser.parse_args()
    options = ScreenOptions(
        width_px=given.width,
        height_px=given.height,
        fonts=font_files(given.fonts),
        recorded=tuple(given.recorded),
        is_unseen=given.unseen,
        is_plain=given.plain,
        questions=given.questions,
    )
    stream = sys.stdout.buffer
    try:
        for questions, pixels in screens(options, given.seed):
            line = json.dumps({"questions": [question.as_json() for question in questions]})
            stream.write(line.encode() + b"\n" + pixels)
    except BrokenPipeError:
        sys.stdout = None
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
