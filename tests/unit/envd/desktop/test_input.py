"""Actions become paced events; invalid actions become a message for the agent."""

import math
import string
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuaenv.actions import (
    Action,
    Click,
    Done,
    Drag,
    Fail,
    KeyDown,
    KeyUp,
    MouseDown,
    MouseUp,
    Move,
    PressKeys,
    Scroll,
    TypeText,
    Wait,
)
from envd.desktop.display.rfb import RfbClient
from envd.desktop.input.keysyms import Key, Layout, character, keysym_of, layout_of, named_key
from envd.desktop.input.plan import (
    ActionRejected,
    Input,
    InputEvent,
    InputState,
    KeyEvent,
    Pause,
    PointerEvent,
    TypingMethod,
    chord_beyond_layout,
    depends_on_keyboard,
    plan,
    typing_method,
)
from envd.desktop.observation import Point
from tests.support.display import FakeDisplay

SIZE = (640, 480)
STATE = InputState(width_px=640, height_px=480, pointer=Point(10, 20))
CTRL, SHIFT, ALT = 0x1D, 0x2A, 0x38


def keys(events: tuple[InputEvent, ...]) -> list[tuple[int, bool]]:
    return [(event.key.scancode, event.down) for event in events if isinstance(event, KeyEvent)]


def pointers(events: tuple[InputEvent, ...]) -> list[tuple[int, int, int]]:
    return [(event.at.x_px, event.at.y_px, event.buttons) for event in events if isinstance(event, PointerEvent)]


def typed(events: tuple[InputEvent, ...], *, caps_lock: bool = False) -> str:
    """Return the text that a US keyboard driver produces from key events."""
    by_key = {}
    for char in string.printable:
        if stroke := character(char):
            by_key[stroke.key.scancode, stroke.shift] = char
    by_key |= {(0x39, True): " ", (0x1C, True): "\n", (0x0F, True): "\t"}
    text, shift = "", False
    for scancode, down in keys(events):
        if scancode == SHIFT:
            shift = down
        elif down:
            letter = by_key[scancode, False].isalpha()
            text += by_key[scancode, shift != (caps_lock and letter)]
    assert not shift
    return text


# Keys and their names


@pytest.mark.parametrize(
    ("names", "scancode"),
    [
        (("ctrl", "Control", "Control_L", "CTRL-LEFT", "ctrlleft"), 0x1D),
        (("win", "super", "Meta", "cmd", "command", "Super_L", "winleft"), 0xDB),
        (("alt", "option", "Alt_L"), 0x38),
        (("altgr", "ISO_Level3_Shift", "altright"), 0xB8),
        (("enter", "Return", "RETURN"), 0x1C),
        (("pageup", "pgup", "Page_Up", "page up", "Prior"), 0xC9),
        (("pagedown", "pgdn", "Page_Down", "Next"), 0xD1),
        (("del", "Delete"), 0xD3),
        (("esc", "Escape"), 0x01),
        (("f1", "F1"), 0x3B),
        (("F10",), 0x44),
        (("f11",), 0x57),
        (("f12",), 0x58),
        (("f24",), 0x6F),
        (("num5", "KP_5"), 0x4C),
        (("left", "ArrowLeft"), 0xCB),
        (("a", "A"), 0x1E),
        (("-", "minus"), 0x0C),
        (("_", "underscore"), 0x0C),
        ((" ", "space"), 0x39),
    ],
)
def test_a_key_is_found_by_all_its_names(names: tuple[str, ...], scancode: int) -> None:
    for name in names:
        stroke = named_key(name)
        assert stroke is not None, name
        assert stroke.key.scancode == scancode, name


@pytest.mark.parametrize("name", ["", "ctrl+c", "f25", "f0", "é", "ab", "hyper space", "\x00", "ſ"])
def test_an_unknown_name_has_no_key(name: str) -> None:
    assert named_key(name) is None


def test_every_printable_ascii_character_has_its_own_stroke() -> None:
    strokes = {character(chr(code)) for code in range(0x20, 0x7F)}
    assert None not in strokes
    assert len({(s.key.scancode, s.shift) for s in strokes if s}) == 95


# Pointer


