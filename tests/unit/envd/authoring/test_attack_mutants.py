"""Mutants of an oracle: what they change, where they are forked off, and what they leave alone."""

import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cuaenv.actions import Click, Done, PressKeys, RunShell, TypeText
from envd.authoring.attack.mutants import Family, Mutant, attack_digest, mutants_of
from envd.authoring.attack.playing import Attack
from envd.authoring.attack.report import AttackReport, Verdict, acceptance, read_passed, read_verdicts, write_passed
from envd.base.errors import ConfigError
from envd.cli.tasks_attack import attackable, sampled
from envd.cli.tasks_oracles import read_mutants, read_oracles
from envd.tasks.basis import judged_digest
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


def test_typed_names_commands_and_targets_are_changed() -> None:
    oracle = [[{"type": "note.txt\n"}], ["done"]]
    assert named(task(oracle=oracle))["step 1: other name than note, action 1"].steps[0] == (TypeText("note2.txt\n"),)
    found = named(task(tools=["shell"], oracle=[[{"run_shell": {"command": "echo Room 12"}}], ["done"]]))
    assert found["step 1: one digit, action 1"].steps[0] == (RunShell("echo Room 11"),)
    click = {"click": {"x": 3, "y": 4, "target": {"name": "Save"}}}
    found = named(task(oracle=[[click], ["done"]]))
    assert found["step 1: below, action 1"].steps[0] == (Click(3, 4 + 48),)
    found = named(task(oracle=[[{"press": ["ctrl", "a"]}], [{"type": "12"}], ["done"]]))
    assert {name for name in found if "step 2" in name and "action 1" in name} == {
        "step 2: one digit, action 1",
        "step 2: blank at the end, action 1",
    }


def test_cheats_know_what_osworlds_evaluators_read_and_run() -> None:
    checker = {
        "kind": "osworld",
        "func": ["same_text", "exact_match", "exact_match"],
        "result": [
            {"type": "vm_file", "path": PATH, "dest": "note.txt"},
            {"type": "vm_command_line", "command": "export A=b\ngsettings get org.a b"},
            {"type": "vm_command_line", "command": "[ $(date) ] && echo x"},
        ],
        "expected": [None, {"type": "rule", "rules": {"expected": "true\n"}}, None],
    }
    names = {name for name, each in named(task(checker=checker)).items() if each.family is Family.KNOWING}
    assert {f"pipe in place of {PATH}", "own gsettings in PATH"} <= names
    assert [name for name in names if name.startswith("own function")] == ["own function in place of gsettings"]


def test_answers_are_hedged_and_the_way_to_one_is_free_if_nothing_else_is_judged() -> None:
    one = task(checker={"kind": "answer", "equals": "42"}, oracle=[[{"done": "42"}]])
    answers = {
        family: {mutant.steps[-1][-1].answer for mutant in mutants_of(one) if mutant.family is family}  # type: ignore[union-attr]
        for family in (Family.ALMOST, Family.HEDGED)
    }
    assert answers == {Family.ALMOST: {"41", "42 ", ""}, Family.HEDGED: {"42 or 24x", "24x, 42, x24"}}
    answer, oracle = {"kind": "answer", "equals": "42"}, [*ORACLE[:2], [{"done": "42"}]]
    both = {"kind": "all", "checks": [answer, {"kind": "file_text", "path": PATH, "equals": "Room 12"}]}
    changed = [{name for name in named(task(checker=it, oracle=oracle)) if "step 1" in name} for it in (answer, both)]
    assert changed[0] == set()
    assert "step 1: left out" in changed[1]


def test_cheats_are_those_of_the_checker() -> None:
    commands = {mutant.name: mutant.commands for mutant in mutants_of(task()) if mutant.commands}
    assert commands[f"empty {PATH}"] == (f"mkdir -p /home/user; : > {PATH}",)
    assert commands[f"/home/user/rooms.txt copied to {PATH}"] == (f"cp /home/user/rooms.txt {PATH}",)
    assert commands[f"pipe in place of {PATH}"][0].endswith(f"mkfifo {PATH}")
    assert not any("own" in name or "settings written" in name for name in commands)
    found = named(task(checker={"kind": "cua_gym", "bundle": "/bundles/one"}))
    assert "ln -s gt results" in found["results linked to the truth in /tmp_workspace"].commands[0]
    assert not any("workspace" in name for name in named(task()))
    one = task(checker={"kind": "file_text", "path": PATH, "equals": "Room 12\nand more"})
    (search,) = (command for mutant in mutants_of(one) for command in mutant.commands if "/proc/" in command)
    assert "Room" not in search
    assert "and more" not in search


