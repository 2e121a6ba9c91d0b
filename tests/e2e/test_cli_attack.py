"""`envd tasks attack` on drawn desktops: what it finds, verdicts, and a run that was interrupted."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command import run_envd

SOUND = """
version: 1
suite: mine
tasks:
  - name: note
    level: 1
    instruction: Write it.
    checker: {kind: file_text, path: /home/user/note.txt, equals: Room 12}
    oracle: [[{click: {x: 379, y: 311}}, {type: Room 12}], [{press: [ctrl, s]}], [done]]
"""
CARELESS = SOUND.replace("equals: Room 12", "contains: oom 1")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.yaml"
    path.write_text(SOUND, encoding="utf-8")
    return path


def attack(suite: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    inside = {name: str(suite.parent / name) for name in ("cache", "out", "state")}
    places = [
        "--tasks",
        str(suite),
        "--cache-dir",
        inside["cache"],
        "--out",
        inside["out"],
        "--state-dir",
        inside["state"],
    ]
    verdicts = ["--verdicts", str(suite.parent / "verdicts.yaml")]
    command = ["tasks", "attack", "mine/note", "--hypervisor", "fake", "--jobs", "8", "--json"]
    done = run_envd(*command, *places, *verdicts, *arguments)
    return done.status, json.loads(done.out) if done.out else {}, done.err


def test_a_careless_checker_is_found_and_shown(suite: Path) -> None:
    suite.write_text(CARELESS, encoding="utf-8")
    page = suite.parent / "page.html"
    status, found, _ = attack(suite, "--html", str(page))
    wrong = {each["mutant"]: each for each in found["open"] if "twice" not in each["mutant"]}
    assert status == 1
    assert {"step 1: one digit, action 2", "step 1: blank at the end, action 2"} <= wrong.keys()
    assert all(each["state"] == "survivor" and each["score"] == 1 and each["picture"] for each in wrong.values())
    text = page.read_text(encoding="utf-8")
    assert "mine/note: step 1: one digit, action 2" in text
    assert "data:image/png;base64,iVBOR" in text


@pytest.mark.long
def test_a_sound_checker_kills_all_mutants_that_are_not_equivalent(suite: Path) -> None:
    status, found, _ = attack(suite)
    assert status == 1
    assert {each["mutant"] for each in found["open"]} <= {"step 1: below, action 1", "step 1: twice", "step 2: twice"}
    verdicts = [
        {key: each[key] for key in ("mutant", "digest")}
        | {"task": "mine/note", "verdict": "equivalent", "why": "Same."}
        for each in found["open"]
    ]
    (suite.parent / "verdicts.yaml").write_text(yaml.safe_dump(verdicts), encoding="utf-8")
    status, again, _ = attack(suite)
    counts = again["suites"]["mine"]
    assert (status, again["open"], counts["killed"]) == (0, [], counts["not_equivalent"])
    assert counts["equivalent"] == len(verdicts)


@pytest.mark.long
def test_a_second_run_plays_only_what_is_missing(suite: Path) -> None:
    attack(suite)
    results = suite.parent / "out" / "results.jsonl"
    lines = results.read_text(encoding="utf-8").splitlines()
    # A kill cut off the last line.
    results.write_text("\n".join([*lines[:-2], lines[-2][:40]]), encoding="utf-8")
    _, _, err = attack(suite)
    assert f"has {len(lines) - 2} results; their mutants are not played again" in err
    again = results.read_text(encoding="utf-8").splitlines()
    assert again[: len(lines) - 2] == lines[:-2]
    assert {json.loads(line)["digest"] for line in again} == {json.loads(line)["digest"] for line in lines}


@pytest.mark.long
def test_an_interrupted_attack_keeps_its_results_and_ends_its_daemon(suite: Path) -> None:
    results = suite.parent / "out" / "results.jsonl"
    command = [sys.executable, "-m", "envd", "tasks", "attack", "mine/note", "--hypervisor", "fake", "--jobs", "1"]
    places = ["--tasks", str(suite), "--out", str(results.parent), "--state-dir", str(suite.parent / "state")]
    background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    with subprocess.Popen([*background, *command, *places, "--cache-dir", str(suite.parent / "cache")]) as process:
        while process.poll() is None and not (results.is_file() and results.read_text(encoding="utf-8")):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
    before = results.read_text(encoding="utf-8").splitlines()
    status, found, _ = attack(suite, "--state-dir", str(suite.parent / "state"))
    after = results.read_text(encoding="utf-8").splitlines()
    assert (status, after[: len(before)]) == (1, before)
    assert len(after) == found["suites"]["mine"]["mutants"] > len(before)


@pytest.mark.long
def test_a_task_that_cannot_be_set_up_does_not_stop_the_others(suite: Path) -> None:
    extra = """
  - name: solved-at-start
    level: 1
    instruction: Write it.
    setup: [{kind: write_file, path: /home/user/note.txt, text: Room 12}]
    checker: {kind: file_text, path: /home/user/note.txt, equals: Room 12}
    oracle: [[{type: Room 12}], [done]]
