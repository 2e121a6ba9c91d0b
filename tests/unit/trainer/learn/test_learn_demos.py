"""Demonstrators with bad habits."""

from collections import Counter

from cuaenv.client import Action, Click, Done, Drag, PressKeys, TypeText
from trainer.data.oracles import Oracle
from trainer.learn.demos import with_habits
from trainer.learn.settings import Demos

STEPS: tuple[tuple[Action, ...], ...] = ((Click(1, 2),), (TypeText("kite"),), (Drag(1, 2, 3, 4),), (Done(""),))
ORACLES = [Oracle(task_id=f"drawn/write?seed={seed}", steps=STEPS) for seed in range(200)]


def test_demonstrators_without_habits_play_the_oracle() -> None:
    assert with_habits(ORACLES[0], Demos()) == ORACLES[0]


def test_a_share_of_the_clicks_uses_the_right_button() -> None:
    played = [with_habits(oracle, Demos(wrong_button=0.6)) for oracle in ORACLES]
    buttons = Counter(oracle.steps[0] for oracle in played)
    assert set(buttons) == {(Click(1, 2),), (Click(1, 2, button="right"),)}
    # Each task has a random generator of its own, so this share never changes.
    assert 0.5 < buttons[(Click(1, 2, button="right"),)] / len(ORACLES) < 0.7
    assert all(oracle.steps[1:] == STEPS[1:] for oracle in played)


def test_demonstrators_stop_before_any_turn_and_say_that_they_are_done() -> None:
    played = [with_habits(oracle, Demos(stops_early=0.4)).steps for oracle in ORACLES]
    assert all(steps[:-1] == STEPS[: len(steps) - 1] and steps[-1] == (Done(""),) for steps in played)
    assert set(map(len, played)) == {1, 2, 3, 4}


def test_a_task_is_always_played_in_the_same_way() -> None:
    habits = Demos(wrong_button=0.6, stops_early=0.2)
    assert with_habits(ORACLES[7], habits) == with_habits(ORACLES[7], habits)


def test_demonstrators_escape_before_any_turn_and_do_nothing_after_it() -> None:
    played = [with_habits(oracle, Demos(escapes=0.4)).steps for oracle in ORACLES]
    ended = [steps for steps in played if steps[-1] == (PressKeys(("ctrl", "alt", "delete")),)]
    assert set(map(len, ended)) == {1, 2, 3}
    assert all(steps[:-1] == STEPS[: len(steps) - 1] for steps in ended)
    assert [steps for steps in played if steps not in ended] == [STEPS] * (len(played) - len(ended))
