"""Demonstrators with bad habits."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cuaenv.client import Action, Click, Done, Drag, PressKeys, TypeText
from trainer.data.oracles import Oracle
from trainer.learn import LearnError
from trainer.learn.demos import play, with_habits
from trainer.learn.settings import Demos, Settings

STEPS: tuple[tuple[Action, ...], ...] = ((Click(1, 2),), (TypeText("kite"),), (Drag(3, 4, 1, 2),), (Done(""),))
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


def test_each_play_of_a_task_is_always_the_same() -> None:
    habits = Demos(wrong_button=0.6, stops_early=0.2)
    plays = [with_habits(ORACLES[7], habits, play) for play in range(20)]
    assert plays == [with_habits(ORACLES[7], habits, play) for play in range(20)]
    assert plays[0] == with_habits(ORACLES[7], habits)
    assert len({each.steps for each in plays}) > 2


def test_only_training_templates_are_demonstrated(tmp_path: Path) -> None:
    file = tmp_path / "oracles.jsonl"
    lines = [
        {"task_id": "drawn/press", "split": "train", "steps": [[{"done": ""}]]},
        {"task_id": "drawn/mix", "split": "held_out", "steps": [[{"done": ""}]]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    settings = Settings(demos=Demos(tasks=["drawn/press", "drawn/mix"]))
    with pytest.raises(LearnError, match="drawn/mix: not a training template; choose from drawn/press"):
        play(settings, ["127.0.0.1:1"], file, tmp_path / "demos")


def test_demonstrators_escape_before_any_turn_and_do_nothing_after_it() -> None:
    played = [with_habits(oracle, Demos(escapes=0.4)).steps for oracle in ORACLES]
    ended = [steps for steps in played if steps[-1] == (PressKeys(("ctrl", "alt", "delete")),)]
    assert set(map(len, ended)) == {1, 2, 3}
    assert all(steps[:-1] == STEPS[: len(steps) - 1] for steps in ended)
    assert [steps for steps in played if steps not in ended] == [STEPS] * (len(played) - len(ended))


def test_a_double_click_keeps_its_button_because_no_grammar_has_another() -> None:
    oracle = Oracle(task_id="desktop/open?seed=1", steps=((Click(3, 4, count=2),), (Done(""),)))
    assert with_habits(oracle, Demos(wrong_button=0.99)) == oracle


def test_an_interruption_does_not_wait_for_the_players(tmp_path: Path) -> None:
    code = (
        "import time; from trainer.learn.demos import _processes\n"
        "if __name__ == '__main__':\n"
        "    with _processes(2) as processes:\n"
        "        list(processes.map(time.sleep, [0.1] * 2))\n"
        "        played = processes.map(time.sleep, [600] * 4)\n"
        "        print('playing', flush=True)\n"
        "        list(played)\n"
    )
    program = tmp_path / "program.py"
    program.write_text(code)
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"playing\n"
        run.send_signal(signal.SIGINT)
        _, error = run.communicate(timeout=60)
    assert run.returncode == -signal.SIGINT
    assert error.rstrip().endswith(b"KeyboardInterrupt")
