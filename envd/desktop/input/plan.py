"""Turn actions into keyboard and pointer events, and send these at a pace that loses none.

`plan` is pure: an invalid action raises `ActionRejected` with a message for the agent, and nothing is sent.
`Input` plays planned events over RFB and tracks what is held down.
`typing_method` decides which text a program in the guest types instead.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from cuaenv.actions import (
    MAX_CHORD_KEY_COUNT,
    MAX_CLICK_COUNT,
    MAX_PAUSE_S,
    MAX_WHEEL_CLICKS,
    Action,
    Button,
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
    ToolAction,
    TypeText,
    Wait,
)
from envd.desktop.display.rfb import RfbClient
from envd.desktop.input.keysyms import (
    KEYPAD_DIGITS,
    MODIFIERS,
    NUM_LOCK,
    SHIFT,
    US,
    CharacterKeys,
    Key,
    Layout,
    character,
    keysym_of,
    named_character,
    named_key,
)
from envd.desktop.observation import Point

MAX_TEXT_CHARS = 100_000

_BUTTON_BITS: Mapping[Button, int] = {"left": 1, "middle": 2, "right": 4}
_WHEEL_UP_BIT = 8
_WHEEL_DOWN_BIT = 16

# Far below every double-click time (GTK 400 ms, Windows 500 ms), and long enough for programs that poll.
_PRESS_S = 0.02
# Openbox takes the keyboard when it sees Alt+Tab, and misses a release of Alt before that. On a busy host its switcher
# stayed open after 4 of 5 chords, and after none of 6 with a pause before the release.
_CHORD_HOLD_S = 0.02
# libinput treats a press within 25 ms of a release as a bouncing contact and drops both (its fallback dispatch,
# debounce states): of 20 single clicks sent back to back, 2 or 3 were lost without this pause.
_RELEASE_PAUSE_S = 0.04
# Most toolkits start a drag after 4 to 8 pixels, and drop targets expect the pointer to arrive and pause.
_DRAG_STEP_PX = 25
_DRAG_STEPS = range(8, 41)
_DRAG_STEP_S = 0.015
_DRAG_PAUSE_S = 0.06

# QEMU's VNC server forwards a key event at once only if the previous one is at least 10 ms of guest time old; else it
# queues it (ui/input.c, `qemu_input_event_send_key_delay`; pointer events do not queue and would overtake it). So a
# pause follows each key event: the order of keyboard and pointer holds, and when `Input.play` returns, the guest's
# devices have all events. Without the pause, a refresh was answered while the last keys of a chord were still queued.
KEY_PAUSE_S = 0.0125

# A virtio keyboard or tablet has a queue of 64 elements and silently drops an event group that does not fit
# (QEMU's hw/input/virtio-input.c); the guest's evdev clients hold as many; USB and PS/2 keyboards hold 16 key events.
# A key event takes 2 elements (key, sync), a pointer event 3 (x, y, sync) and one per button that changes.
# 32 elements may be sent at once and 80 per second after that, so a guest that handles no interrupts for
# (64 - 32) / 80 = 0.4 s still loses nothing. Under TCG on a host with a load of four times its cores, stalls exceeded
# 0.25 s: of 353 characters typed at 160 elements per second, 32 were lost.
_QUEUE_BURST = 32
_QUEUE_PER_S = 80.0
_QUEUE_LIMIT = 48

_CTRL_SCANCODES = frozenset({0x1D, 0x9D})
_ALT_SCANCODE = 0x38
_DIGITS_1_TO_9 = range(0x02, 0x0B)


class ActionRejected(Exception):
    """The action is invalid; the message is for the agent. Nothing was sent."""


@dataclass(frozen=True, slots=True)
class PointerEvent:
    """The pointer is at a position with these buttons down."""

    at: Point
    buttons: int


@dataclass(frozen=True, slots=True)
class KeyEvent:
    """A key is pressed or released."""

    key: Key
    down: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause before the next event."""

    duration_s: float


