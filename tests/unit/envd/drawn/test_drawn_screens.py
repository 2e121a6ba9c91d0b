"""Labelled screens: answers that are right, words and fonts that training never shows, and the program's output."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image, ImageFont

from envd.drawn.desktop.canvas import Rect, picture_of
from envd.drawn.questions import Question, _invented_verb
from envd.drawn.screens import ScreenOptions, lettered, screens
from envd.drawn.suite.desk import COLOURS, WORDS, Desk, cell_of
from envd.drawn.words import is_unseen_word, vocabulary

WIDTH, HEIGHT = 512, 320


def options(**more: object) -> ScreenOptions:
    return ScreenOptions(width_px=WIDTH, height_px=HEIGHT, questions=0, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def drawn() -> list[tuple[list[Question], np.ndarray]]:
    """Return screens in the look of the suite's tasks, with their pixels."""
    found: Iterator[tuple[list[Question], bytes]] = islice(screens(options(is_plain=True), 3), 60)
    return [(asked, np.frombuffer(data, np.uint8).reshape(HEIGHT, WIDTH, 3)) for asked, data in found]


def test_equal_seeds_give_equal_screens() -> None:
    one, same, other = (list(islice(screens(options(), seed), 2)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_each_kind_of_question_is_asked_and_has_one_answer(drawn: list[tuple[list[Question], np.ndarray]]) -> None:
    kinds = set()
    for asked, _ in drawn:
        answers: dict[str, object] = {}
        for question in asked:
            kinds.add(question.kind)
            assert sum(map(bool, (question.point, question.reply))) == (question.kind != "ended")
            if question.at is None:
                answer = (question.point, question.to, question.reply)
                assert answers.setdefault(f"{question.text} {question.earlier}", answer) == answer, question
            for point, box in ((question.point, question.box), (question.to, question.to_box)):
                assert (point is None) == (box is None)
                if point is not None and box is not None:
                    assert box.contains(*point)
                    assert Rect(0, 0, WIDTH, HEIGHT).covers(box)
    assert kinds >= {"point", "point_kind", "point_colour", "three_colours", "point_order", "point_next"}
    assert kinds >= {"point_close", "read", "read_order", "read_at", "ticked", "sentence", "later", "ended"}


def test_a_sentence_is_answered_part_by_part(drawn: list[tuple[list[Question], np.ndarray]]) -> None:
    """The answer to a part is that of the question about the widget that it names."""
    later = drags = typed = typed_at = 0
    named = Counter[str]()
    for asked, _ in drawn:
        labelled = {
            found[2]: found[1]
            for question in asked
            if (found := re.fullmatch(r"Point at the (field|menu) (\S+)\.", question.text))
        }
        points = {
            # What a label names is known by that name alone, too.
            re.sub("^the (field|menu) ", "", question.text.removeprefix("Point at ").removesuffix(".")): question.point
            for question in asked
            if question.kind.startswith("point") or question.kind == "three_colours"
        }
        for question in asked:
            if question.kind not in ("sentence", "later", "ended"):
                continue
            text = question.text.removesuffix(".")
            parts = re.split("; |, then | and then ", text[0].lower() + text[1:])
            expected = [answer for part in parts for answer in answers_to(part, points)]
            answers = [*question.earlier, question.answer]
            assert answers == [*expected, {}][: len(answers)]
            assert (question.kind == "ended") == (len(answers) > len(expected))
            later += question.kind == "later"
            drags += "to" in question.answer
            typed += "reply" in question.answer and " at " not in text
            typed_at += "reply" in question.answer and " at " in text
            named.update(labelled[part.split()[-1]] for part in parts if part.split()[-1] in labelled)
            named["close"] += "the close button of" in text
    assert min(later, drags, typed, typed_at) > 20
    assert min(named["field"], named["menu"], named["close"]) > 3, named


def answers_to(part: str, points: dict[str, tuple[int, int] | None]) -> list[dict[str, object]]:
    """Return the answers to a part of a sentence."""
    if found := re.fullmatch(r"spell (\S+)(?: at (.+))?", part):
        word, name = found.groups()
        typed: dict[str, object] = {"reply": word}
        return [{"point": points[name]}, typed] if name else [typed]
    if found := re.fullmatch("trace (.+) to (.+)", part):
        return [{"point": points[found[1]], "to": points[found[2]]}]
    # The longest: a title's name ends that of its close button, too.
    return [{"point": points[max((name for name in points if part.endswith(f" {name}")), key=len)]}]


def test_a_question_about_a_later_part_comes_alone() -> None:
    asked = [questions for questions, _ in islice(screens(ScreenOptions(width_px=WIDTH, height_px=HEIGHT), 5), 200)]
    later = [questions for questions in asked if questions[0].earlier]
    assert 15 < len(later) < 60
    assert all(len(questions) == 1 for questions in later)
    assert not any(question.earlier for questions in asked if questions not in later for question in questions)


def test_no_sentence_has_a_verb_of_a_tasks_instruction(drawn: list[tuple[list[Question], np.ndarray]]) -> None:
    verbs = {"press", "tick", "write", "set", "drag", "close", "copy"}
    texts = [question.text.lower() for asked, _ in drawn for question in asked]
    first_words = [part.split()[0] for text in texts for part in re.split("; |, then | and then ", text)]
    assert len(first_words) > 1000
    assert not verbs.intersection(first_words)


def test_an_invented_verb_is_none_of_a_tasks_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    words = iter(("Set", "PRESS", "kelo"))
    monkeypatch.setattr("envd.drawn.questions.invented_word", lambda _: next(words))
    assert _invented_verb(Random(0)) == "kelo"


def test_a_screen_that_never_has_room_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envd.drawn.suite.desk._CELL_H", 1)
    with pytest.raises(ValueError, match="empty range"):
        next(screens(options(), 1))


def test_an_entry_lies_in_the_row_below_its_label_wherever_that_is_in_its_cell() -> None:
    for seed in range(40):
        desk = Desk(Random(seed))
        label = desk.place(desk.forms[0], rows=2)
        column, row = cell_of(label)
        assert cell_of(Rect(label.x, label.y + label.h + 4, label.w, 40)) == (column, row + 1)


def test_unseen_screens_ask_about_unseen_words_alone() -> None:
    """A name that all screens have, such as a button of the panel, would be counted as read."""
    named = [
        question.reply if question.kind == "read_at" else question.text.removesuffix(".").split()[-1]
        for asked, _ in islice(screens(options(is_unseen=True), 4), 20)
        for question in asked
        if question.kind in ("point", "point_kind", "read_at")
    ]
    assert len(named) > 100
    assert [word for word in named if not is_unseen_word(word) and word != "power"] == []


def test_coloured_widgets_and_ticks_are_where_the_answers_say(drawn: list[tuple[list[Question], np.ndarray]]) -> None:
    coloured, ticked = 0, {"yes": 0, "no": 0}
    for asked, pixels in drawn:
        boxes = {question.text.split()[-1][:-1]: question.box for question in asked if "the box" in question.text}
        for question in asked:
            if question.kind in ("three_colours", "point_colour"):
                x, y = question.point or (0, 0)
                assert tuple(pixels[y, x]) == COLOURS[question.text.split()[3]]
                coloured += 1
            name = question.text.split()[1]
            if question.kind == "ticked" and (box := boxes.get(name)) is not None:
                # The middle of the mark.
                is_dark = pixels[box.y + box.h // 2, box.x + 11].max() < 80
                assert is_dark == (question.reply == "yes")
                ticked[question.reply] += 1
    assert coloured > 20
    assert min(ticked.values()) > 20


def test_unseen_screens_have_words_and_fonts_that_no_other_screen_has() -> None:
    from random import Random

    seen, unseen = ({*vocabulary(flag, 1)(Random(0))} for flag in (False, True))
    assert len(seen) > 50
    assert len(unseen) > 30
    assert all(map(is_unseen_word, unseen))
    assert not any(map(is_unseen_word, seen))
    assert not any(map(is_unseen_word, WORDS))
    fonts = tuple(Path(f"/fonts/{index}.ttf") for index in range(40))
    parts = [set(options(fonts=fonts, is_unseen=flag).chosen_fonts) for flag in (False, True)]
    assert parts[0] | parts[1] == set(fonts)
    assert not parts[0] & parts[1]
    assert parts[1]


def test_texts_in_the_desktops_own_font_are_those_of_its_canvas() -> None:
    ink, paper = (10, 200, 30), (240, 3, 99)
    wanted = picture_of(90, 36, lambda canvas: canvas.text(0, 0, "kite9", ink=ink, paper=paper, scale=2))
    assert np.array_equal(lettered(None, "kite9", ink, paper, 2), wanted)


def test_texts_in_other_fonts_have_several_heights(tmp_path: Path) -> None:
    built_in = ImageFont.load_default(14)
    assert isinstance(built_in, ImageFont.FreeTypeFont)
    path = tmp_path / "font.ttf"
    path.write_bytes(built_in.path.getvalue())  # type: ignore[union-attr]  # it is in memory
    heights = []
    for size in (0.6, 1.0):
        ink = lettered((path, size), "H", (255, 255, 255), (0, 0, 0), 2) & 255
        rows = np.flatnonzero(ink.max(axis=1) > 128)
        heights.append(len(rows))
        assert abs(rows.mean() - len(ink) / 2) < 6, "it lies in the middle of its line"
    assert 0.5 < heights[0] / heights[1] < 0.7


def recording(folder: Path, *, size: tuple[int, int] = (WIDTH, HEIGHT)) -> Path:
    folder.mkdir()
    Image.new("RGB", size, (1, 2, 3)).save(folder / "one.png")
    widgets = [
        {"kind": "button", "rect": [10, 20, 100, 40], "name": "kite", "text": "kite", "window": "nest", "cell": [0, 0]},
        {
            "kind": "box",
            "rect": [130, 20, 100, 40],
            "name": "rose",
            "text": "rose",
            "is_ticked": True,
            "window": "nest",
            "cell": [1, 0],
        },
        {"kind": "label", "rect": [260, 0, 100, 20], "name": "oak", "text": "oak", "cell": None},
        {"kind": "menu", "rect": [260, 20, 100, 40], "name": "oak", "text": "elm", "cell": None},
        {"kind": "option", "rect": [260, 60, 100, 40], "name": "elm", "text": "elm", "cell": None},
        {"kind": "field", "rect": [380, 60, 100, 40], "name": "ash", "text": "fig", "cell": None},
    ]
    (folder / "screens.jsonl").write_text(json.dumps({"picture": "one.png", "widgets": widgets}) + "\n")
    return folder


def test_recorded_screens_are_shown_besides_drawn_ones(tmp_path: Path) -> None:
    folder = recording(tmp_path / "real")
    found = list(islice(screens(options(recorded=(folder,)), 1), 60))
    pixels = bytes((1, 2, 3)) * WIDTH * HEIGHT
    shown = [asked for asked, data in found if data == pixels]
    assert 8 < len(shown) < 30
    points = {question.text: question.point for asked in shown for question in asked}
    assert points["Point at kite."] == (60, 40)
    assert points["Point at the box rose."] == (180, 40)
    assert points["Point at what is right of kite."] == (180, 40)
    assert points["Point at the menu oak."] == (310, 40)
    assert "Point at elm." not in points, "the menu shows it, too"
    assert "ash" not in " ".join(points), "its label is hidden"
    replies = {question.text: question.reply for asked in shown for question in asked}
    assert replies["Is rose ticked?"] == "yes"


def test_a_recorded_picture_that_is_too_large_to_open_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="real: cannot be shown: Image size"):
        next(screens(options(recorded=(recording(tmp_path / "real"),)), 1))


@pytest.mark.parametrize(
    ("size", "broken", "named"),
    [
        ((640, 320), "", "one.png' has 640x320 pixels; record screens of 512x320"),
        ((WIDTH, HEIGHT), '{"picture": "two.png", "widgets": []}', "two.png"),
        ((WIDTH, HEIGHT), '{"picture": "one.png"}', "widgets"),
        ((WIDTH, HEIGHT), '{"picture": "one.png", "widgets": [{"kind": "box", "rect": [1]}]}', "missing"),
        ((WIDTH, HEIGHT), "[", "cannot be shown"),
        ((WIDTH, HEIGHT), None, "no line"),
    ],
)
def test_a_recording_that_cannot_be_shown_is_named(
    tmp_path: Path, size: tuple[int, int], broken: str | None, named: str
) -> None:
    folder = recording(tmp_path / "real", size=size)
    if broken != "":
        (folder / "screens.jsonl").write_text(broken or "")
    command = [sys.executable, "-m", "envd.drawn.screens", "--seed", "1", "--width", "512", "--height", "320"]
    # A recording that is shown is shown without end.
    ran = subprocess.run([*command, "--recorded", str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"recorded screens {folder}: cannot be shown" in ran.stderr
    assert named in ran.stderr


def test_the_program_writes_a_line_and_pixels_for_each_screen() -> None:
    command = [sys.executable, "-m", "envd.drawn.screens", "--seed", "1", "--width", "512", "--height", "320"]
    with subprocess.Popen([*command, "--questions", "5"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(2):
            line = json.loads(process.stdout.readline())
            assert len(line["questions"]) == (1 if "earlier" in line["questions"][0] else 5)
            assert len(process.stdout.read(512 * 320 * 3)) == 512 * 320 * 3
        process.stdout.close()
        assert process.wait(60) in (0, 1, 120), "it ends once its reader is gone"
