"""Tell an accessibility tree in a few lines, in the model's units, and find what can be acted on in it. Pure."""

from collections.abc import Sequence

from trainer.agent.coordinates import CoordinateSpace
from trainer.client import Element


def lines(elements: Sequence[Element], space: CoordinateSpace, *, max_chars: int) -> str:
    """Return elements as text: role, name, value, and the middle of each element in the model's units.

    Elements without name and value that cannot be acted on are left out. Cut at the end of a line.
    """
    told: list[str] = []
    left = max_chars
    for element in elements:
        if not (element.name or element.value or element.is_actionable):
            continue
        x, y, width, height = element.box
        at = space.from_screen(x + width // 2, y + height // 2)
        value = f" {element.value[:200]!r}" if element.value else ""
        line = f"{element.role} {element.name[:80]!r}{value} at {at[0]}, {at[1]}"
        left -= len(line) + 1
        if left < 0:
            break
        told.append(line)
    return "\n".join(told)


def boxes(elements: Sequence[Element]) -> tuple[tuple[int, int, int, int], ...]:
    """Return the boxes of the elements that can be acted on, in the guest's pixels."""
    return tuple(element.box for element in elements if element.is_actionable)