InputEvent = PointerEvent | KeyEvent | Pause


@dataclass(frozen=True, slots=True, kw_only=True)
class InputState:
    """Inputs of `plan`."""

    width_px: int
    height_px: int
    pointer: Point
    buttons: int = 0
    held: Mapping[int, Key] = field(default_factory=dict)
    """The keys that are down, by scancode."""
    caps_lock: bool = False
    num_lock: bool = True
    layout: Layout = field(default_factory=lambda: US)


class TypingMethod(Enum):
    """How text is typed into the guest."""

    #: As key events over RFB.
    KEYBOARD = "keyboard"
    #: By guestd's `type_text`, in the guest's session.
    GUESTD = "guestd"
    #: By a script of the guest agent, in the guest's session.
    SCRIPT = "script"


def typing_method(
    text: str, *, keys_held: bool, has_guestd: bool, has_script: bool = False, queued: float = 0.0, layout: Layout = US
) -> TypingMethod:
    """Decide how to type a text.

    - If a character is not on the guest's layout, guestd types the whole text, to keep its order; without guestd a
      script, which takes seconds.
    - While the agent holds a key, the keyboard types: the held key and the text form chords.
    - If the events fit into the free part of the guest's queue (`queued` elements are in use; 12 plain characters fit
      an empty one), the keyboard types: nothing can be lost, however slow the guest is, and it works at login screens.
    - Longer text is typed by guestd, which cannot lose events; without guestd by the keyboard, paced.

    Raises:
        ActionRejected: The text cannot be typed on this machine.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise ActionRejected(f"text of {len(text)} characters is too long; type at most {MAX_TEXT_CHARS} at once")
    text = normalized(text)
    for char in text:
        if char not in "\n\t" and (ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 or 0xD800 <= ord(char) < 0xE000):
            raise ActionRejected(f"text contains U+{ord(char):04X}, which cannot be typed; press keys by name instead")
    foreign = next((char for char in text if character(char, layout) is None), None)
    if foreign is not None:
        if not (has_guestd or has_script):
            raise ActionRejected(f"cannot type {foreign!r}: it is not on the keyboard, and the guest has no guestd")
        if keys_held:
            raise ActionRejected(f"cannot type {foreign!r} while a key is held down; release it first")
        return TypingMethod.GUESTD if has_guestd else TypingMethod.SCRIPT
    if keys_held or not has_guestd or queued + 2 * len(_typing(text, layout)) <= _QUEUE_LIMIT:
        return TypingMethod.KEYBOARD
    return TypingMethod.GUESTD


def depends_on_keyboard(action: Action) -> bool:
    """Return whether an action's events depend on the guest's layout or Num Lock."""
    match action:
        case TypeText(text=text):
            return bool(text.strip("\r\n\t"))
        case PressKeys(keys=names):
            return any(map(_depends_on_keyboard, names))
        case KeyDown(key=name):
            return _depends_on_keyboard(name)
        case KeyUp(key=name):
            return named_character(name) is not None
        case _:
            return False


def _depends_on_keyboard(name: str) -> bool:
    if named_character(name) is not None:
        return True
    stroke = named_key(name)
    return stroke is not None and stroke.key in KEYPAD_DIGITS


def chord_beyond_layout(action: Action, layout: Layout) -> tuple[tuple[Key, ...], str] | None:
    """Return the modifiers and the characters of a chord that guestd must press; None if the keyboard can.

    Raises:
        ActionRejected: Neither can.
    """
    if not isinstance(action, PressKeys):
        return None
    chars = [named_character(name) for name in action.keys]
    foreign = next((char for char in chars if char is not None and char not in layout), None)
    if foreign is None:
        return None
    strokes = [_stroke(name, layout) for name, char in zip(action.keys, chars, strict=True) if char is None]
    others = [stroke.key for stroke in strokes]
    if action.hold or not MODIFIERS.issuperset(others):
        raise ActionRejected(f"the keyboard layout lacks {foreign!r}; press it alone or with modifiers, without a hold")
    text = "".join(filter(None, chars))
    return tuple(dict.fromkeys(others)), text.lower() if len(action.keys) > 1 else text


def plan(action: Action, state: InputState) -> tuple[InputEvent, ...]:
    """Return the events that perform an action. `Done`, `Fail` and those of tools have none.

    Raises:
        ActionRejected: A key name is unknown, a position is off the screen, or a number is out of range.
    """
    events = tuple(_plan(action, state))
    _reject_console_switch(events, state.held)
    return events


def _plan(action: Action, state: InputState) -> list[InputEvent]:
    match action:
        case Move():
            return [PointerEvent(_on_screen(Point(action.x, action.y), state), state.buttons)]
        case Click():
            if not 1 <= action.count <= MAX_CLICK_COUNT:
                raise ActionRejected(f"cannot click {action.count} times; count is 1 to {MAX_CLICK_COUNT}")
            at, events = _move_to(action.x, action.y, state)
            down = state.buttons | _BUTTON_BITS[action.button]
            up = state.buttons & ~_BUTTON_BITS[action.button]
            clicks: list[InputEvent] = []
            for _ in range(action.count):
                clicks += [PointerEvent(at, down), Pause(_PRESS_S), PointerEvent(at, up), Pause(_RELEASE_PAUSE_S)]
            return events + _with_modifiers(action.modifiers, clicks, state)
        case Drag():
            start, events = _move_to(action.start_x, action.start_y, state)
            end = _on_screen(Point(action.end_x, action.end_y), state)
            down = state.buttons | _BUTTON_BITS[action.button]
            moves: list[InputEvent] = [PointerEvent(start, down), Pause(_DRAG_PAUSE_S)]
            for point in _line(start, end):
                moves += [PointerEvent(point, down), Pause(_DRAG_STEP_S)]
            up = state.buttons & ~_BUTTON_BITS[action.button]
            moves += [Pause(_DRAG_PAUSE_S), PointerEvent(end, up), Pause(_RELEASE_PAUSE_S)]
            return events + _with_modifiers(action.modifiers, moves, state)
        case MouseDown():
            at, events = _move_to(action.x, action.y, state)
            return [*events, PointerEvent(at, state.buttons | _BUTTON_BITS[action.button])]
        case MouseUp():
            at, events = _move_to(action.x, action.y, state)
            up = state.buttons & ~_BUTTON_BITS[action.button]
            return [*events, PointerEvent(at, up), Pause(_RELEASE_PAUSE_S)]
        case Scroll():
            return _scroll(action, state)
        case TypeText(text=text):
            typing_method(text, keys_held=True, has_guestd=False, layout=state.layout)
            return _typing(text, state.layout, caps_lock=state.caps_lock)
        case PressKeys():
            hold_s = action.hold.total_seconds()
            if not 0 <= hold_s <= MAX_PAUSE_S:
                raise ActionRejected(f"cannot hold keys for {hold_s} s; hold is 0 to {MAX_PAUSE_S:.0f} s")
            chord = [key for key in _chord(action.keys, state.layout) if key.scancode not in state.held]
            if len(chord) > 1:
                hold_s = max(hold_s, _CHORD_HOLD_S)
            presses: list[InputEvent] = [
                *(KeyEvent(key, down=True) for key in chord),
                *([Pause(hold_s)] if hold_s else []),
                *(KeyEvent(key, down=False) for key in reversed(chord)),
            ]
            return _with_num_lock(chord, presses, state)
        case KeyDown(key=name):
            key = _stroke(name, state.layout).key
            return _with_num_lock([key], [KeyEvent(key, down=True)], state)
        case KeyUp(key=name):
            # The layout may have changed since the key was pressed.
            char = named_character(name)
            held = (key for key in state.held.values() if char is not None and key.keysym == keysym_of(char))
            return [KeyEvent(next(held, None) or _stroke(name, state.layout).key, down=False)]
        case Wait():
            duration_s = action.duration.total_seconds()
            if not 0 <= duration_s <= MAX_PAUSE_S:
                raise ActionRejected(f"cannot wait for {duration_s} s; duration is 0 to {MAX_PAUSE_S:.0f} s")
            return [Pause(duration_s)]
        case Done() | Fail() | ToolAction():
            return []


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldInputs:
    """Pointer position of a machine, and the keys and buttons held down."""

    pointer: Point | None = None
    """Last position set; None if it was never set."""
    buttons: int = 0
    """RFB button mask."""
    keys: tuple[Key, ...] = ()
    """Held keys in order of pressing."""

    def pointer_on(self, width_px: int, height_px: int) -> Point:
        """Return the pointer's position on a screen: the last one set, else the centre, where servers start it."""
        if self.pointer is None:
            return Point(width_px // 2, height_px // 2)
        return Point(min(self.pointer.x_px, width_px - 1), min(self.pointer.y_px, height_px - 1))


class Input:
    """The keyboard and pointer of one machine, with their held keys and buttons.

    A key or button counts as held from just before its event is written, so after an interrupted `play` nothing is
    pressed that `state` does not report.
    """

    def __init__(
        self,
        *,
        held: HeldInputs | None = None,
        key_pause_s: float = KEY_PAUSE_S,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        held = held or HeldInputs()
        self._key_pause_s = key_pause_s
        self._monotonic = monotonic
        self._sleep = sleep
        self._pointer = held.pointer
        self._buttons = held.buttons
        self._held = {key.scancode: key for key in held.keys}
        self._keyboard_pace = _Pace()
        self._pointer_pace = _Pace()

    @property
    def held(self) -> HeldInputs:
        """Initial state for a fork of the machine."""
        return HeldInputs(pointer=self._pointer, buttons=self._buttons, keys=tuple(self._held.values()))

    @property
    def keys_held(self) -> bool:
        return bool(self._held)

    @property
    def queued(self) -> float:
        """Upper bound of the elements in the guest keyboard's queue."""
        return self._keyboard_pace.level(self._monotonic())

    def pointer(self, screen_size: tuple[int, int]) -> Point:
        return self.held.pointer_on(*screen_size)

    def state(
        self, screen_size: tuple[int, int], *, caps_lock: bool = False, num_lock: bool = True, layout: Layout = US
    ) -> InputState:
        width_px, height_px = screen_size
        return InputState(
            width_px=width_px,
            height_px=height_px,
            pointer=self.pointer(screen_size),
            buttons=self._buttons,
            held=dict(self._held),
            caps_lock=caps_lock,
            num_lock=num_lock,
            layout=layout,
        )

    async def play(self, client: RfbClient, events: Iterable[InputEvent]) -> None:
        """Send events at a safe pace; return once the guest's devices have all of them."""
        for event in events:
            match event:
                case Pause(duration_s):
                    await self._rest(client, duration_s)
                case KeyEvent(key, down):
                    await self._rest(client, self._keyboard_pace.take(2, self._monotonic()))
                    if down:
                        self._held[key.scancode] = key
                    client.key(keysym=key.keysym, scancode=key.scancode, down=down)
                    if not down:
                        self._held.pop(key.scancode, None)
                    await self._rest(client, self._key_pause_s)
                case PointerEvent(at, buttons):
                    cost = 3 + (self._buttons ^ buttons).bit_count()
                    await self._rest(client, self._pointer_pace.take(cost, self._monotonic()))
                    self._pointer, self._buttons = at, buttons
                    client.pointer(at.x_px, at.y_px, buttons=buttons)
        await client.drain()

    async def _rest(self, client: RfbClient, duration_s: float) -> None:
        if duration_s:  # without a wait, events are sent together
            await client.drain()
            await self._sleep(duration_s)

    async def restore(self, client: RfbClient, screen_size: tuple[int, int]) -> None:
        """Press the held keys and buttons again on a new connection: QEMU releases keys when a viewer disconnects."""
        events: list[InputEvent] = [KeyEvent(key, down=True) for key in self._held.values()]
        if self._buttons:
            events.append(PointerEvent(self.pointer(screen_size), self._buttons))
        await self.play(client, events)


class _Pace:
    """Estimated fill of a guest's event queue that drains at `_QUEUE_PER_S`."""

    def __init__(self) -> None:
        self._level = 0.0
        self._time_s = 0.0

    def level(self, now_s: float) -> float:
        """Return the estimated number of queued elements."""
        return max(0.0, self._level - max(0.0, now_s - self._time_s) * _QUEUE_PER_S)

    def take(self, cost: int, now_s: float) -> float:
        """Add an event; return the seconds to wait before sending it."""
        self._level = self.level(now_s) + cost
        self._time_s = now_s
        return max(0.0, (self._level - _QUEUE_BURST) / _QUEUE_PER_S)


def _on_screen(point: Point, state: InputState) -> Point:
    if not (0 <= point.x_px < state.width_px and 0 <= point.y_px < state.height_px):
        raise ActionRejected(
            f"point ({point.x_px}, {point.y_px}) is off the screen, which is {state.width_px}x{state.height_px} pixels"
        )
    return point


def _move_to(x: int | None, y: int | None, state: InputState) -> tuple[Point, list[InputEvent]]:
    """Return the position to act at (the pointer's without x and y), and the events that move the pointer there.

    The move is an event of its own: QEMU queues the buttons of a pointer event before its position.
    """
    if x is None and y is None:
        return state.pointer, []
    if x is None or y is None:
        raise ActionRejected(f"x={x} y={y} is half a position; give both coordinates or neither")
    to = _on_screen(Point(x, y), state)
    return to, [PointerEvent(to, state.buttons)]


def _line(start: Point, end: Point) -> list[Point]:
    """Return points from after `start` up to and including `end`."""
    distance_px = math.hypot(end.x_px - start.x_px, end.y_px - start.y_px)
    count = min(max(math.ceil(distance_px / _DRAG_STEP_PX), _DRAG_STEPS.start), _DRAG_STEPS.stop - 1)
    return [
        Point(
            start.x_px + round((end.x_px - start.x_px) * i / count),
            start.y_px + round((end.y_px - start.y_px) * i / count),
        )
        for i in range(1, count + 1)
    ]


def _scroll(action: Scroll, state: InputState) -> list[InputEvent]:
    for axis, clicks in (("dy", action.dy), ("dx", action.dx)):
        if abs(clicks) > MAX_WHEEL_CLICKS:
            raise ActionRejected(
                f"cannot scroll {clicks} wheel clicks; {axis} is -{MAX_WHEEL_CLICKS} to {MAX_WHEEL_CLICKS}"
            )
    at, events = _move_to(action.x, action.y, state)
    turns = _with_modifiers(action.modifiers, _wheel(action.dy, at, state), state)
    if action.dx:
        # QEMU's VNC server ignores the horizontal wheel (buttons 6 and 7 had no effect in 7.2), and its tablets have
        # none. Shift with the wheel scrolls sideways in GTK, Qt, Chromium, Firefox and Windows.
        sideways = _wheel(action.dx, at, state)
        turns += _with_modifiers((*action.modifiers, "shift"), sideways, state)
    return events + turns


def _wheel(clicks: int, at: Point, state: InputState) -> list[InputEvent]:
    bit = _WHEEL_DOWN_BIT if clicks > 0 else _WHEEL_UP_BIT
    return [PointerEvent(at, buttons) for _ in range(abs(clicks)) for buttons in (state.buttons | bit, state.buttons)]


def _with_modifiers(names: Sequence[str], events: list[InputEvent], state: InputState) -> list[InputEvent]:
    keys = [key for key in _chord(names, state.layout) if key.scancode not in state.held] if names else []
    return [
        *(KeyEvent(key, down=True) for key in keys),
        *events,
        *(KeyEvent(key, down=False) for key in reversed(keys)),
    ]


def _with_num_lock(keys: Sequence[Key], events: list[InputEvent], state: InputState) -> list[InputEvent]:
    """Turn Num Lock on around events of keypad digits, which are cursor keys without it."""
    if state.num_lock or KEYPAD_DIGITS.isdisjoint(keys):
        return events
    toggle: list[InputEvent] = [KeyEvent(NUM_LOCK, down=True), KeyEvent(NUM_LOCK, down=False)]
    return [*toggle, *events, *toggle]


def _chord(names: Sequence[str], layout: Layout) -> list[Key]:
    """Return the keys to press, in order.

    A symbol includes its Shift (`+` is Shift and `=`), and so does a capital letter alone. Among other keys the case of
    a letter is ignored, because "ctrl+S" commonly means Control and the S key.
    """
    if not 1 <= len(names) <= MAX_CHORD_KEY_COUNT:
        raise ActionRejected(f"cannot press {len(names)} keys together; name 1 to {MAX_CHORD_KEY_COUNT}")
    keys: dict[int, Key] = {}
    for name in names:
        stroke = _stroke(name, layout)
        if stroke.shift and (len(names) == 1 or not (named_character(name) or "").isalpha()):
            keys.setdefault(SHIFT.scancode, SHIFT)
        keys.setdefault(stroke.key.scancode, stroke.key)
    return list(keys.values())


def _stroke(name: str, layout: Layout) -> CharacterKeys:
    if stroke := named_key(name, layout):
        return stroke
    if char := named_character(name):
        raise ActionRejected(f"no key {char!r} on the keyboard; type it as text instead")
    hint = "; name the keys of a chord one by one" if "+" in name else ""
    raise ActionRejected(f"no key is named {name[:40]!r}{hint}")


def _typing(text: str, layout: Layout, *, caps_lock: bool = False) -> list[InputEvent]:
    """Return the key events that type a text of a layout, with Shift held over runs that need it."""
    events: list[InputEvent] = []
    shifted = False
    for char in normalized(text):
        stroke = character(char, layout)
        if stroke is None:
            raise ActionRejected(f"cannot type {char!r}: it is not on the keyboard")
        # Caps Lock inverts the case of keys with both cases of a letter; the text is typed as given even if the agent
        # left it on.
        other = character(char.swapcase(), layout) if caps_lock and char.isalpha() else None
        shift = stroke.shift != (other is not None and other.key.scancode == stroke.key.scancode)
        if shift != shifted:
            events.append(KeyEvent(SHIFT, down=shift))
            shifted = shift
        events += [KeyEvent(stroke.key, down=True), KeyEvent(stroke.key, down=False)]
    if shifted:
        events.append(KeyEvent(SHIFT, down=False))
    return events


def normalized(text: str) -> str:
    """Return a text with its line ends as newlines."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _reject_console_switch(events: tuple[InputEvent, ...], held: Mapping[int, Key]) -> None:
    """Reject Control+Alt+1 to 9: QEMU's VNC server handles them itself, to switch consoles."""
    down = set(held)
    for event in events:
        if not isinstance(event, KeyEvent):
            continue
        if not event.down:
            down.discard(event.key.scancode)
            continue
        if event.key.scancode in _DIGITS_1_TO_9 and _ALT_SCANCODE in down and down & _CTRL_SCANCODES:
            raise ActionRejected("ctrl+alt with a digit cannot be sent to this machine")
        down.add(event.key.scancode)
