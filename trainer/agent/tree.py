"""Tell an accessibility tree in a few lines, and find what can be acted on in it. Pure.

The tree is the guest's, so whatever it holds is bounded and read as data: what is no tree is no elements, never an
error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from trainer.agent.coordinates import CoordinateSpace

MAX_ELEMENT_COUNT = 5000
_NAMESPACE = re.compile(r"\{[^}]*/(?P<kind>[a-z]+)\}")
_PAIR = re.compile(r"\(\s*(-?\d{1,6})\s*,\s*(-?\d{1,6})\s*\)")
#: Roles that are acted on, in AT-SPI's names and OSWorld's spelling of them.
_ACTIONABLE = frozenset(
    {
        *("button", "push-button", "toggle-button", "radio-button", "check-box", "combo-box", "spin-button", "slider"),
        *(
            "menu",
            "menu-item",
            "check-menu-item",
            "radio-menu-item",
            "page-tab",
            "link",
            "icon",
            "switch",
            "scroll-bar",
        ),
        *("entry", "text", "password-text", "document-text", "document-web", "terminal", "canvas"),
        *("list-item", "tree-item", "table-cell"),
    }
)


@dataclass(frozen=True, slots=True)
class Element:
    """One element of the screen that shows."""

    role: str
    name: str
    text: str
    box_px: tuple[int, int, int, int]
    """(left, top, width, height) in the guest's pixels."""

    @property
    def is_actionable(self) -> bool:
        """Whether it is of a kind that is clicked or typed into."""
        return self.role in _ACTIONABLE


def elements(tree_xml: str) -> list[Element]:
    """Return what shows on the screen, in the order of the tree. What is no XML has no elements."""
    try:
        # expat bounds the growth of entities by itself.
        root = ElementTree.fromstring(tree_xml)  # noqa: S314
    except (ElementTree.ParseError, ValueError):
        return []
    return [element for element, _ in zip(_shown(root), range(MAX_ELEMENT_COUNT), strict=False)]


def _shown(root: ElementTree.Element) -> Iterator[Element]:
    for node in root.iter():
        corner, size = (_PAIR.fullmatch(_attribute(node, "component", name)) for name in ("screencoord", "size"))
        if corner is None or size is None or int(size[1]) <= 0 or int(size[2]) <= 0:
            continue
        box = int(corner[1]), int(corner[2]), int(size[1]), int(size[2])
        yield Element(node.tag, node.get("name", ""), (node.text or "").strip(), box)


def _attribute(node: ElementTree.Element, kind: str, name: str) -> str:
    for key, value in node.attrib.items():
        match = _NAMESPACE.match(key)
        if match and match["kind"] == kind and key[match.end() :] == name:
            return value
    return ""


def lines(tree_xml: str, space: CoordinateSpace, *, max_chars: int) -> str:
    """Return the tree as text: role, name, text, and the middle of each element in the model's units.

    Elements without name and text that cannot be acted on are left out. Cut at the end of a line.
    """
    told: list[str] = []
    left = max_chars
    for element in elements(tree_xml):
        if not (element.name or element.text or element.is_actionable):
            continue
        x, y, width, height = element.box_px
        at = space.from_screen(x + width // 2, y + height // 2)
        text = f" {element.text[:200]!r}" if element.text and element.text != element.name else ""
        line = f"{element.role} {element.name[:80]!r}{text} at {at[0]}, {at[1]}"
        left -= len(line) + 1
        if left < 0:
            break
        told.append(line)
    return "\n".join(told)


def boxes(tree_xml: str) -> tuple[tuple[int, int, int, int], ...]:
    """Return the boxes of the elements that can be acted on, in the guest's pixels."""
    return tuple(element.box_px for element in elements(tree_xml) if element.is_actionable)