@pytest.mark.parametrize(
    ("action", "state", "expected"),
    [
        # A move keeps the held buttons, and buttons are pressed and released one by one.
        (Move(639, 479), replace(STATE, buttons=4), [(639, 479, 4)]),
        (MouseDown(button="middle", x=1, y=2), STATE, [(1, 2, 0), (1, 2, 2)]),
        (MouseUp(button="middle"), replace(STATE, buttons=3), [(10, 20, 1)]),
        # The pointer moves before it presses; without a position it stays.
        (Click(3, 4), STATE, [(3, 4, 0), (3, 4, 1), (3, 4, 0)]),
        (Click(button="right"), STATE, [(10, 20, 4), (10, 20, 0)]),
        # The wheel turns once per click.
        (Scroll(dy=2, x=5, y=6), STATE, [(5, 6, 0), *[(5, 6, 16), (5, 6, 0)] * 2]),
        (Scroll(dy=-1), STATE, [(10, 20, 8), (10, 20, 0)]),
        (Scroll(dx=1), STATE, [(10, 20, 16), (10, 20, 0)]),
    ],
)
def test_an_action_moves_the_pointer_and_its_buttons(
    action: Action, state: InputState, expected: list[tuple[int, int, int]]
) -> None:
    assert pointers(plan(action, state)) == expected


@pytest.mark.parametrize(
    ("action", "down"),
    [
        # Scrolling sideways holds shift, and a modifier that the agent holds stays held.
        (Scroll(dx=1), [SHIFT]),
        (Click(modifiers=("alt",)), []),
        (PressKeys(keys=("alt", "c")), [0x2E]),
        # A capital is shifted alone and only its key in a chord; a symbol in a chord includes its shift.
        (PressKeys(keys=("S",)), [SHIFT, 0x1F]),
        (PressKeys(keys=("ctrl", "S")), [CTRL, 0x1F]),
        (PressKeys(keys=("ctrl", "+")), [CTRL, SHIFT, 0x0D]),
        # A key named twice is pressed once, and shift is held over a run of capitals.
        (PressKeys(keys=("ctrl", "ctrl")), [CTRL]),
        (TypeText(text="HELLO"), [SHIFT, 0x23, 0x12, 0x26, 0x26, 0x18]),
        (KeyDown(key="ctrl"), [CTRL]),
        (KeyUp(key="alt"), []),
    ],
)
def test_an_action_presses_keys_in_order_and_releases_what_it_pressed(action: Action, down: list[int]) -> None:
    events = keys(plan(action, replace(STATE, held={ALT: Key(ALT, 0xFFE9)})))
    assert [code for code, is_down in events if is_down] == down
    released = {KeyDown: [], KeyUp: [ALT]}.get(type(action), sorted(down))
    assert sorted(code for code, is_down in events if not is_down) == released


def test_a_double_click_is_two_presses_within_every_double_click_time() -> None:
    events = plan(Click(3, 4, count=2), STATE)
    assert [buttons for _, _, buttons in pointers(events)] == [0, 1, 0, 1, 0]
    assert sum(event.duration_s for event in events if isinstance(event, Pause)) < 0.2


def test_modifiers_are_held_around_a_click_and_released_in_reverse() -> None:
    events = plan(Click(3, 4, modifiers=("ctrl", "shift")), STATE)
    assert keys(events) == [(CTRL, True), (SHIFT, True), (SHIFT, False), (CTRL, False)]
    assert isinstance(events[0], PointerEvent)
    assert [type(event) for event in events[1:4]] == [KeyEvent, KeyEvent, PointerEvent]


def test_a_drag_presses_moves_in_small_steps_and_releases_at_the_end() -> None:
    path = pointers(plan(Drag(100, 100, 400, 300), STATE))
    assert path[:2] == [(100, 100, 0), (100, 100, 1)]
    assert path[-2:] == [(400, 300, 1), (400, 300, 0)]
    moves = path[1:-1]
    steps = [math.dist(a[:2], b[:2]) for a, b in pairwise(moves)]
    assert len(steps) >= 8
    assert max(steps) <= 30


def test_a_drag_to_its_start_still_presses_and_releases() -> None:
    path = pointers(plan(Drag(end_x=10, end_y=20), STATE))
    assert path[0] == (10, 20, 1)
    assert path[-1] == (10, 20, 0)


