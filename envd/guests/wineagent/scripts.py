"""Answers to the host's PowerShell scripts, by the name in their first line: `# envd: NAME`.

Each prints what the script prints on Windows. The lines after the first assign the values, `$variable = 'value'`.
"""

import inspect
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

from .drive import AgentError, Drive
from .shell import Shell

NO_DIRECTORY = 66
_NAME = re.compile(r"# envd: ([a-z-]+)\n")
#: PowerShell takes five characters for the single quote; a value has each doubled.
_VALUE = re.compile(r"\$(\w+) = '((?:[^'‘’‚‛]|(['‘’‚‛])\3)*)'\n")
_NAMESPACE_URL = "https://accessibility.ubuntu.example.org/ns/"
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_DISABLED, _READ_ONLY, _BUTTON_KIND = 0x08000000, 0x0800, 0x0F
_ROLES = {
    "#32768": "menu",
    "#32770": "dialog",
    "combobox": "combo-box",
    "comboboxex32": "combo-box",
    "edit": "text",
    "listbox": "list",
    "msctls_progress32": "progress-bar",
    "msctls_statusbar32": "status-bar",
    "msctls_trackbar32": "slider",
    "msctls_updown32": "spin-button",
    "richedit20w": "text",
    "richedit50w": "text",
    "scrollbar": "scroll-bar",
    "static": "label",
    "sysheader32": "header",
    "syslink": "link",
    "syslistview32": "list",
    "systabcontrol32": "page-tab-list",
    "systreeview32": "tree",
    "toolbarwindow32": "tool-bar",
}
#: Controls with items that have no window.
_WITHOUT_ITEMS = frozenset({"header", "list", "menu", "page-tab-list", "tool-bar", "tree"})
#: Kinds of buttons by the low bits of their style; others are push buttons.
_BUTTONS = {
    2: "check-box",
    3: "check-box",
    4: "radio-button",
    5: "check-box",
    6: "check-box",
    7: "panel",
    9: "radio-button",
}
#: Their text is a value that the user changes; their name is the label before them.
_HAVE_VALUES = frozenset({"combo-box", "text"})
_MAX_VALUE_CHARS = 1000


class Output(NamedTuple):
    """What a script printed, and how it ended."""

    stdout: bytes = b""
    exit_code: int = 0
    stderr: bytes = b""


class Scripts:
    """The scripts that this guest answers."""

    def __init__(self, drive: Drive, shell: Shell) -> None:
        self._drive = drive
        self._shell = shell
        self.by_name: Mapping[str, Callable[..., Output]] = {
            "probe": self._probe,
            "list-directory": self._list_directory,
            "list-processes": self._list_processes,
            "query-registry": self._query_registry,
            "make-directory": self._make_directory,
            "make-parent": self._make_parent,
            "remove": self._remove,
            "list-windows": self._list_windows,
            "type-text": self._type_text,
            "accessibility-tree": self._accessibility_tree,
        }

    def run(self, arguments: Sequence[str]) -> Output:
        """Answer `powershell.exe`; never raises. Any script but the host's own fails."""
        script = arguments[-1] if arguments else ""
        name = _NAME.match(script)
        if name is None or name[1] not in self.by_name:
            return Output(b"", 1, b"this guest has no PowerShell; it only answers the scripts of its host")
        function = self.by_name[name[1]]
        try:
            values, at = {}, name.end()
            while found := _VALUE.match(script, at):
                values[found[1]] = re.sub(r"(['‘’‚‛])\1", r"\1", found[2])
                at = found.end()
            return function(**{given: values[given] for given in inspect.signature(function).parameters})
        except KeyError as error:
            return Output(b"", 1, f"{name[1]}: ${error.args[0]} has no value".encode())
        except (OSError, AgentError) as error:
            return Output(b"", 1, f"{name[1]}: {error}".encode())

    # Files

    def _probe(self, path: str) -> Output:
        file = self._drive.path(path)
        if file.is_file():
            return Output(f"{file.stat().st_size}\r\n".encode())
        return Output(b"other\r\n" if file.exists() or file.is_symlink() else b"absent\r\n")

    def _list_directory(self, path: str) -> Output:
        directory = self._drive.path(path)
        if not directory.is_dir():
            return Output(exit_code=NO_DIRECTORY)
        return Output("".join(f"{'d' if at.is_dir() else 'f'}{at.name}\0" for at in directory.iterdir()).encode())

    def _make_directory(self, path: str) -> Output:
        self._drive.make_directories(self._drive.path(path))
        return Output()

    def _make_parent(self, path: str) -> Output:
        self._drive.make_directories(self._drive.path(path).parent)
        return Output()

    def _remove(self, path: str) -> Output:
        file = self._drive.path(path)
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)
        return Output()

    # The session

    def _list_processes(self) -> Output:
        names = self._ask("processes")
        return Output("".join(f"R {_without_exe(name)}\r\n" for name in names).encode())

    def _query_registry(self, hive: str, key: str, name: str) -> Output:
        return Output(json.dumps(self._ask("registry", hive, key, name)).encode())

    def _list_windows(self) -> Output:
        lines = []
        for window in reversed(self._windows()["windows"]):
            title, kind = (" ".join(window[field].split()) for field in ("text", "class"))
            if title:
                kind = f"{_without_exe(window['program'])}.{kind}".replace(" ", "_")
                lines.append(f"0x{window['id']:08x} 0 {kind} - {title}\r\n")
        return Output("".join(lines).encode())

    def _type_text(self, text: str) -> Output:
        self._ask("type", text)
        return Output()

    def _accessibility_tree(self, limit: str) -> Output:
        return Output(tree(self._windows(), limit=int(limit)))

    def _windows(self) -> Any:
        found = self._ask("windows")
        found["windows"] = [window for window in found["windows"] if window is not None]
        return found

    def _ask(self, word: str, *arguments: str) -> Any:
        return self._shell.ask(word, *arguments)


