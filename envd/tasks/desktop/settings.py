"""Templates about settings, of programs and of the whole desktop."""

from envd.tasks.desktop.parts import DESKTOP, DOCUMENTS, DONE, NAMES, Verb, edit, lines, write
from envd.tasks.templates import Draw, Entry

_DOMAIN = "settings"
_EDITOR = "org.xfce.mousepad.preferences"


def _setting_is(schema: str, key: str, value: str) -> Verb:
    return {"kind": "command", "argv": ["gsettings", "get", schema, key], "stdout": {"equals": value}}


@DESKTOP.add(level=2, domain=_DOMAIN)
def number_the_lines(draw: Draw) -> Entry:
    """Switch line numbers on by menu."""
    path = f"{DOCUMENTS}/{draw.one(('script', 'poem', 'config', 'recipe'))}.txt"
    text = lines(*(f"{name} {draw.number(1, 99)}" for name in draw.some(NAMES, 8)))
    return {
        "tags": ["menu"],
        "instruction": "Have the text editor number the lines of what it shows: its View menu offers that.",
        "setup": [write(path, text), edit(path)],
        "checker": _setting_is(f"{_EDITOR}.view", "show-line-numbers", "true"),
        "oracle": [[{"press": ["alt", "v"]}], [{"press": "n"}, {"wait": 1}], DONE],
    }
