"""Oracles with conditions, played over the service on drawn desktops."""

import math

import pytest

from cuaenv.actions import Action, Click, Done, TypeText
from cuaenv.client import StepResult
from envd.authoring.playing import ConditionNotMet, Steps, play
from envd.tasks.oracle import WaitFor
from tests.support.server import served_client

CLOSE_CONTROLS = Click(1128, 54)


def condition(**fields: object) -> WaitFor:
    return WaitFor.model_validate(fields)


async def play_in_one_episode(steps: Steps, *, max_wait_s: float = math.inf) -> list[tuple[Action, ...]]:
    """Play steps; return the actions of each call."""
    performed: list[tuple[Action, ...]] = []

    def on_step(actions: tuple[Action, ...], result: StepResult) -> None:
        performed.append(actions)

    async with served_client(size=1) as (_, client), client.reset("fake/close-controls") as episode:
        await play(episode, steps, runs_guests=False, on_step=on_step, max_wait_s=max_wait_s)
        return performed


async def test_conditions_that_hold_take_no_steps() -> None:
    open_and_gone = (condition(window={"title": "Editor"}), condition(window={"title": "Controls"}, absent=True))
    nothing_saved = condition(file="/home/user/note.txt", absent=True)
    performed = await play_in_one_episode([(CLOSE_CONTROLS, *open_and_gone), (TypeText("x"), nothing_saved), (Done(),)])
    assert performed == [(CLOSE_CONTROLS,), (TypeText("x"),), (Done(),)]


async def test_a_condition_that_never_holds_ends_the_play_with_an_error() -> None:
    window = condition(window={"title": "Calculator"}, timeout_s=0.5)
    with pytest.raises(ConditionNotMet, match=r"0\.5 s .*/Calculator/"):
        await play_in_one_episode([(CLOSE_CONTROLS, window), (Done(),)])


async def test_a_player_may_wait_for_less_time_than_a_condition_allows() -> None:
    window = condition(window={"title": "Calculator"}, timeout_s=600)
    with pytest.raises(ConditionNotMet, match=r"0\.5 s .*/Calculator/"):
        await play_in_one_episode([(CLOSE_CONTROLS, window), (Done(),)], max_wait_s=0.5)
