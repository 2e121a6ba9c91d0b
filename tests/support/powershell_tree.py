"""Syntax trees of PowerShell, for tests that check scripts where no PowerShell runs."""

from collections.abc import Iterator

import tree_sitter_powershell
from tree_sitter import Language, Node, Parser


def parse(source: str) -> Node:
    """Return the tree of a script; `has_error` is set where it does not parse."""
    return Parser(Language(tree_sitter_powershell.language())).parse(source.encode()).root_node


def nodes(node: Node, kind: str) -> Iterator[Node]:
    """Yield a node and all below it that are of a kind, in the order of the source."""
    if node.type == kind:
        yield node
    for child in node.children:
        yield from nodes(child, kind)


def text(node: Node) -> str:
    """Return the source of a node."""
    assert node.text is not None
    return node.text.decode()
