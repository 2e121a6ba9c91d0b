"""The accessibility tree of every desktop, drawn or real, as a client receives it."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from cuaenv.client import Element, EnvClient, Episode, Observation, Settle, TypeText, View
from tests.support.served import ServedDaemon

pytestmark = pytest.mark.timeout(600)

TEXT = "Zwölf Boxkämpfer\njagen"
FULL = View(cursor="hidden", a11y_tree=True, a11y_elements=True)
MARKED = View(cursor="hidden", a11y_tree=True, marks=True)
#: Configuration, a task that starts with an editor in front, and the title of its window.
DESKTOPS = [
    pytest.param(
        ('[pools.fake]\nimage = "fake"\nsize = 1\n[hypervisor]\nuri = "fake"\n', "fake/save-note", "note.txt"),
        id="fake",
    ),
    pytest.param(
        (
            '[pools.desktop]\nimage = "desktop"\nsize = 1\n[hypervisor]\ntemplate_dir = "{template_dir}"\n',
            "desktop/type-greeting",
            "greeting.txt",
        ),
        id="real",
        # Accessibility under emulation takes minutes.
        marks=[pytest.mark.vm, pytest.mark.long],
    ),
]


@pytest.fixture(params=DESKTOPS)
def editor(request: pytest.FixtureRequest, template_dir: Path, short_dir: Path) -> Iterator[tuple[Episode, str]]:
    """Return an episode with `TEXT` in an editor, and the title of its window."""
    config, task_id, title = request.param
    with ServedDaemon(short_dir / "s", config.format(template_dir=template_dir)) as daemon:
        address = daemon.wait_for(r"listening on (\S+)")
        with EnvClient(address) as client, client.reset(task_id, timeout=timedelta(minutes=9)) as episode:
            episode.step(TypeText(TEXT), settle=Settle(min=timedelta(seconds=1)))
            yield episode, title
        assert daemon.end() == 0


def test_the_tree_matches_the_screen_and_marks_are_drawn_on_its_elements(editor: tuple[Episode, str]) -> None:
    episode, title = editor
    seen, marked = _the_same_screen(episode)
    _elements_are_where_the_pixels_are(seen, title)
    _the_outline_has_a_line_for_each(seen)
    _marks_are_numbered_and_drawn(seen, marked)
    xml = episode.observe(view=View(encoding="none", a11y_tree=True, a11y_format="osworld_xml")).a11y_tree
    assert (xml or "").startswith("<desktop-frame")
    short = episode.observe(view=View(encoding="none", a11y_tree=True, a11y_max_chars=100)).a11y_tree
    assert len(short or "") <= 100


def _the_same_screen(episode: Episode) -> tuple[Observation, Observation]:
    """Observe it with and without marks, again if the guest, which runs during the calls, changed it between them."""
    for _ in range(5):
        seen, marked = episode.observe(view=FULL), episode.observe(view=MARKED)
        if seen.frame_id == marked.frame_id:
            return seen, marked
    raise AssertionError("the screen changes all the time")


def _elements_are_where_the_pixels_are(seen: Observation, title: str) -> None:
    elements = seen.a11y_elements
    assert elements
    window = elements[0]
    assert (window.role, window.depth, "active" in window.states) == ("frame", 0, True)
    assert title in window.name
    [area] = [element for element in elements if element.value == TEXT]
    assert "editable" in area.states
    assert area.is_actionable
    assert _holds(window, area)
    left, top, width, height = area.box
    assert seen.element_at(left + width // 2, top + height // 2) == area
    assert (seen.rgb_HWC[top : top + height, left : left + width] != seen.rgb_HWC[top + 2, left + 2]).any(), (
        "the text is visible"
    )


def _the_outline_has_a_line_for_each(seen: Observation) -> None:
    lines, elements = (seen.a11y_tree or "").splitlines(), seen.a11y_elements or ()
    assert len(lines) == len(elements)
    for line, element in zip(lines, elements, strict=True):
        assert line.startswith("  " * element.depth + element.role)
        assert line.endswith("({},{},{},{})".format(*element.box))


def _marks_are_numbered_and_drawn(seen: Observation, marked: Observation) -> None:
    marks = [element for element in marked.a11y_elements or () if element.mark]
    assert marks
    assert [element.mark for element in marks] == list(range(1, len(marks) + 1))
    assert all(element.is_actionable for element in marks)
    assert all(f"[{element.mark}] {element.role}" in (marked.a11y_tree or "") for element in marks)
    differs: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = (seen.rgb_HWC != marked.rgb_HWC).any(axis=2)
    for element in marks:
        left, top, width, height = element.box
        assert differs[top : top + height, left : left + width].any(), f"{element} has a box around it"


def _holds(outer: Element, inner: Element) -> bool:
    return all(
        outer.box[side] <= inner.box[side]
        and inner.box[side] + inner.box[side + 2] <= outer.box[side] + outer.box[side + 2]
        for side in (0, 1)
    )
