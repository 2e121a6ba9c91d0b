"""Parsing of accessibility trees: the elements, the outline, and hostile input."""

import itertools
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuaenv.region import Region
from envd.base.errors import GuestError
from envd.desktop.a11y import MAX_ELEMENTS, MAX_MARKS, MAX_NODES, outline, parse_tree, with_marks
from envd.desktop.display.frames import marks_of
from envd.desktop.observation import A11yElement, A11yElements

SCREEN = (1280, 800)
HEAD = (
    '<desktop-frame xmlns:st="https://accessibility.ubuntu.example.org/ns/state"'
    ' xmlns:cp="https://accessibility.ubuntu.example.org/ns/component"'
    ' xmlns:val="https://accessibility.ubuntu.example.org/ns/value">'
)
TAIL = "</desktop-frame>"


def node(role: str, name: str = "", *children: str, box: str = "10,20,30,40", states: str = "", more: str = "") -> str:
    x, y, width, height = box.split(",")
    attributes = " ".join(f'st:{state}="true"' for state in ("enabled", *states.split()))
    at = f'cp:screencoord="({x}, {y})" cp:size="({width}, {height})"' if box != ",,," else ""
    return f"<{role} name={quoteattr(name)} {attributes} {at} {more}>{''.join(children)}</{role}>"


def read(*nodes: str, max_nodes: int = MAX_NODES) -> A11yElements:
    return parse_tree(HEAD + "".join(nodes) + TAIL, screen_px=SCREEN, max_nodes=max_nodes)


def lines(elements: A11yElements, max_chars: int = 8192) -> list[str]:
    return outline(elements, max_chars=max_chars).splitlines()


def test_an_outline_has_a_line_for_each_element_with_role_name_value_states_and_box() -> None:
    window = node(
        "frame",
        "a.txt",
        node("push-button", "Save", box="62,66,36,25"),
        node("text", "", "Hello", states="focused editable", box="61,92,798,480"),
        node("check-box", "Wrap", states="checked", box="61,580,100,20"),
        box="60,40,800,560",
        states="active",
    )
    assert lines(read(node("application", "editor", window, box=",,,"))) == [
        'frame "a.txt" active (60,40,800,560)',
        '  push-button "Save" (62,66,36,25)',
        '  text value="Hello" focused editable (61,92,798,480)',
        '  check-box "Wrap" checked (61,580,100,20)',
    ]


def test_empty_containers_are_replaced_by_their_children() -> None:
    inner = node("filler", "", node("panel", "", node("push-button", "OK")))
    assert lines(read(node("frame", "w", inner))) == ['frame "w" (10,20,30,40)', '  push-button "OK" (10,20,30,40)']
    assert lines(read(node("filler", "", node("separator")))) == []


@pytest.mark.parametrize("box", ["-2147483648,-2147483648,9,9", "0,0,0,5", "1280,0,5,5", "-9,0,9,5", ",,,", "1,x,2,3"])
def test_an_element_without_a_box_on_the_screen_is_omitted_but_not_its_children(box: str) -> None:
    assert lines(read(node("panel", "gone", node("push-button", "here"), box=box))) == [
        'push-button "here" (10,20,30,40)'
    ]


def test_a_box_is_clipped_to_the_screen() -> None:
    [element] = read(node("frame", "w", box="-5,790,1290,100")).items
    assert element.box == Region(x_px=0, y_px=790, width_px=1280, height_px=10)


def test_a_value_is_omitted_if_it_equals_the_name() -> None:
    label, slider = read(node("label", "Total", "Total"), node("slider", "Volume", more='val:value="3.5"')).items
    assert (label.value, slider.value) == ("", "3.5")


def test_an_actionable_element_that_is_not_enabled_is_disabled() -> None:
    [button] = parse_tree(
        HEAD + node("push-button", "Paste").replace('st:enabled="true"', "") + TAIL, screen_px=SCREEN
    ).items
    assert button.states == ("disabled",)
    assert marks_of(with_marks(A11yElements(items=(button,)))) == ()


def test_the_active_window_comes_first_and_the_others_keep_their_order() -> None:
    windows = [node("frame", name, states="active" * (name == "c")) for name in "abc"]
    assert [element.name for element in read(*windows).items] == ["c", "a", "b"]


def test_a_truncated_outline_ends_between_elements_with_the_number_of_omitted_ones() -> None:
    elements = read(*(node("push-button", f"number {number}") for number in range(100)))
    whole = lines(elements)
    assert len(whole) == 100
    for limit in range(64, 600, 7):
        cut = lines(elements, limit)
        assert cut[:-1] == whole[: len(cut) - 1]
        assert cut[-1] == f"... {100 - len(cut) + 1} more"
        assert len("\n".join(cut)) <= limit
        assert len("\n".join(cut)) > limit - len(whole[0]) - 20, "more was omitted than necessary"
    assert lines(elements, len("\n".join(whole))) == whole


def test_an_outline_notes_that_the_guest_truncated_its_tree() -> None:
    elements = parse_tree(HEAD.replace(">", ' truncated="true">') + node("frame", "w") + TAIL, screen_px=SCREEN)
    assert elements.is_cut
    assert lines(elements) == ['frame "w" (10,20,30,40)', "... and more"]


@pytest.mark.parametrize("text", ['x"\npush-button "OK" (1,2,3,4)', "a\u2028b", "a\u202eb", "a\x85b"])
def test_a_name_cannot_imitate_another_element_or_change_the_writing_direction(text: str) -> None:
    [line] = lines(read(node("label", text)))
    assert line.startswith('label "')
    assert line.endswith("(10,20,30,40)")
    assert line.isprintable()


