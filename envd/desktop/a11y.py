"""Parse a guest's accessibility tree into a flat, bounded list of visible elements in a fixed order. Pure.

Guests send their trees as the XML of OSWorld's in-guest server (Linux: AT-SPI; Windows: UI Automation). The XML is not
trusted: no entity is expanded, nothing is fetched, and size, depth and count are bounded.

Elements without a box on the screen are omitted. Containers without a name, value or known state are replaced by their
children. The active window comes first, because the list may be cut.
"""

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, islice
from typing import Final

from lxml import etree

from cuaenv.region import Region
from envd.base.errors import GuestError
from envd.desktop.observation import A11yElement, A11yElements

#: A tree of guestd's 5,000 nodes has about 2 MiB.
MAX_TREE_BYTES: Final = 16 << 20
MAX_NODES: Final = 50_000
MAX_ELEMENTS: Final = 2_000
MAX_NAME_CHARS: Final = 200
MAX_VALUE_CHARS: Final = 400
#: Models cannot distinguish more numbers.
MAX_MARKS: Final = 200
#: Length of the last line of a truncated outline, with its newline.
_NOTE_CHARS: Final = 16

#: States shown to agents, in this order, each with its names in the tree.
_STATES: Final = {
    "active": ("active",),
    "focused": ("focused",),
    "selected": ("selected",),
    "checked": ("checked", "indeterminate"),
    "pressed": ("pressed",),
    "expanded": ("expanded",),
    "modal": ("modal",),
    "editable": ("editable",),
    "busy": ("busy",),
    "invalid": ("invalid-entry",),
}
#: Roles that users click, type into or drag. The last two lines are names of UI Automation.
_ACTIONABLE: Final = frozenset(
    {
        *("check-box", "check-menu-item", "combo-box", "entry", "icon", "link", "list-item", "menu", "menu-item"),
        *("canvas", "document-text", "document-web", "page-tab", "password-text", "push-button", "push-button-menu"),
        *("radio-button", "radio-menu-item"),
        *("scroll-bar", "slider", "spin-button", "table-cell", "table-column-header", "terminal", "text"),
        *("switch", "toggle-button", "tree-item"),
        *("button", "checkbox", "combobox", "dataitem", "document", "edit", "headeritem", "hyperlink", "listitem"),
        *("menuitem", "radiobutton", "spinner", "splitbutton", "tabitem", "thumb", "treeitem"),
    }
)
_PAIR = re.compile(r"\s*\(\s*(-?\d{1,9})\s*,\s*(-?\d{1,9})\s*\)\s*")


def parse_tree(xml: str, *, screen_px: tuple[int, int], max_nodes: int = MAX_NODES) -> A11yElements:
    """Return the elements on a screen of (width, height).

    Raises:
        GuestError: The text is not XML, or larger than `MAX_TREE_BYTES`.
    """
    root = _parse(xml)
    visible = list(_walk(root, screen_px, max_nodes))
    windows = [[element for _, element in group] for _, group in groupby(visible, key=lambda item: item[0])]
    # The sort is stable: the other windows keep the tree's order.
    windows.sort(key=lambda window: "active" not in window[0].states)
    flat = [element for window in windows for element in window]
    left_out = max(0, len(flat) - MAX_ELEMENTS)
    is_partial = root.get("truncated") == "true" or next(islice(root.iter("*"), max_nodes, None), None) is not None
    return A11yElements(items=tuple(flat[:MAX_ELEMENTS]), left_out_count=left_out, is_cut=is_partial)


def is_cut(text: str, limit: int) -> bool:
    """Whether a name or value was longer than `limit` (`MAX_NAME_CHARS`, `MAX_VALUE_CHARS`) and lacks its end."""
    return len(text) == limit and text.endswith("…")


def with_marks(elements: A11yElements) -> A11yElements:
    """Number actionable elements from 1 to at most `MAX_MARKS`, except those that the active window covers."""
    front = next((element for element in elements.items if "active" in element.states and element.depth == 0), None)
    number, items, is_front = 0, [], False
    for element in elements.items:
        if element.depth == 0:
            is_front = element is front
        box = element.box
        x_px, y_px = box.x_px + box.width_px // 2, box.y_px + box.height_px // 2
        covered = front is not None and not is_front and _contains(front.box, x_px, y_px)
        if element.is_actionable and not covered and number < MAX_MARKS:
            number += 1
            items.append(replace(element, mark=number))
        else:
            items.append(element)
    return replace(elements, items=tuple(items))


