"""Templates about settings, of programs and of the shell."""

from envd.tasks.suites.desktop.parts import (
    CITIES,
    DESKTOP,
    DOCUMENTS,
    DONE,
    HOME,
    NAMES,
    Verb,
    all_of,
    command,
    edit,
    lines,
    open_terminal,
    write,
)
from envd.tasks.templates import Entry, Sampler

_DOMAIN = "settings"
_NEW_SHELL = ("bash", "--rcfile", f"{HOME}/.bashrc", "-ic")
_EDITOR_VIEW = "org.xfce.mousepad.preferences.view"
_ASK_SETTING = "\n".join(
    (
        "import sys",
        "from gi.repository import Gio",
        "print(Gio.Settings.new(sys.argv[1]).get_value(sys.argv[2]).print_(False))",
    )
)


def _setting_is(schema: str, key: str, value: str) -> Verb:
    return {"kind": "command", "argv": ["python3", "-I", "-c", _ASK_SETTING, schema, key], "stdout": {"equals": value}}


@DESKTOP.add(level=2, domain=_DOMAIN)
def number_the_lines(rng: Sampler) -> Entry:
    """Switch line numbers on by menu."""
    name = rng.choice(("script", "poem", "config", "recipe", "register", "ranking"))
    path = f"{DOCUMENTS}/{name}.txt"
    text = lines(*(f"{each} {rng.randint(1, 99)}" for each in rng.sample(NAMES, 8)))
    return {
        "tags": ["menu"],
        "instruction": (
            f"Have the text editor number the lines of {name}.txt, which it shows: its View menu offers that."
        ),
        "setup": [write(path, text), edit(path)],
        "checker": _setting_is(_EDITOR_VIEW, "show-line-numbers", "true"),
        "oracle": [[{"press": ["alt", "v"]}], [{"press": "u"}], DONE],
    }


@DESKTOP.add(level=2, domain=_DOMAIN)
def wrap_long_lines(rng: Sampler) -> Entry:
    """Switch word wrap on by menu."""
    name = rng.choice(("report", "tale", "speech", "essay", "memoir", "review"))
    path = f"{DOCUMENTS}/{name}.txt"
    route = " then ".join(rng.sample(CITIES, 16))
    return {
        "tags": ["menu"],
        "instruction": (
            f"The only sentence of {name}.txt runs far out of the window on the right. Change the editor's setting so"
            " that it breaks long lines between words; leave the text itself alone."
        ),
        "setup": [write(path, f"First {route}.\n"), edit(path)],
        "checker": _setting_is(_EDITOR_VIEW, "word-wrap", "true"),
        "oracle": [[{"press": ["alt", "d"]}], [{"press": "w"}], DONE],
    }


@DESKTOP.add(level=3, domain=_DOMAIN)
def shell_shortcut(rng: Sampler) -> Entry:
    """Define a permanent shell alias."""
    name = rng.choice(("hi", "yo", "motto", "where", "today", "cheer"))
    said = f"{rng.choice(('greetings', 'news', 'a card', 'a song'))} from {rng.choice(CITIES)}"
    return {
        "tags": ["terminal"],
        "instruction": (
            f"Teach the shell a new word that lasts: in every terminal opened from now on, typing {name} should print"
            f' "{said}". The file .bashrc in the home directory is read whenever a shell starts.'
        ),
        "setup": [open_terminal()],
        "checker": all_of(
            {"kind": "command", "argv": [*_NEW_SHELL, f"eval {name} || exit 1"], "stdout": {"equals": said}},
            # All other words mean what they meant.
            {"kind": "unchanged", "outputs": [[*_NEW_SHELL, f"unalias {name}; unset -f {name}; alias; declare -f"]]},
        ),
        "oracle": [command(f"echo \"alias {name}='echo {said}'\" >> ~/.bashrc"), DONE],
    }