def test_long_texts_are_truncated_with_an_ellipsis() -> None:
    [element] = read(node("text", "n" * 5000, "v" * 5000)).items
    assert (len(element.name), element.name[-1]) == (200, "…")
    assert (len(element.value), element.value[-1]) == (400, "…")


def test_the_number_of_elements_of_wide_and_deep_trees_is_bounded() -> None:
    wide = read(*(node("push-button", str(number)) for number in range(MAX_ELEMENTS + 5)))
    assert (len(wide.items), wide.left_out_count) == (MAX_ELEMENTS, 5)
    assert lines(wide, 1_000_000)[-1] == "... 5 more"
    deep = node("frame", "top")
    for level in range(150):
        deep = node("panel", str(level), deep)
    assert max(element.depth for element in read(deep).items) == 150


def test_a_tree_with_too_many_nodes_is_incomplete() -> None:
    assert not read(*[node("label", "")] * 10, max_nodes=12).is_cut
    assert read(*[node("label", "")] * 12, max_nodes=12).is_cut


def test_no_depth_that_the_parser_accepts_is_left_out() -> None:
    deep = node("push-button", "innermost")
    for _ in range(250):
        deep = node("panel", "", deep)
    assert [element.name for element in read(deep).items] == ["innermost"]


@pytest.mark.parametrize("xml", ["", "not a tree", "<a>", "<a>\ud800</b>", "<a>" * 300 + "</a>" * 300, "<a/>" * 2])
def test_an_invalid_tree_is_an_error(xml: str) -> None:
    with pytest.raises(GuestError):
        parse_tree(xml, screen_px=SCREEN)


def test_entities_are_not_expanded_and_files_are_not_read() -> None:
    shown = HEAD.replace("<desktop-frame", '<!DOCTYPE d [<!ENTITY f SYSTEM "file:///etc/passwd">]><desktop-frame')
    [element] = parse_tree(shown + node("label", "x", "&f;") + TAIL, screen_px=SCREEN).items
    assert element.value == ""


def test_actionable_elements_are_numbered_unless_the_active_window_covers_them() -> None:
    front = node("frame", "front", node("push-button", "A", box="20,20,10,10"), states="active", box="0,0,100,100")
    back = node(
        "frame",
        "back",
        node("push-button", "hidden", box="50,50,10,10"),
        node("push-button", "seen", box="150,50,10,10"),
        box="40,40,200,200",
    )
    elements = with_marks(read(back, front, node("label", "text only")))
    assert {element.name: element.mark for element in elements.items} == {
        "front": 0,
        "A": 1,
        "back": 0,
        "hidden": 0,
        "seen": 2,
        "text only": 0,
    }
    assert '  [1] push-button "A" (20,20,10,10)' in lines(elements)


def test_the_number_of_marks_is_bounded() -> None:
    elements = with_marks(read(*(node("push-button", str(number)) for number in range(MAX_MARKS + 50))))
    assert [mark.number for mark in marks_of(elements)] == list(range(1, MAX_MARKS + 1))


NAMES = st.text(max_size=300)
BOXES = st.builds(
    Region,
    x_px=st.integers(0, 1279),
    y_px=st.integers(0, 799),
    width_px=st.integers(1, 1280),
    height_px=st.integers(1, 800),
)
ELEMENTS = st.lists(
    st.builds(
        A11yElement,
        role=st.sampled_from(["frame", "push-button"]),
        name=NAMES,
        value=NAMES,
        states=st.just(()),
        box=BOXES,
        depth=st.integers(0, 5),
    ),
    max_size=20,
).map(lambda items: A11yElements(items=tuple(items)))


@given(ELEMENTS, st.integers(64, 4000))
def test_an_outline_of_any_elements_keeps_its_length_and_its_lines(elements: A11yElements, limit: int) -> None:
    text = outline(elements, max_chars=limit)
    assert len(text) <= limit
    shown = text.splitlines()
    is_cut = bool(shown) and shown[-1].startswith("... ")
    left = int(shown[-1].split()[1]) if is_cut else 0
    assert len(shown) - is_cut + left == len(elements.items)
    assert outline(elements, max_chars=limit) == text


@st.composite
def trees(draw: st.DrawFn, depth: int = 0) -> str:
    role = draw(st.sampled_from(["frame", "panel", "push-button", "text", "_"]))
    box = draw(st.tuples(*[st.integers(-(10**9), 10**9) | st.integers(0, 900)] * 4))
    children = draw(st.lists(trees(depth=depth + 1), max_size=3)) if depth < 3 else []
    name = draw(st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff"), max_size=20))
    states = draw(st.sampled_from(["", "active", "focused showing", "checked modal"]))
    return node(role, name, *children, box=",".join(map(str, box)), states=states)


@given(trees())
def test_boxes_of_any_tree_are_on_the_screen_and_depths_grow_by_one(tree: str) -> None:
    elements = read(tree).items
    for before, element in itertools.pairwise(elements):
        assert element.depth <= before.depth + 1
    for element in elements:
        box = element.box
        assert box.x_px >= 0
        assert box.y_px >= 0
        assert min(box.width_px, box.height_px) > 0
        assert box.x_px + box.width_px <= SCREEN[0]
        assert box.y_px + box.height_px <= SCREEN[1]
