"""The templates: nine kinds of clauses, alone and combined."""

from collections.abc import Callable, Sequence

from envd.drawn.desktop.canvas import Rect
from envd.drawn.suite.desk import COLOURS, DRAWN, Desk, FormOnDesk, option_middle
from envd.tasks.templates import Entry, Sampler

Clause = Callable[[Desk, FormOnDesk], None]


def press(desk: Desk, form: FormOnDesk) -> None:
    """Press a button."""
    word, place = desk.word(), desk.place(form)
    form.add("button", word, place)
    form.pressed.append(word)
    desk.do(f"press {word}", {"click": form.middle(place)})


def press_colour(desk: Desk, form: FormOnDesk) -> None:
    """Press the button of a colour, among three."""
    names = [desk.colours.pop(0) for _ in range(3)]
    places = [desk.place(form) for _ in names]
    for name, place in zip(names, places, strict=True):
        form.add("button", name, place, fill=COLOURS[name])
    form.pressed.append(names[0])
    desk.do(f"press the {names[0]} button", {"click": form.middle(places[0])})


def tick(desk: Desk, form: FormOnDesk) -> None:
    """Tick a box."""
    word, place = desk.word(), desk.place(form)
    form.add("box", word, place)
    form.values[word] = "on"
    desk.do(f"tick {word}", {"click": form.middle(place)})


def write(desk: Desk, form: FormOnDesk) -> None:
    """Type a given word into a field."""
    name, text = desk.word(), desk.word()
    entry = _labelled(desk, form, "field", name)
    form.values[name] = text
    desk.do(f"write {text} in {name}", {"click": form.middle(entry)}, {"type": text})


def copy(desk: Desk, form: FormOnDesk) -> None:
    """Type into one field what another one shows, perhaps in the other window."""
    source, target, text = desk.word(), desk.word(), desk.word()
    shown_in = desk.rng.choice(desk.forms)
    _labelled(desk, shown_in, "field", source, text=text, locked=True)
    entry = _labelled(desk, form, "field", target)
    form.values[target] = text
    desk.do(f"copy {source} to {target}", {"click": form.middle(entry)}, {"type": text})


def choose(desk: Desk, form: FormOnDesk) -> None:
    """Choose an option of a menu."""
    name, options = desk.word(), [desk.word() for _ in range(3)]
    entry = _labelled(desk, form, "menu", name, below=3, options=options)
    index = desk.rng.randint(0, 2)
    form.values[name] = options[index]
    desk.do(
        f"set {name} to {options[index]}", {"click": form.middle(entry)}, {"click": option_middle(form, entry, index)}
    )


def drag(desk: Desk, form: FormOnDesk) -> None:
    """Drag a chip to one of two bins."""
    chip, other, bins = desk.word(), desk.word(), [desk.word(), desk.word()]
    start, neighbour, *ends = [desk.place(form) for _ in range(4)]
    form.add("chip", chip, start)
    form.add("chip", other, neighbour)
    for name, place in zip(bins, ends, strict=True):
        form.add("bin", name, place)
    form.values[chip] = bins[0]
    end = form.middle(ends[0])
    desk.do(f"drag {chip} to {bins[0]}", {"drag": {**form.middle(start), "to_x": end["x"], "to_y": end["y"]}})


def close(desk: Desk, form: FormOnDesk) -> None:
    """Close a window by its title."""
    form.is_open = False
    desk.do(f"close {form.title}", {"click": form.close_box})


def _labelled(
    desk: Desk,
    form: FormOnDesk,
    kind: str,
    name: str,
    *,
    below: int = 0,
    options: Sequence[str] = (),
    text: str = "",
    locked: bool = False,
) -> Rect:
    """Add a field or a menu with its name above it; return its place."""
    label = desk.place(form, rows=2, below=below)
    entry = Rect(x=label.x, y=label.y + label.h + 4, w=label.w, h=40)
    form.add("label", name, label)
    more = {"text": text, "locked": locked} if kind == "field" else {"options": list(options)}
    form.add(kind, name, entry, **more)
    return entry


def _template(name: str, level: int, *clauses: Clause, windows: int = 1, held_out: bool = False) -> None:
    """Register a template of these clauses, each in one of its windows."""

    def build(rng: Sampler) -> Entry:
        desk = Desk(rng, window_count=windows)
        for clause in clauses:
            # A closed window takes no clicks, so the clauses after a close belong to the other one.
            clause(desk, desk.rng.choice([form for form in desk.forms if form.is_open]))
        desk.crowd(*((2, 4) if windows == 1 else (1, 2)))
        return desk.entry(held_out=held_out)

    build.__name__ = name
    DRAWN.add(level, "forms")(build)


_template("press", 1, press)
_template("press_colour", 1, press_colour)
_template("tick", 1, tick)
_template("write", 1, write)
_template("choose", 1, choose)
_template("drag", 1, drag)
_template("close", 1, close, windows=2)
_template("copy", 2, copy)
_template("press_two", 2, press, press)
_template("tick_two", 2, tick, tick)
_template("write_press", 2, write, press)
_template("choose_tick", 2, choose, tick)
_template("drag_press", 2, drag, press)
_template("close_tick", 2, close, tick, windows=2)
_template("copy_across", 3, copy, windows=2)
_template("colour_write_tick", 3, press_colour, write, tick)
_template("choose_write", 2, choose, write)
# Without these two, a policy typed after its first click if a sentence ended with "press", never if with "tick".
_template("copy_tick", 2, copy, tick)
_template("choose_colour", 2, choose, press_colour)
_template("press_tick", 2, press, tick, held_out=True)
_template("choose_press", 2, choose, press, held_out=True)
_template("write_tick", 2, write, tick, windows=2, held_out=True)
_template("close_press", 2, close, press, windows=2, held_out=True)
_template("drag_colour", 2, drag, press_colour, held_out=True)
