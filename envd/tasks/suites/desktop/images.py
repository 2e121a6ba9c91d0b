"""Templates about pictures and the image viewer."""

import base64
import struct
import zlib
from collections.abc import Sequence

from envd.tasks.suites.desktop.parts import CITIES, DESKTOP, DONE, HOME, PICTURES, Step, Verb, show_folder, until_window
from envd.tasks.templates import Entry, Sampler

_DOMAIN = "images"
_THINGS = ("apple", "boat", "cloud", "dune", "fern", "gate", "hill", "lake", "moss", "reed", "stone", "tower")
_COLOURS = {
    "red": (200, 50, 40),
    "green": (40, 150, 60),
    "blue": (40, 70, 200),
    "yellow": (230, 210, 60),
    "black": (20, 20, 20),
    "purple": (130, 50, 160),
}


def _png(path: str, *, width_px: int, height_px: int, colour: str) -> Verb:
    """Write a picture of one colour: PNG, 8-bit RGB (https://www.w3.org/TR/png/)."""
    rows = (b"\0" + bytes(_COLOURS[colour]) * width_px) * height_px
    head = struct.pack(">IIBBBBB", width_px, height_px, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    return {"kind": "write_file", "path": path, "base64": base64.b64encode(data).decode()}


def _album(rng: Sampler, count: int) -> tuple[list[str], list[str], list[Verb]]:
    """Return names in alphabetical order, their colours, and the verbs that write the pictures."""
    names = [f"{thing}.png" for thing in sorted(rng.sample(_THINGS, count))]
    colours = rng.sample(tuple(_COLOURS), count)
    made = [
        _png(f"{PICTURES}/{name}", width_px=240, height_px=160, colour=colour)
        for name, colour in zip(names, colours, strict=True)
    ]
    return names, colours, made


def _view(name: str) -> Verb:
    return {
        "kind": "launch",
        "argv": ["gpicview", f"{PICTURES}/{name}"],
        "window": {"title": name.replace(".", r"\."), "class": "gpicview"},
    }


def _until_shown(name: str) -> Verb:
    return until_window(name.replace(".", r"\."), wm_class="gpicview")


def _page(names: Sequence[str]) -> list[Step]:
    """Page through the pictures of these names."""
    return [[{"press": "right"}, _until_shown(name)] for name in names]


def _shows(name: str) -> Verb:
    return {"kind": "window", "window": {"title": name.replace(".", r"\."), "class": "gpicview"}}


@DESKTOP.add(level=1, domain=_DOMAIN)
def browse_to_picture(rng: Sampler) -> Entry:
    """Page through pictures in the viewer."""
    names, _, made = _album(rng, 4)
    place = rng.choice((1, 2, 3))
    return {
        "instruction": (
            f"The image viewer is open at {names[0]}. Page on to the picture {names[place]} of the same folder, and"
            " leave it on the screen."
        ),
        "setup": [*made, _view(names[0])],
        "checker": _shows(names[place]),
        "oracle": [*_page(names[1 : place + 1]), DONE],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def open_a_picture(rng: Sampler) -> Entry:
    """Open a picture from the file manager."""
    names, _, made = _album(rng, 3)
    place = rng.choice((0, 1, 2))
    icon = {"x": (327, 422, 516)[place], "y": 210}
    return {
        "tags": ["mouse"],
        "instruction": (
            f"You are looking at a folder of pictures. Double-click {names[place]}, so that the image viewer comes up"
            " with it."
        ),
        "setup": [*made, show_folder(PICTURES)],
        "checker": _shows(names[place]),
        "oracle": [[{"click": icon}], [{"click": {**icon, "count": 2}}, _until_shown(names[place])], DONE],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def size_of_picture(rng: Sampler) -> Entry:
    """Answer from the viewer's title."""
    name = f"{rng.choice(CITIES).lower()}.png"
    width_px, height_px = rng.randint(120, 480), rng.randint(90, 360)
    colour = rng.choice(tuple(_COLOURS))
    size = rf"{width_px}\s*[x×,]\s*{height_px}"
    return {
        "tags": ["answer"],
        "instruction": (
            f"How wide and how high, in pixels, is the image {name} that the viewer displays? Its title bar tells."
            " Answer in the form WIDTHxHEIGHT, such as 64x48."
        ),
        "setup": [_png(f"{PICTURES}/{name}", width_px=width_px, height_px=height_px, colour=colour), _view(name)],
        "checker": {"kind": "answer", "matches": size},
        "oracle": [[{"done": f"{width_px}x{height_px}"}]],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def name_the_colour(rng: Sampler) -> Entry:
    """Answer from the pixels."""
    names, colours, made = _album(rng, 5)
    place = rng.choice((1, 2, 3, 4))
    colour = colours[place]
    return {
        "tags": ["answer"],
        "instruction": (
            f"Each picture in {HOME}/Pictures is filled with a single colour; the viewer has the first one open. Which"
            f" colour has {names[place]}: {', '.join(_COLOURS)}? Answer with one word."
        ),
        "setup": [*made, _view(names[0])],
        "checker": {"kind": "answer", "equals": colour, "case": "ignore"},
        "oracle": [*_page(names[1 : place + 1]), [{"done": colour}]],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def turn_a_picture(rng: Sampler) -> Entry:
    """Rotate a picture by 90 degrees and overwrite its file."""
    name = f"{rng.choice(_THINGS)}.png"
    width_px, height_px = rng.randint(260, 420), rng.randint(100, 220)
    colour = rng.choice(tuple(_COLOURS))
    path = f"{PICTURES}/{name}"
    turned = _png(path, width_px=height_px, height_px=width_px, colour=colour)
    return {
        "tags": ["dialog"],
        "instruction": (
            f"The photo {name} in the viewer was scanned sideways. Give it a quarter turn, in either direction, and"
            " save it over the old file."
        ),
        "setup": [_png(path, width_px=width_px, height_px=height_px, colour=colour), _view(name)],
        "checker": {"kind": "image_like", "path": path, "base64": turned["base64"]},
        "oracle": [[{"press": "r"}], [{"press": "s"}], [{"press": ["alt", "y"]}], DONE],
    }
