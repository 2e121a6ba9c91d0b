"""The actions of a step share a limited time, whatever an agent asks for, and no guest is blamed for a stalled host."""

from datetime import timedelta

import pytest

from cuaenv.actions import (
    MAX_ACTION_COUNT,
    MAX_PAUSE_S,
    MAX_STEP_S,
    MAX_TEXT_BYTES,
    Action,
    AskUser,
    Click,
    Done,
    PressKeys,
    RunShell,
    TypeText,
    Wait,
    longest,
)
from envd.desktop.observation import ActionOutcome
from tests.support.episode_world import World

MINUTE = timedelta(seconds=60)
TWO_MINUTES = timedelta(seconds=120)


@pytest.fixture
def performed(world: World, episode_id: str, monkeypatch: pytest.MonkeyPatch) -> list[Action]:
    """Make actions last as long as they may, and return those that were performed."""
    actions: list[Action] = []

    async def act(action: Action) -> ActionOutcome:
        actions.append(action)
        world.clock.stall(longest([action]).total_seconds())
        timed_out = isinstance(action, RunShell)
        return ActionOutcome(timed_out=timed_out, output="" if timed_out else None)

    desktop = world.desktop(episode_id)
    monkeypatch.setattr(desktop, "act", act)
    monkeypatch.setattr(desktop, "use_tool", act, raising=False)
    monkeypatch.setattr("envd.episodes.stepping.allowed_tools", lambda *_: ("shell",))
    return actions


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ((Wait(MINUTE),) * 2, (2, ["", ""])),
        ((Wait(MINUTE),) * 4, (2, ["", "", "not performed", "not performed"])),
        ((RunShell("x", TWO_MINUTES),) * 2, (1, ["", "not performed"])),
        ((RunShell("x", MINUTE * 0.75), RunShell("x", TWO_MINUTES)), (2, ["", "cut short"])),
        ((Wait(MINUTE), Wait(MINUTE / 2), Wait(MINUTE)), (3, ["", "", "cut short"])),
        ((PressKeys("a", MINUTE),) * 3 + (Click(),), (2, ["", "", "not performed", "not performed"])),
        ((TypeText("x" * MAX_TEXT_BYTES), Click()), (3, ["cut short", "not performed"])),
        ((TypeText("x" * 2400),), (3, [""])),
    ],
)
async def test_the_actions_of_a_step_share_two_minutes_and_the_rest_is_reported(
    world: World, episode_id: str, performed: list[Action], actions: tuple[Action, ...], expected: tuple[int, list[str]]
) -> None:
    result = await world.service.step(world.step_command(episode_id, 0, *actions))
    assert (len(performed), [outcome.error.partition(":")[0] for outcome in result.outcomes]) == expected
    assert result.timings_ms["input"] <= (MAX_STEP_S + MAX_PAUSE_S) * 1000
    # The next step has all of its time.
    again = await world.service.step(world.step_command(episode_id, 1, Wait(MINUTE)))
    assert not again.outcomes[0].error


async def test_a_reply_that_runs_out_of_time_still_ends_the_episode(
    world: World, episode_id: str, performed: list[Action]
) -> None:
    result = await world.service.step(world.step_command(episode_id, 0, *(Wait(MINUTE),) * 3, Done()))
    assert result.episode.progress.end_reason == "AGENT_DONE"
    assert len(performed) == 2


async def test_a_long_text_is_typed_in_parts_that_split_no_line_break(
    world: World, episode_id: str, performed: list[Action]
) -> None:
    text = "x" * 999 + "\r\n" + "y" * 10
    await world.service.step(world.step_command(episode_id, 0, TypeText(text)))
    assert performed == [TypeText("x" * 999 + "\n"), TypeText("y" * 10)]


def test_a_step_lasts_no_longer_than_its_client_waits() -> None:
    pause = timedelta(seconds=MAX_PAUSE_S)
    assert longest((Click(), Wait(pause), TypeText("x" * 100))) == pause + timedelta(seconds=5)
    for action in (Wait(pause), RunShell("x", TWO_MINUTES), AskUser("?"), TypeText("x" * MAX_TEXT_BYTES)):
        assert longest([action] * MAX_ACTION_COUNT) == timedelta(seconds=MAX_STEP_S)
