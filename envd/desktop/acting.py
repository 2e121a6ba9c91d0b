"""Perform actions on one guest: which way input goes, and what it waits for first."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace

from cuaenv.actions import Action, Click, Done, Drag, Fail, MouseDown, MouseUp, ToolAction, TypeText, Wait
from envd.base.errors import DisplayError, GuestError, GuestUnresponsive, MachineLost
from envd.desktop import toolbox
from envd.desktop.display.screen import Screen
from envd.desktop.display_connection import DisplayConnection
from envd.desktop.guestd import GuestdClient
from envd.desktop.input.keysyms import US, Key, Layout, layout_of
from envd.desktop.input.plan import (
    ActionRejected,
    Input,
    InputEvent,
    InputState,
    KeyEvent,
    PointerEvent,
    TypingMethod,
    chord_beyond_layout,
    depends_on_keyboard,
    normalized,
    plan,
    typing_method,
)
from envd.desktop.observation import ActionOutcome, Point
from envd.desktop.session import GuestPauses, GuestSession
from envd.desktop.settler import Settler

logger = logging.getLogger(__name__)


#: Enter, space, and Alt with a mnemonic.
_ACTIVATING_KEYSYMS = frozenset({0xFF0D, 0xFF8D, 0x0020, 0xFFE9, 0xFFEA})
_ANY_SCREEN = InputState(width_px=1 << 15, height_px=1 << 15, pointer=Point(0, 0))
_LATE = "the desktop did not finish this action in time; it may have had a part of its effect"
_POINTER_TIMEOUT_S = 2.0
_POINTER_TOLERANCE_PX = 2

#: A guest that is too busy to answer in time has the layout that it last reported.
_KEYBOARD_TIMEOUT_S = 2.0
_TYPING_TIMEOUT_S = 30.0
_TYPING_TIMEOUT_PER_CHAR_S = 0.05


class Actor:
    """Performs actions on one guest, one at a time."""

    def __init__(
        self,
        machine_id: str,
        *,
        display: DisplayConnection,
        screen: Screen,
        held: Input,
        session: GuestSession,
        settler: Settler,
        pauses: GuestPauses,
    ) -> None:
        self._machine_id = machine_id
        self._display = display
        self._screen = screen
        self._input = held
        self._session = session
        self._settler = settler
        self._pauses = pauses
        self._layout: Layout = US
        self._num_lock = True
        self._reports_keyboard = True

    async def act(self, action: Action) -> ActionOutcome:
        """Perform one action. See `Desktop.act`."""
        if isinstance(action, Done | Fail):
            return ActionOutcome()
        began_s = time.monotonic()
        self._settler.may_act_late |= may_act_late(action)
        self._settler.was_clicked |= clicks(action)
        try:
            if isinstance(action, Wait):
                plan(action, self._input.state(self._screen.size))  # rejects an invalid duration
                await asyncio.sleep(action.duration.total_seconds())
                return ActionOutcome()
            await self._display.client()
            if depends_on_keyboard(action):
                await self._read_keyboard()
            if isinstance(action, TypeText):
                method = typing_method(
                    action.text,
                    keys_held=self._input.keys_held,
                    has_guestd=self._session.guestd_types,
                    has_script=self._session.has_powershell,
                    queued=self._input.queued,
                    layout=self._layout,
                )
                if method is not TypingMethod.KEYBOARD:
                    outcome = await self._unless_late(self._type_in_session(action.text, method))
                    return replace(outcome, input_ms=_ms_since(began_s))
            elif self._layout is not US and (chord := chord_beyond_layout(action, self._layout)):
                held, text = chord
                typing = self._type_in_session(text, TypingMethod.GUESTD, held=held)
                outcome = await self._unless_late(typing)
                return replace(outcome, input_ms=_ms_since(began_s))
            events = plan(
                action,
                self._input.state(
                    self._screen.size, caps_lock=self._screen.caps_lock, num_lock=self._num_lock, layout=self._layout
                ),
            )
        except ActionRejected as rejection:
            return ActionOutcome(error=str(rejection))
        if _is_keyboard_only(events) and self._settler.is_pointer_pending:
            await self._settler.settle(self._pauses.input_settle)
        await self._play(events)
        return ActionOutcome(input_ms=_ms_since(began_s))

    async def use_tool(self, action: ToolAction) -> ActionOutcome:
        """Use a tool when all earlier input has arrived. See `Desktop.use_tool`."""
        began_s = time.monotonic()
        if self._settler.is_input_pending:
            await self._settler.settle(self._pauses.input_settle)
        try:
            outcome = await self._unless_late(toolbox.use(self._session, action))
            return replace(outcome, input_ms=_ms_since(began_s))
        finally:
            self._settler.note_input()  # a command may change the screen

    async def _unless_late(self, work: Awaitable[ActionOutcome]) -> ActionOutcome:
        """Return the result of work in the session, or an outcome that reports that it did not end in time.

        A session that answers again has not ended: it was late, because QEMU was stopped, the host was busy, or the
        agent kept it busy. None of them is the guest's end, and if it were void, an agent could choose that.

        Raises:
            GuestUnresponsive: The session does not answer either.
        """
        try:
            return await work
        except GuestUnresponsive as error:
            if not await self._session.is_alive():
                raise
            logger.warning("machine %s: late, but alive: %s", self._machine_id, error)
            return ActionOutcome(error=_LATE)

    async def _play(self, events: Sequence[InputEvent]) -> None:
        client = await self._display.client()
        has_pointer = any(isinstance(event, PointerEvent) for event in events)
        if has_pointer and not client.absolute_pointer:
            raise GuestError(
                f"machine {self._machine_id} has no absolute pointer: it has no tablet, or its guest has no driver for"
                " it loaded yet"
            )
        try:
            await self._input.play(client, events)
        except MachineLost as error:
            await self._display.client()  # raises if the machine is lost too
            raise DisplayError(
                f"machine {self._machine_id}: the display dropped its connection during input; part of the input may"
                " have had its effect"
            ) from error
        finally:
            self._screen.note_input()
            self._settler.note_input(pointer=has_pointer, keys=any(isinstance(event, KeyEvent) for event in events))

    async def _read_keyboard(self) -> None:
        """Update the layout and Num Lock, if the guest reports them."""
        if not (self._session.guestd_types and self._reports_keyboard):
            return
        with suppress(GuestError, GuestUnresponsive):
            state = await self._session.guestd("read the keyboard").keyboard(timeout_s=_KEYBOARD_TIMEOUT_S)
            if state is None:
                self._reports_keyboard = False
            else:
                self._layout, self._num_lock = layout_of(state.characters), state.num_lock

    async def _type_in_session(self, text: str, method: TypingMethod, *, held: Sequence[Key] = ()) -> ActionOutcome:
        """Type a text while keys are held. The outcome's error says why it, or its end, was not typed."""
        guestd = self._session.guestd("type text") if method is TypingMethod.GUESTD else None
        if guestd is not None and self._settler.is_pointer_pending:
            await self._wait_for_pointer(guestd)
            self._settler.note_input()  # the input is known to have arrived only now
        if self._settler.is_input_pending:
            await self._settler.settle(self._pauses.input_settle)
        try:
            if guestd is not None:
                timeout_s = _TYPING_TIMEOUT_S + _TYPING_TIMEOUT_PER_CHAR_S * len(text)
                keysyms = [key.keysym for key in held]
                error = await guestd.type_text(normalized(text), held=keysyms, timeout_s=timeout_s)
                return ActionOutcome(error=error)
            await self._session.type_by_script(text)
            return ActionOutcome()
        finally:
            self._settler.note_input()

    async def _wait_for_pointer(self, guestd: GuestdClient) -> None:
        """Wait, for a bounded time, until the guest's pointer is where we put it; then our clicks have arrived too."""
        expected = self._input.pointer(self._screen.size)
        with suppress(TimeoutError, GuestError, GuestUnresponsive):
            async with asyncio.timeout(_POINTER_TIMEOUT_S):
                while True:
                    actual = await guestd.pointer()
                    if max(abs(actual.x_px - expected.x_px), abs(actual.y_px - expected.y_px)) <= _POINTER_TOLERANCE_PX:
                        return
                    await asyncio.sleep(self._pauses.pointer_poll_s)


def may_act_late(action: Action) -> bool:
    """Return whether a key of an action can activate a button. The guest may then sleep before it acts.

    GTK shows such a button as pressed for 250 ms first (gtkbutton.c, `ACTIVATE_TIMEOUT`). Spaces and Enter within a
    text are typing.
    """
    if isinstance(action, TypeText):
        return action.text.endswith("\n")
    try:
        events = plan(action, _ANY_SCREEN)
    except ActionRejected:
        return False
    return _is_keyboard_only(events) and any(
        isinstance(event, KeyEvent) and event.key.keysym in _ACTIVATING_KEYSYMS for event in events
    )


def clicks(action: Action) -> bool:
    """Return whether an action presses or releases a mouse button."""
    return isinstance(action, Click | Drag | MouseDown | MouseUp)


def _is_keyboard_only(events: Sequence[InputEvent]) -> bool:
    kinds = {type(event) for event in events}
    return KeyEvent in kinds and PointerEvent not in kinds


def _ms_since(began_s: float) -> float:
    return (time.monotonic() - began_s) * 1000