def _without_exe(name: str) -> str:
    return re.sub(r"\.exe$", "", name, flags=re.IGNORECASE)


def tree(desktop: Mapping[str, Any], *, limit: int) -> bytes:
    """Return the tree of the helper's `windows` response, with at most `limit` elements.

    It has the XML form and the roles of Linux guests. Wine has no UI Automation, so the tree is that of window handles.
    It lacks what a control draws by itself: menus, and the items of lists, trees and tool bars. A tree in which such
    items are missing has `truncated="true"` at its root.
    """
    builder = _Builder(desktop["foreground"], limit)
    root = ET.Element("desktop-frame")
    builder.append(root, desktop["windows"], depth=0)
    if builder.truncated:
        root.set("truncated", "true")
    return ET.tostring(root, encoding="unicode").encode()


class _Builder:
    def __init__(self, foreground: int, limit: int) -> None:
        self.truncated = False
        self._foreground = foreground
        self._left = limit

    def append(self, parent: ET.Element, windows: Sequence[Mapping[str, Any]], *, depth: int) -> None:
        label = ""
        for window in windows:
            if self._left <= 0:
                self.truncated = True
                return
            self._left -= 1
            role = _role(window, depth)
            text = _NOT_XML.sub("", window["text"])
            name = label if role in _HAVE_VALUES else text.replace("&", "")
            element = ET.SubElement(parent, role, {"name": name, **self._attributes(window, role)})
            if role in _HAVE_VALUES and text:
                element.text = text[:_MAX_VALUE_CHARS]
            label = name if role == "label" else ""
            self.truncated |= role in _WITHOUT_ITEMS
            self.append(element, window["controls"], depth=depth + 1)

    def _attributes(self, window: Mapping[str, Any], role: str) -> dict[str, str]:
        style = window["style"]
        states = {
            "active": window["id"] == self._foreground,
            "checked": window.get("checked") == 1,
            "editable": role == "text" and not style & _READ_ONLY,
            "enabled": not style & _DISABLED,
            "focused": window.get("focused", False),
            "indeterminate": window.get("checked") == 2,
        }
        left, top, width, height = window["rect"]
        return {
            **{f"{{{_NAMESPACE_URL}state}}{state}": "true" for state, holds in states.items() if holds},
            f"{{{_NAMESPACE_URL}component}}screencoord": f"({left}, {top})",
            f"{{{_NAMESPACE_URL}component}}size": f"({width}, {height})",
        }


def _role(window: Mapping[str, Any], depth: int) -> str:
    kind = window["class"].casefold()
    if kind == "button":
        return _BUTTONS.get(window["style"] & _BUTTON_KIND, "push-button")
    if kind == "#32770" and depth:
        return "panel"
    return _ROLES.get(kind, "panel" if depth else "frame")