@pytest.mark.parametrize(
    ("checker", "name", "words"),
    [
        (
            {"kind": "command", "argv": ["gsettings", "get"], "stdout": {"equals": "dark"}},
            "own gsettings in PATH",
            "echo ZGFyaw== | base64 -d",
        ),
        (
            {"kind": "command", "argv": ["python3", "x.py"], "stdout": {"equals": "dark"}},
            "own module that python3 loads first",
            "b64decode('ZGFyaw==')",
        ),
        (
            {"kind": "ini_value", "path": "/home/user/a.ini", "section": "s", "key": "k", "equals": "v"},
            "settings written into /home/user/a.ini",
            "[s]\nk=v\n",
        ),
        (
            {"kind": "json_value", "path": "/home/user/a.json", "at": ["s", "k"], "equals": 5},
            "settings written into /home/user/a.json",
            '{"s": {"k": 5}}',
        ),
    ],
)
def test_cheats_know_what_a_checker_expects(checker: dict[str, Any], name: str, words: str) -> None:
    (command,) = named(task(checker=checker))[name].commands
    assert words in command


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=6, max_size=12))
def test_commands_survive_any_text(text: str) -> None:
    path = f"/home/user/{text.replace('/', '_')}.txt"
    one = task(checker={"kind": "file_text", "path": path, "equals": text})
    script = "\n".join(command for mutant in mutants_of(one) for command in mutant.commands)
    assert subprocess.run(["sh", "-n", "-c", script], check=False).returncode == 0


def test_damage_and_repetitions_follow_the_oracle() -> None:
    damage = {mutant.name: mutant for mutant in mutants_of(task()) if mutant.family is Family.DAMAGE}
    deleted = damage["/home/user/rooms.txt deleted"]
    assert (deleted.shared_count, deleted.steps) == (2, ((Done(),),))
    assert not deleted.expects_success
    repeated = [mutant for mutant in mutants_of(task()) if mutant.expects_success]
    assert [(mutant.steps, mutant.shared_count, bool(mutant.commands)) for mutant in repeated] == [
        (task().oracle, 0, False),
        (task().oracle, 0, False),
        (((Done(),),), 2, True),
        (((Done(),),), 2, True),
    ]


def test_a_task_that_changed_since_it_passed_is_named(tmp_path: Path) -> None:
    def report(one: Task, **changes: Any) -> AttackReport:
        digest = judged_digest(one)
        results = [
            Attack(
                task_id=one.task_id,
                mutant=mutant.name,
                family=mutant.family.value,
                digest=mutant.digest(digest),
                script=tuple(mutant.script),
                **({"expects_success": mutant.expects_success, "score": float(mutant.expects_success)} | changes),
            )
            for mutant in mutants_of(one)
        ]
        return AttackReport(results=results, verdicts={})

    one, file = task(), tmp_path / "passed.yaml"
    write_passed(file, [one], report(one), runs_guests=True)
    assert read_passed(file) == {"mine/note": attack_digest(one, runs_guests=True)}
    changed = task(checker={"kind": "file_text", "path": PATH, "equals": "Room 13"})
    assert read_passed(file)["mine/note"] != attack_digest(changed, runs_guests=True)
    # Not all its mutants were played, or one survived.
    write_passed(file, [changed], report(one), runs_guests=True)
    assert read_passed(file) == {}
    write_passed(file, [one], report(one, expects_success=False, score=1.0), runs_guests=True)
    assert read_passed(file) == {}
    # The checker is not at fault if a cheat cannot be made, but an oracle must be playable.
    impossible = report(one, expects_success=False, score=None, impossible=True)
    assert (impossible.passed, impossible.counts()["mine"]["impossible"]) == (True, len(impossible.results))
    assert not report(one, expects_success=True, score=None, impossible=True).passed
    file.write_text("- 1")
    with pytest.raises(ConfigError, match=r"passed\.yaml cannot be read"):
        read_passed(file)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "- {task: a, mutant: b, digest: c, verdict: fine, why: d}",
            r": 0\.verdict: must be 'equivalent', 'wrong' or 'und",
        ),
        ("- {task: a: b}", r": line 1: expected"),
    ],
)
def test_an_invalid_verdict_is_one_line_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "verdicts.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"^verdicts {file} cannot be read{problem}[^\n]*\Z"):
        read_verdicts(file)


