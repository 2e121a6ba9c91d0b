"""Common parts of the desktop suite's templates: setup verbs, checkers, oracle steps, words to sample."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files

import yaml

from envd.tasks.templates import Entry, Templates

HOME = "/home/user"
_SAVE_AS = "^Save As$"
#: Fields of checkers that hold text, which may look like a path.
_TEXTS = ("equals", "contains", "matches")
DOCUMENTS = f"{HOME}/Documents"
PICTURES = f"{HOME}/Pictures"

Verb = Mapping[str, object]
Step = Sequence[object]

#: What programs write for themselves.
_OF_PROGRAMS = (".bash_history", ".cache", ".config", ".dbus", ".local", ".ICEauthority", ".Xauthority", ".xsession*")


def _spare_the_rest(entry: Entry) -> Entry:
    """Add that no file of the home directory may be changed or removed, except those that the checkers inspect."""
    checker = entry.get("checker")
    if not isinstance(checker, Mapping):
        return entry
    setup = entry.get("setup", ())
    written = [str(verb["path"]) for verb in setup if "path" in verb] if isinstance(setup, Sequence) else []
    excluded = [*sorted(set(_changing(checker, written))), *(f"{HOME}/{name}" for name in _OF_PROGRAMS)]
    # An agent may make files of its own, such as notes.
    rest = {"kind": "unchanged", "paths": [HOME], "except": excluded, "new_files": "ignore"}
    return {**entry, "checker": all_of(checker, rest)}


def _changing(part: object, written: Sequence[str]) -> Iterator[str]:
    """Yield the paths that a task changes: those in its checker, and entries that a directory must not have."""
    match part:
        case str() if part.startswith(f"{HOME}/"):
            yield part
        case {"kind": "directory", "path": directory, "entries": [*entries], "mode": "exactly"}:
            yield from (path for path in written if _is_in(path, str(directory)) and path.split("/")[-1] not in entries)
        case {"kind": "directory"}:
            pass
        case Mapping():
            yield from (path for key, each in part.items() if key not in _TEXTS for path in _changing(each, written))
        case list() | tuple():
            yield from (path for each in part for path in _changing(each, written))


def _is_in(path: str, directory: str) -> bool:
    return path.rpartition("/")[0] == directory


DESKTOP = Templates("desktop", _spare_the_rest)

#: Ends an oracle without an answer.
DONE: Step = ("done",)


def until_window(title: str = "", *, wm_class: str = "", absent: bool = False) -> Verb:
    """Wait for a window, or until it is gone."""
    patterns = {"title": title, "class": wm_class}
    window = {name: pattern for name, pattern in patterns.items() if pattern}
    return {"wait_for": {"window": window, **({"absent": True} if absent else {})}}


def until_file(path: str, *, absent: bool = False) -> Verb:
    """Wait for a file with content or a directory, or until it is gone."""
    return {"wait_for": {"file": path, **({"absent": True} if absent else {})}}


#: In an editor: save the document. The title of a window with unsaved changes begins with an asterisk.
SAVE: Step = ({"press": ["ctrl", "s"]}, until_window(r"^\*", absent=True))

_WORDS = yaml.safe_load((files("envd.tasks") / "suites/desktop/words.yaml").read_text(encoding="utf-8"))
NAMES, WEEKDAYS, CITIES, GOODS, TOOLS, COLOURS = (
    tuple[str, ...](_WORDS[kind]) for kind in ("names", "weekdays", "cities", "goods", "tools", "colours")
)


def write(path: str, text: str) -> Verb:
    """Write a text file."""
    return {"kind": "write_file", "path": path, "text": text}


def folder(path: str) -> Verb:
    """Make a directory."""
    return {"kind": "make_directory", "path": path}


def show_folder(path: str) -> Verb:
    """Open a directory in the file manager."""
    return {
        "kind": "launch",
        "argv": ["pcmanfm", path],
        "window": {"title": path.rpartition("/")[2], "class": "pcmanfm"},
    }


def edit(path: str) -> Verb:
    """Open a file in the editor."""
    return {"kind": "open", "path": path}


def empty_editor() -> Verb:
    """Open the editor without a file."""
    return {"kind": "launch", "argv": ["mousepad"], "window": {"title": "Untitled", "class": "mousepad"}}


def open_terminal() -> Verb:
    """Open a terminal in the home directory."""
    return {"kind": "launch", "argv": ["lxterminal"], "window": {"class": "lxterminal"}}


def text_is(path: str, text: str) -> Verb:
    """Check a file's text."""
    return {"kind": "file_text", "path": path, "equals": text}


def number_is(path: str, number: int) -> Verb:
    """Check that a file contains only a number."""
    return {"kind": "file_text", "path": path, "matches": rf"\s*{number}\s*"}


def exactly(path: str, *entries: str) -> Verb:
    """Check the exact entries of a directory."""
    return {"kind": "directory", "path": path, "entries": list(entries), "mode": "exactly"}


def all_of(*checks: Verb) -> Verb:
    """Check several things, all of them."""
    return {"kind": "all", "checks": list(checks)}


def weighted(*checks: tuple[int, Verb]) -> Verb:
    """Check several things with their weights, for partial credit."""
    return {"kind": "weighted", "checks": [{"weight": weight, "check": check} for weight, check in checks]}


def lines(*texts: str) -> str:
    """Return texts as lines."""
    return "".join(f"{text}\n" for text in texts)


def repeat(key: str, count: int) -> Step:
    """Press a key `count` times."""
    return [{"press": key}] * count


def save_as(path: str) -> tuple[Step, ...]:
    """Save under another name in the editor. Selects all first, because only the stem of the old name is selected."""
    return (
        [{"press": ["ctrl", "shift", "s"]}, until_window(_SAVE_AS)],
        [{"press": ["ctrl", "a"]}, {"type": path}],
        [{"press": "enter"}, until_window(_SAVE_AS, absent=True), until_file(path)],
    )


#: Open a terminal, if none is open.
NEW_TERMINAL: Step = ({"press": ["super", "t"]}, until_window(wm_class="lxterminal"))

#: Open an empty document in the editor.
NEW_DOCUMENT: Step = ({"press": ["super", "e"]}, until_window("Untitled", wm_class="mousepad"))


def switch_to(place: int) -> Step:
    """Switch to the window at this place of the task bar, from 0; it must not have the focus.

    After Alt+Tab the next keys were lost in 2 of 5 replays on a busy host, although the screen was still.
    """
    return ({"click": {"x": 297 + 222 * place, "y": 780}},)


def command(line: str, *, makes: str = "") -> Step:
    """Run a command in a terminal, which makes a file with content or a directory if a path is given."""
    return ({"type": f"{line}\n"}, *([until_file(makes)] if makes else []))
