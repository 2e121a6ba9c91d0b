"""An agent that ends its guest gets a score, no second machine, and in training less than for a failure."""

from datetime import timedelta
from typing import Any

import gymnasium
import pytest

from cuaenv.client import Done, GuestEnded, Wait
from tests.support.desktops import DrawnDesktops
from tests.support.guest_ends import POWER_OFF, end_guests
from trainer.adapters.session import SessionSettings, session

TASK = "fake/enable"
WAIT = Wait(timedelta(milliseconds=10))


@pytest.mark.parametrize("between_steps", [False, True])
async def test_a_session_is_scored_and_not_void(
    desktops: DrawnDesktops, monkeypatch: pytest.MonkeyPatch, between_steps: bool
) -> None:
    end_guests(monkeypatch, between_steps=between_steps)
    async with session(TASK, settings=SessionSettings.connect(desktops.address)) as one:
        result = await one.step(POWER_OFF)
        if between_steps:
            assert not result.done
            result = await one.step(WAIT, WAIT)
            assert result.action_errors == ("the machine is off",) * 2
        assert (result.done, result.end_reason) == (True, "GUEST_ENDED")
        assert (one.done, one.truncated) == (True, False)
        score = await one.score()
        assert (score.value, score.reward, score.void) == (0.0, -0.1, "")
        assert score.guest_end_cause == "POWER_OFF"


async def test_a_call_to_an_ended_guest_ends_the_session_without_voiding_it(
    desktops: DrawnDesktops, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_guests(monkeypatch, between_steps=True)
    async with session(TASK, settings=SessionSettings.connect(desktops.address, ended_by_guest_score=0.0)) as one:
        await one.step(POWER_OFF)
        with pytest.raises(GuestEnded):
            await one.call(lambda episode: episode.step(WAIT))
        assert (one.done, one.void) == (True, "")
        assert (await one.score()).reward == 0.0


async def test_a_task_that_a_power_off_solves_keeps_its_score(
    desktops: DrawnDesktops, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_guests(monkeypatch, score=1.0)
    async with session(TASK, settings=SessionSettings.connect(desktops.address)) as one:
        await one.step(POWER_OFF)
        assert (await one.score()).reward == 1.0


async def test_a_failure_without_an_escape_is_0(desktops: DrawnDesktops, monkeypatch: pytest.MonkeyPatch) -> None:
    end_guests(monkeypatch)
    async with session(TASK, settings=SessionSettings.connect(desktops.address)) as one:
        await one.step(Done())
        score = await one.score()
        assert (score.value, score.reward, score.guest_end_cause) == (0.0, 0.0, "")


@pytest.mark.parametrize("between_steps", [False, True])
def test_gymnasium_terminates_with_the_penalty(
    desktops: DrawnDesktops, monkeypatch: pytest.MonkeyPatch, between_steps: bool
) -> None:
    end_guests(monkeypatch, between_steps=between_steps)
    env: Any = gymnasium.make("trainer.adapters.gymnasium:envd/Desktop-v0", task=TASK, envd=desktops.address)
    env.reset()
    *_, info = step = env.step({"action": "type", "text": POWER_OFF.text})
    if between_steps:
        assert step[1:4] == (0.0, False, False)
        *_, info = step = env.step({"action": "wait", "seconds": 0.01})
    assert step[1:4] == (-0.1, True, False)
    assert (info["void"], info["end_reason"], info["guest_end_cause"]) == ("", "GUEST_ENDED", "POWER_OFF")
    env.close()