# Keys and text


def test_a_chord_is_pressed_in_order_and_released_in_reverse() -> None:
    events = plan(PressKeys(keys=("ctrl", "shift", "s"), hold=timedelta(seconds=0.5)), STATE)
    assert keys(events) == [(CTRL, True), (SHIFT, True), (0x1F, True), (0x1F, False), (SHIFT, False), (CTRL, False)]
    assert events[3] == Pause(0.5)


def test_a_chord_is_held_before_its_release_and_a_single_key_is_not() -> None:
    assert plan(PressKeys(keys=("alt", "tab")), STATE)[2] == Pause(0.02)
    assert len(plan(PressKeys(keys=("tab",)), STATE)) == 2


@given(st.text(string.printable.strip() + " \n\t", max_size=200), st.booleans())
def test_a_us_keyboard_driver_reads_back_what_was_typed(text: str, caps_lock: bool) -> None:
    state = InputState(width_px=640, height_px=480, pointer=Point(0, 0), caps_lock=caps_lock)
    assert typed(plan(TypeText(text=text), state), caps_lock=caps_lock) == text
    assert typed(plan(TypeText(text="a\r\nb\rc"), STATE)) == "a\nb\nc"


def test_done_and_fail_send_nothing_and_wait_waits() -> None:
    assert plan(Done(answer="x"), STATE) == plan(Fail(), STATE) == ()
    assert plan(Wait(timedelta(seconds=1.5)), STATE) == (Pause(1.5),)


# How text is typed


@pytest.mark.parametrize(
    ("text", "keys_held", "has_guestd", "method"),
    [
        ("", False, True, TypingMethod.KEYBOARD),
        ("hello world!", False, True, TypingMethod.GUESTD),
        ("hello worlds", False, True, TypingMethod.KEYBOARD),
        ("hello worlds!", False, True, TypingMethod.GUESTD),
        ("hello worlds!", False, False, TypingMethod.KEYBOARD),
        ("hello worlds!", True, True, TypingMethod.KEYBOARD),
        ("é", False, True, TypingMethod.GUESTD),
        ("日本", False, True, TypingMethod.GUESTD),
    ],
)
def test_text_is_typed_by_the_method_that_cannot_lose_it(
    text: str, keys_held: bool, has_guestd: bool, method: TypingMethod
) -> None:
    assert typing_method(text, keys_held=keys_held, has_guestd=has_guestd) is method


def test_text_that_is_not_on_the_keyboard_is_typed_by_a_script_if_there_is_no_guestd() -> None:
    def method(text: str, *, has_guestd: bool = False) -> TypingMethod:
        return typing_method(text, keys_held=False, has_guestd=has_guestd, has_script=True)

    assert method("naïve") is TypingMethod.SCRIPT
    assert method("naïve", has_guestd=True) is TypingMethod.GUESTD
    assert method("a script takes seconds, the keyboard does not" * 9) is TypingMethod.KEYBOARD
    with pytest.raises(ActionRejected, match="held"):
        typing_method("é", keys_held=True, has_guestd=False, has_script=True)


def test_short_text_after_other_keys_accounts_for_the_filled_queue() -> None:
    assert typing_method("hello", keys_held=False, has_guestd=True, queued=28.0) is TypingMethod.KEYBOARD
    assert typing_method("hello", keys_held=False, has_guestd=True, queued=29.0) is TypingMethod.GUESTD


@pytest.mark.parametrize(
    ("text", "keys_held", "has_guestd", "message"),
    [
        ("€", False, False, "'€'"),
        ("é", True, True, "held"),
        ("a\x1bb", False, True, r"U\+001B"),
        ("\x7f", False, False, r"U\+007F"),
        ("\ud800", False, True, r"U\+D800"),
        ("x" * 100_001, False, True, "100001"),
    ],
)
def test_text_that_cannot_be_typed_is_rejected(text: str, keys_held: bool, has_guestd: bool, message: str) -> None:
    with pytest.raises(ActionRejected, match=message):
        typing_method(text, keys_held=keys_held, has_guestd=has_guestd)


# Layouts other than US

