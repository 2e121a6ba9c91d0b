"""Replaying scripted steps: when the next input is sent."""

from datetime import timedelta

from cuaenv.actions import Done, EditFile, PressKeys, RunShell, TypeText, Wait
from envd.tasks.oracle import Input, OracleAction, WaitFor
from envd.tasks.replay import replay

SAVE_AS = (PressKeys(keys=("ctrl", "shift", "s")),)
NAME = (TypeText(text="/home/user/a.txt\n"),)
DONE = (Done(),)


LOOK = (Wait(timedelta(seconds=0.5)),)


class Screen:
    """A guest whose screen responds after some waits, in several parts."""

    def __init__(self, *, responds_after_waits: int, pieces: int = 1) -> None:
        self.performed: list[tuple[Input, ...]] = []
        self.awaited: list[tuple[int, WaitFor]] = []
        """Conditions, each after the number of steps performed so far."""
        self._delay = responds_after_waits
        self._pieces = pieces
        self._left: int | None = None
        self._to_come = 0
        self._shown = 0

    async def step(self, actions: tuple[Input, ...]) -> str:
        self.performed.append(actions)
        if isinstance(actions[0], Wait):
            self._left = None if self._left is None else self._left - 1
        elif not isinstance(actions[0], Done):
            self._left, self._to_come = self._delay, self._pieces
        if self._left is not None and self._left <= 0 and self._to_come:
            self._to_come -= 1
            self._shown += 1
        return f"frame-{self._shown}"

    async def wait_for(self, condition: WaitFor) -> str:
        self.awaited.append((len(self.performed), condition))
        return f"frame-{self._shown}"


async def play(screen: Screen, *steps: tuple[OracleAction, ...]) -> list[tuple[Input, ...]]:
    await replay(steps, first_frame_id="frame-0", step=screen.step, wait_for=screen.wait_for)
    return screen.performed


async def test_the_next_input_follows_the_last_part_of_the_response() -> None:
    performed = await play(Screen(responds_after_waits=0, pieces=3), SAVE_AS, NAME, DONE)
    assert performed == [SAVE_AS, LOOK, LOOK, LOOK, NAME, LOOK, LOOK, LOOK, DONE]


async def test_waiting_for_a_screen_that_never_settles_ends() -> None:
    assert await play(Screen(responds_after_waits=0, pieces=99), SAVE_AS, DONE) == [SAVE_AS, *[LOOK] * 5, DONE]


async def test_the_wait_ends_without_a_response_and_none_is_expected_of_waits() -> None:
    performed = await play(Screen(responds_after_waits=99), SAVE_AS, DONE)
    waited_s = sum(action.duration.total_seconds() for step in performed for action in step if isinstance(action, Wait))
    assert waited_s == 60.0
    assert performed[-1] == DONE
    idle = (Wait(timedelta(seconds=1)),)
    assert await play(Screen(responds_after_waits=0), idle, DONE) == [idle, DONE]


async def test_tools_respond_without_a_change_of_the_screen() -> None:
    edit = (EditFile(path="/home/user/a.txt", old="a", new="b"), RunShell("make"))
    screen = Screen(responds_after_waits=99)
    performed = await play(screen, edit, (RunShell("ls"),), DONE)
    assert performed == [edit, (RunShell("ls"),), DONE]
    also_input = (RunShell("ls"), *NAME)
    assert await play(Screen(responds_after_waits=0), also_input, DONE) == [also_input, LOOK, DONE]


async def test_conditions_are_awaited_with_and_without_patience() -> None:
    screen = Screen(responds_after_waits=99)
    dialog = WaitFor.model_validate({"window": {"title": "Save as"}})
    file = WaitFor.model_validate({"file": "/home/user/a.txt"})
    assert await play(screen, (*SAVE_AS, dialog), (*NAME, dialog, file), DONE) == [SAVE_AS, NAME, DONE]
    assert screen.awaited == [(1, dialog), (2, dialog), (2, file)]
    dialog = WaitFor.model_validate({"window": {"title": "Save as"}})
    performed = await play(Screen(responds_after_waits=0, pieces=2), (*SAVE_AS, dialog), DONE)
    assert performed == [SAVE_AS, LOOK, LOOK, DONE]
    screen = Screen(responds_after_waits=0)
    dialog = WaitFor.model_validate({"window": {"title": "Save as"}})
    steps = ((*SAVE_AS, dialog), DONE)
    await replay(steps, first_frame_id="frame-0", step=screen.step, wait_for=screen.wait_for, patience_s=())
    assert (screen.performed, screen.awaited) == ([SAVE_AS, DONE], [(1, dialog)])
