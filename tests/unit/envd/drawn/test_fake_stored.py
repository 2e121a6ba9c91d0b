"""Drawn desktops as files: they continue as before, and a file of another host changes nothing but its own desktop."""

import json
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from envd.base.errors import CheckpointUnusable
from envd.drawn import stored
from envd.drawn.desktop.canvas import Framebuffer, SharedPicture
from envd.drawn.desktop.desktop import DrawnDesktop
from envd.drawn.desktop.windows import DrawnWindow, EditorWindow
from envd.drawn.guest import DrawnGuest
from envd.drawn.programs import Programs
from envd.drawn.state import DrawnState
from envd.drawn.stored import read_state, write_state
from tests.unit.envd.drawn.test_fake_form_windows import FORM, PATH

WIDTH_PX, HEIGHT_PX = 512, 320
#: Enter, Tab, Ctrl, Shift, Alt, Caps Lock, and letters.
KEYS = (28, 15, 29, 42, 56, 58, *range(16, 26))


def guest_with_form() -> DrawnGuest:
    guest = DrawnGuest(Framebuffer.black(WIDTH_PX, HEIGHT_PX))
    guest.show_desktop(SharedPicture(np.zeros((1, 1, 4), np.uint8)))
    guest.files[PATH] = json.dumps(FORM | {"alone": False}).encode()
    desktop_of(guest).launch("form", PATH)
    return guest


def desktop_of(guest: DrawnGuest) -> DrawnDesktop:
    assert guest.desktop is not None
    return guest.desktop


def play(guest: DrawnGuest, dice: random.Random, count: int) -> None:
    desktop = desktop_of(guest)
    for _ in range(count):
        match dice.randrange(6):
            case 0:
                desktop.key(dice.choice(KEYS), down=dice.random() < 0.7)
            case 1:
                desktop.type_text(dice.choice(("Oslo", "\n", "ß")))
            case 2:
                desktop.launch(dice.choice(("editor", "controls")))
            case 3:
                guest.programs.run(["xclip", "-selection", "clipboard"], stdin=dice.randbytes(4))
            case _:
                desktop.pointer(dice.randrange(WIDTH_PX), dice.randrange(HEIGHT_PX), dice.choice((0, 1, 1, 8)))


@pytest.mark.parametrize("seed", range(20))
def test_a_stored_desktop_continues_as_it_was(tmp_path: Path, seed: int) -> None:
    guest = guest_with_form()
    play(guest, random.Random(seed), 40)
    guest.clock.stop()
    write_state(DrawnState.of(guest), tmp_path / "guest")
    read = read_state(tmp_path / "guest").build()
    assert DrawnState.of(read).digest() == DrawnState.of(guest).digest()
    assert read.clock.date_ns() == guest.clock.date_ns()
    for each in (guest, read):
        play(each, random.Random(seed + 100), 40)
    assert DrawnState.of(read).digest() == DrawnState.of(guest).digest()


@pytest.mark.parametrize("seed", range(5))
def test_guests_that_start_from_one_state_are_independent(seed: int) -> None:
    guest = guest_with_form()
    guest.clock.stop()
    handle = guest.agent.execute("guest-file-open", {"path": "/home/user/a", "mode": "w"})
    state = DrawnState.of(guest)
    before = state.digest()
    one, other = state.build(), state.build()
    for each in (guest, one):
        play(each, random.Random(seed), 40)
        each.agent.execute("guest-file-write", {"handle": handle, "buf-b64": "YQ=="})
    assert DrawnState.of(one).digest() == DrawnState.of(guest).digest() != before
    assert DrawnState.of(other).digest() == state.digest() == before


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values of a document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from leaves(inner, (*path, key))


def replaced(document: Any, path: tuple[Any, ...], value: object) -> Any:
    if not path:
        return value
    changed: Any = dict(document) if isinstance(document, dict) else list(document)
    changed[path[0]] = replaced(document[path[0]], path[1:], value)
    return changed


def test_a_file_with_any_other_value_is_a_desktop_or_is_refused(tmp_path: Path) -> None:
    guest = guest_with_form()
    play(guest, random.Random(1), 60)
    file = tmp_path / "guest"
    write_state(DrawnState.of(guest), file)
    document = json.loads(zstandard.decompress(file.read_bytes()))
    kinds = (DrawnGuest, Programs, DrawnDesktop, DrawnWindow, EditorWindow, Framebuffer)
    before = [dict(vars(kind)) for kind in kinds]
    values: tuple[Any, ...] = (None, -1, 10**400, "__class__", [{}])
    dice, refused = random.Random(2), 0
    for path in leaves(document):
        for value in dice.sample(values, 2):
            text = json.dumps(replaced(document, path, value))
            file.write_bytes(zstandard.compress(text.encode()))
            try:
                read_state(file)
            except ValueError:
                refused += 1
    assert refused > 100
    assert [dict(vars(kind)) for kind in kinds] == before


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("editor", "text_area", "row"), 1 << 31),
        (("editor", "text_area", "column"), 1 << 31),
        (("files", "files"), {"../../etc/passwd": ""}),
        (("files", "files"), {"relative": ""}),
        (("files", "directories"), ["/home/user/.."]),
    ],
)
def test_a_caret_outside_its_text_or_a_wrong_path_is_refused(
    tmp_path: Path, path: tuple[str, ...], value: object
) -> None:
    file = tmp_path / "guest"
    write_state(DrawnState.of(guest_with_form()), file)
    document = json.loads(zstandard.decompress(file.read_bytes()))
    file.write_bytes(zstandard.compress(json.dumps(replaced(document, path, value)).encode()))
    with pytest.raises(ValueError, match="its desktop cannot be drawn"):
        read_state(file)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "Invalid JSON: EOF"),
        (b"[]", "must be an object"),
        (b"[" * 100_000, "Invalid JSON: recursion limit exceeded"),
        (b'{"format":2}', "format: must be 1"),
        (b'{"format":1,"more":1}', "width_px: is missing"),
        ("\N{BYTE ORDER MARK}{}".encode(), "Invalid JSON"),
    ],
)
def test_something_else_is_refused(tmp_path: Path, text: bytes, problem: str) -> None:
    file = tmp_path / "guest"
    file.write_bytes(zstandard.compress(text))
    with pytest.raises(ValueError, match=problem):
        read_state(file)


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_BYTES", 1 << 20)
    file = tmp_path / "guest"
    file.write_bytes(zstandard.compress(bytes(64 << 20)))
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        read_state(file)
    guest = guest_with_form()
    guest.files["/home/user/large"] = bytes(1 << 20)
    with pytest.raises(ValueError, match="at most 1048576 are stored"):
        write_state(DrawnState.of(guest), file)


def test_a_pickled_desktop_of_an_earlier_release_is_refused_by_name(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    file = tmp_path / "ckpt-1" / "guest"
    file.parent.mkdir()
    file.write_bytes(zstandard.compress(pickle.dumps(Attack())))
    with pytest.raises(CheckpointUnusable, match=r"checkpoint ckpt-1: envd 0\.2\.0 stored"):
        read_state(file)
    assert not (tmp_path / "ran").exists()
