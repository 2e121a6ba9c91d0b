"""`envd tasks parity` on drawn desktops: agreement, a disagreement, void scripts, and a run that continues."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envd.drawn import backend
from envd.hypervisor.machine import Hypervisor
from tests.support.command import run_envd
from tests.support.faulty import Faults, FaultyHypervisor
from tests.support.served import ServedDaemon

TASKS = """
version: 1
suite: mine
tasks:
  - name: note
    level: 1
    instruction: Write it.
    checker: {kind: file_text, path: /home/user/note.txt, equals: Room 12}
    oracle: [[{click: {x: 379, y: 311}}, {type: Room 12}], [{press: [ctrl, s]}], [done]]
  - name: box
    level: 1
    instruction: Check it.
    checker: {kind: on_screen, role: check-box, states: [checked]}
    oracle: [[{click: {x: 822, y: 167}}], [done]]
"""
#: The checker of another release: it wants another text.
OTHER_CHECKER = TASKS.replace("equals: Room 12", "equals: Room 13")
#: One whose checker prints nothing.
BROKEN_CHECKER = TASKS.replace(
    "{kind: file_text, path: /home/user/note.txt, equals: Room 12}", "{kind: command, argv: [no-such-program]}"
)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.yaml"
    path.write_text(TASKS, encoding="utf-8")
    return path


def serve(suite: Path, name: str, text: str) -> ServedDaemon:
    tasks = suite.parent / f"{name}.yaml"
    tasks.write_text(text, encoding="utf-8")
    flags = ("--hypervisor", "fake", "--pool", "4", "--tasks", f"mine={tasks}")
    return ServedDaemon(suite.parent / name, "", *flags)


@pytest.fixture
def other_daemon(suite: Path) -> Iterator[str]:
    """Return the address of a daemon whose checker of one task differs."""
    with serve(suite, "other", OTHER_CHECKER) as daemon:
        yield daemon.wait_for(r"listening on (\S+)")


def parity(suite: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    places = [f"--{name}-dir={suite.parent / name}" for name in ("cache", "state")]
    command = ["tasks", "parity", "mine/", "--tasks", str(suite), "--out", str(suite.parent / "out"), "--json"]
    done = run_envd(*command, *places, "--walks", "1", *arguments)
    return done.status, json.loads(done.out) if done.out else {}, done.err


def results(suite: Path) -> list[dict[str, Any]]:
    lines = (suite.parent / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_two_equal_sides_agree_and_nothing_is_played_twice(suite: Path) -> None:
    status, found, _ = parity(suite, "--left", "fake", "--right", "fake")
    assert (status, found["scripts"], found["agreed"], found["kappa"]) == (0, 6, 6, 1.0)
    assert found["kinds"]["oracle"] == {
        "scripts": 2,
        "scored": 2,
        "agreed": 2,
        "void": 0,
        "not_played": 0,
        "agreement": 1.0,
        "kappa": None,
    }
    assert found["screens"] == {when: {"compared": 6, "equal": 6, "named": 0, "other": 0} for when in ("first", "last")}
    file = suite.parent / "out" / "results.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 12
    # A kill cut off the last line, of the right side.
    file.write_text("\n".join([*lines[:-1], lines[-1][:40]]), encoding="utf-8")
    status, again, err = parity(suite, "--left", "fake", "--right", "fake")
    assert (status, again["agreed"]) == (0, 6)
    assert "left: 6 scripts have a score and are not played again" in err
    assert "right: 5 scripts have a score and are not played again" in err
    assert file.read_text(encoding="utf-8").splitlines()[:-1] == lines[:-1]


def test_a_checker_that_differs_in_a_running_daemon_is_found_and_shown(suite: Path, other_daemon: str) -> None:
    status, found, _ = parity(suite, "--left", "fake", "--right", other_daemon)
    assert (status, found["scored"], found["agreed"], found["void"]) == (1, 6, 5, 0)
    [differs] = found["disagreements"]
    assert (differs["task_id"], differs["script"]) == ("mine/note", "oracle")
    assert (differs["left"]["score"], differs["right"]["score"]) == (1.0, 0.0)
    assert "Room 13" in differs["right"]["detail"]
    assert differs["left"]["basis_digest"] != differs["right"]["basis_digest"]
    # By hand: 5 of 6 agree; left has the scores 1, 1, 0, 0, 0, 0 and right 1, 0, 0, 0, 0, 0: (30 - 22) / (36 - 22).
    assert found["kappa"] == pytest.approx(8 / 14)
    page = (suite.parent / "out" / "parity.html").read_text(encoding="utf-8")
    assert "mine/note: oracle" in page
    assert "last screen, right" in page


@pytest.mark.long
def test_a_daemon_is_compared_with_its_successor_at_the_same_address(suite: Path) -> None:
    with serve(suite, "before", TASKS) as daemon:
        address = daemon.wait_for(r"listening on (\S+)")
        status, before, _ = parity(suite, "--left", address)
        assert (status, before["not_played"]) == (0, 6)
        daemon.end()
    # The left side has its scores, so its daemon is not called.
    status, found, _ = parity(suite, "--left", address, "--right", "fake")
    assert (status, found["agreed"], found["not_played"]) == (0, 6, 0)


def test_a_checker_without_a_verdict_is_void_and_no_score(suite: Path) -> None:
    with serve(suite, "broken", BROKEN_CHECKER) as daemon:
        status, found, _ = parity(
            suite, "--walks", "0", "--left", "fake", "--right", daemon.wait_for(r"listening on (\S+)")
        )
    assert (status, found["scored"], found["agreed"], found["void"]) == (1, 2, 2, 2)
    assert found["disagreements"] == []
    assert {each["task_id"] for each in found["void_scripts"]} == {"mine/note"}
    assert all(each["right"]["score"] is None for each in found["void_scripts"])
    assert all("EVALUATOR_FAILED" in each["right"]["detail"] for each in found["void_scripts"])
    # What is void is played again: it may have been an accident.
    scored = [each for each in results(suite) if each["side"] == "right" and each["score"] is not None]
    status, found, err = parity(suite, "--walks", "0", "--left", "fake", "--right", "fake")
    assert (status, found["void"], len(scored)) == (0, 0, 2)
    assert "left: 4 scripts have a score" in err


def test_a_lost_machine_is_void_and_the_other_scripts_are_played(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_faulty(*_: object) -> Hypervisor:
        return FaultyHypervisor(faults=Faults(die_after_inputs=5))

    monkeypatch.setattr(backend, "BACKEND", replace(backend.BACKEND, open=open_faulty))
    status, found, _ = parity(suite, "--left", "fake", "--walks", "0")
    assert status == 1
    scores = {(each["task_id"], each["script"]): each["score"] for each in results(suite)}
    assert scores == {
        ("mine/note", "oracle"): None,
        ("mine/note", "nothing"): 0.0,
        ("mine/box", "oracle"): 1.0,
        ("mine/box", "nothing"): 0.0,
    }
    [lost] = found["void_scripts"]
    assert "MACHINE_LOST" in lost["left"]["detail"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--left", "vbox:"), "--left 'vbox:' is not supported"),
        (("--left", "fake", "--right", "desktop-env"), "--right desktop-env"),
        (("--left", "fake", "--right", "desktop-env", "--hypervisor", "fake"), "it needs real guests"),
        (("--left", "fake", "--trajectories", "/nowhere"), "--trajectories /nowhere"),
    ],
)
def test_a_side_or_trajectory_that_cannot_be_used_is_refused(
    suite: Path, arguments: tuple[str, ...], problem: str
) -> None:
    status, _, err = parity(suite, *arguments)
    assert status == 2
    assert problem in err
