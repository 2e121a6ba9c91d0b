"""The helper process, started as `python3 -m guestd.a11y.helper`.

It answers queries, one line of JSON each, from stdin. Each query runs in a fork, so that it sees the current
applications and a hung application does not block the next query. The parent has AT-SPI loaded and never uses it.

An answer is a line of JSON, `{ok, length}`, followed by `length` bytes: the result or the error text.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import IO, Any
from xml.etree import ElementTree as ET

_NAMESPACES = {
    "st": "state",
    "attr": "attributes",
    "cp": "component",
    "doc": "document",
    "docattr": "document/attributes",
    "txt": "text",
    "val": "value",
    "act": "action",
}
_NAMESPACE_URL = "https://accessibility.ubuntu.example.org/ns/"
_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|\ufffc|\ufffd")


def xml_name(text: str) -> str:
    """Return a valid XML name close to `text`."""
    name = re.sub(r"[^\w.-]", "-", text.strip(), flags=re.ASCII)
    return name if re.match(r"[A-Za-z_]", name) else f"_{name}"


def _qualified(prefix: str, name: str) -> str:
    return f"{{{_NAMESPACE_URL}{_NAMESPACES[prefix]}}}{xml_name(name)}"


def _clean(text: str | None) -> str:
    return _NOT_XML.sub("", text or "")


class TreeBuilder:
    """Builds the XML tree from AT-SPI accessibles, bounded in depth, width, count and time.

    Args:
        max_nodes: Limit of the number of nodes; a tree that exceeds it has `truncated="true"` at its root.
        deadline_s: On the monotonic clock.
        only: Roles to describe; other elements have no attributes. Empty for all roles.
        showing: Omit hidden subtrees, and query only role, name, states, box, text and value. Each query is a call to
            the application, so this takes a small part of the time.
    """

    MAX_DEPTH = 50
    MAX_WIDTH = 1024
    MAX_TEXT_LENGTH = 100_000
    MAX_SHOWN_TEXT_LENGTH = 1000

    def __init__(
        self,
        atspi: Any,
        *,
        max_nodes: int,
        deadline_s: float,
        only: frozenset[str] = frozenset(),
        showing: bool = False,
    ) -> None:
        self._atspi = atspi
        self._only = only
        self._showing = showing
        self._nodes_left = max_nodes
        self._deadline_s = deadline_s
        self._failure_count = 0
        self.truncated = False

    def build(self, desktop: Any) -> ET.Element:
        root = ET.Element("desktop-frame")
        applications = list(self._children(desktop))
        if self._showing:
            # The application in use first, in case time runs out.
            applications.sort(key=lambda application: not self._is_in_use(application))
        for application in applications:
            # A hung application costs a timeout per query: skip the rest of it, but not the other applications.
            self._failure_count = 0
            self._append(root, application, 1)
        if self.truncated:
            root.set("truncated", "true")
        return root

    def _is_in_use(self, application: Any) -> bool:
        active = self._atspi.StateType.ACTIVE
        try:
            return any(window.get_state_set().contains(active) for window in self._children(application))
        except Exception:
            return False

    def _append(self, parent: ET.Element, node: Any, depth: int) -> None:
        if self._nodes_left <= 0 or time.monotonic() > self._deadline_s:
            self.truncated = True
            return
        try:
            # Applications (depth 1) never have the state SHOWING.
            if self._showing and depth > 1 and not node.get_state_set().contains(self._atspi.StateType.SHOWING):
                return
            self._nodes_left -= 1
            element = self._element(node)
        except Exception:
            self._failure_count += 1
            self.truncated = True
            return
        parent.append(element)
        if depth >= self.MAX_DEPTH:
            self.truncated = True
            return
        for child in self._children(node):
            if self._failure_count >= 3:
                self.truncated = True
                return
            self._append(element, child, depth + 1)

    def _children(self, node: Any) -> Iterator[Any]:
        try:
            count = node.get_child_count()
            if node.get_role_name() == "table" and not 0 <= count <= self.MAX_WIDTH:
                yield from self._showing_cells(node)
                return
            if count > self.MAX_WIDTH:
                self.truncated = True
            for index in range(min(count, self.MAX_WIDTH)):
                child = node.get_child_at_index(index)
                if child is not None:
                    yield child
        except Exception:
            self._failure_count += 1
            self.truncated = True

    def _showing_cells(self, table: Any) -> Iterator[Any]:
        """Yield the visible cells of a sheet with millions of cells: the block that starts at the first visible one."""
        grid = self._atspi.Table
        showing = self._atspi.StateType.SHOWING

        def cell(row: int, column: int) -> Any:
            found = grid.get_accessible_at(table, row, column)
            return found if found is not None and found.get_state_set().contains(showing) else None

        corner = next(
            ((r, c) for r in range(500) for c in range(500) if time.monotonic() < self._deadline_s and cell(r, c)), None
        )
        if corner is None:
            return
        for row in range(corner[0], corner[0] + self.MAX_WIDTH):
            for column in range(corner[1], corner[1] + self.MAX_WIDTH):
                found = cell(row, column)
                if found is None:
                    break
                yield found
            if cell(row + 1, corner[1]) is None:
                return

    def _element(self, node: Any) -> ET.Element:
        atspi = self._atspi
        role = node.get_role_name() or "unknown"
        if self._only and role not in self._only:
            return ET.Element(xml_name(role))
        element = ET.Element(xml_name(role), {"name": _clean(node.get_name())})
        states = {state.value_nick.replace("-", "_") for state in node.get_state_set().get_states()}
        for state in sorted(states):
            element.set(_qualified("st", state), "true")
        attributes = None if self._showing else node.get_attributes()
        for name, value in (attributes or {}).items():
            if name:
                element.set(_qualified("attr", name), _clean(value))
        if {"visible", "showing"} <= states and node.get_component_iface() is not None:
            box = atspi.Component.get_extents(node, atspi.CoordType.SCREEN)
            element.set(_qualified("cp", "screencoord"), str((box.x, box.y)))
            element.set(_qualified("cp", "size"), str((box.width, box.height)))
        if node.get_text_iface() is not None:
            max_length = self.MAX_SHOWN_TEXT_LENGTH if self._showing else self.MAX_TEXT_LENGTH
            length = min(atspi.Text.get_character_count(node), max_length)
            element.text = _clean(atspi.Text.get_text(node, 0, length)) or None
        has_value = node.get_value_iface() is not None
        if has_value:
            element.set(_qualified("val", "value"), str(atspi.Value.get_current_value(node)))
        if self._showing:
            return element
        if node.get_image_iface() is not None:
            element.set("image", "true")
        if node.get_selection_iface() is not None:
            element.set("selection", "true")
        if has_value:
            element.set(_qualified("val", "min"), str(atspi.Value.get_minimum_value(node)))
            element.set(_qualified("val", "max"), str(atspi.Value.get_maximum_value(node)))
            element.set(_qualified("val", "step"), str(atspi.Value.get_minimum_increment(node)))
        if node.get_action_iface() is not None:
            for index in range(min(atspi.Action.get_n_actions(node), 32)):
                name = atspi.Action.get_action_name(node, index) or ""
                description = atspi.Action.get_action_description(node, index)
                element.set(_qualified("act", f"{name}_desc"), _clean(description))
                element.set(_qualified("act", f"{name}_kb"), _clean(atspi.Action.get_key_binding(node, index)))
        return element


def serialize(tree: ET.Element) -> bytes:
    for prefix, name in _NAMESPACES.items():
        ET.register_namespace(prefix, _NAMESPACE_URL + name)
    return bytes(ET.tostring(tree, encoding="utf-8"))


def terminal_text(tree: ET.Element) -> str | None:
    """Return the text of the focused terminal of the active window, else of the first visible one; None without one."""
    active, focused, showing = (_qualified("st", state) for state in ("active", "focused", "showing"))
    shown = [node for node in tree.iter("terminal") if node.get(showing) == "true"]
    front = [node for frame in tree.iter("frame") if frame.get(active) == "true" for node in frame.iter("terminal")]
    for candidates in ([node for node in front if node.get(focused) == "true"], front, shown):
        if candidates:
            return (candidates[0].text or "").rstrip()
    return None


def import_atspi() -> Any:
    """Load the AT-SPI library, which takes seconds in an emulated guest. Raises: ImportError, ValueError."""
    import gi  # noqa: PLC0415 - optional: only the tree needs it

    gi.require_version("Atspi", "2.0")
    from gi.repository import Atspi  # noqa: PLC0415

    return Atspi


def run_query(query: Mapping[str, Any]) -> bytes:
    """Return the tree as XML, or the terminal's text as JSON. Raises: ImportError, ValueError: AT-SPI is missing."""
    atspi = import_atspi()
    is_terminal = query["what"] == "terminal"
    builder = TreeBuilder(
        atspi,
        max_nodes=query["max_nodes"],
        deadline_s=time.monotonic() + query["timeout_s"],
        only=frozenset({"frame", "terminal"}) if is_terminal else frozenset(),
        showing=query["showing"] and not is_terminal,
    )
    # The registry may have to be started first and then answers late. A hung application must not take all the time.
    atspi.set_timeout(8000, 8000)
    desktop = atspi.get_desktop(0)
    desktop.get_child_count()
    atspi.set_timeout(1500, 3000)
    tree = builder.build(desktop)
    return json.dumps(terminal_text(tree)).encode() if is_terminal else serialize(tree)


def _run_child(line: bytes, descriptor: int) -> None:
    """Run one query in a fork, write its result to a pipe, and exit."""
    ok, data = True, b""
    try:
        data = run_query(json.loads(line))
    except (ImportError, ValueError) as error:
        message = f"AT-SPI is missing in this guest ({error}); install python3-gi and gir1.2-atspi-2.0"
        ok, data = False, message.encode()
    except Exception as error:
        ok, data = False, f"{type(error).__name__}: {error}".encode()
    with open(descriptor, "wb") as pipe:
        pipe.write(data)
    os._exit(0 if ok else 1)


def serve(queries: Iterable[bytes], answers: IO[bytes]) -> None:
    with suppress(ImportError, ValueError):
        import_atspi()
    for line in queries:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _run_child(line, writing)
        os.close(writing)
        with open(reading, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(child, 0)
        answers.write(json.dumps({"ok": status == 0, "length": len(data)}).encode() + b"\n" + data)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
