"""Mutants of an oracle: what they change, where they are forked off, and what they leave alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuaenv.actions import Click, Done, PressKeys, TypeText
from envd.bench.attack.mutants import Family, Mutant, mutants_of
from envd.tasks.model import Task

PATH = "/home/user/note.txt"
ORACLE = [[{"click": {"x": 100, "y": 50}}], [{"type": "Room 12"}, {"press": ["ctrl", "s"]}], ["done"]]


def task(**changes: Any) -> Task:
    fields = {
        "task_id": "mine/note",
        "instruction": "Write the room into the note.",
        "level": 1,
        "setup": [{"kind": "write_file", "path": "/home/user/rooms.txt", "text": "Room 12"}],
        "checker": {"kind": "file_text", "path": PATH, "equals": "Room 12"},
        "oracle": ORACLE,
    }
    return Task.model_validate(fields | changes)


def named(one: Task) -> dict[str, Mutant]:
    return {mutant.name: mutant for mutant in mutants_of(one)}


def test_the_oracle_is_changed_in_one_place_at_a_time() -> None:
    found = named(task())
    click, save = Click(100, 50), PressKeys(("ctrl", "s"))
    rest = ((TypeText("Room 12"), save), (Done(),))
    assert found["step 1: left out"].steps == rest
    assert found["step 1: twice"].steps == ((click,), (click,), *rest)
    assert found["step 1: after the next one"].steps == (rest[0], (click,), (Done(),))
    assert found["step 1: below, action 1"].steps == ((Click(100, 98),), *rest)
    changed = {name: found[name].steps[0][0] for name in found if name.endswith("action 1") and "step 2" in name}
    assert changed == {
        "step 2: other case, action 1": TypeText("rOOM 12"),
        "step 2: one character, action 1": TypeText("Rool 12"),
        "step 2: one digit, action 1": TypeText("Room 11"),
        "step 2: blank at the end, action 1": TypeText("Room 12 "),
    }
    assert all(found[name].shared_count == 1 for name in changed)
    assert "step 3: left out" not in found


def test_a_name_that_the_checker_looks_for_is_changed() -> None:
    oracle = [[{"type": "note.txt\n"}], ["done"]]
    assert named(task(oracle=oracle))["step 1: other name than note, action 1"].steps[0] == (TypeText("note2.txt\n"),)


def test_answers_are_hedged() -> None:
    one = task(checker={"kind": "answer", "equals": "42"}, oracle=[[{"done": "42"}]])
    answers = {mutant.steps[-1][-1].answer for mutant in mutants_of(one) if mutant.family is Family.ALMOST}  # type: ignore[union-attr]
    assert answers == {"41", "42 ", "42 or 24x", "24x, 42, x24", ""}


def test_cheats_are_those_of_the_checker() -> None:
    commands = {mutant.name: mutant.commands for mutant in mutants_of(task()) if mutant.commands}
    assert commands[f"empty {PATH}"] == (f"mkdir -p /home/user; : > {PATH}",)
    assert commands[f"/home/user/rooms.txt copied to {PATH}"] == (f"cp /home/user/rooms.txt {PATH}",)
    assert commands[f"pipe in place of {PATH}"][0].endswith(f"mkfifo {PATH}")
    program = task(checker={"kind": "command", "argv": ["gsettings", "get"], "stdout": {"equals": "Adwaita-dark"}})
    (fake,) = named(program)["own gsettings in PATH"].commands
    assert "Adwaita-dark" in fake


def test_the_oracle_is_repeated_and_must_always_score() -> None:
    repeated = [mutant for mutant in mutants_of(task()) if mutant.expects_success]
    assert len(repeated) == 3
    assert {(mutant.steps, mutant.shared_count) for mutant in repeated} == {(task().oracle, 0)}


def test_a_verdict_does_not_outlive_its_task_or_mutant() -> None:
    one, other = mutants_of(task())[:2]
    assert len({one.digest("a"), one.digest("b"), other.digest("a")}) == 3


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@given(TEXTS)
def test_no_mutant_is_the_oracle_and_no_two_are_equal(text: str) -> None:
    one = task(oracle=[[{"type": text}], [{"press": ["enter"]}], ["done"]])
    mutants = mutants_of(one)
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    wrong = [tuple(mutant.script) for mutant in mutants if not mutant.expects_success]
    assert len(set(wrong)) == len(wrong)
    changed = [mutant for mutant in mutants if not mutant.expects_success]
    assert all(mutant.commands or mutant.shared_count or mutant.steps != one.oracle for mutant in changed)


@pytest.mark.parametrize("oracle", [[], [["done"]]])
def test_a_task_without_actions_has_mutants_without_steps(oracle: list[Any]) -> None:
    assert all(len(mutant.steps) <= 1 for mutant in mutants_of(task(oracle=oracle)))
