"""Read YAML and JSON strictly, and know where in the file each part stands.

No repeated keys, of which plain loaders silently keep the last; no bombs of aliases; no file beyond a limit.
"""

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources.abc import Traversable

import yaml

#: The built-in suite has some 2,000.
_MAX_PARTS = 200_000
_MAX_BYTES = 64 << 20

Place = Sequence[int | str]
"""A way down: keys of mappings and places in lists, from the top."""


@dataclass(frozen=True)
class Document:
    """What a file holds."""

    content: object
    text: str
    """As it was read, for `line_of`."""

    def line_of(self, place: Place) -> int | None:
        """Return the line, from 1, on which the part at a place begins, or the closest part around it."""
        node = self._root
        for part in place:
            # What is no key on the way is the name that a checked union has given to one of its members.
            node = _child(node, part) or node
        return None if node is None else node.start_mark.line + 1

    def locate(self, file: str, place: Place) -> str:
        """Return `FILE:LINE` for the part at a place, or FILE where no line is known."""
        line = self.line_of(place)
        return f"{file}:{line}" if line else file

    @cached_property
    def _root(self) -> yaml.Node | None:
        try:
            return yaml.compose(self.text, Loader=yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError):  # JSON that is no YAML, for it has tabs
            return None


def read_document(source: Traversable) -> Document:
    """Read a file, as JSON where it is named so, else as YAML.

    Raises:
        ValueError: It cannot be read; says why, without the file's name.
    """
    text = read_text(source)
    if source.name.endswith(".json"):
        return Document(parse_json(text), text)
    try:
        return Document(yaml.load(text, Loader=_StrictLoader), text)  # noqa: S506 - a SafeLoader
    # Not YAMLError alone: the loader lets through whatever Python makes of `2001-99-99`, `!!timestamp x` or "[" * 9999.
    except Exception as error:
        raise ValueError(f"cannot be read: {error}") from error


def read_text(source: Traversable) -> str:
    """Read a file of text. Raises: ValueError: It cannot be read."""
    try:
        data = source.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read: {error}") from error
    if len(data) > _MAX_BYTES:
        raise ValueError(f"cannot be read: {len(data)} bytes are more than {_MAX_BYTES}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot be read: {error}") from error


def parse_json(text: str) -> object:
    """Parse JSON without repeated keys and without numbers that JSON has not. Raises: ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be read: {error}") from error


class _StrictLoader(yaml.SafeLoader):
    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _written_out_count(node, {}) > _MAX_PARTS:
            problem = f"written out without its aliases it has more than {_MAX_PARTS} parts, or no end"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is there twice", key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


def _written_out_count(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return how many parts a node has with every alias replaced by what it stands for; at most one above the limit."""
    if id(node) not in counts:
        # While it is being counted it has no end; so has one that holds itself.
        counts[id(node)] = _MAX_PARTS + 1
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            parts = node.value
        elif isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        counts[id(node)] = min(_MAX_PARTS + 1, 1 + sum(_written_out_count(part, counts) for part in parts))
    return counts[id(node)]


def _child(node: yaml.Node | None, part: int | str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == str(part)), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        child: yaml.Node = node.value[part]
        return child
    return None


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return mapping


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