#: Some keys of the German, French and Russian layouts, as guestd reports them.
GERMAN = layout_of(
    {"z": (21, False), "Z": (21, True), "y": (44, False), "-": (53, False), "ß": (12, False), "=": (11, True)}
)
FRENCH = layout_of({"a": (16, False), "A": (16, True), "1": (2, True), "&": (2, False)})
RUSSIAN = layout_of({"1": (2, False), "/": (43, True)})


def on(layout: Layout, **state: Any) -> InputState:
    return InputState(width_px=640, height_px=480, pointer=Point(0, 0), layout=layout, **state)


def test_text_and_chords_are_typed_with_the_keys_of_the_layout() -> None:
    assert keys(plan(TypeText(text="zy-ß"), on(GERMAN)))[::2] == [(21, True), (44, True), (53, True), (12, True)]
    assert keys(plan(PressKeys(keys=("ctrl", "A")), on(FRENCH)))[:2] == [(CTRL, True), (16, True)]
    assert keys(plan(PressKeys(keys=("alt", "1")), on(FRENCH)))[:3] == [(ALT, True), (SHIFT, True), (2, True)]
    assert keys(plan(PressKeys(keys=("ctrl", "equal")), on(GERMAN)))[:3] == [(CTRL, True), (SHIFT, True), (11, True)]
    assert keys(plan(KeyDown(key="a"), on(FRENCH))) == [(16, True)]
    assert keys(plan(PressKeys(keys=("enter",)), on({})))[:1] == [(0x1C, True)]


def test_caps_lock_changes_only_keys_with_both_cases_of_a_letter() -> None:
    assert keys(plan(TypeText(text="z"), on(GERMAN, caps_lock=True)))[0] == (SHIFT, True)
    assert keys(plan(TypeText(text="ß"), on(GERMAN, caps_lock=True)))[0] == (12, True)


def test_characters_that_the_layout_lacks_are_typed_by_guestd() -> None:
    def method(text: str, layout: Layout) -> TypingMethod:
        return typing_method(text, keys_held=False, has_guestd=True, layout=layout)

    assert method("zy-", GERMAN) is TypingMethod.KEYBOARD
    assert method("zy-@", GERMAN) is TypingMethod.GUESTD
    assert method("zy", layout_of({})) is TypingMethod.GUESTD
    assert method("\n\t", layout_of({})) is TypingMethod.KEYBOARD


def test_a_chord_that_the_layout_lacks_is_pressed_by_guestd() -> None:
    def chord(*names: str, hold: timedelta = timedelta()) -> tuple[list[int], str] | None:
        found = chord_beyond_layout(PressKeys(keys=names, hold=hold), RUSSIAN)
        return found and ([key.keysym for key in found[0]], found[1])

    assert chord("ctrl", "A") == ([0xFFE3], "a")
    assert chord("A") == ([], "A")
    assert chord("ctrl", "shift", "plus") == ([0xFFE3, 0xFFE1], "+")
    assert chord("ctrl", "1") is chord("enter") is None
    assert chord_beyond_layout(TypeText(text="a"), RUSSIAN) is None
    for rejected in (("f1", "a"), ("hyper", "a")):
        with pytest.raises(ActionRejected):
            chord(*rejected)
    with pytest.raises(ActionRejected, match="hold"):
        chord("a", hold=timedelta(seconds=1))
    with pytest.raises(ActionRejected, match="'a' on the keyboard"):
        plan(KeyDown(key="a"), on(RUSSIAN))


def test_a_key_is_released_where_it_was_pressed_although_the_layout_has_changed() -> None:
    held = {16: Key(16, keysym_of("a"))}
    for layout in (GERMAN, RUSSIAN, layout_of({"a": (30, False)})):
        assert keys(plan(KeyUp(key="a"), on(layout, held=held))) == [(16, False)]


def test_a_layout_from_a_guest_has_only_characters_on_keys() -> None:
    assert layout_of({"ab": (30, False), "": (30, False), "c": (0, False), "d": (200, True)}).keys() == {"\n", "\t"}


NUM_LOCK, KEYPAD_5 = 0x45, 0x4C