"""
    suite.write_text(SOUND + extra, encoding="utf-8")
    status, found, _ = attack(suite, "mine/solved-at-start", "--jobs", "16")
    unplayed = [each for each in found["open"] if each["task_id"] == "mine/solved-at-start"]
    assert status == 1
    assert all(each["detail"].startswith("not played: ") for each in unplayed)
    counts = found["suites"]["mine"]
    assert counts["no score"] == len(unplayed) > 5
    attack(suite, "mine/solved-at-start", "--jobs", "16")
    lines = (suite.parent / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == counts["mutants"] + len(unplayed), "those without a score are played again"
    assert counts["killed"] == counts["mutants"] - len(found["open"]) > 5


@pytest.mark.parametrize("line", ["{", "[]", '{"task_id": "mine/note"}'])
def test_damaged_results_are_refused(suite: Path, line: str) -> None:
    (suite.parent / "out").mkdir()
    (suite.parent / "out" / "results.jsonl").write_text(line + "\n", encoding="utf-8")
    status, _, err = attack(suite)
    assert (status, "are damaged" in err) == (2, True)


@pytest.mark.parametrize(
    ("option", "path", "status", "text"),
    [
        ("--out", "/dev/null", 2, "results /dev/null/results.jsonl cannot be written: "),
        ("--state-dir", "/dev/null", 2, "state_dir /dev/null/attack: Not a directory; choose another with --state-dir"),
        ("--html", "/proc/none/page.html", 1, "/proc/none: no such file or directory"),
        ("--passed", "/proc/none/passed.yaml", 1, "/proc/none: no such file or directory"),
    ],
)
def test_a_path_that_cannot_be_used_is_refused_before_anything_is_played(
    suite: Path, option: str, path: str, status: int, text: str
) -> None:
    found, output, err = attack(suite, option, path)
    assert (found, text in output["error"]["message"]) == (status, True), err
    results = suite.parent / "out" / "results.jsonl"
    assert not results.exists() or not results.read_text(encoding="utf-8")


def test_an_invalid_verdict_is_refused(suite: Path) -> None:
    (suite.parent / "verdicts.yaml").write_text("- {task: a, mutant: b, digest: c, verdict: fine, why: d}\n")
    status, _, err = attack(suite)
    assert (status, "verdicts.yaml cannot be read" in err) == (2, True)


def test_a_task_without_an_oracle_is_attacked_with_one_from_a_file(suite: Path) -> None:
    [one] = yaml.safe_load(SOUND)["tasks"]
    oracles = suite.parent / "oracles.jsonl"
    oracles.write_text(json.dumps({"task_id": "mine/note", "steps": one.pop("oracle")}) + "\n", encoding="utf-8")
    suite.write_text(yaml.safe_dump({"version": 1, "suite": "mine", "tasks": [one]}), encoding="utf-8")
    _, found, _ = attack(suite, "--oracles", str(oracles), "--family", "repeated")
    counts = {"mutants": 2, "not_equivalent": 2, "killed": 2}
    assert found == {"suites": {"mine": counts}, "acceptance": [], "open": []}


def test_a_task_with_an_empty_oracle_in_a_file_is_attacked_by_cheats_and_families_without_mutants_are_refused(
    suite: Path,
) -> None:
    [one] = yaml.safe_load(SOUND)["tasks"]
    del one["oracle"]
    suite.write_text(yaml.safe_dump({"version": 1, "suite": "mine", "tasks": [one]}), encoding="utf-8")
    oracles = suite.parent / "oracles.jsonl"
    oracles.write_text(json.dumps({"task_id": "mine/note", "steps": []}) + "\n", encoding="utf-8")
    status, found, _ = attack(suite, "--oracles", str(oracles))
    assert (status, found["suites"]["mine"]) == (0, {"mutants": 1, "not_equivalent": 1, "killed": 1})
    status, _, err = attack(suite, "--oracles", str(oracles), "--family", "damage")
    assert (status, "no mutants of damage to play; those with shell commands" in err) == (2, True), err


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[]", "line 1: is not an object with task_id and steps"),
        ('{"task_id": "mine/note", "steps": [[{"fly": {}}]]}', "oracle of mine/note: "),
    ],
)
def test_a_file_of_oracles_that_is_malformed_is_refused(suite: Path, line: str, problem: str) -> None:
    oracles = suite.parent / "oracles.jsonl"
    oracles.write_text(line, encoding="utf-8")
    status, _, err = attack(suite, "--oracles", str(oracles))
    assert (status, problem in err) == (2, True), err