def test_a_survivor_is_printed_with_the_digest_that_its_verdict_needs() -> None:
    [survivor] = [
        Attack(
            task_id="mine/note", mutant="m", family="almost", digest="0f" * 8, script=(), expects_success=False, score=1
        )
    ]
    console = Console(record=True, width=200)
    AttackReport(results=[survivor], verdicts={}).print(console)
    assert survivor.digest in console.export_text()


def test_a_task_that_cannot_be_attacked_is_an_error_if_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    one, solved = task(oracle=[]), task(task_id="mine/solved")
    infeasible = task(task_id="mine/never", checker=None, infeasible=True, oracle=[["fail"]])
    found = [one, solved, infeasible]
    assert attackable(found, wanted=["mine/"], given=()) == [solved]
    assert "tasks without a checker or an oracle: 2, skipped" in capsys.readouterr().err
    # Its empty oracle in the file says that it is attacked by cheats.
    assert attackable(found, wanted=["mine/note", "mine/solved"], given=["mine/note"]) == [one, solved]
    with pytest.raises(ConfigError, match="task mine/note has no oracle; add one, or give it in --oracles"):
        attackable(found, wanted=["mine/note"], given=())
    with pytest.raises(ConfigError, match="task mine/never has no checker"):
        attackable(found, wanted=["mine/never"], given=["mine/never"])


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


def test_expected_values_of_opencomputer_are_changed_in_commands() -> None:
    checks = [{"command": f"check-cell {PATH} B2 Total", "key": "match", "expected": True}]
    checker = {"kind": "opencomputer", "root": "/r", "task": "t", "app": "calc", "checks": checks}
    oracle = [[{"run_shell": {"command": "set B2 Total; echo END"}}], ["done"]]
    found = named(task(checker=checker, setup=[], tools=["shell"], oracle=oracle))
    changed = {name: each.steps[0][0].command for name, each in found.items() if ": one" in name or "case" in name}  # type: ignore[union-attr]
    assert changed == {
        "step 1: B2: one character, action 1": "set A2 Total; echo END",
        "step 1: B2: one digit, action 1": "set B1 Total; echo END",
        "step 1: B2: other case, action 1": "set b2 Total; echo END",
        "step 1: Total: one character, action 1": "set B2 Totak; echo END",
        "step 1: Total: other case, action 1": "set B2 tOTAL; echo END",
    }
    assert f"pipe in place of {PATH}" in found


def result(name: str, **fields: Any) -> Attack:
    plain: dict[str, Any] = {"family": "almost", "digest": name, "script": (), "expects_success": False, "detail": ""}
    return Attack(task_id=f"mine/{name[0]}", mutant=name, **(plain | fields))


def test_acceptance_counts_scored_mutants_over_tasks() -> None:
    verdict = Verdict(task="mine/a", mutant="a4", digest="a4", verdict="equivalent", why="Same.")
    results = [
        result("a1", score=1.0),
        result("a2", score=0.5),
        result("a3", reason="EVALUATOR_FAILED"),
        result("a4", score=1.0),
        result("a5", impossible=True),
        result("b1", score=0.0),
        result("b2", score=1.0, expects_success=True, family="repeated"),
    ]
    [row] = AttackReport(results=results, verdicts={"a4": verdict}).acceptance()
    assert (row.task_count, row.mutant_count, row.accepted_count) == (2, 3, 1)
    assert (row.low, row.high) == (0.0, 0.5)
    few, many = acceptance("s", "almost", [(10, 10), (0, 10)]), acceptance("s", "almost", [(1, 1), (0, 1)] * 100)
    assert (few.low, few.high) == (0.0, 1.0)
    assert 0.4 < many.low < 0.5 < many.high < 0.6


@pytest.mark.parametrize(("accepted", "low", "high"), [(0, 0.0, 0.3), (2, 0.7, 1.0)])
def test_an_interval_has_a_width_if_all_or_none_are_accepted(accepted: int, low: float, high: float) -> None:
    row = acceptance("s", "almost", [(accepted, 2)] * 10)
    assert (row.low, row.high) == pytest.approx((low, high))