def outline(elements: A11yElements, *, max_chars: int) -> str:
    """Return elements as text, one a line, indented by nesting: mark, role, name, value, states, box.

    A box is (left, top, width, height) in pixels of the screen. A text that would exceed `max_chars` ends between two
    elements, with the number of omitted ones. Names and values are quoted as in JSON, so that text in a guest cannot
    imitate another element.
    """
    lines = [_line(element) for element in elements.items]
    kept, used = 0, 0
    for line in lines:
        used += len(line) + 1
        last = kept + 1 == len(lines) and not elements.left_out_count and not elements.is_cut
        if used + (0 if last else _NOTE_CHARS) > max_chars + 1:
            break
        kept += 1
    left = len(lines) - kept + elements.left_out_count
    note = [f"... {left} more" if left else "... and more"] if left or elements.is_cut else []
    return "\n".join([*lines[:kept], *note])


def _line(element: A11yElement) -> str:
    words = [f"[{element.mark}]"] if element.mark else []
    words.append(element.role)
    if element.name:
        words.append(_quoted(element.name))
    if element.value:
        words.append(f"value={_quoted(element.value)}")
    words += element.states
    box = element.box
    words.append(f"({box.x_px},{box.y_px},{box.width_px},{box.height_px})")
    return "  " * element.depth + " ".join(words)


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    # Beyond JSON's own escapes: characters that end a line, change the writing direction, or are invisible.
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in _UNPRINTED_CATEGORIES else c for c in quoted)


_UNPRINTED_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def _parse(xml: str) -> etree._Element:
    data = xml.encode("utf-8", "replace")
    if len(data) > MAX_TREE_BYTES:
        raise GuestError(f"{len(data)} bytes; at most {MAX_TREE_BYTES} are read")
    parser = etree.XMLParser(
        encoding="utf-8", resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False, remove_comments=True
    )
    try:
        return etree.fromstring(data, parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        raise GuestError(f"not XML: {str(error)[:200]}") from error


def _walk(root: etree._Element, screen_px: tuple[int, int], max_nodes: int) -> Iterator[tuple[int, A11yElement]]:
    """Yield the visible elements in the tree's order, each with the number of its top-level window."""
    window = 0
    # Nodes to visit, the next one last: (node, its depth in the list).
    stack = [(root, 0)]
    for _ in range(max_nodes):
        if not stack:
            return
        node, depth = stack.pop()
        element = _element(node, depth, screen_px) if node is not root else None
        if element and (element.name or element.value or element.states or element.role in _ACTIONABLE):
            window += depth == 0
            yield window, element
            depth += 1
        # `*` excludes comments, processing instructions and entities. The parser refuses trees deeper than 256.
        stack += [(child, depth) for child in node.iterchildren("*", reversed=True)]


def _element(node: etree._Element, depth: int, screen_px: tuple[int, int]) -> A11yElement | None:
    """Return a node as an element; None without a box on the screen."""
    attributes = {etree.QName(key).localname: value for key, value in node.attrib.items()}
    box = _box(str(attributes.get("screencoord", "")), str(attributes.get("size", "")), screen_px)
    if box is None:
        return None
    names = {key.replace("_", "-") for key, value in attributes.items() if value == "true"}
    role = etree.QName(node).localname[:MAX_NAME_CHARS]
    states = [state for state, aliases in _STATES.items() if names.intersection(aliases)]
    is_enabled = bool(names & {"enabled", "sensitive"})
    if role in _ACTIONABLE and not is_enabled:
        states.append("disabled")
    name = " ".join(str(attributes.get("name", "")).split())
    value = (node.text or "").strip() or str(attributes.get("value", ""))
    return A11yElement(
        role=role,
        name=_cut(name, MAX_NAME_CHARS),
        value="" if value == name else _cut(value, MAX_VALUE_CHARS),
        states=tuple(states),
        box=box,
        depth=depth,
        is_actionable=role in _ACTIONABLE and is_enabled,
    )


def _box(corner: str, size: str, screen_px: tuple[int, int]) -> Region | None:
    at, extent = _PAIR.fullmatch(corner), _PAIR.fullmatch(size)
    if at is None or extent is None:
        return None
    left, top, right, bottom = int(at[1]), int(at[2]), int(at[1]) + int(extent[1]), int(at[2]) + int(extent[2])
    left, top, right, bottom = max(left, 0), max(top, 0), min(right, screen_px[0]), min(bottom, screen_px[1])
    if left >= right or top >= bottom:
        return None
    return Region(x_px=left, y_px=top, width_px=right - left, height_px=bottom - top)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _contains(box: Region, x_px: int, y_px: int) -> bool:
    return 0 <= x_px - box.x_px < box.width_px and 0 <= y_px - box.y_px < box.height_px
