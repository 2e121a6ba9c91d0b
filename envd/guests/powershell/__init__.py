"""The PowerShell scripts that the host sends to Windows guests, as commands for the guest agent.

Every script is a file `NAME.ps1` in this directory, and all PowerShell that the host sends comes from here. A command's
script begins with the line `# envd: NAME`, a comment to PowerShell, and continues with a line `$variable = 'value'` for
each value. So a guest without PowerShell can answer the same commands by name.

Scripts are for Windows PowerShell 5.1, which every supported Windows includes.
"""

from enum import StrEnum
from functools import cache
from importlib.resources import files


class Script(StrEnum):
    """A script by name."""

    PROBE = "probe"
    LIST_DIRECTORY = "list-directory"
    LIST_PROCESSES = "list-processes"
    QUERY_REGISTRY = "query-registry"
    MAKE_DIRECTORY = "make-directory"
    MAKE_PARENT = "make-parent"
    REMOVE = "remove"
    LIST_WINDOWS = "list-windows"
    TYPE_TEXT = "type-text"
    ACCESSIBILITY_TREE = "accessibility-tree"
    USE_TOOL = "use-tool"


#: Scripts that need the desktop: the guest agent is a service and has none, so `in-session.ps1` runs them.
_DESKTOP_SCRIPTS = frozenset({Script.LIST_WINDOWS, Script.TYPE_TEXT, Script.ACCESSIBILITY_TREE, Script.USE_TOOL})
_IN_SESSION, _RUN_COMMAND = "in-session", "run-command"
#: Errors end a script with exit code 1.
_STOP = "$ErrorActionPreference = 'Stop'\n"
_UTF8 = "[Console]::OutputEncoding = [Text.UTF8Encoding]::new($false)\n"


def powershell(script: Script, *, wait_s: str = "60", **values: str) -> tuple[str, ...]:
    """Return the command that runs a script with `values` as variables, with UTF-8 output.

    A script that needs the desktop has `wait_s` seconds from its start.
    """
    if script is Script.USE_TOOL:
        values["runner"] = _body(_RUN_COMMAND)
    assigned = "".join(f"${variable} = {_literal(value)}\n" for variable, value in values.items())
    text = _body(script)
    if script in _DESKTOP_SCRIPTS:
        # The values stay at the top too, for guests that answer by name.
        text = f"$wait_s = {wait_s}\n$inner = {_literal(assigned + _STOP + text)}\n{_body(_IN_SESSION)}"
        if script is Script.USE_TOOL:
            assigned = ""
    command = f"# envd: {script}\n{assigned}{_STOP}{_UTF8}{text}"
    return ("powershell.exe", "-NoProfile", "-NonInteractive", "-Command", command)


def _body(script: str) -> str:
    """Return a script without its first line."""
    return source(script).partition("\n")[2]


@cache
def source(script: str) -> str:
    """Return the text of a script's file."""
    return (files(__name__) / f"{script}.ps1").read_text(encoding="ascii")


def _literal(value: str) -> str:
    # In a single-quoted PowerShell string only the five quote characters are special; doubling escapes them.
    return "'" + "".join(character * 2 if character in "'‘’‚‛" else character for character in value) + "'"