def printed(*results: Attack) -> list[str]:
    console = Console(width=80, record=True, file=io.StringIO())
    AttackReport(results=results, verdicts={}).print(console)
    return console.export_text().splitlines()


def test_a_report_ends_with_an_entry_that_settles_an_open_mutant(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.yaml"
    survivors = [result("a: 1", score=1.0, digest="0123456789012345"), result("b", score=1.0)]
    unplayed = result("c", reason="NOT_PLAYED")
    *_, explanation, entry = printed(unplayed, *survivors)
    assert explanation.startswith("survivors: 2; fix the checker or add verdicts")
    assert not any("verdicts" in line for line in printed(unplayed))
    path.write_text(entry, encoding="utf-8")
    settled = AttackReport(results=survivors, verdicts=read_verdicts(path))
    assert [each.mutant for each in settled.open] == ["b"]


@pytest.mark.parametrize("accepted", [0, 1, 12])
def test_one_task_does_not_bound_the_share_of_others(accepted: int) -> None:
    row = acceptance("s", "almost", [(accepted, 12)])
    assert (row.low, row.high) == (0.0, 1.0)
    assert f"{accepted} of 12 wrong mutants accepted (tasks: 1), " in str(row)


def test_what_a_mutant_does_to_its_guest_or_checker_is_not_played_again() -> None:
    reasons = ["GUEST_ENDED", "EVALUATOR_FAILED", "NOT_PLAYED", "MACHINE_LOST"]
    assert [result("a1", reason=reason).is_unscored for reason in reasons] == [False, False, True, True]
    states = {AttackReport(results=[], verdicts={}).state_of(result("a1", reason=reason)) for reason in reasons}
    assert states == {"no score"}


def test_a_sample_has_some_mutants_of_each_family_and_always_the_same() -> None:
    everything = mutants_of(task())
    assert sampled(everything, "0", None) == everything
    chosen = sampled(everything, "0", 2)
    assert {family: sum(each.family is family for each in chosen) for family in Family} == {
        family: min(2, sum(each.family is family for each in everything)) for family in Family
    }
    assert {each.name for each in chosen} == {each.name for each in sampled(everything[::-1], "0", 2)}


def test_a_file_of_oracles_may_have_own_mutants(tmp_path: Path) -> None:
    path = tmp_path / "oracles.jsonl"
    own = {"name": "undone", "family": "early", "steps": [[{"press": ["ctrl", "z"]}]], "after_oracle": True}
    path.write_text(json.dumps({"task_id": "mine/note", "steps": ORACLE, "mutants": [own]}), encoding="utf-8")
    [mutant] = read_mutants(path, [task()])["mine/note"]
    assert (mutant.name, mutant.family, mutant.shared_count) == ("own: undone", Family.EARLY, 2)
    assert mutant.steps == ((PressKeys(("ctrl", "z")),), (Done(),))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "oracles.jsonl cannot be read: No such file or directory"),
        ("- task_id: a", "oracles.jsonl, line 1: is not JSON: Expecting value"),
        ("\n", "oracles.jsonl, line 1: is not JSON"),
        ('{"task_id": "mine/note", "steps": []}\n[1]', "line 2: is not an object with task_id and steps"),
        ('{"mine/note": []}', "line 1: is not an object with task_id and steps; write it with `envd tasks oracles`"),
    ],
)
def test_a_wrong_file_of_oracles_is_refused_in_plain_words(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "oracles.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read_oracles(path)


def test_a_mutant_without_a_field_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "oracles.jsonl"
    path.write_text(json.dumps({"task_id": "mine/note", "steps": ORACLE, "mutants": [{"name": "x"}]}), encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1: mutants: family, steps: missing in a mutant"):
        read_mutants(path, [task()])


@pytest.mark.parametrize("wrong", [{"family": "other"}, {"steps": [["nothing"]]}, {"after": True}])
def test_wrong_own_mutants_are_refused_by_line(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "oracles.jsonl"
    own = {"name": "x", "family": "early", "steps": []} | wrong
    path.write_text(json.dumps({"task_id": "mine/note", "steps": ORACLE, "mutants": [own]}), encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1: mutants"):
        read_mutants(path, [task()])


def test_a_task_without_an_oracle_is_attacked_by_cheats_only() -> None:
    families = {mutant.family for mutant in mutants_of(task(oracle=[]))}
    assert families == {Family.LAZY, Family.KNOWING}
