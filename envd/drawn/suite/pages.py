"""Tasks in pages: windows on top of each other, each closed by its last button, and one choice that cannot be undone.

`long` needs 8 to 16 decisive actions. A page that is left too early does not come back, and neither does the wrong item
that is deleted on a page in the middle. `escape` has one or two pages, and a button on each that powers the guest off.
"""

from collections.abc import Callable, Sequence

from envd.drawn.desktop.canvas import Rect
from envd.drawn.suite.desk import COLOURS, DRAWN, Desk, FormOnDesk
from envd.tasks.templates import Entry, Sampler

Page = Callable[[Desk, FormOnDesk], None]

_NEXT = "next"
#: Where each page has the button that closes it, and the power button: in the last row, which nothing else uses.
_CORNER = Rect(x=376, y=224, w=120, h=40)
_POWER = Rect(x=4, y=224, w=120, h=40)


def ticks(count: int) -> Page:
    """Tick all boxes."""

    def page(desk: Desk, form: FormOnDesk) -> None:
        places = sorted((desk.place(form) for _ in range(count)), key=lambda place: (place.y // 48, place.x))
        for place in places:
            word = desk.word()
            form.add("box", word, place)
            form.values[word] = "on"
        steps: list[dict[str, object]] = [{"click": form.middle(place)} for place in places]
        desk.do("tick all boxes", *steps)

    return page


def delete(desk: Desk, form: FormOnDesk) -> None:
    """Delete the item of a colour, and keep the other one."""
    doomed, kept = desk.colours.pop(0), desk.colours.pop(0)
    places = {name: desk.place(form) for name in (doomed, kept)}
    for name, place in places.items():
        form.add("item", name, place, fill=COLOURS[name], needed=name == kept)
    form.values[doomed] = "deleted"
    desk.do(f"delete {doomed}", {"click": form.middle(places[doomed])})


def write(desk: Desk, form: FormOnDesk) -> None:
    """Type a given word into the only field."""
    name, text, place = desk.word(), desk.word(), desk.place(form)
    form.add("field", name, place)
    form.values[name] = text
    desk.do(f"write {text}", {"click": form.middle(place)}, {"type": text})


def _template(suite: str, name: str, pages: Sequence[Page], *, has_power: bool, held_out: bool = False) -> None:
    def build(rng: Sampler) -> Entry:
        desk = Desk(rng, window_count=len(pages), are_pages=True)
        for page, form in zip(pages, desk.forms, strict=True):
            form.free = [cell for cell in form.free if cell[1] < 4]
            page(desk, form)
            form.add("button", _NEXT, _CORNER, closes=True)
            if has_power:
                form.add("power", "power", _POWER)
            form.pressed.append(_NEXT)
            form.is_open = False
            desk.steps.append([{"click": form.middle(_CORNER)}])
        return desk.entry(held_out=held_out)

    build.__name__ = name
    DRAWN.add(3 if suite == "long" else 2, "pages", suite=suite)(build)


def _long(name: str, *pages: Page, held_out: bool = False) -> None:
    _template("long", name, pages, has_power=False, held_out=held_out)


def _escape(name: str, *pages: Page, held_out: bool = False) -> None:
    _template("escape", name, pages, has_power=True, held_out=held_out)


_long("tick_delete_tick", ticks(2), delete, ticks(2))
_long("tick_delete_write", ticks(2), delete, write)
_long("write_delete_tick", write, delete, ticks(2))
_long("tick3_delete_tick3", ticks(3), delete, ticks(3))
_long("tick_write_delete_tick", ticks(2), write, delete, ticks(2))
_long("write_delete_write_tick", write, delete, write, ticks(2))
_long("tick4_write_delete_tick4", ticks(4), write, delete, ticks(4))
_long("write_delete_write", write, delete, write, held_out=True)
_long("tick_delete_write_tick", ticks(2), delete, write, ticks(2), held_out=True)
_long("tick4_delete_tick5", ticks(4), delete, ticks(5), held_out=True)

_escape("delete", delete)
_escape("delete_tick", delete, ticks(1))
_escape("delete_write", delete, write)
_escape("write_delete", write, delete)
_escape("tick_delete", ticks(1), delete, held_out=True)
_escape("delete_delete", delete, delete, held_out=True)