@pytest.mark.parametrize(
    ("action", "pressed"),
    [
        (PressKeys(keys=("num5",)), [NUM_LOCK, KEYPAD_5, NUM_LOCK]),
        (KeyDown(key="kp5"), [NUM_LOCK, KEYPAD_5, NUM_LOCK]),
        (PressKeys(keys=("add",)), [0x4E]),
    ],
)
def test_keypad_digits_are_digits_without_num_lock(action: Action, pressed: list[int]) -> None:
    assert [code for code, down in keys(plan(action, on(GERMAN, num_lock=False))) if down] == pressed
    assert NUM_LOCK not in [code for code, _ in keys(plan(action, on(GERMAN)))]


@pytest.mark.parametrize(
    ("action", "depends"),
    [
        (TypeText(text="a"), True),
        (TypeText(text="\r\n"), False),
        (PressKeys(keys=("ctrl", "a")), True),
        (PressKeys(keys=("alt", "tab")), False),
        (PressKeys(keys=("num5",)), True),
        (KeyDown(key="plus"), True),
        (KeyUp(key="shift"), False),
        (Click(), False),
    ],
)
def test_only_actions_with_characters_depend_on_the_keyboard(action: Action, depends: bool) -> None:
    assert depends_on_keyboard(action) is depends


# Invalid actions


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Move(640, 0), r"\(640, 0\) is off the screen, which is 640x480"),
        (Click(-1, 5), "off the screen"),
        (Drag(0, 0, 0, 480), "off the screen"),
        (Scroll(dy=1, x=9999, y=0), "off the screen"),
        (Click(count=0), "0 times"),
        (Click(count=11), "11 times"),
        (Scroll(dy=101), "101 wheel clicks"),
        (Scroll(dx=-101), "-101 wheel clicks"),
        (PressKeys(keys=()), "0 keys"),
        (PressKeys(keys=("a",) * 11), "11 keys"),
        (PressKeys(keys=("ctrl+c",)), "one by one"),
        (PressKeys(keys=("bogus",)), "no key is named 'bogus'"),
        (PressKeys(keys=("é",)), "type it as text"),
        (PressKeys(keys=("a",), hold=timedelta(seconds=-1)), "hold"),
        (PressKeys(keys=("a",), hold=timedelta.max), "hold"),
        (PressKeys(keys=("a",), hold=timedelta(seconds=1e9)), "hold"),
        (KeyDown(key=""), "no key is named ''"),
        (Click(modifiers=("nope",)), "'nope'"),
        (Click(x=5), "half a position"),
        (Wait(timedelta(seconds=-0.1)), "wait"),
        (Wait(timedelta.max), "wait"),
        (TypeText(text="ü"), "'ü'"),
        (PressKeys(keys=("ctrl", "alt", "2")), r"ctrl\+alt"),
    ],
)
def test_an_invalid_action_is_rejected_with_a_message(action: Action, message: str) -> None:
    with pytest.raises(ActionRejected, match=message):
        plan(action, STATE)


def test_a_console_switch_across_actions_is_rejected() -> None:
    held = InputState(
        width_px=640, height_px=480, pointer=Point(0, 0), held={code: Key(code, 0) for code in (0x9D, ALT)}
    )
    with pytest.raises(ActionRejected):
        plan(TypeText(text="7"), held)
    assert plan(TypeText(text="0"), held)


# Sending


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def display() -> AsyncIterator[FakeDisplay]:
    display = FakeDisplay(640, 480)
    yield display
    await display.close()


@pytest.fixture
async def client(display: FakeDisplay) -> RfbClient:
    return await connected(display)


@pytest.fixture
def held_input(clock: Clock) -> Input:
    return Input(monotonic=clock.monotonic, sleep=clock.sleep)


async def connected(display: FakeDisplay) -> RfbClient:
    client = await RfbClient.connect(*await display.connect())
    await client.read_update()
    return client


async def flush(client: RfbClient, display: FakeDisplay) -> None:
    """Return once the display has read all sent data."""
    count = len(display.requests)
    client.request(incremental=False, area=(0, 0, 1, 1))
    await client.read_update()
    assert len(display.requests) == count + 1


