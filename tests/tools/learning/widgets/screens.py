"""Record labelled screens of real widgets, which `trainer learn base` shows as well (`base.recorded`).

    python -m tests.tools.learning.widgets.screens tasks --count 2000 out/screens.json
    envd serve --hypervisor oci: --config widgets.toml --tasks out/screens.json
    python -m tests.tools.learning.widgets.screens record --envd 127.0.0.1:50051 out/screens.json out/screens

A task is an arrangement of widgets in words that no probe shows; it asks nothing. Names, places and states are those of
the accessibility tree.
"""

import argparse
import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random

from PIL import Image

from cuaenv.client import AsyncEnvClient, Click, Element, View
from envd.drawn.desktop.canvas import Rect
from envd.drawn.questions import SeenWidget
from envd.drawn.screens import ScreenOptions, arrangement
from envd.drawn.suite.desk import COLOURS, cell_of
from envd.drawn.words import vocabulary
from tests.tools.learning.widgets.suite import with_windows

_KINDS = {"push-button": "button", "check-box": "box", "label": "label", "text": "field", "combo-box": "menu"}
_NOT_REAL = ("chip", "bin", "item", "power")
#: Of Openbox's window: its title, and the middle of its close button from the right and from the top.
_TITLE_PX, _CLOSE_PX = 22, (11, 11)
#: Share of the screens with menus that show an open one.
_OPEN_MENUS = 0.5


def tasks(count: int) -> Iterator[dict[str, object]]:
    """Yield tasks with an arrangement of widgets each."""
    sample = vocabulary(is_unseen=False, seed=0)
    options = ScreenOptions(width_px=512, height_px=320)
    number = 0
    for tried in itertools.count():
        rng = Random(f"recorded {tried}")
        try:
            desk = arrangement(options, sample(rng), rng)
        except (ValueError, IndexError):
            # More widgets than cells, or than words.
            continue
        if number == count:
            return
        for form in desk.forms:
            form.widgets = [widget for widget in form.widgets if widget["kind"] not in _NOT_REAL]
        desk.do("look at the screen")
        entry = {**desk.entry(), "checker": {"kind": "file_text", "path": "/nothing", "equals": ""}}
        yield {"name": str(number), "level": 1, **with_windows(entry, rng.choice(("plain", "coloured")))}
        number += 1


def widgets_of(elements: Sequence[Element], picture: Image.Image) -> Iterator[SeenWidget]:
    """Yield what can be seen, from the elements of a screen."""
    window, frame = "", Rect(0, 0, 0, 0)
    options = {each.name: Rect(*each.box) for each in elements if each.role == "table-cell"}
    for name, rect in options.items():
        yield SeenWidget("option", rect, name=name, text=name)
    menus = [Rect(*each.box) for each in elements if each.role == "window"]
    # A frame is under an open menu, too, but its title and its close button are not.
    uncovered = [
        each
        for each in elements
        if each.role == "frame" or not any(Rect(*each.box).intersect(menu).area for menu in menus)
    ]
    for element in uncovered:
        rect, name = Rect(*element.box), element.name
        if element.role == "frame":
            window, frame = name, rect
            # The panel shows its text too, but what is named is the window.
            yield SeenWidget("title", Rect(rect.x, rect.y, rect.w - 60, _TITLE_PX), name=name, text=name, window=name)
            right, down = _CLOSE_PX
            yield SeenWidget("close", Rect(rect.right - right - 8, rect.y + down - 8, 16, 16), window=name)
        elif kind := _KINDS.get(element.role):
            cell = cell_of(Rect(rect.x - frame.x, rect.y - frame.y, rect.w, rect.h))
            colour = ""
            if kind in ("field", "menu"):
                name = _label_above(uncovered, element)
            elif not name:
                colour = _colour(picture.getpixel(rect.center))  # type: ignore[arg-type]
            text = element.value if kind in ("field", "menu") else name
            is_ticked = "checked" in element.states if kind == "box" else None
            yield SeenWidget(
                kind, rect, name=name, text=text, colour=colour, window=window, cell=cell, is_ticked=is_ticked
            )


def _label_above(elements: Sequence[Element], entry: Element) -> str:
    x, y, _, _ = entry.box
    above = (
        each for each in elements if each.role == "label" and abs(each.box[0] - x) < 4 and 0 < y - each.box[1] < 50
    )
    return next((each.name for each in above), "")


def _colour(pixel: tuple[int, int, int]) -> str:
    def distance(name: str) -> int:
        return max(abs(one - other) for one, other in zip(COLOURS[name], pixel, strict=True))

    return min(COLOURS, key=distance)


async def record(host: str, names: Sequence[str], directory: Path) -> None:
    """Write the screens of tasks to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    waiting = list(reversed(names))
    view = View(a11y_elements=True)
    with (directory / "screens.jsonl").open("w", encoding="utf-8") as lines:
        async with AsyncEnvClient(host, run="screens") as client:

            async def next_ones() -> None:
                while waiting:
                    name = waiting.pop()
                    rng = Random(name)
                    async with await client.open(f"screens/{name}") as episode:
                        seen = await episode.observe(view)
                        boxes = [each for each in seen.a11y_elements or () if each.role == "check-box"]
                        for each in boxes:
                            if rng.random() < 0.4:
                                await episode.step(Click(*Rect(*each.box).center))
                        menus = [each for each in seen.a11y_elements or () if each.role == "combo-box"]
                        if menus and rng.random() < _OPEN_MENUS:
                            await episode.step(Click(*Rect(*rng.choice(menus).box).center))
                        seen = await episode.observe(view)
                        picture = seen.image.convert("RGB")
                        widgets = [asdict(each) for each in widgets_of(seen.a11y_elements or (), picture)]
                        picture.save(directory / f"{name}.webp", lossless=True)
                        lines.write(json.dumps({"picture": f"{name}.webp", "widgets": widgets}) + "\n")
                        lines.flush()

            await asyncio.gather(*(next_ones() for _ in range(8)))


def main() -> None:
    """Write tasks, or record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("tasks")
    write.add_argument("--count", type=int, default=2000)
    write.add_argument("path", type=Path)
    play = commands.add_parser("record")
    play.add_argument("--envd", default="127.0.0.1:50051")
    play.add_argument("tasks", type=Path)
    play.add_argument("directory", type=Path)
    given = parser.parse_args()
    if given.command == "tasks":
        given.path.parent.mkdir(parents=True, exist_ok=True)
        given.path.write_text(json.dumps({"suite": "screens", "tasks": [*tasks(given.count)]}), encoding="utf-8")
        return
    names = [task["name"] for task in json.loads(given.tasks.read_text(encoding="utf-8"))["tasks"]]
    asyncio.run(record(given.envd, names, given.directory))


if __name__ == "__main__":
    main()
