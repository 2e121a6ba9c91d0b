"""Windows and controls as an accessibility tree, in the XML form and with the roles of Linux guests.

Wine has no UI Automation, so the tree is that of window handles. It lacks what a control draws by itself: menus, and
the items of lists, trees and tool bars. A tree in which such items are missing has `truncated="true"` at its root.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

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


def tree(desktop: Mapping[str, Any], *, limit: int) -> bytes:
    """Return the tree of the helper's `windows` response, with at most `limit` elements."""
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
            text = _clean(window["text"])
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


def _clean(text: str) -> str:
    return _NOT_XML.sub("", text)
