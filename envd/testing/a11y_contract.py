"""What holds of every desktop's accessibility tree, drawn or real: checked on what a client was told."""

import numpy as np

from trainer.client import Element, Observation


def assert_tells_the_screen(seen: Observation, marked: Observation, *, title: str, text: str) -> None:
    """Check what was told of a desktop with an editor in front.

    Args:
        seen: With outline, elements and pixels.
        marked: The same screen with outline and marks.
        title: A part of the window's title.
        text: What the editor holds.
    """
    assert seen.frame_id == marked.frame_id, "the screen stood still"
    elements = seen.a11y_elements
    assert elements
    window = elements[0]
    assert (window.role, window.depth) == ("frame", 0)
    assert title in window.name
    assert "active" in window.states
    editor = next(element for element in elements if element.value == text)
    assert "editable" in editor.states
    assert _holds(window, editor)
    assert seen.element_at(*_centre(editor)) == editor
    left, top, width, height = editor.box
    assert len(np.unique(seen.rgb_HWC[top : top + height, left : left + width].reshape(-1, 3), axis=0)) > 1, "it shows"

    assert seen.a11y_tree is not None
    told = seen.a11y_tree.splitlines()
    assert len(told) == len(elements)
    for line, element in zip(told, elements, strict=True):
        assert line.startswith("  " * element.depth + element.role)
        assert line.endswith("({},{},{},{})".format(*element.box))

    marks = [element for element in marked.a11y_elements or () if element.mark]
    assert [element.mark for element in marks] == list(range(1, len(marks) + 1))
    assert marks
    assert all(element.is_actionable for element in marks)
    assert all(f"[{element.mark}] {element.role}" in (marked.a11y_tree or "") for element in marks)
    differs = (seen.rgb_HWC != marked.rgb_HWC).any(axis=2)
    for element in marks:
        left, top, width, height = element.box
        assert differs[top : top + height, left : left + width].any(), f"{element} has a box around it"


def _centre(element: Element) -> tuple[int, int]:
    left, top, width, height = element.box
    return left + width // 2, top + height // 2


def _holds(outer: Element, inner: Element) -> bool:
    return all(
        outer.box[side] <= inner.box[side]
        and inner.box[side] + inner.box[side + 2] <= outer.box[side] + outer.box[side + 2]
        for side in (0, 1)
    )