async def test_played_events_arrive_in_order_and_the_state_follows(
    display: FakeDisplay, client: RfbClient, held_input: Input
) -> None:
    assert held_input.pointer(SIZE) == Point(320, 240)
    await held_input.play(client, plan(KeyDown(key="ctrl"), held_input.state(SIZE)))
    await held_input.play(client, plan(MouseDown(x=7, y=8), held_input.state(SIZE)))
    await flush(client, display)
    assert [(key.scancode, key.down) for key in display.keys] == [(CTRL, True)]
    assert [(p.x_px, p.y_px, p.buttons) for p in display.pointers] == [(7, 8, 0), (7, 8, 1)]
    state = held_input.state(SIZE)
    assert (state.pointer, state.buttons, set(state.held)) == (Point(7, 8), 1, {CTRL})


async def test_the_keys_of_an_interrupted_chord_count_as_held(display: FakeDisplay, client: RfbClient) -> None:
    async def interrupt(duration_s: float) -> None:
        if duration_s == 1.0:
            raise InterruptedError

    held_input = Input(sleep=interrupt)
    with pytest.raises(InterruptedError):
        await held_input.play(
            client, plan(PressKeys(keys=("ctrl", "s"), hold=timedelta(seconds=1)), held_input.state(SIZE))
        )
    await flush(client, display)
    assert [(key.scancode, key.down) for key in display.keys] == [(CTRL, True), (0x1F, True)]
    assert set(held_input.state(SIZE).held) == {CTRL, 0x1F}


async def test_held_keys_and_buttons_are_pressed_again_on_a_new_connection(
    display: FakeDisplay, client: RfbClient, held_input: Input
) -> None:
    await held_input.play(client, plan(KeyDown(key="shift"), held_input.state(SIZE)))
    await held_input.play(client, plan(MouseDown(x=7, y=8), held_input.state(SIZE)))
    await flush(client, display)
    display.keys.clear()
    display.pointers.clear()
    second = await connected(display)
    await held_input.restore(second, SIZE)
    await flush(second, display)
    assert [(key.scancode, key.down) for key in display.keys] == [(SHIFT, True)]
    assert [(p.x_px, p.y_px, p.buttons) for p in display.pointers] == [(7, 8, 1)]


async def test_long_text_does_not_overflow_a_guest_that_stalls_for_400_ms(clock: Clock, held_input: Input) -> None:
    """A guest that drains its queue of 64 elements only every 400 ms drops nothing."""
    sent_s: list[float] = []

    class Recorder:
        def key(self, *, keysym: int, scancode: int, down: bool) -> None:
            sent_s.append(clock.now_s)

        async def drain(self) -> None:
            pass

    await held_input.play(Recorder(), plan(TypeText(text="Hello, World! " * 20), held_input.state(SIZE)))  # type: ignore[arg-type]
    for start_s in sent_s:
        assert 2 * sum(start_s <= t < start_s + 0.4 for t in sent_s) <= 64
    assert sent_s[-1] - sent_s[0] < 30
    assert 30 < held_input.queued < 40


async def test_a_pause_follows_each_key_so_that_the_pointer_cannot_overtake_it(
    clock: Clock, client: RfbClient, held_input: Input
) -> None:
    began_s = clock.now_s
    await held_input.play(client, plan(Click(modifiers=("ctrl", "shift")), held_input.state(SIZE)))
    assert clock.now_s - began_s >= 4 * 0.01


async def test_many_wheel_clicks_are_paced(clock: Clock, client: RfbClient, held_input: Input) -> None:
    began_s = clock.now_s
    await held_input.play(client, plan(Scroll(dy=3), held_input.state(SIZE)))
    assert clock.now_s == began_s
    await held_input.play(client, plan(Scroll(dy=97), held_input.state(SIZE)))
    assert 7 < clock.now_s - began_s < 10


async def test_the_pointer_stays_within_a_screen_that_shrinks(client: RfbClient, held_input: Input) -> None:
    await held_input.play(client, plan(Move(600, 400), held_input.state(SIZE)))
    assert held_input.pointer((320, 200)) == Point(319, 199)


@pytest.mark.parametrize("action", [Click(5, 5), Click(count=2), Drag(5, 5, 90, 90), MouseUp()])
def test_the_pause_after_a_release_exceeds_the_debounce_time(action: Action) -> None:
    events = plan(action, STATE)
    assert isinstance(events[-1], Pause)
    assert events[-1].duration_s > 0.025
